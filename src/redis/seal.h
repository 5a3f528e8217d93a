/* SPDX-License-Identifier: Apache-2.0
 *
 * Two threads on one feed that is put over one connection: one writes, the other seals (hashes) the value that comes next. So sealing
 * costs the connection no time, where there is a core for it; where there is none, the writer seals as well.
 */
#ifndef KVFI_REDIS_SEAL_H
#define KVFI_REDIS_SEAL_H

#include <pthread.h>

#include "store/tier.h"

#define KVFI_SEALS 4u /* feeds at once; on any more a writer is alone */

/* One pair. All of it under the lock of the table. */
typedef struct kvfi_seal {
    struct kvfi_seals *table;
    kvfi_feed         *feed;    /* NULL: nobody is here */
    kvfi_item         *ready;   /* sealed, and not taken yet */
    bool               helped;  /* the other thread is here */
    bool               sealing; /* it is at it right now */
    bool               ending;
} kvfi_seal;

typedef struct kvfi_seals {
    pthread_mutex_t lock;
    pthread_cond_t  moved;
    kvfi_seal       pairs[KVFI_SEALS];
} kvfi_seals;

void kvfi_seals_init(kvfi_seals *);
void kvfi_seals_cleanup(kvfi_seals *);

/* The first thread that comes with a feed is its writer, and gets its pair, or NULL where there is none to have. The second seals: false at
 * once for any further one, and for a second one after it has sealed all there was to seal. */
bool kvfi_seal_begin(kvfi_seals *, kvfi_seal **out, kvfi_feed *);
/* The writer's way to draw from the feed. */
kvfi_item *kvfi_seal_next(kvfi_seal *, kvfi_feed *);
/* The writer leaves. An item that was sealed and not drawn is handed to it, to be given back. */
kvfi_item *kvfi_seal_end(kvfi_seal *);

#endif
