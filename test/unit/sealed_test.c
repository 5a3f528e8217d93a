/* SPDX-License-Identifier: Apache-2.0
 *
 * [T:sealed] Sealed records: the golden one, and that nothing opens but the record itself, at its address, under its
 * secret. A record that is sealed piece by piece is the same, also if its sender leaves half-way.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "record/record.h"
#include "record/space.h"
#include "support/golden.h"
#include "support/kit.h"
#include "tier/finish.h"

#define NUM_TOKENS   16u
#define BODY_BYTES   (4 * NUM_TOKENS + KVFT_GOLDEN_PAYLOAD)
#define RECORD_BYTES (KVFI_HEADER_BYTES + BODY_BYTES + KVFI_SUM_BYTES)
#define TAG_AT       (RECORD_BYTES - KVFI_SUM_BYTES)

/* The record of the golden file, its payload in three pieces as an engine has it. */
typedef struct sample {
    kvfi_identity identity;
    kvfi_addr addr;
    kvf_key key;
    uint32_t tokens[40];
    kvf_block block;
    uint8_t payload[KVFT_GOLDEN_PAYLOAD];
    struct iovec iov[3];
    uint8_t record[RECORD_BYTES];
} sample;

static void open_identity(kvfi_identity *out, const char *secret) {
    const kvf_field fields[] = KVFT_GOLDEN_FIELDS;
    kvf_space_options options = {.struct_size = sizeof options, .block_tokens = 16, .secret = secret};
    options.secret_len = secret == NULL ? 0 : strlen(secret);
    assert_int_equal(kvfi_identity_init(out, NULL, fields, 4, &options), KVF_OK);
}

static void write_record(sample *s, uint8_t salt_from) {
    uint8_t salt[KVFI_SALT_BYTES];
    kvfi_record_key key;
    for (size_t i = 0; i < sizeof salt; i++) {
        salt[i] = (uint8_t)(salt_from + i);
    }
    kvfi_record_key_of(&key, kvfi_seal_of(&s->identity), &s->addr, salt);
    assert_true(kvfi_sealed_write(s->record, s->record + KVFI_HEADER_BYTES, s->record + TAG_AT, &key, &s->addr,
                                  &s->block, s->iov, 3, 0, KVFT_GOLDEN_STORED));
}

static void sample_init(sample *s) {
    kvf_key keys[2];
    memset(s, 0, sizeof *s);
    open_identity(&s->identity, KVFT_GOLDEN_SECRET);
    kvft_golden_tokens(s->tokens);
    kvft_golden_payload(s->payload);
    kvfi_chain(&s->identity, keys, 2, s->tokens, 40, NULL);
    s->key = keys[1];
    kvfi_address(&s->addr, &s->identity, &s->key);
    s->block = (kvf_block){.tokens = s->tokens + 16, .num_tokens = NUM_TOKENS, .first_token = 16};
    s->iov[0] = (struct iovec){s->payload, 1};
    s->iov[1] = (struct iovec){s->payload + 1, 500};
    s->iov[2] = (struct iovec){s->payload + 501, KVFT_GOLDEN_PAYLOAD - 501};
    write_record(s, 0x50);
}

/* Opens a copy of the record into `out`, as a load does, its payload in pieces. */
static kvf_reason open_into(const sample *s, const uint8_t *record, uint8_t out[RECORD_BYTES]) {
    memcpy(out, record, RECORD_BYTES);
    uint8_t *payload = out + KVFI_HEAD_BYTES(NUM_TOKENS);
    struct iovec iov[3] = {{payload, 7}, {payload + 7, 0}, {payload + 7, KVFT_GOLDEN_PAYLOAD - 7}};
    return kvfi_record_open(out, out + TAG_AT, &s->addr, &s->block, iov, 3, kvfi_seal_of(&s->identity));
}

static kvf_reason opens(const sample *s, const uint8_t *record) {
    uint8_t out[RECORD_BYTES];
    return open_into(s, record, out);
}

static void golden_file(void **state) {
    (void)state;
    sample s;
    uint8_t file[2 * RECORD_BYTES], out[RECORD_BYTES], golden[32];
    kvfi_record_key key;
    sample_init(&s);
    assert_int_equal(kvft_golden_file("sealed-v2.bin", file, sizeof file), RECORD_BYTES);
    assert_memory_equal(s.record, file, RECORD_BYTES);
    assert_int_equal(open_into(&s, file, out), KVF_WHY_NONE);
    assert_memory_equal(out + KVFI_HEAD_BYTES(NUM_TOKENS), s.payload, KVFT_GOLDEN_PAYLOAD);
    assert_memory_equal(out + KVFI_HEADER_BYTES, s.block.tokens, 4 * NUM_TOKENS);
    kvfi_record_key_of(&key, kvfi_seal_of(&s.identity), &s.addr, s.record + 108);
    kvft_golden_vector("record_key keyed 1", golden);
    assert_memory_equal(key.key, golden, 32);
    kvfi_identity_cleanup(&s.identity);
}

/* ---- piece by piece, as it is sent (tier/finish.h) */

typedef struct pieces {
    uint8_t clear[RECORD_BYTES], record[RECORD_BYTES]; /* the same memory is used for both if it is sealed in place */
    struct iovec clear_iov[3], iov;
    kvfi_record_key key;
    kvfi_item item;
} pieces;

/* The header as it will be sent, and the rest in the clear. */
static void begin_pieces(pieces *p, const sample *s, bool in_place) {
    uint8_t *clear = in_place ? p->record : p->clear;
    memset(p, 0, sizeof *p);
    kvfi_record_key_of(&p->key, kvfi_seal_of(&s->identity), &s->addr, s->record + 108);
    kvfi_sealed_header(p->record, &p->key, &s->addr, &s->block, KVFT_GOLDEN_PAYLOAD, 0, KVFT_GOLDEN_STORED);
    memcpy(clear + KVFI_HEADER_BYTES, s->block.tokens, 4 * NUM_TOKENS);
    memcpy(clear + KVFI_HEAD_BYTES(NUM_TOKENS), s->payload, KVFT_GOLDEN_PAYLOAD);
    p->iov = (struct iovec){p->record, RECORD_BYTES};
    p->clear_iov[0] = (struct iovec){clear, KVFI_HEADER_BYTES + 1};
    p->clear_iov[1] = (struct iovec){clear + KVFI_HEADER_BYTES + 1, 700};
    p->clear_iov[2] = (struct iovec){clear + KVFI_HEADER_BYTES + 701, RECORD_BYTES - KVFI_HEADER_BYTES - 701};
    p->item =
        (kvfi_item){.iov = &p->iov, .num_iov = 1, .bytes = RECORD_BYTES, .unfinished = true, .record_key = &p->key};
    if (!in_place) {
        p->item.clear = p->clear_iov;
        p->item.num_clear = 3;
    }
}

/* In steps of any length, in place or into other memory: the same bytes as at once, each before it may be sent. */
static void in_pieces(void **state) {
    (void)state;
    sample s;
    pieces p;
    sample_init(&s);
    for (size_t step = 1; step < 2 * RECORD_BYTES; step += step < 300 ? 1 : 97) {
        kvfi_finish finish;
        size_t sent = 0;
        begin_pieces(&p, &s, step % 2 == 0);
        assert_true(kvfi_finish_begin(&finish, &p.item));
        while (sent < RECORD_BYTES) {
            size_t num = kvfi_finish_next(&finish, step);
            assert_in_range(num, 1, step);
            assert_memory_equal(p.record + sent, s.record + sent, num);
            sent += num;
            assert_int_equal(p.item.unfinished, sent <= RECORD_BYTES - KVFI_SUM_BYTES);
        }
        assert_int_equal(kvfi_finish_next(&finish, step), 0);
        kvfi_finish_leave(&finish, true);
        assert_memory_equal(p.record, s.record, RECORD_BYTES);
    }
    kvfi_identity_cleanup(&s.identity);
}

/* Its connection ends anywhere: it is whole then, and can be sent again. A second key stream over the same bytes would
 * give them back in the clear. */
static void left_half_way(void **state) {
    (void)state;
    sample s;
    pieces p;
    sample_init(&s);
    for (size_t sent = 0; sent <= RECORD_BYTES; sent++) {
        kvfi_finish finish;
        begin_pieces(&p, &s, sent % 2 == 0);
        assert_true(kvfi_finish_begin(&finish, &p.item));
        assert_int_equal(kvfi_finish_next(&finish, sent), sent);
        kvfi_finish_leave(&finish, true);
        assert_false(p.item.unfinished);
        assert_memory_equal(p.record, s.record, RECORD_BYTES);
        kvfi_finish_leave(&finish, true); /* nothing */
        assert_memory_equal(p.record, s.record, RECORD_BYTES);
    }
    kvfi_identity_cleanup(&s.identity);
}

/* Nobody wants it any more: no time is spent on the rest of it, and it can't be taken for a whole one. */
static void dropped_half_way(void **state) {
    (void)state;
    sample s;
    pieces p;
    kvfi_finish finish;
    sample_init(&s);
    begin_pieces(&p, &s, false);
    memset(p.record + 500, 0, RECORD_BYTES - 500);
    assert_true(kvfi_finish_begin(&finish, &p.item));
    assert_int_equal(kvfi_finish_next(&finish, 500), 500);
    kvfi_finish_leave(&finish, false);
    assert_true(p.item.unfinished);
    assert_null(finish.gcm.ctx);
    for (size_t i = 500; i < RECORD_BYTES; i++) {
        assert_int_equal(p.record[i], 0);
    }
    kvfi_identity_cleanup(&s.identity);
}

/* Nothing is released to be sent that could be in the clear. */
static void sealing_fails(void **state) {
    (void)state;
    sample s;
    pieces p;
    kvfi_finish finish;
    sample_init(&s);
    begin_pieces(&p, &s, true);
    assert_true(kvfi_finish_begin(&finish, &p.item));
    assert_int_equal(kvfi_finish_next(&finish, 200), 200);
    finish.gcm.failed = true;
    assert_int_equal(kvfi_finish_next(&finish, 200), 0);
    kvfi_finish_leave(&finish, true);
    assert_true(p.item.unfinished);
    assert_null(finish.gcm.ctx);
    kvfi_identity_cleanup(&s.identity);
}

/* Each bit of a record counts; a header that was changed by somebody has its check made right again. What does not open
 * is not left behind in the clear either. */
static void every_bit_flipped(void **state) {
    (void)state;
    sample s;
    uint8_t changed[RECORD_BYTES], out[RECORD_BYTES];
    sample_init(&s);
    for (size_t bit = 0; bit < 8 * RECORD_BYTES; bit++) {
        memcpy(changed, s.record, sizeof changed);
        changed[bit / 8] ^= (uint8_t)(1u << bit % 8);
        kvf_reason why = open_into(&s, changed, out);
        assert_int_not_equal(why, KVF_WHY_NONE);
        assert_memory_not_equal(out + KVFI_HEAD_BYTES(NUM_TOKENS), s.payload, 64);
        if (bit / 8 < 124) {
            kvfi_put32(changed + 124, kvfi_xxh32(changed, 124));
            assert_int_not_equal(open_into(&s, changed, out), KVF_WHY_NONE);
            assert_memory_not_equal(out + KVFI_HEAD_BYTES(NUM_TOKENS), s.payload, 64);
        }
    }
    kvfi_identity_cleanup(&s.identity);
}

static void what_fails_is_wiped(void **state) {
    (void)state;
    static const uint8_t zeros[BODY_BYTES];
    sample s;
    uint8_t out[RECORD_BYTES];
    sample_init(&s);
    s.record[TAG_AT] ^= 1;
    assert_int_equal(open_into(&s, s.record, out), KVF_WHY_CHECKSUM);
    assert_memory_equal(out + KVFI_HEADER_BYTES, zeros, BODY_BYTES);
    kvfi_identity_cleanup(&s.identity);
}

/* Swapped, moved, sealed by somebody else, or asked for as another block. */
static void only_at_its_place(void **state) {
    (void)state;
    sample s, other;
    sample_init(&s);
    sample_init(&other);
    assert_int_equal(opens(&s, s.record), KVF_WHY_NONE);
    other.addr.key.bytes[31] ^= 1; /* the record of another key */
    write_record(&other, 0x50);
    assert_int_equal(opens(&other, other.record), KVF_WHY_NONE);
    assert_int_equal(opens(&s, other.record), KVF_WHY_OTHER_SPACE);
    memcpy(other.record + 44, s.record + 44, 32); /* ... that says it is of this one */
    kvfi_put32(other.record + 124, kvfi_xxh32(other.record, 124));
    assert_int_not_equal(opens(&s, other.record), KVF_WHY_NONE);
    memcpy(other.record, s.record, KVFI_HEADER_BYTES); /* ... with its header */
    assert_int_equal(opens(&s, other.record), KVF_WHY_CHECKSUM);
    write_record(&other, 0x60); /* an earlier writing of the same block, mixed with this one */
    memcpy(other.record, s.record, KVFI_HEADER_BYTES + 100);
    assert_int_equal(opens(&s, other.record), KVF_WHY_CHECKSUM);
    s.block.first_token = 0;
    assert_int_equal(opens(&s, s.record), KVF_WHY_OTHER_TOKENS);
    s.block.first_token = 16;
    s.tokens[20]++;
    assert_int_equal(opens(&s, s.record), KVF_WHY_OTHER_TOKENS);
    kvfi_identity_cleanup(&s.identity);
    kvfi_identity_cleanup(&other.identity);
}

static void another_secret(void **state) {
    (void)state;
    sample s;
    sample_init(&s);
    kvfi_identity_cleanup(&s.identity);
    open_identity(&s.identity, "another tenant's secret");
    assert_int_not_equal(opens(&s, s.record), KVF_WHY_NONE);
    kvfi_identity_cleanup(&s.identity);
}

/* [T:no-downgrade] A plain record where records are sealed could be anybody's. */
static void plain_and_sealed(void **state) {
    (void)state;
    sample s;
    uint8_t plain[RECORD_BYTES];
    sample_init(&s);
    kvfi_record_seal(plain, plain + TAG_AT, &s.addr, &s.block, s.iov, 3, 0, KVFT_GOLDEN_STORED);
    memcpy(plain + KVFI_HEAD_BYTES(NUM_TOKENS), s.payload, KVFT_GOLDEN_PAYLOAD);
    struct iovec iov = {plain + KVFI_HEAD_BYTES(NUM_TOKENS), KVFT_GOLDEN_PAYLOAD};
    assert_int_equal(kvfi_record_check(plain, plain + TAG_AT, &s.addr, &s.block, &iov, 1), KVF_WHY_NONE);
    assert_int_equal(opens(&s, plain), KVF_WHY_VERSION);
    iov.iov_base = s.record + KVFI_HEAD_BYTES(NUM_TOKENS);
    assert_int_equal(kvfi_record_check(s.record, s.record + TAG_AT, &s.addr, &s.block, &iov, 1), KVF_WHY_VERSION);
    s.block.num_tokens = 0; /* as its header seems to say */
    s.block.first_token = 0;
    iov = (struct iovec){s.record + KVFI_HEADER_BYTES, BODY_BYTES};
    assert_int_equal(kvfi_record_check(s.record, s.record + TAG_AT, &s.addr, &s.block, &iov, 1), KVF_WHY_VERSION);
    kvfi_identity_cleanup(&s.identity);
}

/* What can be read without the secret: lengths, and when. */
static void header_hides_positions(void **state) {
    (void)state;
    sample s;
    kvfi_header header;
    const uint8_t *tokens = NULL, *payload = NULL;
    sample_init(&s);
    assert_int_equal(kvfi_record_parse(&header, &tokens, &payload, s.record, RECORD_BYTES), KVF_WHY_NONE);
    assert_int_equal(header.codec, KVFI_CODEC_SEALED);
    assert_int_equal(header.num_tokens, 0);
    assert_int_equal(header.first_token, 0);
    assert_int_equal(header.payload_bytes, BODY_BYTES);
    assert_int_equal(kvfi_record_bytes(&header), RECORD_BYTES);
    assert_int_equal(kvfi_header_admit(&header, NULL), KVF_WHY_VERSION);
    kvfi_header mine = header;
    assert_int_equal(kvfi_header_admit(&mine, kvfi_seal_of(&s.identity)), KVF_WHY_NONE);
    assert_int_equal(mine.num_tokens, NUM_TOKENS);
    assert_int_equal(mine.first_token, 16);
    assert_int_equal(mine.payload_bytes, KVFT_GOLDEN_PAYLOAD);
    write_record(&s, 0x60);
    assert_memory_not_equal(s.record + 76, header.veiled, 8);
    kvfi_identity_cleanup(&s.identity);
}

static void a_whole_value(void **state) {
    (void)state;
    sample s;
    kvfi_header header;
    const uint8_t *tokens = NULL, *payload = NULL;
    sample_init(&s);
    assert_int_equal(kvfi_record_parse(&header, &tokens, &payload, s.record, RECORD_BYTES), KVF_WHY_NONE);
    assert_int_equal(
        kvfi_record_open_value(&header, &tokens, &payload, s.record, RECORD_BYTES, kvfi_seal_of(&s.identity)),
        KVF_WHY_NONE);
    assert_int_equal(header.num_tokens, NUM_TOKENS);
    assert_memory_equal(tokens, s.block.tokens, 4 * NUM_TOKENS);
    assert_memory_equal(payload, s.payload, KVFT_GOLDEN_PAYLOAD);
    kvfi_identity_cleanup(&s.identity);
}

/* ---- a child that is forked while others seal */

static atomic_bool enough;

static bool seal_once(void) {
    static const uint8_t key[32] = {1};
    kvfi_gcm gcm;
    uint8_t tag[16], bytes[64] = {0};
    (void)kvfi_gcm_begin(&gcm, false, key, "aad", 3);
    kvfi_gcm_add(&gcm, bytes, bytes, sizeof bytes);
    return kvfi_gcm_end(&gcm, tag);
}

static void *seal_all_the_time(void *arg) {
    (void)arg;
    while (!atomic_load(&enough)) {
        (void)seal_once();
    }
    return NULL;
}

static void a_child_seals(void **state) {
    (void)state;
    enum { THREADS = 4, FORKS = 50, SECONDS = 20 };
    pthread_t threads[THREADS];
    atomic_store(&enough, false);
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, seal_all_the_time, NULL), 0);
    }
    bool all = true;
    for (int i = 0; i < FORKS && all; i++) {
        int status = -1;
        pid_t child = fork();
        if (child == 0) {
            alarm(SECONDS); /* ends one that waits for ever */
            kvft_exit(seal_once() ? 0 : 1);
        }
        all = child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }
    atomic_store(&enough, true);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    assert_true(all);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_file),
        cmocka_unit_test(in_pieces),
        cmocka_unit_test(left_half_way),
        cmocka_unit_test(dropped_half_way),
        cmocka_unit_test(sealing_fails),
        cmocka_unit_test(every_bit_flipped),
        cmocka_unit_test(what_fails_is_wiped),
        cmocka_unit_test(only_at_its_place),
        cmocka_unit_test(another_secret),
        cmocka_unit_test(plain_and_sealed),
        cmocka_unit_test(header_hides_positions),
        cmocka_unit_test(a_whole_value),
        cmocka_unit_test(a_child_seals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
