/* SPDX-License-Identifier: Apache-2.0
 *
 * A store as the layers above see it: tiers, threads, known keys, and the backlog. It distributes a batch of items over
 * the threads of a tier and over the tiers. It knows nothing of tokens. Only src/store sees the fields (private.h).
 */
#ifndef KVFI_STORE_H
#define KVFI_STORE_H

#include "store/backlog.h"
#include "store/secret.h"
#include "tier/pool.h"
#include "tier/tier.h"

#define KVFI_MAX_TIERS 8u

size_t kvfi_store_num_tiers(const kvf_store *);
kvfi_tier *kvfi_store_tier(const kvf_store *, size_t index);
uint8_t kvfi_store_all_tiers(const kvf_store *); /* as bits */
kvfi_backlog *kvfi_store_backlog(kvf_store *);
const kvfi_secrets *kvfi_store_secrets(const kvf_store *);
/* kvfi_store_post runs a batch of a queue on the threads for that operation. False: no memory. */
bool kvfi_store_post(kvf_store *, kvf_op, kvfi_job *);
/* kvfi_store_withdraw takes such a batch back. False: it is not queued, since it has begun or was never posted. */
bool kvfi_store_withdraw(kvf_store *, kvf_op, kvfi_job *);

/* false in a forked child, where the store must not be used. */
bool kvfi_store_is_ours(const kvf_store *);
/* KVF_OK, or KVF_CLOSED with what to do about it. */
kvf_status kvfi_store_check_ours(const kvf_store *, kvf_error *err);

/* ---- what is known of keys ---- */

/* kvfi_store_knows is true if no save is needed: a tier that outlives the process has the key, or, if there is no such
 * tier, any tier. */
bool kvfi_store_knows(kvf_store *, const kvf_key *);
/* A record of this key may be damaged: a save overwrites it, whatever is stored. */
bool kvfi_store_doubts(kvf_store *, const kvf_key *);
/* A damaged record of this key was found. Call it before the miss is reported: the caller that then computes the block
 * finds that it must be written. */
void kvfi_store_doubt(kvf_store *, const kvf_key *);
/* No usable record of this key is stored: a save writes without looking again. */
void kvfi_store_forget(kvf_store *, const kvf_key *);
/* A lookup found a header under this key (`why` is KVF_WHY_NONE), or did not; `hit`: it is the requested block's. */
void kvfi_store_note_lookup(kvf_store *, const kvf_key *, size_t tier, kvf_reason why, bool hit);
/* A load missed: counts it, removes a damaged record, and remembers that the block must be written. Takes KVFI_AT_ONCE:
 * then a damaged record is removed from memory only. */
void kvfi_store_note_miss(kvf_store *, const kvfi_addr *, kvf_reason why, int64_t deadline_us);
/* Removes a record with a wrong checksum, which can never be a hit: a store that keeps the first of two equal keys
 * would keep it for ever. */
void kvfi_store_remove_damaged(kvf_store *, const kvfi_addr *, int64_t deadline_us);

/* ---- counters of kvf_stats. Count what begins before how it ends, so that no outcome exceeds its operations. ---- */

void kvfi_store_count_lookups(kvf_store *, size_t num);
void kvfi_store_count_lookup_hits(kvf_store *, size_t num);
void kvfi_store_count_loads(kvf_store *, size_t num);
void kvfi_store_count_load_hits(kvf_store *, size_t num, uint64_t bytes);
void kvfi_store_count_miss(kvf_store *, kvf_reason why); /* that says nothing of what is stored */
void kvfi_store_count_saves(kvf_store *, size_t num);
void kvfi_store_count_known(kvf_store *, size_t num); /* saves that were not needed */
void kvfi_store_count_unsaved(kvf_store *, kvf_reason why);

/* ---- lookups, loads and saves ---- */

/* kvfi_store_peek looks into one tier, and counts the round trips. `patience_us` is as in kvfi_feed. Takes
 * KVFI_AT_ONCE, which leaves out what is not in memory (KVF_WHY_BUDGET). */
void kvfi_store_peek(kvf_store *, size_t tier, const kvfi_addr *, size_t num, kvfi_peek *out, int64_t deadline_us,
                     int64_t patience_us);

/* kvfi_store_each does the deed in one tier, as in kvfi_tier_ops. Keys that were to be removed, and keys that a lasting
 * tier lacks, are no longer known to be stored. */
void kvfi_store_each(kvf_store *, kvfi_deed, size_t tier, const kvfi_addr *, size_t num, kvf_reason *out,
                     int64_t deadline_us, int64_t patience_us);

/* kvfi_store_get reads the items of the feed, each from the fastest tier that has it, on this thread and helpers of the
 * pool. With `prefix`, items after a miss are of no use. Items that were not tried keep KVF_AGAIN. What a slower tier
 * had is copied to the faster ones in the background. The caller sets items, num, deadline_us, and prefix, check,
 * cancelled and watch as needed. The first iovec of an item is its head. Takes KVFI_AT_ONCE as kvfi_store_peek does. */
void kvfi_store_get(kvf_store *, kvfi_feed *);

/* kvfi_store_note_got remembers that the tier has this value, and sends a copy of it to the faster tiers, in the
 * background, if there is room in the backlog. */
void kvfi_store_note_got(kvf_store *, const kvfi_item *, size_t tier);
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
