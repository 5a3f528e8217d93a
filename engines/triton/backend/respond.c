/* SPDX-License-Identifier: Apache-2.0
 *
 * The outputs of a request. Each request gets exactly one final flag, whatever fails on the way: a response with the
 * end of the answer, a response with an error, or the flag alone. Then it is released.
 */
#include <stdlib.h>
#include <string.h>

#include "triton/backend/backend.h"

const kvfb_output_kind kvfb_outputs[KVFB_NUM_OUTPUTS] = {
    [KVFB_TEXT_OUTPUT] = {"text_output", "STRING", TRITONSERVER_TYPE_BYTES, 1},
    [KVFB_OUTPUT_IDS] = {"output_ids", "INT32", TRITONSERVER_TYPE_INT32, -1},
    [KVFB_FINISH_REASON] = {"finish_reason", "STRING", TRITONSERVER_TYPE_BYTES, 1},
    [KVFB_PROMPT_TOKENS] = {"prompt_tokens", "INT32", TRITONSERVER_TYPE_INT32, 1},
    [KVFB_LOADED_TOKENS] = {"loaded_tokens", "INT32", TRITONSERVER_TYPE_INT32, 1},
    [KVFB_LOAD_MS] = {"load_ms", "FP32", TRITONSERVER_TYPE_FP32, 1},
    [KVFB_PREFILL_MS] = {"prefill_ms", "FP32", TRITONSERVER_TYPE_FP32, 1},
    [KVFB_PLAN] = {"plan", "STRING", TRITONSERVER_TYPE_BYTES, 1},
    [KVFB_SESSION_STORED] = {"session_stored", "BOOL", TRITONSERVER_TYPE_BOOL, 1},
};

/* ---- one output ---- */

static TRITONSERVER_Error *buffer_of(void **out, TRITONBACKEND_Response *response, kvfb_output which, int64_t num,
                                     size_t bytes) {
    const kvfb_output_kind *kind = &kvfb_outputs[which];
    TRITONBACKEND_Output *output = NULL;
    TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
    int64_t id = 0;
    TRITONSERVER_Error *error = TRITONBACKEND_ResponseOutput(response, &output, kind->name, kind->datatype, &num, 1);
    if (error == NULL) {
        error = TRITONBACKEND_OutputBuffer(output, out, bytes, &type, &id);
    }
    if (error == NULL && type == TRITONSERVER_MEMORY_GPU) {
        error = kvfb_error(TRITONSERVER_ERROR_UNSUPPORTED, "output \"%s\": Triton gave GPU memory for it", kind->name);
    }
    return error;
}

static bool is_wanted(const kvfb_request *r, kvfb_output which) {
    return (r->outputs >> which & 1u) != 0;
}

static TRITONSERVER_Error *put_text(kvfb_request *r, TRITONBACKEND_Response *response, kvfb_output which,
                                    const char *text, size_t len) {
    void *buffer = NULL;
    uint32_t length = (uint32_t)len;
    if (!is_wanted(r, which)) {
        return NULL;
    }
    TRITONSERVER_Error *error = buffer_of(&buffer, response, which, 1, sizeof length + len);
    if (error == NULL) {
        memcpy(buffer, &length, sizeof length);
        if (len > 0) {
            memcpy((char *)buffer + sizeof length, text, len);
        }
    }
    return error;
}

static TRITONSERVER_Error *put_bytes(kvfb_request *r, TRITONBACKEND_Response *response, kvfb_output which,
                                     const void *values, size_t num, size_t size) {
    void *buffer = NULL;
    if (!is_wanted(r, which)) {
        return NULL;
    }
    TRITONSERVER_Error *error = buffer_of(&buffer, response, which, (int64_t)num, num * size);
    if (error == NULL && num > 0) {
        memcpy(buffer, values, num * size);
    }
    return error;
}

/* ---- responses ---- */

/* What was not sent yet. */
static TRITONSERVER_Error *put_more(kvfb_request *r, TRITONBACKEND_Response *response) {
    const char *text = r->shown > r->sent ? r->answer.text + r->sent : "";
    TRITONSERVER_Error *error = put_text(r, response, KVFB_TEXT_OUTPUT, text, r->shown - r->sent);
    if (error == NULL) {
        error = put_bytes(r, response, KVFB_OUTPUT_IDS, r->said.ids + r->sent_ids, r->said.num - r->sent_ids,
                          sizeof *r->said.ids);
    }
    return error;
}

static TRITONSERVER_Error *put_counts(kvfb_request *r, TRITONBACKEND_Response *response) {
    const kvf_llama_report *report = &r->report;
    int32_t prompt = (int32_t)r->prompt.num, loaded = (int32_t)report->loaded_tokens;
    float load_ms = (float)(report->match_us + report->load_us) / 1000;
    float prefill_ms = (float)((double)(r->first_ns - r->prefill_ns) / 1e6);
    uint8_t stored = r->session_stored;
    const char *finish = r->finish == KVFB_FINISH_STOP ? "stop" : "length", *plan = kvf_llama_plan_name(report->plan);
    TRITONSERVER_Error *error = put_text(r, response, KVFB_FINISH_REASON, finish, strlen(finish));
    error = error == NULL ? put_bytes(r, response, KVFB_PROMPT_TOKENS, &prompt, 1, sizeof prompt) : error;
    error = error == NULL ? put_bytes(r, response, KVFB_LOADED_TOKENS, &loaded, 1, sizeof loaded) : error;
    error = error == NULL ? put_bytes(r, response, KVFB_LOAD_MS, &load_ms, 1, sizeof load_ms) : error;
    error = error == NULL ? put_bytes(r, response, KVFB_PREFILL_MS, &prefill_ms, 1, sizeof prefill_ms) : error;
    error = error == NULL ? put_text(r, response, KVFB_PLAN, plan, strlen(plan)) : error;
    return error == NULL ? put_bytes(r, response, KVFB_SESSION_STORED, &stored, 1, sizeof stored) : error;
}

/* Makes and sends a response. After a failure nothing was sent. */
static TRITONSERVER_Error *send_answer(kvfb_request *r, bool final) {
    TRITONBACKEND_Response *response = NULL;
    TRITONSERVER_Error *error = TRITONBACKEND_ResponseNewFromFactory(&response, r->factory);
    if (error == NULL) {
        error = put_more(r, response);
    }
    if (error == NULL && final) {
        error = put_counts(r, response);
    }
    if (error != NULL) {
        if (response != NULL) {
            kvfb_drop(TRITONBACKEND_ResponseDelete(response));
        }
        return error;
    }
    /* This takes the response also if it fails. */
    return TRITONBACKEND_ResponseSend(response, final ? TRITONSERVER_RESPONSE_COMPLETE_FINAL : 0, NULL);
}

bool kvfb_respond_more(kvfb_request *r) {
    if (!r->stream || r->shown == r->sent) {
        return true;
    }
    r->error = send_answer(r, false);
    r->sent = r->shown;
    r->sent_ids = r->said.num;
    return r->error == NULL;
}

/* Takes the error. */
static bool send_error(kvfb_request *r, TRITONSERVER_Error *error) {
    TRITONBACKEND_Response *response = NULL;
    bool made = kvfb_drop(r->factory != NULL ? TRITONBACKEND_ResponseNewFromFactory(&response, r->factory)
                                             : TRITONBACKEND_ResponseNew(&response, r->triton));
    bool sent = made && kvfb_drop(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, error));
    kvfb_drop(error);
    return sent;
}

/* ---- the end of a request ---- */

static void free_request(kvfb_request *r) {
    kvfl_chat_cleanup(&r->chat);
    kvfl_tokens_cleanup(&r->ids);
    kvfl_tokens_cleanup(&r->prompt);
    kvfl_tokens_cleanup(&r->said);
    kvfl_text_cleanup(&r->answer);
    for (size_t i = 0; i < r->num_stops; i++) {
        free(r->stops[i]);
    }
    free(r->text);
    free(r->messages);
    free(r->session);
    free(r);
}

/* If that fails, the request is still ours, and would keep its model from being unloaded: once more. */
void kvfb_release(TRITONBACKEND_Request *triton) {
    if (!kvfb_drop(TRITONBACKEND_RequestRelease(triton, TRITONSERVER_REQUEST_RELEASE_ALL))) {
        kvfb_drop(TRITONBACKEND_RequestRelease(triton, TRITONSERVER_REQUEST_RELEASE_ALL));
    }
}

static void release(kvfb_request *r, bool success) {
    uint64_t prefill_ns = r->prefill_ns > 0 ? r->prefill_ns : r->computed_ns; /* it ended before */
    kvfb_drop(TRITONBACKEND_ModelInstanceReportStatistics(r->instance->triton, r->triton, success, r->began_ns,
                                                          prefill_ns, r->computed_ns, kvfb_now_ns()));
    if (r->factory != NULL) {
        kvfb_drop(TRITONBACKEND_ResponseFactoryDelete(r->factory));
    }
    kvfb_release(r->triton);
    free_request(r);
}

void kvfb_respond_end(kvfb_request *r) {
    TRITONSERVER_Error *error = r->error;
    r->error = NULL;
    r->computed_ns = kvfb_now_ns();
    if (error == NULL) {
        error = send_answer(r, true);
    }
    bool success = error == NULL;
    if (!success && !send_error(r, error) && r->factory != NULL) {
        kvfb_drop(TRITONBACKEND_ResponseFactorySendFlags(r->factory, TRITONSERVER_RESPONSE_COMPLETE_FINAL));
    }
    release(r, success);
}

void kvfb_respond_error(kvfb_request *r, TRITONSERVER_Error *error) {
    if (r->error != NULL) {
        kvfb_drop(error);
    } else {
        r->error = error;
    }
    kvfb_respond_end(r);
}
