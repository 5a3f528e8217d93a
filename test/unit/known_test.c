/* SPDX-License-Identifier: Apache-2.0
 *
 * What a store remembers of its keys: the tiers that have them, the misses, for how long, and which are dropped.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/sys.h"
#include "store/known.h"

static kvfi_known known;
static kvfi_systable table;
static int64_t now;

static int64_t standing_clock(void) {
    return now;
}

static int set_up(void **state) {
    (void)state;
    now = 5000000;
    table = kvfi_sys_real;
    table.now_us = standing_clock;
    kvfi_sys_table = &table;
    return kvfi_known_init(&known) ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    kvfi_known_cleanup(&known);
    assert_null(known.entries);
    kvfi_known_cleanup(&known); /* of the zero state */
    kvfi_sys_table = &kvfi_sys_real;
    return 0;
}

/* Keys of one set are told apart by their first bytes. */
static kvf_key key_of(uint8_t set, uint8_t tag) {
    kvf_key key = {{tag, 1}};
    key.bytes[8] = set;
    return key;
}

static void tiers_add_up(void **state) {
    (void)state;
    kvf_key a = key_of(1, 1), b = key_of(1, 2), c = key_of(2, 1);
    assert_int_equal(kvfi_known_tiers(&known, &a), 0);
    kvfi_known_add(&known, &a, 1);
    kvfi_known_add(&known, &b, 4);
    kvfi_known_add(&known, &a, 2);
    assert_int_equal(kvfi_known_tiers(&known, &a), 3);
    assert_int_equal(kvfi_known_tiers(&known, &b), 4);
    assert_int_equal(kvfi_known_tiers(&known, &c), 0);
    kvfi_known_forget(&known, &c); /* nothing to forget */
    kvfi_known_forget(&known, &a);
    assert_int_equal(kvfi_known_tiers(&known, &a), 0);
    assert_int_equal(kvfi_known_tiers(&known, &b), 4);
    kvfi_known_add(&known, &a, 8);
    assert_int_equal(kvfi_known_tiers(&known, &a), 8);
    kvfi_known_clear(&known);
    assert_int_equal(kvfi_known_tiers(&known, &a), 0);
    assert_int_equal(kvfi_known_tiers(&known, &b), 0);
}

static void misses_are_remembered(void **state) {
    (void)state;
    kvf_key a = key_of(1, 1), b = key_of(1, 2);
    assert_false(kvfi_known_missed(&known, &a));
    kvfi_known_add_missed(&known, &a);
    kvfi_known_add(&known, &b, 1);
    assert_true(kvfi_known_missed(&known, &a));
    assert_false(kvfi_known_missed(&known, &b));
    assert_int_equal(kvfi_known_tiers(&known, &a), 0);
    kvfi_known_add_missed(&known, &b); /* it was there */
    assert_true(kvfi_known_missed(&known, &b));
    assert_int_equal(kvfi_known_tiers(&known, &b), 0);
    kvfi_known_add(&known, &a, 2); /* and is again */
    assert_false(kvfi_known_missed(&known, &a));
    assert_int_equal(kvfi_known_tiers(&known, &a), 2);
    kvfi_known_forget(&known, &b);
    assert_false(kvfi_known_missed(&known, &b));
}

/* A doubt is one until the block is written again, or time has passed: no header, and no miss, is an answer to it. */
static void doubts_last(void **state) {
    (void)state;
    kvf_key a = key_of(1, 1), b = key_of(1, 2), c = key_of(3, 1), never = key_of(4, 1);
    kvfi_known_add(&known, &a, 3);
    kvfi_known_add(&known, &b, 1);
    kvfi_known_see(&known, &c, 1);
    assert_int_equal(kvfi_known_tiers(&known, &c), 1);
    kvfi_known_doubt(&known, &a);
    assert_true(kvfi_known_doubted(&known, &a) && kvfi_known_missed(&known, &a));
    assert_false(kvfi_known_doubted(&known, &b));
    assert_int_equal(kvfi_known_tiers(&known, &a), 0);
    assert_int_equal(kvfi_known_tiers(&known, &b), 1);
    kvfi_known_see(&known, &a, 1);
    kvfi_known_add_missed(&known, &a);
    assert_true(kvfi_known_doubted(&known, &a));
    assert_int_equal(kvfi_known_tiers(&known, &a), 0);
    kvfi_known_add(&known, &a, 2);
    assert_false(kvfi_known_doubted(&known, &a));
    assert_int_equal(kvfi_known_tiers(&known, &a), 2);
    kvfi_known_doubt_all(&known);
    assert_true(kvfi_known_doubted(&known, &a) && kvfi_known_doubted(&known, &b) && kvfi_known_doubted(&known, &c));
    assert_false(kvfi_known_doubted(&known, &never));
    assert_false(kvfi_known_missed(&known, &never));
    now += (int64_t)KVFI_KNOWN_FOR_S * 1000000;
    assert_false(kvfi_known_doubted(&known, &b));
    kvfi_known_see(&known, &b, 1);
    assert_int_equal(kvfi_known_tiers(&known, &b), 1);
    kvfi_known_add_missed(&known, &c);
    assert_false(kvfi_known_doubted(&known, &c));
}

static void it_lasts_so_long(void **state) {
    (void)state;
    kvf_key a = key_of(1, 1), b = key_of(1, 2);
    kvfi_known_add(&known, &a, 1);
    kvfi_known_add_missed(&known, &b);
    now += (int64_t)(KVFI_KNOWN_FOR_S - 1) * 1000000;
    assert_int_equal(kvfi_known_tiers(&known, &a), 1);
    assert_true(kvfi_known_missed(&known, &b));
    now += 1000000;
    assert_int_equal(kvfi_known_tiers(&known, &a), 0);
    assert_false(kvfi_known_missed(&known, &b));
    kvfi_known_add(&known, &a, 2); /* keys that became known too long ago no longer count */
    assert_int_equal(kvfi_known_tiers(&known, &a), 2);
}

/* A set that is full drops what was seen longest ago, and the other sets nothing. */
static void the_oldest_is_dropped(void **state) {
    (void)state;
    kvf_key other = key_of(9, 1);
    kvfi_known_add(&known, &other, 1);
    for (uint8_t i = 0; i < KVFI_KNOWN_WAYS; i++) {
        kvf_key key = key_of(1, i);
        now += 1000000;
        kvfi_known_add(&known, &key, 1);
    }
    kvf_key first = key_of(1, 0), second = key_of(1, 1), late = key_of(1, 200), missed = key_of(1, 201);
    now += 1000000;
    kvfi_known_add(&known, &first, 1); /* seen again: the second is the oldest now */
    now += 1000000;
    kvfi_known_add(&known, &late, 1);
    assert_int_equal(kvfi_known_tiers(&known, &second), 0);
    assert_int_equal(kvfi_known_tiers(&known, &late), 1);
    assert_int_equal(kvfi_known_tiers(&known, &first), 1);
    kvfi_known_add_missed(&known, &missed);
    kvf_key third = key_of(1, 2);
    assert_int_equal(kvfi_known_tiers(&known, &third), 0);
    assert_true(kvfi_known_missed(&known, &missed));
    for (uint8_t i = 3; i < KVFI_KNOWN_WAYS; i++) {
        kvf_key key = key_of(1, i);
        assert_int_equal(kvfi_known_tiers(&known, &key), 1);
    }
    assert_int_equal(kvfi_known_tiers(&known, &other), 1);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {TEST(tiers_add_up), TEST(misses_are_remembered), TEST(doubts_last),
                                       TEST(it_lasts_so_long), TEST(the_oldest_is_dropped)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
