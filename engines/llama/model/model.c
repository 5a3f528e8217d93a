/* SPDX-License-Identifier: Apache-2.0
 *
 * Names a model: the files that were loaded, and what llama.cpp was told when it loaded them. Both are fixed then. A
 * program that attaches later gives a path, so kvferry must prove that the file there is the one that was loaded.
 */
#include <ggml-backend.h>
#include <limits.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include "llama/model/model.h"

#define MAX_LINKS 16

/* ---- what was told ---- */

static void put(EVP_MD_CTX *sha, const char *text, size_t size) {
    uint32_t len = (uint32_t)strnlen(text, size);
    EVP_DigestUpdate(sha, &len, sizeof len);
    EVP_DigestUpdate(sha, text, len);
}

static void put_override(EVP_MD_CTX *sha, const struct llama_model_kv_override *o) {
    int32_t tag = (int32_t)o->tag;
    EVP_DigestUpdate(sha, &tag, sizeof tag);
    put(sha, o->key, sizeof o->key);
    switch (o->tag) {
    case LLAMA_KV_OVERRIDE_TYPE_INT:
        EVP_DigestUpdate(sha, &o->val_i64, sizeof o->val_i64);
        break;
    case LLAMA_KV_OVERRIDE_TYPE_FLOAT:
        EVP_DigestUpdate(sha, &o->val_f64, sizeof o->val_f64);
        break;
    case LLAMA_KV_OVERRIDE_TYPE_BOOL:
        EVP_DigestUpdate(sha, &o->val_bool, sizeof o->val_bool);
        break;
    case LLAMA_KV_OVERRIDE_TYPE_STR:
        put(sha, o->val_str, sizeof o->val_str);
        break;
    }
}

static void put_overrides(EVP_MD_CTX *sha, const struct llama_model_params *p) {
    for (const struct llama_model_kv_override *o = p->kv_overrides; o->key[0] != '\0'; o++) {
        put_override(sha, o);
    }
}

bool kvfl_has_other_devices(void) {
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        enum ggml_backend_dev_type type = ggml_backend_dev_type(ggml_backend_dev_get(i));
        if (type != GGML_BACKEND_DEVICE_TYPE_CPU && type != GGML_BACKEND_DEVICE_TYPE_ACCEL) {
            return true;
        }
    }
    return false;
}

static void put_devices(EVP_MD_CTX *sha, const struct llama_model_params *p) {
    const int32_t numbers[] = {p->n_gpu_layers, (int32_t)p->split_mode, p->main_gpu};
    EVP_DigestUpdate(sha, numbers, sizeof numbers);
    for (size_t i = 0; p->tensor_split != NULL && i < llama_max_devices(); i++) {
        EVP_DigestUpdate(sha, &p->tensor_split[i], sizeof p->tensor_split[i]);
    }
    for (size_t i = 0; p->devices != NULL && p->devices[i] != NULL; i++) {
        put(sha, ggml_backend_dev_name(p->devices[i]), 256);
    }
}

/* Which kernels compute depends on the device and the kind of buffer of a tensor. */
static void put_placement(EVP_MD_CTX *sha, const struct llama_model_params *p) {
    const uint8_t flags[] = {p->use_extra_bufts, p->no_host};
    EVP_DigestUpdate(sha, flags, sizeof flags);
    if (kvfl_has_other_devices()) {
        put_devices(sha, p);
    }
    const struct llama_model_tensor_buft_override *t = p->tensor_buft_overrides;
    for (; t != NULL && t->pattern != NULL; t++) {
        put(sha, t->pattern, SIZE_MAX);
        put(sha, ggml_backend_buft_name(t->buft), 256);
    }
}

static bool digest(char out[65], const struct llama_model_params *p,
                   void (*put_all)(EVP_MD_CTX *, const struct llama_model_params *)) {
    uint8_t bytes[32] = {0};
    EVP_MD_CTX *sha = EVP_MD_CTX_new();
    bool ok = sha != NULL && EVP_DigestInit_ex(sha, EVP_sha256(), NULL) == 1;
    if (ok) {
        put_all(sha, p);
        ok = EVP_DigestFinal_ex(sha, bytes, NULL) == 1;
    }
    EVP_MD_CTX_free(sha);
    kvfl_hex(out, bytes, sizeof bytes);
    return ok;
}

bool kvfl_describe_params(kvfl_model_name *name, const struct llama_model_params *p) {
    name->overrides[0] = '\0';
    bool has_overrides = p->kv_overrides != NULL && p->kv_overrides[0].key[0] != '\0';
    return digest(name->placement, p, put_placement) && (!has_overrides || digest(name->overrides, p, put_overrides));
}

/* ---- the file that was loaded ----
 *
 * llama.cpp does not tell which file it read, only when it began to. A file is the one that the path named if its inode
 * has changed neither in content nor in name since before then, and every link and folder on the way led to it before
 * then. */

static double seconds_of(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* The time of day minus the monotonic clock. It grows while the machine is suspended, which stops the monotonic clock,
 * and when the time of day is set forward. */
static double clock_offset(void) {
    double time_of_day = seconds_of(CLOCK_REALTIME);
    return time_of_day - seconds_of(CLOCK_MONOTONIC);
}

static double first_offset;

__attribute__((constructor)) static void note_first_offset(void) {
    first_offset = clock_offset();
}

/* The time of day, in seconds, at which the load of the model began, or earlier. llama.cpp records it by the monotonic
 * clock, when the file is already open. The offset of the two clocks at that moment is not known: it may be the first
 * one or today's, and the smaller one counts, so that nothing newer than the load passes for older. */
static double load_began(const struct llama_context *ctx) {
    double offset = clock_offset();
    double ago_s = (double)llama_time_us() / 1e6 - llama_perf_context(ctx).t_start_ms / 1e3;
    double gained = offset > first_offset ? offset - first_offset : 0;
    return seconds_of(CLOCK_REALTIME) - ago_s - gained;
}

static bool is_older(const struct stat *st, double time) {
    return (double)st->st_ctim.tv_sec + (double)st->st_ctim.tv_nsec / 1e9 < time;
}

/* One line of /proc/self/maps, compared by device and inode; or by name, since some file systems show another device
 * there. The kernel shows the current name of the file. */
static bool is_line_of(const char *line, const struct stat *st, const char *real) {
    unsigned int major_part = 0, minor_part = 0;
    unsigned long long inode = 0;
    const char *name = strchr(line, '/');
    return (sscanf(line, "%*s %*s %*s %x:%x %llu", &major_part, &minor_part, &inode) == 3 && inode == st->st_ino &&
            makedev(major_part, minor_part) == st->st_dev) ||
           (name != NULL && real != NULL && strcmp(name, real) == 0);
}

static bool is_mapped(const kvfl_file *file) {
    char line[PATH_MAX + 200], *real = realpath(file->path, NULL);
    bool found = false;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps != NULL && !found && fgets(line, sizeof line, maps) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        found = is_line_of(line, &file->stat, real);
    }
    if (maps != NULL) {
        fclose(maps);
    }
    free(real);
    return found;
}

typedef struct way {
    double time;
    int links; /* links that may still be followed */
    bool is_mapped;
    bool is_still; /* the previous folder has not changed: what it holds was there before */
} way;

static bool way_is_older(const char *path, way *);

/* A folder's content changes with every file in it, which sets both of its times. Moving a folder to its place changes
 * only the inode's time, until a file is written into it. */
static bool is_moved_folder(const struct stat *st) {
    return st->st_ctim.tv_sec != st->st_mtim.tv_sec || st->st_ctim.tv_nsec != st->st_mtim.tv_nsec;
}

/* A folder that has changed may be another one of the same name. It is not if the folder around it is unchanged; and if
 * the file is mapped, only a move counts as such a change. */
static bool folder_is_older(const struct stat *st, way *w) {
    bool was_still = w->is_still;
    w->is_still = is_older(st, w->time);
    return w->is_still || was_still || (w->is_mapped && !is_moved_folder(st));
}

/* The last part of `path` is a folder, a file, or a link whose target is another path to follow. */
static bool step_is_older(const char *path, way *w) {
    struct stat st;
    char target[PATH_MAX], whole[2 * PATH_MAX];
    if (lstat(path, &st) != 0) {
        return false;
    }
    if (S_ISDIR(st.st_mode)) {
        return folder_is_older(&st, w);
    }
    if (!S_ISLNK(st.st_mode) || !is_older(&st, w->time)) {
        return is_older(&st, w->time);
    }
    ssize_t len = readlink(path, target, sizeof target - 1);
    if (len <= 0 || --w->links < 0) {
        return false;
    }
    target[len] = '\0';
    const char *slash = strrchr(path, '/');
    int folder = target[0] == '/' || slash == NULL ? 0 : (int)(slash - path) + 1;
    snprintf(whole, sizeof whole, "%.*s%s", folder, path, target);
    return way_is_older(whole, w);
}

/* Every step of the path existed before. Its beginning, the root or the working folder, is always the same. */
static bool way_is_older(const char *path, way *w) {
    char part[2 * PATH_MAX];
    struct stat st;
    if (strlen(path) >= sizeof part || lstat(path[0] == '/' ? "/" : ".", &st) != 0) {
        return false;
    }
    w->is_still = is_older(&st, w->time);
    for (const char *end = path + strspn(path, "/"); *end != '\0';) {
        end += strcspn(end, "/");
        snprintf(part, sizeof part, "%.*s", (int)(end - path), path);
        if (!step_is_older(part, w)) {
            return false;
        }
        end += strspn(end, "/");
    }
    return true;
}

/* the longest time from the opening of a model's file to the beginning of its load as llama.cpp records it */
#define OPEN_S 3

/* A file that is mapped in this process was opened by it, so what came to its name meanwhile does not matter. */
static bool was_loaded(const kvfl_file *file, double began) {
    way w = {.links = MAX_LINKS, .is_mapped = is_mapped(file)};
    w.time = w.is_mapped ? began : began - OPEN_S;
    return is_older(&file->stat, w.time) && way_is_older(file->path, &w);
}

static kvf_status check_loaded(kvf_error *err, const kvfl_files *files, const struct llama_context *ctx) {
    double began = load_began(ctx);
    for (size_t i = 0; i < files->num; i++) {
        if (!was_loaded(&files->file[i], began)) {
            return kvfl_fail(
                err, KVF_REFUSED,
                "not proven to be the file that was loaded, because it or a part of its path has changed: %s",
                files->file[i].path);
        }
    }
    return KVF_OK;
}

kvf_status kvfl_name_model(kvfl_model_name *out, kvf_error *err, const struct llama_context *ctx,
                           const kvf_llama_options *o) {
    kvfl_files *files = NULL;
    kvf_status status = kvfl_files_open_model(&files, err, o->model_path);
    if (status != KVF_OK) {
        return status;
    }
    status = check_loaded(err, files, ctx);
    if (status == KVF_OK) {
        status = kvfl_files_hash(out->weights, err, files, NULL);
    }
    kvfl_files_close(files);
    if (status == KVF_OK && !kvfl_describe_params(out, o->model_params)) {
        status = kvfl_fail(err, KVF_NOMEM, "no memory to identify the model");
    }
    return status;
}
