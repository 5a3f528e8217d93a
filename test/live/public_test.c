/* SPDX-License-Identifier: Apache-2.0
 *
 * Faults that are met in public, each by the input that failed. The number in a name is that of `make
 * check-faults-public`, which runs them (docs/checks.md).
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "redis/redis.h"
#include "support/cluster.h"
#include "support/kit.h"
#include "support/proxy.h"
#include "support/server.h"
#include "support/tiers.h"

#define BLOCKS  12u
#define PAYLOAD 70000u

static kvf_error err;

/* All of a prompt is saved and loaded by a store of its own, with no reason counted. */
static void saves_and_loads(const char *url) {
    kvf_store *store = kvft_store(url);
    kvf_space *space = kvft_space(store, "m", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 3, BLOCKS, PAYLOAD);
    kvft_save_all(space, store, prompt);
    kvft_prompt_poison(prompt);
    assert_int_equal(kvf_load(space, prompt->blocks, BLOCKS, NULL, 10000), BLOCKS);
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

/* What the doctor says of it. */
static findings doctor(const char *url) {
    findings all = {.worst = KVF_FINE};
    kvfi_tier *tier = kvft_tier(url);
    tier->ops->doctor(tier, note, &all);
    tier->ops->close(tier);
    return all;
}

static bool has(const findings *all, const char *code) {
    return strstr(all->codes, code) != NULL;
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
    findings all = doctor(server->tcp_url);
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

/* ---- 1 and 2: a proxy that breaks a connection off, or is silent, when it sees a command that it does not know ---- */

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
        findings all = doctor(urls[i]);
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
    /* The server would let him in as `default`: who he says he is counts. */
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
        {"redis+cluster://u:p@h1:1,u:p@h2:2", "once, in front"},
        {"redis+cluster://u:p@h1:1,h2:2,u:p@h3:3", "once, in front"},
        {"redis+cluster://h1:1,u:p@h2:2", "once, in front"},
        {"redis+sentinel://u@h1,u@h2/m", "once, in front"},
        {"redis+cluster://h1/3", "one database"},
        {"redis+cluster://h1?db=3", "one database"},
        {"redis://h/1?db=2", "twice"},
        {"redis://h?lend=false", "unix sockets"},
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
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
