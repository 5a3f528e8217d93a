/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder store: administration.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "file/file.h"

/* ---- remove, each and clear */

kvf_status kvfi_file_remove(kvfi_tier *tier, kvf_error *err, const kvfi_addr *addr, int64_t deadline_us) {
    (void)deadline_us;
    kvfi_file *file = (kvfi_file *)tier;
    kvfi_path path;
    struct stat st;
    kvfi_file_path(file, &path, addr);
    int rc = kvfi_sys->fstatat(AT_FDCWD, path.text, &st, AT_SYMLINK_NOFOLLOW);
    if (rc == 0) {
        rc = kvfi_sys->unlinkat(AT_FDCWD, path.text, 0);
    }
    if (rc == 0) {
        kvfi_file_usage_add(file, -(int64_t)kvfi_file_charge((uint64_t)st.st_size), -1);
        return KVF_OK;
    }
    if (errno == ENOENT || errno == ENOTDIR) {
        return KVF_MISS;
    }
    return kvfi_fail(err, KVF_IO, "%.170s can't be removed: %s", path.text, strerror(errno));
}

static kvf_reason remove_one(kvfi_tier *tier, const kvfi_addr *addr) {
    kvf_status status = kvfi_file_remove(tier, NULL, addr, KVFI_NEVER);
    return status == KVF_OK ? KVF_WHY_NONE : status == KVF_MISS ? KVF_WHY_ABSENT : KVF_WHY_UNREACHABLE;
}

void kvfi_file_each(kvfi_tier *tier, kvfi_deed deed, const kvfi_addr *addrs, size_t num, kvf_reason *out,
                    int64_t deadline_us, int64_t patience_us) {
    (void)patience_us;
    for (size_t i = 0; i < num; i++) {
        if (kvfi_sys->now_us() >= deadline_us) {
            out[i] = KVF_WHY_BUDGET;
        } else {
            out[i] = deed == KVFI_TOUCH ? kvfi_file_touch((kvfi_file *)tier, &addrs[i]) : remove_one(tier, &addrs[i]);
        }
    }
}

typedef struct clearing {
    kvfi_file *file;
    uint64_t removed;
    int error;
} clearing;

static int clear_one(void *ctx, const kvfi_file_name *name) {
    clearing *c = ctx;
    struct stat st;
    if (name->addr == NULL || kvfi_sys->fstatat(name->dir, name->base, &st, AT_SYMLINK_NOFOLLOW) != 0) {
        return 0;
    }
    if (kvfi_sys->unlinkat(name->dir, name->base, 0) == 0) {
        c->removed++;
        kvfi_file_usage_add(c->file, -(int64_t)kvfi_file_charge((uint64_t)st.st_size), -1);
    } else if (errno != ENOENT && c->error == 0) {
        c->error = errno;
    }
    return 0;
}

/* The folders of a space are removed too, unless something else is in them. */
static int clear_folders(void *ctx, int dir, const char *base) {
    const kvf_digest *space = ctx;
    uint8_t digest[8];
    if (!kvfi_unhex(digest, base, sizeof digest) ||
        (space != NULL && memcmp(space->bytes, digest, sizeof digest) != 0)) {
        return 0;
    }
    for (unsigned i = 0; i < 256; i++) {
        char shard[24];
        snprintf(shard, sizeof shard, "%.16s/%02x", base, i);
        (void)kvfi_sys->unlinkat(dir, shard, AT_REMOVEDIR);
    }
    (void)kvfi_sys->unlinkat(dir, base, AT_REMOVEDIR);
    return 0;
}

kvf_status kvfi_file_clear(kvfi_tier *tier, uint64_t *removed, kvf_error *err, const kvf_digest *space,
                           int64_t step_us) {
    (void)step_us;
    kvfi_file *file = (kvfi_file *)tier;
    clearing c = {.file = file};
    kvf_status status = kvfi_file_scan(file, err, space, 0, clear_one, &c);
    int dir = kvfi_sys->open(file->root, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (dir >= 0) {
        kvfi_file_each_in(dir, clear_folders, (void *)(uintptr_t)space);
    }
    if (c.removed > 0) {
        kvfi_file_usage_distrust(
            file); /* a simultaneous sweep may not have seen it, and its size was subtracted from the count again */
    }
    *removed = c.removed;
    if (status == KVF_OK && c.error != 0) {
        return kvfi_fail(err, KVF_IO, "not all of %.160s could be removed: %s", file->root, strerror(c.error));
    }
    return status;
}

/* ---- walk */

typedef struct walk {
    kvfi_file *file;
    bool whole;
    kvfi_sight_fn fn;
    void *ctx;
} walk;

static int64_t ttl_left_ms(const kvfi_file *file, const struct stat *st) {
    if (file->ttl_s == 0) {
        return -1;
    }
    int64_t age_ms = kvfi_sat_sub(kvfi_sys->wall_us(), kvfi_file_used_ns(st) / 1000) / 1000;
    int64_t left_ms = kvfi_sat_sub((int64_t)file->ttl_s * 1000, age_ms);
    return left_ms > 0 ? left_ms : 0;
}

static int show_foreign(const walk *w, const kvfi_file_name *name) {
    struct stat st;
    if (kvfi_sys->fstatat(name->dir, name->base, &st, AT_SYMLINK_NOFOLLOW) != 0) {
        return 0;
    }
    return w->fn(w->ctx, &(kvfi_sight){.kind = KVF_ENTRY_FOREIGN,
                                       .name = name->path,
                                       .stored_bytes = (uint64_t)st.st_size,
                                       .ttl_ms = -1,
                                       .stored_s = st.st_mtim.tv_sec});
}

/* Mapped if nobody else can change it meanwhile, otherwise copied. */
static int show_whole(const walk *w, kvfi_sight *sight, const kvfi_opened *opened) {
    kvfi_loan loan = {0};
    uint8_t *copy = NULL;
    size_t len = (size_t)opened->st.st_size;
    bool mapped = !w->file->remote && kvfi_file_is_private(w->file, &opened->st, sight->addr) &&
                  kvfi_file_map(&loan, opened, KVFI_NEVER) == KVF_WHY_NONE;
    if (!mapped) {
        copy = kvfi_alloc(len);
    }
    bool read = mapped || (copy != NULL && kvfi_file_read_front(copy, len, opened));
    sight->head = mapped ? loan.data : read ? copy : NULL;
    sight->head_len = read ? len : 0;
    int stop = w->fn(w->ctx, sight);
    if (mapped) {
        kvfi_file_give_back(&w->file->tier, &loan);
    }
    kvfi_free(copy);
    return stop;
}

/* A value that can't be read is shown without its bytes. The layer above calls that damage. */
static int show_value(const walk *w, const kvfi_file_name *name, const kvfi_opened *opened) {
    kvfi_sight sight = {.kind = KVF_ENTRY_BLOCK,
                        .name = name->path,
                        .stored_bytes = (uint64_t)opened->st.st_size,
                        .ttl_ms = ttl_left_ms(w->file, &opened->st),
                        .stored_s = opened->st.st_mtim.tv_sec,
                        .addr = name->addr};
    uint8_t head[KVFI_SIGHT_BYTES];
    size_t len = opened->st.st_size < KVFI_SIGHT_BYTES ? (size_t)opened->st.st_size : KVFI_SIGHT_BYTES;
    if (len >= KVFI_HEADER_BYTES && kvfi_file_read_front(head, len, opened)) {
        sight.head = head;
        sight.head_len = len;
    }
    /* A torn value is shown with whatever is known of it. It may have any size. */
    if (!w->whole || sight.head == NULL || kvfi_file_is_torn(head, &opened->st)) {
        return w->fn(w->ctx, &sight);
    }
    return show_whole(w, &sight, opened);
}

static int show(void *ctx, const kvfi_file_name *name) {
    const walk *w = ctx;
    if (name->addr == NULL) {
        return show_foreign(w, name);
    }
    kvfi_opened opened = {.fd = kvfi_sys->openat(name->dir, name->base, KVFI_FILE_READ, 0)};
    if (opened.fd < 0) {
        return errno == ENOENT ? 0 : show_foreign(w, name);
    }
    int stop = 0;
    if (kvfi_sys->fstat(opened.fd, &opened.st) != 0 || !S_ISREG(opened.st.st_mode)) {
        stop = show_foreign(w, name);
    } else if (!kvfi_file_expired(w->file, &opened.st)) {
        stop = show_value(w, name, &opened);
    }
    kvfi_sys->close(opened.fd);
    return stop;
}

kvf_status kvfi_file_walk(kvfi_tier *tier, kvf_error *err, const kvf_digest *space, bool whole, kvfi_sight_fn fn,
                          void *ctx, int64_t step_us) {
    (void)step_us;
    walk w = {.file = (kvfi_file *)tier, .whole = whole, .fn = fn, .ctx = ctx};
    return kvfi_file_scan(w.file, err, space, 0, show, &w);
}

/* ---- doctor */

/* File systems whose files another machine can change or remove. */
bool kvfi_file_on_network(const char *path) {
    static const uint32_t types[] = {
        0x6969,     /* nfs */
        0x517b,     /* smb */
        0xff534d42, /* cifs */
        0xfe534d42, /* smb2 */
        0x00c36400, /* ceph */
        0x0bd00bd0, /* lustre */
        0x47504653, /* gpfs */
        0x01021997, /* 9p */
        0x65735546, /* fuse */
        0x5346414f, /* afs */
        0x7461636f, /* ocfs2 */
        0x01161970, /* gfs2 */
    };
    struct statfs fs;
    if (kvfi_sys->statfs(path, &fs) != 0) {
        return false;
    }
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if ((uint32_t)fs.f_type == types[i]) {
            return true;
        }
    }
    return false;
}

typedef struct exam {
    kvfi_file *file;
    const char *folder;
    kvf_finding_fn fn;
    void *ctx;
    kvfi_usage usage;
} exam;

__attribute__((format(printf, 5, 6))) static void report(const exam *e, kvf_severity severity, const char *code,
                                                         const char *mend, const char *format, ...) {
    char what[512];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    e->fn(e->ctx, &(kvf_finding){.severity = severity, .code = code, .what = what, .mend = mend});
}

/* "94.4 MiB" */
static const char *size_text(char out[24], uint64_t bytes) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)bytes;
    size_t unit = 0;
    for (; value >= 1024; unit++) {
        value /= 1024;
    }
    snprintf(out, 24, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
    return out;
}

static void examine_permissions(const exam *e) {
    struct stat st;
    if (kvfi_sys->fstatat(AT_FDCWD, e->file->root, &st, 0) != 0) {
        kvfi_path path;
        kvfi_culprit culprit;
        snprintf(path.text, sizeof path.text, "%s", e->file->root);
        kvfi_file_culprit(e->file, &culprit, &path);
        bool theirs = culprit.owner[0] != '\0';
        report(e, KVF_WARNING, "no-folder", theirs ? culprit.mend : "create it, with write permission for this user",
               "%s is missing: %s%s%.200s%s", e->file->root, strerror(errno), theirs ? "; above it is " : "",
               theirs ? culprit.path.text : "", culprit.owner);
        return;
    }
    if (!kvfi_file_try_write(e->file)) {
        report(e, KVF_WARNING, "not-writable",
               "give this user write permission, free some space, or mount it read-write",
               "nothing can be written to %s (%s): blocks are loaded from it, but none are stored", e->folder,
               strerror(errno));
    }
    if (st.st_uid != geteuid() && geteuid() != 0) {
        report(e, KVF_NOTE, "other-owner", "use a folder of this user's own, unless it is shared on purpose",
               "%s belongs to user %u: trust its records only as far as that user", e->folder, (unsigned)st.st_uid);
    }
    if ((st.st_mode & (S_IWGRP | S_IWOTH | S_IRGRP | S_IROTH)) != 0) {
        report(e, KVF_WARNING, "open-permissions", "chmod 700 the folder",
               "other users may look into %s (mode %04o): records hold prompts", e->file->root,
               (unsigned)st.st_mode & 07777u);
    }
}

/* ---- the folders that exist: one of another user blocks its records, and all later ones of their prompts */

typedef struct folders {
    uint64_t num, num_denied;
    char first[PATH_MAX]; /* denied */
} folders;

static void look_at_folder(folders *f, int dir, const char *base, const char *path) {
    f->num++;
    if (kvfi_sys->faccessat(dir, base, R_OK | W_OK | X_OK, AT_EACCESS) != 0 && f->num_denied++ == 0) {
        snprintf(f->first, sizeof f->first, "%s", path);
    }
}

static int look_at_space(void *ctx, int dir, const char *base) {
    folders *f = ctx;
    uint8_t digest[8];
    char path[64];
    bool space = kvfi_unhex(digest, base, sizeof digest);
    if (!space && strcmp(base, KVFI_FILE_TEMPORARIES) != 0) {
        return 0;
    }
    look_at_folder(f, dir, base, base);
    for (unsigned i = 0; space && i < 256; i++) {
        struct stat st;
        snprintf(path, sizeof path, "%.16s/%02x", base, i);
        if (kvfi_sys->fstatat(dir, path, &st, 0) == 0) {
            look_at_folder(f, dir, path, path);
        }
    }
    return 0;
}

static void examine_folders(const exam *e) {
    folders f = {.num = 0};
    int dir = kvfi_sys->open(e->file->root, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (dir >= 0) {
        kvfi_file_each_in(dir, look_at_space, &f);
    }
    if (f.num_denied > 0) {
        kvfi_path path;
        kvfi_culprit culprit;
        kvfi_file_path_below(e->file, &path, f.first);
        kvfi_file_culprit(e->file, &culprit, &path);
        report(e, KVF_WARNING, "denied-folders", culprit.mend,
               "%llu of %llu folders can't be read and written by this user, the first is %.200s%s: blocks in them are "
               "misses or are not stored, and later blocks of the same prompts are of no use",
               (unsigned long long)f.num_denied, (unsigned long long)f.num, culprit.path.text, culprit.owner);
    }
}

static void examine_space(const exam *e) {
    struct statvfs fs;
    if (kvfi_sys->statvfs(e->folder, &fs) != 0) {
        return;
    }
    uint64_t all = (uint64_t)fs.f_blocks * fs.f_frsize;
    uint64_t available = (uint64_t)fs.f_bavail * fs.f_frsize;
    uint64_t max = e->file->max_bytes;
    char first[24], second[24], third[24];
    uint64_t missing = max > e->usage.bytes ? max - e->usage.bytes : 0;
    if (all > 0 && available < all / 50) {
        report(e, KVF_WARNING, "disk-nearly-full", "free some space; until then each store evicts, or fails",
               "%s of %s are free on the disk of %s", size_text(first, available), size_text(second, all), e->folder);
    } else if (missing > available) {
        report(e, KVF_WARNING, "max-over-free", "set a smaller max in the URL, or free some space",
               "the bound of %s can't be reached: %s are used, and the disk has %s left", size_text(first, max),
               size_text(second, e->usage.bytes), size_text(third, available));
    }
    if (fs.f_files > 0 && fs.f_favail < fs.f_files / 100) {
        report(e, KVF_WARNING, "few-inodes", "free some files, or make the file system with more inodes",
               "%llu of %llu files can still be made on the disk of %s", (unsigned long long)fs.f_favail,
               (unsigned long long)fs.f_files, e->folder);
    }
}

static void examine_kind(const exam *e) {
    struct statfs fs;
    char most[24];
    if (e->file->remote) {
        report(
            e, KVF_NOTE, "network-file-system", "use a folder on a local disk, or Redis to share between machines",
            "%s is on a network file system: blocks are copied instead of mapped, and a hung server hangs its readers",
            e->folder);
    }
    if (kvfi_sys->statfs(e->folder, &fs) == 0 && (fs.f_type == 0x01021994 || fs.f_type == 0x858458f6)) {
        report(e, KVF_NOTE, "in-memory", "nothing, if that is what you want: it is the fastest kind of folder",
               "%s is in memory: it takes up to %s of memory, and is gone after a restart of the machine", e->folder,
               size_text(most, e->file->max_bytes));
    }
    if (e->file->no_tmpfile) {
        report(e, KVF_NOTE, "named-temporaries", "",
               "%s has no unnamed temporary files, or hard links are denied, or there is no /proc: records are written "
               "to named temporary files and renamed",
               e->folder);
    }
}

void kvfi_file_doctor(kvfi_tier *tier, kvf_finding_fn fn, void *ctx) {
    kvfi_file *file = (kvfi_file *)tier;
    kvfi_path folder;
    snprintf(folder.text, sizeof folder.text, "%s", file->root);
    kvfi_file_cut_name(&folder);
    exam e = {.file = file, .folder = folder.text, .fn = fn, .ctx = ctx};
    kvfi_file_usage_flush(file);
    (void)kvfi_file_usage_read(file, &e.usage);
    char used[24], most[24];
    report(&e, KVF_FINE, "folder", "", "%s: %llu records, %s of at most %s", e.folder,
           (unsigned long long)e.usage.records, size_text(used, e.usage.bytes), size_text(most, file->max_bytes));
    examine_permissions(&e);
    examine_folders(&e);
    examine_space(&e);
    examine_kind(&e);
}
