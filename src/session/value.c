/* SPDX-License-Identifier: Apache-2.0
 *
 * Sessions as one value in record format, for tiers that know only values.
 *
 *   header (128) | meta length (4) | meta, padded | keys | zeros | values
 *
 * Keys and values begin at multiples of 64 bytes of the value, so that they can be used in place.
 */
#include "session/session.h"

enum { ALIGN = 64, FRONT = KVFI_HEADER_BYTES + 4 };

static const char space_label[] = "kvf1 sessions";
static const char key_label[] = "kvf1 session";

static const kvfi_secret *secret_of(const kvfi_tenant *tenant) {
    return tenant != NULL ? &tenant->secret : NULL;
}

static const kvfi_secret *seal_of(const kvfi_tenant *tenant) {
    return tenant != NULL ? &tenant->seal : NULL;
}

void kvfi_session_space(kvf_digest *out, const kvfi_tenant *tenant) {
    kvfi_sha sha;
    kvfi_sha_init(&sha, secret_of(tenant));
    kvfi_sha_add(&sha, space_label, sizeof space_label - 1);
    kvfi_sha_end(&sha, out->bytes);
}

void kvfi_session_addr(kvfi_addr *out, const char *id, const kvfi_tenant *tenant, unsigned place) {
    kvfi_sha sha;
    kvfi_session_space(&out->space, tenant);
    kvfi_sha_init(&sha, secret_of(tenant));
    kvfi_sha_add(&sha, key_label, sizeof key_label - 1);
    kvfi_sha_add(&sha, id, strlen(id) + place); /* the second place: with the NUL */
    kvfi_sha_end(&sha, out->key.bytes);
}

/* From the end of the keys to the next multiple of 64. */
static size_t gap_behind(uint64_t keys_bytes) {
    return (size_t)((ALIGN - keys_bytes % ALIGN) % ALIGN);
}

/* The result of a session call for a reason of the tier. */
static kvf_status outcome(kvf_error *err, kvf_status status, kvf_reason why) {
    if (status == KVF_AGAIN) {
        why = KVF_WHY_BUDGET; /* it was not tried */
    }
    switch (why) {
    case KVF_WHY_ABSENT:
        return kvfi_fail(err, KVF_MISS, "no such session");
    case KVF_WHY_BUDGET:
        return kvfi_fail(err, KVF_IO, "the time budget for the session was used up");
    case KVF_WHY_UNREACHABLE:
    case KVF_WHY_BREAKER:
    case KVF_WHY_STALLED:
        return kvfi_fail(err, KVF_IO, "the store of the session can't be reached, read or written");
    case KVF_WHY_SETTINGS:
        return kvfi_fail(err, KVF_CONFIG,
                         "with its settings the server would lose or refuse the session: kvferry doctor explains");
    case KVF_WHY_FULL:
        return kvfi_fail(err, KVF_IO, "the store has no room for the session");
    case KVF_WHY_SERVER:
        return kvfi_fail(err, KVF_IO, "the store answered with an error");
    case KVF_WHY_NOMEM:
        return kvfi_fail(err, KVF_NOMEM, "no memory for the session");
    case KVF_WHY_CLOSED:
        return kvfi_fail(err, KVF_CLOSED, "the store was closed");
    default:
        return kvfi_fail(err, KVF_MISS, "the stored session can't be used: %s", kvf_reason_name(why));
    }
}

/* One item through the tier's get or put. */
static kvf_status transfer(const kvfi_session_call *call, void (*op)(kvfi_tier *, kvfi_feed *), kvfi_item *item,
                           kvf_reason *why) {
    item->status = KVF_AGAIN;
    item->why = KVF_WHY_BUDGET;
    kvfi_feed feed = {.items = item, .num = 1, .deadline_us = call->deadline_us};
    atomic_init(&feed.next, 0);
    atomic_init(&feed.limit, 1);
    op(call->tier, &feed);
    *why = item->why;
    return item->status == KVF_OK ? KVF_OK : outcome(call->err, item->status, item->why);
}

/* ---- the two places of a sealed session. One that is so long that a tier may cut it into pieces is never written over
 * the one that it replaces: a reader would meet pieces of both, and a writer that dies halfway would leave neither. */

static unsigned num_places(const kvfi_session_call *call) {
    return call->tenant != NULL ? 2 : 1;
}

typedef struct stored {
    unsigned num;   /* the number of places that hold one */
    unsigned place; /* of the newest */
    bool whole;     /* that is not divided into pieces */
} stored;

static stored find_stored(const kvfi_session_call *call) {
    stored out = {.num = 0};
    kvfi_addr addrs[2];
    kvfi_peek peeks[2] = {{.why = KVF_WHY_ABSENT}, {.why = KVF_WHY_ABSENT}};
    int64_t newest_s = INT64_MIN;
    for (unsigned i = 0; i < num_places(call); i++) {
        kvfi_session_addr(&addrs[i], call->id, call->tenant, i);
    }
    kvfi_tier_look(call->tier, addrs, num_places(call), peeks, call->deadline_us);
    for (unsigned i = 0; i < num_places(call); i++) {
        kvfi_header header;
        if (peeks[i].why != KVF_WHY_NONE || kvfi_header_decode(&header, peeks[i].header) != KVF_WHY_NONE) {
            continue;
        }
        if (out.num == 0 || header.stored_s > newest_s) {
            out.place = i;
            out.whole = kvfi_stays_whole(true, kvfi_record_bytes(&header));
            newest_s = header.stored_s;
        }
        out.num++;
    }
    return out;
}

static kvf_status remove_at(const kvfi_session_call *call, unsigned place) {
    kvfi_addr addr;
    kvfi_session_addr(&addr, call->id, call->tenant, place);
    return call->tier->ops->remove(call->tier, call->err, &addr, call->deadline_us);
}

/* ---- save */
/* The sealed record in separate memory, since the caller's arrays must not change. *iov becomes the whole of it. */
static kvf_status seal_value(const kvfi_session_call *call, kvfi_loaded **out, kvfi_item *item, struct iovec *iov,
                             size_t num_iov, int64_t stored_s) {
    uint8_t salt[KVFI_SALT_BYTES];
    kvfi_record_key key;
    kvf_block block = {0};
    size_t bytes = KVFI_HEADER_BYTES + kvfi_iov_bytes(iov, num_iov) + KVFI_SUM_BYTES;
    kvfi_loaded *sealed = kvfi_loaded_new(bytes);
    *out = sealed;
    if (sealed == NULL || kvfi_sys->random(salt, sizeof salt) != 0) {
        return kvfi_fail(call->err, KVF_NOMEM, "no memory to seal a session of %zu bytes", bytes);
    }
    kvfi_record_key_of(&key, &call->tenant->seal, &item->addr, salt);
    bool whole = kvfi_sealed_write(sealed->mem, sealed->mem + KVFI_HEADER_BYTES, sealed->mem + bytes - KVFI_SUM_BYTES,
                                   &key, &item->addr, &block, iov, num_iov, 0, stored_s);
    explicit_bzero(&key, sizeof key);
    iov[0] = (struct iovec){sealed->mem, bytes};
    item->num_iov = 1;
    item->bytes = bytes;
    return whole ? KVF_OK : kvfi_fail(call->err, KVF_NOMEM, "no memory to seal a session");
}

static struct iovec *put_pieces(struct iovec *to, kvfi_pieces pieces) {
    memcpy(to, pieces.iov, pieces.num * sizeof *to);
    return to + pieces.num;
}

/* The payload and the checksum of the record in `iov`, which has room for all pieces and three more. `head`: the whole
 * front of it, header first. */
static void lay_out(struct iovec *iov, uint8_t *head, size_t meta_len, kvfi_pieces keys, uint64_t keys_bytes,
                    kvfi_pieces values, uint8_t sum[KVFI_SUM_BYTES]) {
    static const uint8_t zeros[ALIGN];
    iov[0] = (struct iovec){head + KVFI_HEADER_BYTES, 4 + meta_len};
    struct iovec *at = put_pieces(iov + 1, keys);
    *at = (struct iovec){(void *)(uintptr_t)zeros, gap_behind(keys_bytes)};
    at = put_pieces(at + 1, values);
    *at = (struct iovec){sum, KVFI_SUM_BYTES};
}

/* Writes what lay_out has arranged. */
static kvf_status write_value(const kvfi_session_call *call, kvfi_item *item, uint8_t *head, int64_t stored_s) {
    struct iovec *iov = item->iov;
    uint32_t payload = item->num_iov - 1;
    kvfi_loaded *sealed = NULL;
    kvf_status status = KVF_OK;
    kvf_reason why = KVF_WHY_NONE;
    stored before = {.num = 0};
    unsigned place = 0;
    if (call->tenant != NULL) {
        before = find_stored(call);
        item->whole = kvfi_stays_whole(true, KVFI_HEADER_BYTES + kvfi_iov_bytes(iov, item->num_iov));
        place = before.num == 0 || (item->whole && before.whole) ? before.place : 1 - before.place;
    }
    kvfi_session_addr(&item->addr, call->id, call->tenant, place);
    if (call->tenant != NULL) {
        status = seal_value(call, &sealed, item, iov, payload, stored_s);
    } else {
        kvf_block block = {0};
        kvfi_record_seal(head, iov[payload].iov_base, &item->addr, &block, iov, payload, 0, stored_s);
        iov[0] = (struct iovec){head, KVFI_HEADER_BYTES + iov[0].iov_len};
        item->bytes = kvfi_iov_bytes(iov, item->num_iov);
    }
    if (status == KVF_OK) {
        status = transfer(call, call->tier->ops->put, item, &why);
    }
    kvfi_loaded_free(sealed);
    if (status == KVF_OK && before.num > (place == before.place ? 1 : 0)) {
        kvfi_session_call quiet = *call;
        quiet.err = NULL;
        (void)remove_at(&quiet, 1 - place);
    }
    return status == KVF_MISS ? kvfi_fail(call->err, KVF_IO, "the store refused the session: %s", kvf_reason_name(why))
                              : status;
}

kvf_status kvfi_session_save_value(const kvfi_session_call *call, kvfi_session_meta *meta, kvfi_pieces keys,
                                   kvfi_pieces values, uint32_t ttl_s) {
    uint8_t *head = NULL, sum[KVFI_SUM_BYTES];
    size_t meta_len = 0, num_iov = keys.num + values.num + 3;
    if (meta->keys.bytes + meta->values.bytes > KVF_MAX_PAYLOAD_BYTES - KVFI_MAX_META_BYTES - 2 * ALIGN) {
        return kvfi_fail(call->err, KVF_LIMIT, "a session in this store may have 16G at most");
    }
    /* Not every tier has a time to live for one value, so the value has its own. */
    meta->expires_s = meta->stored_s + ttl_s;
    memcpy(meta->id, call->id, strlen(call->id) + 1);
    KVFI_TRY(kvfi_session_meta_encode(&head, &meta_len, call->err, meta, FRONT, ALIGN));
    kvfi_put32(head + KVFI_HEADER_BYTES, (uint32_t)meta_len);
    kvf_status status = KVF_NOMEM;
    struct iovec *iov = kvfi_alloc_zero(num_iov, sizeof *iov);
    if (iov != NULL) {
        kvfi_item item = {.iov = iov, .num_iov = (uint32_t)num_iov, .ttl_s = ttl_s};
        lay_out(iov, head, meta_len, keys, meta->keys.bytes, values, sum);
        status = write_value(call, &item, head, meta->stored_s);
    } else {
        (void)kvfi_fail(call->err, status, "no memory for the pieces of a session");
    }
    kvfi_free(iov);
    kvfi_free(head);
    return status;
}

/* ---- load */
/* Divides a payload into meta and arrays. KVF_MISS if its lengths do not add up. */
static kvf_status cut(kvfi_session_meta *meta, const uint8_t **keys, const uint8_t **values, kvf_error *err,
                      const uint8_t *payload, uint64_t len) {
    if (len < 4 || kvfi_get32(payload) > len - 4) {
        return kvfi_fail(err, KVF_MISS, "the stored session is shorter than its own lengths");
    }
    size_t meta_len = kvfi_get32(payload);
    KVFI_TRY(kvfi_session_meta_decode(meta, err, payload + 4, meta_len));
    /* Both are at most 1T, so the sum can't overflow. */
    uint64_t values_at = 4 + meta_len + meta->keys.bytes + gap_behind(meta->keys.bytes);
    if (values_at + meta->values.bytes != len || meta->part_bytes != 0) {
        return kvfi_fail(err, KVF_MISS, "the stored session is not as long as its meta says");
    }
    *keys = payload + 4 + meta_len;
    *values = payload + values_at;
    return KVF_OK;
}

/* Looks up the value and its length. */
static kvf_status look(const kvfi_session_call *call, const kvfi_addr *addr, uint64_t *out_payload_bytes) {
    kvfi_peek peek = {.why = KVF_WHY_ABSENT};
    kvfi_header header;
    kvfi_tier_look(call->tier, addr, 1, &peek, call->deadline_us);
    kvf_reason why = peek.why;
    if (why == KVF_WHY_NONE) {
        why = kvfi_header_decode(&header, peek.header);
    }
    if (why == KVF_WHY_NONE && memcmp(&header.addr, addr, sizeof *addr) != 0) {
        why = KVF_WHY_OTHER_SPACE;
    }
    if (why == KVF_WHY_NONE) {
        why = kvfi_header_admit(&header, seal_of(call->tenant));
    }
    if (why == KVF_WHY_NONE && header.num_tokens != 0) {
        why = KVF_WHY_OTHER_SPACE;
    }
    if (why != KVF_WHY_NONE) {
        return outcome(call->err, KVF_MISS, why);
    }
    *out_payload_bytes = header.payload_bytes;
    return KVF_OK;
}

static kvf_status read_value(const kvfi_session_call *call, kvfi_loaded *loaded, const kvfi_addr *addr,
                             uint64_t payload_bytes, kvf_reason *why) {
    struct iovec whole = {loaded->mem, KVFI_HEADER_BYTES + (size_t)payload_bytes + KVFI_SUM_BYTES};
    kvfi_item item = {.addr = *addr,
                      .iov = &whole,
                      .num_iov = 1,
                      .bytes = whole.iov_len,
                      .ttl_s = 1,
                      .whole = kvfi_stays_whole(call->tenant != NULL, whole.iov_len)};
    KVFI_TRY(transfer(call, call->tier->ops->get, &item, why));
    struct iovec payload = {loaded->mem + KVFI_HEADER_BYTES, (size_t)payload_bytes};
    kvf_block block = {0};
    uint8_t *sum = loaded->mem + whole.iov_len - KVFI_SUM_BYTES;
    *why = call->tenant != NULL ? kvfi_record_open(loaded->mem, sum, addr, &block, &payload, 1, &call->tenant->seal)
                                : kvfi_record_check(loaded->mem, sum, addr, &block, &payload, 1);
    return *why == KVF_WHY_NONE ? KVF_OK : outcome(call->err, KVF_MISS, *why);
}

static void copy_out(const struct iovec *iov, size_t num, const uint8_t *from) {
    for (size_t i = 0; i < num; i++) {
        if (iov[i].iov_len > 0) {
            memcpy(iov[i].iov_base, from, iov[i].iov_len);
            from += iov[i].iov_len;
        }
    }
}

/* Describes a session by its payload, which the session does not keep if the caller wants no arrays, or has memory. */
static kvf_status describe(const kvfi_session_call *call, kvfi_loaded *loaded, const uint8_t *payload,
                           uint64_t payload_bytes) {
    const kvf_session_load_options *want = &call->want;
    bool look = (want->flags & KVF_SESSION_LOOK) != 0, own = !look && want->k_iov == NULL;
    kvfi_session_meta meta;
    const uint8_t *keys = NULL, *values = NULL;
    KVFI_TRY(cut(&meta, &keys, &values, call->err, payload, payload_bytes));
    int64_t left_ms =
        meta.expires_s == 0 ? -1 : kvfi_sat_sub(kvfi_sat_mul(meta.expires_s, 1000), kvfi_sys->wall_us() / 1000);
    if (meta.expires_s != 0 && left_ms <= 0) {
        return kvfi_fail(call->err, KVF_MISS, "no such session (it has expired)");
    }
    KVFI_TRY(kvfi_session_check_memory(call, meta.keys.bytes, meta.values.bytes));
    if (!look && !own) {
        copy_out(want->k_iov, want->num_k_iov, keys);
        copy_out(want->v_iov, want->num_v_iov, values);
    }
    kvfi_loaded_describe(loaded, &meta, own ? keys : NULL, meta.keys.bytes, own ? values : NULL, meta.values.bytes);
    loaded->pub.ttl_ms = look ? left_ms : KVFI_TTL_UNKNOWN;
    return KVF_OK;
}

static kvf_status load_once(const kvfi_session_call *call, kvfi_loaded **out, const kvfi_addr *addr, kvf_reason *why) {
    uint64_t payload_bytes = 0;
    KVFI_TRY(look(call, addr, &payload_bytes));
    kvfi_loaded *loaded = kvfi_loaded_new(KVFI_HEADER_BYTES + (size_t)payload_bytes + KVFI_SUM_BYTES);
    if (loaded == NULL) {
        return kvfi_fail(call->err, KVF_NOMEM, "no memory for a session of %llu bytes",
                         (unsigned long long)payload_bytes);
    }
    kvf_status status = read_value(call, loaded, addr, payload_bytes, why);
    if (status == KVF_OK) {
        status = describe(call, loaded, loaded->mem + KVFI_HEADER_BYTES, payload_bytes);
    }
    if (status != KVF_OK) {
        kvfi_loaded_free(loaded);
        return status;
    }
    if ((call->want.flags & KVF_SESSION_LOOK) != 0 || call->want.k_iov != NULL) {
        kvfi_loaded_drop(loaded);
    }
    *out = loaded;
    return KVF_OK;
}

/* Looks at the meta where it lies. KVF_AGAIN: the tier can't lend the value, so it must be read. */
static kvf_status look_in_place(const kvfi_session_call *call, kvfi_loaded **out, const kvfi_addr *addr) {
    kvfi_header header;
    kvfi_loan loan;
    kvfi_tier *tier = call->tier;
    if (tier->ops->borrow == NULL || call->tenant != NULL ||
        tier->ops->borrow(tier, &loan, addr, 0, call->deadline_us) != KVF_WHY_NONE) {
        return KVF_AGAIN;
    }
    kvf_status status = KVF_AGAIN;
    kvfi_loaded *loaded = NULL;
    if (loan.len >= KVFI_HEADER_BYTES && kvfi_header_decode(&header, loan.data) == KVF_WHY_NONE &&
        memcmp(&header.addr, addr, sizeof *addr) == 0 && kvfi_header_admit(&header, NULL) == KVF_WHY_NONE &&
        header.num_tokens == 0 && kvfi_record_bytes(&header) == loan.len) {
        loaded = kvfi_loaded_new(1);
        status = loaded != NULL ? describe(call, loaded, loan.data + KVFI_HEADER_BYTES, header.payload_bytes)
                                : kvfi_fail(call->err, KVF_NOMEM, "no memory for a session");
    }
    tier->ops->give_back(tier, &loan);
    if (status != KVF_OK) {
        kvfi_loaded_free(loaded);
        return status;
    }
    *out = loaded;
    return KVF_OK;
}

static kvf_status load_at(const kvfi_session_call *call, kvfi_loaded **out, unsigned place) {
    kvfi_addr addr;
    kvf_reason why = KVF_WHY_NONE;
    kvfi_session_addr(&addr, call->id, call->tenant, place);
    kvf_status status = KVF_AGAIN;
    if ((call->want.flags & KVF_SESSION_LOOK) != 0) {
        status = look_in_place(call, out, &addr);
    }
    if (status == KVF_AGAIN) {
        status = load_once(call, out, &addr, &why);
    }
    /* Another writer may have replaced it by one of another length after the lookup. */
    if (status == KVF_MISS && (why == KVF_WHY_TRUNCATED || why == KVF_WHY_CHECKSUM)) {
        status = load_once(call, out, &addr, &why);
    }
    return status;
}

/* Loads the newer of both places, or the other one if the newer can't be used. */
static kvf_status load_newest(const kvfi_session_call *call, kvfi_loaded **out, bool *any) {
    stored is = find_stored(call);
    kvf_status status = load_at(call, out, is.place);
    kvfi_session_call quiet = *call;
    quiet.err = NULL;
    *any = is.num > 0;
    return status == KVF_MISS && *any && load_at(&quiet, out, 1 - is.place) == KVF_OK ? KVF_OK : status;
}

kvf_status kvfi_session_load_value(const kvfi_session_call *call, kvfi_loaded **out) {
    if (call->tenant == NULL) {
        return load_at(call, out, 0);
    }
    bool any = false;
    kvf_status status = load_newest(call, out, &any);
    /* Another writer may have moved it to the other place after the lookup. */
    return status == KVF_MISS && any ? load_newest(call, out, &any) : status;
}

kvf_status kvfi_session_remove_value(const kvfi_session_call *call) {
    kvf_status result = KVF_MISS;
    for (unsigned place = 0; place < num_places(call); place++) {
        kvf_status status = remove_at(call, place);
        bool failed = status != KVF_OK && status != KVF_MISS;
        result = failed || result == KVF_MISS ? status : result;
    }
    return result;
}

bool kvfi_session_value_id(char out[KVF_MAX_ID_BYTES + 1], int64_t *expires_s, const void *payload, size_t len) {
    kvfi_session_meta meta;
    const uint8_t *keys = NULL, *values = NULL;
    if (cut(&meta, &keys, &values, NULL, payload, len) != KVF_OK || meta.id[0] == '\0') {
        return false;
    }
    memcpy(out, meta.id, sizeof meta.id);
    *expires_s = meta.expires_s;
    return true;
}
