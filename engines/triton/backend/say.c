/* SPDX-License-Identifier: Apache-2.0
 *
 * Errors and messages of the backend, as Triton has them.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "triton/backend/backend.h"

#define LINE_BYTES 512

TRITONSERVER_Error *kvfb_error(TRITONSERVER_Error_Code code, const char *format, ...) {
    char text[LINE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return TRITONSERVER_ErrorNew(code, text);
}

static TRITONSERVER_Error_Code code_of(kvf_status status) {
    switch (status) {
    case KVF_CONFIG:
    case KVF_LIMIT:
        return TRITONSERVER_ERROR_INVALID_ARG;
    case KVF_REFUSED:
        return TRITONSERVER_ERROR_UNSUPPORTED;
    default:
        return TRITONSERVER_ERROR_UNAVAILABLE;
    }
}

TRITONSERVER_Error *kvfb_error_of(const char *what, kvf_status status, const kvf_error *err) {
    return kvfb_error(code_of(status), "%s: %s", what, err->what[0] != '\0' ? err->what : kvf_status_name(status));
}

TRITONSERVER_Error *kvfb_no_memory(void) {
    return kvfb_error(TRITONSERVER_ERROR_UNAVAILABLE, "out of memory");
}

bool kvfb_drop(TRITONSERVER_Error *error) {
    if (error != NULL) {
        TRITONSERVER_ErrorDelete(error);
    }
    return error == NULL;
}

void kvfb_log(TRITONSERVER_LogLevel level, const char *format, ...) {
    char text[LINE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    kvfb_drop(TRITONSERVER_LogMessage(level, "kvferry", 0, text));
}

static void on_kvferry_log(void *ctx, kvf_log_level level, const char *message) {
    static const TRITONSERVER_LogLevel levels[] = {TRITONSERVER_LOG_ERROR, TRITONSERVER_LOG_WARN, TRITONSERVER_LOG_INFO,
                                                   TRITONSERVER_LOG_VERBOSE};
    (void)ctx;
    kvfb_log(levels[level], "%s", message);
}

static _Thread_local char first_error[200];

static void on_llama_log(enum ggml_log_level level, const char *text, void *ctx) {
    (void)ctx;
    size_t len = strcspn(text, "\n");
    if (len > 0 && (level == GGML_LOG_LEVEL_ERROR || level == GGML_LOG_LEVEL_WARN)) {
        bool failed = level == GGML_LOG_LEVEL_ERROR;
        kvfb_log(failed ? TRITONSERVER_LOG_ERROR : TRITONSERVER_LOG_VERBOSE, "llama.cpp: %.*s", (int)len, text);
        if (failed && first_error[0] == '\0') {
            snprintf(first_error, sizeof first_error, "%.*s", (int)len, text);
        }
    }
}

void kvfb_log_attach(void) {
    kvf_set_log(on_kvferry_log, NULL, KVF_LOG_INFO);
    llama_log_set(on_llama_log, NULL);
}

const char *kvfb_llama_error(void) {
    static _Thread_local char last[sizeof first_error];
    memcpy(last, first_error, sizeof last);
    first_error[0] = '\0';
    return last[0] != '\0' ? last : "llama.cpp does not say why";
}

uint64_t kvfb_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
