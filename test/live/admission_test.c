/* SPDX-License-Identifier: Apache-2.0
 *
 * Every entry of the list of settings (docs/stores-redis.md) on a real server with those settings: what the doctor
 * reports, what opening a store logs, whether anything is saved, that loads go on, and that saves resume once the
 * settings are fixed.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "redis/cluster/talk.h"
#include "support/cluster.h"
#include "support/kit.h"
#include "support/tiers.h"

#define KEPT  1u /* the seed of a record that is there before the server is misconfigured */
#define NEW   2u
#define BYTES 100000u
#define MIB   ((size_t)1 << 20)

static kvft_server *server;
static kvf_error err;
static char logged[16384];

static void keep_log(void *ctx, kvf_log_level level, const char *message) {
    (void)ctx;
    size_t len = strlen(logged);
    snprintf(logged + len, sizeof logged - len, "%d %s\n", (int)level, message);
}

static void say(kvft_server *to, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(kvft_server *to, const char *format, ...) {
    char command[300];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    const char *answer = kvft_server_say(to, command);
    if (answer[0] != '+') {
        fail_msg("%s: %s", command, answer);
    }
}

/* Commands with a ; between them. */
static void say_all(const char *commands) {
    while (commands != NULL && commands[0] != '\0') {
        size_t len = strcspn(commands, ";");
        say(server, "%.*s", (int)len, commands);
        commands += len + (commands[len] == ';');
    }
}

static uint64_t used_memory(kvft_server *of) {
    char *text = kvft_server_ask(of, "INFO memory");
    const char *line = strstr(text, "used_memory:");
    assert_non_null(line);
    uint64_t bytes = strtoull(line + 12, NULL, 10);
    free(text);
    return bytes;
}

/* ---- the doctor ---- */

typedef struct seen {
    const char *code;
    kvf_severity severity; /* of that finding; KVF_FINE: it is not there */
    char what[400], mend[300];
} seen;

static void look_for(void *ctx, const kvf_finding *finding) {
    seen *s = ctx;
    if (strcmp(finding->code, s->code) == 0) {
        s->severity = finding->severity;
        snprintf(s->what, sizeof s->what, "%s", finding->what);
        snprintf(s->mend, sizeof s->mend, "%s", finding->mend);
    }
}

static seen examine(kvfi_tier *tier, const char *code) {
    seen s = {.code = code, .severity = KVF_FINE};
    tier->ops->doctor(tier, look_for, &s);
    return s;
}

/* ---- one row ---- */

typedef struct row {
    const char *code;
    const char *set, *unset; /* commands */
    const char *url;         /* what stands behind the server's in the URL */
    kvf_severity severity;
    kvf_reason saves;
    uint64_t part; /* that came of it; 0 = as it was */
    uint32_t conns;
    bool gone; /* it has no room for what was there before */
} row;

static void check_row(const row *r, bool tcp) {
    kvfi_tier *tier = NULL;
    const char *base = tcp ? server->tcp_url : server->unix_url;
    say_all(r->set);
    logged[0] = '\0';
    if (kvft_try_tier(&tier, &err, "%s%s", base, r->url) != KVF_OK) {
        fail_msg("%s: %s", r->code, err.what);
    }
    seen s = examine(tier, r->code);
    if (s.severity != r->severity) {
        fail_msg("%s: severity %d, not %d (%s)", r->code, (int)s.severity, (int)r->severity, s.what);
    }
    assert_true(strlen(s.mend) > 0);
    /* The log had the same. */
    char line[64];
    snprintf(line, sizeof line, "%d ", r->severity >= KVF_WARNING ? (int)KVF_LOG_WARN : (int)KVF_LOG_INFO);
    bool told = strstr(logged, s.what) != NULL && strstr(logged, s.mend) != NULL && strstr(logged, line) != NULL;
    if (!told) {
        fail_msg("%s: \"%s\" is not in the log: %s", r->code, s.what, logged);
    }
    const kvfi_redis_conf *conf = &kvfi_redis_of(tier)->conf;
    assert_int_equal(conf->part, r->part > 0 ? r->part : 4190208);
    assert_int_equal(conf->conns, r->conns > 0 ? r->conns : tcp ? 2 : 1);
    kvf_reason why = kvft_put(tier, NEW, BYTES);
    if (why != r->saves) {
        fail_msg("%s: a save: %s, not %s", r->code, kvf_reason_name(why), kvf_reason_name(r->saves));
    }
    assert_int_equal(kvft_put(tier, NEW, BYTES), r->saves); /* and again, without asking */
    if (!r->gone) {
        assert_int_equal(kvft_get(tier, KEPT, BYTES), KVF_WHY_NONE);
    }
    assert_int_equal(kvft_peek(tier, NEW), r->saves == KVF_WHY_NONE ? KVF_WHY_NONE : KVF_WHY_ABSENT);
    kvf_tier_info info = {.struct_size = sizeof info};
    tier->ops->info(tier, &info);
    assert_int_equal(info.num_refusing, r->saves != KVF_WHY_NONE);
    say_all(r->unset);
    /* The store notices it without being opened again. */
    assert_int_equal(kvft_put_again(tier, NEW, BYTES), KVF_WHY_NONE);
    assert_int_equal(tier->disconnects, 0);
    tier->ops->close(tier);
}

#define WELL "CONFIG SET maxmemory 4gb;CONFIG SET maxmemory-policy allkeys-lru;CONFIG SET maxmemory-samples 10"

static int begin(void **state) {
    (void)state;
    say(server, "FLUSHALL SYNC");
    say_all(WELL);
    kvfi_tier *tier = kvft_tier(server->unix_url);
    assert_int_equal(kvft_put(tier, KEPT, BYTES), KVF_WHY_NONE);
    tier->ops->close(tier);
    return 0;
}

static int end(void **state) {
    (void)state;
    return 0;
}

static void check_rows(const row *rows, size_t num) {
    for (size_t i = 0; i < num; i++) {
        (void)begin(NULL);
        check_row(&rows[i], false);
        (void)begin(NULL);
        check_row(&rows[i], true);
    }
}

#define CHECK(rows) check_rows(rows, sizeof(rows) / sizeof *(rows))

static void policies(void **state) {
    (void)state;
    static const row rows[] = {
        {.code = "noeviction",
         .set = "CONFIG SET maxmemory-policy noeviction",
         .unset = "CONFIG SET maxmemory-policy allkeys-lru",
         .url = "",
         .severity = KVF_FATAL,
         .saves = KVF_WHY_SETTINGS},
        {.code = "noeviction",
         .set = "CONFIG SET maxmemory-policy noeviction",
         .url = "?allow_noeviction=true",
         .severity = KVF_WARNING},
        {.code = "volatile-without-ttl",
         .set = "CONFIG SET maxmemory-policy volatile-lru",
         .unset = "CONFIG SET maxmemory-policy allkeys-lru",
         .url = "?ttl=0",
         .severity = KVF_FATAL,
         .saves = KVF_WHY_SETTINGS},
        {.code = "volatile-without-ttl",
         .set = "CONFIG SET maxmemory-policy volatile-ttl",
         .url = "?ttl=0&allow_noeviction=true",
         .severity = KVF_WARNING},
        {.code = "samples", .set = "CONFIG SET maxmemory-samples 5", .url = "", .severity = KVF_NOTE},
    };
    CHECK(rows);
}

static void memory(void **state) {
    (void)state;
    static const row rows[] = {
        {.code = "maxmemory", .set = "CONFIG SET maxmemory 0", .url = "", .severity = KVF_WARNING},
        {.code = "maxmemory", .set = "CONFIG SET maxmemory 0", .url = "?budget=100M", .severity = KVF_NOTE},
        {.code = "budget",
         .set = "CONFIG SET maxmemory 0",
         .unset = "CONFIG SET maxmemory 4gb",
         .url = "?budget=1M",
         .severity = KVF_FATAL,
         .saves = KVF_WHY_FULL},
        {.code = "maxmemory-small",
         .set = "CONFIG SET maxmemory 130mb",
         .url = "?conns=2",
         .severity = KVF_WARNING,
         .conns = 1},
        {.code = "maxmemory-small",
         .set = "CONFIG SET maxmemory 100mb",
         .url = "",
         .severity = KVF_WARNING,
         .part = 2093056,
         .conns = 1},
        {.code = "maxmemory-small",
         .set = "CONFIG SET maxmemory 1900000",
         .unset = "CONFIG SET maxmemory 4gb",
         .url = "",
         .severity = KVF_FATAL,
         .saves = KVF_WHY_SETTINGS,
         .gone = true},
    };
    CHECK(rows);
}

static void limits(void **state) {
    (void)state;
    static const row rows[] = {
        {.code = "output-buffer-limit",
         .set = "CONFIG SET client-output-buffer-limit \"normal 1048576 0 0\"",
         .unset = "CONFIG SET client-output-buffer-limit \"normal 0 0 0\"",
         .url = "",
         .severity = KVF_WARNING,
         .part = 258048},
        {.code = "output-buffer-limit",
         .set = "CONFIG SET client-output-buffer-limit \"normal 100000 0 0\"",
         .unset = "CONFIG SET client-output-buffer-limit \"normal 0 0 0\"",
         .url = "?conns=1",
         .severity = KVF_FATAL,
         .saves = KVF_WHY_SETTINGS,
         .conns = 1,
         .gone = true},
        {.code = "maxmemory-clients",
         .set = "CONFIG SET maxmemory-clients 8mb",
         .unset = "CONFIG SET maxmemory-clients 0",
         .url = "",
         .severity = KVF_WARNING,
         .part = 1044480,
         .conns = 1},
        {.code = "maxmemory-clients",
         .set = "CONFIG SET maxmemory 200mb;CONFIG SET maxmemory-clients 4%",
         .unset = "CONFIG SET maxmemory-clients 0",
         .url = "?conns=1",
         .severity = KVF_WARNING,
         .part = 1044480,
         .conns = 1},
        {.code = "maxmemory-clients",
         .set = "CONFIG SET maxmemory-clients 300000",
         .unset = "CONFIG SET maxmemory-clients 0",
         .url = "",
         .severity = KVF_FATAL,
         .saves = KVF_WHY_SETTINGS},
        {.code = "proto-max-bulk-len",
         .set = "CONFIG SET proto-max-bulk-len 1mb",
         .unset = "CONFIG SET proto-max-bulk-len 512mb",
         .url = "",
         .severity = KVF_WARNING,
         .part = 1044480},
    };
    CHECK(rows);
}

static void disk(void **state) {
    (void)state;
    static const row rows[] = {
        {.code = "snapshots",
         .set = "CONFIG SET save \"3600 1000000\"",
         .unset = "CONFIG SET save \"\"",
         .url = "",
         .severity = KVF_WARNING},
        {.code = "aof",
         .set = "CONFIG SET appendonly yes",
         .unset = "CONFIG SET appendonly no",
         .url = "",
         .severity = KVF_WARNING},
    };
    CHECK(rows);
}

static void replica(void **state) {
    (void)state;
    const row r = {
        .code = "replica", .set = "REPLICAOF 127.0.0.1 1", .url = "", .severity = KVF_FATAL, .saves = KVF_WHY_SETTINGS};
    kvfi_tier *tier = NULL;
    say_all(r.set);
    logged[0] = '\0';
    assert_int_equal(kvft_try_tier(&tier, &err, "%s", server->unix_url), KVF_OK);
    assert_non_null(strstr(logged, "the server is a replica"));
    assert_int_equal(examine(tier, "replica").severity, KVF_FATAL);
    assert_int_equal(kvft_put(tier, NEW, BYTES), KVF_WHY_SETTINGS);
    assert_int_equal(kvft_get(tier, KEPT, BYTES), KVF_WHY_NONE);
    say(server, "REPLICAOF NO ONE");
    assert_int_equal(kvft_put_again(tier, NEW, BYTES),
                     KVF_WHY_NONE); /* over new connections: the name may be another's */
    tier->ops->close(tier);
}

/* ---- states that take some doing ---- */

static void *reload(void *arg) {
    (void)arg;
    free(kvft_server_ask(server, "DEBUG RELOAD"));
    return NULL;
}

static bool info_has(const char *words) {
    char *text = kvft_server_ask(server, "INFO persistence");
    bool has = strstr(text, words) != NULL;
    free(text);
    return has;
}

static void until(const char *words) {
    for (double from = kvft_now_ms(); !info_has(words); kvft_nap_ms(5)) {
        assert_true(kvft_now_ms() - from < KVFT_PATIENCE_MS);
    }
}

/* The server reads its data from disk, a key every 50 ms. */
static void loading(void **state) {
    (void)state;
    pthread_t thread;
    kvfi_tier *before = kvft_tier(server->unix_url), *tier = NULL;
    for (uint64_t seed = 10; seed < 50; seed++) {
        assert_int_equal(kvft_put(before, seed, 1000), KVF_WHY_NONE);
    }
    say_all("CONFIG SET key-load-delay 50000;CONFIG SET loading-process-events-interval-bytes 1024");
    assert_int_equal(pthread_create(&thread, NULL, reload, NULL), 0);
    until("loading:1");
    logged[0] = '\0';
    assert_int_equal(kvft_try_tier(&tier, &err, "%s", server->unix_url), KVF_OK);
    assert_non_null(strstr(logged, "the server is loading its data"));
    assert_int_equal(kvft_put(tier, NEW, BYTES), KVF_WHY_SETTINGS);
    assert_int_equal(examine(tier, "loading").severity, KVF_FATAL);
    pthread_join(thread, NULL);
    until("loading:0");
    say(server, "CONFIG SET key-load-delay 0");
    assert_int_equal(kvft_put_again(tier, NEW, BYTES), KVF_WHY_NONE);
    assert_int_equal(kvft_get(tier, KEPT, BYTES), KVF_WHY_NONE);
    tier->ops->close(tier);
    before->ops->close(before);
}

/* A folder stands where the snapshot should. */
static void failed_snapshot(void **state) {
    (void)state;
    char path[192];
    const row r = {.code = "bgsave-failed",
                   .unset = "CONFIG SET stop-writes-on-bgsave-error no",
                   .url = "",
                   .severity = KVF_FATAL,
                   .saves = KVF_WHY_SETTINGS};
    snprintf(path, sizeof path, "%s/dump.rdb", server->dir);
    (void)unlink(path);
    assert_int_equal(mkdir(path, 0700), 0);
    say(server, "CONFIG SET save \"3600 1000000\"");
    for (double from = kvft_now_ms(); !info_has("rdb_last_bgsave_status:err"); kvft_nap_ms(20)) {
        (void)kvft_server_say(server, "BGSAVE");
        assert_true(kvft_now_ms() - from < KVFT_PATIENCE_MS);
    }
    check_row(&r, false);
    say_all("CONFIG SET stop-writes-on-bgsave-error yes;CONFIG SET save \"\"");
    /* Without snapshots an old failure means nothing. */
    kvfi_tier *tier = kvft_tier(server->unix_url);
    assert_int_equal(examine(tier, "bgsave-failed").severity, KVF_FINE);
    assert_int_equal(kvft_put(tier, NEW, BYTES), KVF_WHY_NONE);
    tier->ops->close(tier);
    rmdir(path);
    for (double from = kvft_now_ms(); !info_has("rdb_last_bgsave_status:ok"); kvft_nap_ms(20)) {
        (void)kvft_server_say(server, "BGSAVE");
        assert_true(kvft_now_ms() - from < KVFT_PATIENCE_MS);
    }
}

/* Its files may grow no more: as a full disk. */
static void failed_log(void **state) {
    (void)state;
    struct rlimit limit = {.rlim_cur = 4096, .rlim_max = RLIM_INFINITY};
    const row r = {.code = "aof-failed",
                   .unset = "CONFIG SET appendonly no",
                   .url = "",
                   .severity = KVF_FATAL,
                   .saves = KVF_WHY_SETTINGS};
    kvft_server *usual = server; /* one of its own: nothing of its files is of use afterwards */
    server = kvft_server_start(NULL);
    (void)begin(NULL);
    say(server, "CONFIG SET appendonly yes");
    until("aof_rewrite_in_progress:0");
    kvfi_tier *tier = kvft_tier(server->unix_url);
    assert_int_equal(prlimit(server->pid, RLIMIT_FSIZE, &limit, NULL), 0);
    for (double from = kvft_now_ms(); !info_has("aof_last_write_status:err"); kvft_nap_ms(20)) {
        (void)kvft_put(tier, 3, BYTES);
        assert_true(kvft_now_ms() - from < KVFT_PATIENCE_MS);
    }
    tier->ops->close(tier);
    check_row(&r, false);
    kvft_server_stop(server);
    server = usual;
}

static void replicas(void **state) {
    (void)state;
    kvft_server *second = kvft_server_start(NULL);
    say(second, "REPLICAOF 127.0.0.1 %d", server->port);
    kvft_await_replicas(server);
    for (double from = kvft_now_ms(); kvft_now_ms() - from < 20000; kvft_nap_ms(20)) {
        char *text = kvft_server_ask(server, "INFO replication");
        bool up = strstr(text, "connected_slaves:1") != NULL && strstr(text, "state=online") != NULL;
        free(text);
        if (up) {
            break;
        }
    }
    static const row r = {
        .code = "replica-backlog", .unset = "CONFIG SET repl-backlog-size 512mb", .url = "", .severity = KVF_WARNING};
    check_row(&r, false);
    kvfi_tier *tier = kvft_tier(server->unix_url);
    assert_int_equal(examine(tier, "replica-backlog").severity, KVF_FINE);
    tier->ops->close(tier);
    say(server, "CONFIG SET repl-backlog-size 1mb");
    kvft_server_stop(second);
}

static void threads(void **state) {
    (void)state;
    kvfi_tier *tcp = kvft_tier(server->tcp_url), *local = kvft_tier(server->unix_url);
    assert_int_equal(examine(tcp, "io-threads").severity, KVF_NOTE);
    assert_int_equal(examine(local, "io-threads").severity, KVF_FINE);
    tcp->ops->close(tcp);
    local->ops->close(local);
    static const char *const args[] = {"--io-threads", "2", NULL};
    kvft_server *two = kvft_server_start(args);
    tcp = kvft_tier(two->tcp_url);
    assert_int_equal(examine(tcp, "io-threads").severity, KVF_FINE);
    tcp->ops->close(tcp);
    kvft_server_stop(two);
}

/* A client announces a value of 400 MB and sends nothing of it: the server's memory grows by that, and is touched by
 * nobody. So does the INFO of a server look that is swapped out. On the same host the kernel knows better. */
static void swap(void **state) {
    (void)state;
    const char *const args[] = {"--maxmemory", "4gb", NULL};
    kvft_server *hollow = kvft_server_start(args);
    kvfi_tier *tier = kvft_tier(hollow->unix_url);
    kvfi_talk talk;
    kvfi_redis *redis = kvfi_redis_of(tier);
    assert_int_equal(kvfi_talk_begin(&talk, redis, &err, 0, KVFI_LANE_STORE, kvfi_deadline(20000000)), KVF_OK);
    kvfi_cmd *out = kvfi_conn_room(talk.conn, 200);
    kvfi_cmd_array(out, 3);
    kvfi_cmd_text(out, "SET");
    kvfi_cmd_text(out, "kvf1:x");
    kvfi_cmd_bulk_header(out, 400 * MIB);
    assert_int_equal(kvfi_conn_send(talk.conn), KVF_WHY_NONE);
    for (double from = kvft_now_ms(); used_memory(hollow) < 300 * MIB; kvft_nap_ms(20)) {
        assert_true(kvft_now_ms() - from < KVFT_PATIENCE_MS);
    }
    assert_int_equal(examine(tier, "swap").severity, KVF_FINE); /* nothing is in swap, says the kernel */
    kvfi_node *node = &redis->node;
    kvfi_endpoint here = node->server;
    node->server = (kvfi_endpoint){.host = "far-away"}; /* the connection is there already */
    seen s = examine(tier, "swap");
    node->server = here;
    assert_int_equal(s.severity, KVF_WARNING);
    assert_non_null(strstr(s.what, "resident"));
    kvfi_conn_close(talk.conn);
    kvfi_talk_end(&talk);
    tier->ops->close(tier);
    kvft_server_stop(hollow);
}

/* The same question, answered by a kernel that has swapped some of it out. */
static char fake_status[200];
static kvfi_systable with_fake_proc;

static int open_fake_proc(const char *path, int flags, mode_t mode) {
    bool status = strncmp(path, "/proc/", 6) == 0 && strstr(path, "/status") != NULL;
    return kvfi_sys_real.open(status ? fake_status : path, flags, mode);
}

static void swap_here(void **state) {
    (void)state;
    snprintf(fake_status, sizeof fake_status, "%s/status", server->dir);
    FILE *out = fopen(fake_status, "w");
    assert_non_null(out);
    fputs("Name:\tredis-server\nVmRSS:\t   9000 kB\nVmSwap:\t    2048 kB\nThreads:\t5\n", out);
    fclose(out);
    with_fake_proc = kvfi_sys_real;
    with_fake_proc.open = open_fake_proc;
    kvfi_sys_table = &with_fake_proc;
    kvfi_tier *tier = kvft_tier(server->tcp_url);
    seen s = examine(tier, "swap");
    tier->ops->close(tier);
    kvfi_sys_table = &kvfi_sys_real;
    assert_int_equal(s.severity, KVF_WARNING);
    assert_non_null(strstr(s.what, "2.0 MiB"));
}

/* ---- who may not see the settings is not refused for that ---- */

static void without_rights(void **state) {
    (void)state;
    kvfi_tier *tier = NULL;
    char *from = kvft_server_ask(
        server, "ACL SETUSER poor reset on >x ~kvf1:* +client|setname +get +getrange +set +pexpire +unlink");
    free(from);
    say(server, "CONFIG SET maxmemory-policy noeviction");
    logged[0] = '\0';
    assert_int_equal(kvft_try_tier(&tier, &err, "redis://poor:x@127.0.0.1:%d", server->port), KVF_OK);
    assert_non_null(strstr(logged, "+info"));
    assert_int_equal(kvft_put(tier, NEW, BYTES), KVF_WHY_NONE);
    assert_int_equal(examine(tier, "no-info").severity, KVF_WARNING);
    assert_int_equal(examine(tier, "no-config").severity, KVF_NOTE);
    tier->ops->close(tier);
    /* INFO alone shows the policy. */
    say(server, "ACL SETUSER poor +info");
    assert_int_equal(kvft_try_tier(&tier, &err, "redis://poor:x@127.0.0.1:%d", server->port), KVF_OK);
    assert_int_equal(kvft_put(tier, NEW, BYTES), KVF_WHY_SETTINGS);
    assert_int_equal(examine(tier, "noeviction").severity, KVF_FATAL);
    assert_int_equal(examine(tier, "no-config").severity, KVF_NOTE);
    say(server, "CONFIG SET maxmemory-policy allkeys-lru");
    assert_int_equal(kvft_put_again(tier, NEW, BYTES), KVF_WHY_NONE);
    tier->ops->close(tier);
}

/* ---- what the fitted limits are worth ---- */

/* A busy machine may stand still for longer than loads put up with, which is not what these are about. */
#define PATIENT "stall_ms=10000"

static kvfi_tier *patient_tier(void) {
    char url[256];
    snprintf(url, sizeof url, "%s?" PATIENT, server->unix_url);
    return kvft_tier(url);
}

/* With a hard limit of 1 MiB the server cuts off a client that requests parts of 4 MiB, but not one that respects the
 * limit. */
static void fitted_to_output_limit(void **state) {
    (void)state;
    kvfi_tier *before = patient_tier(), *tier = NULL;
    assert_int_equal(kvft_put(before, 20, 12 * MIB), KVF_WHY_NONE);
    assert_int_equal(kvft_get(before, 20, 12 * MIB), KVF_WHY_NONE);
    say(server, "CONFIG SET client-output-buffer-limit \"normal 1048576 0 0\"");
    char *info = kvft_server_ask(server, "INFO server");
    if (strstr(info, "valkey_version:") ==
        NULL) { /* Valkey 9 sends large values from where they lie, and does not look then */
        assert_int_not_equal(kvft_get(before, 20, 12 * MIB), KVF_WHY_NONE);
    }
    free(info);
    assert_int_equal(kvft_try_tier(&tier, &err, "%s?" PATIENT, server->unix_url), KVF_OK);
    for (uint64_t seed = 21; seed < 25; seed++) {
        assert_int_equal(kvft_put(tier, seed, 12 * MIB), KVF_WHY_NONE);
        assert_int_equal(kvft_get(tier, seed, 12 * MIB), KVF_WHY_NONE);
    }
    assert_int_equal(tier->disconnects, 0);
    say(server, "CONFIG SET client-output-buffer-limit \"normal 0 0 0\"");
    tier->ops->close(tier);
    before->ops->close(before);
}

/* The same for the longest value that the server takes. */
static void fitted_to_bulk_limit(void **state) {
    (void)state;
    kvfi_tier *before = patient_tier(), *tier = NULL;
    say(server, "CONFIG SET proto-max-bulk-len 1mb");
    assert_int_not_equal(kvft_put(before, 20, 5 * MIB), KVF_WHY_NONE);
    assert_int_equal(kvft_try_tier(&tier, &err, "%s?" PATIENT, server->unix_url), KVF_OK);
    assert_int_equal(kvft_put(tier, 20, 5 * MIB), KVF_WHY_NONE);
    assert_int_equal(kvft_get(tier, 20, 5 * MIB), KVF_WHY_NONE);
    say(server, "CONFIG SET proto-max-bulk-len 512mb");
    tier->ops->close(tier);
    before->ops->close(before);
}

/* ---- the budget ---- */

/* A server as it is when nobody has set it up: it takes what there is room for in the budget, byte for byte as much
 * as it says, and again after something has gone. Two stores share it. */
static void budget(void **state) {
    (void)state;
    static const char *const args[] = {"--maxmemory-policy", "noeviction", NULL};
    kvft_server *plain = kvft_server_start(args);
    uint64_t limit = used_memory(plain) + 24 * MIB;
    kvfi_tier *tiers[2] = {NULL};
    size_t kept[2] = {0};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(kvft_try_tier(&tiers[i], &err, "%s?budget=%llu", plain->unix_url, (unsigned long long)limit),
                         KVF_OK);
    }
    kvf_reason why = KVF_WHY_NONE;
    for (uint64_t seed = 100; why == KVF_WHY_NONE; seed++) {
        kvfi_tier *tier = tiers[seed % 2];
        why = kvft_put(tier, seed, MIB);
        kept[seed % 2] += why == KVF_WHY_NONE;
        assert_true(seed < 200);
    }
    assert_int_equal(why, KVF_WHY_FULL);
    assert_true(kept[0] >= 6 && kept[1] >= 6);
    uint64_t used = used_memory(plain);
    printf("budget %.1f MiB: %zu and %zu records of 1 MiB, the server holds %.1f MiB\n", (double)limit / MIB, kept[0],
           kept[1], (double)used / MIB);
    assert_true(used <= limit + 4 * MIB); /* by the last value, and its buffers */
    for (uint64_t seed = 100; seed < 100 + kept[0] + kept[1]; seed++) {
        assert_int_equal(kvft_get(tiers[0], seed, MIB), KVF_WHY_NONE);
    }
    say(plain, "FLUSHALL SYNC");
    for (int i = 0; i < 2; i++) {
        assert_int_equal(kvft_put_again(tiers[i], 300, MIB), KVF_WHY_NONE);
        tiers[i]->ops->close(tiers[i]);
    }
    kvft_server_stop(plain);
}

/* One batch that is larger than the budget: it ends where that does. */
static void budget_of_a_batch(void **state) {
    (void)state;
    static const char *const args[] = {"--maxmemory-policy", "noeviction", NULL};
    kvft_server *plain = kvft_server_start(args);
    char url[300];
    kvf_stats stats = {.struct_size = sizeof stats};
    uint64_t limit = used_memory(plain) + 16 * MIB;
    snprintf(url, sizeof url, "%s?budget=%llu", plain->unix_url, (unsigned long long)limit);
    kvf_store *store = kvft_store(url);
    kvf_space *space = kvft_space(store, "m", 16);
    kvft_prompt *p = kvft_prompt_new(space, 1, 64, MIB / 2);
    assert_int_equal(kvf_save(space, p->blocks, 64, NULL), 64);
    assert_true(kvft_flush(store) > 0);
    kvf_store_stats(store, &stats);
    assert_in_range(stats.saved, 12, 40);
    assert_true(stats.save_failures[KVF_WHY_FULL] > 20);
    assert_true(used_memory(plain) <= limit + 4 * MIB);
    kvft_prompt_free(p);
    kvf_space_close(space);
    kvf_store_close(store);
    kvft_server_stop(plain);
}

/* ---- when it is asked ---- */

/* A server that was away when the store opened is asked by the first save; one that comes back otherwise than it
 * was, too. */
static void found_later(void **state) {
    (void)state;
    kvfi_tier *tier = NULL;
    kvft_server_kill(server);
    assert_int_equal(kvft_try_tier(&tier, &err, "%s", server->unix_url), KVF_OK);
    kvft_server_restart(server);
    say_all("CONFIG SET maxmemory 4gb;CONFIG SET maxmemory-policy noeviction");
    logged[0] = '\0';
    kvf_reason why = KVF_WHY_BREAKER;
    for (double from = kvft_now_ms(); why == KVF_WHY_BREAKER; kvft_nap_ms(20)) {
        why = kvft_put(tier, NEW, BYTES);
        assert_true(kvft_now_ms() - from < KVFT_PATIENCE_MS);
    }
    assert_int_equal(why, KVF_WHY_SETTINGS);
    assert_non_null(strstr(logged, "noeviction"));
    say_all(WELL);
    assert_int_equal(kvft_put_again(tier, NEW, BYTES), KVF_WHY_NONE);
    /* Killed and started again, it is as its file has it: no maxmemory. The records go on, within the budget, and
     * that is logged. */
    kvft_server_kill(server);
    (void)kvft_get(tier, NEW, BYTES);
    kvft_server_restart(server);
    say_all("CONFIG SET maxmemory 4gb;CONFIG SET maxmemory-policy noeviction");
    for (double from = kvft_now_ms(); (why = kvft_put(tier, NEW, BYTES)) != KVF_WHY_SETTINGS; kvft_nap_ms(20)) {
        assert_true(why == KVF_WHY_BREAKER || why == KVF_WHY_UNREACHABLE);
        assert_true(kvft_now_ms() - from < KVFT_PATIENCE_MS);
    }
    say_all(WELL);
    assert_int_equal(kvft_put_again(tier, NEW, BYTES), KVF_WHY_NONE);
    /* Parts are as they were when it opened: a server that takes only shorter ones gets none. */
    tier->ops->close(tier);
    kvft_server_kill(server);
    assert_int_equal(kvft_try_tier(&tier, &err, "%s", server->unix_url), KVF_OK);
    kvft_server_restart(server);
    say_all(WELL);
    say(server, "CONFIG SET proto-max-bulk-len 1mb");
    for (why = KVF_WHY_BREAKER; why == KVF_WHY_BREAKER; kvft_nap_ms(20)) {
        why = kvft_put(tier, NEW, 5 * MIB);
    }
    assert_int_equal(why, KVF_WHY_SETTINGS);
    say(server, "CONFIG SET proto-max-bulk-len 512mb");
    assert_int_equal(kvft_put_again(tier, NEW, 5 * MIB), KVF_WHY_NONE);
    tier->ops->close(tier);
}

static unsigned num_sent;
static kvfi_systable counting;

static ssize_t count_writev(int fd, const struct iovec *iov, int num) {
    num_sent++;
    return kvfi_sys_real.writev(fd, iov, num);
}

/* Opening asks two questions: who we are, and the server's settings. A later save asks no more. */
static void round_trips(void **state) {
    (void)state;
    kvfi_tier *tier = NULL;
    counting = kvfi_sys_real;
    counting.writev = count_writev;
    kvfi_sys_table = &counting;
    num_sent = 0;
    assert_int_equal(kvft_try_tier(&tier, &err, "%s", server->unix_url), KVF_OK);
    unsigned opened = num_sent;
    assert_int_equal(kvft_put(tier, NEW, 1000), KVF_WHY_NONE);
    unsigned saved = num_sent;
    assert_int_equal(kvft_put(tier, NEW + 1, 1000), KVF_WHY_NONE);
    unsigned again = num_sent;
    tier->ops->close(tier);
    kvfi_sys_table = &kvfi_sys_real;
    assert_int_equal(opened, 2);
    assert_in_range(saved - opened, 2, 3); /* a connection of its own, and the value */
    assert_in_range(again - saved, 1, 2);
}

/* ---- several servers ---- */

/* Of a Cluster one shard evicts nothing: it gets nothing, the others get their shares, and all is loaded from all. */
static void cluster(void **state) {
    (void)state;
    kvft_cluster *c = kvft_cluster_start(false);
    kvf_stats stats = {.struct_size = sizeof stats};
    for (int i = 0; i < KVFT_SHARDS; i++) {
        say(c->nodes[i], "CONFIG SET maxmemory 4gb");
    }
    say(c->nodes[1], "CONFIG SET maxmemory-policy noeviction");
    logged[0] = '\0';
    kvf_store *store = kvft_store(c->url);
    kvf_space *space = kvft_space(store, "m", 16);
    kvft_prompt *p = kvft_prompt_new(space, 1, 60, 100000);
    assert_int_equal(kvf_save(space, p->blocks, 60, NULL), 60);
    assert_true(kvft_flush(store) > 0);
    kvf_store_stats(store, &stats);
    assert_non_null(strstr(logged, "noeviction"));
    assert_int_equal(kvft_server_say(c->nodes[1], "DBSIZE")[1] - '0', 0);
    assert_true(stats.save_failures[KVF_WHY_SETTINGS] > 5);
    assert_true(stats.saved > 20);
    say(c->nodes[1], "CONFIG SET maxmemory-policy allkeys-lru");
    kvft_nap_ms(2100);            /* the longest that it is not asked */
    for (int i = 0; i < 2; i++) { /* the first of the writers asks for all; it is not waited for */
        assert_int_equal(kvf_save(space, p->blocks, 60, NULL), 60);
        (void)kvft_flush(store);
    }
    kvft_prompt_poison(p);
    assert_int_equal(kvf_load(space, p->blocks, 60, NULL, KVF_MS(20000)), 60);
    assert_int_equal(kvft_prompt_wrong(p, 1, 60), 0);
    kvft_prompt_free(p);
    kvf_space_close(space);
    kvf_store_close(store);
    /* One of its nodes, named as if it were alone. */
    kvfi_tier *tier = kvft_tier(c->nodes[0]->unix_url);
    assert_int_equal(examine(tier, "cluster").severity, KVF_WARNING);
    tier->ops->close(tier);
    kvft_cluster_stop(c);
}

static int tear_down(void **state) {
    (void)state;
    kvf_set_log(NULL, NULL, KVF_LOG_ERROR);
    kvft_server_stop(server);
    return 0;
}

#define LIVE(name) cmocka_unit_test_setup_teardown(name, begin, end)

/* ---- what mends it is a command to type ---- */

static void a_mend_is_typed(void **state) {
    (void)state;
    if (system("command -v redis-cli >/dev/null") != 0) {
        skip();
    }
    const char *const urls[] = {server->tcp_url, server->unix_url};
    for (size_t i = 0; i < 2; i++) {
        say_all("CONFIG SET maxmemory 4gb;CONFIG SET maxmemory-policy noeviction");
        kvfi_tier *tier = kvft_tier(urls[i]);
        seen s = examine(tier, "noeviction");
        char *end = strstr(s.mend, " (volatile-lru");
        assert_non_null(end);
        *end = '\0';
        char command[400];
        snprintf(command, sizeof command, "%s >/dev/null", s.mend);
        assert_int_equal(system(command), 0);
        assert_int_equal(examine(tier, "noeviction").severity, KVF_FINE);
        tier->ops->close(tier);
    }
}

/* Whoever may not use CONFIG is told the line of redis.conf, and the password is in no text. */
static void a_mend_without_config(void **state) {
    (void)state;
    kvfi_tier *tier = NULL;
    say_all("CONFIG SET maxmemory 4gb;CONFIG SET maxmemory-policy noeviction");
    say(server, "ACL SETUSER reader on >s3cret ~* +@all -config");
    assert_int_equal(kvft_try_tier(&tier, &err, "redis://reader:s3cret@127.0.0.1:%d", server->port), KVF_OK);
    seen s = examine(tier, "noeviction");
    assert_non_null(strstr(s.mend, "in redis.conf: maxmemory-policy allkeys-lru"));
    assert_null(strstr(s.mend, "CONFIG SET"));
    s = examine(tier, "no-config");
    char command[128];
    snprintf(command, sizeof command, "redis-cli -p %d --user reader --askpass ACL SETUSER reader '+config|get'",
             server->port);
    assert_string_equal(s.mend, command);
    tier->ops->close(tier);
    (void)kvft_server_say(server, "ACL DELUSER reader");
    say_all(WELL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        LIVE(a_mend_is_typed),
        LIVE(a_mend_without_config),
        LIVE(policies),
        LIVE(memory),
        LIVE(limits),
        LIVE(disk),
        LIVE(replica),
        LIVE(loading),
        LIVE(failed_snapshot),
        LIVE(failed_log),
        LIVE(replicas),
        LIVE(threads),
        LIVE(swap),
        LIVE(swap_here),
        LIVE(without_rights),
        LIVE(fitted_to_output_limit),
        LIVE(fitted_to_bulk_limit),
        LIVE(budget),
        LIVE(budget_of_a_batch),
        LIVE(found_later),
        LIVE(round_trips),
        LIVE(cluster),
    };
    server = kvft_server_start(NULL);
    if (server == NULL) {
        fprintf(stderr, "no redis-server is installed: not run\n");
        return 77;
    }
    kvf_set_log(keep_log, NULL, KVF_LOG_INFO);
    return cmocka_run_group_tests(tests, NULL, tear_down);
}
