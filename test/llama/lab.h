/* SPDX-License-Identifier: Apache-2.0
 *
 * Declarations that the llama.cpp tests share: the real model ($KVF_MODEL), contexts, toy models, and the comparison of
 * logits.
 */
#ifndef KVFT_LAB_H
#define KVFT_LAB_H

#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <ggml-backend.h>
#include <gguf.h>

#include "kvferry/llama.h"
#include "support/kit.h"

/* Stands for the file of a toy model, which has none: its bytes are hashed, never read as a model. It is mapped, as
 * llama.cpp maps a model: whatever else is written beside it meanwhile, it is the one that was there. */
#define MODEL_PATH KVFT_STAND_IN

/* Threads that spin while they wait for each other take the processors from those that compute: on a busy machine a
 * prefill then takes a hundred times as long. OpenMP reads the variable before any function of ours runs, so the program
 * starts once more. What measures times as users have them defines LAB_AS_STARTED. */
#ifndef LAB_AS_STARTED
__attribute__((constructor)) static void lab_wait_passively(int argc, char **argv) {
    (void)argc;
    if (getenv("OMP_WAIT_POLICY") == NULL && setenv("OMP_WAIT_POLICY", "passive", 1) == 0) {
        (void)execv("/proc/self/exe", argv);
    }
}
#endif

__attribute__((constructor)) static void lab_map_stand_in(void) {
    int fd = open(MODEL_PATH, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || mmap(NULL, 1, PROT_READ, MAP_PRIVATE, fd, 0) == MAP_FAILED) {
        fprintf(stderr, "can't map %s\n", MODEL_PATH);
        abort();
    }
    close(fd);
}

typedef struct lab_config {
    enum ggml_type kv_type;
    bool flash;
    uint32_t n_ctx, n_seq;
    bool split; /* not unified */
    bool swa_full;
    uint32_t n_ubatch;
    int threads;
    bool portable;
    int64_t budget_us;
    const char *secret, *previous_secret;
} lab_config;

typedef struct lab {
    struct llama_model_params model_params;
    struct llama_context_params params;
    struct llama_context *ctx;
    kvf_store *store;
    kvf_llama *kv;
    kvf_status status; /* of the attach */
    kvf_error err;
} lab;

static inline void lab_quiet(enum ggml_log_level level, const char *text, void *ctx) {
    (void)ctx;
    if (level == GGML_LOG_LEVEL_ERROR && getenv("KVFT_VERBOSE") != NULL) {
        fputs(text, stderr);
    }
}

static inline struct llama_model *lab_model(void) {
    const char *path = getenv("KVF_MODEL");
    llama_log_set(lab_quiet, NULL);
    return path != NULL ? llama_model_load_from_file(path, llama_model_default_params()) : NULL;
}

static inline struct llama_context_params lab_params(const lab_config *c) {
    struct llama_context_params p = llama_context_default_params();
    p.n_ctx = c->n_ctx != 0 ? c->n_ctx : 1024;
    p.n_seq_max = c->n_seq != 0 ? c->n_seq : 4;
    p.kv_unified = !c->split;
    p.swa_full = c->swa_full;
    p.n_threads = p.n_threads_batch = c->threads != 0 ? c->threads : 2;
    p.n_ubatch = c->n_ubatch != 0 ? c->n_ubatch : 512;
    p.type_k = c->kv_type;
    p.type_v = c->kv_type;
    p.flash_attn_type = c->flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    return p;
}

/* url NULL: without a store. The last sequence is scratch. */
static inline lab lab_open_with(struct llama_model *model, const lab_config *config, const char *url,
                                const char *model_path, kvf_llama_progress_fn progress, void *progress_ctx) {
    lab l = {.model_params = llama_model_default_params(), .params = lab_params(config)};
    l.ctx = llama_init_from_model(model, l.params);
    if (l.ctx == NULL) {
        fprintf(stderr, "no context\n");
        abort();
    }
    l.store = url != NULL ? kvft_store(url) : NULL;
    kvf_llama_options options = {.struct_size = sizeof options,
                                 .scratch_seq = (llama_seq_id)l.params.n_seq_max - 1,
                                 .model_path = model_path,
                                 .context_params = &l.params,
                                 .model_params = &l.model_params,
                                 .block_tokens = 64,
                                 .budget_us = config->budget_us,
                                 .secret = config->secret,
                                 .secret_len = config->secret != NULL ? strlen(config->secret) : 0,
                                 .previous_secret = config->previous_secret,
                                 .previous_secret_len =
                                     config->previous_secret != NULL ? strlen(config->previous_secret) : 0,
                                 .portable = config->portable,
                                 .progress = progress,
                                 .progress_ctx = progress_ctx};
    l.status = kvf_llama_attach(&l.kv, &l.err, l.store, l.ctx, &options);
    return l;
}

static inline lab lab_open(struct llama_model *model, const lab_config *config, const char *url,
                           const char *model_path) {
    return lab_open_with(model, config, url, model_path, NULL, NULL);
}

static inline void lab_close(lab *l) {
    kvf_llama_detach(l->kv);
    kvf_store_close(l->store);
    llama_free(l->ctx);
}

static inline llama_token *lab_prompt(size_t num, unsigned seed) {
    llama_token *tokens = calloc(num + 1, sizeof *tokens);
    uint64_t random = seed;
    for (size_t i = 0; i < num; i++) {
        tokens[i] = (llama_token)(100 + kvft_random(&random) % 40000);
    }
    return tokens;
}

static inline size_t lab_vocab(const lab *l) {
    return (size_t)llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(l->ctx)));
}

static inline float *lab_logits(const lab *l) {
    size_t bytes = lab_vocab(l) * sizeof(float);
    float *logits = malloc(bytes);
    memcpy(logits, llama_get_logits_ith(l->ctx, -1), bytes);
    return logits;
}

/* The logits behind the prompt, in a copy. */
static inline float *lab_prefill(lab *l, kvf_llama_report *report, llama_seq_id seq, const llama_token *tokens,
                                 size_t num) {
    kvf_error err = {0};
    if (kvf_llama_prefill(l->kv, report, &err, seq, tokens, num) != KVF_OK) {
        fprintf(stderr, "prefill: %s\n", err.what);
        abort();
    }
    return lab_logits(l);
}

/* A progress function that stops a prefill which is about to compute any of the first *ctx tokens: they are stored, but
 * on a busy machine computing them may promise to be sooner. */
static inline int lab_stop_below(void *ctx, uint32_t done, uint32_t num) {
    (void)num;
    return done < *(const uint32_t *)ctx;
}

#define LAB_PATIENCE 200 /* such prefills; one of them finds the machine's other programs asleep */

typedef struct lab_difference {
    bool identical, same_argmax;
    double nmse;
} lab_difference;

static inline lab_difference lab_compare(const float *a, const float *b, size_t num) {
    double error = 0, power = 0;
    size_t max_a = 0, max_b = 0;
    for (size_t i = 0; i < num; i++) {
        double d = (double)a[i] - (double)b[i];
        error += d * d;
        power += (double)a[i] * (double)a[i];
        max_a = a[i] > a[max_a] ? i : max_a;
        max_b = b[i] > b[max_b] ? i : max_b;
    }
    return (lab_difference){.identical = memcmp(a, b, num * sizeof *a) == 0,
                            .same_argmax = max_a == max_b,
                            .nmse = power > 0 ? error / power : error};
}

/* ---- the records of a folder ---- */

#define LAB_MAX_FILES 64u

static inline size_t lab_list_files_up_to(const char *dir, char (*files)[400], size_t num, size_t most) {
    DIR *d = opendir(dir);
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
        char path[400];
        struct stat st;
        snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        if (e->d_name[0] == '.' || stat(path, &st) != 0) {
            continue;
        }
        if (S_ISDIR(st.st_mode)) {
            num = lab_list_files_up_to(path, files, num, most);
        } else if (st.st_size > 1024 && num < most) {
            memcpy(files[num++], path, sizeof path);
        }
    }
    if (d != NULL) {
        closedir(d);
    }
    return num;
}

static inline size_t lab_list_files(const char *dir, char files[LAB_MAX_FILES][400], size_t num) {
    return lab_list_files_up_to(dir, files, num, LAB_MAX_FILES);
}

static inline void lab_flip(const char *path) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat st;
    uint8_t byte = 0;
    if (fd < 0 || fstat(fd, &st) != 0 || pread(fd, &byte, 1, st.st_size - 40) != 1) {
        abort();
    }
    byte ^= 0x10;
    if (pwrite(fd, &byte, 1, st.st_size - 40) != 1) {
        abort();
    }
    close(fd);
}

/* ---- toy models: random weights, made in memory in milliseconds ---- */

static inline void lab_random_tensor(struct ggml_tensor *tensor, void *ctx) {
    uint64_t random = *(const uint64_t *)ctx;
    for (const char *c = tensor->name; *c != '\0'; c++) {
        random = random * 31 + (uint8_t)*c;
    }
    bool decay = strstr(tensor->name, "ssm_a") != NULL; /* of a recurrent layer: negative */
    size_t num = (size_t)ggml_nelements(tensor), bytes = ggml_nbytes(tensor);
    uint8_t *data = malloc(bytes);
    for (size_t i = 0; i < num; i++) {
        float value = ((float)(kvft_random(&random) % 2001) / 1000.0f - 1.0f) * 0.2f;
        value = decay ? -fabsf(value) : value;
        if (tensor->type == GGML_TYPE_F32) {
            ((float *)(void *)data)[i] = value;
        } else {
            ((ggml_fp16_t *)(void *)data)[i] = ggml_fp32_to_fp16(value);
        }
    }
    ggml_backend_tensor_set(tensor, data, 0, bytes);
    free(data);
}

static inline void lab_u32(struct gguf_context *g, const char *arch, const char *name, uint32_t value) {
    char key[128];
    snprintf(key, sizeof key, "%s.%s", arch, name);
    gguf_set_val_u32(g, key, value);
}

static inline void lab_f32(struct gguf_context *g, const char *arch, const char *name, float value) {
    char key[128];
    snprintf(key, sizeof key, "%s.%s", arch, name);
    gguf_set_val_f32(g, key, value);
}

typedef struct lab_size {
    uint32_t layers, embedding, feed_forward, head;
} lab_size;

/* Of a hybrid, every second layer has no attention. */
static inline void lab_heads(struct gguf_context *g, const char *arch, bool hybrid, const lab_size *size) {
    char key[128];
    uint32_t heads[64], num = size->embedding / size->head;
    for (uint32_t i = 0; i < size->layers; i++) {
        heads[i] = i % 2 == 1 ? 0 : num;
    }
    if (!hybrid) {
        lab_u32(g, arch, "attention.head_count", num);
        lab_u32(g, arch, "attention.head_count_kv", num);
        return;
    }
    snprintf(key, sizeof key, "%s.attention.head_count", arch);
    gguf_set_arr_data(g, key, GGUF_TYPE_UINT32, heads, size->layers);
    snprintf(key, sizeof key, "%s.attention.head_count_kv", arch);
    gguf_set_arr_data(g, key, GGUF_TYPE_UINT32, heads, size->layers);
}

static inline void lab_vocab_of(struct gguf_context *g) {
    enum { WORDS = 128 };
    static char text[WORDS][8];
    const char *words[WORDS];
    float scores[WORDS] = {0};
    for (size_t i = 0; i < WORDS; i++) {
        snprintf(text[i], sizeof text[i], "tok_%zu", i);
        words[i] = text[i];
    }
    gguf_set_val_str(g, "tokenizer.ggml.model", "test");
    gguf_set_arr_str(g, "tokenizer.ggml.tokens", words, WORDS);
    gguf_set_arr_data(g, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores, WORDS);
}

typedef struct lab_meta {
    const char *name; /* behind the architecture's; NULL ends a list of them */
    uint32_t value;
} lab_meta;

/* All of a toy's metadata but its vocabulary. */
static inline void lab_toy_meta(struct gguf_context *g, const char *arch, bool hybrid, const lab_size *size,
                                const lab_meta *more) {
    char key[128];
    const uint32_t quarter = size->head / 4, sections[4] = {quarter, quarter, quarter, quarter};
    gguf_set_val_str(g, "general.architecture", arch);
    lab_u32(g, arch, "context_length", 1024);
    lab_u32(g, arch, "embedding_length", size->embedding);
    lab_u32(g, arch, "block_count", size->layers);
    lab_u32(g, arch, "feed_forward_length", size->feed_forward);
    lab_heads(g, arch, hybrid, size);
    lab_f32(g, arch, "attention.layer_norm_epsilon", 1e-5f);
    lab_f32(g, arch, "attention.layer_norm_rms_epsilon", 1e-5f);
    lab_u32(g, arch, "attention.sliding_window", 32);
    lab_u32(g, arch, "attention.sliding_window_pattern", 2);
    lab_u32(g, arch, "full_attention_interval", 2);
    lab_u32(g, arch, "rope.dimension_count", size->head);
    snprintf(key, sizeof key, "%s.rope.dimension_sections", arch);
    gguf_set_arr_data(g, key, GGUF_TYPE_UINT32, sections, 4);
    lab_u32(g, arch, "ssm.conv_kernel", 4);
    lab_u32(g, arch, "ssm.inner_size", 2 * size->embedding);
    lab_u32(g, arch, "ssm.state_size", 16);
    lab_u32(g, arch, "ssm.time_step_rank", 16);
    lab_u32(g, arch, "ssm.group_count", 1);
    lab_u32(g, arch, "shortconv.l_cache", 3);
    lab_u32(g, arch, "wkv.head_size", size->head);
    lab_u32(g, arch, "time_mix_extra_dim", 64);
    lab_u32(g, arch, "time_decay_extra_dim", 128);
    for (; more != NULL && more->name != NULL; more++) {
        lab_u32(g, arch, more->name, more->value);
    }
}

static inline struct llama_model *lab_toy_with(const char *arch, bool hybrid, uint64_t seed, const lab_meta *more) {
    struct gguf_context *g = gguf_init_empty();
    const lab_size size = {.layers = 2, .embedding = 256, .feed_forward = 384, .head = 128};
    lab_toy_meta(g, arch, hybrid, &size, more);
    lab_vocab_of(g);
    lab_u32(g, arch, "vocab_size", 128);
    struct llama_model *model = llama_model_init_from_user(g, lab_random_tensor, &seed, llama_model_default_params());
    gguf_free(g);
    return model;
}

static inline struct llama_model *lab_toy(const char *arch, bool hybrid, uint64_t seed) {
    return lab_toy_with(arch, hybrid, seed, NULL);
}

/* ---- models in files ---- */

/* Everything that begins with "tokenizer." */
static inline void lab_graft_tokenizer(struct gguf_context *to, const struct gguf_context *from) {
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

static inline bool lab_append_from(const char *path, const char *from, size_t offset) {
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
static inline bool lab_write_model(const struct llama_model *model, const struct gguf_context *source,
                                   const char *path) {
    char aside[4096];
    snprintf(aside, sizeof aside, "%s.aside", path);
    llama_model_save_to_file(model, aside);
    struct gguf_context *g = gguf_init_from_file(aside, (struct gguf_init_params){.no_alloc = true});
    bool ok = g != NULL;
    if (ok) {
        size_t data = gguf_get_data_offset(g);
        lab_graft_tokenizer(g, source);
        ok = gguf_write_to_file(g, path, true) && lab_append_from(path, aside, data);
    }
    gguf_free(g);
    (void)unlink(aside);
    return ok;
}
#endif
