/* SPDX-License-Identifier: Apache-2.0
 *
 * What engines/triton uses of Triton's TRITONCACHE functions, and what a response cache implements. See server.h for where
 * this comes from.
 *
 * An entry is the buffers of one response. Triton serializes outputs into buffers of memory that the cache gives
 * (insert), and reads them from memory that the cache gives (lookup), during TRITONCACHE_Copy. It keeps no pointer to that
 * memory after the call. */
#ifndef KVFT_ABI_CACHE_H
#define KVFT_ABI_CACHE_H

#include "server.h"

/* The version of the interface that is declared here. A server fits if it has the same major version, and at least this
 * minor one. */
#define TRITONCACHE_API_VERSION_MAJOR 0
#define TRITONCACHE_API_VERSION_MINOR 1

typedef struct TRITONCACHE_Allocator TRITONCACHE_Allocator;
typedef struct TRITONCACHE_Cache TRITONCACHE_Cache;
typedef struct TRITONCACHE_CacheEntry TRITONCACHE_CacheEntry;

#ifdef __cplusplus
extern "C" {
#endif

/* The version that the server has. */
TRITONSERVER_Error *TRITONCACHE_ApiVersion(uint32_t *major, uint32_t *minor);

/* The buffers of an entry. In an insert each has a size and no address: GetBuffer fills attributes of the caller with the
 * size, and SetBuffer gives the address (attributes NULL: the size stays). In a lookup there are none: AddBuffer adds
 * one, with attributes of the caller, who deletes them. No buffer is empty. */
TRITONSERVER_Error *TRITONCACHE_CacheEntryBufferCount(TRITONCACHE_CacheEntry *entry, size_t *count);
TRITONSERVER_Error *TRITONCACHE_CacheEntryAddBuffer(TRITONCACHE_CacheEntry *entry, void *base,
                                                    TRITONSERVER_BufferAttributes *buffer_attributes);
TRITONSERVER_Error *TRITONCACHE_CacheEntryGetBuffer(TRITONCACHE_CacheEntry *entry, size_t index, void **base,
                                                    TRITONSERVER_BufferAttributes *buffer_attributes);
TRITONSERVER_Error *TRITONCACHE_CacheEntrySetBuffer(TRITONCACHE_CacheEntry *entry, size_t index, void *new_base,
                                                    TRITONSERVER_BufferAttributes *buffer_attributes);

/* Copies between the buffers of the entry and the response of the request. */
TRITONSERVER_Error *TRITONCACHE_Copy(TRITONCACHE_Allocator *allocator, TRITONCACHE_CacheEntry *entry);

/* What a cache implements; all four are required. `config` is a JSON object of the --cache-config options, all strings. The
 * key is a decimal number: a 64-bit hash, not a cryptographic one, of model name, version and inputs. Triton calls
 * Insert before it sends a response, and Lookup before it queues a request, on any thread. NOT_FOUND is a miss. */
#define TRITONCACHE_EXPORT __attribute__((visibility("default")))
TRITONCACHE_EXPORT TRITONSERVER_Error *TRITONCACHE_CacheInitialize(TRITONCACHE_Cache **cache, const char *config);
TRITONCACHE_EXPORT TRITONSERVER_Error *TRITONCACHE_CacheFinalize(TRITONCACHE_Cache *cache);
TRITONCACHE_EXPORT TRITONSERVER_Error *TRITONCACHE_CacheInsert(TRITONCACHE_Cache *cache, const char *key,
                                                               TRITONCACHE_CacheEntry *entry,
                                                               TRITONCACHE_Allocator *allocator);
TRITONCACHE_EXPORT TRITONSERVER_Error *TRITONCACHE_CacheLookup(TRITONCACHE_Cache *cache, const char *key,
                                                               TRITONCACHE_CacheEntry *entry,
                                                               TRITONCACHE_Allocator *allocator);

#ifdef __cplusplus
}
#endif
#endif
