/* SPDX-License-Identifier: Apache-2.0
 *
 * kvf_walk. It lies here, above src/store, because it tells sessions from blocks.
 */
#include "kvferry/admin.h"

#include "session/session.h"
#include "store/store.h"

#define DEFAULT_STEP_MS 5000u

typedef struct walk {
    kvf_visit_fn visit;
    void        *ctx;
    uint32_t     tier;
    bool         whole;
    bool         stopped;
    uint8_t      sessions[32]; /* the space of sessions that are values */
} walk;

/* What the header, or the whole value, says about a record; `damage` when it says nothing good. */
static void read_record(kvf_entry *entry, const kvfi_sight *sight, bool whole) {
    kvfi_header header;
    const uint8_t *tokens = NULL, *payload = NULL;
    if (whole) {
        entry->damage = kvfi_record_parse(&header, &tokens, &payload, sight->head, sight->head_len);
    } else if (sight->head_len < KVFI_HEADER_BYTES) {
        entry->damage = KVF_WHY_TRUNCATED;
    } else {
        entry->damage = kvfi_header_decode(&header, sight->head);
        if (entry->damage == KVF_WHY_NONE &&
            sight->stored_bytes != KVFI_HEAD_BYTES(header.num_tokens) + header.payload_bytes) {
            entry->damage = KVF_WHY_TRUNCATED;
        }
    }
    if (entry->damage != KVF_WHY_NONE) {
        return;
    }
    bool misplaced = sight->addr != NULL && (memcmp(&sight->addr->key, &header.addr.key, sizeof(kvf_key)) != 0 ||
                                             memcmp(sight->addr->space, header.addr.space, 8) != 0);
    if (misplaced) {
        entry->damage = KVF_WHY_OTHER_SPACE;
        return;
    }
    entry->kind = (header.flags & KVFI_FLAG_CARD) != 0 ? KVF_ENTRY_SPACE_CARD : KVF_ENTRY_BLOCK;
    memcpy(entry->space, header.addr.space, sizeof entry->space);
    entry->key = header.addr.key;
    entry->payload_bytes = header.payload_bytes;
    entry->first_token = header.first_token;
    entry->num_tokens = header.num_tokens;
    entry->stored_s = header.stored_s;
    entry->tokens = header.num_tokens > 0 ? (const uint32_t *)(const void *)tokens : NULL;
    entry->payload = payload;
}

/* A session that is a value is named by its own beginning, as far as that was read. */
static void name_session(kvf_entry *entry, char id[KVF_MAX_ID_BYTES + 1], const kvfi_sight *sight) {
    const uint8_t *payload = sight->head + KVFI_HEADER_BYTES;
    size_t seen = sight->head_len - KVFI_HEADER_BYTES;
    bool named = seen >= 4 && kvfi_get32(payload) <= seen - 4 && /* nothing behind the meta is looked at */
                 kvfi_session_value_id(id, payload, (size_t)entry->payload_bytes);
    entry->kind = KVF_ENTRY_SESSION;
    entry->name = named ? id : entry->name;
}

static int see(void *ctx, const kvfi_sight *sight) {
    walk *w = ctx;
    char id[KVF_MAX_ID_BYTES + 1];
    kvf_entry entry = {.kind = sight->kind,
                       .tier = w->tier,
                       .name = sight->name,
                       .stored_bytes = sight->stored_bytes,
                       .stored_s = sight->stored_s,
                       .ttl_ms = sight->ttl_ms};
    if (sight->addr != NULL) {
        memcpy(entry.space, sight->addr->space, 8);
        entry.key = sight->addr->key;
    }
    if (sight->kind == KVF_ENTRY_BLOCK || sight->kind == KVF_ENTRY_SPACE_CARD) {
        read_record(&entry, sight, w->whole);
    }
    if (entry.kind == KVF_ENTRY_BLOCK && entry.damage == KVF_WHY_NONE && memcmp(entry.space, w->sessions, 32) == 0) {
        name_session(&entry, id, sight);
    }
    w->stopped = w->visit(w->ctx, &entry) != 0;
    return w->stopped;
}

static kvf_walk_options options_of(const kvf_walk_options *options) {
    kvf_walk_options own = {.struct_size = sizeof own};
    if (options != NULL) {
        memcpy(&own, options, options->struct_size < sizeof own ? options->struct_size : sizeof own);
    }
    if (own.budget_ms == 0) {
        own.budget_ms = DEFAULT_STEP_MS;
    }
    return own;
}

kvf_status kvf_walk(kvf_store *store, kvf_error *err, kvf_visit_fn visit, void *ctx, const kvf_walk_options *options) {
    kvf_walk_options own = options_of(options);
    walk w = {.visit = visit, .ctx = ctx, .whole = own.whole != 0};
    if (!kvfi_store_is_ours(store)) {
        return kvfi_fail(err, KVF_CLOSED, "this store was opened by another process: open it again after a fork");
    }
    kvfi_session_space(w.sessions);
    for (; w.tier < store->num_tiers && !w.stopped; w.tier++) {
        kvfi_tier *tier = store->tiers[w.tier];
        KVFI_TRY(tier->ops->walk(tier, err, own.space, w.whole, see, &w, own.budget_ms));
    }
    return KVF_OK;
}
