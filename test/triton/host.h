/* SPDX-License-Identifier: Apache-2.0
 *
 * A stub of the Triton server, for tests that a real one can't run: every call of it can be made to fail, and everything that
 * it hands out is counted. Programs that link it export its functions, and load our libraries with dlopen.
 */
#ifndef KVFT_HOST_H
#define KVFT_HOST_H
#include <sys/uio.h>

#pragma GCC visibility push(default)
#include "triton/abi/backend.h"
#include "triton/abi/cache.h"
#pragma GCC visibility pop

/* ---- faults and counts ------------------------------------------------------------------------------------------- */

/* The n-th call from now on, of any function that can return an error, returns one and does nothing. 0: none. */
void host_fail(uint64_t nth);
/* Whether that call has come. */
bool host_has_failed(void);

/* What the server hands out and takes back. */
typedef enum host_kind {
    HOST_ERROR,
    HOST_ATTRIBUTES,
    HOST_MESSAGE,
    HOST_PARAMETER,
    HOST_FAMILY,
    HOST_METRIC,
    HOST_FACTORY,
    HOST_RESPONSE,
    HOST_STATISTICS,
    HOST_NUM_KINDS
} host_kind;

/* How many of them are out now. */
long host_live(host_kind);
/* Prints what is out, and returns how many things that is. */
long host_leaks(void);

/* The log, each line after the other; "" after host_forget_log. At most 64 KiB of it. */
const char *host_log(void);
void host_forget_log(void);

/* Versions that the server claims; at first those of the headers. */
typedef struct host_versions {
    uint32_t server_major, server_minor, backend_major, backend_minor, cache_major, cache_minor;
} host_versions;
extern host_versions host_version;

/* ---- the cache's part -------------------------------------------------------------------------------------------- */

/* An entry as Triton makes it: with the lengths of `num` buffers (insert), or with none (lookup). */
TRITONCACHE_CacheEntry *host_entry(const struct iovec *buffers, size_t num);
void host_entry_free(TRITONCACHE_CacheEntry *);

/* What TRITONCACHE_Copy does. Insert: copies these buffers into the entry's. Lookup: keeps a copy of the entry's. */
TRITONCACHE_Allocator *host_source(const struct iovec *buffers, size_t num);
TRITONCACHE_Allocator *host_sink(void);
/* The buffers that a sink got. */
const struct iovec *host_sunk(const TRITONCACHE_Allocator *, size_t *out_num);
void host_allocator_free(TRITONCACHE_Allocator *);

/* ---- the backend's part ------------------------------------------------------------------------------------------ */

/* A model with this configuration (JSON), version 1, in this folder, and one instance of it. Freed by the test. */
TRITONBACKEND_Model *host_model(const char *config, const char *folder);
void host_model_free(TRITONBACKEND_Model *);
TRITONBACKEND_ModelInstance *host_instance(TRITONBACKEND_Model *);
void host_instance_free(TRITONBACKEND_ModelInstance *);

/* An input of one dimension. A text (BYTES) is one string of `len` bytes. The data is copied. */
typedef struct host_input {
    const char *name;
    TRITONSERVER_DataType type;
    const void *data;
    size_t len;
} host_input;
TRITONBACKEND_Request *host_request(const host_input *inputs, uint32_t num);

/* What has become of a request. More than one release or final flag, a response after the final one, or a use of the
 * request after its release ends the program. */
typedef struct host_outcome {
    bool is_released;
    uint32_t num_finals, num_responses, num_errors;
    bool session_stored;
    int32_t prompt_tokens;
    char text[4096];  /* of all outputs "text_output", one after the other */
    char error[2048]; /* of the last response that is an error */
} host_outcome;
/* Waits until the request has its final flag and was released. False: not within this time. */
bool host_request_wait(TRITONBACKEND_Request *, host_outcome *out, int seconds);
/* What is unusual, or wrong, in an input. */
typedef struct host_lie {
    bool raw;             /* the data of BYTES have the length of each element in them already */
    int64_t num;          /* elements that the shape claims; 0: as many as there are */
    uint32_t num_buffers; /* that the data are spread over; 0: one */
    uint64_t claimed;     /* bytes that the input claims to have; 0: as many as there are */
    TRITONSERVER_MemoryType memory;
} host_lie;
void host_request_lie(TRITONBACKEND_Request *, uint32_t input, const host_lie *);
/* How long the client waits, in microseconds; before the request is given to the backend. */
void host_request_timeout(TRITONBACKEND_Request *, uint64_t microseconds);
/* The client is gone. */
void host_request_cancel(TRITONBACKEND_Request *);
void host_request_free(TRITONBACKEND_Request *);

/* ---- for the files of the stub ----------------------------------------------------------------------------------- */

/* An error if this call is the one that fails. */
TRITONSERVER_Error *host_call(const char *name);
#define HOST_CALL()                                         \
    do {                                                    \
        TRITONSERVER_Error *injected = host_call(__func__); \
        if (injected != NULL) {                             \
            return injected;                                \
        }                                                   \
    } while (0)
/* The memory of the stub itself: calloc, or what a test that makes calloc fail puts in its place. */
extern void *(*host_calloc)(size_t num, size_t bytes);
/* Memory that is counted; the program ends where there is none. */
void *host_new(host_kind, size_t bytes);
void host_delete(host_kind, void *);

#endif
