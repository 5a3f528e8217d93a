/* SPDX-License-Identifier: Apache-2.0
 *
 * A batch over several servers: its items are divided by the server that has their slot. Each server's share is a
 * separate feed, moved by the same exchange as with a single server (run.c), at the same time as the others.
 *
 * An item that a server redirects (MOVED, ASK), or can't serve at the moment (TRYAGAIN, CLUSTERDOWN, LOADING, READONLY
 * ...), goes into the next round; there are few rounds. Items of a server that is down miss at once, unless the map
 * turns out to be stale.
 */
#include <stdio.h>

#include "redis/blocks/blocks.h"

#define MAX_ROUNDS    6u  /* the first, and five redirections */
#define MAX_GROUPS    64u /* of one round; items of further servers wait for the next */
#define FIRST_WAIT_MS 5

/* ---- a batch under way ---- */

/* What happens to an item in the next round. */
typedef struct plan {
    kvfi_node *ask; /* only this once: ASKING */
    uint8_t fate;
    uint8_t why; /* if there is no next round */
} plan;

struct flight;

/* The items of one server. */
typedef struct group {
    kvfi_feed feed; /* the first member: kvfi_feed.again finds its group by it */
    struct flight *flight;
    kvfi_node *node;
    bool asking;
    size_t from; /* the position of its numbers in flight->order */
} group;

typedef struct flight {
    kvfi_redis *tier;
    kvfi_feed *whole;
    kvfi_lane_kind lane;
    kvfi_exchange *exchange;
    plan *plans;       /* for each item */
    uint32_t *order;   /* numbers of items, group after group */
    uint32_t *pending; /* numbers of the items of the next round */
    uint8_t *place;    /* for each pending one: its group */
    size_t num_pending;
    unsigned num_groups;
    _Atomic unsigned next_start;
    atomic_bool must_refresh;
    group groups[MAX_GROUPS];
} flight;

static plan *plan_of(const group *g, const kvfi_item *item) {
    return &g->flight->plans[item - g->flight->whole->items];
}

/* kvfi_feed.again: a failed item goes into the next round, if something was planned for it. */
static bool again(kvfi_feed *feed, kvfi_item *item) {
    return plan_of((group *)(void *)feed, item)->fate != KVFI_FATE_OVER;
}

kvf_reason kvfi_redis_refusal(kvfi_feed *feed, const kvfi_item *item, const kvfi_reply *reply) {
    if (feed->again == NULL) {
        return kvfi_reply_reason(reply);
    }
    group *g = (group *)(void *)feed;
    plan *p = plan_of(g, item);
    p->fate = (uint8_t)kvfi_topology_learn(g->flight->tier->topology, g->node, reply, &p->ask);
    p->why = KVF_WHY_SERVER;
    if (p->fate != KVFI_FATE_OVER && p->fate != KVFI_FATE_ASK) {
        atomic_store_explicit(&g->flight->must_refresh, true, memory_order_relaxed);
    }
    if (p->fate == KVFI_FATE_OVER && g->flight->lane == KVFI_LANE_STORE) {
        kvfi_log(KVF_LOG_WARN, "redis: a block was not stored: %.*s", (int)(reply->len < 160 ? reply->len : 160),
                 reply->text);
    }
    return kvfi_reply_reason(reply);
}

/* ---- one server's share ---- */

/* The server is down. Items that the map now gives to another server go there; the rest misses. */
static void give_up(group *g, kvf_reason why) {
    kvfi_topology *t = g->flight->tier->topology;
    if (why != KVF_WHY_BUDGET && why != KVF_WHY_NOMEM && why != KVF_WHY_FULL && why != KVF_WHY_CLOSED) {
        kvfi_topology_refresh(t, g->feed.deadline_us);
    }
    for (kvfi_item *item = kvfi_feed_draw(&g->feed); item != NULL; item = kvfi_feed_draw(&g->feed)) {
        kvfi_node *node = kvfi_topology_node(t, kvfi_addr_slot(&item->addr));
        if (node != NULL && node != g->node) {
            *plan_of(g, item) = (plan){.fate = KVFI_FATE_MOVED, .why = (uint8_t)why};
        }
        kvfi_feed_done(&g->feed, item, KVF_MISS, why);
    }
}

static void run_group(group *g) {
    flight *f = g->flight;
    kvf_reason why = KVF_WHY_UNREACHABLE;
    if (g->node != NULL) {
        why = kvfi_redis_run_on(f->tier, g->node, &g->feed, f->lane, f->exchange, g->asking);
    }
    if (why != KVF_WHY_NONE) {
        give_up(g, why);
    }
}

/* One thread: begins with one server, and then helps with any other. */
static void work(void *arg) {
    flight *f = arg;
    unsigned start = atomic_fetch_add(&f->next_start, 1);
    for (unsigned i = 0; i < f->num_groups; i++) {
        group *g = &f->groups[(start + i) % f->num_groups];
        if (!kvfi_feed_is_dry(&g->feed) &&
            atomic_fetch_add(&g->feed.workers, 1) < kvfi_redis_conns_for(f->tier, f->whole)) {
            run_group(g);
        }
    }
}

/* ---- rounds ---- */

/* The group of that server, a new one if necessary; MAX_GROUPS: no room in this round. */
static unsigned group_of(flight *f, kvfi_node *node, bool asking) {
    for (unsigned i = 0; i < f->num_groups; i++) {
        if (f->groups[i].node == node && f->groups[i].asking == asking) {
            return i;
        }
    }
    if (f->num_groups == MAX_GROUPS) {
        return MAX_GROUPS;
    }
    f->groups[f->num_groups] = (group){.flight = f, .node = node, .asking = asking};
    return f->num_groups++;
}

/* Divides pending items by server. Items without room stay pending. */
static void sort(flight *f) {
    size_t left = 0, at = 0;
    f->num_groups = 0;
    for (size_t i = 0; i < f->num_pending; i++) {
        uint32_t index = f->pending[i];
        plan *p = &f->plans[index];
        kvfi_node *node = p->ask;
        if (node == NULL) {
            node = kvfi_topology_node(f->tier->topology, kvfi_addr_slot(&f->whole->items[index].addr));
        }
        f->place[i] = (uint8_t)group_of(f, node, p->ask != NULL);
        if (f->place[i] < MAX_GROUPS) {
            f->groups[f->place[i]].feed.num++;
            *p = (plan){0};
        } else {
            *p = (plan){.fate = KVFI_FATE_MOVED, .why = KVF_WHY_BUDGET};
        }
    }
    for (unsigned i = 0; i < f->num_groups; i++) {
        group *g = &f->groups[i];
        size_t num = g->feed.num;
        g->from = at;
        at += num;
        g->feed = *f->whole;
        g->feed.order = f->order + g->from;
        g->feed.num = 0;
        g->feed.whole = f->whole;
        g->feed.again = again;
        atomic_store_explicit(&g->feed.next, 0, memory_order_relaxed);
        atomic_store_explicit(&g->feed.workers, 0, memory_order_relaxed);
    }
    for (size_t i = 0; i < f->num_pending; i++) {
        if (f->place[i] < MAX_GROUPS) {
            group *g = &f->groups[f->place[i]];
            f->order[g->from + g->feed.num++] = f->pending[i];
        } else {
            f->pending[left++] = f->pending[i];
        }
    }
    f->num_pending = left;
}

/* Collects incomplete items. Returns true if some of them should be given a little time. */
static bool gather(flight *f) {
    bool wait = false;
    f->num_pending = 0;
    for (size_t i = 0; i < f->whole->num; i++) {
        if (f->plans[i].fate != KVFI_FATE_OVER) {
            f->pending[f->num_pending++] = (uint32_t)i;
            wait = wait || f->plans[i].fate == KVFI_FATE_WAIT;
        }
    }
    return wait;
}

static void finish(flight *f) {
    for (size_t i = 0; i < f->num_pending; i++) {
        uint32_t index = f->pending[i];
        kvfi_feed_done(f->whole, &f->whole->items[index], KVF_MISS, (kvf_reason)f->plans[index].why);
    }
}

/* Waits before round number `round`, if there is time for that. */
static bool wait_for(int64_t deadline_us, unsigned round) {
    int wait_ms = FIRST_WAIT_MS << round;
    if (kvfi_sys->now_us() + (int64_t)wait_ms * 1000 >= deadline_us) {
        return false;
    }
    (void)kvfi_sys->poll(NULL, 0, wait_ms);
    return true;
}

static void fly(flight *f, kvfi_pool *pool) {
    bool more = true;
    for (unsigned round = 0; more && f->num_pending > 0; round++) {
        sort(f);
        atomic_store(&f->next_start, 0);
        unsigned threads = f->num_groups * f->tier->conf.conns;
        threads = threads < f->whole->num ? threads : (unsigned)f->whole->num;
        if (pool != NULL) {
            kvfi_pool_share(pool, work, f, threads - 1);
        } else {
            work(f);
        }
        bool wait = gather(f);
        more = !kvfi_feed_is_cancelled(f->whole) && round + 1 < MAX_ROUNDS &&
               kvfi_sys->now_us() < f->whole->deadline_us && (!wait || wait_for(f->whole->deadline_us, round));
        if (atomic_exchange(&f->must_refresh, false)) {
            kvfi_topology_refresh(f->tier->topology, f->whole->deadline_us);
        }
    }
    finish(f);
}

static void fail_all(kvfi_feed *feed, kvf_reason why) {
    for (kvfi_item *item = kvfi_feed_draw(feed); item != NULL; item = kvfi_feed_draw(feed)) {
        kvfi_feed_done(feed, item, KVF_MISS, why);
    }
}

void kvfi_redis_spread(kvfi_redis *tier, kvfi_feed *feed, kvfi_pool *pool, kvfi_lane_kind lane,
                       kvfi_exchange *exchange) {
    size_t num = feed->num;
    if (num == 0) {
        return;
    }
    /* One allocation for the batch. */
    flight *f = kvfi_alloc(sizeof *f + num * (sizeof(plan) + 2 * sizeof(uint32_t) + 1));
    if (f == NULL || num > UINT32_MAX) {
        kvfi_free(f);
        fail_all(feed, KVF_WHY_NOMEM);
        return;
    }
    memset(f, 0, offsetof(flight, groups));
    f->tier = tier;
    f->whole = feed;
    f->lane = lane;
    f->exchange = exchange;
    f->plans = (plan *)(void *)(f + 1);
    f->order = (uint32_t *)(void *)(f->plans + num);
    f->pending = f->order + num;
    f->place = (uint8_t *)(f->pending + num);
    memset(f->plans, 0, num * sizeof *f->plans);
    for (size_t i = 0; i < num; i++) {
        f->pending[i] = (uint32_t)i;
    }
    f->num_pending = num;
    fly(f, pool);
    kvfi_free(f);
}
