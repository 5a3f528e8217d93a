/* SPDX-License-Identifier: Apache-2.0
 *
 * Hashes or seals a record piece by piece while it is being sent.
 */
#include "tier/finish.h"

bool kvfi_finish_begin(kvfi_finish *finish, kvfi_item *item) {
    const uint8_t *header = item->iov[0].iov_base;
    finish->item = item;
    finish->from = kvfi_cursor_of_clear(item);
    finish->to = kvfi_cursor_of(item);
    finish->done = 0;
    kvfi_cursor_advance(&finish->from, KVFI_HEADER_BYTES);
    kvfi_cursor_advance(&finish->to, KVFI_HEADER_BYTES);
    if (item->record_key == NULL) {
        kvfi_record_sum_init(&finish->sum, header);
        return true;
    }
    if (!kvfi_sealed_init(&finish->gcm, item->record_key, header)) {
        kvfi_finish_leave(finish, false);
        return false;
    }
    return true;
}

static void hash(kvfi_finish *finish, size_t bytes) {
    struct iovec piece;
    for (; kvfi_cursor_fill(&finish->from, &piece, 1, bytes) > 0; bytes -= piece.iov_len) {
        kvfi_xxh3_add(&finish->sum, piece.iov_base, piece.iov_len);
        kvfi_cursor_advance(&finish->from, piece.iov_len);
    }
}

static void seal(kvfi_finish *finish, size_t bytes) {
    struct iovec from, to;
    while (kvfi_cursor_fill(&finish->from, &from, 1, bytes) > 0 &&
           kvfi_cursor_fill(&finish->to, &to, 1, from.iov_len) > 0) {
        kvfi_gcm_add(&finish->gcm, to.iov_base, from.iov_base, to.iov_len);
        kvfi_cursor_advance(&finish->from, to.iov_len);
        kvfi_cursor_advance(&finish->to, to.iov_len);
        bytes -= to.iov_len;
    }
}

/* The checksum, or the tag. False: sealing failed. */
static bool write_end(kvfi_finish *finish) {
    kvfi_item *item = finish->item;
    const struct iovec *last = &item->iov[item->num_iov - 1];
    uint8_t *end = (uint8_t *)last->iov_base + last->iov_len - KVFI_SUM_BYTES;
    bool whole = true;
    if (item->record_key == NULL) {
        kvfi_xxh3_end(&finish->sum, end);
    } else {
        whole = kvfi_gcm_end(&finish->gcm, end);
    }
    item->unfinished = !whole;
    return whole;
}

/* The number of bytes among the first `bytes` of the item that are after its header and before its checksum. */
static size_t covered_of(const kvfi_item *item, size_t bytes) {
    size_t end = item->bytes - KVFI_SUM_BYTES;
    size_t upto = bytes < end ? bytes : end;
    return upto > KVFI_HEADER_BYTES ? upto - KVFI_HEADER_BYTES : 0;
}

/* False: sealing failed, so that these bytes may still be in the clear. */
static bool cover(kvfi_finish *finish, size_t bytes) {
    if (finish->item->record_key == NULL) {
        hash(finish, bytes);
        return true;
    }
    seal(finish, bytes);
    return !finish->gcm.failed;
}

size_t kvfi_finish_next(kvfi_finish *finish, size_t bytes) {
    kvfi_item *item = finish->item;
    size_t num = bytes < item->bytes - finish->done ? bytes : item->bytes - finish->done;
    if (!cover(finish, covered_of(item, finish->done + num) - covered_of(item, finish->done))) {
        return 0;
    }
    finish->done += num;
    bool ends = item->unfinished && finish->done > item->bytes - KVFI_SUM_BYTES;
    return !ends || write_end(finish) ? num : 0;
}

void kvfi_finish_leave(kvfi_finish *finish, bool again) {
    const kvfi_item *item = finish->item;
    uint8_t none[KVFI_SUM_BYTES];
    if (item != NULL && item->unfinished && item->record_key != NULL) {
        if (again) {
            (void)kvfi_finish_next(finish, item->bytes);
        }
        (void)kvfi_gcm_end(&finish->gcm, none); /* not wanted, or sealing failed, or this is nothing */
    }
    finish->item = NULL;
}

bool kvfi_item_finish(kvfi_item *item) {
    kvfi_finish finish;
    bool whole = kvfi_finish_begin(&finish, item) && kvfi_finish_next(&finish, item->bytes) == item->bytes;
    kvfi_finish_leave(&finish, false);
    return whole;
}
