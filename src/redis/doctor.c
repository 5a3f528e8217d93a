/* SPDX-License-Identifier: Apache-2.0
 *
 * What is wrong with a server, as a cache for large values, and what mends it; and the few numbers of `info`.
 * docs/stores.md says why each of them matters.
 */
#include <stdarg.h>
#include <stdio.h>

#include "redis/redis.h"

#define INFO_BYTES 24576u
#define BUDGET_US  5000000

typedef struct exam {
    kvfi_redis *tier;
    kvfi_talk talk;
    kvf_finding_fn found;
    void *ctx;
    size_t info_len;
    char where[280]; /* which of several servers; "" = the one */
    bool config;     /* CONFIG GET is allowed */
    unsigned num_bad;
    char value[256]; /* of the last info_text or config_text */
    char info[INFO_BYTES];
} exam;

/* ---- findings ---- */

static void say(exam *e, kvf_severity severity, const char *code, const char *mend, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

static void say(exam *e, kvf_severity severity, const char *code, const char *mend, const char *format, ...) {
    char what[700];
    va_list args;
    va_start(args, format);
    size_t len = (size_t)snprintf(what, sizeof what, "%s", e->where);
    vsnprintf(what + len, sizeof what - len, format, args);
    va_end(args);
    e->num_bad += severity >= KVF_WARNING;
    kvf_finding finding = {.severity = severity, .code = code, .what = what, .mend = mend};
    e->found(e->ctx, &finding);
}

/* ---- asking ---- */

/* One field of INFO; "" when there is none. */
static const char *info_text(exam *e, const char *name) {
    size_t len = strlen(name);
    const char *end = e->info + e->info_len;
    e->value[0] = '\0';
    for (const char *line = e->info; line < end;) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        stop = stop == NULL ? end : stop;
        if ((size_t)(stop - line) > len && memcmp(line, name, len) == 0 && line[len] == ':') {
            size_t size = (size_t)(stop - line) - len - 1;
            size -= size > 0 && line[len + size] == '\r';
            snprintf(e->value, sizeof e->value, "%.*s", (int)(size < 255 ? size : 255), line + len + 1);
            break;
        }
        line = stop + 1;
    }
    return e->value;
}

static bool info_is(exam *e, const char *name, const char *value) {
    return strcmp(info_text(e, name), value) == 0;
}

static bool info_number(exam *e, const char *name, uint64_t *out) {
    const char *text = info_text(e, name);
    return kvfi_parse_u64(out, text, strlen(text));
}

static kvf_status read_info(exam *e) {
    kvfi_reply reply;
    KVFI_TRY(kvfi_talk_say(&e->talk, "INFO", NULL));
    KVFI_TRY(kvfi_talk_hear(&e->talk, &reply));
    if (reply.kind != KVFI_RESP_BULK) {
        return kvfi_talk_refused(&e->talk, &reply, "INFO");
    }
    e->info_len = reply.len < INFO_BYTES ? reply.len : INFO_BYTES;
    memcpy(e->info, reply.text, e->info_len);
    return KVF_OK;
}

/* One setting of the server; "" when it has none of that name or does not tell. */
static const char *config_text(exam *e, const char *name) {
    kvfi_reply reply = {.last = false};
    unsigned num = 0;
    e->value[0] = '\0';
    if (!e->config || kvfi_talk_say(&e->talk, "CONFIG", "GET", name, NULL) != KVF_OK) {
        return e->value;
    }
    while (!reply.last) {
        if (kvfi_talk_hear(&e->talk, &reply) != KVF_OK) {
            e->config = false;
            return e->value;
        }
        if (reply.kind == KVFI_RESP_ERROR) {
            e->config = false;
        }
        if (reply.kind == KVFI_RESP_BULK && ++num == 2) {
            snprintf(e->value, sizeof e->value, "%.*s", (int)(reply.len < 255 ? reply.len : 255), reply.text);
        }
    }
    return e->value;
}

static bool config_number(exam *e, const char *name, uint64_t *out) {
    const char *text = config_text(e, name);
    return kvfi_parse_u64(out, text, strlen(text));
}

/* ---- examining ---- */

/* What all our connections can have in flight at once. */
static uint64_t in_flight(const kvfi_redis *tier) {
    uint64_t each = tier->conf.window > tier->conf.part ? tier->conf.window : tier->conf.part;
    return 2 * each * tier->conf.conns;
}

static void examine_memory(exam *e) {
    uint64_t max = 0, samples = 0;
    char policy[64];
    bool known = info_number(e, "maxmemory", &max);
    snprintf(policy, sizeof policy, "%.63s", info_text(e, "maxmemory_policy"));
    if (known && max == 0) {
        say(e, KVF_WARNING, "maxmemory", "CONFIG SET maxmemory <80% of RAM>, and the same in redis.conf",
            "the server's memory has no bound: a cache grows until the system kills the server");
    } else if (known && max < 32 * e->tier->conf.part * e->tier->conf.conns) {
        say(e, KVF_WARNING, "maxmemory-small", "raise maxmemory, or lower part= and conns= in the URL",
            "maxmemory is %llu bytes: buffers of large values alone can reach that, and then the server refuses or evicts (redis#11830)",
            (unsigned long long)max);
    }
    if (strcmp(policy, "noeviction") == 0) {
        say(e, KVF_FATAL, "noeviction",
            "CONFIG SET maxmemory-policy allkeys-lru (volatile-lru when the server holds other data)",
            "the server evicts nothing: once it is full, every save fails");
    } else if (strncmp(policy, "volatile-", 9) == 0 && e->tier->conf.ttl_s == 0) {
        say(e, KVF_FATAL, "volatile-without-ttl",
            "remove ttl=0 from the URL, or CONFIG SET maxmemory-policy allkeys-lru",
            "the policy %s evicts only keys with a time to live, and ttl=0 gives them none", policy);
    } else if (strstr(policy, "-lrm") != NULL) {
        say(e, KVF_WARNING, "lrm", "CONFIG SET maxmemory-policy allkeys-lru",
            "the policy %s does not count reads: what is used most is evicted like the rest", policy);
    }
    if (strstr(policy, "-lru") != NULL && config_number(e, "maxmemory-samples", &samples) && samples < 10) {
        say(e, KVF_NOTE, "samples", "CONFIG SET maxmemory-samples 10",
            "the server evicts the oldest of %llu candidates: with ten, more prefixes stay whole",
            (unsigned long long)samples);
    }
    if (!info_is(e, "mem_allocator", "") && strncmp(info_text(e, "mem_allocator"), "jemalloc", 8) != 0) {
        say(e, KVF_NOTE, "allocator", "", "the server's allocator is %s, not jemalloc: memory may fragment", e->value);
    }
}

/* normal 0 0 0 slave ... : the hard limit of normal clients. */
static void examine_limits(exam *e) {
    uint64_t number = 0;
    unsigned long long hard = 0;
    unsigned long long need = (unsigned long long)in_flight(e->tier);
    if (sscanf(config_text(e, "client-output-buffer-limit"), "normal %llu", &hard) == 1 && hard > 0 && hard < need) {
        say(e, KVF_FATAL, "output-buffer-limit", "CONFIG SET client-output-buffer-limit \"normal 0 0 0\"",
            "the server cuts a client off at %llu bytes of answers; a load may have %llu on the way", hard, need);
    }
    if (config_number(e, "maxmemory-clients", &number) && number > 0 && number < 4 * need) {
        say(e, KVF_WARNING, "maxmemory-clients", "CONFIG SET maxmemory-clients 0",
            "all clients together get %llu bytes of buffers; loads and saves may need %llu", (unsigned long long)number,
            4 * need);
    }
    if (config_number(e, "proto-max-bulk-len", &number) && number > 0 && number < e->tier->conf.part) {
        say(e, KVF_FATAL, "proto-max-bulk-len", "CONFIG SET proto-max-bulk-len 512mb, or a smaller part= in the URL",
            "the server takes values up to %llu bytes; part= is %llu", (unsigned long long)number,
            (unsigned long long)e->tier->conf.part);
    }
}

static void examine_disk(exam *e) {
    uint64_t backlog = 0, replicas = 0;
    if (config_text(e, "save")[0] != '\0') {
        say(e, KVF_WARNING, "snapshots", "CONFIG SET save \"\"",
            "the server writes snapshots (save \"%s\"): a fork and its copies for data that can be computed again",
            e->value);
    }
    if (info_is(e, "aof_enabled", "1")) {
        say(e, KVF_WARNING, "aof", "CONFIG SET appendonly no", "the server logs every value to disk (appendonly)");
    }
    if (info_is(e, "rdb_last_bgsave_status", "err") &&
        strcmp(config_text(e, "stop-writes-on-bgsave-error"), "no") != 0) {
        say(e, KVF_FATAL, "bgsave-failed", "CONFIG SET save \"\" and CONFIG SET stop-writes-on-bgsave-error no",
            "the last snapshot failed, and the server refuses writes because of it (MISCONF)");
    }
    if (info_number(e, "connected_slaves", &replicas) && replicas > 0 &&
        info_number(e, "repl_backlog_size", &backlog) && backlog < ((uint64_t)256 << 20)) {
        say(e, KVF_WARNING, "replica-backlog",
            "no replicas for a cache, or CONFIG SET repl-backlog-size 512mb and CONFIG SET client-output-buffer-limit \"replica 2gb 1gb 60\"",
            "%llu replicas with a backlog of %llu bytes: a few seconds of saves start a full resynchronisation",
            (unsigned long long)replicas, (unsigned long long)backlog);
    }
}

static void examine_state(exam *e) {
    if (info_is(e, "role", "slave")) {
        say(e, KVF_FATAL, "replica", "name the primary in the URL", "the server is a replica: it takes no saves");
    }
    if (info_is(e, "loading", "1")) {
        say(e, KVF_WARNING, "loading", "",
            "the server is loading its data from disk and answers nothing until it is done");
    }
    if (info_is(e, "redis_mode", "cluster") && e->tier->conf.kind != KVFI_REDIS_CLUSTER) {
        say(e, KVF_WARNING, "cluster", "name the nodes as redis+cluster://, or use a single server",
            "the server is a node of a Cluster: keys of other slots are refused");
    }
    uint64_t number = 0;
    if (config_number(e, "io-threads", &number) && number == 1 && e->tier->conf.server.path == NULL) {
        say(e, KVF_NOTE, "io-threads", "io-threads 4 in redis.conf, on a host with cores to spare",
            "one thread serves all connections (io-threads 1)");
    }
}

/* A key of our own, on a slot that the server has. */
static void name_key(const exam *e, char *key, size_t cap) {
    unsigned i = 0;
    do {
        snprintf(key, cap, i == 0 ? "%s:doctor" : "%s:doctor{%u}", e->tier->conf.prefix, i);
    } while (e->tier->topology != NULL && i++ < 10000 &&
             kvfi_topology_node(e->tier->topology, kvfi_slot_of(key, strlen(key))) != e->talk.node);
}

/* Every command of the hot path, on a key of its own. */
static void examine_permissions(exam *e) {
    static const char *const names[] = {"SET", "GET", "GETRANGE", "PEXPIRE", "UNLINK"};
    char key[KVFI_REDIS_MAX_PREFIX + 24];
    name_key(e, key, sizeof key);
    if (kvfi_talk_say(&e->talk, "SET", key, "1", "PX", "1000", NULL) != KVF_OK ||
        kvfi_talk_say(&e->talk, "GET", key, NULL) != KVF_OK ||
        kvfi_talk_say(&e->talk, "GETRANGE", key, "0", "127", NULL) != KVF_OK ||
        kvfi_talk_say(&e->talk, "PEXPIRE", key, "1000", NULL) != KVF_OK ||
        kvfi_talk_say(&e->talk, "UNLINK", key, NULL) != KVF_OK) {
        return;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        kvfi_reply reply;
        char mend[64];
        if (kvfi_talk_hear(&e->talk, &reply) != KVF_OK) {
            return;
        }
        if (reply.kind != KVFI_RESP_ERROR) {
            continue;
        }
        bool perm = kvfi_reply_says(&reply, "NOPERM");
        snprintf(mend, sizeof mend, "ACL SETUSER <user> +%s ~%.24s:*", names[i], e->tier->conf.prefix);
        say(e, KVF_FATAL, perm ? "noperm" : "refused", perm ? mend : "", "%s is refused: %s", names[i],
            e->talk.conn->said);
    }
}

static void examine_version(exam *e) {
    char version[64];
    snprintf(version, sizeof version, "%.63s", info_text(e, "redis_version"));
    unsigned major = 0;
    if (sscanf(version, "%u", &major) == 1 && major < 6) {
        say(e, KVF_WARNING, "version", "use Redis 6 or later, or Valkey",
            "the server is Redis %s: not tested with kvferry", version);
    } else {
        say(e, KVF_FINE, "server", "", "%s %s",
            info_is(e, "server_name", "valkey") ? "Valkey, compatible with Redis" : "Redis", version);
    }
}

static void examine(exam *e, kvf_error *err) {
    kvf_status status = read_info(e);
    if (status != KVF_OK) {
        say(e, status == KVF_CONFIG ? KVF_WARNING : KVF_FATAL, "no-info", "ACL SETUSER <user> +info", "%s", err->what);
        if (!kvfi_conn_is_open(e->talk.conn)) {
            return;
        }
    }
    e->config = true;
    (void)config_text(e, "maxmemory");
    if (!e->config) {
        say(e, KVF_NOTE, "no-config", "ACL SETUSER <user> +config|get",
            "the server does not show its settings: some checks are left out");
    }
    if (status == KVF_OK) {
        examine_version(e);
        examine_state(e);
        examine_memory(e);
        examine_disk(e);
    }
    examine_limits(e);
    examine_permissions(e);
}

static void examine_node(exam *e, kvfi_node *node) {
    kvf_error err = {.status = KVF_OK};
    kvf_status status = kvfi_talk_begin_on(&e->talk, e->tier, &err, node, KVFI_LANE_LOOKUP, kvfi_deadline(BUDGET_US));
    if (status != KVF_OK) {
        say(e, KVF_FATAL, status == KVF_CONFIG ? "refused" : "unreachable",
            status == KVF_CONFIG ? ""
                                 : "is the server running, and are host and port, or the path of the socket, right?",
            "%s", err.what);
        return;
    }
    examine(e, &err);
    kvfi_talk_end(&e->talk);
}

void kvfi_redis_doctor(kvfi_tier *base, kvf_finding_fn found, void *ctx) {
    exam *e = kvfi_alloc_zero(1, sizeof *e);
    kvfi_node *nodes[KVFI_MAX_NODES];
    if (e == NULL) {
        kvf_finding finding = {
            .severity = KVF_FATAL, .code = "memory", .what = "no memory for the examination", .mend = ""};
        found(ctx, &finding);
        return;
    }
    e->tier = kvfi_redis_of(base);
    e->found = found;
    e->ctx = ctx;
    size_t num = kvfi_redis_nodes(e->tier, nodes, KVFI_MAX_NODES);
    if (num == 0) {
        kvf_error trouble = kvfi_topology_trouble(e->tier->topology);
        say(e, KVF_FATAL, "unreachable", "are the servers running, and are hosts and ports right?",
            "no server can be reached: %s", trouble.what);
    }
    for (size_t i = 0; i < num; i++) {
        if (e->tier->topology != NULL) {
            snprintf(e->where, sizeof e->where, "%s:%u: ", nodes[i]->server.host, nodes[i]->server.port);
        }
        examine_node(e, nodes[i]);
    }
    e->where[0] = '\0';
    if (e->num_bad == 0) {
        say(e, KVF_FINE, "fine", "", "nothing to mend");
    }
    kvfi_free(e);
}

/* ---- info ---- */

/* Adds what one server says. A sum of which a part is not known is not known. */
static bool add_info(exam *e, kvfi_node *node, kvf_tier_info *out) {
    uint64_t number = 0;
    int64_t deadline_us = kvfi_deadline((int64_t)e->tier->conf.connect_ms * 1000);
    if (kvfi_talk_begin_on(&e->talk, e->tier, NULL, node, KVFI_LANE_LOOKUP, deadline_us) != KVF_OK) {
        return false;
    }
    bool read = read_info(e) == KVF_OK;
    bool used = read && out->used_bytes >= 0 && info_number(e, "used_memory", &number);
    out->used_bytes = used ? out->used_bytes + (int64_t)number : -1;
    bool bounded = read && out->max_bytes >= 0 && info_number(e, "maxmemory", &number) && number > 0;
    out->max_bytes = bounded ? out->max_bytes + (int64_t)number : -1;
    kvfi_talk_end(&e->talk);
    return true;
}

/* Before anybody is asked: asking is a try, too. */
static void count_breakers(kvfi_redis *tier, kvf_tier_info *out) {
    kvfi_node *nodes[KVFI_MAX_NODES];
    size_t num = kvfi_redis_nodes(tier, nodes, KVFI_MAX_NODES);
    for (size_t i = 0; i < num; i++) {
        kvfi_breaker_state connections, saves;
        kvfi_node_states(nodes[i], &connections, &saves);
        out->num_servers++;
        out->num_open += connections == KVFI_BREAKER_OPEN;
        out->num_half_open += connections == KVFI_BREAKER_HALF_OPEN;
        out->num_refusing += saves != KVFI_BREAKER_CLOSED;
    }
}

void kvfi_redis_info(kvfi_tier *base, kvf_tier_info *out) {
    exam *e = kvfi_alloc_zero(1, sizeof *e);
    kvfi_node *nodes[KVFI_MAX_NODES];
    count_breakers(kvfi_redis_of(base), out);
    kvf_tier_info sum = *out;
    out->reachable = 0;
    if (e == NULL) {
        return;
    }
    e->tier = kvfi_redis_of(base);
    sum.used_bytes = sum.max_bytes = 0;
    size_t num = kvfi_redis_nodes(e->tier, nodes, KVFI_MAX_NODES);
    for (size_t i = 0; i < num; i++) {
        if (add_info(e, nodes[i], &sum)) {
            out->reachable = 1;
            out->used_bytes = sum.used_bytes;
            out->max_bytes = sum.max_bytes;
        }
    }
    kvfi_free(e);
}
