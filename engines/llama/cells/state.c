/* SPDX-License-Identifier: Apache-2.0
 *
 * States: the rows of sliding windows and the states of recurrent layers, which can't be divided into blocks. They
 * exist only for the current position, so they are exported when the sequence ends exactly at a boundary, each as a
 * separate record, named by the block that ends there. A boundary is loaded if its state and all blocks before it are
 * stored.
 *
 * llama.cpp imports a window into the first free cells, wherever its rows came from, and sums in the order of cells. So
 * a sequence that was computed up to a boundary is reseated there: its window is imported as a later load imports it,
 * and both continue with the same cells.
 */
#include <stdlib.h>
#include <string.h>

#include "llama/cells/cells.h"

#define PARTIAL LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY

bool kvfl_is_boundary(const kvf_llama *kv, size_t index) {
    return index > 0 && (index == kv->cells->num_whole || index == kvfl_num_blocks(kv) ||
                         (index < kv->cells->num_whole && kvfl_position(kv, index) % kv->kind.apart == 0));
}

/* Named by the block that ends there, and by a word that names no block. */
kvf_block kvfl_state_block(const kvf_llama *kv, size_t index) {
    kvf_block block = kvfl_block_of(kv, index - 1);
    kvf_state_key(kv->space, &block.key, &block.key);
    return block;
}

static bool ends_at(const kvf_llama *kv, llama_seq_id seq, size_t num) {
    return llama_memory_seq_pos_max(kv->mem, seq) == (llama_pos)num - 1;
}

/* ---- out ---- */

static void save_state(kvf_llama *kv, kvf_llama_report *report, size_t index, size_t len) {
    kvf_block block = kvfl_state_block(kv, index);
    kvf_reserved reserved;
    if (kvf_reserve(kv->space, &reserved, len) != KVF_OK) {
        report->shed_blocks++;
        return;
    }
    memcpy(reserved.data, kv->cells->state, len);
    if (kvf_commit(kv->space, &reserved, &block, len) == KVF_OK) {
        report->saved_blocks++;
    } else {
        report->shed_blocks++;
    }
}

static bool is_known(kvf_llama *kv, kvf_llama_report *report, size_t index) {
    kvf_block block = kvfl_state_block(kv, index);
    bool known = kvf_knows(kv->space, &block.key);
    report->known_blocks += known;
    return known;
}

/* Exports the state into kv->cells->state. Returns its bytes, or 0: the sequence is not at the boundary, or there is no
 * memory. */
static size_t export_state(kvf_llama *kv, llama_seq_id seq, size_t index) {
    size_t len = llama_state_seq_get_size_ext(kv->ctx, seq, PARTIAL);
    bool out = ends_at(kv, seq, kvfl_position(kv, index)) && len > 0 && kvfl_has_room(kv, len) &&
               llama_state_seq_get_data_ext(kv->ctx, kv->cells->state, len, seq, PARTIAL) == len;
    return out ? len : 0;
}

/* Imports what was just exported. This puts the sequence into the same cells as a later load would, so both compute
 * the same. False: llama.cpp has lost the state. */
static bool reseat(kvf_llama *kv, llama_seq_id seq, size_t len) {
    return llama_state_seq_set_data_ext(kv->ctx, kv->cells->state, len, seq, PARTIAL) == len;
}

/* Kinds that are reseated export the state even if it is stored already. */
bool kvfl_pass_boundary(kvf_llama *kv, kvf_llama_report *report, llama_seq_id seq, size_t index, bool save) {
    if (!kvfl_has_states(kv) || !kvfl_is_boundary(kv, index)) {
        return true;
    }
    save = save && !is_known(kv, report, index);
    if (!save && !kv->kind.reseat) {
        return true;
    }
    int64_t begin = kvfl_now_us();
    size_t len = export_state(kv, seq, index);
    bool intact = len == 0 || !kv->kind.reseat || reseat(kv, seq, len);
    if (len > 0 && intact && save && kvfl_is_state(kv, kv->cells->state, len, kvfl_position(kv, index))) {
        save_state(kv, report, index, len);
    }
    report->export_us += kvfl_now_us() - begin;
    return intact;
}

/* ---- in ---- */

bool kvfl_import_state(const kvf_llama *kv, llama_seq_id seq, size_t index, const void *data, size_t len) {
    return kvfl_is_state(kv, data, len, kvfl_position(kv, index)) &&
           llama_state_seq_set_data_ext(kv->ctx, data, len, seq, PARTIAL) == len &&
           ends_at(kv, seq, kvfl_position(kv, index));
}

size_t kvfl_stored_state(kvf_llama *kv, kvf_reason *why, size_t index, int64_t deadline_us) {
    kvf_block block = kvfl_state_block(kv, index);
    kvf_found found = {.why = KVF_WHY_BUDGET};
    size_t run = 0;
    int64_t left = deadline_us - kvfl_now_us();
    if (kvf_match(kv->space, &run, &found, &block.key, 1, left > 1 ? left : 1) != KVF_OK || run == 0) {
        *why = found.why;
        return 0;
    }
    for (uint32_t way = 0; way < KVFL_STATE_WAYS; way++) {
        if (found.payload_bytes == kvfl_state_length(kv, way, kvfl_position(kv, index))) {
            return (size_t)found.payload_bytes;
        }
    }
    *why = KVF_WHY_TRUNCATED;
    return 0;
}

/* The store said nothing of the record. Asking for another one would be no use. */
static bool is_silence(kvf_reason why) {
    return why == KVF_WHY_BUDGET || why == KVF_WHY_STALLED || why == KVF_WHY_UNREACHABLE || why == KVF_WHY_BREAKER ||
           why == KVF_WHY_CLOSED;
}

size_t kvfl_match_state(kvf_llama *kv, kvf_llama_report *report, size_t *out_bytes, size_t first, size_t end,
                        int64_t deadline_us) {
    int64_t begin = kvfl_now_us();
    kvf_reason why = KVF_WHY_NONE;
    size_t index = end;
    *out_bytes = 0;
    for (; index > first && !is_silence(why); index--) {
        *out_bytes = kvfl_is_boundary(kv, index) ? kvfl_stored_state(kv, &why, index, deadline_us) : 0;
        if (*out_bytes > 0) {
            break;
        }
        report->why = why != KVF_WHY_NONE ? why : report->why;
    }
    report->match_us += kvfl_now_us() - begin;
    return *out_bytes > 0 ? index : first;
}

/* ---- aside ---- */

static bool stash_rows(kvf_llama *kv, kvfl_stash *s, llama_seq_id seq) {
    if (s->from == s->to || kv->kind.num_caches == 0) {
        return true;
    }
    s->rows_bytes = kvfl_export_bytes(kv, s->to - s->from);
    s->rows = malloc(s->rows_bytes);
    return s->rows != NULL && kvfl_export(kv, seq, (llama_pos)s->from, (llama_pos)s->to, s->rows, s->rows_bytes);
}

static bool stash_state(const kvf_llama *kv, kvfl_stash *s, llama_seq_id seq) {
    if (!kvfl_has_states(kv)) {
        return true;
    }
    s->state_bytes = llama_state_seq_get_size_ext(kv->ctx, seq, PARTIAL);
    s->state = malloc(s->state_bytes);
    return s->state != NULL &&
           llama_state_seq_get_data_ext(kv->ctx, s->state, s->state_bytes, seq, PARTIAL) == s->state_bytes;
}

bool kvfl_set_aside(kvf_llama *kv, kvfl_stash *out, llama_seq_id seq, size_t from, size_t to) {
    *out = (kvfl_stash){.from = from, .to = to};
    if (stash_rows(kv, out, seq) && stash_state(kv, out, seq) && kvfl_drop_state(kv, seq) &&
        llama_memory_seq_rm(kv->mem, seq, (llama_pos)from, -1)) {
        return true;
    }
    kvfl_free_stash(out);
    return false;
}

bool kvfl_put_back(kvf_llama *kv, const kvfl_stash *s, llama_seq_id seq) {
    return kvfl_drop_state(kv, seq) && llama_memory_seq_rm(kv->mem, seq, (llama_pos)s->from, -1) &&
           (s->rows == NULL || kvfl_import(kv, seq, (llama_pos)s->from, (llama_pos)s->to, s->rows, s->rows_bytes)) &&
           (s->state == NULL ||
            llama_state_seq_set_data_ext(kv->ctx, s->state, s->state_bytes, seq, PARTIAL) == s->state_bytes) &&
           ends_at(kv, seq, s->to);
}

void kvfl_free_stash(kvfl_stash *s) {
    free(s->rows);
    free(s->state);
    *s = (kvfl_stash){0};
}
