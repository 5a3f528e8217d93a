/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry ls: lists what is in a store. One walk over headers collects everything; printing follows.
 */
#include "common/cli.h"
#include "verbs/verbs.h"

#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: kvferry ls [SPACE] [options]\n"
    "\n"
    "Lists the spaces of a store (which model, how many blocks, how large, how old) and its sessions.\n"
    "With SPACE (the first digits of one are enough) lists the blocks of that space.\n"
    "\n"
    "Options:\n" KVFCLI_COMMON_HELP "\n"
    "Exit codes: 0; 1 when no space begins with SPACE.\n";

/* All blocks of one space in one tier. */
typedef struct space_sum {
    uint32_t tier;
    kvf_digest digest;
    uint64_t num_blocks, num_tokens, bytes;
    uint64_t num_closed, num_opened; /* of them, sealed under a secret that was not given */
    int64_t oldest_s, newest_s;      /* 0 = unknown */
} space_sum;

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
    space_sum *spaces;
    size_t num_spaces, cap_spaces;
    row_list sessions, blocks;
    const kvf_digest *only; /* list the blocks of this space; NULL = spaces and sessions */
    uint64_t num_foreign[MAX_TIERS], num_damaged[MAX_TIERS];
    bool no_memory;
} listing;

static bool grow(void **array, size_t *cap, size_t num, size_t size) {
    if (num < *cap) {
        return true;
    }
    size_t larger = *cap == 0 ? 64 : *cap * 2;
    void *moved = reallocarray(*array, larger, size);
    if (moved == NULL) {
        return false;
    }
    *array = moved;
    *cap = larger;
    return true;
}

static space_sum *sum_of(listing *l, uint32_t tier, const kvf_digest *digest) {
    /* Entries of one space are consecutive, so it is nearly always the last one. */
    for (size_t i = l->num_spaces; i-- > 0;) {
        if (l->spaces[i].tier == tier && memcmp(&l->spaces[i].digest, digest, sizeof *digest) == 0) {
            return &l->spaces[i];
        }
    }
    if (!grow((void **)&l->spaces, &l->cap_spaces, l->num_spaces, sizeof *l->spaces)) {
        return NULL;
    }
    space_sum *sum = &l->spaces[l->num_spaces++];
    *sum = (space_sum){.tier = tier};
    sum->digest = *digest;
    return sum;
}

static bool add_block(listing *l, const kvf_entry *entry) {
    space_sum *sum = sum_of(l, entry->tier, &entry->space);
    if (sum == NULL) {
        return false;
    }
    if (entry->kind == KVF_ENTRY_SPACE_CARD) {
        return true;
    }
    sum->num_blocks++;
    sum->num_closed += entry->seal == KVF_SEAL_CLOSED;
    sum->num_opened += entry->seal == KVF_SEAL_OPENED;
    sum->num_tokens += entry->num_tokens;
    sum->bytes += entry->stored_bytes;
    if (entry->stored_s != 0 && (sum->oldest_s == 0 || entry->stored_s < sum->oldest_s)) {
        sum->oldest_s = entry->stored_s;
    }
    if (entry->stored_s > sum->newest_s) {
        sum->newest_s = entry->stored_s;
    }
    return true;
}

static bool add_row(row_list *list, const kvf_entry *entry) {
    if (!grow((void **)&list->rows, &list->cap, list->num, sizeof *list->rows)) {
        return false;
    }
    row *r = &list->rows[list->num];
    *r = (row){.tier = entry->tier,
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
    if (r->name == NULL) {
        return false;
    }
    list->num++;
    return true;
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
        ok = add_block(l, entry) && ok;
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

static void print_fields(const char *description) {
    if (description == NULL) {
        printf("    (fields not known: its card is gone; the next process that stores there writes it again)\n");
        return;
    }
    for (const char *line = description; *line != '\0';) {
        size_t len = strcspn(line, "\n");
        printf("    %s\n", kvfcli_shown_n(line, len));
        line += len + (line[len] == '\n');
    }
}

static char *describe(kvf_store *store, const kvf_digest *space) {
    char *text = NULL;
    return kvf_space_describe(store, &text, NULL, space) == KVF_OK ? text : NULL;
}

/* Without the secret of a space its tokens can't be counted. */
static const char *count_tokens(char out[KVFCLI_TEXT], const space_sum *sum) {
    snprintf(out, KVFCLI_TEXT, sum->num_closed > 0 ? "sealed" : "%llu", (unsigned long long)sum->num_tokens);
    return out;
}

static void print_space(kvf_store *store, const space_sum *sum) {
    char hex[KVFCLI_HEX32], tokens[KVFCLI_TEXT], size[KVFCLI_TEXT], newest[KVFCLI_TEXT], oldest[KVFCLI_TEXT];
    kvfcli_hex(hex, sum->digest.bytes);
    printf("  %-16.16s %8llu %10s %11s %9s %9s\n", hex, (unsigned long long)sum->num_blocks, count_tokens(tokens, sum),
           kvfcli_size(size, sum->bytes), kvfcli_age(newest, sum->newest_s), kvfcli_age(oldest, sum->oldest_s));
    if (sum->num_closed > 0) {
        printf("    (sealed: give --secret-file to see fields and tokens)\n");
        return;
    }
    if (sum->num_opened > 0) {
        printf("    (sealed, and opened with the secret that was given)\n");
    }
    char *fields = describe(store, &sum->digest);
    print_fields(fields);
    kvf_free(fields);
}

static void print_spaces(kvf_store *store, const listing *l, uint32_t tier) {
    bool any = false;
    for (size_t i = 0; i < l->num_spaces; i++) {
        if (l->spaces[i].tier == tier) {
            if (!any) {
                printf("  %-16s %8s %10s %11s %9s %9s\n", "SPACE", "BLOCKS", "TOKENS", "SIZE", "NEWEST", "OLDEST");
            }
            any = true;
            print_space(store, &l->spaces[i]);
        }
    }
    if (!any) {
        printf("  no blocks\n");
    }
}

static void print_sessions(const listing *l, uint32_t tier) {
    bool any = false;
    for (size_t i = 0; i < l->sessions.num; i++) {
        const row *r = &l->sessions.rows[i];
        char size[KVFCLI_TEXT], age[KVFCLI_TEXT], ttl[KVFCLI_TEXT];
        if (r->tier == tier) {
            if (!any) {
                printf("  %-40s %11s %9s %9s\n", "SESSION", "SIZE", "AGE", "EXPIRES");
            }
            any = true;
            bool named = r->name[0] != '\0';
            printf("  %-40s %11s %9s %9s\n", named ? kvfcli_shown(r->name) : "(sealed: inspect --session ID --sealed)",
                   kvfcli_size(size, r->bytes), kvfcli_age(age, r->stored_s),
                   r->ttl_ms == -2 ? "?" : kvfcli_span(ttl, r->ttl_ms));
        }
    }
}

static void print_blocks(const listing *l, uint32_t tier) {
    bool any = false;
    for (size_t i = 0; i < l->blocks.num; i++) {
        const row *r = &l->blocks.rows[i];
        char hex[KVFCLI_HEX32], size[KVFCLI_TEXT], age[KVFCLI_TEXT], ttl[KVFCLI_TEXT], range[KVFCLI_TEXT] = "?";
        if (r->tier != tier) {
            continue;
        }
        if (!any) {
            printf("  %-16s %17s %11s %9s %9s\n", "KEY", "TOKENS", "SIZE", "AGE", "EXPIRES");
        }
        any = true;
        kvfcli_hex(hex, r->key.bytes);
        if (r->closed) {
            snprintf(range, sizeof range, "sealed");
        } else if (r->num_tokens > 0) {
            snprintf(range, sizeof range, "%u - %u", r->first_token, r->first_token + r->num_tokens - 1);
        }
        printf("  %-16.16s %17s %11s %9s %9s%s%s\n", hex, range, kvfcli_size(size, r->bytes),
               kvfcli_age(age, r->stored_s), kvfcli_span(ttl, r->ttl_ms),
               r->damage != KVF_WHY_NONE ? "  damaged: " : "",
               r->damage != KVF_WHY_NONE ? kvf_reason_name(r->damage) : "");
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

static json_t *space_json(kvf_store *store, const space_sum *sum) {
    char *fields = describe(store, &sum->digest);
    json_t *json =
        json_pack("{s:o, s:o, s:I, s:o, s:I, s:I, s:I, s:I, s:I}", "space", kvfcli_json_hex(sum->digest.bytes),
                  "fields", kvfcli_json_fields(fields), "num_blocks", (json_int_t)sum->num_blocks, "num_tokens",
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

static int work(void *ctx, kvf_store *store, const kvfcli_common *common) {
    const char *const *prefix = ctx;
    kvf_digest space;
    listing l = {.only = NULL};
    kvf_walk_options options = {.struct_size = sizeof options};
    if (*prefix != NULL) {
        int code = kvfcli_find_space(store, &space, *prefix);
        if (code != KVFCLI_FINE) {
            return code;
        }
        l.only = &space;
        options.space = &space;
    }
    int code = kvfcli_walk(store, collect, &l, &options);
    if (code == KVFCLI_FINE && l.no_memory) {
        kvfcli_say("no memory for the list of what is stored");
        code = KVFCLI_IO;
    }
    if (l.blocks.num > 0) {
        qsort(l.blocks.rows, l.blocks.num, sizeof *l.blocks.rows, in_prompt_order);
    }
    if (code == KVFCLI_FINE && common->json) {
        code = kvfcli_print_json(listing_json(store, &l, (uint32_t)common->num_urls), code);
    } else if (code == KVFCLI_FINE) {
        print_listing(store, &l, (uint32_t)common->num_urls);
    }
    free_listing(&l);
    return code;
}

static int check(void *ctx, const kvfcli_common *common, int argc, char **argv) {
    const char **prefix = ctx;
    if (argc > 1) {
        return kvfcli_usage(common, "one SPACE at most");
    }
    if (argc == 1 && !kvfcli_is_hex(argv[0])) {
        return kvfcli_usage(common, "\"%s\" is not the beginning of a space: hex digits are", argv[0]);
    }
    *prefix = argc == 1 ? argv[0] : NULL;
    return KVFCLI_FINE;
}

int kvfcli_ls(int argc, char **argv) {
    static const struct option options[] = {KVFCLI_COMMON_OPTIONS, {0}};
    static const kvfcli_verb verb = {.help = help, .options = options, .letters = "", .check = check, .work = work};
    const char *prefix = NULL;
    return kvfcli_verb_main(&verb, &prefix, argc, argv);
}
