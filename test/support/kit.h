/* SPDX-License-Identifier: Apache-2.0
 *
 * Common tools of most tests: a store, a space, blocks with seeded bytes, temporary folders.
 */
#ifndef KVFT_KIT_H
#define KVFT_KIT_H

#include "kvferry/kvferry.h"

/* Opens or aborts with the message. */
kvf_store *kvft_store(const char *url);
kvf_store *kvft_store2(const char *fast, const char *slow);
kvf_space *kvft_space(kvf_store *, const char *model, uint32_t block_tokens);
/* The same with a secret; NULL = none. */
kvf_space *kvft_sealed_space(kvf_store *store, const char *model, uint32_t block_tokens, const char *secret);

/* A prompt of `num_blocks` blocks and the memory of their payloads; everything follows from the seed. */
typedef struct kvft_prompt {
    uint32_t block_tokens;
    size_t num_blocks, payload_bytes;
    uint32_t *tokens;
    kvf_key *keys;
    uint8_t *memory; /* num_blocks * payload_bytes */
    struct iovec *iov;
    kvf_block *blocks;
} kvft_prompt;

kvft_prompt *kvft_prompt_new(kvf_space *, uint64_t seed, size_t num_blocks, size_t payload_bytes);
void kvft_prompt_free(kvft_prompt *);
void kvft_prompt_fill(kvft_prompt *, uint64_t seed); /* writes the bytes that the seed decides */
void kvft_prompt_poison(kvft_prompt *);              /* overwrites them, before a load */
/* How many of the first `run` blocks do not hold the seed's bytes. */
size_t kvft_prompt_wrong(const kvft_prompt *, uint64_t seed, size_t run);

double kvft_now_ms(void); /* of a clock that only goes forward */
/* For a state that must come, and for a call that must end before something that takes longer. It guards against a hang
 * and promises nothing: beside other programs all takes as long as they do. */
#define KVFT_PATIENCE_MS 30000
void kvft_nap_ms(long ms);

uint64_t kvft_random(uint64_t *state); /* splitmix64 */
void kvft_bytes(uint8_t *out, size_t len, uint64_t seed);

const char *kvft_temp_root(void); /* $TMPDIR where it is short enough for the path of a socket, else /tmp */
char *kvft_temp_dir(void);        /* a new folder in it, to be freed by kvft_remove_dir */
void kvft_remove_dir(char *dir);  /* with all that is in it */

int kvft_num_fds(void); /* how many descriptors this process has open */

/* Ends a child process as _exit does; what it has executed is noted where that is measured (gcov). */
void kvft_exit(int code) __attribute__((noreturn));

/* Saves the prompt and waits; aborts with the reason when not all blocks were written (or known to be there). */
void kvft_save_all(kvf_space *, kvf_store *, kvft_prompt *);
/* Waits for what was handed over to be written; aborts with the reasons when a block was not. */
void kvft_flush_all(kvf_store *);
/* Waits for it, and returns how many blocks were not written. */
uint64_t kvft_flush(kvf_store *);
#endif
