/* SPDX-License-Identifier: Apache-2.0
 *
 * Turns a caller's blocks into the items of a batch, with one allocation for all items, headers and iovecs.
 */
#include "kvferry/sized.h"
#include "prefix/prefix.h"

static size_t num_runs_of(const kvf_block *block, const kvf_view *view) {
    return block->iov != NULL ? block->num_iov : kvfi_view_num_runs(view);
}

bool kvfi_has_sound_tokens(const kvf_space *space, const kvf_block *block) {
    return block->num_tokens <= space->identity.block_tokens && (block->tokens != NULL || block->num_tokens == 0) &&
           block->first_token <= UINT32_MAX - block->num_tokens && kvf_reserved_is_zero(block->reserved);
}

bool kvfi_has_sound_iov(const kvf_block *block) {
    return kvfi_iov_bytes(block->iov, block->num_iov) <= KVF_MAX_PAYLOAD_BYTES;
}

bool kvfi_is_sound(const kvf_space *space, const kvf_block *block, const kvf_view *view) {
    bool memory =
        block->iov != NULL ? kvfi_has_sound_iov(block) : view != NULL && kvfi_view_has_slot(view, block->slot);
    return memory && kvfi_has_sound_tokens(space, block);
}

size_t kvfi_num_sound(const kvf_space *space, const kvf_block *blocks, size_t num, const kvf_view *view) {
    size_t sound = 0;
    while (sound < num && num <= KVF_MAX_BLOCKS && kvfi_is_sound(space, &blocks[sound], view)) {
        sound++;
    }
    return sound;
}

/* How many tokens the head of its record has room for. */
static uint32_t head_tokens(const kvf_block *block, uint32_t untold) {
    return block->num_tokens > 0 ? block->num_tokens : untold;
}

/* The parts of the one allocation, in order of alignment. */
typedef struct layout {
    kvfi_item *items;
    struct iovec *iov;
    kvfi_put_outcome *outcomes;
    uint8_t *ends; /* head and checksum of each */
} layout;

static kvf_status make_room(layout *out, const kvf_block *blocks, size_t num, const kvf_view *view, uint32_t untold) {
    size_t num_iov = 0, ends = 0;
    for (size_t i = 0; i < num; i++) {
        num_iov += 2 + num_runs_of(&blocks[i], view);
        ends += KVFI_HEAD_BYTES(head_tokens(&blocks[i], untold)) + KVFI_SUM_BYTES;
    }
    size_t bytes = num * (sizeof *out->items + sizeof *out->outcomes) + num_iov * sizeof *out->iov + ends;
    uint8_t *memory = kvfi_alloc_zero(1, bytes > 0 ? bytes : 1);
    if (memory == NULL) {
        return KVF_NOMEM;
    }
    out->items = (kvfi_item *)(void *)memory;
    out->iov = (struct iovec *)(void *)(out->items + num);
    out->outcomes = (kvfi_put_outcome *)(void *)(out->iov + num_iov);
    out->ends = (uint8_t *)(out->outcomes + num);
    return KVF_OK;
}

static void fill_item(kvfi_item *item, layout *at, const kvf_space *space, kvf_block *block, const kvf_block *first,
                      const kvf_view *view, uint32_t untold) {
    struct iovec *iov = at->iov;
    size_t head = KVFI_HEAD_BYTES(head_tokens(block, untold));
    size_t runs = num_runs_of(block, view);
    iov[0] = (struct iovec){at->ends, head};
    iov[runs + 1] = (struct iovec){at->ends + head, KVFI_SUM_BYTES};
    if (block->iov != NULL) {
        memcpy(iov + 1, block->iov, runs * sizeof *iov);
    } else {
        kvfi_view_runs(view, block->slot, iov + 1);
    }
    size_t bytes = kvfi_iov_bytes(iov, runs + 2);
    *item = (kvfi_item){.iov = iov,
                        .num_iov = (uint32_t)runs + 2,
                        .bytes = bytes,
                        .status = KVF_AGAIN,
                        .number = (size_t)(block - first),
                        .user = block,
                        .chain_bytes = kvfi_chain_bytes(block, bytes),
                        .seal = kvfi_seal_of(&space->identity),
                        .whole = kvfi_seal_of(&space->identity) != NULL};
    kvfi_address(&item->addr, &space->identity, &block->key);
    at->iov += runs + 2;
    at->ends += head + KVFI_SUM_BYTES;
}

kvf_status kvfi_blocks_init(kvfi_blocks *batch, kvf_space *space, kvf_block *blocks, size_t num, kvf_view *view,
                            uint32_t untold, int64_t deadline_us, int64_t patience_us, const atomic_bool *cancelled) {
    layout at;
    KVFI_TRY(make_room(&at, blocks, num, view, untold));
    *batch = (kvfi_blocks){.space = space, .blocks = blocks, .num = num, .view = view, .outcomes = at.outcomes};
    batch->feed = (kvfi_feed){
        .items = at.items, .num = num, .deadline_us = deadline_us, .patience_us = patience_us, .cancelled = cancelled};
    for (size_t i = 0; i < num; i++) {
        fill_item(&batch->feed.items[i], &at, space, &blocks[i], blocks, view, untold);
    }
    kvfi_view_enter(view, blocks, num);
    return KVF_OK;
}

void kvfi_blocks_cleanup(kvfi_blocks *batch) {
    kvfi_view_leave(batch->view, batch->blocks, batch->num);
    kvfi_free(batch->feed.items);
}
