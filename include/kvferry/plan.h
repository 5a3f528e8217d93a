/* SPDX-License-Identifier: Apache-2.0
 *
 * Load or compute: how much of a stored prefix is worth loading, for an engine of any kind.
 *
 *   kvf_pace_note(&pace, tokens, us);               after each batch of a prompt that the engine has computed
 *   kvf_store_link(store, found[0].tier, &link);    how fast the store is, as it has measured itself
 *   kvf_decide(&plan, &err, &gap, &pace);           how many blocks to compute, and how many to load
 *
 * A store helps only if its blocks arrive before they could be computed. So an engine calls kvf_decide after kvf_match,
 * and again whenever blocks have arrived or a batch has been computed, because the figures change. A store may not
 * deliver what it promises, so an engine waits only as long as its patience lasts (below), and then computes. A prefill
 * that follows both is never slower than computing alone by more than
 *
 *   KVF_LOOKUP_US for the lookup, and the larger of KVF_TRIFLE_US and 3 % of what computing the prefix takes, or at
 *   most KVF_GUESS_US while the pace of the engine is a guess.
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
 * How long the engine takes for a token, by the size of the batch. All zeros is an unknown pace. kvf_pace_note
 * sets the fields, except the guess, which an engine may set. */
#define KVF_PACE_SIZES 16
typedef struct kvf_pace {
    /* Microseconds a token in batches of 2^i to 2^(i+1) - 1 tokens; 0: not known. */
    double token_us[KVF_PACE_SIZES];
    /* The same in a large batch, as a guess. In doubt the gap is loaded. kvf_pace_note sets it to 0 when it records the
     * first batch of 64 tokens or more. 0: no guess. */
    double guess_us;
    uint64_t reserved[2];
} kvf_pace;

/* kvf_pace_note records a batch of `num_tokens` tokens of prompts that took `us` microseconds. The last batches
 * count most. 0 tokens, or no time, is not a batch. */
KVF_API void kvf_pace_note(kvf_pace *, size_t num_tokens, int64_t us);

/* kvf_pace_us says how many microseconds `num_tokens` take in batches of at most `batch_tokens` (1 or more). An unknown
 * batch size uses the next larger known one, or else the next smaller one of 64 tokens or more. 0 if nothing is
 * known. */
KVF_API int64_t kvf_pace_us(const kvf_pace *, size_t num_tokens, size_t batch_tokens);

/* ---- the link to the store -----------------------------------------------------------------------------------------
 * A store measures itself: all loads, of all spaces, queues and threads of this process, count. */
typedef struct kvf_link {
    /* The rate of all loads together, over the time that any is under way. The last 300 milliseconds of it count most.
     * 0: unknown, because less than 256 KiB have been loaded, or nothing for 10 seconds. */
    double bytes_per_s;
    /* The shortest time from a request to the first byte of the answer. 0: unknown. */
    int64_t round_trip_us;
    /* Not 0: loads have been under way for 40 milliseconds or more, and nothing arrived. bytes_per_s is 0 then. */
    uint64_t silent;
    uint64_t reserved[2];
} kvf_link;

/* kvf_store_link describes one tier, by its index in the URLs of the store (kvf_found.tier). A tier beyond the last is
 * the last one. For a prefix whose blocks are in several tiers, ask about the slowest. Returns
 * KVF_OK; KVF_CLOSED in a forked child (*out is all zeros then). */
KVF_API kvf_status kvf_store_link(kvf_store *, uint32_t tier, kvf_link *out);

/* ---- the decision --------------------------------------------------------------------------------------------------
 * A gap is a run of blocks that are stored and that the engine does not have yet. */
enum {
    /* Nothing can be computed while some of the gap is still missing: it is loaded as a whole or not at all. For an
     * engine that first loads and then computes, and for a model whose state is at the end of the gap. Without this
     * flag the engine can compute the front of the gap while its end arrives, until both meet. */
    KVF_GAP_WHOLE = 1,
    /* Blocks of this gap have already been requested: the next bytes are not a round trip away. */
    KVF_GAP_MOVING = 2,
    /* The patience of this prefill is used up: small gaps are planned like all others. */
    KVF_GAP_IMPATIENT = 4
};

typedef struct kvf_gap {
    uint32_t struct_size;
    /* KVF_GAP_... */
    uint32_t flags;
    /* At most KVF_MAX_BLOCKS. */
    uint64_t num_blocks;
    /* Of the payload of one block. */
    uint64_t block_bytes;
    uint32_t block_tokens;
    /* Of the largest batch that the engine computes. */
    uint32_t batch_tokens;
    /* What has already arrived of incomplete blocks of this gap. */
    uint64_t here_bytes;
    /* Bytes besides the blocks that must arrive too: a state, other loads under way. */
    uint64_t other_bytes;
    /* With KVF_GAP_WHOLE: how many blocks are computed if the gap is not loaded; 0 = num_blocks. It is more than
     * num_blocks if blocks have been loaded that are of no use without the rest. */
    uint64_t instead_blocks;
    kvf_link link;
} kvf_gap;

typedef enum kvf_plan_kind {
    /* The gap has no blocks. */
    KVF_PLAN_NONE = 0,
    /* All of it arrives before one block is computed (with KVF_GAP_WHOLE: before all are), or nothing is known of the
     * engine's pace, or the gap takes less than KVF_TRIFLE_US to compute (not with KVF_GAP_WHOLE or KVF_GAP_IMPATIENT,
     * where the rate decides). Load it. */
    KVF_PLAN_LOAD,
    /* Nothing of it arrives in time. Compute it. */
    KVF_PLAN_COMPUTE,
    /* Compute the first `num_compute` blocks while the others arrive, from the last one to the first. */
    KVF_PLAN_BOTH,
    /* The store's rate is unknown, and the gap is no trifle: request the blocks, and wait for the first of them as long
     * as patience lasts. num_load is the whole gap. */
    KVF_PLAN_TRY,
    KVF_NUM_PLANS
} kvf_plan_kind;
/* kvf_plan_name returns "none", "load", "compute", "both" or "try". */
KVF_API const char *kvf_plan_name(kvf_plan_kind);

typedef struct kvf_plan {
    uint32_t struct_size;
    kvf_plan_kind kind;
    /* Blocks of the front to compute. */
    uint64_t num_compute;
    /* The blocks after them, to load. */
    uint64_t num_load;
    /* How long these are expected to take to arrive. 0 if nothing is loaded, or the rate is unknown. */
    int64_t load_us;
    /* How long it takes to compute all of the gap (with KVF_GAP_WHOLE: instead_blocks). 0: unknown. */
    int64_t compute_us;
    /* The patience of an engine that begins now: kvf_patience_us(compute_us), but at most KVF_GUESS_US while the pace is
     * a guess. */
    int64_t patience_us;
} kvf_plan;

/* kvf_decide says what to do about a gap so that the prefill ends soonest. Returns KVF_OK; KVF_LIMIT with a message
 * (struct_size was not set, block_tokens or batch_tokens of 0, too many blocks, an unknown flag, an unknown field that
 * is set, including kvf_link.reserved). */
KVF_API KVF_MUST_CHECK kvf_status kvf_decide(kvf_plan *out, kvf_error *err, const kvf_gap *, const kvf_pace *);

/* kvf_plan_batch says how many of the next `num_blocks` blocks to compute in one batch before calling kvf_decide again:
 * about half of them, since the store may become faster, but no batch that is much slower per token than larger ones,
 * and none above batch_tokens (except one block). 0 only for 0 blocks. */
KVF_API size_t kvf_plan_batch(const kvf_pace *, size_t num_blocks, size_t block_tokens, size_t batch_tokens);

/* ---- patience ------------------------------------------------------------------------------------------------------
 * A store that promises and does not deliver must not cost much. So a prefill keeps an account, in microseconds. It
 * begins with kvf_plan.patience_us of the whole prefix. Each block that arrives adds its compute time. Idle time is
 * subtracted. When the account is empty nothing is waited for: missing blocks are computed. A guess of the pace may be
 * far too slow, on a busy machine a hundred times. So while the pace is a guess the account never exceeds KVF_GUESS_US,
 * and the first batch corrects what it began with. */
/* A lookup, an answer of a few bytes, is waited for at least this long. */
#define KVF_LOOKUP_US 40000
/* The least patience of all. A gap that takes less to compute is loaded without a plan. */
#define KVF_TRIFLE_US 10000
/* The most patience while the pace is a guess. */
#define KVF_GUESS_US 100000

/* kvf_patience_us returns 3 % of `compute_us`, and at least KVF_TRIFLE_US. */
KVF_API int64_t kvf_patience_us(int64_t compute_us);

#ifdef __cplusplus
}
#endif
#endif
