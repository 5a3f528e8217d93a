/* SPDX-License-Identifier: Apache-2.0
 *
 * Saves blocks: stages them in the backlog, builds and seals their records.
 */
#include "kvferry/sized.h"
#include "prefix/prefix.h"

static bool is_known(kvf_space *space, const kvf_key *key) {
    kvfi_addr addr;
    kvfi_address(&addr, &space->identity, key);
    return kvfi_store_knows(space->store, &addr.key);
}

int kvf_knows(kvf_space *space, const kvf_key *key) {
    return kvfi_store_is_ours(space->store) && is_known(space, key);
}

void kvf_forget(kvf_space *space, const kvf_key *keys, size_t num) {
    for (size_t i = 0; i < num && kvfi_store_is_ours(space->store); i++) {
        kvfi_addr addr;
        kvfi_address(&addr, &space->identity, &keys[i]);
        kvfi_store_forget(space->store, &addr.key);
    }
}

/* ---- staged ---- */

kvf_status kvf_reserve(kvf_space *space, kvf_reserved *out, size_t payload_bytes) {
    kvfi_staged *staged = NULL;
    if (!kvfi_store_is_ours(space->store)) {
        return KVF_CLOSED;
    }
    if (payload_bytes > KVF_MAX_PAYLOAD_BYTES) {
        return KVF_LIMIT;
    }
    KVFI_TRY(
        kvfi_backlog_reserve(kvfi_store_backlog(space->store), &staged, payload_bytes, space->identity.block_tokens));
    *out = (kvf_reserved){.data = kvfi_staged_payload(staged), .len = payload_bytes, .opaque = staged};
    return KVF_OK;
}

static void give_back(kvf_store *store, kvf_reserved *reserved) {
    kvfi_backlog_abandon(kvfi_store_backlog(store), reserved->opaque);
    reserved->opaque = NULL;
}

void kvf_abandon(kvf_space *space, kvf_reserved *reserved) {
    if (reserved->opaque != NULL && kvfi_store_is_ours(space->store)) {
        give_back(space->store, reserved);
    }
}

/* All that the block and its space say of a value, but the payload. */
static void describe(kvfi_staged *staged, kvf_space *space, const kvf_block *block, uint64_t chain_bytes) {
    kvfi_address(&staged->addr, &space->identity, &block->key);
    staged->first_token = block->first_token;
    staged->num_tokens = block->num_tokens;
    staged->chain_bytes = chain_bytes;
    staged->rewrite = kvfi_store_doubts(space->store, &staged->addr.key);
    staged->tiers = kvfi_store_all_tiers(space->store);
    if (block->num_tokens > 0) {
        memcpy(kvfi_staged_head(staged) + KVFI_HEADER_BYTES, block->tokens, 4 * (size_t)block->num_tokens);
    }
}

/* Queues the value, which is the backlog's in any case. False: no random bytes to seal it with. */
static bool hand_over(kvf_space *space, kvfi_staged *staged) {
    if (!kvfi_staged_seal(staged, kvfi_seal_of(&space->identity))) {
        kvfi_backlog_abandon(kvfi_store_backlog(space->store), staged);
        return false;
    }
    kvfi_space_card(space);
    kvfi_backlog_commit(kvfi_store_backlog(space->store), staged);
    return true;
}

/* Counts a save that failed before it was queued. */
static kvf_reason count_failure(kvf_store *store, kvf_reason why) {
    kvfi_store_count_unsaved(store, why);
    return why;
}

kvf_status kvf_commit(kvf_space *space, kvf_reserved *reserved, const kvf_block *block, size_t used_bytes) {
    kvf_store *store = space->store;
    if (!kvfi_store_is_ours(store)) {
        return KVF_CLOSED;
    }
    if (reserved->opaque == NULL) {
        return KVF_LIMIT;
    }
    kvfi_store_count_saves(store, 1);
    if (!kvfi_has_sound_tokens(space, block) || !kvf_reserved_is_zero(reserved->reserved) ||
        used_bytes > reserved->len) {
        count_failure(store, KVF_WHY_MISUSE);
        give_back(store, reserved);
        return KVF_LIMIT;
    }
    kvfi_staged *staged = reserved->opaque;
    reserved->opaque = NULL;
    staged->payload_bytes = used_bytes;
    describe(staged, space, block, reserved->chain_bytes);
    if (!hand_over(space, staged)) {
        count_failure(store, KVF_WHY_NOMEM);
        return KVF_NOMEM;
    }
    return KVF_OK;
}

/* The payload is read once: what is not to be sealed is hashed while it is copied, and is a whole record then. */
static void copy_in(kvfi_staged *staged, const kvf_block *block, const struct iovec *iov, size_t num, bool seals) {
    uint8_t *head = kvfi_staged_head(staged), *to = kvfi_staged_payload(staged);
    kvfi_xxh3 sum;
    if (!seals) {
        kvfi_record_begin(head, &staged->addr, block, staged->payload_bytes, 0, kvfi_sys->wall_us() / 1000000);
        kvfi_record_sum_init(&sum, head);
        kvfi_xxh3_add(&sum, head + KVFI_HEADER_BYTES, 4 * (size_t)staged->num_tokens);
    }
    for (size_t i = 0; i < num; i++) {
        kvfi_xxh3_copy(seals ? NULL : &sum, to, iov[i].iov_base, iov[i].iov_len);
        to += iov[i].iov_len;
    }
    if (!seals) {
        kvfi_xxh3_end(&sum, to);
        staged->sealed = true;
    }
}

static kvf_reason reason_of(kvf_status status) {
    switch (status) {
    case KVF_OK:
        return KVF_WHY_NONE;
    case KVF_AGAIN:
        return KVF_WHY_FULL;
    case KVF_CLOSED:
        return KVF_WHY_CLOSED;
    default:
        return KVF_WHY_NOMEM;
    }
}

/* The payload of the block, piece by piece. `runs` has room for one slot of the view. */
static kvf_reason stage(kvf_space *space, const kvf_block *block, const kvf_view *view, struct iovec *runs) {
    const struct iovec *iov = block->iov;
    size_t num = block->num_iov;
    if (iov == NULL) {
        kvfi_view_runs(view, block->slot, runs);
        iov = runs;
        num = kvfi_view_num_runs(view);
    }
    size_t bytes = kvfi_iov_bytes(iov, num);
    kvfi_staged *staged = NULL;
    kvf_status status = kvfi_backlog_reserve(kvfi_store_backlog(space->store), &staged, bytes, block->num_tokens);
    if (status != KVF_OK) {
        return reason_of(status);
    }
    describe(staged, space, block, kvfi_chain_bytes(block, bytes));
    copy_in(staged, block, iov, num, kvfi_seal_of(&space->identity) != NULL);
    return hand_over(space, staged) ? KVF_WHY_NONE : KVF_WHY_NOMEM;
}

static kvf_reason save_one(kvf_space *space, const kvf_block *block, const kvf_view *view, struct iovec *runs) {
    if (!kvfi_is_sound(space, block, view)) {
        return KVF_WHY_MISUSE;
    }
    if (is_known(space, &block->key)) {
        kvfi_store_count_known(space->store, 1);
        return KVF_WHY_NONE;
    }
    return stage(space, block, view, runs);
}

static kvf_status status_of(kvf_reason why) {
    switch (why) {
    case KVF_WHY_NONE:
        return KVF_OK;
    case KVF_WHY_FULL:
    case KVF_WHY_AFTER_GAP:
        return KVF_AGAIN;
    case KVF_WHY_MISUSE:
        return KVF_LIMIT;
    default:
        return KVF_MISS;
    }
}

/* Accepts none of them, the first for that reason. A prefix is of no use after a hole, so the rest is shed. */
static void refuse(kvf_space *space, kvf_block *blocks, size_t num, kvf_reason why) {
    for (size_t i = 0; i < num; i++) {
        blocks[i].why = count_failure(space->store, i == 0 || why == KVF_WHY_CLOSED ? why : KVF_WHY_AFTER_GAP);
        blocks[i].status = status_of(blocks[i].why);
    }
}

/* Returns how many were accepted; *why is the reason of the next. */
static size_t take(kvf_space *space, kvf_block *blocks, size_t num, kvf_view *view, kvf_reason *why) {
    struct iovec *runs = NULL;
    size_t taken = 0;
    *why = KVF_WHY_NONE;
    if (view != NULL && (runs = kvfi_alloc_zero(kvfi_view_num_runs(view), sizeof *runs)) == NULL) {
        *why = KVF_WHY_NOMEM;
    }
    while (taken < num && *why == KVF_WHY_NONE) {
        *why = save_one(space, &blocks[taken], view, runs);
        if (*why == KVF_WHY_NONE) {
            blocks[taken].status = KVF_OK;
            blocks[taken++].why = KVF_WHY_NONE;
        }
    }
    kvfi_free(runs);
    return taken;
}

size_t kvf_save(kvf_space *space, kvf_block *blocks, size_t num, kvf_view *view) {
    kvf_reason why = KVF_WHY_NONE;
    size_t taken = 0;
    kvfi_store_count_saves(space->store, num); /* counted before their outcomes, which never exceed it */
    if (!kvfi_store_is_ours(space->store) || !kvfi_view_is_ours(view)) {
        why = KVF_WHY_CLOSED;
    } else if (num > KVF_MAX_BLOCKS) {
        why = KVF_WHY_MISUSE;
    } else {
        taken = take(space, blocks, num, view, &why);
    }
    refuse(space, blocks + taken, num - taken, why);
    return taken;
}

/* ---- straight from the caller's memory ---- */

static kvf_reason prepare(kvfi_item *item) {
    size_t payload_bytes = item->bytes - item->iov[0].iov_len - KVFI_SUM_BYTES;
    kvfi_record_begin(item->iov[0].iov_base, &item->addr, item->user, payload_bytes, 0, kvfi_sys->wall_us() / 1000000);
    return KVF_WHY_NONE;
}

/* A sealed record is built in a buffer of the backlog, since the caller's memory must not change. It lasts for one tier,
 * because each has its own salt; the buffer lasts for all of them. */
typedef struct cover {
    kvf_store *store;
    kvfi_staged *room;   /* reserved, and empty; NULL: none */
    kvfi_staged *staged; /* NULL: none now */
    struct iovec whole;  /* the record in it */
    bool may_lend;       /* of the item without the buffer */
} cover;

static size_t payload_of(const kvfi_item *item) {
    return item->bytes - item->iov[0].iov_len - KVFI_SUM_BYTES;
}

/* The header, and the tokens in the clear; the rest is sealed as it is sent (finish.h). */
static kvf_reason prepare_sealed(kvfi_item *item) {
    cover *c = item->cover;
    const kvf_block *block = item->user;
    if (c->staged != NULL) {
        return KVF_WHY_NOMEM; /* a record that was begun and is not finished: sealing failed */
    }
    kvfi_staged *staged = c->room;
    c->room = NULL;
    kvf_status status = staged != NULL ? KVF_OK
                                       : kvfi_backlog_reserve(kvfi_store_backlog(c->store), &staged, payload_of(item),
                                                              block->num_tokens);
    if (status != KVF_OK) {
        return reason_of(status);
    }
    c->staged = staged;
    staged->addr = item->addr;
    staged->num_tokens = block->num_tokens;
    if (!kvfi_staged_seal(staged, item->seal)) {
        return KVF_WHY_NOMEM;
    }
    uint8_t *clear_head = item->iov[0].iov_base;
    kvfi_tokens_put(clear_head + KVFI_HEADER_BYTES, block->tokens, block->num_tokens);
    kvfi_sealed_header(kvfi_staged_head(staged), &staged->key, &item->addr, block, payload_of(item), 0,
                       kvfi_sys->wall_us() / 1000000);
    c->whole = (struct iovec){kvfi_staged_head(staged), item->bytes};
    c->may_lend = item->may_lend;
    item->clear = item->iov;
    item->num_clear = item->num_iov;
    item->iov = &c->whole;
    item->num_iov = 1;
    item->record_key = &staged->key;
    item->may_lend = true; /* sealed bytes in the library's memory */
    return KVF_WHY_NONE;
}

static void drop_room(cover *c) {
    if (c->room != NULL) {
        kvfi_backlog_abandon(kvfi_store_backlog(c->store), c->room);
        c->room = NULL;
    }
}

/* What a server may still read is not used for the next attempt. */
static void release_sealed(kvfi_item *item) {
    cover *c = item->cover;
    if (c->staged == NULL) {
        return;
    }
    explicit_bzero(&c->staged->key, sizeof c->staged->key);
    c->room = c->staged;
    c->room->lent = item->lent;
    c->staged = NULL;
    if (item->lent) {
        drop_room(c);
    }
    if (item->clear != NULL) {
        item->iov = item->clear;
        item->num_iov = item->num_clear;
        item->clear = NULL;
        item->may_lend = c->may_lend;
        item->record_key = NULL;
        item->unfinished = true;
    }
    item->lent = false;
}

/* Reserves buffers for as many of the items as fit into half of the backlog now, and waits for the first of them:
 * whoever waits holds none, so two batches never wait for each other. Returns their number; at least one, which without
 * a buffer is full. */
static size_t take_room(cover *covers, const kvfi_feed *feed, const kvfi_item *items, size_t num) {
    size_t taken = 0, bytes = 0;
    while (taken < num) {
        kvfi_backlog *backlog = kvfi_store_backlog(covers[taken].store);
        const kvf_block *block = items[taken].user;
        bytes += items[taken].bytes;
        if (taken > 0 && bytes > backlog->bound / 2) {
            break;
        }
        int64_t until_us = taken == 0 ? feed->deadline_us : 0;
        if (kvfi_backlog_await(backlog, &covers[taken].room, payload_of(&items[taken]), block->num_tokens, until_us,
                               feed->cancelled) != KVF_OK) {
            break;
        }
        taken++;
    }
    return taken > 0 ? taken : 1;
}

/* Some of the items after the others, as the backlog has room for their records. */
static void put_sealed(kvf_store *store, kvfi_blocks *batch, cover *covers) {
    kvfi_feed *feed = &batch->feed;
    kvfi_item *items = feed->items;
    size_t num = feed->num;
    for (size_t at = 0, taken = 0; at < num; at += taken) {
        taken = take_room(covers + at, feed, items + at, num - at);
        feed->items = items + at;
        feed->num = taken;
        kvfi_store_put(store, feed, batch->outcomes + at);
        for (size_t i = at; i < at + taken; i++) {
            release_sealed(&items[i]); /* of an item that was to be sent again, and was not */
            drop_room(&covers[i]);
        }
    }
    feed->items = items;
    feed->num = num;
}

/* Known blocks are not sent. Returns the others, in order. */
static size_t select_unknown(kvf_space *space, kvf_block *blocks, size_t num, kvf_block *out, size_t *from) {
    size_t unknown = 0;
    for (size_t i = 0; i < num; i++) {
        blocks[i].status = KVF_OK;
        blocks[i].why = KVF_WHY_NONE;
        if (is_known(space, &blocks[i].key)) {
            kvfi_store_count_known(space->store, 1);
        } else {
            from[unknown] = i;
            out[unknown++] = blocks[i];
        }
    }
    return unknown;
}

/* Head and checksum lie in memory that is reused afterwards, so they must be copied, not lent. */
static bool may_lend(const kvfi_item *item, uint32_t flags) {
    return (flags & KVF_MAY_LEND) != 0 && item->iov[0].iov_len < KVFI_PAGE;
}

static kvf_reason without_memory(kvfi_item *item) {
    (void)item;
    return KVF_WHY_NOMEM;
}

static void put_all(kvf_store *store, kvfi_blocks *batch, bool sealed) {
    cover *covers = sealed ? kvfi_alloc_zero(batch->num, sizeof *covers) : NULL;
    batch->feed.prepare = covers != NULL ? prepare_sealed : sealed ? without_memory : prepare;
    batch->feed.release = covers != NULL ? release_sealed : NULL;
    for (size_t i = 0; i < batch->num && covers != NULL; i++) {
        covers[i].store = store;
        batch->feed.items[i].cover = &covers[i];
    }
    if (covers != NULL) {
        put_sealed(store, batch, covers);
    } else {
        kvfi_store_put(store, &batch->feed, batch->outcomes);
    }
    kvfi_free(covers);
}

static void fail_all(kvf_space *space, kvf_block *blocks, size_t num, kvf_reason why) {
    for (size_t i = 0; i < num; i++) {
        blocks[i].status = KVF_MISS;
        blocks[i].why = count_failure(space->store, why);
    }
}

static size_t put_blocks(kvf_space *space, kvf_block *blocks, size_t num, kvf_view *view, uint32_t flags,
                         int64_t deadline_us, int64_t patience_us, const atomic_bool *cancelled) {
    kvfi_blocks batch;
    size_t written = 0;
    if (kvfi_blocks_init(&batch, space, blocks, num, view, 0, deadline_us, patience_us, cancelled) != KVF_OK) {
        fail_all(space, blocks, num, KVF_WHY_NOMEM);
        return 0;
    }
    for (size_t i = 0; i < num; i++) {
        batch.feed.items[i].unfinished = true;
        batch.feed.items[i].rewrite = kvfi_store_doubts(space->store, &batch.feed.items[i].addr.key);
        batch.feed.items[i].may_lend = may_lend(&batch.feed.items[i], flags);
    }
    put_all(space->store, &batch, kvfi_seal_of(&space->identity) != NULL);
    for (size_t i = 0; i < num; i++) {
        blocks[i].status = batch.feed.items[i].status;
        blocks[i].why = batch.feed.items[i].why;
        written += blocks[i].status == KVF_OK;
    }
    kvfi_blocks_cleanup(&batch);
    return written;
}

/* Of blocks that are sound. */
static size_t save_sound(kvf_space *space, kvf_block *blocks, size_t num, kvf_view *view, uint32_t flags,
                         int64_t deadline_us, int64_t patience_us, const atomic_bool *cancelled) {
    kvf_block *unknown = kvfi_alloc_zero(num > 0 ? num : 1, sizeof *unknown + sizeof(size_t));
    if (unknown == NULL) {
        fail_all(space, blocks, num, KVF_WHY_NOMEM);
        return 0;
    }
    size_t *from = (size_t *)(void *)(unknown + num);
    size_t num_unknown = select_unknown(space, blocks, num, unknown, from);
    size_t written = num - num_unknown;
    if (num_unknown > 0) {
        kvfi_space_card(space);
        written += put_blocks(space, unknown, num_unknown, view, flags, deadline_us, patience_us, cancelled);
    }
    for (size_t i = 0; i < num_unknown; i++) {
        blocks[from[i]].status = unknown[i].status;
        blocks[from[i]].why = unknown[i].why;
    }
    kvfi_free(unknown);
    return written;
}

size_t kvfi_save_through(kvf_space *space, kvf_block *blocks, size_t num, kvf_view *view, uint32_t flags,
                         int64_t deadline_us, int64_t patience_us, const atomic_bool *cancelled) {
    kvfi_store_count_saves(space->store, num); /* counted before their outcomes, which never exceed it */
    size_t sound = kvfi_num_sound(space, blocks, num, view);
    size_t written = save_sound(space, blocks, sound, view, flags, deadline_us, patience_us, cancelled);
    refuse(space, blocks + sound, num - sound, KVF_WHY_MISUSE);
    return written;
}
