/* SPDX-License-Identifier: Apache-2.0
 *
 * kvf_toy_peer KIND PATH [LAYERS]: writes a model with random weights as a GGUF file, with the tokenizer of the model
 * $KVF_MODEL, so that llama-server and kvferry run can run it. KIND: jamba, lfm2, qwen35 (hybrid), mamba (recurrent),
 * gemma3 (sliding window), llama. With 8 layers, the default, 4,000 tokens of prefill take some seconds on two cores.
 */
#include <unistd.h>

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

/* Everything that begins with "tokenizer." */
static void graft_tokenizer(struct gguf_context *to, const struct gguf_context *from) {
    struct gguf_context *rest = gguf_init_empty();
    gguf_set_kv(rest, from);
    for (int64_t i = gguf_get_n_kv(from) - 1; i >= 0; i--) {
        const char *key = gguf_get_key(from, i);
        if (strncmp(key, "tokenizer.", 10) != 0) {
            gguf_remove_key(rest, key);
        }
    }
    gguf_set_kv(to, rest);
    gguf_free(rest);
}

static struct llama_model *make(const toy *t, const struct gguf_context *source, uint32_t layers) {
    struct gguf_context *g = gguf_init_empty();
    const lab_size size = {.layers = layers, .embedding = 512, .feed_forward = 1536, .head = 128};
    uint64_t seed = 1;
    lab_toy_meta(g, t->arch, t->hybrid, &size, t->more);
    lab_u32(g, t->arch, "context_length", 32768);
    graft_tokenizer(g, source);
    struct llama_model *model = llama_model_init_from_user(g, lab_random_tensor, &seed, llama_model_default_params());
    gguf_free(g);
    return model;
}

static bool append_from(const char *path, const char *from, size_t offset) {
    FILE *in = fopen(from, "rb"), *out = fopen(path, "ab");
    static char chunk[1 << 20];
    bool ok = in != NULL && out != NULL && fseek(in, (long)offset, SEEK_SET) == 0;
    for (size_t num; ok && (num = fread(chunk, 1, sizeof chunk, in)) > 0;) {
        ok = fwrite(chunk, 1, num, out) == num;
    }
    ok = in != NULL && fclose(in) == 0 && ok;
    return out != NULL && fclose(out) == 0 && ok;
}

/* llama.cpp's own writer leaves out parts of a tokenizer, so it is grafted in once more, in front of the same
 * tensors. */
static bool write_model(const struct llama_model *model, const struct gguf_context *source, const char *path) {
    char aside[4096];
    snprintf(aside, sizeof aside, "%s.aside", path);
    llama_model_save_to_file(model, aside);
    struct gguf_context *g = gguf_init_from_file(aside, (struct gguf_init_params){.no_alloc = true});
    bool ok = g != NULL;
    if (ok) {
        size_t data = gguf_get_data_offset(g);
        graft_tokenizer(g, source);
        ok = gguf_write_to_file(g, path, true) && append_from(path, aside, data);
    }
    gguf_free(g);
    (void)unlink(aside);
    return ok;
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
    if (model == NULL || !write_model(model, source, argv[2])) {
        fprintf(stderr, "kvf_toy_peer: no model %s could be written to %s\n", argv[1], argv[2]);
        return 1;
    }
    llama_model_free(model);
    gguf_free(source);
    return 0;
}
