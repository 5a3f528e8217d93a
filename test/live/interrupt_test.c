/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls that wait for silent servers end when their caller says so (kvf_set_interrupt), and leave its memory alone.
 */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/cluster.h"
#include "support/kit.h"

#define BLOCKS    4u
#define BUDGET_US KVF_MS(3600000)
#define ASKS      3
#define HANG_S    120 /* an alarm ends a test that hangs */

static kvf_store *store;
static kvf_space *space;
static pthread_t caller;
static int asked;

/* The third time it has had enough. Calls of its own wait to their end. */
static int enough(void *ctx) {
    size_t run = 0;
    assert_true(pthread_equal(caller, pthread_self()));
    if (ctx != NULL && asked == 0) {
        kvft_prompt *prompt = ctx;
        assert_int_equal(kvf_match(space, &run, NULL, prompt->keys, BLOCKS, KVF_MS(5)), KVF_OK);
        assert_int_equal(run, 0);
    }
    return ++asked >= ASKS;
}

static void listen_to(void *ctx) {
    asked = 0;
    caller = pthread_self();
    kvf_set_interrupt(enough, ctx);
}

static void check_ended(void) {
    assert_int_equal(asked, ASKS); /* and was not asked again */
    kvf_set_interrupt(NULL, NULL);
}

static void open_on(const char *base) {
    char url[400];
    snprintf(url, sizeof url, "%s%cstall_ms=600000&connect_ms=600000", base, strchr(base, '?') != NULL ? '&' : '?');
    store = kvft_store(url);
    space = kvft_space(store, "m", 16);
    alarm(HANG_S);
}

static void close_all(void) {
    alarm(0);
    kvf_space_close(space);
    kvf_store_close(store);
}

static void interrupt_blocks(kvft_prompt *prompt) {
    size_t run = 1;
    kvf_found found[BLOCKS];
    listen_to(prompt);
    assert_int_equal(kvf_match(space, &run, found, prompt->keys, BLOCKS, BUDGET_US), KVF_OK);
    check_ended();
    assert_int_equal(run, 0);
    assert_int_equal(found[0].why, KVF_WHY_CLOSED);
    listen_to(NULL);
    assert_int_equal(kvf_load(space, prompt->blocks, BLOCKS, NULL, BUDGET_US), 0);
    check_ended();
    assert_int_equal(prompt->blocks[0].why, KVF_WHY_CLOSED);
    memset(prompt->memory, 0x5a, BLOCKS * prompt->payload_bytes); /* ours again */
}

static void check_untouched(const kvft_prompt *prompt) {
    for (size_t i = 0; i < BLOCKS * prompt->payload_bytes; i++) {
        assert_int_equal(prompt->memory[i], 0x5a);
    }
}

static void interrupt_on(kvft_server *server, const char *url, size_t payload) {
    open_on(url);
    kvft_prompt *prompt = kvft_prompt_new(space, 1, BLOCKS, payload),
                *again = kvft_prompt_new(space, 1, BLOCKS, payload);
    kvft_save_all(space, store, prompt);
    kvft_server_signal(server, SIGSTOP);
    interrupt_blocks(prompt); /* on connections that are made now, and wait for the first answer */
    kvft_server_signal(server, SIGCONT);
    assert_int_equal(kvf_load(space, again->blocks, BLOCKS, NULL, KVF_MS(KVFT_PATIENCE_MS)), BLOCKS);
    assert_int_equal(kvft_prompt_wrong(again, 1, BLOCKS), 0);
    check_untouched(prompt);
    kvft_server_signal(server, SIGSTOP);
    interrupt_blocks(prompt); /* on connections that are there */
    kvft_server_signal(server, SIGCONT);
    kvft_prompt_poison(again);
    assert_int_equal(kvf_load(space, again->blocks, BLOCKS, NULL, KVF_MS(KVFT_PATIENCE_MS)), BLOCKS);
    check_untouched(prompt);
    kvft_prompt_free(prompt);
    kvft_prompt_free(again);
    close_all();
    (void)kvft_server_say(server, "FLUSHALL");
}

static void test_blocks(void **state) {
    kvft_server *server = *state;
    if (server == NULL) {
        skip();
    }
    interrupt_on(server, server->unix_url, 100);
    interrupt_on(server, server->unix_url, (size_t)4 << 20);
    interrupt_on(server, server->tcp_url, 100);
    interrupt_on(server, server->tcp_url, (size_t)4 << 20);
}

/* A stopped server answers no handshake: the caller waits for one, and threads that help with its load for others. */
static void test_handshakes(void **state) {
    kvft_certs *certs = kvft_certs_new();
    (void)state;
    kvft_server_use_tls(certs, kvft_certs_server(certs));
    kvft_server *server = kvft_server_starts() ? kvft_server_start(NULL) : NULL; /* it may be built without TLS */
    if (server != NULL) {
        char url[300];
        snprintf(url, sizeof url, "%s?ssl_ca_certs=%s", server->tcp_url, certs->ca);
        interrupt_on(server, url, 100);
        interrupt_on(server, url, (size_t)4 << 20);
        kvft_server_stop(server);
    }
    kvft_server_use_tls(NULL, NULL);
    kvft_certs_free(certs);
}

static void test_sessions(void **state) {
    kvft_server *server = *state;
    if (server == NULL) {
        skip();
    }
    kvf_tensor tensor = {.data = calloc(1, 8 << 20), .len = 8 << 20};
    const kvf_session_options options = {.struct_size = sizeof options, .budget_us = BUDGET_US};
    kvf_session *session = NULL;
    kvf_error err;
    open_on(server->tcp_url);
    assert_int_equal(kvf_session_save(store, &err, "s", &tensor, &tensor, &options), KVF_OK);
    kvft_server_signal(server, SIGSTOP);
    listen_to(NULL);
    assert_int_equal(kvf_session_save(store, &err, "s", &tensor, &tensor, &options), KVF_IO);
    check_ended();
    listen_to(NULL);
    assert_int_equal(kvf_session_load(store, &session, &err, "s", BUDGET_US), KVF_IO);
    check_ended();
    listen_to(NULL);
    assert_int_equal(kvf_session_remove(store, &err, "s"), KVF_IO);
    check_ended();
    kvft_server_signal(server, SIGCONT);
    assert_int_equal(kvf_session_load(store, &session, &err, "s", KVF_MS(KVFT_PATIENCE_MS)), KVF_OK);
    assert_memory_equal(session->k.data, tensor.data, tensor.len);
    kvf_session_free(session);
    close_all();
    free((void *)(uintptr_t)tensor.data);
}

static void test_flush(void **state) {
    kvft_server *server = *state;
    uint64_t unwritten = 0;
    if (server == NULL) {
        skip();
    }
    open_on(server->unix_url);
    kvft_prompt *prompt = kvft_prompt_new(space, 1, BLOCKS, 1000);
    kvft_server_signal(server, SIGSTOP);
    assert_int_equal(kvf_save(space, prompt->blocks, BLOCKS, NULL), BLOCKS);
    listen_to(NULL);
    assert_int_equal(kvf_store_flush(store, &unwritten, BUDGET_US), KVF_AGAIN);
    check_ended();
    kvft_server_signal(server, SIGCONT);
    assert_int_equal(kvft_flush(store), 0);
    kvft_prompt_free(prompt);
    close_all();
}

/* Whoever says nothing, or never "enough", disturbs nothing. */
static int never(void *ctx) {
    (void)ctx;
    asked++;
    return 0;
}

static void test_a_call_that_may_go_on(void **state) {
    kvft_server *server = *state;
    size_t run = 0;
    if (server == NULL) {
        skip();
    }
    open_on(server->unix_url);
    kvft_prompt *prompt = kvft_prompt_new(space, 1, BLOCKS, 100);
    kvft_save_all(space, store, prompt);
    asked = 0;
    kvf_set_interrupt(never, NULL);
    assert_int_equal(kvf_load(space, prompt->blocks, BLOCKS, NULL, BUDGET_US), BLOCKS);
    kvft_server_signal(server, SIGSTOP);
    assert_int_equal(kvf_match(space, &run, NULL, prompt->keys, BLOCKS, KVF_MS(300)), KVF_OK);
    assert_int_equal(run, 0);
    assert_true(asked > 1);
    kvft_server_signal(server, SIGCONT);
    assert_int_equal(kvf_match(space, &run, NULL, prompt->keys, BLOCKS, BUDGET_US), KVF_OK);
    assert_int_equal(run, BLOCKS);
    kvf_set_interrupt(NULL, NULL);
    kvft_prompt_free(prompt);
    close_all();
}

static void test_a_cluster(void **state) {
    (void)state;
    kvft_cluster *cluster = kvft_cluster_start(false);
    if (cluster == NULL) {
        skip();
    }
    open_on(cluster->url);
    kvft_prompt *prompt = kvft_prompt_new(space, 1, BLOCKS, 1000);
    kvft_save_all(space, store, prompt);
    for (int shard = 0; shard < KVFT_SHARDS; shard++) {
        kvft_server_signal(cluster->nodes[shard], SIGSTOP);
    }
    interrupt_blocks(prompt);
    for (int shard = 0; shard < KVFT_SHARDS; shard++) {
        kvft_server_signal(cluster->nodes[shard], SIGCONT);
    }
    check_untouched(prompt);
    kvft_prompt_free(prompt);
    close_all();
    kvft_cluster_stop(cluster);
}

static int set_up(void **state) {
    *state = kvft_server_start(NULL);
    return 0;
}

static int tear_down(void **state) {
    if (*state != NULL) {
        kvft_server_stop(*state);
    }
    return 0;
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(test_blocks), cmocka_unit_test(test_handshakes), TEST(test_sessions),
        TEST(test_flush),  TEST(test_a_call_that_may_go_on),  cmocka_unit_test(test_a_cluster)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
