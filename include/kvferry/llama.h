/* SPDX-License-Identifier: Apache-2.0
 *
 * llama.cpp in three lines, through its public C API only:
 *
 *   kvf_llama_attach(&kv, &err, store, ctx, &options);          once per context
 *   kvf_llama_prefill(kv, &report, &err, seq, tokens, num);     loads what is stored, computes and saves the rest
 *   ... llama_decode() as ever ...
 *
 * One kvf_llama belongs to one llama_context and to the thread that uses that context. It needs one sequence id of the
 * context for itself (scratch): create the context with kv_unified = true and n_seq_max one larger than you need. Link
 * with -lkvferry-llama and the libllama that your program uses.
 */
#ifndef KVFERRY_LLAMA_H
#define KVFERRY_LLAMA_H

#include <llama.h>

#include "kvferry.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_llama kvf_llama;

/* Called during prefill with the tokens done so far; return nonzero to stop (KVF_CLOSED; the sequence then holds `done`
 * tokens). */
typedef int (*kvf_llama_progress_fn)(void *ctx, uint32_t done_tokens, uint32_t num_tokens);

typedef struct kvf_llama_options {
    uint32_t struct_size;
    llama_seq_id scratch_seq; /* a sequence id below n_seq_max that the program does not use */
    const char *model_path;   /* the GGUF the model came from (of a split model, the first file): its bytes are hashed,
                                 and the hash is remembered per file. It must still be the file that was loaded: one
                                 that has changed since, or that another path leads to now, is refused */
    const struct llama_context_params *context_params; /* what the context was created with */
    const char *adapters; /* describes every LoRA and control vector in use, with scales; NULL = none. After a change:
                             kvf_llama_set_adapters */
    const char *tenant;   /* NULL = none */
    const void *secret;   /* see kvf_space_options; NULL = that of the store, or none */
    size_t secret_len;
    /* A power of two from 64 to 4096; 0 = near 1 MiB a record, but at least 64 (see kvf_llama_prefill) */
    uint32_t block_tokens;
    int portable; /* 0: the numbers that this machine computes are part of the identity (a probe: the KV of four tokens),
                     so that a hit equals what would be computed here to the bit; 1: share across kinds of CPU and GPU */
    int64_t budget_us; /* of one prefill's lookup and load */
    kvf_llama_progress_fn progress;
    void *progress_ctx;
    /* What the model was loaded with. Needed with a store: metadata that was set over the file's own (kv_overrides) and
       the placement of tensors change KV, and llama.cpp tells neither. What it points to is read during the call. */
    const struct llama_model_params *model_params;
    /* The secret before `secret`, while it is replaced (see kvf_space_options). NULL = none. */
    const void *previous_secret;
    size_t previous_secret_len;
} kvf_llama_options;

/* kvf_llama_attach checks that the KV cache of this context and model can be taken apart and put together, byte for
 * byte, and names its space. Computes four tokens in the scratch sequence, two at a time, which takes two free
 * cells: outputs of an earlier llama_decode are gone afterwards. Ends a warm-up (llama_set_warmup), under which a
 * mixture of experts computes other KV; so do kvf_llama_prefill and kvf_llama_decode. docs/llama.md lists every setting
 * of llama.cpp, and whether it is in the space, without influence, or refused. Returns KVF_OK; KVF_REFUSED with the
 * reason (not unified, not causal, an evaluation callback, a kind of memory that is not known or not proven, no free
 * sequence or cells, a model file that is not proven to be the one that was loaded); KVF_LIMIT (options that are
 * missing or out of range; the message names the one); KVF_CONFIG (the model file can't be read, or is no GGUF file);
 * KVF_IO, KVF_NOMEM. */
KVF_API KVF_MUST_CHECK kvf_status kvf_llama_attach(kvf_llama **out, kvf_error *err, kvf_store *,
                                                   struct llama_context *ctx, const kvf_llama_options *options);
KVF_API void kvf_llama_detach(kvf_llama *);
/* The space of the adapters at hand, as long as they are; NULL: none, nothing is loaded or stored. */
KVF_API kvf_space *kvf_llama_space(kvf_llama *);

/* kvf_llama_set_adapters is to be called after every llama_set_adapters_lora and llama_set_adapter_cvec that changes
 * something, before the next token is computed. `adapters` describes all that is in use from now on, as in the options:
 * two descriptions are the same set exactly where they are the same text. What sequences hold of another set is not
 * stored, copied or kept as that of this one, and is known again when that one comes back. The last 32 sets are
 * remembered, so that changing between them costs nothing; a new one is probed (unless `portable`), which takes two
 * cells and what outputs an earlier llama_decode left. Returns KVF_OK; KVF_LIMIT (two cells are not free now, or loads
 * of earlier sets are still under way: call it again later); KVF_REFUSED, KVF_IO, KVF_NOMEM as kvf_llama_attach. After
 * a failure nothing is loaded or stored until a call succeeds; decoding goes on. */
KVF_API KVF_MUST_CHECK kvf_status kvf_llama_set_adapters(kvf_llama *, kvf_error *err, const char *adapters);

typedef enum kvf_llama_plan {
    KVF_LLAMA_PLAN_NONE,    /* nothing was stored, or there is no store */
    KVF_LLAMA_PLAN_LOAD,    /* all that was stored was loaded */
    KVF_LLAMA_PLAN_COMPUTE, /* though something was stored: computing it was sooner, or it was not to be had */
    KVF_LLAMA_PLAN_BOTH,    /* some was computed while the rest arrived */
    KVF_LLAMA_NUM_PLANS     /* for loops, as KVF_NUM_REASONS */
} kvf_llama_plan;
/* The length of arrays that are indexed by kvf_llama_plan. */
#define KVF_LLAMA_PLAN_ROOM 8
KVF_API const char *kvf_llama_plan_name(kvf_llama_plan);

typedef struct kvf_llama_report {
    uint32_t struct_size;
    uint32_t num_tokens;      /* of the prompt */
    uint32_t resident_tokens; /* already in the sequence */
    uint32_t copied_tokens;   /* from another sequence of the context (kvf_llama_decode) */
    uint32_t loaded_tokens;   /* from the store */
    uint32_t computed_tokens; /* by llama_decode */
    uint64_t loaded_bytes;
    uint32_t saved_blocks, known_blocks,
        shed_blocks; /* handed to the writers, already stored, dropped because the backlog was full */
    int64_t match_us, load_us, import_us, compute_us, export_us;
    kvf_reason why; /* why the run of loaded blocks ended, KVF_WHY_NONE when all whole blocks were loaded, or computed
                       while others were */
    /* What was decided, and from which figures; docs/llama.md explains it. */
    kvf_llama_plan plan;
    uint32_t stored_tokens; /* found in the store by the lookup, behind what is resident */
    uint32_t missed_blocks; /* found, but not to be had when they were loaded: computed; why: `missed_why` */
    kvf_reason missed_why;  /* of the first of them */
    double store_bytes_per_s, compute_tokens_per_s; /* as measured by the end of the prefill; 0: not known */
    int64_t round_trip_us;
    int64_t waited_us; /* for the store, while nothing was computed; part of load_us */
} kvf_llama_report;

/* The calls below that take a report fill it: what it held before is gone, and where a call does nothing it is zero.
 * `report` may be NULL. Its struct_size must be set, else a call does nothing but answer KVF_LIMIT, or 0 where it returns
 * a number.
 *
 * kvf_llama_prefill makes sequence `seq` hold exactly the `num` tokens, with the logits of the last one ready
 * (llama_get_logits_ith(ctx, -1)). What the sequence already holds of this prompt is kept (the kvf_llama remembers the
 * whole blocks that it put there itself, and checks that their KV is still that, on up to 16 of their tokens; anything
 * else is cleared), then the longest stored prefix is loaded, then the rest is decoded and its whole blocks are saved.
 * The prompt is cut at the end of its last whole block and before its last token, which is always computed. What lies
 * between the two cuts is saved too: the same prompt finds it again and computes one token; any other prompt finds the
 * whole blocks it shares.
 *
 * The answer is the same with and without a hit, to the bit, where the sequence takes the same cells: whole blocks are
 * always computed in batches of at least 64 tokens, the rest behind them always in one small batch, the last token
 * alone. (ggml's kernels for fewer than 64 rows round differently.) For the same reason the KV of generated tokens is
 * not kept over a prefill: it is computed again, as a prompt is. So a store holds what a cold run of the prompt
 * computes, whatever this sequence did before. Store trouble is never an error here. Returns KVF_OK; KVF_LIMIT (no
 * tokens, more than the context holds, one that is not in the vocabulary, or no such sequence, a report whose
 * struct_size was not set); KVF_REFUSED (attention is not causal); KVF_IO (llama_decode failed, with its code; the
 * sequence is cleared); KVF_CLOSED (stopped by progress). */
KVF_API KVF_MUST_CHECK kvf_status kvf_llama_prefill(kvf_llama *, kvf_llama_report *report, kvf_error *err,
                                                    llama_seq_id seq, const llama_token *tokens, size_t num);

/* The two halves of it, for programs with a decode loop of their own. kvf_llama_load clears the sequence and loads the
 * longest stored prefix of at most num - 1 tokens into it; returns its number of tokens (0 on any doubt).
 * kvf_llama_save saves the whole blocks of the `num` tokens that the sequence holds, as they are, however they were
 * computed (generated tokens too: a later load then continues this very computation); returns how many were handed
 * over. Since a cold run may compute other bits for the same tokens, such blocks have keys of their own: of all calls
 * here only kvf_llama_load looks for them, for what is behind the longest prefix that a prefill has stored. Not for a
 * sequence whose positions were moved (llama_memory_seq_add, seq_div): what that holds is not what its tokens would
 * compute. Saves nothing of a sequence that held tokens of another set of adapters when kvf_llama_set_adapters was
 * called, until kvf_llama_load or kvf_llama_prefill has begun it anew. */
KVF_API size_t kvf_llama_load(kvf_llama *, kvf_llama_report *report, llama_seq_id seq, const llama_token *tokens,
                              size_t num);
KVF_API size_t kvf_llama_save(kvf_llama *, kvf_llama_report *report, llama_seq_id seq, const llama_token *tokens,
                              size_t num);

/* kvf_llama_cut returns where a prompt of num tokens is cut: the end of its last whole block that leaves at least one
 * token. */
KVF_API size_t kvf_llama_cut(const kvf_llama *, size_t num);

/* ---- for programs with a decode loop of their own, any number of sequences ---------------------------------------
 * kvf_llama_decode takes the place of llama_decode: same batch, same return values. Where the batch continues a
 * sequence and its next blocks are stored, they are loaded instead of computed; what another sequence of the context
 * holds is copied, into cells of its own; the rest is decoded, and new whole blocks are handed to the writers. A
 * prompt, which is what ends at a token with an output, is cut as kvf_llama_prefill cuts it: so the answer is the same
 * with and without a hit. Tokens behind the first output of their sequence in the batch are computed as they stand.
 *
 * A prompt that goes on from what its sequence still holds (an answer, a prompt that parts from it in the middle of a
 * block) is computed from there, as that is soonest. Its last bits may then be others than those of a cold run, so
 * nothing of it is stored, nor copied, from the first block on that was not computed as a whole; but where at least 16
 * times as many tokens follow as lie between that block and the end, these are computed again, and all is cold.
 *
 * The tokens of a sequence must all come through this call (or kvf_llama_prefill, kvf_llama_load) from position 0 on.
 * What it can't follow it leaves alone: embeddings as input, tokens of several sequences, positions with gaps.
 * llama_memory_seq_rm of the end of a sequence, or of all of it, needs no word; after anything else that changes what a
 * sequence holds (llama_decode on it, seq_cp into it, seq_add, seq_div, a state set) call kvf_llama_forget: it is then
 * left alone until it has been emptied. Sequences share cells after seq_cp, and where a token belongs to several of
 * them; seq_add and seq_div of one then move the positions of all. kvf_llama_forget of one forgets all that share cells
 * by tokens that came through this call; after seq_cp call it for both before such a move.
 *
 * Outputs: llama.cpp numbers them by the batch that it computed, which may be shorter than yours. Read output i of your
 * batch by llama_get_logits_ith(ctx, kvf_llama_output(kv, i)), and likewise llama_sampler_sample and
 * llama_get_embeddings_ith. */
KVF_API int32_t kvf_llama_decode(kvf_llama *, struct llama_batch batch);

/* kvf_llama_output turns an index of the batch of the last kvf_llama_decode into that of llama.cpp's outputs; negative
 * ones (from the end) stay as they are. */
KVF_API int32_t kvf_llama_output(const kvf_llama *, int32_t i);

KVF_API void kvf_llama_forget(kvf_llama *, llama_seq_id seq);

/* kvf_llama_prompt_report says what became of the last prompt (of two or more tokens) that was decoded in this
 * sequence; zero where there was none. Returns KVF_OK, or KVF_LIMIT where out->struct_size was not set. */
KVF_API kvf_status kvf_llama_prompt_report(const kvf_llama *, kvf_llama_report *out, llama_seq_id seq);

/* Why tokens were decoded without a look at the store. */
typedef enum kvf_llama_aside {
    KVF_ASIDE_NONE = 0,
    KVF_ASIDE_EMBEDDINGS, /* the input is embeddings: an image, say */
    KVF_ASIDE_POSITIONS,  /* positions that don't continue what is known of the sequence */
    KVF_ASIDE_SEVERAL,    /* a token of several sequences */
    KVF_ASIDE_FOREIGN,    /* the sequence holds what did not come through here: a state that was set, a copy; or what
                             other adapters computed */
    KVF_ASIDE_MOVED,      /* its positions were moved: a context shift, a reused chunk */
    KVF_ASIDE_OUTPUT,     /* the context gives out embeddings or hidden states of every token */
    KVF_ASIDE_ATTENTION,  /* attention that is not causal, or a warm-up */
    KVF_NUM_ASIDES        /* for loops, as KVF_NUM_REASONS */
} kvf_llama_aside;
/* The length of arrays that are indexed by kvf_llama_aside. */
#define KVF_ASIDE_ROOM 16
KVF_API const char *kvf_llama_aside_name(kvf_llama_aside);

typedef struct kvf_llama_counters {
    uint32_t struct_size;
    uint64_t prompts; /* of two or more tokens, that were followed to their end */
    uint64_t prompt_tokens;
    uint64_t resident_tokens; /* of these, already in their sequence */
    uint64_t copied_tokens;   /* from another sequence */
    uint64_t loaded_tokens;
    uint64_t computed_tokens;
    uint64_t generated_tokens;
    uint64_t loaded_bytes;
    uint64_t saved_blocks, known_blocks, shed_blocks;
    uint64_t aside_tokens[KVF_ASIDE_ROOM];
    /* Prompts by what was decided, and by why loading ended (`plan` and `why` of their reports). */
    uint64_t plans[KVF_LLAMA_PLAN_ROOM];
    uint64_t ended[KVF_REASON_ROOM];
    uint64_t match_us, load_us, import_us, compute_us, waited_us; /* as in the reports, all together */
} kvf_llama_counters;
/* kvf_llama_count returns KVF_OK, or KVF_LIMIT where out->struct_size was not set. */
KVF_API kvf_status kvf_llama_count(const kvf_llama *, kvf_llama_counters *out);

#ifdef __cplusplus
}
#endif
#endif
