/* SPDX-License-Identifier: Apache-2.0
 *
 * Which server has a slot: a map from slots to nodes, learned from CLUSTER SLOTS, or, for a single master, from its
 * sentinels.
 *
 * Whoever finds the map wrong (a redirection, a node that is down) refreshes it, one thread at a time, and not again
 * within KVFI_REFRESH_MS: a Cluster in trouble is not helped by thousands of requests for its map. A redirection takes
 * effect at once, for its slot.
 *
 * Nodes live as long as the topology. A node that has left the map closes its idle connections.
 */
#ifndef KVFI_TOPOLOGY_H
#define KVFI_TOPOLOGY_H

#include "redis/cluster/node.h"
#include "redis/cluster/slots.h"

#define KVFI_REFRESH_MS 100u
/* Addresses of a Cluster over the life of the process. Further ones are misses. */
#define KVFI_MAX_MEMBERS 1024u

typedef struct kvfi_topology {
    const kvfi_redis_conf *conf;
    kvfi_redis_conf sentinel_conf; /* how to introduce oneself to a sentinel */
    const kvfi_url *url;
    _Atomic uint64_t *connects, *disconnects;
    kvfi_node **sentinels;
    size_t num_sentinels;
    pthread_mutex_t lock; /* of all that follows; never held over I/O */
    pthread_cond_t refreshed;
    bool refreshing;
    kvf_error trouble; /* why the last map could not be loaded; KVF_OK: it could */
    int64_t again_us;  /* not refreshed before */
    size_t asked;      /* the member, or the sentinel, that answered last time */
    size_t num_members, num_seeds;
    kvfi_node *members[KVFI_MAX_MEMBERS]; /* first those that the URL names */
    bool primary[KVFI_MAX_MEMBERS];       /* has slots */
    uint16_t owner[KVFI_NUM_SLOTS];       /* an index into members, or KVFI_NO_OWNER */
} kvfi_topology;

/* Asks for the map once. KVF_CONFIG, KVF_NOMEM; servers that are down are not an error. */
kvf_status kvfi_topology_open(kvfi_topology **out, kvf_error *, const kvfi_redis_conf *, const kvfi_url *,
                              _Atomic uint64_t *connects, _Atomic uint64_t *disconnects);
void kvfi_topology_free(kvfi_topology *);

/* The node that has the slot, or NULL. */
kvfi_node *kvfi_topology_node(kvfi_topology *, uint16_t slot);
/* Why there is no map. KVF_OK if there is one. */
kvf_error kvfi_topology_trouble(kvfi_topology *);
/* All nodes that have slots: at most `cap`. */
size_t kvfi_topology_primaries(kvfi_topology *, kvfi_node **out, size_t cap);
/* The map seems to be wrong. Waits for a new one until the deadline; returns at once if the last one is new. */
void kvfi_topology_refresh(kvfi_topology *, int64_t deadline_us);
/* A node said that another one has the slot, or is importing it (ask). Returns that one; NULL if there is no room for
 * it. */
kvfi_node *kvfi_topology_redirect(kvfi_topology *, const kvfi_node *from, uint16_t slot, const kvfi_host *to, bool ask);

/* What an error reply of one of several servers means for a request, and what was learned from it: it has failed;
 * another server has the slot, or has it for this once (*ask: that one); or it is worth another try a little later. */
typedef enum kvfi_fate { KVFI_FATE_OVER, KVFI_FATE_MOVED, KVFI_FATE_ASK, KVFI_FATE_WAIT } kvfi_fate;
kvfi_fate kvfi_topology_learn(kvfi_topology *, const kvfi_node *from, const kvfi_reply *, kvfi_node **ask);

#endif
