/* SPDX-License-Identifier: Apache-2.0
 *
 * Loads records with tokens for callers that have none.
 *
 * The length of such a record follows from its number of tokens. The number that most records had last time is tried
 * first. It is nearly always right, and then a load costs no more than any other. Otherwise the headers tell the number
 * of tokens, and those items are requested again.
 */
#include "prefix/prefix.h"

typedef struct lookup {
    kvfi_addr *addrs;
    kvfi_peek *peeks;
    kvfi_item **items;    /* each looked up */
    uint32_t *num_tokens; /* in its record; KVFI_MAX_TOKENS + 1: unknown, or of no use */
    size_t num;
} lookup;

#define UNKNOWN (KVFI_MAX_TOKENS + 1)

static bool is_untold(const kvfi_item *item) {
    const kvf_block *block = item->user;
    return block->num_tokens == 0;
}

static bool any_untold(const kvfi_feed *feed) {
    for (size_t i = 0; i < feed->num; i++) {
        if (is_untold(&feed->items[i])) {
            return true;
        }
    }
    return false;
}

/* A value of another length was there. */
static bool is_misfit(const kvfi_item *item) {
    return is_untold(item) && item->status == KVF_MISS && item->why == KVF_WHY_TRUNCATED;
}

/* How many of the items are still of use: of a prefix those up to the first that is missed for another reason. Returns
 * 0 if none is a misfit. */
static size_t num_useful(const kvfi_feed *feed) {
    size_t useful = 0;
    bool any = false;
    for (; useful < feed->num; useful++) {
        const kvfi_item *item = &feed->items[useful];
        any = any || is_misfit(item);
        if (feed->prefix && item->status == KVF_MISS && !is_misfit(item)) {
            break;
        }
    }
    return any ? useful : 0;
}

static bool make_room(lookup *out, const kvfi_feed *feed, size_t num) {
    size_t each = sizeof *out->addrs + sizeof *out->peeks + sizeof *out->items + sizeof *out->num_tokens;
    uint8_t *memory = kvfi_alloc_zero(num, each);
    if (memory == NULL) {
        return false;
    }
    *out = (lookup){.items = (kvfi_item **)(void *)memory};
    out->num_tokens = (uint32_t *)(void *)(out->items + num);
    out->peeks = (kvfi_peek *)(void *)(out->num_tokens + num);
    out->addrs = (kvfi_addr *)(void *)(out->peeks + num);
    for (size_t i = 0; i < num; i++) {
        kvfi_item *item = &feed->items[i];
        if (is_misfit(item) || (is_untold(item) && item->status == KVF_AGAIN)) {
            out->num_tokens[out->num] = UNKNOWN;
            out->items[out->num++] = item;
        }
    }
    return true;
}

static size_t payload_of(const kvfi_item *item) {
    return item->bytes - item->iov[0].iov_len - KVFI_SUM_BYTES;
}

/* The number of tokens that a header says there are, if the record has a payload of the requested length. */
static uint32_t tokens_in(const kvfi_peek *peek, const kvfi_item *item, uint32_t most) {
    kvfi_header header;
    bool fits = peek->why == KVF_WHY_NONE && kvfi_header_decode(&header, peek->header) == KVF_WHY_NONE &&
                memcmp(&header.addr, &item->addr, sizeof item->addr) == 0 &&
                kvfi_header_admit(&header, item->seal) == KVF_WHY_NONE && header.num_tokens <= most &&
                header.payload_bytes == payload_of(item);
    return fits ? header.num_tokens : UNKNOWN;
}

/* The fastest tier with a record of use says it. */
static void ask_tiers(lookup *at, kvf_space *space, const kvfi_feed *feed) {
    kvf_store *store = space->store;
    size_t tiers = kvfi_store_num_tiers(store);
    for (size_t i = 0; i < at->num; i++) {
        at->addrs[i] = at->items[i]->addr;
    }
    for (size_t tier = 0; tier < tiers; tier++) {
        kvfi_store_peek(store, tier, at->addrs, at->num, at->peeks, feed->deadline_us, feed->patience_us);
        for (size_t i = 0; i < at->num; i++) {
            if (at->num_tokens[i] == UNKNOWN) {
                at->num_tokens[i] = tokens_in(&at->peeks[i], at->items[i], space->identity.block_tokens);
            }
        }
    }
}

/* Replaces the heads of the items by ones that fit. NULL without memory. */
static uint8_t *fit_heads(const lookup *at) {
    size_t bytes = 1;
    for (size_t i = 0; i < at->num; i++) {
        bytes += at->num_tokens[i] != UNKNOWN ? KVFI_HEAD_BYTES(at->num_tokens[i]) : 0;
    }
    uint8_t *heads = kvfi_alloc(bytes), *head = heads;
    for (size_t i = 0; i < at->num && heads != NULL; i++) {
        kvfi_item *item = at->items[i];
        if (at->num_tokens[i] != UNKNOWN) {
            size_t len = KVFI_HEAD_BYTES(at->num_tokens[i]);
            item->bytes += len - item->iov[0].iov_len;
            item->iov[0] = (struct iovec){head, len};
            item->status = KVF_AGAIN;
            head += len;
        }
    }
    return heads;
}

/* Requests the first `num` items again, as far as they are missing and may be there. */
static void get_again(kvf_store *store, kvfi_feed *all, size_t num) {
    kvfi_item *items = kvfi_alloc_zero(num, sizeof *items + sizeof(size_t));
    if (items == NULL) {
        return;
    }
    size_t *from = (size_t *)(void *)(items + num);
    kvfi_feed feed = *all;
    feed.items = items;
    feed.num = 0;
    for (size_t i = 0; i < num; i++) {
        if (all->items[i].status == KVF_AGAIN) {
            from[feed.num] = i;
            items[feed.num++] = all->items[i];
        }
    }
    if (feed.num > 0) {
        kvfi_store_get(store, &feed);
    }
    for (size_t i = 0; i < feed.num; i++) {
        all->items[from[i]].status = items[i].status;
        all->items[from[i]].why = items[i].why;
    }
    kvfi_free(items);
}

/* Of the first `num` items: those that are loaded, and those whose heads fit now. */
static void note_tokens(kvf_space *space, const kvfi_feed *feed, size_t num) {
    kvfi_vote vote = {0};
    for (size_t i = 0; i < num; i++) {
        const kvfi_item *item = &feed->items[i];
        if (is_untold(item) && item->status != KVF_MISS) {
            kvfi_vote_for(&vote, kvfi_block_of(item).num_tokens);
        }
    }
    kvfi_vote_count(&vote, space);
}

static bool fit(kvf_space *space, kvfi_feed *feed, size_t num, uint8_t **heads) {
    lookup at;
    if (!make_room(&at, feed, num)) {
        return false;
    }
    ask_tiers(&at, space, feed);
    *heads = fit_heads(&at);
    kvfi_free(at.items);
    if (*heads != NULL) {
        note_tokens(space, feed, num);
    }
    return *heads != NULL;
}

void kvfi_get_untold(kvf_space *space, kvfi_feed *feed, uint8_t **heads) {
    bool once_more = feed->once_more, untold = any_untold(feed);
    feed->once_more = once_more || untold;
    kvfi_store_get(space->store, feed);
    feed->once_more = once_more;
    size_t useful = untold ? num_useful(feed) : 0;
    if (useful > 0 && fit(space, feed, useful, heads)) {
        get_again(space->store, feed, useful);
    }
}
