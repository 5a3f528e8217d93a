/* SPDX-License-Identifier: Apache-2.0
 *
 * A process of check-kill (checks/kill.sh): uses a store until it is killed, or told to end.
 *
 *   kvf_kill_peer write URL SEED   saves prompts and sessions, over and over
 *   kvf_kill_peer read URL SEED    loads them and compares every byte, until SIGTERM; then prints what it saw
 *
 * All peers agree on what is stored: the bytes of a prompt follow from its number, those of a session from its name and
 * a generation that stands at its beginning. So a reader knows what it must see without talking to a writer. Exit
 * status 1: a wrong byte was seen.
 */
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/kit.h"

enum { NUM_PROMPTS = 12, NUM_BLOCKS = 6, NUM_SESSIONS = 3, KEYS_BYTES = 90000, VALUES_BYTES = 50000, BUDGET_MS = 2000 };

typedef struct peer {
    kvf_store *store;
    kvf_space *space;
    kvft_prompt *prompts[NUM_PROMPTS];
    uint8_t *expected[NUM_PROMPTS];
    uint64_t random;
    uint64_t loads, hits, borrowed, sessions, wrong;
} peer;

static volatile sig_atomic_t ending;
static void end(int sig) {
    (void)sig;
    ending = 1;
}

/* From less than a page to several parts of a Redis record. */
static size_t payload_of(size_t prompt) {
    return 3000 + prompt * 17001;
}

static void open_peer(peer *p, const char *url, uint64_t seed) {
    *p = (peer){.store = kvft_store(url), .random = seed};
    p->space = kvft_space(p->store, "killed", 16);
    for (size_t i = 0; i < NUM_PROMPTS; i++) {
        p->prompts[i] = kvft_prompt_new(p->space, i + 1, NUM_BLOCKS, payload_of(i));
        size_t bytes = NUM_BLOCKS * payload_of(i);
        p->expected[i] = malloc(bytes);
        if (p->expected[i] == NULL) {
            abort();
        }
        memcpy(p->expected[i], p->prompts[i]->memory, bytes);
    }
}

static void close_peer(peer *p) {
    for (size_t i = 0; i < NUM_PROMPTS; i++) {
        kvft_prompt_free(p->prompts[i]);
        free(p->expected[i]);
    }
    kvf_space_close(p->space);
    kvf_store_close(p->store);
}

static uint64_t below(peer *p, uint64_t bound) {
    return kvft_random(&p->random) % bound;
}

/* ---- sessions */

static void session_bytes(uint8_t *keys, uint8_t *values, uint64_t id, uint64_t generation) {
    kvft_bytes(keys, KEYS_BYTES, id * 7919 + generation);
    kvft_bytes(values, VALUES_BYTES, id * 7919 + generation + 1);
    memcpy(keys, &generation, sizeof generation);
}

static void save_session(peer *p) {
    static uint8_t keys[KEYS_BYTES], values[VALUES_BYTES];
    uint64_t id = below(p, NUM_SESSIONS);
    char name[16];
    snprintf(name, sizeof name, "s%d", (int)id);
    session_bytes(keys, values, id, below(p, 1u << 30));
    kvf_tensor k = {.data = keys, .len = sizeof keys, .dtype = "uint8"};
    kvf_tensor v = {.data = values, .len = sizeof values, .dtype = "uint8"};
    kvf_session_options options = {.struct_size = sizeof options, .budget_us = KVF_MS(BUDGET_MS)};
    (void)!kvf_session_save(p->store, NULL, name, &k, &v, &options); /* the server may be dead */
}

static void load_session(peer *p) {
    static uint8_t keys[KEYS_BYTES], values[VALUES_BYTES];
    uint64_t id = below(p, NUM_SESSIONS), generation = 0;
    char name[16];
    kvf_session *session = NULL;
    snprintf(name, sizeof name, "s%d", (int)id);
    if (kvf_session_load(p->store, &session, NULL, name, KVF_MS(BUDGET_MS)) != KVF_OK) {
        return;
    }
    p->sessions++;
    bool ok = session->k.len == KEYS_BYTES && session->v.len == VALUES_BYTES;
    if (ok) {
        memcpy(&generation, session->k.data, sizeof generation);
        session_bytes(keys, values, id, generation);
        ok = memcmp(session->k.data, keys, KEYS_BYTES) == 0 && memcmp(session->v.data, values, VALUES_BYTES) == 0;
    }
    if (!ok) {
        p->wrong++;
        fprintf(stderr, "wrong bytes in session %s\n", name);
    }
    kvf_session_free(session);
}

/* ---- blocks */

static void save_prompt(peer *p) {
    kvft_prompt *prompt = p->prompts[below(p, NUM_PROMPTS)];
    (void)kvf_save(p->space, prompt->blocks, NUM_BLOCKS, NULL);
    if (below(p, 3) == 0) {
        (void)!kvf_store_flush(p->store, NULL, KVF_MS(BUDGET_MS));
    }
}

static void must_be(peer *p, const void *got, size_t prompt, size_t block, const char *how) {
    size_t len = payload_of(prompt);
    if (memcmp(got, p->expected[prompt] + block * len, len) != 0) {
        p->wrong++;
        fprintf(stderr, "wrong bytes in block %zu of prompt %zu, %s\n", block, prompt, how);
    }
}

static void load_prompt(peer *p) {
    size_t number = below(p, NUM_PROMPTS);
    kvft_prompt *prompt = p->prompts[number];
    kvft_prompt_poison(prompt);
    size_t run = kvf_load(p->space, prompt->blocks, NUM_BLOCKS, NULL, KVF_MS(BUDGET_MS));
    for (size_t i = 0; i < run; i++) {
        must_be(p, prompt->iov[i].iov_base, number, i, "loaded");
    }
    p->loads += NUM_BLOCKS;
    p->hits += run;
}

static void borrow_block(peer *p) {
    size_t number = below(p, NUM_PROMPTS), block = below(p, NUM_BLOCKS);
    kvf_borrowed loan;
    if (kvf_borrow(p->space, &loan, &p->prompts[number]->blocks[block]) != KVF_OK) {
        return;
    }
    p->borrowed++;
    if (loan.len == payload_of(number)) {
        must_be(p, loan.data, number, block, "borrowed");
    } else {
        p->wrong++;
        fprintf(stderr, "wrong length of block %zu of prompt %zu\n", block, number);
    }
    kvf_release(p->space, &loan);
}

static void match(peer *p) {
    kvft_prompt *prompt = p->prompts[below(p, NUM_PROMPTS)];
    size_t run = 0;
    if (kvf_match(p->space, &run, NULL, prompt->keys, NUM_BLOCKS, KVF_MS(BUDGET_MS)) == KVF_OK && run > NUM_BLOCKS) {
        p->wrong++;
    }
}

/* So that it is written again. */
static void remove_block(peer *p) {
    kvf_digest digest;
    kvf_space_digest(p->space, &digest);
    (void)!kvf_remove(p->store, NULL, &digest, &p->prompts[below(p, NUM_PROMPTS)]->keys[below(p, NUM_BLOCKS)]);
}

/* A store knows what it has written and does not write it again, so it is reopened from time to time. */
static void write_on(peer *p, const char *url) {
    bool removes = strncmp(url, "file:", 5) ==
                   0; /* in Redis, a record of several keys that is written and removed at once may lose some */
    for (uint64_t i = 1; !ending; i++) {
        switch (below(p, 8)) {
        case 0:
            save_session(p);
            break;
        case 1:
        case 2:
            if (removes) {
                remove_block(p);
            }
            break;
        default:
            save_prompt(p);
        }
        if (i % 30 == 0) {
            uint64_t seed = p->random;
            close_peer(p);
            open_peer(p, url, seed);
        }
    }
}

static void read_on(peer *p) {
    while (!ending) {
        switch (below(p, 6)) {
        case 0:
            borrow_block(p);
            break;
        case 1:
            load_session(p);
            break;
        case 2:
            match(p);
            break;
        default:
            load_prompt(p);
        }
    }
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: kvf_kill_peer write|read URL SEED\n");
        return 2;
    }
    struct sigaction action = {.sa_handler = end};
    sigaction(SIGTERM, &action, NULL);
    peer p;
    open_peer(&p, argv[2], strtoull(argv[3], NULL, 10));
    if (strcmp(argv[1], "write") == 0) {
        write_on(&p, argv[2]);
    } else {
        read_on(&p);
        printf("%llu loads, %llu hits, %llu borrowed, %llu sessions, %llu wrong\n", (unsigned long long)p.loads,
               (unsigned long long)p.hits, (unsigned long long)p.borrowed, (unsigned long long)p.sessions,
               (unsigned long long)p.wrong);
    }
    close_peer(&p);
    return p.wrong != 0;
}
