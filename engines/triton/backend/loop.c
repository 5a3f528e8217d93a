/* SPDX-License-Identifier: Apache-2.0
 *
 * Continuous batching. Each step brings in a piece of the oldest prompt, in the context of the prompts (fill.c), and
 * then decodes the next token of every answer in one batch. Requests join and leave between two steps.
 *
 * How much of a prompt a step takes: while nobody streams, much. Else so much that the others do not wait long: a small
 * piece if it must be computed. What the store has comes faster, so its pieces grow while they are short beside a batch
 * of answers, and shrink when the store turns out to be slow.
 */
#include "triton/backend/backend.h"

#define ALONE_TOKENS 512u /* computed in a step while nobody streams */

static uint32_t num_slots(const kvfb_instance *in) {
    return in->model->config.slots;
}

static bool is_generating(const kvfb_slot *slot) {
    return slot->request != NULL && slot->at > 0;
}

/* ---- leaving ---- */

/* A prompt that was only computed is no turn of its conversation. */
static bool has_turn(const kvfb_request *r) {
    return r->session != NULL && r->error == NULL && r->max_tokens > 0;
}

/* The request leaves its slot, with its answer or request->error. */
static void leave(kvfb_instance *in, kvfb_slot *slot) {
    kvfb_request *r = kvfb_slot_leave(slot);
    llama_memory_seq_rm(llama_get_memory(in->ctx), slot->seq, -1, -1);
    in->fill.slot = in->fill.slot == slot ? NULL : in->fill.slot;
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

static kvfb_slot *free_slot(kvfb_instance *in) {
    uint32_t i = 0;
    while (i < num_slots(in) && in->slots[i].request != NULL) {
        i++;
    }
    return i < num_slots(in) ? &in->slots[i] : NULL;
}

static void begin(kvfb_instance *in, kvfb_slot *slot, kvfb_request *r) {
    TRITONSERVER_Error *error = kvfb_slot_begin(slot, r);
    pthread_mutex_lock(&in->lock);
    in->num_busy++;
    pthread_mutex_unlock(&in->lock);
    if (error != NULL) {
        slot->request = r;
        fail(in, slot, error);
    }
}

static void admit(kvfb_instance *in) {
    kvfb_slot *slot;
    kvfb_request *r;
    do {
        pthread_mutex_lock(&in->lock);
        slot = in->waiting.first != NULL ? free_slot(in) : NULL;
        r = slot != NULL ? kvfb_queue_take(&in->waiting) : NULL;
        pthread_mutex_unlock(&in->lock);
        if (r != NULL) {
            begin(in, slot, r);
        }
    } while (r != NULL);
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

/* ---- tokens ---- */

/* The next token of an answer, or its end. */
static void take(kvfb_instance *in, kvfb_slot *slot, struct llama_context *ctx, int32_t output) {
    bool more = kvfb_slot_take(slot, llama_sampler_sample(slot->sampler, ctx, output));
    if (!more || !kvfb_respond_more(slot->request)) {
        leave(in, slot);
    }
}

/* ---- prompts ---- */

static kvfb_slot *oldest_prompt(kvfb_instance *in) {
    kvfb_slot *oldest = NULL;
    for (uint32_t i = 0; i < num_slots(in); i++) {
        kvfb_slot *slot = &in->slots[i];
        bool waits = slot->request != NULL && slot->at == 0;
        if (waits && (oldest == NULL || slot->request->began_ns < oldest->request->began_ns)) {
            oldest = slot;
        }
    }
    return oldest;
}

static bool anybody_generates(const kvfb_instance *in) {
    uint32_t i = 0;
    while (i < num_slots(in) && !is_generating(&in->slots[i])) {
        i++;
    }
    return i < num_slots(in);
}

/* The first token of the answer. The others are computed beside the other answers. */
static void end_prompt(kvfb_instance *in, kvfb_slot *slot) {
    kvfb_request *r = slot->request;
    int32_t output = kvfb_fill_end(in);
    if (r->max_tokens == 0) {
        r->finish = KVFB_FINISH_LENGTH;
        leave(in, slot);
        return;
    }
    take(in, slot, in->fill.ctx, output);
    TRITONSERVER_Error *error = slot->request != NULL ? kvfb_fill_hand_over(in, slot) : NULL;
    if (error != NULL) {
        fail(in, slot, error);
    }
}

static void step_prompt(kvfb_instance *in) {
    kvfb_slot *slot = in->fill.slot != NULL ? in->fill.slot : oldest_prompt(in);
    if (slot == NULL) {
        return;
    }
    if (in->fill.slot == NULL) {
        kvfb_fill_begin(in, slot);
    }
    bool alone = !anybody_generates(in);
    uint64_t began = kvfb_now_ns();
    int32_t rc = kvfb_fill_step(in, alone ? ALONE_TOKENS : in->model->config.piece, alone);
    if (in->exiting) {
        return;
    }
    kvfb_fill_note_time(in, (double)(kvfb_now_ns() - began) / 1000);
    if (rc != 0) {
        fail(in, slot, error_of(rc));
    } else if (slot->request->error != NULL) {
        leave(in, slot);
    } else if (kvfb_fill_is_done(in)) {
        end_prompt(in, slot);
    }
}

/* ---- answers ---- */

static void add_token(kvfb_instance *in, kvfb_slot *slot) {
    struct llama_batch *batch = &in->batch;
    int32_t i = batch->n_tokens++;
    batch->token[i] = slot->next;
    batch->pos[i] = (llama_pos)slot->at;
    batch->n_seq_id[i] = 1;
    batch->seq_id[i][0] = slot->seq;
    batch->logits[i] = true;
    slot->output = i;
}

static void note_answers(kvfb_instance *in, int32_t rc) {
    for (uint32_t i = 0; i < num_slots(in); i++) {
        kvfb_slot *slot = &in->slots[i];
        if (is_generating(slot) && rc != 0) {
            fail(in, slot, error_of(rc));
        } else if (is_generating(slot)) {
            slot->at++;
            take(in, slot, in->ctx, slot->output);
        }
    }
}

static void step_answers(kvfb_instance *in) {
    in->batch.n_tokens = 0;
    for (uint32_t i = 0; i < num_slots(in); i++) {
        if (is_generating(&in->slots[i])) {
            add_token(in, &in->slots[i]);
        }
    }
    if (in->batch.n_tokens == 0) {
        return;
    }
    uint64_t began = kvfb_now_ns();
    int32_t rc = llama_decode(in->ctx, in->batch);
    if (in->exiting) {
        return;
    }
    in->generated += rc == 0 ? (uint64_t)in->batch.n_tokens : 0;
    note_answers(in, rc);
    double us = (double)(kvfb_now_ns() - began) / 1000;
    in->step_us = in->step_us > 0 ? 0.9 * in->step_us + 0.1 * us : us;
}

/* ---- the thread ---- */

static void note_figures(kvfb_instance *in) {
    kvf_llama_counters counters = {.struct_size = sizeof counters};
    if (in->fill.kv != NULL && kvf_llama_count(in->fill.kv, &counters) != KVF_OK) {
        return;
    }
    pthread_mutex_lock(&in->lock);
    in->figures.engine = counters;
    in->figures.generated = in->generated;
    pthread_mutex_unlock(&in->lock);
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
        step_prompt(in);
        step_answers(in);
        note_figures(in);
    }
    if (!in->exiting) {
        end_all(in);
    }
    return NULL;
}
