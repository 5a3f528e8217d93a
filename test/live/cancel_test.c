/* SPDX-License-Identifier: Apache-2.0
 *
 * Batches of a queue on a server that is stopped: a cancelled save gives its memory back while the server is still
 * stopped, and each batch waits for a silent server as long as it says.
 */
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/kit.h"
#include "support/server.h"

#define BLOCKS  4u
#define MANY    40u   /* batches: more than there are threads for them */
#define WAIT_MS 20000 /* far below every other time that could end a batch */

static kvft_server *server;
static kvf_store *store;
static kvf_space *space;
static kvf_queue *queue;

static void open_on(const char *base, const char *secret) {
    char url[300];
    snprintf(url, sizeof url, "%s%cstall_ms=600000&connect_ms=600000", base, strchr(base, '?') != NULL ? '&' : '?');
    store = kvft_store(url);
    space = kvft_sealed_space(store, "m", 16, secret);
    assert_int_equal(kvf_queue_open(&queue, NULL, store, MANY), KVF_OK);
}

static void close_all(void) {
    kvf_queue_close(queue);
    kvf_space_close(space);
    kvf_store_close(store);
}

static int set_up(void **state) {
    (void)state;
    server = kvft_server_start(NULL);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    if (server != NULL) {
        kvft_server_stop(server);
    }
    return 0;
}

static kvf_batch batch_of(kvf_op op, kvft_prompt *prompt, uint32_t flags) {
    return (kvf_batch){.struct_size = sizeof(kvf_batch),
                       .op = op,
                       .space = space,
                       .blocks = prompt->blocks,
                       .num = BLOCKS,
                       .budget_us = KVF_MS(600000),
                       .flags = flags};
}

static uint64_t submit(const kvf_batch *batch) {
    uint64_t ticket = 0;
    assert_int_equal(kvf_submit(queue, &ticket, batch), KVF_OK);
    return ticket;
}

static kvf_completion next_completion(void) {
    kvf_completion done;
    struct pollfd fd = {.fd = kvf_queue_fd(queue), .events = POLLIN};
    while (kvf_reap(queue, &done, 1) == 0) {
        if (poll(&fd, 1, WAIT_MS) == 0) {
            kvft_server_signal(server, SIGCONT);
            fail_msg("no completion while the server is stopped");
        }
    }
    return done;
}

/* A save that the server is not going to take, cancelled in the middle; then the server goes on, and so do saves. */
static void cancel_one(size_t payload, uint32_t flags, bool connected) {
    kvft_prompt *prompt = kvft_prompt_new(space, 1, BLOCKS, payload), *other = kvft_prompt_new(space, 2, 1, 100);
    kvf_batch batch = batch_of(KVF_OP_SAVE, prompt, flags);
    if (connected) {
        kvf_batch first = batch_of(KVF_OP_SAVE, other, 0);
        first.num = 1;
        (void)submit(&first);
        assert_int_equal(next_completion().num_ok, 1);
    }
    kvft_server_signal(server, SIGSTOP);
    uint64_t ticket = submit(&batch);
    kvft_nap_ms(60); /* it has come as far as it comes, or it has not: both must end */
    double begin = kvft_now_ms();
    kvf_cancel(queue, ticket);
    kvf_completion done = next_completion();
    print_message("payload %zu, flags %u: the memory was back after %.0f ms\n", payload, flags, kvft_now_ms() - begin);
    assert_int_equal(done.ticket, ticket);
    assert_int_equal(done.num_ok, 0);
    for (size_t i = 0; i < BLOCKS; i++) {
        assert_int_equal(prompt->blocks[i].status, KVF_MISS);
    }
    kvft_server_signal(server, SIGCONT);
    batch.flags = 0;
    (void)submit(&batch);
    assert_int_equal(next_completion().num_ok, BLOCKS);
    kvft_prompt_poison(prompt);
    assert_int_equal(kvf_load(space, prompt->blocks, BLOCKS, NULL, KVF_MS(WAIT_MS)), BLOCKS);
    assert_int_equal(kvft_prompt_wrong(prompt, 1, BLOCKS), 0);
    kvft_prompt_free(prompt);
    kvft_prompt_free(other);
}

/* Small values are in the socket and wait for their answers; large ones fill it. */
static void cancel_on(const char *base, uint32_t flags, const char *secret, bool connected) {
    static const size_t payloads[] = {100, (size_t)200 << 10, (size_t)8 << 20};
    for (size_t i = 0; i < sizeof payloads / sizeof *payloads; i++) {
        open_on(base, secret);
        cancel_one(payloads[i], flags, connected);
        close_all();
        (void)kvft_server_say(server, "FLUSHALL");
    }
}

static void test_a_cancelled_save_gives_its_memory_back(void **state) {
    (void)state;
    if (server == NULL) {
        skip();
    }
    cancel_on(server->unix_url, 0, NULL, true);
    cancel_on(server->unix_url, KVF_MAY_LEND, NULL, true);
    cancel_on(server->tcp_url, 0, NULL, true);
    cancel_on(server->tcp_url, KVF_MAY_LEND, NULL, true);
}

static void test_also_one_that_is_sealed_first(void **state) {
    (void)state;
    if (server == NULL) {
        skip();
    }
    cancel_on(server->unix_url, 0, "0123456789abcdef0123456789abcdef", true);
    cancel_on(server->tcp_url, 0, "0123456789abcdef0123456789abcdef", true);
}

static void test_also_one_that_has_no_connection_yet(void **state) {
    (void)state;
    if (server == NULL) {
        skip();
    }
    cancel_on(server->unix_url, 0, NULL, false);
    cancel_on(server->tcp_url, 0, NULL, false);
}

/* A stopped server answers no handshake, which a thread of the queue waits for. */
static void test_also_one_that_shakes_hands(void **state) {
    (void)state;
    kvft_certs *certs = kvft_certs_new();
    kvft_server *plain = server;
    kvft_server_use_tls(certs, kvft_certs_server(certs));
    server = kvft_server_starts() ? kvft_server_start(NULL) : NULL; /* it may be built without TLS */
    if (server != NULL) {
        char base[300];
        snprintf(base, sizeof base, "%s?ssl_ca_certs=%s", server->tcp_url, certs->ca);
        cancel_on(base, 0, NULL, false);
        kvft_server_stop(server);
    }
    kvft_server_use_tls(NULL, NULL);
    kvft_certs_free(certs);
    server = plain;
}

/* Small ones, of which nearly all has arrived as far as the client knows, and large ones. */
static void test_a_cancelled_load_gives_its_memory_back(void **state) {
    static const size_t payloads[] = {100, (size_t)8 << 20};
    (void)state;
    if (server == NULL) {
        skip();
    }
    for (size_t i = 0; i < sizeof payloads / sizeof *payloads; i++) {
        open_on(server->unix_url, NULL);
        kvft_prompt *prompt = kvft_prompt_new(space, 1, BLOCKS, payloads[i]);
        kvf_batch batch = batch_of(KVF_OP_LOAD, prompt, 0);
        kvft_save_all(space, store, prompt);
        assert_int_equal(kvf_load(space, prompt->blocks, BLOCKS, NULL, KVF_MS(WAIT_MS)), BLOCKS);
        kvft_server_signal(server, SIGSTOP);
        uint64_t ticket = submit(&batch);
        kvft_nap_ms(60);
        kvf_cancel(queue, ticket);
        assert_int_equal(next_completion().num_ok, 0);
        assert_int_equal(prompt->blocks[0].why, KVF_WHY_CLOSED);
        kvft_server_signal(server, SIGCONT);
        (void)submit(&batch);
        assert_int_equal(next_completion().num_ok, BLOCKS);
        assert_int_equal(kvft_prompt_wrong(prompt, 1, BLOCKS), 0);
        kvft_prompt_free(prompt);
        close_all();
    }
}

/* All threads wait for the silent server, so the last batch has not begun. */
static void cancel_last_of_many(kvf_op op) {
    open_on(server->unix_url, NULL);
    kvft_prompt *prompts[MANY];
    kvf_found found[MANY][BLOCKS];
    uint64_t last = 0;
    for (unsigned i = 0; i < MANY; i++) {
        prompts[i] = kvft_prompt_new(space, i, BLOCKS, 100);
    }
    kvft_server_signal(server, SIGSTOP);
    for (unsigned i = 0; i < MANY; i++) {
        kvf_batch batch = batch_of(op, prompts[i], 0);
        batch.found = op == KVF_OP_MATCH ? found[i] : NULL;
        last = submit(&batch);
    }
    kvf_cancel(queue, last);
    kvf_completion done = next_completion();
    assert_int_equal(done.ticket, last);
    assert_int_equal(done.num_ok, 0);
    kvf_reason why = op == KVF_OP_MATCH ? found[MANY - 1][0].why : prompts[MANY - 1]->blocks[0].why;
    assert_string_equal(kvf_reason_name(why), kvf_reason_name(KVF_WHY_CLOSED));
    kvft_server_signal(server, SIGCONT);
    for (unsigned i = 0; i + 1 < MANY; i++) {
        assert_int_equal(next_completion().num_ok, op == KVF_OP_SAVE ? BLOCKS : 0);
    }
    for (unsigned i = 0; i < MANY; i++) {
        kvft_prompt_free(prompts[i]);
    }
    close_all();
    (void)kvft_server_say(server, "FLUSHALL");
}

static void test_also_one_that_waits_for_a_thread(void **state) {
    (void)state;
    if (server == NULL) {
        skip();
    }
    cancel_last_of_many(KVF_OP_SAVE);
    cancel_last_of_many(KVF_OP_LOAD);
    cancel_last_of_many(KVF_OP_MATCH);
    cancel_last_of_many(KVF_OP_REMOVE);
}

/* ---- patience */

static void check_stalled(const kvft_prompt *prompt) {
    for (size_t i = 0; i < BLOCKS; i++) {
        assert_int_equal(prompt->blocks[i].status, KVF_MISS);
        if (prompt->blocks[i].why != KVF_WHY_STALLED) {
            fail_msg("block %zu is %s", i, kvf_reason_name(prompt->blocks[i].why));
        }
    }
}

/* Two batches at once: the impatient one ends first, and the other still waits for the server, which then goes on. */
static void wait_for_silent(const char *base, kvf_op op) {
    open_on(base, NULL);
    kvft_prompt *brief = kvft_prompt_new(space, 3, BLOCKS, 100000),
                *lasting = kvft_prompt_new(space, 4, BLOCKS, 100000);
    kvf_batch a = batch_of(op, brief, 0), b = batch_of(op, lasting, 0);
    a.user = 1;
    b.user = 2;
    a.patience_us = KVF_MS(100);
    b.patience_us = KVF_MS(300000);
    if (op != KVF_OP_SAVE) {
        kvft_save_all(space, store, brief);
        kvft_save_all(space, store, lasting);
    }
    kvft_server_signal(server, SIGSTOP);
    (void)submit(&b);
    (void)submit(&a);
    kvf_completion done = next_completion();
    assert_int_equal(done.user, 1);
    assert_int_equal(done.num_ok, 0);
    if (op != KVF_OP_LOAD) {
        check_stalled(brief);
    } else {
        assert_int_equal(brief->blocks[0].why, KVF_WHY_STALLED); /* the others are behind a gap */
    }
    kvf_completion none;
    assert_int_equal(kvf_reap(queue, &none, 1), 0);
    /* A stall that only the batch has called one does not count against the server: it is asked again. */
    (void)submit(&a);
    assert_int_equal(next_completion().user, 1);
    assert_int_equal(brief->blocks[0].why, KVF_WHY_STALLED);
    kvft_server_signal(server, SIGCONT);
    done = next_completion();
    assert_int_equal(done.user, 2);
    assert_int_equal(done.num_ok, BLOCKS);
    kvft_prompt_free(brief);
    kvft_prompt_free(lasting);
    close_all();
    (void)kvft_server_say(server, "FLUSHALL");
}

static void test_each_batch_has_patience_of_its_own(void **state) {
    (void)state;
    if (server == NULL) {
        skip();
    }
    wait_for_silent(server->unix_url, KVF_OP_SAVE);
    wait_for_silent(server->tcp_url, KVF_OP_SAVE);
    wait_for_silent(server->unix_url, KVF_OP_LOAD);
    wait_for_silent(server->tcp_url, KVF_OP_LOAD);
    wait_for_silent(server->unix_url, KVF_OP_REMOVE);
    wait_for_silent(server->tcp_url, KVF_OP_TOUCH);
}

/* The same of lookups. The reason is that of each key. */
static void match_silent(const char *base) {
    open_on(base, NULL);
    kvft_prompt *prompt = kvft_prompt_new(space, 3, BLOCKS, 1000);
    kvf_found found[2][BLOCKS];
    kvf_batch a = batch_of(KVF_OP_MATCH, prompt, 0), b = a;
    kvft_save_all(space, store, prompt);
    a.user = 1;
    a.patience_us = KVF_MS(100);
    a.found = found[0];
    b.user = 2;
    b.patience_us = KVF_MS(300000);
    b.found = found[1];
    kvft_server_signal(server, SIGSTOP);
    (void)submit(&b);
    for (int i = 0; i < 2; i++) {
        (void)submit(&a);
        kvf_completion done = next_completion();
        assert_int_equal(done.user, 1);
        assert_int_equal(done.num_ok, 0);
        for (size_t k = 0; k < BLOCKS; k++) {
            assert_string_equal(kvf_reason_name(found[0][k].why), kvf_reason_name(KVF_WHY_STALLED));
        }
    }
    kvft_server_signal(server, SIGCONT);
    kvf_completion done = next_completion();
    assert_int_equal(done.user, 2);
    assert_int_equal(done.num_ok, BLOCKS);
    kvft_prompt_free(prompt);
    close_all();
    (void)kvft_server_say(server, "FLUSHALL");
}

static void test_a_match_has_patience_too(void **state) {
    (void)state;
    if (server == NULL) {
        skip();
    }
    match_silent(server->unix_url);
    match_silent(server->tcp_url);
}

/* A blocking load has what a batch has: patience of its own, and blocks that are independent. */
static void test_a_load_has_patience_too(void **state) {
    (void)state;
    if (server == NULL) {
        skip();
    }
    open_on(server->unix_url, NULL);
    kvft_prompt *prompt = kvft_prompt_new(space, 3, BLOCKS, 1000);
    kvf_load_options options = {
        .struct_size = sizeof options, .flags = KVF_EACH, .budget_us = KVF_MS(600000), .patience_us = KVF_MS(100)};
    kvft_save_all(space, store, prompt);
    kvft_server_signal(server, SIGSTOP);
    assert_int_equal(kvf_load_with(space, prompt->blocks, BLOCKS, NULL, &options), 0);
    check_stalled(prompt);
    kvft_server_signal(server, SIGCONT);
    prompt->blocks[1].key.bytes[0] ^= 1;
    options.patience_us = 0;
    kvft_prompt_poison(prompt);
    assert_int_equal(kvf_load_with(space, prompt->blocks, BLOCKS, NULL, &options), BLOCKS - 1);
    for (size_t i = 0; i < BLOCKS; i++) {
        assert_int_equal(prompt->blocks[i].status, i == 1 ? KVF_MISS : KVF_OK);
        assert_int_equal(prompt->blocks[i].why, i == 1 ? KVF_WHY_ABSENT : KVF_WHY_NONE);
    }
    assert_int_equal(kvft_prompt_wrong(prompt, 3, BLOCKS), 1);
    prompt->blocks[1].key.bytes[0] ^= 1;
    assert_int_equal(kvf_load_with(space, prompt->blocks, BLOCKS, NULL, NULL), BLOCKS);
    assert_int_equal(kvft_prompt_wrong(prompt, 3, BLOCKS), 0);
    kvft_prompt_free(prompt);
    close_all();
}

/* A server that greets and is silent when something is saved stalls on both connections that a batch tries. */
static void test_impatient_stalls_do_not_count(void **state) {
    (void)state;
    if (server == NULL) {
        skip();
    }
    open_on(server->unix_url, NULL);
    kvft_prompt *prompt = kvft_prompt_new(space, 3, BLOCKS, 1000);
    kvf_batch batch = batch_of(KVF_OP_SAVE, prompt, 0);
    batch.patience_us = KVF_MS(300);
    assert_string_equal(kvft_server_say(server, "CLIENT PAUSE 600000 WRITE"), "+OK");
    for (int i = 0; i < 2; i++) {
        (void)submit(&batch);
        assert_int_equal(next_completion().num_ok, 0);
        check_stalled(prompt);
    }
    assert_string_equal(kvft_server_say(server, "CLIENT UNPAUSE"), "+OK");
    (void)submit(&batch);
    assert_int_equal(next_completion().num_ok, BLOCKS);
    kvft_prompt_free(prompt);
    close_all();
}

static void test_patience_is_a_time(void **state) {
    (void)state;
    if (server == NULL) {
        skip();
    }
    open_on(server->unix_url, NULL);
    kvft_prompt *prompt = kvft_prompt_new(space, 3, BLOCKS, 100);
    kvf_batch batch = batch_of(KVF_OP_SAVE, prompt, 0);
    uint64_t ticket = 0;
    batch.patience_us = -1;
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_LIMIT);
    batch.patience_us = INT64_MAX;
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_LIMIT);
    kvft_prompt_free(prompt);
    close_all();
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {TEST(test_a_cancelled_save_gives_its_memory_back),
                                       TEST(test_also_one_that_is_sealed_first),
                                       TEST(test_also_one_that_has_no_connection_yet),
                                       TEST(test_also_one_that_shakes_hands),
                                       TEST(test_a_cancelled_load_gives_its_memory_back),
                                       TEST(test_also_one_that_waits_for_a_thread),
                                       TEST(test_each_batch_has_patience_of_its_own),
                                       TEST(test_a_match_has_patience_too),
                                       TEST(test_a_load_has_patience_too),
                                       TEST(test_impatient_stalls_do_not_count),
                                       TEST(test_patience_is_a_time)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
