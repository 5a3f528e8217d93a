/* SPDX-License-Identifier: Apache-2.0
 *
 * The record: one block as it lies in a store. Pure: no I/O, no allocation. docs/record-format.md is the specification.
 *
 *   header (128 bytes) | token ids (4 bytes each) | payload | checksum (16 bytes)
 *   header (128 bytes) | token ids and payload, sealed       | tag (16 bytes)
 *
 * The checksum is the end of the record, so that a writer can hash each piece just before sending it. It covers the
 * header too, so the end of one record never matches the beginning of another.
 */
#ifndef KVFI_RECORD_H
#define KVFI_RECORD_H

#include "base/base.h"
#include "kvferry/block.h"

#define KVFI_HEADER_BYTES           128u
#define KVFI_SUM_BYTES              16u /* the checksum */
#define KVFI_MAX_TOKENS             65536u
#define KVFI_HEAD_BYTES(num_tokens) (KVFI_HEADER_BYTES + 4u * (size_t)(num_tokens)) /* header and tokens */

/* The address of a value in any tier. The first 8 bytes of the space's digest name its folder or key prefix. The key
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
    /* Of a sealed record. Until kvfi_header_admit has decrypted the veiled fields, first_token and num_tokens are 0 and
     * payload_bytes includes the tokens. */
    uint8_t salt[KVFI_SALT_BYTES], veiled[8];
} kvfi_header;

void kvfi_header_encode(uint8_t out[KVFI_HEADER_BYTES], const kvfi_header *);
/* kvfi_header_decode returns KVF_WHY_NONE, KVF_WHY_VERSION (not a record, or an unknown version, flag or codec) or
 * KVF_WHY_CHECKSUM (damaged header). It checks every bound, so its outputs may be used as sizes. */
kvf_reason kvfi_header_decode(kvfi_header *out, const uint8_t in[KVFI_HEADER_BYTES]);

static inline uint64_t kvfi_record_bytes(const kvfi_header *header) { /* of the whole record */
    return KVFI_HEAD_BYTES(header->num_tokens) + header->payload_bytes + KVFI_SUM_BYTES;
}

/* The bytes of a header that its check covers; the check follows them. */
#define KVFI_HEADER_SAYS 124u

/* Steps that plain and sealed records share: storing token ids (32 bits each, little-endian), and comparing a header
 * with the requested block. */
void kvfi_tokens_put(uint8_t *out, const uint32_t *tokens, uint32_t num);
bool kvfi_tokens_same(const uint8_t *stored, const kvf_block *);
kvf_reason kvfi_header_matches(const kvfi_header *, const kvfi_addr *, const kvf_block *);

/* kvfi_record_begin writes header and tokens into `head` (KVFI_HEAD_BYTES of it) for a payload of that length. */
void kvfi_record_begin(uint8_t *head, const kvfi_addr *, const kvf_block *block, size_t payload_bytes, uint16_t flags,
                       int64_t stored_s);
/* The checksum piece by piece: init with the header, kvfi_xxh3_add everything after it, kvfi_xxh3_end. */
void kvfi_record_sum_init(kvfi_xxh3 *, const uint8_t header[KVFI_HEADER_BYTES]);
/* kvfi_record_seal does all of it at once. A store then writes head, payload, sum. */
void kvfi_record_seal(uint8_t *head, uint8_t sum[KVFI_SUM_BYTES], const kvfi_addr *, const kvf_block *block,
                      const struct iovec *payload, size_t num_iov, uint16_t flags, int64_t stored_s);

/* kvfi_record_check decides whether what was read is the requested block: header, space, key, tokens, position,
 * lengths, checksum. `head` holds KVFI_HEAD_BYTES(block->num_tokens). Without block->tokens, the tokens are not
 * compared, nor is a position of 0; a record of another number of tokens is KVF_WHY_TRUNCATED. Only KVF_WHY_NONE is a
 * hit. */
kvf_reason kvfi_record_check(const uint8_t *head, const uint8_t sum[KVFI_SUM_BYTES], const kvfi_addr *,
                             const kvf_block *block, const struct iovec *payload, size_t num_iov);

/* kvfi_record_parse checks a whole value of unknown content (verify, borrow): header, lengths, checksum. Outputs point
 * into `value`. For a sealed record (see out->codec) it checks only header and length, and the payload is the sealed
 * bytes. */
kvf_reason kvfi_record_parse(kvfi_header *out, const uint8_t **out_tokens, const uint8_t **out_payload,
                             const void *value, size_t len);

/* ---- sealed records (sealed.c): codec 1, tokens and payload under AES-256-GCM, its tag in place of the checksum */

/* kvfi_seal_init derives the sealing key of records from a tenant's secret. */
void kvfi_seal_init(kvfi_secret *seal, const kvfi_secret *secret);

/* The key of one sealed record, derived from its address and salt. Each write draws a new random salt. */
typedef struct kvfi_record_key {
    uint8_t key[32], veil[8], salt[KVFI_SALT_BYTES];
} kvfi_record_key;
void kvfi_record_key_of(kvfi_record_key *, const kvfi_secret *seal, const kvfi_addr *,
                        const uint8_t salt[KVFI_SALT_BYTES]);

/* kvfi_sealed_header writes the header for a payload of that length. Of the block it uses
 * tokens (whether there are any), num_tokens and first_token. */
void kvfi_sealed_header(uint8_t head[KVFI_HEADER_BYTES], const kvfi_record_key *, const kvfi_addr *,
                        const kvf_block *block, size_t payload_bytes, uint16_t flags, int64_t stored_s);
/* What follows the header, piece by piece: init with the header, kvfi_gcm_add tokens and payload, kvfi_gcm_end. Returns
 * false without memory. */
bool kvfi_sealed_init(kvfi_gcm *, const kvfi_record_key *, const uint8_t header[KVFI_HEADER_BYTES]);
/* kvfi_sealed_write does all of it at once: the header to `head`, the tag to `tag`, and the sealed tokens and payload to
 * `body`. Returns false without memory; then the record may not be used. */
bool kvfi_sealed_write(uint8_t head[KVFI_HEADER_BYTES], uint8_t *body, uint8_t tag[KVFI_SUM_BYTES],
                       const kvfi_record_key *, const kvfi_addr *, const kvf_block *block, const struct iovec *payload,
                       size_t num_iov, uint16_t flags, int64_t stored_s);

/* kvfi_header_admit decides whether a record with this header may be used where records are sealed under `seal` (NULL:
 * plain). Returns KVF_WHY_VERSION for the other codec. Of a sealed header it decrypts first_token, num_tokens and
 * payload_bytes, and returns KVF_WHY_CHECKSUM if they are impossible. Only kvfi_record_open proves them. */
kvf_reason kvfi_header_admit(kvfi_header *, const kvfi_secret *seal);

/* kvfi_record_open is kvfi_record_check for records sealed under `seal`. It decrypts tokens and payload in place, and
 * wipes them if the tag differs. KVF_WHY_NOMEM: not tried. */
kvf_reason kvfi_record_open(uint8_t *head, uint8_t tag[KVFI_SUM_BYTES], const kvfi_addr *, const kvf_block *block,
                            const struct iovec *payload, size_t num_iov, const kvfi_secret *seal);
/* kvfi_record_open_value decrypts, in place, a whole value that kvfi_record_parse found to be sealed, whatever block it
 * is. */
kvf_reason kvfi_record_open_value(kvfi_header *header, const uint8_t **out_tokens, const uint8_t **out_payload,
                                  void *value, size_t len, const kvfi_secret *seal);

/* kvfi_card_key computes the key of a space's card: SHA-256("kvf1 card" || digest). Never keyed, so that an operator
 * finds it. */
void kvfi_card_key(kvf_key *out, const kvf_digest *digest);
/* Whether the text of a card hashes to this digest, under the secret (NULL: without one). Otherwise the card is
 * forged. */
bool kvfi_card_fits(const char *text, size_t len, const kvf_digest *digest, const kvfi_secret *secret);

#endif
