/* SPDX-License-Identifier: Apache-2.0
 *
 * The files of the model repository: a digest of their bytes, and a list of what stat says of them.
 */
#include "triton/cache/models.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#define PIECE_BYTES ((size_t)1 << 20)
#define MAX_FOLDERS 64u
#define MAX_DEPTH   32u

/* What is below a folder: one file or folder of it. */
typedef struct entry {
    char *path;
    dev_t dev;
    ino_t ino;
    off_t size;
    struct timespec mtime, ctime;
    bool is_folder;
} entry;

typedef struct list {
    entry *entries;
    size_t num, cap;
} list;

struct kvfr_models {
    char *folders; /* each ended by a null byte */
    char *folder[MAX_FOLDERS + 1];
    char digest[KVFR_DIGEST_TEXT];
    pthread_rwlock_t lock;
    list seen; /* under `lock` */
    atomic_bool changed;
};

static TRITONSERVER_Error *no_memory(void) {
    return kvfr_fail(TRITONSERVER_ERROR_INTERNAL, "kvferry: no memory for the list of model files");
}

static TRITONSERVER_Error *cant_read(const char *path, int error) {
    return kvfr_fail(TRITONSERVER_ERROR_INVALID_ARG,
                     "kvferry: cannot read %.300s (%s), so models cannot be told apart by it. Mend it, or name other "
                     "folders by models=, or give models=none with a namespace= that you change with the models",
                     path, strerror(error));
}

static void list_free(list *l) {
    for (size_t i = 0; i < l->num; i++) {
        free(l->entries[i].path);
    }
    free(l->entries);
    *l = (list){0};
}

static entry entry_of(const struct stat *s) {
    return (entry){.dev = s->st_dev,
                   .ino = s->st_ino,
                   .size = s->st_size,
                   .mtime = s->st_mtim,
                   .ctime = s->st_ctim,
                   .is_folder = S_ISDIR(s->st_mode)};
}

static bool list_add(list *l, const char *path, const struct stat *s) {
    if (l->num == l->cap) {
        size_t cap = l->cap == 0 ? 64 : 2 * l->cap;
        entry *grown = realloc(l->entries, cap * sizeof *grown);
        if (grown == NULL) {
            return false;
        }
        l->entries = grown;
        l->cap = cap;
    }
    entry e = entry_of(s);
    e.path = strdup(path);
    if (e.path == NULL) {
        return false;
    }
    l->entries[l->num++] = e;
    return true;
}

/* ---- the walk ---------------------------------------------------------------------------------------------------- */

static TRITONSERVER_Error *walk(list *out, const char *path, unsigned depth);

/* What Python writes beside a model when it imports it is not of the model. */
static int counts(const struct dirent *d) {
    size_t len = strlen(d->d_name);
    return strcmp(d->d_name, ".") != 0 && strcmp(d->d_name, "..") != 0 && strcmp(d->d_name, "__pycache__") != 0 &&
           !(len > 4 && strcmp(d->d_name + len - 4, ".pyc") == 0);
}

static int by_name(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

static TRITONSERVER_Error *walk_below(list *out, const char *folder, const char *name, unsigned depth) {
    char path[PATH_MAX];
    if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, name) >= sizeof path) {
        return cant_read(folder, ENAMETOOLONG);
    }
    return walk(out, path, depth + 1);
}

static TRITONSERVER_Error *walk_folder(list *out, const char *path, unsigned depth) {
    struct dirent **names;
    int num = depth < MAX_DEPTH ? scandir(path, &names, counts, by_name) : (errno = ELOOP, -1);
    if (num < 0) {
        return cant_read(path, errno);
    }
    TRITONSERVER_Error *failed = NULL;
    for (int i = 0; i < num; i++) {
        if (failed == NULL) {
            failed = walk_below(out, path, names[i]->d_name, depth);
        }
        free(names[i]);
    }
    free(names);
    return failed;
}

/* Lists a file, or a folder with all that is below it, in the order of names. Links are followed. (glibc's fts_open does
 * not survive a lack of memory.) */
static TRITONSERVER_Error *walk(list *out, const char *path, unsigned depth) {
    struct stat s;
    if (stat(path, &s) != 0) {
        return cant_read(path, errno);
    }
    if (!list_add(out, path, &s)) {
        return no_memory();
    }
    return S_ISDIR(s.st_mode) ? walk_folder(out, path, depth) : NULL;
}

static TRITONSERVER_Error *walk_all(list *out, char *const *folders) {
    for (; *folders != NULL; folders++) {
        KVFR_TRY(walk(out, *folders, 0));
    }
    return NULL;
}

/* ---- the digest -------------------------------------------------------------------------------------------------- */

static TRITONSERVER_Error *hash_bytes(XXH3_state_t *state, const entry *e, void *piece) {
    int fd = open(e->path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    ssize_t got = -1;
    while (fd >= 0 && (got = read(fd, piece, PIECE_BYTES)) > 0) {
        XXH3_128bits_update(state, piece, (size_t)got);
    }
    TRITONSERVER_Error *failed = got < 0 ? cant_read(e->path, errno) : NULL;
    if (fd >= 0) {
        close(fd);
    }
    return failed;
}

/* Paths count from the folder that they are in: a repository is the same wherever it lies. */
static const char *below(const entry *e, char *const *folders) {
    for (; *folders != NULL; folders++) {
        size_t len = strlen(*folders);
        if (strncmp(e->path, *folders, len) == 0 && (e->path[len] == '/' || e->path[len] == '\0')) {
            return e->path + len;
        }
    }
    return e->path;
}

static TRITONSERVER_Error *hash_all(XXH3_state_t *state, const list *l, char *const *folders, void *piece) {
    XXH3_128bits_reset(state);
    for (size_t i = 0; i < l->num; i++) {
        const entry *e = &l->entries[i];
        const char *name = below(e, folders);
        const char end[2] = {'\0', e->is_folder ? 'd' : 'f'};
        const uint64_t size = e->is_folder ? 0 : (uint64_t)e->size;
        XXH3_128bits_update(state, name, strlen(name));
        XXH3_128bits_update(state, end, sizeof end);
        XXH3_128bits_update(state, &size, sizeof size);
        if (!e->is_folder) {
            KVFR_TRY(hash_bytes(state, e, piece));
        }
    }
    return NULL;
}

static TRITONSERVER_Error *take_digest(kvfr_models *m) {
    XXH3_state_t *state = XXH3_createState();
    void *piece = malloc(PIECE_BYTES);
    TRITONSERVER_Error *failed =
        state != NULL && piece != NULL ? hash_all(state, &m->seen, m->folder, piece) : no_memory();
    if (failed == NULL) {
        XXH128_hash_t hash = XXH3_128bits_digest(state);
        snprintf(m->digest, sizeof m->digest, "%016llx%016llx", (unsigned long long)hash.high64,
                 (unsigned long long)hash.low64);
    }
    free(piece);
    XXH3_freeState(state);
    return failed;
}

const char *kvfr_models_digest(const kvfr_models *m) {
    return m->digest;
}

/* ---- open -------------------------------------------------------------------------------------------------------- */

static TRITONSERVER_Error *split(kvfr_models *m, const char *folders) {
    m->folders = strdup(folders);
    if (m->folders == NULL) {
        return no_memory();
    }
    size_t num = 0;
    char *rest;
    for (char *at = strtok_r(m->folders, ":", &rest); at != NULL; at = strtok_r(NULL, ":", &rest)) {
        if (num == MAX_FOLDERS) {
            return kvfr_fail(TRITONSERVER_ERROR_INVALID_ARG, "kvferry: models= names more than %u folders",
                             MAX_FOLDERS);
        }
        size_t len = strlen(at);
        while (len > 1 && at[len - 1] == '/') {
            at[--len] = '\0';
        }
        m->folder[num++] = at;
    }
    return num > 0 ? NULL : kvfr_fail(TRITONSERVER_ERROR_INVALID_ARG, "kvferry: models= names no folder");
}

static TRITONSERVER_Error *read_all(kvfr_models *m, const char *folders) {
    KVFR_TRY(split(m, folders));
    KVFR_TRY(walk_all(&m->seen, m->folder));
    return take_digest(m);
}

TRITONSERVER_Error *kvfr_models_open(kvfr_models **out, const char *folders) {
    kvfr_models *m = calloc(1, sizeof *m);
    if (m == NULL) {
        return no_memory();
    }
    pthread_rwlock_init(&m->lock, NULL);
    TRITONSERVER_Error *failed = read_all(m, folders);
    if (failed != NULL) {
        kvfr_models_close(m);
        return failed;
    }
    *out = m;
    return NULL;
}

void kvfr_models_close(kvfr_models *m) {
    if (m != NULL) {
        list_free(&m->seen);
        free(m->folders);
        pthread_rwlock_destroy(&m->lock);
        free(m);
    }
}

/* ---- as they were? ----------------------------------------------------------------------------------------------- */

static bool is_same_time(struct timespec a, struct timespec b) {
    return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

/* mtime can be set back by whoever copies a file over another; ctime can't. */
static bool is_same(const entry *a, const entry *b) {
    return a->dev == b->dev && a->ino == b->ino && a->size == b->size && is_same_time(a->mtime, b->mtime) &&
           is_same_time(a->ctime, b->ctime);
}

static bool is_untouched(const list *l) {
    for (size_t i = 0; i < l->num; i++) {
        struct stat s;
        if (stat(l->entries[i].path, &s) != 0) {
            return false;
        }
        const entry now = entry_of(&s);
        if (!is_same(&l->entries[i], &now)) {
            return false;
        }
    }
    return true;
}

/* The path of the first entry that differs, or NULL. The time of a folder also changes with what does not count. */
static const char *difference(const list *before, const list *now) {
    for (size_t i = 0; i < before->num && i < now->num; i++) {
        const entry *a = &before->entries[i], *b = &now->entries[i];
        if (strcmp(a->path, b->path) != 0 || a->is_folder != b->is_folder || (!a->is_folder && !is_same(a, b))) {
            return strcmp(a->path, b->path) < 0 ? a->path : b->path;
        }
    }
    return before->num > now->num   ? before->entries[now->num].path
           : before->num < now->num ? now->entries[before->num].path
                                    : NULL;
}

/* Something was touched: looks what. Under the lock, for writing. */
static void look_again(kvfr_models *m) {
    list now = {0};
    TRITONSERVER_Error *failed = walk_all(&now, m->folder);
    const char *path = failed != NULL ? TRITONSERVER_ErrorMessage(failed) : difference(&m->seen, &now);
    if (path == NULL) {
        list old = m->seen;
        m->seen = now;
        now = old;
    } else {
        atomic_store(&m->changed, true);
        kvfr_log(
            TRITONSERVER_LOG_WARN,
            "kvferry: a file of the models changed (%.400s): the response cache is off until the server is started "
            "again, because answers of the old and the new model have the same keys",
            path);
    }
    if (failed != NULL) {
        TRITONSERVER_ErrorDelete(failed);
    }
    list_free(&now);
}

bool kvfr_models_same(kvfr_models *m) {
    if (atomic_load(&m->changed)) {
        return false;
    }
    pthread_rwlock_rdlock(&m->lock);
    bool same = is_untouched(&m->seen);
    pthread_rwlock_unlock(&m->lock);
    if (same) {
        return true;
    }
    pthread_rwlock_wrlock(&m->lock);
    if (!atomic_load(&m->changed) && !is_untouched(&m->seen)) {
        look_again(m);
    }
    pthread_rwlock_unlock(&m->lock);
    return !atomic_load(&m->changed);
}

/* ---- the command line -------------------------------------------------------------------------------------------- */

static TRITONSERVER_Error *no_folders(const char *why) {
    return kvfr_fail(
        TRITONSERVER_ERROR_INVALID_ARG,
        "kvferry: %.300s, so models cannot be told apart by their files. Name the folders of the models by "
        "models=FOLDER, or give models=none with a namespace= that you change with the models",
        why);
}

/* What follows `name` in an argument: "=value", "" or, if it is another option, NULL. */
static const char *after_name(const char *argument, const char *name) {
    size_t len = strlen(name);
    return strncmp(argument, name, len) == 0 && (argument[len] == '=' || argument[len] == '\0') ? argument + len : NULL;
}

static TRITONSERVER_Error *add_folder(char *out, size_t cap, const char *folder) {
    if (strchr(folder, ':') != NULL) {
        char why[400];
        snprintf(why, sizeof why, "the model repository %.300s is not a folder of this machine", folder);
        return no_folders(why);
    }
    size_t used = strlen(out);
    if ((size_t)snprintf(out + used, cap - used, "%s%s", used > 0 ? ":" : "", folder) >= cap - used) {
        return no_folders("the model repositories have too long names");
    }
    return NULL;
}

/* `--model-repository=FOLDER`, or the name alone and the folder as the next argument. */
static TRITONSERVER_Error *find_folders(char *out, size_t cap, FILE *arguments, char **line, size_t *room) {
    bool is_value = false;
    while (getdelim(line, room, '\0', arguments) > 0) {
        const char *rest = after_name(*line, "--model-repository");
        rest = rest != NULL ? rest : after_name(*line, "--model-store");
        if (is_value || (rest != NULL && *rest == '=')) {
            KVFR_TRY(add_folder(out, cap, is_value ? *line : rest + 1));
        }
        is_value = !is_value && rest != NULL && *rest == '\0';
    }
    return out[0] != '\0' ? NULL : no_folders("the command line of this process names no model repository");
}

TRITONSERVER_Error *kvfr_models_of_command_line(char *out, size_t cap) {
    char *line = NULL;
    size_t room = 0;
    out[0] = '\0';
    FILE *arguments = fopen("/proc/self/cmdline", "re");
    if (arguments == NULL) {
        return no_folders("the command line of this process cannot be read");
    }
    TRITONSERVER_Error *failed = find_folders(out, cap, arguments, &line, &room);
    free(line);
    fclose(arguments);
    return failed;
}
