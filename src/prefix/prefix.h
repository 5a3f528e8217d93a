/* SPDX-License-Identifier: Apache-2.0
 *
 * The prefix service: match, load and save blocks of a space. It seals and checks records; the store below moves them.
 */
#ifndef KVFI_PREFIX_H
#define KVFI_PREFIX_H

#include "kvferry/block.h"
#include "record/space.h"
#include "store/store.h"

#define KVFI_BLOCKS_US 10000000 /* the default budget of calls on blocks */

struct kvf_space {
    kvf_store *store;
    kvfi_identity identity;
    kvfi_identity previous;      /* the same under the previous secret, while secrets change */
    bool rotates;                /* there is a previous one */
    _Atomic int64_t card_due_us; /* when to store the space card again */
    /* How many tokens most records had that were looked up or loaded last: a guess for loads of blocks without
     * tokens. */
    _Atomic uint32_t seen_tokens;
};

/* A vote on that: more than half of the ballots decide. */
typedef struct kvfi_vote {
    uint32_t num_tokens;
    size_t lead; /* 0: nothing is decided */
} kvfi_vote;
static inline void kvfi_vote_for(kvfi_vote *vote, uint32_t num_tokens) {
    if (vote->lead == 0) {
        vote->num_tokens = num_tokens;
    }
    vote->lead = vote->num_tokens == num_tokens ? vote->lead + 1 : vote->lead - 1;
}
static inline void kvfi_vote_count(const kvfi_vote *vote, kvf_space *space) {
    if (vote->lead > 0) {
        atomic_store_explicit(&space->seen_tokens, vote->num_tokens, memory_order_relaxed);
    }
}

/* kvfi_space_card stores the fields of the space beside its blocks from time to time, so that people can see what the
 * blocks belong to. */
void kvfi_space_card(kvf_space *);

/* The bytes of the prefix up to the end of a block, if its blocks are alike; 0: its position is not known. */
static inline uint64_t kvfi_chain_bytes(const kvf_block *block, size_t bytes) {
    return block->num_tokens == 0 ? 0 : bytes + (uint64_t)bytes / block->num_tokens * block->first_token;
}

/* A batch of blocks as items of a feed; all of its memory is one allocation. */
typedef struct kvfi_blocks {
    kvf_space *space;
    kvf_block *blocks;
    size_t num;
    kvf_view *view;
    kvfi_feed feed;
    kvfi_put_outcome *outcomes;
} kvfi_blocks;

/* Whether the tokens of a block, and its reserved room, obey the rules of block.h. */
bool kvfi_has_sound_tokens(const kvf_space *, const kvf_block *);
/* Whether the lengths of its iovecs do. */
bool kvfi_has_sound_iov(const kvf_block *);
/* Whether all of it does. */
bool kvfi_is_sound(const kvf_space *, const kvf_block *, const kvf_view *);
/* The number of leading blocks that do. */
size_t kvfi_num_sound(const kvf_space *, const kvf_block *, size_t num, const kvf_view *);

/* KVF_OK or KVF_NOMEM. The blocks are sound. `untold`: how many tokens are expected in the records of blocks without
 * tokens. */
kvf_status kvfi_blocks_init(kvfi_blocks *, kvf_space *, kvf_block *blocks, size_t num, kvf_view *view, uint32_t untold,
                            int64_t deadline_us, int64_t patience_us, const atomic_bool *cancelled);
void kvfi_blocks_cleanup(kvfi_blocks *);

/* kvf_load, kvf_match and the written-through form of kvf_save with all their parameters; what the blocking calls and
 * the queue share. A load with a watch takes each block by itself, as with KVF_EACH. `flags`: of a batch. Load and
 * match take KVFI_AT_ONCE for a deadline. */
size_t kvfi_load(kvf_space *, kvf_block *blocks, size_t num, kvf_view *view, uint32_t flags, int64_t deadline_us,
                 int64_t patience_us, const atomic_bool *cancelled, kvfi_watch *watch);
size_t kvfi_save_through(kvf_space *, kvf_block *blocks, size_t num, kvf_view *view, uint32_t flags,
                         int64_t deadline_us, int64_t patience_us, const atomic_bool *cancelled);
size_t kvfi_match(kvf_space *, kvf_found *found, const kvf_key *keys, size_t stride, size_t num, uint32_t flags,
                  int64_t deadline_us, int64_t patience_us);
/* Status and reason of each block are as block.h says of KVF_OP_REMOVE. Returns how many are KVF_OK. */
size_t kvfi_each(kvf_space *, kvfi_deed, kvf_block *blocks, size_t num, int64_t deadline_us, int64_t patience_us,
                 const atomic_bool *cancelled);

/* kvfi_get_untold is kvfi_store_get for a load of blocks of which some may have no tokens. Their heads fit the expected
 * number of tokens; items whose records have another number get heads that fit, in memory that becomes *heads (to be
 * freed after the last use of the items), and are requested again. */
void kvfi_get_untold(kvf_space *, kvfi_feed *, uint8_t **heads);
/* The block, with as many tokens as the head of its item has room for. */
static inline kvf_block kvfi_block_of(const kvfi_item *item) {
    kvf_block block = *(const kvf_block *)item->user;
    block.tokens = block.num_tokens > 0 ? block.tokens : NULL;
    block.num_tokens = (uint32_t)((item->iov[0].iov_len - KVFI_HEADER_BYTES) / 4);
    return block;
}

/* ---- views */
/* False in a forked child for a view of the parent, which must not be used there. True for NULL. */
bool kvfi_view_is_ours(const kvf_view *);
size_t kvfi_view_num_runs(const kvf_view *); /* of one slot */
size_t kvfi_view_slot_bytes(const kvf_view *);
bool kvfi_view_has_slot(const kvf_view *, int64_t slot);
void kvfi_view_runs(const kvf_view *, int64_t slot, struct iovec *out);
/* Marks the view, and the slots of blocks without iovecs, as in use, or as free again. */
void kvfi_view_enter(kvf_view *, const kvf_block *blocks, size_t num);
void kvfi_view_leave(kvf_view *, const kvf_block *blocks, size_t num);

#endif
