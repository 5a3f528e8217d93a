/* SPDX-License-Identifier: Apache-2.0
 *
 * A llama_batch_ext can't be read back, so the shim records what the program puts into one.
 */
#include <stdlib.h>
#include <string.h>

#include "llama/shim/shim.h"

#define MAX_BATCHES 64u

static kvfl_shim_batch batches[MAX_BATCHES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static kvfl_shim_batch *find(const struct llama_batch_ext *batch) {
    for (size_t i = 0; i < MAX_BATCHES; i++) {
        if (batches[i].batch == batch) {
            return &batches[i];
        }
    }
    return NULL;
}

static bool resize(void *array, size_t num, size_t bytes) {
    void **at = array;
    void *bigger = realloc(*at, num * bytes);
    *at = bigger != NULL ? bigger : *at;
    return bigger != NULL;
}

static bool grow(kvfl_shim_batch *b, int32_t index) {
    if (index < b->room) {
        return true;
    }
    size_t room = (size_t)index + 1 > 512 ? 2 * ((size_t)index + 1) : 512;
    llama_seq_id *old = b->plain.seq_id != NULL ? b->plain.seq_id[0] : NULL, *ids = realloc(old, room * sizeof *ids);
    if (ids == NULL) {
        return false;
    }
    bool ok = resize(&b->plain.token, room, sizeof *b->plain.token) &&
              resize(&b->plain.pos, room, sizeof *b->plain.pos) &&
              resize(&b->plain.n_seq_id, room, sizeof *b->plain.n_seq_id) &&
              resize(&b->plain.logits, room, sizeof *b->plain.logits) &&
              resize(&b->plain.seq_id, room, sizeof *b->plain.seq_id);
    if (b->plain.seq_id != NULL) {
        for (size_t i = 0; i < (ok ? room : 1); i++) {
            b->plain.seq_id[i] = ids + i;
        }
    } else {
        free(ids);
    }
    b->room = ok ? (int32_t)room : b->room;
    return ok;
}

void kvfl_shim_batch_clear(const struct llama_batch_ext *batch, bool gone) {
    pthread_mutex_lock(&lock);
    kvfl_shim_batch *b = find(batch);
    b = b == NULL && !gone ? find(NULL) : b;
    if (b != NULL) {
        b->batch = gone ? NULL : batch;
        b->plain.n_tokens = 0;
        b->odd = KVF_ASIDE_NONE;
        b->lost = false;
        memset(b->seqs, 0, sizeof b->seqs);
    }
    pthread_mutex_unlock(&lock);
}

static void mark(kvfl_shim_batch *b, kvf_llama_aside odd) {
    b->odd = b->odd == KVF_ASIDE_NONE ? odd : b->odd;
}

static void note_seq(kvfl_shim_batch *b, llama_seq_id seq) {
    if (seq >= 0 && (size_t)seq < sizeof b->seqs) {
        b->seqs[seq] = true;
    }
}

void kvfl_shim_batch_add(const struct llama_batch_ext *batch, int32_t index, llama_seq_id seq, llama_token token,
                         kvf_llama_aside odd) {
    kvfl_shim_batch *b = index >= 0 ? find(batch) : NULL;
    if (b == NULL) {
        return;
    }
    mark(b, odd);
    note_seq(b, seq);
    if (b->lost || !grow(b, index)) {
        b->lost = true;
        return;
    }
    b->plain.token[index] = token;
    b->plain.pos[index] = -1; /* the program must set it */
    b->plain.n_seq_id[index] = 1;
    b->plain.seq_id[index][0] = seq;
    b->plain.logits[index] = 0;
    b->plain.n_tokens = index + 1;
}

void kvfl_shim_batch_also(const struct llama_batch_ext *batch, llama_seq_id seq) {
    kvfl_shim_batch *b = find(batch);
    if (b != NULL) {
        mark(b, KVF_ASIDE_SEVERAL);
        note_seq(b, seq);
    }
}

void kvfl_shim_batch_mark(const struct llama_batch_ext *batch, kvf_llama_aside odd) {
    kvfl_shim_batch *b = find(batch);
    if (b != NULL) {
        mark(b, odd);
    }
}

void kvfl_shim_batch_pos(const struct llama_batch_ext *batch, int32_t index, llama_pos pos) {
    kvfl_shim_batch *b = find(batch);
    if (b != NULL && index >= 0 && index < b->plain.n_tokens) {
        b->plain.pos[index] = pos;
    }
}

void kvfl_shim_batch_output(const struct llama_batch_ext *batch, int32_t index, bool output) {
    kvfl_shim_batch *b = find(batch);
    if (b != NULL && index >= 0 && index < b->plain.n_tokens) {
        b->plain.logits[index] = output;
    }
}

const kvfl_shim_batch *kvfl_shim_batch_of(const struct llama_batch_ext *batch) {
    const kvfl_shim_batch *b = find(batch);
    return b != NULL && !b->lost ? b : NULL;
}
