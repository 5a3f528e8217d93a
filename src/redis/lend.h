/* SPDX-License-Identifier: Apache-2.0
 *
 * Lending pages to a unix socket instead of copying bytes into it: the pages go through a pipe (vmsplice, splice), and
 * the server copies straight from them. One copy of two, and two thirds of the sender's CPU time, are gone.
 *
 * Who lends must leave the bytes as they are until the server has answered. Where a connection ends before, the socket
 * still has the pages, and the server may read what is written to them later. So the library lends its own memory, which
 * goes back to the system in that case and is not used again, and the caller's only where he allows it (KVF_MAY_LEND).
 *
 * Where lending does not work (another kernel, a filter of system calls that answers with an error, no descriptor left,
 * memory of a device), the bytes are written; `never` says so from then on.
 */
#ifndef KVFI_REDIS_LEND_H
#define KVFI_REDIS_LEND_H

#include "base/base.h"

typedef struct kvfi_lender {
    int in, out;   /* the two ends of the pipe; -1: not open */
    size_t inside; /* bytes in it: the first of those that are to be sent next */
    bool never;    /* it does not work here: better written at once */
} kvfi_lender;

void kvfi_lender_init(kvfi_lender *);
void kvfi_lender_close(kvfi_lender *); /* drops what is in the pipe; it can be used again */

/* As writev: how many of the bytes have left, or -1 and errno; of `iov` at least one is not empty. The next call begins
 * with the first byte that has not left, at the same place in memory. Each piece takes a slot of the pipe, which is as
 * good for a page, so smaller ones are better written while nothing is inside. */
ssize_t kvfi_lend(kvfi_lender *, int fd, const struct iovec *iov, size_t num);

#endif
