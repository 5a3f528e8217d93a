/* SPDX-License-Identifier: Apache-2.0
 *
 * Why a prompt is not in the store, explained from earlier prompts (engines/llama/tell/earlier.c).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "llama/tell/earlier.h"
#include "support/kit.h"

#define NUM   200u
#define BLOCK 64u
#define UNDER 7u

/* Two texts of different `seed` differ from `same` on. */
static void text(int32_t out[NUM], size_t same, int32_t seed) {
    for (size_t i = 0; i < NUM; i++) {
        out[i] = (int32_t)i + (i < same ? 0 : 1000 * seed);
    }
}

static void expect(const kvfl_earlier *e, const int32_t *tokens, size_t num, size_t found, kvfl_absence why,
                   size_t at) {
    size_t seen = 0;
    assert_string_equal(kvfl_absence_name(kvfl_earlier_explain(e, &seen, UNDER, tokens, num, found, BLOCK)),
                        kvfl_absence_name(why));
    assert_int_equal(seen, at);
}

static void test_each_cause_is_told(void **state) {
    (void)state;
    kvfl_earlier e = {.clock = 0};
    int32_t first[NUM], second[NUM];
    text(first, 0, 1);
    text(second, 0, 1);
    expect(&e, first, NUM, 0, KVFL_ABSENT, 0);
    kvfl_earlier_keep(&e, UNDER, first, 150);
    second[100]++;
    expect(&e, second, NUM, 64, KVFL_DIFFERS, 100);
    expect(&e, second, NUM, 0, KVFL_EVICTED, 100);  /* the first block was there once */
    expect(&e, second, NUM, 128, KVFL_ABSENT, 100); /* somebody else stored more than is remembered here */
    expect(&e, first, NUM, 128, KVFL_ENDS, 150);
    second[0]++;
    expect(&e, second, NUM, 0, KVFL_ABSENT, 0);
    kvfl_earlier_free(&e);
}

static void test_the_text_that_shares_the_most_counts(void **state) {
    (void)state;
    kvfl_earlier e = {.clock = 0};
    int32_t tokens[NUM];
    for (int32_t seed = 1; seed <= 3; seed++) {
        text(tokens, 30 * (size_t)seed, seed);
        kvfl_earlier_keep(&e, UNDER, tokens, NUM);
    }
    text(tokens, NUM, 0);
    expect(&e, tokens, NUM, 64, KVFL_DIFFERS, 90);
    kvfl_earlier_free(&e);
}

/* Turns of one conversation take one place; of others, the one that was seen longest ago makes room. */
static void test_places_are_bounded(void **state) {
    (void)state;
    kvfl_earlier e = {.clock = 0};
    int32_t chat[NUM], tokens[NUM];
    text(chat, NUM, 0);
    for (size_t num = 10; num <= NUM; num += 10) {
        kvfl_earlier_keep(&e, UNDER, chat, num);
    }
    kvfl_earlier_keep(&e, UNDER, chat, 50); /* a shorter one does not make it forget */
    expect(&e, chat, NUM, 192, KVFL_ENDS, NUM);
    for (int32_t seed = 1; seed < (int32_t)KVFL_EARLIER_TEXTS; seed++) {
        text(tokens, 5, seed);
        kvfl_earlier_keep(&e, UNDER, tokens, NUM);
    }
    expect(&e, chat, NUM, 192, KVFL_ENDS, NUM);
    text(tokens, 5, 99);
    kvfl_earlier_keep(&e, UNDER, tokens, NUM);
    expect(&e, chat, NUM, 0, KVFL_DIFFERS, 5);
    kvfl_earlier_free(&e);
}

/* What one identity has stored says nothing of another, and takes no place from it. */
static void test_other_identities_are_apart(void **state) {
    (void)state;
    kvfl_earlier e = {.clock = 0};
    int32_t tokens[NUM];
    text(tokens, NUM, 0);
    kvfl_earlier_keep(&e, UNDER + 1, tokens, NUM);
    expect(&e, tokens, NUM, 0, KVFL_ABSENT, 0);
    kvfl_earlier_keep(&e, UNDER, tokens, 100);
    kvfl_earlier_keep(&e, UNDER + 1, tokens, NUM);
    expect(&e, tokens, NUM, 64, KVFL_ENDS, 100);
    kvfl_earlier_free(&e);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_cause_is_told),
        cmocka_unit_test(test_the_text_that_shares_the_most_counts),
        cmocka_unit_test(test_places_are_bounded),
        cmocka_unit_test(test_other_identities_are_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
