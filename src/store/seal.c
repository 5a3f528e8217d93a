/* SPDX-License-Identifier: Apache-2.0 */
#include "store/seal.h"

void kvfi_seal_begin(kvfi_seal *seal, kvfi_item *item) {
    seal->item = item;
    seal->at = kvfi_cursor_of(item);
    seal->left = item->bytes - KVFI_HEADER_BYTES - KVFI_SUM_BYTES;
    kvfi_record_sum_init(&seal->sum, item->iov[0].iov_base);
    kvfi_cursor_advance(&seal->at, KVFI_HEADER_BYTES);
}

size_t kvfi_seal_next(kvfi_seal *seal, size_t bytes) {
    kvfi_item *item = seal->item;
    bool first = seal->left == item->bytes - KVFI_HEADER_BYTES - KVFI_SUM_BYTES;
    size_t num = bytes < seal->left ? bytes : seal->left;
    struct iovec piece;
    seal->left -= num;
    for (size_t todo = num; todo > 0 && kvfi_cursor_fill(&seal->at, &piece, 1, todo) > 0; todo -= piece.iov_len) {
        kvfi_xxh3_add(&seal->sum, piece.iov_base, piece.iov_len);
        kvfi_cursor_advance(&seal->at, piece.iov_len);
    }
    num += first ? KVFI_HEADER_BYTES : 0;
    if (seal->left > 0) {
        return num;
    }
    const struct iovec *last = &item->iov[item->num_iov - 1];
    kvfi_xxh3_end(&seal->sum, (uint8_t *)last->iov_base + last->iov_len - KVFI_SUM_BYTES);
    item->unsealed = false;
    return num + KVFI_SUM_BYTES;
}

void kvfi_item_seal(kvfi_item *item) {
    kvfi_seal seal;
    kvfi_seal_begin(&seal, item);
    (void)kvfi_seal_next(&seal, item->bytes);
}
