/* SPDX-License-Identifier: Apache-2.0
 *
 * Thousands of lives of a Redis store in a simulated world (support/sim.h): open, save, match, load, touch, remove,
 * while connections are cut, stall, lie and slow down, and slots move. One invariant: a load is byte-exact or a miss,
 * each call returns by its deadline, the store works again when the faults end, and nothing is left behind. KVFT_SEEDS
 * is the number of lives (4000), KVFT_SEED runs one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "prefix/prefix.h"
#include "support/kit.h"
#include "support/sim.h"

#define BLOCKS  6u
#define LATE_US 5000 /* poll counts in milliseconds */

static uint64_t seed;
static size_t loads, hits;

static void quiet(void *ctx, kvf_log_level level, const char *text) {
    (void)ctx;
    (void)level;
    (void)text;
}

static void check_time(int64_t from_us, int64_t budget_us, const char *what) {
    int64_t spent = kvfi_sys->now_us() - from_us;
    if (spent > budget_us + LATE_US) {
        fail_msg("seed %llu: %s took %lld us of %lld", (unsigned long long)seed, what, (long long)spent,
                 (long long)budget_us);
    }
}

static size_t load(kvf_space *space, kvft_prompt *p, uint64_t content, uint32_t budget_ms) {
    kvft_prompt_poison(p);
    int64_t from_us = kvfi_sys->now_us();
    size_t run = kvf_load(space, p->blocks, p->num_blocks, NULL, KVF_MS(budget_ms));
    check_time(from_us, (int64_t)budget_ms * 1000, "a load");
    if (kvft_prompt_wrong(p, content, run) != 0) {
        fail_msg("seed %llu: wrong bytes", (unsigned long long)seed);
    }
    return run;
}

static size_t save(kvf_space *space, kvft_prompt *p, uint64_t content, int64_t budget_ms) {
    kvft_prompt_fill(p, content);
    int64_t from_us = kvfi_sys->now_us();
    size_t saved =
        kvfi_save_through(space, p->blocks, p->num_blocks, NULL, 0, kvfi_deadline(budget_ms * 1000), 0, NULL);
    check_time(from_us, budget_ms * 1000, "a save");
    return saved;
}

static void look_up(kvf_space *space, kvft_prompt *p, uint32_t budget_us) {
    kvf_found found[BLOCKS];
    size_t run = 0;
    int64_t from_us = kvfi_sys->now_us();
    assert_int_equal(kvf_match(space, &run, found, p->keys, p->num_blocks, budget_us), KVF_OK);
    check_time(from_us, budget_us, "a lookup");
    for (size_t i = 0; i < run; i++) {
        assert_int_equal(found[i].payload_bytes, p->payload_bytes);
    }
}

/* Touches or removes all blocks. Returns how many were there. */
static size_t do_each(kvf_space *space, kvft_prompt *p, kvfi_deed deed, int64_t budget_ms) {
    static const atomic_bool never;
    int64_t from_us = kvfi_sys->now_us();
    size_t num = kvfi_each(space, deed, p->blocks, p->num_blocks, kvfi_deadline(budget_ms * 1000), 0, &never);
    check_time(from_us, budget_ms * 1000, deed == KVFI_TOUCH ? "a touch" : "a removal");
    return num;
}

/* Each of the faults is there in one seed of three, now and then or often. */
static kvft_sim_plan draw_plan(uint64_t *random) {
    kvft_sim_plan plan = {.slices = kvft_random(random) % 2 == 0};
    uint32_t *chances[] = {&plan.refuse, &plan.hang,  &plan.cut,   &plan.stall,  &plan.flip,
                           &plan.slow,   &plan.error, &plan.other, &plan.vanish, &plan.redirect};
    for (size_t i = 0; i < sizeof chances / sizeof *chances; i++) {
        *chances[i] = kvft_random(random) % 3 == 0 ? (uint32_t)(64u << kvft_random(random) % 10) : 0;
    }
    return plan;
}

/* The same until no block fails: connections of the time of the faults still break. */
static size_t do_all(kvf_space *space, kvft_prompt *p, kvfi_deed deed) {
    size_t failed = 1, num = 0;
    for (int tries = 0; tries < 60 && failed > 0; tries++) {
        failed = 0;
        num = do_each(space, p, deed, 1000);
        for (size_t i = 0; i < p->num_blocks; i++) {
            failed += p->blocks[i].status != KVF_OK && p->blocks[i].why != KVF_WHY_ABSENT;
        }
        kvft_sim_sleep_ms(50);
    }
    return failed > 0 ? SIZE_MAX : num;
}

static void check_recovery(kvf_space *space, kvft_prompt *p) {
    static const kvft_sim_plan well;
    size_t run = 0;
    kvft_sim_plan_set(&well);
    for (int tries = 0; tries < 60 && run < p->num_blocks; tries++) {
        kvft_sim_sleep_ms(50); /* saves that were refused are spared the server for up to two seconds */
        (void)save(space, p, 1, 1000);
        run = load(space, p, 1, 1000);
    }
    if (run < p->num_blocks) {
        fail_msg("seed %llu: well again, and a load ends at block %zu: %s", (unsigned long long)seed, run,
                 kvf_reason_name(p->blocks[run].why));
    }
    size_t touched = do_all(space, p, KVFI_TOUCH);
    (void)do_all(space, p, KVFI_REMOVE); /* what a connection removed before it broke is absent on the next */
    size_t left = do_all(space, p, KVFI_TOUCH) + load(space, p, 1, 1000);
    if (touched != p->num_blocks || left != 0) {
        fail_msg("seed %llu: well again, and of %zu blocks %zu are touched, and %zu there after a removal",
                 (unsigned long long)seed, p->num_blocks, touched, left);
    }
}

static void live(void) {
    uint64_t random = seed;
    bool cluster = kvft_random(&random) % 2 == 0;
    size_t payload = 50 + kvft_random(&random) % 12000; /* of one to four parts */
    kvft_sim_begin(seed, cluster);
    kvft_sim_plan plan = draw_plan(&random);
    kvf_store *store = NULL;
    kvf_error err = {0};
    const char *url = cluster                         ? KVFT_SIM_CLUSTER_URL "?part=4K"
                      : kvft_random(&random) % 2 == 0 ? KVFT_SIM_URL "?part=4K"
                                                      : KVFT_SIM_URL "?part=4K&conns=2";
    kvft_sim_plan_set(&plan);
    kvf_status status = kvf_store_open(&store, &err, &url, 1, NULL);
    if (status != KVF_OK &&
        status != KVF_CONFIG) { /* garbage in the first answer is taken for another kind of server */
        fail_msg("seed %llu: %s", (unsigned long long)seed, err.what);
    }
    if (status == KVF_OK) {
        kvf_space *space = kvft_sealed_space(store, "m", 16, seed % 2 == 0 ? NULL : "a tenant's secret");
        kvft_prompt *p = kvft_prompt_new(space, 1, BLOCKS, payload);
        for (int i = 0; i < 10; i++) {
            uint32_t budget_ms = 1u << kvft_random(&random) % 11;
            uint64_t what = kvft_random(&random) % 10;
            if (what < 3) {
                (void)save(space, p, 1, budget_ms);
            } else if (what < 6) {
                loads += BLOCKS;
                hits += load(space, p, 1, budget_ms);
            } else if (what == 6) {
                look_up(space, p, budget_ms * 1000);
            } else if (what == 7) {
                (void)do_each(space, p, KVFI_TOUCH, budget_ms);
            } else if (what == 8) {
                (void)do_each(space, p, KVFI_REMOVE, budget_ms);
            } else {
                kvf_digest digest;
                kvf_key key;
                kvf_space_digest(space, &digest);
                kvf_stored_key(space, &key, &p->keys[kvft_random(&random) % BLOCKS]);
                status = kvf_remove(store, &err, &digest, &key);
                kvft_sim_sleep_ms((int64_t)(kvft_random(&random) % 300));
            }
        }
        check_recovery(space, p);
        kvft_prompt_free(p);
        kvf_space_close(space);
        kvf_store_close(store);
    }
    uint64_t left = kvft_sim_end();
    if (left != 0) {
        fail_msg("seed %llu: %llu connections or blocks of memory are left behind", (unsigned long long)seed,
                 (unsigned long long)left);
    }
}

static void test_seeds(void **state) {
    (void)state;
    const char *only = getenv("KVFT_SEED"), *num = getenv("KVFT_SEEDS");
    uint64_t from = only != NULL ? strtoull(only, NULL, 10) : 0;
    uint64_t to = only != NULL ? from + 1 : num != NULL ? strtoull(num, NULL, 10) : 4000;
    kvf_set_log(quiet, NULL, KVF_LOG_ERROR);
    for (seed = from; seed < to; seed++) {
        live();
    }
    kvft_sim_stats s = kvft_sim_stats_get();
    printf(
        "%llu seeds, %llu commands; connects refused %llu, hung %llu; cut %llu, stalled %llu, bits flipped %llu; replies slow %llu, errors %llu, "
        "of another key %llu; keys gone %llu; MOVED %llu, ASK %llu\n",
        (unsigned long long)(to - from), (unsigned long long)s.commands, (unsigned long long)s.refused,
        (unsigned long long)s.hung, (unsigned long long)s.cut, (unsigned long long)s.stalled,
        (unsigned long long)s.flipped, (unsigned long long)s.slow, (unsigned long long)s.errors,
        (unsigned long long)s.others, (unsigned long long)s.vanished, (unsigned long long)s.moved,
        (unsigned long long)s.asked);
    printf("%zu of %zu blocks loaded while faults were on\n", hits, loads);
    assert_true(only != NULL || (hits > 0 && hits < loads));
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_seeds)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
