/* SPDX-License-Identifier: Apache-2.0
 *
 * One server: its address, the introduction of connections, its connections in lanes, and a breaker for when it is
 * down.
 *
 * The lanes never mix: a lookup does not wait for a load, nor a load for a save, and no connection carries large values
 * both ways at once. A topology of several servers has several nodes.
 */
#ifndef KVFI_REDIS_NODE_H
#define KVFI_REDIS_NODE_H

#include <pthread.h>

#include "redis/wire/conf.h"
#include "tier/tier.h"

typedef enum kvfi_lane_kind { KVFI_LANE_LOOKUP, KVFI_LANE_LOAD, KVFI_LANE_STORE, KVFI_NUM_LANES } kvfi_lane_kind;

typedef struct kvfi_lane {
    kvfi_conn *idle[KVFI_REDIS_MAX_LANE]; /* the last used is on top; closed ones may be among them, for their memory */
    unsigned num_idle;
    _Atomic unsigned num_taken; /* changes under the lock; a saver reads that of loads without it */
} kvfi_lane;

/* A breaker: closed until something fails. Then open: nobody tries until `until_us`. Then half-open: one caller tries,
 * and the others wait for the result. */
typedef enum kvfi_breaker_state { KVFI_BREAKER_CLOSED, KVFI_BREAKER_OPEN, KVFI_BREAKER_HALF_OPEN } kvfi_breaker_state;
typedef struct kvfi_breaker {
    int64_t until_us;    /* nobody tries before */
    uint32_t backoff_ms; /* of the last failure; 0: closed */
    bool trying;         /* one caller does */
} kvfi_breaker;

/* May blocks be saved to a server, given its settings? (rules.h) */
typedef struct kvfi_admission {
    bool known;       /* it was asked since it was last down */
    bool logged;      /* the findings were reported */
    bool closed;      /* it refuses to show its settings */
    unsigned missed;  /* bits: kvfi_probe that it was silent at, and is asked once more */
    bool bounded;     /* only as many bytes as there is room for */
    kvf_reason saves; /* KVF_WHY_NONE: yes; or why not */
    const char *code; /* the finding that forbids it */
} kvfi_admission;

/* Questions that only provide information, and that nothing depends on. If a server refuses one, or a proxy breaks the
 * connection off, it is not asked again. After silence it is asked later: the server may only have been slow. */
typedef enum kvfi_probe { KVFI_PROBE_NAME = 1, KVFI_PROBE_INFO = 2, KVFI_PROBE_CONFIG = 4 } kvfi_probe;

typedef struct kvfi_node {
    const kvfi_redis_conf *conf;
    kvfi_endpoint server;
    kvfi_tls_peer peer;        /* the same server, for TLS */
    _Atomic uint32_t answered; /* which of its addresses answered last (dial.c) */
    char name[256];            /* the name that its certificate must have */
    pthread_mutex_t lock;      /* of all that follows; never held over I/O */
    pthread_cond_t freed;      /* a connection was given back */
    kvfi_lane lanes[KVFI_NUM_LANES];
    kvfi_breaker breaker; /* for connections */
    kvfi_breaker saves;   /* for saves alone: the server has no memory or no disk for them. Loads go on. */
    kvfi_admission admission;
    _Atomic uint64_t longest; /* as in kvfi_verdict */
    _Atomic uint64_t most;    /* as in kvfi_verdict */
    _Atomic int64_t room;     /* of a bounded one: bytes that may still be saved before it is asked again */
    atomic_bool spoken;       /* it has answered us once, so both sides use the same protocol */
    /* bits: kvfi_probe that it does not answer; that it has answered; that it was silent at, until silent_until_us */
    _Atomic unsigned mute, heard, silent;
    _Atomic int64_t silent_until_us;
    unsigned silences;              /* how often a patient caller met silence, up to a bound */
    _Atomic int64_t max_idle_us;    /* a connection that was idle for longer is not reused */
    _Atomic int64_t doubt_until_us; /* from then on max_idle_us is the longest again */
    unsigned doubts;                /* how often it was lowered, up to a bound */
    int64_t said_us;                /* when the log last reported an ended connection */
    kvf_error trouble;              /* why the last connection failed */
    kvf_reason trouble_why;
    _Atomic uint64_t *connects, *disconnects;
} kvfi_node;

/* `name`: the server's name, if its address is not its name; or NULL. */
void kvfi_node_init(kvfi_node *, const kvfi_redis_conf *, const kvfi_endpoint *, const char *name,
                    _Atomic uint64_t *connects, _Atomic uint64_t *disconnects);
void kvfi_node_cleanup(kvfi_node *); /* all connections have been given back */
void kvfi_node_trim(kvfi_node *);    /* closes idle connections: they are not expected to be of use any more */
/* The server was the primary and no longer is: behind a name, or a moving address, another one is. The connection and
 * all idle ones are closed, so that the name is resolved again. */
void kvfi_node_renew(kvfi_node *, kvfi_conn *);

/* kvfi_node_take returns a connection that is open, introduced and without outstanding replies. It makes one if there
 * is none, or waits for one until the deadline. With a feed it stops waiting when that is cancelled or, unless
 * `must` is set, dry, and the connection waits as the feed says (patience_us, cancelled). On failure *out is NULL;
 * `err` (or NULL) gets a sentence and, if the operator must change something, KVF_CONFIG. */
kvf_reason kvfi_node_take(kvfi_node *, kvfi_conn **out, kvf_error *err, kvfi_lane_kind, const kvfi_feed *feed,
                          bool must, int64_t deadline_us);
/* The same for callers that can't repeat a request: a connection that was idle has answered a PING. */
kvf_reason kvfi_node_take_sure(kvfi_node *, kvfi_conn **out, kvf_error *err, kvfi_lane_kind, int64_t deadline_us);
/* Gives it back, open or closed. */
void kvfi_node_give(kvfi_node *, kvfi_lane_kind, kvfi_conn *);
/* Of a connection that has ended, before it is given back: may its requests be repeated on another? Yes, if it was idle
 * before and has brought nothing since (such connections are then not trusted any more). Also once for each call if it
 * stalled, since the next connection must first show that the server is there: `stalls` counts that. Then it does not
 * count against the server. */
bool kvfi_node_forgives(kvfi_node *, kvfi_conn *, unsigned *stalls);

/* Replaces a connection that is closed, or not trusted any more. */
kvf_reason kvfi_node_reopen(kvfi_node *, kvfi_conn *, kvf_error *err, int64_t deadline_us);

/* Those of the probes that may be sent now. */
unsigned kvfi_node_probes(const kvfi_node *, unsigned probes);
/* Is the probe answered, as far as known? */
static inline bool kvfi_node_answers(const kvfi_node *node, kvfi_probe probe) {
    return kvfi_node_probes(node, probe) != 0;
}
/* It is not: `why` in the words of the server, or of the connection. Logged once. A probe that was answered before is
 * still believed to be. */
void kvfi_node_is_mute(kvfi_node *, kvfi_probe, const char *why);
/* Nothing came within the time of the caller, which may have been `brief`: asked again later. */
void kvfi_node_is_silent(kvfi_node *, unsigned probes, bool brief);
void kvfi_node_was_heard(kvfi_node *, kvfi_probe);

/* Loads go before saves: waits until none is under way, for a limited time. */
void kvfi_node_yield(kvfi_node *);

/* The rule to add to a user's ACL for what the server refused as NOPERM: "+hset", "~kvf1:*". `said`: the server's
 * words. */
void kvfi_acl_rule(char out[96], const char *said, const char *prefix);

/* May something be saved there? After a yes the caller reports the result: whether the server refused all saves, not
 * only this one. */
bool kvfi_node_may_save(kvfi_node *);
void kvfi_node_note_saves(kvfi_node *, bool refused);

kvfi_admission kvfi_node_admission(kvfi_node *);
void kvfi_node_admit(kvfi_node *, const kvfi_admission *);

/* Why the last connection failed. */
kvf_reason kvfi_node_trouble(kvfi_node *);
/* The state of the breakers, for reports. */
void kvfi_node_states(kvfi_node *, kvfi_breaker_state *connections, kvfi_breaker_state *saves);

/* What an error reply means for an item. */
kvf_reason kvfi_reply_reason(const kvfi_reply *);
/* The server accepts nothing at the moment: it is out of memory, can't write to its disk, or is a replica (with several
 * servers that means: ask another). */
bool kvfi_reply_refuses_saves(const kvfi_reply *, bool several);
static inline bool kvfi_reply_says(const kvfi_reply *reply, const char *word) {
    size_t len = strlen(word);
    return reply->len >= len && memcmp(reply->text, word, len) == 0;
}

#endif
