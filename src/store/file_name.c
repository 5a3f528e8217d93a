/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder store: names, folders, and meeting all of them.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "store/file.h"

enum { SPACE_HEX = 16, SHARD_HEX = 2, KEY_HEX = 64, NUM_SHARDS = 256 };

void kvfi_file_path(const kvfi_file *file, kvfi_path *out, const kvfi_addr *addr) {
    char *p = out->text;
    memcpy(p, file->root, file->root_len);
    p += file->root_len;
    *p++ = '/';
    kvfi_hex(p, addr->space, SPACE_HEX / 2);
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
    const uint8_t *space; /* only this one; NULL = all */
    unsigned first;
    kvfi_file_name_fn fn;
    void *ctx;
    kvfi_addr addr; /* the space where the scan is */
    char folder[sizeof KVFI_FILE_DIR + SPACE_HEX + SHARD_HEX + 4];
    int error; /* the first errno that kept the scan from a folder */
} scan;

static int open_folder(scan *s, int dir, const char *name) {
    int fd = kvfi_sys->openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
    if (fd < 0 && errno != ENOENT && s->error == 0) {
        s->error = errno;
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
        int fd = open_folder(s, space_dir, shard);
        if (fd >= 0) {
            snprintf(s->folder, sizeof s->folder, "%s/%.16s/%s", KVFI_FILE_DIR, space_name, shard);
            int stop = kvfi_file_each_in(fd, meet_key, s);
            if (stop != 0) {
                return stop;
            }
        }
    }
    return 0;
}

static bool is_own_name(const char *base) {
    return strcmp(base, "usage") == 0 || strcmp(base, "tmp") == 0;
}

static int meet_space(void *ctx, int dir, const char *base) {
    scan *s = ctx;
    if (is_own_name(base)) {
        return 0;
    }
    if (!kvfi_unhex(s->addr.space, base, SPACE_HEX / 2)) {
        snprintf(s->folder, sizeof s->folder, "%s", KVFI_FILE_DIR);
        return s->space == NULL ? meet_foreign(s, dir, base) : 0;
    }
    if (s->space != NULL && memcmp(s->space, s->addr.space, SPACE_HEX / 2) != 0) {
        return 0;
    }
    int fd = open_folder(s, dir, base);
    if (fd < 0) {
        return 0;
    }
    int stop = scan_space(s, fd, base);
    kvfi_sys->close(fd);
    return stop;
}

kvf_status kvfi_file_scan(const kvfi_file *file, kvf_error *err, const uint8_t *space, unsigned first,
                          kvfi_file_name_fn fn, void *ctx) {
    scan s = {.space = space, .first = first, .fn = fn, .ctx = ctx};
    int fd = open_folder(&s, AT_FDCWD, file->root);
    if (fd >= 0) {
        kvfi_file_each_in(fd, meet_space, &s);
    }
    if (s.error != 0) {
        return kvfi_fail(err, KVF_IO, "%.180s can't be read: %s", file->root, strerror(s.error));
    }
    return KVF_OK;
}
