/* SPDX-License-Identifier: Apache-2.0
 *
 * Formats a kvf_llama_report as one line of text and as JSON.
 */
#include "llama/tell/tell.h"

#include <stdio.h>

static double ms(int64_t us) {
    return (double)us / 1000;
}

const char *kvfl_tell_why(kvf_reason why) {
    switch (why) {
    case KVF_WHY_ABSENT:
        return "not in the store";
    case KVF_WHY_UNREACHABLE:
    case KVF_WHY_BREAKER:
    case KVF_WHY_STALLED:
        return "the store does not answer; kvferry doctor explains more";
    case KVF_WHY_SERVER:
        return "the server answers with an error; kvferry doctor explains more";
    case KVF_WHY_BUDGET:
        return "the store took too long";
    case KVF_WHY_FULL:
        return "the store is full";
    case KVF_WHY_CHECKSUM:
    case KVF_WHY_TRUNCATED:
    case KVF_WHY_VERSION:
    case KVF_WHY_OTHER_SPACE:
    case KVF_WHY_OTHER_TOKENS:
        return "the next record is damaged; kvferry verify lists it";
    case KVF_WHY_SETTINGS:
        return "because of the server's settings; kvferry doctor says how to fix them";
    case KVF_WHY_SLOW:
        return "computing is faster than loading";
    default:
        return kvf_reason_name(why);
    }
}

void kvfl_tell_plan(char *out, size_t room, const kvf_llama_report *r) {
    const char *name = kvf_llama_plan_name(r->plan);
    if (r->plan == KVF_LLAMA_PLAN_BOTH ||
        (r->plan == KVF_LLAMA_PLAN_COMPUTE && (r->store_bytes_per_s > 0 || r->why == KVF_WHY_SLOW))) {
        snprintf(out, room, "%s (%s: the store delivers %.1f MB/s, the model computes %.0f tokens/s)", name,
                 r->plan == KVF_LLAMA_PLAN_BOTH ? "the front was computed while the rest was loaded"
                                                : "computing was faster",
                 r->store_bytes_per_s / 1e6, r->compute_tokens_per_s);
    } else {
        snprintf(out, room, "%s", name);
    }
}

static json_t *plan(const kvf_llama_report *r) {
    return json_pack("{s:s, s:I, s:I, s:s, s:f, s:f, s:f, s:f}", "what", kvf_llama_plan_name(r->plan), "stored_tokens",
                     (json_int_t)r->stored_tokens, "missed_blocks", (json_int_t)r->missed_blocks, "missed_why",
                     kvf_reason_name(r->missed_why), "store_bytes_per_s", r->store_bytes_per_s, "compute_tokens_per_s",
                     r->compute_tokens_per_s, "round_trip_ms", ms(r->round_trip_us), "waited_ms", ms(r->waited_us));
}

json_t *kvfl_tell_json(const kvf_llama_report *r) {
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:f, s:f, s:f, s:f, s:f, s:o}",
                     "prompt_tokens", (json_int_t)r->num_tokens, "resident_tokens", (json_int_t)r->resident_tokens,
                     "copied_tokens", (json_int_t)r->copied_tokens, "loaded_tokens", (json_int_t)r->loaded_tokens,
                     "computed_tokens", (json_int_t)r->computed_tokens, "loaded_bytes", (json_int_t)r->loaded_bytes,
                     "saved_blocks", (json_int_t)r->saved_blocks, "known_blocks", (json_int_t)r->known_blocks,
                     "shed_blocks", (json_int_t)r->shed_blocks, "why", kvf_reason_name(r->why), "lookup_ms",
                     ms(r->match_us), "load_ms", ms(r->load_us), "import_ms", ms(r->import_us), "compute_ms",
                     ms(r->compute_us), "export_ms", ms(r->export_us), "plan", plan(r));
}
