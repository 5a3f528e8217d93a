/* SPDX-License-Identifier: Apache-2.0
 *
 * A loaded session: its memory and its description.
 */
#include "session/session.h"

#define MAP_FROM ((size_t)1 << 20) /* below this, a mapping costs more than it saves */

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
    loaded->pub.opaque = loaded;
    return loaded;
}

void kvfi_loaded_free(kvfi_loaded *loaded) {
    if (loaded == NULL) {
        return;
    }
    if (loaded->mapped) {
        kvfi_sys->unmap(loaded->mem, loaded->mem_bytes);
    } else {
        kvfi_free(loaded->mem);
    }
    kvfi_free(loaded);
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
