/* SPDX-License-Identifier: Apache-2.0
 *
 * Twenty public issues of servers and clients that move large values: each is a test of how kvferry behaves. A name
 * ends in the number of its issue.
 *
 *    1 redis#4496     big_reads_do_not_evict_4496           11 redis#13122    cluster_test, check-cluster
 *    2 redis#11830    memory_can_be_filled_11830            12 redis#584      a_failed_snapshot_584
 *    3 redis#3423     query_buffers_are_bounded_3423        13 hiredis#656    a_large_body_in_small_pieces_656
 *    4 redis#6646     many_writers_of_2_5_mb_6646           14 hiredis#306    a_late_reply_306
 *    5 redis#11667    a_replica_keeps_up_11667              15 hiredis#593    deadlines_hold_after_a_reconnect_593
 *    6 redis#3257     parts_fit_a_size_class_3257           16 hiredis#1357   redis_open_test: lies, lies_about_lengths
 *    7 redis#9926     no_multi_over_maxmemory_9926          17 redis-rs#1955  large_values_both_ways_1955
 *    8 redis#2385     loopback_is_no_trap_2385              18 redis-py#2624  a_cancelled_load_2624
 *    9 redis#8696     eviction_fails_no_master_8696         19 LMCache#1467   ranks_agree_1467
 *   10 redis#12266    moved_without_a_host_12266            20 LMCache#4991   a_torn_save_is_not_seen_4991
 */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "redis/blocks/blocks.h"
#include "support/cluster.h"
#include "support/kit.h"
#include "support/server.h"
#include "support/tiers.h"

#define MIB ((size_t)1 << 20)

static kvft_server *server;

static kvfi_tier *open_tier(const char *params) {
    char text[300];
    snprintf(text, sizeof text, "%s?%s", server->unix_url, params);
    return kvft_tier(text);
}

static void say_to(kvft_server *to, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say_to(kvft_server *to, const char *format, ...) {
    char command[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    const char *got = kvft_server_say(to, command);
    if (got[0] == '-' || got[0] == '\0') {
        fail_msg("%s: %s", command, got);
    }
}

static unsigned long long info_of(kvft_server *from, const char *section, const char *name) {
    char command[64], field[64];
    snprintf(command, sizeof command, "INFO %s", section);
    snprintf(field, sizeof field, "\n%s:", name);
    char *text = kvft_server_ask(from, command);
    const char *at = strstr(text, field);
    unsigned long long value = at != NULL ? strtoull(at + strlen(field), NULL, 10) : 0;
    free(text);
    return value;
}

static bool has_jemalloc(void) {
    char *text = kvft_server_ask(server, "INFO memory");
    bool yes = strstr(text, "mem_allocator:jemalloc") != NULL;
    free(text);
    return yes;
}

static int64_t ms_since(int64_t from_us) {
    return (kvfi_sys->now_us() - from_us) / 1000;
}

/* ---- many values at once, by any number of threads ---- */

typedef struct batch {
    kvfi_tier *tier;
    kvft_value *values;
    kvfi_item *items;
    uint64_t *sums; /* of the bytes that each is to have */
    size_t num;
    kvfi_feed feed;
    bool put;
} batch;

static uint64_t sum_of(const kvfi_item *item) {
    uint64_t sum = item->bytes;
    for (size_t i = 0; i < item->num_iov; i++) {
        const uint8_t *bytes = item->iov[i].iov_base;
        for (size_t k = 0; k < item->iov[i].iov_len; k++) {
            sum = sum * 31 + bytes[k];
        }
    }
    return sum;
}

static batch batch_new(kvfi_tier *tier, uint64_t seed, size_t num, size_t bytes) {
    batch b = {.tier = tier,
               .num = num,
               .values = calloc(num, sizeof *b.values),
               .items = calloc(num, sizeof *b.items),
               .sums = calloc(num, sizeof *b.sums)};
    assert_true(b.values != NULL && b.items != NULL && b.sums != NULL);
    for (size_t i = 0; i < num; i++) {
        kvft_value_init(&b.values[i], seed + i, bytes);
        b.items[i] = b.values[i].item;
        b.sums[i] = sum_of(&b.items[i]);
    }
    return b;
}

static void batch_free(batch *b) {
    for (size_t i = 0; i < b->num; i++) {
        kvft_value_cleanup(&b->values[i]);
    }
    free(b->values);
    free(b->items);
    free(b->sums);
}

static void batch_ready(batch *b, bool put, int64_t budget_us) {
    for (size_t i = 0; i < b->num; i++) {
        b->items[i].status = KVF_AGAIN;
        if (!put) {
            for (size_t k = 0; k < b->items[i].num_iov; k++) {
                memset(b->items[i].iov[k].iov_base, 0xa5, b->items[i].iov[k].iov_len);
            }
        }
    }
    b->put = put;
    b->feed = (kvfi_feed){.items = b->items, .num = b->num, .limit = b->num, .deadline_us = kvfi_deadline(budget_us)};
}

static void *batch_run(void *arg) {
    batch *b = arg;
    (b->put ? b->tier->ops->put : b->tier->ops->get)(b->tier, &b->feed);
    return NULL;
}

/* How many there are. All of those have the right bytes. */
static size_t batch_ok(const batch *b) {
    size_t ok = 0;
    for (size_t i = 0; i < b->num; i++) {
        if (b->items[i].status == KVF_OK) {
            assert_true(b->put || sum_of(&b->items[i]) == b->sums[i]);
            ok++;
        }
    }
    return ok;
}

static size_t batch_go(batch *b, bool put) {
    batch_ready(b, put, 30000000);
    (void)batch_run(b);
    return batch_ok(b);
}

/* ---- memory ---- */

/* What a client does that asks for all at once and reads slowly: the server evicts for its answers. */
static void read_blindly(uint64_t seed, size_t num) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, server->socket);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&address, sizeof address), 0);
    for (size_t i = 0; i < num; i++) {
        char command[256];
        size_t len = (size_t)snprintf(command, sizeof command, "GET %s\r\n", kvft_redis_key(seed + i, 0));
        assert_int_equal(send(fd, command, len, MSG_NOSIGNAL), (ssize_t)len);
    }
    usleep(300000);
    close(fd);
}

/* Reads count as memory. We ask for a window at a time, so loading all there is evicts nothing; the same keys asked for
 * at once do evict. */
static void big_reads_do_not_evict_4496(void **state) {
    (void)state;
    enum { NUM = 64 };
    kvfi_tier *tier = open_tier("conns=1");
    batch b = batch_new(tier, 1000, NUM, MIB - 5000);
    assert_int_equal(batch_go(&b, true), NUM);
    tier->ops->close(tier); /* with the buffers of its store lane */
    kvft_await_said(server, "CLIENT LIST", "name=kvferry", 0);
    b.tier = tier = open_tier("conns=1");
    say_to(server, "CONFIG SET maxmemory %llu", info_of(server, "memory", "used_memory") + 6 * MIB);
    unsigned long long before = info_of(server, "stats", "evicted_keys");
    for (int round = 0; round < 5; round++) {
        assert_int_equal(batch_go(&b, false), NUM);
    }
    assert_int_equal(info_of(server, "stats", "evicted_keys"), before);
    read_blindly(1000, NUM);
    if (has_jemalloc()) { /* Redis 7. Valkey 9 sends large values from where they lie, and needs no memory for that */
        assert_true(info_of(server, "stats", "evicted_keys") > before);
    }
    batch_free(&b);
    tier->ops->close(tier);
}

/* Spare query buffers are counted, too: with values near the bound, a server said OOM when it was half empty. Ours are
 * small against it. */
static void memory_can_be_filled_11830(void **state) {
    (void)state;
    enum { MAX_MIB = 96 };
    kvfi_tier *tier = open_tier("");
    say_to(server, "CONFIG SET maxmemory-policy noeviction");
    say_to(server, "CONFIG SET maxmemory %d", MAX_MIB << 20);
    size_t stored = 0;
    while (stored < MAX_MIB && kvft_put(tier, 2000 + stored, MIB - 5000) == KVF_WHY_NONE) {
        stored++;
    }
    assert_in_range(stored, MAX_MIB * 8 / 10, MAX_MIB - 1);
    assert_int_equal(kvft_get(tier, 2000, MIB - 5000), KVF_WHY_NONE);
    assert_int_equal(tier->disconnects, 0);
    tier->ops->close(tier);
}

typedef struct watcher {
    atomic_bool ending;
    unsigned long long most_buffers, most_memory;
} watcher;

/* The query buffers of all clients of our name, and the memory of the server, at their largest. */
static void *watch(void *arg) {
    watcher *w = arg;
    while (!w->ending) {
        unsigned long long sum = 0;
        char *list = kvft_server_ask(server, "CLIENT LIST");
        for (const char *at = list; (at = strstr(at, "name=kvferry")) != NULL; at++) {
            const char *used = strstr(at, "qbuf="), *spare = strstr(at, "qbuf-free=");
            sum += (used != NULL ? strtoull(used + 5, NULL, 10) : 0) +
                   (spare != NULL ? strtoull(spare + 10, NULL, 10) : 0);
        }
        free(list);
        w->most_buffers = sum > w->most_buffers ? sum : w->most_buffers;
        usleep(2000);
    }
    w->most_memory = info_of(server, "memory", "used_memory_peak");
    return NULL;
}

/* Query buffers are not held down by maxmemory, so we hold them down: at most two values for each connection that
 * stores. */
static void query_buffers_are_bounded_3423(void **state) {
    (void)state;
    enum { NUM = 40 };
    watcher w = {.ending = false};
    pthread_t thread;
    kvfi_tier *tier = open_tier("conns=1");
    batch b = batch_new(tier, 3000, NUM, 4 * MIB - 5000);
    assert_int_equal(pthread_create(&thread, NULL, watch, &w), 0);
    assert_int_equal(batch_go(&b, true), NUM);
    w.ending = true;
    pthread_join(thread, NULL);
    assert_in_range(w.most_buffers, 1 * MIB, 2 * 4 * MIB + 2 * MIB);
    batch_free(&b);
    tier->ops->close(tier);
}

/* Many writers of large values while the server evicts: its memory overshoots by the buffers of the connections, and by
 * nothing else. */
static void many_writers_of_2_5_mb_6646(void **state) {
    (void)state;
    enum { WRITERS = 12, NUM = 12, MAX_MIB = 160 };
    const size_t bytes = 5 * MIB / 2;
    batch batches[WRITERS];
    pthread_t threads[WRITERS];
    size_t stored = 0;
    say_to(server, "CONFIG SET maxmemory %d", MAX_MIB << 20);
    say_to(server, "CONFIG RESETSTAT");
    for (size_t i = 0; i < WRITERS; i++) {
        batches[i] = batch_new(open_tier("conns=1"), 4000 + 100 * i, NUM, bytes);
        batch_ready(&batches[i], true, 60000000);
    }
    for (size_t i = 0; i < WRITERS; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, batch_run, &batches[i]), 0);
    }
    for (size_t i = 0; i < WRITERS; i++) {
        pthread_join(threads[i], NULL);
        stored += batch_ok(&batches[i]);
        assert_int_equal(batches[i].tier->disconnects, 0);
    }
    assert_int_equal(stored, WRITERS * NUM);
    assert_true(info_of(server, "stats", "evicted_keys") > 0);
    assert_true(info_of(server, "memory", "used_memory_peak") < MAX_MIB * MIB + WRITERS * 3 * bytes);
    for (size_t i = 0; i < WRITERS; i++) { /* what was not evicted is right */
        (void)batch_go(&batches[i], false);
        kvfi_tier *tier = batches[i].tier;
        batch_free(&batches[i]);
        tier->ops->close(tier);
    }
}

/* A code that the doctor must find, with a command that fixes it. */
typedef struct finding {
    const char *code;
    bool found;
} finding;

static void note_code(void *ctx, const kvf_finding *seen) {
    finding *f = ctx;
    f->found = f->found || (strcmp(seen->code, f->code) == 0 && strstr(seen->mend, "CONFIG SET") != NULL);
}

static bool doctor_finds(kvfi_tier *tier, const char *code) {
    finding f = {.code = code};
    tier->ops->doctor(tier, note_code, &f);
    return f.found;
}

/* Values of several MiB, as fast as they go, overrun the default backlog of 1 MB and the default limit of a replica.
 * The doctor says so, and with what it says the replica stays in step. */
static void a_replica_keeps_up_11667(void **state) {
    (void)state;
    enum { NUM = 48 };
    static const char *const args[] = {"--repl-diskless-sync-delay", "0", NULL};
    kvft_server *replica = kvft_server_start(args);
    say_to(server, "CONFIG SET repl-diskless-sync-delay 0");
    say_to(replica, "REPLICAOF 127.0.0.1 %d", server->port);
    int64_t from = kvfi_sys->now_us();
    for (bool up = false; !up; usleep(20000)) {
        char *text = kvft_server_ask(replica, "INFO replication");
        up = strstr(text, "master_link_status:up") != NULL;
        free(text);
        assert_true(ms_since(from) < KVFT_PATIENCE_MS);
    }
    kvfi_tier *tier = open_tier("");
    assert_true(doctor_finds(tier, "replica-backlog"));
    say_to(server, "CONFIG SET repl-backlog-size 512mb");
    say_to(server, "CONFIG SET client-output-buffer-limit \"replica 2gb 1gb 60\"");
    assert_false(doctor_finds(tier, "replica-backlog"));
    unsigned long long syncs = info_of(server, "stats", "sync_full");
    batch b = batch_new(tier, 5000, NUM, 4 * MIB);
    for (int round = 0; round < 3; round++) {
        assert_int_equal(batch_go(&b, true), NUM);
    }
    from = kvfi_sys->now_us();
    while (strcmp(kvft_server_say(replica, "DBSIZE"), ":96") != 0) { /* two parts each */
        assert_true(ms_since(from) < KVFT_PATIENCE_MS);
        usleep(20000);
    }
    assert_int_equal(info_of(server, "stats", "sync_full"), syncs);
    batch_free(&b);
    tier->ops->close(tier);
    kvft_server_stop(replica);
    say_to(server, "CONFIG SET repl-backlog-size 1mb");
}

/* A value of 2^n bytes is charged a quarter more. What we make of a record of 4 MiB is not. */
static void parts_fit_a_size_class_3257(void **state) {
    (void)state;
    kvfi_tier *tier = open_tier("");
    assert_int_equal(kvft_put(tier, 6000, 4 * MIB - 512), KVF_WHY_NONE);
    char command[256];
    unsigned long long charged = 0;
    for (uint64_t part = 0; part < 2; part++) {
        snprintf(command, sizeof command, "MEMORY USAGE %s", kvft_redis_key(6000, part));
        charged += strtoull(kvft_server_say(server, command) + 1, NULL, 10);
    }
    assert_in_range(charged, 4 * MIB - 512, 4 * MIB + 4 * MIB / 50);
    say_to(server, "SETRANGE power %zu x", 4 * MIB - 1);
    unsigned long long plain = strtoull(kvft_server_say(server, "MEMORY USAGE power") + 1, NULL, 10);
    if (has_jemalloc()) { /* else there is nothing to avoid */
        assert_true(plain > 4 * MIB + 4 * MIB / 5);
    }
    tier->ops->close(tier);
}

/* A transaction is refused as a whole over maxmemory, even where keys could be evicted. We use none, also where a
 * session must appear at once. */
static void no_multi_over_maxmemory_9926(void **state) {
    (void)state;
    static char data[300000];
    kvf_error err;
    kvfi_tier *tier = open_tier("");
    kvfi_part part = {.name = "keys", .data = {data, sizeof data}};
    say_to(server, "CONFIG SET maxmemory %llu", info_of(server, "memory", "used_memory") + 20 * MIB);
    for (uint64_t i = 0; i < 40; i++) {
        assert_int_equal(kvft_put(tier, 7000 + i, MIB - 5000), KVF_WHY_NONE);
    }
    assert_true(info_of(server, "stats", "evicted_keys") > 0); /* it is full */
    for (int i = 0; i < 100; i++) {
        char id[32];
        snprintf(id, sizeof id, "session-%d", i);
        assert_int_equal(tier->ops->session_put(tier, &err, id, &part, 1, NULL, 60, kvfi_deadline(5000000)), KVF_OK);
    }
    char *stats = kvft_server_ask(server, "INFO commandstats");
    assert_non_null(strstr(stats, "cmdstat_set:"));
    assert_null(strstr(stats, "cmdstat_multi:"));
    free(stats);
    tier->ops->close(tier);
}

/* ---- TCP ---- */

/* The loopback of Linux has an MTU of 65536, where 170 MB took 36 times as long as with a smaller one. Beside a unix
 * socket there is no such trap. */
static void loopback_is_no_trap_2385(void **state) {
    (void)state;
    enum { NUM = 43 }; /* 172 MB */
    int64_t took_us[2];
    for (int tcp = 0; tcp < 2; tcp++) {
        kvfi_tier *tier = kvft_tier(tcp == 1 ? server->tcp_url : server->unix_url);
        batch b = batch_new(tier, 8000, NUM, 4 * MIB);
        int64_t from = kvfi_sys->now_us();
        assert_int_equal(batch_go(&b, true), NUM);
        assert_int_equal(batch_go(&b, false), NUM);
        took_us[tcp] = kvfi_sys->now_us() - from;
        batch_free(&b);
        tier->ops->close(tier);
    }
    assert_true(took_us[1] < 12 * took_us[0]);
}

/* ---- several servers ---- */

typedef struct shared {
    kvft_cluster *cluster;
    kvf_store *store;
    kvf_space *space;
    kvft_prompt *prompt;
} shared;

static shared cluster_new(size_t blocks, size_t bytes) {
    shared s = {.cluster = kvft_cluster_start(false)};
    s.store = kvft_store(s.cluster->url);
    s.space = kvft_space(s.store, "m", 16);
    s.prompt = kvft_prompt_new(s.space, 1, blocks, bytes);
    return s;
}

static void cluster_free(shared *s) {
    kvft_prompt_free(s->prompt);
    kvf_space_close(s->space);
    kvf_store_close(s->store);
    kvft_cluster_stop(s->cluster);
}

/* Masters that evict while large values stream in answer their peers all the same: none is taken for dead (node
 * timeout: 1 s). */
static void eviction_fails_no_master_8696(void **state) {
    enum { NUM = 30, ROUNDS = 8 }; /* one prompt fits, all of them are five times what fits */
    (void)state;
    shared s = cluster_new(NUM, 2 * MIB);
    kvft_cluster_be_quick(s.cluster);
    for (int i = 0; i < KVFT_SHARDS; i++) {
        say_to(s.cluster->nodes[i], "CONFIG SET maxmemory %d", 32 << 20);
    }
    for (uint64_t round = 0; round < ROUNDS; round++) {
        kvft_prompt_free(s.prompt);
        s.prompt = kvft_prompt_new(s.space, 10 + round, NUM, 2 * MIB);
        kvft_save_all(s.space, s.store, s.prompt);
        for (int i = 0; i < KVFT_SHARDS; i++) {
            char *nodes = kvft_server_ask(s.cluster->nodes[i], "CLUSTER NODES");
            assert_null(strstr(nodes, "fail"));
            free(nodes);
            assert_true(kvft_cluster_is_ok(s.cluster, i));
        }
    }
    for (int i = 0; i < KVFT_SHARDS; i++) {
        assert_true(info_of(s.cluster->nodes[i], "stats", "evicted_keys") > 0);
    }
    cluster_free(&s);
}

/* A node that does not know its own name says MOVED and CLUSTER SLOTS without a host: the one we talk to is meant. */
static void moved_without_a_host_12266(void **state) {
    (void)state;
    enum { NUM = 30 };
    kvft_cluster *cluster = kvft_cluster_start(false);
    for (int i = 0; i < KVFT_SHARDS; i++) {
        say_to(cluster->nodes[i], "CONFIG SET cluster-preferred-endpoint-type unknown-endpoint");
    }
    bool empty = false; /* some slot is elsewhere, and that is said without a host */
    for (int i = 0; i < 20 && !empty; i++) {
        char command[32];
        snprintf(command, sizeof command, "GET k%d", i);
        const char *said = kvft_server_say(cluster->nodes[0], command);
        empty = strncmp(said, "-MOVED ", 7) == 0 && strstr(said, "127.0.0.1") == NULL;
    }
    assert_true(empty);
    kvf_store *store = kvft_store(cluster->url);
    kvf_space *space = kvft_space(store, "m", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 1, NUM, 10000);
    kvft_save_all(space, store, prompt);
    kvft_prompt_poison(prompt);
    assert_int_equal(kvf_load(space, prompt->blocks, NUM, NULL, KVF_MS(10000)), NUM);
    assert_int_equal(kvft_prompt_wrong(prompt, 1, NUM), 0);
    /* Slots that move now are answered by a MOVED of that kind. */
    kvft_cluster_move(cluster, kvft_cluster_first(0), kvft_cluster_first(0) + 2000, 0, 1);
    kvft_prompt_poison(prompt);
    assert_int_equal(kvf_load(space, prompt->blocks, NUM, NULL, KVF_MS(10000)), NUM);
    assert_int_equal(kvft_prompt_wrong(prompt, 1, NUM), 0);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
    kvft_cluster_stop(cluster);
}

/* ---- a server that refuses ---- */

/* After a snapshot that failed the server takes no writes: loads go on, saves are counted as failed, the doctor knows
 * what to do. */
static void a_failed_snapshot_584(void **state) {
    (void)state;
    char path[300];
    kvfi_tier *tier = open_tier("");
    assert_int_equal(kvft_put(tier, 12000, 100000), KVF_WHY_NONE);
    snprintf(path, sizeof path, "%s/dump.rdb", server->dir); /* the snapshot's name is taken by a folder */
    assert_int_equal(mkdir(path, 0700), 0);
    say_to(server, "CONFIG SET save \"3600 1000000\"");
    say_to(server, "BGSAVE");
    int64_t from = kvfi_sys->now_us();
    for (bool failed = false; !failed; usleep(20000)) {
        char *text = kvft_server_ask(server, "INFO persistence");
        failed = strstr(text, "rdb_last_bgsave_status:err") != NULL;
        free(text);
        assert_true(ms_since(from) < KVFT_PATIENCE_MS);
    }
    kvfi_tier *other = open_tier("");
    assert_int_equal(kvft_put(tier, 12001, 100000), KVF_WHY_SERVER);
    assert_int_equal(kvft_put(tier, 12001, 100000), KVF_WHY_BREAKER);    /* it is not asked again at once */
    assert_int_equal(kvft_put(other, 12001, 9 * MIB), KVF_WHY_SETTINGS); /* it has seen that when it opened */
    other->ops->close(other);
    assert_int_equal(kvft_get(tier, 12000, 100000), KVF_WHY_NONE);
    assert_int_equal(kvft_peek(tier, 12001), KVF_WHY_ABSENT);
    assert_true(doctor_finds(tier, "bgsave-failed"));
    assert_int_equal(tier->disconnects, 0);
    say_to(server, "CONFIG SET save \"\""); /* what the doctor says */
    assert_int_equal(kvft_put_again(tier, 12001, 100000), KVF_WHY_NONE);
    tier->ops->close(tier);
    rmdir(path);
}

/* ---- the protocol ---- */

/* The processor's time, not the clock's: other programs may be busy. */
static int64_t processor_us(void) {
    struct timespec now;
    assert_int_equal(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now), 0);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static int64_t decode_us(size_t bytes) {
    static char scratch[4096];
    kvfi_resp resp;
    kvfi_reply reply;
    char *body = malloc(bytes), line[32];
    struct iovec place = {body, bytes};
    assert_non_null(body);
    size_t line_len = (size_t)snprintf(line, sizeof line, "$%zu\r\n", bytes), total = line_len + bytes + 2, at = 0;
    memset(body, 'x', bytes);
    int64_t from = processor_us();
    kvfi_resp_init(&resp, scratch, sizeof scratch);
    kvfi_resp_into(&resp, (kvfi_place){.iov = &place, .bytes = bytes});
    while (kvfi_resp_next(&resp, &reply) == KVFI_RESP_MORE) {
        struct iovec iov[4];
        size_t num = kvfi_resp_want(&resp, iov, 4), put = 0, most = 16 << 10;
        for (size_t i = 0; i < num; i++) {
            for (size_t k = 0; k < iov[i].iov_len && put < most && at < total; k++, put++, at++) {
                ((char *)iov[i].iov_base)[k] = at < line_len    ? line[at]
                                               : at < total - 2 ? 'y'
                                                                : "\r\n"[at - (total - 2)];
            }
        }
        kvfi_resp_got(&resp, put);
    }
    int64_t took = processor_us() - from;
    assert_int_equal(reply.kind, KVFI_RESP_BULK);
    assert_int_equal(reply.num, bytes);
    assert_true(body[0] == 'y' && body[bytes - 1] == 'y');
    free(body);
    return took;
}

/* 40 MB in pieces of 16 KiB: a reader that shifts what it has for every piece needs quadratic time. Ten times the bytes
 * take ten times as long. */
static void a_large_body_in_small_pieces_656(void **state) {
    (void)state;
    int64_t small = INT64_MAX, large = INT64_MAX;
    for (int round = 0; round < 5; round++) {
        int64_t s = decode_us(4 * MIB), l = decode_us(40 * MIB);
        small = s < small ? s : small;
        large = l < large ? l : large;
    }
    assert_true(large < 25 * small);
}

/* ---- time ---- */

static kvf_reason get_within(kvfi_tier *tier, uint64_t seed, size_t bytes, int64_t budget_us) {
    batch b = batch_new(tier, seed, 1, bytes);
    batch_ready(&b, false, budget_us);
    (void)batch_run(&b);
    kvf_reason why = b.items[0].status == KVF_OK ? KVF_WHY_NONE : b.items[0].why;
    batch_free(&b);
    return why;
}

/* The answer to a load that timed out comes later. It must not be taken for the answer to the next load. */
static void a_late_reply_306(void **state) {
    (void)state;
    kvfi_tier *tier = open_tier("conns=1");
    assert_int_equal(kvft_put(tier, 14000, 200000), KVF_WHY_NONE);
    assert_int_equal(kvft_put(tier, 14001, 200000), KVF_WHY_NONE); /* of the same length */
    for (int round = 0; round < 10; round++) {
        assert_int_equal(kvft_get(tier, 14000, 200000), KVF_WHY_NONE);
        kvft_server_signal(server, SIGSTOP);
        assert_int_equal(get_within(tier, 14000, 200000, 20000), KVF_WHY_BUDGET);
        kvft_server_signal(server, SIGCONT);
        assert_int_equal(kvft_get(tier, 14001, 200000), KVF_WHY_NONE); /* aborts on the bytes of the other */
    }
    assert_int_equal(tier->disconnects, 10);
    tier->ops->close(tier);
}

static void deadlines_hold_after_a_reconnect_593(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier(server->tcp_url);
    for (int round = 0; round < 3; round++) {
        kvft_server_restart(server);
        int64_t from = kvfi_sys->now_us();
        while (kvft_put(tier, 15000, 100000) != KVF_WHY_NONE || kvft_get(tier, 15000, 100000) != KVF_WHY_NONE) {
            assert_true(ms_since(from) < KVFT_PATIENCE_MS);
            usleep(5000);
        }
        kvft_server_signal(server, SIGSTOP);
        from = kvfi_sys->now_us();
        assert_int_equal(get_within(tier, 15000, 100000, 100000), KVF_WHY_BUDGET);
        int64_t took = ms_since(from);
        kvft_server_signal(server, SIGCONT);
        assert_in_range(took, 90, KVFT_PATIENCE_MS); /* the server stands still until then */
    }
    tier->ops->close(tier);
}

/* Values far larger than all socket buffers, pipelined both ways at once over one connection each, and a lookup beside
 * them. */
static void large_values_both_ways_1955(void **state) {
    (void)state;
    enum { NUM = 4 };
    kvfi_tier *tier = open_tier("conns=1&window=64M&part=64M&stall_ms=2000");
    batch first = batch_new(tier, 17000, NUM, 12 * MIB), second = batch_new(tier, 17100, NUM, 12 * MIB);
    pthread_t thread;
    assert_int_equal(batch_go(&first, true), NUM);
    batch_ready(&second, true, 30000000);
    assert_int_equal(pthread_create(&thread, NULL, batch_run, &second), 0);
    for (int round = 0; round < 3; round++) {
        assert_int_equal(batch_go(&first, false), NUM);
        assert_int_equal(kvft_peek(tier, 17000), KVF_WHY_NONE);
    }
    pthread_join(thread, NULL);
    assert_int_equal(batch_ok(&second), NUM);
    assert_int_equal(batch_go(&second, false), NUM);
    assert_int_equal(tier->disconnects, 0);
    batch_free(&first);
    batch_free(&second);
    tier->ops->close(tier);
}

/* A load that is cancelled in the middle leaves no answers behind for the next one. */
static void a_cancelled_load_2624(void **state) {
    (void)state;
    enum { NUM = 24 };
    kvfi_tier *tier = open_tier("conns=1");
    batch b = batch_new(tier, 18000, NUM, MIB / 2), other = batch_new(tier, 18100, NUM, MIB / 2);
    assert_int_equal(batch_go(&b, true), NUM);
    assert_int_equal(batch_go(&other, true), NUM);
    uint64_t random = 18;
    size_t cut = 0;
    for (int round = 0; round < 40; round++) {
        atomic_bool cancelled = false;
        pthread_t thread;
        batch_ready(&b, false, 30000000);
        b.feed.cancelled = &cancelled;
        assert_int_equal(pthread_create(&thread, NULL, batch_run, &b), 0);
        usleep((unsigned)(kvft_random(&random) % 6000));
        cancelled = true;
        pthread_join(thread, NULL);
        cut += batch_ok(&b) < NUM;
        for (size_t i = 0; i < NUM; i++) { /* it came whole (batch_ok has compared it), or was not asked for, or was
                                              given up with its connection */
            assert_true(b.items[i].status == KVF_OK || b.items[i].status == KVF_AGAIN ||
                        b.items[i].why == KVF_WHY_CLOSED);
        }
        assert_int_equal(batch_go(&other, false), NUM);
    }
    assert_true(cut > 0);
    batch_free(&b);
    batch_free(&other);
    tier->ops->close(tier);
}

/* ---- prefixes ---- */

/* Two ranks of one model, of which one lost a block: what both have is the shorter of two runs that are loaded and
 * verified. */
static void ranks_agree_1467(void **state) {
    (void)state;
    enum { RANKS = 2, NUM = 12, LOST = 5 };
    kvf_store *store = kvft_store(server->unix_url);
    kvf_space *spaces[RANKS];
    kvft_prompt *prompts[RANKS];
    size_t run[RANKS], common = NUM;
    for (int rank = 0; rank < RANKS; rank++) {
        spaces[rank] = kvft_space(store, rank == 0 ? "m rank 0" : "m rank 1", 16);
        prompts[rank] = kvft_prompt_new(spaces[rank], 1, NUM, 20000);
        kvft_save_all(spaces[rank], store, prompts[rank]);
    }
    char space[17], key[65];
    kvf_digest digest;
    kvf_space_digest(spaces[1], &digest);
    kvfi_hex(space, digest.bytes, 8);
    kvfi_hex(key, prompts[1]->keys[LOST].bytes, 32);
    say_to(server, "DEL kvf1:%s:{%s}", space, key);
    for (int rank = 0; rank < RANKS; rank++) {
        assert_int_equal(kvf_match(spaces[rank], &run[rank], NULL, prompts[rank]->keys, NUM, KVF_MS(5000)), KVF_OK);
        common = run[rank] < common ? run[rank] : common;
    }
    assert_int_equal(run[0], NUM);
    assert_int_equal(common, LOST);
    for (int rank = 0; rank < RANKS; rank++) {
        kvft_prompt_poison(prompts[rank]);
        assert_int_equal(kvf_load(spaces[rank], prompts[rank]->blocks, common, NULL, KVF_MS(5000)), common);
        assert_int_equal(kvft_prompt_wrong(prompts[rank], 1, common), 0);
        kvft_prompt_free(prompts[rank]);
        kvf_space_close(spaces[rank]);
    }
    kvf_store_close(store);
}

static void *cut_soon(void *arg) {
    usleep(*(unsigned *)arg);
    (void)kvft_server_say(server, "CLIENT KILL TYPE normal");
    return NULL;
}

/* Connections are cut at many moments of a save in parts, and the last time parts are refused: a record is there,
 * whole, or it is not. */
static void a_torn_save_is_not_seen_4991(void **state) {
    (void)state;
    const size_t bytes = 5 * MIB;
    kvfi_tier *tier = open_tier("part=256K&conns=1");
    uint64_t random = 20, torn = 0;
    int64_t begin_us = kvfi_sys->now_us();
    assert_int_equal(kvft_put(tier, 19999, bytes), KVF_WHY_NONE);
    uint64_t took_us = (uint64_t)(kvfi_sys->now_us() - begin_us) + 1; /* here: on a slow machine, under a sanitizer */
    say_to(server, "FLUSHALL SYNC");
    for (uint64_t round = 0; round < 25 || (torn == 0 && round < 200); round++) {
        unsigned after_us = (unsigned)(kvft_random(&random) % (2 * took_us));
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, cut_soon, &after_us), 0);
        bool stored = kvft_put(tier, 20000 + round, bytes) == KVF_WHY_NONE;
        pthread_join(thread, NULL);
        kvfi_tier *reader = open_tier("part=256K&conns=1"); /* with no connection that was cut */
        kvf_reason seen = kvft_peek(reader, 20000 + round), got = kvft_get(reader, 20000 + round, bytes);
        assert_int_equal(seen, got);
        assert_true(got == KVF_WHY_NONE || (got == KVF_WHY_ABSENT && !stored));
        torn += got == KVF_WHY_ABSENT && strcmp(kvft_server_say(server, "DBSIZE"), ":0") != 0;
        reader->ops->close(reader);
        say_to(server, "FLUSHALL SYNC");
        usleep(60000); /* the breaker closes */
    }
    assert_true(torn > 0); /* parts were left behind, and nobody saw them */
    tier->ops->close(tier);
    tier = open_tier("part=1M&conns=1");
    say_to(server, "CONFIG SET maxmemory-policy noeviction");
    say_to(server, "CONFIG SET maxmemory %llu", info_of(server, "memory", "used_memory") + 8 * MIB);
    assert_int_equal(kvft_put(tier, 20100, 16 * MIB), KVF_WHY_SERVER);
    assert_int_equal(kvft_peek(tier, 20100), KVF_WHY_ABSENT);
    assert_int_equal(kvft_get(tier, 20100, 16 * MIB), KVF_WHY_ABSENT);
    tier->ops->close(tier);
}

/* Every test begins with an empty server of the usual settings. */
static int begin(void **state) {
    (void)state;
    say_to(server, "CONFIG SET maxmemory 0");
    say_to(server, "CONFIG SET maxmemory-policy allkeys-lru");
    say_to(server, "FLUSHALL SYNC");
    say_to(server, "CONFIG RESETSTAT");
    return 0;
}

#define ISSUE(name) cmocka_unit_test_setup(name, begin)

int main(void) {
    const struct CMUnitTest tests[] = {
        ISSUE(big_reads_do_not_evict_4496),
        ISSUE(memory_can_be_filled_11830),
        ISSUE(query_buffers_are_bounded_3423),
        ISSUE(many_writers_of_2_5_mb_6646),
        ISSUE(a_replica_keeps_up_11667),
        ISSUE(parts_fit_a_size_class_3257),
        ISSUE(no_multi_over_maxmemory_9926),
        ISSUE(loopback_is_no_trap_2385),
        ISSUE(eviction_fails_no_master_8696),
        ISSUE(moved_without_a_host_12266),
        ISSUE(a_failed_snapshot_584),
        ISSUE(a_large_body_in_small_pieces_656),
        ISSUE(a_late_reply_306),
        ISSUE(deadlines_hold_after_a_reconnect_593),
        ISSUE(large_values_both_ways_1955),
        ISSUE(a_cancelled_load_2624),
        ISSUE(ranks_agree_1467),
        ISSUE(a_torn_save_is_not_seen_4991),
    };
    server = kvft_server_start(NULL);
    if (server == NULL) {
        fprintf(stderr, "no redis-server is installed: not run\n");
        return 77;
    }
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    kvft_server_stop(server);
    return failed;
}
