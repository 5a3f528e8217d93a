/* SPDX-License-Identifier: Apache-2.0
 *
 * What a store says of itself, what it counts, and what it remembers of keys after a lookup, a load or a save.
 */
#include "store/private.h"

#include "kvferry/sized.h"
#include "kvferry/store.h"

#define REMOVE_BUDGET_US 200000

bool kvfi_store_is_ours(const kvf_store *store) {
    return store->pid == getpid();
}

kvf_status kvfi_store_check_ours(const kvf_store *store, kvf_error *err) {
    return kvfi_store_is_ours(store)
               ? KVF_OK
               : kvfi_fail(err, KVF_CLOSED, "this store was opened by another process: open it again after a fork");
}

size_t kvfi_store_num_tiers(const kvf_store *store) {
    return store->num_tiers;
}

kvfi_tier *kvfi_store_tier(const kvf_store *store, size_t index) {
    return store->tiers[index];
}

uint8_t kvfi_store_all_tiers(const kvf_store *store) {
    return (uint8_t)((1u << store->num_tiers) - 1);
}

/* ---- what is known of keys ---- */

bool kvfi_store_knows(kvf_store *store, const kvf_key *key) {
    uint8_t tiers = kvfi_known_tiers(&store->known, key);
    bool lasting = false;
    for (size_t i = 0; i < store->num_tiers; i++) {
        if (!store->tiers[i]->volatile_) {
            lasting = true;
            if ((tiers >> i & 1) != 0) {
                return true;
            }
        }
    }
    return !lasting && tiers != 0;
}

bool kvfi_store_doubts(kvf_store *store, const kvf_key *key) {
    return kvfi_known_doubted(&store->known, key);
}

void kvfi_store_doubt(kvf_store *store, const kvf_key *key) {
    kvfi_known_doubt_all(&store->known);
    kvfi_known_doubt(&store->known, key);
}

void kvfi_store_forget(kvf_store *store, const kvf_key *key) {
    kvfi_known_add_missed(&store->known, key);
}

void kvfi_store_note_lookup(kvf_store *store, const kvf_key *key, size_t tier, kvf_reason why, bool hit) {
    if (hit) {
        kvfi_known_see(&store->known, key, (uint8_t)(1u << tier));
    } else if (why == KVF_WHY_NONE) {
        kvfi_store_forget(store, key); /* something else is stored there */
    } else if (why == KVF_WHY_ABSENT && tier + 1 == store->num_tiers) {
        kvfi_known_forget(&store->known, key);
    }
}

void kvfi_store_remove_damaged(kvf_store *store, const kvfi_addr *addr, int64_t deadline_us) {
    int64_t soon = kvfi_deadline(REMOVE_BUDGET_US);
    for (size_t i = 0; i < store->num_tiers; i++) {
        kvfi_tier *tier = store->tiers[i];
        if (deadline_us == KVFI_AT_ONCE && !tier->volatile_) {
            continue;
        }
        (void)tier->ops->remove(tier, NULL, addr, soon < deadline_us ? soon : deadline_us);
    }
}

/* Whatever is stored there, the caller now computes the block and overwrites it. */
static bool is_of_no_use(kvf_reason why) {
    switch (why) {
    case KVF_WHY_ABSENT:
    case KVF_WHY_OTHER_TOKENS:
    case KVF_WHY_OTHER_SPACE:
    case KVF_WHY_CHECKSUM:
    case KVF_WHY_TRUNCATED:
    case KVF_WHY_VERSION:
        return true;
    default:
        return false;
    }
}

void kvfi_store_note_miss(kvf_store *store, const kvfi_addr *addr, kvf_reason why, int64_t deadline_us) {
    kvfi_store_count_miss(store, why);
    if (why == KVF_WHY_CHECKSUM) {
        kvfi_log(KVF_LOG_WARN, "a stored block does not match its checksum: removed");
        kvfi_store_remove_damaged(store, addr, deadline_us);
    }
    if (is_of_no_use(why)) {
        kvfi_store_forget(store, &addr->key);
    }
}

/* ---- the result of a put ---- */

/* Memory before a lasting tier keeps only the fronts of prompts. A lack of room there is not a failure. */
static bool is_left_to_others(const kvf_store *store, const kvfi_item *item, size_t tier) {
    bool lasts = false;
    for (size_t i = 0; i < store->num_tiers; i++) {
        lasts = lasts || !store->tiers[i]->volatile_;
    }
    return lasts && store->tiers[tier]->volatile_ && item->status == KVF_MISS && item->why == KVF_WHY_FULL;
}

void kvfi_put_note(const kvf_store *store, kvfi_put_outcome *outcome, const kvfi_item *item, size_t tier) {
    if (item->status == KVF_OK) {
        outcome->tiers |= (uint8_t)(1u << tier);
    } else if (is_left_to_others(store, item, tier)) {
        return;
    } else if (outcome->status == KVF_OK) {
        outcome->status = KVF_MISS;
        outcome->why = item->status == KVF_AGAIN ? KVF_WHY_BUDGET : item->why;
    }
}

void kvfi_store_count_put(kvf_store *store, const kvfi_item *item, const kvfi_put_outcome *outcome, kvfi_role role,
                          bool sent) {
    kvfi_counters *stats = &store->stats;
    if (outcome->tiers != 0) {
        kvfi_known_add(&store->known, &item->addr.key, outcome->tiers);
    }
    if (role == KVFI_ROLE_COPY) {
        atomic_fetch_add(&stats->promoted, outcome->status == KVF_OK && outcome->tiers != 0);
    }
    if (role != KVFI_ROLE_SAVE) {
        return;
    }
    if (!sent) {
        atomic_fetch_add(&stats->known, 1);
    } else if (outcome->status == KVF_OK) {
        atomic_fetch_add(&stats->saved, 1);
        atomic_fetch_add(&stats->saved_bytes, item->bytes);
    } else {
        atomic_fetch_add(&stats->save_failures[outcome->why], 1);
    }
}

/* ---- counters ---- */

void kvfi_store_count_lookups(kvf_store *store, size_t num) {
    atomic_fetch_add(&store->stats.lookups, num);
}

void kvfi_store_count_lookup_hits(kvf_store *store, size_t num) {
    atomic_fetch_add(&store->stats.lookup_hits, num);
}

void kvfi_store_count_loads(kvf_store *store, size_t num) {
    atomic_fetch_add(&store->stats.loads, num);
}

void kvfi_store_count_load_hits(kvf_store *store, size_t num, uint64_t bytes) {
    atomic_fetch_add(&store->stats.load_hits, num);
    atomic_fetch_add(&store->stats.loaded_bytes, bytes);
}

void kvfi_store_count_miss(kvf_store *store, kvf_reason why) {
    atomic_fetch_add(&store->stats.misses[why], 1);
}

void kvfi_store_count_saves(kvf_store *store, size_t num) {
    atomic_fetch_add(&store->stats.saves, num);
}

void kvfi_store_count_known(kvf_store *store, size_t num) {
    atomic_fetch_add(&store->stats.known, num);
}

void kvfi_store_count_unsaved(kvf_store *store, kvf_reason why) {
    atomic_fetch_add(&store->stats.save_failures[why], 1);
}

KVF_SIZED(kvf_stats, backlog_peak_bytes, 640, backlog_peak_bytes);

kvf_status kvf_store_stats(kvf_store *store, kvf_stats *out) {
    kvfi_counters *c = &store->stats;
    KVFI_TRY(kvfi_store_check_ours(store, NULL));
    /* Outcomes are read first: they are counted after their operation, so they never exceed it. */
    kvf_stats stats = {
        .num_tiers = (uint32_t)store->num_tiers,
        .lookup_hits = c->lookup_hits,
        .lookup_round_trips = c->lookup_round_trips,
        .load_hits = c->load_hits,
        .loaded_bytes = c->loaded_bytes,
        .saved = c->saved,
        .known = c->known,
        .saved_bytes = c->saved_bytes,
        .promoted = c->promoted,
    };
    for (size_t i = 0; i < KVF_NUM_REASONS; i++) {
        stats.misses[i] = c->misses[i];
        stats.save_failures[i] = c->save_failures[i];
    }
    for (size_t i = 0; i < store->num_tiers; i++) {
        stats.disconnects += store->tiers[i]->disconnects;
        stats.connects += store->tiers[i]->connects;
    }
    stats.lookups = c->lookups;
    stats.loads = c->loads;
    stats.saves = c->saves;
    pthread_mutex_lock(&store->backlog.lock);
    stats.backlog_bytes = store->backlog.pending_bytes;
    stats.backlog_peak_bytes = store->backlog.peak_bytes;
    pthread_mutex_unlock(&store->backlog.lock);
    return kvf_sized_give(out, &stats, &kvf_stats_sized);
}
