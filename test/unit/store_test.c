/* SPDX-License-Identifier: Apache-2.0
 *
 * The store core and the prefix service over the memory tier: everything that does not depend on the kind of the store.
 */
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "record/record.h"
#include "store/private.h"
#include "support/faults.h"
#include "support/kit.h"

#define PAYLOAD 20000u

typedef struct bench {
    kvf_store *store;
    kvf_space *space;
    kvft_prompt *prompt;
} bench;

static bench open_bench(const char *url, size_t num_blocks) {
    bench b = {.store = kvft_store(url)};
    b.space = kvft_space(b.store, "m", 16);
    b.prompt = kvft_prompt_new(b.space, 7, num_blocks, PAYLOAD);
    return b;
}

static void close_bench(bench *b) {
    kvft_prompt_free(b->prompt);
    kvf_space_close(b->space);
    kvf_store_close(b->store);
}

static kvf_stats stats_of(kvf_store *store) {
    kvf_stats stats = {.struct_size = sizeof stats};
    kvf_store_stats(store, &stats);
    return stats;
}

/* ---- round trips ---- */

static void test_what_is_saved_is_loaded(void **state) {
    (void)state;
    bench b = open_bench("mem:", 20);
    kvft_save_all(b.space, b.store, b.prompt);
    kvft_prompt_poison(b.prompt);
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, 20, NULL, KVF_DEFAULT), 20);
    assert_int_equal(kvft_prompt_wrong(b.prompt, 7, 20), 0);
    kvf_stats stats = stats_of(b.store);
    assert_int_equal(stats.load_hits, 20);
    assert_int_equal(stats.saved, 20); /* the card of the space is not counted */
    close_bench(&b);
}

static void test_an_empty_batch_is_fine(void **state) {
    (void)state;
    bench b = open_bench("mem:", 1);
    size_t run = 9;
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, 0, NULL, KVF_DEFAULT), 0);
    assert_int_equal(kvf_save(b.space, b.prompt->blocks, 0, NULL), 0);
    assert_int_equal(kvf_match(b.space, &run, NULL, b.prompt->keys, 0, KVF_MS(1)), KVF_OK);
    assert_int_equal(run, 0);
    close_bench(&b);
}

static void test_behind_a_gap_nothing_is_used(void **state) {
    (void)state;
    bench b = open_bench("mem:", 8);
    kvft_save_all(b.space, b.store, b.prompt);
    kvf_error err;
    kvf_digest digest;
    kvf_space_digest(b.space, &digest);
    assert_int_equal(kvf_remove(b.store, &err, &digest, &b.prompt->keys[3]), KVF_OK);
    kvft_prompt_poison(b.prompt);
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, 8, NULL, KVF_DEFAULT), 3);
    assert_int_equal(kvft_prompt_wrong(b.prompt, 7, 3), 0);
    assert_int_equal(b.prompt->blocks[3].why, KVF_WHY_ABSENT);
    for (size_t i = 4; i < 8; i++) {
        assert_int_equal(b.prompt->blocks[i].status, KVF_MISS);
        assert_int_equal(b.prompt->blocks[i].why, KVF_WHY_AFTER_GAP);
    }
    size_t run = 0;
    kvf_found found[8];
    assert_int_equal(kvf_match(b.space, &run, found, b.prompt->keys, 8, KVF_MS(1000)), KVF_OK);
    assert_int_equal(run, 3);
    assert_int_equal(found[3].why, KVF_WHY_ABSENT);
    assert_int_equal(found[2].why, KVF_WHY_NONE);
    close_bench(&b);
}

static void test_other_tokens_under_the_right_key_are_a_miss(void **state) {
    (void)state;
    bench b = open_bench("mem:", 2);
    kvft_save_all(b.space, b.store, b.prompt);
    b.prompt->tokens[17]++; /* of the second block */
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, 2, NULL, KVF_DEFAULT), 1);
    assert_int_equal(b.prompt->blocks[1].why, KVF_WHY_OTHER_TOKENS);
    b.prompt->tokens[17]--;
    b.prompt->blocks[0].first_token++;
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, 2, NULL, KVF_DEFAULT), 0);
    assert_int_equal(b.prompt->blocks[0].why, KVF_WHY_OTHER_TOKENS);
    close_bench(&b);
}

static void test_another_length_is_a_miss(void **state) {
    (void)state;
    bench b = open_bench("mem:", 1);
    kvft_save_all(b.space, b.store, b.prompt);
    b.prompt->iov[0].iov_len--;
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, 1, NULL, KVF_DEFAULT), 0);
    assert_int_equal(b.prompt->blocks[0].why, KVF_WHY_TRUNCATED);
    b.prompt->iov[0].iov_len++;
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, 1, NULL, KVF_DEFAULT), 1);
    close_bench(&b);
}

static void test_spaces_do_not_meet(void **state) {
    (void)state;
    bench b = open_bench("mem:", 2);
    kvft_save_all(b.space, b.store, b.prompt);
    kvf_space *other = kvft_space(b.store, "another model of the same shape", 16);
    kvft_prompt *same_tokens = kvft_prompt_new(other, 7, 2, PAYLOAD);
    assert_int_equal(kvf_load(other, same_tokens->blocks, 2, NULL, KVF_DEFAULT), 0);
    /* Even with the keys of the first space: the record says whose it is. */
    memcpy(same_tokens->blocks[0].key.bytes, b.prompt->keys[0].bytes, 32);
    assert_int_equal(kvf_load(other, same_tokens->blocks, 1, NULL, KVF_DEFAULT), 0);
    kvft_prompt_free(same_tokens);
    kvf_space_close(other);
    close_bench(&b);
}

/* ---- match ---- */

static void test_match_tells_the_sizes(void **state) {
    (void)state;
    bench b = open_bench("mem:", 5);
    kvft_save_all(b.space, b.store, b.prompt);
    kvf_found found[5];
    size_t run = 0;
    assert_int_equal(kvf_match(b.space, &run, found, b.prompt->keys, 5, KVF_MS(1000)), KVF_OK);
    assert_int_equal(run, 5);
    for (size_t i = 0; i < 5; i++) {
        assert_int_equal(found[i].payload_bytes, PAYLOAD);
        assert_int_equal(found[i].num_tokens, 16);
        assert_int_equal(found[i].tier, 0);
    }
    close_bench(&b);
}

/* ---- save ---- */

static void test_known_blocks_are_not_written_again(void **state) {
    (void)state;
    bench b = open_bench("mem:", 4);
    kvft_save_all(b.space, b.store, b.prompt);
    assert_true(kvf_knows(b.space, &b.prompt->keys[0]));
    assert_int_equal(kvf_save(b.space, b.prompt->blocks, 4, NULL), 4);
    kvf_stats stats = stats_of(b.store);
    assert_int_equal(stats.known, 4);
    assert_int_equal(stats.saved, 4);
    /* What turns out to be gone is forgotten, and can be stored again. */
    uint64_t removed = 0;
    kvf_error err;
    assert_int_equal(kvf_clear(b.store, &removed, &err, NULL), KVF_OK);
    assert_int_equal(removed, 5);
    assert_false(kvf_knows(b.space, &b.prompt->keys[0]));
    kvft_save_all(b.space, b.store, b.prompt);
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, 4, NULL, KVF_DEFAULT), 4);
    close_bench(&b);
}

/* A forgotten block is written again without a look: its header may be there and the rest not. */
static void test_what_was_forgotten_is_written_again(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[256];
    snprintf(url, sizeof url, "file:%s", dir);
    bench b = open_bench(url, 4);
    kvft_save_all(b.space, b.store, b.prompt);
    kvf_forget(b.space, &b.prompt->keys[1], 2);
    kvf_forget(b.space, NULL, 0);
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(kvf_knows(b.space, &b.prompt->keys[i]), i == 0 || i == 3);
    }
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, 4, NULL, KVF_DEFAULT), 4); /* nothing was removed */
    kvf_forget(b.space, &b.prompt->keys[1], 2);
    kvft_save_all(b.space, b.store, b.prompt);
    kvf_stats stats = stats_of(b.store);
    assert_int_equal(stats.known, 2);
    assert_int_equal(stats.saved, 4 + 2);
    assert_true(kvf_knows(b.space, &b.prompt->keys[1]));
    close_bench(&b);
    kvft_remove_dir(dir);
}

static void test_a_full_backlog_sheds_and_never_waits(void **state) {
    (void)state;
    const char *url = "mem:";
    kvf_options options = {.struct_size = sizeof options, .backlog_bytes = 100000};
    kvf_store *store = NULL;
    kvf_error err;
    assert_int_equal(kvf_store_open(&store, &err, &url, 1, &options), KVF_OK);
    kvf_space *space = kvft_space(store, "m", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 1, 4, 60000);
    kvf_reserved held = {0};
    assert_int_equal(kvf_reserve(space, &held, 60000), KVF_OK);
    assert_int_equal(kvf_save(space, prompt->blocks, 4, NULL), 0);
    assert_int_equal(prompt->blocks[0].status, KVF_AGAIN);
    assert_int_equal(prompt->blocks[0].why, KVF_WHY_FULL);
    kvf_abandon(space, &held);
    assert_true(kvf_save(space, prompt->blocks, 1, NULL) == 1);
    kvf_reserved huge = {0};
    assert_int_equal(kvf_reserve(space, &huge, 200000), KVF_AGAIN);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
}

/* What has no room in memory has failed where there is only memory, and not where another tier takes it. */
static void test_no_room_is_a_failure_of_the_last_tier(void **state) {
    (void)state;
    enum { NUM = 100 }; /* of more bytes than the memory has */
    char *dir = kvft_temp_dir(), url[200];
    snprintf(url, sizeof url, "file:%s", dir);
    for (int two = 0; two < 2; two++) {
        kvf_store *store = two ? kvft_store2("mem:?max=1M", url) : kvft_store("mem:?max=1M");
        kvf_space *space = kvft_space(store, "m", 16);
        kvft_prompt *prompt = kvft_prompt_new(space, 7, NUM, PAYLOAD);
        assert_int_equal(kvf_save(space, prompt->blocks, NUM, NULL), NUM);
        (void)kvft_flush(store);
        size_t num = stats_of(store).save_failures[KVF_WHY_FULL];
        assert_in_range(num, two ? 0 : 1, two ? 0 : NUM);
        kvft_prompt_free(prompt);
        kvf_space_close(space);
        kvf_store_close(store);
    }
    kvft_remove_dir(dir);
}

static void test_reserve_and_commit(void **state) {
    (void)state;
    bench b = open_bench("mem:", 1);
    kvf_reserved reserved = {0};
    assert_int_equal(kvf_reserve(b.space, &reserved, PAYLOAD + 500), KVF_OK);
    memcpy(reserved.data, b.prompt->memory, PAYLOAD);
    assert_int_equal(kvf_commit(b.space, &reserved, b.prompt->blocks, PAYLOAD), KVF_OK);
    kvft_flush_all(b.store);
    kvft_prompt_poison(b.prompt);
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, 1, NULL, KVF_DEFAULT), 1);
    assert_int_equal(kvft_prompt_wrong(b.prompt, 7, 1), 0);
    close_bench(&b);
}

/* ---- borrow ---- */

static void test_borrow_lends_and_survives_removal(void **state) {
    (void)state;
    bench b = open_bench("mem:", 2);
    kvft_save_all(b.space, b.store, b.prompt);
    kvf_borrowed borrowed = {0};
    assert_int_equal(kvf_borrow(b.space, &borrowed, &b.prompt->blocks[1]), KVF_OK);
    uint64_t removed = 0;
    kvf_error err;
    assert_int_equal(kvf_clear(b.store, &removed, &err, NULL), KVF_OK);
    assert_int_equal(borrowed.len, PAYLOAD);
    assert_memory_equal(borrowed.data, b.prompt->memory + PAYLOAD, PAYLOAD);
    kvf_release(b.space, &borrowed);
    assert_int_equal(kvf_borrow(b.space, &borrowed, &b.prompt->blocks[1]), KVF_MISS);
    assert_int_equal(b.prompt->blocks[1].why, KVF_WHY_ABSENT);
    close_bench(&b);
}

static void test_borrow_checks_the_tokens(void **state) {
    (void)state;
    bench b = open_bench("mem:", 1);
    kvft_save_all(b.space, b.store, b.prompt);
    kvf_borrowed borrowed = {0};
    b.prompt->tokens[0]++;
    assert_int_equal(kvf_borrow(b.space, &borrowed, b.prompt->blocks), KVF_MISS);
    assert_int_equal(b.prompt->blocks[0].why, KVF_WHY_OTHER_TOKENS);
    b.prompt->tokens[0]--;
    b.prompt->blocks[0].num_tokens = 15;
    assert_int_equal(kvf_borrow(b.space, &borrowed, b.prompt->blocks), KVF_MISS);
    b.prompt->blocks[0].num_tokens = 17; /* more than a block has */
    assert_int_equal(kvf_borrow(b.space, &borrowed, b.prompt->blocks), KVF_LIMIT);
    assert_int_equal(b.prompt->blocks[0].why, KVF_WHY_MISUSE);
    close_bench(&b);
}

/* Without iovecs the payload has the length that it has; with iovecs it must have theirs. */
static void test_borrow_checks_the_length(void **state) {
    (void)state;
    bench b = open_bench("mem:", 1);
    kvft_save_all(b.space, b.store, b.prompt);
    kvf_borrowed borrowed = {0};
    kvf_block any = b.prompt->blocks[0];
    any.iov = NULL;
    any.num_iov = 0;
    assert_int_equal(kvf_borrow(b.space, &borrowed, &any), KVF_OK);
    assert_int_equal(borrowed.len, PAYLOAD);
    kvf_release(b.space, &borrowed);
    b.prompt->iov[0].iov_len--;
    assert_int_equal(kvf_borrow(b.space, &borrowed, b.prompt->blocks), KVF_MISS);
    assert_int_equal(b.prompt->blocks[0].why, KVF_WHY_TRUNCATED);
    b.prompt->iov[0].iov_len++;
    assert_int_equal(kvf_borrow(b.space, &borrowed, b.prompt->blocks), KVF_OK);
    kvf_release(b.space, &borrowed);
    close_bench(&b);
}

/* A record of no payload at all is lent, too. */
static void test_borrow_of_an_empty_payload(void **state) {
    (void)state;
    bench b = {.store = kvft_store("mem:")};
    b.space = kvft_space(b.store, "m", 16);
    b.prompt = kvft_prompt_new(b.space, 7, 1, 0);
    kvf_borrowed borrowed = {0};
    kvft_save_all(b.space, b.store, b.prompt);
    assert_int_equal(kvf_borrow(b.space, &borrowed, b.prompt->blocks), KVF_OK);
    assert_int_equal(borrowed.len, 0);
    kvf_release(b.space, &borrowed);
    close_bench(&b);
}

/* A block of as many tokens as a record may have is saved, loaded and lent; one of more is refused by each call. */
static void test_blocks_of_the_most_tokens(void **state) {
    (void)state;
    bench b = {.store = kvft_store("mem:")};
    b.space = kvft_space(b.store, "m", KVFI_MAX_TOKENS);
    b.prompt = kvft_prompt_new(b.space, 7, 1, PAYLOAD);
    kvf_block *block = b.prompt->blocks;
    kvf_borrowed borrowed = {0};
    kvft_save_all(b.space, b.store, b.prompt);
    assert_int_equal(kvf_load(b.space, block, 1, NULL, KVF_DEFAULT), 1);
    assert_int_equal(kvf_borrow(b.space, &borrowed, block), KVF_OK);
    kvf_release(b.space, &borrowed);
    block->num_tokens++;
    assert_int_equal(kvf_load(b.space, block, 1, NULL, KVF_DEFAULT), 0);
    assert_int_equal(block->status, KVF_LIMIT);
    assert_int_equal(kvf_borrow(b.space, &borrowed, block), KVF_LIMIT);
    assert_int_equal(block->status, KVF_LIMIT);
    assert_int_equal(kvf_save(b.space, block, 1, NULL), 0);
    assert_int_equal(block->status, KVF_LIMIT);
    close_bench(&b);
}

/* Every block that is loaded or lent counts as looked for, and as a hit or a miss. One that no tier can lend counts
 * when it is loaded. */
static void test_loads_and_loans_are_counted(void **state) {
    (void)state;
    const size_t record = KVFI_HEAD_BYTES(16) + PAYLOAD + KVFI_SUM_BYTES;
    bench b = open_bench("mem:", 4);
    kvf_borrowed borrowed = {0};
    kvf_error err;
    kvf_digest digest;
    kvft_save_all(b.space, b.store, b.prompt);
    kvf_space_digest(b.space, &digest);
    assert_int_equal(kvf_remove(b.store, &err, &digest, &b.prompt->keys[3]), KVF_OK);
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, 4, NULL, KVF_DEFAULT), 3);
    kvf_stats stats = stats_of(b.store);
    assert_int_equal(stats.loads, 4);
    assert_int_equal(stats.load_hits, 3);
    assert_int_equal(stats.loaded_bytes, 3 * record);
    assert_int_equal(stats.misses[KVF_WHY_ABSENT], 1);
    assert_int_equal(kvf_borrow(b.space, &borrowed, &b.prompt->blocks[0]), KVF_OK);
    kvf_release(b.space, &borrowed);
    assert_int_equal(kvf_borrow(b.space, &borrowed, &b.prompt->blocks[3]), KVF_MISS); /* absent */
    b.prompt->tokens[16]++;
    assert_int_equal(kvf_borrow(b.space, &borrowed, &b.prompt->blocks[1]), KVF_MISS);
    stats = stats_of(b.store);
    assert_int_equal(stats.loads, 4 + 2);
    assert_int_equal(stats.load_hits, 3 + 1);
    assert_int_equal(stats.loaded_bytes, 4 * record);
    assert_int_equal(stats.misses[KVF_WHY_ABSENT], 1);
    assert_int_equal(stats.misses[KVF_WHY_OTHER_TOKENS], 1);
    close_bench(&b);
}

/* ---- views ---- */

static void test_a_view_gathers_and_scatters(void **state) {
    (void)state;
    enum { SLOTS = 8, LAYERS = 3, RUN = 700 };
    bench b = open_bench("mem:", 4);
    uint8_t *pool = calloc(SLOTS * LAYERS, RUN);
    kvf_region regions[LAYERS];
    for (size_t i = 0; i < LAYERS; i++) {
        regions[i] = (kvf_region){.base = pool + i * SLOTS * RUN,
                                  .slot_stride = RUN,
                                  .run_bytes = RUN / 2,
                                  .run_stride = RUN / 2,
                                  .num_runs = 2};
    }
    kvf_view *view = NULL;
    assert_int_equal(kvf_view_open(&view, NULL, regions, LAYERS, SLOTS), KVF_OK);
    kvft_bytes(pool, SLOTS * LAYERS * RUN, 3);
    for (size_t i = 0; i < 4; i++) {
        b.prompt->blocks[i].iov = NULL;
        b.prompt->blocks[i].slot = (int64_t)(2 * i + 1);
    }
    assert_int_equal(kvf_save(b.space, b.prompt->blocks, 4, view), 4);
    kvft_flush_all(b.store);
    uint8_t *before = malloc(SLOTS * LAYERS * RUN);
    memcpy(before, pool, SLOTS * LAYERS * RUN);
    for (size_t i = 0; i < SLOTS * LAYERS; i++) {
        if (i % 2 == 1) {
            memset(pool + i * RUN, 0, RUN);
        }
    }
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, 4, view, KVF_DEFAULT), 4);
    assert_memory_equal(pool, before, SLOTS * LAYERS * RUN);
    assert_int_equal(kvf_fence(view, &b.prompt->blocks[0].slot, 1, KVF_DEFAULT), KVF_OK);
    b.prompt->blocks[0].slot = SLOTS; /* outside */
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, 4, view, KVF_DEFAULT), 0);
    assert_int_equal(b.prompt->blocks[0].status, KVF_LIMIT);
    kvf_view_close(view);
    free(before);
    free(pool);
    close_bench(&b);
}

static void test_bad_views_are_refused(void **state) {
    (void)state;
    kvf_view *view = NULL;
    uint8_t memory[16];
    kvf_region none = {.base = memory, .run_bytes = 0, .num_runs = 1};
    kvf_region huge = {.base = memory, .run_bytes = SIZE_MAX / 2, .num_runs = 3};
    assert_int_equal(kvf_view_open(&view, NULL, &none, 1, 1), KVF_LIMIT);
    assert_int_equal(kvf_view_open(&view, NULL, &huge, 1, 1), KVF_LIMIT);
    assert_int_equal(kvf_view_open(&view, NULL, &huge, 0, 1), KVF_LIMIT);
}

/* Whichever allocation of a view fails, nothing is left of it. */
static void test_a_view_without_memory(void **state) {
    (void)state;
    uint8_t memory[16];
    kvf_region region = {.base = memory, .run_bytes = 8, .num_runs = 1};
    uint64_t nth = 0;
    for (bool hit = true; hit;) {
        kvf_view *view = NULL;
        kvft_faults_arm(KVFT_ALLOC, ++nth);
        kvf_status status = kvf_view_open(&view, NULL, &region, 1, 2);
        kvf_view_close(view);
        assert_int_equal(kvft_faults_live_allocs(), 0);
        hit = kvft_faults_disarm();
        assert_int_equal(status, hit ? KVF_NOMEM : KVF_OK);
    }
    assert_int_equal(nth, 3);
}

/* Up to its limits a view is fine, beyond each it is refused. */
static void test_views_at_their_limits(void **state) {
    (void)state;
    enum { REGIONS = 4096, RUNS = 65536, SLOTS = 1 << 26 };
    static kvf_region regions[REGIONS + 1];
    uint8_t memory[16];
    for (size_t i = 0; i <= REGIONS; i++) {
        regions[i] = (kvf_region){.base = memory, .run_bytes = 1, .num_runs = 1};
    }
    kvf_region runs = {.base = memory, .run_bytes = 1, .num_runs = RUNS};
    kvf_region bytes = {.base = memory, .run_bytes = KVF_MAX_PAYLOAD_BYTES, .num_runs = 1};
    for (size_t more = 0; more < 2; more++) {
        const struct {
            const kvf_region *regions;
            size_t num_regions, num_slots;
        } views[] = {{regions, REGIONS + more, 1}, {regions, 1, SLOTS + more}, {&runs, 1, 1}, {&bytes, 1, 1}};
        for (size_t i = 0; i < sizeof views / sizeof *views; i++) {
            kvf_view *view = NULL;
            kvf_status status = kvf_view_open(&view, NULL, views[i].regions, views[i].num_regions, views[i].num_slots);
            assert_int_equal(status, more == 0 ? KVF_OK : KVF_LIMIT);
            kvf_view_close(view);
        }
        runs.num_runs++;
        bytes.run_bytes++;
    }
}

/* ---- tiers ---- */

static void test_tiers_fall_through_and_promote(void **state) {
    (void)state;
    char *dir = kvft_temp_dir();
    char url[200];
    snprintf(url, sizeof url, "file:%s", dir);
    bench slow = open_bench(url, 6);
    kvft_save_all(slow.space, slow.store, slow.prompt);
    close_bench(&slow);

    kvf_store *store = kvft_store2("mem:", url);
    kvf_space *space = kvft_space(store, "m", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 7, 6, PAYLOAD);
    size_t run = 0;
    kvf_found found[6];
    assert_int_equal(kvf_match(space, &run, found, prompt->keys, 6, KVF_MS(1000)), KVF_OK);
    assert_int_equal(run, 6);
    assert_int_equal(found[0].tier, 1);
    kvft_prompt_poison(prompt);
    assert_int_equal(kvf_load(space, prompt->blocks, 6, NULL, KVF_DEFAULT), 6);
    assert_int_equal(kvft_prompt_wrong(prompt, 7, 6), 0);
    kvft_flush_all(store);
    assert_int_equal(stats_of(store).promoted, 6);
    assert_int_equal(kvf_match(space, &run, found, prompt->keys, 6, KVF_MS(1000)), KVF_OK);
    assert_int_equal(found[5].tier, 0);
    kvft_prompt_poison(prompt);
    assert_int_equal(kvf_load(space, prompt->blocks, 6, NULL, KVF_DEFAULT), 6);
    assert_int_equal(kvft_prompt_wrong(prompt, 7, 6), 0);

    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
    kvft_remove_dir(dir);
}

/* What a tier does not get to in time is not stored there, whatever the tier before it did. */
static void put_nothing(kvfi_tier *tier, kvfi_feed *feed) {
    (void)tier, (void)feed;
}

static void test_a_tier_without_time_stores_nothing(void **state) {
    (void)state;
    enum { NUM = 3 };
    kvf_store *store = kvft_store2("mem:", "mem:");
    kvf_space *space = kvft_space(store, "m", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 7, NUM, PAYLOAD);
    kvfi_tier_ops ops = *store->tiers[1]->ops;
    ops.put = put_nothing;
    store->tiers[1]->ops = &ops;
    kvfi_item items[NUM];
    kvfi_put_outcome outcomes[NUM] = {{0}};
    for (size_t i = 0; i < NUM; i++) {
        items[i] = (kvfi_item){.iov = &prompt->iov[i], .num_iov = 1, .bytes = PAYLOAD, .number = i};
        items[i].addr.key = prompt->keys[i];
    }
    kvfi_feed feed = {.items = items, .num = NUM, .deadline_us = kvfi_deadline(10000000)};
    kvfi_store_put(store, &feed, outcomes);
    for (size_t i = 0; i < NUM; i++) {
        assert_int_equal(outcomes[i].tiers, 1);
        assert_int_equal(outcomes[i].status, KVF_MISS);
        assert_int_equal(outcomes[i].why, KVF_WHY_BUDGET);
        assert_int_equal(items[i].status, KVF_MISS);
        assert_int_equal(items[i].why, KVF_WHY_BUDGET);
    }
    assert_int_equal(stats_of(store).saved, 0);
    assert_int_equal(stats_of(store).save_failures[KVF_WHY_BUDGET], NUM);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
}

/* What a tier can't tell is not known, which is not the same as none. */
static void test_what_can_not_be_told_is_unknown(void **state) {
    (void)state;
    kvf_store *store = kvft_store("redis://127.0.0.1:1");
    kvf_tier_info info = {.struct_size = sizeof info, .reachable = 1};
    assert_int_equal(kvf_tier_info_get(store, &info, 0), KVF_OK);
    assert_false(info.reachable);
    assert_int_equal(info.num_records, -1);
    assert_int_equal(info.used_bytes, -1);
    assert_int_equal(info.max_bytes, -1);
    assert_string_equal(info.url, "redis://127.0.0.1:1");
    assert_int_equal(kvf_tier_info_get(store, &info, 1), KVF_LIMIT);
    kvf_store_close(store);
}

static void count_by_tier(void *ctx, const kvf_finding *finding) {
    assert_in_range(finding->tier, 0, 1);
    ((unsigned *)ctx)[finding->tier]++;
}

/* The doctor looks at every tier, and says which one a finding is about. */
static void test_the_doctor_sees_every_tier(void **state) {
    (void)state;
    unsigned num[2] = {0};
    kvf_store *store = kvft_store2("mem:", "redis://127.0.0.1:1");
    assert_int_equal(kvf_doctor(store, NULL, count_by_tier, num), KVF_OK);
    assert_true(num[0] > 0 && num[1] > 0);
    kvf_store_close(store);
}

/* ---- queue ---- */

static size_t reap_one(kvf_queue *queue, kvf_completion *out) {
    struct pollfd fd = {.fd = kvf_queue_fd(queue), .events = POLLIN};
    assert_int_equal(poll(&fd, 1, 10000), 1);
    return kvf_reap(queue, out, 1);
}

/* A tier that does not take the blocks is told of, though another one has them; what is known to be stored in a tier
 * that lasts is not written. */
static void test_a_queue_save_tells_of_every_tier(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[128];
    snprintf(url, sizeof url, "file:%s", dir);
    kvf_store *store = kvft_store2(url, "redis+unix:///nonexistent/socket");
    kvf_space *space = kvft_space(store, "two", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 7, 6, 3000);
    kvf_queue *queue = NULL;
    kvf_completion done = {0};
    uint64_t ticket = 0;
    assert_int_equal(kvf_queue_open(&queue, NULL, store, 1), KVF_OK);
    kvf_batch batch = {
        .struct_size = sizeof batch, .op = KVF_OP_SAVE, .space = space, .blocks = prompt->blocks, .num = 6};
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    assert_int_equal(reap_one(queue, &done), 1);
    assert_int_equal(done.num_ok, 0);
    for (size_t i = 0; i < 6; i++) {
        assert_int_equal(prompt->blocks[i].status, KVF_MISS);
        assert_true(prompt->blocks[i].why == KVF_WHY_UNREACHABLE || prompt->blocks[i].why == KVF_WHY_BREAKER);
    }
    kvft_prompt_poison(prompt);
    assert_int_equal(kvf_load(space, prompt->blocks, 6, NULL, KVF_DEFAULT), 6);
    assert_int_equal(kvft_prompt_wrong(prompt, 7, 6), 0);
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    assert_int_equal(reap_one(queue, &done), 1);
    assert_int_equal(done.num_ok, 6);
    assert_int_equal(stats_of(store).known, 6);
    kvf_queue_close(queue);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
    kvft_remove_dir(dir);
}

static void test_queue_saves_matches_and_loads(void **state) {
    (void)state;
    bench b = open_bench("mem:", 10);
    kvf_queue *queue = NULL;
    assert_int_equal(kvf_queue_open(&queue, NULL, b.store, 4), KVF_OK);
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_SAVE,
                       .space = b.space,
                       .blocks = b.prompt->blocks,
                       .num = 10,
                       .user = 42};
    uint64_t ticket = 0;
    kvf_completion done = {0};
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    assert_int_equal(reap_one(queue, &done), 1);
    assert_int_equal(done.ticket, ticket);
    assert_int_equal(done.user, 42);
    assert_int_equal(done.num_ok, 10);
    batch.op = KVF_OP_MATCH;
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    assert_int_equal(reap_one(queue, &done), 1);
    assert_int_equal(done.num_ok, 10);
    kvft_prompt_poison(b.prompt);
    batch.op = KVF_OP_LOAD;
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    assert_int_equal(reap_one(queue, &done), 1);
    assert_int_equal(done.num_ok, 10);
    assert_int_equal(kvft_prompt_wrong(b.prompt, 7, 10), 0);
    assert_int_equal(kvf_reap(queue, &done, 1), 0);
    struct pollfd fd = {.fd = kvf_queue_fd(queue), .events = POLLIN};
    assert_int_equal(poll(&fd, 1, 0), 0);
    kvf_cancel(queue, ticket); /* over already: nothing happens */
    kvf_queue_close(queue);
    close_bench(&b);
}

/* With arrivals each block is by itself, and is seen as soon as it is there. */
static void test_a_watched_load_goes_over_gaps(void **state) {
    (void)state;
    bench b = open_bench("mem:", 8);
    kvf_digest digest;
    uint8_t each[8] = {0};
    kvf_error err;
    kvf_queue *queue = NULL;
    kvft_save_all(b.space, b.store, b.prompt);
    kvf_space_digest(b.space, &digest);
    assert_int_equal(kvf_remove(b.store, &err, &digest, &b.prompt->keys[3]), KVF_OK);
    kvft_prompt_poison(b.prompt);
    assert_int_equal(kvf_queue_open(&queue, NULL, b.store, 1), KVF_OK);
    kvf_arrivals arrivals = {.each = each};
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_LOAD,
                       .space = b.space,
                       .blocks = b.prompt->blocks,
                       .num = 8,
                       .arrivals = &arrivals};
    uint64_t ticket = 0;
    kvf_completion done = {0};
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    for (size_t i = 0; i < 8; i++) {
        while (kvf_arrival_of(&arrivals, i) == KVF_AWAITED) {
            struct pollfd fd = {.fd = kvf_queue_fd(queue), .events = POLLIN};
            assert_int_equal(poll(&fd, 1, 10000), 1);
        }
        assert_int_equal(kvf_arrival_of(&arrivals, i), i == 3 ? KVF_MISSED : KVF_HERE);
    }
    assert_int_equal(kvf_arrival_why(&arrivals, 3), KVF_WHY_ABSENT);
    while (kvf_reap(queue, &done, 1) == 0) { /* woken by the last block, a moment before the batch is over */
        struct pollfd fd = {.fd = kvf_queue_fd(queue), .events = POLLIN};
        assert_int_equal(poll(&fd, 1, 10000), 1);
    }
    assert_int_equal(done.num_ok, 7);
    assert_true(kvf_arrived_bytes(&arrivals) >= 7u * PAYLOAD && kvf_arrived_at_us(&arrivals) > 0);
    assert_int_equal(b.prompt->blocks[3].why, KVF_WHY_ABSENT);
    assert_int_equal(kvft_prompt_wrong(b.prompt, 7, 8), 1);
    kvf_trim(queue, ticket, 0); /* over already: nothing happens */
    kvf_queue_close(queue);
    close_bench(&b);
}

/* Two processes that computed the same prefix: the second finds that the first has stored it meanwhile. */
static void test_two_stores_write_a_block_once(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[256];
    snprintf(url, sizeof url, "file:%s", dir);
    bench first = open_bench(url, 10), second = open_bench(url, 12);
    kvft_save_all(first.space, first.store, first.prompt);
    kvft_save_all(second.space, second.store, second.prompt);
    kvf_stats stats = stats_of(second.store);
    assert_int_equal(stats.saves, 12);
    assert_int_equal(stats.known, 10);
    assert_int_equal(stats.saved, 2);
    assert_true(kvf_knows(second.space, &second.prompt->keys[0]));
    close_bench(&second);
    close_bench(&first);
    kvft_remove_dir(dir);
}

static void test_queue_is_bounded(void **state) {
    (void)state;
    bench b = open_bench("mem:", 1);
    kvf_queue *queue = NULL;
    assert_int_equal(kvf_queue_open(&queue, NULL, b.store, 0), KVF_LIMIT);
    assert_int_equal(kvf_queue_open(&queue, NULL, b.store, 2), KVF_OK);
    kvf_batch batch = {.struct_size = sizeof batch, .op = KVF_OP_LOAD, .space = b.space, .blocks = b.prompt->blocks};
    uint64_t ticket = 0;
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_AGAIN);
    kvf_completion done[2];
    size_t num = 0;
    while (num < 2) {
        num += reap_one(queue, done);
    }
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    kvf_queue_close(queue);
    close_bench(&b);
}

/* ---- processes ---- */

static void log_slowly(void *ctx, kvf_log_level level, const char *message) {
    (void)level;
    (void)message;
    pid_t pid = fork(); /* the lock of the log is held now */
    if (pid == 0) {
        alarm(10);
        kvf_set_log(NULL, NULL, KVF_LOG_ERROR);
        _exit(0);
    }
    assert_int_equal(waitpid(pid, ctx, 0), pid);
}

static void test_a_child_can_set_the_log(void **state) {
    (void)state;
    int status = -1;
    kvf_set_log(log_slowly, &status, KVF_LOG_ERROR);
    kvfi_log(KVF_LOG_ERROR, "one message");
    kvf_set_log(NULL, NULL, KVF_LOG_ERROR);
    assert_int_equal(status, 0);
}

static void test_bad_urls_are_configuration_errors(void **state) {
    (void)state;
    const char *const bad[] = {
        "",       "nonsense", "http://host/", "mem:?max=x",      "mem:?colour=blue",     "file:",
        "redis:", "redis://", "redis://h:x/", "redis://h:99999", "redis://h/notanumber", "mem:?max=0"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        kvf_store *store = NULL;
        kvf_error err = {0};
        kvf_status status = kvf_store_open(&store, &err, &bad[i], 1, NULL);
        if (status != KVF_CONFIG) {
            fail_msg("\"%s\" gave %s", bad[i], kvf_status_name(status));
        }
        assert_true(strlen(err.what) > 10);
    }
}

static void refuses(const char *url, uint64_t flags, kvf_status expected, const char *word) {
    const kvf_options options = {.struct_size = sizeof options, .flags = flags};
    kvf_store *store = NULL;
    kvf_error err = {0};
    assert_int_equal(kvf_store_open(&store, &err, &url, 1, &options), expected);
    if (strstr(err.what, word) == NULL) {
        fail_msg("%s: \"%s\" does not say \"%s\"", url, err.what, word);
    }
}

/* What other programs call our kinds of stores. */
static void test_names_of_others_are_explained(void **state) {
    (void)state;
    refuses("unix:///run/redis.sock", 0, KVF_CONFIG, "write redis+unix: instead");
    refuses("unix:/run/redis.sock", 0, KVF_CONFIG, "write redis+unix: instead");
    refuses("valkey://host:6379", 0, KVF_CONFIG, "write redis: instead");
    refuses("valkeys://host:6379", 0, KVF_CONFIG, "write rediss: instead");
    refuses("http://host", 0, KVF_CONFIG, "use mem:");
}

/* A reader creates no folder, neither that of the URL nor those in it. */
static void test_what_must_exist(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[300], below[256];
    kvf_store *store = NULL;
    snprintf(below, sizeof below, "%s/kv", dir);
    snprintf(url, sizeof url, "file:%s", below);
    refuses(url, KVF_OPEN_EXISTING, KVF_CONFIG, "mistyped");
    assert_int_not_equal(access(below, F_OK), 0);
    assert_int_equal(mkdir(below, 0700), 0);
    refuses(url, KVF_OPEN_EXISTING, KVF_CONFIG, "mistyped");
    assert_int_equal(rmdir(below), 0); /* nothing is in it */
    refuses(url, 2, KVF_LIMIT, "flags");
    kvf_store_close(kvft_store(url));
    const char *urls[] = {"mem:", url};
    const kvf_options options = {.struct_size = sizeof options, .flags = KVF_OPEN_EXISTING};
    assert_int_equal(kvf_store_open(&store, NULL, urls, 2, &options), KVF_OK);
    kvf_store_close(store);
    kvft_remove_dir(dir);
}

/* ---- the space card ---- */

static void test_a_space_can_be_described(void **state) {
    (void)state;
    bench b = open_bench("mem:", 1);
    char *text = NULL;
    kvf_digest digest;
    kvf_space_digest(b.space, &digest);
    assert_int_equal(kvf_space_describe(b.store, &text, NULL, &digest), KVF_MISS);
    kvft_save_all(b.space, b.store, b.prompt);
    assert_int_equal(kvf_space_describe(b.store, &text, NULL, &digest), KVF_OK);
    assert_string_equal(text, "block_tokens=16\nengine=test\nkv=f16\nmodel=m\n");
    kvf_free(text);
    close_bench(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_saved_is_loaded),
        cmocka_unit_test(test_an_empty_batch_is_fine),
        cmocka_unit_test(test_behind_a_gap_nothing_is_used),
        cmocka_unit_test(test_other_tokens_under_the_right_key_are_a_miss),
        cmocka_unit_test(test_another_length_is_a_miss),
        cmocka_unit_test(test_spaces_do_not_meet),
        cmocka_unit_test(test_match_tells_the_sizes),
        cmocka_unit_test(test_known_blocks_are_not_written_again),
        cmocka_unit_test(test_what_was_forgotten_is_written_again),
        cmocka_unit_test(test_a_full_backlog_sheds_and_never_waits),
        cmocka_unit_test(test_no_room_is_a_failure_of_the_last_tier),
        cmocka_unit_test(test_reserve_and_commit),
        cmocka_unit_test(test_borrow_lends_and_survives_removal),
        cmocka_unit_test(test_borrow_checks_the_tokens),
        cmocka_unit_test(test_borrow_checks_the_length),
        cmocka_unit_test(test_borrow_of_an_empty_payload),
        cmocka_unit_test(test_blocks_of_the_most_tokens),
        cmocka_unit_test(test_loads_and_loans_are_counted),
        cmocka_unit_test(test_a_view_gathers_and_scatters),
        cmocka_unit_test(test_bad_views_are_refused),
        cmocka_unit_test(test_a_view_without_memory),
        cmocka_unit_test(test_views_at_their_limits),
        cmocka_unit_test(test_tiers_fall_through_and_promote),
        cmocka_unit_test(test_a_tier_without_time_stores_nothing),
        cmocka_unit_test(test_what_can_not_be_told_is_unknown),
        cmocka_unit_test(test_the_doctor_sees_every_tier),
        cmocka_unit_test(test_queue_saves_matches_and_loads),
        cmocka_unit_test(test_a_queue_save_tells_of_every_tier),
        cmocka_unit_test(test_a_watched_load_goes_over_gaps),
        cmocka_unit_test(test_two_stores_write_a_block_once),
        cmocka_unit_test(test_queue_is_bounded),
        cmocka_unit_test(test_a_child_can_set_the_log),
        cmocka_unit_test(test_bad_urls_are_configuration_errors),
        cmocka_unit_test(test_names_of_others_are_explained),
        cmocka_unit_test(test_what_must_exist),
        cmocka_unit_test(test_a_space_can_be_described),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
