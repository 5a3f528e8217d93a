/* SPDX-License-Identifier: Apache-2.0
 *
 * Common code of the tiers that keep values themselves (mem, file): walking over an item's iovecs without changing
 * them, and recognising from two headers whether two values are the same.
 */
#ifndef KVFI_VALUE_H
#define KVFI_VALUE_H

#include "tier/tier.h"

typedef struct kvfi_cursor {
    const struct iovec *iov;
    size_t num;
    size_t skip; /* bytes of iov[0] that are done */
} kvfi_cursor;

static inline kvfi_cursor kvfi_cursor_of(const kvfi_item *item) {
    return (kvfi_cursor){.iov = item->iov, .num = item->num_iov};
}

/* Over what an item that is to be sealed is sealed from. */
static inline kvfi_cursor kvfi_cursor_of_clear(const kvfi_item *item) {
    return item->clear != NULL ? (kvfi_cursor){.iov = item->clear, .num = item->num_clear} : kvfi_cursor_of(item);
}

/* kvfi_cursor_fill writes the next iovecs, at most `cap` and together at most `max_bytes`, and returns their number. */
static inline size_t kvfi_cursor_fill(const kvfi_cursor *cursor, struct iovec *out, size_t cap, size_t max_bytes) {
    size_t num = 0;
    size_t skip = cursor->skip;
    for (size_t i = 0; i < cursor->num && num < cap && max_bytes > 0; i++) {
        size_t len = cursor->iov[i].iov_len - skip;
        if (len > max_bytes) {
            len = max_bytes;
        }
        if (len > 0) {
            out[num++] = (struct iovec){(uint8_t *)cursor->iov[i].iov_base + skip, len};
        }
        max_bytes -= len;
        skip = 0;
    }
    return num;
}

static inline void kvfi_cursor_advance(kvfi_cursor *cursor, size_t bytes) {
    while (cursor->num > 0 && bytes >= cursor->iov[0].iov_len - cursor->skip) {
        bytes -= cursor->iov[0].iov_len - cursor->skip;
        cursor->skip = 0;
        cursor->iov++;
        cursor->num--;
    }
    cursor->skip += bytes;
}

/* The first `len` bytes of an item, across its iovecs. False if it has less. */
static inline bool kvfi_item_peek(uint8_t *out, const kvfi_item *item, size_t len) {
    for (size_t i = 0; i < item->num_iov && len > 0; i++) {
        size_t part = item->iov[i].iov_len < len ? item->iov[i].iov_len : len;
        if (part > 0) {
            memcpy(out, item->iov[i].iov_base, part);
        }
        out += part;
        len -= part;
    }
    return len == 0;
}

/* The checksum at the end of an item, across its iovecs. False if the item is shorter. */
static inline bool kvfi_item_sum(uint8_t out[KVFI_SUM_BYTES], const kvfi_item *item) {
    struct iovec iov;
    kvfi_cursor cursor = kvfi_cursor_of(item);
    if (item->bytes < KVFI_SUM_BYTES) {
        return false;
    }
    kvfi_cursor_advance(&cursor, item->bytes - KVFI_SUM_BYTES);
    for (size_t done = 0; kvfi_cursor_fill(&cursor, &iov, 1, KVFI_SUM_BYTES - done) > 0; done += iov.iov_len) {
        memcpy(out + done, iov.iov_base, iov.iov_len);
        kvfi_cursor_advance(&cursor, iov.iov_len);
    }
    return true;
}

/* The beginning and the end of a record. */
typedef struct kvfi_ends {
    uint8_t header[KVFI_HEADER_BYTES], sum[KVFI_SUM_BYTES];
} kvfi_ends;

static inline bool kvfi_item_ends(kvfi_ends *out, const kvfi_item *item) {
    return kvfi_item_peek(out->header, item, sizeof out->header) && kvfi_item_sum(out->sum, item);
}

/* kvfi_same_record is true if two records differ only in the time of storing: their checksums, which cover everything
 * else, are equal. A key names its content, so nearly always they are. A value that is rewritten under its key (a
 * session) and a damaged one differ. */
static inline bool kvfi_same_record(const kvfi_ends *a, const kvfi_ends *b) {
    kvfi_header x, y;
    return kvfi_header_decode(&x, a->header) == KVF_WHY_NONE && kvfi_header_decode(&y, b->header) == KVF_WHY_NONE &&
           kvfi_record_bytes(&x) == kvfi_record_bytes(&y) && memcmp(&x.addr, &y.addr, sizeof x.addr) == 0 &&
           memcmp(a->sum, b->sum, sizeof a->sum) == 0;
}

#endif
