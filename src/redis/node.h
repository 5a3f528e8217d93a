/* SPDX-License-Identifier: Apache-2.0
 *
 * One server: its address, how to introduce oneself, its connections in lanes, and a breaker for when it is away.
 *
 * The lanes never mix: a lookup does not wait behind a load, nor a load behind a store, and no connection carries big
 * values both ways at once. A topology of several servers is several nodes.
 */
#ifndef KVFI_REDIS_NODE_H
#define KVFI_REDIS_NODE_H

#include <pthread.h>

#include "redis/conf.h"
#include "store/tier.h"

typedef enum kvfi_lane_kind { KVFI_LANE_LOOKUP, KVFI_LANE_LOAD, KVFI_LANE_STORE, KVFI_NUM_LANES } kvfi_lane_kind;

typedef struct kvfi_lane {
    kvfi_conn *idle[KVFI_REDIS_MAX_LANE]; /* the last used is on top; a closed one may be among them, for its memory */
    unsigned num_idle;
    _Atomic unsigned num_taken; /* changes under the lock; a saver looks at that of loads without */
} kvfi_lane;

/* A breaker: closed until something fails; then open, and nobody tries until `until_us`; then half-open: one tries, and
 * the others wait for what becomes of that. */
typedef enum kvfi_breaker_state { KVFI_BREAKER_CLOSED, KVFI_BREAKER_OPEN, KVFI_BREAKER_HALF_OPEN } kvfi_breaker_state;
typedef struct kvfi_breaker {
    int64_t until_us;    /* nobody tries before */
    uint32_t backoff_ms; /* of the last failure; 0: closed */
    bool trying;         /* one does */
} kvfi_breaker;

/* May be saved to a server, as it is set up? (rules.h) */
typedef struct kvfi_admission {
    bool known;       /* it was asked since it was last away */
    bool logged;      /* what was found has been said */
    bool silent;      /* it does not show its settings */
    bool bounded;     /* only as many bytes as there is room for */
    kvf_reason saves; /* KVF_WHY_NONE: yes; or why not */
    const char *code; /* the finding that forbids it */
} kvfi_admission;

/* What is asked only to know more, or to be known: nothing depends on the answer. Where a server refuses it, or what
 * stands in front of it breaks the connection off or says nothing, it is not asked any more. */
typedef enum kvfi_probe { KVFI_PROBE_NAME = 1, KVFI_PROBE_INFO = 2, KVFI_PROBE_CONFIG = 4 } kvfi_probe;

typedef struct kvfi_node {
    const kvfi_redis_conf *conf;
    kvfi_endpoint server;
    kvfi_tls_peer peer;        /* the same server, for TLS */
    _Atomic uint32_t answered; /* which of its addresses did last (dial.c) */
    char name[256];            /* which its certificate is for */
    pthread_mutex_t lock;      /* of all that follows; never held over I/O */
    pthread_cond_t freed;      /* a connection was given back */
    kvfi_lane lanes[KVFI_NUM_LANES];
    kvfi_breaker breaker; /* for connections */
    kvfi_breaker saves;   /* for saves alone: the server has no room for them, or no disk. Loads go on. */
    kvfi_admission admission;
    _Atomic uint64_t longest;       /* as in kvfi_verdict */
    _Atomic uint64_t most;          /* as in kvfi_verdict */
    _Atomic int64_t room;           /* of a bounded one: bytes that may still be saved before it is asked anew */
    atomic_bool spoken;             /* it has answered us once: it speaks as we do */
    _Atomic unsigned mute, heard;   /* bits: kvfi_probe that it does not answer; that it has answered */
    _Atomic int64_t max_idle_us;    /* a connection that lay idle for longer is not used again */
    _Atomic int64_t doubt_until_us; /* from then on max_idle_us is the longest again */
    unsigned doubts;                /* how often it was lowered, up to a bound */
    int64_t said_us;                /* when the log last heard of a connection that ended */
    kvf_error trouble;              /* why it could not be connected to last time */
    kvf_reason trouble_why;
    _Atomic uint64_t *connects, *disconnects;
} kvfi_node;

/* `name`: as the server is called where its address is not what it is called; or NULL. */
void kvfi_node_init(kvfi_node *, const kvfi_redis_conf *, const kvfi_endpoint *, const char *name,
                    _Atomic uint64_t *connects, _Atomic uint64_t *disconnects);
void kvfi_node_cleanup(kvfi_node *); /* all connections have been given back */
void kvfi_node_trim(kvfi_node *);    /* closes those that lie idle: it is not expected to be of use any more */
/* The server was the primary and is none any more: behind a name, or an address that moves, another is. The
 * connection and all that lie idle are closed, so that the name is looked up again. */
void kvfi_node_renew(kvfi_node *, kvfi_conn *);

/* kvfi_node_take lends a connection that is open, introduced and in step, making one where there is none, or waits for
 * one until the deadline. With a feed it stops waiting when that is dry. When it fails, *out is NULL; `err` (or NULL)
 * gets a sentence and, when the operator must change something, KVF_CONFIG. */
kvf_reason kvfi_node_take(kvfi_node *, kvfi_conn **out, kvf_error *err, kvfi_lane_kind, const kvfi_feed *feed,
                          int64_t deadline_us);
/* The same for who can't say anything twice: one that lay idle has answered a PING since. */
kvf_reason kvfi_node_take_sure(kvfi_node *, kvfi_conn **out, kvf_error *err, kvfi_lane_kind, int64_t deadline_us);
/* Takes it back, open or closed. */
void kvfi_node_give(kvfi_node *, kvfi_lane_kind, kvfi_conn *);
/* Of a connection that has ended, before it is given back: may what was on it be sent once more, on another? Yes, where it
 * lay idle before and has brought nothing since (and such connections are then not trusted any more); and once for each
 * call where it stalled, since the next must first show that the server is there: `stalls` counts that. It does not count
 * against the server then. */
bool kvfi_node_forgives(kvfi_node *, kvfi_conn *, unsigned *stalls);

/* Of a connection that is closed, or is not trusted any more: makes it anew, in its place. */
kvf_reason kvfi_node_reopen(kvfi_node *, kvfi_conn *, kvf_error *err, int64_t deadline_us);

/* Is the probe answered, as far as is known? */
static inline bool kvfi_node_answers(const kvfi_node *node, kvfi_probe probe) {
    return (atomic_load_explicit(&node->mute, memory_order_relaxed) & probe) == 0;
}
/* It is not: `why` in the words of the server, or of the connection. Said once in the log. One that was answered before
 * is not believed to be any other time. */
void kvfi_node_is_mute(kvfi_node *, kvfi_probe, const char *why);
void kvfi_node_was_heard(kvfi_node *, kvfi_probe);

/* Loads go before saves: waits until none is under way, for a little while at most. */
void kvfi_node_yield(kvfi_node *);

/* What must be added to a user's ACL for what the server refused as NOPERM: "+hset", "~kvf1:*". `said`: its words. */
void kvfi_acl_rule(char out[96], const char *said, const char *prefix);

/* May something be saved there? Whoever is told so tells what became of it: whether the server refused all saves, not
 * this one only. */
bool kvfi_node_may_save(kvfi_node *);
void kvfi_node_note_saves(kvfi_node *, bool refused);

kvfi_admission kvfi_node_admission(kvfi_node *);
void kvfi_node_admit(kvfi_node *, const kvfi_admission *);

/* Why it could not be connected to last time. */
kvf_reason kvfi_node_trouble(kvfi_node *);
/* How the breakers stand, for reports. */
void kvfi_node_states(kvfi_node *, kvfi_breaker_state *connections, kvfi_breaker_state *saves);

/* What an error reply means for an item. */
kvf_reason kvfi_reply_reason(const kvfi_reply *);
/* The server takes nothing at all just now: it is out of memory, can't write to its disk, or is a replica (where there
 * are several, that means: ask another). */
bool kvfi_reply_refuses_saves(const kvfi_reply *, bool several);
static inline bool kvfi_reply_says(const kvfi_reply *reply, const char *word) {
    size_t len = strlen(word);
    return reply->len >= len && memcmp(reply->text, word, len) == 0;
}

#endif
