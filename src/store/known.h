/* SPDX-License-Identifier: Apache-2.0
 *
 * What this process knows to be in the store, so that it is not exported, hashed and sent again. A bounded hint, never
 * the truth: a forgotten key is saved once more, and the next match finds that a key was evicted, and forgets it.
 */
#ifndef KVFI_KNOWN_H
#define KVFI_KNOWN_H

#include <pthread.h>

#include "record/record.h"

#define KVFI_KNOWN_WAYS  4u
#define KVFI_KNOWN_SETS  8192u /* 32,768 keys, 512 KiB */
#define KVFI_KNOWN_FOR_S 600   /* then look again: the TTL may have run out */

typedef struct kvfi_known_entry {
    uint64_t tag; /* of a SHA-256, so two keys will not share one */
    uint32_t at_s;
    uint8_t tiers; /* bit t: tier t has it; 0: a load missed it */
    bool doubted;  /* tiers is 0, and the stored record may be damaged: it must be overwritten */
} kvfi_known_entry;

typedef struct kvfi_known {
    pthread_mutex_t lock;
    kvfi_known_entry *entries; /* allocated at open; KVFI_KNOWN_SETS * KVFI_KNOWN_WAYS */
} kvfi_known;

bool kvfi_known_init(kvfi_known *);
void kvfi_known_cleanup(kvfi_known *);
void kvfi_known_add(kvfi_known *, const kvf_key *, uint8_t tiers); /* it was written there, or read and verified */
void kvfi_known_see(kvfi_known *, const kvf_key *, uint8_t tiers); /* only its header was read: does not end a doubt */
/* A damaged record was found. Where one is damaged, more may be, so earlier knowledge no longer counts. Everything
 * computed from now on is written again at once, instead of one damaged block at each run. */
void kvfi_known_doubt_all(kvfi_known *);
void kvfi_known_doubt(kvfi_known *, const kvf_key *);
bool kvfi_known_doubted(kvfi_known *, const kvf_key *);
void kvfi_known_forget(kvfi_known *, const kvf_key *);
/* It must be written again, whatever its header may say: a load missed it, or the caller says so. Remembered until
 * then. */
void kvfi_known_add_missed(kvfi_known *, const kvf_key *);
bool kvfi_known_missed(kvfi_known *, const kvf_key *);
void kvfi_known_clear(kvfi_known *);
/* The tiers known to have it, as bits; 0 = not known. */
uint8_t kvfi_known_tiers(kvfi_known *, const kvf_key *);

#endif
