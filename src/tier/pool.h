/* SPDX-License-Identifier: Apache-2.0
 *
 * Helper threads. A pool starts threads when there is work for them, at most `max`, and keeps them until it is freed.
 */
#ifndef KVFI_POOL_H
#define KVFI_POOL_H

#include <pthread.h>

#include "base/base.h"

typedef struct kvfi_pool kvfi_pool;

/* A job for one thread; the memory is the caller's until run has been called. */
typedef struct kvfi_job {
    void (*run)(void *arg);
    void *arg;
    struct kvfi_job *prev, *next; /* of the pool, while queued */
    bool queued;
} kvfi_job;

kvfi_pool *kvfi_pool_new(unsigned max_threads); /* NULL without memory */
void kvfi_pool_free(kvfi_pool *);               /* runs what is queued, then ends the threads */

/* kvfi_pool_post queues a job. Jobs start in order, as threads become free. False if there is no thread and none can be
 * started: the job is then not queued. */
bool kvfi_pool_post(kvfi_pool *, kvfi_job *);
/* kvfi_pool_withdraw takes a job back. False: it is not queued, since it has begun or was never posted. */
bool kvfi_pool_withdraw(kvfi_pool *, kvfi_job *);

/* kvfi_pool_share calls run(arg) on the calling thread and, meanwhile, on up to `helpers` threads of the pool. It
 * returns when all of these calls have returned. Helpers that have not begun by then are cancelled, so this never waits
 * for a busy pool, and a job of the same pool may call it. */
void kvfi_pool_share(kvfi_pool *, void (*run)(void *arg), void *arg, unsigned helpers);

/* A condition that waits by the monotonic clock, as deadlines do. */
int kvfi_cond_init(pthread_cond_t *);
/* Waits for a signal or the deadline. False when the deadline has passed, or the caller interrupts the call
 * (kvf_set_interrupt), which is asked without the lock. */
bool kvfi_cond_wait(pthread_cond_t *, pthread_mutex_t *, int64_t deadline_us);

#endif
