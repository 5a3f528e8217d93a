/* SPDX-License-Identifier: Apache-2.0
 *
 * A push decoder for RESP2, the protocol of Redis and Valkey. Pure: no I/O, no allocation, and no copy of anything big.
 *
 * The caller names the place of a body before its reply arrives. The decoder asks for bytes (kvfi_resp_want fills
 * iovecs for readv: the place itself, and a small scratch for the lines around it), learns how many came
 * (kvfi_resp_got), and hands out replies (kvfi_resp_next). So a value goes from the socket straight into the caller's
 * memory:
 *
 *     kvfi_resp_into(&resp, place);                            once for each reply that has a place
 *     while (kvfi_resp_next(&resp, &reply) == KVFI_RESP_MORE) {
 *         size_t num = kvfi_resp_want(&resp, iov, 16);
 *         kvfi_resp_got(&resp, (size_t)readv(fd, iov, (int)num));
 *     }
 *
 * An array is announced, and its elements follow as separate replies, however deep they nest. `last` marks the one that
 * completes the answer to a command. So nothing is accumulated, and a hostile server can only make this decoder hand
 * out short replies, or return KVFI_RESP_BAD, after which the connection must be closed.
 */
#ifndef KVFI_RESP_DECODE_H
#define KVFI_RESP_DECODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define KVFI_RESP_MIN_SCRATCH  128u
#define KVFI_RESP_MAX_LINE     1024u      /* of a status, an error, a number; also bounded by the scratch */
#define KVFI_RESP_MAX_ELEMENTS (1u << 20) /* announced and still to come, in one answer */

typedef enum kvfi_resp_kind {
    KVFI_RESP_STATUS,  /* +OK: `text` */
    KVFI_RESP_ERROR,   /* -ERR ...: `text`, without the dash */
    KVFI_RESP_INT,     /* :7: `num` */
    KVFI_RESP_BULK,    /* `num` bytes, in their place, or, if none was named, as `text` in the scratch */
    KVFI_RESP_NIL,     /* $-1 or *-1 */
    KVFI_RESP_ARRAY,   /* `num` replies follow as its elements */
    KVFI_RESP_OVERSIZE /* a bulk of `num` bytes that neither its place nor the scratch can hold, reported before its
                          body is read. Close the connection, or continue: the body is then discarded. */
} kvfi_resp_kind;

typedef struct kvfi_reply {
    kvfi_resp_kind kind;
    bool last; /* it completes the answer to a command */
    int64_t num;
    const char *text; /* not terminated; lies in the scratch, valid until the next call */
    size_t len;
} kvfi_reply;

/* Where a body goes: `bytes` bytes, from byte `skip` of iov[0] on. The iovecs hold at least that many, and stay as they
 * are. */
typedef struct kvfi_place {
    const struct iovec *iov;
    size_t skip;
    size_t bytes;
} kvfi_place;

/* What follows its first `bytes` bytes; at most its length. */
static inline void kvfi_place_advance(kvfi_place *place, size_t bytes) {
    place->bytes -= bytes;
    place->skip += bytes;
    while (place->bytes > 0 && place->skip >= place->iov->iov_len) {
        place->skip -= place->iov->iov_len;
        place->iov++;
    }
}

typedef enum kvfi_resp_event { KVFI_RESP_MORE, KVFI_RESP_REPLY, KVFI_RESP_BAD } kvfi_resp_event;

typedef struct kvfi_resp {
    char *scratch; /* the caller's */
    size_t cap;
    size_t begin, end; /* scratch[begin, end) has come and is not used yet */
    size_t seen;       /* that many of them are known to hold no line end */
    kvfi_place place;  /* of the next bulk, then what is left of it */
    bool has_place;
    uint8_t state;
    uint8_t to;        /* where the current body goes */
    uint64_t body;     /* its length */
    uint64_t left;     /* that many bytes of it are still to come */
    uint64_t elements; /* replies that still belong to the current answer; 0 between answers */
    size_t header;     /* the length of "$<n>\r\n" of that place: a good guess for the next */
} kvfi_resp;

/* `scratch` holds at least KVFI_RESP_MIN_SCRATCH bytes and lives as long as the decoder. The longest bulk without a
 * place must fit into it with its CRLF. */
void kvfi_resp_init(kvfi_resp *, char *scratch, size_t cap);

/* Names the place of the next reply if that is a bulk. Call it between replies. It applies to this one reply, whatever
 * comes. */
void kvfi_resp_into(kvfi_resp *, kvfi_place);

/* The next reply, if it is complete. KVFI_RESP_BAD is final. */
kvfi_resp_event kvfi_resp_next(kvfi_resp *, kvfi_reply *);

/* After KVFI_RESP_MORE: where to read to. At least one iovec of at least one byte; `cap` is at least 2. */
size_t kvfi_resp_want(kvfi_resp *, struct iovec *out, size_t cap);
/* That many bytes were read into the iovecs of the last kvfi_resp_want, in their order. */
void kvfi_resp_got(kvfi_resp *, size_t num);

/* How much of the current body is still to come. */
static inline uint64_t kvfi_resp_left(const kvfi_resp *resp) {
    return resp->left;
}
/* No reply has begun, and no byte is left. */
bool kvfi_resp_idle(const kvfi_resp *);
/* The body of a KVFI_RESP_OVERSIZE is still being discarded. */
bool kvfi_resp_draining(const kvfi_resp *);

#endif
