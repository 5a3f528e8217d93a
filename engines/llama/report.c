/* SPDX-License-Identifier: Apache-2.0
 *
 * What callers are told: reports, counters, and the names of what stands in them.
 */
#include "kvferry/sized.h"
#include "llama/engine.h"

KVF_SIZED(kvf_llama_report, waited_us, 144, waited_us);
KVF_SIZED(kvf_llama_counters, waited_us, 584, waited_us);
_Static_assert((int)KVF_NUM_ASIDES <= KVF_ASIDE_ROOM && (int)KVF_LLAMA_NUM_PLANS <= KVF_LLAMA_PLAN_ROOM,
               "room for each in kvf_llama_counters");

kvf_status kvfl_check_report(kvf_error *err, const kvf_llama_report *report) {
    uint32_t size;
    return report == NULL ? KVF_OK : kvf_sized_size(&size, err, report, &kvf_llama_report_sized);
}

void kvfl_give_report(kvf_llama_report *report, const kvf_llama_report *from) {
    if (report != NULL) {
        (void)kvf_sized_give(report, from, &kvf_llama_report_sized);
    }
}

kvf_status kvf_llama_prompt_report(const kvf_llama *kv, kvf_llama_report *out, llama_seq_id seq) {
    static const kvf_llama_report none;
    if (!kvfl_is_ours(kv)) {
        return KVF_CLOSED;
    }
    return kvf_sized_give(out, kvfl_is_text(kv, seq) ? &kv->follow->histories[seq].report : &none,
                          &kvf_llama_report_sized);
}

kvf_status kvf_llama_count(const kvf_llama *kv, kvf_llama_counters *out) {
    return !kvfl_is_ours(kv) ? KVF_CLOSED : kvf_sized_give(out, &kv->calls->counters, &kvf_llama_counters_sized);
}

const char *kvf_llama_plan_name(kvf_llama_plan plan) {
    static const char *const names[KVF_LLAMA_NUM_PLANS] = {"none", "load", "compute", "both"};
    return (unsigned)plan < KVF_LLAMA_NUM_PLANS ? names[plan] : "unknown";
}

const char *kvf_llama_aside_name(kvf_llama_aside why) {
    static const char *const names[KVF_NUM_ASIDES] = {"none",    "embeddings", "positions", "several",
                                                      "foreign", "moved",      "output",    "attention"};
    return (unsigned)why < KVF_NUM_ASIDES ? names[why] : "unknown";
}
