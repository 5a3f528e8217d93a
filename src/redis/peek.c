/* SPDX-License-Identifier: Apache-2.0
 *
 * Looking up: GETRANGE key 0 127 for every key, all in one round trip. Questions go out and answers come in at the same time, so
 * that their number is bounded by nothing: a client that only writes, and a server that only answers, would wait for each other.
 */
#include "redis/redis.h"

typedef struct lookup {
    kvfi_redis      *tier;
    kvfi_conn       *conn;
    const kvfi_addr *addrs;
    kvfi_peek       *out;
    size_t           num, asked, answered;
} lookup;

static void ask(lookup *l) {
    while (l->asked < l->num) {
        kvfi_name name;
        kvfi_cmd *out = kvfi_conn_room(l->conn, KVFI_COMMAND_BYTES);
        if (out == NULL) {
            return;
        }
        kvfi_name_of(&name, l->tier->conf.prefix, &l->addrs[l->asked++], 0);
        kvfi_cmd_array(out, 4);
        kvfi_cmd_text(out, "GETRANGE");
        kvfi_cmd_bulk(out, name.text, name.len);
        kvfi_cmd_text(out, "0");
        kvfi_cmd_number(out, KVFI_HEADER_BYTES - 1);
    }
}

/* An absent key has an empty range. */
static bool read_answer(kvfi_peek *peek, const kvfi_reply *reply) {
    if (reply->kind == KVFI_RESP_ERROR) {
        peek->why = kvfi_reply_reason(reply);
        return true;
    }
    if (reply->kind != KVFI_RESP_BULK || reply->len > KVFI_HEADER_BYTES) {
        return false;
    }
    if (reply->len == KVFI_HEADER_BYTES) {
        memcpy(peek->header, reply->text, KVFI_HEADER_BYTES);
        peek->why = KVF_WHY_NONE;
    } else {
        peek->why = reply->len == 0 ? KVF_WHY_ABSENT : KVF_WHY_TRUNCATED;
    }
    return true;
}

/* Takes all answers that are there. */
static kvf_reason hear(lookup *l) {
    kvfi_reply reply;
    kvfi_resp_event event = KVFI_RESP_MORE;
    while (l->answered < l->asked && (event = kvfi_resp_next(&l->conn->in, &reply)) == KVFI_RESP_REPLY) {
        if (!reply.last || !read_answer(&l->out[l->answered], &reply)) {
            return kvfi_conn_broken(l->conn, "the server answered a GETRANGE with what is no short string");
        }
        l->answered++;
    }
    return event == KVFI_RESP_BAD ? kvfi_conn_broken(l->conn, "the server said what is not RESP") : KVF_WHY_NONE;
}

static kvf_reason run(lookup *l, int64_t deadline_us) {
    kvf_reason why = KVF_WHY_NONE;
    while (why == KVF_WHY_NONE && l->answered < l->num) {
        bool got = false;
        ask(l);
        why = kvfi_conn_send(l->conn);
        if (why == KVF_WHY_NONE) {
            why = kvfi_conn_recv(l->conn, &got);
        }
        bool can_send = kvfi_conn_all_sent(l->conn) && l->asked < l->num;
        if (why == KVF_WHY_NONE) {
            why = got || can_send ? kvfi_conn_in_time(l->conn, deadline_us) : kvfi_conn_wait(l->conn, deadline_us);
        }
        if (why == KVF_WHY_NONE) {
            why = hear(l);
        }
    }
    return why;
}

void kvfi_redis_peek(kvfi_tier *base, const kvfi_addr *addrs, size_t num, kvfi_peek *out, uint64_t *round_trips,
                     int64_t deadline_us) {
    kvfi_redis *tier = kvfi_redis_of(base);
    lookup l = {.tier = tier, .addrs = addrs, .num = num, .out = out};
    if (num == 0) {
        return;
    }
    kvf_reason why = kvfi_node_take(&tier->node, &l.conn, NULL, KVFI_LANE_LOOKUP, NULL, deadline_us);
    if (why == KVF_WHY_NONE) {
        (*round_trips)++;
        why = run(&l, deadline_us);
        kvfi_node_give(&tier->node, KVFI_LANE_LOOKUP, l.conn);
    }
    for (size_t i = l.answered; i < num; i++) {
        out[i].why = why;
    }
}
