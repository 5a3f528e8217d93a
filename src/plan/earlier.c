/* SPDX-License-Identifier: Apache-2.0
 *
 * Remembers the latest prompts of a process, and explains from them why another one is not in the store.
 */
#include "kvferry/earlier.h"
#include "base/base.h"

typedef struct text {
    uint32_t *tokens; /* NULL: a free place */
    size_t num;
    uint64_t under; /* the number of what computed it */
    uint64_t seen;  /* when it was kept, by `clock` */
} text;

struct kvf_earlier {
    text texts[KVF_EARLIER_TEXTS];
    uint64_t clock;
};

kvf_status kvf_earlier_open(kvf_earlier **out, kvf_error *err) {
    *out = kvfi_alloc_zero(1, sizeof **out);
    return *out != NULL ? KVF_OK : kvfi_fail(err, KVF_NOMEM, "no memory to remember prompts");
}

void kvf_earlier_close(kvf_earlier *e) {
    for (size_t i = 0; e != NULL && i < KVF_EARLIER_TEXTS; i++) {
        kvfi_free(e->texts[i].tokens);
    }
    kvfi_free(e);
}

static size_t common(const text *t, uint64_t under, const uint32_t *tokens, size_t num) {
    size_t same = 0;
    while (t->under == under && same < t->num && same < num && t->tokens[same] == tokens[same]) {
        same++;
    }
    return same;
}

/* One is the beginning of the other: the same conversation, further on. */
static bool goes_on(const text *t, uint64_t under, const uint32_t *tokens, size_t num) {
    size_t shorter = t->num < num ? t->num : num;
    return t->tokens != NULL && common(t, under, tokens, num) == shorter;
}

static text *place_for(kvf_earlier *e, uint64_t under, const uint32_t *tokens, size_t num) {
    text *oldest = &e->texts[0];
    for (size_t i = 0; i < KVF_EARLIER_TEXTS; i++) {
        text *t = &e->texts[i];
        if (goes_on(t, under, tokens, num)) {
            return t;
        }
        oldest = t->seen < oldest->seen ? t : oldest;
    }
    return oldest;
}

void kvf_earlier_keep(kvf_earlier *e, uint64_t under, const uint32_t *tokens, size_t num) {
    text *t = e != NULL && num > 0 ? place_for(e, under, tokens, num) : NULL;
    if (t == NULL) {
        return;
    }
    t->seen = ++e->clock;
    if (goes_on(t, under, tokens, num) && t->num >= num) {
        return;
    }
    uint32_t *room = num <= SIZE_MAX / sizeof *room ? kvfi_sys->resize(t->tokens, num * sizeof *room) : NULL;
    if (room != NULL) {
        memcpy(room, tokens, num * sizeof *room);
        t->tokens = room;
        t->num = num;
        t->under = under;
    }
}

kvf_absence kvf_earlier_explain(const kvf_earlier *e, size_t *at, uint64_t under, const uint32_t *tokens, size_t num,
                                size_t found, size_t block_tokens) {
    const text *best = NULL;
    size_t step = block_tokens > 0 ? block_tokens : 1, next_end = (found / step + 1) * step;
    *at = 0;
    for (size_t i = 0; e != NULL && i < KVF_EARLIER_TEXTS; i++) {
        size_t same = e->texts[i].tokens != NULL ? common(&e->texts[i], under, tokens, num) : 0;
        if (same > *at) {
            *at = same;
            best = &e->texts[i];
        }
    }
    if (best == NULL || *at < found) {
        return KVF_ABSENCE_UNKNOWN;
    }
    return *at >= next_end ? KVF_ABSENCE_EVICTED : *at == best->num ? KVF_ABSENCE_ENDS : KVF_ABSENCE_DIFFERS;
}

const char *kvf_absence_name(kvf_absence absence) {
    static const char *const names[KVF_NUM_ABSENCES] = {"absent", "differs", "ends", "evicted"};
    return (unsigned)absence < KVF_NUM_ABSENCES ? names[absence] : "unknown";
}
