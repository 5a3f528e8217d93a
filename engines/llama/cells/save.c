/* SPDX-License-Identifier: Apache-2.0
 *
 * Exports computed blocks from a context and hands them to the store.
 */
#include "llama/cells/cells.h"

/* Exports one block into memory of the backlog. A block whose cells are not in the order of its positions is not
 * exported: a load would put them into another order, where sums round differently. */
static bool export_block(kvf_llama *kv, llama_seq_id seq, size_t index, void *out) {
    llama_pos first = (llama_pos)kvfl_position(kv, index), end = (llama_pos)kvfl_position(kv, index + 1);
    size_t bytes = kvfl_bytes_of(kv, index);
    return kvfl_export(kv, seq, first, end, out, bytes) && kvfl_is_block(kv, out, bytes, first, end);
}

size_t kvfl_save(kvf_llama *kv, kvf_llama_report *report, llama_seq_id seq, size_t first, size_t end) {
    size_t saved = 0;
    int64_t begin = kvfl_now_us();
    for (size_t i = first; kv->space != NULL && kv->kind.num_caches > 0 && i < end; i++) {
        kvf_reserved reserved;
        if (kvf_knows(kv->space, &kv->cells->keys[i])) {
            report->known_blocks++;
            continue;
        }
        if (kvf_reserve(kv->space, &reserved, kvfl_bytes_of(kv, i)) != KVF_OK) {
            /* After a hole nothing would be found: shed the rest too. */
            report->shed_blocks += (uint32_t)(end - i);
            break;
        }
        if (!export_block(kv, seq, i, reserved.data)) {
            kvf_abandon(kv->space, &reserved);
            break;
        }
        kvf_block block = kvfl_block_of(kv, i);
        reserved.chain_bytes = (uint64_t)i * kvfl_bytes_of(kv, 0) + reserved.len;
        if (kvf_commit(kv->space, &reserved, &block, reserved.len) != KVF_OK) {
            report->shed_blocks += (uint32_t)(end - i);
            break;
        }
        saved++;
    }
    report->saved_blocks += (uint32_t)saved;
    report->export_us += kvfl_now_us() - begin;
    return saved;
}
