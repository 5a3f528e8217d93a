/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocks of any number of tokens, with and without their tokens, in every kind of store, plain and sealed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "prefix/prefix.h"
#include "support/faults.h"
#include "support/kit.h"
#include "support/server.h"

#define SECRET "a secret of 16 bytes and more"

/* The stores, each as a URL. The server is NULL where none is installed. */
typedef struct places {
    kvft_server *server;
    char *dir;
    char urls[5][256];
    size_t num;
} places;

static int open_places(void **state) {
    static places p;
    p.server = kvft_server_start(NULL);
    p.dir = kvft_temp_dir();
    snprintf(p.urls[p.num++], sizeof p.urls[0], "mem:");
    snprintf(p.urls[p.num++], sizeof p.urls[0], "file:%s", p.dir);
    if (p.server != NULL) {
        snprintf(p.urls[p.num++], sizeof p.urls[0], "%s", p.server->unix_url);
        snprintf(p.urls[p.num++], sizeof p.urls[0], "%s?prefix=parts&part=64K", p.server->unix_url);
        snprintf(p.urls[p.num++], sizeof p.urls[0], "%s?prefix=tcp&part=300K", p.server->tcp_url);
    }
    *state = &p;
    return 0;
}

static int close_places(void **state) {
    places *p = *state;
    if (p->server != NULL) {
        kvft_server_stop(p->server);
    }
    kvft_remove_dir(p->dir);
    return 0;
}

/* A prompt saved through one store, to be loaded through another: nothing is known there. */
typedef struct bench {
    kvf_store *writer, *reader;
    kvf_space *to, *from;
    kvft_prompt *prompt;
    size_t num;
} bench;

static void open_bench(bench *b, const char *url, const char *secret, uint32_t block_tokens, size_t num,
                       size_t payload) {
    char model[32]; /* another one for each size: a record that is there is not written again */
    snprintf(model, sizeof model, "%zu", payload);
    b->num = num;
    b->writer = kvft_store(url);
    b->to = kvft_sealed_space(b->writer, model, block_tokens, secret);
    b->prompt = kvft_prompt_new(b->to, block_tokens, num, payload);
    b->reader = b->writer; /* memory is that of one store */
    if (url[0] != 'm') {
        b->reader = kvft_store(url);
    }
    b->from = kvft_sealed_space(b->reader, model, block_tokens, secret);
}

static void close_bench(bench *b) {
    kvft_prompt_free(b->prompt);
    kvf_space_close(b->from);
    kvf_space_close(b->to);
    if (b->reader != b->writer) {
        kvf_store_close(b->reader);
    }
    kvf_store_close(b->writer);
}

/* Loads the first `num` blocks, which are there. */
static void load_all(bench *b, size_t num) {
    kvft_prompt_poison(b->prompt);
    assert_int_equal(kvf_load(b->from, b->prompt->blocks, num, NULL, KVF_DEFAULT), num);
    assert_int_equal(kvft_prompt_wrong(b->prompt, b->prompt->block_tokens, num), 0);
}

/* ---- any number of tokens ---- */

static void any_number(const char *url, const char *secret) {
    static const uint32_t numbers[] = {1, 3, 100, 4097, 65535, 65536};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        bench b;
        open_bench(&b, url, secret, numbers[i], 3, 70000);
        kvft_save_all(b.to, b.writer, b.prompt);
        load_all(&b, 3);
        b.prompt->tokens[2 * numbers[i]] ^= 1;
        assert_int_equal(kvf_load(b.from, b.prompt->blocks, 3, NULL, KVF_DEFAULT), 2);
        assert_int_equal(b.prompt->blocks[2].why, KVF_WHY_OTHER_TOKENS);
        close_bench(&b);
    }
}

static void test_any_number_of_tokens(void **state) {
    const places *p = *state;
    for (size_t i = 0; i < p->num; i++) {
        any_number(p->urls[i], NULL);
        any_number(p->urls[i], SECRET);
    }
}

/* A reservation has room for the tokens of a whole block, whatever their number. */
static void test_reserved_for_any_number(void **state) {
    (void)state;
    for (uint32_t tokens = 1; tokens <= 65536; tokens = tokens * 5 < 65536 || tokens == 65536 ? tokens * 5 : 65536) {
        bench b;
        kvf_reserved reserved = {0};
        open_bench(&b, "mem:", NULL, tokens, 1, 5000);
        assert_int_equal(kvf_reserve(b.to, &reserved, 5000), KVF_OK);
        memcpy(reserved.data, b.prompt->memory, 5000);
        assert_int_equal(kvf_commit(b.to, &reserved, b.prompt->blocks, 5000), KVF_OK);
        kvft_flush_all(b.writer);
        load_all(&b, 1);
        close_bench(&b);
    }
}

/* ---- records with tokens, loaded without ---- */

static void forget_tokens(kvft_prompt *prompt, size_t num) {
    for (size_t i = 0; i < num; i++) {
        prompt->blocks[i].tokens = i % 2 == 0 ? NULL : prompt->tokens + prompt->num_blocks * prompt->block_tokens;
        prompt->blocks[i].num_tokens = 0;
        prompt->blocks[i].first_token = 0;
    }
}

static kvf_stats stats_of(kvf_store *store) {
    kvf_stats stats = {.struct_size = sizeof stats};
    assert_int_equal(kvf_store_stats(store, &stats), KVF_OK);
    return stats;
}

/* The blocks of a queue, one by one: a gap does not end them. */
static void load_each(bench *b) {
    enum { GAP = 3 };
    kvf_queue *queue = NULL;
    kvf_completion done = {0};
    kvf_error err;
    uint64_t ticket = 0;
    uint8_t each[64] = {0};
    kvf_arrivals arrivals = {.each = each};
    kvf_key gap = b->prompt->blocks[GAP].key;
    b->prompt->blocks[GAP].key.bytes[0] ^= 1;
    kvft_prompt_poison(b->prompt);
    assert_int_equal(kvf_queue_open(&queue, &err, b->reader, 1), KVF_OK);
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_LOAD,
                       .space = b->from,
                       .blocks = b->prompt->blocks,
                       .num = b->num,
                       .arrivals = &arrivals};
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    while (kvf_reap(queue, &done, 1) == 0) {
        kvft_nap_ms(1);
    }
    kvf_queue_close(queue);
    assert_int_equal(done.num_ok, b->num - 1);
    for (size_t i = 0; i < b->num; i++) {
        assert_int_equal(kvf_arrival_of(&arrivals, i), i == GAP ? KVF_MISSED : KVF_HERE);
    }
    assert_int_equal(b->prompt->blocks[GAP].why, KVF_WHY_ABSENT);
    b->prompt->blocks[GAP].key = gap;
}

/* `payload`: of a block. The first load of a store that has seen nothing of the space looks twice, later ones don't. */
static void without_tokens(const char *url, const char *secret, size_t payload) {
    bench b;
    size_t num = 40;
    open_bench(&b, url, secret, 100, num, payload);
    kvft_save_all(b.to, b.writer, b.prompt);
    forget_tokens(b.prompt, num);
    load_all(&b, num);
    uint64_t trips = stats_of(b.reader).lookup_round_trips;
    load_all(&b, num);
    load_all(&b, 1);
    assert_int_equal(stats_of(b.reader).lookup_round_trips, trips);

    b.prompt->blocks[5].tokens = b.prompt->tokens + 500; /* one that is known, and proven */
    b.prompt->blocks[5].num_tokens = 100;
    b.prompt->blocks[5].first_token = 500;
    load_all(&b, num);
    b.prompt->tokens[500] ^= 1;
    assert_int_equal(kvf_load(b.from, b.prompt->blocks, num, NULL, KVF_DEFAULT), 5);
    assert_int_equal(b.prompt->blocks[5].why, KVF_WHY_OTHER_TOKENS);
    b.prompt->tokens[500] ^= 1;
    load_each(&b);

    b.prompt->blocks[2].first_token = 100; /* a position is compared, if one is given */
    assert_int_equal(kvf_load(b.from, b.prompt->blocks, num, NULL, KVF_DEFAULT), 2);
    assert_int_equal(b.prompt->blocks[2].why, KVF_WHY_OTHER_TOKENS);
    b.prompt->blocks[2].first_token = 200;
    b.prompt->iov[7].iov_len--; /* another length is no hit, whatever the number of tokens */
    assert_int_equal(kvf_load(b.from, b.prompt->blocks, num, NULL, KVF_DEFAULT), 7);
    assert_int_equal(b.prompt->blocks[7].why, KVF_WHY_TRUNCATED);
    b.prompt->iov[7].iov_len++;
    load_all(&b, num);
    close_bench(&b);
}

static void test_with_tokens_loaded_without(void **state) {
    const places *p = *state;
    for (size_t i = 0; i < p->num; i++) {
        without_tokens(p->urls[i], NULL, 30000);
        without_tokens(p->urls[i], SECRET, 30001);
        without_tokens(p->urls[i], NULL, 1000003); /* in parts */
        without_tokens(p->urls[i], SECRET, 1000004);
    }
}

/* A space with records of both kinds: each run of one kind. */
static void mixed(const char *url, const char *secret) {
    bench b;
    size_t num = 30;
    open_bench(&b, url, secret, 10, num, 5003);
    for (size_t i = 0; i < num; i++) {
        kvf_block *block = &b.prompt->blocks[i];
        if (i / 5 % 2 == 0) { /* none */
            block->tokens = NULL;
            block->num_tokens = block->first_token = 0;
        } else if (i % 3 == 0) { /* not all */
            block->num_tokens = 7;
        }
    }
    kvft_save_all(b.to, b.writer, b.prompt);
    forget_tokens(b.prompt, num);
    for (int times = 0; times < 3; times++) {
        load_all(&b, num);
    }
    size_t run = 0;
    assert_int_equal(kvf_match(b.from, &run, NULL, b.prompt->keys, num, KVF_DEFAULT), KVF_OK);
    assert_int_equal(run, num);
    load_all(&b, num);
    close_bench(&b);
}

static void test_some_with_tokens(void **state) {
    const places *p = *state;
    for (size_t i = 0; i < p->num; i++) {
        mixed(p->urls[i], NULL);
        mixed(p->urls[i], SECRET);
    }
}

/* What a match has seen, a load expects: it needs no second look. */
static void test_a_match_says_how_many(void **state) {
    const places *p = *state;
    bench b;
    size_t run = 0;
    open_bench(&b, p->urls[1], NULL, 16, 12, 7001);
    kvft_save_all(b.to, b.writer, b.prompt);
    forget_tokens(b.prompt, 12);
    assert_int_equal(kvf_match(b.from, &run, NULL, b.prompt->keys, 12, KVF_DEFAULT), KVF_OK);
    assert_int_equal(run, 12);
    uint64_t trips = stats_of(b.reader).lookup_round_trips;
    load_all(&b, 12);
    assert_int_equal(stats_of(b.reader).lookup_round_trips, trips);
    close_bench(&b);
}

/* One odd record does not mislead the loads of all others: not a lookup, nor a load that finds it. */
static void test_most_records_say_how_many(void **state) {
    const places *p = *state;
    for (size_t i = 0; i < p->num; i++) {
        bench b;
        size_t run = 0, num = 12;
        open_bench(&b, p->urls[i], NULL, 16, num, 7003);
        b.prompt->blocks[0].num_tokens = 7;
        kvft_save_all(b.to, b.writer, b.prompt);
        forget_tokens(b.prompt, num);
        load_all(&b, num);
        assert_int_equal(b.from->seen_tokens, 16);
        load_all(&b, num);
        assert_int_equal(b.from->seen_tokens, 16);
        b.from->seen_tokens = 0;
        assert_int_equal(kvf_match(b.from, &run, NULL, b.prompt->keys, num, KVF_DEFAULT), KVF_OK);
        assert_int_equal(run, num);
        assert_int_equal(b.from->seen_tokens, 16);
        close_bench(&b);
    }
}

static uint64_t tokens_stored(bench *b, size_t num) {
    kvf_found found[16];
    uint64_t tokens = 0;
    size_t run = 0;
    assert_int_equal(kvf_match(b->from, &run, found, b->prompt->keys, num, KVF_DEFAULT), KVF_OK);
    assert_int_equal(run, num);
    for (size_t i = 0; i < num; i++) {
        tokens += found[i].num_tokens;
    }
    return tokens;
}

/* The same blocks, from two processes that don't know of each other. Tokens that are stored stay. */
static void saved_twice(const char *url, const char *secret, bool tokens_first) {
    bench b;
    size_t num = 6;
    open_bench(&b, url, secret, 16, num, tokens_first ? 5002 : 5006);
    kvf_store *other = kvft_store(url);
    kvf_space *space = kvft_sealed_space(other, tokens_first ? "5002" : "5006", 16, secret);
    kvf_block with[6];
    memcpy(with, b.prompt->blocks, sizeof with);
    if (tokens_first) {
        kvft_save_all(b.to, b.writer, b.prompt);
        forget_tokens(b.prompt, num);
        kvft_save_all(space, other, b.prompt);
        assert_int_equal(stats_of(other).known, num);
        assert_int_equal(stats_of(other).saved, 0);
        assert_int_equal(tokens_stored(&b, num), num * 16);
    } else {
        forget_tokens(b.prompt, num);
        kvft_save_all(b.to, b.writer, b.prompt);
        memcpy(b.prompt->blocks, with, sizeof with);
        kvft_save_all(space, other, b.prompt);
        assert_int_equal(stats_of(other).saved, num);
    }
    load_all(&b, num);
    kvf_space_close(space);
    kvf_store_close(other);
    close_bench(&b);
}

static void test_a_save_without_tokens_leaves_those_that_are_stored(void **state) {
    const places *p = *state;
    for (size_t i = 1; i < p->num; i++) { /* memory is that of one store */
        for (int first = 0; first < 2; first++) {
            saved_twice(p->urls[i], NULL, first != 0);
            saved_twice(p->urls[i], SECRET, first != 0);
        }
    }
}

/* A faster tier with a record of another kind, or with the only one. */
static void test_tiers_of_two_kinds(void **state) {
    const places *p = *state;
    kvf_store *slow = kvft_store(p->urls[1]), *both = kvft_store2("mem:", p->urls[1]);
    kvf_space *to = kvft_space(slow, "two", 16), *from = kvft_space(both, "two", 16);
    kvft_prompt *prompt = kvft_prompt_new(to, 5, 6, 4000);
    kvf_error err;
    kvft_save_all(from, both, prompt); /* with tokens in both */
    for (int times = 0; times < 2; times++) {
        kvft_prompt_poison(prompt);
        forget_tokens(prompt, 6);
        assert_int_equal(kvf_load(from, prompt->blocks, 6, NULL, KVF_DEFAULT), 6);
        assert_int_equal(kvft_prompt_wrong(prompt, 5, 6), 0);
        kvf_digest space;
        uint64_t removed = 0;
        kvf_space_digest(to, &space);
        assert_int_equal(kvf_clear(slow, &removed, &err, &space), KVF_OK); /* from now on only in memory */
    }
    kvft_prompt_free(prompt);
    kvf_space_close(from);
    kvf_space_close(to);
    kvf_store_close(both);
    kvf_store_close(slow);
}

/* Lent from where it lies, behind the tokens. */
static void test_borrowed_without_tokens(void **state) {
    const places *p = *state;
    for (size_t i = 0; i < 2; i++) {
        bench b;
        kvf_borrowed borrowed = {0};
        open_bench(&b, p->urls[i], NULL, 16, 2, 6000);
        kvft_save_all(b.to, b.writer, b.prompt);
        forget_tokens(b.prompt, 2);
        assert_int_equal(kvf_borrow(b.from, &borrowed, &b.prompt->blocks[1]), KVF_OK);
        assert_int_equal(borrowed.len, 6000);
        assert_memory_equal(borrowed.data, b.prompt->memory + 6000, 6000);
        kvf_release(b.from, &borrowed);
        b.prompt->blocks[1].iov[0].iov_len--;
        assert_int_equal(kvf_borrow(b.from, &borrowed, &b.prompt->blocks[1]), KVF_MISS);
        assert_int_equal(b.prompt->blocks[1].why, KVF_WHY_TRUNCATED);
        b.prompt->blocks[1].iov[0].iov_len++;
        b.prompt->blocks[1].iov = NULL;
        assert_int_equal(kvf_borrow(b.from, &borrowed, &b.prompt->blocks[1]), KVF_OK);
        assert_int_equal(borrowed.len, 6000);
        kvf_release(b.from, &borrowed);
        close_bench(&b);
    }
}

/* Without memory it is a miss. */
static void test_every_allocation_fails_once(void **state) {
    (void)state;
    bench b;
    bool hit = true;
    open_bench(&b, "mem:", NULL, 16, 4, 3000);
    kvft_save_all(b.to, b.writer, b.prompt);
    forget_tokens(b.prompt, 4);
    for (uint64_t n = 1; hit; n++) {
        kvf_space *space = kvft_space(b.writer, "3000", 16); /* that has seen nothing */
        kvft_prompt_poison(b.prompt);
        kvft_faults_arm(KVFT_ALLOC, n);
        size_t run = kvf_load(space, b.prompt->blocks, 4, NULL, KVF_DEFAULT);
        hit = kvft_faults_disarm();
        assert_true(run == 4 || hit);
        assert_int_equal(kvft_prompt_wrong(b.prompt, 16, run), 0);
        kvf_space_close(space);
        assert_true(n < 100);
    }
    close_bench(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_number_of_tokens),
        cmocka_unit_test(test_reserved_for_any_number),
        cmocka_unit_test(test_with_tokens_loaded_without),
        cmocka_unit_test(test_some_with_tokens),
        cmocka_unit_test(test_a_match_says_how_many),
        cmocka_unit_test(test_tiers_of_two_kinds),
        cmocka_unit_test(test_most_records_say_how_many),
        cmocka_unit_test(test_a_save_without_tokens_leaves_those_that_are_stored),
        cmocka_unit_test(test_borrowed_without_tokens),
        cmocka_unit_test(test_every_allocation_fails_once),
    };
    return cmocka_run_group_tests(tests, open_places, close_places);
}
