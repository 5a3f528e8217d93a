/* SPDX-License-Identifier: Apache-2.0
 *
 * Spaces and chains: what a key names.
 */
#ifndef KVFERRY_SPACE_H
#define KVFERRY_SPACE_H

#include "store.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A space is an identity: everything that changes the bytes of a block, as named fields. The SHA-256 of all of them
 * begins every key, so a difference is a miss, never a wrong hit. Order does not matter; names are unique; names and
 * values are text.
 *
 * Mandatory fields (one missing is KVF_REFUSED): "engine" (which engine, and the version of its KV format), "model" (a
 * hash of the weights), "kv" (data type and layout of the blocks). Usual others: "adapters", "rope", "tp_rank",
 * "tenant". */
typedef struct kvf_field {
    const char *name;  /* 1 to 64 bytes of a-z 0-9 . _ - */
    const char *value; /* up to 4096 bytes */
} kvf_field;

/* The name of a space: the SHA-256 of its fields and of block_tokens, or with a secret their HMAC. */
typedef struct kvf_digest {
    uint8_t bytes[32];
} kvf_digest;

typedef struct kvf_space kvf_space;

typedef struct kvf_space_options {
    uint32_t struct_size;
    uint32_t block_tokens; /* tokens of a block, 1 to 65536; part of the identity; 0 = 256 */
    /* A tenant's secret. Records are sealed under it (encrypted and authenticated), and the keys that the store sees are
     * HMACs under it: without it nobody can read, recognise, forge or move them. docs/security.md says what it is good
     * for. NULL = that of the store (kvf_options), or none. */
    const void *secret;
    size_t secret_len; /* 16 to 1024 bytes */
    /* The secret before that one, while it is replaced: what is not there under `secret` is looked for under this, and
     * what is loaded is stored again under `secret`, in the background. Nothing is stored under it. NULL = none. */
    const void *previous_secret;
    size_t previous_secret_len;
} kvf_space_options;

/* kvf_space_open returns KVF_OK; KVF_REFUSED (a mandatory field is missing); KVF_LIMIT (a field that is malformed or
 * named twice, too many of them, block_tokens, a secret, struct_size); KVF_NOMEM; KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_space_open(kvf_space **out, kvf_error *err, kvf_store *, const kvf_field *fields,
                                                 size_t num_fields, const kvf_space_options *options);
KVF_API void kvf_space_close(kvf_space *);
KVF_API void kvf_space_digest(const kvf_space *, kvf_digest *out);
KVF_API uint32_t kvf_space_block_tokens(const kvf_space *);
/* The fields as "name=value\n" lines, sorted by name, block_tokens among them. Valid until the space is closed. */
KVF_API const char *kvf_space_fields(const kvf_space *);

/* The name of a block: 32 bytes that stand for the fields of the space and for all tokens up to the end of the block.
 * With a secret, the key that a store sees is another (kvf_stored_key). */
typedef struct kvf_key {
    uint8_t bytes[32];
} kvf_key;

/* kvf_chain turns a whole prompt into block keys in one call: h0 = H("kvf1 chain" || fields of the space), h[i] =
 * H(h[i-1] || tokens of block i, little-endian 32 bit), H = SHA-256. Writes the keys of all whole blocks, at most `cap`, and returns their number. docs/record-format.md has test vectors. Does not block
 * or allocate. */
KVF_API size_t kvf_chain(const kvf_space *, kvf_key *out, size_t cap, const uint32_t *tokens, size_t num_tokens);

/* kvf_key_of makes a key from an engine's own block hash (vLLM, SGLang, LMCache bring theirs), of any length. */
KVF_API void kvf_key_of(const kvf_space *, kvf_key *out, const void *engine_hash, size_t len);

/* Keys of what is not a whole block. None of them is ever the key of a block, and engines that follow the same rules find
 * what the others stored. docs/record-format.md has the rules and test vectors.
 *
 * kvf_tail_key names the tokens after the last whole block of a prompt, by the key of that block and their own ids: only
 * the same prompt finds them again.
 *
 * kvf_state_key names what an engine can't cut into blocks (a window, a recurrent state), as it is at the end of a block
 * or tail, by the key of that.
 *
 * kvf_apart_key names the same tokens as `key`, computed in another way, of which `how` says what makes the bytes
 * differ. */
KVF_API void kvf_tail_key(const kvf_space *, kvf_key *out, const kvf_key *last_block, const uint32_t *tokens,
                          size_t num_tokens);
KVF_API void kvf_state_key(const kvf_space *, kvf_key *out, const kvf_key *block);
KVF_API void kvf_apart_key(const kvf_space *, kvf_key *out, const kvf_key *key, const void *how, size_t len);

/* kvf_stored_key is the key under which a block of this space lies in a store, as kvf_walk shows it and kvf_remove takes
 * it: the same, or with a secret its HMAC. */
KVF_API void kvf_stored_key(const kvf_space *, kvf_key *out, const kvf_key *key);

#ifdef __cplusplus
}
#endif
#endif
