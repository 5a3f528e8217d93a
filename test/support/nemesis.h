/* SPDX-License-Identifier: Apache-2.0
 *
 * Real servers of one topology, and faults: each fault is inflicted on a server, lasts a while, and is undone. The
 * caller's random numbers alone decide which one, on which server and for how long. If undoing fails, the test aborts
 * with a message.
 */
#ifndef KVFT_NEMESIS_H
#define KVFT_NEMESIS_H
#include "support/cluster.h"
#include "support/proxy.h"

typedef enum kvft_world_kind { KVFT_SINGLE, KVFT_SENTINEL, KVFT_CLUSTER, KVFT_NUM_WORLDS } kvft_world_kind;

typedef struct kvft_world {
    kvft_world_kind kind;
    kvft_server *data[2 * KVFT_SHARDS]; /* the servers that hold data: 1, 2 or 6 */
    int num_data;
    kvft_cluster *cluster;
    kvft_sentinels *sentinels;
    kvft_proxy *proxies[KVFT_SHARDS]; /* single: before the server; Sentinel: before a sentinel; Cluster: before the
                                         first master of each shard */
    int num_proxies;
    char url[256]; /* by the proxies */
} kvft_world;

kvft_world *kvft_world_start(kvft_world_kind); /* NULL when no server is installed */
void kvft_world_stop(kvft_world *);
/* Waits until all is as at the start: all servers up, each master with its replica. */
void kvft_world_heal(kvft_world *);

#define KVFT_MAX_NEMESES 48
/* One fault, from beginning to end; returns its number. The one of number `wish` (modulo their number), where that can
 * be done; -1: any. */
int kvft_world_torment(kvft_world *, int wish, uint64_t *random);
const char *kvft_nemesis_name(int); /* NULL behind the last */
#endif
