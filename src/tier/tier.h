/* SPDX-License-Identifier: Apache-2.0
 *
 * The one interface of everything that can hold values. A tier stores byte strings under addresses. Of records it knows
 * only the length of their header. The layer above (store.c) seals and checks them, and distributes a batch over
 * threads and tiers.
 *
 * Every call has a deadline and returns by it. No call ends the engine: a failure is a status and a reason. All calls
 * may come from several threads at once.
 */
#ifndef KVFI_TIER_H
#define KVFI_TIER_H

#include <stdatomic.h>

#include "kvferry/admin.h"
#include "record/record.h"
#include "tier/meter.h"
#include "tier/pool.h"
#include "tier/url.h"

/* Each write of a sealed record has a new salt, so pieces of two writes never fit together. A tier that divides long
 * values into pieces, which two writers could mix, keeps such a record whole, up to this many bytes. */
#define KVFI_MAX_WHOLE ((uint64_t)512 << 20)
static inline bool kvfi_stays_whole(bool sealed, uint64_t bytes) {
    return sealed && bytes <= KVFI_MAX_WHOLE;
}

/* One value being moved. */
typedef struct kvfi_item kvfi_item;
struct kvfi_item {
    kvfi_addr addr;
    /* the whole value (header, tokens, payload, checksum), source or destination. The tier must not change the
     * iovecs. */
    struct iovec *iov;
    uint32_t num_iov;
    size_t bytes; /* their sum. A stored value of any other length is KVF_WHY_TRUNCATED. */
    /* put: its head is still to be prepared, and the rest to be hashed or sealed (finish.h) */
    bool unfinished;
    /* put, set by `prepare`: finishing the record seals it with that key. NULL: finishing hashes it. */
    const kvfi_record_key *record_key;
    /* put, with record_key: the memory to seal from, laid out as the record is. NULL: it is sealed in place. */
    struct iovec *clear;
    uint32_t num_clear;
    /* put: pieces of KVFI_PAGE and more may be lent to a server that reads them later, instead of copied */
    bool may_lend;
    /* out: pieces were lent, and the server may still read them, whatever the result of the item: the memory must not
     * be written to again. (It may be returned to the system.) */
    bool lent;
    kvf_status status; /* out: KVF_AGAIN until kvfi_feed_done sets it */
    kvf_reason why;
    uint32_t ttl_s;          /* if it has its own time to live, which a get does not renew; 0 = the tier's */
    size_t number;           /* its place in the batch of the layer above */
    void *user;              /* of the layer above */
    void *cover;             /* the same */
    const kvfi_secret *seal; /* the key that its record is sealed under; NULL = plain */
    bool rewrite;            /* put: also replace what looks like the same record, since that may be damaged inside */
    uint64_t chain_bytes;    /* put: the approximate size of the whole prefix up to its end; 0 = not known */
    /* not to be divided into pieces, or not divided: KVF_WHY_FULL if it is too long for that */
    bool whole;
};

/* A prompt may be larger than a store. Plain LRU would then evict its front to make room for its end, and nothing of it
 * could ever be loaded. So of one prefix at most this part of the bound is kept: its front. */
static inline bool kvfi_is_too_deep(const kvfi_item *item, uint64_t bound) {
    return item->chain_bytes > bound - bound / 4;
}

/* A caller that watches the items arrive, and may need fewer of them than it requested. */
typedef struct kvfi_watch {
    _Atomic size_t wanted;    /* items from this number on need not be begun */
    uint64_t *bytes;          /* grows as bodies arrive, atomically; by whole items if a tier can't tell more */
    int64_t *at_us;           /* when it grew last */
    uint8_t *each;            /* of each item: KVFI_ITEM_..., a miss with its reason added; atomically */
    void (*moved)(void *arg); /* called after each completed item */
    void *arg;
} kvfi_watch;
enum { KVFI_ITEM_AWAITED = 0, KVFI_ITEM_HERE = 1, KVFI_ITEM_MISSED = 2 };

/* A feed hands out the items of one batch, in order, to as many threads as draw from it: the next item goes to
 * whichever thread has room. */
typedef struct kvfi_feed {
    kvfi_item *items;
    size_t num;
    int64_t deadline_us;
    _Atomic size_t next;      /* the next item to hand out */
    _Atomic uint32_t workers; /* threads that work on it, as far as the tier counts them */
    /* Items from here on are no longer handed out. For a prefix: the first miss. 0 = cancelled */
    _Atomic size_t limit;
    bool prefix; /* a miss lowers `limit`: later items are of no use */
    /* Called by kvfi_feed_done for an item whose bytes have all arrived; returns the item's reason. Runs on the thread
     * that read the item, while it is in that CPU's cache. NULL when putting. */
    kvf_reason (*check)(kvfi_item *);
    /* Called for an unfinished item before it is sent, on the sending thread: writes its header. NULL if no item is
     * unfinished. */
    kvf_reason (*prepare)(kvfi_item *);
    void (*release)(kvfi_item *); /* called when the item is complete, before its status is written; NULL = never */
    /* Once it is true nothing more is handed out, and items far from complete are dropped; NULL = never */
    const atomic_bool *cancelled;
    int64_t patience_us; /* how long a silent server is waited for; 0 = as the tier is set */
    kvfi_watch *watch;   /* NULL = nobody watches */
    kvfi_meter *meter;   /* of the tier; NULL for a put */
    bool last;           /* what is missing here is missing in all tiers */
    bool once_more;      /* missing items are requested in another way afterwards, so they do not count as misses yet */
    bool stays;          /* items from a slower tier are not copied to faster ones */
    /* For a tier of several servers: this feed is a part of `whole`, the items of one server. NULL in all three for a
     * whole feed. */
    const uint32_t *order;   /* numbers of its items, ascending */
    struct kvfi_feed *whole; /* whose limit holds */
    bool (*again)(struct kvfi_feed *,
                  kvfi_item *); /* true: a failed item is not complete, but will be tried on another server */
} kvfi_feed;

/* The next item, or NULL: dry, cancelled, after a gap, or past the deadline. Every item that was handed out must be
 * given back by kvfi_feed_done exactly once, after the tier's last access to its memory. */
kvfi_item *kvfi_feed_next(kvfi_feed *);
/* The same, but an unfinished item stays unfinished: for callers that finish it piece by piece as they send it
 * (finish.h), or do not send it at all. */
kvfi_item *kvfi_feed_draw(kvfi_feed *);
/* Prepares a drawn item for sending: writes its header. After anything but KVF_WHY_NONE it can't be sent, and is given
 * back with that reason. */
kvf_reason kvfi_feed_prepare(kvfi_feed *, kvfi_item *);
/* Nothing more will be handed out, as far as is known without taking an item. */
bool kvfi_feed_is_dry(const kvfi_feed *);
void kvfi_feed_done(kvfi_feed *, kvfi_item *, kvf_status, kvf_reason);
/* For a tier that sees them arrive: this many more bytes of items of this feed have arrived. */
void kvfi_feed_moved(const kvfi_feed *, size_t bytes);
static inline bool kvfi_feed_is_cancelled(const kvfi_feed *feed) {
    return feed->cancelled != NULL && atomic_load_explicit(feed->cancelled, memory_order_relaxed);
}

/* What a lookup finds: the first KVFI_HEADER_BYTES of the value. */
typedef struct kvfi_peek {
    uint8_t header[KVFI_HEADER_BYTES];
    kvf_reason why; /* KVF_WHY_NONE: header is set */
} kvfi_peek;

/* What `each` does with values. */
typedef enum kvfi_deed {
    KVFI_TOUCH, /* renews the time to live and the time of the last use; does not move the payload */
    KVFI_REMOVE
} kvfi_deed;

/* Bytes borrowed from a tier, valid and unchanged until `give_back`. */
typedef struct kvfi_loan {
    const uint8_t *data;
    size_t len;
    void *opaque;
} kvfi_loan;

/* One field of a session, for tiers that keep sessions in their own form (Redis: a HASH). */
typedef struct kvfi_part {
    char name[32];
    struct iovec data; /* put: the bytes; get: the destination, and iov_len becomes the stored length */
    /* not NULL: the bytes lie in these instead, from byte `skip` of the first on; only data.iov_len is used */
    const struct iovec *iov;
    size_t skip;
    bool found; /* get, out */
} kvfi_part;

/* Follows a put of parts: sees the bytes of all but the last, in their order, each piece just before it is sent, and
 * then makes the last one. A checksum is computed like this while the server is busy. */
typedef struct kvfi_put_watch {
    void *ctx;
    void (*begin)(void *ctx);                /* also before another try */
    size_t (*next)(void *ctx, size_t bytes); /* returns `bytes` */
    kvf_status (*end)(void *ctx, kvfi_part *last);
} kvfi_put_watch;

#define KVFI_SIGHT_BYTES 4096u
/* What a walk shows: one value, or something else in the tier. */
typedef struct kvfi_sight {
    /* BLOCK for any record (the layer above distinguishes cards from blocks), SESSION or FOREIGN */
    kvf_entry_kind kind;
    const char *name;
    const uint8_t *head; /* the first bytes of the value */
    /* the whole value if the walk reads whole values, otherwise at least its header if it has one; of tiers that keep
     * sessions as values up to KVFI_SIGHT_BYTES, which include the session's name */
    size_t head_len;
    uint64_t stored_bytes;
    bool incomplete;  /* it is kept in several parts, and one of them is missing */
    int64_t ttl_ms;   /* -1 = none */
    int64_t stored_s; /* for values without a header; 0 = unknown */
    const kvfi_addr
        *addr; /* from the name; NULL if the name is not an address. space: only its first 8 bytes are known. */
} kvfi_sight;
typedef int (*kvfi_sight_fn)(void *ctx, const kvfi_sight *); /* nonzero stops */

typedef struct kvfi_tier kvfi_tier;

typedef struct kvfi_tier_ops {
    /* get reads each item of the feed into its memory. put writes each, atomically: a reader sees all of it or nothing.
     * Several threads may run them on the same feed at once. Each returns when it can get no more items and has
     * completed its own. */
    void (*get)(kvfi_tier *, kvfi_feed *);
    void (*put)(kvfi_tier *, kvfi_feed *);
    /* get or put over the whole feed, with the help of the pool's threads. NULL: get and put run on several threads at
     * once. Not NULL: get and put are for one thread. */
    void (*spread)(kvfi_tier *, kvfi_feed *, kvfi_pool *, bool put);
    /* peek looks up all addresses, with one round trip to each server if there is a network. Adds 1 to *round_trips for
     * each. `patience_us` is as in kvfi_feed. */
    void (*peek)(kvfi_tier *, const kvfi_addr *, size_t num, kvfi_peek *out, uint64_t *round_trips, int64_t deadline_us,
                 int64_t patience_us);
    /* each does the deed with all addresses: with one round trip to each server if there is a network, and more only
     * for values of several parts. *out has room for all: KVF_WHY_NONE if the value is there (KVFI_TOUCH) or was
     * (KVFI_REMOVE), KVF_WHY_ABSENT, or why it failed. `patience_us` is as in kvfi_feed. */
    void (*each)(kvfi_tier *, kvfi_deed, const kvfi_addr *, size_t num, kvf_reason *out, int64_t deadline_us,
                 int64_t patience_us);
    /* borrow gives access to a value of that many bytes (0: not known) without copying; NULL if the tier can't.
     * KVF_WHY_ABSENT also if others could change the value meanwhile: `get` can then read it. borrow removes a torn
     * value (shorter than its header says). */
    kvf_reason (*borrow)(kvfi_tier *, kvfi_loan *out, const kvfi_addr *, size_t bytes, int64_t deadline_us);
    void (*give_back)(kvfi_tier *, kvfi_loan *);

    kvf_status (*remove)(kvfi_tier *, kvf_error *, const kvfi_addr *,
                         int64_t deadline_us); /* KVF_MISS: was not there */
    /* walk shows every value (of one space when `space` is set: its first 8 bytes), and sessions. */
    kvf_status (*walk)(kvfi_tier *, kvf_error *, const kvf_digest *space, bool whole, kvfi_sight_fn, void *ctx,
                       int64_t step_us);
    kvf_status (*clear)(kvfi_tier *, uint64_t *removed, kvf_error *, const kvf_digest *space, int64_t step_us);

    /* Sessions as fields. All three are NULL if the layer above keeps sessions as values. put replaces the whole
     * session at once; with a watch (or NULL). get fills the parts that exist; KVF_LIMIT: a part is longer than its memory. sizes: the length of
     * each part, 0 and !found if absent; *ttl_ms as kvf_session has it, NULL = not asked. */
    kvf_status (*session_put)(kvfi_tier *, kvf_error *, const char *id, const kvfi_part *, size_t num,
                              const kvfi_put_watch *, uint32_t ttl_s, int64_t deadline_us);
    kvf_status (*session_sizes)(kvfi_tier *, kvf_error *, const char *id, kvfi_part *, size_t num, int64_t *ttl_ms,
                                int64_t deadline_us);
    kvf_status (*session_get)(kvfi_tier *, kvf_error *, const char *id, kvfi_part *, size_t num, int64_t deadline_us);
    kvf_status (*session_remove)(kvfi_tier *, kvf_error *, const char *id, int64_t deadline_us);
    uint64_t (*session_max_part)(kvfi_tier *, int64_t deadline_us); /* the longest field the server takes */

    void (*doctor)(kvfi_tier *, kvf_finding_fn, void *ctx); /* finding.tier is filled in by the layer above */
    void (*info)(kvfi_tier *, kvf_tier_info *out);
    void (*close)(kvfi_tier *);
} kvfi_tier_ops;

/* What every tier begins with; its own state follows. */
struct kvfi_tier {
    const kvfi_tier_ops *ops;
    kvfi_url *url;        /* owned by the tier */
    bool volatile_;       /* its contents end with the process */
    uint32_t get_threads; /* the number of threads that are of use at once, at most */
    uint32_t put_threads;
    _Atomic uint64_t connects, disconnects; /* counted by the tier */
};

/* kvfi_tier_look is peek for callers that do not count round trips, and have the patience of the tier. */
static inline void kvfi_tier_look(kvfi_tier *tier, const kvfi_addr *addrs, size_t num, kvfi_peek *out,
                                  int64_t deadline_us) {
    uint64_t uncounted = 0;
    tier->ops->peek(tier, addrs, num, out, &uncounted, deadline_us, 0);
}

/* Opens a tier from a parsed URL, which it then owns, also on failure. It fails only on what the operator must change.
 * Each kind of tier has one such function. */
typedef kvf_status kvfi_tier_open(kvfi_tier **out, kvf_error *, kvfi_url *);

#endif
