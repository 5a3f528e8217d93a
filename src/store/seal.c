/* SPDX-License-Identifier: Apache-2.0
 *
 * Hashes a record piece by piece while it is being sent.
 */
#include "store/seal.h"

void kvfi_seal_begin(kvfi_seal *seal, kvfi_item *item) {
    seal->item = item;
    seal->at = kvfi_cursor_of(item);
    seal->done = 0;
    kvfi_record_sum_init(&seal->sum, item->iov[0].iov_base);
    kvfi_cursor_advance(&seal->at, KVFI_HEADER_BYTES);
}

static void hash(kvfi_seal *seal, size_t bytes) {
    struct iovec piece;
    for (; kvfi_cursor_fill(&seal->at, &piece, 1, bytes) > 0; bytes -= piece.iov_len) {
        kvfi_xxh3_add(&seal->sum, piece.iov_base, piece.iov_len);
        kvfi_cursor_advance(&seal->at, piece.iov_len);
    }
}

static void write_sum(kvfi_seal *seal) {
    kvfi_item *item = seal->item;
    const struct iovec *last = &item->iov[item->num_iov - 1];
    kvfi_xxh3_end(&seal->sum, (uint8_t *)last->iov_base + last->iov_len - KVFI_SUM_BYTES);
    item->unsealed = false;
}

/* The number of bytes among the first `bytes` of the item that are after its header and before its checksum. */
static size_t hashed_of(const kvfi_item *item, size_t bytes) {
    size_t end = item->bytes - KVFI_SUM_BYTES;
    size_t upto = bytes < end ? bytes : end;
    return upto > KVFI_HEADER_BYTES ? upto - KVFI_HEADER_BYTES : 0;
}

size_t kvfi_seal_next(kvfi_seal *seal, size_t bytes) {
    kvfi_item *item = seal->item;
    size_t num = bytes < item->bytes - seal->done ? bytes : item->bytes - seal->done;
    hash(seal, hashed_of(item, seal->done + num) - hashed_of(item, seal->done));
    seal->done += num;
    if (item->unsealed && seal->done > item->bytes - KVFI_SUM_BYTES) {
        write_sum(seal);
    }
    return num;
}

void kvfi_item_seal(kvfi_item *item) {
    kvfi_seal seal;
    kvfi_seal_begin(&seal, item);
    (void)kvfi_seal_next(&seal, item->bytes);
}
