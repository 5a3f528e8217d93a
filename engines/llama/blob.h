/* SPDX-License-Identifier: Apache-2.0
 *
 * The blob of one sequence, as llama_state_seq_get_data writes it for a plain KV cache (llama-context.cpp, llama-kv-cache.cpp state_write*;
 * LLAMA_STATE_SEQ_VERSION 3; native endianness, no checksum, no version of its own):
 *
 *   u32 magic, i32 seq_id, u32 n_stream, per stream: u32 cells, per cell {i32 pos, u32 n_seq_id, i32 seq_id},
 *   u32 v_trans, u32 n_layer, per layer K {i32 type, u64 row bytes, rows}, per layer V the same, or if transposed
 *   {i32 type, u32 element bytes, u32 rows, elements}
 *
 * It is private to llama.cpp. So an export of one token is parsed whole at attach, and anything unexpected refuses the context: memory of
 * another kind (sliding window, recurrent, indexed) has further parts and does not parse.
 */
#ifndef KVFL_BLOB_H
#define KVFL_BLOB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct kvfl_shape {
    uint32_t num_streams, num_cells, num_layers;
    bool     v_trans;
    size_t   cell_bytes;  /* what one token takes: its cell and its rows in all layers */
    size_t   fixed_bytes; /* what a blob takes besides */
    int32_t  k_type, v_type; /* ggml types of the first layer */
    size_t   k_row_bytes, v_row_bytes;
    size_t   meta_bytes;  /* where the rows begin: behind the cells */
} kvfl_shape;

/* false: not the blob of a plain KV cache, or not to its last byte. With 0 cells only the counts are set. */
bool kvfl_blob_parse(kvfl_shape *out, const uint8_t *blob, size_t len);

/* The blob has one cell for each of the positions from `first` to `end` - 1, in this order. */
bool kvfl_blob_covers(const uint8_t *blob, size_t len, int32_t first, int32_t end);

static inline size_t kvfl_blob_bytes(const kvfl_shape *shape, size_t num_tokens) {
    return shape->fixed_bytes + num_tokens * shape->cell_bytes;
}

#endif
