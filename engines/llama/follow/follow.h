/* SPDX-License-Identifier: Apache-2.0
 *
 * What the sequences of a context hold.
 *
 *   follow.c     which tokens each sequence holds, as far as that is known
 *   resident.c   what a sequence still holds of an earlier prefill
 */
#ifndef KVFL_FOLLOW_H
#define KVFL_FOLLOW_H

#include "llama/model/model.h"

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

typedef struct kvfl_follow {
    kvfl_history *histories;  /* by sequence */
    kvfl_resident *residents; /* by sequence */
    kvfl_known_state states[KVFL_KNOWN_STATES];
    size_t next_state;
} kvfl_follow;
/* False: no memory. kvfl_close_follow frees also what a failed kvfl_open_follow has made. */
bool kvfl_open_follow(kvf_llama *);
void kvfl_close_follow(kvf_llama *);

/* ---- resident.c ---- */

/* Drops from the sequence everything except the whole blocks of these tokens that it holds, and returns the number of
 * tokens kept; records what it holds now. */
size_t kvfl_keep_resident(kvf_llama *, llama_seq_id, const llama_token *tokens, size_t cut);
void kvfl_note_resident(kvf_llama *, llama_seq_id, const llama_token *tokens, size_t cut);

/* ---- follow.c ---- */

/* These record what the program did to the memory, after it was done. seq -1 is every sequence where llama.h says so. */

/* The sequence holds these tokens; how they were computed is unknown. */
void kvfl_note_tokens(kvf_llama *, llama_seq_id, const llama_token *tokens, size_t num);
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

#endif
