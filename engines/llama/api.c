/* SPDX-License-Identifier: Apache-2.0
 *
 * Attaches kvferry to a llama.cpp context and detaches it: checks the options, allocates the handle, opens the space.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kvferry/sized.h"
#include "llama/engine.h"

#define DEFAULT_BUDGET_US KVF_MS(10000)

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

kvf_status kvfl_check_ours(const kvf_llama *kv, kvf_error *err) {
    return kvfl_is_ours(kv) ? KVF_OK
                            : kvfl_fail(err, KVF_CLOSED,
                                        "this context was attached by another process: make a new one after a fork");
}

/* ---- the handle ---- */

/* As many tokens as one physical batch takes, in whole tiles. A context with batches smaller than a tile uses its batch
 * size. */
static uint32_t choose_step(const struct llama_context *ctx) {
    uint32_t batch = llama_n_batch(ctx), ubatch = llama_n_ubatch(ctx);
    uint32_t most = batch < ubatch ? batch : ubatch;
    return most >= KVFL_MIN_BATCH ? most / KVFL_MIN_BATCH * KVFL_MIN_BATCH : most;
}

static bool make_buffers(kvf_llama *kv) {
    size_t max_blocks = kv->n_ctx / kv->block_tokens + 2; /* and the tail */
    kv->group = KVFL_GROUP_BYTES / kv->stride > 0 ? KVFL_GROUP_BYTES / kv->stride : 1;
    kv->keys = calloc(max_blocks, sizeof *kv->keys);
    kv->tokens = calloc(kv->n_ctx, sizeof *kv->tokens);
    return kv->keys != NULL && kv->tokens != NULL;
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
    kv->pid = getpid();
    kv->ctx = ctx;
    kv->model = llama_get_model(ctx);
    kv->mem = llama_get_memory(ctx);
    kv->store = store;
    kv->scratch = o->scratch_seq;
    kv->n_ctx = llama_n_ctx(ctx);
    kv->step = choose_step(ctx);
    kv->budget_us = o->budget_us != KVF_DEFAULT ? o->budget_us : DEFAULT_BUDGET_US;
    kv->progress = o->progress;
    kv->progress_ctx = o->progress_ctx;
    kv->batch = llama_batch_init((int32_t)kv->step, 0, 1);
    return kv;
}

KVF_SIZED(kvf_llama_options, previous_secret_len, 112, previous_secret_len);

/* Before it is copied: kvf_space_open has the same bounds. */
static kvf_status check_secret(kvf_error *err, const void *secret, size_t len) {
    if (secret != NULL && (len < KVFL_MIN_SECRET_BYTES || len > KVFL_MAX_SECRET_BYTES)) {
        return kvfl_fail(err, KVF_LIMIT, "kvf_llama_options: a secret has %u to %u bytes, not %zu",
                         KVFL_MIN_SECRET_BYTES, KVFL_MAX_SECRET_BYTES, len);
    }
    return KVF_OK;
}

/* Copies the caller's options, and checks them. */
static kvf_status take_options(kvf_llama_options *out, kvf_error *err, kvf_store *store, const kvf_llama_options *o) {
    if (o == NULL) {
        return kvfl_fail(err, KVF_LIMIT, "kvf_llama_options: they are needed");
    }
    kvf_status status = kvf_sized_take(out, err, o, &kvf_llama_options_sized);
    if (status != KVF_OK) {
        return status;
    }
    o = out;
    kvf_link link;
    if (store != NULL && kvf_store_link(store, 0, &link) != KVF_OK) {
        return kvfl_fail(err, KVF_CLOSED, "this store was opened by another process: open it again after a fork");
    }
    if (o->budget_us < 0 || o->budget_us > KVF_MAX_BUDGET_US) {
        return kvfl_fail(err, KVF_LIMIT, "kvf_llama_options: budget_us is out of range: use 0 to 24 hours");
    }
    if (o->context_params == NULL) {
        return kvfl_fail(err, KVF_LIMIT, "kvf_llama_options: set context_params to what the context was created with");
    }
    if (store != NULL && o->model_path == NULL) {
        return kvfl_fail(err, KVF_LIMIT,
                         "kvf_llama_options: model_path is needed to know which model the blocks belong to");
    }
    if (store != NULL && o->model_params == NULL) {
        return kvfl_fail(err, KVF_LIMIT,
                         "kvf_llama_options: model_params, what the model was loaded with, is needed: metadata can be "
                         "set over the file's own there");
    }
    status = check_secret(err, o->secret, o->secret_len);
    return status == KVF_OK ? check_secret(err, o->previous_secret, o->previous_secret_len) : status;
}

static kvf_status set_terms(kvf_llama *kv, kvf_error *err, const kvf_llama_options *o, const kvfl_model_name *known) {
    kvfl_model_name name = {.overrides = ""};
    kvf_status status = known != NULL ? KVF_OK : kvfl_name_model(&name, err, kv->ctx, o);
    return status == KVF_OK ? kvfl_set_terms(kv, err, o, known != NULL ? known : &name) : status;
}

static kvf_status set_up(kvf_llama *kv, kvf_error *err, const kvf_llama_options *o, const kvfl_model_name *known) {
    kvf_status status = kvfl_know_kind(kv, err, o->context_params);
    if (status == KVF_OK) {
        status = kvfl_set_block_tokens(kv, err, o->block_tokens);
    }
    if (status == KVF_OK && (!make_buffers(kv) || !make_residents(kv))) {
        status = kvfl_fail(err, KVF_NOMEM, "no memory to attach to the context");
    }
    if (status == KVF_OK) {
        status = kvfl_open_decode(kv, err);
    }
    if (status == KVF_OK && kv->store != NULL) {
        status = set_terms(kv, err, o, known);
    }
    if (status == KVF_OK) {
        status = kvfl_open_identity(kv, err, o->adapters != NULL ? o->adapters : "");
    }
    if (status == KVF_OK && kv->store != NULL) {
        status = kvf_queue_open(&kv->queue, err, kv->store, 2 * KVFL_NUM_FLIGHTS);
    }
    return status;
}

kvf_status kvfl_attach(kvf_llama **out, kvf_error *err, kvf_store *store, struct llama_context *ctx,
                       const kvf_llama_options *o, const kvfl_model_name *known) {
    kvf_llama *kv = new_handle(ctx, store, o);
    if (kv == NULL) {
        return kvfl_fail(err, KVF_NOMEM, "no memory to attach to the context");
    }
    kvf_status status = set_up(kv, err, o, known);
    if (status != KVF_OK) {
        kvf_llama_detach(kv);
        return status;
    }
    *out = kv;
    return KVF_OK;
}

kvf_status kvf_llama_attach(kvf_llama **out, kvf_error *err, kvf_store *store, struct llama_context *ctx,
                            const kvf_llama_options *o) {
    kvf_llama_options own;
    kvf_status status = take_options(&own, err, store, o);
    return status == KVF_OK ? kvfl_attach(out, err, store, ctx, &own, NULL) : status;
}

void kvf_llama_detach(kvf_llama *kv) {
    if (kv == NULL || !kvfl_is_ours(kv)) {
        return;
    }
    kvf_queue_close(kv->queue);
    kvfl_close_identities(kv);
    kvfl_free_terms(kv->terms);
    for (size_t i = 0; kv->residents != NULL && i < kv->num_seqs; i++) {
        free(kv->residents[i].tokens);
    }
    kvfl_flights_free(kv);
    kvfl_close_decode(kv);
    free(kv->residents);
    free(kv->kind.empty);
    kvfl_shape_free(&kv->kind.shape);
    free(kv->state);
    free(kv->keys);
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

size_t kvfl_find_no_token(const kvf_llama *kv, const llama_token *tokens, size_t num) {
    int32_t vocab = llama_vocab_n_tokens(llama_model_get_vocab(kv->model));
    size_t i = 0;
    while (i < num && tokens != NULL && tokens[i] >= 0 && tokens[i] < vocab) {
        i++;
    }
    return i;
}

bool kvfl_holds(const kvf_llama *kv, llama_seq_id seq, size_t num) {
    if (num == 0) {
        return llama_memory_seq_pos_max(kv->mem, seq) < 0;
    }
    return (kvfl_has_states(kv) || llama_memory_seq_pos_min(kv->mem, seq) == 0) &&
           llama_memory_seq_pos_max(kv->mem, seq) == (llama_pos)num - 1;
}

void kvfl_chain(kvf_llama *kv, const llama_token *tokens, size_t cut, size_t tail) {
    /* A token that is computed alone: ggml then divides the sum over all tokens before it among the threads, and rounds
     * by their number. */
    tail = tail > 1 ? tail : 0;
    kv->num_whole = cut / kv->block_tokens;
    kv->tail_tokens = (uint32_t)tail;
    for (size_t i = 0; i < cut + tail; i++) {
        kv->tokens[i] = (uint32_t)tokens[i];
    }
    if (kv->space == NULL) {
        return;
    }
    kvf_chain(kv->space, kv->keys, kv->num_whole, kv->tokens, cut);
    if (tail > 0 && cut > 0) {
        kvf_tail_key(kv->space, &kv->keys[kv->num_whole], &kv->keys[kv->num_whole - 1], kv->tokens + cut, tail);
    }
}

void kvfl_name_apart(kvf_llama *kv, size_t index, const void *how, size_t len) {
    for (size_t i = index; kv->space != NULL && i < kvfl_num_blocks(kv); i++) {
        kvf_apart_key(kv->space, &kv->keys[i], &kv->keys[i], how, len);
    }
}

kvf_block kvfl_block_of(const kvf_llama *kv, size_t index) {
    return (kvf_block){.key = kv->keys[index],
                       .tokens = kv->tokens + kvfl_position(kv, index),
                       .num_tokens = kvfl_tokens_of(kv, index),
                       .first_token = (uint32_t)kvfl_position(kv, index)};
}
