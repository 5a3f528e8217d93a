/* SPDX-License-Identifier: Apache-2.0
 *
 * While blocks are not here, a load waits for them or computes the front. Patience (kvferry/plan.h) says how long it may
 * wait.
 */
#include "llama/fetch/loading.h"

#define WAIT_US 5000 /* the longest time between two looks at the speed of the store */

int64_t kvfl_compute_us(const kvfl_loading *l, size_t blocks) {
    return kvf_pace_us(&l->kv->pace, blocks * l->kv->block_tokens, l->kv->step);
}

kvf_link kvfl_link_of(const kvfl_loading *l) {
    kvf_link link = {0};
    (void)kvf_store_link(l->kv->store, l->tier, &link); /* after a fork nothing is known */
    return link;
}

/* ---- patience ---- */

static int64_t allowance(const kvfl_loading *l) {
    const kvf_gap all = {.struct_size = sizeof all,
                         .num_blocks = l->num_missing,
                         .block_tokens = l->kv->block_tokens,
                         .batch_tokens = l->kv->step};
    kvf_plan plan = {.struct_size = sizeof plan};
    return kvf_decide(&plan, NULL, &all, &l->kv->pace) == KVF_OK ? plan.patience_us : KVF_TRIFLE_US;
}

void kvfl_grant(kvfl_loading *l) {
    int64_t now_us = allowance(l);
    l->patience_us += now_us - l->granted_us;
    l->granted_us = now_us;
}

void kvfl_earn(kvfl_loading *l, int64_t us) {
    l->patience_us += us;
    if (l->kv->pace.guess_us > 0 && l->patience_us > KVF_GUESS_US) {
        l->patience_us = KVF_GUESS_US;
    }
}

void kvfl_charge(kvfl_loading *l, int64_t begin_us) {
    l->patience_us -= kvfl_now_us() - begin_us;
}

void kvfl_be_patient_for(kvfl_loading *l, int64_t us) {
    l->patience_us = l->patience_us > us ? l->patience_us : us;
}

bool kvfl_may_wait(const kvfl_loading *l) {
    return kvfl_now_us() < l->deadline_us && (l->front == NULL || l->patience_us > 0);
}

/* Nothing waits for a flight beside a front that is computed, so it may take as long as the front does. */
int64_t kvfl_flight_us(const kvfl_loading *l) {
    int64_t left = l->deadline_us - kvfl_now_us(), beside = l->front != NULL ? kvfl_compute_us(l, l->end - l->next) : 0;
    left = left > beside ? left : beside;
    return left < 1 ? 1 : left < KVF_MAX_BUDGET_US ? left : KVF_MAX_BUDGET_US;
}

/* ---- waiting ---- */

void kvfl_wait_a_little(kvfl_loading *l) {
    int64_t begin = kvfl_now_us(), left = l->deadline_us - begin;
    int64_t most = l->front != NULL && l->patience_us < WAIT_US ? l->patience_us : WAIT_US;
    kvfl_flights_wait(l->kv, left < most ? left : most);
    int64_t waited = kvfl_now_us() - begin;
    l->patience_us -= waited;
    l->report->waited_us += waited;
}

/* ---- computing ---- */

void kvfl_compute_blocks(kvfl_loading *l, size_t num) {
    kvf_llama *kv = l->kv;
    size_t first = kvfl_position(kv, l->next), end = kvfl_position(kv, l->next + num);
    bool guessed = kv->pace.guess_us > 0;
    kvfl_flights_trim(kv, l->next + num);
    l->front->status = l->front->compute(l->front->ctx, first, end - first);
    l->stop = l->front->status != KVF_OK;
    if (guessed) {
        kvfl_grant(l);
    }
    if (!l->stop) {
        l->next += num;
    }
}

/* The tail needs a separate batch, so it is left to the caller. */
size_t kvfl_computable(const kvfl_loading *l, size_t wanted) {
    bool can = l->front != NULL && !l->stateless && l->next < l->kv->cells->num_whole;
    size_t left = can ? l->kv->cells->num_whole - l->next : 0;
    return wanted < left ? wanted : left;
}

void kvfl_do_without(kvfl_loading *l, kvf_reason why) {
    if (kvfl_computable(l, 1) == 0) {
        l->report->why = why;
        l->stop = true;
        return;
    }
    kvfl_compute_blocks(l, 1);
}
