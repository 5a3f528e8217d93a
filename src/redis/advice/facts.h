/* SPDX-License-Identifier: Apache-2.0
 *
 * What a server says of itself: its state (INFO) and its settings (CONFIG GET), requested in one round trip.
 */
#ifndef KVFI_REDIS_FACTS_H
#define KVFI_REDIS_FACTS_H

#include "redis/cluster/talk.h"

#define KVFI_UNKNOWN UINT64_MAX /* a number that the server did not give */

typedef struct kvfi_facts {
    unsigned asked; /* bits: kvfi_probe */
    bool info;      /* the fields from INFO are set */
    bool config;    /* the fields from CONFIG GET are set */
    /* INFO */
    char version[32], name[32], policy[32], allocator[32], role[16], mode[16];
    uint64_t loading, aof, replicas, backlog, pid; /* loading and aof: 0 or 1 */
    uint64_t maxmemory, used, resident;            /* bytes */
    char bgsave[16], aof_write[16];                /* "ok" or "err": the last snapshot, the last write to the log */
    /* CONFIG GET */
    uint64_t max_bulk, io_threads, samples;
    uint64_t output_limit, clients_limit; /* bytes; 0 = none: of one client's answers (hard), of the buffers of all */
    char save[128], stop_writes[8];
    /* from the host, if the server runs on this one */
    uint64_t swapped; /* bytes of the server's memory */
} kvfi_facts;

/* Queues the questions, except those that the server is known not to answer. `settings`: CONFIG GET too. */
kvf_status kvfi_facts_ask(kvfi_talk *, kvfi_facts *out, bool settings);
/* Reads the answers to those questions. A server that refuses to answer leaves `info` or `config` false. So does a
 * healthy server that ends the connection or stays silent after the question: then the talk continues on another
 * connection, and the question is not asked again, or after silence later. KVF_IO only if the connection ended for
 * another reason. */
kvf_status kvfi_facts_hear(kvfi_talk *, kvfi_facts *);
/* What the host knows of the server, if the server runs on this host. */
void kvfi_facts_look_around(kvfi_facts *, const kvfi_endpoint *);

#endif
