/* SPDX-License-Identifier: Apache-2.0
 *
 * Admission. Opening a store tries once what the user must be allowed to do, on a key that does not exist, so nothing
 * is written or removed. It also asks the server for its settings. Both take one round trip. Saves ask again when the
 * server was down, when it must not be saved to, and, if it has no bound of its own, each time a part of the budget is
 * used up.
 */
#include <stdio.h>

#include "redis/advice/advice.h"
#include "redis/advice/rules.h"

#define NUM_TRIES  5u
#define EXAMINE_US 2000000

/* ---- may the user? ---- */

/* The hot path's commands. Only permission errors matter here: a server checks those before everything else. */
static kvf_status ask_permissions(kvfi_talk *talk, const char *key) {
    KVFI_TRY(kvfi_talk_say(talk, "GETRANGE", key, "0", "0", NULL));
    KVFI_TRY(kvfi_talk_say(talk, "GET", key, NULL));
    KVFI_TRY(kvfi_talk_say(talk, "SET", key, "", "XX", "PX", "1000", NULL));
    KVFI_TRY(kvfi_talk_say(talk, "PEXPIRE", key, "1000", NULL));
    return kvfi_talk_say(talk, "UNLINK", key, NULL);
}

static kvf_status hear_permissions(kvfi_talk *talk) {
    char rule[96];
    kvf_status status = KVF_OK;
    for (unsigned i = 0; i < NUM_TRIES; i++) {
        kvfi_reply reply;
        KVFI_TRY(kvfi_talk_hear(talk, &reply));
        if (status == KVF_OK && reply.kind == KVFI_RESP_ERROR && kvfi_reply_says(&reply, "NOPERM")) {
            kvfi_acl_rule(rule, talk->conn->said, talk->tier->conf.prefix);
            status = kvfi_fail(talk->err, KVF_CONFIG,
                               "%.80s: the user lacks a permission: add %s to its ACL (docs/stores-redis.md lists all)",
                               talk->tier->conf.text, rule);
        }
    }
    return status;
}

/* ---- is the server set up for it? ---- */

/* What is logged of a server: everything at first, then what forbids saves when that changes. */
typedef struct listener {
    const kvfi_redis *tier;
    const char *only; /* NULL = all */
} listener;

static void say_finding(void *ctx, const kvf_finding *finding) {
    const listener *to = ctx;
    if (to->only != NULL && strcmp(to->only, finding->code) != 0) {
        return;
    }
    kvfi_log(finding->severity >= KVF_WARNING ? KVF_LOG_WARN : KVF_LOG_INFO, "%.100s: %s%s%s", to->tier->conf.text,
             finding->what, finding->mend[0] != '\0' ? "; mend: " : "", finding->mend);
}

/* What is logged depends on the verdict as a whole, so the rules, which are pure, run again with logging. */
static void tell(const kvfi_redis *tier, const kvfi_node *node, const kvfi_facts *facts, const kvfi_verdict *verdict,
                 const kvfi_admission *before) {
    listener to = {.tier = tier, .only = before->logged ? verdict->code : NULL};
    kvfi_verdict again;
    if (before->logged && verdict->saves == before->saves) {
        return;
    }
    if (before->logged && verdict->saves == KVF_WHY_NONE) {
        kvfi_log(KVF_LOG_INFO, "%.100s: saves go on", tier->conf.text);
    } else {
        kvfi_rules_judge(&again, facts, &tier->asked, &node->server, say_finding, &to);
    }
}

/* The length of parts was decided when the store opened. A server that is found later and takes only shorter ones gets
 * none. */
static void keep_parts(kvfi_verdict *verdict, const kvfi_redis *tier, const kvfi_facts *facts) {
    if (verdict->saves == KVF_WHY_NONE && facts->max_bulk < tier->conf.part) {
        verdict->saves = KVF_WHY_SETTINGS;
        verdict->code = "proto-max-bulk-len";
    }
}

static void conclude(kvfi_redis *tier, kvfi_node *node, const kvfi_facts *facts, const kvfi_verdict *verdict) {
    kvfi_admission before = kvfi_node_admission(node);
    unsigned missed = atomic_load_explicit(&node->silent, memory_order_relaxed);
    tell(tier, node, facts, verdict, &before);
    kvfi_admission admission = {.known = true,
                                .logged = true,
                                .closed = before.closed || (!facts->config && (missed & KVFI_PROBE_CONFIG) == 0),
                                .missed = missed,
                                .bounded = verdict->room != KVFI_UNKNOWN,
                                .saves = verdict->saves,
                                .code = verdict->code};
    atomic_store_explicit(&node->longest, verdict->longest, memory_order_relaxed);
    atomic_store_explicit(&node->most, verdict->most, memory_order_relaxed);
    atomic_store_explicit(&node->room, admission.bounded ? (int64_t)verdict->room : 0, memory_order_relaxed);
    kvfi_node_admit(node, &admission);
    if (verdict->saves != KVF_WHY_NONE) {
        kvfi_node_note_saves(node, true);
    }
}

/* ---- when the store opens ---- */

static void fit(kvfi_redis *tier, const kvfi_fit *to) {
    tier->conf.part = to->part;
    tier->conf.window = to->window;
    tier->conf.conns = to->conns;
    tier->conf.save_conns = to->save_conns;
}

static kvf_status admit_on(kvfi_talk *talk, const char *key) {
    kvfi_facts facts;
    kvfi_verdict verdict;
    KVFI_TRY(ask_permissions(talk, key));
    KVFI_TRY(kvfi_facts_ask(talk, &facts, true));
    kvf_status status = hear_permissions(talk);
    if (status == KVF_CONFIG) {
        return status;
    }
    if (status != KVF_OK) {
        /* One of these may end a connection, too: that shows when it is needed. */
        KVFI_TRY(kvfi_talk_renew(talk));
        KVFI_TRY(kvfi_facts_ask(talk, &facts, true));
    }
    KVFI_TRY(kvfi_facts_hear(talk, &facts));
    kvfi_rules_judge(&verdict, &facts, &talk->tier->asked, &talk->node->server, NULL, NULL);
    fit(talk->tier, &verdict.fit);
    conclude(talk->tier, talk->node, &facts, &verdict);
    return KVF_OK;
}

kvf_status kvfi_redis_admit(kvfi_redis *tier, kvf_error *err) {
    kvfi_node *node = &tier->node;
    kvfi_talk talk = {.ask = NULL};
    kvf_error own = {.status = KVF_OK};
    char key[KVFI_REDIS_MAX_PREFIX + 16];
    int64_t deadline_us = kvfi_deadline((int64_t)tier->conf.connect_ms * 1000);
    if (tier->topology != NULL && kvfi_topology_primaries(tier->topology, &node, 1) == 0) {
        return KVF_OK; /* it is down: no reason to refuse */
    }
    if (kvfi_talk_begin_on(&talk, tier, &own, node, KVFI_LANE_LOOKUP, deadline_us) != KVF_OK) {
        return KVF_OK;
    }
    snprintf(key, sizeof key, "%s:admission", tier->conf.prefix);
    kvf_status status = admit_on(&talk, key);
    kvfi_talk_end(&talk);
    return status == KVF_CONFIG ? kvfi_fail(err, status, "%s", own.what) : KVF_OK;
}

/* ---- when something is to be saved ---- */

static kvf_status examine(kvfi_redis *tier, kvfi_node *node, kvfi_conn *conn, kvfi_verdict *out, int64_t deadline_us) {
    kvfi_facts facts;
    kvf_error own = {.status = KVF_OK};
    int64_t soon_us = kvfi_deadline(EXAMINE_US);
    kvfi_talk talk = {.tier = tier,
                      .node = node,
                      .conn = conn,
                      .err = &own,
                      .deadline_us = deadline_us < soon_us ? deadline_us : soon_us};
    kvf_status status = kvfi_facts_ask(&talk, &facts, !kvfi_node_admission(node).closed);
    if (status == KVF_OK) {
        status = kvfi_facts_hear(&talk, &facts);
    }
    if (status != KVF_OK) {
        kvfi_conn_close(conn);
        return status;
    }
    kvfi_rules_judge(out, &facts, &tier->asked, &node->server, NULL, NULL);
    keep_parts(out, tier, &facts);
    conclude(tier, node, &facts, out);
    return KVF_OK;
}

static bool must_ask(kvfi_node *node, const kvfi_admission *admission) {
    return !admission->known || admission->saves != KVF_WHY_NONE || kvfi_node_probes(node, admission->missed) != 0 ||
           (admission->bounded && atomic_load_explicit(&node->room, memory_order_relaxed) <= 0);
}

kvf_reason kvfi_redis_may_save(kvfi_redis *tier, kvfi_node *node, kvfi_conn *conn, int64_t deadline_us) {
    kvfi_admission admission = kvfi_node_admission(node);
    kvfi_verdict verdict = {.saves = KVF_WHY_NONE};
    if (!kvfi_node_may_save(node)) {
        return admission.known && admission.saves != KVF_WHY_NONE ? admission.saves : KVF_WHY_BREAKER;
    }
    if (!must_ask(node, &admission)) {
        return KVF_WHY_NONE;
    }
    if (examine(tier, node, conn, &verdict, deadline_us) != KVF_OK) {
        return KVF_WHY_UNREACHABLE;
    }
    if (verdict.elsewhere && tier->topology == NULL) {
        kvfi_node_renew(node, conn);
    }
    return verdict.saves;
}
