/* SPDX-License-Identifier: Apache-2.0
 *
 * How a value is divided into keys (redis/cluster/key.h), and how its checksum is computed while it is sent
 * (tier/finish.h). What becomes of the parts that were under way when their connection ended (redis/blocks/ring.h).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "redis/blocks/ring.h"
#include "redis/cluster/key.h"
#include "support/kit.h"
#include "tier/finish.h"

/* As long as they are together, none is empty or too long, the first has the header whole, and all between it and the
 * last have the full length. */
static void check_parts(uint64_t bytes, uint64_t part_bytes) {
    uint64_t num = kvfi_num_parts(bytes, part_bytes), sum = 0;
    for (uint64_t part = 0; part < num; part++) {
        uint64_t len = kvfi_part_len(bytes, part_bytes, part);
        assert_in_range(len, part == 0 && num > 1 ? KVFI_HEADER_BYTES : 1, part_bytes);
        assert_true(part == 0 || part + 1 == num || len == part_bytes);
        sum += len;
    }
    assert_int_equal(sum, bytes);
}

static void parts(void **state) {
    (void)state;
    uint64_t seed = 1;
    for (uint64_t part_bytes = 4096; part_bytes <= 12288; part_bytes += 4096) {
        for (uint64_t bytes = KVFI_HEADER_BYTES + KVFI_SUM_BYTES; bytes <= 5 * part_bytes; bytes++) {
            check_parts(bytes, part_bytes);
        }
    }
    for (unsigned i = 0; i < 1000; i++) {
        check_parts(1000 + kvft_random(&seed) % ((uint64_t)1 << 33), (1 + kvft_random(&seed) % 4096) << 12);
    }
    /* 4 MiB and what a record adds to it, by default: a small one, and a whole one that is hashed as it goes */
    assert_int_equal(kvfi_num_parts((4 << 20) + 1168, 4190208), 2);
    assert_int_equal(kvfi_part_len((4 << 20) + 1168, 4190208, 0), 5264);
    assert_int_equal(kvfi_part_len((4 << 20) + 1168, 4190208, 1), 4190208);
    /* what is left over is less than a header: the last one has less */
    assert_int_equal(kvfi_part_len(8192 + 1, 4096, 0), KVFI_HEADER_BYTES);
    assert_int_equal(kvfi_part_len(8192 + 1, 4096, 1), 4096);
    assert_int_equal(kvfi_part_len(8192 + 1, 4096, 2), 4097 - KVFI_HEADER_BYTES);
}

/* A record of header, tokens, payload and checksum in one buffer, cut into iovecs. */
#define PAYLOAD 5000u
#define BYTES   (KVFI_HEADER_BYTES + 64u + PAYLOAD + KVFI_SUM_BYTES)

static void prepare(kvfi_item *item, struct iovec iov[3], uint8_t *record, uint64_t seed) {
    kvft_bytes(record, BYTES, seed);
    memset(record + BYTES - KVFI_SUM_BYTES, 0, KVFI_SUM_BYTES);
    iov[0] = (struct iovec){record, KVFI_HEADER_BYTES + 64};
    iov[1] = (struct iovec){record + KVFI_HEADER_BYTES + 64, 1234};
    iov[2] = (struct iovec){record + KVFI_HEADER_BYTES + 64 + 1234, PAYLOAD - 1234 + KVFI_SUM_BYTES};
    *item = (kvfi_item){.iov = iov, .num_iov = 3, .bytes = BYTES, .unfinished = true};
}

/* In steps of any length: the same checksum as at once, and it stands there before its first byte may go. */
static void seals(void **state) {
    (void)state;
    static uint8_t whole[BYTES], stepped[BYTES];
    static const uint8_t none[KVFI_SUM_BYTES] = {0};
    struct iovec iov[3];
    kvfi_item item;
    uint64_t seed = 3;
    prepare(&item, iov, whole, 9);
    assert_true(kvfi_item_finish(&item));
    assert_false(item.unfinished);
    assert_memory_not_equal(whole + BYTES - KVFI_SUM_BYTES, none, KVFI_SUM_BYTES);
    for (size_t step = 1; step < BYTES + 10; step += step < 200 ? 1 : 1 + kvft_random(&seed) % 300) {
        kvfi_finish seal;
        size_t gone = 0;
        prepare(&item, iov, stepped, 9);
        assert_true(kvfi_finish_begin(&seal, &item));
        while (gone < BYTES) {
            size_t num = kvfi_finish_next(&seal, step);
            assert_in_range(num, 1, step);
            gone += num;
            assert_true(gone <= BYTES);
            assert_int_equal(item.unfinished, gone <= BYTES - KVFI_SUM_BYTES);
        }
        assert_int_equal(kvfi_finish_next(&seal, step), 0);
        assert_memory_equal(whole, stepped, BYTES);
    }
}

/* One part of the first item was refused, and of two more items nothing is known. An ASKING or a PEXPIRE, whose replies
 * are nobody's, may lie before what is left of the first. */
static void abandon(unsigned before) {
    static kvfi_ring ring;
    static kvfi_lost lost;
    kvfi_item items[3] = {{.status = KVF_AGAIN}, {.status = KVF_AGAIN}, {.status = KVF_AGAIN}};
    kvfi_feed feed = {.items = items, .num = 3, .limit = 3};
    const kvfi_request refused = {.item = &items[0]};
    kvfi_ring_init(&ring);
    lost.num = 0;
    kvfi_ring_push(&ring, &refused);
    for (unsigned i = 0; i < before; i++) {
        kvfi_ring_push(&ring, &(kvfi_request){0});
    }
    kvfi_ring_push(&ring, &(kvfi_request){.item = &items[0], .last = true});
    kvfi_ring_push(&ring, &(kvfi_request){.item = &items[1], .last = true});
    ring.item = &items[2];
    kvfi_ring_pop(&ring);
    assert_false(kvfi_ring_fail(&ring, &refused, KVF_WHY_SERVER));
    kvfi_ring_abandon(&ring, &feed, &lost, KVF_WHY_STALLED, false);
    assert_int_equal(items[0].status, KVF_MISS);
    assert_int_equal(items[0].why, KVF_WHY_SERVER);
    assert_int_equal(lost.num, 2);
    assert_ptr_equal(kvfi_lost_next(&lost), &items[1]);
    assert_ptr_equal(kvfi_lost_next(&lost), &items[2]);
}

static void a_refused_item_is_not_lost(void **state) {
    (void)state;
    abandon(0);
    abandon(1);
    abandon(2);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(parts), cmocka_unit_test(seals),
                                       cmocka_unit_test(a_refused_item_is_not_lost)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
