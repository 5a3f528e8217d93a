/* SPDX-License-Identifier: Apache-2.0
 *
 * Finds spaces and blocks in a store by the first digits of their names, and adds up what a space holds.
 */
#include "common/cli.h"

#include <string.h>

/* ---- walks ---- */

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
    return status == KVF_OK ? KVFCLI_FINE : kvfcli_fail(status, &err);
}

/* ---- names ---- */

typedef struct search {
    kvfcli_kinds kinds;
    const char *name, *space;
    kvfcli_named thing;
    bool found, ambiguous;
} search;

/* The name of a damaged record shows only 8 bytes of its space. */
static bool is_same(const kvfcli_named *thing, const kvf_entry *entry, bool as_block) {
    if (thing->is_block != as_block) {
        return false;
    }
    return as_block ? memcmp(thing->space.bytes, entry->space.bytes, 8) == 0 &&
                          memcmp(&thing->key, &entry->key, sizeof entry->key) == 0
                    : memcmp(&thing->space, &entry->space, sizeof entry->space) == 0;
}

static void note(search *s, const kvf_entry *entry, bool as_block) {
    if (s->found && !is_same(&s->thing, entry, as_block)) {
        s->ambiguous = true;
        return;
    }
    if (s->found && s->thing.damage == KVF_WHY_NONE) {
        return;
    }
    s->found = true; /* or a copy in another tier, which may be undamaged */
    s->thing = (kvfcli_named){.is_block = as_block,
                              .space = entry->space,
                              .key = entry->key,
                              .damage = entry->damage,
                              .tier = entry->tier,
                              .stored_bytes = entry->stored_bytes,
                              .ttl_ms = entry->ttl_ms};
    snprintf(s->thing.name, sizeof s->thing.name, "%s", entry->name);
}

static int meet(void *ctx, const kvf_entry *entry) {
    search *s = ctx;
    bool is_block = entry->kind == KVF_ENTRY_BLOCK;
    if (!is_block && entry->kind != KVF_ENTRY_SPACE_CARD) {
        return 0;
    }
    if ((s->kinds & KVFCLI_SPACES) != 0 && entry->damage == KVF_WHY_NONE &&
        kvfcli_has_prefix(entry->space.bytes, s->name)) {
        note(s, entry, false);
    }
    if ((s->kinds & KVFCLI_BLOCKS) != 0 && is_block && kvfcli_has_prefix(entry->key.bytes, s->name) &&
        (s->space == NULL || kvfcli_has_prefix(entry->space.bytes, s->space))) {
        note(s, entry, true);
    }
    return s->ambiguous;
}

int kvfcli_find(kvf_store *store, kvfcli_named *out, kvfcli_kinds kinds, const char *name, const char *space) {
    static const char *const nouns[] = {"", "space", "block", "space or block"};
    search s = {.kinds = kinds, .name = name, .space = space};
    kvf_digest whole;
    /* A complete digest avoids the walk over other spaces. */
    bool direct = kinds == KVFCLI_SPACES && kvfcli_unhex(whole.bytes, name);
    kvf_walk_options options = {.struct_size = sizeof options, .space = direct ? &whole : NULL};
    int code = kvfcli_walk(store, meet, &s, &options);
    if (code != KVFCLI_FINE) {
        return code;
    }
    if (s.ambiguous) {
        kvfcli_say("more than one %s begins with %s: give more digits", nouns[kinds], name);
        return KVFCLI_USAGE;
    }
    if (!s.found) {
        kvfcli_say("no %s begins with %s", nouns[kinds], name);
        return KVFCLI_FOUND;
    }
    *out = s.thing;
    return KVFCLI_FINE;
}

int kvfcli_read_block(kvf_store *store, const kvfcli_named *block, kvf_visit_fn visit, void *ctx) {
    kvf_walk_options options = {.struct_size = sizeof options,
                                .whole = 1,
                                .space = &block->space,
                                .key = &block->key,
                                .budget_us = KVF_MS(30000)};
    return kvfcli_walk(store, visit, ctx, &options);
}

/* ---- spaces ---- */

char *kvfcli_describe(kvf_store *store, const kvf_digest *space) {
    char *text = NULL;
    return kvf_space_describe(store, &text, NULL, space) == KVF_OK ? text : NULL;
}

void kvfcli_sum_add(kvfcli_sum *sum, const kvf_entry *block) {
    sum->num_blocks++;
    sum->num_closed += block->seal == KVF_SEAL_CLOSED;
    sum->num_opened += block->seal == KVF_SEAL_OPENED;
    sum->num_tokens += block->num_tokens;
    sum->bytes += block->stored_bytes;
    if (block->stored_s != 0 && (sum->oldest_s == 0 || block->stored_s < sum->oldest_s)) {
        sum->oldest_s = block->stored_s;
    }
    if (block->stored_s > sum->newest_s) {
        sum->newest_s = block->stored_s;
    }
}
