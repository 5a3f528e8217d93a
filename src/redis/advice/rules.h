/* SPDX-License-Identifier: Apache-2.0
 *
 * The one table of the settings that a server should have, and of what follows otherwise. Opening a store, saves
 * (admit.c) and the doctor use it. Pure: facts in, findings and a verdict out. docs/stores-redis.md explains it for
 * people.
 */
#ifndef KVFI_REDIS_RULES_H
#define KVFI_REDIS_RULES_H

#include "redis/advice/facts.h"

#define KVFI_DEFAULT_BUDGET ((uint64_t)1 << 30)

/* How much is put on a server at once: as in the URL, or less. */
typedef struct kvfi_fit {
    uint64_t part, window;
    uint32_t conns, save_conns;
} kvfi_fit;

/* The consequences for a store. */
typedef struct kvfi_verdict {
    kvf_reason saves; /* KVF_WHY_NONE; or why nothing is saved there: KVF_WHY_SETTINGS, KVF_WHY_FULL. Loads go on. */
    const char *code; /* of the finding that forbids it; "" = none */
    bool elsewhere;   /* the server is a replica: the primary is another one */
    kvfi_fit fit;
    uint64_t longest; /* longest value that is kept whole */
    uint64_t most;    /* bytes that the server holds before it evicts; 0 = it does not evict, or unknown */
    uint64_t room;    /* bytes that may be saved before it is asked again; KVFI_UNKNOWN: it has its own bound */
} kvfi_verdict;

/* Judges by the settings of the URL. `found` may be NULL; it is called for each violated rule. */
void kvfi_rules_judge(kvfi_verdict *out, const kvfi_facts *, const kvfi_redis_conf *, const kvfi_endpoint *at,
                      kvf_finding_fn found, void *ctx);

#endif
