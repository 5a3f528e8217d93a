/* SPDX-License-Identifier: Apache-2.0
 *
 * After a server refused saves (OOM, MISCONF, READONLY), saves pause for a while and loads go on. The breaker of a
 * server that is down shows in kvf_tier_info. Saves are more patient than loads.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include <cmocka.h>

#include "support/kit.h"
#include "support/server.h"

#define BLOCKS  8u
#define PAYLOAD 60000u

typedef struct bench {
    kvft_server *server;
    kvf_store *store;
    kvf_space *space;
    kvft_prompt *kept; /* is in the store from the beginning */
} bench;

static int start(void **state) {
    bench *b = calloc(1, sizeof *b);
    *state = b;
    if (b == NULL || (b->server = kvft_server_start(NULL)) == NULL) {
        return 0;
    }
    b->store = kvft_store(b->server->tcp_url);
    b->space = kvft_space(b->store, "m", 16);
    b->kept = kvft_prompt_new(b->space, 1, BLOCKS, PAYLOAD);
    kvft_save_all(b->space, b->store, b->kept);
    return 0;
}

static int stop(void **state) {
    bench *b = *state;
    if (b->server != NULL) {
        kvft_prompt_free(b->kept);
        kvf_space_close(b->space);
        kvf_store_close(b->store);
        kvft_server_stop(b->server);
    }
    free(b);
    return 0;
}

static bench *of(void **state) {
    bench *b = *state;
    if (b->server == NULL) {
        skip();
    }
    return b;
}

static size_t load(bench *b) {
    kvft_prompt_poison(b->kept);
    size_t run = kvf_load(b->space, b->kept->blocks, BLOCKS, NULL, KVF_MS(1000));
    assert_int_equal(kvft_prompt_wrong(b->kept, 1, run), 0);
    return run;
}

static kvf_tier_info info_of(bench *b) {
    kvf_tier_info info = {.struct_size = sizeof info};
    assert_int_equal(kvf_tier_info_get(b->store, &info, 0), KVF_OK);
    assert_int_equal(info.num_servers, 1);
    return info;
}

/* How often the server has said so. */
static long refusals(bench *b, const char *word) {
    char field[64];
    snprintf(field, sizeof field, "errorstat_%s:count=", word);
    char *said = kvft_server_ask(b->server, "INFO errorstats");
    const char *at = strstr(said, field);
    long num = at != NULL ? atol(at + strlen(field)) : 0;
    free(said);
    return num;
}

static size_t save_new(bench *b, uint64_t seed) {
    kvft_prompt *p = kvft_prompt_new(b->space, seed, BLOCKS, PAYLOAD);
    kvf_stats before = {.struct_size = sizeof before}, after = before;
    kvf_store_stats(b->store, &before);
    assert_int_equal(kvf_save(b->space, p->blocks, BLOCKS, NULL), BLOCKS);
    (void)kvft_flush(b->store);
    kvf_store_stats(b->store, &after);
    kvft_prompt_free(p);
    return (size_t)(after.saved - before.saved);
}

/* While the server refuses: saves are handed over all the time, few reach it, and loads are whole. Afterwards it gets
 * them again. */
static void check_refusal(bench *b, const char *word, void (*mend)(bench *)) {
    size_t handed = 0;
    double begin = kvft_now_ms();
    uint64_t seed = 100;
    double spent = 0;
    for (; spent < 1500; seed++, spent = kvft_now_ms() - begin) {
        assert_int_equal(save_new(b, seed), 0);
        handed += BLOCKS;
        assert_int_equal(load(b), BLOCKS);
        kvft_nap_ms(2);
    }
    long refused = refusals(b, word);
    printf("%s: of %zu blocks handed over in %.1f s, %ld went to the server to be refused\n", word, handed,
           spent / 1000, refused);
    assert_true(refused > 0);
    /* Tries after 75 to 100, 150 to 200, 300 to 400, and then every 600 to 2,000 ms; each with what two connections had
     * under way. */
    assert_true(refused <= (4 + (long)spent / 600) * 2 * (long)BLOCKS);
    assert_int_equal(info_of(b).num_refusing, 1);
    assert_int_equal(info_of(b).num_open, 0);
    mend(b);
    begin = kvft_now_ms();
    while (save_new(b, seed++) < BLOCKS) {
        assert_true(kvft_now_ms() - begin < KVFT_PATIENCE_MS);
        kvft_nap_ms(20);
    }
    printf("%s: saves again %.0f ms after it was mended\n", word, kvft_now_ms() - begin);
    assert_int_equal(info_of(b).num_refusing, 0);
}

static void say(bench *b, const char *command) {
    assert_string_equal(kvft_server_say(b->server, command), "+OK");
}

static void mend_memory(bench *b) {
    say(b, "CONFIG SET maxmemory 0");
}

static void test_oom(void **state) {
    bench *b = of(state);
    say(b, "CONFIG SET maxmemory-policy noeviction maxmemory 1");
    check_refusal(b, "OOM", mend_memory);
}

static void mend_role(bench *b) {
    say(b, "REPLICAOF NO ONE");
}

static void test_readonly(void **state) {
    bench *b = of(state);
    say(b, "REPLICAOF 127.0.0.1 1");
    check_refusal(b, "READONLY", mend_role);
}

static bool last_snapshot(bench *b, const char *status) {
    char *said = kvft_server_ask(b->server, "INFO persistence");
    const char *at = strstr(said, "rdb_last_bgsave_status:");
    bool yes = at != NULL && strncmp(at + 23, status, strlen(status)) == 0;
    free(said);
    return yes;
}

static void snapshot_until(bench *b, const char *status) {
    for (double begin = kvft_now_ms(); !last_snapshot(b, status); kvft_nap_ms(20)) {
        (void)kvft_server_say(b->server, "BGSAVE");
        assert_true(kvft_now_ms() - begin < KVFT_PATIENCE_MS);
    }
}

static void mend_snapshot(bench *b) {
    char path[192];
    snprintf(path, sizeof path, "%s/dump.rdb/x", b->server->dir);
    assert_int_equal(remove(path), 0);
    path[strlen(path) - 2] = '\0';
    assert_int_equal(remove(path), 0);
    snapshot_until(b, "ok");
}

/* A folder stands where the snapshot should: that stops root as well, which a read-only folder does not. */
static void test_misconf(void **state) {
    bench *b = of(state);
    char path[192];
    snprintf(path, sizeof path, "%s/dump.rdb", b->server->dir);
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(path, sizeof path, "%s/dump.rdb/x", b->server->dir);
    assert_int_equal(mkdir(path, 0700), 0);
    say(b, "CONFIG SET save \"3600 1\"");
    snapshot_until(b, "err");
    check_refusal(b, "MISCONF", mend_snapshot);
}

static void test_breaker_shows(void **state) {
    bench *b = of(state);
    say(b, "SAVE");
    assert_int_equal(info_of(b).num_open, 0);
    kvft_server_kill(b->server);
    do {
        assert_int_equal(load(b), 0);
    } while (b->kept->blocks[0].why != KVF_WHY_BREAKER);
    kvf_tier_info info = info_of(b);
    assert_int_equal(info.num_open + info.num_half_open, 1);
    assert_int_equal(info.reachable, 0);
    kvft_nap_ms(600); /* the longest that it stays open */
    assert_int_equal(info_of(b).num_half_open, 1);
    kvft_server_restart(b->server);
    double begin = kvft_now_ms();
    while (load(b) < BLOCKS) {
        assert_true(kvft_now_ms() - begin < KVFT_PATIENCE_MS);
        kvft_nap_ms(5);
    }
    info = info_of(b);
    assert_int_equal(info.num_open + info.num_half_open, 0);
    assert_int_equal(info.reachable, 1);
}

/* The server stands still for longer than loads and lookups put up with (stall_ms, 250): a save waits for it. Its look
 * whether somebody else has stored the blocks does not: that closes one connection, of the lookups. */
static void test_saves_are_patient(void **state) {
    bench *b = of(state);
    kvf_stats stats = {.struct_size = sizeof stats};
    assert_int_equal(save_new(b, 50), BLOCKS);
    kvft_prompt *p = kvft_prompt_new(b->space, 51, BLOCKS, PAYLOAD);
    kvft_server_signal(b->server, SIGSTOP);
    assert_int_equal(kvf_save(b->space, p->blocks, BLOCKS, NULL), BLOCKS);
    kvft_nap_ms(500);
    kvf_store_stats(b->store, &stats);
    uint64_t before = stats.disconnects;
    kvft_server_signal(b->server, SIGCONT);
    assert_int_equal(kvf_store_flush(b->store, NULL, KVF_MS(10000)), KVF_OK);
    kvf_store_stats(b->store, &stats);
    assert_in_range(before, 0, 1);
    assert_int_equal(stats.disconnects, before);
    assert_int_equal(stats.saved, 3 * BLOCKS);
    /* But not without end. */
    kvft_prompt *q = kvft_prompt_new(b->space, 52, BLOCKS, PAYLOAD);
    kvft_server_signal(b->server, SIGSTOP);
    assert_int_equal(kvf_save(b->space, q->blocks, BLOCKS, NULL), BLOCKS);
    assert_true(kvft_flush(b->store) > 0);
    kvf_store_stats(b->store, &stats);
    kvft_server_signal(b->server, SIGCONT);
    assert_true(stats.disconnects > before);
    kvft_prompt_free(q);
    kvft_prompt_free(p);
}

/* A batch with a deadline does not wait for a writer that has none to speak of (found by check-chaos). */
static void test_batch_beside_stuck_writer(void **state) {
    bench *b = of(state), patient = {.server = b->server};
    char url[256];
    snprintf(url, sizeof url, "%s?stall_ms=%d", b->server->tcp_url, KVFT_PATIENCE_MS); /* saves: four times as long */
    patient.store = kvft_store(url);
    patient.space = kvft_space(patient.store, "m", 16);
    kvf_queue *queue = NULL;
    kvf_error err = {0};
    kvf_completion done = {0};
    uint64_t ticket = 0;
    kvft_prompt *p = kvft_prompt_new(patient.space, 60, BLOCKS, PAYLOAD),
                *q = kvft_prompt_new(patient.space, 61, BLOCKS, PAYLOAD);
    assert_int_equal(kvf_queue_open(&queue, &err, patient.store, 1), KVF_OK);
    kvft_server_signal(b->server, SIGSTOP);
    assert_int_equal(kvf_save(patient.space, p->blocks, BLOCKS, NULL), BLOCKS);
    kvft_nap_ms(50);
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_SAVE,
                       .space = patient.space,
                       .blocks = q->blocks,
                       .num = BLOCKS,
                       .budget_us = KVF_MS(30)};
    double begin = kvft_now_ms();
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    while (kvf_reap(queue, &done, 1) == 0) {
        kvft_nap_ms(1);
    }
    double spent = kvft_now_ms() - begin;
    kvft_server_signal(b->server, SIGCONT);
    assert_int_equal(done.num_ok, 0);
    assert_true(spent < KVFT_PATIENCE_MS);
    kvf_queue_close(queue);
    kvft_prompt_free(q);
    kvft_prompt_free(p);
    kvf_space_close(patient.space);
    kvf_store_close(patient.store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_oom, start, stop),
        cmocka_unit_test_setup_teardown(test_readonly, start, stop),
        cmocka_unit_test_setup_teardown(test_misconf, start, stop),
        cmocka_unit_test_setup_teardown(test_breaker_shows, start, stop),
        cmocka_unit_test_setup_teardown(test_saves_are_patient, start, stop),
        cmocka_unit_test_setup_teardown(test_batch_beside_stuck_writer, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
