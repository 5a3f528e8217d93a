/* SPDX-License-Identifier: Apache-2.0 */
#include "llama/engine.h"

/* One block through the scratch sequence, which shares the cells (no data moves), into memory of the backlog. */
static bool export_block(kvf_llama *kv, llama_seq_id seq, size_t index, void *out) {
    llama_pos first = (llama_pos)(index * kv->block_tokens);
    llama_memory_seq_cp(kv->mem, seq, kv->scratch, first, first + (llama_pos)kv->block_tokens);
    bool ok = llama_state_seq_get_size(kv->ctx, kv->scratch) == kv->block_bytes &&
              llama_state_seq_get_data(kv->ctx, out, kv->block_bytes, kv->scratch) == kv->block_bytes;
    llama_memory_seq_rm(kv->mem, kv->scratch, -1, -1);
    return ok;
}

static kvf_block block_of(const kvf_llama *kv, size_t index) {
    return (kvf_block){.key = kv->keys[index],
                       .tokens = kv->tokens + index * kv->block_tokens,
                       .num_tokens = kv->block_tokens,
                       .first_token = (uint32_t)(index * kv->block_tokens)};
}

size_t kvfl_save(kvf_llama *kv, kvf_llama_report *report, llama_seq_id seq, size_t first, size_t end) {
    size_t saved = 0;
    int64_t begin = kvfl_now_us();
    for (size_t i = first; kv->space != NULL && i < end; i++) {
        kvf_reserved reserved;
        if (kvf_knows(kv->space, &kv->keys[i])) {
            report->known_blocks++;
            continue;
        }
        if (kvf_reserve(kv->space, &reserved, kv->block_bytes) != KVF_OK) {
            /* Behind a hole nothing would be found: shed the rest too. */
            report->shed_blocks += (uint32_t)(end - i);
            break;
        }
        if (!export_block(kv, seq, i, reserved.data)) {
            kvf_abandon(kv->space, &reserved);
            break;
        }
        kvf_block block = block_of(kv, i);
        kvf_commit(kv->space, &reserved, &block, kv->block_bytes);
        saved++;
    }
    report->saved_blocks += (uint32_t)saved;
    report->export_us += kvfl_now_us() - begin;
    return saved;
}

size_t kvf_llama_save(kvf_llama *kv, kvf_llama_report *report, llama_seq_id seq, const llama_token *tokens, size_t num) {
    kvf_llama_report unread = {0};
    size_t blocks = num / kv->block_tokens;
    if (kv->space == NULL || blocks == 0 || num > kv->n_ctx || llama_memory_seq_pos_min(kv->mem, seq) != 0 ||
        llama_memory_seq_pos_max(kv->mem, seq) < (llama_pos)(blocks * kv->block_tokens) - 1) {
        return 0;
    }
    kvfl_chain(kv, tokens, blocks * kv->block_tokens);
    return kvfl_save(kv, report != NULL ? report : &unread, seq, 0, blocks);
}
