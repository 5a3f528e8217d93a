/* SPDX-License-Identifier: Apache-2.0
 *
 * The hash of a model's files. Hashing gigabytes takes seconds, so the result is remembered under the user's cache
 * folder, keyed by everything that changes when a file's bytes do: device, inode, size, and the times of the last write
 * and of the last change of the inode, which no user can set back.
 */
#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "llama/engine.h"

#define CHUNK     ((size_t)8 << 20)
#define SETTLED_S 2

static void to_hex(char *out, const uint8_t *bytes, size_t num) {
    for (size_t i = 0; i < num; i++) {
        snprintf(out + 2 * i, 3, "%02x", bytes[i]);
    }
}

static bool hash_fd(EVP_MD_CTX *sha, int fd) {
    uint8_t *buffer = malloc(CHUNK);
    ssize_t num = buffer != NULL ? 1 : -1;
    while (num > 0) {
        num = read(fd, buffer, CHUNK);
        if (num < 0 && errno == EINTR) {
            num = 1;
        } else if (num > 0) {
            EVP_DigestUpdate(sha, buffer, (size_t)num);
        }
    }
    free(buffer);
    return num == 0;
}

/* ---- the memory ---- */

/* The file in which the hash of the model's file is remembered: named by a hash of its identity. */
static bool memo_path(char *out, size_t size, const struct stat *st) {
    char identity[256], name[65];
    uint8_t digest[32];
    snprintf(identity, sizeof identity, "%llu %llu %lld %lld.%09ld %lld.%09ld", (unsigned long long)st->st_dev,
             (unsigned long long)st->st_ino, (long long)st->st_size, (long long)st->st_mtim.tv_sec, st->st_mtim.tv_nsec,
             (long long)st->st_ctim.tv_sec, st->st_ctim.tv_nsec);
    if (EVP_Digest(identity, strlen(identity), digest, NULL, EVP_sha256(), NULL) != 1) {
        return false;
    }
    to_hex(name, digest, sizeof digest);
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

/* Written aside and renamed, so that nobody ever reads half of it. Failing costs one more hashing the next time. */
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

/* A file that was written a moment ago may be written once more within the grain of its times, which then would not
 * show it. */
static bool is_settled(int fd, const struct stat *before) {
    struct stat after;
    struct timespec now;
    return fstat(fd, &after) == 0 && clock_gettime(CLOCK_REALTIME, &now) == 0 && after.st_size == before->st_size &&
           after.st_ctim.tv_sec == before->st_ctim.tv_sec && after.st_ctim.tv_nsec == before->st_ctim.tv_nsec &&
           after.st_mtim.tv_sec == before->st_mtim.tv_sec && after.st_mtim.tv_nsec == before->st_mtim.tv_nsec &&
           now.tv_sec - after.st_ctim.tv_sec > SETTLED_S;
}

/* ---- one file, and all of a split model ---- */

static kvf_status unreadable(kvf_error *err, const char *path) {
    return kvfl_fail(err, KVF_CONFIG, "the model file can't be read to identify it: %s: %s", path, strerror(errno));
}

static kvf_status hash_file(char out[65], kvf_error *err, const char *path) {
    char memo[4096];
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0) {
        kvf_status status = unreadable(err, path);
        if (fd >= 0) {
            close(fd);
        }
        return status;
    }
    bool has_memo = memo_path(memo, sizeof memo, &st);
    if (has_memo && recall(out, memo)) {
        close(fd);
        return KVF_OK;
    }
    uint8_t digest[32];
    EVP_MD_CTX *sha = EVP_MD_CTX_new();
    bool ok = sha != NULL && EVP_DigestInit_ex(sha, EVP_sha256(), NULL) == 1 && hash_fd(sha, fd) &&
              EVP_DigestFinal_ex(sha, digest, NULL) == 1;
    EVP_MD_CTX_free(sha);
    has_memo = has_memo && is_settled(fd, &st);
    close(fd);
    if (!ok) {
        return unreadable(err, path);
    }
    to_hex(out, digest, sizeof digest);
    if (has_memo) {
        remember(memo, out);
    }
    return KVF_OK;
}

/* "model-00001-of-00003.gguf": how many files, and what their names have in common. 1 for a model in one file. */
static int split_of(char *prefix, size_t size, const char *path) {
    int number = 0, count = 0;
    const char *dash = strrchr(path, '-');
    if (dash == NULL || dash - path < 9 || sscanf(dash - 9, "-%5d-of-%5d.gguf", &number, &count) != 2 || number != 1 ||
        count < 2 || llama_split_prefix(prefix, size, path, number - 1, count) <= 0) {
        return 1;
    }
    return count;
}

kvf_status kvfl_hash_weights(char out[65], kvf_error *err, const char *path) {
    char prefix[3072], part[4096];
    int count = split_of(prefix, sizeof prefix, path);
    if (count == 1) {
        return hash_file(out, err, path);
    }
    char *all = calloc((size_t)count, 64);
    uint8_t digest[32];
    kvf_status status = all != NULL ? KVF_OK : kvfl_fail(err, KVF_NOMEM, "no memory to identify the model");
    for (int i = 0; i < count && status == KVF_OK; i++) {
        char hex[65];
        llama_split_path(part, sizeof part, prefix, i, count);
        status = hash_file(hex, err, part);
        memcpy(all + 64 * (size_t)i, hex, status == KVF_OK ? 64 : 0);
    }
    if (status == KVF_OK && EVP_Digest(all, 64 * (size_t)count, digest, NULL, EVP_sha256(), NULL) == 1) {
        to_hex(out, digest, sizeof digest);
    }
    free(all);
    return status;
}
