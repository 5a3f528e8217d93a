/* SPDX-License-Identifier: Apache-2.0
 *
 * LlamaEngine: the llama.cpp engine on a context of this process, by the libllama that is loaded.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ext.h"
#include "llama/engine.h"
#include "llama/late/late.h"

static PyTypeObject *engine_type;

static void close_engine(void *it) {
    kvf_llama_detach(it);
}

typedef struct engine_handle {
    kvfp_handle base;
    bool computing;
} engine_handle;

static const kvfp_kind engine_kind = {"LlamaEngine", sizeof(engine_handle), NULL, close_engine, NULL};

static kvfp_handle *enter(PyObject *self) {
    return kvfp_enter_object(self, engine_type, "LlamaEngine");
}

/* For calls that use the context: a context of llama.cpp is for one thread at a time. */
static engine_handle *enter_alone(PyObject *self) {
    engine_handle *engine = (engine_handle *)(void *)enter(self);
    if (engine != NULL && engine->computing) {
        kvfp_leave(&engine->base);
        PyErr_SetString(PyExc_RuntimeError,
                        "this LlamaEngine computes on another thread: a context of llama.cpp is for "
                        "one thread at a time, so use a lock, or a context for each thread");
        return NULL;
    }
    return engine;
}

/* ---- signals: Ctrl-C ends a long prefill after its batch. The thread of the call is the one that computes. */
static _Thread_local PyThreadState *computing;

static int check_signals(void *ctx, uint32_t done_tokens, uint32_t num_tokens) {
    (void)ctx;
    (void)done_tokens;
    (void)num_tokens;
    if (computing == NULL) {
        return 0;
    }
    PyEval_RestoreThread(computing);
    int stop = PyErr_CheckSignals();
    computing = PyEval_SaveThread();
    return stop;
}

/* ---- attaching */

/* The caller's bindings must pass the structs that this was compiled with. */
static bool check_sizes(Py_ssize_t model_params, Py_ssize_t context_params) {
    if (model_params != (Py_ssize_t)sizeof(struct llama_model_params) ||
        context_params != (Py_ssize_t)sizeof(struct llama_context_params)) {
        kvf_error err = {.status = KVF_REFUSED,
                         .what =
                             "the bindings describe the parameters of another llama.cpp than kvferry was built with"};
        kvfp_raise(KVF_REFUSED, &err, "");
        return false;
    }
    return true;
}

static kvf_status attach_named(kvf_llama **out, kvf_error *err, kvf_store *store, void *ctx,
                               const kvf_llama_options *options, const char *weights) {
    kvfl_model_name name = {.overrides = ""};
    snprintf(name.weights, sizeof name.weights, "%s", weights);
    return kvfl_describe_params(&name, options->model_params) ? kvfl_attach(out, err, store, ctx, options, &name)
                                                              : KVF_NOMEM;
}

static PyObject *attach(PyTypeObject *type, PyObject *store, void *library, void *ctx, const kvf_llama_options *options,
                        const char *weights) {
    kvfp_handle *of = kvfp_enter_object(store, kvfp_StoreType, "Store");
    kvf_llama *kv = NULL;
    kvf_error err = {0};
    PyObject *opened = NULL;
    if (of == NULL) {
        return NULL;
    }
    kvf_status status = kvfl_late_open(&err, library);
    if (status == KVF_OK) {
        Py_BEGIN_ALLOW_THREADS status = attach_named(&kv, &err, of->it, ctx, options, weights);
        Py_END_ALLOW_THREADS
    }
    if (status != KVF_OK) {
        kvfp_raise(status, &err, "the engine can't be attached");
    } else {
        kvfp_handle *handle = kvfp_handle_new(&engine_kind, kv, of, NULL);
        opened = handle == NULL ? NULL : kvfp_object_new(type, handle, store);
    }
    kvfp_leave(of);
    kvfp_log_tell();
    return opened;
}

/* An address, as ctypes has it; 0 is NULL. */
static int take_address(PyObject *from, void *out) {
    void *address = PyLong_AsVoidPtr(from);
    *(void **)out = address;
    return address != NULL || PyErr_Occurred() == NULL;
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"store",           "library",      "context",  "weights", "model_params",
                            "context_params",  "scratch",      "adapters", "tenant",  "secret",
                            "previous_secret", "block_tokens", "portable", "timeout", NULL};
    PyObject *store = NULL, *opened = NULL;
    void *library = NULL, *ctx = NULL;
    Py_buffer model_params = {0}, context_params = {0}, secret = {0}, previous = {0};
    kvf_llama_options o = {.struct_size = sizeof o, .progress = check_signals};
    const char *weights = NULL;
    unsigned int block_tokens = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO&O&s$O&O&izzO&O&IpO&:LlamaEngine", names, &store, take_address,
                                     &library, take_address, &ctx, &weights, kvfp_buffer, &model_params, kvfp_buffer,
                                     &context_params, &o.scratch_seq, &o.adapters, &o.tenant, kvfp_secret, &secret,
                                     kvfp_secret, &previous, &block_tokens, &o.portable, kvfp_timeout, &o.budget_us)) {
        return NULL;
    }
    if (library == NULL || ctx == NULL || strlen(weights) != 64) {
        kvfp_limit("library and context are addresses, not 0; weights are 64 hex digits");
    } else if (check_sizes(model_params.len, context_params.len)) {
        o.model_params = model_params.buf;
        o.context_params = context_params.buf;
        o.secret = secret.buf;
        o.secret_len = (size_t)secret.len;
        o.previous_secret = previous.buf;
        o.previous_secret_len = (size_t)previous.len;
        o.block_tokens = block_tokens;
        opened = attach(type, store, library, ctx, &o, weights);
    }
    PyBuffer_Release(&model_params);
    PyBuffer_Release(&context_params);
    PyBuffer_Release(&secret);
    PyBuffer_Release(&previous);
    return opened;
}

/* The fields that the engine reads. Bindings of another llama.cpp may have structs of the same size. */
typedef struct member {
    const char *name;
    size_t offset;
} member;
#define MODEL(field)   {#field, offsetof(struct llama_model_params, field)},
#define CONTEXT(field) {#field, offsetof(struct llama_context_params, field)},
static const member model_members[] = {MODEL(devices) MODEL(tensor_buft_overrides) MODEL(n_gpu_layers) MODEL(split_mode)
                                           MODEL(load_mode) MODEL(lazy_mode) MODEL(main_gpu) MODEL(tensor_split)
                                               MODEL(kv_overrides) MODEL(vocab_only) MODEL(use_extra_bufts)
                                                   MODEL(no_host) MODEL(no_alloc) MODEL(load_mtp)};
static const member context_members[] = {
    CONTEXT(n_ctx) CONTEXT(n_batch) CONTEXT(n_ubatch) CONTEXT(n_seq_max) CONTEXT(n_rs_seq) CONTEXT(n_outputs_max)
        CONTEXT(n_outputs_max_per_seq) CONTEXT(n_threads) CONTEXT(n_threads_batch) CONTEXT(ctx_type)
            CONTEXT(rope_scaling_type) CONTEXT(pooling_type) CONTEXT(attention_type) CONTEXT(flash_attn_type)
                CONTEXT(rope_freq_base) CONTEXT(rope_freq_scale) CONTEXT(yarn_ext_factor) CONTEXT(yarn_attn_factor)
                    CONTEXT(yarn_beta_fast) CONTEXT(yarn_beta_slow) CONTEXT(yarn_orig_ctx) CONTEXT(cb_eval)
                        CONTEXT(type_k) CONTEXT(type_v) CONTEXT(embeddings) CONTEXT(offload_kqv) CONTEXT(no_perf)
                            CONTEXT(op_offload) CONTEXT(swa_full) CONTEXT(kv_unified) CONTEXT(ctx_other)};

/* `layout` is a dict of names to offsets. */
static bool is_layout(PyObject *layout, const member *members, size_t num) {
    for (size_t i = 0; i < num; i++) {
        PyObject *offset = PyDict_GetItemString(layout, members[i].name);
        if (offset == NULL || PyLong_AsSize_t(offset) != members[i].offset) {
            PyErr_Clear();
            return false;
        }
    }
    return true;
}

#define IS_LAYOUT(layout, members) is_layout(layout, members, sizeof(members) / sizeof *(members))

/* Whether this library can be used, so that contexts are worth preparing for it. */
static PyObject *engine_takes(PyObject *unused, PyObject *args) {
    (void)unused;
    void *library = NULL;
    PyObject *model = NULL, *context = NULL;
    kvf_error err = {0};
    if (!PyArg_ParseTuple(args, "O&O!O!:takes", take_address, &library, &PyDict_Type, &model, &PyDict_Type, &context)) {
        return NULL;
    }
    return PyBool_FromLong(library != NULL && IS_LAYOUT(model, model_members) && IS_LAYOUT(context, context_members) &&
                           kvfl_late_open(&err, library) == KVF_OK);
}

/* ---- prompts */

/* kvf_llama takes token ids as int32. */
static bool take_prompt(uint32_t **out, size_t *num, PyObject *from) {
    if (!kvfp_take_tokens(out, num, from)) {
        return false;
    }
    for (size_t i = 0; i < *num; i++) {
        if ((*out)[i] > INT32_MAX) {
            kvfp_limit("tokens: number %zu is %lu, which is no token of llama.cpp", i, (unsigned long)(*out)[i]);
            PyMem_Free(*out);
            return false;
        }
    }
    return true;
}

static double seconds(int64_t us) {
    return (double)us / 1e6;
}

static PyObject *report_dict(const kvf_llama_report *r) {
    return Py_BuildValue(
        "{s:I,s:I,s:I,s:I,s:I,s:K,s:I,s:I,s:I,s:s,s:N,s:d,s:d,s:d,s:d,s:d,s:d,s:d}", "num_tokens", r->num_tokens,
        "resident_tokens", r->resident_tokens, "loaded_tokens", r->loaded_tokens, "computed_tokens", r->computed_tokens,
        "stored_tokens", r->stored_tokens, "loaded_bytes", (unsigned long long)r->loaded_bytes, "saved_blocks",
        r->saved_blocks, "known_blocks", r->known_blocks, "shed_blocks", r->shed_blocks, "plan",
        kvf_llama_plan_name(r->plan), "why", kvfp_reason(r->why), "match_s", seconds(r->match_us), "load_s",
        seconds(r->load_us), "import_s", seconds(r->import_us), "compute_s", seconds(r->compute_us), "export_s",
        seconds(r->export_us), "waited_s", seconds(r->waited_us), "store_bytes_per_s", r->store_bytes_per_s);
}

static PyObject *prefill(kvf_llama *kv, const uint32_t *tokens, size_t num) {
    kvf_llama_report report = {.struct_size = sizeof report};
    kvf_error err = {0};
    computing = PyEval_SaveThread();
    kvf_status status = kvf_llama_prefill(kv, &report, &err, 0, (const llama_token *)tokens, num);
    PyThreadState *state = computing;
    computing = NULL;
    PyEval_RestoreThread(state);
    if (status != KVF_OK) {
        return PyErr_Occurred() != NULL ? NULL : kvfp_raise(status, &err, "the prompt could not be computed");
    }
    return report_dict(&report);
}

static PyObject *engine_prefill(PyObject *self, PyObject *from) {
    uint32_t *tokens = NULL;
    size_t num = 0;
    PyObject *report = NULL;
    if (!take_prompt(&tokens, &num, from)) {
        return NULL;
    }
    engine_handle *engine = enter_alone(self);
    if (engine != NULL) {
        engine->computing = true;
        report = prefill(engine->base.it, tokens, num);
        engine->computing = false;
        kvfp_leave(&engine->base);
    }
    PyMem_Free(tokens);
    kvfp_log_tell();
    return report;
}

/* How many of the first tokens are stored in whole blocks. */
static size_t count_stored(kvf_llama *kv, const uint32_t *tokens, size_t num) {
    kvf_space *space = kvf_llama_space(kv);
    size_t per_block = space != NULL ? kvf_space_block_tokens(space) : 1, run = 0;
    size_t cap = num / per_block;
    kvf_key *keys = space != NULL ? malloc(cap * sizeof *keys + 1) : NULL;
    if (keys != NULL) {
        cap = kvf_chain(space, keys, cap, tokens, num);
        if (kvf_match(space, &run, NULL, keys, cap, KVF_LOOKUP_US) != KVF_OK) {
            run = 0;
        }
    }
    free(keys);
    return run * per_block;
}

static PyObject *engine_stored(PyObject *self, PyObject *from) {
    uint32_t *tokens = NULL;
    size_t num = 0;
    PyObject *stored = NULL;
    if (!take_prompt(&tokens, &num, from)) {
        return NULL;
    }
    kvfp_handle *engine = enter(self);
    if (engine != NULL) {
        kvfp_wait wait;
        kvfp_wait_begin(&wait);
        size_t run = count_stored(engine->it, tokens, num);
        stored = kvfp_wait_end(&wait) ? PyLong_FromSize_t(run) : NULL;
        kvfp_leave(engine);
    }
    PyMem_Free(tokens);
    return stored;
}

static PyObject *engine_cut(PyObject *self, PyObject *from) {
    size_t num = PyLong_AsSize_t(from);
    if (num == (size_t)-1 && PyErr_Occurred() != NULL) {
        return NULL;
    }
    engine_handle *engine = enter_alone(self);
    if (engine == NULL) {
        return NULL;
    }
    PyObject *cut = PyLong_FromSize_t(kvf_llama_cut(engine->base.it, num));
    kvfp_leave(&engine->base);
    return cut;
}

/* ---- the type */
static PyMethodDef methods[] = {
    {"takes", engine_takes, METH_VARARGS | METH_STATIC, "Whether this libllama can be used."},
    {"prefill", engine_prefill, METH_O,
     "Makes sequence 0 hold the prompt; returns what was done. RuntimeError: another thread is in it."},
    {"stored", engine_stored, METH_O, "How many of the first tokens are stored in whole blocks."},
    {"cut", engine_cut, METH_O, "Where a prompt of that many tokens is cut."},
    KVFP_COMMON_METHODS,
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getters[] = {
    {"closed", kvfp_object_closed, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, engine_new},
    {Py_tp_dealloc, kvfp_object_dealloc},
    {Py_tp_traverse, kvfp_object_traverse},
    {Py_tp_clear, kvfp_object_clear},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {0, NULL},
};

static PyType_Spec spec = {"kvferry._kvferry.LlamaEngine", sizeof(kvfp_object), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

bool kvfp_llama_init(PyObject *module) {
    engine_type = kvfp_add_type(module, &spec);
    return engine_type != NULL;
}
