/* SPDX-License-Identifier: Apache-2.0
 *
 * Exports rows of a sequence, and imports them, through the scratch sequence, which shares the cells.
 */
#include <stdlib.h>
#include <string.h>

#include "llama/cells/cells.h"

bool kvfl_has_room(kvf_llama *kv, size_t bytes) {
    if (kv->cells->state_room < bytes) {
        free(kv->cells->state);
        kv->cells->state = malloc(bytes);
        kv->cells->state_room = kv->cells->state != NULL ? bytes : 0;
    }
    return kv->cells->state_room >= bytes;
}

bool kvfl_drop_state(const kvf_llama *kv, llama_seq_id seq) {
    size_t len = KVFL_BLOB_HEAD + kv->kind.rest_bytes;
    return !kv->kind.shape.has_state ||
           llama_state_seq_set_data_ext(kv->ctx, kv->kind.empty, len, seq, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == len;
}

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
        llama_state_seq_get_data(kv->ctx, kv->cells->state, len, kv->scratch) != len) {
        return false;
    }
    memcpy(out, kv->cells->state, bytes - kind->rest_bytes);
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

/* Whether llama.cpp made the right thing of a block. For a window it holds nothing, and so tells no positions. */
static bool scratch_holds(const kvf_llama *kv, size_t len, llama_pos first, llama_pos end) {
    if (kvfl_has_states(kv)) {
        return llama_state_seq_get_size(kv->ctx, kv->scratch) == len;
    }
    return llama_memory_seq_pos_min(kv->mem, kv->scratch) == first &&
           llama_memory_seq_pos_max(kv->mem, kv->scratch) == end - 1;
}

bool kvfl_take_in(const kvf_llama *kv, llama_seq_id seq, llama_pos first, llama_pos end, const void *bytes,
                  size_t len) {
    bool ok = llama_state_seq_set_data(kv->ctx, bytes, len, kv->scratch) == len && scratch_holds(kv, len, first, end);
    if (ok) {
        llama_memory_seq_cp(kv->mem, kv->scratch, seq, first, end);
    }
    return ok;
}

void kvfl_clear_scratch(const kvf_llama *kv) {
    llama_memory_seq_rm(kv->mem, kv->scratch, -1, -1);
}

bool kvfl_import(const kvf_llama *kv, llama_seq_id seq, llama_pos first, llama_pos end, const void *bytes, size_t len) {
    bool ok = kvfl_take_in(kv, seq, first, end, bytes, len);
    kvfl_clear_scratch(kv);
    return ok;
}
