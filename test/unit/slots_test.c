/* SPDX-License-Identifier: Apache-2.0
 *
 * Hash slots, the map of a Cluster, redirections: valid ones, and those of a hostile server.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "redis/cluster/slots.h"

static uint16_t slot_of(const char *key) {
    return kvfi_slot_of(key, strlen(key));
}

/* The specification's: CRC16 of "123456789" is 0x31C3. */
static void test_slot(void **state) {
    (void)state;
    assert_int_equal(slot_of("123456789"), 0x31c3);
    assert_int_equal(slot_of("foo"), 12182);
    assert_int_equal(slot_of(""), 0);
    assert_int_equal(slot_of("{user1000}.following"), slot_of("user1000"));
    assert_int_equal(slot_of("foo{bar}{zap}"), slot_of("bar"));
    assert_int_equal(slot_of("foo{{bar}}zap"), slot_of("{bar"));
    assert_int_not_equal(slot_of("foo{}{bar}"), slot_of("bar"));
    assert_int_not_equal(slot_of("x{foo"), slot_of("foo"));
}

/* Feeds the whole text to a map. Returns whether all of it was taken, to its end. */
static bool parse(kvfi_slots *slots, const char *text) {
    char scratch[4096];
    kvfi_resp resp;
    struct iovec iov[4];
    kvfi_reply reply = {.last = false};
    size_t at = 0, len = strlen(text);
    kvfi_resp_init(&resp, scratch, sizeof scratch);
    kvfi_slots_init(slots);
    while (!reply.last) {
        kvfi_resp_event event = kvfi_resp_next(&resp, &reply);
        if (event == KVFI_RESP_REPLY && !kvfi_slots_take(slots, &reply)) {
            return false;
        }
        if (event == KVFI_RESP_REPLY) {
            continue;
        }
        if (event == KVFI_RESP_BAD || at == len) {
            return false;
        }
        (void)kvfi_resp_want(&resp, iov, 4);
        size_t n = iov[0].iov_len < len - at ? iov[0].iov_len : len - at;
        memcpy(iov[0].iov_base, text + at, n);
        kvfi_resp_got(&resp, n);
        at += n;
    }
    return true;
}

#define NODE(host, port) "*3\r\n$" host "\r\n:" port "\r\n$2\r\nid\r\n"

static kvfi_slots slots;

static void test_map(void **state) {
    (void)state;
    assert_true(
        parse(
            &slots,
            "*3\r\n"
            "*4\r\n:0\r\n:99\r\n" NODE("9\r\n127.0.0.1", "1") NODE(
                "3\r\nrep",
                "9") "*3\r\n:100\r\n:16383\r\n*4\r\n$3\r\n::1\r\n:2\r\n$2\r\nid\r\n*2\r\n$8\r\nhostname\r\n$1\r\nh\r\n"
                     "*3\r\n:200\r\n:100\r\n" NODE("1\r\na", "1")) == false); /* the last is upside down */
    assert_true(parse(
        &slots,
        "*3\r\n"
        "*4\r\n:0\r\n:99\r\n" NODE("9\r\n127.0.0.1", "1")
            NODE("3\r\nrep",
                 "9") "*3\r\n:100\r\n:199\r\n*4\r\n$3\r\n::1\r\n:2\r\n$2\r\nid\r\n*2\r\n$8\r\nhostname\r\n$1\r\nh\r\n"
                      "*3\r\n:201\r\n:16383\r\n" NODE("9\r\n127.0.0.1", "1")));
    assert_int_equal(slots.num_hosts, 2);
    assert_int_equal(slots.owner[0], 0);
    assert_int_equal(slots.owner[150], 1);
    assert_int_equal(slots.owner[200], KVFI_NO_OWNER);
    assert_int_equal(slots.owner[16383], 0);
    assert_string_equal(slots.hosts[1].name, "::1");
    assert_int_equal(slots.hosts[1].port, 2);
    assert_true(parse(&slots, "*0\r\n"));
}

/* A range whose host can't be used has no owner, and the others are there. */
static void test_public_6_hosts_that_are_unknown(void **state) {
    (void)state;
    static const char *const unknown[] = {
        NODE("0\r\n", "0"),    NODE("1\r\n?", "7"),   NODE("1\r\na", "0"), NODE("1\r\na", "65536"),
        NODE("3\r\na b", "1"), "*2\r\n$-1\r\n:0\r\n", "*1\r\n$1\r\na\r\n", "*0\r\n"};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        char text[300];
        snprintf(text, sizeof text, "*3\r\n*3\r\n:0\r\n:1\r\n%s*3\r\n:2\r\n:3\r\n%s*3\r\n:4\r\n:5\r\n%s",
                 NODE("1\r\na", "7"), unknown[i], NODE("1\r\nb", "8"));
        if (!parse(&slots, text)) {
            fail_msg("refused: %s", text);
        }
        assert_int_equal(slots.num_hosts, 2);
        assert_int_equal(slots.owner[1], 0);
        assert_int_equal(slots.owner[2], KVFI_NO_OWNER);
        assert_int_equal(slots.owner[3], KVFI_NO_OWNER);
        assert_int_equal(slots.owner[5], 1);
    }
    /* Without a host it is that of the server that was asked; likewise an empty one with its port. */
    assert_true(parse(&slots, "*2\r\n*3\r\n:0\r\n:1\r\n" NODE("0\r\n", "7") "*3\r\n:2\r\n:3\r\n*2\r\n$-1\r\n:8\r\n"));
    assert_string_equal(slots.hosts[0].name, "");
    assert_true(slots.hosts[0].empty);
    assert_string_equal(slots.hosts[1].name, "");
    assert_false(slots.hosts[1].empty);
    /* They are two, also of one port: the server asked may have another one. */
    assert_true(parse(&slots, "*2\r\n*3\r\n:0\r\n:1\r\n" NODE("0\r\n", "7") "*3\r\n:2\r\n:3\r\n*2\r\n$-1\r\n:7\r\n"));
    assert_int_equal(slots.num_hosts, 2);
    assert_true(slots.hosts[slots.owner[0]].empty);
    assert_false(slots.hosts[slots.owner[2]].empty);
}

static void test_hostile_maps(void **state) {
    (void)state;
    static const char *const bad[] = {
        "-ERR no\r\n",
        ":1\r\n",
        "+OK\r\n",
        "*-1\r\n",
        "*16385\r\n",
        "*1\r\n:1\r\n",
        "*1\r\n*2\r\n:0\r\n:1\r\n",
        "*1\r\n*3\r\n:-1\r\n",
        "*1\r\n*3\r\n:0\r\n:16384\r\n",
        "*1\r\n*3\r\n:0\r\n$1\r\n1\r\n",
        "*1\r\n*3\r\n:5\r\n:4\r\n",
        "*1\r\n*3\r\n:0\r\n:1\r\n:3\r\n",
        "*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n:1\r\n:1\r\n",
        "*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n$1\r\na\r\n$1\r\n1\r\n",
        "*2\r\n*3\r\n:0\r\n:1\r\n" NODE("1\r\na", "1") "*3\r\n:1\r\n:2\r\n" NODE("1\r\nb", "1"),
        "*1\r\n*3\r\n:0\r\n:1\r\n*3\r\n$1\r\na\r\n:1\r\n*1\r\n*1\r\n*1\r\n:1\r\n"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (parse(&slots, bad[i])) {
            fail_msg("taken: %s", bad[i]);
        }
    }
}

static void check_redirect(const char *text, kvfi_redirect_kind kind, unsigned slot, const char *host, unsigned port) {
    uint16_t got = 0;
    kvfi_host to = {.port = 0};
    assert_int_equal(kvfi_redirect_parse(&got, &to, text, strlen(text)), kind);
    if (kind != KVFI_REDIRECT_NONE) {
        assert_int_equal(got, slot);
        assert_string_equal(to.name, host);
        assert_int_equal(to.port, port);
    }
}

static void test_redirects(void **state) {
    (void)state;
    check_redirect("MOVED 3999 127.0.0.1:6381", KVFI_REDIRECT_MOVED, 3999, "127.0.0.1", 6381);
    check_redirect("ASK 1 host.example:7", KVFI_REDIRECT_ASK, 1, "host.example", 7);
    check_redirect("MOVED 0 :6381", KVFI_REDIRECT_MOVED, 0, "", 6381);
    check_redirect("MOVED 0 ?:6381", KVFI_REDIRECT_MOVED, 0, "", 6381);
    check_redirect("MOVED 16383 fe80::1:6381", KVFI_REDIRECT_MOVED, 16383, "fe80::1", 6381);
    check_redirect("ASK 16383 [fe80::1]:6381", KVFI_REDIRECT_ASK, 16383, "fe80::1", 6381);
    static const char *const bad[] = {"MOVED 16384 a:1", "MOVED -1 a:1", "MOVED 1 a",    "MOVED 1 a:0",
                                      "MOVED 1 a:65536", "MOVED 1 ",     "MOVED 1",      "MOVED ",
                                      "MOVED",           "ASK",          "ASKING 1 a:1", "ASK 1 a b:1",
                                      "ERR MOVED 1 a:1", "MOVED x a:1",  "MOVED 1 a:"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        check_redirect(bad[i], KVFI_REDIRECT_NONE, 0, "", 0);
    }
    char text[600] = "MOVED 1 ";
    memset(text + 8, 'a', 300);
    strcpy(text + 308, ":1");
    check_redirect(text, KVFI_REDIRECT_NONE, 0, "", 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_slot), cmocka_unit_test(test_map),
                                       cmocka_unit_test(test_public_6_hosts_that_are_unknown),
                                       cmocka_unit_test(test_hostile_maps), cmocka_unit_test(test_redirects)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
