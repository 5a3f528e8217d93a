/* SPDX-License-Identifier: Apache-2.0
 *
 * Pages lent to a server (redis/wire/lend.h) by a save that failed: a stopped server has the whole record in its
 * socket, and reads it when it continues. It must find what was saved, whatever that memory is used for meanwhile.
 */
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "redis/wire/lend.h"
#include "support/kit.h"
#include "support/server.h"

#define PAYLOAD ((size_t)200 << 10) /* fits into the socket, head and all */
#define WAIT_MS 20000

static kvft_server *server;
static kvf_store *store;
static kvf_space *space;
static kvft_prompt *prompt; /* two blocks: the first opens the connection, the second is lent to a stopped server */

static int set_up_behind(bool memory, bool tcp) {
    char url[256];
    server = kvft_server_start(NULL);
    if (server == NULL) {
        return 0;
    }
    snprintf(url, sizeof url, "%s?stall_ms=50", tcp ? server->tcp_url : server->unix_url);
    const char *urls[] = {"mem:", url};
    assert_int_equal(kvf_store_open(&store, NULL, urls + !memory, memory ? 2 : 1, NULL), KVF_OK);
    space = kvft_space(store, "m", 16);
    prompt = kvft_prompt_new(space, 7, 2, PAYLOAD);
    return 0;
}

static int set_up_over(bool tcp) {
    return set_up_behind(false, tcp);
}

/* Here the record is complete before Redis is asked to take it. */
static int set_up_tcp_behind_memory(void **state) {
    (void)state;
    return set_up_behind(true, true);
}

static int set_up(void **state) {
    (void)state;
    return set_up_over(false);
}

static int set_up_tcp(void **state) {
    (void)state;
    return set_up_over(true);
}

static int tear_down(void **state) {
    (void)state;
    if (server != NULL) {
        kvft_prompt_free(prompt);
        kvf_space_close(space);
        kvf_store_close(store);
        kvft_server_stop(server);
    }
    return 0;
}

static bool can_test(void) {
    kvfi_lender lender;
    kvfi_lender_init(&lender);
    return server != NULL && !lender.never; /* this kernel lends */
}

static void wait_for_keys(int num) {
    char want[16];
    double begin = kvft_now_ms();
    snprintf(want, sizeof want, ":%d", num);
    while (strcmp(kvft_server_say(server, "DBSIZE"), want) != 0) {
        if (kvft_now_ms() - begin > WAIT_MS) {
            fail_msg("the server has %s keys, not %s", kvft_server_say(server, "DBSIZE"), want);
        }
        kvft_nap_ms(10);
    }
}

/* How a store that knows nothing yet finds the two blocks. */
static kvf_reason second_block(void) {
    kvf_store *other = kvft_store(server->unix_url);
    kvf_space *same = kvft_space(other, "m", 16);
    kvft_prompt *again = kvft_prompt_new(same, 7, 2, PAYLOAD);
    kvft_prompt_poison(again);
    size_t run = kvf_load(same, again->blocks, 2, NULL, KVF_MS(WAIT_MS));
    assert_true(run >= 1);
    assert_int_equal(kvft_prompt_wrong(again, 7, run), 0);
    kvf_reason why = again->blocks[1].why;
    kvft_prompt_free(again);
    kvf_space_close(same);
    kvf_store_close(other);
    return why;
}

/* ---- the caller's memory */

static kvf_status save_through(kvf_block *block, uint32_t flags) {
    kvf_queue *queue = NULL;
    kvf_completion done;
    uint64_t ticket = 0;
    kvf_batch batch = {
        .struct_size = sizeof batch, .op = KVF_OP_SAVE, .space = space, .blocks = block, .num = 1, .flags = flags};
    assert_int_equal(kvf_queue_open(&queue, NULL, store, 1), KVF_OK);
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    while (kvf_reap(queue, &done, 1) == 0) {
        struct pollfd fd = {.fd = kvf_queue_fd(queue), .events = POLLIN};
        assert_int_equal(poll(&fd, 1, WAIT_MS), 1);
    }
    kvf_queue_close(queue);
    return block->status;
}

static kvf_reason what_arrives_of_the_callers(uint32_t flags) {
    assert_int_equal(save_through(&prompt->blocks[0], flags), KVF_OK);
    wait_for_keys(2); /* with the card of the space */
    kvft_server_signal(server, SIGSTOP);
    assert_int_equal(save_through(&prompt->blocks[1], flags), KVF_MISS);
    memset(prompt->iov[1].iov_base, 0x5a, PAYLOAD); /* the engine uses it again */
    kvft_server_signal(server, SIGCONT);
    wait_for_keys(3);
    return second_block();
}

static void the_callers_is_copied(void **state) {
    (void)state;
    if (!can_test()) {
        skip();
    }
    assert_int_equal(what_arrives_of_the_callers(0), KVF_WHY_NONE);
}

/* What the flag is for, and that this test can tell: lent pages arrive as they are by then. */
static void the_callers_is_lent_if_he_says_so(void **state) {
    (void)state;
    if (!can_test()) {
        skip();
    }
    assert_int_equal(what_arrives_of_the_callers(KVF_MAY_LEND), KVF_WHY_CHECKSUM);
}

/* Over TCP the flag has no effect. */
static void the_callers_is_copied_over_tcp(void **state) {
    (void)state;
    if (!can_test()) {
        skip();
    }
    assert_int_equal(what_arrives_of_the_callers(KVF_MAY_LEND), KVF_WHY_NONE);
}

/* ---- the library's memory */

/* All that the backlog gives out now is written to, so that a buffer that is used again shows. */
static void use_the_backlog(void) {
    for (int i = 0; i < 16; i++) {
        kvf_reserved reserved;
        assert_int_equal(kvf_reserve(space, &reserved, PAYLOAD), KVF_OK);
        memset(reserved.data, 0x5a, reserved.len);
        kvf_abandon(space, &reserved);
    }
}

static void the_librarys_is_not_used_again(void **state) {
    (void)state;
    if (!can_test()) {
        skip();
    }
    kvf_stats stats = {.struct_size = sizeof stats};
    assert_int_equal(kvf_save(space, prompt->blocks, 1, NULL), 1);
    kvft_flush_all(store);
    wait_for_keys(2);
    /* What a load has missed is not looked up before it is saved: that would tell of the silence. */
    assert_int_equal(kvf_load(space, &prompt->blocks[1], 1, NULL, KVF_MS(WAIT_MS)), 0);
    kvft_prompt_fill(prompt, 7);
    kvft_server_signal(server, SIGSTOP);
    assert_int_equal(kvf_save(space, &prompt->blocks[1], 1, NULL), 1);
    assert_int_equal(kvft_flush(store), 1);
    kvf_store_stats(store, &stats);
    assert_int_equal(stats.saved, 1);
    use_the_backlog();
    kvft_server_signal(server, SIGCONT);
    wait_for_keys(3);
    assert_int_equal(second_block(), KVF_WHY_NONE);
}

int main(void) {
#define TEST(name)     cmocka_unit_test_setup_teardown(name, set_up, tear_down)
#define TEST_TCP(name) cmocka_unit_test_setup_teardown(name, set_up_tcp, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(the_callers_is_copied),
        TEST(the_callers_is_lent_if_he_says_so),
        TEST(the_librarys_is_not_used_again),
        TEST_TCP(the_callers_is_copied_over_tcp),
        cmocka_unit_test_setup_teardown(the_callers_is_copied_over_tcp, set_up_tcp_behind_memory, tear_down),
        TEST_TCP(the_librarys_is_not_used_again)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
