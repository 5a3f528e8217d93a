/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocks on their way from the store, while the engine does something else. A flight is one load of consecutive blocks,
 * from the first to the last or from the last to the first. Each block may be used as soon as it has arrived. There are
 * two small flights (0 and 1), with buffers that stay in the CPU cache, for loading from front to end; two large ones
 * for blocks that arrive after a front that is still being computed; and one for the state at a boundary.
 */
#ifndef KVFL_FLIGHT_H
#define KVFL_FLIGHT_H

#include "kvferry/llama.h"

struct kvf_llama;

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
/* Looks up blocks [first, end). False: not possible, or an earlier lookup has not ended. */
bool kvfl_lookup_start(struct kvf_llama *, size_t first, size_t end, int64_t budget_us);

/* Requests blocks [first, first + num). False: not possible, or the memory of that flight is still in use. */
bool kvfl_flight_start(struct kvf_llama *, size_t which, size_t first, size_t num, bool down, int64_t budget_us);
/* The state of a block of a flight for the current prompt. *bytes is set when it has arrived. */
kvfl_landing kvfl_flight_of(const struct kvf_llama *, size_t block, const struct iovec **bytes);
/* Requests the state at boundary `index`, given its block and length; and the state of the last such request. */
bool kvfl_flight_start_state(struct kvf_llama *, size_t index, const kvf_block *, size_t len, int64_t budget_us);
kvfl_landing kvfl_flight_of_state(const struct kvf_llama *, size_t index, const struct iovec **bytes);
/* Bytes of it that have not arrived yet. */
uint64_t kvfl_flight_state_rest(const struct kvf_llama *);
kvf_reason kvfl_flight_state_why(const struct kvf_llama *);
/* Why a block was missed. */
kvf_reason kvfl_flight_why(const struct kvf_llama *, size_t block);
/* Records what has ended, including the lookup. */
void kvfl_flights_look(struct kvf_llama *);
/* Waits up to `us` for something to arrive. */
void kvfl_flights_wait(const struct kvf_llama *, int64_t us);
/* Bytes that have arrived of incomplete blocks in [first, end). */
uint64_t kvfl_flights_partial(const struct kvf_llama *, size_t first, size_t end);
bool kvfl_flights_moving(const struct kvf_llama *);
/* The same, or one that was cancelled has not ended. */
bool kvfl_flights_busy(const struct kvf_llama *);
/* Blocks before `front` need not be begun any more. */
void kvfl_flights_trim(struct kvf_llama *, size_t front);
/* Cancels what the large flights have not begun: it will be requested in another order. */
void kvfl_flights_settle(struct kvf_llama *);
/* Cancels the two small ones: the front has overtaken them. */
void kvfl_flights_drop_small(struct kvf_llama *);
/* Cancels what is under way. The memory stays the store's until a later look. */
void kvfl_flights_stop(struct kvf_llama *);
void kvfl_flights_free(struct kvf_llama *);

#endif
