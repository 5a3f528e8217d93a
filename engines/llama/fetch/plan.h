/* SPDX-License-Identifier: Apache-2.0
 *
 * Load or compute: the arithmetic, without any I/O. It measures how fast this context computes and how fast the store
 * delivers, and decides from both.
 *
 * A gap of blocks lies before those that have already arrived. Blocks are computed from its front and arrive from its
 * end; the two meet when both have taken equally long. An unknown store is never waited for longer than it could cost:
 * kvfl_patience.
 */
#ifndef KVFL_PLAN_H
#define KVFL_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- how fast the context computes, by the size of a batch */
#define KVFL_PACE_SIZES 16u
typedef struct kvfl_pace {
    double token_us[KVFL_PACE_SIZES]; /* of a token in batches of 2^i to 2^(i+1) - 1; 0 = not known */
    double guess_us;                  /* while nothing is */
} kvfl_pace;
void kvfl_pace_note(kvfl_pace *, size_t num_tokens, int64_t us);
/* How long `num_tokens` take in batches of at most `step`. Unknown sizes use the next larger known one, or else the
 * next smaller. */
double kvfl_pace_us(const kvfl_pace *, size_t num_tokens, size_t step);

/* ---- how fast the store delivers: what arrived lately, over how long that took */
typedef struct kvfl_link {
    double bytes, us; /* both fade: KVFL_LINK_FADE_US ago counts a third */
    int64_t noted_us; /* when it was last looked at */
    double round_trip_us;
} kvfl_link;
#define KVFL_LINK_FADE_US     300000.0
#define KVFL_LINK_PROOF_BYTES 262144.0 /* a rate is believed when this much has arrived, ... */
#define KVFL_LINK_PROOF_US    40000.0  /* ... or nothing like it in this time; */
#define KVFL_LINK_FRESH_US    10000000 /* and for this long while nothing is loaded */
/* `bytes` arrived within the `us` before `now_us`, while something was under way. */
void kvfl_link_note(kvfl_link *, int64_t now_us, uint64_t bytes, int64_t us);
void kvfl_link_note_round_trip(kvfl_link *, int64_t us);
/* Bytes a microsecond; 0: unknown, or measured so long ago that it may have changed. */
double kvfl_link_rate(const kvfl_link *, int64_t now_us);
/* Nothing has arrived so far, or for so long that nothing else is known. */
static inline bool kvfl_link_is_silent(const kvfl_link *link) {
    return link->bytes <= 1;
}

/* ---- the gap */
typedef struct kvfl_gap {
    size_t num_blocks, block_tokens;
    size_t step; /* tokens of a batch, at most */
    double block_bytes;
    double here_bytes; /* that have already arrived of the blocks at its end */
    double delay_us;   /* before any more arrive: a round trip, if nothing is under way yet */
} kvfl_gap;
/* How long the last `num_blocks` of the gap take to arrive. */
double kvfl_gap_load_us(const kvfl_gap *, size_t num_blocks, double rate);
/* The best number of blocks of the gap to compute while the others arrive. 0: all of it arrives before one block is
 * computed. All of it if the rate is 0. */
size_t kvfl_plan_meeting(const kvfl_gap *, const kvfl_pace *, double rate);
/* How many of those `meeting` blocks to compute in one batch before deciding again: about half of them, since the store
 * may become faster, but no batch that is much slower per token than larger ones. */
size_t kvfl_plan_batch(const kvfl_gap *, const kvfl_pace *, size_t meeting);

/* For what can only be loaded as a whole: whether the rest, the gap and `more_bytes`, arrives before `num_blocks` could
 * be computed, even if that is a guess. */
bool kvfl_plan_goes_on(const kvfl_gap *, const kvfl_pace *, double rate, size_t num_blocks, double more_bytes);

/* ---- waiting. Idle time is repaid by blocks that arrive. Beyond that, wait at most this part of the full compute time,
 * or KVFL_TRIFLE_US: so a store that promised and does not deliver costs no more. */
#define KVFL_PATIENCE 0.03
/* An answer of a few bytes is waited for this long in any case, and as long as patience lasts. */
#define KVFL_LOOKUP_US 40000
#define KVFL_TRIFLE_US 10000.0 /* this little needs no plan: it is loaded, and waited for this long */
typedef struct kvfl_patience {
    double credit_us;
} kvfl_patience;
static inline kvfl_patience kvfl_patience_of(double compute_us) {
    double credit_us = compute_us * KVFL_PATIENCE;
    return (kvfl_patience){.credit_us = credit_us > KVFL_TRIFLE_US ? credit_us : KVFL_TRIFLE_US};
}

#endif
