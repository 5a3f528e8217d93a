/* SPDX-License-Identifier: Apache-2.0
 *
 * Finds spaces and blocks in a store by the first digits of their names.
 */
#include "common/cli.h"

#include <string.h>

typedef struct guarded {
    kvf_visit_fn visit;
    void *ctx;
} guarded;

static int visit_unless_interrupted(void *ctx, const kvf_entry *entry) {
    const guarded *g = ctx;
    return kvfcli_interrupted() ? 1 : g->visit(g->ctx, entry);
}

int kvfcli_walk(kvf_store *store, kvf_visit_fn visit, void *ctx, const kvf_walk_options *options) {
    kvf_error err = {.status = KVF_OK};
    guarded g = {.visit = visit, .ctx = ctx};
    kvf_status status = kvf_walk(store, &err, visit_unless_interrupted, &g, options);
    if (kvfcli_interrupted()) {
        return KVFCLI_INTERRUPTED;
    }
    if (status != KVF_OK) {
        err.status = status;
        return kvfcli_fail(&err);
    }
    return KVFCLI_FINE;
}

typedef struct space_search {
    const char *prefix;
    kvf_digest space;
    bool found, ambiguous;
} space_search;

static bool of_a_space(const kvf_entry *entry) {
    return (entry->kind == KVF_ENTRY_BLOCK || entry->kind == KVF_ENTRY_SPACE_CARD) && entry->damage == KVF_WHY_NONE;
}

static int match_space(void *ctx, const kvf_entry *entry) {
    space_search *search = ctx;
    if (!of_a_space(entry) || !kvfcli_has_prefix(entry->space.bytes, search->prefix)) {
        return 0;
    }
    if (search->found && memcmp(&search->space, &entry->space, sizeof entry->space) != 0) {
        search->ambiguous = true;
        return 1;
    }
    search->found = true;
    search->space = entry->space;
    return 0;
}

int kvfcli_find_space(kvf_store *store, kvf_digest *out, const char *hex_prefix) {
    space_search search = {.prefix = hex_prefix};
    kvf_digest whole;
    /* A complete digest avoids the walk over other spaces. */
    kvf_walk_options options = {.struct_size = sizeof options,
                                .space = kvfcli_unhex(whole.bytes, hex_prefix) ? &whole : NULL};
    int code = kvfcli_walk(store, match_space, &search, &options);
    if (code != KVFCLI_FINE) {
        return code;
    }
    if (search.ambiguous) {
        kvfcli_say("several spaces begin with %s: give more digits", hex_prefix);
        return KVFCLI_USAGE;
    }
    if (!search.found) {
        kvfcli_say("no space begins with %s", hex_prefix);
        return KVFCLI_FOUND;
    }
    *out = search.space;
    return KVFCLI_FINE;
}

/* ---- records ---- */

typedef struct record_search {
    const char *space_prefix, *key_prefix;
    kvfcli_record record;
    bool found, ambiguous;
} record_search;

static bool same_record(const kvfcli_record *record, const kvf_entry *entry) {
    /* The name of a damaged record shows only 8 bytes of its space. */
    return memcmp(record->space.bytes, entry->space.bytes, 8) == 0 &&
           memcmp(&record->key, &entry->key, sizeof entry->key) == 0;
}

void kvfcli_record_of(kvfcli_record *out, const kvf_entry *entry) {
    out->space = entry->space;
    out->key = entry->key;
    out->damage = entry->damage;
    out->tier = entry->tier;
    out->stored_bytes = entry->stored_bytes;
    out->ttl_ms = entry->ttl_ms;
    snprintf(out->name, sizeof out->name, "%s", entry->name);
}

static int match_record(void *ctx, const kvf_entry *entry) {
    record_search *search = ctx;
    if (entry->kind != KVF_ENTRY_BLOCK || !kvfcli_has_prefix(entry->key.bytes, search->key_prefix) ||
        (search->space_prefix != NULL && !kvfcli_has_prefix(entry->space.bytes, search->space_prefix))) {
        return 0;
    }
    if (search->found && !same_record(&search->record, entry)) {
        search->ambiguous = true;
        return 1;
    }
    if (!search->found || search->record.damage != KVF_WHY_NONE) {
        kvfcli_record_of(&search->record, entry); /* a copy in another tier may be undamaged */
    }
    search->found = true;
    return 0;
}

int kvfcli_find_record(kvf_store *store, kvfcli_record *out, const char *space_prefix, const char *key_prefix) {
    record_search search = {.space_prefix = space_prefix, .key_prefix = key_prefix};
    int code = kvfcli_walk(store, match_record, &search, NULL);
    if (code != KVFCLI_FINE) {
        return code;
    }
    if (search.ambiguous) {
        kvfcli_say("several blocks begin with %s: give more digits", key_prefix);
        return KVFCLI_USAGE;
    }
    if (!search.found) {
        kvfcli_say("no block begins with %s", key_prefix);
        return KVFCLI_FOUND;
    }
    *out = search.record;
    return KVFCLI_FINE;
}

int kvfcli_read_record(kvf_store *store, const kvfcli_record *record, kvf_visit_fn visit, void *ctx) {
    kvf_walk_options options = {.struct_size = sizeof options,
                                .whole = 1,
                                .space = &record->space,
                                .key = &record->key,
                                .budget_us = KVF_MS(30000)};
    return kvfcli_walk(store, visit, ctx, &options);
}
