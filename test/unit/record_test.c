/* SPDX-License-Identifier: Apache-2.0
 *
 * The record: the golden file byte for byte, every bit flipped, every length cut, and every way in which a record
 * differs from the requested one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "record/record.h"
#include "support/golden.h"

#define NUM_TOKENS   16u
#define RECORD_BYTES (KVFI_HEAD_BYTES(NUM_TOKENS) + KVFT_GOLDEN_PAYLOAD + KVFI_SUM_BYTES)
#define SUM_AT       (RECORD_BYTES - KVFI_SUM_BYTES)

/* The block of the golden record, and the record as we write it. */
typedef struct sample {
    uint32_t tokens[40];
    uint8_t payload[KVFT_GOLDEN_PAYLOAD];
    struct iovec iov[3]; /* the payload, cut in three */
    kvfi_addr addr;
    kvf_block block;
    uint8_t record[RECORD_BYTES];
} sample;

static void sample_init(sample *s) {
    memset(s, 0, sizeof *s);
    kvft_golden_tokens(s->tokens);
    kvft_golden_payload(s->payload);
    s->iov[0] = (struct iovec){s->payload, 1};
    s->iov[1] = (struct iovec){s->payload + 1, 500};
    s->iov[2] = (struct iovec){s->payload + 501, KVFT_GOLDEN_PAYLOAD - 501};
    kvft_golden_vector("digest plain", s->addr.space.bytes);
    kvft_golden_vector("chain plain 1", s->addr.key.bytes);
    s->block = (kvf_block){.key = s->addr.key, .tokens = s->tokens + 16, .num_tokens = NUM_TOKENS, .first_token = 16};
    kvfi_record_seal(s->record, s->record + SUM_AT, &s->addr, &s->block, s->iov, 3, 0, KVFT_GOLDEN_STORED);
    memcpy(s->record + KVFI_HEAD_BYTES(NUM_TOKENS), s->payload, sizeof s->payload);
}

/* Checks the sample's record in place, payload as one piece. */
static kvf_reason check(sample *s) {
    struct iovec iov = {s->record + KVFI_HEAD_BYTES(NUM_TOKENS), KVFT_GOLDEN_PAYLOAD};
    return kvfi_record_check(s->record, s->record + SUM_AT, &s->addr, &s->block, &iov, 1);
}

static kvf_reason parse(const uint8_t *bytes, size_t len) {
    kvfi_header header;
    const uint8_t *tokens = NULL, *payload = NULL;
    return kvfi_record_parse(&header, &tokens, &payload, bytes, len);
}

static void golden_file(void **state) {
    (void)state;
    sample s;
    uint8_t golden[2 * RECORD_BYTES];
    sample_init(&s);
    assert_int_equal(kvft_golden_file("record-v2.bin", golden, sizeof golden), RECORD_BYTES);
    assert_memory_equal(s.record, golden, RECORD_BYTES);
    memcpy(s.record, golden, RECORD_BYTES);
    assert_int_equal(check(&s), KVF_WHY_NONE);
}

static void parse_gives_all_back(void **state) {
    (void)state;
    sample s;
    kvfi_header header;
    const uint8_t *tokens = NULL, *payload = NULL;
    sample_init(&s);
    assert_int_equal(kvfi_record_parse(&header, &tokens, &payload, s.record, RECORD_BYTES), KVF_WHY_NONE);
    assert_int_equal(header.flags, 0);
    assert_int_equal(header.codec, 0);
    assert_int_equal(header.first_token, 16);
    assert_int_equal(header.num_tokens, NUM_TOKENS);
    assert_int_equal(header.payload_bytes, KVFT_GOLDEN_PAYLOAD);
    assert_int_equal(header.raw_bytes, KVFT_GOLDEN_PAYLOAD);
    assert_int_equal(header.stored_s, KVFT_GOLDEN_STORED);
    assert_memory_equal(&header.addr, &s.addr, sizeof s.addr);
    assert_ptr_equal(tokens, s.record + 128);
    assert_ptr_equal(payload, s.record + KVFI_HEAD_BYTES(NUM_TOKENS));
    assert_int_equal(kvfi_get32(tokens), s.tokens[16]);
}

/* [T:exact-or-miss] No flipped bit of a record is ever a hit. */
static void every_bit_flipped(void **state) {
    (void)state;
    sample s;
    sample_init(&s);
    for (size_t bit = 0; bit < 8 * RECORD_BYTES; bit++) {
        s.record[bit / 8] ^= (uint8_t)(1u << bit % 8);
        kvf_reason why = check(&s);
        kvf_reason parsed = parse(s.record, RECORD_BYTES);
        assert_int_not_equal(why, KVF_WHY_NONE);
        if (bit / 8 < 6) {
            assert_int_equal(why, KVF_WHY_VERSION);
        } else { /* of a token too: it is damage, not another prompt */
            assert_int_equal(why, KVF_WHY_CHECKSUM);
            assert_int_equal(parsed, KVF_WHY_CHECKSUM);
        }
        s.record[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    assert_int_equal(check(&s), KVF_WHY_NONE);
}

static void every_length_cut(void **state) {
    (void)state;
    sample s;
    sample_init(&s);
    for (size_t len = 0; len < RECORD_BYTES; len++) {
        uint8_t *copy = malloc(len + (len == 0)); /* on the heap, so that a sanitizer sees a read behind its end */
        memcpy(copy, s.record, len);
        assert_int_equal(parse(copy, len), len < 4 ? KVF_WHY_VERSION : KVF_WHY_TRUNCATED);
        free(copy);
    }
    uint8_t *more = calloc(1, RECORD_BYTES + 1);
    memcpy(more, s.record, RECORD_BYTES);
    assert_int_equal(parse(more, RECORD_BYTES + 1), KVF_WHY_TRUNCATED);
    free(more);
    struct iovec iov = {s.payload, KVFT_GOLDEN_PAYLOAD - 1};
    assert_int_equal(kvfi_record_check(s.record, s.record + SUM_AT, &s.addr, &s.block, &iov, 1), KVF_WHY_TRUNCATED);
}

static void not_the_one_that_was_asked_for(void **state) {
    (void)state;
    sample s;
    sample_init(&s);
    s.addr.space.bytes[31] ^= 1;
    assert_int_equal(check(&s), KVF_WHY_OTHER_SPACE);
    sample_init(&s);
    s.addr.key.bytes[0] ^= 1;
    assert_int_equal(check(&s), KVF_WHY_OTHER_SPACE);
    sample_init(&s);
    s.tokens[31] ^= 1;
    assert_int_equal(check(&s), KVF_WHY_OTHER_TOKENS);
    sample_init(&s);
    s.block.num_tokens = 8;
    assert_int_equal(check(&s), KVF_WHY_OTHER_TOKENS);
    sample_init(&s);
    s.block.first_token = 0;
    assert_int_equal(check(&s), KVF_WHY_OTHER_TOKENS);
    sample_init(&s);
    s.block.tokens = NULL; /* the key names them */
    assert_int_equal(check(&s), KVF_WHY_NONE);
    s.block.first_token = 0; /* it may not be known either */
    assert_int_equal(check(&s), KVF_WHY_NONE);
    s.block.first_token = 8;
    assert_int_equal(check(&s), KVF_WHY_OTHER_TOKENS);
    s.block.first_token = 16;
    s.block.num_tokens = 8; /* where the payload begins is not where it was taken to */
    assert_int_equal(check(&s), KVF_WHY_TRUNCATED);
}

static void without_tokens(void **state) {
    (void)state;
    sample s;
    uint8_t head[KVFI_HEADER_BYTES + KVFI_SUM_BYTES], *sum = head + KVFI_HEADER_BYTES;
    sample_init(&s);
    kvf_block block = {.num_tokens = 16, .first_token = 5}; /* num_tokens without tokens counts as 0 */
    kvfi_record_seal(head, sum, &s.addr, &block, s.iov, 3, KVFI_FLAG_CARD, 1);
    block.num_tokens = 0;
    assert_int_equal(kvfi_record_check(head, sum, &s.addr, &block, s.iov, 3), KVF_WHY_NONE);
    /* An empty payload is a payload. */
    kvfi_record_seal(head, sum, &s.addr, &block, NULL, 0, 0, -1);
    assert_int_equal(kvfi_record_check(head, sum, &s.addr, &block, NULL, 0), KVF_WHY_NONE);
    assert_int_equal(parse(head, sizeof head), KVF_WHY_NONE);
}

/* A header of ours with one field changed and its check made right again: what another version, or an attacker, could
 * write. */
static kvf_reason decode_changed(void (*change)(kvfi_header *)) {
    uint8_t bytes[KVFI_HEADER_BYTES];
    kvfi_header header = {.num_tokens = 16, .payload_bytes = 1000, .raw_bytes = 1000};
    change(&header);
    kvfi_header_encode(bytes, &header);
    return kvfi_header_decode(&header, bytes);
}

static void change_nothing(kvfi_header *h) {
    (void)h;
}
static void change_flags(kvfi_header *h) {
    h->flags = 0x8000;
}
static void change_codec(kvfi_header *h) {
    h->codec = 2;
}
static void change_raw(kvfi_header *h) {
    h->raw_bytes = 2000;
}
static void change_tokens(kvfi_header *h) {
    h->num_tokens = KVFI_MAX_TOKENS + 1;
}
static void change_first(kvfi_header *h) {
    h->first_token = UINT32_MAX;
}
static void change_bytes(kvfi_header *h) {
    h->payload_bytes = h->raw_bytes = KVF_MAX_PAYLOAD_BYTES + 1;
}
static void change_huge(kvfi_header *h) {
    h->payload_bytes = h->raw_bytes = UINT64_MAX;
}
static void change_to_bounds(kvfi_header *h) {
    h->payload_bytes = h->raw_bytes = KVF_MAX_PAYLOAD_BYTES;
    h->num_tokens = KVFI_MAX_TOKENS;
    h->first_token = UINT32_MAX - KVFI_MAX_TOKENS;
    h->stored_s = INT64_MIN;
    h->flags = KVFI_FLAG_CARD;
}

static void bounds(void **state) {
    (void)state;
    assert_int_equal(decode_changed(change_nothing), KVF_WHY_NONE);
    assert_int_equal(decode_changed(change_to_bounds), KVF_WHY_NONE);
    assert_int_equal(decode_changed(change_flags), KVF_WHY_VERSION);
    assert_int_equal(decode_changed(change_codec), KVF_WHY_VERSION);
    assert_int_equal(decode_changed(change_raw), KVF_WHY_VERSION);
    assert_int_equal(decode_changed(change_tokens), KVF_WHY_VERSION);
    assert_int_equal(decode_changed(change_first), KVF_WHY_VERSION);
    assert_int_equal(decode_changed(change_bytes), KVF_WHY_VERSION);
    assert_int_equal(decode_changed(change_huge), KVF_WHY_VERSION);
}

static void not_a_record(void **state) {
    (void)state;
    static uint8_t text[200] = "this is something else altogether, and no record of ours";
    kvfi_header header;
    assert_int_equal(parse(text, sizeof text), KVF_WHY_VERSION);
    assert_int_equal(parse(text, 10), KVF_WHY_VERSION);
    assert_int_equal(kvfi_header_decode(&header, text), KVF_WHY_VERSION);
    memcpy(text, "KVF3", 4);
    assert_int_equal(parse(text, sizeof text), KVF_WHY_VERSION);
}

/* Version 1 had its checksum in the header, and no end. Its records are misses, and so is whatever fills the room that
 * is left for later. */
static void another_version(void **state) {
    (void)state;
    sample s;
    sample_init(&s);
    memcpy(s.record, "KVF1", 4);
    kvfi_put32(s.record + 124, kvfi_xxh32(s.record, 124));
    assert_int_equal(check(&s), KVF_WHY_VERSION);
    uint8_t old[2 * RECORD_BYTES];
    size_t len = kvft_golden_file("record-v1.bin", old, sizeof old);
    assert_int_equal(len, SUM_AT);
    assert_int_equal(parse(old, len), KVF_WHY_VERSION);
    for (size_t i = 108; i < 124; i++) {
        sample_init(&s);
        s.record[i] = 1;
        kvfi_put32(s.record + 124, kvfi_xxh32(s.record, 124));
        assert_int_equal(check(&s), KVF_WHY_VERSION);
        assert_int_equal(parse(s.record, RECORD_BYTES), KVF_WHY_VERSION);
    }
}

/* [T:exact-or-miss] Body and end of one record behind the header of another are never a hit, whatever they have in
 * common. */
static void ends_do_not_mix(void **state) {
    (void)state;
    sample a, b;
    sample_init(&a);
    for (int i = 0; i < 3; i++) {
        sample_init(&b);
        b.addr.key.bytes[5] ^= (uint8_t)(i == 0);
        b.addr.space.bytes[9] ^= (uint8_t)(i == 1);
        b.block.first_token += i == 2;
        kvfi_record_seal(b.record, b.record + SUM_AT, &b.addr, &b.block, b.iov, 3, 0, KVFT_GOLDEN_STORED);
        assert_int_equal(check(&b), KVF_WHY_NONE);
        memcpy(b.record + KVFI_HEADER_BYTES, a.record + KVFI_HEADER_BYTES, RECORD_BYTES - KVFI_HEADER_BYTES);
        assert_int_equal(check(&b), KVF_WHY_CHECKSUM);
        assert_int_equal(parse(b.record, RECORD_BYTES), KVF_WHY_CHECKSUM);
    }
    /* The time of storing is the one thing that may differ. */
    sample_init(&b);
    kvfi_record_seal(b.record, b.record + SUM_AT, &b.addr, &b.block, b.iov, 3, 0, 1);
    assert_memory_equal(a.record + SUM_AT, b.record + SUM_AT, KVFI_SUM_BYTES);
}

static void other_names(void **state) {
    (void)state;
    kvf_digest digest;
    uint8_t golden[32];
    kvf_key key;
    kvft_golden_vector("digest plain", digest.bytes);
    kvft_golden_vector("card_key plain", golden);
    kvfi_card_key(&key, &digest);
    assert_memory_equal(key.bytes, golden, 32);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_file),
        cmocka_unit_test(parse_gives_all_back),
        cmocka_unit_test(every_bit_flipped),
        cmocka_unit_test(every_length_cut),
        cmocka_unit_test(without_tokens),
        cmocka_unit_test(not_the_one_that_was_asked_for),
        cmocka_unit_test(bounds),
        cmocka_unit_test(not_a_record),
        cmocka_unit_test(another_version),
        cmocka_unit_test(ends_do_not_mix),
        cmocka_unit_test(other_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
