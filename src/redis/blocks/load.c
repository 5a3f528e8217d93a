/* SPDX-License-Identifier: Apache-2.0
 *
 * Loading: GETs pipelined on one connection, each body straight into its place.
 *
 * The amount requested at once is counted in bytes. A server like Redis 7 executes all commands that it has read before
 * it sends the first reply. Requesting too much makes it hold everything at once, which falls out of its cache;
 * requesting too little leaves it idle while we read the end of a reply and check it. So the next value is requested
 * when it fits into the window beside what is still to come, and in any case when only the tail of a value is to come.
 */
#include "redis/blocks/blocks.h"

#define RING          256u
#define WORTH_CLOSING (512u << 10) /* discarding this much costs more than another connection */
#define TAIL_BYTES    (160u << 10) /* the default buffer of a unix socket: by then the server has sent everything */

/* One command that has been sent, or is about to be, and its reply. */
typedef struct request {
    kvfi_item *item; /* NULL: a PEXPIRE, whose reply nobody needs */
    kvfi_place place;
    bool last; /* of its item */
} request;

typedef struct loader {
    kvfi_redis *tier;
    kvfi_conn *conn;
    kvfi_feed *feed;
    kvfi_lost *lost;
    request ring[RING];
    unsigned head, num;
    uint64_t asked;  /* bytes of the places in the ring */
    size_t usual;    /* the length of the last requested value: a guess at the next */
    kvfi_item *item; /* the item being requested, if it has several parts */
    uint64_t part;   /* its next part */
    kvfi_place rest; /* from there on */
    kvf_reason why;  /* of the item at the head of the ring, so far */
    bool dry;        /* the feed has no more */
    bool named;      /* the decoder knows the place of the next reply */
} loader;

static request *at(loader *l, unsigned index) {
    return &l->ring[(l->head + index) % RING];
}

/* ---- asking ---- */

static void push(loader *l, const request *r) {
    *at(l, l->num++) = *r;
    l->asked += r->item != NULL ? r->place.bytes : 0;
}

/* Requests the next part of the current item. */
static void ask_part(loader *l, kvfi_cmd *out) {
    kvfi_name name;
    kvfi_item *item = l->item;
    size_t len = (size_t)kvfi_part_len(item->bytes, kvfi_redis_part_of(l->tier, item), l->part);
    kvfi_name_of(&name, l->tier->conf.prefix, &item->addr, l->part);
    if (l->conn->asking) {
        kvfi_cmd_array(out, 1);
        kvfi_cmd_text(out, "ASKING");
        push(l, &(request){0});
    }
    kvfi_cmd_array(out, 2);
    kvfi_cmd_text(out, "GET");
    kvfi_cmd_bulk(out, name.text, name.len);
    request r = {.item = item, .place = l->rest, .last = len == l->rest.bytes};
    r.place.bytes = len;
    push(l, &r);
    kvfi_place_advance(&l->rest, len);
    l->part++;
    l->usual = len;
    if (r.last) {
        l->item = NULL;
    }
}

/* Bytes that were requested and not read. */
static uint64_t unread(loader *l) {
    uint64_t left = kvfi_resp_left(&l->conn->in);
    return left > 0 && l->num > 0 ? l->asked - at(l, 0)->place.bytes + left : l->asked;
}

static bool may_ask(loader *l) {
    uint64_t outstanding = unread(l);
    uint64_t window = l->tier->conf.window;
    uint64_t tail = TAIL_BYTES < window / 4 ? TAIL_BYTES : window / 4;
    uint64_t next =
        l->item != NULL ? kvfi_part_len(l->item->bytes, kvfi_redis_part_of(l->tier, l->item), l->part) : l->usual;
    return l->num + 1 < RING && (outstanding <= tail || outstanding + next <= window);
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
        if (l->item == NULL) {
            l->item = draw(l);
        }
        if (l->item == NULL) {
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
    for (uint64_t part = 0; part < parts && l->num < RING; part++) {
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
        push(l, &(request){0});
    }
}

/* ---- answers ---- */

/* The item at the head is complete. Its memory is not touched any more. */
static void finish(loader *l, kvfi_item *item) {
    kvf_reason why = l->why;
    l->why = KVF_WHY_NONE;
    kvfi_feed_done(l->feed, item, why == KVF_WHY_NONE ? KVF_OK : KVF_MISS, why);
    if (item->status == KVF_OK) {
        refresh(l, item);
    }
}

/* A part is missing or wrong, so the others need not be requested. Returns true when none of them is under way. */
static bool stop_asking(loader *l, const kvfi_item *item) {
    if (l->item != item) {
        return false;
    }
    l->item = NULL;
    for (unsigned i = l->num; i > 0; i--) {
        if (at(l, i - 1)->item == item) {
            at(l, i - 1)->last = true;
            return false;
        }
    }
    return true;
}

static kvf_reason judge(loader *l, kvfi_item *item, const kvfi_reply *reply, size_t bytes) {
    switch (reply->kind) {
    case KVFI_RESP_BULK:
        return (uint64_t)reply->num == bytes ? KVF_WHY_NONE : KVF_WHY_TRUNCATED;
    case KVFI_RESP_NIL:
        return KVF_WHY_ABSENT;
    case KVFI_RESP_OVERSIZE:
        return KVF_WHY_TRUNCATED;
    case KVFI_RESP_ERROR:
        return kvfi_redis_refusal(l->feed, item, reply);
    default:
        return KVF_NUM_REASONS; /* not a reply to a GET */
    }
}

/* A value slightly longer than the `bytes` requested is read and discarded. For one much too long that is not worth
 * it, unless its length was a guess: then it is requested once more, on this connection. */
static bool is_worth_draining(const loader *l, const kvfi_reply *reply, size_t bytes) {
    return reply->kind != KVFI_RESP_OVERSIZE || (uint64_t)reply->num <= 4 * l->tier->conf.part ||
           (l->feed->once_more && (uint64_t)reply->num / 2 <= bytes);
}

/* Takes one reply, which belongs to the request at the head of the ring. After a failure of one part the item's other
 * parts are not requested, and the item is complete once none of them is under way. */
static kvf_reason take_answer(loader *l, const kvfi_reply *reply) {
    if (l->num == 0) {
        return kvfi_conn_broken(l->conn, "the server sent something unasked");
    }
    if (!reply->last) {
        return kvfi_conn_broken(l->conn, "the server answered a GET with an array");
    }
    request r = *at(l, 0);
    l->named = false;
    if (r.item == NULL) {
        l->head++;
        l->num--;
        return KVF_WHY_NONE;
    }
    kvf_reason why = judge(l, r.item, reply, r.place.bytes);
    if (why == KVF_NUM_REASONS) {
        return kvfi_conn_broken(l->conn, "the server answered a GET with something other than a string");
    }
    l->head++;
    l->num--;
    l->asked -= r.place.bytes;
    bool over = r.last;
    if (why != KVF_WHY_NONE && l->why == KVF_WHY_NONE) {
        l->why = why;
        over = stop_asking(l, r.item) || over;
    }
    if (over) {
        /* The next value is requested before this one is checked: the server works meanwhile. */
        ask(l);
        kvf_reason sent = kvfi_conn_send(l->conn);
        finish(l, r.item);
        if (sent != KVF_WHY_NONE) {
            return sent;
        }
    }
    return is_worth_draining(l, reply, r.place.bytes) ? KVF_WHY_NONE
                                                      : kvfi_conn_broken(l->conn, "a stored value is much too long");
}

/* ---- the exchange ---- */

/* Must anything be waited for? Refreshes need not. */
static bool is_busy(loader *l) {
    if (kvfi_resp_draining(&l->conn->in)) {
        return true;
    }
    for (unsigned i = 0; i < l->num; i++) {
        if (at(l, i)->item != NULL) {
            return true;
        }
    }
    return false;
}

/* Cancelled: an item that is nearly complete is read to its end, which keeps the connection usable. Otherwise the
 * connection is dropped with it. */
static bool is_unwanted(loader *l) {
    if (l->conn->cancelled == NULL || !kvfi_feed_is_cancelled(l->feed)) {
        return false;
    }
    l->conn->cancelled = NULL;
    return unread(l) > WORTH_CLOSING;
}

/* One step: a reply, or some bytes, or a wait. */
static kvf_reason step(loader *l) {
    kvfi_reply reply;
    if (!l->named && l->num > 0 && at(l, 0)->item != NULL) {
        kvfi_resp_into(&l->conn->in, at(l, 0)->place);
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
    kvf_reason why = kvfi_conn_send(l->conn);
    if (why == KVF_WHY_NONE) {
        why = kvfi_conn_recv(l->conn, &got);
        kvfi_feed_moved(l->feed, l->conn->received - before);
    }
    if (why == KVF_WHY_NONE) {
        why = got ? kvfi_conn_in_time(l->conn, l->feed->deadline_us) : kvfi_conn_wait(l->conn, l->feed->deadline_us);
    }
    return why;
}

/* The connection is gone, and all items that were under way are lost, except the first if one of its parts has already
 * missed. Last first, because they are taken from a stack. */
static void abandon(loader *l, kvf_reason why) {
    kvfi_item *missed = l->num > 0 && l->why != KVF_WHY_NONE ? at(l, 0)->item : NULL;
    const kvfi_item *behind = l->item;
    l->lost->why = why;
    if (l->item != NULL && l->item != missed) {
        kvfi_lost_add(l->lost, l->item);
    }
    for (unsigned i = l->num; i > 0; i--) {
        kvfi_item *item = at(l, i - 1)->item;
        if (item != NULL && item != behind && item != missed) {
            kvfi_lost_add(l->lost, item);
            behind = item;
        }
    }
    if (missed != NULL) {
        kvfi_feed_done(l->feed, missed, KVF_MISS, l->why);
    }
}

/* Loads until the feed is dry (true) or the connection fails (false). */
bool kvfi_redis_load_on(kvfi_redis *tier, kvfi_conn *conn, kvfi_feed *feed, kvfi_lost *lost) {
    loader l;
    l.tier = tier;
    l.conn = conn;
    l.feed = feed;
    l.lost = lost;
    l.head = l.num = 0;
    l.asked = l.usual = 0;
    l.item = NULL;
    l.why = KVF_WHY_NONE;
    l.dry = l.named = false;
    for (;;) {
        ask(&l);
        if (!is_busy(&l)) {
            break;
        }
        kvf_reason why = step(&l);
        if (why != KVF_WHY_NONE) {
            abandon(&l, why);
            return false;
        }
    }
    /* Refreshes are sent and not waited for: the next user of the connection skips their replies. */
    conn->owed += l.num;
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
