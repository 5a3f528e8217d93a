/* SPDX-License-Identifier: Apache-2.0
 *
 * check-hostile: fills a store before a case, and uses it in the case.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hostile/hostile.h"

#define SESSION       "hostile"
#define SESSION_BYTES 6000u

static void die(const char *what, const kvf_error *err) {
    fprintf(stderr, "%s: %s\n", what, err->what);
    abort();
}

static kvf_space *space_of(kvf_store *store, bool sealed) {
    static const char secret[] = "nobody in this test has it";
    kvf_field fields[] = {{"engine", "test"}, {"model", "hostile"}, {"kv", "f16"}};
    kvf_space_options options = {.struct_size = sizeof options, .block_tokens = 16};
    kvf_space *space = NULL;
    kvf_error err = {0};
    options.secret = sealed ? secret : NULL;
    options.secret_len = sealed ? sizeof secret : 0;
    if (kvf_space_open(&space, &err, store, fields, 3, &options) != KVF_OK) {
        die("space", &err);
    }
    return space;
}

/* ---- before ---- */

static void array_of(uint8_t out[SESSION_BYTES], uint64_t seed) {
    kvft_bytes(out, SESSION_BYTES, seed);
}

static void fill_blocks(kvf_store *store, size_t payload_bytes, bool sealed) {
    kvf_space *space = space_of(store, sealed);
    kvft_prompt *p = kvft_prompt_new(space, HOSTILE_SEED, HOSTILE_BLOCKS, payload_bytes);
    kvft_save_all(space, store, p);
    kvft_prompt_free(p);
    kvf_space_close(space);
}

void hostile_fill(kvf_store *store, size_t payload_bytes) {
    static uint8_t k[SESSION_BYTES], v[SESSION_BYTES];
    kvf_error err = {0};
    fill_blocks(store, payload_bytes, false);
    fill_blocks(store, payload_bytes, true);
    array_of(k, 1);
    array_of(v, 2);
    kvf_tensor keys = {
        .data = k, .len = SESSION_BYTES, .dtype = "float16", .num_dims = 2, .dims = {2, SESSION_BYTES / 4}};
    kvf_tensor values = keys;
    values.data = v;
    kvf_session_options options = {.struct_size = sizeof options, .num_tokens = 3, .layout = "LT"};
    if (kvf_session_save(store, &err, SESSION, &keys, &values, &options) != KVF_OK) {
        die("session", &err);
    }
}

/* ---- in a case ---- */

typedef struct site {
    kvf_store *store;
    kvf_space *space;
    kvft_prompt *prompt;
    const hostile_use *use;
    uint64_t *random;
    bool sealed;  /* by a secret: a forged record is not one of its blocks, whatever its checksums */
    uint64_t sum; /* of all bytes that were shown, so that each is read */
} site;

static void read_all(site *s, const void *bytes, size_t len) {
    const volatile uint8_t *at = bytes;
    for (size_t i = 0; i < len; i++) {
        s->sum += at[i];
    }
}

static void ask_match(site *s) {
    kvf_found found[HOSTILE_BLOCKS];
    size_t run = 0;
    if (kvf_match(s->space, &run, found, s->prompt->keys, HOSTILE_BLOCKS, KVF_MS(s->use->budget_ms)) != KVF_OK ||
        run > HOSTILE_BLOCKS) {
        hostile_fault("a match is neither a hit nor a miss");
    }
}

static void ask_load(site *s) {
    kvft_prompt_poison(s->prompt);
    size_t run = kvf_load(s->space, s->prompt->blocks, HOSTILE_BLOCKS, NULL, KVF_MS(s->use->budget_ms));
    if (run > 0) {
        hostile_hit(kvft_prompt_wrong(s->prompt, HOSTILE_SEED, run) == 0, s->use->forged && !s->sealed);
    }
}

static void ask_borrow(site *s) {
    kvft_prompt_fill(s->prompt, HOSTILE_SEED);
    for (size_t i = 0; i < HOSTILE_BLOCKS; i++) {
        kvf_borrowed lent = {0};
        kvf_block block = s->prompt->blocks[i];
        if (kvf_borrow(s->space, &lent, &block) == KVF_OK) {
            read_all(s, lent.data, lent.len);
            hostile_hit(lent.len == s->prompt->payload_bytes &&
                            memcmp(lent.data, s->prompt->iov[i].iov_base, lent.len) == 0,
                        s->use->forged && !s->sealed);
            kvf_release(s->space, &lent);
        }
    }
}

static void ask_describe(site *s) {
    kvf_digest digest;
    char *text = NULL;
    kvf_error err;
    kvf_space_digest(s->space, &digest);
    if (kvf_space_describe(s->store, &text, &err, &digest) == KVF_OK) {
        read_all(s, text, strlen(text) + 1);
        kvf_free(text);
    }
}

static bool is_array(const kvf_tensor *t, uint64_t seed) {
    uint8_t expected[SESSION_BYTES];
    array_of(expected, seed);
    return t->len == SESSION_BYTES && memcmp(t->data, expected, SESSION_BYTES) == 0;
}

static void ask_session(site *s) {
    kvf_session *session = NULL;
    kvf_error err;
    if (s->use->huge || kvf_session_load(s->store, &session, &err, SESSION, KVF_MS(s->use->budget_ms)) != KVF_OK) {
        return;
    }
    read_all(s, session->k.data, session->k.len);
    read_all(s, session->v.data, session->v.len);
    read_all(s, session->layout, strlen(session->layout));
    hostile_hit(is_array(&session->k, 1) && is_array(&session->v, 2), s->use->forged_session);
    kvf_session_free(session);
}

static int see(void *ctx, const kvf_entry *entry) {
    site *s = ctx;
    read_all(s, entry->name, strlen(entry->name));
    if (entry->tokens != NULL) {
        read_all(s, entry->tokens, 4 * (size_t)entry->num_tokens);
    }
    if (entry->payload != NULL) {
        read_all(s, entry->payload, (size_t)entry->payload_bytes);
    }
    return 0;
}

static void ask_walk(site *s) {
    kvf_error err;
    kvf_walk_options options = {.struct_size = sizeof options,
                                .whole = hostile_below(s->random, 2) == 0 && !s->use->huge,
                                .budget_us = KVF_MS(s->use->budget_ms)};
    (void)!kvf_walk(s->store, &err, see, s, &options);
}

static void hear(void *ctx, const kvf_finding *finding) {
    site *s = ctx;
    read_all(s, finding->code, strlen(finding->code));
    read_all(s, finding->what, strlen(finding->what));
    read_all(s, finding->mend, strlen(finding->mend));
}

static void ask_doctor(site *s) {
    kvf_error err;
    (void)!kvf_doctor(s->store, &err, hear, s);
}

static void ask_info(site *s) {
    kvf_tier_info info = {.struct_size = sizeof info};
    (void)!kvf_tier_info_get(s->store, &info, 0);
}

static void ask_clear(site *s) {
    kvf_error err;
    uint64_t removed = 0;
    kvf_digest digest;
    kvf_space_digest(s->space, &digest);
    (void)!kvf_clear(s->store, &removed, &err, hostile_below(s->random, 2) == 0 ? &digest : NULL);
}

/* Something new is saved, where it can be; and what is there, once more. */
static void ask_save(site *s) {
    kvft_prompt *other = kvft_prompt_new(s->space, 2, 2, s->prompt->payload_bytes);
    kvft_prompt_fill(s->prompt, HOSTILE_SEED);
    (void)kvf_save(s->space, other->blocks, 2, NULL);
    (void)kvf_save(s->space, s->prompt->blocks, HOSTILE_BLOCKS, NULL);
    (void)!kvf_store_flush(s->store, NULL, KVF_MS(s->use->budget_ms));
    kvft_prompt_free(other);
}

void hostile_ask(kvf_store *store, const hostile_use *use, uint64_t *random) {
    static void (*const asks[])(site *) = {ask_match, ask_load,   ask_borrow, ask_describe, ask_session,
                                           ask_walk,  ask_doctor, ask_info,   ask_load};
    size_t num = sizeof asks / sizeof *asks, first = hostile_below(random, num);
    site s = {.store = store, .use = use, .random = random, .sealed = hostile_below(random, 2) == 0};
    s.space = space_of(store, s.sealed);
    s.prompt = kvft_prompt_new(s.space, HOSTILE_SEED, HOSTILE_BLOCKS, use->payload_bytes);
    for (size_t i = 0; i < num; i++) {
        asks[(first + i) % num](&s);
    }
    if (use->saves) {
        ask_save(&s);
        ask_load(&s);
    }
    if (hostile_below(random, 16) == 0) {
        ask_clear(&s);
    }
    kvft_prompt_free(s.prompt);
    kvf_space_close(s.space);
}
