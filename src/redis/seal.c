/* SPDX-License-Identifier: Apache-2.0 */
#include "redis/seal.h"

void kvfi_seals_init(kvfi_seals *seals) {
    *seals = (kvfi_seals){0};
    pthread_mutex_init(&seals->lock, NULL);
    pthread_cond_init(&seals->moved, NULL);
}

void kvfi_seals_cleanup(kvfi_seals *seals) {
    pthread_cond_destroy(&seals->moved);
    pthread_mutex_destroy(&seals->lock);
}

/* Seals one after the other, each when the last has been drawn. The waits end with the writer, whose every step has a deadline. */
static void help(kvfi_seal *pair) {
    kvfi_seals *seals = pair->table;
    bool dry = false;
    while (!dry && !pair->ending) {
        if (pair->ready != NULL) {
            pthread_cond_wait(&seals->moved, &seals->lock);
            continue;
        }
        pair->sealing = true;
        pthread_mutex_unlock(&seals->lock);
        kvfi_item *item = kvfi_feed_next(pair->feed);
        pthread_mutex_lock(&seals->lock);
        pair->sealing = false;
        pair->ready = item;
        dry = item == NULL;
        pthread_cond_broadcast(&seals->moved);
    }
    pair->helped = false;
    pthread_cond_broadcast(&seals->moved);
}

/* The pair of this feed, or a free one; NULL when there is neither. */
static kvfi_seal *find(kvfi_seals *seals, const kvfi_feed *feed) {
    kvfi_seal *free_pair = NULL;
    for (size_t i = 0; i < KVFI_SEALS; i++) {
        if (seals->pairs[i].feed == feed) {
            return &seals->pairs[i];
        }
        if (seals->pairs[i].feed == NULL) {
            free_pair = &seals->pairs[i];
        }
    }
    return free_pair;
}

bool kvfi_seal_begin(kvfi_seals *seals, kvfi_seal **out, kvfi_feed *feed) {
    pthread_mutex_lock(&seals->lock);
    kvfi_seal *pair = find(seals, feed);
    bool writes = pair == NULL || pair->feed == NULL;
    if (pair != NULL && writes) {
        *pair = (kvfi_seal){.table = seals, .feed = feed};
    } else if (pair != NULL && !pair->helped && !pair->ending) {
        pair->helped = true;
        help(pair);
    }
    pthread_mutex_unlock(&seals->lock);
    *out = pair;
    return writes;
}

static kvfi_item *take(kvfi_seal *pair) {
    kvfi_item *item = pair->ready;
    pair->ready = NULL;
    pthread_cond_broadcast(&pair->table->moved);
    return item;
}

kvfi_item *kvfi_seal_next(kvfi_seal *pair, kvfi_feed *feed) {
    kvfi_item *item = NULL;
    if (pair == NULL) {
        return kvfi_feed_next(feed);
    }
    pthread_mutex_lock(&pair->table->lock);
    item = take(pair);
    pthread_mutex_unlock(&pair->table->lock);
    if (item == NULL) {
        item = kvfi_feed_next(feed); /* rather than wait for a thread that may have no core to run on */
    }
    if (item != NULL) {
        return item;
    }
    /* The feed is dry, but the last item may still be with the other thread. */
    pthread_mutex_lock(&pair->table->lock);
    while (pair->sealing) {
        pthread_cond_wait(&pair->table->moved, &pair->table->lock);
    }
    item = take(pair);
    pthread_mutex_unlock(&pair->table->lock);
    return item;
}

kvfi_item *kvfi_seal_end(kvfi_seal *pair) {
    if (pair == NULL) {
        return NULL;
    }
    pthread_mutex_lock(&pair->table->lock);
    pair->ending = true;
    pthread_cond_broadcast(&pair->table->moved);
    while (pair->helped) {
        pthread_cond_wait(&pair->table->moved, &pair->table->lock);
    }
    kvfi_item *item = pair->ready;
    pair->feed = NULL;
    pair->ready = NULL;
    pthread_mutex_unlock(&pair->table->lock);
    return item;
}
