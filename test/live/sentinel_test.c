/* SPDX-License-Identifier: Apache-2.0
 *
 * A master, its replica and three sentinels: the store finds the master, follows a failover, and leaves a master that
 * became a replica.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "support/cluster.h"
#include "support/kit.h"

#define BLOCKS  12u
#define PAYLOAD 20000u

static kvft_sentinels *set;

static int start(void **state) {
    (void)state;
    kvft_server_use_acl(true); /* as the documented user, and no more than that */
    set = kvft_sentinels_start();
    kvft_server_use_acl(false);
    return 0;
}

static int stop(void **state) {
    (void)state;
    kvft_sentinels_stop(set);
    return 0;
}

#define NEEDS_SENTINELS() \
    do {                  \
        (void)state;      \
        if (set == NULL)  \
            skip();       \
    } while (0)

static size_t load(kvf_space *space, kvft_prompt *prompt) {
    kvft_prompt_poison(prompt);
    size_t run = kvf_load(space, prompt->blocks, BLOCKS, NULL, KVF_MS(1000));
    assert_int_equal(kvft_prompt_wrong(prompt, 1, run), 0);
    return run;
}

static void test_configuration(void **state) {
    NEEDS_SENTINELS();
    char url[256];
    kvf_store *store = NULL;
    kvf_error err = {0};
    snprintf(url, sizeof url, "redis+sentinel://127.0.0.1:%d/nobody", set->watch[0]->port);
    const char *urls[] = {url};
    assert_int_equal(kvf_store_open(&store, &err, urls, 1, NULL), KVF_CONFIG);
    assert_non_null(strstr(err.what, "no master"));
    /* The least that a sentinel must allow. */
    assert_string_equal(kvft_server_say(set->watch[1], "ACL SETUSER least on >pw -@all +ping +client|setname "
                                                       "+sentinel|get-master-addr-by-name"),
                        "+OK");
    snprintf(url, sizeof url, "redis+sentinel://127.0.0.1:%d/mymaster?sentinel_user=least&sentinel_password=pw",
             set->watch[1]->port);
    assert_int_equal(kvf_store_open(&store, &err, urls, 1, NULL), KVF_OK);
    kvf_store_close(store);
    snprintf(url, sizeof url, "redis+sentinel://127.0.0.1:%d/mymaster?sentinel_password=wrong", set->watch[1]->port);
    assert_int_equal(kvf_store_open(&store, &err, urls, 1, NULL), KVF_CONFIG);
    assert_null(strstr(err.what, "wrong"));
    urls[0] = "redis+sentinel://127.0.0.1:1";
    assert_int_equal(kvf_store_open(&store, &err, urls, 1, NULL), KVF_CONFIG);
    assert_non_null(strstr(err.what, "name of the master"));
    urls[0] = "redis+cluster://127.0.0.1:1/3";
    assert_int_equal(kvf_store_open(&store, &err, urls, 1, NULL), KVF_CONFIG);
    snprintf(url, sizeof url, "redis+cluster://127.0.0.1:%d", set->data[0]->port);
    urls[0] = url;
    assert_int_equal(kvf_store_open(&store, &err, urls, 1, NULL), KVF_CONFIG);
    assert_non_null(strstr(err.what, "cluster support disabled"));
}

/* Sentinels that are away make no error: the store opens and misses. */
static void test_away(void **state) {
    (void)state;
    kvf_store *store = kvft_store("redis+sentinel://127.0.0.1:1,127.0.0.1:2/mymaster");
    kvf_space *space = kvft_space(store, "m", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 1, BLOCKS, PAYLOAD);
    assert_int_equal(load(space, prompt), 0);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
}

static void test_failover(void **state) {
    NEEDS_SENTINELS();
    kvf_store *store = kvft_store(set->url);
    kvf_space *space = kvft_space(store, "m", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 1, BLOCKS, PAYLOAD);
    kvft_save_all(space, store, prompt);
    assert_int_equal(load(space, prompt), BLOCKS);
    kvft_await_replicas(set->data[0]);
    kvft_server_kill(set->watch[0]); /* the first sentinel is no help */
    kvft_server_kill(set->data[0]);
    double begin = kvft_now_ms();
    size_t run = 0;
    while (run < BLOCKS && kvft_now_ms() - begin < 25000) {
        run = load(space, prompt);
        kvft_nap_ms(10);
    }
    printf("whole again %.0f ms after the master's death\n", kvft_now_ms() - begin);
    assert_int_equal(run, BLOCKS);
    /* The old master returns. It is no longer used, or only as a replica. */
    kvft_server_restart(set->data[0]);
    kvft_server_restart(set->watch[0]);
    for (begin = kvft_now_ms(); kvft_now_ms() - begin < 1500;) {
        assert_int_equal(load(space, prompt), BLOCKS);
        kvft_nap_ms(20);
    }
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
}

/* The roles change by hand, with no connection lost: -READONLY tells, and what was to be stored is stored by the new
 * master. */
static void test_readonly(void **state) {
    NEEDS_SENTINELS();
    kvf_store *store = kvft_store(set->url);
    kvf_space *space = kvft_space(store, "r", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 7, BLOCKS, PAYLOAD);
    kvft_save_all(space, store, prompt);
    double begin = kvft_now_ms();
    int before = kvft_sentinels_master(set);
    const char *said = "";
    while (kvft_now_ms() - begin < 15000) {
        said = kvft_server_say(set->watch[1], "SENTINEL FAILOVER mymaster");
        if (said[0] == '+') {
            break;
        }
        kvft_nap_ms(100); /* not yet: the last failover is not over for it */
    }
    assert_string_equal(said, "+OK");
    begin = kvft_now_ms();
    unsigned seed = 100;
    do {
        kvft_prompt *other = kvft_prompt_new(space, seed++, 4, 3000);
        (void)kvf_save(space, other->blocks, 4, NULL);
        (void)kvft_flush(store);
        kvft_prompt_free(other);
        kvft_nap_ms(20);
    } while (kvft_now_ms() - begin < 4000 || (kvft_sentinels_master(set) == before && kvft_now_ms() - begin < 15000));
    assert_int_not_equal(kvft_sentinels_master(set), before);
    size_t stored = 0;
    for (begin = kvft_now_ms(); stored < 4 && kvft_now_ms() - begin < 20000; kvft_nap_ms(20)) {
        kvft_prompt *last = kvft_prompt_new(space, 7000, 4, 3000);
        (void)kvf_save(space, last->blocks, 4, NULL);
        (void)kvft_flush(store);
        stored = kvf_load(space, last->blocks, 4, NULL, KVF_MS(2000));
        kvft_prompt_free(last);
    }
    assert_int_equal(stored, 4);
    kvf_stats stats = {.struct_size = sizeof stats};
    kvf_store_stats(store, &stats);
    printf("%u rounds of saves over a failover: %llu refused by a server, %llu unreachable\n", seed - 100,
           (unsigned long long)stats.save_failures[KVF_WHY_SERVER],
           (unsigned long long)stats.save_failures[KVF_WHY_UNREACHABLE]);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
}

/* The master is made a replica by hand, and the sentinels have not seen it: saves are refused as READONLY, and tried
 * again within bounds; loads go on. Once it is the master again, so are saves. */
static void test_refused_saves(void **state) {
    NEEDS_SENTINELS();
    kvf_store *store = kvft_store(set->url);
    kvf_space *space = kvft_space(store, "w", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 1, BLOCKS, PAYLOAD);
    kvft_save_all(space, store, prompt);
    int at = kvft_sentinels_master(set) == set->data[0]->port ? 0 : 1;
    char command[64];
    kvft_await_replicas(set->data[at]); /* what it has not received is lost when it is promoted */
    assert_string_equal(kvft_server_say(set->data[1 - at], "REPLICAOF NO ONE"), "+OK");
    snprintf(command, sizeof command, "REPLICAOF 127.0.0.1 %d", set->data[1 - at]->port);
    assert_string_equal(kvft_server_say(set->data[at], command), "+OK");
    kvft_await_replicas(set->data[1 - at]);
    /* The sentinels still name it. A store that opens now takes its own word for it, and uses no replica. */
    kvf_store *late = kvft_store(set->url);
    kvf_space *late_space = kvft_space(late, "w", 16);
    assert_int_equal(load(late_space, prompt), 0);
    kvf_space_close(late_space);
    kvf_store_close(late);
    kvft_prompt *other = kvft_prompt_new(space, 55, 2, 3000);
    double begin = kvft_now_ms();
    assert_int_equal(kvf_save(space, other->blocks, 2, NULL), 2);
    assert_int_equal(kvft_flush(store), 2);
    kvf_stats stats = {.struct_size = sizeof stats};
    kvf_store_stats(store, &stats);
    printf("%llu saves refused within %.0f ms\n", (unsigned long long)stats.save_failures[KVF_WHY_SERVER],
           kvft_now_ms() - begin);
    assert_true(stats.save_failures[KVF_WHY_SERVER] >= 2);
    assert_int_equal(load(space, prompt), BLOCKS);
    assert_string_equal(kvft_server_say(set->data[at], "REPLICAOF NO ONE"), "+OK");
    snprintf(command, sizeof command, "REPLICAOF 127.0.0.1 %d", set->data[at]->port);
    assert_string_equal(kvft_server_say(set->data[1 - at], command), "+OK");
    kvft_save_all(space, store, other);
    kvft_prompt_poison(other);
    assert_int_equal(kvf_load(space, other->blocks, 2, NULL, KVF_MS(2000)), 2);
    kvft_prompt_free(other);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_configuration), cmocka_unit_test(test_away),
                                       cmocka_unit_test(test_refused_saves), cmocka_unit_test(test_failover),
                                       cmocka_unit_test(test_readonly)};
    return cmocka_run_group_tests(tests, start, stop);
}
