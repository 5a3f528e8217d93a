/* SPDX-License-Identifier: Apache-2.0
 *
 * A real Cluster of three shards: slots as the server counts them, loads and lookups over all shards, sessions and
 * administration, slots that move meanwhile, a shard that dies, and a replica that takes over.
 */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "redis/cluster/slots.h"
#include "support/cluster.h"
#include "support/kit.h"
#include "support/tiers.h"

#define BLOCKS  48u
#define PAYLOAD 20000u

static kvft_cluster *cluster;

static int start(void **state) {
    (void)state;
    kvft_server_use_acl(true); /* as the documented user, and no more than that */
    cluster = kvft_cluster_start(true);
    kvft_server_use_acl(false);
    return 0;
}

static int stop(void **state) {
    (void)state;
    kvft_cluster_stop(cluster);
    return 0;
}

#define NEEDS_CLUSTER()      \
    do {                     \
        (void)state;         \
        if (cluster == NULL) \
            skip();          \
    } while (0)

typedef struct bench {
    kvf_store *store;
    kvf_space *space;
    kvft_prompt *prompt;
} bench;

static bench open_bench(uint64_t seed) {
    bench b = {.store = kvft_store(cluster->url)};
    char model[32];
    snprintf(model, sizeof model, "m%llu", (unsigned long long)seed);
    b.space = kvft_space(b.store, model, 16);
    b.prompt = kvft_prompt_new(b.space, seed, BLOCKS, PAYLOAD);
    return b;
}

static void close_bench(bench *b) {
    kvft_prompt_free(b->prompt);
    kvf_space_close(b->space);
    kvf_store_close(b->store);
}

static size_t load(bench *b, uint64_t seed, uint32_t budget_ms) {
    kvft_prompt_poison(b->prompt);
    size_t run = kvf_load(b->space, b->prompt->blocks, BLOCKS, NULL, KVF_MS(budget_ms));
    assert_int_equal(kvft_prompt_wrong(b->prompt, seed, run), 0);
    if (run < BLOCKS) {
        printf("block %zu: %s\n", run, kvf_reason_name(b->prompt->blocks[run].why));
    }
    return run;
}

static kvf_stats stats_of(const bench *b) {
    kvf_stats stats = {.struct_size = sizeof stats};
    kvf_store_stats(b->store, &stats);
    return stats;
}

static void test_slots_as_the_server_counts(void **state) {
    NEEDS_CLUSTER();
    static const char *const keys[] = {"a",         "{}x", "foo{bar}baz", "foo{}{bar}", "{user1000}.following",
                                       "123456789", "x{y", "{a}{b}"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        char command[128], expected[32];
        snprintf(command, sizeof command, "CLUSTER KEYSLOT %s", keys[i]);
        snprintf(expected, sizeof expected, ":%u", kvfi_slot_of(keys[i], strlen(keys[i])));
        assert_string_equal(kvft_server_say(cluster->nodes[0], command), expected);
    }
}

static void test_all_shards(void **state) {
    NEEDS_CLUSTER();
    bench b = open_bench(1);
    for (int i = 0; i < KVFT_SHARDS; i++) {
        assert_string_equal(kvft_server_say(cluster->nodes[i], "CONFIG RESETSTAT"), "+OK");
    }
    kvft_save_all(b.space, b.store, b.prompt);
    assert_int_equal(load(&b, 1, 5000), BLOCKS);
    for (int i = 0; i < KVFT_SHARDS; i++) { /* each has some, and was asked for no other's */
        assert_string_not_equal(kvft_server_say(cluster->nodes[i], "DBSIZE"), ":0");
        kvft_await_said(cluster->nodes[i], "INFO errorstats", "errorstat_MOVED", 0);
    }
    kvf_stats before = stats_of(&b);
    bench fresh = {.store = kvft_store(cluster->url)};
    fresh.space = kvft_space(fresh.store, "m1", 16);
    size_t run = 0;
    assert_int_equal(kvf_match(fresh.space, &run, NULL, b.prompt->keys, BLOCKS, KVF_MS(5000)), KVF_OK);
    assert_int_equal(run, BLOCKS);
    kvf_stats after = stats_of(&fresh);
    assert_int_equal(after.lookup_round_trips, KVFT_SHARDS);
    assert_int_equal(before.disconnects, 0);
    kvf_space_close(fresh.space);
    kvf_store_close(fresh.store);
    close_bench(&b);
}

typedef struct mover {
    atomic_bool done;
    int from, to, src, dst;
} mover;

static void *move(void *arg) {
    mover *m = arg;
    kvft_cluster_move(cluster, m->from, m->to, m->src, m->dst);
    atomic_store(&m->done, true);
    return NULL;
}

/* Loads and saves go on while slots move there and back: nothing is lost, and not one byte is wrong. */
static void test_resharding(void **state) {
    NEEDS_CLUSTER();
    bench b = open_bench(2);
    kvft_save_all(b.space, b.store, b.prompt);
    unsigned loads = 0, short_ones = 0;
    for (int way = 0; way < 2; way++) {
        int first = kvft_cluster_first(0);
        mover m = {.from = first, .to = first + 1200, .src = way, .dst = 1 - way};
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, move, &m), 0);
        do {
            short_ones += load(&b, 2, 5000) < BLOCKS;
            loads++;
            uint64_t seed = 1000u + loads;
            kvft_prompt *other = kvft_prompt_new(b.space, seed, 8, 3000);
            kvft_save_all(b.space, b.store, other);
            kvft_prompt_poison(other);
            assert_int_equal(kvf_load(b.space, other->blocks, 8, NULL, KVF_MS(5000)), 8);
            assert_int_equal(kvft_prompt_wrong(other, seed, 8), 0);
            kvft_prompt_free(other);
        } while (!atomic_load(&m.done));
        pthread_join(thread, NULL);
    }
    printf("%u loads while 2400 slots moved, %u of them short\n", loads, short_ones);
    assert_int_equal(short_ones, 0);
    assert_int_equal(load(&b, 2, 5000), BLOCKS);
    close_bench(&b);
}

/* A slot stays half moved: keys that have moved are found by ASK. */
/* The documented rules are enough. */
static void test_minimal_acl(void **state) {
    NEEDS_CLUSTER();
    for (int i = 0; i < KVFT_SHARDS; i++) {
        assert_string_equal(
            kvft_server_say(cluster->nodes[i],
                            "ACL SETUSER least on >pw resetkeys ~kvf1:* -@all +ping +select +client|setname "
                            "+get +getrange +set +pexpire +unlink +cluster|slots +asking"),
            "+OK");
    }
    char url[256];
    snprintf(url, sizeof url, "redis+cluster://least:pw@%s", strchr(cluster->url, '@') + 1);
    kvf_store *store = kvft_store(url);
    kvf_space *space = kvft_space(store, "acl", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 9, BLOCKS, 3000);
    kvft_save_all(space, store, prompt);
    kvft_prompt_poison(prompt);
    assert_int_equal(kvf_load(space, prompt->blocks, BLOCKS, NULL, KVF_MS(5000)), BLOCKS);
    assert_int_equal(kvft_prompt_wrong(prompt, 9, BLOCKS), 0);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
}

static void count_finding(void *ctx, const kvf_finding *finding) {
    *(unsigned *)ctx += finding->severity == KVF_FATAL;
}

static void check_session(kvf_store *store, const char *id) {
    float keys[64], values[64];
    kvf_error err = {0};
    kvf_session *session = NULL;
    for (int i = 0; i < 64; i++) {
        keys[i] = (float)i;
        values[i] = (float)(i + (int)strlen(id));
    }
    kvf_tensor k = {.data = keys, .len = sizeof keys, .dtype = "float32", .num_dims = 1, .dims = {64}};
    kvf_tensor v = {.data = values, .len = sizeof values, .dtype = "float32", .num_dims = 1, .dims = {64}};
    if (kvf_session_save(store, &err, id, &k, &v, NULL) != KVF_OK ||
        kvf_session_load(store, &session, &err, id, KVF_MS(5000)) != KVF_OK) {
        fail_msg("%s: %s", id, err.what);
    }
    assert_memory_equal(session->k.data, keys, sizeof keys);
    assert_memory_equal(session->v.data, values, sizeof values);
    kvf_session_free(session);
    assert_int_equal(kvf_session_remove(store, &err, id), KVF_OK);
    assert_int_equal(kvf_session_load(store, &session, &err, id, KVF_MS(5000)), KVF_MISS);
}

static void test_doctor_and_sessions(void **state) {
    NEEDS_CLUSTER();
    kvf_store *store = kvft_store(cluster->url);
    kvf_error err = {0};
    unsigned fatal = 0;
    assert_int_equal(kvf_doctor(store, &err, count_finding, &fatal), KVF_OK);
    assert_int_equal(fatal, 0);
    kvf_tier_info info = {.struct_size = sizeof info};
    assert_int_equal(kvf_tier_info_get(store, &info, 0), KVF_OK);
    assert_true(info.reachable && info.used_bytes > 3000000); /* three empty servers have more than that */
    for (int i = 0; i < 20; i++) {
        char id[32];
        snprintf(id, sizeof id, i % 2 == 0 ? "talk-%d" : "{user%d}:talk", i);
        check_session(store, id);
    }
    kvf_store_close(store);
}

static void test_half_moved(void **state) {
    NEEDS_CLUSTER();
    bench b = open_bench(4);
    kvft_save_all(b.space, b.store, b.prompt);
    char key[160], command[400], hex[65];
    for (int i = 0; i < 32; i++) {
        snprintf(hex + 2 * i, 3, "%02x", b.prompt->keys[0].bytes[i]);
    }
    unsigned slot = kvfi_slot_of(hex, 64);
    int src = 0, dst = 0;
    while ((int)slot >= kvft_cluster_first(src + 1)) {
        src++;
    }
    dst = (src + 1) % KVFT_SHARDS;
    snprintf(command, sizeof command, "CLUSTER SETSLOT %u IMPORTING %s", slot, cluster->ids[src]);
    assert_string_equal(kvft_server_say(cluster->nodes[dst], command), "+OK");
    snprintf(command, sizeof command, "CLUSTER SETSLOT %u MIGRATING %s", slot, cluster->ids[dst]);
    assert_string_equal(kvft_server_say(cluster->nodes[src], command), "+OK");
    snprintf(command, sizeof command, "CLUSTER GETKEYSINSLOT %u 1", slot);
    char *said = kvft_server_ask(cluster->nodes[src], command);
    snprintf(key, sizeof key, "%.*s", (int)strcspn(said, "\n"), said);
    free(said);
    snprintf(command, sizeof command, "MIGRATE 127.0.0.1 %d %s 0 5000 REPLACE", cluster->nodes[dst]->port, key);
    assert_string_equal(kvft_server_say(cluster->nodes[src], command), "+OK");
    assert_int_equal(load(&b, 4, 5000), BLOCKS);
    bench fresh = {.store = kvft_store(cluster->url)};
    fresh.space = kvft_space(fresh.store, "m4", 16);
    size_t run = 0;
    assert_int_equal(kvf_match(fresh.space, &run, NULL, b.prompt->keys, BLOCKS, KVF_MS(5000)), KVF_OK);
    assert_int_equal(run, BLOCKS);
    kvft_prompt_fill(b.prompt, 4);
    kvft_save_all(fresh.space, fresh.store, b.prompt);
    kvf_space_close(fresh.space);
    kvf_store_close(fresh.store);
    kvft_cluster_move(cluster, (int)slot, (int)slot + 1, src, dst);
    assert_int_equal(load(&b, 4, 5000), BLOCKS);
    kvft_cluster_move(cluster, (int)slot, (int)slot + 1, dst, src);
    close_bench(&b);
}

typedef struct journey {
    int slot, src, dst;
} journey;

static void *move_late(void *arg) {
    const journey *m = arg;
    kvft_nap_ms(1500);
    kvft_cluster_move(cluster, m->slot, m->slot + 1, m->src, m->dst);
    return NULL;
}

/* A session whose slot is half moved: what has gone ahead is asked for there. */
static void test_session_half_moved(void **state) {
    NEEDS_CLUSTER();
    kvf_store *store = kvft_store(cluster->url);
    char command[400];
    unsigned slot = kvfi_slot_of("half", 4);
    int src = 0;
    while ((int)slot >= kvft_cluster_first(src + 1)) {
        src++;
    }
    int dst = (src + 1) % KVFT_SHARDS;
    check_session(store, "half");
    float keys[64] = {1}, values[64] = {2};
    kvf_tensor k = {.data = keys, .len = sizeof keys}, v = {.data = values, .len = sizeof values};
    kvf_session_options options = {.struct_size = sizeof options, .budget_us = KVF_MS(2000)};
    kvf_session *session = NULL;
    kvf_error err = {0};
    assert_int_equal(kvf_session_save(store, &err, "half", &k, &v, &options), KVF_OK);
    snprintf(command, sizeof command, "CLUSTER SETSLOT %u IMPORTING %s", slot, cluster->ids[src]);
    assert_string_equal(kvft_server_say(cluster->nodes[dst], command), "+OK");
    snprintf(command, sizeof command, "CLUSTER SETSLOT %u MIGRATING %s", slot, cluster->ids[dst]);
    assert_string_equal(kvft_server_say(cluster->nodes[src], command), "+OK");
    snprintf(command, sizeof command, "MIGRATE 127.0.0.1 %d half 0 5000 REPLACE", cluster->nodes[dst]->port);
    assert_string_equal(kvft_server_say(cluster->nodes[src], command), "+OK");
    double from = kvft_now_ms();
    if (kvf_session_load(store, &session, &err, "half", KVF_MS(2000)) != KVF_OK) {
        fail_msg("%s", err.what);
    }
    printf("a session behind ASK took %.0f ms\n", kvft_now_ms() - from);
    assert_int_equal(session->k.len, sizeof keys);
    assert_memory_equal(session->k.data, keys, sizeof keys);
    assert_memory_equal(session->v.data, values, sizeof values);
    kvf_session_free(session);
    assert_int_equal(kvf_session_remove(store, &err, "half"), KVF_OK);
    assert_int_equal(kvf_session_load(store, &session, &err, "half", KVF_MS(2000)), KVF_MISS);
    /* It can't be saved there before the slot has arrived; that is waited for, as long as the call may last. */
    from = kvft_now_ms();
    options.budget_us = KVF_MS(700);
    assert_int_equal(kvf_session_save(store, &err, "half", &k, &v, &options), KVF_IO);
    assert_in_range(kvft_now_ms() - from, 100, 1500);
    options.budget_us = KVF_MS(20000);
    from = kvft_now_ms();
    journey late = {.slot = (int)slot, .src = src, .dst = dst};
    pthread_t traveller;
    assert_int_equal(pthread_create(&traveller, NULL, move_late, &late), 0);
    kvf_status saved = kvf_session_save(store, &err, "half", &k, &v, &options);
    printf("a session saved to a slot on its way took %.0f ms\n", kvft_now_ms() - from);
    pthread_join(traveller, NULL);
    assert_int_equal(saved, KVF_OK);
    assert_true(kvft_now_ms() - from > 1400);
    assert_int_equal(kvf_session_remove(store, &err, "half"), KVF_OK);
    kvft_cluster_move(cluster, (int)slot, (int)slot + 1, dst, src);
    kvf_store_close(store);
}

static int count_entry(void *ctx, const kvf_entry *entry) {
    *(size_t *)ctx += entry->kind == KVF_ENTRY_BLOCK;
    return 0;
}

static void test_looking_after(void **state) {
    NEEDS_CLUSTER();
    bench b = open_bench(3);
    kvft_save_all(b.space, b.store, b.prompt);
    size_t seen = 0;
    uint64_t removed = 0;
    kvf_error err = {0};
    if (kvf_walk(b.store, &err, count_entry, &seen, NULL) != KVF_OK) {
        fail_msg("%s", err.what);
    }
    assert_true(seen >= BLOCKS);
    assert_int_equal(kvf_clear(b.store, &removed, &err, NULL), KVF_OK);
    assert_true(removed >= BLOCKS);
    assert_int_equal(load(&b, 3, 5000), 0);
    close_bench(&b);
}

/* One shard does not answer: the others' blocks load, and the request is in time. */
static size_t load_each(bench *b, uint64_t seed, double *longest_ms) {
    size_t hits = 0;
    kvft_prompt_poison(b->prompt);
    *longest_ms = 0;
    for (size_t i = 0; i < BLOCKS; i++) {
        double begin = kvft_now_ms();
        size_t run = kvf_load(b->space, &b->prompt->blocks[i], 1, NULL, KVF_MS(2 * KVFT_PATIENCE_MS));
        double spent = kvft_now_ms() - begin;
        *longest_ms = spent > *longest_ms ? spent : *longest_ms;
        hits += run;
        if (run == 0) {
            kvft_bytes(b->prompt->memory + i * PAYLOAD, PAYLOAD, seed * 1000003u + i);
        }
    }
    assert_int_equal(kvft_prompt_wrong(b->prompt, seed, BLOCKS), 0);
    return hits;
}

/* A shard that stands still costs a lookup one stall_ms, and only its own keys. */
static void test_standstill(void **state) {
    NEEDS_CLUSTER();
    bench b = open_bench(6);
    kvft_save_all(b.space, b.store, b.prompt);
    bench fresh = {.store = kvft_store(cluster->url)};
    fresh.space = kvft_space(fresh.store, "m6", 16);
    size_t run = 0, before = 0;
    assert_int_equal(kvf_match(fresh.space, &before, NULL, b.prompt->keys, 1, KVF_MS(5000)), KVF_OK);
    assert_int_equal(before, 1);
    kvft_server_signal(cluster->nodes[1], SIGSTOP);
    double begin = kvft_now_ms();
    kvf_status status =
        kvf_match(fresh.space, &run, NULL, b.prompt->keys + 1, BLOCKS - 1, KVF_MS(2 * KVFT_PATIENCE_MS));
    double spent = kvft_now_ms() - begin;
    kvft_server_signal(cluster->nodes[1], SIGCONT);
    assert_int_equal(status, KVF_OK);
    assert_true(run < BLOCKS - 1);
    printf("one shard stands still: a lookup of %u keys took %.0f ms\n", BLOCKS - 1, spent);
    assert_true(spent < KVFT_PATIENCE_MS);
    for (begin = kvft_now_ms(); load(&b, 6, 2000) < BLOCKS && kvft_now_ms() - begin < 10000;) {
        kvft_nap_ms(20);
    }
    assert_int_equal(load(&b, 6, 2000), BLOCKS);
    kvf_space_close(fresh.space);
    kvf_store_close(fresh.store);
    close_bench(&b);
}

/* A server of a Cluster is asked, too, what the user may do. */
static void test_a_missing_permission_is_told(void **state) {
    NEEDS_CLUSTER();
    kvfi_tier *tier = NULL;
    kvf_error err = {0};
    const char *tls = cluster->nodes[0]->cert[0] != '\0' ? "s" : "";
    for (int i = 0; i < 2 * KVFT_SHARDS; i++) {
        assert_string_equal(kvft_server_say(cluster->nodes[i], "ACL SETUSER timid on >secret ~kvf1:* +@all -set"),
                            "+OK");
    }
    assert_int_equal(
        kvft_try_tier(&tier, &err, "redis%s+cluster://timid:secret@127.0.0.1:%d", tls, cluster->nodes[0]->port),
        KVF_CONFIG);
    assert_non_null(strstr(err.what, "lacks a permission"));
}

static void test_death_and_failover(void **state) {
    NEEDS_CLUSTER();
    bench b = open_bench(5);
    kvft_save_all(b.space, b.store, b.prompt);
    kvft_await_replicas(cluster->nodes[0]);
    kvft_cluster_be_quick(cluster);
    double longest = 0;
    kvft_server_kill(cluster->nodes[0]);
    size_t hits = load_each(&b, 5, &longest);
    printf("one shard of three dead: %zu of %u blocks, the longest load %.0f ms\n", hits, BLOCKS, longest);
    assert_true(hits >= BLOCKS / 3 && hits < BLOCKS);
    assert_true(longest < KVFT_PATIENCE_MS); /* half its budget */
    double begin = kvft_now_ms();
    size_t run = 0;
    while (run < BLOCKS && kvft_now_ms() - begin < 20000) {
        run = load(&b, 5, 1000);
        kvft_nap_ms(20);
    }
    printf("whole again after %.0f ms\n", kvft_now_ms() - begin);
    assert_int_equal(run, BLOCKS);
    kvft_server_restart(cluster->nodes[0]); /* comes back as a replica */
    for (begin = kvft_now_ms(); kvft_now_ms() - begin < 1500;) {
        assert_int_equal(load(&b, 5, 5000), BLOCKS);
    }
    close_bench(&b);
}

static void log_line(void *ctx, kvf_log_level level, const char *line) {
    (void)level;
    (void)ctx;
    fprintf(stderr, "%s\n", line);
}

int main(void) {
    if (getenv("KVFT_LOG") != NULL) {
        kvf_set_log(log_line, NULL, KVF_LOG_INFO);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_slots_as_the_server_counts),
        cmocka_unit_test(test_all_shards),
        cmocka_unit_test(test_resharding),
        cmocka_unit_test(test_minimal_acl),
        cmocka_unit_test(test_doctor_and_sessions),
        cmocka_unit_test(test_half_moved),
        cmocka_unit_test(test_session_half_moved),
        cmocka_unit_test(test_looking_after),
        cmocka_unit_test(test_standstill),
        cmocka_unit_test(test_a_missing_permission_is_told),
        cmocka_unit_test(test_death_and_failover),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
