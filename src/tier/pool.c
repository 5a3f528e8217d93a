/* SPDX-License-Identifier: Apache-2.0
 *
 * A pool of threads that starts threads as jobs arrive, up to a maximum.
 */
#include "tier/pool.h"

#include <errno.h>
#include <time.h>

#include "base/interrupt.h"

#define MAX_THREADS 64u
#define MAX_HELPERS 16u

struct kvfi_pool {
    pthread_mutex_t lock;
    pthread_cond_t work; /* a job was queued, or the pool is ending */
    pthread_cond_t done; /* a helper has returned */
    kvfi_job *first, *last;
    unsigned max, num_threads, num_idle;
    bool ending;
    pthread_t threads[MAX_THREADS];
};

int kvfi_cond_init(pthread_cond_t *cond) {
    pthread_condattr_t attr;
    int rc = pthread_condattr_init(&attr);
    if (rc != 0) {
        return rc;
    }
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    rc = pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
    return rc;
}

static bool wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t deadline_us) {
    if (deadline_us == KVFI_NEVER) {
        pthread_cond_wait(cond, lock);
        return true;
    }
    struct timespec at = {.tv_sec = deadline_us / 1000000, .tv_nsec = deadline_us % 1000000 * 1000};
    return pthread_cond_timedwait(cond, lock, &at) != ETIMEDOUT;
}

/* After each step the caller looks again, as after any wake-up. */
bool kvfi_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t deadline_us) {
    if (kvfi_interrupt_flag() == NULL) {
        return wait_until(cond, lock, deadline_us);
    }
    if (kvfi_is_interrupted()) {
        return false;
    }
    int64_t look_us = kvfi_deadline(KVFI_INTERRUPT_STEP_US);
    if (wait_until(cond, lock, look_us < deadline_us ? look_us : deadline_us)) {
        return true;
    }
    pthread_mutex_unlock(lock);
    bool over = kvfi_interrupt_ask() || kvfi_sys->now_us() >= deadline_us;
    pthread_mutex_lock(lock);
    return !over;
}

kvfi_pool *kvfi_pool_new(unsigned max_threads) {
    kvfi_pool *pool = kvfi_alloc_zero(1, sizeof *pool);
    if (pool == NULL) {
        return NULL;
    }
    pool->max = max_threads < MAX_THREADS ? max_threads : MAX_THREADS;
    pthread_mutex_init(&pool->lock, NULL);
    kvfi_cond_init(&pool->work);
    kvfi_cond_init(&pool->done);
    return pool;
}

static void unlink_job(kvfi_pool *pool, kvfi_job *job) {
    *(job->prev != NULL ? &job->prev->next : &pool->first) = job->next;
    *(job->next != NULL ? &job->next->prev : &pool->last) = job->prev;
    job->queued = false;
}

static void link_job(kvfi_pool *pool, kvfi_job *job) {
    job->prev = pool->last;
    job->next = NULL;
    *(pool->last != NULL ? &pool->last->next : &pool->first) = job;
    pool->last = job;
    job->queued = true;
}

static void *serve(void *arg) {
    kvfi_pool *pool = arg;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        kvfi_job *job = pool->first;
        if (job != NULL) {
            unlink_job(pool, job);
            void (*run)(void *) = job->run;
            void *run_arg = job->arg; /* the job's memory may be gone once run was called */
            pthread_mutex_unlock(&pool->lock);
            run(run_arg);
            pthread_mutex_lock(&pool->lock);
        } else if (pool->ending) {
            break;
        } else {
            pool->num_idle++;
            pthread_cond_wait(&pool->work, &pool->lock);
            pool->num_idle--;
        }
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* Under the lock. Threads that were signalled but have not woken up still count as idle, so this looks at the queue
 * too. */
static void start_threads(kvfi_pool *pool, unsigned wanted) {
    while (pool->num_idle < wanted && pool->num_threads < pool->max) {
        if (kvfi_sys->thread(&pool->threads[pool->num_threads], serve, pool) != 0) {
            return;
        }
        pool->num_threads++;
        wanted--;
    }
}

static unsigned count_queued(const kvfi_pool *pool) {
    unsigned num = 0;
    for (const kvfi_job *job = pool->first; job != NULL && num < MAX_THREADS; job = job->next) {
        num++;
    }
    return num;
}

bool kvfi_pool_post(kvfi_pool *pool, kvfi_job *job) {
    pthread_mutex_lock(&pool->lock);
    start_threads(pool, count_queued(pool) + 1);
    bool ok = pool->num_threads > 0;
    if (ok) {
        link_job(pool, job);
        pthread_cond_signal(&pool->work);
    }
    pthread_mutex_unlock(&pool->lock);
    return ok;
}

bool kvfi_pool_withdraw(kvfi_pool *pool, kvfi_job *job) {
    pthread_mutex_lock(&pool->lock);
    bool queued = job->queued;
    if (queued) {
        unlink_job(pool, job);
    }
    pthread_mutex_unlock(&pool->lock);
    return queued;
}

typedef struct share {
    kvfi_pool *pool;
    void (*run)(void *);
    void *arg;
    unsigned running;
    const atomic_bool *ends; /* the call that shares its work */
} share;

typedef struct helper {
    kvfi_job job;
    share *of;
} helper;

static void help(void *arg) {
    share *s = ((helper *)arg)->of;
    kvfi_interrupt_work_for(s->ends);
    s->run(s->arg);
    kvfi_interrupt_work_for(NULL);
    pthread_mutex_lock(&s->pool->lock);
    s->running--;
    pthread_cond_broadcast(&s->pool->done);
    pthread_mutex_unlock(&s->pool->lock);
}

void kvfi_pool_share(kvfi_pool *pool, void (*run)(void *), void *arg, unsigned helpers) {
    helper team[MAX_HELPERS];
    share s = {.pool = pool, .run = run, .arg = arg, .ends = kvfi_interrupt_flag()};
    if (helpers > MAX_HELPERS) {
        helpers = MAX_HELPERS;
    }
    if (helpers > 0) {
        pthread_mutex_lock(&pool->lock);
        start_threads(pool, count_queued(pool) + helpers);
        for (unsigned i = 0; i < helpers; i++) {
            team[i] = (helper){.job = {.run = help, .arg = &team[i]}, .of = &s};
            link_job(pool, &team[i].job);
            pthread_cond_signal(&pool->work);
        }
        s.running = helpers;
        pthread_mutex_unlock(&pool->lock);
    }
    run(arg);
    if (helpers > 0) {
        pthread_mutex_lock(&pool->lock);
        for (unsigned i = 0; i < helpers; i++) {
            if (team[i].job.queued) {
                unlink_job(pool, &team[i].job);
                s.running--;
            }
        }
        bool asks = true;
        while (s.running > 0 && asks) {
            asks = kvfi_cond_wait(&pool->done, &pool->lock, KVFI_NEVER);
        }
        while (s.running > 0) { /* the call was interrupted: its helpers end soon */
            pthread_cond_wait(&pool->done, &pool->lock);
        }
        pthread_mutex_unlock(&pool->lock);
    }
}

void kvfi_pool_free(kvfi_pool *pool) {
    if (pool == NULL) {
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->ending = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (unsigned i = 0; i < pool->num_threads; i++) {
        pthread_join(pool->threads[i], NULL);
    }
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->done);
    pthread_mutex_destroy(&pool->lock);
    kvfi_free(pool);
}
