/* SPDX-License-Identifier: Apache-2.0
 *
 * Lending (redis/wire/lend.h): whatever the socket takes at a time, and wherever lending ends, the bytes arrive
 * unchanged.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "redis/wire/lend.h"
#include "support/faults.h"
#include "support/kit.h"

#define BYTES    ((size_t)3 << 20)
#define MAX_IOVS 200u

static uint8_t *from, *to;
static int ends[2];

static int set_up(void **state) {
    (void)state;
    from = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    to = calloc(1, BYTES);
    assert_true(from != MAP_FAILED && to != NULL);
    for (size_t i = 0; i < BYTES; i++) {
        from[i] = (uint8_t)((i * 2654435761u) >> 13);
    }
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    kvfi_sys_table = &kvfi_sys_real;
    munmap(from, BYTES);
    free(to);
    close(ends[0]);
    close(ends[1]);
    return 0;
}

/* Ragged pieces, some empty, some of a page, none of them ending where the last began. */
static unsigned cut(struct iovec iov[MAX_IOVS], uint64_t *seed) {
    unsigned num = 0;
    for (size_t at = 0; at < BYTES; num++) {
        size_t len = num + 1 == MAX_IOVS ? BYTES : kvft_random(seed) % 3 == 0 ? 4096 : kvft_random(seed) % 40000;
        len = len < BYTES - at ? len : BYTES - at;
        iov[num] = (struct iovec){from + at, len};
        at += len;
    }
    return num;
}

static size_t drain(size_t got, size_t most) {
    ssize_t n = read(ends[1], to + got, most < BYTES - got ? most : BYTES - got);
    assert_true(n >= 0 || errno == EAGAIN);
    return n > 0 ? got + (size_t)n : got;
}

static void advance(struct iovec **iov, unsigned *num, size_t bytes) {
    while (*num > 0 && bytes >= (*iov)->iov_len) {
        bytes -= (*iov)->iov_len;
        ++*iov;
        --*num;
    }
    if (*num > 0) {
        (*iov)->iov_base = (uint8_t *)(*iov)->iov_base + bytes;
        (*iov)->iov_len -= bytes;
    }
}

/* All of it through the socket, which is read in steps of random length. */
static void carry(kvfi_lender *lender, uint64_t seed) {
    struct iovec iovs[MAX_IOVS], *iov = iovs;
    unsigned num = cut(iovs, &seed);
    size_t got = 0;
    memset(to, 0, BYTES);
    while (got < BYTES) {
        ssize_t n = num > 0 ? kvfi_lend(lender, ends[0], iov, num) : 0;
        assert_true(n >= 0 || errno == EAGAIN || errno == EINTR);
        advance(&iov, &num, n > 0 ? (size_t)n : 0);
        got = drain(got, 1 + kvft_random(&seed) % 300000);
    }
    assert_int_equal(num, 0);
    assert_int_equal(lender->inside, 0);
    assert_memory_equal(from, to, BYTES);
}

static void lends(void **state) {
    (void)state;
    kvfi_lender lender;
    kvfi_lender_init(&lender);
    for (uint64_t seed = 1; seed <= 20; seed++) {
        carry(&lender, seed);
    }
    kvfi_lender_close(&lender);
    assert_int_equal(lender.in, -1);
    carry(&lender, 21); /* it can be used again */
    kvfi_lender_close(&lender);
}

/* Nothing is copied: the reader sees what is written to lent memory before it reads. Only callers that can live with
 * that use lending. If this stops being true, lending has become a copy. */
static void pages_are_shared(void **state) {
    (void)state;
    kvfi_lender lender;
    struct iovec iov = {from, 65536};
    kvfi_lender_init(&lender);
    assert_int_equal(kvfi_lend(&lender, ends[0], &iov, 1), 65536);
    if (lender.never) {
        skip(); /* this kernel does not lend */
    }
    memset(from, 0x5a, 65536);
    assert_int_equal(drain(0, 65536), 65536);
    assert_memory_equal(from, to, 65536);
    kvfi_lender_close(&lender);
}

/* ---- where it ends */

static _Atomic int calls_left; /* of vmsplice, or of splice, until one fails */
static int fail_with;

static ssize_t failing_vmsplice(int fd, const struct iovec *iov, size_t num, unsigned flags) {
    if (calls_left-- <= 0) {
        errno = fail_with;
        return -1;
    }
    return kvfi_sys_real.vmsplice(fd, iov, num, flags);
}

static ssize_t failing_splice(int in, int out, size_t bytes) {
    if (calls_left-- <= 0) {
        errno = fail_with;
        return -1;
    }
    return kvfi_sys_real.splice(in, out, bytes);
}

static int failing_pipe(int out_fds[2], int flags, size_t bytes) {
    (void)out_fds;
    (void)flags;
    (void)bytes;
    errno = fail_with;
    return -1;
}

static void with_table(const kvfi_systable *table, int error, bool at_once) {
    kvfi_sys_table = table;
    fail_with = error;
    for (int calls = 0; calls < (at_once ? 1 : 12); calls++) {
        kvfi_lender lender;
        kvfi_lender_init(&lender);
        calls_left = calls;
        carry(&lender, 100 + (uint64_t)calls);
        assert_true(lender.never);
        assert_int_equal(lender.in, -1);
        kvfi_lender_close(&lender);
    }
    kvfi_sys_table = &kvfi_sys_real;
}

static void is_written_instead(void **state) {
    (void)state;
    const int errors[] = {ENOSYS, EPERM, EFAULT, EINVAL, ENOMEM, EMFILE};
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        kvfi_systable table = kvfi_sys_real;
        table.vmsplice = failing_vmsplice;
        with_table(&table, errors[i], false);
        table = kvfi_sys_real;
        table.splice = failing_splice;
        with_table(&table, errors[i], false);
        table = kvfi_sys_real;
        table.pipe = failing_pipe;
        with_table(&table, errors[i], true);
    }
}

/* A page that can't be lent lies behind others that can: they go, and from there on everything is written, or fails as
 * a write does. */
static void memory_that_is_not_there(void **state) {
    (void)state;
    kvfi_lender lender;
    kvfi_lender_init(&lender);
    assert_int_equal(munmap(from + 65536, 65536), 0);
    struct iovec iov[2] = {{from, 65536}, {from + 65536, 65536}};
    ssize_t n = kvfi_lend(&lender, ends[0], iov, 2);
    assert_true(n > 0 && n <= 65536);
    for (size_t sent = (size_t)n; n > 0; sent += n > 0 ? (size_t)n : 0) {
        assert_true(sent <= 65536);
        iov[0] = (struct iovec){from + sent, 65536 - sent};
        n = kvfi_lend(&lender, ends[0], iov, 2);
    }
    assert_int_equal(errno, EFAULT);
    assert_int_equal(drain(0, 65536), 65536);
    assert_memory_equal(from, to, 65536);
    kvfi_lender_close(&lender);
}

/* One call of each kind fails, does a single byte only, or makes descriptor 0, at every place. */
static void faults(void **state) {
    (void)state;
    const kvft_fault_kind kinds[] = {KVFT_CALL, KVFT_SHORT, KVFT_ZERO};
    for (size_t k = 0; k < 3; k++) {
        for (uint64_t nth = 1; nth < (kinds[k] == KVFT_ZERO ? 3 : 40); nth++) {
            kvfi_lender lender;
            kvfi_lender_init(&lender);
            kvft_faults_arm(kinds[k], nth);
            carry(&lender, 7);
            kvfi_lender_close(&lender);
            assert_true(kvft_faults_disarm());
        }
    }
}

/* A reader that has gone is an errno. SIGPIPE has its default action here: a signal would end the test. One that was
 * pending before stays pending. */
static void no_sigpipe(void **state) {
    (void)state;
    sigset_t sigpipe, pending;
    kvfi_lender lender;
    struct iovec iov = {from, 65536};
    kvfi_lender_init(&lender);
    signal(SIGPIPE, SIG_DFL);
    close(ends[1]);
    assert_int_equal(kvfi_lend(&lender, ends[0], &iov, 1), -1);
    assert_int_equal(errno, EPIPE);
    int pipes[2];
    assert_int_equal(kvfi_sys->pipe(pipes, O_CLOEXEC, 65536), 0);
    assert_int_equal(write(pipes[1], "x", 1), 1);
    assert_int_equal(kvfi_sys->splice(pipes[0], ends[0], 1), -1);
    assert_int_equal(errno, EPIPE);
    sigpending(&pending);
    assert_false(sigismember(&pending, SIGPIPE));

    sigemptyset(&sigpipe);
    sigaddset(&sigpipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe, NULL);
    raise(SIGPIPE);
    assert_int_equal(kvfi_sys->splice(pipes[0], ends[0], 1), -1);
    sigpending(&pending);
    assert_true(sigismember(&pending, SIGPIPE));
    const struct timespec now = {0};
    assert_int_equal(sigtimedwait(&sigpipe, NULL, &now), SIGPIPE);
    pthread_sigmask(SIG_UNBLOCK, &sigpipe, NULL);
    close(pipes[0]);
    close(pipes[1]);
    ends[1] = dup(ends[0]); /* for tear_down */
    kvfi_lender_close(&lender);
}

static void *read_a_little(void *arg) {
    static uint8_t some[65536];
    for (size_t left = (uintptr_t)arg; left > 0;) {
        ssize_t n = read(ends[1], some, left < sizeof some ? left : sizeof some);
        left -= n > 0 ? (size_t)n : 0;
    }
    close(ends[1]);
    return NULL;
}

/* The reader goes while one splice is at it: what had gone is what it returns, and the signal is raised all the
 * same. */
static void no_sigpipe_in_the_middle(void **state) {
    (void)state;
    signal(SIGPIPE, SIG_DFL);
    for (uintptr_t i = 0; i < 200; i++) {
        pthread_t thread;
        kvfi_lender lender;
        struct iovec iov = {from, BYTES};
        kvfi_lender_init(&lender);
        assert_int_equal(pthread_create(&thread, NULL, read_a_little, (void *)(i * 10007)), 0);
        ssize_t n = 0;
        while (n >= 0 || errno == EAGAIN) {
            n = kvfi_lend(&lender, ends[0], &iov, 1);
        }
        assert_true(errno == EPIPE || errno == ECONNRESET);
        pthread_join(thread, NULL);
        kvfi_lender_close(&lender);
        close(ends[0]);
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    }
}

/* Versions are compared number by number. An unreadable one counts as too old. */
static void kernels(void **state) {
    (void)state;
    static const char *const fit[] = {"6.5", "6.5.0-rc1", "6.10.3", "7.0", "10.1"};
    static const char *const old[] = {"6.4.16", "6", "5.19", "5.5", "", "x"};
    for (size_t i = 0; i < sizeof fit / sizeof *fit; i++) {
        assert_true(kvfi_lend_is_fast_on(fit[i]));
    }
    for (size_t i = 0; i < sizeof old / sizeof *old; i++) {
        assert_false(kvfi_lend_is_fast_on(old[i]));
    }
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(lends),  TEST(pages_are_shared), TEST(is_written_instead),       TEST(memory_that_is_not_there),
        TEST(faults), TEST(no_sigpipe),       TEST(no_sigpipe_in_the_middle), cmocka_unit_test(kernels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
