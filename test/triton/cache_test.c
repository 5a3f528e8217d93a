/* SPDX-License-Identifier: Apache-2.0
 *
 * The response cache under the stub host: options, the files of models, hits and misses byte for byte, every call of the
 * server and every allocation failing once, threads, forged payloads.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "host.h"
#include "support/kit.h"
#include "triton/cache/answer.h"
#include "triton/cache/models.h"
#include "triton/cache/options.h"

/* ---- the library, and what it asks of the system ----------------------------------------------------------------- */

static TRITONSERVER_Error *(*initialize)(TRITONCACHE_Cache **, const char *);
static TRITONSERVER_Error *(*finalize)(TRITONCACHE_Cache *);
static TRITONSERVER_Error *(*insert)(TRITONCACHE_Cache *, const char *, TRITONCACHE_CacheEntry *,
                                     TRITONCACHE_Allocator *);
static TRITONSERVER_Error *(*lookup)(TRITONCACHE_Cache *, const char *, TRITONCACHE_CacheEntry *,
                                     TRITONCACHE_Allocator *);

static void find(void *library, const char *name, void *out) {
    void *function = dlsym(library, name);
    if (function == NULL) {
        fail_msg("%s", dlerror());
    }
    memcpy(out, &function, sizeof function);
}

/* The time of day of this process runs ahead by this. */
static int64_t ahead_s;

__attribute__((visibility("default"))) int clock_gettime(clockid_t clock, struct timespec *out) {
    int rc = (int)syscall(SYS_clock_gettime, clock, out);
    if (clock == CLOCK_REALTIME) {
        out->tv_sec += ahead_s;
    }
    return rc;
}

/* The n-th allocation of this thread fails. A sanitizer has allocators of its own. */
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define CAN_FAIL_MEMORY 1
static _Thread_local uint64_t until_no_memory;
static _Thread_local bool memory_failed;

extern void *__libc_malloc(size_t);          // NOLINT: glibc's name
extern void *__libc_calloc(size_t, size_t);  // NOLINT
extern void *__libc_realloc(void *, size_t); // NOLINT

static bool is_denied(void) {
    if (until_no_memory == 0 || --until_no_memory > 0) {
        return false;
    }
    memory_failed = true;
    errno = ENOMEM;
    return true;
}

__attribute__((visibility("default"))) void *malloc(size_t bytes) {
    return is_denied() ? NULL : __libc_malloc(bytes);
}

__attribute__((visibility("default"))) void *calloc(size_t num, size_t bytes) {
    return is_denied() ? NULL : __libc_calloc(num, bytes);
}

__attribute__((visibility("default"))) void *realloc(void *old, size_t bytes) {
    return is_denied() ? NULL : __libc_realloc(old, bytes);
}
#endif

static int load_library(void **state) {
    (void)state;
    void *library = dlopen(KVFT_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fail_msg("%s", dlerror());
    }
#ifdef CAN_FAIL_MEMORY
    host_calloc = __libc_calloc;
#endif
    find(library, "TRITONCACHE_CacheInitialize", &initialize);
    find(library, "TRITONCACHE_CacheFinalize", &finalize);
    find(library, "TRITONCACHE_CacheInsert", &insert);
    find(library, "TRITONCACHE_CacheLookup", &lookup);
    return 0;
}

/* ---- answers ----------------------------------------------------------------------------------------------------- */

#define MAX_BUFFERS 4u

/* A response as Triton packs it: one output of this many bytes, which the seed decides. */
static struct iovec pack(size_t data_bytes, uint64_t seed) {
    const uint32_t num = 1, name = 3, type = 5, shape = 8;
    const int64_t dim = (int64_t)data_bytes;
    const uint64_t output = 4 + name + 4 + type + 4 + shape + 8 + data_bytes, data = data_bytes;
    struct iovec out = {NULL, 4 + 8 + output};
    uint8_t *at = out.iov_base = malloc(out.iov_len);
    assert_non_null(at);
#define PUT(from, len) (memcpy(at, from, len), at += (len))
    PUT(&num, 4), PUT(&output, 8), PUT(&name, 4), PUT("OUT", 3), PUT(&type, 4), PUT("UINT8", 5), PUT(&shape, 4);
    PUT(&dim, 8), PUT(&data, 8);
    kvft_bytes(at, data_bytes, seed);
    return out;
}

typedef struct response {
    struct iovec iov[MAX_BUFFERS];
    size_t num;
} response;

static response response_new(size_t num, size_t bytes, uint64_t seed) {
    response r = {.num = num};
    for (size_t i = 0; i < num; i++) {
        r.iov[i] = pack(bytes + 7 * i, seed + i);
    }
    return r;
}

static void response_free(response *r) {
    for (size_t i = 0; i < r->num; i++) {
        free(r->iov[i].iov_base);
    }
}

static TRITONSERVER_Error *try_insert(TRITONCACHE_Cache *cache, const char *key, const response *r) {
    TRITONCACHE_CacheEntry *entry = host_entry(r->iov, r->num);
    TRITONCACHE_Allocator *source = host_source(r->iov, r->num);
    TRITONSERVER_Error *failed = insert(cache, key, entry, source);
    host_allocator_free(source);
    host_entry_free(entry);
    return failed;
}

/* Whether it was a hit. A hit that is not the response to the byte ends the test. An error is forgotten. */
static bool is_hit(TRITONCACHE_Cache *cache, const char *key, const response *expected) {
    TRITONCACHE_CacheEntry *entry = host_entry(NULL, 0);
    TRITONCACHE_Allocator *sink = host_sink();
    TRITONSERVER_Error *failed = lookup(cache, key, entry, sink);
    size_t num;
    const struct iovec *got = host_sunk(sink, &num);
    if (failed == NULL) {
        assert_int_equal(num, expected->num);
        for (size_t i = 0; i < num; i++) {
            assert_int_equal(got[i].iov_len, expected->iov[i].iov_len);
            assert_memory_equal(got[i].iov_base, expected->iov[i].iov_base, got[i].iov_len);
        }
    } else {
        TRITONSERVER_ErrorDelete(failed);
    }
    host_allocator_free(sink);
    host_entry_free(entry);
    return failed == NULL;
}

static void forget(TRITONSERVER_Error *error) {
    if (error != NULL) {
        TRITONSERVER_ErrorDelete(error);
    }
}

static void must(TRITONSERVER_Error *error) {
    if (error != NULL) {
        fail_msg("%s", TRITONSERVER_ErrorMessage(error));
    }
}

/* A writer stores an answer a moment after the insert. */
static void wait_for_hit(TRITONCACHE_Cache *cache, const char *key, const response *expected) {
    double end = kvft_now_ms() + KVFT_PATIENCE_MS;
    while (!is_hit(cache, key, expected)) {
        assert_true(kvft_now_ms() < end);
        kvft_nap_ms(1);
    }
}

static TRITONCACHE_Cache *open_with(const char *format, ...) {
    char config[2048];
    va_list arguments;
    va_start(arguments, format);
    size_t len = (size_t)vsnprintf(config, sizeof config, format, arguments);
    va_end(arguments);
    /* The deadline is for what hangs, not for a busy machine. */
    snprintf(config + len - 1, sizeof config - len, ",\"deadline\":\"20000\"}");
    TRITONCACHE_Cache *cache = NULL;
    must(initialize(&cache, config));
    assert_non_null(cache);
    return cache;
}

#define IN_MEMORY "{\"store\":\"mem:\",\"models\":\"none\",\"namespace\":\"test\"}"

/* ---- options ----------------------------------------------------------------------------------------------------- */

static void refused(const char *config, const char *what) {
    TRITONCACHE_Cache *cache = NULL;
    TRITONSERVER_Error *error = initialize(&cache, config);
    assert_non_null(error);
    if (strstr(TRITONSERVER_ErrorMessage(error), what) == NULL) {
        fail_msg("%s: not \"%s\" but: %s", config, what, TRITONSERVER_ErrorMessage(error));
    }
    TRITONSERVER_ErrorDelete(error);
    assert_null(cache);
    assert_int_equal(host_leaks(), 0);
}

static void test_wrong_options_say_what_is_wrong(void **state) {
    (void)state;
    unsetenv("KVFERRY_STORE");
    refused("", "not a JSON object");
    refused("[]", "not a JSON object");
    refused("{\"store\":\"mem:\",\"store\":\"mem:\"}", "duplicate");
    refused("{}", "no store is named");
    refused("{\"hots\":\"x\"}", "no option 'hots'. There are: host, port, user, password, db, connect_timeout, "
                                "socket_timeout, pool_size, wait_timeout, tls_enabled, cert, key, cacert, cacert_dir, "
                                "sni, store, ttl, deadline, namespace, models, secret");
    refused("{\"host\":\"\"}", "host=");
    refused("{\"host\":\"redis://x\"}", "A URL is named by store=");
    for (size_t i = 0; i < 5; i++) { /* Triton logs the message */
        static const char *const wrong[] = {
            "{\"host\":\"me:hunter2@x\"}", "{\"host\":\"redis://me:hunter2@x\"}",
            "{\"store\":\"redis://me:hunter2@x:99999\",\"models\":\"none\",\"namespace\":\"n\"}",
            "{\"store\":\"redis://me:hunter2@x/0?no=1\",\"models\":\"none\",\"namespace\":\"n\"}",
            "{\"host\":\"x\",\"password\":\"hunter2\",\"conns\":\"1\"}"};
        TRITONCACHE_Cache *cache = NULL;
        TRITONSERVER_Error *error = initialize(&cache, wrong[i]);
        assert_non_null(error);
        if (strstr(TRITONSERVER_ErrorMessage(error), "hunter2") != NULL) {
            fail_msg("the password is in: %s", TRITONSERVER_ErrorMessage(error));
        }
        TRITONSERVER_ErrorDelete(error);
    }
    assert_null(strstr(host_log(), "hunter2"));
    refused("{\"host\":\"x\",\"port\":\"0\"}", "port=0 is not a whole number from 1 to 65535");
    refused("{\"host\":\"x\",\"port\":\"6379x\"}", "port=6379x");
    refused("{\"host\":\"x\",\"port\":\"\"}", "port= is not");
    refused("{\"host\":\"x\",\"db\":\"-1\"}", "db=-1");
    refused("{\"host\":\"x\",\"port\":{}}", "port= is not a text");
    refused("{\"host\":\"x\",\"pool_size\":\"none\"}", "pool_size=none");
    refused("{\"host\":\"x\",\"tls_enabled\":\"yes\"}", "tls_enabled=yes is not true or false");
    refused("{\"host\":\"x\",\"cacert\":\"/ca\"}", "need tls_enabled=true");
    refused("{\"store\":\"mem:\",\"host\":\"x\"}", "host= has no effect beside a URL");
    refused("{\"store\":\"mem:\",\"password\":\"x\"}", "password= has no effect beside a URL");
    refused("{\"store\":\" \"}", "store= has no URL");
    refused("{\"store\":\"mem: mem: mem: mem: mem: mem: mem: mem: mem:\"}", "more than 8 URLs");
    refused("{\"store\":\"nothing://x\",\"models\":\"none\",\"namespace\":\"n\"}", "nothing");
    refused("{\"store\":\"mem:?maxx=1\",\"models\":\"none\",\"namespace\":\"n\"}", "maxx");
    refused("{\"store\":\"mem:\",\"ttl\":\"1h\"}", "ttl=1h");
    refused("{\"store\":\"mem:\",\"deadline\":\"0\"}", "deadline=0 is not a whole number from 1 to 60000");
    refused("{\"store\":\"mem:\",\"models\":\"none\"}", "models=none needs a namespace=");
    refused("{\"store\":\"mem:\",\"models\":\"/no/such/folder\"}", "cannot read /no/such/folder");
    refused("{\"store\":\"mem:\",\"models\":\":\"}", "names no folder");
    refused("{\"store\":\"mem:\"}", "names no model repository");
    refused("{\"store\":\"mem:\",\"models\":\"none\",\"namespace\":\"n\",\"secret\":\"/no/such\"}", "/no/such");
}

static kvfr_options *options_of(const char *json) {
    kvfr_options *options = malloc(sizeof *options);
    assert_non_null(options);
    must(kvfr_options_read(options, json));
    return options;
}

static void one_url(const char *json, const char *url) {
    kvfr_options *options = options_of(json);
    assert_int_equal(options->num_urls, 1);
    assert_string_equal(options->urls[0], url);
    free(options);
}

static void test_options_of_the_redis_cache_become_a_url(void **state) {
    (void)state;
    unsetenv("TRITONCACHE_REDIS_USERNAME"), unsetenv("TRITONCACHE_REDIS_PASSWORD");
    one_url("{\"host\":\"cache\",\"port\":\"7000\"}", "redis://cache:7000/0");
    one_url("{\"host\":\"cache\",\"port\":7000}", "redis://cache:7000/0");
    one_url("{\"host\":\"::1\",\"db\":\"3\"}", "redis://[::1]:6379/3");
    one_url("{\"host\":\"c\",\"user\":\"me\",\"password\":\"a:/@ b\"}", "redis://me:a%3A%2F%40%20b@c:6379/0");
    one_url("{\"host\":\"c\",\"password\":\"p\"}", "redis://:p@c:6379/0");
    one_url("{\"host\":\"c\",\"connect_timeout\":\"0\",\"socket_timeout\":\"0\",\"wait_timeout\":\"5\"}",
            "redis://c:6379/0");
    one_url("{\"host\":\"c\",\"connect_timeout\":\"300\",\"pool_size\":\"4\",\"ttl\":\"60\"}",
            "redis://c:6379/0?connect_ms=300&conns=4&ttl=60");
    one_url(
        "{\"host\":\"c\",\"tls_enabled\":\"true\",\"cert\":\"/a b.pem\",\"key\":\"k\",\"cacert\":\"ca\",\"sni\":\"n\"}",
        "rediss://c:6379/0?ssl_certfile=%2Fa%20b.pem&ssl_keyfile=k&ssl_ca_certs=ca&ssl_server_hostname=n");
    one_url("{\"host\":\"c\",\"tls_enabled\":false,\"cert\":\"x\"}", "redis://c:6379/0");
    setenv("TRITONCACHE_REDIS_USERNAME", "env", 1), setenv("TRITONCACHE_REDIS_PASSWORD", "secret", 1);
    one_url("{\"host\":\"c\"}", "redis://env:secret@c:6379/0");
    one_url("{\"host\":\"c\",\"user\":\"me\",\"password\":\"p\"}", "redis://me:p@c:6379/0");
    unsetenv("TRITONCACHE_REDIS_USERNAME"), unsetenv("TRITONCACHE_REDIS_PASSWORD");
}

static void test_stores_and_times(void **state) {
    (void)state;
    kvfr_options *o =
        options_of("{\"store\":\"mem:?max=1G  redis+cluster://a:1,b:2\",\"ttl\":\"5\",\"deadline\":\"20\"}");
    assert_int_equal(o->num_urls, 2);
    assert_string_equal(o->urls[0], "mem:?max=1G");
    assert_string_equal(o->urls[1], "redis+cluster://a:1,b:2");
    assert_int_equal(o->ttl_s, 5);
    assert_int_equal(o->deadline_us, 20000);
    free(o);
    setenv("KVFERRY_STORE", "mem:", 1);
    o = options_of("{\"socket_timeout\":\"30\"}");
    assert_string_equal(o->urls[0], "mem:");
    assert_int_equal(o->deadline_us, 30000);
    free(o);
    one_url("{\"host\":\"c\"}", "redis://c:6379/0");
    unsetenv("KVFERRY_STORE");
}

static void test_other_versions_are_refused(void **state) {
    (void)state;
    const host_versions sound = host_version;
    host_version.cache_major = 1;
    refused(IN_MEMORY, "version 1.1 of the cache interface");
    host_version = sound, host_version.cache_minor = 0;
    refused(IN_MEMORY, "version 0.0 of the cache interface");
    host_version = sound, host_version.server_major = 2;
    refused(IN_MEMORY, "2.34 of its own");
    host_version = sound, host_version.cache_minor = 7, host_version.server_minor = 99;
    must(finalize(open_with(IN_MEMORY)));
    host_version = sound;
}

static void test_null_arguments_are_errors(void **state) {
    (void)state;
    TRITONCACHE_Cache *cache = open_with(IN_MEMORY);
    TRITONCACHE_CacheEntry *entry = host_entry(NULL, 0);
    TRITONCACHE_Allocator *sink = host_sink();
    TRITONSERVER_Error *errors[] = {initialize(NULL, "{}"),
                                    initialize(&(TRITONCACHE_Cache *){NULL}, NULL),
                                    finalize(NULL),
                                    lookup(NULL, "1", entry, sink),
                                    lookup(cache, NULL, entry, sink),
                                    lookup(cache, "1", NULL, sink),
                                    lookup(cache, "1", entry, NULL),
                                    insert(NULL, "1", entry, sink),
                                    insert(cache, NULL, entry, sink),
                                    insert(cache, "1", NULL, sink),
                                    insert(cache, "1", entry, NULL)};
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        assert_non_null(errors[i]);
        assert_int_equal(TRITONSERVER_ErrorCode(errors[i]), TRITONSERVER_ERROR_INVALID_ARG);
        TRITONSERVER_ErrorDelete(errors[i]);
    }
    host_allocator_free(sink);
    host_entry_free(entry);
    must(finalize(cache));
    assert_int_equal(host_leaks(), 0);
}

/* ---- hits and misses --------------------------------------------------------------------------------------------- */

static void round_trips(TRITONCACHE_Cache *cache) {
    static const size_t sizes[] = {1, 100, 4096, 5000000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (size_t num = 1; num <= 3; num++) {
            char key[32];
            snprintf(key, sizeof key, "%zu", 1000 * i + num);
            response r = response_new(num, sizes[i], 10 * i + num);
            assert_false(is_hit(cache, key, &r));
            must(try_insert(cache, key, &r));
            wait_for_hit(cache, key, &r);
            assert_true(is_hit(cache, key, &r)); /* by the length that is known now */
            response_free(&r);
        }
    }
    assert_int_equal(host_leaks(), 0);
}

static void test_a_hit_is_exact_in_memory(void **state) {
    (void)state;
    TRITONCACHE_Cache *cache = open_with(IN_MEMORY);
    round_trips(cache);
    must(finalize(cache));
}

static void test_a_hit_is_exact_in_a_folder_and_for_the_next_process(void **state) {
    (void)state;
    char *dir = kvft_temp_dir();
    const char *config = "{\"store\":\"file:%s\",\"models\":\"none\",\"namespace\":\"%s\"}";
    TRITONCACHE_Cache *cache = open_with(config, dir, "a");
    round_trips(cache);
    must(finalize(cache));
    response r = response_new(2, 100, 12);
    cache = open_with(config, dir, "a");
    assert_true(is_hit(cache, "1002", &r));
    must(finalize(cache));
    cache = open_with(config, dir, "b"); /* another namespace */
    assert_false(is_hit(cache, "1002", &r));
    must(finalize(cache));
    response_free(&r);
    kvft_remove_dir(dir);
}

static void test_an_answer_ends_with_its_ttl(void **state) {
    (void)state;
    TRITONCACHE_Cache *cache = open_with("{\"store\":\"mem:\",\"models\":\"none\",\"namespace\":\"n\",\"ttl\":\"60\"}");
    response r = response_new(1, 100, 1), later = response_new(1, 200, 2);
    must(try_insert(cache, "1", &r));
    wait_for_hit(cache, "1", &r);
    ahead_s = 59;
    assert_true(is_hit(cache, "1", &r));
    ahead_s = -62; /* the clock of the server that stored it was fast: it is not to live for ever */
    assert_false(is_hit(cache, "1", &r));
    ahead_s = 62;
    assert_false(is_hit(cache, "1", &r));
    must(try_insert(cache, "1", &later)); /* it replaces what is too old */
    wait_for_hit(cache, "1", &later);
    ahead_s = 0;
    response_free(&r), response_free(&later);
    must(finalize(cache));
}

static void test_a_response_that_failed_is_not_stored(void **state) {
    (void)state;
    TRITONCACHE_Cache *cache = open_with(IN_MEMORY);
    uint32_t no_outputs = 0;
    response empty = {.iov = {{&no_outputs, sizeof no_outputs}}, .num = 1}, none = {.num = 0};
    response sound = response_new(1, 50, 3);
    must(try_insert(cache, "1", &empty));
    must(try_insert(cache, "2", &none));
    must(try_insert(cache, "3", &sound));
    wait_for_hit(cache, "3", &sound);
    assert_false(is_hit(cache, "1", &empty));
    assert_false(is_hit(cache, "2", &none));
    response_free(&sound);
    must(finalize(cache));
    assert_int_equal(host_leaks(), 0);
}

static void test_too_large_is_not_stored_and_no_error(void **state) {
    (void)state;
    TRITONCACHE_Cache *cache = open_with(IN_MEMORY);
    struct iovec huge[2] = {{NULL, KVFR_MAX_ANSWER_BYTES - 8}, {NULL, 100}};
    TRITONCACHE_CacheEntry *entry = host_entry(huge, 2);
    TRITONCACHE_Allocator *sink = host_sink();
    must(insert(cache, "1", entry, sink));
    host_entry_free(entry);
    huge[0].iov_len = SIZE_MAX;
    entry = host_entry(huge, 2);
    must(insert(cache, "1", entry, sink));
    host_entry_free(entry);
    host_allocator_free(sink);
    must(finalize(cache));
    assert_non_null(strstr(host_log(), "0 answers were stored, 2 were not"));
}

/* ---- faults ------------------------------------------------------------------------------------------------------ */

/* A life: open, miss, insert, hit, close. Any of its calls may fail; a hit is exact or none. */
static void live_once(const char *config, const response *r) {
    TRITONCACHE_Cache *cache = NULL;
    TRITONSERVER_Error *failed = initialize(&cache, config);
    if (failed != NULL) {
        TRITONSERVER_ErrorDelete(failed);
        assert_null(cache);
        return;
    }
    is_hit(cache, "1", r);
    forget(try_insert(cache, "1", r));
    is_hit(cache, "1", r);
    double end = kvft_now_ms() + 20;
    while (!is_hit(cache, "1", r) && kvft_now_ms() < end) {
        kvft_nap_ms(1);
    }
    must(finalize(cache));
}

static void test_every_call_of_the_server_fails_once(void **state) {
    (void)state;
    response r = response_new(3, 1000, 4);
    uint64_t nth = 0;
    do {
        host_fail(++nth);
        live_once(IN_MEMORY, &r);
        assert_int_equal(host_leaks(), 0);
        assert_true(nth < 1000);
    } while (host_has_failed());
    host_fail(0);
    print_message("%llu calls\n", (unsigned long long)nth - 1);
    assert_true(nth > 20);
    response_free(&r);
}

/* After a failure the same cache goes on: the next insert and lookup are those of a sound one. */
static void test_a_cache_survives_every_failure(void **state) {
    (void)state;
    TRITONCACHE_Cache *cache = open_with(IN_MEMORY);
    bool any = true;
    for (uint64_t nth = 1; any; nth++) {
        char key[32];
        snprintf(key, sizeof key, "%llu", (unsigned long long)nth);
        response r = response_new(2, 300, nth);
        host_fail(nth);
        forget(try_insert(cache, key, &r));
        is_hit(cache, key, &r);
        any = host_has_failed();
        host_fail(0);
        must(try_insert(cache, key, &r));
        wait_for_hit(cache, key, &r);
        assert_int_equal(host_leaks(), 0);
        response_free(&r);
    }
    must(finalize(cache));
}

static void test_every_allocation_fails_once(void **state) {
    (void)state;
#ifndef CAN_FAIL_MEMORY
    skip();
#else
    char *dir = kvft_temp_dir();
    char config[400];
    snprintf(config, sizeof config, "{\"store\":\"mem:\",\"models\":\"%s\"}", dir);
    response r = response_new(2, 1000, 5);
    uint64_t nth = 0;
    TRITONCACHE_CacheEntry *entries[2] = {host_entry(r.iov, r.num), host_entry(NULL, 0)};
    do {
        TRITONCACHE_Cache *cache = NULL;
        TRITONCACHE_Allocator *source = host_source(r.iov, r.num);
        memory_failed = false;
        until_no_memory = ++nth;
        TRITONSERVER_Error *failed = initialize(&cache, config);
        if (failed == NULL) {
            forget(insert(cache, "1", entries[0], source));
            must(finalize(cache));
        }
        until_no_memory = 0;
        forget(failed);
        host_allocator_free(source);
        assert_int_equal(host_leaks(), 0);
        assert_true(nth < 10000);
    } while (memory_failed);
    print_message("%llu allocations\n", (unsigned long long)nth - 1);
    assert_true(nth > 10);
    host_entry_free(entries[0]), host_entry_free(entries[1]);
    response_free(&r);
    kvft_remove_dir(dir);
#endif
}

static void test_lookups_without_memory_are_misses(void **state) {
    (void)state;
#ifndef CAN_FAIL_MEMORY
    skip();
#else
    TRITONCACHE_Cache *cache = open_with(IN_MEMORY);
    response r = response_new(2, 1000, 6);
    must(try_insert(cache, "1", &r));
    wait_for_hit(cache, "1", &r);
    bool any = true;
    for (uint64_t nth = 1; any; nth++) {
        TRITONCACHE_CacheEntry *entry = host_entry(NULL, 0);
        TRITONCACHE_Allocator *nothing = host_source(r.iov, 0); /* copies nothing, so allocates nothing */
        memory_failed = false;
        until_no_memory = nth;
        TRITONSERVER_Error *failed = lookup(cache, "1", entry, nothing);
        until_no_memory = 0;
        any = memory_failed;
        forget(failed);
        host_allocator_free(nothing);
        host_entry_free(entry);
        assert_int_equal(host_leaks(), 0);
        assert_true(is_hit(cache, "1", &r));
    }
    response_free(&r);
    must(finalize(cache));
#endif
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

#define NUM_KEYS 20u

typedef struct worker {
    TRITONCACHE_Cache *cache;
    uint64_t seed, hits;
} worker;

static void *work(void *argument) {
    worker *w = argument;
    for (int i = 0; i < 300; i++) {
        uint64_t number = kvft_random(&w->seed) % NUM_KEYS;
        char key[32];
        snprintf(key, sizeof key, "%llu", (unsigned long long)number);
        response r = response_new(1 + number % 3, 10 + 997 * number, number);
        if (is_hit(w->cache, key, &r)) {
            w->hits++;
        } else {
            must(try_insert(w->cache, key, &r));
        }
        response_free(&r);
    }
    return NULL;
}

static void test_threads_get_exact_answers(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), *models = kvft_temp_dir();
    TRITONCACHE_Cache *cache = open_with("{\"store\":\"mem: file:%s\",\"models\":\"%s\"}", dir, models);
    worker workers[8];
    pthread_t threads[8];
    uint64_t hits = 0;
    for (size_t i = 0; i < 8; i++) {
        workers[i] = (worker){cache, i, 0};
        assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (size_t i = 0; i < 8; i++) {
        pthread_join(threads[i], NULL);
        hits += workers[i].hits;
    }
    must(finalize(cache));
    print_message("%llu hits\n", (unsigned long long)hits);
    assert_true(hits > 0);
    assert_int_equal(host_leaks(), 0);
    kvft_remove_dir(dir), kvft_remove_dir(models);
}

/* ---- the files of models ----------------------------------------------------------------------------------------- */

static void write_file(const char *dir, const char *name, const char *text) {
    char path[400];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void make_dir(const char *dir, const char *name) {
    char path[400];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    assert_int_equal(mkdir(path, 0700), 0);
}

static char *repository(const char *config, const char *weights) {
    char *dir = kvft_temp_dir();
    make_dir(dir, "m");
    make_dir(dir, "m/1");
    write_file(dir, "m/config.pbtxt", config);
    write_file(dir, "m/1/model.bin", weights);
    return dir;
}

static void digest_of(char out[KVFR_DIGEST_TEXT], const char *folders) {
    kvfr_models *models;
    must(kvfr_models_open(&models, folders));
    snprintf(out, KVFR_DIGEST_TEXT, "%s", kvfr_models_digest(models));
    kvfr_models_close(models);
}

static void test_the_digest_is_that_of_names_and_bytes(void **state) {
    (void)state;
    char first[KVFR_DIGEST_TEXT], other[KVFR_DIGEST_TEXT], slash[400];
    char *dir = repository("a", "b"), *copy = repository("a", "b");
    digest_of(first, dir);
    digest_of(other, copy); /* wherever it lies, and whenever it was written */
    assert_string_equal(first, other);
    snprintf(slash, sizeof slash, "%s//", dir);
    digest_of(other, slash);
    assert_string_equal(first, other);
    make_dir(copy, "m/1/__pycache__");
    write_file(copy, "m/1/__pycache__/x", "y");
    write_file(copy, "m/1/x.pyc", "y");
    digest_of(other, copy); /* what Python writes does not count */
    assert_string_equal(first, other);
    char up[400];
    snprintf(up, sizeof up, "%s/m/1/up", copy);
    assert_int_equal(symlink("..", up), 0);
    kvfr_models *endless;
    TRITONSERVER_Error *error = kvfr_models_open(&endless, copy);
    assert_non_null(error);
    assert_non_null(strstr(TRITONSERVER_ErrorMessage(error), "symbolic links"));
    TRITONSERVER_ErrorDelete(error);
    assert_int_equal(unlink(up), 0);
    make_dir(copy, "m/2");
    digest_of(other, copy);
    assert_string_not_equal(first, other);
    kvft_remove_dir(copy);

    static const char *const different[][2] = {{"a", "c"}, {"c", "b"}, {"ab", ""}, {"", "ab"}};
    for (size_t i = 0; i < sizeof different / sizeof *different; i++) {
        copy = repository(different[i][0], different[i][1]);
        digest_of(other, copy);
        assert_string_not_equal(first, other);
        kvft_remove_dir(copy);
    }
    kvft_remove_dir(dir);
}

static void test_models_that_change_turn_the_cache_off(void **state) {
    (void)state;
    response r = response_new(1, 100, 7);
    for (int change = 0; change < 6; change++) {
        char *dir = repository("a", "b"), path[400];
        TRITONCACHE_Cache *cache = open_with("{\"store\":\"mem:\",\"models\":\"%s\"}", dir);
        must(try_insert(cache, "1", &r));
        wait_for_hit(cache, "1", &r);
        make_dir(dir, "m/1/__pycache__"); /* not a change */
        write_file(dir, "m/1/x.pyc", "y");
        assert_true(is_hit(cache, "1", &r));
        host_forget_log();
        if (change == 0) {
            write_file(dir, "m/1/model.bin", "bb");
        } else if (change == 1) {
            write_file(dir, "m/1/new", "");
        } else if (change == 2) {
            snprintf(path, sizeof path, "%s/m/1/model.bin", dir);
            assert_int_equal(unlink(path), 0);
        } else if (change == 3) {
            make_dir(dir, "m/2");
        } else { /* replaced, or written over, by one of the same length and time */
            const char *name = change == 4 ? "new" : "m/1/model.bin";
            struct stat before;
            char new[400];
            snprintf(path, sizeof path, "%s/m/1/model.bin", dir), snprintf(new, sizeof new, "%s/%s", dir, name);
            assert_int_equal(stat(path, &before), 0);
            write_file(dir, name, "c");
            const struct timespec times[2] = {before.st_atim, before.st_mtim};
            assert_int_equal(utimensat(AT_FDCWD, new, times, 0), 0);
            assert_int_equal(rename(new, path), 0);
        }
        assert_false(is_hit(cache, "1", &r));
        must(try_insert(cache, "1", &r));
        assert_false(is_hit(cache, "1", &r));
        assert_non_null(strstr(host_log(), "a file of the models changed"));
        must(finalize(cache));
        assert_int_equal(host_leaks(), 0);
        kvft_remove_dir(dir);
    }
    response_free(&r);
}

/* ---- payloads that somebody forged ------------------------------------------------------------------------------- */

static uint8_t *payload(size_t *out_len, size_t num) {
    response r = response_new(num, 40, 8);
    uint64_t lens[MAX_BUFFERS];
    size_t len = kvfr_answer_head_bytes(num), at = len;
    for (size_t i = 0; i < num; i++) {
        lens[i] = r.iov[i].iov_len;
        len += lens[i];
    }
    uint8_t *data = malloc(len);
    assert_non_null(data);
    kvfr_answer_write_head(data, 1234, lens, num);
    for (size_t i = 0; i < num; i++) {
        memcpy(data + at, r.iov[i].iov_base, lens[i]);
        at += lens[i];
    }
    response_free(&r);
    *out_len = len;
    return data;
}

/* Each is read from a block of exactly its length, so that a sanitizer sees what goes beyond it. */
static void test_forged_payloads_are_never_read_beyond_their_end(void **state) {
    (void)state;
    kvfr_answer answer;
    for (size_t num = 1; num <= 3; num++) {
        size_t len;
        uint8_t *data = payload(&len, num);
        assert_true(kvfr_answer_read(&answer, data, len));
        assert_int_equal(answer.created_s, 1234);
        assert_int_equal(answer.num, num);
        for (size_t cut = 0; cut < len; cut++) {
            uint8_t *part = malloc(cut + 1); /* one more than nothing */
            assert_non_null(part);
            memcpy(part, data, cut);
            assert_false(kvfr_answer_read(&answer, part, cut));
            free(part);
        }
        uint64_t seed = num;
        for (int i = 0; i < 20000; i++) {
            uint8_t *copy = malloc(len);
            assert_non_null(copy);
            memcpy(copy, data, len);
            for (int k = 0; k < 1 + i % 3; k++) {
                copy[kvft_random(&seed) % len] = (uint8_t)kvft_random(&seed);
            }
            (void)kvfr_answer_read(&answer, copy, len);
            free(copy);
        }
        free(data);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_wrong_options_say_what_is_wrong),
        cmocka_unit_test(test_options_of_the_redis_cache_become_a_url),
        cmocka_unit_test(test_stores_and_times),
        cmocka_unit_test(test_other_versions_are_refused),
        cmocka_unit_test(test_null_arguments_are_errors),
        cmocka_unit_test(test_a_hit_is_exact_in_memory),
        cmocka_unit_test(test_a_hit_is_exact_in_a_folder_and_for_the_next_process),
        cmocka_unit_test(test_an_answer_ends_with_its_ttl),
        cmocka_unit_test(test_a_response_that_failed_is_not_stored),
        cmocka_unit_test(test_too_large_is_not_stored_and_no_error),
        cmocka_unit_test(test_every_call_of_the_server_fails_once),
        cmocka_unit_test(test_a_cache_survives_every_failure),
        cmocka_unit_test(test_every_allocation_fails_once),
        cmocka_unit_test(test_lookups_without_memory_are_misses),
        cmocka_unit_test(test_threads_get_exact_answers),
        cmocka_unit_test(test_the_digest_is_that_of_names_and_bytes),
        cmocka_unit_test(test_models_that_change_turn_the_cache_off),
        cmocka_unit_test(test_forged_payloads_are_never_read_beyond_their_end),
    };
    return cmocka_run_group_tests(tests, load_library, NULL);
}
