/* SPDX-License-Identifier: Apache-2.0
 *
 * Every call that takes options or fills a struct, with every size that struct_size can have. A table names the calls;
 * kvft_sized_check tries them, and kvft_sized_is_complete compares the table with a public header. The structs end
 * where memory ends, so what is read or written behind them is a crash.
 */
#ifndef KVFT_SIZED_H
#define KVFT_SIZED_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "kvferry/kvferry.h"

typedef struct kvft_sized {
    const char *name;  /* of the struct */
    size_t first, now; /* its size in the first release that has it, where pointers have 64 bits; sizeof today */
    /* A struct of that size and nothing else (`options` false: one to be filled) is passed to the call. What it holds
     * is copied from `good`, or, of one to be filled, is rubbish. The call leaves *err alone where it takes none. */
    const char *call;
    kvf_status (*fn)(void *scene, void *sized, kvf_error *err);
    const void *good; /* options that the call accepts; NULL: it fills the struct */
    /* Whether a struct of today's size was filled; NULL for options. */
    void (*check)(void *scene, const void *sized);
} kvft_sized;

#define KVFT_SIZED_ROOM ((size_t)8192) /* a page before the end of what may be touched, and one more */

enum { KVFT_SIZED_RUBBISH = 0xa5, KVFT_SIZED_MAX = 4096 };

/* `len` bytes, behind which nothing may be touched. */
static inline uint8_t *kvft_sized_guarded(uint8_t **out_mapping, size_t len) {
    uint8_t *mapping = mmap(NULL, KVFT_SIZED_ROOM + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(mapping, MAP_FAILED);
    assert_int_equal(mprotect(mapping + KVFT_SIZED_ROOM, 4096, PROT_NONE), 0);
    *out_mapping = mapping;
    return mapping + KVFT_SIZED_ROOM - len;
}

/* One call with a struct of `size` bytes whose byte number `set`, if it is not 0, is 1. */
static inline kvf_status kvft_sized_call(const kvft_sized *s, void *scene, kvf_error *err, uint32_t size, size_t set,
                                         uint8_t *copy) {
    uint8_t *mapping, *sized = kvft_sized_guarded(&mapping, size < 4 ? 4 : size);
    if (s->good != NULL) {
        memcpy(sized, s->good, size < s->now ? size : s->now);
    } else {
        memset(sized, KVFT_SIZED_RUBBISH, size);
    }
    if (set != 0) {
        sized[set] = 1;
    }
    memcpy(sized, &size, sizeof size);
    *err = (kvf_error){.status = KVF_OK};
    kvf_status status = s->fn(scene, sized, err);
    memcpy(copy, sized, size < 4 ? 4 : size);
    munmap(mapping, KVFT_SIZED_ROOM + 4096);
    return status;
}

static inline void kvft_sized_expect(const kvft_sized *s, void *scene, uint32_t size, size_t set, kvf_status expected,
                                     const char *what) {
    uint8_t copy[KVFT_SIZED_MAX + 8];
    kvf_error err;
    kvf_status status = kvft_sized_call(s, scene, &err, size, set, copy);
    if (status != expected) {
        fail_msg("%s with a %s of %u bytes, byte %zu set: %s, not %s (%s)", s->call, s->name, size, set,
                 kvf_status_name(status), kvf_status_name(expected), err.what);
    }
    if (status == KVF_LIMIT && err.status != KVF_OK &&
        (strstr(err.what, s->name) == NULL || strstr(err.what, what) == NULL)) {
        fail_msg("%s with a %s of %u bytes says \"%s\"", s->call, s->name, size, err.what);
    }
    if (s->good == NULL) {
        uint32_t kept;
        memcpy(&kept, copy, sizeof kept);
        assert_int_equal(kept, size);
        for (size_t i = status == KVF_OK ? s->now : sizeof kept; i < size; i++) {
            assert_int_equal(copy[i], status == KVF_OK ? 0 : KVFT_SIZED_RUBBISH);
        }
    }
    if (s->check != NULL && size == s->now) {
        s->check(scene, copy);
    }
}

static inline void kvft_sized_check(const kvft_sized *s, void *scene) {
    const uint32_t refused[] = {0, 1, 4, (uint32_t)s->first - 1, KVFT_SIZED_MAX + 1};
    const uint32_t taken[] = {(uint32_t)s->first, (uint32_t)s->now, (uint32_t)s->now + 1, (uint32_t)s->now + 8,
                              KVFT_SIZED_MAX};
    assert_true(sizeof(void *) != 8 || s->first <= s->now);
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        kvft_sized_expect(s, scene, refused[i], 0, KVF_LIMIT, "set it to sizeof");
    }
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) {
        kvft_sized_expect(s, scene, taken[i], 0, KVF_OK, "");
    }
    if (s->good != NULL) {
        kvft_sized_expect(s, scene, (uint32_t)s->now + 1, s->now, KVF_LIMIT, "update the library");
        kvft_sized_expect(s, scene, (uint32_t)s->now + 8, s->now + 7, KVF_LIMIT, "update the library");
        kvft_sized_expect(s, scene, KVFT_SIZED_MAX, KVFT_SIZED_MAX - 1, KVF_LIMIT, "update the library");
    }
}

static inline bool kvft_sized_has(const kvft_sized *table, size_t num, const char *name) {
    for (size_t i = 0; i < num; i++) {
        if (strcmp(table[i].name, name) == 0) {
            return true;
        }
    }
    return false;
}

/* Each struct of include/kvferry/HEADER that begins with struct_size is in the table. */
static inline void kvft_sized_is_complete(const kvft_sized *table, size_t num, const char *header) {
    char path[4096], line[400], name[400] = "";
    size_t found = 0;
    snprintf(path, sizeof path, "%s/kvferry/%s", KVFT_INCLUDE, header);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f) != NULL) {
        if (sscanf(line, "typedef struct %399[a-z_] {", name) == 1) {
            continue;
        }
        if (strstr(line, "uint32_t struct_size;") != NULL) {
            found++;
            if (!kvft_sized_has(table, num, name)) {
                fail_msg("%s of %s begins with struct_size, and no call with it is in the table", name, header);
            }
        }
    }
    fclose(f);
    assert_true(found > 0);
}

#endif
