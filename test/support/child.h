/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls of a forked child on what its parent opened. A table has a row for every function that a library exports, so a
 * new function fails the test until it has one. Every row is called in a child, twice, since what closes something in a
 * child does nothing. A call that hangs ends the child.
 */
#ifndef KVFT_CHILD_H
#define KVFT_CHILD_H

#include <stdbool.h>
#include <stddef.h>

/* AddressSanitizer's malloc, unlike glibc's, is not prepared for a fork: where another thread allocates at that time, a
 * child may wait for its lock for ever. */
#ifdef __SANITIZE_ADDRESS__
#define KVFT_CHILD_OF_BUSY_THREADS 0
#else
#define KVFT_CHILD_OF_BUSY_THREADS 1
#endif

typedef struct kvft_child_row {
    const char *name;
    bool (*call)(void *scene); /* whether it answered as it must in a child */
} kvft_child_row;

/* Fails the test, with their names, if the rows are not exactly the functions that the library exports. */
void kvft_child_covers(const char *library, const kvft_child_row *rows, size_t num);

/* Forks a child that calls all rows. Fails the test with the name of the row that was wrong, or hung. */
void kvft_child_calls(const kvft_child_row *rows, size_t num, void *scene);

#endif
