/* SPDX-License-Identifier: Apache-2.0
 *
 * Names a block for get and put: by the fields of its space and the token ids of its prompt, or by its key.
 */
#ifndef KVFCLI_ADDRESS_H
#define KVFCLI_ADDRESS_H

#include "common/cli.h"

#define KVFCLI_MAX_FIELDS 64u
#define KVFCLI_LAST_BLOCK UINT32_MAX

typedef struct kvfcli_address {
    kvf_field fields[KVFCLI_MAX_FIELDS]; /* names are copies, values point into argv */
    size_t num_fields;
    uint32_t block_tokens;   /* 0 = the default */
    const char *key;         /* 64 hex digits, or NULL */
    const char *tokens_file; /* or NULL */
    uint32_t index;          /* which block of the prompt; KVFCLI_LAST_BLOCK = the last whole one */
    /* What kvfcli_address_open makes of it. */
    kvf_space *space;
    uint32_t *tokens;
    size_t num_tokens;
    kvf_block block; /* key, tokens, num_tokens and first_token are set */
} kvfcli_address;

/* The options, for a struct of a verb whose first field is the address. */
#define KVFCLI_ADDRESS_OPTIONS                                                                              \
    KVFCLI_OPT_OTHER(kvfcli_address_take_field, 0, "field", "NAME=VALUE",                                   \
                     "a field of the space; engine, model and kv are needed"),                              \
        KVFCLI_OPT_NUMBER(kvfcli_address, block_tokens, 0, "block-tokens", "N", 1, 65536,                   \
                          "tokens of a block, part of the space (default 256)"),                            \
        KVFCLI_OPT_TEXT(kvfcli_address, key, 0, "key", "HEX",                                               \
                        "the key of the block, 64 digits, for blocks without tokens"),                      \
        KVFCLI_OPT_TEXT(kvfcli_address, tokens_file, 0, "tokens", "FILE",                                   \
                        "or: the token ids of the prompt, as numbers with blanks or\ncommas between them"), \
        KVFCLI_OPT_NUMBER(kvfcli_address, index, 0, "block", "I", 0, UINT32_MAX - 1,                        \
                          "which block of the prompt, from 0 on (default: the last\nwhole one)")

int kvfcli_address_take_field(void *address, const char *text);
bool kvfcli_address_given(const kvfcli_address *address); /* any of its options */
/* kvfcli_address_check returns 0, or an exit code after a message, when the options don't name one block. */
int kvfcli_address_check(const kvfcli_address *address);
/* kvfcli_address_open opens the space and names the block. Returns 0, or an exit code after a message. */
int kvfcli_address_open(kvfcli_address *address, kvf_store *store);
void kvfcli_address_cleanup(kvfcli_address *address); /* before the store is closed; safe after a failure, and twice */

#endif
