/* SPDX-License-Identifier: Apache-2.0
 *
 * Why a prompt is not in the store, explained from earlier prompts (src/plan/earlier.c).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/sys.h"
#include "kvferry/earlier.h"
#include "support/kit.h"

#define NUM   200u
#define BLOCK 64u
#define UNDER 7u

/* Two texts of different `seed` differ from `same` on. */
static void text(uint32_t out[NUM], size_t same, uint32_t seed) {
    for (size_t i = 0; i < NUM; i++) {
        out[i] = (uint32_t)i + (i < same ? 0 : 1000 * seed);
    }
}

static void expect(const kvf_earlier *e, const uint32_t *tokens, size_t num, size_t found, kvf_absence why, size_t at) {
    size_t seen = 0;
    assert_string_equal(kvf_absence_name(kvf_earlier_explain(e, &seen, UNDER, tokens, num, found, BLOCK)),
                        kvf_absence_name(why));
    assert_int_equal(seen, at);
}

static kvf_earlier *open_earlier(void) {
    kvf_earlier *e = NULL;
    assert_int_equal(kvf_earlier_open(&e, NULL), KVF_OK);
    return e;
}

static void test_without_memory_nothing_is_remembered(void **state) {
    (void)state;
    const uint32_t tokens[] = {1, 2, 3};
    kvf_earlier_keep(NULL, UNDER, tokens, 3);
    expect(NULL, tokens, 3, 0, KVF_ABSENCE_UNKNOWN, 0);
    kvf_earlier_close(NULL);
}

static void *no_room(size_t bytes) {
    (void)bytes;
    return NULL;
}

static void *no_more_room(void *old, size_t bytes) {
    (void)old, (void)bytes;
    return NULL;
}

static void test_memory_that_runs_out(void **state) {
    (void)state;
    kvf_earlier *e = open_earlier(), *none = e;
    const uint32_t tokens[] = {1, 2, 3, 4};
    kvf_error err = {0};
    kvfi_systable table = kvfi_sys_real;
    kvf_earlier_keep(e, UNDER, tokens, 2);
    table.alloc = no_room;
    table.resize = no_more_room;
    kvfi_sys_table = &table;
    assert_int_equal(kvf_earlier_open(&none, &err), KVF_NOMEM);
    assert_null(none);
    kvf_earlier_keep(e, UNDER, tokens, 4);
    kvfi_sys_table = &kvfi_sys_real;
    expect(e, tokens, 4, 0, KVF_ABSENCE_ENDS, 2); /* the earlier texts stay */
    kvf_earlier_close(e);
}

static void test_each_cause_is_told(void **state) {
    (void)state;
    kvf_earlier *e = open_earlier();
    uint32_t first[NUM], second[NUM];
    text(first, 0, 1);
    text(second, 0, 1);
    expect(e, first, NUM, 0, KVF_ABSENCE_UNKNOWN, 0);
    kvf_earlier_keep(e, UNDER, first, 150);
    second[100]++;
    expect(e, second, NUM, 64, KVF_ABSENCE_DIFFERS, 100);
    expect(e, second, NUM, 0, KVF_ABSENCE_EVICTED, 100);   /* the first block was there once */
    expect(e, second, NUM, 128, KVF_ABSENCE_UNKNOWN, 100); /* somebody else stored more than is remembered here */
    expect(e, first, NUM, 128, KVF_ABSENCE_ENDS, 150);
    second[0]++;
    expect(e, second, NUM, 0, KVF_ABSENCE_UNKNOWN, 0);
    kvf_earlier_close(e);
}

static void test_the_text_that_shares_the_most_counts(void **state) {
    (void)state;
    kvf_earlier *e = open_earlier();
    uint32_t tokens[NUM];
    for (uint32_t seed = 1; seed <= 3; seed++) {
        text(tokens, 30 * (size_t)seed, seed);
        kvf_earlier_keep(e, UNDER, tokens, NUM);
    }
    text(tokens, NUM, 0);
    expect(e, tokens, NUM, 64, KVF_ABSENCE_DIFFERS, 90);
    kvf_earlier_close(e);
}

/* Turns of one conversation take one place; of others, the one that was seen longest ago makes room. */
static void test_places_are_bounded(void **state) {
    (void)state;
    kvf_earlier *e = open_earlier();
    uint32_t chat[NUM], tokens[NUM];
    text(chat, NUM, 0);
    for (size_t num = 10; num <= NUM; num += 10) {
        kvf_earlier_keep(e, UNDER, chat, num);
    }
    kvf_earlier_keep(e, UNDER, chat, 50); /* a shorter one does not make it forget */
    expect(e, chat, NUM, 192, KVF_ABSENCE_ENDS, NUM);
    for (uint32_t seed = 1; seed < (uint32_t)KVF_EARLIER_TEXTS; seed++) {
        text(tokens, 5, seed);
        kvf_earlier_keep(e, UNDER, tokens, NUM);
    }
    expect(e, chat, NUM, 192, KVF_ABSENCE_ENDS, NUM);
    text(tokens, 5, 99);
    kvf_earlier_keep(e, UNDER, tokens, NUM);
    expect(e, chat, NUM, 0, KVF_ABSENCE_DIFFERS, 5);
    kvf_earlier_close(e);
}

/* What one identity has stored says nothing of another, and takes no place from it. */
static void test_other_identities_are_apart(void **state) {
    (void)state;
    kvf_earlier *e = open_earlier();
    uint32_t tokens[NUM];
    text(tokens, NUM, 0);
    kvf_earlier_keep(e, UNDER + 1, tokens, NUM);
    expect(e, tokens, NUM, 0, KVF_ABSENCE_UNKNOWN, 0);
    kvf_earlier_keep(e, UNDER, tokens, 100);
    kvf_earlier_keep(e, UNDER + 1, tokens, NUM);
    expect(e, tokens, NUM, 64, KVF_ABSENCE_ENDS, 100);
    kvf_earlier_close(e);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_without_memory_nothing_is_remembered),
        cmocka_unit_test(test_memory_that_runs_out),
        cmocka_unit_test(test_each_cause_is_told),
        cmocka_unit_test(test_the_text_that_shares_the_most_counts),
        cmocka_unit_test(test_places_are_bounded),
        cmocka_unit_test(test_other_identities_are_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
