/* SPDX-License-Identifier: Apache-2.0
 *
 * Several redis-servers of the test's own: a Cluster of three shards, and a master with a replica and three sentinels.
 * Private folders and ports of 127.0.0.1; all are ended by pid. What fails aborts the test with a message; NULL only
 * when no server is installed.
 */
#ifndef KVFT_CLUSTER_H
#define KVFT_CLUSTER_H
#include <stdbool.h>

#include "support/server.h"

#define KVFT_SHARDS 3

/* Waits until each replica of the server has all that was written to it so far. (A link that is up does not mean so:
 * after a full synchronization a master sends on only once it has heard from the replica, up to a second later.) */
void kvft_await_replicas(kvft_server *master);
/* Waits until the reply of the server to the command holds the text `times` times (0: not at all). */
void kvft_await_said(kvft_server *, const char *command, const char *text, int times);

typedef struct kvft_cluster {
    kvft_server *nodes[2 * KVFT_SHARDS]; /* 0 to 2: the shards as they began; 3 to 5: their replicas, or NULL */
    char ids[2 * KVFT_SHARDS][41];
    char url[128]; /* redis+cluster://... */
} kvft_cluster;

kvft_cluster *kvft_cluster_start(bool replicas);
void kvft_cluster_stop(kvft_cluster *);
/* From now on a replica takes over when its master is silent for a second; at first it waits for twenty. */
void kvft_cluster_be_quick(kvft_cluster *);
/* Shard i has slots [kvft_cluster_first(i), kvft_cluster_first(i + 1)) at first. */
int kvft_cluster_first(int shard);
/* Moves slots [from, to) with their keys from node `src` to node `dst`, one after the other, while clients go on. */
void kvft_cluster_move(kvft_cluster *, int from, int to, int src, int dst);
/* One slot. false: a server refused, and said why; the slot may be left half-moved. */
bool kvft_cluster_try_move(kvft_cluster *, int slot, int src, int dst, const char **said);
/* The node serves: its Cluster is well, as far as it knows. */
bool kvft_cluster_is_ok(kvft_cluster *, int node);

typedef struct kvft_sentinels {
    kvft_server *data[2]; /* at first the master, and its replica */
    kvft_server *watch[3];
    char url[256]; /* redis+sentinel://.../mymaster */
} kvft_sentinels;

kvft_sentinels *kvft_sentinels_start(void);
void kvft_sentinels_stop(kvft_sentinels *);
/* The port that the first sentinel gives for the master. */
int kvft_sentinels_master(kvft_sentinels *);
#endif
