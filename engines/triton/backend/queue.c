/* SPDX-License-Identifier: Apache-2.0
 *
 * Queues of requests, in their order. Their owner has the lock.
 */
#include "triton/backend/backend.h"

void kvfb_queue_put(kvfb_queue *queue, kvfb_request *r) {
    r->next = NULL;
    if (queue->last != NULL) {
        queue->last->next = r;
    } else {
        queue->first = r;
    }
    queue->last = r;
    queue->num++;
}

kvfb_request *kvfb_queue_take(kvfb_queue *queue) {
    kvfb_request *r = queue->first;
    if (r != NULL) {
        queue->first = r->next;
        queue->last = queue->first != NULL ? queue->last : NULL;
        queue->num--;
        r->next = NULL;
    }
    return r;
}
