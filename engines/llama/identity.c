/* SPDX-License-Identifier: Apache-2.0
 *
 * The fields of the space. What is here must be everything that changes the bytes of a block; llama.cpp checks none of
 * it when it imports one.
 */
#include <ggml-backend.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llama/engine.h"

#define MAX_FIELDS  16u
#define VALUE_BYTES 256u

typedef struct fields {
    kvf_field field[MAX_FIELDS];
    char values[MAX_FIELDS][VALUE_BYTES];
    size_t num;
} fields;

static void add(fields *f, const char *name, const char *format, ...) __attribute__((format(printf, 3, 4)));

static void add(fields *f, const char *name, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(f->values[f->num], VALUE_BYTES, format, args);
    va_end(args);
    f->field[f->num] = (kvf_field){name, f->values[f->num]};
    f->num++;
}

static void add_digest(fields *f, const char *name, const void *bytes, size_t len) {
    uint8_t digest[32] = {0};
    char hex[65];
    EVP_Digest(bytes, len, digest, NULL, EVP_sha256(), NULL);
    for (size_t i = 0; i < sizeof digest; i++) {
        snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    }
    add(f, name, "sha256:%s", hex);
}

static const char *flash_name(enum llama_flash_attn_type type) {
    return type == LLAMA_FLASH_ATTN_TYPE_DISABLED ? "off" : type == LLAMA_FLASH_ATTN_TYPE_ENABLED ? "on" : "auto";
}

static void describe_cache(char *out, size_t size, const kvfl_cache *c) {
    snprintf(out, size, "k=%s/%zu v=%s/%zu%s layers=%u", ggml_type_name((enum ggml_type)c->k_type), c->k_row_bytes,
             ggml_type_name((enum ggml_type)c->v_type), c->v_row_bytes, c->v_trans ? " transposed" : "", c->num_layers);
}

static void add_shape(fields *f, const kvf_llama *kv, const struct llama_context_params *params) {
    const kvfl_shape *s = &kv->kind.shape;
    char caches[KVFL_MAX_CACHES][100] = {"none", ""};
    for (uint32_t i = 0; i < s->num_caches; i++) {
        describe_cache(caches[i], sizeof caches[i], &s->caches[i]);
    }
    add(f, "kv", "%s fa=%s", caches[0], flash_name(params->flash_attn_type));
    if (s->num_caches > 1) {
        add(f, "window", "%s tokens=%d %s", caches[1], llama_model_n_swa(kv->model),
            kvfl_has_states(kv) ? "at boundaries" : "whole");
    }
    if (s->has_state) {
        add(f, "state", "recurrent/%zu", s->state_end - s->state_begin);
    }
    if (s->has_ext) {
        add(f, "cells", "extended");
    }
}

/* A model with two sets of rope factors (LongRoPE) takes one or the other by the size of the context: whether that is
 * larger than what the model was trained for before it was extended (llama_model::get_rope_factors). */
static bool takes_long_factors(const kvf_llama *kv) {
    char arch[64] = "", name[128], value[32] = "";
    llama_model_meta_val_str(kv->model, "general.architecture", arch, sizeof arch);
    snprintf(name, sizeof name, "%s.rope.scaling.original_context_length", arch);
    uint64_t original = (uint64_t)llama_model_n_ctx_train(kv->model);
    if (llama_model_meta_val_str(kv->model, name, value, sizeof value) > 0) {
        original = strtoull(value, NULL, 10);
    }
    return llama_n_ctx_seq(kv->ctx) > original;
}

/* What the context was told about positions; 0 there means "as the model says", and the model is in the space. */
static void add_rope(fields *f, const kvf_llama *kv, const struct llama_context_params *p) {
    add(f, "rope", "type=%d scaling=%d base=%.9g scale=%.9g yarn=%.9g,%.9g,%.9g,%.9g,%u long=%d",
        (int)llama_model_rope_type(kv->model), (int)p->rope_scaling_type, (double)p->rope_freq_base,
        (double)p->rope_freq_scale, (double)p->yarn_ext_factor, (double)p->yarn_attn_factor, (double)p->yarn_beta_fast,
        (double)p->yarn_beta_slow, p->yarn_orig_ctx, takes_long_factors(kv));
}

/* The probe is one token. Kernels for many rows differ between builds that compute one row alike (with llamafile's
 * matrix product or not, with a BLAS, of another version), so the build is part of what computes the same numbers. */
static void add_build(fields *f) {
    char build[2048];
    int len = snprintf(build, sizeof build, "%s\n%s", llama_version(), llama_print_system_info());
    for (size_t i = 0; i < ggml_backend_dev_count() && len > 0 && (size_t)len < sizeof build; i++) {
        len +=
            snprintf(build + len, sizeof build - (size_t)len, "\n%s", ggml_backend_dev_name(ggml_backend_dev_get(i)));
    }
    add_digest(f, "build", build, strlen(build));
}

/* All of the probe but the cells, which tell sequence ids. */
static void add_probe(fields *f, const kvfl_shape *s, const uint8_t *probe) {
    uint8_t digest[32] = {0};
    EVP_MD_CTX *sha = EVP_MD_CTX_new();
    bool ok = sha != NULL && EVP_DigestInit_ex(sha, EVP_sha256(), NULL) == 1;
    for (uint32_t i = 0; i < s->num_caches && ok; i++) {
        ok = EVP_DigestUpdate(sha, probe + s->caches[i].rows, s->caches[i].end - s->caches[i].rows) == 1;
    }
    if (s->has_state && ok) {
        ok = EVP_DigestUpdate(sha, probe + s->state_rows, s->state_end - s->state_rows) == 1;
    }
    if (ok) {
        EVP_DigestFinal_ex(sha, digest, NULL);
    }
    EVP_MD_CTX_free(sha);
    add_digest(f, "probe", digest, sizeof digest);
}

static void add_rest(fields *f, const kvf_llama *kv, const kvf_llama_options *o, const uint8_t *probe) {
    const char *rotation = getenv("LLAMA_ATTN_ROT_DISABLE"); /* read by llama.cpp when it makes a quantised cache */
    if (rotation != NULL) {
        add(f, "rotation", "disable=%.64s", rotation);
    }
    if (kv->step % KVFL_MIN_BATCH != 0) {
        add(f, "batch", "%u",
            kv->step); /* batches too small for kernels that agree: blocks of such a context are its own */
    }
    if (o->adapters != NULL && o->adapters[0] != '\0') {
        add_digest(f, "adapters", o->adapters, strlen(o->adapters));
    }
    if (o->tenant != NULL && o->tenant[0] != '\0') {
        add_digest(f, "tenant", o->tenant, strlen(o->tenant));
    }
    if (!o->portable) {
        add_probe(f, &kv->kind.shape, probe);
        add_build(f);
    }
}

kvf_status kvfl_open_space(kvf_llama *kv, kvf_error *err, const kvf_llama_options *o, const uint8_t *probe) {
    fields f = {.num = 0};
    char weights[65];
    kvf_status status = kvfl_hash_weights(weights, err, o->model_path);
    if (status != KVF_OK) {
        return status;
    }
    add(&f, "engine", "llama.cpp state-seq-%d", LLAMA_STATE_SEQ_VERSION);
    add(&f, "model", "sha256:%s", weights);
    add_shape(&f, kv, o->context_params);
    add_rope(&f, kv, o->context_params);
    add_rest(&f, kv, o, probe);
    kvf_space_options options = {.struct_size = sizeof options,
                                 .block_tokens = kv->block_tokens,
                                 .secret = o->secret,
                                 .secret_len = o->secret_len};
    return kvf_space_open(&kv->space, err, kv->store, f.field, f.num, &options);
}
