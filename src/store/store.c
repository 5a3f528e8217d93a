/* SPDX-License-Identifier: Apache-2.0
 *
 * Opens and closes a store, and spreads batches over its tiers and threads.
 */
#include "store/private.h"

#include "file/file.h"
#include "kvferry/sized.h"
#include "kvferry/store.h"
#include "mem/mem.h"
#include "redis/redis.h"

#define LOOKUP_THREADS 2u
/* For batches of queues: they have deadlines, and must not wait for a writer, whose deadline is far. */
#define BATCH_THREADS         4u
#define DRAIN_US              5000000
#define FLUSH_US              10000000
#define DEFAULT_BACKLOG_BYTES ((size_t)256 << 20)

/* ---- open and close ---- */

static const struct {
    const char *scheme;
    kvfi_tier_open *open;
} KINDS[] = {
    {"mem", kvfi_mem_open},
    {"file", kvfi_file_open},
    {"redis", kvfi_redis_open},
    {"redis+unix", kvfi_redis_open},
    {"redis+cluster", kvfi_redis_open},
    {"redis+sentinel", kvfi_redis_open},
    {"rediss", kvfi_redis_open},
    {"rediss+cluster", kvfi_redis_open},
    {"rediss+sentinel", kvfi_redis_open},
};

static kvfi_tier_open *kind_of(const char *scheme) {
    for (size_t i = 0; i < sizeof KINDS / sizeof KINDS[0]; i++) {
        if (strcmp(KINDS[i].scheme, scheme) == 0) {
            return KINDS[i].open;
        }
    }
    return NULL;
}

/* What other programs call a kind of ours. */
static const struct {
    const char *theirs, *ours;
} NAMES[] = {
    {"unix", "redis+unix"},
    {"redis+socket", "redis+unix"},
    {"valkey+unix", "redis+unix"},
    {"valkey", "redis"},
    {"valkeys", "rediss"},
    {"redis+tls", "rediss"},
    {"redis-cluster", "redis+cluster"},
    {"redis-sentinel", "redis+sentinel"},
};

static kvf_status refuse_scheme(kvf_error *err, const char *scheme) {
    for (size_t i = 0; i < sizeof NAMES / sizeof NAMES[0]; i++) {
        if (strcmp(NAMES[i].theirs, scheme) == 0) {
            return kvfi_fail(err, KVF_CONFIG, "unknown kind of store \"%s:\": write %s: instead", scheme,
                             NAMES[i].ours);
        }
    }
    return kvfi_fail(err, KVF_CONFIG,
                     "unknown kind of store \"%s:\": use mem:, file:, redis:, redis+unix:, redis+cluster: or "
                     "redis+sentinel:, or rediss: for TLS",
                     scheme);
}

static kvf_status open_tier(kvfi_tier **out, kvf_error *err, const char *text, bool must_exist) {
    kvfi_url *url = NULL;
    KVFI_TRY(kvfi_url_parse(&url, err, text));
    kvfi_tier_open *open = kind_of(url->scheme);
    if (open == NULL) {
        kvf_status status = refuse_scheme(err, url->scheme);
        kvfi_url_free(url);
        return status;
    }
    url->must_exist = must_exist;
    return open(out, err, url);
}

static kvf_status open_tiers(kvf_store *store, kvf_error *err, const char *const *urls, size_t num, bool must_exist) {
    for (size_t i = 0; i < num; i++) {
        KVFI_TRY(open_tier(&store->tiers[i], err, urls[i], must_exist));
        kvfi_meter_init(&store->meters[i]);
        store->num_tiers++;
    }
    return KVF_OK;
}

static uint32_t sum_threads(const kvf_store *store, bool put) {
    uint32_t sum = 0;
    for (size_t i = 0; i < store->num_tiers; i++) {
        sum += put ? store->tiers[i]->put_threads : store->tiers[i]->get_threads;
    }
    return sum;
}

/* More threads than any pool has. */
#define MANY_THREADS 4096u

static uint32_t num_threads(uint32_t wanted, uint32_t fallback) {
    uint32_t num = wanted != 0 ? wanted : fallback;
    return num < MANY_THREADS ? num : MANY_THREADS;
}

static kvf_status start(kvf_store *store, kvf_error *err, const kvf_options *options) {
    uint32_t writers = num_threads(options->store_threads, sum_threads(store, true));
    store->drain_us = options->drain_us;
    store->lookup_pool = kvfi_pool_new(LOOKUP_THREADS);
    store->load_pool = kvfi_pool_new(num_threads(options->load_threads, sum_threads(store, false)) + BATCH_THREADS);
    store->batch_pool = kvfi_pool_new(writers + BATCH_THREADS);
    store->store_pool = kvfi_pool_new(writers);
    size_t bound = options->backlog_bytes != 0 ? options->backlog_bytes : DEFAULT_BACKLOG_BYTES;
    if (store->lookup_pool == NULL || store->load_pool == NULL || store->batch_pool == NULL ||
        store->store_pool == NULL || !kvfi_known_init(&store->known) ||
        !kvfi_backlog_init(&store->backlog, store, bound, writers)) {
        return kvfi_fail(err, KVF_NOMEM, "no memory to open the store");
    }
    return KVF_OK;
}

KVF_SIZED(kvf_options, secret_files, 72, flags);

kvf_status kvf_store_open(kvf_store **out, kvf_error *err, const char *const *urls, size_t num_urls,
                          const kvf_options *options) {
    if (num_urls == 0 || num_urls > KVFI_MAX_TIERS) {
        return kvfi_fail(err, KVF_CONFIG, "a store has 1 to %u tiers, not %zu", KVFI_MAX_TIERS, num_urls);
    }
    kvf_options own;
    KVFI_TRY(kvf_sized_take(&own, err, options, &kvf_options_sized));
    KVFI_TRY(kvfi_take_budget(&own.drain_us, err, DRAIN_US, true));
    if ((own.flags & ~(uint64_t)KVF_OPEN_EXISTING) != 0) {
        return kvfi_fail(err, KVF_LIMIT, "kvf_options: flags has a bit that this version of kvferry does not know");
    }
    kvf_store *store = kvfi_alloc_zero(1, sizeof *store);
    if (store == NULL) {
        return kvfi_fail(err, KVF_NOMEM, "no memory to open the store");
    }
    store->pid = getpid();
    kvf_status status = kvfi_secrets_init(&store->secrets, err, &own);
    if (status == KVF_OK) {
        status = open_tiers(store, err, urls, num_urls, own.flags == KVF_OPEN_EXISTING);
    }
    if (status == KVF_OK) {
        status = start(store, err, &own);
    }
    if (status != KVF_OK) {
        kvf_store_close(store);
        return status;
    }
    *out = store;
    return KVF_OK;
}

void kvf_store_close(kvf_store *store) {
    if (store == NULL) {
        return;
    }
    if (!kvfi_store_is_ours(store)) {
        return; /* the parent's threads do not exist here: there is nothing to wait for */
    }
    if (store->backlog.store != NULL) {
        uint64_t unwritten = 0;
        (void)kvfi_backlog_flush(&store->backlog, &unwritten, kvfi_deadline(store->drain_us));
        kvfi_backlog_cleanup(&store->backlog);
    }
    kvfi_pool_free(store->lookup_pool);
    kvfi_pool_free(store->load_pool);
    kvfi_pool_free(store->batch_pool);
    kvfi_pool_free(store->store_pool);
    kvfi_known_cleanup(&store->known);
    for (size_t i = 0; i < store->num_tiers; i++) {
        store->tiers[i]->ops->close(store->tiers[i]);
        kvfi_meter_cleanup(&store->meters[i]);
    }
    kvfi_secrets_cleanup(&store->secrets);
    kvfi_free(store);
}

kvf_status kvf_store_flush(kvf_store *store, uint64_t *out_unwritten, int64_t budget_us) {
    uint64_t unwritten = 0;
    KVFI_TRY(kvfi_take_budget(&budget_us, NULL, FLUSH_US, true));
    if (!kvfi_store_is_ours(store)) {
        return KVF_CLOSED;
    }
    bool flushed = kvfi_backlog_flush(&store->backlog, &unwritten, kvfi_deadline(budget_us));
    if (out_unwritten != NULL) {
        *out_unwritten = unwritten;
    }
    return !flushed ? KVF_AGAIN : unwritten > 0 ? KVF_MISS : KVF_OK;
}

/* ---- what the layers above use of it ---- */

kvfi_backlog *kvfi_store_backlog(kvf_store *store) {
    return &store->backlog;
}

const kvfi_secrets *kvfi_store_secrets(const kvf_store *store) {
    return &store->secrets;
}

static kvfi_pool *pool_of(const kvf_store *store, kvf_op op) {
    return op == KVF_OP_LOAD ? store->load_pool : op == KVF_OP_MATCH ? store->lookup_pool : store->batch_pool;
}

bool kvfi_store_post(kvf_store *store, kvf_op op, kvfi_job *job) {
    return kvfi_pool_post(pool_of(store, op), job);
}

bool kvfi_store_withdraw(kvf_store *store, kvf_op op, kvfi_job *job) {
    return kvfi_pool_withdraw(pool_of(store, op), job);
}

/* ---- one feed over the threads of one tier ---- */

typedef struct run {
    kvfi_tier *tier;
    kvfi_feed *feed;
    void (*op)(kvfi_tier *, kvfi_feed *);
} run;

static void run_op(void *arg) {
    run *r = arg;
    r->op(r->tier, r->feed);
}

/* Without time to wait, only memory is asked. */
static bool is_in_reach(const kvfi_tier *tier, int64_t deadline_us) {
    return deadline_us != KVFI_AT_ONCE || tier->volatile_;
}

static void pass_by(kvfi_feed *feed) {
    for (size_t i = 0; i < feed->num; i++) {
        if (feed->items[i].status != KVF_OK) {
            feed->items[i].status = KVF_MISS;
            feed->items[i].why = KVF_WHY_BUDGET;
        }
    }
}

static void run_feed(kvfi_pool *pool, kvfi_tier *tier, kvfi_feed *feed, bool put) {
    run r = {.tier = tier, .feed = feed, .op = put ? tier->ops->put : tier->ops->get};
    feed->next = 0;
    feed->workers = 0;
    feed->limit = feed->num;
    if (!is_in_reach(tier, feed->deadline_us)) {
        pass_by(feed);
        return;
    }
    int64_t deadline_us = feed->deadline_us;
    feed->deadline_us = deadline_us != KVFI_AT_ONCE ? deadline_us : KVFI_NEVER;
    size_t threads = put ? tier->put_threads : tier->get_threads;
    if (threads > feed->num) {
        threads = feed->num;
    }
    if (tier->ops->spread != NULL) {
        tier->ops->spread(tier, feed, pool, put);
    } else {
        kvfi_pool_share(pool, run_op, &r, threads > 0 ? (unsigned)threads - 1 : 0);
    }
    feed->deadline_us = deadline_us;
}

/* ---- get ---- */

/* A sealed record was decrypted in place, and is sealed again. */
static bool seal_again(kvfi_staged *staged, const kvfi_item *item, const kvfi_secret *seal) {
    kvfi_header header;
    if (kvfi_header_decode(&header, item->iov[0].iov_base) != KVF_WHY_NONE ||
        kvfi_header_admit(&header, item->seal) != KVF_WHY_NONE) {
        return false;
    }
    staged->first_token = header.first_token;
    staged->flags = header.flags;
    return kvfi_staged_seal(staged, seal);
}

bool kvfi_store_copy(kvf_store *store, const kvfi_item *item, const kvfi_addr *to_addr, const kvfi_secret *seal,
                     uint8_t tiers, kvfi_role role) {
    size_t head = item->iov[0].iov_len;
    uint32_t num_tokens = (uint32_t)((head - KVFI_HEADER_BYTES) / 4);
    kvfi_staged *staged = NULL;
    if (kvfi_backlog_reserve(&store->backlog, &staged, item->bytes - head - KVFI_SUM_BYTES, num_tokens) != KVF_OK) {
        return false;
    }
    staged->role = role;
    staged->addr = *to_addr;
    staged->tiers = tiers;
    staged->chain_bytes = item->chain_bytes;
    staged->sealed = seal == NULL;
    if (seal != NULL && !seal_again(staged, item, seal)) {
        kvfi_backlog_abandon(&store->backlog, staged);
        return false;
    }
    staged->num_tokens = num_tokens;
    memcpy(kvfi_staged_head(staged), item->iov[0].iov_base, head);
    uint8_t *to = kvfi_staged_payload(staged);
    for (size_t i = 1; i < item->num_iov; i++) {
        memcpy(to, item->iov[i].iov_base, item->iov[i].iov_len);
        to += item->iov[i].iov_len;
    }
    kvfi_backlog_commit(&store->backlog, staged);
    return true;
}

static void note_tier(kvf_store *store, const kvfi_item *item, size_t tier) {
    kvfi_known_add(&store->known, &item->addr.key, (uint8_t)(1u << tier));
}

void kvfi_store_note_got(kvf_store *store, const kvfi_item *item, size_t tier) {
    note_tier(store, item, tier);
    if (tier > 0) {
        uint8_t faster = (uint8_t)((1u << tier) - 1);
        (void)kvfi_store_copy(store, item, &item->addr, item->seal, faster, KVFI_ROLE_COPY);
    }
}

static void note_item(kvf_store *store, const kvfi_item *item, size_t tier, bool stays) {
    if (item->status != KVF_OK) {
        return;
    }
    if (stays) {
        note_tier(store, item, tier);
    } else {
        kvfi_store_note_got(store, item, tier);
    }
}

/* It ended before all of it was answered, so time that brought nothing says how slow the tier is. */
static bool gave_up(const kvfi_feed *feed) {
    return kvfi_feed_is_cancelled(feed) || kvfi_sys->now_us() >= feed->deadline_us;
}

static void get_feed(kvf_store *store, size_t tier, kvfi_feed *feed) {
    feed->meter = &store->meters[tier];
    kvfi_meter_begin(feed->meter);
    run_feed(store->load_pool, store->tiers[tier], feed, false);
    kvfi_meter_end(feed->meter, gave_up(feed));
}

/* Asks one tier for all items, in place: the only tier, or the first one if every item may be there. */
static void get_all(kvf_store *store, size_t tier, kvfi_feed *feed) {
    feed->last = !feed->once_more;
    get_feed(store, tier, feed);
    for (size_t i = 0; i < feed->num; i++) {
        note_item(store, &feed->items[i], tier, feed->stays);
    }
}

/* Merges the answer of one tier into those of faster ones. "Absent" is overruled by any other answer. "Truncated" is
 * overruled only by a hit. */
static void note_answer(kvfi_item *item, const kvfi_item *answer) {
    bool says_less = item->status == KVF_MISS && answer->status == KVF_MISS &&
                     (answer->why == KVF_WHY_ABSENT || item->why == KVF_WHY_TRUNCATED);
    if (!says_less) {
        item->status = answer->status;
        item->why = answer->why;
    }
}

/* Whether it is worth asking the tier for this item: not when only slower tiers are known to have it. */
static bool may_have(kvf_store *store, size_t tier, const kvfi_item *item) {
    uint8_t up_to_here = (uint8_t)((1u << (tier + 1)) - 1);
    uint8_t known = kvfi_known_tiers(&store->known, &item->addr.key);
    return known == 0 || (known & up_to_here) != 0;
}

/* Copies of some items of a feed, and where they were. */
typedef struct subset {
    kvfi_item *items;
    size_t *from;
    size_t num;
} subset;

static bool subset_init(subset *s, size_t capacity) {
    s->num = 0;
    s->items = kvfi_alloc_zero(capacity, sizeof *s->items + sizeof *s->from); /* both, in one piece */
    s->from = s->items != NULL ? (size_t *)(void *)(s->items + capacity) : NULL;
    return s->items != NULL;
}

/* What is still missing. The last tier is asked for all of it. */
static void pick_missing(subset *s, kvf_store *store, size_t tier, const kvfi_feed *all) {
    bool last = tier + 1 == store->num_tiers;
    for (size_t i = 0; i < all->num; i++) {
        if (all->items[i].status != KVF_OK && (last || may_have(store, tier, &all->items[i]))) {
            kvfi_item *item = &s->items[s->num];
            *item = all->items[i];
            item->status = KVF_AGAIN; /* what faster tiers have said is not the answer of this one */
            item->why = KVF_WHY_NONE;
            s->from[s->num++] = i;
        }
    }
}

/* Only in the last tier a miss is final, so only there it ends the run of a prefix. */
static void get_subset(kvf_store *store, size_t tier, const kvfi_feed *all, const subset *s) {
    bool last = tier + 1 == store->num_tiers;
    kvfi_feed feed = *all;
    feed.items = s->items;
    feed.num = s->num;
    feed.prefix = all->prefix && last;
    feed.last = last && !all->once_more;
    get_feed(store, tier, &feed);
}

/* Asks one tier of several for what faster ones did not have. */
static void get_missing(kvf_store *store, size_t tier, kvfi_feed *all) {
    subset missing;
    if (!subset_init(&missing, all->num)) {
        return;
    }
    pick_missing(&missing, store, tier, all);
    if (missing.num > 0) {
        get_subset(store, tier, all, &missing);
    }
    for (size_t i = 0; i < missing.num; i++) {
        note_answer(&all->items[missing.from[i]], &missing.items[i]);
        note_item(store, &missing.items[i], tier, all->stays);
    }
    kvfi_free(missing.items);
}

/* A lookup that was not answered says nothing of how long an answer takes. */
static void note_round_trip(kvfi_meter *meter, const kvfi_peek *peeks, size_t num, int64_t us) {
    for (size_t i = 0; i < num; i++) {
        if (peeks[i].why != KVF_WHY_NONE && peeks[i].why != KVF_WHY_ABSENT) {
            return;
        }
    }
    kvfi_meter_note_round_trip(meter, us);
}

void kvfi_store_peek(kvf_store *store, size_t index, const kvfi_addr *addrs, size_t num, kvfi_peek *out,
                     int64_t deadline_us, int64_t patience_us) {
    kvfi_tier *tier = store->tiers[index];
    if (is_in_reach(tier, deadline_us)) {
        uint64_t round_trips = 0;
        int64_t begin_us = kvfi_sys->now_us();
        tier->ops->peek(tier, addrs, num, out, &round_trips, deadline_us, patience_us);
        atomic_fetch_add(&store->stats.lookup_round_trips, round_trips);
        note_round_trip(&store->meters[index], out, num, kvfi_sys->now_us() - begin_us);
        return;
    }
    for (size_t i = 0; i < num; i++) {
        out[i].why = KVF_WHY_BUDGET;
    }
}

void kvfi_store_each(kvf_store *store, kvfi_deed deed, size_t index, const kvfi_addr *addrs, size_t num,
                     kvf_reason *out, int64_t deadline_us, int64_t patience_us) {
    kvfi_tier *tier = store->tiers[index];
    bool decides = !tier->volatile_ || index + 1 == store->num_tiers;
    tier->ops->each(tier, deed, addrs, num, out, deadline_us, patience_us);
    for (size_t i = 0; i < num; i++) {
        if (deed == KVFI_REMOVE || (decides && out[i] == KVF_WHY_ABSENT)) {
            kvfi_known_forget(&store->known, &addrs[i].key);
        }
    }
}

void kvfi_store_get(kvf_store *store, kvfi_feed *feed) {
    if (store->num_tiers == 1) {
        get_all(store, 0, feed);
        return;
    }
    for (size_t tier = 0; tier < store->num_tiers; tier++) {
        get_missing(store, tier, feed);
    }
}

/* ---- put ---- */

/* An item that was not begun. Without this it is out of budget. */
static void note_cancelled(const kvfi_feed *feed, kvfi_item *item) {
    if (item->status == KVF_AGAIN && kvfi_feed_is_cancelled(feed)) {
        item->status = KVF_MISS;
        item->why = KVF_WHY_CLOSED;
    }
}

void kvfi_store_put(kvf_store *store, kvfi_feed *feed, kvfi_put_outcome *outcomes) {
    for (size_t tier = 0; tier < store->num_tiers; tier++) {
        for (size_t i = 0; i < feed->num; i++) {
            feed->items[i].status = KVF_AGAIN;
        }
        run_feed(store->store_pool, store->tiers[tier], feed, true);
        for (size_t i = 0; i < feed->num; i++) {
            note_cancelled(feed, &feed->items[i]);
            kvfi_put_note(store, &outcomes[i], &feed->items[i], tier);
        }
    }
    for (size_t i = 0; i < feed->num; i++) {
        feed->items[i].status = outcomes[i].status;
        feed->items[i].why = outcomes[i].why;
        kvfi_store_count_put(store, &feed->items[i], &outcomes[i], KVFI_ROLE_SAVE, true);
    }
}

/* ---- how fast ---- */

kvf_status kvf_store_link(kvf_store *store, uint32_t tier, kvf_link *out) {
    *out = (kvf_link){0};
    if (!kvfi_store_is_ours(store)) {
        return KVF_CLOSED;
    }
    *out = kvfi_meter_tell(&store->meters[tier < store->num_tiers ? tier : store->num_tiers - 1]);
    return KVF_OK;
}
