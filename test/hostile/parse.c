/* SPDX-License-Identifier: Apache-2.0
 *
 * check-hostile, parsers: records, the meta of sessions, slot maps, redirects, and the checks between records and
 * llama.cpp, on bytes of exactly their length. (llama.cpp itself can't be built with sanitizers here.)
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hostile/hostile.h"
#include "llama/model/blob.h"
#include "record/record.h"
#include "redis/cluster/slots.h"
#include "session/session.h"

/* ---- records ---- */

static void run_record(uint64_t *random) {
    uint32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    uint8_t head[KVFI_HEAD_BYTES(8)], sum[KVFI_SUM_BYTES], payload[200];
    kvfi_addr addr;
    kvft_bytes((uint8_t *)&addr, sizeof addr, 7);
    kvft_bytes(payload, sizeof payload, 8);
    kvf_block block = {.key = addr.key, .tokens = tokens, .num_tokens = 8, .first_token = 16};
    struct iovec iov = {payload, sizeof payload};
    kvfi_record_seal(head, sum, &addr, &block, &iov, 1, 0, 1700000000);
    kvft_buffer b = kvft_buffer_of(head, sizeof head);
    kvft_buffer_splice(&b, b.len, 0, payload, sizeof payload);
    kvft_buffer_splice(&b, b.len, 0, sum, sizeof sum);
    kvft_mutate(&b, random);
    if (hostile_below(random, 4) > 0) {
        kvft_reseal(&b);
    }
    kvfi_header header;
    const uint8_t *at_tokens = NULL, *at_payload = NULL;
    if (kvfi_record_parse(&header, &at_tokens, &at_payload, b.data, b.len) == KVF_WHY_NONE &&
        (at_payload < b.data || header.payload_bytes > b.len ||
         at_payload + header.payload_bytes + KVFI_SUM_BYTES != b.data + b.len)) {
        hostile_fault("a record is parsed beyond its end");
    }
    kvft_buffer_free(&b);
}

/* ---- sessions ---- */

static void run_meta(uint64_t *random) {
    kvfi_session_meta meta = {.num_tokens = 5, .part_bytes = 100, .layout = "LHTD", .has_space = true, .id = "chat"};
    kvfi_session_meta out;
    int64_t expires_s = 0;
    char id[KVF_MAX_ID_BYTES + 1];
    uint8_t *text = NULL, front[4];
    size_t len = 0;
    meta.keys = (kvfi_array){.bytes = 480, .dtype = "float16", .num_dims = 3, .dims = {2, 3, 40}};
    meta.values = meta.keys;
    if (kvfi_session_meta_encode(&text, &len, NULL, &meta, 0, 64) != KVF_OK) {
        abort();
    }
    kvft_buffer b = kvft_buffer_of(text, len);
    kvfi_free(text);
    kvft_mutate_text(&b, random);
    if (kvfi_session_meta_decode(&out, NULL, b.data, b.len) == KVF_OK &&
        (out.keys.bytes > KVFI_MAX_ARRAY_BYTES || out.values.bytes > KVFI_MAX_ARRAY_BYTES ||
         memchr(out.layout, 0, sizeof out.layout) == NULL || memchr(out.id, 0, sizeof out.id) == NULL)) {
        hostile_fault("the meta of a session is taken with numbers beyond their bounds");
    }
    kvfi_put32(front, (uint32_t)b.len);
    kvft_buffer_splice(&b, 0, 0, front, sizeof front);
    if (hostile_below(random, 2) == 0) {
        kvft_mutate(&b, random);
    }
    if (kvfi_session_value_id(id, &expires_s, b.data, b.len) && memchr(id, 0, sizeof id) == NULL) {
        hostile_fault("the id of a session has no end");
    }
    kvft_buffer_free(&b);
}

/* ---- a Cluster ---- */

static void take_slots(kvfi_slots *slots, const kvft_buffer *b) {
    char scratch[4096];
    kvfi_resp resp;
    kvfi_reply reply = {.last = false};
    size_t at = 0;
    kvfi_resp_init(&resp, scratch, sizeof scratch);
    kvfi_slots_init(slots);
    while (!reply.last) {
        struct iovec iov[4];
        kvfi_resp_event event = kvfi_resp_next(&resp, &reply);
        if (event == KVFI_RESP_BAD || (event == KVFI_RESP_MORE && at == b->len) ||
            (event == KVFI_RESP_REPLY && !kvfi_slots_take(slots, &reply))) {
            return;
        }
        if (event == KVFI_RESP_MORE) {
            (void)kvfi_resp_want(&resp, iov, 4);
            size_t n = iov[0].iov_len < b->len - at ? iov[0].iov_len : b->len - at;
            memcpy(iov[0].iov_base, b->data + at, n);
            kvfi_resp_got(&resp, n);
            at += n;
        }
    }
}

static void run_slots(uint64_t *random) {
    static const char text[] =
        "*3\r\n"
        "*4\r\n:0\r\n:99\r\n*3\r\n$9\r\n127.0.0.1\r\n:7000\r\n$2\r\nid\r\n"
        "*3\r\n$9\r\n127.0.0.1\r\n:7001\r\n$2\r\nid\r\n"
        "*3\r\n:100\r\n:199\r\n*4\r\n$0\r\n\r\n:2\r\n$2\r\nid\r\n*2\r\n$8\r\nhostname\r\n$1\r\nh\r\n"
        "*3\r\n:201\r\n:16383\r\n*3\r\n$3\r\n::1\r\n:1\r\n$2\r\nid\r\n";
    static kvfi_slots slots;
    kvft_buffer b = kvft_buffer_of(text, sizeof text - 1);
    kvft_mutate_text(&b, random);
    take_slots(&slots, &b);
    for (size_t i = 0; i < KVFI_NUM_SLOTS; i++) {
        if (slots.owner[i] != KVFI_NO_OWNER && slots.owner[i] >= slots.num_hosts) {
            hostile_fault("a slot is owned by nobody that is known");
            break;
        }
    }
    kvft_buffer_free(&b);
}

static void run_redirect(uint64_t *random) {
    static const char *const texts[] = {"MOVED 3999 127.0.0.1:6381", "ASK 3999 [::1]:6381", "ASK 1 :7", "MOVED 2 ?:9"};
    const char *text = texts[hostile_below(random, sizeof texts / sizeof *texts)];
    kvft_buffer b = kvft_buffer_of(text, strlen(text));
    uint16_t slot = 0;
    kvfi_host to;
    kvft_mutate_text(&b, random);
    if (kvfi_redirect_parse(&slot, &to, (const char *)b.data, b.len) != KVFI_REDIRECT_NONE &&
        (slot >= KVFI_NUM_SLOTS || to.port == 0 || memchr(to.name, 0, sizeof to.name) == NULL)) {
        hostile_fault("a redirect leads out of the Cluster");
    }
    kvft_buffer_free(&b);
}

/* ---- blobs of llama.cpp: two caches, the second one a window, and a state ---- */

enum { LAYERS = 2, K_ROW = 16, V_ROW = 24, STATE_ROW = 40, MAX_ROW = 80, BLOCK_CELLS = 8, WINDOW_CELLS = 5, F16 = 1 };

typedef struct form {
    uint32_t caches;
    bool state, ext, columns;
    uint8_t fill; /* of rows, tokens and sequences, whose values nobody can know */
    uint32_t type;
    uint64_t k_row, v_row; /* bytes for each cell */
} form;

static form form_of(uint64_t *random, uint32_t caches) {
    return (form){.caches = caches,
                  .state = hostile_below(random, 2) == 0,
                  .ext = hostile_below(random, 2) == 0,
                  .type = F16,
                  .k_row = K_ROW,
                  .v_row = V_ROW};
}

static void put32(kvft_buffer *b, uint32_t value) {
    kvft_buffer_splice(b, b->len, 0, &value, sizeof value);
}

static void put_rows(kvft_buffer *b, const form *f, uint32_t type, uint64_t row_bytes, uint32_t cells) {
    uint8_t row[MAX_ROW];
    memset(row, f->fill, sizeof row);
    put32(b, type);
    kvft_buffer_splice(b, b->len, 0, &row_bytes, sizeof row_bytes);
    for (uint32_t i = 0; i < cells; i++) {
        kvft_buffer_splice(b, b->len, 0, row, (size_t)row_bytes);
    }
}

static void put_columns(kvft_buffer *b, const form *f, uint32_t cells) {
    uint8_t column[V_ROW];
    memset(column, f->fill, sizeof column);
    put32(b, 1);
    put32(b, 2);
    put32(b, V_ROW / 2);
    for (uint32_t i = 0; i < cells; i++) {
        kvft_buffer_splice(b, b->len, 0, column, V_ROW);
    }
}

static void put_cache(kvft_buffer *b, const form *f, uint32_t first, uint32_t cells) {
    put32(b, 1);
    put32(b, cells);
    if (cells == 0) {
        return;
    }
    for (uint32_t i = 0; i < cells; i++) {
        put32(b, first + i);
        put32(b, 1);
        for (int dim = 0; dim < (f->ext ? 2 : 0); dim++) {
            put32(b, first + i);
        }
        for (int unknown = 0; unknown < (f->ext ? 2 : 1); unknown++) { /* the token, the sequence */
            put32(b, f->fill * 0x01010101u);
        }
    }
    put32(b, f->columns);
    put32(b, LAYERS);
    for (int layer = 0; layer < LAYERS; layer++) {
        put_rows(b, f, f->type, f->k_row, cells);
    }
    for (int layer = 0; layer < LAYERS; layer++) {
        if (f->columns) {
            put_columns(b, f, cells);
        } else {
            put_rows(b, f, f->type, f->v_row, cells);
        }
    }
}

static void put_state(kvft_buffer *b, const form *f, uint32_t pos, uint32_t cells) {
    put32(b, cells);
    if (cells > 0) {
        put32(b, pos);
        put32(b, 0);
    }
    put32(b, 0);
    put32(b, LAYERS);
    for (int row = 0; row < 2; row++) {
        put_rows(b, f, 0, STATE_ROW, cells);
    }
}

static kvft_buffer blob_head(const form *f) {
    kvft_buffer b = kvft_buffer_of("", 0);
    put32(&b, 0xaf143cd8u);
    put32(&b, f->fill * 0x01010101u);
    return b;
}

/* The blob that was accepted has the form of the one that was made. Only values in rows and the order of a window may
 * differ. `varied` is made with other values. */
static bool is_same_form(const kvft_buffer *blob, const kvft_buffer *made, const kvft_buffer *varied) {
    bool same = blob->len == made->len && varied->len == made->len;
    for (size_t i = 0; same && i < made->len; i++) {
        same = made->data[i] != varied->data[i] || blob->data[i] == made->data[i];
    }
    return same;
}

static kvft_buffer make_blob(const form *f, const kvft_buffer *rest, bool block) {
    kvft_buffer b = blob_head(f);
    if (block) {
        put_cache(&b, f, 64, BLOCK_CELLS);
        kvft_buffer_splice(&b, b.len, 0, rest->data, rest->len);
        return b;
    }
    for (uint32_t i = 1; i < f->caches; i++) {
        put_cache(&b, f, f->fill == 0 ? 67 : 0xffff00, WINDOW_CELLS);
    }
    if (f->state) {
        put_state(&b, f, 71, 1);
    }
    return b;
}

static bool takes(const kvfl_shape *shape, const kvft_buffer *rest, const kvft_buffer *blob, bool block) {
    return block ? kvfl_blob_is_block(shape, 1, rest->data, rest->len, blob->data, blob->len, 64, 72)
                 : kvfl_blob_is_state(shape, 1, blob->data, blob->len, WINDOW_CELLS, 72);
}

static void check_blob(form *f, const kvfl_shape *shape, const kvft_buffer *rest, uint64_t *random) {
    bool block = hostile_below(random, 2) == 0;
    kvft_buffer made = make_blob(f, rest, block), blob = kvft_buffer_of(made.data, made.len);
    f->fill = 0x22;
    kvft_buffer varied = make_blob(f, rest, block);
    if (!takes(shape, rest, &blob, block)) {
        hostile_fault("a blob is refused that is right");
    }
    kvft_mutate(&blob, random);
    if (takes(shape, rest, &blob, block) && !is_same_form(&blob, &made, &varied)) {
        hostile_fault("a blob is taken that is wrong");
    }
    kvfl_shape other = {.num_caches = f->caches, .has_state = f->state, .has_ext = f->ext};
    (void)kvfl_blob_parse(&other, blob.data, blob.len);
    kvft_buffer_free(&made);
    kvft_buffer_free(&varied);
    kvft_buffer_free(&blob);
}

/* The shape that an attach would see of that form, and what follows the cells of a block. */
static bool open_shape(kvfl_shape *shape, kvft_buffer *rest, const form *f) {
    kvft_buffer probe = blob_head(f);
    *rest = kvft_buffer_of("", 0);
    for (uint32_t i = 0; i < f->caches; i++) {
        put_cache(&probe, f, 977, 1);
    }
    for (uint32_t i = 1; i < f->caches; i++) {
        put_cache(rest, f, 0, 0);
    }
    if (f->state) {
        put_state(&probe, f, 977, 1);
        put_state(rest, f, 0, 0);
    }
    *shape = (kvfl_shape){.num_caches = f->caches, .has_state = f->state, .has_ext = f->ext};
    bool ok = kvfl_blob_parse(shape, probe.data, probe.len) && kvfl_shape_keep(shape, probe.data, probe.len);
    if (!ok) {
        hostile_fault("the probe is refused");
    }
    kvft_buffer_free(&probe);
    return ok;
}

static void close_shape(kvfl_shape *shape, kvft_buffer *rest) {
    kvfl_shape_free(shape);
    kvft_buffer_free(rest);
}

static void run_blob(uint64_t *random) {
    kvfl_shape shape;
    kvft_buffer rest;
    form f = form_of(random, 1 + (uint32_t)hostile_below(random, 2));
    f.columns = hostile_below(random, 2) == 0;
    if (open_shape(&shape, &rest, &f)) {
        check_blob(&f, &shape, &rest, random);
    }
    close_shape(&shape, &rest);
}

/* One factor of a block of numbers, or one number, of each type that a cache can have, is NaN or infinite: a miss. What
 * else a block holds is any bytes. */
static void run_numbers(uint64_t *random) {
    static const struct {
        uint32_t type;
        size_t block, factors, width; /* the factors at the beginning of a block, each of `width` bytes */
        uint32_t infinite, one;
    } types[] = {
        {0, 4, 1, 4, 0x7f800000, 0x3f800000}, /* F32 */
        {1, 2, 1, 2, 0x7c00, 0x3c00},         /* F16 */
        {2, 18, 1, 2, 0x7c00, 0x3c00},        /* Q4_0 */
        {3, 20, 2, 2, 0x7c00, 0x3c00},        /* Q4_1 */
        {6, 22, 1, 2, 0x7c00, 0x3c00},        /* Q5_0 */
        {7, 24, 2, 2, 0x7c00, 0x3c00},        /* Q5_1 */
        {8, 34, 1, 2, 0x7c00, 0x3c00},        /* Q8_0 */
        {20, 18, 1, 2, 0x7c00, 0x3c00},       /* IQ4_NL */
        {30, 2, 1, 2, 0x7f80, 0x3f80},        /* BF16 */
    };
    size_t t = hostile_below(random, sizeof types / sizeof *types), width = types[t].width;
    kvfl_shape shape;
    kvft_buffer rest;
    form f = form_of(random, 1);
    f.type = types[t].type;
    f.k_row = f.v_row = 2 * types[t].block;
    if (open_shape(&shape, &rest, &f)) {
        kvft_buffer blob = make_blob(&f, &rest, true);
        size_t rows = BLOCK_CELLS * (size_t)f.v_row; /* of the last layer, in front of the rest */
        size_t at = blob.len - rest.len - rows + hostile_below(random, rows / types[t].block) * types[t].block;
        memset(blob.data + at, 0xff, types[t].block);
        for (size_t i = 0; i < types[t].factors; i++) {
            memcpy(blob.data + at + i * width, &types[t].one, width);
        }
        if (!takes(&shape, &rest, &blob, true)) {
            hostile_fault("a block of finite numbers is refused");
        }
        uint32_t bad = types[t].infinite;
        bad |= hostile_below(random, 2) == 0 ? 0 : 1u << (8 * width - 1);                            /* negative */
        bad |= hostile_below(random, 2) == 0 ? 0 : 1u << hostile_below(random, width == 2 ? 7 : 23); /* NaN */
        memcpy(blob.data + at + hostile_below(random, types[t].factors) * width, &bad, width);
        if (takes(&shape, &rest, &blob, true)) {
            hostile_fault("a block with NaN or infinity is taken");
        }
        kvft_buffer_free(&blob);
    }
    close_shape(&shape, &rest);
}

/* The cells of a window are in any order, but each is named once. */
static void run_cells(uint64_t *random) {
    kvfl_shape shape;
    kvft_buffer rest;
    form f = form_of(random, 2);
    size_t cell = f.ext ? 24 : 12, i = hostile_below(random, WINDOW_CELLS),
           j = (i + 1 + hostile_below(random, WINDOW_CELLS - 1)) % WINDOW_CELLS;
    if (open_shape(&shape, &rest, &f)) {
        kvft_buffer blob = make_blob(&f, &rest, false);
        uint8_t *cells = blob.data + 16, first[24]; /* after the head of the blob and the head of the cache */
        memcpy(first, cells + i * cell, cell);
        memcpy(cells + i * cell, cells + j * cell, cell);
        if (takes(&shape, &rest, &blob, false)) {
            hostile_fault("a state that names a cell twice is taken");
        }
        memcpy(cells + j * cell, first, cell);
        if (!takes(&shape, &rest, &blob, false)) {
            hostile_fault("a state whose cells have another order is refused");
        }
        kvft_buffer_free(&blob);
    }
    close_shape(&shape, &rest);
}

/* ---- */

static bool begin(void) {
    return true;
}

static void run(uint64_t *random) {
    static void (*const parsers[])(uint64_t *) = {run_record, run_meta,    run_slots, run_redirect,
                                                  run_blob,   run_numbers, run_cells};
    parsers[hostile_below(random, sizeof parsers / sizeof *parsers)](random);
}

static void end(void) {
}

const hostile_part hostile_parse = {"parse", 25, begin, run, end};
