/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder store: reading. Values are read straight into the memory of the item, or mapped and borrowed.
 */
#include <errno.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include "file/file.h"

#define CHUNK_BYTES ((size_t)4 << 20) /* between two looks at the clock */
#define CHUNK_IOVS  256u
#define REFRESH_NS  ((int64_t)1000000000) /* the time of a value in constant use is updated once a second */

static kvf_reason reason_of(int error) {
    switch (error) {
    case ENOENT:
    case ENOTDIR:
        return KVF_WHY_ABSENT;
    case ELOOP: /* a symbolic link is not one of our files */
    case ENXIO: /* nor is a socket */
        return KVF_WHY_VERSION;
    case ENOMEM:
        return KVF_WHY_NOMEM;
    default:
        return KVF_WHY_UNREACHABLE;
    }
}

int64_t kvfi_file_used_ns(const struct stat *st) {
    return kvfi_sat_add(kvfi_sat_mul(st->st_mtim.tv_sec, 1000000000), st->st_mtim.tv_nsec);
}

static int64_t age_ns(const struct stat *st) {
    return kvfi_sat_sub(kvfi_sys->wall_us() * 1000, kvfi_file_used_ns(st));
}

bool kvfi_file_expired(const kvfi_file *file, const struct stat *st) {
    return file->ttl_s > 0 && age_ns(st) / 1000000000 >= (int64_t)file->ttl_s;
}

void kvfi_file_refresh(const kvfi_opened *opened) {
    int64_t age = age_ns(&opened->st);
    if (age > REFRESH_NS || age < -REFRESH_NS) {
        const struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_nsec = UTIME_NOW}};
        (void)kvfi_sys->futimens(opened->fd, times); /* a read-only folder keeps its times */
    }
}

void kvfi_file_drop(kvfi_file *file, const kvfi_path *path, const struct stat *st) {
    struct stat now;
    if (kvfi_sys->fstatat(AT_FDCWD, path->text, &now, AT_SYMLINK_NOFOLLOW) != 0 || now.st_ino != st->st_ino ||
        now.st_dev != st->st_dev) {
        return;
    }
    if (kvfi_sys->unlinkat(AT_FDCWD, path->text, 0) == 0) {
        kvfi_file_usage_add(file, -(int64_t)kvfi_file_charge((uint64_t)st->st_size), -1);
    }
}

kvf_reason kvfi_file_open_value(kvfi_file *file, kvfi_opened *out, const kvfi_path *path) {
    out->fd = kvfi_sys->open(path->text, KVFI_FILE_READ, 0);
    if (out->fd < 0) {
        kvfi_file_warn(file, path, false);
        return reason_of(errno);
    }
    kvf_reason why = KVF_WHY_NONE;
    if (kvfi_sys->fstat(out->fd, &out->st) != 0) {
        why = KVF_WHY_UNREACHABLE;
    } else if (!S_ISREG(out->st.st_mode)) {
        why = KVF_WHY_VERSION;
    } else if (kvfi_file_expired(file, &out->st)) {
        kvfi_file_drop(file, path, &out->st);
        why = KVF_WHY_ABSENT;
    }
    if (why != KVF_WHY_NONE) {
        kvfi_sys->close(out->fd);
        out->fd = -1;
    }
    return why;
}

/* Reads what the iovecs of the cursor ask for, from `at` on. */
static kvf_reason read_all(int fd, off_t at, kvfi_cursor cursor, size_t bytes, int64_t deadline_us) {
    size_t done = 0;
    while (done < bytes) {
        struct iovec chunk[CHUNK_IOVS];
        size_t num = kvfi_cursor_fill(&cursor, chunk, CHUNK_IOVS, CHUNK_BYTES);
        ssize_t n = kvfi_sys->preadv(fd, chunk, (int)num, at + (off_t)done);
        if (n == 0) {
            return KVF_WHY_TRUNCATED;
        }
        if (n < 0 && errno != EINTR) {
            return reason_of(errno);
        }
        if (n > 0) {
            done += (size_t)n;
            kvfi_cursor_advance(&cursor, (size_t)n);
        }
        if (done < bytes && kvfi_sys->now_us() >= deadline_us) {
            return KVF_WHY_BUDGET;
        }
    }
    return KVF_WHY_NONE;
}

static bool read_at(uint8_t *out, size_t len, const kvfi_opened *opened, off_t at) {
    struct iovec iov = {out, len};
    kvfi_cursor cursor = {.iov = &iov, .num = 1};
    return read_all(opened->fd, at, cursor, len, KVFI_NEVER) == KVF_WHY_NONE;
}

bool kvfi_file_read_front(uint8_t *out, size_t len, const kvfi_opened *opened) {
    return read_at(out, len, opened, 0);
}

bool kvfi_file_read_ends(kvfi_ends *out, const kvfi_opened *opened) {
    off_t sum_at = opened->st.st_size - (off_t)sizeof out->sum;
    return kvfi_file_read_head(out->header, opened) && read_at(out->sum, sizeof out->sum, opened, sum_at);
}

bool kvfi_file_read_head(uint8_t head[KVFI_HEADER_BYTES], const kvfi_opened *opened) {
    return kvfi_file_read_front(head, KVFI_HEADER_BYTES, opened);
}

/* A file is torn if a crash of the machine, or another program, left something other than a whole record: it can never
 * be a hit. A whole record of an unknown version is not torn. */
bool kvfi_file_is_torn(const uint8_t head[KVFI_HEADER_BYTES], const struct stat *st) {
    kvfi_header header;
    switch (kvfi_header_decode(&header, head)) {
    case KVF_WHY_NONE:
        return (uint64_t)st->st_size != kvfi_record_bytes(&header);
    case KVF_WHY_VERSION:
        return memcmp(head, "KVF", 3) != 0;
    default:
        return true;
    }
}

/* The size differs from the requested one: it may be a whole record of another block, or torn. */
static void drop_if_torn(kvfi_file *file, const kvfi_path *path, const kvfi_opened *opened) {
    uint8_t head[KVFI_HEADER_BYTES];
    if (opened->st.st_size < (off_t)sizeof head ||
        (kvfi_file_read_head(head, opened) && kvfi_file_is_torn(head, &opened->st))) {
        kvfi_file_drop(file, path, &opened->st);
    }
}

/* The layer above has verified the bytes. A damaged value, or one under a wrong name, will never be a hit. */
static void act_on_check(kvfi_file *file, const kvfi_path *path, const kvfi_opened *opened, const kvfi_item *item) {
    switch (item->why) {
    case KVF_WHY_NONE:
        kvfi_file_refresh(opened);
        break;
    case KVF_WHY_CHECKSUM:
    case KVF_WHY_OTHER_SPACE:
        kvfi_file_drop(file, path, &opened->st);
        break;
    case KVF_WHY_TRUNCATED:
    case KVF_WHY_VERSION:
        drop_if_torn(file, path, opened);
        break;
    default:
        break;
    }
}

static void get_one(kvfi_file *file, kvfi_feed *feed, kvfi_item *item) {
    kvfi_path path;
    kvfi_file_path(file, &path, &item->addr);
    kvfi_opened opened;
    kvf_reason why = kvfi_file_open_value(file, &opened, &path);
    if (why != KVF_WHY_NONE) {
        kvfi_feed_done(feed, item, KVF_MISS, why);
        return;
    }
    why = KVF_WHY_TRUNCATED;
    if ((uint64_t)opened.st.st_size == item->bytes) {
        why = read_all(opened.fd, 0, kvfi_cursor_of(item), item->bytes, feed->deadline_us);
        kvfi_feed_moved(feed, item->bytes);
    }
    kvfi_feed_done(feed, item, why == KVF_WHY_NONE ? KVF_OK : KVF_MISS, why);
    act_on_check(file, &path, &opened, item);
    kvfi_sys->close(opened.fd);
}

void kvfi_file_get(kvfi_tier *tier, kvfi_feed *feed) {
    for (kvfi_item *item; (item = kvfi_feed_next(feed)) != NULL;) {
        get_one((kvfi_file *)tier, feed, item);
    }
}

/* Opens a value and reads its header. Removes a torn one. */
static kvf_reason open_whole(kvfi_file *file, kvfi_opened *out, uint8_t head[KVFI_HEADER_BYTES],
                             const kvfi_addr *addr) {
    kvfi_path path;
    kvfi_file_path(file, &path, addr);
    kvf_reason why = kvfi_file_open_value(file, out, &path);
    if (why != KVF_WHY_NONE) {
        return why;
    }
    bool torn = out->st.st_size < KVFI_HEADER_BYTES;
    if (!torn && !kvfi_file_read_head(head, out)) {
        why = KVF_WHY_UNREACHABLE;
    } else if (torn || kvfi_file_is_torn(head, &out->st)) {
        why = KVF_WHY_TRUNCATED;
    }
    if (why == KVF_WHY_NONE) {
        return why;
    }
    if (why == KVF_WHY_TRUNCATED) {
        kvfi_file_drop(file, &path, &out->st);
    }
    kvfi_sys->close(out->fd);
    return why;
}

static kvf_reason peek_one(kvfi_file *file, uint8_t head[KVFI_HEADER_BYTES], const kvfi_addr *addr) {
    kvfi_opened opened;
    kvf_reason why = open_whole(file, &opened, head, addr);
    if (why == KVF_WHY_NONE) {
        kvfi_sys->close(opened.fd);
    }
    return why;
}

void kvfi_file_peek(kvfi_tier *tier, const kvfi_addr *addrs, size_t num, kvfi_peek *out, uint64_t *round_trips,
                    int64_t deadline_us, int64_t patience_us) {
    (void)round_trips; /* there is no server to wait for */
    (void)patience_us;
    for (size_t i = 0; i < num; i++) {
        bool late = kvfi_sys->now_us() >= deadline_us;
        out[i].why = late ? KVF_WHY_BUDGET : peek_one((kvfi_file *)tier, out[i].header, &addrs[i]);
    }
}

kvf_reason kvfi_file_touch(kvfi_file *file, const kvfi_addr *addr) {
    kvfi_opened opened;
    uint8_t head[KVFI_HEADER_BYTES];
    kvf_reason why = open_whole(file, &opened, head, addr);
    if (why == KVF_WHY_NONE) {
        kvfi_file_refresh(&opened);
        kvfi_sys->close(opened.fd);
    }
    return why;
}

/* ---- lending: the mapping outlives the name, so eviction does not touch it */

static bool is_ours_alone(const struct stat *st) {
    return st->st_uid == geteuid() && (st->st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

bool kvfi_file_is_private(const kvfi_file *file, const struct stat *st, const kvfi_addr *addr) {
    kvfi_path path;
    kvfi_file_path(file, &path, addr);
    bool ours = is_ours_alone(st);
    while (ours && strlen(path.text) > file->root_len) { /* the folders, up to the root of the store */
        struct stat folder;
        kvfi_file_cut_name(&path);
        ours = kvfi_sys->fstatat(AT_FDCWD, path.text, &folder, 0) == 0 && is_ours_alone(&folder);
    }
    return ours;
}

/* Reads every page in here: a page that the disk can't read then causes a miss, not a SIGBUS in the engine. */
static kvf_reason bring_in(uint8_t *data, size_t len, int64_t deadline_us) {
    for (size_t done = 0; done < len; done += CHUNK_BYTES) {
        size_t part = len - done < CHUNK_BYTES ? len - done : CHUNK_BYTES;
        if (kvfi_sys->populate(data + done, part) != 0) {
            return KVF_WHY_UNREACHABLE;
        }
        if (done + part < len && kvfi_sys->now_us() >= deadline_us) {
            return KVF_WHY_BUDGET;
        }
    }
    return KVF_WHY_NONE;
}

kvf_reason kvfi_file_map(kvfi_loan *out, const kvfi_opened *opened, int64_t deadline_us) {
    size_t len = (size_t)opened->st.st_size;
    void *data = kvfi_sys->map(len, opened->fd, 0);
    if (data == NULL) {
        return KVF_WHY_NOMEM;
    }
    kvf_reason why = bring_in(data, len, deadline_us);
    if (why != KVF_WHY_NONE) {
        kvfi_sys->unmap(data, len);
        return why;
    }
    *out = (kvfi_loan){.data = data, .len = len};
    return KVF_WHY_NONE;
}

/* If the caller expects no length, a file that uses less disk space than its length is not borrowed: it may claim any
 * length, and would occupy that much memory once read. */
static bool has_expected_length(const struct stat *st, size_t bytes) {
    return bytes == 0 ? st->st_size <= (int64_t)st->st_blocks * 512 : (uint64_t)st->st_size == bytes;
}

static kvf_reason lend(const kvfi_file *file, kvfi_loan *out, const kvfi_opened *opened, const kvfi_addr *addr,
                       size_t bytes, int64_t deadline_us) {
    if (!has_expected_length(&opened->st, bytes)) {
        return bytes == 0 ? KVF_WHY_ABSENT : KVF_WHY_TRUNCATED;
    }
    if (!kvfi_file_is_private(file, &opened->st, addr)) {
        return KVF_WHY_ABSENT;
    }
    return kvfi_file_map(out, opened, deadline_us);
}

kvf_reason kvfi_file_borrow(kvfi_tier *tier, kvfi_loan *out, const kvfi_addr *addr, size_t bytes, int64_t deadline_us) {
    kvfi_file *file = (kvfi_file *)tier;
    if (file->remote) {
        return KVF_WHY_ABSENT;
    }
    uint8_t head[KVFI_HEADER_BYTES];
    kvfi_opened opened;
    kvf_reason why = open_whole(file, &opened, head, addr);
    if (why != KVF_WHY_NONE) {
        return why;
    }
    why = lend(file, out, &opened, addr, bytes, deadline_us);
    if (why == KVF_WHY_NONE) {
        kvfi_file_refresh(&opened);
    }
    kvfi_sys->close(opened.fd);
    return why;
}

void kvfi_file_give_back(kvfi_tier *tier, kvfi_loan *loan) {
    (void)tier;
    kvfi_sys->unmap((void *)(uintptr_t)loan->data, loan->len);
    *loan = (kvfi_loan){0};
}
