/* SPDX-License-Identifier: Apache-2.0
 *
 * How fast a store is, as it measures itself: the meter in invented time, and kvf_store_link of real tiers.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "store/store.h"
#include "support/kit.h"
#include "tier/meter.h"

#define MS 1000

static int64_t clock_us;

static int64_t tell_time(void) {
    return clock_us;
}

static kvfi_systable table;

static int stop_the_clock(void **state) {
    (void)state;
    table = kvfi_sys_real;
    table.now_us = tell_time;
    kvfi_sys_table = &table;
    clock_us = 1000 * MS;
    return 0;
}

static int let_it_run(void **state) {
    (void)state;
    kvfi_sys_table = &kvfi_sys_real;
    return 0;
}

/* `num` times `bytes`, each after `us`. */
static void arrive(kvfi_meter *meter, int num, size_t bytes, int64_t us) {
    for (int i = 0; i < num; i++) {
        clock_us += us;
        kvfi_meter_moved(meter, bytes);
    }
}

static void near(double value, double wanted) {
    assert_true(value > wanted * 0.98 && value < wanted * 1.02);
}

static void test_only_time_under_way_counts(void **state) {
    (void)state;
    kvfi_meter meter = {.active = 0};
    kvfi_meter_init(&meter);
    assert_true(kvfi_meter_tell(&meter).bytes_per_s == 0);
    for (int i = 0; i < 3; i++) {
        kvfi_meter_begin(&meter);
        arrive(&meter, 10, 100000, MS); /* 100 MB/s */
        clock_us += 5 * MS;             /* the last answer is a miss, or the caller is slow */
        kvfi_meter_end(&meter, false);
        clock_us += 500 * MS; /* nobody loads */
        near(kvfi_meter_tell(&meter).bytes_per_s, 100e6);
    }
    assert_int_equal(kvfi_meter_tell(&meter).silent, 0);
    clock_us += KVFI_LINK_FRESH_US;
    assert_true(kvfi_meter_tell(&meter).bytes_per_s == 0);
    kvfi_meter_cleanup(&meter);
}

static void test_the_first_byte_takes_a_round_trip(void **state) {
    (void)state;
    kvfi_meter meter = {.active = 0};
    kvfi_meter_init(&meter);
    kvfi_meter_note_round_trip(&meter, 30 * MS);
    assert_int_equal(kvfi_meter_tell(&meter).round_trip_us, 30 * MS);
    for (int i = 0; i < 20; i++) {
        kvfi_meter_begin(&meter);
        clock_us += 30 * MS;
        arrive(&meter, 10, 100000, MS);
        kvfi_meter_end(&meter, false);
    }
    near(kvfi_meter_tell(&meter).bytes_per_s, 100e6);
    kvfi_meter_begin(&meter); /* sooner than that, once */
    arrive(&meter, 10, 100000, MS);
    kvfi_meter_end(&meter, false);
    assert_true(kvfi_meter_tell(&meter).bytes_per_s > 100e6);
    kvfi_meter_cleanup(&meter);
}

static void test_two_loads_at_once_are_one_rate(void **state) {
    (void)state;
    kvfi_meter meter = {.active = 0};
    kvfi_meter_init(&meter);
    kvfi_meter_begin(&meter);
    kvfi_meter_begin(&meter);
    arrive(&meter, 20, 100000, MS);
    kvfi_meter_end(&meter, false);
    arrive(&meter, 20, 100000, MS);
    near(kvfi_meter_tell(&meter).bytes_per_s, 100e6); /* asked in the middle */
    kvfi_meter_end(&meter, false);
    near(kvfi_meter_tell(&meter).bytes_per_s, 100e6);
    kvfi_meter_cleanup(&meter);
}

static void test_a_standstill_is_seen_by_whoever_looks_and_at_the_end(void **state) {
    (void)state;
    kvfi_meter meter = {.active = 0};
    kvfi_meter_init(&meter);
    kvfi_meter_begin(&meter);
    clock_us += 39 * MS;
    assert_int_equal(kvfi_meter_tell(&meter).silent, 0);
    clock_us += 2 * MS;
    assert_int_equal(kvfi_meter_tell(&meter).silent, 1);
    kvfi_meter_end(&meter, true);
    kvfi_meter other = {.active = 0};
    kvfi_meter_init(&other);
    kvfi_meter_begin(&other);
    clock_us += 250 * MS;
    kvfi_meter_end(&other, true); /* its deadline came */
    assert_int_equal(kvfi_meter_tell(&other).silent, 1);
    kvfi_meter absent = {.active = 0};
    kvfi_meter_init(&absent);
    kvfi_meter_begin(&absent);
    clock_us += 250 * MS;
    kvfi_meter_end(&absent, false); /* it was answered, with nothing */
    assert_int_equal(kvfi_meter_tell(&absent).silent, 0);
    kvfi_meter_cleanup(&meter);
    kvfi_meter_cleanup(&other);
    kvfi_meter_cleanup(&absent);
}

/* ---- real tiers ---- */

static void test_loads_and_lookups_measure_their_tier(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[300];
    snprintf(url, sizeof url, "file:%s", dir);
    kvf_store *store = kvft_store2("mem:", url);
    kvf_space *space = kvft_space(store, "link", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 1, 8, 1 << 20);
    kvf_link link;
    assert_int_equal(kvf_store_link(store, 0, &link), KVF_OK);
    assert_true(link.bytes_per_s == 0 && link.round_trip_us == 0 && link.silent == 0);
    kvft_save_all(space, store, prompt);
    size_t run = 0;
    assert_int_equal(kvf_match(space, &run, NULL, &prompt->blocks[0].key, 1, KVF_DEFAULT), KVF_OK);
    assert_int_equal(kvf_store_link(store, 0, &link), KVF_OK);
    assert_true(link.round_trip_us > 0);
    assert_true(link.bytes_per_s == 0); /* a lookup moves next to nothing */
    kvft_prompt_poison(prompt);
    assert_int_equal(kvf_load(space, prompt->blocks, 8, NULL, KVF_DEFAULT), 8);
    assert_int_equal(kvf_store_link(store, 0, &link), KVF_OK);
    assert_true(link.bytes_per_s > 0);
    assert_int_equal(kvf_store_link(store, 1, &link), KVF_OK);
    assert_true(link.bytes_per_s == 0); /* nothing came from there */
    assert_int_equal(kvf_store_link(store, UINT32_MAX, &link), KVF_OK);
    assert_true(link.bytes_per_s == 0);
    kvf_space_close(space);
    kvf_store_close(store);
    kvft_prompt_free(prompt);
    store = kvft_store(url);
    space = kvft_space(store, "link", 16);
    prompt = kvft_prompt_new(space, 1, 8, 1 << 20);
    assert_int_equal(kvf_load(space, prompt->blocks, 8, NULL, KVF_DEFAULT), 8);
    assert_int_equal(kvf_store_link(store, UINT32_MAX, &link), KVF_OK);
    assert_true(link.bytes_per_s > 0);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
    kvft_remove_dir(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_only_time_under_way_counts, stop_the_clock, let_it_run),
        cmocka_unit_test_setup_teardown(test_the_first_byte_takes_a_round_trip, stop_the_clock, let_it_run),
        cmocka_unit_test_setup_teardown(test_two_loads_at_once_are_one_rate, stop_the_clock, let_it_run),
        cmocka_unit_test_setup_teardown(test_a_standstill_is_seen_by_whoever_looks_and_at_the_end, stop_the_clock,
                                        let_it_run),
        cmocka_unit_test(test_loads_and_lookups_measure_their_tier),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
