/* SPDX-License-Identifier: Apache-2.0
 *
 * An engine of your own, in a page: load what is stored of a prompt, compute the rest, save what is new.
 *
 *   engine [STORE [PROMPT...]]
 *
 * The "model" stands for yours: the KV of a token depends on all tokens before it, and the answer on all KV. One byte
 * of the prompt is one token.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <kvferry/kvferry.h>

enum {
    BLOCK_TOKENS = 16,  /* what is stored and loaded as a unit */
    TOKEN_FLOATS = 256, /* the KV of one token, all layers together */
    BLOCK_BYTES = BLOCK_TOKENS * TOKEN_FLOATS * sizeof(float),
    MAX_BLOCKS = 64,
    MAX_TOKENS = MAX_BLOCKS * BLOCK_TOKENS
};

/* The memory for KV, which an engine allocates once. Block i of the prompt is in slot i. */
static float pool[MAX_TOKENS][TOKEN_FLOATS];

/* ---- the model: replace it by yours -------------------------------------------------------------------------------- */

/* Computes the KV of tokens first to end - 1. The KV of all tokens before them is there. */
static void compute(const uint32_t *tokens, size_t first, size_t end) {
    for (size_t t = first; t < end; t++) {
        for (size_t i = 0; i < TOKEN_FLOATS; i++) {
            float before = t > 0 ? pool[t - 1][(i + 1) % TOKEN_FLOATS] : 0;
            pool[t][i] = before / 2 + (float)(tokens[t] * (i + 1) % 97);
        }
    }
}

static float answer(size_t num_tokens) {
    float sum = 0;
    for (size_t t = 0; t < num_tokens; t++) {
        sum += pool[t][t % TOKEN_FLOATS];
    }
    return sum;
}

/* ---- the prefill --------------------------------------------------------------------------------------------------- */

static void prefill(kvf_space *space, kvf_view *view, const char *prompt) {
    uint32_t tokens[MAX_TOKENS];
    size_t num_tokens = 0;
    while (num_tokens < MAX_TOKENS && prompt[num_tokens] != '\0') {
        tokens[num_tokens] = (unsigned char)prompt[num_tokens];
        num_tokens++;
    }

    /* The prompt as blocks. What follows the last whole block is computed each time. */
    kvf_key keys[MAX_BLOCKS];
    kvf_block blocks[MAX_BLOCKS] = {0};
    size_t num = kvf_chain(space, keys, MAX_BLOCKS, tokens, num_tokens);
    for (size_t i = 0; i < num; i++) {
        blocks[i] = (kvf_block){.key = keys[i],
                                .tokens = tokens + i * BLOCK_TOKENS,
                                .num_tokens = BLOCK_TOKENS,
                                .first_token = (uint32_t)(i * BLOCK_TOKENS),
                                .slot = (int64_t)i};
    }

    /* One round trip tells how much of it is stored, and a load reads that. A store that is down or slow costs at most
     * 200 ms, and then less is loaded. */
    size_t stored = 0;
    if (kvf_match(space, &stored, NULL, keys, num, KVF_MS(50)) != KVF_OK) {
        stored = 0;
    }
    size_t loaded = stored > 0 ? kvf_load(space, blocks, stored, view, KVF_MS(150)) : 0;

    /* Compute the rest. kvf_save copies its blocks and returns at once; other threads write them. */
    compute(tokens, loaded * BLOCK_TOKENS, num_tokens);
    size_t saved = kvf_save(space, blocks + loaded, num - loaded, view);

    printf("%zu tokens: %zu loaded, %zu computed, %zu blocks saved, answer %.3f\n", num_tokens, loaded * BLOCK_TOKENS,
           num_tokens - loaded * BLOCK_TOKENS, saved, (double)answer(num_tokens));
    if (loaded < stored) {
        printf("  block %zu was stored, but did not load: %s\n", loaded, kvf_reason_name(blocks[loaded].why));
    }
}

static int fail(const char *what, const kvf_error *err) {
    fprintf(stderr, "engine: %s: %s\n", what, err->what);
    return 1;
}

/* Waits so that the next prompt finds all of this one. A serving engine need not wait for its writers. A store that is
 * down, full or slow deserves a message, but is not a failure. */
static void flush(kvf_store *store) {
    uint64_t unwritten = 0;
    if (kvf_store_flush(store, &unwritten, KVF_DEFAULT) != KVF_OK) {
        fprintf(stderr, "engine: %" PRIu64 " blocks were not written\n", unwritten);
    }
}

static int run(kvf_store *store, char **prompts, int num_prompts) {
    /* Everything that changes a block's bytes is in the space, so another model or format never hits. */
    const kvf_field fields[] = {{"engine", "example-1"}, {"model", "toy"}, {"kv", "f32 token 256"}};
    const kvf_space_options options = {.struct_size = sizeof options, .block_tokens = BLOCK_TOKENS};
    const kvf_region region = {.base = pool, .slot_stride = BLOCK_BYTES, .run_bytes = BLOCK_BYTES, .num_runs = 1};
    kvf_error err = {0};
    kvf_space *space = NULL;
    kvf_view *view = NULL;
    if (kvf_space_open(&space, &err, store, fields, sizeof fields / sizeof fields[0], &options) != KVF_OK) {
        return fail("space", &err);
    }
    if (kvf_view_open(&view, &err, &region, 1, MAX_BLOCKS) != KVF_OK) {
        kvf_space_close(space);
        return fail("view", &err);
    }
    for (int i = 0; i < num_prompts; i++) {
        prefill(space, view, prompts[i]);
        flush(store);
    }
    kvf_view_close(view);
    kvf_space_close(space);
    return 0;
}

#define DOCUMENT                                                                                  \
    "The ferry leaves the island at seven and at nine, in winter only at nine. A ticket is sold " \
    "on board, and a dog needs none. "

int main(int argc, char **argv) {
    static char *examples[] = {DOCUMENT "When does it leave in winter?", DOCUMENT "Does my dog need a ticket?"};
    static const char usage[] =
        "usage: engine [STORE [PROMPT...]]\n"
        "Loads what STORE holds of each prompt, computes the rest, and saves what is new.\n"
        "  STORE   mem: (as without it), file:/a/folder, redis://host:6379, redis+unix:///run/redis.sock, ...\n"
        "  PROMPT  at most 1024 bytes; without one, two questions about the same document\n";
    const char *url = argc > 1 ? argv[1] : "mem:";
    kvf_store *store = NULL;
    kvf_error err = {0};

    if (strcmp(url, "--help") == 0) {
        return fputs(usage, stdout) < 0;
    }
    if (url[0] == '-') {
        return fprintf(stderr, "engine: there is no option %s; see engine --help\n", url), 2;
    }
    for (int i = 2; i < argc; i++) {
        if (strlen(argv[i]) > MAX_TOKENS) {
            return fprintf(stderr, "engine: prompt %d is longer than %d bytes\n", i - 1, MAX_TOKENS), 2;
        }
    }
    if (kvf_store_open(&store, &err, &url, 1, NULL) != KVF_OK) {
        return fail(url, &err);
    }
    int rc = argc > 2 ? run(store, argv + 2, argc - 2) : run(store, examples, 2);
    kvf_store_close(store);
    return rc;
}
