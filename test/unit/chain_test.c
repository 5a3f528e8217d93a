/* SPDX-License-Identifier: Apache-2.0
 *
 * Chains of block keys: the golden vectors, and which changes of a prompt change a key.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "record/record.h"
#include "record/space.h"
#include "support/golden.h"

static void open_identity(kvfi_identity *out, const char *secret) {
    const kvf_field fields[] = KVFT_GOLDEN_FIELDS;
    kvf_space_options options = {.struct_size = sizeof options, .block_tokens = 16, .secret = secret};
    options.secret_len = secret == NULL ? 0 : strlen(secret);
    assert_int_equal(kvfi_identity_init(out, NULL, fields, 4, &options), KVF_OK);
}

static void expect_at(const kvfi_identity *identity, const char *what, const char *kind, const kvf_key *key) {
    char name[32];
    uint8_t golden[32];
    kvfi_addr at;
    snprintf(name, sizeof name, "%s %s", what, kind);
    kvft_golden_vector(name, golden);
    kvfi_address(&at, identity, key);
    assert_memory_equal(at.key.bytes, golden, 32);
}

static void check_golden(const char *secret, const char *kind, const char *const names[2]) {
    kvfi_identity identity;
    uint32_t tokens[40];
    kvf_key keys[3], other;
    uint8_t golden[32];
    kvft_golden_tokens(tokens);
    open_identity(&identity, secret);
    memset(keys, 0xee, sizeof keys);
    assert_int_equal(kvfi_chain(&identity, keys, 3, tokens, 40, NULL), 2); /* the rest of 8 tokens is no block */
    for (int i = 0; i < 2; i++) {
        kvfi_addr addr;
        kvft_golden_vector(names[i], golden);
        kvfi_address(&addr, &identity, &keys[i]);
        assert_memory_equal(addr.key.bytes, golden, 32);
        assert_memory_equal(&addr.space, &identity.digest, sizeof addr.space);
    }
    assert_int_equal(keys[2].bytes[0], 0xee);
    kvfi_key_of(&identity, &other, "an engine's own hash", 20);
    expect_at(&identity, "key_of", kind, &other);
    kvfi_tail_key(&identity, &other, &keys[1], tokens + 32, 8);
    expect_at(&identity, "tail", kind, &other);
    kvfi_state_key(&identity, &other, &other); /* in place */
    expect_at(&identity, "state", kind, &other);
    other = keys[1];
    kvfi_apart_key(&identity, &other, &other, "as it is", 9);
    expect_at(&identity, "apart", kind, &other);
    kvfi_salt_key(&identity, &other, NULL, "cache salt", 10);
    expect_at(&identity, "salt", kind, &other);
    assert_int_equal(kvfi_chain(&identity, &other, 1, tokens, 40, &other), 1); /* in place */
    expect_at(&identity, "salted", kind, &other);
    kvfi_identity_cleanup(&identity);
}

static void golden(void **state) {
    (void)state;
    check_golden(NULL, "plain", (const char *const[2]){"chain plain 0", "chain plain 1"});
    check_golden(KVFT_GOLDEN_SECRET, "keyed", (const char *const[2]){"chain keyed 0", "chain keyed 1"});
}

static void cap_and_short_prompts(void **state) {
    (void)state;
    kvfi_identity identity;
    uint32_t tokens[40];
    kvf_key keys[2], one;
    kvft_golden_tokens(tokens);
    open_identity(&identity, NULL);
    assert_int_equal(kvfi_chain(&identity, keys, 2, tokens, 0, NULL), 0);
    assert_int_equal(kvfi_chain(&identity, keys, 2, tokens, 15, NULL), 0);
    assert_int_equal(kvfi_chain(&identity, keys, 0, tokens, 40, NULL), 0);
    assert_int_equal(kvfi_chain(&identity, &one, 1, tokens, 40, NULL), 1);
    assert_int_equal(kvfi_chain(&identity, keys, 2, tokens, 32, NULL), 2);
    assert_memory_equal(&one, keys, 32); /* a longer prompt has the same first keys */
    kvfi_identity_cleanup(&identity);
}

static void a_key_names_the_whole_prefix(void **state) {
    (void)state;
    kvfi_identity identity;
    uint32_t tokens[64] = {0};
    kvf_key before[4], after[4];
    open_identity(&identity, NULL);
    kvfi_chain(&identity, before, 4, tokens, 64, NULL);
    for (size_t change = 0; change < 64; change++) {
        tokens[change] ^= 0x80000000u;
        kvfi_chain(&identity, after, 4, tokens, 64, NULL);
        tokens[change] ^= 0x80000000u;
        for (size_t i = 0; i < 4; i++) {
            bool same = memcmp(&before[i], &after[i], 32) == 0;
            assert_int_equal(same, i < change / 16);
        }
    }
    /* Equal blocks at different places have different keys. */
    assert_memory_not_equal(&before[0], &before[1], 32);
    kvfi_identity_cleanup(&identity);
}

/* A prompt chained in two steps, at each of its blocks, has the keys of one step. */
static void a_chain_continues(void **state) {
    (void)state;
    kvfi_identity identity;
    uint32_t tokens[40];
    kvf_key whole[2], parts[2];
    kvft_golden_tokens(tokens);
    open_identity(&identity, NULL);
    assert_int_equal(kvfi_chain(&identity, whole, 2, tokens, 40, NULL), 2);
    for (size_t at = 0; at <= 2; at++) {
        memset(parts, 0, sizeof parts);
        kvfi_chain(&identity, parts, at, tokens, 40, NULL);
        assert_int_equal(
            kvfi_chain(&identity, parts + at, 2, tokens + 16 * at, 40 - 16 * at, at > 0 ? &parts[at - 1] : NULL),
            2 - at);
        assert_memory_equal(parts, whole, sizeof whole);
    }
    kvfi_identity_cleanup(&identity);
}

/* Blocks before a salt keep their keys; all behind it differ from those of other salts, of none, and of another
 * order. */
static void a_salt_separates(void **state) {
    (void)state;
    static const char *const salts[] = {"", "a", "b", "ab", "a\0"};
    kvfi_identity identity;
    uint32_t tokens[40];
    kvf_key keys[8], link, plain[2];
    size_t num = 0;
    kvft_golden_tokens(tokens);
    open_identity(&identity, NULL);
    kvfi_chain(&identity, plain, 2, tokens, 40, NULL);
    keys[num++] = plain[1];
    for (size_t i = 0; i < sizeof salts / sizeof *salts; i++) {
        kvfi_salt_key(&identity, &link, &plain[0], salts[i], i == 4 ? 2 : strlen(salts[i]));
        kvfi_chain(&identity, &keys[num++], 1, tokens + 16, 16, &link);
    }
    kvfi_salt_key(&identity, &link, &plain[0], "a", 1);
    kvfi_salt_key(&identity, &link, &link, "b", 1);
    kvfi_chain(&identity, &keys[num++], 1, tokens + 16, 16, &link);
    kvfi_salt_key(&identity, &link, &plain[0], "b", 1);
    kvfi_salt_key(&identity, &link, &link, "a", 1);
    kvfi_chain(&identity, &keys[num++], 1, tokens + 16, 16, &link);
    for (size_t i = 0; i < num; i++) {
        for (size_t j = 0; j < i; j++) {
            assert_memory_not_equal(&keys[i], &keys[j], sizeof keys[i]);
        }
    }
    kvfi_identity_cleanup(&identity);
}

static void a_long_prompt_in_one_call(void **state) {
    (void)state;
    enum { NUM = 131072 };
    kvfi_identity identity;
    uint32_t *tokens = calloc(NUM, sizeof *tokens);
    kvf_key *keys = calloc(NUM / 16, sizeof *keys);
    open_identity(&identity, NULL);
    assert_int_equal(kvfi_chain(&identity, keys, NUM / 16, tokens, NUM, NULL), NUM / 16);
    assert_memory_not_equal(&keys[NUM / 16 - 1], &keys[NUM / 16 - 2], 32);
    kvfi_identity_cleanup(&identity);
    free(tokens);
    free(keys);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden),
        cmocka_unit_test(cap_and_short_prompts),
        cmocka_unit_test(a_key_names_the_whole_prefix),
        cmocka_unit_test(a_chain_continues),
        cmocka_unit_test(a_salt_separates),
        cmocka_unit_test(a_long_prompt_in_one_call),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
