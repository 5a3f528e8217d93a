/* SPDX-License-Identifier: Apache-2.0
 *
 * Looks up how many blocks of a prefix are stored, tier by tier.
 */
#include "base/interrupt.h"
#include "prefix/prefix.h"

typedef struct lookup {
    kvfi_addr *addrs;
    kvfi_peek *peeks;
    size_t *from; /* the key that each address belongs to */
    bool *hit;
    kvf_found *found;
    int64_t deadline_us, patience_us;
} lookup;

static bool make_room(lookup *out, size_t num) {
    size_t each = sizeof *out->addrs + sizeof *out->peeks + sizeof *out->from + sizeof *out->found + sizeof *out->hit;
    uint8_t *memory = kvfi_alloc_zero(num, each);
    if (memory == NULL) {
        return false;
    }
    out->found = (kvf_found *)(void *)memory;
    out->from = (size_t *)(void *)(out->found + num);
    out->peeks = (kvfi_peek *)(void *)(out->from + num);
    out->addrs = (kvfi_addr *)(void *)(out->peeks + num);
    out->hit = (bool *)(out->addrs + num);
    return true;
}

/* Whether the header is that of the requested block. A damaged header is not a hit. */
static kvf_reason read_peek(kvf_found *out, const kvfi_peek *peek, const kvfi_addr *addr, const kvfi_secret *seal,
                            size_t tier) {
    kvfi_header header;
    kvf_reason why = peek->why != KVF_WHY_NONE ? peek->why : kvfi_header_decode(&header, peek->header);
    if (why == KVF_WHY_NONE && memcmp(&header.addr, addr, sizeof *addr) != 0) {
        why = KVF_WHY_OTHER_SPACE;
    }
    if (why == KVF_WHY_NONE) {
        why = kvfi_header_admit(&header, seal);
    }
    if (why != KVF_WHY_NONE) {
        return why;
    }
    *out = (kvf_found){.payload_bytes = header.payload_bytes,
                       .stored_s = header.stored_s,
                       .num_tokens = header.num_tokens,
                       .tier = (uint32_t)tier};
    return KVF_WHY_NONE;
}

static size_t select_missing(lookup *at, const kvfi_identity *identity, const kvf_key *keys, size_t stride,
                             size_t num) {
    size_t missing = 0;
    for (size_t i = 0; i < num; i++) {
        if (!at->hit[i]) {
            kvf_key key;
            memcpy(&key, (const uint8_t *)keys + i * stride, sizeof key);
            kvfi_address(&at->addrs[missing], identity, &key);
            at->from[missing++] = i;
        }
    }
    return missing;
}

static void ask_tier(lookup *at, kvf_store *store, const kvfi_secret *seal, size_t index, size_t num) {
    kvfi_store_peek(store, index, at->addrs, num, at->peeks, at->deadline_us, at->patience_us);
    for (size_t i = 0; i < num; i++) {
        size_t key = at->from[i];
        kvf_reason why = read_peek(&at->found[key], &at->peeks[i], &at->addrs[i], seal, index);
        at->hit[key] = why == KVF_WHY_NONE;
        if (!at->hit[key] && (at->found[key].why == KVF_WHY_NONE || why != KVF_WHY_ABSENT)) {
            at->found[key].why = why; /* the reason of a tier that failed wins over "absent" */
        }
        kvfi_store_note_lookup(store, &at->addrs[i].key, index, at->peeks[i].why, at->hit[key]);
    }
}

/* Asks all tiers for what is not found yet. */
static void ask_tiers(lookup *at, kvf_store *store, const kvfi_identity *identity, const kvf_key *keys, size_t stride,
                      size_t num) {
    for (size_t tier = 0; tier < kvfi_store_num_tiers(store); tier++) {
        size_t missing = select_missing(at, identity, keys, stride, num);
        if (missing > 0 && !kvfi_interrupt_look()) {
            ask_tier(at, store, kvfi_seal_of(identity), tier, missing);
        }
    }
}

static size_t know_nothing(kvf_found *found, size_t num, kvf_reason why) {
    for (size_t i = 0; i < num && found != NULL; i++) {
        found[i] = (kvf_found){.why = why};
    }
    return 0;
}

/* The number of keys that were found: of all keys, or of the leading run. */
static size_t count_hits(const lookup *at, size_t num, bool each) {
    size_t hits = 0;
    for (size_t i = 0; i < num && (each || at->hit[i]); i++) {
        hits += at->hit[i];
    }
    return hits;
}

static void note_tokens(kvf_space *space, const lookup *at, size_t num) {
    kvfi_vote vote = {0};
    for (size_t i = 0; i < num; i++) {
        if (at->hit[i] && at->found[i].num_tokens <= space->identity.block_tokens) {
            kvfi_vote_for(&vote, at->found[i].num_tokens);
        }
    }
    kvfi_vote_count(&vote, space);
}

size_t kvfi_match(kvf_space *space, kvf_found *found, const kvf_key *keys, size_t stride, size_t num, uint32_t flags,
                  int64_t deadline_us, int64_t patience_us) {
    kvf_store *store = space->store;
    lookup at = {.deadline_us = deadline_us, .patience_us = patience_us};
    if (num == 0 || !make_room(&at, num)) {
        return know_nothing(found, num, KVF_WHY_NOMEM);
    }
    kvfi_store_count_lookups(store, num);
    ask_tiers(&at, store, &space->identity, keys, stride, num);
    if (space->rotates) {
        ask_tiers(&at, store, &space->previous, keys, stride, num);
    }
    note_tokens(space, &at, num);
    size_t hits = count_hits(&at, num, (flags & KVF_EACH) != 0);
    if (found != NULL) {
        memcpy(found, at.found, num * sizeof *found);
    }
    kvfi_free(at.found);
    kvfi_store_count_lookup_hits(store, hits);
    return hits;
}

kvf_status kvf_match(kvf_space *space, size_t *out_run, kvf_found *found, const kvf_key *keys, size_t num,
                     int64_t budget_us) {
    if (num > KVF_MAX_BLOCKS) {
        return KVF_LIMIT;
    }
    KVFI_TRY(kvfi_take_budget(&budget_us, NULL, KVFI_BLOCKS_US, true));
    *out_run = know_nothing(found, num, KVF_WHY_CLOSED);
    if (num == 0 || !kvfi_store_is_ours(space->store)) {
        return KVF_OK;
    }
    *out_run = kvfi_match(space, found, keys, sizeof *keys, num, 0, kvfi_budget_deadline(budget_us), 0);
    return KVF_OK;
}
