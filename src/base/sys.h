/* SPDX-License-Identifier: Apache-2.0
 *
 * The one table through which kvferry asks the operating system for anything that can fail: memory, time, files,
 * sockets. Tests install another table to fail the n-th call or to simulate a world. All code calls `kvfi_sys->x(...)`,
 * never x(...). The semantics are those of the calls of the same name, including errno.
 */
#ifndef KVFI_SYS_H
#define KVFI_SYS_H

#include <netdb.h>
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <sys/uio.h>

typedef struct kvfi_systable {
    /* memory */
    void *(*alloc)(size_t bytes); /* never of 0 bytes */
    void *(*resize)(void *old, size_t bytes);
    void (*release)(void *);
    void *(*map)(size_t bytes, int fd,
                 off_t at); /* mmap: fd -1 = anonymous, read and write; else shared and read-only; NULL on failure */
    int (*populate)(void *, size_t bytes); /* madvise MADV_POPULATE_READ: 0, or -1 if a page can't be read */
    int (*huge)(void *, size_t bytes);     /* madvise MADV_HUGEPAGE: larger pages where there are some */
    int (*unmap)(void *, size_t bytes);
    int (*forget)(void *, size_t bytes); /* madvise MADV_DONTNEED: other pages, of zeros, take the place of these */
    /* time */
    int64_t (*now_us)(void);             /* monotonic */
    int64_t (*wall_us)(void);            /* since 1970 */
    int (*random)(void *, size_t bytes); /* getrandom; 0 or -1 */
    /* files */
    int (*open)(const char *path, int flags, mode_t);
    int (*openat)(int dir, const char *path, int flags, mode_t);
    int (*close)(int fd);
    int (*fstat)(int fd, struct stat *);
    int (*fstatat)(int dir, const char *path, struct stat *, int flags);
    int (*faccessat)(int dir, const char *path, int mode, int flags);
    int (*statfs)(const char *path, struct statfs *);
    int (*statvfs)(const char *path, struct statvfs *);
    ssize_t (*preadv)(int fd, const struct iovec *, int num, off_t at);
    ssize_t (*pwritev)(int fd, const struct iovec *, int num, off_t at);
    int (*ftruncate)(int fd, off_t bytes);
    int (*fallocate)(int fd, int mode, off_t at, off_t bytes);
    int (*linkat)(int fromdir, const char *from, int todir, const char *to, int flags);
    int (*renameat)(int fromdir, const char *from, int todir, const char *to);
    int (*unlinkat)(int dir, const char *path, int flags);
    int (*mkdirat)(int dir, const char *path, mode_t);
    int (*utimensat)(int dir, const char *path, const struct timespec times[2], int flags);
    int (*futimens)(int fd, const struct timespec times[2]);
    int (*flock)(int fd, int op);
    /* sockets and waiting */
    int (*resolve)(const char *host, const char *service, const struct addrinfo *hints,
                   struct addrinfo **out); /* getaddrinfo */
    int (*socket)(int family, int type, int protocol);
    int (*connect)(int fd, const struct sockaddr *, socklen_t);
    int (*setsockopt)(int fd, int level, int name, const void *, socklen_t);
    int (*getsockopt)(int fd, int level, int name, void *, socklen_t *);
    ssize_t (*readv)(int fd, const struct iovec *, int num);
    ssize_t (*writev)(int fd, const struct iovec *, int num); /* without SIGPIPE on sockets */
    /* A pipe that holds so many bytes. [0] is for reading, [1] for writing. */
    int (*pipe)(int out_fds[2], int flags, size_t bytes);
    ssize_t (*vmsplice)(int fd, const struct iovec *, size_t num, unsigned flags);
    ssize_t (*splice)(int from, int to, size_t bytes); /* without offsets, flags, and SIGPIPE */
    int (*poll)(struct pollfd *, nfds_t, int timeout_ms);
    int (*eventfd)(unsigned initial, int flags);
    /* threads */
    int (*thread)(void *out_pthread, void *(*run)(void *),
                  void *arg); /* pthread_create, with all signals blocked; 0 or an errno */
} kvfi_systable;

extern const kvfi_systable *kvfi_sys_table; /* set by tests only, while no store is open */
extern const kvfi_systable kvfi_sys_real;
#define kvfi_sys kvfi_sys_table

/* Memory. All of the library's own memory comes from here. alloc_zero checks the product for overflow. NULL on
 * failure. */
void *kvfi_alloc(size_t bytes);
void *kvfi_alloc_zero(size_t num, size_t bytes);
void kvfi_free(void *); /* NULL is fine */
char *kvfi_strndup(const char *, size_t len);

/* Deadlines are absolute times of kvfi_sys->now_us(); KVFI_NEVER waits for ever and is for tests. */
#define KVFI_NEVER INT64_MAX
/* The deadline of a caller that does not wait (KVF_POLL), for calls that accept it. For all other calls it has
 * passed. */
#define KVFI_AT_ONCE INT64_C(-1)
int64_t kvfi_deadline(int64_t budget_us); /* now + budget, saturating */
int kvfi_poll_ms(int64_t deadline_us);    /* time left for poll: rounded up, 0 when the deadline has passed */

#endif
