/* SPDX-License-Identifier: Apache-2.0
 *
 * The inputs of a request, checked: whatever a client sends ends in a request that is right, or in an error that says
 * what is wrong. Triton has compared types and shapes with config.pbtxt before, but that file need not name a shape.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "triton/backend/backend.h"
#include "triton/backend/inputs.h"

#define MAX_STOP_BYTES 256u

const kvfb_input_kind kvfb_inputs[KVFB_NUM_INPUTS] = {
    [KVFB_TEXT_INPUT] = {"text_input", "STRING", TRITONSERVER_TYPE_BYTES, 1},
    [KVFB_INPUT_IDS] = {"input_ids", "INT32", TRITONSERVER_TYPE_INT32, -1},
    [KVFB_MESSAGES] = {"messages", "STRING", TRITONSERVER_TYPE_BYTES, 1},
    [KVFB_MAX_TOKENS] = {"max_tokens", "INT32", TRITONSERVER_TYPE_INT32, 1},
    [KVFB_TEMPERATURE] = {"temperature", "FP32", TRITONSERVER_TYPE_FP32, 1},
    [KVFB_TOP_K] = {"top_k", "INT32", TRITONSERVER_TYPE_INT32, 1},
    [KVFB_TOP_P] = {"top_p", "FP32", TRITONSERVER_TYPE_FP32, 1},
    [KVFB_MIN_P] = {"min_p", "FP32", TRITONSERVER_TYPE_FP32, 1},
    [KVFB_SEED] = {"seed", "UINT64", TRITONSERVER_TYPE_UINT64, 1},
    [KVFB_STOP] = {"stop", "STRING", TRITONSERVER_TYPE_BYTES, -1},
    [KVFB_SESSION_ID] = {"session_id", "STRING", TRITONSERVER_TYPE_BYTES, 1},
    [KVFB_TENANT] = {"tenant", "STRING", TRITONSERVER_TYPE_BYTES, 1},
    [KVFB_STREAM] = {"stream", "BOOL", TRITONSERVER_TYPE_BOOL, 1},
};

const kvfb_input_kind *kvfb_input_of(const char *name) {
    for (size_t i = 0; i < KVFB_NUM_INPUTS; i++) {
        if (strcmp(kvfb_inputs[i].name, name) == 0) {
            return &kvfb_inputs[i];
        }
    }
    return NULL;
}

static TRITONSERVER_Error *wrong(const char *name, const char *what) {
    return kvfb_error(TRITONSERVER_ERROR_INVALID_ARG, "input \"%s\": %s", name, what);
}

/* ---- the bytes of a tensor ---- */

typedef struct tensor {
    const kvfb_input_kind *kind;
    char *bytes; /* ends in NUL, which len does not count */
    size_t len;
    uint64_t num; /* elements */
} tensor;

/* Multiplies the shape, which a client may choose. */
static bool count_elements(tensor *t, const int64_t *shape, uint32_t num_dims) {
    t->num = 1;
    for (uint32_t i = 0; i < num_dims; i++) {
        if (shape[i] < 0 || __builtin_mul_overflow(t->num, (uint64_t)shape[i], &t->num)) {
            return false;
        }
    }
    return true;
}

static TRITONSERVER_Error *copy_bytes(tensor *t, TRITONBACKEND_Input *input, uint64_t bytes, uint32_t num_buffers) {
    t->bytes = bytes < SIZE_MAX ? malloc((size_t)bytes + 1) : NULL;
    if (t->bytes == NULL) {
        return kvfb_no_memory();
    }
    for (uint32_t i = 0; i < num_buffers; i++) {
        const void *buffer = NULL;
        uint64_t len = 0;
        int64_t id = 0;
        TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
        TRITONSERVER_Error *error = TRITONBACKEND_InputBuffer(input, i, &buffer, &len, &type, &id);
        if (error != NULL) {
            return error;
        }
        if (type == TRITONSERVER_MEMORY_GPU) {
            return wrong(t->kind->name, "it is in GPU memory; send it in CPU memory");
        }
        if (len > bytes - t->len) {
            return wrong(t->kind->name, "its buffers are longer than it says");
        }
        if (len > 0) {
            memcpy(t->bytes + t->len, buffer, (size_t)len);
        }
        t->len += (size_t)len;
    }
    t->bytes[t->len] = '\0';
    return t->len == bytes ? NULL : wrong(t->kind->name, "its buffers are shorter than it says");
}

static TRITONSERVER_Error *read_tensor(tensor *t, TRITONBACKEND_Input *input) {
    const char *name = NULL;
    const int64_t *shape = NULL;
    TRITONSERVER_DataType type = TRITONSERVER_TYPE_INVALID;
    uint32_t num_dims = 0, num_buffers = 0;
    uint64_t bytes = 0;
    *t = (tensor){.kind = NULL};
    TRITONSERVER_Error *error =
        TRITONBACKEND_InputProperties(input, &name, &type, &shape, &num_dims, &bytes, &num_buffers);
    if (error != NULL) {
        return error;
    }
    t->kind = kvfb_input_of(name);
    if (t->kind == NULL) {
        return wrong(name, "there is no such input");
    }
    if (type != t->kind->datatype) {
        return kvfb_error(TRITONSERVER_ERROR_INVALID_ARG, "input \"%s\" is of type %s, not %s", name, t->kind->type,
                          TRITONSERVER_DataTypeString(type));
    }
    if (!count_elements(t, shape, num_dims) || (t->kind->dims == 1 && t->num != 1)) {
        return wrong(name, "it has one element");
    }
    return copy_bytes(t, input, bytes, num_buffers);
}

/* ---- single values ---- */

static TRITONSERVER_Error *take_bytes(void *out, const tensor *t, size_t size) {
    if (t->len != size) {
        return wrong(t->kind->name, "its length does not fit its type");
    }
    memcpy(out, t->bytes, size);
    return NULL;
}

static TRITONSERVER_Error *take_float(float *out, const tensor *t, float least, bool with_least, float most) {
    TRITONSERVER_Error *error = take_bytes(out, t, sizeof *out);
    bool good = error == NULL && isfinite(*out) && (*out > least || (with_least && *out == least)) && *out <= most;
    if (error == NULL && !good) {
        error = kvfb_error(TRITONSERVER_ERROR_INVALID_ARG, "input \"%s\" is %s %g, at most %g; it was %g",
                           t->kind->name, with_least ? "at least" : "above", (double)least, (double)most, (double)*out);
    }
    return error;
}

static TRITONSERVER_Error *take_int(int32_t *out, const tensor *t) {
    TRITONSERVER_Error *error = take_bytes(out, t, sizeof *out);
    return error == NULL && *out < 0 ? wrong(t->kind->name, "it is 0 or more") : error;
}

static TRITONSERVER_Error *take_seed(uint32_t *out, const tensor *t) {
    uint64_t seed = 0;
    TRITONSERVER_Error *error = take_bytes(&seed, t, sizeof seed);
    uint32_t mixed = (uint32_t)(seed ^ (seed >> 32));
    *out = mixed == LLAMA_DEFAULT_SEED ? LLAMA_DEFAULT_SEED - 1 : mixed; /* which would mean a random one */
    return error;
}

static TRITONSERVER_Error *too_long(const tensor *t) {
    return wrong(t->kind->name, "it is longer than its elements");
}

/* The next element of a tensor of texts: its length, four bytes, and its bytes. */
static TRITONSERVER_Error *next_text(const tensor *t, size_t *at, const char **text, size_t *len) {
    uint32_t length = 0;
    if (t->len - *at < sizeof length) {
        return wrong(t->kind->name, "it ends inside an element");
    }
    memcpy(&length, t->bytes + *at, sizeof length);
    *at += sizeof length;
    if (length > t->len - *at) {
        return wrong(t->kind->name, "an element is longer than the input");
    }
    *text = t->bytes + *at;
    *len = length;
    *at += length;
    size_t good = kvfl_utf8_check(*text, *len);
    return good == *len ? NULL
                        : kvfb_error(TRITONSERVER_ERROR_INVALID_ARG, "input \"%s\" is not valid UTF-8 at byte %zu",
                                     t->kind->name, good);
}

static TRITONSERVER_Error *take_text(char **out, size_t *len, const tensor *t) {
    const char *text = NULL;
    size_t at = 0;
    TRITONSERVER_Error *error = next_text(t, &at, &text, len);
    if (error == NULL && at < t->len) {
        error = too_long(t);
    }
    if (error == NULL && *len == 0) {
        error = wrong(t->kind->name, "it is empty");
    }
    if (error == NULL) {
        *out = malloc(*len + 1);
        error = *out == NULL ? kvfb_no_memory() : NULL;
    }
    if (error == NULL) {
        memcpy(*out, text, *len);
        (*out)[*len] = '\0';
    }
    return error;
}

/* Text that is used as a C string. */
static TRITONSERVER_Error *take_name(char **out, const tensor *t, size_t most) {
    size_t len = 0;
    TRITONSERVER_Error *error = take_text(out, &len, t);
    if (error == NULL && (len > most || strlen(*out) != len)) {
        error = kvfb_error(TRITONSERVER_ERROR_INVALID_ARG, "input \"%s\" has 1 to %zu bytes, none of them zero",
                           t->kind->name, most);
    }
    return error;
}

static TRITONSERVER_Error *take_messages(kvfb_request *r, const tensor *t) {
    size_t len = 0;
    TRITONSERVER_Error *error = take_text(&r->messages, &len, t);
    return error == NULL && strlen(r->messages) != len ? wrong(t->kind->name, "it has a zero byte") : error;
}

static TRITONSERVER_Error *take_stops(kvfb_request *r, const tensor *t) {
    size_t at = 0;
    if (t->num > KVFB_MAX_STOPS) {
        return kvfb_error(TRITONSERVER_ERROR_INVALID_ARG, "input \"stop\" has at most %u texts", KVFB_MAX_STOPS);
    }
    for (uint64_t i = 0; i < t->num; i++) {
        const char *text = NULL;
        size_t len = 0;
        TRITONSERVER_Error *error = next_text(t, &at, &text, &len);
        if (error != NULL) {
            return error;
        }
        if (len == 0 || len > MAX_STOP_BYTES || memchr(text, '\0', len) != NULL) {
            return kvfb_error(TRITONSERVER_ERROR_INVALID_ARG,
                              "input \"stop\": each text has 1 to %u bytes, none of them zero", MAX_STOP_BYTES);
        }
        r->stops[r->num_stops] = strndup(text, len);
        if (r->stops[r->num_stops] == NULL) {
            return kvfb_no_memory();
        }
        r->num_stops++;
        r->longest_stop = len > r->longest_stop ? len : r->longest_stop;
    }
    return at == t->len ? NULL : too_long(t);
}

static TRITONSERVER_Error *take_ids(kvfb_request *r, const tensor *t) {
    const struct llama_vocab *vocab = r->instance->model->vocab;
    size_t num = t->len / sizeof(llama_token);
    if (num == 0 || t->len % sizeof(llama_token) != 0) {
        return wrong(t->kind->name, "it is empty, or its length does not fit its type");
    }
    if (!kvfl_tokens_add(&r->ids, (const llama_token *)(const void *)t->bytes, num)) {
        return kvfb_no_memory();
    }
    for (size_t i = 0; i < num; i++) {
        if (r->ids.ids[i] < 0 || r->ids.ids[i] >= llama_vocab_n_tokens(vocab)) {
            return kvfb_error(TRITONSERVER_ERROR_INVALID_ARG,
                              "input \"input_ids\": element %zu is %d, but the vocabulary has the ids 0 to %d", i,
                              r->ids.ids[i], llama_vocab_n_tokens(vocab) - 1);
        }
    }
    return NULL;
}

static TRITONSERVER_Error *take_tenant(const kvfb_request *r, const tensor *t) {
    char *tenant = NULL;
    const char *ours = r->instance->model->config.tenant;
    TRITONSERVER_Error *error = take_name(&tenant, t, KVF_MAX_ID_BYTES);
    if (error == NULL && (ours == NULL || strcmp(tenant, ours) != 0)) {
        error =
            kvfb_error(TRITONSERVER_ERROR_INVALID_ARG,
                       "input \"tenant\": this model serves %s%s; a tenant has a model of its own, with the parameter "
                       "\"tenant\" in config.pbtxt",
                       ours != NULL ? "the tenant " : "no tenant", ours != NULL ? ours : "");
    }
    free(tenant);
    return error;
}

static TRITONSERVER_Error *take_stream(kvfb_request *r, const tensor *t) {
    uint8_t stream = 0;
    TRITONSERVER_Error *error = take_bytes(&stream, t, sizeof stream);
    r->stream = stream != 0;
    if (error == NULL && r->stream && !r->instance->model->config.decoupled) {
        error = wrong("stream", "this model sends one response; set model_transaction_policy { decoupled: true }");
    }
    return error;
}

static TRITONSERVER_Error *take(kvfb_request *r, const tensor *t) {
    TRITONSERVER_Error *error = NULL;
    int32_t number = 0;
    switch ((kvfb_input)(t->kind - kvfb_inputs)) {
    case KVFB_TEXT_INPUT:
        return take_text(&r->text, &r->text_len, t);
    case KVFB_INPUT_IDS:
        return take_ids(r, t);
    case KVFB_MESSAGES:
        return take_messages(r, t);
    case KVFB_MAX_TOKENS:
        error = take_int(&number, t);
        r->max_tokens = (uint32_t)number;
        return error;
    case KVFB_TEMPERATURE:
        return take_float(&r->sampling.temperature, t, 0, true, 1000);
    case KVFB_TOP_K:
        return take_int(&r->sampling.top_k, t);
    case KVFB_TOP_P:
        return take_float(&r->sampling.top_p, t, 0, false, 1);
    case KVFB_MIN_P:
        return take_float(&r->sampling.min_p, t, 0, true, 1);
    case KVFB_SEED:
        return take_seed(&r->sampling.seed, t);
    case KVFB_STOP:
        return take_stops(r, t);
    case KVFB_SESSION_ID:
        return take_name(&r->session, t, KVF_MAX_ID_BYTES);
    case KVFB_TENANT:
        return take_tenant(r, t);
    case KVFB_STREAM:
        return take_stream(r, t);
    case KVFB_NUM_INPUTS:
        break;
    }
    return NULL;
}

static TRITONSERVER_Error *take_once(kvfb_request *r, const tensor *t, uint32_t *seen) {
    uint32_t bit = 1u << (t->kind - kvfb_inputs);
    if ((*seen & bit) != 0) {
        return wrong(t->kind->name, "it was sent twice");
    }
    *seen |= bit;
    return take(r, t);
}

/* ---- all of a request ---- */

static TRITONSERVER_Error *read_inputs(kvfb_request *r) {
    uint32_t num = 0, seen = 0; /* a bit for each input */
    TRITONSERVER_Error *error = TRITONBACKEND_RequestInputCount(r->triton, &num);
    for (uint32_t i = 0; i < num && error == NULL; i++) {
        TRITONBACKEND_Input *input = NULL;
        tensor t = {.bytes = NULL};
        error = TRITONBACKEND_RequestInputByIndex(r->triton, i, &input);
        if (error == NULL) {
            error = read_tensor(&t, input);
        }
        if (error == NULL) {
            error = take_once(r, &t, &seen);
        }
        free(t.bytes);
    }
    return error;
}

static TRITONSERVER_Error *read_outputs(kvfb_request *r) {
    uint32_t num = 0;
    TRITONSERVER_Error *error = TRITONBACKEND_RequestOutputCount(r->triton, &num);
    r->outputs = num == 0 ? (1u << KVFB_NUM_OUTPUTS) - 1 : 0;
    for (uint32_t i = 0; i < num && error == NULL; i++) {
        const char *name = NULL;
        error = TRITONBACKEND_RequestOutputName(r->triton, i, &name);
        for (size_t k = 0; k < KVFB_NUM_OUTPUTS && error == NULL; k++) {
            r->outputs |= strcmp(kvfb_outputs[k].name, name) == 0 ? 1u << k : 0;
        }
    }
    return error;
}

static TRITONSERVER_Error *check_together(const kvfb_request *r) {
    int prompts = (r->text != NULL) + (r->messages != NULL) + (r->ids.num > 0);
    if (prompts != 1) {
        return kvfb_error(
            TRITONSERVER_ERROR_INVALID_ARG,
            "the prompt is exactly one of the inputs \"text_input\", \"input_ids\" and \"messages\"; there "
            "%s %d",
            prompts == 1 ? "is" : "are", prompts);
    }
    if (r->session != NULL && r->text == NULL) {
        return wrong("session_id", "a session takes what is new as \"text_input\"");
    }
    if (r->session != NULL && strlen(r->text) != r->text_len) {
        return wrong("text_input", "a session takes text without zero bytes");
    }
    if (r->session != NULL && r->instance->model->store == NULL) {
        return wrong("session_id", "this model has no store; set the parameter \"store\" in config.pbtxt");
    }
    return NULL;
}

/* A timeout of a client may be any number. */
static uint64_t deadline_of(uint64_t now_ns, uint64_t timeout_us) {
    bool ever = timeout_us > 0 && timeout_us < (UINT64_MAX - now_ns) / 1000;
    return ever ? now_ns + timeout_us * 1000 : UINT64_MAX;
}

TRITONSERVER_Error *kvfb_request_read(kvfb_request **out, kvfb_instance *instance, TRITONBACKEND_Request *triton) {
    uint64_t timeout_us = 0;
    kvfb_request *r = *out = calloc(1, sizeof *r);
    if (r == NULL) {
        return kvfb_no_memory();
    }
    r->triton = triton;
    r->instance = instance;
    r->began_ns = kvfb_now_ns();
    r->max_tokens = instance->model->config.max_tokens;
    r->sampling = (kvfb_sampling){.top_p = 1, .seed = LLAMA_DEFAULT_SEED};
    TRITONSERVER_Error *error = TRITONBACKEND_ResponseFactoryNew(&r->factory, triton);
    if (error == NULL) {
        error = TRITONBACKEND_InferenceRequestTimeoutMicroseconds(triton, &timeout_us);
    }
    r->deadline_ns = deadline_of(r->began_ns, timeout_us);
    if (error == NULL) {
        error = read_outputs(r);
    }
    if (error == NULL) {
        error = read_inputs(r);
    }
    return error == NULL ? check_together(r) : error;
}

bool kvfb_request_is_cancelled(const kvfb_request *r) {
    bool cancelled = false;
    kvfb_drop(TRITONBACKEND_ResponseFactoryIsCancelled(r->factory, &cancelled));
    return cancelled;
}
