/* SPDX-License-Identifier: Apache-2.0
 *
 * llama.cpp's functions, found at run time.
 */
#include "llama/late/late.h"

#include <dlfcn.h>
#include <ggml-backend.h>
#include <llama.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

/* What it returns, its name, its parameters, the same without types. The compiler compares them with llama.cpp's
 * headers. */
#define RETURNING(X)                                                                                                 \
    X(const char *, ggml_backend_buft_name, (ggml_backend_buffer_type_t type), (type))                               \
    X(ggml_backend_dev_t, ggml_backend_dev_by_type, (enum ggml_backend_dev_type type), (type))                       \
    X(size_t, ggml_backend_dev_count, (void), ())                                                                    \
    X(ggml_backend_dev_t, ggml_backend_dev_get, (size_t i), (i))                                                     \
    X(const char *, ggml_backend_dev_name, (ggml_backend_dev_t dev), (dev))                                          \
    X(enum ggml_backend_dev_type, ggml_backend_dev_type, (ggml_backend_dev_t dev), (dev))                            \
    X(const char *, ggml_type_name, (enum ggml_type type), (type))                                                   \
    X(struct llama_batch, llama_batch_init, (int32_t num, int32_t embd, int32_t seqs), (num, embd, seqs))            \
    X(int32_t, llama_decode, (struct llama_context * ctx, struct llama_batch batch), (ctx, batch))                   \
    X(bool, llama_get_causal_attn, (const struct llama_context *ctx), (ctx))                                         \
    X(llama_memory_t, llama_get_memory, (const struct llama_context *ctx), (ctx))                                    \
    X(const struct llama_model *, llama_get_model, (const struct llama_context *ctx), (ctx))                         \
    X(size_t, llama_max_devices, (void), ())                                                                         \
    X(llama_pos, llama_memory_seq_pos_max, (llama_memory_t mem, llama_seq_id seq), (mem, seq))                       \
    X(llama_pos, llama_memory_seq_pos_min, (llama_memory_t mem, llama_seq_id seq), (mem, seq))                       \
    X(bool, llama_memory_seq_rm, (llama_memory_t mem, llama_seq_id seq, llama_pos first, llama_pos end),             \
      (mem, seq, first, end))                                                                                        \
    X(const struct llama_vocab *, llama_model_get_vocab, (const struct llama_model *model), (model))                 \
    X(bool, llama_model_has_decoder, (const struct llama_model *model), (model))                                     \
    X(bool, llama_model_has_encoder, (const struct llama_model *model), (model))                                     \
    X(bool, llama_model_is_diffusion, (const struct llama_model *model), (model))                                    \
    X(bool, llama_model_is_hybrid, (const struct llama_model *model), (model))                                       \
    X(bool, llama_model_is_recurrent, (const struct llama_model *model), (model))                                    \
    X(int32_t, llama_model_meta_val_str, (const struct llama_model *model, const char *key, char *out, size_t size), \
      (model, key, out, size))                                                                                       \
    X(int32_t, llama_model_n_ctx_train, (const struct llama_model *model), (model))                                  \
    X(int32_t, llama_model_n_swa, (const struct llama_model *model), (model))                                        \
    X(enum llama_rope_type, llama_model_rope_type, (const struct llama_model *model), (model))                       \
    X(uint32_t, llama_n_batch, (const struct llama_context *ctx), (ctx))                                             \
    X(uint32_t, llama_n_ctx, (const struct llama_context *ctx), (ctx))                                               \
    X(uint32_t, llama_n_ctx_seq, (const struct llama_context *ctx), (ctx))                                           \
    X(uint32_t, llama_n_seq_max, (const struct llama_context *ctx), (ctx))                                           \
    X(int32_t, llama_n_threads, (struct llama_context * ctx), (ctx))                                                 \
    X(int32_t, llama_n_threads_batch, (struct llama_context * ctx), (ctx))                                           \
    X(uint32_t, llama_n_ubatch, (const struct llama_context *ctx), (ctx))                                            \
    X(struct llama_perf_context_data, llama_perf_context, (const struct llama_context *ctx), (ctx))                  \
    X(const char *, llama_print_system_info, (void), ())                                                             \
    X(int32_t, llama_split_path, (char *out, size_t size, const char *prefix, int32_t no, int32_t num),              \
      (out, size, prefix, no, num))                                                                                  \
    X(int32_t, llama_split_prefix, (char *out, size_t size, const char *path, int32_t no, int32_t num),              \
      (out, size, path, no, num))                                                                                    \
    X(size_t, llama_state_seq_get_data, (struct llama_context * ctx, uint8_t * out, size_t size, llama_seq_id seq),  \
      (ctx, out, size, seq))                                                                                         \
    X(size_t, llama_state_seq_get_data_ext,                                                                          \
      (struct llama_context * ctx, uint8_t * out, size_t size, llama_seq_id seq, llama_state_seq_flags flags),       \
      (ctx, out, size, seq, flags))                                                                                  \
    X(size_t, llama_state_seq_get_size, (struct llama_context * ctx, llama_seq_id seq), (ctx, seq))                  \
    X(size_t, llama_state_seq_get_size_ext,                                                                          \
      (struct llama_context * ctx, llama_seq_id seq, llama_state_seq_flags flags), (ctx, seq, flags))                \
    X(size_t, llama_state_seq_set_data,                                                                              \
      (struct llama_context * ctx, const uint8_t *from, size_t size, llama_seq_id seq), (ctx, from, size, seq))      \
    X(size_t, llama_state_seq_set_data_ext,                                                                          \
      (struct llama_context * ctx, const uint8_t *from, size_t size, llama_seq_id seq, llama_state_seq_flags flags), \
      (ctx, from, size, seq, flags))                                                                                 \
    X(int64_t, llama_time_us, (void), ())                                                                            \
    X(const char *, llama_version, (void), ())                                                                       \
    X(int32_t, llama_vocab_n_tokens, (const struct llama_vocab *vocab), (vocab))

#define PLAIN(X)                                                                                                     \
    X(llama_batch_free, (struct llama_batch batch), (batch))                                                         \
    X(llama_memory_seq_cp, (llama_memory_t mem, llama_seq_id from, llama_seq_id to, llama_pos first, llama_pos end), \
      (mem, from, to, first, end))                                                                                   \
    X(llama_set_warmup, (struct llama_context * ctx, bool on), (ctx, on))                                            \
    X(llama_synchronize, (struct llama_context * ctx), (ctx))

#define DEFINE_RETURNING(type, name, params, args) \
    static type(*real_##name) params;              \
    type name params {                             \
        return real_##name args;                   \
    }
#define DEFINE_PLAIN(name, params, args) \
    static void(*real_##name) params;    \
    void name params {                   \
        real_##name args;                \
    }
RETURNING(DEFINE_RETURNING)
PLAIN(DEFINE_PLAIN)

typedef struct function {
    const char *name;
    void *real; /* the address of the pointer to it */
} function;

#define NAME_RETURNING(type, name, params, args) {#name, (void *)&real_##name},
#define NAME_PLAIN(name, params, args)           {#name, (void *)&real_##name},
static const function functions[] = {RETURNING(NAME_RETURNING) PLAIN(NAME_PLAIN)};

static void *taken;

static kvf_status refuse(kvf_error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

static kvf_status refuse(kvf_error *err, const char *format, ...) {
    va_list args;
    va_start(args, format);
    err->status = KVF_REFUSED;
    vsnprintf(err->what, sizeof err->what, format, args);
    va_end(args);
    return KVF_REFUSED;
}

/* Parameters are passed as structs, which change with every version. */
static kvf_status check_version(kvf_error *err, void *library) {
    const char *(*version)(void) = NULL;
    *(void **)(void *)&version = dlsym(library, "llama_version");
    const char *text = version != NULL ? version() : "of no known version";
    return strcmp(text, KVFL_LLAMA_VERSION) == 0
               ? KVF_OK
               : refuse(err, "this libllama (%s) is another than kvferry was built with (%s)", text,
                        KVFL_LLAMA_VERSION);
}

kvf_status kvfl_late_open(kvf_error *err, void *library) {
    if (taken != NULL) {
        return taken == library ? KVF_OK : refuse(err, "this process has taken another libllama before");
    }
    kvf_status status = check_version(err, library);
    for (size_t i = 0; i < sizeof functions / sizeof *functions && status == KVF_OK; i++) {
        void *real = dlsym(library, functions[i].name);
        memcpy(functions[i].real, &real, sizeof real);
        if (real == NULL) {
            status = refuse(err, "this libllama has no %s", functions[i].name);
        }
    }
    taken = status == KVF_OK ? library : NULL;
    return status;
}
