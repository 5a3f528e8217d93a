/* SPDX-License-Identifier: Apache-2.0
 *
 * Removes or renews many blocks in all tiers.
 */
#include "prefix/prefix.h"

typedef struct job {
    const kvf_space *space;
    kvfi_deed deed;
    kvf_block *blocks;
    size_t num;
    int64_t deadline_us, patience_us;
    const atomic_bool *cancelled;
    kvfi_addr *addrs;
    kvf_reason *whys; /* of one tier */
} job;

static bool make_room(job *j) {
    j->addrs = kvfi_alloc_zero(j->num, sizeof *j->addrs + sizeof *j->whys);
    j->whys = (kvf_reason *)(void *)(j->addrs + j->num);
    return j->addrs != NULL;
}

/* Until all tiers were asked, a block is KVF_OK if one had it, and `why` is the first failure of any. */
static void note(const job *j) {
    for (size_t i = 0; i < j->num; i++) {
        kvf_block *block = &j->blocks[i];
        if (j->whys[i] == KVF_WHY_NONE) {
            block->status = KVF_OK;
        } else if (j->whys[i] != KVF_WHY_ABSENT && block->why == KVF_WHY_NONE) {
            block->why = j->whys[i];
        }
    }
}

static void ask_tier(const job *j, size_t tier) {
    if (!atomic_load(j->cancelled)) {
        kvfi_store_each(j->space->store, j->deed, tier, j->addrs, j->num, j->whys, j->deadline_us, j->patience_us);
    } else {
        for (size_t i = 0; i < j->num; i++) {
            j->whys[i] = KVF_WHY_CLOSED;
        }
    }
    note(j);
}

static void ask_tiers(const job *j, const kvfi_identity *identity) {
    for (size_t i = 0; i < j->num; i++) {
        kvfi_address(&j->addrs[i], identity, &j->blocks[i].key);
    }
    for (size_t tier = 0; tier < kvfi_store_num_tiers(j->space->store); tier++) {
        ask_tier(j, tier);
    }
}

/* A failure wins: the block may still be there, or its time may end. */
static size_t conclude(kvf_block *blocks, size_t num) {
    size_t done = 0;
    for (size_t i = 0; i < num; i++) {
        if (blocks[i].why != KVF_WHY_NONE) {
            blocks[i].status = KVF_MISS;
        } else if (blocks[i].status != KVF_OK) {
            blocks[i].why = KVF_WHY_ABSENT;
        }
        done += blocks[i].status == KVF_OK;
    }
    return done;
}

size_t kvfi_each(kvf_space *space, kvfi_deed deed, kvf_block *blocks, size_t num, int64_t deadline_us,
                 int64_t patience_us, const atomic_bool *cancelled) {
    job j = {.space = space,
             .deed = deed,
             .blocks = blocks,
             .num = num,
             .deadline_us = deadline_us,
             .patience_us = patience_us,
             .cancelled = cancelled};
    bool room = num > 0 && make_room(&j);
    for (size_t i = 0; i < num; i++) {
        blocks[i].status = KVF_MISS;
        blocks[i].why = room ? KVF_WHY_NONE : KVF_WHY_NOMEM;
    }
    if (!room) {
        return 0;
    }
    ask_tiers(&j, &space->identity);
    if (space->rotates) {
        ask_tiers(&j, &space->previous);
    }
    kvfi_free(j.addrs);
    return conclude(blocks, num);
}
