/* SPDX-License-Identifier: Apache-2.0
 *
 * The library's own memory. All of it goes through the system table, so that tests can fail and count allocations.
 */
#include <string.h>

#include "base/sys.h"

void *kvfi_alloc(size_t bytes) {
    return kvfi_sys->alloc(bytes == 0 ? 1 : bytes);
}

void *kvfi_alloc_zero(size_t num, size_t bytes) {
    size_t total = 0;
    if (__builtin_mul_overflow(num, bytes, &total)) {
        return NULL;
    }
    void *p = kvfi_alloc(total);
    if (p != NULL) {
        memset(p, 0, total);
    }
    return p;
}

void kvfi_free(void *p) {
    if (p != NULL) {
        kvfi_sys->release(p);
    }
}

char *kvfi_strndup(const char *text, size_t len) {
    char *copy = kvfi_alloc(len + 1);
    if (copy != NULL) {
        memcpy(copy, text, len);
        copy[len] = '\0';
    }
    return copy;
}
