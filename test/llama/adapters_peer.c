/* SPDX-License-Identifier: Apache-2.0
 *
 * kvf_adapters_peer MODEL LORA OUT STEPS: a program that changes its adapters and computes a prompt, again and again,
 * for `kvferry exec`. It writes the logits behind each prompt to OUT. STEPS, a letter each:
 *   p  empty the sequence, and compute the prompt
 *   l, h, z, n  the LoRA at scale 1, at 0.5, at 0; none
 *   f           the LoRA, as it was read from an open file
 *   c, d, x     a control vector of all layers; another one, of the first of them only; none
 */
#include <llama.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define NUM 150

static _Noreturn void give_up(const char *what) {
    fprintf(stderr, "adapters_peer: %s\n", what);
    exit(1);
}

static void set_vector(struct llama_context *ctx, const struct llama_model *model, char which) {
    size_t width = (size_t)llama_model_n_embd(model), layers = (size_t)llama_model_n_layer(model) - 1;
    float *data = malloc(width * layers * sizeof *data);
    uint32_t random = (uint32_t)which;
    for (size_t i = 0; data != NULL && i < width * layers; i++) {
        random = random * 1664525 + 1013904223;
        data[i] = (float)(random >> 8) / (float)(1 << 23) - 1.0f;
    }
    size_t num = which == 'd' ? width : width * layers;
    if (data == NULL ||
        llama_set_adapter_cvec(ctx, which == 'x' ? NULL : data, num, (int32_t)width, 1, (int32_t)layers) != 0) {
        give_up("no control vector");
    }
    free(data);
}

static void compute(struct llama_context *ctx, const struct llama_model *model, FILE *out) {
    size_t vocab = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_token tokens[NUM];
    for (int i = 0; i < NUM; i++) {
        tokens[i] = 100 + i * 7 % 90;
    }
    llama_memory_seq_rm(llama_get_memory(ctx), 0, -1, -1);
    if (llama_decode(ctx, llama_batch_get_one(tokens, NUM)) != 0) {
        give_up("llama_decode failed");
    }
    if (fwrite(llama_get_logits_ith(ctx, -1), sizeof(float), vocab, out) != vocab) {
        give_up("the logits can't be written");
    }
}

/* loras[1]: from an open file. */
static void step(struct llama_context *ctx, struct llama_model *model, struct llama_adapter_lora **loras, char what,
                 FILE *out) {
    float scale = what == 'l' || what == 'f' ? 1.0f : what == 'h' ? 0.5f : 0.0f;
    if (what == 'p') {
        compute(ctx, model, out);
    } else if (what == 'c' || what == 'd' || what == 'x') {
        set_vector(ctx, model, what);
    } else {
        llama_set_adapters_lora(ctx, &loras[what == 'f'], what == 'n' ? 0 : 1, &scale);
    }
}

static void be_quiet(enum ggml_log_level level, const char *text, void *ctx) {
    (void)level;
    (void)text;
    (void)ctx;
}

int main(int argc, char **argv) {
    if (argc != 5) {
        give_up("usage: MODEL LORA OUT STEPS");
    }
    llama_log_set(be_quiet, NULL);
    struct llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    struct llama_adapter_lora *loras[2] = {NULL, NULL};
    FILE *file = fopen(argv[2], "re");
    if (model != NULL && file != NULL) {
        loras[0] = llama_adapter_lora_init(model, argv[2]);
        loras[1] = llama_adapter_lora_init_from_file_ptr(model, file);
    }
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = 1024;
    params.n_threads = params.n_threads_batch = 2;
    struct llama_context *ctx = model != NULL ? llama_init_from_model(model, params) : NULL;
    FILE *out = fopen(argv[3], "we");
    if (loras[0] == NULL || loras[1] == NULL || ctx == NULL || out == NULL) {
        give_up("a file can't be opened, or there is no context");
    }
    for (const char *s = argv[4]; *s != '\0'; s++) {
        step(ctx, model, loras, *s, out);
    }
    fclose(out);
    fclose(file);
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
