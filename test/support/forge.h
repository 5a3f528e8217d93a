/* SPDX-License-Identifier: Apache-2.0
 *
 * Changes of stored bytes that a seed decides, and records whose lengths and checksums are valid again, so that only
 * their content shows the forgery.
 */
#ifndef KVFT_FORGE_H
#define KVFT_FORGE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct kvft_buffer {
    uint8_t *data; /* from malloc, of exactly `len` bytes: a read behind them is seen by ASan */
    size_t len;
} kvft_buffer;

kvft_buffer kvft_buffer_of(const void *bytes, size_t len); /* a copy */
void kvft_buffer_free(kvft_buffer *);
/* `num` bytes at `at` become `len` others; at and num are cut to what there is. */
void kvft_buffer_splice(kvft_buffer *, size_t at, size_t num, const void *bytes, size_t len);
kvft_buffer kvft_file_read(const char *path);                /* aborts if there is none */
void kvft_file_write(const char *path, const kvft_buffer *); /* replaces the file; aborts when that fails */

/* One to four changes: numbers at any place become others that parsers trip over, pieces are zeroed, doubled, dropped,
 * exchanged, made of NaN; the whole gets shorter or longer. */
void kvft_mutate(kvft_buffer *, uint64_t *random);
/* The same of text: its numbers, separators and words. */
void kvft_mutate_text(kvft_buffer *, uint64_t *random);

/* Where the payload of a record begins, and how long it is; false: it has no room for what its header says. */
bool kvft_payload_of(const kvft_buffer *record, size_t *at, size_t *len);
/* A record of the same header and tokens with that payload, valid in all that a header and a checksum can tell. */
void kvft_forge_payload(kvft_buffer *record, const kvft_buffer *payload);
/* Both checksums become those of what the record says now, be that true or not. */
void kvft_reseal(kvft_buffer *record);
#endif
