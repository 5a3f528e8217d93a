/* SPDX-License-Identifier: Apache-2.0
 *
 * The blob of one sequence, as llama_state_seq_get_data writes it (llama-context.cpp, llama-kv-cache.cpp and
 * llama-memory-recurrent.cpp, state_write*; LLAMA_STATE_SEQ_VERSION 3; native endianness, no checksum, no version of
 * its own):
 *
 *   u32 magic, i32 seq_id, then one part after the other:
 *   a cache:  u32 n_stream, per stream: u32 cells, per cell {i32 pos, u32 n_seq_id, [i32 x, i32 y, i32 token], i32
 *             seq_id}, u32 v_trans, u32 n_layer, per layer K {i32 type, u64 row bytes, rows}, per layer V the same, or
 *             if transposed {i32 type, u32 element bytes, u32 rows, elements}
 *   a state:  u32 cells, per cell {i32 pos, u32 0}, u32 0, u32 n_layer, per recurrent layer {i32 type, u64 row bytes,
 *             row}, twice
 *
 * A plain model has one cache. With sliding windows there is a second one, of the layers with a window. A hybrid model
 * has a state after its cache, and a recurrent one has only a state. The format is private to llama.cpp, so an export
 * of one token is parsed completely at attach, and anything unexpected refuses the context: memory of another kind has
 * further parts and does not parse.
 */
#ifndef KVFL_BLOB_H
#define KVFL_BLOB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVFL_BLOB_HEAD  8u /* magic, seq_id */
#define KVFL_MAX_CACHES 2u

/* The rows of a part. Heads are two words before all rows, and type and size before the rows of each layer. They are
 * the same in every blob of a context, for any number of cells. */
typedef struct kvfl_rows {
    uint32_t num;          /* of layers; K and V (R and S) count separately */
    uint32_t first_column; /* from this one on, elements are ordered by row, not by cell (V transposed) */
    size_t heads;          /* where theirs begin in the heads of the shape */
} kvfl_rows;

/* One cache of a blob. With 0 cells only num_streams, begin and end are set. */
typedef struct kvfl_cache {
    uint32_t num_streams, num_cells, num_layers;
    kvfl_rows layout;
    int32_t first_pos; /* of the first cell */
    bool in_order;     /* the others follow it position by position */
    bool v_trans;
    size_t cell_bytes;      /* the size of one token: its cell and its rows in all layers */
    size_t fixed_bytes;     /* the rest of the part's size */
    int32_t k_type, v_type; /* ggml types of the first layer */
    size_t k_row_bytes, v_row_bytes;
    size_t begin, rows, end; /* offsets in the blob: of the part, of what follows its cells, of what follows the part */
} kvfl_cache;

/* What is expected, and what was found. */
typedef struct kvfl_shape {
    uint32_t num_caches;
    bool has_state;
    bool has_ext; /* cells have positions of several dimensions */
    kvfl_cache caches[KVFL_MAX_CACHES];
    uint32_t state_cells;
    int32_t state_pos; /* of the only cell */
    size_t state_begin, state_rows, state_end;
    kvfl_rows state_layout;
    uint8_t *heads; /* of all parts; NULL until kvfl_shape_keep */
} kvfl_shape;

/* Parses a blob. False: it does not have that many caches, with a state or without, or is not parsed to its last byte.
 * num_caches, has_state and has_ext are inputs. A blob of several streams is parsed only up to the first
 * num_streams. */
bool kvfl_blob_parse(kvfl_shape *, const uint8_t *blob, size_t len);

/* Keeps the heads of `blob`, from which the shape was parsed, for the two below. False: no memory. */
bool kvfl_shape_keep(kvfl_shape *, const uint8_t *blob, size_t len);
void kvfl_shape_free(kvfl_shape *);

/* Bytes from a store are given to llama.cpp only if one of these two returns true, since llama.cpp ends the process on
 * some blobs that it did not write. They compare every byte except the rows, trust none, and look for infinite numbers
 * and NaN in the rows. */

/* A block: in each of the first `caches` caches, one cell for each position from `first` to `end` - 1, in this order;
 * then the `rest`; then nothing. */
bool kvfl_blob_is_block(const kvfl_shape *, uint32_t caches, const uint8_t *rest, size_t rest_bytes,
                        const uint8_t *blob, size_t len, int32_t first, int32_t end);

/* A state at position `end`: in each of the caches from number `caches` on, one cell for each of the last `num_cells`
 * positions before `end`, in any order; then the state, if the shape has one, of the last position; then nothing. */
bool kvfl_blob_is_state(const kvfl_shape *, uint32_t caches, const uint8_t *blob, size_t len, uint32_t num_cells,
                        int32_t end);
size_t kvfl_state_bytes(const kvfl_shape *, uint32_t caches, size_t num_cells); /* of it */

static inline size_t kvfl_cache_bytes(const kvfl_cache *cache, size_t num_tokens) {
    return cache->fixed_bytes + num_tokens * cache->cell_bytes;
}

#endif
