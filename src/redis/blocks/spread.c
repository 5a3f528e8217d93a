/* SPDX-License-Identifier: Apache-2.0
 *
 * A batch over several servers: its items are divided by the server that has their slot. Each server's share is a
 * separate feed, moved by the same exchange as with a single server (run.c), at the same time as the others.
 *
 * Items of a server that is down miss at once, unless the map turns out to be stale.
 */
#include "redis/blocks/blocks.h"
#include "redis/cluster/rounds.h"

struct flight;

/* The items of one server. */
typedef struct group {
    kvfi_feed feed; /* the first member: kvfi_feed.again finds its group by it */
    struct flight *flight;
    const kvfi_share *share;
} group;

/* A batch under way. An item that is not complete has in `why` what it will be if there is no further round. */
typedef struct flight {
    kvfi_redis *tier;
    kvfi_feed *whole;
    kvfi_rounds *rounds;
    kvfi_lane_kind lane;
    kvfi_exchange *exchange;
    _Atomic unsigned next_start;
    group groups[KVFI_MAX_SHARES];
} flight;

static uint32_t number_of(const group *g, const kvfi_item *item) {
    return (uint32_t)(item - g->flight->whole->items);
}

/* kvfi_feed.again: a failed item is in the next round, if its server was wrong. */
static bool again(kvfi_feed *feed, kvfi_item *item) {
    const group *g = (group *)(void *)feed;
    return g->flight->rounds->fates[number_of(g, item)] != KVFI_FATE_OVER;
}

kvf_reason kvfi_redis_refusal(kvfi_feed *feed, kvfi_item *item, const kvfi_reply *reply) {
    if (feed->again == NULL) {
        return kvfi_reply_reason(reply);
    }
    const group *g = (group *)(void *)feed;
    kvfi_fate fate = kvfi_rounds_learn(g->flight->rounds, number_of(g, item), g->share->node, reply);
    item->why = KVF_WHY_SERVER;
    if (fate == KVFI_FATE_OVER && g->flight->lane == KVFI_LANE_STORE) {
        kvfi_log(KVF_LOG_WARN, "redis: a block was not stored: %.*s", (int)(reply->len < 160 ? reply->len : 160),
                 reply->text);
    }
    return kvfi_reply_reason(reply);
}

/* ---- one server's share ---- */

/* The server is down. Items that the map now gives to another server go there; the rest misses. */
static void give_up(group *g, kvf_reason why) {
    kvfi_rounds *rounds = g->flight->rounds;
    if (why != KVF_WHY_BUDGET && why != KVF_WHY_NOMEM && why != KVF_WHY_FULL && why != KVF_WHY_CLOSED) {
        kvfi_topology_refresh(rounds->topology, g->feed.deadline_us);
    }
    for (kvfi_item *item = kvfi_feed_draw(&g->feed); item != NULL; item = kvfi_feed_draw(&g->feed)) {
        const kvfi_node *node = kvfi_rounds_node(rounds, number_of(g, item));
        if (node != NULL && node != g->share->node) {
            rounds->fates[number_of(g, item)] = KVFI_FATE_MOVED;
            item->why = why;
        }
        kvfi_feed_done(&g->feed, item, KVF_MISS, why);
    }
}

static void run_group(group *g) {
    flight *f = g->flight;
    kvf_reason why = KVF_WHY_UNREACHABLE;
    if (g->share->node != NULL) {
        why = kvfi_redis_run_on(f->tier, g->share->node, &g->feed, f->lane, f->exchange, g->share->asking);
    }
    if (why != KVF_WHY_NONE) {
        give_up(g, why);
    }
}

/* One thread: begins with one server, and then helps with any other. */
static void work(void *arg) {
    flight *f = arg;
    unsigned start = atomic_fetch_add(&f->next_start, 1);
    unsigned num = f->rounds->num_shares;
    for (unsigned i = 0; i < num; i++) {
        group *g = &f->groups[(start + i) % num];
        if (!kvfi_feed_is_dry(&g->feed) &&
            atomic_fetch_add(&g->feed.workers, 1) < kvfi_redis_conns_for(f->tier, f->whole)) {
            run_group(g);
        }
    }
}

/* ---- the batch ---- */

/* A feed for each server. */
static void divide(flight *f) {
    kvfi_rounds_divide(f->rounds);
    for (unsigned i = 0; i < f->rounds->num_shares; i++) {
        group *g = &f->groups[i];
        *g = (group){.feed = *f->whole, .flight = f, .share = &f->rounds->shares[i]};
        g->feed.order = g->share->keys;
        g->feed.num = g->share->num;
        g->feed.whole = f->whole;
        g->feed.again = again;
        atomic_store_explicit(&g->feed.next, 0, memory_order_relaxed);
        atomic_store_explicit(&g->feed.workers, 0, memory_order_relaxed);
    }
}

static void fly(flight *f, kvfi_pool *pool) {
    do {
        divide(f);
        atomic_store(&f->next_start, 0);
        unsigned threads = f->rounds->num_shares * f->tier->conf.conns;
        threads = threads < f->whole->num ? threads : (unsigned)f->whole->num;
        if (pool != NULL) {
            kvfi_pool_share(pool, work, f, threads - 1);
        } else {
            work(f);
        }
    } while (kvfi_rounds_next(f->rounds));
    for (size_t i = 0; i < f->rounds->num_pending; i++) {
        kvfi_item *item = &f->whole->items[f->rounds->pending[i]];
        kvfi_feed_done(f->whole, item, KVF_MISS, item->why);
    }
}

static void fail_all(kvfi_feed *feed, kvf_reason why) {
    for (kvfi_item *item = kvfi_feed_draw(feed); item != NULL; item = kvfi_feed_draw(feed)) {
        kvfi_feed_done(feed, item, KVF_MISS, why);
    }
}

void kvfi_redis_spread(kvfi_redis *tier, kvfi_feed *feed, kvfi_pool *pool, kvfi_lane_kind lane,
                       kvfi_exchange *exchange) {
    if (feed->num == 0) {
        return;
    }
    kvfi_rounds *rounds = kvfi_rounds_new(tier->topology, feed->num, feed->deadline_us, feed->cancelled);
    flight *f = kvfi_alloc(sizeof *f);
    if (f == NULL || rounds == NULL) {
        kvfi_free(f);
        kvfi_free(rounds);
        fail_all(feed, KVF_WHY_NOMEM);
        return;
    }
    f->tier = tier;
    f->whole = feed;
    f->rounds = rounds;
    f->lane = lane;
    f->exchange = exchange;
    for (size_t i = 0; i < feed->num; i++) {
        rounds->slots[i] = kvfi_addr_slot(&feed->items[i].addr);
        feed->items[i].why = KVF_WHY_BUDGET;
    }
    fly(f, pool);
    kvfi_free(f);
    kvfi_free(rounds);
}
