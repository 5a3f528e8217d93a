/* SPDX-License-Identifier: Apache-2.0
 *
 * What becomes of the items of a ring: failed in one part, complete, or lost with their connection.
 */
#include "redis/blocks/ring.h"

bool kvfi_ring_fail(kvfi_ring *ring, const kvfi_request *request, kvf_reason why) {
    if (ring->why != KVF_WHY_NONE) {
        return request->last; /* the first reason stays */
    }
    ring->why = why;
    if (ring->item != request->item) {
        return request->last;
    }
    ring->item = NULL;
    for (unsigned i = ring->num; i > 0; i--) {
        if (kvfi_ring_at(ring, i - 1)->item == request->item) {
            kvfi_ring_at(ring, i - 1)->last = true;
            return false;
        }
    }
    return true;
}

void kvfi_ring_finish(kvfi_ring *ring, kvfi_feed *feed, kvfi_item *item) {
    kvf_reason why = ring->why;
    ring->why = KVF_WHY_NONE;
    kvfi_feed_done(feed, item, why == KVF_WHY_NONE ? KVF_OK : KVF_MISS, why);
}

/* The first item of which something is under way. A reply that nobody needs may come before that. */
static kvfi_item *first_item(kvfi_ring *ring) {
    kvfi_item *item = NULL;
    for (unsigned i = 0; i < ring->num && item == NULL; i++) {
        item = kvfi_ring_at(ring, i)->item;
    }
    return item;
}

/* Last first, because lost items are taken from a stack. The parts of an item lie side by side. */
void kvfi_ring_abandon(kvfi_ring *ring, kvfi_feed *feed, kvfi_lost *lost, kvf_reason why, bool lent) {
    kvfi_item *failed = ring->why != KVF_WHY_NONE ? first_item(ring) : NULL;
    const kvfi_item *behind = NULL;
    lost->why = why;
    for (unsigned i = ring->num + 1; i > 0; i--) {
        kvfi_item *item = i > ring->num ? ring->item : kvfi_ring_at(ring, i - 1)->item;
        if (item == NULL || item == behind) {
            continue;
        }
        behind = item;
        item->lent = item->lent || (lent && item->may_lend);
        if (item != failed) {
            kvfi_lost_add(lost, item);
        }
    }
    if (failed != NULL) {
        kvfi_feed_done(feed, failed, KVF_MISS, ring->why);
    }
}
