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
#include "llama/fetch/fetch.h"

#define WAIT_US 5000 /* the longest time between two looks at the speed of the store */

typedef struct load {
    kvf_llama *kv;
    kvf_llama_report *report;
    llama_seq_id seq;
    size_t next, end;    /* blocks: the next to import, and the end of what was matched */
    kvfl_front *front;   /* computes what does not arrive in time; NULL: nobody does, and only the deadline counts */
    bool stateless;      /* there are blocks, but no state to compute from */
    size_t from;         /* for a model with states: everything from this block on would have to be computed */
    int64_t patience_us; /* what is left of it, see kvferry/plan.h */
    int64_t granted_us;  /* what it began with */
    size_t num_missing;  /* blocks, at the beginning */
    uint32_t tier;       /* the slowest of those that have the blocks */
    int64_t deadline_us;
    size_t horizon; /* nothing after it is requested before the front has come there, because it could not be held */
    bool stop;      /* the caller must compute the rest */
} load;

/* How long computing `blocks` takes. */
static int64_t compute_us(const load *l, size_t blocks) {
    return kvf_pace_us(&l->kv->pace, blocks * l->kv->block_tokens, l->kv->step);
}

static kvf_link link_of(const load *l) {
    kvf_link link = {0};
    (void)kvf_store_link(l->kv->store, l->tier, &link); /* after a fork nothing is known */
    return link;
}

/* ---- patience, see kvferry/plan.h ---- */

static int64_t allowance(const load *l) {
    const kvf_gap all = {.struct_size = sizeof all,
                         .num_blocks = l->num_missing,
                         .block_tokens = l->kv->block_tokens,
                         .batch_tokens = l->kv->step};
    kvf_plan plan = {.struct_size = sizeof plan};
    return kvf_decide(&plan, NULL, &all, &l->kv->pace) == KVF_OK ? plan.patience_us : KVF_TRIFLE_US;
}

/* At the beginning, and again when the pace is no longer a guess. */
static void grant(load *l) {
    int64_t now_us = allowance(l);
    l->patience_us += now_us - l->granted_us;
    l->granted_us = now_us;
}

static void earn(load *l, int64_t us) {
    l->patience_us += us;
    if (l->kv->pace.guess_us > 0 && l->patience_us > KVF_GUESS_US) {
        l->patience_us = KVF_GUESS_US;
    }
}

static void charge(load *l, int64_t begin_us) {
    l->patience_us -= kvfl_now_us() - begin_us;
}

static void be_patient_for(load *l, int64_t us) {
    l->patience_us = l->patience_us > us ? l->patience_us : us;
}

static bool may_wait(const load *l) {
    return kvfl_now_us() < l->deadline_us && (l->front == NULL || l->patience_us > 0);
}

/* Nothing waits for a flight beside a front that is computed, so it may take as long as the front does. */
static int64_t flight_us(const load *l) {
    int64_t left = l->deadline_us - kvfl_now_us(), beside = l->front != NULL ? compute_us(l, l->end - l->next) : 0;
    left = left > beside ? left : beside;
    return left < 1 ? 1 : left < KVF_MAX_BUDGET_US ? left : KVF_MAX_BUDGET_US;
}

/* Imports verified bytes. What llama.cpp makes of them is checked once more before they join the sequence. */
static bool import_block(load *l, const void *bytes, size_t len) {
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

static bool borrow_next(load *l, bool *stop) {
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
static void borrow_all(load *l) {
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
        slow = l->front != NULL && took_us > KVF_TRIFLE_US && took_us > compute_us(l, 1) / 2;
    }
}

/* ---- loading and computing ---- */

/* Appends arrived blocks to the sequence, in order. */
static void import_landed(load *l) {
    const struct iovec *iov = NULL;
    size_t before = l->next;
    while (l->next < l->end && !l->stop && kvfl_flight_of(l->kv, l->next, &iov) == KVFL_HERE) {
        earn(l, compute_us(l, 1));
        l->stop = !import_block(l, iov->iov_base, iov->iov_len);
    }
    if (l->next > before || l->stop) {
        kvfl_clear_scratch(l->kv);
    }
}

static bool is_settled(kvfl_landing state) {
    return state == KVFL_HERE || state == KVFL_MISSED;
}

/* The blocks between the front and the next block that has arrived, or surely will not. */
static kvf_gap look_ahead(const load *l) {
    const kvf_llama *kv = l->kv;
    size_t end = l->horizon > l->next ? l->horizon : l->end, at = l->next;
    const struct iovec *iov = NULL;
    while (at < end && !is_settled(kvfl_flight_of(kv, at, &iov))) {
        at++;
    }
    return (kvf_gap){.struct_size = sizeof(kvf_gap),
                     .flags = (kvfl_flights_moving(kv) ? KVF_GAP_MOVING : 0u) | (may_wait(l) ? 0u : KVF_GAP_IMPATIENT),
                     .num_blocks = at - l->next,
                     .block_bytes = kvfl_export_bytes(kv, kv->block_tokens),
                     .block_tokens = kv->block_tokens,
                     .batch_tokens = kv->step,
                     .here_bytes = kvfl_flights_partial(kv, l->next, at),
                     .link = link_of(l)};
}

/* Requests blocks from the end of the gap, or of what can be held, towards the front. */
static void start_tail(load *l, const kvf_gap *gap) {
    kvf_llama *kv = l->kv;
    size_t room = KVFL_TAIL_BYTES / kv->stride > 0 ? KVFL_TAIL_BYTES / kv->stride : 1;
    size_t num = gap->num_blocks < room ? gap->num_blocks : room;
    const struct iovec *iov = NULL;
    if (kvfl_flight_of(kv, l->next + num - 1, &iov) != KVFL_NOT_ASKED) {
        return;
    }
    bool started = false;
    for (size_t which = KVFL_SMALL_FLIGHTS; which < KVFL_STATE_FLIGHT && !started; which++) {
        started = kv->fetch->flights[which].num == 0 && kvfl_flight_start(kv, which, l->next, num, true, flight_us(l));
    }
    if (started && l->horizon <= l->next) {
        l->horizon = l->next + num;
    }
}

/* Requests blocks from the front on, with the two small flights in turn. */
static void start_small(load *l) {
    kvf_llama *kv = l->kv;
    for (size_t which = 0; which < KVFL_SMALL_FLIGHTS; which++) {
        const kvfl_flight *f = &kv->fetch->flights[which], *other = &kv->fetch->flights[1 - which];
        size_t first = other->num > 0 && other->first + other->num > l->next ? other->first + other->num : l->next,
               num = 0;
        const struct iovec *iov = NULL;
        while (num < kv->fetch->group && first + num < l->end &&
               kvfl_flight_of(kv, first + num, &iov) == KVFL_NOT_ASKED) {
            num++;
        }
        if (f->num == 0 || (f->over && f->first + f->num <= l->next)) {
            (void)kvfl_flight_start(kv, which, first, num, false, flight_us(l));
        }
    }
}

static void wait_a_little(load *l) {
    int64_t begin = kvfl_now_us(), left = l->deadline_us - begin;
    int64_t most = l->front != NULL && l->patience_us < WAIT_US ? l->patience_us : WAIT_US;
    kvfl_flights_wait(l->kv, left < most ? left : most);
    int64_t waited = kvfl_now_us() - begin;
    l->patience_us -= waited;
    l->report->waited_us += waited;
}

static void compute_blocks(load *l, size_t num) {
    kvf_llama *kv = l->kv;
    size_t first = kvfl_position(kv, l->next), end = kvfl_position(kv, l->next + num);
    bool guessed = kv->pace.guess_us > 0;
    kvfl_flights_trim(kv, l->next + num);
    l->front->status = l->front->compute(l->front->ctx, first, end - first);
    l->stop = l->front->status != KVF_OK;
    if (guessed) {
        grant(l);
    }
    if (!l->stop) {
        l->next += num;
    }
}

/* Of the next `wanted` blocks, those that can be computed here. The tail needs a separate batch, so it is left to the
 * caller. */
static size_t computable(const load *l, size_t wanted) {
    bool can = l->front != NULL && !l->stateless && l->next < l->kv->cells->num_whole;
    size_t left = can ? l->kv->cells->num_whole - l->next : 0;
    return wanted < left ? wanted : left;
}

/* The next block can't be loaded, or not in time. */
static void do_without(load *l, kvf_reason why) {
    if (computable(l, 1) == 0) {
        l->report->why = why;
        l->stop = true;
        return;
    }
    compute_blocks(l, 1);
}

/* The store delivers faster than one block is computed. Blocks that were requested from the end, when nothing was known
 * of the store, are now requested from the front instead: each is imported as it arrives, and small flights reuse their
 * memory. For less than one small flight another request is not worth it. */
static void go_on_loading(load *l, const kvf_gap *gap) {
    const struct iovec *iov = NULL;
    if (kvfl_flight_of(l->kv, l->next, &iov) == KVFL_NOT_ASKED || gap->num_blocks > l->kv->fetch->group) {
        kvfl_flights_settle(l->kv);
    }
    start_small(l);
    if (kvfl_flights_busy(l->kv) && may_wait(l)) {
        wait_a_little(l);
    } else {
        do_without(l, KVF_WHY_BUDGET);
    }
}

/* Nothing is known of the store: requests something, and gives it little time. */
static void try_store(load *l, const kvf_gap *gap) {
    start_tail(l, gap);
    if (kvfl_flights_moving(l->kv) && may_wait(l)) {
        wait_a_little(l);
    } else {
        do_without(l, KVF_WHY_BUDGET);
    }
}

/* Computes the front up to where blocks from the end will meet it. If nothing would arrive in time, and nothing is
 * under way, the store is not used. */
static void meet(load *l, const kvf_gap *gap, size_t meeting) {
    kvf_llama *kv = l->kv;
    bool alone = meeting == gap->num_blocks;
    size_t num = computable(l, meeting);
    if (num == 0 || (alone && !kvfl_flights_moving(kv))) {
        l->report->why = KVF_WHY_SLOW;
        l->stop = true;
        return;
    }
    if (!alone) {
        kvfl_flights_drop_small(kv);
        start_tail(l, gap);
    }
    compute_blocks(l, kvf_plan_batch(&kv->pace, num, kv->block_tokens, kv->step));
}

/* The next block is surely not there; or it has arrived since the last look, and is imported at once. */
static void settle_next(load *l) {
    const struct iovec *iov = NULL;
    if (kvfl_flight_of(l->kv, l->next, &iov) == KVFL_HERE) {
        return;
    }
    if (l->report->missed_blocks++ == 0) {
        l->report->missed_why = kvfl_flight_why(l->kv, l->next);
    }
    do_without(l, l->report->missed_why);
}

/* The rest promises to arrive sooner than it could be computed. If nothing has arrived yet, patience decides. */
static bool promises(const load *l, const kvf_gap *gap) {
    const kvf_llama *kv = l->kv;
    if (l->front == NULL || !(gap->link.bytes_per_s > 0)) {
        return may_wait(l);
    }
    kvf_gap whole = *gap;
    kvf_plan plan = {.struct_size = sizeof plan};
    whole.flags |= KVF_GAP_WHOLE;
    whole.instead_blocks = l->end - l->from;
    whole.other_bytes = kvfl_flight_state_rest(kv);
    return kvfl_now_us() < l->deadline_us && kvf_decide(&plan, NULL, &whole, &kv->pace) == KVF_OK &&
           plan.kind != KVF_PLAN_COMPUTE;
}

/* Why the store is not waited for any longer: it is known to be slow, or nothing is known of it. */
static kvf_reason why_late(const kvf_link *link) {
    return link->bytes_per_s > 0 || link->silent != 0 ? KVF_WHY_SLOW : KVF_WHY_BUDGET;
}

static void step_stateless(load *l, const kvf_gap *gap) {
    bool worth = promises(l, gap);
    if (worth) {
        start_small(l);
    }
    if (worth && kvfl_flights_busy(l->kv)) {
        wait_a_little(l);
        return;
    }
    l->report->why = why_late(&gap->link);
    l->stop = true;
}

static void step_by_plan(load *l, const kvf_gap *gap) {
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

static void step(load *l) {
    kvf_gap gap = look_ahead(l);
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

static void load_and_compute(load *l) {
    for (;;) {
        kvfl_flights_look(l->kv);
        import_landed(l);
        if (l->next >= l->end || l->stop) {
            break;
        }
        step(l);
    }
}

/* ---- the lookup ---- */

/* What the lookup found, if it has the size that this context expects. */
static size_t run_found(load *l, size_t first) {
    const kvf_llama *kv = l->kv;
    size_t run = kv->fetch->lookup.run;
    if (run < kv->fetch->lookup.num) {
        l->report->why = kv->fetch->lookup.found[run].why;
    }
    l->tier = run > 0 ? 0 : l->tier;
    for (size_t i = 0; i < run; i++) {
        l->tier = kv->fetch->lookup.found[i].tier > l->tier ? kv->fetch->lookup.found[i].tier : l->tier;
        if (kv->fetch->lookup.found[i].payload_bytes != kvfl_bytes_of(kv, first + i)) {
            l->report->why = KVF_WHY_TRUNCATED;
            run = i;
        }
    }
    return run;
}

/* Computes the front while the answer is outstanding, in batches that grow with the waiting time. */
static void compute_meanwhile(load *l, size_t first) {
    size_t num = computable(l, l->next - first + 1);
    l->report->why = num == 0 ? KVF_WHY_BUDGET : l->report->why;
    l->stop = num == 0;
    if (num > 0) {
        size_t most = l->kv->step / l->kv->block_tokens > 0 ? l->kv->step / l->kv->block_tokens : 1;
        compute_blocks(l, num < most ? num : most);
    }
}

/* Looks up how many of the blocks are stored. Does not wait for a slow or dead server: when the extra patience of a
 * lookup is used up, the front is computed while the answer is outstanding. What is left of that extra patience does
 * not carry over to loading. */
static void look_up(load *l) {
    kvf_llama *kv = l->kv;
    size_t first = l->next;
    int64_t begin = kvfl_now_us(), computing_us = l->report->compute_us;
    int64_t waited_us = l->report->waited_us;
    l->patience_us += KVF_LOOKUP_US;
    bool asked = kvfl_lookup_start(kv, first, l->end, flight_us(l));
    while (asked && !kv->fetch->lookup.over && !l->stop) {
        if (may_wait(l)) {
            wait_a_little(l);
        } else {
            compute_meanwhile(l, first);
        }
        kvfl_flights_look(kv);
    }
    waited_us = l->report->waited_us - waited_us;
    l->patience_us -= waited_us < KVF_LOOKUP_US ? KVF_LOOKUP_US - waited_us : 0;
    bool answered = asked && kv->fetch->lookup.over;
    size_t end = first + (answered ? run_found(l, first) : 0);
    if (!answered) {
        l->report->why = KVF_WHY_BUDGET;
    }
    l->report->stored_tokens = (uint32_t)(kvfl_position(kv, end) - kvfl_position(kv, first));
    l->end = end > l->next ? end : l->next;
    l->report->match_us += kvfl_now_us() - begin - (l->report->compute_us - computing_us);
}

/* ---- both ---- */

static void tell_plan(const load *l, uint32_t computed) {
    kvf_llama_report *r = l->report;
    kvf_link link = link_of(l);
    if (r->stored_tokens > 0) {
        r->plan = r->loaded_tokens == 0 ? KVF_LLAMA_PLAN_COMPUTE
                  : computed > 0        ? KVF_LLAMA_PLAN_BOTH
                                        : KVF_LLAMA_PLAN_LOAD;
    }
    r->store_bytes_per_s = link.bytes_per_s;
    r->round_trip_us = link.round_trip_us;
}

void kvfl_count_lost(kvf_llama_report *r, size_t tokens) {
    uint32_t *const parts[] = {&r->computed_tokens, &r->loaded_tokens, &r->copied_tokens, &r->resident_tokens};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        uint32_t lost = tokens < *parts[i] ? (uint32_t)tokens : *parts[i];
        *parts[i] -= lost;
        tokens -= lost;
    }
}

/* ---- to a state ---- */

/* The deadline for an answer of a few bytes: as long as patience lasts. */
static int64_t soon(const load *l) {
    int64_t until = kvfl_now_us() + l->patience_us;
    return l->front != NULL && until < l->deadline_us ? until : l->deadline_us;
}

static bool ask_for_state(const load *l, size_t index, size_t len) {
    kvf_block block = kvfl_state_block(l->kv, index);
    kvfl_flights_look(l->kv);
    return kvfl_flight_start_state(l->kv, index, &block, len, flight_us(l));
}

/* Waits for the state at a boundary as long as it promises to be worth it. KVF_WHY_NONE: *bytes have arrived. */
static kvf_reason await_state(load *l, size_t index, const struct iovec **bytes) {
    kvf_llama *kv = l->kv;
    kvf_gap gap = look_ahead(l);
    gap.num_blocks = gap.here_bytes = 0;
    if (kvfl_flight_of_state(kv, index, bytes) == KVFL_NOT_ASKED) {
        kvf_reason why = why_late(&gap.link);
        int64_t begin = kvfl_now_us();
        size_t len = may_wait(l) ? kvfl_stored_state(kv, &why, index, soon(l)) : 0;
        charge(l, begin);
        if (len == 0) {
            return why;
        }
        /* Its memory may be that of an earlier state whose end was not reported yet. */
        while (!ask_for_state(l, index, len) && kvfl_flights_busy(kv) && may_wait(l)) {
            wait_a_little(l);
        }
    }
    while (kvfl_flight_of_state(kv, index, bytes) == KVFL_AWAITED && promises(l, &gap)) {
        wait_a_little(l);
        kvfl_flights_look(kv);
        gap.link = link_of(l);
    }
    switch (kvfl_flight_of_state(kv, index, bytes)) {
    case KVFL_HERE:
        return KVF_WHY_NONE;
    case KVFL_MISSED:
        return kvfl_flight_state_why(kv);
    default:
        return why_late(&gap.link);
    }
}

static kvf_reason take_state(const load *l, size_t index, const void *data, size_t len) {
    bool ok = kvfl_import_state(l->kv, l->seq, index, data, len);
    l->report->loaded_bytes += ok ? len : 0;
    return ok ? KVF_WHY_NONE : KVF_WHY_VERSION;
}

/* A state is borrowed only in a length that it can have. */
static kvf_reason borrow_state(const load *l, size_t index, kvf_borrowed *lent) {
    kvf_block block = kvfl_state_block(l->kv, index);
    struct iovec expected = {NULL, 0};
    block.iov = &expected;
    block.num_iov = 1;
    kvf_reason why = KVF_WHY_TRUNCATED;
    for (uint32_t way = 0; way < KVFL_STATE_WAYS && why == KVF_WHY_TRUNCATED; way++) {
        expected.iov_len = kvfl_state_length(l->kv, way, kvfl_position(l->kv, index));
        why = kvf_borrow(l->kv->space, lent, &block) == KVF_OK ? KVF_WHY_NONE : block.why;
    }
    return why;
}

/* Borrows or loads the state at a boundary, and imports it. */
static kvf_reason bring_state(load *l, size_t index) {
    kvf_llama *kv = l->kv;
    kvf_borrowed lent = {0};
    kvf_reason lends = borrow_state(l, index, &lent);
    if (lends == KVF_WHY_NONE) {
        kvf_reason why = take_state(l, index, lent.data, lent.len);
        kvf_release(kv->space, &lent);
        return why;
    }
    if (lends != KVF_WHY_ABSENT) {
        return lends;
    }
    const struct iovec *bytes = NULL;
    kvf_reason why = await_state(l, index, &bytes);
    return why == KVF_WHY_NONE ? take_state(l, index, bytes->iov_base, bytes->iov_len) : why;
}

/* The sequence holds the blocks up to l->next: imports the last state that is stored for more than `have` tokens, and
 * returns its position. */
static size_t bring_last_state(load *l, size_t have) {
    kvf_llama *kv = l->kv;
    for (size_t index = l->next; kvfl_position(kv, index) > have && kvfl_now_us() < l->deadline_us; index--) {
        /* No state is there yet, so the blocks after it can still be dropped. */
        if (!kvfl_is_boundary(kv, index) ||
            !llama_memory_seq_rm(kv->mem, l->seq, (llama_pos)kvfl_position(kv, index), -1)) {
            continue;
        }
        kvf_reason why = bring_state(l, index);
        if (why == KVF_WHY_NONE) {
            return kvfl_position(kv, index);
        }
        l->report->why = why;
    }
    return have;
}

/* If no state comes that is worth more than what the sequence had, it gets that back. */
static size_t finish_with_state(load *l, size_t have, uint32_t loaded_before, const kvfl_stash *held) {
    kvf_llama *kv = l->kv;
    size_t holds = bring_last_state(l, have);
    l->report->loaded_tokens = loaded_before + (uint32_t)(holds - have);
    if (holds == have && (have == 0 || !kvfl_put_back(kv, held, l->seq))) {
        llama_memory_seq_rm(kv->mem, l->seq, -1, -1);
        kvfl_count_lost(l->report, have);
        return 0;
    }
    return holds;
}

/* First what can be borrowed, then what must be loaded: with the state at its end, if there is one of that many
 * bytes. */
static void bring_blocks(load *l, size_t state_bytes) {
    borrow_all(l);
    kvfl_clear_scratch(l->kv);
    if (l->next >= l->end || l->stop) {
        return;
    }
    if (state_bytes > 0) {
        (void)ask_for_state(l, l->end, state_bytes);
    }
    load_and_compute(l);
}

static size_t load_blocks(load *l) {
    bring_blocks(l, 0);
    return kvfl_position(l->kv, l->next);
}

static size_t load_to_state(load *l, size_t have) {
    kvf_llama *kv = l->kv;
    kvfl_stash held = {0};
    size_t state_bytes = 0;
    uint32_t loaded = l->report->loaded_tokens;
    be_patient_for(l, KVF_LOOKUP_US);
    int64_t begin = kvfl_now_us();
    l->end = kvfl_match_state(kv, l->report, &state_bytes, l->next, l->end, soon(l));
    charge(l, begin);
    size_t end = kvfl_position(kv, l->end);
    l->report->stored_tokens = (uint32_t)(end > have ? end - have : 0);
    if (l->report->stored_tokens == 0 ||
        (have > 0 && !kvfl_set_aside(kv, &held, l->seq, kvfl_position(kv, l->next), have))) {
        return have;
    }
    l->stateless = true;
    l->from = l->next;
    be_patient_for(l, KVF_LOOKUP_US);
    if (kv->kind.num_caches == 0) {
        l->next = l->end; /* there are no blocks, only states */
    }
    bring_blocks(l, state_bytes);
    size_t holds = finish_with_state(l, have, loaded, &held);
    kvfl_free_stash(&held);
    return holds;
}

/* The lookup comes first, and may already compute blocks at the front while it waits. Then blocks are loaded: for a
 * model with states up to a boundary, for others as far as that is worth it. The times of computing and of the lookup
 * are counted elsewhere, so they are subtracted from the time of loading. At the end the sequence is compared with what
 * it should hold: a surprise there empties it, since a wrong token would be worse than a miss. */
size_t kvfl_load(kvf_llama *kv, kvf_llama_report *report, llama_seq_id seq, size_t have, kvfl_front *front) {
    load l = {.kv = kv,
              .report = report,
              .seq = seq,
              .next = have / kv->block_tokens,
              .end = kvfl_num_blocks(kv),
              .front = front,
              .num_missing = kvfl_num_blocks(kv) - have / kv->block_tokens,
              .tier = UINT32_MAX,
              .stateless = have % kv->block_tokens != 0,
              .deadline_us = kvfl_now_us() + kv->fetch->budget_us};
    bool states = kvfl_has_states(kv);
    if (l.next >= l.end || (!states && have % kv->block_tokens != 0)) {
        return have;
    }
    grant(&l);
    uint32_t computed = report->computed_tokens;
    if (kv->kind.num_caches > 0) {
        look_up(&l);
    }
    int64_t begin = kvfl_now_us(), other_us = report->compute_us + report->match_us;
    size_t met = kvfl_position(kv, l.next); /* including what was computed during the lookup */
    size_t holds = states ? load_to_state(&l, have > met ? have : met) : load_blocks(&l);
    kvfl_flights_stop(kv);
    report->load_us += kvfl_now_us() - begin - (report->compute_us + report->match_us - other_us);
    tell_plan(&l, report->computed_tokens - computed);
    if ((front == NULL || front->status == KVF_OK) && !kvfl_holds(kv, seq, holds)) {
        llama_memory_seq_rm(kv->mem, seq, -1, -1);
        kvfl_count_lost(report, holds);
        return 0;
    }
    return holds;
}
