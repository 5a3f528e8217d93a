/* SPDX-License-Identifier: Apache-2.0
 *
 * Sealed records: derives keys, writes and opens records. docs/record-format.md 8 has the layout.
 */
#include "record/record.h"

void kvfi_seal_init(kvfi_secret *seal, const kvfi_secret *secret) {
    static const char label[] = "kvf1 seal"; /* without its NUL */
    uint8_t key[32];
    kvfi_sha sha;
    kvfi_sha_init(&sha, secret);
    kvfi_sha_add(&sha, label, sizeof label - 1);
    kvfi_sha_end(&sha, key);
    kvfi_secret_init(seal, key, sizeof key);
    explicit_bzero(key, sizeof key);
}

/* HKDF-Expand (RFC 5869) of 40 bytes. */
void kvfi_record_key_of(kvfi_record_key *out, const kvfi_secret *seal, const kvfi_addr *addr,
                        const uint8_t salt[KVFI_SALT_BYTES]) {
    uint8_t second[32];
    kvfi_sha sha;
    for (uint8_t count = 1; count <= 2; count++) {
        kvfi_sha_init(&sha, seal);
        kvfi_sha_add(&sha, out->key, count == 1 ? 0 : sizeof out->key);
        kvfi_sha_add(&sha, addr->space.bytes, sizeof addr->space.bytes);
        kvfi_sha_add(&sha, addr->key.bytes, sizeof addr->key.bytes);
        kvfi_sha_add(&sha, salt, KVFI_SALT_BYTES);
        kvfi_sha_add(&sha, &count, 1);
        kvfi_sha_end(&sha, count == 1 ? out->key : second);
    }
    memcpy(out->veil, second, sizeof out->veil);
    memcpy(out->salt, salt, KVFI_SALT_BYTES);
}

static void veil(uint8_t bytes[8], const kvfi_record_key *key) {
    for (size_t i = 0; i < sizeof key->veil; i++) {
        bytes[i] ^= key->veil[i];
    }
}

static uint32_t num_tokens_of(const kvf_block *block) {
    return block->tokens == NULL ? 0 : block->num_tokens;
}

void kvfi_sealed_header(uint8_t head[KVFI_HEADER_BYTES], const kvfi_record_key *key, const kvfi_addr *addr,
                        const kvf_block *block, size_t payload_bytes, uint16_t flags, int64_t stored_s) {
    uint64_t body_bytes = 4 * (uint64_t)num_tokens_of(block) + payload_bytes;
    kvfi_header header = {.flags = flags,
                          .codec = KVFI_CODEC_SEALED,
                          .addr = *addr,
                          .payload_bytes = body_bytes,
                          .raw_bytes = body_bytes,
                          .stored_s = stored_s};
    memcpy(header.salt, key->salt, sizeof header.salt);
    kvfi_put32(header.veiled, block->first_token);
    kvfi_put32(header.veiled + 4, num_tokens_of(block));
    veil(header.veiled, key);
    kvfi_header_encode(head, &header);
}

bool kvfi_sealed_init(kvfi_gcm *gcm, const kvfi_record_key *key, const uint8_t header[KVFI_HEADER_BYTES]) {
    return kvfi_gcm_begin(gcm, false, key->key, header, KVFI_HEADER_SAYS);
}

bool kvfi_sealed_write(uint8_t head[KVFI_HEADER_BYTES], uint8_t *body, uint8_t tag[KVFI_SUM_BYTES],
                       const kvfi_record_key *key, const kvfi_addr *addr, const kvf_block *block,
                       const struct iovec *payload, size_t num_iov, uint16_t flags, int64_t stored_s) {
    size_t token_bytes = 4 * (size_t)num_tokens_of(block);
    kvfi_gcm gcm;
    kvfi_tokens_put(body, block->tokens, num_tokens_of(block));
    kvfi_sealed_header(head, key, addr, block, kvfi_iov_bytes(payload, num_iov), flags, stored_s);
    (void)kvfi_sealed_init(&gcm, key, head);
    kvfi_gcm_add(&gcm, body, body, token_bytes);
    body += token_bytes;
    for (size_t i = 0; i < num_iov; i++) {
        kvfi_gcm_add(&gcm, body, payload[i].iov_base, payload[i].iov_len);
        body += payload[i].iov_len;
    }
    return kvfi_gcm_end(&gcm, tag);
}

static kvf_reason unveil(kvfi_header *header, kvfi_record_key *key, const kvfi_secret *seal) {
    uint8_t bytes[8];
    memcpy(bytes, header->veiled, sizeof bytes);
    kvfi_record_key_of(key, seal, &header->addr, header->salt);
    veil(bytes, key);
    header->first_token = kvfi_get32(bytes);
    header->num_tokens = kvfi_get32(bytes + 4);
    if (header->num_tokens > KVFI_MAX_TOKENS || header->first_token > UINT32_MAX - header->num_tokens ||
        4 * (uint64_t)header->num_tokens > header->payload_bytes) {
        return KVF_WHY_CHECKSUM;
    }
    header->payload_bytes -= 4 * (uint64_t)header->num_tokens;
    header->raw_bytes = header->payload_bytes;
    return header->payload_bytes <= KVF_MAX_PAYLOAD_BYTES ? KVF_WHY_NONE : KVF_WHY_CHECKSUM;
}

kvf_reason kvfi_header_admit(kvfi_header *header, const kvfi_secret *seal) {
    kvfi_record_key key;
    if (header->codec != (seal != NULL ? KVFI_CODEC_SEALED : KVFI_CODEC_PLAIN)) {
        return KVF_WHY_VERSION; /* anybody may have written a plain record, and a sealed one can't be read */
    }
    kvf_reason why = seal != NULL ? unveil(header, &key, seal) : KVF_WHY_NONE;
    explicit_bzero(&key, sizeof key);
    return why;
}

static void wipe(const struct iovec *iov, size_t num) {
    for (size_t i = 0; i < num; i++) {
        if (iov[i].iov_len > 0) {
            memset(iov[i].iov_base, 0, iov[i].iov_len);
        }
    }
}

static kvf_reason open_pieces(uint8_t *head, uint8_t tag[KVFI_SUM_BYTES], const kvfi_record_key *key,
                              uint32_t num_tokens, const struct iovec *payload, size_t num_iov) {
    kvfi_gcm gcm;
    struct iovec tokens = {head + KVFI_HEADER_BYTES, 4 * (size_t)num_tokens};
    bool began = kvfi_gcm_begin(&gcm, true, key->key, head, KVFI_HEADER_SAYS);
    kvfi_gcm_add(&gcm, tokens.iov_base, tokens.iov_base, tokens.iov_len);
    for (size_t i = 0; i < num_iov; i++) {
        kvfi_gcm_add(&gcm, payload[i].iov_base, payload[i].iov_base, payload[i].iov_len);
    }
    if (kvfi_gcm_end(&gcm, tag)) {
        return KVF_WHY_NONE;
    }
    wipe(&tokens, 1);
    wipe(payload, num_iov);
    return began ? KVF_WHY_CHECKSUM : KVF_WHY_NOMEM;
}

kvf_reason kvfi_record_open(uint8_t *head, uint8_t tag[KVFI_SUM_BYTES], const kvfi_addr *addr, const kvf_block *block,
                            const struct iovec *payload, size_t num_iov, const kvfi_secret *seal) {
    kvfi_record_key key;
    kvfi_header header;
    kvf_reason why = kvfi_header_decode(&header, head);
    if (why == KVF_WHY_NONE && header.codec != KVFI_CODEC_SEALED) {
        why = KVF_WHY_VERSION;
    }
    if (why == KVF_WHY_NONE && memcmp(&header.addr, addr, sizeof *addr) != 0) {
        why = KVF_WHY_OTHER_SPACE;
    }
    if (why != KVF_WHY_NONE) {
        return why;
    }
    why = unveil(&header, &key, seal);
    if (why == KVF_WHY_NONE) {
        why = kvfi_header_matches(&header, addr, block);
    }
    if (why == KVF_WHY_NONE && kvfi_iov_bytes(payload, num_iov) != header.payload_bytes) {
        why = KVF_WHY_TRUNCATED;
    }
    if (why == KVF_WHY_NONE) {
        why = open_pieces(head, tag, &key, block->num_tokens, payload, num_iov);
    }
    if (why == KVF_WHY_NONE && !kvfi_tokens_same(head + KVFI_HEADER_BYTES, block)) {
        why = KVF_WHY_OTHER_TOKENS;
    }
    explicit_bzero(&key, sizeof key);
    return why;
}

kvf_reason kvfi_record_open_value(kvfi_header *header, const uint8_t **out_tokens, const uint8_t **out_payload,
                                  void *value, size_t len, const kvfi_secret *seal) {
    uint8_t *bytes = value;
    kvfi_record_key key;
    kvf_reason why = unveil(header, &key, seal);
    if (why == KVF_WHY_NONE) {
        struct iovec payload = {bytes + KVFI_HEAD_BYTES(header->num_tokens), (size_t)header->payload_bytes};
        why = open_pieces(bytes, bytes + len - KVFI_SUM_BYTES, &key, header->num_tokens, &payload, 1);
        *out_tokens = bytes + KVFI_HEADER_BYTES;
        *out_payload = payload.iov_base;
    }
    explicit_bzero(&key, sizeof key);
    return why;
}
