/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder store: writing. A value is written to an unnamed file, which is then linked into its place. If that is
 * impossible (no unnamed files, hard links denied, no /proc), it is written to a named temporary that is renamed.
 * Either way a killed writer leaves no half value behind. Nothing is synced to the disk: a value torn by a power
 * failure is recognised by its length or checksum, and is a miss.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <unistd.h>

#include "file/file.h"

#define CHUNK_BYTES ((size_t)4 << 20) /* between two looks at the clock */
#define CHUNK_IOVS  256u
#define TRY_US      ((int64_t)5000000)

/* A value being written into the folder. */
typedef struct draft {
    int fd;         /* -1: none */
    kvfi_path name; /* its temporary name, or "" */
    /* it was made without a name, and the system does not allow that, or can't give it a name: it must be written
     * again, with a name from the start */
    bool unnamed;
} draft;

static bool is_named(const draft *d) {
    return *d->name.text != '\0';
}

static void forget_name(draft *d) {
    *d->name.text = '\0';
}

static kvf_reason reason_of(int error) {
    switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
        return KVF_WHY_FULL;
    case ENOMEM:
        return KVF_WHY_NOMEM;
    default:
        return KVF_WHY_UNREACHABLE;
    }
}

static kvf_reason refused(kvfi_file *file, const kvfi_path *at) {
    kvfi_file_warn(file, at, true);
    return reason_of(errno);
}

/* ---- temporary names */

static kvf_reason make_name(const kvfi_file *file, kvfi_path *out) {
    uint8_t random[12];
    char hex[2 * sizeof random + 1];
    char below[sizeof hex + sizeof KVFI_FILE_TEMPORARIES];
    if (kvfi_sys->random(random, sizeof random) != 0) {
        return KVF_WHY_UNREACHABLE;
    }
    kvfi_hex(hex, random, sizeof random);
    snprintf(below, sizeof below, KVFI_FILE_TEMPORARIES "/%s", hex);
    kvfi_file_path_below(file, out, below);
    return KVF_WHY_NONE;
}

static int make_folder_of(kvfi_path *path) {
    char *slash = strrchr(path->text, '/');
    *slash = '\0';
    int rc = kvfi_file_make_dirs(path->text);
    *slash = '/';
    return rc;
}

/* The lock shows a sweep that the writer is alive. */
static kvf_reason open_named(kvfi_file *file, draft *d) {
    kvf_reason why = make_name(file, &d->name);
    if (why != KVF_WHY_NONE) {
        return why;
    }
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
    d->fd = kvfi_sys->open(d->name.text, flags, 0600);
    if (d->fd < 0 && errno == ENOENT && make_folder_of(&d->name) == 0) {
        d->fd = kvfi_sys->open(d->name.text, flags, 0600);
    }
    if (d->fd < 0) {
        why = refused(file, &d->name);
        forget_name(d);
        return why;
    }
    (void)kvfi_sys->flock(d->fd, LOCK_EX | LOCK_NB);
    return KVF_WHY_NONE;
}

/* Keeps errno. */
static bool may_write_to(const kvfi_path *folder) {
    int error = errno;
    struct stat st;
    bool may = kvfi_sys->fstatat(AT_FDCWD, folder->text, &st, 0) == 0 && st.st_uid == geteuid() &&
               (st.st_mode & (S_IWUSR | S_IXUSR)) == (S_IWUSR | S_IXUSR);
    errno = error;
    return may;
}

/* Would a named file work where an unnamed one was refused? A policy (seccomp, SELinux) denies with the errno of a
 * mode. */
static bool knows_no_tmpfile(int error, const kvfi_path *folder) {
    switch (error) {
    case EOPNOTSUPP:
    case EISDIR:
    case EINVAL:
    case ENOSYS:
    case EPERM:
        return true;
    case EACCES:
        return may_write_to(folder);
    default:
        return false;
    }
}

/* `folder` is the destination of the value. It is created when missing. */
static kvf_reason open_draft(kvfi_file *file, draft *d, kvfi_path *folder, bool named) {
    *d = (draft){.fd = -1};
    if (named) {
        return open_named(file, d);
    }
    const int flags = O_TMPFILE | O_WRONLY | O_CLOEXEC;
    d->fd = kvfi_sys->open(folder->text, flags, 0600);
    if (d->fd < 0 && errno == ENOENT && kvfi_file_make_dirs(folder->text) == 0) {
        d->fd = kvfi_sys->open(folder->text, flags, 0600);
    }
    if (d->fd >= 0) {
        return KVF_WHY_NONE;
    }
    d->unnamed = knows_no_tmpfile(errno, folder);
    return d->unnamed ? KVF_WHY_UNREACHABLE : refused(file, folder);
}

static void close_draft(draft *d) {
    int error = errno; /* of the earlier failure */
    if (is_named(d)) {
        (void)kvfi_sys->unlinkat(AT_FDCWD, d->name.text, 0);
    }
    if (d->fd >= 0) {
        kvfi_sys->close(d->fd);
    }
    errno = error;
}

/* ---- contents */

static kvf_reason write_all(int fd, const kvfi_item *item, int64_t deadline_us) {
    kvfi_cursor cursor = kvfi_cursor_of(item);
    size_t done = 0;
    while (done < item->bytes) {
        struct iovec chunk[CHUNK_IOVS];
        size_t num = kvfi_cursor_fill(&cursor, chunk, CHUNK_IOVS, CHUNK_BYTES);
        ssize_t n = kvfi_sys->pwritev(fd, chunk, (int)num, (off_t)done);
        if (n < 0 && errno != EINTR) {
            return reason_of(errno);
        }
        if (n == 0) {
            return KVF_WHY_UNREACHABLE;
        }
        if (n > 0) {
            done += (size_t)n;
            kvfi_cursor_advance(&cursor, (size_t)n);
        }
        if (done < item->bytes && kvfi_sys->now_us() >= deadline_us) {
            return KVF_WHY_BUDGET;
        }
    }
    return KVF_WHY_NONE;
}

/* ---- publishing */

static int link_draft(const draft *d, const kvfi_path *to) {
    char from[32];
    snprintf(from, sizeof from, "/proc/self/fd/%d", d->fd);
    return kvfi_sys->linkat(AT_FDCWD, from, AT_FDCWD, to->text, AT_SYMLINK_FOLLOW);
}

/* An unnamed file can only be linked through /proc, which a bare container may lack. Keeps errno. */
static bool is_without_proc(void) {
    int error = errno;
    struct stat st;
    bool without = kvfi_sys->fstatat(AT_FDCWD, "/proc/self/fd", &st, 0) != 0;
    errno = error;
    return without;
}

/* Can't unnamed files be linked here at all? Some systems deny hard links (Android, containers, FAT behind a layer). */
static bool knows_no_links(int error) {
    switch (error) {
    case EACCES:
    case EPERM:
    case EOPNOTSUPP:
    case ENOSYS:
    case EXDEV:
    case EINVAL:
        return true;
    case ENOENT:
        return is_without_proc();
    default:
        return false;
    }
}

/* Gives an unnamed draft a temporary name, from which it can be renamed over another file. */
static int name_draft(const kvfi_file *file, draft *d) {
    if (make_name(file, &d->name) != KVF_WHY_NONE || link_draft(d, &d->name) != 0) {
        forget_name(d);
        return -1;
    }
    return 0;
}

/* 0, or -1 with errno: EEXIST if there is a value already and `replace` is false. */
static int publish(const kvfi_file *file, draft *d, const kvfi_path *path, bool replace) {
    if (!is_named(d) && !replace) {
        return link_draft(d, path);
    }
    if (!is_named(d) && name_draft(file, d) != 0) {
        return -1;
    }
    int rc = kvfi_sys->renameat(AT_FDCWD, d->name.text, AT_FDCWD, path->text);
    if (rc == 0) {
        forget_name(d);
    }
    return rc;
}

static int make_folders(const kvfi_file *file, kvfi_path *path) {
    kvfi_path temporaries;
    kvfi_file_path_below(file, &temporaries, KVFI_FILE_TEMPORARIES);
    (void)kvfi_file_make_dirs(temporaries.text);
    return make_folder_of(path);
}

/* The folder may have been cleared since the draft was opened, and that of temporaries is made when it is missed. */
static int publish_again(const kvfi_file *file, draft *d, kvfi_path *path, bool replace) {
    int rc = publish(file, d, path, replace);
    if (rc != 0 && errno == ENOENT && make_folders(file, path) == 0) {
        rc = publish(file, d, path, replace);
    }
    return rc;
}

/* ---- what is there already */

typedef struct standing {
    bool any;        /* something exists under the name */
    bool same;       /* ... and it is this value */
    uint64_t charge; /* its size on disk */
} standing;

static standing look(kvfi_file *file, const kvfi_path *path, const kvfi_item *item) {
    kvfi_opened opened;
    kvf_reason why = kvfi_file_open_value(file, &opened, path);
    if (why != KVF_WHY_NONE) {
        return (standing){.any = why != KVF_WHY_ABSENT};
    }
    standing found = {.any = true, .charge = kvfi_file_charge((uint64_t)opened.st.st_size)};
    kvfi_ends ours, theirs;
    if (!item->rewrite && (uint64_t)opened.st.st_size == item->bytes && kvfi_item_ends(&ours, item) &&
        kvfi_file_read_ends(&theirs, &opened) && kvfi_same_record(&ours, &theirs)) {
        found.same = true;
        kvfi_file_refresh(&opened);
    }
    kvfi_sys->close(opened.fd);
    return found;
}

/* ---- put */

/* d->unnamed: it failed, and would succeed with a name. */
static kvf_reason write_draft(kvfi_file *file, draft *d, const kvfi_item *item, kvfi_path *path, standing found,
                              int64_t deadline_us) {
    kvf_reason why = write_all(d->fd, item, deadline_us);
    if (why != KVF_WHY_NONE) {
        return why;
    }
    int rc = publish_again(file, d, path, found.any);
    if (rc != 0 && errno == EEXIST) { /* another writer was faster */
        found = look(file, path, item);
        if (found.same) {
            return KVF_WHY_NONE;
        }
        rc = publish_again(file, d, path, true);
    }
    if (rc != 0) {
        d->unnamed = !is_named(d) && knows_no_links(errno);
        return d->unnamed ? KVF_WHY_UNREACHABLE : refused(file, path);
    }
    kvfi_file_usage_add(file, (int64_t)kvfi_file_charge(item->bytes) - (int64_t)found.charge, found.charge == 0);
    return KVF_WHY_NONE;
}

static kvf_reason try_to_write(kvfi_file *file, const kvfi_item *item, kvfi_path *path, standing found,
                               int64_t deadline_us, bool *named) {
    kvfi_path folder = *path;
    kvfi_file_cut_name(&folder);
    draft d;
    kvf_reason why = open_draft(file, &d, &folder, *named);
    if (why == KVF_WHY_NONE) {
        why = write_draft(file, &d, item, path, found, deadline_us);
    }
    close_draft(&d);
    *named = d.unnamed;
    return why;
}

/* The failure of one draft counts for others only once a named one succeeded. Until then each tries for itself. */
static kvf_reason write_value(kvfi_file *file, const kvfi_item *item, kvfi_path *path, standing found,
                              int64_t deadline_us) {
    bool named = file->no_tmpfile;
    kvf_reason why = try_to_write(file, item, path, found, deadline_us, &named);
    if (named) {
        why = try_to_write(file, item, path, found, deadline_us, &named);
        file->no_tmpfile = file->no_tmpfile || why == KVF_WHY_NONE;
    }
    return why;
}

static kvf_reason put_one(kvfi_file *file, const kvfi_item *item, int64_t deadline_us) {
    uint64_t charge = kvfi_file_charge(item->bytes);
    if (charge > file->max_bytes - file->max_bytes / 10 || /* an eviction leaves at most this much */
        kvfi_is_too_deep(item, file->max_bytes)) {
        return KVF_WHY_FULL;
    }
    kvfi_path path;
    kvfi_file_path(file, &path, &item->addr);
    standing found = look(file, &path, item);
    if (found.same) {
        return KVF_WHY_NONE;
    }
    if (!kvfi_file_reserve(file, charge, deadline_us)) {
        return KVF_WHY_FULL;
    }
    kvf_reason why = write_value(file, item, &path, found, deadline_us);
    if (why == KVF_WHY_FULL && kvfi_file_sweep(file, charge, deadline_us) > 0) {
        why = write_value(file, item, &path, found, deadline_us);
    }
    kvfi_file_release(file, charge);
    return why;
}

void kvfi_file_put(kvfi_tier *tier, kvfi_feed *feed) {
    for (kvfi_item *item; (item = kvfi_feed_next(feed)) != NULL;) {
        kvf_reason why = put_one((kvfi_file *)tier, item, feed->deadline_us);
        kvfi_feed_done(feed, item, why == KVF_WHY_NONE ? KVF_OK : KVF_MISS, why);
    }
}

/* Publishes a file as a save does, and removes it again. */
bool kvfi_file_try_write(kvfi_file *file) {
    static uint8_t text[] = "kvferry doctor\n";
    struct iovec iov = {text, sizeof text - 1};
    kvfi_item item = {.iov = &iov, .num_iov = 1, .bytes = iov.iov_len};
    kvfi_path path;
    if (make_name(file, &path) != KVF_WHY_NONE ||
        write_value(file, &item, &path, (standing){.any = false}, kvfi_deadline(TRY_US)) != KVF_WHY_NONE) {
        return false;
    }
    (void)kvfi_sys->unlinkat(AT_FDCWD, path.text, 0);
    kvfi_file_usage_add(file, -(int64_t)kvfi_file_charge(item.bytes), -1);
    return true;
}
