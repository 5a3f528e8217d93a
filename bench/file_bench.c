/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder and memory stores beside the bare limit: the same bytes by plain system calls, or by a plain copy. All
 * variants take turns in one run, so a noisy machine affects all of them. Shown are the median of the rounds and its
 * ratio to the bare limit, for `get` and `borrow` without and with the checks of a load (checksum over all bytes).
 *
 *   file_bench [FOLDER...]   default: a folder in /dev/shm and one in $TMPDIR or /tmp
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "support/kit.h"
#include "support/tiers.h"

enum { ROUNDS = 9, MAX_VARIANTS = 20, MAX_THREADS = 4 };

typedef struct bench {
    char dir[512]; /* of the bare files; "" for memory */
    kvfi_tier *tier;
    kvfi_tier *full; /* has room for a third of the values, so that each put evicts */
    kvft_value *values;
    size_t num, bytes; /* of one value */
    uint8_t *bare;     /* num values side by side, for memory */
} bench;

static void die(const char *what) {
    fprintf(stderr, "file_bench: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- ours */

typedef struct call {
    kvfi_tier *tier;
    kvfi_feed *feed;
    void (*op)(kvfi_tier *, kvfi_feed *);
} call;

static void *run_call(void *arg) {
    const call *c = arg;
    c->op(c->tier, c->feed);
    return NULL;
}

static double run_feed(bench *b, void (*op)(kvfi_tier *, kvfi_feed *), kvf_reason (*checks)(kvfi_item *), int threads) {
    kvfi_item *items = calloc(b->num, sizeof *items);
    for (size_t i = 0; i < b->num; i++) {
        items[i] = b->values[i].item;
    }
    kvfi_feed feed = {.items = items, .num = b->num, .limit = b->num, .deadline_us = KVFI_NEVER, .check = checks};
    call c = {.tier = b->tier, .feed = &feed, .op = op};
    pthread_t helpers[MAX_THREADS];
    double begin = now();
    for (int i = 1; i < threads; i++) {
        if (pthread_create(&helpers[i], NULL, run_call, &c) != 0) {
            die("thread");
        }
    }
    run_call(&c);
    for (int i = 1; i < threads; i++) {
        pthread_join(helpers[i], NULL);
    }
    double seconds = now() - begin;
    for (size_t i = 0; i < b->num; i++) {
        if (items[i].status != KVF_OK) {
            fprintf(stderr, "file_bench: %s\n", kvf_reason_name(items[i].why));
            exit(1);
        }
    }
    free(items);
    return seconds;
}

static void remove_all(bench *b) {
    for (size_t i = 0; i < b->num; i++) {
        (void)b->tier->ops->remove(b->tier, NULL, &b->values[i].item.addr, KVFI_NEVER);
    }
}

static double put_with(bench *b, int threads) {
    remove_all(b);
    return run_feed(b, b->tier->ops->put, NULL, threads);
}
static double put(bench *b) {
    return put_with(b, 1);
}
static double put2(bench *b) {
    return put_with(b, 2);
}
static double put_full_with(bench *b, int threads) {
    kvfi_tier *tier = b->tier;
    b->tier = b->full;
    double seconds = run_feed(b, b->tier->ops->put, NULL, threads);
    b->tier = tier;
    return seconds;
}
static double put_full(bench *b) {
    return put_full_with(b, 1);
}
static double put_full2(bench *b) {
    return put_full_with(b, 2);
}
static double put_known(bench *b) {
    return run_feed(b, b->tier->ops->put, NULL, 1);
}
static double get(bench *b) {
    return run_feed(b, b->tier->ops->get, NULL, 1);
}
static double get_checked(bench *b) {
    return run_feed(b, b->tier->ops->get, kvft_value_check, 1);
}
static double get_checked2(bench *b) {
    return run_feed(b, b->tier->ops->get, kvft_value_check, 2);
}
static double get_checked4(bench *b) {
    return run_feed(b, b->tier->ops->get, kvft_value_check, 4);
}

/* From the disk: the pages are dropped from the cache first. Of no effect in memory. */
static double get_cold_with(bench *b, int threads) {
    for (size_t i = 0; i < b->num; i++) {
        char path[700], space[17], key[65];
        kvfi_hex(space, b->values[i].item.addr.space.bytes, 8);
        kvfi_hex(key, b->values[i].item.addr.key.bytes, 32);
        snprintf(path, sizeof path, "%s/store/kvf1/%s/%.2s/%s", b->dir, space, key, key);
        int fd = open(path, O_RDONLY);
        if (fd < 0 || fdatasync(fd) != 0 || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0) {
            die(path);
        }
        close(fd);
    }
    return run_feed(b, b->tier->ops->get, kvft_value_check, threads);
}
static double get_cold(bench *b) {
    return get_cold_with(b, 1);
}
static double get_cold2(bench *b) {
    return get_cold_with(b, 2);
}
static double get_cold4(bench *b) {
    return get_cold_with(b, 4);
}

static double borrow_with(bench *b, bool checked) {
    double begin = now();
    for (size_t i = 0; i < b->num; i++) {
        kvfi_loan loan;
        kvfi_header header;
        const uint8_t *tokens, *payload;
        if (b->tier->ops->borrow(b->tier, &loan, &b->values[i].item.addr, 0, KVFI_NEVER) != KVF_WHY_NONE ||
            (checked && kvfi_record_parse(&header, &tokens, &payload, loan.data, loan.len) != KVF_WHY_NONE)) {
            die("borrow");
        }
        b->tier->ops->give_back(b->tier, &loan);
    }
    return now() - begin;
}
static double borrow(bench *b) {
    return borrow_with(b, false);
}
static double borrow_checked(bench *b) {
    return borrow_with(b, true);
}

static double peek(bench *b) {
    kvfi_addr *addrs = calloc(b->num, sizeof *addrs);
    kvfi_peek *peeks = calloc(b->num, sizeof *peeks);
    uint64_t round_trips = 0;
    for (size_t i = 0; i < b->num; i++) {
        addrs[i] = b->values[i].item.addr;
    }
    double begin = now();
    b->tier->ops->peek(b->tier, addrs, b->num, peeks, &round_trips, KVFI_NEVER, 0);
    double seconds = now() - begin;
    free(addrs);
    free(peeks);
    return seconds;
}

/* ---- bare files */

static char *name_of(const bench *b, size_t i) {
    static char path[600];
    snprintf(path, sizeof path, "%s/bare-%zu", b->dir, i);
    return path;
}

static double bare_write(bench *b) {
    for (size_t i = 0; i < b->num; i++) {
        unlink(name_of(b, i));
    }
    double begin = now();
    for (size_t i = 0; i < b->num; i++) {
        char from[32];
        int fd = open(b->dir, O_TMPFILE | O_WRONLY, 0600);
        snprintf(from, sizeof from, "/proc/self/fd/%d", fd);
        if (fd < 0 || pwritev(fd, b->values[i].iov, KVFT_VALUE_IOVS, 0) != (ssize_t)b->bytes ||
            linkat(AT_FDCWD, from, AT_FDCWD, name_of(b, i), AT_SYMLINK_FOLLOW) != 0) {
            die("bare write");
        }
        close(fd);
    }
    return now() - begin;
}

static double bare_read(bench *b) {
    double begin = now();
    for (size_t i = 0; i < b->num; i++) {
        int fd = open(name_of(b, i), O_RDONLY);
        if (fd < 0 || preadv(fd, b->values[i].iov, KVFT_VALUE_IOVS, 0) != (ssize_t)b->bytes) {
            die("bare read");
        }
        close(fd);
    }
    return now() - begin;
}

static double bare_map(bench *b) {
    double begin = now();
    for (size_t i = 0; i < b->num; i++) {
        int fd = open(name_of(b, i), O_RDONLY);
        void *p = fd < 0 ? MAP_FAILED : mmap(NULL, b->bytes, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
        if (p == MAP_FAILED) {
            die("bare map");
        }
        munmap(p, b->bytes);
        close(fd);
    }
    return now() - begin;
}

static double bare_map_copy(bench *b) {
    double begin = now();
    for (size_t i = 0; i < b->num; i++) {
        int fd = open(name_of(b, i), O_RDONLY);
        void *p = fd < 0 ? MAP_FAILED : mmap(NULL, b->bytes, PROT_READ, MAP_SHARED, fd, 0);
        if (p == MAP_FAILED) {
            die("bare map");
        }
        memcpy(b->values[i].bytes, p, b->bytes);
        munmap(p, b->bytes);
        close(fd);
    }
    return now() - begin;
}

/* ---- bare memory */

static double copy_in(bench *b) {
    double begin = now();
    for (size_t i = 0; i < b->num; i++) {
        memcpy(b->bare + i * b->bytes, b->values[i].bytes, b->bytes);
    }
    return now() - begin;
}
static double copy_out(bench *b) {
    double begin = now();
    for (size_t i = 0; i < b->num; i++) {
        memcpy(b->values[i].bytes, b->bare + i * b->bytes, b->bytes);
    }
    return now() - begin;
}

/* ---- running */

typedef struct variant {
    const char *name;
    double (*run)(bench *);
    int limit;     /* index of the bare limit it is compared with; its own for a limit */
    bool per_item; /* shown in microseconds a record: its bytes do not matter */
    double seconds[ROUNDS];
} variant;

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(variant *v) {
    qsort(v->seconds, ROUNDS, sizeof *v->seconds, by_value);
    return v->seconds[ROUNDS / 2];
}

static void run_all(bench *b, variant *variants, size_t num, const char *where) {
    double medians[MAX_VARIANTS];
    for (size_t i = 0; i < num; i++) {
        (void)variants[i].run(b);
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (size_t i = 0; i < num; i++) {
            variants[i].seconds[round] = variants[i].run(b);
        }
    }
    for (size_t i = 0; i < num; i++) {
        medians[i] = median(&variants[i]);
    }
    for (size_t i = 0; i < num; i++) {
        double gb = (double)b->num * (double)b->bytes / 1e9;
        printf("%-10s %5zu KiB  %-26s %7.2f GB/s", where, b->bytes / 1024, variants[i].name, gb / medians[i]);
        if (variants[i].per_item) {
            printf("  %7.2f us a record", medians[i] / (double)b->num * 1e6);
        }
        if (variants[i].limit != (int)i && !variants[i].per_item) {
            printf("  %.2f of %s", medians[variants[i].limit] / medians[i], variants[variants[i].limit].name);
        }
        printf("\n");
    }
}

static void fill(bench *b, size_t bytes) {
    size_t payload = bytes - KVFT_VALUE_EXTRA;
    b->bytes = bytes;
    b->num = ((size_t)64 << 20) / bytes;
    b->values = calloc(b->num, sizeof *b->values);
    for (size_t i = 0; i < b->num; i++) {
        kvft_value_init(&b->values[i], i, payload);
    }
}

static void empty(bench *b) {
    for (size_t i = 0; i < b->num; i++) {
        kvft_value_cleanup(&b->values[i]);
    }
    free(b->values);
}

static void bench_folder(const char *folder, size_t bytes) {
    variant variants[] = {
        {.name = "bare write", .run = bare_write, .limit = 0},
        {.name = "put", .run = put, .limit = 0},
        {.name = "put, 2 threads", .run = put2, .limit = 0},
        {.name = "put of what is there", .run = put_known, .per_item = true},
        {.name = "bare preadv", .run = bare_read, .limit = 4},
        {.name = "bare map and copy", .run = bare_map_copy, .limit = 5},
        {.name = "get", .run = get, .limit = 4},
        {.name = "get, checked", .run = get_checked, .limit = 4},
        {.name = "get, checked, 2 threads", .run = get_checked2, .limit = 4},
        {.name = "get, checked, 4 threads", .run = get_checked4, .limit = 4},
        {.name = "bare map", .run = bare_map, .limit = 10},
        {.name = "borrow", .run = borrow, .limit = 10},
        {.name = "borrow, checked", .run = borrow_checked, .limit = 10},
        {.name = "peek", .run = peek, .per_item = true},
        {.name = "get, uncached", .run = get_cold, .limit = 4},
        {.name = "get, uncached, 2 threads", .run = get_cold2, .limit = 4},
        {.name = "get, uncached, 4 threads", .run = get_cold4, .limit = 4},
    };
    bench b = {0};
    char url[600];
    snprintf(b.dir, sizeof b.dir, "%s/kvferry-bench-XXXXXX", folder);
    if (mkdtemp(b.dir) == NULL) {
        die(b.dir);
    }
    snprintf(url, sizeof url, "file:%s/store?max=4G", b.dir);
    b.tier = kvft_tier(url);
    fill(&b, bytes);
    run_all(&b, variants, sizeof variants / sizeof *variants, folder);
    empty(&b);
    b.tier->ops->close(b.tier);
    kvft_remove_dir(strdup(b.dir));
}

static void bench_memory(size_t bytes) {
    variant variants[] = {
        {.name = "bare copy in", .run = copy_in, .limit = 0},
        {.name = "put, filling up", .run = put, .limit = 0},
        {.name = "put, full", .run = put_full, .limit = 0},
        {.name = "put, full, 2 threads", .run = put_full2, .limit = 0},
        {.name = "bare copy out", .run = copy_out, .limit = 4},
        {.name = "get", .run = get, .limit = 4},
        {.name = "get, checked", .run = get_checked, .limit = 4},
        {.name = "get, checked, 2 threads", .run = get_checked2, .limit = 4},
        {.name = "borrow", .run = borrow, .per_item = true},
        {.name = "borrow, checked", .run = borrow_checked, .limit = 4},
        {.name = "peek", .run = peek, .per_item = true},
    };
    bench b = {.tier = kvft_tier("mem:?max=4G"), .full = kvft_tier("mem:?max=22M")};
    fill(&b, bytes);
    b.bare = malloc(b.num * b.bytes);
    (void)copy_in(&b);
    run_all(&b, variants, sizeof variants / sizeof *variants, "mem:");
    empty(&b);
    free(b.bare);
    b.full->ops->close(b.full);
    b.tier->ops->close(b.tier);
}

int main(int argc, char **argv) {
    static const size_t sizes[] = {(size_t)256 << 10, (size_t)1 << 20, (size_t)4 << 20};
    const char *tmp = getenv("TMPDIR");
    const char *folders[] = {"/dev/shm", tmp != NULL ? tmp : "/tmp"};
    const char *const *where = argc > 1 ? (const char *const *)argv + 1 : folders;
    size_t num = argc > 1 ? (size_t)argc - 1 : 2;
    for (size_t size = 0; size < sizeof sizes / sizeof *sizes; size++) {
        for (size_t i = 0; i < num; i++) {
            bench_folder(where[i], sizes[size]);
        }
        bench_memory(sizes[size]);
    }
    return 0;
}
