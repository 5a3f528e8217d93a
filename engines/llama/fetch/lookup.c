/* SPDX-License-Identifier: Apache-2.0
 *
 * How much of a prompt is stored. A slow or dead server is not waited for: when the extra patience of a lookup is used
 * up, the front is computed while the answer is outstanding.
 */
#include "llama/fetch/loading.h"

/* What the lookup found, if it has the size that this context expects. */
static size_t run_found(kvfl_loading *l, size_t first) {
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
static void compute_meanwhile(kvfl_loading *l, size_t first) {
    size_t num = kvfl_computable(l, l->next - first + 1);
    l->report->why = num == 0 ? KVF_WHY_BUDGET : l->report->why;
    l->stop = num == 0;
    if (num > 0) {
        size_t most = l->kv->step / l->kv->block_tokens > 0 ? l->kv->step / l->kv->block_tokens : 1;
        kvfl_compute_blocks(l, num < most ? num : most);
    }
}

/* False: no answer, because the request could not be made, or the budget is used up. */
static bool await_answer(kvfl_loading *l, size_t first) {
    kvfl_lookup *lookup = &l->kv->fetch->lookup;
    if (!kvfl_lookup_start(l->kv, first, l->end, kvfl_flight_us(l))) {
        return false;
    }
    while (!lookup->over && !l->stop) {
        if (kvfl_may_wait(l)) {
            kvfl_wait_a_little(l);
        } else {
            compute_meanwhile(l, first);
        }
        kvfl_flights_look(l->kv);
    }
    return lookup->over;
}

/* A lookup has patience of its own. What is left of it does not carry over to loading. */
static bool await_patiently(kvfl_loading *l, size_t first) {
    int64_t before_us = l->report->waited_us;
    l->patience_us += KVF_LOOKUP_US;
    bool answered = await_answer(l, first);
    int64_t waited_us = l->report->waited_us - before_us;
    l->patience_us -= waited_us < KVF_LOOKUP_US ? KVF_LOOKUP_US - waited_us : 0;
    return answered;
}

void kvfl_look_up(kvfl_loading *l) {
    size_t first = l->next, end = first;
    int64_t begin = kvfl_now_us(), computing_us = l->report->compute_us;
    if (await_patiently(l, first)) {
        end = first + run_found(l, first);
    } else {
        l->report->why = KVF_WHY_BUDGET;
    }
    l->report->stored_tokens = (uint32_t)(kvfl_position(l->kv, end) - kvfl_position(l->kv, first));
    l->end = end > l->next ? end : l->next;
    l->report->match_us += kvfl_now_us() - begin - (l->report->compute_us - computing_us);
}
