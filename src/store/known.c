/* SPDX-License-Identifier: Apache-2.0
 *
 * Remembers which keys are stored in which tiers, so that they are not saved again.
 */
#include "store/known.h"

bool kvfi_known_init(kvfi_known *known) {
    known->entries = kvfi_alloc_zero((size_t)KVFI_KNOWN_SETS * KVFI_KNOWN_WAYS, sizeof *known->entries);
    if (known->entries == NULL) {
        return false;
    }
    pthread_mutex_init(&known->lock, NULL);
    return true;
}

void kvfi_known_cleanup(kvfi_known *known) {
    if (known->entries != NULL) {
        pthread_mutex_destroy(&known->lock);
        kvfi_free(known->entries);
        known->entries = NULL;
    }
}

/* Seconds of the monotonic clock, from 1 on: 0 marks a free entry. */
static uint32_t now_s(void) {
    return (uint32_t)(kvfi_sys->now_us() / 1000000) + 1;
}

static kvfi_known_entry *set_of(const kvfi_known *known, const kvf_key *key) {
    return &known->entries[kvfi_get32(key->bytes + 8) % KVFI_KNOWN_SETS * KVFI_KNOWN_WAYS];
}

static kvfi_known_entry *find(const kvfi_known *known, const kvf_key *key) {
    kvfi_known_entry *set = set_of(known, key);
    uint64_t tag = kvfi_get64(key->bytes);
    for (size_t i = 0; i < KVFI_KNOWN_WAYS; i++) {
        if (set[i].at_s != 0 && set[i].tag == tag) {
            return &set[i];
        }
    }
    return NULL;
}

static kvfi_known_entry *oldest(kvfi_known_entry *set) {
    kvfi_known_entry *entry = &set[0];
    for (size_t i = 1; i < KVFI_KNOWN_WAYS; i++) {
        if (set[i].at_s < entry->at_s) {
            entry = &set[i];
        }
    }
    return entry;
}

static bool is_fresh(const kvfi_known_entry *entry) {
    return now_s() - entry->at_s < KVFI_KNOWN_FOR_S;
}

/* Under the lock. */
static void note(kvfi_known *known, const kvf_key *key, uint8_t tiers, bool doubted) {
    kvfi_known_entry *entry = find(known, key);
    if (entry != NULL && is_fresh(entry) && tiers != 0) {
        tiers |= entry->tiers;
    } else if (entry == NULL) {
        entry = oldest(set_of(known, key));
    }
    *entry = (kvfi_known_entry){.tag = kvfi_get64(key->bytes), .at_s = now_s(), .tiers = tiers, .doubted = doubted};
}

void kvfi_known_add(kvfi_known *known, const kvf_key *key, uint8_t tiers) {
    pthread_mutex_lock(&known->lock);
    note(known, key, tiers, false);
    pthread_mutex_unlock(&known->lock);
}

void kvfi_known_see(kvfi_known *known, const kvf_key *key, uint8_t tiers) {
    pthread_mutex_lock(&known->lock);
    const kvfi_known_entry *entry = find(known, key);
    if (entry == NULL || !is_fresh(entry) || !entry->doubted) {
        note(known, key, tiers, false);
    }
    pthread_mutex_unlock(&known->lock);
}

void kvfi_known_doubt(kvfi_known *known, const kvf_key *key) {
    pthread_mutex_lock(&known->lock);
    note(known, key, 0, true);
    pthread_mutex_unlock(&known->lock);
}

void kvfi_known_doubt_all(kvfi_known *known) {
    uint32_t now = now_s();
    pthread_mutex_lock(&known->lock);
    for (size_t i = 0; i < (size_t)KVFI_KNOWN_SETS * KVFI_KNOWN_WAYS; i++) {
        kvfi_known_entry *entry = &known->entries[i];
        if (entry->at_s != 0) {
            *entry = (kvfi_known_entry){.tag = entry->tag, .at_s = now, .doubted = true};
        }
    }
    pthread_mutex_unlock(&known->lock);
}

bool kvfi_known_doubted(kvfi_known *known, const kvf_key *key) {
    pthread_mutex_lock(&known->lock);
    const kvfi_known_entry *entry = find(known, key);
    bool doubted = entry != NULL && is_fresh(entry) && entry->doubted;
    pthread_mutex_unlock(&known->lock);
    return doubted;
}

void kvfi_known_forget(kvfi_known *known, const kvf_key *key) {
    pthread_mutex_lock(&known->lock);
    kvfi_known_entry *entry = find(known, key);
    if (entry != NULL) {
        entry->at_s = 0;
    }
    pthread_mutex_unlock(&known->lock);
}

void kvfi_known_add_missed(kvfi_known *known, const kvf_key *key) {
    pthread_mutex_lock(&known->lock);
    const kvfi_known_entry *entry = find(known, key);
    note(known, key, 0, entry != NULL && is_fresh(entry) && entry->doubted);
    pthread_mutex_unlock(&known->lock);
}

bool kvfi_known_missed(kvfi_known *known, const kvf_key *key) {
    pthread_mutex_lock(&known->lock);
    const kvfi_known_entry *entry = find(known, key);
    bool missed = entry != NULL && is_fresh(entry) && entry->tiers == 0;
    pthread_mutex_unlock(&known->lock);
    return missed;
}

void kvfi_known_clear(kvfi_known *known) {
    pthread_mutex_lock(&known->lock);
    memset(known->entries, 0, (size_t)KVFI_KNOWN_SETS * KVFI_KNOWN_WAYS * sizeof *known->entries);
    pthread_mutex_unlock(&known->lock);
}

uint8_t kvfi_known_tiers(kvfi_known *known, const kvf_key *key) {
    pthread_mutex_lock(&known->lock);
    kvfi_known_entry *entry = find(known, key);
    uint8_t tiers = entry != NULL && is_fresh(entry) ? entry->tiers : 0;
    pthread_mutex_unlock(&known->lock);
    return tiers;
}
