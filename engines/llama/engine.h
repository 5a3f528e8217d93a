/* SPDX-License-Identifier: Apache-2.0
 *
 * The top room of the llama.cpp engine: the public calls, and what they keep in the handle.
 *
 *   api.c        attaches and detaches: makes the handle
 *   adapters.c   one space for each set of adapters, and the change from one to another
 *   decode.c     kvf_llama_decode: prefill for the sequences of a batch
 *   by_hand.c    kvf_llama_load and kvf_llama_save, for programs that compute by themselves
 *   prefill.c    keep, load, compute the rest, save
 *   report.c     reports and counters
 *
 * Below it fetch/ (blocks from the store), cells/ (blocks and states of a sequence), follow/ (what sequences hold), and
 * under these model/. Each room has one header.
 */
#ifndef KVFL_ENGINE_H
#define KVFL_ENGINE_H

#include "llama/fetch/fetch.h"
#include "llama/follow/follow.h"

/* A set of adapters that this context computes under, or has computed under before. KV of one identity is never stored,
 * copied or kept as KV of another. */
typedef struct kvfl_identity {
    uint64_t number; /* never reused; 0: a free place */
    uint64_t used;   /* when, in changes of adapters */
    char *adapters;
    kvf_space *space; /* NULL: there is no store */
} kvfl_identity;
#define KVFL_IDENTITIES 32u

typedef struct kvfl_calls {
    kvfl_identity identities[KVFL_IDENTITIES];
    uint64_t identity_clock;
    kvf_llama_progress_fn progress;
    void *progress_ctx;
    int32_t decode_rc;         /* of the last llama_decode of a prefill */
    kvf_llama_aside paused;    /* not KVF_ASIDE_NONE: the context is in a mode in which every batch passes unchanged */
    struct llama_batch rest;   /* the rest of a batch: our own arrays, except the lists of sequences */
    int32_t *output_of;        /* the caller's index of a batch to that of `rest` */
    int32_t num_mapped;        /* 0: the indexes are the caller's own */
    struct kvfl_piece *pieces; /* by sequence, of the current batch */
    kvf_llama_counters counters;
    void (*on_prompt)(void *ctx, llama_seq_id, const kvf_llama_report *); /* may be NULL */
    void *on_prompt_ctx;
} kvfl_calls;

/* kvf_llama_attach for a model whose name is known; NULL: by its path. */
kvf_status kvfl_attach(kvf_llama **out, kvf_error *, kvf_store *, struct llama_context *, const kvf_llama_options *,
                       const kvfl_model_name *);

/* adapters.c: switches to another set of adapters, which kv->kind.probe belongs to. */
bool kvfl_has_probe_cells(const kvf_llama *); /* as far as llama.cpp tells */
kvf_status kvfl_open_identity(kvf_llama *, kvf_error *, const char *adapters);
void kvfl_close_identities(kvf_llama *);
/* From now on it is unknown what computes. */
void kvfl_leave_identity(kvf_llama *);

/* prefill.c: the sequence holds the first `have` of the tokens. Loads or computes the others except the last, and saves
 * new blocks if what it holds is cold (`how`, its lineage, is not NULL). On failure kv->calls->decode_rc is the result of
 * llama_decode, and the sequence holds a prefix of the tokens. */
kvf_status kvfl_fill(kvf_llama *, kvf_llama_report *, kvf_error *, llama_seq_id, const llama_token *tokens, size_t num,
                     size_t have, const kvfl_lineage *how);

/* report.c: whether a caller's report (NULL: none) can be filled, and filling it. */
kvf_status kvfl_check_report(kvf_error *, const kvf_llama_report *report);
void kvfl_give_report(kvf_llama_report *report, const kvf_llama_report *from);

/* decode.c. kvfl_decode is kvf_llama_decode; `plain` (with its argument) computes the whole batch if nothing of it was
 * loaded or cut. */
typedef int32_t (*kvfl_plain_fn)(void *arg);
int32_t kvfl_decode(kvf_llama *, const struct llama_batch *, kvfl_plain_fn plain, void *arg);
/* Decodes a batch that can't be analysed by `plain`: its sequences, and what they hold from now on, are unknown. */
int32_t kvfl_decode_unseen(kvf_llama *, const bool *seqs, size_t num_tokens, kvf_llama_aside why, kvfl_plain_fn plain,
                           void *arg);
kvf_status kvfl_open_decode(kvf_llama *, kvf_error *);
void kvfl_close_decode(kvf_llama *);

#endif
