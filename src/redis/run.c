/* SPDX-License-Identifier: Apache-2.0
 *
 * The loop of the hot path: an exchange (load.c, save.c) on connections of one server until the feed is dry.
 */
#include "redis/redis.h"
#include "redis/talk.h"

static void give_up(kvfi_feed *feed, kvf_reason why) {
    for (kvfi_item *item = kvfi_feed_draw(feed); item != NULL; item = kvfi_feed_draw(feed)) {
        kvfi_feed_done(feed, item, KVF_MISS, why);
    }
}

/* Runs the exchange on a connection. True when the feed gives no more. */
static bool run_once(kvfi_redis *tier, kvfi_node *node, kvfi_conn *conn, kvfi_feed *feed, kvfi_exchange *exchange,
                     bool asking) {
    conn->asking = asking;
    conn->refuses = false;
    bool done = exchange(tier, conn, feed);
    conn->asking = false;
    if (tier->topology == NULL && strncmp(conn->said, "READONLY", 8) == 0) {
        kvfi_node_renew(node, conn);
    }
    return done;
}

/* What all servers of the tier hold before they evict, where each holds as much as this one; 0 = not known. */
static uint64_t most_of(kvfi_redis *tier, kvfi_node *node) {
    kvfi_node *nodes[KVFI_MAX_NODES];
    uint64_t most = atomic_load_explicit(&node->most, memory_order_relaxed), all = 0;
    size_t num = tier->topology != NULL ? kvfi_redis_nodes(tier, nodes, KVFI_MAX_NODES) : 1;
    return __builtin_mul_overflow(most, (uint64_t)(num > 0 ? num : 1), &all) ? 0 : all;
}

/* The same for saves, where they may go. KVF_WHY_UNREACHABLE: the connection is gone. */
static kvf_reason save_once(kvfi_redis *tier, kvfi_node *node, kvfi_conn *conn, kvfi_feed *feed,
                            kvfi_exchange *exchange, bool asking, bool *done) {
    *done = false;
    kvf_reason why = kvfi_redis_may_save(tier, node, conn, feed->deadline_us);
    if (why != KVF_WHY_NONE) {
        return why;
    }
    conn->room = kvfi_node_admission(node).bounded ? &node->room : NULL;
    conn->most = most_of(tier, node);
    conn->loads = &node->lanes[KVFI_LANE_LOAD].num_taken;
    *done = run_once(tier, node, conn, feed, exchange, asking);
    if (*done || conn->refuses) {
        kvfi_node_note_saves(node, conn->refuses);
    }
    *done = *done && kvfi_feed_is_dry(feed); /* loads went first, or it is to be asked for more room */
    return conn->refuses ? KVF_WHY_BREAKER : KVF_WHY_NONE;
}

kvf_reason kvfi_redis_run_on(kvfi_redis *tier, kvfi_node *node, kvfi_feed *feed, kvfi_lane_kind lane,
                             kvfi_exchange *exchange, bool asking) {
    bool done = false;
    unsigned lost = 0; /* connections, before anything went over them */
    while (!done && !kvfi_feed_is_dry(feed)) {
        kvfi_conn *conn = NULL;
        if (lane == KVFI_LANE_STORE) {
            kvfi_node_yield(node);
        }
        kvf_reason why = kvfi_node_take(node, &conn, NULL, lane, feed, feed->deadline_us);
        if (why != KVF_WHY_NONE) {
            return why;
        }
        if (lane == KVFI_LANE_STORE) {
            why = save_once(tier, node, conn, feed, exchange, asking, &done);
        } else {
            done = run_once(tier, node, conn, feed, exchange, asking);
        }
        kvfi_node_give(node, lane, conn);
        if (why != KVF_WHY_NONE && (why != KVF_WHY_UNREACHABLE || ++lost > 1)) {
            return why;
        }
    }
    return KVF_WHY_NONE;
}

kvf_reason kvfi_redis_run(kvfi_redis *tier, kvfi_feed *feed, kvfi_lane_kind lane, kvfi_exchange *exchange) {
    kvf_reason why = kvfi_redis_run_on(tier, &tier->node, feed, lane, exchange, false);
    if (why != KVF_WHY_NONE) {
        give_up(feed, why);
        return why;
    }
    return kvfi_sys->now_us() >= feed->deadline_us ? KVF_WHY_BUDGET : KVF_WHY_UNREACHABLE;
}

uint32_t kvfi_redis_conns_for(const kvfi_redis *tier, const kvfi_feed *feed) {
    bool asked = tier->conf.share_below == UINT64_MAX;
    bool large = feed->num > 0 && feed->items[0].bytes >= tier->conf.share_below;
    return large || (feed->watch != NULL && !asked) ? 1 : tier->conf.conns;
}
