/* SPDX-License-Identifier: Apache-2.0
 *
 * Loaded into a server by LD_PRELOAD: its time of day runs ahead by as many microseconds as the file $KVFT_CLOCK says,
 * which the test changes while the server runs. So hours of a trace pass in seconds, and the server's ages and times to
 * live are those of the trace. Timers of its event loop (CLOCK_MONOTONIC) stay as they are.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const _Atomic int64_t *ahead;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("KVFT_CLOCK");
    int fd = path != NULL ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *at = fd >= 0 ? mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    ahead = at != MAP_FAILED ? at : NULL;
}

static int64_t now_ns(void) {
    struct timespec t;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec + (ahead != NULL ? *ahead * 1000 : 0);
}

__attribute__((visibility("default"))) int gettimeofday(struct timeval *restrict tv, void *restrict zone) {
    int64_t now = now_ns();
    (void)zone;
    *tv = (struct timeval){.tv_sec = now / 1000000000, .tv_usec = now % 1000000000 / 1000};
    return 0;
}

__attribute__((visibility("default"))) time_t time(time_t *out) {
    time_t now = now_ns() / 1000000000;
    if (out != NULL) {
        *out = now;
    }
    return now;
}

__attribute__((visibility("default"))) int clock_gettime(clockid_t clock, struct timespec *t) {
    if (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE) {
        return (int)syscall(SYS_clock_gettime, clock, t);
    }
    int64_t now = now_ns();
    *t = (struct timespec){.tv_sec = now / 1000000000, .tv_nsec = now % 1000000000};
    return 0;
}
