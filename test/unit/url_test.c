/* SPDX-License-Identifier: Apache-2.0
 *
 * Store URLs: what they mean, what is wrong with the wrong ones, and that no message shows a password.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "support/faults.h"
#include "tier/url.h"

static kvfi_url *parse(const char *text) {
    kvfi_url *url = NULL;
    kvf_error err = {0};
    if (kvfi_url_parse(&url, &err, text) != KVF_OK) {
        fail_msg("%s: %s", text, err.what);
    }
    return url;
}

static void check_text(const char *a, const char *b) {
    if (b == NULL) {
        assert_null(a);
    } else {
        assert_non_null(a);
        assert_string_equal(a, b);
    }
}

static void pieces(void **state) {
    (void)state;
    static const struct {
        const char *text, *scheme, *user, *password, *hosts, *path, *shown;
    } cases[] = {
        {"mem:", "mem", NULL, NULL, "", "", "mem:"},
        {"MEM:?max=1G", "mem", NULL, NULL, "", "", "MEM:?max=1G"},
        {"mem://", "mem", NULL, NULL, "", "", "mem://"},
        {"file:/var/cache/kv", "file", NULL, NULL, "", "/var/cache/kv", "file:/var/cache/kv"},
        {"file:///var/cache/kv", "file", NULL, NULL, "", "/var/cache/kv", "file:///var/cache/kv"},
        {"file:/with%20blank%25/a@b", "file", NULL, NULL, "", "/with blank%/a@b", "file:/with%20blank%25/a@b"},
        {"file:/a:b@c", "file", NULL, NULL, "", "/a:b@c", "file:/a:b@c"},
        {"redis://host", "redis", NULL, NULL, "host", "", "redis://host"},
        {"redis://host:6379/3?ttl=60", "redis", NULL, NULL, "host:6379", "/3", "redis://host:6379/3?ttl=60"},
        {"redis://u:p@h:1/0", "redis", "u", "p", "h:1", "/0", "redis://u:***@h:1/0"},
        {"redis://:pw@h", "redis", NULL, "pw", "h", "", "redis://:***@h"},
        {"redis://u@h", "redis", "u", NULL, "h", "", "redis://u@h"},
        {"redis://u:@h", "redis", "u", "", "h", "", "redis://u:***@h"},
        {"redis://u:a%40b%3A%2f@h", "redis", "u", "a@b:/", "h", "", "redis://u:***@h"},
        {"redis://u:a@b:c@h", "redis", "u", "a@b:c", "h", "", "redis://u:***@h"},
        {"redis://[::1]:6380/0", "redis", NULL, NULL, "[::1]:6380", "/0", "redis://[::1]:6380/0"},
        {"redis://u:p@[fe80::1%25eth0]:1", "redis", "u", "p", "[fe80::1%eth0]:1", "",
         "redis://u:***@[fe80::1%25eth0]:1"},
        {"redis+cluster://a:1,b:2,[::1]:3", "redis+cluster", NULL, NULL, "a:1,b:2,[::1]:3", "",
         "redis+cluster://a:1,b:2,[::1]:3"},
        {"redis+unix:///run/redis.sock?db=2", "redis+unix", NULL, NULL, "", "/run/redis.sock",
         "redis+unix:///run/redis.sock?db=2"},
        {"rediss://h:1?ssl_password=x&ssl_certfile=/c", "rediss", NULL, NULL, "h:1", "",
         "rediss://h:1?ssl_password=***&ssl_certfile=/c"},
        {"redis+unix:/run/redis.sock", "redis+unix", NULL, NULL, "", "/run/redis.sock", "redis+unix:/run/redis.sock"},
        {"redis+unix://u:p@/run/r.sock", "redis+unix", "u", "p", "", "/run/r.sock", "redis+unix://u:***@/run/r.sock"},
        {"redis://h?name=a@b&password=x&auth=y", "redis", NULL, NULL, "h", "",
         "redis://h?name=a@b&password=***&auth=***"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvfi_url *url = parse(cases[i].text);
        check_text(url->scheme, cases[i].scheme);
        check_text(url->user, cases[i].user);
        check_text(url->password, cases[i].password);
        check_text(url->hosts, cases[i].hosts);
        check_text(url->path, cases[i].path);
        check_text(url->text, cases[i].shown);
        kvfi_url_free(url);
    }
    kvfi_url_free(NULL);
}

/* Each message has the word that tells the reader what to change; none has the password. */
static void wrong_urls(void **state) {
    (void)state;
    static const struct {
        const char *text, *word;
    } cases[] = {
        {"", "redis://host"},
        {"/var/cache", "file:"},
        {"./cache", "file:"},
        {"cache", "file:/folder"},
        {"localhost:6379", "redis://localhost:6379"},
        {"file:cache", "write file:/its/path"},
        {"redis+unix:run/s", "write redis+unix:/its/path"},
        {"mem:cache", "mem has no path"},
        {"file://cache/kv", "no host"},
        {"file://u:PASSWORD@/kv", "no user"},
        {"mem:/kv", "no path"},
        {"mem://host", "no host"},
        {"redis+unix://run/redis.sock", "redis+unix:///absolute"},
        {"redis:h:1", "write redis://host:port"},
        {"redis://h/%zz", "%25"},
        {"redis://h/%4", "%25"},
        {"redis://h/%", "%25"},
        {"redis://h/a%00b", "control"},
        {"redis://h\nx", "control"},
        {"redis://u:%00PASSWORD@h", "control"},
        {"redis://u:PASSWORD%x@h", "the password"},
        {"redis://u:PASS/PASSWORD@h", "%2F"},
        {"redis://u:12/PASSWORD@h", "%2F"},
        {"redis://u:PASSWORD?x@h", "%3F"},
        {"redis://u:PASSWORD#x@h", "%23"},
        {"redis:u:PASSWORD@h", "write redis://host:port"},
        {"u:PASSWORD@h", "//host:port"},
        {"redis://h#frag", "%23"},
        {"redis+cluster://u:PASSWORD@h1,u:PASSWORD@h2", "once, before all hosts"},
        {"redis+cluster://h1:1,u:PASSWORD@h2:2", "once, before all hosts"},
        {"redis+sentinel://h1,u@h2/m", "once, before all hosts"},
        {"redis://h1,u:PASSWORD@h2", "once, before all hosts"},
        {"redis://u:PASSWORD@h1,u:PASSWORD@h2", "once, before all hosts"},
        {"redis://@h", "neither a user nor a password"},
        {"redis://:@h", "neither a user nor a password"},
        {"mem:?max", "name=value"},
        {"mem:?=1", "name=value"},
        {"mem:?max=1&max=2", "twice"},
        {"mem:?a=%zz", "%25"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvfi_url *url = NULL;
        kvf_error err = {0};
        if (kvfi_url_parse(&url, &err, cases[i].text) != KVF_CONFIG) {
            fail_msg("%s was accepted", cases[i].text);
        }
        if (strstr(err.what, cases[i].word) == NULL || strstr(err.what, "PASS") != NULL) {
            fail_msg("%s: \"%s\" does not say \"%s\", or shows the password", cases[i].text, err.what, cases[i].word);
        }
    }
}

static void long_urls(void **state) {
    (void)state;
    kvfi_url *url = NULL;
    kvf_error err = {0};
    char text[5000];
    memset(text, 'a', sizeof text);
    memcpy(text, "file:/", 6);
    text[4999] = '\0';
    assert_int_equal(kvfi_url_parse(&url, &err, text), KVF_CONFIG);
    assert_non_null(strstr(err.what, "4096"));
    text[4096] = '\0';
    url = parse(text);
    assert_int_equal(strlen(url->path), 4096 - 5);
    assert_int_equal(strlen(url->text), 255);
    assert_string_equal(url->text + 250, "aa...");
    kvfi_url_free(url);
    /* The parameters have a bound too. */
    memcpy(text, "mem:?a=1", 9);
    for (int i = 0; i < 64; i++) {
        char more[32];
        snprintf(more, sizeof more, "&b%d=1", i);
        strcat(text, more);
    }
    assert_int_equal(kvfi_url_parse(&url, &err, text), KVF_CONFIG);
    assert_non_null(strstr(err.what, "64"));
}

static void parameters(void **state) {
    (void)state;
    kvfi_url *url = parse("mem:?max=64M&ttl=60&name=a%26b&empty=&");
    kvf_error err = {0};
    uint64_t max = 0;
    uint32_t ttl = 0, other = 7;
    const char *name = NULL, *empty = NULL, *absent = "as it was";
    assert_int_equal(kvfi_url_take_size(url, &err, "max", &max, 1 << 20, UINT64_MAX), KVF_OK);
    assert_int_equal(max, 64 << 20);
    assert_int_equal(kvfi_url_take_u32(url, &err, "ttl", &ttl, 0, 100), KVF_OK);
    assert_int_equal(ttl, 60);
    assert_int_equal(kvfi_url_take_u32(url, &err, "other", &other, 0, 100), KVF_OK);
    assert_int_equal(other, 7);
    assert_int_equal(kvfi_url_take_text(url, &err, "absent", &absent), KVF_OK);
    assert_string_equal(absent, "as it was");
    assert_int_equal(kvfi_url_take_text(url, &err, "name", &name), KVF_OK);
    assert_string_equal(name, "a&b");
    assert_int_equal(kvfi_url_all_taken(url, &err), KVF_CONFIG);
    assert_non_null(strstr(err.what, "\"empty\""));
    assert_int_equal(kvfi_url_take_text(url, &err, "empty", &empty), KVF_OK);
    assert_string_equal(empty, "");
    assert_int_equal(kvfi_url_all_taken(url, &err), KVF_OK);
    kvfi_url_free(url);
}

static void wrong_parameters(void **state) {
    (void)state;
    kvfi_url *url = parse("mem:?small=1K&big=2T&word=much&minus=-1&secret=PASSWORD&ttl=101&half=1.5");
    kvf_error err = {0};
    uint64_t size = 0;
    uint32_t number = 0;
    assert_int_equal(kvfi_url_take_size(url, &err, "small", &size, 1 << 20, (uint64_t)1 << 40), KVF_CONFIG);
    assert_non_null(strstr(err.what, "small=1K must be a size from 1M to 1T"));
    assert_int_equal(kvfi_url_take_size(url, &err, "big", &size, 1 << 20, (uint64_t)1 << 40), KVF_CONFIG);
    assert_int_equal(kvfi_url_take_size(url, &err, "word", &size, 0, 1000), KVF_CONFIG);
    assert_non_null(strstr(err.what, "from 0 to 1000"));
    assert_int_equal(kvfi_url_take_u32(url, &err, "minus", &number, 0, 100), KVF_CONFIG);
    assert_int_equal(kvfi_url_take_u32(url, &err, "ttl", &number, 0, 100), KVF_CONFIG);
    assert_non_null(strstr(err.what, "ttl=101 must be a whole number from 0 to 100"));
    assert_int_equal(kvfi_url_take_u32(url, &err, "half", &number, 0, 100), KVF_CONFIG);
    assert_int_equal(size, 0);
    assert_int_equal(number, 0);
    assert_int_equal(kvfi_url_all_taken(url, &err), KVF_CONFIG);
    assert_non_null(strstr(err.what, "secret"));
    assert_null(strstr(err.what, "PASSWORD"));
    kvfi_url_free(url);
}

static void hosts(void **state) {
    (void)state;
    char host[256];
    uint16_t port = 0;
    kvf_error err = {0};
    kvfi_url *url = parse("redis+cluster://a,b:2,[::1],[fe80::1%25eth0]:65535,192.168.0.1:6379");
    static const struct {
        const char *host;
        uint16_t port;
    } wanted[] = {{"a", 6379}, {"b", 2}, {"::1", 6379}, {"fe80::1%eth0", 65535}, {"192.168.0.1", 6379}};
    for (size_t i = 0; i < 5; i++) {
        assert_int_equal(kvfi_url_host(url, &err, i, host, &port, 6379), KVF_OK);
        assert_string_equal(host, wanted[i].host);
        assert_int_equal(port, wanted[i].port);
    }
    assert_int_equal(kvfi_url_host(url, &err, 5, host, &port, 6379), KVF_MISS);
    kvfi_url_free(url);

    static const struct {
        const char *text, *word;
    } wrong[] = {
        {"redis:///0", "names no host"},  {"redis://", "names no host"},
        {"redis://h:", "65535"},          {"redis://h:0", "65535"},
        {"redis://h:65536", "65535"},     {"redis://h:x", "65535"},
        {"redis://h:-1", "65535"},        {"redis://::1", "brackets"},
        {"redis://::1:6379", "brackets"}, {"redis://fe80::1:6379", "brackets"},
        {"redis://[::1", "[IPv6]"},       {"redis://[]:1", "[IPv6]"},
        {"redis://[::1]x", "[IPv6]"},     {"redis://:6379", "[IPv6]"},
        {"redis://,b", "[IPv6]"},         {"redis://u:PASSWORD@a b", "host:port"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        url = parse(wrong[i].text);
        kvf_status status = kvfi_url_host(url, &err, 0, host, &port, 6379);
        if (status != KVF_CONFIG || strstr(err.what, wrong[i].word) == NULL || strstr(err.what, "PASSWORD") != NULL) {
            fail_msg("%s: %s, \"%s\"", wrong[i].text, kvf_status_name(status), err.what);
        }
        kvfi_url_free(url);
    }
}

static void every_allocation_fails_once(void **state) {
    (void)state;
    uint64_t n = 1;
    for (;; n++) {
        kvfi_url *url = NULL;
        kvf_error err = {0};
        kvft_faults_arm(KVFT_ALLOC, n);
        kvf_status status = kvfi_url_parse(&url, &err, "redis://user:pw@host:1/2?ttl=60&prefix=p&window=1M");
        if (status == KVF_OK) {
            kvfi_url_free(url);
        }
        assert_int_equal(kvft_faults_live_allocs(), 0);
        bool hit = kvft_faults_disarm();
        assert_int_equal(status, hit ? KVF_NOMEM : KVF_OK);
        if (!hit) {
            break;
        }
    }
    assert_true(n > 12);
}

/* Any bytes at all: no crash, and a result of one of the two kinds. The seed makes it the same every time. */
static void noise(void **state) {
    (void)state;
    static const char alphabet[] = "redis:file:mem://@@::[]%%00ff,,..//??&&==abc12# \x01\xff";
    uint32_t seed = 12345;
    for (int round = 0; round < 20000; round++) {
        char text[48];
        size_t len = 0;
        for (; len < 40; len++) {
            seed = seed * 1664525 + 1013904223;
            if (seed >> 24 < 6) {
                break;
            }
            text[len] = alphabet[(seed >> 8) % (sizeof alphabet - 1)];
        }
        text[len] = '\0';
        kvfi_url *url = NULL;
        kvf_error err = {0};
        char prefixed[64];
        snprintf(prefixed, sizeof prefixed, "%s%s", round % 2 == 0 ? "redis://" : "", text);
        kvf_status status = kvfi_url_parse(&url, &err, prefixed);
        if (status == KVF_OK) {
            char host[256];
            uint16_t port;
            kvf_status found = kvfi_url_host(url, &err, 0, host, &port, 1);
            assert_true(found == KVF_OK || found == KVF_CONFIG);
            kvfi_url_free(url);
        } else {
            assert_int_equal(status, KVF_CONFIG);
            assert_true(err.what[0] != '\0');
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces),
        cmocka_unit_test(wrong_urls),
        cmocka_unit_test(long_urls),
        cmocka_unit_test(parameters),
        cmocka_unit_test(wrong_parameters),
        cmocka_unit_test(hosts),
        cmocka_unit_test(every_allocation_fails_once),
        cmocka_unit_test(noise),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
