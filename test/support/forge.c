/* SPDX-License-Identifier: Apache-2.0
 *
 * Changes stored bytes as an attacker would, and recomputes checksums.
 */
#include "support/forge.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "record/record.h"
#include "support/kit.h"

/* Offsets in the header: docs/record-format.md. */
enum { AT_NUM_TOKENS = 80, AT_PAYLOAD_BYTES = 84, AT_RAW_BYTES = 92, AT_CHECK = 124 };

#define MAX_GROWTH 4096u

static void die(const char *what) {
    perror(what);
    abort();
}

static void *must(void *memory) {
    if (memory == NULL) {
        die("no memory for the test");
    }
    return memory;
}

/* ---- buffers ---- */

kvft_buffer kvft_buffer_of(const void *bytes, size_t len) {
    kvft_buffer b = {must(malloc(len + (len == 0))), len};
    if (len > 0) {
        memcpy(b.data, bytes, len);
    }
    return b;
}

void kvft_buffer_free(kvft_buffer *b) {
    free(b->data);
    *b = (kvft_buffer){0};
}

void kvft_buffer_splice(kvft_buffer *b, size_t at, size_t num, const void *bytes, size_t len) {
    at = at < b->len ? at : b->len;
    num = num < b->len - at ? num : b->len - at;
    kvft_buffer out = {must(malloc(b->len - num + len + 1)), b->len - num + len};
    memcpy(out.data, b->data, at);
    if (len > 0) {
        memcpy(out.data + at, bytes, len);
    }
    memcpy(out.data + at + len, b->data + at + num, b->len - at - num);
    free(b->data);
    *b = kvft_buffer_of(out.data, out.len);
    free(out.data);
}

kvft_buffer kvft_file_read(const char *path) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0) {
        die(path);
    }
    kvft_buffer b = {must(malloc((size_t)st.st_size + 1)), (size_t)st.st_size};
    if (pread(fd, b.data, b.len, 0) != (ssize_t)b.len) {
        die(path);
    }
    close(fd);
    return b;
}

void kvft_file_write(const char *path, const kvft_buffer *b) {
    unlink(path);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || pwrite(fd, b->data, b->len, 0) != (ssize_t)b->len) {
        die(path);
    }
    close(fd);
}

/* ---- changes ---- */

static size_t below(uint64_t *random, size_t n) {
    return n > 0 ? (size_t)(kvft_random(random) % n) : 0;
}

/* Half of the time near the beginning, where the lengths are; or near the end. */
static size_t place(uint64_t *random, size_t len) {
    size_t near = len < 128 ? len : 128;
    switch (below(random, 4)) {
    case 0:
    case 1:
        return below(random, near);
    case 2:
        return len - near + below(random, near);
    default:
        return below(random, len);
    }
}

static const uint64_t numbers[] = {0,
                                   1,
                                   2,
                                   3,
                                   7,
                                   64,
                                   255,
                                   256,
                                   4096,
                                   65535,
                                   65536,
                                   0x7fffffff,
                                   0x80000000,
                                   0xfffffffe,
                                   0xffffffff,
                                   0x100000000,
                                   (uint64_t)1 << 34,
                                   (uint64_t)1 << 40,
                                   INT64_MAX - 1,
                                   INT64_MAX,
                                   (uint64_t)INT64_MAX + 1,
                                   UINT64_MAX - 15,
                                   UINT64_MAX};

static uint64_t any_number(uint64_t *random) {
    return numbers[below(random, sizeof numbers / sizeof *numbers)];
}

/* A number of 1, 2, 4 or 8 bytes: another one, or one more or less; mostly where numbers lie. */
static void change_number(kvft_buffer *b, uint64_t *random) {
    size_t width = (size_t)1 << below(random, 4), at = place(random, b->len);
    at = below(random, 4) == 0 ? at : at / 4 * 4;
    uint64_t value = 0;
    if (b->len < width || at > b->len - width) {
        return;
    }
    memcpy(&value, b->data + at, width);
    switch (below(random, 3)) {
    case 0:
        value += 1;
        break;
    case 1:
        value -= 1;
        break;
    default:
        value = any_number(random);
    }
    memcpy(b->data + at, &value, width);
}

/* NaN of 16 bits and of 32 at once, quiet or signalling, or infinite. */
static void fill(kvft_buffer *b, uint64_t *random) {
    static const uint16_t patterns[] = {0, 0x7fff, 0x7e01, 0x7c00, 0xfc00, 0xffff};
    size_t at = place(random, b->len) / 2 * 2, len = below(random, b->len - at + 1);
    uint16_t pattern = patterns[below(random, sizeof patterns / sizeof *patterns)];
    for (size_t i = at; i + 2 <= at + len; i += 2) {
        memcpy(b->data + i, &pattern, 2);
    }
}

static void move_piece(kvft_buffer *b, uint64_t *random) {
    size_t from = place(random, b->len), to = place(random, b->len),
           len = below(random, b->len - from < 256 ? b->len - from + 1 : 256);
    kvft_buffer piece = kvft_buffer_of(b->data + from, len);
    bool over = below(random, 2) == 0;
    kvft_buffer_splice(b, to, over ? len : 0, piece.data, piece.len);
    kvft_buffer_free(&piece);
}

static void cut(kvft_buffer *b, uint64_t *random) {
    size_t at = place(random, b->len);
    kvft_buffer_splice(b, at, below(random, 2) == 0 ? b->len - at : 1 + below(random, 64), NULL, 0);
}

static void grow(kvft_buffer *b, uint64_t *random) {
    uint8_t more[MAX_GROWTH];
    size_t len = 1 + below(random, below(random, 2) == 0 ? 16 : MAX_GROWTH);
    kvft_bytes(more, len, kvft_random(random));
    kvft_buffer_splice(b, below(random, 2) == 0 ? b->len : place(random, b->len), 0, more, len);
}

static void flip(kvft_buffer *b, uint64_t *random) {
    if (b->len > 0) {
        b->data[place(random, b->len)] ^= (uint8_t)(1u << below(random, 8));
    }
}

void kvft_mutate(kvft_buffer *b, uint64_t *random) {
    static void (*const ways[])(kvft_buffer *, uint64_t *) = {change_number, change_number, change_number, fill,
                                                              move_piece,    cut,           grow,          flip};
    for (size_t times = 1 + below(random, 4); times > 0; times--) {
        ways[below(random, sizeof ways / sizeof *ways)](b, random);
    }
}

/* ---- text ---- */

static void change_digits(kvft_buffer *b, uint64_t *random) {
    static const char *const others[] = {"0",
                                         "1",
                                         "-1",
                                         "2147483648",
                                         "4294967296",
                                         "9223372036854775807",
                                         "9223372036854775808",
                                         "18446744073709551615",
                                         "18446744073709551616",
                                         "99999999999999999999999999",
                                         "1e400",
                                         "",
                                         "-9223372036854775808",
                                         "0x10",
                                         "+5",
                                         " 7",
                                         "nan"};
    const char *other = others[below(random, sizeof others / sizeof *others)];
    size_t at = below(random, b->len), num = 0;
    while (at < b->len && (b->data[at] < '0' || b->data[at] > '9')) {
        at++;
    }
    while (at > 0 && at < b->len && b->data[at - 1] >= '0' && b->data[at - 1] <= '9') {
        at--;
    }
    while (at + num < b->len && b->data[at + num] >= '0' && b->data[at + num] <= '9') {
        num++;
    }
    kvft_buffer_splice(b, at, num, other, strlen(other));
}

static void change_separator(kvft_buffer *b, uint64_t *random) {
    static const char marks[] = "\r\n:,{}[]\"\\*$-+_#=.?%\033\0\x80\xff ";
    if (b->len > 0) {
        char mark = marks[below(random, sizeof marks - 1)];
        kvft_buffer_splice(b, below(random, b->len), below(random, 2), &mark, 1);
    }
}

static void repeat(kvft_buffer *b, uint64_t *random) {
    size_t from = below(random, b->len), to = below(random, b->len),
           len = below(random, b->len - from < 512 ? b->len - from + 1 : 512);
    kvft_buffer piece = kvft_buffer_of(b->data + from, len);
    for (size_t times = below(random, 3) == 0 ? 20 : 1; times > 0; times--) {
        kvft_buffer_splice(b, to, 0, piece.data, piece.len);
    }
    kvft_buffer_free(&piece);
}

void kvft_mutate_text(kvft_buffer *b, uint64_t *random) {
    static void (*const ways[])(kvft_buffer *, uint64_t *) = {
        change_digits, change_digits, change_digits, change_separator, change_separator, repeat, cut, flip};
    for (size_t times = 1 + below(random, 4); times > 0; times--) {
        ways[below(random, sizeof ways / sizeof *ways)](b, random);
    }
}

/* ---- records ---- */

bool kvft_payload_of(const kvft_buffer *record, size_t *at, size_t *len) {
    uint32_t tokens = record->len >= KVFI_HEADER_BYTES ? kvfi_get32(record->data + AT_NUM_TOKENS) : UINT32_MAX;
    *at = KVFI_HEADER_BYTES + 4 * (size_t)tokens;
    if (tokens > KVFI_MAX_TOKENS || *at + KVFI_SUM_BYTES > record->len) {
        return false;
    }
    *len = record->len - *at - KVFI_SUM_BYTES;
    return true;
}

void kvft_reseal(kvft_buffer *record) {
    kvfi_xxh3 sum;
    if (record->len < KVFI_HEADER_BYTES + KVFI_SUM_BYTES) {
        return;
    }
    kvfi_put32(record->data + AT_CHECK, kvfi_xxh32(record->data, AT_CHECK));
    kvfi_record_sum_init(&sum, record->data);
    kvfi_xxh3_add(&sum, record->data + KVFI_HEADER_BYTES, record->len - KVFI_HEADER_BYTES - KVFI_SUM_BYTES);
    kvfi_xxh3_end(&sum, record->data + record->len - KVFI_SUM_BYTES);
}

void kvft_forge_payload(kvft_buffer *record, const kvft_buffer *payload) {
    size_t at = 0, len = 0;
    if (!kvft_payload_of(record, &at, &len)) {
        abort();
    }
    kvft_buffer_splice(record, at, len, payload->data, payload->len);
    kvfi_put64(record->data + AT_PAYLOAD_BYTES, payload->len);
    kvfi_put64(record->data + AT_RAW_BYTES, payload->len);
    kvft_reseal(record);
}
