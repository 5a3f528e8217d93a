/* SPDX-License-Identifier: Apache-2.0 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <ggml-backend.h>

#include "llama/engine.h"

#define DEFAULT_BUDGET_MS 10000u
#define MAX_BLOCK_TOKENS 4096u
#define PAGE 4096u
#define PROBE_POSITION 977 /* not 0, where every rotation is the identity */

int64_t kvfl_now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

kvf_status kvfl_fail(kvf_error *err, kvf_status status, const char *format, ...) {
    if (err != NULL) {
        va_list args;
        va_start(args, format);
        err->status = status;
        vsnprintf(err->what, sizeof err->what, format, args);
        va_end(args);
    }
    return status;
}

/* ---- what is refused ---- */

static kvf_status refuse(kvf_error *err, const char *why) {
    return kvfl_fail(err, KVF_REFUSED, "not proven safe to reuse: %s", why);
}

static kvf_status check_model(const struct llama_model *model, kvf_error *err) {
    if (llama_model_is_recurrent(model)) {
        return refuse(err, "the model is recurrent: its state can't be cut into blocks");
    }
    if (llama_model_is_hybrid(model)) {
        return refuse(err, "the model is hybrid: a part of its memory is a recurrent state");
    }
    if (llama_model_n_swa(model) > 0) {
        return refuse(err, "the model has sliding-window attention: its cache drops what the window has passed");
    }
    if (llama_model_is_diffusion(model) || llama_model_has_encoder(model) || !llama_model_has_decoder(model)) {
        return refuse(err, "the model is not a plain decoder");
    }
    enum llama_rope_type rope = llama_model_rope_type(model);
    if (rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE || rope == LLAMA_ROPE_TYPE_VISION) {
        return refuse(err, "the model has positions of several dimensions");
    }
    return KVF_OK;
}

/* Kinds of memory whose seq_cp of a range ends the process: their blob would not parse, but that must not be tried. */
static kvf_status check_kind(const struct llama_model *model, kvf_error *err) {
    char arch[64] = "";
    llama_model_meta_val_str(model, "general.architecture", arch, sizeof arch);
    if (strncmp(arch, "deepseek4", 9) == 0 || strncmp(arch, "deepseek32", 10) == 0) {
        return refuse(err, "the model keeps indexed or compressed caches beside the KV cache");
    }
    return KVF_OK;
}

static kvf_status check_context(const kvf_llama *kv, kvf_error *err) {
    uint32_t num = llama_n_seq_max(kv->ctx);
    if (kv->mem == NULL) {
        return refuse(err, "the context has no memory");
    }
    if (!llama_get_causal_attn(kv->ctx)) {
        return refuse(err, "attention is not causal: a token's KV depends on those behind it");
    }
    if (num < 2) {
        return refuse(err, "no sequence is left for scratch: create the context with n_seq_max one larger");
    }
    if (kv->scratch < 0 || (uint32_t)kv->scratch >= num) {
        return refuse(err, "the scratch sequence is not below n_seq_max");
    }
    if (llama_memory_seq_pos_max(kv->mem, kv->scratch) >= 0) {
        return refuse(err, "the scratch sequence is in use");
    }
    return KVF_OK;
}

/* ---- the probe: one token, computed, exported, imported, exported again ---- */

typedef struct blob {
    uint8_t *bytes;
    size_t   len;
} blob;

static kvf_status export_scratch(const kvf_llama *kv, kvf_error *err, blob *out) {
    size_t len = llama_state_seq_get_size(kv->ctx, kv->scratch);
    out->bytes = len > 0 ? malloc(len) : NULL;
    out->len = out->bytes != NULL ? llama_state_seq_get_data(kv->ctx, out->bytes, len, kv->scratch) : 0;
    if (out->len != len || len == 0) {
        return kvfl_fail(err, KVF_REFUSED, "llama.cpp can't export a sequence of this context");
    }
    return KVF_OK;
}

static kvf_status check_unified(const kvf_llama *kv, kvf_error *err) {
    blob empty = {0};
    kvfl_shape shape = {0};
    kvf_status status = export_scratch(kv, err, &empty);
    if (status == KVF_OK && !kvfl_blob_parse(&shape, empty.bytes, empty.len)) {
        status = refuse(err, "the context's memory is of a kind that is not known here");
    }
    free(empty.bytes);
    if (status == KVF_OK && shape.num_streams != 1) {
        status = refuse(err, "the KV cache is not unified: create the context with kv_unified = true");
    }
    return status;
}

/* How many times sooner a token is computed in a batch than alone: a first guess, until batches have been seen. */
static double sooner_in_batches(void) {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU) != NULL ? 64 : 4;
}

static kvf_status compute_probe(kvf_llama *kv, kvf_error *err) {
    const struct llama_vocab *vocab = llama_model_get_vocab(kv->model);
    llama_token token = llama_vocab_bos(vocab);
    int32_t trained = llama_model_n_ctx_train(kv->model);
    int32_t position = PROBE_POSITION;
    position = trained > 1 && position >= trained ? trained - 1 : position;
    struct llama_batch *batch = &kv->batch;
    batch->n_tokens = 1;
    batch->token[0] = token >= 0 ? token : 0;
    batch->pos[0] = position;
    batch->n_seq_id[0] = 1;
    batch->seq_id[0][0] = kv->scratch;
    batch->logits[0] = 1;
    int64_t begin = kvfl_now_us();
    int rc = llama_decode(kv->ctx, *batch);
    llama_synchronize(kv->ctx);
    kv->pace.guess_us = (double)(kvfl_now_us() - begin) / sooner_in_batches();
    if (rc != 0) {
        return kvfl_fail(err, KVF_REFUSED, "no token can be computed in the scratch sequence (llama_decode: %d): is the context full?",
                         rc);
    }
    return KVF_OK;
}

static bool imports_the_same(const kvf_llama *kv, const blob *probe) {
    blob again = {0};
    llama_memory_seq_rm(kv->mem, kv->scratch, -1, -1);
    bool same = llama_state_seq_set_data(kv->ctx, probe->bytes, probe->len, kv->scratch) == probe->len &&
                export_scratch(kv, NULL, &again) == KVF_OK && again.len == probe->len &&
                memcmp(again.bytes, probe->bytes, probe->len) == 0;
    free(again.bytes);
    return same;
}

static kvf_status take_probe(kvf_llama *kv, kvf_error *err, blob *probe) {
    kvf_status status = check_unified(kv, err);
    if (status == KVF_OK) {
        status = compute_probe(kv, err);
    }
    if (status == KVF_OK) {
        status = export_scratch(kv, err, probe);
    }
    if (status == KVF_OK && (!kvfl_blob_parse(&kv->shape, probe->bytes, probe->len) || kv->shape.num_cells != 1 ||
                             !imports_the_same(kv, probe))) {
        status = refuse(err, "the context's memory can't be taken apart and put together byte for byte");
    }
    llama_memory_seq_rm(kv->mem, kv->scratch, -1, -1);
    return status;
}

/* ---- the handle ---- */

static uint32_t choose_block_tokens(const kvfl_shape *shape) {
    uint32_t tokens = KVFL_MIN_BATCH;
    while (tokens < MAX_BLOCK_TOKENS && kvfl_blob_bytes(shape, 2 * tokens) <= KVFL_RECORD_AIM) {
        tokens *= 2;
    }
    return tokens;
}

static kvf_status set_block_tokens(kvf_llama *kv, kvf_error *err, uint32_t wanted) {
    kv->block_tokens = wanted != 0 ? wanted : choose_block_tokens(&kv->shape);
    if ((kv->block_tokens & (kv->block_tokens - 1)) != 0 || kv->block_tokens < KVFL_MIN_BATCH ||
        kv->block_tokens > MAX_BLOCK_TOKENS) {
        return kvfl_fail(err, KVF_LIMIT, "block_tokens must be a power of two from %u to %u, not %u", KVFL_MIN_BATCH,
                         MAX_BLOCK_TOKENS, kv->block_tokens);
    }
    kv->stride = (kvfl_blob_bytes(&kv->shape, kv->block_tokens) + PAGE - 1) / PAGE * PAGE;
    return KVF_OK;
}

/* As many tokens as one physical batch takes, in whole tiles; a context with smaller batches than a tile takes what it has. */
static uint32_t choose_step(const struct llama_context *ctx) {
    uint32_t batch = llama_n_batch(ctx), ubatch = llama_n_ubatch(ctx);
    uint32_t most = batch < ubatch ? batch : ubatch;
    return most >= KVFL_MIN_BATCH ? most / KVFL_MIN_BATCH * KVFL_MIN_BATCH : most;
}

static bool make_buffers(kvf_llama *kv) {
    size_t max_blocks = kv->n_ctx / kv->block_tokens + 2; /* and the tail */
    kv->group = KVFL_GROUP_BYTES / kv->stride > 0 ? KVFL_GROUP_BYTES / kv->stride : 1;
    kv->keys = calloc(max_blocks, sizeof *kv->keys);
    kv->found = calloc(max_blocks, sizeof *kv->found);
    kv->tokens = calloc(kv->n_ctx, sizeof *kv->tokens);
    bool ok = kv->keys != NULL && kv->found != NULL && kv->tokens != NULL;
    return ok;
}

static bool make_residents(kvf_llama *kv) {
    kv->num_seqs = llama_n_seq_max(kv->ctx);
    kv->residents = calloc(kv->num_seqs, sizeof *kv->residents);
    return kv->residents != NULL;
}

static kvf_llama *new_handle(struct llama_context *ctx, kvf_store *store, const kvf_llama_options *o) {
    kvf_llama *kv = calloc(1, sizeof *kv);
    if (kv == NULL) {
        return NULL;
    }
    kv->ctx = ctx;
    kv->model = llama_get_model(ctx);
    kv->mem = llama_get_memory(ctx);
    kv->store = store;
    kv->scratch = o->scratch_seq;
    kv->n_ctx = llama_n_ctx(ctx);
    kv->step = choose_step(ctx);
    kv->budget_ms = o->budget_ms != 0 ? o->budget_ms : DEFAULT_BUDGET_MS;
    kv->progress = o->progress;
    kv->progress_ctx = o->progress_ctx;
    kv->batch = llama_batch_init((int32_t)kv->step, 0, 1);
    return kv;
}

static kvf_status check_options(kvf_error *err, const kvf_store *store, const kvf_llama_options *o) {
    if (o->struct_size < sizeof *o || o->context_params == NULL) {
        return kvfl_fail(err, KVF_LIMIT, "kvf_llama_options: set struct_size and context_params");
    }
    if (store != NULL && o->model_path == NULL) {
        return kvfl_fail(err, KVF_LIMIT, "kvf_llama_options: model_path is needed to know which model the blocks belong to");
    }
    return KVF_OK;
}

static kvf_status set_up(kvf_llama *kv, kvf_error *err, const kvf_llama_options *o, blob *probe) {
    kvf_status status = check_model(kv->model, err);
    if (status == KVF_OK) {
        status = check_kind(kv->model, err);
    }
    if (status == KVF_OK) {
        status = check_context(kv, err);
    }
    if (status == KVF_OK) {
        status = take_probe(kv, err, probe);
    }
    if (status == KVF_OK) {
        status = set_block_tokens(kv, err, o->block_tokens);
    }
    if (status == KVF_OK && (!make_buffers(kv) || !make_residents(kv))) {
        status = kvfl_fail(err, KVF_NOMEM, "no memory to attach to the context");
    }
    if (status == KVF_OK) {
        status = kvfl_open_decode(kv, err);
    }
    if (status == KVF_OK && kv->store != NULL) {
        status = kvfl_open_space(kv, err, o, probe->bytes, probe->len);
    }
    if (status == KVF_OK && kv->store != NULL) {
        status = kvf_queue_open(&kv->queue, err, kv->store, 2 * KVFL_NUM_FLIGHTS);
    }
    return status;
}

kvf_status kvf_llama_attach(kvf_llama **out, kvf_error *err, kvf_store *store, struct llama_context *ctx,
                            const kvf_llama_options *o) {
    kvf_status status = check_options(err, store, o);
    if (status != KVF_OK) {
        return status;
    }
    kvf_llama *kv = new_handle(ctx, store, o);
    if (kv == NULL) {
        return kvfl_fail(err, KVF_NOMEM, "no memory to attach to the context");
    }
    blob probe = {0};
    status = set_up(kv, err, o, &probe);
    free(probe.bytes);
    if (status != KVF_OK) {
        kvf_llama_detach(kv);
        return status;
    }
    *out = kv;
    return KVF_OK;
}

void kvf_llama_detach(kvf_llama *kv) {
    if (kv == NULL) {
        return;
    }
    kvf_queue_close(kv->queue);
    kvf_space_close(kv->space);
    for (size_t i = 0; kv->residents != NULL && i < kv->num_seqs; i++) {
        free(kv->residents[i].tokens);
    }
    kvfl_flights_free(kv);
    kvfl_close_decode(kv);
    free(kv->residents);
    free(kv->keys);
    free(kv->found);
    free(kv->tokens);
    llama_batch_free(kv->batch);
    free(kv);
}

kvf_space *kvf_llama_space(kvf_llama *kv) {
    return kv->space;
}

size_t kvf_llama_cut(const kvf_llama *kv, size_t num) {
    return num > 0 ? (num - 1) / kv->block_tokens * kv->block_tokens : 0;
}

bool kvfl_holds(const kvf_llama *kv, llama_seq_id seq, size_t num) {
    if (num == 0) {
        return llama_memory_seq_pos_max(kv->mem, seq) < 0;
    }
    return llama_memory_seq_pos_min(kv->mem, seq) == 0 && llama_memory_seq_pos_max(kv->mem, seq) == (llama_pos)num - 1;
}

void kvfl_chain(kvf_llama *kv, const llama_token *tokens, size_t cut, size_t tail) {
    kv->num_whole = cut / kv->block_tokens;
    kv->tail_tokens = (uint32_t)tail;
    for (size_t i = 0; i < cut + tail; i++) {
        kv->tokens[i] = (uint32_t)tokens[i];
    }
    kvf_chain(kv->space, kv->keys, kv->num_whole, kv->tokens, cut);
    if (tail > 0) {
        /* Named by the block in front of it and its own tokens, and by a word that no whole block is named by. */
        uint8_t name[4 + sizeof(kvf_key) + 4 * MAX_BLOCK_TOKENS] = "tail";
        memcpy(name + 4, kv->keys[kv->num_whole - 1].bytes, sizeof(kvf_key));
        memcpy(name + 4 + sizeof(kvf_key), kv->tokens + cut, 4 * tail);
        kvf_key_of(kv->space, &kv->keys[kv->num_whole], name, 4 + sizeof(kvf_key) + 4 * tail);
    }
}

kvf_block kvfl_block_of(const kvf_llama *kv, size_t index) {
    return (kvf_block){.key = kv->keys[index],
                       .tokens = kv->tokens + kvfl_position(kv, index),
                       .num_tokens = kvfl_tokens_of(kv, index),
                       .first_token = (uint32_t)kvfl_position(kv, index)};
}
