/* SPDX-License-Identifier: Apache-2.0
 *
 * Hash slots of a Redis Cluster: the slot of a key, the server of a slot, and what servers say about both. Pure: no
 * I/O, no allocation.
 */
#ifndef KVFI_SLOTS_H
#define KVFI_SLOTS_H

#include "resp/decode.h"

#define KVFI_NUM_SLOTS 16384u
#define KVFI_NO_OWNER  UINT16_MAX
#define KVFI_MAX_NODES 256u /* of one Cluster with slots; more are refused */

/* The slot of a key: CRC16 of the text in its first {...}, or of the whole key without braces. */
uint16_t kvfi_slot_of(const char *key, size_t len);

typedef struct kvfi_host {
    char name[256];  /* "" = the server that sent this */
    bool empty;      /* it was an empty string, which means the server itself, if it has that port */
    char alias[256]; /* its host name, if `name` is an address (cluster-announce-hostname); or "" */
    uint16_t port;
} kvfi_host;

/* The reply to CLUSTER SLOTS, taken piece by piece as the decoder hands it out. */
typedef struct kvfi_slots {
    uint16_t owner[KVFI_NUM_SLOTS];  /* an index into hosts, or KVFI_NO_OWNER: also where the host can't be used */
    kvfi_host hosts[KVFI_MAX_NODES]; /* primaries only */
    unsigned num_hosts;
    /* ---- of the parser */
    bool begun, bad;
    unsigned depth;
    int64_t left[4];  /* elements still to come, by depth */
    int64_t index[4]; /* the next element's */
    int64_t first, last;
    bool hostname; /* the next string of the primary's metadata is its host name */
    bool usable;   /* the primary's host and port, as far as they have come */
    kvfi_host host;
} kvfi_slots;

void kvfi_slots_init(kvfi_slots *);
/* Takes one reply. False: this is not a slot map, and the rest of the answer need not be read. */
bool kvfi_slots_take(kvfi_slots *, const kvfi_reply *);

/* "MOVED 3999 127.0.0.1:6381", "ASK 3999 [::1]:6381"; a host may be missing or "?". `text` is an error reply without
 * its dash. */
typedef enum kvfi_redirect_kind { KVFI_REDIRECT_NONE, KVFI_REDIRECT_MOVED, KVFI_REDIRECT_ASK } kvfi_redirect_kind;
kvfi_redirect_kind kvfi_redirect_parse(uint16_t *slot, kvfi_host *to, const char *text, size_t len);

#endif
