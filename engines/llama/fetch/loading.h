/* SPDX-License-Identifier: Apache-2.0
 *
 * One load: what its files share. Calls go down the list.
 *
 *   load.c       the whole of it
 *   to_state.c   models with states: up to a boundary
 *   lookup.c     how much is stored
 *   steps.c      blocks: borrow, load or compute the next ones
 *   patience.c   while blocks are not here: wait for them, or compute the front
 */
#ifndef KVFL_LOADING_H
#define KVFL_LOADING_H

#include "llama/fetch/fetch.h"

typedef struct kvfl_loading {
    kvf_llama *kv;
    kvf_llama_report *report;
    llama_seq_id seq;
    size_t next, end;    /* blocks: the next to import, and the end of what was matched */
    kvfl_front *front;   /* computes what does not arrive in time; NULL: nobody does, and only the deadline counts */
    bool stateless;      /* there are blocks, but no state to compute from */
    size_t from;         /* for a model with states: everything from this block on would have to be computed */
    int64_t patience_us; /* what is left of it, see kvferry/plan.h */
    int64_t granted_us;  /* what it began with */
    size_t num_missing;  /* blocks, at the beginning */
    uint32_t tier;       /* the slowest of those that have the blocks */
    int64_t deadline_us;
    size_t horizon; /* nothing after it is requested before the front has come there, because it could not be held */
    bool stop;      /* the caller must compute the rest */
} kvfl_loading;

/* ---- patience.c ---- */

/* How long computing `blocks` takes. */
int64_t kvfl_compute_us(const kvfl_loading *, size_t blocks);
kvf_link kvfl_link_of(const kvfl_loading *);
/* Sets the patience: at the beginning, and again when the pace is no longer a guess. */
void kvfl_grant(kvfl_loading *);
/* Arrived blocks add to the patience, calls that wait take from it, and some steps have a minimum. */
void kvfl_earn(kvfl_loading *, int64_t us);
void kvfl_charge(kvfl_loading *, int64_t begin_us);
void kvfl_be_patient_for(kvfl_loading *, int64_t us);
bool kvfl_may_wait(const kvfl_loading *);
/* The budget of a flight. */
int64_t kvfl_flight_us(const kvfl_loading *);
/* Waits for something to arrive, at most until the patience ends. */
void kvfl_wait_a_little(kvfl_loading *);
/* Of the next `wanted` blocks, those that can be computed here. */
size_t kvfl_computable(const kvfl_loading *, size_t wanted);
void kvfl_compute_blocks(kvfl_loading *, size_t num);
/* The next block can't be loaded, or not in time: computes it, or stops for the reason given. */
void kvfl_do_without(kvfl_loading *, kvf_reason why);

/* ---- steps.c ---- */

/* Brings blocks up to l->end: first what can be borrowed, then what must be loaded. `state_bytes`: the bytes of the
 * state at l->end, which is requested with them; 0 = none. */
void kvfl_bring_blocks(kvfl_loading *, size_t state_bytes);
/* The blocks between the front and the next block that has arrived, or surely will not. */
kvf_gap kvfl_look_ahead(const kvfl_loading *);
/* For models with states: the rest promises to arrive sooner than it could be computed. */
bool kvfl_promises(const kvfl_loading *, const kvf_gap *);
/* Why the store is not waited for any longer: it is known to be slow, or nothing is known of it. */
kvf_reason kvfl_why_late(const kvf_link *);
bool kvfl_ask_for_state(const kvfl_loading *, size_t index, size_t len);

/* ---- lookup.c ---- */

/* Looks up how many of the blocks are stored: sets l->end and l->tier. The front may be computed meanwhile. */
void kvfl_look_up(kvfl_loading *);

/* ---- to_state.c ---- */

/* Brings a sequence that holds `have` tokens to a later boundary. Returns what it then holds. */
size_t kvfl_load_to_state(kvfl_loading *, size_t have);

#endif
