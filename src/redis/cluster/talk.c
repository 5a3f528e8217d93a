/* SPDX-License-Identifier: Apache-2.0
 *
 * Sends single commands to the server that has a slot, and reads the replies. Not for the hot path.
 */
#include "redis/cluster/talk.h"

#include <stdarg.h>

#include "base/interrupt.h"

#define MAX_TRIES 5u

kvf_status kvfi_talk_begin_on(kvfi_talk *talk, kvfi_redis *tier, kvf_error *err, kvfi_node *node, kvfi_lane_kind lane,
                              int64_t deadline_us) {
    kvf_error own = {.status = KVF_IO};
    *talk = (kvfi_talk){.tier = tier, .node = node, .lane = lane, .err = err, .deadline_us = deadline_us};
    talk->why = kvfi_node_take_sure(node, &talk->conn, &own, lane, deadline_us);
    if (talk->why == KVF_WHY_NONE) {
        return KVF_OK;
    }
    return kvfi_fail(err, own.status == KVF_MISS ? KVF_IO : own.status, "%s", own.what);
}

kvf_status kvfi_talk_begin(kvfi_talk *talk, kvfi_redis *tier, kvf_error *err, uint16_t slot, kvfi_lane_kind lane,
                           int64_t deadline_us) {
    if (tier->topology == NULL) {
        return kvfi_talk_begin_on(talk, tier, err, &tier->node, lane, deadline_us);
    }
    if (talk->ask != NULL) {
        KVFI_TRY(kvfi_talk_begin_on(talk, tier, err, talk->ask, lane, deadline_us));
        talk->conn->asking = true;
        return KVF_OK;
    }
    kvfi_node *node = kvfi_topology_node(tier->topology, slot);
    kvf_status status = KVF_IO;
    *talk = (kvfi_talk){.tier = tier};
    if (node != NULL) {
        status = kvfi_talk_begin_on(talk, tier, err, node, lane, deadline_us);
    }
    if (status == KVF_IO) {
        /* It may have moved. Only then another try is worthwhile. */
        kvfi_node *before = node;
        kvfi_topology_refresh(tier->topology, deadline_us);
        node = kvfi_topology_node(tier->topology, slot);
        if (node == NULL) {
            return kvfi_fail(err, KVF_IO, "%s: no known server has that slot", tier->conf.text);
        }
        if (node != before) {
            status = kvfi_talk_begin_on(talk, tier, err, node, lane, deadline_us);
        }
    }
    return status;
}

bool kvfi_talk_again(const kvfi_talk *talk, unsigned *tries) {
    bool enough = ++*tries > MAX_TRIES;
    if (!talk->astray || (enough && (talk->ask != NULL || !talk->moving))) {
        return false;
    }
    if (talk->ask != NULL) {
        return kvfi_sys->now_us() < talk->deadline_us;
    }
    int wait_ms = 10 << (enough ? MAX_TRIES : *tries); /* 20 to 320 ms: a moving slot is then likely to have moved */
    if (kvfi_sys->now_us() + (int64_t)wait_ms * 1000 >= talk->deadline_us) {
        return false;
    }
    (void)kvfi_interruptible_poll(NULL, 0, kvfi_deadline((int64_t)wait_ms * 1000));
    if (talk->tier->topology != NULL) {
        kvfi_topology_refresh(talk->tier->topology, talk->deadline_us);
    }
    return !kvfi_interrupt_look();
}

size_t kvfi_redis_nodes(kvfi_redis *tier, kvfi_node **out, size_t cap) {
    if (tier->topology == NULL) {
        out[0] = &tier->node;
        return 1;
    }
    size_t num = kvfi_topology_primaries(tier->topology, out, cap);
    if (num == 0) {
        kvfi_topology_refresh(tier->topology, kvfi_deadline((int64_t)tier->conf.connect_ms * 1000));
        num = kvfi_topology_primaries(tier->topology, out, cap);
    }
    return num;
}

void kvfi_talk_end(kvfi_talk *talk) {
    if (talk->conn != NULL) {
        if (talk->unheard > 0) {
            kvfi_conn_close(talk->conn); /* outstanding replies would be taken for answers to other commands */
        }
        kvfi_node_give(talk->node, talk->lane, talk->conn);
        talk->conn = NULL;
    }
}

kvf_status kvfi_talk_renew(kvfi_talk *talk) {
    kvf_error own = {.status = KVF_IO};
    talk->unheard = 0;
    talk->half = false;
    if (kvfi_node_reopen(talk->node, talk->conn, &own, talk->deadline_us) != KVF_WHY_NONE) {
        return kvfi_fail(talk->err, KVF_IO, "%s", own.what);
    }
    return KVF_OK;
}

static kvf_status lost(kvfi_talk *talk) {
    return kvfi_fail(talk->err, KVF_IO, "%s: %s", talk->tier->conf.text, talk->conn->said);
}

/* Makes room for one more command, waiting if necessary. */
static kvf_status make_room(kvfi_talk *talk, size_t bytes) {
    kvf_reason why = KVF_WHY_NONE;
    while (why == KVF_WHY_NONE && kvfi_conn_room(talk->conn, bytes) == NULL) {
        why = kvfi_conn_send(talk->conn);
        if (why == KVF_WHY_NONE && kvfi_conn_room(talk->conn, bytes) == NULL) {
            why = kvfi_conn_wait(talk->conn, talk->deadline_us);
        }
        if (why == KVF_WHY_NONE) {
            why = kvfi_conn_heed(talk->conn);
        }
    }
    return why == KVF_WHY_NONE ? KVF_OK : lost(talk);
}

/* Takes in what arrives meanwhile, or poll would see it again and again. */
kvf_status kvfi_talk_send_body(kvfi_talk *talk) {
    kvf_reason why = KVF_WHY_NONE;
    bool got = false;
    while (why == KVF_WHY_NONE && !kvfi_conn_body_sent(talk->conn)) {
        why = kvfi_conn_send(talk->conn);
        if (why == KVF_WHY_NONE && !kvfi_conn_body_sent(talk->conn)) {
            why = kvfi_conn_wait(talk->conn, talk->deadline_us);
            if (why == KVF_WHY_NONE && talk->conn->readable) {
                why = kvfi_conn_recv(talk->conn, &got);
            }
        }
        if (why == KVF_WHY_NONE) {
            why = kvfi_conn_in_time(talk->conn, talk->deadline_us);
        }
        if (why == KVF_WHY_NONE) {
            why = kvfi_conn_heed(talk->conn);
        }
    }
    return why == KVF_WHY_NONE ? KVF_OK : lost(talk);
}

kvf_status kvfi_talk_say(kvfi_talk *talk, ...) {
    va_list args, again;
    size_t num = 0, bytes = 64; /* an ASKING included */
    va_start(args, talk);
    va_copy(again, args);
    for (const char *text = va_arg(args, const char *); text != NULL; text = va_arg(args, const char *)) {
        num++;
        bytes += strlen(text) + 24;
    }
    va_end(args);
    kvf_status status = make_room(talk, bytes);
    if (status == KVF_OK) {
        if (talk->conn->asking) {
            kvfi_cmd_array(&talk->conn->out, 1);
            kvfi_cmd_text(&talk->conn->out, "ASKING");
            talk->unheard++;
        }
        kvfi_cmd_array(&talk->conn->out, num);
        talk->unheard++;
        for (size_t i = 0; i < num; i++) {
            kvfi_cmd_text(&talk->conn->out, va_arg(again, const char *));
        }
    }
    va_end(again);
    return status;
}

static kvf_status hear(kvfi_talk *talk, kvfi_reply *reply) {
    talk->why = kvfi_conn_next(talk->conn, reply, talk->deadline_us);
    if (talk->why != KVF_WHY_NONE) {
        return lost(talk);
    }
    talk->unheard -= reply->last;
    return KVF_OK;
}

kvf_status kvfi_talk_expect(kvfi_talk *talk) {
    kvfi_reply reply;
    if (!talk->conn->asking || talk->half) {
        return KVF_OK;
    }
    talk->half = true;
    return hear(talk, &reply);
}

kvf_status kvfi_talk_hear(kvfi_talk *talk, kvfi_reply *reply) {
    KVFI_TRY(kvfi_talk_expect(talk));
    KVFI_TRY(hear(talk, reply));
    talk->half = !reply->last;
    return KVF_OK;
}

kvf_status kvfi_talk_refused(kvfi_talk *talk, const kvfi_reply *reply, const char *doing) {
    if (reply->kind == KVFI_RESP_ERROR) {
        char rule[96];
        if (talk->tier->topology != NULL &&
            kvfi_topology_learn(talk->tier->topology, talk->node, reply, &talk->ask) != KVFI_FATE_OVER) {
            talk->astray = true;
            talk->moving = kvfi_reply_says(reply, "ASK ") || kvfi_reply_says(reply, "TRYAGAIN");
        }
        if (talk->tier->topology == NULL && kvfi_reply_says(reply, "READONLY")) {
            kvfi_node_renew(talk->node, talk->conn);
            talk->astray = true;
        }
        if (kvfi_reply_says(reply, "NOPERM")) {
            kvfi_acl_rule(rule, talk->conn->said, talk->tier->conf.prefix);
            return kvfi_fail(
                talk->err, KVF_CONFIG,
                "%.80s: %s: the user lacks a permission: add %s to its ACL (docs/stores-redis.md lists all)",
                talk->tier->conf.text, doing, rule);
        }
        return kvfi_fail(talk->err, KVF_IO, "%s: %s: %s", talk->tier->conf.text, doing, talk->conn->said);
    }
    (void)kvfi_conn_broken(talk->conn, "the server gave an answer of the wrong kind");
    return kvfi_fail(talk->err, KVF_IO, "%s: %s: %s", talk->tier->conf.text, doing, talk->conn->said);
}
