/* SPDX-License-Identifier: Apache-2.0
 *
 * The real system table. Calls whose prototypes differ from the table's (variadic ones, those with glibc's transparent
 * unions) have a wrapper of one line; the others are the calls themselves.
 */
#include "base/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* since Linux 5.14; older headers lack the name */
#endif
#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED 24 /* since Linux 5.18 */
#endif

/* ---- memory */
static void *real_map(size_t bytes, int fd, off_t at) {
    int prot = fd < 0 ? PROT_READ | PROT_WRITE : PROT_READ;
    int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
    void *p = mmap(NULL, bytes, prot, flags, fd, at);
    return p == MAP_FAILED ? NULL : p;
}

static int real_populate(void *p, size_t bytes) {
    if (madvise(p, bytes, MADV_POPULATE_READ) == 0) {
        return 0;
    }
    /* A kernel that does not know this advice faults the pages in one by one. */
    return errno == EINVAL ? 0 : -1;
}

static int real_huge(void *p, size_t bytes) {
    return madvise(p, bytes, MADV_HUGEPAGE);
}

/* An engine may have locked all of its memory (mlockall). */
static int real_forget(void *p, size_t bytes) {
    int rc = madvise(p, bytes, MADV_DONTNEED_LOCKED);
    return rc != 0 && errno == EINVAL ? madvise(p, bytes, MADV_DONTNEED) : rc;
}

/* ---- time */
static int64_t clock_us(clockid_t id) {
    struct timespec t;
    clock_gettime(id, &t); /* can't fail for the two clocks below */
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static int64_t real_now_us(void) {
    return clock_us(CLOCK_MONOTONIC);
}

static int64_t real_wall_us(void) {
    return clock_us(CLOCK_REALTIME);
}

static int real_random(void *out, size_t bytes) {
    uint8_t *p = out;
    while (bytes > 0) {
        ssize_t n = getrandom(p, bytes, 0);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return -1;
        }
        p += n;
        bytes -= (size_t)n;
    }
    return 0;
}

/* ---- files */
static int real_open(const char *path, int flags, mode_t mode) {
    return open(path, flags, mode);
}

static int real_openat(int dir, const char *path, int flags, mode_t mode) {
    return openat(dir, path, flags, mode);
}

/* ---- sockets */
static int real_connect(int fd, const struct sockaddr *address, socklen_t len) {
    return connect(fd, address, len);
}

/* If the peer is gone, this returns EPIPE instead of raising a signal that would end the engine. Descriptors that are
 * not sockets are written by writev. */
static ssize_t real_writev(int fd, const struct iovec *iov, int num) {
    struct msghdr message = {0};
    message.msg_iov = (struct iovec *)(uintptr_t)iov; /* sendmsg does not write to it */
    message.msg_iovlen = (size_t)num;
    ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL);
    if (n < 0 && errno == ENOTSOCK) {
        return writev(fd, iov, num);
    }
    return n;
}

static int real_pipe(int out_fds[2], int flags, size_t bytes) {
    int rc = pipe2(out_fds, flags);
    if (rc == 0 && fcntl(out_fds[1], F_SETPIPE_SZ, (int)bytes) < 0) {
        int error = errno;
        (void)close(out_fds[0]);
        (void)close(out_fds[1]);
        errno = error;
        return -1;
    }
    return rc;
}

/* splice has no flag against SIGPIPE. So the signal is blocked, and one raised by splice itself is consumed; a signal
 * that was pending before stays pending. The signal goes to the calling thread, so no other thread's is consumed. A
 * splice that sent something before its reader left raises it too, and returns what it sent. */
static ssize_t real_splice(int from, int to, size_t bytes) {
    sigset_t sigpipe, before, pending;
    sigemptyset(&sigpipe);
    sigaddset(&sigpipe, SIGPIPE);
    if (pthread_sigmask(SIG_BLOCK, &sigpipe, &before) != 0) {
        errno = EINVAL;
        return -1;
    }
    sigpending(&pending);
    ssize_t n = splice(from, NULL, to, NULL, bytes, 0);
    int error = errno;
    bool may_have_raised = n < 0 ? error == EPIPE : (size_t)n < bytes;
    if (may_have_raised && !sigismember(&pending, SIGPIPE)) {
        const struct timespec now = {0};
        (void)sigtimedwait(&sigpipe, NULL, &now);
    }
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = error;
    return n;
}

static int real_eventfd(unsigned initial, int flags) {
    return eventfd(initial, flags);
}

/* ---- threads: signals belong to the engine's threads, never to ours */
static int real_thread(void *out_pthread, void *(*run)(void *), void *arg) {
    sigset_t all, before;
    sigfillset(&all);
    int error = pthread_sigmask(SIG_SETMASK, &all, &before);
    if (error != 0) {
        return error;
    }
    error = pthread_create(out_pthread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

const kvfi_systable kvfi_sys_real = {
    .alloc = malloc,
    .resize = realloc,
    .release = free,
    .map = real_map,
    .populate = real_populate,
    .huge = real_huge,
    .unmap = munmap,
    .forget = real_forget,
    .now_us = real_now_us,
    .wall_us = real_wall_us,
    .random = real_random,
    .open = real_open,
    .openat = real_openat,
    .close = close,
    .fstat = fstat,
    .fstatat = fstatat,
    .faccessat = faccessat,
    .statfs = statfs,
    .statvfs = statvfs,
    .preadv = preadv,
    .pwritev = pwritev,
    .ftruncate = ftruncate,
    .fallocate = fallocate,
    .linkat = linkat,
    .renameat = renameat,
    .unlinkat = unlinkat,
    .mkdirat = mkdirat,
    .utimensat = utimensat,
    .futimens = futimens,
    .flock = flock,
    .resolve = getaddrinfo,
    .socket = socket,
    .connect = real_connect,
    .setsockopt = setsockopt,
    .getsockopt = getsockopt,
    .readv = readv,
    .writev = real_writev,
    .pipe = real_pipe,
    .vmsplice = vmsplice,
    .splice = real_splice,
    .poll = poll,
    .eventfd = real_eventfd,
    .thread = real_thread,
};

const kvfi_systable *kvfi_sys_table = &kvfi_sys_real;

/* ---- deadlines */
int64_t kvfi_deadline(int64_t budget_us) {
    int64_t now = kvfi_sys->now_us();
    if (budget_us <= 0) {
        return now;
    }
    return budget_us > KVFI_NEVER - now ? KVFI_NEVER : now + budget_us;
}

int kvfi_poll_ms(int64_t deadline_us) {
    if (deadline_us == KVFI_NEVER) {
        return -1;
    }
    int64_t left = deadline_us - kvfi_sys->now_us();
    if (left <= 0) {
        return 0;
    }
    /* Rounded up: a poll that ends slightly early would only have to wait again. */
    int64_t ms = left / 1000 + (left % 1000 != 0);
    return ms > INT32_MAX ? INT32_MAX : (int)ms;
}
