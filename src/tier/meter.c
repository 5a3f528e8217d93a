/* SPDX-License-Identifier: Apache-2.0
 *
 * Measures how fast one tier delivers. Time counts only while loads are under way, and of each lull only up to the last
 * byte: a store that nobody asks is not slow.
 */
#include "tier/meter.h"

#include "base/base.h"

void kvfi_meter_init(kvfi_meter *meter) {
    pthread_mutex_init(&meter->lock, NULL);
}

void kvfi_meter_cleanup(kvfi_meter *meter) {
    pthread_mutex_destroy(&meter->lock);
}

void kvfi_meter_moved(kvfi_meter *meter, size_t bytes) {
    atomic_store_explicit(&meter->at_us, kvfi_sys->now_us(), memory_order_relaxed);
    atomic_fetch_add_explicit(&meter->bytes, bytes, memory_order_release);
}

/* Under the lock: adds to the link what has arrived until then. */
static void look(kvfi_meter *meter, int64_t until_us) {
    uint64_t bytes = atomic_load_explicit(&meter->bytes, memory_order_acquire), came = bytes - meter->seen;
    meter->seen = bytes;
    if (until_us > meter->looked_us) {
        kvfi_link_note(&meter->link, until_us, came, until_us - meter->looked_us);
        meter->looked_us = until_us;
    } else {
        meter->link.bytes += (double)came; /* earlier than a round trip */
    }
}

void kvfi_meter_begin(kvfi_meter *meter) {
    pthread_mutex_lock(&meter->lock);
    if (meter->active++ == 0) {
        meter->looked_us = kvfi_sys->now_us() + (int64_t)meter->link.round_trip_us;
    }
    pthread_mutex_unlock(&meter->lock);
}

/* The last load: its time after its last byte does not count, unless it was dropped because nothing came. */
void kvfi_meter_end(kvfi_meter *meter, bool gave_up) {
    pthread_mutex_lock(&meter->lock);
    if (--meter->active == 0) {
        look(meter, gave_up ? kvfi_sys->now_us() : atomic_load_explicit(&meter->at_us, memory_order_relaxed));
    }
    pthread_mutex_unlock(&meter->lock);
}

void kvfi_meter_note_round_trip(kvfi_meter *meter, int64_t us) {
    pthread_mutex_lock(&meter->lock);
    kvfi_link_note_round_trip(&meter->link, us > 0 ? us : 1);
    pthread_mutex_unlock(&meter->lock);
}

kvf_link kvfi_meter_tell(kvfi_meter *meter) {
    pthread_mutex_lock(&meter->lock);
    int64_t now_us = kvfi_sys->now_us();
    if (meter->active > 0) {
        look(meter, now_us);
    }
    kvf_link link = kvfi_link_tell(&meter->link, now_us);
    pthread_mutex_unlock(&meter->lock);
    return link;
}
