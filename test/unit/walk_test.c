/* SPDX-License-Identifier: Apache-2.0
 *
 * Walks over a store, and single records at their address: what they show of blocks, cards and sessions.
 */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "kvferry/session.h"
#include "record/record.h"
#include "store/private.h"
#include "support/kit.h"

#define PAYLOAD 5000u
#define BLOCKS  5u
#define TOKENS  16u
#define STORED  (KVFI_HEAD_BYTES(TOKENS) + PAYLOAD + KVFI_SUM_BYTES)

typedef struct bench {
    kvf_store *store;
    kvf_space *space, *other;
    kvft_prompt *prompt, *stranger;
    kvf_digest digest;
    char *dir;
} bench;

/* Five blocks of one space, five of another, a session, and two cards. */
static bench open_bench(bool folder) {
    char url[256] = "mem:";
    bench b = {.dir = NULL};
    if (folder) {
        b.dir = kvft_temp_dir();
        snprintf(url, sizeof url, "file:%s", b.dir);
    }
    b.store = kvft_store(url);
    b.space = kvft_space(b.store, "m", TOKENS);
    b.other = kvft_space(b.store, "n", TOKENS);
    b.prompt = kvft_prompt_new(b.space, 3, BLOCKS, PAYLOAD);
    b.stranger = kvft_prompt_new(b.other, 4, BLOCKS, PAYLOAD);
    kvft_save_all(b.space, b.store, b.prompt);
    kvft_save_all(b.other, b.store, b.stranger);
    kvf_space_digest(b.space, &b.digest);
    float data[8] = {1};
    kvf_error err = {0};
    kvf_tensor tensor = {.data = data, .len = sizeof data};
    assert_int_equal(kvf_session_save(b.store, &err, "talk", &tensor, &tensor, NULL), KVF_OK);
    return b;
}

static void close_bench(bench *b) {
    kvft_prompt_free(b->prompt);
    kvft_prompt_free(b->stranger);
    kvf_space_close(b->space);
    kvf_space_close(b->other);
    kvf_store_close(b->store);
    if (b->dir != NULL) {
        kvft_remove_dir(b->dir);
    }
}

/* What a walk has shown. The bytes of each block of the prompt are compared as it is. */
typedef struct seen {
    const bench *b;
    bool whole, one;
    size_t blocks, cards, sessions, damaged, ours, stop_after;
    kvf_reason damage;
} seen;

/* Of one record at its address no name is told. */
static void compare_name(const seen *s, const kvf_entry *entry) {
    char space[17], key[65];
    kvfi_hex(space, entry->space.bytes, 8);
    kvfi_hex(key, entry->key.bytes, 32);
    assert_true(s->one || (strstr(entry->name, space) != NULL && strstr(entry->name, key) != NULL));
}

static void compare(const seen *s, const kvf_entry *entry) {
    const kvft_prompt *p = s->b->prompt;
    for (size_t i = 0; i < BLOCKS; i++) {
        if (memcmp(&entry->key, &p->keys[i], sizeof entry->key) == 0) {
            compare_name(s, entry);
            assert_int_equal(entry->first_token, i * TOKENS);
            assert_int_equal(entry->num_tokens, TOKENS);
            assert_int_equal(entry->payload_bytes, PAYLOAD);
            assert_int_equal(entry->stored_bytes, STORED);
            assert_true(entry->stored_s > 0);
            assert_int_equal(entry->seal, KVF_SEAL_NONE);
            assert_int_equal(entry->tokens != NULL, s->whole);
            assert_int_equal(entry->payload != NULL, s->whole);
            if (s->whole) {
                assert_memory_equal(entry->tokens, p->tokens + i * TOKENS, TOKENS * sizeof *p->tokens);
                assert_memory_equal(entry->payload, p->memory + i * PAYLOAD, PAYLOAD);
            }
            return;
        }
    }
    fail_msg("a block that nobody has saved");
}

static int see(void *ctx, const kvf_entry *entry) {
    seen *s = ctx;
    bool ours = memcmp(&entry->space, &s->b->digest, sizeof entry->space) == 0;
    if (entry->damage != KVF_WHY_NONE) {
        s->damaged++;
        s->damage = entry->damage;
    } else if (entry->kind == KVF_ENTRY_BLOCK) {
        s->blocks++;
        s->ours += ours;
        if (ours) {
            compare(s, entry);
        }
    }
    s->cards += entry->kind == KVF_ENTRY_SPACE_CARD;
    s->sessions += entry->kind == KVF_ENTRY_SESSION;
    return s->stop_after > 0 && s->blocks == s->stop_after;
}

static seen walk(const bench *b, bool whole, const kvf_digest *space, const kvf_key *key, size_t stop_after) {
    seen s = {.b = b, .whole = whole, .one = key != NULL, .stop_after = stop_after};
    kvf_error err = {0};
    kvf_walk_options options = {.struct_size = sizeof options, .whole = whole, .space = space, .key = key};
    assert_int_equal(kvf_walk(b->store, &err, see, &s, &options), KVF_OK);
    return s;
}

static void walk_over(bool folder) {
    bench b = open_bench(folder);
    for (int whole = 0; whole < 2; whole++) {
        seen s = walk(&b, whole, NULL, NULL, 0);
        assert_int_equal(s.blocks, 2 * BLOCKS);
        assert_int_equal(s.ours, BLOCKS);
        assert_int_equal(s.cards, 2);
        assert_int_equal(s.sessions, 1);
        assert_int_equal(s.damaged, 0);
        s = walk(&b, whole, &b.digest, NULL, 0);
        assert_int_equal(s.blocks, BLOCKS);
        assert_int_equal(s.ours, BLOCKS);
        assert_int_equal(s.cards, 1);
        assert_int_equal(s.sessions, 0);
        s = walk(&b, whole, NULL, NULL, 2);
        assert_int_equal(s.blocks, 2);
        for (size_t i = 0; i < BLOCKS; i++) {
            s = walk(&b, whole, &b.digest, &b.prompt->keys[i], 0);
            assert_int_equal(s.ours, 1);
            assert_int_equal(s.blocks + s.cards + s.sessions, 1);
            s = walk(&b, whole, &b.digest, &b.stranger->keys[i], 0);
            assert_int_equal(s.blocks + s.damaged, 0);
        }
    }
    close_bench(&b);
}

static void test_memory(void **state) {
    (void)state;
    walk_over(false);
}

static void test_folder(void **state) {
    (void)state;
    walk_over(true);
}

static void spoil_key(const bench *b, const kvf_key *of, off_t at, off_t len) {
    char path[512], space[17], key[65];
    kvfi_hex(space, b->digest.bytes, 8);
    kvfi_hex(key, of->bytes, 32);
    snprintf(path, sizeof path, "%s/kvf1/%s/%.2s/%s", b->dir, space, key, key);
    int fd = open(path, O_WRONLY);
    assert_true(fd >= 0);
    assert_int_equal(len > 0 ? ftruncate(fd, len) : (int)pwrite(fd, "wrong", 5, at), len > 0 ? 0 : 5);
    close(fd);
}

static void spoil(const bench *b, size_t block, off_t at, off_t len) {
    spoil_key(b, &b->prompt->keys[block], at, len);
}

/* A card whose checksum is wrong is none, even if its text is right. */
static void test_a_damaged_card(void **state) {
    (void)state;
    bench b = open_bench(true);
    kvf_key key;
    char *text = NULL;
    kvfi_card_key(&key, &b.digest);
    assert_int_equal(kvf_space_describe(b.store, &text, NULL, &b.digest), KVF_OK);
    off_t len = (off_t)(KVFI_HEADER_BYTES + strlen(text) + KVFI_SUM_BYTES);
    kvf_free(text);
    spoil_key(&b, &key, len - 5, 0);
    assert_int_equal(kvf_space_describe(b.store, &text, NULL, &b.digest), KVF_MISS);
    close_bench(&b);
}

/* A wrong byte shows to whoever reads whole values, a short file to everybody. */
static void test_damage(void **state) {
    (void)state;
    bench b = open_bench(true);
    spoil(&b, 1, KVFI_HEAD_BYTES(TOKENS) + 100, 0);
    assert_int_equal(walk(&b, false, NULL, NULL, 0).damaged, 0);
    seen s = walk(&b, true, NULL, NULL, 0);
    assert_int_equal(s.damaged, 1);
    assert_int_equal(s.damage, KVF_WHY_CHECKSUM);
    assert_int_equal(s.blocks, 2 * BLOCKS - 1);
    s = walk(&b, true, &b.digest, &b.prompt->keys[1], 0);
    assert_int_equal(s.damaged, 1);
    assert_int_equal(s.damage, KVF_WHY_CHECKSUM);
    spoil(&b, 2, 0, STORED - 1);
    s = walk(&b, false, NULL, NULL, 0);
    assert_int_equal(s.damaged, 1);
    assert_int_equal(s.damage, KVF_WHY_TRUNCATED);
    spoil(&b, 3, 0, KVFI_HEADER_BYTES - 1);
    s = walk(&b, false, NULL, NULL, 0);
    assert_int_equal(s.damaged, 2);
    assert_int_equal(s.blocks, 2 * BLOCKS - 2);
    close_bench(&b);
}

static void peek_fails(kvfi_tier *tier, const kvfi_addr *addrs, size_t num, kvfi_peek *out, uint64_t *round_trips,
                       int64_t deadline_us, int64_t patience_us) {
    (void)tier;
    (void)addrs;
    (void)num;
    (void)round_trips;
    (void)deadline_us;
    (void)patience_us;
    out->why = KVF_WHY_UNREACHABLE;
}

static void get_fails(kvfi_tier *tier, kvfi_feed *feed) {
    (void)tier;
    kvfi_feed_done(feed, kvfi_feed_next(feed), KVF_MISS, KVF_WHY_BUDGET);
}

static void get_finds_nothing(kvfi_tier *tier, kvfi_feed *feed) {
    (void)tier;
    kvfi_feed_done(feed, kvfi_feed_next(feed), KVF_MISS, KVF_WHY_ABSENT);
}

/* A record that can't be read is an error that says why; one that goes between its header and its value is not
 * there. */
static void test_a_record_that_can_not_be_read(void **state) {
    (void)state;
    bench b = open_bench(false);
    kvfi_tier_ops ops = *b.store->tiers[0]->ops;
    const kvfi_tier_ops *real = b.store->tiers[0]->ops;
    seen s = {.b = &b, .whole = true};
    kvf_error err = {0};
    kvf_walk_options options = {
        .struct_size = sizeof options, .whole = 1, .space = &b.digest, .key = &b.prompt->keys[0]};
    b.store->tiers[0]->ops = &ops;
    ops.get = get_fails;
    assert_int_equal(kvf_walk(b.store, &err, see, &s, &options), KVF_IO);
    assert_non_null(strstr(err.what, kvf_reason_name(KVF_WHY_BUDGET)));
    ops.get = get_finds_nothing;
    assert_int_equal(kvf_walk(b.store, &err, see, &s, &options), KVF_OK);
    ops.peek = peek_fails;
    assert_int_equal(kvf_walk(b.store, &err, see, &s, &options), KVF_IO);
    assert_non_null(strstr(err.what, kvf_reason_name(KVF_WHY_UNREACHABLE)));
    assert_int_equal(s.blocks + s.damaged, 0);
    b.store->tiers[0]->ops = real;
    close_bench(&b);
}

static int see_one_token(void *ctx, const kvf_entry *entry) {
    if (entry->kind == KVF_ENTRY_BLOCK) {
        assert_int_equal(entry->num_tokens, 1);
        assert_non_null(entry->tokens);
        assert_int_equal(entry->tokens[0], *(const uint32_t *)ctx);
    }
    return 0;
}

static void test_blocks_of_one_token(void **state) {
    (void)state;
    kvf_store *store = kvft_store("mem:");
    kvf_space *space = kvft_space(store, "m", 1);
    kvft_prompt *prompt = kvft_prompt_new(space, 3, 1, PAYLOAD);
    kvf_walk_options options = {.struct_size = sizeof options, .whole = 1};
    kvft_save_all(space, store, prompt);
    assert_int_equal(kvf_walk(store, NULL, see_one_token, prompt->tokens, &options), KVF_OK);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_blocks_of_one_token),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_folder),
        cmocka_unit_test(test_a_damaged_card),
        cmocka_unit_test(test_damage),
        cmocka_unit_test(test_a_record_that_can_not_be_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
