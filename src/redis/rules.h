/* SPDX-License-Identifier: Apache-2.0
 *
 * The one table of what a server should be set to, and of what follows where it is not: the store's open and its saves
 * (admit.c) and the doctor go by it. Pure: facts in, findings and a verdict out. docs/stores-redis.md has it for
 * people.
 */
#ifndef KVFI_REDIS_RULES_H
#define KVFI_REDIS_RULES_H

#include "redis/facts.h"

#define KVFI_DEFAULT_BUDGET ((uint64_t)1 << 30)

/* How much is put on a server at once: as the URL says, or less. */
typedef struct kvfi_fit {
    uint64_t part, window;
    uint32_t conns, save_conns;
} kvfi_fit;

/* What follows for a store. */
typedef struct kvfi_verdict {
    kvf_reason
        saves; /* KVF_WHY_NONE; or nothing is saved there, and why: KVF_WHY_SETTINGS, KVF_WHY_FULL. Loads go on. */
    const char *code; /* of the finding that forbids it; "" = none does */
    bool elsewhere;   /* the server is a replica: the primary is another one */
    kvfi_fit fit;
    uint64_t longest; /* bytes of a value that is kept whole */
    uint64_t most;    /* bytes that the server holds before it evicts; 0 = it does not, or that is not known */
    uint64_t room;    /* bytes that may be saved before it is asked anew; KVFI_UNKNOWN: it bounds itself */
} kvfi_verdict;

/* Judges by the settings of the URL. `found` may be NULL; it hears of each rule that does not hold. */
void kvfi_rules_judge(kvfi_verdict *out, const kvfi_facts *, const kvfi_redis_conf *, kvf_finding_fn found, void *ctx);

#endif
