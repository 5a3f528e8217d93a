/* SPDX-License-Identifier: Apache-2.0
 *
 * Stores: where blocks live. One URL is one tier; several are tiers of one store, fastest first.
 *
 *   mem:                                                in this process;               ?max=1G
 *   file:/var/cache/kvferry                             a folder, shared by processes;
 *   ?max=10G&ttl=0&tenant=name&tenant_max=2G
 *   redis://[user:password@]host[:port][/db]            ?ttl=3600&prefix=kvf1&conns=2&window=1M&part=4190208
 *   redis+unix:///run/redis.sock                        ?db=0 and the same &connect_ms=1000&stall_ms=250&name=kvferry
 *                                                       &budget=1G&allow_noeviction=false&lend=true
 *   redis+cluster://[user:password@]host:port,host:port a Cluster: some of its nodes
 *   redis+sentinel://[user:password@]host,host/name     the master that these sentinels name;
 *                                                       ?sentinel_user=&sentinel_password=
 *   rediss://, rediss+cluster://, rediss+sentinel://    with TLS; ?ssl_ca_certs=file&ssl_certfile=&ssl_keyfile=
 *
 * Sizes take K, M, G, T (1024-based). docs/stores-file.md and docs/stores-redis.md explain every parameter. An unknown
 * one is KVF_CONFIG, never ignored.
 */
#ifndef KVFERRY_STORE_H
#define KVFERRY_STORE_H

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_store kvf_store;

typedef struct kvf_options {
    uint32_t struct_size;
    /* Sessions, too, are sealed under the secret, and only such are loaded (docs/session-format.md). */
    int seal_sessions;
    /* A budget: how long kvf_store_close waits for blocks on their way out. KVF_DEFAULT is 5 s; KVF_POLL drops them. */
    int64_t drain_us;
    size_t backlog_bytes;   /* bound of blocks waiting to be written; more are shed; 0 = 256 MiB */
    uint32_t load_threads;  /* threads that help to load beside the caller's; 0 = as many as the tiers have use for */
    uint32_t store_threads; /* threads that write; 0 = as many as the tiers have use for */
    /* A tenant's secret (kvf_space_options), for all spaces of this store that are given none of their own, and for
     * what kvf_walk and kvf_space_describe read. With a previous one, both read and the first writes. 16 to 1024 bytes
     * each; copied. NULL = none. */
    const void *secret, *previous_secret;
    size_t secret_len, previous_secret_len;
    /* The same from files: one path, or two with ':' between them, the new secret first. A file is a regular one of
     * this user or root that nobody else can read or write, with 16 to 1024 bytes and a line end or none. NULL = none.
     * */
    const char *secret_files;
} kvf_options;

/* kvf_store_open opens the tiers named by `urls`, fastest first. Fails only on what the operator must change
 * (KVF_CONFIG), on a secret that is too short or too long (KVF_LIMIT) or without memory; an unreachable server opens,
 * answers misses, and is tried again. A server whose settings would lose or refuse what is stored (kvf_doctor) opens
 * too: nothing is saved to it until that was mended, loads go on, and the log has a warning. `options` may be NULL.
 * Threads are started by the first operation that has use for them, not here. */
KVF_API KVF_MUST_CHECK kvf_status kvf_store_open(kvf_store **out, kvf_error *err, const char *const *urls,
                                                 size_t num_urls, const kvf_options *options);

/* kvf_store_close waits up to drain_us for the backlog, ends the threads and frees the store. Where a server stalls
 * just then, what is half sent is waited for up to 4 x `stall_ms` more, 20 x where it was slow before. Spaces, queues,
 * borrowed blocks and sessions of the store must be closed or released before. */
KVF_API void kvf_store_close(kvf_store *);

/* kvf_store_flush waits until the blocks that were handed over before it are written or given up; it does not wait for
 * what is handed over later. *out_unwritten (may be NULL; set after KVF_OK, KVF_MISS and KVF_AGAIN) is how many of them
 * were taken by kvf_save or kvf_commit and could not be written after all. Each such block is told once: by the flush
 * that waits for it, or else by the next one, from whatever thread. kvf_stats has the reasons. Takes KVF_POLL.
 * Returns:
 *   KVF_OK      every tier has them all
 *   KVF_MISS    *out_unwritten of them were not written
 *   KVF_AGAIN   the budget ended first; *out_unwritten is what is known so far
 *   KVF_LIMIT   the budget is out of range
 *   KVF_CLOSED  the store belongs to another process */
KVF_API KVF_MUST_CHECK kvf_status kvf_store_flush(kvf_store *, uint64_t *out_unwritten, int64_t budget_us);

/* Counters since the store was opened, summed over its tiers where nothing else is said. */
typedef struct kvf_stats {
    uint32_t struct_size;
    uint32_t num_tiers;
    /* Keys asked for by kvf_match. lookup_hits <= lookups. */
    uint64_t lookups;
    uint64_t lookup_hits;
    uint64_t lookup_round_trips; /* times that a lookup waited for a server: 1 a call (and shard), whatever the number
                                    of keys */
    /* Blocks asked for by load or borrow: load_hits + the sum of misses, once they are over. Not counted: what a borrow
     * could not lend, and blocks of a load with arrivals that were not begun. */
    uint64_t loads;
    uint64_t load_hits;
    uint64_t misses[KVF_REASON_ROOM]; /* blocks that did not load, by reason */
    uint64_t loaded_bytes;
    /* Blocks handed to kvf_save, kvf_commit or a queue: saved + known + the sum of save_failures, once they are over.
     * The cards of spaces and copies to a faster tier are not among them. */
    uint64_t saves;
    uint64_t saved;                          /* written to every tier */
    uint64_t known;                          /* not written because the store has them */
    uint64_t save_failures[KVF_REASON_ROOM]; /* not taken, or not written, by reason */
    uint64_t saved_bytes;
    uint64_t promoted;         /* blocks copied up to a faster tier */
    uint64_t connects;         /* connections opened */
    uint64_t disconnects;      /* ... of these, closed after an error or a deadline */
    size_t backlog_bytes;      /* blocks waiting to be written, now */
    size_t backlog_peak_bytes; /* the most that ever waited */
} kvf_stats;
/* kvf_store_stats reads them. At any time the outcomes are at most what they are outcomes of. Returns KVF_OK; KVF_LIMIT
 * (out->struct_size was not set); KVF_CLOSED. */
KVF_API kvf_status kvf_store_stats(kvf_store *, kvf_stats *out);

#ifdef __cplusplus
}
#endif
#endif
