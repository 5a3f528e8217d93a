/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory and threads of write-behind: values wait here until a writer has put them into every tier.
 */
#include "store/backlog.h"

#include "store/private.h"

#define GROUP_ITEMS 16u
/* of the arena, which is mapped as a whole: a bound that means "none" must fit the address space */
#define MOST_BYTES  ((size_t)1 << 38)
#define GROUP_BYTES ((size_t)16 << 20)
/* Of one group. A connection that makes no progress is dropped much earlier. */
#define PUT_BUDGET_US  (30 * 1000000LL)
#define LOOK_BUDGET_US 1000000
/* When nothing has been queued for IDLE_US, free pages return to the system in steps. */
#define IDLE_US         3000000
#define GIVE_BACK_BYTES ((size_t)8 << 20)
/* the interval at which a wait checks whether it was cancelled, since nothing signals that */
#define CANCEL_US 20000

/* Pages as the kernel takes them back: they may be larger than KVFI_PAGE, and it takes back whole ones only. A value that
 * shared one with its neighbour would lose the neighbour's bytes. */
static size_t whole_pages(size_t bytes) {
    long page = sysconf(_SC_PAGESIZE);
    size_t size = page > (long)KVFI_PAGE ? (size_t)page : KVFI_PAGE;
    return (bytes + size - 1) / size * size;
}

bool kvfi_backlog_init(kvfi_backlog *backlog, struct kvf_store *store, size_t bound, unsigned max_writers) {
    size_t most = bound < MOST_BYTES ? bound : MOST_BYTES;
    *backlog = (kvfi_backlog){.store = store, .bound = most / whole_pages(1) * whole_pages(1)};
    backlog->max_writers = max_writers < KVFI_MAX_WRITERS ? max_writers : KVFI_MAX_WRITERS;
    return pthread_mutex_init(&backlog->lock, NULL) == 0 && kvfi_cond_init(&backlog->idle) == 0 &&
           kvfi_cond_init(&backlog->more) == 0;
}

/* ---- the arena, under the lock ---- */

static uint8_t *end_of(const kvfi_staged *range) {
    return range->data + range->capacity;
}

/* Joins a free range with the next one if they touch. */
static void join(kvfi_staged *range) {
    kvfi_staged *next = range->next;
    if (next != NULL && end_of(range) == next->data) {
        range->capacity += next->capacity;
        range->next = next->next;
        kvfi_free(next);
    }
}

static void put_range(kvfi_backlog *backlog, kvfi_staged *range) {
    explicit_bzero(&range->key, sizeof range->key);
    kvfi_staged **at = &backlog->free_list, *before = NULL;
    while (*at != NULL && (*at)->data < range->data) {
        before = *at;
        at = &before->next;
    }
    range->next = *at;
    *at = range;
    join(range);
    if (before != NULL) {
        join(before);
    }
}

/* The first `capacity` bytes of a free range. */
static void cut(kvfi_staged **at, kvfi_staged *out, size_t capacity) {
    kvfi_staged *range = *at;
    out->data = range->data;
    out->capacity = capacity;
    range->data += capacity;
    range->capacity -= capacity;
    if (range->capacity == 0) {
        *at = range->next;
        kvfi_free(range);
    }
}

/* Extends the used part of the arena until its last free range, *out, has `capacity` bytes. */
static kvf_status grow(kvfi_backlog *backlog, kvfi_staged ***out, size_t capacity) {
    kvfi_staged **at = &backlog->free_list;
    while (*at != NULL && end_of(*at) != backlog->fresh) {
        at = &(*at)->next;
    }
    size_t has = *at != NULL ? (*at)->capacity : 0;
    if ((size_t)(backlog->arena + backlog->bound - backlog->fresh) < capacity - has) {
        return KVF_AGAIN;
    }
    if (*at == NULL && (*at = kvfi_alloc_zero(1, sizeof **at)) == NULL) {
        return KVF_NOMEM;
    }
    (*at)->data = backlog->fresh - has;
    (*at)->capacity = capacity;
    backlog->fresh += capacity - has;
    *out = at;
    return KVF_OK;
}

/* Takes the first free range that is large enough, so that used memory stays compact. Fresh memory comes last. */
static kvf_status take_range(kvfi_backlog *backlog, kvfi_staged *out, size_t capacity) {
    kvfi_staged **at = &backlog->free_list;
    while (*at != NULL && (*at)->capacity < capacity) {
        at = &(*at)->next;
    }
    kvf_status status = *at != NULL ? KVF_OK : grow(backlog, &at, capacity);
    if (status == KVF_OK) {
        cut(at, out, capacity);
    }
    return status;
}

static bool map_arena(kvfi_backlog *backlog) {
    if (backlog->arena == NULL) {
        backlog->arena = backlog->fresh = kvfi_sys->map(backlog->bound, -1, 0);
        if (backlog->arena != NULL) { /* fewer faults, and fewer pages to lend one by one */
            (void)kvfi_sys->huge(backlog->arena, backlog->bound);
        }
    }
    return backlog->arena != NULL;
}

static kvf_status take(kvfi_backlog *backlog, kvfi_staged *out, size_t capacity) {
    if (backlog->closing) {
        return KVF_CLOSED;
    }
    if (capacity > backlog->bound) {
        return KVF_AGAIN;
    }
    if (!map_arena(backlog)) {
        return KVF_NOMEM;
    }
    return take_range(backlog, out, capacity);
}

/* ---- buffers ---- */

/* Under the lock. */
static void note_reserved(kvfi_backlog *backlog, kvfi_staged *staged) {
    staged->before = NULL;
    staged->next = backlog->reserved;
    if (staged->next != NULL) {
        staged->next->before = staged;
    }
    backlog->reserved = staged;
}

static void note_returned(kvfi_backlog *backlog, kvfi_staged *staged) {
    *(staged->before != NULL ? &staged->before->next : &backlog->reserved) = staged->next;
    if (staged->next != NULL) {
        staged->next->before = staged->before;
    }
    staged->next = staged->before = NULL;
}

/* Under the lock. */
static bool wait_for_room(kvfi_backlog *backlog, int64_t deadline_us, const atomic_bool *cancelled) {
    int64_t now = kvfi_sys->now_us();
    if (now >= deadline_us || (cancelled != NULL && atomic_load(cancelled))) {
        return false;
    }
    (void)kvfi_cond_wait(&backlog->idle, &backlog->lock, deadline_us - now > CANCEL_US ? now + CANCEL_US : deadline_us);
    return true;
}

kvf_status kvfi_backlog_await(kvfi_backlog *backlog, kvfi_staged **out, size_t payload_bytes, uint32_t max_tokens,
                              int64_t deadline_us, const atomic_bool *cancelled) {
    size_t head_room = whole_pages(KVFI_HEAD_BYTES(max_tokens));
    size_t capacity = head_room + whole_pages(payload_bytes + KVFI_SUM_BYTES);
    kvfi_staged *staged = kvfi_alloc_zero(1, sizeof *staged);
    if (staged == NULL) {
        return KVF_NOMEM;
    }
    pthread_mutex_lock(&backlog->lock);
    kvf_status status = take(backlog, staged, capacity);
    while (status == KVF_AGAIN && capacity <= backlog->bound && wait_for_room(backlog, deadline_us, cancelled)) {
        status = take(backlog, staged, capacity);
    }
    if (status == KVF_OK) {
        note_reserved(backlog, staged);
    }
    pthread_mutex_unlock(&backlog->lock);
    if (status != KVF_OK) {
        kvfi_free(staged);
        return status;
    }
    staged->head_room = head_room;
    staged->payload_bytes = payload_bytes;
    *out = staged;
    return KVF_OK;
}

kvf_status kvfi_backlog_reserve(kvfi_backlog *backlog, kvfi_staged **out, size_t payload_bytes, uint32_t max_tokens) {
    return kvfi_backlog_await(backlog, out, payload_bytes, max_tokens, 0, NULL);
}

/* Without the lock: replaces pages that a server may still read by fresh ones. Returns the range, or NULL if that
 * fails: then the range is never used again. */
static kvfi_staged *renew(kvfi_staged *staged) {
    if (staged->lent && kvfi_sys->forget(staged->data, staged->capacity) != 0) {
        kvfi_free(staged);
        return NULL;
    }
    return staged;
}

static void call_writer(kvfi_backlog *backlog);

void kvfi_backlog_abandon(kvfi_backlog *backlog, kvfi_staged *staged) {
    pthread_mutex_lock(&backlog->lock);
    note_returned(backlog, staged);
    pthread_mutex_unlock(&backlog->lock);
    kvfi_staged *range = renew(staged);
    pthread_mutex_lock(&backlog->lock);
    if (range != NULL) {
        put_range(backlog, range);
    }
    call_writer(backlog); /* it returns idle memory to the system */
    pthread_cond_broadcast(&backlog->idle);
    pthread_mutex_unlock(&backlog->lock);
}

/* Takes up to `bytes` from the end of the last free range, if fresh memory follows it. */
static kvfi_staged *take_end(kvfi_backlog *backlog, size_t bytes) {
    kvfi_staged **at = &backlog->free_list;
    while (*at != NULL && end_of(*at) != backlog->fresh) {
        at = &(*at)->next;
    }
    kvfi_staged *range = *at;
    if (range == NULL || range->capacity <= bytes) {
        *at = NULL; /* the last of the list, in any case */
        return range;
    }
    kvfi_staged *end = kvfi_alloc_zero(1, sizeof *end);
    if (end != NULL) {
        range->capacity -= bytes;
        end->data = end_of(range);
        end->capacity = bytes;
    }
    return end;
}

/* Under the lock, released meanwhile: returns free pages to the system, from the end of the used part on. */
static void give_back(kvfi_backlog *backlog) {
    kvfi_staged *end = NULL;
    while (backlog->first == NULL && !backlog->closing && (end = take_end(backlog, GIVE_BACK_BYTES)) != NULL) {
        pthread_mutex_unlock(&backlog->lock);
        bool given = kvfi_sys->forget(end->data, end->capacity) == 0;
        pthread_mutex_lock(&backlog->lock);
        if (!given || end_of(end) != backlog->fresh) { /* a reservation has taken what follows */
            put_range(backlog, end);
            return;
        }
        backlog->fresh = end->data;
        kvfi_free(end);
    }
}

/* ---- writers ---- */

typedef struct group {
    kvfi_staged *staged[GROUP_ITEMS];
    kvfi_item items[GROUP_ITEMS];
    struct iovec iov[GROUP_ITEMS];
    size_t num;
    uint8_t tiers;
    uint32_t unwritten; /* bits: saves that failed */
} group;

/* Under the lock: the next values that go to the same tiers. */
static void take_group(kvfi_backlog *backlog, group *g) {
    size_t bytes = 0;
    g->num = 0;
    g->unwritten = 0;
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

/* It is sealed in place, and once: a key encrypts one record only, and encrypting sealed bytes again would decrypt
 * them. So where this is called a second time, sealing has failed. */
static kvf_reason begin_sealing(kvfi_item *item, kvfi_staged *staged, const kvf_block *block, int64_t now_s) {
    if (staged->begun) {
        return KVF_WHY_NOMEM;
    }
    staged->begun = true;
    kvfi_sealed_header(kvfi_staged_head(staged), &staged->key, &staged->addr, block, staged->payload_bytes,
                       staged->flags, now_s);
    item->record_key = &staged->key;
    return KVF_WHY_NONE;
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
        return begin_sealing(item, staged, &block, now_s);
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
                               .unfinished = !staged->sealed,
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

/* A record with tokens does for a value without them: a load takes it. The other way round it does not. */
static bool has_its_tokens(const kvfi_header *header, const kvfi_staged *staged) {
    return staged->num_tokens == 0 || header->num_tokens == staged->num_tokens;
}

/* How many bytes of a sealed record are tokens is not known. */
static bool has_its_bytes(const kvfi_header *header, const kvfi_staged *staged) {
    size_t bytes = kvfi_record_bytes(header), ours = kvfi_staged_bytes(staged);
    size_t most = staged->num_tokens == 0 ? 4 * (size_t)KVFI_MAX_TOKENS : 0;
    return bytes >= ours && bytes - ours <= most && (bytes - ours) % 4 == 0;
}

static bool is_the_record(const kvfi_peek *peek, const kvfi_staged *staged) {
    kvfi_header header;
    if (peek->why != KVF_WHY_NONE || kvfi_header_decode(&header, peek->header) != KVF_WHY_NONE ||
        memcmp(&header.addr, &staged->addr, sizeof staged->addr) != 0) {
        return false;
    }
    if (staged->seals) {
        return header.codec == KVFI_CODEC_SEALED && has_its_bytes(&header, staged);
    }
    return header.codec == KVFI_CODEC_PLAIN && header.payload_bytes == staged->payload_bytes &&
           has_its_tokens(&header, staged);
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
            staged->sealed = !g->items[i].unfinished;
            staged->lent = staged->lent || g->items[i].lent;
            sent |= 1u << g->items[i].number;
        }
        for (size_t i = 0; i < g->num; i++) {
            outcomes[i].tiers |= (uint8_t)((there >> i & 1) << tier);
        }
    }
    for (size_t i = 0; i < g->num; i++) {
        fill_item(g, i, i);
        kvfi_store_count_put(store, &g->items[i], &outcomes[i], g->staged[i]->role, (sent >> i & 1) != 0);
        bool failed = outcomes[i].status != KVF_OK && g->staged[i]->role == KVFI_ROLE_SAVE;
        g->unwritten |= failed ? 1u << i : 0;
    }
}

/* Under the lock: reported by the first flush that waits for that number, or else by the next flush. */
static void tell_unwritten(kvfi_backlog *backlog, uint64_t number) {
    kvfi_flush *flush = backlog->flushes;
    while (flush != NULL && flush->until < number) {
        flush = flush->next;
    }
    (*(flush != NULL ? &flush->unwritten : &backlog->untold))++;
}

/* Returns with the lock held. */
static void finish_group(kvfi_writer *writer, group *g) {
    kvfi_backlog *backlog = writer->backlog;
    uint64_t numbers[GROUP_ITEMS];
    size_t bytes = 0;
    for (size_t i = 0; i < g->num; i++) {
        bytes += g->staged[i]->capacity;
        numbers[i] = g->staged[i]->number;
        g->staged[i] = renew(g->staged[i]);
    }
    pthread_mutex_lock(&backlog->lock);
    writer->oldest = 0;
    for (size_t i = 0; i < g->num; i++) {
        if ((g->unwritten >> i & 1) != 0) {
            tell_unwritten(backlog, numbers[i]);
        }
        if (g->staged[i] != NULL) {
            put_range(backlog, g->staged[i]);
        }
    }
    backlog->pending_bytes -= bytes;
    backlog->num_pending -= g->num;
    pthread_cond_broadcast(&backlog->idle);
}

/* Under the lock: the last writer waits for more work, and when none comes for a while, returns idle memory. */
static bool is_more(kvfi_backlog *backlog) {
    if (backlog->num_writers > 1) {
        return false;
    }
    while (backlog->first == NULL && !backlog->closing &&
           kvfi_cond_wait(&backlog->more, &backlog->lock, kvfi_deadline(IDLE_US))) {
    }
    give_back(backlog);
    return backlog->first != NULL;
}

static void write_all(void *arg) {
    kvfi_writer *writer = arg;
    kvfi_backlog *backlog = writer->backlog;
    group g;
    pthread_mutex_lock(&backlog->lock);
    do {
        for (take_group(backlog, &g); g.num > 0; take_group(backlog, &g)) {
            writer->oldest = g.staged[0]->number;
            pthread_mutex_unlock(&backlog->lock);
            write_group(writer, &g);
            finish_group(writer, &g);
        }
    } while (is_more(backlog));
    writer->busy = false;
    backlog->num_writers--;
    pthread_cond_broadcast(&backlog->idle);
    pthread_mutex_unlock(&backlog->lock);
}

/* More is pending than fits into the groups of the running writers. */
static bool is_busy(const kvfi_backlog *backlog) {
    return backlog->num_pending > (size_t)backlog->num_writers * GROUP_ITEMS ||
           backlog->pending_bytes > backlog->num_writers * GROUP_BYTES;
}

/* Under the lock: starts another writer if there is work for it. The first one starts in any case, since it also
 * returns idle memory. */
static void call_writer(kvfi_backlog *backlog) {
    pthread_cond_signal(&backlog->more);
    if (backlog->closing || backlog->num_writers >= backlog->max_writers ||
        (backlog->num_writers > 0 && !is_busy(backlog))) {
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

/* Under the lock. */
static void drop_queued(kvfi_backlog *backlog, kvf_reason why) {
    while (backlog->first != NULL) {
        kvfi_staged *staged = backlog->first;
        backlog->first = staged->next;
        backlog->pending_bytes -= staged->capacity;
        backlog->num_pending--;
        if (staged->role == KVFI_ROLE_SAVE) {
            atomic_fetch_add(&backlog->store->stats.save_failures[why], 1);
            tell_unwritten(backlog, staged->number);
        }
        put_range(backlog, staged);
    }
    backlog->last = NULL;
}

void kvfi_backlog_commit(kvfi_backlog *backlog, kvfi_staged *staged) {
    pthread_mutex_lock(&backlog->lock);
    note_returned(backlog, staged);
    *(backlog->last != NULL ? &backlog->last->next : &backlog->first) = staged;
    backlog->last = staged;
    staged->number = ++backlog->last_number;
    backlog->num_pending++;
    backlog->pending_bytes += staged->capacity;
    if (backlog->pending_bytes > backlog->peak_bytes) {
        backlog->peak_bytes = backlog->pending_bytes;
    }
    call_writer(backlog);
    if (backlog->num_writers == 0 || backlog->closing) { /* without a thread nothing would ever be written */
        drop_queued(backlog, backlog->closing ? KVF_WHY_CLOSED : KVF_WHY_NOMEM);
    }
    pthread_mutex_unlock(&backlog->lock);
}

/* Under the lock: whether a value up to that number is queued or being written. */
static bool is_pending(const kvfi_backlog *backlog, uint64_t until) {
    bool pending = backlog->first != NULL && backlog->first->number <= until;
    for (size_t i = 0; i < KVFI_MAX_WRITERS && !pending; i++) {
        uint64_t oldest = backlog->writers[i].oldest;
        pending = oldest != 0 && oldest <= until;
    }
    return pending;
}

/* At the end: a value is told to the first flush that waits for it. */
static void join_flushes(kvfi_backlog *backlog, kvfi_flush *flush) {
    kvfi_flush **at = &backlog->flushes;
    while (*at != NULL) {
        at = &(*at)->next;
    }
    flush->next = NULL;
    *at = flush;
}

static void leave_flushes(kvfi_backlog *backlog, const kvfi_flush *flush) {
    kvfi_flush **at = &backlog->flushes;
    while (*at != flush) {
        at = &(*at)->next;
    }
    *at = flush->next;
}

bool kvfi_backlog_flush(kvfi_backlog *backlog, uint64_t *out_unwritten, int64_t deadline_us) {
    bool in_time = true;
    pthread_mutex_lock(&backlog->lock);
    kvfi_flush flush = {.until = backlog->last_number, .unwritten = backlog->untold};
    backlog->untold = 0;
    join_flushes(backlog, &flush);
    while (is_pending(backlog, flush.until) && in_time) {
        in_time = kvfi_cond_wait(&backlog->idle, &backlog->lock, deadline_us);
    }
    leave_flushes(backlog, &flush);
    bool flushed = !is_pending(backlog, flush.until);
    pthread_mutex_unlock(&backlog->lock);
    *out_unwritten = flush.unwritten;
    return flushed;
}

static void free_all(kvfi_staged **first) {
    while (*first != NULL) {
        kvfi_staged *range = *first;
        *first = range->next;
        kvfi_free(range);
    }
}

void kvfi_backlog_cleanup(kvfi_backlog *backlog) {
    pthread_mutex_lock(&backlog->lock);
    backlog->closing = true;
    drop_queued(backlog, KVF_WHY_CLOSED);
    for (size_t i = 0; i < KVFI_MAX_WRITERS; i++) {
        if (backlog->writers[i].active != NULL) {
            atomic_store(&backlog->writers[i].active->limit, 0);
        }
    }
    pthread_cond_broadcast(&backlog->more);
    while (backlog->num_writers > 0) {
        pthread_cond_wait(&backlog->idle, &backlog->lock);
    }
    free_all(&backlog->free_list);
    free_all(&backlog->reserved);
    if (backlog->arena != NULL) {
        kvfi_sys->unmap(backlog->arena, backlog->bound);
    }
    pthread_mutex_unlock(&backlog->lock);
    pthread_cond_destroy(&backlog->more);
    pthread_cond_destroy(&backlog->idle);
    pthread_mutex_destroy(&backlog->lock);
}
