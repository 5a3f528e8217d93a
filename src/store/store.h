/* SPDX-License-Identifier: Apache-2.0
 *
 * A store as the layers above see it: tiers, threads, known keys, and the backlog. It distributes a batch of items over
 * the threads of a tier and over the tiers. It knows nothing of tokens.
 */
#ifndef KVFI_STORE_H
#define KVFI_STORE_H

#include <unistd.h>

#include "store/backlog.h"
#include "store/known.h"
#include "store/secret.h"
#include "tier/pool.h"
#include "tier/tier.h"

#define KVFI_MAX_TIERS 8u

/* kvf_stats, counted. */
typedef struct kvfi_counters {
    _Atomic uint64_t lookups, lookup_hits, lookup_round_trips;
    _Atomic uint64_t loads, load_hits, loaded_bytes, misses[KVF_NUM_REASONS];
    _Atomic uint64_t saves, saved, known, saved_bytes, save_failures[KVF_NUM_REASONS];
    _Atomic uint64_t promoted;
} kvfi_counters;

struct kvf_store {
    pid_t pid; /* of the process that opened it: threads and connections do not survive a fork */
    size_t num_tiers;
    kvfi_tier *tiers[KVFI_MAX_TIERS];
    kvfi_meter meters[KVFI_MAX_TIERS]; /* of the tiers */
    kvfi_pool *lookup_pool, *load_pool,
        *store_pool; /* separate, so that a lookup never waits for a load, nor a load for a save */
    int64_t drain_us;
    kvfi_backlog backlog;
    kvfi_known known;
    kvfi_counters stats;
    kvfi_secrets secrets;
};

static inline size_t kvfi_store_num_tiers(const kvf_store *store) {
    return store->num_tiers;
}
static inline kvfi_tier *kvfi_store_tier(const kvf_store *store, size_t index) {
    return store->tiers[index];
}
static inline uint8_t kvfi_store_all_tiers(const kvf_store *store) {
    return (uint8_t)((1u << store->num_tiers) - 1);
}

/* false in a forked child, where the store must not be used. */
bool kvfi_store_is_ours(const kvf_store *);
/* KVF_OK, or KVF_CLOSED with what to do about it. */
kvf_status kvfi_store_check_ours(const kvf_store *, kvf_error *err);

/* kvfi_store_knows is true if no save is needed: a tier that outlives the process has the key, or, if there is no such
 * tier, any tier. */
bool kvfi_store_knows(kvf_store *, const kvf_key *);

/* kvfi_store_peek looks into one tier. Takes KVFI_AT_ONCE, which leaves out what is not in memory (KVF_WHY_BUDGET). */
void kvfi_store_peek(kvf_store *, size_t tier, const kvfi_addr *, size_t num, kvfi_peek *out, uint64_t *round_trips,
                     int64_t deadline_us);

/* kvfi_store_get reads the items of the feed, each from the fastest tier that has it, on this thread and helpers of the
 * pool. With `prefix`, items after a miss are of no use. Items that were not tried keep KVF_AGAIN. What a slower tier
 * had is copied to the faster ones in the background. The caller sets items, num, deadline_us, and prefix, check,
 * cancelled and watch as needed. The first iovec of an item is its head. Takes KVFI_AT_ONCE as kvfi_store_peek does. */
void kvfi_store_get(kvf_store *, kvfi_feed *);

/* kvfi_store_promote sends a copy of a value that tier `from` had to the faster ones, in the background, if there is
 * room in the backlog. */
void kvfi_store_promote(kvf_store *, const kvfi_item *, size_t from);
/* kvfi_store_copy sends a copy of a loaded item to these tiers, in the background, under another address and, unless it
 * is NULL, sealed under `seal`. A sealed item is copied only under a seal. False: there is no room in the backlog. */
bool kvfi_store_copy(kvf_store *, const kvfi_item *, const kvfi_addr *to, const kvfi_secret *seal, uint8_t tiers,
                     kvfi_role role);

/* The result for one value that goes to several tiers. */
typedef struct kvfi_put_outcome {
    uint8_t tiers; /* those that have it now */
    kvf_status status;
    kvf_reason why; /* of the first that failed */
} kvfi_put_outcome;
void kvfi_put_note(const kvf_store *, kvfi_put_outcome *, const kvfi_item *, size_t tier);
/* Counts the result and remembers where the value is. `sent`: false if all tiers had it. */
void kvfi_store_count_put(kvf_store *, const kvfi_item *, const kvfi_put_outcome *, kvfi_role role, bool sent);

/* kvfi_store_put writes the items of the feed to all tiers (the caller sets items, num, deadline_us, prepare,
 * cancelled). `outcomes` has room for all of them and is zero. An item is KVF_OK when every tier has it. */
void kvfi_store_put(kvf_store *, kvfi_feed *, kvfi_put_outcome *outcomes);

#endif
