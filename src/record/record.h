/* SPDX-License-Identifier: Apache-2.0
 *
 * The record: one block as it lies in a store. Pure: no I/O, no allocation. docs/record-format.md is the specification.
 *
 *   header (128 bytes) | token ids (4 bytes each) | payload | checksum (16 bytes)
 *   header (128 bytes) | token ids and payload, sealed       | tag (16 bytes)
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
    kvf_digest space;
    kvf_key key;
} kvfi_addr;

enum { KVFI_CODEC_PLAIN = 0, KVFI_CODEC_SEALED = 1 };
#define KVFI_SALT_BYTES 16u

enum { KVFI_FLAG_CARD = 1 }; /* the payload is a space card: the fields of the space as text, not a block */

typedef struct kvfi_header {
    uint16_t flags;
    uint32_t codec; /* KVFI_CODEC_... */
    kvfi_addr addr;
    uint32_t first_token, num_tokens;
    uint64_t payload_bytes, raw_bytes; /* equal */
    int64_t stored_s;
    /* Of a sealed record. Until kvfi_header_admit has unveiled it, first_token and num_tokens are 0 and payload_bytes
     * counts the tokens, too. */
    uint8_t salt[KVFI_SALT_BYTES], veiled[8];
} kvfi_header;

void kvfi_header_encode(uint8_t out[KVFI_HEADER_BYTES], const kvfi_header *);
/* kvfi_header_decode returns KVF_WHY_NONE, KVF_WHY_VERSION (not a record, or an unknown version, flag or codec) or
 * KVF_WHY_CHECKSUM (damaged header), and checks every bound: nothing it returns needs further doubt before it is used
 * as a size. */
kvf_reason kvfi_header_decode(kvfi_header *out, const uint8_t in[KVFI_HEADER_BYTES]);

static inline uint64_t kvfi_record_bytes(const kvfi_header *header) { /* of the whole record */
    return KVFI_HEAD_BYTES(header->num_tokens) + header->payload_bytes + KVFI_SUM_BYTES;
}

/* So many bytes of a header say something; its check, which follows from them, stands behind. */
#define KVFI_HEADER_SAYS 124u

/* Parts of writing and checking a record that plain and sealed ones share: token ids as they are stored, 32 bits each,
 * little-endian; and whether a header names the block that was asked for. */
void kvfi_tokens_put(uint8_t *out, const uint32_t *tokens, uint32_t num);
bool kvfi_tokens_same(const uint8_t *stored, const uint32_t *tokens, uint32_t num);
kvf_reason kvfi_header_matches(const kvfi_header *, const kvfi_addr *, uint32_t num_tokens, uint32_t first_token);

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
 * into `value`. Of a sealed record, which out->codec says, only header and length are checked, and the payload is the
 * sealed bytes. */
kvf_reason kvfi_record_parse(kvfi_header *out, const uint8_t **out_tokens, const uint8_t **out_payload,
                             const void *value, size_t len);

/* ---- sealed records (sealed.c): codec 1, tokens and payload under AES-256-GCM, its tag in place of the checksum */

/* kvfi_seal_init makes what records are sealed under from a tenant's secret. */
void kvfi_seal_init(kvfi_secret *seal, const kvfi_secret *secret);

/* What one record is sealed with: a key of its own, by place and salt. The salt is random for each writing. */
typedef struct kvfi_record_key {
    uint8_t key[32], veil[8], salt[KVFI_SALT_BYTES];
} kvfi_record_key;
void kvfi_record_key_of(kvfi_record_key *, const kvfi_secret *seal, const kvfi_addr *,
                        const uint8_t salt[KVFI_SALT_BYTES]);

/* kvfi_sealed_write writes a whole record: header to `head`; tokens and payload, sealed, to `body` or, where that is
 * NULL, in place: the tokens then lie behind the header already; the tag to `tag`. Of the block, tokens, num_tokens and
 * first_token are used. false without memory: then the record must not be used, nor what was sealed in place. */
bool kvfi_sealed_write(uint8_t head[KVFI_HEADER_BYTES], uint8_t *body, uint8_t tag[KVFI_SUM_BYTES],
                       const kvfi_record_key *, const kvfi_addr *, const kvf_block *block, const struct iovec *payload,
                       size_t num_iov, uint16_t flags, int64_t stored_s);

/* kvfi_header_admit decides whether a record with this header may be used where records are sealed under `seal` (NULL:
 * not sealed): KVF_WHY_VERSION for the other codec. It unveils a sealed header: first_token, num_tokens and
 * payload_bytes become true; KVF_WHY_CHECKSUM where they can't be. Only kvfi_record_open proves them. */
kvf_reason kvfi_header_admit(kvfi_header *, const kvfi_secret *seal);

/* kvfi_record_open is kvfi_record_check for records that are sealed under `seal`; tokens and payload are opened where
 * they lie. What fails its tag is wiped. KVF_WHY_NOMEM: not even tried. */
kvf_reason kvfi_record_open(uint8_t *head, uint8_t tag[KVFI_SUM_BYTES], const kvfi_addr *, const kvf_block *block,
                            const struct iovec *payload, size_t num_iov, const kvfi_secret *seal);
/* kvfi_record_open_value opens a whole value that kvfi_record_parse found to be sealed, in place, whatever block it is. */
kvf_reason kvfi_record_open_value(kvfi_header *header, const uint8_t **out_tokens, const uint8_t **out_payload,
                                  void *value, size_t len, const kvfi_secret *seal);

/* kvfi_card_key is where the card of a space lies: SHA-256("kvf1 card" || digest). Never keyed, so that an operator
 * finds it. */
void kvfi_card_key(kvf_key *out, const kvf_digest *digest);
/* Whether the text of a card gives this digest, under the secret (NULL: without one). Else somebody made it up. */
bool kvfi_card_fits(const char *text, size_t len, const kvf_digest *digest, const kvfi_secret *secret);

#endif
