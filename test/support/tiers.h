/* SPDX-License-Identifier: Apache-2.0
 *
 * Common tools for tests of a single tier: opening it, and records with seeded bytes, put, read and checked.
 */
#ifndef KVFT_TIERS_H
#define KVFT_TIERS_H

#include "tier/tier.h"

/* Opens the tier that the URL (a format) names, or says why not. */
kvf_status kvft_try_tier(kvfi_tier **out, kvf_error *err, const char *url, ...) __attribute__((format(printf, 3, 4)));
kvfi_tier *kvft_tier(const char *url); /* opens or aborts with the message */

/* A whole record in one piece, cut by iovecs; its bytes, address and tokens follow from the seed. The payload begins at
 * a multiple of 64, as an engine's would. */
enum { KVFT_VALUE_TOKENS = 4, KVFT_VALUE_IOVS = 6 };
#define KVFT_VALUE_EXTRA \
    (KVFI_HEAD_BYTES(KVFT_VALUE_TOKENS) + KVFI_SUM_BYTES) /* a value is so much longer than its payload */
typedef struct kvft_value {
    kvfi_item item;
    struct iovec iov[KVFT_VALUE_IOVS];
    kvf_block block;
    uint32_t tokens[KVFT_VALUE_TOKENS];
    uint8_t *bytes;
    void *base;
} kvft_value;
void kvft_value_init(kvft_value *, uint64_t seed, size_t payload_bytes); /* with its bytes */
/* Seals it again, after a change of its address, block or payload. */
void kvft_value_seal(kvft_value *, int64_t stored_s);
kvf_reason kvft_value_check(kvfi_item *); /* for a feed of items of values */
void kvft_value_cleanup(kvft_value *);
void kvft_addr(kvfi_addr *out, uint64_t seed); /* one space for 1000 seeds */
const char *kvft_redis_key(uint64_t seed,
                           uint64_t part); /* of it in Redis, with the usual prefix; until the next call */

/* One value through the tier. */
kvf_reason kvft_put(kvfi_tier *, uint64_t seed, size_t payload_bytes);
/* The same, once the tier asks a server again that has refused saves: it does not for up to two seconds. */
kvf_reason kvft_put_again(kvfi_tier *, uint64_t seed, size_t payload_bytes);
/* Reads it with all checks. Aborts when a hit has other bytes than the seed decides. */
kvf_reason kvft_get(kvfi_tier *, uint64_t seed, size_t payload_bytes);
kvf_reason kvft_peek(kvfi_tier *, uint64_t seed);
kvf_reason kvft_each(kvfi_tier *, kvfi_deed, uint64_t seed);
/* Borrows, checks and gives back. Aborts on wrong bytes. */
kvf_reason kvft_borrow(kvfi_tier *, uint64_t seed, size_t payload_bytes);

/* All records of the tier, read and verified whole. */
typedef struct kvft_census {
    size_t records, damaged, foreign;
    uint64_t bytes;
} kvft_census;
kvft_census kvft_count(kvfi_tier *);
#endif
