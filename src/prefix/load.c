/* SPDX-License-Identifier: Apache-2.0
 *
 * Loads and borrows blocks: checks each record that arrives, and removes damaged ones.
 */
#include "base/interrupt.h"
#include "kvferry/sized.h"
#include "prefix/prefix.h"

#define REMOVE_BUDGET_US 200000

static kvf_reason check_record(const kvfi_item *item) {
    uint32_t last = item->num_iov - 1;
    kvf_block block = kvfi_block_of(item);
    if (item->seal != NULL) {
        return kvfi_record_open(item->iov[0].iov_base, item->iov[last].iov_base, &item->addr, &block, item->iov + 1,
                                last - 1, item->seal);
    }
    return kvfi_record_check(item->iov[0].iov_base, item->iov[last].iov_base, &item->addr, &block, item->iov + 1,
                             last - 1);
}

static kvf_reason check(kvfi_item *item) {
    kvf_reason why = check_record(item);
    if (why == KVF_WHY_CHECKSUM) {
        kvfi_store_doubt(item->cover, &item->addr.key);
    }
    return why;
}

/* The reason of the first gap, if no tier gave one. */
static kvf_reason reason_of(const kvfi_feed *feed, const kvfi_item *item) {
    if (item->status != KVF_AGAIN) {
        return item->why;
    }
    if (feed->cancelled != NULL && atomic_load(feed->cancelled)) {
        return KVF_WHY_CLOSED;
    }
    return KVF_WHY_BUDGET;
}

/* Writes status and reason of each block. Nothing after the first gap is used. Returns the leading run. */
static size_t publish(kvfi_blocks *batch) {
    kvf_store *store = batch->space->store;
    size_t run = batch->num;
    uint64_t bytes = 0;
    kvfi_store_count_loads(store, batch->num); /* counted before their outcomes, which never exceed it */
    for (size_t i = 0; i < batch->num; i++) {
        const kvfi_item *item = &batch->feed.items[i];
        kvf_block *block = &batch->blocks[i];
        bool hit = item->status == KVF_OK;
        if (!hit && run == batch->num) {
            run = i;
            block->why = reason_of(&batch->feed, item);
        } else {
            block->why = i > run ? KVF_WHY_AFTER_GAP : KVF_WHY_NONE;
        }
        block->status = hit && i < run ? KVF_OK : KVF_MISS;
        if (block->status != KVF_OK) {
            kvfi_store_note_miss(store, &item->addr, block->why, batch->feed.deadline_us);
        } else {
            bytes += item->bytes;
        }
    }
    kvfi_store_count_load_hits(store, run, bytes);
    return run;
}

/* The same for blocks that are independent. With a watch, a block that was not begun may not be wanted any more: it is
 * not counted as a miss. Returns how many blocks are loaded. */
static size_t publish_each(kvfi_blocks *batch) {
    kvf_store *store = batch->space->store;
    size_t here = 0;
    uint64_t bytes = 0;
    for (size_t i = 0; i < batch->num; i++) {
        const kvfi_item *item = &batch->feed.items[i];
        kvf_block *block = &batch->blocks[i];
        bool hit = item->status == KVF_OK;
        bool counts = item->status != KVF_AGAIN || batch->feed.watch == NULL;
        block->status = hit ? KVF_OK : KVF_MISS;
        block->why = hit ? KVF_WHY_NONE : reason_of(&batch->feed, item);
        if (counts) {
            kvfi_store_count_loads(store, 1);
        }
        if (hit) {
            here++;
            bytes += item->bytes;
        } else if (counts) {
            kvfi_store_note_miss(store, &item->addr, block->why, batch->feed.deadline_us);
        }
    }
    kvfi_store_count_load_hits(store, here, bytes);
    return here;
}

/* ---- under the previous secret: what is missing under that of today may still lie where that one put it ---- */

/* The items that are still missing, at their previous addresses. What became of them at today's says nothing of these:
 * they have not been tried. */
static size_t select_missing(const kvfi_blocks *batch, kvfi_item *out) {
    const kvfi_identity *previous = &batch->space->previous;
    size_t missing = 0;
    for (size_t i = 0; i < batch->num; i++) {
        if (batch->feed.items[i].status != KVF_OK) {
            out[missing] = batch->feed.items[i];
            out[missing].seal = kvfi_seal_of(previous);
            out[missing].whole = kvfi_seal_of(previous) != NULL;
            out[missing].status = KVF_AGAIN;
            out[missing].why = KVF_WHY_NONE;
            kvfi_address(&out[missing].addr, previous, &batch->blocks[i].key);
            missing++;
        }
    }
    return missing;
}

/* A hit is stored again under the current secret. */
static void take_over(kvfi_blocks *batch, const kvfi_item *got) {
    kvf_store *store = batch->space->store;
    kvfi_item *item = &batch->feed.items[got->number];
    if (got->status == KVF_OK) {
        item->status = KVF_OK;
        item->why = KVF_WHY_NONE;
        kvfi_store_count_saves(store, 1);
        if (!kvfi_store_copy(store, got, &item->addr, item->seal, kvfi_store_all_tiers(store), KVFI_ROLE_SAVE)) {
            kvfi_store_count_unsaved(store, KVF_WHY_FULL);
        }
        kvfi_space_card(batch->space);
    } else if (got->status != KVF_AGAIN && got->why == KVF_WHY_CHECKSUM) {
        kvfi_store_remove_damaged(store, &got->addr, batch->feed.deadline_us);
    }
}

static void load_previous(kvfi_blocks *batch, uint8_t **heads) {
    kvfi_item *items = kvfi_alloc_zero(batch->num + 1, sizeof *items);
    if (items == NULL) {
        return;
    }
    kvfi_feed feed = batch->feed;
    feed.items = items;
    feed.num = select_missing(batch, items);
    feed.once_more = false;
    feed.stays = true;
    if (feed.num > 0) {
        kvfi_get_untold(batch->space, &feed, heads);
    }
    for (size_t i = 0; i < feed.num; i++) {
        take_over(batch, &items[i]);
    }
    kvfi_free(items);
}

/* None of them is loaded: the first for that reason, and later ones because the first breaks a rule. */
static void refuse(kvf_space *space, kvf_block *blocks, size_t num, kvf_reason why) {
    kvfi_store_count_loads(space->store, num);
    for (size_t i = 0; i < num; i++) {
        bool behind = why == KVF_WHY_MISUSE && i > 0;
        blocks[i].status = why == KVF_WHY_MISUSE && !behind ? KVF_LIMIT : KVF_MISS;
        blocks[i].why = behind ? KVF_WHY_AFTER_GAP : why;
        kvfi_store_count_miss(space->store, blocks[i].why);
    }
}

static size_t load_sound(kvf_space *space, kvf_block *blocks, size_t num, kvf_view *view, uint32_t flags,
                         int64_t deadline_us, int64_t patience_us, const atomic_bool *cancelled, kvfi_watch *watch) {
    kvfi_blocks batch;
    uint8_t *heads = NULL, *previous_heads = NULL;
    uint32_t untold = atomic_load_explicit(&space->seen_tokens, memory_order_relaxed);
    bool each = watch != NULL || (flags & KVF_EACH) != 0;
    if (kvfi_blocks_init(&batch, space, blocks, num, view, untold, deadline_us, patience_us, cancelled) != KVF_OK) {
        refuse(space, blocks, num, KVF_WHY_NOMEM);
        return 0;
    }
    batch.feed.prefix = !each && !space->rotates;
    batch.feed.once_more = space->rotates;
    batch.feed.watch = watch;
    batch.feed.check = check;
    for (size_t i = 0; i < num; i++) {
        batch.feed.items[i].cover = space->store;
    }
    kvfi_get_untold(space, &batch.feed, &heads);
    if (space->rotates) {
        load_previous(&batch, &previous_heads);
    }
    size_t run = each ? publish_each(&batch) : publish(&batch);
    kvfi_blocks_cleanup(&batch);
    kvfi_free(heads);
    kvfi_free(previous_heads);
    return run;
}

/* The result of each, for callers that watch them arrive. */
static void show_each(const kvf_block *blocks, size_t num, const kvfi_watch *watch) {
    for (size_t i = 0; i < num; i++) {
        bool hit = blocks[i].status == KVF_OK;
        __atomic_store_n(&watch->each[i], (uint8_t)(hit ? KVFI_ITEM_HERE : KVFI_ITEM_MISSED + blocks[i].why),
                         __ATOMIC_RELEASE);
    }
}

size_t kvfi_load(kvf_space *space, kvf_block *blocks, size_t num, kvf_view *view, uint32_t flags, int64_t deadline_us,
                 int64_t patience_us, const atomic_bool *cancelled, kvfi_watch *watch) {
    size_t sound = 0, loaded = 0;
    if (!kvfi_store_is_ours(space->store) || !kvfi_view_is_ours(view)) {
        refuse(space, blocks, num, KVF_WHY_CLOSED);
    } else {
        sound = kvfi_num_sound(space, blocks, num, view);
        loaded = load_sound(space, blocks, sound, view, flags, deadline_us, patience_us, cancelled, watch);
        refuse(space, blocks + sound, num - sound, KVF_WHY_MISUSE);
    }
    if (watch != NULL) {
        show_each(blocks, num, watch);
    }
    return loaded;
}

KVF_SIZED(kvf_load_options, patience_us, 24, patience_us);

static kvf_status take_options(kvf_load_options *out, const kvf_load_options *options) {
    KVFI_TRY(kvf_sized_take(out, NULL, options, &kvf_load_options_sized));
    KVFI_TRY(kvfi_take_budget(&out->budget_us, NULL, KVFI_BLOCKS_US, true));
    KVFI_TRY(kvfi_take_budget(&out->patience_us, NULL, 0, false));
    return (out->flags & ~(uint32_t)KVF_EACH) == 0 ? KVF_OK : KVF_LIMIT;
}

size_t kvf_load_with(kvf_space *space, kvf_block *blocks, size_t num, kvf_view *view, const kvf_load_options *options) {
    kvf_load_options own;
    if (take_options(&own, options) != KVF_OK) {
        refuse(space, blocks, num, KVF_WHY_MISUSE);
        return 0;
    }
    return kvfi_load(space, blocks, num, view, own.flags, kvfi_budget_deadline(own.budget_us), own.patience_us,
                     kvfi_interrupt_flag(), NULL);
}

size_t kvf_load(kvf_space *space, kvf_block *blocks, size_t num, kvf_view *view, int64_t budget_us) {
    const kvf_load_options options = {.struct_size = sizeof options, .budget_us = budget_us};
    return kvf_load_with(space, blocks, num, view, &options);
}

/* ---- borrow ---- */

typedef struct loan {
    kvfi_tier *tier;
    kvfi_loan loan;
    size_t head; /* header and tokens */
} loan;

/* How many tokens a lent record says it has, for a caller that has none. */
static uint32_t tokens_in(const kvfi_loan *lent) {
    kvfi_header header;
    bool sound = lent->len >= KVFI_HEADER_BYTES && kvfi_header_decode(&header, lent->data) == KVF_WHY_NONE;
    return sound ? header.num_tokens : 0;
}

/* Whether the borrowed record is the requested block. A block with tokens says where the payload begins; of one
 * without, the record does, and the check proves it. */
static kvf_reason check_loan(loan *lent, const kvfi_addr *addr, const kvf_block *block) {
    const uint8_t *data = lent->loan.data;
    size_t len = lent->loan.len;
    kvf_block wanted = *block;
    if (block->num_tokens == 0) {
        wanted.tokens = NULL;
        wanted.num_tokens = tokens_in(&lent->loan);
    }
    lent->head = KVFI_HEAD_BYTES(wanted.num_tokens);
    if (len < lent->head + KVFI_SUM_BYTES) {
        return KVF_WHY_TRUNCATED;
    }
    struct iovec payload = {(void *)(uintptr_t)(data + lent->head), len - lent->head - KVFI_SUM_BYTES};
    if (block->iov != NULL && payload.iov_len != kvfi_iov_bytes(block->iov, block->num_iov)) {
        return KVF_WHY_TRUNCATED;
    }
    return kvfi_record_check(data, data + len - KVFI_SUM_BYTES, addr, &wanted, &payload, 1);
}

/* The required length of the whole record; 0: not known. */
static size_t expected_bytes(const kvf_block *block) {
    return block->iov == NULL || block->num_tokens == 0
               ? 0
               : KVFI_HEAD_BYTES(block->num_tokens) + kvfi_iov_bytes(block->iov, block->num_iov) + KVFI_SUM_BYTES;
}

static kvf_reason borrow_from(kvf_space *space, size_t tier, loan *out, const kvfi_addr *addr, const kvf_block *block) {
    size_t bytes = expected_bytes(block);
    out->tier = kvfi_store_tier(space->store, tier);
    if (out->tier->ops->borrow == NULL) {
        return KVF_WHY_ABSENT;
    }
    kvf_reason why = out->tier->ops->borrow(out->tier, &out->loan, addr, bytes, kvfi_deadline(KVFI_BLOCKS_US));
    if (why != KVF_WHY_NONE) {
        return why;
    }
    why = check_loan(out, addr, block);
    if (why == KVF_WHY_CHECKSUM) {
        kvfi_store_doubt(space->store, &addr->key);
    }
    if (why != KVF_WHY_NONE) {
        out->tier->ops->give_back(out->tier, &out->loan);
        return why;
    }
    struct iovec iov[2] = {{(void *)(uintptr_t)out->loan.data, out->head},
                           {(void *)(uintptr_t)(out->loan.data + out->head), out->loan.len - out->head}};
    kvfi_item item = {.addr = *addr, .iov = iov, .num_iov = 2, .bytes = out->loan.len};
    kvfi_store_note_got(space->store, &item, tier);
    return KVF_WHY_NONE;
}

static kvf_reason borrow_from_any(kvf_space *space, loan *out, const kvfi_addr *addr, const kvf_block *block) {
    kvf_reason first = KVF_WHY_ABSENT;
    for (size_t tier = 0; tier < kvfi_store_num_tiers(space->store); tier++) {
        kvf_reason why = borrow_from(space, tier, out, addr, block);
        if (why == KVF_WHY_NONE) {
            return why;
        }
        if (why != KVF_WHY_ABSENT && first == KVF_WHY_ABSENT) {
            first = why;
        }
    }
    return first;
}

/* An absent block is not counted: no tier can lend it, but a load may still find it. */
static kvf_status borrow_miss(kvf_space *space, const kvfi_addr *addr, kvf_block *block, kvf_reason why) {
    if (why != KVF_WHY_ABSENT) {
        kvfi_store_count_loads(space->store, 1);
        kvfi_store_note_miss(space->store, addr, why, kvfi_deadline(REMOVE_BUDGET_US));
    }
    block->status = KVF_MISS;
    block->why = why;
    return KVF_MISS;
}

kvf_status kvf_borrow(kvf_space *space, kvf_borrowed *out, kvf_block *block) {
    kvf_store *store = space->store;
    kvfi_addr addr;
    kvfi_address(&addr, &space->identity, &block->key);
    if (!kvfi_store_is_ours(store)) {
        refuse(space, block, 1, KVF_WHY_CLOSED);
        return KVF_MISS;
    }
    if (!kvfi_has_sound_tokens(space, block) || (block->iov != NULL && !kvfi_has_sound_iov(block))) {
        refuse(space, block, 1, KVF_WHY_MISUSE);
        return KVF_LIMIT;
    }
    if (kvfi_seal_of(&space->identity) != NULL) {
        return borrow_miss(space, &addr, block, KVF_WHY_ABSENT); /* a sealed record can't be used in place */
    }
    loan *lent = kvfi_alloc(sizeof *lent);
    if (lent == NULL) {
        return borrow_miss(space, &addr, block, KVF_WHY_NOMEM);
    }
    kvf_reason why = borrow_from_any(space, lent, &addr, block);
    if (why != KVF_WHY_NONE) {
        kvfi_free(lent);
        return borrow_miss(space, &addr, block, why);
    }
    *out = (kvf_borrowed){
        .data = lent->loan.data + lent->head, .len = lent->loan.len - lent->head - KVFI_SUM_BYTES, .opaque = lent};
    kvfi_store_count_loads(store, 1);
    kvfi_store_count_load_hits(store, 1, lent->loan.len);
    block->status = KVF_OK;
    block->why = KVF_WHY_NONE;
    return KVF_OK;
}

void kvf_release(kvf_space *space, kvf_borrowed *borrowed) {
    loan *lent = borrowed->opaque;
    if (lent != NULL && kvfi_store_is_ours(space->store)) {
        lent->tier->ops->give_back(lent->tier, &lent->loan);
        kvfi_free(lent);
        borrowed->opaque = NULL;
    }
}
