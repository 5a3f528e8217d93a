/* SPDX-License-Identifier: Apache-2.0
 *
 * Loads and saves through a proxy that breaks the connection in every way it knows, seeded. One invariant: a load is
 * byte-exact or a miss, and returns by its deadline.
 */
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>

#include "support/kit.h"
#include "support/proxy.h"
#include "support/server.h"

#define BLOCKS    12u
#define PAYLOAD   70000u
#define BUDGET_MS 400u
#define SLACK_MS  2000.0 /* of a busy machine: it tells a load that hangs; check-chaos is stricter */

static kvft_server *server;
static kvft_proxy *proxy;

static int start(void **state) {
    (void)state;
    server = kvft_server_start(NULL);
    if (server != NULL) {
        proxy = kvft_proxy_start(server->socket);
    }
    return 0;
}

static int stop(void **state) {
    (void)state;
    if (server != NULL) {
        kvft_proxy_stop(proxy);
        kvft_server_stop(server);
    }
    return 0;
}

static size_t timed_load(kvf_space *space, kvft_prompt *prompt, uint64_t seed) {
    kvft_prompt_poison(prompt);
    double begin = kvft_now_ms();
    size_t run = kvf_load(space, prompt->blocks, BLOCKS, NULL, KVF_MS(BUDGET_MS));
    double spent = kvft_now_ms() - begin;
    if (spent > BUDGET_MS + SLACK_MS) {
        fail_msg("a load took %.0f ms of a budget of %u", spent, BUDGET_MS);
    }
    assert_int_equal(kvft_prompt_wrong(prompt, seed, run), 0);
    return run;
}

static kvft_plan plan_of(uint64_t seed) {
    kvft_plan plan = {.seed = seed};
    uint64_t random = seed;
    int64_t at = 1 + (int64_t)(kvft_random(&random) % (BLOCKS * PAYLOAD));
    switch (seed % 11) {
    case 0:
        plan.slice_bytes = 1 + (uint32_t)(kvft_random(&random) % 3000);
        break;
    case 1:
        plan.stall_after = at;
        break;
    case 2:
        plan.cut_after = at;
        break;
    case 3:
        plan.cut_after = at;
        plan.reset = true;
        break;
    case 4:
        plan.half_open_after = at;
        break;
    case 5:
        plan.garbage_at = at;
        break;
    case 6:
        plan.flip_at = at;
        break;
    case 7:
        plan.refuse = true;
        break;
    case 8:
        plan.latency_ms = (uint32_t)(kvft_random(&random) % 200);
        break;
    case 9:
        plan.bytes_per_s = 100000 + kvft_random(&random) % 3000000;
        break;
    default:
        plan.swap = true;
    }
    return plan;
}

static void torment(const char *url) {
    const kvft_plan faithful = {0};
    kvft_proxy_set(proxy, &faithful);
    kvf_store *store = kvft_store(url);
    kvf_space *space = kvft_space(store, "m", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 3, BLOCKS, PAYLOAD);
    kvft_save_all(space, store, prompt);
    size_t whole = 0, partly = 0;
    for (uint64_t seed = 0; seed < 66; seed++) {
        kvft_plan plan = plan_of(seed);
        kvft_proxy_set(proxy, &plan);
        size_t run = timed_load(space, prompt, 3);
        whole += run == BLOCKS;
        partly += run > 0 && run < BLOCKS;
        kvft_proxy_set(proxy, &faithful);
        kvft_proxy_cut(proxy);
        /* The store is there again: within two seconds all is well. */
        double begin = kvft_now_ms();
        kvft_prompt_fill(prompt, 3);
        while (timed_load(space, prompt, 3) < BLOCKS) {
            kvft_prompt_fill(prompt, 3);
            kvf_save(space, prompt->blocks, BLOCKS, NULL); /* a record that was found damaged has been removed */
            if (kvft_now_ms() - begin > 5000) {
                fail_msg("seed %llu: the store did not come back", (unsigned long long)seed);
            }
        }
    }
    printf("%s: %zu of 66 loads whole, %zu partly\n", url, whole, partly);
    assert_true(whole > 0);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
}

static void test_unix(void **state) {
    (void)state;
    if (server == NULL) {
        skip();
    }
    torment(kvft_proxy_unix_url(proxy));
}

static void test_tcp(void **state) {
    (void)state;
    if (server == NULL) {
        skip();
    }
    torment(kvft_proxy_tcp_url(proxy));
}

/* ---- connections ---- */

/* How many connections a store opens for one load, watched or not; each takes so long to make that all threads that
 * want one ask for it. */
static uint64_t connections_of_load(bool watched) {
    uint64_t before = kvft_proxy_stats_get(proxy).connections, ticket = 0;
    uint8_t each[BLOCKS] = {0};
    kvf_arrivals arrivals = {.each = each};
    kvf_queue *queue = NULL;
    kvf_completion done = {0};
    kvf_store *store = kvft_store(kvft_proxy_tcp_url(proxy));
    kvf_space *space = kvft_space(store, "m", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 1, BLOCKS, PAYLOAD);
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_LOAD,
                       .space = space,
                       .blocks = prompt->blocks,
                       .num = BLOCKS,
                       .arrivals = watched ? &arrivals : NULL};
    assert_int_equal(kvf_queue_open(&queue, NULL, store, 1), KVF_OK);
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    while (kvf_reap(queue, &done, 1) == 0) {
        struct pollfd fd = {.fd = kvf_queue_fd(queue), .events = POLLIN};
        assert_int_equal(poll(&fd, 1, 10000), 1);
    }
    assert_int_equal(done.num_ok, BLOCKS);
    kvf_queue_close(queue);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
    return kvft_proxy_stats_get(proxy).connections - before;
}

/* A caller that uses blocks as they arrive wants them one after the other. */
static void test_a_watched_load_has_one_connection(void **state) {
    if (server == NULL) {
        skip();
    }
    (void)state;
    kvft_proxy_set(proxy, &(kvft_plan){0});
    kvf_store *store = kvft_store(server->unix_url);
    kvf_space *space = kvft_space(store, "m", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 1, BLOCKS, PAYLOAD);
    kvft_save_all(space, store, prompt);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
    kvft_proxy_set(proxy, &(kvft_plan){.latency_ms = 30});
    assert_int_equal(connections_of_load(false), connections_of_load(true) + 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_a_watched_load_has_one_connection),
                                       cmocka_unit_test(test_unix), cmocka_unit_test(test_tcp)};
    return cmocka_run_group_tests(tests, start, stop);
}
