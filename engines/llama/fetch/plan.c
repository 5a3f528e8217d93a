/* SPDX-License-Identifier: Apache-2.0
 *
 * Decides how much of a stored prefix to load and how much to compute, from measured rates. Pure arithmetic.
 */
#include "llama/fetch/plan.h"

#include <math.h>

#define NEW_PACE          0.4 /* the weight of the latest batch */
#define SMALLEST_TO_GO_BY 6u  /* batches of 64 */
#define GUESS_DOUBT       8.0
#define SO_SLOW           1e-9 /* nothing arrives, which is also known */
/* A batch size is large enough if a token in it takes no longer than this, times the best. */
#define NEARLY_BEST 1.04

/* ---- pace ---- */

static size_t size_of(size_t num_tokens) {
    size_t size = 0;
    while (num_tokens > 1 && size + 1 < KVFL_PACE_SIZES) {
        num_tokens /= 2;
        size++;
    }
    return size;
}

void kvfl_pace_note(kvfl_pace *pace, size_t num_tokens, int64_t us) {
    if (num_tokens == 0 || us <= 0) {
        return;
    }
    double *known = &pace->token_us[size_of(num_tokens)], now = (double)us / (double)num_tokens;
    *known = *known > 0 ? *known + NEW_PACE * (now - *known) : now;
}

static double token_us(const kvfl_pace *pace, size_t num_tokens) {
    size_t size = size_of(num_tokens);
    for (size_t i = size; i < KVFL_PACE_SIZES; i++) {
        if (pace->token_us[i] > 0) {
            return pace->token_us[i];
        }
    }
    /* A single token says nothing about one in a batch, which may be a hundred times faster. */
    for (size_t i = size; i > SMALLEST_TO_GO_BY; i--) {
        if (pace->token_us[i - 1] > 0) {
            return pace->token_us[i - 1];
        }
    }
    return pace->guess_us;
}

double kvfl_pace_us(const kvfl_pace *pace, size_t num_tokens, size_t step) {
    size_t rest = num_tokens % step;
    return (double)(num_tokens - rest) * token_us(pace, step) + (double)rest * token_us(pace, rest);
}

/* ---- link ---- */

void kvfl_link_note(kvfl_link *link, int64_t now_us, uint64_t bytes, int64_t us) {
    if (us <= 0) {
        return;
    }
    double fade = exp(-(double)us / KVFL_LINK_FADE_US);
    link->bytes = link->bytes * fade + (double)bytes;
    link->us = link->us * fade + (double)us;
    link->noted_us = now_us;
}

void kvfl_link_note_round_trip(kvfl_link *link, int64_t us) {
    double now = (double)us;
    /* The shortest one seen, because the others also waited for something else; but not for ever. */
    link->round_trip_us =
        link->round_trip_us == 0 || now < link->round_trip_us ? now : link->round_trip_us * 0.9 + now * 0.1;
}

double kvfl_link_rate(const kvfl_link *link, int64_t now_us) {
    if (now_us - link->noted_us > KVFL_LINK_FRESH_US ||
        (link->bytes < KVFL_LINK_PROOF_BYTES && link->us < KVFL_LINK_PROOF_US)) {
        return 0;
    }
    return kvfl_link_is_silent(link) ? SO_SLOW : link->bytes / link->us;
}

/* ---- the gap ---- */

double kvfl_gap_load_us(const kvfl_gap *gap, size_t num_blocks, double rate) {
    double bytes = (double)num_blocks * gap->block_bytes - gap->here_bytes;
    return num_blocks == 0 ? 0 : gap->delay_us + (bytes > 0 ? bytes / rate : 0);
}

/* Before the first batch the pace is a guess, and a batch, once begun, can't be taken back: it must be clearly worth
 * it. */
static double doubt(const kvfl_pace *pace) {
    for (size_t i = SMALLEST_TO_GO_BY; i < KVFL_PACE_SIZES; i++) {
        if (pace->token_us[i] > 0) {
            return 1;
        }
    }
    return GUESS_DOUBT;
}

size_t kvfl_plan_meeting(const kvfl_gap *gap, const kvfl_pace *pace, double rate) {
    size_t best = gap->num_blocks;
    if (!(rate > 0)) {
        return best;
    }
    double times = doubt(pace);
    double best_us = times * kvfl_pace_us(pace, gap->num_blocks * gap->block_tokens, gap->step);
    for (size_t x = gap->num_blocks; x > 0; x--) { /* from all computed to all loaded */
        double compute_us = times * kvfl_pace_us(pace, (x - 1) * gap->block_tokens, gap->step);
        double load_us = kvfl_gap_load_us(gap, gap->num_blocks - x + 1, rate);
        double us = compute_us > load_us ? compute_us : load_us;
        if (us < best_us) {
            best_us = us;
            best = x - 1;
        }
        if (load_us > compute_us) {
            break; /* loading more of it takes even longer */
        }
    }
    return best;
}

bool kvfl_plan_goes_on(const kvfl_gap *gap, const kvfl_pace *pace, double rate, size_t num_blocks, double more_bytes) {
    double compute_us = kvfl_pace_us(pace, num_blocks * gap->block_tokens, gap->step);
    return kvfl_gap_load_us(gap, gap->num_blocks, rate) + more_bytes / rate <= compute_us;
}

/* The fewest blocks whose batch is about as fast per token as any. */
static size_t efficient(const kvfl_gap *gap, const kvfl_pace *pace, size_t most) {
    double best = INFINITY;
    for (size_t blocks = 1; blocks <= most; blocks++) {
        double us = token_us(pace, blocks * gap->block_tokens);
        best = us > 0 && us < best ? us : best;
    }
    for (size_t blocks = 1; blocks < most; blocks++) {
        if (token_us(pace, blocks * gap->block_tokens) <= best * NEARLY_BEST) {
            return blocks;
        }
    }
    return most;
}

size_t kvfl_plan_batch(const kvfl_gap *gap, const kvfl_pace *pace, size_t meeting) {
    size_t most = gap->step / gap->block_tokens > 0 ? gap->step / gap->block_tokens : 1;
    size_t least = efficient(gap, pace, most), half = (meeting + 1) / 2;
    size_t blocks = half > least ? half : least;
    blocks = blocks < most ? blocks : most;
    return blocks < meeting ? blocks : meeting;
}
