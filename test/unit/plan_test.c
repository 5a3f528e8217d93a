/* SPDX-License-Identifier: Apache-2.0
 *
 * Load or compute: the arithmetic of engines/llama/fetch/plan.c, without a model.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "llama/fetch/plan.h"
#include "support/kit.h"

#define BLOCK_TOKENS 64u
#define BLOCK_BYTES  1.5e6
#define TOKEN_US     7000.0 /* as SmolLM2-135M on two cores */

static kvfl_pace pace_of(double token_us) {
    kvfl_pace pace = {.guess_us = token_us};
    return pace;
}

static kvfl_gap gap_of(size_t blocks) {
    return (kvfl_gap){.num_blocks = blocks, .block_tokens = BLOCK_TOKENS, .step = 512, .block_bytes = BLOCK_BYTES};
}

/* ---- pace ---- */

static void test_pace_goes_by_size(void **state) {
    (void)state;
    kvfl_pace pace = {.guess_us = 100};
    assert_true(kvfl_pace_us(&pace, 64, 512) == 6400);
    kvfl_pace_note(&pace, 1, 5000);
    assert_true(kvfl_pace_us(&pace, 64, 512) == 6400); /* a token alone says nothing of a batch */
    kvfl_pace_note(&pace, 512, 512 * 10);
    assert_true(kvfl_pace_us(&pace, 64, 512) == 640); /* the next larger one */
    kvfl_pace_note(&pace, 64, 64 * 30);
    assert_true(kvfl_pace_us(&pace, 64, 512) == 64 * 30);
    assert_true(kvfl_pace_us(&pace, 512 + 64, 512) == 512 * 10 + 64 * 30);
    kvfl_pace_note(&pace, 0, 5);
    kvfl_pace_note(&pace, 64, 0);
    assert_true(kvfl_pace_us(&pace, 0, 512) == 0);
    for (int i = 0; i < 20; i++) {
        kvfl_pace_note(&pace, 64, 64 * 60);
    }
    assert_true(kvfl_pace_us(&pace, 64, 512) > 64 * 59);
}

/* ---- link ---- */

static void test_link_needs_proof_follows_and_forgets(void **state) {
    (void)state;
    kvfl_link link = {0};
    int64_t now = 1000000;
    assert_true(kvfl_link_rate(&link, now) == 0);
    kvfl_link_note(&link, now, 1000, 100);
    assert_true(kvfl_link_rate(&link, now) == 0); /* too little to tell */
    for (int i = 0; i < 100; i++) {
        now += 10000;
        kvfl_link_note(&link, now, 10000, 10000); /* 1 MB/s */
    }
    assert_true(fabs(kvfl_link_rate(&link, now) - 1) < 0.05);
    for (int i = 0; i < 100; i++) {
        now += 10000;
        kvfl_link_note(&link, now, 1000000, 10000); /* 100 MB/s */
    }
    assert_true(fabs(kvfl_link_rate(&link, now) - 100) < 10);
    for (int i = 0; i < 100; i++) {
        now += 10000;
        kvfl_link_note(&link, now, 0, 10000); /* a stall is not the same as not knowing */
    }
    assert_true(kvfl_link_rate(&link, now) > 0 && kvfl_link_rate(&link, now) < 10);
    assert_true(kvfl_link_rate(&link, now + KVFL_LINK_FRESH_US + 1) == 0);
}

static void test_round_trip_is_the_shortest(void **state) {
    (void)state;
    kvfl_link link = {0};
    kvfl_link_note_round_trip(&link, 3000); /* with a connection to make */
    kvfl_link_note_round_trip(&link, 1000);
    assert_true(link.round_trip_us == 1000);
    for (int i = 0; i < 100; i++) {
        kvfl_link_note_round_trip(&link, 5000);
    }
    assert_true(link.round_trip_us > 4000);
}

/* ---- meeting ---- */

static double finish_us(const kvfl_gap *gap, const kvfl_pace *pace, double rate, size_t x) {
    double compute = kvfl_pace_us(pace, x * gap->block_tokens, gap->step);
    double load = kvfl_gap_load_us(gap, gap->num_blocks - x, rate);
    return compute > load ? compute : load;
}

static void test_extremes(void **state) {
    (void)state;
    kvfl_pace pace = pace_of(TOKEN_US);
    kvfl_pace_note(&pace, 512, (int64_t)(512 * TOKEN_US));
    kvfl_gap gap = gap_of(12);
    assert_int_equal(kvfl_plan_meeting(&gap, &pace, 1000), 0); /* 1 GB/s: all is loaded */
    assert_int_equal(kvfl_plan_meeting(&gap, &pace, 0.1), 12); /* 100 KB/s: nothing arrives in time */
    assert_int_equal(kvfl_plan_meeting(&gap, &pace, 0), 12);
    gap.delay_us = 1e9; /* the store is on the moon */
    assert_int_equal(kvfl_plan_meeting(&gap, &pace, 1000), 12);
    gap = gap_of(1);
    assert_int_equal(kvfl_plan_meeting(&gap, &pace, 1000), 0);
    assert_int_equal(kvfl_plan_meeting(&gap, &pace, 1), 1);
    gap.here_bytes = BLOCK_BYTES * 0.9; /* nearly here */
    assert_int_equal(kvfl_plan_meeting(&gap, &pace, 1), 0);
}

static void test_at_the_crossover_they_meet_in_the_middle(void **state) {
    (void)state;
    kvfl_pace pace = pace_of(TOKEN_US);
    kvfl_gap gap = gap_of(12);
    double rate = BLOCK_BYTES / (BLOCK_TOKENS * TOKEN_US);
    assert_in_range(kvfl_plan_meeting(&gap, &pace, rate), 0,
                    2); /* a mere guess of the pace: hardly anything is computed on it */
    kvfl_pace_note(&pace, 512, (int64_t)(512 * TOKEN_US));
    assert_int_equal(kvfl_plan_meeting(&gap, &pace, rate), 6);
    assert_true(finish_us(&gap, &pace, rate, 6) * 2 <= finish_us(&gap, &pace, rate, 12) * 1.001);
}

/* No other choice would be over sooner, whatever the numbers. */
static void what_is_loaded_as_a_whole_must_beat_computing(void **state) {
    (void)state;
    kvfl_pace pace = {.guess_us = 100}; /* 10 blocks of 64 tokens: 64 ms */
    kvfl_gap gap = {.num_blocks = 4, .block_tokens = 64, .step = 512, .block_bytes = 1000000};
    assert_true(kvfl_plan_goes_on(&gap, &pace, 63, 10, 0));
    assert_false(kvfl_plan_goes_on(&gap, &pace, 62, 10, 0));
    assert_false(kvfl_plan_goes_on(&gap, &pace, 63, 10, 100000)); /* the state, too */
    gap.here_bytes = 200000;
    assert_true(kvfl_plan_goes_on(&gap, &pace, 63, 10, 100000));
    kvfl_pace_note(&pace, 512, 512 * 50); /* it computes sooner than was guessed */
    assert_false(kvfl_plan_goes_on(&gap, &pace, 63, 10, 100000));
    gap.num_blocks = 0;
    gap.here_bytes = 0;
    assert_true(kvfl_plan_goes_on(&gap, &pace, 1, 10, 31000));
    assert_false(kvfl_plan_goes_on(&gap, &pace, 1, 10, 33000));
}

static void test_no_choice_is_better(void **state) {
    (void)state;
    uint64_t random = 5;
    for (int i = 0; i < 20000; i++) {
        kvfl_pace pace = pace_of((double)(1 + kvft_random(&random) % 100000));
        kvfl_pace_note(&pace, 512, (int64_t)(512 * (1 + kvft_random(&random) % 50000)));
        kvfl_gap gap = gap_of(1 + kvft_random(&random) % 40);
        gap.delay_us = (double)(kvft_random(&random) % 300000);
        gap.here_bytes = (double)(kvft_random(&random) % 2000000);
        double rate = (double)(1 + kvft_random(&random) % 1000000) / 1000;
        size_t chosen = kvfl_plan_meeting(&gap, &pace, rate);
        double us = finish_us(&gap, &pace, rate, chosen);
        for (size_t x = 0; x <= gap.num_blocks; x++) {
            assert_true(us <= finish_us(&gap, &pace, rate, x) * 1.000001);
        }
    }
}

static void test_batches_leave_room_to_think_again(void **state) {
    (void)state;
    kvfl_pace pace = pace_of(TOKEN_US);
    kvfl_gap gap = gap_of(12);
    assert_int_equal(kvfl_plan_batch(&gap, &pace, 10), 5);
    assert_int_equal(kvfl_plan_batch(&gap, &pace, 3), 2);
    assert_int_equal(kvfl_plan_batch(&gap, &pace, 1), 1);
    gap = gap_of(100);
    assert_int_equal(kvfl_plan_batch(&gap, &pace, 100), 8); /* one step */
    /* Where small batches are slow, as on a GPU, they are not used but for a rest. */
    kvfl_pace_note(&pace, 512, 512);
    kvfl_pace_note(&pace, 64, 64 * 8);
    kvfl_pace_note(&pace, 128, 128 * 4);
    kvfl_pace_note(&pace, 256, 256 * 2);
    assert_int_equal(kvfl_plan_batch(&gap, &pace, 9), 8);
    assert_int_equal(kvfl_plan_batch(&gap, &pace, 5), 5);
    gap.step = 64;
    assert_int_equal(kvfl_plan_batch(&gap, &pace, 9), 1);
}

/* A whole prefill in simulated time: rates that jump, stalls, a store that lies. Never more than the patience beyond
 * computing alone. */
typedef struct world {
    double now_us, rate, partial; /* bytes of the block that is arriving */
    size_t front, back;           /* blocks [front, back) are still missing */
    kvfl_link link;
    kvfl_patience patience;
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
            w->patience.credit_us += BLOCK_TOKENS * TOKEN_US;
        }
        left -= slice;
        w->now_us += slice;
    }
    kvfl_link_note(&w->link, (int64_t)w->now_us, (uint64_t)came, (int64_t)us);
}

static void test_never_slower_whatever_the_store_does(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 500; seed++) {
        size_t blocks = 1 + seed % 30;
        double alone_us = (double)blocks * BLOCK_TOKENS * TOKEN_US;
        kvfl_pace pace = pace_of(TOKEN_US);
        world w = {.now_us = 1,
                   .rate = 1000,
                   .back = blocks,
                   .random = seed,
                   .mood = (int)(seed % 7),
                   .patience = kvfl_patience_of(alone_us)};
        kvfl_link_note(&w.link, 1, (uint64_t)(1e5 * (double)(seed % 3)), 100000); /* what it was before, or nothing */
        while (w.front < w.back) {
            kvfl_gap gap = gap_of(w.back - w.front);
            gap.here_bytes = w.partial;
            double rate = kvfl_link_rate(&w.link, (int64_t)w.now_us);
            size_t meeting = kvfl_plan_meeting(&gap, &pace, rate);
            bool wait = (rate == 0 || meeting == 0) && w.patience.credit_us > 0;
            if (wait) {
                double us = w.patience.credit_us < 5000 ? w.patience.credit_us : 5000;
                w.patience.credit_us -= us;
                pass(&w, us);
                continue;
            }
            size_t num = kvfl_plan_batch(&gap, &pace, meeting > 0 ? meeting : 1);
            w.front += num; /* what is being computed is not waited for */
            pass(&w, (double)(num * BLOCK_TOKENS) * TOKEN_US);
        }
        assert_true(w.now_us <= alone_us * (1 + KVFL_PATIENCE) + KVFL_TRIFLE_US + 2);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_loaded_as_a_whole_must_beat_computing),
        cmocka_unit_test(test_pace_goes_by_size),
        cmocka_unit_test(test_link_needs_proof_follows_and_forgets),
        cmocka_unit_test(test_round_trip_is_the_shortest),
        cmocka_unit_test(test_extremes),
        cmocka_unit_test(test_at_the_crossover_they_meet_in_the_middle),
        cmocka_unit_test(test_no_choice_is_better),
        cmocka_unit_test(test_batches_leave_room_to_think_again),
        cmocka_unit_test(test_never_slower_whatever_the_store_does),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
