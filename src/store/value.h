/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tiers that keep values themselves (mem, file) have in common: walking over an item's iovecs without changing
 * them, and telling from two headers whether two values are the same.
 */
#ifndef KVFI_VALUE_H
#define KVFI_VALUE_H

#include "store/tier.h"

typedef struct kvfi_cursor {
    const struct iovec *iov;
    size_t num;
    size_t skip; /* bytes of iov[0] that are done */
} kvfi_cursor;

static inline kvfi_cursor kvfi_cursor_of(const kvfi_item *item) {
    return (kvfi_cursor){.iov = item->iov, .num = item->num_iov};
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

/* The first `len` bytes of an item, wherever its iovecs cut them. false when it has less. */
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

/* kvfi_same_record is true when two headers announce the same bytes: everything but the time of storing. A key names
 * its content, so nearly always they do; a value that is rewritten under its key (a session) and a damaged one differ.
 */
static inline bool kvfi_same_record(const uint8_t a[KVFI_HEADER_BYTES], const uint8_t b[KVFI_HEADER_BYTES]) {
    kvfi_header x, y;
    if (kvfi_header_decode(&x, a) != KVF_WHY_NONE || kvfi_header_decode(&y, b) != KVF_WHY_NONE) {
        return false;
    }
    return x.flags == y.flags && x.first_token == y.first_token && x.num_tokens == y.num_tokens &&
           x.payload_bytes == y.payload_bytes && memcmp(&x.addr, &y.addr, sizeof x.addr) == 0 &&
           memcmp(x.checksum, y.checksum, sizeof x.checksum) == 0;
}

#endif
