/* SPDX-License-Identifier: Apache-2.0
 *
 * Counts the memory that the library holds, by a system table in front of the real one.
 */
#include "support/meter.h"

#include <malloc.h>
#include <stdatomic.h>

#include "base/sys.h"

static const kvfi_systable *below;
static kvfi_systable table;
static _Atomic size_t live, peak;

static void grow(size_t bytes) {
    size_t now = atomic_fetch_add(&live, bytes) + bytes, most = atomic_load(&peak);
    while (now > most && !atomic_compare_exchange_weak(&peak, &most, now)) {
    }
}

static void shrink(size_t bytes) {
    atomic_fetch_sub(&live, bytes);
}

static void *m_alloc(size_t bytes) {
    void *p = below->alloc(bytes);
    grow(malloc_usable_size(p));
    return p;
}

static void *m_resize(void *old, size_t bytes) {
    size_t before = malloc_usable_size(old);
    void *p = below->resize(old, bytes);
    if (p != NULL) {
        grow(malloc_usable_size(p));
        shrink(before);
    }
    return p;
}

static void m_release(void *p) {
    shrink(malloc_usable_size(p));
    below->release(p);
}

/* The arena of a backlog is address space: the backlog itself bounds what is used of it. */
#define ARENA ((size_t)256 << 20)

static void *m_map(size_t bytes, int fd, off_t at) {
    void *p = below->map(bytes, fd, at);
    grow(p != NULL && bytes != ARENA ? bytes : 0);
    return p;
}

static int m_unmap(void *p, size_t bytes) {
    shrink(bytes != ARENA ? bytes : 0);
    return below->unmap(p, bytes);
}

void kvft_meter_begin(void) {
    below = kvfi_sys_table;
    table = *below;
    table.alloc = m_alloc;
    table.resize = m_resize;
    table.release = m_release;
    table.map = m_map;
    table.unmap = m_unmap;
    atomic_store(&live, 0);
    atomic_store(&peak, 0);
    kvfi_sys_table = &table;
}

size_t kvft_meter_peak(void) {
    return atomic_load(&peak);
}

void kvft_meter_end(void) {
    kvfi_sys_table = below;
}
