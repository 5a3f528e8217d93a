/* SPDX-License-Identifier: Apache-2.0
 *
 * Spaces and keys: what a stored block belongs to, and how it is named.
 *
 * A space is an identity: everything that changes the bytes of a block, as named fields. A hash of all fields begins
 * every key, so any difference is a miss, never a wrong hit. A key names a space and all tokens up to the end of a
 * block.
 *
 *   kvf_field fields[] = {{"engine", "mine-1"}, {"model", sha256_of_the_weights}, {"kv", "f16 LHTD"}};
 *   kvf_space_options options = {.struct_size = sizeof options, .block_tokens = 256};
 *   kvf_space_open(&space, &err, store, fields, 3, &options);
 *   num = kvf_chain(space, keys, cap, tokens, num_tokens);
 */
#ifndef KVFERRY_SPACE_H
#define KVFERRY_SPACE_H

#include "store.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_space kvf_space;

/* One field of a space. Names are unique, and their order does not matter. Required (KVF_REFUSED if missing): "engine"
 * (which engine, and the version of its KV format), "model" (a hash of the weights), "kv" (data type and layout of the
 * blocks). Other usual fields: "adapters", "rope", "tp_rank", "tenant". */
typedef struct kvf_field {
    /* 1 to 64 bytes of a-z 0-9 . _ - */
    const char *name;
    /* Text of up to 4096 bytes. */
    const char *value;
} kvf_field;

/* Options of a space. Zero in any field but struct_size is its default. */
typedef struct kvf_space_options {
    uint32_t struct_size;
    /* Tokens of a block, 1 to 65536. Part of the identity. 0 = 256. */
    uint32_t block_tokens;
    /* A tenant's secret. Records are sealed under it (encrypted and authenticated), and the keys in the store are HMACs
     * under it: without it nobody can read, recognise, forge or move them (docs/security.md). 16 to 1024 bytes; copied.
     * NULL = that of the store (kvf_options), or none. */
    const void *secret;
    size_t secret_len;
    /* The previous secret, while it is replaced. Blocks that are missing under `secret` are looked up under this one,
     * and blocks loaded from there are saved again under `secret`, in the background. Nothing is written under it. NULL
     * = none. */
    const void *previous_secret;
    size_t previous_secret_len;
} kvf_space_options;

/* kvf_space_open opens the space with these fields. `options` may be NULL. Returns KVF_OK; KVF_REFUSED (a required
 * field is missing); KVF_LIMIT (a field that is malformed or named twice, too many fields, block_tokens, a secret,
 * struct_size); KVF_NOMEM; KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_space_open(kvf_space **out, kvf_error *err, kvf_store *, const kvf_field *fields,
                                                 size_t num_fields, const kvf_space_options *options);
/* kvf_space_close frees a space. End all its batches and release its borrowed blocks first. */
KVF_API void kvf_space_close(kvf_space *);

/* The key of a block: 32 bytes that name the fields of the space and all tokens up to the end of the block. With a
 * secret the store sees another key (kvf_stored_key). */
typedef struct kvf_key {
    uint8_t bytes[32];
} kvf_key;

/* kvf_chain turns a whole prompt into block keys: h0 = H("kvf1 chain" || fields of the space), h[i] = H(h[i-1] ||
 * tokens of block i, little-endian 32 bit), H = SHA-256. It writes the keys of all whole blocks, at most `cap`, and
 * returns their number. Does not block or allocate. docs/record-format.md has test vectors. */
KVF_API size_t kvf_chain(const kvf_space *, kvf_key *out, size_t cap, const uint32_t *tokens, size_t num_tokens);

/* kvf_chain_from continues a chain. `parent` is the key of the block before the first of these tokens, or a salt key;
 * NULL is the beginning of a prompt. A prompt chained in several steps has the same keys as in one. `out` may overlap
 * `parent`. */
KVF_API size_t kvf_chain_from(const kvf_space *, kvf_key *out, size_t cap, const uint32_t *tokens, size_t num_tokens,
                              const kvf_key *parent);

/* kvf_salt_key makes a parent for kvf_chain_from, so that the blocks chained from it are found only with the same salt.
 * `salt` is any bytes: the name of a tenant, vLLM's cache_salt, the hash of an image in the next block. `parent` is the
 * key of the block before, or another salt key; NULL is the beginning of a prompt. The result is never the key of a
 * block. `out` may be `parent`. A salt separates blocks and does not protect them: a secret does. */
KVF_API void kvf_salt_key(const kvf_space *, kvf_key *out, const kvf_key *parent, const void *salt, size_t len);

/* kvf_key_of makes a key from an engine's own block hash of any length (vLLM, SGLang and LMCache have their own). */
KVF_API void kvf_key_of(const kvf_space *, kvf_key *out, const void *engine_hash, size_t len);

/* Keys of what is not a whole block. None of them is ever the key of a block, and engines that follow the same rules
 * find each other's records. docs/record-format.md has the rules and test vectors. */

/* kvf_tail_key names the tokens after the last whole block of a prompt, by the key of that block and their own ids:
 * only the same prompt finds them. */
KVF_API void kvf_tail_key(const kvf_space *, kvf_key *out, const kvf_key *last_block, const uint32_t *tokens,
                          size_t num_tokens);
/* kvf_state_key names what an engine can't divide into blocks (a window, a recurrent state), as it is at the end of a
 * block or tail, by the key of that. */
KVF_API void kvf_state_key(const kvf_space *, kvf_key *out, const kvf_key *block);
/* kvf_apart_key names the same tokens as `key`, computed in another way. `how` says what makes the bytes differ. */
KVF_API void kvf_apart_key(const kvf_space *, kvf_key *out, const kvf_key *key, const void *how, size_t len);

/* kvf_stored_key returns the key of a block in a store, as kvf_walk shows it and kvf_remove takes it: the same key, or
 * with a secret its HMAC. */
KVF_API void kvf_stored_key(const kvf_space *, kvf_key *out, const kvf_key *key);

/* ---- properties of a space --------------------------------------------------------------------------------------- */

/* The name of a space: the SHA-256 of its fields and of block_tokens, or with a secret their HMAC. */
typedef struct kvf_digest {
    uint8_t bytes[32];
} kvf_digest;

/* kvf_space_digest returns the name of the space. */
KVF_API void kvf_space_digest(const kvf_space *, kvf_digest *out);
/* kvf_space_block_tokens returns the number of tokens of a block. */
KVF_API uint32_t kvf_space_block_tokens(const kvf_space *);
/* kvf_space_fields returns the fields as "name=value\n" lines, sorted by name, including block_tokens. Valid until the
 * space is closed. */
KVF_API const char *kvf_space_fields(const kvf_space *);

#ifdef __cplusplus
}
#endif
#endif
