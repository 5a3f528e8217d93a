/* SPDX-License-Identifier: Apache-2.0
 *
 * The commands of a load or a save that have been sent on one connection, or are about to be, and are not answered:
 * in the order of their replies.
 */
#ifndef KVFI_REDIS_RING_H
#define KVFI_REDIS_RING_H

#include "redis/blocks/blocks.h"

#define KVFI_RING 256u

/* One command. */
typedef struct kvfi_request {
    kvfi_item *item; /* NULL: nobody needs the reply, as to a PEXPIRE or an ASKING */
    kvfi_place place;
    bool last; /* of its item */
} kvfi_request;

typedef struct kvfi_ring {
    kvfi_request requests[KVFI_RING];
    unsigned head, num;
    uint64_t bytes; /* of the places */
    kvfi_item
        *item;      /* the item whose parts are being requested or sent; NULL: none, or all its parts are in the ring */
    kvf_reason why; /* of the item at the head, so far */
} kvfi_ring;

static inline void kvfi_ring_init(kvfi_ring *ring) {
    ring->head = ring->num = 0;
    ring->bytes = 0;
    ring->item = NULL;
    ring->why = KVF_WHY_NONE;
}
static inline kvfi_request *kvfi_ring_at(kvfi_ring *ring, unsigned index) {
    return &ring->requests[(ring->head + index) % KVFI_RING];
}
static inline void kvfi_ring_push(kvfi_ring *ring, const kvfi_request *request) {
    *kvfi_ring_at(ring, ring->num++) = *request;
    ring->bytes += request->place.bytes;
}
/* The request at the head has been answered. */
static inline void kvfi_ring_pop(kvfi_ring *ring) {
    ring->bytes -= kvfi_ring_at(ring, 0)->place.bytes;
    ring->head++;
    ring->num--;
}
/* The request that was just popped has failed, and so has its item: no further part of the item is needed. Returns true
 * when none is under way. */
bool kvfi_ring_fail(kvfi_ring *, const kvfi_request *, kvf_reason);
/* The item at the head is complete. Its memory is not touched any more. */
void kvfi_ring_finish(kvfi_ring *, kvfi_feed *, kvfi_item *);
/* The connection is gone: all items that were under way are lost, except the first if one of its parts has failed. The
 * server may still read what was `lent` to it. */
void kvfi_ring_abandon(kvfi_ring *, kvfi_feed *, kvfi_lost *, kvf_reason, bool lent);

#endif
