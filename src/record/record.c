/* SPDX-License-Identifier: Apache-2.0
 *
 * Encodes and decodes the header of a record, and verifies records. docs/record-format.md has the layout.
 */
#include "record/record.h"

/* Offsets in the header. They are the format: never change one, only add a version. */
enum {
    AT_MAGIC = 0,
    AT_HEADER_BYTES = 4,
    AT_FLAGS = 6,
    AT_CODEC = 8,
    AT_SPACE = 12,
    AT_KEY = 44,
    AT_FIRST_TOKEN = 76,
    AT_NUM_TOKENS = 80,
    AT_PAYLOAD_BYTES = 84,
    AT_RAW_BYTES = 92,
    AT_STORED = 100,
    AT_SALT = 108, /* of a sealed record; otherwise zeros */
    AT_CHECK = KVFI_HEADER_SAYS
};
_Static_assert(AT_CHECK + 4 == KVFI_HEADER_BYTES, "the header's own check ends it");
_Static_assert(AT_SALT + KVFI_SALT_BYTES == AT_CHECK, "the salt fits");
_Static_assert(AT_FIRST_TOKEN + 8 == AT_PAYLOAD_BYTES, "the veiled fields lie together");

static const uint8_t magic[4] = {'K', 'V', 'F', '2'}; /* version 1, never released, had its checksum in the header */
static const uint8_t zeros[AT_CHECK - AT_SALT];

static void put16(uint8_t *p, uint16_t v) {
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}

static uint16_t get16(const uint8_t *p) {
    return (uint16_t)(p[0] | p[1] << 8);
}

void kvfi_header_encode(uint8_t out[KVFI_HEADER_BYTES], const kvfi_header *header) {
    memcpy(out + AT_MAGIC, magic, sizeof magic);
    put16(out + AT_HEADER_BYTES, KVFI_HEADER_BYTES);
    put16(out + AT_FLAGS, header->flags);
    kvfi_put32(out + AT_CODEC, header->codec);
    memcpy(out + AT_SPACE, header->addr.space.bytes, 32);
    memcpy(out + AT_KEY, header->addr.key.bytes, 32);
    kvfi_put32(out + AT_FIRST_TOKEN, header->first_token);
    kvfi_put32(out + AT_NUM_TOKENS, header->num_tokens);
    kvfi_put64(out + AT_PAYLOAD_BYTES, header->payload_bytes);
    kvfi_put64(out + AT_RAW_BYTES, header->raw_bytes);
    kvfi_put64(out + AT_STORED, (uint64_t)header->stored_s);
    memcpy(out + AT_SALT, zeros, sizeof zeros);
    if (header->codec == KVFI_CODEC_SEALED) {
        memcpy(out + AT_FIRST_TOKEN, header->veiled, sizeof header->veiled);
        memcpy(out + AT_SALT, header->salt, sizeof header->salt);
    }
    kvfi_put32(out + AT_CHECK, kvfi_xxh32(out, AT_CHECK));
}

/* The limits of version 2. A header with a valid check that exceeds one was not written by version 2. */
static bool within_limits(const kvfi_header *header) {
    uint64_t max =
        header->codec == KVFI_CODEC_SEALED ? KVF_MAX_PAYLOAD_BYTES + 4 * KVFI_MAX_TOKENS : KVF_MAX_PAYLOAD_BYTES;
    return header->num_tokens <= KVFI_MAX_TOKENS && header->first_token <= UINT32_MAX - header->num_tokens &&
           header->payload_bytes <= max && header->raw_bytes == header->payload_bytes;
}

/* The header fields with another meaning in a sealed record. Returns false for an unknown codec. */
static bool read_codec(kvfi_header *header, const uint8_t in[KVFI_HEADER_BYTES]) {
    if (header->codec == KVFI_CODEC_PLAIN) {
        header->first_token = kvfi_get32(in + AT_FIRST_TOKEN);
        header->num_tokens = kvfi_get32(in + AT_NUM_TOKENS);
        return memcmp(in + AT_SALT, zeros, sizeof zeros) == 0;
    }
    memcpy(header->veiled, in + AT_FIRST_TOKEN, sizeof header->veiled);
    memcpy(header->salt, in + AT_SALT, sizeof header->salt);
    return header->codec == KVFI_CODEC_SEALED;
}

kvf_reason kvfi_header_decode(kvfi_header *out, const uint8_t in[KVFI_HEADER_BYTES]) {
    if (memcmp(in + AT_MAGIC, magic, sizeof magic) != 0 || get16(in + AT_HEADER_BYTES) != KVFI_HEADER_BYTES) {
        return KVF_WHY_VERSION;
    }
    if (kvfi_get32(in + AT_CHECK) != kvfi_xxh32(in, AT_CHECK)) {
        return KVF_WHY_CHECKSUM;
    }
    kvfi_header header = {
        .flags = get16(in + AT_FLAGS),
        .codec = kvfi_get32(in + AT_CODEC),
        .payload_bytes = kvfi_get64(in + AT_PAYLOAD_BYTES),
        .raw_bytes = kvfi_get64(in + AT_RAW_BYTES),
        .stored_s = (int64_t)kvfi_get64(in + AT_STORED),
    };
    memcpy(header.addr.space.bytes, in + AT_SPACE, 32);
    memcpy(header.addr.key.bytes, in + AT_KEY, 32);
    if ((header.flags & ~KVFI_FLAG_CARD) != 0 || !read_codec(&header, in) || !within_limits(&header)) {
        return KVF_WHY_VERSION;
    }
    *out = header;
    return KVF_WHY_NONE;
}

/* ---- tokens: 32 bits each, little-endian. Where memory is little-endian already, they are copied and compared as they
 * are. */
void kvfi_tokens_put(uint8_t *out, const uint32_t *tokens, uint32_t num) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    if (num > 0) {
        memmove(out, tokens, 4 * (size_t)num); /* they may be in place already */
    }
#else
    for (uint32_t i = 0; i < num; i++) {
        kvfi_put32(out + 4 * (size_t)i, tokens[i]);
    }
#endif
}

bool kvfi_tokens_same(const uint8_t *stored, const kvf_block *block) {
    if (block->tokens == NULL) {
        return true;
    }
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    return memcmp(stored, block->tokens, 4 * (size_t)block->num_tokens) == 0;
#else
    for (uint32_t i = 0; i < block->num_tokens; i++) {
        if (kvfi_get32(stored + 4 * (size_t)i) != block->tokens[i]) {
            return false;
        }
    }
    return true;
#endif
}

/* The time of storing is not covered, so the same block stored twice has the same checksum. */
void kvfi_record_sum_init(kvfi_xxh3 *sum, const uint8_t header[KVFI_HEADER_BYTES]) {
    kvfi_xxh3_init(sum);
    kvfi_xxh3_add(sum, header, AT_STORED);
}

static void checksum_of(uint8_t out[KVFI_SUM_BYTES], const uint8_t *head, uint32_t num_tokens,
                        const struct iovec *payload, size_t num_iov) {
    kvfi_xxh3 sum;
    kvfi_record_sum_init(&sum, head);
    kvfi_xxh3_add(&sum, head + KVFI_HEADER_BYTES, 4 * (size_t)num_tokens);
    for (size_t i = 0; i < num_iov; i++) {
        kvfi_xxh3_add(&sum, payload[i].iov_base, payload[i].iov_len);
    }
    kvfi_xxh3_end(&sum, out);
}

static bool sum_fits(const uint8_t *head, const uint8_t sum[KVFI_SUM_BYTES], const kvfi_header *header,
                     const struct iovec *payload, size_t num_iov) {
    uint8_t computed[KVFI_SUM_BYTES];
    checksum_of(computed, head, header->num_tokens, payload, num_iov);
    return memcmp(computed, sum, sizeof computed) == 0;
}

void kvfi_record_begin(uint8_t *head, const kvfi_addr *addr, const kvf_block *block, size_t payload_bytes,
                       uint16_t flags, int64_t stored_s) {
    uint32_t num_tokens = block->tokens == NULL ? 0 : block->num_tokens;
    kvfi_tokens_put(head + KVFI_HEADER_BYTES, block->tokens, num_tokens);
    kvfi_header header = {
        .flags = flags,
        .addr = *addr,
        .first_token = block->first_token,
        .num_tokens = num_tokens,
        .payload_bytes = payload_bytes,
        .raw_bytes = payload_bytes,
        .stored_s = stored_s,
    };
    kvfi_header_encode(head, &header);
}

void kvfi_record_seal(uint8_t *head, uint8_t sum[KVFI_SUM_BYTES], const kvfi_addr *addr, const kvf_block *block,
                      const struct iovec *payload, size_t num_iov, uint16_t flags, int64_t stored_s) {
    kvfi_record_begin(head, addr, block, kvfi_iov_bytes(payload, num_iov), flags, stored_s);
    checksum_of(sum, head, block->tokens == NULL ? 0 : block->num_tokens, payload, num_iov);
}

/* Does the header name the requested block? The tokens after it are compared next. */
kvf_reason kvfi_header_matches(const kvfi_header *header, const kvfi_addr *addr, const kvf_block *block) {
    if (memcmp(header->addr.space.bytes, addr->space.bytes, 32) != 0 ||
        memcmp(header->addr.key.bytes, addr->key.bytes, 32) != 0) {
        return KVF_WHY_OTHER_SPACE;
    }
    bool placed = block->tokens != NULL || block->first_token != 0;
    if (placed && header->first_token != block->first_token) {
        return KVF_WHY_OTHER_TOKENS;
    }
    if (header->num_tokens != block->num_tokens) {
        return block->tokens != NULL ? KVF_WHY_OTHER_TOKENS : KVF_WHY_TRUNCATED;
    }
    return KVF_WHY_NONE;
}

kvf_reason kvfi_record_check(const uint8_t *head, const uint8_t sum[KVFI_SUM_BYTES], const kvfi_addr *addr,
                             const kvf_block *block, const struct iovec *payload, size_t num_iov) {
    kvfi_header header;
    kvf_reason why = kvfi_header_decode(&header, head);
    if (why == KVF_WHY_NONE && header.codec != KVFI_CODEC_PLAIN) {
        why = KVF_WHY_VERSION;
    }
    if (why == KVF_WHY_NONE) {
        why = kvfi_header_matches(&header, addr, block);
    }
    if (why != KVF_WHY_NONE) {
        return why;
    }
    if (kvfi_iov_bytes(payload, num_iov) != header.payload_bytes) {
        return KVF_WHY_TRUNCATED;
    }
    if (!sum_fits(head, sum, &header, payload, num_iov)) {
        return KVF_WHY_CHECKSUM;
    }
    /* Compared after the checksum, so that a damaged token counts as damage, and the record is replaced. */
    return kvfi_tokens_same(head + KVFI_HEADER_BYTES, block) ? KVF_WHY_NONE : KVF_WHY_OTHER_TOKENS;
}

kvf_reason kvfi_record_parse(kvfi_header *out, const uint8_t **out_tokens, const uint8_t **out_payload,
                             const void *value, size_t len) {
    const uint8_t *bytes = value;
    if (len < KVFI_HEADER_BYTES) {
        /* The magic distinguishes a truncated record from something that never was one. */
        bool begins = len >= sizeof magic && memcmp(bytes, magic, sizeof magic) == 0;
        return begins ? KVF_WHY_TRUNCATED : KVF_WHY_VERSION;
    }
    kvfi_header header;
    kvf_reason why = kvfi_header_decode(&header, bytes);
    if (why != KVF_WHY_NONE) {
        return why;
    }
    if (len != kvfi_record_bytes(&header)) { /* no overflow: the limits of the header bound all terms */
        return KVF_WHY_TRUNCATED;
    }
    struct iovec payload = {(void *)(uintptr_t)(bytes + KVFI_HEAD_BYTES(header.num_tokens)),
                            (size_t)header.payload_bytes};
    if (header.codec == KVFI_CODEC_PLAIN && !sum_fits(bytes, bytes + len - KVFI_SUM_BYTES, &header, &payload, 1)) {
        return KVF_WHY_CHECKSUM;
    }
    *out = header;
    *out_tokens = bytes + KVFI_HEADER_BYTES;
    *out_payload = bytes + KVFI_HEAD_BYTES(header.num_tokens);
    return KVF_WHY_NONE;
}
