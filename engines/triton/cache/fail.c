/* SPDX-License-Identifier: Apache-2.0
 *
 * Triton's errors and log, from formatted text.
 */
#include "triton/cache/fail.h"

#include <stdarg.h>
#include <stdio.h>

#define MESSAGE_BYTES 1024

TRITONSERVER_Error *kvfr_fail(TRITONSERVER_Error_Code code, const char *format, ...) {
    char text[MESSAGE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return TRITONSERVER_ErrorNew(code, text);
}

void kvfr_log(TRITONSERVER_LogLevel level, const char *format, ...) {
    char text[MESSAGE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    TRITONSERVER_Error *error = TRITONSERVER_LogMessage(level, "kvferry", 0, text);
    if (error != NULL) {
        TRITONSERVER_ErrorDelete(error);
    }
}
