/* SPDX-License-Identifier: Apache-2.0
 *
 * Lending pages to a socket instead of copying bytes into it: the pages go through a pipe (vmsplice, splice), and
 * the server copies straight from them. That saves one of two copies, and two thirds of the sender's CPU time.
 *
 * The lender must not change the bytes until the server has replied. If a connection ends before that, the socket still
 * has the pages, and the server may read what is written to them later. So the library lends its own memory, which is
 * then returned to the system and not reused, and the caller's memory only with KVF_MAY_LEND.
 *
 * If lending does not work (another kernel, a system call filter that returns an error, no free descriptor, memory of a
 * device), the bytes are written, and `never` is set.
 */
#ifndef KVFI_REDIS_LEND_H
#define KVFI_REDIS_LEND_H

#include "base/base.h"

typedef struct kvfi_lender {
    int in, out;   /* the two ends of the pipe; -1: not open */
    size_t inside; /* bytes in it: the first of those to be sent next */
    bool never;    /* lending does not work here: write at once */
} kvfi_lender;

/* The release of a kernel as uname tells it. Before Linux 6.5 a unix socket took one page at a time, and woke its
 * reader for each. */
bool kvfi_lend_is_fast_on(const char *release);
void kvfi_lender_init(kvfi_lender *);
void kvfi_lender_close(kvfi_lender *); /* discards the contents of the pipe; it can be used again */

/* As writev: returns how many of the bytes were sent, or -1 and errno; at least one piece of `iov` is not empty. The
 * next call begins with the first byte that was not sent, at the same place in memory. Each piece takes a slot of the
 * pipe, which could hold a page, so smaller pieces are better written while the pipe is empty. */
ssize_t kvfi_lend(kvfi_lender *, int fd, const struct iovec *iov, size_t num);

#endif
