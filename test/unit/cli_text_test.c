/* SPDX-License-Identifier: Apache-2.0
 *
 * The command line on text of a hostile store: no terminal escape, no faked line, and JSON that parses.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "base/text.h"
#include "kvferry/kvferry.h"
#include "session/session.h"
#include "support/place.h"

#define ESCAPES                    \
    "\x1b]0;owned\x07\x1b[31m\x9b" \
    "2J\xc2\x9b"                   \
    "2J\r\b\x7f\xe2\x80\xae\xe2\x80\xa8\xff"
static const char evil[] = "evil" ESCAPES "\n999 damaged\nSPACE";

/* What a verb prints, on stdout and stderr. */
static char *run(const char *verb, const char *url, const char *options) {
    char command[3 * PATH_MAX];
    const char *program = getenv("KVFERRY");
    snprintf(command, sizeof command, "'%s' %s --store '%s' %s 2>&1", program != NULL ? program : "kvferry", verb, url,
             options);
    FILE *from = popen(command, "r");
    char *out = calloc(1, 1 << 20);
    assert_non_null(from);
    assert_non_null(out);
    assert_true(fread(out, 1, (1 << 20) - 1, from) > 0);
    pclose(from);
    return out;
}

/* No line of it is faked, and no byte of it does anything but stand there. */
static void expect_plain(const char *text) {
    for (const char *p = text; *p != '\0'; p++) {
        if (*p == '\n') {
            assert_true(strncmp(p + 1, "999", 3) != 0 && strncmp(p + 1, "SPACE", 5) != 0);
            continue;
        }
        size_t shown = kvfi_shown_bytes(p, strlen(p));
        assert_true(shown > 0);
        p += shown - 1;
    }
}

static void expect_json(const char *text) {
    json_error_t error;
    json_t *json = json_loads(text, 0, &error);
    assert_non_null(json);
    for (const char *p = text; *p != '\0'; p++) {
        assert_true(*p == '\n' || (*p >= 0x20 && *p < 0x7f));
    }
    json_decref(json);
}

static void expect_shown(const char *verb, const char *url, const char *options, const char *part) {
    char json[PATH_MAX];
    char *text = run(verb, url, options);
    expect_plain(text);
    if (part != NULL && strstr(text, part) == NULL) {
        fail_msg("no \"%s\" in: %s", part, text);
    }
    free(text);
    snprintf(json, sizeof json, "%s --json", options);
    text = run(verb, url, json);
    expect_json(text);
    free(text);
}

/* A record as somebody else may write it: whole, with any bytes inside. */
static void forge(kvfi_tier *tier, const kvf_digest *space, const kvf_key *key, const void *payload, size_t len,
                  uint16_t flags, int64_t stored_s) {
    uint8_t head[KVFI_HEADER_BYTES], sum[KVFI_SUM_BYTES];
    struct iovec iov[3] = {{head, sizeof head}, {(void *)(uintptr_t)payload, len}, {sum, sizeof sum}};
    kvfi_item item = {.iov = iov, .num_iov = 3, .bytes = sizeof head + len + sizeof sum, .status = KVF_AGAIN};
    kvf_block block = {.key = *key};
    kvfi_feed feed = {.items = &item, .num = 1, .limit = 1, .deadline_us = KVFI_NEVER};
    item.addr.space = *space;
    item.addr.key = *key;
    kvfi_record_seal(head, sum, &item.addr, &block, iov + 1, 1, flags, stored_s);
    tier->ops->put(tier, &feed);
    assert_int_equal(item.status, KVF_OK);
}

static void test_cards_and_times(void **state) {
    (void)state;
    static const int64_t times[] = {INT64_MIN, INT64_MAX, -1, 1, 13569465600};
    place p = open_place("");
    char card[1024], hex[65];
    for (uint8_t i = 0; i < sizeof times / sizeof *times; i++) {
        kvf_digest space = {{i, 7}};
        kvf_key key = {.bytes = {i, 9}}, at;
        kvfi_card_key(&at, &space);
        int len = snprintf(card, sizeof card, "engine=%s\n%s=x\nmodel=good\\name\nkv=\xff\xfe\n", evil, evil);
        forge(p.tier, &space, &at, card, (size_t)len, KVFI_FLAG_CARD, times[i]);
        forge(p.tier, &space, &key, "abc", 3, 0, times[i]);
    }
    /* A card that does not fit its space is not shown at all. This one fits. */
    kvf_store *store = kvft_store(p.url);
    kvf_space *own = NULL;
    kvf_field fields[] = {{"engine", "test"},
                          {"model", "good\\name\xe2\x80\xae\xc2\x9b"
                                    "2J\xff"},
                          {"kv", "none"}};
    assert_int_equal(kvf_space_open(&own, NULL, store, fields, 3, NULL), KVF_OK);
    kvf_reserved reserved;
    kvf_block block = {.key = {{1}}};
    assert_int_equal(kvf_reserve(own, &reserved, 3), KVF_OK);
    assert_int_equal(kvf_commit(own, &reserved, &block, 3), KVF_OK);
    assert_int_equal(kvf_store_flush(store, NULL, KVF_MS(20000)), KVF_OK);
    kvf_space_close(own);
    kvf_store_close(store);
    expect_shown("ls", p.url, "", "model=good\\\\name\\xe2\\x80\\xae\\xc2\\x9b2J\\xff");
    for (uint8_t i = 0; i < sizeof times / sizeof *times; i++) {
        kvf_digest space = {{i, 7}};
        char options[80];
        kvfi_hex(hex, space.bytes, 32);
        snprintf(options, sizeof options, "%s", hex);
        expect_shown("inspect", p.url, options, NULL);
        expect_shown("ls", p.url, options, NULL);
    }
    expect_shown("verify", p.url, "", "0 damaged");
    expect_shown("stat", p.url, "", NULL);
    expect_shown("doctor", p.url, "", NULL);
    close_place(&p);
}

static void test_file_names(void **state) {
    (void)state;
    place p = open_place("");
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s/kvf1 %s", p.dir, "x" ESCAPES "\nSPACE");
    assert_int_equal(mkdir(name, 0700), 0);
    char url[2 * PATH_MAX];
    snprintf(url, sizeof url, "file:%s/kvf1 x\x1b]0;", p.dir); /* escapes in the URL are refused, and not echoed */
    char *text = run("ls", url, "");
    expect_plain(text);
    free(text);
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    snprintf(name, sizeof name, "%s" ESCAPES "\n999", below(&p, "strange"));
    make_file(name, 10);
    expect_shown("ls", p.url, "", "not of kvferry");
    expect_shown("verify", p.url, "", NULL);
    close_place(&p);
}

/* The meta of a session is JSON: what saves it writes no escape into it, but somebody else may. */
static int change_layout(void *ctx, const kvfi_sight *sight) {
    kvfi_tier *tier = ctx;
    if (sight->addr == NULL) {
        return 0;
    }
    static const char from[] = "\"LAYOUT\"", to[] = "\"\\u001b[2J\"";
    uint8_t *copy = malloc(sight->head_len + 64);
    kvfi_header header;
    assert_int_equal(kvfi_header_decode(&header, sight->head), KVF_WHY_NONE);
    size_t len = (size_t)header.payload_bytes;
    memcpy(copy, sight->head + KVFI_HEADER_BYTES, len);
    uint8_t *found = memmem(copy, len, from, sizeof from - 1);
    if (found != NULL) { /* the meta ends in blanks, so its length need not change */
        uint8_t *end = found;
        while (*end != '}' || end[1] != ' ' || end[2] != ' ' || end[3] != ' ') {
            end++;
        }
        memmove(found + sizeof to - 1, found + sizeof from - 1, (size_t)(end + 1 - (found + sizeof from - 1)));
        memcpy(found, to, sizeof to - 1);
        forge(tier, &header.addr.space, &header.addr.key, copy, len, 0, header.stored_s);
    }
    free(copy);
    return 0;
}

static void forge_layout(const place *p) {
    assert_int_equal(p->tier->ops->walk(p->tier, NULL, NULL, true, change_layout, p->tier, KVF_MS(1000)), KVF_OK);
}

static void test_sessions(void **state) {
    (void)state;
    place p = open_place("");
    kvf_store *store = kvft_store(p.url);
    kvf_error err = {0};
    float numbers[8] = {0};
    kvf_tensor tensor = {.data = numbers, .len = sizeof numbers, .dtype = "uint8", .num_dims = 1, .dims = {32}};
    kvf_session_options options = {.struct_size = sizeof options, .layout = "LAYOUT"};
    const char *id = "chat"
                     "\x1b]0;owned\x07\n999 sessions\n";
    if (kvf_session_save(store, &err, id, &tensor, &tensor, &options) != KVF_OK) {
        fail_msg("%s", err.what);
    }
    kvf_store_close(store);
    expect_shown("ls", p.url, "", "chat\\x1b]0;owned\\x07\\n999");
    char argument[256];
    snprintf(argument, sizeof argument, "--session '%s'", id);
    forge_layout(&p);
    expect_shown("inspect", p.url, argument, "\\x1b[2J");
    expect_shown("inspect", p.url, argument, "chat\\x1b]0;owned");
    close_place(&p);
}

/* What the library says of what others said. */
static char logged[600];
static void hear(void *ctx, kvf_log_level level, const char *message) {
    (void)ctx, (void)level;
    snprintf(logged, sizeof logged, "%s", message);
}

static void test_errors_and_the_log(void **state) {
    (void)state;
    kvf_error err;
    char long_text[400];
    assert_int_equal(kvfi_fail(&err, KVF_IO, "the server said: %s, gr\xc3\xbc\xc3\x9f", evil), KVF_IO);
    expect_plain(err.what);
    assert_null(strchr(err.what, '\n'));
    assert_non_null(strstr(err.what, "gr\xc3\xbc\xc3\x9f")); /* letters stay */
    memset(long_text, 'x', sizeof long_text);
    memcpy(long_text + 249, "\xc3\xbc", 3); /* a letter that the end of the message cuts in two */
    (void)kvfi_fail(&err, KVF_IO, "x%s", long_text);
    expect_plain(err.what);
    kvf_set_log(hear, NULL, KVF_LOG_DEBUG);
    kvfi_log(KVF_LOG_WARN, "%s", evil);
    kvf_set_log(NULL, NULL, KVF_LOG_ERROR);
    expect_plain(logged);
    assert_null(strchr(logged, '\n'));
}

static void test_what_is_shown_as_it_is(void **state) {
    (void)state;
    static const struct {
        const char *text;
        size_t bytes;
    } cases[] = {{"a", 1},
                 {"\xc3\xa9", 2},
                 {"\xe6\xbc\xa2", 3},
                 {"\xf0\x9f\x98\x80", 4},
                 {"\x1b", 0},
                 {"\n", 0},
                 {"\x7f", 0},
                 {"\xc2\x9b", 0},
                 {"\xc0\x8a", 0},
                 {"\xed\xa0\x80", 0},
                 {"\xf4\x90\x80\x80", 0},
                 {"\xe2\x80\xae", 0},
                 {"\xd8\x9c", 0},
                 {"\xe2\x81\xa6", 0},
                 {"\xef\xbb\xbf", 0},
                 {"\xc3", 0},
                 {"\x80", 0},
                 {"\xf3\xa0\x81\x81", 0},
                 {"\xe0\x80\x8a", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(kvfi_shown_bytes(cases[i].text, strlen(cases[i].text)), cases[i].bytes);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_shown_as_it_is),
        cmocka_unit_test(test_errors_and_the_log),
        cmocka_unit_test(test_cards_and_times),
        cmocka_unit_test(test_file_names),
        cmocka_unit_test(test_sessions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
