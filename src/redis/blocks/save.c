/* SPDX-License-Identifier: Apache-2.0
 *
 * Saving: SETs pipelined on one connection, each body straight from its memory.
 *
 * A value is hashed or sealed piece by piece, each just before it is sent (finish.h), and its checksum ends it. As soon
 * as the socket has taken one value, the next one follows, although the first has not been answered: while we hash, the
 * server still has something to read. The unanswered amount is bounded in bytes, or by two values if they are large.
 *
 * A value of several parts becomes visible with its first part, which has the header. That part is sent last, and only
 * once the server has answered OK to all others. It is the shortest, because it is hashed before any of them is sent.
 * Two simultaneous writers of the same value send the same parts. That is not so for a sealed record, which is
 * therefore never in parts.
 */
#include "redis/blocks/ring.h"
#include "tier/finish.h"

#define CANCEL_GRACE_US 10000

typedef struct saver {
    kvfi_redis *tier;
    kvfi_conn *conn;
    kvfi_feed *feed;
    kvfi_lost *lost;
    kvfi_finish finish; /* of the item being sent */
    kvfi_ring ring;
    uint64_t sent_parts; /* of that item */
    kvfi_place rest;     /* its next part, from there on */
    bool dry;
    bool drawn;        /* at least one item */
    int64_t cancel_us; /* the batch is cancelled: incomplete items are dropped then */
} saver;

/* ---- sending ---- */

static uint64_t num_parts(const saver *s) {
    return kvfi_num_parts(s->ring.item->bytes, kvfi_redis_part_of(s->tier, s->ring.item));
}

static size_t finish_piece(void *finish, size_t bytes) {
    return kvfi_finish_next(finish, bytes);
}

/* The time to live of the item; 0: no end. */
static uint64_t time_of(const saver *s) {
    if (s->ring.item->ttl_s > 0) {
        return (uint64_t)s->ring.item->ttl_s * 1000;
    }
    return s->tier->conf.ttl_s > 0 ? kvfi_ttl_ms(s->tier->conf.ttl_s, &s->ring.item->addr) : 0;
}

/* SET key body PX ms */
static void put_command(saver *s, kvfi_cmd *out, uint64_t part, kvfi_place body) {
    kvfi_name name;
    uint64_t ttl_ms = time_of(s);
    bool expires = ttl_ms > 0;
    kvfi_name_of(&name, s->tier->conf.prefix, &s->ring.item->addr, part);
    if (s->conn->asking) {
        kvfi_cmd_array(out, 1);
        kvfi_cmd_text(out, "ASKING");
        kvfi_ring_push(&s->ring, &(kvfi_request){0});
    }
    kvfi_cmd_array(out, expires ? 5 : 3);
    kvfi_cmd_text(out, "SET");
    kvfi_cmd_bulk(out, name.text, name.len);
    kvfi_cmd_bulk_header(out, body.bytes);
    /* The program's memory (head, pieces, checksum) is lent on unix sockets only, whatever tier came before. */
    bool may_lend = s->ring.item->may_lend && (!s->conn->tcp || s->ring.item->num_iov == 1);
    kvfi_conn_record(s->conn, body, may_lend, s->ring.item->unfinished ? finish_piece : NULL, &s->finish);
    kvfi_cmd_crlf(out);
    if (expires) {
        kvfi_cmd_text(out, "PX");
        kvfi_cmd_number(out, ttl_ms);
    }
}

/* Sends the next part of the current item: 1, 2, ..., and 0 at the end. */
static void send_part(saver *s, kvfi_cmd *out) {
    uint64_t parts = num_parts(s);
    uint64_t part = (s->sent_parts + 1) % parts;
    size_t len = (size_t)kvfi_part_len(s->ring.item->bytes, kvfi_redis_part_of(s->tier, s->ring.item), part);
    kvfi_place body = s->rest;
    if (part == 0) {
        body = (kvfi_place){.iov = s->ring.item->iov};
    }
    body.bytes = len;
    put_command(s, out, part, body);
    kvfi_ring_push(&s->ring, &(kvfi_request){.item = s->ring.item, .place = body, .last = part == 0});
    if (part == 0) {
        s->ring.item = NULL;
    } else {
        kvfi_place_advance(&s->rest, len);
        s->sent_parts++;
    }
}

/* A server without eviction has limited room (admit.c). */
static bool has_room(const saver *s) {
    return s->conn->room == NULL || atomic_load_explicit(s->conn->room, memory_order_relaxed) > 0;
}

/* Loads under way to this server go first: after each value the save waits for them (run.c). */
static bool must_yield(const saver *s) {
    return s->drawn && s->conn->loads != NULL && atomic_load_explicit(s->conn->loads, memory_order_relaxed) > 0;
}

/* The server accepts no value of that length, and would end the connection over it. */
static bool is_too_long(const saver *s) {
    return s->ring.item->whole && s->ring.item->bytes > s->conn->longest;
}

/* Its header, and as much of it as is sent last. */
static kvf_reason begin(saver *s, kvfi_item *item, size_t first) {
    kvf_reason why = kvfi_feed_prepare(s->feed, item);
    kvfi_finish_leave(&s->finish, true);
    if (why != KVF_WHY_NONE || !item->unfinished) {
        return why;
    }
    if (!kvfi_finish_begin(&s->finish, item)) {
        return KVF_WHY_NOMEM;
    }
    return kvfi_finish_next(&s->finish, first) == first ? KVF_WHY_NONE : KVF_WHY_NOMEM;
}

static void draw(saver *s) {
    s->ring.item = kvfi_lost_next(s->lost);
    if (s->ring.item == NULL && !s->dry) {
        s->ring.item = has_room(s) && !must_yield(s) ? kvfi_feed_draw(s->feed) : NULL;
    }
    s->drawn = true;
    if (s->ring.item == NULL) {
        s->dry = true;
        return;
    }
    size_t first = num_parts(s) > 1 ? (size_t)kvfi_part_len(s->ring.item->bytes, s->tier->conf.part, 0) : 0;
    bool too_deep = s->conn->most > 0 && kvfi_is_too_deep(s->ring.item, s->conn->most);
    kvf_reason why = too_deep || is_too_long(s) ? KVF_WHY_FULL : begin(s, s->ring.item, first);
    if (why != KVF_WHY_NONE) {
        kvfi_finish_leave(&s->finish, false);
        kvfi_feed_done(s->feed, s->ring.item, KVF_MISS, why);
        s->ring.item = NULL;
        return;
    }
    if (s->conn->room != NULL) {
        atomic_fetch_sub_explicit(s->conn->room, (int64_t)s->ring.item->bytes, memory_order_relaxed);
    }
    s->sent_parts = 0;
    s->rest = (kvfi_place){.iov = s->ring.item->iov, .bytes = s->ring.item->bytes};
    kvfi_place_advance(&s->rest, first);
}

/* Sends the next SET if it is time for it. Returns true when it did. */
static bool offer(saver *s) {
    kvfi_cmd *out = kvfi_conn_room(s->conn, KVFI_COMMAND_BYTES);
    if (out == NULL || s->ring.num + 1 >= KVFI_RING || !kvfi_conn_body_sent(s->conn)) {
        return false;
    }
    while (s->ring.item == NULL && (!s->dry || s->lost->num > 0)) {
        draw(s);
    }
    if (s->ring.item == NULL) {
        return false;
    }
    if (s->ring.num > 1 && s->ring.bytes >= s->tier->conf.window) {
        return false;
    }
    bool commits = num_parts(s) > 1 && s->sent_parts + 1 == num_parts(s);
    if (commits && s->ring.num > 0) {
        return false; /* not before the other parts are stored */
    }
    send_part(s, out);
    return true;
}

/* ---- answers ---- */

static kvf_reason judge(saver *s, kvfi_item *item, const kvfi_reply *reply) {
    if (reply->kind == KVFI_RESP_STATUS && kvfi_reply_says(reply, "OK")) {
        return KVF_WHY_NONE;
    }
    return reply->kind == KVFI_RESP_ERROR ? kvfi_redis_refusal(s->feed, item, reply) : KVF_NUM_REASONS;
}

static void note_refusal(saver *s, const kvfi_reply *reply) {
    kvfi_conn_note_error(s->conn, reply);
    if (s->feed->again == NULL) {
        kvfi_log(KVF_LOG_WARN, "redis: a block was not stored: %s", s->conn->said);
    }
    if (kvfi_reply_refuses_saves(reply, s->feed->again != NULL)) {
        s->conn->refuses = true;
        s->dry = true; /* the next would be transferred only to be refused as well */
    }
}

static kvf_reason take_answer(saver *s, const kvfi_reply *reply) {
    if (s->ring.num == 0) {
        return kvfi_conn_broken(s->conn, "the server sent something unasked");
    }
    kvfi_request r = *kvfi_ring_at(&s->ring, 0);
    kvf_reason why = r.item == NULL ? KVF_WHY_NONE : judge(s, r.item, reply);
    if (!reply->last || why == KVF_NUM_REASONS) {
        return kvfi_conn_broken(s->conn, "the server answered a SET with something other than OK");
    }
    if (s->ring.num == 1 && !kvfi_conn_body_sent(s->conn)) {
        return kvfi_conn_broken(s->conn, "the server answered a SET before it was complete");
    }
    kvfi_ring_pop(&s->ring);
    if (why != KVF_WHY_NONE && s->ring.why == KVF_WHY_NONE) {
        note_refusal(s, reply);
    }
    if (why == KVF_WHY_NONE ? r.last : kvfi_ring_fail(&s->ring, &r, why)) {
        if (s->finish.item == r.item) {
            kvfi_finish_leave(&s->finish, true);
        }
        kvfi_ring_finish(&s->ring, s->feed, r.item);
    }
    return KVF_WHY_NONE;
}

/* ---- the exchange ---- */

/* Takes the replies that have arrived. With `wait` something must move first. */
static kvf_reason hear(saver *s) {
    for (;;) {
        kvfi_reply reply;
        kvfi_resp_event event = kvfi_resp_next(&s->conn->in, &reply);
        if (event == KVFI_RESP_BAD) {
            return kvfi_conn_broken(s->conn, KVFI_NOT_RESP);
        }
        if (event == KVFI_RESP_MORE) {
            return KVF_WHY_NONE;
        }
        kvf_reason why = take_answer(s, &reply);
        if (why != KVF_WHY_NONE) {
            return why;
        }
    }
}

/* A cancelled batch gives its memory back soon, also when the server is silent: what is nearly over ends, and leaves
 * the connection in order. */
static int64_t deadline_of(saver *s) {
    if (!kvfi_feed_is_cancelled(s->feed)) {
        return s->feed->deadline_us;
    }
    if (s->cancel_us == KVFI_NEVER) {
        s->cancel_us = kvfi_deadline(CANCEL_GRACE_US);
    }
    return s->cancel_us < s->feed->deadline_us ? s->cancel_us : s->feed->deadline_us;
}

static kvf_reason wait_and_hear(saver *s) {
    bool got = false;
    kvf_reason why = kvfi_conn_wait(s->conn, deadline_of(s));
    if (why == KVF_WHY_NONE && s->conn->readable) {
        why = kvfi_conn_recv(s->conn, &got);
    }
    if (why == KVF_WHY_NONE) {
        why = kvfi_conn_in_time(s->conn, deadline_of(s));
    }
    if (why == KVF_WHY_BUDGET && kvfi_feed_is_cancelled(s->feed)) {
        why = KVF_WHY_CLOSED;
    }
    return why == KVF_WHY_NONE && got ? hear(s) : why;
}

bool kvfi_redis_save_on(kvfi_redis *tier, kvfi_conn *conn, kvfi_feed *feed, kvfi_lost *lost) {
    saver s;
    s.tier = tier;
    s.conn = conn;
    s.feed = feed;
    s.lost = lost;
    s.finish.item = NULL;
    kvfi_ring_init(&s.ring);
    s.dry = s.drawn = false;
    s.cancel_us = KVFI_NEVER;
    for (;;) {
        bool offered = offer(&s);
        kvf_reason why = kvfi_conn_send(conn);
        if (why == KVF_WHY_NONE && !(offered && kvfi_conn_all_sent(conn))) {
            if (s.ring.num == 0 && s.ring.item == NULL) {
                return true;
            }
            why = wait_and_hear(&s);
        }
        if (why != KVF_WHY_NONE) {
            kvfi_finish_leave(&s.finish, !kvfi_feed_is_cancelled(feed)); /* sealing the rest takes its time */
            kvfi_ring_abandon(&s.ring, feed, lost, why, conn->lends);
            return false;
        }
    }
}

void kvfi_redis_put(kvfi_tier *base, kvfi_feed *feed) {
    kvfi_redis_run(kvfi_redis_of(base), feed, KVFI_LANE_STORE, kvfi_redis_save_on);
}
