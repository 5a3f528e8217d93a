/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the llama.cpp engine share.
 *
 *   attach.c   is this context safe to take apart and put together? and the handle
 *   blob.c     what llama_state_seq_get_data writes, read and measured
 *   identity.c the fields of the space: everything that changes the bytes of a block
 *   weights.c  the hash of the model's file, remembered
 *   load.c     blocks from the store into a sequence
 *   save.c     blocks of a sequence into the store
 *   prefill.c  load, compute the rest, save
 */
#ifndef KVFL_ENGINE_H
#define KVFL_ENGINE_H

#include <stdbool.h>

#include "kvferry/llama.h"
#include "llama/blob.h"

/* ggml's kernels for fewer rows than this round differently (flash attention on the CPU works in tiles of 64 rows), so whole blocks are
 * never computed in a smaller batch: only then is a computed block the same as a loaded one. */
#define KVFL_MIN_BATCH 64u
#define KVFL_RECORD_AIM ((size_t)1 << 20)
#define KVFL_GROUP_BYTES ((size_t)8 << 20) /* one of the two load buffers: small, so that it stays in the processor's cache */

/* What a sequence holds that is exactly what a prefill computes: whole blocks, from position 0 on. */
typedef struct kvfl_resident {
    llama_token *tokens; /* n_ctx of them */
    size_t       num;
} kvfl_resident;

struct kvf_llama {
    struct llama_context     *ctx;
    const struct llama_model *model;
    llama_memory_t            mem;
    kvf_space                *space; /* NULL: no store, compute only */
    kvf_store                *store;
    kvf_queue                *queue; /* of the loads */
    llama_seq_id              scratch;
    uint32_t                  n_ctx, step; /* step: tokens of one llama_decode, a multiple of KVFL_MIN_BATCH where the context allows it */
    uint32_t                  block_tokens, budget_ms;
    kvf_llama_progress_fn     progress;
    void                     *progress_ctx;
    kvfl_shape                shape;
    size_t                    block_bytes; /* of one block's payload */
    size_t                    stride;      /* of blocks in the buffers: whole pages, since copies to unaligned memory are slow */
    size_t                    num_seqs;
    kvfl_resident            *residents; /* by sequence */
    kvf_key                  *keys;      /* of the prompt at hand, as are: */
    kvf_found                *found;
    uint32_t                 *tokens;    /* unsigned, as the chain wants them */
    uint8_t                  *buffers[2];/* where loads land: KVFL_GROUP_BYTES, or one block */
    size_t                    group;     /* blocks that one of them holds */
    kvf_block                *blocks[2];
    struct iovec             *iov[2];
    struct llama_batch        batch;     /* of `step` tokens */
};

int64_t kvfl_now_us(void);
kvf_status kvfl_fail(kvf_error *err, kvf_status status, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* identity.c: opens the space. `probe` is the blob of the probe token. */
kvf_status kvfl_open_space(kvf_llama *, kvf_error *, const kvf_llama_options *, const uint8_t *probe, size_t probe_len);
/* weights.c: 64 hex digits. */
kvf_status kvfl_hash_weights(char out[65], kvf_error *, const char *path);

/* The chain of the first `num` tokens (a multiple of block_tokens) into kv->tokens and kv->keys. */
void kvfl_chain(kvf_llama *, const llama_token *tokens, size_t num);
/* load.c: blocks [first, end) of the chain at hand into a sequence that holds exactly the tokens before `first`; returns the new first. */
size_t kvfl_load(kvf_llama *, kvf_llama_report *, llama_seq_id, size_t first, size_t end);
/* save.c: the same range to the writers. */
size_t kvfl_save(kvf_llama *, kvf_llama_report *, llama_seq_id, size_t first, size_t end);
/* The sequence holds positions 0 to num - 1. */
bool kvfl_holds(const kvf_llama *, llama_seq_id, size_t num);

#endif
