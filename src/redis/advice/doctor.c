/* SPDX-License-Identifier: Apache-2.0
 *
 * Finds what is wrong with a server as a cache for large values, and how to fix it (rules.h); and the few numbers of
 * `info`.
 */
#include <stdarg.h>
#include <stdio.h>

#include "redis/advice/advice.h"
#include "redis/advice/mend.h"
#include "redis/advice/rules.h"

#define BUDGET_US 5000000

typedef struct exam {
    kvfi_redis *tier;
    kvfi_talk talk;
    kvf_finding_fn found;
    void *ctx;
    char where[280]; /* which of several servers; "" = the only one */
    unsigned num_bad;
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

static void say_finding(void *ctx, const kvf_finding *finding) {
    say(ctx, finding->severity, finding->code, finding->mend, "%s", finding->what);
}

/* ---- examining ---- */

/* No connection, or one that ended: distinguishes a silent server from an absent one. */
static void say_away(exam *e, const char *what) {
    bool early = e->talk.why == KVF_WHY_BREAKER || e->talk.why == KVF_WHY_BUDGET;
    bool stalled = (early ? kvfi_node_trouble(e->talk.node) : e->talk.why) == KVF_WHY_STALLED;
    say(e, KVF_FATAL, stalled ? "stalled" : "unreachable",
        stalled ? "is the server, or its host, stopped or overloaded? If it is only far away, raise connect_ms= and "
                  "stall_ms="
                : "is the server running, and are host and port, or the path of the socket, right?",
        "%s", what);
}

/* A key of ours, on a slot that the server has. */
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
        char mend[KVFI_MEND_BYTES], grant[80];
        if (kvfi_talk_hear(&e->talk, &reply) != KVF_OK) {
            return;
        }
        if (reply.kind != KVFI_RESP_ERROR) {
            continue;
        }
        bool perm = kvfi_reply_says(&reply, "NOPERM");
        snprintf(grant, sizeof grant, "[ACL SETUSER @ +%s '~%.24s:*']", names[i], e->tier->conf.prefix);
        kvfi_mend_write(mend, grant, &e->tier->conf, &e->talk.node->server, true);
        say(e, KVF_FATAL, perm ? "noperm" : "refused", perm ? mend : "", "%s is refused: %s", names[i],
            e->talk.conn->said);
    }
}

static void examine(exam *e, kvf_error *err) {
    kvfi_facts facts;
    kvfi_verdict verdict;
    if (kvfi_facts_ask(&e->talk, &facts, true) != KVF_OK || kvfi_facts_hear(&e->talk, &facts) != KVF_OK) {
        say_away(e, err->what);
        return;
    }
    kvfi_facts_look_around(&facts, &e->talk.node->server);
    if (facts.info) {
        say(e, KVF_FINE, "server", "", "%s %s",
            strcmp(facts.name, "valkey") == 0 ? "Valkey, compatible with Redis" : "Redis", facts.version);
    }
    if (e->tier->conf.name[0] != '\0' && !kvfi_node_answers(e->talk.node, KVFI_PROBE_NAME)) {
        char mend[KVFI_MEND_BYTES];
        kvfi_mend_write(mend, "[ACL SETUSER @ '+client|setname'], or name= in the URL", &e->tier->conf,
                        &e->talk.node->server, true);
        say(e, KVF_NOTE, "no-name", mend,
            "CLIENT SETNAME is not answered: our connections have no name in CLIENT LIST");
    }
    kvfi_rules_judge(&verdict, &facts, &e->tier->asked, &e->talk.node->server, say_finding, e);
    examine_permissions(e);
}

static void examine_node(exam *e, kvfi_node *node) {
    kvf_error err = {.status = KVF_OK};
    kvf_status status = kvfi_talk_begin_on(&e->talk, e->tier, &err, node, KVFI_LANE_LOOKUP, kvfi_deadline(BUDGET_US));
    if (status == KVF_CONFIG) {
        say(e, KVF_FATAL, "refused", "", "%s", err.what);
        return;
    }
    if (status != KVF_OK) {
        say_away(e, err.what);
        return;
    }
    examine(e, &err);
    kvfi_talk_end(&e->talk);
}

void kvfi_redis_doctor(kvfi_tier *base, kvf_finding_fn found, void *ctx) {
    exam e = {.tier = kvfi_redis_of(base), .found = found, .ctx = ctx};
    kvfi_node *nodes[KVFI_MAX_NODES];
    size_t num = kvfi_redis_nodes(e.tier, nodes, KVFI_MAX_NODES);
    if (num == 0) {
        kvf_error trouble = kvfi_topology_trouble(e.tier->topology);
        say(&e, KVF_FATAL, "unreachable", "are the servers running, and are hosts and ports right?",
            "no server can be reached: %s", trouble.what);
    }
    for (size_t i = 0; i < num; i++) {
        if (e.tier->topology != NULL) {
            snprintf(e.where, sizeof e.where, "%s:%u: ", nodes[i]->server.host, nodes[i]->server.port);
        }
        examine_node(&e, nodes[i]);
    }
    e.where[0] = '\0';
    if (e.num_bad == 0) {
        say(&e, KVF_FINE, "fine", "", "nothing loses or refuses blocks");
    }
}

/* ---- info ---- */

/* Adds the numbers of one server. A sum with an unknown term is unknown. */
static bool add_info(kvfi_redis *tier, kvfi_node *node, kvf_tier_info *out) {
    kvfi_talk talk;
    kvfi_facts facts = {.info = false};
    int64_t deadline_us = kvfi_deadline((int64_t)tier->conf.connect_ms * 1000);
    if (kvfi_talk_begin_on(&talk, tier, NULL, node, KVFI_LANE_LOOKUP, deadline_us) != KVF_OK) {
        return false;
    }
    bool read =
        kvfi_facts_ask(&talk, &facts, false) == KVF_OK && kvfi_facts_hear(&talk, &facts) == KVF_OK && facts.info;
    kvfi_talk_end(&talk);
    bool used = read && out->used_bytes >= 0 && facts.used != KVFI_UNKNOWN;
    bool bounded = read && out->max_bytes >= 0 && facts.maxmemory != KVFI_UNKNOWN && facts.maxmemory > 0;
    out->used_bytes = used ? kvfi_sat_add(out->used_bytes, kvfi_sat_signed(facts.used)) : -1;
    out->max_bytes = bounded ? kvfi_sat_add(out->max_bytes, kvfi_sat_signed(facts.maxmemory)) : -1;
    return true;
}

/* Before any request: a request counts as an attempt, too. */
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
    kvfi_redis *tier = kvfi_redis_of(base);
    kvfi_node *nodes[KVFI_MAX_NODES];
    count_breakers(tier, out);
    kvf_tier_info sum = *out;
    out->reachable = 0;
    sum.used_bytes = sum.max_bytes = 0;
    size_t num = kvfi_redis_nodes(tier, nodes, KVFI_MAX_NODES);
    for (size_t i = 0; i < num; i++) {
        if (add_info(tier, nodes[i], &sum)) {
            out->reachable = 1;
            out->used_bytes = sum.used_bytes;
            out->max_bytes = sum.max_bytes;
        }
    }
}
