/* SPDX-License-Identifier: Apache-2.0
 *
 * Loads what is stored of a prompt into a sequence: first the lookup, then blocks, up to a state if the model has states.
 */
#include "llama/fetch/loading.h"

static void tell_plan(const kvfl_loading *l, uint32_t computed) {
    kvf_llama_report *r = l->report;
    kvf_link link = kvfl_link_of(l);
    if (r->stored_tokens > 0) {
        r->plan = r->loaded_tokens == 0 ? KVF_LLAMA_PLAN_COMPUTE
                  : computed > 0        ? KVF_LLAMA_PLAN_BOTH
                                        : KVF_LLAMA_PLAN_LOAD;
    }
    r->store_bytes_per_s = link.bytes_per_s;
    r->round_trip_us = link.round_trip_us;
}

static size_t load_blocks(kvfl_loading *l) {
    kvfl_bring_blocks(l, 0);
    return kvfl_position(l->kv, l->next);
}

/* The times of computing and of the lookup are counted elsewhere, so they are subtracted from the time of loading. */
static size_t load(kvfl_loading *l, size_t have) {
    kvf_llama *kv = l->kv;
    kvf_llama_report *r = l->report;
    kvfl_grant(l);
    if (kv->kind.num_caches > 0) {
        kvfl_look_up(l);
    }
    int64_t begin = kvfl_now_us(), other_us = r->compute_us + r->match_us;
    size_t met = kvfl_position(kv, l->next); /* including what was computed during the lookup */
    size_t holds = kvfl_has_states(kv) ? kvfl_load_to_state(l, have > met ? have : met) : load_blocks(l);
    kvfl_flights_stop(kv);
    r->load_us += kvfl_now_us() - begin - (r->compute_us + r->match_us - other_us);
    return holds;
}

/* Compares the sequence with what it should hold. A surprise empties it, since a wrong token would be worse than a
 * miss. */
static size_t check_sequence(kvfl_loading *l, size_t holds) {
    bool failed = l->front != NULL && l->front->status != KVF_OK;
    if (failed || kvfl_holds(l->kv, l->seq, holds)) {
        return holds;
    }
    llama_memory_seq_rm(l->kv->mem, l->seq, -1, -1);
    kvfl_count_lost(l->report, holds);
    return 0;
}

size_t kvfl_load(kvf_llama *kv, kvf_llama_report *report, llama_seq_id seq, size_t have, kvfl_front *front) {
    size_t first = have / kv->block_tokens, end = kvfl_num_blocks(kv);
    bool inside_block = have % kv->block_tokens != 0;
    if (first >= end || (inside_block && !kvfl_has_states(kv))) {
        return have;
    }
    kvfl_loading l = {.kv = kv,
                      .report = report,
                      .seq = seq,
                      .next = first,
                      .end = end,
                      .num_missing = end - first,
                      .front = front,
                      .tier = UINT32_MAX,
                      .stateless = inside_block,
                      .deadline_us = kvfl_now_us() + kv->fetch->budget_us};
    uint32_t computed = report->computed_tokens;
    size_t holds = load(&l, have);
    tell_plan(&l, report->computed_tokens - computed);
    return check_sequence(&l, holds);
}
