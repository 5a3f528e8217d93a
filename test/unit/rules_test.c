/* SPDX-License-Identifier: Apache-2.0
 *
 * The rules for a server's settings, with invented facts: those that servers of the live tests lack
 * (live/admission_test.c), and the exact place of each bound.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "redis/advice/mend.h"
#include "redis/advice/rules.h"

static kvfi_facts facts;
static kvfi_redis_conf conf;
static kvfi_verdict verdict;
static char codes[1024];

/* A server of which nothing is to be said, and the URL's defaults. */
static int all_well(void **state) {
    (void)state;
    facts = (kvfi_facts){.info = true,
                         .config = true,
                         .version = "8.6.0",
                         .policy = "allkeys-lru",
                         .allocator = "jemalloc-5.3.0",
                         .role = "master",
                         .mode = "standalone",
                         .bgsave = "ok",
                         .aof_write = "ok",
                         .stop_writes = "yes",
                         .maxmemory = (uint64_t)8 << 30,
                         .used = 1 << 20,
                         .resident = 8 << 20,
                         .max_bulk = 512 << 20,
                         .io_threads = 4,
                         .samples = 10,
                         .swapped = KVFI_UNKNOWN};
    conf = (kvfi_redis_conf){
        .part = (4 << 20) - 4096, .window = 1 << 20, .conns = 2, .save_conns = 1, .ttl_s = 3600, .text = "redis://x"};
    return 0;
}

static void note(void *ctx, const kvf_finding *finding) {
    (void)ctx;
    size_t len = strlen(codes);
    snprintf(codes + len, sizeof codes - len, "%s:%d ", finding->code, (int)finding->severity);
    assert_true(strlen(finding->what) > 10 && finding->mend != NULL);
}

/* What is found, each with its severity (1 note, 2 warning, 3 fatal). */
static const char *judged(void) {
    codes[0] = '\0';
    kvfi_rules_judge(&verdict, &facts, &conf, &conf.server, note, NULL);
    return codes;
}

static void well(void **state) {
    (void)state;
    assert_string_equal(judged(), "");
    assert_int_equal(verdict.saves, KVF_WHY_NONE);
    assert_int_equal(verdict.room, KVFI_UNKNOWN);
    assert_int_equal(verdict.fit.part, conf.part);
    assert_int_equal(verdict.fit.conns, 2);
}

static void servers_that_we_have_not(void **state) {
    (void)state;
    snprintf(facts.policy, sizeof facts.policy, "allkeys-lrm");
    assert_string_equal(judged(), "lrm:2 ");
    assert_int_equal(verdict.saves, KVF_WHY_NONE);
    (void)all_well(NULL);
    snprintf(facts.version, sizeof facts.version, "5.0.14");
    assert_string_equal(judged(), "version:2 ");
    (void)all_well(NULL);
    snprintf(facts.allocator, sizeof facts.allocator, "libc");
    assert_string_equal(judged(), "allocator:1 ");
}

/* What is not known is not held against it, nor taken for a number. */
static void unknown(void **state) {
    (void)state;
    facts = (kvfi_facts){.maxmemory = KVFI_UNKNOWN, .swapped = KVFI_UNKNOWN};
    assert_string_equal(judged(), "no-info:2 no-config:1 ");
    assert_int_equal(verdict.saves, KVF_WHY_NONE);
    (void)all_well(NULL);
    facts.config = false;
    facts.max_bulk = facts.output_limit = facts.clients_limit = facts.io_threads = facts.samples = KVFI_UNKNOWN;
    snprintf(facts.bgsave, sizeof facts.bgsave, "err"); /* it may be that nobody minds */
    assert_string_equal(judged(), "no-config:1 bgsave-failed:2 ");
    assert_int_equal(verdict.saves, KVF_WHY_NONE);
    (void)all_well(NULL);
    facts.maxmemory = facts.used = facts.resident = facts.replicas = facts.backlog = KVFI_UNKNOWN;
    facts.max_bulk = facts.output_limit = facts.clients_limit = KVFI_UNKNOWN;
    assert_string_equal(judged(), "");
}

static void swap(void **state) {
    (void)state;
    facts.swapped = 0;
    facts.used = (uint64_t)1 << 30; /* most of it is not resident, but the host says that it isn't swapped either */
    assert_string_equal(judged(), "");
    facts.swapped = 4096;
    assert_string_equal(judged(), "swap:2 ");
    facts.swapped = KVFI_UNKNOWN;
    assert_string_equal(judged(), "swap:2 ");
    facts.resident = facts.used / 2;
    assert_string_equal(judged(), "");
    facts.used = 40 << 20;
    facts.resident = 1 << 20;
    assert_string_equal(judged(), "");
}

static void budget(void **state) {
    (void)state;
    facts.maxmemory = 0;
    facts.used = facts.resident = 100 << 20;
    assert_string_equal(judged(), "maxmemory:2 ");
    assert_int_equal(verdict.room, (KVFI_DEFAULT_BUDGET - (100 << 20)) / 8);
    conf.budget = 200 << 20;
    assert_string_equal(judged(), "maxmemory:1 "); /* who says how much knows of it */
    assert_int_equal(verdict.room, (100 << 20) / 8);
    conf.budget = (100 << 20) + 5;
    assert_string_equal(judged(), "maxmemory:1 ");
    assert_int_equal(verdict.room, 5);
    conf.budget = 100 << 20;
    assert_string_equal(judged(), "maxmemory:1 budget:3 ");
    assert_int_equal(verdict.saves, KVF_WHY_FULL);
    assert_string_equal(verdict.code, "budget");
    /* Where nothing has a bound, the policy does not matter yet. */
    conf.budget = 1 << 30;
    snprintf(facts.policy, sizeof facts.policy, "noeviction");
    assert_string_equal(judged(), "maxmemory:1 ");
    assert_int_equal(verdict.saves, KVF_WHY_NONE);
}

/* Whatever the bound: it is kept to, or nothing is saved; and no more is given up than needed. */
static void bounds(void **state) {
    (void)state;
    for (uint64_t bound = 1000; bound < (uint64_t)1 << 32; bound += bound / 7) {
        for (unsigned which = 0; which < 4; which++) {
            (void)all_well(NULL);
            uint64_t *const limits[] = {&facts.max_bulk, &facts.output_limit, &facts.clients_limit, &facts.maxmemory};
            *limits[which] = bound;
            (void)judged();
            const kvfi_fit *fit = &verdict.fit;
            if (verdict.saves != KVF_WHY_NONE) {
                assert_int_equal(verdict.saves, KVF_WHY_SETTINGS);
                assert_in_range(bound, 0, 3 << 20);
                continue;
            }
            assert_in_range(fit->part, 61440, conf.part);
            assert_in_range(fit->window, 65536, conf.window);
            assert_in_range(fit->save_conns, 1, fit->conns);
            assert_true(which != 0 || fit->part <= bound);
            assert_true(which != 1 || fit->part + fit->window / 4 <= bound);
            assert_true(which != 2 || fit->conns * fit->part + 2 * fit->part <= bound);
            assert_true(which != 3 || 32 * fit->part * fit->conns <= bound);
            assert_true(which != 0 || (fit->window == conf.window && fit->conns == 2));
        }
    }
    (void)all_well(NULL);
    facts.maxmemory = 256 << 20;
    assert_string_equal(judged(), ""); /* 32 parts of 4 MiB less a page for each connection */
    facts.maxmemory = 255 << 20;
    assert_string_equal(judged(), "maxmemory-small:2 ");
    assert_int_equal(verdict.fit.conns, 1);
    assert_int_equal(verdict.fit.part, conf.part);
    facts.maxmemory = 100 << 20;
    (void)judged();
    assert_int_equal(verdict.fit.part, (2 << 20) - 4096);
    facts.maxmemory = 1 << 20;
    assert_string_equal(judged(), "maxmemory-small:3 ");
    assert_int_equal(verdict.saves, KVF_WHY_SETTINGS);
}

/* Fewer connections: saves never have more of them than loads. */
static void fewer_connections(void **state) {
    (void)state;
    conf.conns = conf.save_conns = 4;
    facts.maxmemory = 512 << 20; /* enough for four */
    assert_string_equal(judged(), "");
    assert_int_equal(verdict.fit.save_conns, 4);
    for (unsigned conns = 3; conns > 0; conns--) {
        facts.maxmemory = conns * ((uint64_t)128 << 20);
        assert_string_equal(judged(), "maxmemory-small:2 ");
        assert_int_equal(verdict.fit.conns, conns);
        assert_int_equal(verdict.fit.save_conns, conns);
    }
    facts.maxmemory = 256 << 20;
    conf.save_conns = 1;
    assert_string_equal(judged(), "maxmemory-small:2 ");
    assert_int_equal(verdict.fit.conns, 2);
    assert_int_equal(verdict.fit.save_conns, 1);
}

/* ---- what mends it, as something to type ---- */

static char mended[KVFI_MEND_BYTES];

static const char *mend_of(const char *mend, bool config) {
    kvfi_mend_write(mended, mend, &conf, &conf.server, config);
    return mended;
}

static void commands_are_whole(void **state) {
    (void)state;
    conf.server = (kvfi_endpoint){.host = "127.0.0.1", .port = 6390};
    assert_string_equal(mend_of("{save \"\"} and {maxmemory-policy allkeys-lru}; or a=b", true),
                        "redis-cli -p 6390 CONFIG SET save \"\" and redis-cli -p 6390 CONFIG SET maxmemory-policy "
                        "allkeys-lru; or a=b");
    snprintf(conf.server.host, sizeof conf.server.host, "2001:db8::1");
    conf.user = "it's me";
    conf.password = "s3cret";
    conf.db = 3;
    conf.tls_conf = (kvfi_tls_conf){.on = true, .ca_file = "/etc/my ca.pem"};
    assert_string_equal(
        mend_of("[ACL SETUSER @ +info]", true),
        "redis-cli -h 2001:db8::1 -p 6390 --tls --cacert '/etc/my ca.pem' --user 'it'\\''s me' --askpass "
        "-n 3 ACL SETUSER 'it'\\''s me' +info");
    (void)all_well(NULL);
    conf.server = (kvfi_endpoint){.path = "/run/a b.sock"};
    assert_string_equal(mend_of("[ACL SETUSER @ +info]", true),
                        "redis-cli -s '/run/a b.sock' ACL SETUSER default +info");
    assert_string_equal(mend_of("raise it", true), "raise it");
    assert_string_equal(mend_of("", true), "");
}

static void settings_of_a_server_that_refuses_config(void **state) {
    (void)state;
    conf.server = (kvfi_endpoint){.host = "localhost", .port = 6379};
    assert_string_equal(
        mend_of("{save \"\"}, {client-output-buffer-limit \"normal 0 0 0\"} or [ACL SETUSER @ +x]", false),
        "in redis.conf: save \"\", in redis.conf: client-output-buffer-limit normal 0 0 0 or redis-cli -p 6379 "
        "ACL SETUSER default +x");
}

/* Where they don't fit the server is left out: half a name would be another one. */
static void commands_that_are_too_long(void **state) {
    (void)state;
    static char user[600];
    conf.server = (kvfi_endpoint){.host = "h", .port = 1};
    memset(user, 'u', sizeof user - 1);
    conf.user = user;
    assert_string_equal(mend_of("{a 1} and {b 2}", true), "CONFIG SET a 1 and CONFIG SET b 2");
    snprintf(user, sizeof user, "%0400d", 0);
    assert_string_equal(mend_of("{a 1}, {b 2} and {c 3}", true), "CONFIG SET a 1, CONFIG SET b 2 and CONFIG SET c 3");
    char words[KVFI_MEND_BYTES + 1] = "";
    memset(words, 'w', KVFI_MEND_BYTES - 1);
    assert_string_equal(mend_of(words, true), words);
    words[KVFI_MEND_BYTES - 1] = 'w';
    assert_string_equal(mend_of(words, true), "");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(commands_are_whole, all_well),
        cmocka_unit_test_setup(settings_of_a_server_that_refuses_config, all_well),
        cmocka_unit_test_setup(commands_that_are_too_long, all_well),
        cmocka_unit_test_setup(well, all_well),
        cmocka_unit_test_setup(servers_that_we_have_not, all_well),
        cmocka_unit_test_setup(unknown, all_well),
        cmocka_unit_test_setup(swap, all_well),
        cmocka_unit_test_setup(budget, all_well),
        cmocka_unit_test_setup(bounds, all_well),
        cmocka_unit_test_setup(fewer_connections, all_well),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
