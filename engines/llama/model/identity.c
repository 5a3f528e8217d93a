/* SPDX-License-Identifier: Apache-2.0
 *
 * The fields of the space. They must cover everything that changes the bytes of a block; llama.cpp checks none of it
 * when it imports one.
 */
#include <ggml-backend.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llama/model/model.h"

#define MAX_FIELDS  20u
#define VALUE_BYTES 256u

typedef struct fields {
    kvf_field field[MAX_FIELDS];
    char values[MAX_FIELDS][VALUE_BYTES];
    size_t num;
    bool failed; /* no memory for a hash */
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
    f->failed = EVP_Digest(bytes, len, digest, NULL, EVP_sha256(), NULL) != 1 || f->failed;
    kvfl_hex(hex, digest, sizeof digest);
    add(f, name, "sha256:%s", hex);
}

/* "auto" is off where a layer's device lacks it. Where all devices are CPUs it is on, so both have one name. */
static const char *flash_name(enum llama_flash_attn_type type) {
    return type == LLAMA_FLASH_ATTN_TYPE_DISABLED                              ? "off"
           : type == LLAMA_FLASH_ATTN_TYPE_ENABLED && kvfl_has_other_devices() ? "on"
                                                                               : "auto";
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

/* A model with two sets of rope factors (LongRoPE) chooses one by the size of the context: whether that is larger than
 * what the model was trained for before it was extended (llama_model::get_rope_factors). */
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

/* Whether the model says nothing of yarn, so that llama.cpp takes its own numbers (llama_hparams) where a context leaves
 * them open. */
static bool is_without_yarn(const struct llama_model *model) {
    static const char *const keys[] = {"ext_factor", "attn_factor", "beta_fast", "beta_slow", "log_multiplier"};
    char arch[64] = "", name[128], value[32];
    llama_model_meta_val_str(model, "general.architecture", arch, sizeof arch);
    bool without = strcmp(arch, "grok") != 0; /* which has numbers of its own */
    for (size_t i = 0; i < sizeof keys / sizeof *keys && without; i++) {
        snprintf(name, sizeof name, "%s.rope.scaling.yarn_%s", arch, keys[i]);
        without = llama_model_meta_val_str(model, name, value, sizeof value) < 0;
    }
    return without;
}

/* A number of yarn: -1 where it is left open, or says what llama.cpp takes then. llama-cpp-python writes those numbers
 * out, and its blocks are those of llama-server. */
static double open_or(float told, float otherwise) {
    return told < 0 || told == otherwise ? -1 : (double)told;
}

/* What the context was told about positions. 0 there means "as the model says", and the model is in the space. */
static void add_rope(fields *f, const kvf_llama *kv, const struct llama_context_params *p,
                     const kvfl_model_name *name) {
    /* llama.cpp tells what the file says, and not what was set over it. */
    bool without = name->overrides[0] == '\0' && is_without_yarn(kv->model);
    add(f, "rope", "type=%d scaling=%d base=%.9g scale=%.9g yarn=%.9g,%.9g,%.9g,%.9g,%u long=%d",
        (int)llama_model_rope_type(kv->model), (int)p->rope_scaling_type, (double)p->rope_freq_base,
        (double)p->rope_freq_scale, (double)p->yarn_ext_factor, open_or(p->yarn_attn_factor, without ? 1 : -1),
        open_or(p->yarn_beta_fast, without ? 32 : -1), open_or(p->yarn_beta_slow, without ? 1 : -1), p->yarn_orig_ctx,
        takes_long_factors(kv));
}

/* The environment's settings of ggml, some of which choose kernels. */
static void put_environment(EVP_MD_CTX *sha) {
    for (char **e = environ; *e != NULL; e++) {
        if (strncmp(*e, "GGML_", 5) == 0) {
            EVP_DigestUpdate(sha, *e, strlen(*e) + 1);
        }
    }
}

/* The probe has few tokens. Kernels for many rows differ between builds that compute few tokens alike (with or without
 * llamafile's matrix product, with a BLAS, of another version), and between places where a tensor may lie. So these are
 * part of the identity. */
static void add_build(fields *f, const struct llama_context_params *p, const kvfl_model_name *name) {
    uint8_t digest[32] = {0};
    EVP_MD_CTX *sha = EVP_MD_CTX_new();
    if (sha != NULL && EVP_DigestInit_ex(sha, EVP_sha256(), NULL) == 1) {
        const char *version = llama_version(), *features = llama_print_system_info();
        EVP_DigestUpdate(sha, version, strlen(version) + 1);
        EVP_DigestUpdate(sha, features, strlen(features) + 1);
        for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
            const char *device = ggml_backend_dev_name(ggml_backend_dev_get(i));
            EVP_DigestUpdate(sha, device, strlen(device) + 1);
        }
        if (kvfl_has_other_devices()) {
            const uint8_t offload[] = {p->offload_kqv, p->op_offload};
            EVP_DigestUpdate(sha, offload, sizeof offload);
        }
        EVP_DigestUpdate(sha, name->placement, strlen(name->placement));
        put_environment(sha);
        f->failed = EVP_DigestFinal_ex(sha, digest, NULL) != 1 || f->failed;
    } else {
        f->failed = true;
    }
    EVP_MD_CTX_free(sha);
    add_digest(f, "build", digest, sizeof digest);
}

/* ---- what all spaces of a context have ---- */

/* A copy of the program's; NULL: none. */
typedef struct secret {
    void *bytes;
    size_t len;
} secret;

struct kvfl_terms {
    fields fields; /* everything except the adapters and their probe */
    bool portable;
    secret secret, previous;
};

static void add_rest(fields *f, const kvf_llama *kv, const kvf_llama_options *o, const kvfl_model_name *name) {
    const char *rotation = getenv("LLAMA_ATTN_ROT_DISABLE"); /* read by llama.cpp when it makes a quantised cache */
    if (rotation != NULL) {
        add(f, "rotation", "disable=%.64s", rotation);
    }
    if (kv->step % KVFL_MIN_BATCH != 0) {
        /* Batches too small for kernels that agree, and single tokens, which round by the number of threads: blocks of
         * such a context are not shared with others. */
        add(f, "batch", "%u threads=%d,%d", kv->step, llama_n_threads(kv->ctx), llama_n_threads_batch(kv->ctx));
    }
    if (o->tenant != NULL && o->tenant[0] != '\0') {
        add_digest(f, "tenant", o->tenant, strlen(o->tenant));
    }
    if (!o->portable) {
        add_build(f, o->context_params, name);
    }
}

/* Metadata that overrides the file's own. It may include the size at which a model switches its rope factors, and then
 * no getter tells that. */
static void add_overrides(fields *f, const kvf_llama *kv, const kvfl_model_name *name) {
    if (name->overrides[0] != '\0') {
        add(f, "overrides", "sha256:%s n_ctx=%u", name->overrides, llama_n_ctx_seq(kv->ctx));
    }
}

static bool keep_secret(secret *own, const void *bytes, size_t len) {
    if (bytes == NULL) {
        return true;
    }
    own->bytes = malloc(len + 1);
    if (own->bytes == NULL) {
        return false;
    }
    memcpy(own->bytes, bytes, len);
    own->len = len;
    return true;
}

static void drop_secret(secret *own) {
    if (own->bytes != NULL) {
        OPENSSL_cleanse(own->bytes, own->len);
        free(own->bytes);
    }
}

kvf_status kvfl_set_terms(kvf_llama *kv, kvf_error *err, const kvf_llama_options *o, const kvfl_model_name *name) {
    struct kvfl_terms *t = calloc(1, sizeof *t);
    kv->terms = t;
    if (t == NULL) {
        return kvfl_fail(err, KVF_NOMEM, "no memory to identify the blocks");
    }
    t->portable = o->portable != 0;
    /* "cold": all blocks are computed from their beginning, which was not so in earlier versions. */
    add(&t->fields, "engine", "llama.cpp state-seq-%d cold", LLAMA_STATE_SEQ_VERSION);
    add(&t->fields, "model", "sha256:%s", name->weights);
    add_overrides(&t->fields, kv, name);
    add_shape(&t->fields, kv, o->context_params);
    add_rope(&t->fields, kv, o->context_params, name);
    add_rest(&t->fields, kv, o, name);
    if (!keep_secret(&t->secret, o->secret, o->secret_len) ||
        !keep_secret(&t->previous, o->previous_secret, o->previous_secret_len)) {
        return kvfl_fail(err, KVF_NOMEM, "no memory to identify the blocks");
    }
    return KVF_OK;
}

void kvfl_free_terms(struct kvfl_terms *t) {
    if (t != NULL) {
        drop_secret(&t->secret);
        drop_secret(&t->previous);
    }
    free(t);
}

/* ---- one of them ---- */

bool kvfl_needs_probe(const kvf_llama *kv) {
    return kv->terms != NULL && !kv->terms->portable;
}

kvf_status kvfl_open_space(const kvf_llama *kv, kvf_space **out, kvf_error *err, const char *adapters) {
    const struct kvfl_terms *t = kv->terms;
    fields own = {.num = 0};
    kvf_field all[2 * MAX_FIELDS];
    if (adapters[0] != '\0') {
        add_digest(&own, "adapters", adapters, strlen(adapters));
    }
    if (!t->portable) {
        add_digest(&own, "probe", kv->kind.probe, sizeof kv->kind.probe);
    }
    if (t->fields.failed || own.failed) {
        return kvfl_fail(err, KVF_NOMEM, "no memory to identify the blocks");
    }
    memcpy(all, t->fields.field, t->fields.num * sizeof *all);
    memcpy(all + t->fields.num, own.field, own.num * sizeof *all);
    kvf_space_options options = {.struct_size = sizeof options,
                                 .block_tokens = kv->block_tokens,
                                 .secret = t->secret.bytes,
                                 .secret_len = t->secret.len,
                                 .previous_secret = t->previous.bytes,
                                 .previous_secret_len = t->previous.len};
    return kvf_space_open(out, err, kv->store, all, t->fields.num + own.num, &options);
}
