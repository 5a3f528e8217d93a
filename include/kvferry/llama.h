/* SPDX-License-Identifier: Apache-2.0
 *
 * llama.cpp in three lines, through its public C API only:
 *
 *   kvf_llama_attach(&kv, &err, store, ctx, &options);          once for each context
 *   kvf_llama_prefill(kv, &report, &err, seq, tokens, num);     loads what is stored, computes and saves the rest
 *   ... llama_decode() as usual ...
 *
 * One kvf_llama belongs to one llama_context, and to the thread that uses that context. It needs one sequence id of the
 * context for itself (scratch): create the context with kv_unified = true and n_seq_max one larger than you need. Link
 * with -lkvferry-llama and the libllama that your program uses. docs/llama.md explains what is promised;
 * examples/llama.c is a whole program.
 *
 * The rest of this header is for programs with their own decode loop, for adapters that change, and for counters.
 */
#ifndef KVFERRY_LLAMA_H
#define KVFERRY_LLAMA_H

#include <llama.h>

#include "kvferry.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_llama kvf_llama;

/* ---- attach ------------------------------------------------------------------------------------------------------ */

/* Called during a prefill with the number of tokens done so far. Return nonzero to stop: the prefill returns
 * KVF_CLOSED, and the sequence holds `done_tokens` tokens. */
typedef int (*kvf_llama_progress_fn)(void *ctx, uint32_t done_tokens, uint32_t num_tokens);

/* Options of a handle. With a store, scratch_seq, model_path, context_params and model_params are required. */
typedef struct kvf_llama_options {
    uint32_t struct_size;
    /* A sequence id below n_seq_max that the program does not use. */
    llama_seq_id scratch_seq;
    /* The GGUF file of the model (of a split model, the first file). Its bytes are hashed, and the hash is cached for
     * each file. It must still be the file that was loaded: a file that has changed since, or that another path leads
     * to now, is refused. */
    const char *model_path;
    /* What the context was created with. */
    const struct llama_context_params *context_params;
    /* Describes every LoRA and control vector in use, with scales. NULL = none. After a change call
     * kvf_llama_set_adapters. */
    const char *adapters;
    /* Separate blocks for this name. NULL = none. */
    const char *tenant;
    /* See kvf_space_options. NULL = that of the store, or none. */
    const void *secret;
    size_t secret_len;
    /* A power of two from 64 to 4096. 0 = near 1 MiB a record, but at least 64 (see kvf_llama_prefill). */
    uint32_t block_tokens;
    /* 0: the numbers that this machine computes are part of the identity (a probe: the KV of four tokens), so a hit
     * equals what this machine would compute, to the bit. 1: share blocks between kinds of CPU and GPU. */
    int portable;
    /* Of the lookup and load of one prefill. */
    int64_t budget_us;
    /* NULL = none. */
    kvf_llama_progress_fn progress;
    void *progress_ctx;
    /* What the model was loaded with. Metadata set over the file's own (kv_overrides) and the placement of tensors
     * change KV, and llama.cpp tells neither. What it points to is read during the call. */
    const struct llama_model_params *model_params;
    /* The previous secret, while it is replaced (see kvf_space_options). NULL = none. */
    const void *previous_secret;
    size_t previous_secret_len;
} kvf_llama_options;

/* kvf_llama_attach checks that the KV cache of this context and model can be taken apart and reassembled, byte for
 * byte, and names its space. It computes four tokens in the scratch sequence, two at a time, which takes two free
 * cells; outputs of an earlier llama_decode are lost. This call, kvf_llama_prefill and kvf_llama_decode end a warm-up
 * (llama_set_warmup), because a mixture of experts computes other KV during one. docs/llama.md lists every setting of
 * llama.cpp, and whether it is in the space, without influence, or refused. With a NULL store kvferry only computes,
 * with the same cuts.
 *
 * Returns KVF_OK; KVF_REFUSED with the reason (not unified, not causal, an evaluation callback, an unknown or unproven
 * kind of memory, no free sequence or cells, a model file that is not proven to be the one that was loaded); KVF_LIMIT
 * (an option is missing or out of range: the message names it); KVF_CONFIG (the model file can't be read, or is not a
 * GGUF file); KVF_IO; KVF_NOMEM; KVF_CLOSED (the store belongs to another process). */
KVF_API KVF_MUST_CHECK kvf_status kvf_llama_attach(kvf_llama **out, kvf_error *err, kvf_store *,
                                                   struct llama_context *ctx, const kvf_llama_options *options);
/* kvf_llama_detach frees the handle. The context stays as it is. */
KVF_API void kvf_llama_detach(kvf_llama *);

/* ---- prefill ----------------------------------------------------------------------------------------------------- */

/* What was done with a prompt. */
typedef enum kvf_llama_plan {
    /* Nothing was stored, or there is no store. */
    KVF_LLAMA_PLAN_NONE,
    /* Everything that was stored was loaded. */
    KVF_LLAMA_PLAN_LOAD,
    /* Something was stored, but computing was faster, or loading failed. */
    KVF_LLAMA_PLAN_COMPUTE,
    /* A part was computed while the rest arrived. */
    KVF_LLAMA_PLAN_BOTH,
    /* For loops, as KVF_NUM_REASONS. */
    KVF_LLAMA_NUM_PLANS
} kvf_llama_plan;
/* The length of arrays that are indexed by kvf_llama_plan. */
#define KVF_LLAMA_PLAN_ROOM 8
/* kvf_llama_plan_name returns "none", "load", "compute" or "both". */
KVF_API const char *kvf_llama_plan_name(kvf_llama_plan);

/* What became of a prompt. Calls with a report fill it: its earlier contents are lost, and a call that does nothing
 * leaves it zero. `report` may be NULL. If its struct_size was not set, the call does nothing and returns KVF_LIMIT, or
 * 0 if it returns a number. */
typedef struct kvf_llama_report {
    uint32_t struct_size;
    /* Tokens of the prompt. */
    uint32_t num_tokens;
    /* Already in the sequence. */
    uint32_t resident_tokens;
    /* From another sequence of the context (kvf_llama_decode). */
    uint32_t copied_tokens;
    /* From the store. */
    uint32_t loaded_tokens;
    /* By llama_decode. */
    uint32_t computed_tokens;
    uint64_t loaded_bytes;
    /* Blocks handed to the writers; already stored; shed because the backlog was full. */
    uint32_t saved_blocks, known_blocks, shed_blocks;
    int64_t match_us, load_us, import_us, compute_us, export_us;
    /* Why the run of loaded blocks ended. KVF_WHY_NONE if all whole blocks were loaded, or computed meanwhile. */
    kvf_reason why;
    /* What was decided, and from which figures (docs/llama.md). */
    kvf_llama_plan plan;
    /* Found in the store by the lookup, after what is resident. */
    uint32_t stored_tokens;
    /* Found by the lookup, but not loaded: computed instead. `missed_why` is the reason of the first of them. */
    uint32_t missed_blocks;
    kvf_reason missed_why;
    /* As measured by the end of the prefill. 0 = unknown. */
    double store_bytes_per_s, compute_tokens_per_s;
    int64_t round_trip_us;
    /* Waiting for the store while nothing was computed. A part of load_us. */
    int64_t waited_us;
} kvf_llama_report;

/* kvf_llama_prefill makes sequence `seq` hold exactly the `num` tokens, with the logits of the last one ready
 * (llama_get_logits_ith(ctx, -1)). It keeps what the sequence already holds of this prompt: whole blocks that this
 * handle put there, after checking their KV on up to 16 tokens. Anything else is cleared. Then it loads the longest
 * stored prefix, decodes the rest, and saves new whole blocks.
 *
 * The prompt is cut at the end of its last whole block, and before its last token, which is always computed. The tokens
 * between the two cuts are saved too: the same prompt finds them and computes one token. Any other prompt finds the
 * whole blocks that it shares.
 *
 * The answer is the same with and without a hit, to the bit, if the sequence takes the same cells: whole blocks are
 * always computed in batches of at least 64 tokens, the rest in one small batch, the last token alone. (ggml's kernels
 * for fewer than 64 rows round differently.) For the same reason the KV of generated tokens is not kept by a prefill,
 * but computed again as part of the prompt. So a store holds what a cold run of the prompt computes, whatever this
 * sequence did before.
 *
 * A fault of the store is never an error here. Returns KVF_OK; KVF_LIMIT (no tokens, more than the context holds, one
 * that is not in the vocabulary, no such sequence, or a report whose struct_size was not set); KVF_REFUSED (attention
 * is not causal); KVF_IO (llama_decode failed, with its code; the sequence is cleared); KVF_CLOSED (stopped by
 * progress, or in a forked child). */
KVF_API KVF_MUST_CHECK kvf_status kvf_llama_prefill(kvf_llama *, kvf_llama_report *report, kvf_error *err,
                                                    llama_seq_id seq, const llama_token *tokens, size_t num);

/* ---- the two halves of a prefill --------------------------------------------------------------------------------- */

/* kvf_llama_load clears the sequence and loads the longest stored prefix of at most num - 1 tokens into it. Returns the
 * number of tokens loaded, 0 in any doubt. Arguments that kvf_llama_prefill refuses load nothing, save nothing, and
 * leave the sequence as it is. */
KVF_API size_t kvf_llama_load(kvf_llama *, kvf_llama_report *report, llama_seq_id seq, const llama_token *tokens,
                              size_t num);
/* kvf_llama_save saves the whole blocks of the `num` tokens that the sequence holds, as they are, however they were
 * computed (also generated tokens: a later load then continues this very computation). Returns how many were handed
 * over.
 *
 * A cold run may compute other bits for the same tokens, so such blocks have separate keys. Of all calls here only
 * kvf_llama_load looks for them, after the longest prefix that a prefill has stored. Not for a sequence whose positions
 * were moved (llama_memory_seq_add, seq_div), because it does not hold what its tokens would compute. Saves nothing of
 * a sequence that held tokens of another set of adapters when kvf_llama_set_adapters was called, until kvf_llama_load
 * or kvf_llama_prefill has started it again. */
KVF_API size_t kvf_llama_save(kvf_llama *, kvf_llama_report *report, llama_seq_id seq, const llama_token *tokens,
                              size_t num);

/* kvf_llama_cut returns where a prompt of `num` tokens is cut: the end of its last whole block that leaves at least one
 * token. */
KVF_API size_t kvf_llama_cut(const kvf_llama *, size_t num);

/* ---- your own decode loop, any number of sequences --------------------------------------------------------------- */

/* kvf_llama_decode replaces llama_decode: same batch, same return values (-2 in a forked child). If the batch continues
 * a sequence and its next blocks are stored, they are loaded instead of computed. What another sequence of the context
 * holds is copied, into separate cells. The rest is decoded, and new whole blocks are handed to the writers. A prompt,
 * the tokens up to one with an output, is cut as kvf_llama_prefill cuts it, so the answer is the same with and without
 * a hit. Tokens after the first output of their sequence in the batch are computed as they are.
 *
 * A prompt that continues what its sequence still holds (after an answer, or from the middle of a block) is computed
 * from there, because that is fastest. Its last bits may then differ from those of a cold run. So from the first block
 * on that was not computed as a whole, nothing is stored or copied. There is one exception: if the new tokens are at
 * least 16 times as many as those held after the beginning of that block, the latter are computed again, and everything
 * is cold.
 *
 * All tokens of a sequence must come through this call (or kvf_llama_prefill, kvf_llama_load), from position 0 on.
 * Batches that it can't follow pass unchanged: embeddings as input, tokens of several sequences, positions with gaps.
 * llama_memory_seq_rm of the end of a sequence, or of all of it, needs no notice. After anything else that changes what
 * a sequence holds (llama_decode on it, seq_cp into it, seq_add, seq_div, setting a state) call kvf_llama_forget.
 *
 * Outputs: llama.cpp numbers them by the batch that it computed, which may be shorter than yours. Read output i of your
 * batch by llama_get_logits_ith(ctx, kvf_llama_output(kv, i)), and likewise llama_sampler_sample and
 * llama_get_embeddings_ith. */
KVF_API int32_t kvf_llama_decode(kvf_llama *, struct llama_batch batch);

/* kvf_llama_output turns an index into the batch of the last kvf_llama_decode into llama.cpp's index of that output.
 * Negative indexes (from the end) stay as they are. */
KVF_API int32_t kvf_llama_output(const kvf_llama *, int32_t i);

/* kvf_llama_forget says that the contents of a sequence are unknown. The sequence then works without the store until it
 * has been emptied. Sequences share cells after seq_cp, and if a token belongs to several of them; seq_add and seq_div
 * of one then move the positions of all. Forgetting one sequence forgets all that share cells with it by tokens that
 * came through kvf_llama_decode. After seq_cp call this for both sequences before such a move. */
KVF_API void kvf_llama_forget(kvf_llama *, llama_seq_id seq);

/* kvf_llama_prompt_report reports the last prompt (of two or more tokens) that was decoded in this sequence. All zero
 * if there was none. Returns KVF_OK; KVF_LIMIT (out->struct_size was not set); KVF_CLOSED. */
KVF_API kvf_status kvf_llama_prompt_report(const kvf_llama *, kvf_llama_report *out, llama_seq_id seq);

/* ---- adapters ---------------------------------------------------------------------------------------------------- */

/* kvf_llama_set_adapters must be called after every llama_set_adapters_lora and llama_set_adapter_cvec that changes
 * something, before the next token is computed. `adapters` describes everything in use from now on, as in the options:
 * two descriptions are the same set exactly if they are the same text. KV of another set is neither stored, copied nor
 * kept for this one. It is known again when its set comes back. The last 32 sets are remembered, so switching between
 * them costs nothing. A new set is probed (unless `portable`), which takes two cells, and the outputs of an
 * earlier llama_decode.
 *
 * Returns KVF_OK; KVF_LIMIT (two cells are not free now, or loads of earlier sets are still under way: call it again
 * later); KVF_REFUSED, KVF_IO, KVF_NOMEM, KVF_CLOSED as kvf_llama_attach. After a failure nothing is loaded or saved
 * until a call succeeds; decoding continues. */
KVF_API KVF_MUST_CHECK kvf_status kvf_llama_set_adapters(kvf_llama *, kvf_error *err, const char *adapters);

/* kvf_llama_space returns the space of the current adapters, valid until they change. NULL: there is none, and nothing
 * is loaded or saved. */
KVF_API kvf_space *kvf_llama_space(kvf_llama *);

/* ---- counters ---------------------------------------------------------------------------------------------------- */

/* Why tokens were decoded without using the store. */
typedef enum kvf_llama_aside {
    KVF_ASIDE_NONE = 0,
    /* The input is embeddings, for example an image. */
    KVF_ASIDE_EMBEDDINGS,
    /* Positions that do not continue the known part of the sequence. */
    KVF_ASIDE_POSITIONS,
    /* A token of several sequences. */
    KVF_ASIDE_SEVERAL,
    /* The sequence holds KV that did not come through these calls (a state that was set, a copy), or that other
     * adapters computed. */
    KVF_ASIDE_FOREIGN,
    /* Its positions were moved: a context shift, a reused chunk. */
    KVF_ASIDE_MOVED,
    /* The context outputs embeddings or hidden states of every token. */
    KVF_ASIDE_OUTPUT,
    /* Attention is not causal, or this is a warm-up. */
    KVF_ASIDE_ATTENTION,
    /* For loops, as KVF_NUM_REASONS. */
    KVF_NUM_ASIDES
} kvf_llama_aside;
/* The length of arrays that are indexed by kvf_llama_aside. */
#define KVF_ASIDE_ROOM 16
/* kvf_llama_aside_name returns "embeddings", "positions", ... */
KVF_API const char *kvf_llama_aside_name(kvf_llama_aside);

/* Counters of a handle, over all its prompts. */
typedef struct kvf_llama_counters {
    uint32_t struct_size;
    /* Prompts of two or more tokens that were followed to their end. */
    uint64_t prompts;
    uint64_t prompt_tokens;
    /* Of the prompt's tokens: already in their sequence. */
    uint64_t resident_tokens;
    /* ... from another sequence. */
    uint64_t copied_tokens;
    /* ... from the store. */
    uint64_t loaded_tokens;
    /* ... computed. */
    uint64_t computed_tokens;
    uint64_t generated_tokens;
    uint64_t loaded_bytes;
    uint64_t saved_blocks, known_blocks, shed_blocks;
    /* Tokens decoded without using the store, by reason. */
    uint64_t aside_tokens[KVF_ASIDE_ROOM];
    /* Prompts by decision, and by the reason why loading ended (`plan` and `why` of their reports). */
    uint64_t plans[KVF_LLAMA_PLAN_ROOM];
    uint64_t ended[KVF_REASON_ROOM];
    /* Sums of the times in the reports. */
    uint64_t match_us, load_us, import_us, compute_us, waited_us;
} kvf_llama_counters;
/* kvf_llama_count reads the counters. Returns KVF_OK; KVF_LIMIT (out->struct_size was not set); KVF_CLOSED. */
KVF_API kvf_status kvf_llama_count(const kvf_llama *, kvf_llama_counters *out);

#ifdef __cplusplus
}
#endif
#endif
