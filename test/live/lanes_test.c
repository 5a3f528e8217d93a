/* SPDX-License-Identifier: Apache-2.0
 *
 * Loads go before saves on one server, and saves progress beside them. A load stands still in the middle of a value
 * (the fault proxy holds it). Meanwhile saves of the same store are paced, one by one. Those of a second store begin
 * later and overtake them; yet the first ones complete.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "redis/cluster/servers.h"
#include "support/kit.h"
#include "support/proxy.h"
#include "support/server.h"
#include "support/tiers.h"

#define VALUES  80u
#define PAYLOAD 3000u
#define HELD    400000u /* the value whose load is held up; more than what the proxy and the sockets have in hand */
#define ROUNDS  3

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

/* ---- a load that is under way until it is let go */

typedef struct held {
    kvfi_tier *tier;
    pthread_t thread;
    kvf_reason why;
    atomic_bool over;
} held;

static void *load_held(void *arg) {
    held *h = arg;
    h->why = kvft_get(h->tier, 1, HELD);
    h->over = true;
    return NULL;
}

/* Only the first connection that gets so far stands still, and that is the load's: the answers to saves are short. */
static void hold_a_load(held *h, kvfi_tier *tier) {
    const kvft_plan plan = {.stall_after = 100000, .stall_one = true};
    *h = (held){.tier = tier};
    assert_int_equal(kvft_put(tier, 1, HELD), KVF_WHY_NONE);
    uint64_t before = kvft_proxy_stats_get(proxy).faults;
    kvft_proxy_set(proxy, &plan);
    assert_int_equal(pthread_create(&h->thread, NULL, load_held, h), 0);
    double begin = kvft_now_ms();
    while (kvft_proxy_stats_get(proxy).faults == before) {
        assert_true(kvft_now_ms() - begin < KVFT_PATIENCE_MS);
        kvft_nap_ms(1);
    }
}

static void let_go(held *h) {
    const kvft_plan faithful = {0};
    kvft_proxy_set(proxy, &faithful);
    pthread_join(h->thread, NULL);
    assert_int_equal(h->why, KVF_WHY_NONE);
}

/* ---- a lot of values that are saved in one batch */

typedef struct lot {
    kvfi_tier *tier;
    pthread_t thread;
    kvft_value values[VALUES];
    kvfi_item items[VALUES];
    kvfi_feed feed;
    atomic_bool over;
} lot;

static lot *lot_new(kvfi_tier *tier, uint64_t seed) {
    lot *l = calloc(1, sizeof *l);
    assert_non_null(l);
    l->tier = tier;
    for (unsigned i = 0; i < VALUES; i++) {
        kvft_value_init(&l->values[i], seed + i, PAYLOAD);
        l->items[i] = l->values[i].item;
    }
    l->feed = (kvfi_feed){.items = l->items, .num = VALUES, .limit = VALUES, .deadline_us = kvfi_deadline(50000000)};
    return l;
}

static void *save(void *arg) {
    lot *l = arg;
    l->tier->ops->put(l->tier, &l->feed);
    l->over = true;
    return NULL;
}

static void lot_check_and_free(lot *l) {
    for (unsigned i = 0; i < VALUES; i++) {
        assert_int_equal(l->items[i].status, KVF_OK);
        kvft_value_cleanup(&l->values[i]);
    }
    free(l);
}

/* ---- the test */

/* Whether a store that has no load under way, one value after the other, saved more of them than the paced one had left
 * when it began, before that was done. Each is one round trip; only the paced one waits between them. */
static bool is_overtaken(kvfi_tier *loading, kvfi_tier *other, uint64_t seed) {
    held h;
    lot *paced = lot_new(loading, seed);
    hold_a_load(&h, loading);
    assert_int_equal(pthread_create(&paced->thread, NULL, save, paced), 0);
    while (paced->feed.next < VALUES / 2 && !paced->over) {
        kvft_nap_ms(1);
    }
    for (uint64_t i = 0; i < VALUES * 3 / 4; i++) {
        assert_int_equal(kvft_put(other, seed + 100 + i, PAYLOAD), KVF_WHY_NONE);
    }
    bool overtaken = !paced->over;
    /* Saves come to their end while the load is still under way. */
    pthread_join(paced->thread, NULL);
    assert_false(h.over);
    let_go(&h);
    lot_check_and_free(paced);
    return overtaken;
}

static void check(const char *base) {
    char url[256];
    unsigned times = 0;
    snprintf(url, sizeof url, "%s?conns=1&stall_ms=60000", base);
    kvfi_tier *loading = kvft_tier(url), *other = kvft_tier(url);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        times += is_overtaken(loading, other, 2000 + 1000 * round);
    }
    printf("%u of %d times the saves beside a load were overtaken\n", times, ROUNDS);
    assert_true(times > ROUNDS / 2); /* not each time: the other may not have got the processor */
    other->ops->close(other);
    loading->ops->close(loading);
}

/* While a load is under way each value of a save waits for it, for 10 ms at most. */
static void test_each_value_waits(void **state) {
    (void)state;
    if (server == NULL) {
        skip();
    }
    kvfi_tier *tier = kvft_tier(server->unix_url);
    assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
    _Atomic unsigned *loads = &kvfi_redis_of(tier)->node.lanes[KVFI_LANE_LOAD].num_taken;
    lot *l = lot_new(tier, 5000);
    (*loads)++;
    double begin = kvft_now_ms();
    (void)save(l);
    assert_true(kvft_now_ms() - begin >= 10 * VALUES);
    (*loads)--;
    lot_check_and_free(l);
    tier->ops->close(tier);
}

static void test_paced_unix(void **state) {
    (void)state;
    if (server == NULL) {
        skip();
    }
    check(kvft_proxy_unix_url(proxy));
}

static void test_paced_tcp(void **state) {
    (void)state;
    if (server == NULL) {
        skip();
    }
    check(kvft_proxy_tcp_url(proxy));
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_each_value_waits), cmocka_unit_test(test_paced_unix),
                                       cmocka_unit_test(test_paced_tcp)};
    return cmocka_run_group_tests(tests, start, stop);
}
