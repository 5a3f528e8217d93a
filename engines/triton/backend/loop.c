/* SPDX-License-Identifier: Apache-2.0
 *
 * Continuous batching. Each step decodes one batch: the next token of every answer, and pieces of prompts, oldest first.
 * Requests join and leave between two steps. kvf_llama_decode brings in what is stored of a prompt.
 *
 * How much of a prompt a step takes: while nobody streams, much. Else so much that the others do not wait long: a small
 * piece if it must be computed. What the store has comes faster, so its pieces grow while steps stay short, and shrink
 * when the store turns out to be slow.
 */
#include <stdlib.h>
#include <string.h>

#include "triton/backend/backend.h"

#define ALONE_TOKENS 512u       /* computed in a step while nobody streams */
#define LOOKUP_US    KVF_MS(20) /* for how much of a prompt is stored, which only sizes its pieces */

static uint32_t num_slots(const kvfb_instance *in) {
    return in->model->config.slots;
}

static bool is_prefilling(const kvfb_slot *slot) {
    return slot->request != NULL && slot->held.num < slot->request->prompt.num;
}

static bool is_generating(const kvfb_slot *slot) {
    return slot->request != NULL && !is_prefilling(slot);
}

/* ---- leaving ---- */

/* A prompt that was only computed is no turn of its conversation. */
static bool has_turn(const kvfb_request *r) {
    return r->session != NULL && r->error == NULL && r->max_tokens > 0;
}

/* The request leaves its slot, with its answer or request->error. The sequence keeps what it holds: the next turn of a
 * conversation begins with it. */
static void leave(kvfb_instance *in, kvfb_slot *slot) {
    kvfb_request *r = kvfb_slot_leave(slot);
    slot->freed = ++in->num_begun;
    pthread_mutex_lock(&in->lock);
    in->num_busy--;
    pthread_cond_signal(&in->room);
    pthread_mutex_unlock(&in->lock);
    if (has_turn(r)) {
        kvfb_clerk_give(in, r);
    } else {
        kvfb_respond_end(r);
    }
}

static void fail(kvfb_instance *in, kvfb_slot *slot, TRITONSERVER_Error *error) {
    kvfb_request *r = slot->request;
    if (r->error == NULL) {
        r->error = error;
    } else {
        kvfb_drop(error);
    }
    leave(in, slot);
}

static TRITONSERVER_Error *cancelled(void) {
    return kvfb_error(TRITONSERVER_ERROR_CANCELLED, "the request was cancelled");
}

static void drop_cancelled(kvfb_instance *in) {
    for (uint32_t i = 0; i < num_slots(in); i++) {
        kvfb_slot *slot = &in->slots[i];
        if (slot->request != NULL && kvfb_request_is_cancelled(slot->request)) {
            fail(in, slot, cancelled());
        }
    }
}

/* ---- waiting requests ---- */

/* Takes out the first waiting request that is cancelled or has waited too long. NULL: there is none. */
static kvfb_request *take_expired(kvfb_queue *queue) {
    uint64_t now = kvfb_now_ns();
    kvfb_request **at = &queue->first, *before = NULL;
    while (*at != NULL && (*at)->deadline_ns > now && !kvfb_request_is_cancelled(*at)) {
        before = *at;
        at = &(*at)->next;
    }
    kvfb_request *found = *at;
    if (found != NULL) {
        *at = found->next;
        queue->last = queue->last == found ? before : queue->last;
        queue->num--;
    }
    return found;
}

static void answer_expired(kvfb_instance *in) {
    kvfb_request *r = NULL;
    do {
        pthread_mutex_lock(&in->lock);
        r = take_expired(&in->waiting);
        pthread_cond_signal(&in->room);
        pthread_mutex_unlock(&in->lock);
        if (r != NULL) {
            kvfb_respond_error(r, kvfb_request_is_cancelled(r)
                                      ? cancelled()
                                      : kvfb_error(TRITONSERVER_ERROR_UNAVAILABLE,
                                                   "the request waited for a slot longer than its timeout"));
        }
    } while (r != NULL);
}

/* ---- joining ---- */

static size_t common_tokens(const kvfl_tokens *a, const kvfl_tokens *b) {
    size_t same = 0;
    while (same < a->num && same < b->num && a->ids[same] == b->ids[same]) {
        same++;
    }
    return same;
}

/* The free slot that holds most of the prompt, if that is at least half of what it holds: the rest is lost. Else the one
 * that has been free for longest. NULL: none is free. */
static kvfb_slot *choose_slot(kvfb_instance *in, const kvfb_request *r) {
    kvfb_slot *best = NULL, *oldest = NULL;
    size_t most = 0;
    for (uint32_t i = 0; i < num_slots(in); i++) {
        kvfb_slot *slot = &in->slots[i];
        size_t same = slot->request == NULL ? common_tokens(&slot->held, &r->prompt) : 0;
        if (slot->request != NULL) {
            continue;
        }
        if (same > most && 2 * same >= slot->held.num) {
            most = same;
            best = slot;
        }
        oldest = oldest == NULL || slot->freed < oldest->freed ? slot : oldest;
    }
    return best != NULL ? best : oldest;
}

static void clear(kvfb_instance *in, kvfb_slot *slot) {
    llama_memory_seq_rm(llama_get_memory(in->ctx), slot->seq, -1, -1);
    slot->held.num = 0;
}

/* Leaves in the sequence what the prompt begins with, except its last token, which must be computed. */
static void trim(kvfb_instance *in, kvfb_slot *slot, const kvfb_request *r) {
    size_t same = common_tokens(&slot->held, &r->prompt);
    same = same < r->prompt.num ? same : r->prompt.num - 1;
    if (same == slot->held.num) {
        return;
    }
    bool kept = same > 0 && in->model->goes_back &&
                llama_memory_seq_rm(llama_get_memory(in->ctx), slot->seq, (llama_pos)same, -1);
    if (kept) {
        slot->held.num = same;
    } else {
        clear(in, slot);
    }
}

/* How much of the prompt is in the store, if that is quick to find out. */
static size_t stored_tokens(kvfb_instance *in, const kvfb_request *r) {
    size_t most = in->space != NULL ? r->prompt.num / in->block_tokens : 0, run = 0;
    kvf_key *keys = most > 0 ? malloc(most * sizeof *keys) : NULL;
    if (keys == NULL) {
        return 0;
    }
    /* Token ids are not negative, so both types have the same representation. */
    size_t num = kvf_chain(in->space, keys, most, (const uint32_t *)r->prompt.ids, r->prompt.num);
    if (kvf_match(in->space, &run, NULL, keys, num, LOOKUP_US) != KVF_OK) {
        run = 0;
    }
    free(keys);
    return run * in->block_tokens;
}

static void begin(kvfb_instance *in, kvfb_slot *slot, kvfb_request *r) {
    TRITONSERVER_Error *error = kvfb_slot_begin(slot, r);
    if (error == NULL && !kvfl_tokens_add(&slot->held, NULL, 0)) {
        error = kvfb_no_memory();
    }
    pthread_mutex_lock(&in->lock);
    in->num_busy++;
    pthread_mutex_unlock(&in->lock);
    if (error != NULL) {
        slot->request = r;
        fail(in, slot, error);
        return;
    }
    in->num_begun++;
    trim(in, slot, r);
    slot->resident = slot->held.num;
    slot->piece = in->model->config.piece;
    slot->stored = stored_tokens(in, r);
}

static void admit(kvfb_instance *in) {
    kvfb_slot *slot;
    kvfb_request *r;
    do {
        pthread_mutex_lock(&in->lock);
        slot = in->waiting.first != NULL ? choose_slot(in, in->waiting.first) : NULL;
        r = slot != NULL ? kvfb_queue_take(&in->waiting) : NULL;
        pthread_mutex_unlock(&in->lock);
        if (r != NULL) {
            begin(in, slot, r);
        }
    } while (r != NULL);
}

/* ---- a batch ---- */

static void add_token(kvfb_instance *in, kvfb_slot *slot, llama_token token, size_t pos, bool output) {
    struct llama_batch *batch = &in->batch;
    int32_t i = batch->n_tokens++;
    batch->token[i] = token;
    batch->pos[i] = (llama_pos)pos;
    batch->n_seq_id[i] = 1;
    batch->seq_id[i][0] = slot->seq;
    batch->logits[i] = output;
    slot->in_batch++;
    slot->output = output ? i : slot->output;
}

static size_t least(size_t a, size_t b) {
    return a < b ? a : b;
}

/* How many tokens of its prompt a slot gets. `computed`: those that may be computed in this step; `room`: of the
 * batch. Pieces end where a block ends, so that it is stored. */
static size_t piece_of(const kvfb_instance *in, const kvfb_slot *slot, bool alone, size_t computed, size_t room) {
    size_t at = slot->held.num, rest = slot->request->prompt.num - at, block = in->block_tokens;
    bool stored = at < slot->stored;
    size_t num = stored ? least(slot->stored - at, alone ? room : slot->piece) : computed;
    num = least(num, room);
    if (num >= rest || (stored && rest - num <= block && rest <= room)) {
        return least(rest, room);
    }
    if (num == 0 || block == 0) {
        return num;
    }
    size_t end = (at + num) / block * block;
    end = end > at ? end : (at / block + 1) * block;
    return end - at <= room ? end - at : 0;
}

static kvfb_slot *oldest_prompt(kvfb_instance *in) {
    kvfb_slot *oldest = NULL;
    for (uint32_t i = 0; i < num_slots(in); i++) {
        kvfb_slot *slot = &in->slots[i];
        bool open = is_prefilling(slot) && slot->in_batch == 0;
        if (open && (oldest == NULL || slot->request->began_ns < oldest->request->began_ns)) {
            oldest = slot;
        }
    }
    return oldest;
}

static void add_piece(kvfb_instance *in, kvfb_slot *slot, size_t num) {
    const kvfl_tokens *prompt = &slot->request->prompt;
    size_t from = slot->held.num;
    for (size_t i = from; i < from + num; i++) {
        add_token(in, slot, prompt->ids[i], i, i + 1 == prompt->num);
    }
}

static void add_pieces(kvfb_instance *in, bool alone) {
    size_t computed = alone ? ALONE_TOKENS : in->model->config.piece;
    kvfb_slot *slot = oldest_prompt(in);
    while (slot != NULL) {
        size_t room = in->params.n_batch - (size_t)in->batch.n_tokens;
        size_t num = piece_of(in, slot, alone, computed, room);
        if (num == 0) {
            return;
        }
        computed -= slot->held.num < slot->stored ? 0 : least(num, computed);
        add_piece(in, slot, num);
        slot = oldest_prompt(in);
    }
}

/* Returns whether it has a piece of a prompt. */
static bool make_batch(kvfb_instance *in) {
    bool alone = true;
    in->batch.n_tokens = 0;
    for (uint32_t i = 0; i < num_slots(in); i++) {
        kvfb_slot *slot = &in->slots[i];
        slot->in_batch = 0;
        slot->output = -1;
        if (is_generating(slot)) {
            add_token(in, slot, slot->next, slot->held.num, true);
            alone = false;
        }
    }
    int32_t before = in->batch.n_tokens;
    add_pieces(in, alone);
    return in->batch.n_tokens > before;
}

/* ---- after a batch ---- */

static void note_held(kvfb_instance *in, kvfb_slot *slot) {
    int32_t i = 0;
    while (in->batch.seq_id[i][0] != slot->seq) {
        i++;
    }
    if (!kvfl_tokens_add(&slot->held, in->batch.token + i, slot->in_batch)) {
        slot->request->error = kvfb_no_memory();
    }
}

/* The engine reports prompts of two or more tokens. A prompt of which the slot held all but the last looks to it like an
 * answer that goes on. */
static void note_report(kvfb_instance *in, kvfb_slot *slot) {
    kvfb_request *r = slot->request;
    r->first_ns = kvfb_now_ns();
    r->report = (kvf_llama_report){.struct_size = sizeof r->report,
                                   .num_tokens = (uint32_t)r->prompt.num,
                                   .resident_tokens = (uint32_t)slot->resident};
    if (in->kv != NULL && r->prompt.num - slot->resident > 1) {
        (void)kvf_llama_prompt_report(in->kv, &r->report, slot->seq);
    }
}

/* The next token of an answer, or its end. */
static void go_on(kvfb_instance *in, kvfb_slot *slot) {
    kvfb_request *r = slot->request;
    if (r->first_ns == 0) {
        note_report(in, slot);
    }
    if (r->max_tokens == 0) {
        r->finish = KVFB_FINISH_LENGTH;
        leave(in, slot);
        return;
    }
    int32_t output = in->kv != NULL ? kvf_llama_output(in->kv, slot->output) : slot->output;
    bool more = kvfb_slot_take(slot, llama_sampler_sample(slot->sampler, in->ctx, output));
    if (!more || !kvfb_respond_more(r)) {
        leave(in, slot);
    }
}

static void note_batch(kvfb_instance *in) {
    for (uint32_t i = 0; i < num_slots(in); i++) {
        kvfb_slot *slot = &in->slots[i];
        if (slot->in_batch == 0) {
            continue;
        }
        note_held(in, slot);
        if (slot->request->error != NULL) {
            clear(in, slot);
            leave(in, slot);
        } else if (slot->output >= 0) {
            go_on(in, slot);
        }
    }
}

/* Adapts the pieces of stored prompts to how long the step took, beside one without. */
static void note_time(kvfb_instance *in, double us, bool has_pieces) {
    if (!has_pieces) {
        in->step_us = in->step_us > 0 ? 0.9 * in->step_us + 0.1 * us : us;
        return;
    }
    size_t least_piece = in->model->config.piece;
    for (uint32_t i = 0; i < num_slots(in); i++) {
        kvfb_slot *slot = &in->slots[i];
        if (slot->in_batch > 1 && slot->request != NULL) {
            bool quick = us <= 2 * in->step_us;
            slot->piece = quick ? least(2 * slot->piece, in->params.n_batch) : slot->piece / 2;
            slot->piece = slot->piece > least_piece ? slot->piece : least_piece;
        }
    }
}

/* ---- failures ---- */

static TRITONSERVER_Error *error_of(int32_t rc) {
    if (rc == 1) {
        return kvfb_error(TRITONSERVER_ERROR_UNAVAILABLE, "the KV cache has no room for the prompt; try again later");
    }
    if (rc == 2) {
        return kvfb_error(TRITONSERVER_ERROR_UNAVAILABLE, "the model is being unloaded");
    }
    return kvfb_error(TRITONSERVER_ERROR_INTERNAL, "llama.cpp could not compute (llama_decode returned %d): %s", rc,
                      kvfb_llama_error());
}

/* Without room prompts are given up, so that answers go on; if there are none, everything is. Afterwards nobody knows
 * what the sequences hold, except that those without room are as they were. */
static void note_failure(kvfb_instance *in, int32_t rc, bool has_pieces) {
    for (uint32_t i = 0; i < num_slots(in); i++) {
        kvfb_slot *slot = &in->slots[i];
        bool spared = rc == 1 && has_pieces && is_generating(slot);
        if (slot->request != NULL && slot->in_batch > 0 && !spared) {
            clear(in, slot);
            fail(in, slot, error_of(rc));
        }
    }
}

/* ---- the thread ---- */

static void note_figures(kvfb_instance *in) {
    kvf_llama_counters counters = {.struct_size = sizeof counters};
    if (in->kv != NULL && kvf_llama_count(in->kv, &counters) == KVF_OK) {
        pthread_mutex_lock(&in->lock);
        in->figures.engine = counters;
        pthread_mutex_unlock(&in->lock);
    }
}

static int32_t decode(kvfb_instance *in) {
    return in->kv != NULL ? kvf_llama_decode(in->kv, in->batch) : llama_decode(in->ctx, in->batch);
}

static void step(kvfb_instance *in) {
    bool has_pieces = make_batch(in);
    if (in->batch.n_tokens == 0) {
        return;
    }
    uint64_t began = kvfb_now_ns();
    int32_t rc = decode(in);
    if (in->exiting) {
        return;
    }
    if (rc != 0) {
        note_failure(in, rc, has_pieces);
        return;
    }
    note_batch(in);
    note_time(in, (double)(kvfb_now_ns() - began) / 1000, has_pieces);
    note_figures(in);
}

/* Waits until there is something to do. False: the instance ends. */
static bool wait_for_work(kvfb_instance *in) {
    pthread_mutex_lock(&in->lock);
    while (!in->stopping && in->waiting.num == 0 && in->num_busy == 0) {
        pthread_cond_wait(&in->work, &in->lock);
    }
    bool goes_on = !in->stopping;
    pthread_mutex_unlock(&in->lock);
    return goes_on;
}

static void end_all(kvfb_instance *in) {
    kvfb_request *r;
    for (uint32_t i = 0; i < num_slots(in); i++) {
        if (in->slots[i].request != NULL) {
            fail(in, &in->slots[i], error_of(2));
        }
    }
    do {
        pthread_mutex_lock(&in->lock);
        r = kvfb_queue_take(&in->waiting);
        pthread_mutex_unlock(&in->lock);
        if (r != NULL) {
            kvfb_respond_error(r, error_of(2));
        }
    } while (r != NULL);
}

void *kvfb_loop_run(void *arg) {
    kvfb_instance *in = arg;
    while (wait_for_work(in)) {
        answer_expired(in);
        admit(in);
        drop_cancelled(in);
        step(in);
    }
    if (!in->exiting) {
        end_all(in);
    }
    return NULL;
}
