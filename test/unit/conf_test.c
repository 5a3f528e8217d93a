/* SPDX-License-Identifier: Apache-2.0
 *
 * The URL of a Redis store: its defaults, and the bounds of its parameters.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "redis/blocks/blocks.h"

static kvfi_url *url;
static kvfi_redis_conf conf;
static kvf_error err;

static kvf_status read_it(const char *text) {
    kvfi_url_free(url);
    url = NULL;
    err = (kvf_error){.status = KVF_OK};
    conf = (kvfi_redis_conf){.conns = 0};
    kvf_status status = kvfi_url_parse(&url, &err, text);
    return status == KVF_OK ? kvfi_redis_conf_read(&conf, &err, url) : status;
}

static int tear_down(void **state) {
    (void)state;
    kvfi_url_free(url);
    url = NULL;
    return 0;
}

static void test_where_nothing_is_said(void **state) {
    (void)state;
    assert_int_equal(read_it("redis://host"), KVF_OK);
    assert_int_equal(conf.kind, KVFI_REDIS_ONE);
    assert_string_equal(conf.server.host, "host");
    assert_int_equal(conf.server.port, 6379);
    assert_null(conf.server.path);
    assert_string_equal(conf.prefix, "kvf1");
    assert_string_equal(conf.name, "kvferry");
    assert_int_equal(conf.db, 0);
    assert_int_equal(conf.conns, 2);
    assert_int_equal(conf.save_conns, 1);
    assert_true(conf.share_below < UINT64_MAX);
    assert_int_equal(conf.ttl_s, 3600);
    assert_int_equal(conf.connect_ms, 1000);
    assert_int_equal(conf.stall_ms, 250);
    assert_int_equal(conf.window, 1 << 20);
    assert_int_equal(conf.part, (4 << 20) - 4096);
    assert_int_equal(conf.budget, 0);
    assert_true(conf.lend && !conf.allow_noeviction && !conf.tls_conf.on);
    assert_int_equal(read_it("redis+unix:///run/s"), KVF_OK);
    assert_string_equal(conf.server.path, "/run/s");
    assert_int_equal(conf.conns, 1);
    assert_int_equal(read_it("redis+cluster://a,b:7001"), KVF_OK);
    assert_int_equal(conf.kind, KVFI_REDIS_CLUSTER);
    assert_int_equal(conf.server.port, 6379);
    assert_int_equal(conf.conns, 1);
    assert_int_equal(read_it("redis+sentinel://a/m"), KVF_OK);
    assert_int_equal(conf.kind, KVFI_REDIS_SENTINEL);
    assert_int_equal(conf.server.port, 26379);
    assert_string_equal(conf.master, "m");
    assert_int_equal(read_it("rediss://host:1?ssl_ca_certs=/c"), KVF_OK);
    assert_true(conf.tls_conf.on && conf.tls_conf.verify && conf.tls_conf.check_name);
    assert_string_equal(conf.tls_conf.ca_file, "/c");
    assert_int_equal(conf.server.port, 1);
}

static void test_what_is_said(void **state) {
    (void)state;
    assert_int_equal(
        read_it("redis://u:p@host:1234/7?prefix=other&name=&conns=3&ttl=0&connect_ms=5&stall_ms=6&window=4096"
                "&part=5M&budget=2M&allow_noeviction=true"),
        KVF_OK);
    assert_string_equal(conf.user, "u");
    assert_string_equal(conf.password, "p");
    assert_int_equal(conf.server.port, 1234);
    assert_int_equal(conf.db, 7);
    assert_string_equal(conf.prefix, "other");
    assert_string_equal(conf.name, "");
    assert_int_equal(conf.conns, 3);
    assert_int_equal(conf.save_conns, 3);
    assert_true(conf.share_below == UINT64_MAX);
    assert_int_equal(conf.ttl_s, 0);
    assert_int_equal(conf.connect_ms, 5);
    assert_int_equal(conf.stall_ms, 6);
    assert_int_equal(conf.window, 4096);
    assert_int_equal(conf.part, 5 << 20);
    assert_int_equal(conf.budget, 2 << 20);
    assert_true(conf.allow_noeviction);
    assert_int_equal(read_it("redis+unix:///s?lend=false&db=3"), KVF_OK);
    assert_false(conf.lend);
    assert_int_equal(conf.db, 3);
    assert_int_equal(read_it("rediss://h?ssl_cert_reqs=none&ssl_check_hostname=false"), KVF_OK);
    assert_false(conf.tls_conf.verify || conf.tls_conf.check_name);
}

/* The smallest and the largest are taken, what lies one beyond is not. */
static void test_bounds(void **state) {
    (void)state;
    static const struct {
        const char *name, *least, *below, *most, *above;
    } rows[] = {{"conns", "1", "0", "32", "33"},
                {"connect_ms", "1", "0", "600000", "600001"},
                {"stall_ms", "1", "0", "600000", "600001"},
                {"ttl", "0", "-1", "3153600000", "3153600001"},
                {"window", "4096", "4095", "4294967296", "4294967297"},
                {"part", "4096", "4095", "536870912", "536870913"},
                {"budget", "1048576", "1048575", "1125899906842624", "1125899906842625"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *const values[] = {rows[i].least, rows[i].below, rows[i].most, rows[i].above};
        for (size_t v = 0; v < 4; v++) {
            char text[128];
            snprintf(text, sizeof text, "redis://host?%s=%s", rows[i].name, values[v]);
            kvf_status status = read_it(text);
            if (status != (v % 2 == 0 ? KVF_OK : KVF_CONFIG)) {
                fail_msg("%s: %s", text, err.what);
            }
            assert_int_equal(err.what[0] != '\0', v % 2 == 1);
        }
    }
}

static void test_what_can_not_be(void **state) {
    (void)state;
    static const struct {
        const char *text, *word;
    } rows[] = {{"redis://host/1?db=2", "twice"},
                {"redis+cluster://host?db=1", "one database"},
                {"redis+sentinel://host", "name of the master"},
                {"redis+sentinel://host,::1/m", "[::1]:26379"},
                {"redis+cluster://host,::1", "[::1]:6379"},
                {"rediss://host?lend=true", "TLS"},
                {"redis://host?prefix=", "prefix="},
                {"redis://host?prefix=a%20b", "prefix="},
                {"redis://host?name=a%20b", "name="},
                {"redis://host?nonsense=1", "nonsense"},
                {"redis://host?allow_noeviction=perhaps", "allow_noeviction"},
                {"rediss://host?ssl_keyfile=/k", "certificate beside it"},
                {"rediss://host?ssl_password=x", "certificate beside it"},
                {"rediss://host?ssl_server_hostname=a%20b", "name of a host"},
                {"rediss://host?ssl_cert_reqs=optional", "ssl_cert_reqs"},
                {"redis://host?ssl_ca_certs=/c", "ssl_ca_certs"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (read_it(rows[i].text) != KVF_CONFIG || strstr(err.what, rows[i].word) == NULL) {
            fail_msg("%s: \"%s\" does not say \"%s\"", rows[i].text, err.what, rows[i].word);
        }
    }
}

#define TEST(name) cmocka_unit_test_teardown(name, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {TEST(test_where_nothing_is_said), TEST(test_what_is_said), TEST(test_bounds),
                                       TEST(test_what_can_not_be)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
