/* SPDX-License-Identifier: Apache-2.0
 *
 * Short commands for many keys, in one round trip to each server.
 */
#ifndef KVFI_REDIS_ASK_H
#define KVFI_REDIS_ASK_H

#include "redis/blocks/blocks.h"

/* The same few commands for each of many keys, and what becomes of the replies. A key whose server has changed, or
 * whose connection ended, is asked again from its first command on. */
typedef struct kvfi_question kvfi_question;
struct kvfi_question {
    kvfi_redis *tier;
    const kvfi_addr *addrs;
    size_t num;
    kvfi_lane_kind lane;
    int64_t patience_us; /* as in kvfi_feed */
    unsigned per;        /* commands for each key */
    /* Writes command number `step` for the key. */
    void (*say)(const kvfi_question *, kvfi_cmd *out, size_t key, unsigned step);
    /* Takes a reply that is not an error. False: it is no reply to this command. */
    bool (*hear)(const kvfi_question *, size_t key, unsigned step, const kvfi_reply *);
    /* The server refused the command, or it has no answer. */
    void (*fail)(const kvfi_question *, size_t key, unsigned step, kvf_reason);
    const char *wrong; /* said of a connection that brought no reply to these commands */
    const char *doing; /* for the log, which tells the first refusal; NULL = it does not */
    void *arg;         /* of the functions */
};

/* Asks of the keys with these numbers (NULL: of the first `num`). Adds 1 to *round_trips for each server and round. */
void kvfi_redis_ask(const kvfi_question *, const uint32_t *keys, size_t num, uint64_t *round_trips,
                    int64_t deadline_us);

#endif
