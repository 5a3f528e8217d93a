/* SPDX-License-Identifier: Apache-2.0
 *
 * The stub of the Triton server: models, instances, requests and responses; messages, parameters and metrics.
 */
#include "host.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_INPUTS  16u
#define MAX_OUTPUTS 16u

static void broken(const char *what) {
    fprintf(stderr, "a rule of Triton is broken: %s\n", what);
    abort();
}

static void *copy_of(const void *data, size_t len) {
    char *copy = host_calloc(1, len + 1);
    if (copy == NULL) {
        abort();
    }
    memcpy(copy, data, len);
    return copy;
}

/* ---- messages, parameters, metrics ------------------------------------------------------------------------------- */

struct TRITONSERVER_Message {
    char *text;
};

TRITONSERVER_Error *TRITONSERVER_MessageNewFromSerializedJson(TRITONSERVER_Message **out, const char *base,
                                                              size_t len) {
    HOST_CALL();
    *out = host_new(HOST_MESSAGE, sizeof **out);
    (*out)->text = copy_of(base, len);
    return NULL;
}

/* What takes something back does so also where it fails: a caller can do no more. */
TRITONSERVER_Error *TRITONSERVER_MessageDelete(TRITONSERVER_Message *message) {
    free(message->text);
    host_delete(HOST_MESSAGE, message);
    HOST_CALL();
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_MessageSerializeToJson(TRITONSERVER_Message *message, const char **base, size_t *len) {
    HOST_CALL();
    *base = message->text;
    *len = strlen(message->text);
    return NULL;
}

struct TRITONSERVER_Parameter {
    int unused;
};

TRITONSERVER_Parameter *TRITONSERVER_ParameterNew(const char *name, TRITONSERVER_ParameterType type,
                                                  const void *value) {
    (void)name, (void)type, (void)value;
    return host_new(HOST_PARAMETER, sizeof(TRITONSERVER_Parameter));
}

void TRITONSERVER_ParameterDelete(TRITONSERVER_Parameter *parameter) {
    host_delete(HOST_PARAMETER, parameter);
}

struct TRITONSERVER_MetricFamily {
    long num;
};

struct TRITONSERVER_Metric {
    TRITONSERVER_MetricFamily *family;
};

TRITONSERVER_Error *TRITONSERVER_MetricFamilyNew(TRITONSERVER_MetricFamily **out, TRITONSERVER_MetricKind kind,
                                                 const char *name, const char *description) {
    (void)kind, (void)name, (void)description;
    HOST_CALL();
    *out = host_new(HOST_FAMILY, sizeof **out);
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_MetricFamilyDelete(TRITONSERVER_MetricFamily *family) {
    if (family->num != 0) {
        broken("a family of metrics is deleted before its metrics");
    }
    host_delete(HOST_FAMILY, family);
    HOST_CALL();
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_MetricNew(TRITONSERVER_Metric **out, TRITONSERVER_MetricFamily *family,
                                           const TRITONSERVER_Parameter **labels, uint64_t num) {
    (void)labels, (void)num;
    HOST_CALL();
    *out = host_new(HOST_METRIC, sizeof **out);
    (*out)->family = family;
    family->num++;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_MetricDelete(TRITONSERVER_Metric *metric) {
    metric->family->num--;
    host_delete(HOST_METRIC, metric);
    HOST_CALL();
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_MetricIncrement(TRITONSERVER_Metric *metric, double value) {
    (void)metric;
    if (value < 0) {
        broken("a counter is decremented");
    }
    HOST_CALL();
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_MetricSet(TRITONSERVER_Metric *metric, double value) {
    (void)metric, (void)value;
    HOST_CALL();
    return NULL;
}

const char *TRITONSERVER_DataTypeString(TRITONSERVER_DataType type) {
    (void)type;
    return "a type";
}

/* ---- models and instances ---------------------------------------------------------------------------------------- */

struct TRITONBACKEND_Model {
    char *config, *folder;
    void *state;
};

struct TRITONBACKEND_ModelInstance {
    TRITONBACKEND_Model *model;
    void *state;
};

TRITONBACKEND_Model *host_model(const char *config, const char *folder) {
    TRITONBACKEND_Model *model = copy_of(&(TRITONBACKEND_Model){NULL, NULL, NULL}, sizeof *model);
    model->config = copy_of(config, strlen(config));
    model->folder = copy_of(folder, strlen(folder));
    return model;
}

void host_model_free(TRITONBACKEND_Model *model) {
    free(model->config), free(model->folder), free(model);
}

TRITONBACKEND_ModelInstance *host_instance(TRITONBACKEND_Model *model) {
    return copy_of(&(TRITONBACKEND_ModelInstance){model, NULL}, sizeof(TRITONBACKEND_ModelInstance));
}

void host_instance_free(TRITONBACKEND_ModelInstance *instance) {
    free(instance);
}

TRITONSERVER_Error *TRITONBACKEND_ApiVersion(uint32_t *major, uint32_t *minor) {
    HOST_CALL();
    *major = host_version.backend_major;
    *minor = host_version.backend_minor;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelName(TRITONBACKEND_Model *model, const char **name) {
    (void)model;
    HOST_CALL();
    *name = "model";
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelVersion(TRITONBACKEND_Model *model, uint64_t *version) {
    (void)model;
    HOST_CALL();
    *version = 1;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelRepository(TRITONBACKEND_Model *model, TRITONBACKEND_ArtifactType *type,
                                                  const char **location) {
    HOST_CALL();
    *type = TRITONBACKEND_ARTIFACT_FILESYSTEM;
    *location = model->folder;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelConfig(TRITONBACKEND_Model *model, uint32_t version,
                                              TRITONSERVER_Message **out) {
    (void)version;
    HOST_CALL();
    *out = host_new(HOST_MESSAGE, sizeof **out);
    (*out)->text = copy_of(model->config, strlen(model->config));
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelAutoCompleteConfig(TRITONBACKEND_Model *model, bool *wanted) {
    (void)model;
    HOST_CALL();
    *wanted = true;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelSetConfig(TRITONBACKEND_Model *model, uint32_t version,
                                                 TRITONSERVER_Message *message) {
    (void)version;
    HOST_CALL();
    free(model->config);
    model->config = copy_of(message->text, strlen(message->text));
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelState(TRITONBACKEND_Model *model, void **state) {
    HOST_CALL();
    *state = model->state;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelSetState(TRITONBACKEND_Model *model, void *state) {
    HOST_CALL();
    model->state = state;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceName(TRITONBACKEND_ModelInstance *instance, const char **name) {
    (void)instance;
    HOST_CALL();
    *name = "model_0";
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceModel(TRITONBACKEND_ModelInstance *instance,
                                                     TRITONBACKEND_Model **model) {
    HOST_CALL();
    *model = instance->model;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceState(TRITONBACKEND_ModelInstance *instance, void **state) {
    HOST_CALL();
    *state = instance->state;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceSetState(TRITONBACKEND_ModelInstance *instance, void *state) {
    HOST_CALL();
    instance->state = state;
    return NULL;
}

/* ---- requests ---------------------------------------------------------------------------------------------------- */

struct TRITONBACKEND_Input {
    host_input is;
    host_lie lie;
    int64_t num;
    TRITONBACKEND_Request *request;
};

struct TRITONBACKEND_Request {
    TRITONBACKEND_Input inputs[MAX_INPUTS];
    uint32_t num;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_cancelled;
    uint64_t timeout;
    host_outcome outcome;
};

static void must_be_held(TRITONBACKEND_Request *r) {
    pthread_mutex_lock(&r->lock);
    if (r->outcome.is_released) {
        broken("a request is used after its release");
    }
    pthread_mutex_unlock(&r->lock);
}

TRITONBACKEND_Request *host_request(const host_input *inputs, uint32_t num) {
    TRITONBACKEND_Request *r = host_calloc(1, sizeof *r);
    if (r == NULL || num > MAX_INPUTS) {
        abort();
    }
    for (uint32_t i = 0; i < num; i++) {
        const bool is_text = inputs[i].type == TRITONSERVER_TYPE_BYTES;
        const uint32_t len = (uint32_t)inputs[i].len;
        char *data = host_calloc(1, sizeof len + len + 1);
        if (data == NULL) {
            abort();
        }
        memcpy(data, &len, is_text ? sizeof len : 0);
        memcpy(data + (is_text ? sizeof len : 0), inputs[i].data, len);
        r->inputs[i] = (TRITONBACKEND_Input){.is = inputs[i], .num = 1, .request = r};
        r->inputs[i].is.data = data;
        r->inputs[i].is.len = is_text ? sizeof len + len : len;
        r->inputs[i].num = inputs[i].type == TRITONSERVER_TYPE_INT32 ? (int64_t)(len / sizeof(int32_t)) : 1;
    }
    r->num = num;
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->changed, NULL);
    return r;
}

static bool is_over(const host_outcome *o) {
    return o->num_finals > 0 && o->is_released;
}

bool host_request_wait(TRITONBACKEND_Request *r, host_outcome *out, int seconds) {
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += seconds;
    pthread_mutex_lock(&r->lock);
    int late = 0;
    while (!is_over(&r->outcome) && late == 0) {
        late = pthread_cond_timedwait(&r->changed, &r->lock, &end);
    }
    *out = r->outcome;
    pthread_mutex_unlock(&r->lock);
    return is_over(out);
}

void host_request_cancel(TRITONBACKEND_Request *r) {
    pthread_mutex_lock(&r->lock);
    r->is_cancelled = true;
    pthread_mutex_unlock(&r->lock);
}

void host_request_lie(TRITONBACKEND_Request *r, uint32_t input, const host_lie *lie) {
    TRITONBACKEND_Input *in = &r->inputs[input];
    in->lie = *lie;
    if (lie->raw) {
        in->is.len -= sizeof(uint32_t);
        memmove((char *)(uintptr_t)in->is.data, (const char *)in->is.data + sizeof(uint32_t), in->is.len);
    }
}

void host_request_timeout(TRITONBACKEND_Request *r, uint64_t microseconds) {
    r->timeout = microseconds;
}

void host_request_free(TRITONBACKEND_Request *r) {
    for (uint32_t i = 0; i < r->num; i++) {
        free((void *)(uintptr_t)r->inputs[i].is.data);
    }
    pthread_mutex_destroy(&r->lock);
    pthread_cond_destroy(&r->changed);
    free(r);
}

TRITONSERVER_Error *TRITONBACKEND_RequestInputCount(TRITONBACKEND_Request *r, uint32_t *count) {
    must_be_held(r);
    HOST_CALL();
    *count = r->num;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_RequestInputByIndex(TRITONBACKEND_Request *r, uint32_t index,
                                                      TRITONBACKEND_Input **input) {
    must_be_held(r);
    HOST_CALL();
    *input = &r->inputs[index];
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_InputProperties(TRITONBACKEND_Input *input, const char **name,
                                                  TRITONSERVER_DataType *type, const int64_t **shape, uint32_t *dims,
                                                  uint64_t *bytes, uint32_t *num_buffers) {
    must_be_held(input->request);
    HOST_CALL();
    *name = input->is.name;
    *type = input->is.type;
    *shape = input->lie.num != 0 ? &input->lie.num : &input->num;
    *dims = 1;
    *bytes = input->lie.claimed > 0 ? input->lie.claimed : input->is.len;
    *num_buffers = input->lie.num_buffers > 0 ? input->lie.num_buffers : 1;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_InputBuffer(TRITONBACKEND_Input *input, uint32_t index, const void **buffer,
                                              uint64_t *bytes, TRITONSERVER_MemoryType *type, int64_t *id) {
    must_be_held(input->request);
    HOST_CALL();
    const uint64_t num = input->lie.num_buffers > 0 ? input->lie.num_buffers : 1;
    const uint64_t from = input->is.len * index / num, to = input->is.len * (index + 1) / num;
    *buffer = (const char *)input->is.data + from;
    *bytes = to - from;
    *type = input->lie.memory;
    *id = 0;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_RequestOutputCount(TRITONBACKEND_Request *r, uint32_t *count) {
    must_be_held(r);
    HOST_CALL();
    *count = 0;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_RequestOutputName(TRITONBACKEND_Request *r, uint32_t index, const char **name) {
    (void)r, (void)index, (void)name;
    return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG, "there is no such output");
}

TRITONSERVER_Error *TRITONBACKEND_InferenceRequestTimeoutMicroseconds(TRITONBACKEND_Request *r, uint64_t *timeout) {
    must_be_held(r);
    HOST_CALL();
    *timeout = r->timeout;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_RequestRelease(TRITONBACKEND_Request *r, uint32_t flags) {
    (void)flags;
    must_be_held(r);
    TRITONSERVER_Error *injected = host_call(__func__);
    pthread_mutex_lock(&r->lock);
    r->outcome.is_released = injected == NULL;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
    return injected;
}

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceReportStatistics(TRITONBACKEND_ModelInstance *instance,
                                                                TRITONBACKEND_Request *r, bool success, uint64_t begin,
                                                                uint64_t compute_begin, uint64_t compute_end,
                                                                uint64_t end) {
    (void)instance, (void)success;
    must_be_held(r);
    if (begin > compute_begin || compute_begin > compute_end || compute_end > end) {
        broken("the times of a request are not in order");
    }
    HOST_CALL();
    return NULL;
}

/* ---- responses --------------------------------------------------------------------------------------------------- */

struct TRITONBACKEND_ResponseFactory {
    TRITONBACKEND_Request *request;
};

struct TRITONBACKEND_Output {
    char name[64];
    char *buffer;
    size_t bytes;
};

struct TRITONBACKEND_Response {
    TRITONBACKEND_Request *request;
    TRITONBACKEND_Output outputs[MAX_OUTPUTS];
    uint32_t num;
};

static void finish(TRITONBACKEND_Request *r, uint32_t flags) {
    if (r->outcome.num_finals > 0) {
        broken("something comes after the final response");
    }
    r->outcome.num_finals += (flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL) != 0;
    pthread_cond_broadcast(&r->changed);
}

TRITONSERVER_Error *TRITONBACKEND_ResponseFactoryNew(TRITONBACKEND_ResponseFactory **out, TRITONBACKEND_Request *r) {
    must_be_held(r);
    HOST_CALL();
    *out = host_new(HOST_FACTORY, sizeof **out);
    (*out)->request = r;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ResponseFactoryDelete(TRITONBACKEND_ResponseFactory *factory) {
    host_delete(HOST_FACTORY, factory);
    HOST_CALL();
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ResponseFactoryIsCancelled(TRITONBACKEND_ResponseFactory *factory, bool *cancelled) {
    HOST_CALL();
    pthread_mutex_lock(&factory->request->lock);
    *cancelled = factory->request->is_cancelled;
    pthread_mutex_unlock(&factory->request->lock);
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ResponseFactorySendFlags(TRITONBACKEND_ResponseFactory *factory, uint32_t flags) {
    HOST_CALL();
    pthread_mutex_lock(&factory->request->lock);
    finish(factory->request, flags);
    pthread_mutex_unlock(&factory->request->lock);
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ResponseNewFromFactory(TRITONBACKEND_Response **out,
                                                         TRITONBACKEND_ResponseFactory *factory) {
    HOST_CALL();
    *out = host_new(HOST_RESPONSE, sizeof **out);
    (*out)->request = factory->request;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ResponseNew(TRITONBACKEND_Response **out, TRITONBACKEND_Request *r) {
    must_be_held(r);
    HOST_CALL();
    *out = host_new(HOST_RESPONSE, sizeof **out);
    (*out)->request = r;
    return NULL;
}

static void free_response(TRITONBACKEND_Response *response) {
    for (uint32_t i = 0; i < response->num; i++) {
        free(response->outputs[i].buffer);
    }
    host_delete(HOST_RESPONSE, response);
}

TRITONSERVER_Error *TRITONBACKEND_ResponseDelete(TRITONBACKEND_Response *response) {
    free_response(response);
    HOST_CALL();
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ResponseOutput(TRITONBACKEND_Response *response, TRITONBACKEND_Output **out,
                                                 const char *name, TRITONSERVER_DataType type, const int64_t *shape,
                                                 uint32_t dims) {
    (void)type, (void)shape, (void)dims;
    HOST_CALL();
    *out = &response->outputs[response->num++];
    snprintf((*out)->name, sizeof(*out)->name, "%s", name);
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_OutputBuffer(TRITONBACKEND_Output *output, void **buffer, uint64_t bytes,
                                               TRITONSERVER_MemoryType *type, int64_t *id) {
    HOST_CALL();
    *buffer = output->buffer = host_calloc(1, bytes + 1);
    output->bytes = bytes;
    *type = TRITONSERVER_MEMORY_CPU;
    *id = 0;
    return NULL;
}

static void note_outputs(host_outcome *o, const TRITONBACKEND_Response *response) {
    for (uint32_t i = 0; i < response->num; i++) {
        const TRITONBACKEND_Output *output = &response->outputs[i];
        if (output->buffer == NULL) {
            broken("a response is sent with an output that has no buffer");
        }
        if (strcmp(output->name, "text_output") == 0) {
            size_t used = strlen(o->text);
            snprintf(o->text + used, sizeof o->text - used, "%s", output->buffer + sizeof(uint32_t));
        } else if (strcmp(output->name, "session_stored") == 0) {
            o->session_stored = output->buffer[0] != 0;
        } else if (strcmp(output->name, "prompt_tokens") == 0) {
            memcpy(&o->prompt_tokens, output->buffer, sizeof o->prompt_tokens);
        }
    }
}

/* It takes the response also where it fails, and nothing of it arrives then. */
TRITONSERVER_Error *TRITONBACKEND_ResponseSend(TRITONBACKEND_Response *response, uint32_t flags,
                                               TRITONSERVER_Error *error) {
    TRITONSERVER_Error *injected = host_call(__func__);
    TRITONBACKEND_Request *r = response->request;
    if (injected == NULL) {
        pthread_mutex_lock(&r->lock);
        r->outcome.num_responses++;
        if (error != NULL) {
            r->outcome.num_errors++;
            snprintf(r->outcome.error, sizeof r->outcome.error, "%s", TRITONSERVER_ErrorMessage(error));
        } else {
            note_outputs(&r->outcome, response);
        }
        finish(r, flags);
        pthread_mutex_unlock(&r->lock);
    }
    free_response(response);
    return injected;
}
