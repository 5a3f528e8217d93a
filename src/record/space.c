/* SPDX-License-Identifier: Apache-2.0
 *
 * The identity of a space: check the fields, sort them, hash them, and keep them as text for people.
 */
#include "record/space.h"

#include <stdio.h>

static const char space_label[] = "kvf1 space"; /* with its NUL, which ends it in the hash */
static const char *const mandatory[] = {"engine", "model", "kv"};

/* A field with its lengths; `name` and `value` point to the caller's strings. */
typedef struct item {
    const char *name, *value;
    size_t name_len, value_len;
} item;

static bool name_char(char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
}

static kvf_status check_name(kvf_error *err, const char *name, size_t len) {
    if (len == 0 || len > KVFI_MAX_NAME_BYTES) {
        return kvfi_fail(err, KVF_LIMIT, "the name of a field of a space has %zu bytes; 1 to %u are allowed", len,
                         KVFI_MAX_NAME_BYTES);
    }
    for (size_t i = 0; i < len; i++) {
        if (!name_char(name[i])) {
            return kvfi_fail(err, KVF_LIMIT, "field \"%.*s\" of a space: its name may hold only a-z 0-9 . _ -",
                             (int)len, name);
        }
    }
    return KVF_OK;
}

/* One value is one line of the text, so it must not contain control characters. */
static kvf_status check_value(kvf_error *err, const char *name, const char *value, size_t len) {
    if (len > KVFI_MAX_VALUE_BYTES) {
        return kvfi_fail(err, KVF_LIMIT, "field \"%s\" of a space is longer than %u bytes: use a hash of it", name,
                         KVFI_MAX_VALUE_BYTES);
    }
    for (size_t i = 0; i < len; i++) {
        if ((unsigned char)value[i] < 0x20 || value[i] == 0x7f) {
            return kvfi_fail(err, KVF_LIMIT,
                             "field \"%s\" of a space has a control character at byte %zu; its value must be text",
                             name, i);
        }
    }
    return KVF_OK;
}

static kvf_status take_field(item *out, kvf_error *err, const kvf_field *field) {
    if (field->name == NULL || field->value == NULL) {
        return kvfi_fail(err, KVF_LIMIT, "a field of a space has no %s", field->name == NULL ? "name" : "value");
    }
    item it = {
        .name = field->name,
        .value = field->value,
        .name_len = strnlen(field->name, KVFI_MAX_NAME_BYTES + 1),
        .value_len = strnlen(field->value, KVFI_MAX_VALUE_BYTES + 1),
    };
    KVFI_TRY(check_name(err, it.name, it.name_len));
    KVFI_TRY(check_value(err, it.name, it.value, it.value_len));
    *out = it;
    return KVF_OK;
}

/* Insertion sort by name (at most 65 fields). Refuses a duplicate name. */
static kvf_status insert(item *items, size_t num, kvf_error *err, const item *it) {
    size_t at = num;
    while (at > 0 && strcmp(items[at - 1].name, it->name) > 0) {
        at--;
    }
    if (at > 0 && strcmp(items[at - 1].name, it->name) == 0) {
        return kvfi_fail(err, KVF_LIMIT, "field \"%s\" of a space is given twice%s", it->name,
                         strcmp(it->name, "block_tokens") == 0 ? ": it is made from the options" : "");
    }
    memmove(items + at + 1, items + at, (num - at) * sizeof *items);
    items[at] = *it;
    return KVF_OK;
}

static kvf_status check_mandatory(kvf_error *err, const item *items, size_t num) {
    for (size_t m = 0; m < sizeof mandatory / sizeof *mandatory; m++) {
        bool there = false;
        for (size_t i = 0; i < num; i++) {
            there = there || (strcmp(items[i].name, mandatory[m]) == 0 && items[i].value_len > 0);
        }
        if (!there) {
            return kvfi_fail(err, KVF_REFUSED,
                             "the space has no field \"%s\": without engine, model and kv, blocks of different models "
                             "could not be told apart",
                             mandatory[m]);
        }
    }
    return KVF_OK;
}

static void hash_text(kvfi_sha *sha, const char *text, size_t len) {
    uint8_t size[4];
    kvfi_put32(size, (uint32_t)len);
    kvfi_sha_add(sha, size, 4);
    kvfi_sha_add(sha, text, len);
}

static void digest_of(uint8_t out[32], const kvfi_secret *secret, const item *items, size_t num) {
    kvfi_sha sha;
    kvfi_sha_init(&sha, secret);
    kvfi_sha_add(&sha, space_label, sizeof space_label);
    for (size_t i = 0; i < num; i++) {
        hash_text(&sha, items[i].name, items[i].name_len);
        hash_text(&sha, items[i].value, items[i].value_len);
    }
    kvfi_sha_end(&sha, out);
}

static kvf_status write_text(kvfi_identity *identity, kvf_error *err, const item *items, size_t num) {
    size_t len = 0;
    for (size_t i = 0; i < num; i++) {
        len += items[i].name_len + items[i].value_len + 2;
    }
    char *p = kvfi_alloc(len + 1);
    if (p == NULL) {
        return kvfi_fail(err, KVF_NOMEM, "no memory for the fields of a space");
    }
    identity->text = p;
    identity->text_len = len;
    for (size_t i = 0; i < num; i++) {
        memcpy(p, items[i].name, items[i].name_len);
        p += items[i].name_len;
        *p++ = '=';
        memcpy(p, items[i].value, items[i].value_len);
        p += items[i].value_len;
        *p++ = '\n';
    }
    *p = '\0';
    return KVF_OK;
}

kvf_status kvfi_secret_check(kvf_error *err, size_t len) {
    if (len < KVFI_MIN_SECRET_BYTES || len > KVFI_MAX_SECRET_BYTES) {
        return kvfi_fail(err, KVF_LIMIT, "a secret has %u to %u random bytes, not %zu: leave it out for none",
                         KVFI_MIN_SECRET_BYTES, KVFI_MAX_SECRET_BYTES, len);
    }
    return KVF_OK;
}

static kvf_status take_options(kvfi_identity *identity, kvf_error *err, const kvf_space_options *options) {
    uint32_t block_tokens = options == NULL ? 0 : options->block_tokens;
    size_t secret_len = options == NULL || options->secret == NULL ? 0 : options->secret_len;
    if (block_tokens == 0) {
        block_tokens = KVFI_DEFAULT_BLOCK_TOKENS;
    }
    if (block_tokens > KVFI_MAX_BLOCK_TOKENS) {
        return kvfi_fail(err, KVF_LIMIT, "block_tokens is %u; it must be a number from 1 to %u", block_tokens,
                         KVFI_MAX_BLOCK_TOKENS);
    }
    if (options != NULL && options->secret != NULL) {
        KVFI_TRY(kvfi_secret_check(err, secret_len));
    }
    identity->block_tokens = block_tokens;
    if (secret_len > 0) {
        kvfi_secret_init(&identity->secret, options->secret, secret_len);
        kvfi_seal_init(&identity->seal, &identity->secret);
    }
    return KVF_OK;
}

static kvf_status init(kvfi_identity *identity, kvf_error *err, const kvf_field *fields, size_t num_fields,
                       const kvf_space_options *options) {
    item items[KVFI_MAX_FIELDS + 1];
    size_t num = 0;
    char block_tokens[16];
    if (num_fields > KVFI_MAX_FIELDS) {
        return kvfi_fail(err, KVF_LIMIT, "a space has %zu fields; at most %u are allowed", num_fields, KVFI_MAX_FIELDS);
    }
    KVFI_TRY(take_options(identity, err, options));
    int len = snprintf(block_tokens, sizeof block_tokens, "%u", identity->block_tokens);
    items[num++] = (item){"block_tokens", block_tokens, sizeof "block_tokens" - 1, (size_t)len};
    for (size_t i = 0; i < num_fields; i++) {
        item it;
        KVFI_TRY(take_field(&it, err, &fields[i]));
        KVFI_TRY(insert(items, num, err, &it));
        num++;
    }
    KVFI_TRY(check_mandatory(err, items, num));
    digest_of(identity->digest.bytes, &identity->secret, items, num);
    digest_of(identity->root, NULL, items, num);
    return write_text(identity, err, items, num);
}

kvf_status kvfi_identity_init(kvfi_identity *out, kvf_error *err, const kvf_field *fields, size_t num_fields,
                              const kvf_space_options *options) {
    memset(out, 0, sizeof *out);
    kvf_status status = init(out, err, fields, num_fields, options);
    if (status != KVF_OK) {
        kvfi_identity_cleanup(out);
    }
    return status;
}

void kvfi_identity_cleanup(kvfi_identity *identity) {
    kvfi_free(identity->text);
    explicit_bzero(identity, sizeof *identity);
}
