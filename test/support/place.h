/* SPDX-License-Identifier: Apache-2.0
 *
 * For tests of the folder store: a folder, a tier on it, and calls that look at both from outside. Include after
 * cmocka.h.
 */
#ifndef KVFT_PLACE_H
#define KVFT_PLACE_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "file/file.h"
#include "support/kit.h"
#include "support/tiers.h"

#define SIZE   60000u
#define CHARGE 61440u /* of a record of that size: 15 pages */

typedef struct place {
    char *dir;
    char url[PATH_MAX];
    kvfi_tier *tier;
} place;

static inline place open_place(const char *params) {
    place p = {.dir = kvft_temp_dir()};
    snprintf(p.url, sizeof p.url, "file:%s/store%s", p.dir, params);
    p.tier = kvft_tier(p.url);
    return p;
}

static inline void close_place(place *p) {
    p->tier->ops->close(p->tier);
    kvft_remove_dir(p->dir);
}

/* Where the value of a seed lies. */
static inline const char *path_of(const place *p, uint64_t seed) {
    static char path[2 * PATH_MAX];
    kvfi_addr addr;
    char space[17], key[65];
    kvft_addr(&addr, seed);
    kvfi_hex(space, addr.space.bytes, 8);
    kvfi_hex(key, addr.key.bytes, 32);
    snprintf(path, sizeof path, "%s/store/kvf1/%s/%.2s/%s", p->dir, space, key, key);
    return path;
}

static inline const char *below(const place *p, const char *name) {
    static char path[2 * PATH_MAX];
    snprintf(path, sizeof path, "%s/store/kvf1/%s", p->dir, name);
    return path;
}

static inline bool exists(const char *path) {
    struct stat st;
    return lstat(path, &st) == 0;
}

static inline void set_age(const char *path, int64_t seconds) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    now.tv_sec -= seconds;
    const struct timespec times[2] = {now, now};
    assert_int_equal(utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW), 0);
}

static inline int64_t age_of(const char *path) {
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    return time(NULL) - st.st_mtim.tv_sec;
}

static inline kvf_tier_info info_of(kvfi_tier *tier) {
    kvf_tier_info info = {.struct_size = sizeof info, .num_records = -1, .used_bytes = -1, .max_bytes = -1};
    tier->ops->info(tier, &info);
    return info;
}

static inline void write_at(const char *path, off_t at, const void *bytes, size_t len) {
    int fd = open(path, O_WRONLY);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, bytes, len, at), (ssize_t)len);
    close(fd);
}

static inline void make_file(const char *path, size_t len) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)len), 0);
    close(fd);
}

/* Values that are being written, or were left behind. */
static inline size_t num_temporaries(const place *p) {
    DIR *dir = opendir(below(p, "tmp"));
    size_t num = 0;
    for (const struct dirent *entry; dir != NULL && (entry = readdir(dir)) != NULL;) {
        num += entry->d_name[0] != '.';
    }
    if (dir != NULL) {
        closedir(dir);
    }
    return num;
}

static inline void note_finding(void *ctx, const kvf_finding *finding) {
    char *text = ctx;
    size_t len = strlen(text);
    assert_true(finding->what[0] != '\0');
    snprintf(text + len, 4096 - len, "%s: %s\n", finding->code, finding->what);
}

/* What the doctor finds, a line each: the code, and what it says. */
static inline const char *diagnose(kvfi_tier *tier) {
    static char text[4096];
    text[0] = '\0';
    tier->ops->doctor(tier, note_finding, text);
    return text;
}

/* Runs with one call of the system table replaced. */
static kvfi_systable replaced;
static inline kvfi_systable *replace(void) {
    replaced = kvfi_sys_real;
    kvfi_sys_table = &replaced;
    return &replaced;
}
static inline void restore(void) {
    kvfi_sys_table = &kvfi_sys_real;
}

/* As `fstatat`, where /proc is not mounted. */
static inline int no_proc_fstatat(int dir, const char *path, struct stat *out, int flags) {
    if (strncmp(path, "/proc", 5) == 0) {
        errno = ENOENT;
        return -1;
    }
    return kvfi_sys_real.fstatat(dir, path, out, flags);
}

#endif
