/* SPDX-License-Identifier: Apache-2.0
 *
 * Results, reasons and errors: what every other header of kvferry speaks in.
 *
 * Conventions of all public headers, said once:
 *  - Pointers are not NULL unless said. close and free calls accept NULL. Sizes in bytes end in `_bytes` (or are called
 *    `len`), times in `_ms`, `_us` or `_s`, counts start with `num_`.
 *  - Order of parameters: the object, outputs (`out...`, `err`), inputs, options. Outputs are defined only after
 *    KVF_OK, unless said.
 *  - Memory handed in stays the caller's. Memory that is read into or written from must stay valid until the call, or
 *    its completion, is over; a call that gave up on its deadline has made sure that nobody touches that memory any
 *    more.
 *  - `err` may be NULL wherever a call takes one.
 *  - Stores and spaces may be used from any thread at once; a queue and a view belong to one thread at a time.
 *  - A store that is down, slow, full or wrong is never an error of an operation on blocks: it is a miss, with its
 *    reason.
 *  - Budgets, the most time a call may take, are microseconds: `int64_t budget_us`. KVF_DEFAULT (0) is the default of
 *    the call: 10 s, unless the call says otherwise. KVF_POLL does only what needs no waiting. Any other negative
 *    budget, and one above KVF_MAX_BUDGET_US, is KVF_LIMIT, and so is KVF_POLL in calls that do not take it. Nothing
 *    waits without a deadline.
 *  - Structs that may grow begin with `struct_size`: set it to sizeof the struct, of the options that a call takes and
 *    of the structs that it fills. Zero in any other field is its default. A program may run with an older or a newer
 *    library than it was compiled for, of the same minor version before 1.0. What an older library does not know: a
 *    field that is set is KVF_LIMIT, one that is to be filled is zero. A call whose struct_size was not set answers
 *    KVF_LIMIT and does nothing.
 *  - Structs that lie in arrays or in other structs don't grow. Where they may come to hold more, they end with
 *    `reserved`, which is zero: a call that is given anything else there answers KVF_LIMIT. Initialise them with
 *    `{...}` or memset, so that all fields that you don't name are zero.
 *  - Each call lists what it returns, and returns nothing else. A list of blocks is answered block by block: see
 *    kvf_block.
 *  - In a forked child the stores, spaces, views and queues of the parent must not be used. No call waits there: calls
 *    that return a kvf_status answer KVF_CLOSED, blocks are misses with KVF_WHY_CLOSED, calls that close, free or give
 *    back something do nothing, and what only reads a space (kvf_chain, kvf_space_fields ...) works. A child can open
 *    stores of its own.
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

/* The ABI is stable within one major version from 1.0 on, and within one minor version (0.3) before. kvf_version
 * returns the version of the library at run time, e.g. "0.3.0". */
#define KVF_VERSION "0.3.0"
KVF_API const char *kvf_version(void);

/* Budgets. KVF_MS(250) is 250 milliseconds. KVF_POLL: memory tiers answer; what any other tier would have to be asked
 * for is out of budget (KVF_WHY_BUDGET), and what is not over yet is KVF_AGAIN. */
#define KVF_DEFAULT       INT64_C(0)
#define KVF_POLL          INT64_C(-1)
#define KVF_MS(n)         ((int64_t)(n)*1000)
#define KVF_MAX_BUDGET_US INT64_C(86400000000) /* 24 hours */

typedef enum kvf_status {
    KVF_OK = 0,
    KVF_MISS,    /* not there: absent, expired, evicted, out of budget, or refused by a check; see kvf_reason */
    KVF_AGAIN,   /* a bounded queue is full, or the answer is on its way: drop the store, or ask later */
    KVF_CONFIG,  /* a URL, credentials or server settings: kvf_error says what to change */
    KVF_REFUSED, /* this engine, model or layout is not proven safe to reuse */
    KVF_LIMIT,   /* an argument is larger than its documented bound, or malformed */
    KVF_IO,      /* the operating system or the server failed where the call can't be a miss (admin calls, sessions) */
    KVF_NOMEM,
    KVF_CLOSED /* the store was closed, or belongs to another process */
} kvf_status;

/* Why a block did not load, or was not stored. Counted under these names (kvf_reason_name) in kvf_stats. */
typedef enum kvf_reason {
    KVF_WHY_NONE = 0,
    KVF_WHY_ABSENT,       /* no such key: never stored, expired or evicted */
    KVF_WHY_OTHER_TOKENS, /* the record's tokens are not the tokens asked for */
    KVF_WHY_OTHER_SPACE,  /* the record belongs to another space or carries another key */
    KVF_WHY_CHECKSUM,     /* header or payload do not match their checksum, or a sealed record its tag */
    KVF_WHY_TRUNCATED,    /* shorter or longer than its header, or than the memory it should fill */
    KVF_WHY_VERSION,      /* not a record, one of a version, flag or codec that this library does not know, or a plain
                             one in a space with a secret (or the other way round) */
    KVF_WHY_BUDGET,       /* the time budget was used up */
    KVF_WHY_UNREACHABLE,  /* no connection, or it broke; for a folder: an I/O error */
    KVF_WHY_SERVER,       /* the server answered with an error (OOM, READONLY, NOPERM, LOADING, ...) */
    KVF_WHY_BREAKER,      /* not even tried: the store failed a moment ago */
    KVF_WHY_FULL,         /* no room: disk full, memory bound, or the backlog shed it */
    KVF_WHY_NOMEM,        /* no memory for the bookkeeping of the operation */
    /* Behind the first block that missed or was not taken: left alone, its destination is undefined. */
    KVF_WHY_AFTER_GAP,
    KVF_WHY_CLOSED,
    KVF_WHY_SLOW,     /* not loaded: computing it was sooner */
    KVF_WHY_SETTINGS, /* not stored: as the server is set up, it would lose or refuse it (kvf_doctor) */
    KVF_WHY_STALLED,  /* the server is connected, and nothing came from it for much longer than it had taken before */
    KVF_WHY_MISUSE,   /* the block breaks a rule of kvf_block, or the call one of its own */
    KVF_NUM_REASONS   /* for loops; later versions of the library may know more */
} kvf_reason;

/* The length of arrays that are indexed by kvf_reason. It stays when reasons are added. */
#define KVF_REASON_ROOM 32

/* One sentence: what is wrong, and what mends it. Never holds a password, nor what must not be shown on a terminal:
 * control characters that a server or a file said are question marks. The same holds for the log. */
typedef struct kvf_error {
    kvf_status status;
    char what[252];
} kvf_error;

KVF_API const char *kvf_status_name(kvf_status); /* "ok", "miss", ...; "unknown" for anything else */
KVF_API const char *kvf_reason_name(kvf_reason); /* "absent", "other-tokens", ... */

/* Where the library's messages go; none are written until this is called. `fn` may be called from any thread, at most
 * one message at a time, and must not call back into kvferry. Set it before the first store is opened. */
typedef enum kvf_log_level { KVF_LOG_ERROR, KVF_LOG_WARN, KVF_LOG_INFO, KVF_LOG_DEBUG } kvf_log_level;
typedef void (*kvf_log_fn)(void *ctx, kvf_log_level, const char *message);
KVF_API void kvf_set_log(kvf_log_fn fn, void *ctx, kvf_log_level max_level);

#ifdef __cplusplus
}
#endif
#endif
