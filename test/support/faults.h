/* SPDX-License-Identifier: Apache-2.0
 *
 * A system table before the real one that counts calls and fails the n-th, for the fault loops of the tests.
 *
 *   for (uint64_t n = 1; ; n++) {
 *       kvft_faults_arm(KVFT_ALLOC, n);
 *       ... the scenario, which must end well or with a clean error ...
 *       if (!kvft_faults_disarm()) break;    // it ran without reaching the n-th call: all points are done
 *   }
 */
#ifndef KVFT_FAULTS_H
#define KVFT_FAULTS_H
#include <stdbool.h>
#include <stdint.h>

typedef enum kvft_fault_kind {
    KVFT_ALLOC, /* alloc, resize and map of anonymous memory fail with ENOMEM */
    KVFT_CALL,  /* every other fallible call fails with an errno of its kind (EIO, ENOSPC, ECONNRESET, EMFILE, ...) */
    KVFT_SHORT, /* readv, writev, preadv, pwritev transfer one byte only (not an error: it must work all the same) */
    /* a call that makes a descriptor makes 0, as in a program without a standard input (not an error either); the
     * scenario must close it */
    KVFT_ZERO
} kvft_fault_kind;

void kvft_faults_arm(kvft_fault_kind,
                     uint64_t nth); /* installs the table; the nth call of that kind from now on fails, once */
bool kvft_faults_disarm(void);      /* the real table again; true when the fault was hit */
uint64_t kvft_faults_live_allocs(
    void); /* blocks of the library's memory that are not freed; counted while armed or after kvft_faults_watch */
void kvft_faults_watch(void); /* installs the table without a fault */
#endif
