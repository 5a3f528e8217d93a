/* SPDX-License-Identifier: Apache-2.0
 *
 * A server's breakers on a stopped clock, and the meaning of error replies (redis/cluster/node.h).
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "redis/blocks/blocks.h"

static kvfi_systable table;
static int64_t now;
static uint16_t chance; /* 0: a backoff lasts its whole time; UINT16_MAX: a quarter less */
static unsigned tries;  /* to connect */
static _Atomic uint64_t connects, disconnects;
static kvfi_redis_conf conf;
static kvfi_node node;

static int64_t standing_clock(void) {
    return now;
}

static int given_chance(void *out, size_t bytes) {
    assert_int_equal(bytes, sizeof chance);
    memcpy(out, &chance, sizeof chance);
    return 0;
}

static int refuse(int fd, const struct sockaddr *address, socklen_t len) {
    (void)fd;
    (void)address;
    (void)len;
    tries++;
    errno = ECONNREFUSED;
    return -1;
}

static int set_up(void **state) {
    (void)state;
    now = 1000000;
    chance = 0;
    tries = 0;
    table = kvfi_sys_real;
    table.now_us = standing_clock;
    table.random = given_chance;
    table.connect = refuse;
    kvfi_sys_table = &table;
    conf = (kvfi_redis_conf){
        .text = "redis+unix:///nowhere", .name = "", .prefix = "kvf1", .connect_ms = 300, .stall_ms = 100, .conns = 1};
    conf.server.path = "/nowhere";
    kvfi_node_init(&node, &conf, &conf.server, NULL, &connects, &disconnects);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    kvfi_node_cleanup(&node);
    kvfi_sys_table = &kvfi_sys_real;
    return 0;
}

static void expect_states(kvfi_breaker_state connections, kvfi_breaker_state saves) {
    kvfi_breaker_state a, b;
    kvfi_node_states(&node, &a, &b);
    assert_int_equal(a, connections);
    assert_int_equal(b, saves);
}

static kvf_reason take(void) {
    kvfi_conn *conn = NULL;
    kvf_reason why = kvfi_node_take(&node, &conn, NULL, KVFI_LANE_LOAD, NULL, true, now + 10000000);
    assert_null(conn);
    return why;
}

/* Each failure doubles the time in which nobody tries, from 50 ms to half a second. */
static void test_connections_back_off(void **state) {
    (void)state;
    static const int64_t backoffs_ms[] = {50, 100, 200, 400, 500, 500};
    expect_states(KVFI_BREAKER_CLOSED, KVFI_BREAKER_CLOSED);
    for (unsigned i = 0; i < sizeof backoffs_ms / sizeof *backoffs_ms; i++) {
        assert_int_equal(take(), KVF_WHY_UNREACHABLE);
        assert_int_equal(tries, i + 1);
        expect_states(KVFI_BREAKER_OPEN, KVFI_BREAKER_CLOSED);
        assert_int_equal(take(), KVF_WHY_BREAKER);
        now += backoffs_ms[i] * 1000 - 1;
        assert_int_equal(take(), KVF_WHY_BREAKER);
        expect_states(KVFI_BREAKER_OPEN, KVFI_BREAKER_CLOSED);
        assert_int_equal(tries, i + 1);
        now += 1;
        expect_states(KVFI_BREAKER_HALF_OPEN, KVFI_BREAKER_CLOSED);
    }
}

static int no_socket(int family, int type, int protocol) {
    (void)family;
    (void)type;
    (void)protocol;
    errno = EMFILE;
    return -1;
}

static int must_not_close(int fd) {
    fail_msg("descriptor %d is closed", fd);
    return -1;
}

/* Without a free descriptor, no descriptor of somebody else is used. */
static void test_no_socket(void **state) {
    (void)state;
    table.socket = no_socket;
    table.close = must_not_close;
    assert_int_equal(take(), KVF_WHY_UNREACHABLE);
    assert_int_equal(tries, 0);
    expect_states(KVFI_BREAKER_OPEN, KVFI_BREAKER_CLOSED);
}

/* Refused saves: from 0.1 to 2 s, up to a quarter less by chance. Then one may try, and until it has told what became
 * of it, or has had its time, nobody else. */
static void test_saves_back_off(void **state) {
    (void)state;
    static const int64_t backoffs_ms[] = {100, 200, 400, 800, 1600, 2000, 2000};
    assert_true(kvfi_node_may_save(&node) && kvfi_node_may_save(&node));
    for (unsigned i = 0; i < sizeof backoffs_ms / sizeof *backoffs_ms; i++) {
        chance = i % 2 == 0 ? 0 : UINT16_MAX;
        int64_t us = i % 2 == 0 ? backoffs_ms[i] * 1000 : backoffs_ms[i] * 750;
        kvfi_node_note_saves(&node, true);
        expect_states(KVFI_BREAKER_CLOSED, KVFI_BREAKER_OPEN);
        now += us - 1;
        assert_false(kvfi_node_may_save(&node));
        now += 1;
        expect_states(KVFI_BREAKER_CLOSED, KVFI_BREAKER_HALF_OPEN);
        assert_true(kvfi_node_may_save(&node));
        assert_false(kvfi_node_may_save(&node));
        expect_states(KVFI_BREAKER_CLOSED, KVFI_BREAKER_HALF_OPEN);
    }
    now += 2000000 - 1;
    assert_false(kvfi_node_may_save(&node));
    now += 1;
    assert_true(kvfi_node_may_save(&node));
    kvfi_node_note_saves(&node, false);
    expect_states(KVFI_BREAKER_CLOSED, KVFI_BREAKER_CLOSED);
    assert_true(kvfi_node_may_save(&node) && kvfi_node_may_save(&node));
    kvfi_node_note_saves(&node, true); /* from the beginning */
    now += 100000;
    assert_true(kvfi_node_may_save(&node));
}

/* ---- what replies mean ---- */

static kvfi_reply error(const char *text) {
    return (kvfi_reply){.kind = KVFI_RESP_ERROR, .text = text, .len = strlen(text), .last = true};
}

/* Whether a connection that lay idle for so long is used again. */
static bool is_used_after(int64_t idle_us) {
    int ends[2];
    kvfi_conn *conn = kvfi_alloc_zero(1, sizeof *conn), *taken = NULL;
    kvf_error err = {0};
    assert_non_null(conn);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    kvfi_conn_init(conn, conf.stall_ms, &disconnects);
    kvfi_resp_init(&conn->in, conn->scratch, sizeof conn->scratch);
    conn->fd = ends[0];
    conn->idle_us = now;
    kvfi_lane *lane = &node.lanes[KVFI_LANE_LOAD];
    lane->idle[lane->num_idle++] = conn;
    now += idle_us;
    bool used = kvfi_node_take(&node, &taken, &err, KVFI_LANE_LOAD, NULL, true, now + 1000000) == KVF_WHY_NONE;
    if (used) {
        assert_ptr_equal(taken, conn);
        kvfi_conn_close(conn);
        kvfi_node_give(&node, KVFI_LANE_LOAD, conn);
    }
    lane->num_idle = 0;
    kvfi_free(conn);
    close(ends[1]);
    return used;
}

/* `patience_us` is that of the batch; 0 = the store's. */
static void lose_after(int64_t idle_us, int64_t patience_us) {
    kvfi_conn lost;
    unsigned stalls = 0;
    kvfi_conn_init(&lost, conf.stall_ms, &disconnects);
    lost.reused = lost.stalled = true;
    lost.idle_us = idle_us;
    lost.patience_us = patience_us;
    assert_true(kvfi_node_forgives(&node, &lost, &stalls));
}

/* The server may have stood still: a connection that was lost is no reason to give up idle ones for ever. */
static void test_idle_ones_are_doubted_for_a_time(void **state) {
    (void)state;
    assert_true(is_used_after(300000));
    for (int64_t minutes = 1; minutes <= 2; minutes++) {
        lose_after(400000, 0);
        assert_false(is_used_after(300000));
        assert_true(is_used_after(100000));
        now += (minutes * 60 - 2) * 1000000;
        assert_false(is_used_after(300000));
        now += 2000000;
        assert_true(is_used_after(300000));
        assert_false(is_used_after(31000000));
    }
}

/* A stall that only the batch calls one is no reason for a doubt that outlasts the batch's retry. It does not end the
 * doubt of a patient one either, nor make the next one longer. */
static void test_impatience_raises_short_doubts(void **state) {
    (void)state;
    for (unsigned i = 0; i < 3; i++) {
        lose_after(200000, 99000);
        assert_false(is_used_after(150000));
        assert_true(is_used_after(150000));
    }
    lose_after(200000, 0);
    lose_after(200000, 99000);
    now += 50 * 1000000;
    assert_false(is_used_after(150000));
    now += 10 * 1000000;
    assert_true(is_used_after(150000));
    lose_after(200000, 101000); /* more than the store has */
    now += 100 * 1000000;
    assert_false(is_used_after(150000));
}

/* ---- what the log hears ---- */

static unsigned warnings;

static void count_warnings(void *ctx, kvf_log_level level, const char *text) {
    (void)ctx;
    warnings += level == KVF_LOG_WARN && strstr(text, "a connection stalled") != NULL;
}

static void end_one(void) {
    kvfi_conn *conn = kvfi_alloc_zero(1, sizeof *conn);
    assert_non_null(conn);
    kvfi_conn_init(conn, conf.stall_ms, &disconnects);
    conn->stalled = true;
    node.lanes[KVFI_LANE_LOAD].num_taken++;
    kvfi_node_give(&node, KVFI_LANE_LOAD, conn);
}

/* That connections end is said once in a second, from the first on, at whatever time that is. */
static void test_the_log_hears_once_a_second(void **state) {
    (void)state;
    static const int64_t later_us[] = {0, 999999, 1, 999999, 1};
    static const unsigned said[] = {1, 1, 2, 2, 3};
    kvf_set_log(count_warnings, NULL, KVF_LOG_DEBUG);
    warnings = 0;
    now = 0;
    for (size_t i = 0; i < sizeof said / sizeof *said; i++) {
        now += later_us[i];
        end_one();
        assert_int_equal(warnings, said[i]);
        kvfi_node_trim(&node);
    }
    kvf_set_log(NULL, NULL, KVF_LOG_WARN);
}

static void test_replies(void **state) {
    (void)state;
    static const struct {
        const char *text;
        bool one, several; /* refuses saves, as a single server, as one of several */
    } rows[] = {{"OOM command not allowed", true, true},
                {"MISCONF disk", true, true},
                {"NOREPLICAS few", true, true},
                {"READONLY replica", true, false},
                {"ERR other", false, false},
                {"OOMPH", false, false},
                {"WRONGTYPE", false, false}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        kvfi_reply reply = error(rows[i].text);
        assert_int_equal(kvfi_reply_refuses_saves(&reply, false), rows[i].one);
        assert_int_equal(kvfi_reply_refuses_saves(&reply, true), rows[i].several);
        reply.kind = KVFI_RESP_STATUS;
        assert_false(kvfi_reply_refuses_saves(&reply, false));
    }
    kvfi_reply wrong = error("WRONGTYPE Operation"), other = error("ERR x"), none = error("");
    assert_int_equal(kvfi_reply_reason(&wrong), KVF_WHY_VERSION);
    assert_int_equal(kvfi_reply_reason(&other), KVF_WHY_SERVER);
    assert_true(kvfi_reply_says(&other, "ERR x"));
    assert_false(kvfi_reply_says(&other, "ERR xy"));
    assert_false(kvfi_reply_says(&none, "E"));
}

static void test_rules_of_the_acl(void **state) {
    (void)state;
    char rule[96];
    kvfi_acl_rule(rule, "NOPERM this user has no permissions to run the 'config|get' command", "kvf1");
    assert_string_equal(rule, "+config|get");
    kvfi_acl_rule(rule, "NOPERM No permissions to access a key", "kvf1");
    assert_string_equal(rule, "~kvf1:* (~* for sessions)");
    kvfi_acl_rule(rule, "NOPERM ''", "p");
    assert_string_equal(rule, "~p:* (~* for sessions)");
    kvfi_acl_rule(rule, "'1234567890123456789012345678901'", "p");
    assert_string_equal(rule, "+1234567890123456789012345678901");
    kvfi_acl_rule(rule, "'12345678901234567890123456789012'", "p"); /* no command has so long a name */
    assert_string_equal(rule, "~p:* (~* for sessions)");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {TEST(test_connections_back_off),
                                       TEST(test_no_socket),
                                       TEST(test_saves_back_off),
                                       TEST(test_replies),
                                       TEST(test_the_log_hears_once_a_second),
                                       TEST(test_idle_ones_are_doubted_for_a_time),
                                       TEST(test_impatience_raises_short_doubts),
                                       TEST(test_rules_of_the_acl)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
