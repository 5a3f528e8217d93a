/* SPDX-License-Identifier: Apache-2.0
 *
 * Why a prompt is not in the store, explained from the latest prompts of the process, without asking the store.
 *
 *   kvf_earlier_explain(earlier, &at, under, tokens, num, found, block_tokens);   why nothing after `found` is stored
 *   kvf_earlier_keep(earlier, under, tokens, num);                                remembers this prompt and its answer
 *
 * A kvf_earlier belongs to one thread at a time. All calls except kvf_earlier_open accept NULL, which remembers
 * nothing.
 */
#ifndef KVFERRY_EARLIER_H
#define KVFERRY_EARLIER_H

#include <stddef.h>

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The number of texts that are remembered. */
#define KVF_EARLIER_TEXTS 16u

typedef struct kvf_earlier kvf_earlier;

/* kvf_earlier_open makes an empty memory. Returns KVF_OK or KVF_NOMEM. */
KVF_API KVF_MUST_CHECK kvf_status kvf_earlier_open(kvf_earlier **out, kvf_error *err);
/* kvf_earlier_close frees it. */
KVF_API void kvf_earlier_close(kvf_earlier *);

/* Why the next block of a prompt is not stored. */
typedef enum kvf_absence {
    /* No remembered text shares that much with it. */
    KVF_ABSENCE_UNKNOWN = 0,
    /* From token `at` on it differs from the text that shares the most with it. */
    KVF_ABSENCE_DIFFERS,
    /* That text is a part of it, and ends at token `at`. */
    KVF_ABSENCE_ENDS,
    /* That text had the next block, up to token `at`. The block was evicted, has expired, or is not written yet. */
    KVF_ABSENCE_EVICTED,
    KVF_NUM_ABSENCES
} kvf_absence;
/* kvf_absence_name returns "absent", "differs", "ends" or "evicted", as `kvferry explain` does. */
KVF_API const char *kvf_absence_name(kvf_absence);

/* kvf_earlier_keep copies the tokens. They replace a text that they continue, or else the oldest text. `under` numbers
 * what computed them (a model with its adapters): texts of different numbers are never compared. Without memory nothing
 * is kept. */
KVF_API void kvf_earlier_keep(kvf_earlier *, uint64_t under, const uint32_t *tokens, size_t num);

/* kvf_earlier_explain says why the block after the first `found` tokens of a prompt is not stored. It looks for the
 * text that shares the most leading tokens with the prompt: *out_at is their number. A block has `block_tokens` tokens,
 * 1 or more. */
KVF_API kvf_absence kvf_earlier_explain(const kvf_earlier *, size_t *out_at, uint64_t under, const uint32_t *tokens,
                                        size_t num, size_t found, size_t block_tokens);

#ifdef __cplusplus
}
#endif
#endif
