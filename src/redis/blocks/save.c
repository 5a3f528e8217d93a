/* SPDX-License-Identifier: Apache-2.0
 *
 * Saving: SETs pipelined on one connection, each body straight from its memory.
 *
 * A value is hashed piece by piece, each just before it is sent (finish.h), and its checksum ends it. As soon as the
 * socket has taken one value, the next one follows, although the first has not been answered: while we hash, the server
 * still has something to read. The unanswered amount is bounded in bytes, or by two values if they are large.
 *
 * A value of several parts becomes visible with its first part, which has the header. That part is sent last, and only
 * once the server has answered OK to all others. It is the shortest, because it is hashed before any of them is sent.
 * Two simultaneous writers of the same value send the same parts. That is not so for a sealed record, which is
 * therefore never in parts.
 */
#include "redis/blocks/blocks.h"
#include "tier/finish.h"

#define RING            256u
#define CANCEL_GRACE_US 10000

/* One SET that has been sent, or is being sent. */
typedef struct request {
    kvfi_item *item; /* NULL: an ASKING */
    size_t bytes;
    bool last; /* of its item */
} request;

typedef struct saver {
    kvfi_redis *tier;
    kvfi_conn *conn;
    kvfi_feed *feed;
    kvfi_lost *lost;
    kvfi_finish finish; /* of the item being sent */
    request ring[RING];
    unsigned head, num;
    uint64_t unanswered; /* bytes of the bodies in the ring */
    kvfi_item *item;     /* being sent */
    uint64_t sent_parts; /* of it */
    kvfi_place rest;     /* its next part, from there on */
    kvf_reason why;      /* of the item at the head of the ring */
    bool dry;
    bool drawn;        /* at least one item */
    int64_t cancel_us; /* the batch is cancelled: incomplete items are dropped then */
} saver;

static request *at(saver *s, unsigned index) {
    return &s->ring[(s->head + index) % RING];
}

/* ---- sending ---- */

static uint64_t num_parts(const saver *s) {
    return kvfi_num_parts(s->item->bytes, kvfi_redis_part_of(s->tier, s->item));
}

static size_t hash_piece(void *finish, size_t bytes) {
    return kvfi_finish_next(finish, bytes);
}

/* The time to live of the item; 0: no end. */
static uint64_t time_of(const saver *s) {
    if (s->item->ttl_s > 0) {
        return (uint64_t)s->item->ttl_s * 1000;
    }
    return s->tier->conf.ttl_s > 0 ? kvfi_ttl_ms(s->tier->conf.ttl_s, &s->item->addr) : 0;
}

/* SET key body PX ms */
static void put_command(saver *s, kvfi_cmd *out, uint64_t part, kvfi_place body) {
    kvfi_name name;
    uint64_t ttl_ms = time_of(s);
    bool expires = ttl_ms > 0;
    kvfi_name_of(&name, s->tier->conf.prefix, &s->item->addr, part);
    if (s->conn->asking) {
        kvfi_cmd_array(out, 1);
        kvfi_cmd_text(out, "ASKING");
        *at(s, s->num++) = (request){.item = NULL};
    }
    kvfi_cmd_array(out, expires ? 5 : 3);
    kvfi_cmd_text(out, "SET");
    kvfi_cmd_bulk(out, name.text, name.len);
    kvfi_cmd_bulk_header(out, body.bytes);
    /* The program's memory (head, pieces, checksum) is lent on unix sockets only, whatever tier came before. */
    bool may_lend = s->item->may_lend && (!s->conn->tcp || s->item->num_iov == 1);
    kvfi_conn_record(s->conn, body, may_lend, s->item->unfinished ? hash_piece : NULL, &s->finish);
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
    size_t len = (size_t)kvfi_part_len(s->item->bytes, kvfi_redis_part_of(s->tier, s->item), part);
    kvfi_place body = s->rest;
    if (part == 0) {
        body = (kvfi_place){.iov = s->item->iov};
    }
    body.bytes = len;
    put_command(s, out, part, body);
    request r = {.item = s->item, .bytes = len, .last = part == 0};
    *at(s, s->num++) = r;
    s->unanswered += len;
    if (part == 0) {
        s->item = NULL;
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
    return s->item->whole && s->item->bytes > s->conn->longest;
}

static void draw(saver *s) {
    s->item = kvfi_lost_next(s->lost);
    if (s->item == NULL && !s->dry) {
        s->item = has_room(s) && !must_yield(s) ? kvfi_feed_draw(s->feed) : NULL;
    }
    s->drawn = true;
    if (s->item == NULL) {
        s->dry = true;
        return;
    }
    bool too_deep = s->conn->most > 0 && kvfi_is_too_deep(s->item, s->conn->most);
    kvf_reason why = too_deep || is_too_long(s) ? KVF_WHY_FULL : kvfi_feed_prepare(s->feed, s->item);
    if (why != KVF_WHY_NONE) {
        kvfi_feed_done(s->feed, s->item, KVF_MISS, why);
        s->item = NULL;
        return;
    }
    if (s->conn->room != NULL) {
        atomic_fetch_sub_explicit(s->conn->room, (int64_t)s->item->bytes, memory_order_relaxed);
    }
    s->sent_parts = 0;
    s->rest = (kvfi_place){.iov = s->item->iov, .bytes = s->item->bytes};
    size_t first = num_parts(s) > 1 ? (size_t)kvfi_part_len(s->item->bytes, s->tier->conf.part, 0) : 0;
    kvfi_place_advance(&s->rest, first);
    if (s->item->unfinished) {
        kvfi_finish_begin(&s->finish, s->item);
        (void)kvfi_finish_next(&s->finish, first);
    }
}

static void finish(saver *s, kvfi_item *item) {
    kvf_reason why = s->why;
    s->why = KVF_WHY_NONE;
    kvfi_feed_done(s->feed, item, why == KVF_WHY_NONE ? KVF_OK : KVF_MISS, why);
}

/* Sends the next SET if it is time for it. Returns true when it did. */
static bool offer(saver *s) {
    kvfi_cmd *out = kvfi_conn_room(s->conn, KVFI_COMMAND_BYTES);
    if (out == NULL || s->num + 1 >= RING || !kvfi_conn_body_sent(s->conn)) {
        return false;
    }
    while (s->item == NULL && (!s->dry || s->lost->num > 0)) {
        draw(s);
    }
    if (s->item == NULL) {
        return false;
    }
    if (s->num > 1 && s->unanswered >= s->tier->conf.window) {
        return false;
    }
    bool commits = num_parts(s) > 1 && s->sent_parts + 1 == num_parts(s);
    if (commits && s->num > 0) {
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

/* A part was refused: the rest of the item is not sent any more. */
static bool stop_sending(saver *s, const kvfi_item *item) {
    if (s->item != item) {
        return false;
    }
    s->item = NULL;
    if (s->num == 0) {
        return true;
    }
    at(s, s->num - 1)->last = true; /* it is a part of the item, since nothing later is sent before the item's end */
    return false;
}

static kvf_reason take_answer(saver *s, const kvfi_reply *reply) {
    if (s->num == 0) {
        return kvfi_conn_broken(s->conn, "the server sent something unasked");
    }
    request r = *at(s, 0);
    kvf_reason why = r.item == NULL ? KVF_WHY_NONE : judge(s, r.item, reply);
    if (!reply->last || why == KVF_NUM_REASONS) {
        return kvfi_conn_broken(s->conn, "the server answered a SET with something other than OK");
    }
    if (s->num == 1 && !kvfi_conn_body_sent(s->conn)) {
        return kvfi_conn_broken(s->conn, "the server answered a SET before it was complete");
    }
    s->head++;
    s->num--;
    s->unanswered -= r.bytes;
    if (r.item == NULL) {
        return KVF_WHY_NONE;
    }
    bool over = r.last;
    if (why != KVF_WHY_NONE && s->why == KVF_WHY_NONE) {
        s->why = why;
        kvfi_conn_note_error(s->conn, reply);
        if (s->feed->again == NULL) {
            kvfi_log(KVF_LOG_WARN, "redis: a block was not stored: %s", s->conn->said);
        }
        over = stop_sending(s, r.item) || over;
        if (kvfi_reply_refuses_saves(reply, s->feed->again != NULL)) {
            s->conn->refuses = true;
            s->dry = true; /* the next would be transferred only to be refused as well */
        }
    }
    if (over) {
        finish(s, r.item);
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

/* The server has not answered: it may still read later what was lent to it. */
static void lose(saver *s, kvfi_item *item) {
    item->lent = item->lent || (item->may_lend && s->conn->lends);
    kvfi_lost_add(s->lost, item);
}

/* The connection is gone, and all items that were under way are lost, except the first if one of its parts was already
 * refused. Last first, because they are taken from a stack. */
static void abandon(saver *s, kvf_reason why) {
    kvfi_item *refused = s->num > 0 && s->why != KVF_WHY_NONE ? at(s, 0)->item : NULL;
    const kvfi_item *behind = s->item;
    s->lost->why = why;
    if (s->item != NULL && s->item != refused) {
        lose(s, s->item);
    }
    for (unsigned i = s->num; i > 0; i--) {
        kvfi_item *item = at(s, i - 1)->item;
        if (item != NULL && item != behind && item != refused) {
            lose(s, item);
            behind = item;
        }
    }
    if (refused != NULL) {
        refused->lent = refused->lent || (refused->may_lend && s->conn->lends);
        kvfi_feed_done(s->feed, refused, KVF_MISS, s->why);
    }
}

bool kvfi_redis_save_on(kvfi_redis *tier, kvfi_conn *conn, kvfi_feed *feed, kvfi_lost *lost) {
    saver s;
    s.tier = tier;
    s.conn = conn;
    s.feed = feed;
    s.lost = lost;
    s.head = s.num = 0;
    s.unanswered = 0;
    s.item = NULL;
    s.why = KVF_WHY_NONE;
    s.dry = s.drawn = false;
    s.cancel_us = KVFI_NEVER;
    for (;;) {
        bool offered = offer(&s);
        kvf_reason why = kvfi_conn_send(conn);
        if (why == KVF_WHY_NONE && !(offered && kvfi_conn_all_sent(conn))) {
            if (s.num == 0 && s.item == NULL) {
                return true;
            }
            why = wait_and_hear(&s);
        }
        if (why != KVF_WHY_NONE) {
            abandon(&s, why);
            return false;
        }
    }
}

void kvfi_redis_put(kvfi_tier *base, kvfi_feed *feed) {
    kvfi_redis_run(kvfi_redis_of(base), feed, KVFI_LANE_STORE, kvfi_redis_save_on);
}
