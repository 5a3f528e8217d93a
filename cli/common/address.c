/* SPDX-License-Identifier: Apache-2.0
 *
 * Names a block for `kvferry get` and `put`: by its key, or by the fields of its space and the tokens of its prompt.
 */
#include "common/address.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- options ---- */

static int take_field(kvfcli_address *address, const char *text) {
    const char *equals = strchr(text, '=');
    if (equals == NULL || equals == text) {
        kvfcli_say("--field %s: NAME=VALUE is expected", text);
        return KVFCLI_USAGE;
    }
    if (address->num_fields == KVFCLI_MAX_FIELDS) {
        kvfcli_say("more than %u fields", KVFCLI_MAX_FIELDS);
        return KVFCLI_USAGE;
    }
    char *name = strndup(text, (size_t)(equals - text));
    if (name == NULL) {
        kvfcli_say("no memory");
        return KVFCLI_IO;
    }
    address->fields[address->num_fields++] = (kvf_field){.name = name, .value = equals + 1};
    return KVFCLI_FINE;
}

static int take_number(uint64_t *out, const char *option, const char *text, uint64_t max) {
    char *end = NULL;
    errno = 0;
    uintmax_t n = strtoumax(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || text[0] == '-' || n > max) {
        kvfcli_say("%s %s: a number up to %" PRIu64 " is expected", option, text, max);
        return KVFCLI_USAGE;
    }
    *out = n;
    return KVFCLI_FINE;
}

static int take_block_tokens(kvfcli_address *address, const char *text) {
    uint64_t n = 0;
    int code = take_number(&n, "--block-tokens", text, 65536);
    address->block_tokens = (uint32_t)n;
    return code;
}

int kvfcli_address_take(kvfcli_address *address, int opt, const char *value) {
    switch (opt) {
    case KVFCLI_OPT_FIELD:
        return take_field(address, value);
    case KVFCLI_OPT_BLOCK_TOKENS:
        return take_block_tokens(address, value);
    case KVFCLI_OPT_KEY:
        address->key = value;
        return KVFCLI_FINE;
    case KVFCLI_OPT_TOKENS:
        address->tokens_file = value;
        return KVFCLI_FINE;
    default:
        return take_number(&address->index, "--block", value, UINT32_MAX);
    }
}

bool kvfcli_address_given(const kvfcli_address *address) {
    return address->num_fields > 0 || address->key != NULL || address->tokens_file != NULL;
}

int kvfcli_address_check(const kvfcli_address *address, const kvfcli_common *common) {
    uint8_t key[32];
    if (address->num_fields == 0) {
        return kvfcli_usage(common, "the space is not named: --field engine=... --field model=... --field kv=...");
    }
    if ((address->key == NULL) == (address->tokens_file == NULL)) {
        return kvfcli_usage(common, "name the block by one of --key and --tokens");
    }
    if (address->key != NULL && !kvfcli_unhex(key, address->key)) {
        return kvfcli_usage(common, "--key %s: 64 hex digits are expected", address->key);
    }
    return KVFCLI_FINE;
}

/* ---- tokens ---- */

static bool add_token(kvfcli_address *address, size_t *cap, uint32_t token) {
    if (address->num_tokens == *cap) {
        size_t larger = *cap == 0 ? 4096 : *cap * 2;
        uint32_t *moved = reallocarray(address->tokens, larger, sizeof *moved);
        if (moved == NULL) {
            return false;
        }
        address->tokens = moved;
        *cap = larger;
    }
    address->tokens[address->num_tokens++] = token;
    return true;
}

/* Blanks, commas and brackets may separate numbers, so a JSON array of numbers works as well. */
static int skip_between(FILE *in) {
    int c;
    do {
        c = getc(in);
    } while (c != EOF && strchr(" \t\r\n,[]", c) != NULL);
    return c;
}

static int read_tokens(kvfcli_address *address, FILE *in) {
    size_t cap = 0;
    for (int c = skip_between(in); c != EOF; c = skip_between(in)) {
        uint64_t token = 0;
        for (; c >= '0' && c <= '9' && token <= UINT32_MAX; c = getc(in)) {
            token = token * 10 + (uint64_t)(c - '0');
        }
        bool ends = c == EOF || strchr(" \t\r\n,[]", c) != NULL;
        if (!ends || token > INT32_MAX) {
            kvfcli_say("%s: the %zuth token is not a token id (0 to %d)", address->tokens_file, address->num_tokens + 1,
                       INT32_MAX);
            return KVFCLI_INPUT;
        }
        if (!add_token(address, &cap, (uint32_t)token)) {
            kvfcli_say("%s: no memory for so many tokens", address->tokens_file);
            return KVFCLI_IO;
        }
    }
    if (ferror(in)) {
        kvfcli_say("%s: %s", address->tokens_file, strerror(errno));
        return KVFCLI_IO;
    }
    return KVFCLI_FINE;
}

static int load_tokens(kvfcli_address *address) {
    FILE *in = fopen(address->tokens_file, "rb");
    if (in == NULL) {
        kvfcli_say("%s: %s", address->tokens_file, strerror(errno));
        return KVFCLI_INPUT;
    }
    int code = read_tokens(address, in);
    fclose(in);
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
    size_t index = address->index == UINT64_MAX ? num_blocks - 1 : (size_t)address->index;
    if (index >= num_blocks) {
        kvfcli_say("--block %zu: the prompt has only the blocks 0 to %zu", index, num_blocks - 1);
        return KVFCLI_INPUT;
    }
    kvf_key *keys = calloc(num_blocks, sizeof *keys);
    if (keys == NULL) {
        kvfcli_say("no memory for the keys of %zu blocks", num_blocks);
        return KVFCLI_IO;
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
        err.status = status;
        return kvfcli_fail(&err);
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
