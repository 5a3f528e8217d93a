/* SPDX-License-Identifier: Apache-2.0
 *
 * The payload of a stored answer.
 *
 * Triton's own buffers are checked too. Triton packs each response as
 *
 *   num         uint32, the number of outputs
 *   for each    uint64 length of the rest; name, data type and shape (int64 each), each after its uint32 length; data after
 *               its uint64 length
 *
 * and unpacks it without a look at the lengths, so a forged record would make it read anywhere.
 */
#include "triton/cache/answer.h"

#include <endian.h>
#include <string.h>

static const char magic[8] = {'k', 'v', 'f', 'r', 'e', 's', 'p', '1'};

static uint64_t get64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return le64toh(value);
}

static uint8_t *put64(uint8_t *at, uint64_t value) {
    value = htole64(value);
    memcpy(at, &value, sizeof value);
    return at + sizeof value;
}

/* ---- what Triton packs ------------------------------------------------------------------------------------------- */

typedef struct reader {
    const uint8_t *at;
    uint64_t left;
    bool short_; /* more was asked for than there is */
} reader;

static const uint8_t *take(reader *r, uint64_t len) {
    if (len > r->left) {
        r->short_ = true;
        r->left = 0;
        return NULL;
    }
    const uint8_t *taken = r->at;
    r->at += len;
    r->left -= len;
    return taken;
}

static uint64_t take_number(reader *r, size_t bytes) {
    uint64_t value = 0;
    const uint8_t *at = take(r, bytes);
    if (at != NULL) {
        memcpy(&value, at, bytes);
    }
    return le64toh(value);
}

static bool is_output(reader *r) {
    take(r, take_number(r, sizeof(uint32_t))); /* name */
    take(r, take_number(r, sizeof(uint32_t))); /* data type */
    uint64_t shape = take_number(r, sizeof(uint32_t));
    take(r, shape);
    take(r, take_number(r, sizeof(uint64_t))); /* data */
    return !r->short_ && r->left == 0 && shape % sizeof(int64_t) == 0;
}

/* A response without outputs is one that failed: Triton 2.51 stores also these, and would answer with them from then on. */
static bool is_response(const uint8_t *buffer, uint64_t len) {
    reader r = {.at = buffer, .left = len};
    uint64_t num = take_number(&r, sizeof(uint32_t));
    for (uint64_t i = 0; i < num && !r.short_; i++) {
        uint64_t output_len = take_number(&r, sizeof(uint64_t));
        reader output = {.at = r.at, .left = output_len};
        if (take(&r, output_len) == NULL || !is_output(&output)) {
            return false;
        }
    }
    return num > 0 && !r.short_ && r.left == 0;
}

/* ---- the payload ------------------------------------------------------------------------------------------------- */

size_t kvfr_answer_head_bytes(size_t num) {
    return sizeof magic + 2 * sizeof(uint64_t) + num * sizeof(uint64_t);
}

void kvfr_answer_write_head(void *data, int64_t created_s, const uint64_t *lens, size_t num) {
    uint8_t *at = data;
    memcpy(at, magic, sizeof magic);
    at = put64(at + sizeof magic, (uint64_t)created_s);
    at = put64(at, num);
    for (size_t i = 0; i < num; i++) {
        at = put64(at, lens[i]);
    }
}

uint64_t kvfr_answer_len(const kvfr_answer *answer, size_t buffer) {
    return get64(answer->lens + buffer * sizeof(uint64_t));
}

bool kvfr_answer_read(kvfr_answer *out, const void *data, size_t len) {
    const uint8_t *at = data;
    if (len < kvfr_answer_head_bytes(0) || memcmp(at, magic, sizeof magic) != 0) {
        return false;
    }
    out->created_s = (int64_t)get64(at + sizeof magic);
    uint64_t num = get64(at + sizeof magic + sizeof(uint64_t));
    if (num == 0 || num > KVFR_MAX_BUFFERS || len < kvfr_answer_head_bytes(num)) {
        return false;
    }
    out->num = num;
    out->lens = at + kvfr_answer_head_bytes(0);
    out->buffers = at + kvfr_answer_head_bytes(num);
    reader r = {.at = out->buffers, .left = len - kvfr_answer_head_bytes(num)};
    for (size_t i = 0; i < num; i++) {
        uint64_t buffer_len = kvfr_answer_len(out, i);
        const uint8_t *buffer = take(&r, buffer_len);
        if (buffer == NULL || !is_response(buffer, buffer_len)) {
            return false;
        }
    }
    return r.left == 0;
}
