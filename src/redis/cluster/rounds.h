/* SPDX-License-Identifier: Apache-2.0
 *
 * Many keys over several servers, in rounds. Each round divides the keys that are not complete into shares, one for
 * each server that has some of their slots. Keys that a server redirects (MOVED, ASK), or can't serve at the moment
 * (TRYAGAIN, CLUSTERDOWN, LOADING, READONLY ...), are in the next round. There are few rounds.
 */
#ifndef KVFI_REDIS_ROUNDS_H
#define KVFI_REDIS_ROUNDS_H

#include "redis/cluster/topology.h"

#define KVFI_MAX_SHARES 64u /* of one round; keys of further servers are in the next */

/* The keys of one server. */
typedef struct kvfi_share {
    kvfi_node *node; /* NULL: no server has their slots */
    bool asking;     /* each command is preceded by ASKING */
    uint32_t *keys;  /* their numbers, ascending */
    size_t num;
} kvfi_share;

typedef struct kvfi_rounds {
    kvfi_topology *topology;
    int64_t deadline_us;
    const atomic_bool *cancelled; /* no further round once it is true; NULL = never */
    kvfi_share shares[KVFI_MAX_SHARES];
    unsigned num_shares;
    unsigned number; /* of this round */
    size_t num;      /* keys */
    uint32_t
        *pending; /* numbers of the keys of the next round, ascending; at the end, of those that are not complete */
    size_t num_pending;
    /* of each key */
    kvfi_node **asks; /* the server to ask only in the next round; NULL = the one that has the slot */
    uint32_t *keys;   /* the shares, one after the other */
    uint16_t *slots;  /* the caller's to fill in */
    uint8_t *fates;   /* kvfi_fate; OVER: complete */
    uint8_t *places;  /* of each pending one: its share */
} kvfi_rounds;

/* All keys are pending. NULL: no memory. kvfi_free frees it. */
kvfi_rounds *kvfi_rounds_new(kvfi_topology *, size_t num, int64_t deadline_us, const atomic_bool *cancelled);
/* Divides the pending keys. */
void kvfi_rounds_divide(kvfi_rounds *);
/* A server of this round refused a command about the key with that error reply. Several threads may call it, for
 * different keys. */
kvfi_fate kvfi_rounds_learn(kvfi_rounds *, uint32_t key, const kvfi_node *from, const kvfi_reply *);
/* The server that has the key's slot now. */
kvfi_node *kvfi_rounds_node(const kvfi_rounds *, uint32_t key);
/* After a round: collects the keys that are not complete, gives their servers a little time if they need it, and
 * renews the map. False: there are none, or there is no time for them. */
bool kvfi_rounds_next(kvfi_rounds *);

#endif
