/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory and threads of write-behind: values wait here until a writer has put them into every tier.
 */
#include "store/backlog.h"

#include "store/store.h"

#define PAGE            4096u
#define GROUP_ITEMS     16u
#define GROUP_BYTES     ((size_t)16 << 20)
#define KEEP_FREE_BYTES ((size_t)32 << 20) /* free buffers beyond this are returned to the system */
/* Of one group. A connection that makes no progress is dropped much earlier. */
#define PUT_BUDGET_US  (30 * 1000000LL)
#define LOOK_BUDGET_US 1000000

bool kvfi_backlog_init(kvfi_backlog *backlog, struct kvf_store *store, size_t bound, unsigned max_writers) {
    *backlog = (kvfi_backlog){.store = store, .bound = bound};
    backlog->max_writers = max_writers < KVFI_MAX_WRITERS ? max_writers : KVFI_MAX_WRITERS;
    return pthread_mutex_init(&backlog->lock, NULL) == 0 && kvfi_cond_init(&backlog->idle) == 0;
}

/* ---- buffers, under the lock ---- */

static void destroy(kvfi_backlog *backlog, kvfi_staged *staged) {
    backlog->held -= staged->capacity;
    kvfi_sys->unmap(staged->data, staged->capacity);
    kvfi_free(staged);
}

static void put_free(kvfi_backlog *backlog, kvfi_staged *staged) {
    if (staged->lent || backlog->free_bytes + staged->capacity > KEEP_FREE_BYTES) {
        destroy(backlog, staged);
        return;
    }
    staged->next = backlog->free_list;
    backlog->free_list = staged;
    backlog->free_bytes += staged->capacity;
}

/* A free buffer of that size that wastes at most as much again. */
static kvfi_staged *take_free(kvfi_backlog *backlog, size_t capacity) {
    for (kvfi_staged **at = &backlog->free_list; *at != NULL; at = &(*at)->next) {
        kvfi_staged *staged = *at;
        if (staged->capacity >= capacity && staged->capacity / 2 <= capacity) {
            *at = staged->next;
            backlog->free_bytes -= staged->capacity;
            return staged;
        }
    }
    return NULL;
}

static void drop_free_for(kvfi_backlog *backlog, size_t capacity) {
    while (backlog->free_list != NULL && backlog->held + capacity > backlog->bound) {
        kvfi_staged *staged = backlog->free_list;
        backlog->free_list = staged->next;
        backlog->free_bytes -= staged->capacity;
        destroy(backlog, staged);
    }
}

/* Counts the new buffer as held before it is mapped, so that the bound holds although mapping happens without the
 * lock. */
static kvf_status make(kvfi_backlog *backlog, kvfi_staged **out, size_t capacity) {
    drop_free_for(backlog, capacity);
    if (backlog->held + capacity > backlog->bound) {
        return KVF_AGAIN;
    }
    kvfi_staged *staged = kvfi_alloc_zero(1, sizeof *staged);
    uint8_t *data = staged != NULL ? kvfi_sys->map(capacity, -1, 0) : NULL;
    if (data == NULL) {
        kvfi_free(staged);
        return KVF_NOMEM;
    }
    *staged = (kvfi_staged){.data = data, .capacity = capacity};
    backlog->held += capacity;
    *out = staged;
    return KVF_OK;
}

kvf_status kvfi_backlog_reserve(kvfi_backlog *backlog, kvfi_staged **out, size_t payload_bytes, uint32_t max_tokens) {
    size_t head_room = (KVFI_HEAD_BYTES(max_tokens) + PAGE - 1) / PAGE * PAGE;
    size_t capacity = head_room + (payload_bytes + KVFI_SUM_BYTES + PAGE - 1) / PAGE * PAGE;
    kvf_status status = KVF_OK;
    pthread_mutex_lock(&backlog->lock);
    kvfi_staged *staged = NULL;
    if (backlog->closing) {
        status = KVF_CLOSED;
    } else if ((staged = take_free(backlog, capacity)) == NULL) {
        status = make(backlog, &staged, capacity);
    }
    pthread_mutex_unlock(&backlog->lock);
    if (status != KVF_OK) {
        return status;
    }
    *staged = (kvfi_staged){
        .data = staged->data, .capacity = staged->capacity, .head_room = head_room, .payload_bytes = payload_bytes};
    *out = staged;
    return KVF_OK;
}

void kvfi_backlog_abandon(kvfi_backlog *backlog, kvfi_staged *staged) {
    pthread_mutex_lock(&backlog->lock);
    put_free(backlog, staged);
    pthread_mutex_unlock(&backlog->lock);
}

/* ---- writers ---- */

typedef struct group {
    kvfi_staged *staged[GROUP_ITEMS];
    kvfi_item items[GROUP_ITEMS];
    struct iovec iov[GROUP_ITEMS];
    size_t num;
    uint8_t tiers;
} group;

/* Under the lock: the next values that go to the same tiers. */
static void take_group(kvfi_backlog *backlog, group *g) {
    size_t bytes = 0;
    g->num = 0;
    g->tiers = backlog->first != NULL ? backlog->first->tiers : 0;
    while (backlog->first != NULL && g->num < GROUP_ITEMS && bytes < GROUP_BYTES && backlog->first->tiers == g->tiers) {
        kvfi_staged *staged = backlog->first;
        backlog->first = staged->next;
        if (backlog->first == NULL) {
            backlog->last = NULL;
        }
        bytes += staged->payload_bytes;
        g->staged[g->num++] = staged;
    }
}

bool kvfi_staged_seal(kvfi_staged *staged, const kvfi_secret *seal) {
    uint8_t salt[KVFI_SALT_BYTES];
    if (seal == NULL) {
        return true;
    }
    if (kvfi_sys->random(salt, sizeof salt) != 0) {
        return false;
    }
    kvfi_record_key_of(&staged->key, seal, &staged->addr, salt);
    staged->seals = true;
    return true;
}

/* In place, and once: a key encrypts one record only, and encrypting sealed bytes again would decrypt them. */
static kvf_reason seal_record(kvfi_item *item, kvfi_staged *staged, const kvf_block *block, int64_t now_s) {
    struct iovec payload = {kvfi_staged_payload(staged), staged->payload_bytes};
    uint8_t *tag = kvfi_staged_payload(staged) + staged->payload_bytes;
    if (staged->spoiled) {
        return KVF_WHY_NOMEM;
    }
    staged->spoiled = !kvfi_sealed_write(kvfi_staged_head(staged), NULL, tag, &staged->key, &staged->addr, block,
                                         &payload, 1, staged->flags, now_s);
    explicit_bzero(&staged->key, sizeof staged->key);
    item->unsealed = staged->spoiled;
    return staged->spoiled ? KVF_WHY_NOMEM : KVF_WHY_NONE;
}

static kvf_reason prepare(kvfi_item *item) {
    kvfi_staged *staged = item->user;
    uint8_t *head = kvfi_staged_head(staged);
    /* kvfi_backlog_commit's caller left the tokens at their place in the head. */
    kvf_block block = {.tokens =
                           staged->num_tokens > 0 ? (const uint32_t *)(const void *)(head + KVFI_HEADER_BYTES) : NULL,
                       .num_tokens = staged->num_tokens,
                       .first_token = staged->first_token};
    int64_t now_s = kvfi_sys->wall_us() / 1000000;
    if (staged->seals) {
        return seal_record(item, staged, &block, now_s);
    }
    kvfi_record_begin(head, &staged->addr, &block, staged->payload_bytes, staged->flags, now_s);
    return KVF_WHY_NONE;
}

static void fill_item(group *g, size_t at, size_t number) {
    kvfi_staged *staged = g->staged[number];
    size_t bytes = kvfi_staged_bytes(staged);
    g->iov[at] = (struct iovec){kvfi_staged_head(staged), bytes};
    g->items[at] = (kvfi_item){.addr = staged->addr,
                               .iov = &g->iov[at],
                               .num_iov = 1,
                               .bytes = bytes,
                               .unsealed = !staged->sealed,
                               .may_lend = true,
                               .status = KVF_AGAIN,
                               .number = number,
                               .user = staged,
                               .rewrite = staged->rewrite,
                               .chain_bytes = staged->chain_bytes,
                               .whole = staged->seals};
}

/* Another process may have computed the same prefix at the same time and stored it meanwhile: one lookup avoids sending
 * it again. Not for cards, which are written to live longer, nor for blocks that a load of this process missed: their
 * header may be there without a body. */
static bool may_be_there(kvf_store *store, const kvfi_staged *staged) {
    return (staged->flags & KVFI_FLAG_CARD) == 0 && !kvfi_known_missed(&store->known, &staged->addr.key);
}

static bool is_the_record(const kvfi_peek *peek, const kvfi_staged *staged) {
    kvfi_header header;
    if (peek->why != KVF_WHY_NONE || kvfi_header_decode(&header, peek->header) != KVF_WHY_NONE ||
        memcmp(&header.addr, &staged->addr, sizeof staged->addr) != 0) {
        return false;
    }
    if (staged->seals) { /* how many of its bytes are tokens is not known */
        return header.codec == KVFI_CODEC_SEALED && kvfi_record_bytes(&header) == kvfi_staged_bytes(staged);
    }
    return header.codec == KVFI_CODEC_PLAIN && header.num_tokens == staged->num_tokens &&
           header.payload_bytes == staged->payload_bytes;
}

/* The items of the group that the tier has already, as bits. A store that does not answer has none; the write then
 * tells what is wrong. */
static uint32_t look_for(kvf_store *store, kvfi_tier *tier, const group *g) {
    kvfi_addr addrs[GROUP_ITEMS];
    kvfi_peek peeks[GROUP_ITEMS];
    size_t numbers[GROUP_ITEMS], num = 0;
    uint32_t there = 0;
    for (size_t i = 0; i < g->num; i++) {
        if (may_be_there(store, g->staged[i])) {
            numbers[num] = i;
            addrs[num++] = g->staged[i]->addr;
        }
    }
    if (num > 0 && !tier->volatile_) {
        kvfi_tier_look(tier, addrs, num, peeks, kvfi_deadline(LOOK_BUDGET_US));
        for (size_t i = 0; i < num; i++) {
            there |= is_the_record(&peeks[i], g->staged[numbers[i]]) ? 1u << numbers[i] : 0;
        }
    }
    return there;
}

/* The items that the tier lacks; returns their number. */
static size_t fill_items(group *g, uint32_t there) {
    size_t num = 0;
    for (size_t i = 0; i < g->num; i++) {
        if ((there >> i & 1) == 0) {
            fill_item(g, num++, i);
        }
    }
    return num;
}

static void set_active(kvfi_writer *writer, kvfi_feed *feed) {
    kvfi_backlog *backlog = writer->backlog;
    pthread_mutex_lock(&backlog->lock);
    writer->active = feed;
    if (feed != NULL && backlog->closing) {
        feed->limit = 0;
    }
    pthread_mutex_unlock(&backlog->lock);
}

static void write_group(kvfi_writer *writer, group *g) {
    kvf_store *store = writer->backlog->store;
    kvfi_put_outcome outcomes[GROUP_ITEMS] = {{0}};
    uint32_t sent = 0;
    for (size_t tier = 0; tier < store->num_tiers; tier++) {
        if ((g->tiers >> tier & 1) == 0) {
            continue;
        }
        uint32_t there = look_for(store, store->tiers[tier], g);
        size_t num = fill_items(g, there);
        kvfi_feed feed = {.items = g->items,
                          .num = num,
                          .limit = num,
                          .deadline_us = kvfi_deadline(PUT_BUDGET_US),
                          .prepare = prepare};
        if (num > 0) {
            set_active(writer, &feed);
            store->tiers[tier]->ops->put(store->tiers[tier], &feed);
            set_active(writer, NULL);
        }
        for (size_t i = 0; i < num; i++) {
            kvfi_put_note(store, &outcomes[g->items[i].number], &g->items[i], tier);
            kvfi_staged *staged = g->staged[g->items[i].number];
            staged->sealed = !g->items[i].unsealed;
            staged->lent = staged->lent || g->items[i].lent;
            sent |= 1u << g->items[i].number;
        }
        for (size_t i = 0; i < g->num; i++) {
            outcomes[i].tiers |= (uint8_t)((there >> i & 1) << tier);
        }
    }
    for (size_t i = 0; i < g->num; i++) {
        fill_item(g, i, i);
        kvfi_store_count_put(store, &g->items[i], &outcomes[i], g->staged[i]->tiers, (sent >> i & 1) != 0);
    }
}

/* Under the lock. */
static void finish_group(kvfi_backlog *backlog, group *g) {
    for (size_t i = 0; i < g->num; i++) {
        backlog->pending_bytes -= g->staged[i]->capacity;
        backlog->num_pending--;
        put_free(backlog, g->staged[i]);
    }
    pthread_cond_broadcast(&backlog->idle);
}

static void write_all(void *arg) {
    kvfi_writer *writer = arg;
    kvfi_backlog *backlog = writer->backlog;
    group g;
    pthread_mutex_lock(&backlog->lock);
    for (take_group(backlog, &g); g.num > 0; take_group(backlog, &g)) {
        pthread_mutex_unlock(&backlog->lock);
        write_group(writer, &g);
        pthread_mutex_lock(&backlog->lock);
        finish_group(backlog, &g);
    }
    writer->busy = false;
    backlog->num_writers--;
    pthread_cond_broadcast(&backlog->idle);
    pthread_mutex_unlock(&backlog->lock);
}

/* Under the lock: starts another writer if there is work for it. A group takes several values, so a second writer pays
 * off from the second value on. */
static void call_writer(kvfi_backlog *backlog) {
    if (backlog->num_writers >= backlog->max_writers || backlog->first == NULL ||
        (backlog->num_writers > 0 && backlog->first == backlog->last)) {
        return;
    }
    kvfi_writer *writer = backlog->writers;
    while (writer->busy) {
        writer++;
    }
    writer->backlog = backlog;
    writer->job = (kvfi_job){.run = write_all, .arg = writer};
    writer->busy = kvfi_pool_post(backlog->store->store_pool, &writer->job);
    if (writer->busy) {
        backlog->num_writers++;
    }
}

/* Under the lock: without a thread nothing would ever be written. */
static void drop_queued(kvfi_backlog *backlog) {
    while (backlog->first != NULL) {
        kvfi_staged *staged = backlog->first;
        backlog->first = staged->next;
        backlog->pending_bytes -= staged->capacity;
        backlog->num_pending--;
        atomic_fetch_add(&backlog->store->stats.save_failures[KVF_WHY_FULL], 1);
        put_free(backlog, staged);
    }
    backlog->last = NULL;
}

void kvfi_backlog_commit(kvfi_backlog *backlog, kvfi_staged *staged) {
    pthread_mutex_lock(&backlog->lock);
    staged->next = NULL;
    *(backlog->last != NULL ? &backlog->last->next : &backlog->first) = staged;
    backlog->last = staged;
    backlog->num_pending++;
    backlog->pending_bytes += staged->capacity;
    if (backlog->pending_bytes > backlog->peak_bytes) {
        backlog->peak_bytes = backlog->pending_bytes;
    }
    call_writer(backlog);
    if (backlog->num_writers == 0 || backlog->closing) {
        drop_queued(backlog);
    }
    pthread_mutex_unlock(&backlog->lock);
}

bool kvfi_backlog_flush(kvfi_backlog *backlog, int64_t deadline_us) {
    bool in_time = true;
    pthread_mutex_lock(&backlog->lock);
    while (backlog->num_pending > 0 && in_time) {
        in_time = kvfi_cond_wait(&backlog->idle, &backlog->lock, deadline_us);
    }
    bool flushed = backlog->num_pending == 0;
    pthread_mutex_unlock(&backlog->lock);
    return flushed;
}

void kvfi_backlog_cleanup(kvfi_backlog *backlog) {
    pthread_mutex_lock(&backlog->lock);
    backlog->closing = true;
    drop_queued(backlog);
    for (size_t i = 0; i < KVFI_MAX_WRITERS; i++) {
        if (backlog->writers[i].active != NULL) {
            atomic_store(&backlog->writers[i].active->limit, 0);
        }
    }
    while (backlog->num_writers > 0) {
        pthread_cond_wait(&backlog->idle, &backlog->lock);
    }
    while (backlog->free_list != NULL) {
        kvfi_staged *staged = backlog->free_list;
        backlog->free_list = staged->next;
        destroy(backlog, staged);
    }
    pthread_mutex_unlock(&backlog->lock);
    pthread_cond_destroy(&backlog->idle);
    pthread_mutex_destroy(&backlog->lock);
}
