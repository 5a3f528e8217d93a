/* SPDX-License-Identifier: Apache-2.0
 *
 * A backend for tests of the response cache: OUT = 2 * IN + bias, `copies` times (both are parameters of the model); COUNT = how many
 * requests this process has computed. So an answer shows whether it was computed again. A negative IN[0] is answered by an error.
 */
#include <jansson.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "triton/abi/backend.h"

static atomic_llong count;

typedef struct toy {
    float bias;
    size_t copies;
} toy;

#define TRY(call)                            \
    do {                                     \
        TRITONSERVER_Error *failed = (call); \
        if (failed != NULL) {                \
            return failed;                   \
        }                                    \
    } while (0)

static void forget(TRITONSERVER_Error *error) {
    if (error != NULL) {
        TRITONSERVER_ErrorDelete(error);
    }
}

TRITONSERVER_Error *TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model *model) {
    TRITONSERVER_Message *message;
    const char *text;
    size_t len;
    toy *state = calloc(1, sizeof *state);
    TRY(TRITONBACKEND_ModelConfig(model, 1, &message));
    TRY(TRITONSERVER_MessageSerializeToJson(message, &text, &len));
    json_t *config = json_loadb(text, len, 0, NULL);
    const char *bias = "0", *copies = "1";
    json_unpack(config, "{s:{s:{s:s}}}", "parameters", "bias", "string_value", &bias);
    json_unpack(config, "{s:{s:{s:s}}}", "parameters", "copies", "string_value", &copies);
    *state = (toy){strtof(bias, NULL), strtoul(copies, NULL, 10)};
    json_decref(config);
    forget(TRITONSERVER_MessageDelete(message));
    return TRITONBACKEND_ModelSetState(model, state);
}

TRITONSERVER_Error *TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model *model) {
    void *state = NULL;
    TRY(TRITONBACKEND_ModelState(model, &state));
    free(state);
    return NULL;
}

static TRITONSERVER_Error *add_output(TRITONBACKEND_Response *response, const char *name, TRITONSERVER_DataType type,
                                      int64_t num, uint64_t bytes, void **data) {
    TRITONBACKEND_Output *output;
    TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
    int64_t id = 0;
    TRY(TRITONBACKEND_ResponseOutput(response, &output, name, type, &num, 1));
    return TRITONBACKEND_OutputBuffer(output, data, bytes, &memory, &id);
}

static TRITONSERVER_Error *compute(TRITONBACKEND_Request *request, TRITONBACKEND_Response *response, const toy *state) {
    TRITONBACKEND_Input *input;
    const void *in;
    void *out, *number;
    uint64_t bytes;
    TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
    int64_t id = 0, now = atomic_fetch_add(&count, 1) + 1;
    TRY(TRITONBACKEND_RequestInputByIndex(request, 0, &input));
    TRY(TRITONBACKEND_InputBuffer(input, 0, &in, &bytes, &memory, &id));
    const float *x = in;
    float *y;
    if (x[0] < 0) {
        return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG, "IN[0] is negative");
    }
    size_t num = bytes / sizeof *x;
    TRY(add_output(response, "OUT", TRITONSERVER_TYPE_FP32, (int64_t)(num * state->copies), bytes * state->copies,
                   &out));
    y = out;
    for (size_t i = 0; i < num * state->copies; i++) {
        y[i] = 2 * x[i % num] + state->bias;
    }
    TRY(add_output(response, "COUNT", TRITONSERVER_TYPE_INT64, 1, sizeof now, &number));
    memcpy(number, &now, sizeof now);
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance *instance,
                                                       TRITONBACKEND_Request **requests, uint32_t num) {
    TRITONBACKEND_Model *model;
    void *state;
    TRY(TRITONBACKEND_ModelInstanceModel(instance, &model));
    TRY(TRITONBACKEND_ModelState(model, &state));
    for (uint32_t i = 0; i < num; i++) {
        TRITONBACKEND_Response *response;
        forget(TRITONBACKEND_ResponseNew(&response, requests[i]));
        TRITONSERVER_Error *failed = compute(requests[i], response, state);
        forget(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, failed));
        forget(failed);
        forget(TRITONBACKEND_RequestRelease(requests[i], TRITONSERVER_REQUEST_RELEASE_ALL));
    }
    return NULL;
}
