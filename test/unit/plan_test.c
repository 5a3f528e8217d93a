/* SPDX-License-Identifier: Apache-2.0
 *
 * Load or compute: kvferry/plan.h, without a store and a model.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kvferry/kvferry.h"
#include "plan/link.h"
#include "support/kit.h"

#define BLOCK_TOKENS 64u
#define BLOCK_BYTES  1500000u
#define TOKEN_US     7000.0 /* as SmolLM2-135M on two cores */

#define ONE_MB_S 1e6 /* a byte a microsecond */

static kvf_pace pace_of(double token_us) {
    return (kvf_pace){.guess_us = token_us};
}

static kvf_pace noted(double token_us) {
    kvf_pace pace = {0};
    kvf_pace_note(&pace, 512, (int64_t)(512 * token_us));
    return pace;
}

static kvf_gap gap_of(size_t blocks, double bytes_per_s) {
    return (kvf_gap){.struct_size = sizeof(kvf_gap),
                     .num_blocks = blocks,
                     .block_tokens = BLOCK_TOKENS,
                     .batch_tokens = 512,
                     .block_bytes = BLOCK_BYTES,
                     .link = {.bytes_per_s = bytes_per_s}};
}

static kvf_plan decide(const kvf_gap *gap, const kvf_pace *pace) {
    kvf_plan plan = {.struct_size = sizeof plan};
    kvf_error err = {0};
    assert_int_equal(kvf_decide(&plan, &err, gap, pace), KVF_OK);
    assert_int_equal(plan.struct_size, sizeof plan);
    assert_int_equal(plan.num_compute + plan.num_load, gap->num_blocks);
    return plan;
}

static void expect(const kvf_gap *gap, const kvf_pace *pace, kvf_plan_kind kind, size_t num_compute) {
    kvf_plan plan = decide(gap, pace);
    assert_string_equal(kvf_plan_name(plan.kind), kvf_plan_name(kind));
    assert_int_equal(plan.num_compute, num_compute);
}

/* ---- pace ---- */

static void test_pace_goes_by_size(void **state) {
    (void)state;
    kvf_pace pace = {.guess_us = 100};
    assert_int_equal(kvf_pace_us(&pace, 64, 512), 6400);
    kvf_pace_note(&pace, 1, 5000);
    assert_int_equal(kvf_pace_us(&pace, 64, 512), 6400); /* a token alone says nothing of a batch */
    kvf_pace_note(&pace, 512, 512 * 10);
    assert_int_equal(kvf_pace_us(&pace, 64, 512), 640); /* the next larger one */
    kvf_pace_note(&pace, 64, 64 * 30);
    assert_int_equal(kvf_pace_us(&pace, 64, 512), 64 * 30);
    assert_int_equal(kvf_pace_us(&pace, 512 + 64, 512), 512 * 10 + 64 * 30);
    kvf_pace_note(&pace, 0, 5);
    kvf_pace_note(&pace, 64, 0);
    kvf_pace_note(&pace, 64, -5);
    assert_int_equal(kvf_pace_us(&pace, 0, 512), 0);
    assert_int_equal(kvf_pace_us(&pace, 64, 512), 64 * 30);
    for (int i = 0; i < 20; i++) {
        kvf_pace_note(&pace, 64, 64 * 60);
    }
    assert_true(kvf_pace_us(&pace, 64, 512) > 64 * 59);
}

static void test_pace_at_its_limits(void **state) {
    (void)state;
    kvf_pace pace = {0};
    assert_int_equal(kvf_pace_us(&pace, SIZE_MAX, 1), 0); /* nothing is known */
    assert_int_equal(kvf_pace_us(&pace, 64, 0), 0);
    pace.guess_us = 1e300;
    assert_true(kvf_pace_us(&pace, SIZE_MAX, 512) > 0);
    pace.guess_us = NAN;
    assert_int_equal(kvf_pace_us(&pace, 64, 512), 0);
    pace.guess_us = -5;
    assert_int_equal(kvf_pace_us(&pace, 64, 512), 0);
}

/* ---- link ---- */

static void test_link_needs_proof_follows_and_forgets(void **state) {
    (void)state;
    kvfi_link link = {0};
    int64_t now = 1000000;
    assert_true(kvfi_link_tell(&link, now).bytes_per_s == 0);
    kvfi_link_note(&link, now, 1000, 100);
    assert_true(kvfi_link_tell(&link, now).bytes_per_s == 0); /* too little to tell */
    for (int i = 0; i < 100; i++) {
        now += 10000;
        kvfi_link_note(&link, now, 10000, 10000); /* 1 MB/s */
    }
    assert_true(fabs(kvfi_link_tell(&link, now).bytes_per_s / ONE_MB_S - 1) < 0.05);
    for (int i = 0; i < 100; i++) {
        now += 10000;
        kvfi_link_note(&link, now, 1000000, 10000); /* 100 MB/s */
    }
    assert_true(fabs(kvfi_link_tell(&link, now).bytes_per_s / ONE_MB_S - 100) < 10);
    for (int i = 0; i < 100; i++) {
        now += 10000;
        kvfi_link_note(&link, now, 0, 10000); /* a stall is not the same as not knowing */
    }
    assert_true(kvfi_link_tell(&link, now).bytes_per_s > 0);
    assert_true(kvfi_link_tell(&link, now).bytes_per_s < 10 * ONE_MB_S);
    assert_int_equal(kvfi_link_tell(&link, now).silent, 0);
    assert_true(kvfi_link_tell(&link, now + KVFI_LINK_FRESH_US + 1).bytes_per_s == 0);
}

static void test_silence_is_told_apart_from_not_knowing(void **state) {
    (void)state;
    kvfi_link link = {0};
    kvfi_link_note(&link, 50000, 0, 30000);
    assert_int_equal(kvfi_link_tell(&link, 50000).silent, 0);
    kvfi_link_note(&link, 100000, 0, 50000);
    assert_int_equal(kvfi_link_tell(&link, 100000).silent, 1);
    assert_true(kvfi_link_tell(&link, 100000).bytes_per_s == 0);
    assert_int_equal(kvfi_link_tell(&link, 100001 + KVFI_LINK_FRESH_US).silent, 0);
}

static void test_round_trip_is_the_shortest(void **state) {
    (void)state;
    kvfi_link link = {0};
    kvfi_link_note_round_trip(&link, 3000); /* with a connection to make */
    kvfi_link_note_round_trip(&link, 1000);
    assert_int_equal(kvfi_link_tell(&link, 0).round_trip_us, 1000);
    for (int i = 0; i < 100; i++) {
        kvfi_link_note_round_trip(&link, 5000);
    }
    assert_true(kvfi_link_tell(&link, 0).round_trip_us > 4000);
}

/* ---- the decision ---- */

/* A block of 64 tokens takes 448 ms to compute, and at 1 MB/s 1500 ms to arrive. */
static void test_decisions(void **state) {
    (void)state;
    static const struct {
        const char *what;
        size_t blocks;
        double token_us, mb_s;
        int64_t round_trip_us;
        uint32_t silent, flags;
        kvf_plan_kind kind;
        size_t num_compute;
    } cases[] = {
        {"nothing is stored", 0, TOKEN_US, 1000, 0, 0, 0, KVF_PLAN_NONE, 0},
        {"1 GB/s", 12, TOKEN_US, 1000, 0, 0, 0, KVF_PLAN_LOAD, 0},
        {"100 KB/s", 12, TOKEN_US, 0.1, 0, 0, 0, KVF_PLAN_COMPUTE, 12},
        {"as fast as computing", 12, TOKEN_US, 1500 / 448.0, 0, 0, 0, KVF_PLAN_BOTH, 6},
        {"half as fast", 12, TOKEN_US, 750 / 448.0, 0, 0, 0, KVF_PLAN_BOTH, 8},
        {"a store on the moon", 12, TOKEN_US, 1000, 1000000000, 0, 0, KVF_PLAN_COMPUTE, 12},
        {"... whose bytes are on their way", 12, TOKEN_US, 1000, 1000000000, 0, KVF_GAP_MOVING, KVF_PLAN_LOAD, 0},
        {"one block, in time", 1, TOKEN_US, 1000, 0, 0, 0, KVF_PLAN_LOAD, 0},
        {"one block, too late", 1, TOKEN_US, 1, 0, 0, 0, KVF_PLAN_COMPUTE, 1},
        {"infinitely fast", 12, TOKEN_US, INFINITY, 0, 0, 0, KVF_PLAN_LOAD, 0},
        {"infinitely fast, a round trip away", 12, TOKEN_US, INFINITY, 3000000, 0, 0, KVF_PLAN_BOTH, 6},
        {"a rate that is none", 12, TOKEN_US, NAN, 0, 0, 0, KVF_PLAN_TRY, 0},
        {"a rate below zero", 12, TOKEN_US, -1, 0, 0, 0, KVF_PLAN_TRY, 0},
        {"a rate that is not known yet", 12, TOKEN_US, 0, 0, 0, 0, KVF_PLAN_TRY, 0},
        {"nothing ever comes", 12, TOKEN_US, 0, 0, 1, 0, KVF_PLAN_COMPUTE, 12},
        {"a pace that is not known yet", 12, 0, 0.001, 0, 0, 0, KVF_PLAN_LOAD, 0},
        {"nothing is known", 12, 0, 0, 0, 0, 0, KVF_PLAN_TRY, 0},
        {"no pace, and nothing comes", 12, 0, 0, 0, 1, 0, KVF_PLAN_COMPUTE, 12},
        {"computed in no time", 12, 1, 1000, 0, 0, 0, KVF_PLAN_LOAD, 0},
        {"... without patience", 12, 1, 1000, 0, 0, KVF_GAP_IMPATIENT, KVF_PLAN_COMPUTE, 12},
        {"... as a whole", 12, 1, 1000, 0, 0, KVF_GAP_WHOLE, KVF_PLAN_COMPUTE, 12},
        {"as a whole, 1 GB/s", 12, TOKEN_US, 1000, 0, 0, KVF_GAP_WHOLE, KVF_PLAN_LOAD, 0},
        {"as a whole, just in time", 12, TOKEN_US, 1501 / 448.0, 0, 0, KVF_GAP_WHOLE, KVF_PLAN_LOAD, 0},
        {"as a whole, just too late", 12, TOKEN_US, 1499 / 448.0, 0, 0, KVF_GAP_WHOLE, KVF_PLAN_COMPUTE, 12},
        {"as a whole, not known yet", 12, TOKEN_US, 0, 0, 0, KVF_GAP_WHOLE, KVF_PLAN_TRY, 0},
        {"as a whole, nothing comes", 12, TOKEN_US, 0, 0, 1, KVF_GAP_WHOLE, KVF_PLAN_COMPUTE, 12},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvf_gap gap = gap_of(cases[i].blocks, cases[i].mb_s * ONE_MB_S);
        gap.flags = cases[i].flags;
        gap.link.silent = cases[i].silent;
        gap.link.round_trip_us = cases[i].round_trip_us;
        kvf_pace pace = cases[i].token_us > 0 ? noted(cases[i].token_us) : (kvf_pace){0};
        kvf_plan plan = decide(&gap, &pace);
        if (plan.kind != cases[i].kind || plan.num_compute != cases[i].num_compute) {
            fail_msg("%s: %s, %zu blocks computed", cases[i].what, kvf_plan_name(plan.kind), (size_t)plan.num_compute);
        }
    }
}

static void test_a_plan_says_what_it_expects(void **state) {
    (void)state;
    kvf_pace pace = noted(TOKEN_US);
    kvf_gap gap = gap_of(12, 1000 * ONE_MB_S);
    gap.link.round_trip_us = 300;
    gap.other_bytes = 1000000;
    kvf_plan plan = decide(&gap, &pace);
    assert_int_equal(plan.load_us, 300 + 12 * 1500 + 1000);
    assert_int_equal(plan.compute_us, 12 * 448000);
    assert_int_equal(plan.patience_us, 12 * 448000 * 3 / 100);
    gap.here_bytes = 18000000; /* more than is missing */
    assert_int_equal(decide(&gap, &pace).load_us, 300 + 1000);
    gap.link.bytes_per_s = 0;
    assert_int_equal(decide(&gap, &pace).load_us, 0);
    assert_int_equal(kvf_patience_us(0), KVF_TRIFLE_US);
    assert_int_equal(kvf_patience_us(-1), KVF_TRIFLE_US);
    assert_int_equal(kvf_patience_us(1000000), 30000);
}

static void test_what_is_nearly_here_is_loaded(void **state) {
    (void)state;
    kvf_pace pace = noted(TOKEN_US);
    kvf_gap gap = gap_of(1, ONE_MB_S);
    expect(&gap, &pace, KVF_PLAN_COMPUTE, 1);
    gap.here_bytes = BLOCK_BYTES * 9 / 10;
    expect(&gap, &pace, KVF_PLAN_LOAD, 0);
    gap.other_bytes = BLOCK_BYTES;
    expect(&gap, &pace, KVF_PLAN_COMPUTE, 1);
}

/* A mere guess of the pace: hardly anything is computed on it. */
static void test_a_guess_is_doubted(void **state) {
    (void)state;
    kvf_gap gap = gap_of(12, 1500 / 448.0 * ONE_MB_S);
    kvf_pace pace = pace_of(TOKEN_US);
    assert_in_range(decide(&gap, &pace).num_compute, 0, 2);
    kvf_pace_note(&pace, 512, (int64_t)(512 * TOKEN_US));
    expect(&gap, &pace, KVF_PLAN_BOTH, 6);
}

/* An engine that guesses that computing takes for ever loads. */
static void test_a_guess_may_be_infinite(void **state) {
    (void)state;
    const double guesses[] = {1e300, INFINITY};
    kvf_gap gap = gap_of(12, ONE_MB_S);
    for (size_t i = 0; i < 2; i++) {
        kvf_pace pace = pace_of(guesses[i]);
        expect(&gap, &pace, KVF_PLAN_LOAD, 0);
        assert_int_equal(decide(&gap, &pace).patience_us, KVF_GUESS_US);
        assert_int_equal(kvf_plan_batch(&pace, 12, BLOCK_TOKENS, 512), 6);
        assert_true(kvf_pace_us(&pace, 64, 512) > 0);
    }
    gap.flags = KVF_GAP_WHOLE;
    kvf_pace pace = pace_of(INFINITY);
    expect(&gap, &pace, KVF_PLAN_LOAD, 0);
}

/* It may be a hundred times too slow, so it grants no long wait. The first batch of a size to go by ends it. */
static void test_a_guess_grants_little_patience(void **state) {
    (void)state;
    kvf_gap gap = gap_of(12, 0);
    kvf_pace pace = pace_of(100);
    assert_int_equal(decide(&gap, &pace).patience_us, KVF_TRIFLE_US);
    pace = pace_of(TOKEN_US);
    assert_int_equal(decide(&gap, &pace).patience_us, KVF_GUESS_US);
    pace = pace_of(100 * TOKEN_US);
    assert_int_equal(decide(&gap, &pace).patience_us, KVF_GUESS_US);
    kvf_pace_note(&pace, 32, (int64_t)(32 * TOKEN_US));
    assert_true(pace.guess_us > 0);
    kvf_pace_note(&pace, 512, (int64_t)(512 * TOKEN_US));
    assert_true(pace.guess_us == 0);
    assert_int_equal(decide(&gap, &pace).patience_us, (int64_t)(12 * 64 * TOKEN_US * 0.03));
}

static void test_what_is_loaded_as_a_whole_must_beat_computing(void **state) {
    (void)state;
    kvf_pace pace = {.guess_us = 100}; /* 10 blocks of 64 tokens: 64 ms */
    kvf_gap gap = gap_of(4, 63 * ONE_MB_S);
    gap.flags = KVF_GAP_WHOLE;
    gap.block_bytes = 1000000;
    gap.instead_blocks = 10;
    expect(&gap, &pace, KVF_PLAN_LOAD, 0);
    gap.link.bytes_per_s = 62 * ONE_MB_S;
    expect(&gap, &pace, KVF_PLAN_COMPUTE, 4);
    gap.link.bytes_per_s = 63 * ONE_MB_S;
    gap.other_bytes = 100000; /* the state, too */
    expect(&gap, &pace, KVF_PLAN_COMPUTE, 4);
    gap.here_bytes = 200000;
    expect(&gap, &pace, KVF_PLAN_LOAD, 0);
    kvf_pace_note(&pace, 512, 512 * 50); /* it computes sooner than was guessed */
    expect(&gap, &pace, KVF_PLAN_COMPUTE, 4);
    gap.num_blocks = gap.here_bytes = 0; /* the state alone */
    gap.link.bytes_per_s = ONE_MB_S;
    gap.other_bytes = 31000;
    expect(&gap, &pace, KVF_PLAN_LOAD, 0);
    gap.other_bytes = 33000;
    expect(&gap, &pace, KVF_PLAN_COMPUTE, 0);
}

static double finish_us(const kvf_gap *gap, const kvf_pace *pace, size_t x) {
    size_t loaded = gap->num_blocks - x;
    double compute = (double)kvf_pace_us(pace, x * gap->block_tokens, gap->batch_tokens);
    double bytes = (double)loaded * (double)gap->block_bytes - (double)gap->here_bytes;
    double load =
        loaded == 0 ? 0 : (double)gap->link.round_trip_us + (bytes > 0 ? bytes * 1e6 / gap->link.bytes_per_s : 0);
    return compute > load ? compute : load;
}

/* No other choice would be over sooner, whatever the numbers. */
static void test_no_choice_is_better(void **state) {
    (void)state;
    uint64_t random = 5;
    for (int i = 0; i < 20000; i++) {
        kvf_pace pace = noted((double)(1 + kvft_random(&random) % 50000));
        kvf_gap gap = gap_of(1 + kvft_random(&random) % 40, (double)(1 + kvft_random(&random) % 1000000) * 1000);
        gap.flags = KVF_GAP_IMPATIENT;
        gap.link.round_trip_us = (int64_t)(kvft_random(&random) % 300000);
        gap.here_bytes = kvft_random(&random) % 2000000;
        double us = finish_us(&gap, &pace, (size_t)decide(&gap, &pace).num_compute);
        for (size_t x = 0; x <= gap.num_blocks; x++) {
            assert_true(us <= finish_us(&gap, &pace, x) * 1.000001 + 1);
        }
    }
}

static void refuse(const kvf_gap *gap, const char *word) {
    kvf_pace pace = noted(TOKEN_US);
    kvf_plan plan = {.struct_size = sizeof plan, .num_load = 77};
    kvf_error err = {0};
    assert_int_equal(kvf_decide(&plan, &err, gap, &pace), KVF_LIMIT);
    assert_non_null(strstr(err.what, word));
    assert_int_equal(plan.num_load, 77);
    assert_int_equal(kvf_decide(&plan, NULL, gap, &pace), KVF_LIMIT);
}

static void test_bad_input_is_refused(void **state) {
    (void)state;
    kvf_pace pace = noted(TOKEN_US);
    kvf_gap gap = gap_of(4, ONE_MB_S);
    gap.struct_size = 0;
    refuse(&gap, "struct_size");
    gap = gap_of(4, ONE_MB_S);
    gap.block_tokens = 0;
    refuse(&gap, "block_tokens");
    gap = gap_of(4, ONE_MB_S);
    gap.batch_tokens = 0;
    refuse(&gap, "batch_tokens");
    gap = gap_of(KVF_MAX_BLOCKS + 1, ONE_MB_S);
    refuse(&gap, "blocks");
    gap = gap_of(4, ONE_MB_S);
    gap.instead_blocks = UINT64_MAX;
    refuse(&gap, "blocks");
    gap = gap_of(4, ONE_MB_S);
    gap.flags = 8;
    refuse(&gap, "flag");
    gap = gap_of(4, ONE_MB_S);
    gap.link.reserved[1] = 1;
    refuse(&gap, "reserved");
    gap = gap_of(KVF_MAX_BLOCKS, ONE_MB_S);
    gap.block_tokens = gap.batch_tokens = UINT32_MAX;
    gap.block_bytes = gap.here_bytes = gap.other_bytes = UINT64_MAX;
    gap.link.round_trip_us = INT64_MAX;
    expect(&gap, &pace, KVF_PLAN_COMPUTE, KVF_MAX_BLOCKS);
    kvf_plan none = {.struct_size = 0};
    gap = gap_of(4, ONE_MB_S);
    kvf_error err = {0};
    assert_int_equal(kvf_decide(&none, &err, &gap, &pace), KVF_LIMIT);
    assert_non_null(strstr(err.what, "kvf_plan"));
    assert_string_equal(kvf_plan_name((kvf_plan_kind)99), "unknown");
}

static void test_batches_leave_room_to_think_again(void **state) {
    (void)state;
    kvf_pace pace = pace_of(TOKEN_US);
    assert_int_equal(kvf_plan_batch(&pace, 10, BLOCK_TOKENS, 512), 5);
    assert_int_equal(kvf_plan_batch(&pace, 3, BLOCK_TOKENS, 512), 2);
    assert_int_equal(kvf_plan_batch(&pace, 1, BLOCK_TOKENS, 512), 1);
    assert_int_equal(kvf_plan_batch(&pace, 0, BLOCK_TOKENS, 512), 0);
    assert_int_equal(kvf_plan_batch(&pace, 3, 0, 0), 1);
    assert_int_equal(kvf_plan_batch(&pace, 100, BLOCK_TOKENS, 512), 8);       /* one step */
    assert_int_equal(kvf_plan_batch(&pace, 100, BLOCK_TOKENS, SIZE_MAX), 50); /* no bound: no loop over it */
    /* Where small batches are slow, as on a GPU, they are not used but for a rest. */
    kvf_pace_note(&pace, 512, 512);
    kvf_pace_note(&pace, 64, 64 * 8);
    kvf_pace_note(&pace, 128, 128 * 4);
    kvf_pace_note(&pace, 256, 256 * 2);
    assert_int_equal(kvf_plan_batch(&pace, 9, BLOCK_TOKENS, 512), 8);
    assert_int_equal(kvf_plan_batch(&pace, 5, BLOCK_TOKENS, 512), 5);
    assert_int_equal(kvf_plan_batch(&pace, 9, BLOCK_TOKENS, 64), 1);
}

/* A whole prefill in simulated time, of an engine that follows kvferry/plan.h: rates that jump, stalls, a store that
 * lies. Never more than the patience beyond computing alone. */
typedef struct world {
    double now_us, rate, partial; /* bytes of the block that is arriving */
    size_t front, back;           /* blocks [front, back) are still missing */
    kvfi_link link;
    int64_t patience_us;
    uint64_t random;
    int mood;
} world;

static void pass(world *w, double us) {
    double left = us, came = 0;
    while (left > 0) {
        double slice = left < 1000 ? left : 1000;
        if (kvft_random(&w->random) % 100 == 0) {
            static const double rates[] = {0, 0.1, 1, 3, 10, 100, 1000};
            w->rate = w->mood == 0 ? 0 : w->mood == 1 ? rates[kvft_random(&w->random) % 7] : rates[w->mood];
        }
        w->partial += w->rate * slice;
        came += w->rate * slice;
        while (w->partial >= BLOCK_BYTES && w->back > w->front) {
            w->partial -= BLOCK_BYTES;
            w->back--;
            w->patience_us += (int64_t)(BLOCK_TOKENS * TOKEN_US);
        }
        left -= slice;
        w->now_us += slice;
    }
    kvfi_link_note(&w->link, (int64_t)w->now_us, (uint64_t)came, (int64_t)us);
}

static void test_never_slower_whatever_the_store_does(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 500; seed++) {
        size_t blocks = 1 + seed % 30;
        int64_t alone_us = (int64_t)((double)blocks * BLOCK_TOKENS * TOKEN_US);
        kvf_pace pace = pace_of(TOKEN_US);
        world w = {.now_us = 1,
                   .rate = 1000,
                   .back = blocks,
                   .random = seed,
                   .mood = (int)(seed % 7),
                   .patience_us = kvf_patience_us(alone_us)};
        kvfi_link_note(&w.link, 1, (uint64_t)(1e5 * (double)(seed % 3)), 100000); /* what it was before, or nothing */
        while (w.front < w.back) {
            kvf_gap gap = gap_of(w.back - w.front, 0);
            gap.link = kvfi_link_tell(&w.link, (int64_t)w.now_us);
            gap.here_bytes = (uint64_t)w.partial;
            kvf_plan plan = decide(&gap, &pace);
            if ((plan.kind == KVF_PLAN_LOAD || plan.kind == KVF_PLAN_TRY) && w.patience_us > 0) {
                int64_t us = w.patience_us < 5000 ? w.patience_us : 5000;
                w.patience_us -= us;
                pass(&w, (double)us);
                continue;
            }
            size_t num = kvf_plan_batch(&pace, plan.num_compute > 0 ? plan.num_compute : 1, BLOCK_TOKENS, 512);
            w.front += num; /* what is being computed is not waited for */
            pass(&w, (double)(num * BLOCK_TOKENS) * TOKEN_US);
        }
        assert_true(w.now_us <= (double)alone_us + (double)kvf_patience_us(alone_us) + 2);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pace_goes_by_size),
        cmocka_unit_test(test_pace_at_its_limits),
        cmocka_unit_test(test_link_needs_proof_follows_and_forgets),
        cmocka_unit_test(test_silence_is_told_apart_from_not_knowing),
        cmocka_unit_test(test_round_trip_is_the_shortest),
        cmocka_unit_test(test_decisions),
        cmocka_unit_test(test_a_plan_says_what_it_expects),
        cmocka_unit_test(test_what_is_nearly_here_is_loaded),
        cmocka_unit_test(test_a_guess_is_doubted),
        cmocka_unit_test(test_a_guess_may_be_infinite),
        cmocka_unit_test(test_a_guess_grants_little_patience),
        cmocka_unit_test(test_what_is_loaded_as_a_whole_must_beat_computing),
        cmocka_unit_test(test_no_choice_is_better),
        cmocka_unit_test(test_bad_input_is_refused),
        cmocka_unit_test(test_batches_leave_room_to_think_again),
        cmocka_unit_test(test_never_slower_whatever_the_store_does),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
