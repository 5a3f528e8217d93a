/* SPDX-License-Identifier: Apache-2.0
 *
 * Stores, spaces and prompts with seeded bytes, for tests.
 */
#include "support/kit.h"

#include <dirent.h>
#include <ftw.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

extern void __gcov_dump(void) __attribute__((weak));
int kvft_num_fds(void) {
    DIR *dir = opendir("/proc/self/fd");
    int num = 0;
    while (readdir(dir) != NULL) {
        num++;
    }
    closedir(dir);
    return num;
}

void kvft_exit(int code) {
    if (__gcov_dump != NULL) {
        __gcov_dump();
    }
    _exit(code);
}

static void die(const char *what, const kvf_error *err) {
    fprintf(stderr, "%s: %s\n", what, err->what);
    abort();
}

static kvf_store *open_store(const char *const *urls, size_t num) {
    kvf_store *store = NULL;
    kvf_error err = {0};
    if (kvf_store_open(&store, &err, urls, num, NULL) != KVF_OK) {
        die(urls[0], &err);
    }
    return store;
}

kvf_store *kvft_store(const char *url) {
    return open_store(&url, 1);
}

kvf_store *kvft_store2(const char *fast, const char *slow) {
    const char *urls[2] = {fast, slow};
    return open_store(urls, 2);
}

kvf_space *kvft_space(kvf_store *store, const char *model, uint32_t block_tokens) {
    return kvft_sealed_space(store, model, block_tokens, getenv("KVFT_SECRET"));
}

kvf_space *kvft_sealed_space(kvf_store *store, const char *model, uint32_t block_tokens, const char *secret) {
    kvf_field fields[] = {{"engine", "test"}, {"model", model}, {"kv", "f16"}};
    kvf_space_options options = {.struct_size = sizeof options, .block_tokens = block_tokens, .secret = secret};
    options.secret_len = secret != NULL ? strlen(secret) : 0;
    kvf_space *space = NULL;
    kvf_error err = {0};
    if (kvf_space_open(&space, &err, store, fields, 3, &options) != KVF_OK) {
        die("space", &err);
    }
    return space;
}

uint64_t kvft_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

void kvft_bytes(uint8_t *out, size_t len, uint64_t seed) {
    uint64_t state = seed;
    for (size_t at = 0; at < len; at += 8) {
        uint64_t word = kvft_random(&state);
        memcpy(out + at, &word, len - at < 8 ? len - at : 8);
    }
}

static void *must(void *memory) {
    if (memory == NULL) {
        fprintf(stderr, "no memory for the test\n");
        abort();
    }
    return memory;
}

static uint64_t seed_of(uint64_t seed, size_t block) {
    return seed * 1000003u + block;
}

kvft_prompt *kvft_prompt_new(kvf_space *space, uint64_t seed, size_t num_blocks, size_t payload_bytes) {
    kvft_prompt *p = must(calloc(1, sizeof *p));
    p->block_tokens = kvf_space_block_tokens(space);
    p->num_blocks = num_blocks;
    p->payload_bytes = payload_bytes;
    size_t num_tokens = num_blocks * p->block_tokens;
    p->tokens = must(calloc(num_tokens + 1, sizeof *p->tokens));
    uint64_t state = seed;
    for (size_t i = 0; i < num_tokens; i++) {
        p->tokens[i] = (uint32_t)kvft_random(&state);
    }
    p->keys = must(calloc(num_blocks + 1, sizeof *p->keys));
    if (kvf_chain(space, p->keys, num_blocks, p->tokens, num_tokens) != num_blocks) {
        abort();
    }
    p->memory = must(malloc(num_blocks * payload_bytes + 1));
    p->iov = must(calloc(num_blocks + 1, sizeof *p->iov));
    p->blocks = must(calloc(num_blocks + 1, sizeof *p->blocks));
    for (size_t i = 0; i < num_blocks; i++) {
        p->iov[i] = (struct iovec){p->memory + i * payload_bytes, payload_bytes};
        p->blocks[i] = (kvf_block){.key = p->keys[i],
                                   .tokens = p->tokens + i * p->block_tokens,
                                   .num_tokens = p->block_tokens,
                                   .first_token = (uint32_t)(i * p->block_tokens),
                                   .iov = &p->iov[i],
                                   .num_iov = 1};
    }
    kvft_prompt_fill(p, seed);
    return p;
}

void kvft_prompt_fill(kvft_prompt *p, uint64_t seed) {
    for (size_t i = 0; i < p->num_blocks; i++) {
        kvft_bytes(p->memory + i * p->payload_bytes, p->payload_bytes, seed_of(seed, i));
    }
}

void kvft_prompt_poison(kvft_prompt *p) {
    memset(p->memory, 0xa5, p->num_blocks * p->payload_bytes);
}

size_t kvft_prompt_wrong(const kvft_prompt *p, uint64_t seed, size_t run) {
    uint8_t *expected = must(malloc(p->payload_bytes + 1));
    size_t wrong = 0;
    for (size_t i = 0; i < run; i++) {
        kvft_bytes(expected, p->payload_bytes, seed_of(seed, i));
        wrong += memcmp(expected, p->memory + i * p->payload_bytes, p->payload_bytes) != 0;
    }
    free(expected);
    return wrong;
}

void kvft_prompt_free(kvft_prompt *p) {
    if (p == NULL) {
        return;
    }
    free(p->tokens);
    free(p->keys);
    free(p->memory);
    free(p->iov);
    free(p->blocks);
    free(p);
}

const char *kvft_temp_root(void) {
    const char *root = getenv("TMPDIR");
    return root != NULL && strlen(root) < 40 ? root : "/tmp";
}

char *kvft_temp_dir(void) {
    char name[128];
    snprintf(name, sizeof name, "%s/kvferry-test-XXXXXX", kvft_temp_root());
    char *dir = must(strdup(name));
    if (mkdtemp(dir) == NULL) {
        perror("mkdtemp");
        abort();
    }
    return dir;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *at) {
    (void)st;
    (void)kind;
    (void)at;
    return remove(path);
}

void kvft_remove_dir(char *dir) {
    nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(dir);
}

static kvf_stats stats_of(kvf_store *store) {
    kvf_stats stats = {.struct_size = sizeof stats};
    kvf_store_stats(store, &stats);
    return stats;
}

void kvft_flush_all(kvf_store *store) {
    uint64_t unwritten = 0;
    kvf_status flushed = kvf_store_flush(store, &unwritten, KVF_MS(60000));
    if (flushed == KVF_OK) {
        return;
    }
    kvf_stats now = stats_of(store);
    fprintf(stderr, "flush: %s, %llu blocks were not written\n", kvf_status_name(flushed),
            (unsigned long long)unwritten);
    for (int why = 0; why < KVF_NUM_REASONS; why++) {
        if (now.save_failures[why] > 0) {
            fprintf(stderr, "%s: %llu\n", kvf_reason_name((kvf_reason)why), (unsigned long long)now.save_failures[why]);
        }
    }
    abort();
}

uint64_t kvft_flush(kvf_store *store) {
    uint64_t unwritten = 0;
    kvf_status flushed = kvf_store_flush(store, &unwritten, KVF_MS(60000));
    if (flushed != (unwritten > 0 ? KVF_MISS : KVF_OK)) {
        fprintf(stderr, "flush: %s, %llu blocks were not written\n", kvf_status_name(flushed),
                (unsigned long long)unwritten);
        abort();
    }
    return unwritten;
}

void kvft_save_all(kvf_space *space, kvf_store *store, kvft_prompt *p) {
    size_t taken = kvf_save(space, p->blocks, p->num_blocks, NULL);
    if (taken != p->num_blocks) {
        fprintf(stderr, "%zu of %zu blocks were taken: %s\n", taken, p->num_blocks,
                kvf_reason_name(p->blocks[taken].why));
        abort();
    }
    kvft_flush_all(store);
}

double kvft_now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

void kvft_nap_ms(long ms) {
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    nanosleep(&t, NULL);
}
