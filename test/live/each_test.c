/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls that answer for each of many blocks, on a real server and on a Cluster: matches and loads with gaps, what is
 * forgotten because the server has lost it, renewals and removals.
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

/* ---- touch and remove ---- */

/* The milliseconds that a part has left. */
static long ttl_of(const bench *b, const char *url, size_t block, uint64_t part) {
    char command[512];
    kvfi_name name = name_of(b, block, part);
    snprintf(command, sizeof command, "PTTL %s", name.text);
    return strtol(kvft_server_say(server_of(b, url, block), command) + 1, NULL, 10);
}

static void shorten(const bench *b, const char *url, size_t block, uint64_t part) {
    char command[512];
    kvfi_name name = name_of(b, block, part);
    snprintf(command, sizeof command, "PEXPIRE %s 900000", name.text);
    assert_string_equal(kvft_server_say(server_of(b, url, block), command), ":1");
}

static void check_blocks(const bench *b) {
    for (size_t i = 0; i < BLOCKS; i++) {
        assert_int_equal(b->prompt->blocks[i].status, is_lost(i) ? KVF_MISS : KVF_OK);
        assert_int_equal(b->prompt->blocks[i].why, is_lost(i) ? KVF_WHY_ABSENT : KVF_WHY_NONE);
    }
}

/* Blocks of `parts` parts, all of whose keys are renewed and removed; some blocks are gone before. */
static void touch_and_remove(const char *base, uint64_t seed, size_t payload_bytes, uint64_t parts) {
    char url[256];
    snprintf(url, sizeof url, "%s?part=64K", base);
    bench b = open_bench(kvft_store(url), seed, payload_bytes);
    kvft_save_all(b.space, b.store, b.prompt);
    size_t lost = lose_some(&b, base);
    for (size_t i = 0; i < BLOCKS; i++) {
        for (uint64_t part = is_lost(i); part < parts; part++) {
            shorten(&b, base, i, part);
        }
    }
    assert_int_equal(run(&b, KVF_OP_TOUCH, 0, NULL), BLOCKS - lost);
    check_blocks(&b);
    for (size_t i = 0; i < BLOCKS; i++) {
        assert_int_equal(kvf_knows(b.space, &b.prompt->keys[i]), !is_lost(i));
        for (uint64_t part = 0; part < parts && !is_lost(i); part++) {
            assert_in_range(ttl_of(&b, base, i, part), 3000000, 4000000);
        }
    }
    kvft_prompt_poison(b.prompt);
    assert_int_equal(run(&b, KVF_OP_LOAD, KVF_EACH, NULL), BLOCKS - lost); /* nothing else has changed */
    assert_int_equal(kvft_prompt_wrong(b.prompt, seed, BLOCKS), lost);
    assert_int_equal(run(&b, KVF_OP_REMOVE, 0, NULL), BLOCKS - lost);
    check_blocks(&b);
    for (size_t i = 0; i < BLOCKS; i++) {
        for (uint64_t part = 0; part < parts; part++) {
            assert_int_equal(ttl_of(&b, base, i, part), -2);
        }
        assert_false(kvf_knows(b.space, &b.prompt->keys[i]));
    }
    assert_int_equal(run(&b, KVF_OP_REMOVE, 0, NULL), 0);
    assert_int_equal(run(&b, KVF_OP_TOUCH, 0, NULL), 0);
    kvft_prompt_fill(b.prompt, seed);
    kvft_save_all(b.space, b.store, b.prompt); /* they are no longer known */
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, BLOCKS, NULL, KVF_DEFAULT), BLOCKS);
    close_bench(&b);
}

static void test_touch_and_remove(void **state) {
    NEEDS_SERVERS();
    touch_and_remove(server->unix_url, 10, PAYLOAD, 1);
    touch_and_remove(server->tcp_url, 11, 120000, 2);
    touch_and_remove(server->tcp_url, 12, 600000, 10);
    touch_and_remove(cluster->url, 13, PAYLOAD, 1);
    touch_and_remove(cluster->url, 14, 300000, 5);
}

/* Of a record that has lost a part the others are removed all the same. */
static void test_a_part_that_is_gone(void **state) {
    NEEDS_SERVERS();
    char url[256];
    snprintf(url, sizeof url, "%s?part=64K", server->unix_url);
    bench b = open_bench(kvft_store(url), 15, 400000);
    kvft_save_all(b.space, b.store, b.prompt);
    kvfi_name first = name_of(&b, 3, 0), middle = name_of(&b, 4, 1), last = name_of(&b, 5, 6);
    say(server, ":1", "DEL", &first);
    say(server, ":1", "DEL", &middle);
    say(server, ":1", "DEL", &last);
    assert_int_equal(run(&b, KVF_OP_TOUCH, 0, NULL), BLOCKS - 3); /* what can't be loaded is not there */
    for (size_t i = 0; i < BLOCKS; i++) {
        assert_int_equal(b.prompt->blocks[i].status, i >= 3 && i <= 5 ? KVF_MISS : KVF_OK);
    }
    assert_int_equal(run(&b, KVF_OP_REMOVE, 0, NULL), BLOCKS - 1);
    for (size_t i = 0; i < BLOCKS; i++) {
        for (uint64_t part = 0; part < 7; part++) { /* the parts behind the gap too */
            assert_int_equal(ttl_of(&b, server->unix_url, i, part), -2);
        }
    }
    close_bench(&b);
}

/* Without a time to live a touch makes a block the last to be evicted, and gives it none. */
static void test_a_touch_without_a_time_to_live(void **state) {
    NEEDS_SERVERS();
    char url[256], command[512];
    snprintf(url, sizeof url, "%s?ttl=0&part=64K", server->unix_url);
    assert_string_equal(kvft_server_say(server, "CONFIG SET maxmemory-policy allkeys-lru"), "+OK");
    bench b = open_bench(kvft_store(url), 16, 100000);
    kvft_save_all(b.space, b.store, b.prompt);
    long idle = 0;
    while (idle < 1) { /* the server counts in seconds */
        kvft_nap_ms(100);
        kvfi_name name = name_of(&b, 2, 1);
        snprintf(command, sizeof command, "OBJECT IDLETIME %s", name.text);
        idle = strtol(kvft_server_say(server, command) + 1, NULL, 10);
    }
    assert_int_equal(run(&b, KVF_OP_TOUCH, 0, NULL), BLOCKS);
    for (uint64_t part = 0; part < 2; part++) {
        kvfi_name name = name_of(&b, 2, part);
        say(server, ":0", "OBJECT IDLETIME", &name);
        assert_int_equal(ttl_of(&b, server->unix_url, 2, part), -1);
    }
    assert_int_equal(run(&b, KVF_OP_REMOVE, 0, NULL), BLOCKS);
    close_bench(&b);
}

/* All tiers are reached. Where one can't be, the block may still be there, and the answer says so. */
static void test_all_tiers(void **state) {
    NEEDS_SERVERS();
    kvft_server *own = kvft_server_start(NULL);
    bench b = open_bench(kvft_store2("mem:", own->unix_url), 17, PAYLOAD);
    kvft_save_all(b.space, b.store, b.prompt);
    size_t lost = 0;
    for (size_t i = 0; i < BLOCKS; i++) {
        kvfi_name name = name_of(&b, i, 0);
        if (is_lost(i)) {
            say(own, ":1", "DEL", &name);
            lost++;
        }
    }
    assert_int_equal(run(&b, KVF_OP_TOUCH, 0, NULL), BLOCKS); /* memory has them all */
    for (size_t i = 0; i < BLOCKS; i++) {
        assert_int_equal(kvf_knows(b.space, &b.prompt->keys[i]), !is_lost(i)); /* what lasts does not */
    }
    kvft_server_kill(own);
    assert_int_equal(run(&b, KVF_OP_REMOVE, 0, NULL), 0);
    assert_int_equal(b.prompt->blocks[0].status, KVF_MISS);
    assert_int_not_equal(b.prompt->blocks[0].why, KVF_WHY_ABSENT);
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, BLOCKS, NULL, KVF_MS(500)),
                     0); /* the memory tier has none now */
    assert_true(lost > 0);
    close_bench(&b);
    kvft_server_stop(own);
}

/* A replica refuses, and a user without the permission: the reason says so, and nothing is told as removed. */
static void test_a_server_that_refuses(void **state) {
    NEEDS_SERVERS();
    kvft_server *own = kvft_server_start(NULL);
    bench b = open_bench(kvft_store(own->unix_url), 18, PAYLOAD);
    kvft_save_all(b.space, b.store, b.prompt);
    char command[128];
    snprintf(command, sizeof command, "REPLICAOF 127.0.0.1 %d",
             own->port); /* of itself: it is read-only, and no more */
    assert_string_equal(kvft_server_say(own, command), "+OK");
    const kvf_op ops[] = {KVF_OP_REMOVE, KVF_OP_TOUCH};
    for (size_t op = 0; op < 2; op++) {
        assert_int_equal(run(&b, ops[op], 0, NULL), 0);
        for (size_t i = 0; i < BLOCKS; i++) {
            assert_int_equal(b.prompt->blocks[i].status, KVF_MISS);
            assert_int_equal(b.prompt->blocks[i].why, KVF_WHY_SERVER);
        }
    }
    assert_string_equal(kvft_server_say(own, "REPLICAOF NO ONE"), "+OK");
    assert_int_equal(run(&b, KVF_OP_TOUCH, 0, NULL), BLOCKS);
    assert_int_equal(run(&b, KVF_OP_REMOVE, 0, NULL), BLOCKS);
    close_bench(&b);
    kvft_server_stop(own);
}

/* Under a previous secret, too. */
static void test_sealed_under_a_previous_secret(void **state) {
    NEEDS_SERVERS();
    static const char before[] = "the secret of yesterday", today[] = "the secret of today";
    bench b = open_bench(kvft_store(server->unix_url), 19, PAYLOAD);
    kvf_space *old = kvft_sealed_space(b.store, "s", 16, before);
    kvft_prompt *prompt = kvft_prompt_new(old, 19, BLOCKS, PAYLOAD);
    kvft_save_all(old, b.store, prompt);
    const kvf_field fields[] = {{"engine", "test"}, {"model", "s"}, {"kv", "f16"}};
    kvf_space_options options = {.struct_size = sizeof options,
                                 .block_tokens = 16,
                                 .secret = today,
                                 .secret_len = sizeof today - 1,
                                 .previous_secret = before,
                                 .previous_secret_len = sizeof before - 1};
    kvf_space *space = NULL;
    assert_int_equal(kvf_space_open(&space, NULL, b.store, fields, 3, &options), KVF_OK);
    bench both = {.store = b.store, .space = space, .prompt = prompt, .queue = b.queue};
    assert_int_equal(run(&both, KVF_OP_TOUCH, 0, NULL), BLOCKS);
    assert_int_equal(run(&both, KVF_OP_REMOVE, 0, NULL), BLOCKS);
    assert_int_equal(run(&both, KVF_OP_MATCH, KVF_EACH, NULL), 0);
    kvf_space_close(space);
    kvf_space_close(old);
    kvft_prompt_free(prompt);
    close_bench(&b);
}

/* Slots move to another shard while their blocks are renewed and removed. */
static void test_half_moved(void **state) {
    NEEDS_SERVERS();
    bench b = open_bench(kvft_store(cluster->url), 20, PAYLOAD);
    kvft_save_all(b.space, b.store, b.prompt);
    kvft_cluster_move(cluster, 0, kvft_cluster_first(1) / 2, 0, 1);
    assert_int_equal(run(&b, KVF_OP_TOUCH, 0, NULL), BLOCKS); /* MOVED */
    kvft_cluster_move(cluster, 0, kvft_cluster_first(1) / 2, 1, 0);
    assert_int_equal(run(&b, KVF_OP_REMOVE, 0, NULL), BLOCKS);
    assert_int_equal(run(&b, KVF_OP_MATCH, KVF_EACH, NULL), 0);
    close_bench(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gaps_end_nothing),
        cmocka_unit_test(test_what_the_server_lost_is_saved_again),
        cmocka_unit_test(test_a_block_that_lost_a_part_is_saved_again),
        cmocka_unit_test(test_touch_and_remove),
        cmocka_unit_test(test_a_part_that_is_gone),
        cmocka_unit_test(test_a_touch_without_a_time_to_live),
        cmocka_unit_test(test_all_tiers),
        cmocka_unit_test(test_a_server_that_refuses),
        cmocka_unit_test(test_sealed_under_a_previous_secret),
        cmocka_unit_test(test_half_moved),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
