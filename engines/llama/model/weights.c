/* SPDX-License-Identifier: Apache-2.0
 *
 * The files of a model or an adapter, held open, so that a hash belongs to the opened files and not to others that get
 * their names later. Hashing gigabytes takes seconds, so the result is cached in the user's cache folder, keyed by
 * everything that changes when a file's bytes do: device, inode, size, and the times of the last write and of the last
 * inode change, which no user can set back.
 */
#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "llama/model/model.h"

#define CHUNK     ((size_t)8 << 20)
#define SETTLED_S 2

void kvfl_hex(char *out, const uint8_t *bytes, size_t num) {
    for (size_t i = 0; i < num; i++) {
        snprintf(out + 2 * i, 3, "%02x", bytes[i]);
    }
}

static bool is_stopped(const atomic_bool *stop) {
    return stop != NULL && atomic_load_explicit(stop, memory_order_relaxed);
}

static bool hash_fd(EVP_MD_CTX *sha, int fd, const atomic_bool *stop) {
    uint8_t *buffer = malloc(CHUNK);
    ssize_t num = buffer != NULL ? 1 : -1;
    for (off_t at = 0; num > 0 && !is_stopped(stop);) {
        num = pread(fd, buffer, CHUNK, at);
        if (num < 0 && errno == EINTR) {
            num = 1;
        } else if (num > 0) {
            EVP_DigestUpdate(sha, buffer, (size_t)num);
            at += num;
        }
    }
    free(buffer);
    return num == 0;
}

/* ---- the memory ---- */

/* The cache file for the hash of a model's file, named by a hash of its identity. */
static bool memo_path(char *out, size_t size, const struct stat *st) {
    char identity[256], name[65];
    uint8_t digest[32];
    snprintf(identity, sizeof identity, "%llu %llu %lld %lld.%09ld %lld.%09ld", (unsigned long long)st->st_dev,
             (unsigned long long)st->st_ino, (long long)st->st_size, (long long)st->st_mtim.tv_sec, st->st_mtim.tv_nsec,
             (long long)st->st_ctim.tv_sec, st->st_ctim.tv_nsec);
    if (EVP_Digest(identity, strlen(identity), digest, NULL, EVP_sha256(), NULL) != 1) {
        return false;
    }
    kvfl_hex(name, digest, sizeof digest);
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int len = cache != NULL && cache[0] == '/' ? snprintf(out, size, "%s/kvferry/hashes/%s", cache, name)
              : home != NULL                   ? snprintf(out, size, "%s/.cache/kvferry/hashes/%s", home, name)
                                               : -1;
    return len > 0 && (size_t)len < size;
}

static bool is_hex(const char *text, size_t num) {
    return strspn(text, "0123456789abcdef") == num && text[num] == '\0';
}

static bool recall(char out[65], const char *path) {
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return false;
    }
    char line[80] = {0};
    bool ok = fgets(line, sizeof line, file) != NULL;
    fclose(file);
    line[strcspn(line, "\n")] = '\0';
    if (!ok || !is_hex(line, 64)) {
        return false;
    }
    memcpy(out, line, 65);
    return true;
}

static void make_folders(char *path) {
    for (char *slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(path, 0700);
        *slash = '/';
    }
}

/* Written under a temporary name and renamed, so that nobody reads half of it. A failure costs one more hashing
 * later. */
static void remember(char *path, const char *hex) {
    char aside[4200];
    make_folders(path);
    snprintf(aside, sizeof aside, "%s.%ld", path, (long)getpid());
    FILE *file = fopen(aside, "we");
    if (file == NULL) {
        return;
    }
    bool ok = fprintf(file, "%s\n", hex) > 0;
    ok = fclose(file) == 0 && ok;
    if (!ok || rename(aside, path) != 0) {
        (void)unlink(aside);
    }
}

/* ---- one file ---- */

bool kvfl_same_file(const struct stat *a, const struct stat *b) {
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec &&
           a->st_ctim.tv_sec == b->st_ctim.tv_sec && a->st_ctim.tv_nsec == b->st_ctim.tv_nsec;
}

/* Its bytes are the same: nothing has changed, or it has got or lost a name, which also sets the time of the last inode
 * change. (For example when another file took its place.) */
static bool has_same_bytes(const struct stat *a, const struct stat *b) {
    struct stat renamed = *b;
    if (a->st_nlink != b->st_nlink) {
        renamed.st_ctim = a->st_ctim;
    }
    return kvfl_same_file(a, &renamed);
}

/* A file that was written a moment ago may be written again within the resolution of its times, which would not show
 * that. */
static bool is_settled(const kvfl_file *file) {
    struct timespec now;
    return clock_gettime(CLOCK_REALTIME, &now) == 0 && now.tv_sec - file->stat.st_ctim.tv_sec > SETTLED_S;
}

static kvf_status unreadable(kvf_error *err, const char *path) {
    return kvfl_fail(err, KVF_CONFIG, "the model file can't be read to identify it: %s: %s", path, strerror(errno));
}

static kvf_status hash_file(char out[65], kvf_error *err, const kvfl_file *file, const atomic_bool *stop) {
    char memo[4096];
    bool has_memo = memo_path(memo, sizeof memo, &file->stat);
    if (has_memo && recall(out, memo)) {
        return KVF_OK;
    }
    uint8_t digest[32];
    EVP_MD_CTX *sha = EVP_MD_CTX_new();
    bool ok = sha != NULL && EVP_DigestInit_ex(sha, EVP_sha256(), NULL) == 1 && hash_fd(sha, file->fd, stop) &&
              EVP_DigestFinal_ex(sha, digest, NULL) == 1;
    EVP_MD_CTX_free(sha);
    if (is_stopped(stop)) {
        return kvfl_fail(err, KVF_CLOSED, "the model was freed before its file was identified: %s", file->path);
    }
    if (!ok) {
        return unreadable(err, file->path);
    }
    struct stat now;
    if (fstat(file->fd, &now) != 0 || !has_same_bytes(&now, &file->stat)) {
        return kvfl_fail(err, KVF_REFUSED, "the model's file changed while it was read to identify it: %s", file->path);
    }
    kvfl_hex(out, digest, sizeof digest);
    if (has_memo && is_settled(file)) {
        remember(memo, out);
    }
    return KVF_OK;
}

static bool is_gguf(const kvfl_file *file) {
    char magic[4];
    return S_ISREG(file->stat.st_mode) && pread(file->fd, magic, sizeof magic, 0) == (ssize_t)sizeof magic &&
           memcmp(magic, "GGUF", sizeof magic) == 0;
}

/* O_NONBLOCK: does not wait for a fifo of that name. */
static kvf_status open_file(kvfl_file *out, kvf_error *err, const char *path) {
    out->path = strdup(path);
    out->fd = out->path != NULL ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    if (out->fd < 0 || fstat(out->fd, &out->stat) != 0) {
        return unreadable(err, path);
    }
    return is_gguf(out) ? KVF_OK : kvfl_fail(err, KVF_CONFIG, "not a GGUF file: %s", path);
}

/* ---- all of them ---- */

static kvfl_files *new_files(size_t num) {
    kvfl_files *files = calloc(1, sizeof *files + num * sizeof files->file[0]);
    for (size_t i = 0; files != NULL && i < num; i++) {
        files->file[i].fd = -1;
    }
    if (files != NULL) {
        files->num = num;
    }
    return files;
}

static kvf_status hand_over(kvfl_files **out, kvfl_files *files, kvf_status status) {
    if (status != KVF_OK) {
        kvfl_files_close(files);
        files = NULL;
    }
    *out = files;
    return status;
}

kvf_status kvfl_files_open(kvfl_files **out, kvf_error *err, const char *const *paths, size_t num) {
    kvfl_files *files = new_files(num);
    kvf_status status = files != NULL ? KVF_OK : kvfl_fail(err, KVF_NOMEM, "no memory to identify the model");
    for (size_t i = 0; i < num && status == KVF_OK; i++) {
        status = open_file(&files->file[i], err, paths[i]);
    }
    return hand_over(out, files, status);
}

/* "model-00001-of-00003.gguf": the number of files, and the common part of their names. 1 for a model in one file. */
static int split_of(char *prefix, size_t size, const char *path) {
    int number = 0, count = 0;
    const char *dash = strrchr(path, '-');
    if (dash == NULL || dash - path < 9 || sscanf(dash - 9, "-%5d-of-%5d.gguf", &number, &count) != 2 || number != 1 ||
        count < 2 || llama_split_prefix(prefix, size, path, number - 1, count) <= 0) {
        return 1;
    }
    return count;
}

kvf_status kvfl_files_open_model(kvfl_files **out, kvf_error *err, const char *path) {
    char prefix[3072], part[4096];
    int count = split_of(prefix, sizeof prefix, path);
    if (count == 1) {
        return kvfl_files_open(out, err, &path, 1);
    }
    kvfl_files *files = new_files((size_t)count);
    kvf_status status = files != NULL ? KVF_OK : kvfl_fail(err, KVF_NOMEM, "no memory to identify the model");
    for (int i = 0; i < count && status == KVF_OK; i++) {
        llama_split_path(part, sizeof part, prefix, i, count);
        status = open_file(&files->file[i], err, part);
    }
    return hand_over(out, files, status);
}

bool kvfl_files_are_in_place(const kvfl_files *files) {
    for (size_t i = 0; i < files->num; i++) {
        struct stat now;
        if (stat(files->file[i].path, &now) != 0 || !kvfl_same_file(&now, &files->file[i].stat)) {
            return false;
        }
    }
    return true;
}

kvf_status kvfl_files_hash(char out[65], kvf_error *err, const kvfl_files *files, const atomic_bool *stop) {
    if (files->num == 1) {
        return hash_file(out, err, &files->file[0], stop);
    }
    char *all = calloc(files->num, 64);
    uint8_t digest[32];
    kvf_status status = all != NULL ? KVF_OK : kvfl_fail(err, KVF_NOMEM, "no memory to identify the model");
    for (size_t i = 0; i < files->num && status == KVF_OK; i++) {
        char hex[65];
        status = hash_file(hex, err, &files->file[i], stop);
        memcpy(all + 64 * i, hex, status == KVF_OK ? 64 : 0);
    }
    if (status == KVF_OK && EVP_Digest(all, 64 * files->num, digest, NULL, EVP_sha256(), NULL) != 1) {
        status = kvfl_fail(err, KVF_NOMEM, "no memory to identify the model");
    }
    if (status == KVF_OK) {
        kvfl_hex(out, digest, sizeof digest);
    }
    free(all);
    return status;
}

void kvfl_files_close(kvfl_files *files) {
    for (size_t i = 0; files != NULL && i < files->num; i++) {
        if (files->file[i].fd >= 0) {
            close(files->file[i].fd);
        }
        free(files->file[i].path);
    }
    free(files);
}
