/* SPDX-License-Identifier: Apache-2.0
 *
 * Hashes a record piece by piece while it is being sent.
 */
#include "tier/finish.h"

void kvfi_finish_begin(kvfi_finish *finish, kvfi_item *item) {
    finish->item = item;
    finish->at = kvfi_cursor_of(item);
    finish->done = 0;
    kvfi_record_sum_init(&finish->sum, item->iov[0].iov_base);
    kvfi_cursor_advance(&finish->at, KVFI_HEADER_BYTES);
}

static void hash(kvfi_finish *finish, size_t bytes) {
    struct iovec piece;
    for (; kvfi_cursor_fill(&finish->at, &piece, 1, bytes) > 0; bytes -= piece.iov_len) {
        kvfi_xxh3_add(&finish->sum, piece.iov_base, piece.iov_len);
        kvfi_cursor_advance(&finish->at, piece.iov_len);
    }
}

static void write_sum(kvfi_finish *finish) {
    kvfi_item *item = finish->item;
    const struct iovec *last = &item->iov[item->num_iov - 1];
    kvfi_xxh3_end(&finish->sum, (uint8_t *)last->iov_base + last->iov_len - KVFI_SUM_BYTES);
    item->unfinished = false;
}

/* The number of bytes among the first `bytes` of the item that are after its header and before its checksum. */
static size_t hashed_of(const kvfi_item *item, size_t bytes) {
    size_t end = item->bytes - KVFI_SUM_BYTES;
    size_t upto = bytes < end ? bytes : end;
    return upto > KVFI_HEADER_BYTES ? upto - KVFI_HEADER_BYTES : 0;
}

size_t kvfi_finish_next(kvfi_finish *finish, size_t bytes) {
    kvfi_item *item = finish->item;
    size_t num = bytes < item->bytes - finish->done ? bytes : item->bytes - finish->done;
    hash(finish, hashed_of(item, finish->done + num) - hashed_of(item, finish->done));
    finish->done += num;
    if (item->unfinished && finish->done > item->bytes - KVFI_SUM_BYTES) {
        write_sum(finish);
    }
    return num;
}

void kvfi_item_finish(kvfi_item *item) {
    kvfi_finish finish;
    kvfi_finish_begin(&finish, item);
    (void)kvfi_finish_next(&finish, item->bytes);
}
