/* SPDX-License-Identifier: Apache-2.0
 *
 * Declarations that the files of the llama.cpp engine share.
 *
 *   api.c                the handle
 *   adapters.c           one space for each set of adapters, and the change from one to another
 *   decode.c             kvf_llama_decode: prefill for the sequences of a batch
 *   prefill.c            keep, load, compute the rest, save
 *   fetch/load.c         blocks from the store into a sequence
 *   fetch/flight.c       blocks on their way
 *   follow/follow.c      which tokens each sequence holds, as far as that is known
 *   follow/resident.c    what a sequence still holds of an earlier prefill
 *   cells/blob.c         what llama_state_seq_get_data writes, read and measured
 *   cells/state.c        windows and recurrent states, stored at boundaries
 *   cells/save.c         blocks of a sequence into the store
 *   model/kind.c         the kind of memory of a context, and whether it can be taken apart and reassembled
 *   model/identity.c     the fields of the space: everything that changes the bytes of a block
 *   model/model.c        the name of a model: its files as they were loaded, the parameters of the load
 *   model/weights.c      files that are held open, and the cache of their hashes
 */
#ifndef KVFL_ENGINE_H
#define KVFL_ENGINE_H

#include <stdbool.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvferry/llama.h"
#include "llama/cells/blob.h"
#include "llama/fetch/flight.h"

/* ggml's kernels for fewer rows than this round differently (flash attention on the CPU works in tiles of 64 rows). So
 * whole blocks are never computed in a smaller batch: only then does a computed block equal a loaded one. */
#define KVFL_MIN_BATCH        64u
#define KVFL_MAX_BLOCK_TOKENS 4096u
#define KVFL_MIN_SECRET_BYTES 16u
#define KVFL_MAX_SECRET_BYTES 1024u
#define KVFL_RECORD_AIM       ((size_t)1 << 20)
#define KVFL_GROUP_BYTES      ((size_t)8 << 20) /* of a small flight, so that it stays in the CPU cache */

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

#define KVFL_WITNESS_BYTES 16u

/* What a sequence holds that is exactly what a prefill computes: whole blocks from position 0 on. */
typedef struct kvfl_resident {
    llama_token *tokens; /* n_ctx of them */
    size_t num;
    uint8_t witness[KVFL_WITNESS_BYTES]; /* of their KV, see resident.c */
    uint64_t identity;                   /* that computed it */
} kvfl_resident;

/* Positions where a model with states ended a batch that are not boundaries of every prompt: the state was put back
 * there, and the following tokens were computed from there. The keys of later blocks include all such positions before
 * them. */
typedef struct kvfl_cuts {
    bool any;
    kvf_key digest;
} kvfl_cuts;

/* How the tokens of a sequence were computed. `cold`: the KV before this position equals, to the bit, what a run from
 * an empty sequence computes in these cells: each whole block computed from its beginning, in batches of at least
 * KVFL_MIN_BATCH tokens, after blocks that are cold too. Only that is stored, and copied to other sequences. It is the
 * end of a block. For a model with states it is the end of the sequence, or the sequence is not cold at all, because a
 * state belongs to the end only. */
typedef struct kvfl_lineage {
    size_t cold;
    bool ragged; /* what follows `cold` was computed only because a batch of this prompt ended there */
    kvfl_cuts cuts;
} kvfl_lineage;

/* What a sequence holds, as kvf_llama_decode follows it: exactly `num` tokens, at positions 0 to num - 1, and after
 * them nothing, or, with a reason, something unknown. */
typedef struct kvfl_history {
    llama_token *tokens; /* n_ctx of them */
    size_t num;
    kvfl_lineage lineage;
    kvf_llama_aside why;
    bool in_prompt;    /* the report belongs to a prompt whose end has not come yet */
    bool shares;       /* some of its cells may also belong to another sequence, and move with that one */
    uint64_t identity; /* that computed these tokens */
    /* What follows them, when adapters were last set: where it ended, and which identity computed it. */
    size_t held;
    uint64_t behind; /* 0: nothing is known to be there; UINT64_MAX: several, or one without a number */
    kvf_llama_report report;
} kvfl_history;

/* The end of a sequence, tokens `from` to `to`, and its state: taken out, to be put back if nothing better comes. */
typedef struct kvfl_stash {
    size_t from, to;
    uint8_t *rows, *state; /* NULL: there is none */
    size_t rows_bytes, state_bytes;
} kvfl_stash;

/* A state that was exported from a sequence with known tokens: the hash of its bytes identifies them. */
typedef struct kvfl_known_state {
    uint8_t digest[16];
    llama_token *tokens;
    size_t num;
    uint64_t identity; /* that computed them */
    kvfl_lineage lineage;
    llama_seq_id seq;
    bool rows_stay; /* the sequence still has the rows that all these tokens had then */
} kvfl_known_state;
#define KVFL_KNOWN_STATES 64u

/* A set of adapters that this context computes under, or has computed under before. KV of one identity is never stored,
 * copied or kept as that of another. */
typedef struct kvfl_identity {
    uint64_t number; /* never reused; 0: a free place */
    uint64_t used;   /* when, in changes of adapters */
    char *adapters;
    kvf_space *space; /* NULL: there is no store */
} kvfl_identity;
#define KVFL_IDENTITIES 32u

struct kvf_llama {
    pid_t pid; /* of the process that attached it: neither ggml's threads nor those of the store survive a fork */
    struct llama_context *ctx;
    const struct llama_model *model;
    llama_memory_t mem;
    kvf_space *space; /* of the identity; NULL: no store, compute only */
    kvf_store *store;
    uint64_t identity; /* its number; 0: what computes is unknown, and every batch passes unchanged */
    kvfl_identity identities[KVFL_IDENTITIES];
    uint64_t identity_clock;
    struct kvfl_terms *terms; /* what all spaces of this context have in common */
    kvf_queue *queue;         /* of the loads */
    llama_seq_id scratch;
    uint32_t n_ctx, step; /* step: tokens of one llama_decode, a multiple of KVFL_MIN_BATCH if the context allows it */
    uint32_t block_tokens;
    int64_t budget_us;
    kvf_llama_progress_fn progress;
    void *progress_ctx;
    kvfl_kind kind;
    uint8_t *state; /* room for the last state that was exported or loaded */
    size_t state_room;
    size_t stride; /* of blocks in the load buffers: whole pages, since copies to unaligned memory are slow */
    size_t num_seqs;
    kvfl_resident *residents; /* by sequence */
    /* The current prompt: its whole blocks, and its tail, the tokens after the last whole block except the very last
     * token. The tail is stored as a separate block, which only the same prompt finds; its index is num_whole. */
    size_t num_whole;
    uint32_t tail_tokens;
    kvf_key *keys;
    uint32_t *tokens; /* unsigned, as the chain wants them */
    kvfl_lookup lookup;
    kvfl_flight flights[KVFL_NUM_FLIGHTS];
    size_t group; /* blocks in the memory of a small one: KVFL_GROUP_BYTES, or one */
    kvf_pace pace;
    struct llama_batch batch; /* of `step` tokens */
    int32_t decode_rc;        /* of the last llama_decode of a prefill */
    /* kvf_llama_decode and what it follows. */
    kvfl_history *histories; /* by sequence */
    kvfl_known_state states[KVFL_KNOWN_STATES];
    size_t next_state;
    kvf_llama_aside paused;    /* not KVF_ASIDE_NONE: the context is in a mode in which every batch passes unchanged */
    struct llama_batch rest;   /* the rest of a batch: our own arrays, except the lists of sequences */
    int32_t *output_of;        /* the caller's index of a batch to that of `rest` */
    int32_t num_mapped;        /* 0: the indexes are the caller's own */
    struct kvfl_piece *pieces; /* by sequence, of the current batch */
    kvf_llama_counters counters;
    void (*on_prompt)(void *ctx, llama_seq_id, const kvf_llama_report *); /* may be NULL */
    void *on_prompt_ctx;
};

/* False in a forked child, where neither the handle nor its context must be used. */
static inline bool kvfl_is_ours(const kvf_llama *kv) {
    return kv->pid == getpid();
}
/* KVF_CLOSED where it is not. */
kvf_status kvfl_check_ours(const kvf_llama *, kvf_error *);

/* How fast this context computes a prompt; 0: not known. */
static inline double kvfl_tokens_per_s(const kvf_llama *kv) {
    int64_t took_us = kvf_pace_us(&kv->pace, kv->step, kv->step);
    return took_us > 0 ? (double)kv->step * 1e6 / (double)took_us : 0;
}

int64_t kvfl_now_us(void);
kvf_status kvfl_fail(kvf_error *err, kvf_status status, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* kind.c: refuses unknown kinds before any call that could end the process; computes a few tokens in the scratch
 * sequence, takes their blob apart, reassembles it, and fills kv->kind. */
typedef struct kvfl_bytes {
    uint8_t *data;
    size_t len;
} kvfl_bytes;
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

/* weights.c: 2 * num digits and a NUL. */
void kvfl_hex(char *out, const uint8_t *bytes, size_t num);
/* weights.c: files that are held open, with their times at the opening. */
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
/* 64 hex digits, of the files' contents when they were opened. KVF_REFUSED if they have changed since. */
kvf_status kvfl_files_hash(char out[65], kvf_error *, const kvfl_files *);
void kvfl_files_close(kvfl_files *);
bool kvfl_same_file(const struct stat *, const struct stat *);

/* model.c: the name of a model, fixed when it is loaded. 64 hex digits each. */
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

/* api.c: kvf_llama_attach for a model whose name is known; NULL: by its path. */
kvf_status kvfl_attach(kvf_llama **out, kvf_error *, kvf_store *, struct llama_context *, const kvf_llama_options *,
                       const kvfl_model_name *);
/* identity.c: fills kv->terms, and opens the space of the set of adapters that kv->kind.probe belongs to. */
kvf_status kvfl_set_terms(kvf_llama *, kvf_error *, const kvf_llama_options *, const kvfl_model_name *);
void kvfl_free_terms(struct kvfl_terms *);
bool kvfl_needs_probe(const kvf_llama *);
kvf_status kvfl_open_space(const kvf_llama *, kvf_space **out, kvf_error *, const char *adapters);

/* adapters.c: switches to another set of adapters, which kv->kind.probe belongs to. */
bool kvfl_has_probe_cells(const kvf_llama *); /* as far as llama.cpp tells */
kvf_status kvfl_open_identity(kvf_llama *, kvf_error *, const char *adapters);
void kvfl_close_identities(kvf_llama *);
/* From now on it is unknown what computes. */
void kvfl_leave_identity(kvf_llama *);

/* The first position of block `index`, for any index up to one after the last; its number of tokens; its exported
 * length. */
static inline size_t kvfl_position(const kvf_llama *kv, size_t index) {
    return index <= kv->num_whole ? index * kv->block_tokens : kv->num_whole * kv->block_tokens + kv->tail_tokens;
}
static inline uint32_t kvfl_tokens_of(const kvf_llama *kv, size_t index) {
    return index < kv->num_whole ? kv->block_tokens : kv->tail_tokens;
}
static inline size_t kvfl_export_bytes(const kvf_llama *kv, size_t num_tokens) {
    return kv->kind.fixed_bytes + num_tokens * kv->kind.cell_bytes;
}
static inline size_t kvfl_bytes_of(const kvf_llama *kv, size_t index) {
    return kvfl_export_bytes(kv, kvfl_tokens_of(kv, index));
}
static inline size_t kvfl_num_blocks(const kvf_llama *kv) {
    return kv->num_whole + (kv->tail_tokens > 0);
}

/* Makes `tokens` the current prompt: the first `cut` of them (whole blocks), then a tail of `tail` tokens. */
void kvfl_chain(kvf_llama *, const llama_token *tokens, size_t cut, size_t tail);
kvf_block kvfl_block_of(const kvf_llama *, size_t index);
/* The keys of blocks from number `index` on also include `word` (up to 32 bytes), because they were not computed as a
 * prompt is. */
void kvfl_name_apart(kvf_llama *, size_t index, const void *word, size_t len);
#define KVFL_AS_IT_IS "as it is" /* of what kvf_llama_save stores */
/* Computes the front while blocks after it are loaded: `num` tokens of whole blocks from position `first` on, directly
 * after what the sequence holds, counted in report->computed_tokens and compute_us, and reported to kv->pace
 * (kvf_pace_note). */
typedef struct kvfl_front {
    kvf_status (*compute)(void *ctx, size_t first, size_t num);
    void *ctx;
    kvf_status status; /* of the last call; loading ends with the first failure */
} kvfl_front;
/* load.c: brings blocks into a sequence that holds exactly `have` tokens, each loaded or computed, whichever is faster.
 * Returns how many tokens it then holds: the following ones are not stored, or faster to compute. `front` NULL: only
 * loads, limited by the budget alone. If front->status is a failure: as far as it came. If `have` is in the middle of a
 * block, only a later stored state can help: it replaces what the sequence has. */
size_t kvfl_load(kvf_llama *, kvf_llama_report *, llama_seq_id, size_t have, kvfl_front *front);
/* The last `tokens` that were counted are not in the sequence, or were brought in for nothing. */
void kvfl_count_lost(kvf_llama_report *, size_t tokens);
/* Appends what kvfl_export wrote to the sequence, from position `first` on. */
bool kvfl_import(const kvf_llama *, llama_seq_id, llama_pos first, llama_pos end, const void *bytes, size_t len);
/* save.c: hands blocks [first, end) to the writers; exports positions [first, end), `bytes` (kvfl_export_bytes) of
 * them. */
size_t kvfl_save(kvf_llama *, kvf_llama_report *, llama_seq_id, size_t first, size_t end);
bool kvfl_export(kvf_llama *, llama_seq_id, llama_pos first, llama_pos end, void *out, size_t bytes);
/* state.c. A boundary is where a state is stored: every kind.apart tokens, after the last whole block, after the
 * tail. */
static inline bool kvfl_has_states(const kvf_llama *kv) {
    return kv->kind.mode != KVFL_RANGE;
}
/* Where a batch that begins at position `have` must end at the latest, because of the state there. */
static inline size_t kvfl_next_stop(const kvf_llama *kv, size_t have) {
    return kvfl_has_states(kv) ? (have / kv->kind.apart + 1) * kv->kind.apart : SIZE_MAX;
}
/* Call this when the sequence has been computed exactly up to the end of block index - 1. If that is a boundary, it
 * saves the state (if `save` is true and there is a store), and then lets the sequence continue exactly as one that has
 * loaded that state. False: llama.cpp lost the state. */
bool kvfl_pass_boundary(kvf_llama *, kvf_llama_report *, llama_seq_id, size_t index, bool save);
/* kv->state has room for that many bytes. */
bool kvfl_has_room(kvf_llama *, size_t bytes);
bool kvfl_is_boundary(const kvf_llama *, size_t index);
/* The state at a boundary, as a block of the store. */
kvf_block kvfl_state_block(const kvf_llama *, size_t index);
/* Its length; 0: it is not stored, or the store did not answer in time (*why). */
size_t kvfl_stored_state(kvf_llama *, kvf_reason *why, size_t index, int64_t deadline_us);
/* The last boundary after block `first` and up to `end` whose state is stored, of *out_bytes; or `first`. */
size_t kvfl_match_state(kvf_llama *, kvf_llama_report *, size_t *out_bytes, size_t first, size_t end,
                        int64_t deadline_us);
/* The sequence holds exactly the blocks before the boundary, and no state: imports the state. */
bool kvfl_import_state(const kvf_llama *, llama_seq_id, size_t index, const void *data, size_t len);
/* Leaves the sequence without a recurrent state, which could neither go back to an earlier position nor forward to one
 * that was not computed. */
bool kvfl_drop_state(const kvf_llama *, llama_seq_id);
/* Cuts the sequence from its end `to` back to `from`, without a state, and keeps what it removed. False: it is
 * unchanged. */
bool kvfl_set_aside(kvf_llama *, kvfl_stash *out, llama_seq_id, size_t from, size_t to);
/* Drops what has come since, and puts the removed end back. False: what the sequence holds now is unknown. */
bool kvfl_put_back(kvf_llama *, const kvfl_stash *, llama_seq_id);
void kvfl_free_stash(kvfl_stash *);

/* resident.c: drops from the sequence everything except the whole blocks of these tokens that it holds, and returns the
 * number of tokens kept; records what it holds now. */
size_t kvfl_keep_resident(kvf_llama *, llama_seq_id, const llama_token *tokens, size_t cut);
void kvfl_note_resident(kvf_llama *, llama_seq_id, const llama_token *tokens, size_t cut);
/* prefill.c: the sequence holds the first `have` of the tokens. Loads or computes the others except the last, and saves
 * new blocks if what it holds is cold (`how`, its lineage, is not NULL). On failure kv->decode_rc is the result of
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
/* The cells that all sequences would need if none shared any. */
size_t kvfl_unshared_cells(const kvf_llama *);

/* follow.c: records what the program did to the memory, after it was done. seq -1 is every sequence where llama.h says
 * so. kvfl_follow: the sequence holds these tokens; how they were computed is unknown. */
void kvfl_follow(kvf_llama *, llama_seq_id, const llama_token *tokens, size_t num);
/* Everything before position `end` is cold: it was cold before, and the rest was loaded, computed from its boundary, or
 * copied from a sequence where it is cold. */
void kvfl_note_cold(kvf_llama *, llama_seq_id, size_t end);
/* What the sequence holds is cold to its end, and so is what kvfl_fill computes from here on. */
static inline bool kvfl_is_cold(const kvfl_history *h) {
    return h->num == h->lineage.cold;
}
void kvfl_forget(kvf_llama *, llama_seq_id, kvf_llama_aside why);
/* The sequence continues, after its known part, in a way that can't be followed. */
void kvfl_doubt(kvf_llama *, llama_seq_id, kvf_llama_aside why);
void kvfl_forget_all(kvf_llama *, kvf_llama_aside why);
void kvfl_cleared(kvf_llama *);
void kvfl_removed(kvf_llama *, llama_seq_id, llama_pos first, llama_pos end);
void kvfl_copied(kvf_llama *, llama_seq_id from, llama_seq_id to, llama_pos first, llama_pos end);
void kvfl_kept_only(kvf_llama *, llama_seq_id);
/* Positions from `first` on have changed, or were taken by others. */
void kvfl_moved(kvf_llama *, llama_seq_id, llama_pos first);
void kvfl_state_taken(kvf_llama *, llama_seq_id, const uint8_t digest[16]);
void kvfl_state_set(kvf_llama *, llama_seq_id, const uint8_t digest[16], bool partial);
/* The history of a sequence, corrected by what the memory says of its end. NULL if it can't be followed at all. */
kvfl_history *kvfl_history_of(kvf_llama *, llama_seq_id);

/* A sequence of this context other than the scratch sequence. llama.cpp ends the process for one out of range. */
static inline bool kvfl_is_text(const kvf_llama *kv, llama_seq_id seq) {
    return seq >= 0 && (size_t)seq < kv->num_seqs && seq != kv->scratch;
}
/* The index of the first token that is not in the vocabulary; `num`: all are. There may be none, and `tokens` NULL. */
size_t kvfl_find_no_token(const kvf_llama *, const llama_token *tokens, size_t num);
/* The sequence holds positions 0 to num - 1, as far as llama.cpp tells: for sliding windows it tells only the end. */
bool kvfl_holds(const kvf_llama *, llama_seq_id, size_t num);

#endif
