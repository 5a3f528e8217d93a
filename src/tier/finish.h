/* SPDX-License-Identifier: Apache-2.0
 *
 * Finishes a value that is being sent piece by piece, each piece just before it is sent: hashes it, or seals it. The
 * copy by the kernel, or by the reader of lent pages, then finds the piece in the cache, and the server reads earlier
 * pieces meanwhile. The checksum, or the tag, is the end of the value.
 */
#ifndef KVFI_FINISH_H
#define KVFI_FINISH_H

#include "tier/value.h"

typedef struct kvfi_finish {
    kvfi_item *item; /* NULL: none */
    kvfi_xxh3 sum;
    kvfi_gcm gcm;     /* in place of `sum` if the item has a record_key */
    kvfi_cursor from; /* the first byte that is not hashed or sealed yet */
    kvfi_cursor to;   /* where it goes when it is sealed */
    size_t done;      /* bytes of the item that may be sent */
} kvfi_finish;

/* The item's header is prepared, in its first iovec. Its checksum is the end of its last one. False: no memory; the
 * item can't be sent. After true, kvfi_finish_leave ends it. */
bool kvfi_finish_begin(kvfi_finish *, kvfi_item *);
/* Hashes or seals as much as necessary to send `bytes` more of the item, header and checksum included, or the rest of
 * it. At the end writes the checksum, and the item is finished. Returns how many more bytes may be sent; 0: none are
 * left, or sealing failed. */
size_t kvfi_finish_next(kvfi_finish *, size_t bytes);
/* Nothing more of the item will be sent by this caller. With `again` an item that is half sealed is finished, so that it
 * can be sent again: its key must not be used for a second message. Without, it stays unfinished, and is of no use. Does
 * nothing if it was finished, or never begun. */
void kvfi_finish_leave(kvfi_finish *, bool again);

bool kvfi_item_finish(kvfi_item *); /* all at once; false: no memory */

#endif
