/* SPDX-License-Identifier: Apache-2.0
 *
 * llama.cpp with a store: attach once, prefill instead of decoding the prompt, then decode as usual.
 *
 *   llama [STORE [MODEL [PROMPT...]]]
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvferry/kvferry.h>
#include <kvferry/llama.h>

enum { CONTEXT_TOKENS = 2048, ANSWER_TOKENS = 24, SEQ = 0, SCRATCH_SEQ = 1 };

typedef struct engine {
    struct llama_model *model;
    struct llama_context *ctx;
    struct llama_sampler *sampler;
    kvf_llama *kv;
} engine;

static int fail(const char *what, const char *why) {
    fprintf(stderr, "llama: %s: %s\n", what, why);
    return 1;
}

static void only_errors(enum ggml_log_level level, const char *text, void *ctx) {
    (void)ctx;
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

/* Loads the model and attaches the store to its context. */
static int start(engine *e, kvf_store *store, const char *model_path) {
    struct llama_model_params model_params = llama_model_default_params();
    e->model = llama_model_load_from_file(model_path, model_params);
    if (e->model == NULL) {
        return fail(model_path, "not a model that llama.cpp can load; see llama --help");
    }
    struct llama_context_params context_params = llama_context_default_params();
    context_params.n_ctx = CONTEXT_TOKENS;
    context_params.n_seq_max = 2; /* one for the text, one for kvferry */
    context_params.kv_unified = true;
    e->ctx = llama_init_from_model(e->model, context_params);
    e->sampler = llama_sampler_init_greedy();
    if (e->ctx == NULL || e->sampler == NULL) {
        return fail(model_path, "llama.cpp can't make a context");
    }

    kvf_llama_options options = {.struct_size = sizeof options,
                                 .scratch_seq = SCRATCH_SEQ,
                                 .model_path = model_path,
                                 .model_params = &model_params,
                                 .context_params = &context_params};
    kvf_error err = {0};
    if (kvf_llama_attach(&e->kv, &err, store, e->ctx, &options) != KVF_OK) {
        return fail("attach", err.what);
    }
    return 0;
}

static void stop(engine *e) {
    kvf_llama_detach(e->kv);
    if (e->sampler != NULL) {
        llama_sampler_free(e->sampler);
    }
    if (e->ctx != NULL) {
        llama_free(e->ctx);
    }
    if (e->model != NULL) {
        llama_model_free(e->model);
    }
}

/* Prints the model's continuation, always the likeliest token. */
static int generate(engine *e) {
    const struct llama_vocab *vocab = llama_model_get_vocab(e->model);
    for (int i = 0; i < ANSWER_TOKENS; i++) {
        llama_token token = llama_sampler_sample(e->sampler, e->ctx, -1);
        if (llama_vocab_is_eog(vocab, token)) {
            break;
        }
        char piece[128];
        int len = llama_token_to_piece(vocab, token, piece, sizeof piece, 0, false);
        printf("%.*s", len > 0 ? len : 0, piece);
        if (llama_decode(e->ctx, llama_batch_get_one(&token, 1)) != 0) {
            return fail("decode", "llama_decode failed");
        }
    }
    printf("\n");
    return 0;
}

static int answer(engine *e, const char *prompt) {
    llama_token tokens[CONTEXT_TOKENS - ANSWER_TOKENS];
    int num = llama_tokenize(llama_model_get_vocab(e->model), prompt, (int)strlen(prompt), tokens,
                             (int)(sizeof tokens / sizeof tokens[0]), true, true);
    if (num <= 0) {
        return fail("prompt", "it is empty, or too long for the context");
    }
    kvf_llama_report report = {.struct_size = sizeof report};
    kvf_error err = {0};
    /* Loads what is stored, computes the rest, saves what is new. A store that is down, slow or corrupt is not a failure:
     * then everything is computed. */
    if (kvf_llama_prefill(e->kv, &report, &err, SEQ, tokens, (size_t)num) != KVF_OK) {
        return fail("prefill", err.what);
    }
    printf("%u tokens: %u loaded, %u computed, %u blocks saved\n", report.num_tokens, report.loaded_tokens,
           report.computed_tokens, report.saved_blocks);
    return generate(e);
}

static void flush(kvf_store *store) {
    uint64_t unwritten = 0;
    if (kvf_store_flush(store, &unwritten, KVF_DEFAULT) != KVF_OK) {
        fprintf(stderr, "llama: %" PRIu64 " blocks were not written\n", unwritten);
    }
}

static int run(kvf_store *store, const char *model_path, char **prompts, int num_prompts) {
    engine e = {0};
    int rc = start(&e, store, model_path);
    for (int i = 0; i < num_prompts && rc == 0; i++) {
        rc = answer(&e, prompts[i]);
        /* Only in this example: the next prompt begins in an empty sequence, and finds everything in the store. A
         * server keeps what its sequence holds, and does not wait for writers. */
        llama_memory_seq_rm(llama_get_memory(e.ctx), SEQ, -1, -1);
        flush(store);
    }
    stop(&e);
    return rc;
}

#define DOCUMENT                                                                                           \
    "The ferry leaves the island at seven and at nine in the morning, in winter only at nine. It goes to " \
    "the town on the other side, where the train to the capital waits for it. A ticket is sold on board "  \
    "and costs four crowns. Children pay half. A dog needs no ticket, but it has to stay on deck. When "   \
    "the wind is too strong, the captain hangs a red flag at the pier, and nobody leaves before noon.\n"

int main(int argc, char **argv) {
    static char *examples[] = {DOCUMENT "Question: How much is a ticket?\nAnswer:",
                               DOCUMENT "Question: Where does my dog stay?\nAnswer:"};
    static const char usage[] =
        "usage: llama [STORE [MODEL [PROMPT...]]]\n"
        "Answers each prompt: loads the KV that STORE holds of it, computes the rest, and saves what is new.\n"
        "  STORE   mem: (as without it), file:/a/folder, redis://host:6379, redis+unix:///run/redis.sock, ...\n"
        "  MODEL   a GGUF file; model.gguf without it\n"
        "  PROMPT  without one, two questions about the same document\n";
    const char *url = argc > 1 ? argv[1] : "mem:", *model_path = argc > 2 ? argv[2] : "model.gguf";
    kvf_store *store = NULL;
    kvf_error err = {0};

    if (strcmp(url, "--help") == 0) {
        return fputs(usage, stdout) < 0;
    }
    if (url[0] == '-') {
        return fprintf(stderr, "llama: there is no option %s; see llama --help\n", url), 2;
    }
    if (kvf_store_open(&store, &err, &url, 1, NULL) != KVF_OK) {
        return fail(url, err.what);
    }
    llama_log_set(only_errors, NULL);
    int rc = argc > 3 ? run(store, model_path, argv + 3, argc - 3) : run(store, model_path, examples, 2);
    kvf_store_close(store);
    return rc;
}
