/* SPDX-License-Identifier: Apache-2.0
 *
 * The one interface of everything that can hold values. A tier stores byte strings under addresses; it knows nothing of
 * records but the length of their header. The layer above (store.c) seals and checks them, spreads a batch over threads
 * and over tiers.
 *
 * Every call has a deadline and returns by it. No call takes the engine down: what fails ends as a status and a reason.
 * All calls may come from several threads at once.
 */
#ifndef KVFI_TIER_H
#define KVFI_TIER_H

#include <stdatomic.h>

#include "kvferry/admin.h"
#include "record/record.h"
#include "store/pool.h"
#include "store/url.h"

/* A record that is sealed has a salt of its own each time it is written, so pieces of two writings never fit together. A
 * tier that cuts long values into pieces, which two writers could mix, keeps such a one whole: up to that many bytes. */
#define KVFI_MAX_WHOLE ((uint64_t)512 << 20)
static inline bool kvfi_stays_whole(bool sealed, uint64_t bytes) {
    return sealed && bytes <= KVFI_MAX_WHOLE;
}

/* One value on its way. */
typedef struct kvfi_item kvfi_item;
struct kvfi_item {
    kvfi_addr addr;
    struct iovec *iov; /* the whole value (header, tokens, payload, checksum): where it goes to or comes from. The tier
                          must not change them. */
    uint32_t num_iov;
    size_t bytes;  /* their sum. A stored value of any other length is KVF_WHY_TRUNCATED. */
    bool unsealed; /* to be put: its head is to be prepared, and its checksum to be written (seal.h) */
    bool may_lend; /* to be put: pieces of KVFI_PAGE and more may be lent to who reads them later, not copied */
    bool lent; /* out: they were, and who has them may still read them, whatever became of the item: the memory must not
                  be written to again. (It may be given back to the system.) */
    kvf_status status; /* out: KVF_AGAIN until kvfi_feed_done said otherwise */
    kvf_reason why;
    uint32_t ttl_s;          /* where it has a time to live of its own, which a get leaves as it is; 0 = the tier's */
    size_t number;           /* its place in the batch of the layer above */
    void *user;              /* of the layer above */
    void *cover;             /* the same */
    const kvfi_secret *seal; /* what its record is sealed under; NULL = not sealed */
    bool rewrite;            /* to be put, also over what looks like the same record: that may be damaged inside */
    uint64_t chain_bytes;    /* to be put: what the whole prefix up to its end takes, about; 0 = not known */
    bool whole;              /* not to be cut into pieces, or it is not: KVF_WHY_FULL where it is too long for that */
};

/* A prompt may be larger than a store. Least recently used first out would then evict its front for its end, and nothing
 * could be loaded of it, however often it is stored. So of one prefix no more is kept than this part of the bound: its
 * front. */
static inline bool kvfi_is_too_deep(const kvfi_item *item, uint64_t bound) {
    return item->chain_bytes > bound - bound / 4;
}

/* Somebody looks while the items come, and may want fewer of them than he asked for. */
typedef struct kvfi_watch {
    _Atomic size_t wanted;    /* items numbered from here on need not be begun */
    uint64_t *bytes;          /* grows as bodies come, atomically; where a tier can't tell, by whole items */
    int64_t *at_us;           /* when it grew last */
    uint8_t *each;            /* of each item: KVFI_ITEM_..., a miss with its reason added; atomically */
    void (*moved)(void *arg); /* called after each item that is over */
    void *arg;
} kvfi_watch;
enum { KVFI_ITEM_AWAITED = 0, KVFI_ITEM_HERE = 1, KVFI_ITEM_MISSED = 2 };

/* A feed hands out the items of one batch, in order, to as many threads as draw from it: whoever has room takes the
 * next. */
typedef struct kvfi_feed {
    kvfi_item *items;
    size_t num;
    int64_t deadline_us;
    _Atomic size_t next;      /* the next item to hand out */
    _Atomic uint32_t workers; /* threads that have come to it, as far as the tier counts them */
    /* Items from here on are not handed out any more: for a prefix, the first that missed; 0 = cancelled */
    _Atomic size_t limit;
    bool prefix; /* a miss lowers `limit`: what lies behind it is of no use */
    /* Called by kvfi_feed_done for an item whose bytes have all landed; the answer is the item's reason. On the thread
     * that read it, while it is warm in its cache. NULL when putting. */
    kvf_reason (*check)(kvfi_item *);
    /* Called for an unsealed item before it is sent, on the thread that will send it: writes its header, or the whole
     * record, which then is not unsealed any more. NULL where no item is unsealed. */
    kvf_reason (*prepare)(kvfi_item *);
    void (*release)(kvfi_item *); /* called when the item is over, before its status is written; NULL = never */
    /* Nothing more is handed out once it is true, and what is far from over is given up; NULL = never */
    const atomic_bool *cancelled;
    kvfi_watch *watch; /* NULL = nobody looks */
    bool last;         /* what is missing here is in no other tier */
    bool once_more;    /* what is missing is asked for in another way afterwards, so it is not missed yet */
    bool stays;        /* what a slower tier has is not copied up */
    /* For a tier of several servers: this feed is a part of `whole`, the items of one server. NULL in all three: it is
     * a whole one. */
    const uint32_t *order;   /* numbers of its items, ascending */
    struct kvfi_feed *whole; /* whose limit holds */
    bool (*again)(struct kvfi_feed *,
                  kvfi_item *); /* true: an item that failed is not over, but will be tried elsewhere */
} kvfi_feed;

/* The next item, or NULL: dry, cancelled, behind a gap, or past the deadline. An item that was handed out must be given
 * back by kvfi_feed_done exactly once, after the tier's last access to its memory. */
kvfi_item *kvfi_feed_next(kvfi_feed *);
/* The same, but an unsealed item stays so: for who hashes it piece by piece as it is sent (seal.h), or does not send it
 * at all. */
kvfi_item *kvfi_feed_draw(kvfi_feed *);
/* An item that was drawn is going to be sent: its header is written, or all of it. After anything but KVF_WHY_NONE it
 * can't be sent, and is given back with that reason. */
kvf_reason kvfi_feed_prepare(kvfi_feed *, kvfi_item *);
/* Nothing more will be handed out, as far as that can be told without taking an item. */
bool kvfi_feed_is_dry(const kvfi_feed *);
void kvfi_feed_done(kvfi_feed *, kvfi_item *, kvf_status, kvf_reason);
/* For a tier that sees them come: so many more bytes of items of this feed are here. */
void kvfi_feed_moved(const kvfi_feed *, size_t bytes);
static inline bool kvfi_feed_is_cancelled(const kvfi_feed *feed) {
    return feed->cancelled != NULL && atomic_load_explicit(feed->cancelled, memory_order_relaxed);
}

/* What a lookup finds: the first KVFI_HEADER_BYTES of the value. */
typedef struct kvfi_peek {
    uint8_t header[KVFI_HEADER_BYTES];
    kvf_reason why; /* KVF_WHY_NONE: header is set */
} kvfi_peek;

/* Bytes lent by a tier, valid and unchanged until `give_back`. */
typedef struct kvfi_loan {
    const uint8_t *data;
    size_t len;
    void *opaque;
} kvfi_loan;

/* One field of a session, for tiers that keep sessions in a shape of their own (Redis: a HASH). */
typedef struct kvfi_part {
    char name[32];
    struct iovec data; /* put: the bytes; get: where they go, and iov_len becomes the length that was there */
    bool found;        /* get, out */
} kvfi_part;

#define KVFI_SIGHT_BYTES 4096u
/* What a walk shows: one value, or something else that lives in the tier. */
typedef struct kvfi_sight {
    kvf_entry_kind kind; /* BLOCK for any record (the layer above tells cards from blocks), SESSION or FOREIGN */
    const char *name;
    const uint8_t *head; /* the first bytes of the value */
    size_t head_len;     /* the whole value when the walk reads whole ones, else at least its header where there is one;
                            where sessions are     values, up to KVFI_SIGHT_BYTES, so that they can be named */
    uint64_t stored_bytes;
    bool incomplete;  /* it is kept in several parts, and one of them is not there */
    int64_t ttl_ms;   /* -1 = none */
    int64_t stored_s; /* for what has no header; 0 = unknown */
    const kvfi_addr
        *addr; /* as the name says; NULL where the name is not an address. space: only its first 8 bytes are known. */
} kvfi_sight;
typedef int (*kvfi_sight_fn)(void *ctx, const kvfi_sight *); /* nonzero stops */

typedef struct kvfi_tier kvfi_tier;

typedef struct kvfi_tier_ops {
    /* get reads each item of the feed into its memory; put writes each, atomically: a reader sees all of it or none.
     * Several threads may run them on the same feed at once; each returns when it can get no more items and all of its
     * own are done. */
    void (*get)(kvfi_tier *, kvfi_feed *);
    void (*put)(kvfi_tier *, kvfi_feed *);
    /* get or put over the whole feed, with the help of the pool's threads; NULL where that is to run them on several
     * threads at once. Where it is not NULL, get and put are for one thread. */
    void (*spread)(kvfi_tier *, kvfi_feed *, kvfi_pool *, bool put);
    /* peek looks up all of them, in one round trip to each server where there is a network. Adds 1 to *round_trips for
     * each. */
    void (*peek)(kvfi_tier *, const kvfi_addr *, size_t num, kvfi_peek *out, uint64_t *round_trips,
                 int64_t deadline_us);
    /* borrow lends a value of that many bytes (0: not known) without copying; NULL where that can't be. KVF_WHY_ABSENT
     * where it is there, but others could change it while it is lent: it can be read by `get`. The lender removes what
     * is torn (shorter than its header says). */
    kvf_reason (*borrow)(kvfi_tier *, kvfi_loan *out, const kvfi_addr *, size_t bytes, int64_t deadline_us);
    void (*give_back)(kvfi_tier *, kvfi_loan *);

    kvf_status (*remove)(kvfi_tier *, kvf_error *, const kvfi_addr *,
                         int64_t deadline_us); /* KVF_MISS: was not there */
    /* walk shows every value (of one space when `space` is set: its first 8 bytes), and sessions. */
    kvf_status (*walk)(kvfi_tier *, kvf_error *, const kvf_digest *space, bool whole, kvfi_sight_fn, void *ctx,
                       int64_t step_us);
    kvf_status (*clear)(kvfi_tier *, uint64_t *removed, kvf_error *, const kvf_digest *space, int64_t step_us);

    /* Sessions as fields; all three NULL where the layer above keeps them as values. put replaces the whole session at
     * once. get fills the parts that are there; a part that is longer than its memory: KVF_LIMIT. size: the length of
     * each part, 0 and !found when absent. */
    kvf_status (*session_put)(kvfi_tier *, kvf_error *, const char *id, const kvfi_part *, size_t num, uint32_t ttl_s,
                              int64_t deadline_us);
    kvf_status (*session_sizes)(kvfi_tier *, kvf_error *, const char *id, kvfi_part *, size_t num, int64_t deadline_us);
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
    uint32_t get_threads; /* how many threads at once have a use, at most */
    uint32_t put_threads;
    _Atomic uint64_t connects, disconnects; /* counted by the tier */
};

/* The kinds. Each opens from a parsed URL (which it then owns, also on failure), and fails only on what the operator
 * must change. */
kvf_status kvfi_mem_open(kvfi_tier **out, kvf_error *, kvfi_url *);
kvf_status kvfi_file_open(kvfi_tier **out, kvf_error *, kvfi_url *);
kvf_status kvfi_redis_open(kvfi_tier **out, kvf_error *, kvfi_url *);

#endif
