/* SPDX-License-Identifier: Apache-2.0 */
#include "llama/blob.h"

#include <string.h>

#define MAGIC      0xaf143cd8u
#define MAX_LAYERS 4096u
#define MAX_CELLS  (1u << 20)
#define EXT_BYTES  12u
#define MAX_TYPE   255u

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

/* The position of a cell. */
static uint32_t take_cell(reader *r, bool has_ext) {
    uint32_t pos = take32(r);
    if (take32(r) != 1) {
        r->bad = true; /* a cell of one sequence has one sequence id */
    }
    take(r, has_ext ? EXT_BYTES : 0);
    take32(r);
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
        for (uint32_t i = 0; i < cache->num_cells && !r->bad; i++) {
            take_cell(r, has_ext);
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

bool kvfl_blob_covers(const kvfl_shape *shape, uint32_t caches, const uint8_t *blob, size_t len, int32_t first,
                      int32_t end) {
    reader r = {.start = blob, .at = blob, .left = len};
    uint32_t num = (uint32_t)(end - first);
    bool ok = take32(&r) == MAGIC;
    take32(&r); /* the sequence it was exported from */
    for (uint32_t i = 0; i < caches && ok && !r.bad; i++) {
        const kvfl_cache *cache = &shape->caches[i];
        size_t part = offset(&r);
        ok = take32(&r) == 1;
        ok = take32(&r) == num && ok;
        for (int32_t at = first; at < end && ok && !r.bad; at++) {
            ok = take_cell(&r, shape->has_ext) == (uint32_t)at;
        }
        take(&r, kvfl_cache_bytes(cache, num) - (offset(&r) - part));
    }
    return ok && !r.bad;
}
