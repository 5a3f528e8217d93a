/* SPDX-License-Identifier: Apache-2.0
 *
 * The identity of a space: its digest against the golden vectors, what is refused, and the n-th allocation.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "record/space.h"
#include "support/faults.h"
#include "support/golden.h"

static const kvf_field golden_fields[] = KVFT_GOLDEN_FIELDS;

static void digest_is_golden(void **state) {
    (void)state;
    kvfi_identity identity;
    kvf_space_options options = {.struct_size = sizeof options, .block_tokens = 16};
    uint8_t golden[32];
    assert_int_equal(kvfi_identity_init(&identity, NULL, golden_fields, 4, &options), KVF_OK);
    kvft_golden_vector("digest plain", golden);
    assert_memory_equal(identity.digest.bytes, golden, 32);
    assert_string_equal(identity.text,
                        "block_tokens=16\nengine=test 1\nkv=f16 LHTD\nmodel=sha256:0123\ntenant=acme \xc3\xa9\n");
    assert_int_equal(identity.text_len, strlen(identity.text));
    kvfi_identity_cleanup(&identity);

    options.secret = KVFT_GOLDEN_SECRET;
    options.secret_len = strlen(KVFT_GOLDEN_SECRET);
    assert_int_equal(kvfi_identity_init(&identity, NULL, golden_fields, 4, &options), KVF_OK);
    kvft_golden_vector("digest keyed", golden);
    assert_memory_equal(identity.digest.bytes, golden, 32);
    assert_null(strstr(identity.text, "secret"));
    kvfi_identity_cleanup(&identity);
}

static void digest_of(uint8_t out[32], const kvf_field *fields, size_t num, uint32_t block_tokens) {
    kvfi_identity identity;
    kvf_space_options options = {.struct_size = sizeof options, .block_tokens = block_tokens};
    assert_int_equal(kvfi_identity_init(&identity, NULL, fields, num, &options), KVF_OK);
    memcpy(out, identity.digest.bytes, 32);
    kvfi_identity_cleanup(&identity);
}

static void order_does_not_matter_but_all_else_does(void **state) {
    (void)state;
    const kvf_field a[] = {{"engine", "e"}, {"model", "m"}, {"kv", "k"}, {"rope", "r"}};
    const kvf_field b[] = {{"rope", "r"}, {"kv", "k"}, {"model", "m"}, {"engine", "e"}};
    const kvf_field other_value[] = {{"engine", "e"}, {"model", "m"}, {"kv", "k"}, {"rope", "s"}};
    const kvf_field other_name[] = {{"engine", "e"}, {"model", "m"}, {"kv", "k"}, {"rop", "er"}};
    const kvf_field moved[] = {{"engine", "em"}, {"model", ""}, {"kv", "k"}, {"rope", "r"}};
    uint8_t first[32], second[32];
    digest_of(first, a, 4, 0);
    digest_of(second, b, 4, 256); /* 256 is the default */
    assert_memory_equal(first, second, 32);
    digest_of(second, a, 4, 128);
    assert_memory_not_equal(first, second, 32);
    digest_of(second, other_value, 4, 0);
    assert_memory_not_equal(first, second, 32);
    digest_of(second, other_name, 4, 0);
    assert_memory_not_equal(first, second, 32);
    digest_of(second, a, 3, 0);
    assert_memory_not_equal(first, second, 32);
    kvfi_identity identity;
    assert_int_equal(kvfi_identity_init(&identity, NULL, moved, 4, NULL), KVF_REFUSED); /* an empty model names none */
}

static void check_refused(const kvf_field *fields, size_t num, const kvf_space_options *options, kvf_status status,
                          const char *word) {
    kvfi_identity identity;
    kvf_error err = {0};
    assert_int_equal(kvfi_identity_init(&identity, &err, fields, num, options), status);
    assert_int_equal(err.status, status);
    if (strstr(err.what, word) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", err.what, word);
    }
    kvfi_identity_cleanup(&identity); /* of the zero state */
}

static void what_is_refused(void **state) {
    (void)state;
    kvf_field fields[4] = {{"engine", "e"}, {"model", "m"}, {"kv", "k"}, {"x", "y"}};
    static char long_name[66], long_value[4098];
    static kvf_field many[65];
    memset(long_name, 'a', 65);
    memset(long_value, 'v', 4097);
    check_refused(fields, 2, NULL, KVF_REFUSED, "kv");
    check_refused(fields + 1, 3, NULL, KVF_REFUSED, "engine");
    check_refused(NULL, 0, NULL, KVF_REFUSED, "engine");

    const struct {
        const char *name, *value, *word;
    } wrong[] = {
        {"", "v", "0 bytes"},        {"A", "v", "a-z"},
        {"a b", "v", "a-z"},         {"a=b", "v", "a-z"},
        {long_name, "v", "65"},      {"x", long_value, "4096"},
        {"x", "a\nb", "control"},    {"x", "\x7f", "control"},
        {"model", "again", "twice"}, {"block_tokens", "8", "options"},
        {NULL, "v", "no name"},      {"x", NULL, "no value"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        fields[3] = (kvf_field){wrong[i].name, wrong[i].value};
        check_refused(fields, 4, NULL, KVF_LIMIT, wrong[i].word);
    }
    for (size_t i = 0; i < 65; i++) {
        many[i] = (kvf_field){"x", "y"};
    }
    check_refused(many, 65, NULL, KVF_LIMIT, "64");
    kvf_space_options options = {.struct_size = sizeof options, .block_tokens = 65537};
    check_refused(fields, 3, &options, KVF_LIMIT, "1 to 65536");
    options = (kvf_space_options){.struct_size = sizeof options, .secret = "s", .secret_len = 1025};
    check_refused(fields, 3, &options, KVF_LIMIT, "1024");
    options.secret_len = 15;
    check_refused(fields, 3, &options, KVF_LIMIT, "16 to");
    options.secret_len = 0;
    check_refused(fields, 3, &options, KVF_LIMIT, "leave it out for none");
}

/* The largest of everything that is documented is taken. */
static void limits_are_taken(void **state) {
    (void)state;
    static char names[64][65], value[4097], secret[1024];
    kvf_field fields[64] = {{"engine", "e"}, {"model", "m"}, {"kv", "k"}};
    memset(value, 'v', 4096);
    memset(secret, 's', sizeof secret);
    for (size_t i = 3; i < 64; i++) {
        memset(names[i], 'a', 62);
        snprintf(names[i] + 62, 3, "%02zu", i);
        fields[i] = (kvf_field){names[i], i == 3 ? value : ""};
    }
    static const uint32_t tokens[] = {1, 3, 100, 4096, 65535, 65536};
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        kvfi_identity identity;
        kvf_space_options options = {
            .struct_size = sizeof options, .block_tokens = tokens[i], .secret = secret, .secret_len = sizeof secret};
        assert_int_equal(kvfi_identity_init(&identity, NULL, fields, 64, &options), KVF_OK);
        assert_int_equal(identity.block_tokens, tokens[i]);
        kvfi_identity_cleanup(&identity);
    }
}

static void every_allocation_fails_once(void **state) {
    (void)state;
    uint64_t n = 1;
    for (;; n++) {
        kvfi_identity identity;
        kvf_error err = {0};
        kvft_faults_arm(KVFT_ALLOC, n);
        kvf_status status = kvfi_identity_init(&identity, &err, golden_fields, 4, NULL);
        kvfi_identity_cleanup(&identity);
        assert_int_equal(kvft_faults_live_allocs(), 0);
        bool hit = kvft_faults_disarm();
        assert_int_equal(status, hit ? KVF_NOMEM : KVF_OK);
        if (!hit) {
            break;
        }
        assert_int_equal(err.status, KVF_NOMEM);
    }
    assert_true(n > 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(digest_is_golden),
        cmocka_unit_test(order_does_not_matter_but_all_else_does),
        cmocka_unit_test(what_is_refused),
        cmocka_unit_test(limits_are_taken),
        cmocka_unit_test(every_allocation_fails_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
