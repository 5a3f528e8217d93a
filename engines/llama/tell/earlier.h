/* SPDX-License-Identifier: Apache-2.0
 *
 * The latest prompts of a process, with their answers. They explain why another prompt is not in the store, without
 * asking the store. Belongs to one thread. Knows neither llama.cpp nor a store.
 */
#ifndef KVFL_EARLIER_H
#define KVFL_EARLIER_H

#include <stddef.h>
#include <stdint.h>

#define KVFL_EARLIER_TEXTS 16u

typedef struct kvfl_earlier {
    struct kvfl_earlier_text {
        int32_t *tokens; /* NULL: a free place */
        size_t num;
        uint64_t under; /* which identity computed it */
        uint64_t seen;
    } texts[KVFL_EARLIER_TEXTS];
    uint64_t clock;
} kvfl_earlier;

/* In the words of `kvferry explain`. */
typedef enum kvfl_absence {
    KVFL_ABSENT,  /* no earlier prompt goes that far */
    KVFL_DIFFERS, /* from token `at` on it differs from the prompt that shares the most with it */
    KVFL_ENDS,    /* that prompt is a part of this one: it ends at token `at` */
    KVFL_EVICTED, /* that prompt had the next block, up to token `at`: evicted, expired or not written yet */
    KVFL_NUM_ABSENCES
} kvfl_absence;
const char *kvfl_absence_name(kvfl_absence);

/* Copies the tokens. They replace the prompt that they continue, or else the oldest one. `under` is the number of the
 * identity (adapters and so on) that computed them: blocks of one identity say nothing about another. */
void kvfl_earlier_keep(kvfl_earlier *, uint64_t under, const int32_t *tokens, size_t num);
/* Why a prompt is not stored after its first `found` tokens, in blocks of `block_tokens`. */
kvfl_absence kvfl_earlier_explain(const kvfl_earlier *, size_t *at, uint64_t under, const int32_t *tokens, size_t num,
                                  size_t found, size_t block_tokens);
void kvfl_earlier_free(kvfl_earlier *);

#endif
