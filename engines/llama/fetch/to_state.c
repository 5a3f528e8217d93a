/* SPDX-License-Identifier: Apache-2.0
 *
 * Models with states: brings a sequence to the last boundary whose state and blocks are stored. Until the state is there
 * the sequence can't be continued, so what it had is set aside, and put back if no state comes.
 */
#include "llama/fetch/loading.h"

/* The deadline for an answer of a few bytes: as long as patience lasts. */
static int64_t soon(const kvfl_loading *l) {
    int64_t until = kvfl_now_us() + l->patience_us;
    return l->front != NULL && until < l->deadline_us ? until : l->deadline_us;
}

/* Requests the state at a boundary. KVF_WHY_NONE: it is on its way, as far as the memory for it is free. */
static kvf_reason request_state(kvfl_loading *l, size_t index) {
    kvf_link link = kvfl_link_of(l);
    kvf_reason why = kvfl_why_late(&link);
    int64_t begin = kvfl_now_us();
    size_t len = kvfl_may_wait(l) ? kvfl_stored_state(l->kv, &why, index, soon(l)) : 0;
    kvfl_charge(l, begin);
    if (len == 0) {
        return why;
    }
    /* Its memory may be that of an earlier state whose end was not reported yet. */
    while (!kvfl_ask_for_state(l, index, len) && kvfl_flights_busy(l->kv) && kvfl_may_wait(l)) {
        kvfl_wait_a_little(l);
    }
    return KVF_WHY_NONE;
}

/* Waits for the state at a boundary as long as it promises to be worth it. KVF_WHY_NONE: *bytes have arrived. */
static kvf_reason await_state(kvfl_loading *l, size_t index, const struct iovec **bytes) {
    kvf_llama *kv = l->kv;
    kvf_gap gap = kvfl_look_ahead(l);
    gap.num_blocks = gap.here_bytes = 0;
    if (kvfl_flight_of_state(kv, index, bytes) == KVFL_NOT_ASKED) {
        kvf_reason why = request_state(l, index);
        if (why != KVF_WHY_NONE) {
            return why;
        }
    }
    while (kvfl_flight_of_state(kv, index, bytes) == KVFL_AWAITED && kvfl_promises(l, &gap)) {
        kvfl_wait_a_little(l);
        kvfl_flights_look(kv);
        gap.link = kvfl_link_of(l);
    }
    switch (kvfl_flight_of_state(kv, index, bytes)) {
    case KVFL_HERE:
        return KVF_WHY_NONE;
    case KVFL_MISSED:
        return kvfl_flight_state_why(kv);
    default:
        return kvfl_why_late(&gap.link);
    }
}

static kvf_reason take_state(const kvfl_loading *l, size_t index, const void *data, size_t len) {
    bool ok = kvfl_import_state(l->kv, l->seq, index, data, len);
    l->report->loaded_bytes += ok ? len : 0;
    return ok ? KVF_WHY_NONE : KVF_WHY_VERSION;
}

/* A state is borrowed only in a length that it can have. */
static kvf_reason borrow_state(const kvfl_loading *l, size_t index, kvf_borrowed *lent) {
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
static kvf_reason bring_state(kvfl_loading *l, size_t index) {
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
static size_t bring_last_state(kvfl_loading *l, size_t have) {
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
static size_t finish_with_state(kvfl_loading *l, size_t have, uint32_t loaded_before, const kvfl_stash *held) {
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

/* Sets l->end to the last boundary whose state is stored. Returns the bytes of that state; 0 = none is worth more than
 * what the sequence has. */
static size_t match_state(kvfl_loading *l, size_t have) {
    size_t state_bytes = 0;
    kvfl_be_patient_for(l, KVF_LOOKUP_US);
    int64_t begin = kvfl_now_us();
    l->end = kvfl_match_state(l->kv, l->report, &state_bytes, l->next, l->end, soon(l));
    kvfl_charge(l, begin);
    size_t end = kvfl_position(l->kv, l->end);
    l->report->stored_tokens = (uint32_t)(end > have ? end - have : 0);
    return l->report->stored_tokens > 0 ? state_bytes : 0;
}

size_t kvfl_load_to_state(kvfl_loading *l, size_t have) {
    kvf_llama *kv = l->kv;
    kvfl_stash held = {0};
    uint32_t loaded = l->report->loaded_tokens;
    size_t state_bytes = match_state(l, have);
    if (state_bytes == 0 || (have > 0 && !kvfl_set_aside(kv, &held, l->seq, kvfl_position(kv, l->next), have))) {
        return have;
    }
    l->stateless = true;
    l->from = l->next;
    kvfl_be_patient_for(l, KVF_LOOKUP_US);
    if (kv->kind.num_caches == 0) {
        l->next = l->end; /* there are no blocks, only states */
    }
    kvfl_bring_blocks(l, state_bytes);
    size_t holds = finish_with_state(l, have, loaded, &held);
    kvfl_free_stash(&held);
    return holds;
}
