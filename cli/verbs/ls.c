/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry ls: lists what is in a store. One walk over headers collects everything; printing follows.
 */
#include "common/cli.h"
#include "verbs/verbs.h"

#include <stdlib.h>
#include <string.h>

/* All blocks of one space in one tier. */
typedef struct space {
    uint32_t tier;
    kvf_digest digest;
    kvfcli_sum sum;
} space;

/* A block, or a session (which has a name and no key). */
typedef struct row {
    uint32_t tier;
    char *name;
    kvf_key key;
    uint64_t bytes;
    uint32_t first_token, num_tokens;
    int64_t stored_s, ttl_ms;
    kvf_reason damage;
    bool closed;
    bool sealed; /* opened or not */
} row;

typedef struct row_list {
    row *rows;
    size_t num, cap;
} row_list;

#define MAX_TIERS KVFCLI_MAX_STORES

typedef struct listing {
    space *spaces;
    size_t num_spaces, cap_spaces;
    row_list sessions, blocks;
    const kvf_digest *only; /* list the blocks of this space; NULL = spaces and sessions */
    uint64_t num_foreign[MAX_TIERS], num_damaged[MAX_TIERS];
    bool no_memory;
} listing;

static space *space_of(listing *l, uint32_t tier, const kvf_digest *digest) {
    /* Entries of one space are consecutive, so it is nearly always the last one. */
    for (size_t i = l->num_spaces; i-- > 0;) {
        if (l->spaces[i].tier == tier && memcmp(&l->spaces[i].digest, digest, sizeof *digest) == 0) {
            return &l->spaces[i];
        }
    }
    if (!kvfcli_grow(&l->spaces, &l->cap_spaces, l->num_spaces + 1, sizeof *l->spaces)) {
        return NULL;
    }
    l->spaces[l->num_spaces] = (space){.tier = tier, .digest = *digest};
    return &l->spaces[l->num_spaces++];
}

static bool add_to_space(listing *l, const kvf_entry *entry) {
    space *of = space_of(l, entry->tier, &entry->space);
    if (of != NULL && entry->kind == KVF_ENTRY_BLOCK) {
        kvfcli_sum_add(&of->sum, entry);
    }
    return of != NULL;
}

static bool add_row(row_list *list, const kvf_entry *entry) {
    if (!kvfcli_grow(&list->rows, &list->cap, list->num + 1, sizeof *list->rows)) {
        return false;
    }
    list->rows[list->num] = (row){.tier = entry->tier,
                                  .name = strdup(entry->name),
                                  .key = entry->key,
                                  .bytes = entry->stored_bytes,
                                  .first_token = entry->first_token,
                                  .num_tokens = entry->num_tokens,
                                  .stored_s = entry->stored_s,
                                  .ttl_ms = entry->ttl_ms,
                                  .damage = entry->damage,
                                  .closed = entry->seal == KVF_SEAL_CLOSED,
                                  .sealed = entry->seal != KVF_SEAL_NONE};
    return list->rows[list->num++].name != NULL;
}

static bool is_wanted_block(const listing *l, const kvf_entry *entry) {
    if (l->only == NULL || entry->kind != KVF_ENTRY_BLOCK) {
        return false;
    }
    /* Of a damaged record only its name is known: the first 8 bytes of the space. */
    return memcmp(entry->space.bytes, l->only->bytes, entry->damage == KVF_WHY_NONE ? 32 : 8) == 0;
}

static int collect(void *ctx, const kvf_entry *entry) {
    listing *l = ctx;
    bool ok = true;
    if (is_wanted_block(l, entry)) {
        ok = add_row(&l->blocks, entry);
    }
    if (entry->kind == KVF_ENTRY_FOREIGN) {
        l->num_foreign[entry->tier]++;
    } else if (entry->damage != KVF_WHY_NONE) {
        l->num_damaged[entry->tier]++;
    } else if (entry->kind == KVF_ENTRY_SESSION) {
        ok = add_row(&l->sessions, entry) && ok;
    } else {
        ok = add_to_space(l, entry) && ok;
    }
    l->no_memory = !ok;
    return ok ? 0 : 1;
}

static void free_rows(row_list *list) {
    for (size_t i = 0; i < list->num; i++) {
        free(list->rows[i].name);
    }
    free(list->rows);
}

static void free_listing(listing *l) {
    free(l->spaces);
    free_rows(&l->sessions);
    free_rows(&l->blocks);
}

static int in_prompt_order(const void *a, const void *b) {
    const row *x = a, *y = b;
    if (x->tier != y->tier) {
        return x->tier < y->tier ? -1 : 1;
    }
    if (x->first_token != y->first_token) {
        return x->first_token < y->first_token ? -1 : 1;
    }
    return memcmp(x->key.bytes, y->key.bytes, 32);
}

/* ---- for people ---- */

#define SPACE_ROW   "  %-16.16s %8s %10s %11s %9s %9s\n"
#define SESSION_ROW "  %-40s %11s %9s %9s\n"
#define BLOCK_ROW   "  %-16.16s %17s %11s %9s %9s%s%s\n"
static const char indent[] = "   ";

static void print_fields(kvf_store *store, const kvf_digest *digest) {
    char *fields = kvfcli_describe(store, digest);
    kvfcli_print_lines(
        indent, (int)strlen(indent),
        fields != NULL ? fields
                       : "(fields not known: its card is gone; the next process that stores there writes it again)");
    kvf_free(fields);
}

static void print_space(kvf_store *store, const space *of) {
    char hex[KVFCLI_HEX32], blocks[KVFCLI_TEXT], tokens[KVFCLI_TEXT], size[KVFCLI_TEXT], newest[KVFCLI_TEXT],
        oldest[KVFCLI_TEXT];
    const kvfcli_sum *sum = &of->sum;
    kvfcli_hex(hex, of->digest.bytes);
    snprintf(blocks, sizeof blocks, "%llu", (unsigned long long)sum->num_blocks);
    snprintf(tokens, sizeof tokens, "%llu", (unsigned long long)sum->num_tokens);
    /* Without the secret of a space its tokens can't be counted. */
    printf(SPACE_ROW, hex, blocks, sum->num_closed > 0 ? "sealed" : tokens, kvfcli_size(size, sum->bytes),
           kvfcli_age(newest, sum->newest_s), kvfcli_age(oldest, sum->oldest_s));
    if (sum->num_closed > 0) {
        printf("%s (sealed: give --secret-file with its secret to see fields and tokens)\n", indent);
        return;
    }
    if (sum->num_opened > 0) {
        printf("%s (sealed, and opened with the secret that was given)\n", indent);
    }
    print_fields(store, &of->digest);
}

static void print_spaces(kvf_store *store, const listing *l, uint32_t tier) {
    bool any = false;
    for (size_t i = 0; i < l->num_spaces; i++) {
        if (l->spaces[i].tier != tier) {
            continue;
        }
        if (!any) {
            printf(SPACE_ROW, "SPACE", "BLOCKS", "TOKENS", "SIZE", "NEWEST", "OLDEST");
        }
        any = true;
        print_space(store, &l->spaces[i]);
    }
    if (!any) {
        printf("  no blocks\n");
    }
}

static void print_session(const row *r) {
    char size[KVFCLI_TEXT], age[KVFCLI_TEXT], ttl[KVFCLI_TEXT];
    printf(SESSION_ROW, r->name[0] != '\0' ? kvfcli_shown(r->name) : "(sealed: inspect --session ID --sealed)",
           kvfcli_size(size, r->bytes), kvfcli_age(age, r->stored_s),
           r->ttl_ms == -2 ? "?" : kvfcli_span(ttl, r->ttl_ms));
}

static void print_block(const row *r) {
    char hex[KVFCLI_HEX32], size[KVFCLI_TEXT], age[KVFCLI_TEXT], ttl[KVFCLI_TEXT], range[KVFCLI_TEXT] = "?";
    bool damaged = r->damage != KVF_WHY_NONE;
    kvfcli_hex(hex, r->key.bytes);
    if (r->num_tokens > 0) {
        snprintf(range, sizeof range, "%u - %u", r->first_token, r->first_token + r->num_tokens - 1);
    }
    printf(BLOCK_ROW, hex, r->closed ? "sealed" : range, kvfcli_size(size, r->bytes), kvfcli_age(age, r->stored_s),
           kvfcli_span(ttl, r->ttl_ms), damaged ? "  damaged: " : "", damaged ? kvf_reason_name(r->damage) : "");
}

static void print_sessions(const listing *l, uint32_t tier) {
    bool any = false;
    for (size_t i = 0; i < l->sessions.num; i++) {
        if (l->sessions.rows[i].tier == tier) {
            if (!any) {
                printf(SESSION_ROW, "SESSION", "SIZE", "AGE", "EXPIRES");
            }
            any = true;
            print_session(&l->sessions.rows[i]);
        }
    }
}

static void print_blocks(const listing *l, uint32_t tier) {
    bool any = false;
    for (size_t i = 0; i < l->blocks.num; i++) {
        if (l->blocks.rows[i].tier == tier) {
            if (!any) {
                printf(BLOCK_ROW, "KEY", "TOKENS", "SIZE", "AGE", "EXPIRES", "", "");
            }
            any = true;
            print_block(&l->blocks.rows[i]);
        }
    }
}

static void print_rest(const listing *l, uint32_t tier) {
    if (l->num_damaged[tier] > 0) {
        printf("  %llu damaged (kvferry verify lists them)\n", (unsigned long long)l->num_damaged[tier]);
    }
    if (l->num_foreign[tier] > 0) {
        printf("  %llu not of kvferry\n", (unsigned long long)l->num_foreign[tier]);
    }
}

static void print_listing(kvf_store *store, const listing *l, uint32_t num_tiers) {
    for (uint32_t tier = 0; tier < num_tiers; tier++) {
        char url[256];
        kvfcli_tier_url(store, tier, url);
        printf("%s\n", kvfcli_shown(url));
        if (l->only != NULL) {
            print_blocks(l, tier);
            continue;
        }
        print_spaces(store, l, tier);
        print_sessions(l, tier);
        print_rest(l, tier);
    }
}

/* ---- for programs ---- */

static json_t *space_json(kvf_store *store, const space *of) {
    const kvfcli_sum *sum = &of->sum;
    char *fields = kvfcli_describe(store, &of->digest);
    json_t *json =
        json_pack("{s:o, s:o, s:I, s:o, s:I, s:I, s:I, s:I, s:I}", "space", kvfcli_json_hex(of->digest.bytes), "fields",
                  kvfcli_json_fields(fields), "num_blocks", (json_int_t)sum->num_blocks, "num_tokens",
                  kvfcli_json_known(sum->num_closed == 0, sum->num_tokens), "stored_bytes", (json_int_t)sum->bytes,
                  "oldest_s", (json_int_t)sum->oldest_s, "newest_s", (json_int_t)sum->newest_s, "num_sealed",
                  (json_int_t)sum->num_closed, "num_opened", (json_int_t)sum->num_opened);
    kvf_free(fields);
    return json;
}

static json_t *block_json(const row *r) {
    return json_pack("{s:o, s:o, s:o, s:I, s:I, s:I, s:s?, s:b}", "key", kvfcli_json_hex(r->key.bytes), "first_token",
                     kvfcli_json_known(!r->closed, r->first_token), "num_tokens",
                     kvfcli_json_known(!r->closed, r->num_tokens), "stored_bytes", (json_int_t)r->bytes, "stored_s",
                     (json_int_t)r->stored_s, "ttl_ms", (json_int_t)r->ttl_ms, "damage",
                     r->damage != KVF_WHY_NONE ? kvf_reason_name(r->damage) : NULL, "sealed", r->closed);
}

static json_t *session_json(const row *r) {
    return json_pack("{s:o, s:I, s:I, s:o, s:b}", "session",
                     r->name[0] != '\0' ? kvfcli_json_text(r->name) : json_null(), "stored_bytes", (json_int_t)r->bytes,
                     "stored_s", (json_int_t)r->stored_s, "ttl_ms",
                     r->ttl_ms == -2 ? json_null() : json_integer((json_int_t)r->ttl_ms), "sealed", r->sealed);
}

static json_t *rows_json(const row_list *list, uint32_t tier, json_t *(*to_json)(const row *)) {
    json_t *array = json_array();
    for (size_t i = 0; i < list->num; i++) {
        if (list->rows[i].tier == tier) {
            json_array_append_new(array, to_json(&list->rows[i]));
        }
    }
    return array;
}

static json_t *tier_json(kvf_store *store, const listing *l, uint32_t tier) {
    char url[256];
    json_t *spaces = json_array();
    kvfcli_tier_url(store, tier, url);
    for (size_t i = 0; i < l->num_spaces; i++) {
        if (l->spaces[i].tier == tier) {
            json_array_append_new(spaces, space_json(store, &l->spaces[i]));
        }
    }
    json_t *json = json_pack("{s:o, s:o, s:o, s:I, s:I}", "url", kvfcli_json_text(url), "spaces", spaces, "sessions",
                             rows_json(&l->sessions, tier, session_json), "num_damaged",
                             (json_int_t)l->num_damaged[tier], "num_foreign", (json_int_t)l->num_foreign[tier]);
    if (l->only != NULL) {
        json_object_set_new(json, "blocks", rows_json(&l->blocks, tier, block_json));
    }
    return json;
}

static json_t *listing_json(kvf_store *store, const listing *l, uint32_t num_tiers) {
    json_t *tiers = json_array();
    for (uint32_t tier = 0; tier < num_tiers; tier++) {
        json_array_append_new(tiers, tier_json(store, l, tier));
    }
    return json_pack("{s:o}", "tiers", tiers);
}

/* ---- */

static int list(listing *l, kvf_store *store, const kvfcli_common *common) {
    kvf_walk_options options = {.struct_size = sizeof options, .space = l->only};
    int code = kvfcli_walk(store, collect, l, &options);
    if (code != KVFCLI_FINE || l->no_memory) {
        return l->no_memory ? kvfcli_no_memory() : code;
    }
    if (l->blocks.num > 0) {
        qsort(l->blocks.rows, l->blocks.num, sizeof *l->blocks.rows, in_prompt_order);
    }
    if (common->json) {
        return kvfcli_print_json(listing_json(store, l, (uint32_t)common->num_urls), KVFCLI_FINE);
    }
    print_listing(store, l, (uint32_t)common->num_urls);
    return KVFCLI_FINE;
}

static int work(void *ctx, kvf_store *store, const kvfcli_common *common) {
    const char *const *prefix = ctx;
    kvfcli_named found;
    listing l = {.only = NULL};
    if (*prefix != NULL) {
        int code = kvfcli_find(store, &found, KVFCLI_SPACES, *prefix, NULL);
        if (code != KVFCLI_FINE) {
            return code;
        }
        l.only = &found.space;
    }
    int code = list(&l, store, common);
    free_listing(&l);
    return code;
}

static int check(void *ctx, const kvfcli_common *common, int argc, char **argv) {
    const char **prefix = ctx;
    (void)common;
    *prefix = argc > 0 ? argv[0] : NULL;
    return argc > 1 ? kvfcli_usage("one SPACE at most") : kvfcli_check_hex(*prefix);
}

int kvfcli_ls(int argc, char **argv) {
    static const kvfcli_verb verb = {
        .help = "usage: kvferry ls [SPACE] [options]\n"
                "\n"
                "Lists the spaces of a store (which model, how many blocks, how large, how old) and its\n"
                "sessions. With SPACE (the first digits of one are enough) lists the blocks of that space.\n"
                "\n"
                "  kvferry ls                               what is in the store\n"
                "  kvferry ls 6053e2b9                      the blocks of one space, in the order of the prompt\n"
                "  kvferry inspect 1f0c5a                   one of these blocks, in full\n",
        .exits = "Exit codes: 0; 1 when no space begins with SPACE.\n",
        .check = check,
        .work = work};
    const char *prefix = NULL;
    return kvfcli_verb_main(&verb, &prefix, argc, argv);
}
