/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder store: the bound. The process whose value would exceed it sweeps: it counts the folder, removes stale
 * files, evicts what was not used for longest, and corrects the shared count.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>

#include "file/file.h"

#define MAX_CANDIDATES  ((size_t)1 << 18) /* 14 MiB; with more files than that, the oldest of them */
#define RECOUNT_S       3600
#define RECOUNT_WRITERS 16u /* each process adds 1/256 of the bound at a time, and may be killed before that */
#define REST_US         ((int64_t)1000000)
#define AHEAD_NS        ((int64_t)2000000000) /* what two clocks may differ by */
#define STALE_S         60                    /* younger temporaries may not have their lock yet */
#define DEAD_S          3600                  /* if the file system has no locks */

typedef struct candidate {
    int64_t used_ns;
    uint64_t charge;
    uint8_t space[8];
    kvf_key key;
} candidate;

typedef struct census {
    kvfi_file *file;
    int64_t deadline_us;
    uint64_t bytes, records;
    bool cut; /* stopped by the deadline: the figures cover a part only */
    candidate *oldest;
    size_t num, cap;
} census;

static int by_age(const void *a, const void *b) {
    int64_t x = ((const candidate *)a)->used_ns;
    int64_t y = ((const candidate *)b)->used_ns;
    return (x > y) - (x < y);
}

/* Room for one more candidate: by growing, otherwise by dropping the younger half. */
static bool make_place(census *c) {
    if (c->num < c->cap) {
        return true;
    }
    size_t cap = c->cap == 0 ? 1024 : c->cap * 2;
    if (cap <= MAX_CANDIDATES) {
        candidate *grown = kvfi_sys->resize(c->oldest, cap * sizeof *grown);
        if (grown != NULL) {
            c->oldest = grown;
            c->cap = cap;
            return true;
        }
    }
    if (c->num > 0) {
        qsort(c->oldest, c->num, sizeof *c->oldest, by_age);
        c->num /= 2;
    }
    return c->num < c->cap;
}

/* A time in the future was set by a wrong clock. It counts as now, so that the file grows old like others. */
static int64_t last_use(const kvfi_file_name *name, const struct stat *st) {
    int64_t used_ns = kvfi_file_used_ns(st), now_ns = kvfi_sys->wall_us() * 1000;
    if (used_ns <= now_ns) {
        return used_ns;
    }
    if (used_ns - now_ns > AHEAD_NS) {
        const struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_nsec = UTIME_NOW}};
        (void)kvfi_sys->utimensat(name->dir, name->base, times, AT_SYMLINK_NOFOLLOW);
    }
    return now_ns;
}

static void count(census *c, const kvfi_file_name *name, const struct stat *st) {
    const kvfi_addr *addr = name->addr;
    uint64_t charge = kvfi_file_charge((uint64_t)st->st_size);
    c->bytes += charge;
    c->records++;
    if (make_place(c)) {
        candidate *one = &c->oldest[c->num++];
        one->used_ns = last_use(name, st);
        one->charge = charge;
        memcpy(one->space, addr->space.bytes, sizeof one->space);
        one->key = addr->key;
    }
}

static int meet(void *ctx, const kvfi_file_name *name) {
    census *c = ctx;
    struct stat st;
    if (name->addr == NULL || kvfi_sys->fstatat(name->dir, name->base, &st, AT_SYMLINK_NOFOLLOW) != 0 ||
        !S_ISREG(st.st_mode)) {
        return 0;
    }
    bool dead = st.st_size < KVFI_HEADER_BYTES || kvfi_file_expired(c->file, &st);
    if (!dead || kvfi_sys->unlinkat(name->dir, name->base, 0) != 0) {
        count(c, name, &st);
    }
    c->cut = c->records % 64 == 0 && kvfi_sys->now_us() >= c->deadline_us;
    return c->cut;
}

/* ---- temporaries whose writer is gone: nobody holds their lock */

static int drop_stale(void *ctx, int dir, const char *base) {
    const int64_t *now_s = ctx;
    struct stat st;
    if (kvfi_sys->fstatat(dir, base, &st, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(st.st_mode)) {
        return 0;
    }
    int64_t age_s = kvfi_sat_sub(*now_s, st.st_mtim.tv_sec);
    if (age_s < STALE_S && age_s > -STALE_S) {
        return 0;
    }
    int fd = kvfi_sys->openat(dir, base, KVFI_FILE_READ, 0);
    if (fd < 0) {
        return 0;
    }
    /* Without locks only the age tells: no writer takes that long. */
    bool dead =
        kvfi_sys->flock(fd, LOCK_EX | LOCK_NB) == 0 || (errno != EWOULDBLOCK && (age_s > DEAD_S || age_s < -DEAD_S));
    if (dead) {
        (void)kvfi_sys->unlinkat(dir, base, 0);
    }
    kvfi_sys->close(fd);
    return 0;
}

static void drop_stale_temporaries(const kvfi_file *file) {
    kvfi_path path;
    kvfi_file_path_below(file, &path, KVFI_FILE_TEMPORARIES);
    int dir = kvfi_sys->open(path.text, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
    if (dir >= 0) {
        int64_t now_s = kvfi_sys->wall_us() / 1000000;
        kvfi_file_each_in(dir, drop_stale, &now_s);
    }
}

/* ---- eviction */

static uint64_t evict(census *c, uint64_t goal, uint64_t *out_records) {
    uint64_t freed = 0;
    *out_records = 0;
    if (goal > 0 && c->num > 0) {
        qsort(c->oldest, c->num, sizeof *c->oldest, by_age);
    }
    for (size_t i = 0; i < c->num && freed < goal; i++) {
        const candidate *one = &c->oldest[i];
        kvfi_addr addr = {.key = one->key};
        memcpy(addr.space.bytes, one->space, sizeof one->space);
        kvfi_path path;
        kvfi_file_path(c->file, &path, &addr);
        if (kvfi_sys->unlinkat(AT_FDCWD, path.text, 0) == 0) {
            freed += one->charge;
            ++*out_records;
        }
        if (i % 64 == 63 && kvfi_sys->now_us() >= c->deadline_us) {
            break;
        }
    }
    return freed;
}

static uint64_t goal_of(const kvfi_file *file, uint64_t total, uint64_t must_free) {
    uint64_t goal = 0;
    if (must_free == KVFI_FILE_COUNT_ONLY) {
        return 0;
    }
    uint64_t all = total + (uint64_t)file->in_flight_bytes;
    if (all > file->max_bytes) {
        goal = all - (file->max_bytes - file->max_bytes / 10);
    }
    if (must_free > 0 && goal < must_free + total / 10) { /* the disk is full: not again for every value */
        goal = must_free + total / 10;
    }
    return goal;
}

bool kvfi_file_sweep_due(const kvfi_file *file) {
    if (kvfi_sys->now_us() < file->no_count_until_us) {
        return false;
    }
    int64_t age = kvfi_sat_sub(kvfi_sys->wall_us() / 1000000, file->swept_s);
    int64_t most = file->ttl_s > 0 && file->ttl_s < RECOUNT_S ? (int64_t)file->ttl_s : RECOUNT_S;
    return age > most || age < -most || file->writers > RECOUNT_WRITERS;
}

/* A sweep of little use is not repeated for every value. */
static int64_t rest_since(int64_t began_us) {
    int64_t now = kvfi_sys->now_us();
    int64_t pause = 10 * (now - began_us);
    return now + (pause > REST_US ? pause : REST_US);
}

/* Scans everything. The result replaces the shared count. An interrupted scan can only raise it. Returns true when it
 * saw everything. */
static bool take_census(census *c, kvfi_usage *usage) {
    uint8_t first = 0; /* after an interrupted scan the next one begins elsewhere */
    (void)kvfi_sys->random(&first, sizeof first);
    drop_stale_temporaries(c->file);
    kvf_status status = kvfi_file_scan(c->file, NULL, NULL, first, meet, c);
    /* This user can't evict what he can't read, so it is not counted. */
    bool whole = (status == KVF_OK || status == KVF_CONFIG) && !c->cut;
    if (whole || usage->bytes < c->bytes) {
        usage->bytes = c->bytes;
        usage->records = c->records;
    }
    if (whole) {
        usage->swept_s = kvfi_sys->wall_us() / 1000000;
        usage->writers = 0;
        c->file->is_writer = false; /* the next flush counts it again */
    }
    return whole;
}

/* `fd` is the locked usage file, or -1 if the lock's holder is stuck: then the count stays in this process. */
static uint64_t sweep(kvfi_file *file, int fd, uint64_t must_free, int64_t deadline_us) {
    kvfi_usage usage = {.bytes = file->shared_bytes};
    if (fd >= 0) {
        kvfi_file_usage_merge(file, fd, &usage);
        if (must_free == 0 && !kvfi_file_is_over(file, 0) && !kvfi_file_sweep_due(file)) {
            return 0; /* another process has just swept */
        }
    }
    int64_t began_us = kvfi_sys->now_us();
    census c = {.file = file, .deadline_us = deadline_us};
    bool whole = take_census(&c, &usage);
    uint64_t goal = goal_of(file, usage.bytes, must_free);
    uint64_t records = 0;
    uint64_t freed = evict(&c, goal, &records);
    kvfi_free(c.oldest);
    usage.bytes -= freed;
    usage.records -= records < usage.records ? records : usage.records;
    if (fd >= 0) {
        kvfi_file_usage_set(file, fd, &usage);
    } else if (whole) {
        file->shared_bytes = usage.bytes;
        file->pending_bytes = 0; /* counted */
        file->pending_records = 0;
    } else {
        atomic_fetch_sub(&file->pending_bytes, (int64_t)freed);
    }
    if (!whole) {
        file->no_count_until_us = rest_since(began_us);
    }
    if (freed < goal) {
        file->rest_until_us = rest_since(began_us);
    }
    return freed;
}

/* While another process sweeps, slightly more than the bound is accepted. If that is not enough, the other process is
 * slow or stopped. */
static uint64_t slack(const kvfi_file *file) {
    return file->max_bytes / 8;
}

uint64_t kvfi_file_sweep(kvfi_file *file, uint64_t must_free, int64_t deadline_us) {
    if (kvfi_sys->now_us() < file->rest_until_us || atomic_exchange(&file->sweeping, true)) {
        return 0;
    }
    int fd = kvfi_file_usage_lock(file);
    uint64_t freed = 0;
    if (fd >= 0 || (must_free != KVFI_FILE_COUNT_ONLY && kvfi_file_is_over(file, slack(file)))) {
        freed = sweep(file, fd, must_free, deadline_us);
    }
    if (fd >= 0) {
        kvfi_sys->close(fd);
    }
    file->sweeping = false;
    return freed;
}

bool kvfi_file_reserve(kvfi_file *file, uint64_t charge, int64_t deadline_us) {
    atomic_fetch_add(&file->in_flight_bytes, (int64_t)charge);
    if (kvfi_file_is_over(file, 0) || kvfi_file_sweep_due(file)) {
        (void)kvfi_file_sweep(file, 0, deadline_us);
    }
    if (kvfi_file_is_over(file, slack(file))) {
        kvfi_file_release(file, charge);
        return false;
    }
    return true;
}

void kvfi_file_release(kvfi_file *file, uint64_t charge) {
    atomic_fetch_sub(&file->in_flight_bytes, (int64_t)charge);
}
