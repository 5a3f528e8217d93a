/* SPDX-License-Identifier: Apache-2.0
 *
 * Sessions: K and V of a conversation by its id, as the well-known few lines of redis-py and numpy do it. On Redis a
 * session is a HASH named by the id, with the raw bytes of both arrays in the fields `keys` and `values`, a time to
 * live of 3600 s, and a field `meta` (JSON) that says what the bytes are. Any Redis client can read the two fields, and
 * a hash that such a client wrote without `meta` loads as raw bytes. Other stores keep the same three things.
 * docs/session-format.md has the details.
 */
#ifndef KVFERRY_SESSION_H
#define KVFERRY_SESSION_H

#include "space.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVF_MAX_DIMS     8u
#define KVF_MAX_ID_BYTES 512u

typedef struct kvf_tensor {
    const void *data;
    size_t len;                  /* bytes; contiguous, C order */
    char dtype[16];              /* numpy's name: "float16", "float32", "bfloat16", "uint8", ...; empty = unknown */
    uint32_t num_dims;           /* 0 = unknown */
    uint64_t dims[KVF_MAX_DIMS]; /* their product times the size of the dtype, where it is known, must be `len` */
    uint64_t reserved[2];        /* zero */
} kvf_tensor;

typedef struct kvf_session_options {
    uint32_t struct_size;
    uint32_t ttl_s;          /* 0 = 3600 */
    uint32_t num_tokens;     /* how many tokens the arrays cover; 0 = unknown */
    int64_t budget_us;       /* KVF_DEFAULT is 30 s */
    const char *layout;      /* a free word for the order of the axes, e.g. "LHTD"; NULL = none; up to 64 bytes */
    const kvf_digest *space; /* the space the arrays belong to (kvf_space_digest); NULL = none */
} kvf_session_options;

/* In a store with seal_sessions (kvf_options) sessions are sealed under its secret, and only such are loaded and
 * removed. A save then takes as much memory as the session for its time. */

/* kvf_session_save replaces the session as a whole: a reader sees the old one or the new one. It is written to the
 * first tier that outlives this process (or the only one). Arrays larger than the server's bulk limit are spread over
 * more fields, which `meta` announces. Returns KVF_OK; KVF_LIMIT (the id is empty or too long, a
 * shape does not fit, the layout is no printable text of at most 64 bytes, struct_size, a budget out of range);
 * KVF_CONFIG, KVF_IO (with what failed); KVF_NOMEM; KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_session_save(kvf_store *, kvf_error *err, const char *id, const kvf_tensor *k,
                                                   const kvf_tensor *v, const kvf_session_options *options);

typedef struct kvf_session {
    kvf_tensor k, v;     /* data belongs to the session; dtype empty and num_dims 0 when there was no meta */
    uint32_t num_tokens; /* 0 = unknown */
    char layout[65];
    kvf_digest space; /* zeros = unknown */
    int has_meta;     /* 0: written by a plain client; nothing but the lengths is known, and no checksum was verified */
    void *opaque;
} kvf_session;

/* kvf_session_load returns KVF_OK; KVF_MISS with err->what saying why (no such session, a field is missing, checksum
 * differs); KVF_CONFIG, KVF_IO; KVF_LIMIT (the id, the budget); KVF_NOMEM; KVF_CLOSED. KVF_DEFAULT is 30 s. The result
 * is freed with kvf_session_free. */
KVF_API KVF_MUST_CHECK kvf_status kvf_session_load(kvf_store *, kvf_session **out, kvf_error *err, const char *id,
                                                   int64_t budget_us);
KVF_API void kvf_session_free(kvf_session *);
/* kvf_session_remove deletes it from all tiers. Returns KVF_OK; KVF_MISS (there was none); KVF_CONFIG, KVF_IO;
 * KVF_LIMIT (the id); KVF_NOMEM; KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_session_remove(kvf_store *, kvf_error *err, const char *id);

#ifdef __cplusplus
}
#endif
#endif
