/* SPDX-License-Identifier: Apache-2.0
 *
 * Sealed saves that break anywhere: a record is sealed while it is sent, so its connection may end in the middle. It is
 * then sent again on another connection, or missing; never damaged, and never in the clear.
 */
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/faults.h"
#include "support/kit.h"
#include "support/server.h"

#define SECRET  "a secret of this test, long enough"
#define PAYLOAD ((size_t)1500 << 10) /* several pieces, copied or lent */
#define BLOCKS  2u
#define WAIT_MS 20000

static kvft_server *server;

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

typedef size_t save_fn(kvf_store *, kvf_space *, kvf_block *, size_t num);

static size_t save_staged(kvf_store *store, kvf_space *space, kvf_block *blocks, size_t num) {
    uint64_t unwritten = 0;
    size_t taken = kvf_save(space, blocks, num, NULL);
    assert_int_not_equal(kvf_store_flush(store, &unwritten, KVF_MS(WAIT_MS)), KVF_AGAIN);
    return taken - (size_t)unwritten;
}

static size_t save_by_queue(kvf_store *store, kvf_space *space, kvf_block *blocks, size_t num) {
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_SAVE,
                       .space = space,
                       .blocks = blocks,
                       .num = num,
                       .budget_us = KVF_MS(WAIT_MS)};
    kvf_completion done = {0};
    kvf_queue *queue = NULL;
    uint64_t ticket = 0;
    if (kvf_queue_open(&queue, NULL, store, 1) != KVF_OK) {
        return 0;
    }
    if (kvf_submit(queue, &ticket, &batch) == KVF_OK) {
        struct pollfd fd = {.fd = kvf_queue_fd(queue), .events = POLLIN};
        while (kvf_reap(queue, &done, 1) == 0) {
            (void)poll(&fd, 1, 20);
        }
    }
    kvf_queue_close(queue);
    return done.num_ok;
}

/* How many of the blocks are stored, whole; the others are absent. */
static size_t num_stored(void) {
    kvf_store *store = kvft_store(server->unix_url);
    kvf_space *space = kvft_sealed_space(store, "m", 16, SECRET);
    kvft_prompt *prompt = kvft_prompt_new(space, 7, BLOCKS, PAYLOAD);
    size_t stored = 0;
    for (size_t i = 0; i < BLOCKS; i++) {
        memset(prompt->iov[i].iov_base, 0, PAYLOAD);
        size_t got = kvf_load(space, &prompt->blocks[i], 1, NULL, KVF_MS(WAIT_MS));
        assert_true(got == 1 || prompt->blocks[i].why == KVF_WHY_ABSENT);
        stored += got;
    }
    assert_int_equal(kvft_prompt_wrong(prompt, 7, BLOCKS), BLOCKS - stored);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
    return stored;
}

/* The n-th call fails while the second block is saved, over a connection that the first one has opened. Returns false
 * when there are fewer calls. */
static bool save_with_fault(const char *url, save_fn *save, kvft_fault_kind kind, uint64_t nth, unsigned *healed) {
    assert_string_equal(kvft_server_say(server, "FLUSHALL SYNC"), "+OK");
    kvf_store *store = kvft_store(url);
    kvf_space *space = kvft_sealed_space(store, "m", 16, SECRET);
    kvft_prompt *prompt = kvft_prompt_new(space, 7, BLOCKS, PAYLOAD);
    assert_int_equal(save(store, space, prompt->blocks, 1), 1);
    kvft_faults_arm(kind, nth);
    size_t saved = save(store, space, prompt->blocks + 1, 1);
    bool hit = kvft_faults_disarm();
    kvf_space_close(space);
    kvf_store_close(store);
    kvft_prompt_free(prompt);
    size_t stored = num_stored();
    assert_true(stored >= 1 + saved);
    assert_true(hit || saved == 1);
    *healed += hit && saved == 1;
    return hit;
}

static void any_call_fails(save_fn *save) {
    for (int tcp = 0; tcp < 2 && server != NULL; tcp++) {
        for (kvft_fault_kind kind = KVFT_ALLOC; kind <= KVFT_SHORT; kind++) {
            unsigned healed = 0;
            uint64_t nth = 1;
            while (save_with_fault(tcp ? server->tcp_url : server->unix_url, save, kind, nth, &healed)) {
                nth++;
            }
            assert_true(healed > 0 || kind == KVFT_ALLOC);
        }
    }
    if (server == NULL) {
        skip();
    }
}

static void faults_staged(void **state) {
    (void)state;
    any_call_fails(save_staged);
}

static void faults_by_queue(void **state) {
    (void)state;
    any_call_fails(save_by_queue);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(faults_staged, set_up, tear_down),
        cmocka_unit_test_setup_teardown(faults_by_queue, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
