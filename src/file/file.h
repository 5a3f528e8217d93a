/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder store.
 *
 *   <folder>/kvf1/<space: 16 hex>/<first byte of the key: 2 hex>/<key: 64 hex>   one value each
 *   <folder>/kvf1/tmp/<random>   values that are being written, where they need a name
 *   <folder>/kvf1/usage          how much there is, as a hint; its flock elects who evicts
 *
 * With a tenant, <folder>/tenants/<tenant> takes the place of <folder>.
 *
 * A value appears under its name whole or not at all, and never changes afterwards: it is only replaced or removed. So
 * readers need no lock. Its modification time is the time of its last use. Nothing about the folder is remembered
 * except its path: it may be emptied or removed under a running process.
 */
#ifndef KVFI_FILE_H
#define KVFI_FILE_H

#include <limits.h>

#include "tier/value.h"

#define KVFI_FILE_DIR     "kvf1"
#define KVFI_FILE_TENANTS "tenants"
/* The folder of values on their way, which is made when it is missed. */
#define KVFI_FILE_TEMPORARIES "tmp"

kvfi_tier_open kvfi_file_open;

typedef struct kvfi_file {
    kvfi_tier tier;
    char *root; /* <folder>/kvf1 */
    size_t root_len;
    size_t folder_len; /* of `root`: the folder of the URL; tenants are below it */
    bool shared;       /* by tenants */
    uint64_t max_bytes;
    uint64_t ttl_s; /* 0 = for ever */
    bool remote;    /* on a network file system: a mapping could fail while it is read, so nothing is borrowed */

    _Atomic bool no_tmpfile;           /* the file system has no unnamed files */
    _Atomic bool warned[2];            /* warned that something can't be read; can't be written */
    _Atomic bool sweeping;             /* a thread of this process is sweeping */
    _Atomic int64_t rest_until_us;     /* a sweep could not make room: no other before this time */
    _Atomic int64_t no_count_until_us; /* a sweep was interrupted: none only for counting before this time */
    _Atomic int64_t swept_s;           /* when everything was last counted, by any process */
    _Atomic uint64_t writers;          /* processes that have added to the count since */
    _Atomic bool is_writer;            /* this process is one of them */
    /* Usage, in bytes of whole disk blocks. shared + pending is there, in flight is being written. */
    _Atomic uint64_t shared_bytes; /* of all processes, as last seen in the usage file */
    _Atomic int64_t pending_bytes; /* written minus removed by this process, not yet in the usage file */
    _Atomic int64_t pending_records;
    _Atomic int64_t in_flight_bytes; /* of values that are being written */
} kvfi_file;

/* ---- name.c: names and folders */
typedef struct kvfi_path {
    char text[PATH_MAX];
} kvfi_path;
#define KVFI_FILE_MAX_ROOT (PATH_MAX - 128) /* leaves room for the names below it */

void kvfi_file_path(const kvfi_file *, kvfi_path *out, const kvfi_addr *);
void kvfi_file_path_below(const kvfi_file *, kvfi_path *out, const char *name);
void kvfi_file_cut_name(kvfi_path *); /* of a value: reduces the path to that of its folder */
int kvfi_file_make_dirs(char *path);  /* as mkdir -p does; 0, or -1 with errno. `path` is unchanged afterwards. */

/* Explains, for people, what part of a path denies access to this user: the deepest part that exists. Keeps errno. */
typedef struct kvfi_culprit {
    kvfi_path path;
    char owner[64]; /* " of user 0, mode 0700", or "" if the owner is not the reason */
    char mend[224]; /* a sentence */
} kvfi_culprit;
void kvfi_file_culprit(const kvfi_file *, kvfi_culprit *out, const kvfi_path *);
/* Returns KVF_CONFIG, where this user may not read that path or what leads to it, else KVF_IO; err says what helps. */
kvf_status kvfi_file_unreadable(const kvfi_file *, kvf_error *, const kvfi_path *, int error);
/* Warns, once for reading and once for writing, of what this user may not do there. errno has the cause, and is
 * kept. */
void kvfi_file_warn(kvfi_file *, const kvfi_path *, bool writing);

/* One name met in a scan, relative to the folder that `dir` is open for. */
typedef struct kvfi_file_name {
    int dir;
    const char *base;
    const char *path;      /* below the folder of the store, for people */
    const kvfi_addr *addr; /* NULL if the name is not one of ours. Of the space only the first 8 bytes are known. */
} kvfi_file_name;
typedef int (*kvfi_file_name_fn)(void *ctx, const kvfi_file_name *); /* nonzero stops */
/* kvfi_file_scan visits every name, of one space or of all, beginning with folder number `first` (0 to 255). It visits
 * everything that can be read, even if that is not everything: KVF_CONFIG if this user may not read a folder;
 * KVF_IO. */
kvf_status kvfi_file_scan(const kvfi_file *, kvf_error *, const kvf_digest *space, unsigned first, kvfi_file_name_fn,
                          void *ctx);
int kvfi_file_each_in(int dir, int (*fn)(void *ctx, int dir, const char *base),
                      void *ctx); /* takes over the descriptor */

/* ---- read.c */
void kvfi_file_get(kvfi_tier *, kvfi_feed *);
void kvfi_file_peek(kvfi_tier *, const kvfi_addr *, size_t num, kvfi_peek *out, uint64_t *round_trips,
                    int64_t deadline_us, int64_t patience_us);
kvf_reason kvfi_file_touch(kvfi_file *, const kvfi_addr *);
kvf_reason kvfi_file_borrow(kvfi_tier *, kvfi_loan *out, const kvfi_addr *, size_t bytes, int64_t deadline_us);
void kvfi_file_give_back(kvfi_tier *, kvfi_loan *);

/* Whatever the name refers to, opening it must not block. */
#define KVFI_FILE_READ (O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK)
/* An open value. */
typedef struct kvfi_opened {
    int fd; /* -1: nothing to close */
    struct stat st;
} kvfi_opened;
kvf_reason kvfi_file_open_value(kvfi_file *, kvfi_opened *out, const kvfi_path *);
/* Is this user the only one who can change the value, its name, and the folders on its path? Otherwise it must not be
 * mapped: verified bytes could change, and a truncated file would end its reader with a signal. */
bool kvfi_file_is_private(const kvfi_file *, const struct stat *, const kvfi_addr *);
kvf_reason kvfi_file_map(kvfi_loan *out, const kvfi_opened *, int64_t deadline_us);
bool kvfi_file_read_front(uint8_t *out, size_t len,
                          const kvfi_opened *); /* the first bytes; false when they can't be read */
bool kvfi_file_read_head(uint8_t head[KVFI_HEADER_BYTES], const kvfi_opened *);
bool kvfi_file_read_ends(kvfi_ends *, const kvfi_opened *); /* of a file that is long enough for both */
bool kvfi_file_is_torn(const uint8_t head[KVFI_HEADER_BYTES], const struct stat *);
bool kvfi_file_expired(const kvfi_file *, const struct stat *);
int64_t kvfi_file_used_ns(const struct stat *); /* the time of its last use, since 1970; saturates */
void kvfi_file_refresh(const kvfi_opened *);    /* it has just been used */
/* kvfi_file_drop removes a value, unless another one has replaced it. */
void kvfi_file_drop(kvfi_file *, const kvfi_path *, const struct stat *);

/* ---- write.c */
void kvfi_file_put(kvfi_tier *, kvfi_feed *);
bool kvfi_file_try_write(kvfi_file *); /* for the doctor: can anything be written? errno is set when not */

/* ---- usage.c: how much there is; sweep.c: the bound */
/* No record is larger. A larger file is not one of ours, and counts as this much, so that the sum cannot overflow. */
#define KVFI_FILE_MAX_BYTES ((uint64_t)KVF_MAX_PAYLOAD_BYTES + (1u << 20))
static inline uint64_t kvfi_file_charge(uint64_t bytes) {
    bytes = bytes < KVFI_FILE_MAX_BYTES ? bytes : KVFI_FILE_MAX_BYTES;
    return (bytes + 4095) / 4096 * 4096; /* the approximate disk space of a file */
}
typedef struct kvfi_usage {
    uint64_t bytes, records;
    /* the number of processes that have added to it since it was counted: each may have been killed with a remainder */
    uint64_t writers;
    int64_t swept_s; /* when it was last counted; 0 = never */
} kvfi_usage;
void kvfi_file_usage_load(kvfi_file *);                                /* at open */
bool kvfi_file_usage_read(const kvfi_file *, kvfi_usage *out);         /* all zero when false */
void kvfi_file_usage_add(kvfi_file *, int64_t bytes, int64_t records); /* the folder has grown or shrunk */
void kvfi_file_usage_flush(kvfi_file *);
void kvfi_file_usage_end(kvfi_file *);      /* flushes a last time, and waits up to a second for the lock */
void kvfi_file_usage_distrust(kvfi_file *); /* makes the next process that stores count again */
/* The usage file, locked against other processes and threads. -1 if it is already locked, or can't be written. close()
 * unlocks it. */
int kvfi_file_usage_lock(const kvfi_file *);
void kvfi_file_usage_merge(kvfi_file *, int fd,
                           kvfi_usage *out); /* adds the pending amount; `out` is the new content */
void kvfi_file_usage_set(kvfi_file *, int fd, const kvfi_usage *);
bool kvfi_file_is_over(const kvfi_file *, uint64_t slack); /* does the usage exceed the bound plus slack? */

/* kvfi_file_reserve makes room for a value of `charge` bytes; false if there is none. kvfi_file_release ends the
 * reservation. */
bool kvfi_file_reserve(kvfi_file *, uint64_t charge, int64_t deadline_us);
void kvfi_file_release(kvfi_file *, uint64_t charge);
/* kvfi_file_sweep counts the folder, removes stale files, and evicts the least recently used values: down to nine
 * tenths of the bound if it is exceeded, and at least `must_free` bytes. Does nothing while another process or thread
 * sweeps. Returns the bytes that it freed. */
#define KVFI_FILE_COUNT_ONLY UINT64_MAX /* as must_free: evicts nothing */
uint64_t kvfi_file_sweep(kvfi_file *, uint64_t must_free, int64_t deadline_us);
bool kvfi_file_sweep_due(const kvfi_file *); /* nobody has counted for a long time */

/* ---- admin.c */
kvf_status kvfi_file_remove(kvfi_tier *, kvf_error *, const kvfi_addr *, int64_t deadline_us);
void kvfi_file_each(kvfi_tier *, kvfi_deed, const kvfi_addr *, size_t num, kvf_reason *out, int64_t deadline_us,
                    int64_t patience_us);
kvf_status kvfi_file_walk(kvfi_tier *, kvf_error *, const kvf_digest *space, bool whole, kvfi_sight_fn, void *ctx,
                          int64_t step_us);
kvf_status kvfi_file_clear(kvfi_tier *, uint64_t *removed, kvf_error *, const kvf_digest *space, int64_t step_us);
void kvfi_file_doctor(kvfi_tier *, kvf_finding_fn, void *ctx);
bool kvfi_file_on_network(const char *path);

#endif
