/* SPDX-License-Identifier: Apache-2.0
 *
 * A simulated world behind the system table: a clock that advances only when somebody waits, a network, and Redis
 * servers (one, or a Cluster of three) in this process. No threads: the caller does all the work. So one seed is one
 * run, byte for byte, and thousands of them take seconds.
 */
#ifndef KVFT_SIM_H
#define KVFT_SIM_H
#include <stdbool.h>
#include <stdint.h>

#include "support/forge.h"

#define KVFT_SIM_URL          "redis://127.0.0.1:7000"
#define KVFT_SIM_CLUSTER_URL  "redis+cluster://127.0.0.1:7000,127.0.0.1:7001"
#define KVFT_SIM_SENTINEL_URL "redis+sentinel://127.0.0.1:7001/kvferry" /* needs a kvft_sim_lie that answers */

/* How probable each thing is, in 1/65536: of a connection, a reply, a command, a read or a write. */
typedef struct kvft_sim_plan {
    uint32_t refuse, hang;         /* a connect */
    uint32_t cut, stall, flip;     /* a connection: somewhere in the bytes that it brings */
    uint32_t slow;                 /* a reply: up to half a second */
    uint32_t error, other, vanish; /* a command: an error reply; another key's value; its key is gone before */
    uint32_t redirect;     /* a command in a Cluster: its third of the slots has moved just then, or is moving (ASK) */
    bool slices;           /* reads and writes take a few bytes only */
    int64_t round_trip_us; /* of a connect and of each reply, besides the time of a good network */
} kvft_sim_plan;

void kvft_sim_begin(uint64_t seed, bool cluster); /* installs the table; all is well */
void kvft_sim_plan_set(const kvft_sim_plan *);
void kvft_sim_sleep_ms(int64_t ms);
/* Sees every reply before it leaves, as it goes over the wire, and may change it; NULL: nobody does. Until
 * kvft_sim_end. */
typedef void (*kvft_sim_lie_fn)(void *ctx, const char *command, const char *first_arg, kvft_buffer *reply);
void kvft_sim_lie(kvft_sim_lie_fn, void *ctx);

typedef struct kvft_sim_stats {
    uint64_t commands, refused, hung, cut, stalled, flipped, slow, errors, others, vanished, moved, asked;
} kvft_sim_stats;
/* The real table again. Returns how many connections or blocks of memory the library still holds. */
uint64_t kvft_sim_end(void);
kvft_sim_stats kvft_sim_stats_get(void); /* of all runs */
#endif
