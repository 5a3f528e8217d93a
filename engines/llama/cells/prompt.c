/* SPDX-License-Identifier: Apache-2.0
 *
 * The blocks of the current prompt: where they begin, and their keys.
 */
#include <stdlib.h>

#include "llama/cells/cells.h"

bool kvfl_open_cells(kvf_llama *kv) {
    kvfl_cells *cells = kv->cells;
    cells->keys = calloc(kv->n_ctx / kv->block_tokens + 2, sizeof *cells->keys); /* and the tail */
    cells->tokens = calloc(kv->n_ctx, sizeof *cells->tokens);
    return cells->keys != NULL && cells->tokens != NULL;
}

void kvfl_close_cells(kvf_llama *kv) {
    free(kv->cells->state);
    free(kv->cells->keys);
    free(kv->cells->tokens);
}

size_t kvf_llama_cut(const kvf_llama *kv, size_t num) {
    return num > 0 ? (num - 1) / kv->block_tokens * kv->block_tokens : 0;
}

void kvfl_chain(kvf_llama *kv, const llama_token *tokens, size_t cut, size_t tail) {
    /* A token that is computed alone: ggml then divides the sum over all tokens before it among the threads, and rounds
     * by their number. */
    tail = tail > 1 ? tail : 0;
    kv->cells->num_whole = cut / kv->block_tokens;
    kv->cells->tail_tokens = (uint32_t)tail;
    for (size_t i = 0; i < cut + tail; i++) {
        kv->cells->tokens[i] = (uint32_t)tokens[i];
    }
    if (kv->space == NULL) {
        return;
    }
    kvf_chain(kv->space, kv->cells->keys, kv->cells->num_whole, kv->cells->tokens, cut);
    if (tail > 0 && cut > 0) {
        kvf_tail_key(kv->space, &kv->cells->keys[kv->cells->num_whole], &kv->cells->keys[kv->cells->num_whole - 1],
                     kv->cells->tokens + cut, tail);
    }
}

void kvfl_name_apart(kvf_llama *kv, size_t index, const void *how, size_t len) {
    for (size_t i = index; kv->space != NULL && i < kvfl_num_blocks(kv); i++) {
        kvf_apart_key(kv->space, &kv->cells->keys[i], &kv->cells->keys[i], how, len);
    }
}

kvf_block kvfl_block_of(const kvf_llama *kv, size_t index) {
    return (kvf_block){.key = kv->cells->keys[index],
                       .tokens = kv->cells->tokens + kvfl_position(kv, index),
                       .num_tokens = kvfl_tokens_of(kv, index),
                       .first_token = (uint32_t)kvfl_position(kv, index)};
}
