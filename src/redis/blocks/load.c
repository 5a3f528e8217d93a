/* SPDX-License-Identifier: Apache-2.0
 *
 * Loading: GETs pipelined on one connection, each body straight into its place.
 *
 * The amount requested at once is counted in bytes. A server like Redis 7 executes all commands that it has read before
 * it sends the first reply. Requesting too much makes it hold everything at once, which falls out of its cache;
 * requesting too little leaves it idle while we read the end of a reply and check it. So the next value is requested
 * when it fits into the window beside what is still to come, and in any case when only the tail of a value is to come.
 */
#include "redis/blocks/ring.h"

#define WORTH_CLOSING   (512u << 10) /* discarding this much costs more than another connection */
#define CANCEL_GRACE_US 20000        /* a cancelled batch ends within 50 ms: a wait looks every 20 */
#define TAIL_BYTES      (160u << 10) /* the default buffer of a unix socket: by then the server has sent everything */

typedef struct loader {
    kvfi_redis *tier;
    kvfi_conn *conn;
    kvfi_feed *feed;
    kvfi_lost *lost;
    kvfi_ring ring;
    size_t usual;     /* the length of the last requested value: a guess at the next */
    uint64_t part;    /* the next part of the item being requested */
    kvfi_place rest;  /* from there on */
    bool dry;         /* the feed has no more */
    int64_t until_us; /* the deadline; sooner once the batch is cancelled */
    bool named;       /* the decoder knows the place of the next reply */
} loader;

/* ---- asking ---- */

/* Requests the next part of the current item. */
static void ask_part(loader *l, kvfi_cmd *out) {
    kvfi_name name;
    kvfi_item *item = l->ring.item;
    size_t len = (size_t)kvfi_part_len(item->bytes, kvfi_redis_part_of(l->tier, item), l->part);
    kvfi_name_of(&name, l->tier->conf.prefix, &item->addr, l->part);
    if (l->conn->asking) {
        kvfi_cmd_array(out, 1);
        kvfi_cmd_text(out, "ASKING");
        kvfi_ring_push(&l->ring, &(kvfi_request){0});
    }
    kvfi_cmd_array(out, 2);
    kvfi_cmd_text(out, "GET");
    kvfi_cmd_bulk(out, name.text, name.len);
    kvfi_request r = {.item = item, .place = l->rest, .last = len == l->rest.bytes};
    r.place.bytes = len;
    kvfi_ring_push(&l->ring, &r);
    kvfi_place_advance(&l->rest, len);
    l->part++;
    l->usual = len;
    if (r.last) {
        l->ring.item = NULL;
    }
}

/* Bytes that were requested and not read. */
static uint64_t unread(loader *l) {
    uint64_t left = kvfi_resp_left(&l->conn->in);
    return left > 0 && l->ring.num > 0 ? l->ring.bytes - kvfi_ring_at(&l->ring, 0)->place.bytes + left : l->ring.bytes;
}

static bool may_ask(loader *l) {
    uint64_t outstanding = unread(l);
    uint64_t window = l->tier->conf.window;
    uint64_t tail = TAIL_BYTES < window / 4 ? TAIL_BYTES : window / 4;
    const kvfi_item *item = l->ring.item;
    uint64_t next = item != NULL ? kvfi_part_len(item->bytes, kvfi_redis_part_of(l->tier, item), l->part) : l->usual;
    return l->ring.num + 1 < KVFI_RING && (outstanding <= tail || outstanding + next <= window);
}

static kvfi_item *draw(loader *l) {
    kvfi_item *item = kvfi_lost_next(l->lost);
    if (item == NULL && !l->dry) {
        item = kvfi_feed_next(l->feed);
        l->dry = item == NULL;
    }
    if (item != NULL) {
        l->rest = (kvfi_place){.iov = item->iov, .bytes = item->bytes};
        l->part = 0;
    }
    return item;
}

static void ask(loader *l) {
    while (may_ask(l)) {
        kvfi_cmd *out = kvfi_conn_room(l->conn, KVFI_COMMAND_BYTES);
        if (out == NULL) {
            return;
        }
        if (l->ring.item == NULL) {
            l->ring.item = draw(l);
        }
        if (l->ring.item == NULL) {
            return;
        }
        ask_part(l, out);
    }
}

/* ---- a hit on a record that has used up a quarter of its time to live renews it ---- */

static bool is_aging(const kvfi_redis *tier, const kvfi_item *item) {
    kvfi_header header;
    if (tier->conf.ttl_s == 0 || item->ttl_s != 0 || item->iov[0].iov_len < KVFI_HEADER_BYTES ||
        kvfi_header_decode(&header, item->iov[0].iov_base) != KVF_WHY_NONE) {
        return false;
    }
    return kvfi_sat_sub(kvfi_sys->wall_us() / 1000000, header.stored_s) > tier->conf.ttl_s / 4;
}

static void refresh(loader *l, const kvfi_item *item) {
    if (!is_aging(l->tier, item)) {
        return;
    }
    uint64_t parts = kvfi_num_parts(item->bytes, kvfi_redis_part_of(l->tier, item));
    for (uint64_t part = 0; part < parts && l->ring.num < KVFI_RING; part++) {
        kvfi_name name;
        kvfi_cmd *out = kvfi_conn_room(l->conn, KVFI_COMMAND_BYTES);
        if (out == NULL) {
            return; /* next time, then */
        }
        kvfi_name_of(&name, l->tier->conf.prefix, &item->addr, part);
        kvfi_cmd_array(out, 3);
        kvfi_cmd_text(out, "PEXPIRE");
        kvfi_cmd_bulk(out, name.text, name.len);
        kvfi_cmd_number(out, kvfi_ttl_ms(l->tier->conf.ttl_s, &item->addr));
        kvfi_ring_push(&l->ring, &(kvfi_request){0});
    }
}

/* ---- answers ---- */

/* The item is complete. The next value is requested before this one is checked: the server works meanwhile. */
static kvf_reason finish(loader *l, kvfi_item *item) {
    ask(l);
    kvf_reason sent = kvfi_conn_send(l->conn);
    kvfi_ring_finish(&l->ring, l->feed, item);
    if (item->status == KVF_OK) {
        refresh(l, item);
    }
    return sent;
}

/* NULL, or what is wrong with the reply. */
static const char *objection(loader *l, const kvfi_reply *reply) {
    if (l->ring.num == 0) {
        return "the server sent something unasked";
    }
    if (!reply->last) {
        return "the server answered a GET with an array";
    }
    bool fits = reply->kind == KVFI_RESP_BULK || reply->kind == KVFI_RESP_NIL || reply->kind == KVFI_RESP_OVERSIZE ||
                reply->kind == KVFI_RESP_ERROR;
    return fits || kvfi_ring_at(&l->ring, 0)->item == NULL
               ? NULL
               : "the server answered a GET with something other than a string";
}

static kvf_reason judge(loader *l, const kvfi_request *r, const kvfi_reply *reply) {
    switch (reply->kind) {
    case KVFI_RESP_BULK:
        return (uint64_t)reply->num == r->place.bytes ? KVF_WHY_NONE : KVF_WHY_TRUNCATED;
    case KVFI_RESP_NIL:
        return KVF_WHY_ABSENT;
    case KVFI_RESP_ERROR:
        return kvfi_redis_refusal(l->feed, r->item, reply);
    default:
        return KVF_WHY_TRUNCATED; /* too long */
    }
}

/* A value longer than the `bytes` requested is read and discarded, since what was requested behind it on this connection
 * would be lost with the connection. For one much too long that is not worth it. */
static bool is_worth_draining(const loader *l, const kvfi_reply *reply, size_t bytes) {
    return reply->kind != KVFI_RESP_OVERSIZE || (uint64_t)reply->num <= 4 * l->tier->conf.part ||
           (uint64_t)reply->num / 2 <= bytes;
}

/* Takes one reply, which belongs to the request at the head of the ring. After a failure of one part the item's other
 * parts are not requested, and the item is complete once none of them is under way. */
static kvf_reason take_answer(loader *l, const kvfi_reply *reply) {
    const char *wrong = objection(l, reply);
    if (wrong != NULL) {
        return kvfi_conn_broken(l->conn, wrong);
    }
    kvfi_request r = *kvfi_ring_at(&l->ring, 0);
    kvfi_ring_pop(&l->ring);
    l->named = false;
    if (r.item == NULL) {
        return KVF_WHY_NONE;
    }
    kvf_reason why = judge(l, &r, reply), sent = KVF_WHY_NONE;
    if (why == KVF_WHY_NONE ? r.last : kvfi_ring_fail(&l->ring, &r, why)) {
        sent = finish(l, r.item);
    }
    if (sent == KVF_WHY_NONE && !is_worth_draining(l, reply, r.place.bytes)) {
        return kvfi_conn_broken(l->conn, "a stored value is much too long");
    }
    return sent;
}

/* ---- the exchange ---- */

/* Must anything be waited for? Refreshes need not. */
static bool is_busy(loader *l) {
    if (kvfi_resp_draining(&l->conn->in)) {
        return true;
    }
    for (unsigned i = 0; i < l->ring.num; i++) {
        if (kvfi_ring_at(&l->ring, i)->item != NULL) {
            return true;
        }
    }
    return false;
}

/* Cancelled: an item that is nearly complete is read to its end, which keeps the connection usable, unless the server is
 * silent. Otherwise the connection is dropped with it. */
static bool is_unwanted(loader *l) {
    if (l->conn->cancelled == NULL || !kvfi_feed_is_cancelled(l->feed)) {
        return false;
    }
    l->conn->cancelled = NULL;
    int64_t soon_us = kvfi_deadline(CANCEL_GRACE_US);
    l->until_us = soon_us < l->until_us ? soon_us : l->until_us;
    return unread(l) > WORTH_CLOSING;
}

/* One step: a reply, or some bytes, or a wait. */
static kvf_reason step(loader *l) {
    kvfi_reply reply;
    if (!l->named && l->ring.num > 0 && kvfi_ring_at(&l->ring, 0)->item != NULL) {
        kvfi_resp_into(&l->conn->in, kvfi_ring_at(&l->ring, 0)->place);
        l->named = true;
    }
    kvfi_resp_event event = kvfi_resp_next(&l->conn->in, &reply);
    if (event == KVFI_RESP_REPLY) {
        return take_answer(l, &reply);
    }
    if (event == KVFI_RESP_BAD) {
        return kvfi_conn_broken(l->conn, KVFI_NOT_RESP);
    }
    if (!is_busy(l)) {
        return KVF_WHY_NONE; /* the last of what had to be discarded has come */
    }
    if (is_unwanted(l)) {
        kvfi_conn_close(l->conn);
        return KVF_WHY_CLOSED;
    }
    bool got = false;
    uint64_t before = l->conn->received;
    kvf_reason why = kvfi_conn_move(l->conn, &got, l->until_us);
    kvfi_feed_moved(l->feed, l->conn->received - before);
    return why == KVF_WHY_BUDGET && kvfi_feed_is_cancelled(l->feed) ? KVF_WHY_CLOSED : why;
}

/* Loads until the feed is dry (true) or the connection fails (false). */
bool kvfi_redis_load_on(kvfi_redis *tier, kvfi_conn *conn, kvfi_feed *feed, kvfi_lost *lost) {
    loader l;
    l.tier = tier;
    l.conn = conn;
    l.feed = feed;
    l.lost = lost;
    l.until_us = feed->deadline_us;
    kvfi_ring_init(&l.ring);
    l.usual = 0;
    l.dry = l.named = false;
    for (;;) {
        ask(&l);
        if (!is_busy(&l)) {
            break;
        }
        kvf_reason why = step(&l);
        if (why != KVF_WHY_NONE) {
            kvfi_ring_abandon(&l.ring, feed, lost, why, false);
            return false;
        }
    }
    /* Refreshes are sent and not waited for: the next user of the connection skips their replies. */
    conn->owed += l.ring.num;
    if (kvfi_conn_send(conn) == KVF_WHY_NONE && !kvfi_conn_all_sent(conn)) {
        kvfi_conn_close(conn);
    }
    return true;
}

void kvfi_redis_get(kvfi_tier *base, kvfi_feed *feed) {
    kvfi_redis *tier = kvfi_redis_of(base);
    if (atomic_fetch_add(&feed->workers, 1) < kvfi_redis_conns_for(tier, feed)) {
        kvfi_redis_run(tier, feed, KVFI_LANE_LOAD, kvfi_redis_load_on);
    }
}
