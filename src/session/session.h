/* SPDX-License-Identifier: Apache-2.0
 *
 * Sessions, internal: the contents of `meta`, and the two forms of a session in a tier.
 *
 *   fields.c  a HASH with the fields meta, keys, values (and keys.1, ... when spread), for tiers with session_* calls
 *   value.c   one value of record format, for all others: its payload is meta, keys, values
 *
 * docs/session-format.md is the specification of both.
 */
#ifndef KVFI_SESSION_H
#define KVFI_SESSION_H

#include "kvferry/session.h"
#include "store/secret.h"
#include "tier/tier.h"

#define KVFI_MAX_META_BYTES  ((size_t)1 << 20)
#define KVFI_MAX_ARRAY_BYTES ((uint64_t)1 << 40)
#define KVFI_MAX_PARTS       4096u /* of one array */
#define KVFI_TTL_UNKNOWN     (-2)  /* of kvf_session */

/* What meta says of one array. */
typedef struct kvfi_array {
    uint64_t bytes;
    uint8_t xxh3[16]; /* XXH3-128 of the bytes */
    char dtype[16];
    uint32_t num_dims;
    uint64_t dims[KVF_MAX_DIMS];
} kvfi_array;

typedef struct kvfi_session_meta {
    kvfi_array keys, values;
    uint64_t part_bytes; /* an array longer than this is spread over fields of this length; 0 = no array is */
    uint32_t num_tokens;
    char layout[65];
    bool has_space;
    kvf_digest space;
    int64_t stored_s, expires_s;   /* expires_s: 0 = the store itself lets it expire */
    char id[KVF_MAX_ID_BYTES + 1]; /* for people who list a folder; "" = unknown */
} kvfi_session_meta;

/* kvfi_session_meta_encode allocates `front` undefined bytes followed by the JSON, padded with blanks so that front +
 * *out_len is a multiple of `align`. KVF_OK, KVF_NOMEM. */
kvf_status kvfi_session_meta_encode(uint8_t **out, size_t *out_len, kvf_error *, const kvfi_session_meta *,
                                    size_t front, size_t align);
/* kvfi_session_meta_decode trusts nothing: after KVF_OK every number is within its bound, and shapes match their bytes.
 * Returns KVF_MISS with what is wrong, or KVF_NOMEM. */
kvf_status kvfi_session_meta_decode(kvfi_session_meta *out, kvf_error *, const void *text, size_t len);

/* The bytes of one element, 0 for an unknown dtype. */
uint32_t kvfi_dtype_bytes(const char *dtype);
/* KVF_OK, or KVF_LIMIT: dtype, shape and length of an array contradict each other, or are malformed. `name`: for the
 * message. */
kvf_status kvfi_array_check(const kvfi_array *, kvf_error *, const char *name);

/* The memory of an array, in pieces. */
typedef struct kvfi_pieces {
    const struct iovec *iov;
    size_t num;
} kvfi_pieces;

/* A session in memory: `pub`, and one piece of memory that holds both arrays. */
typedef struct kvfi_loaded {
    kvf_session pub;
    uint8_t *mem;
    size_t mem_bytes;
    bool mapped;
} kvfi_loaded;

/* Memory for a session: page-aligned and unmapped at once when it is large. NULL without memory. */
kvfi_loaded *kvfi_loaded_new(size_t mem_bytes);
void kvfi_loaded_free(kvfi_loaded *);
void kvfi_loaded_drop(kvfi_loaded *); /* frees only the memory of the arrays */
/* Sets pub but for its time to live from a meta (NULL: none) and the places of the arrays (NULL: not in memory of the library). */
void kvfi_loaded_describe(kvfi_loaded *, const kvfi_session_meta *, const uint8_t *keys, uint64_t keys_bytes,
                          const uint8_t *values, uint64_t values_bytes);

/* One operation on one tier. */
typedef struct kvfi_session_call {
    kvfi_tier *tier;
    kvf_error *err;
    const char *id;
    int64_t deadline_us;
    /* the session is sealed under this secret, and is one value in every tier; NULL = plain */
    const kvfi_tenant *tenant;
    /* of a load: what the caller wants, by value; k_iov is NULL, or both are the caller's memory */
    kvf_session_load_options want;
} kvfi_session_call;

/* KVF_OK, or KVF_LIMIT: the caller's memory is not as long as the arrays. */
kvf_status kvfi_session_check_memory(const kvfi_session_call *, uint64_t keys_bytes, uint64_t values_bytes);

/* The checksums of the meta are computed here. */
kvf_status kvfi_session_save_fields(const kvfi_session_call *, kvfi_session_meta *, kvfi_pieces keys,
                                    kvfi_pieces values, uint32_t ttl_s);
kvf_status kvfi_session_load_fields(const kvfi_session_call *, kvfi_loaded **out);

kvf_status kvfi_session_save_value(const kvfi_session_call *, kvfi_session_meta *, kvfi_pieces keys, kvfi_pieces values,
                                   uint32_t ttl_s);
kvf_status kvfi_session_load_value(const kvfi_session_call *, kvfi_loaded **out);
kvf_status kvfi_session_remove_value(const kvfi_session_call *);

/* The space of sessions that are values, by which a walk distinguishes them from blocks. */
void kvfi_session_space(kvf_digest *out, const kvfi_tenant *);
void kvfi_session_addr(kvfi_addr *out, const char *id, const kvfi_tenant *, unsigned place);
/* Reads id and expiry (seconds since 1970; 0 = never) from a value's payload of `len` bytes, for listings. False if it
 * has no id. Reads only the meta at its beginning. */
bool kvfi_session_value_id(char out[KVF_MAX_ID_BYTES + 1], int64_t *expires_s, const void *payload, size_t len);

#endif
