/* SPDX-License-Identifier: Apache-2.0
 *
 * The shim, loaded before a program's libllama (LD_PRELOAD, by `kvferry exec`). It defines the functions through which
 * the program decodes, changes the memory and reads results, and passes each on to libllama. It is a thin layer: the
 * engine (decode.c, follow.c), linked into it, decides what to load and follows the sequences.
 *
 *   hooks.c    the functions of libllama
 *   adapters.c LoRA adapters and control vectors
 *   batch.c    what a llama_batch_ext holds, which llama.cpp does not tell
 *   context.c  models and contexts; attaching to them
 *   report.c   options, the log and the numbers
 */
#ifndef KVFL_SHIM_H
#define KVFL_SHIM_H

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>

#include "llama/engine.h"

/* libllama's own function. */
#define REAL(name)                                            \
    __extension__({                                           \
        static __typeof__(&name) real_;                       \
        if (real_ == NULL) {                                  \
            *(void **)(void *)&real_ = kvfl_shim_next(#name); \
        }                                                     \
        real_;                                                \
    })
void *kvfl_shim_next(const char *name);

/* While this is not 0, the calls of this thread are libllama's own, or the engine's, and pass straight through. */
extern _Thread_local unsigned kvfl_shim_inside;

/* ---- adapters.c */
#define KVFL_SHIM_LORAS 64u /* set at a time */
typedef struct kvfl_shim_adapters {
    const struct llama_adapter_lora *loras[KVFL_SHIM_LORAS]; /* in the order in which libllama took them */
    float scales[KVFL_SHIM_LORAS];
    size_t num_loras;
    uint8_t (*layers)[32]; /* of the control vector: hashes, of layer 1 and the following ones */
    size_t num_layers;
    int32_t first_layer, last_layer; /* that it is added to */
    bool too_many, lost;             /* of the LoRAs; of a layer, if there was no memory */
    char *text;                      /* NULL: none; or unknown, if that is set */
    bool unknown;
    bool changed; /* since the engine was told */
} kvfl_shim_adapters;

#define KVFL_SHIM_CONTEXTS 32u /* the most at a time */
typedef struct kvfl_shim_context kvfl_shim_context;
/* `files` were opened before the load; NULL: that was not possible. */
void kvfl_shim_lora_loaded(const struct llama_adapter_lora *, const kvfl_files *files);
void kvfl_shim_lora_freed(const struct llama_adapter_lora *);
/* After libllama has taken them. */
void kvfl_shim_set_loras(kvfl_shim_context *, struct llama_adapter_lora *const *, size_t num, const float *scales);
void kvfl_shim_set_control(kvfl_shim_context *, const float *data, size_t len, int32_t n_embd, int32_t first,
                           int32_t last);
void kvfl_shim_adapters_free(kvfl_shim_adapters *);

/* ---- context.c */
struct kvfl_shim_context {
    struct llama_context *ctx; /* NULL: a free place */
    struct llama_model *model;
    llama_memory_t mem;
    struct llama_context_params params;
    uint32_t num_seqs; /* as the program requested; the scratch sequence comes after them */
    enum { KVFL_UNTRIED, KVFL_SERVED, KVFL_REFUSED } state;
    kvf_llama *kv;
    kvfl_shim_adapters adapters;
    bool outputs_all, hidden, not_causal, warm_up;
    /* of a warm-up: recreated at a decode after its end, because its outputs may be read until then */
    bool stale_graph;
    bool idle; /* its adapters are unknown, or can't be known */
    int64_t last_try_us;
    kvf_earlier *earlier; /* NULL until it is served, or without memory */
};

/* The context, if it is served and this call is the program's own; NULL: only pass the call on. */
kvfl_shim_context *kvfl_shim_of(const struct llama_context *);
kvfl_shim_context *kvfl_shim_of_memory(llama_memory_t);
/* The same for a context that may not be served yet: at a decode it is attached. */
kvfl_shim_context *kvfl_shim_known(const struct llama_context *);
kvfl_shim_context *kvfl_shim_to_decode(struct llama_context *);
struct llama_context *kvfl_shim_open(struct llama_model *, struct llama_context_params);
void kvfl_shim_close(struct llama_context *);
/* Takes over `files`, which were opened before the load; NULL: not from files of known names. */
void kvfl_shim_model_loaded(struct llama_model *, kvfl_files *files, const struct llama_model_params *);
void kvfl_shim_model_freed(struct llama_model *);
/* Training has changed the weights, so the file no longer names them. */
void kvfl_shim_model_trained(const struct llama_model *);
void kvfl_shim_set_mode(kvfl_shim_context *);

/* ---- batch.c */
typedef struct kvfl_shim_batch {
    const struct llama_batch_ext *batch;
    struct llama_batch plain; /* the same batch, if `odd` is KVF_ASIDE_NONE */
    int32_t room;
    kvf_llama_aside odd;
    bool seqs[256];
    bool lost; /* no memory */
} kvfl_shim_batch;

void kvfl_shim_batch_clear(const struct llama_batch_ext *, bool gone);
void kvfl_shim_batch_add(const struct llama_batch_ext *, int32_t index, llama_seq_id, llama_token token,
                         kvf_llama_aside odd);
void kvfl_shim_batch_also(const struct llama_batch_ext *, llama_seq_id);
void kvfl_shim_batch_mark(const struct llama_batch_ext *, kvf_llama_aside odd);
void kvfl_shim_batch_pos(const struct llama_batch_ext *, int32_t index, llama_pos pos);
void kvfl_shim_batch_output(const struct llama_batch_ext *, int32_t index, bool output);
const kvfl_shim_batch *kvfl_shim_batch_of(const struct llama_batch_ext *); /* NULL: not known */

/* ---- report.c */
typedef struct kvfl_shim_options {
    const char *tenant, *stats_path;
    uint32_t budget_ms, block_tokens;
    int portable;
    bool quiet;
} kvfl_shim_options;
const kvfl_shim_options *kvfl_shim_get_options(void);
kvf_store *kvfl_shim_store(void); /* opened by the first call; NULL: none, or not usable (logged) */
void kvfl_shim_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void kvfl_shim_on_prompt(void *ctx, llama_seq_id, const kvf_llama_report *); /* ctx: the kvfl_shim_context */
/* Call this before the sequence loses what it holds from `first` on: an answer that may come back as other tokens. */
void kvfl_shim_before_cut(kvfl_shim_context *, llama_seq_id, llama_pos first);
/* The counters of this handle are reported from now on; the second call, before it is closed, keeps what they are. */
void kvfl_shim_add_live(const kvf_llama *);
void kvfl_shim_add_gone(const kvf_llama *);
void kvfl_shim_note_refused(const char *why);

#endif
