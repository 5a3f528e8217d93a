/* SPDX-License-Identifier: Apache-2.0
 *
 * Many threads on one store, for ThreadSanitizer.
 */
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "support/kit.h"
#include "tier/pool.h"

#define THREADS 4u
#define ROUNDS  60u
#define BLOCKS  8u

/* ---- the pool ---- */

static _Atomic unsigned shared_calls;

static void count_call(void *arg) {
    (void)arg;
    atomic_fetch_add(&shared_calls, 1);
}

static void *share_often(void *arg) {
    for (unsigned i = 0; i < 500; i++) {
        kvfi_pool_share(arg, count_call, NULL, i % 5);
    }
    return NULL;
}

static void test_share_calls_everyone_once(void **state) {
    (void)state;
    kvfi_pool *pool = kvfi_pool_new(3);
    pthread_t threads[THREADS];
    shared_calls = 0;
    for (size_t i = 0; i < THREADS; i++) {
        pthread_create(&threads[i], NULL, share_often, pool);
    }
    for (size_t i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    assert_true(shared_calls >= THREADS * 500);
    assert_true(shared_calls <= THREADS * 500 * 5);
    kvfi_pool_free(pool);
}

/* Whatever part of a second the deadline falls into. */
static void test_a_wait_lasts_until_its_deadline(void **state) {
    (void)state;
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t cond;
    assert_int_equal(kvfi_cond_init(&cond), 0);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 4; i++) {
        int64_t deadline = kvfi_deadline(250000);
        while (kvfi_cond_wait(&cond, &lock, deadline)) {
        }
        assert_true(kvfi_sys->now_us() >= deadline);
    }
    pthread_mutex_unlock(&lock);
    pthread_cond_destroy(&cond);
}

static void test_posted_jobs_run_before_the_pool_ends(void **state) {
    (void)state;
    kvfi_pool *pool = kvfi_pool_new(2);
    kvfi_job jobs[50];
    shared_calls = 0;
    for (size_t i = 0; i < 50; i++) {
        jobs[i] = (kvfi_job){.run = count_call};
        assert_true(kvfi_pool_post(pool, &jobs[i]));
    }
    kvfi_pool_free(pool);
    assert_int_equal(shared_calls, 50);
    kvfi_pool *none = kvfi_pool_new(0);
    assert_false(kvfi_pool_post(none, &jobs[0]));
    kvfi_pool_share(none, count_call, NULL, 3);
    assert_int_equal(shared_calls, 51);
    kvfi_pool_free(none);
}

/* ---- one store, many threads ---- */

typedef struct worker {
    kvf_store *store;
    kvf_space *space;
    uint64_t seed;
    size_t wrong, hits;
} worker;

static void *work(void *arg) {
    worker *w = arg;
    uint64_t random = w->seed;
    for (unsigned round = 0; round < ROUNDS; round++) {
        uint64_t seed = kvft_random(&random) % 6; /* prompts that the threads share */
        kvft_prompt *prompt = kvft_prompt_new(w->space, seed, BLOCKS, 5000);
        size_t run = 0;
        switch (kvft_random(&random) % 4) {
        case 0:
            kvf_save(w->space, prompt->blocks, BLOCKS, NULL);
            break;
        case 1:
            if (kvf_match(w->space, &run, NULL, prompt->keys, BLOCKS,
                          kvft_random(&random) % 2 ? KVF_MS(1000) : KVF_POLL) != KVF_OK) {
                run = 0;
            }
            break;
        default:
            kvft_prompt_poison(prompt);
            run = kvf_load(w->space, prompt->blocks, BLOCKS, NULL, KVF_MS(2000));
            w->wrong += kvft_prompt_wrong(prompt, seed, run);
            w->hits += run;
        }
        kvft_prompt_free(prompt);
    }
    return NULL;
}

/* Returns the blocks that loaded. */
static size_t hammer(const char *url) {
    kvf_store *store = kvft_store(url);
    kvf_space *space = kvft_space(store, "m", 16);
    kvft_prompt *first = kvft_prompt_new(space, 0, BLOCKS, 5000); /* a hit whatever writers get done meanwhile */
    worker workers[THREADS];
    pthread_t threads[THREADS];
    size_t hits = 0;
    kvft_save_all(space, store, first);
    kvft_prompt_free(first);
    for (size_t i = 0; i < THREADS; i++) {
        workers[i] = (worker){.store = store, .space = space, .seed = i + 1};
        pthread_create(&threads[i], NULL, work, &workers[i]);
    }
    for (size_t i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(workers[i].wrong, 0);
        hits += workers[i].hits;
    }
    kvf_space_close(space);
    kvf_store_close(store);
    return hits;
}

static void test_memory_by_many_threads(void **state) {
    (void)state;
    assert_true(hammer("mem:") > 0);
    hammer("mem:?max=200K"); /* evicting all the time: whether a whole prefix survives is chance */
}

static void test_folder_by_many_threads(void **state) {
    (void)state;
    char *dir = kvft_temp_dir();
    char url[200];
    snprintf(url, sizeof url, "file:%s?max=1M", dir);
    hammer(url);
    kvft_remove_dir(dir);
}

/* ---- cancel ---- */

static void test_cancel_races_with_the_load(void **state) {
    (void)state;
    kvf_store *store = kvft_store("mem:");
    kvf_space *space = kvft_space(store, "m", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 1, 64, 5000);
    kvft_save_all(space, store, prompt);
    kvf_queue *queue = NULL;
    assert_int_equal(kvf_queue_open(&queue, NULL, store, 1), KVF_OK);
    for (unsigned i = 0; i < 100; i++) {
        kvft_prompt_poison(prompt);
        kvf_batch batch = {
            .struct_size = sizeof batch, .op = KVF_OP_LOAD, .space = space, .blocks = prompt->blocks, .num = 64};
        uint64_t ticket = 0;
        assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
        kvf_cancel(queue, ticket);
        kvf_completion done;
        struct pollfd fd = {.fd = kvf_queue_fd(queue), .events = POLLIN};
        assert_int_equal(poll(&fd, 1, 10000), 1);
        assert_int_equal(kvf_reap(queue, &done, 1), 1);
        assert_int_equal(kvft_prompt_wrong(prompt, 1, done.num_ok), 0);
        if (done.num_ok < 64) {
            assert_int_equal(prompt->blocks[done.num_ok].why, KVF_WHY_CLOSED);
        }
    }
    kvf_queue_close(queue);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
}

/* Tickets are numbers, so another thread may name that of a batch which is being submitted, or has not begun. */
typedef struct cancelling {
    kvf_queue *queue;
    _Atomic uint64_t next;
    atomic_bool stop;
} cancelling;

static void *cancel_what_comes(void *arg) {
    cancelling *c = arg;
    while (!atomic_load(&c->stop)) {
        kvf_cancel(c->queue, atomic_load(&c->next));
    }
    return NULL;
}

static void reap_one(kvf_queue *queue) {
    kvf_completion done;
    struct pollfd fd = {.fd = kvf_queue_fd(queue), .events = POLLIN};
    while (kvf_reap(queue, &done, 1) == 0) {
        assert_int_equal(poll(&fd, 1, 20000), 1);
    }
}

static void test_cancel_races_with_the_submission(void **state) {
    (void)state;
    kvf_store *store = kvft_store("mem:");
    kvf_space *space = kvft_space(store, "m", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 1, BLOCKS, 100);
    cancelling c = {.next = 1};
    pthread_t thread;
    assert_int_equal(kvf_queue_open(&c.queue, NULL, store, 4), KVF_OK);
    assert_int_equal(pthread_create(&thread, NULL, cancel_what_comes, &c), 0);
    for (uint64_t i = 0; i < 20 * ROUNDS; i++) {
        kvf_batch batch = {.struct_size = sizeof batch,
                           .op = (kvf_op)(i % (KVF_OP_TOUCH + 1)),
                           .space = space,
                           .blocks = prompt->blocks,
                           .num = BLOCKS};
        uint64_t ticket = 0;
        assert_int_equal(kvf_submit(c.queue, &ticket, &batch), KVF_OK);
        reap_one(c.queue); /* whatever became of it, it completes once */
        atomic_store(&c.next, ticket + 1);
    }
    atomic_store(&c.stop, true);
    pthread_join(thread, NULL);
    kvf_queue_close(c.queue);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_share_calls_everyone_once),
        cmocka_unit_test(test_posted_jobs_run_before_the_pool_ends),
        cmocka_unit_test(test_memory_by_many_threads),
        cmocka_unit_test(test_folder_by_many_threads),
        cmocka_unit_test(test_cancel_races_with_the_load),
        cmocka_unit_test(test_a_wait_lasts_until_its_deadline),
        cmocka_unit_test(test_cancel_races_with_the_submission),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
