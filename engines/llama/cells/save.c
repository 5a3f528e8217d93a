/* SPDX-License-Identifier: Apache-2.0
 *
 * Exports computed blocks from a context and hands them to the store.
 */
#include <string.h>

#include "llama/engine.h"

/* The scratch sequence's blob without windows and states, which are replaced by those of an empty sequence. A recurrent
 * state is dropped before the export. A window can't be, and is exported in vain. */
static bool export_scratch(kvf_llama *kv, uint8_t *out, size_t bytes) {
    const kvfl_kind *kind = &kv->kind;
    (void)kvfl_drop_state(kv, kv->scratch);
    size_t len = llama_state_seq_get_size(kv->ctx, kv->scratch);
    if (len == bytes) {
        return llama_state_seq_get_data(kv->ctx, out, bytes, kv->scratch) == bytes;
    }
    if (!kvfl_has_states(kv) || len < bytes || !kvfl_has_room(kv, len) ||
        llama_state_seq_get_data(kv->ctx, kv->state, len, kv->scratch) != len) {
        return false;
    }
    memcpy(out, kv->state, bytes - kind->rest_bytes);
    memcpy(out + bytes - kind->rest_bytes, kind->empty + KVFL_BLOB_HEAD, kind->rest_bytes);
    return true;
}

/* Exports through the scratch sequence, which shares the cells, so no data moves except the export. */
bool kvfl_export(kvf_llama *kv, llama_seq_id seq, llama_pos first, llama_pos end, void *out, size_t bytes) {
    llama_memory_seq_cp(kv->mem, seq, kv->scratch, first, end);
    bool ok = export_scratch(kv, out, bytes);
    llama_memory_seq_rm(kv->mem, kv->scratch, -1, -1);
    return ok;
}

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
        if (kvf_knows(kv->space, &kv->keys[i])) {
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

/* Some of it is known to be computed under other adapters. */
static bool is_of_other(const kvf_llama *kv, llama_seq_id seq) {
    const kvfl_history *h = &kv->histories[seq];
    return (h->num > 0 && h->identity != kv->identity) || (h->behind != 0 && h->behind != kv->identity);
}

static void save_as_it_is(kvf_llama *kv, kvf_llama_report *report, llama_seq_id seq, const llama_token *tokens,
                          size_t num) {
    size_t blocks = num / kv->block_tokens;
    if (!kvfl_is_ours(kv) || kv->space == NULL || blocks == 0 || num > kv->n_ctx || !kvfl_is_text(kv, seq) ||
        kvfl_find_no_token(kv, tokens, num) < num || is_of_other(kv, seq) ||
        (!kvfl_has_states(kv) && llama_memory_seq_pos_min(kv->mem, seq) != 0) ||
        llama_memory_seq_pos_max(kv->mem, seq) < (llama_pos)(blocks * kv->block_tokens) - 1) {
        return;
    }
    report->num_tokens = (uint32_t)num;
    kvfl_chain(kv, tokens, blocks * kv->block_tokens, 0);
    kvfl_name_apart(kv, 0, KVFL_AS_IT_IS, sizeof KVFL_AS_IT_IS);
    kvfl_save(kv, report, seq, 0, blocks);
    if (llama_memory_seq_pos_max(kv->mem, seq) == (llama_pos)(blocks * kv->block_tokens) - 1) {
        (void)kvfl_pass_boundary(kv, report, seq, blocks, true);
    }
}

size_t kvf_llama_save(kvf_llama *kv, kvf_llama_report *report, llama_seq_id seq, const llama_token *tokens,
                      size_t num) {
    kvf_llama_report own = {0};
    if (kvfl_check_report(NULL, report) != KVF_OK) {
        return 0;
    }
    save_as_it_is(kv, &own, seq, tokens, num);
    kvfl_give_report(report, &own);
    return own.saved_blocks;
}
