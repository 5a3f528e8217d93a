/* SPDX-License-Identifier: Apache-2.0
 *
 * Follows which tokens each sequence holds, and how they were computed. Nothing uncertain is claimed: `num` shrinks to
 * the certain part, and a reason describes what follows it, until the sequence is cut back to its known part.
 */
#include <stdlib.h>
#include <string.h>

#include "llama/follow/follow.h"

bool kvfl_open_follow(kvf_llama *kv) {
    kvfl_follow *follow = kv->follow;
    follow->histories = calloc(kv->num_seqs, sizeof *follow->histories);
    follow->residents = calloc(kv->num_seqs, sizeof *follow->residents);
    return follow->histories != NULL && follow->residents != NULL;
}

void kvfl_close_follow(kvf_llama *kv) {
    kvfl_follow *follow = kv->follow;
    for (size_t i = 0; follow->histories != NULL && i < kv->num_seqs; i++) {
        free(follow->histories[i].tokens);
    }
    for (size_t i = 0; follow->residents != NULL && i < kv->num_seqs; i++) {
        free(follow->residents[i].tokens);
    }
    for (size_t i = 0; i < KVFL_KNOWN_STATES; i++) {
        free(follow->states[i].tokens);
    }
    free(follow->histories);
    free(follow->residents);
}

static bool has_room(kvf_llama *kv, kvfl_history *h) {
    if (h->tokens == NULL) {
        h->tokens = calloc(kv->n_ctx, sizeof *h->tokens);
    }
    return h->tokens != NULL;
}

/* States that were taken from this sequence belong to rows that it no longer has. */
static void rows_gone(kvf_llama *kv, const kvfl_history *h, size_t from) {
    for (size_t i = 0; i < KVFL_KNOWN_STATES; i++) {
        kvfl_known_state *state = &kv->follow->states[i];
        state->rows_stay = state->rows_stay && (h != &kv->follow->histories[state->seq] || state->num <= from);
    }
}

/* A block whose end is gone is not computed from its beginning when it becomes whole again. A state of a sequence that
 * was cut is not the state that was computed there. */
static void cut(kvf_llama *kv, kvfl_history *h, size_t num) {
    if (num >= h->num) {
        return;
    }
    rows_gone(kv, h, num);
    h->num = num;
    h->lineage.ragged = false;
    if (num == 0 || kvfl_has_states(kv)) {
        h->lineage = (kvfl_lineage){0};
    } else if (num < h->lineage.cold) {
        h->lineage.cold = num / kv->block_tokens * kv->block_tokens;
    }
}

/* A batch has, or will have, a single token there, which is rounded by the number of threads. */
static bool is_beside_a_boundary(const kvf_llama *kv, size_t end) {
    return end % kv->block_tokens == 1 || end % KVFL_MIN_BATCH == KVFL_MIN_BATCH - 1;
}

void kvfl_note_cold(kvf_llama *kv, llama_seq_id seq, size_t end) {
    kvfl_history *h = &kv->follow->histories[seq];
    kvfl_lineage *how = &h->lineage;
    if (end > h->num || (kvfl_has_states(kv) && end < h->num)) {
        return;
    }
    how->ragged = false;
    if (kvfl_has_states(kv) && is_beside_a_boundary(kv, end)) {
        *how = (kvfl_lineage){0};
        return;
    }
    how->cold = kvfl_has_states(kv) ? end : end / kv->block_tokens * kv->block_tokens;
    if (kv->space != NULL && kvfl_has_states(kv) && end % kv->kind.apart != 0) {
        uint8_t name[4 + 4 + sizeof(kvf_key)] = "cuts"; /* see docs/record-format.md */
        for (size_t i = 0; i < 4; i++) {
            name[4 + i] = (uint8_t)(end >> 8 * i);
        }
        memcpy(name + 8, how->cuts.digest.bytes, sizeof(kvf_key));
        kvf_key_of(kv->space, &how->cuts.digest, name, sizeof name);
        how->cuts.any = true;
    }
}

kvfl_history *kvfl_history_of(kvf_llama *kv, llama_seq_id seq) {
    kvfl_history *h = &kv->follow->histories[seq];
    llama_pos end = llama_memory_seq_pos_max(kv->mem, seq) + 1;
    if (!has_room(kv, h)) {
        return NULL;
    }
    if ((size_t)end <= h->num) {
        if ((size_t)end < h->num) {
            h->in_prompt = false;
        }
        h->shares = h->shares && end > 0;
        cut(kv, h, (size_t)end); /* even if it was emptied, or cut back, without notice */
        h->why = KVF_ASIDE_NONE;
        h->identity = h->num == 0 ? kv->identity : h->identity;
    } else if (h->why == KVF_ASIDE_NONE) {
        h->why = KVF_ASIDE_FOREIGN;
    }
    return h;
}

static void follow(kvf_llama *kv, llama_seq_id seq, const llama_token *tokens, size_t num, uint64_t identity) {
    kvfl_history *h = &kv->follow->histories[seq];
    if (num > kv->n_ctx || (num > 0 && !has_room(kv, h))) {
        kvfl_forget(kv, seq, KVF_ASIDE_FOREIGN);
        return;
    }
    rows_gone(kv, h, 0);
    if (num > 0) {
        memmove(h->tokens, tokens, num * sizeof *tokens);
    }
    h->num = num;
    h->identity = identity;
    h->behind = 0;
    h->lineage = (kvfl_lineage){0};
    h->why = KVF_ASIDE_NONE;
    h->in_prompt = false;
}

void kvfl_note_tokens(kvf_llama *kv, llama_seq_id seq, const llama_token *tokens, size_t num) {
    follow(kv, seq, tokens, num, kv->identity);
}

void kvfl_doubt(kvf_llama *kv, llama_seq_id seq, kvf_llama_aside why) {
    kvfl_history *h = &kv->follow->histories[seq];
    h->lineage.ragged = false;
    h->why = h->why != KVF_ASIDE_NONE ? h->why : why;
    h->in_prompt = false;
}

/* Knowledge is kept if only the end has become doubtful: a sequence whose end is not followed still begins as
 * before. */
void kvfl_forget(kvf_llama *kv, llama_seq_id seq, kvf_llama_aside why) {
    bool begins = why == KVF_ASIDE_EMBEDDINGS || why == KVF_ASIDE_POSITIONS || why == KVF_ASIDE_MOVED;
    if (!begins) {
        cut(kv, &kv->follow->histories[seq], 0);
    }
    kvfl_doubt(kv, seq, why);
}

void kvfl_forget_all(kvf_llama *kv, kvf_llama_aside why) {
    for (size_t seq = 0; seq < kv->num_seqs; seq++) {
        kvfl_forget(kv, (llama_seq_id)seq, why);
    }
}

/* Whether `seq` is sequence i, or may share cells with it: llama.cpp moves the positions of cells, and so those of
 * every sequence that they belong to. */
static bool moves_with(const kvf_llama *kv, llama_seq_id seq, llama_seq_id i) {
    return i == seq || (kv->follow->histories[seq].shares && kv->follow->histories[i].shares);
}

void kvf_llama_forget(kvf_llama *kv, llama_seq_id seq) {
    if (!kvfl_is_ours(kv) || !kvfl_is_text(kv, seq)) {
        return;
    }
    for (llama_seq_id i = 0; i < (llama_seq_id)kv->num_seqs; i++) {
        if (moves_with(kv, seq, i)) {
            kvfl_forget(kv, i, KVF_ASIDE_FOREIGN);
            kv->follow->residents[i].num = 0; /* its witnesses are a sample of its tokens */
        }
    }
}

void kvfl_cleared(kvf_llama *kv) {
    for (size_t seq = 0; seq < kv->num_seqs; seq++) {
        kvfl_note_tokens(kv, (llama_seq_id)seq, NULL, 0);
    }
}

static void removed_from(kvf_llama *kv, llama_seq_id seq, llama_pos first, llama_pos end) {
    kvfl_history *h = &kv->follow->histories[seq];
    llama_pos max = llama_memory_seq_pos_max(kv->mem, seq);
    bool hole = max >= 0 && end >= 0 && max >= end; /* something remains after what was removed */
    size_t from = first > 0 ? (size_t)first : 0;
    if (from < h->num) {
        h->in_prompt = false;
    }
    cut(kv, h, from);
    if (hole && h->why == KVF_ASIDE_NONE && from <= h->num) {
        h->why = KVF_ASIDE_MOVED;
    } else if (max + 1 == (llama_pos)h->num) {
        h->why = KVF_ASIDE_NONE;
    }
}

void kvfl_removed(kvf_llama *kv, llama_seq_id seq, llama_pos first, llama_pos end) {
    for (llama_seq_id i = 0; i < (llama_seq_id)kv->num_seqs; i++) {
        if (seq < 0 || i == seq) {
            removed_from(kv, i, first, end);
        }
    }
}

void kvfl_copied(kvf_llama *kv, llama_seq_id from, llama_seq_id to, llama_pos first, llama_pos end) {
    if (!kvfl_is_text(kv, from) || !kvfl_is_text(kv, to) || from == to) {
        return;
    }
    kvfl_history *source = &kv->follow->histories[from];
    kvfl_history *target = &kv->follow->histories[to];
    llama_pos max = llama_memory_seq_pos_max(kv->mem, to);
    size_t num = end >= 0 && (size_t)end < source->num ? (size_t)end : source->num;
    source->shares = target->shares = true;
    /* Only into a sequence that was empty, from its beginning on, and only what is known. */
    if (first <= 0 && target->num == 0 && target->why == KVF_ASIDE_NONE && max + 1 == (llama_pos)num) {
        follow(kv, to, source->tokens, num, source->identity);
        target->lineage = num == source->num ? source->lineage : (kvfl_lineage){0};
        if (!kvfl_has_states(kv)) {
            kvfl_note_cold(kv, to, num < source->lineage.cold ? num : source->lineage.cold);
        }
    } else {
        kvfl_forget(kv, to, KVF_ASIDE_FOREIGN);
    }
}

void kvfl_kept_only(kvf_llama *kv, llama_seq_id seq) {
    for (llama_seq_id i = 0; i < (llama_seq_id)kv->num_seqs; i++) {
        if (i != seq) {
            kvfl_note_tokens(kv, i, NULL, 0);
        }
    }
}

static void moved(kvf_llama *kv, llama_seq_id seq, llama_pos first) {
    kvfl_history *h = &kv->follow->histories[seq];
    cut(kv, h, first > 0 ? (size_t)first : 0);
    h->why = llama_memory_seq_pos_max(kv->mem, seq) + 1 > (llama_pos)h->num ? KVF_ASIDE_MOVED : KVF_ASIDE_NONE;
    h->in_prompt = false;
}

void kvfl_moved(kvf_llama *kv, llama_seq_id seq, llama_pos first) {
    for (llama_seq_id i = 0; i < (llama_seq_id)kv->num_seqs; i++) {
        if (moves_with(kv, seq, i)) {
            moved(kv, i, first);
        }
    }
}

/* ---- states: bytes that were taken from a sequence of known tokens are those tokens, wherever they are set ---- */

void kvfl_state_taken(kvf_llama *kv, llama_seq_id seq, const uint8_t digest[16]) {
    const kvfl_history *h = &kv->follow->histories[seq];
    kvfl_known_state *state = &kv->follow->states[kv->follow->next_state % KVFL_KNOWN_STATES];
    if (h->why != KVF_ASIDE_NONE || h->num == 0 || llama_memory_seq_pos_max(kv->mem, seq) + 1 != (llama_pos)h->num) {
        return;
    }
    llama_token *tokens = malloc(h->num * sizeof *tokens);
    if (tokens == NULL) {
        return;
    }
    memcpy(tokens, h->tokens, h->num * sizeof *tokens);
    free(state->tokens);
    *state = (kvfl_known_state){
        .tokens = tokens, .num = h->num, .identity = h->identity, .lineage = h->lineage, .seq = seq, .rows_stay = true};
    memcpy(state->digest, digest, sizeof state->digest);
    kv->follow->next_state++;
}

static const kvfl_known_state *find_state(const kvf_llama *kv, const uint8_t digest[16]) {
    for (size_t i = 0; i < KVFL_KNOWN_STATES; i++) {
        if (kv->follow->states[i].tokens != NULL && memcmp(kv->follow->states[i].digest, digest, 16) == 0) {
            return &kv->follow->states[i];
        }
    }
    return NULL;
}

/* For a partial state (a window, a recurrent state) the rest of the sequence must be what it was when the state was
 * taken. */
static bool continues(const kvfl_history *h, const kvfl_known_state *state) {
    return h->num >= state->num && h->identity == state->identity &&
           memcmp(h->tokens, state->tokens, state->num * sizeof *state->tokens) == 0;
}

void kvfl_state_set(kvf_llama *kv, llama_seq_id seq, const uint8_t digest[16], bool partial) {
    const kvfl_known_state *state = find_state(kv, digest);
    kvfl_history *h = &kv->follow->histories[seq];
    if (state == NULL || (partial && !continues(h, state))) {
        kvfl_forget(kv, seq, KVF_ASIDE_FOREIGN);
        return;
    }
    if (!partial) {
        follow(kv, seq, state->tokens, state->num, state->identity);
        h->lineage = h->num > 0 ? state->lineage : (kvfl_lineage){0};
        return;
    }
    h->num = state->num;
    h->lineage = state->seq == seq && state->rows_stay ? state->lineage : (kvfl_lineage){0};
    h->why = KVF_ASIDE_NONE;
    h->in_prompt = false;
}
