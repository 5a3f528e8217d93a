/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry run: loads the model and makes the context, with llama.cpp.
 */
#include "run/run.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- what llama.cpp says ---- */

typedef struct watched {
    bool verbose;
    bool taken; /* the error is complete: later messages only follow from it */
    char error[200];
} watched;
static watched log_state;

/* Removes the function's name from a message such as "gguf_init_from_reader: invalid magic", which helps no user. */
static const char *skip_function(const char *text) {
    size_t len = strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_");
    return strncmp(text + len, ": ", 2) == 0 ? text + len + 2 : text;
}

static void on_llama_log(enum ggml_log_level level, const char *text, void *ctx) {
    watched *w = ctx;
    if (w->verbose) {
        fputs(text, stderr);
    }
    if (level == GGML_LOG_LEVEL_ERROR && !w->taken) {
        const char *what = skip_function(text);
        snprintf(w->error, sizeof w->error, "%.*s", (int)strcspn(what, "\n"), what);
        w->taken = w->error[0] != '\0';
    }
}

void kvfcli_watch_llama(bool verbose) {
    log_state = (watched){.verbose = verbose};
    llama_log_set(on_llama_log, &log_state);
}

const char *kvfcli_llama_error(void) {
    return log_state.error[0] != '\0' ? log_state.error : "llama.cpp can't use it, and does not say why";
}

/* ---- the file ---- */

static kvf_status bad_file(kvf_error *err, const char *path, const char *what) {
    err->status = KVF_LIMIT;
    snprintf(err->what, sizeof err->what, "%.160s: %.80s", path, what);
    return KVF_LIMIT;
}

kvf_status kvfcli_check_model_file(kvf_error *err, const char *path) {
    char magic[4] = "";
    struct stat info;
    FILE *in = fopen(path, "rb");
    if (in == NULL) {
        return bad_file(err, path, strerror(errno));
    }
    bool folder = fstat(fileno(in), &info) == 0 && S_ISDIR(info.st_mode);
    size_t len = folder ? 0 : fread(magic, 1, sizeof magic, in);
    fclose(in);
    if (folder) {
        return bad_file(err, path, "a folder, not a GGUF file");
    }
    if (len < sizeof magic || memcmp(magic, "GGUF", sizeof magic) != 0) {
        return bad_file(err, path, "not a GGUF file");
    }
    return KVF_OK;
}

/* ---- the model ---- */

static bool on_model_progress(float part, void *ctx) {
    kvfcli_engine *engine = ctx;
    kvfcli_progress_of(&engine->progress, "loading the model", (uint32_t)(part * 100), 100, " %");
    return !kvfcli_interrupted();
}

/* Models that this program can't run. */
static const char *unfit(const struct llama_model *model) {
    if (llama_model_has_encoder(model)) {
        return "it has an encoder; kvferry run needs a model with only a decoder";
    }
    if (!llama_model_has_decoder(model) || llama_model_is_diffusion(model)) {
        return "it does not generate text token by token";
    }
    if (llama_vocab_type(llama_model_get_vocab(model)) == LLAMA_VOCAB_TYPE_NONE) {
        return "it has no vocabulary";
    }
    return NULL;
}

int kvfcli_load_model(kvfcli_engine *engine, const kvfcli_run_options *options) {
    struct llama_model_params *params = &engine->model_params;
    int64_t began = kvfcli_now_us();
    *params = llama_model_default_params();
    params->progress_callback = on_model_progress;
    params->progress_callback_user_data = engine;
    kvfcli_watch_llama(options->verbose);
    kvfcli_progress_start(&engine->progress, options->quiet);
    engine->model = llama_model_load_from_file(options->model, *params);
    kvfcli_progress_end(&engine->progress);
    if (engine->model == NULL && kvfcli_interrupted()) {
        return KVFCLI_INTERRUPTED;
    }
    if (engine->model == NULL) {
        kvfcli_say("%s: not a usable model: %s", options->model, kvfcli_llama_error());
        return KVFCLI_INPUT;
    }
    const char *why = unfit(engine->model);
    if (why != NULL) {
        kvfcli_say("%s: %s", options->model, why);
        return KVFCLI_INPUT;
    }
    engine->vocab = llama_model_get_vocab(engine->model);
    engine->model_us = kvfcli_now_us() - began;
    return KVFCLI_FINE;
}

/* ---- the context ---- */

static int32_t num_cores(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) {
        return CPU_COUNT(&set);
    }
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int32_t)online : 1;
}

static bool on_abort(void *ctx) {
    (void)ctx;
    return kvfcli_interrupted();
}

/* The number of cells for the context: no more than necessary, because all are allocated and cleared. 0: the prompt is
 * too long. */
static uint32_t choose_size(const kvfcli_engine *engine, const kvfcli_run_options *options, size_t num_prompt,
                            uint32_t *num_answer) {
    int32_t trained = llama_model_n_ctx_train(engine->model);
    uint64_t limit = options->ctx_size > 0 ? options->ctx_size : (uint64_t)(trained > 0 ? trained : 4096);
    uint64_t need = (uint64_t)num_prompt + *num_answer;
    if (num_prompt >= limit) {
        return 0;
    }
    if (need > limit) {
        *num_answer = (uint32_t)(limit - num_prompt);
        need = limit;
    }
    if (options->ctx_size > 0) {
        return options->ctx_size;
    }
    /* One more is needed to attach. */
    uint64_t padded = (need + 1 + 255) / 256 * 256;
    return (uint32_t)(padded < limit ? padded : limit);
}

static int too_long(const kvfcli_engine *engine, const kvfcli_run_options *options, size_t num_prompt) {
    uint32_t size = options->ctx_size > 0 ? options->ctx_size : (uint32_t)llama_model_n_ctx_train(engine->model);
    const char *whose = options->ctx_size > 0 ? "of --ctx-size" : "the model was trained for";
    if (options->chat != NULL) {
        kvfcli_say("the chat \"%s\" with this question has %zu tokens and has outgrown the context of %u %s; continue "
                   "with another id, or start again with --restart",
                   options->chat, num_prompt, size, whose);
    } else {
        kvfcli_say("the prompt has %zu tokens, which leaves no room for an answer in the context of %u %s", num_prompt,
                   size, whose);
    }
    return KVFCLI_INPUT;
}

int kvfcli_make_context(kvfcli_engine *engine, const kvfcli_run_options *options, size_t num_prompt,
                        uint32_t *num_answer) {
    int64_t began = kvfcli_now_us();
    struct llama_context_params *params = &engine->params;
    *params = llama_context_default_params();
    params->n_ctx = choose_size(engine, options, num_prompt, num_answer);
    if (params->n_ctx == 0) {
        return too_long(engine, options, num_prompt);
    }
    params->n_seq_max = KVFCLI_NUM_SEQS;
    params->kv_unified = true;
    params->swa_full = false; /* a window's cache needs no more than the window */
    params->n_threads = options->threads > 0 ? (int32_t)options->threads : num_cores();
    params->n_threads_batch = params->n_threads;
    params->type_k = options->kv_type;
    params->type_v = options->kv_type;
    params->flash_attn_type = options->flash_attn;
    params->abort_callback = on_abort;
    kvfcli_watch_llama(options->verbose);
    engine->ctx = llama_init_from_model(engine->model, *params);
    if (engine->ctx == NULL) {
        kvfcli_say("no context of %u tokens: %s", params->n_ctx, kvfcli_llama_error());
        return KVFCLI_INPUT;
    }
    engine->context_us = kvfcli_now_us() - began;
    return KVFCLI_FINE;
}

/* ---- the store ---- */

void kvfcli_show_prefill(kvfcli_engine *engine, uint32_t done, uint32_t total) {
    kvfcli_progress_of(&engine->progress, "reading the prompt", done, total, " tokens");
}

static int on_prefill_progress(void *ctx, uint32_t done, uint32_t total) {
    kvfcli_engine *engine = ctx;
    kvfcli_show_prefill(engine, done, total);
    return kvfcli_interrupted();
}

void kvfcli_attach(kvfcli_engine *engine, kvf_store *store, const kvfcli_run_options *options) {
    kvf_error err = {.status = KVF_OK};
    int64_t began = kvfcli_now_us();
    const kvf_llama_options attach = {
        .struct_size = sizeof attach,
        .scratch_seq = KVFCLI_SCRATCH_SEQ,
        .model_path = options->model,
        .context_params = &engine->params,
        .model_params = &engine->model_params,
        .budget_us = KVF_MS(options->budget_ms),
        .portable = options->portable,
        .progress = on_prefill_progress,
        .progress_ctx = engine,
    };
    if (kvf_llama_attach(&engine->kv, &err, store, engine->ctx, &attach) != KVF_OK) {
        engine->kv = NULL;
        snprintf(engine->refused, sizeof engine->refused, "%s",
                 err.what[0] != '\0' ? err.what : kvf_status_name(err.status));
    }
    engine->attach_us = kvfcli_now_us() - began;
    if (engine->kv == NULL && store != NULL && !kvfcli_interrupted()) {
        kvfcli_say("nothing is loaded or stored: %s", engine->refused);
    }
}

void kvfcli_engine_cleanup(kvfcli_engine *engine) {
    kvf_llama_detach(engine->kv);
    llama_free(engine->ctx);
    llama_model_free(engine->model);
    *engine = (kvfcli_engine){.model = NULL};
}
