/* SPDX-License-Identifier: Apache-2.0
 *
 * The checksum of a value that is being sent: hashed piece by piece, each just before it goes. Whoever copies the piece
 * then, the kernel or the reader of lent pages, finds it in the cache, and has work from the first piece on.
 */
#ifndef KVFI_SEAL_H
#define KVFI_SEAL_H

#include "store/value.h"

typedef struct kvfi_seal {
    kvfi_xxh3 sum;
    kvfi_item *item;
    kvfi_cursor at; /* what has not been hashed begins here */
    size_t done;    /* bytes of the item that may be sent */
} kvfi_seal;

/* The item's header is prepared, and lies in its first iovec; its checksum is the end of its last one. */
void kvfi_seal_begin(kvfi_seal *, kvfi_item *);
/* Hashes what has to be for `bytes` more of the item, header and checksum included, to be sent, or for what is left of
 * it; writes the checksum when all is hashed. Returns how many more may be sent. */
size_t kvfi_seal_next(kvfi_seal *, size_t bytes);

void kvfi_item_seal(kvfi_item *); /* all at once */

#endif
