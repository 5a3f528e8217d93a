/* SPDX-License-Identifier: Apache-2.0
 *
 * Write-behind: values waiting to be written, in bounded memory. Values that do not fit are shed at once, so the engine
 * never waits for a store.
 *
 * That memory is one mapping, the arena. A value of any size is cut from a free range near its front, and pages are
 * reused, since fresh memory is expensive (a page fault for every 4 KiB, or 2 MiB where there are large pages). When nothing has been written for a while,
 * the last writer returns the free pages to the system.
 *
 * A value is staged in one piece: room for the head, then the payload on a page boundary:
 *
 *   data                      head (its end is fixed)   payload, checksum
 *   |........ head_room ........................|.......................|
 */
#ifndef KVFI_BACKLOG_H
#define KVFI_BACKLOG_H

#include "tier/pool.h"
#include "tier/tier.h"

#define KVFI_MAX_WRITERS 16u

struct kvf_store;

/* The role of a staged value. Only saves are counted as such in kvf_stats, and reported by kvf_store_flush. */
typedef enum kvfi_role {
    KVFI_ROLE_SAVE, /* a block that was handed over */
    KVFI_ROLE_COPY, /* a block copied from a slower tier to a faster one */
    KVFI_ROLE_CARD  /* the fields of a space */
} kvfi_role;

/* A range of the arena: a value, or free. */
typedef struct kvfi_staged {
    struct kvfi_staged *next, *before; /* `before` only while it is reserved */
    uint64_t number;                   /* 1 for the first that was queued, and so on */
    kvfi_role role;
    uint8_t *data;
    size_t capacity;
    size_t head_room;     /* KVFI_HEAD_BYTES of the longest head, rounded up to a page */
    size_t payload_bytes; /* the requested size at first; the used size once queued */
    kvfi_addr addr;
    uint32_t first_token, num_tokens;
    uint64_t chain_bytes; /* as in kvfi_item */
    uint16_t flags;       /* KVFI_FLAG_... */
    uint8_t tiers;        /* bit t: to be written to tier t */
    bool rewrite;         /* as in kvfi_item */
    bool sealed;          /* it is a complete record: a promotion, or already written to another tier */
    bool seals;           /* to be sealed with `key`, or it has been */
    bool begun;           /* `key` is used up: unless the record is finished, these bytes are useless */
    kvfi_record_key key;
    bool lent; /* a server may still read its pages (kvfi_item.lent): fresh ones take their place */
} kvfi_staged;

typedef struct kvfi_writer {
    kvfi_job job;
    struct kvfi_backlog *backlog;
    kvfi_feed *active; /* what the writer works on, so that close can interrupt it */
    bool busy;
    uint64_t oldest; /* the lowest number of the values it works on; 0 = none */
} kvfi_writer;

/* A flush that waits for all values up to a number. */
typedef struct kvfi_flush {
    struct kvfi_flush *next;
    uint64_t until;
    uint64_t unwritten; /* saves among them that were dropped or failed */
} kvfi_flush;

typedef struct kvfi_backlog {
    struct kvf_store *store;
    pthread_mutex_t lock;
    pthread_cond_t idle;       /* a buffer is free, a value was written, or a writer ended */
    pthread_cond_t more;       /* a value was queued, or the backlog closes */
    kvfi_staged *first, *last; /* to be written, in order */
    uint8_t *arena;            /* `bound` bytes; NULL until they are needed */
    uint8_t *fresh;            /* from there on nothing of it has been used, or it was given back */
    kvfi_staged *reserved;     /* handed out, neither committed nor abandoned yet */
    kvfi_staged *free_list;    /* before that: ranges without a value, by address; no two of them touch */
    size_t bound;
    size_t num_pending; /* values queued or being written */
    size_t pending_bytes, peak_bytes;
    uint64_t last_number;
    kvfi_flush *flushes; /* the flushes that wait */
    uint64_t untold;     /* saves that were not written while no flush waited for them: the next flush reports them */
    unsigned max_writers, num_writers;
    bool closing;
    kvfi_writer writers[KVFI_MAX_WRITERS];
} kvfi_backlog;

bool kvfi_backlog_init(kvfi_backlog *, struct kvf_store *, size_t bound, unsigned max_writers);
/* Interrupts what is being written, drops what is queued, waits for the writers (their items have deadlines). Frees
 * what is still reserved: nobody may use it any more. */
void kvfi_backlog_cleanup(kvfi_backlog *);

/* A buffer for a payload of that size. KVF_AGAIN: no room within the bound. KVF_NOMEM, KVF_CLOSED. */
kvf_status kvfi_backlog_reserve(kvfi_backlog *, kvfi_staged **out, size_t payload_bytes, uint32_t max_tokens);
/* The same, but waits for room until the deadline, or until it is cancelled (NULL: never). Does not wait if the bound
 * could never hold such a buffer. */
kvf_status kvfi_backlog_await(kvfi_backlog *, kvfi_staged **out, size_t payload_bytes, uint32_t max_tokens,
                              int64_t deadline_us, const atomic_bool *cancelled);
void kvfi_backlog_abandon(kvfi_backlog *, kvfi_staged *);
/* The value will be sealed under `seal` (NULL: plain), for its address. False: no random bytes. */
bool kvfi_staged_seal(kvfi_staged *, const kvfi_secret *seal);
/* Queues the buffer, and owns it in any case. */
void kvfi_backlog_commit(kvfi_backlog *, kvfi_staged *);
/* Waits until all that is queued now is written or dropped. False if the deadline comes first. *out_unwritten: how many
 * saves among it, and before it, were not written, as far as no earlier flush told. */
bool kvfi_backlog_flush(kvfi_backlog *, uint64_t *out_unwritten, int64_t deadline_us);

static inline uint8_t *kvfi_staged_payload(const kvfi_staged *staged) {
    return staged->data + staged->head_room;
}
static inline size_t kvfi_staged_bytes(const kvfi_staged *staged) { /* of the whole record */
    return KVFI_HEAD_BYTES(staged->num_tokens) + staged->payload_bytes + KVFI_SUM_BYTES;
}
static inline uint8_t *kvfi_staged_head(const kvfi_staged *staged) {
    return staged->data + staged->head_room - KVFI_HEAD_BYTES(staged->num_tokens);
}

#endif
