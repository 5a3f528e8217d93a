/* SPDX-License-Identifier: Apache-2.0
 *
 * The identity of a block: everything that changes its bytes is in the space, or refused. Every setting of the list in
 * docs/llama.md has a case here, by its name. settings_test.py compares llama.h, the list and this file. On toy models,
 * and under the shim with this program as the one that is served.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

#include "lab.h"

#include <cmocka.h>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* programs call what is deprecated, too */

#define NUM 280u /* tokens of a prompt: 4 blocks of 64, and more */

static const char *self;

/* ---- toys with numbers in their metadata ---- */

typedef struct number {
    const char *name; /* behind the architecture's; NULL ends a list of them */
    float value;
} number;

typedef struct toy {
    const char *arch;
    bool hybrid;
    lab_meta more[6];
    number numbers[6];
} toy;

static struct llama_model_params defaults(void) {
    return llama_model_default_params();
}

static struct gguf_context *toy_meta(const toy *t) {
    const lab_size size = {.layers = 4, .embedding = 256, .feed_forward = 384, .head = 128};
    struct gguf_context *g = gguf_init_empty();
    lab_toy_meta(g, t->arch, t->hybrid, &size, t->more);
    lab_vocab_of(g);
    lab_u32(g, t->arch, "vocab_size", 128);
    for (const number *n = t->numbers; n->name != NULL; n++) {
        lab_f32(g, t->arch, n->name, n->value);
    }
    return g;
}

static struct llama_model *make(const toy *t, uint64_t seed, struct llama_model_params params) {
    struct gguf_context *g = toy_meta(t);
    struct llama_model *model = llama_model_init_from_user(g, lab_random_tensor, &seed, params);
    gguf_free(g);
    assert_non_null(model);
    return model;
}

static void write_toy(const toy *t, uint64_t seed, const char *path) {
    struct gguf_context *g = toy_meta(t);
    struct llama_model *model = make(t, seed, defaults());
    assert_true(lab_write_model(model, g, path));
    llama_model_free(model);
    gguf_free(g);
}

static const toy plain = {.arch = "llama"};
static const toy experts = {.arch = "llama", .more = {{"expert_count", 4}, {"expert_used_count", 1}}};

/* ---- what a context computes, and how it is named ---- */

typedef struct identity {
    kvf_status status;
    kvf_error err;
    kvf_digest digest[2]; /* of the space; [1]: portable */
    uint8_t *kv;          /* of a prompt */
    size_t kv_bytes;
} identity;

typedef struct settings {
    struct llama_model_params model;
    struct llama_context_params context;
} settings;

static settings settings_of(void) {
    const lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true};
    return (settings){.model = defaults(), .context = lab_params(&config)};
}

static kvf_status attach(kvf_llama **out, kvf_error *err, kvf_store *store, struct llama_context *ctx,
                         const settings *s, const char *path, bool portable) {
    const kvf_llama_options o = {.struct_size = sizeof o,
                                 .scratch_seq = (llama_seq_id)s->context.n_seq_max - 1,
                                 .model_path = path,
                                 .context_params = &s->context,
                                 .model_params = &s->model,
                                 .block_tokens = 64,
                                 .portable = portable};
    return kvf_llama_attach(out, err, store, ctx, &o);
}

static void compute(identity *id, kvf_llama *kv, struct llama_context *ctx) {
    llama_token *tokens = lab_prompt(NUM, 1);
    for (size_t i = 0; i < NUM; i++) {
        tokens[i] %= 128;
    }
    if (kvf_llama_prefill(kv, NULL, &id->err, 0, tokens, NUM) == KVF_OK) {
        /* The last token, which is computed alone, is not stored. */
        (void)llama_memory_seq_rm(llama_get_memory(ctx), 0, (llama_pos)NUM - 1, -1);
        id->kv_bytes = llama_state_seq_get_size(ctx, 0);
        id->kv = malloc(id->kv_bytes);
        assert_int_equal(llama_state_seq_get_data(ctx, id->kv, id->kv_bytes, 0), id->kv_bytes);
    }
    free(tokens);
}

/* `before` is called in front of the attach. */
static identity identify_with(struct llama_model *model, const settings *s, void (*before)(struct llama_context *)) {
    identity id = {.status = KVF_OK};
    kvf_store *store = kvft_store("mem:");
    struct llama_context *ctx = llama_init_from_model(model, s->context);
    assert_non_null(ctx);
    if (before != NULL) {
        before(ctx);
    }
    for (int portable = 1; portable >= 0 && id.status == KVF_OK; portable--) {
        kvf_llama *kv = NULL;
        id.status = attach(&kv, &id.err, store, ctx, s, MODEL_PATH, portable != 0);
        if (id.status == KVF_OK) {
            kvf_space_digest(kvf_llama_space(kv), &id.digest[portable]);
        }
        if (id.status == KVF_OK && portable == 0) {
            compute(&id, kv, ctx);
        }
        kvf_llama_detach(kv);
    }
    llama_free(ctx);
    kvf_store_close(store);
    return id;
}

static identity identify(struct llama_model *model, const settings *s) {
    return identify_with(model, s, NULL);
}

static bool same_space(const identity *a, const identity *b, bool portable) {
    return memcmp(&a->digest[portable], &b->digest[portable], sizeof *a->digest) == 0;
}

static bool same_kv(const identity *a, const identity *b) {
    return a->kv_bytes == b->kv_bytes && a->kv != NULL && memcmp(a->kv, b->kv, a->kv_bytes) == 0;
}

/* ---- the settings ---- */

/* As the table says it. */
typedef enum class {
    NOTHING, /* no influence: same space, same bytes */
    NUMBERS, /* in the space, but for a portable one */
    SPACE,   /* in the space */
    REFUSED
} class;

typedef struct setting {
    const char *name;
    class class;
    size_t offset, size; /* of a field of settings, see FIELD; size 0: none */
    const void *value;
    const toy *toy;                        /* NULL: the plain one */
    void (*set)(settings *);               /* instead of a field */
    void (*apply)(struct llama_context *); /* the same, after the context was made */
} setting;

#define FIELD(field, what)                                                          \
    .offset = offsetof(settings, field), .size = sizeof(((settings *)NULL)->field), \
    .value = &(__typeof__(((settings *)NULL)->field)) {                             \
        what                                                                        \
    }

static bool go_on(float progress, void *ctx) {
    (void)progress;
    (void)ctx;
    return true;
}

static bool do_not_stop(void *ctx) {
    (void)ctx;
    return false;
}

static bool look(struct ggml_tensor *t, bool ask, void *ctx) {
    (void)t;
    (void)ctx;
    return !ask;
}

static ggml_backend_dev_t no_devices[] = {NULL};
static const struct llama_model_tensor_buft_override no_pattern[] = {{NULL, NULL}};
static struct llama_model_tensor_buft_override some_pattern[] = {{"ffn_.*", NULL}, {NULL, NULL}};
static const float split[64] = {1.0f};
static const struct llama_model_kv_override epsilon[] = {
    {.tag = LLAMA_KV_OVERRIDE_TYPE_FLOAT, .key = "llama.attention.layer_norm_rms_epsilon", .val_f64 = 1e-2},
    {.key = ""}};

static ggml_backend_dev_t cpu(void) {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

static struct llama_sampler *greedy(void) {
    struct llama_sampler *chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    llama_sampler_chain_add(chain, llama_sampler_init_greedy());
    return chain; /* kept: contexts point to it */
}

static void set_tensor_buft_overrides(settings *s) {
    some_pattern[0].buft = ggml_backend_dev_buffer_type(cpu());
    s->model.tensor_buft_overrides = some_pattern;
}
static void set_rope_scaling_type(settings *s) {
    s->context.rope_scaling_type = LLAMA_ROPE_SCALING_TYPE_LINEAR;
    s->context.rope_freq_scale = 0.5f;
}
static void set_samplers(settings *s) {
    static struct llama_sampler_seq_config config;
    config.sampler = greedy();
    s->context.samplers = &config;
    s->context.n_samplers = 1;
}

/* Functions. */
#define APPLY(what) static void apply_##what(struct llama_context *ctx)
APPLY(n_threads) {
    llama_set_n_threads(ctx, 1, 1);
}
APPLY(embeddings) {
    llama_set_embeddings(ctx, true);
}
APPLY(causal_attn) {
    llama_set_causal_attn(ctx, false);
}
APPLY(warmup) {
    llama_set_warmup(ctx, true);
}
APPLY(abort_callback) {
    llama_set_abort_callback(ctx, do_not_stop, NULL);
}
APPLY(threadpool) {
    static ggml_threadpool_t pool;
    struct ggml_threadpool_params p = ggml_threadpool_params_default(2);
    ggml_threadpool_t (*make_pool)(struct ggml_threadpool_params *) = NULL;
    *(void **)(void *)&make_pool =
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu()), "ggml_threadpool_new");
    pool = pool != NULL ? pool : make_pool(&p);
    llama_attach_threadpool(ctx, pool, pool);
}
APPLY(detach_threadpool) {
    llama_detach_threadpool(ctx);
}
APPLY(sampler) {
    (void)llama_set_sampler(ctx, 0, greedy());
}
APPLY(numa) {
    (void)ctx;
    llama_numa_init(GGML_NUMA_STRATEGY_DISTRIBUTE);
}
APPLY(cvec) {
    float data[256 * 3];
    for (size_t i = 0; i < sizeof data / sizeof *data; i++) {
        data[i] = 0.25f;
    }
    assert_int_equal(llama_set_adapter_cvec(ctx, data, sizeof data / sizeof *data, 256, 1, 3), 0);
}

static const toy windows = {.arch = "gemma3", .more = {{"attention.sliding_window", 128}}};
static const toy recurrent = {.arch = "jamba", .hybrid = true};

static const setting all[] = {
    {"devices", NOTHING, FIELD(model.devices, no_devices)}, /* NUMBERS where there are any but CPUs */
    {"tensor_buft_overrides", NUMBERS, .set = set_tensor_buft_overrides},
    {"tensor_buft_overrides", NOTHING, FIELD(model.tensor_buft_overrides, no_pattern)},
    {"n_gpu_layers", NOTHING, FIELD(model.n_gpu_layers, 3)},
    {"split_mode", NOTHING, FIELD(model.split_mode, LLAMA_SPLIT_MODE_NONE)},
    {"load_mode", NOTHING, FIELD(model.load_mode, LLAMA_LOAD_MODE_NONE)},
    {"lazy_mode", NOTHING, FIELD(model.lazy_mode, LLAMA_LAZY_MODE_OFF)},
    {"main_gpu", NOTHING, FIELD(model.main_gpu, 1)},
    {"tensor_split", NOTHING, FIELD(model.tensor_split, split)},
    {"progress_callback", NOTHING, FIELD(model.progress_callback, go_on)},
    {"progress_callback_user_data", NOTHING, FIELD(model.progress_callback_user_data, no_devices)},
    {"kv_overrides", SPACE, FIELD(model.kv_overrides, epsilon)},
    {"check_tensors", NOTHING, FIELD(model.check_tensors, true)},
    {"use_extra_bufts", NUMBERS, FIELD(model.use_extra_bufts, false)},
    {"no_host", NUMBERS, FIELD(model.no_host, true)},
    {"load_mtp", NOTHING, FIELD(model.load_mtp, true)},
    {"n_ctx", NOTHING, FIELD(context.n_ctx, 512)},
    {"n_batch", NOTHING, FIELD(context.n_batch, 128)},
    {"n_ubatch", NOTHING, FIELD(context.n_ubatch, 64)},
    {"n_ubatch", SPACE, FIELD(context.n_ubatch, 48)},
    {"n_seq_max", NOTHING, FIELD(context.n_seq_max, 7)},
    {"n_seq_max", NOTHING, FIELD(context.n_seq_max, 7), .toy = &recurrent},
    {"n_rs_seq", NOTHING, FIELD(context.n_rs_seq, 2)},
    {"n_outputs_max", NOTHING, FIELD(context.n_outputs_max, 8)},
    {"n_outputs_max_per_seq", NOTHING, FIELD(context.n_outputs_max_per_seq, 2)},
    {"n_threads", NOTHING, FIELD(context.n_threads, 1)},
    {"n_threads_batch", NOTHING, FIELD(context.n_threads_batch, 1)},
    {"rope_scaling_type", SPACE, .set = set_rope_scaling_type},
    {"pooling_type", NOTHING, FIELD(context.pooling_type, LLAMA_POOLING_TYPE_NONE)},
    {"attention_type", REFUSED, FIELD(context.attention_type, LLAMA_ATTENTION_TYPE_NON_CAUSAL)},
    {"flash_attn_type", SPACE, FIELD(context.flash_attn_type, LLAMA_FLASH_ATTN_TYPE_DISABLED)},
    {"flash_attn_type", NOTHING, FIELD(context.flash_attn_type, LLAMA_FLASH_ATTN_TYPE_AUTO)},
    {"flash_attn_type", NOTHING, FIELD(context.flash_attn_type, LLAMA_FLASH_ATTN_TYPE_ENABLED)},
    {"rope_freq_base", SPACE, FIELD(context.rope_freq_base, 5000)},
    {"rope_freq_scale", SPACE, FIELD(context.rope_freq_scale, 0.5f)},
    {"yarn_ext_factor", SPACE, FIELD(context.yarn_ext_factor, 1)},
    {"yarn_attn_factor", SPACE, FIELD(context.yarn_attn_factor, 1.5f)},
    {"yarn_attn_factor", NOTHING, FIELD(context.yarn_attn_factor, 1)}, /* and so on: as llama-cpp-python says it */
    {"yarn_beta_fast", NOTHING, FIELD(context.yarn_beta_fast, 32)},
    {"yarn_beta_slow", NOTHING, FIELD(context.yarn_beta_slow, 1)},
    {"yarn_beta_fast", SPACE, FIELD(context.yarn_beta_fast, 16)},
    {"yarn_beta_slow", SPACE, FIELD(context.yarn_beta_slow, 2)},
    {"yarn_orig_ctx", SPACE, FIELD(context.yarn_orig_ctx, 512)},
    {"defrag_thold", NOTHING, FIELD(context.defrag_thold, 0.5f)},
    {"cb_eval", REFUSED, FIELD(context.cb_eval, look)},
    {"cb_eval_user_data", NOTHING, FIELD(context.cb_eval_user_data, no_devices)},
    {"type_k", SPACE, FIELD(context.type_k, GGML_TYPE_Q8_0)},
    {"type_v", SPACE, FIELD(context.type_v, GGML_TYPE_Q8_0)},
    {"abort_callback", NOTHING, FIELD(context.abort_callback, do_not_stop)},
    {"abort_callback_data", NOTHING, FIELD(context.abort_callback_data, no_devices)},
    {"embeddings", NOTHING, FIELD(context.embeddings, true)},
    {"offload_kqv", NOTHING, FIELD(context.offload_kqv, false)},
    {"no_perf", NOTHING, FIELD(context.no_perf, false)},
    {"op_offload", NOTHING, FIELD(context.op_offload, false)},
    {"samplers", NOTHING, .set = set_samplers}, /* and "n_samplers" */
    {"swa_full", NOTHING, FIELD(context.swa_full, true)},
    {"swa_full", SPACE, FIELD(context.swa_full, true), .toy = &windows},
    {"kv_unified", REFUSED, FIELD(context.kv_unified, false)},
    {"llama_set_n_threads", NOTHING, .apply = apply_n_threads},
    {"llama_attach_threadpool", NOTHING, .apply = apply_threadpool},
    {"llama_detach_threadpool", NOTHING, .apply = apply_detach_threadpool},
    {"llama_set_embeddings", NOTHING, .apply = apply_embeddings},
    {"llama_set_causal_attn", REFUSED, .apply = apply_causal_attn},
    {"llama_set_warmup", NOTHING, .apply = apply_warmup},
    {"llama_set_warmup", NOTHING, .toy = &experts, .apply = apply_warmup},
    {"llama_set_abort_callback", NOTHING, .apply = apply_abort_callback},
    {"llama_set_sampler", NOTHING, .apply = apply_sampler},
    {"llama_set_adapter_cvec", NUMBERS, .apply = apply_cvec},
    {"llama_numa_init", NOTHING, .apply = apply_numa},
};

static void check(const setting *s, const identity *before, const identity *after) {
    if (s->class == REFUSED) {
        if (after->status != KVF_REFUSED) {
            fail_msg("%s is not refused", s->name);
        }
        return;
    }
    if (after->status != KVF_OK) {
        fail_msg("%s: %s", s->name, after->err.what);
    }
    bool same = same_space(before, after, false), portable = same_space(before, after, true);
    if (same && !same_kv(before, after)) {
        fail_msg("%s changes the KV of a prompt, and not the space", s->name);
    }
    if (same != (s->class == NOTHING) || portable != (s->class != SPACE)) {
        fail_msg("%s: same space: %d, portable: %d", s->name, same, portable);
    }
}

/* As nothing is set; each toy is computed once. */
static const identity *usual(const toy *t) {
    static struct {
        const toy *toy;
        identity id;
    } known[4];
    size_t i = 0;
    while (known[i].toy != NULL && known[i].toy != t) {
        i++;
    }
    if (known[i].toy == NULL) {
        const settings s = settings_of();
        struct llama_model *model = make(t, 1, s.model);
        known[i].toy = t;
        known[i].id = identify(model, &s);
        assert_int_equal(known[i].id.status, KVF_OK);
        llama_model_free(model);
    }
    return &known[i].id;
}

static void test_every_setting(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const setting *s = &all[i];
        const toy *t = s->toy != NULL ? s->toy : &plain;
        settings changed = settings_of();
        if (s->size > 0) {
            memcpy((uint8_t *)&changed + s->offset, s->value, s->size);
        }
        if (s->set != NULL) {
            s->set(&changed);
        }
        struct llama_model *model = make(t, 1, changed.model);
        identity id = identify_with(model, &changed, s->apply);
        check(s, usual(t), &id);
        free(id.kv);
        llama_model_free(model);
    }
    printf("%zu settings\n", sizeof all / sizeof *all);
}

/* ggml reads its settings of the environment once, before anything is loaded; some of them choose kernels. */
static void test_settings_of_the_environment(void **state) {
    (void)state;
    settings s = settings_of();
    struct llama_model *model = make(&plain, 1, s.model);
    setenv("GGML_CUDA_FORCE_CUBLAS_COMPUTE_32F", "1", 1);
    identity id = identify(model, &s);
    unsetenv("GGML_CUDA_FORCE_CUBLAS_COMPUTE_32F");
    assert_int_equal(id.status, KVF_OK);
    assert_false(same_space(usual(&plain), &id, false));
    assert_true(same_space(usual(&plain), &id, true));
    setenv("LLAMA_ATTN_ROT_DISABLE", "1", 1);
    free(id.kv);
    id = identify(model, &s);
    unsetenv("LLAMA_ATTN_ROT_DISABLE");
    assert_false(same_space(usual(&plain), &id, true));
    free(id.kv);
    llama_model_free(model);
}

/* What a warm-up or a mask set later would compute is not stored. */
static void test_modes_that_are_set_after_the_attach(void **state) {
    (void)state;
    settings s = settings_of();
    struct llama_model *model = make(&experts, 1, s.model);
    struct llama_context *ctx = llama_init_from_model(model, s.context);
    kvf_store *store = kvft_store("mem:");
    kvf_llama *kv = NULL;
    identity clean = identify(model, &s), id = {.status = KVF_OK};
    assert_int_equal(attach(&kv, &id.err, store, ctx, &s, MODEL_PATH, false), KVF_OK);
    llama_set_warmup(ctx, true);
    compute(&id, kv, ctx);
    assert_true(same_kv(&clean, &id));
    llama_token token = 1;
    llama_set_causal_attn(ctx, false);
    assert_int_equal(kvf_llama_prefill(kv, NULL, &id.err, 0, &token, 1), KVF_REFUSED);
    free(clean.kv);
    free(id.kv);
    kvf_llama_detach(kv);
    kvf_store_close(store);
    llama_free(ctx);
    llama_model_free(model);
}

/* "ctx_type", "ctx_other": only of models with parts for drafting, so this context is an ordinary one that is said to
 * be one. */
static void test_contexts_that_draft_are_refused(void **state) {
    (void)state;
    settings s = settings_of();
    struct llama_model *model = make(&plain, 1, s.model);
    struct llama_context *ctx = llama_init_from_model(model, s.context);
    kvf_store *store = kvft_store("mem:");
    kvf_llama *kv = NULL;
    kvf_error err;
    s.context.ctx_type = LLAMA_CONTEXT_TYPE_MTP;
    assert_int_equal(attach(&kv, &err, store, ctx, &s, MODEL_PATH, false), KVF_REFUSED);
    s.context.ctx_type = LLAMA_CONTEXT_TYPE_DEFAULT;
    s.context.ctx_other = ctx;
    assert_int_equal(attach(&kv, &err, store, ctx, &s, MODEL_PATH, false), KVF_REFUSED);
    kvf_store_close(store);
    llama_free(ctx);
    llama_model_free(model);
}

/* Beside many others a single token rounds by the number of threads. */
static void test_a_single_token_behind_the_blocks_is_not_stored(void **state) {
    (void)state;
    const lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true};
    struct llama_model *model = make(&plain, 1, defaults());
    lab l = lab_open(model, &config, "mem:", MODEL_PATH);
    assert_int_equal(l.status, KVF_OK);
    llama_token *tokens = lab_prompt(NUM, 1);
    for (size_t i = 0; i < NUM; i++) {
        tokens[i] %= 128;
    }
    kvf_llama_report report = {.struct_size = sizeof report};
    free(lab_prefill(&l, &report, 0, tokens, 4 * 64 + 2));
    assert_int_equal(report.saved_blocks, 4);
    free(lab_prefill(&l, &report, 1, tokens, 4 * 64 + 3));
    assert_int_equal(report.saved_blocks, 1); /* two tokens are */
    free(tokens);
    lab_close(&l);
    llama_model_free(model);
}

/* ---- what acts between tokens ---- */

typedef struct pair {
    const char *what;
    toy a, b;
} pair;

#define GRANITE(scale)                                        \
    {                                                         \
        "granite", false, {{NULL, 0}}, {                      \
            {"logit_scale", 1}, {"attention.scale", scale}, { \
                NULL, 0                                       \
            }                                                 \
        }                                                     \
    }
#define SOFT_CAP(cap)                                                           \
    {                                                                           \
        "gemma2", false, {{NULL, 0}}, {                                         \
            {"attn_logit_softcapping", cap}, {"final_logit_softcapping", 30}, { \
                NULL, 0                                                         \
            }                                                                   \
        }                                                                       \
    }
#define ALIBI(bias)                               \
    {                                             \
        "mpt", false, {{NULL, 0}}, {              \
            {"attention.max_alibi_bias", bias}, { \
                NULL, 0                           \
            }                                     \
        }                                         \
    }
#define LINEAR(factor)                         \
    {                                          \
        "llama", false, {{NULL, 0}}, {         \
            {"rope.scaling.factor", factor}, { \
                NULL, 0                        \
            }                                  \
        }                                      \
    }
#define BASE(base)                      \
    {                                   \
        "llama", false, {{NULL, 0}}, {  \
            {"rope.freq_base", base}, { \
                NULL, 0                 \
            }                           \
        }                               \
    }
#define WINDOW(tokens)                                                        \
    {                                                                         \
        "gemma3", false, {{"attention.sliding_window", tokens}, {NULL, 0}}, { \
            { NULL, 0 }                                                       \
        }                                                                     \
    }
/* From position 1,000 on, which of the probe's tokens only the far ones reach. */
#define FAR(scale)                                                                        \
    {                                                                                     \
        "mistral3", false, {{"rope.scaling.original_context_length", 1000}, {NULL, 0}}, { \
            {"attention.temperature_scale", scale}, {                                     \
                NULL, 0                                                                   \
            }                                                                             \
        }                                                                                 \
    }

static const pair pairs[] = {
    {"attention scale", GRANITE(0.125f), GRANITE(0.02f)},
    {"soft cap", SOFT_CAP(50), SOFT_CAP(0.05f)},
    {"ALiBi", ALIBI(8), ALIBI(4)},
    {"linear scaling", LINEAR(1), LINEAR(2)},
    {"frequencies", BASE(10000), BASE(20000)},
    {"window", WINDOW(32), WINDOW(48)},
    {"temperature far out", FAR(0.1f), FAR(0.5f)},
};

/* The file is the same, and so are all shapes and parameters: only what is computed differs. */
static void test_the_probe_sees_what_acts_between_tokens(void **state) {
    (void)state;
    settings s = settings_of();
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        struct llama_model *a = make(&pairs[i].a, 1, s.model), *b = make(&pairs[i].b, 1, s.model);
        identity first = identify(a, &s), second = identify(b, &s), again = identify(a, &s);
        if (first.status != KVF_OK || second.status != KVF_OK) {
            fail_msg("%s: %s%s", pairs[i].what, first.err.what, second.err.what);
        }
        if (same_space(&first, &second, false)) {
            fail_msg("%s is not seen", pairs[i].what);
        }
        assert_true(same_space(&first, &again, false));
        free(first.kv);
        free(second.kv);
        free(again.kv);
        llama_model_free(a);
        llama_model_free(b);
    }
}

/* Cells that others use lie in front of the scratch sequence's: the sums are the same nevertheless. */
static void test_the_probe_is_the_same_in_a_context_in_use(void **state) {
    (void)state;
    for (int flash = 0; flash < 2; flash++) {
        settings s = settings_of();
        s.context.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        struct llama_model *model = make(&plain, 1, s.model);
        identity fresh = identify(model, &s);
        struct llama_context *ctx = llama_init_from_model(model, s.context);
        kvf_store *store = kvft_store("mem:");
        llama_token tokens[37] = {0};
        for (int used = 0; used < 5; used++) {
            kvf_llama *kv = NULL;
            kvf_error err;
            kvf_digest digest;
            assert_int_equal(llama_decode(ctx, llama_batch_get_one(tokens, 37 - used)), 0);
            assert_int_equal(attach(&kv, &err, store, ctx, &s, MODEL_PATH, false), KVF_OK);
            kvf_space_digest(kvf_llama_space(kv), &digest);
            assert_memory_equal(&digest, &fresh.digest[0], sizeof digest);
            kvf_llama_detach(kv);
        }
        free(fresh.kv);
        kvf_store_close(store);
        llama_free(ctx);
        llama_model_free(model);
    }
}

/* ---- the case that was seen: metadata set over the file's own ---- */

static size_t load_of(const struct llama_model_kv_override *overrides, const char *url, llama_token *tokens) {
    const toy granite = {"granite", false, {{NULL, 0}}, {{"logit_scale", 1}, {NULL, 0}}};
    settings s = settings_of();
    s.model.kv_overrides = overrides;
    struct llama_model *model = make(&granite, 1, s.model);
    struct llama_context *ctx = llama_init_from_model(model, s.context);
    kvf_store *store = kvft_store(url);
    kvf_llama *kv = NULL;
    kvf_llama_report report = {.struct_size = sizeof report};
    kvf_error err;
    assert_int_equal(attach(&kv, &err, store, ctx, &s, MODEL_PATH, true), KVF_OK);
    assert_int_equal(kvf_llama_prefill(kv, &report, &err, 0, tokens, NUM), KVF_OK);
    kvft_flush_all(store);
    kvf_llama_detach(kv);
    kvf_store_close(store);
    llama_free(ctx);
    llama_model_free(model);
    return report.loaded_tokens;
}

static void test_another_attention_scale_loads_nothing(void **state) {
    (void)state;
    struct llama_model_kv_override o[] = {
        {.tag = LLAMA_KV_OVERRIDE_TYPE_FLOAT, .key = "granite.attention.scale", .val_f64 = 0.125}, {.key = ""}};
    char *dir = kvft_temp_dir(), url[200];
    llama_token *tokens = lab_prompt(NUM, 1);
    snprintf(url, sizeof url, "file:%s", dir);
    for (size_t i = 0; i < NUM; i++) {
        tokens[i] %= 128;
    }
    assert_int_equal(load_of(o, url, tokens), 0);
    assert_int_equal(load_of(o, url, tokens), NUM - 1);
    o[0].val_f64 = 0.02;
    assert_int_equal(load_of(o, url, tokens), 0);
    assert_int_equal(load_of(NULL, url, tokens), 0);
    free(tokens);
    kvft_remove_dir(dir);
}

/* A number of yarn that is set over the file's own: a context that leaves it open takes that one, and not llama.cpp's. */
static void test_yarn_by_an_override(void **state) {
    (void)state;
    const toy mistral = {.arch = "mistral3"};
    struct llama_model_kv_override o[] = {
        {.tag = LLAMA_KV_OVERRIDE_TYPE_FLOAT, .key = "mistral3.rope.scaling.yarn_beta_fast", .val_f64 = 2},
        {.key = ""}};
    settings s = settings_of();
    s.model.kv_overrides = o;
    s.context.rope_scaling_type = LLAMA_ROPE_SCALING_TYPE_YARN;
    s.context.rope_freq_scale = 0.25f;
    struct llama_model *model = make(&mistral, 1, s.model);
    identity open = identify(model, &s);
    s.context.yarn_beta_fast = 32;
    identity said = identify(model, &s);
    assert_int_equal(open.status, KVF_OK);
    assert_int_equal(said.status, KVF_OK);
    assert_false(same_kv(&open, &said));
    assert_false(same_space(&open, &said, true));
    free(open.kv);
    free(said.kv);
    llama_model_free(model);
}

/* ---- the file that was loaded ---- */

typedef struct site {
    char *dir, path[200], other[200], link[200];
} site;

static site open_site(void) {
    site s = {.dir = kvft_temp_dir()};
    snprintf(s.path, sizeof s.path, "%s/model.gguf", s.dir);
    snprintf(s.other, sizeof s.other, "%s/other.gguf", s.dir);
    snprintf(s.link, sizeof s.link, "%s/link.gguf", s.dir);
    write_toy(&plain, 1, s.path);
    write_toy(&plain, 2, s.other);
    assert_int_equal(symlink(s.path, s.link), 0);
    kvft_nap_ms(50); /* times of files are coarse: files written so far must be older than those that follow */
    return s;
}

static void close_site(site *s) {
    kvft_remove_dir(s->dir);
}

static void replace(const site *s) {
    assert_int_equal(rename(s->other, s->path), 0);
}

static void lead_elsewhere(const site *s) {
    assert_int_equal(unlink(s->link), 0);
    assert_int_equal(symlink(s->other, s->link), 0);
}

static void write_into(const site *s) {
    int fd = open(s->path, O_WRONLY | O_CLOEXEC);
    struct stat st;
    const struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = 1000000000}};
    assert_true(fd >= 0 && fstat(fd, &st) == 0);
    assert_int_equal(pwrite(fd, "x", 1, st.st_size - 1), 1);
    assert_int_equal(futimens(fd, times), 0); /* the time of the last write can be set back */
    close(fd);
}

static void write_empty(const char *path) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    close(fd);
}

/* The time of day, as everything in this process reads it, is ahead of the kernel's by so many seconds. A machine that
 * was suspended shows the same to a process: its monotonic clock has stood still. */
static _Atomic time_t ahead_s;

__attribute__((visibility("default"))) int clock_gettime(clockid_t clock, struct timespec *t) {
    int rc = (int)syscall(SYS_clock_gettime, clock, t);
    t->tv_sec += clock == CLOCK_REALTIME ? ahead_s : 0;
    return rc;
}

static void touch_beside(const site *s) {
    char path[250];
    snprintf(path, sizeof path, "%s/beside", s->dir);
    write_empty(path);
}

static kvf_status attach_after(void (*change)(const site *), bool by_link, enum llama_load_mode mode, char *what,
                               size_t size) {
    site at = open_site();
    const char *path = by_link ? at.link : at.path;
    settings s = settings_of();
    s.model.load_mode = mode;
    struct llama_model *model = llama_model_load_from_file(path, s.model);
    /* Also mapped here: that alone proves nothing. */
    struct llama_model *beside = llama_model_load_from_file(at.other, s.model);
    struct llama_context *ctx = llama_init_from_model(model, s.context);
    kvf_store *store = kvft_store("mem:");
    kvf_llama *kv = NULL;
    kvf_error err = {.what = ""};
    kvft_nap_ms(50);
    change(&at);
    kvf_status status = attach(&kv, &err, store, ctx, &s, path, true);
    snprintf(what, size, "%s", err.what);
    kvf_llama_detach(kv);
    kvf_store_close(store);
    llama_free(ctx);
    llama_model_free(beside);
    llama_model_free(model);
    close_site(&at);
    return status;
}

/* What comes to the name between the load and the step is no older than the load, whatever the time of day says then. */
static void replace_and_step(const site *s) {
    replace(s);
    ahead_s = 3600;
}

static void lead_elsewhere_and_step(const site *s) {
    lead_elsewhere(s);
    ahead_s = 3600;
}

static void step_alone(const site *s) {
    (void)s;
    ahead_s = 3600;
}

static void test_a_clock_that_is_set_forward_after_the_load(void **state) {
    (void)state;
    char what[256];
    assert_int_equal(attach_after(replace_and_step, false, LLAMA_LOAD_MODE_MMAP, what, sizeof what), KVF_REFUSED);
    assert_non_null(strstr(what, "not proven"));
    ahead_s = 0;
    assert_int_equal(attach_after(replace_and_step, false, LLAMA_LOAD_MODE_NONE, what, sizeof what), KVF_REFUSED);
    ahead_s = 0;
    assert_int_equal(attach_after(lead_elsewhere_and_step, true, LLAMA_LOAD_MODE_MMAP, what, sizeof what), KVF_REFUSED);
    ahead_s = 0;
    assert_int_equal(attach_after(step_alone, false, LLAMA_LOAD_MODE_MMAP, what, sizeof what), KVF_OK);
    ahead_s = 0;
}

/* Another folder, with another file of that name, comes in the place of the model's. The file is older than the load,
 * and mapped too: only the folder tells. */
static void test_another_folder_names_nothing(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), a[200], b[200], c[200], of_a[250], of_b[250];
    snprintf(a, sizeof a, "%s/a", dir);
    snprintf(b, sizeof b, "%s/b", dir);
    snprintf(c, sizeof c, "%s/c", dir);
    snprintf(of_a, sizeof of_a, "%s/model.gguf", a);
    snprintf(of_b, sizeof of_b, "%s/model.gguf", b);
    assert_int_equal(mkdir(a, 0700) + mkdir(b, 0700), 0);
    write_toy(&plain, 1, of_a);
    write_toy(&plain, 2, of_b);
    kvft_nap_ms(50);
    settings s = settings_of();
    struct llama_model *model = llama_model_load_from_file(of_a, s.model);
    struct llama_model *beside = llama_model_load_from_file(of_b, s.model);
    struct llama_context *ctx = llama_init_from_model(model, s.context);
    kvf_store *store = kvft_store("mem:");
    kvf_llama *kv = NULL;
    kvf_error err = {.what = ""};
    kvft_nap_ms(50);
    assert_int_equal(attach(&kv, &err, store, ctx, &s, of_a, true), KVF_OK);
    kvf_llama_detach(kv);
    kv = NULL;
    assert_int_equal(rename(a, c) + rename(b, a), 0);
    assert_int_equal(attach(&kv, &err, store, ctx, &s, of_a, true), KVF_REFUSED);
    assert_non_null(strstr(err.what, "not proven"));
    kvf_store_close(store);
    llama_free(ctx);
    llama_model_free(beside);
    llama_model_free(model);
    kvft_remove_dir(dir);
}

typedef struct releases {
    char *dir, now[200], next[200], old[200], path[250], beside[250], above[250];
} releases;

static releases open_releases(void) {
    releases r = {.dir = kvft_temp_dir()};
    char next[250];
    snprintf(r.now, sizeof r.now, "%s/now", r.dir);
    snprintf(r.next, sizeof r.next, "%s/next", r.dir);
    snprintf(r.old, sizeof r.old, "%s/old", r.dir);
    snprintf(r.path, sizeof r.path, "%s/model.gguf", r.now);
    snprintf(r.beside, sizeof r.beside, "%s/beside", r.now);
    snprintf(r.above, sizeof r.above, "%s/above", r.dir);
    snprintf(next, sizeof next, "%s/model.gguf", r.next);
    assert_int_equal(mkdir(r.now, 0700) + mkdir(r.next, 0700), 0);
    write_toy(&plain, 1, r.path);
    write_toy(&plain, 2, next);
    kvft_nap_ms(3200); /* old enough to be named without being mapped */
    return r;
}

static void expect_attach(kvf_status expected, const releases *r, struct llama_context *ctx, const settings *s) {
    kvf_store *store = kvft_store("mem:");
    kvf_llama *kv = NULL;
    kvf_error err = {.what = ""};
    kvf_status status = attach(&kv, &err, store, ctx, s, r->path, true);
    if (status != expected) {
        fail_msg("status %d: %s", (int)status, err.what);
    }
    kvf_llama_detach(kv);
    kvf_store_close(store);
}

/* A release is made beside the one that is loaded, comes in its place as a folder, and then a file is written into
 * it. */
static void swap_releases(enum llama_load_mode mode) {
    releases r = open_releases();
    settings s = settings_of();
    s.model.load_mode = mode;
    struct llama_model *model = llama_model_load_from_file(r.path, s.model);
    struct llama_context *ctx = llama_init_from_model(model, s.context);
    kvft_nap_ms(50);
    write_empty(r.beside);
    expect_attach(KVF_OK, &r, ctx, &s); /* the folder around it is still */
    write_empty(r.above);
    expect_attach(mode == LLAMA_LOAD_MODE_MMAP ? KVF_OK : KVF_REFUSED, &r, ctx, &s);
    assert_int_equal(rename(r.now, r.old) + rename(r.next, r.now), 0);
    write_empty(r.beside);
    expect_attach(KVF_REFUSED, &r, ctx, &s);
    llama_free(ctx);
    llama_model_free(model);
    kvft_remove_dir(r.dir);
}

static void test_a_folder_that_was_written_to_after_it_took_the_name(void **state) {
    (void)state;
    swap_releases(LLAMA_LOAD_MODE_MMAP);
    swap_releases(LLAMA_LOAD_MODE_NONE);
}

static void test_another_file_names_nothing(void **state) {
    (void)state;
    char what[256];
    assert_int_equal(attach_after(touch_beside, false, LLAMA_LOAD_MODE_MMAP, what, sizeof what), KVF_OK);
    assert_int_equal(attach_after(touch_beside, true, LLAMA_LOAD_MODE_MMAP, what, sizeof what), KVF_OK);
    assert_int_equal(attach_after(replace, false, LLAMA_LOAD_MODE_MMAP, what, sizeof what), KVF_REFUSED);
    assert_non_null(strstr(what, "model.gguf"));
    assert_int_equal(attach_after(lead_elsewhere, true, LLAMA_LOAD_MODE_MMAP, what, sizeof what), KVF_REFUSED);
    assert_int_equal(attach_after(write_into, false, LLAMA_LOAD_MODE_MMAP, what, sizeof what), KVF_REFUSED);
    /* Not mapped, and so new that it may have come while another one of its name was being read. */
    assert_int_equal(attach_after(touch_beside, false, LLAMA_LOAD_MODE_NONE, what, sizeof what), KVF_REFUSED);
    assert_int_equal(attach_after(replace, false, LLAMA_LOAD_MODE_NONE, what, sizeof what), KVF_REFUSED);
    assert_int_equal(attach_after(lead_elsewhere, true, LLAMA_LOAD_MODE_NONE, what, sizeof what), KVF_REFUSED);
}

/* ---- under the shim: this program as the one that is served ---- */

#define STATE_AT 256

static int decode_some(struct llama_context *ctx, llama_seq_id seq, const llama_token *tokens, int first, int num,
                       bool output) {
    struct llama_batch batch = llama_batch_init(num, 0, 1);
    for (int i = 0; i < num; i++) {
        int32_t k = batch.n_tokens++;
        batch.token[k] = tokens[first + i];
        batch.pos[k] = first + i;
        batch.n_seq_id[k] = 1;
        batch.seq_id[k][0] = seq;
        batch.logits[k] = output && i + 1 == num;
    }
    int rc = llama_decode(ctx, batch);
    llama_batch_free(batch);
    return rc;
}

/* A prompt whose state is taken on the way. Then, "state-other": the rows are emptied, and computed anew one by one, as
 * generated tokens are, before the state is set again; "state-same": it is set over its own rows; "state-front": that
 * is all. Behind the state comes the rest. */
static int state_main(struct llama_context *ctx, const llama_token *tokens, const char *what) {
    const llama_state_seq_flags partial = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
    int rc = decode_some(ctx, 0, tokens, 0, STATE_AT, false);
    size_t size = llama_state_seq_get_size_ext(ctx, 0, partial);
    uint8_t *bytes = malloc(size);
    bool ok = rc == 0 && bytes != NULL && llama_state_seq_get_data_ext(ctx, bytes, size, 0, partial) == size;
    if (strcmp(what, "state-other") == 0) {
        ok = ok && llama_memory_seq_rm(llama_get_memory(ctx), 0, -1, -1);
        for (int i = 0; i < STATE_AT && ok; i++) {
            ok = decode_some(ctx, 0, tokens, i, 1, true) == 0;
        }
    }
    if (strcmp(what, "state-front") != 0) {
        ok = ok && llama_state_seq_set_data_ext(ctx, bytes, size, 0, partial) == size &&
             decode_some(ctx, 0, tokens, STATE_AT, (int)NUM - STATE_AT, true) == 0;
    }
    free(bytes);
    return ok ? 0 : 4;
}

static const char *taken[2]; /* FILE and MODEL */

static bool take_its_place(float progress, void *arg) {
    (void)progress;
    (void)arg;
    if (taken[0] != NULL && rename(taken[0], taken[1]) != 0) {
        return false;
    }
    taken[0] = NULL;
    return true;
}

/* "copy-front": a prompt, and generated tokens behind it; "copy-on": another sequence goes on from a copy of both. */
static int copy_main(struct llama_context *ctx, const llama_token *tokens, const char *what) {
    bool ok = decode_some(ctx, 0, tokens, 0, 100, true) == 0;
    for (int i = 100; i < STATE_AT && ok; i++) {
        ok = decode_some(ctx, 0, tokens, i, 1, true) == 0;
    }
    if (strcmp(what, "copy-on") == 0) {
        llama_memory_seq_cp(llama_get_memory(ctx), 0, 1, -1, -1);
        ok = ok && decode_some(ctx, 1, tokens, STATE_AT, (int)NUM - STATE_AT, true) == 0;
    }
    return ok ? 0 : 4;
}

/* argv: --child MODEL WHAT, where WHAT is plain; warm: the first tokens are a warm-up; scale=X: that attention scale;
 * replace=FILE: FILE comes in the model's place as soon as it is loaded; during=FILE: while it is; pointer: it is read
 * from an open file; state-..., copy-...: see above. Decodes one prompt. free: only loads and frees the model, without
 * mapping its file. */
static int child_main(char **argv) {
    const char *path = argv[2], *what = argv[3];
    settings s = settings_of();
    struct llama_model_kv_override o[] = {{.tag = LLAMA_KV_OVERRIDE_TYPE_FLOAT, .key = "granite.attention.scale"},
                                          {.key = ""}};
    llama_log_set(lab_quiet, NULL);
    if (strncmp(what, "scale=", 6) == 0) {
        o[0].val_f64 = atof(what + 6);
        s.model.kv_overrides = o;
    }
    if (strncmp(what, "during=", 7) == 0) {
        taken[0] = what + 7;
        taken[1] = path;
        s.model.progress_callback = take_its_place;
    }
    bool only_free = strcmp(what, "free") == 0;
    s.model.load_mode = only_free ? LLAMA_LOAD_MODE_NONE : s.model.load_mode;
    FILE *file = strcmp(what, "pointer") == 0 ? fopen(path, "rbe") : NULL;
    struct llama_model *model =
        file != NULL ? llama_model_load_from_file_ptr(file, s.model) : llama_model_load_from_file(path, s.model);
    if (strncmp(what, "replace=", 8) == 0 && rename(what + 8, path) != 0) {
        return 2;
    }
    if (only_free) {
        llama_model_free(model);
        return model != NULL ? 0 : 3;
    }
    struct llama_context *ctx = model != NULL ? llama_init_from_model(model, s.context) : NULL;
    if (ctx == NULL) {
        return 3;
    }
    llama_token *tokens = lab_prompt(NUM, 1);
    for (size_t i = 0; i < NUM; i++) {
        tokens[i] %= 128;
    }
    if (strcmp(what, "warm") == 0) {
        llama_set_warmup(ctx, true);
        (void)llama_decode(ctx, llama_batch_get_one(tokens, 2));
        llama_memory_clear(llama_get_memory(ctx), true);
        llama_set_warmup(ctx, false);
    }
    int rc = strncmp(what, "state-", 6) == 0  ? state_main(ctx, tokens, what)
             : strncmp(what, "copy-", 5) == 0 ? copy_main(ctx, tokens, what)
                                              : llama_decode(ctx, llama_batch_get_one(tokens, (int32_t)NUM));
    free(tokens);
    llama_free(ctx);
    llama_model_free(model);
    return rc == 0 ? 0 : 4;
}

/* The folders of the store: one by space, once something is stored in it. */
static size_t count_spaces(const site *at) {
    char path[250];
    size_t num = 0;
    snprintf(path, sizeof path, "%s/store/kvf1", at->dir);
    DIR *dir = opendir(path);
    for (struct dirent *e; dir != NULL && (e = readdir(dir)) != NULL;) {
        num += strlen(e->d_name) == 16 || strlen(e->d_name) == 64;
    }
    if (dir != NULL) {
        closedir(dir);
    }
    return num;
}

/* How many spaces there are afterwards. `portable`: only the identity tells computations apart, not their numbers. */
static size_t serve(const site *at, bool portable, const char *what) {
    char url[250];
    const char *kvferry = getenv("KVFERRY");
    snprintf(url, sizeof url, "file:%s/store", at->dir);
    pid_t pid = fork();
    if (pid == 0) {
        execl(kvferry, kvferry, "exec", "--store", url, "--quiet", "--block-tokens", "64",
              portable ? "--portable" : "--quiet", "--", self, "--child", at->path, what, (char *)NULL);
        _exit(127);
    }
    int status = 0;
    assert_true(pid > 0 && waitpid(pid, &status, 0) == pid);
    assert_int_equal(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 0);
    return count_spaces(at);
}

static void need_kvferry(void) {
    if (getenv("KVFERRY") == NULL) {
        skip();
    }
}

static void test_a_warm_up_makes_no_space_of_its_own(void **state) {
    (void)state;
    need_kvferry();
    site at = open_site();
    write_toy(&experts, 1, at.path);
    assert_int_equal(serve(&at, false, "plain"), 1);
    assert_int_equal(serve(&at, false, "warm"), 1);
    close_site(&at);
}

static void test_served_programs_with_other_metadata(void **state) {
    (void)state;
    need_kvferry();
    const toy granite = {"granite", false, {{NULL, 0}}, {{"logit_scale", 1}, {NULL, 0}}};
    site at = open_site();
    write_toy(&granite, 1, at.path);
    assert_int_equal(serve(&at, true, "scale=0.125"), 1);
    assert_int_equal(serve(&at, true, "scale=0.125"), 1);
    assert_int_equal(serve(&at, true, "scale=0.02"), 2);
    close_site(&at);
}

/* Read from an open file, which may be any. */
static void test_a_model_of_no_known_file_stores_nothing(void **state) {
    (void)state;
    need_kvferry();
    site at = open_site();
    assert_int_equal(serve(&at, true, "pointer"), 0);
    assert_int_equal(serve(&at, true, "plain"), 1);
    close_site(&at);
}

/* What is stored after the model's file was replaced belongs to the file that was loaded. */
static void test_a_file_replaced_under_a_served_program(void **state) {
    (void)state;
    need_kvferry();
    site at = open_site();
    char what[250], kept[250];
    snprintf(what, sizeof what, "replace=%s", at.other);
    snprintf(kept, sizeof kept, "%s/kept.gguf", at.dir);
    assert_int_equal(link(at.path, kept), 0);
    assert_int_equal(serve(&at, true, what), 1);
    assert_int_equal(serve(&at, true, "plain"), 2); /* the new file's own */
    assert_int_equal(rename(kept, at.path), 0);
    assert_int_equal(serve(&at, true, "plain"), 2); /* the old one's again */
    close_site(&at);
}

/* Which of the two was loaded is not known. */
static void test_a_file_replaced_while_it_is_loaded(void **state) {
    (void)state;
    need_kvferry();
    site at = open_site();
    char what[250];
    snprintf(what, sizeof what, "during=%s", at.other);
    assert_int_equal(serve(&at, true, what), 0);
    assert_int_equal(access(at.other, F_OK), -1);
    assert_int_equal(serve(&at, true, "plain"), 1);
    close_site(&at);
}

/* Identifying a file with 8 TiB of zeros at its end takes an hour or more. Freeing its model does not wait for that:
 * else this test ends at its time limit. */
static void test_freeing_a_model_does_not_wait_for_its_hash(void **state) {
    (void)state;
    need_kvferry();
    site at = open_site();
    if (truncate(at.path, (off_t)8 << 40) != 0) {
        close_site(&at);
        skip(); /* such a file system has no large files */
    }
    assert_int_equal(serve(&at, true, "free"), 0);
    close_site(&at);
}

/* How many records there are afterwards, in a store of its own. */
static size_t records_after(const toy *t, const char *what) {
    static char files[LAB_MAX_FILES][400];
    site at = open_site();
    char store[250];
    snprintf(store, sizeof store, "%s/store", at.dir);
    write_toy(t, 1, at.path);
    (void)serve(&at, true, what);
    size_t num = lab_list_files(store, files, 0);
    close_site(&at);
    return num;
}

/* A window's state is set over rows that were not computed as a cold run computes them: what follows is not stored. */
static void test_a_state_over_other_rows(void **state) {
    (void)state;
    need_kvferry();
    const toy window = WINDOW(32);
    size_t front = records_after(&window, "state-front");
    assert_true(front >= 4);
    assert_true(records_after(&window, "state-same") > front);
    assert_int_equal(records_after(&window, "state-other"), front);
}

/* Generated tokens are not cold, in a copy of their sequence either: nothing after them is stored. */
static void test_a_copy_of_generated_tokens(void **state) {
    (void)state;
    need_kvferry();
    size_t front = records_after(&plain, "copy-front");
    assert_true(front >= 1);
    assert_int_equal(records_after(&plain, "copy-on"), front);
}

int main(int argc, char **argv) {
    self = argv[0];
    if (argc == 4 && strcmp(argv[1], "--child") == 0) {
        return child_main(argv);
    }
    llama_log_set(lab_quiet, NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_setting),
        cmocka_unit_test(test_settings_of_the_environment),
        cmocka_unit_test(test_modes_that_are_set_after_the_attach),
        cmocka_unit_test(test_contexts_that_draft_are_refused),
        cmocka_unit_test(test_a_single_token_behind_the_blocks_is_not_stored),
        cmocka_unit_test(test_the_probe_sees_what_acts_between_tokens),
        cmocka_unit_test(test_the_probe_is_the_same_in_a_context_in_use),
        cmocka_unit_test(test_another_attention_scale_loads_nothing),
        cmocka_unit_test(test_yarn_by_an_override),
        cmocka_unit_test(test_another_file_names_nothing),
        cmocka_unit_test(test_a_clock_that_is_set_forward_after_the_load),
        cmocka_unit_test(test_another_folder_names_nothing),
        cmocka_unit_test(test_a_folder_that_was_written_to_after_it_took_the_name),
        cmocka_unit_test(test_a_warm_up_makes_no_space_of_its_own),
        cmocka_unit_test(test_served_programs_with_other_metadata),
        cmocka_unit_test(test_a_model_of_no_known_file_stores_nothing),
        cmocka_unit_test(test_a_file_replaced_under_a_served_program),
        cmocka_unit_test(test_a_file_replaced_while_it_is_loaded),
        cmocka_unit_test(test_freeing_a_model_does_not_wait_for_its_hash),
        cmocka_unit_test(test_a_state_over_other_rows),
        cmocka_unit_test(test_a_copy_of_generated_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
