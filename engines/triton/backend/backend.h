/* SPDX-License-Identifier: Apache-2.0
 *
 * Triton's backend "kvferry": text generation with llama.cpp whose KV cache is kept in a store. What its files share.
 * Calls go down:
 *
 *   api.c        what Triton calls, and nothing else is exported
 *   instance.c   two llama contexts with their threads
 *   loop.c       continuous batching: requests join and leave while others decode
 *   fill.c       the context that computes and loads prompts
 *   clerk.c      a thread for what may wait for a store: conversations, and metrics
 *   slot.c       one answer: tokens, stop strings, text in whole characters
 *   prompt.c     the tokens of a request's prompt
 *   model.c      weights and store, shared by the instances of a model
 *   metrics.c    Triton's metrics endpoint
 *   respond.c    outputs
 *   request.c    inputs
 *   queue.c      requests that wait
 *   config.c     the parameters of config.pbtxt, and its inputs and outputs
 *   say.c        errors and Triton's log
 *
 * Threads. Triton's threads call api.c: they read inputs, turn text into tokens, and queue. The loop's thread alone
 * uses the llama contexts. The clerk's thread reads and writes conversations. A request belongs to one thread at a time;
 * instance->lock guards the queues through which it passes.
 */
#ifndef KVFB_BACKEND_H
#define KVFB_BACKEND_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "llama/talk/talk.h"
#include "triton/abi/backend.h"

/* ---- say.c ---- */

/* An error of Triton, which the caller owns. NULL is success, also when there is no memory for an error. */
TRITONSERVER_Error *kvfb_error(TRITONSERVER_Error_Code code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* The same for what kvferry reports: `what` names what failed. */
TRITONSERVER_Error *kvfb_error_of(const char *what, kvf_status status, const kvf_error *err);
TRITONSERVER_Error *kvfb_no_memory(void);
/* Frees an error that nobody can be told of. Returns whether there was none. */
bool kvfb_drop(TRITONSERVER_Error *error);
void kvfb_log(TRITONSERVER_LogLevel level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* From now on the messages of kvferry and llama.cpp go to Triton's log. */
void kvfb_log_attach(void);
/* The first error that llama.cpp has logged on this thread since the last call. */
const char *kvfb_llama_error(void);
uint64_t kvfb_now_ns(void);

/* ---- config.c ---- */

#define KVFB_MAX_STORES 8u

typedef struct kvfb_config {
    char *model;         /* path of the GGUF file; NULL: the only one in the version's folder */
    char *store;         /* URLs, split at blanks; NULL: none */
    char *tenant;        /* NULL: none */
    char *secret_file;   /* as kvf_options.secret_files */
    char *kv_type;       /* name of ggml */
    char *flash_attn;    /* on, off, auto */
    char *when_full;     /* reject, wait */
    uint32_t context;    /* tokens of one request: prompt and answer; 0: what the model was trained for, at most 8192 */
    uint32_t slots;      /* requests at once */
    uint32_t queue;      /* requests that wait for a slot */
    uint32_t max_tokens; /* of an answer, where the request does not say */
    uint32_t threads;    /* 0: one for each core */
    uint32_t gpu_layers;
    uint32_t budget_ms;  /* of the lookup and load of one prompt */
    uint32_t piece;      /* tokens of a prompt that are computed between two tokens of other answers */
    uint32_t backlog_mb; /* memory for blocks that wait to be written */
    bool portable;
    /* Of config.pbtxt itself. */
    bool decoupled;
} kvfb_config;

/* Reads the parameters of a model's configuration. An unknown or malformed one is an error. */
TRITONSERVER_Error *kvfb_config_read(kvfb_config *out, TRITONBACKEND_Model *model);
void kvfb_config_cleanup(kvfb_config *);
/* Adds what config.pbtxt leaves out: inputs, outputs, decoupled responses, one instance on the CPU. */
TRITONSERVER_Error *kvfb_config_complete(TRITONBACKEND_Model *model);

/* ---- metrics.c ---- */

typedef struct kvfb_metrics kvfb_metrics;

/* What one instance adds to the metrics, since it began. */
typedef struct kvfb_figures {
    kvf_llama_counters engine;
    uint64_t generated; /* tokens */
    uint32_t busy_slots, queued;
} kvfb_figures;

/* The families of the process. Without metrics in this server: nothing is reported, and no call fails. */
void kvfb_metrics_open(void);
void kvfb_metrics_close(void);
kvfb_metrics *kvfb_metrics_new(const char *model, uint64_t version, const char *instance);
/* `store` may be NULL. For one thread at a time. */
void kvfb_metrics_update(kvfb_metrics *, const kvfb_figures *, kvf_store *store);
void kvfb_metrics_free(kvfb_metrics *);

/* ---- model.c ---- */

typedef struct kvfb_model {
    TRITONBACKEND_Model *triton;
    const char *name;
    uint64_t version;
    kvfb_config config;
    char *path; /* of the GGUF file */
    struct llama_model_params params;
    struct llama_model *weights;
    const struct llama_vocab *vocab;
    kvfl_template chat_template;
    uint32_t context; /* tokens of one request */
    size_t max_text;  /* bytes: longer text surely has more tokens than the context */
    bool goes_back;   /* the end of a sequence can be removed without losing what is before it */
    kvf_store *store; /* NULL: none */
} kvfb_model;

TRITONSERVER_Error *kvfb_model_open(kvfb_model **out, TRITONBACKEND_Model *triton);
void kvfb_model_close(kvfb_model *);

/* ---- request.c ---- */

typedef struct kvfb_sampling {
    float temperature, top_p, min_p;
    int32_t top_k;
    uint32_t seed;
} kvfb_sampling;

typedef enum kvfb_finish { KVFB_FINISH_NONE, KVFB_FINISH_STOP, KVFB_FINISH_LENGTH } kvfb_finish;

#define KVFB_MAX_STOPS 16u

typedef struct kvfb_request {
    struct kvfb_request *next;
    TRITONBACKEND_Request *triton;
    TRITONBACKEND_ResponseFactory *factory;
    struct kvfb_instance *instance;

    /* Inputs. Exactly one of text, messages and ids. */
    char *text, *messages;
    size_t text_len;
    kvfl_tokens ids;
    uint32_t max_tokens;
    kvfb_sampling sampling;
    char *stops[KVFB_MAX_STOPS];
    size_t num_stops, longest_stop;
    char *session; /* NULL: none */
    bool stream;
    uint32_t outputs; /* those that are wanted, a bit each */

    /* The prompt. */
    kvfl_tokens prompt;
    kvfl_chat chat; /* of a session */
    bool whole;     /* the prompt is not chat.tokens and what was added */
    size_t num_old;

    /* The answer. */
    kvf_llama_report report;
    kvfl_tokens said;
    kvfl_text answer;
    size_t shown;    /* bytes of the answer that may be sent: no stop string can begin in them */
    size_t sent;     /* bytes that were sent */
    size_t sent_ids; /* tokens that were sent */
    kvfb_finish finish;
    bool is_cut; /* at a stop string: its tokens say more than its text */
    bool session_stored;
    TRITONSERVER_Error *error; /* it failed: sent instead of the answer's end */

    uint64_t began_ns, deadline_ns, prefill_ns, first_ns, computed_ns;
} kvfb_request;

/* Reads a request. On an error *out is still set (NULL: no memory), so that it can be answered. */
TRITONSERVER_Error *kvfb_request_read(kvfb_request **out, struct kvfb_instance *, TRITONBACKEND_Request *);
bool kvfb_request_is_cancelled(const kvfb_request *);

/* ---- respond.c ---- */

typedef enum kvfb_output {
    KVFB_TEXT_OUTPUT,
    KVFB_OUTPUT_IDS,
    KVFB_FINISH_REASON,
    KVFB_PROMPT_TOKENS,
    KVFB_LOADED_TOKENS,
    KVFB_LOAD_MS,
    KVFB_PREFILL_MS,
    KVFB_PLAN,
    KVFB_SESSION_STORED,
    KVFB_NUM_OUTPUTS
} kvfb_output;
typedef struct kvfb_output_kind {
    const char *name, *type; /* as in config.pbtxt, without TYPE_ */
    TRITONSERVER_DataType datatype;
    int dims;
} kvfb_output_kind;
extern const kvfb_output_kind kvfb_outputs[KVFB_NUM_OUTPUTS];

/* Sends what may be shown and was not sent yet. False: the client is gone, or a response could not be made. */
bool kvfb_respond_more(kvfb_request *);
/* Sends the end, or request->error, with Triton's final flag; then releases and frees the request. */
void kvfb_respond_end(kvfb_request *);
void kvfb_release(TRITONBACKEND_Request *triton);
/* The same with this error. */
void kvfb_respond_error(kvfb_request *, TRITONSERVER_Error *error);

/* ---- prompt.c ---- */

/* Makes request->prompt, and checks that it fits. For a session request->chat is loaded before. `space`: of the
 * context; NULL: none. */
TRITONSERVER_Error *kvfb_prompt_make(kvfb_request *, const kvf_space *space);

/* ---- slot.c ---- */

typedef struct kvfb_slot {
    llama_seq_id seq;      /* in the context of the answers */
    kvfb_request *request; /* NULL: free */
    size_t at;             /* tokens in its sequence; 0: the prompt is not complete */
    int32_t output;        /* index of its output in the batch */
    llama_token next;      /* sampled, and not yet in the sequence */
    struct llama_sampler *sampler;
    kvfl_utf8 utf8;
} kvfb_slot;

/* Begins with the request, whose prompt is made. */
TRITONSERVER_Error *kvfb_slot_begin(kvfb_slot *, kvfb_request *);
/* Takes the next token of the answer. Returns whether the answer goes on: else request->finish says why, or
 * request->error is set. */
bool kvfb_slot_take(kvfb_slot *, llama_token token);
/* The request is no longer the slot's. */
kvfb_request *kvfb_slot_leave(kvfb_slot *);

/* ---- queue.c ---- */

typedef struct kvfb_queue {
    kvfb_request *first, *last;
    uint32_t num;
} kvfb_queue;
void kvfb_queue_put(kvfb_queue *, kvfb_request *);
kvfb_request *kvfb_queue_take(kvfb_queue *); /* NULL: empty */

/* ---- instance.c ---- */

/* The context of the prompts. */
typedef struct kvfb_fill {
    struct llama_context_params params;
    struct llama_context *ctx;
    kvf_llama *kv; /* NULL: this context is refused, and works without a store */
    size_t block;  /* tokens */
    struct llama_batch batch;
    kvfb_slot *slot;  /* whose prompt is under way; NULL: none */
    kvfl_tokens held; /* of a prompt under way, or the whole blocks of the last one */
    size_t resident;  /* leading tokens of the prompt that were held when it began */
    size_t stored;    /* leading tokens of the prompt that are in the store, as far as a quick lookup told */
    size_t piece;     /* tokens of the next piece of a prompt that is loaded */
    uint8_t *rows;    /* for prompts that move; of `room` bytes */
    size_t room;
} kvfb_fill;

typedef struct kvfb_instance {
    TRITONBACKEND_ModelInstance *triton;
    kvfb_model *model;
    struct llama_context *ctx; /* of the answers: a sequence for each slot */
    struct llama_batch batch;  /* a token of each answer */
    kvfb_slot *slots;
    kvfb_fill fill;
    kvf_space *space;      /* NULL: none */
    double step_us;        /* an average batch of answers */
    uint64_t generated;    /* tokens */
    kvfb_metrics *metrics; /* the clerk's */
    pthread_t loop, clerk;
    bool has_loop, has_clerk;
    atomic_bool abort; /* leave a computation under way */

    pthread_mutex_t lock;
    pthread_cond_t work, desk_work, room;
    kvfb_queue waiting;        /* for a slot; `lock` */
    kvfb_queue desk;           /* for the clerk; `lock` */
    uint32_t num_busy;         /* slots; `lock` */
    uint32_t at_desk;          /* requests that the clerk has before they wait; `lock` */
    bool stopping, loop_ended; /* `lock` */
    atomic_bool exiting;       /* the process ends: no request is answered any more */
    struct kvfb_instance *next_running;
    kvfb_figures figures; /* `lock` */
} kvfb_instance;

TRITONSERVER_Error *kvfb_instance_open(kvfb_instance **out, TRITONBACKEND_ModelInstance *triton, kvfb_model *model);
/* Ends the threads; requests that are left are answered with an error. */
void kvfb_instance_close(kvfb_instance *);
/* Takes a request of Triton: queues it, or answers it. */
void kvfb_instance_take(kvfb_instance *, TRITONBACKEND_Request *);

/* ---- fill.c: the loop's thread only ---- */

/* `common`: parameters of both contexts. */
TRITONSERVER_Error *kvfb_fill_open(kvfb_instance *, const struct llama_context_params *common);
void kvfb_fill_close(kvfb_instance *);
/* The slot's prompt is the next one. None is under way. */
void kvfb_fill_begin(kvfb_instance *, kvfb_slot *);
/* Brings in the next piece: `computed` tokens (whole blocks) if they must be computed, and as many as are quick if they
 * are stored; all of these if `alone`. Returns 0, or what llama_decode would return. */
int32_t kvfb_fill_step(kvfb_instance *, size_t computed, bool alone);
/* How long that took adapts the pieces of stored prompts. */
void kvfb_fill_note_time(kvfb_instance *, double us);
bool kvfb_fill_is_done(const kvfb_instance *);
/* The prompt is complete: makes its report. Returns the index of its output in fill.ctx. */
int32_t kvfb_fill_end(kvfb_instance *);
/* Copies the prompt that has ended last into the slot's sequence of the context of the answers. */
TRITONSERVER_Error *kvfb_fill_hand_over(kvfb_instance *, kvfb_slot *);

/* ---- clerk.c, loop.c: the threads ---- */

void *kvfb_clerk_run(void *instance);
void *kvfb_loop_run(void *instance);
/* Hands a request whose answer is complete to the clerk, who stores its turn. */
void kvfb_clerk_give(kvfb_instance *, kvfb_request *);

#endif
