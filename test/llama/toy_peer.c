/* SPDX-License-Identifier: Apache-2.0
 *
 * kvf_toy_peer KIND PATH [LAYERS]: writes a model with random weights as a GGUF file, with the tokenizer of the model
 * $KVF_MODEL, so that llama-server and kvferry run can run it. KIND: jamba, lfm2, qwen35 (hybrid), mamba (recurrent),
 * gemma3 (sliding window), llama. With 8 layers, the default, 4,000 tokens of prefill take some seconds on two cores.
 */
#include "lab.h"

typedef struct toy {
    const char *arch;
    bool hybrid;
    lab_meta more[6];
} toy;

static const toy toys[] = {
    {"jamba", true, {{NULL, 0}}},
    {"lfm2", true, {{"attention.sliding_window", 0}, {NULL, 0}}},
    {"qwen35",
     false,
     {{"ssm.inner_size", 512}, {"ssm.state_size", 128}, {"ssm.time_step_rank", 4}, {"ssm.group_count", 4}, {NULL, 0}}},
    {"mamba", false, {{NULL, 0}}},
    {"gemma3", false, {{"attention.sliding_window", 512}, {NULL, 0}}},
    {"llama", false, {{NULL, 0}}},
};

static const toy *find(const char *arch) {
    for (size_t i = 0; i < sizeof toys / sizeof *toys; i++) {
        if (strcmp(toys[i].arch, arch) == 0) {
            return &toys[i];
        }
    }
    return NULL;
}

static struct llama_model *make(const toy *t, const struct gguf_context *source, uint32_t layers) {
    struct gguf_context *g = gguf_init_empty();
    const lab_size size = {.layers = layers, .embedding = 512, .feed_forward = 1536, .head = 128};
    uint64_t seed = 1;
    lab_toy_meta(g, t->arch, t->hybrid, &size, t->more);
    lab_u32(g, t->arch, "context_length", 32768);
    lab_graft_tokenizer(g, source);
    struct llama_model *model = llama_model_init_from_user(g, lab_random_tensor, &seed, llama_model_default_params());
    gguf_free(g);
    return model;
}

int main(int argc, char **argv) {
    const toy *t = argc >= 3 ? find(argv[1]) : NULL;
    const char *source_path = getenv("KVF_MODEL");
    uint32_t layers = argc >= 4 ? (uint32_t)atoi(argv[3]) : 8;
    if (t == NULL || source_path == NULL || layers < 2 || layers > 64) {
        fprintf(stderr,
                "usage: KVF_MODEL=MODEL.gguf kvf_toy_peer jamba|lfm2|qwen35|mamba|gemma3|llama PATH [LAYERS]\n");
        return 2;
    }
    llama_log_set(lab_quiet, NULL);
    struct gguf_context *source = gguf_init_from_file(source_path, (struct gguf_init_params){.no_alloc = true});
    struct llama_model *model = source != NULL ? make(t, source, layers) : NULL;
    if (model == NULL || !lab_write_model(model, source, argv[2])) {
        fprintf(stderr, "kvf_toy_peer: no model %s could be written to %s\n", argv[1], argv[2]);
        return 1;
    }
    llama_model_free(model);
    gguf_free(source);
    return 0;
}
