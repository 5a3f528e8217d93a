/* SPDX-License-Identifier: Apache-2.0
 *
 * Brings blocks from the store into a sequence. If a tier allows borrowing, llama.cpp imports straight from the record.
 * Blocks from a network are loaded, or computed, or both at once (kvf_decide): the front is computed while blocks
 * arrive from the end, until they meet. llama.cpp takes the positions of a sequence only in order, so arrived blocks
 * wait in our memory until the front has reached them.
 *
 * A model with states (windows, recurrent layers) can't compute after an imported block until the state at a boundary
 * is there too. So its blocks come from front to end, as long as that promises to be faster than computing them all.
 */
#include "llama/fetch/loading.h"

/* Imports verified bytes. What llama.cpp makes of them is checked once more before they join the sequence. */
static bool import_block(kvfl_loading *l, const void *bytes, size_t len) {
    kvf_llama *kv = l->kv;
    llama_pos first = (llama_pos)kvfl_position(kv, l->next), end = (llama_pos)kvfl_position(kv, l->next + 1);
    int64_t begin = kvfl_now_us();
    bool known = kvfl_is_block(kv, bytes, len, first, end);
    bool ok = known && kvfl_take_in(kv, l->seq, first, end, bytes, len);
    if (ok) {
        l->next++;
        l->report->loaded_tokens += (uint32_t)(end - first);
        l->report->loaded_bytes += len;
    } else {
        l->report->why = known ? KVF_WHY_FULL : KVF_WHY_VERSION; /* no free cells, or not an export of this engine */
    }
    l->report->import_us += kvfl_now_us() - begin;
    return ok;
}

/* ---- borrowing: true when the next block is in, false when it must be loaded, or not at all (then *stop) ---- */

static bool borrow_next(kvfl_loading *l, bool *stop) {
    kvf_block block = kvfl_block_of(l->kv, l->next);
    struct iovec expected = {NULL, kvfl_bytes_of(l->kv, l->next)};
    kvf_borrowed borrowed = {0};
    block.iov = &expected;
    block.num_iov = 1;
    if (kvf_borrow(l->kv->space, &borrowed, &block) != KVF_OK) {
        if (block.why != KVF_WHY_ABSENT) {
            l->report->why = block.why;
            *stop = true;
        }
        return false;
    }
    bool ok = import_block(l, borrowed.data, borrowed.len);
    kvf_release(l->kv->space, &borrowed);
    *stop = !ok;
    return ok;
}

/* A tier that allows borrowing, but slowly (a disk that has to be read), is read in flights instead. */
static void borrow_all(kvfl_loading *l) {
    bool slow = false;
    while (l->next < l->end && !l->stop && !slow) {
        int64_t begin = kvfl_now_us();
        if (begin >= l->deadline_us) {
            l->report->why = KVF_WHY_BUDGET;
            l->stop = true;
        } else if (!borrow_next(l, &l->stop)) {
            return;
        }
        int64_t took_us = kvfl_now_us() - begin;
        slow = l->front != NULL && took_us > KVF_TRIFLE_US && took_us > kvfl_compute_us(l, 1) / 2;
    }
}

/* ---- loading and computing ---- */

/* Appends arrived blocks to the sequence, in order. */
static void import_landed(kvfl_loading *l) {
    const struct iovec *iov = NULL;
    size_t before = l->next;
    while (l->next < l->end && !l->stop && kvfl_flight_of(l->kv, l->next, &iov) == KVFL_HERE) {
        kvfl_earn(l, kvfl_compute_us(l, 1));
        l->stop = !import_block(l, iov->iov_base, iov->iov_len);
    }
    if (l->next > before || l->stop) {
        kvfl_clear_scratch(l->kv);
    }
}

static bool is_settled(kvfl_landing state) {
    return state == KVFL_HERE || state == KVFL_MISSED;
}

kvf_gap kvfl_look_ahead(const kvfl_loading *l) {
    const kvf_llama *kv = l->kv;
    size_t end = l->horizon > l->next ? l->horizon : l->end, at = l->next;
    const struct iovec *iov = NULL;
    while (at < end && !is_settled(kvfl_flight_of(kv, at, &iov))) {
        at++;
    }
    return (kvf_gap){.struct_size = sizeof(kvf_gap),
                     .flags =
                         (kvfl_flights_moving(kv) ? KVF_GAP_MOVING : 0u) | (kvfl_may_wait(l) ? 0u : KVF_GAP_IMPATIENT),
                     .num_blocks = at - l->next,
                     .block_bytes = kvfl_export_bytes(kv, kv->block_tokens),
                     .block_tokens = kv->block_tokens,
                     .batch_tokens = kv->step,
                     .here_bytes = kvfl_flights_partial(kv, l->next, at),
                     .link = kvfl_link_of(l)};
}

/* ---- requests ---- */

/* Requests blocks from the end of the gap, or of what can be held, towards the front. */
static void start_tail(kvfl_loading *l, const kvf_gap *gap) {
    kvf_llama *kv = l->kv;
    size_t room = KVFL_TAIL_BYTES / kv->stride > 0 ? KVFL_TAIL_BYTES / kv->stride : 1;
    size_t num = gap->num_blocks < room ? gap->num_blocks : room;
    const struct iovec *iov = NULL;
    if (kvfl_flight_of(kv, l->next + num - 1, &iov) != KVFL_NOT_ASKED) {
        return;
    }
    bool started = false;
    for (size_t which = KVFL_SMALL_FLIGHTS; which < KVFL_STATE_FLIGHT && !started; which++) {
        started =
            kv->fetch->flights[which].num == 0 && kvfl_flight_start(kv, which, l->next, num, true, kvfl_flight_us(l));
    }
    if (started && l->horizon <= l->next) {
        l->horizon = l->next + num;
    }
}

/* Blocks from `first` on that no flight has, at most a group of them. */
static size_t num_not_asked(const kvfl_loading *l, size_t first) {
    const struct iovec *iov = NULL;
    size_t num = 0;
    while (num < l->kv->fetch->group && first + num < l->end &&
           kvfl_flight_of(l->kv, first + num, &iov) == KVFL_NOT_ASKED) {
        num++;
    }
    return num;
}

static size_t end_of(const kvfl_flight *f) {
    return f->num > 0 ? f->first + f->num : 0;
}

/* Requests blocks from the front on, with the two small flights in turn: each continues where the other one ends. */
static void start_small(kvfl_loading *l) {
    kvf_llama *kv = l->kv;
    for (size_t which = 0; which < KVFL_SMALL_FLIGHTS; which++) {
        const kvfl_flight *f = &kv->fetch->flights[which];
        size_t other = end_of(&kv->fetch->flights[1 - which]), first = other > l->next ? other : l->next;
        bool used_up = f->over && end_of(f) <= l->next;
        if (f->num == 0 || used_up) {
            (void)kvfl_flight_start(kv, which, first, num_not_asked(l, first), false, kvfl_flight_us(l));
        }
    }
}

/* ---- one step ---- */

/* The store delivers faster than one block is computed. Blocks that were requested from the end, when nothing was known
 * of the store, are now requested from the front instead: each is imported as it arrives, and small flights reuse their
 * memory. For less than one small flight another request is not worth it. */
static void go_on_loading(kvfl_loading *l, const kvf_gap *gap) {
    const struct iovec *iov = NULL;
    if (kvfl_flight_of(l->kv, l->next, &iov) == KVFL_NOT_ASKED || gap->num_blocks > l->kv->fetch->group) {
        kvfl_flights_settle(l->kv);
    }
    start_small(l);
    if (kvfl_flights_busy(l->kv) && kvfl_may_wait(l)) {
        kvfl_wait_a_little(l);
    } else {
        kvfl_do_without(l, KVF_WHY_BUDGET);
    }
}

/* Nothing is known of the store: requests something, and gives it little time. */
static void try_store(kvfl_loading *l, const kvf_gap *gap) {
    start_tail(l, gap);
    if (kvfl_flights_moving(l->kv) && kvfl_may_wait(l)) {
        kvfl_wait_a_little(l);
    } else {
        kvfl_do_without(l, KVF_WHY_BUDGET);
    }
}

/* Computes the front up to where blocks from the end will meet it. If nothing would arrive in time, and nothing is
 * under way, the store is not used. */
static void meet(kvfl_loading *l, const kvf_gap *gap, size_t meeting) {
    kvf_llama *kv = l->kv;
    bool alone = meeting == gap->num_blocks;
    size_t num = kvfl_computable(l, meeting);
    if (num == 0 || (alone && !kvfl_flights_moving(kv))) {
        l->report->why = KVF_WHY_SLOW;
        l->stop = true;
        return;
    }
    if (!alone) {
        kvfl_flights_drop_small(kv);
        start_tail(l, gap);
    }
    kvfl_compute_blocks(l, kvf_plan_batch(&kv->pace, num, kv->block_tokens, kv->step));
}

/* The next block is surely not there; or it has arrived since the last look, and is imported at once. */
static void settle_next(kvfl_loading *l) {
    const struct iovec *iov = NULL;
    if (kvfl_flight_of(l->kv, l->next, &iov) == KVFL_HERE) {
        return;
    }
    if (l->report->missed_blocks++ == 0) {
        l->report->missed_why = kvfl_flight_why(l->kv, l->next);
    }
    kvfl_do_without(l, l->report->missed_why);
}

/* If nothing has arrived yet, patience decides. */
bool kvfl_promises(const kvfl_loading *l, const kvf_gap *gap) {
    const kvf_llama *kv = l->kv;
    if (l->front == NULL || !(gap->link.bytes_per_s > 0)) {
        return kvfl_may_wait(l);
    }
    kvf_gap whole = *gap;
    kvf_plan plan = {.struct_size = sizeof plan};
    whole.flags |= KVF_GAP_WHOLE;
    whole.instead_blocks = l->end - l->from;
    whole.other_bytes = kvfl_flight_state_rest(kv);
    return kvfl_now_us() < l->deadline_us && kvf_decide(&plan, NULL, &whole, &kv->pace) == KVF_OK &&
           plan.kind != KVF_PLAN_COMPUTE;
}

kvf_reason kvfl_why_late(const kvf_link *link) {
    return link->bytes_per_s > 0 || link->silent != 0 ? KVF_WHY_SLOW : KVF_WHY_BUDGET;
}

static void step_stateless(kvfl_loading *l, const kvf_gap *gap) {
    bool worth = kvfl_promises(l, gap);
    if (worth) {
        start_small(l);
    }
    if (worth && kvfl_flights_busy(l->kv)) {
        kvfl_wait_a_little(l);
        return;
    }
    l->report->why = kvfl_why_late(&gap->link);
    l->stop = true;
}

static void step_by_plan(kvfl_loading *l, const kvf_gap *gap) {
    kvf_plan plan = {.struct_size = sizeof plan};
    kvf_plan_kind kind = kvf_decide(&plan, NULL, gap, &l->kv->pace) == KVF_OK ? plan.kind : KVF_PLAN_COMPUTE;
    switch (kind) {
    case KVF_PLAN_LOAD:
        go_on_loading(l, gap);
        break;
    case KVF_PLAN_TRY:
        try_store(l, gap);
        break;
    default:
        meet(l, gap, kind == KVF_PLAN_BOTH ? plan.num_compute : gap->num_blocks);
    }
}

static void step(kvfl_loading *l) {
    kvf_gap gap = kvfl_look_ahead(l);
    if (gap.num_blocks == 0) {
        settle_next(l);
    } else if (l->stateless) {
        step_stateless(l, &gap);
    } else if (l->front == NULL) {
        go_on_loading(l, &gap);
    } else {
        step_by_plan(l, &gap);
    }
}

/* ---- all of them ---- */

static void load_and_compute(kvfl_loading *l) {
    for (;;) {
        kvfl_flights_look(l->kv);
        import_landed(l);
        if (l->next >= l->end || l->stop) {
            break;
        }
        step(l);
    }
}

bool kvfl_ask_for_state(const kvfl_loading *l, size_t index, size_t len) {
    kvf_block block = kvfl_state_block(l->kv, index);
    kvfl_flights_look(l->kv);
    return kvfl_flight_start_state(l->kv, index, &block, len, kvfl_flight_us(l));
}

void kvfl_bring_blocks(kvfl_loading *l, size_t state_bytes) {
    borrow_all(l);
    kvfl_clear_scratch(l->kv);
    if (l->next >= l->end || l->stop) {
        return;
    }
    if (state_bytes > 0) {
        (void)kvfl_ask_for_state(l, l->end, state_bytes);
    }
    load_and_compute(l);
}
