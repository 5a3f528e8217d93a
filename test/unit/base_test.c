/* SPDX-License-Identifier: Apache-2.0
 *
 * Names, errors, log, hex, numbers, iovecs, hashes, the real system table, and the fault table itself.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include "base/base.h"
#include "support/faults.h"

static void check_hex(const uint8_t *bytes, size_t num, const char *hex) {
    char text[129];
    kvfi_hex(text, bytes, num);
    assert_string_equal(text, hex);
}

/* ---- names and errors */
static void names(void **state) {
    (void)state;
    for (int i = 0; i < KVF_NUM_REASONS; i++) {
        assert_string_not_equal(kvf_reason_name((kvf_reason)i), "unknown");
    }
    for (int i = 0; i <= KVF_CLOSED; i++) {
        assert_string_not_equal(kvf_status_name((kvf_status)i), "unknown");
    }
    assert_string_equal(kvf_status_name(KVF_MISS), "miss");
    assert_string_equal(kvf_reason_name(KVF_WHY_OTHER_TOKENS), "other-tokens");
    assert_string_equal(kvf_reason_name(KVF_NUM_REASONS), "unknown");
    assert_string_equal(kvf_status_name((kvf_status)-1), "unknown");
    assert_string_equal(kvf_version(), KVF_VERSION);
}

static void errors(void **state) {
    (void)state;
    kvf_error err = {0};
    char longer[1000];
    memset(longer, 'x', sizeof longer);
    longer[999] = '\0';
    assert_int_equal(kvfi_fail(&err, KVF_CONFIG, "%d of %s", 7, "9"), KVF_CONFIG);
    assert_int_equal(err.status, KVF_CONFIG);
    assert_string_equal(err.what, "7 of 9");
    kvfi_fail(&err, KVF_IO, "%s", longer);
    assert_int_equal(strlen(err.what), sizeof err.what - 1);
    assert_int_equal(kvfi_fail(NULL, KVF_NOMEM, "%s", longer), KVF_NOMEM);
}

static char last_message[600];
static int num_messages;

static void keep_message(void *ctx, kvf_log_level level, const char *message) {
    assert_ptr_equal(ctx, &num_messages);
    assert_true(level <= KVF_LOG_INFO);
    num_messages++;
    snprintf(last_message, sizeof last_message, "%s", message);
}

static void logging(void **state) {
    (void)state;
    assert_false(kvfi_log_on(KVF_LOG_ERROR)); /* silent until it is asked for */
    kvfi_log(KVF_LOG_ERROR, "nobody hears this");
    kvf_set_log(keep_message, &num_messages, KVF_LOG_INFO);
    kvfi_log(KVF_LOG_DEBUG, "too fine");
    kvfi_log(KVF_LOG_INFO, "%s %d", "seen", 1);
    assert_int_equal(num_messages, 1);
    assert_string_equal(last_message, "seen 1");
    kvf_set_log(NULL, NULL, KVF_LOG_DEBUG);
    assert_false(kvfi_log_on(KVF_LOG_ERROR));
}

/* ---- bytes */
static void hex(void **state) {
    (void)state;
    uint8_t bytes[3] = {0x00, 0xab, 0xff}, back[3];
    check_hex(bytes, 3, "00abff");
    assert_true(kvfi_unhex(back, "00ABff", 3));
    assert_memory_equal(bytes, back, 3);
    assert_false(kvfi_unhex(back, "00abf", 3));
    assert_false(kvfi_unhex(back, "00abff0", 3));
    assert_false(kvfi_unhex(back, "00abfg", 3));
    assert_false(kvfi_unhex(back, "", 3));
}

static void numbers(void **state) {
    (void)state;
    static const struct {
        const char *text;
        bool ok;
        uint64_t value;
    } cases[] = {
        {"0", true, 0},
        {"18446744073709551615", true, UINT64_MAX},
        {"18446744073709551616", false, 0},
        {"99999999999999999999999", false, 0},
        {"1K", true, 1024},
        {"64m", true, 64u << 20},
        {"2G", true, (uint64_t)2 << 30},
        {"16777215T", true, (uint64_t)16777215 << 40},
        {"16777216T", false, 0},
        {"K", false, 0},
        {"", false, 0},
        {"-1", false, 0},
        {"+1", false, 0},
        {" 1", false, 0},
        {"1 M", false, 0},
        {"1MB", false, 0},
        {"0x10", false, 0},
        {"1.5G", false, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint64_t value = 99;
        assert_int_equal(kvfi_parse_size(&value, cases[i].text, strlen(cases[i].text)), cases[i].ok);
        if (cases[i].ok) {
            assert_true(value == cases[i].value);
        }
    }
    uint64_t value = 0;
    assert_false(kvfi_parse_u64(&value, "1K", 2));
    assert_true(kvfi_parse_u64(&value, "123456", 3));
    assert_int_equal(value, 123);
}

static void iovecs(void **state) {
    (void)state;
    char text[] = "abcdefghij";
    for (size_t skip = 0; skip <= 10; skip++) {
        struct iovec parts[4] = {{text, 3}, {text + 3, 0}, {text + 3, 5}, {text + 8, 2}};
        struct iovec *iov = parts;
        size_t num = 4;
        assert_int_equal(kvfi_iov_bytes(iov, num), 10);
        kvfi_iov_skip(&iov, &num, skip);
        assert_int_equal(kvfi_iov_bytes(iov, num), 10 - skip);
        if (skip < 10) {
            assert_int_equal(((char *)iov->iov_base)[0], text[skip]);
        } else {
            assert_int_equal(num, 0);
        }
    }
}

/* ---- hashes */
static void sha_of(uint8_t out[32], const kvfi_secret *secret, const char *text) {
    kvfi_sha sha;
    kvfi_sha_init(&sha, secret);
    for (const char *p = text; *p != '\0'; p++) { /* byte by byte: the hardest way to feed it */
        kvfi_sha_add(&sha, p, 1);
    }
    kvfi_sha_add(&sha, NULL, 0);
    kvfi_sha_end(&sha, out);
}

static void sha256(void **state) {
    (void)state;
    uint8_t out[32];
    kvfi_secret none;
    kvfi_secret_init(&none, NULL, 0);
    sha_of(out, NULL, "abc"); /* FIPS 180-4 */
    check_hex(out, 32, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    sha_of(out, &none, "");
    check_hex(out, 32, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

static void hmac(void **state) {
    (void)state;
    uint8_t out[32], key[131];
    kvfi_secret secret;
    kvfi_secret_init(&secret, "Jefe", 4); /* RFC 4231, test cases 2 and 6 */
    sha_of(out, &secret, "what do ya want for nothing?");
    check_hex(out, 32, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    sha_of(out, &secret, "what do ya want for nothing?"); /* the saved state is not used up */
    check_hex(out, 32, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    memset(key, 0xaa, sizeof key);
    kvfi_secret_init(&secret, key, sizeof key);
    sha_of(out, &secret, "Test Using Larger Than Block-Size Key - Hash Key First");
    check_hex(out, 32, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

static void xxh3(void **state) {
    (void)state;
    static uint8_t data[5000];
    uint8_t whole[16], cut[16];
    struct iovec empty = {NULL, 0};
    kvfi_xxh3_iov(whole, &empty, 1);
    check_hex(whole, 16, "99aa06d3014798d86001c324468d497f");
    kvfi_xxh3_iov(whole, NULL, 0);
    check_hex(whole, 16, "99aa06d3014798d86001c324468d497f");
    for (size_t i = 0; i < sizeof data; i++) {
        data[i] = (uint8_t)(i * 31 + 7);
    }
    for (size_t len = 0; len <= sizeof data; len = len * 3 / 2 + 1) {
        struct iovec one = {data, len};
        kvfi_xxh3_iov(whole, &one, 1);
        for (size_t at = 0; at <= len; at += 1 + len / 17) {
            struct iovec two[3] = {{data, at}, {data, 0}, {data + at, len - at}};
            kvfi_xxh3_iov(cut, two, 3);
            assert_memory_equal(cut, whole, 16);
            kvfi_xxh3 hash;
            kvfi_xxh3_init(&hash);
            kvfi_xxh3_add(&hash, data, at);
            kvfi_xxh3_add(&hash, data + at, len - at);
            kvfi_xxh3_end(&hash, cut);
            assert_memory_equal(cut, whole, 16);
        }
    }
    assert_int_equal(kvfi_xxh32("", 0), 0x02cc5d05);
    assert_int_equal(kvfi_xxh32("abc", 3), 0x32d153ff);
}

/* ---- the real table */
static void memory(void **state) {
    (void)state;
    assert_null(kvfi_alloc_zero(SIZE_MAX / 2, 3)); /* the product does not fit */
    uint8_t *p = kvfi_alloc_zero(10, 10);
    assert_non_null(p);
    for (int i = 0; i < 100; i++) {
        assert_int_equal(p[i], 0);
    }
    kvfi_free(p);
    kvfi_free(NULL);
    p = kvfi_alloc(0);
    assert_non_null(p);
    kvfi_free(p);
    char *copy = kvfi_strndup("hello world", 5);
    assert_string_equal(copy, "hello");
    kvfi_free(copy);
}

static void mappings(void **state) {
    (void)state;
    uint8_t *p = kvfi_sys->map(1 << 20, -1, 0);
    assert_non_null(p);
    p[12345] = 1;
    assert_int_equal(kvfi_sys->populate(p, 1 << 20), 0);
    assert_int_equal(kvfi_sys->unmap(p, 1 << 20), 0);

    int fd = memfd_create("base_test", 0);
    assert_int_equal(kvfi_sys->ftruncate(fd, 8192), 0);
    struct iovec iov = {"hello", 5};
    assert_int_equal(kvfi_sys->pwritev(fd, &iov, 1, 4096), 5);
    const uint8_t *file = kvfi_sys->map(8192, fd, 0);
    assert_non_null(file);
    assert_memory_equal(file + 4096, "hello", 5);
    kvfi_sys->unmap((void *)(uintptr_t)file, 8192);
    kvfi_sys->close(fd);
    assert_null(kvfi_sys->map(4096, 9999, 0));
}

static void deadlines(void **state) {
    (void)state;
    int64_t now = kvfi_sys->now_us();
    assert_true(kvfi_deadline(INT64_MAX) == KVFI_NEVER);
    assert_true(kvfi_deadline(-5) >= now);
    int64_t soon = kvfi_deadline(1500);
    assert_true(soon >= now + 1500);
    int ms = kvfi_poll_ms(soon);
    assert_true(ms >= 0 && ms <= 2);
    assert_int_equal(kvfi_poll_ms(now - 1), 0);
    assert_int_equal(kvfi_poll_ms(KVFI_NEVER), -1);
    assert_int_equal(kvfi_poll_ms(KVFI_NEVER - 1), INT32_MAX);
    assert_true(kvfi_sys->wall_us() > (int64_t)1700000000 * 1000000);
    uint8_t a[32] = {0}, b[32] = {0};
    assert_int_equal(kvfi_sys->random(a, 32), 0);
    assert_int_equal(kvfi_sys->random(b, 32), 0);
    assert_memory_not_equal(a, b, 32);
}

/* A peer that has gone is an errno, never a SIGPIPE. SIGPIPE has its default action here: a signal would end the test.
 */
static void no_sigpipe(void **state) {
    (void)state;
    int pair[2], pipes[2];
    struct iovec iov = {"x", 1};
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    close(pair[1]);
    signal(SIGPIPE, SIG_DFL);
    assert_int_equal(kvfi_sys->writev(pair[0], &iov, 1), -1);
    assert_int_equal(errno, EPIPE);
    close(pair[0]);
    assert_int_equal(pipe(pipes), 0);
    assert_int_equal(kvfi_sys->writev(pipes[1], &iov, 1), 1); /* not a socket: plain writev */
    close(pipes[0]);
    close(pipes[1]);
}

static void *blocked_signals(void *out) {
    pthread_sigmask(SIG_SETMASK, NULL, out);
    return NULL;
}

static void threads(void **state) {
    (void)state;
    pthread_t thread;
    sigset_t inside, before, after;
    sigemptyset(&inside);
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    assert_int_equal(kvfi_sys->thread(&thread, blocked_signals, &inside), 0);
    pthread_join(thread, NULL);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    assert_true(sigismember(&inside, SIGINT) == 1 && sigismember(&inside, SIGTERM) == 1);
    assert_int_equal(sigismember(&after, SIGINT), sigismember(&before, SIGINT));
}

/* ---- faults */
static void faults(void **state) {
    (void)state;
    kvft_faults_arm(KVFT_ALLOC, 2);
    void *a = kvfi_alloc(1), *b = kvfi_alloc(1), *c = kvfi_alloc(1);
    assert_true(a != NULL && b == NULL && c != NULL);
    assert_int_equal(kvft_faults_live_allocs(), 2);
    kvfi_free(a);
    kvfi_free(c);
    assert_int_equal(kvft_faults_live_allocs(), 0);
    assert_true(kvft_faults_disarm());
    assert_ptr_equal(kvfi_sys_table, &kvfi_sys_real);

    kvft_faults_arm(KVFT_CALL, 1);
    assert_int_equal(kvfi_sys->open("/", O_RDONLY | O_CLOEXEC, 0), -1);
    assert_int_equal(errno, EMFILE);
    int fd = kvfi_sys->open("/", O_RDONLY | O_CLOEXEC, 0); /* only once */
    assert_true(fd >= 0);
    kvfi_sys->close(fd);
    assert_true(kvft_faults_disarm());

    int pipes[2];
    char text[8] = "";
    struct iovec out[2] = {{"", 0}, {"hello", 5}}, in = {text, 5};
    assert_int_equal(pipe(pipes), 0);
    kvft_faults_arm(KVFT_SHORT, 2);
    assert_int_equal(kvfi_sys->writev(pipes[1], out, 2), 5);
    assert_int_equal(kvfi_sys->readv(pipes[0], &in, 1), 1);
    assert_true(kvft_faults_disarm());
    close(pipes[0]);
    close(pipes[1]);

    kvft_faults_arm(KVFT_CALL, 5);
    assert_false(kvft_faults_disarm()); /* never reached */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names),      cmocka_unit_test(errors),   cmocka_unit_test(logging),
        cmocka_unit_test(hex),        cmocka_unit_test(numbers),  cmocka_unit_test(iovecs),
        cmocka_unit_test(sha256),     cmocka_unit_test(hmac),     cmocka_unit_test(xxh3),
        cmocka_unit_test(memory),     cmocka_unit_test(mappings), cmocka_unit_test(deadlines),
        cmocka_unit_test(no_sigpipe), cmocka_unit_test(threads),  cmocka_unit_test(faults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
