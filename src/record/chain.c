/* SPDX-License-Identifier: Apache-2.0
 *
 * Token ids to block keys: a chain of hashes, so that a key names the whole prefix up to the end of its block. Keys do
 * not depend on the secret, so the same key names a block under the current and the previous secret. Only the address
 * in a store depends on the secret.
 */
#include "record/space.h"

static const char chain_label[] = "kvf1 chain"; /* without its NUL */
static const char key_label[] = "kvf1 key";
static const char place_label[] = "kvf1 place";

static void add_tokens(kvfi_sha *sha, const uint32_t *tokens, size_t num) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    kvfi_sha_add(sha, tokens, 4 * num);
#else
    for (size_t i = 0; i < num; i++) {
        uint8_t bytes[4];
        kvfi_put32(bytes, tokens[i]);
        kvfi_sha_add(sha, bytes, 4);
    }
#endif
}

/* The link before the first block: the block before it, or the beginning of all prompts. */
static void first_link(kvf_key *out, const kvfi_identity *identity, const kvf_key *parent) {
    if (parent != NULL) {
        *out = *parent;
        return;
    }
    kvfi_sha sha;
    kvfi_sha_init(&sha, NULL);
    kvfi_sha_add(&sha, chain_label, sizeof chain_label - 1);
    kvfi_sha_add(&sha, identity->root, 32);
    kvfi_sha_end(&sha, out->bytes);
}

size_t kvfi_chain(const kvfi_identity *identity, kvf_key *out, size_t cap, const uint32_t *tokens, size_t num_tokens,
                  const kvf_key *parent) {
    size_t step = identity->block_tokens;
    size_t num = num_tokens / step;
    num = num < cap ? num : cap;
    kvf_key link;
    kvfi_sha sha;
    first_link(&link, identity, parent);
    for (size_t i = 0; i < num; i++) {
        kvfi_sha_init(&sha, NULL);
        kvfi_sha_add(&sha, link.bytes, sizeof link.bytes);
        add_tokens(&sha, tokens + i * step, step);
        kvfi_sha_end(&sha, link.bytes);
        out[i] = link;
    }
    return num;
}

static void begin_name(kvfi_sha *sha, const kvfi_identity *identity) {
    kvfi_sha_init(sha, NULL);
    kvfi_sha_add(sha, key_label, sizeof key_label - 1);
    kvfi_sha_add(sha, identity->root, 32);
}

/* A name that is derived from another key: what it is for, and that key. */
static void begin_derived(kvfi_sha *sha, const kvfi_identity *identity, const char *word, const kvf_key *from) {
    begin_name(sha, identity);
    kvfi_sha_add(sha, word, strlen(word));
    kvfi_sha_add(sha, from->bytes, sizeof from->bytes);
}

void kvfi_key_of(const kvfi_identity *identity, kvf_key *out, const void *engine_hash, size_t len) {
    kvfi_sha sha;
    begin_name(&sha, identity);
    kvfi_sha_add(&sha, engine_hash, len);
    kvfi_sha_end(&sha, out->bytes);
}

void kvfi_salt_key(const kvfi_identity *identity, kvf_key *out, const kvf_key *parent, const void *salt, size_t len) {
    kvf_key link;
    kvfi_sha sha;
    first_link(&link, identity, parent);
    begin_derived(&sha, identity, "salt", &link);
    kvfi_sha_add(&sha, salt, len);
    kvfi_sha_end(&sha, out->bytes);
}

void kvfi_tail_key(const kvfi_identity *identity, kvf_key *out, const kvf_key *last_block, const uint32_t *tokens,
                   size_t num) {
    kvfi_sha sha;
    begin_derived(&sha, identity, "tail", last_block);
    add_tokens(&sha, tokens, num);
    kvfi_sha_end(&sha, out->bytes);
}

void kvfi_state_key(const kvfi_identity *identity, kvf_key *out, const kvf_key *block) {
    kvfi_sha sha;
    begin_derived(&sha, identity, "state", block);
    kvfi_sha_end(&sha, out->bytes);
}

void kvfi_apart_key(const kvfi_identity *identity, kvf_key *out, const kvf_key *key, const void *how, size_t len) {
    kvfi_sha sha;
    begin_derived(&sha, identity, "apart", key);
    kvfi_sha_add(&sha, how, len);
    kvfi_sha_end(&sha, out->bytes);
}

void kvfi_address(kvfi_addr *out, const kvfi_identity *identity, const kvf_key *key) {
    out->space = identity->digest;
    out->key = *key;
    if (identity->secret.set) {
        kvfi_sha sha;
        kvfi_sha_init(&sha, &identity->secret);
        kvfi_sha_add(&sha, place_label, sizeof place_label - 1);
        kvfi_sha_add(&sha, key->bytes, sizeof key->bytes);
        kvfi_sha_end(&sha, out->key.bytes);
    }
}
