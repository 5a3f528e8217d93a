/* SPDX-License-Identifier: Apache-2.0
 *
 * The public calls that look after a store: clear, remove, describe a space, doctor, tier info.
 */
#include "kvferry/admin.h"
#include "kvferry/sized.h"

#include "store/private.h"
#include "tier/value.h"

#define STEP_US 5000000

/* ---- remove ---- */

kvf_status kvf_clear(kvf_store *store, uint64_t *out_removed, kvf_error *err, const kvf_digest *space) {
    *out_removed = 0;
    KVFI_TRY(kvfi_store_check_ours(store, err));
    kvfi_known_clear(&store->known);
    for (size_t i = 0; i < store->num_tiers; i++) {
        uint64_t removed = 0;
        kvf_status status = store->tiers[i]->ops->clear(store->tiers[i], &removed, err, space, STEP_US);
        *out_removed += removed;
        KVFI_TRY(status);
    }
    return KVF_OK;
}

kvf_status kvf_remove(kvf_store *store, kvf_error *err, const kvf_digest *space, const kvf_key *key) {
    kvfi_addr addr = {.key = *key};
    kvf_status result = KVF_MISS;
    addr.space = *space;
    KVFI_TRY(kvfi_store_check_ours(store, err));
    kvfi_known_forget(&store->known, key);
    for (size_t i = 0; i < store->num_tiers; i++) {
        kvf_status status = store->tiers[i]->ops->remove(store->tiers[i], err, &addr, kvfi_deadline(STEP_US));
        if (status == KVF_OK) {
            result = KVF_OK;
        } else if (status != KVF_MISS) {
            return status;
        }
    }
    return result;
}

/* ---- describe ---- */

static kvf_reason check_card(kvfi_item *item) {
    kvf_block block = {0};
    if (item->seal != NULL) {
        return kvfi_record_open(item->iov[0].iov_base, item->iov[2].iov_base, &item->addr, &block, item->iov + 1, 1,
                                item->seal);
    }
    return kvfi_record_check(item->iov[0].iov_base, item->iov[2].iov_base, &item->addr, &block, item->iov + 1, 1);
}

static bool get_card(kvfi_tier *tier, const kvfi_addr *addr, const kvfi_tenant *tenant, char *text, size_t len) {
    kvfi_ends ends;
    struct iovec iov[3] = {{ends.header, sizeof ends.header}, {text, len}, {ends.sum, sizeof ends.sum}};
    kvfi_item item = {.addr = *addr,
                      .iov = iov,
                      .num_iov = 3,
                      .bytes = sizeof ends + len,
                      .status = KVF_AGAIN,
                      .seal = tenant != NULL ? &tenant->seal : NULL,
                      .whole = tenant != NULL};
    kvfi_feed feed = {.items = &item, .num = 1, .limit = 1, .deadline_us = kvfi_deadline(STEP_US), .check = check_card};
    tier->ops->get(tier, &feed);
    /* Anybody who can write to the store can write a plain card. One that hashes to its space is genuine. */
    return item.status == KVF_OK && kvfi_card_fits(text, len, &addr->space, tenant != NULL ? &tenant->secret : NULL);
}

/* KVF_WHY_NONE; KVF_WHY_VERSION: sealed under a secret that the store was not given; otherwise it is not there. */
static kvf_reason read_card(const kvf_store *store, kvfi_tier *tier, char **out, const kvfi_addr *addr) {
    kvfi_peek peek;
    kvfi_header header;
    const kvfi_tenant *tenant = NULL;
    kvfi_tier_look(tier, addr, 1, &peek, kvfi_deadline(STEP_US));
    if (peek.why != KVF_WHY_NONE || kvfi_header_decode(&header, peek.header) != KVF_WHY_NONE) {
        return KVF_WHY_ABSENT;
    }
    if (header.codec == KVFI_CODEC_SEALED && (tenant = kvfi_secrets_admit(&store->secrets, &header)) == NULL) {
        return KVF_WHY_VERSION;
    }
    if (header.payload_bytes > (1u << 20) || header.num_tokens != 0) {
        return KVF_WHY_ABSENT;
    }
    size_t len = (size_t)header.payload_bytes;
    char *text = kvfi_alloc_zero(1, len + 1);
    if (text == NULL || !get_card(tier, addr, tenant, text, len)) {
        kvfi_free(text);
        return KVF_WHY_ABSENT;
    }
    *out = text;
    return KVF_WHY_NONE;
}

kvf_status kvf_space_describe(kvf_store *store, char **out, kvf_error *err, const kvf_digest *space) {
    kvfi_addr addr;
    addr.space = *space;
    kvfi_card_key(&addr.key, space);
    KVFI_TRY(kvfi_store_check_ours(store, err));
    bool sealed = false;
    for (size_t i = 0; i < store->num_tiers; i++) {
        kvf_reason why = read_card(store, store->tiers[i], out, &addr);
        if (why == KVF_WHY_NONE) {
            return KVF_OK;
        }
        sealed = sealed || why == KVF_WHY_VERSION;
    }
    if (sealed) {
        return kvfi_fail(err, KVF_REFUSED, "the card of this space is sealed: the store was not given its secret");
    }
    return kvfi_fail(err, KVF_MISS, "no card of this space is stored: its fields are not known");
}

void kvf_free(void *memory) {
    kvfi_free(memory);
}

/* ---- doctor and info ---- */

typedef struct examination {
    kvf_finding_fn found;
    void *ctx;
    uint32_t tier;
} examination;

static void with_tier(void *ctx, const kvf_finding *finding) {
    const examination *exam = ctx;
    kvf_finding own = *finding;
    own.tier = exam->tier;
    exam->found(exam->ctx, &own);
}

kvf_status kvf_doctor(kvf_store *store, kvf_error *err, kvf_finding_fn found, void *ctx) {
    examination exam = {.found = found, .ctx = ctx};
    KVFI_TRY(kvfi_store_check_ours(store, err));
    for (; exam.tier < store->num_tiers; exam.tier++) {
        store->tiers[exam.tier]->ops->doctor(store->tiers[exam.tier], with_tier, &exam);
    }
    return KVF_OK;
}

KVF_SIZED(kvf_tier_info, num_refusing, 304, num_refusing);

kvf_status kvf_tier_info_get(kvf_store *store, kvf_tier_info *out, uint32_t tier) {
    if (!kvfi_store_is_ours(store)) {
        return KVF_CLOSED;
    }
    if (tier >= store->num_tiers) {
        return KVF_LIMIT;
    }
    kvf_tier_info info = {.num_records = -1, .used_bytes = -1, .max_bytes = -1};
    memcpy(info.url, store->tiers[tier]->url->text, sizeof info.url);
    store->tiers[tier]->ops->info(store->tiers[tier], &info);
    return kvf_sized_give(out, &info, &kvf_tier_info_sized);
}
