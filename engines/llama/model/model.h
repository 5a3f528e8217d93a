/* SPDX-License-Identifier: Apache-2.0
 *
 * The lowest room: the handle, and what a context and its model are.
 *
 *   handle.c     the handle, and what its memory says
 *   kind.c       the kind of memory of a context, and whether it can be taken apart and reassembled
 *   identity.c   the fields of the space: everything that changes the bytes of a block
 *   model.c      the name of a model: its files as they were loaded, the parameters of the load
 *   weights.c    files that are held open, and the cache of their hashes
 *   blob.c       what llama_state_seq_get_data writes, read and measured
 */
#ifndef KVFL_MODEL_H
#define KVFL_MODEL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvferry/llama.h"
#include "llama/model/blob.h"

/* ggml's kernels for fewer rows than this round differently (flash attention on the CPU works in tiles of 64 rows). So
 * whole blocks are never computed in a smaller batch: only then does a computed block equal a loaded one. */
#define KVFL_MIN_BATCH        64u
#define KVFL_MAX_BLOCK_TOKENS 4096u
#define KVFL_RECORD_AIM       ((size_t)1 << 20)

/* How a context's memory is stored. */
typedef enum kvfl_mode {
    KVFL_RANGE,   /* plain attention: everything is in blocks */
    KVFL_SPLIT,   /* sliding windows, hybrid: blocks for full attention; window or recurrent state at boundaries */
    KVFL_SNAPSHOT /* recurrent: states at boundaries, no blocks */
} kvfl_mode;

typedef struct kvfl_kind {
    kvfl_mode mode;
    kvfl_shape shape;               /* of the blob of the probe's tokens */
    uint32_t num_caches;            /* the number of its caches that are in blocks: the first ones */
    size_t cell_bytes, fixed_bytes; /* of a block */
    /* PARTIAL_ONLY of an empty sequence: after its head, what replaces a state at the end of a block's blob */
    uint8_t *empty;
    size_t rest_bytes; /* of that */
    uint32_t apart;    /* tokens from one state to the next */
    bool reseat;       /* see state.c */
    uint8_t probe[32]; /* what this context computes, hashed: see kind.c */
} kvfl_kind;

/* The handle. Each room has a struct of its own, which only that room and those above it see. */
struct kvf_llama {
    pid_t pid; /* of the process that attached it: neither ggml's threads nor those of the store survive a fork */
    struct llama_context *ctx;
    const struct llama_model *model;
    llama_memory_t mem;
    kvf_space *space; /* of the identity; NULL: no store, compute only */
    kvf_store *store;
    uint64_t identity;        /* its number; 0: what computes is unknown, and every batch passes unchanged */
    struct kvfl_terms *terms; /* what all spaces of this context have in common */
    llama_seq_id scratch;
    uint32_t n_ctx, step; /* step: tokens of one llama_decode, a multiple of KVFL_MIN_BATCH if the context allows it */
    uint32_t block_tokens;
    size_t num_seqs;
    kvfl_kind kind;
    size_t stride; /* of blocks in the load buffers: whole pages, since copies to unaligned memory are slow */
    kvf_pace pace;
    struct llama_batch batch; /* of `step` tokens */

    struct kvfl_cells *cells;   /* cells/cells.h */
    struct kvfl_follow *follow; /* follow/follow.h */
    struct kvfl_fetch *fetch;   /* fetch/fetch.h */
    struct kvfl_calls *calls;   /* engine.h */
};

/* How fast this context computes a prompt; 0: not known. */
static inline double kvfl_tokens_per_s(const kvf_llama *kv) {
    int64_t took_us = kvf_pace_us(&kv->pace, kv->step, kv->step);
    return took_us > 0 ? (double)kv->step * 1e6 / (double)took_us : 0;
}

/* False in a forked child, where neither the handle nor its context must be used. */
static inline bool kvfl_is_ours(const kvf_llama *kv) {
    return kv->pid == getpid();
}
/* KVF_CLOSED where it is not. */
kvf_status kvfl_check_ours(const kvf_llama *, kvf_error *);

int64_t kvfl_now_us(void);
kvf_status kvfl_fail(kvf_error *err, kvf_status status, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* A sequence of this context other than the scratch sequence. llama.cpp ends the process for one out of range. */
static inline bool kvfl_is_text(const kvf_llama *kv, llama_seq_id seq) {
    return seq >= 0 && (size_t)seq < kv->num_seqs && seq != kv->scratch;
}
/* The index of the first token that is not in the vocabulary; `num`: all are. There may be none, and `tokens` NULL. */
size_t kvfl_find_no_token(const kvf_llama *, const llama_token *tokens, size_t num);
/* The sequence holds positions 0 to num - 1, as far as llama.cpp tells: for sliding windows it tells only the end. */
bool kvfl_holds(const kvf_llama *, llama_seq_id, size_t num);

/* The cells that all sequences would need if none shared any. */
size_t kvfl_unshared_cells(const kvf_llama *);

static inline bool kvfl_has_states(const kvf_llama *kv) {
    return kv->kind.mode != KVFL_RANGE;
}
/* The exported length of that many tokens. */
static inline size_t kvfl_export_bytes(const kvf_llama *kv, size_t num_tokens) {
    return kv->kind.fixed_bytes + num_tokens * kv->kind.cell_bytes;
}

/* ---- kind.c ---- */

typedef struct kvfl_bytes {
    uint8_t *data;
    size_t len;
} kvfl_bytes;
/* Refuses unknown kinds before any call that could end the process; computes a few tokens in the scratch sequence,
 * takes their blob apart, reassembles it, and fills kv->kind. */
kvf_status kvfl_know_kind(kvf_llama *, kvf_error *, const struct llama_context_params *);
/* llama.cpp reuses its last graph for a batch of the same shape, even if that graph was made during a warm-up that has
 * ended. This makes a new graph, with a token in the scratch sequence. False: llama_decode failed. */
bool kvfl_rebuild_graph(kvf_llama *);
/* Ends a warm-up that the program has begun since. False: attention is no longer causal. */
bool kvfl_computes_as_named(const kvf_llama *);
/* Computes the probe again, after a change of adapters, into kv->kind.probe. The scratch sequence is empty before and
 * afterwards. */
#define KVFL_PROBE_CELLS 2 /* cells that this needs temporarily */
kvf_status kvfl_probe(kvf_llama *, kvf_error *);
/* Bytes from a store must equal what this context exports of positions [first, end), except the numbers in rows:
 * nothing else is given to llama.cpp. */
bool kvfl_is_block(const kvf_llama *, const void *bytes, size_t len, llama_pos first, llama_pos end);
/* The same for a state of a sequence that ends at `end`. */
bool kvfl_is_state(const kvf_llama *, const void *bytes, size_t len, size_t end);
/* Its length. A window slides or begins anew, and no getter tells which, so a state has one of these lengths. */
#define KVFL_STATE_WAYS 2u
size_t kvfl_state_length(const kvf_llama *, uint32_t way, size_t end);
/* Decides block_tokens and everything that depends on it; `wanted` is the caller's choice. */
kvf_status kvfl_set_block_tokens(kvf_llama *, kvf_error *, uint32_t wanted);

/* ---- weights.c ---- */

/* 2 * num digits and a NUL. */
void kvfl_hex(char *out, const uint8_t *bytes, size_t num);
/* Files that are held open, with their times at the opening. */
typedef struct kvfl_file {
    char *path;
    int fd;
    struct stat stat;
} kvfl_file;
typedef struct kvfl_files {
    size_t num;
    kvfl_file file[];
} kvfl_files;
/* *out is NULL after a failure. The second one opens all files of a split model, given the first. */
kvf_status kvfl_files_open(kvfl_files **out, kvf_error *, const char *const *paths, size_t num);
kvf_status kvfl_files_open_model(kvfl_files **out, kvf_error *, const char *path);
/* Whether the paths still name these files, and nothing about them has changed. */
bool kvfl_files_are_in_place(const kvfl_files *);
/* 64 hex digits, of the files' contents when they were opened. KVF_REFUSED if they have changed since. KVF_CLOSED soon
 * after *stop is set (NULL: never). */
kvf_status kvfl_files_hash(char out[65], kvf_error *, const kvfl_files *, const atomic_bool *stop);
void kvfl_files_close(kvfl_files *);
bool kvfl_same_file(const struct stat *, const struct stat *);

/* ---- model.c ---- */

/* The name of a model, fixed when it is loaded. 64 hex digits each. */
typedef struct kvfl_model_name {
    char weights[65];   /* of its files */
    char overrides[65]; /* of the metadata that the program set over the file's own; "": none */
    char placement[65]; /* of what decides which kernels compute */
} kvfl_model_name;
/* All of it except the weights. The arrays that the parameters point to are read. False: no memory. */
bool kvfl_describe_params(kvfl_model_name *, const struct llama_model_params *);
/* All of it, after the load: the file at the path must be proven to be the one that was loaded. */
kvf_status kvfl_name_model(kvfl_model_name *, kvf_error *, const struct llama_context *, const kvf_llama_options *);
/* Other than CPUs. */
bool kvfl_has_other_devices(void);

/* ---- identity.c ---- */

/* Fills kv->terms, and opens the space of the set of adapters that kv->kind.probe belongs to. */
kvf_status kvfl_set_terms(kvf_llama *, kvf_error *, const kvf_llama_options *, const kvfl_model_name *);
void kvfl_free_terms(struct kvfl_terms *);
bool kvfl_needs_probe(const kvf_llama *);
kvf_status kvfl_open_space(const kvf_llama *, kvf_space **out, kvf_error *, const char *adapters);

#endif
