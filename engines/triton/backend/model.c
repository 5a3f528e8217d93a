/* SPDX-License-Identifier: Apache-2.0
 *
 * A model: its weights, and its store. The instances of a model share both.
 */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "triton/backend/backend.h"

#define DEFAULT_CONTEXT 4096u

/* ---- the file ---- */

static bool is_gguf(const char *name) {
    size_t len = strlen(name);
    return len > 5 && strcmp(name + len - 5, ".gguf") == 0;
}

/* The only GGUF file of a folder. */
static TRITONSERVER_Error *find_gguf(char **out, const char *folder) {
    DIR *dir = opendir(folder);
    size_t num = 0;
    struct dirent *entry;
    if (dir == NULL) {
        return kvfb_error(TRITONSERVER_ERROR_NOT_FOUND, "%s: %s", folder, strerror(errno));
    }
    while ((entry = readdir(dir)) != NULL) {
        if (is_gguf(entry->d_name) && num++ == 0 && asprintf(out, "%s/%s", folder, entry->d_name) < 0) {
            *out = NULL;
        }
    }
    closedir(dir);
    if (num != 1) {
        return kvfb_error(TRITONSERVER_ERROR_NOT_FOUND,
                          "%s has %zu files *.gguf; set the parameter \"model\" in config.pbtxt to the path of one",
                          folder, num);
    }
    return *out == NULL ? kvfb_no_memory() : NULL;
}

static TRITONSERVER_Error *find_file(kvfb_model *m) {
    TRITONBACKEND_ArtifactType type = TRITONBACKEND_ARTIFACT_FILESYSTEM;
    const char *repository = NULL, *named = m->config.model;
    char *folder = NULL;
    TRITONSERVER_Error *error = TRITONBACKEND_ModelRepository(m->triton, &type, &repository);
    if (error != NULL) {
        return error;
    }
    if (asprintf(&folder, "%s/%llu", repository, (unsigned long long)m->version) < 0) {
        return kvfb_no_memory();
    }
    if (named == NULL) {
        error = find_gguf(&m->path, folder);
    } else if (asprintf(&m->path, "%s%s%s", named[0] == '/' ? "" : folder, named[0] == '/' ? "" : "/", named) < 0) {
        m->path = NULL;
        error = kvfb_no_memory();
    }
    free(folder);
    return error;
}

/* ---- the weights ---- */

/* Models that do not generate text token by token. */
static const char *unfit(const struct llama_model *weights) {
    if (llama_model_has_encoder(weights)) {
        return "it has an encoder; kvferry needs a model with only a decoder";
    }
    if (!llama_model_has_decoder(weights) || llama_model_is_diffusion(weights)) {
        return "it does not generate text token by token";
    }
    return llama_vocab_type(llama_model_get_vocab(weights)) == LLAMA_VOCAB_TYPE_NONE ? "it has no vocabulary" : NULL;
}

/* The bytes of the longest token: no text of a prompt has more for each of its tokens. */
static size_t longest_piece(const struct llama_vocab *vocab) {
    size_t longest = 1;
    for (llama_token i = 0; i < llama_vocab_n_tokens(vocab); i++) {
        size_t len = strlen(llama_vocab_get_text(vocab, i));
        longest = len > longest ? len : longest;
    }
    return longest;
}

static TRITONSERVER_Error *load_weights(kvfb_model *m) {
    const char *note = NULL;
    m->params = llama_model_default_params();
    m->params.n_gpu_layers = (int32_t)m->config.gpu_layers;
    (void)kvfb_llama_error();
    m->weights = llama_model_load_from_file(m->path, m->params);
    if (m->weights == NULL) {
        return kvfb_error(TRITONSERVER_ERROR_INVALID_ARG, "%s: not a usable model: %s", m->path, kvfb_llama_error());
    }
    const char *why = unfit(m->weights);
    if (why != NULL) {
        return kvfb_error(TRITONSERVER_ERROR_UNSUPPORTED, "%s: %s", m->path, why);
    }
    int32_t trained = llama_model_n_ctx_train(m->weights);
    m->context = trained > 0 && (uint32_t)trained < DEFAULT_CONTEXT ? (uint32_t)trained : DEFAULT_CONTEXT;
    m->context = m->config.context > 0 ? m->config.context : m->context;
    m->vocab = llama_model_get_vocab(m->weights);
    m->max_text = (size_t)m->context * longest_piece(m->vocab);
    m->goes_back = !llama_model_is_recurrent(m->weights) && !llama_model_is_hybrid(m->weights) &&
                   llama_model_n_swa(m->weights) == 0;
    m->chat_template = kvfl_template_of(m->weights, &note);
    if (note != NULL) {
        kvfb_log(TRITONSERVER_LOG_WARN, "model %s: %s", m->name, note);
    }
    return NULL;
}

/* ---- the store ---- */

static TRITONSERVER_Error *open_store(kvfb_model *m) {
    const char *urls[KVFB_MAX_STORES];
    char *rest = m->config.store;
    size_t num = 0;
    kvf_error err = {.status = KVF_OK};
    const kvf_options options = {.struct_size = sizeof options,
                                 .secret_files = m->config.secret_file,
                                 .seal_sessions = m->config.secret_file != NULL,
                                 .backlog_bytes = (size_t)m->config.backlog_mb << 20};
    for (char *url = strtok_r(rest, " \t\n", &rest); url != NULL; url = strtok_r(NULL, " \t\n", &rest)) {
        if (num == KVFB_MAX_STORES) {
            return kvfb_error(TRITONSERVER_ERROR_INVALID_ARG, "config.pbtxt: parameter \"store\" has more than %u URLs",
                              KVFB_MAX_STORES);
        }
        urls[num++] = url;
    }
    if (num == 0) {
        return NULL;
    }
    kvf_status status = kvf_store_open(&m->store, &err, urls, num, &options);
    return status == KVF_OK ? NULL : kvfb_error_of("config.pbtxt: parameter \"store\"", status, &err);
}

/* ---- all of it ---- */

static TRITONSERVER_Error *open_model(kvfb_model *m) {
    TRITONSERVER_Error *error = TRITONBACKEND_ModelName(m->triton, &m->name);
    if (error == NULL) {
        error = TRITONBACKEND_ModelVersion(m->triton, &m->version);
    }
    if (error == NULL) {
        error = kvfb_config_complete(m->triton);
    }
    if (error == NULL) {
        error = kvfb_config_read(&m->config, m->triton);
    }
    if (error == NULL) {
        error = find_file(m);
    }
    if (error == NULL && m->config.store != NULL) {
        error = open_store(m);
    }
    return error == NULL ? load_weights(m) : error;
}

TRITONSERVER_Error *kvfb_model_open(kvfb_model **out, TRITONBACKEND_Model *triton) {
    kvfb_model *m = calloc(1, sizeof *m);
    if (m == NULL) {
        return kvfb_no_memory();
    }
    m->triton = triton;
    TRITONSERVER_Error *error = open_model(m);
    if (error != NULL) {
        kvfb_model_close(m);
        m = NULL;
    }
    *out = m;
    return error;
}

void kvfb_model_close(kvfb_model *m) {
    if (m == NULL) {
        return;
    }
    llama_model_free(m->weights);
    kvf_store_close(m->store);
    kvfb_config_cleanup(&m->config);
    free(m->path);
    free(m);
}
