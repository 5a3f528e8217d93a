/* SPDX-License-Identifier: Apache-2.0 */
#include "llama/blob.h"

#include <string.h>

#define MAGIC 0xaf143cd8u
#define MAX_LAYERS 4096u
#define MAX_CELLS (1u << 20)

typedef struct reader {
    const uint8_t *at;
    size_t         left;
    bool           bad;
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

static void read_cells(reader *r, kvfl_shape *shape) {
    for (uint32_t i = 0; i < shape->num_cells && !r->bad; i++) {
        take32(r); /* the position */
        if (take32(r) != 1) {
            r->bad = true; /* a cell of one sequence has one sequence id */
        }
        take32(r);
    }
    shape->cell_bytes = 3 * sizeof(uint32_t);
}

static void read_rows(reader *r, kvfl_shape *shape, bool value) {
    for (uint32_t layer = 0; layer < shape->num_layers && !r->bad; layer++) {
        int32_t type = (int32_t)take32(r);
        uint64_t row_bytes = take64(r);
        if (r->bad || row_bytes > r->left) {
            r->bad = true;
            return;
        }
        take(r, (size_t)row_bytes * shape->num_cells);
        shape->cell_bytes += (size_t)row_bytes;
        if (layer == 0) {
            *(value ? &shape->v_type : &shape->k_type) = type;
            *(value ? &shape->v_row_bytes : &shape->k_row_bytes) = (size_t)row_bytes;
        }
    }
}

static void read_columns(reader *r, kvfl_shape *shape) {
    for (uint32_t layer = 0; layer < shape->num_layers && !r->bad; layer++) {
        int32_t type = (int32_t)take32(r);
        uint32_t element_bytes = take32(r);
        uint32_t num = take32(r);
        uint64_t row_bytes = (uint64_t)element_bytes * num;
        if (r->bad || row_bytes > r->left) {
            r->bad = true;
            return;
        }
        take(r, (size_t)row_bytes * shape->num_cells);
        shape->cell_bytes += (size_t)row_bytes;
        if (layer == 0) {
            shape->v_type = type;
            shape->v_row_bytes = (size_t)row_bytes;
        }
    }
}

bool kvfl_blob_parse(kvfl_shape *out, const uint8_t *blob, size_t len) {
    reader r = {.at = blob, .left = len};
    kvfl_shape shape = {0};
    if (take32(&r) != MAGIC) {
        return false;
    }
    take32(&r); /* the sequence it was exported from */
    shape.num_streams = take32(&r);
    if (r.bad || shape.num_streams != 1) {
        *out = shape;
        return !r.bad && shape.num_streams > 1;
    }
    shape.num_cells = take32(&r);
    if (r.bad || shape.num_cells > MAX_CELLS) {
        return false;
    }
    if (shape.num_cells > 0) {
        read_cells(&r, &shape);
        shape.meta_bytes = len - r.left;
        shape.v_trans = take32(&r) != 0;
        shape.num_layers = take32(&r);
        if (r.bad || shape.num_layers == 0 || shape.num_layers > MAX_LAYERS) {
            return false;
        }
        read_rows(&r, &shape, false);
        if (shape.v_trans) {
            read_columns(&r, &shape);
        } else {
            read_rows(&r, &shape, true);
        }
        shape.fixed_bytes = len - shape.num_cells * shape.cell_bytes;
    }
    *out = shape;
    return !r.bad && r.left == 0;
}

bool kvfl_blob_covers(const uint8_t *blob, size_t len, int32_t first, int32_t end) {
    reader r = {.at = blob, .left = len};
    bool ok = take32(&r) == MAGIC;
    take32(&r); /* the sequence it was exported from */
    ok = take32(&r) == 1 && ok;
    ok = take32(&r) == (uint32_t)(end - first) && ok;
    for (int32_t at = first; at < end && ok && !r.bad; at++) {
        ok = take32(&r) == (uint32_t)at;
        ok = take32(&r) == 1 && ok;
        take32(&r);
    }
    return ok && !r.bad;
}
