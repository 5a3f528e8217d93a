/* SPDX-License-Identifier: Apache-2.0
 *
 * What a server says of itself: its state (INFO) and its settings (CONFIG GET), asked for in one round trip.
 */
#ifndef KVFI_REDIS_FACTS_H
#define KVFI_REDIS_FACTS_H

#include "redis/talk.h"

#define KVFI_UNKNOWN UINT64_MAX /* of a number: it was not told */

typedef struct kvfi_facts {
    bool info;   /* it shows its state: what comes from INFO is set */
    bool config; /* and its settings: what comes from CONFIG GET is set */
    /* INFO */
    char version[32], name[32], policy[32], allocator[32], role[16], mode[16];
    uint64_t loading, aof, replicas, backlog, pid; /* loading and aof: 0 or 1 */
    uint64_t maxmemory, used, resident;            /* bytes */
    char bgsave[16], aof_write[16];                /* "ok" or "err": the last snapshot, the last write to the log */
    /* CONFIG GET */
    uint64_t max_bulk, io_threads, samples;
    uint64_t output_limit, clients_limit; /* bytes; 0 = none: of one client's answers (hard), of the buffers of all */
    char save[128], stop_writes[8];
    /* the host, where the server is on this one */
    uint64_t swapped; /* bytes of the server's memory */
} kvfi_facts;

/* Queues the questions, but those that the server is known not to answer. `settings`: CONFIG GET too. */
kvf_status kvfi_facts_ask(kvfi_talk *, bool settings);
/* Hears the answers. A server that refuses to tell leaves `info` or `config` false, and so does one that is well, but
 * ends the connection or is silent when it is asked: then the talk goes on over another connection, and it is not asked
 * any more. KVF_IO only where the connection is gone for other reasons. */
kvf_status kvfi_facts_hear(kvfi_talk *, kvfi_facts *out, bool settings);
/* What the host knows of the server, when that runs on this one. */
void kvfi_facts_look_around(kvfi_facts *, const kvfi_endpoint *);

#endif
