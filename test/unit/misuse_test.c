/* SPDX-License-Identifier: Apache-2.0
 *
 * Wrong arguments: every public call answers each of them as its header says, and none crashes. When memory runs out or
 * the system fails, blocks have the pairs of status and reason that kvf_block lists. And the counters of kvf_stats
 * after all that: no outcome is counted more often than what it is an outcome of.
 */
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/faults.h"
#include "support/kit.h"

#define BLOCKS  4u
#define TOKENS  16u
#define PAYLOAD 3000u
#define SLOTS   8u
#define SPOILED 2u /* the block that a row spoils */

typedef struct bench {
    kvf_store *store, *other;
    kvf_space *space;
    kvf_queue *queue;
    kvf_view *view;
    uint8_t *pool;
    kvft_prompt *prompt;
    kvf_block blocks[BLOCKS]; /* in the slots of the view */
    kvf_error err;
} bench;

static void take_blocks(bench *b) {
    for (size_t i = 0; i < BLOCKS; i++) {
        b->blocks[i] = b->prompt->blocks[i];
        b->blocks[i].iov = NULL;
        b->blocks[i].slot = (int64_t)i;
    }
}

static void open_bench(bench *b) {
    *b = (bench){.store = kvft_store("mem:"), .other = kvft_store("mem:"), .pool = calloc(SLOTS, PAYLOAD)};
    kvf_region region = {.base = b->pool, .slot_stride = PAYLOAD, .run_bytes = PAYLOAD, .num_runs = 1};
    b->space = kvft_sealed_space(b->store, "m", TOKENS, NULL); /* sealed records are not lent */
    b->prompt = kvft_prompt_new(b->space, 3, BLOCKS, PAYLOAD);
    assert_int_equal(kvf_view_open(&b->view, NULL, &region, 1, SLOTS), KVF_OK);
    assert_int_equal(kvf_queue_open(&b->queue, NULL, b->store, 2), KVF_OK);
    take_blocks(b);
}

static void close_bench(bench *b) {
    kvft_prompt_free(b->prompt);
    kvf_queue_close(b->queue);
    kvf_view_close(b->view);
    kvf_space_close(b->space);
    kvf_store_close(b->store);
    kvf_store_close(b->other);
    free(b->pool);
}

static kvf_stats stats_of(kvf_store *store) {
    kvf_stats stats = {.struct_size = sizeof stats};
    assert_int_equal(kvf_store_stats(store, &stats), KVF_OK);
    return stats;
}

static uint64_t sum(const uint64_t of[KVF_REASON_ROOM]) {
    uint64_t all = 0;
    for (size_t i = 0; i < KVF_REASON_ROOM; i++) {
        all += of[i];
    }
    return all;
}

/* At any moment; at rest nothing is missing either. */
static void check_counters(const kvf_stats *s, bool at_rest) {
    uint64_t loads = s->load_hits + sum(s->misses), saves = s->saved + s->known + sum(s->save_failures);
    if (loads > s->loads || saves > s->saves || s->lookup_hits > s->lookups || s->disconnects > s->connects ||
        s->backlog_bytes > s->backlog_peak_bytes || (at_rest && (loads != s->loads || saves != s->saves))) {
        fail_msg("loads %llu of %llu, saves %llu of %llu, lookups %llu of %llu, disconnects %llu of %llu",
                 (unsigned long long)loads, (unsigned long long)s->loads, (unsigned long long)saves,
                 (unsigned long long)s->saves, (unsigned long long)s->lookup_hits, (unsigned long long)s->lookups,
                 (unsigned long long)s->disconnects, (unsigned long long)s->connects);
    }
}

/* ---- blocks that break a rule ---- */

static struct iovec endless[2] = {{NULL, SIZE_MAX - 10}, {NULL, 100}};
static struct iovec long_one[1] = {{NULL, KVF_MAX_PAYLOAD_BYTES + 1}};

static void tokens_without_memory(kvf_block *block) {
    block->tokens = NULL;
}
static void too_many_tokens(kvf_block *block) {
    block->num_tokens = TOKENS + 1;
}
static void far_too_many_tokens(kvf_block *block) {
    block->num_tokens = UINT32_MAX;
}
static void position_out_of_range(kvf_block *block) {
    block->first_token = UINT32_MAX - TOKENS + 1;
}
static void reserved_first(kvf_block *block) {
    block->reserved[0] = 1;
}
static void reserved_last(kvf_block *block) {
    block->reserved[1] = UINT64_C(1) << 63;
}
static void endless_payload(kvf_block *block) {
    block->iov = endless;
    block->num_iov = 2;
}
static void long_payload(kvf_block *block) {
    block->iov = long_one;
    block->num_iov = 1;
}
static void slot_below(kvf_block *block) {
    block->slot = -1;
}
static void slot_behind(kvf_block *block) {
    block->slot = SLOTS;
}
static void slot_far_away(kvf_block *block) {
    block->slot = INT64_MIN;
}

static const struct {
    const char *name;
    void (*spoil)(kvf_block *);
    bool in_tokens; /* what kvf_commit looks at, too */
    bool in_memory; /* what kvf_borrow does not look at: it uses no slot */
} block_rows[] = {
    {"tokens NULL with a count", tokens_without_memory, true, false},
    {"more tokens than a block has", too_many_tokens, true, false},
    {"a count without bounds", far_too_many_tokens, true, false},
    {"a position beyond 32 bits", position_out_of_range, true, false},
    {"reserved[0]", reserved_first, true, false},
    {"reserved[1]", reserved_last, true, false},
    {"iovecs whose sum overflows", endless_payload, false, false},
    {"a payload beyond the bound", long_payload, false, false},
    {"slot -1", slot_below, false, true},
    {"a slot behind the last", slot_behind, false, true},
    {"a slot far away", slot_far_away, false, true},
};

static kvf_completion reap(kvf_queue *queue) {
    kvf_completion done = {0};
    while (kvf_reap(queue, &done, 1) == 0) {
        struct pollfd fd = {.fd = kvf_queue_fd(queue), .events = POLLIN};
        assert_int_equal(poll(&fd, 1, 20000), 1);
    }
    return done;
}

static uint8_t arrived[BLOCKS];

static size_t submit(bench *b, kvf_op op, bool watched, kvf_view *view) {
    kvf_arrivals arrivals = {.each = arrived};
    memset(arrived, 0, sizeof arrived);
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = op,
                       .space = b->space,
                       .blocks = b->blocks,
                       .num = BLOCKS,
                       .view = view,
                       .arrivals = watched ? &arrivals : NULL};
    uint64_t ticket = 0;
    assert_int_equal(kvf_submit(b->queue, &ticket, &batch), KVF_OK);
    size_t num_ok = reap(b->queue).num_ok;
    for (size_t i = 0; watched && i < BLOCKS; i++) {
        assert_int_equal(kvf_arrival_of(&arrivals, i), b->blocks[i].status == KVF_OK ? KVF_HERE : KVF_MISSED);
    }
    return num_ok;
}

enum way { LOAD, LOAD_EACH, SAVE, QUEUE_LOAD, QUEUE_LOAD_EACH, QUEUE_SAVE, NUM_WAYS };

static size_t go(bench *b, enum way way, kvf_view *view) {
    switch (way) {
    case LOAD:
        return kvf_load(b->space, b->blocks, BLOCKS, view, KVF_DEFAULT);
    case LOAD_EACH:
        return kvf_load_with(b->space, b->blocks, BLOCKS, view,
                             &(kvf_load_options){.struct_size = sizeof(kvf_load_options), .flags = KVF_EACH});
    case SAVE:
        return kvf_save(b->space, b->blocks, BLOCKS, view);
    case QUEUE_LOAD:
    case QUEUE_LOAD_EACH:
        return submit(b, KVF_OP_LOAD, way == QUEUE_LOAD_EACH, view);
    default:
        return submit(b, KVF_OP_SAVE, false, view);
    }
}

static bool is_save(enum way way) {
    return way == SAVE || way == QUEUE_SAVE;
}

/* The block that breaks the rule says so, what lies before it is done, what lies behind it is left alone. */
static void check_blocks(const bench *b, enum way way, size_t num_ok, size_t spoiled, const char *name) {
    for (size_t i = 0; i < BLOCKS; i++) {
        kvf_status status = i < spoiled ? KVF_OK : i == spoiled ? KVF_LIMIT : is_save(way) ? KVF_AGAIN : KVF_MISS;
        kvf_reason why = i < spoiled ? KVF_WHY_NONE : i == spoiled ? KVF_WHY_MISUSE : KVF_WHY_AFTER_GAP;
        if (num_ok != spoiled || b->blocks[i].status != status || b->blocks[i].why != why) {
            fail_msg("%s, way %d: %zu blocks; block %zu is %s (%s)", name, (int)way, num_ok, i,
                     kvf_status_name(b->blocks[i].status), kvf_reason_name(b->blocks[i].why));
        }
    }
}

static void test_blocks_that_break_a_rule(void **state) {
    (void)state;
    bench b;
    open_bench(&b);
    kvft_save_all(b.space, b.store, b.prompt);
    for (size_t row = 0; row < sizeof block_rows / sizeof *block_rows; row++) {
        for (enum way way = LOAD; way < NUM_WAYS; way++) {
            take_blocks(&b);
            block_rows[row].spoil(&b.blocks[SPOILED]);
            check_blocks(&b, way, go(&b, way, b.view), SPOILED, block_rows[row].name);
        }
        kvf_borrowed borrowed = {0};
        kvf_status borrow = block_rows[row].in_memory ? KVF_OK : KVF_LIMIT;
        assert_int_equal(kvf_borrow(b.space, &borrowed, &b.blocks[SPOILED]), borrow);
        kvf_release(b.space, &borrowed);
        kvf_reserved reserved;
        assert_int_equal(kvf_reserve(b.space, &reserved, PAYLOAD), KVF_OK);
        kvf_status commit = block_rows[row].in_tokens ? KVF_LIMIT : KVF_OK;
        assert_int_equal(kvf_commit(b.space, &reserved, &b.blocks[SPOILED], PAYLOAD), commit);
        assert_null(reserved.opaque);
    }
    for (enum way way = LOAD; way < NUM_WAYS; way++) { /* the slots of a view that is not there */
        take_blocks(&b);
        check_blocks(&b, way, go(&b, way, NULL), 0, "no view");
    }
    (void)kvft_flush(b.store);
    kvf_stats stats = stats_of(b.store);
    check_counters(&stats, true);
    assert_true(stats.misses[KVF_WHY_MISUSE] > 0 && stats.save_failures[KVF_WHY_MISUSE] > 0);
    close_bench(&b);
}

/* ---- budgets ---- */

static kvf_status poll_match(bench *b, int64_t us) {
    size_t run = 0;
    return kvf_match(b->space, &run, NULL, b->prompt->keys, BLOCKS, us);
}
static kvf_status poll_load(bench *b, int64_t us) {
    take_blocks(b);
    (void)kvf_load(b->space, b->blocks, 1, b->view, us);
    return b->blocks[0].status == KVF_LIMIT && b->blocks[0].why == KVF_WHY_MISUSE ? KVF_LIMIT : KVF_OK;
}
static kvf_status load_with(bench *b, uint32_t flags, int64_t budget_us, int64_t patience_us) {
    const kvf_load_options options = {
        .struct_size = sizeof options, .flags = flags, .budget_us = budget_us, .patience_us = patience_us};
    take_blocks(b);
    size_t loaded = kvf_load_with(b->space, b->blocks, BLOCKS, b->view, &options);
    bool refused = loaded == 0 && b->blocks[0].status == KVF_LIMIT && b->blocks[0].why == KVF_WHY_MISUSE &&
                   b->blocks[1].why == KVF_WHY_AFTER_GAP;
    return refused ? KVF_LIMIT : KVF_OK;
}
static kvf_status poll_load_with(bench *b, int64_t us) {
    return load_with(b, KVF_EACH, us, 0);
}
static kvf_status patience_of_load(bench *b, int64_t us) {
    return load_with(b, 0, KVF_POLL, us);
}
static kvf_status poll_flush(bench *b, int64_t us) {
    return kvf_store_flush(b->store, NULL, us);
}
static kvf_status poll_fence(bench *b, int64_t us) {
    int64_t slot = 1;
    return kvf_fence(b->view, &slot, 1, us);
}
static kvf_status poll_queue(bench *b, kvf_op op, int64_t us) {
    kvf_batch batch = {.struct_size = sizeof batch, .op = op, .space = b->space, .budget_us = us};
    uint64_t ticket = 0;
    kvf_status status = kvf_submit(b->queue, &ticket, &batch);
    if (status == KVF_OK) {
        (void)reap(b->queue);
    }
    return status;
}
static kvf_status poll_queue_load(bench *b, int64_t us) {
    return poll_queue(b, KVF_OP_LOAD, us);
}
static kvf_status poll_queue_match(bench *b, int64_t us) {
    return poll_queue(b, KVF_OP_MATCH, us);
}
static kvf_status poll_queue_save(bench *b, int64_t us) {
    return poll_queue(b, KVF_OP_SAVE, us);
}
static kvf_status poll_queue_remove(bench *b, int64_t us) {
    return poll_queue(b, KVF_OP_REMOVE, us);
}
static kvf_status poll_queue_touch(bench *b, int64_t us) {
    return poll_queue(b, KVF_OP_TOUCH, us);
}
static kvf_status poll_open(bench *b, int64_t us) {
    kvf_options options = {.struct_size = sizeof options, .drain_us = us};
    const char *url = "mem:";
    kvf_store *store = NULL;
    kvf_status status = kvf_store_open(&store, &b->err, &url, 1, &options);
    kvf_store_close(store);
    return status;
}
static kvf_status poll_session_save(bench *b, int64_t us) {
    kvf_session_options options = {.struct_size = sizeof options, .budget_us = us};
    kvf_tensor tensor = {.data = "kv", .len = 2};
    return kvf_session_save(b->store, &b->err, "s", &tensor, &tensor, &options);
}
static kvf_status poll_session_load(bench *b, int64_t us) {
    kvf_session *session = NULL;
    kvf_status status = kvf_session_load(b->store, &session, &b->err, "s", us);
    kvf_session_free(session);
    return status;
}
static kvf_status poll_session_load_with(bench *b, int64_t us) {
    kvf_session_load_options options = {.struct_size = sizeof options, .budget_us = us};
    kvf_session *session = NULL;
    kvf_status status = kvf_session_load_with(b->store, &session, &b->err, "s", &options);
    kvf_session_free(session);
    return status;
}
static int see_nothing(void *ctx, const kvf_entry *entry) {
    (void)ctx;
    (void)entry;
    return 0;
}
static kvf_status poll_walk(bench *b, int64_t us) {
    kvf_walk_options options = {.struct_size = sizeof options, .budget_us = us};
    return kvf_walk(b->store, &b->err, see_nothing, NULL, &options);
}

static const struct {
    const char *name;
    kvf_status (*call)(bench *, int64_t us);
    bool polls;
} budget_rows[] = {
    {"kvf_match", poll_match, true},
    {"kvf_load", poll_load, true},
    {"kvf_load_with", poll_load_with, true},
    {"the patience of kvf_load_with", patience_of_load, false},
    {"kvf_store_flush", poll_flush, true},
    {"kvf_fence", poll_fence, true},
    {"kvf_submit of a load", poll_queue_load, true},
    {"kvf_submit of a match", poll_queue_match, true},
    {"kvf_submit of a save", poll_queue_save, false},
    {"kvf_submit of a removal", poll_queue_remove, false},
    {"kvf_submit of a touch", poll_queue_touch, false},
    {"kvf_options", poll_open, true},
    {"kvf_session_save", poll_session_save, false},
    {"kvf_session_load", poll_session_load, false},
    {"kvf_session_load_with", poll_session_load_with, false},
    {"kvf_walk", poll_walk, false},
};

static void test_budgets(void **state) {
    (void)state;
    static const int64_t wrong[] = {-2, -1000000, INT64_MIN, KVF_MAX_BUDGET_US + 1, INT64_MAX};
    static const int64_t right[] = {KVF_DEFAULT, 1000000, KVF_MS(5000), KVF_MAX_BUDGET_US};
    bench b;
    open_bench(&b);
    for (size_t row = 0; row < sizeof budget_rows / sizeof *budget_rows; row++) {
        for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
            if (budget_rows[row].call(&b, wrong[i]) != KVF_LIMIT) {
                fail_msg("%s took a budget of %lld", budget_rows[row].name, (long long)wrong[i]);
            }
        }
        for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
            kvf_status status = budget_rows[row].call(&b, right[i]);
            if (status != KVF_OK) {
                fail_msg("%s with a budget of %lld: %s", budget_rows[row].name, (long long)right[i],
                         kvf_status_name(status));
            }
        }
        if ((budget_rows[row].call(&b, KVF_POLL) == KVF_LIMIT) == budget_rows[row].polls) {
            fail_msg("%s and KVF_POLL", budget_rows[row].name);
        }
    }
    close_bench(&b);
}

/* ---- everything else ---- */

static kvf_status match_too_many(bench *b) {
    size_t run = 0;
    return kvf_match(b->space, &run, NULL, b->prompt->keys, KVF_MAX_BLOCKS + 1, KVF_DEFAULT);
}
static kvf_status load_too_many(bench *b) {
    kvf_block *blocks = calloc(KVF_MAX_BLOCKS + 1, sizeof *blocks);
    size_t loaded = kvf_load(b->space, blocks, KVF_MAX_BLOCKS + 1, b->view, KVF_DEFAULT);
    kvf_status status =
        loaded == 0 && blocks[0].why == KVF_WHY_MISUSE && blocks[KVF_MAX_BLOCKS].why == KVF_WHY_AFTER_GAP
            ? blocks[0].status
            : KVF_OK;
    free(blocks);
    return status;
}
static kvf_status load_by_unknown_flag(bench *b) {
    return load_with(b, UINT32_C(1) << 31, KVF_DEFAULT, 0);
}
static kvf_status load_that_may_lend(bench *b) {
    return load_with(b, KVF_MAY_LEND, KVF_DEFAULT, 0);
}
static kvf_status save_too_many(bench *b) {
    kvf_block *blocks = calloc(KVF_MAX_BLOCKS + 1, sizeof *blocks);
    size_t saved = kvf_save(b->space, blocks, KVF_MAX_BLOCKS + 1, b->view);
    kvf_status status = saved == 0 && blocks[0].why == KVF_WHY_MISUSE ? blocks[0].status : KVF_OK;
    free(blocks);
    return status;
}
static kvf_status open_no_tiers(bench *b) {
    kvf_store *store = NULL;
    return kvf_store_open(&store, &b->err, NULL, 0, NULL);
}
static kvf_status open_short_secret(bench *b) {
    kvf_options options = {.struct_size = sizeof options, .secret = "short", .secret_len = 5};
    const char *url = "mem:";
    kvf_store *store = NULL;
    return kvf_store_open(&store, &b->err, &url, 1, &options);
}
static kvf_status open_previous_secret_alone(bench *b) {
    kvf_options options = {
        .struct_size = sizeof options, .previous_secret = "sixteen bytes...", .previous_secret_len = 16};
    const char *url = "mem:";
    kvf_store *store = NULL;
    return kvf_store_open(&store, &b->err, &url, 1, &options);
}
/* Numbers without bounds mean as many as there can be. */
static kvf_status open_without_bounds(bench *b) {
    const char *url = "mem:";
    kvf_status status = KVF_LIMIT;
    for (uint32_t less = 0; less < 8; less++) {
        kvf_options options = {
            .struct_size = sizeof options, .load_threads = UINT32_MAX - less, .store_threads = UINT32_MAX - less};
        kvf_store *store = NULL;
        assert_int_equal(kvf_store_open(&store, &b->err, &url, 1, &options), KVF_OK);
        kvf_space *space = kvft_space(store, "m", TOKENS);
        kvft_save_all(space, store, b->prompt);
        status = kvf_load(space, b->prompt->blocks, BLOCKS, NULL, KVF_DEFAULT) == BLOCKS ? KVF_OK : KVF_MISS;
        kvf_space_close(space);
        kvf_store_close(store);
    }
    return status;
}
static kvf_status save_into_a_backlog_of(bench *b, size_t bytes, size_t num, kvf_reason why) {
    kvf_options options = {.struct_size = sizeof options, .backlog_bytes = bytes};
    const char *url = "mem:";
    kvf_store *store = NULL;
    assert_int_equal(kvf_store_open(&store, &b->err, &url, 1, &options), KVF_OK);
    kvf_space *space = kvft_space(store, "m", TOKENS);
    assert_int_equal(kvf_save(space, b->prompt->blocks, 1, NULL), num);
    assert_int_equal(b->prompt->blocks[0].why, why);
    kvf_space_close(space);
    kvf_store_close(store);
    return b->prompt->blocks[0].status;
}
static kvf_status save_into_a_tiny_backlog(bench *b) {
    return save_into_a_backlog_of(b, 1, 0, KVF_WHY_FULL);
}
static kvf_status save_into_an_endless_backlog(bench *b) {
    return save_into_a_backlog_of(b, SIZE_MAX, 1, KVF_WHY_NONE);
}
static kvf_status info_of_no_tier(bench *b) {
    kvf_tier_info info = {.struct_size = sizeof info};
    return kvf_tier_info_get(b->store, &info, 1);
}
static kvf_status space_without_fields(bench *b) {
    kvf_space *space = NULL;
    return kvf_space_open(&space, &b->err, b->store, NULL, 0, NULL);
}
static kvf_status space_with_fields(bench *b, const char *name, const char *value, uint32_t block_tokens) {
    const kvf_field fields[] = {{"engine", "e"}, {"model", "m"}, {"kv", "f16"}, {name, value}};
    kvf_space_options options = {.struct_size = sizeof options, .block_tokens = block_tokens};
    kvf_space *space = NULL;
    return kvf_space_open(&space, &b->err, b->store, fields, 4, &options);
}
static kvf_status space_with_a_field_twice(bench *b) {
    return space_with_fields(b, "model", "n", 0);
}
static kvf_status space_with_a_bad_name(bench *b) {
    return space_with_fields(b, "Not A Name", "n", 0);
}
static kvf_status space_of_large_blocks(bench *b) {
    return space_with_fields(b, "rope", "n", UINT32_MAX);
}
static kvf_status view_without_regions(bench *b) {
    kvf_view *view = NULL;
    return kvf_view_open(&view, &b->err, NULL, 0, 1);
}
static kvf_status view_of(bench *b, kvf_region region, size_t num_slots) {
    kvf_view *view = NULL;
    return kvf_view_open(&view, &b->err, &region, 1, num_slots);
}
static kvf_status view_without_slots(bench *b) {
    return view_of(b, (kvf_region){.base = b->pool, .run_bytes = 1, .num_runs = 1}, 0);
}
static kvf_status view_without_runs(bench *b) {
    return view_of(b, (kvf_region){.base = b->pool, .run_bytes = 1}, 1);
}
static kvf_status view_of_endless_runs(bench *b) {
    return view_of(b, (kvf_region){.base = b->pool, .run_bytes = SIZE_MAX / 2, .num_runs = 3}, 1);
}
static kvf_status view_beyond_memory(bench *b) {
    return view_of(b, (kvf_region){.base = b->pool, .slot_stride = SIZE_MAX / 4, .run_bytes = 1, .num_runs = 1}, 8);
}
static kvf_status view_with_reserved(bench *b) {
    return view_of(b, (kvf_region){.base = b->pool, .run_bytes = 1, .num_runs = 1, .reserved = {0, 1}}, 1);
}
static kvf_status fence_of_no_slot(bench *b) {
    int64_t slots[] = {0, SLOTS};
    return kvf_fence(b->view, slots, 2, KVF_DEFAULT);
}
static kvf_status fence_below(bench *b) {
    int64_t slot = -1;
    return kvf_fence(b->view, &slot, 1, KVF_DEFAULT);
}
static kvf_status reserve_too_much(bench *b) {
    kvf_reserved reserved;
    return kvf_reserve(b->space, &reserved, KVF_MAX_PAYLOAD_BYTES + 1);
}
static kvf_status reserve_beyond_the_backlog(bench *b) {
    kvf_reserved reserved;
    return kvf_reserve(b->space, &reserved, KVF_MAX_PAYLOAD_BYTES);
}
static kvf_status commit_of_more(bench *b) {
    kvf_reserved reserved;
    assert_int_equal(kvf_reserve(b->space, &reserved, 10), KVF_OK);
    return kvf_commit(b->space, &reserved, &b->blocks[0], 11);
}
static kvf_status commit_with_reserved(bench *b) {
    kvf_reserved reserved;
    assert_int_equal(kvf_reserve(b->space, &reserved, 10), KVF_OK);
    reserved.reserved[0] = 1;
    return kvf_commit(b->space, &reserved, &b->blocks[0], 10);
}
static kvf_status commit_with_the_last_reserved(bench *b) {
    kvf_reserved reserved;
    assert_int_equal(kvf_reserve(b->space, &reserved, 10), KVF_OK);
    reserved.reserved[1] = UINT64_C(1) << 63;
    return kvf_commit(b->space, &reserved, &b->blocks[0], 10);
}
static kvf_status commit_twice(bench *b) {
    kvf_reserved reserved;
    assert_int_equal(kvf_reserve(b->space, &reserved, 10), KVF_OK);
    kvf_abandon(b->space, &reserved);
    kvf_abandon(b->space, &reserved);
    return kvf_commit(b->space, &reserved, &b->blocks[0], 10);
}
static kvf_status queue_without_depth(bench *b) {
    kvf_queue *queue = NULL;
    return kvf_queue_open(&queue, &b->err, b->store, 0);
}
static kvf_status queue_too_deep(bench *b) {
    kvf_queue *queue = NULL;
    return kvf_queue_open(&queue, &b->err, b->store, 4097);
}
static kvf_status submit_batch(bench *b, kvf_batch batch) {
    uint64_t ticket = 0;
    batch.struct_size = sizeof batch;
    batch.space = batch.space != NULL ? batch.space : b->space;
    batch.blocks = b->blocks;
    batch.view = b->view;
    return kvf_submit(b->queue, &ticket, &batch);
}
static kvf_status submit_no_op(bench *b) {
    return submit_batch(b, (kvf_batch){.op = (kvf_op)(KVF_OP_TOUCH + 1), .num = 1});
}
static kvf_status submit_negative_op(bench *b) {
    return submit_batch(b, (kvf_batch){.op = (kvf_op)-1, .num = 1});
}
static kvf_status submit_unknown_flag(bench *b) {
    return submit_batch(b, (kvf_batch){.op = KVF_OP_SAVE, .num = 1, .flags = UINT32_C(1) << 31});
}
static kvf_status submit_flag_of_a_save(bench *b) {
    return submit_batch(b, (kvf_batch){.op = KVF_OP_LOAD, .num = 1, .flags = KVF_MAY_LEND});
}
static kvf_status submit_flag_of_a_load(bench *b) {
    return submit_batch(b, (kvf_batch){.op = KVF_OP_SAVE, .num = 1, .flags = KVF_EACH});
}
static kvf_status submit_flag_of_no_removal(bench *b) {
    return submit_batch(b, (kvf_batch){.op = KVF_OP_REMOVE, .num = 1, .flags = KVF_EACH});
}
static kvf_status submit_too_many(bench *b) {
    return submit_batch(b, (kvf_batch){.op = KVF_OP_LOAD, .num = KVF_MAX_BLOCKS + 1});
}
static kvf_status submit_watched_save(bench *b) {
    kvf_arrivals arrivals = {.each = arrived};
    return submit_batch(b, (kvf_batch){.op = KVF_OP_SAVE, .num = 1, .arrivals = &arrivals});
}
static kvf_status submit_watched_with_reserved(bench *b) {
    kvf_arrivals arrivals = {.each = arrived, .reserved = {1, 0}};
    return submit_batch(b, (kvf_batch){.op = KVF_OP_LOAD, .num = 1, .arrivals = &arrivals});
}
static kvf_status submit_to_another_store(bench *b) {
    kvf_space *space = kvft_space(b->other, "m", TOKENS);
    kvf_status status = submit_batch(b, (kvf_batch){.op = KVF_OP_LOAD, .num = 1, .space = space});
    kvf_space_close(space);
    return status;
}
static kvf_status submit_to_a_full_queue(bench *b) {
    kvf_batch batch = {.op = KVF_OP_MATCH, .num = 1};
    kvf_status status = KVF_OK;
    for (int i = 0; i < 3 && status == KVF_OK; i++) { /* it holds two, and nobody reaps them */
        status = submit_batch(b, batch);
    }
    (void)reap(b->queue);
    (void)reap(b->queue);
    return status;
}
static kvf_status walk_to_a_key_of_no_space(bench *b) {
    kvf_walk_options options = {.struct_size = sizeof options, .key = b->prompt->keys};
    return kvf_walk(b->store, &b->err, see_nothing, NULL, &options);
}
static kvf_status remove_what_is_not_there(bench *b) {
    kvf_digest digest;
    kvf_key key = {{1}};
    kvf_space_digest(b->space, &digest);
    return kvf_remove(b->store, &b->err, &digest, &key);
}
static kvf_status describe_what_is_not_there(bench *b) {
    kvf_digest digest = {{1}};
    char *text = NULL;
    return kvf_space_describe(b->store, &text, &b->err, &digest);
}
static kvf_status save_session(bench *b, const char *id, const kvf_tensor *tensor, const char *layout) {
    kvf_session_options options = {.struct_size = sizeof options, .layout = layout};
    return kvf_session_save(b->store, &b->err, id, tensor, tensor, &options);
}
static const kvf_tensor two_bytes = {.data = "kv", .len = 2};
static const char *long_id(void) {
    static char id[KVF_MAX_ID_BYTES + 2];
    memset(id, 'x', sizeof id - 1);
    return id;
}
static kvf_status session_without_id(bench *b) {
    return save_session(b, "", &two_bytes, NULL);
}
static kvf_status session_of_a_long_id(bench *b) {
    return save_session(b, long_id(), &two_bytes, NULL);
}
static kvf_status session_load_of_a_long_id(bench *b) {
    kvf_session *session = NULL;
    return kvf_session_load(b->store, &session, &b->err, long_id(), KVF_DEFAULT);
}
static kvf_status session_remove_of_a_long_id(bench *b) {
    return kvf_session_remove(b->store, &b->err, long_id());
}
static kvf_status session_load_of_none(bench *b) {
    kvf_session *session = NULL;
    return kvf_session_load(b->store, &session, &b->err, "none", KVF_DEFAULT);
}
static kvf_status session_remove_of_none(bench *b) {
    return kvf_session_remove(b->store, &b->err, "none");
}
static kvf_status session_of_a_long_layout(bench *b) {
    return save_session(b, "s", &two_bytes, long_id());
}
static kvf_status session_of_an_unprintable_layout(bench *b) {
    return save_session(b, "s", &two_bytes, "L\n");
}
static kvf_status session_of_many_dims(bench *b) {
    kvf_tensor tensor = {.data = "kv", .len = 2, .dtype = "uint8", .num_dims = KVF_MAX_DIMS + 1};
    return save_session(b, "s", &tensor, NULL);
}
static kvf_status session_of_another_shape(bench *b) {
    kvf_tensor tensor = {.data = "kv", .len = 2, .dtype = "uint8", .num_dims = 1, .dims = {3}};
    return save_session(b, "s", &tensor, NULL);
}
static kvf_status session_of_an_endless_shape(bench *b) {
    kvf_tensor tensor = {.data = "kv", .len = 2, .dtype = "uint8", .num_dims = 2, .dims = {UINT64_MAX, UINT64_MAX}};
    return save_session(b, "s", &tensor, NULL);
}
static kvf_status session_of_an_open_dtype(bench *b) {
    kvf_tensor tensor = two_bytes;
    memset(tensor.dtype, 'x', sizeof tensor.dtype);
    return save_session(b, "s", &tensor, NULL);
}
static kvf_status session_with_reserved(bench *b) {
    kvf_tensor tensor = two_bytes;
    tensor.reserved[1] = 1;
    return save_session(b, "s", &tensor, NULL);
}
/* Its sum is 2, if nobody minds the overflow. */
static char few_bytes[4];
static const struct iovec overflow[2] = {{few_bytes, SIZE_MAX}, {few_bytes, 3}};
static const struct iovec right_size[1] = {{few_bytes, 2}};
static const struct iovec wrong_size[1] = {{few_bytes, 3}};
static kvf_status session_in_pieces(bench *b, const struct iovec *iov, uint32_t num) {
    kvf_tensor tensor = {.len = 2, .iov = iov, .num_iov = num};
    return save_session(b, "s", &tensor, NULL);
}
static kvf_status session_of_endless_pieces(bench *b) {
    return session_in_pieces(b, overflow, 2);
}
static kvf_status session_of_longer_pieces(bench *b) {
    return session_in_pieces(b, wrong_size, 1);
}
static kvf_status session_of_no_pieces(bench *b) {
    return session_in_pieces(b, right_size, 0);
}
static kvf_status load_session_with(bench *b, kvf_session_load_options options) {
    kvf_session *session = NULL;
    options.struct_size = options.struct_size == 0 ? sizeof options : 0;
    assert_int_equal(save_session(b, "w", &two_bytes, NULL), KVF_OK);
    kvf_status status = kvf_session_load_with(b->store, &session, &b->err, "w", &options);
    assert_true((session != NULL) == (status == KVF_OK));
    kvf_session_free(session);
    return status;
}
static kvf_status session_load_without_size(bench *b) {
    return load_session_with(b, (kvf_session_load_options){.struct_size = 1});
}
static kvf_status session_load_with_unknown_flag(bench *b) {
    return load_session_with(b, (kvf_session_load_options){.flags = UINT32_C(1) << 31});
}
static kvf_status session_load_into_one(bench *b) {
    return load_session_with(b, (kvf_session_load_options){.k_iov = right_size, .num_k_iov = 1});
}
static kvf_status session_load_into(bench *b, const struct iovec *iov, uint32_t num) {
    return load_session_with(
        b, (kvf_session_load_options){.k_iov = right_size, .num_k_iov = 1, .v_iov = iov, .num_v_iov = num});
}
static kvf_status session_load_into_its_size(bench *b) {
    return session_load_into(b, right_size, 1);
}
static kvf_status session_load_into_another_size(bench *b) {
    return session_load_into(b, wrong_size, 1);
}
static kvf_status session_load_into_endless_memory(bench *b) {
    return session_load_into(b, overflow, 2);
}

#define ROW(call, status) \
    { #call, call, status }
static const struct {
    const char *name;
    kvf_status (*call)(bench *);
    kvf_status status;
} call_rows[] = {
    ROW(match_too_many, KVF_LIMIT),
    ROW(load_too_many, KVF_LIMIT),
    ROW(load_by_unknown_flag, KVF_LIMIT),
    ROW(load_that_may_lend, KVF_LIMIT),
    ROW(save_too_many, KVF_LIMIT),
    ROW(open_no_tiers, KVF_CONFIG),
    ROW(open_short_secret, KVF_LIMIT),
    ROW(open_previous_secret_alone, KVF_LIMIT),
    ROW(open_without_bounds, KVF_OK),
    ROW(save_into_a_tiny_backlog, KVF_AGAIN),
    ROW(save_into_an_endless_backlog, KVF_OK),
    ROW(info_of_no_tier, KVF_LIMIT),
    ROW(space_without_fields, KVF_REFUSED),
    ROW(space_with_a_field_twice, KVF_LIMIT),
    ROW(space_with_a_bad_name, KVF_LIMIT),
    ROW(space_of_large_blocks, KVF_LIMIT),
    ROW(view_without_regions, KVF_LIMIT),
    ROW(view_without_slots, KVF_LIMIT),
    ROW(view_without_runs, KVF_LIMIT),
    ROW(view_of_endless_runs, KVF_LIMIT),
    ROW(view_beyond_memory, KVF_LIMIT),
    ROW(view_with_reserved, KVF_LIMIT),
    ROW(fence_of_no_slot, KVF_LIMIT),
    ROW(fence_below, KVF_LIMIT),
    ROW(reserve_too_much, KVF_LIMIT),
    ROW(reserve_beyond_the_backlog, KVF_AGAIN),
    ROW(commit_of_more, KVF_LIMIT),
    ROW(commit_with_reserved, KVF_LIMIT),
    ROW(commit_with_the_last_reserved, KVF_LIMIT),
    ROW(commit_twice, KVF_LIMIT),
    ROW(queue_without_depth, KVF_LIMIT),
    ROW(queue_too_deep, KVF_LIMIT),
    ROW(submit_no_op, KVF_LIMIT),
    ROW(submit_negative_op, KVF_LIMIT),
    ROW(submit_unknown_flag, KVF_LIMIT),
    ROW(submit_flag_of_a_save, KVF_LIMIT),
    ROW(submit_flag_of_a_load, KVF_LIMIT),
    ROW(submit_flag_of_no_removal, KVF_LIMIT),
    ROW(submit_too_many, KVF_LIMIT),
    ROW(submit_watched_save, KVF_LIMIT),
    ROW(submit_watched_with_reserved, KVF_LIMIT),
    ROW(submit_to_another_store, KVF_LIMIT),
    ROW(submit_to_a_full_queue, KVF_AGAIN),
    ROW(walk_to_a_key_of_no_space, KVF_LIMIT),
    ROW(remove_what_is_not_there, KVF_MISS),
    ROW(describe_what_is_not_there, KVF_MISS),
    ROW(session_without_id, KVF_LIMIT),
    ROW(session_of_a_long_id, KVF_LIMIT),
    ROW(session_load_of_a_long_id, KVF_LIMIT),
    ROW(session_remove_of_a_long_id, KVF_LIMIT),
    ROW(session_load_of_none, KVF_MISS),
    ROW(session_remove_of_none, KVF_MISS),
    ROW(session_of_a_long_layout, KVF_LIMIT),
    ROW(session_of_an_unprintable_layout, KVF_LIMIT),
    ROW(session_of_many_dims, KVF_LIMIT),
    ROW(session_of_another_shape, KVF_LIMIT),
    ROW(session_of_an_endless_shape, KVF_LIMIT),
    ROW(session_of_an_open_dtype, KVF_LIMIT),
    ROW(session_with_reserved, KVF_LIMIT),
    ROW(session_of_endless_pieces, KVF_LIMIT),
    ROW(session_of_longer_pieces, KVF_LIMIT),
    ROW(session_of_no_pieces, KVF_LIMIT),
    ROW(session_load_without_size, KVF_LIMIT),
    ROW(session_load_with_unknown_flag, KVF_LIMIT),
    ROW(session_load_into_one, KVF_LIMIT),
    ROW(session_load_into_its_size, KVF_OK),
    ROW(session_load_into_another_size, KVF_LIMIT),
    ROW(session_load_into_endless_memory, KVF_LIMIT),
};

static void test_calls_with_wrong_arguments(void **state) {
    (void)state;
    bench b;
    open_bench(&b);
    for (size_t row = 0; row < sizeof call_rows / sizeof *call_rows; row++) {
        take_blocks(&b);
        b.err = (kvf_error){.status = KVF_OK};
        kvf_status status = call_rows[row].call(&b);
        if (status != call_rows[row].status || (b.err.status != KVF_OK && b.err.status != status)) {
            fail_msg("%s: %s", call_rows[row].name, kvf_status_name(status));
        }
    }
    /* Tickets that are none, and no room for completions. */
    kvf_cancel(b.queue, 0);
    kvf_cancel(b.queue, UINT64_MAX);
    kvf_trim(b.queue, 0, 0);
    kvf_trim(b.queue, UINT64_MAX, SIZE_MAX);
    assert_int_equal(kvf_reap(b.queue, NULL, 0), 0);
    assert_string_equal(kvf_status_name((kvf_status)-1), "unknown");
    assert_string_equal(kvf_reason_name((kvf_reason)999), "unknown");
    kvf_free(NULL);
    kvf_session_free(NULL);
    kvf_store_close(NULL);
    (void)kvft_flush(b.store);
    kvf_stats stats = stats_of(b.store);
    check_counters(&stats, true);
    close_bench(&b);
}

/* Nothing at all is a fine number of blocks. */
static void test_no_blocks(void **state) {
    (void)state;
    bench b;
    open_bench(&b);
    size_t run = 9;
    assert_int_equal(kvf_match(b.space, &run, NULL, NULL, 0, KVF_DEFAULT), KVF_OK);
    assert_int_equal(run, 0);
    assert_int_equal(kvf_load(b.space, NULL, 0, NULL, KVF_DEFAULT), 0);
    assert_int_equal(kvf_save(b.space, NULL, 0, NULL), 0);
    assert_int_equal(kvf_fence(b.view, NULL, 0, KVF_POLL), KVF_OK);
    assert_int_equal(kvf_chain(b.space, NULL, 0, NULL, 0), 0);
    for (int op = KVF_OP_LOAD; op <= KVF_OP_TOUCH; op++) {
        kvf_batch batch = {.struct_size = sizeof batch, .op = (kvf_op)op, .space = b.space};
        uint64_t ticket = 0;
        assert_int_equal(kvf_submit(b.queue, &ticket, &batch), KVF_OK);
        assert_int_equal(reap(b.queue).num_ok, 0);
    }
    close_bench(&b);
}

/* ---- the n-th allocation or system call fails ---- */

#define SECRET        "a secret of a tenant"
#define ROOMY         ((size_t)1 << 24) /* a backlog that is never full */
#define FULL_AT_TIMES ((size_t)6 * PAYLOAD)

enum list { STAGED, THROUGH, LOADED }; /* the outcomes of kvf_save, of a queue's save, of a load */

static bool is_listed(const kvf_block *block, enum list list) {
    switch (block->status) {
    case KVF_OK:
        return block->why == KVF_WHY_NONE;
    case KVF_AGAIN:
        return list == STAGED && (block->why == KVF_WHY_FULL || block->why == KVF_WHY_AFTER_GAP);
    case KVF_MISS:
        return block->why != KVF_WHY_NONE && block->why != KVF_WHY_MISUSE &&
               (list != STAGED || (block->why != KVF_WHY_FULL && block->why != KVF_WHY_AFTER_GAP)) &&
               (list != THROUGH || block->why != KVF_WHY_AFTER_GAP);
    default:
        return false;
    }
}

static void check_outcomes(const kvf_block *blocks, size_t num_ok, enum list list) {
    size_t ok = 0;
    for (size_t i = 0; i < BLOCKS; i++) {
        ok += blocks[i].status == KVF_OK;
        if (!is_listed(&blocks[i], list)) {
            fail_msg("list %d: block %zu is %s (%s)", (int)list, i, kvf_status_name(blocks[i].status),
                     kvf_reason_name(blocks[i].why));
        }
    }
    assert_true(list == LOADED ? num_ok <= ok : num_ok == ok);
}

/* No block is in doubt where the batch was not taken. */
static void go_through(bench *b, kvf_op op, kvft_prompt *p) {
    kvf_batch batch = {.struct_size = sizeof batch, .op = op, .space = b->space, .blocks = p->blocks, .num = BLOCKS};
    kvf_completion done = {0};
    uint64_t ticket = 0;
    kvf_status status = kvf_submit(b->queue, &ticket, &batch);
    if (status != KVF_OK) {
        assert_int_equal(status, KVF_NOMEM);
        return;
    }
    while (kvf_reap(b->queue, &done, 1) == 0) { /* what wakes the caller may fail, too */
        struct pollfd fd = {.fd = kvf_queue_fd(b->queue), .events = POLLIN};
        (void)poll(&fd, 1, 20);
    }
    check_outcomes(p->blocks, done.num_ok, op == KVF_OP_SAVE ? THROUGH : LOADED);
}

static void reserve_and_commit(bench *b, const kvf_block *block) {
    kvf_reserved reserved;
    kvf_status status = kvf_reserve(b->space, &reserved, PAYLOAD);
    if (status == KVF_OK) {
        memset(reserved.data, 7, PAYLOAD);
        status = kvf_commit(b->space, &reserved, block, PAYLOAD);
        assert_null(reserved.opaque);
    }
    assert_true(status == KVF_OK || status == KVF_AGAIN || status == KVF_NOMEM);
}

static void save_and_load(bench *b, uint64_t seed) {
    kvft_prompt *staged = kvft_prompt_new(b->space, seed, BLOCKS, PAYLOAD);
    kvft_prompt *through = kvft_prompt_new(b->space, seed + 1, BLOCKS, PAYLOAD);
    kvft_prompt *filled = kvft_prompt_new(b->space, seed + 2, 1, PAYLOAD);
    kvf_found found[BLOCKS];
    size_t run = 0;
    check_outcomes(staged->blocks, kvf_save(b->space, staged->blocks, BLOCKS, NULL), STAGED);
    go_through(b, KVF_OP_SAVE, through);
    reserve_and_commit(b, filled->blocks);
    kvf_status flushed = kvf_store_flush(b->store, NULL, KVF_DEFAULT);
    assert_true(flushed == KVF_OK || flushed == KVF_MISS);
    assert_int_equal(kvf_match(b->space, &run, found, staged->keys, BLOCKS, KVF_DEFAULT), KVF_OK);
    assert_true(run == BLOCKS || found[run].why != KVF_WHY_NONE);
    check_outcomes(staged->blocks, kvf_load(b->space, staged->blocks, BLOCKS, NULL, KVF_DEFAULT), LOADED);
    go_through(b, KVF_OP_LOAD, through);
    kvft_prompt_free(staged);
    kvft_prompt_free(through);
    kvft_prompt_free(filled);
}

static void open_fault_bench(bench *b, const char *url, const char *secret, size_t backlog_bytes) {
    kvf_options options = {.struct_size = sizeof options, .backlog_bytes = backlog_bytes};
    *b = (bench){.store = NULL};
    assert_int_equal(kvf_store_open(&b->store, NULL, &url, 1, &options), KVF_OK);
    b->space = kvft_sealed_space(b->store, "m", TOKENS, secret);
    assert_int_equal(kvf_queue_open(&b->queue, NULL, b->store, 2), KVF_OK);
}

/* Adds what failed for want of memory, and for want of room, to *nomem and *full. */
static void close_fault_bench(bench *b, uint64_t *nomem, uint64_t *full) {
    kvf_stats stats = stats_of(b->store);
    check_counters(&stats, true);
    *nomem += stats.save_failures[KVF_WHY_NOMEM];
    *full += stats.save_failures[KVF_WHY_FULL];
    kvf_queue_close(b->queue);
    kvf_space_close(b->space);
    kvf_store_close(b->store);
}

static void fail_each(const char *url, const char *secret, kvft_fault_kind kind, size_t backlog_bytes) {
    uint64_t n = 1, nomem = 0, full = 0;
    bool hit = true;
    for (; hit && n < 2000; n++) {
        bench b;
        open_fault_bench(&b, url, secret, backlog_bytes);
        kvft_faults_arm(kind, n);
        save_and_load(&b, 10 * n);
        hit = kvft_faults_disarm();
        close_fault_bench(&b, &nomem, &full);
    }
    assert_in_range(n, 3, 1999);
    if (kind == KVFT_ALLOC && backlog_bytes == ROOMY) {
        assert_int_equal(full, 0);
        assert_true(nomem > 0);
    }
}

static void test_outcomes_at_each_fault(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[300];
    snprintf(url, sizeof url, "file:%s", dir);
    fail_each("mem:", NULL, KVFT_ALLOC, ROOMY);
    fail_each("mem:", SECRET, KVFT_ALLOC, ROOMY);
    fail_each(url, NULL, KVFT_ALLOC, ROOMY);
    fail_each(url, NULL, KVFT_CALL, ROOMY);
    fail_each("mem:", SECRET, KVFT_ALLOC, FULL_AT_TIMES);
    fail_each(url, NULL, KVFT_CALL, FULL_AT_TIMES);
    kvft_remove_dir(dir);
}

/* ---- the counters, while all of it goes on ---- */

typedef struct worker {
    kvf_space *space;
    uint64_t seed;
} worker;

static void *work(void *arg) {
    worker *w = arg;
    uint64_t random = w->seed;
    for (int round = 0; round < 60; round++) {
        kvft_prompt *p = kvft_prompt_new(w->space, kvft_random(&random) % 10, BLOCKS, PAYLOAD);
        size_t run = 0;
        if (kvft_random(&random) % 4 == 0) {
            p->blocks[kvft_random(&random) % BLOCKS].num_tokens = TOKENS + 1;
        }
        switch (kvft_random(&random) % 3) {
        case 0:
            (void)kvf_save(w->space, p->blocks, BLOCKS, NULL);
            break;
        case 1:
            (void)!kvf_match(w->space, &run, NULL, p->keys, BLOCKS, KVF_DEFAULT);
            break;
        default:
            (void)kvf_load(w->space, p->blocks, BLOCKS, NULL, KVF_DEFAULT);
        }
        kvft_prompt_free(p);
    }
    return NULL;
}

static atomic_bool worked;

static void *watch(void *arg) {
    while (!worked) {
        kvf_stats stats = stats_of(arg);
        check_counters(&stats, false);
    }
    return NULL;
}

static void test_the_counters_fit_each_other(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[256];
    snprintf(url, sizeof url, "file:%s?max=2M", dir);
    kvf_options options = {.struct_size = sizeof options, .backlog_bytes = 200000};
    const char *urls[] = {"mem:?max=64K", url};
    kvf_store *store = NULL;
    assert_int_equal(kvf_store_open(&store, NULL, urls, 2, &options), KVF_OK);
    kvf_space *space = kvft_space(store, "m", TOKENS);
    kvft_prompt *kept = kvft_prompt_new(space, 100, BLOCKS, PAYLOAD);
    size_t run = 0;
    kvft_save_all(space, store, kept);
    assert_int_equal(kvf_match(space, &run, NULL, kept->keys, BLOCKS, KVF_DEFAULT), KVF_OK);
    assert_int_equal(kvf_load(space, kept->blocks, BLOCKS, NULL, KVF_DEFAULT), BLOCKS);
    kvft_prompt_free(kept);
    worker workers[3];
    pthread_t threads[3], watcher;
    worked = false;
    assert_int_equal(pthread_create(&watcher, NULL, watch, store), 0);
    for (size_t i = 0; i < 3; i++) {
        workers[i] = (worker){.space = space, .seed = i + 1};
        assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (size_t i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
    }
    worked = true;
    pthread_join(watcher, NULL);
    (void)kvft_flush(store);
    kvf_stats stats = stats_of(store);
    check_counters(&stats, true);
    assert_true(stats.saved > 0 && stats.load_hits > 0 && stats.lookup_hits > 0);
    assert_true(stats.save_failures[KVF_WHY_MISUSE] > 0 && stats.misses[KVF_WHY_MISUSE] > 0);
    kvf_space_close(space);
    kvf_store_close(store);
    kvft_remove_dir(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_blocks_that_break_a_rule),   cmocka_unit_test(test_budgets),
        cmocka_unit_test(test_calls_with_wrong_arguments), cmocka_unit_test(test_no_blocks),
        cmocka_unit_test(test_outcomes_at_each_fault),     cmocka_unit_test(test_the_counters_fit_each_other),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
