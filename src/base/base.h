/* SPDX-License-Identifier: Apache-2.0
 *
 * Small helpers for every layer: errors, bytes, hashes, log. No I/O (see sys.h for that).
 */
#ifndef KVFI_BASE_H
#define KVFI_BASE_H

#include <stdbool.h>
#include <string.h>

#include "base/sys.h"
#include "kvferry/status.h"

/* ---- errors: `return kvfi_fail(err, KVF_CONFIG, "...", ...)`. err may be NULL. */
kvf_status kvfi_fail(kvf_error *err, kvf_status, const char *format, ...) __attribute__((format(printf, 3, 4)));

#define KVFI_TRY(expr)                 \
    do {                               \
        kvf_status kvfi_try_ = (expr); \
        if (kvfi_try_ != KVF_OK) {     \
            return kvfi_try_;          \
        }                              \
    } while (0)

/* ---- log */
bool kvfi_log_on(kvf_log_level);
void kvfi_log(kvf_log_level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- budgets: kvfi_take_budget checks the budget of a public call, and puts the default in place of KVF_DEFAULT.
 * KVF_LIMIT: it is out of range, or it is KVF_POLL where `polls` is false. kvfi_budget_deadline is the deadline of a
 * budget that was taken; of KVF_POLL it is KVFI_AT_ONCE. */
kvf_status kvfi_take_budget(int64_t *budget_us, kvf_error *err, int64_t default_us, bool polls);
int64_t kvfi_budget_deadline(int64_t budget_us);

/* ---- bytes: little-endian on the wire, hex for names */
#define KVFI_PAGE ((size_t)4096) /* of memory */
static inline void kvfi_put32(uint8_t *p, uint32_t v) {
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
    p[2] = (uint8_t)(v >> 16);
    p[3] = (uint8_t)(v >> 24);
}
static inline void kvfi_put64(uint8_t *p, uint64_t v) {
    kvfi_put32(p, (uint32_t)v);
    kvfi_put32(p + 4, (uint32_t)(v >> 32));
}
static inline uint32_t kvfi_get32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}
static inline uint64_t kvfi_get64(const uint8_t *p) {
    return (uint64_t)kvfi_get32(p) | (uint64_t)kvfi_get32(p + 4) << 32;
}
void kvfi_hex(char *out, const uint8_t *bytes, size_t num);       /* 2 * num lower-case digits and a NUL */
bool kvfi_unhex(uint8_t *out, const char *hex, size_t num_bytes); /* exactly 2 * num_bytes digits; false otherwise */
bool kvfi_parse_u64(uint64_t *out, const char *text, size_t len); /* decimal digits only, no overflow */
bool kvfi_parse_size(uint64_t *out, const char *text,
                     size_t len); /* the same with an optional K, M, G or T (1024-based) */

/* ---- arithmetic on numbers that were read from a store, a file or a server: any value may stand there, so the result
 * saturates. */
static inline int64_t kvfi_sat_add(int64_t a, int64_t b) {
    int64_t sum = 0;
    return !__builtin_add_overflow(a, b, &sum) ? sum : a < 0 ? INT64_MIN : INT64_MAX;
}
static inline int64_t kvfi_sat_sub(int64_t a, int64_t b) {
    int64_t difference = 0;
    return !__builtin_sub_overflow(a, b, &difference) ? difference : a < 0 ? INT64_MIN : INT64_MAX;
}
static inline int64_t kvfi_sat_mul(int64_t a, int64_t b) {
    int64_t product = 0;
    return !__builtin_mul_overflow(a, b, &product) ? product : (a < 0) != (b < 0) ? INT64_MIN : INT64_MAX;
}
static inline int64_t kvfi_sat_signed(uint64_t value) {
    return value < INT64_MAX ? (int64_t)value : INT64_MAX;
}

/* ---- hashes: libcrypto's SHA-256 and libxxhash's XXH3. The state lives on the caller's stack; nothing allocates, so
 * nothing fails. With a secret the SHA-256 becomes HMAC-SHA-256 under it. */
typedef struct kvfi_secret {
    bool set;
    uint8_t inner[112], outer[112]; /* SHA256_CTX after the padded key, so that each use saves two compressions */
} kvfi_secret;
typedef struct kvfi_sha {
    uint8_t ctx[112];
    const kvfi_secret *secret;
} kvfi_sha;
void kvfi_secret_init(kvfi_secret *, const void *bytes, size_t len); /* len 0: not set */
void kvfi_sha_init(kvfi_sha *, const kvfi_secret *secret_or_null);
void kvfi_sha_add(kvfi_sha *, const void *, size_t len);
void kvfi_sha_end(kvfi_sha *, uint8_t out[32]);

void kvfi_xxh3_iov(uint8_t out[16], const struct iovec *, size_t num); /* XXH3-128, canonical (big-endian) bytes */
/* The same, piece by piece. */
typedef struct kvfi_xxh3 {
    _Alignas(64) uint8_t state[576];
} kvfi_xxh3;
void kvfi_xxh3_init(kvfi_xxh3 *);
void kvfi_xxh3_add(kvfi_xxh3 *, const void *, size_t len);
/* Hashes bytes and copies them, reading them from memory once. The copy bypasses the cache. NULL hash: copies only. */
void kvfi_xxh3_copy(kvfi_xxh3 *, void *to, const void *from, size_t len);
void kvfi_xxh3_end(const kvfi_xxh3 *, uint8_t out[16]);
uint32_t kvfi_xxh32(const void *, size_t len);

/* ---- AES-256-GCM with a nonce of zeros: a key is good for one message. begin, add its pieces in order (`out` may be
 * `in`), and end in any case, also after a begin that failed. begin is false without memory. end writes the tag, or
 * compares it: false is a message that is not to be used. A second end is false, and does nothing. */
typedef struct kvfi_gcm {
    void *ctx;
    bool opens, failed;
} kvfi_gcm;
bool kvfi_gcm_begin(kvfi_gcm *, bool opens, const uint8_t key[32], const void *aad, size_t aad_len);
void kvfi_gcm_add(kvfi_gcm *, void *out, const void *in, size_t len);
bool kvfi_gcm_end(kvfi_gcm *, uint8_t tag[16]);

/* ---- iovecs */
size_t kvfi_iov_bytes(const struct iovec *, size_t num); /* SIZE_MAX where the sum is more than that */
/* kvfi_iov_skip moves *iov and *num past `bytes`, changing the first iovec that is left. */
void kvfi_iov_skip(struct iovec **iov, size_t *num, size_t bytes);

#endif
