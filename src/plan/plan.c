/* SPDX-License-Identifier: Apache-2.0
 *
 * Decides how much of a stored prefix to load and how much to compute. Pure arithmetic.
 *
 * A gap of blocks lies before those that the engine has. Blocks are computed from its front and arrive from its end;
 * the two meet when both have taken equally long.
 */
#include <math.h>

#include "base/base.h"
#include "kvferry/block.h"
#include "kvferry/plan.h"
#include "kvferry/sized.h"

/* The weight of the latest batch. */
#define NEW_PACE 0.4
/* Batches of 64 tokens. A single token says nothing about one in a batch, which may be a hundred times faster. */
#define SMALLEST_TO_GO_BY 6u
/* Before the first batch the pace is a guess, and a batch, once begun, can't be taken back: it must be clearly worth
 * it. */
#define GUESS_DOUBT 8.0
/* A batch size is large enough if a token in it takes no longer than this, times the best. */
#define NEARLY_BEST 1.04
#define PATIENCE    0.03
#define ALL_FLAGS   ((uint32_t)(KVF_GAP_WHOLE | KVF_GAP_MOVING | KVF_GAP_IMPATIENT))

/* No time is longer than a year. */
#define YEAR_US (365.0 * 86400e6)

/* ---- pace ---- */

static size_t size_of(size_t num_tokens) {
    size_t size = 0;
    while (num_tokens > 1 && size + 1 < KVF_PACE_SIZES) {
        num_tokens /= 2;
        size++;
    }
    return size;
}

static bool is_guess(const kvf_pace *pace) {
    for (size_t i = SMALLEST_TO_GO_BY; i < KVF_PACE_SIZES; i++) {
        if (pace->token_us[i] > 0) {
            return false;
        }
    }
    return true;
}

void kvf_pace_note(kvf_pace *pace, size_t num_tokens, int64_t us) {
    if (num_tokens == 0 || us <= 0) {
        return;
    }
    double *known = &pace->token_us[size_of(num_tokens)], now = (double)us / (double)num_tokens;
    *known = *known > 0 ? *known + NEW_PACE * (now - *known) : now;
    pace->guess_us = is_guess(pace) ? pace->guess_us : 0;
}

/* A caller may guess infinity, which no sum survives. 0: unknown. */
static double sound_us(double us) {
    return us > YEAR_US ? YEAR_US : us > 0 ? us : 0;
}

static double token_us(const kvf_pace *pace, size_t num_tokens) {
    size_t size = size_of(num_tokens);
    for (size_t i = size; i < KVF_PACE_SIZES; i++) {
        if (pace->token_us[i] > 0) {
            return pace->token_us[i];
        }
    }
    for (size_t i = size; i > SMALLEST_TO_GO_BY; i--) {
        if (pace->token_us[i - 1] > 0) {
            return pace->token_us[i - 1];
        }
    }
    return sound_us(pace->guess_us);
}

static double batches_us(const kvf_pace *pace, size_t num_tokens, size_t batch_tokens) {
    size_t rest = num_tokens % batch_tokens;
    return (double)(num_tokens - rest) * token_us(pace, batch_tokens) + (double)rest * token_us(pace, rest);
}

static int64_t whole_us(double us) {
    return (int64_t)(us < YEAR_US ? us + 0.5 : YEAR_US);
}

int64_t kvf_pace_us(const kvf_pace *pace, size_t num_tokens, size_t batch_tokens) {
    return whole_us(batches_us(pace, num_tokens, batch_tokens > 0 ? batch_tokens : 1));
}

/* ---- the two sides of a gap ---- */

static double compute_us(const kvf_gap *gap, const kvf_pace *pace, uint64_t num_blocks) {
    return batches_us(pace, (size_t)num_blocks * gap->block_tokens, gap->batch_tokens);
}

/* How long the last `num_blocks` of the gap take to arrive. The rate is known. */
static double load_us(const kvf_gap *gap, uint64_t num_blocks) {
    double delay_us = (gap->flags & KVF_GAP_MOVING) != 0 ? 0 : (double)gap->link.round_trip_us;
    double bytes = (double)num_blocks * (double)gap->block_bytes - (double)gap->here_bytes;
    double us = num_blocks == 0 ? 0 : delay_us + (bytes > 0 ? bytes * 1e6 / gap->link.bytes_per_s : 0);
    return us + (double)gap->other_bytes * 1e6 / gap->link.bytes_per_s;
}

/* The best number of blocks of the gap to compute while the others arrive; 0: all of it arrives before one is
 * computed. */
static uint64_t meeting(const kvf_gap *gap, const kvf_pace *pace) {
    double times = is_guess(pace) ? GUESS_DOUBT : 1;
    uint64_t best = gap->num_blocks;
    double best_us = times * compute_us(gap, pace, best);
    for (uint64_t x = gap->num_blocks; x > 0; x--) { /* from all computed to all loaded */
        double computed_us = times * compute_us(gap, pace, x - 1);
        double loaded_us = load_us(gap, gap->num_blocks - x + 1);
        double us = computed_us > loaded_us ? computed_us : loaded_us;
        if (us < best_us) {
            best_us = us;
            best = x - 1;
        }
        if (loaded_us > computed_us) {
            break; /* loading more of it takes even longer */
        }
    }
    return best;
}

/* ---- the decision ---- */

const char *kvf_plan_name(kvf_plan_kind kind) {
    static const char *const names[KVF_NUM_PLANS] = {"none", "load", "compute", "both", "try"};
    return (unsigned)kind < KVF_NUM_PLANS ? names[kind] : "unknown";
}

static kvf_status check_gap(kvf_error *err, const kvf_gap *gap) {
    if (gap->block_tokens == 0 || gap->batch_tokens == 0) {
        return kvfi_fail(err, KVF_LIMIT, "kvf_gap: set block_tokens and batch_tokens");
    }
    if (gap->num_blocks > KVF_MAX_BLOCKS || gap->instead_blocks > KVF_MAX_BLOCKS) {
        return kvfi_fail(err, KVF_LIMIT, "kvf_gap: more than %u blocks", KVF_MAX_BLOCKS);
    }
    if ((gap->flags & ~ALL_FLAGS) != 0) {
        return kvfi_fail(err, KVF_LIMIT, "kvf_gap: unknown flags 0x%x", gap->flags & ~ALL_FLAGS);
    }
    return kvf_reserved_is_zero(gap->link.reserved)
               ? KVF_OK
               : kvfi_fail(err, KVF_LIMIT, "kvf_link: `reserved` of the gap's link is not zero");
}

/* Either load the whole gap, or compute it. */
static kvf_plan_kind choose_whole(const kvf_gap *gap, double computed_us) {
    return load_us(gap, gap->num_blocks) <= computed_us ? KVF_PLAN_LOAD : KVF_PLAN_COMPUTE;
}

static kvf_plan_kind choose_meeting(kvf_plan *plan, const kvf_gap *gap, const kvf_pace *pace) {
    plan->num_compute = meeting(gap, pace);
    return plan->num_compute == 0                 ? KVF_PLAN_LOAD
           : plan->num_compute == gap->num_blocks ? KVF_PLAN_COMPUTE
                                                  : KVF_PLAN_BOTH;
}

static kvf_plan_kind choose(kvf_plan *plan, const kvf_gap *gap, const kvf_pace *pace, double computed_us) {
    bool whole = (gap->flags & KVF_GAP_WHOLE) != 0, patient = (gap->flags & KVF_GAP_IMPATIENT) == 0;
    bool known = gap->link.bytes_per_s > 0; /* and a number */
    if (gap->num_blocks == 0 && gap->other_bytes == 0) {
        return KVF_PLAN_NONE;
    }
    if (computed_us > 0 && computed_us < KVF_TRIFLE_US && !whole && patient) {
        return KVF_PLAN_LOAD;
    }
    if (gap->link.silent != 0) {
        return KVF_PLAN_COMPUTE;
    }
    if (!known) {
        return KVF_PLAN_TRY;
    }
    if (computed_us <= 0) {
        return KVF_PLAN_LOAD;
    }
    return whole ? choose_whole(gap, computed_us) : choose_meeting(plan, gap, pace);
}

static kvf_plan plan_of(const kvf_gap *gap, const kvf_pace *pace) {
    bool whole = (gap->flags & KVF_GAP_WHOLE) != 0;
    uint64_t instead = whole && gap->instead_blocks > 0 ? gap->instead_blocks : gap->num_blocks;
    double computed_us = compute_us(gap, pace, instead);
    kvf_plan plan = {.compute_us = whole_us(computed_us)};
    plan.patience_us = kvf_patience_us(plan.compute_us);
    if (is_guess(pace) && plan.patience_us > KVF_GUESS_US) {
        plan.patience_us = KVF_GUESS_US;
    }
    plan.kind = choose(&plan, gap, pace, computed_us);
    if (plan.kind == KVF_PLAN_COMPUTE) {
        plan.num_compute = gap->num_blocks;
    }
    plan.num_load = gap->num_blocks - plan.num_compute;
    if (gap->link.bytes_per_s > 0 && plan.num_load + gap->other_bytes > 0 && plan.kind != KVF_PLAN_COMPUTE) {
        plan.load_us = whole_us(load_us(gap, plan.num_load));
    }
    return plan;
}

KVF_SIZED(kvf_gap, link, 96, link);
KVF_SIZED(kvf_plan, patience_us, 48, patience_us);

kvf_status kvf_decide(kvf_plan *out, kvf_error *err, const kvf_gap *gap, const kvf_pace *pace) {
    kvf_gap own;
    uint32_t size = 0;
    KVFI_TRY(kvf_sized_size(&size, err, out, &kvf_plan_sized));
    KVFI_TRY(kvf_sized_take(&own, err, gap, &kvf_gap_sized));
    KVFI_TRY(check_gap(err, &own));
    kvf_plan plan = plan_of(&own, pace);
    return kvf_sized_give(out, &plan, &kvf_plan_sized);
}

/* ---- batches ---- */

/* The fewest blocks whose batch is about as fast per token as any. */
static size_t efficient(const kvf_pace *pace, size_t block_tokens, size_t most) {
    double best = INFINITY;
    for (size_t blocks = 1; blocks <= most; blocks++) {
        double us = token_us(pace, blocks * block_tokens);
        best = us > 0 && us < best ? us : best;
    }
    for (size_t blocks = 1; blocks < most; blocks++) {
        if (token_us(pace, blocks * block_tokens) <= best * NEARLY_BEST) {
            return blocks;
        }
    }
    return most;
}

size_t kvf_plan_batch(const kvf_pace *pace, size_t num_blocks, size_t block_tokens, size_t batch_tokens) {
    size_t most = block_tokens > 0 && batch_tokens / block_tokens > 0 ? batch_tokens / block_tokens : 1;
    size_t sizes = (size_t)1 << (KVF_PACE_SIZES - 1); /* so many blocks, and more, are all of the largest size */
    size_t least = efficient(pace, block_tokens, most < sizes ? most : sizes), half = num_blocks / 2 + num_blocks % 2;
    size_t blocks = half > least ? half : least;
    blocks = blocks < most ? blocks : most;
    return blocks < num_blocks ? blocks : num_blocks;
}

int64_t kvf_patience_us(int64_t us) {
    int64_t share = whole_us((double)us * PATIENCE);
    return share > KVF_TRIFLE_US ? share : KVF_TRIFLE_US;
}
