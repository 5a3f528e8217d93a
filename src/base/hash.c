/* SPDX-License-Identifier: Apache-2.0
 *
 * SHA-256, HMAC-SHA-256 and XXH3 on the caller's stack.
 *
 * libcrypto's EVP interface allocates for every digest and for every copy of one, so a chain of 128K tokens would
 * allocate thousands of times before the first lookup. The old interface uses a struct of the caller's. That struct can
 * also be saved half-way, which saves HMAC two compressions for each use of a key.
 */
#define OPENSSL_SUPPRESS_DEPRECATED
#define XXH_STATIC_LINKING_ONLY /* the streaming state as a struct, not a pointer */

#include "base/base.h"

#include <stdalign.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <xxhash.h>

/* libxxhash itself is compiled for the oldest x86 (SSE2: 9 GB/s on a machine that reaches 30 with AVX2). It carries
 * variants for newer processors under other names. */
#if defined(__x86_64__) && defined(__has_include)
#if __has_include(<xxh_x86dispatch.h>)
#define XXH_DISPATCH_DISABLE_REPLACE
#include <xxh_x86dispatch.h>
#define xxh128_once   XXH3_128bits_dispatch
#define xxh128_update XXH3_128bits_update_dispatch
#define XXH_DISPATCHES
#endif
#endif
#ifndef XXH_DISPATCHES
#define xxh128_once   XXH3_128bits
#define xxh128_update XXH3_128bits_update
#endif

/* ---- SHA-256 */
_Static_assert(sizeof(SHA256_CTX) == sizeof((kvfi_sha *)0)->ctx, "kvfi_sha holds a SHA256_CTX");
_Static_assert(sizeof(SHA256_CTX) == sizeof((kvfi_secret *)0)->inner, "kvfi_secret holds two");
_Static_assert(offsetof(kvfi_sha, ctx) == 0 && alignof(kvfi_sha) >= alignof(SHA256_CTX), "aligned for it");

static SHA256_CTX *context(kvfi_sha *sha) {
    return (SHA256_CTX *)(void *)sha->ctx;
}

/* The state of SHA-256 after one block of the key xor `pad` (RFC 2104). */
static void keyed_state(uint8_t out[112], const uint8_t key[SHA256_CBLOCK], uint8_t pad) {
    uint8_t block[SHA256_CBLOCK];
    for (size_t i = 0; i < sizeof block; i++) {
        block[i] = key[i] ^ pad;
    }
    SHA256_CTX state;
    SHA256_Init(&state);
    SHA256_Update(&state, block, sizeof block);
    memcpy(out, &state, sizeof state);
    OPENSSL_cleanse(block, sizeof block);
    OPENSSL_cleanse(&state, sizeof state);
}

void kvfi_secret_init(kvfi_secret *secret, const void *bytes, size_t len) {
    memset(secret, 0, sizeof *secret);
    if (len == 0) {
        return;
    }
    uint8_t key[SHA256_CBLOCK] = {0};
    if (len > sizeof key) {
        kvfi_sha sha;
        kvfi_sha_init(&sha, NULL);
        kvfi_sha_add(&sha, bytes, len);
        kvfi_sha_end(&sha, key);
    } else {
        memcpy(key, bytes, len);
    }
    keyed_state(secret->inner, key, 0x36);
    keyed_state(secret->outer, key, 0x5c);
    secret->set = true;
    OPENSSL_cleanse(key, sizeof key);
}

void kvfi_sha_init(kvfi_sha *sha, const kvfi_secret *secret) {
    sha->secret = secret != NULL && secret->set ? secret : NULL;
    if (sha->secret != NULL) {
        memcpy(sha->ctx, sha->secret->inner, sizeof sha->ctx);
    } else {
        SHA256_Init(context(sha));
    }
}

void kvfi_sha_add(kvfi_sha *sha, const void *bytes, size_t len) {
    if (len > 0) {
        SHA256_Update(context(sha), bytes, len);
    }
}

void kvfi_sha_end(kvfi_sha *sha, uint8_t out[32]) {
    SHA256_Final(out, context(sha));
    if (sha->secret != NULL) {
        memcpy(sha->ctx, sha->secret->outer, sizeof sha->ctx);
        SHA256_Update(context(sha), out, SHA256_DIGEST_LENGTH);
        SHA256_Final(out, context(sha));
    }
}

/* ---- XXH3 */
#ifdef XXH_DISPATCHES
/* The first call of the dispatcher fills a table without a lock (xxHash 0.8.1, XXH_setDispatch), so two simultaneous
 * first calls may see half of it. Therefore the first call is made here, before any thread of ours exists. It needs
 * more than 240 bytes: shorter inputs do not use the dispatcher. */
__attribute__((constructor)) static void dispatch_now(void) {
    static const uint8_t zeros[512];
    (void)xxh128_once(zeros, sizeof zeros);
}
#endif

static void canonical(uint8_t out[16], XXH128_hash_t hash) {
    XXH128_canonical_t bytes;
    XXH128_canonicalFromHash(&bytes, hash);
    memcpy(out, bytes.digest, 16);
}

_Static_assert(sizeof(XXH3_state_t) == sizeof(kvfi_xxh3), "kvfi_xxh3 holds an XXH3_state_t");
_Static_assert(alignof(kvfi_xxh3) >= alignof(XXH3_state_t), "aligned for it");

void kvfi_xxh3_init(kvfi_xxh3 *hash) {
    XXH3_128bits_reset((XXH3_state_t *)(void *)hash->state);
}

#ifdef __SSE2__
/* Streaming stores do not read the memory that they overwrite, which is a third of the traffic of a copy. */
static void copy_past_cache(uint8_t *to, const uint8_t *from, size_t len) {
    size_t head = (size_t)(-(uintptr_t)to & 15);
    head = head < len ? head : len;
    memcpy(to, from, head);
    for (to += head, from += head, len -= head; len >= 64; to += 64, from += 64, len -= 64) {
        const __m128i *in = (const __m128i *)(const void *)from;
        __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
        __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
        __m128i *out = (__m128i *)(void *)to;
        _mm_stream_si128(out, a);
        _mm_stream_si128(out + 1, b);
        _mm_stream_si128(out + 2, c);
        _mm_stream_si128(out + 3, d);
    }
    memcpy(to, from, len);
}
static void end_copy(void) {
    _mm_sfence(); /* streaming stores are not ordered: other threads read the copy after this */
}
#else
static void copy_past_cache(uint8_t *to, const uint8_t *from, size_t len) {
    memcpy(to, from, len);
}
static void end_copy(void) {
}
#endif

void kvfi_xxh3_add(kvfi_xxh3 *hash, const void *bytes, size_t len) {
    if (len > 0) {
        xxh128_update((XXH3_state_t *)(void *)hash->state, bytes, len);
    }
}

/* Small enough that a copied piece is still in the nearest cache when it is hashed. */
#define COPY_PIECE 8192u

void kvfi_xxh3_copy(kvfi_xxh3 *hash, void *to, const void *from, size_t len) {
    uint8_t *out = to;
    const uint8_t *in = from;
    for (size_t piece = 0; len > 0; len -= piece, in += piece, out += piece) {
        piece = len < COPY_PIECE ? len : COPY_PIECE;
        copy_past_cache(out, in, piece);
        if (hash != NULL) {
            kvfi_xxh3_add(hash, in, piece);
        }
    }
    end_copy();
}

void kvfi_xxh3_end(const kvfi_xxh3 *hash, uint8_t out[16]) {
    canonical(out, XXH3_128bits_digest((const XXH3_state_t *)(const void *)hash->state));
}

void kvfi_xxh3_iov(uint8_t out[16], const struct iovec *iov, size_t num) {
    if (num == 1) {
        canonical(out, xxh128_once(iov[0].iov_base, iov[0].iov_len));
    } else {
        kvfi_xxh3 hash;
        kvfi_xxh3_init(&hash);
        for (size_t i = 0; i < num; i++) {
            kvfi_xxh3_add(&hash, iov[i].iov_base, iov[i].iov_len);
        }
        kvfi_xxh3_end(&hash, out);
    }
}

uint32_t kvfi_xxh32(const void *bytes, size_t len) {
    return XXH32(bytes, len, 0);
}
