/* SPDX-License-Identifier: Apache-2.0
 *
 * Parses the bytes that llama_state_seq_get_data writes, and compares the shape of two of them.
 */
#include "llama/model/blob.h"

#include <stdlib.h>
#include <string.h>

#define MAGIC      0xaf143cd8u
#define MAX_LAYERS 4096u
#define MAX_CELLS  (1u << 20)
#define MAX_TYPE   255u
#define PART_HEAD  8u  /* v_trans or s_trans, n_layer */
#define ROW_HEAD   12u /* type, and the size of one cell: u64 bytes, or u32 element bytes and u32 elements */

typedef struct reader {
    const uint8_t *start, *at;
    size_t left;
    bool bad;
} reader;

static const uint8_t *take(reader *r, size_t bytes) {
    const uint8_t *at = r->at;
    if (r->bad || bytes > r->left) {
        r->bad = true;
        return NULL;
    }
    r->at += bytes;
    r->left -= bytes;
    return at;
}

static uint32_t take32(reader *r) {
    uint32_t value = 0;
    const uint8_t *at = take(r, sizeof value);
    if (at != NULL) {
        memcpy(&value, at, sizeof value);
    }
    return value;
}

static uint64_t take64(reader *r) {
    uint64_t value = 0;
    const uint8_t *at = take(r, sizeof value);
    if (at != NULL) {
        memcpy(&value, at, sizeof value);
    }
    return value;
}

static size_t offset(const reader *r) {
    return (size_t)(r->at - r->start);
}

/* The position of a cell. For text it is equal in all dimensions. */
static uint32_t take_cell(reader *r, bool has_ext) {
    uint32_t pos = take32(r);
    if (take32(r) != 1) {
        r->bad = true; /* a cell of one sequence has one sequence id */
    }
    if (has_ext) {
        r->bad = take32(r) != pos || r->bad;
        r->bad = take32(r) != pos || r->bad;
        take32(r); /* the token */
    }
    take32(r); /* the sequence it was exported from */
    return pos;
}

/* ---- a cache ---- */

static void read_rows(reader *r, kvfl_cache *cache, bool value) {
    for (uint32_t layer = 0; layer < cache->num_layers && !r->bad; layer++) {
        int32_t type = (int32_t)take32(r);
        uint64_t row_bytes = take64(r);
        if (r->bad || row_bytes > r->left) {
            r->bad = true;
            return;
        }
        take(r, (size_t)row_bytes * cache->num_cells);
        cache->cell_bytes += (size_t)row_bytes;
        if (layer == 0) {
            *(value ? &cache->v_type : &cache->k_type) = type;
            *(value ? &cache->v_row_bytes : &cache->k_row_bytes) = (size_t)row_bytes;
        }
    }
}

static void read_columns(reader *r, kvfl_cache *cache) {
    for (uint32_t layer = 0; layer < cache->num_layers && !r->bad; layer++) {
        int32_t type = (int32_t)take32(r);
        uint32_t element_bytes = take32(r);
        uint32_t num = take32(r);
        uint64_t row_bytes = (uint64_t)element_bytes * num;
        if (r->bad || row_bytes > r->left) {
            r->bad = true;
            return;
        }
        take(r, (size_t)row_bytes * cache->num_cells);
        cache->cell_bytes += (size_t)row_bytes;
        if (layer == 0) {
            cache->v_type = type;
            cache->v_row_bytes = (size_t)row_bytes;
        }
    }
}

static void read_cache(reader *r, kvfl_cache *cache, bool has_ext) {
    *cache = (kvfl_cache){.begin = offset(r)};
    cache->num_streams = take32(r);
    if (cache->num_streams != 1) {
        r->bad = true;
        return;
    }
    cache->num_cells = take32(r);
    r->bad = r->bad || cache->num_cells > MAX_CELLS;
    if (!r->bad && cache->num_cells > 0) {
        size_t cells = offset(r);
        cache->in_order = true;
        for (uint32_t i = 0; i < cache->num_cells && !r->bad; i++) {
            uint32_t pos = take_cell(r, has_ext);
            cache->first_pos = i == 0 ? (int32_t)pos : cache->first_pos;
            cache->in_order = cache->in_order && pos == (uint32_t)cache->first_pos + i;
        }
        cache->cell_bytes = (offset(r) - cells) / cache->num_cells;
        cache->rows = offset(r);
        cache->v_trans = take32(r) != 0;
        cache->num_layers = take32(r);
        if (cache->num_layers == 0 || cache->num_layers > MAX_LAYERS) {
            r->bad = true;
            return;
        }
        read_rows(r, cache, false);
        cache->layout =
            (kvfl_rows){.num = 2 * cache->num_layers, .first_column = (cache->v_trans ? 1 : 2) * cache->num_layers};
        if (cache->v_trans) {
            read_columns(r, cache);
        } else {
            read_rows(r, cache, true);
        }
        cache->fixed_bytes = offset(r) - cache->begin - cache->num_cells * cache->cell_bytes;
    }
    cache->end = offset(r);
}

/* ---- a state: the last part. Which layers are recurrent is not told, so rows are read until the blob ends. ---- */

static void read_state(reader *r, kvfl_shape *shape) {
    shape->state_begin = offset(r);
    shape->state_cells = take32(r);
    if (shape->state_cells > 1) {
        r->bad = true;
        return;
    }
    if (shape->state_cells == 1) {
        shape->state_pos = (int32_t)take32(r);
        r->bad = take32(r) != 0 || r->bad;
    }
    shape->state_rows = offset(r);
    uint32_t transposed = take32(r), num_layers = take32(r);
    r->bad = r->bad || transposed != 0 || num_layers == 0 || num_layers > MAX_LAYERS;
    for (uint32_t rows = 0; r->left > 0 && !r->bad; rows++) {
        uint32_t type = take32(r);
        uint64_t row_bytes = take64(r);
        r->bad = r->bad || type > MAX_TYPE || rows >= 2 * num_layers || row_bytes > SIZE_MAX;
        take(r, shape->state_cells > 0 ? (size_t)row_bytes : 0);
        shape->state_layout.num = shape->state_layout.first_column = rows + 1;
    }
    shape->state_end = offset(r);
}

bool kvfl_blob_parse(kvfl_shape *shape, const uint8_t *blob, size_t len) {
    reader r = {.start = blob, .at = blob, .left = len};
    if (take32(&r) != MAGIC) {
        return false;
    }
    take32(&r); /* the sequence it was exported from */
    for (uint32_t i = 0; i < shape->num_caches && !r.bad; i++) {
        read_cache(&r, &shape->caches[i], shape->has_ext);
    }
    if (shape->has_state && !r.bad) {
        read_state(&r, shape);
    }
    return !r.bad && r.left == 0;
}

/* ---- the numbers in rows ---- */

/* ggml's numbers of the types that a cache can have. */
enum { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, IQ4_NL = 20, BF16 = 30 };

#define LANES16(bits) ((uint64_t)(bits)*0x0001000100010001u)
#define LANES32(bits) ((uint64_t)(bits)*0x0000000100000001u)

typedef uint64_t lanes __attribute__((vector_size(16)));
enum { STRIDE = 64 }; /* bytes at once: takes 2 % of the time of an import; one number at a time takes 6 % */

/* Sets the sign bit of each number that is infinite or NaN: its exponent is all ones, so adding one to the exponent's
 * lowest bit carries over. `exponent` and `one` apply to all numbers in 8 bytes. */
static inline lanes carries(const uint8_t at[STRIDE], uint64_t exponent, uint64_t one) {
    lanes now[STRIDE / sizeof(lanes)];
    memcpy(now, at, sizeof now);
    return (((now[0] & exponent) + one) | ((now[1] & exponent) + one)) |
           (((now[2] & exponent) + one) | ((now[3] & exponent) + one));
}

static bool has_finite(const uint8_t *at, size_t bytes, uint64_t exponent, uint64_t one) {
    uint8_t end[STRIDE] = {0};
    lanes seen = {0};
    for (; bytes >= STRIDE; at += STRIDE, bytes -= STRIDE) {
        seen |= carries(at, exponent, one);
    }
    memcpy(end, at, bytes);
    seen |= carries(end, exponent, one);
    return ((seen[0] | seen[1]) & (exponent + one)) == 0;
}

/* Blocks of quantized numbers begin with one or two F16 factors. */
static bool has_finite_scales(const uint8_t *at, size_t bytes, size_t block, size_t scales) {
    uint32_t seen = 0, two = 0;
    for (; bytes >= block; at += block, bytes -= block) {
        memcpy(&two, at, 2 * scales);
        seen |= (two & 0x7c007c00u) + 0x04000400u;
    }
    return (seen & 0x80008000u) == 0;
}

/* One NaN or infinity spoils what every sequence of the context computes: attention multiplies the rows of others by 0,
 * and the product is NaN. (Forged finite numbers can overflow in later layers and then do the same, which is not
 * detected here. Only a secret keeps forgers out.) */
static bool is_finite(uint32_t type, const uint8_t *at, size_t bytes) {
    switch (type) {
    case F32:
        return has_finite(at, bytes, LANES32(0x7f800000u), LANES32(0x00800000u));
    case F16:
        return has_finite(at, bytes, LANES16(0x7c00u), LANES16(0x0400u));
    case BF16:
        return has_finite(at, bytes, LANES16(0x7f80u), LANES16(0x0080u));
    case Q4_0:
    case IQ4_NL:
        return has_finite_scales(at, bytes, 18, 1);
    case Q4_1:
        return has_finite_scales(at, bytes, 20, 2);
    case Q5_0:
        return has_finite_scales(at, bytes, 22, 1);
    case Q5_1:
        return has_finite_scales(at, bytes, 24, 2);
    case Q8_0:
        return has_finite_scales(at, bytes, 34, 1);
    default:
        return true;
    }
}

/* ---- the heads of rows, kept and compared ---- */

static size_t heads_bytes(const kvfl_rows *rows) {
    return PART_HEAD + (size_t)rows->num * ROW_HEAD;
}

/* The size of one layer's row for each cell. */
static size_t row_bytes(const kvfl_rows *rows, uint32_t row, const uint8_t *head) {
    uint32_t words[3];
    uint64_t bytes = 0;
    memcpy(words, head, sizeof words);
    memcpy(&bytes, head + sizeof *words, sizeof bytes);
    return row < rows->first_column ? (size_t)bytes : (size_t)words[1] * words[2];
}

static uint32_t row_type(const uint8_t *head) {
    uint32_t type = 0;
    memcpy(&type, head, sizeof type);
    return type;
}

/* Copies the heads of a part, and skips its rows. */
static bool keep_heads(reader *r, const kvfl_rows *rows, uint8_t *heads, size_t num_cells) {
    uint8_t *known = heads + rows->heads;
    const uint8_t *at = take(r, PART_HEAD);
    if (at != NULL) {
        memcpy(known, at, PART_HEAD);
    }
    known += PART_HEAD;
    for (uint32_t row = 0; row < rows->num && !r->bad; row++) {
        at = take(r, ROW_HEAD);
        if (at != NULL) {
            memcpy(known, at, ROW_HEAD);
            take(r, row_bytes(rows, row, known) * num_cells);
        }
        known += ROW_HEAD;
    }
    return !r->bad;
}

/* Heads as they were kept, with rows of numbers between them. */
static bool take_rows(reader *r, const kvfl_rows *rows, const uint8_t *heads, size_t num_cells) {
    const uint8_t *known = heads + rows->heads, *at = take(r, PART_HEAD);
    bool ok = at != NULL && memcmp(known, at, PART_HEAD) == 0;
    known += PART_HEAD;
    for (uint32_t row = 0; row < rows->num && ok; row++) {
        size_t bytes = row_bytes(rows, row, known) * num_cells;
        at = take(r, ROW_HEAD);
        ok = at != NULL && memcmp(known, at, ROW_HEAD) == 0;
        at = take(r, bytes);
        ok = ok && at != NULL && is_finite(row_type(known), at, bytes);
        known += ROW_HEAD;
    }
    return ok;
}

bool kvfl_shape_keep(kvfl_shape *shape, const uint8_t *blob, size_t len) {
    size_t bytes = 0;
    for (uint32_t i = 0; i < shape->num_caches; i++) {
        shape->caches[i].layout.heads = bytes;
        bytes += heads_bytes(&shape->caches[i].layout);
    }
    shape->state_layout.heads = bytes;
    shape->heads = malloc(bytes + heads_bytes(&shape->state_layout));
    bool ok = shape->heads != NULL;
    for (uint32_t i = 0; i < shape->num_caches && ok; i++) {
        const kvfl_cache *cache = &shape->caches[i];
        reader r = {.start = blob, .at = blob + cache->rows, .left = len - cache->rows};
        ok = keep_heads(&r, &cache->layout, shape->heads, cache->num_cells);
    }
    reader r = {.start = blob, .at = blob + shape->state_rows, .left = len - shape->state_rows};
    return ok && (!shape->has_state || keep_heads(&r, &shape->state_layout, shape->heads, shape->state_cells));
}

void kvfl_shape_free(kvfl_shape *shape) {
    free(shape->heads);
    shape->heads = NULL;
}

/* ---- what came from a store ---- */

static bool take_head(reader *r) {
    bool ok = take32(r) == MAGIC;
    take32(r); /* the sequence it was exported from */
    return ok;
}

static bool take_cells_in_order(reader *r, bool has_ext, uint32_t first, uint32_t num) {
    bool ok = true;
    for (uint32_t i = 0; i < num && ok && !r->bad; i++) {
        ok = take_cell(r, has_ext) == first + i;
    }
    return ok;
}

/* Each of them once. */
static bool take_cells(reader *r, bool has_ext, uint32_t first, uint32_t num) {
    uint8_t *seen = calloc(num / 8 + 1, 1);
    bool ok = seen != NULL;
    for (uint32_t i = 0; i < num && ok && !r->bad; i++) {
        uint32_t at = take_cell(r, has_ext) - first;
        ok = at < num && (seen[at / 8] >> at % 8 & 1) == 0;
        if (ok) {
            seen[at / 8] |= (uint8_t)(1u << at % 8);
        }
    }
    free(seen);
    return ok;
}

static bool take_cache(reader *r, const kvfl_shape *shape, uint32_t index, uint32_t first, uint32_t num,
                       bool (*cells)(reader *, bool has_ext, uint32_t first, uint32_t num)) {
    bool ok = take32(r) == 1;
    ok = take32(r) == num && ok;
    return ok && cells(r, shape->has_ext, first, num) && take_rows(r, &shape->caches[index].layout, shape->heads, num);
}

bool kvfl_blob_is_block(const kvfl_shape *shape, uint32_t caches, const uint8_t *rest, size_t rest_bytes,
                        const uint8_t *blob, size_t len, int32_t first, int32_t end) {
    reader r = {.start = blob, .at = blob, .left = len};
    bool ok = take_head(&r);
    for (uint32_t i = 0; i < caches && ok; i++) {
        ok = take_cache(&r, shape, i, (uint32_t)first, (uint32_t)(end - first), take_cells_in_order);
    }
    return ok && !r.bad && r.left == rest_bytes && (rest_bytes == 0 || memcmp(r.at, rest, rest_bytes) == 0);
}

bool kvfl_blob_is_state(const kvfl_shape *shape, uint32_t caches, const uint8_t *blob, size_t len, uint32_t num_cells,
                        int32_t end) {
    reader r = {.start = blob, .at = blob, .left = len};
    bool ok = take_head(&r);
    for (uint32_t i = caches; i < shape->num_caches && ok; i++) {
        ok = take_cache(&r, shape, i, (uint32_t)end - num_cells, num_cells, take_cells);
    }
    if (shape->has_state && ok) {
        ok = take32(&r) == 1;
        ok = take32(&r) == (uint32_t)end - 1 && ok;
        ok = take32(&r) == 0 && ok && take_rows(&r, &shape->state_layout, shape->heads, 1);
    }
    return ok && !r.bad && r.left == 0;
}

size_t kvfl_state_bytes(const kvfl_shape *shape, uint32_t caches, size_t num_cells) {
    size_t bytes = KVFL_BLOB_HEAD + (shape->state_end - shape->state_begin);
    for (uint32_t i = caches; i < shape->num_caches; i++) {
        bytes += kvfl_cache_bytes(&shape->caches[i], num_cells);
    }
    return bytes;
}
