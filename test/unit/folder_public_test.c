/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder store under faults that users of such stores have reported, each as a kind: systems that deny a call,
 * folders of another user, wrong clocks, prompts larger than the bound.
 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "support/place.h"

/* ---- what was logged */

static char said[4096];
static void hear(void *ctx, kvf_log_level level, const char *message) {
    (void)ctx, (void)level;
    size_t len = strlen(said);
    snprintf(said + len, sizeof said - len, "%s\n", message);
}

/* ---- calls that are denied */

static int denied_with;
static int deny_link(int fromdir, const char *from, int todir, const char *to, int flags) {
    (void)fromdir, (void)from, (void)todir, (void)to, (void)flags;
    errno = denied_with;
    return -1;
}
static int deny_tmpfile(const char *path, int flags, mode_t mode) {
    int fd = kvfi_sys_real.open(path, flags, mode);
    if (fd >= 0 && (flags & O_TMPFILE) == O_TMPFILE) {
        close(fd);
        errno = denied_with;
        return -1;
    }
    return fd;
}
static int deny_rename(int fromdir, const char *from, int todir, const char *to) {
    (void)fromdir, (void)from, (void)todir, (void)to;
    errno = denied_with;
    return -1;
}
static int deny_lock(int fd, int op) {
    (void)fd, (void)op;
    errno = denied_with;
    return -1;
}
static int deny_times(int fd, const struct timespec times[2]) {
    (void)fd, (void)times;
    errno = denied_with;
    return -1;
}

/* Stores, finds, replaces: all that a store needs. */
static void expect_works(const place *p) {
    for (uint64_t seed = 0; seed < 5; seed++) {
        assert_int_equal(kvft_put(p->tier, seed, SIZE), KVF_WHY_NONE);
        assert_int_equal(kvft_put(p->tier, seed, SIZE), KVF_WHY_NONE);
        assert_int_equal(kvft_get(p->tier, seed, SIZE), KVF_WHY_NONE);
    }
    assert_int_equal(kvft_put(p->tier, 4, SIZE + 1), KVF_WHY_NONE); /* as a session that is saved again */
    assert_int_equal(kvft_get(p->tier, 4, SIZE + 1), KVF_WHY_NONE);
    assert_int_equal(num_temporaries(p), 0);
}

static void test_hard_links_denied(void **state) {
    (void)state;
    static const int errors[] = {EACCES, EPERM, EOPNOTSUPP, ENOSYS, EXDEV, EINVAL};
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        place p = open_place("");
        denied_with = errors[i];
        assert_int_equal(kvft_put(p.tier, 8, SIZE), KVF_WHY_NONE);
        replace()->linkat = deny_link;
        assert_int_equal(kvft_put(p.tier, 8, SIZE + 1),
                         KVF_WHY_NONE); /* the first that is denied has a value to replace */
        expect_works(&p);
        p.tier->ops->close(p.tier);
        p.tier = kvft_tier(p.url);
        const char *found = diagnose(p.tier); /* which tries it as a save does */
        assert_null(strstr(found, "not-writable"));
        assert_non_null(strstr(found, "named-temporaries"));
        assert_int_equal(num_temporaries(&p), 0);
        replaced.renameat = deny_rename; /* nothing is left that would do */
        assert_non_null(strstr(diagnose(p.tier), "not-writable"));
        assert_int_equal(kvft_put(p.tier, 9, SIZE), KVF_WHY_UNREACHABLE);
        assert_int_equal(num_temporaries(&p), 0);
        restore();
        close_place(&p);
    }
}

/* Where a named file did not do either, nothing has been learned of those without a name. */
static void test_what_failed_teaches_nothing(void **state) {
    (void)state;
    place p = open_place("");
    const kvfi_file *file = (const kvfi_file *)p.tier;
    denied_with = EPERM;
    replace()->linkat = deny_link;
    replaced.renameat = deny_rename;
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_UNREACHABLE);
    assert_false(file->no_tmpfile);
    replaced.renameat = kvfi_sys_real.renameat;
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    assert_true(file->no_tmpfile);
    restore();
    close_place(&p);
}

static void test_unnamed_files_denied(void **state) {
    (void)state;
    static const int errors[] = {EACCES, EPERM, EOPNOTSUPP, ENOSYS, EISDIR, EINVAL};
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        place p = open_place("");
        denied_with = errors[i];
        replace()->open = deny_tmpfile;
        expect_works(&p);
        assert_null(strstr(diagnose(p.tier), "not-writable"));
        restore();
        close_place(&p);
    }
}

/* Without locks nobody would ever count, and the folder would grow with each process. */
static void test_locks_denied(void **state) {
    (void)state;
    static const int errors[] = {ENOLCK, ENOSYS, EOPNOTSUPP, EINVAL};
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        place p = open_place("?max=1M");
        denied_with = errors[i];
        replace()->flock = deny_lock;
        expect_works(&p);
        for (uint64_t seed = 100; seed < 160; seed++) {
            p.tier->ops->close(p.tier);
            p.tier = kvft_tier(p.url);
            assert_int_equal(kvft_put(p.tier, seed, SIZE), KVF_WHY_NONE);
        }
        assert_true(kvft_count(p.tier).records * CHARGE <= (1u << 20) + CHARGE);
        make_file((mkdir(below(&p, "tmp"), 0700), below(&p, "tmp/dead")), 1000);
        set_age(below(&p, "tmp/dead"), 5000);
        make_file(below(&p, "tmp/slow"), 1000);
        set_age(below(&p, "tmp/slow"), 100);
        (void)kvfi_file_sweep((kvfi_file *)p.tier, 1, KVFI_NEVER);
        assert_false(exists(below(&p, "tmp/dead")));
        assert_true(exists(below(&p, "tmp/slow")));
        restore();
        close_place(&p);
    }
}

/* ---- calls that go well: they leave any errno behind, of which nothing follows */

static int left_errno;
static int leave(int result) {
    if (result >= 0) {
        errno = left_errno;
    }
    return result;
}
static int leave_open(const char *path, int flags, mode_t mode) {
    return leave(kvfi_sys_real.open(path, flags, mode));
}
static int leave_openat(int dir, const char *path, int flags, mode_t mode) {
    return leave(kvfi_sys_real.openat(dir, path, flags, mode));
}
static int leave_fstat(int fd, struct stat *out) {
    return leave(kvfi_sys_real.fstat(fd, out));
}
static int leave_fstatat(int dir, const char *path, struct stat *out, int flags) {
    return leave(kvfi_sys_real.fstatat(dir, path, out, flags));
}
static ssize_t leave_preadv(int fd, const struct iovec *iov, int num, off_t at) {
    return leave((int)kvfi_sys_real.preadv(fd, iov, num, at));
}
static ssize_t leave_pwritev(int fd, const struct iovec *iov, int num, off_t at) {
    return leave((int)kvfi_sys_real.pwritev(fd, iov, num, at));
}
static int leave_linkat(int fromdir, const char *from, int todir, const char *to, int flags) {
    return leave(kvfi_sys_real.linkat(fromdir, from, todir, to, flags));
}
static int leave_renameat(int fromdir, const char *from, int todir, const char *to) {
    return leave(kvfi_sys_real.renameat(fromdir, from, todir, to));
}
static int leave_unlinkat(int dir, const char *path, int flags) {
    return leave(kvfi_sys_real.unlinkat(dir, path, flags));
}
static int leave_mkdirat(int dir, const char *path, mode_t mode) {
    return leave(kvfi_sys_real.mkdirat(dir, path, mode));
}
static int leave_flock(int fd, int op) {
    return leave(kvfi_sys_real.flock(fd, op));
}

static void test_what_errno_says_after_success(void **state) {
    (void)state;
    static const int errors[] = {ENOENT, EEXIST, EINTR, EACCES, ENOSPC, EWOULDBLOCK};
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        place p = open_place("?max=1M");
        kvfi_addr addr;
        uint64_t removed = 0;
        left_errno = errors[i];
        kvfi_systable *table = replace();
        table->open = leave_open;
        table->openat = leave_openat;
        table->fstat = leave_fstat;
        table->fstatat = leave_fstatat;
        table->preadv = leave_preadv;
        table->pwritev = leave_pwritev;
        table->linkat = leave_linkat;
        table->renameat = leave_renameat;
        table->unlinkat = leave_unlinkat;
        table->mkdirat = leave_mkdirat;
        table->flock = leave_flock;
        expect_works(&p);
        assert_false(((const kvfi_file *)p.tier)->no_tmpfile);
        for (uint64_t seed = 100; seed < 130; seed++) { /* more than the bound */
            assert_int_equal(kvft_put(p.tier, seed, SIZE), KVF_WHY_NONE);
        }
        ((kvfi_file *)p.tier)->no_tmpfile = true; /* also with names from the start */
        expect_works(&p);
        kvf_status gone = KVF_MISS; /* which values the bound has left depends on times that may be equal */
        for (uint64_t seed = 129; gone == KVF_MISS && seed >= 100; seed--) {
            kvft_addr(&addr, seed);
            gone = p.tier->ops->remove(p.tier, NULL, &addr, KVFI_NEVER);
        }
        assert_int_equal(gone, KVF_OK);
        assert_null(strstr(diagnose(p.tier), "not-writable"));
        assert_int_equal(p.tier->ops->clear(p.tier, &removed, NULL, NULL, KVF_MS(1000)), KVF_OK);
        assert_int_equal(kvft_count(p.tier).records, 0);
        restore();
        close_place(&p);
    }
}

static void test_times_denied(void **state) {
    (void)state;
    place p = open_place("?max=1M&ttl=100");
    denied_with = EPERM;
    replace()->futimens = deny_times;
    expect_works(&p);
    restore();
    close_place(&p);
}

/* ---- no /proc: what one thread finds out is not yet true of what another has begun */

typedef struct writer {
    pthread_t thread;
    kvfi_tier *tier;
    uint64_t first;
    int failed;
} writer;

static pthread_barrier_t together;
static void *write_ten(void *arg) {
    writer *w = arg;
    pthread_barrier_wait(&together);
    for (uint64_t i = 0; i < 10; i++) {
        w->failed += kvft_put(w->tier, w->first + i, SIZE) != KVF_WHY_NONE;
    }
    return NULL;
}

/* Whoever links first waits until all have begun. */
static _Atomic int num_linking;
static int wait_and_deny_link(int fromdir, const char *from, int todir, const char *to, int flags) {
    num_linking++;
    for (int i = 0; i < 200 && num_linking < 6; i++) {
        (void)kvfi_sys_real.poll(NULL, 0, 1);
    }
    return deny_link(fromdir, from, todir, to, flags);
}

static void test_no_proc_and_many_threads(void **state) {
    (void)state;
    enum { WRITERS = 6 };
    for (int round = 0; round < 3; round++) {
        place p = open_place("");
        writer writers[WRITERS];
        denied_with = ENOENT;
        num_linking = 0;
        kvfi_systable *table = replace();
        table->linkat = wait_and_deny_link;
        table->fstatat = no_proc_fstatat;
        pthread_barrier_init(&together, NULL, WRITERS);
        for (uint64_t i = 0; i < WRITERS; i++) {
            writers[i] = (writer){.tier = p.tier, .first = 100 * i};
            assert_int_equal(pthread_create(&writers[i].thread, NULL, write_ten, &writers[i]), 0);
        }
        for (size_t i = 0; i < WRITERS; i++) {
            pthread_join(writers[i].thread, NULL);
            assert_int_equal(writers[i].failed, 0);
        }
        pthread_barrier_destroy(&together);
        restore();
        assert_int_equal(kvft_count(p.tier).records, 10 * WRITERS);
        assert_int_equal(num_temporaries(&p), 0);
        close_place(&p);
    }
}

/* ---- folders of another user. In a child, since it gives up the rights of root. */

#define EXPECT(cond)                                                  \
    do {                                                              \
        if (!(cond)) {                                                \
            fprintf(stderr, "not true: %s; said: %s\n", #cond, said); \
            _exit(1);                                                 \
        }                                                             \
    } while (0)

enum { NOBODY = 65534, VALUES = 16 };

static void expect_child(int (*run)(const place *p)) {
    if (geteuid() != 0) {
        skip();
    }
    place p = open_place("");
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        kvft_exit(run(&p));
    }
    int status = -1;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    close_place(&p);
}

/* root stores all but the first block into another user's store; then that user returns. */
static kvfi_tier *come_back(const place *p, mode_t folders, mode_t files) {
    char path[2 * PATH_MAX];
    EXPECT(chown(p->dir, NOBODY, NOBODY) == 0);
    for (uint64_t seed = 0; seed < VALUES; seed++) {
        EXPECT(kvft_put(p->tier, seed, SIZE) == KVF_WHY_NONE);
        snprintf(path, sizeof path, "%s", path_of(p, seed));
        for (int level = 0; level < 5; level++) {
            bool shared = level >= 2; /* the space, the root, the folder */
            EXPECT(chown(path, seed == 0 || shared ? NOBODY : 0, NOBODY) == 0);
            EXPECT(seed == 0 || shared || chmod(path, level == 0 ? files : folders) == 0);
            *strrchr(path, '/') = '\0';
        }
    }
    EXPECT(setgid(NOBODY) == 0 && setuid(NOBODY) == 0);
    kvf_set_log(hear, NULL, KVF_LOG_WARN);
    return kvft_tier(p->url);
}

static const char *folder_of(const place *p, uint64_t seed) {
    static char path[2 * PATH_MAX];
    snprintf(path, sizeof path, "%s", path_of(p, seed));
    *strrchr(path, '/') = '\0';
    return path;
}

static int live_beside_closed_folders(const place *p) {
    kvfi_tier *tier = come_back(p, 0700, 0600);
    kvf_error err = {0};
    uint64_t removed = 0;
    EXPECT(kvft_get(tier, 0, SIZE) == KVF_WHY_NONE);
    EXPECT(said[0] == '\0');
    EXPECT(kvft_get(tier, 1, SIZE) == KVF_WHY_UNREACHABLE);
    EXPECT(strstr(said, folder_of(p, 1)) != NULL && strstr(said, "of user 0, mode 0700") != NULL);
    EXPECT(strstr(said, "can't be read") != NULL && strstr(said, "chown -R 65534 /") != NULL);
    said[0] = '\0';
    EXPECT(kvft_put(tier, 2, SIZE) == KVF_WHY_UNREACHABLE && kvft_put(tier, 3, SIZE) == KVF_WHY_UNREACHABLE);
    EXPECT(strstr(said, folder_of(p, 2)) != NULL && strstr(said, folder_of(p, 3)) == NULL); /* once */
    EXPECT(strstr(said, "can't be written") != NULL && strstr(said, "of user 0") != NULL);
    const char *found = diagnose(tier);
    EXPECT(strstr(found, "denied-folders: ") != NULL && strstr(found, "of user 0, mode 0700") != NULL);
    EXPECT(strstr(found, "not-writable") == NULL);
    EXPECT(tier->ops->clear(tier, &removed, &err, NULL, KVF_MS(1000)) == KVF_CONFIG && removed == 1);
    EXPECT(strstr(err.what, "of user 0") != NULL && strstr(err.what, "/store/kvf1/") != NULL);
    tier->ops->close(tier);
    return 0;
}

static int live_beside_folders_to_read(const place *p) {
    kvfi_tier *tier = come_back(p, 0755, 0644);
    for (uint64_t seed = 0; seed < VALUES; seed++) { /* a load needs no permission to write */
        EXPECT(kvft_get(tier, seed, SIZE) == KVF_WHY_NONE);
        EXPECT(kvft_peek(tier, seed) == KVF_WHY_NONE);
    }
    EXPECT(said[0] == '\0');
    EXPECT(kvft_put(tier, 5, SIZE + 1) == KVF_WHY_UNREACHABLE);
    EXPECT(strstr(said, folder_of(p, 5)) != NULL && strstr(said, "of user 0, mode 0755") != NULL);
    EXPECT(strstr(diagnose(tier), "denied-folders: ") != NULL);
    tier->ops->close(tier);
    return 0;
}

/* root came first, with a tenant of its own: what is in the way of the next one is named, and what lets it in. */
static int live_below_a_closed_folder(const place *p) {
    char folder[PATH_MAX], url[2 * PATH_MAX];
    const char *urls[] = {url};
    kvf_error err = {0};
    kvf_store *store = NULL;
    kvf_options options = {.struct_size = sizeof options};
    EXPECT(snprintf(folder, sizeof folder, "%s/store", p->dir) > 0);
    EXPECT(chmod(p->dir, 0755) == 0 && setgid(NOBODY) == 0 && setuid(NOBODY) == 0);
    snprintf(url, sizeof url, "%s?tenant=bob", p->url);
    EXPECT(kvf_store_open(&store, &err, urls, 1, &options) == KVF_CONFIG);
    snprintf(said, sizeof said, "%s", err.what);
    snprintf(url, sizeof url, "%s of user 0, mode 0700 can't be read", folder);
    EXPECT(strstr(said, url) != NULL && strstr(said, "/store && chmod 755 . && chmod 1777 tenants") != NULL);
    snprintf(url, sizeof url, "%s", p->url);
    EXPECT(kvf_store_open(&store, &err, urls, 1, &options) == KVF_CONFIG);
    snprintf(said, sizeof said, "%s", err.what);
    EXPECT(strstr(said, "of user 0, mode 0700") != NULL && strstr(said, "chown -R 65534 /") != NULL);
    return 0;
}

static int of_another_user(int dir, const char *path, struct stat *out, int flags) {
    (void)dir, (void)path, (void)flags;
    *out = (struct stat){.st_uid = geteuid() + 1, .st_mode = 0700};
    return 0;
}

/* A command to type as root is told whole or not at all, however long the path: cut short it would name another
 * folder. */
static void test_commands_are_whole(void **state) {
    (void)state;
    static const char *const behind[] = {"", "", " && chmod 755 . && chmod 1777 tenants"};
    size_t told = 0;
    replace()->fstatat = of_another_user;
    for (size_t len = 10; len < 250; len++) {
        char folder[256], root[300], before[64], expected[600];
        snprintf(folder, sizeof folder, "/%0*d", (int)len - 1, 7);
        snprintf(root, sizeof root, "%s/kvf1", folder);
        snprintf(before, sizeof before, "As root: chown -R %u", (unsigned)geteuid());
        for (size_t i = 0; i < 3; i++) { /* the store's own folder; the one above; the same, shared by tenants */
            kvfi_file file = {.root = root, .root_len = strlen(root), .folder_len = len, .shared = i == 2};
            kvfi_path path;
            kvf_error err = {0};
            snprintf(path.text, sizeof path.text, "%s", i == 0 ? root : folder);
            snprintf(expected, sizeof expected, "%s %s%s", i == 2 ? "As root: cd" : before, path.text, behind[i]);
            assert_int_equal(kvfi_file_unreadable(&file, &err, &path, EACCES), KVF_CONFIG);
            const char *command = strstr(err.what, "As root: ");
            if (command != NULL) {
                assert_string_equal(command, expected);
                told++;
            }
            assert_non_null(strstr(err.what, strerror(EACCES)));
            assert_int_equal(kvfi_file_unreadable(&file, &err, &path, EIO), KVF_IO);
            assert_null(strstr(err.what, "As root: "));
        }
    }
    restore();
    assert_true(told > 3 * 40);
}

/* The doctor names the folder of a tenant and its bound. */
static void test_the_doctor_sees_a_tenant(void **state) {
    (void)state;
    place p = open_place("?tenant=alice&tenant_max=5M");
    assert_non_null(strstr(diagnose(p.tier), "/store/tenants/alice: 0 records, 0 B of at most 5.0 MiB"));
    close_place(&p);
}

static void test_folders_that_root_left(void **state) {
    (void)state;
    expect_child(live_beside_closed_folders);
    expect_child(live_beside_folders_to_read);
    expect_child(live_below_a_closed_folder);
}

/* ---- a prompt larger than the bound: its front is kept, its end is not, and nothing is written twice */

static size_t load_run(kvf_space *space, kvft_prompt *prompt) {
    size_t run = 0;
    assert_int_equal(kvf_match(space, &run, NULL, prompt->keys, prompt->num_blocks, KVF_MS(10000)), KVF_OK);
    kvft_prompt_poison(prompt);
    run = run > 0 ? kvf_load(space, prompt->blocks, run, NULL, KVF_DEFAULT) : 0;
    assert_int_equal(kvft_prompt_wrong(prompt, 7, run), 0);
    kvft_prompt_fill(prompt, 7);
    return run;
}

static void expect_front_is_kept(const char *url, bool staged) {
    enum { BLOCKS = 40, PAYLOAD = 60000 };
    size_t first = 0;
    uint64_t saved = 0;
    for (int round = 0; round < 4; round++) {
        kvf_store *store = kvft_store(url);
        kvf_space *space = kvft_space(store, "larger", 16);
        kvft_prompt *prompt = kvft_prompt_new(space, 7, BLOCKS, PAYLOAD);
        kvft_prompt_fill(prompt, 7);
        size_t have = load_run(space, prompt);
        if (round == 1) {
            first = have;
            assert_true(have >= BLOCKS / 4 && have < BLOCKS / 2); /* of 40 blocks, the bound holds 17 */
        }
        assert_true(round == 0 || have == first);
        if (staged) {
            (void)kvf_save(space, prompt->blocks + have, BLOCKS - have, NULL);
            (void)kvft_flush(store);
        } else {
            kvf_queue *queue = NULL;
            kvf_completion completion;
            uint64_t ticket = 0;
            assert_int_equal(kvf_queue_open(&queue, NULL, store, 2), KVF_OK);
            kvf_batch batch = {.struct_size = sizeof batch,
                               .op = KVF_OP_SAVE,
                               .space = space,
                               .blocks = prompt->blocks + have,
                               .num = BLOCKS - have};
            assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
            while (kvf_reap(queue, &completion, 1) == 0) {
                kvft_nap_ms(1);
            }
            kvf_queue_close(queue);
        }
        kvf_stats stats = {.struct_size = sizeof stats};
        kvf_store_stats(store, &stats);
        saved += stats.saved;
        kvft_prompt_free(prompt);
        kvf_space_close(space);
        kvf_store_close(store);
    }
    assert_true(saved <= first + 4); /* and the card of the space, once for each process */
}

static void test_a_prompt_larger_than_the_bound(void **state) {
    (void)state;
    for (int staged = 0; staged < 2; staged++) {
        place p = open_place("?max=1M");
        expect_front_is_kept(p.url, staged);
        close_place(&p);
    }
}

/* How many leading blocks of the prompt lie in the first tier, and that none behind them does. */
static size_t front_in_memory(kvf_space *space, const kvft_prompt *prompt) {
    kvf_found found[40];
    size_t run = 0, front = 0;
    assert_true(prompt->num_blocks <= 40);
    assert_int_equal(kvf_match(space, &run, found, prompt->keys, prompt->num_blocks, KVF_MS(10000)), KVF_OK);
    assert_int_equal(run, prompt->num_blocks);
    while (front < run && found[front].tier == 0) {
        front++;
    }
    for (size_t i = front; i < run; i++) {
        assert_int_equal(found[i].tier, 1);
    }
    return front;
}

/* Memory in front of a folder keeps the front of a prompt, saved or copied up; that the folder alone has the rest is no
 * failure. */
static void test_a_prompt_larger_than_memory_in_front(void **state) {
    (void)state;
    enum { BLOCKS = 40, PAYLOAD = 60000 };
    place p = open_place("");
    for (int round = 0; round < 2; round++) {
        kvf_store *store = kvft_store2("mem:?max=1M", p.url);
        kvf_space *space = kvft_space(store, "larger", 16);
        kvft_prompt *prompt = kvft_prompt_new(space, 7, BLOCKS, PAYLOAD);
        kvf_stats stats = {.struct_size = sizeof stats};
        kvft_prompt_fill(prompt, 7);
        if (round == 0) {
            assert_int_equal(kvf_save(space, prompt->blocks, BLOCKS, NULL), BLOCKS);
        } else {
            assert_int_equal(load_run(space, prompt), BLOCKS);
        }
        (void)kvft_flush(store);
        kvf_store_stats(store, &stats);
        assert_int_equal(stats.save_failures[KVF_WHY_FULL], 0);
        size_t front = front_in_memory(space, prompt);
        assert_true(front >= BLOCKS / 4 && front < BLOCKS / 2);
        assert_int_equal(round == 0 ? 0 : front, stats.promoted);
        kvft_prompt_free(prompt);
        kvf_space_close(space);
        kvf_store_close(store);
    }
    close_place(&p);
}

/* In one process, since memory does not outlive it. */
static void test_a_prompt_larger_than_memory(void **state) {
    (void)state;
    kvf_store *store = kvft_store("mem:?max=1M");
    kvf_space *space = kvft_space(store, "larger", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 7, 40, 60000);
    size_t first = 0;
    for (int round = 0; round < 4; round++) {
        kvft_prompt_fill(prompt, 7);
        size_t have = load_run(space, prompt);
        first = round == 1 ? have : first;
        assert_true(round == 0 || (have == first && have >= 10));
        (void)kvf_save(space, prompt->blocks + have, 40 - have, NULL);
        (void)kvft_flush(store);
    }
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
}

/* ---- many damaged files: one run finds the first, and mends all */

enum { DAMAGE_BLOCKS = 12, DAMAGE_PAYLOAD = 5000 };

static int flip(void *ctx, const kvfi_sight *sight) {
    const place *p = ctx;
    char path[2 * PATH_MAX];
    if (sight->stored_bytes > DAMAGE_PAYLOAD) {
        snprintf(path, sizeof path, "%s/store/%s", p->dir, sight->name);
        write_at(path, DAMAGE_PAYLOAD / 2, "wrong", 5);
    }
    return 0;
}

typedef enum way { BY_LOAD, BY_BORROW, BY_QUEUE, ALL_WAYS } way;

/* What an engine does with a prompt: it loads the front that is whole, computes the rest, and saves it unless it is
 * known to be stored. */
static size_t run_prompt(kvf_store *store, kvf_space *space, kvft_prompt *prompt, way how) {
    size_t have = how == BY_BORROW ? 0 : load_run(space, prompt);
    for (kvf_borrowed lent; how == BY_BORROW && have < DAMAGE_BLOCKS; have++) {
        if (kvf_borrow(space, &lent, &prompt->blocks[have]) != KVF_OK) {
            break;
        }
        kvf_release(space, &lent);
    }
    if (how == BY_QUEUE) {
        kvf_queue *queue = NULL;
        kvf_completion completion;
        uint64_t ticket = 0;
        kvf_batch batch = {.struct_size = sizeof batch,
                           .op = KVF_OP_SAVE,
                           .space = space,
                           .blocks = prompt->blocks + have,
                           .num = DAMAGE_BLOCKS - have};
        assert_int_equal(kvf_queue_open(&queue, NULL, store, 2), KVF_OK);
        assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
        while (kvf_reap(queue, &completion, 1) == 0) {
            kvft_nap_ms(1);
        }
        kvf_queue_close(queue);
    } else {
        (void)kvf_save(space, prompt->blocks + have, DAMAGE_BLOCKS - have, NULL);
        (void)kvft_flush(store);
    }
    return have;
}

static void test_damaged_files_heal_at_once(void **state) {
    (void)state;
    for (int i = 0; i < 2 * ALL_WAYS; i++) {
        way how = (way)(i / 2);
        place p = open_place("");
        kvf_store *store = kvft_store(p.url);
        kvf_space *space = kvft_space(store, "damage", 16);
        kvft_prompt *prompt = kvft_prompt_new(space, 7, DAMAGE_BLOCKS, DAMAGE_PAYLOAD);
        kvft_prompt_fill(prompt, 7);
        assert_int_equal(run_prompt(store, space, prompt, how), 0);
        if (i % 2 == 0) { /* another process, which knows what a look has shown */
            kvf_space_close(space);
            kvf_store_close(store);
            store = kvft_store(p.url);
            space = kvft_space(store, "damage", 16);
        }
        size_t run = 0;
        assert_int_equal(run_prompt(store, space, prompt, how), DAMAGE_BLOCKS);
        kvft_prompt_fill(prompt, 7);
        assert_int_equal(p.tier->ops->walk(p.tier, NULL, NULL, false, flip, &p, KVF_MS(1000)), KVF_OK);
        assert_int_equal(kvf_match(space, &run, NULL, prompt->keys, DAMAGE_BLOCKS, KVF_MS(10000)), KVF_OK);
        assert_int_equal(run, DAMAGE_BLOCKS); /* headers are whole */
        assert_int_equal(run_prompt(store, space, prompt, how), 0);
        assert_int_equal(kvft_count(p.tier).damaged, 0);
        assert_int_equal(run_prompt(store, space, prompt, how), DAMAGE_BLOCKS);
        kvft_prompt_free(prompt);
        kvf_space_close(space);
        kvf_store_close(store);
        close_place(&p);
    }
}

/* A caller that learns of a miss while other blocks of the batch are still read can save that block at once. */
static void test_damage_is_known_when_it_is_told(void **state) {
    (void)state;
    place p = open_place("");
    kvf_store *store = kvft_store(p.url);
    kvf_space *space = kvft_space(store, "damage", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 7, DAMAGE_BLOCKS, 4000000);
    kvf_queue *queue = NULL;
    kvf_completion completion;
    uint64_t ticket = 0;
    uint8_t each[DAMAGE_BLOCKS] = {0};
    kvf_arrivals arrivals = {.each = each};
    kvft_prompt_fill(prompt, 7);
    kvft_save_all(space, store, prompt);
    assert_int_equal(p.tier->ops->walk(p.tier, NULL, NULL, false, flip, &p, KVF_MS(1000)), KVF_OK);
    assert_true(kvf_knows(space, &prompt->keys[0]));
    assert_int_equal(kvf_queue_open(&queue, NULL, store, 2), KVF_OK);
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_LOAD,
                       .space = space,
                       .blocks = prompt->blocks,
                       .num = DAMAGE_BLOCKS,
                       .arrivals = &arrivals};
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    while (kvf_arrival_of(&arrivals, 0) != KVF_MISSED) {
        kvft_nap_ms(0);
    }
    assert_int_equal(kvf_arrival_why(&arrivals, 0), KVF_WHY_CHECKSUM);
    assert_false(kvf_knows(space, &prompt->keys[0]));
    while (kvf_reap(queue, &completion, 1) == 0) {
        kvft_nap_ms(1);
    }
    kvf_queue_close(queue);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
    close_place(&p);
}

/* ---- a clock that was ahead: what was used then is not young for ever */

static void test_times_of_the_future_are_taken_as_now(void **state) {
    (void)state;
    place p = open_place("?max=1M");
    for (uint64_t seed = 0; seed < 16; seed++) {
        assert_int_equal(kvft_put(p.tier, seed, SIZE), KVF_WHY_NONE);
        set_age(path_of(&p, seed), seed < 8 ? -1000000 : 0);
    }
    (void)kvfi_file_sweep((kvfi_file *)p.tier, 1, KVFI_NEVER);
    for (uint64_t seed = 0; seed < 8; seed++) {
        assert_true(!exists(path_of(&p, seed)) || age_of(path_of(&p, seed)) >= 0);
    }
    for (uint64_t seed = 8; seed < 16; seed++) { /* from now on, ages are true */
        if (exists(path_of(&p, seed))) {
            set_age(path_of(&p, seed), -1);
        }
    }
    for (uint64_t seed = 100; seed < 110; seed++) {
        assert_int_equal(kvft_put(p.tier, seed, SIZE), KVF_WHY_NONE);
        set_age(path_of(&p, seed), -1);
    }
    for (uint64_t seed = 0; seed < 8; seed++) {
        assert_false(exists(path_of(&p, seed)));
    }
    close_place(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hard_links_denied),
        cmocka_unit_test(test_what_failed_teaches_nothing),
        cmocka_unit_test(test_unnamed_files_denied),
        cmocka_unit_test(test_locks_denied),
        cmocka_unit_test(test_times_denied),
        cmocka_unit_test(test_what_errno_says_after_success),
        cmocka_unit_test(test_no_proc_and_many_threads),
        cmocka_unit_test(test_folders_that_root_left),
        cmocka_unit_test(test_commands_are_whole),
        cmocka_unit_test(test_the_doctor_sees_a_tenant),
        cmocka_unit_test(test_a_prompt_larger_than_the_bound),
        cmocka_unit_test(test_a_prompt_larger_than_memory_in_front),
        cmocka_unit_test(test_a_prompt_larger_than_memory),
        cmocka_unit_test(test_damaged_files_heal_at_once),
        cmocka_unit_test(test_damage_is_known_when_it_is_told),
        cmocka_unit_test(test_times_of_the_future_are_taken_as_now),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
