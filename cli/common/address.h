/* SPDX-License-Identifier: Apache-2.0
 *
 * Names a block for get and put: by the fields of its space and the token ids of its prompt, or by its key.
 */
#ifndef KVFCLI_ADDRESS_H
#define KVFCLI_ADDRESS_H

#include "common/cli.h"

#define KVFCLI_MAX_FIELDS 64u

typedef struct kvfcli_address {
    kvf_field fields[KVFCLI_MAX_FIELDS]; /* names are copies, values point into argv */
    size_t num_fields;
    uint32_t block_tokens;   /* 0 = the default */
    const char *key;         /* 64 hex digits, or NULL */
    const char *tokens_file; /* or NULL */
    uint64_t index;          /* which block of the prompt; UINT64_MAX = the last whole one */
    /* What kvfcli_address_open makes of it. */
    kvf_space *space;
    uint32_t *tokens;
    size_t num_tokens;
    kvf_block block; /* key, tokens, num_tokens and first_token are set */
} kvfcli_address;

enum {
    KVFCLI_OPT_FIELD = KVFCLI_OPT_OWN,
    KVFCLI_OPT_BLOCK_TOKENS,
    KVFCLI_OPT_KEY,
    KVFCLI_OPT_TOKENS,
    KVFCLI_OPT_BLOCK,
    KVFCLI_OPT_AFTER
};

#define KVFCLI_ADDRESS_OPTIONS                                                                                      \
    {"field", required_argument, NULL, KVFCLI_OPT_FIELD},                                                           \
        {"block-tokens", required_argument, NULL, KVFCLI_OPT_BLOCK_TOKENS},                                         \
        {"key", required_argument, NULL, KVFCLI_OPT_KEY}, {"tokens", required_argument, NULL, KVFCLI_OPT_TOKENS}, { \
        "block", required_argument, NULL, KVFCLI_OPT_BLOCK                                                          \
    }

#define KVFCLI_ADDRESS_HELP                                                                                       \
    "      --field NAME=VALUE   a field of the space; engine, model and kv are needed\n"                          \
    "      --block-tokens N     tokens of a block, part of the space (default 256)\n"                             \
    "      --key HEX            the key of the block, 64 digits, for blocks that carry no tokens\n"               \
    "      --tokens FILE        or: the token ids of the prompt, as numbers with blanks or commas between them\n" \
    "      --block I            which block of the prompt, from 0 on (default: the last whole one)\n"

int kvfcli_address_take(kvfcli_address *address, int opt, const char *value);
bool kvfcli_address_given(const kvfcli_address *address); /* any of its options */
/* kvfcli_address_check returns 0, or an exit code after a message, when the options don't name one block. */
int kvfcli_address_check(const kvfcli_address *address, const kvfcli_common *common);
/* kvfcli_address_open opens the space and names the block. Returns 0, or an exit code after a message. */
int kvfcli_address_open(kvfcli_address *address, kvf_store *store);
void kvfcli_address_cleanup(kvfcli_address *address); /* before the store is closed; safe after a failure, and twice */

#endif
