/* SPDX-License-Identifier: Apache-2.0
 *
 * A talk: one command after the other on a connection to the server that has the slot, for everything outside the hot
 * path (admission, admin, sessions, doctor).
 */
#ifndef KVFI_REDIS_TALK_H
#define KVFI_REDIS_TALK_H

#include "redis/cluster/servers.h"

typedef struct kvfi_talk {
    kvfi_redis *tier;
    kvfi_node *node;
    kvfi_conn *conn; /* NULL: the talk has not begun, or is over */
    kvfi_lane_kind lane;
    kvf_error *err;
    int64_t deadline_us;
    uint64_t unheard; /* commands whose replies have not been read completely */
    /* the server that has the slot now, and answers to ASKING; set by a talk that failed, for the next try */
    kvfi_node *ask;
    bool half;      /* the reply to an ASKING has been read, that to its command has not, or not completely */
    bool astray;    /* another server, or the same a little later, would have answered */
    kvf_reason why; /* the connection could not be had, or ended */
    bool denied;    /* a key belongs to another user */
    bool moving;    /* its slot is moving: wait for the end of that */
} kvfi_talk;

/* KVF_OK, or KVF_CONFIG, KVF_IO, KVF_NOMEM with err. After KVF_OK it must be ended. Talks to the only server, or the
 * one that has the slot, or talk->ask, which is NULL at first. */
kvf_status kvfi_talk_begin(kvfi_talk *, kvfi_redis *, kvf_error *, uint16_t slot, kvfi_lane_kind, int64_t deadline_us);
kvf_status kvfi_talk_begin_on(kvfi_talk *, kvfi_redis *, kvf_error *, kvfi_node *, kvfi_lane_kind, int64_t deadline_us);
/* After a failed talk has ended: is another try worthwhile? Waits for the right time. `tries` counts the tries. */
bool kvfi_talk_again(const kvfi_talk *, unsigned *tries);
void kvfi_talk_end(kvfi_talk *);
/* Continues on another connection to the same server. Commands whose replies were not read are forgotten. */
kvf_status kvfi_talk_renew(kvfi_talk *);
/* Queues one command of plain texts; NULL ends the list. */
kvf_status kvfi_talk_say(kvfi_talk *, ...) __attribute__((sentinel));
/* Waits until the body of a command that was queued on the connection has left. Another can then be queued. */
kvf_status kvfi_talk_send_body(kvfi_talk *);
/* Call this before naming a place for the next reply: that reply comes next. */
kvf_status kvfi_talk_expect(kvfi_talk *);
/* Reads the next reply. KVF_OK also for error replies: the caller decides what they mean. KVF_IO: the connection is
 * gone. */
kvf_status kvfi_talk_hear(kvfi_talk *, kvfi_reply *);
/* KVF_IO with the server's own words, or the sentence if `reply` is not an error. */
kvf_status kvfi_talk_refused(kvfi_talk *, const kvfi_reply *, const char *doing);

/* All servers that have slots. At most `cap`. */
size_t kvfi_redis_nodes(kvfi_redis *, kvfi_node **out, size_t cap);

#endif
