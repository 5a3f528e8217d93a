/* SPDX-License-Identifier: Apache-2.0
 *
 * Public structs that grow: how a struct that begins with `struct_size` passes between a caller and a library that were
 * compiled with different versions of the headers. ARCHITECTURE.md ("How structs grow") has the rules. This header
 * needs nothing of the library, so that engines follow the same rules.
 */
#ifndef KVFI_SIZED_H
#define KVFI_SIZED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "kvferry/status.h"

/* The largest struct_size that is believed. A larger one was not set. */
#define KVFI_MAX_STRUCT_SIZE 4096u

typedef struct kvfi_sized {
    const char *name;
    size_t first, now; /* its size in the first release that has it, and now */
} kvfi_sized;

#define KVFI_END_OF(type, field) (offsetof(type, field) + sizeof(((type *)0)->field))

/* KVFI_SIZED defines `TYPE_sized`, to pass to the functions below: `first_last` is the last field of the first release
 * of TYPE, `first_size` the size that the struct had then where pointers have 64 bits, and `last` its last field today.
 * A field is appended, and only `last` then changes here. A struct without padding at its end has no place where a
 * field could be added without a change of its size. */
#define KVFI_SIZED(type, first_last, first_size, last)                                                   \
    _Static_assert(offsetof(type, struct_size) == 0, #type " begins with struct_size");                  \
    _Static_assert(KVFI_END_OF(type, last) == sizeof(type),                                              \
                   #type " grew: name its last field here, and pad it so that it ends with that field"); \
    _Static_assert(sizeof(void *) != 8 || KVFI_END_OF(type, first_last) == (first_size),                 \
                   #type " changed within what was released: append fields instead");                    \
    _Static_assert(sizeof(type) <= KVFI_MAX_STRUCT_SIZE, #type " is too large");                         \
    static const kvfi_sized type##_sized = {#type, KVFI_END_OF(type, first_last), sizeof(type)}

/* Whether a struct's `reserved` is zero. */
static inline bool kvfi_reserved_is_zero(const uint64_t reserved[2]) {
    return (reserved[0] | reserved[1]) == 0;
}

/* kvfi_size_of returns a struct's struct_size; KVF_LIMIT if it is impossible. */
static inline kvf_status kvfi_size_of(uint32_t *out, kvf_error *err, const void *sized, const kvfi_sized *type) {
    memcpy(out, sized, sizeof *out);
    if (*out >= type->first && *out <= KVFI_MAX_STRUCT_SIZE) {
        return KVF_OK;
    }
    if (err != NULL) {
        err->status = KVF_LIMIT;
        snprintf(err->what, sizeof err->what, "%s: struct_size is %u: set it to sizeof(%s)", type->name, *out,
                 type->name);
    }
    return KVF_LIMIT;
}

/* kvfi_take copies a caller's options to *out, the current form of the struct. Fields that the caller does not know are
 * zero, their default. `in` may be NULL: then all are. KVF_LIMIT if struct_size was not set, or if a field is set that
 * this version of the library does not know: it is not dropped silently. */
static inline kvf_status kvfi_take(void *out, kvf_error *err, const void *in, const kvfi_sized *type) {
    uint32_t theirs = 0, ours = (uint32_t)type->now;
    memset(out, 0, type->now);
    if (in != NULL) {
        kvf_status status = kvfi_size_of(&theirs, err, in, type);
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

/* kvfi_give fills a caller's struct from `from`, its current form: as much as the caller knows. Fields that only the
 * caller knows are zero. KVF_LIMIT, and nothing is written, if struct_size was not set. */
static inline kvf_status kvfi_give(void *out, const void *from, const kvfi_sized *type) {
    uint32_t theirs = 0;
    kvf_status status = kvfi_size_of(&theirs, NULL, out, type);
    if (status != KVF_OK) {
        return status;
    }
    size_t shared = theirs < type->now ? theirs : type->now;
    memcpy((char *)out + sizeof theirs, (const char *)from + sizeof theirs, shared - sizeof theirs);
    memset((char *)out + shared, 0, theirs - shared);
    return KVF_OK;
}

#endif
