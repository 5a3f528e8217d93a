/* SPDX-License-Identifier: Apache-2.0
 *
 * An instance: a llama context for prompts, one with a sequence for each slot for answers, a thread that decodes, and one
 * that keeps the books.
 */
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "triton/backend/backend.h"

/* ---- the contexts ---- */

static int32_t num_cores(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) {
        return CPU_COUNT(&set);
    }
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int32_t)online : 1;
}

static bool on_abort(void *instance) {
    return atomic_load_explicit(&((kvfb_instance *)instance)->abort, memory_order_relaxed);
}

static enum ggml_type kv_type_of(const char *name) {
    for (int type = 0; type < GGML_TYPE_COUNT; type++) {
        const char *known = ggml_type_name((enum ggml_type)type);
        if (known != NULL && strcmp(known, name) == 0) {
            return (enum ggml_type)type;
        }
    }
    return GGML_TYPE_F16;
}

static enum llama_flash_attn_type flash_attn_of(const char *name) {
    return strcmp(name, "on") == 0    ? LLAMA_FLASH_ATTN_TYPE_ENABLED
           : strcmp(name, "off") == 0 ? LLAMA_FLASH_ATTN_TYPE_DISABLED
                                      : LLAMA_FLASH_ATTN_TYPE_AUTO;
}

static struct llama_context_params common_params(kvfb_instance *in) {
    const kvfb_config *config = &in->model->config;
    struct llama_context_params p = llama_context_default_params();
    p.kv_unified = true;
    p.swa_full = false;
    p.n_threads = config->threads > 0 ? (int32_t)config->threads : num_cores();
    p.n_threads_batch = p.n_threads;
    p.type_k = p.type_v = kv_type_of(config->kv_type);
    p.flash_attn_type = flash_attn_of(config->flash_attn);
    p.abort_callback = on_abort;
    p.abort_callback_data = in;
    return p;
}

/* The context of the answers. */
static TRITONSERVER_Error *make_context(kvfb_instance *in, struct llama_context_params p) {
    const kvfb_config *config = &in->model->config;
    uint64_t cells = (uint64_t)in->model->context * config->slots;
    if (cells > INT32_MAX) {
        return kvfb_error(TRITONSERVER_ERROR_INVALID_ARG,
                          "config.pbtxt: %u slots of %u tokens are too many (parameters \"slots\", \"context_size\")",
                          config->slots, in->model->context);
    }
    p.n_ctx = (uint32_t)cells;
    p.n_seq_max = config->slots;
    p.n_batch = config->slots;
    (void)kvfb_llama_error();
    in->ctx = llama_init_from_model(in->model->weights, p);
    return in->ctx != NULL ? NULL
                           : kvfb_error(TRITONSERVER_ERROR_UNAVAILABLE,
                                        "no context of %llu tokens: %s; lower slots or context_size",
                                        (unsigned long long)cells, kvfb_llama_error());
}

/* ---- opening ---- */

static TRITONSERVER_Error *make_slots(kvfb_instance *in) {
    uint32_t num = in->model->config.slots;
    in->slots = calloc(num, sizeof *in->slots);
    in->batch = llama_batch_init((int32_t)num, 0, 1);
    if (in->slots == NULL || in->batch.token == NULL) {
        return kvfb_no_memory();
    }
    for (uint32_t i = 0; i < num; i++) {
        in->slots[i].seq = (llama_seq_id)i;
    }
    return NULL;
}

static TRITONSERVER_Error *start_threads(kvfb_instance *in) {
    in->has_loop = pthread_create(&in->loop, NULL, kvfb_loop_run, in) == 0;
    in->has_clerk = in->has_loop && pthread_create(&in->clerk, NULL, kvfb_clerk_run, in) == 0;
    return in->has_clerk ? NULL : kvfb_error(TRITONSERVER_ERROR_UNAVAILABLE, "no thread could be started");
}

static void init_locks(kvfb_instance *in) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&in->lock, NULL);
    pthread_cond_init(&in->work, &attr);
    pthread_cond_init(&in->desk_work, &attr);
    pthread_cond_init(&in->room, &attr);
    pthread_condattr_destroy(&attr);
}

static TRITONSERVER_Error *open_instance(kvfb_instance *in) {
    const char *name = NULL;
    TRITONSERVER_Error *error = TRITONBACKEND_ModelInstanceName(in->triton, &name);
    const struct llama_context_params common = common_params(in);
    if (error == NULL) {
        error = make_context(in, common);
    }
    if (error == NULL) {
        error = kvfb_fill_open(in, &common);
    }
    if (error == NULL) {
        error = make_slots(in);
    }
    if (error != NULL) {
        return error;
    }
    in->metrics = kvfb_metrics_new(in->model->name, in->model->version, name);
    return start_threads(in);
}

/* ---- the end ---- */

/* Requests that are left are answered with an error, unless the process ends. */
static void end_threads(kvfb_instance *in) {
    pthread_mutex_lock(&in->lock);
    in->stopping = true;
    pthread_cond_broadcast(&in->work);
    pthread_cond_broadcast(&in->room);
    pthread_mutex_unlock(&in->lock);
    atomic_store(&in->abort, true);
    if (in->has_loop) {
        pthread_join(in->loop, NULL);
        in->has_loop = false;
    }
    pthread_mutex_lock(&in->lock);
    in->loop_ended = true;
    pthread_cond_broadcast(&in->desk_work);
    pthread_mutex_unlock(&in->lock);
    if (in->has_clerk) {
        pthread_join(in->clerk, NULL);
        in->has_clerk = false;
    }
}

/* ---- the end of the process ----
 *
 * When its exit timeout is over, Triton calls exit while requests are under way, and closes no instance. The threads
 * end before the destructors of llama.cpp run, which would pull the memory from under a computation. They answer
 * nobody: Triton has closed its connections. */

static pthread_mutex_t running_lock = PTHREAD_MUTEX_INITIALIZER;
static kvfb_instance *running;
static pid_t running_pid;

static void at_exit(void) {
    if (getpid() != running_pid) {
        return; /* a forked child has none of the threads */
    }
    pthread_mutex_lock(&running_lock);
    for (kvfb_instance *in = running; in != NULL; in = in->next_running) {
        in->exiting = true;
        end_threads(in);
    }
    running = NULL;
    pthread_mutex_unlock(&running_lock);
}

static void register_at_exit(void) {
    running_pid = getpid();
    (void)atexit(at_exit);
}

/* After the context was made: functions that are registered later run sooner than the destructors of its libraries. */
static void add_running(kvfb_instance *in) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_at_exit);
    pthread_mutex_lock(&running_lock);
    in->next_running = running;
    running = in;
    pthread_mutex_unlock(&running_lock);
}

static void remove_running(const kvfb_instance *in) {
    pthread_mutex_lock(&running_lock);
    kvfb_instance **at = &running;
    while (*at != NULL && *at != in) {
        at = &(*at)->next_running;
    }
    if (*at != NULL) {
        *at = in->next_running;
    }
    pthread_mutex_unlock(&running_lock);
}

void kvfb_instance_close(kvfb_instance *in) {
    if (in == NULL) {
        return;
    }
    remove_running(in);
    end_threads(in);
    free(in->slots);
    if (in->batch.token != NULL) {
        llama_batch_free(in->batch);
    }
    kvfb_fill_close(in);
    llama_free(in->ctx);
    kvfb_metrics_free(in->metrics);
    pthread_cond_destroy(&in->work);
    pthread_cond_destroy(&in->desk_work);
    pthread_cond_destroy(&in->room);
    pthread_mutex_destroy(&in->lock);
    free(in);
}

TRITONSERVER_Error *kvfb_instance_open(kvfb_instance **out, TRITONBACKEND_ModelInstance *triton, kvfb_model *model) {
    kvfb_instance *in = calloc(1, sizeof *in);
    if (in == NULL) {
        return kvfb_no_memory();
    }
    in->triton = triton;
    in->model = model;
    init_locks(in);
    TRITONSERVER_Error *error = open_instance(in);
    if (error != NULL) {
        kvfb_instance_close(in);
        in = NULL;
    } else {
        add_running(in);
    }
    *out = in;
    return error;
}

/* ---- requests ---- */

static bool is_full(const kvfb_instance *in) {
    const kvfb_config *config = &in->model->config;
    return in->waiting.num + in->at_desk >= config->queue + config->slots - in->num_busy;
}

/* Queues it, or says why not. */
static TRITONSERVER_Error *enqueue(kvfb_instance *in, kvfb_request *r) {
    TRITONSERVER_Error *error = NULL;
    bool waits = strcmp(in->model->config.when_full, "wait") == 0;
    pthread_mutex_lock(&in->lock);
    while (waits && is_full(in) && !in->stopping) {
        pthread_cond_wait(&in->room, &in->lock);
    }
    if (in->stopping) {
        error = kvfb_error(TRITONSERVER_ERROR_UNAVAILABLE, "the model is being unloaded");
    } else if (is_full(in)) {
        error =
            kvfb_error(TRITONSERVER_ERROR_UNAVAILABLE,
                       "all %u slots are busy and %u requests wait (parameters \"slots\", \"queue\"); try again later",
                       in->model->config.slots, in->waiting.num + in->at_desk);
    } else if (r->session != NULL) {
        in->at_desk++;
        kvfb_queue_put(&in->desk, r);
        pthread_cond_signal(&in->desk_work);
    } else {
        kvfb_queue_put(&in->waiting, r);
        pthread_cond_signal(&in->work);
    }
    pthread_mutex_unlock(&in->lock);
    return error;
}

/* Without memory for a request it is answered without one. */
static void refuse(TRITONBACKEND_Request *triton, TRITONSERVER_Error *error) {
    TRITONBACKEND_Response *response = NULL;
    if (kvfb_drop(TRITONBACKEND_ResponseNew(&response, triton))) {
        kvfb_drop(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, error));
    }
    kvfb_drop(error);
    kvfb_release(triton);
}

void kvfb_instance_take(kvfb_instance *in, TRITONBACKEND_Request *triton) {
    kvfb_request *r = NULL;
    TRITONSERVER_Error *error = kvfb_request_read(&r, in, triton);
    if (r == NULL) {
        refuse(triton, error);
        return;
    }
    if (error == NULL && r->session == NULL) {
        error = kvfb_prompt_make(r, in->space);
    }
    if (error == NULL) {
        error = enqueue(in, r);
    }
    if (error != NULL) {
        kvfb_respond_error(r, error);
    }
}
