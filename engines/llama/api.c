/* SPDX-License-Identifier: Apache-2.0
 *
 * Attaches kvferry to a llama.cpp context and detaches it: checks the options, allocates the handle, opens the space.
 */
#include <stdlib.h>

#include "kvferry/sized.h"
#include "llama/engine.h"

#define DEFAULT_BUDGET_US KVF_MS(10000)
#define MIN_SECRET_BYTES  16u
#define MAX_SECRET_BYTES  1024u

/* ---- the handle ---- */

/* One allocation for the handle and what each room keeps in it. */
typedef struct handle {
    kvf_llama kv;
    kvfl_cells cells;
    kvfl_follow follow;
    kvfl_fetch fetch;
    kvfl_calls calls;
} handle;

/* As many tokens as one physical batch takes, in whole tiles. A context with batches smaller than a tile uses its batch
 * size. */
static uint32_t choose_step(const struct llama_context *ctx) {
    uint32_t batch = llama_n_batch(ctx), ubatch = llama_n_ubatch(ctx);
    uint32_t most = batch < ubatch ? batch : ubatch;
    return most >= KVFL_MIN_BATCH ? most / KVFL_MIN_BATCH * KVFL_MIN_BATCH : most;
}

static kvf_llama *new_handle(struct llama_context *ctx, kvf_store *store, const kvf_llama_options *o) {
    handle *h = calloc(1, sizeof *h);
    if (h == NULL) {
        return NULL;
    }
    kvf_llama *kv = &h->kv;
    kv->cells = &h->cells;
    kv->follow = &h->follow;
    kv->fetch = &h->fetch;
    kv->calls = &h->calls;
    kv->pid = getpid();
    kv->ctx = ctx;
    kv->model = llama_get_model(ctx);
    kv->mem = llama_get_memory(ctx);
    kv->store = store;
    kv->scratch = o->scratch_seq;
    kv->n_ctx = llama_n_ctx(ctx);
    kv->step = choose_step(ctx);
    kv->num_seqs = llama_n_seq_max(ctx);
    kv->calls->progress = o->progress;
    kv->calls->progress_ctx = o->progress_ctx;
    kv->batch = llama_batch_init((int32_t)kv->step, 0, 1);
    return kv;
}

KVF_SIZED(kvf_llama_options, previous_secret_len, 112, previous_secret_len);

/* Before it is copied: kvf_space_open has the same bounds. */
static kvf_status check_secret(kvf_error *err, const void *secret, size_t len) {
    if (secret != NULL && (len < MIN_SECRET_BYTES || len > MAX_SECRET_BYTES)) {
        return kvfl_fail(err, KVF_LIMIT, "kvf_llama_options: a secret has %u to %u bytes, not %zu", MIN_SECRET_BYTES,
                         MAX_SECRET_BYTES, len);
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
    if (status == KVF_OK && (!kvfl_open_cells(kv) || !kvfl_open_follow(kv))) {
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
    if (status == KVF_OK) {
        status = kvfl_open_fetch(kv, err, o->budget_us != KVF_DEFAULT ? o->budget_us : DEFAULT_BUDGET_US);
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
    kvfl_close_fetch(kv);
    kvfl_close_identities(kv);
    kvfl_free_terms(kv->terms);
    kvfl_close_decode(kv);
    kvfl_close_follow(kv);
    kvfl_close_cells(kv);
    free(kv->kind.empty);
    kvfl_shape_free(&kv->kind.shape);
    llama_batch_free(kv->batch);
    free(kv); /* all of the handle */
}

kvf_space *kvf_llama_space(kvf_llama *kv) {
    return kv->space;
}
