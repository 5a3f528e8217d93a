/* SPDX-License-Identifier: Apache-2.0
 *
 * The record: one block as it lies in a store. Pure: no I/O, no allocation. docs/record-format.md is the specification.
 *
 *   header (128 bytes) | token ids (4 bytes each) | payload | checksum (16 bytes)
 *
 * The checksum ends the record, so that a writer can hash each piece just before it sends it. It covers the header too:
 * the end of one record never fits the beginning of another.
 */
#ifndef KVFI_RECORD_H
#define KVFI_RECORD_H

#include "base/base.h"
#include "kvferry/block.h"

#define KVFI_HEADER_BYTES           128u
#define KVFI_SUM_BYTES              16u /* the checksum */
#define KVFI_MAX_TOKENS             4096u
#define KVFI_HEAD_BYTES(num_tokens) (KVFI_HEADER_BYTES + 4u * (size_t)(num_tokens)) /* header and tokens */

/* Where a value lives in any tier: the first 8 bytes of the space's digest name its folder or key prefix. The key
 * already depends on the whole digest. */
typedef struct kvfi_addr {
    uint8_t space[32];
    kvf_key key;
} kvfi_addr;

enum { KVFI_FLAG_CARD = 1 }; /* the payload is a space card: the fields of the space as text, not a block */

typedef struct kvfi_header {
    uint16_t flags;
    uint32_t codec; /* 0 = stored as it is; nothing else is known to version 1 */
    kvfi_addr addr;
    uint32_t first_token, num_tokens;
    uint64_t payload_bytes, raw_bytes; /* equal with codec 0 */
    int64_t stored_s;
} kvfi_header;

void kvfi_header_encode(uint8_t out[KVFI_HEADER_BYTES], const kvfi_header *);
/* kvfi_header_decode returns KVF_WHY_NONE, KVF_WHY_VERSION (not a record, or an unknown version, flag or codec) or
 * KVF_WHY_CHECKSUM (damaged header), and checks every bound: nothing it returns needs further doubt before it is used
 * as a size. */
kvf_reason kvfi_header_decode(kvfi_header *out, const uint8_t in[KVFI_HEADER_BYTES]);

static inline uint64_t kvfi_record_bytes(const kvfi_header *header) { /* of the whole record */
    return KVFI_HEAD_BYTES(header->num_tokens) + header->payload_bytes + KVFI_SUM_BYTES;
}

/* kvfi_record_begin writes header and tokens into `head` (KVFI_HEAD_BYTES of it) for a payload of that length. */
void kvfi_record_begin(uint8_t *head, const kvfi_addr *, const kvf_block *block, size_t payload_bytes, uint16_t flags,
                       int64_t stored_s);
/* The checksum, piece by piece: init with the header, kvfi_xxh3_add all that stands behind it, kvfi_xxh3_end. */
void kvfi_record_sum_init(kvfi_xxh3 *, const uint8_t header[KVFI_HEADER_BYTES]);
/* kvfi_record_seal does all of it at once: what a store then writes is head, payload, sum. */
void kvfi_record_seal(uint8_t *head, uint8_t sum[KVFI_SUM_BYTES], const kvfi_addr *, const kvf_block *block,
                      const struct iovec *payload, size_t num_iov, uint16_t flags, int64_t stored_s);

/* kvfi_record_check decides whether what was read is the block that was asked for: header, space, key, tokens (when
 * block->tokens is given), position, lengths, checksum. `head` holds KVFI_HEAD_BYTES(block->num_tokens). KVF_WHY_NONE
 * is the only hit. */
kvf_reason kvfi_record_check(const uint8_t *head, const uint8_t sum[KVFI_SUM_BYTES], const kvfi_addr *,
                             const kvf_block *block, const struct iovec *payload, size_t num_iov);

/* kvfi_record_parse checks a whole value of unknown content (verify, borrow): header, lengths, checksum. Outputs point
 * into `value`. */
kvf_reason kvfi_record_parse(kvfi_header *out, const uint8_t **out_tokens, const uint8_t **out_payload,
                             const void *value, size_t len);

/* kvfi_card_key is where the card of a space lies: SHA-256("kvf1 card" || digest). Never keyed, so that an operator
 * finds it. */
void kvfi_card_key(kvf_key *out, const uint8_t digest[32]);

#endif
