/* SPDX-License-Identifier: Apache-2.0
 *
 * The memory store: values, references, its bound and eviction.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "mem/mem.h"
#include "support/faults.h"
#include "support/kit.h"
#include "support/tiers.h"

#define SIZE 60000u

static uint64_t used(kvfi_tier *tier) {
    kvf_tier_info info = {.struct_size = sizeof info};
    tier->ops->info(tier, &info);
    return (uint64_t)info.used_bytes;
}

static void remove_seed(kvfi_tier *tier, uint64_t seed, kvf_status expected) {
    kvfi_addr addr;
    kvft_addr(&addr, seed);
    assert_int_equal(tier->ops->remove(tier, NULL, &addr, KVFI_NEVER), expected);
}

static void test_what_is_put_is_got(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier("mem:");
    static const size_t sizes[] = {0, 1, 4095, 32768, 100000, 3000000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        assert_int_equal(kvft_get(tier, i, sizes[i]), KVF_WHY_ABSENT);
        assert_int_equal(kvft_put(tier, i, sizes[i]), KVF_WHY_NONE);
        assert_int_equal(kvft_get(tier, i, sizes[i]), KVF_WHY_NONE);
        assert_int_equal(kvft_borrow(tier, i, sizes[i]), KVF_WHY_NONE);
        assert_int_equal(kvft_peek(tier, i), KVF_WHY_NONE);
    }
    assert_int_equal(kvft_get(tier, 3, 32767), KVF_WHY_TRUNCATED);
    assert_int_equal(kvft_peek(tier, 99), KVF_WHY_ABSENT);
    assert_int_equal(kvft_borrow(tier, 99, 1), KVF_WHY_ABSENT);
    kvft_census census = kvft_count(tier);
    assert_int_equal(census.records, 6);
    assert_int_equal(census.damaged, 0);
    tier->ops->close(tier);
}

/* How much the store grows by a value of so many bytes, all included. */
static uint64_t cost_of(size_t bytes) {
    kvfi_tier *tier = kvft_tier("mem:");
    uint64_t before = used(tier);
    assert_int_equal(kvft_put(tier, 1, bytes - KVFT_VALUE_EXTRA), KVF_WHY_NONE);
    uint64_t cost = used(tier) - before;
    tier->ops->close(tier);
    return cost;
}

/* Memory comes in pieces of 64 bytes, for large values in pages. What fills them to the last byte costs no more. */
static void test_a_full_piece_costs_no_more(void **state) {
    (void)state;
    static const size_t units[][2] = {{640, 64}, {1 << 20, 4096}};
    for (size_t i = 0; i < 2; i++) {
        size_t full = units[i][0], unit = units[i][1];
        assert_int_equal(cost_of(full), cost_of(full - 1));
        assert_int_equal(cost_of(full), cost_of(full - unit + 1));
        assert_int_equal(cost_of(full + 1), cost_of(full) + unit);
    }
}

static void test_the_bound_holds_and_the_oldest_goes(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier("mem:?max=1M");
    for (uint64_t seed = 0; seed < 10; seed++) {
        assert_int_equal(kvft_put(tier, seed, SIZE), KVF_WHY_NONE);
    }
    for (uint64_t seed = 10; seed < 60; seed++) {
        assert_int_equal(kvft_get(tier, 3, SIZE), KVF_WHY_NONE); /* used all the time: stays */
        assert_int_equal(kvft_put(tier, seed, SIZE), KVF_WHY_NONE);
        assert_true(used(tier) <= 1u << 20);
    }
    assert_int_equal(kvft_get(tier, 0, SIZE), KVF_WHY_ABSENT);
    assert_int_equal(kvft_get(tier, 3, SIZE), KVF_WHY_NONE);
    assert_int_equal(kvft_get(tier, 59, SIZE), KVF_WHY_NONE);
    assert_true(used(tier) > 800000);
    tier->ops->close(tier);
}

static void test_touch_and_remove(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier("mem:?max=1M");
    for (uint64_t seed = 0; seed < 60; seed++) {
        assert_int_equal(kvft_each(tier, KVFI_TOUCH, 3), seed <= 3 ? KVF_WHY_ABSENT : KVF_WHY_NONE);
        assert_int_equal(kvft_put(tier, seed, SIZE), KVF_WHY_NONE);
    }
    assert_int_equal(kvft_get(tier, 3, SIZE), KVF_WHY_NONE); /* it was touched all the time, and stays */
    assert_int_equal(kvft_get(tier, 4, SIZE), KVF_WHY_ABSENT);
    kvfi_addr addrs[3];
    kvf_reason whys[3];
    kvft_addr(&addrs[0], 3);
    kvft_addr(&addrs[1], 4);
    kvft_addr(&addrs[2], 59);
    tier->ops->each(tier, KVFI_REMOVE, addrs, 3, whys, KVFI_NEVER, 0);
    assert_int_equal(whys[0], KVF_WHY_NONE);
    assert_int_equal(whys[1], KVF_WHY_ABSENT);
    assert_int_equal(whys[2], KVF_WHY_NONE);
    assert_int_equal(kvft_get(tier, 3, SIZE), KVF_WHY_ABSENT);
    assert_int_equal(kvft_get(tier, 59, SIZE), KVF_WHY_ABSENT);
    assert_int_equal(kvft_get(tier, 58, SIZE), KVF_WHY_NONE);
    tier->ops->close(tier);
}

static void test_mixed_sizes_stay_within_the_bound(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier("mem:?max=1M");
    uint64_t random = 1;
    for (uint64_t i = 0; i < 3000; i++) {
        uint64_t seed = kvft_random(&random) % 500;
        size_t size = (size_t)(seed * 797 % 150000);
        kvf_reason why = kvft_get(tier, seed, size);
        assert_true(why == KVF_WHY_NONE || why == KVF_WHY_ABSENT);
        assert_int_equal(kvft_put(tier, seed, size), KVF_WHY_NONE);
        assert_true(used(tier) <= 1u << 20);
    }
    uint64_t removed = 0;
    assert_int_equal(tier->ops->clear(tier, &removed, NULL, NULL, KVF_MS(1000)), KVF_OK);
    assert_true(removed > 0);
    assert_true(used(tier) < 40000); /* the table is left */
    tier->ops->close(tier);
}

static void test_what_can_not_fit_is_refused(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier("mem:?max=1M");
    assert_int_equal(kvft_put(tier, 1, SIZE), KVF_WHY_NONE);
    assert_int_equal(kvft_put(tier, 2, 1u << 20), KVF_WHY_FULL);
    assert_int_equal(kvft_put(tier, 3, 2u << 20), KVF_WHY_FULL);
    tier->ops->close(tier);
}

static void test_borrowed_bytes_outlive_eviction(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier("mem:?max=1M");
    kvft_value v;
    kvft_value_init(&v, 1, SIZE);
    assert_int_equal(kvft_put(tier, 1, SIZE), KVF_WHY_NONE);
    kvfi_loan loan;
    assert_int_equal(tier->ops->borrow(tier, &loan, &v.item.addr, 0, KVFI_NEVER), KVF_WHY_NONE);
    for (uint64_t seed = 100; seed < 150; seed++) {
        assert_int_equal(kvft_put(tier, seed, SIZE), KVF_WHY_NONE);
    }
    assert_int_equal(kvft_get(tier, 1, SIZE), KVF_WHY_NONE); /* what is in use is not evicted */
    remove_seed(tier, 1, KVF_OK);
    remove_seed(tier, 1, KVF_MISS);
    assert_int_equal(kvft_get(tier, 1, SIZE), KVF_WHY_ABSENT);
    for (uint64_t seed = 200; seed < 250; seed++) {
        assert_int_equal(kvft_put(tier, seed, SIZE), KVF_WHY_NONE);
        assert_true(used(tier) <= 1u << 20);
    }
    assert_memory_equal(loan.data, v.bytes, v.item.bytes);
    tier->ops->give_back(tier, &loan);
    kvft_value_cleanup(&v);
    tier->ops->close(tier);
}

static void test_all_lent_out_is_full(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier("mem:?max=1M");
    kvfi_loan loans[20];
    size_t num = 0;
    kvf_reason why = KVF_WHY_NONE;
    for (; num < 20; num++) {
        kvfi_addr addr;
        kvft_addr(&addr, num);
        why = kvft_put(tier, num, SIZE);
        if (why != KVF_WHY_NONE) {
            break;
        }
        assert_int_equal(tier->ops->borrow(tier, &loans[num], &addr, 0, KVFI_NEVER), KVF_WHY_NONE);
    }
    assert_int_equal(why, KVF_WHY_FULL);
    tier->ops->give_back(tier, &loans[0]);
    assert_int_equal(kvft_put(tier, 99, SIZE), KVF_WHY_NONE);
    for (size_t i = 1; i < num; i++) {
        tier->ops->give_back(tier, &loans[i]);
    }
    tier->ops->close(tier);
}

/* Another value under the same key replaces it; a borrower of the old one keeps it. */
static void test_another_value_replaces(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier("mem:");
    kvft_value old, new;
    kvft_value_init(&old, 1, SIZE);
    kvft_value_init(&new, 2, SIZE + 1000);
    new.item.addr = old.item.addr;
    kvft_value_seal(&new, 0);
    assert_int_equal(kvft_put(tier, 1, SIZE), KVF_WHY_NONE);
    kvfi_loan before, after;
    assert_int_equal(tier->ops->borrow(tier, &before, &old.item.addr, 0, KVFI_NEVER), KVF_WHY_NONE);
    kvfi_feed feed = {.items = &new.item, .num = 1, .limit = 1, .deadline_us = KVFI_NEVER};
    tier->ops->put(tier, &feed);
    assert_int_equal(new.item.status, KVF_OK);
    assert_int_equal(tier->ops->borrow(tier, &after, &old.item.addr, 0, KVFI_NEVER), KVF_WHY_NONE);
    assert_memory_equal(before.data, old.bytes, old.item.bytes);
    assert_int_equal(after.len, new.item.bytes);
    assert_memory_equal(after.data, new.bytes, new.item.bytes);
    tier->ops->give_back(tier, &before);
    tier->ops->give_back(tier, &after);
    assert_int_equal(kvft_count(tier).records, 1);
    kvft_value_cleanup(&old);
    kvft_value_cleanup(&new);
    tier->ops->close(tier);
}

static int stop_at_once(void *ctx, const kvfi_sight *sight) {
    kvfi_addr addr = *sight->addr;
    kvfi_tier *tier = ctx;
    (void)tier->ops->remove(tier, NULL, &addr, KVFI_NEVER); /* a visitor may call the store */
    return 1;
}

static void test_spaces_are_apart(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier("mem:");
    kvfi_addr addr;
    for (uint64_t seed = 995; seed < 1010; seed++) { /* 5 in one space, 10 in the next */
        assert_int_equal(kvft_put(tier, seed, 100), KVF_WHY_NONE);
    }
    kvft_addr(&addr, 995);
    uint64_t removed = 0;
    assert_int_equal(tier->ops->walk(tier, NULL, &addr.space, false, stop_at_once, tier, KVF_MS(1000)), KVF_OK);
    assert_int_equal(tier->ops->clear(tier, &removed, NULL, &addr.space, KVF_MS(1000)), KVF_OK);
    assert_int_equal(removed, 4);
    assert_int_equal(kvft_count(tier).records, 10);
    tier->ops->close(tier);
}

static void test_wrong_urls_are_refused(void **state) {
    (void)state;
    static const char *const urls[] = {"mem:?max=1", "mem:?maximum=1G", "mem:/folder", "mem://host"};
    for (size_t i = 0; i < sizeof urls / sizeof *urls; i++) {
        kvfi_url *url = NULL;
        kvfi_tier *tier = NULL;
        kvf_error err = {0};
        kvf_status status = kvfi_url_parse(&url, &err, urls[i]);
        if (status == KVF_OK) {
            status = kvfi_mem_open(&tier, &err, url);
        }
        assert_int_equal(status, KVF_CONFIG);
        assert_true(err.what[0] != '\0');
    }
}

/* ---- several threads: never a wrong byte, and the bound holds */

typedef struct crowd {
    kvfi_tier *tier;
    uint64_t seed;
    uint64_t hits;
} crowd;

static void *mingle(void *arg) {
    crowd *c = arg;
    uint64_t random = c->seed;
    for (int i = 0; i < 1500; i++) {
        uint64_t seed = kvft_random(&random) % 40;
        size_t size = seed % 2 == 0 ? SIZE : 3000;
        switch (kvft_random(&random) % 8) {
        case 0:
        case 1:
        case 2:
            kvft_put(c->tier, seed, size);
            break;
        case 3: {
            kvfi_addr addr;
            kvft_addr(&addr, seed);
            (void)c->tier->ops->remove(c->tier, NULL, &addr, KVFI_NEVER);
            break;
        }
        case 4:
            c->hits += kvft_borrow(c->tier, seed, size) == KVF_WHY_NONE;
            break;
        default:
            c->hits += kvft_get(c->tier, seed, size) == KVF_WHY_NONE;
        }
    }
    return NULL;
}

static void test_threads(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier("mem:?max=1M");
    crowd crowds[4];
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++) {
        crowds[i] = (crowd){.tier = tier, .seed = i + 1};
        assert_int_equal(pthread_create(&threads[i], NULL, mingle, &crowds[i]), 0);
    }
    for (int i = 0; i < 200; i++) {
        assert_true(used(tier) <= 1u << 20);
        assert_int_equal(kvft_count(tier).damaged, 0);
    }
    uint64_t hits = 0;
    for (size_t i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        hits += crowds[i].hits;
    }
    assert_true(hits > 0);
    tier->ops->close(tier);
}

/* ---- faults */

static bool scenario(void) {
    kvfi_url *url = NULL;
    kvfi_tier *tier = NULL;
    if (kvfi_url_parse(&url, NULL, "mem:?max=256K") != KVF_OK || kvfi_mem_open(&tier, NULL, url) != KVF_OK) {
        return false;
    }
    for (uint64_t seed = 0; seed < 300; seed++) { /* grows the table */
        (void)kvft_put(tier, seed, 10);
    }
    for (uint64_t seed = 300; seed < 310; seed++) {
        kvf_reason why = kvft_put(tier, seed, SIZE);
        kvf_reason got = kvft_get(tier, seed, SIZE);
        assert_int_equal(got, why == KVF_WHY_NONE ? KVF_WHY_NONE : KVF_WHY_ABSENT);
        (void)kvft_borrow(tier, seed, SIZE);
    }
    kvfi_loan loan;
    kvfi_addr addr;
    kvft_addr(&addr, 309);
    kvf_reason lent = tier->ops->borrow(tier, &loan, &addr, 0, KVFI_NEVER);
    (void)tier->ops->walk(tier, NULL, NULL, true, stop_at_once, tier, KVF_MS(1000));
    uint64_t removed;
    (void)tier->ops->clear(tier, &removed, NULL, NULL, KVF_MS(1000));
    if (lent == KVF_WHY_NONE) {
        tier->ops->give_back(tier, &loan);
    }
    tier->ops->close(tier);
    return true;
}

static void test_faults(void **state) {
    (void)state;
    for (int kind = KVFT_ALLOC; kind <= KVFT_CALL; kind++) {
        uint64_t points = 0;
        for (uint64_t nth = 1;; nth++) {
            kvft_faults_arm((kvft_fault_kind)kind, nth);
            (void)scenario();
            uint64_t live = kvft_faults_live_allocs();
            bool hit = kvft_faults_disarm();
            assert_int_equal(live, 0);
            if (!hit) {
                break;
            }
            points++;
        }
        printf("%llu points\n", (unsigned long long)points);
    }
}

/* Somebody writes over what is lent, or the memory is broken: a miss, and never a hit again. */
static void test_what_is_damaged_goes(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier("mem:");
    kvfi_addr addr;
    kvfi_loan loan;
    kvft_addr(&addr, 1);
    assert_int_equal(kvft_put(tier, 1, SIZE), KVF_WHY_NONE);
    assert_int_equal(kvft_put(tier, 2, SIZE), KVF_WHY_NONE);
    assert_int_equal(tier->ops->borrow(tier, &loan, &addr, SIZE + KVFT_VALUE_EXTRA, KVFI_NEVER), KVF_WHY_NONE);
    ((uint8_t *)(uintptr_t)loan.data)[loan.len / 2] ^= 1;
    tier->ops->give_back(tier, &loan);
    assert_int_equal(kvft_get(tier, 1, SIZE), KVF_WHY_CHECKSUM);
    assert_int_equal(kvft_get(tier, 1, SIZE), KVF_WHY_ABSENT);
    assert_int_equal(kvft_get(tier, 2, SIZE), KVF_WHY_NONE);
    assert_int_equal(kvft_put(tier, 1, SIZE), KVF_WHY_NONE);
    assert_int_equal(kvft_get(tier, 1, SIZE), KVF_WHY_NONE);
    tier->ops->close(tier);
}

static void take_finding(void *ctx, const kvf_finding *finding) {
    assert_int_equal(finding->severity, KVF_FINE);
    assert_string_equal(finding->code, "memory");
    snprintf(ctx, 200, "%s", finding->what);
}

static void test_what_the_doctor_says(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier("mem:?max=64M");
    char what[200] = "";
    kvf_tier_info info = {.struct_size = sizeof info};
    assert_int_equal(kvft_put(tier, 1, 3 << 20), KVF_WHY_NONE);
    tier->ops->doctor(tier, take_finding, what);
    assert_non_null(strstr(what, " 1 records, 3.0 of at most 64.0 MiB"));
    tier->ops->info(tier, &info);
    assert_string_equal(info.url, "mem:?max=64M");
    assert_int_equal(info.reachable, 1);
    assert_int_equal(info.num_records, 1);
    assert_int_equal(info.max_bytes, 64 << 20);
    assert_in_range(info.used_bytes, 3 << 20, (3 << 20) + 65536);
    tier->ops->close(tier);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_put_is_got),
        cmocka_unit_test(test_the_bound_holds_and_the_oldest_goes),
        cmocka_unit_test(test_touch_and_remove),
        cmocka_unit_test(test_a_full_piece_costs_no_more),
        cmocka_unit_test(test_mixed_sizes_stay_within_the_bound),
        cmocka_unit_test(test_what_can_not_fit_is_refused),
        cmocka_unit_test(test_borrowed_bytes_outlive_eviction),
        cmocka_unit_test(test_all_lent_out_is_full),
        cmocka_unit_test(test_another_value_replaces),
        cmocka_unit_test(test_spaces_are_apart),
        cmocka_unit_test(test_wrong_urls_are_refused),
        cmocka_unit_test(test_what_is_damaged_goes),
        cmocka_unit_test(test_what_the_doctor_says),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_faults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
