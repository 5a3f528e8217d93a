/* SPDX-License-Identifier: Apache-2.0
 *
 * The memory of staged saves: values of any size share one mapping, its pages are used again, and idle ones go back to
 * the system.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <cmocka.h>

#include "base/sys.h"
#include "support/faults.h"
#include "support/kit.h"

#define MIB     ((size_t)1 << 20)
#define BOUND   (64 * MIB)
#define MANY    64u
#define WAIT_MS 60000

static kvf_store *store;
static kvf_space *space;
static kvfi_systable table;
static _Atomic size_t mapped, unmapped, forgotten, asked_huge;
static atomic_bool forget_fails;

static void *count_map(size_t bytes, int fd, off_t at) {
    mapped += bytes;
    return kvfi_sys_real.map(bytes, fd, at);
}

static int count_unmap(void *p, size_t bytes) {
    unmapped += bytes;
    return kvfi_sys_real.unmap(p, bytes);
}

static int refuse_huge(void *p, size_t bytes) {
    (void)p;
    asked_huge += bytes;
    return -1;
}

static int count_forget(void *p, size_t bytes) {
    int result = forget_fails ? -1 : kvfi_sys_real.forget(p, bytes);
    forgotten += bytes; /* a test that waits for this looks at the memory then */
    return result;
}

static int set_up(void **state) {
    (void)state;
    const char *url = "mem:";
    kvf_options options = {.struct_size = sizeof options, .backlog_bytes = BOUND};
    table = kvfi_sys_real;
    table.map = count_map;
    table.unmap = count_unmap;
    table.forget = count_forget;
    kvfi_sys_table = &table;
    mapped = unmapped = forgotten = asked_huge = 0;
    forget_fails = false;
    assert_int_equal(kvf_store_open(&store, NULL, &url, 1, &options), KVF_OK);
    space = kvft_space(store, "m", 16);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    kvf_space_close(space);
    kvf_store_close(store);
    kvfi_sys_table = &kvfi_sys_real;
    return 0;
}

static kvf_reserved reserve(size_t bytes) {
    kvf_reserved reserved = {0};
    assert_int_equal(kvf_reserve(space, &reserved, bytes), KVF_OK);
    return reserved;
}

static long faults(void) {
    struct rusage r;
    getrusage(RUSAGE_SELF, &r);
    return r.ru_minflt;
}

/* Reserves and writes so many values, all at once, and abandons them. */
static void use(size_t num, size_t bytes) {
    kvf_reserved all[MANY];
    for (size_t i = 0; i < num; i++) {
        all[i] = reserve(bytes);
        memset(all[i].data, 1, bytes);
    }
    for (size_t i = 0; i < num; i++) {
        kvf_abandon(space, &all[i]);
    }
}

/* Values of another size than those before find their pages, and nothing is mapped or unmapped for them. */
static void test_pages_are_used_again(void **state) {
    (void)state;
    use(48, MIB);
    size_t before = mapped;
    assert_int_equal(before, BOUND);
    long begin = faults();
    (void)begin;
    use(12, 4 * MIB);
    use(48, MIB);
    use(48, MIB / 4);
    use(3, 15 * MIB);
#ifndef __SANITIZE_THREAD__               /* which has pages of its own */
    assert_true(faults() - begin < 1000); /* fresh pages would be 38,000 */
#endif
    assert_int_equal(mapped, before);
    assert_int_equal(unmapped, 0);
}

/* Whatever is taken and given back in whatever order: no two values share a byte, and in the end all of it is one
 * range again. */
static void test_values_of_any_size_fit_in(void **state) {
    (void)state;
    kvf_reserved all[MANY] = {{0}};
    uint64_t random = 1;
    size_t refused = 0;
    for (int i = 0; i < 20000; i++) {
        size_t at = kvft_random(&random) % MANY;
        uint8_t *data = all[at].data;
        if (all[at].opaque != NULL) {
            assert_int_equal(data[0], at);
            assert_int_equal(data[all[at].len - 1], at);
            kvf_abandon(space, &all[at]);
            continue;
        }
        size_t bytes = 1 + kvft_random(&random) % (4 * MIB);
        if (kvf_reserve(space, &all[at], bytes) != KVF_OK) {
            refused++;
            continue;
        }
        data = all[at].data;
        data[0] = data[bytes - 1] = (uint8_t)at;
    }
    assert_true(refused > 0 && refused < 10000);
    for (size_t at = 0; at < MANY; at++) {
        kvf_abandon(space, &all[at]);
    }
    kvf_reserved whole = reserve(BOUND - 64 * 1024);
    kvf_reserved more = {0};
    assert_int_equal(kvf_reserve(space, &more, 64 * 1024), KVF_AGAIN);
    kvf_abandon(space, &whole);
}

static size_t resident(void *memory, size_t bytes) {
    unsigned char pages[BOUND / 4096];
    uintptr_t at = (uintptr_t)memory / 4096 * 4096;
    size_t sum = 0;
    assert_int_equal(mincore((void *)at, bytes, pages), 0);
    for (size_t i = 0; i < bytes / 4096; i++) {
        sum += pages[i] & 1u;
    }
    return sum;
}

static void wait_until_forgotten(size_t bytes) {
    for (double begin = kvft_now_ms(); forgotten < bytes; kvft_nap_ms(20)) {
        if (kvft_now_ms() - begin > WAIT_MS) {
            fail_msg("only %zu bytes were given back", (size_t)forgotten);
        }
    }
}

/* What is in use stays, and what lies behind it goes. Afterwards it works as before. */
static void test_idle_memory_is_given_back(void **state) {
    (void)state;
    kvf_reserved held = reserve(MIB);
    memset(held.data, 7, MIB);
    kvf_reserved rest = reserve(32 * MIB);
    memset(rest.data, 8, rest.len);
    assert_true(resident(rest.data, rest.len) > 8000);
    uint8_t *was = rest.data;
    kvf_abandon(space, &rest);
    wait_until_forgotten(32 * MIB);
    assert_int_equal(resident(was, 32 * MIB), 0);
    for (size_t i = 0; i < MIB; i++) {
        assert_int_equal(((uint8_t *)held.data)[i], 7);
    }
    kvf_abandon(space, &held);
    use(15, 4 * MIB);
    assert_int_equal(mapped, BOUND);
}

/* Where the system refuses, the memory stays, and nothing else comes of it. */
static void test_memory_that_cannot_be_given_back(void **state) {
    (void)state;
    forget_fails = true;
    use(8, MIB);
    wait_until_forgotten(1);
    use(15, 4 * MIB);
}

/* Whoever closes a store with a reservation out loses the reservation, and nothing else: close does not wait for it, and
 * frees its memory. */
static void test_a_store_closes_with_reservations_out(void **state) {
    (void)state;
    uint64_t before = kvft_faults_live_allocs();
    const char *url = "mem:";
    kvf_options options = {.struct_size = sizeof options, .backlog_bytes = BOUND};
    kvf_store *other = NULL;
    kvf_reserved out[3] = {{0}};
    kvft_faults_watch();
    assert_int_equal(kvf_store_open(&other, NULL, &url, 1, &options), KVF_OK);
    kvf_space *its = kvft_space(other, "m", 16);
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(kvf_reserve(its, &out[i], MIB), KVF_OK);
        memset(out[i].data, 5, MIB);
    }
    kvf_block block = {.num_tokens = 0};
    kvf_abandon(its, &out[1]);
    assert_int_equal(kvf_commit(its, &out[0], &block, MIB), KVF_OK);
    kvf_space_close(its);
    kvf_store_close(other);
    (void)kvft_faults_disarm();
    assert_int_equal(kvft_faults_live_allocs(), before);
}

/* The arena asks for large pages, once. A kernel without them serves as well. */
static void test_large_pages_are_optional(void **state) {
    (void)state;
    table.huge = refuse_huge;
    for (unsigned i = 0; i < 2; i++) {
        kvf_reserved reserved = reserve(MIB);
        memset(reserved.data, 1, MIB);
        kvf_abandon(space, &reserved);
        assert_int_equal(asked_huge, BOUND);
    }
}

/* A load returns the bytes that were saved, also when sizes, pieces and places in memory are odd. */
static void test_copies_are_exact(void **state) {
    (void)state;
    static uint8_t from[3 * 8192 + 64], to[sizeof from];
    kvft_bytes(from, sizeof from, 3);
    for (unsigned i = 0; i < 300; i++) {
        size_t first = i * 37 % 9000, second = i * 91 % 15000;
        struct iovec in[2] = {{from + i % 33, first}, {from + 40 + first, second}};
        struct iovec out = {to + i % 7, first + second};
        kvf_block block = {.iov = in, .num_iov = 2};
        block.key.bytes[0] = (uint8_t)i;
        block.key.bytes[1] = (uint8_t)(i >> 8);
        assert_int_equal(kvf_save(space, &block, 1, NULL), 1);
        kvft_flush_all(store);
        block.iov = &out;
        block.num_iov = 1;
        assert_int_equal(kvf_load(space, &block, 1, NULL, KVF_DEFAULT), 1);
        assert_memory_equal(to + i % 7, in[0].iov_base, first);
        assert_memory_equal(to + i % 7 + first, in[1].iov_base, second);
    }
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {TEST(test_pages_are_used_again),
                                       TEST(test_values_of_any_size_fit_in),
                                       TEST(test_idle_memory_is_given_back),
                                       TEST(test_memory_that_cannot_be_given_back),
                                       TEST(test_a_store_closes_with_reservations_out),
                                       TEST(test_large_pages_are_optional),
                                       TEST(test_copies_are_exact)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
