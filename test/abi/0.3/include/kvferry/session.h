/* SPDX-License-Identifier: Apache-2.0
 *
 * Sessions: K and V of a conversation, by its id.
 *
 *   kvf_session_save(store, &err, "user:42", &k, &v, NULL);
 *   kvf_session_load(store, &session, &err, "user:42", KVF_DEFAULT);
 *   ... session->k.data, session->v.data ...
 *   kvf_session_free(session);
 *
 * On Redis a session has the form that a few lines of redis-py and numpy produce: a HASH named by the id, with the raw
 * bytes of both arrays in the fields `keys` and `values`, a time to live of 3600 s, and a field `meta` (JSON) that
 * describes the bytes. Any Redis client can read the two fields. A HASH that such a client wrote without `meta` loads
 * as raw bytes. Other stores keep the same three things. docs/session-format.md has the details.
 *
 * In a store with seal_sessions (kvf_options) sessions are sealed under its secret, and only sealed sessions are loaded
 * and removed. A save then temporarily needs as much memory as the session.
 */
#ifndef KVFERRY_SESSION_H
#define KVFERRY_SESSION_H

#include <sys/uio.h>

#include "space.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Limits: dimensions of an array, and bytes of an id. */
#define KVF_MAX_DIMS     8u
#define KVF_MAX_ID_BYTES 512u

/* One array in C order: contiguous, or in pieces. */
typedef struct kvf_tensor {
    /* NULL if it is in pieces, or if it was not loaded. */
    const void *data;
    /* In bytes. */
    size_t len;
    /* numpy's name: "float16", "float32", "bfloat16", "uint8", ... Empty = unknown. */
    char dtype[16];
    /* 0 = unknown. */
    uint32_t num_dims;
    /* The array in pieces, such as one for each layer; `len` is the sum of their lengths. NULL = `data` is the array. A
     * save copies them nowhere. */
    uint32_t num_iov;
    const struct iovec *iov;
    /* Their product times the size of the dtype, if that is known, must be `len`. */
    uint64_t dims[KVF_MAX_DIMS];
    /* Must be zero. */
    uint64_t reserved[2];
} kvf_tensor;

/* Options of a save. Zero in any field but struct_size is its default. */
typedef struct kvf_session_options {
    uint32_t struct_size;
    /* Time to live in seconds. 0 = 3600. */
    uint32_t ttl_s;
    /* How many tokens the arrays cover. 0 = unknown. */
    uint32_t num_tokens;
    /* KVF_DEFAULT is 30 s. */
    int64_t budget_us;
    /* A free word for the order of the axes, such as "LHTD"; up to 64 bytes. NULL = none. */
    const char *layout;
    /* The space that the arrays belong to (kvf_space_digest). NULL = none. */
    const kvf_digest *space;
} kvf_session_options;

/* kvf_session_save replaces the session as a whole: a reader sees the old one or the new one. It is written to the
 * first tier that outlives this process (or the only one). An array longer than the longest value of the server is
 * spread over more fields, which `meta` announces. `options` may be NULL.
 *
 * Returns KVF_OK; KVF_LIMIT (the id is empty or too long, a shape does not fit, the layout is not printable text of at
 * most 64 bytes, struct_size, a budget out of range); KVF_CONFIG; KVF_IO (with what failed); KVF_NOMEM; KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_session_save(kvf_store *, kvf_error *err, const char *id, const kvf_tensor *k,
                                                   const kvf_tensor *v, const kvf_session_options *options);

/* A loaded session. */
typedef struct kvf_session {
    /* The data belongs to the session. Without meta, dtype is empty and num_dims is 0. */
    kvf_tensor k, v;
    /* 0 = unknown. */
    uint32_t num_tokens;
    char layout[65];
    /* Zeros = unknown. */
    kvf_digest space;
    /* 0: written by a plain client. Only the lengths are known, and no checksum was verified. */
    int has_meta;
    void *opaque;
    /* After KVF_SESSION_LOOK: how long the session still lives. -1 = no end; -2 = unknown, always so after a load. */
    int64_t ttl_ms;
} kvf_session;

/* kvf_session_load loads a session. KVF_DEFAULT is 30 s. Free the result with kvf_session_free. Returns KVF_OK;
 * KVF_MISS (err->what says why: no such session, a missing field, a different checksum); KVF_CONFIG; KVF_IO; KVF_LIMIT
 * (the id, the budget); KVF_NOMEM; KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_session_load(kvf_store *, kvf_session **out, kvf_error *err, const char *id,
                                                   int64_t budget_us);
/* Flags of a load. */
enum {
    /* Only what is known about the session: lengths, dtype, shape, layout, time to live. `data` of both arrays is NULL,
     * and no checksum is compared. The arrays are not read, except where a tier can read a session only as a whole: a
     * sealed one, or one in a folder that others can write to. */
    KVF_SESSION_LOOK = 1,
    /* A session whose arrays do not match its meta is loaded as raw bytes (has_meta 0) instead of a miss. That is what a
     * plain client leaves that writes `keys` and `values` over a session of this library. Damaged arrays look the same,
     * so the caller takes whatever bytes there are. */
    KVF_SESSION_RAW = 2
};

/* Options of a load. Zero in any field but struct_size is its default. */
typedef struct kvf_session_load_options {
    uint32_t struct_size;
    /* KVF_SESSION_LOOK, KVF_SESSION_RAW. */
    uint32_t flags;
    /* KVF_DEFAULT is 30 s. */
    int64_t budget_us;
    /* Memory of the caller for both arrays; both are given or neither. The sums of the lengths must be the lengths of
     * the arrays (KVF_LIMIT if not; KVF_SESSION_LOOK tells them). Where the result is not KVF_OK, its contents are
     * undefined. From Redis the arrays are read straight into it. NULL = memory of the library. */
    const struct iovec *k_iov, *v_iov;
    uint32_t num_k_iov, num_v_iov;
} kvf_session_load_options;

/* kvf_session_load_with is kvf_session_load with options, which may be NULL. With memory of the caller, `data` of both
 * arrays is NULL, and `iov` points to the caller's iovecs. Returns what kvf_session_load does; KVF_LIMIT also for
 * lengths that differ, an unknown flag, struct_size. */
KVF_API KVF_MUST_CHECK kvf_status kvf_session_load_with(kvf_store *, kvf_session **out, kvf_error *err, const char *id,
                                                        const kvf_session_load_options *options);

/* kvf_session_free frees a loaded session and its arrays. */
KVF_API void kvf_session_free(kvf_session *);
/* kvf_session_remove removes a session from all tiers. Returns KVF_OK; KVF_MISS (there was none);
 * KVF_CONFIG; KVF_IO; KVF_LIMIT (the id); KVF_NOMEM; KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_session_remove(kvf_store *, kvf_error *err, const char *id);

#ifdef __cplusplus
}
#endif
#endif
