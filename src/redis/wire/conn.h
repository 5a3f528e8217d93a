/* SPDX-License-Identifier: Apache-2.0
 *
 * One connection: bytes out and in, under deadlines. It knows RESP, but no command.
 *
 * Commands are written into a buffer (kvfi_conn_room), with at most one body at a time that is sent straight from the
 * caller's memory (kvfi_conn_body). Replies come through the decoder `in`. The three calls that move bytes (send, recv,
 * wait) are the whole I/O. An exchange is a loop over them, so it can read while its writes are blocked, and one poll
 * could drive several.
 *
 * Any failure closes the connection, and the call says why. A closed connection no longer touches memory of the caller.
 * The server may still read pages lent to it (kvfi_conn_record).
 */
#ifndef KVFI_REDIS_CONN_H
#define KVFI_REDIS_CONN_H

#include <stdatomic.h>

#include "base/base.h"
#include "redis/wire/lend.h"
#include "redis/wire/tls.h"
#include "resp/decode.h"
#include "resp/encode.h"

#define KVFI_CONN_SCRATCH 32768u /* more than any INFO */
#define KVFI_CONN_OUT     16384u
#define KVFI_CONN_BATCH   (128 << 10) /* in the middle of a body we wake up for this much, not for each segment */
#define KVFI_QUICK_BATCH  (512 << 10) /* the same of a quick server */
#define KVFI_CONN_IOV     1024u       /* IOV_MAX of Linux */

/* How long the servers of a store paused before they continued: the longest pause of this period and of the previous
 * one. A pause many times longer is a stall. */
typedef struct kvfi_pace {
    _Atomic int64_t longest_us[2];
    _Atomic int64_t turn_us; /* when the first becomes the second */
    atomic_bool known;       /* they have answered at least once */
} kvfi_pace;

typedef struct kvfi_conn {
    int fd;             /* -1: closed */
    kvfi_tls_link *tls; /* NULL: no TLS */
    uint32_t stall_ms;  /* the shortest stall */
    uint32_t most_ms;   /* and the longest */
    kvfi_pace *pace;    /* NULL: the shortest applies */
    bool patient;       /* for now only the deadline ends a wait */
    kvfi_resp in;
    kvfi_cmd out; /* commands; out.data[sent, out.len) is still to be sent */
    size_t sent;
    kvfi_place body; /* what is left of the body; it is sent before out.data[mark] */
    size_t held;     /* bytes at the end of the body that may not be sent yet: `fill` releases the next of them */
    size_t (*fill)(void *, size_t bytes);
    void *fill_arg;
    bool lends; /* if the socket accepts it and the body may be lent; set by the maker of the connection */
    bool lent;  /* the body */
    kvfi_lender lender;
    size_t mark;       /* only while there is a body */
    uint64_t received; /* total bytes */
    uint64_t owed;     /* replies that nobody will read: they precede those of the next command */
    bool tcp;
    bool readable;                /* the last kvfi_conn_wait saw something to read */
    bool slow;                    /* it brings less than KVFI_CONN_BATCH in half of stall_ms: wait for any byte */
    bool quick;                   /* the last wait was short */
    int low_water;                /* SO_RCVLOWAT now */
    bool roomy;                   /* a larger send buffer was asked for */
    int64_t patience_us;          /* of the batch that it serves; 0: what stall_ms and the pace say */
    const atomic_bool *cancelled; /* a wait ends early once it is true; NULL: it does not */
    bool asking;                  /* each command is preceded by ASKING: the server is importing the slot of its key */
    bool stalled;                 /* closed because nothing arrived */
    bool broke;                   /* closed by the peer, or because of what it sent */
    bool reused;                  /* how long it was idle before it was taken */
    int64_t idle_us;              /* while it is idle: since when */
    uint64_t before;              /* `received` when it was taken */
    bool mute;                    /* it could not be opened, and the server has not sent a byte */
    bool config;                  /* closed for a reason that the operator must fix */
    bool refuses;                 /* the server refuses all saves */
    /* while loads are under way, one value is saved at a time; NULL = independent of loads */
    const _Atomic unsigned *loads;
    uint64_t longest;      /* of the values that it takes */
    uint64_t most;         /* of one prefix at most a part of this is saved; 0 = no bound */
    _Atomic int64_t *room; /* bytes that may still be saved; NULL = no bound */
    char said[200];        /* the server's last error, for messages */
    _Atomic uint64_t *disconnects;
    struct iovec iov[KVFI_CONN_IOV];
    char scratch[KVFI_CONN_SCRATCH];
    char out_buffer[KVFI_CONN_OUT];
} kvfi_conn;

/* A server's address: the path of a unix socket, or host and port. */
typedef struct kvfi_endpoint {
    const char *path; /* NULL: host and port */
    char host[256];
    uint16_t port;
} kvfi_endpoint;

void kvfi_conn_init(kvfi_conn *, uint32_t stall_ms, _Atomic uint64_t *disconnects); /* closed */
/* With TLS if the peer has it. *answered: which address of a name answered last, and is tried first; 0 at first. */
kvf_reason kvfi_conn_open(kvfi_conn *, const kvfi_endpoint *, kvfi_tls_peer *, _Atomic uint32_t *answered,
                          int64_t deadline_us);
/* After a connection whose replies made no sense: does the server speak TLS and we do not (or the other way round)?
 * Tries it on a separate connection. */
bool kvfi_conn_is_other_tongue(const kvfi_endpoint *, bool tls, int64_t deadline_us);
void kvfi_conn_close(kvfi_conn *);

static inline bool kvfi_conn_is_open(const kvfi_conn *conn) {
    return conn->fd >= 0;
}

/* ---- writing */
/* Where to write commands of up to `bytes` bytes. NULL if there is no room: send first. */
kvfi_cmd *kvfi_conn_room(kvfi_conn *, size_t bytes);
/* The body follows what has been written so far. Only when kvfi_conn_body_sent. */
void kvfi_conn_body(kvfi_conn *, kvfi_place body);
/* The same for a part of a record. With `may_lend` its memory may be lent to the server, if the connection lends at
 * all; it must then not change until the server has replied. With `fill` the part is completed while it is sent: when
 * everything that may be sent has been sent, or the socket is full, `fill` is told how many more bytes should go. It
 * returns how many may, and no more than that; 0: the part can't be completed, which ends the connection. */
void kvfi_conn_record(kvfi_conn *, kvfi_place body, bool may_lend, size_t (*fill)(void *, size_t bytes),
                      void *fill_arg);
static inline bool kvfi_conn_body_sent(const kvfi_conn *conn) {
    return conn->body.bytes == 0;
}
static inline bool kvfi_conn_all_sent(const kvfi_conn *conn) {
    return conn->sent == conn->out.len && kvfi_conn_body_sent(conn);
}

/* ---- moving bytes. KVF_WHY_NONE, or the connection is closed. */
kvf_reason kvfi_conn_send(kvfi_conn *); /* sends as much as possible without waiting; once cancelled, a piece */
kvf_reason kvfi_conn_recv(kvfi_conn *,
                          /* reads as much as possible; *got: something arrived. Only after kvfi_resp_next returned
                           * MORE. */
                          bool *got);
/* For an exchange: sends and reads as much as possible, and waits if nothing arrived. */
kvf_reason kvfi_conn_move(kvfi_conn *, bool *got, int64_t deadline_us);
/* Waits until there is something to read or, if something is to be sent, room for it. Nothing for
 * kvfi_conn_patience_us: KVF_WHY_STALLED. The deadline: KVF_WHY_BUDGET. */
kvf_reason kvfi_conn_wait(kvfi_conn *, int64_t deadline_us);
static inline bool kvfi_conn_is_cancelled(const kvfi_conn *conn) {
    return conn->cancelled != NULL && atomic_load_explicit(conn->cancelled, memory_order_relaxed);
}
/* Closes the connection if it is cancelled, and returns KVF_WHY_CLOSED then. */
kvf_reason kvfi_conn_heed(kvfi_conn *);
/* The batch allows a silent server less time than the store would: its stalls say nothing about the server. */
bool kvfi_conn_is_impatient(const kvfi_conn *);
/* stall_ms, or a multiple of the server's longest recent pause if that is more. */
int64_t kvfi_conn_patience_us(const kvfi_conn *);
/* For callers that wait for several connections at once: the server continued after that time. */
void kvfi_conn_note_wait(const kvfi_conn *, int64_t waited_us);
/* Closes the connection, because nothing has arrived for too long. Returns KVF_WHY_STALLED. */
kvf_reason kvfi_conn_stall(kvfi_conn *, int64_t waited_us);

/* Nothing has arrived since the connection was taken after it had been idle: the server, or a proxy, may have dropped
 * it long ago. What was sent on it may be sent once more on another. */
static inline bool kvfi_conn_is_untried(const kvfi_conn *conn) {
    return conn->reused && conn->received == conn->before;
}

/* For a stream that never has to wait: has the deadline not passed? */
kvf_reason kvfi_conn_in_time(kvfi_conn *, int64_t deadline_us);

/* ---- for exchanges that take one answer after the other */
/* Sends what is to be sent, and waits for the next reply. */
kvf_reason kvfi_conn_next(kvfi_conn *, kvfi_reply *, int64_t deadline_us);
/* Reads and discards the rest of an answer, and of replies that nobody reads. */
kvf_reason kvfi_conn_skip_owed(kvfi_conn *, int64_t deadline_us);
#define KVFI_NOT_RESP "invalid RESP reply" /* of a server that is no Redis, perhaps: node.c looks for it */
/* The server broke the protocol, or sent an impossible reply: closes the connection. Returns KVF_WHY_UNREACHABLE. */
kvf_reason kvfi_conn_broken(kvfi_conn *, const char *what);
/* Keeps the text of an error reply for messages. */
void kvfi_conn_note_error(kvfi_conn *, const kvfi_reply *);

#endif
