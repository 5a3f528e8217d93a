/* SPDX-License-Identifier: Apache-2.0
 *
 * kvf_llama_load and kvf_llama_save, for programs that compute by themselves: what a sequence holds is stored as it is,
 * under keys of its own, since nobody knows how it was computed.
 */
#include "llama/engine.h"

/* ---- save ---- */

/* Some of it is known to be computed under other adapters. */
static bool is_of_other(const kvf_llama *kv, llama_seq_id seq) {
    const kvfl_history *h = &kv->follow->histories[seq];
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

/* ---- load ---- */

/* Continues with blocks of the current prompt that kvf_llama_save stored. */
static size_t load_as_it_is(kvf_llama *kv, kvf_llama_report *report, llama_seq_id seq, size_t cut, size_t have) {
    kvf_llama_report more = {0};
    kv->cells->num_whole = cut / kv->block_tokens;
    kv->cells->tail_tokens = 0;
    kvfl_name_apart(kv, 0, KVFL_AS_IT_IS, sizeof KVFL_AS_IT_IS);
    size_t loaded = kvfl_load(kv, &more, seq, have, NULL);
    report->loaded_tokens += more.loaded_tokens;
    report->loaded_bytes += more.loaded_bytes;
    report->stored_tokens += more.stored_tokens;
    report->match_us += more.match_us;
    report->load_us += more.load_us;
    report->import_us += more.import_us;
    report->waited_us += more.waited_us;
    if (loaded > have) {
        report->why = more.why;
        report->plan = more.plan;
    }
    return loaded;
}

/* The longest cold prefix, and what kvf_llama_save stored after it. */
static size_t load_prefix(kvf_llama *kv, kvf_llama_report *report, llama_seq_id seq, const llama_token *tokens,
                          size_t num) {
    size_t cut = kvf_llama_cut(kv, num);
    if (!kvfl_is_ours(kv) || kv->space == NULL || cut == 0 || num > kv->n_ctx || !kvfl_is_text(kv, seq) ||
        kvfl_find_no_token(kv, tokens, num) < num) {
        return 0;
    }
    report->num_tokens = (uint32_t)num;
    llama_memory_seq_rm(kv->mem, seq, -1, -1);
    kv->follow->residents[seq].num = 0;
    kvfl_chain(kv, tokens, cut, num - 1 - cut);
    size_t cold = kvfl_load(kv, report, seq, 0, NULL), loaded = cold;
    if (cold < cut) {
        loaded = load_as_it_is(kv, report, seq, cut, cold);
    }
    kvfl_note_tokens(kv, seq, tokens, loaded);
    kvfl_note_cold(kv, seq, cold);
    return loaded;
}

size_t kvf_llama_load(kvf_llama *kv, kvf_llama_report *report, llama_seq_id seq, const llama_token *tokens,
                      size_t num) {
    kvf_llama_report own = {0};
    if (kvfl_check_report(NULL, report) != KVF_OK) {
        return 0;
    }
    size_t loaded = load_prefix(kv, &own, seq, tokens, num);
    kvfl_give_report(report, &own);
    return loaded;
}
