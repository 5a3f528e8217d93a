/* SPDX-License-Identifier: Apache-2.0
 *
 * A loaded session: its memory and its description.
 */
#include "session/session.h"

/* Below this, a mapping costs more than it saves: malloc has memory whose pages are there already. */
#define MAP_FROM ((size_t)4 << 20)

kvfi_loaded *kvfi_loaded_new(size_t mem_bytes) {
    kvfi_loaded *loaded = kvfi_alloc_zero(1, sizeof *loaded);
    if (loaded == NULL) {
        return NULL;
    }
    loaded->mapped = mem_bytes >= MAP_FROM;
    loaded->mem_bytes = mem_bytes;
    loaded->mem = loaded->mapped ? kvfi_sys->map(mem_bytes, -1, 0) : kvfi_alloc(mem_bytes);
    if (loaded->mem == NULL) {
        kvfi_free(loaded);
        return NULL;
    }
    if (loaded->mapped) {
        /* All of it is about to be written. A fault for each small page costs as much as the transfer. */
        (void)kvfi_sys->huge(loaded->mem, mem_bytes);
    }
    loaded->pub.opaque = loaded;
    loaded->pub.ttl_ms = KVFI_TTL_UNKNOWN;
    return loaded;
}

void kvfi_loaded_drop(kvfi_loaded *loaded) {
    if (loaded->mapped) {
        kvfi_sys->unmap(loaded->mem, loaded->mem_bytes);
    } else {
        kvfi_free(loaded->mem);
    }
    loaded->mem = NULL;
    loaded->mapped = false;
}

void kvfi_loaded_free(kvfi_loaded *loaded) {
    if (loaded != NULL) {
        kvfi_loaded_drop(loaded);
        kvfi_free(loaded);
    }
}

static void describe_array(kvf_tensor *out, const kvfi_array *array, const uint8_t *data, uint64_t bytes) {
    out->data = data;
    out->len = (size_t)bytes;
    if (array != NULL) {
        memcpy(out->dtype, array->dtype, sizeof out->dtype);
        out->num_dims = array->num_dims;
        memcpy(out->dims, array->dims, sizeof out->dims);
    }
}

void kvfi_loaded_describe(kvfi_loaded *loaded, const kvfi_session_meta *meta, const uint8_t *keys, uint64_t keys_bytes,
                          const uint8_t *values, uint64_t values_bytes) {
    kvf_session *pub = &loaded->pub;
    describe_array(&pub->k, meta == NULL ? NULL : &meta->keys, keys, keys_bytes);
    describe_array(&pub->v, meta == NULL ? NULL : &meta->values, values, values_bytes);
    if (meta != NULL) {
        pub->has_meta = 1;
        pub->num_tokens = meta->num_tokens;
        memcpy(pub->layout, meta->layout, sizeof pub->layout);
        pub->space = meta->space;
    }
}

kvf_status kvfi_session_check_memory(const kvfi_session_call *call, uint64_t keys_bytes, uint64_t values_bytes) {
    const kvf_session_load_options *want = &call->want;
    if (want->k_iov == NULL || (want->flags & KVF_SESSION_LOOK) != 0) {
        return KVF_OK;
    }
    uint64_t keys = kvfi_iov_bytes(want->k_iov, want->num_k_iov), values = kvfi_iov_bytes(want->v_iov, want->num_v_iov);
    if (keys == keys_bytes && values == values_bytes) {
        return KVF_OK;
    }
    return kvfi_fail(call->err, KVF_LIMIT,
                     "the arrays of the session have %llu and %llu bytes, and the memory given has %llu and %llu",
                     (unsigned long long)keys_bytes, (unsigned long long)values_bytes, (unsigned long long)keys,
                     (unsigned long long)values);
}
