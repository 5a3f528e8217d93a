/* SPDX-License-Identifier: Apache-2.0
 *
 * Names a block for `kvferry get` and `put`: by its key, or by the fields of its space and the tokens of its prompt.
 */
#include "common/address.h"

#include <stdlib.h>
#include <string.h>

/* ---- options ---- */

int kvfcli_address_take_field(void *ctx, const char *text) {
    kvfcli_address *address = ctx;
    const char *equals = strchr(text, '=');
    if (equals == NULL || equals == text) {
        return kvfcli_usage("--field %s: NAME=VALUE is expected", text);
    }
    if (address->num_fields == KVFCLI_MAX_FIELDS) {
        return kvfcli_usage("more than %u fields", KVFCLI_MAX_FIELDS);
    }
    char *name = strndup(text, (size_t)(equals - text));
    if (name == NULL) {
        return kvfcli_no_memory();
    }
    address->fields[address->num_fields++] = (kvf_field){.name = name, .value = equals + 1};
    return KVFCLI_FINE;
}

bool kvfcli_address_given(const kvfcli_address *address) {
    return address->num_fields > 0 || address->key != NULL || address->tokens_file != NULL;
}

int kvfcli_address_check(const kvfcli_address *address) {
    uint8_t key[32];
    if (address->num_fields == 0) {
        return kvfcli_usage("the space is not named: --field engine=... --field model=... --field kv=...");
    }
    if ((address->key == NULL) == (address->tokens_file == NULL)) {
        return kvfcli_usage("name the block by one of --key and --tokens");
    }
    if (address->key != NULL && !kvfcli_unhex(key, address->key)) {
        return kvfcli_usage("--key %s: 64 hex digits are expected", address->key);
    }
    return KVFCLI_FINE;
}

/* ---- tokens ---- */

static bool add_token(kvfcli_address *address, size_t *cap, uint32_t token) {
    if (!kvfcli_grow(&address->tokens, cap, address->num_tokens + 1, sizeof token)) {
        return false;
    }
    address->tokens[address->num_tokens++] = token;
    return true;
}

/* Blanks, commas and brackets may separate numbers, so a JSON array of numbers works as well. */
#define BETWEEN " \t\r\n,[]"

static int read_tokens(kvfcli_address *address, const char *text, const char *end) {
    size_t cap = 0;
    for (text += strspn(text, BETWEEN); text < end; text += strspn(text, BETWEEN)) {
        size_t len = strcspn(text, BETWEEN);
        uint64_t token = strtoull(text, NULL, 10);
        if (len == 0 || strspn(text, "0123456789") != len || token > INT32_MAX) {
            kvfcli_say("%s: the %zuth token is not a token id (0 to %d)", address->tokens_file, address->num_tokens + 1,
                       INT32_MAX);
            return KVFCLI_INPUT;
        }
        if (!add_token(address, &cap, (uint32_t)token)) {
            return kvfcli_no_memory();
        }
        text += len;
    }
    return KVFCLI_FINE;
}

static int load_tokens(kvfcli_address *address) {
    kvfcli_string text = {.text = NULL};
    int code = kvfcli_read_file(&text, address->tokens_file, SIZE_MAX);
    if (code == KVFCLI_FINE && text.len > 0) {
        code = read_tokens(address, text.text, text.text + text.len);
    }
    kvfcli_string_cleanup(&text);
    return code;
}

/* ---- the block ---- */

static int block_by_tokens(kvfcli_address *address) {
    uint32_t length = kvf_space_block_tokens(address->space);
    size_t num_blocks = address->num_tokens / length;
    if (num_blocks == 0) {
        kvfcli_say("%s: %zu tokens are less than one block of %u", address->tokens_file, address->num_tokens, length);
        return KVFCLI_INPUT;
    }
    size_t index = address->index == KVFCLI_LAST_BLOCK ? num_blocks - 1 : address->index;
    if (index >= num_blocks) {
        kvfcli_say("--block %zu: the prompt has only the blocks 0 to %zu", index, num_blocks - 1);
        return KVFCLI_INPUT;
    }
    kvf_key *keys = calloc(num_blocks, sizeof *keys);
    if (keys == NULL) {
        return kvfcli_no_memory();
    }
    kvf_chain(address->space, keys, num_blocks, address->tokens, address->num_tokens);
    address->block = (kvf_block){.key = keys[index],
                                 .tokens = address->tokens + index * length,
                                 .num_tokens = length,
                                 .first_token = (uint32_t)(index * length)};
    free(keys);
    return KVFCLI_FINE;
}

static int block_by_key(kvfcli_address *address) {
    address->block = (kvf_block){.num_tokens = 0};
    kvfcli_unhex(address->block.key.bytes, address->key); /* kvfcli_address_check has verified that it can be read */
    return KVFCLI_FINE;
}

int kvfcli_address_open(kvfcli_address *address, kvf_store *store) {
    kvf_error err = {.status = KVF_OK};
    kvf_space_options options = {.struct_size = sizeof options, .block_tokens = address->block_tokens};
    int code = address->tokens_file != NULL ? load_tokens(address) : KVFCLI_FINE;
    if (code != KVFCLI_FINE) {
        return code;
    }
    kvf_status status = kvf_space_open(&address->space, &err, store, address->fields, address->num_fields, &options);
    if (status != KVF_OK) {
        return kvfcli_fail(status, &err);
    }
    return address->tokens_file != NULL ? block_by_tokens(address) : block_by_key(address);
}

void kvfcli_address_cleanup(kvfcli_address *address) {
    kvf_space_close(address->space);
    address->space = NULL;
    for (size_t i = 0; i < address->num_fields; i++) {
        free((char *)(uintptr_t)address->fields[i].name);
    }
    address->num_fields = 0;
    free(address->tokens);
    address->tokens = NULL;
}
