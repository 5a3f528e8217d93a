/* SPDX-License-Identifier: Apache-2.0
 *
 * Stores: where blocks are stored. One URL is one tier. Several URLs are tiers of one store, fastest first.
 *
 *   const char *urls[] = {"mem:?max=2G", "redis://cache:6379/0"};
 *   kvf_store_open(&store, &err, urls, 2, NULL);
 *   ... spaces, blocks, sessions ...
 *   kvf_store_close(store);
 *
 * URLs, with some of their parameters:
 *
 *   mem:                                                this process;                  ?max=1G
 *   file:/var/cache/kvferry                             a folder, shared by processes; ?max=10G&ttl=0
 *                                                       &tenant=name&tenant_max=2G
 *   redis://[user:password@]host[:port][/db]            ?ttl=3600&prefix=kvf1&conns=2&window=1M&part=4190208&lend=true
 *                                                       &connect_ms=1000&stall_ms=250&budget=1G&name=kvferry
 *                                                       &allow_noeviction=false
 *   redis+unix:///run/redis.sock                        ?db=0 and the same
 *   redis+cluster://[user:password@]host:port,host:port a Cluster: some of its nodes
 *   redis+sentinel://[user:password@]host,host/name     the master that these sentinels name;
 *                                                       ?sentinel_user=&sentinel_password=
 *   rediss://, rediss+cluster://, rediss+sentinel://    with TLS; ?ssl_ca_certs=file&ssl_certfile=&ssl_keyfile=
 *
 * Sizes take K, M, G, T (1024-based). docs/stores-file.md and docs/stores-redis.md explain every parameter. An unknown
 * parameter is KVF_CONFIG, never ignored.
 */
#ifndef KVFERRY_STORE_H
#define KVFERRY_STORE_H

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_store kvf_store;

/* Options of a store. Zero in any field but struct_size is its default. */
typedef struct kvf_options {
    uint32_t struct_size;
    /* Not 0: sessions are sealed under the secret too, and only sealed sessions are loaded (docs/session-format.md). */
    int seal_sessions;
    /* A budget: how long kvf_store_close waits for blocks that are being written. KVF_DEFAULT is 5 s. KVF_POLL drops
     * them. */
    int64_t drain_us;
    /* Bound of blocks that wait to be written. Further blocks are shed. 0 = 256 MiB. */
    size_t backlog_bytes;
    /* Threads that load, beside the caller's. 0 = as many as the tiers can use. */
    uint32_t load_threads;
    /* Threads that write. 0 = as many as the tiers can use. */
    uint32_t store_threads;
    /* A tenant's secret (see kvf_space_options), for all spaces of this store without one of their own, and for what
     * kvf_walk and kvf_space_describe read. With a previous secret, both are read and the first is written. 16 to 1024
     * bytes each; copied. NULL = none. */
    const void *secret, *previous_secret;
    size_t secret_len, previous_secret_len;
    /* The same from files: one path, or two with ':' between them, the new secret first. A file must be a regular file
     * of this user or root that nobody else can read or write. It holds 16 to 1024 bytes, and optionally a newline.
     * NULL = none. */
    const char *secret_files;
    /* KVF_OPEN_EXISTING. Another flag is KVF_LIMIT. */
    uint64_t flags;
} kvf_options;

/* For programs that only read: a `file:` store that is not there is KVF_CONFIG, instead of created. */
#define KVF_OPEN_EXISTING 1u

/* kvf_store_open opens the tiers named by `urls`, fastest first. `options` may be NULL. It starts no threads: the first
 * operation that needs them does.
 *
 * A server that is down is not an error: the store opens, misses, and tries it again. Neither is a server whose
 * settings would lose or refuse blocks (kvf_doctor): nothing is saved to it until they are fixed, loads go on, and the
 * log has a warning.
 *
 * Returns KVF_OK; KVF_CONFIG (the operator must change something: `err` says what); KVF_LIMIT (struct_size, an
 * unknown flag, drain_us out of range, a secret that is too short or too long, a previous secret alone); KVF_NOMEM. */
KVF_API KVF_MUST_CHECK kvf_status kvf_store_open(kvf_store **out, kvf_error *err, const char *const *urls,
                                                 size_t num_urls, const kvf_options *options);

/* kvf_store_close waits up to drain_us for the backlog, ends the threads, and frees the store. If a server stalls at
 * that moment, it waits up to 4 x `stall_ms` more for a record that is half sent, 20 x if the server was slow before.
 * Close or release all spaces, queues, borrowed blocks and sessions of the store first, and commit or abandon all
 * reservations: the memory of those that are still out is gone. */
KVF_API void kvf_store_close(kvf_store *);

/* kvf_store_flush waits until the blocks that were handed over before it are written or given up. It does not wait for
 * blocks that are handed over later. *out_unwritten (may be NULL; set after KVF_OK, KVF_MISS and KVF_AGAIN) is the
 * number of them that kvf_save or kvf_commit accepted and that could not be written after all. Each such block is
 * reported once: by the flush that waits for it, or else by the next one, on any thread. kvf_stats has the reasons.
 * Takes KVF_POLL.
 *
 * Returns KVF_OK (every tier has them all); KVF_MISS (*out_unwritten of them were not written); KVF_AGAIN (the budget
 * ended first; *out_unwritten is what is known so far); KVF_LIMIT (the budget is out of range); KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_store_flush(kvf_store *, uint64_t *out_unwritten, int64_t budget_us);

/* Counters since the store was opened, summed over its tiers unless a field says otherwise. */
typedef struct kvf_stats {
    uint32_t struct_size;
    uint32_t num_tiers;
    /* Keys that kvf_match looked up. lookup_hits <= lookups. */
    uint64_t lookups;
    uint64_t lookup_hits;
    /* How often a lookup waited for a server: once a call (and shard), for any number of keys. */
    uint64_t lookup_round_trips;
    /* Blocks requested by load or borrow: load_hits + the sum of misses, once they are complete. Not counted: blocks
     * that a borrow could not lend, and blocks of a load with arrivals that were not begun. */
    uint64_t loads;
    uint64_t load_hits;
    /* Blocks that were not loaded, by reason. */
    uint64_t misses[KVF_REASON_ROOM];
    uint64_t loaded_bytes;
    /* Blocks handed to kvf_save, kvf_commit or a queue: saved + known + the sum of save_failures, once they are
     * complete. Cards of spaces and copies to a faster tier are not included. */
    uint64_t saves;
    /* Written to every tier. */
    uint64_t saved;
    /* Not written because the store has them. */
    uint64_t known;
    /* Not accepted, or not written, by reason. */
    uint64_t save_failures[KVF_REASON_ROOM];
    uint64_t saved_bytes;
    /* Blocks copied to a faster tier. */
    uint64_t promoted;
    /* Connections opened. */
    uint64_t connects;
    /* ... of these, closed after an error or a deadline. */
    uint64_t disconnects;
    /* Blocks that wait to be written, now. */
    size_t backlog_bytes;
    /* The most that ever waited. */
    size_t backlog_peak_bytes;
} kvf_stats;

/* kvf_store_stats reads the counters. At any time the outcomes of an operation never exceed its count. Returns KVF_OK;
 * KVF_LIMIT (out->struct_size was not set); KVF_CLOSED. */
KVF_API kvf_status kvf_store_stats(kvf_store *, kvf_stats *out);

#ifdef __cplusplus
}
#endif
#endif
