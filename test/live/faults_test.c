/* SPDX-License-Identifier: Apache-2.0
 *
 * check-faults: the n-th allocation and the n-th system call fail, for every n, in the life of a store: open, save,
 * match, load, borrow, walk, session, close, on every kind of store. Whatever fails, a hit is byte-exact, and nothing
 * crashes, leaks or hangs.
 */
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/cluster.h"
#include "support/faults.h"
#include "support/kit.h"
#include "support/server.h"

#define BLOCKS     3u
#define PAYLOAD    9000u
#define MAX_POINTS 20000u

static uint64_t points_hit;

static int count_entry(void *ctx, const kvf_entry *entry) {
    *(size_t *)ctx += entry->damage == KVF_WHY_NONE;
    return 0;
}

static void use_session(kvf_store *store) {
    uint8_t k[600], v[600];
    kvft_bytes(k, sizeof k, 1);
    kvft_bytes(v, sizeof v, 2);
    kvf_tensor kt = {.data = k, .len = sizeof k}, vt = {.data = v, .len = sizeof v};
    kvf_session_options options = {.struct_size = sizeof options, .budget_us = KVF_MS(2000)};
    kvf_session *session = NULL;
    kvf_error err = {0};
    kvf_status saved = kvf_session_save(store, &err, "fault", &kt, &vt, &options);
    kvf_status loaded = kvf_session_load(store, &session, &err, "fault", KVF_MS(2000));
    if (loaded == KVF_OK) {
        assert_int_equal(session->k.len, sizeof k);
        assert_memory_equal(session->k.data, k, sizeof k);
        assert_memory_equal(session->v.data, v, sizeof v);
        kvf_session_free(session);
    } else {
        assert_true(strlen(err.what) > 0);
    }
    (void)saved;
    kvf_status removed = kvf_session_remove(store, &err, "fault");
    (void)removed;
}

static size_t use_blocks(kvf_store *store, kvf_space *space, kvft_prompt *prompt) {
    kvft_prompt_fill(prompt, 5);
    kvf_save(space, prompt->blocks, BLOCKS, NULL);
    kvf_status flushed = kvf_store_flush(store, NULL, KVF_MS(5000));
    (void)flushed;
    kvf_found found[BLOCKS];
    size_t run = 0;
    assert_int_equal(kvf_match(space, &run, found, prompt->keys, BLOCKS, KVF_MS(2000)), KVF_OK);
    for (size_t i = 0; i < run; i++) {
        assert_int_equal(found[i].payload_bytes, PAYLOAD);
    }
    kvft_prompt_poison(prompt);
    run = kvf_load(space, prompt->blocks, BLOCKS, NULL, KVF_MS(2000));
    assert_int_equal(kvft_prompt_wrong(prompt, 5, run), 0);
    size_t loaded = run;
    kvft_prompt_fill(prompt, 5);
    kvf_borrowed borrowed = {0};
    if (kvf_borrow(space, &borrowed, &prompt->blocks[0]) == KVF_OK) {
        assert_int_equal(borrowed.len, PAYLOAD);
        assert_memory_equal(borrowed.data, prompt->memory, PAYLOAD);
        kvf_release(space, &borrowed);
    }
    return loaded;
}

static size_t run_batch(kvf_queue *queue, kvf_space *space, kvft_prompt *prompt, kvf_op op, uint32_t flags) {
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = op,
                       .flags = flags,
                       .space = space,
                       .blocks = prompt->blocks,
                       .num = BLOCKS,
                       .budget_us = KVF_MS(2000)};
    uint64_t ticket;
    kvf_completion done = {0};
    if (kvf_submit(queue, &ticket, &batch) == KVF_OK) {
        struct pollfd fd = {.fd = kvf_queue_fd(queue), .events = POLLIN};
        while (kvf_reap(queue, &done, 1) == 0) {
            poll(&fd, 1, 20);
        }
    }
    return done.num_ok;
}

static void use_queue(kvf_store *store, kvf_space *space, kvft_prompt *prompt) {
    kvf_queue *queue = NULL;
    kvf_error err = {0};
    if (kvf_queue_open(&queue, &err, store, 2) != KVF_OK) {
        return;
    }
    kvft_prompt_poison(prompt);
    size_t run = run_batch(queue, space, prompt, KVF_OP_LOAD, 0);
    assert_int_equal(kvft_prompt_wrong(prompt, 5, run), 0);
    kvft_prompt_poison(prompt);
    size_t here = run_batch(queue, space, prompt, KVF_OP_LOAD, KVF_EACH);
    assert_true(kvft_prompt_wrong(prompt, 5, BLOCKS) <= BLOCKS - here);
    (void)run_batch(queue, space, prompt, KVF_OP_TOUCH, 0);
    size_t removed = run_batch(queue, space, prompt, KVF_OP_REMOVE, 0);
    if (removed == BLOCKS) {
        assert_int_equal(run_batch(queue, space, prompt, KVF_OP_LOAD, KVF_EACH), 0);
    }
    kvf_queue_close(queue);
}

/* One life of a store; returns how many blocks loaded. The prompt lives outside of it: its memory is the test's. */
static size_t live_once(const char *url, kvft_prompt *prompt) {
    kvf_store *store = NULL;
    kvf_space *space = NULL;
    kvf_error err = {0};
    kvf_options options = {.struct_size = sizeof options, .drain_us = KVF_MS(2000)};
    if (kvf_store_open(&store, &err, &url, 1, &options) != KVF_OK) {
        assert_true(strlen(err.what) > 0);
        return 0;
    }
    size_t loaded = 0;
    kvf_field fields[] = {{"engine", "test"}, {"model", "m"}, {"kv", "f16"}};
    kvf_space_options space_options = {.struct_size = sizeof space_options, .block_tokens = 16};
    if (kvf_space_open(&space, &err, store, fields, 3, &space_options) == KVF_OK) {
        loaded = use_blocks(store, space, prompt);
        use_queue(store, space, prompt);
        size_t seen = 0;
        kvf_walk_options walk = {.struct_size = sizeof walk, .whole = 1, .budget_us = KVF_MS(2000)};
        kvf_status walked = kvf_walk(store, &err, count_entry, &seen, &walk);
        (void)walked;
        kvf_space_close(space);
    }
    use_session(store);
    kvf_store_close(store);
    return loaded;
}

/* Fails call after call until a whole life passes without reaching the n-th. */
static void fail_each(const char *what, const char *url, kvft_fault_kind kind) {
    kvf_store *store = kvft_store("mem:");
    kvf_space *space = kvft_space(store, "m", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 5, BLOCKS, PAYLOAD);
    uint64_t n = 1;
    bool hit = true;
    size_t loaded = 0;
    for (; hit && n < MAX_POINTS; n++) {
        kvft_faults_arm(kind, n);
        loaded = live_once(url, prompt);
        uint64_t live = kvft_faults_live_allocs();
        hit = kvft_faults_disarm();
        if (kind == KVFT_ZERO && loaded != BLOCKS) {
            fail_msg("%s: %zu blocks loaded with call %llu", what, loaded, (unsigned long long)n);
        }
        if (live != 0) {
            fail_msg("%s: %llu blocks of memory leaked when call %llu failed", what, (unsigned long long)live,
                     (unsigned long long)n);
        }
    }
    assert_true(n < MAX_POINTS);
    assert_int_equal(loaded, BLOCKS); /* the last life met no fault */
    points_hit += n - 2;
    printf("%-28s %6llu points\n", what, (unsigned long long)(n - 2));
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
}

static void fail_all(const char *kind, const char *url) {
    char what[64];
    snprintf(what, sizeof what, "%s, allocation", kind);
    fail_each(what, url, KVFT_ALLOC);
    snprintf(what, sizeof what, "%s, system call", kind);
    fail_each(what, url, KVFT_CALL);
    snprintf(what, sizeof what, "%s, short transfer", kind);
    fail_each(what, url, KVFT_SHORT);
    snprintf(what, sizeof what, "%s, descriptor 0", kind);
    fail_each(what, url, KVFT_ZERO);
}

static void test_memory(void **state) {
    (void)state;
    fail_all("mem", "mem:");
}

static void test_folder(void **state) {
    (void)state;
    char *dir = kvft_temp_dir();
    char url[200];
    snprintf(url, sizeof url, "file:%s", dir);
    fail_all("file", url);
    kvft_remove_dir(dir);
}

static void test_redis(void **state) {
    (void)state;
    kvft_server *server = kvft_server_start(NULL);
    if (server == NULL) {
        skip();
    }
    fail_all("redis", server->unix_url);
    kvft_server_stop(server);
}

static void test_cluster(void **state) {
    (void)state;
    kvft_cluster *cluster = kvft_cluster_start(false);
    if (cluster == NULL) {
        skip();
    }
    fail_all("redis+cluster", cluster->url);
    kvft_cluster_stop(cluster);
}

static void test_sentinel(void **state) {
    (void)state;
    kvft_sentinels *set = kvft_sentinels_start();
    if (set == NULL) {
        skip();
    }
    fail_all("redis+sentinel", set->url);
    kvft_sentinels_stop(set);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),  cmocka_unit_test(test_folder),   cmocka_unit_test(test_redis),
        cmocka_unit_test(test_cluster), cmocka_unit_test(test_sentinel),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    printf("check-faults: %llu points failed one by one, %d scenarios not survived\n", (unsigned long long)points_hit,
           failed);
    return failed;
}
