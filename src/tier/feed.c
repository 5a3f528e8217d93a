/* SPDX-License-Identifier: Apache-2.0
 *
 * Hands out the items of a batch to the threads that work on it, and collects the results.
 */
#include "base/interrupt.h"
#include "tier/finish.h"

/* A part has the limit of the whole: a miss on one server ends the run on all. */
static bool is_behind(const kvfi_feed *feed, size_t index) {
    return index >=
           atomic_load_explicit(feed->whole != NULL ? &feed->whole->limit : &feed->limit, memory_order_relaxed);
}

/* The caller no longer needs the item with that number in the feed. */
static bool is_unwanted(const kvfi_feed *feed, size_t index) {
    return is_behind(feed, index) ||
           (feed->watch != NULL &&
            feed->items[index].number >= atomic_load_explicit(&feed->watch->wanted, memory_order_relaxed));
}

bool kvfi_feed_is_dry(const kvfi_feed *feed) {
    size_t next = atomic_load_explicit(&feed->next, memory_order_relaxed);
    if (next >= feed->num || kvfi_sys->now_us() >= feed->deadline_us || kvfi_feed_is_cancelled(feed)) {
        return true;
    }
    return is_unwanted(feed, feed->order != NULL ? feed->order[next] : next);
}

kvfi_item *kvfi_feed_draw(kvfi_feed *feed) {
    (void)kvfi_interrupt_look();
    if (kvfi_sys->now_us() >= feed->deadline_us || kvfi_feed_is_cancelled(feed)) {
        return NULL;
    }
    /* `next` may exceed the end by the number of threads, which is harmless. */
    size_t index = atomic_fetch_add_explicit(&feed->next, 1, memory_order_relaxed);
    if (index >= feed->num) {
        return NULL;
    }
    if (feed->order != NULL) {
        index = feed->order[index];
    }
    if (is_unwanted(feed, index)) {
        return NULL;
    }
    return &feed->items[index];
}

kvf_reason kvfi_feed_prepare(kvfi_feed *feed, kvfi_item *item) {
    return item->unfinished ? feed->prepare(item) : KVF_WHY_NONE;
}

kvfi_item *kvfi_feed_next(kvfi_feed *feed) {
    kvfi_item *item = NULL;
    while ((item = kvfi_feed_draw(feed)) != NULL) {
        kvf_reason why = kvfi_feed_prepare(feed, item);
        if (why == KVF_WHY_NONE && item->unfinished && !kvfi_item_finish(item)) {
            why = KVF_WHY_NOMEM;
        }
        if (why == KVF_WHY_NONE) {
            break;
        }
        kvfi_feed_done(feed, item, KVF_MISS, why);
    }
    return item;
}

static void lower_limit(kvfi_feed *feed, size_t index) {
    size_t limit = atomic_load_explicit(&feed->limit, memory_order_relaxed);
    while (index < limit && !atomic_compare_exchange_weak_explicit(&feed->limit, &limit, index, memory_order_relaxed,
                                                                   memory_order_relaxed)) {
    }
}

void kvfi_feed_moved(const kvfi_feed *feed, size_t bytes) {
    if (bytes == 0) {
        return;
    }
    if (feed->meter != NULL) {
        kvfi_meter_moved(feed->meter, bytes);
    }
    if (feed->watch != NULL) {
        __atomic_store_n(feed->watch->at_us, kvfi_sys->now_us(), __ATOMIC_RELAXED);
        __atomic_fetch_add(feed->watch->bytes, bytes, __ATOMIC_RELEASE);
    }
}

/* It is a miss only if no slower tier is left to ask. */
static void tell(const kvfi_feed *feed, const kvfi_item *item) {
    kvfi_watch *watch = feed->watch;
    if (watch != NULL && (item->status == KVF_OK || feed->last)) {
        uint8_t state = (uint8_t)(item->status == KVF_OK ? KVFI_ITEM_HERE : KVFI_ITEM_MISSED + item->why);
        __atomic_store_n(&watch->each[item->number], state, __ATOMIC_RELEASE);
        watch->moved(watch->arg);
    }
}

void kvfi_feed_done(kvfi_feed *feed, kvfi_item *item, kvf_status status, kvf_reason why) {
    if (status == KVF_OK && feed->check != NULL) {
        why = feed->check(item);
        status = why == KVF_WHY_NONE ? KVF_OK : KVF_MISS;
    }
    if (status != KVF_OK && feed->again != NULL && feed->again(feed, item)) {
        return;
    }
    if (feed->release != NULL) {
        feed->release(item);
    }
    item->status = status;
    item->why = why;
    if (status != KVF_OK && feed->prefix) {
        lower_limit(feed->whole != NULL ? feed->whole : feed, (size_t)(item - feed->items));
    }
    tell(feed, item);
}
