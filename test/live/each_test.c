/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls that answer for each of many blocks, on a real server and on a Cluster: matches and loads with gaps, and what
 * is forgotten because the server has lost it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <poll.h>

#include <cmocka.h>

#include "redis/cluster/key.h"
#include "support/cluster.h"
#include "support/kit.h"

#define BLOCKS  40u
#define PAYLOAD 20000u

static kvft_server *server;
static kvft_cluster *cluster;

static int start(void **state) {
    (void)state;
    kvft_server_use_acl(true); /* as the documented user, and no more than that */
    server = kvft_server_start(NULL);
    cluster = kvft_cluster_start(false);
    kvft_server_use_acl(false);
    return 0;
}

static int stop(void **state) {
    (void)state;
    kvft_server_stop(server);
    kvft_cluster_stop(cluster);
    return 0;
}

#define NEEDS_SERVERS()     \
    do {                    \
        (void)state;        \
        if (server == NULL) \
            skip();         \
    } while (0)

typedef struct bench {
    kvf_store *store;
    kvf_space *space;
    kvft_prompt *prompt;
    kvf_queue *queue;
} bench;

static bench open_bench(kvf_store *store, uint64_t seed, size_t payload_bytes) {
    bench b = {.store = store};
    char model[32];
    snprintf(model, sizeof model, "m%llu", (unsigned long long)seed);
    b.space = kvft_space(b.store, model, 16);
    b.prompt = kvft_prompt_new(b.space, seed, BLOCKS, payload_bytes);
    assert_int_equal(kvf_queue_open(&b.queue, NULL, b.store, 4), KVF_OK);
    return b;
}

static void close_bench(bench *b) {
    kvf_queue_close(b->queue);
    kvft_prompt_free(b->prompt);
    kvf_space_close(b->space);
    kvf_store_close(b->store);
}

static kvf_stats stats_of(const bench *b) {
    kvf_stats stats = {.struct_size = sizeof stats};
    (void)kvf_store_stats(b->store, &stats);
    return stats;
}

static size_t run(const bench *b, kvf_op op, uint32_t flags, kvf_found *found) {
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = op,
                       .flags = flags,
                       .space = b->space,
                       .blocks = b->prompt->blocks,
                       .num = BLOCKS,
                       .found = found};
    kvf_completion done = {0};
    uint64_t ticket = 0;
    assert_int_equal(kvf_submit(b->queue, &ticket, &batch), KVF_OK);
    while (kvf_reap(b->queue, &done, 1) == 0) {
        struct pollfd fd = {.fd = kvf_queue_fd(b->queue), .events = POLLIN};
        assert_int_equal(poll(&fd, 1, KVFT_PATIENCE_MS), 1);
    }
    return done.num_ok;
}

/* A part of the block, as the server names it. */
static kvfi_name name_of(const bench *b, size_t block, uint64_t part) {
    kvfi_name name;
    kvfi_addr addr = {.key = b->prompt->keys[block]};
    kvf_space_digest(b->space, &addr.space);
    kvfi_name_of(&name, "kvf1", &addr, part);
    return name;
}

static void say(kvft_server *to, const char *expected, const char *verb, const kvfi_name *name) {
    char command[512];
    snprintf(command, sizeof command, "%s %s", verb, name->text);
    const char *got = kvft_server_say(to, command);
    if (strcmp(got, expected) != 0) {
        fail_msg("%s: %s, not %s", command, got, expected);
    }
}

/* The server that has the block. */
static kvft_server *server_of(const bench *b, const char *url, size_t block) {
    if (cluster == NULL || url != cluster->url) {
        return server;
    }
    kvfi_addr addr = {.key = b->prompt->keys[block]};
    int slot = kvfi_addr_slot(&addr), shard = 0;
    while (shard + 1 < KVFT_SHARDS && slot >= kvft_cluster_first(shard + 1)) {
        shard++;
    }
    return cluster->nodes[shard];
}

/* Another client deletes blocks, the first among them. */
static bool is_lost(size_t block) {
    return block % 7 == 0;
}

static size_t lose_some(const bench *b, const char *url) {
    size_t num = 0;
    for (size_t i = 0; i < BLOCKS; i++) {
        if (is_lost(i)) {
            kvfi_name name = name_of(b, i, 0);
            say(server_of(b, url, i), ":1", "DEL", &name);
            num++;
        }
    }
    return num;
}

/* ---- gaps ---- */

static void gaps(const char *url, uint64_t max_trips) {
    bench b = open_bench(kvft_store(url), 1, PAYLOAD);
    kvf_found found[BLOCKS];
    kvft_save_all(b.space, b.store, b.prompt);
    size_t lost = lose_some(&b, url);
    uint64_t trips = stats_of(&b).lookup_round_trips;
    assert_int_equal(run(&b, KVF_OP_MATCH, 0, found), 0);
    trips = stats_of(&b).lookup_round_trips - trips;
    assert_true(trips >= 1 && trips <= max_trips);
    assert_int_equal(run(&b, KVF_OP_MATCH, KVF_EACH, found), BLOCKS - lost);
    for (size_t i = 0; i < BLOCKS; i++) {
        assert_int_equal(found[i].why, is_lost(i) ? KVF_WHY_ABSENT : KVF_WHY_NONE);
        assert_int_equal(found[i].payload_bytes, is_lost(i) ? 0 : PAYLOAD);
    }
    kvft_prompt_poison(b.prompt);
    assert_int_equal(run(&b, KVF_OP_LOAD, KVF_EACH, NULL), BLOCKS - lost);
    assert_int_equal(kvft_prompt_wrong(b.prompt, 1, BLOCKS), lost);
    for (size_t i = 0; i < BLOCKS; i++) {
        assert_int_equal(b.prompt->blocks[i].status, is_lost(i) ? KVF_MISS : KVF_OK);
        assert_int_equal(b.prompt->blocks[i].why, is_lost(i) ? KVF_WHY_ABSENT : KVF_WHY_NONE);
    }
    assert_int_equal(run(&b, KVF_OP_LOAD, 0, NULL), 0);
    close_bench(&b);
}

static void test_gaps_end_nothing(void **state) {
    NEEDS_SERVERS();
    gaps(server->unix_url, 1);
    gaps(cluster->url, KVFT_SHARDS);
}

/* ---- forget: one process matches and loads, another one saves ---- */

static void test_what_the_server_lost_is_saved_again(void **state) {
    NEEDS_SERVERS();
    bench saver = open_bench(kvft_store(server->unix_url), 2, PAYLOAD);
    kvft_save_all(saver.space, saver.store, saver.prompt);
    size_t lost = lose_some(&saver, server->unix_url);
    kvft_save_all(saver.space, saver.store, saver.prompt); /* all are known, so nothing is written */
    assert_int_equal(stats_of(&saver).saved, BLOCKS);
    bench other = open_bench(kvft_store(server->unix_url), 2, PAYLOAD);
    kvf_found found[BLOCKS];
    kvf_key gone[BLOCKS];
    size_t num = 0;
    assert_int_equal(run(&other, KVF_OP_MATCH, KVF_EACH, found), BLOCKS - lost);
    for (size_t i = 0; i < BLOCKS; i++) {
        if (found[i].why != KVF_WHY_NONE) {
            gone[num++] = other.prompt->keys[i];
        }
    }
    assert_int_equal(num, lost);
    kvf_forget(saver.space, gone, num);
    kvft_save_all(saver.space, saver.store, saver.prompt);
    assert_int_equal(stats_of(&saver).saved, BLOCKS + lost);
    kvft_prompt_poison(other.prompt);
    assert_int_equal(kvf_load(other.space, other.prompt->blocks, BLOCKS, NULL, KVF_DEFAULT), BLOCKS);
    assert_int_equal(kvft_prompt_wrong(other.prompt, 2, BLOCKS), 0);
    close_bench(&other);
    close_bench(&saver);
}

/* The server evicted a part of a block whose head it has: a look at the head would say that it is stored. */
static void test_a_block_that_lost_a_part_is_saved_again(void **state) {
    NEEDS_SERVERS();
    char url[256];
    snprintf(url, sizeof url, "%s?part=64K", server->unix_url);
    bench b = open_bench(kvft_store(url), 3, 200000);
    kvft_save_all(b.space, b.store, b.prompt);
    kvfi_name name = name_of(&b, 5, 2);
    say(server, ":1", "DEL", &name);
    kvf_forget(b.space, b.prompt->keys, BLOCKS);
    kvft_save_all(b.space, b.store, b.prompt);
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, BLOCKS, NULL, KVF_DEFAULT), BLOCKS);
    close_bench(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gaps_end_nothing),
        cmocka_unit_test(test_what_the_server_lost_is_saved_again),
        cmocka_unit_test(test_a_block_that_lost_a_part_is_saved_again),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
