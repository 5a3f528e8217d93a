/* SPDX-License-Identifier: Apache-2.0
 *
 * The faulty system table: every entry counts its kind of call, and passes it on unless it is its turn to fail.
 */
#include "support/faults.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/sys.h"

static const kvfi_systable *below = &kvfi_sys_real;
static _Atomic int armed_kind = -1; /* -1: none */
static _Atomic uint64_t armed_nth, seen;
static _Atomic bool hit;
static _Atomic int64_t live;

/* Is this call the one that fails? Exactly one call of the armed kind gets a yes, whichever threads they come from. */
static bool turn(kvft_fault_kind kind) {
    if (atomic_load(&armed_kind) != (int)kind || atomic_fetch_add(&seen, 1) + 1 != atomic_load(&armed_nth)) {
        return false;
    }
    atomic_store(&hit, true);
    return true;
}

/* The same for calls: sets errno. */
static bool fails(int error) {
    if (!turn(KVFT_CALL)) {
        return false;
    }
    errno = error;
    return true;
}

static _Atomic int input = -1; /* the standard input, while its number is another descriptor's */

/* The descriptor has the number 0 from now on, if it is its turn. */
static int number(int fd) {
    if (fd <= 0 || !turn(KVFT_ZERO)) {
        return fd;
    }
    atomic_store(&input, fcntl(0, F_DUPFD_CLOEXEC, 3));
    if (dup3(fd, 0, O_CLOEXEC) != 0 || close(fd) != 0) {
        abort();
    }
    return 0;
}

static void restore_input(void) {
    int fd = atomic_exchange(&input, -1);
    if (fd < 0) {
        return;
    }
    if (fcntl(0, F_GETFD) != -1) {
        fprintf(stderr, "faults: descriptor 0 was not closed\n");
        abort();
    }
    if (dup2(fd, 0) != 0 || close(fd) != 0) {
        abort();
    }
}

static void *alive(void *p) {
    if (p != NULL) {
        atomic_fetch_add(&live, 1);
    }
    return p;
}

/* ---- memory */
static void *f_alloc(size_t bytes) {
    if (turn(KVFT_ALLOC)) {
        errno = ENOMEM;
        return NULL;
    }
    return alive(below->alloc(bytes));
}

static void *f_resize(void *old, size_t bytes) {
    if (turn(KVFT_ALLOC)) {
        errno = ENOMEM;
        return NULL;
    }
    void *p = below->resize(old, bytes);
    return old == NULL ? alive(p) : p;
}

static void f_release(void *p) {
    if (p != NULL) {
        atomic_fetch_sub(&live, 1);
    }
    below->release(p);
}

static void *f_map(size_t bytes, int fd, off_t at) {
    if (fd < 0 ? turn(KVFT_ALLOC) : turn(KVFT_CALL)) {
        errno = ENOMEM;
        return NULL;
    }
    return alive(below->map(bytes, fd, at));
}

static int f_populate(void *p, size_t bytes) {
    return fails(EFAULT) ? -1 : below->populate(p, bytes);
}

static int f_huge(void *p, size_t bytes) {
    return fails(EINVAL) ? -1 : below->huge(p, bytes);
}

static int f_unmap(void *p, size_t bytes) {
    atomic_fetch_sub(&live, 1);
    return below->unmap(p, bytes);
}

static int f_forget(void *p, size_t bytes) {
    return fails(ENOMEM) ? -1 : below->forget(p, bytes);
}

/* ---- time never fails */
static int64_t f_now_us(void) {
    return below->now_us();
}

static int64_t f_wall_us(void) {
    return below->wall_us();
}

static int f_random(void *out, size_t bytes) {
    return fails(EIO) ? -1 : below->random(out, bytes);
}

/* No child process may get a descriptor of the library. The flag has one value for files, sockets and pipes. */
static int closed_on_exec(int flags) {
    if ((flags & O_CLOEXEC) == 0) {
        fprintf(stderr, "faults: a descriptor is made without O_CLOEXEC\n");
        abort();
    }
    return flags;
}

/* ---- files */
static int f_open(const char *path, int flags, mode_t mode) {
    return fails(EMFILE) ? -1 : number(below->open(path, closed_on_exec(flags), mode));
}

static int f_openat(int dir, const char *path, int flags, mode_t mode) {
    return fails(EMFILE) ? -1 : number(below->openat(dir, path, closed_on_exec(flags), mode));
}

/* close is not failed: Linux frees the descriptor whatever it answers, and nobody can do anything about it. */
static int f_close(int fd) {
    return below->close(fd);
}

static int f_fstat(int fd, struct stat *out) {
    return fails(EIO) ? -1 : below->fstat(fd, out);
}

static int f_faccessat(int dir, const char *path, int mode, int flags) {
    return fails(EIO) ? -1 : below->faccessat(dir, path, mode, flags);
}

static int f_statfs(const char *path, struct statfs *out) {
    return fails(EIO) ? -1 : below->statfs(path, out);
}

static int f_statvfs(const char *path, struct statvfs *out) {
    return fails(EIO) ? -1 : below->statvfs(path, out);
}

static int f_fstatat(int dir, const char *path, struct stat *out, int flags) {
    return fails(EIO) ? -1 : below->fstatat(dir, path, out, flags);
}

/* The first byte of the iovecs, for calls that are shortened; false if there is none. */
static bool one_byte(struct iovec *out, const struct iovec *iov, int num) {
    for (int i = 0; i < num; i++) {
        if (iov[i].iov_len > 0) {
            *out = (struct iovec){iov[i].iov_base, 1};
            return true;
        }
    }
    return false;
}

static ssize_t f_preadv(int fd, const struct iovec *iov, int num, off_t at) {
    struct iovec one;
    if (fails(EIO)) {
        return -1;
    }
    if (turn(KVFT_SHORT) && one_byte(&one, iov, num)) {
        return below->preadv(fd, &one, 1, at);
    }
    return below->preadv(fd, iov, num, at);
}

static ssize_t f_pwritev(int fd, const struct iovec *iov, int num, off_t at) {
    struct iovec one;
    if (fails(ENOSPC)) {
        return -1;
    }
    if (turn(KVFT_SHORT) && one_byte(&one, iov, num)) {
        return below->pwritev(fd, &one, 1, at);
    }
    return below->pwritev(fd, iov, num, at);
}

static int f_ftruncate(int fd, off_t bytes) {
    return fails(ENOSPC) ? -1 : below->ftruncate(fd, bytes);
}

static int f_fallocate(int fd, int mode, off_t at, off_t bytes) {
    return fails(ENOSPC) ? -1 : below->fallocate(fd, mode, at, bytes);
}

static int f_linkat(int fromdir, const char *from, int todir, const char *to, int flags) {
    return fails(ENOSPC) ? -1 : below->linkat(fromdir, from, todir, to, flags);
}

static int f_renameat(int fromdir, const char *from, int todir, const char *to) {
    return fails(EIO) ? -1 : below->renameat(fromdir, from, todir, to);
}

static int f_unlinkat(int dir, const char *path, int flags) {
    return fails(EIO) ? -1 : below->unlinkat(dir, path, flags);
}

static int f_mkdirat(int dir, const char *path, mode_t mode) {
    return fails(ENOSPC) ? -1 : below->mkdirat(dir, path, mode);
}

static int f_utimensat(int dir, const char *path, const struct timespec times[2], int flags) {
    return fails(EIO) ? -1 : below->utimensat(dir, path, times, flags);
}

static int f_futimens(int fd, const struct timespec times[2]) {
    return fails(EIO) ? -1 : below->futimens(fd, times);
}

static int f_flock(int fd, int op) {
    return fails(ENOLCK) ? -1 : below->flock(fd, op);
}

/* ---- sockets and waiting */
static int f_resolve(const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **out) {
    return turn(KVFT_CALL) ? EAI_AGAIN : below->resolve(host, service, hints, out);
}

static int f_socket(int family, int type, int protocol) {
    return fails(EMFILE) ? -1 : number(below->socket(family, closed_on_exec(type), protocol));
}

static int f_connect(int fd, const struct sockaddr *address, socklen_t len) {
    return fails(ECONNREFUSED) ? -1 : below->connect(fd, address, len);
}

static int f_setsockopt(int fd, int level, int name, const void *value, socklen_t len) {
    return fails(ENOBUFS) ? -1 : below->setsockopt(fd, level, name, value, len);
}

static int f_getsockopt(int fd, int level, int name, void *value, socklen_t *len) {
    return fails(ENOBUFS) ? -1 : below->getsockopt(fd, level, name, value, len);
}

static ssize_t f_readv(int fd, const struct iovec *iov, int num) {
    struct iovec one;
    if (fails(ECONNRESET)) {
        return -1;
    }
    if (turn(KVFT_SHORT) && one_byte(&one, iov, num)) {
        return below->readv(fd, &one, 1);
    }
    return below->readv(fd, iov, num);
}

static ssize_t f_writev(int fd, const struct iovec *iov, int num) {
    struct iovec one;
    if (fails(EPIPE)) {
        return -1;
    }
    if (turn(KVFT_SHORT) && one_byte(&one, iov, num)) {
        return below->writev(fd, &one, 1);
    }
    return below->writev(fd, iov, num);
}

static int f_pipe(int out_fds[2], int flags, size_t bytes) {
    if (fails(EMFILE) || below->pipe(out_fds, closed_on_exec(flags), bytes) != 0) {
        return -1;
    }
    out_fds[0] = number(out_fds[0]);
    out_fds[1] = number(out_fds[1]);
    return 0;
}

static ssize_t f_vmsplice(int fd, const struct iovec *iov, size_t num, unsigned flags) {
    struct iovec one;
    if (fails(EFAULT)) {
        return -1;
    }
    if (turn(KVFT_SHORT) && one_byte(&one, iov, (int)num)) {
        return below->vmsplice(fd, &one, 1, flags);
    }
    return below->vmsplice(fd, iov, num, flags);
}

static ssize_t f_splice(int from, int to, size_t bytes) {
    return fails(EPIPE) ? -1 : below->splice(from, to, turn(KVFT_SHORT) ? 1 : bytes);
}

static int f_poll(struct pollfd *fds, nfds_t num, int timeout_ms) {
    return fails(EINTR) ? -1 : below->poll(fds, num, timeout_ms);
}

static int f_eventfd(unsigned initial, int flags) {
    return fails(EMFILE) ? -1 : number(below->eventfd(initial, closed_on_exec(flags)));
}

static int f_thread(void *out_pthread, void *(*run)(void *), void *arg) {
    return turn(KVFT_CALL) ? EAGAIN : below->thread(out_pthread, run, arg);
}

static const kvfi_systable faulty = {
    .alloc = f_alloc,
    .resize = f_resize,
    .release = f_release,
    .map = f_map,
    .populate = f_populate,
    .huge = f_huge,
    .unmap = f_unmap,
    .forget = f_forget,
    .now_us = f_now_us,
    .wall_us = f_wall_us,
    .random = f_random,
    .open = f_open,
    .openat = f_openat,
    .close = f_close,
    .fstat = f_fstat,
    .fstatat = f_fstatat,
    .faccessat = f_faccessat,
    .statfs = f_statfs,
    .statvfs = f_statvfs,
    .preadv = f_preadv,
    .pwritev = f_pwritev,
    .ftruncate = f_ftruncate,
    .fallocate = f_fallocate,
    .linkat = f_linkat,
    .renameat = f_renameat,
    .unlinkat = f_unlinkat,
    .mkdirat = f_mkdirat,
    .utimensat = f_utimensat,
    .futimens = f_futimens,
    .flock = f_flock,
    .resolve = f_resolve,
    .socket = f_socket,
    .connect = f_connect,
    .setsockopt = f_setsockopt,
    .getsockopt = f_getsockopt,
    .readv = f_readv,
    .writev = f_writev,
    .pipe = f_pipe,
    .vmsplice = f_vmsplice,
    .splice = f_splice,
    .poll = f_poll,
    .eventfd = f_eventfd,
    .thread = f_thread,
};

static void install(void) {
    if (kvfi_sys_table != &faulty) {
        below = kvfi_sys_table;
        atomic_store(&live, 0);
        kvfi_sys_table = &faulty;
    }
}

void kvft_faults_arm(kvft_fault_kind kind, uint64_t nth) {
    atomic_store(&armed_kind, -1);
    atomic_store(&armed_nth, nth);
    atomic_store(&seen, 0);
    atomic_store(&hit, false);
    install();
    atomic_store(&armed_kind, (int)kind);
}

bool kvft_faults_disarm(void) {
    atomic_store(&armed_kind, -1);
    if (kvfi_sys_table == &faulty) {
        kvfi_sys_table = below;
    }
    restore_input();
    return atomic_exchange(&hit, false);
}

uint64_t kvft_faults_live_allocs(void) {
    return (uint64_t)atomic_load(&live);
}

void kvft_faults_watch(void) {
    atomic_store(&armed_kind, -1);
    install();
}
