/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocks: the KV of `block_tokens` consecutive tokens over all layers. Match says how many of a prefix are stored, load
 * brings them, save hands new ones to the writers. All three take any number of blocks in one call.
 */
#ifndef KVFERRY_BLOCK_H
#define KVFERRY_BLOCK_H

#include <sys/uio.h>

#include "space.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVF_MAX_BLOCKS        65536u            /* in one call */
#define KVF_MAX_PAYLOAD_BYTES ((size_t)1 << 34) /* of one block */

/* ---- where payloads lie ------------------------------------------------------------------------------------------
 * A view describes memory that holds many payloads at equal distances, such as an engine's KV pool, once for its whole
 * life. The payload of slot s is the concatenation, region by region, of `num_runs` runs of `run_bytes`; run r of
 * region g begins at base + s * slot_stride + r * run_stride. Throw-away memory is passed as iovecs in the block
 * instead. */
typedef struct kvf_region {
    void *base;
    size_t slot_stride, run_bytes, run_stride;
    uint32_t num_runs;
    uint64_t reserved[2]; /* zero */
} kvf_region;

typedef struct kvf_view kvf_view;
/* kvf_view_open returns KVF_OK; KVF_LIMIT (no regions or slots, or too many; a region that is empty, reaches beyond the
 * end of memory, or whose `reserved` is not zero); KVF_NOMEM. */
KVF_API KVF_MUST_CHECK kvf_status kvf_view_open(kvf_view **out, kvf_error *err, const kvf_region *regions,
                                                size_t num_regions, size_t num_slots);
KVF_API void kvf_view_close(kvf_view *); /* waits until no operation touches it any more */

/* kvf_fence waits until no operation reads or writes these slots any more. Every operation has a deadline, so this
 * ends.
 * Returns KVF_OK; KVF_AGAIN (some are still in use when the budget ends: their memory must not be given to anybody
 * else);
 * KVF_LIMIT (a slot outside of the view, a budget out of range); KVF_CLOSED. Takes KVF_POLL. */
KVF_API KVF_MUST_CHECK kvf_status kvf_fence(kvf_view *, const int64_t *slots, size_t num, int64_t budget_us);

typedef struct kvf_block {
    kvf_key key;
    const uint32_t
        *tokens; /* the block's tokens, checked on load and stored on save; NULL where only the engine knows them */
    uint32_t num_tokens;  /* 0 when tokens is NULL */
    uint32_t first_token; /* the position of the first of them in the prompt; part of the check */
    struct iovec *iov;    /* where the payload goes to or comes from; its length is the payload's; or, if NULL: */
    uint32_t num_iov;
    int64_t slot;         /* the slot of the view of the call */
    kvf_status status;    /* out */
    kvf_reason why;       /* out; KVF_WHY_NONE where status is KVF_OK */
    uint64_t reserved[2]; /* zero */
} kvf_block;

/* The rules for a block: `tokens` is not NULL where there is a count; there are at most the space's block_tokens of
 * them, and their positions fit 32 bits; there are iovecs, or the call has a view and `slot` is one of its slots; the
 * payload has at most KVF_MAX_PAYLOAD_BYTES; `reserved` is zero. A block that breaks one is KVF_LIMIT with
 * KVF_WHY_MISUSE. The blocks before it are loaded or saved; those behind it are left alone (KVF_WHY_AFTER_GAP). Where
 * the call itself breaks a rule (more than KVF_MAX_BLOCKS, a budget out of range), its first block says so.
 *
 * What becomes of a block:
 *   loaded   KVF_OK
 *            KVF_MISS   and why
 *            KVF_LIMIT  KVF_WHY_MISUSE
 *   saved    KVF_OK     taken (kvf_save), written to every tier (a queue), or known to be stored
 *            KVF_AGAIN  shed: KVF_WHY_FULL (no room in the backlog), or KVF_WHY_AFTER_GAP behind a block that was not
 *                        taken
 *            KVF_MISS   not taken, or not written, and why: KVF_WHY_NOMEM, KVF_WHY_CLOSED, or what the store says
 *            KVF_LIMIT  KVF_WHY_MISUSE */

/* ---- match -----------------------------------------------------------------------------------------------------*/
typedef struct kvf_found {
    uint64_t payload_bytes; /* what a load needs room for */
    int64_t stored_s;       /* when it was stored, in seconds since 1970 */
    uint32_t num_tokens;
    uint32_t tier;        /* the index of the fastest tier that has it */
    kvf_reason why;       /* KVF_WHY_NONE; of a key that was not found: the reason, and all else is 0 */
    uint64_t reserved[2]; /* zero */
} kvf_found;

/* kvf_match asks which of the keys are in the store: one round trip per tier that is asked (of a Cluster: per shard),
 * whatever their number. Keys that a tier has are not asked of slower ones. *out_run is how many leading keys are
 * there: what a prefix can use. `found` may be NULL. Otherwise it has room for `num` and answers for every key, also
 * behind the first that is missing. A match is a hint: the load is the truth. Takes
 * KVF_POLL; a queue asks without waiting (KVF_OP_MATCH). Returns KVF_OK (also for a run of 0, whatever ended it);
 * KVF_LIMIT (more than KVF_MAX_BLOCKS, a budget out of range). */
KVF_API KVF_MUST_CHECK kvf_status kvf_match(kvf_space *, size_t *out_run, kvf_found *found, const kvf_key *keys,
                                            size_t num, int64_t budget_us);

/* ---- load --------------------------------------------------------------------------------------------------------
 * kvf_load reads blocks into their places within the budget. Returns how many *leading* blocks are there and
 * verified: header, space, key, tokens, length and checksum. Behind the first gap nothing is used (KVF_WHY_AFTER_GAP)
 * and the destinations are undefined, as is that of every block that is not KVF_OK. Never fails otherwise. `view` may
 * be NULL when every block has iovecs. Blocks for up to the budget; the caller's thread does part of the work. Takes
 * KVF_POLL. */
KVF_API size_t kvf_load(kvf_space *, kvf_block *blocks, size_t num, kvf_view *view, int64_t budget_us);

/* kvf_borrow lends the payload of one block without a copy, where a tier allows it (mem, file): verified like a load.
 * Where `iov` is given, its length is what the payload must have, and its memory is not touched (it may be NULL);
 * without `iov` any length is lent. `slot` is not used. The bytes must not be written to, stay valid until
 * kvf_release, and survive eviction. A file is lent only where this user alone can write to it and to its folders; a
 * process of the same user that writes into it changes what is lent, or ends the reader with SIGBUS. A record of a
 * space with a secret can't be opened where it lies, and is never lent. Takes 10 s at most.
 * Returns what block->status is: KVF_OK; KVF_MISS with block->why (KVF_WHY_ABSENT also where no tier can lend it: use
 * kvf_load then); KVF_LIMIT (the block breaks a rule). */
typedef struct kvf_borrowed {
    const void *data;
    size_t len;
    void *opaque;         /* for kvf_release */
    uint64_t reserved[2]; /* zero */
} kvf_borrowed;
KVF_API KVF_MUST_CHECK kvf_status kvf_borrow(kvf_space *, kvf_borrowed *out, kvf_block *block);
KVF_API void kvf_release(kvf_space *, kvf_borrowed *);

/* ---- save --------------------------------------------------------------------------------------------------------
 * kvf_save hands blocks to the writers and returns at once: the payloads are staged (copied once) within the bound of
 * the backlog. Returns how many were taken, counting those that the store is known to have and that are not written
 * again (both KVF_OK). Behind the first block that is not taken none is: a prefix with a hole is of no use behind it.
 * Nothing is waited for. kvf_store_flush tells what was taken and not written. */
KVF_API size_t kvf_save(kvf_space *, kvf_block *blocks, size_t num, kvf_view *view);

/* kvf_reserve and kvf_commit are kvf_save without the copy, for engines that export into memory: reserve room for a
 * payload, fill it, commit it. A reservation is committed or abandoned. kvf_commit writes *used* bytes of it;
 * block->iov and slot are not used, and its status is not written. After any return but KVF_CLOSED the reservation is
 * used up. kvf_reserve returns KVF_OK; KVF_AGAIN (backlog full: skip this block); KVF_LIMIT (more than
 * KVF_MAX_PAYLOAD_BYTES);
 * KVF_NOMEM; KVF_CLOSED. kvf_commit returns KVF_OK; KVF_LIMIT (the block breaks a rule, more bytes are used than were
 * reserved, or nothing is reserved); KVF_NOMEM (no random bytes to seal it with); KVF_CLOSED. */
typedef struct kvf_reserved {
    void *data;
    size_t len;
    void *opaque;
    uint64_t chain_bytes; /* in, of kvf_commit: what the whole prefix up to the end of this block takes in a store; 0
                             (as kvf_reserve leaves it) = not known. Where that is more than three quarters of a bounded
                             store, the block is not stored (KVF_WHY_FULL): it would evict its own front. kvf_save and
                             queues tell it from first_token and num_tokens, as if all blocks were equally long. */
    uint64_t reserved[2]; /* zero, as kvf_reserve leaves it */
} kvf_reserved;
KVF_API KVF_MUST_CHECK kvf_status kvf_reserve(kvf_space *, kvf_reserved *out, size_t payload_bytes);
KVF_API KVF_MUST_CHECK kvf_status kvf_commit(kvf_space *, kvf_reserved *, const kvf_block *block, size_t used_bytes);
KVF_API void kvf_abandon(kvf_space *, kvf_reserved *);

/* kvf_knows says without any I/O whether the store is known to have the block (seen by a match or load, or written, in
 * this process): saving it again would be skipped, so there is no need to export it. */
KVF_API int kvf_knows(kvf_space *, const kvf_key *key);

/* ---- the same without waiting ------------------------------------------------------------------------------------
 * For schedulers that must not block: submit, watch kvf_queue_fd with poll or epoll, reap. The queue is bounded. Loads,
 * saves and lookups have threads apart; of each kind of the first two, four batches at least are under way at once,
 * beside the write-behind, and what is submitted beyond waits for one of them. */
typedef struct kvf_queue kvf_queue;
/* kvf_queue_open returns KVF_OK; KVF_LIMIT (the depth); KVF_IO (too many open files); KVF_NOMEM; KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_queue_open(kvf_queue **out, kvf_error *err, kvf_store *,
                                                 uint32_t depth); /* 1 to 4096 batches */
KVF_API void kvf_queue_close(kvf_queue *);   /* waits for what is in flight (each batch has its deadline), then frees */
KVF_API int kvf_queue_fd(const kvf_queue *); /* readable while completions wait to be reaped; -1 in a forked child */

typedef enum kvf_op {
    KVF_OP_LOAD, /* as kvf_load; see KVF_EACH */
    /* Written straight from the caller's memory, without staging; complete when every tier has taken or refused every
     * block. A block is KVF_OK where all tiers took it (a `mem:` in front of what lasts may be full), or where the store
     * is known to have it in a tier that lasts (kvf_knows): then nothing is written. Otherwise `why` is that of the first
     * tier that did not take it; others may have it. See KVF_MAY_LEND. In a space with a secret each block is sealed into
     * a buffer of the backlog first, and waits for room there within the budget (KVF_WHY_FULL: the backlog is too small
     * for it). KVF_MAY_LEND has no effect there. */
    KVF_OP_SAVE,
    KVF_OP_MATCH /* as kvf_match, keys taken from the blocks, of which nothing else is used; with `found` */
} kvf_op;

/* What of a load has come, for who wants to use blocks before the batch is complete. The caller's until completion.
 * kvf_queue_fd becomes readable after every block that is over; kvf_reap makes it wait again. A block that has arrived
 * may be read at once; its memory must not be changed before the completion. */
typedef struct kvf_arrivals {
    uint64_t bytes;       /* that have come so far; read it with kvf_arrived_bytes */
    int64_t at_us;        /* when the last of them came, by CLOCK_MONOTONIC; written before `bytes` */
    uint8_t *each;        /* one byte for each block, all zero; read it with kvf_arrival_of */
    uint64_t reserved[2]; /* zero */
} kvf_arrivals;

typedef enum kvf_arrival {
    KVF_AWAITED,
    KVF_HERE,  /* and verified */
    KVF_MISSED /* see kvf_arrival_why */
} kvf_arrival;

static inline uint64_t kvf_arrived_bytes(const kvf_arrivals *a) {
    return __atomic_load_n(&a->bytes, __ATOMIC_ACQUIRE);
}
static inline int64_t kvf_arrived_at_us(const kvf_arrivals *a) {
    return __atomic_load_n(&a->at_us, __ATOMIC_RELAXED);
}
static inline kvf_arrival kvf_arrival_of(const kvf_arrivals *a, size_t block) {
    uint8_t state = __atomic_load_n(&a->each[block], __ATOMIC_ACQUIRE);
    return state < KVF_MISSED ? (kvf_arrival)state : KVF_MISSED;
}
/* Of a block that is KVF_MISSED. */
static inline kvf_reason kvf_arrival_why(const kvf_arrivals *a, size_t block) {
    return (kvf_reason)(__atomic_load_n(&a->each[block], __ATOMIC_ACQUIRE) - KVF_MISSED);
}

/* Flags of a batch. */
enum {
    /* Of a save: the pages of the payloads may be lent to a Redis on a unix socket instead of copied into the socket,
     * which is faster (docs/stores-redis.md). Where such a save ends before the server has answered (the budget, a
     * broken connection), the server may read these pages later, and then it reads what they hold by then. So set this
     * only for memory that is not written to any more, or whose next contents that server may see. A record that was
     * read like that fails its checksum, and is a miss. */
    KVF_MAY_LEND = 1,
    /* Of a load or a match: the blocks are independent, and num_ok is how many are there, wherever they are. A block of
     * such a load that is missing does not end the others, and has its own reason. (A block that breaks a rule still
     * ends the batch.) There is one completion and no wake-up before it. A load with `arrivals` is always like this. */
    KVF_EACH = 2
};

typedef struct kvf_batch {
    uint32_t struct_size;
    kvf_op op;
    uint32_t flags; /* KVF_MAY_LEND, KVF_EACH */
    kvf_space *space;
    kvf_block *blocks; /* the caller's until completion; their status and why are written before it */
    size_t num;
    kvf_view *view;
    int64_t budget_us;      /* from the submission on; KVF_POLL is for loads and matches */
    uint64_t user;          /* comes back in the completion */
    kvf_arrivals *arrivals; /* of a load; NULL = nobody looks before it is complete */
    kvf_found *found;       /* of a match: as in kvf_match; the caller's until completion; NULL = only the number */
    /* Of a load or a save: how long to wait for a server that has fallen silent; 0 = as the store does (stall_ms of its
     * URL). Blocks that it ends are KVF_WHY_STALLED. A silent server is tried once more on a new connection, which takes
     * as long again, at most. */
    int64_t patience_us;
} kvf_batch;

typedef struct kvf_completion {
    uint64_t ticket, user;
    kvf_op op;
    /* Load and match: the leading run, or, with KVF_EACH or arrivals, how many are there. Save: how many are written. */
    size_t num_ok;
    uint64_t reserved[2]; /* zero */
} kvf_completion;

/* kvf_submit returns KVF_OK; KVF_AGAIN (the queue is full: drop a save, or reap and try again); KVF_LIMIT (struct_size;
 * too many blocks; an `op` that is none; a flag that is none, or not of this op; arrivals of what is no load, or whose
 * `reserved` is not zero; a space of another store; a budget or patience out of range); KVF_NOMEM; KVF_CLOSED. Blocks that break a
 * rule are answered in the completion. */
KVF_API KVF_MUST_CHECK kvf_status kvf_submit(kvf_queue *, uint64_t *out_ticket, const kvf_batch *);
/* kvf_reap takes up to `cap` completions without waiting and returns their number. */
KVF_API size_t kvf_reap(kvf_queue *, kvf_completion *out, size_t cap);
/* kvf_trim: of a load with arrivals, blocks from number `num` on that have not begun are not begun any more. */
KVF_API void kvf_trim(kvf_queue *, uint64_t ticket, size_t num);
/* kvf_cancel drops blocks of a batch that have not begun. Blocks on their way end if that is nearly so, else they are
 * dropped with their connection. The completion still arrives: of a save within 50 ms, also when the server is silent
 * (not while a connection is being made: that takes up to connect_ms). Until then the memory is in use. */
KVF_API void kvf_cancel(kvf_queue *, uint64_t ticket);

#ifdef __cplusplus
}
#endif
#endif
