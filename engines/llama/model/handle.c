/* SPDX-License-Identifier: Apache-2.0
 *
 * The clock and errors of the engine, what it asks of the vocabulary, and what the memory of a context says of its sequences.
 */
#include <stdarg.h>
#include <stdio.h>
#include <time.h>

#include "llama/model/model.h"

int64_t kvfl_now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

kvf_status kvfl_fail(kvf_error *err, kvf_status status, const char *format, ...) {
    if (err != NULL) {
        va_list args;
        va_start(args, format);
        err->status = status;
        vsnprintf(err->what, sizeof err->what, format, args);
        va_end(args);
    }
    return status;
}

kvf_status kvfl_check_ours(const kvf_llama *kv, kvf_error *err) {
    return kvfl_is_ours(kv) ? KVF_OK
                            : kvfl_fail(err, KVF_CLOSED,
                                        "this context was attached by another process: make a new one after a fork");
}

size_t kvfl_find_no_token(const kvf_llama *kv, const llama_token *tokens, size_t num) {
    int32_t vocab = llama_vocab_n_tokens(llama_model_get_vocab(kv->model));
    size_t i = 0;
    while (i < num && tokens != NULL && tokens[i] >= 0 && tokens[i] < vocab) {
        i++;
    }
    return i;
}

bool kvfl_holds(const kvf_llama *kv, llama_seq_id seq, size_t num) {
    if (num == 0) {
        return llama_memory_seq_pos_max(kv->mem, seq) < 0;
    }
    return (kvfl_has_states(kv) || llama_memory_seq_pos_min(kv->mem, seq) == 0) &&
           llama_memory_seq_pos_max(kv->mem, seq) == (llama_pos)num - 1;
}

/* For a window the least position says nothing about the other caches. */
size_t kvfl_unshared_cells(const kvf_llama *kv) {
    size_t sum = 0;
    for (size_t seq = 0; seq < kv->num_seqs; seq++) {
        llama_pos max = llama_memory_seq_pos_max(kv->mem, (llama_seq_id)seq);
        llama_pos min = kvfl_has_states(kv) ? 0 : llama_memory_seq_pos_min(kv->mem, (llama_seq_id)seq);
        sum += max >= 0 ? (size_t)(max - min) + 1 : 0;
    }
    return sum;
}
