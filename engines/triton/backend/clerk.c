/* SPDX-License-Identifier: Apache-2.0
 *
 * The clerk: a thread of an instance for what may wait for a store, so that no answer waits for it. It reads the
 * conversation of a session before its prompt is made, stores the turn when the answer is complete, and brings the
 * metrics up to date.
 */
#include <errno.h>
#include <time.h>

#include "triton/backend/backend.h"

enum { METRICS_S = 1, STORE_TURN_MS = 10000 };

static bool is_answered(const kvfb_request *r) {
    return r->finish != KVFB_FINISH_NONE || r->error != NULL;
}

/* ---- before and after ---- */

static TRITONSERVER_Error *prepare(kvfb_instance *in, kvfb_request *r) {
    const kvfb_config *config = &in->model->config;
    kvf_error err = {.status = KVF_OK};
    kvf_status status =
        kvfl_chat_load(&r->chat, &err, in->model->store, r->session, config->tenant, KVF_MS(config->budget_ms), false);
    return status == KVF_OK ? kvfb_prompt_make(r, in->space) : kvfb_error_of("session", status, &err);
}

static void begin(kvfb_instance *in, kvfb_request *r) {
    TRITONSERVER_Error *error = prepare(in, r);
    pthread_mutex_lock(&in->lock);
    in->at_desk--;
    if (error == NULL && in->stopping) {
        error = kvfb_error(TRITONSERVER_ERROR_UNAVAILABLE, "the model is being unloaded");
    }
    if (error == NULL) {
        kvfb_queue_put(&in->waiting, r);
        pthread_cond_signal(&in->work);
    } else {
        pthread_cond_signal(&in->room);
    }
    pthread_mutex_unlock(&in->lock);
    if (error != NULL) {
        kvfb_respond_error(r, error);
    }
}

static void conclude(kvfb_instance *in, kvfb_request *r) {
    kvf_error err = {.status = KVF_OK};
    const kvfl_new_turn turn = {
        .question = r->text,
        .answer = r->answer.text != NULL ? r->answer.text : "",
        .prompt = r->prompt.ids + r->num_old,
        .num_prompt = r->prompt.num - r->num_old,
        .said = &r->said,
        .whole = r->whole,
        .engine = r->is_cut ? NULL : in->space, /* the next prompt has the answer as the client saw it */
    };
    r->session_stored = kvfl_chat_add(&r->chat, &err, &turn, KVF_MS(STORE_TURN_MS)) == KVF_OK;
    if (!r->session_stored) {
        kvfb_log(TRITONSERVER_LOG_WARN, "model %s: %s", in->model->name, err.what);
    }
    kvfb_respond_end(r);
}

void kvfb_clerk_give(kvfb_instance *in, kvfb_request *r) {
    pthread_mutex_lock(&in->lock);
    kvfb_queue_put(&in->desk, r);
    pthread_cond_signal(&in->desk_work);
    pthread_mutex_unlock(&in->lock);
}

/* ---- the thread ---- */

static struct timespec deadline_in(int seconds) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_sec += seconds;
    return at;
}

/* The next request, or NULL after a while. Ends when the loop has ended (`alone`) and nothing is left. */
static kvfb_request *wait_for_request(kvfb_instance *in, bool *ended) {
    struct timespec until = deadline_in(METRICS_S);
    pthread_mutex_lock(&in->lock);
    int rc = 0;
    while (in->desk.num == 0 && !in->loop_ended && rc != ETIMEDOUT) {
        rc = pthread_cond_timedwait(&in->desk_work, &in->lock, &until);
    }
    kvfb_request *r = in->exiting ? NULL : kvfb_queue_take(&in->desk);
    *ended = r == NULL && in->loop_ended;
    pthread_mutex_unlock(&in->lock);
    return r;
}

static void update_metrics(kvfb_instance *in) {
    pthread_mutex_lock(&in->lock);
    in->figures.busy_slots = in->num_busy;
    in->figures.queued = in->waiting.num + in->at_desk;
    kvfb_figures figures = in->figures;
    pthread_mutex_unlock(&in->lock);
    kvfb_metrics_update(in->metrics, &figures, in->model->store);
}

void *kvfb_clerk_run(void *arg) {
    kvfb_instance *in = arg;
    bool ended = false;
    uint64_t updated_ns = 0;
    while (!ended) {
        kvfb_request *r = wait_for_request(in, &ended);
        if (r != NULL) {
            (is_answered(r) ? conclude : begin)(in, r);
        }
        if (kvfb_now_ns() - updated_ns >= METRICS_S * 1000000000ull) {
            update_metrics(in);
            updated_ns = kvfb_now_ns();
        }
    }
    return NULL;
}
