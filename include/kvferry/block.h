/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocks: the KV of `block_tokens` consecutive tokens over all layers.
 *
 * The simple way is three calls, each for any number of blocks: kvf_match says how many of a prefix are stored,
 * kvf_load reads them, and kvf_save hands new ones to the writers. The rest of this header is for engines that need
 * more: less copying (kvf_borrow, kvf_reserve), their own paged memory (views), or no waiting at all (the queue).
 */
#ifndef KVFERRY_BLOCK_H
#define KVFERRY_BLOCK_H

#include <sys/uio.h>

#include "space.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Limits: blocks in one call, and bytes of the payload of one block. */
#define KVF_MAX_BLOCKS        65536u
#define KVF_MAX_PAYLOAD_BYTES ((size_t)1 << 34)

typedef struct kvf_view kvf_view;

/* One block of a load or a save. */
typedef struct kvf_block {
    kvf_key key;
    /* The block's tokens: compared by a load, stored by a save. NULL if only the engine knows them: then the key names
     * them, and a load takes a record with or without tokens. */
    const uint32_t *tokens;
    /* 0 if tokens is NULL. */
    uint32_t num_tokens;
    /* The position of the first token in the prompt. A load compares it, unless it is 0 and the block has no
     * tokens. */
    uint32_t first_token;
    /* Source or destination of the payload. The sum of the lengths is the payload's length. NULL: `slot` is used. */
    struct iovec *iov;
    uint32_t num_iov;
    /* Without `iov`: the slot in the view of the call. */
    int64_t slot;
    /* Out: what became of the block (below). */
    kvf_status status;
    /* Out: the reason. KVF_WHY_NONE if status is KVF_OK. */
    kvf_reason why;
    /* Must be zero. */
    uint64_t reserved[2];
} kvf_block;

/* The rules for a block: `tokens` is not NULL if there is a count. There are at most the space's block_tokens of them,
 * and their positions fit 32 bits. There are iovecs, or the call has a view and `slot` is one of its slots. The payload
 * has at most KVF_MAX_PAYLOAD_BYTES. `reserved` is zero. A block that breaks a rule is KVF_LIMIT with KVF_WHY_MISUSE.
 * The blocks before it are loaded or saved; later ones are left alone (KVF_WHY_AFTER_GAP). If the call itself breaks a
 * rule (more than KVF_MAX_BLOCKS, a budget out of range), its first block says so.
 *
 * What becomes of a block:
 *   loaded   KVF_OK
 *            KVF_MISS   and why
 *            KVF_LIMIT  KVF_WHY_MISUSE
 *   saved    KVF_OK     accepted (kvf_save), written to every tier (a queue), or known to be stored
 *            KVF_AGAIN  shed: KVF_WHY_FULL (kvf_save: no room in the backlog), or KVF_WHY_AFTER_GAP after a block that
 *                       was not accepted
 *            KVF_MISS   not accepted, or not written, and why: KVF_WHY_NOMEM, KVF_WHY_CLOSED, or the store's reason
 *            KVF_LIMIT  KVF_WHY_MISUSE */

/* ---- match ------------------------------------------------------------------------------------------------------- */

/* What a lookup found of one key. */
typedef struct kvf_found {
    /* The room that a load needs. */
    uint64_t payload_bytes;
    /* When it was stored, in seconds since 1970. */
    int64_t stored_s;
    uint32_t num_tokens;
    /* The index of the fastest tier that has it. */
    uint32_t tier;
    /* KVF_WHY_NONE. Of a key that was not found: the reason; all other fields are then 0. */
    kvf_reason why;
    /* Zero. */
    uint64_t reserved[2];
} kvf_found;

/* kvf_match looks up which of the keys are stored, with one round trip for each tier (in a Cluster: each shard),
 * whatever their number. Keys that a tier has are not looked up in slower ones. *out_run is the number of leading keys
 * that are stored: what a prefix can use. `found` may be NULL. Otherwise it has room for `num` and answers for every
 * key, also after the first that is missing. A match is only a hint: the load decides.
 *
 * Takes KVF_POLL; KVF_OP_MATCH of a queue is the same without waiting. Returns KVF_OK (also for a run of 0, whatever
 * ended it); KVF_LIMIT (more than KVF_MAX_BLOCKS, a budget out of range). */
KVF_API KVF_MUST_CHECK kvf_status kvf_match(kvf_space *, size_t *out_run, kvf_found *found, const kvf_key *keys,
                                            size_t num, int64_t budget_us);

/* ---- load -------------------------------------------------------------------------------------------------------- */

/* kvf_load reads blocks into their destinations. It returns how many *leading* blocks are loaded and verified: header,
 * space, key, tokens, length and checksum. Nothing after the first gap is used (KVF_WHY_AFTER_GAP). The destination of
 * every block that is not KVF_OK is undefined.
 *
 * `view` may be NULL if every block has iovecs. The call blocks for up to the budget, and the caller's thread does part
 * of the work. It never fails otherwise. Takes KVF_POLL. */
KVF_API size_t kvf_load(kvf_space *, kvf_block *blocks, size_t num, kvf_view *view, int64_t budget_us);

/* Options of one load. Zero in any field but struct_size is its default. */
typedef struct kvf_load_options {
    uint32_t struct_size;
    /* KVF_EACH (see the queue). */
    uint32_t flags;
    /* Takes KVF_POLL. */
    int64_t budget_us;
    /* As in kvf_batch. */
    int64_t patience_us;
} kvf_load_options;

/* kvf_load_with is kvf_load with options; NULL = all defaults. With KVF_EACH the blocks are independent: it returns how
 * many are loaded, whichever these are, and every other block has its own reason. If the options break a rule
 * (struct_size, an unknown flag, budget or patience out of range), nothing is loaded, and the first block says so. */
KVF_API size_t kvf_load_with(kvf_space *, kvf_block *blocks, size_t num, kvf_view *view,
                             const kvf_load_options *options);

/* ---- save -------------------------------------------------------------------------------------------------------- */

/* kvf_save copies blocks into the backlog, hands them to the writers, and returns at once. It returns how many blocks
 * were accepted (KVF_OK), including those that the store is known to have, which are not written again. After the first
 * block that is not accepted none is, because a prefix is of no use after a hole. The call never waits. kvf_store_flush
 * reports blocks that were accepted and not written. */
KVF_API size_t kvf_save(kvf_space *, kvf_block *blocks, size_t num, kvf_view *view);

/* kvf_knows returns nonzero if the store is known to have the block, because this process matched, loaded or wrote it.
 * Saving it would be skipped, so it need not be exported. Does no I/O. */
KVF_API int kvf_knows(kvf_space *, const kvf_key *key);
/* kvf_forget drops what this process knows of these blocks: the next save writes them, without looking first whether
 * the store has them. It is for a process that saves while another one matches and loads, and notices that the server
 * has evicted blocks. Removes nothing from the store, and does no I/O. A block that is being written becomes known when
 * that is done. Beyond some thousand keys, the save of some may look first after all. */
KVF_API void kvf_forget(kvf_space *, const kvf_key *keys, size_t num);

/* ---- without a copy: borrow, reserve -----------------------------------------------------------------------------
 *
 * kvf_borrow gives access to the stored bytes of one block, if a tier allows it (mem, file). kvf_reserve gives room in
 * the backlog, into which an engine exports a block. */

/* A borrowed payload. Do not write to it. */
typedef struct kvf_borrowed {
    const void *data;
    size_t len;
    /* For kvf_release. */
    void *opaque;
    /* Zero. */
    uint64_t reserved[2];
} kvf_borrowed;

/* kvf_borrow borrows the payload of one block, verified like a load. The bytes stay valid until kvf_release, also if
 * the record is evicted. If the block has `iov`, its length must be the payload's, and its memory is not touched (it
 * may be NULL). Without `iov` any length is borrowed. `slot` is not used. Takes at most 10 s.
 *
 * A file is borrowed only if nobody but this user can write to it and to its folders. A process of the same user that
 * writes into it changes the borrowed bytes, or ends the reader with SIGBUS. Sealed records cannot be borrowed.
 *
 * Returns what block->status is: KVF_OK; KVF_MISS with block->why (KVF_WHY_ABSENT also means that no tier can lend it:
 * use kvf_load then); KVF_LIMIT (the block breaks a rule). */
KVF_API KVF_MUST_CHECK kvf_status kvf_borrow(kvf_space *, kvf_borrowed *out, kvf_block *block);
/* kvf_release gives a borrowed payload back. */
KVF_API void kvf_release(kvf_space *, kvf_borrowed *);

/* A reservation in the backlog. */
typedef struct kvf_reserved {
    void *data;
    size_t len;
    void *opaque;
    /* In, for kvf_commit: the stored size of the whole prefix up to the end of this block. 0 (as kvf_reserve leaves it)
     * = unknown. If it exceeds three quarters of a bounded store, the block is not stored (KVF_WHY_FULL), because it
     * would evict its own front. kvf_save and queues derive it from first_token and num_tokens, as if all blocks had
     * the same length. */
    uint64_t chain_bytes;
    /* Zero, as kvf_reserve leaves it. */
    uint64_t reserved[2];
} kvf_reserved;

/* kvf_reserve reserves room for a payload. Fill out->data, then call kvf_commit or kvf_abandon. Returns KVF_OK;
 * KVF_AGAIN (the backlog is full: skip this block); KVF_LIMIT (more than KVF_MAX_PAYLOAD_BYTES); KVF_NOMEM;
 * KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_reserve(kvf_space *, kvf_reserved *out, size_t payload_bytes);
/* kvf_commit hands the first `used_bytes` of a reservation to the writers, as kvf_save does. block->iov and slot are
 * not used, and its status is not written. After any return except KVF_CLOSED the reservation is used up. Returns
 * KVF_OK; KVF_LIMIT (the block breaks a rule, `reserved` is not zero, more bytes are used than were reserved, or there
 * is no reservation); KVF_NOMEM (no random bytes to seal it with); KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_commit(kvf_space *, kvf_reserved *, const kvf_block *block, size_t used_bytes);
/* kvf_abandon gives a reservation back unused. */
KVF_API void kvf_abandon(kvf_space *, kvf_reserved *);

/* ---- views: an engine's own paged memory -------------------------------------------------------------------------
 *
 * A view describes memory that holds many payloads at equal distances, such as an engine's KV pool, once for its whole
 * life. Blocks then name a slot instead of iovecs. The payload of slot s is the concatenation, region by region, of
 * `num_runs` runs of `run_bytes`. Run r of a region begins at base + s * slot_stride + r * run_stride. */

typedef struct kvf_region {
    void *base;
    size_t slot_stride, run_bytes, run_stride;
    uint32_t num_runs;
    /* Must be zero. */
    uint64_t reserved[2];
} kvf_region;

/* kvf_view_open describes memory of `num_slots` slots. The regions are copied. Returns KVF_OK; KVF_LIMIT (no regions or
 * slots, or too many; a region that is empty, reaches beyond the end of memory, or whose `reserved` is not zero);
 * KVF_NOMEM. */
KVF_API KVF_MUST_CHECK kvf_status kvf_view_open(kvf_view **out, kvf_error *err, const kvf_region *regions,
                                                size_t num_regions, size_t num_slots);
/* kvf_view_close waits until no operation uses the view, and frees it. */
KVF_API void kvf_view_close(kvf_view *);

/* kvf_fence waits until no operation reads or writes these slots, or is going to: a batch counts from kvf_submit to its
 * completion. Every operation has a deadline, so this ends. Returns KVF_OK; KVF_AGAIN (some are still in use when the budget ends: do not give their memory to anybody else); KVF_LIMIT
 * (a slot outside of the view, a budget out of range); KVF_CLOSED. Takes KVF_POLL. */
KVF_API KVF_MUST_CHECK kvf_status kvf_fence(kvf_view *, const int64_t *slots, size_t num, int64_t budget_us);

/* ---- the queue: the same without waiting -------------------------------------------------------------------------
 *
 * For schedulers that must not block: kvf_submit a batch, watch kvf_queue_fd with poll or epoll, kvf_reap completions.
 * The queue is bounded. Loads, saves and lookups have separate threads. At least four loads and four saves run at once,
 * beside the write-behind, and further batches wait for one of them. */

typedef struct kvf_queue kvf_queue;

/* kvf_queue_open opens a queue for up to `depth` batches, 1 to 4096. Returns KVF_OK; KVF_LIMIT (the depth); KVF_IO (too
 * many open files); KVF_NOMEM; KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_queue_open(kvf_queue **out, kvf_error *err, kvf_store *, uint32_t depth);
/* kvf_queue_close waits for batches under way (each has its deadline), and frees the queue. */
KVF_API void kvf_queue_close(kvf_queue *);
/* kvf_queue_fd returns a descriptor that is readable while completions wait to be reaped; -1 in a forked child. */
KVF_API int kvf_queue_fd(const kvf_queue *);

typedef enum kvf_op {
    /* As kvf_load; see KVF_EACH. */
    KVF_OP_LOAD,
    /* Written straight from the caller's memory, without staging. Complete when every tier has taken or refused every
     * block. A block is KVF_OK if all tiers took it (a `mem:` before a lasting tier may be full), or if the store is
     * known to have it in a lasting tier (kvf_knows): then nothing is written. Otherwise `why` is that of the first
     * tier that did not take it; others may have it. See KVF_MAY_LEND. In a space with a secret each block is first
     * sealed into a buffer of the backlog, and waits for room there within the budget (KVF_WHY_FULL: the backlog is too
     * small for it); KVF_MAY_LEND then has no effect. */
    KVF_OP_SAVE,
    /* As kvf_match, with the keys of the blocks (their other fields are not used) and `found`. */
    KVF_OP_MATCH,
    /* Removes the blocks from every tier. Only their keys are used, and their status and reason are written:
     *   KVF_OK     a tier had it, and no tier has it any more
     *   KVF_MISS   KVF_WHY_ABSENT: no tier had it; any other reason is that of the first tier that failed, which may
     *              still have it
     * Takes one round trip for each tier (in a Cluster: each shard), and further ones for blocks of more than two parts
     * (docs/stores-redis.md). Blocks that are still to be written are written afterwards: flush first. If a
     * connection breaks meanwhile, a block that was removed may be reported as absent. */
    KVF_OP_REMOVE,
    /* Renews the blocks in every tier without reading them: their time to live begins anew, and they are the last to be
     * evicted. Otherwise as KVF_OP_REMOVE. A block of which a part is missing can't be loaded: it is absent. */
    KVF_OP_TOUCH
} kvf_op;

/* Progress of a load, for callers that use blocks before the batch completes. The memory is the library's until the
 * completion. kvf_queue_fd becomes readable after every block that ends; kvf_reap resets it. A block that has arrived
 * may be read at once, but its memory must not be changed before the completion. */
typedef struct kvf_arrivals {
    /* Bytes that have arrived so far. Read it with kvf_arrived_bytes. */
    uint64_t bytes;
    /* When the last of them arrived, by CLOCK_MONOTONIC. Written before `bytes`. */
    int64_t at_us;
    /* One byte for each block, zero at first. Read it with kvf_arrival_of. */
    uint8_t *each;
    /* Must be zero. */
    uint64_t reserved[2];
} kvf_arrivals;

/* The state of one block of a load. */
typedef enum kvf_arrival {
    KVF_AWAITED,
    /* Arrived and verified. */
    KVF_HERE,
    /* See kvf_arrival_why. */
    KVF_MISSED
} kvf_arrival;

/* kvf_arrived_bytes returns how many bytes of the load have arrived. */
static inline uint64_t kvf_arrived_bytes(const kvf_arrivals *a) {
    return __atomic_load_n(&a->bytes, __ATOMIC_ACQUIRE);
}
/* kvf_arrived_at_us returns when the last of them arrived. */
static inline int64_t kvf_arrived_at_us(const kvf_arrivals *a) {
    return __atomic_load_n(&a->at_us, __ATOMIC_RELAXED);
}
/* kvf_arrival_of returns the state of a block. */
static inline kvf_arrival kvf_arrival_of(const kvf_arrivals *a, size_t block) {
    uint8_t state = __atomic_load_n(&a->each[block], __ATOMIC_ACQUIRE);
    return state < KVF_MISSED ? (kvf_arrival)state : KVF_MISSED;
}
/* kvf_arrival_why returns the reason of a block that is KVF_MISSED. */
static inline kvf_reason kvf_arrival_why(const kvf_arrivals *a, size_t block) {
    return (kvf_reason)(__atomic_load_n(&a->each[block], __ATOMIC_ACQUIRE) - KVF_MISSED);
}

/* Flags of a batch. */
enum {
    /* Of a save: pages of the payloads may be lent to a Redis server on a unix socket instead of copied, which is
     * faster (docs/stores-redis.md). If such a save ends before the server has replied (the budget, a broken
     * connection), the server may read these pages later, with their contents at that time. Set this only for memory
     * that is not written to any more, or whose next contents the server may see. A record read like that fails its
     * checksum and is a miss. */
    KVF_MAY_LEND = 1,
    /* Of a load or a match: the blocks are independent, and num_ok counts all that are there. A missing block of such a
     * load does not end the others, and has its own reason. (A block that breaks a rule still ends the batch.) There is
     * one completion, and no wake-up before it. A load with `arrivals` is always like this. */
    KVF_EACH = 2
};

/* One batch. */
typedef struct kvf_batch {
    uint32_t struct_size;
    kvf_op op;
    /* KVF_MAY_LEND, KVF_EACH. */
    uint32_t flags;
    kvf_space *space;
    /* The library's until the completion. Status and reason of each block are written before it. */
    kvf_block *blocks;
    size_t num;
    kvf_view *view;
    /* Counts from the submission. KVF_POLL is for loads and matches. */
    int64_t budget_us;
    /* Returned in the completion. */
    uint64_t user;
    /* Of a load: progress. NULL = none. */
    kvf_arrivals *arrivals;
    /* Of a match: as in kvf_match. The library's until the completion. NULL = only the number. */
    kvf_found *found;
    /* How long to wait for a server that has fallen silent. 0 = as the store does
     * (stall_ms of its URL). Blocks that it ends, and keys in `found`, are KVF_WHY_STALLED. A silent server is tried
     * once more on a new connection, for as long again at each step: to connect, to introduce itself, and to answer. */
    int64_t patience_us;
} kvf_batch;

/* The end of a batch. */
typedef struct kvf_completion {
    uint64_t ticket, user;
    kvf_op op;
    /* Load and match: the leading run; with KVF_EACH or arrivals the number of blocks that are there. Others: the
     * number of blocks that are KVF_OK: written, removed, renewed. */
    size_t num_ok;
    /* Zero. */
    uint64_t reserved[2];
} kvf_completion;

/* kvf_submit starts a batch. Blocks that break a rule are answered in the completion. Returns KVF_OK; KVF_AGAIN (the
 * queue is full: drop a save, or reap and try again); KVF_LIMIT (struct_size; too many blocks; an unknown `op`; a flag
 * that is unknown, or not for this op; arrivals for anything but a load, or with `reserved` not zero; a space of
 * another store; a budget or patience out of range); KVF_NOMEM; KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_submit(kvf_queue *, uint64_t *out_ticket, const kvf_batch *);
/* kvf_reap takes up to `cap` completions without waiting, and returns their number. */
KVF_API size_t kvf_reap(kvf_queue *, kvf_completion *out, size_t cap);
/* kvf_trim drops blocks from number `num` on that have not begun, of a load with arrivals. */
KVF_API void kvf_trim(kvf_queue *, uint64_t ticket, size_t num);
/* kvf_cancel drops blocks of a batch that have not begun. Blocks under way complete if they nearly have; otherwise they
 * are dropped with their connection. The completion still arrives: within 50 ms, also if the server is silent, or can't
 * be reached. Until then the memory is in use. A batch that has not begun ends at once. A block that was dropped is
 * KVF_MISS with KVF_WHY_CLOSED. */
KVF_API void kvf_cancel(kvf_queue *, uint64_t ticket);

#ifdef __cplusplus
}
#endif
#endif
