/* SPDX-License-Identifier: Apache-2.0
 *
 * The checksum of a value that is being sent, computed piece by piece, each just before it is sent. The copy by the
 * kernel, or by the reader of lent pages, then finds the piece in the cache, and starts with the first piece.
 */
#ifndef KVFI_FINISH_H
#define KVFI_FINISH_H

#include "tier/value.h"

typedef struct kvfi_finish {
    kvfi_xxh3 sum;
    kvfi_item *item;
    kvfi_cursor at; /* the first byte that is not hashed yet */
    size_t done;    /* bytes of the item that may be sent */
} kvfi_finish;

/* The item's header is prepared, in its first iovec. Its checksum is the end of its last one. */
void kvfi_finish_begin(kvfi_finish *, kvfi_item *);
/* Hashes as much as necessary to send `bytes` more of the item, header and checksum included, or the rest of it. Writes
 * the checksum when everything is hashed. Returns how many more bytes may be sent. */
size_t kvfi_finish_next(kvfi_finish *, size_t bytes);

void kvfi_item_finish(kvfi_item *); /* all at once */

#endif
