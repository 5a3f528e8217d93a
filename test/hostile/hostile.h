/* SPDX-License-Identifier: Apache-2.0
 *
 * check-hostile: whatever stands in a store, and whatever a server says, costs at most a miss. A program
 * (store_hostile.c, llama_hostile.c) is a list of parts; a part is one way in. Each case follows from the seed, the
 * part and its number alone, runs in a child process under a watchdog, and is told by the words with which it can be
 * run again.
 *
 *   parse.c   the parsers alone: records, sessions, slot maps, redirects, states of llama.cpp
 *   folder.c  a folder: forged records, other files in their place, names, times, the usage file
 *   wire.c    a server that lies, in the simulated world: every answer
 *   server.c  a real server that holds what a hostile client wrote
 *
 *   llama_hostile.c: records of real llama.cpp contexts
 */
#ifndef KVFT_HOSTILE_H
#define KVFT_HOSTILE_H
#include <stdbool.h>
#include <stdint.h>

#include "support/forge.h"
#include "support/kit.h"
#include "support/meter.h"

typedef struct hostile_part {
    const char *name;
    unsigned share;      /* of all cases of the program, beside the others' shares */
    bool (*begin)(void); /* false: it can't be run here; said with the reason by itself */
    void (*run)(uint64_t *random);
    void (*end)(void);
} hostile_part;

extern const hostile_part hostile_parse, hostile_folder, hostile_wire, hostile_server;

/* CASES (of the whole program), SEED, PART and CASE (that one only) come from the environment. Returns the exit
 * status. */
int hostile_main(const hostile_part *const *parts, size_t num, unsigned cases);

/* ---- for parts ---- */
static inline size_t hostile_below(uint64_t *random, size_t n) {
    return n > 0 ? (size_t)(kvft_random(random) % n) : 0;
}
/* Something was loaded. `forged`: this case wrote a payload of its own with a valid checksum, which without a secret
 * nobody can tell from another; else `right` must be true, or it counts as a wrong hit. */
void hostile_hit(bool right, bool forged);
/* The library held so many bytes at once, and may hold so many. */
void hostile_memory(size_t held, size_t allowed);
/* Anything else that must not be. */
void hostile_fault(const char *what);

/* A prompt of four blocks in a store, once more as a tenant with a secret has it, and a session and cards beside it;
 * and all that is asked after a case has done its worst to them. */
#define HOSTILE_BLOCKS 4u
#define HOSTILE_SEED   1u
typedef struct hostile_use {
    size_t payload_bytes;
    bool forged;         /* this case has forged a payload */
    bool forged_session; /* ... of the session */
    bool saves;          /* something new is saved too */
    bool huge; /* a file claims to have GiB, and has them: a caller that requests all of it, of any length, gets it */
    uint32_t budget_ms;
} hostile_use;
void hostile_fill(kvf_store *, size_t payload_bytes); /* aborts where that fails */
void hostile_ask(kvf_store *, const hostile_use *, uint64_t *random);
#endif
