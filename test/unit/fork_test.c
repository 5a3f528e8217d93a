/* SPDX-License-Identifier: Apache-2.0
 *
 * A forked child: every public call on what its parent opened answers at once, while threads of the parent, which do
 * not exist in the child, hold locks at the time of the fork.
 */
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/sys.h"
#include "support/child.h"
#include "support/kit.h"

#define BLOCKS  3u
#define TOKENS  16u
#define PAYLOAD 3000u
#define SLOTS   4u
#define FORKS   40
#define SECRET  "a secret of a tenant"

typedef struct scene {
    kvf_store *store;
    kvf_space *space, *sealed;
    kvf_queue *queue;
    kvf_view *view;
    kvft_prompt *prompt;
    kvf_session *session;
    kvf_earlier *earlier;
    char *text; /* of kvf_space_describe */
    uint8_t *pool;
    kvf_digest digest;
    kvf_key stored, tail, state, apart, salted, of_hash;
    kvf_reserved reserved;
    kvf_borrowed borrowed;
    uint64_t ticket; /* of a batch that is under way */
    kvf_block batch_blocks[BLOCKS];
    kvf_error err;
} scene;

static const char how[] = "how";
static const kvf_tensor two_bytes = {.data = "kv", .len = 2};

/* ---- what needs no lock works ---- */

static bool version(void *s) {
    (void)s;
    return strcmp(kvf_version(), KVF_VERSION) == 0;
}
static bool status_name(void *s) {
    (void)s;
    return strcmp(kvf_status_name(KVF_MISS), "miss") == 0;
}
static bool reason_name(void *s) {
    (void)s;
    return strcmp(kvf_reason_name(KVF_WHY_CLOSED), "closed") == 0;
}
static bool absence_name(void *s) {
    (void)s;
    return strcmp(kvf_absence_name(KVF_ABSENCE_ENDS), "ends") == 0;
}
static bool plan_name(void *s) {
    (void)s;
    return strcmp(kvf_plan_name(KVF_PLAN_LOAD), "load") == 0;
}
static bool set_log(void *s) {
    (void)s;
    kvf_set_log(NULL, NULL, KVF_LOG_ERROR);
    return true;
}
static bool set_interrupt(void *s) {
    (void)s;
    kvf_set_interrupt(NULL, NULL);
    return true;
}
static bool space_digest(void *scene_) {
    scene *s = scene_;
    kvf_digest digest = {{0}};
    kvf_space_digest(s->space, &digest);
    return memcmp(&digest, &s->digest, sizeof digest) == 0;
}
static bool space_block_tokens(void *scene_) {
    return kvf_space_block_tokens(((scene *)scene_)->space) == TOKENS;
}
static bool space_fields(void *scene_) {
    return strcmp(kvf_space_fields(((scene *)scene_)->space), "block_tokens=16\nengine=test\nkv=f16\nmodel=m\n") == 0;
}
static bool chain(void *scene_) {
    scene *s = scene_;
    kvf_key keys[BLOCKS];
    return kvf_chain(s->space, keys, BLOCKS, s->prompt->tokens, BLOCKS * TOKENS) == BLOCKS &&
           memcmp(keys, s->prompt->keys, sizeof keys) == 0;
}
static bool chain_from(void *scene_) {
    scene *s = scene_;
    kvf_key key;
    return kvf_chain_from(s->space, &key, 1, s->prompt->tokens + TOKENS, TOKENS, s->prompt->keys) == 1 &&
           memcmp(&key, &s->prompt->keys[1], sizeof key) == 0;
}
static bool salt_key(void *scene_) {
    scene *s = scene_;
    kvf_key key;
    kvf_salt_key(s->space, &key, s->prompt->keys, how, sizeof how);
    return memcmp(&key, &s->salted, sizeof key) == 0;
}
static bool key_of(void *scene_) {
    scene *s = scene_;
    kvf_key key;
    kvf_key_of(s->space, &key, how, sizeof how);
    return memcmp(&key, &s->of_hash, sizeof key) == 0;
}
static bool tail_key(void *scene_) {
    scene *s = scene_;
    kvf_key key;
    kvf_tail_key(s->space, &key, s->prompt->keys, s->prompt->tokens, 3);
    return memcmp(&key, &s->tail, sizeof key) == 0;
}
static bool state_key(void *scene_) {
    scene *s = scene_;
    kvf_key key;
    kvf_state_key(s->space, &key, s->prompt->keys);
    return memcmp(&key, &s->state, sizeof key) == 0;
}
static bool apart_key(void *scene_) {
    scene *s = scene_;
    kvf_key key;
    kvf_apart_key(s->space, &key, s->prompt->keys, how, sizeof how);
    return memcmp(&key, &s->apart, sizeof key) == 0;
}
static bool stored_key(void *scene_) {
    scene *s = scene_;
    kvf_key key;
    kvf_stored_key(s->sealed, &key, s->prompt->keys);
    return memcmp(&key, &s->stored, sizeof key) == 0;
}
static bool pace_note(void *s) {
    (void)s;
    kvf_pace pace = {.guess_us = 0};
    kvf_pace_note(&pace, 64, 640);
    return kvf_pace_us(&pace, 64, 64) == 640;
}
static bool patience(void *s) {
    (void)s;
    return kvf_patience_us(KVF_MS(1000)) == KVF_MS(30);
}
static bool decide(void *s) {
    (void)s;
    kvf_plan plan = {.struct_size = sizeof plan};
    kvf_pace pace = {.guess_us = 0};
    kvf_gap gap = {.struct_size = sizeof gap, .num_blocks = 1, .block_bytes = 1, .block_tokens = 1, .batch_tokens = 1};
    return kvf_decide(&plan, NULL, &gap, &pace) == KVF_OK && plan.num_load == 1;
}
static bool plan_batch(void *s) {
    (void)s;
    kvf_pace pace = {.guess_us = 0};
    return kvf_plan_batch(&pace, 2, 16, 64) > 0;
}

/* What is memory of the process alone is the child's own copy. */

static bool free_text(void *scene_) {
    scene *s = scene_;
    kvf_free(s->text);
    s->text = NULL;
    return true;
}
static bool session_free(void *scene_) {
    scene *s = scene_;
    kvf_session_free(s->session);
    s->session = NULL;
    return true;
}
static bool earlier_open(void *s) {
    (void)s;
    kvf_earlier *earlier = NULL;
    kvf_status status = kvf_earlier_open(&earlier, NULL);
    kvf_earlier_close(earlier);
    return status == KVF_OK;
}
static bool earlier_keep(void *scene_) {
    scene *s = scene_;
    kvf_earlier_keep(s->earlier, 2, s->prompt->tokens, TOKENS);
    return true;
}
static bool earlier_explain(void *scene_) {
    scene *s = scene_;
    size_t at = 0;
    return kvf_earlier_explain(s->earlier, &at, 1, s->prompt->tokens, 2u * TOKENS, 0, TOKENS) == KVF_ABSENCE_EVICTED;
}
static bool earlier_close(void *scene_) {
    (void)scene_;
    kvf_earlier_close(NULL); /* earlier_open closes its own; the rows after this one use that of the scene */
    return true;
}
static bool view_open(void *scene_) {
    scene *s = scene_;
    kvf_view *view = NULL;
    kvf_region region = {.base = s->pool, .slot_stride = PAYLOAD, .run_bytes = PAYLOAD, .num_runs = 1};
    const int64_t slot = 1;
    bool ok =
        kvf_view_open(&view, &s->err, &region, 1, SLOTS) == KVF_OK && kvf_fence(view, &slot, 1, KVF_DEFAULT) == KVF_OK;
    kvf_view_close(view);
    return ok;
}

/* A store of the child's own. ThreadSanitizer allows no threads in a child whose parent had some. */
static bool store_open(void *scene_) {
    scene *s = scene_;
    const char *url = "mem:";
    kvf_store *own = NULL;
    bool ok = kvf_store_open(&own, &s->err, &url, 1, NULL) == KVF_OK;
#ifndef __SANITIZE_THREAD__
    kvf_space *space = ok ? kvft_space(own, "m", TOKENS) : NULL;
    ok = ok && kvf_save(space, s->prompt->blocks, BLOCKS, NULL) == BLOCKS &&
         kvf_store_flush(own, NULL, KVF_DEFAULT) == KVF_OK &&
         kvf_load(space, s->prompt->blocks, BLOCKS, NULL, KVF_DEFAULT) == BLOCKS;
    kvf_space_close(space);
#endif
    kvf_store_close(own);
    return ok;
}

/* ---- what closes or gives back does nothing: the second pass uses it again ---- */

static bool store_close(void *scene_) {
    kvf_store_close(((scene *)scene_)->store);
    return true;
}
static bool space_close(void *scene_) {
    kvf_space_close(((scene *)scene_)->space);
    return true;
}
static bool view_close(void *scene_) {
    kvf_view_close(((scene *)scene_)->view);
    return true;
}
static bool queue_close(void *scene_) {
    kvf_queue_close(((scene *)scene_)->queue);
    return true;
}
static bool give_back(void *scene_) {
    scene *s = scene_;
    kvf_borrowed borrowed = s->borrowed;
    kvf_release(s->space, &borrowed);
    return ((const uint8_t *)s->borrowed.data)[0] == ((const uint8_t *)s->prompt->iov[0].iov_base)[0];
}
static bool abandon(void *scene_) {
    scene *s = scene_;
    kvf_reserved reserved = s->reserved;
    kvf_abandon(s->space, &reserved);
    memset(s->reserved.data, 1, s->reserved.len);
    return true;
}
static bool cancel(void *scene_) {
    scene *s = scene_;
    kvf_cancel(s->queue, s->ticket);
    return true;
}
static bool trim(void *scene_) {
    scene *s = scene_;
    kvf_trim(s->queue, s->ticket, 0);
    return true;
}

/* ---- all else is closed ---- */

static bool space_open(void *scene_) {
    scene *s = scene_;
    const kvf_field fields[] = {{"engine", "e"}, {"model", "m"}, {"kv", "f16"}};
    kvf_space *space = NULL;
    return kvf_space_open(&space, &s->err, s->store, fields, 3, NULL) == KVF_CLOSED && s->err.status == KVF_CLOSED;
}
static bool flush(void *scene_) {
    return kvf_store_flush(((scene *)scene_)->store, NULL, KVF_DEFAULT) == KVF_CLOSED;
}
static bool stats(void *scene_) {
    kvf_stats stats = {.struct_size = sizeof stats};
    return kvf_store_stats(((scene *)scene_)->store, &stats) == KVF_CLOSED;
}
static bool store_link(void *scene_) {
    kvf_link link = {.bytes_per_s = 1, .reserved = {1}};
    return kvf_store_link(((scene *)scene_)->store, 0, &link) == KVF_CLOSED && !(link.bytes_per_s > 0) &&
           link.reserved[0] == 0;
}
static bool tier_info(void *scene_) {
    kvf_tier_info info = {.struct_size = sizeof info};
    return kvf_tier_info_get(((scene *)scene_)->store, &info, 0) == KVF_CLOSED;
}
static bool fence(void *scene_) {
    const int64_t slot = 0;
    return kvf_fence(((scene *)scene_)->view, &slot, 1, KVF_DEFAULT) == KVF_CLOSED;
}
static bool are_closed(const kvf_block *blocks) {
    for (size_t i = 0; i < BLOCKS; i++) {
        kvf_reason why = i == 0 ? KVF_WHY_CLOSED : KVF_WHY_AFTER_GAP;
        if (blocks[i].status == KVF_OK || (blocks[i].why != KVF_WHY_CLOSED && blocks[i].why != why)) {
            return false;
        }
    }
    return blocks[0].status == KVF_MISS;
}
static bool match(void *scene_) {
    scene *s = scene_;
    size_t run = 9;
    kvf_found found[BLOCKS];
    return kvf_match(s->space, &run, found, s->prompt->keys, BLOCKS, KVF_DEFAULT) == KVF_OK && run == 0 &&
           found[0].why == KVF_WHY_CLOSED;
}
static bool load(void *scene_) {
    scene *s = scene_;
    return kvf_load(s->space, s->prompt->blocks, BLOCKS, NULL, KVF_DEFAULT) == 0 && are_closed(s->prompt->blocks);
}
static bool load_with(void *scene_) {
    scene *s = scene_;
    const kvf_load_options options = {.struct_size = sizeof options, .flags = KVF_EACH};
    return kvf_load_with(s->space, s->prompt->blocks, BLOCKS, NULL, &options) == 0 && are_closed(s->prompt->blocks);
}
/* A view of the parent with a store of the child's own. */
static bool view_of_the_parent(scene *s) {
    kvf_store *own = kvft_store("mem:");
    kvf_space *space = kvft_space(own, "m", TOKENS);
    kvf_queue *queue = NULL;
    kvf_block blocks[BLOCKS];
    memcpy(blocks, s->prompt->blocks, sizeof blocks);
    bool ok = kvf_load(space, blocks, BLOCKS, s->view, KVF_DEFAULT) == 0 && are_closed(blocks) &&
              kvf_save(space, blocks, BLOCKS, s->view) == 0 && are_closed(blocks) &&
              kvf_queue_open(&queue, NULL, own, 1) == KVF_OK;
    kvf_batch batch = {.struct_size = sizeof batch, .space = space, .blocks = blocks, .num = BLOCKS, .view = s->view};
    uint64_t ticket = 0;
    ok = ok && kvf_submit(queue, &ticket, &batch) == KVF_CLOSED;
    kvf_queue_close(queue);
    kvf_space_close(space);
    kvf_store_close(own);
    return ok;
}
static bool save(void *scene_) {
    scene *s = scene_;
    bool ok = kvf_save(s->space, s->prompt->blocks, BLOCKS, NULL) == 0 && are_closed(s->prompt->blocks);
    kvf_block in_slots[BLOCKS];
    for (size_t i = 0; i < BLOCKS; i++) {
        in_slots[i] = s->prompt->blocks[i];
        in_slots[i].iov = NULL;
        in_slots[i].slot = (int64_t)i;
    }
    return ok && kvf_save(s->sealed, in_slots, BLOCKS, s->view) == 0 && are_closed(in_slots);
}
static bool borrow(void *scene_) {
    scene *s = scene_;
    kvf_borrowed borrowed;
    return kvf_borrow(s->space, &borrowed, s->prompt->blocks) == KVF_MISS && s->prompt->blocks->why == KVF_WHY_CLOSED;
}
static bool reserve(void *scene_) {
    kvf_reserved reserved;
    return kvf_reserve(((scene *)scene_)->space, &reserved, PAYLOAD) == KVF_CLOSED;
}
static bool commit(void *scene_) {
    scene *s = scene_;
    kvf_reserved reserved = s->reserved;
    return kvf_commit(s->space, &reserved, s->prompt->blocks, PAYLOAD) == KVF_CLOSED;
}
static bool knows(void *scene_) {
    scene *s = scene_;
    return kvf_knows(s->space, s->prompt->keys) == 0;
}
static bool forget(void *scene_) {
    scene *s = scene_;
    kvf_forget(s->space, s->prompt->keys, BLOCKS);
    return true;
}
static bool queue_open(void *scene_) {
    scene *s = scene_;
    kvf_queue *queue = NULL;
    return kvf_queue_open(&queue, &s->err, s->store, 1) == KVF_CLOSED;
}
static bool queue_fd(void *scene_) {
    return kvf_queue_fd(((scene *)scene_)->queue) == -1;
}
static bool submit(void *scene_) {
    scene *s = scene_;
    uint64_t ticket = 0;
    kvf_batch batch = {.struct_size = sizeof batch, .space = s->space, .blocks = s->prompt->blocks, .num = BLOCKS};
    int op = KVF_OP_LOAD;
    do { /* all that there are: beyond the last it is KVF_LIMIT */
        batch.op = (kvf_op)op++;
    } while (kvf_submit(s->queue, &ticket, &batch) == KVF_CLOSED);
    if (op <= KVF_OP_MATCH + 1 || kvf_submit(s->queue, &ticket, &batch) != KVF_LIMIT) {
        return false;
    }
    return view_of_the_parent(s);
}
static bool reap(void *scene_) {
    kvf_completion done;
    return kvf_reap(((scene *)scene_)->queue, &done, 1) == 0;
}
static bool session_save(void *scene_) {
    scene *s = scene_;
    return kvf_session_save(s->store, &s->err, "s", &two_bytes, &two_bytes, NULL) == KVF_CLOSED;
}
static bool session_load(void *scene_) {
    scene *s = scene_;
    kvf_session *session = NULL;
    return kvf_session_load(s->store, &session, &s->err, "s", KVF_DEFAULT) == KVF_CLOSED;
}
static bool session_load_with(void *scene_) {
    scene *s = scene_;
    kvf_session *session = NULL;
    return kvf_session_load_with(s->store, &session, &s->err, "s", NULL) == KVF_CLOSED;
}
static bool session_remove(void *scene_) {
    scene *s = scene_;
    return kvf_session_remove(s->store, &s->err, "s") == KVF_CLOSED;
}
static int see_nothing(void *ctx, const kvf_entry *entry) {
    (void)ctx;
    (void)entry;
    return 0;
}
static bool walk(void *scene_) {
    scene *s = scene_;
    return kvf_walk(s->store, &s->err, see_nothing, NULL, NULL) == KVF_CLOSED;
}
static bool clear(void *scene_) {
    scene *s = scene_;
    uint64_t removed = 9;
    return kvf_clear(s->store, &removed, &s->err, NULL) == KVF_CLOSED && removed == 0;
}
static bool remove_one(void *scene_) {
    scene *s = scene_;
    return kvf_remove(s->store, &s->err, &s->digest, s->prompt->keys) == KVF_CLOSED;
}
static bool describe(void *scene_) {
    scene *s = scene_;
    char *text = NULL;
    return kvf_space_describe(s->store, &text, &s->err, &s->digest) == KVF_CLOSED;
}
static void find_nothing(void *ctx, const kvf_finding *finding) {
    (void)ctx;
    (void)finding;
}
static bool doctor(void *scene_) {
    scene *s = scene_;
    return kvf_doctor(s->store, &s->err, find_nothing, NULL) == KVF_CLOSED;
}

static const kvft_child_row rows[] = {
    {"kvf_version", version},
    {"kvf_status_name", status_name},
    {"kvf_reason_name", reason_name},
    {"kvf_absence_name", absence_name},
    {"kvf_plan_name", plan_name},
    {"kvf_set_log", set_log},
    {"kvf_set_interrupt", set_interrupt},
    {"kvf_space_digest", space_digest},
    {"kvf_space_block_tokens", space_block_tokens},
    {"kvf_space_fields", space_fields},
    {"kvf_chain", chain},
    {"kvf_chain_from", chain_from},
    {"kvf_salt_key", salt_key},
    {"kvf_key_of", key_of},
    {"kvf_tail_key", tail_key},
    {"kvf_state_key", state_key},
    {"kvf_apart_key", apart_key},
    {"kvf_stored_key", stored_key},
    {"kvf_pace_note", pace_note},
    {"kvf_pace_us", pace_note},
    {"kvf_patience_us", patience},
    {"kvf_decide", decide},
    {"kvf_plan_batch", plan_batch},
    {"kvf_free", free_text},
    {"kvf_session_free", session_free},
    {"kvf_earlier_open", earlier_open},
    {"kvf_earlier_keep", earlier_keep},
    {"kvf_earlier_explain", earlier_explain},
    {"kvf_earlier_close", earlier_close},
    {"kvf_view_open", view_open},
    {"kvf_store_open", store_open},
    {"kvf_store_close", store_close},
    {"kvf_space_close", space_close},
    {"kvf_view_close", view_close},
    {"kvf_queue_close", queue_close},
    {"kvf_release", give_back},
    {"kvf_abandon", abandon},
    {"kvf_cancel", cancel},
    {"kvf_trim", trim},
    {"kvf_space_open", space_open},
    {"kvf_store_flush", flush},
    {"kvf_store_stats", stats},
    {"kvf_store_link", store_link},
    {"kvf_tier_info_get", tier_info},
    {"kvf_fence", fence},
    {"kvf_match", match},
    {"kvf_load", load},
    {"kvf_load_with", load_with},
    {"kvf_save", save},
    {"kvf_borrow", borrow},
    {"kvf_reserve", reserve},
    {"kvf_commit", commit},
    {"kvf_knows", knows},
    {"kvf_forget", forget},
    {"kvf_queue_open", queue_open},
    {"kvf_queue_fd", queue_fd},
    {"kvf_submit", submit},
    {"kvf_reap", reap},
    {"kvf_session_save", session_save},
    {"kvf_session_load", session_load},
    {"kvf_session_load_with", session_load_with},
    {"kvf_session_remove", session_remove},
    {"kvf_walk", walk},
    {"kvf_clear", clear},
    {"kvf_remove", remove_one},
    {"kvf_space_describe", describe},
    {"kvf_doctor", doctor},
};
static const size_t num_rows = sizeof rows / sizeof *rows;

/* ---- the parent: its threads hold every lock now and then ---- */

static atomic_bool enough;

static void *move_blocks(void *arg) {
    scene *s = arg;
    uint64_t random = 1;
    while (!enough) {
        kvft_prompt *p = kvft_prompt_new(s->space, 100 + kvft_random(&random) % 4, BLOCKS, PAYLOAD);
        for (size_t i = 0; i < BLOCKS; i++) {
            p->blocks[i].iov = NULL;
            p->blocks[i].slot = (int64_t)i;
        }
        const int64_t slot = 1;
        size_t run = 0;
        (void)kvf_save(s->space, p->blocks, BLOCKS, s->view);
        (void)!kvf_match(s->space, &run, NULL, p->keys, BLOCKS, KVF_DEFAULT);
        (void)kvf_load(s->space, p->blocks, BLOCKS, s->view, KVF_DEFAULT);
        (void)!kvf_fence(s->view, &slot, 1, KVF_DEFAULT);
        if (!kvf_knows(s->space, p->keys)) {
            kvf_forget(s->space, p->keys, BLOCKS);
        }
        kvft_prompt_free(p);
    }
    return NULL;
}

static void *seal_blocks(void *arg) {
    scene *s = arg;
    kvft_prompt *p = kvft_prompt_new(s->sealed, 200, BLOCKS, PAYLOAD);
    kvf_queue *queue = NULL;
    assert_int_equal(kvf_queue_open(&queue, NULL, s->store, 4), KVF_OK);
    kvf_batch batch = {.struct_size = sizeof batch, .space = s->sealed, .blocks = p->blocks, .num = BLOCKS};
    for (int i = 0; !enough; i++) {
        kvf_completion done;
        uint64_t ticket = 0;
        batch.op = i % 2 == 0 ? KVF_OP_SAVE : KVF_OP_LOAD;
        assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
        while (kvf_reap(queue, &done, 1) == 0) {
            struct pollfd fd = {.fd = kvf_queue_fd(queue), .events = POLLIN};
            assert_int_equal(poll(&fd, 1, KVFT_PATIENCE_MS), 1);
        }
    }
    kvf_queue_close(queue);
    kvft_prompt_free(p);
    return NULL;
}

static void *look_after_it(void *arg) {
    scene *s = arg;
    while (!enough) {
        kvf_stats counters = {.struct_size = sizeof counters};
        kvf_link link;
        kvf_reserved room;
        (void)kvf_store_stats(s->store, &counters);
        (void)kvf_store_link(s->store, 0, &link);
        (void)!kvf_walk(s->store, NULL, see_nothing, NULL, NULL);
        (void)!kvf_store_flush(s->store, NULL, KVF_POLL);
        if (kvf_reserve(s->space, &room, PAYLOAD) == KVF_OK) {
            kvf_abandon(s->space, &room);
        }
    }
    return NULL;
}

static void say_nothing(void *ctx, kvf_log_level level, const char *message) {
    (void)ctx;
    (void)level;
    (void)message;
}

static void *change_the_log(void *arg) {
    (void)arg;
    while (!enough) {
        kvf_set_log(say_nothing, NULL, KVF_LOG_DEBUG);
    }
    kvf_set_log(NULL, NULL, KVF_LOG_ERROR);
    return NULL;
}

static void open_scene(scene *s, const char *dir) {
    char url[300];
    snprintf(url, sizeof url, "file:%s?max=4M", dir);
    *s = (scene){.store = kvft_store2("mem:?max=256K", url), .pool = calloc(SLOTS, PAYLOAD)};
    s->space = kvft_sealed_space(s->store, "m", TOKENS, NULL); /* sealed records are not lent */
    s->sealed = kvft_sealed_space(s->store, "m", TOKENS, SECRET);
    s->prompt = kvft_prompt_new(s->space, 1, BLOCKS, PAYLOAD);
    kvf_region region = {.base = s->pool, .slot_stride = PAYLOAD, .run_bytes = PAYLOAD, .num_runs = 1};
    assert_int_equal(kvf_view_open(&s->view, NULL, &region, 1, SLOTS), KVF_OK);
    assert_int_equal(kvf_queue_open(&s->queue, NULL, s->store, 2), KVF_OK);
    assert_int_equal(kvf_earlier_open(&s->earlier, NULL), KVF_OK);
    kvf_earlier_keep(s->earlier, 1, s->prompt->tokens, BLOCKS * TOKENS);
    kvf_space_digest(s->space, &s->digest);
    kvf_stored_key(s->sealed, &s->stored, s->prompt->keys);
    kvf_key_of(s->space, &s->of_hash, how, sizeof how);
    kvf_salt_key(s->space, &s->salted, s->prompt->keys, how, sizeof how);
    kvf_tail_key(s->space, &s->tail, s->prompt->keys, s->prompt->tokens, 3);
    kvf_state_key(s->space, &s->state, s->prompt->keys);
    kvf_apart_key(s->space, &s->apart, s->prompt->keys, how, sizeof how);
    kvft_save_all(s->space, s->store, s->prompt);
    assert_int_equal(kvf_session_save(s->store, NULL, "s", &two_bytes, &two_bytes, NULL), KVF_OK);
    assert_int_equal(kvf_session_load(s->store, &s->session, NULL, "s", KVF_DEFAULT), KVF_OK);
    assert_int_equal(kvf_space_describe(s->store, &s->text, NULL, &s->digest), KVF_OK);
    assert_int_equal(kvf_borrow(s->space, &s->borrowed, s->prompt->blocks), KVF_OK);
    assert_int_equal(kvf_reserve(s->space, &s->reserved, PAYLOAD), KVF_OK);
}

static void close_scene(scene *s) {
    kvf_release(s->space, &s->borrowed);
    kvf_abandon(s->space, &s->reserved);
    kvf_free(s->text);
    kvf_session_free(s->session);
    kvf_earlier_close(s->earlier);
    kvft_prompt_free(s->prompt);
    kvf_queue_close(s->queue);
    kvf_view_close(s->view);
    kvf_space_close(s->sealed);
    kvf_space_close(s->space);
    kvf_store_close(s->store);
    free(s->pool);
}

static void begin_batch(scene *s) {
    memcpy(s->batch_blocks, s->prompt->blocks, sizeof s->batch_blocks);
    kvf_batch batch = {
        .struct_size = sizeof batch, .op = KVF_OP_MATCH, .space = s->space, .blocks = s->batch_blocks, .num = BLOCKS};
    assert_int_equal(kvf_submit(s->queue, &s->ticket, &batch), KVF_OK);
}

static void end_batch(scene *s) {
    kvf_completion done;
    while (kvf_reap(s->queue, &done, 1) == 0) {
        struct pollfd fd = {.fd = kvf_queue_fd(s->queue), .events = POLLIN};
        assert_int_equal(poll(&fd, 1, KVFT_PATIENCE_MS), 1);
    }
    assert_int_equal(done.ticket, s->ticket); /* the child's kvf_cancel was not the parent's */
    assert_int_equal(done.num_ok, BLOCKS);
}

static void test_every_call_in_a_child(void **state) {
    (void)state;
    static void *(*const busy[])(void *) = {move_blocks, seal_blocks, look_after_it, change_the_log};
    enum { THREADS = sizeof busy / sizeof *busy };
    const size_t num_threads = KVFT_CHILD_OF_BUSY_THREADS ? THREADS : 0;
    pthread_t threads[THREADS];
    char *dir = kvft_temp_dir();
    scene s;
    open_scene(&s, dir);
    kvft_child_calls(rows, num_rows, &s);
    enough = false;
    for (size_t i = 0; i < num_threads; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, busy[i], &s), 0);
    }
    for (int i = 0; i < FORKS && num_threads > 0; i++) {
        begin_batch(&s);
        kvft_child_calls(rows, num_rows, &s);
        end_batch(&s);
    }
    enough = true;
    for (size_t i = 0; i < num_threads; i++) {
        pthread_join(threads[i], NULL);
    }
    assert_int_equal(kvf_load(s.space, s.prompt->blocks, BLOCKS, NULL, KVF_DEFAULT), BLOCKS); /* all is as it was */
    close_scene(&s);
    kvft_remove_dir(dir);
}

/* ---- forks while the forking thread itself holds locks: at its system calls ---- */

static kvfi_systable table;
static pthread_t forking_thread;
static scene *forked_scene;
static int forks_left;

static void maybe_fork(void) {
    static bool inside;
    if (pthread_equal(pthread_self(), forking_thread) && forks_left > 0 && !inside) {
        inside = true;
        forks_left--;
        kvft_child_calls(rows, num_rows, forked_scene);
        inside = false;
    }
}

static void *fork_and_alloc(size_t bytes) {
    maybe_fork();
    return kvfi_sys_real.alloc(bytes);
}
static void fork_and_release(void *p) {
    maybe_fork();
    kvfi_sys_real.release(p);
}
static ssize_t fork_and_readv(int fd, const struct iovec *iov, int num) {
    maybe_fork();
    return kvfi_sys_real.readv(fd, iov, num);
}
static int fork_and_start(void *out_pthread, void *(*run)(void *), void *arg) {
    maybe_fork();
    return kvfi_sys_real.thread(out_pthread, run, arg);
}
static int64_t fork_and_tell_time(void) {
    maybe_fork();
    return kvfi_sys_real.now_us();
}

static void test_a_child_of_a_thread_that_holds_a_lock(void **state) {
    (void)state;
    if (!KVFT_CHILD_OF_BUSY_THREADS) {
        skip();
    }
    char *dir = kvft_temp_dir();
    scene s;
    table = kvfi_sys_real;
    table.alloc = fork_and_alloc;
    table.release = fork_and_release;
    table.readv = fork_and_readv;
    table.thread = fork_and_start;
    table.now_us = fork_and_tell_time;
    forking_thread = pthread_self(); /* before there are others, which read it */
    kvfi_sys_table = &table;
    open_scene(&s, dir);
    forked_scene = &s;
    forks_left = 150;
    kvft_prompt *other = kvft_prompt_new(s.space, 2, BLOCKS, PAYLOAD);
    begin_batch(&s);
    end_batch(&s);
    kvft_save_all(s.space, s.store, other);
    assert_int_equal(kvf_load(s.space, other->blocks, BLOCKS, NULL, KVF_DEFAULT), BLOCKS);
    forks_left = 0;
    kvft_prompt_free(other);
    close_scene(&s);
    kvfi_sys_table = &kvfi_sys_real;
    kvft_remove_dir(dir);
}

static void test_every_call_has_a_row(void **state) {
    (void)state;
    kvft_child_covers(KVFT_LIBRARY, rows, num_rows);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_call_has_a_row),
        cmocka_unit_test(test_every_call_in_a_child),
        cmocka_unit_test(test_a_child_of_a_thread_that_holds_a_lock),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
