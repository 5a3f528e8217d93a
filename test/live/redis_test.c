/* SPDX-License-Identifier: Apache-2.0
 *
 * The Redis tier's hot path on a real server: get, put, peek; refusals of the server, records written by others, and a
 * server that hangs, dies and returns.
 */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "redis/blocks/blocks.h"
#include "support/cluster.h"
#include "support/kit.h"
#include "support/tiers.h"

static kvft_server *server;

/* Where a test does not name stall_ms=, a server that is slow beside other programs is not taken for a silent one. */
static kvfi_tier *open_tier(const char *url, const char *params) {
    char text[300];
    bool named = strstr(params, "stall_ms=") != NULL;
    snprintf(text, sizeof text, "%s?%s%s%s", url, named ? "" : "stall_ms=30000", named || params[0] == '\0' ? "" : "&",
             params);
    return kvft_tier(text);
}

static void expect(const char *command, const char *answer) {
    const char *got = kvft_server_say(server, command);
    if (strncmp(got, answer, strlen(answer)) != 0) {
        fail_msg("%s: %s, not %s", command, got, answer);
    }
}

static void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *format, ...) {
    char command[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    const char *got = kvft_server_say(server, command);
    if (got[0] == '-' || got[0] == '\0') {
        fail_msg("%s: %s", command, got);
    }
}

static int64_t ms_since(int64_t from_us) {
    return (kvfi_sys->now_us() - from_us) / 1000;
}

/* ---- reading what was written ---- */

/* Every size that may be special: with and without a head's worth of tokens, around a part, around several. */
static void round_trip(kvfi_tier *tier, size_t part) {
    const size_t head = KVFT_VALUE_EXTRA;
    const size_t sizes[] = {0,
                            1,
                            2,
                            127,
                            128,
                            1000,
                            32767,
                            65536,
                            1u << 20,
                            part - head - 1,
                            part - head,
                            part - head + 1,
                            2 * part - head - 1,
                            2 * part - head,
                            2 * part - head + 1,
                            9u << 20};
    uint64_t connects = tier->connects;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        assert_int_equal(kvft_peek(tier, 100 + i), KVF_WHY_ABSENT);
        assert_int_equal(kvft_get(tier, 100 + i, sizes[i]), KVF_WHY_ABSENT);
        assert_int_equal(kvft_put(tier, 100 + i, sizes[i]), KVF_WHY_NONE);
        assert_int_equal(kvft_peek(tier, 100 + i), KVF_WHY_NONE);
        assert_int_equal(kvft_get(tier, 100 + i, sizes[i]), KVF_WHY_NONE);
        assert_int_equal(kvft_put(tier, 100 + i, sizes[i]), KVF_WHY_NONE); /* again, over itself */
        assert_int_equal(kvft_get(tier, 100 + i, sizes[i]), KVF_WHY_NONE);
    }
    assert_in_range(tier->connects - connects, 1, 2); /* one more for loads, one for stores */
    assert_int_equal(tier->disconnects, 0);
}

static void sizes_unix(void **state) {
    (void)state;
    kvfi_tier *tier = open_tier(server->unix_url, "");
    round_trip(tier, (4 << 20) - 4096);
    tier->ops->close(tier);
}

static void sizes_tcp(void **state) {
    (void)state;
    kvfi_tier *tier = open_tier(server->tcp_url, "");
    round_trip(tier, (4 << 20) - 4096);
    tier->ops->close(tier);
}

static void sizes_ipv6(void **state) {
    (void)state;
    char url[64];
    snprintf(url, sizeof url, "redis://[::1]:%d", server->port);
    kvfi_tier *tier = open_tier(url, "");
    round_trip(tier, (4 << 20) - 4096);
    tier->ops->close(tier);
}

/* A name instead of a number, which is looked up. */
static void by_name(void **state) {
    (void)state;
    char url[64];
    snprintf(url, sizeof url, "redis://localhost:%d/3", server->port);
    kvfi_tier *tier = open_tier(url, "conns=1");
    assert_int_equal(kvft_put(tier, 1, 5000), KVF_WHY_NONE);
    assert_int_equal(kvft_get(tier, 1, 5000), KVF_WHY_NONE);
    tier->ops->close(tier);
    expect("DBSIZE", ":0"); /* it went to database 3 */
}

/* Thousands of parts through a small window: more requests than the ring of a connection holds. */
static void many_parts(void **state) {
    (void)state;
    kvfi_tier *tier = open_tier(server->unix_url, "part=4K&window=1M");
    round_trip(tier, 4096);
    tier->ops->close(tier);
}

/* A record without tokens and without payload is a header and its checksum. */
static void header_only(void **state) {
    (void)state;
    kvfi_tier *tier = open_tier(server->unix_url, "");
    uint8_t head[KVFI_HEADER_BYTES + KVFI_SUM_BYTES], got[sizeof head] = {0};
    kvf_block block = {0};
    struct iovec iov = {head, sizeof head};
    kvfi_item item = {.iov = &iov, .num_iov = 1, .bytes = sizeof head, .status = KVF_AGAIN};
    kvft_addr(&item.addr, 7);
    kvfi_record_seal(head, head + KVFI_HEADER_BYTES, &item.addr, &block, NULL, 0, 0, 1700000000);
    kvfi_feed feed = {.items = &item, .num = 1, .limit = 1, .deadline_us = kvfi_deadline(10000000)};
    tier->ops->put(tier, &feed);
    assert_int_equal(item.status, KVF_OK);
    iov.iov_base = got;
    feed.next = 0;
    tier->ops->get(tier, &feed);
    assert_int_equal(item.status, KVF_OK);
    assert_memory_equal(head, got, sizeof head);
    tier->ops->close(tier);
}

/* ---- many at once ---- */

enum { MANY = 400 };
typedef struct crowd {
    kvft_value values[MANY];
    kvfi_item items[MANY];
    kvfi_feed feed;
    kvfi_tier *tier;
    bool put;
} crowd;

static void *crowd_run(void *arg) {
    crowd *c = arg;
    (c->put ? c->tier->ops->put : c->tier->ops->get)(c->tier, &c->feed);
    return NULL;
}

/* Runs the feed on more threads than there are connections. */
static void crowd_go(crowd *c, bool put, bool prefix) {
    pthread_t threads[4];
    c->put = put;
    c->feed = (kvfi_feed){.items = c->items,
                          .num = MANY,
                          .limit = MANY,
                          .deadline_us = kvfi_deadline(60000000),
                          .prefix = prefix,
                          .check = put ? NULL : kvft_value_check};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, crowd_run, c), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
}

static crowd *crowd_new(const char *params) {
    crowd *c = calloc(1, sizeof *c);
    assert_non_null(c);
    c->tier = open_tier(server->unix_url, params);
    for (size_t i = 0; i < MANY; i++) {
        kvft_value_init(&c->values[i], 2000 + i, i * 257 % 40000);
        c->items[i] = c->values[i].item;
    }
    return c;
}

static void crowd_free(crowd *c) {
    for (size_t i = 0; i < MANY; i++) {
        kvft_value_cleanup(&c->values[i]);
    }
    c->tier->ops->close(c->tier);
    free(c);
}

static void crowd_poison(crowd *c) {
    for (size_t i = 0; i < MANY; i++) {
        memset(c->values[i].bytes, 0x5a, c->items[i].bytes);
        c->items[i].status = KVF_AGAIN;
    }
}

static void threads_share_a_feed(void **state) {
    (void)state;
    crowd *c = crowd_new("conns=2&part=16K");
    crowd_go(c, true, false);
    for (size_t i = 0; i < MANY; i++) {
        assert_int_equal(c->items[i].status, KVF_OK);
    }
    crowd_poison(c);
    crowd_go(c, false, true);
    for (size_t i = 0; i < MANY; i++) {
        assert_int_equal(c->items[i].status, KVF_OK);
    }
    assert_int_equal(c->tier->disconnects, 0);
    crowd_free(c);
}

/* Of a prefix nothing behind the first gap is asked for, but for what was on its way. */
static void prefix_ends_at_a_gap(void **state) {
    (void)state;
    crowd *c = crowd_new("conns=1&window=64K");
    crowd_go(c, true, false);
    say("DEL %s", kvft_redis_key(2000 + 50, 0));
    crowd_poison(c);
    crowd_go(c, false, true);
    for (size_t i = 0; i < 50; i++) {
        assert_int_equal(c->items[i].status, KVF_OK);
    }
    assert_int_equal(c->items[50].status, KVF_MISS);
    assert_int_equal(c->items[50].why, KVF_WHY_ABSENT);
    size_t untouched = 0;
    for (size_t i = 51; i < MANY; i++) {
        untouched += c->items[i].status == KVF_AGAIN;
    }
    assert_true(untouched > MANY - 51 - 80); /* four threads, each with its window */
    crowd_free(c);
}

/* 5,000 keys, some absent, some strange: one round trip, each with its reason. [T:one-round-trip] */
static void peek_many(void **state) {
    (void)state;
    enum { KEYS = 5000 };
    kvfi_tier *tier = open_tier(server->unix_url, "");
    kvfi_addr *addrs = calloc(KEYS, sizeof *addrs);
    kvfi_peek *peeks = calloc(KEYS, sizeof *peeks);
    uint64_t trips = 0;
    for (size_t i = 0; i < KEYS; i++) {
        kvft_addr(&addrs[i], 9000 + i);
    }
    for (size_t i = 0; i < KEYS; i += 100) {
        assert_int_equal(kvft_put(tier, 9000 + i, i), KVF_WHY_NONE);
    }
    say("LPUSH %s x", kvft_redis_key(9000 + 7, 0));
    say("SET %s short", kvft_redis_key(9000 + 8, 0));
    tier->ops->peek(tier, addrs, KEYS, peeks, &trips, kvfi_deadline(10000000), 0);
    assert_int_equal(trips, 1);
    for (size_t i = 0; i < KEYS; i++) {
        kvf_reason expected = i == 7         ? KVF_WHY_VERSION
                              : i == 8       ? KVF_WHY_TRUNCATED
                              : i % 100 == 0 ? KVF_WHY_NONE
                                             : KVF_WHY_ABSENT;
        assert_int_equal(peeks[i].why, expected);
        if (expected == KVF_WHY_NONE) {
            kvfi_header header;
            assert_int_equal(kvfi_header_decode(&header, peeks[i].header), KVF_WHY_NONE);
            assert_memory_equal(&header.addr, &addrs[i], sizeof addrs[i]);
            assert_int_equal(header.payload_bytes, i);
        }
    }
    /* As many as one call may ask for: more questions than the socket holds, so that reading and writing must go on at
     * once. */
    enum { MOST = 65536 };
    kvfi_addr *more = calloc(MOST, sizeof *more);
    kvfi_peek *out = calloc(MOST, sizeof *out);
    for (size_t i = 0; i < MOST; i++) {
        more[i] = addrs[i % 200];
    }
    tier->ops->peek(tier, more, MOST, out, &trips, kvfi_deadline(20000000), 0);
    assert_int_equal(trips, 2);
    for (size_t i = 0; i < MOST; i++) {
        assert_int_equal(out[i].why, peeks[i % 200].why);
    }
    assert_int_equal(tier->disconnects, 0);
    free(more);
    free(out);
    free(addrs);
    free(peeks);
    tier->ops->close(tier);
}

/* ---- what others wrote ---- */

static void foreign_values(void **state) {
    (void)state;
    kvfi_tier *tier = open_tier(server->unix_url, "part=64K");
    for (uint64_t i = 1; i <= 9; i++) {
        assert_int_equal(kvft_put(tier, i, i < 5 || i == 9 ? 20000 : 200000), KVF_WHY_NONE);
    }
    say("DEL %s", kvft_redis_key(1, 0));
    say("LPUSH %s x", kvft_redis_key(1, 0));
    say("SETRANGE %s 20500 x", kvft_redis_key(2, 0));    /* longer */
    say("SET %s short", kvft_redis_key(3, 0));           /* shorter */
    say("SETRANGE %s 5000 x", kvft_redis_key(4, 0));     /* of the right length, one byte changed */
    say("DEL %s", kvft_redis_key(5, 2));                 /* a part is missing */
    say("SETRANGE %s 70000 x", kvft_redis_key(6, 1));    /* a part is too long */
    say("APPEND %s x", kvft_redis_key(7, 3));            /* the last part too */
    say("SETRANGE %s 40000000 x", kvft_redis_key(8, 0)); /* far too long */
    say("SETRANGE %s 262143 x", kvft_redis_key(9, 0));   /* four parts: the longest that is read to its end anyhow */
    assert_int_equal(kvft_get(tier, 1, 20000), KVF_WHY_VERSION);
    assert_int_equal(kvft_get(tier, 2, 20000), KVF_WHY_TRUNCATED);
    assert_int_equal(kvft_get(tier, 3, 20000), KVF_WHY_TRUNCATED);
    assert_int_equal(kvft_get(tier, 4, 20000), KVF_WHY_CHECKSUM);
    assert_int_equal(kvft_get(tier, 5, 200000), KVF_WHY_ABSENT);
    assert_int_equal(kvft_get(tier, 6, 200000), KVF_WHY_TRUNCATED);
    assert_int_equal(kvft_get(tier, 7, 200000), KVF_WHY_TRUNCATED);
    assert_int_equal(kvft_get(tier, 9, 20000), KVF_WHY_TRUNCATED);
    assert_int_equal(tier->disconnects, 0); /* all of that in step */
    assert_int_equal(kvft_get(tier, 8, 200000), KVF_WHY_TRUNCATED);
    assert_int_equal(tier->disconnects, 1);
    assert_int_equal(kvft_get(tier, 1, 19999), KVF_WHY_VERSION);
    tier->ops->close(tier);
}

/* A value of another length than asked for is no hit. */
static void other_length(void **state) {
    (void)state;
    kvfi_tier *tier = open_tier(server->unix_url, "");
    assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
    assert_int_equal(kvft_get(tier, 1, 999), KVF_WHY_TRUNCATED);
    assert_int_equal(kvft_get(tier, 1, 1001), KVF_WHY_TRUNCATED);
    assert_int_equal(kvft_get(tier, 1, 1000), KVF_WHY_NONE);
    tier->ops->close(tier);
}

/* ---- what the server refuses: the connection stays in step ---- */

static void out_of_memory(void **state) {
    (void)state;
    kvfi_tier *tier = open_tier(server->unix_url, ""), *other = open_tier(server->unix_url, "");
    assert_int_equal(kvft_put(tier, 1, 100000), KVF_WHY_NONE);
    say("CONFIG SET maxmemory-policy noeviction");
    say("CONFIG SET maxmemory 1");
    assert_int_equal(kvft_put(tier, 2, 100000), KVF_WHY_SERVER);
    assert_int_equal(kvft_put(tier, 2, 100000), KVF_WHY_BREAKER); /* not again at once */
    assert_int_equal(kvft_put(other, 3, 9 << 20), KVF_WHY_SERVER);
    assert_int_equal(kvft_get(tier, 1, 100000), KVF_WHY_NONE); /* loads go on */
    say("CONFIG SET maxmemory 0");
    say("CONFIG SET maxmemory-policy allkeys-lru");
    assert_int_equal(kvft_put_again(tier, 2, 100000), KVF_WHY_NONE);
    assert_int_equal(kvft_get(tier, 3, 9 << 20), KVF_WHY_ABSENT);
    assert_int_equal(tier->disconnects + other->disconnects, 0);
    other->ops->close(other);
    tier->ops->close(tier);
}

static void read_only_replica(void **state) {
    (void)state;
    kvfi_tier *tier = open_tier(server->unix_url, "");
    assert_int_equal(kvft_put(tier, 1, 100000), KVF_WHY_NONE);
    say("REPLICAOF 127.0.0.1 1");
    assert_int_equal(kvft_put(tier, 2, 100000), KVF_WHY_SERVER);
    assert_int_equal(kvft_get(tier, 1, 100000), KVF_WHY_NONE);
    say("REPLICAOF NO ONE");
    assert_int_equal(kvft_put_again(tier, 2, 100000), KVF_WHY_NONE);
    assert_int_equal(tier->disconnects, 0);
    tier->ops->close(tier);
}

static void count_line(void *ctx, kvf_log_level level, const char *line) {
    (void)level;
    *(unsigned *)ctx += strncmp(line, "redis: ", 7) == 0;
}

static void no_permission(void **state) {
    (void)state;
    char url[256];
    say("ACL SETUSER limited on >secret ~kvf1:* +@all");
    snprintf(url, sizeof url, "redis://limited:secret@127.0.0.1:%d", server->port);
    kvfi_tier *all = open_tier(server->unix_url, "");
    kvfi_tier *tier = open_tier(url, "");
    say("ACL SETUSER limited -set");
    assert_int_equal(kvft_put(all, 1, 1000), KVF_WHY_NONE);
    assert_int_equal(kvft_put(tier, 2, 100000), KVF_WHY_SERVER);
    assert_int_equal(kvft_get(tier, 1, 1000), KVF_WHY_NONE);
    say("ACL SETUSER limited -get -getrange");
    assert_int_equal(kvft_get(tier, 1, 1000), KVF_WHY_SERVER);
    unsigned lines = 0;
    kvf_set_log(count_line, &lines, KVF_LOG_INFO);
    assert_int_equal(kvft_peek(tier, 1), KVF_WHY_SERVER);
    kvf_set_log(NULL, NULL, KVF_LOG_WARN);
    assert_int_equal(lines, 0); /* whoever asked is told, not the log */
    assert_int_equal(tier->disconnects, 0);
    say("ACL DELUSER limited"); /* which closes its connections, a moment later */
    kvft_await_said(server, "CLIENT LIST", "user=limited", 0);
    int64_t from = kvfi_sys->now_us();
    kvf_reason why = kvft_get(tier, 1, 1000);
    while (why == KVF_WHY_UNREACHABLE || why == KVF_WHY_BREAKER) {
        assert_true(ms_since(from) < KVFT_PATIENCE_MS);
        usleep(5000);
        why = kvft_get(tier, 1, 1000);
    }
    assert_int_equal(why, KVF_WHY_SERVER); /* the password is refused now */
    tier->ops->close(tier);
    all->ops->close(all);
}

/* The user may write all parts of a record but the one before the last. The first part, which makes the record visible,
 * is not sent before the server has taken the others: it would take that one, too. */
static void header_comes_last(void **state) {
    (void)state;
    enum { PART = 4096, PARTS = 4, LEN = (PARTS - 1) * PART + 1000 };
    char url[256], rules[2048];
    size_t len = (size_t)snprintf(rules, sizeof rules, "ACL SETUSER partly resetkeys");
    for (uint64_t part = 0; part < PARTS; part++) {
        if (part != PARTS - 1) {
            len += (size_t)snprintf(rules + len, sizeof rules - len, " ~%s", kvft_redis_key(1, part));
        }
    }
    say("ACL SETUSER partly on >secret ~* +@all");
    snprintf(url, sizeof url, "redis://partly:secret@127.0.0.1:%d", server->port);
    kvfi_tier *tier = open_tier(url, "part=4096"), *reader = open_tier(server->unix_url, "part=4096");
    say("%s", rules);
    assert_int_equal(kvft_put(tier, 1, LEN - KVFT_VALUE_EXTRA), KVF_WHY_SERVER);
    expect("DBSIZE", ":2");
    assert_int_equal(kvft_peek(reader, 1), KVF_WHY_ABSENT);
    assert_int_equal(kvft_put(reader, 1, LEN - KVFT_VALUE_EXTRA), KVF_WHY_NONE);
    expect("DBSIZE", ":4");
    assert_int_equal(kvft_get(reader, 1, LEN - KVFT_VALUE_EXTRA), KVF_WHY_NONE);
    say("ACL DELUSER partly");
    reader->ops->close(reader);
    tier->ops->close(tier);
}

/* ---- a failover behind a name: the old primary is a replica now, the name leads to the new one ---- */

static _Atomic int moving_host; /* the last number of 127.0.0.x that the name stands for */

static int resolve_moving(const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **out) {
    char numeric[16];
    if (strcmp(host, "cache.moving") != 0 || (hints->ai_flags & AI_NUMERICHOST) != 0) {
        return kvfi_sys_real.resolve(host, service, hints, out);
    }
    snprintf(numeric, sizeof numeric, "127.0.0.%d", moving_host);
    return kvfi_sys_real.resolve(numeric, service, hints, out);
}

static void name_moves(void **state) {
    (void)state;
    char port[16], url[96];
    snprintf(port, sizeof port, "%d", server->port);
    const char *const args[] = {"--bind", "127.0.0.2", "--port", port, NULL};
    kvft_server *second = kvft_server_start(args);
    kvfi_systable table = kvfi_sys_real;
    table.resolve = resolve_moving;
    kvfi_sys_table = &table;
    moving_host = 1;
    snprintf(url, sizeof url, "redis://cache.moving:%d", server->port);
    kvfi_tier *tier = open_tier(url, "");
    assert_int_equal(kvft_put(tier, 1, 100000), KVF_WHY_NONE);
    assert_int_equal(kvft_get(tier, 1, 100000), KVF_WHY_NONE);
    moving_host = 2;
    assert_int_equal(kvft_put(tier, 2, 100000), KVF_WHY_NONE); /* the old one still serves: nobody looks the name up */
    assert_int_equal(atoi(kvft_server_say(second, "DBSIZE") + 1), 0);
    say("REPLICAOF 127.0.0.2 %d", server->port);
    assert_int_equal(kvft_put(tier, 3, 100000), KVF_WHY_SERVER);
    int64_t from = kvfi_sys->now_us();
    while (kvft_put(tier, 3, 100000) != KVF_WHY_NONE) { /* saves that were refused are held back for a moment */
        assert_true(ms_since(from) < KVFT_PATIENCE_MS);
        usleep(5000);
    }
    assert_int_equal(atoi(kvft_server_say(second, "DBSIZE") + 1), 1);
    assert_int_equal(kvft_get(tier, 3, 100000), KVF_WHY_NONE);
    /* A session is tried again by itself. */
    char data[64] = {1};
    kvf_error err = {0};
    kvfi_part part = {.name = "keys", .data = {data, sizeof data}};
    say("REPLICAOF NO ONE");
    kvft_server_say(second, "REPLICAOF 127.0.0.1 1");
    moving_host = 1;
    if (tier->ops->session_put(tier, &err, "s", &part, 1, NULL, 60, kvfi_deadline(5000000)) != KVF_OK) {
        fail_msg("%s", err.what);
    }
    expect("EXISTS s", ":1");
    tier->ops->close(tier);
    kvfi_sys_table = &kvfi_sys_real;
    kvft_server_stop(second);
}

/* ---- time to live ---- */

static long long ttl_ms(const char *key) {
    char command[300];
    snprintf(command, sizeof command, "PTTL %s", key);
    const char *answer = kvft_server_say(server, command);
    return answer[0] == ':' ? atoll(answer + 1) : -99;
}

static void ttl_is_set(void **state) {
    (void)state;
    kvfi_tier *tier = open_tier(server->unix_url, "ttl=1000&part=64K");
    kvfi_tier *forever = open_tier(server->unix_url, "ttl=0&prefix=other");
    long long first = 0;
    bool differ = false;
    for (uint64_t seed = 1; seed < 20; seed++) {
        assert_int_equal(kvft_put(tier, seed, seed == 1 ? 200000 : 100), KVF_WHY_NONE);
        long long ms = ttl_ms(kvft_redis_key(seed, 0));
        assert_in_range(ms, 890000, 1100000);
        first = seed == 1 ? ms : first;
        differ = differ || ms - first > 20000 || first - ms > 20000;
    }
    assert_true(differ); /* spread, so that they do not all expire at once */
    assert_in_range(ttl_ms(kvft_redis_key(1, 2)), 890000, 1100000);
    assert_int_equal(kvft_put(forever, 1, 100), KVF_WHY_NONE);
    assert_int_equal(ttl_ms(kvft_redis_key(99, 0)), -2);
    kvfi_name name;
    kvfi_addr addr;
    kvft_addr(&addr, 1);
    kvfi_name_of(&name, "other", &addr, 0);
    assert_int_equal(ttl_ms(name.text), -1);
    tier->ops->close(tier);
    forever->ops->close(forever);
}

/* The records of kvft_value were stored in 2023: any hit on them is worth a refresh. It is sent behind the load, and
 * what it answers is read before the next one. */
static void ttl_is_refreshed(void **state) {
    (void)state;
    kvfi_tier *tier = open_tier(server->unix_url, "ttl=1000&part=64K&conns=1");
    assert_int_equal(kvft_put(tier, 1, 300000), KVF_WHY_NONE);
    for (uint64_t part = 0; part < 5; part++) {
        say("PEXPIRE %s 50000", kvft_redis_key(1, part));
    }
    for (int round = 0; round < 3; round++) {
        assert_int_equal(kvft_get(tier, 1, 300000), KVF_WHY_NONE);
    }
    for (uint64_t part = 0; part < 5; part++) {
        assert_in_range(ttl_ms(kvft_redis_key(1, part)), 890000, 1100000);
    }
    assert_int_equal(tier->disconnects, 0);
    tier->ops->close(tier);
}

/* A record that was stored a moment ago is not refreshed. */
static void ttl_of_fresh_records_stays(void **state) {
    (void)state;
    kvfi_tier *tier = open_tier(server->unix_url, "ttl=1000");
    kvft_value v;
    kvft_value_init(&v, 1, 1000);
    kvft_value_seal(&v, kvfi_sys->wall_us() / 1000000 - 100);
    kvfi_feed feed = {.items = &v.item, .num = 1, .limit = 1, .deadline_us = kvfi_deadline(10000000)};
    tier->ops->put(tier, &feed);
    say("PEXPIRE %s 50000", kvft_redis_key(1, 0));
    feed.next = 0;
    tier->ops->get(tier, &feed);
    assert_int_equal(v.item.status, KVF_OK);
    assert_int_equal(kvft_peek(tier, 1), KVF_WHY_NONE);
    assert_in_range(ttl_ms(kvft_redis_key(1, 0)), 1, 50000);
    kvft_value_cleanup(&v);
    tier->ops->close(tier);
}

/* ---- a server that hangs, dies, comes back ---- */

static kvf_reason get_within(kvfi_tier *tier, uint64_t seed, size_t payload_bytes, int64_t budget_us) {
    kvft_value v;
    kvft_value_init(&v, seed, payload_bytes);
    kvfi_feed feed = {
        .items = &v.item, .num = 1, .limit = 1, .deadline_us = kvfi_deadline(budget_us), .check = kvft_value_check};
    tier->ops->get(tier, &feed);
    kvf_reason why = v.item.status == KVF_OK ? KVF_WHY_NONE : v.item.why;
    kvft_value_cleanup(&v);
    return why;
}

/* With a short stall_ms= a server may seem silent beside other programs: it is asked until it answers. */
static void at_last(kvf_reason ask(kvfi_tier *, uint64_t, size_t), kvfi_tier *tier, uint64_t seed, size_t bytes) {
    int64_t from = kvfi_sys->now_us();
    while (ask(tier, seed, bytes) != KVF_WHY_NONE) {
        assert_true(ms_since(from) < KVFT_PATIENCE_MS);
        usleep(10000);
    }
}

/* No progress within stall_ms ends the connection; while the server hangs, not every operation pays for finding that
 * out. */
static void server_hangs(void **state) {
    (void)state;
    kvfi_tier *tier = open_tier(server->unix_url, "stall_ms=200&connect_ms=300");
    at_last(kvft_put, tier, 1, 1000000);
    at_last(kvft_get, tier, 1, 1000000);
    kvft_server_signal(server, SIGSTOP);
    int64_t from = kvfi_sys->now_us();
    assert_int_equal(get_within(tier, 1, 1000000, 50000), KVF_WHY_BUDGET);
    assert_true(ms_since(from) >= 45);
    from = kvfi_sys->now_us();
    kvf_reason why = get_within(tier, 1, 1000000, 10000000);
    assert_int_equal(why, KVF_WHY_STALLED);
    assert_true(ms_since(from) >= 150);
    /* Where the machine is busy the breaker may be half open again by then. Peeks have a connection of their own, and
     * find out for themselves. */
    for (kvf_reason now = why; now != KVF_WHY_BREAKER; now = get_within(tier, 1, 1000000, 10000000)) {
        assert_int_equal(now, KVF_WHY_STALLED);
    }
    for (kvf_reason now = KVF_WHY_STALLED; now != KVF_WHY_BREAKER; now = kvft_peek(tier, 1)) {
        assert_int_equal(now, KVF_WHY_STALLED);
    }
    kvft_server_signal(server, SIGCONT);
    at_last(kvft_get, tier, 1, 1000000);
    at_last(kvft_put, tier, 2, 1000000);
    tier->ops->close(tier);
}

/* A connection that stalls tells as much about its server as one that can't be opened: the next caller is told at
 * once. */
static void a_stall_is_told(void **state) {
    (void)state;
    kvfi_tier *tier = open_tier(server->unix_url, "stall_ms=100&conns=1&ttl=0"); /* no refresh is owed */
    at_last(kvft_put, tier, 1, 1000);
    at_last(kvft_get, tier, 1, 1000);
    uint64_t connects = tier->connects;
    kvft_server_signal(server, SIGSTOP);
    kvf_reason first = get_within(tier, 1, 1000, 20000000);
    uint64_t anew = tier->connects - connects;
    kvf_reason next = get_within(tier, 1, 1000, 20000000);
    kvft_server_signal(server, SIGCONT);
    assert_int_equal(anew, 1); /* another one showed that it was not the connection */
    assert_int_equal(first, KVF_WHY_STALLED);
    assert_int_equal(next, KVF_WHY_BREAKER);
    tier->ops->close(tier);
}

typedef struct meddler {
    int sig; /* SIGSTOP, or SIGKILL */
    unsigned after_us;
} meddler;

static void *meddle(void *arg) {
    const meddler *m = arg;
    usleep(m->after_us);
    kvft_server_signal(server, m->sig);
    return NULL;
}

/* In the middle of a load of 64 MiB, at many different moments. What was a hit is right; the rest is a miss, in
 * time. */
static void stopped_mid_load(void **state) {
    (void)state;
    enum { BLOCKS = 64, BYTES = 1 << 20 };
    kvfi_tier *tier = open_tier(server->unix_url, "stall_ms=100&connect_ms=200");
    kvft_value *values = calloc(BLOCKS, sizeof *values);
    kvfi_item *items = calloc(BLOCKS, sizeof *items);
    for (size_t i = 0; i < BLOCKS; i++) {
        at_last(kvft_put, tier, 300 + i, BYTES);
        kvft_value_init(&values[i], 300 + i, BYTES);
    }
    uint64_t random = 5;
    for (int round = 0; round < 10; round++) {
        pthread_t thread;
        meddler m = {.sig = SIGSTOP, .after_us = (unsigned)(kvft_random(&random) % 30000)};
        for (size_t i = 0; i < BLOCKS; i++) {
            items[i] = values[i].item;
            memset(values[i].bytes, 0, items[i].bytes);
        }
        kvfi_feed feed = {.items = items,
                          .num = BLOCKS,
                          .limit = BLOCKS,
                          .deadline_us = kvfi_deadline(400000),
                          .prefix = true,
                          .check = kvft_value_check};
        assert_int_equal(pthread_create(&thread, NULL, meddle, &m), 0);
        int64_t from = kvfi_sys->now_us();
        tier->ops->get(tier, &feed);
        assert_true(ms_since(from) < KVFT_PATIENCE_MS); /* the server stands still until all is over */
        pthread_join(thread, NULL);
        bool gap = false;
        for (size_t i = 0; i < BLOCKS; i++) {
            gap = gap || items[i].status != KVF_OK;
            if (items[i].status == KVF_OK) {
                assert_int_equal(kvft_value_check(&items[i]), KVF_WHY_NONE);
            } else if (items[i].status == KVF_MISS) {
                assert_true(items[i].why == KVF_WHY_STALLED || items[i].why == KVF_WHY_BUDGET ||
                            items[i].why == KVF_WHY_BREAKER);
            }
        }
        kvft_server_signal(server, SIGCONT);
        usleep(300000); /* the breaker closes */
        (void)gap;
    }
    at_last(kvft_get, tier, 300, BYTES);
    for (size_t i = 0; i < BLOCKS; i++) {
        kvft_value_cleanup(&values[i]);
    }
    free(values);
    free(items);
    tier->ops->close(tier);
}

static void killed_and_back(void **state) {
    (void)state;
    kvfi_tier *tier = open_tier(server->tcp_url, "");
    uint64_t random = 9;
    for (int round = 0; round < 5; round++) {
        pthread_t thread;
        meddler m = {.sig = SIGKILL, .after_us = (unsigned)(kvft_random(&random) % 20000)};
        for (uint64_t i = 0; i < 8; i++) {
            kvf_reason why = kvft_put(tier, 500 + i, 1 << 20);
            assert_true(why == KVF_WHY_NONE || why == KVF_WHY_BREAKER);
        }
        assert_int_equal(pthread_create(&thread, NULL, meddle, &m), 0);
        for (uint64_t i = 0; i < 30; i++) {
            kvf_reason why = kvft_get(tier, 500 + i % 8, 1 << 20); /* aborts on wrong bytes */
            assert_true(why == KVF_WHY_NONE || why == KVF_WHY_UNREACHABLE || why == KVF_WHY_BREAKER ||
                        why == KVF_WHY_ABSENT);
        }
        pthread_join(thread, NULL);
        kvft_server_restart(server);
        int64_t from = kvfi_sys->now_us();
        while (kvft_put(tier, 1, 1000) != KVF_WHY_NONE) {
            assert_true(ms_since(from) < KVFT_PATIENCE_MS);
            usleep(5000);
        }
        assert_int_equal(kvft_get(tier, 1, 1000), KVF_WHY_NONE);
    }
    tier->ops->close(tier);
}

/* A server that was restarted between two operations: the connections in the lanes are dead, and nobody notices. */
static void stale_connections(void **state) {
    (void)state;
    kvfi_tier *tier = open_tier(server->unix_url, "");
    assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
    assert_int_equal(kvft_get(tier, 1, 1000), KVF_WHY_NONE);
    kvft_server_restart(server);
    assert_int_equal(kvft_peek(tier, 1), KVF_WHY_ABSENT);
    assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
    assert_int_equal(kvft_get(tier, 1, 1000), KVF_WHY_NONE);
    say("CLIENT KILL TYPE normal");
    kvft_await_said(server, "CLIENT LIST", "name=kvferry", 0); /* the server closes them a moment later */
    assert_int_equal(kvft_get(tier, 1, 1000), KVF_WHY_NONE);
    assert_int_equal(kvft_peek(tier, 1), KVF_WHY_NONE);
    tier->ops->close(tier);
}

#define SHUT_MS 50 /* less than a breaker stays open at first */

/* A dead server costs a connect once in a while, not for every operation; and what waits its turn is told so. */
static void dead_server_is_cheap(void **state) {
    (void)state;
    kvfi_tier *tier = open_tier(server->unix_url, "connect_ms=500");
    kvft_server_kill(server);
    int64_t from = kvfi_sys->now_us();
    size_t broken = 0, breaker = 0;
    for (int i = 0; i < 2000; i++) {
        kvf_reason why = kvft_peek(tier, 1);
        broken += why == KVF_WHY_UNREACHABLE;
        breaker += why == KVF_WHY_BREAKER;
    }
    assert_int_equal(broken + breaker, 2000);
    assert_in_range(broken, 1, 5 + ms_since(from) / SHUT_MS);
    kvft_server_restart(server);
    tier->ops->close(tier);
}

/* The deadline has passed already, or the feed is cancelled: nothing is tried, nothing hangs. */
static void nothing_to_do(void **state) {
    (void)state;
    kvfi_tier *tier = open_tier(server->unix_url, "");
    atomic_bool cancelled = true;
    kvft_value v;
    kvft_value_init(&v, 1, 1000);
    kvfi_feed feed = {.items = &v.item, .num = 1, .limit = 1, .deadline_us = 0, .check = kvft_value_check};
    tier->ops->get(tier, &feed);
    tier->ops->put(tier, &feed);
    assert_int_equal(v.item.status, KVF_AGAIN);
    feed.deadline_us = kvfi_deadline(10000000);
    feed.cancelled = &cancelled;
    feed.next = 0;
    tier->ops->get(tier, &feed);
    assert_int_equal(v.item.status, KVF_AGAIN);
    kvft_value_cleanup(&v);
    tier->ops->close(tier);
}

static int set_up(void **state) {
    (void)state;
    kvft_server_use_acl(true);
    server = kvft_server_start(NULL);
    kvft_server_use_acl(false);
    return 0;
}

static int flush(void **state) {
    (void)state;
    expect("FLUSHALL SYNC", "+OK");
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    kvft_server_stop(server);
    return 0;
}

#define LIVE(name) cmocka_unit_test_setup(name, flush)

int main(void) {
    const struct CMUnitTest tests[] = {
        LIVE(sizes_unix),
        LIVE(sizes_tcp),
        LIVE(sizes_ipv6),
        LIVE(by_name),
        LIVE(many_parts),
        LIVE(header_only),
        LIVE(threads_share_a_feed),
        LIVE(prefix_ends_at_a_gap),
        LIVE(peek_many),
        LIVE(foreign_values),
        LIVE(other_length),
        LIVE(out_of_memory),
        LIVE(read_only_replica),
        LIVE(no_permission),
        LIVE(header_comes_last),
        LIVE(name_moves),
        LIVE(ttl_is_set),
        LIVE(ttl_is_refreshed),
        LIVE(ttl_of_fresh_records_stays),
        LIVE(server_hangs),
        LIVE(a_stall_is_told),
        LIVE(stopped_mid_load),
        LIVE(killed_and_back),
        LIVE(stale_connections),
        LIVE(dead_server_is_cheap),
        LIVE(nothing_to_do),
    };
    if (set_up(NULL) != 0 || server == NULL) {
        fprintf(stderr, "no redis-server is installed: not run\n");
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, tear_down);
}
