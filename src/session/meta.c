/* SPDX-License-Identifier: Apache-2.0
 *
 * Encodes and decodes `meta`, the JSON that describes the bytes of a session.
 */
#include <jansson.h>

#include "session/session.h"

/* ---- dtypes */
uint32_t kvfi_dtype_bytes(const char *dtype) {
    static const struct {
        const char *name;
        uint32_t bytes;
    } known[] = {
        {"float16", 2},     {"bfloat16", 2},  {"float32", 4},     {"float64", 8},         {"int8", 1},
        {"uint8", 1},       {"int16", 2},     {"uint16", 2},      {"int32", 4},           {"uint32", 4},
        {"int64", 8},       {"uint64", 8},    {"bool", 1},        {"float8_e4m3fn", 1},   {"float8_e5m2", 1},
        {"float8_e4m3", 1}, {"complex64", 8}, {"complex128", 16}, {"float8_e4m3fnuz", 1},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(dtype, known[i].name) == 0) {
            return known[i].bytes;
        }
    }
    return 0;
}

static bool is_word(const char *text, size_t cap) {
    size_t len = strnlen(text, cap);
    if (len == cap) {
        return false;
    }
    for (size_t i = 0; i < len; i++) {
        char c = text[i];
        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_')) {
            return false;
        }
    }
    return true;
}

kvf_status kvfi_array_check(const kvfi_array *array, kvf_error *err, const char *name) {
    if (array->bytes > KVFI_MAX_ARRAY_BYTES) {
        return kvfi_fail(err, KVF_LIMIT, "%s has %llu bytes; at most 1T is allowed", name,
                         (unsigned long long)array->bytes);
    }
    if (!is_word(array->dtype, sizeof array->dtype)) {
        return kvfi_fail(err, KVF_LIMIT,
                         "the dtype of %s is not a name of up to 15 letters and digits, such as float16", name);
    }
    if (array->num_dims > KVF_MAX_DIMS) {
        return kvfi_fail(err, KVF_LIMIT, "%s has %u dimensions; at most %u are allowed", name, array->num_dims,
                         KVF_MAX_DIMS);
    }
    uint64_t bytes = kvfi_dtype_bytes(array->dtype);
    if (bytes == 0 || array->num_dims == 0) {
        return KVF_OK;
    }
    for (uint32_t i = 0; i < array->num_dims; i++) {
        if (__builtin_mul_overflow(bytes, array->dims[i], &bytes)) {
            return kvfi_fail(err, KVF_LIMIT, "the shape of %s is larger than any memory", name);
        }
    }
    if (bytes != array->bytes) {
        return kvfi_fail(err, KVF_LIMIT, "the shape of %s takes %llu bytes as %s, but it has %llu", name,
                         (unsigned long long)bytes, array->dtype, (unsigned long long)array->bytes);
    }
    return KVF_OK;
}

/* ---- encode. jansson answers NULL without memory; setting a NULL value fails, and that failure is all that is looked
 * at. */
static bool set(json_t *object, const char *name, json_t *value) {
    return json_object_set_new(object, name, value) == 0;
}

static json_t *shape_of(const kvfi_array *array) {
    json_t *shape = json_array();
    for (uint32_t i = 0; i < array->num_dims; i++) {
        if (json_array_append_new(shape, json_integer((json_int_t)array->dims[i])) != 0) {
            json_decref(shape);
            return NULL;
        }
    }
    return shape;
}

static json_t *array_json(const kvfi_array *array) {
    char sum[33];
    kvfi_hex(sum, array->xxh3, 16);
    json_t *object = json_object();
    bool ok = set(object, "bytes", json_integer((json_int_t)array->bytes)) && set(object, "xxh3", json_string(sum));
    if (array->dtype[0] != '\0') {
        ok = ok && set(object, "dtype", json_string(array->dtype));
    }
    if (array->num_dims > 0) {
        ok = ok && set(object, "shape", shape_of(array));
    }
    if (!ok) {
        json_decref(object);
        return NULL;
    }
    return object;
}

static bool add_optional(json_t *object, const kvfi_session_meta *meta) {
    bool ok = true;
    if (meta->num_tokens > 0) {
        ok = ok && set(object, "tokens", json_integer(meta->num_tokens));
    }
    if (meta->layout[0] != '\0') {
        ok = ok && set(object, "layout", json_string(meta->layout));
    }
    if (meta->has_space) {
        char hex[65];
        kvfi_hex(hex, meta->space.bytes, 32);
        ok = ok && set(object, "space", json_string(hex));
    }
    if (meta->part_bytes > 0) {
        ok = ok && set(object, "part_bytes", json_integer((json_int_t)meta->part_bytes));
    }
    if (meta->expires_s > 0) {
        ok = ok && set(object, "expires", json_integer(meta->expires_s));
    }
    if (ok && meta->id[0] != '\0') {
        /* JSON is UTF-8: an id that is not UTF-8 is left out. */
        json_t *id = json_string(meta->id);
        ok = id == NULL || set(object, "id", id);
    }
    return ok;
}

static json_t *meta_json(const kvfi_session_meta *meta) {
    json_t *object = json_object();
    bool ok = set(object, "version", json_integer(1)) && set(object, "stored", json_integer(meta->stored_s)) &&
              set(object, "keys", array_json(&meta->keys)) && set(object, "values", array_json(&meta->values)) &&
              add_optional(object, meta);
    if (!ok) {
        json_decref(object);
        return NULL;
    }
    return object;
}

kvf_status kvfi_session_meta_encode(uint8_t **out, size_t *out_len, kvf_error *err, const kvfi_session_meta *meta,
                                    size_t front, size_t align) {
    kvf_status status = KVF_NOMEM;
    uint8_t *bytes = NULL;
    json_t *json = meta_json(meta);
    size_t len = json == NULL ? 0 : json_dumpb(json, NULL, 0, JSON_COMPACT);
    if (len == 0) {
        goto out;
    }
    size_t padded = (front + len + align - 1) / align * align - front;
    bytes = kvfi_alloc(front + padded);
    if (bytes == NULL || json_dumpb(json, (char *)bytes + front, len, JSON_COMPACT) != len) {
        goto out;
    }
    memset(bytes + front + len, ' ', padded - len);
    *out = bytes;
    *out_len = padded;
    bytes = NULL;
    status = KVF_OK;
out:
    kvfi_free(bytes);
    json_decref(json);
    return status == KVF_OK ? KVF_OK : kvfi_fail(err, status, "no memory for the meta of a session");
}

/* ---- decode: every getter answers false for what is there but wrong, and leaves *out alone for what is absent */
static bool get_number(uint64_t *out, const json_t *object, const char *name, uint64_t max) {
    const json_t *value = json_object_get(object, name);
    if (value == NULL) {
        return true;
    }
    json_int_t number = json_integer_value(value);
    if (!json_is_integer(value) || number < 0 || (uint64_t)number > max) {
        return false;
    }
    *out = (uint64_t)number;
    return true;
}

static bool get_text(char *out, size_t cap, const json_t *object, const char *name) {
    const json_t *value = json_object_get(object, name);
    if (value == NULL) {
        return true;
    }
    if (!json_is_string(value) || json_string_length(value) >= cap) {
        return false;
    }
    memcpy(out, json_string_value(value), json_string_length(value) + 1);
    return true;
}

static bool get_hex(uint8_t *out, size_t num, bool *there, const json_t *object, const char *name) {
    const json_t *value = json_object_get(object, name);
    *there = value != NULL;
    if (value == NULL) {
        return true;
    }
    return json_is_string(value) && json_string_length(value) == 2 * num &&
           kvfi_unhex(out, json_string_value(value), num);
}

static bool get_shape(kvfi_array *out, const json_t *object) {
    const json_t *shape = json_object_get(object, "shape");
    if (shape == NULL) {
        return true;
    }
    if (!json_is_array(shape) || json_array_size(shape) > KVF_MAX_DIMS) {
        return false;
    }
    out->num_dims = (uint32_t)json_array_size(shape);
    for (uint32_t i = 0; i < out->num_dims; i++) {
        const json_t *dim = json_array_get(shape, i);
        if (!json_is_integer(dim) || json_integer_value(dim) < 0) {
            return false;
        }
        out->dims[i] = (uint64_t)json_integer_value(dim);
    }
    return true;
}

static kvf_status get_array(kvfi_array *out, kvf_error *err, const json_t *object, const char *name) {
    const json_t *array = json_object_get(object, name);
    bool has_sum = false;
    out->bytes = UINT64_MAX;
    if (!json_is_object(array) || !get_number(&out->bytes, array, "bytes", KVFI_MAX_ARRAY_BYTES) ||
        out->bytes == UINT64_MAX || !get_hex(out->xxh3, 16, &has_sum, array, "xxh3") || !has_sum ||
        !get_text(out->dtype, sizeof out->dtype, array, "dtype") || !get_shape(out, array)) {
        return kvfi_fail(err, KVF_MISS, "the meta of the session does not describe its %s", name);
    }
    /* An error that means a wrong argument in a save means a damaged session here. */
    return kvfi_array_check(out, err, name) == KVF_OK ? KVF_OK
                                                      : kvfi_fail(err, KVF_MISS,
                                                                  "the meta of the session contradicts itself: "
                                                                  "dtype, shape and bytes of its %s don't fit",
                                                                  name);
}

static kvf_status read_meta(kvfi_session_meta *out, kvf_error *err, const json_t *object) {
    uint64_t version = 0, tokens = 0, stored = 0, expires = 0;
    if (!json_is_object(object) || !get_number(&version, object, "version", UINT32_MAX)) {
        return kvfi_fail(err, KVF_MISS, "the meta of the session is not a JSON object with a version");
    }
    if (version != 1) {
        return kvfi_fail(err, KVF_MISS, "the meta of the session has version %llu; this library knows 1",
                         (unsigned long long)version);
    }
    if (!get_number(&tokens, object, "tokens", UINT32_MAX) || !get_number(&stored, object, "stored", INT64_MAX) ||
        !get_number(&expires, object, "expires", INT64_MAX) ||
        !get_number(&out->part_bytes, object, "part_bytes", KVFI_MAX_ARRAY_BYTES) ||
        !get_text(out->layout, sizeof out->layout, object, "layout") ||
        !get_text(out->id, sizeof out->id, object, "id") ||
        !get_hex(out->space.bytes, 32, &out->has_space, object, "space")) {
        return kvfi_fail(err, KVF_MISS, "the meta of the session has a field of a wrong type or size");
    }
    out->num_tokens = (uint32_t)tokens;
    out->stored_s = (int64_t)stored;
    out->expires_s = (int64_t)expires;
    KVFI_TRY(get_array(&out->keys, err, object, "keys"));
    KVFI_TRY(get_array(&out->values, err, object, "values"));
    uint64_t longest = out->keys.bytes > out->values.bytes ? out->keys.bytes : out->values.bytes;
    if (out->part_bytes > 0 && longest / out->part_bytes >= KVFI_MAX_PARTS) {
        return kvfi_fail(err, KVF_MISS, "the meta of the session spreads it over more than %u fields", KVFI_MAX_PARTS);
    }
    return KVF_OK;
}

kvf_status kvfi_session_meta_decode(kvfi_session_meta *out, kvf_error *err, const void *text, size_t len) {
    json_error_t error;
    memset(out, 0, sizeof *out);
    if (len > KVFI_MAX_META_BYTES) {
        return kvfi_fail(err, KVF_MISS, "the meta of the session is longer than 1 MiB");
    }
    json_t *json = json_loadb(text, len, JSON_REJECT_DUPLICATES, &error);
    if (json == NULL) {
        if (json_error_code(&error) == json_error_out_of_memory) {
            return kvfi_fail(err, KVF_NOMEM, "no memory to read the meta of the session");
        }
        return kvfi_fail(err, KVF_MISS, "the meta of the session is not JSON: %.120s", error.text);
    }
    kvf_status status = read_meta(out, err, json);
    json_decref(json);
    return status;
}
