/* SPDX-License-Identifier: Apache-2.0
 *
 * Admission: what a user must be allowed to do is tried once when the store opens, on a key that is not there, so that
 * nothing is written and nothing removed. One round trip. The doctor looks at everything else.
 */
#include <stdio.h>

#include "redis/redis.h"

#define NUM_TRIES 5u

/* The hot path's commands. A server may answer with any other error: it is asked about permissions only, which come
 * before all else. */
static kvf_status ask(kvfi_talk *talk, const char *key) {
    KVFI_TRY(kvfi_talk_say(talk, "GETRANGE", key, "0", "0", NULL));
    KVFI_TRY(kvfi_talk_say(talk, "GET", key, NULL));
    KVFI_TRY(kvfi_talk_say(talk, "SET", key, "", "XX", "PX", "1000", NULL));
    KVFI_TRY(kvfi_talk_say(talk, "PEXPIRE", key, "1000", NULL));
    return kvfi_talk_say(talk, "UNLINK", key, NULL);
}

static kvf_status hear(kvfi_talk *talk) {
    char rule[96];
    kvf_status status = KVF_OK;
    for (unsigned i = 0; i < NUM_TRIES; i++) {
        kvfi_reply reply;
        KVFI_TRY(kvfi_talk_hear(talk, &reply));
        if (status == KVF_OK && reply.kind == KVFI_RESP_ERROR && kvfi_reply_says(&reply, "NOPERM")) {
            kvfi_acl_rule(rule, talk->conn->said, talk->tier->conf.prefix);
            status = kvfi_fail(talk->err, KVF_CONFIG, "%.80s: the user lacks a permission: add %s to its ACL",
                               talk->tier->conf.text, rule);
        }
    }
    return status;
}

kvf_status kvfi_redis_admit(kvfi_redis *tier, kvf_error *err) {
    kvfi_node *node = &tier->node;
    kvfi_talk talk = {.ask = NULL};
    kvf_error own = {.status = KVF_OK};
    char key[KVFI_REDIS_MAX_PREFIX + 16];
    int64_t deadline_us = kvfi_deadline((int64_t)tier->conf.connect_ms * 1000);
    if (tier->topology != NULL && kvfi_topology_primaries(tier->topology, &node, 1) == 0) {
        return KVF_OK; /* they are away: no reason to refuse */
    }
    if (kvfi_talk_begin_on(&talk, tier, &own, node, KVFI_LANE_LOOKUP, deadline_us) != KVF_OK) {
        return KVF_OK;
    }
    snprintf(key, sizeof key, "%s:admission", tier->conf.prefix);
    kvf_status status = ask(&talk, key);
    if (status == KVF_OK) {
        status = hear(&talk);
    }
    kvfi_talk_end(&talk);
    return status == KVF_CONFIG ? kvfi_fail(err, status, "%s", own.what) : KVF_OK;
}
