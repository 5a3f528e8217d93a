/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder store: names, folders, and scanning all of them.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "file/file.h"

enum { SPACE_HEX = 16, SHARD_HEX = 2, KEY_HEX = 64, NUM_SHARDS = 256 };

void kvfi_file_path(const kvfi_file *file, kvfi_path *out, const kvfi_addr *addr) {
    char *p = out->text;
    memcpy(p, file->root, file->root_len);
    p += file->root_len;
    *p++ = '/';
    kvfi_hex(p, addr->space.bytes, SPACE_HEX / 2);
    p += SPACE_HEX;
    *p++ = '/';
    kvfi_hex(p, addr->key.bytes, SHARD_HEX / 2);
    p += SHARD_HEX;
    *p++ = '/';
    kvfi_hex(p, addr->key.bytes, KEY_HEX / 2);
}

void kvfi_file_path_below(const kvfi_file *file, kvfi_path *out, const char *name) {
    snprintf(out->text, sizeof out->text, "%s/%s", file->root, name);
}

void kvfi_file_cut_name(kvfi_path *path) {
    *strrchr(path->text, '/') = '\0';
}

int kvfi_file_make_dirs(char *path) {
    if (kvfi_sys->mkdirat(AT_FDCWD, path, 0700) == 0 || errno == EEXIST) {
        return 0;
    }
    char *slash = strrchr(path, '/');
    if (errno != ENOENT || slash == NULL || slash == path) {
        return -1;
    }
    *slash = '\0';
    int rc = kvfi_file_make_dirs(path);
    *slash = '/';
    if (rc != 0) {
        return rc;
    }
    return kvfi_sys->mkdirat(AT_FDCWD, path, 0700) == 0 || errno == EEXIST ? 0 : -1;
}

/* ---- what is in the way */

/* A command is given whole or not at all: cut short it would name another folder. */
static void say_command(kvfi_culprit *out, const char *before, const char *path, size_t path_len, const char *behind) {
    char text[sizeof out->mend];
    int len = snprintf(text, sizeof text, "As root: %s %.*s%s", before, (int)path_len, path, behind);
    if (len > 0 && (size_t)len < sizeof text) {
        memcpy(out->mend, text, sizeof text);
    }
}

/* Of a folder that belongs to another user. Above the store's own folder, changing the owner is not ours to suggest. */
static void say_mend(const kvfi_file *file, kvfi_culprit *out) {
    size_t len = strlen(out->path.text);
    char chown[32];
    snprintf(chown, sizeof chown, "chown -R %u", (unsigned)geteuid());
    if (len >= file->root_len) {
        say_command(out, chown, file->root, file->root_len, "");
    } else if (len < file->folder_len) {
        say_command(out, "chmod a+x", out->path.text, len, "");
    } else if (!file->shared) {
        say_command(out, chown, out->path.text, len, "");
    } else {
        say_command(out, "cd", file->root, file->folder_len, " && chmod 755 . && chmod 1777 " KVFI_FILE_TENANTS);
    }
}

void kvfi_file_culprit(const kvfi_file *file, kvfi_culprit *out, const kvfi_path *path) {
    int error = errno;
    struct stat st = {.st_uid = geteuid()};
    out->path = *path;
    while (kvfi_sys->fstatat(AT_FDCWD, out->path.text, &st, AT_SYMLINK_NOFOLLOW) != 0 &&
           strchr(out->path.text + 1, '/') != NULL) {
        kvfi_file_cut_name(&out->path);
    }
    out->owner[0] = '\0';
    snprintf(out->mend, sizeof out->mend, "Give this user permission, or mount it read-write.");
    if (st.st_uid != geteuid()) {
        snprintf(out->owner, sizeof out->owner, " of user %u, mode %04o", (unsigned)st.st_uid,
                 (unsigned)st.st_mode & 07777u);
        say_mend(file, out);
    }
    errno = error;
}

kvf_status kvfi_file_unreadable(const kvfi_file *file, kvf_error *err, const kvfi_path *path, int error) {
    kvfi_culprit culprit;
    char what[sizeof err->what];
    kvfi_file_culprit(file, &culprit, path);
    bool denied = error == EACCES || error == EPERM;
    snprintf(what, sizeof what, "%.100s%s can't be read: %s.", culprit.path.text, culprit.owner, strerror(error));
    bool told = denied && strlen(what) + strlen(culprit.mend) + 2 <= sizeof what;
    return kvfi_fail(err, denied ? KVF_CONFIG : KVF_IO, "%s%s%s", what, told ? " " : "", told ? culprit.mend : "");
}

void kvfi_file_warn(kvfi_file *file, const kvfi_path *path, bool writing) {
    int error = errno;
    if ((error != EROFS && error != EACCES && error != EPERM) || atomic_exchange(&file->warned[writing], true)) {
        return;
    }
    kvfi_culprit culprit;
    kvfi_file_culprit(file, &culprit, path);
    kvfi_log(KVF_LOG_WARN, "%.160s%s can't be %s (%s): %s. %s", culprit.path.text, culprit.owner,
             writing ? "written" : "read", strerror(error),
             writing ? "blocks are loaded from it, but none are stored" : "blocks in it are misses", culprit.mend);
    errno = error;
}

/* ---- scanning */

int kvfi_file_each_in(int dir, int (*fn)(void *ctx, int dir, const char *base), void *ctx) {
    DIR *stream = fdopendir(dir);
    if (stream == NULL) {
        kvfi_sys->close(dir);
        return 0;
    }
    int stop = 0;
    for (struct dirent *entry; stop == 0 && (entry = readdir(stream)) != NULL;) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            stop = fn(ctx, dir, entry->d_name);
        }
    }
    closedir(stream);
    return stop;
}

typedef struct scan {
    const kvf_digest *space; /* only this one; NULL = all */
    unsigned first;
    kvfi_file_name_fn fn;
    void *ctx;
    kvfi_addr addr; /* the space that the scan has reached */
    char folder[sizeof KVFI_FILE_DIR + SPACE_HEX + SHARD_HEX + 4];
    int error;        /* the first errno that denied a folder to the scan, */
    kvfi_path denied; /* ... and that folder, below the root */
} scan;

/* `below` is its name below the root of the store, for people. */
static int open_folder(scan *s, int dir, const char *name, const char *below) {
    int fd = kvfi_sys->openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
    if (fd < 0 && errno != ENOENT && s->error == 0) {
        s->error = errno;
        snprintf(s->denied.text, sizeof s->denied.text, "%s", below);
    }
    return fd;
}

static int meet_foreign(const scan *s, int dir, const char *base) {
    char path[sizeof s->folder + NAME_MAX + 2];
    snprintf(path, sizeof path, "%s/%.*s", s->folder, NAME_MAX, base);
    return s->fn(s->ctx, &(kvfi_file_name){.dir = dir, .base = base, .path = path});
}

static int meet_key(void *ctx, int dir, const char *base) {
    scan *s = ctx;
    if (!kvfi_unhex(s->addr.key.bytes, base, KEY_HEX / 2)) {
        return meet_foreign(s, dir, base);
    }
    char path[sizeof s->folder + KEY_HEX + 2];
    snprintf(path, sizeof path, "%s/%.*s", s->folder, (int)KEY_HEX, base);
    return s->fn(s->ctx, &(kvfi_file_name){.dir = dir, .base = base, .path = path, .addr = &s->addr});
}

static int scan_space(scan *s, int space_dir, const char *space_name) {
    for (unsigned i = 0; i < NUM_SHARDS; i++) {
        char shard[SHARD_HEX + 1];
        uint8_t number = (uint8_t)(s->first + i);
        kvfi_hex(shard, &number, 1);
        snprintf(s->folder, sizeof s->folder, "%s/%.16s/%s", KVFI_FILE_DIR, space_name, shard);
        int fd = open_folder(s, space_dir, shard, s->folder + sizeof KVFI_FILE_DIR - 1);
        if (fd >= 0) {
            int stop = kvfi_file_each_in(fd, meet_key, s);
            if (stop != 0) {
                return stop;
            }
        }
    }
    return 0;
}

static bool is_own_name(const char *base) {
    return strcmp(base, "usage") == 0 || strcmp(base, KVFI_FILE_TEMPORARIES) == 0;
}

static int meet_space(void *ctx, int dir, const char *base) {
    scan *s = ctx;
    if (is_own_name(base)) {
        return 0;
    }
    if (!kvfi_unhex(s->addr.space.bytes, base, SPACE_HEX / 2)) {
        snprintf(s->folder, sizeof s->folder, "%s", KVFI_FILE_DIR);
        return s->space == NULL ? meet_foreign(s, dir, base) : 0;
    }
    if (s->space != NULL && memcmp(s->space->bytes, s->addr.space.bytes, SPACE_HEX / 2) != 0) {
        return 0;
    }
    snprintf(s->folder, sizeof s->folder, "/%.16s", base);
    int fd = open_folder(s, dir, base, s->folder);
    if (fd < 0) {
        return 0;
    }
    int stop = scan_space(s, fd, base);
    kvfi_sys->close(fd);
    return stop;
}

kvf_status kvfi_file_scan(const kvfi_file *file, kvf_error *err, const kvf_digest *space, unsigned first,
                          kvfi_file_name_fn fn, void *ctx) {
    scan s = {.space = space, .first = first, .fn = fn, .ctx = ctx};
    int fd = open_folder(&s, AT_FDCWD, file->root, "");
    if (fd >= 0) {
        kvfi_file_each_in(fd, meet_space, &s);
    }
    if (s.error == 0) {
        return KVF_OK;
    }
    kvfi_path path;
    snprintf(path.text, sizeof path.text, "%s%s", file->root, s.denied.text);
    return kvfi_file_unreadable(file, err, &path, s.error);
}
