/* SPDX-License-Identifier: Apache-2.0
 *
 * The memory store: values of this process, bounded in bytes, with LRU eviction.
 *
 * One mutex guards a hash table, the list of values by last use, and a few idle buffers. The bytes of a value are
 * copied outside of it. A reader holds a reference: a value that is removed or replaced lives until its last reader is
 * done.
 *
 * Page faults cost more than the copy itself on many machines. So a large value has its own mapping, and the mapping of
 * an evicted value is reused for the next one: a full store with values of one size maps no new memory.
 */
#include "mem/mem.h"

#include <pthread.h>
#include <stdio.h>

#include "tier/value.h"

#define DEFAULT_MAX_BYTES ((uint64_t)1 << 30)
#define MIN_MAX_BYTES     ((uint64_t)64 << 10)
#define MAPPED_FROM       ((size_t)32 << 10) /* smaller values share pages */
#define PAGE_BYTES        ((size_t)4096)
#define FIRST_BUCKETS     256u
#define MAX_IDLE          32u

typedef struct buffer {
    uint8_t *data;
    size_t cap; /* as counted: whole pages when mapped */
} buffer;

typedef struct entry entry;
struct entry {
    entry *chain;         /* in its bucket */
    entry *older, *newer; /* by last use */
    kvfi_addr addr;
    buffer buf;
    size_t len;
    int64_t stored_s;
    uint32_t refs; /* readers */
    bool linked;   /* in the table; otherwise freed with its last reader */
};

typedef struct bucket {
    entry *first;
} bucket;

typedef struct mem {
    kvfi_tier tier;
    uint64_t max_bytes;
    pthread_mutex_t lock;
    bucket *buckets;
    size_t num_buckets, num_entries;
    entry *oldest, *newest;
    buffer idle[MAX_IDLE];
    size_t num_idle;
    uint64_t used_bytes; /* table, entries, buffers, idle buffers, and what is reserved for values being written */
} mem;

/* ---- buffers */

static size_t capacity_for(size_t len) {
    size_t unit = len >= MAPPED_FROM ? PAGE_BYTES : 64;
    return (len + unit - 1) / unit * unit;
}

static bool is_mapped(size_t cap) {
    return cap >= MAPPED_FROM;
}

static uint8_t *new_data(size_t cap) {
    return is_mapped(cap) ? kvfi_sys->map(cap, -1, 0) : kvfi_alloc(cap);
}

static void free_data(buffer buf) {
    if (buf.data != NULL && is_mapped(buf.cap)) {
        kvfi_sys->unmap(buf.data, buf.cap);
    } else {
        kvfi_free(buf.data);
    }
}

/* An idle buffer that holds `cap` bytes and wastes less than an eighth; data NULL if there is none. It stays
 * counted. */
static buffer take_idle(mem *m, size_t cap) {
    for (size_t i = 0; i < m->num_idle; i++) {
        buffer buf = m->idle[i];
        if (buf.cap >= cap && buf.cap - cap <= cap / 8) {
            m->idle[i] = m->idle[--m->num_idle];
            return buf;
        }
    }
    return (buffer){0};
}

static bool drop_idle(mem *m) {
    if (m->num_idle == 0) {
        return false;
    }
    buffer buf = m->idle[--m->num_idle];
    m->used_bytes -= buf.cap;
    free_data(buf);
    return true;
}

static void retire(mem *m, buffer buf) {
    if (buf.data != NULL && is_mapped(buf.cap) && m->num_idle < MAX_IDLE) {
        m->idle[m->num_idle++] = buf;
        return;
    }
    m->used_bytes -= buf.cap;
    free_data(buf);
}

/* ---- the table */

static size_t bucket_of(const mem *m, const kvfi_addr *addr) {
    return (size_t)kvfi_get64(addr->key.bytes) & (m->num_buckets - 1); /* a key is a hash already */
}

static bool same_addr(const kvfi_addr *a, const kvfi_addr *b) {
    return memcmp(&a->key, &b->key, sizeof a->key) == 0 && memcmp(a->space.bytes, b->space.bytes, 8) == 0;
}

static entry *find(const mem *m, const kvfi_addr *addr) {
    entry *e = m->buckets[bucket_of(m, addr)].first;
    while (e != NULL && !same_addr(&e->addr, addr)) {
        e = e->chain;
    }
    return e;
}

static void unlist(mem *m, entry *e) {
    *(e->older != NULL ? &e->older->newer : &m->oldest) = e->newer;
    *(e->newer != NULL ? &e->newer->older : &m->newest) = e->older;
}

static void list_newest(mem *m, entry *e) {
    e->older = m->newest;
    e->newer = NULL;
    *(m->newest != NULL ? &m->newest->newer : &m->oldest) = e;
    m->newest = e;
}

static void touch(mem *m, entry *e) {
    unlist(m, e);
    list_newest(m, e);
}

static void free_entry(mem *m, entry *e) {
    retire(m, e->buf);
    m->used_bytes -= sizeof *e;
    kvfi_free(e);
}

static void unlink_entry(mem *m, entry *e) {
    entry **at = &m->buckets[bucket_of(m, &e->addr)].first;
    while (*at != e) {
        at = &(*at)->chain;
    }
    *at = e->chain;
    unlist(m, e);
    m->num_entries--;
    e->linked = false;
    if (e->refs == 0) {
        free_entry(m, e);
    }
}

static void unref(mem *m, entry *e) {
    pthread_mutex_lock(&m->lock);
    e->refs--;
    if (e->refs == 0 && !e->linked) {
        free_entry(m, e);
    }
    pthread_mutex_unlock(&m->lock);
}

/* Doubles the buckets when they fill up. Without memory, chains grow longer instead. */
static void grow(mem *m) {
    size_t num = 2 * m->num_buckets;
    size_t more = m->num_buckets * sizeof(bucket);
    if (m->num_entries < m->num_buckets || m->used_bytes + more > m->max_bytes) {
        return;
    }
    bucket *buckets = kvfi_alloc_zero(num, sizeof *buckets);
    if (buckets == NULL) {
        return;
    }
    bucket *old = m->buckets;
    size_t num_old = m->num_buckets;
    m->buckets = buckets;
    m->num_buckets = num;
    m->used_bytes += more;
    for (size_t i = 0; i < num_old; i++) {
        for (entry *e = old[i].first, *next; e != NULL; e = next) {
            next = e->chain;
            entry **at = &buckets[bucket_of(m, &e->addr)].first;
            e->chain = *at;
            *at = e;
        }
    }
    kvfi_free(old);
}

static void link_entry(mem *m, entry *e) {
    grow(m);
    entry **at = &m->buckets[bucket_of(m, &e->addr)].first;
    e->chain = *at;
    *at = e;
    e->linked = true;
    m->num_entries++;
    list_newest(m, e);
}

/* ---- room */

/* Evicts the value that was not used for longest, skipping values that are being read. */
static bool evict_one(mem *m) {
    for (size_t i = m->num_entries; i > 0; i--) {
        entry *e = m->oldest;
        if (e->refs == 0) {
            unlink_entry(m, e);
            return true;
        }
        touch(m, e);
    }
    return false;
}

/* Room for one more entry with a buffer of `cap` bytes, counted from here on. *out gets an idle buffer if one fits. */
static bool make_room(mem *m, buffer *out, size_t cap) {
    for (;;) {
        bool fits = m->used_bytes + sizeof(entry) <= m->max_bytes;
        if (fits) {
            *out = take_idle(m, cap);
            if (out->data != NULL) {
                m->used_bytes += sizeof(entry);
                return true;
            }
        }
        if (fits && m->used_bytes + sizeof(entry) + cap <= m->max_bytes) {
            m->used_bytes += sizeof(entry) + cap;
            *out = (buffer){.cap = cap};
            return true;
        }
        if (!drop_idle(m) && !evict_one(m)) {
            return false;
        }
    }
}

static void give_up_room(mem *m, buffer buf) {
    pthread_mutex_lock(&m->lock);
    m->used_bytes -= sizeof(entry);
    retire(m, buf);
    pthread_mutex_unlock(&m->lock);
}

/* ---- put */

static bool has_same(const entry *e, const kvfi_item *item) {
    kvfi_ends ours, theirs;
    if (e->len != item->bytes || !kvfi_item_ends(&ours, item)) {
        return false;
    }
    memcpy(theirs.header, e->buf.data, sizeof theirs.header);
    memcpy(theirs.sum, e->buf.data + e->len - sizeof theirs.sum, sizeof theirs.sum);
    return kvfi_same_record(&ours, &theirs);
}

static kvf_reason start_put(mem *m, const kvfi_item *item, buffer *out, bool *out_same) {
    size_t cap = capacity_for(item->bytes);
    kvf_reason why = KVF_WHY_NONE;
    pthread_mutex_lock(&m->lock);
    entry *e = find(m, &item->addr);
    *out_same = e != NULL && !item->rewrite && has_same(e, item);
    if (*out_same) {
        touch(m, e);
    } else if (!make_room(m, out, cap)) {
        why = KVF_WHY_FULL;
    }
    pthread_mutex_unlock(&m->lock);
    return why;
}

static void copy_in(uint8_t *to, const kvfi_item *item) {
    for (size_t i = 0; i < item->num_iov; i++) {
        if (item->iov[i].iov_len > 0) {
            memcpy(to, item->iov[i].iov_base, item->iov[i].iov_len);
            to += item->iov[i].iov_len;
        }
    }
}

static kvf_reason put_one(mem *m, const kvfi_item *item) {
    if (item->bytes < KVFI_HEADER_BYTES) {
        return KVF_WHY_TRUNCATED;
    }
    if (item->bytes > m->max_bytes || kvfi_is_too_deep(item, m->max_bytes)) {
        return KVF_WHY_FULL;
    }
    buffer buf = {0};
    bool same = false;
    kvf_reason why = start_put(m, item, &buf, &same);
    if (why != KVF_WHY_NONE || same) {
        return why;
    }
    entry *e = kvfi_alloc_zero(1, sizeof *e);
    if (e != NULL && buf.data == NULL) {
        buf.data = new_data(buf.cap);
    }
    if (e == NULL || buf.data == NULL) {
        kvfi_free(e);
        give_up_room(m, buf);
        return KVF_WHY_NOMEM;
    }
    copy_in(buf.data, item);
    e->addr = item->addr;
    e->buf = buf;
    e->len = item->bytes;
    e->stored_s = kvfi_sys->wall_us() / 1000000;
    pthread_mutex_lock(&m->lock);
    entry *old = find(m, &item->addr);
    if (old != NULL) {
        unlink_entry(m, old);
    }
    link_entry(m, e);
    pthread_mutex_unlock(&m->lock);
    return KVF_WHY_NONE;
}

static void put(kvfi_tier *tier, kvfi_feed *feed) {
    for (kvfi_item *item; (item = kvfi_feed_next(feed)) != NULL;) {
        kvf_reason why = put_one((mem *)tier, item);
        kvfi_feed_done(feed, item, why == KVF_WHY_NONE ? KVF_OK : KVF_MISS, why);
    }
}

/* ---- get, peek, each, borrow */

static entry *acquire(mem *m, const kvfi_addr *addr) {
    pthread_mutex_lock(&m->lock);
    entry *e = find(m, addr);
    if (e != NULL) {
        e->refs++;
        touch(m, e);
    }
    pthread_mutex_unlock(&m->lock);
    return e;
}

static void copy_out(const kvfi_item *item, const uint8_t *from) {
    for (size_t i = 0; i < item->num_iov; i++) {
        if (item->iov[i].iov_len > 0) {
            memcpy(item->iov[i].iov_base, from, item->iov[i].iov_len);
            from += item->iov[i].iov_len;
        }
    }
}

static void drop(mem *m, entry *e) {
    pthread_mutex_lock(&m->lock);
    if (e->linked) {
        unlink_entry(m, e);
    }
    pthread_mutex_unlock(&m->lock);
}

static void get_one(mem *m, kvfi_feed *feed, kvfi_item *item) {
    entry *e = acquire(m, &item->addr);
    if (e == NULL || e->len != item->bytes) {
        if (e != NULL) {
            unref(m, e);
        }
        kvfi_feed_done(feed, item, KVF_MISS, e == NULL ? KVF_WHY_ABSENT : KVF_WHY_TRUNCATED);
        return;
    }
    copy_out(item, e->buf.data);
    kvfi_feed_moved(feed, item->bytes);
    kvfi_feed_done(feed, item, KVF_OK, KVF_WHY_NONE);
    if (item->why == KVF_WHY_CHECKSUM) { /* somebody wrote over our memory, or it is faulty: never a hit again */
        drop(m, e);
    }
    unref(m, e);
}

static void get(kvfi_tier *tier, kvfi_feed *feed) {
    for (kvfi_item *item; (item = kvfi_feed_next(feed)) != NULL;) {
        get_one((mem *)tier, feed, item);
    }
}

static void peek(kvfi_tier *tier, const kvfi_addr *addrs, size_t num, kvfi_peek *out, uint64_t *round_trips,
                 int64_t deadline_us, int64_t patience_us) {
    (void)round_trips;
    (void)deadline_us;
    (void)patience_us;
    mem *m = (mem *)tier;
    for (size_t i = 0; i < num; i++) {
        pthread_mutex_lock(&m->lock);
        const entry *e = find(m, &addrs[i]);
        out[i].why = e == NULL ? KVF_WHY_ABSENT : KVF_WHY_NONE;
        if (e != NULL) {
            memcpy(out[i].header, e->buf.data, KVFI_HEADER_BYTES);
        }
        pthread_mutex_unlock(&m->lock);
    }
}

static void each(kvfi_tier *tier, kvfi_deed deed, const kvfi_addr *addrs, size_t num, kvf_reason *out,
                 int64_t deadline_us, int64_t patience_us) {
    (void)deadline_us;
    (void)patience_us;
    mem *m = (mem *)tier;
    for (size_t i = 0; i < num; i++) {
        pthread_mutex_lock(&m->lock);
        entry *e = find(m, &addrs[i]);
        out[i] = e == NULL ? KVF_WHY_ABSENT : KVF_WHY_NONE;
        if (e != NULL) {
            (deed == KVFI_TOUCH ? touch : unlink_entry)(m, e);
        }
        pthread_mutex_unlock(&m->lock);
    }
}

static kvf_reason borrow(kvfi_tier *tier, kvfi_loan *out, const kvfi_addr *addr, size_t bytes, int64_t deadline_us) {
    (void)bytes; /* our own memory already holds it: the layer above compares */
    (void)deadline_us;
    entry *e = acquire((mem *)tier, addr);
    if (e == NULL) {
        return KVF_WHY_ABSENT;
    }
    *out = (kvfi_loan){.data = e->buf.data, .len = e->len, .opaque = e};
    return KVF_WHY_NONE;
}

static void give_back(kvfi_tier *tier, kvfi_loan *loan) {
    unref((mem *)tier, loan->opaque);
    *loan = (kvfi_loan){0};
}

/* ---- looking after it */

static kvf_status remove_one(kvfi_tier *tier, kvf_error *err, const kvfi_addr *addr, int64_t deadline_us) {
    (void)err;
    (void)deadline_us;
    mem *m = (mem *)tier;
    pthread_mutex_lock(&m->lock);
    entry *e = find(m, addr);
    if (e != NULL) {
        unlink_entry(m, e);
    }
    pthread_mutex_unlock(&m->lock);
    return e != NULL ? KVF_OK : KVF_MISS;
}

static bool in_space(const entry *e, const kvf_digest *space) {
    return space == NULL || memcmp(e->addr.space.bytes, space->bytes, 8) == 0;
}

static kvf_status clear(kvfi_tier *tier, uint64_t *removed, kvf_error *err, const kvf_digest *space, int64_t step_us) {
    (void)err;
    (void)step_us;
    mem *m = (mem *)tier;
    *removed = 0;
    pthread_mutex_lock(&m->lock);
    for (entry *e = m->oldest, *next; e != NULL; e = next) {
        next = e->newer;
        if (in_space(e, space)) {
            unlink_entry(m, e);
            ++*removed;
        }
    }
    while (drop_idle(m)) {
    }
    pthread_mutex_unlock(&m->lock);
    return KVF_OK;
}

/* The addresses of all values, so that the walk calls its visitor without the lock. */
static kvfi_addr *list_addrs(mem *m, size_t *out_num, const kvf_digest *space) {
    pthread_mutex_lock(&m->lock);
    kvfi_addr *addrs = kvfi_alloc_zero(m->num_entries + 1, sizeof *addrs);
    size_t num = 0;
    for (const entry *e = m->newest; e != NULL && addrs != NULL; e = e->older) {
        if (in_space(e, space)) {
            addrs[num++] = e->addr;
        }
    }
    pthread_mutex_unlock(&m->lock);
    *out_num = num;
    return addrs;
}

static int show(const entry *e, bool whole, kvfi_sight_fn fn, void *ctx) {
    char space[17], key[65], name[sizeof space + sizeof key + 1];
    kvfi_hex(space, e->addr.space.bytes, 8);
    kvfi_hex(key, e->addr.key.bytes, 32);
    snprintf(name, sizeof name, "%s/%s", space, key);
    return fn(ctx, &(kvfi_sight){.kind = KVF_ENTRY_BLOCK,
                                 .name = name,
                                 .head = e->buf.data,
                                 .head_len = whole || e->len < KVFI_SIGHT_BYTES ? e->len : KVFI_SIGHT_BYTES,
                                 .stored_bytes = e->len,
                                 .ttl_ms = -1,
                                 .stored_s = e->stored_s,
                                 .addr = &e->addr});
}

static entry *acquire_untouched(mem *m, const kvfi_addr *addr) {
    pthread_mutex_lock(&m->lock);
    entry *e = find(m, addr);
    if (e != NULL) {
        e->refs++;
    }
    pthread_mutex_unlock(&m->lock);
    return e;
}

static kvf_status walk(kvfi_tier *tier, kvf_error *err, const kvf_digest *space, bool whole, kvfi_sight_fn fn,
                       void *ctx, int64_t step_us) {
    (void)step_us;
    mem *m = (mem *)tier;
    size_t num = 0;
    kvfi_addr *addrs = list_addrs(m, &num, space);
    if (addrs == NULL) {
        return kvfi_fail(err, KVF_NOMEM, "no memory to walk over the store");
    }
    int stop = 0;
    for (size_t i = 0; i < num && stop == 0; i++) {
        entry *e = acquire_untouched(m, &addrs[i]);
        if (e != NULL) {
            stop = show(e, whole, fn, ctx);
            unref(m, e);
        }
    }
    kvfi_free(addrs);
    return KVF_OK;
}

static void doctor(kvfi_tier *tier, kvf_finding_fn fn, void *ctx) {
    mem *m = (mem *)tier;
    char what[160];
    pthread_mutex_lock(&m->lock);
    snprintf(what, sizeof what, "memory of this process: %zu records, %.1f of at most %.1f MiB", m->num_entries,
             (double)m->used_bytes / 1048576.0, (double)m->max_bytes / 1048576.0);
    pthread_mutex_unlock(&m->lock);
    fn(ctx, &(kvf_finding){.severity = KVF_FINE, .code = "memory", .what = what, .mend = ""});
}

static void info(kvfi_tier *tier, kvf_tier_info *out) {
    mem *m = (mem *)tier;
    snprintf(out->url, sizeof out->url, "%s", tier->url->text);
    pthread_mutex_lock(&m->lock);
    out->reachable = 1;
    out->num_records = (int64_t)m->num_entries;
    out->used_bytes = (int64_t)m->used_bytes;
    out->max_bytes = (int64_t)m->max_bytes;
    pthread_mutex_unlock(&m->lock);
}

/* ---- open and close */

static void close_mem(kvfi_tier *tier) {
    mem *m = (mem *)tier;
    for (entry *e = m->oldest, *next; e != NULL; e = next) {
        next = e->newer;
        free_data(e->buf);
        kvfi_free(e);
    }
    while (drop_idle(m)) {
    }
    kvfi_free(m->buckets);
    kvfi_url_free(tier->url);
    pthread_mutex_destroy(&m->lock);
    kvfi_free(m);
}

static const kvfi_tier_ops ops = {
    .get = get,
    .put = put,
    .peek = peek,
    .each = each,
    .borrow = borrow,
    .give_back = give_back,
    .remove = remove_one,
    .walk = walk,
    .clear = clear,
    .doctor = doctor,
    .info = info,
    .close = close_mem,
};

static kvf_status take_params(mem *m, kvf_error *err, kvfi_url *url) {
    m->max_bytes = DEFAULT_MAX_BYTES;
    KVFI_TRY(kvfi_url_take_size(url, err, "max", &m->max_bytes, MIN_MAX_BYTES, (uint64_t)1 << 60));
    return kvfi_url_all_taken(url, err);
}

kvf_status kvfi_mem_open(kvfi_tier **out, kvf_error *err, kvfi_url *url) {
    mem *m = kvfi_alloc_zero(1, sizeof *m);
    bucket *buckets = kvfi_alloc_zero(FIRST_BUCKETS, sizeof *buckets);
    if (m == NULL || buckets == NULL) {
        kvfi_free(m);
        kvfi_free(buckets);
        kvfi_url_free(url);
        return kvfi_fail(err, KVF_NOMEM, "no memory to open the store");
    }
    m->tier = (kvfi_tier){.ops = &ops, .url = url, .volatile_ = true, .get_threads = 2, .put_threads = 1};
    m->buckets = buckets;
    m->num_buckets = FIRST_BUCKETS;
    m->used_bytes = sizeof *m + FIRST_BUCKETS * sizeof *buckets;
    pthread_mutex_init(&m->lock, NULL);
    kvf_status status = take_params(m, err, url);
    if (status != KVF_OK) {
        close_mem(&m->tier);
        return status;
    }
    *out = &m->tier;
    return KVF_OK;
}
