/* SPDX-License-Identifier: Apache-2.0
 *
 * A proxy that breaks the connection between a client and a real server, byte by byte. It listens on a private unix
 * socket and on a TCP port of 127.0.0.1, and runs in a thread. Every fault follows from the plan and its seed.
 */
#ifndef KVFT_PROXY_H
#define KVFT_PROXY_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What happens to the bytes of a connection; zero everywhere is a faithful relay. Positions count the bytes of the
 * server's replies on that connection. */
typedef struct kvft_plan {
    uint64_t seed;
    uint32_t latency_ms;  /* each piece of a reply comes that much later */
    uint64_t bytes_per_s; /* of replies, on all connections together, as on one cable; 0 = unlimited */
    uint32_t slice_bytes; /* replies arrive in pieces of 1 to this many bytes */
    int64_t stall_after;  /* after this many reply bytes nothing more comes, and the connection stays open; 0 = never */
    bool stall_one;       /* ... on the first connection that gets so far only */
    int64_t cut_after;    /* the connection is closed in an orderly way after so many reply bytes; 0 = never */
    bool reset;           /* ... with a reset instead (TCP) */
    int64_t half_open_after; /* requests are swallowed from this many reply bytes on, as by a peer that lost power; 0 =
                                never */
    int64_t garbage_at;      /* 16 random bytes take the place of the reply's at this position; 0 = never */
    int64_t flip_at;         /* one bit of the reply at this position is flipped; 0 = never */
    bool refuse;             /* connections are accepted and closed at once */
    const char *breaks_on;   /* a connection is closed when a command has this text, which is not passed on; */
    bool silent;             /* ... or, instead, no further request passes, and it stays open */
    bool ends_old; /* a connection that exists when the plan is set has lain idle for too long: it ends with the next
                      request, which is swallowed with all that follows or, with `reset`, answered with a reset */
    bool swap;     /* two replies that arrive in one piece change places, where that can be done by length alone */
} kvft_plan;

typedef struct kvft_proxy kvft_proxy;

/* `target`: the path of the server's unix socket. */
kvft_proxy *kvft_proxy_start(const char *target);
void kvft_proxy_stop(kvft_proxy *);
const char *kvft_proxy_unix_url(const kvft_proxy *); /* redis+unix://... */
const char *kvft_proxy_tcp_url(const kvft_proxy *);  /* redis://127.0.0.1:port */
/* For connections from now on, and for those that exist: positions count from now. */
void kvft_proxy_set(kvft_proxy *, const kvft_plan *);
/* Closes all connections that exist. */
void kvft_proxy_cut(kvft_proxy *);

typedef struct kvft_proxy_stats {
    uint64_t connections, faults; /* faults: of all kinds that happened */
    unsigned open;                /* connections now: each has two sockets */
    uint64_t to_server, to_client;
} kvft_proxy_stats;
kvft_proxy_stats kvft_proxy_stats_get(kvft_proxy *);
#endif
