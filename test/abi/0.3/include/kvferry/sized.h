/* SPDX-License-Identifier: Apache-2.0
 *
 * For authors of engines, in C: structs that grow. A program that only uses kvferry does not need this header.
 *
 * A struct that begins with `struct_size` passes between a caller and a library that were compiled with different
 * versions of the headers. The caller sets struct_size to sizeof its struct, and zero everything else that it does not
 * use. The functions here are inline and need nothing of the library, so that the structs of an engine follow the same
 * rules as those of kvferry:
 *
 * - Fields are only appended. A smaller, older struct is accepted: the fields that its caller does not know are zero.
 * - A larger, newer struct is accepted if the fields that this library does not know are zero.
 * - A struct_size that was not set is KVF_LIMIT.
 */
#ifndef KVF_SIZED_H
#define KVF_SIZED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "kvferry/status.h"

/* The largest struct_size that is believed. A larger one was not set. */
#define KVF_MAX_STRUCT_SIZE 4096u

/* A struct that grows; KVF_SIZED defines it. */
typedef struct kvf_sized {
    const char *name;
    /* The size in the first release that has it, and the size now. */
    size_t first, now;
} kvf_sized;

/* The offset of what follows a field. */
#define KVF_END_OF(type, field) (offsetof(type, field) + sizeof(((type *)0)->field))

/* KVF_SIZED defines `TYPE_sized`, to pass to the functions below: `first_last` is the last field of the first release
 * of TYPE, `first_size` the size that the struct had then where pointers have 64 bits, and `last` its last field today.
 * A field is appended, and only `last` then changes here. A struct without padding at its end has no place where a
 * field could be added without a change of its size. */
#define KVF_SIZED(type, first_last, first_size, last)                                                    \
    _Static_assert(offsetof(type, struct_size) == 0, #type " begins with struct_size");                  \
    _Static_assert(KVF_END_OF(type, last) == sizeof(type),                                               \
                   #type " grew: name its last field here, and pad it so that it ends with that field"); \
    _Static_assert(sizeof(void *) != 8 || KVF_END_OF(type, first_last) == (first_size),                  \
                   #type " changed within what was released: append fields instead");                    \
    _Static_assert(sizeof(type) <= KVF_MAX_STRUCT_SIZE, #type " is too large");                          \
    static const kvf_sized type##_sized = {#type, KVF_END_OF(type, first_last), sizeof(type)}

/* Whether a struct's `reserved` is zero. */
static inline bool kvf_reserved_is_zero(const uint64_t reserved[2]) {
    return (reserved[0] | reserved[1]) == 0;
}

/* kvf_sized_size returns a struct's struct_size; KVF_LIMIT if it is impossible. */
static inline kvf_status kvf_sized_size(uint32_t *out, kvf_error *err, const void *sized, const kvf_sized *type) {
    memcpy(out, sized, sizeof *out);
    if (*out >= type->first && *out <= KVF_MAX_STRUCT_SIZE) {
        return KVF_OK;
    }
    if (err != NULL) {
        err->status = KVF_LIMIT;
        snprintf(err->what, sizeof err->what, "%s: struct_size is %u: set it to sizeof(%s)", type->name, *out,
                 type->name);
    }
    return KVF_LIMIT;
}

/* kvf_sized_take copies a caller's options to *out, the current form of the struct. Fields that the caller does not know are
 * zero, their default. `in` may be NULL: then all are. KVF_LIMIT if struct_size was not set, or if a field is set that
 * this version of the library does not know: it is not dropped silently. */
static inline kvf_status kvf_sized_take(void *out, kvf_error *err, const void *in, const kvf_sized *type) {
    uint32_t theirs = 0, ours = (uint32_t)type->now;
    memset(out, 0, type->now);
    if (in != NULL) {
        kvf_status status = kvf_sized_size(&theirs, err, in, type);
        if (status != KVF_OK) {
            return status;
        }
    }
    for (size_t i = type->now; i < theirs; i++) {
        if (((const unsigned char *)in)[i] != 0) {
            if (err != NULL) {
                err->status = KVF_LIMIT;
                snprintf(err->what, sizeof err->what,
                         "%s: a field is set that kvferry %s does not know: update the library", type->name,
                         KVF_VERSION);
            }
            return KVF_LIMIT;
        }
    }
    if (in != NULL) {
        memcpy(out, in, theirs < type->now ? theirs : type->now);
    }
    memcpy(out, &ours, sizeof ours);
    return KVF_OK;
}

/* kvf_sized_give fills a caller's struct from `from`, its current form: as much as the caller knows. Fields that only the
 * caller knows are zero. KVF_LIMIT, and nothing is written, if struct_size was not set. */
static inline kvf_status kvf_sized_give(void *out, const void *from, const kvf_sized *type) {
    uint32_t theirs = 0;
    kvf_status status = kvf_sized_size(&theirs, NULL, out, type);
    if (status != KVF_OK) {
        return status;
    }
    size_t shared = theirs < type->now ? theirs : type->now;
    memcpy((char *)out + sizeof theirs, (const char *)from + sizeof theirs, shared - sizeof theirs);
    memset((char *)out + shared, 0, theirs - shared);
    return KVF_OK;
}

#endif
