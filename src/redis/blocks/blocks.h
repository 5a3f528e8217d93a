/* SPDX-License-Identifier: Apache-2.0
 *
 * The hot path of the Redis tier: load.c (get), save.c (put), each.c (peek, touch, remove). run.c runs loads and saves
 * over the connections of one server, spread.c divides them among several. ask.c does both for short commands.
 */
#ifndef KVFI_REDIS_BLOCKS_H
#define KVFI_REDIS_BLOCKS_H

#include "redis/cluster/key.h"
#include "redis/cluster/servers.h"

/* As in kvfi_tier_ops. */
void kvfi_redis_get(kvfi_tier *, kvfi_feed *);
void kvfi_redis_put(kvfi_tier *, kvfi_feed *);
void kvfi_redis_peek(kvfi_tier *, const kvfi_addr *, size_t num, kvfi_peek *out, uint64_t *round_trips,
                     int64_t deadline_us, int64_t patience_us);
void kvfi_redis_each(kvfi_tier *, kvfi_deed, const kvfi_addr *, size_t num, kvf_reason *out, int64_t deadline_us,
                     int64_t patience_us);

/* Items that were on a connection when it ended, and the reason: a stack, from which they come in order. They go to
 * another connection, or back to the feed. */
#define KVFI_MAX_LOST 260u
typedef struct kvfi_lost {
    kvfi_item *items[KVFI_MAX_LOST];
    unsigned num;
    kvf_reason why;
} kvfi_lost;

static inline void kvfi_lost_add(kvfi_lost *lost, kvfi_item *item) {
    lost->items[lost->num++] = item;
}
static inline kvfi_item *kvfi_lost_next(kvfi_lost *lost) {
    return lost->num > 0 ? lost->items[--lost->num] : NULL;
}

/* Moves items over one connection, first those that were lost on another, then those of the feed: until that is dry
 * (true), or the connection fails (false) and its items are lost. */
typedef bool kvfi_exchange(kvfi_redis *, kvfi_conn *, kvfi_feed *, kvfi_lost *);
/* Runs the exchange on connections of the node's lane until the feed is dry (KVF_WHY_NONE), or no connection can be
 * had: why. */
kvf_reason kvfi_redis_run_on(kvfi_redis *, kvfi_node *, kvfi_feed *, kvfi_lane_kind, kvfi_exchange *, bool asking);
/* Runs the exchange on connections of the lane until the feed is dry. Without a connection, everything left in it
 * misses. */
void kvfi_redis_run(kvfi_redis *, kvfi_feed *, kvfi_lane_kind, kvfi_exchange *);
/* What an error reply to a command about the item means for it. With several servers it may mean: try another. Then the
 * item is not complete when it is given back (kvfi_feed.again). */
kvf_reason kvfi_redis_refusal(kvfi_feed *, kvfi_item *, const kvfi_reply *);
/* How many connections to one server that feed is worth. Values that are used one by one as they arrive come one after
 * the other: of two at once both would be late. Large values would impede each other. An explicit conns= overrides
 * this. */
uint32_t kvfi_redis_conns_for(const kvfi_redis *, const kvfi_feed *);
kvfi_exchange kvfi_redis_load_on, kvfi_redis_save_on; /* load.c, save.c */
/* For a topology: the same on all affected servers at once; without a pool one after the other. */
void kvfi_redis_spread(kvfi_redis *, kvfi_feed *, kvfi_pool *, kvfi_lane_kind, kvfi_exchange *);

#endif
