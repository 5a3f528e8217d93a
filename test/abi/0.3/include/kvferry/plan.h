/* SPDX-License-Identifier: Apache-2.0
 *
 * Load or compute: how much of a stored prefix is worth loading, for an engine of any kind.
 *
 *   kvf_pace_note(&pace, tokens, us);               after each batch of a prompt that the engine has computed
 *   kvf_store_link(store, found[0].tier, &link);    how fast the store is, as it has measured itself
 *   kvf_decide(&plan, &err, &gap, &pace);           how many blocks to compute, and how many to load
 *
 * A store helps only where its blocks arrive sooner than they are computed. So an engine asks kvf_decide after
 * kvf_match, and again whenever blocks have landed or a batch has been computed: the figures change. What the store
 * promises is not what it delivers, so an engine waits no longer than its patience lasts (below), and then computes. A
 * prefill that follows both is never slower than computing alone by more than
 *
 *   KVF_LOOKUP_US for the lookup, and the larger of KVF_TRIFLE_US and 3 % of what computing the prefix takes.
 *
 * No call here does any I/O, waits, or allocates memory. A kvf_pace belongs to one thread at a time; kvf_store_link may
 * be called from any thread.
 */
#ifndef KVFERRY_PLAN_H
#define KVFERRY_PLAN_H

#include <stddef.h>

#include "store.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the pace of the engine ----------------------------------------------------------------------------------------
 * How long the engine takes for a token, by the size of the batch. All zeros is a pace that is not known yet. The
 * fields are kvf_pace_note's, but for the guess, which an engine may set. */
#define KVF_PACE_SIZES 16
typedef struct kvf_pace {
    /* Microseconds a token in batches of 2^i to 2^(i+1) - 1 tokens; 0: not known. */
    double token_us[KVF_PACE_SIZES];
    /* The same in a large batch, as a guess, for as long as no batch has been noted; 0: no guess. It is not much
     * believed: what a guess calls equal to loading is loaded. */
    double guess_us;
    uint64_t reserved[2];
} kvf_pace;

/* kvf_pace_note takes note of a batch of `num_tokens` tokens of prompts that took `us` microseconds. The last batches
 * count most. 0 tokens, or no time, is not a batch. */
KVF_API void kvf_pace_note(kvf_pace *, size_t num_tokens, int64_t us);

/* kvf_pace_us says how many microseconds `num_tokens` take in batches of at most `batch_tokens` (1 or more). A size of
 * batch that was not seen goes by the next larger one, or else by the next smaller one of 64 tokens or more. 0 where
 * nothing is known. */
KVF_API int64_t kvf_pace_us(const kvf_pace *, size_t num_tokens, size_t batch_tokens);

/* ---- the link to the store -----------------------------------------------------------------------------------------
 * A store measures itself: all loads, of all spaces, queues and threads of this process, count. */
typedef struct kvf_link {
    /* While something is loaded, this much arrives, all loads together. 0: not known, as less than 256 KiB have been
     * loaded, or nothing for 10 seconds. The last 300 milliseconds of loading count most. */
    double bytes_per_s;
    /* From a request to the first byte of the answer, at the least; 0: not known. */
    int64_t round_trip_us;
    /* Not 0: loads have been under way for 40 milliseconds or more, and nothing came. bytes_per_s is 0 then. */
    uint64_t silent;
    uint64_t reserved[2];
} kvf_link;

/* kvf_store_link writes what is known of one tier, by its index in the URLs of the store, as kvf_found.tier has it. A
 * tier beyond the last is the last one. For a prefix of which blocks lie in several tiers, ask about the slowest. Returns
 * KVF_OK; KVF_CLOSED in a forked child (*out is all zeros then). */
KVF_API kvf_status kvf_store_link(kvf_store *, uint32_t tier, kvf_link *out);

/* ---- the decision --------------------------------------------------------------------------------------------------
 * A gap is a run of blocks that are stored and that the engine does not have yet. */
enum {
    /* Nothing can be computed while some of the gap is still on its way: it is loaded as a whole or not at all. So it is
     * for an engine that loads first and computes then, and for a model whose state stands at the end of the gap.
     * Without this flag the engine can compute the front of the gap while its end arrives, until both meet. */
    KVF_GAP_WHOLE = 1,
    /* Blocks of this gap have been asked for already: the next bytes are not a round trip away. */
    KVF_GAP_MOVING = 2,
    /* The patience of this prefill is used up: small gaps are planned like all others. */
    KVF_GAP_IMPATIENT = 4
};

typedef struct kvf_gap {
    uint32_t struct_size;
    uint32_t flags;       /* KVF_GAP_... */
    uint64_t num_blocks;  /* at most KVF_MAX_BLOCKS */
    uint64_t block_bytes; /* of the payload of one block */
    uint32_t block_tokens;
    uint32_t batch_tokens; /* of the largest batch that the engine computes */
    /* What has already arrived of the blocks of this gap that are not complete. */
    uint64_t here_bytes;
    /* What arrives besides the blocks, and must be waited for too: a state, other loads under way. */
    uint64_t other_bytes;
    /* With KVF_GAP_WHOLE: how many blocks are computed if the gap is not loaded; 0 = num_blocks. They are more where
     * some have been loaded that are of no use without the rest. */
    uint64_t instead_blocks;
    kvf_link link;
} kvf_gap;

typedef enum kvf_plan_kind {
    /* The gap has no blocks. */
    KVF_PLAN_NONE = 0,
    /* All of it arrives before one block is computed (with KVF_GAP_WHOLE: before all are), or the gap takes less than
     * KVF_TRIFLE_US to compute, or nothing is known of the engine's pace. Load it. */
    KVF_PLAN_LOAD,
    /* Nothing of it arrives in time. Compute it. */
    KVF_PLAN_COMPUTE,
    /* Compute the first `num_compute` blocks while the others arrive, from the last one to the first. */
    KVF_PLAN_BOTH,
    /* Nothing is known of the store's rate: ask for the blocks, and wait for the first of them as long as patience
     * lasts. */
    KVF_PLAN_TRY,
    KVF_NUM_PLANS
} kvf_plan_kind;
KVF_API const char *kvf_plan_name(kvf_plan_kind);

typedef struct kvf_plan {
    uint32_t struct_size;
    kvf_plan_kind kind;
    uint64_t num_compute; /* blocks of the front that are to be computed */
    uint64_t num_load;    /* those behind them, which are to be loaded */
    /* How long these are expected to take to arrive; 0 where nothing is loaded, or its rate is not known. */
    int64_t load_us;
    /* How long it takes to compute all of the gap (with KVF_GAP_WHOLE: instead_blocks). 0: not known. */
    int64_t compute_us;
    /* kvf_patience_us of that: what an engine that begins now has to spend. */
    int64_t patience_us;
} kvf_plan;

/* kvf_decide says what to do about a gap so that the prefill is over soonest. Returns KVF_OK; KVF_LIMIT with a message
 * for a struct_size that is not set, block_tokens or batch_tokens of 0, too many blocks, an unknown flag, or a field
 * that is set and not known (kvf_link.reserved among them). */
KVF_API KVF_MUST_CHECK kvf_status kvf_decide(kvf_plan *out, kvf_error *err, const kvf_gap *, const kvf_pace *);

/* kvf_plan_batch says how many of the next `num_blocks` blocks, which are to be computed, belong in one batch, after
 * which to ask kvf_decide again: about half of them, since the store may turn out faster, but no batch that is much
 * slower by the token than larger ones, and none above batch_tokens (but for one block). 0 only for 0 blocks. */
KVF_API size_t kvf_plan_batch(const kvf_pace *, size_t num_blocks, size_t block_tokens, size_t batch_tokens);

/* ---- patience ------------------------------------------------------------------------------------------------------
 * A store that promises and does not deliver must not cost much. So a prefill keeps an account, in microseconds: it
 * begins with kvf_patience_us of what the whole prefix takes to compute. Each block that arrives adds what computing it
 * would have taken. Time that is waited while nothing is computed is subtracted. Nothing is waited for while the account
 * is empty: what is missing is computed. */
/* A lookup, an answer of a few bytes, is waited for this long where patience is less. */
#define KVF_LOOKUP_US 40000
/* The least patience of all. A gap that takes less to compute is loaded without a plan. */
#define KVF_TRIFLE_US 10000

/* 3 % of that time, and at least KVF_TRIFLE_US. */
KVF_API int64_t kvf_patience_us(int64_t compute_us);

#ifdef __cplusplus
}
#endif
#endif
