/* SPDX-License-Identifier: Apache-2.0
 *
 * The fields of a store, private to src/store.
 */
#ifndef KVFI_STORE_PRIVATE_H
#define KVFI_STORE_PRIVATE_H

#include <unistd.h>

#include "store/known.h"
#include "store/store.h"

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
    /* Separate, so that a lookup never waits for a load, nor a load for a save, nor a writer for a batch of a queue,
     * which may itself wait for room that only a writer makes. */
    kvfi_pool *lookup_pool, *load_pool, *batch_pool, *store_pool;
    int64_t drain_us;
    kvfi_backlog backlog;
    kvfi_known known;
    kvfi_counters stats;
    kvfi_secrets secrets;
};

#endif
