/* SPDX-License-Identifier: Apache-2.0
 *
 * Sends by lending pages (lend.h). The pipe never holds more than what is sent next, so discarding it loses nothing:
 * the same bytes are written instead.
 */
#include "redis/wire/lend.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/utsname.h>

#define PIPE_BYTES ((size_t)256 << 10)

bool kvfi_lend_is_fast_on(const char *release) {
    char *rest = NULL;
    unsigned long major = strtoul(release, &rest, 10), minor = *rest == '.' ? strtoul(rest + 1, NULL, 10) : 0;
    return major > 6 || (major == 6 && minor >= 5);
}

static bool kernel_is_fit(void) {
    struct utsname is;
    return uname(&is) == 0 && kvfi_lend_is_fast_on(is.release);
}

void kvfi_lender_init(kvfi_lender *lender) {
    *lender = (kvfi_lender){.in = -1, .out = -1, .never = !kernel_is_fit()};
}

void kvfi_lender_close(kvfi_lender *lender) {
    if (lender->in >= 0) {
        (void)kvfi_sys->close(lender->in);
        (void)kvfi_sys->close(lender->out);
    }
    kvfi_lender_init(lender);
}

static bool open_pipe(kvfi_lender *lender) {
    int ends[2];
    if (lender->never || lender->in >= 0) {
        return !lender->never;
    }
    if (kvfi_sys->pipe(ends, O_CLOEXEC | O_NONBLOCK, PIPE_BYTES) != 0) {
        lender->never = true;
        return false;
    }
    lender->out = ends[0];
    lender->in = ends[1];
    return true;
}

static ssize_t write_instead(kvfi_lender *lender, int fd, const struct iovec *iov, size_t num) {
    kvfi_lender_close(lender);
    lender->never = true;
    return kvfi_sys->writev(fd, iov, (int)num);
}

static bool is_later(int error) {
    return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

ssize_t kvfi_lend(kvfi_lender *lender, int fd, const struct iovec *iov, size_t num) {
    ssize_t n = 0;
    if (!open_pipe(lender)) {
        return write_instead(lender, fd, iov, num);
    }
    if (lender->inside == 0) {
        n = kvfi_sys->vmsplice(lender->in, iov, num, SPLICE_F_NONBLOCK);
        if (n <= 0) {
            return write_instead(lender, fd, iov, num);
        }
        lender->inside = (size_t)n;
    }
    n = kvfi_sys->splice(lender->out, fd, lender->inside);
    if (n < 0 && is_later(errno)) {
        return n;
    }
    if (n <= 0) {
        return write_instead(lender, fd, iov, num); /* it returns the error again if the socket was the cause */
    }
    lender->inside -= (size_t)n;
    return n;
}
