/* SPDX-License-Identifier: Apache-2.0
 *
 * The payload of a stored answer: when it was computed, and the buffers of Triton's entry one after the other.
 *
 *   magic       8 bytes, "kvfresp1"
 *   created     int64, seconds since 1970
 *   num         uint64, the number of buffers
 *   lengths     uint64 for each
 *   buffers     without gaps
 *
 * Numbers are little-endian. The record around it (docs/record-format.md) has key and checksum.
 */
#ifndef KVFR_ANSWER_H
#define KVFR_ANSWER_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Larger answers are not stored. */
#define KVFR_MAX_ANSWER_BYTES ((size_t)1 << 30)
#define KVFR_MAX_BUFFERS      1024u

/* The bytes before the buffers. */
size_t kvfr_answer_head_bytes(size_t num);
/* Writes the head into `data`. */
void kvfr_answer_write_head(void *data, int64_t created_s, const uint64_t *lens, size_t num);

/* An answer in memory. It points into the memory that it was read from. */
typedef struct kvfr_answer {
    int64_t created_s;
    size_t num;
    const uint8_t *lens; /* use kvfr_answer_len */
    const uint8_t *buffers;
} kvfr_answer;

/* Whether `data` holds an answer that Triton can read without going beyond a buffer: Triton itself does not check. */
bool kvfr_answer_read(kvfr_answer *out, const void *data, size_t len);
uint64_t kvfr_answer_len(const kvfr_answer *, size_t buffer);

#endif
