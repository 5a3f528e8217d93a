/* SPDX-License-Identifier: Apache-2.0
 *
 * Opens and closes spaces, and saves the card that describes a space.
 */
#include "kvferry/sized.h"
#include "prefix/prefix.h"

#define CARD_AGAIN_US (20 * 60 * 1000000LL) /* well within the TTL of one hour */
#define CARD_RETRY_US (1 * 1000000LL)

/* A space without its own secret uses that of the store. */
static void take_secrets(kvf_space_options *options, const kvfi_secrets *secrets) {
    if (options->secret != NULL || secrets->num == 0) {
        return;
    }
    options->secret = secrets->of[0].bytes;
    options->secret_len = secrets->of[0].len;
    if (secrets->num > 1 && options->previous_secret == NULL) {
        options->previous_secret = secrets->of[1].bytes;
        options->previous_secret_len = secrets->of[1].len;
    }
}

static kvf_status open_identities(kvf_space *space, kvf_error *err, const kvf_field *fields, size_t num_fields,
                                  const kvf_space_options *options) {
    if (options->previous_secret != NULL && options->secret == NULL) {
        return kvfi_fail(err, KVF_LIMIT, "a previous secret without a secret");
    }
    KVFI_TRY(kvfi_identity_init(&space->identity, err, fields, num_fields, options));
    if (options->previous_secret == NULL) {
        return KVF_OK;
    }
    kvf_space_options before = *options;
    before.secret = options->previous_secret;
    before.secret_len = options->previous_secret_len;
    KVFI_TRY(kvfi_identity_init(&space->previous, err, fields, num_fields, &before));
    space->rotates = memcmp(&space->identity.digest, &space->previous.digest, sizeof space->identity.digest) != 0;
    return KVF_OK;
}

KVF_SIZED(kvf_space_options, previous_secret_len, 40, previous_secret_len);

kvf_status kvf_space_open(kvf_space **out, kvf_error *err, kvf_store *store, const kvf_field *fields, size_t num_fields,
                          const kvf_space_options *options) {
    kvf_space_options own;
    KVFI_TRY(kvf_sized_take(&own, err, options, &kvf_space_options_sized));
    KVFI_TRY(kvfi_store_check_ours(store, err));
    kvf_space *space = kvfi_alloc_zero(1, sizeof *space);
    if (space == NULL) {
        return kvfi_fail(err, KVF_NOMEM, "no memory for a space");
    }
    take_secrets(&own, kvfi_store_secrets(store));
    kvf_status status = open_identities(space, err, fields, num_fields, &own);
    if (status != KVF_OK) {
        kvfi_identity_cleanup(&space->identity);
        kvfi_free(space);
        return status;
    }
    space->store = store;
    *out = space;
    return KVF_OK;
}

void kvf_space_close(kvf_space *space) {
    if (space == NULL || !kvfi_store_is_ours(space->store)) {
        return;
    }
    kvfi_identity_cleanup(&space->identity);
    kvfi_identity_cleanup(&space->previous);
    kvfi_free(space);
}

void kvf_space_digest(const kvf_space *space, kvf_digest *out) {
    *out = space->identity.digest;
}

uint32_t kvf_space_block_tokens(const kvf_space *space) {
    return space->identity.block_tokens;
}

const char *kvf_space_fields(const kvf_space *space) {
    return space->identity.text;
}

size_t kvf_chain(const kvf_space *space, kvf_key *out, size_t cap, const uint32_t *tokens, size_t num_tokens) {
    return kvfi_chain(&space->identity, out, cap, tokens, num_tokens, NULL);
}

size_t kvf_chain_from(const kvf_space *space, kvf_key *out, size_t cap, const uint32_t *tokens, size_t num_tokens,
                      const kvf_key *parent) {
    return kvfi_chain(&space->identity, out, cap, tokens, num_tokens, parent);
}

void kvf_salt_key(const kvf_space *space, kvf_key *out, const kvf_key *parent, const void *salt, size_t len) {
    kvfi_salt_key(&space->identity, out, parent, salt, len);
}

void kvf_key_of(const kvf_space *space, kvf_key *out, const void *engine_hash, size_t len) {
    kvfi_key_of(&space->identity, out, engine_hash, len);
}

void kvf_tail_key(const kvf_space *space, kvf_key *out, const kvf_key *last_block, const uint32_t *tokens,
                  size_t num_tokens) {
    kvfi_tail_key(&space->identity, out, last_block, tokens, num_tokens);
}

void kvf_state_key(const kvf_space *space, kvf_key *out, const kvf_key *block) {
    kvfi_state_key(&space->identity, out, block);
}

void kvf_apart_key(const kvf_space *space, kvf_key *out, const kvf_key *key, const void *how, size_t len) {
    kvfi_apart_key(&space->identity, out, key, how, len);
}

void kvf_stored_key(const kvf_space *space, kvf_key *out, const kvf_key *key) {
    kvfi_addr addr;
    kvfi_address(&addr, &space->identity, key);
    *out = addr.key;
}

/* ---- the card: what the blocks belong to, for people ---- */

static bool stage_card(kvf_space *space) {
    const kvfi_identity *identity = &space->identity;
    kvfi_backlog *backlog = kvfi_store_backlog(space->store);
    kvfi_staged *staged = NULL;
    if (kvfi_backlog_reserve(backlog, &staged, identity->text_len, 0) != KVF_OK) {
        return false;
    }
    staged->role = KVFI_ROLE_CARD;
    staged->addr.space = identity->digest;
    kvfi_card_key(&staged->addr.key, &identity->digest);
    staged->flags = KVFI_FLAG_CARD;
    staged->tiers = kvfi_store_all_tiers(space->store);
    memcpy(kvfi_staged_payload(staged), identity->text, identity->text_len);
    if (!kvfi_staged_seal(staged, kvfi_seal_of(identity))) {
        kvfi_backlog_abandon(backlog, staged);
        return false;
    }
    kvfi_backlog_commit(backlog, staged);
    return true;
}

void kvfi_space_card(kvf_space *space) {
    int64_t now = kvfi_sys->now_us();
    int64_t due = atomic_load_explicit(&space->card_due_us, memory_order_relaxed);
    if (now < due || !atomic_compare_exchange_strong(&space->card_due_us, &due, now + CARD_AGAIN_US)) {
        return;
    }
    if (!stage_card(space)) {
        atomic_store(&space->card_due_us, now + CARD_RETRY_US);
    }
}
