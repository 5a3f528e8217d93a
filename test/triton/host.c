/* SPDX-License-Identifier: Apache-2.0
 *
 * The stub of the Triton server: errors, log, messages, metrics, attributes of buffers; and the cache's functions.
 */
#include "host.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOG_BYTES 65536u

host_versions host_version = {TRITONSERVER_API_VERSION_MAJOR,  34,
                              TRITONBACKEND_API_VERSION_MAJOR, TRITONBACKEND_API_VERSION_MINOR,
                              TRITONCACHE_API_VERSION_MAJOR,   TRITONCACHE_API_VERSION_MINOR};

void *(*host_calloc)(size_t, size_t) = calloc;

static atomic_long live[HOST_NUM_KINDS];
static _Atomic uint64_t until_failure;
static atomic_bool failed;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char lines[LOG_BYTES];

/* ---- faults and counts ------------------------------------------------------------------------------------------- */

void host_fail(uint64_t nth) {
    atomic_store(&failed, false);
    atomic_store(&until_failure, nth);
}

bool host_has_failed(void) {
    return atomic_load(&failed);
}

TRITONSERVER_Error *host_call(const char *name) {
    uint64_t left = atomic_load(&until_failure);
    while (left > 0 && !atomic_compare_exchange_weak(&until_failure, &left, left - 1)) {
    }
    if (left != 1) {
        return NULL;
    }
    atomic_store(&failed, true);
    char text[128];
    snprintf(text, sizeof text, "injected into %s", name);
    return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, text);
}

void *host_new(host_kind kind, size_t bytes) {
    void *memory = host_calloc(1, bytes);
    if (memory == NULL) {
        abort();
    }
    atomic_fetch_add(&live[kind], 1);
    return memory;
}

void host_delete(host_kind kind, void *memory) {
    if (memory == NULL || atomic_fetch_sub(&live[kind], 1) <= 0) {
        fprintf(stderr, "something of kind %d was deleted twice\n", kind);
        abort();
    }
    free(memory);
}

long host_live(host_kind kind) {
    return atomic_load(&live[kind]);
}

long host_leaks(void) {
    static const char *const names[HOST_NUM_KINDS] = {"errors",  "attributes", "messages",  "parameters", "families",
                                                      "metrics", "factories",  "responses", "statistics"};
    long all = 0;
    for (host_kind kind = 0; kind < HOST_NUM_KINDS; kind++) {
        if (host_live(kind) != 0) {
            fprintf(stderr, "%ld %s were not given back\n", host_live(kind), names[kind]);
        }
        all += host_live(kind);
    }
    return all;
}

/* ---- errors and log ---------------------------------------------------------------------------------------------- */

struct TRITONSERVER_Error {
    TRITONSERVER_Error_Code code;
    char text[2048];
};

TRITONSERVER_Error *TRITONSERVER_ErrorNew(TRITONSERVER_Error_Code code, const char *msg) {
    TRITONSERVER_Error *error = host_new(HOST_ERROR, sizeof *error);
    error->code = code;
    snprintf(error->text, sizeof error->text, "%s", msg);
    return error;
}

void TRITONSERVER_ErrorDelete(TRITONSERVER_Error *error) {
    host_delete(HOST_ERROR, error);
}

TRITONSERVER_Error_Code TRITONSERVER_ErrorCode(TRITONSERVER_Error *error) {
    return error->code;
}

const char *TRITONSERVER_ErrorCodeString(TRITONSERVER_Error *error) {
    (void)error;
    return "an error";
}

const char *TRITONSERVER_ErrorMessage(TRITONSERVER_Error *error) {
    return error->text;
}

bool TRITONSERVER_LogIsEnabled(TRITONSERVER_LogLevel level) {
    return level != TRITONSERVER_LOG_VERBOSE;
}

TRITONSERVER_Error *TRITONSERVER_LogMessage(TRITONSERVER_LogLevel level, const char *filename, int line,
                                            const char *msg) {
    (void)level, (void)filename, (void)line;
    HOST_CALL();
    pthread_mutex_lock(&lock);
    size_t used = strlen(lines);
    snprintf(lines + used, sizeof lines - used, "%s\n", msg);
    pthread_mutex_unlock(&lock);
    return NULL;
}

const char *host_log(void) {
    return lines;
}

void host_forget_log(void) {
    pthread_mutex_lock(&lock);
    lines[0] = '\0';
    pthread_mutex_unlock(&lock);
}

static TRITONSERVER_Error *version(uint32_t *major, uint32_t *minor, uint32_t is_major, uint32_t is_minor) {
    *major = is_major;
    *minor = is_minor;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_ApiVersion(uint32_t *major, uint32_t *minor) {
    HOST_CALL();
    return version(major, minor, host_version.server_major, host_version.server_minor);
}

/* ---- attributes of buffers --------------------------------------------------------------------------------------- */

struct TRITONSERVER_BufferAttributes {
    TRITONSERVER_MemoryType type;
    int64_t id;
    size_t bytes;
};

TRITONSERVER_Error *TRITONSERVER_BufferAttributesNew(TRITONSERVER_BufferAttributes **out) {
    HOST_CALL();
    *out = host_new(HOST_ATTRIBUTES, sizeof **out);
    return NULL;
}

/* It takes them back also where it fails: a caller can do no more. */
TRITONSERVER_Error *TRITONSERVER_BufferAttributesDelete(TRITONSERVER_BufferAttributes *a) {
    host_delete(HOST_ATTRIBUTES, a);
    HOST_CALL();
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_BufferAttributesSetMemoryTypeId(TRITONSERVER_BufferAttributes *a, int64_t id) {
    HOST_CALL();
    a->id = id;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_BufferAttributesSetMemoryType(TRITONSERVER_BufferAttributes *a,
                                                               TRITONSERVER_MemoryType type) {
    HOST_CALL();
    a->type = type;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_BufferAttributesSetByteSize(TRITONSERVER_BufferAttributes *a, size_t bytes) {
    HOST_CALL();
    a->bytes = bytes;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_BufferAttributesByteSize(TRITONSERVER_BufferAttributes *a, size_t *bytes) {
    HOST_CALL();
    *bytes = a->bytes;
    return NULL;
}

/* ---- the cache's functions --------------------------------------------------------------------------------------- */

#define MAX_BUFFERS 2048u

typedef struct buffers {
    struct iovec iov[MAX_BUFFERS];
    size_t num;
} buffers;

struct TRITONCACHE_CacheEntry {
    buffers held;
};

struct TRITONCACHE_Allocator {
    bool is_source;
    buffers held;
};

TRITONSERVER_Error *TRITONCACHE_ApiVersion(uint32_t *major, uint32_t *minor) {
    HOST_CALL();
    return version(major, minor, host_version.cache_major, host_version.cache_minor);
}

TRITONSERVER_Error *TRITONCACHE_CacheEntryBufferCount(TRITONCACHE_CacheEntry *entry, size_t *count) {
    HOST_CALL();
    *count = entry->held.num;
    return NULL;
}

TRITONSERVER_Error *TRITONCACHE_CacheEntryAddBuffer(TRITONCACHE_CacheEntry *entry, void *base,
                                                    TRITONSERVER_BufferAttributes *a) {
    HOST_CALL();
    if (base == NULL || a->bytes == 0 || a->type == TRITONSERVER_MEMORY_GPU || entry->held.num == MAX_BUFFERS) {
        return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG, "not a buffer for an entry");
    }
    entry->held.iov[entry->held.num++] = (struct iovec){base, a->bytes};
    return NULL;
}

TRITONSERVER_Error *TRITONCACHE_CacheEntryGetBuffer(TRITONCACHE_CacheEntry *entry, size_t index, void **base,
                                                    TRITONSERVER_BufferAttributes *a) {
    HOST_CALL();
    *base = entry->held.iov[index].iov_base;
    *a = (TRITONSERVER_BufferAttributes){.bytes = entry->held.iov[index].iov_len};
    return NULL;
}

TRITONSERVER_Error *TRITONCACHE_CacheEntrySetBuffer(TRITONCACHE_CacheEntry *entry, size_t index, void *base,
                                                    TRITONSERVER_BufferAttributes *a) {
    HOST_CALL();
    entry->held.iov[index].iov_base = base;
    if (a != NULL) {
        entry->held.iov[index].iov_len = a->bytes;
    }
    return NULL;
}

static void append_copy(buffers *to, const struct iovec *from) {
    void *copy = host_calloc(1, from->iov_len + 1);
    if (copy == NULL || to->num == MAX_BUFFERS) {
        abort();
    }
    memcpy(copy, from->iov_base, from->iov_len);
    to->iov[to->num++] = (struct iovec){copy, from->iov_len};
}

TRITONSERVER_Error *TRITONCACHE_Copy(TRITONCACHE_Allocator *allocator, TRITONCACHE_CacheEntry *entry) {
    HOST_CALL();
    for (size_t i = 0; i < entry->held.num; i++) {
        const struct iovec *at = &entry->held.iov[i];
        if (!allocator->is_source) {
            append_copy(&allocator->held, at);
        } else if (at->iov_len == allocator->held.iov[i].iov_len) {
            memcpy(at->iov_base, allocator->held.iov[i].iov_base, at->iov_len);
        } else {
            return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, "a buffer has another length");
        }
    }
    return NULL;
}

TRITONCACHE_CacheEntry *host_entry(const struct iovec *sizes, size_t num) {
    TRITONCACHE_CacheEntry *entry = calloc(1, sizeof *entry);
    if (entry == NULL || num > MAX_BUFFERS) {
        abort();
    }
    for (size_t i = 0; i < num; i++) {
        entry->held.iov[i].iov_len = sizes[i].iov_len;
    }
    entry->held.num = num;
    return entry;
}

void host_entry_free(TRITONCACHE_CacheEntry *entry) {
    free(entry);
}

TRITONCACHE_Allocator *host_sink(void) {
    TRITONCACHE_Allocator *sink = calloc(1, sizeof *sink);
    if (sink == NULL) {
        abort();
    }
    return sink;
}

TRITONCACHE_Allocator *host_source(const struct iovec *iov, size_t num) {
    TRITONCACHE_Allocator *source = host_sink();
    source->is_source = true;
    for (size_t i = 0; i < num; i++) {
        append_copy(&source->held, &iov[i]);
    }
    return source;
}

const struct iovec *host_sunk(const TRITONCACHE_Allocator *sink, size_t *out_num) {
    *out_num = sink->held.num;
    return sink->held.iov;
}

void host_allocator_free(TRITONCACHE_Allocator *allocator) {
    for (size_t i = 0; i < allocator->held.num; i++) {
        free(allocator->held.iov[i].iov_base);
    }
    free(allocator);
}
