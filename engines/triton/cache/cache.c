/* SPDX-License-Identifier: Apache-2.0
 *
 * Triton's response cache in a kvferry store: libtritoncache_kvferry.so.
 *
 * An answer is a block without tokens. Its key is Triton's (a hash of model name, version and inputs), in a space that names
 * what the server runs: the files of its models and the namespace. A lookup ends at the deadline, whatever the store does.
 * An insert copies into the backlog, and threads of the store write it.
 */
#include "triton/abi/cache.h"

#include <kvferry/kvferry.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "triton/cache/answer.h"
#include "triton/cache/models.h"
#include "triton/cache/options.h"

#define NUM_HINTS 4096u

/* How long the answer of a key was when it was last seen: then one round trip loads it. Both are hints. */
typedef struct hint {
    atomic_uint_fast64_t key, bytes;
} hint;

typedef struct cache {
    kvf_store *store;
    kvf_space *space;
    kvfr_models *models; /* NULL: told apart by the namespace alone */
    int64_t deadline_us, ttl_s;
    atomic_uint_fast64_t lookups, hits, inserts, shed;
    hint hints[NUM_HINTS];
} cache;

/* An answer that was loaded, in memory of its own. */
typedef struct loaded {
    void *data;
    size_t len;
    kvfr_answer answer;
} loaded;

static int64_t now_us(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* ---- the length of an answer ------------------------------------------------------------------------------------- */

static hint *hint_of(cache *c, const kvf_key *key, uint64_t *out_key) {
    memcpy(out_key, key->bytes, sizeof *out_key);
    return &c->hints[*out_key % NUM_HINTS];
}

static void remember_len(cache *c, const kvf_key *key, uint64_t bytes) {
    uint64_t id;
    hint *h = hint_of(c, key, &id);
    atomic_store_explicit(&h->key, id, memory_order_relaxed);
    atomic_store_explicit(&h->bytes, bytes, memory_order_relaxed);
}

/* 0: not known. */
static uint64_t expected_len(cache *c, const kvf_key *key) {
    uint64_t id;
    hint *h = hint_of(c, key, &id);
    return atomic_load_explicit(&h->key, memory_order_relaxed) == id
               ? atomic_load_explicit(&h->bytes, memory_order_relaxed)
               : 0;
}

/* ---- lookup ------------------------------------------------------------------------------------------------------ */

/* What is left of the deadline; KVF_POLL where nothing is. */
static int64_t budget(int64_t end_us) {
    int64_t left = end_us - now_us(CLOCK_MONOTONIC);
    return left > 0 ? left : KVF_POLL;
}

static kvf_reason load(cache *c, loaded *out, const kvf_key *key, uint64_t bytes, int64_t end_us) {
    if (bytes > KVFR_MAX_ANSWER_BYTES) {
        return KVF_WHY_FULL;
    }
    out->data = malloc(bytes);
    if (out->data == NULL) {
        return KVF_WHY_NOMEM;
    }
    out->len = bytes;
    struct iovec iov = {out->data, bytes};
    kvf_block block = {.key = *key, .iov = &iov, .num_iov = 1};
    const kvf_load_options options = {
        .struct_size = sizeof options, .budget_us = budget(end_us), .patience_us = c->deadline_us};
    if (kvf_load_with(c->space, &block, 1, NULL, &options) == 1) {
        return KVF_WHY_NONE;
    }
    free(out->data);
    out->data = NULL;
    return block.why;
}

/* Asks for the length first. */
static kvf_reason match_and_load(cache *c, loaded *out, const kvf_key *key, int64_t end_us) {
    kvf_found found;
    size_t run;
    if (kvf_match(c->space, &run, &found, key, 1, budget(end_us)) != KVF_OK || run == 0) {
        return run == 0 ? found.why : KVF_WHY_MISUSE;
    }
    return load(c, out, key, found.payload_bytes, end_us);
}

static kvf_reason fetch(cache *c, loaded *out, const kvf_key *key) {
    int64_t end_us = now_us(CLOCK_MONOTONIC) + c->deadline_us;
    uint64_t bytes = expected_len(c, key);
    kvf_reason why = KVF_WHY_TRUNCATED;
    if (bytes > 0) {
        why = load(c, out, key, bytes, end_us);
    }
    return why == KVF_WHY_TRUNCATED ? match_and_load(c, out, key, end_us) : why;
}

/* The clock of the server that stored it may be fast, but not so much that the answer would live for ever. */
static bool is_current(const cache *c, const kvfr_answer *answer) {
    int64_t now_s = now_us(CLOCK_REALTIME) / 1000000;
    bool in_time = answer->created_s >= now_s - c->ttl_s && answer->created_s <= now_s + c->ttl_s;
    return c->ttl_s == 0 || in_time;
}

/* Whether there is an answer to give. What is stored and can't be given is to be written anew by the insert. */
static bool find(cache *c, loaded *out, const kvf_key *key) {
    kvf_reason why = fetch(c, out, key);
    bool of_use =
        why == KVF_WHY_NONE && kvfr_answer_read(&out->answer, out->data, out->len) && is_current(c, &out->answer);
    if (of_use) {
        remember_len(c, key, out->len);
        return true;
    }
    if (why == KVF_WHY_NONE || why == KVF_WHY_TRUNCATED || why == KVF_WHY_VERSION || why == KVF_WHY_OTHER_SPACE) {
        kvf_forget(c->space, key, 1);
    }
    free(out->data);
    return false;
}

static TRITONSERVER_Error *add_buffer(TRITONCACHE_CacheEntry *entry, TRITONSERVER_BufferAttributes *attributes,
                                      const void *data, size_t len) {
    KVFR_TRY(TRITONSERVER_BufferAttributesSetMemoryType(attributes, TRITONSERVER_MEMORY_CPU));
    KVFR_TRY(TRITONSERVER_BufferAttributesSetMemoryTypeId(attributes, 0));
    KVFR_TRY(TRITONSERVER_BufferAttributesSetByteSize(attributes, len));
    return TRITONCACHE_CacheEntryAddBuffer(entry, (void *)(uintptr_t)data, attributes);
}

static TRITONSERVER_Error *add_buffers(TRITONCACHE_CacheEntry *entry, TRITONSERVER_BufferAttributes *attributes,
                                       const kvfr_answer *answer) {
    const uint8_t *at = answer->buffers;
    for (size_t i = 0; i < answer->num; i++) {
        uint64_t len = kvfr_answer_len(answer, i);
        KVFR_TRY(add_buffer(entry, attributes, at, len));
        at += len;
    }
    return NULL;
}

/* Lets Triton copy the answer into its response. */
static TRITONSERVER_Error *give(TRITONCACHE_CacheEntry *entry, TRITONCACHE_Allocator *allocator,
                                const kvfr_answer *answer) {
    TRITONSERVER_BufferAttributes *attributes;
    KVFR_TRY(TRITONSERVER_BufferAttributesNew(&attributes));
    TRITONSERVER_Error *failed = add_buffers(entry, attributes, answer);
    TRITONSERVER_Error *undeleted = TRITONSERVER_BufferAttributesDelete(attributes);
    if (undeleted != NULL) {
        TRITONSERVER_ErrorDelete(undeleted);
    }
    return failed != NULL ? failed : TRITONCACHE_Copy(allocator, entry);
}

/* ---- insert ------------------------------------------------------------------------------------------------------ */

/* The lengths of the buffers that Triton wants to fill. */
static TRITONSERVER_Error *read_lens(TRITONCACHE_CacheEntry *entry, uint64_t *lens, size_t num) {
    TRITONSERVER_BufferAttributes *attributes;
    KVFR_TRY(TRITONSERVER_BufferAttributesNew(&attributes));
    TRITONSERVER_Error *failed = NULL;
    for (size_t i = 0; i < num && failed == NULL; i++) {
        void *none;
        size_t len = 0;
        failed = TRITONCACHE_CacheEntryGetBuffer(entry, i, &none, attributes);
        if (failed == NULL) {
            failed = TRITONSERVER_BufferAttributesByteSize(attributes, &len);
        }
        lens[i] = len;
    }
    TRITONSERVER_Error *undeleted = TRITONSERVER_BufferAttributesDelete(attributes);
    if (undeleted != NULL) {
        TRITONSERVER_ErrorDelete(undeleted);
    }
    return failed;
}

/* Lets Triton serialize its response into our memory. */
static TRITONSERVER_Error *take(TRITONCACHE_CacheEntry *entry, TRITONCACHE_Allocator *allocator, uint8_t *at,
                                const uint64_t *lens, size_t num) {
    for (size_t i = 0; i < num; i++) {
        KVFR_TRY(TRITONCACHE_CacheEntrySetBuffer(entry, i, at, NULL));
        at += lens[i];
    }
    return TRITONCACHE_Copy(allocator, entry);
}

/* 0: too large to be stored. */
static size_t payload_bytes(const uint64_t *lens, size_t num) {
    uint64_t bytes = kvfr_answer_head_bytes(num);
    for (size_t i = 0; i < num; i++) {
        if (lens[i] > KVFR_MAX_ANSWER_BYTES - bytes) {
            return 0;
        }
        bytes += lens[i];
    }
    return bytes;
}

/* Serializes straight into the backlog. What can't be stored is no error: Triton would log one for every request. */
static TRITONSERVER_Error *stage(cache *c, const kvf_key *key, TRITONCACHE_CacheEntry *entry,
                                 TRITONCACHE_Allocator *allocator, const uint64_t *lens, size_t num) {
    size_t bytes = payload_bytes(lens, num);
    kvf_reserved room;
    if (bytes == 0 || kvf_reserve(c->space, &room, bytes) != KVF_OK) {
        atomic_fetch_add(&c->shed, 1);
        return NULL;
    }
    kvfr_answer_write_head(room.data, now_us(CLOCK_REALTIME) / 1000000, lens, num);
    TRITONSERVER_Error *failed = take(entry, allocator, (uint8_t *)room.data + kvfr_answer_head_bytes(num), lens, num);
    kvfr_answer answer;
    if (failed != NULL || !kvfr_answer_read(&answer, room.data, bytes)) {
        kvf_abandon(c->space, &room);
        return failed;
    }
    const kvf_block block = {.key = *key};
    if (kvf_commit(c->space, &room, &block, bytes) != KVF_OK) {
        atomic_fetch_add(&c->shed, 1);
        return NULL;
    }
    atomic_fetch_add(&c->inserts, 1);
    remember_len(c, key, bytes);
    return NULL;
}

static TRITONSERVER_Error *insert(cache *c, const kvf_key *key, TRITONCACHE_CacheEntry *entry,
                                  TRITONCACHE_Allocator *allocator) {
    size_t num = 0;
    KVFR_TRY(TRITONCACHE_CacheEntryBufferCount(entry, &num));
    if (num == 0 || num > KVFR_MAX_BUFFERS || kvf_knows(c->space, key)) {
        return NULL;
    }
    uint64_t lens[KVFR_MAX_BUFFERS];
    KVFR_TRY(read_lens(entry, lens, num));
    return stage(c, key, entry, allocator, lens, num);
}

/* ---- open and close ---------------------------------------------------------------------------------------------- */

static void log_line(void *context, kvf_log_level level, const char *message) {
    static const TRITONSERVER_LogLevel levels[] = {[KVF_LOG_ERROR] = TRITONSERVER_LOG_ERROR,
                                                   [KVF_LOG_WARN] = TRITONSERVER_LOG_WARN,
                                                   [KVF_LOG_INFO] = TRITONSERVER_LOG_INFO,
                                                   [KVF_LOG_DEBUG] = TRITONSERVER_LOG_VERBOSE};
    (void)context;
    kvfr_log(levels[level], "kvferry: %s", message);
}

static TRITONSERVER_Error *check_versions(void) {
    uint32_t major = 0, minor = 0, server_major = 0, server_minor = 0;
    KVFR_TRY(TRITONCACHE_ApiVersion(&major, &minor));
    KVFR_TRY(TRITONSERVER_ApiVersion(&server_major, &server_minor));
    if (major != TRITONCACHE_API_VERSION_MAJOR || minor < TRITONCACHE_API_VERSION_MINOR ||
        server_major != TRITONSERVER_API_VERSION_MAJOR) {
        return kvfr_fail(
            TRITONSERVER_ERROR_UNSUPPORTED,
            "kvferry: this server has version %u.%u of the cache interface and %u.%u of its own; %d.%d (or "
            "a later minor version) and %d are needed. Use a kvferry that was built for this server",
            major, minor, server_major, server_minor, TRITONCACHE_API_VERSION_MAJOR, TRITONCACHE_API_VERSION_MINOR,
            TRITONSERVER_API_VERSION_MAJOR);
    }
    return NULL;
}

static TRITONSERVER_Error *from_status(kvf_status status, const kvf_error *error) {
    TRITONSERVER_Error_Code code = status == KVF_NOMEM || status == KVF_IO || status == KVF_CLOSED
                                       ? TRITONSERVER_ERROR_INTERNAL
                                       : TRITONSERVER_ERROR_INVALID_ARG;
    return status == KVF_OK ? NULL : kvfr_fail(code, "kvferry: %s", error->what);
}

static TRITONSERVER_Error *open_models(cache *c, kvfr_options *o) {
    if (strcmp(o->models, "none") == 0) {
        return o->namespace_[0] != '\0' ? NULL
                                        : kvfr_fail(TRITONSERVER_ERROR_INVALID_ARG,
                                                    "kvferry: models=none needs a namespace= that you change with the "
                                                    "models: nothing else tells them apart");
    }
    if (o->models[0] == '\0') {
        KVFR_TRY(kvfr_models_of_command_line(o->models, sizeof o->models));
    }
    return kvfr_models_open(&c->models, o->models);
}

static TRITONSERVER_Error *open_store(cache *c, const kvfr_options *o) {
    kvf_error error = {0};
    const kvf_options options = {.struct_size = sizeof options,
                                 .secret_files = o->secret_files[0] != '\0' ? o->secret_files : NULL};
    return from_status(kvf_store_open(&c->store, &error, o->urls, o->num_urls, &options), &error);
}

static TRITONSERVER_Error *open_space(cache *c, const kvfr_options *o) {
    kvf_error error = {0};
    const kvf_field fields[] = {{"engine", "triton-response-cache-1"},
                                {"kv", "triton's packed response"},
                                {"model", c->models != NULL ? kvfr_models_digest(c->models) : "none"},
                                {"namespace", o->namespace_}};
    return from_status(kvf_space_open(&c->space, &error, c->store, fields, sizeof fields / sizeof *fields, NULL),
                       &error);
}

static TRITONSERVER_Error *open_cache(cache *c, kvfr_options *o, const char *config) {
    KVFR_TRY(kvfr_options_read(o, config));
    KVFR_TRY(open_models(c, o));
    KVFR_TRY(open_store(c, o));
    KVFR_TRY(open_space(c, o));
    c->deadline_us = o->deadline_us;
    c->ttl_s = o->ttl_s;
    return NULL;
}

static void close_cache(cache *c) {
    kvf_space_close(c->space);
    kvf_store_close(c->store);
    kvfr_models_close(c->models);
    free(c);
}

static TRITONSERVER_Error *no_argument(const char *name) {
    return kvfr_fail(TRITONSERVER_ERROR_INVALID_ARG, "kvferry: %s is NULL", name);
}

TRITONSERVER_Error *TRITONCACHE_CacheInitialize(TRITONCACHE_Cache **out, const char *config) {
    if (out == NULL || config == NULL) {
        return no_argument(out == NULL ? "cache" : "config");
    }
    KVFR_TRY(check_versions());
    kvf_set_log(log_line, NULL, TRITONSERVER_LogIsEnabled(TRITONSERVER_LOG_VERBOSE) ? KVF_LOG_DEBUG : KVF_LOG_INFO);
    cache *c = calloc(1, sizeof *c);
    kvfr_options *options = malloc(sizeof *options);
    TRITONSERVER_Error *failed = c != NULL && options != NULL
                                     ? open_cache(c, options, config)
                                     : kvfr_fail(TRITONSERVER_ERROR_INTERNAL, "kvferry: no memory for the cache");
    free(options);
    if (failed != NULL) {
        if (c != NULL) {
            close_cache(c);
        }
        return failed;
    }
    *out = (TRITONCACHE_Cache *)c;
    return NULL;
}

TRITONSERVER_Error *TRITONCACHE_CacheFinalize(TRITONCACHE_Cache *opaque) {
    cache *c = (cache *)opaque;
    if (c == NULL) {
        return no_argument("cache");
    }
    kvfr_log(TRITONSERVER_LOG_INFO,
             "kvferry: %llu of %llu lookups were answered; %llu answers were stored, %llu were not",
             (unsigned long long)c->hits, (unsigned long long)c->lookups, (unsigned long long)c->inserts,
             (unsigned long long)c->shed);
    close_cache(c);
    return NULL;
}

/* ---- calls on the path of a request ------------------------------------------------------------------------------ */

static TRITONSERVER_Error *check_arguments(const void *c, const char *key, const void *entry, const void *allocator) {
    return c == NULL           ? no_argument("cache")
           : key == NULL       ? no_argument("key")
           : entry == NULL     ? no_argument("entry")
           : allocator == NULL ? no_argument("allocator")
                               : NULL;
}

/* Whether the loaded models are those that the keys name. */
static bool is_open(cache *c) {
    return c->models == NULL || kvfr_models_same(c->models);
}

TRITONSERVER_Error *TRITONCACHE_CacheLookup(TRITONCACHE_Cache *opaque, const char *key, TRITONCACHE_CacheEntry *entry,
                                            TRITONCACHE_Allocator *allocator) {
    KVFR_TRY(check_arguments(opaque, key, entry, allocator));
    cache *c = (cache *)opaque;
    kvf_key block;
    loaded found = {0};
    atomic_fetch_add(&c->lookups, 1);
    kvf_key_of(c->space, &block, key, strlen(key));
    if (!is_open(c) || !find(c, &found, &block)) {
        return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_NOT_FOUND, "kvferry: no such answer is stored");
    }
    TRITONSERVER_Error *failed = give(entry, allocator, &found.answer);
    free(found.data);
    if (failed == NULL) {
        atomic_fetch_add(&c->hits, 1);
    }
    return failed;
}

TRITONSERVER_Error *TRITONCACHE_CacheInsert(TRITONCACHE_Cache *opaque, const char *key, TRITONCACHE_CacheEntry *entry,
                                            TRITONCACHE_Allocator *allocator) {
    KVFR_TRY(check_arguments(opaque, key, entry, allocator));
    cache *c = (cache *)opaque;
    kvf_key block;
    kvf_key_of(c->space, &block, key, strlen(key));
    return is_open(c) ? insert(c, &block, entry, allocator) : NULL;
}
