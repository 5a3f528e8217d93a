/* SPDX-License-Identifier: Apache-2.0
 *
 * What llama.cpp alone generates with several sequences at once: the figure beside checks/triton_load.py. The same prompts,
 * sizes and sampler, and nothing else: no store, no server, no text.
 *
 * usage: check_triton_bench MODEL SLOTS CONTEXT PROMPT ANSWER THREADS     prints tokens a second, all sequences together
 */
#include <llama.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void add(struct llama_batch *batch, llama_token token, int pos, int seq, bool output) {
    int i = batch->n_tokens++;
    batch->token[i] = token;
    batch->pos[i] = pos;
    batch->n_seq_id[i] = 1;
    batch->seq_id[i][0] = seq;
    batch->logits[i] = output;
}

static void must_decode(struct llama_context *ctx, struct llama_batch batch) {
    int rc = llama_decode(ctx, batch);
    if (rc != 0) {
        fprintf(stderr, "llama_decode failed with %d\n", rc);
        exit(1);
    }
}

/* One answer in each sequence, all at once. Returns tokens a second, without the first ones. */
static double generate(struct llama_context *ctx, int slots, int prompt, int answer) {
    struct llama_batch batch = llama_batch_init(slots > prompt ? slots : prompt, 0, 1);
    struct llama_sampler *greedy = llama_sampler_init_greedy();
    llama_token *next = calloc((size_t)slots, sizeof *next);
    for (int s = 0; s < slots; s++) {
        batch.n_tokens = 0;
        for (int i = 0; i < prompt; i++) {
            add(&batch, 20 + (i * 7919 + s * 104729 + 13) % 40000, i, s, i + 1 == prompt);
        }
        must_decode(ctx, batch);
        next[s] = llama_sampler_sample(greedy, ctx, -1);
    }
    double began = now_s();
    for (int k = 0; k + 1 < answer; k++) {
        batch.n_tokens = 0;
        for (int s = 0; s < slots; s++) {
            add(&batch, next[s], prompt + k, s, true);
        }
        must_decode(ctx, batch);
        for (int s = 0; s < slots; s++) {
            next[s] = llama_sampler_sample(greedy, ctx, s);
        }
    }
    double rate = slots * (answer - 1) / (now_s() - began);
    free(next);
    llama_sampler_free(greedy);
    llama_batch_free(batch);
    return rate;
}

static void be_silent(enum ggml_log_level level, const char *text, void *ctx) {
    (void)ctx;
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

int main(int argc, char **argv) {
    if (argc != 7) {
        fprintf(stderr, "usage: %s MODEL SLOTS CONTEXT PROMPT ANSWER THREADS\n", argv[0]);
        return 2;
    }
    int slots = atoi(argv[2]), context = atoi(argv[3]), prompt = atoi(argv[4]), answer = atoi(argv[5]);
    llama_log_set(be_silent, NULL);
    struct llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = (uint32_t)(context * slots + 256);
    params.n_seq_max = (uint32_t)slots + 1;
    params.n_batch = (uint32_t)(context + slots);
    params.kv_unified = true;
    params.n_threads = params.n_threads_batch = atoi(argv[6]);
    struct llama_context *ctx = model != NULL ? llama_init_from_model(model, params) : NULL;
    if (ctx == NULL) {
        fprintf(stderr, "%s: not usable\n", argv[1]);
        return 1;
    }
    printf("%.2f\n", generate(ctx, slots, prompt, answer));
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
