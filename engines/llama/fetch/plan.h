/* SPDX-License-Identifier: Apache-2.0
 *
 * Load or compute: the arithmetic, without any I/O. How fast this context computes, how fast the store delivers, and
 * what follows from both.
 *
 * A gap of blocks lies in front of those that are here already. Blocks are computed from its front, and arrive from its
 * end; the two meet where both have taken equally long. What is not known is never waited for longer than it could
 * cost: kvfl_patience.
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
/* How long `num_tokens` take in batches of at most `step`; sizes that were not seen go by the next larger one, or else
 * the next smaller. */
double kvfl_pace_us(const kvfl_pace *, size_t num_tokens, size_t step);

/* ---- how fast the store delivers: what arrived lately, over how long that took */
typedef struct kvfl_link {
    double bytes, us; /* both fade: KVFL_LINK_FADE_US ago counts a third */
    int64_t noted_us; /* when it was last looked at */
    double round_trip_us;
} kvfl_link;
#define KVFL_LINK_FADE_US     300000.0
#define KVFL_LINK_PROOF_BYTES 262144.0 /* a rate is believed when so much has come, ... */
#define KVFL_LINK_PROOF_US    40000.0  /* ... or nothing like it in such a time; */
#define KVFL_LINK_FRESH_US    10000000 /* and so long while nothing is loaded */
/* `bytes` arrived within the `us` before `now_us`, while something was on its way. */
void kvfl_link_note(kvfl_link *, int64_t now_us, uint64_t bytes, int64_t us);
void kvfl_link_note_round_trip(kvfl_link *, int64_t us);
/* Bytes a microsecond; 0: not known, or so long ago that it may be otherwise by now. */
double kvfl_link_rate(const kvfl_link *, int64_t now_us);
/* Nothing has come so far, or for so long that this is all that is known. */
static inline bool kvfl_link_is_silent(const kvfl_link *link) {
    return link->bytes <= 1;
}

/* ---- the gap */
typedef struct kvfl_gap {
    size_t num_blocks, block_tokens;
    size_t step; /* tokens of a batch, at most */
    double block_bytes;
    double here_bytes; /* that have already come of the blocks at its end */
    double delay_us;   /* before any more come: a round trip, where nothing is on its way yet */
} kvfl_gap;
/* How long the last `num_blocks` of the gap take to arrive. */
double kvfl_gap_load_us(const kvfl_gap *, size_t num_blocks, double rate);
/* How many blocks of the gap are best computed while the others arrive; 0: all of it arrives sooner than one block is
 * computed. All of it where the rate is 0. */
size_t kvfl_plan_meeting(const kvfl_gap *, const kvfl_pace *, double rate);
/* How many of those `meeting` blocks to compute in one batch, after which all is looked at again: about half of them,
 * since the store may turn out faster than it was, but no batch that is much slower by the token than larger ones. */
size_t kvfl_plan_batch(const kvfl_gap *, const kvfl_pace *, size_t meeting);

/* For what can only be loaded as a whole: whether what is left, the gap and `more_bytes`, arrives sooner than
 * `num_blocks` are computed, be that a guess or not. */
bool kvfl_plan_goes_on(const kvfl_gap *, const kvfl_pace *, double rate, size_t num_blocks, double more_bytes);

/* ---- waiting. All the time that computing nothing costs is paid by blocks that need not be computed, but for this
 * part of what the whole would take to compute, or a trifle: so a store that promised and does not deliver costs no
 * more than that. */
#define KVFL_PATIENCE 0.03
#define KVFL_LOOKUP_US \
    40000 /* an answer of a few bytes is waited for so long in any case, and as long as patience lasts */
#define KVFL_TRIFLE_US 10000.0 /* of so little nothing is planned: it is loaded, and waited for so long */
typedef struct kvfl_patience {
    double credit_us;
} kvfl_patience;
static inline kvfl_patience kvfl_patience_of(double compute_us) {
    double credit_us = compute_us * KVFL_PATIENCE;
    return (kvfl_patience){.credit_us = credit_us > KVFL_TRIFLE_US ? credit_us : KVFL_TRIFLE_US};
}

#endif
