/* SPDX-License-Identifier: Apache-2.0
 *
 * Views: the parts of an engine's own paged KV memory that make up a block, and fences on their slots.
 */
#include <unistd.h>

#include "kvferry/sized.h"
#include "prefix/prefix.h"

#define MAX_REGIONS 4096u
#define MAX_RUNS    65536u
#define MAX_SLOTS   ((size_t)1 << 26)

struct kvf_view {
    pid_t pid; /* the process that opened it: in another process a missing thread may hold the lock */
    size_t num_slots, num_regions, num_runs, slot_bytes;
    pthread_mutex_t lock;
    pthread_cond_t left;
    uint32_t *users;  /* of each slot: the operations that use it, or will */
    size_t num_users; /* operations that have entered and not left */
    kvf_region regions[];
};

/* Whether the last byte of the last slot has an address. */
static bool fits(const kvf_region *region, size_t num_slots) {
    size_t slots = 0, runs = 0, end = (size_t)(uintptr_t)region->base;
    return !__builtin_mul_overflow(region->slot_stride, num_slots - 1, &slots) &&
           !__builtin_mul_overflow(region->run_stride, (size_t)region->num_runs - 1, &runs) &&
           !__builtin_add_overflow(end, slots, &end) && !__builtin_add_overflow(end, runs, &end) &&
           !__builtin_add_overflow(end, region->run_bytes, &end);
}

static kvf_status measure(kvf_view *view, kvf_error *err) {
    for (size_t i = 0; i < view->num_regions; i++) {
        const kvf_region *region = &view->regions[i];
        size_t bytes = 0;
        if (region->base == NULL || region->run_bytes == 0 || region->num_runs == 0 ||
            __builtin_mul_overflow(region->run_bytes, (size_t)region->num_runs, &bytes)) {
            return kvfi_fail(err, KVF_LIMIT, "region %zu of the view is empty or has no memory", i);
        }
        if (!fits(region, view->num_slots)) {
            return kvfi_fail(err, KVF_LIMIT, "region %zu of the view reaches beyond the end of memory", i);
        }
        view->num_runs += region->num_runs;
        view->slot_bytes += bytes;
        if (view->num_runs > MAX_RUNS || view->slot_bytes > KVF_MAX_PAYLOAD_BYTES) {
            return kvfi_fail(err, KVF_LIMIT, "a slot of the view has more than %u runs or %zu bytes", MAX_RUNS,
                             KVF_MAX_PAYLOAD_BYTES);
        }
    }
    return KVF_OK;
}

kvf_status kvf_view_open(kvf_view **out, kvf_error *err, const kvf_region *regions, size_t num_regions,
                         size_t num_slots) {
    if (num_regions == 0 || num_regions > MAX_REGIONS || num_slots == 0 || num_slots > MAX_SLOTS) {
        return kvfi_fail(err, KVF_LIMIT, "a view has 1 to %u regions and 1 to %zu slots", MAX_REGIONS, MAX_SLOTS);
    }
    for (size_t i = 0; i < num_regions; i++) {
        if (!kvf_reserved_is_zero(regions[i].reserved)) {
            return kvfi_fail(err, KVF_LIMIT, "kvf_region: `reserved` of region %zu is not zero", i);
        }
    }
    kvf_view *view = kvfi_alloc_zero(1, sizeof *view + num_regions * sizeof *regions);
    uint32_t *users = kvfi_alloc_zero(num_slots, sizeof *users);
    if (view == NULL || users == NULL) {
        kvfi_free(view);
        kvfi_free(users);
        return kvfi_fail(err, KVF_NOMEM, "no memory for a view of %zu slots", num_slots);
    }
    view->pid = getpid();
    view->num_slots = num_slots;
    view->num_regions = num_regions;
    view->users = users;
    memcpy(view->regions, regions, num_regions * sizeof *regions);
    kvf_status status = measure(view, err);
    if (status != KVF_OK) {
        kvfi_free(users);
        kvfi_free(view);
        return status;
    }
    pthread_mutex_init(&view->lock, NULL);
    kvfi_cond_init(&view->left);
    *out = view;
    return KVF_OK;
}

void kvf_view_close(kvf_view *view) {
    if (view == NULL || !kvfi_view_is_ours(view)) {
        return;
    }
    pthread_mutex_lock(&view->lock);
    while (view->num_users > 0) {
        pthread_cond_wait(&view->left, &view->lock);
    }
    pthread_mutex_unlock(&view->lock);
    pthread_cond_destroy(&view->left);
    pthread_mutex_destroy(&view->lock);
    kvfi_free(view->users);
    kvfi_free(view);
}

static bool any_used(const kvf_view *view, const int64_t *slots, size_t num) {
    for (size_t i = 0; i < num; i++) {
        if (view->users[slots[i]] > 0) {
            return true;
        }
    }
    return false;
}

static bool has_all(const kvf_view *view, const int64_t *slots, size_t num) {
    for (size_t i = 0; i < num; i++) {
        if (!kvfi_view_has_slot(view, slots[i])) {
            return false;
        }
    }
    return true;
}

kvf_status kvf_fence(kvf_view *view, const int64_t *slots, size_t num, int64_t budget_us) {
    KVFI_TRY(kvfi_take_budget(&budget_us, NULL, KVFI_BLOCKS_US, true));
    if (!kvfi_view_is_ours(view)) {
        return KVF_CLOSED;
    }
    if (!has_all(view, slots, num)) {
        return KVF_LIMIT;
    }
    int64_t deadline_us = kvfi_deadline(budget_us);
    bool in_time = true;
    pthread_mutex_lock(&view->lock);
    while (any_used(view, slots, num) && in_time) {
        in_time = kvfi_cond_wait(&view->left, &view->lock, deadline_us);
    }
    bool used = any_used(view, slots, num);
    pthread_mutex_unlock(&view->lock);
    return used ? KVF_AGAIN : KVF_OK;
}

bool kvfi_view_is_ours(const kvf_view *view) {
    return view == NULL || view->pid == getpid();
}

size_t kvfi_view_num_runs(const kvf_view *view) {
    return view->num_runs;
}

size_t kvfi_view_slot_bytes(const kvf_view *view) {
    return view->slot_bytes;
}

bool kvfi_view_has_slot(const kvf_view *view, int64_t slot) {
    return slot >= 0 && (uint64_t)slot < view->num_slots;
}

void kvfi_view_runs(const kvf_view *view, int64_t slot, struct iovec *out) {
    for (size_t i = 0; i < view->num_regions; i++) {
        const kvf_region *region = &view->regions[i];
        uint8_t *base = (uint8_t *)region->base + (size_t)slot * region->slot_stride;
        for (uint32_t run = 0; run < region->num_runs; run++) {
            *out++ = (struct iovec){base + run * region->run_stride, region->run_bytes};
        }
    }
}

void kvfi_view_enter(kvf_view *view, const kvf_block *blocks, size_t num) {
    if (view == NULL) {
        return;
    }
    pthread_mutex_lock(&view->lock);
    for (size_t i = 0; i < num; i++) {
        if (blocks[i].iov == NULL) {
            view->users[blocks[i].slot]++;
        }
    }
    view->num_users++;
    pthread_mutex_unlock(&view->lock);
}

void kvfi_view_leave(kvf_view *view, const kvf_block *blocks, size_t num) {
    if (view == NULL) {
        return;
    }
    pthread_mutex_lock(&view->lock);
    view->num_users--;
    for (size_t i = 0; i < num; i++) {
        if (blocks[i].iov == NULL) {
            view->users[blocks[i].slot]--;
        }
    }
    pthread_cond_broadcast(&view->left);
    pthread_mutex_unlock(&view->lock);
}
