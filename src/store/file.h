/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder store, private to src/store/file*.c.
 *
 *   <folder>/kvf1/<space: 16 hex>/<first byte of the key: 2 hex>/<key: 64 hex>   one value each
 *   <folder>/kvf1/tmp/<random>   values that are being written, where they need a name
 *   <folder>/kvf1/usage          how much there is, as a hint; its flock elects who evicts
 *
 * With a tenant, <folder>/tenants/<tenant> takes the place of <folder>.
 *
 * A value appears under its name whole or not at all, and is never changed afterwards, only replaced or removed; so
 * readers need no lock. Its modification time is the time of its last use. Nothing is remembered of the folder but its
 * path: it may be emptied or removed under a running process.
 */
#ifndef KVFI_FILE_H
#define KVFI_FILE_H

#include <limits.h>

#include "store/value.h"

#define KVFI_FILE_DIR     "kvf1"
#define KVFI_FILE_TENANTS "tenants"

typedef struct kvfi_file {
    kvfi_tier tier;
    char *root; /* <folder>/kvf1 */
    size_t root_len;
    size_t folder_len; /* of `root`: the folder of the URL, below which tenants are */
    bool shared;       /* by tenants */
    uint64_t max_bytes;
    uint64_t ttl_s; /* 0 = for ever */
    bool remote;    /* on a network file system: a mapping could fail under the reader's hands, so nothing is lent */

    _Atomic bool no_tmpfile;           /* the file system knows no unnamed files */
    _Atomic bool warned[2];            /* that something of it can't be read; can't be written */
    _Atomic bool sweeping;             /* a thread of this process is at it */
    _Atomic int64_t rest_until_us;     /* a sweep could not make room: no other one before this time */
    _Atomic int64_t no_count_until_us; /* a sweep was cut short: none for the count alone before this time */
    _Atomic int64_t swept_s;           /* when all was last counted, by any process */
    _Atomic uint64_t writers;          /* that have added to the count since */
    _Atomic bool is_writer;            /* this process is one of them */
    /* Usage, in bytes of whole disk blocks. What is there = shared + pending, and in flight is on its way. */
    _Atomic uint64_t shared_bytes; /* of all processes, as last seen in the usage file */
    _Atomic int64_t pending_bytes; /* written less removed by this process, not yet in the usage file */
    _Atomic int64_t pending_records;
    _Atomic int64_t in_flight_bytes; /* of values that are being written */
} kvfi_file;

/* ---- file_name.c: names and folders */
typedef struct kvfi_path {
    char text[PATH_MAX];
} kvfi_path;
#define KVFI_FILE_MAX_ROOT (PATH_MAX - 128) /* leaves room for what is below it */

void kvfi_file_path(const kvfi_file *, kvfi_path *out, const kvfi_addr *);
void kvfi_file_path_below(const kvfi_file *, kvfi_path *out, const char *name);
void kvfi_file_cut_name(kvfi_path *); /* of a value: leaves the path of its folder */
int kvfi_file_make_dirs(char *path);  /* as mkdir -p does; 0, or -1 with errno. `path` is as it was afterwards. */

/* What of a path keeps this user from it, for people: the deepest of it that there is. errno is kept. */
typedef struct kvfi_culprit {
    kvfi_path path;
    char owner[64]; /* " of user 0, mode 0700", or "" where the owner is not the reason */
    char mend[224]; /* a sentence */
} kvfi_culprit;
void kvfi_file_culprit(const kvfi_file *, kvfi_culprit *out, const kvfi_path *);
/* Warns, once for reading and once for writing, of what this user may not do there. errno says why, and is kept. */
void kvfi_file_warn(kvfi_file *, const kvfi_path *, bool writing);

/* One name met in a scan, relative to the folder that `dir` is open for. */
typedef struct kvfi_file_name {
    int dir;
    const char *base;
    const char *path;      /* below the folder of the store, for people */
    const kvfi_addr *addr; /* NULL where the name is none of ours. Of the space only the first 8 bytes are known. */
} kvfi_file_name;
typedef int (*kvfi_file_name_fn)(void *ctx, const kvfi_file_name *); /* nonzero stops */
/* kvfi_file_scan meets every name, of one space or of all, its folders in turn from number `first` (0 to 255) on. All
 * that can be read, also where that is not everything: KVF_CONFIG, where this user may not read a folder; KVF_IO. */
kvf_status kvfi_file_scan(const kvfi_file *, kvf_error *, const kvf_digest *space, unsigned first, kvfi_file_name_fn,
                          void *ctx);
int kvfi_file_each_in(int dir, int (*fn)(void *ctx, int dir, const char *base),
                      void *ctx); /* takes over the descriptor */

/* ---- file_read.c */
void kvfi_file_get(kvfi_tier *, kvfi_feed *);
void kvfi_file_peek(kvfi_tier *, const kvfi_addr *, size_t num, kvfi_peek *out, uint64_t *round_trips,
                    int64_t deadline_us);
kvf_reason kvfi_file_borrow(kvfi_tier *, kvfi_loan *out, const kvfi_addr *, size_t bytes, int64_t deadline_us);
void kvfi_file_give_back(kvfi_tier *, kvfi_loan *);

/* Whatever lies there, opening it must not hang. */
#define KVFI_FILE_READ (O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK)
/* A value that was opened. */
typedef struct kvfi_opened {
    int fd; /* -1: nothing to close */
    struct stat st;
} kvfi_opened;
kvf_reason kvfi_file_open_value(kvfi_file *, kvfi_opened *out, const kvfi_path *);
/* Can nobody but this user change the value, its name, or the folders that lead to it? Else it must not be mapped: bytes
 * that were verified could change, and a file that is cut short ends its reader with a signal. */
bool kvfi_file_is_private(const kvfi_file *, const struct stat *, const kvfi_addr *);
kvf_reason kvfi_file_map(kvfi_loan *out, const kvfi_opened *, int64_t deadline_us);
bool kvfi_file_read_front(uint8_t *out, size_t len,
                          const kvfi_opened *); /* the first bytes; false when they can't be read */
bool kvfi_file_read_head(uint8_t head[KVFI_HEADER_BYTES], const kvfi_opened *);
bool kvfi_file_read_ends(kvfi_ends *, const kvfi_opened *); /* of a file that is long enough for both */
bool kvfi_file_is_torn(const uint8_t head[KVFI_HEADER_BYTES], const struct stat *);
bool kvfi_file_expired(const kvfi_file *, const struct stat *);
int64_t kvfi_file_used_ns(const struct stat *); /* the time of its last use, since 1970; saturates */
void kvfi_file_refresh(const kvfi_opened *);    /* it was used now */
/* kvfi_file_drop removes a value, unless another one has taken its place. */
void kvfi_file_drop(kvfi_file *, const kvfi_path *, const struct stat *);

/* ---- file_write.c */
void kvfi_file_put(kvfi_tier *, kvfi_feed *);
bool kvfi_file_try_write(kvfi_file *); /* for the doctor: can anything be written? errno is set when not */

/* ---- file_usage.c: how much there is; file_sweep.c: the bound */
/* No record is larger. A larger file is none of ours: it counts as this much, so that the sum of all stays a number. */
#define KVFI_FILE_MAX_BYTES ((uint64_t)KVF_MAX_PAYLOAD_BYTES + (1u << 20))
static inline uint64_t kvfi_file_charge(uint64_t bytes) {
    bytes = bytes < KVFI_FILE_MAX_BYTES ? bytes : KVFI_FILE_MAX_BYTES;
    return (bytes + 4095) / 4096 * 4096; /* what a file takes of a disk, nearly */
}
typedef struct kvfi_usage {
    uint64_t bytes, records;
    /* How many processes have added to it since it was counted: each may have been killed with a rest */
    uint64_t writers;
    int64_t swept_s; /* when it was last counted; 0 = never */
} kvfi_usage;
void kvfi_file_usage_load(kvfi_file *);                                /* at open */
bool kvfi_file_usage_read(const kvfi_file *, kvfi_usage *out);         /* all zero when false */
void kvfi_file_usage_add(kvfi_file *, int64_t bytes, int64_t records); /* the folder has grown or shrunk */
void kvfi_file_usage_flush(kvfi_file *);
void kvfi_file_usage_end(kvfi_file *);      /* flushes for the last time, and waits up to a second for the lock */
void kvfi_file_usage_distrust(kvfi_file *); /* have it counted again by the next who stores */
/* The usage file, locked against other processes and threads; -1 when it is locked already, or can't be written.
 * close() unlocks. */
int kvfi_file_usage_lock(const kvfi_file *);
void kvfi_file_usage_merge(kvfi_file *, int fd,
                           kvfi_usage *out); /* what is pending goes into it; `out` is what it says then */
void kvfi_file_usage_set(kvfi_file *, int fd, const kvfi_usage *);
bool kvfi_file_is_over(const kvfi_file *, uint64_t slack); /* is there more than the bound and the slack? */

/* kvfi_file_reserve makes room for a value of `charge` bytes; false: there is none. kvfi_file_release ends the
 * reservation. */
bool kvfi_file_reserve(kvfi_file *, uint64_t charge, int64_t deadline_us);
void kvfi_file_release(kvfi_file *, uint64_t charge);
/* kvfi_file_sweep counts what is there, removes what is stale, and evicts the least recently used: down to nine tenths
 * of the bound when it is exceeded, and at least `must_free` bytes. Does nothing while another process or thread is at
 * it. Returns the bytes it freed. */
#define KVFI_FILE_COUNT_ONLY UINT64_MAX /* as must_free: evicts nothing */
uint64_t kvfi_file_sweep(kvfi_file *, uint64_t must_free, int64_t deadline_us);
bool kvfi_file_sweep_due(const kvfi_file *); /* nobody has counted for long */

/* ---- file_admin.c */
kvf_status kvfi_file_remove(kvfi_tier *, kvf_error *, const kvfi_addr *, int64_t deadline_us);
kvf_status kvfi_file_walk(kvfi_tier *, kvf_error *, const kvf_digest *space, bool whole, kvfi_sight_fn, void *ctx,
                          int64_t step_us);
kvf_status kvfi_file_clear(kvfi_tier *, uint64_t *removed, kvf_error *, const kvf_digest *space, int64_t step_us);
void kvfi_file_doctor(kvfi_tier *, kvf_finding_fn, void *ctx);
bool kvfi_file_on_network(const char *path);

#endif
