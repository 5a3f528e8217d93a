/* SPDX-License-Identifier: Apache-2.0
 *
 * Prompts. One context is for them alone: it computes one prompt at a time, from its first cell on, in pieces that end
 * where blocks end. How llama.cpp rounds depends on which cells a sequence has and on what else is in the batch. So here
 * both are always the same, whatever the other slots do: a prompt gives the same bits, and what is stored of it too.
 * The whole blocks stay for the next prompt. A prompt that is complete moves to the context of the answers.
 */
#include <stdlib.h>

#include "triton/backend/backend.h"

#define SEQ       0          /* of prompts in their context */
#define LOOKUP_US KVF_MS(20) /* for how much of a prompt is stored, which only sizes its pieces */

static size_t least(size_t a, size_t b) {
    return a < b ? a : b;
}

/* ---- opening ---- */

/* A context that can't use a store works without one. */
static void attach(kvfb_instance *in) {
    const kvfb_config *config = &in->model->config;
    kvfb_fill *fill = &in->fill;
    kvf_error err = {.status = KVF_OK};
    const kvf_llama_options options = {
        .struct_size = sizeof options,
        .scratch_seq = SEQ + 1,
        .model_path = in->model->path,
        .context_params = &fill->params,
        .model_params = &in->model->params,
        .tenant = config->tenant,
        .budget_us = KVF_MS(config->budget_ms),
        .portable = config->portable,
    };
    if (kvf_llama_attach(&fill->kv, &err, in->model->store, fill->ctx, &options) != KVF_OK) {
        fill->kv = NULL;
        kvfb_log(TRITONSERVER_LOG_WARN, "model %s: nothing is loaded or stored: %s", in->model->name, err.what);
    }
    in->space = fill->kv != NULL ? kvf_llama_space(fill->kv) : NULL;
}

/* Also without a store prompts are cut into blocks, so that they give the same bits. */
static size_t block_of(const kvf_llama *kv) {
    size_t block = 1;
    while (kv != NULL && kvf_llama_cut(kv, block + 1) == 0) {
        block++;
    }
    return block;
}

TRITONSERVER_Error *kvfb_fill_open(kvfb_instance *in, const struct llama_context_params *common) {
    kvfb_fill *fill = &in->fill;
    fill->params = *common;
    fill->params.n_ctx = in->model->context + 256; /* some for the scratch sequence */
    fill->params.n_seq_max = 2;
    fill->params.n_batch = in->model->context;
    (void)kvfb_llama_error();
    fill->ctx = llama_init_from_model(in->model->weights, fill->params);
    if (fill->ctx == NULL) {
        return kvfb_error(TRITONSERVER_ERROR_UNAVAILABLE, "no context of %u tokens for prompts: %s", fill->params.n_ctx,
                          kvfb_llama_error());
    }
    attach(in);
    fill->block = block_of(fill->kv);
    fill->batch = llama_batch_init((int32_t)fill->params.n_batch, 0, 1);
    return fill->batch.token != NULL ? NULL : kvfb_no_memory();
}

void kvfb_fill_close(kvfb_instance *in) {
    kvfb_fill *fill = &in->fill;
    if (fill->batch.token != NULL) {
        llama_batch_free(fill->batch);
    }
    kvf_llama_detach(fill->kv);
    llama_free(fill->ctx);
    kvfl_tokens_cleanup(&fill->held);
    free(fill->rows);
}

/* ---- beginning ---- */

static size_t common_tokens(const kvfl_tokens *a, const kvfl_tokens *b) {
    size_t same = 0;
    while (same < a->num && same < b->num && a->ids[same] == b->ids[same]) {
        same++;
    }
    return same;
}

static void clear(kvfb_fill *fill) {
    llama_memory_seq_rm(llama_get_memory(fill->ctx), SEQ, -1, -1);
    fill->held.num = 0;
}

/* The whole blocks of a prompt before its last token, which must be computed. */
static size_t cut_of(const kvfb_fill *fill, size_t num) {
    return (num - 1) / fill->block * fill->block;
}

/* Leaves the whole blocks that the prompt begins with. */
static void trim(kvfb_fill *fill, const kvfl_tokens *prompt, bool goes_back) {
    size_t same = common_tokens(&fill->held, prompt) / fill->block * fill->block;
    same = least(same, cut_of(fill, prompt->num));
    bool kept = same > 0 && goes_back && fill->kv != NULL &&
                llama_memory_seq_rm(llama_get_memory(fill->ctx), SEQ, (llama_pos)same, -1);
    if (kept) {
        fill->held.num = same;
    } else {
        clear(fill);
    }
}

/* How much of the prompt is in the store, if that is quick to find out. */
static size_t stored_tokens(kvfb_instance *in, const kvfl_tokens *prompt) {
    size_t most = in->space != NULL ? prompt->num / in->fill.block : 0, run = 0;
    kvf_key *keys = most > 0 ? malloc(most * sizeof *keys) : NULL;
    if (keys == NULL) {
        return 0;
    }
    /* Token ids are not negative, so both types have the same representation. */
    size_t num = kvf_chain(in->space, keys, most, (const uint32_t *)prompt->ids, prompt->num);
    if (kvf_match(in->space, &run, NULL, keys, num, LOOKUP_US) != KVF_OK) {
        run = 0;
    }
    free(keys);
    return run * in->fill.block;
}

void kvfb_fill_begin(kvfb_instance *in, kvfb_slot *slot) {
    kvfb_fill *fill = &in->fill;
    const kvfl_tokens *prompt = &slot->request->prompt;
    trim(fill, prompt, in->model->goes_back);
    fill->slot = slot;
    fill->resident = fill->held.num;
    fill->piece = in->model->config.piece;
    fill->stored = stored_tokens(in, prompt);
}

/* ---- a piece ---- */

/* How many tokens come next. Pieces end where a block ends. */
static size_t piece_of(const kvfb_fill *fill, size_t computed, bool alone) {
    size_t at = fill->held.num, rest = fill->slot->request->prompt.num - at, block = fill->block;
    bool stored = at < fill->stored;
    size_t num = !stored ? computed : alone ? fill->stored - at : least(fill->stored - at, fill->piece);
    if (num >= rest || (stored && rest - num <= block)) {
        return rest;
    }
    size_t end = (at + num) / block * block;
    return (end > at ? end : (at / block + 1) * block) - at;
}

static void make_batch(kvfb_fill *fill, size_t num) {
    const kvfl_tokens *prompt = &fill->slot->request->prompt;
    struct llama_batch *batch = &fill->batch;
    batch->n_tokens = (int32_t)num;
    for (size_t i = 0; i < num; i++) {
        size_t pos = fill->held.num + i;
        batch->token[i] = prompt->ids[pos];
        batch->pos[i] = (llama_pos)pos;
        batch->n_seq_id[i] = 1;
        batch->seq_id[i][0] = SEQ;
        batch->logits[i] = pos + 1 == prompt->num;
    }
}

/* The engine reports prompts of two or more tokens. One of which all but the last was held looks to it like an answer
 * that goes on. */
static void note_report(kvfb_fill *fill) {
    kvfb_request *r = fill->slot->request;
    r->first_ns = kvfb_now_ns();
    r->report = (kvf_llama_report){.struct_size = sizeof r->report,
                                   .num_tokens = (uint32_t)r->prompt.num,
                                   .resident_tokens = (uint32_t)fill->resident};
    if (fill->kv != NULL && r->prompt.num - fill->resident > 1) {
        (void)kvf_llama_prompt_report(fill->kv, &r->report, SEQ);
    }
}

int32_t kvfb_fill_step(kvfb_instance *in, size_t computed, bool alone) {
    kvfb_fill *fill = &in->fill;
    size_t num = piece_of(fill, computed, alone);
    make_batch(fill, num);
    int32_t rc = fill->kv != NULL ? kvf_llama_decode(fill->kv, fill->batch) : llama_decode(fill->ctx, fill->batch);
    if (rc == 0 && !kvfl_tokens_add(&fill->held, fill->batch.token, num)) {
        fill->slot->request->error = kvfb_no_memory();
    }
    if (rc != 0 || fill->slot->request->error != NULL) {
        clear(fill); /* nobody knows what it holds */
    }
    return rc;
}

void kvfb_fill_note_time(kvfb_instance *in, double us) {
    kvfb_fill *fill = &in->fill;
    size_t most = us <= in->step_us ? 2 * fill->piece : fill->piece / 2;
    most = least(most, fill->params.n_batch);
    fill->piece = most > in->model->config.piece ? most : in->model->config.piece;
}

bool kvfb_fill_is_done(const kvfb_instance *in) {
    return in->fill.held.num == in->fill.slot->request->prompt.num;
}

int32_t kvfb_fill_end(kvfb_instance *in) {
    kvfb_fill *fill = &in->fill;
    int32_t last = fill->batch.n_tokens - 1;
    note_report(fill);
    fill->held.num = cut_of(fill, fill->held.num);
    fill->slot = NULL;
    return fill->kv != NULL ? kvf_llama_output(fill->kv, last) : last;
}

/* ---- moving ---- */

static bool make_room(kvfb_fill *fill, size_t bytes) {
    if (fill->room < bytes) {
        free(fill->rows);
        fill->rows = malloc(bytes);
        fill->room = fill->rows != NULL ? bytes : 0;
    }
    return fill->room >= bytes;
}

TRITONSERVER_Error *kvfb_fill_hand_over(kvfb_instance *in, kvfb_slot *slot) {
    kvfb_fill *fill = &in->fill;
    size_t bytes = llama_state_seq_get_size(fill->ctx, SEQ);
    if (!make_room(fill, bytes)) {
        return kvfb_no_memory();
    }
    (void)kvfb_llama_error();
    if (llama_state_seq_get_data(fill->ctx, fill->rows, bytes, SEQ) != bytes ||
        llama_state_seq_set_data(in->ctx, fill->rows, bytes, slot->seq) != bytes) {
        return kvfb_error(TRITONSERVER_ERROR_INTERNAL, "llama.cpp could not move a prompt: %s", kvfb_llama_error());
    }
    slot->at = slot->request->prompt.num;
    return NULL;
}
