/* SPDX-License-Identifier: Apache-2.0
 *
 * Faults that users have reported, each by the input that failed. The number in a name is that of `make
 * check-faults-public`, which runs them (docs/testing.md).
 */
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "redis/blocks/blocks.h"
#include "support/cluster.h"
#include "support/kit.h"
#include "support/proxy.h"
#include "support/server.h"
#include "support/tiers.h"

#define BLOCKS  12u
#define PAYLOAD 70000u

static kvf_error err;

/* A server that is slow beside other programs is a silent one, and left alone for a while. That passes. */
static bool is_passing(kvf_reason why) {
    return why == KVF_WHY_STALLED || why == KVF_WHY_BREAKER;
}

static size_t load_all(kvf_space *space, kvft_prompt *prompt) {
    double from = kvft_now_ms();
    for (;;) {
        kvft_prompt_poison(prompt);
        size_t run = kvf_load(space, prompt->blocks, BLOCKS, NULL, KVF_MS(10000));
        if (run == BLOCKS || !is_passing(prompt->blocks[run].why) || kvft_now_ms() - from > KVFT_PATIENCE_MS) {
            return run;
        }
        kvft_nap_ms(20);
    }
}

/* All of a prompt is saved and loaded by a store of its own. */
static void saves_and_loads(const char *url) {
    kvf_store *store = kvft_store(url);
    kvf_space *space = kvft_space(store, "m", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 3, BLOCKS, PAYLOAD);
    kvft_save_all(space, store, prompt);
    assert_int_equal(load_all(space, prompt), BLOCKS);
    assert_int_equal(kvft_prompt_wrong(prompt, 3, BLOCKS), 0);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
}

typedef struct findings {
    char codes[600];
    kvf_severity worst;
} findings;

static void note(void *ctx, const kvf_finding *finding) {
    findings *all = ctx;
    size_t len = strlen(all->codes);
    snprintf(all->codes + len, sizeof all->codes - len, " %s", finding->code);
    all->worst = finding->severity > all->worst ? finding->severity : all->worst;
}

static bool has(const findings *all, const char *code) {
    return strstr(all->codes, code) != NULL;
}

/* What the doctor says of it. */
static findings doctor(const char *url) {
    findings all = {.worst = KVF_FINE};
    kvfi_tier *tier = kvft_tier(url);
    tier->ops->doctor(tier, note, &all);
    tier->ops->close(tier);
    return all;
}

/* The same of a server that is not stopped: where it seems so, it is asked again. */
static findings doctor_of_running(const char *url) {
    double from = kvft_now_ms();
    findings all = doctor(url);
    while (has(&all, "stalled") && kvft_now_ms() - from < KVFT_PATIENCE_MS) {
        all = doctor(url);
    }
    return all;
}

/* ---- 1: CLIENT is not there ---- */

static void test_public_1_client_is_renamed_away(void **state) {
    (void)state;
    const char *const args[] = {"--rename-command", "CLIENT", "", NULL};
    kvft_server *server = kvft_server_start(args);
    if (server == NULL) {
        skip();
    }
    saves_and_loads(server->unix_url);
    findings all = doctor_of_running(server->tcp_url);
    assert_true(has(&all, "no-name"));
    assert_false(has(&all, "unreachable"));
    kvft_server_stop(server);
}

static void test_public_1_client_is_forbidden(void **state) {
    (void)state;
    char url[128];
    kvft_server *server = kvft_server_start(NULL);
    if (server == NULL) {
        skip();
    }
    assert_string_equal(kvft_server_say(server, "ACL SETUSER ann on >pw ~* +@all -client -ping"), "+OK");
    snprintf(url, sizeof url, "redis://ann:pw@127.0.0.1:%d", server->port);
    saves_and_loads(url);
    kvft_server_stop(server);
}

/* ---- 1 and 2: a proxy that breaks a connection off, or is silent, when it sees an unknown command ---- */

static void test_probe(const char *command, const char *code, bool silent) {
    kvft_server *server = kvft_server_start(NULL);
    if (server == NULL) {
        skip();
    }
    kvft_proxy *proxy = kvft_proxy_start(server->socket);
    kvft_proxy_set(proxy, &(kvft_plan){.breaks_on = command, .silent = silent});
    const char *urls[] = {kvft_proxy_unix_url(proxy), kvft_proxy_tcp_url(proxy)};
    for (size_t i = 0; i < 2; i++) {
        saves_and_loads(urls[i]);
        findings all = doctor_of_running(urls[i]);
        if (!has(&all, code) || has(&all, "unreachable")) {
            fail_msg("%s, %s: the doctor says%s", command, silent ? "silent" : "closed", all.codes);
        }
    }
    /* It is remembered: a connection that is made later sends it no more. */
    kvfi_tier *tier = kvft_tier(urls[1]);
    assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
    uint64_t before = kvft_proxy_stats_get(proxy).faults;
    kvft_proxy_cut(proxy);
    while (kvft_proxy_stats_get(proxy).open > 0) {
        kvft_nap_ms(5);
    }
    kvfi_redis_of(tier)->node.admission.known = false; /* as after a failure: the next save would ask again */
    uint64_t after_cut = kvft_proxy_stats_get(proxy).faults;
    assert_true(after_cut > before);
    assert_int_equal(kvft_get(tier, 1, 1000), KVF_WHY_NONE);
    assert_int_equal(kvft_put(tier, 2, 1000), KVF_WHY_NONE);
    assert_int_equal(kvft_proxy_stats_get(proxy).faults, after_cut);
    tier->ops->close(tier);
    kvft_proxy_stop(proxy);
    kvft_server_stop(server);
}

static void test_public_1_client_ends_the_connection(void **state) {
    (void)state;
    test_probe("CLIENT", "no-name", false);
}

static void test_public_1_client_is_met_with_silence(void **state) {
    (void)state;
    test_probe("CLIENT", "no-name", true);
}

static void test_public_2_info_ends_the_connection(void **state) {
    (void)state;
    test_probe("INFO", "no-info", false);
}

static void test_public_2_info_is_met_with_silence(void **state) {
    (void)state;
    test_probe("INFO", "no-info", true);
}

static void test_public_2_config_ends_the_connection(void **state) {
    (void)state;
    test_probe("CONFIG", "no-config", false);
}

static void test_public_2_config_is_met_with_silence(void **state) {
    (void)state;
    test_probe("CONFIG", "no-config", true);
}

/* A server that was well and is then away is not taken for one that does not answer questions. */
static void test_public_2_a_dead_server_is_not_mute(void **state) {
    (void)state;
    kvft_server *server = kvft_server_start(NULL);
    if (server == NULL) {
        skip();
    }
    kvfi_tier *tier = kvft_tier(server->unix_url);
    kvft_server_kill(server);
    (void)kvft_put(tier, 1, 1000);
    kvft_server_restart(server);
    assert_int_equal(kvft_put_again(tier, 1, 1000), KVF_WHY_NONE);
    kvfi_redis *redis = kvfi_redis_of(tier);
    assert_int_equal(redis->node.mute, 0);
    tier->ops->close(tier);
    kvft_server_stop(server);
}

/* ---- 5: what a URL says ---- */

static void test_public_5_a_user_without_a_password(void **state) {
    (void)state;
    char url[128];
    kvft_server *server = kvft_server_start(NULL);
    if (server == NULL) {
        skip();
    }
    assert_string_equal(kvft_server_say(server, "ACL SETUSER free on nopass ~kvf1:* +@all"), "+OK");
    assert_string_equal(kvft_server_say(server, "ACL SETUSER default off"), "+OK");
    snprintf(url, sizeof url, "redis://free@127.0.0.1:%d", server->port);
    saves_and_loads(url);
    snprintf(url, sizeof url, "redis+unix://free@%s", server->socket);
    saves_and_loads(url);
    /* The server would accept him as `default`, but must log him in as the user in the URL. */
    kvft_server_restart(server);
    kvfi_tier *tier = NULL;
    assert_int_equal(kvft_try_tier(&tier, &err, "redis://nobody@127.0.0.1:%d", server->port), KVF_CONFIG);
    assert_non_null(strstr(err.what, "user or password refused"));
    kvft_server_stop(server);
}

static void test_public_5_nothing_is_dropped_in_silence(void **state) {
    (void)state;
    static const struct {
        const char *url, *word;
    } cases[] = {
        {"redis://a,b", "+cluster://"},
        {"redis://a:1,b:2/0", "+sentinel://"},
        {"rediss://a,b", "+cluster://"},
        {"redis+cluster://u:p@h1:1,u:p@h2:2", "once, before"},
        {"redis+cluster://u:p@h1:1,h2:2,u:p@h3:3", "once, before"},
        {"redis+cluster://h1:1,u:p@h2:2", "once, before"},
        {"redis+sentinel://u@h1,u@h2/m", "once, before"},
        {"redis+cluster://h1/3", "one database"},
        {"redis+cluster://h1?db=3", "one database"},
        {"redis://h/1?db=2", "twice"},
        {"rediss://h?lend=false", "over TLS"},
        {"redis://@h", "neither a user"},
        {"redis+unix://@/run/s", "neither a user"},
        {"redis://h#1", "%23"},
        {"redis+cluster://h1,,h2", "is not host"},
        {"redis+cluster://h1,", "is not host"},
        {"redis+sentinel://,h1/m", "is not host"},
        {"redis://:6379", "is not host"},
        {"redis://h:", "port"},
        {"redis://h?sentinel_user=u", "no parameter"},
        {"redis+unix:///run/s?ssl_ca_certs=x", "no parameter"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvfi_tier *tier = NULL;
        err.what[0] = '\0';
        if (kvft_try_tier(&tier, &err, "%s", cases[i].url) != KVF_CONFIG || strstr(err.what, cases[i].word) == NULL) {
            fail_msg("%s: \"%s\" does not say \"%s\"", cases[i].url, err.what, cases[i].word);
        }
    }
}

/* ---- 6: a Cluster that does not know where one of its nodes is ---- */

/* Of three shards two are announced by a host name, and the third has none: "?" stands in its place. */
static void test_public_6_a_shard_without_a_host(void **state) {
    (void)state;
    kvft_cluster *cluster = kvft_cluster_start(false);
    if (cluster == NULL) {
        skip();
    }
    for (int i = 0; i < KVFT_SHARDS; i++) {
        if (kvft_server_say(cluster->nodes[i], "CONFIG SET cluster-preferred-endpoint-type hostname")[0] == '-') {
            kvft_cluster_stop(cluster);
            skip(); /* an old server */
        }
        if (i < 2) {
            assert_string_equal(kvft_server_say(cluster->nodes[i], "CONFIG SET cluster-announce-hostname localhost"),
                                "+OK");
        }
    }
    for (int i = 0; i < KVFT_SHARDS; i++) {
        size_t names = 0;
        for (int tries = 0; names != 2 && tries < 2000; tries++) {
            char *text = kvft_server_ask(cluster->nodes[i], "CLUSTER SLOTS");
            names = 0;
            for (const char *at = text; (at = strstr(at, "localhost")) != NULL; at++) {
                names++;
            }
            free(text);
            kvft_nap_ms(5);
        }
        assert_int_equal(names, 2);
    }
    kvfi_tier *tier = kvft_tier(cluster->url);
    size_t stored = 0;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        stored += kvft_put(tier, seed, 2000) == KVF_WHY_NONE && kvft_get(tier, seed, 2000) == KVF_WHY_NONE;
    }
    if (stored < 20 || stored == 60) {
        fail_msg("%zu of 60 values on the two shards that are known", stored);
    }
    tier->ops->close(tier);
    kvft_cluster_stop(cluster);
}

/* Behind one address that the Cluster does not know: no host at all means the one that was asked. */
static void test_public_6_no_host_is_the_same_host(void **state) {
    (void)state;
    kvft_cluster *cluster = kvft_cluster_start(false);
    if (cluster == NULL) {
        skip();
    }
    for (int i = 0; i < KVFT_SHARDS; i++) {
        if (kvft_server_say(cluster->nodes[i], "CONFIG SET cluster-preferred-endpoint-type unknown-endpoint")[0] ==
            '-') {
            kvft_cluster_stop(cluster);
            skip();
        }
    }
    saves_and_loads(cluster->url);
    kvft_cluster_stop(cluster);
}

/* ---- 9: a server that is slow to answer ---- */

static char last_warning[300];

static void keep_warning(void *ctx, kvf_log_level level, const char *message) {
    (void)ctx;
    if (level <= KVF_LOG_WARN && (strstr(message, "stalled") != NULL || strstr(message, "broke") != NULL)) {
        snprintf(last_warning, sizeof last_warning, "%s", message);
    }
}

typedef struct place {
    kvft_server *server;
    kvft_proxy *proxy;
    kvf_store *store;
    kvf_space *space;
    kvft_prompt *prompt;
} place;

/* A prompt that is stored, and a store of its own that reaches it through a proxy. */
static bool open_place(place *p, const char *params, size_t payload, bool tcp) {
    char url[256];
    p->server = kvft_server_start(NULL);
    if (p->server == NULL) {
        return false;
    }
    p->proxy = kvft_proxy_start(p->server->socket);
    kvf_store *first = kvft_store(p->server->unix_url);
    kvf_space *space = kvft_space(first, "m", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 3, BLOCKS, payload);
    kvft_save_all(space, first, prompt);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(first);
    snprintf(url, sizeof url, "%s?%s", tcp ? kvft_proxy_tcp_url(p->proxy) : kvft_proxy_unix_url(p->proxy), params);
    p->store = kvft_store(url);
    p->space = kvft_space(p->store, "m", 16);
    p->prompt = kvft_prompt_new(p->space, 3, BLOCKS, payload);
    return true;
}

static void close_place(place *p) {
    kvft_prompt_free(p->prompt);
    kvf_space_close(p->space);
    kvf_store_close(p->store);
    kvft_proxy_stop(p->proxy);
    kvft_server_stop(p->server);
}

static size_t load(place *p, uint32_t budget_ms) {
    kvft_prompt_poison(p->prompt);
    size_t run = kvf_load(p->space, p->prompt->blocks, BLOCKS, NULL, KVF_MS(budget_ms));
    assert_int_equal(kvft_prompt_wrong(p->prompt, 3, run), 0);
    return run;
}

/* Every answer is later than stall_ms: from the first connection on. */
static void test_public_9_a_long_round_trip(void **state) {
    (void)state;
    place p;
    kvft_server *server = kvft_server_start(NULL);
    if (server == NULL) {
        skip();
    }
    kvft_proxy *proxy = kvft_proxy_start(server->socket);
    kvft_proxy_set(proxy, &(kvft_plan){.latency_ms = 350});
    saves_and_loads(kvft_proxy_tcp_url(proxy));
    findings all = doctor_of_running(kvft_proxy_tcp_url(proxy));
    assert_false(has(&all, "unreachable"));
    assert_false(has(&all, "stalled"));
    kvft_proxy_stop(proxy);
    kvft_server_stop(server);
    /* It grows longer under way. */
    if (open_place(&p, "", PAYLOAD, true)) {
        assert_int_equal(load(&p, 10000), BLOCKS);
        kvft_proxy_set(p.proxy, &(kvft_plan){.latency_ms = 350});
        assert_int_equal(load(&p, 20000), BLOCKS);
        close_place(&p);
    }
}

typedef struct nap {
    kvft_server *server;
    atomic_bool done;
} nap;

/* The host has no time for the server: it stands still for longer than stall_ms, again and again. */
static void *naps(void *arg) {
    nap *n = arg;
    while (!atomic_load(&n->done)) {
        kvft_server_signal(n->server, SIGSTOP);
        kvft_nap_ms(400);
        kvft_server_signal(n->server, SIGCONT);
        kvft_nap_ms(30);
    }
    return NULL;
}

static void test_public_9_a_busy_host(void **state) {
    (void)state;
    place p;
    if (!open_place(&p, "", 1 << 20, false)) {
        skip();
    }
    nap n = {.server = p.server};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, naps, &n), 0);
    for (int i = 0; i < 3; i++) {
        size_t run = load(&p, 20000);
        if (run < BLOCKS) {
            atomic_store(&n.done, true);
            pthread_join(thread, NULL);
            fail_msg("load %d: %zu of %u blocks: %s", i, run, BLOCKS, kvf_reason_name(p.prompt->blocks[run].why));
        }
    }
    atomic_store(&n.done, true);
    pthread_join(thread, NULL);
    close_place(&p);
}

static void *nap_once(void *arg) {
    nap *n = arg;
    kvft_nap_ms(300);
    kvft_server_signal(n->server, SIGSTOP);
    kvft_nap_ms(700);
    kvft_server_signal(n->server, SIGCONT);
    return NULL;
}

/* A server that was quick until then, and pauses in the middle of a load for longer than that lets expect. */
static void test_public_9_a_pause_in_the_middle(void **state) {
    (void)state;
    place p;
    pthread_t thread;
    if (!open_place(&p, "", 200000, false)) {
        skip();
    }
    nap n = {.server = p.server};
    assert_int_equal(load(&p, 10000), BLOCKS);
    kvft_proxy_set(p.proxy, &(kvft_plan){.bytes_per_s = 2000000});
    assert_int_equal(pthread_create(&thread, NULL, nap_once, &n), 0);
    size_t run = load(&p, 20000);
    pthread_join(thread, NULL);
    if (run < BLOCKS) {
        fail_msg("%zu of %u blocks: %s", run, BLOCKS, kvf_reason_name(p.prompt->blocks[run].why));
    }
    close_place(&p);
}

/* A server that does not come back is told from one that has broken off: by reason, log and doctor; and no call waits
 * longer than its budget. */
static void test_public_9_stalled_is_not_broken(void **state) {
    (void)state;
    place p;
    if (!open_place(&p, "stall_ms=100&connect_ms=300", PAYLOAD, false)) {
        skip();
    }
    kvf_set_log(keep_warning, NULL, KVF_LOG_WARN);
    assert_int_equal(load(&p, 10000), BLOCKS);
    kvft_server_signal(p.server, SIGSTOP);
    double begin = kvft_now_ms();
    assert_int_equal(load(&p, 2 * KVFT_PATIENCE_MS), 0);
    assert_true(kvft_now_ms() - begin < KVFT_PATIENCE_MS);
    assert_int_equal(p.prompt->blocks[0].why, KVF_WHY_STALLED);
    assert_string_equal(kvf_reason_name(KVF_WHY_STALLED), "stalled");
    char url[256];
    snprintf(url, sizeof url, "%s?stall_ms=100&connect_ms=300", p.server->unix_url);
    findings all = doctor(url);
    assert_true(has(&all, "stalled"));
    assert_false(has(&all, "unreachable"));
    kvft_server_signal(p.server, SIGCONT);
    begin = kvft_now_ms();
    while (load(&p, 5000) < BLOCKS && kvft_now_ms() - begin < 10000) {
        kvft_nap_ms(20);
    }
    last_warning[0] = '\0';
    kvft_proxy_set(p.proxy, &(kvft_plan){.cut_after = 100000});
    assert_true(load(&p, 10000) < BLOCKS);
    bool told = false;
    for (size_t i = 0; i < BLOCKS; i++) {
        told = told || p.prompt->blocks[i].why == KVF_WHY_UNREACHABLE;
    }
    assert_true(told);
    assert_non_null(strstr(last_warning, "broke"));
    kvft_server_kill(p.server);
    all = doctor(url);
    assert_true(has(&all, "unreachable"));
    assert_false(has(&all, "stalled"));
    kvf_set_log(NULL, NULL, KVF_LOG_WARN);
    close_place(&p);
}

static void test_public_9_never_beyond_the_budget(void **state) {
    (void)state;
    place p;
    if (!open_place(&p, "", PAYLOAD, true)) {
        skip();
    }
    kvft_proxy_set(p.proxy, &(kvft_plan){.latency_ms = 300});
    assert_int_equal(load(&p, 20000), BLOCKS); /* patience is seconds from now on */
    kvft_server_signal(p.server, SIGSTOP);
    double begin = kvft_now_ms();
    assert_int_equal(load(&p, 500), 0);
    double spent = kvft_now_ms() - begin;
    kvft_server_signal(p.server, SIGCONT);
    if (spent > 500 + 1000) { /* of a busy machine */
        fail_msg("a load took %.0f ms of a budget of 500", spent);
    }
    close_place(&p);
}

/* Every connection stalls in the middle of an answer: once that is forgiven, not again and again as long as the budget
 * lasts. */
static void test_public_9_each_connection_stalls(void **state) {
    (void)state;
    place p;
    if (!open_place(&p, "conns=1", PAYLOAD, true)) {
        skip();
    }
    kvft_proxy_set(p.proxy, &(kvft_plan){.stall_after = 1000});
    double begin = kvft_now_ms();
    assert_int_equal(load(&p, 20000), 0);
    double spent = kvft_now_ms() - begin;
    assert_int_equal(p.prompt->blocks[0].why, KVF_WHY_STALLED);
    if (spent > 10000) {
        fail_msg("a load took %.0f ms", spent);
    }
    close_place(&p);
}

/* What stalls under a store that closes is not tried on another connection: nobody waits for it. */
static void test_public_9_a_store_that_closes_retries_nothing(void **state) {
    (void)state;
    place p;
    if (!open_place(&p, "", PAYLOAD, true)) {
        skip();
    }
    char url[256];
    const char *urls[] = {url};
    kvf_store *store = NULL;
    kvf_options options = {.struct_size = sizeof options, .drain_us = KVF_MS(1)};
    snprintf(url, sizeof url, "%s?stall_ms=200&conns=1", kvft_proxy_tcp_url(p.proxy));
    assert_int_equal(kvf_store_open(&store, NULL, urls, 1, &options), KVF_OK);
    kvf_space *space = kvft_space(store, "m", 16);
    kvft_prompt *first = kvft_prompt_new(space, 50, 1, PAYLOAD), *last = kvft_prompt_new(space, 51, 1, PAYLOAD);
    kvft_save_all(space, store, first); /* there is a connection for saves now */
    /* It is known to be missing, so nobody looks whether it is there before it is sent. */
    assert_int_equal(kvf_load(space, last->blocks, 1, NULL, KVF_MS(5000)), 0);
    uint64_t before = kvft_proxy_stats_get(p.proxy).connections;
    kvft_proxy_set(p.proxy, &(kvft_plan){.breaks_on = "SET", .silent = true});
    assert_int_equal(kvf_save(space, last->blocks, 1, NULL), 1);
    while (kvft_proxy_stats_get(p.proxy).faults == 0) {
        kvft_nap_ms(1);
    }
    kvft_prompt_free(first);
    kvft_prompt_free(last);
    kvf_space_close(space);
    kvf_store_close(store);
    assert_int_equal(kvft_proxy_stats_get(p.proxy).connections, before);
    close_place(&p);
}

/* ---- 10: connections that lie idle and are gone, without a word ---- */

static void is_used_again(bool reset) {
    place p;
    if (!open_place(&p, "", PAYLOAD, true)) {
        skip();
    }
    for (uint64_t round = 0; round < 4; round++) {
        kvft_proxy_set(p.proxy, &(kvft_plan){.ends_old = round > 0, .reset = reset});
        /* Lookup, load and save have a connection each by then, and each has lain idle. */
        size_t run = 0;
        assert_int_equal(kvf_match(p.space, &run, NULL, p.prompt->keys, BLOCKS, KVF_MS(10000)), KVF_OK);
        assert_int_equal(run, BLOCKS);
        assert_int_equal(load(&p, 10000), BLOCKS);
        kvft_prompt *other = kvft_prompt_new(p.space, 100 + round, BLOCKS, PAYLOAD);
        kvft_save_all(p.space, p.store, other);
        kvft_prompt_free(other);
        kvft_nap_ms(300);
    }
    kvf_stats stats = {.struct_size = sizeof stats};
    kvf_store_stats(p.store, &stats);
    assert_int_equal(stats.save_failures[KVF_WHY_BREAKER], 0);
    assert_true(kvft_proxy_stats_get(p.proxy).faults > 0);
    close_place(&p);
}

/* What talks to a server one command after the other is told by a PING whether anybody listens. */
static void talks_again(bool reset) {
    place p;
    if (!open_place(&p, "", PAYLOAD, true)) {
        skip();
    }
    kvft_nap_ms(300);
    kvft_proxy_set(p.proxy, &(kvft_plan){.ends_old = true, .reset = reset});
    kvf_tier_info info = {.struct_size = sizeof info};
    assert_int_equal(kvf_tier_info_get(p.store, &info, 0), KVF_OK);
    assert_true(info.reachable);
    assert_true(info.used_bytes >= 0); /* it was heard */
    assert_int_equal(info.num_open, 0);
    assert_true(kvft_proxy_stats_get(p.proxy).faults > 0);
    close_place(&p);
}

static void test_public_10_a_talk_after_a_reset(void **state) {
    (void)state;
    talks_again(true);
}

static void test_public_10_a_talk_that_is_swallowed(void **state) {
    (void)state;
    talks_again(false);
}

static void test_public_10_idle_is_reset(void **state) {
    (void)state;
    is_used_again(true);
}

static void test_public_10_idle_is_swallowed(void **state) {
    (void)state;
    is_used_again(false);
}

/* It is learned: behind such a proxy a connection is closed before it has lain idle for so long. */
static void test_public_10_it_is_learned(void **state) {
    (void)state;
    place p;
    if (!open_place(&p, "", PAYLOAD, true)) {
        skip();
    }
    kvft_plan ends_old = {.ends_old = true};
    assert_int_equal(load(&p, 10000), BLOCKS);
    kvft_nap_ms(500);
    kvft_proxy_set(p.proxy, &ends_old);
    assert_int_equal(load(&p, 10000), BLOCKS);
    uint64_t faults = kvft_proxy_stats_get(p.proxy).faults;
    assert_true(faults > 0);
    kvft_nap_ms(1000);
    kvft_proxy_set(p.proxy, &ends_old);
    assert_int_equal(load(&p, 10000), BLOCKS);
    assert_int_equal(kvft_proxy_stats_get(p.proxy).faults, faults);
    close_place(&p);
}

/* ---- 11: a name with two addresses, of which the first is silent ---- */

static kvfi_systable two_faced;
static uint16_t silent_port;
static struct sockaddr_storage silent;
static _Atomic unsigned silent_tries;

static int resolve_both(const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **out) {
    struct addrinfo *second = NULL, numeric = *hints;
    if (strcmp(host, "both") != 0) {
        return kvfi_sys_real.resolve(host, service, hints, out);
    }
    if ((hints->ai_flags & AI_NUMERICHOST) != 0) {
        return EAI_NONAME;
    }
    numeric.ai_flags |= AI_NUMERICHOST;
    const char *first = silent.ss_family == AF_INET6 ? "::1" : "127.0.0.2";
    if (kvfi_sys_real.resolve(first, service, &numeric, out) != 0 ||
        kvfi_sys_real.resolve("127.0.0.1", service, &numeric, &second) != 0) {
        return EAI_NONAME;
    }
    (*out)->ai_next = second;
    return 0;
}

static bool is_silent(const struct sockaddr *address) {
    const struct sockaddr_in *in = (const void *)address, *ours = (const void *)&silent;
    return address->sa_family == silent.ss_family &&
           (address->sa_family == AF_INET6 || in->sin_addr.s_addr == ours->sin_addr.s_addr);
}

static int connect_counted(int fd, const struct sockaddr *address, socklen_t len) {
    silent_tries += is_silent(address);
    return kvfi_sys_real.connect(fd, address, len);
}

/* A listener that does not accept, and whose queue is full: the system drops what else wants to connect. */
static int be_silent(uint16_t port, int fillers[4]) {
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT, .sin6_port = htons(port)};
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons(port)};
    socklen_t len = sizeof six;
    inet_pton(AF_INET, "127.0.0.2", &four.sin_addr);
    int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    memcpy(&silent, &six, sizeof six);
    if (fd < 0 || setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on) != 0 ||
        bind(fd, (struct sockaddr *)&six, sizeof six) != 0) {
        close(fd);
        fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        len = sizeof four;
        memcpy(&silent, &four, sizeof four);
        assert_int_equal(bind(fd, (struct sockaddr *)&four, sizeof four), 0);
    }
    assert_int_equal(listen(fd, 0), 0);
    for (int i = 0; i < 4; i++) {
        fillers[i] = socket(silent.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        (void)connect(fillers[i], (struct sockaddr *)&silent, len);
    }
    return fd;
}

static void test_public_11_a_silent_address(void **state) {
    (void)state;
    int fillers[4];
    char url[128];
    kvft_server *server = kvft_server_start(NULL);
    if (server == NULL) {
        skip();
    }
    kvft_proxy *proxy = kvft_proxy_start(server->socket);
    silent_port = (uint16_t)atoi(strrchr(kvft_proxy_tcp_url(proxy), ':') + 1);
    int listener = be_silent(silent_port, fillers);
    two_faced = kvfi_sys_real;
    two_faced.resolve = resolve_both;
    two_faced.connect = connect_counted;
    kvfi_sys_table = &two_faced;
    snprintf(url, sizeof url, "redis://both:%u", silent_port);
    silent_tries = 0;
    kvfi_tier *tier = kvft_tier(url);
    assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
    assert_true(silent_tries > 0);
    /* The store knows which address answers, so no new connection tries the other one. */
    unsigned before = silent_tries;
    for (int i = 0; i < 3; i++) {
        kvft_proxy_cut(proxy);
        while (kvft_proxy_stats_get(proxy).open > 0) {
            kvft_nap_ms(2);
        }
        assert_int_equal(kvft_get(tier, 1, 1000), KVF_WHY_NONE);
        assert_int_equal(kvft_peek(tier, 1), KVF_WHY_NONE);
        assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
    }
    assert_int_equal(silent_tries, before);
    tier->ops->close(tier);
    kvfi_sys_table = &kvfi_sys_real;
    for (int i = 0; i < 4; i++) {
        close(fillers[i]);
    }
    close(listener);
    kvft_proxy_stop(proxy);
    kvft_server_stop(server);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_public_1_client_is_renamed_away),
        cmocka_unit_test(test_public_1_client_is_forbidden),
        cmocka_unit_test(test_public_1_client_ends_the_connection),
        cmocka_unit_test(test_public_1_client_is_met_with_silence),
        cmocka_unit_test(test_public_2_info_ends_the_connection),
        cmocka_unit_test(test_public_2_info_is_met_with_silence),
        cmocka_unit_test(test_public_2_config_ends_the_connection),
        cmocka_unit_test(test_public_2_config_is_met_with_silence),
        cmocka_unit_test(test_public_2_a_dead_server_is_not_mute),
        cmocka_unit_test(test_public_5_a_user_without_a_password),
        cmocka_unit_test(test_public_5_nothing_is_dropped_in_silence),
        cmocka_unit_test(test_public_6_a_shard_without_a_host),
        cmocka_unit_test(test_public_6_no_host_is_the_same_host),
        cmocka_unit_test(test_public_9_a_long_round_trip),
        cmocka_unit_test(test_public_9_a_busy_host),
        cmocka_unit_test(test_public_9_a_pause_in_the_middle),
        cmocka_unit_test(test_public_9_stalled_is_not_broken),
        cmocka_unit_test(test_public_9_never_beyond_the_budget),
        cmocka_unit_test(test_public_9_each_connection_stalls),
        cmocka_unit_test(test_public_9_a_store_that_closes_retries_nothing),
        cmocka_unit_test(test_public_10_idle_is_reset),
        cmocka_unit_test(test_public_10_idle_is_swallowed),
        cmocka_unit_test(test_public_10_it_is_learned),
        cmocka_unit_test(test_public_10_a_talk_after_a_reset),
        cmocka_unit_test(test_public_10_a_talk_that_is_swallowed),
        cmocka_unit_test(test_public_11_a_silent_address),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
