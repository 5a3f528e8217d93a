/* SPDX-License-Identifier: Apache-2.0
 *
 * What a key names: the identity of a space, and the chain from its token ids to block keys. Pure: no store, no I/O.
 * The public kvf_space (src/prefix) is an identity with a store. docs/record-format.md has the definitions and test
 * vectors.
 */
#ifndef KVFI_SPACE_H
#define KVFI_SPACE_H

#include "kvferry/space.h"
#include "record/record.h"

#define KVFI_MAX_FIELDS           64u
#define KVFI_MAX_NAME_BYTES       64u
#define KVFI_MAX_VALUE_BYTES      4096u
#define KVFI_MIN_SECRET_BYTES     16u
#define KVFI_MAX_SECRET_BYTES     1024u
#define KVFI_MAX_BLOCK_TOKENS     KVFI_MAX_TOKENS
#define KVFI_DEFAULT_BLOCK_TOKENS 256u

typedef struct kvfi_identity {
    kvf_digest digest;  /* names the space in a store; keyed if there is a secret */
    uint8_t root[32];   /* the same without the secret: the beginning of chains */
    kvfi_secret secret; /* of the tenant; cleansed by cleanup */
    kvfi_secret seal;   /* the sealing key; not set without a secret */
    uint32_t block_tokens;
    char *text; /* the fields as "name=value\n", sorted by name, "block_tokens" too: what a space card holds */
    size_t text_len;
} kvfi_identity;

/* kvfi_identity_init checks the fields and computes the digest. `options` may be NULL; block_tokens of 0 there becomes
 * 256. Returns KVF_OK; KVF_REFUSED: a mandatory field is missing or empty; KVF_LIMIT: a name, value, number or the
 * secret is malformed, too long or given twice; KVF_NOMEM. After a failure *out is in the zero state, which cleanup
 * accepts. */
kvf_status kvfi_identity_init(kvfi_identity *out, kvf_error *, const kvf_field *fields, size_t num_fields,
                              const kvf_space_options *options);
void kvfi_identity_cleanup(kvfi_identity *);
/* KVF_LIMIT: too short to resist guessing, or too long. */
kvf_status kvfi_secret_check(kvf_error *, size_t len);

/* kvfi_address computes the address of a block in a store from its key. It is keyed if there is a secret. */
void kvfi_address(kvfi_addr *out, const kvfi_identity *, const kvf_key *key);
/* The sealing key of records of this space, or NULL. */
static inline const kvfi_secret *kvfi_seal_of(const kvfi_identity *identity) {
    return identity->seal.set ? &identity->seal : NULL;
}

/* The public functions on keys, over an identity; they don't block, allocate or fail. kvfi_chain is kvf_chain_from. */
size_t kvfi_chain(const kvfi_identity *, kvf_key *out, size_t cap, const uint32_t *tokens, size_t num_tokens,
                  const kvf_key *parent);
void kvfi_salt_key(const kvfi_identity *, kvf_key *out, const kvf_key *parent, const void *salt, size_t len);
void kvfi_key_of(const kvfi_identity *, kvf_key *out, const void *engine_hash, size_t len);
void kvfi_tail_key(const kvfi_identity *, kvf_key *out, const kvf_key *last_block, const uint32_t *tokens, size_t num);
void kvfi_state_key(const kvfi_identity *, kvf_key *out, const kvf_key *block);
void kvfi_apart_key(const kvfi_identity *, kvf_key *out, const kvf_key *key, const void *how, size_t len);

#endif
