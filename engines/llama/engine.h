/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the llama.cpp engine share.
 *
 *   api.c                the handle
 *   adapters.c           one space for each set of adapters, and the change from one to another
 *   decode.c             prefill for the sequences of a batch, in place of llama_decode
 *   prefill.c            keep, load, compute the rest, save
 *   fetch/load.c         blocks from the store into a sequence
 *   fetch/flight.c       blocks on their way
 *   fetch/plan.c         load or compute: the arithmetic
 *   follow/follow.c      which tokens each sequence holds, as far as that is known
 *   follow/resident.c    what a sequence still holds of an earlier prefill
 *   cells/blob.c         what llama_state_seq_get_data writes, read and measured
 *   cells/state.c        what can't be cut into blocks: windows and recurrent states, stored at boundaries
 *   cells/save.c         blocks of a sequence into the store
 *   model/kind.c         what kind of memory this context has, and whether it can be taken apart and put together
 *   model/identity.c     the fields of the space: everything that changes the bytes of a block
 *   model/model.c        what names a model: its files as they were loaded, the parameters it was loaded with
 *   model/weights.c      files that are held open, and their hash, remembered
 */
#ifndef KVFL_ENGINE_H
#define KVFL_ENGINE_H

#include <stdbool.h>
#include <sys/stat.h>

#include "kvferry/llama.h"
#include "llama/cells/blob.h"
#include "llama/fetch/flight.h"
#include "llama/fetch/plan.h"

/* ggml's kernels for fewer rows than this round differently (flash attention on the CPU works in tiles of 64 rows), so
 * whole blocks are never computed in a smaller batch: only then is a computed block the same as a loaded one. */
#define KVFL_MIN_BATCH        64u
#define KVFL_MAX_BLOCK_TOKENS 4096u
#define KVFL_RECORD_AIM       ((size_t)1 << 20)
#define KVFL_GROUP_BYTES      ((size_t)8 << 20) /* of a small flight, so that it stays in the processor's cache */

/* How a context's memory is stored. */
typedef enum kvfl_mode {
    KVFL_RANGE,   /* plain attention: everything lies in blocks */
    KVFL_SPLIT,   /* sliding windows, hybrid: blocks for the attention to the whole text; window or recurrent state at
                     boundaries */
    KVFL_SNAPSHOT /* recurrent: states at boundaries, no blocks */
} kvfl_mode;

typedef struct kvfl_kind {
    kvfl_mode mode;
    kvfl_shape shape;               /* of the blob of the probe's tokens */
    uint32_t num_caches;            /* of its caches, those that lie in blocks: the first ones */
    size_t cell_bytes, fixed_bytes; /* of a block */
    uint8_t *empty; /* PARTIAL_ONLY of an empty sequence: behind its head, what a block's blob ends with in place of a
                       state */
    size_t rest_bytes; /* of that */
    uint32_t apart;    /* tokens from one state to the next */
    bool reseat;       /* see state.c */
    uint8_t probe[32]; /* what this context computes, hashed: see kind.c */
} kvfl_kind;

#define KVFL_WITNESS_BYTES 16u

/* What a sequence holds that is exactly what a prefill computes: whole blocks, from position 0 on. */
typedef struct kvfl_resident {
    llama_token *tokens; /* n_ctx of them */
    size_t num;
    uint8_t witness[KVFL_WITNESS_BYTES]; /* of their KV, see resident.c */
    uint64_t identity;                   /* that computed it */
} kvfl_resident;

/* Where a model with states ended a batch at a place that is no boundary of every prompt: the state was put back there,
 * and what follows was computed from there. Blocks behind it have keys that name all such places in front of them. */
typedef struct kvfl_cuts {
    bool any;
    kvf_key digest;
} kvfl_cuts;

/* How the tokens of a sequence came to be. `cold`: those in front of this position are, to the bit, what a run that begins
 * with an empty sequence computes for them, in these cells: each whole block computed from its beginning, in batches of
 * at least KVFL_MIN_BATCH tokens, behind blocks of which the same is true. Only that is stored, and copied to other
 * sequences. It is the end of a block; of a model with states it is where the sequence ends, or the sequence is not cold
 * at all, as a state is of its end only. */
typedef struct kvfl_lineage {
    size_t cold;
    bool ragged; /* what is behind `cold` was computed only because a batch of this prompt ended there */
    kvfl_cuts cuts;
} kvfl_lineage;

/* What a sequence holds, as kvf_llama_decode follows it: exactly `num` tokens, at positions 0 to num - 1, and behind
 * them nothing, or, with a reason, what is not known. */
typedef struct kvfl_history {
    llama_token *tokens; /* n_ctx of them */
    size_t num;
    kvfl_lineage lineage;
    kvf_llama_aside why;
    bool in_prompt;    /* the report is of a prompt whose end has not come yet */
    bool shares;       /* some of its cells may be another sequence's too, and move with that one */
    uint64_t identity; /* that computed these tokens */
    /* Of what lies behind them, when adapters were last set: where it ended, and what computed it. */
    size_t held;
    uint64_t behind; /* 0: nothing is known to lie there; UINT64_MAX: several, or one without a number */
    kvf_llama_report report;
} kvfl_history;

/* The end of a sequence, tokens `from` to `to`, and its state: taken out of it, to be put back where nothing better
 * comes. */
typedef struct kvfl_stash {
    size_t from, to;
    uint8_t *rows, *state; /* NULL: there is nothing of it */
    size_t rows_bytes, state_bytes;
} kvfl_stash;

/* A state that was taken out of a sequence whose tokens were known: the hash of its bytes stands for them. */
typedef struct kvfl_known_state {
    uint8_t digest[16];
    llama_token *tokens;
    size_t num;
    uint64_t identity; /* that computed them */
    kvfl_lineage lineage;
    llama_seq_id seq;
    bool rows_stay; /* the sequence still has the rows of all these tokens that it had then */
} kvfl_known_state;
#define KVFL_KNOWN_STATES 64u

/* A set of adapters that this context computes under, or has computed under a while ago. KV that one identity computed
 * is never stored, copied or kept as that of another. */
typedef struct kvfl_identity {
    uint64_t number; /* never given twice; 0: a free place */
    uint64_t used;   /* when, in changes of adapters */
    char *adapters;
    kvf_space *space; /* NULL: there is no store */
} kvfl_identity;
#define KVFL_IDENTITIES 32u

struct kvf_llama {
    struct llama_context *ctx;
    const struct llama_model *model;
    llama_memory_t mem;
    kvf_space *space; /* of the identity; NULL: no store, compute only */
    kvf_store *store;
    uint64_t identity; /* its number; 0: what computes is not known, and every batch is left as it is */
    kvfl_identity identities[KVFL_IDENTITIES];
    uint64_t identity_clock;
    struct kvfl_terms *terms; /* what all spaces of this context have in common */
    kvf_queue *queue;         /* of the loads */
    llama_seq_id scratch;
    uint32_t n_ctx,
        step; /* step: tokens of one llama_decode, a multiple of KVFL_MIN_BATCH where the context allows it */
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
    /* The prompt at hand: its whole blocks, and its tail, the tokens behind the last of them but for the very last
     * token. The tail is stored as a block of its own, which only the same prompt finds again; its index is num_whole.
     */
    size_t num_whole;
    uint32_t tail_tokens;
    kvf_key *keys;
    kvf_found *found;
    uint32_t *tokens; /* unsigned, as the chain wants them */
    kvfl_lookup lookup;
    kvfl_flight flights[KVFL_NUM_FLIGHTS];
    size_t group;      /* blocks in the memory of a small one: KVFL_GROUP_BYTES, or one */
    int64_t looked_us; /* what has come until then is in `link` */
    kvfl_link link;
    kvfl_pace pace;
    struct llama_batch batch; /* of `step` tokens */
    int32_t decode_rc;        /* of the last llama_decode of a prefill */
    /* kvf_llama_decode and what it follows. */
    kvfl_history *histories; /* by sequence */
    kvfl_known_state states[KVFL_KNOWN_STATES];
    size_t next_state;
    kvf_llama_aside paused;    /* not KVF_ASIDE_NONE: the context is in a mode in which every batch is left as it is */
    struct llama_batch rest;   /* what is left of a batch: arrays of our own, but for the lists of sequences */
    int32_t *output_of;        /* the caller's index of a batch to that of `rest` */
    int32_t num_mapped;        /* 0: the indexes are the caller's own */
    struct kvfl_piece *pieces; /* by sequence, of the batch at hand */
    kvf_llama_counters counters;
    void (*on_prompt)(void *ctx, llama_seq_id, const kvf_llama_report *); /* may be NULL */
    void *on_prompt_ctx;
};

/* How fast this context computes a prompt; 0: not known. */
static inline double kvfl_tokens_per_s(const kvf_llama *kv) {
    double took_us = kvfl_pace_us(&kv->pace, kv->step, kv->step);
    return took_us > 0 ? (double)kv->step * 1e6 / took_us : 0;
}

int64_t kvfl_now_us(void);
kvf_status kvfl_fail(kvf_error *err, kvf_status status, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* kind.c: refuses what is not known, before any call that could end the process; computes a few tokens in the scratch
 * sequence, takes their blob apart, puts it together, and fills kv->kind. */
typedef struct kvfl_bytes {
    uint8_t *data;
    size_t len;
} kvfl_bytes;
kvf_status kvfl_know_kind(kvf_llama *, kvf_error *, const struct llama_context_params *);
/* llama.cpp computes with its last graph again where a batch has the same shape, also where that was made under a
 * warm-up that has ended since. This makes another one, by a token in the scratch sequence. False: llama_decode failed. */
bool kvfl_rebuild_graph(kvf_llama *);
/* Ends a warm-up that the program has set since. False: attention is not causal any more. */
bool kvfl_computes_as_named(const kvf_llama *);
/* Computes the probe again, after a change of adapters, into kv->kind.probe. The scratch sequence is empty before and
 * afterwards. */
#define KVFL_PROBE_CELLS 2 /* that this takes meanwhile */
kvf_status kvfl_probe(kvf_llama *, kvf_error *);
/* What came from a store is what this context exports of positions [first, end), but for the values of the numbers in its
 * rows: nothing else is given to llama.cpp. */
bool kvfl_is_block(const kvf_llama *, const void *bytes, size_t len, llama_pos first, llama_pos end);
/* The same of a state, where the sequence ends at `end`. */
bool kvfl_is_state(const kvf_llama *, const void *bytes, size_t len, size_t end);
/* How long it is. A window slides or begins anew, and no getter tells which of both: a state has one of these lengths. */
#define KVFL_STATE_WAYS 2u
size_t kvfl_state_length(const kvf_llama *, uint32_t way, size_t end);
/* Decides block_tokens, and what follows from it; `wanted` is the caller's. */
kvf_status kvfl_set_block_tokens(kvf_llama *, kvf_error *, uint32_t wanted);

/* weights.c: 2 * num digits and a NUL. */
void kvfl_hex(char *out, const uint8_t *bytes, size_t num);
/* weights.c: files that are held open, with their times as they were then. */
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
/* The paths still name these files, and nothing of them has changed. */
bool kvfl_files_are_in_place(const kvfl_files *);
/* 64 hex digits, of what the files held when they were opened: KVF_REFUSED where they have changed since. */
kvf_status kvfl_files_hash(char out[65], kvf_error *, const kvfl_files *);
void kvfl_files_close(kvfl_files *);
bool kvfl_same_file(const struct stat *, const struct stat *);

/* model.c: what names a model, fixed when it is loaded. 64 hex digits each. */
typedef struct kvfl_model_name {
    char weights[65];   /* of its files */
    char overrides[65]; /* of the metadata that the program set over the file's own; "": none */
    char placement[65]; /* of what decides which kernels compute */
} kvfl_model_name;
/* All of it but the weights. The arrays that the parameters point to are read. False: no memory. */
bool kvfl_describe_params(kvfl_model_name *, const struct llama_model_params *);
/* All of it, after the load: the file at the path must be proven to be the one that was loaded. */
kvf_status kvfl_name_model(kvfl_model_name *, kvf_error *, const struct llama_context *, const kvf_llama_options *);
/* Besides CPUs. */
bool kvfl_has_other_devices(void);

/* attach.c: kvf_llama_attach for a model whose name is known; NULL: by its path. */
kvf_status kvfl_attach(kvf_llama **out, kvf_error *, kvf_store *, struct llama_context *, const kvf_llama_options *,
                       const kvfl_model_name *);
/* identity.c: fills kv->terms, and opens the space of a set of adapters that kv->kind.probe is of. */
kvf_status kvfl_set_terms(kvf_llama *, kvf_error *, const kvf_llama_options *, const kvfl_model_name *);
void kvfl_free_terms(struct kvfl_terms *);
bool kvfl_needs_probe(const kvf_llama *);
kvf_status kvfl_open_space(const kvf_llama *, kvf_space **out, kvf_error *, const char *adapters);

/* adapters.c: takes another set of adapters, that kv->kind.probe is of. */
bool kvfl_has_probe_cells(const kvf_llama *); /* as far as llama.cpp tells */
kvf_status kvfl_open_identity(kvf_llama *, kvf_error *, const char *adapters);
void kvfl_close_identities(kvf_llama *);
/* What computes from now on is not known. */
void kvfl_leave_identity(kvf_llama *);

/* Where block `index` begins, for any index up to one behind the last; how many tokens it has, and how long it is when
 * exported. */
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

/* Makes `tokens` the prompt at hand: the first `cut` of them (whole blocks), then a tail of `tail` tokens. */
void kvfl_chain(kvf_llama *, const llama_token *tokens, size_t cut, size_t tail);
kvf_block kvfl_block_of(const kvf_llama *, size_t index);
/* Blocks from number `index` on get keys that name `word` (up to 32 bytes) too: they were computed in another way than a
 * prompt computes them. */
void kvfl_name_apart(kvf_llama *, size_t index, const void *word, size_t len);
#define KVFL_AS_IT_IS "as it is" /* of what kvf_llama_save stores */
/* Who computes the front while blocks behind it are loaded: `num` tokens of whole blocks from position `first` on,
 * right behind what the sequence holds, counted in report->computed_tokens and compute_us, and told to kv->pace
 * (kvfl_pace_note). */
typedef struct kvfl_front {
    kvf_status (*compute)(void *ctx, size_t first, size_t num);
    void *ctx;
    kvf_status status; /* of the last call; loading ends with the first that fails */
} kvfl_front;
/* load.c: brings blocks into a sequence that holds exactly `have` tokens, each loaded or computed, whatever is sooner;
 * returns how many it holds then: what follows is not stored, or sooner computed. `front` NULL: only what can be
 * loaded, and the budget alone is what it may take. After front->status: as far as it came. Where `have` is in the
 * middle of a block, only a stored state further on can help: it replaces what the sequence has. */
size_t kvfl_load(kvf_llama *, kvf_llama_report *, llama_seq_id, size_t have, kvfl_front *front);
/* The last `tokens` that were told to be in the sequence are not, or were brought in for nothing. */
void kvfl_count_lost(kvf_llama_report *, size_t tokens);
/* What kvfl_export wrote joins the sequence behind position `first`. */
bool kvfl_import(const kvf_llama *, llama_seq_id, llama_pos first, llama_pos end, const void *bytes, size_t len);
/* save.c: blocks [first, end) to the writers; and positions [first, end), `bytes` (kvfl_export_bytes) of them. */
size_t kvfl_save(kvf_llama *, kvf_llama_report *, llama_seq_id, size_t first, size_t end);
bool kvfl_export(kvf_llama *, llama_seq_id, llama_pos first, llama_pos end, void *out, size_t bytes);
/* state.c. A boundary is where a state is stored: every kind.apart tokens, behind the last whole block, behind the
 * tail. */
static inline bool kvfl_has_states(const kvf_llama *kv) {
    return kv->kind.mode != KVFL_RANGE;
}
/* Where a batch that begins at position `have` must end at the latest, for the state there. */
static inline size_t kvfl_next_stop(const kvf_llama *kv, size_t have) {
    return kvfl_has_states(kv) ? (have / kv->kind.apart + 1) * kv->kind.apart : SIZE_MAX;
}
/* The sequence has been computed exactly up to the end of block index - 1. Does what is due there if that is a
 * boundary: the state is saved, where `save` says so and there is a store, and the sequence continues as one continues
 * that has loaded it. False: llama.cpp lost the state. */
bool kvfl_pass_boundary(kvf_llama *, kvf_llama_report *, llama_seq_id, size_t index, bool save);
/* kv->state has room for that many bytes. */
bool kvfl_has_room(kvf_llama *, size_t bytes);
bool kvfl_is_boundary(const kvf_llama *, size_t index);
/* The state at a boundary, as a block of the store. */
kvf_block kvfl_state_block(const kvf_llama *, size_t index);
/* How long it is; 0: it is not stored, or the store did not say in time (*why). */
size_t kvfl_stored_state(kvf_llama *, kvf_reason *why, size_t index, int64_t deadline_us);
/* The last boundary behind block `first` and not behind `end` whose state is stored, of *out_bytes; or `first`. */
size_t kvfl_match_state(kvf_llama *, kvf_llama_report *, size_t *out_bytes, size_t first, size_t end,
                        int64_t deadline_us);
/* The sequence holds exactly the blocks in front of the boundary, and no state: puts the state there. */
bool kvfl_import_state(const kvf_llama *, llama_seq_id, size_t index, const void *data, size_t len);
/* Leaves the sequence without a recurrent state, which could not go back to an earlier position, nor forward to one
 * that it has not computed. */
bool kvfl_drop_state(const kvf_llama *, llama_seq_id);
/* The sequence ends at `to`, and at `from` afterwards, without a state. False: it is as it was. */
bool kvfl_set_aside(kvf_llama *, kvfl_stash *out, llama_seq_id, size_t from, size_t to);
/* Drops what has come since. False: what the sequence holds now is not known. */
bool kvfl_put_back(kvf_llama *, const kvfl_stash *, llama_seq_id);
void kvfl_free_stash(kvfl_stash *);

/* resident.c: drops from the sequence all but the whole blocks of these tokens that it holds, and returns the number of
 * tokens kept; and takes note of what it holds now. */
size_t kvfl_keep_resident(kvf_llama *, llama_seq_id, const llama_token *tokens, size_t cut);
void kvfl_note_resident(kvf_llama *, llama_seq_id, const llama_token *tokens, size_t cut);
/* prefill.c: the sequence holds the first `have` of the tokens; loads or computes the rest of them but the last, and
 * saves what is new, where what it holds is cold (`how` not NULL: its lineage). On failure kv->decode_rc is what llama_decode said, and what the sequence holds is a prefix of
 * them. */
kvf_status kvfl_fill(kvf_llama *, kvf_llama_report *, kvf_error *, llama_seq_id, const llama_token *tokens, size_t num,
                     size_t have, const kvfl_lineage *how);

/* decode.c. kvfl_decode is kvf_llama_decode; `plain` (with its argument) computes the whole batch where nothing of it
 * was loaded or cut. */
typedef int32_t (*kvfl_plain_fn)(void *arg);
int32_t kvfl_decode(kvf_llama *, const struct llama_batch *, kvfl_plain_fn plain, void *arg);
/* A batch that can't be looked into is decoded by `plain`: its sequences, and what they hold from now on, are not
 * known. */
int32_t kvfl_decode_unseen(kvf_llama *, const bool *seqs, size_t num_tokens, kvf_llama_aside why, kvfl_plain_fn plain,
                           void *arg);
kvf_status kvfl_open_decode(kvf_llama *, kvf_error *);
void kvfl_close_decode(kvf_llama *);
/* The cells that all sequences would take if none shared any. */
size_t kvfl_unshared_cells(const kvf_llama *);

/* follow.c: what the program did to the memory, told after it was done. seq -1 is every sequence where llama.h says so.
 * kvfl_follow: the sequence holds these tokens; nothing is known of how they were computed. */
void kvfl_follow(kvf_llama *, llama_seq_id, const llama_token *tokens, size_t num);
/* All in front of position `end` is cold: it was cold before, and what is behind that was loaded, computed from its
 * boundary, or copied from a sequence where it is cold. */
void kvfl_note_cold(kvf_llama *, llama_seq_id, size_t end);
/* What the sequence holds is cold to its end: what is computed from here on by kvfl_fill is, too. */
static inline bool kvfl_is_cold(const kvfl_history *h) {
    return h->num == h->lineage.cold;
}
void kvfl_forget(kvf_llama *, llama_seq_id, kvf_llama_aside why);
/* The sequence goes on in a way that can't be followed, behind what is known of it. */
void kvfl_doubt(kvf_llama *, llama_seq_id, kvf_llama_aside why);
void kvfl_forget_all(kvf_llama *, kvf_llama_aside why);
void kvfl_cleared(kvf_llama *);
void kvfl_removed(kvf_llama *, llama_seq_id, llama_pos first, llama_pos end);
void kvfl_copied(kvf_llama *, llama_seq_id from, llama_seq_id to, llama_pos first, llama_pos end);
void kvfl_kept_only(kvf_llama *, llama_seq_id);
/* Positions from `first` on have changed, or been taken by others. */
void kvfl_moved(kvf_llama *, llama_seq_id, llama_pos first);
void kvfl_state_taken(kvf_llama *, llama_seq_id, const uint8_t digest[16]);
void kvfl_state_set(kvf_llama *, llama_seq_id, const uint8_t digest[16], bool partial);
/* The history of a sequence, made true to what the memory says of its end. NULL where it can't be followed at all. */
kvfl_history *kvfl_history_of(kvf_llama *, llama_seq_id);

/* A sequence of this context that is not the scratch one. llama.cpp ends the process where one is out of range. */
static inline bool kvfl_is_text(const kvf_llama *kv, llama_seq_id seq) {
    return seq >= 0 && (size_t)seq < kv->num_seqs && seq != kv->scratch;
}
/* The sequence holds positions 0 to num - 1, as far as llama.cpp tells: of sliding windows it tells the end only. */
bool kvfl_holds(const kvf_llama *, llama_seq_id, size_t num);

#endif
