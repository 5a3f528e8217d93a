/* SPDX-License-Identifier: Apache-2.0
 *
 * Lists the keys of a server, a page at a time (SCAN). Not for the hot path.
 */
#ifndef KVFI_REDIS_SCAN_H
#define KVFI_REDIS_SCAN_H

#include "redis/cluster/talk.h"

typedef struct kvfi_page {
    char *text; /* the names, one after the other, each with a NUL */
    size_t used, cap;
    size_t num;
} kvfi_page;

typedef struct kvfi_scan {
    kvfi_talk *talk;
    const char *pattern; /* MATCH, or NULL */
    bool hashes;         /* only keys of type hash */
    char cursor[24];
    bool begun;
    kvfi_page page; /* of the last kvfi_scan_next */
} kvfi_scan;

/* The next page, which may be empty. *more is false once all have been seen. */
kvf_status kvfi_scan_next(kvfi_scan *, bool *more);
void kvfi_scan_cleanup(kvfi_scan *);
/* The name after `name` in the page; the first for NULL; NULL after the last. */
const char *kvfi_page_next(const kvfi_page *, const char *name);

#endif
