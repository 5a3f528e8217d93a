/* SPDX-License-Identifier: Apache-2.0
 *
 * kvf_walk. It is here, above src/store, because it distinguishes sessions from blocks.
 */
#include "kvferry/admin.h"
#include "kvferry/sized.h"

#include "session/session.h"
#include "store/store.h"

#define STEP_US 5000000

typedef struct walk {
    kvf_visit_fn visit;
    void *ctx;
    uint32_t tier;
    bool whole;
    bool stopped;
    /* The spaces of sessions that are values: plain, and under each secret. */
    kvf_digest sessions[1 + KVFI_MAX_SECRETS];
    const kvfi_secrets *secrets;
    kvf_store *store;
    /* The space that was last asked for its card, and whether the card opened. */
    kvf_digest asked;
    bool has_asked, is_ours;
} walk;

/* Whether a space belongs to one of the secrets: then its card opens. The spaces of sessions have no card. */
static bool is_space_of_ours(walk *w, const kvf_digest *space) {
    for (size_t i = 0; i < w->secrets->num; i++) {
        if (memcmp(space, &w->sessions[1 + i], sizeof *space) == 0) {
            return true;
        }
    }
    if (!w->has_asked || memcmp(space, &w->asked, sizeof *space) != 0) {
        char *card = NULL;
        w->is_ours = kvf_space_describe(w->store, &card, NULL, space) == KVF_OK;
        w->asked = *space;
        w->has_asked = true;
        kvf_free(card);
    }
    return w->is_ours;
}

/* Decrypted into a copy, *opened, under one secret. */
static kvf_reason open_under(const kvfi_secret *seal, uint8_t **opened, kvfi_header *header, const uint8_t **tokens,
                             const uint8_t **payload, const kvfi_sight *sight) {
    if (*opened == NULL) {
        *opened = kvfi_alloc(sight->head_len);
    }
    if (*opened == NULL) {
        return KVF_WHY_NOMEM;
    }
    memcpy(*opened, sight->head, sight->head_len);
    return kvfi_record_open_value(header, tokens, payload, *opened, sight->head_len, seal);
}

/* Opens a sealed record with the secrets of the store. A header alone only suggests which secret it is sealed under, so
 * a whole record is tried under each. Without memory to open it, it stays closed. A record that opens under none is
 * damaged only if its space is ours: the header of one record in 2^20 fits a secret that it is not sealed under. */
static kvf_reason look_into(walk *w, kvf_seal *seal, uint8_t **opened, kvfi_header *header, const uint8_t **tokens,
                            const uint8_t **payload, const kvfi_sight *sight) {
    const kvfi_header closed = *header;
    kvf_reason why = KVF_WHY_NONE;
    *tokens = *payload = NULL;
    if (!w->whole) {
        *seal = kvfi_secrets_admit(w->secrets, header) != NULL ? KVF_SEAL_OPENED : KVF_SEAL_CLOSED;
        return KVF_WHY_NONE;
    }
    *seal = KVF_SEAL_CLOSED;
    for (size_t i = 0; i < w->secrets->num; i++) {
        const kvfi_secret *secret = &w->secrets->of[i].seal;
        kvfi_header unveiled = closed;
        if (kvfi_header_admit(&unveiled, secret) != KVF_WHY_NONE) {
            continue;
        }
        *header = closed;
        why = open_under(secret, opened, header, tokens, payload, sight);
        if (why == KVF_WHY_NONE) {
            *seal = KVF_SEAL_OPENED;
            return KVF_WHY_NONE;
        }
        *header = closed;
        *tokens = *payload = NULL;
        if (why == KVF_WHY_NOMEM) {
            *seal = KVF_SEAL_CLOSED;
            return KVF_WHY_NONE;
        }
        *seal = KVF_SEAL_OPENED;
    }
    if (why != KVF_WHY_NONE && !is_space_of_ours(w, &closed.addr.space)) {
        *seal = KVF_SEAL_CLOSED;
        return KVF_WHY_NONE;
    }
    return why;
}

/* What the header, or the whole value, says about a record; `damage` if it is damaged. */
static void read_record(walk *w, kvf_entry *entry, uint8_t **opened, const kvfi_sight *sight) {
    kvfi_header header;
    const uint8_t *tokens = NULL, *payload = NULL;
    if (w->whole) {
        entry->damage = kvfi_record_parse(&header, &tokens, &payload, sight->head, sight->head_len);
    } else if (sight->head_len < KVFI_HEADER_BYTES) {
        entry->damage = KVF_WHY_TRUNCATED;
    } else {
        entry->damage = kvfi_header_decode(&header, sight->head);
        if (entry->damage == KVF_WHY_NONE && sight->stored_bytes != kvfi_record_bytes(&header)) {
            entry->damage = KVF_WHY_TRUNCATED;
        }
    }
    if (entry->damage == KVF_WHY_TRUNCATED && sight->incomplete) {
        entry->damage = KVF_WHY_ABSENT;
    }
    if (entry->damage != KVF_WHY_NONE) {
        return;
    }
    bool misplaced = sight->addr != NULL && (memcmp(&sight->addr->key, &header.addr.key, sizeof(kvf_key)) != 0 ||
                                             memcmp(sight->addr->space.bytes, header.addr.space.bytes, 8) != 0);
    if (misplaced) {
        entry->damage = KVF_WHY_OTHER_SPACE;
        return;
    }
    entry->space = header.addr.space;
    entry->key = header.addr.key;
    if (header.codec == KVFI_CODEC_SEALED) {
        entry->damage = look_into(w, &entry->seal, opened, &header, &tokens, &payload, sight);
        if (entry->damage != KVF_WHY_NONE) {
            return;
        }
    }
    entry->kind = (header.flags & KVFI_FLAG_CARD) != 0 ? KVF_ENTRY_SPACE_CARD : KVF_ENTRY_BLOCK;
    entry->payload_bytes = header.payload_bytes;
    entry->first_token = header.first_token;
    entry->num_tokens = header.num_tokens;
    entry->stored_s = header.stored_s;
    entry->tokens = header.num_tokens > 0 && tokens != NULL ? (const uint32_t *)(const void *)tokens : NULL;
    entry->payload = payload;
}

/* Whether the record is a session that is a value. Of a sealed record only if it can be opened. */
static bool is_session(const walk *w, const kvf_entry *entry) {
    bool found = entry->seal == KVF_SEAL_NONE && memcmp(&entry->space, &w->sessions[0], sizeof entry->space) == 0;
    for (size_t i = 0; i < w->secrets->num; i++) {
        found = found || (entry->seal == KVF_SEAL_OPENED &&
                          memcmp(&entry->space, &w->sessions[1 + i], sizeof entry->space) == 0);
    }
    return found;
}

/* The remaining time to live, by its meta or by the store, whichever ends first. */
static int64_t ttl_of(int64_t expires_s, int64_t store_ttl_ms) {
    if (expires_s == 0) {
        return store_ttl_ms;
    }
    int64_t left_ms = kvfi_sat_sub(kvfi_sat_mul(expires_s, 1000), kvfi_sys->wall_us() / 1000);
    left_ms = left_ms > 0 ? left_ms : 0;
    return store_ttl_ms >= 0 && store_ttl_ms < left_ms ? store_ttl_ms : left_ms;
}

/* The session's id, from its own beginning, as far as that was read. Unknown for a sealed one that was not opened. */
static void name_session(kvf_entry *entry, char id[KVF_MAX_ID_BYTES + 1], const kvfi_sight *sight) {
    bool sealed = entry->seal != KVF_SEAL_NONE;
    int64_t expires_s = 0;
    const uint8_t *payload = sealed ? entry->payload : sight->head + KVFI_HEADER_BYTES;
    size_t seen = !sealed ? sight->head_len - KVFI_HEADER_BYTES : payload != NULL ? (size_t)entry->payload_bytes : 0;
    bool named = seen >= 4 && kvfi_get32(payload) <= seen - 4 && /* nothing after the meta is read */
                 kvfi_session_value_id(id, &expires_s, payload, (size_t)entry->payload_bytes);
    entry->kind = KVF_ENTRY_SESSION;
    entry->name = named ? id : sealed ? "" : entry->name;
    entry->ttl_ms = named ? ttl_of(expires_s, entry->ttl_ms) : -2;
}

static int see(void *ctx, const kvfi_sight *sight) {
    walk *w = ctx;
    char id[KVF_MAX_ID_BYTES + 1];
    uint8_t *opened = NULL;
    kvf_entry entry = {.kind = sight->kind,
                       .tier = w->tier,
                       .name = sight->name,
                       .stored_bytes = sight->stored_bytes,
                       .stored_s = sight->stored_s,
                       .ttl_ms = sight->ttl_ms};
    if (sight->addr != NULL) {
        memcpy(entry.space.bytes, sight->addr->space.bytes, 8);
        entry.key = sight->addr->key;
    }
    if (sight->kind == KVF_ENTRY_BLOCK || sight->kind == KVF_ENTRY_SPACE_CARD) {
        read_record(w, &entry, &opened, sight);
    }
    if (entry.kind == KVF_ENTRY_BLOCK && entry.damage == KVF_WHY_NONE && is_session(w, &entry)) {
        name_session(&entry, id, sight);
    }
    w->stopped = w->visit(w->ctx, &entry) != 0;
    kvfi_free(opened);
    return w->stopped;
}

/* ---- one record, at its address */

static kvf_status unreadable(kvf_error *err, const kvfi_tier *tier, kvf_reason why) {
    return kvfi_fail(err, KVF_IO, "%.150s: the record can't be read: %s", tier->url->text, kvf_reason_name(why));
}

/* The whole value, in memory of `len` bytes. Not verified: the caller wants to see what is wrong. */
static kvf_reason read_value(kvfi_tier *tier, const kvfi_addr *addr, void *value, size_t len, bool sealed,
                             int64_t deadline_us) {
    struct iovec iov = {value, len};
    kvfi_item item = {.addr = *addr,
                      .iov = &iov,
                      .num_iov = 1,
                      .bytes = len,
                      .status = KVF_AGAIN,
                      .why = KVF_WHY_BUDGET,
                      .whole = kvfi_stays_whole(sealed, len)};
    kvfi_feed feed = {.items = &item, .num = 1, .limit = 1, .deadline_us = deadline_us};
    tier->ops->get(tier, &feed);
    return item.status == KVF_OK ? KVF_WHY_NONE : item.why;
}

static kvf_status see_whole(walk *w, kvfi_tier *tier, kvf_error *err, kvfi_sight *sight, bool sealed,
                            int64_t deadline_us) {
    uint8_t *value = kvfi_alloc((size_t)sight->stored_bytes);
    if (value == NULL) {
        return kvfi_fail(err, KVF_NOMEM, "no memory for a record of %llu bytes",
                         (unsigned long long)sight->stored_bytes);
    }
    kvf_reason why = read_value(tier, sight->addr, value, (size_t)sight->stored_bytes, sealed, deadline_us);
    if (why == KVF_WHY_NONE) {
        sight->head = value;
        sight->head_len = (size_t)sight->stored_bytes;
        see(w, sight);
    }
    kvfi_free(value);
    /* It may have been removed after its header was read. */
    return why == KVF_WHY_NONE || why == KVF_WHY_ABSENT ? KVF_OK : unreadable(err, tier, why);
}

static kvf_status see_one(walk *w, kvfi_tier *tier, kvf_error *err, const kvfi_addr *addr, int64_t deadline_us) {
    kvfi_peek peek = {.why = KVF_WHY_ABSENT};
    kvfi_header header;
    kvfi_sight sight = {.kind = KVF_ENTRY_BLOCK, .name = "", .ttl_ms = -1, .addr = addr};
    kvfi_tier_look(tier, addr, 1, &peek, deadline_us);
    if (peek.why == KVF_WHY_ABSENT) {
        return KVF_OK;
    }
    if (peek.why != KVF_WHY_NONE) {
        return unreadable(err, tier, peek.why);
    }
    sight.head = peek.header;
    sight.head_len = sizeof peek.header;
    bool sound = kvfi_header_decode(&header, peek.header) == KVF_WHY_NONE;
    if (sound) {
        sight.stored_bytes = kvfi_record_bytes(&header);
    }
    if (sound && w->whole) {
        return see_whole(w, tier, err, &sight, header.codec == KVFI_CODEC_SEALED, deadline_us);
    }
    see(w, &sight);
    return KVF_OK;
}

static kvf_status see_tier(walk *w, kvfi_tier *tier, kvf_error *err, const kvf_walk_options *options) {
    if (options->space == NULL || options->key == NULL) {
        return tier->ops->walk(tier, err, options->space, w->whole, see, w, options->budget_us);
    }
    kvfi_addr addr = {.key = *options->key};
    addr.space = *options->space;
    return see_one(w, tier, err, &addr, kvfi_deadline(options->budget_us));
}

KVF_SIZED(kvf_walk_options, key, 32, key);

kvf_status kvf_walk(kvf_store *store, kvf_error *err, kvf_visit_fn visit, void *ctx, const kvf_walk_options *options) {
    kvf_walk_options own;
    KVFI_TRY(kvf_sized_take(&own, err, options, &kvf_walk_options_sized));
    KVFI_TRY(kvfi_take_budget(&own.budget_us, err, STEP_US, false));
    if (own.key != NULL && own.space == NULL) {
        return kvfi_fail(err, KVF_LIMIT, "kvf_walk_options: a key is looked for in a space: set `space` too");
    }
    const kvfi_secrets *secrets = kvfi_store_secrets(store);
    walk w = {.visit = visit, .ctx = ctx, .whole = own.whole != 0, .secrets = secrets, .store = store};
    KVFI_TRY(kvfi_store_check_ours(store, err));
    kvfi_session_space(&w.sessions[0], NULL);
    for (size_t i = 0; i < secrets->num; i++) {
        kvfi_session_space(&w.sessions[1 + i], &secrets->of[i]);
    }
    for (; w.tier < kvfi_store_num_tiers(store) && !w.stopped; w.tier++) {
        KVFI_TRY(see_tier(&w, kvfi_store_tier(store, w.tier), err, &own));
    }
    return KVF_OK;
}
