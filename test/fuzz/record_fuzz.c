/* SPDX-License-Identifier: Apache-2.0
 *
 * Fuzzes records, the meta of sessions, and sessions as values: no crash, no read past the end (the input is copied to
 * a block of its exact size), and whatever is accepted encodes to the same bytes again.
 */
#include <stdlib.h>

#include "record/record.h"
#include "session/session.h"

#define REQUIRE(what)  \
    do {               \
        if (!(what)) { \
            abort();   \
        }              \
    } while (0)

/* A fuzzer can't make a tag, whatever else it gets right. */
static void check_sealed(kvfi_header header, uint8_t *bytes, size_t len) {
    kvfi_secret secret, seal;
    const uint8_t *tokens = NULL, *payload = NULL;
    kvfi_secret_init(&secret, "a secret under which nothing was sealed", 39);
    kvfi_seal_init(&seal, &secret);
    REQUIRE(kvfi_record_open_value(&header, &tokens, &payload, bytes, len, &seal) == KVF_WHY_CHECKSUM);
}

static void check_record(uint8_t *bytes, size_t len) {
    kvfi_header header;
    const uint8_t *tokens = NULL, *payload = NULL;
    if (kvfi_record_parse(&header, &tokens, &payload, bytes, len) != KVF_WHY_NONE) {
        return;
    }
    uint8_t again[KVFI_HEADER_BYTES];
    kvfi_header_encode(again, &header);
    REQUIRE(memcmp(again, bytes, sizeof again) == 0);
    REQUIRE(tokens == bytes + KVFI_HEADER_BYTES && payload == tokens + 4 * (size_t)header.num_tokens);
    REQUIRE((size_t)(payload - bytes) + header.payload_bytes + KVFI_SUM_BYTES == len);
    if (header.codec == KVFI_CODEC_SEALED) {
        check_sealed(header, bytes, len);
        return;
    }

    /* What parses as a whole is also a hit for the block that it says it is. */
    uint32_t *ids = malloc(4 * (size_t)header.num_tokens + 1);
    for (uint32_t i = 0; i < header.num_tokens; i++) {
        ids[i] = kvfi_get32(tokens + 4 * (size_t)i);
    }
    kvf_block block = {.tokens = ids, .num_tokens = header.num_tokens, .first_token = header.first_token};
    struct iovec iov = {(void *)(uintptr_t)payload, (size_t)header.payload_bytes};
    REQUIRE(kvfi_record_check(bytes, bytes + len - KVFI_SUM_BYTES, &header.addr, &block, &iov, 1) == KVF_WHY_NONE);
    header.addr.key.bytes[0] ^= 1;
    REQUIRE(kvfi_record_check(bytes, bytes + len - KVFI_SUM_BYTES, &header.addr, &block, &iov, 1) ==
            KVF_WHY_OTHER_SPACE);
    free(ids);
}

/* Makes both checksums right, so that the fuzzer gets past them. */
static void mend(uint8_t *bytes, size_t len) {
    kvfi_xxh3 sum;
    size_t behind = len - KVFI_HEADER_BYTES - KVFI_SUM_BYTES;
    memcpy(bytes, "KVF2\x80", 6); /* with the NUL: header size 128 */
    if (kvfi_get32(bytes + 8) != KVFI_CODEC_SEALED) {
        memset(bytes + 108, 0, 16);
    }
    kvfi_put32(bytes + 124, kvfi_xxh32(bytes, 124));
    kvfi_record_sum_init(&sum, bytes);
    kvfi_xxh3_add(&sum, bytes + KVFI_HEADER_BYTES, behind);
    kvfi_xxh3_end(&sum, bytes + len - KVFI_SUM_BYTES);
}

static void check_meta(const uint8_t *bytes, size_t len) {
    kvfi_session_meta meta, again;
    if (kvfi_session_meta_decode(&meta, NULL, bytes, len) != KVF_OK) {
        return;
    }
    REQUIRE(meta.keys.bytes <= KVFI_MAX_ARRAY_BYTES && meta.values.bytes <= KVFI_MAX_ARRAY_BYTES);
    uint8_t *text = NULL;
    size_t text_len = 0;
    REQUIRE(kvfi_session_meta_encode(&text, &text_len, NULL, &meta, 0, 64) == KVF_OK);
    REQUIRE(kvfi_session_meta_decode(&again, NULL, text, text_len) == KVF_OK);
    REQUIRE(again.keys.bytes == meta.keys.bytes && again.part_bytes == meta.part_bytes &&
            memcmp(again.values.xxh3, meta.values.xxh3, 16) == 0);
    kvfi_free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    char id[KVF_MAX_ID_BYTES + 1];
    int64_t expires_s = 0;
    uint8_t *copy = malloc(len + (len == 0));
    if (len > 0) {
        memcpy(copy, data, len);
    }
    check_record(copy, len);
    check_meta(copy, len);
    (void)kvfi_session_value_id(id, &expires_s, copy, len);
    if (len >= KVFI_HEADER_BYTES + KVFI_SUM_BYTES) {
        mend(copy, len);
        check_record(copy, len);
    }
    free(copy);
    return 0;
}
