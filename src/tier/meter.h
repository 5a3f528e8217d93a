/* SPDX-License-Identifier: Apache-2.0
 *
 * How fast one tier delivers, measured by the loads and lookups themselves.
 */
#ifndef KVFI_METER_H
#define KVFI_METER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "plan/link.h"

typedef struct kvfi_meter {
    /* Counted without the lock, by the threads that read bytes of a load. */
    _Atomic uint64_t bytes;
    _Atomic int64_t at_us; /* when they last grew */
    pthread_mutex_t lock;
    unsigned active; /* loads under way */
    uint64_t seen;   /* bytes that are in `link` */
    /* Arrivals until then are in `link`. In the future while the first byte of a load can't have arrived yet. */
    int64_t looked_us;
    kvfi_link link;
} kvfi_meter;

void kvfi_meter_init(kvfi_meter *);
void kvfi_meter_cleanup(kvfi_meter *);
/* A load begins, and ends. `gave_up`: it ended before all of it was answered. */
void kvfi_meter_begin(kvfi_meter *);
void kvfi_meter_end(kvfi_meter *, bool gave_up);
void kvfi_meter_moved(kvfi_meter *, size_t bytes);
/* A lookup was answered. */
void kvfi_meter_note_round_trip(kvfi_meter *, int64_t us);
kvf_link kvfi_meter_tell(kvfi_meter *);

#endif
