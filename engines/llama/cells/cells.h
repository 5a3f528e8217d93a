/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocks and states of a sequence, from its cells into memory and back, and into the store.
 *
 *   prompt.c   the blocks of the current prompt, and their keys
 *   rows.c     rows of a sequence, exported and imported through the scratch sequence
 *   state.c    windows and recurrent states, stored at boundaries
 *   save.c     blocks of a sequence into the store
 */
#ifndef KVFL_CELLS_H
#define KVFL_CELLS_H

#include "llama/model/model.h"

/* The current prompt: its whole blocks, and its tail, the tokens after the last whole block except the very last token.
 * The tail is stored as a separate block, which only the same prompt finds; its index is num_whole. */
typedef struct kvfl_cells {
    size_t num_whole;
    uint32_t tail_tokens;
    kvf_key *keys;
    uint32_t *tokens; /* unsigned, as the chain wants them */
    uint8_t *state;   /* room for the last state that was exported or loaded */
    size_t state_room;
} kvfl_cells;
/* False: no memory. kvfl_close_cells frees also what a failed kvfl_open_cells has made. */
bool kvfl_open_cells(kvf_llama *);
void kvfl_close_cells(kvf_llama *);

/* ---- prompt.c ---- */

/* The first position of block `index`, for any index up to one after the last; its number of tokens; its exported
 * length. */
static inline size_t kvfl_position(const kvf_llama *kv, size_t index) {
    return index <= kv->cells->num_whole ? index * kv->block_tokens
                                         : kv->cells->num_whole * kv->block_tokens + kv->cells->tail_tokens;
}
static inline uint32_t kvfl_tokens_of(const kvf_llama *kv, size_t index) {
    return index < kv->cells->num_whole ? kv->block_tokens : kv->cells->tail_tokens;
}
static inline size_t kvfl_bytes_of(const kvf_llama *kv, size_t index) {
    return kvfl_export_bytes(kv, kvfl_tokens_of(kv, index));
}
static inline size_t kvfl_num_blocks(const kvf_llama *kv) {
    return kv->cells->num_whole + (kv->cells->tail_tokens > 0);
}

/* Makes `tokens` the current prompt: the first `cut` of them (whole blocks), then a tail of `tail` tokens. */
void kvfl_chain(kvf_llama *, const llama_token *tokens, size_t cut, size_t tail);
kvf_block kvfl_block_of(const kvf_llama *, size_t index);
/* The keys of blocks from number `index` on also include `word` (up to 32 bytes), because they were not computed as a
 * prompt is. */
void kvfl_name_apart(kvf_llama *, size_t index, const void *word, size_t len);
#define KVFL_AS_IT_IS "as it is" /* of what kvf_llama_save stores */

/* ---- rows.c ---- */

/* cells->state has room for that many bytes. */
bool kvfl_has_room(kvf_llama *, size_t bytes);
/* Leaves the sequence without a recurrent state, which could neither go back to an earlier position nor forward to one
 * that was not computed. */
bool kvfl_drop_state(const kvf_llama *, llama_seq_id);
/* Exports positions [first, end), `bytes` (kvfl_export_bytes) of them. */
bool kvfl_export(kvf_llama *, llama_seq_id, llama_pos first, llama_pos end, void *out, size_t bytes);
/* Appends what kvfl_export wrote to the sequence, from position `first` on. */
bool kvfl_import(const kvf_llama *, llama_seq_id, llama_pos first, llama_pos end, const void *bytes, size_t len);
/* The same, but leaves the rows in the scratch sequence too: the next one drops them there anyway, and searching them
 * takes time proportional to the context. Call kvfl_clear_scratch after the last one. */
bool kvfl_take_in(const kvf_llama *, llama_seq_id, llama_pos first, llama_pos end, const void *bytes, size_t len);
void kvfl_clear_scratch(const kvf_llama *);

/* ---- save.c ---- */

/* Hands blocks [first, end) to the writers. */
size_t kvfl_save(kvf_llama *, kvf_llama_report *, llama_seq_id, size_t first, size_t end);

/* ---- state.c ---- */

/* A boundary is where a state is stored: every kind.apart tokens, after the last whole block, after the tail. */

/* Where a batch that begins at position `have` must end at the latest, because of the state there. */
static inline size_t kvfl_next_stop(const kvf_llama *kv, size_t have) {
    return kvfl_has_states(kv) ? (have / kv->kind.apart + 1) * kv->kind.apart : SIZE_MAX;
}
/* Call this when the sequence has been computed exactly up to the end of block index - 1. If that is a boundary, it
 * saves the state (if `save` is true and there is a store), and then lets the sequence continue exactly as one that has
 * loaded that state. False: llama.cpp lost the state. */
bool kvfl_pass_boundary(kvf_llama *, kvf_llama_report *, llama_seq_id, size_t index, bool save);
bool kvfl_is_boundary(const kvf_llama *, size_t index);
/* The state at a boundary, as a block of the store. */
kvf_block kvfl_state_block(const kvf_llama *, size_t index);
/* Its length; 0: it is not stored, or the store did not answer in time (*why). */
size_t kvfl_stored_state(kvf_llama *, kvf_reason *why, size_t index, int64_t deadline_us);
/* The last boundary after block `first` and up to `end` whose state is stored, of *out_bytes; or `first`. */
size_t kvfl_match_state(kvf_llama *, kvf_llama_report *, size_t *out_bytes, size_t first, size_t end,
                        int64_t deadline_us);
/* The sequence holds exactly the blocks before the boundary, and no state: imports the state. */
bool kvfl_import_state(const kvf_llama *, llama_seq_id, size_t index, const void *data, size_t len);
/* The end of a sequence, tokens `from` to `to`, and its state: taken out, to be put back if nothing better comes. */
typedef struct kvfl_stash {
    size_t from, to;
    uint8_t *rows, *state; /* NULL: there is none */
    size_t rows_bytes, state_bytes;
} kvfl_stash;
/* Cuts the sequence from its end `to` back to `from`, without a state, and keeps what it removed. False: it is
 * unchanged. */
bool kvfl_set_aside(kvf_llama *, kvfl_stash *out, llama_seq_id, size_t from, size_t to);
/* Drops what has come since, and puts the removed end back. False: what the sequence holds now is unknown. */
bool kvfl_put_back(kvf_llama *, const kvfl_stash *, llama_seq_id);
void kvfl_free_stash(kvfl_stash *);

#endif
