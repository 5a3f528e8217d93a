/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder store: how much there is. Each process counts what it writes, and from time to time adds that to a small
 * shared file, so nobody has to scan the folder to know that the bound is near. The figure is a hint: it lacks what a
 * killed process had not added yet, until the next sweep counts.
 *
 * It is read and written under a lock that nobody waits for: a process that does not get it adds later. It is not
 * mapped, because a mapping fails with a signal on a full disk.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>

#include "file/file.h"

enum { USAGE_BYTES = 40 }; /* magic, xxh32 of what follows, bytes, records, writers, swept_s; little-endian */

static const uint8_t magic[4] = {'K', 'V', 'F', 'U'};

static void encode(uint8_t out[USAGE_BYTES], const kvfi_usage *usage) {
    memcpy(out, magic, sizeof magic);
    kvfi_put64(out + 8, usage->bytes);
    kvfi_put64(out + 16, usage->records);
    kvfi_put64(out + 24, usage->writers);
    kvfi_put64(out + 32, (uint64_t)usage->swept_s);
    kvfi_put32(out + 4, kvfi_xxh32(out + 8, USAGE_BYTES - 8));
}

/* An impossible figure is not believed, whatever its checksum: then everything is counted. */
static bool is_plausible(const kvfi_usage *usage) {
    const uint64_t most = (uint64_t)1 << 62;
    return usage->bytes <= most && usage->records <= most && usage->writers <= most && usage->swept_s >= 0;
}

static bool read_from(int fd, kvfi_usage *out) {
    uint8_t raw[USAGE_BYTES];
    struct iovec iov = {raw, sizeof raw};
    *out = (kvfi_usage){0};
    if (kvfi_sys->preadv(fd, &iov, 1, 0) != USAGE_BYTES || memcmp(raw, magic, sizeof magic) != 0 ||
        kvfi_get32(raw + 4) != kvfi_xxh32(raw + 8, USAGE_BYTES - 8)) {
        return false;
    }
    kvfi_usage usage = {.bytes = kvfi_get64(raw + 8),
                        .records = kvfi_get64(raw + 16),
                        .writers = kvfi_get64(raw + 24),
                        .swept_s = (int64_t)kvfi_get64(raw + 32)};
    if (!is_plausible(&usage)) {
        return false;
    }
    *out = usage;
    return true;
}

bool kvfi_file_usage_read(const kvfi_file *file, kvfi_usage *out) {
    kvfi_path path;
    kvfi_file_path_below(file, &path, "usage");
    *out = (kvfi_usage){0};
    int fd = kvfi_sys->open(path.text, KVFI_FILE_READ, 0);
    if (fd < 0) {
        return false;
    }
    bool ok = read_from(fd, out);
    kvfi_sys->close(fd);
    return ok;
}

static void remember(kvfi_file *file, const kvfi_usage *usage) {
    file->shared_bytes = usage->bytes;
    file->writers = usage->writers;
    file->swept_s = usage->swept_s;
}

void kvfi_file_usage_load(kvfi_file *file) {
    kvfi_usage usage;
    (void)kvfi_file_usage_read(file, &usage);
    remember(file, &usage);
}

int kvfi_file_usage_lock(const kvfi_file *file) {
    kvfi_path path;
    kvfi_file_path_below(file, &path, "usage");
    int fd = kvfi_sys->open(path.text, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    /* A file system without locks still needs a count: two simultaneous writers only make it wrong. */
    if (fd >= 0 && kvfi_sys->flock(fd, LOCK_EX | LOCK_NB) != 0 && errno != ENOLCK && errno != ENOSYS &&
        errno != EOPNOTSUPP && errno != EINVAL) {
        int error = errno;
        kvfi_sys->close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

static uint64_t plus(uint64_t value, int64_t change) {
    if (change < 0 && value < (uint64_t)-change) {
        return 0;
    }
    return value + (uint64_t)change;
}

void kvfi_file_usage_set(kvfi_file *file, int fd, const kvfi_usage *usage) {
    uint8_t raw[USAGE_BYTES];
    encode(raw, usage);
    struct iovec iov = {raw, sizeof raw};
    (void)kvfi_sys->pwritev(fd, &iov, 1, 0); /* a full disk: the hint becomes stale, but this process still knows */
    remember(file, usage);
}

void kvfi_file_usage_merge(kvfi_file *file, int fd, kvfi_usage *out) {
    (void)read_from(fd, out); /* without a valid count, count as if nothing had ever been counted */
    out->bytes = plus(out->bytes, atomic_exchange(&file->pending_bytes, 0));
    out->records = plus(out->records, atomic_exchange(&file->pending_records, 0));
    if (!atomic_exchange(&file->is_writer, true)) {
        out->writers++;
    }
    kvfi_file_usage_set(file, fd, out);
}

void kvfi_file_usage_flush(kvfi_file *file) {
    if (file->pending_bytes == 0 && file->pending_records == 0) {
        return;
    }
    int fd = kvfi_file_usage_lock(file);
    if (fd >= 0) {
        kvfi_usage usage;
        kvfi_file_usage_merge(file, fd, &usage);
        kvfi_sys->close(fd);
    }
}

/* Waits up to a second for the lock: another process may be sweeping. */
static int lock_patiently(const kvfi_file *file) {
    int fd = kvfi_file_usage_lock(file);
    for (int i = 0; i < 200 && fd < 0 && errno == EWOULDBLOCK; i++) {
        (void)kvfi_sys->poll(NULL, 0, 5);
        fd = kvfi_file_usage_lock(file);
    }
    return fd;
}

void kvfi_file_usage_end(kvfi_file *file) {
    if (file->pending_bytes == 0 && file->pending_records == 0) {
        return;
    }
    int fd = lock_patiently(file);
    if (fd >= 0) {
        kvfi_usage usage;
        kvfi_file_usage_merge(file, fd, &usage);
        kvfi_sys->close(fd);
    }
}

void kvfi_file_usage_distrust(kvfi_file *file) {
    int fd = lock_patiently(file);
    if (fd >= 0) {
        kvfi_usage usage;
        kvfi_file_usage_merge(file, fd, &usage);
        usage.swept_s = 0;
        kvfi_file_usage_set(file, fd, &usage);
        kvfi_sys->close(fd);
    }
}

/* How much a process may keep to itself: little compared to the bound, for any number of processes. */
static int64_t step(const kvfi_file *file) {
    uint64_t bytes = file->max_bytes / 256;
    return bytes > (16u << 20) ? 16 << 20 : (int64_t)bytes;
}

void kvfi_file_usage_add(kvfi_file *file, int64_t bytes, int64_t records) {
    atomic_fetch_add(&file->pending_records, records);
    int64_t pending = atomic_fetch_add(&file->pending_bytes, bytes) + bytes;
    if (llabs(pending) >= step(file)) {
        kvfi_file_usage_flush(file);
    }
}

bool kvfi_file_is_over(const kvfi_file *file, uint64_t slack) {
    return plus(file->shared_bytes, file->pending_bytes + file->in_flight_bytes) > file->max_bytes + slack;
}
