/* SPDX-License-Identifier: Apache-2.0
 *
 * Corrects the counts of a report.
 */
#include "llama/fetch/fetch.h"

void kvfl_count_lost(kvf_llama_report *r, size_t tokens) {
    uint32_t *const parts[] = {&r->computed_tokens, &r->loaded_tokens, &r->copied_tokens, &r->resident_tokens};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        uint32_t lost = tokens < *parts[i] ? (uint32_t)tokens : *parts[i];
        *parts[i] -= lost;
        tokens -= lost;
    }
}
