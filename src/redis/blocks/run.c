/* SPDX-License-Identifier: Apache-2.0
 *
 * The loop of the hot path: an exchange (load.c, save.c) on connections of one server until the feed is dry.
 */
#include "redis/advice/advice.h"
#include "redis/blocks/blocks.h"
#include "redis/cluster/talk.h"

static void give_up(kvfi_feed *feed, kvf_reason why) {
    for (kvfi_item *item = kvfi_feed_draw(feed); item != NULL; item = kvfi_feed_draw(feed)) {
        kvfi_feed_done(feed, item, KVF_MISS, why);
    }
}

/* One feed on connections of one server. */
typedef struct run {
    kvfi_redis *tier;
    kvfi_node *node;
    kvfi_feed *feed;
    kvfi_lane_kind lane;
    kvfi_exchange *exchange;
    bool asking;
    kvfi_lost lost;
    unsigned stalls; /* stalls that were forgiven */
} run;

/* Runs the exchange on a connection. True when the feed has no more. */
static bool run_once(run *r, kvfi_conn *conn) {
    conn->asking = r->asking;
    conn->refuses = false;
    bool done = r->exchange(r->tier, conn, r->feed, &r->lost);
    if (r->tier->topology == NULL && strncmp(conn->said, "READONLY", 8) == 0) {
        kvfi_node_renew(r->node, conn);
    }
    return done;
}

/* What all servers of the tier hold before they evict, if each holds as much as this one; 0 = unknown. */
static uint64_t most_of(kvfi_redis *tier, kvfi_node *node) {
    kvfi_node *nodes[KVFI_MAX_NODES];
    uint64_t most = atomic_load_explicit(&node->most, memory_order_relaxed), all = 0;
    size_t num = tier->topology != NULL ? kvfi_topology_primaries(tier->topology, nodes, KVFI_MAX_NODES) : 1;
    return __builtin_mul_overflow(most, (uint64_t)num, &all) ? 0 : all;
}

/* The same for saves, if they are admitted. KVF_WHY_UNREACHABLE: the connection is gone. */
static kvf_reason save_once(run *r, kvfi_conn *conn, bool *done) {
    *done = false;
    kvf_reason why = kvfi_redis_may_save(r->tier, r->node, conn, r->feed->deadline_us);
    if (why != KVF_WHY_NONE) {
        return why;
    }
    conn->room = kvfi_node_admission(r->node).bounded ? &r->node->room : NULL;
    conn->longest = atomic_load_explicit(&r->node->longest, memory_order_relaxed);
    conn->most = most_of(r->tier, r->node);
    conn->loads = &r->node->lanes[KVFI_LANE_LOAD].num_taken;
    *done = run_once(r, conn);
    if (*done || conn->refuses) {
        kvfi_node_note_saves(r->node, conn->refuses);
    }
    *done = *done && kvfi_feed_is_dry(r->feed); /* loads go first, or the server must be asked for more room */
    return conn->refuses ? KVF_WHY_BREAKER : KVF_WHY_NONE;
}

static void give_back(run *r, kvf_reason why) {
    for (kvfi_item *item = kvfi_lost_next(&r->lost); item != NULL; item = kvfi_lost_next(&r->lost)) {
        kvfi_feed_done(r->feed, item, KVF_MISS, why);
    }
}

/* Nobody waits for what is lost: cancelled, interrupted by a store that closes, or late. */
static bool is_over(const run *r) {
    const kvfi_feed *whole = r->feed->whole != NULL ? r->feed->whole : r->feed;
    return kvfi_feed_is_cancelled(r->feed) || atomic_load_explicit(&whole->limit, memory_order_relaxed) == 0 ||
           kvfi_sys->now_us() >= r->feed->deadline_us;
}

/* Requests on a connection that ended are repeated if that may have been only the connection's fault. */
static void settle(run *r, kvfi_conn *conn) {
    if (!kvfi_node_forgives(r->node, conn, &r->stalls) || is_over(r)) {
        give_back(r, r->lost.why);
    }
}

static bool is_wanted(const run *r) {
    return r->lost.num > 0 || !kvfi_feed_is_dry(r->feed);
}

static kvf_reason run_all(run *r) {
    bool done = false;
    unsigned lost = 0; /* connections that ended before anything went over them */
    while (!done && is_wanted(r)) {
        kvfi_conn *conn = NULL;
        if (r->lane == KVFI_LANE_STORE) {
            kvfi_node_yield(r->node);
        }
        bool must = r->lost.num > 0; /* else a dry feed is not waited for */
        kvf_reason why = kvfi_node_take(r->node, &conn, NULL, r->lane, r->feed, must, r->feed->deadline_us);
        if (why != KVF_WHY_NONE) {
            return why;
        }
        if (r->lane == KVFI_LANE_STORE) {
            why = save_once(r, conn, &done);
        } else {
            done = run_once(r, conn);
        }
        settle(r, conn);
        kvfi_node_give(r->node, r->lane, conn);
        if (why != KVF_WHY_NONE && (why != KVF_WHY_UNREACHABLE || ++lost > 1)) {
            return why;
        }
    }
    return KVF_WHY_NONE;
}

kvf_reason kvfi_redis_run_on(kvfi_redis *tier, kvfi_node *node, kvfi_feed *feed, kvfi_lane_kind lane,
                             kvfi_exchange *exchange, bool asking) {
    run r;
    r.tier = tier;
    r.node = node;
    r.feed = feed;
    r.lane = lane;
    r.exchange = exchange;
    r.asking = asking;
    r.lost.num = 0;
    r.lost.why = KVF_WHY_UNREACHABLE;
    r.stalls = 0;
    kvf_reason why = run_all(&r);
    give_back(&r, r.lost.why);
    return why;
}

void kvfi_redis_run(kvfi_redis *tier, kvfi_feed *feed, kvfi_lane_kind lane, kvfi_exchange *exchange) {
    kvf_reason why = kvfi_redis_run_on(tier, &tier->node, feed, lane, exchange, false);
    if (why != KVF_WHY_NONE) {
        give_up(feed, why);
    }
}

uint32_t kvfi_redis_conns_for(const kvfi_redis *tier, const kvfi_feed *feed) {
    bool asked = tier->conf.share_below == UINT64_MAX;
    bool large = feed->num > 0 && feed->items[0].bytes >= tier->conf.share_below;
    return large || (feed->watch != NULL && !asked) ? 1 : tier->conf.conns;
}
