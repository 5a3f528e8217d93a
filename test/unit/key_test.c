/* SPDX-License-Identifier: Apache-2.0
 *
 * Names of keys in Redis, the slot of all parts of a value, and their time to live (redis/cluster/key.h).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "redis/cluster/key.h"
#include "support/tiers.h"

static void test_names_are_read_back(void **state) {
    (void)state;
    static const uint64_t parts[] = {0, 1, 9, 10, UINT32_MAX};
    for (uint64_t seed = 0; seed < 20; seed++) {
        kvfi_addr addr, read = {.key = {{0}}};
        kvft_addr(&addr, seed);
        for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
            kvfi_name name;
            uint64_t part = 77;
            kvfi_name_of(&name, "kvf1", &addr, parts[i]);
            assert_int_equal(name.len, strlen(name.text));
            assert_true(kvfi_name_parse(&read, &part, "kvf1", name.text, name.len));
            assert_int_equal(part, parts[i]);
            assert_memory_equal(read.space.bytes, addr.space.bytes, 8);
            assert_memory_equal(&read.key, &addr.key, sizeof addr.key);
            assert_false(kvfi_name_parse(&read, &part, "kvf2", name.text, name.len));
            assert_false(kvfi_name_parse(&read, &part, "kvf", name.text, name.len));
        }
    }
}

/* A name with any one character changed, left out or added is another key's, or none of ours. */
static void test_what_is_no_name(void **state) {
    (void)state;
    kvfi_addr addr, read;
    kvfi_name name;
    uint64_t part = 0;
    kvft_addr(&addr, 1);
    kvfi_name_of(&name, "kvf1", &addr, 0);
    for (size_t i = 0; i < name.len; i++) {
        kvfi_name changed = name;
        changed.text[i] = 'x';
        assert_false(kvfi_name_parse(&read, &part, "kvf1", changed.text, changed.len));
        assert_false(kvfi_name_parse(&read, &part, "kvf1", name.text, i));
    }
    static const char *const ends[] = {":", ":0", ":x", ":-1", ":4294967296", ":1:", "x", "}"};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        kvfi_name longer = name;
        size_t len = strlen(ends[i]);
        memcpy(longer.text + name.len, ends[i], len + 1);
        assert_false(kvfi_name_parse(&read, &part, "kvf1", longer.text, name.len + len));
    }
}

/* A tenth more or less than asked for, evenly, by the last two bytes of the key. */
static void test_how_long_keys_live(void **state) {
    (void)state;
    kvfi_addr addr;
    kvft_addr(&addr, 3);
    static const struct {
        uint8_t high, low;
        uint64_t ms;
    } rows[] = {{0, 0, 900000}, {0xff, 0xff, 1100000}, {0x80, 0, 1000001}, {0, 0xff, 900778}, {0xff, 0, 1099221}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        addr.key.bytes[30] = rows[i].high;
        addr.key.bytes[31] = rows[i].low;
        assert_int_equal(kvfi_ttl_ms(1000, &addr), rows[i].ms);
        assert_int_equal(kvfi_ttl_ms(0, &addr), 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names_are_read_back),
        cmocka_unit_test(test_what_is_no_name),
        cmocka_unit_test(test_how_long_keys_live),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
