/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocks from the store into a sequence.
 *
 *   load.c     loads, or lets the front be computed meanwhile, whichever is faster (loading.h: its parts)
 *   count.c    corrects the counts of a report
 *   flight.c   blocks on their way
 *
 * Blocks on their way from the store, while the engine does something else. A flight is one load of consecutive blocks,
 * from the first to the last or from the last to the first. Each block may be used as soon as it has arrived. There are
 * two small flights (0 and 1), with buffers that stay in the CPU cache, for loading from front to end; two large ones
 * for blocks that arrive after a front that is still being computed; and one for the state at a boundary.
 */
#ifndef KVFL_FETCH_H
#define KVFL_FETCH_H

#include "llama/cells/cells.h"

typedef enum kvfl_landing { KVFL_NOT_ASKED, KVFL_AWAITED, KVFL_HERE, KVFL_MISSED } kvfl_landing;

#define KVFL_SMALL_FLIGHTS 2u
#define KVFL_STATE_FLIGHT  4u /* those before it are for blocks */
#define KVFL_NUM_FLIGHTS   5u
#define KVFL_TAIL_BYTES    ((size_t)128 << 20) /* bound of the memory of a large one */

typedef struct kvfl_flight {
    uint64_t ticket;   /* 0: none is under way, and the memory is free */
    bool down;         /* from the last block to the first */
    size_t first, num; /* of the flight of a state: the boundary, and 1 */
    size_t wanted;     /* requests from number `wanted` on were cancelled */
    uint8_t *memory;
    size_t room, capacity; /* bytes, and blocks */
    kvf_block *blocks;
    struct iovec *iov;
    uint8_t *each;
    kvf_arrivals arrivals;
    bool over; /* nothing more will arrive; what has is still there */
} kvfl_flight;

/* The lookup: how many blocks of a prompt are stored. Like a flight, it may outlast the prefill that started it. */
typedef struct kvfl_lookup {
    uint64_t ticket; /* 0: none so far */
    bool over;
    size_t run;
    kvf_block *blocks;
    kvf_found *found;
    size_t num, capacity;
} kvfl_lookup;

#define KVFL_GROUP_BYTES ((size_t)8 << 20) /* of a small flight, so that it stays in the CPU cache */

typedef struct kvfl_fetch {
    kvf_queue *queue; /* NULL: there is no store */
    int64_t budget_us;
    kvfl_lookup lookup;
    kvfl_flight flights[KVFL_NUM_FLIGHTS];
    size_t group; /* blocks in the memory of a small one: KVFL_GROUP_BYTES, or one */
} kvfl_fetch;
kvf_status kvfl_open_fetch(kvf_llama *, kvf_error *, int64_t budget_us);
/* Ends what is under way: call it before the space is closed. */
void kvfl_close_fetch(kvf_llama *);

/* ---- load.c ---- */

/* Computes the front while blocks after it are loaded: `num` tokens of whole blocks from position `first` on, directly
 * after what the sequence holds, counted in report->computed_tokens and compute_us, and reported to kv->pace
 * (kvf_pace_note). */
typedef struct kvfl_front {
    kvf_status (*compute)(void *ctx, size_t first, size_t num);
    void *ctx;
    kvf_status status; /* of the last call; loading ends with the first failure */
} kvfl_front;
/* Brings blocks into a sequence that holds exactly `have` tokens, each loaded or computed, whichever is faster.
 * Returns how many tokens it then holds: the following ones are not stored, or faster to compute. `front` NULL: only
 * loads, limited by the budget alone. If front->status is a failure: as far as it came. If `have` is in the middle of a
 * block, only a later stored state can help: it replaces what the sequence has. */
size_t kvfl_load(kvf_llama *, kvf_llama_report *, llama_seq_id, size_t have, kvfl_front *front);

/* ---- count.c ---- */

/* The last `tokens` that were counted are not in the sequence, or were brought in for nothing. */
void kvfl_count_lost(kvf_llama_report *, size_t tokens);

/* ---- flight.c ---- */

/* Looks up blocks [first, end). False: not possible, or an earlier lookup has not ended. */
bool kvfl_lookup_start(kvf_llama *, size_t first, size_t end, int64_t budget_us);

/* Requests blocks [first, first + num). False: not possible, or the memory of that flight is still in use. */
bool kvfl_flight_start(kvf_llama *, size_t which, size_t first, size_t num, bool down, int64_t budget_us);
/* The state of a block of a flight for the current prompt. *bytes is set when it has arrived. */
kvfl_landing kvfl_flight_of(const kvf_llama *, size_t block, const struct iovec **bytes);
/* Requests the state at boundary `index`, given its block and length. kvfl_flight_of_state tells what became of the last
 * such request. */
bool kvfl_flight_start_state(kvf_llama *, size_t index, const kvf_block *, size_t len, int64_t budget_us);
kvfl_landing kvfl_flight_of_state(const kvf_llama *, size_t index, const struct iovec **bytes);
/* Bytes of that state that have not arrived yet. */
uint64_t kvfl_flight_state_rest(const kvf_llama *);
kvf_reason kvfl_flight_state_why(const kvf_llama *);
/* Why a block was missed. */
kvf_reason kvfl_flight_why(const kvf_llama *, size_t block);
/* Records what has ended, including the lookup. */
void kvfl_flights_look(kvf_llama *);
/* Waits up to `us` for something to arrive. */
void kvfl_flights_wait(const kvf_llama *, int64_t us);
/* Bytes that have arrived of incomplete blocks in [first, end). */
uint64_t kvfl_flights_partial(const kvf_llama *, size_t first, size_t end);
bool kvfl_flights_moving(const kvf_llama *);
/* Also true while a cancelled flight has not ended. */
bool kvfl_flights_busy(const kvf_llama *);
/* Blocks before `front` are no longer needed: those that have not begun are dropped. */
void kvfl_flights_trim(kvf_llama *, size_t front);
/* Cancels what the large flights have not begun: it will be requested in another order. */
void kvfl_flights_settle(kvf_llama *);
/* Cancels the two small ones: the front has overtaken them. */
void kvfl_flights_drop_small(kvf_llama *);
/* Cancels what is under way. The memory stays the store's until a later look. */
void kvfl_flights_stop(kvf_llama *);

#endif
