/* SPDX-License-Identifier: Apache-2.0
 *
 * The path of a block between a space and its tiers, with tiers that answer late, wrongly or not at all.
 */
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "kvferry/session.h"
#include "prefix/prefix.h"
#include "record/record.h"
#include "store/private.h"
#include "support/kit.h"
#include "support/tiers.h"

#define PAYLOAD 3000u
#define BLOCKS  6u

/* A store whose tier `at` answers by `ops`, a copy that a test changes. The tier's own functions are in `real`. */
typedef struct bench {
    kvf_store *store;
    kvf_space *space;
    kvft_prompt *prompt;
    kvfi_tier_ops ops;
    const kvfi_tier_ops *real;
} bench;

static bench *current; /* of the test that runs: the functions of a tier know no test */

static void open_bench(bench *b, kvf_store *store, size_t at) {
    *b = (bench){.store = store};
    b->space = kvft_space(b->store, "m", 16);
    b->prompt = kvft_prompt_new(b->space, 7, BLOCKS, PAYLOAD);
    b->real = store->tiers[at]->ops;
    b->ops = *b->real;
    store->tiers[at]->ops = &b->ops;
    current = b;
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

static size_t load(bench *b) {
    kvft_prompt_poison(b->prompt);
    size_t run = kvf_load(b->space, b->prompt->blocks, BLOCKS, NULL, KVF_DEFAULT);
    assert_int_equal(kvft_prompt_wrong(b->prompt, 7, run), 0);
    return run;
}

static void remove_from(bench *b, size_t tier, size_t block) {
    kvfi_addr addr = {.key = b->prompt->keys[block]};
    kvf_error err = {0};
    kvf_space_digest(b->space, &addr.space);
    assert_int_equal(b->store->tiers[tier]->ops->remove(b->store->tiers[tier], &err, &addr, kvfi_deadline(1000000)),
                     KVF_OK);
}

/* ---- a gate: a tier's loads wait at it until the test opens it */

static pthread_mutex_t gate_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t gate_moved = PTHREAD_COND_INITIALIZER;
static bool gate_open;
static size_t at_gate;

static void wait_at_gate(void) {
    pthread_mutex_lock(&gate_lock);
    at_gate++;
    pthread_cond_broadcast(&gate_moved);
    while (!gate_open) {
        pthread_cond_wait(&gate_moved, &gate_lock);
    }
    pthread_mutex_unlock(&gate_lock);
}

static void get_at_gate(kvfi_tier *tier, kvfi_feed *feed) {
    wait_at_gate();
    current->real->get(tier, feed);
}

static void close_gate(bench *b) {
    gate_open = false;
    at_gate = 0;
    b->ops.get = get_at_gate;
}

static void await_at_gate(size_t num) {
    pthread_mutex_lock(&gate_lock);
    while (at_gate < num) {
        pthread_cond_wait(&gate_moved, &gate_lock);
    }
    pthread_mutex_unlock(&gate_lock);
}

static void put_at_gate(kvfi_tier *tier, kvfi_feed *feed) {
    wait_at_gate();
    current->real->put(tier, feed);
}

static void open_gate(void) {
    pthread_mutex_lock(&gate_lock);
    gate_open = true;
    pthread_cond_broadcast(&gate_moved);
    pthread_mutex_unlock(&gate_lock);
}

static void join_in_time(pthread_t thread) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 20;
    assert_int_equal(pthread_timedjoin_np(thread, NULL, &until), 0);
}

/* ---- views ---- */

typedef struct fenced {
    kvf_view *view;
    int64_t slot;
    atomic_bool over;
} fenced;

static void *fence(void *arg) {
    fenced *f = arg;
    assert_int_equal(kvf_fence(f->view, &f->slot, 1, KVF_DEFAULT), KVF_OK);
    f->over = true;
    return NULL;
}

static void *close_view(void *arg) {
    fenced *f = arg;
    kvf_view_close(f->view);
    f->over = true;
    return NULL;
}

static kvf_completion reap(kvf_queue *queue) {
    kvf_completion done = {0};
    while (kvf_reap(queue, &done, 1) == 0) {
        struct pollfd fd = {.fd = kvf_queue_fd(queue), .events = POLLIN};
        assert_int_equal(poll(&fd, 1, 20000), 1);
    }
    return done;
}

static void wait_for_a_load(bool closes) {
    enum { SLOTS = BLOCKS + 1 };
    bench b;
    open_bench(&b, kvft_store("mem:"), 0);
    kvft_save_all(b.space, b.store, b.prompt);
    uint8_t *pool = calloc(SLOTS, PAYLOAD);
    kvf_region region = {.base = pool, .slot_stride = PAYLOAD, .run_bytes = PAYLOAD, .num_runs = 1};
    fenced f = {.slot = 2};
    kvf_queue *queue = NULL;
    assert_int_equal(kvf_view_open(&f.view, NULL, &region, 1, SLOTS), KVF_OK);
    assert_int_equal(kvf_queue_open(&queue, NULL, b.store, 1), KVF_OK);
    for (size_t i = 0; i < BLOCKS; i++) {
        b.prompt->blocks[i].iov = NULL;
        b.prompt->blocks[i].slot = (int64_t)i;
    }
    close_gate(&b);
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_LOAD,
                       .space = b.space,
                       .blocks = b.prompt->blocks,
                       .num = BLOCKS,
                       .view = f.view};
    uint64_t ticket = 0;
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    await_at_gate(1);
    int64_t unused = SLOTS - 1;
    assert_int_equal(kvf_fence(f.view, &unused, 1, KVF_DEFAULT), KVF_OK);
    assert_int_equal(kvf_fence(f.view, &unused, 1, KVF_POLL), KVF_OK);
    assert_int_equal(kvf_fence(f.view, &f.slot, 1, KVF_POLL), KVF_AGAIN);
    assert_int_equal(kvf_fence(f.view, &f.slot, 1, KVF_MS(3)), KVF_AGAIN);
    int64_t outside = SLOTS;
    assert_int_equal(kvf_fence(f.view, &outside, 1, KVF_POLL), KVF_LIMIT);
    assert_int_equal(kvf_fence(f.view, &unused, 1, -2), KVF_LIMIT);
    pthread_t waits;
    assert_int_equal(pthread_create(&waits, NULL, closes ? close_view : fence, &f), 0);
    kvft_nap_ms(20); /* now it waits; if it does not yet, the test is only weaker */
    assert_false(f.over);
    open_gate();
    join_in_time(waits);
    assert_int_equal(reap(queue).num_ok, BLOCKS);
    for (size_t i = 0; i < BLOCKS; i++) {
        assert_memory_equal(pool + i * PAYLOAD, b.prompt->memory + i * PAYLOAD, PAYLOAD);
    }
    if (!closes) {
        kvf_view_close(f.view);
    }
    kvf_queue_close(queue);
    free(pool);
    close_bench(&b);
}

/* A fence waits for the slots that a load touches, no longer, and not for others. */
static void test_a_fence_waits_for_its_slots(void **state) {
    (void)state;
    wait_for_a_load(false);
}

static void test_a_view_is_closed_when_its_slots_are_free(void **state) {
    (void)state;
    wait_for_a_load(true);
}

/* A batch that waits for a thread is fenced like one that runs. */
static void fence_what_waits(kvf_op op) {
    enum { OTHERS = 64, NUM = OTHERS + 1 };
    bench b;
    open_bench(&b, kvft_store("mem:"), 0);
    if (op == KVF_OP_LOAD) {
        kvft_save_all(b.space, b.store, b.prompt);
    }
    uint8_t *pool = calloc(1, PAYLOAD);
    kvf_region region = {.base = pool, .slot_stride = PAYLOAD, .run_bytes = PAYLOAD, .num_runs = 1};
    fenced f = {.slot = 0};
    kvf_queue *queue = NULL;
    uint64_t tickets[NUM];
    kvft_prompt *prompts[NUM];
    assert_int_equal(kvf_view_open(&f.view, NULL, &region, 1, 1), KVF_OK);
    assert_int_equal(kvf_queue_open(&queue, NULL, b.store, NUM), KVF_OK);
    close_gate(&b);
    b.ops.put = put_at_gate;
    for (size_t i = 0; i < NUM; i++) {
        prompts[i] = kvft_prompt_new(b.space, op == KVF_OP_SAVE && i == OTHERS ? 8 : 7, 1, PAYLOAD);
        kvf_batch batch = {
            .struct_size = sizeof batch, .op = op, .space = b.space, .blocks = prompts[i]->blocks, .num = 1};
        if (i == OTHERS) {
            prompts[i]->blocks[0].iov = NULL;
            prompts[i]->blocks[0].slot = f.slot;
            batch.view = f.view;
        }
        assert_int_equal(kvf_submit(queue, &tickets[i], &batch), KVF_OK);
    }
    assert_int_equal(kvf_fence(f.view, &f.slot, 1, KVF_POLL), KVF_AGAIN);
    open_gate();
    for (size_t i = 0; i < NUM; i++) {
        assert_int_equal(reap(queue).num_ok, 1);
    }
    assert_int_equal(kvf_fence(f.view, &f.slot, 1, KVF_POLL), KVF_OK);
    kvf_view_close(f.view);
    kvf_queue_close(queue);
    for (size_t i = 0; i < NUM; i++) {
        kvft_prompt_free(prompts[i]);
    }
    free(pool);
    close_bench(&b);
}

static void test_a_fence_waits_for_a_load_that_has_not_begun(void **state) {
    (void)state;
    fence_what_waits(KVF_OP_LOAD);
}

static void test_a_fence_waits_for_a_save_that_has_not_begun(void **state) {
    (void)state;
    fence_what_waits(KVF_OP_SAVE);
}

/* ---- queues ---- */

/* A cancel ends one batch, not a later one that takes its place in the queue. */
static void test_a_place_in_the_queue_is_used_again(void **state) {
    (void)state;
    bench b;
    open_bench(&b, kvft_store("mem:"), 0);
    kvft_save_all(b.space, b.store, b.prompt);
    kvf_queue *queue = NULL;
    assert_int_equal(kvf_queue_open(&queue, NULL, b.store, 1), KVF_OK);
    close_gate(&b);
    kvf_batch batch = {
        .struct_size = sizeof batch, .op = KVF_OP_LOAD, .space = b.space, .blocks = b.prompt->blocks, .num = BLOCKS};
    uint64_t first = 0, second = 0;
    assert_int_equal(kvf_submit(queue, &first, &batch), KVF_OK);
    await_at_gate(1);
    kvf_cancel(queue, first);
    open_gate();
    kvf_completion done = reap(queue);
    assert_int_equal(done.ticket, first);
    assert_int_equal(done.num_ok, 0);
    assert_int_equal(b.prompt->blocks[0].why, KVF_WHY_CLOSED);
    assert_int_equal(kvf_submit(queue, &second, &batch), KVF_OK);
    assert_int_not_equal(second, first);
    done = reap(queue);
    assert_int_equal(done.ticket, second);
    assert_int_equal(done.num_ok, BLOCKS);
    kvf_queue_close(queue);
    close_bench(&b);
}

static void test_bad_batches_are_refused(void **state) {
    (void)state;
    bench b;
    open_bench(&b, kvft_store("mem:"), 0);
    kvf_queue *queue = NULL;
    uint64_t ticket = 0;
    const kvf_batch good = {
        .struct_size = sizeof good, .op = KVF_OP_MATCH, .space = b.space, .blocks = b.prompt->blocks, .num = BLOCKS};
    kvf_batch many = good, odd = good, later = good;
    many.num = KVF_MAX_BLOCKS + 1;
    odd.op = KVF_OP_TOUCH + 1;
    later.flags = 1u << 31;
    const kvf_batch *bad[] = {&many, &odd, &later};
    assert_int_equal(kvf_queue_open(&queue, NULL, b.store, 1), KVF_OK);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(kvf_submit(queue, &ticket, bad[i]), KVF_LIMIT);
    }
    kvf_queue_close(queue);
    close_bench(&b);
}

/* Each batch is found by its ticket, wherever in the queue it is: one is cancelled, one is cut short, one runs on. */
static void test_batches_are_told_apart(void **state) {
    (void)state;
    enum { NUM = 3 };
    bench b;
    open_bench(&b, kvft_store("mem:"), 0);
    kvft_save_all(b.space, b.store, b.prompt);
    kvf_queue *queue = NULL;
    kvft_prompt *prompts[NUM];
    uint8_t each[NUM][BLOCKS] = {{0}};
    kvf_arrivals arrivals[NUM];
    uint64_t tickets[NUM];
    assert_int_equal(kvf_queue_open(&queue, NULL, b.store, NUM), KVF_OK);
    close_gate(&b);
    for (size_t i = 0; i < NUM; i++) {
        prompts[i] = kvft_prompt_new(b.space, 7, BLOCKS, PAYLOAD);
        arrivals[i] = (kvf_arrivals){.each = each[i]};
        kvf_batch batch = {.struct_size = sizeof batch,
                           .op = KVF_OP_LOAD,
                           .space = b.space,
                           .blocks = prompts[i]->blocks,
                           .num = BLOCKS,
                           .arrivals = &arrivals[i]};
        assert_int_equal(kvf_submit(queue, &tickets[i], &batch), KVF_OK);
    }
    await_at_gate(NUM);
    kvf_cancel(queue, tickets[0]);
    kvf_trim(queue, tickets[1], 2);
    kvf_cancel(queue, 0); /* nobody's */
    open_gate();
    for (size_t i = 0; i < NUM; i++) {
        kvf_completion done = {0};
        while (kvf_reap(queue, &done, 1) == 0) {
            struct pollfd fd = {.fd = kvf_queue_fd(queue), .events = POLLIN};
            assert_int_equal(poll(&fd, 1, 20000), 1);
        }
        assert_int_equal(done.num_ok, done.ticket == tickets[0] ? 0 : done.ticket == tickets[1] ? 2 : BLOCKS);
    }
    kvf_queue_close(queue);
    for (size_t i = 0; i < NUM; i++) {
        kvft_prompt_free(prompts[i]);
    }
    close_bench(&b);
}

static bool is_readable(const kvf_queue *queue, int timeout_ms) {
    struct pollfd fd = {.fd = kvf_queue_fd(queue), .events = POLLIN};
    return poll(&fd, 1, timeout_ms) == 1;
}

/* The descriptor is readable as long as there is something to reap, and no longer. */
static void test_the_descriptor_tells_of_what_is_done(void **state) {
    (void)state;
    bench b;
    open_bench(&b, kvft_store("mem:"), 0);
    kvf_queue *queue = NULL;
    uint64_t ticket = 0;
    kvf_completion done = {0};
    kvf_batch batch = {
        .struct_size = sizeof batch, .op = KVF_OP_MATCH, .space = b.space, .blocks = b.prompt->blocks, .num = BLOCKS};
    assert_int_equal(kvf_queue_open(&queue, NULL, b.store, 2), KVF_OK);
    assert_false(is_readable(queue, 0));
    for (int round = 0; round < 2; round++) {
        assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
        assert_true(is_readable(queue, 20000));
        assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
        for (size_t reaped = 0; reaped < 2; reaped++) {
            assert_true(is_readable(queue, 20000));
            assert_int_equal(kvf_reap(queue, &done, 1), 1);
        }
        assert_false(is_readable(queue, 0));
    }
    kvf_queue_close(queue);
    close_bench(&b);
}

/* ---- reservations ---- */

/* More bytes than were reserved are not those of a block: nothing is stored, and the reservation is given back. */
static void test_a_commit_of_too_much_is_dropped(void **state) {
    (void)state;
    bench b;
    open_bench(&b, kvft_store("mem:"), 0);
    for (size_t more = 0; more < 2; more++) {
        kvf_reserved reserved = {0};
        assert_int_equal(kvf_reserve(b.space, &reserved, PAYLOAD - 1), KVF_OK);
        assert_int_equal(kvf_commit(b.space, &reserved, b.prompt->blocks, PAYLOAD - 1 + more),
                         more > 0 ? KVF_LIMIT : KVF_OK);
        assert_null(reserved.opaque);
        kvft_flush_all(b.store);
        assert_int_equal(stats_of(b.store).saved, 1); /* the one that was not too long */
        assert_int_equal(stats_of(b.store).save_failures[KVF_WHY_MISUSE], more);
        assert_int_equal(stats_of(b.store).backlog_bytes, 0);
    }
    kvf_block wide = b.prompt->blocks[1];
    wide.num_tokens = KVFI_MAX_TOKENS + 1;
    kvf_reserved reserved = {0};
    assert_int_equal(kvf_reserve(b.space, &reserved, PAYLOAD), KVF_OK);
    assert_int_equal(kvf_commit(b.space, &reserved, &wide, PAYLOAD), KVF_LIMIT);
    assert_null(reserved.opaque);
    assert_int_equal(kvf_commit(b.space, &reserved, b.prompt->blocks, PAYLOAD), KVF_LIMIT); /* nothing is reserved */
    assert_int_equal(stats_of(b.store).saved, 1);
    close_bench(&b);
}

/* Buffers that lie free make room for one of another size, within the bound. */
static void test_free_buffers_make_room(void **state) {
    (void)state;
    const char *url = "mem:";
    kvf_options options = {.struct_size = sizeof options, .backlog_bytes = 100000};
    kvf_store *store = NULL;
    kvf_error err = {0};
    kvf_reserved small = {0}, large = {0}, more = {0};
    assert_int_equal(kvf_store_open(&store, &err, &url, 1, &options), KVF_OK);
    kvf_space *space = kvft_space(store, "m", 16);
    for (int round = 0; round < 3; round++) {
        assert_int_equal(kvf_reserve(space, &small, 10000), KVF_OK);
        kvf_abandon(space, &small);
        kvf_abandon(space, &small); /* given back already */
        assert_int_equal(kvf_reserve(space, &large, 60000), KVF_OK);
        memset(large.data, 1, large.len);
        assert_int_equal(kvf_reserve(space, &more, 40000), KVF_AGAIN);
        kvf_abandon(space, &large);
    }
    assert_int_equal(kvf_reserve(space, &large, (size_t)KVF_MAX_PAYLOAD_BYTES + 1), KVF_LIMIT);
    kvf_space_close(space);
    kvf_store_close(store);
}

/* ---- lookups and loads ---- */

/* Each lookup finds the header of another key. */
static void peek_shifted(kvfi_tier *tier, const kvfi_addr *addrs, size_t num, kvfi_peek *out, uint64_t *round_trips,
                         int64_t deadline_us, int64_t patience_us) {
    current->real->peek(tier, addrs, num, out, round_trips, deadline_us, patience_us);
    kvfi_peek first = out[0];
    memmove(out, out + 1, (num - 1) * sizeof *out);
    out[num - 1] = first;
}

static void test_the_header_of_another_key_is_no_match(void **state) {
    (void)state;
    bench b;
    open_bench(&b, kvft_store("mem:"), 0);
    kvft_save_all(b.space, b.store, b.prompt);
    kvf_found found[BLOCKS];
    size_t run = 1;
    b.ops.peek = peek_shifted;
    assert_int_equal(kvf_match(b.space, &run, found, b.prompt->keys, BLOCKS, KVF_MS(1000)), KVF_OK);
    assert_int_equal(run, 0);
    assert_int_equal(found[0].why, KVF_WHY_OTHER_SPACE);
    b.ops.peek = b.real->peek;
    assert_int_equal(kvf_match(b.space, &run, found, b.prompt->keys, BLOCKS, KVF_MS(1000)), KVF_OK);
    assert_int_equal(run, BLOCKS);
    close_bench(&b);
}

/* Lookups are counted by blocks, and what of them is there. */
static void peek_fails(kvfi_tier *tier, const kvfi_addr *addrs, size_t num, kvfi_peek *out, uint64_t *round_trips,
                       int64_t deadline_us, int64_t patience_us) {
    (void)tier, (void)addrs, (void)deadline_us, (void)patience_us;
    *round_trips = 1;
    for (size_t i = 0; i < num; i++) {
        out[i] = (kvfi_peek){.why = KVF_WHY_UNREACHABLE};
    }
}

/* Whichever of the tiers it is. */
static void test_a_tier_that_failed_is_the_reason(void **state) {
    (void)state;
    for (size_t at = 0; at < 2; at++) {
        bench b;
        kvf_found found[BLOCKS];
        open_bench(&b, kvft_store2("mem:", "mem:"), at);
        b.ops.peek = peek_fails;
        size_t run = 1;
        assert_int_equal(kvf_match(b.space, &run, found, b.prompt->keys, BLOCKS, KVF_MS(1000)), KVF_OK);
        assert_int_equal(run, 0);
        assert_int_equal(found[0].why, KVF_WHY_UNREACHABLE);
        close_bench(&b);
    }
}

static void test_lookups_are_counted(void **state) {
    (void)state;
    bench b;
    open_bench(&b, kvft_store("mem:"), 0);
    size_t run = 0;
    assert_int_equal(kvf_match(b.space, &run, NULL, b.prompt->keys, BLOCKS, KVF_MS(1000)), KVF_OK);
    assert_int_equal(stats_of(b.store).lookups, BLOCKS);
    assert_int_equal(stats_of(b.store).lookup_hits, 0);
    kvft_save_all(b.space, b.store, b.prompt);
    remove_from(&b, 0, 4);
    assert_int_equal(kvf_match(b.space, &run, NULL, b.prompt->keys, BLOCKS, KVF_MS(1000)), KVF_OK);
    assert_int_equal(run, 4);
    assert_int_equal(stats_of(b.store).lookups, 2 * BLOCKS);
    assert_int_equal(stats_of(b.store).lookup_hits, 4);
    close_bench(&b);
}

/* Every key is answered, not only the leading ones, and what a fast tier has is not asked of the slower one. */
static size_t num_peeked;

static void peek_counted(kvfi_tier *tier, const kvfi_addr *addrs, size_t num, kvfi_peek *out, uint64_t *round_trips,
                         int64_t deadline_us, int64_t patience_us) {
    num_peeked += num;
    current->real->peek(tier, addrs, num, out, round_trips, deadline_us, patience_us);
}

static void check_each(const kvf_found *found) {
    for (size_t i = 0; i < BLOCKS; i++) {
        bool there = i != 1 && i != 4;
        assert_int_equal(found[i].why, there ? KVF_WHY_NONE : KVF_WHY_ABSENT);
        assert_int_equal(found[i].payload_bytes, there ? PAYLOAD : 0);
        assert_int_equal(found[i].tier, i == 3);
    }
}

static void test_a_match_answers_for_every_key(void **state) {
    (void)state;
    bench b;
    open_bench(&b, kvft_store2("mem:", "mem:"), 1);
    kvft_save_all(b.space, b.store, b.prompt);
    remove_from(&b, 0, 1);
    remove_from(&b, 1, 1);
    remove_from(&b, 0, 3);
    remove_from(&b, 0, 4);
    remove_from(&b, 1, 4);
    kvf_found found[BLOCKS];
    size_t run = 0;
    num_peeked = 0;
    b.ops.peek = peek_counted;
    assert_int_equal(kvf_match(b.space, &run, found, b.prompt->keys, BLOCKS, KVF_DEFAULT), KVF_OK);
    assert_int_equal(run, 1);
    assert_int_equal(num_peeked, 3);
    check_each(found);
    kvf_queue *queue = NULL;
    uint64_t ticket = 0;
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_MATCH,
                       .space = b.space,
                       .blocks = b.prompt->blocks,
                       .num = BLOCKS,
                       .found = found};
    assert_int_equal(kvf_queue_open(&queue, NULL, b.store, 1), KVF_OK);
    for (int each = 0; each < 2; each++) {
        memset(found, 0xff, sizeof found);
        batch.flags = each ? KVF_EACH : 0;
        assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
        assert_int_equal(reap(queue).num_ok, each ? BLOCKS - 2 : 1);
        check_each(found);
    }
    assert_int_equal(stats_of(b.store).lookup_hits, 1 + 1 + BLOCKS - 2);
    kvf_queue_close(queue);
    close_bench(&b);
}

/* How often the descriptor was signalled since it was read last. */
static uint64_t signals_of(const kvf_queue *queue) {
    uint64_t signals = 0;
    assert_true(is_readable(queue, 20000));
    assert_int_equal(read(kvf_queue_fd(queue), &signals, sizeof signals), sizeof signals);
    return signals;
}

/* With KVF_EACH a gap ends no other block of a load. There is one wake-up, where arrivals have one for each block. */
static void load_each(kvf_store *store, size_t at) {
    bench b;
    open_bench(&b, store, at);
    kvft_save_all(b.space, b.store, b.prompt);
    for (size_t tier = 0; tier < b.store->num_tiers; tier++) {
        remove_from(&b, tier, 0);
        remove_from(&b, tier, 3);
    }
    kvf_queue *queue = NULL;
    kvf_completion done = {0};
    uint64_t ticket = 0;
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_LOAD,
                       .flags = KVF_EACH,
                       .space = b.space,
                       .blocks = b.prompt->blocks,
                       .num = BLOCKS};
    kvft_prompt_poison(b.prompt);
    assert_int_equal(kvf_queue_open(&queue, NULL, b.store, 1), KVF_OK);
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    assert_int_equal(signals_of(queue), 1);
    assert_int_equal(kvf_reap(queue, &done, 1), 1);
    assert_int_equal(done.num_ok, BLOCKS - 2);
    assert_int_equal(kvft_prompt_wrong(b.prompt, 7, BLOCKS), 2);
    for (size_t i = 0; i < BLOCKS; i++) {
        bool there = i != 0 && i != 3;
        assert_int_equal(b.prompt->blocks[i].status, there ? KVF_OK : KVF_MISS);
        assert_int_equal(b.prompt->blocks[i].why, there ? KVF_WHY_NONE : KVF_WHY_ABSENT);
    }
    kvf_stats stats = stats_of(b.store);
    assert_int_equal(stats.loads, BLOCKS);
    assert_int_equal(stats.load_hits, BLOCKS - 2);
    assert_int_equal(stats.misses[KVF_WHY_ABSENT], 2);
    batch.flags = 0; /* as ever: the gap is the end */
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    assert_int_equal(reap(queue).num_ok, 0);
    assert_int_equal(b.prompt->blocks[1].why, KVF_WHY_AFTER_GAP);
    kvf_queue_close(queue);
    close_bench(&b);
}

static void test_a_load_of_each(void **state) {
    (void)state;
    load_each(kvft_store("mem:"), 0);
    load_each(kvft_store2("mem:", "mem:"), 1);
}

/* A cancelled load of each says so of what it did not begin, and counts it. */
static void test_a_cancelled_load_of_each(void **state) {
    (void)state;
    bench b;
    open_bench(&b, kvft_store("mem:"), 0);
    kvft_save_all(b.space, b.store, b.prompt);
    kvf_queue *queue = NULL;
    uint64_t ticket = 0;
    assert_int_equal(kvf_queue_open(&queue, NULL, b.store, 1), KVF_OK);
    close_gate(&b);
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_LOAD,
                       .flags = KVF_EACH,
                       .space = b.space,
                       .blocks = b.prompt->blocks,
                       .num = BLOCKS};
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    await_at_gate(1);
    kvf_cancel(queue, ticket);
    open_gate();
    assert_int_equal(reap(queue).num_ok, 0);
    for (size_t i = 0; i < BLOCKS; i++) {
        assert_int_equal(b.prompt->blocks[i].status, KVF_MISS);
        assert_int_equal(b.prompt->blocks[i].why, KVF_WHY_CLOSED);
    }
    assert_int_equal(stats_of(b.store).loads, BLOCKS);
    assert_int_equal(stats_of(b.store).misses[KVF_WHY_CLOSED], BLOCKS);
    kvf_queue_close(queue);
    close_bench(&b);
}

/* ---- touch and remove ---- */

static size_t run_queue(bench *b, kvf_op op, bool cancel) {
    kvf_queue *queue = NULL;
    uint64_t ticket = 0;
    kvf_batch batch = {
        .struct_size = sizeof batch, .op = op, .space = b->space, .blocks = b->prompt->blocks, .num = BLOCKS};
    assert_int_equal(kvf_queue_open(&queue, NULL, b->store, 1), KVF_OK);
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    if (cancel) {
        await_at_gate(1);
        kvf_cancel(queue, ticket);
        open_gate();
    }
    size_t num_ok = reap(queue).num_ok;
    kvf_queue_close(queue);
    return num_ok;
}

static void test_touch_and_remove_reach_all_tiers(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[256];
    snprintf(url, sizeof url, "file:%s", dir);
    bench b;
    open_bench(&b, kvft_store2("mem:", url), 1);
    kvft_save_all(b.space, b.store, b.prompt);
    remove_from(&b, 0, 1); /* one tier has it */
    remove_from(&b, 1, 2); /* the other */
    remove_from(&b, 0, 3); /* none */
    remove_from(&b, 1, 3);
    const kvf_op ops[] = {KVF_OP_TOUCH, KVF_OP_REMOVE};
    for (size_t op = 0; op < 2; op++) {
        assert_int_equal(run_queue(&b, ops[op], false), BLOCKS - 1);
        for (size_t i = 0; i < BLOCKS; i++) {
            assert_int_equal(b.prompt->blocks[i].status, i == 3 ? KVF_MISS : KVF_OK);
            assert_int_equal(b.prompt->blocks[i].why, i == 3 ? KVF_WHY_ABSENT : KVF_WHY_NONE);
            assert_int_equal(kvf_knows(b.space, &b.prompt->keys[i]), op == 0 && i != 2 && i != 3);
        }
    }
    assert_int_equal(load(&b), 0);
    assert_int_equal(run_queue(&b, KVF_OP_TOUCH, false), 0);
    kvft_prompt_fill(b.prompt, 7);
    kvft_save_all(b.space, b.store, b.prompt);
    assert_int_equal(load(&b), BLOCKS);
    close_bench(&b);
    kvft_remove_dir(dir);
}

/* Of the second block one tier fails. It may still be there, or go soon, whatever the other tier says. */
static void each_fails(kvfi_tier *tier, kvfi_deed deed, const kvfi_addr *addrs, size_t num, kvf_reason *out,
                       int64_t deadline_us, int64_t patience_us) {
    current->real->each(tier, deed, addrs, num, out, deadline_us, patience_us);
    out[1] = KVF_WHY_STALLED;
}

static void each_at_gate(kvfi_tier *tier, kvfi_deed deed, const kvfi_addr *addrs, size_t num, kvf_reason *out,
                         int64_t deadline_us, int64_t patience_us) {
    wait_at_gate();
    current->real->each(tier, deed, addrs, num, out, deadline_us, patience_us);
}

static void test_a_tier_that_fails_to_remove(void **state) {
    (void)state;
    for (size_t at = 0; at < 2; at++) {
        bench b;
        open_bench(&b, kvft_store2("mem:", "mem:"), at);
        kvft_save_all(b.space, b.store, b.prompt);
        b.ops.each = each_fails;
        assert_int_equal(run_queue(&b, KVF_OP_TOUCH, false), BLOCKS - 1);
        assert_int_equal(run_queue(&b, KVF_OP_REMOVE, false), BLOCKS - 1);
        assert_int_equal(b.prompt->blocks[1].status, KVF_MISS);
        assert_int_equal(b.prompt->blocks[1].why, KVF_WHY_STALLED);
        assert_int_equal(b.prompt->blocks[0].status, KVF_OK);
        close_bench(&b);
    }
}

/* The first tier finishes its item. The second is no longer asked, and the answer says so. */
static void test_a_cancelled_removal(void **state) {
    (void)state;
    bench b;
    open_bench(&b, kvft_store2("mem:", "mem:"), 0);
    kvft_save_all(b.space, b.store, b.prompt);
    close_gate(&b);
    b.ops.get = b.real->get;
    b.ops.each = each_at_gate;
    assert_int_equal(run_queue(&b, KVF_OP_REMOVE, true), 0);
    assert_int_equal(b.prompt->blocks[0].why, KVF_WHY_CLOSED);
    assert_int_equal(b.prompt->blocks[BLOCKS - 1].status, KVF_MISS);
    assert_int_equal(load(&b), BLOCKS); /* of the second tier */
    close_bench(&b);
}

static void *no_memory(size_t bytes) {
    (void)bytes;
    return NULL;
}

static void test_a_lookup_without_memory(void **state) {
    (void)state;
    bench b;
    open_bench(&b, kvft_store("mem:"), 0);
    kvft_save_all(b.space, b.store, b.prompt);
    kvfi_systable table = kvfi_sys_real;
    table.alloc = no_memory;
    kvf_found found[BLOCKS] = {{.why = KVF_WHY_NONE}};
    size_t run = 9;
    kvfi_sys_table = &table; /* nothing else runs now */
    kvf_status status = kvf_match(b.space, &run, found, b.prompt->keys, BLOCKS, KVF_MS(1000));
    static const atomic_bool never;
    size_t loaded = kvf_load(b.space, b.prompt->blocks, BLOCKS, NULL, KVF_DEFAULT);
    kvf_block touched[BLOCKS];
    memcpy(touched, b.prompt->blocks, sizeof touched);
    size_t num_touched = kvfi_each(b.space, KVFI_TOUCH, touched, BLOCKS, KVFI_NEVER, 0, &never);
    kvfi_sys_table = &kvfi_sys_real;
    assert_int_equal(status, KVF_OK);
    assert_int_equal(run, 0);
    assert_int_equal(found[0].why, KVF_WHY_NOMEM);
    assert_int_equal(found[BLOCKS - 1].why, KVF_WHY_NOMEM);
    assert_int_equal(num_touched, 0);
    assert_int_equal(touched[BLOCKS - 1].status, KVF_MISS);
    assert_int_equal(touched[BLOCKS - 1].why, KVF_WHY_NOMEM);
    assert_int_equal(loaded, 0);
    assert_int_equal(b.prompt->blocks[0].why, KVF_WHY_NOMEM);
    close_bench(&b);
}

/* With KVF_POLL memory answers, and no other tier is asked. */
static void test_a_poll_asks_memory_alone(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[256];
    snprintf(url, sizeof url, "file:%s", dir);
    bench b;
    open_bench(&b, kvft_store2("mem:", url), 1);
    kvft_save_all(b.space, b.store, b.prompt);
    b.ops.get = NULL; /* a call of the folder would end the test */
    b.ops.peek = NULL;
    kvf_found found[BLOCKS];
    size_t run = 0;
    assert_int_equal(kvf_match(b.space, &run, found, b.prompt->keys, BLOCKS, KVF_POLL), KVF_OK);
    assert_int_equal(run, BLOCKS);
    kvft_prompt_poison(b.prompt);
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, BLOCKS, NULL, KVF_POLL), BLOCKS);
    assert_int_equal(kvft_prompt_wrong(b.prompt, 7, BLOCKS), 0);
    remove_from(&b, 0, 2);
    assert_int_equal(kvf_match(b.space, &run, found, b.prompt->keys, BLOCKS, KVF_POLL), KVF_OK);
    assert_int_equal(run, 2);
    assert_int_equal(found[2].why, KVF_WHY_BUDGET);
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, BLOCKS, NULL, KVF_POLL), 2);
    assert_int_equal(b.prompt->blocks[2].status, KVF_MISS);
    assert_int_equal(b.prompt->blocks[2].why, KVF_WHY_BUDGET);
    assert_int_equal(b.prompt->blocks[3].why, KVF_WHY_AFTER_GAP);
    kvf_queue *queue = NULL;
    assert_int_equal(kvf_queue_open(&queue, NULL, b.store, 1), KVF_OK);
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_LOAD,
                       .space = b.space,
                       .blocks = b.prompt->blocks,
                       .num = BLOCKS,
                       .budget_us = KVF_POLL};
    uint64_t ticket = 0;
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    assert_int_equal(reap(queue).num_ok, 2);
    batch.op = KVF_OP_SAVE; /* a save waits for its tiers */
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_LIMIT);
    kvf_queue_close(queue);
    b.ops = *b.real;
    assert_int_equal(load(&b), BLOCKS);
    close_bench(&b);
    kvft_remove_dir(dir);
}

/* What the slower tier lends is put into the faster one, which then lends it itself. */
static void test_what_is_lent_is_promoted(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[256];
    snprintf(url, sizeof url, "file:%s", dir);
    bench b;
    open_bench(&b, kvft_store2("mem:", url), 1);
    kvft_save_all(b.space, b.store, b.prompt);
    remove_from(&b, 0, 2);
    uint64_t before = stats_of(b.store).promoted;
    for (int round = 0; round < 2; round++) {
        kvf_borrowed borrowed = {0};
        assert_int_equal(kvf_borrow(b.space, &borrowed, &b.prompt->blocks[2]), KVF_OK);
        assert_int_equal(borrowed.len, PAYLOAD);
        assert_memory_equal(borrowed.data, b.prompt->memory + 2 * PAYLOAD, PAYLOAD);
        kvf_release(b.space, &borrowed);
        assert_null(borrowed.opaque);
        kvf_release(b.space, &borrowed); /* nothing is borrowed now */
        kvft_flush_all(b.store);
        assert_int_equal(stats_of(b.store).promoted, before + 1);
    }
    b.ops.borrow = NULL; /* now only the faster one lends */
    remove_from(&b, 1, 2);
    assert_int_equal(load(&b), BLOCKS);
    close_bench(&b);
    kvft_remove_dir(dir);
}

static void test_what_a_space_says_of_itself(void **state) {
    (void)state;
    bench b;
    open_bench(&b, kvft_store("mem:"), 0);
    kvf_key one, again, other;
    assert_int_equal(kvf_space_block_tokens(b.space), 16);
    assert_string_equal(kvf_space_fields(b.space), "block_tokens=16\nengine=test\nkv=f16\nmodel=m\n");
    kvf_key_of(b.space, &one, "hash", 4);
    kvf_key_of(b.space, &again, "hash", 4);
    kvf_key_of(b.space, &other, "hash", 3);
    assert_memory_equal(&one, &again, sizeof one);
    assert_memory_not_equal(&one, &other, sizeof one);
    kvf_space_close(NULL); /* like free */
    kvf_view_close(NULL);
    kvf_queue_close(NULL);
    close_bench(&b);
}

static void get_truncated(kvfi_tier *tier, kvfi_feed *feed) {
    (void)tier;
    for (kvfi_item *item; (item = kvfi_feed_next(feed)) != NULL;) {
        kvfi_feed_done(feed, item, KVF_MISS, KVF_WHY_TRUNCATED);
    }
}

/* The header of a block is there, and its body is not (Redis evicts a key of a record in several). What a load has
 * found so is written again, though a lookup would still find it. */
static void test_what_was_truncated_is_written_again(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[256];
    snprintf(url, sizeof url, "file:%s", dir);
    bench b;
    open_bench(&b, kvft_store(url), 0);
    kvft_save_all(b.space, b.store, b.prompt);
    b.ops.get = get_truncated;
    assert_int_equal(kvf_load(b.space, b.prompt->blocks, BLOCKS, NULL, KVF_DEFAULT), 0);
    assert_int_equal(b.prompt->blocks[0].why, KVF_WHY_TRUNCATED);
    uint64_t before = stats_of(b.store).saved;
    kvft_save_all(b.space, b.store, b.prompt);
    assert_int_equal(stats_of(b.store).saved, before + 1);
    assert_int_equal(stats_of(b.store).known, BLOCKS - 1); /* of the others nothing was learned */
    b.ops.get = b.real->get;
    assert_int_equal(load(&b), BLOCKS);
    close_bench(&b);
    kvft_remove_dir(dir);
}

/* A block that one tier lacks is in another: each has what the other has not. */
static void test_a_gap_in_a_fast_tier_does_not_end_the_run(void **state) {
    (void)state;
    bench b;
    open_bench(&b, kvft_store2("mem:", "mem:"), 0);
    kvft_save_all(b.space, b.store, b.prompt);
    for (size_t i = 0; i < BLOCKS; i++) {
        remove_from(&b, i % 2, i);
    }
    assert_int_equal(load(&b), BLOCKS);
    close_bench(&b);
}

/* ---- sessions ---- */

static kvf_reason refusal; /* why the tier refuses each value */

static void refuse(kvfi_tier *tier, kvfi_feed *feed) {
    (void)tier;
    for (kvfi_item *item; (item = kvfi_feed_next(feed)) != NULL;) {
        kvfi_feed_done(feed, item, KVF_MISS, refusal);
    }
}

static void peek_refused(kvfi_tier *tier, const kvfi_addr *addrs, size_t num, kvfi_peek *out, uint64_t *round_trips,
                         int64_t deadline_us, int64_t patience_us) {
    (void)tier;
    (void)addrs;
    (void)round_trips;
    (void)deadline_us;
    (void)patience_us;
    for (size_t i = 0; i < num; i++) {
        out[i].why = refusal;
    }
}

/* What a store that keeps a session as a value could not do is told by status and in words. */
static void test_what_went_wrong_with_a_session(void **state) {
    (void)state;
    static const struct {
        kvf_reason why;
        kvf_status status;
        const char *word;
    } rows[] = {{KVF_WHY_ABSENT, KVF_MISS, "no such"},
                {KVF_WHY_BUDGET, KVF_IO, "budget"},
                {KVF_WHY_UNREACHABLE, KVF_IO, "can't be reached"},
                {KVF_WHY_BREAKER, KVF_IO, "can't be reached"},
                {KVF_WHY_FULL, KVF_IO, "no room"},
                {KVF_WHY_SERVER, KVF_IO, "with an error"},
                {KVF_WHY_NOMEM, KVF_NOMEM, "no memory"},
                {KVF_WHY_CLOSED, KVF_CLOSED, "closed"},
                {KVF_WHY_CHECKSUM, KVF_MISS, "can't be used"}};
    bench b;
    open_bench(&b, kvft_store("mem:"), 0);
    float data[4] = {1};
    kvf_tensor tensor = {.data = data, .len = sizeof data};
    kvf_session *session = NULL;
    kvf_error err = {0};
    b.ops.put = refuse;
    b.ops.get = refuse;
    b.ops.peek = peek_refused;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        refusal = rows[i].why;
        assert_int_equal(kvf_session_load(b.store, &session, &err, "s", KVF_DEFAULT), rows[i].status);
        assert_non_null(strstr(err.what, rows[i].word));
        assert_int_equal(kvf_session_save(b.store, &err, "s", &tensor, &tensor, NULL),
                         rows[i].status == KVF_MISS ? KVF_IO : rows[i].status); /* a save is no question */
    }
    close_bench(&b);
}

/* A block that only memory has is not known to be stored, where another tier would outlive this process. */
static void test_only_what_lasts_is_known(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[256];
    snprintf(url, sizeof url, "file:%s", dir);
    bench b;
    open_bench(&b, kvft_store2("mem:", url), 0);
    kvfi_known_add(&b.store->known, &b.prompt->keys[0], 1);
    kvfi_known_add(&b.store->known, &b.prompt->keys[1], 2);
    assert_false(kvf_knows(b.space, &b.prompt->keys[0]));
    assert_true(kvf_knows(b.space, &b.prompt->keys[1]));
    close_bench(&b);
    kvft_remove_dir(dir);
    const char *urls[KVFI_MAX_TIERS + 1];
    for (size_t i = 0; i <= KVFI_MAX_TIERS; i++) {
        urls[i] = "mem:";
    }
    kvf_store *store = NULL;
    kvf_error err = {0};
    assert_int_equal(kvf_store_open(&store, &err, urls, 0, NULL), KVF_CONFIG);
    assert_int_equal(kvf_store_open(&store, &err, urls, KVFI_MAX_TIERS + 1, NULL), KVF_CONFIG);
    assert_int_equal(kvf_store_open(&store, &err, urls, KVFI_MAX_TIERS, NULL), KVF_OK);
    kvf_store_close(store);
}

/* ---- flush */

static atomic_bool later_may_go; /* puts of other blocks than the first of the prompt wait for it */
static kvf_reason put_fails;     /* KVF_WHY_NONE: they do not */

static bool is_first(const kvfi_feed *feed) {
    return memcmp(&feed->items[0].addr.key, &current->prompt->keys[0], sizeof(kvf_key)) == 0;
}

static void put_some(kvfi_tier *tier, kvfi_feed *feed) {
    if (is_first(feed)) {
        wait_at_gate();
    }
    while (!is_first(feed) && !later_may_go) {
        kvft_nap_ms(1);
    }
    if (put_fails == KVF_WHY_NONE) {
        current->real->put(tier, feed);
        return;
    }
    for (kvfi_item *item = kvfi_feed_next(feed); item != NULL; item = kvfi_feed_next(feed)) {
        kvfi_feed_done(feed, item, KVF_MISS, put_fails);
    }
}

static void *flush(void *arg) {
    *(kvf_status *)arg = kvf_store_flush(current->store, NULL, KVF_MS(20000));
    return NULL;
}

static void await_flush(kvfi_backlog *backlog) {
    for (bool waits = false; !waits; kvft_nap_ms(1)) {
        pthread_mutex_lock(&backlog->lock);
        waits = backlog->flushes != NULL;
        pthread_mutex_unlock(&backlog->lock);
    }
}

/* The first block of the prompt is saved, and waits at the gate; what becomes of it and of later ones is up to put_some. */
static void hold_the_first_save(bench *b, bool later_may, kvf_reason fails) {
    kvft_prompt *other = kvft_prompt_new(b->space, 8, 1, PAYLOAD);
    kvft_save_all(b->space, b->store, other); /* and the card of the space */
    kvft_prompt_free(other);
    close_gate(b);
    b->ops.put = put_some;
    later_may_go = later_may;
    put_fails = fails;
    assert_int_equal(kvf_save(b->space, b->prompt->blocks, 1, NULL), 1);
    await_at_gate(1);
}

/* A flush waits for what was handed over before it, and not for what comes later. */
static void test_a_flush_does_not_wait_for_later_saves(void **state) {
    (void)state;
    bench b;
    open_bench(&b, kvft_store("mem:"), 0);
    hold_the_first_save(&b, false, KVF_WHY_NONE);
    kvf_status flushed = KVF_AGAIN;
    pthread_t waits;
    assert_int_equal(pthread_create(&waits, NULL, flush, &flushed), 0);
    await_flush(&b.store->backlog);
    assert_int_equal(kvf_save(b.space, b.prompt->blocks + 1, BLOCKS - 1, NULL), BLOCKS - 1);
    assert_int_equal(kvf_store_flush(b.store, NULL, KVF_POLL), KVF_AGAIN);
    open_gate();
    join_in_time(waits);
    assert_int_equal(flushed, KVF_OK);
    assert_int_equal(kvf_store_flush(b.store, NULL, KVF_POLL), KVF_AGAIN);
    later_may_go = true;
    kvft_flush_all(b.store);
    assert_int_equal(load(&b), BLOCKS);
    close_bench(&b);
}

/* What could not be written is told, once, by the next flush; and what an engine was told at once is not told again. */
static void test_a_flush_tells_what_was_not_written(void **state) {
    (void)state;
    bench b;
    open_bench(&b, kvft_store("mem:"), 0);
    b.ops.put = put_some;
    gate_open = true;
    later_may_go = true;
    put_fails = KVF_WHY_SERVER;
    uint64_t unwritten = 9;
    assert_int_equal(kvf_save(b.space, b.prompt->blocks, BLOCKS, NULL), BLOCKS);
    assert_int_equal(kvf_store_flush(b.store, &unwritten, KVF_DEFAULT), KVF_MISS);
    assert_int_equal(unwritten, BLOCKS);
    assert_int_equal(kvf_store_flush(b.store, &unwritten, KVF_DEFAULT), KVF_OK);
    assert_int_equal(unwritten, 0);
    /* One that failed before anybody flushed is told, too. */
    assert_int_equal(kvf_save(b.space, b.prompt->blocks, 1, NULL), 1);
    while (stats_of(b.store).backlog_bytes > 0) {
        kvft_nap_ms(1);
    }
    assert_int_equal(kvf_store_flush(b.store, NULL, KVF_POLL), KVF_MISS);
    kvf_block bad = b.prompt->blocks[1];
    bad.num_tokens = 17;
    assert_int_equal(kvf_save(b.space, &bad, 1, NULL), 0);
    assert_int_equal(kvf_store_flush(b.store, NULL, KVF_POLL), KVF_OK);
    close_bench(&b);
}

static size_t num_flushes(kvfi_backlog *backlog) {
    size_t num = 0;
    pthread_mutex_lock(&backlog->lock);
    for (const kvfi_flush *flush = backlog->flushes; flush != NULL; flush = flush->next) {
        num++;
    }
    pthread_mutex_unlock(&backlog->lock);
    return num;
}

/* Of two flushes that wait for a block, the first is told that it was not written. */
static void test_the_first_of_two_flushes_is_told(void **state) {
    (void)state;
    bench b;
    open_bench(&b, kvft_store("mem:"), 0);
    hold_the_first_save(&b, true, KVF_WHY_SERVER);
    kvf_status flushed[2] = {KVF_AGAIN, KVF_AGAIN};
    pthread_t waits[2];
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(pthread_create(&waits[i], NULL, flush, &flushed[i]), 0);
        while (num_flushes(&b.store->backlog) <= i) {
            kvft_nap_ms(1);
        }
    }
    open_gate();
    join_in_time(waits[0]);
    join_in_time(waits[1]);
    assert_int_equal(flushed[0], KVF_MISS);
    assert_int_equal(flushed[1], KVF_OK);
    close_bench(&b);
}

/* A flush waits for what was saved, but no longer than it may. */
static void test_a_flush_ends_at_its_budget(void **state) {
    (void)state;
    bench b;
    open_bench(&b, kvft_store("mem:"), 0);
    close_gate(&b);
    b.ops.put = put_at_gate;
    assert_int_equal(kvf_save(b.space, b.prompt->blocks, BLOCKS, NULL), BLOCKS);
    await_at_gate(1);
    assert_int_equal(kvf_store_flush(b.store, NULL, KVF_MS(20)), KVF_AGAIN);
    open_gate();
    assert_int_equal(kvf_store_flush(b.store, NULL, KVF_MS(20000)), KVF_OK);
    b.ops.get = b.real->get;
    assert_int_equal(load(&b), BLOCKS);
    close_bench(&b);
}

/* ---- a batch over several servers ---- */

static void part_of(kvfi_feed *part, kvfi_feed *whole, const uint32_t *order, size_t num) {
    *part = (kvfi_feed){.items = whole->items,
                        .num = num,
                        .limit = num,
                        .deadline_us = whole->deadline_us,
                        .prefix = true,
                        .order = order,
                        .whole = whole};
}

/* One server misses a block: behind it nothing is asked for, on the others neither. */
static void test_a_gap_on_one_server_ends_the_others(void **state) {
    (void)state;
    static const uint32_t few[] = {0, 1}, many[] = {2, 3, 4, 5};
    kvfi_item items[BLOCKS] = {{.number = 0}};
    kvfi_feed whole = {.items = items, .num = BLOCKS, .limit = BLOCKS, .deadline_us = KVFI_NEVER, .prefix = true};
    kvfi_feed a, b;
    part_of(&a, &whole, few, 2);
    part_of(&b, &whole, many, 4);
    assert_ptr_equal(kvfi_feed_next(&b), &items[2]);
    assert_ptr_equal(kvfi_feed_next(&a), &items[0]);
    assert_ptr_equal(kvfi_feed_next(&a), &items[1]);
    kvfi_feed_done(&b, &items[2], KVF_OK, KVF_WHY_NONE);
    assert_false(kvfi_feed_is_dry(&b));
    kvfi_feed_done(&a, &items[0], KVF_OK, KVF_WHY_NONE);
    kvfi_feed_done(&a, &items[1], KVF_MISS, KVF_WHY_ABSENT);
    assert_int_equal(whole.limit, 1);
    assert_int_equal(items[1].why, KVF_WHY_ABSENT);
    assert_true(kvfi_feed_is_dry(&b));
    assert_null(kvfi_feed_next(&b));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_fence_waits_for_its_slots),
        cmocka_unit_test(test_a_fence_waits_for_a_load_that_has_not_begun),
        cmocka_unit_test(test_a_fence_waits_for_a_save_that_has_not_begun),
        cmocka_unit_test(test_a_view_is_closed_when_its_slots_are_free),
        cmocka_unit_test(test_a_place_in_the_queue_is_used_again),
        cmocka_unit_test(test_batches_are_told_apart),
        cmocka_unit_test(test_the_descriptor_tells_of_what_is_done),
        cmocka_unit_test(test_bad_batches_are_refused),
        cmocka_unit_test(test_a_commit_of_too_much_is_dropped),
        cmocka_unit_test(test_free_buffers_make_room),
        cmocka_unit_test(test_the_header_of_another_key_is_no_match),
        cmocka_unit_test(test_lookups_are_counted),
        cmocka_unit_test(test_a_tier_that_failed_is_the_reason),
        cmocka_unit_test(test_a_match_answers_for_every_key),
        cmocka_unit_test(test_a_load_of_each),
        cmocka_unit_test(test_touch_and_remove_reach_all_tiers),
        cmocka_unit_test(test_a_tier_that_fails_to_remove),
        cmocka_unit_test(test_a_cancelled_removal),
        cmocka_unit_test(test_a_cancelled_load_of_each),
        cmocka_unit_test(test_a_lookup_without_memory),
        cmocka_unit_test(test_a_poll_asks_memory_alone),
        cmocka_unit_test(test_what_is_lent_is_promoted),
        cmocka_unit_test(test_what_a_space_says_of_itself),
        cmocka_unit_test(test_what_was_truncated_is_written_again),
        cmocka_unit_test(test_a_gap_in_a_fast_tier_does_not_end_the_run),
        cmocka_unit_test(test_only_what_lasts_is_known),
        cmocka_unit_test(test_a_flush_does_not_wait_for_later_saves),
        cmocka_unit_test(test_a_flush_tells_what_was_not_written),
        cmocka_unit_test(test_the_first_of_two_flushes_is_told),
        cmocka_unit_test(test_a_flush_ends_at_its_budget),
        cmocka_unit_test(test_what_went_wrong_with_a_session),
        cmocka_unit_test(test_a_gap_on_one_server_ends_the_others),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
