/* SPDX-License-Identifier: Apache-2.0
 *
 * The Redis tier: declarations that its files share. One file for each operation: load.c (get), save.c (put), peek.c,
 * admin.c (walk, clear, remove, info), session.c, doctor.c. With several servers, spread.c divides a batch among them.
 */
#ifndef KVFI_REDIS_H
#define KVFI_REDIS_H

#include "redis/key.h"
#include "redis/topology.h"

#define KVFI_COMMAND_BYTES 512u /* any command without its body: the longest key, and everything else */

typedef struct kvfi_redis {
    kvfi_tier base;
    kvfi_redis_conf conf;
    kvfi_redis_conf asked;     /* the same as in the URL: conf is adapted to the server (rules.h) */
    kvfi_node node;            /* the server, if there is only one */
    kvfi_topology *topology;   /* the servers of a Cluster, or those that sentinels watch; otherwise NULL */
    _Atomic uint64_t max_bulk; /* the server's proto-max-bulk-len; 0 = not asked yet */
    kvfi_pace pace;
} kvfi_redis;

static inline kvfi_redis *kvfi_redis_of(kvfi_tier *tier) {
    return (kvfi_redis *)(void *)tier; /* `base` is the first member */
}

void kvfi_redis_get(kvfi_tier *, kvfi_feed *);
void kvfi_redis_put(kvfi_tier *, kvfi_feed *);
void kvfi_redis_peek(kvfi_tier *, const kvfi_addr *, size_t num, kvfi_peek *out, uint64_t *round_trips,
                     int64_t deadline_us);

kvf_status kvfi_redis_remove(kvfi_tier *, kvf_error *, const kvfi_addr *, int64_t deadline_us);
kvf_status kvfi_redis_walk(kvfi_tier *, kvf_error *, const kvf_digest *space, bool whole, kvfi_sight_fn, void *ctx,
                           int64_t step_us);
kvf_status kvfi_redis_clear(kvfi_tier *, uint64_t *removed, kvf_error *, const kvf_digest *space, int64_t step_us);

/* The longest piece of the item that one key holds. */
static inline uint64_t kvfi_redis_part_of(const kvfi_redis *tier, const kvfi_item *item) {
    return item->whole ? item->bytes : tier->conf.part;
}

kvf_status kvfi_redis_session_put(kvfi_tier *, kvf_error *, const char *id, const kvfi_part *, size_t num,
                                  uint32_t ttl_s, int64_t deadline_us);
kvf_status kvfi_redis_session_sizes(kvfi_tier *, kvf_error *, const char *id, kvfi_part *, size_t num,
                                    int64_t deadline_us);
kvf_status kvfi_redis_session_get(kvfi_tier *, kvf_error *, const char *id, kvfi_part *, size_t num,
                                  int64_t deadline_us);
kvf_status kvfi_redis_session_remove(kvfi_tier *, kvf_error *, const char *id, int64_t deadline_us);
uint64_t kvfi_redis_session_max_part(kvfi_tier *, int64_t deadline_us);

/* When a store opens, in one round trip to the first server: is the user allowed what loads and saves need (KVF_CONFIG
 * with the missing rule), and does the server have the right settings? Adapts tier->conf to its limits. A server that
 * is down is asked by the first save. */
kvf_status kvfi_redis_admit(kvfi_redis *, kvf_error *);
/* May something be saved there? Asks the server if that is not known (any more). KVF_WHY_UNREACHABLE: the connection is
 * gone. Anything but KVF_WHY_NONE has informed the node's breaker; after KVF_WHY_NONE the caller informs it of the
 * result. */
kvf_reason kvfi_redis_may_save(kvfi_redis *, kvfi_node *, kvfi_conn *, int64_t deadline_us);
void kvfi_redis_doctor(kvfi_tier *, kvf_finding_fn, void *ctx);
void kvfi_redis_info(kvfi_tier *, kvf_tier_info *out);

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
 * misses, with the returned reason. */
kvf_reason kvfi_redis_run(kvfi_redis *, kvfi_feed *, kvfi_lane_kind, kvfi_exchange *);
/* What an error reply to a command about the item means for it. With several servers it may mean: try another. Then the
 * item is not complete when it is given back (kvfi_feed.again). */
kvf_reason kvfi_redis_refusal(kvfi_feed *, const kvfi_item *, const kvfi_reply *);
/* How many connections to one server that feed is worth. Values that are used one by one as they arrive come one after
 * the other: of two at once both would be late. Large values would impede each other. An explicit conns= overrides
 * this. */
uint32_t kvfi_redis_conns_for(const kvfi_redis *, const kvfi_feed *);
kvfi_exchange kvfi_redis_load_on, kvfi_redis_save_on; /* load.c, save.c */
/* For a topology: the same on all affected servers at once; without a pool one after the other. */
void kvfi_redis_spread(kvfi_redis *, kvfi_feed *, kvfi_pool *, kvfi_lane_kind, kvfi_exchange *);
void kvfi_redis_spread_peek(kvfi_tier *, const kvfi_addr *, size_t num, kvfi_peek *out, uint64_t *round_trips,
                            int64_t deadline_us);

#endif
