/* SPDX-License-Identifier: Apache-2.0
 *
 * Results, reasons and errors of all calls, and the conventions of all public headers:
 *
 *  - Pointers must not be NULL unless a call says so. Close and free calls accept NULL.
 *  - Sizes in bytes end in `_bytes` or are called `len`. Times end in `_ms`, `_us` or `_s`. Counts begin with `num_`.
 *  - Parameters are ordered: the object, outputs (`out...`, `err`), inputs, options. Outputs are defined only after
 *    KVF_OK, unless a call says so. `err` may be NULL.
 *  - The caller keeps all memory that it passes in. Memory that is read into or written from must stay valid until the
 *    call, or its completion, is over. A call that reached its deadline guarantees that nobody touches that memory any
 *    more.
 *  - Any number of threads may use a store or a space at once. A queue and a view belong to one thread at a time.
 *  - Operations on blocks never fail because of a store that is down, slow, full or corrupt. They miss, with a reason.
 *  - A budget is the longest time that a call may take, in microseconds: `int64_t budget_us`. KVF_DEFAULT (0) is the
 *    default of the call: 10 s, unless the call says otherwise. KVF_POLL does only what needs no waiting. Calls that
 *    accept KVF_POLL say so; for all others it is KVF_LIMIT, and so is any other negative budget, and one above
 *    KVF_MAX_BUDGET_US. Nothing waits without a deadline.
 *  - Structs that may grow begin with `struct_size`. Set it to sizeof the struct, for options that a call takes and for
 *    structs that it fills. Zero in any other field is its default. A program may run with an older or a newer library
 *    than it was compiled for, of the same minor version before 1.0. If an older library does not know a field, then
 *    setting it is KVF_LIMIT, and a call that fills the struct sets it to zero. A call with a struct_size that was not
 *    set returns KVF_LIMIT and does nothing.
 *  - Structs in arrays, or inside other structs, do not grow. If they may come to hold more, they end with `reserved`,
 *    which must be zero: anything else is KVF_LIMIT. Initialise such structs with `{...}` or memset.
 *  - Every call lists what it returns, and returns nothing else. Lists of blocks are answered block by block: see
 *    kvf_block.
 *  - A forked child can't use its parent's stores, spaces, views, queues and llama.cpp handles. Every call on them
 *    returns at once there. Calls that return a kvf_status return KVF_CLOSED (kvf_match returns KVF_OK and a run of 0).
 *    Blocks are misses with KVF_WHY_CLOSED, numbers are 0 (of kvf_queue_fd -1, of kvf_llama_decode -2), and calls that
 *    close, release, abandon, forget, cancel or trim do nothing. Calls that only read a space or a handle (kvf_chain,
 *    kvf_space_fields, kvf_llama_cut ...) work. A kvf_session, a kvf_earlier and a text for kvf_free are the child's
 *    own copies. A child can open its own stores and views.
 */
#ifndef KVFERRY_STATUS_H
#define KVFERRY_STATUS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define KVF_API        __attribute__((visibility("default")))
#define KVF_MUST_CHECK __attribute__((warn_unused_result))
#else
#define KVF_API
#define KVF_MUST_CHECK
#endif

/* The version of these headers. The ABI is stable within one major version from 1.0 on, and within one minor version
 * (0.3) before. */
#define KVF_VERSION "0.3.0"
/* kvf_version returns the version of the library at run time, such as "0.3.0". */
KVF_API const char *kvf_version(void);

/* Budgets. KVF_MS(250) is 250 milliseconds. With KVF_POLL memory tiers answer. What any other tier would have to be
 * asked for is out of budget (KVF_WHY_BUDGET), and what is not over yet is KVF_AGAIN. */
#define KVF_DEFAULT       INT64_C(0)
#define KVF_POLL          INT64_C(-1)
#define KVF_MS(n)         ((int64_t)(n)*1000)
#define KVF_MAX_BUDGET_US INT64_C(86400000000) /* 24 hours */

/* The result of a call. */
typedef enum kvf_status {
    KVF_OK = 0,
    /* Not there: absent, expired, evicted, out of budget, or refused by a check. See kvf_reason. */
    KVF_MISS,
    /* A bounded queue is full, or the answer is still outstanding: drop the save, or ask later. */
    KVF_AGAIN,
    /* A URL, credentials or server settings are wrong: kvf_error says what to change. */
    KVF_CONFIG,
    /* This engine, model or layout is not proven safe to reuse. */
    KVF_REFUSED,
    /* An argument is malformed, or larger than its documented bound. */
    KVF_LIMIT,
    /* The operating system or the server failed, in a call that cannot miss (administration, sessions). */
    KVF_IO,
    /* Out of memory. */
    KVF_NOMEM,
    /* The store was closed, or belongs to another process. */
    KVF_CLOSED
} kvf_status;

/* Why a block was not loaded or not saved. kvf_stats counts by these reasons. */
typedef enum kvf_reason {
    KVF_WHY_NONE = 0,
    /* No such key: never stored, expired or evicted. */
    KVF_WHY_ABSENT,
    /* The record's tokens are not the requested ones. */
    KVF_WHY_OTHER_TOKENS,
    /* The record belongs to another space, or has another key. */
    KVF_WHY_OTHER_SPACE,
    /* Header or payload do not match their checksum, or a sealed record its tag. */
    KVF_WHY_CHECKSUM,
    /* Shorter or longer than its header says, or than the destination. */
    KVF_WHY_TRUNCATED,
    /* Not a record, or one of an unknown version, flag or codec, or a plain one in a space with a secret (or the other
     * way round). */
    KVF_WHY_VERSION,
    /* The budget was used up. */
    KVF_WHY_BUDGET,
    /* No connection, or it broke. For a folder: an I/O error. */
    KVF_WHY_UNREACHABLE,
    /* The server replied with an error (OOM, READONLY, NOPERM, LOADING, ...). */
    KVF_WHY_SERVER,
    /* Not tried: the store failed a moment ago. */
    KVF_WHY_BREAKER,
    /* No room: a full disk, a memory bound, or the backlog shed it. */
    KVF_WHY_FULL,
    /* No memory for the bookkeeping of the operation. */
    KVF_WHY_NOMEM,
    /* After the first block that missed or was not accepted: left alone, and its destination is undefined. */
    KVF_WHY_AFTER_GAP,
    /* The batch was cancelled, the store was closed, or it belongs to another process. */
    KVF_WHY_CLOSED,
    /* Not loaded: computing was faster, or loading failed. */
    KVF_WHY_SLOW,
    /* Not saved: with its settings the server would lose or refuse it (kvf_doctor). */
    KVF_WHY_SETTINGS,
    /* The server is connected, and has been silent for much longer than before. */
    KVF_WHY_STALLED,
    /* The block breaks a rule of kvf_block, or the call one of its own. */
    KVF_WHY_MISUSE,
    /* For loops. Later versions of the library may know more reasons. */
    KVF_NUM_REASONS
} kvf_reason;

/* The length of arrays that are indexed by kvf_reason. It stays when reasons are added. */
#define KVF_REASON_ROOM 32

/* kvf_status_name returns "ok", "miss", ...; "unknown" for anything else. */
KVF_API const char *kvf_status_name(kvf_status);
/* kvf_reason_name returns "absent", "other-tokens", ...; "unknown" for anything else. */
KVF_API const char *kvf_reason_name(kvf_reason);

/* A failure in one sentence: what is wrong, and how to fix it. It never contains a password. Characters from a server
 * or a file that could control a terminal are replaced by question marks. The same holds for the log. */
typedef struct kvf_error {
    kvf_status status;
    char what[252];
} kvf_error;

typedef enum kvf_log_level { KVF_LOG_ERROR, KVF_LOG_WARN, KVF_LOG_INFO, KVF_LOG_DEBUG } kvf_log_level;
typedef void (*kvf_log_fn)(void *ctx, kvf_log_level, const char *message);
/* kvf_set_log directs the library's messages to `fn`. Before this call there are none. `fn` may be called from any
 * thread, at most one message at a time, and must not call back into kvferry. Call this before opening a store. */
KVF_API void kvf_set_log(kvf_log_fn fn, void *ctx, kvf_log_level max_level);

/* Returns nonzero: the call under way is to end. */
typedef int (*kvf_interrupt_fn)(void *ctx);
/* kvf_set_interrupt lets calls of this thread end before their budget: a program uses it for Ctrl-C. While such a call
 * waits, it calls `fn` on this thread, about every 20 ms and soon after a signal. Once `fn` returns nonzero, this call
 * and later ones of this thread end within 50 ms, and do not touch the caller's memory any more: what is not there yet
 * is a miss (KVF_WHY_CLOSED), or KVF_IO, or KVF_AGAIN of a flush and a fence. `fn` may call the library; such calls wait
 * to their end. NULL: no more. It acts on every call with a budget, and on administration; not on closing, and not on
 * batches of a queue (kvf_cancel). */
KVF_API void kvf_set_interrupt(kvf_interrupt_fn fn, void *ctx);

#ifdef __cplusplus
}
#endif
#endif
