/* SPDX-License-Identifier: Apache-2.0
 *
 * The state of a Redis tier: its settings and its servers. Everything else in src/redis works on it.
 */
#ifndef KVFI_REDIS_SERVERS_H
#define KVFI_REDIS_SERVERS_H

#include "redis/cluster/topology.h"

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

/* The longest piece of the item that one key holds. */
static inline uint64_t kvfi_redis_part_of(const kvfi_redis *tier, const kvfi_item *item) {
    return item->whole ? item->bytes : tier->conf.part;
}

#endif
