/* SPDX-License-Identifier: Apache-2.0
 *
 * Secrets: their sources, replacing one by another, and what can be seen without them.
 */
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "prefix/prefix.h"
#include "session/session.h"
#include "store/private.h"
#include "support/faults.h"
#include "support/kit.h"

#define OLD     "the secret of yesterday"
#define NEW     "the secret of today ..."
#define BLOCKS  8u
#define PAYLOAD 5000u

/* ---- files ---- */

static void write_file(const char *path, const void *bytes, size_t len, mode_t mode) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0 && write(fd, bytes, len) == (ssize_t)len);
    close(fd);
    assert_int_equal(chmod(path, mode), 0);
}

static kvf_status open_with(const char *files, kvf_error *err, kvf_store **out) {
    const char *url = "mem:";
    kvf_options options = {.struct_size = sizeof options, .secret_files = files};
    return kvf_store_open(out, err, &url, 1, &options);
}

static void expect_refused(const char *files, const char *word) {
    kvf_error err = {0};
    kvf_store *store = NULL;
    assert_int_equal(open_with(files, &err, &store), KVF_CONFIG);
    if (strstr(err.what, word) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", err.what, word);
    }
}

static void expect_secret(const char *files, const char *secret, size_t num) {
    kvf_error err = {0};
    kvf_store *store = NULL;
    if (open_with(files, &err, &store) != KVF_OK) {
        fail_msg("%s", err.what);
    }
    assert_int_equal(store->secrets.num, num);
    assert_int_equal(store->secrets.of[0].len, strlen(secret));
    assert_memory_equal(store->secrets.of[0].bytes, secret, strlen(secret));
    kvf_store_close(store);
}

static void files(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), path[512], other[512], both[1100], longest[1026];
    snprintf(path, sizeof path, "%s/secret", dir);
    snprintf(other, sizeof other, "%s/other", dir);
    snprintf(both, sizeof both, "%s:%s", path, other);
    expect_refused(path, "there is no secret file");
    expect_refused(path, "openssl rand");
    expect_refused("", "without an empty part");
    expect_refused(":/x", "NEW:OLD");
    for (mode_t mode = 0400; mode <= 0777; mode++) {
        write_file(path, OLD "\n", strlen(OLD) + 1, mode);
        if ((mode & 077) != 0) {
            expect_refused(path, "open to others");
        }
    }
    write_file(path, OLD "\n", strlen(OLD) + 1, 0400);
    expect_secret(path, OLD, 1);
    write_file(path, OLD "\r\n", strlen(OLD) + 2, 0600);
    expect_secret(path, OLD, 1);
    write_file(path, OLD, strlen(OLD), 0600);
    expect_secret(path, OLD, 1);
    write_file(path, "0123456789abcdef", 16, 0600);
    expect_secret(path, "0123456789abcdef", 1);
    write_file(path, "0123456789abcde\n", 16, 0600);
    expect_refused(path, "fewer than 16 bytes");
    write_file(path, "", 0, 0600);
    expect_refused(path, "fewer than 16 bytes");
    memset(longest, 'x', sizeof longest);
    longest[1025] = '\0';
    write_file(path, longest, 1025, 0600);
    expect_refused(path, "more than 1024 bytes");
    longest[1024] = '\0';
    write_file(path, longest, 1024, 0600);
    expect_secret(path, longest, 1);
    write_file(path, OLD, strlen(OLD), 0600);
    write_file(other, NEW, strlen(NEW), 0600);
    expect_secret(both, OLD, 2);
    write_file(other, OLD, strlen(OLD), 0600);
    expect_secret(both, OLD, 1); /* twice the same is one */
    snprintf(both, sizeof both, "%s:%s:%s", path, other, path);
    expect_refused(both, "more than 2");
    snprintf(both, sizeof both, "%s:", path);
    expect_refused(both, "without an empty part");
    expect_refused(dir, "not a regular file");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    expect_refused(path, "not a regular file");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(symlink(other, path), 0);
    expect_secret(path, OLD, 1);
    kvft_remove_dir(dir);
}

/* A file that belongs to somebody else says what that one wants it to. */
static void file_of_another_user(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), path[512];
    snprintf(path, sizeof path, "%s/secret", dir);
    write_file(path, OLD, strlen(OLD), 0600);
    if (chown(path, 12345, (gid_t)-1) == 0) {
        expect_refused(path, "belongs to user 12345");
    }
    kvft_remove_dir(dir);
}

static void faults_of_files(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), path[512];
    snprintf(path, sizeof path, "%s/secret", dir);
    write_file(path, OLD "\n", strlen(OLD) + 1, 0600);
    for (int kind = KVFT_ALLOC; kind <= KVFT_ZERO; kind++) {
        for (uint64_t n = 1;; n++) {
            kvf_store *store = NULL;
            kvf_error err = {0};
            kvft_faults_arm((kvft_fault_kind)kind, n);
            kvf_status status = open_with(path, &err, &store);
            bool hit = kvft_faults_disarm();
            if (status == KVF_OK) {
                assert_int_equal(store->secrets.of[0].len, strlen(OLD));
            } else {
                assert_true(hit && kind < KVFT_SHORT);
            }
            kvf_store_close(store);
            if (!hit) {
                break;
            }
        }
    }
    kvft_remove_dir(dir);
}

static void wrong_options(void **state) {
    (void)state;
    const char *url = "mem:";
    kvf_store *store = NULL;
    kvf_options options = {.struct_size = sizeof options, .previous_secret = OLD, .previous_secret_len = strlen(OLD)};
    assert_int_equal(kvf_store_open(&store, NULL, &url, 1, &options), KVF_LIMIT);
    options = (kvf_options){.struct_size = sizeof options, .secret = "", .secret_len = 0};
    assert_int_equal(kvf_store_open(&store, NULL, &url, 1, &options), KVF_LIMIT);
    options = (kvf_options){.struct_size = sizeof options, .secret = OLD, .secret_len = 15};
    assert_int_equal(kvf_store_open(&store, NULL, &url, 1, &options), KVF_LIMIT);
    options = (kvf_options){.struct_size = sizeof options, .secret = OLD, .secret_len = 1025};
    assert_int_equal(kvf_store_open(&store, NULL, &url, 1, &options), KVF_LIMIT);
    options = (kvf_options){.struct_size = sizeof options, .secret = OLD, .secret_len = 9, .secret_files = "/x"};
    assert_int_equal(kvf_store_open(&store, NULL, &url, 1, &options), KVF_CONFIG);
    options = (kvf_options){.struct_size = sizeof options, .seal_sessions = 1};
    assert_int_equal(kvf_store_open(&store, NULL, &url, 1, &options), KVF_CONFIG);
}

/* ---- one secret in the place of another ---- */

static kvf_store *store_with(const char *url, const char *secret, const char *previous) {
    kvf_store *store = NULL;
    kvf_options options = {.struct_size = sizeof options, .secret = secret, .previous_secret = previous};
    options.secret_len = secret != NULL ? strlen(secret) : 0;
    options.previous_secret_len = previous != NULL ? strlen(previous) : 0;
    assert_int_equal(kvf_store_open(&store, NULL, &url, 1, &options), KVF_OK);
    return store;
}

typedef struct bench {
    kvf_store *store;
    kvf_space *space;
    kvft_prompt *prompt;
} bench;

static bench open_bench(const char *url, const char *secret, const char *previous) {
    bench b = {.store = store_with(url, secret, previous)};
    b.space = kvft_sealed_space(b.store, "m", 16, NULL); /* it has those of the store */
    b.prompt = kvft_prompt_new(b.space, 7, BLOCKS, PAYLOAD);
    return b;
}

static void close_bench(bench *b) {
    kvft_prompt_free(b->prompt);
    kvf_space_close(b->space);
    kvf_store_close(b->store);
}

/* How many leading blocks load, each exact. */
static size_t num_loaded(const char *url, const char *secret, const char *previous) {
    bench b = open_bench(url, secret, previous);
    size_t run = 0;
    kvf_found found[BLOCKS];
    assert_int_equal(kvf_match(b.space, &run, found, b.prompt->keys, BLOCKS, KVF_MS(1000)), KVF_OK);
    kvft_prompt_poison(b.prompt);
    size_t loaded = kvf_load(b.space, b.prompt->blocks, BLOCKS, NULL, KVF_DEFAULT);
    assert_int_equal(loaded, run);
    for (size_t i = 0; i < run; i++) {
        assert_int_equal(found[i].payload_bytes, PAYLOAD);
        assert_int_equal(found[i].num_tokens, 16);
    }
    assert_int_equal(kvft_prompt_wrong(b.prompt, 7, loaded), 0);
    kvft_flush_all(b.store);
    close_bench(&b);
    return loaded;
}

static void save_under(const char *url, const char *secret, size_t from, size_t num) {
    bench b = open_bench(url, secret, NULL);
    assert_int_equal(kvf_save(b.space, b.prompt->blocks + from, num, NULL), num);
    kvft_flush_all(b.store);
    close_bench(&b);
}

static void rotation(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[512];
    snprintf(url, sizeof url, "file:%s", dir);
    save_under(url, OLD, 0, BLOCKS);
    assert_int_equal(num_loaded(url, NULL, NULL), 0);
    assert_int_equal(num_loaded(url, NEW, NULL), 0);
    assert_int_equal(num_loaded(url, OLD, NULL), BLOCKS);
    assert_int_equal(num_loaded(url, NEW, OLD), BLOCKS); /* and they are sealed again */
    assert_int_equal(num_loaded(url, NEW, NULL), BLOCKS);
    assert_int_equal(num_loaded(url, OLD, NULL), BLOCKS);
    bench b = open_bench(url, NEW, NULL);
    kvf_digest digest;
    char *text = NULL;
    kvf_space_digest(b.space, &digest);
    assert_int_equal(kvf_space_describe(b.store, &text, NULL, &digest), KVF_OK); /* and have their card */
    kvf_free(text);
    close_bench(&b);
    kvft_remove_dir(dir);
}

/* Both secrets have written blocks of one prompt, in turn. */
static void rotation_by_turns(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[512];
    snprintf(url, sizeof url, "file:%s", dir);
    for (size_t i = 0; i < BLOCKS; i++) {
        save_under(url, i % 3 == 1 ? NEW : OLD, i, 1);
    }
    assert_int_equal(num_loaded(url, NEW, NULL), 0);
    assert_int_equal(num_loaded(url, OLD, NULL), 1);
    assert_int_equal(num_loaded(url, NEW, OLD), BLOCKS);
    assert_int_equal(num_loaded(url, NEW, NULL), BLOCKS);
    kvft_remove_dir(dir);
}

/* A damaged record under the old secret is a miss; a load that is watched sees the others come. */
static void rotation_watched(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[512];
    snprintf(url, sizeof url, "file:%s", dir);
    save_under(url, OLD, 0, BLOCKS - 1);
    bench b = open_bench(url, NEW, OLD);
    uint8_t each[BLOCKS] = {0};
    kvf_arrivals arrivals = {.each = each};
    kvf_queue *queue = NULL;
    uint64_t ticket = 0;
    kvf_completion done = {0};
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_LOAD,
                       .space = b.space,
                       .blocks = b.prompt->blocks,
                       .num = BLOCKS,
                       .arrivals = &arrivals};
    kvft_prompt_poison(b.prompt);
    assert_int_equal(kvf_queue_open(&queue, NULL, b.store, 1), KVF_OK);
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    while (kvf_reap(queue, &done, 1) == 0) {
        struct pollfd p = {.fd = kvf_queue_fd(queue), .events = POLLIN};
        poll(&p, 1, 1000);
    }
    assert_int_equal(done.num_ok, BLOCKS - 1);
    for (size_t i = 0; i < BLOCKS; i++) {
        assert_int_equal(kvf_arrival_of(&arrivals, i), i + 1 < BLOCKS ? KVF_HERE : KVF_MISSED);
    }
    assert_int_equal(kvf_arrival_why(&arrivals, BLOCKS - 1), KVF_WHY_ABSENT);
    assert_int_equal(kvft_prompt_wrong(b.prompt, 7, BLOCKS - 1), 0);
    kvf_queue_close(queue);
    close_bench(&b);
    kvft_remove_dir(dir);
}

/* Who looks while blocks land is never told that one is missing which then comes. */
typedef struct looker {
    uint8_t each[BLOCKS];
    atomic_bool wrong; /* told by any thread that loads */
} looker;

static void look(void *arg) {
    looker *l = arg;
    for (size_t i = 0; i + 1 < BLOCKS; i++) {
        if (__atomic_load_n(&l->each[i], __ATOMIC_ACQUIRE) >= KVFI_ITEM_MISSED) {
            l->wrong = true;
        }
    }
}

static void rotation_as_it_lands(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[512];
    snprintf(url, sizeof url, "file:%s", dir);
    save_under(url, OLD, 0, BLOCKS - 1);
    bench b = open_bench(url, NEW, OLD);
    uint64_t bytes = 0;
    int64_t at_us = 0;
    looker l = {{0}, false};
    kvfi_watch watch = {.wanted = BLOCKS, .bytes = &bytes, .at_us = &at_us, .each = l.each, .moved = look, .arg = &l};
    assert_int_equal(kvfi_load(b.space, b.prompt->blocks, BLOCKS, NULL, 0, kvfi_deadline(10000000), 0, NULL, &watch),
                     BLOCKS - 1);
    assert_false(l.wrong);
    close_bench(&b);
    kvft_remove_dir(dir);
}

/* ---- straight from the caller's memory, which stays as it is ---- */

static void saved_through(void **state) {
    (void)state;
    bench b = open_bench("mem:", NEW, NULL);
    kvf_queue *queue = NULL;
    uint64_t ticket = 0;
    kvf_completion done = {0};
    kvf_batch batch = {
        .struct_size = sizeof batch, .op = KVF_OP_SAVE, .space = b.space, .blocks = b.prompt->blocks, .num = BLOCKS};
    assert_int_equal(kvf_queue_open(&queue, NULL, b.store, 1), KVF_OK);
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    while (kvf_reap(queue, &done, 1) == 0) {
        struct pollfd p = {.fd = kvf_queue_fd(queue), .events = POLLIN};
        poll(&p, 1, 1000);
    }
    assert_int_equal(done.num_ok, BLOCKS);
    assert_int_equal(kvft_prompt_wrong(b.prompt, 7, BLOCKS), 0);
    kvft_prompt_poison(b.prompt);
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, BLOCKS, NULL, KVF_DEFAULT), BLOCKS);
    assert_int_equal(kvft_prompt_wrong(b.prompt, 7, BLOCKS), 0);
    kvf_queue_close(queue);
    close_bench(&b);
}

/* The backlog has room for some of the records at a time, and for none at first: the batch waits. */
static void saved_through_a_full_backlog(void **state) {
    (void)state;
    enum { BLOCK_BYTES = 200000, MOST = 16 };
    const char *url = "mem:";
    kvf_options options = {
        .struct_size = sizeof options, .secret = NEW, .secret_len = strlen(NEW), .backlog_bytes = 4 * BLOCK_BYTES};
    bench b = {0};
    assert_int_equal(kvf_store_open(&b.store, NULL, &url, 1, &options), KVF_OK);
    b.space = kvft_sealed_space(b.store, "m", 16, NULL);
    b.prompt = kvft_prompt_new(b.space, 7, BLOCKS, BLOCK_BYTES);
    kvf_queue *queue = NULL;
    uint64_t ticket = 0;
    kvf_completion done = {0};
    kvf_reserved held[MOST];
    size_t num = 0;
    while (num < MOST && kvf_reserve(b.space, &held[num], BLOCK_BYTES) == KVF_OK) {
        num++;
    }
    assert_in_range(num, 1, MOST - 1);
    kvf_batch batch = {
        .struct_size = sizeof batch, .op = KVF_OP_SAVE, .space = b.space, .blocks = b.prompt->blocks, .num = BLOCKS};
    assert_int_equal(kvf_queue_open(&queue, NULL, b.store, 1), KVF_OK);
    /* No longer than its budget. */
    batch.budget_us = KVF_MS(20);
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    struct pollfd p = {.fd = kvf_queue_fd(queue), .events = POLLIN};
    assert_int_equal(poll(&p, 1, -1), 1);
    assert_int_equal(kvf_reap(queue, &done, 1), 1);
    assert_int_equal(done.num_ok, 0);
    assert_int_equal(b.prompt->blocks[0].why, KVF_WHY_BUDGET);
    /* Nor than until it is cancelled. */
    batch.budget_us = KVF_MAX_BUDGET_US;
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    kvf_cancel(queue, ticket);
    assert_int_equal(poll(&p, 1, -1), 1);
    assert_int_equal(kvf_reap(queue, &done, 1), 1);
    assert_int_equal(done.num_ok, 0);
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    assert_int_equal(poll(&p, 1, 100), 0);
    while (num > 0) {
        kvf_abandon(b.space, &held[--num]);
    }
    assert_int_equal(poll(&p, 1, -1), 1);
    assert_int_equal(kvf_reap(queue, &done, 1), 1);
    assert_int_equal(done.num_ok, BLOCKS);
    kvft_prompt_poison(b.prompt);
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, BLOCKS, NULL, KVF_DEFAULT), BLOCKS);
    assert_int_equal(kvft_prompt_wrong(b.prompt, 7, BLOCKS), 0);
    kvf_queue_close(queue);
    close_bench(&b);
}

/* One that never has room is not waited for. */
static void saved_through_a_small_backlog(void **state) {
    (void)state;
    const char *url = "mem:";
    kvf_options options = {
        .struct_size = sizeof options, .secret = NEW, .secret_len = strlen(NEW), .backlog_bytes = PAYLOAD};
    bench b = {0};
    assert_int_equal(kvf_store_open(&b.store, NULL, &url, 1, &options), KVF_OK);
    b.space = kvft_sealed_space(b.store, "m", 16, NULL);
    b.prompt = kvft_prompt_new(b.space, 7, BLOCKS, PAYLOAD);
    kvf_queue *queue = NULL;
    uint64_t ticket = 0;
    kvf_completion done = {0};
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_SAVE,
                       .space = b.space,
                       .blocks = b.prompt->blocks,
                       .num = BLOCKS,
                       .budget_us = KVF_MAX_BUDGET_US};
    assert_int_equal(kvf_queue_open(&queue, NULL, b.store, 1), KVF_OK);
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    struct pollfd p = {.fd = kvf_queue_fd(queue), .events = POLLIN};
    assert_int_equal(poll(&p, 1, -1), 1);
    assert_int_equal(kvf_reap(queue, &done, 1), 1);
    assert_int_equal(done.num_ok, 0);
    assert_int_equal(b.prompt->blocks[BLOCKS - 1].why, KVF_WHY_FULL);
    kvf_queue_close(queue);
    close_bench(&b);
}

/* ---- tiers: what a slower one had is sealed anew for the faster one ---- */

static void promotion(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), slow[512];
    snprintf(slow, sizeof slow, "file:%s", dir);
    save_under(slow, NEW, 0, BLOCKS);
    const char *urls[] = {"mem:", slow};
    kvf_options options = {.struct_size = sizeof options, .secret = NEW, .secret_len = strlen(NEW)};
    bench b = {0};
    assert_int_equal(kvf_store_open(&b.store, NULL, urls, 2, &options), KVF_OK);
    b.space = kvft_sealed_space(b.store, "m", 16, NULL);
    b.prompt = kvft_prompt_new(b.space, 7, BLOCKS, PAYLOAD);
    for (int round = 0; round < 2; round++) {
        kvf_found found[BLOCKS];
        size_t run = 0;
        kvft_prompt_poison(b.prompt);
        assert_int_equal(kvf_match(b.space, &run, found, b.prompt->keys, BLOCKS, KVF_MS(1000)), KVF_OK);
        assert_int_equal(run, BLOCKS);
        assert_int_equal(found[0].tier, round == 0 ? 1 : 0);
        assert_int_equal(kvf_load(b.space, b.prompt->blocks, BLOCKS, NULL, KVF_DEFAULT), BLOCKS);
        assert_int_equal(kvft_prompt_wrong(b.prompt, 7, BLOCKS), 0);
        kvft_flush_all(b.store);
    }
    kvf_stats stats = {.struct_size = sizeof stats};
    kvf_store_stats(b.store, &stats);
    assert_int_equal(stats.promoted, BLOCKS);
    close_bench(&b);
    kvft_remove_dir(dir);
}

/* What a slower tier has under the previous secret is brought up under the new one alone. */
static void rotation_of_tiers(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), slow[512];
    snprintf(slow, sizeof slow, "file:%s", dir);
    save_under(slow, OLD, 0, BLOCKS);
    const char *urls[] = {"mem:", slow};
    kvf_options options = {.struct_size = sizeof options,
                           .secret = NEW,
                           .secret_len = strlen(NEW),
                           .previous_secret = OLD,
                           .previous_secret_len = strlen(OLD)};
    bench b = {0};
    assert_int_equal(kvf_store_open(&b.store, NULL, urls, 2, &options), KVF_OK);
    b.space = kvft_sealed_space(b.store, "m", 16, NULL);
    b.prompt = kvft_prompt_new(b.space, 7, BLOCKS, PAYLOAD);
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, BLOCKS, NULL, KVF_DEFAULT), BLOCKS);
    kvft_flush_all(b.store);
    kvf_tier_info info = {.struct_size = sizeof info};
    kvf_stats stats = {.struct_size = sizeof stats};
    assert_int_equal(kvf_tier_info_get(b.store, &info, 0), KVF_OK);
    assert_int_equal(info.num_records, BLOCKS + 1); /* with the card */
    kvf_store_stats(b.store, &stats);
    assert_int_equal(stats.promoted, 0);
    close_bench(&b);
    kvft_remove_dir(dir);
}

/* A sealed record can't be lent: it is said to be absent there, so that it is loaded. */
static void nothing_is_lent(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[512];
    snprintf(url, sizeof url, "file:%s", dir);
    save_under(url, NEW, 0, BLOCKS);
    bench b = open_bench(url, NEW, NULL);
    kvf_borrowed borrowed = {0};
    assert_int_equal(kvf_borrow(b.space, &borrowed, b.prompt->blocks), KVF_MISS);
    assert_int_equal(b.prompt->blocks[0].why, KVF_WHY_ABSENT);
    kvft_prompt_poison(b.prompt);
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, BLOCKS, NULL, KVF_DEFAULT), BLOCKS);
    assert_int_equal(kvft_prompt_wrong(b.prompt, 7, BLOCKS), 0);
    close_bench(&b);
    kvft_remove_dir(dir);
}

/* ---- what others put in the place of a record ---- */

/* A sealed record of the right name and size, of whose tokens nothing true is said. */
static int spoil(const char *path, const struct stat *st, int type, struct FTW *at) {
    uint8_t head[KVFI_HEADER_BYTES];
    kvfi_header header;
    int fd = type == FTW_F ? open(path, O_RDWR | O_CLOEXEC) : -1;
    (void)at;
    if (fd >= 0 && st->st_size > (off_t)PAYLOAD) {
        assert_int_equal(pread(fd, head, sizeof head, 0), sizeof head);
        assert_int_equal(kvfi_header_decode(&header, head), KVF_WHY_NONE);
        header.veiled[7] ^= 0x80; /* so many tokens no block has */
        kvfi_header_encode(head, &header);
        assert_int_equal(pwrite(fd, head, sizeof head, 0), sizeof head);
    }
    if (fd >= 0) {
        close(fd);
    }
    return 0;
}

/* A writer without the secret can't keep a block from being stored: after a lookup has seen the foreign record, a save
 * overwrites it. */
static void spoiled_headers(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[512];
    snprintf(url, sizeof url, "file:%s", dir);
    save_under(url, NEW, 0, BLOCKS);
    assert_int_equal(nftw(dir, spoil, 16, FTW_PHYS), 0);
    bench b = open_bench(url, NEW, NULL);
    size_t run = 0;
    kvf_found found[BLOCKS];
    assert_int_equal(kvf_match(b.space, &run, found, b.prompt->keys, BLOCKS, KVF_MS(1000)), KVF_OK);
    assert_int_equal(run, 0);
    assert_int_equal(found[0].why, KVF_WHY_CHECKSUM);
    kvft_save_all(b.space, b.store, b.prompt);
    kvft_prompt_poison(b.prompt);
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, BLOCKS, NULL, KVF_DEFAULT), BLOCKS);
    assert_int_equal(kvft_prompt_wrong(b.prompt, 7, BLOCKS), 0);
    close_bench(&b);
    kvft_remove_dir(dir);
}

/* ---- what can be seen ---- */

typedef struct census {
    size_t plain, closed, opened, tokens, cards, damaged;
    const kvft_prompt *prompt;
    bool whole;
} census;

static int count(void *ctx, const kvf_entry *entry) {
    census *c = ctx;
    c->plain += entry->seal == KVF_SEAL_NONE;
    c->closed += entry->seal == KVF_SEAL_CLOSED;
    c->opened += entry->seal == KVF_SEAL_OPENED;
    c->cards += entry->kind == KVF_ENTRY_SPACE_CARD;
    c->damaged += entry->damage != KVF_WHY_NONE;
    c->tokens += entry->num_tokens;
    if (entry->seal == KVF_SEAL_CLOSED) {
        assert_null(entry->tokens);
        assert_null(entry->payload);
        assert_int_equal(entry->first_token, 0);
    } else if (c->whole && entry->kind == KVF_ENTRY_BLOCK) {
        assert_memory_equal(entry->tokens, c->prompt->tokens + entry->first_token, 4 * (size_t)entry->num_tokens);
        assert_memory_equal(entry->payload, c->prompt->memory + entry->first_token / 16 * PAYLOAD, PAYLOAD);
    }
    return 0;
}

static census census_of(const char *url, const char *secret, const char *previous, const kvft_prompt *p, bool whole) {
    census c = {.prompt = p, .whole = whole};
    kvf_store *store = store_with(url, secret, previous);
    kvf_walk_options options = {.struct_size = sizeof options, .whole = whole};
    assert_int_equal(kvf_walk(store, NULL, count, &c, &options), KVF_OK);
    kvf_store_close(store);
    return c;
}

static void what_is_seen(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[512], *text = NULL;
    kvf_digest digest;
    snprintf(url, sizeof url, "file:%s", dir);
    save_under(url, NEW, 0, BLOCKS);
    bench b = open_bench("mem:", NEW, NULL);
    kvf_space_digest(b.space, &digest);
    for (int whole = 0; whole < 2; whole++) {
        census c = census_of(url, NULL, NULL, b.prompt, whole);
        assert_int_equal(c.closed, BLOCKS + 1);
        assert_int_equal(c.tokens + c.damaged + c.opened + c.plain, 0);
        assert_int_equal(c.cards, 1);
        c = census_of(url, OLD, NULL, b.prompt, whole);
        assert_int_equal(c.closed, BLOCKS + 1);
        c = census_of(url, OLD, NEW, b.prompt, whole);
        assert_int_equal(c.opened, BLOCKS + 1);
        assert_int_equal(c.tokens, 16 * BLOCKS);
        assert_int_equal(c.damaged + c.closed + c.plain, 0);
    }
    kvf_store *store = store_with(url, NULL, NULL);
    assert_int_equal(kvf_space_describe(store, &text, NULL, &digest), KVF_REFUSED);
    kvf_store_close(store);
    store = store_with(url, OLD, NEW);
    assert_int_equal(kvf_space_describe(store, &text, NULL, &digest), KVF_OK);
    assert_string_equal(text, "block_tokens=16\nengine=test\nkv=f16\nmodel=m\n");
    kvf_free(text);
    kvf_store_close(store);
    close_bench(&b);
    kvft_remove_dir(dir);
}

/* Whoever can write can write a plain card; what it says is believed only where its space is the hash of that. */
static void forged_cards(void **state) {
    (void)state;
    static const char lie[] = "block_tokens=16\nengine=test\nkv=f16\nmodel=another\n";
    for (int sealed = 0; sealed < 2; sealed++) {
        const char *secret = sealed ? NEW : NULL;
        bench b = open_bench("mem:", secret, NULL);
        char *text = NULL;
        uint8_t head[KVFI_HEADER_BYTES], sum[KVFI_SUM_BYTES];
        kvfi_addr addr;
        kvf_block none = {0};
        struct iovec iov[3] = {{head, sizeof head}, {(void *)(uintptr_t)lie, sizeof lie - 1}, {sum, sizeof sum}};
        kvf_space_digest(b.space, &addr.space);
        kvfi_card_key(&addr.key, &addr.space);
        kvfi_record_seal(head, sum, &addr, &none, iov + 1, 1, KVFI_FLAG_CARD, 1700000000);
        kvfi_item item = {.addr = addr, .iov = iov, .num_iov = 3, .bytes = kvfi_iov_bytes(iov, 3)};
        kvfi_feed feed = {.items = &item, .num = 1, .limit = 1, .deadline_us = KVFI_NEVER};
        b.store->tiers[0]->ops->put(b.store->tiers[0], &feed);
        assert_int_equal(item.status, KVF_OK);
        assert_int_equal(kvf_space_describe(b.store, &text, NULL, &addr.space), KVF_MISS);
        kvft_save_all(b.space, b.store, b.prompt); /* writes the true one over it */
        assert_int_equal(kvf_space_describe(b.store, &text, NULL, &addr.space), KVF_OK);
        assert_non_null(strstr(text, "model=m\n"));
        kvf_free(text);
        close_bench(&b);
    }
}

/* ---- sessions ---- */

static kvf_store *sealing_store(const char *url, const char *secret, const char *previous) {
    kvf_store *store = NULL;
    kvf_options options = {.struct_size = sizeof options,
                           .secret = secret,
                           .secret_len = strlen(secret),
                           .previous_secret = previous,
                           .previous_secret_len = previous != NULL ? strlen(previous) : 0,
                           .seal_sessions = 1};
    assert_int_equal(kvf_store_open(&store, NULL, &url, 1, &options), KVF_OK);
    return store;
}

#define KEYS   "the keys of a conversation, which nobody else may read"
#define VALUES "its values, which are as much of a secret"

static kvf_status save_session(kvf_store *store, const char *keys) {
    kvf_error err = {0};
    kvf_tensor k = {.data = keys, .len = strlen(keys)}, v = {.data = VALUES, .len = strlen(VALUES)};
    return kvf_session_save(store, &err, "user:42", &k, &v, NULL);
}

static kvf_status load_session(kvf_store *store, const char *keys) {
    kvf_error err = {0};
    kvf_session *session = NULL;
    kvf_status status = kvf_session_load(store, &session, &err, "user:42", KVF_DEFAULT);
    if (status == KVF_OK) {
        assert_int_equal(session->k.len, strlen(keys));
        assert_memory_equal(session->k.data, keys, strlen(keys));
        assert_memory_equal(session->v.data, VALUES, strlen(VALUES));
        kvf_session_free(session);
    }
    return status;
}

static int name_of_session(void *ctx, const kvf_entry *entry) {
    if (entry->kind == KVF_ENTRY_SESSION) {
        assert_string_equal(entry->name, "user:42");
        ++*(int *)ctx;
    }
    return 0;
}

/* What may lie in pieces is never written over: the one that replaces it goes to the other place. */
static void a_long_session_is_not_written_over(void **state) {
    (void)state;
    kvf_store *store = sealing_store("mem:", NEW, NULL);
    kvfi_tier *tier = store->tiers[0];
    kvfi_addr places[2];
    kvfi_peek peeks[2];
    uint8_t head[KVFI_HEADER_BYTES];
    uint64_t round_trips = 0;
    kvfi_header header;
    for (unsigned i = 0; i < 2; i++) {
        kvfi_session_addr(&places[i], "user:42", &store->secrets.of[0], i);
    }
    assert_memory_not_equal(places[0].key.bytes, places[1].key.bytes, 32);
    for (int turn = 0; turn < 3; turn++) { /* a short one takes the place of the one before */
        assert_int_equal(save_session(store, turn == 0 ? KEYS : "keys of a later turn"), KVF_OK);
        tier->ops->peek(tier, places, 2, peeks, &round_trips, KVFI_NEVER, 0);
        assert_int_equal(peeks[0].why, KVF_WHY_NONE);
        assert_int_equal(peeks[1].why, KVF_WHY_ABSENT);
    }

    for (size_t from = 0; from < 2; from++) { /* a header that says more than one piece holds */
        memcpy(head, peeks[from].header, sizeof head);
        kvfi_put64(head + 84, KVFI_MAX_WHOLE);
        kvfi_put64(head + 92, KVFI_MAX_WHOLE);
        kvfi_put32(head + 124, kvfi_xxh32(head, 124));
        assert_int_equal(kvfi_header_decode(&header, head), KVF_WHY_NONE);
        struct iovec iov = {head, sizeof head};
        kvfi_item item = {.addr = places[from], .iov = &iov, .num_iov = 1, .bytes = sizeof head, .rewrite = true};
        kvfi_feed feed = {.items = &item, .num = 1, .limit = 1, .deadline_us = KVFI_NEVER};
        tier->ops->put(tier, &feed);
        assert_int_equal(item.status, KVF_OK);
        assert_int_equal(save_session(store, KEYS), KVF_OK);
        tier->ops->peek(tier, places, 2, peeks, &round_trips, KVFI_NEVER, 0);
        assert_int_equal(peeks[from].why, KVF_WHY_ABSENT);
        assert_int_equal(peeks[1 - from].why, KVF_WHY_NONE);
    }
    assert_int_equal(load_session(store, KEYS), KVF_OK);
    assert_int_equal(kvf_session_remove(store, NULL, "user:42"), KVF_OK);
    assert_int_equal(load_session(store, KEYS), KVF_MISS);
    kvf_store_close(store);
}

static void sealed_sessions(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[512];
    snprintf(url, sizeof url, "file:%s", dir);
    kvf_store *plain = store_with(url, NULL, NULL), *old = sealing_store(url, OLD, NULL);
    assert_int_equal(save_session(old, KEYS), KVF_OK);
    assert_int_equal(load_session(old, KEYS), KVF_OK);
    assert_int_equal(load_session(plain, KEYS), KVF_MISS);
    kvf_store *new = sealing_store(url, NEW, NULL);
    assert_int_equal(load_session(new, KEYS), KVF_MISS);
    assert_int_equal(save_session(plain, "what somebody else put there"), KVF_OK);
    assert_int_equal(load_session(new, KEYS), KVF_MISS); /* a plain one is not taken */
    assert_int_equal(load_session(old, KEYS), KVF_OK);
    kvf_store_close(new);
    /* One secret in the place of another: the next save seals it under the new one. */
    new = sealing_store(url, NEW, OLD);
    assert_int_equal(load_session(new, KEYS), KVF_OK);
    assert_int_equal(save_session(new, "keys of a later turn"), KVF_OK);
    assert_int_equal(load_session(new, "keys of a later turn"), KVF_OK);
    assert_int_equal(load_session(old, KEYS), KVF_MISS); /* replaced as a whole */
    int sessions = 0;
    kvf_walk_options options = {.struct_size = sizeof options, .whole = 1};
    assert_int_equal(kvf_walk(new, NULL, name_of_session, &sessions, &options), KVF_OK);
    assert_int_equal(sessions, 2); /* the new one, and the plain one */
    assert_int_equal(kvf_session_remove(new, NULL, "user:42"), KVF_OK);
    assert_int_equal(load_session(new, KEYS), KVF_MISS);
    assert_int_equal(load_session(old, KEYS), KVF_MISS);
    kvf_store_close(new);
    kvf_store_close(old);
    kvf_store_close(plain);
    kvft_remove_dir(dir);
}

/* ---- a record of another tenant whose header happens to fit our secret, as one in 2^20 does ---- */

/* Makes the first block of the prompt such a record, if it is saved under OLD and looked at under NEW. */
#define SALT 1329727
static int the_salt(void *out, size_t bytes) {
    static const uint64_t salt = SALT;
    memset(out, 0, bytes);
    memcpy(out, &salt, bytes < sizeof salt ? bytes : sizeof salt);
    return 0;
}

typedef struct verdict {
    kvf_digest ours;
    size_t closed, opened, damaged, damaged_of_ours;
} verdict;

static int judge(void *ctx, const kvf_entry *entry) {
    verdict *v = ctx;
    bool damaged = entry->damage != KVF_WHY_NONE;
    v->closed += entry->seal == KVF_SEAL_CLOSED;
    v->opened += entry->seal == KVF_SEAL_OPENED && !damaged;
    v->damaged += damaged;
    v->damaged_of_ours += damaged && memcmp(&entry->space, &v->ours, sizeof v->ours) == 0;
    return 0;
}

static verdict judge_all(const bench *b) {
    verdict v = {.closed = 0};
    kvf_walk_options options = {.struct_size = sizeof options, .whole = 1};
    kvf_space_digest(b->space, &v.ours);
    assert_int_equal(kvf_walk(b->store, NULL, judge, &v, &options), KVF_OK);
    return v;
}

static void flip_in(const char *dir, const kvfi_addr *addr) {
    char path[600], name[17], hex[65];
    kvfi_hex(name, addr->space.bytes, 8);
    kvfi_hex(hex, addr->key.bytes, 32);
    snprintf(path, sizeof path, "%s/kvf1/%s/%.2s/%s", dir, name, hex, hex);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, "wrong", 5, KVFI_HEADER_BYTES + 20), 5);
    close(fd);
}

/* A record is sealed once, however many tiers it goes to. */
static void every_tier_gets_the_same(void **state) {
    (void)state;
    char *dirs[2], urls[2][512];
    const char *both[2];
    for (size_t i = 0; i < 2; i++) {
        dirs[i] = kvft_temp_dir();
        snprintf(urls[i], sizeof urls[i], "file:%s", dirs[i]);
        both[i] = urls[i];
    }
    bench b = {.store = NULL};
    kvf_options options = {.struct_size = sizeof options, .secret = NEW, .secret_len = strlen(NEW)};
    assert_int_equal(kvf_store_open(&b.store, NULL, both, 2, &options), KVF_OK);
    b.space = kvft_sealed_space(b.store, "m", 16, NULL);
    b.prompt = kvft_prompt_new(b.space, 7, BLOCKS, PAYLOAD);
    kvft_save_all(b.space, b.store, b.prompt);
    close_bench(&b);
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(num_loaded(urls[i], NEW, NULL), BLOCKS);
        kvft_remove_dir(dirs[i]);
    }
}

/* A block that is damaged under the new secret is loaded from under the old one, and stored again. */
static void rotation_repairs(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[512];
    kvfi_addr addr;
    snprintf(url, sizeof url, "file:%s", dir);
    save_under(url, OLD, 0, 1);
    save_under(url, NEW, 0, 1);
    bench b = {.store = store_with(url, NEW, OLD)};
    b.space = kvft_sealed_space(b.store, "m", 16, NULL);
    b.prompt = kvft_prompt_new(b.space, 7, 1, PAYLOAD);
    kvfi_address(&addr, &b.space->identity, &b.prompt->keys[0]);
    flip_in(dir, &addr);
    kvft_prompt_poison(b.prompt);
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, 1, NULL, KVF_DEFAULT), 1);
    assert_int_equal(kvft_prompt_wrong(b.prompt, 7, 1), 0);
    kvft_flush_all(b.store);
    close_bench(&b);
    assert_int_equal(num_loaded(url, NEW, NULL), 1);
    kvft_remove_dir(dir);
}

/* Read from the file, and then the load is cancelled. */
static atomic_bool cancelled;

static ssize_t read_and_cancel(int fd, const struct iovec *iov, int num, off_t at) {
    ssize_t got = kvfi_sys_real.preadv(fd, iov, num, at);
    cancelled = true;
    return got;
}

/* What a load of the first block says that is cancelled after its first read. */
static kvf_reason why_of_a_cancelled_load(const bench *b) {
    kvfi_systable table = kvfi_sys_real;
    cancelled = false;
    table.preadv = read_and_cancel;
    kvfi_sys_table = &table;
    size_t num = kvfi_load(b->space, b->prompt->blocks, 1, NULL, 0, kvfi_deadline(10000000), 0, &cancelled, NULL);
    kvfi_sys_table = &kvfi_sys_real;
    assert_int_equal(num, 0);
    assert_true(cancelled);
    return b->prompt->blocks[0].why;
}

/* A damaged record under the new secret says nothing of the one under the old secret, which the load does not reach. */
static void rotation_removes_only_what_it_read(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[512];
    kvfi_addr addr;
    snprintf(url, sizeof url, "file:%s", dir);
    save_under(url, OLD, 0, 1);
    save_under(url, NEW, 0, 1);
    bench b = open_bench(url, NEW, OLD);
    kvfi_address(&addr, &b.space->identity, &b.prompt->keys[0]);
    flip_in(dir, &addr);
    assert_int_equal(why_of_a_cancelled_load(&b), KVF_WHY_CHECKSUM);
    close_bench(&b);
    assert_int_equal(num_loaded(url, NEW, NULL), 0); /* removed */
    assert_int_equal(num_loaded(url, OLD, NULL), 1);
    kvft_remove_dir(dir);
}

/* The same of tiers: a damaged record in the fastest says nothing of the sound one in the next, which the load does not
 * reach. */
static void tiers_lose_only_what_was_read(void **state) {
    (void)state;
    char *dirs[2], urls[2][512];
    const char *both[2] = {urls[0], urls[1]};
    kvf_options options = {.struct_size = sizeof options, .secret = OLD, .secret_len = strlen(OLD)};
    kvfi_addr addr;
    for (size_t i = 0; i < 2; i++) {
        dirs[i] = kvft_temp_dir();
        snprintf(urls[i], sizeof urls[i], "file:%s", dirs[i]);
        save_under(urls[i], OLD, 0, 1);
    }
    bench b = {.store = NULL};
    assert_int_equal(kvf_store_open(&b.store, NULL, both, 2, &options), KVF_OK);
    b.space = kvft_sealed_space(b.store, "m", 16, NULL);
    b.prompt = kvft_prompt_new(b.space, 7, 1, PAYLOAD);
    kvfi_address(&addr, &b.space->identity, &b.prompt->keys[0]);
    flip_in(dirs[0], &addr);
    assert_int_equal(why_of_a_cancelled_load(&b), KVF_WHY_CLOSED);
    close_bench(&b);
    assert_int_equal(num_loaded(urls[1], OLD, NULL), 1);
    kvft_remove_dir(dirs[0]);
    kvft_remove_dir(dirs[1]);
}

/* More sealed batches than a store has threads for, which all wait for the room that one reservation holds. It becomes
 * free when a writer has written it, whatever the batches wait for. */
static void batches_leave_the_writer_its_thread(void **state) {
    (void)state;
    enum { BATCHES = 20, BOUND = 4 << 20 };
    const char *url = "mem:";
    kvf_options options = {.struct_size = sizeof options,
                           .backlog_bytes = BOUND,
                           .store_threads = 1,
                           .secret = NEW,
                           .secret_len = strlen(NEW)};
    bench b = {.store = NULL};
    kvf_reserved all = {0};
    kvf_queue *queue = NULL;
    kvf_completion done[BATCHES];
    uint64_t ticket = 0;
    assert_int_equal(kvf_store_open(&b.store, NULL, &url, 1, &options), KVF_OK);
    b.space = kvft_sealed_space(b.store, "m", 16, NULL);
    b.prompt = kvft_prompt_new(b.space, 7, BATCHES + 1, PAYLOAD);
    assert_int_equal(kvf_reserve(b.space, &all, BOUND - 8192), KVF_OK);
    memset(all.data, 1, PAYLOAD);
    assert_int_equal(kvf_queue_open(&queue, NULL, b.store, BATCHES), KVF_OK);
    for (size_t i = 0; i < BATCHES; i++) {
        kvf_batch batch = {.struct_size = sizeof batch,
                           .op = KVF_OP_SAVE,
                           .space = b.space,
                           .blocks = b.prompt->blocks + i,
                           .num = 1,
                           .budget_us = KVF_MS(KVFT_PATIENCE_MS)};
        assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    }
    assert_int_equal(kvf_commit(b.space, &all, &b.prompt->blocks[BATCHES], PAYLOAD), KVF_OK);
    for (size_t num = 0; num < BATCHES;) {
        struct pollfd p = {.fd = kvf_queue_fd(queue), .events = POLLIN};
        poll(&p, 1, 1000);
        num += kvf_reap(queue, done + num, BATCHES - num);
    }
    for (size_t i = 0; i < BATCHES; i++) {
        assert_int_equal(done[i].num_ok, 1);
    }
    kvf_queue_close(queue);
    close_bench(&b);
}

static void a_header_that_fits_by_chance(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[512];
    kvfi_systable table = kvfi_sys_real;
    kvfi_addr addr, ours;
    kvfi_peek peek;
    kvfi_header header;
    snprintf(url, sizeof url, "file:%s", dir);
    table.random = the_salt;
    kvfi_sys_table = &table;
    save_under(url, OLD, 0, 1);
    kvfi_sys_table = &kvfi_sys_real;
    bench other = open_bench(url, OLD, NULL), b = open_bench(url, NEW, NULL);
    kvfi_address(&addr, &other.space->identity, &other.prompt->keys[0]);
    kvfi_tier_look(b.store->tiers[0], &addr, 1, &peek, KVFI_NEVER);
    assert_int_equal(peek.why, KVF_WHY_NONE);
    assert_int_equal(kvfi_header_decode(&header, peek.header), KVF_WHY_NONE);
    assert_non_null(kvfi_secrets_admit(&b.store->secrets, &header)); /* else another SALT is to be found */
    verdict v = judge_all(&b);
    assert_int_equal(v.damaged, 0);
    assert_int_equal(v.closed, 2); /* the block and its card */

    kvft_save_all(b.space, b.store, b.prompt);
    kvf_store *sealing = sealing_store(url, NEW, NULL);
    assert_int_equal(save_session(sealing, KEYS), KVF_OK);
    kvf_store_close(sealing);
    v = judge_all(&b);
    assert_int_equal(v.damaged, 0);
    assert_int_equal(v.closed, 2);
    assert_int_equal(v.opened, BLOCKS + 2); /* the card of the blocks, and the session */
    flip_in(dir, &addr);                    /* theirs to find out */
    for (size_t i = 1; i < 3; i++) {
        kvfi_address(&ours, &b.space->identity, &b.prompt->keys[i]);
        flip_in(dir, &ours);
    }
    kvfi_session_addr(&ours, "user:42", &b.store->secrets.of[0], 0);
    flip_in(dir, &ours);
    v = judge_all(&b);
    assert_int_equal(v.damaged, 3);
    assert_int_equal(v.damaged_of_ours, 2); /* by its whole name, by which it is removed */
    assert_int_equal(v.closed, 2);
    assert_int_equal(v.opened, BLOCKS - 1);
    close_bench(&b);
    close_bench(&other);
    kvft_remove_dir(dir);
}

static void faults_of_sessions(void **state) {
    (void)state;
    for (int kind = KVFT_ALLOC; kind <= KVFT_CALL; kind++) {
        for (uint64_t n = 1;; n++) {
            kvf_store *store = sealing_store("mem:", NEW, OLD);
            kvft_faults_arm((kvft_fault_kind)kind, n);
            kvf_status saved = save_session(store, KEYS), loaded = load_session(store, KEYS);
            bool hit = kvft_faults_disarm();
            assert_true(hit || (saved == KVF_OK && loaded == KVF_OK));
            kvf_store_close(store);
            if (!hit) {
                break;
            }
        }
    }
}

/* ---- without memory: misses, and nothing in the clear ---- */

static void faults(void **state) {
    (void)state;
    for (int kind = KVFT_ALLOC; kind <= KVFT_CALL; kind++) {
        for (uint64_t n = 1;; n++) {
            bench b = {.store = store_with("mem:", NEW, OLD)};
            b.space = kvft_sealed_space(b.store, "m", 16, NULL);
            b.prompt = kvft_prompt_new(b.space, 7, BLOCKS, PAYLOAD);
            kvft_faults_arm((kvft_fault_kind)kind, n);
            (void)kvf_save(b.space, b.prompt->blocks, BLOCKS, NULL);
            (void)kvft_flush(b.store);
            kvft_prompt_poison(b.prompt);
            size_t run = kvf_load(b.space, b.prompt->blocks, BLOCKS, NULL, KVF_DEFAULT);
            bool hit = kvft_faults_disarm();
            assert_int_equal(kvft_prompt_wrong(b.prompt, 7, run), 0);
            close_bench(&b);
            if (!hit) {
                assert_int_equal(run, BLOCKS);
                break;
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(files),
        cmocka_unit_test(file_of_another_user),
        cmocka_unit_test(faults_of_files),
        cmocka_unit_test(wrong_options),
        cmocka_unit_test(rotation),
        cmocka_unit_test(rotation_by_turns),
        cmocka_unit_test(rotation_repairs),
        cmocka_unit_test(rotation_removes_only_what_it_read),
        cmocka_unit_test(tiers_lose_only_what_was_read),
        cmocka_unit_test(batches_leave_the_writer_its_thread),
        cmocka_unit_test(every_tier_gets_the_same),
        cmocka_unit_test(rotation_watched),
        cmocka_unit_test(rotation_as_it_lands),
        cmocka_unit_test(saved_through),
        cmocka_unit_test(saved_through_a_full_backlog),
        cmocka_unit_test(saved_through_a_small_backlog),
        cmocka_unit_test(promotion),
        cmocka_unit_test(rotation_of_tiers),
        cmocka_unit_test(nothing_is_lent),
        cmocka_unit_test(spoiled_headers),
        cmocka_unit_test(what_is_seen),
        cmocka_unit_test(a_header_that_fits_by_chance),
        cmocka_unit_test(forged_cards),
        cmocka_unit_test(faults),
        cmocka_unit_test(a_long_session_is_not_written_over),
        cmocka_unit_test(sealed_sessions),
        cmocka_unit_test(faults_of_sessions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
