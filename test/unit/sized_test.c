/* SPDX-License-Identifier: Apache-2.0
 *
 * Structs that grow: each call that takes or fills one, with the sizes that older and newer programs have.
 */
#include "kvferry/sized.h"

#include <poll.h>

#include "support/kit.h"
#include "support/sized.h"

typedef struct scene {
    kvf_store *store;
    kvf_space *space;
    kvf_queue *queue;
    kvf_block block;
} scene;

/* ---- the calls */

static kvf_status open_store(void *scene_, void *sized, kvf_error *err) {
    (void)scene_;
    const char *url = "mem:";
    kvf_store *store = NULL;
    kvf_status status = kvf_store_open(&store, err, &url, 1, sized);
    kvf_store_close(store);
    return status;
}

static kvf_status stats(void *scene_, void *sized, kvf_error *err) {
    (void)err;
    return kvf_store_stats(((scene *)scene_)->store, sized);
}

static void check_stats(void *scene_, const void *sized) {
    (void)scene_;
    assert_int_equal(((const kvf_stats *)sized)->num_tiers, 1);
}

static kvf_status open_space(void *scene_, void *sized, kvf_error *err) {
    const kvf_field fields[] = {{"engine", "e"}, {"model", "m"}, {"kv", "k"}};
    kvf_space *space = NULL;
    kvf_status status = kvf_space_open(&space, err, ((scene *)scene_)->store, fields, 3, sized);
    kvf_space_close(space);
    return status;
}

static kvf_status submit(void *scene_, void *sized, kvf_error *err) {
    (void)err;
    scene *s = scene_;
    kvf_completion done = {0};
    uint64_t ticket = 0;
    kvf_status status = kvf_submit(s->queue, &ticket, sized);
    while (status == KVF_OK && kvf_reap(s->queue, &done, 1) == 0) {
        struct pollfd fd = {.fd = kvf_queue_fd(s->queue), .events = POLLIN};
        assert_int_equal(poll(&fd, 1, 20000), 1);
    }
    assert_int_equal(done.ticket, ticket);
    return status;
}

static kvf_status load(void *scene_, void *sized, kvf_error *err) {
    (void)err;
    scene *s = scene_;
    uint8_t byte;
    struct iovec iov = {&byte, 1};
    kvf_block block = {.iov = &iov, .num_iov = 1};
    assert_int_equal(kvf_load_with(s->space, &block, 1, NULL, sized), 0);
    return block.status == KVF_MISS ? KVF_OK : block.status; /* nothing is stored */
}

static kvf_status save_session(void *scene_, void *sized, kvf_error *err) {
    kvf_tensor t = {.data = "abc", .len = 3};
    return kvf_session_save(((scene *)scene_)->store, err, "id", &t, &t, sized);
}

/* Of the session that the row before it saves. */
static kvf_status load_session(void *scene_, void *sized, kvf_error *err) {
    kvf_session *session = NULL;
    kvf_status status = kvf_session_load_with(((scene *)scene_)->store, &session, err, "id", sized);
    kvf_session_free(session);
    return status;
}

static int see(void *ctx, const kvf_entry *entry) {
    (void)ctx, (void)entry;
    return 0;
}

static kvf_status walk(void *scene_, void *sized, kvf_error *err) {
    return kvf_walk(((scene *)scene_)->store, err, see, NULL, sized);
}

static kvf_status tier_info(void *scene_, void *sized, kvf_error *err) {
    (void)err;
    return kvf_tier_info_get(((scene *)scene_)->store, sized, 0);
}

static void check_info(void *scene_, const void *sized) {
    (void)scene_;
    assert_string_equal(((const kvf_tier_info *)sized)->url, "mem:");
}

static const kvf_pace pace = {.guess_us = 100};

static kvf_status decide(void *scene_, void *sized, kvf_error *err) {
    (void)scene_;
    kvf_plan plan = {.struct_size = sizeof plan};
    return kvf_decide(&plan, err, sized, &pace);
}

static kvf_status plan(void *scene_, void *sized, kvf_error *err) {
    (void)scene_;
    const kvf_gap gap = {.struct_size = sizeof gap, .num_blocks = 4, .block_tokens = 64, .batch_tokens = 512};
    return kvf_decide(sized, err, &gap, &pace);
}

static void check_plan(void *scene_, const void *sized) {
    (void)scene_;
    assert_int_equal(((const kvf_plan *)sized)->num_load, 4);
}

static void every_call(void **state) {
    (void)state;
    scene s = {.store = kvft_store("mem:")};
    s.space = kvft_space(s.store, "m", 16);
    assert_int_equal(kvf_queue_open(&s.queue, NULL, s.store, 1), KVF_OK);
    const kvf_options store = {.backlog_bytes = 1 << 20};
    const kvf_space_options space = {.block_tokens = 16};
    const kvf_batch batch = {.op = KVF_OP_MATCH, .space = s.space, .blocks = &s.block, .num = 1};
    const kvf_load_options blocks = {.flags = KVF_EACH};
    const kvf_session_options session = {.num_tokens = 3};
    const kvf_session_load_options meta = {.budget_us = KVF_MS(10000)};
    const kvf_walk_options look = {.whole = 1};
    const kvf_gap gap = {.num_blocks = 4, .block_tokens = 64, .batch_tokens = 512};
    /* The first sizes are those of 0.3.0. They never change: a program was compiled with them. */
    const kvft_sized table[] = {
        {"kvf_options", 72, sizeof(kvf_options), "kvf_store_open", open_store, &store, NULL},
        {"kvf_stats", 640, sizeof(kvf_stats), "kvf_store_stats", stats, NULL, check_stats},
        {"kvf_space_options", 40, sizeof(kvf_space_options), "kvf_space_open", open_space, &space, NULL},
        {"kvf_batch", 80, sizeof(kvf_batch), "kvf_submit", submit, &batch, NULL},
        {"kvf_load_options", 24, sizeof(kvf_load_options), "kvf_load_with", load, &blocks, NULL},
        {"kvf_session_options", 40, sizeof(kvf_session_options), "kvf_session_save", save_session, &session, NULL},
        {"kvf_session_load_options", 40, sizeof(kvf_session_load_options), "kvf_session_load_with", load_session, &meta,
         NULL},
        {"kvf_walk_options", 32, sizeof(kvf_walk_options), "kvf_walk", walk, &look, NULL},
        {"kvf_tier_info", 304, sizeof(kvf_tier_info), "kvf_tier_info_get", tier_info, NULL, check_info},
        {"kvf_gap", 96, sizeof(kvf_gap), "kvf_decide", decide, &gap, NULL},
        {"kvf_plan", 48, sizeof(kvf_plan), "kvf_decide", plan, NULL, check_plan},
    };
    const char *const headers[] = {"admin.h", "block.h", "plan.h", "session.h", "space.h", "store.h"};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        kvft_sized_check(&table[i], &s);
    }
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        kvft_sized_is_complete(table, sizeof table / sizeof *table, headers[i]);
    }
    kvf_queue_close(s.queue);
    kvf_space_close(s.space);
    kvf_store_close(s.store);
}

/* Options that are forgotten may hold a secret: nothing is opened without it. */
static void forgotten_sizes(void **state) {
    (void)state;
    const char *url = "mem:";
    kvf_error err = {0};
    kvf_store *store = NULL;
    const kvf_options forgotten = {.secret = "0123456789abcdef", .secret_len = 16};
    assert_int_equal(kvf_store_open(&store, &err, &url, 1, &forgotten), KVF_LIMIT);
    assert_string_equal(err.what, "kvf_options: struct_size is 0: set it to sizeof(kvf_options)");
    assert_null(store);
}

/* ---- a struct that has grown, which none has yet */

typedef struct old_form {
    uint32_t struct_size, a;
} old_form;

typedef struct grown {
    uint32_t struct_size, a;
    uint64_t b;
} grown;

KVF_SIZED(grown, a, 8, b);

static void older_programs(void **state) {
    (void)state;
    const old_form old = {.struct_size = sizeof old, .a = 7};
    const void *volatile theirs = &old; /* hides the size: with sanitizers the compiler warns of bytes never read */
    grown own = {.b = 9};
    assert_int_equal(kvf_sized_take(&own, NULL, theirs, &grown_sized), KVF_OK);
    assert_int_equal(own.struct_size, sizeof own); /* so that it can be passed on */
    assert_int_equal(own.a, 7);
    assert_int_equal(own.b, 0);

    struct {
        old_form form;
        uint32_t behind;
    } out = {.form = {.struct_size = sizeof out.form}, .behind = 0xdddddddd};
    const grown from = {.a = 5, .b = 6};
    assert_int_equal(kvf_sized_give(&out, &from, &grown_sized), KVF_OK);
    assert_int_equal(out.form.struct_size, sizeof out.form);
    assert_int_equal(out.form.a, 5);
    assert_int_equal(out.behind, 0xdddddddd);
}

static void no_options(void **state) {
    (void)state;
    grown own = {.a = 1, .b = 9};
    assert_int_equal(kvf_sized_take(&own, NULL, NULL, &grown_sized), KVF_OK);
    assert_int_equal(own.struct_size, sizeof own);
    assert_true(own.a == 0 && own.b == 0);
}

/* ---- structs that don't grow, and have room */

static void rooms_that_are_set(void **state) {
    (void)state;
    kvf_store *store = kvft_store("mem:");
    kvf_space *space = kvft_space(store, "m", 16);
    kvf_error err = {0};
    for (size_t i = 0; i < 2; i++) {
        uint8_t bytes[16], each[1] = {0};
        kvf_region region = {.base = bytes, .slot_stride = 16, .run_bytes = 16, .num_runs = 1};
        kvf_tensor k = {.data = "abc", .len = 3}, v = k;
        kvf_arrivals arrivals = {.each = each};
        kvf_block block = {.slot = 0};
        kvf_batch batch = {.struct_size = sizeof batch,
                           .op = KVF_OP_LOAD,
                           .space = space,
                           .blocks = &block,
                           .num = 1,
                           .arrivals = &arrivals};
        kvf_view *view = NULL;
        kvf_queue *queue = NULL;
        uint64_t ticket;
        region.reserved[i] = 1;
        assert_int_equal(kvf_view_open(&view, &err, &region, 1, 1), KVF_LIMIT);
        assert_non_null(strstr(err.what, "kvf_region"));
        v.reserved[i] = 1;
        assert_int_equal(kvf_session_save(store, &err, "id", &k, &v, NULL), KVF_LIMIT);
        assert_non_null(strstr(err.what, "`reserved` of v"));
        arrivals.reserved[i] = (uint64_t)1 << 63;
        assert_int_equal(kvf_queue_open(&queue, NULL, store, 1), KVF_OK);
        assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_LIMIT);
        kvf_queue_close(queue);
    }
    kvf_space_close(space);
    kvf_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_call), cmocka_unit_test(forgotten_sizes),    cmocka_unit_test(older_programs),
        cmocka_unit_test(no_options), cmocka_unit_test(rooms_that_are_set),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
