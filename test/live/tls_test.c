/* SPDX-License-Identifier: Apache-2.0
 *
 * check-tls: faults are refused with their reason, and valid settings work on a single server, in a Cluster and behind
 * sentinels. TLS loses no byte when the network divides everything into pieces. The certificates are made in a
 * temporary folder.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "redis/blocks/blocks.h"
#include "redis/redis.h"
#include "support/cluster.h"
#include "support/faults.h"
#include "support/kit.h"
#include "support/tiers.h"

#define HOUR_S 3600L
#define NAMES  "DNS:localhost,IP:127.0.0.1"

static kvft_certs *certs;
static unsigned num_refused, num_working;
static char logged[4096];

static void keep_log(void *ctx, kvf_log_level level, const char *message) {
    (void)ctx;
    size_t len = strlen(logged);
    snprintf(logged + len, sizeof logged - len, "%d %s\n", (int)level, message);
}

/* ---- helpers ---- */

static kvf_error err;

/* KVF_CONFIG, and the sentence has both words. */
static void refused(kvf_status status, const char *reason, const char *mend) {
    if (status != KVF_CONFIG || strstr(err.what, reason) == NULL || strstr(err.what, mend) == NULL) {
        fail_msg("status %d, \"%s\" does not say \"%s\" and \"%s\"", (int)status, err.what, reason, mend);
    }
    assert_null(strstr(err.what, "hunter2"));
    printf("refused: %s\n", err.what);
    num_refused++;
}

static void works(kvf_status status, kvfi_tier **opened, uint64_t seed) {
    if (status != KVF_OK) {
        fail_msg("%s", err.what);
    }
    kvfi_tier *tier = *opened;
    assert_int_equal(kvft_put(tier, seed, 3 << 20), KVF_WHY_NONE);
    assert_int_equal(kvft_peek(tier, seed), KVF_WHY_NONE);
    assert_int_equal(kvft_get(tier, seed, 3 << 20), KVF_WHY_NONE);
    tier->ops->close(tier);
}

static kvft_server *start(const char *cert, const char *const *args) {
    kvft_server_use_tls(certs, cert);
    kvft_server *server = kvft_server_start(args);
    kvft_server_use_tls(NULL, NULL);
    return server;
}

static kvft_server *start_right(void) {
    return start(kvft_certs_server(certs), NULL);
}

/* ---- refusals ---- */

static void unknown_ca(void **state) {
    (void)state;
    kvfi_tier *tier = NULL;
    kvft_server *server = start_right();
    refused(kvft_try_tier(&tier, &err, "rediss://127.0.0.1:%d?ssl_ca_certs=%s", server->port, certs->other_ca),
            "CA that is not trusted", "ssl_ca_certs");
    refused(kvft_try_tier(&tier, &err, "rediss://127.0.0.1:%d", server->port), "CA that is not trusted",
            "ssl_ca_certs");
    kvft_server_stop(server);
}

static void expired(void **state) {
    (void)state;
    kvfi_tier *tier = NULL;
    kvft_server *server = start(kvft_certs_make(certs, "old", NAMES, -48 * HOUR_S, -HOUR_S, 0, NULL), NULL);
    refused(kvft_try_tier(&tier, &err, "rediss://127.0.0.1:%d?ssl_ca_certs=%s", server->port, certs->ca),
            "expired on 20", "renew");
    kvft_server_stop(server);
    server = start(kvft_certs_make(certs, "young", NAMES, HOUR_S, 48 * HOUR_S, 0, NULL), NULL);
    refused(kvft_try_tier(&tier, &err, "rediss://127.0.0.1:%d?ssl_ca_certs=%s", server->port, certs->ca),
            "not valid before 20", "clock");
    kvft_server_stop(server);
}

static void wrong_host_name(void **state) {
    (void)state;
    kvfi_tier *tier = NULL;
    kvft_server *server =
        start(kvft_certs_make(certs, "far", "DNS:cache.example,IP:10.1.2.3", -HOUR_S, HOUR_S, 0, NULL), NULL);
    const char *ca = certs->ca;
    refused(kvft_try_tier(&tier, &err, "rediss://127.0.0.1:%d?ssl_ca_certs=%s", server->port, ca),
            "cache.example, 10.1.2.3, not for 127.0.0.1", "ssl_server_hostname");
    refused(kvft_try_tier(&tier, &err, "rediss://localhost:%d?ssl_ca_certs=%s", server->port, ca), "not for localhost",
            "ssl_server_hostname");
    refused(kvft_try_tier(&tier, &err, "rediss://127.0.0.1:%d?ssl_ca_certs=%s&ssl_server_hostname=other.example",
                          server->port, ca),
            "not for other.example", "connect by such a name");
    works(kvft_try_tier(&tier, &err, "rediss://127.0.0.1:%d?ssl_ca_certs=%s&ssl_server_hostname=cache.example",
                        server->port, ca),
          &tier, 1);
    works(kvft_try_tier(&tier, &err, "rediss://localhost:%d?ssl_ca_certs=%s&ssl_server_hostname=10.1.2.3", server->port,
                        ca),
          &tier, 1);
    works(
        kvft_try_tier(&tier, &err, "rediss://localhost:%d?ssl_ca_certs=%s&ssl_check_hostname=false", server->port, ca),
        &tier, 1);
    kvft_server_stop(server);
}

static void not_verified(void **state) {
    (void)state;
    kvfi_tier *tier = NULL;
    kvft_server *server = start_right();
    logged[0] = '\0';
    works(kvft_try_tier(&tier, &err, "rediss://127.0.0.1:%d?ssl_cert_reqs=none", server->port), &tier, 2);
    assert_non_null(strstr(logged, "1 ")); /* a warning */
    assert_non_null(strstr(logged, "not verified (ssl_cert_reqs=none)"));
    kvft_server_stop(server);
}

static void other_tongue(void **state) {
    (void)state;
    kvfi_tier *tier = NULL;
    kvft_server *plain = kvft_server_start(NULL), *server = start_right();
    refused(kvft_try_tier(&tier, &err, "rediss://127.0.0.1:%d?ssl_ca_certs=%s", plain->port, certs->ca),
            "speaks no TLS", "redis://");
    refused(kvft_try_tier(&tier, &err, "redis://127.0.0.1:%d", server->port), "speaks TLS", "rediss://");
    kvft_server_stop(plain);
    kvft_server_stop(server);
}

static void client_certificates(void **state) {
    (void)state;
    static const char *const args[] = {"--tls-auth-clients", "yes", NULL};
    kvfi_tier *tier = NULL;
    kvft_server *server = start(kvft_certs_server(certs), args);
    int port = server->port;
    const char *ca = certs->ca;
    const char *mine = kvft_certs_make(certs, "client", NULL, -HOUR_S, HOUR_S, 0, NULL);
    const char *strange = kvft_certs_make(certs, "strange", NULL, -HOUR_S, HOUR_S, 1, NULL);
    refused(kvft_try_tier(&tier, &err, "rediss://127.0.0.1:%d?ssl_ca_certs=%s", port, ca),
            "asks for a client certificate", "ssl_certfile");
    refused(kvft_try_tier(&tier, &err, "rediss://127.0.0.1:%d?ssl_ca_certs=%s&ssl_certfile=%s", port, ca, strange),
            "does not accept the client certificate", "tls-ca-cert-file");
    works(kvft_try_tier(&tier, &err, "rediss://127.0.0.1:%d?ssl_ca_certs=%s&ssl_certfile=%s&ssl_keyfile=%s", port, ca,
                        mine, mine),
          &tier, 3);
    works(kvft_try_tier(&tier, &err, "rediss://127.0.0.1:%d?ssl_ca_certs=%s&ssl_certfile=%s", port, ca, mine), &tier,
          3);
    refused(kvft_try_tier(&tier, &err, "rediss://127.0.0.1:%d?ssl_ca_certs=%s&ssl_certfile=%s&ssl_keyfile=%s", port, ca,
                          mine, strange),
            "not the one of", "ssl_certfile");
    const char *locked = kvft_certs_make(certs, "locked", NULL, -HOUR_S, HOUR_S, 0, "hunter2");
    refused(kvft_try_tier(&tier, &err, "rediss://127.0.0.1:%d?ssl_ca_certs=%s&ssl_certfile=%s", port, ca, locked),
            "encrypted", "ssl_password=");
    refused(kvft_try_tier(&tier, &err, "rediss://127.0.0.1:%d?ssl_ca_certs=%s&ssl_certfile=%s&ssl_password=hunter22",
                          port, ca, locked),
            "does not open it", "ssl_password=");
    assert_int_equal(kvft_try_tier(&tier, &err,
                                   "rediss://127.0.0.1:%d?ssl_certfile=%s&ssl_password=hunter2&ssl_ca_certs=%s", port,
                                   locked, ca),
                     KVF_OK);
    assert_null(strstr(tier->url->text, "hunter2"));
    works(KVF_OK, &tier, 3);
    kvft_server_stop(server);
    assert_null(strstr(logged, "hunter2"));
}

/* TLS 1.1 is over. This OpenSSL may not even let the server offer it; then there is nothing to refuse. */
static void old_protocol(void **state) {
    (void)state;
    static const char *const old[] = {"--tls-protocols", "TLSv1.1", "--tls-ciphers", "DEFAULT:@SECLEVEL=0", NULL};
    static const char *const v12[] = {"--tls-protocols", "TLSv1.2", NULL};
    kvfi_tier *tier = NULL;
    kvft_server *server = start(kvft_certs_server(certs), old);
    refused(kvft_try_tier(&tier, &err, "rediss://127.0.0.1:%d?ssl_ca_certs=%s", server->port, certs->ca), "TLS 1.2",
            "tls-protocols");
    kvft_server_stop(server);
    server = start(kvft_certs_server(certs), v12);
    works(kvft_try_tier(&tier, &err, "rediss://127.0.0.1:%d?ssl_ca_certs=%s", server->port, certs->ca), &tier, 4);
    kvft_server_stop(server);
}

static void files(void **state) {
    (void)state;
    kvfi_tier *tier = NULL;
    char path[128];
    refused(kvft_try_tier(&tier, &err, "rediss://localhost?ssl_ca_certs=/nonexistent/ca"),
            "ssl_ca_certs=/nonexistent/ca", "No such file");
    refused(kvft_try_tier(&tier, &err, "rediss://localhost?ssl_ca_certs=/tmp"), "ssl_ca_certs=/tmp", "PEM");
    refused(kvft_try_tier(&tier, &err, "rediss://localhost?ssl_ca_certs=/dev/null"), "/dev/null", "PEM");
    refused(kvft_try_tier(&tier, &err, "rediss://localhost?ssl_ca_path=/nonexistent"), "ssl_ca_path=/nonexistent",
            "No such file");
    refused(kvft_try_tier(&tier, &err, "rediss://localhost?ssl_ca_path=%s", certs->ca), "no folder", "ssl_ca_certs");
    refused(kvft_try_tier(&tier, &err, "rediss://localhost?ssl_certfile=/nonexistent/c"), "ssl_certfile=/nonexistent/c",
            "No such file");
    refused(kvft_try_tier(&tier, &err, "rediss://localhost?ssl_certfile=%s", certs->ca), "no private key",
            "ssl_keyfile");
    refused(kvft_try_tier(&tier, &err, "rediss://localhost?ssl_keyfile=/x"), "certificate beside it", "ssl_certfile");
    refused(kvft_try_tier(&tier, &err, "rediss://localhost?ssl_cert_reqs=maybe"), "ssl_cert_reqs", "required or none");
    refused(kvft_try_tier(&tier, &err, "rediss://localhost?ssl_check_hostname=1"), "ssl_check_hostname",
            "true or false");
    refused(kvft_try_tier(&tier, &err, "redis://localhost?ssl_ca_certs=/x"), "redis", "no parameter");
    snprintf(path, sizeof path, "%s/text", certs->dir);
    FILE *out = fopen(path, "w");
    fputs("-----BEGIN CERTIFICATE-----\nhello\n-----END CERTIFICATE-----\n", out);
    fclose(out);
    refused(kvft_try_tier(&tier, &err, "rediss://localhost?ssl_ca_certs=%s", path), path, "no certificate");
    if (geteuid() != 0 && chmod(path, 0) == 0) {
        refused(kvft_try_tier(&tier, &err, "rediss://localhost?ssl_ca_certs=%s", path), path, "Permission denied");
    }
}

/* ---- what works ---- */

/* Blocks, a session, and looking after, as an engine does it. */
static void live(const char *url, const char *what) {
    kvf_store *store = kvft_store(url);
    kvf_space *space = kvft_space(store, what, 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 7, 24, 300000);
    kvft_save_all(space, store, prompt);
    kvft_prompt_poison(prompt);
    assert_int_equal(kvf_load(space, prompt->blocks, 24, NULL, KVF_MS(20000)), 24);
    assert_int_equal(kvft_prompt_wrong(prompt, 7, 24), 0);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
    printf("works: %s\n", what);
    num_working++;
}

static void single(void **state) {
    (void)state;
    kvft_server *server = start_right();
    char url[400];
    snprintf(url, sizeof url, "rediss://localhost:%d?ssl_ca_certs=%s", server->port, certs->ca);
    live(url, "single");
    kvft_server_stop(server);
}

/* The second connection to a server resumes the session of the first. */
static void resumption(void **state) {
    (void)state;
    kvft_server *server = start_right();
    kvfi_tier *tier = NULL;
    assert_int_equal(kvft_try_tier(&tier, &err, "rediss://localhost:%d?ssl_ca_certs=%s", server->port, certs->ca),
                     KVF_OK);
    kvfi_redis *redis = kvfi_redis_of(tier);
    assert_int_equal(kvft_peek(tier, 1), KVF_WHY_ABSENT);
    assert_non_null(redis->node.peer.session);
    assert_int_equal(kvft_put(tier, 1, 100), KVF_WHY_NONE);
    assert_true(redis->node.lanes[KVFI_LANE_STORE].num_idle == 1);
    assert_true(kvfi_tls_is_resumed(redis->node.lanes[KVFI_LANE_STORE].idle[0]->tls));
    tier->ops->close(tier);
    kvft_server_stop(server);
}

static void in_a_cluster(void **state) {
    (void)state;
    char url[400];
    kvft_server_use_tls(certs, kvft_certs_server(certs));
    kvft_cluster *cluster = kvft_cluster_start(false);
    kvft_server_use_tls(NULL, NULL);
    snprintf(url, sizeof url, "%s?ssl_ca_certs=%s", cluster->url, certs->ca);
    live(url, "cluster");
    kvfi_tier *tier = NULL;
    refused(kvft_try_tier(&tier, &err, "%s?ssl_ca_certs=%s", cluster->url, certs->other_ca), "not trusted",
            "ssl_ca_certs");
    kvft_cluster_stop(cluster);
}

/* Nodes that are announced by name have certificates for that name, not for their addresses. */
static void cluster_names(void **state) {
    (void)state;
    char url[400];
    kvft_server_use_tls(certs, kvft_certs_make(certs, "node", "DNS:node.cache.example", -HOUR_S, HOUR_S, 0, NULL));
    kvft_cluster *cluster = kvft_cluster_start(false);
    kvft_server_use_tls(NULL, NULL);
    for (int i = 0; i < KVFT_SHARDS; i++) {
        kvft_server_say(cluster->nodes[i], "CONFIG SET cluster-announce-hostname node.cache.example");
    }
    /* By the announced names, over the addresses; the first contact has no announcement yet, and so a name from the
     * URL. */
    kvfi_tier *tier = NULL;
    refused(kvft_try_tier(&tier, &err, "%s?ssl_ca_certs=%s", cluster->url, certs->ca), "not for 127.0.0.1",
            "ssl_server_hostname");
    snprintf(url, sizeof url, "%s?ssl_ca_certs=%s&ssl_server_hostname=node.cache.example", cluster->url, certs->ca);
    live(url, "cluster, one name");
    kvft_cluster_stop(cluster);
    kvft_server_use_tls(
        certs, kvft_certs_make(certs, "node2", "DNS:node.cache.example,DNS:localhost", -HOUR_S, HOUR_S, 0, NULL));
    cluster = kvft_cluster_start(false);
    kvft_server_use_tls(NULL, NULL);
    for (int i = 0; i < KVFT_SHARDS; i++) {
        assert_string_equal(
            kvft_server_say(cluster->nodes[i], "CONFIG SET cluster-announce-hostname node.cache.example"), "+OK");
    }
    for (int i = 0; i < KVFT_SHARDS; i++) { /* nodes tell each other with their pings, one a second */
        kvft_await_said(cluster->nodes[i], "CLUSTER NODES", "node.cache.example", KVFT_SHARDS);
    }
    snprintf(url, sizeof url, "rediss+cluster://localhost:%d?ssl_ca_certs=%s", cluster->nodes[0]->port, certs->ca);
    live(url, "cluster, announced names");
    kvft_cluster_stop(cluster);
}

static void behind_sentinels(void **state) {
    (void)state;
    char url[400];
    kvft_server_use_tls(certs, kvft_certs_server(certs));
    kvft_sentinels *set = kvft_sentinels_start();
    kvft_server_use_tls(NULL, NULL);
    snprintf(url, sizeof url, "%s?ssl_ca_certs=%s", set->url, certs->ca);
    live(url, "sentinel");
    kvfi_tier *tier = NULL;
    refused(kvft_try_tier(&tier, &err, "%s?ssl_ca_certs=%s", set->url, certs->other_ca), "not trusted", "ssl_ca_certs");
    kvft_sentinels_stop(set);
}

/* ---- the n-th system call, the n-th transfer of one byte ---- */

static size_t live_once(const char *url) {
    kvfi_url *parsed = NULL;
    kvfi_tier *tier = NULL;
    size_t good = 0;
    err = (kvf_error){.status = KVF_OK};
    if (kvfi_url_parse(&parsed, &err, url) != KVF_OK || kvfi_redis_open(&tier, &err, parsed) != KVF_OK) {
        assert_true(err.what[0] != '\0');
        return 0;
    }
    good += kvft_put(tier, 1, 40000) == KVF_WHY_NONE;
    good += kvft_peek(tier, 1) == KVF_WHY_NONE;
    good += kvft_get(tier, 1, 40000) == KVF_WHY_NONE;
    tier->ops->close(tier);
    return good;
}

static void faults(void **state) {
    (void)state;
    kvft_server *server = start_right();
    char url[400];
    static const kvft_fault_kind kinds[] = {KVFT_ALLOC, KVFT_CALL, KVFT_SHORT};
    uint64_t points = 0;
    snprintf(url, sizeof url, "rediss://127.0.0.1:%d?ssl_ca_certs=%s&conns=1", server->port, certs->ca);
    for (size_t k = 0; k < 3; k++) {
        bool hit = true;
        size_t good = 0;
        for (uint64_t n = 1; hit; n++) {
            kvft_faults_arm(kinds[k], n);
            good = live_once(url);
            assert_int_equal(kvft_faults_live_allocs(), 0);
            hit = kvft_faults_disarm();
            points += hit;
            if (kinds[k] == KVFT_SHORT) {
                assert_int_equal(good, 3); /* pieces are no fault */
            }
        }
        assert_int_equal(good, 3);
    }
    printf("%llu points failed one by one\n", (unsigned long long)points);
    kvft_server_stop(server);
}

static int set_up(void **state) {
    (void)state;
    certs = kvft_certs_new();
    kvf_set_log(keep_log, NULL, KVF_LOG_WARN);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    kvf_set_log(NULL, NULL, KVF_LOG_ERROR);
    kvft_certs_free(certs);
    return 0;
}

/* It is tried, since Valkey knows the settings without the means to use them. */
static bool has_tls(void) {
    kvft_certs *made = kvft_certs_new();
    kvft_server_use_tls(made, kvft_certs_server(made));
    bool yes = kvft_server_starts();
    kvft_server_use_tls(NULL, "");
    kvft_certs_free(made);
    return yes;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(unknown_ca),       cmocka_unit_test(expired),      cmocka_unit_test(wrong_host_name),
        cmocka_unit_test(not_verified),     cmocka_unit_test(other_tongue), cmocka_unit_test(client_certificates),
        cmocka_unit_test(old_protocol),     cmocka_unit_test(files),        cmocka_unit_test(single),
        cmocka_unit_test(resumption),       cmocka_unit_test(in_a_cluster), cmocka_unit_test(cluster_names),
        cmocka_unit_test(behind_sentinels), cmocka_unit_test(faults),
    };
    kvft_server *probe = kvft_server_start(NULL);
    if (probe == NULL) {
        fprintf(stderr, "no redis-server is installed: not run\n");
        return 77;
    }
    kvft_server_stop(probe);
    if (!has_tls()) {
        fprintf(stderr, "this server was built without TLS: not run\n");
        return 77;
    }
    int failed = cmocka_run_group_tests(tests, set_up, tear_down);
    printf("check-tls: %u wrong ways refused with their reason, %u right ones work, %d tests failed\n", num_refused,
           num_working, failed);
    return failed;
}
