/* SPDX-License-Identifier: Apache-2.0
 *
 * Remembers the latest prompts of a process, to explain why the blocks of another prompt are not stored.
 */
#include "llama/tell/earlier.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

typedef struct kvfl_earlier_text text;

static size_t common(const text *t, uint64_t under, const int32_t *tokens, size_t num) {
    size_t same = 0;
    while (t->under == under && same < t->num && same < num && t->tokens[same] == tokens[same]) {
        same++;
    }
    return same;
}

/* One is the beginning of the other: the same conversation, further on. */
static bool goes_on(const text *t, uint64_t under, const int32_t *tokens, size_t num) {
    size_t shorter = t->num < num ? t->num : num;
    return t->tokens != NULL && common(t, under, tokens, num) == shorter;
}

static text *place_for(kvfl_earlier *e, uint64_t under, const int32_t *tokens, size_t num) {
    text *oldest = &e->texts[0];
    for (size_t i = 0; i < KVFL_EARLIER_TEXTS; i++) {
        text *t = &e->texts[i];
        if (goes_on(t, under, tokens, num)) {
            return t;
        }
        oldest = t->seen < oldest->seen ? t : oldest;
    }
    return oldest;
}

void kvfl_earlier_keep(kvfl_earlier *e, uint64_t under, const int32_t *tokens, size_t num) {
    text *t = num > 0 ? place_for(e, under, tokens, num) : NULL;
    if (t == NULL) {
        return;
    }
    t->seen = ++e->clock;
    if (goes_on(t, under, tokens, num) && t->num >= num) {
        return;
    }
    int32_t *room = realloc(t->tokens, num * sizeof *room);
    if (room != NULL) {
        memcpy(room, tokens, num * sizeof *room);
        t->tokens = room;
        t->num = num;
        t->under = under;
    }
}

kvfl_absence kvfl_earlier_explain(const kvfl_earlier *e, size_t *at, uint64_t under, const int32_t *tokens, size_t num,
                                  size_t found, size_t block_tokens) {
    const text *best = NULL;
    size_t next_end = (found / block_tokens + 1) * block_tokens;
    *at = 0;
    for (size_t i = 0; i < KVFL_EARLIER_TEXTS; i++) {
        size_t same = e->texts[i].tokens != NULL ? common(&e->texts[i], under, tokens, num) : 0;
        if (same > *at) {
            *at = same;
            best = &e->texts[i];
        }
    }
    if (best == NULL || *at < found) {
        return KVFL_ABSENT;
    }
    return *at >= next_end ? KVFL_EVICTED : *at == best->num ? KVFL_ENDS : KVFL_DIFFERS;
}

const char *kvfl_absence_name(kvfl_absence absence) {
    static const char *const names[KVFL_NUM_ABSENCES] = {"absent", "differs", "ends", "evicted"};
    return (unsigned)absence < KVFL_NUM_ABSENCES ? names[absence] : "unknown";
}

void kvfl_earlier_free(kvfl_earlier *e) {
    for (size_t i = 0; i < KVFL_EARLIER_TEXTS; i++) {
        free(e->texts[i].tokens);
    }
    *e = (kvfl_earlier){.clock = 0};
}
