/* SPDX-License-Identifier: Apache-2.0
 *
 * Loads consecutive blocks through a queue while the engine computes, and tells which of them have arrived.
 */
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "llama/fetch/fetch.h"

#define LOOKUP KVFL_NUM_FLIGHTS /* as the user of a batch: after the numbers of the flights */

static size_t item_of(const kvfl_flight *f, size_t block) {
    return f->down ? f->first + f->num - 1 - block : block - f->first;
}

static bool has(const kvfl_flight *f, size_t block) {
    return f->num > 0 && block >= f->first && block < f->first + f->num;
}

/* A block from number `wanted` on was cancelled before it began. Any other missed block was not there. */
static kvfl_landing landing(const kvfl_flight *f, size_t item) {
    switch (kvf_arrival_of(&f->arrivals, item)) {
    case KVF_HERE:
        return KVFL_HERE;
    case KVF_MISSED:
        return item < f->wanted ? KVFL_MISSED : KVFL_NOT_ASKED;
    default:
        return item < f->wanted ? KVFL_AWAITED : KVFL_NOT_ASKED;
    }
}

static void forget(kvfl_flight *f, bool keep_memory) {
    if (!keep_memory) {
        free(f->memory);
        free(f->blocks);
        free(f->iov);
        free(f->each);
        *f = (kvfl_flight){0};
        return;
    }
    f->num = 0;
    f->ticket = 0;
}

static bool make_room(kvfl_flight *f, size_t num, size_t bytes) {
    if (f->capacity >= num && f->room >= bytes) {
        return true;
    }
    forget(f, false);
    f->memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    f->blocks = calloc(num, sizeof *f->blocks);
    f->iov = calloc(num, sizeof *f->iov);
    f->each = calloc(num, 1);
    f->capacity = num;
    f->room = bytes;
    if (f->memory == NULL || f->blocks == NULL || f->iov == NULL || f->each == NULL) {
        forget(f, false);
        return false;
    }
    return true;
}

/* A flight whose memory is free for that many blocks and bytes; NULL: there is none. */
static kvfl_flight *clear(kvf_llama *kv, size_t which, size_t num, size_t bytes) {
    kvfl_flight *f = &kv->fetch->flights[which];
    if ((f->ticket != 0 && !f->over) || !make_room(f, num, bytes)) {
        return NULL;
    }
    f->num = 0; /* what it held */
    f->ticket = 0;
    f->over = false;
    f->arrivals = (kvf_arrivals){.each = f->each};
    memset(f->each, 0, num);
    return f;
}

static void set_item(kvfl_flight *f, size_t i, kvf_block block, uint8_t *memory, size_t len) {
    f->iov[i] = (struct iovec){memory, len};
    f->blocks[i] = block;
    f->blocks[i].iov = &f->iov[i];
    f->blocks[i].num_iov = 1;
}

static bool launch(kvf_llama *kv, size_t which, size_t first, size_t num, int64_t budget_us) {
    kvfl_flight *f = &kv->fetch->flights[which];
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_LOAD,
                       .space = kv->space,
                       .blocks = f->blocks,
                       .num = num,
                       .budget_us = budget_us,
                       .user = which,
                       .arrivals = &f->arrivals};
    if (kvf_submit(kv->fetch->queue, &f->ticket, &batch) != KVF_OK) {
        forget(f, which < KVFL_SMALL_FLIGHTS);
        return false;
    }
    f->first = first;
    f->num = f->wanted = num;
    return true;
}

bool kvfl_flight_start(kvf_llama *kv, size_t which, size_t first, size_t num, bool down, int64_t budget_us) {
    size_t room = which >= KVFL_SMALL_FLIGHTS ? num : kv->fetch->group;
    kvfl_flight *f = num > 0 ? clear(kv, which, room, room * kv->stride) : NULL;
    if (f == NULL) {
        return false;
    }
    f->down = down;
    for (size_t i = 0; i < num; i++) {
        size_t block = down ? first + num - 1 - i : first + i;
        set_item(f, i, kvfl_block_of(kv, block), f->memory + i * kv->stride, kvfl_bytes_of(kv, block));
    }
    return launch(kv, which, first, num, budget_us);
}

/* ---- the state ---- */

bool kvfl_flight_start_state(kvf_llama *kv, size_t index, const kvf_block *block, size_t len, int64_t budget_us) {
    kvfl_flight *f = clear(kv, KVFL_STATE_FLIGHT, 1, len);
    if (f == NULL) {
        return false;
    }
    set_item(f, 0, *block, f->memory, len);
    return launch(kv, KVFL_STATE_FLIGHT, index, 1, budget_us);
}

kvfl_landing kvfl_flight_of_state(const kvf_llama *kv, size_t index, const struct iovec **bytes) {
    const kvfl_flight *f = &kv->fetch->flights[KVFL_STATE_FLIGHT];
    *bytes = f->iov;
    return f->num > 0 && f->first == index ? landing(f, 0) : KVFL_NOT_ASKED;
}

uint64_t kvfl_flight_state_rest(const kvf_llama *kv) {
    const kvfl_flight *f = &kv->fetch->flights[KVFL_STATE_FLIGHT];
    uint64_t whole = f->num > 0 && !f->over ? f->iov[0].iov_len : 0, came = kvf_arrived_bytes(&f->arrivals);
    return whole > came ? whole - came : 0;
}

kvf_reason kvfl_flight_state_why(const kvf_llama *kv) {
    return kvf_arrival_why(&kv->fetch->flights[KVFL_STATE_FLIGHT].arrivals, 0);
}

/* ---- the lookup ---- */

static void forget_lookup(kvfl_lookup *l) {
    free(l->blocks);
    free(l->found);
    *l = (kvfl_lookup){0};
}

static bool make_lookup_room(kvfl_lookup *l, size_t num) {
    if (l->capacity >= num) {
        return true;
    }
    forget_lookup(l);
    l->blocks = calloc(num, sizeof *l->blocks);
    l->found = calloc(num, sizeof *l->found);
    l->capacity = num;
    if (l->blocks == NULL || l->found == NULL) {
        forget_lookup(l);
        return false;
    }
    return true;
}

bool kvfl_lookup_start(kvf_llama *kv, size_t first, size_t end, int64_t budget_us) {
    kvfl_lookup *l = &kv->fetch->lookup;
    if ((l->ticket != 0 && !l->over) || !make_lookup_room(l, end - first)) {
        return false;
    }
    l->ticket = 0;
    l->over = false;
    l->num = end - first;
    for (size_t i = 0; i < l->num; i++) {
        l->blocks[i] = (kvf_block){.key = kv->cells->keys[first + i]};
    }
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_MATCH,
                       .space = kv->space,
                       .blocks = l->blocks,
                       .num = l->num,
                       .budget_us = budget_us,
                       .user = LOOKUP,
                       .found = l->found};
    return kvf_submit(kv->fetch->queue, &l->ticket, &batch) == KVF_OK;
}

/* ---- what has landed ---- */

kvfl_landing kvfl_flight_of(const kvf_llama *kv, size_t block, const struct iovec **bytes) {
    kvfl_landing best = KVFL_NOT_ASKED;
    for (size_t which = 0; which < KVFL_STATE_FLIGHT; which++) {
        const kvfl_flight *f = &kv->fetch->flights[which];
        kvfl_landing state = has(f, block) ? landing(f, item_of(f, block)) : KVFL_NOT_ASKED;
        if (state == KVFL_HERE) {
            *bytes = &f->iov[item_of(f, block)];
            return KVFL_HERE;
        }
        best = state == KVFL_AWAITED || best == KVFL_NOT_ASKED ? state : best;
    }
    return best;
}

kvf_reason kvfl_flight_why(const kvf_llama *kv, size_t block) {
    for (size_t which = 0; which < KVFL_STATE_FLIGHT; which++) {
        const kvfl_flight *f = &kv->fetch->flights[which];
        if (has(f, block) && landing(f, item_of(f, block)) == KVFL_MISSED) {
            return kvf_arrival_why(&f->arrivals, item_of(f, block));
        }
    }
    return KVF_WHY_NONE;
}

void kvfl_flights_look(kvf_llama *kv) {
    kvf_completion done;
    while (kv->fetch->queue != NULL && kvf_reap(kv->fetch->queue, &done, 1) == 1) {
        if (done.user == LOOKUP) {
            kv->fetch->lookup.over = true;
            kv->fetch->lookup.run = done.num_ok;
        } else {
            kv->fetch->flights[done.user].over = true;
        }
    }
}

void kvfl_flights_wait(const kvf_llama *kv, int64_t us) {
    struct pollfd fd = {.fd = kvf_queue_fd(kv->fetch->queue), .events = POLLIN};
    poll(&fd, 1, us > 1000 ? (int)(us / 1000) : 1);
}

uint64_t kvfl_flights_partial(const kvf_llama *kv, size_t first, size_t end) {
    uint64_t sum = 0;
    for (size_t which = 0; which < KVFL_STATE_FLIGHT; which++) {
        const kvfl_flight *f = &kv->fetch->flights[which];
        if (f->num == 0 || f->first >= end || f->first + f->num <= first || f->over) {
            continue;
        }
        uint64_t whole = 0, came = kvf_arrived_bytes(&f->arrivals);
        for (size_t i = 0; i < f->num; i++) {
            whole += kvf_arrival_of(&f->arrivals, i) == KVF_HERE ? f->iov[i].iov_len : 0;
        }
        sum += came > whole ? came - whole : 0;
    }
    return sum;
}

bool kvfl_flights_moving(const kvf_llama *kv) {
    for (size_t which = 0; which < KVFL_NUM_FLIGHTS; which++) {
        if (kv->fetch->flights[which].num > 0 && !kv->fetch->flights[which].over) {
            return true;
        }
    }
    return false;
}

bool kvfl_flights_busy(const kvf_llama *kv) {
    for (size_t which = 0; which < KVFL_NUM_FLIGHTS; which++) {
        if (kv->fetch->flights[which].ticket != 0 && !kv->fetch->flights[which].over) {
            return true;
        }
    }
    return false;
}

/* ---- calling off ---- */

static void trim(kvf_llama *kv, kvfl_flight *f, size_t front) {
    size_t end = f->first + f->num, wanted = front < end ? end - front : 0;
    if (f->num > 0 && !f->over && wanted < f->wanted) {
        kvf_trim(kv->fetch->queue, f->ticket, wanted);
        f->wanted = wanted;
    }
}

void kvfl_flights_trim(kvf_llama *kv, size_t front) {
    for (size_t which = KVFL_SMALL_FLIGHTS; which < KVFL_STATE_FLIGHT; which++) {
        trim(kv, &kv->fetch->flights[which], front);
    }
}

void kvfl_flights_settle(kvf_llama *kv) {
    for (size_t which = KVFL_SMALL_FLIGHTS; which < KVFL_STATE_FLIGHT; which++) {
        kvfl_flight *f = &kv->fetch->flights[which];
        size_t begun = 1; /* one, as far as known, is under way */
        for (size_t i = 0; i < f->num; i++) {
            begun += kvf_arrival_of(&f->arrivals, i) != KVF_AWAITED;
        }
        if (f->num > begun) {
            trim(kv, f, f->first + f->num - begun);
        }
    }
}

static void cancel(kvf_llama *kv, kvfl_flight *f) {
    if (f->ticket != 0 && !f->over) {
        kvf_cancel(kv->fetch->queue, f->ticket);
    }
    f->num = 0; /* its blocks belong to no prompt now */
}

void kvfl_flights_drop_small(kvf_llama *kv) {
    for (size_t which = 0; which < KVFL_SMALL_FLIGHTS; which++) {
        if (kv->fetch->flights[which].num > 0 && !kv->fetch->flights[which].over) {
            cancel(kv, &kv->fetch->flights[which]);
        }
    }
}

void kvfl_flights_stop(kvf_llama *kv) {
    for (size_t which = 0; which < KVFL_NUM_FLIGHTS; which++) {
        cancel(kv, &kv->fetch->flights[which]);
    }
    for (size_t which = KVFL_SMALL_FLIGHTS; which < KVFL_NUM_FLIGHTS; which++) {
        if (kv->fetch->flights[which].over) {
            forget(&kv->fetch->flights[which], false);
        }
    }
}

/* ---- all of it ---- */

kvf_status kvfl_open_fetch(kvf_llama *kv, kvf_error *err, int64_t budget_us) {
    kvfl_fetch *fetch = kv->fetch;
    fetch->budget_us = budget_us;
    fetch->group = KVFL_GROUP_BYTES / kv->stride > 0 ? KVFL_GROUP_BYTES / kv->stride : 1;
    return kv->store != NULL ? kvf_queue_open(&fetch->queue, err, kv->store, 2 * KVFL_NUM_FLIGHTS) : KVF_OK;
}

void kvfl_close_fetch(kvf_llama *kv) {
    kvf_queue_close(kv->fetch->queue);
    forget_lookup(&kv->fetch->lookup);
    for (size_t which = 0; which < KVFL_NUM_FLIGHTS; which++) {
        forget(&kv->fetch->flights[which], false);
    }
}
