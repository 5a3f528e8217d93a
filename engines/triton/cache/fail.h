/* SPDX-License-Identifier: Apache-2.0
 *
 * Triton's errors and log, from formatted text.
 */
#ifndef KVFR_FAIL_H
#define KVFR_FAIL_H
#include "triton/abi/server.h"

/* An error with this message; the caller owns it. */
__attribute__((format(printf, 2, 3))) TRITONSERVER_Error *kvfr_fail(TRITONSERVER_Error_Code code, const char *format,
                                                                    ...);
/* A line in the server's log. */
__attribute__((format(printf, 2, 3))) void kvfr_log(TRITONSERVER_LogLevel level, const char *format, ...);

/* Returns from the function with the error of a call that has one. */
#define KVFR_TRY(call)                           \
    do {                                         \
        TRITONSERVER_Error *kvfr_error = (call); \
        if (kvfr_error != NULL) {                \
            return kvfr_error;                   \
        }                                        \
    } while (0)

#endif
