/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry explain: says what of a prompt is stored, and why the rest is not. Reads the headers of all records of the
 * store, and a few whole ones, so it is for people, not for the hot path.
 */
#include "run/run.h"

#include <stdlib.h>
#include <string.h>

#define MAX_CANDIDATES 256u /* records that may hold the same beginning, or continue it */
#define MAX_SPACES     64u
#define CONTEXT_TOKENS 6u /* shown from the first different token on */

typedef struct candidate {
    kvf_digest space;
    kvf_key key;
    bool ours;
} candidate;

typedef struct other_space {
    kvf_digest digest;
    uint64_t num_blocks;
    size_t same;  /* leading tokens of this prompt that its blocks begin with */
    char *fields; /* NULL: not known */
    bool same_model;
} other_space;

typedef struct explanation {
    const kvfcli_run_state *run;
    kvf_store *store;
    kvf_space *space;
    kvf_digest digest;
    size_t block_tokens, num_blocks;
    kvf_key *keys, *stored_keys; /* the names of the blocks, and their keys in the store */
    kvf_found *found;
    size_t matched;      /* blocks */
    uint64_t our_blocks; /* in the store, of this space */
    uint64_t num_closed; /* sealed under a secret that was not given: of any space, perhaps this one */
    size_t later;        /* the number of this prompt's blocks that are stored after the gap */
    candidate *candidates;
    size_t num_candidates;
    other_space *spaces;
    size_t num_spaces;
    /* the record that continues the matched blocks with the most common tokens */
    bool goes_on, ends; /* ends: all of its tokens are in the prompt, it is only shorter */
    size_t differs_at;
    uint32_t theirs[CONTEXT_TOKENS];
    size_t num_theirs;
    size_t other_template; /* blocks that would match with --raw, or without it */
} explanation;

/* ---- what lies in the store ---- */

static other_space *space_of(explanation *e, const kvf_digest *digest) {
    for (size_t i = 0; i < e->num_spaces; i++) {
        if (memcmp(&e->spaces[i].digest, digest, sizeof *digest) == 0) {
            return &e->spaces[i];
        }
    }
    if (e->num_spaces == MAX_SPACES) {
        return NULL;
    }
    other_space *s = &e->spaces[e->num_spaces++];
    *s = (other_space){0};
    s->digest = *digest;
    return s;
}

static void note_candidate(explanation *e, const kvf_entry *entry, bool ours) {
    if (e->num_candidates < MAX_CANDIDATES) {
        candidate *c = &e->candidates[e->num_candidates++];
        c->space = entry->space;
        c->key = entry->key;
        c->ours = ours;
    }
}

static void note_ours(explanation *e, const kvf_entry *entry) {
    e->our_blocks++;
    for (size_t i = e->matched; i < e->num_blocks; i++) {
        e->later += memcmp(&e->stored_keys[i], &entry->key, sizeof entry->key) == 0;
    }
    if (entry->first_token == e->matched * e->block_tokens && entry->num_tokens > 0) {
        note_candidate(e, entry, true);
    }
}

static int see(void *ctx, const kvf_entry *entry) {
    explanation *e = ctx;
    if (entry->damage != KVF_WHY_NONE || (entry->kind != KVF_ENTRY_BLOCK && entry->kind != KVF_ENTRY_SPACE_CARD)) {
        return 0;
    }
    bool ours = memcmp(&entry->space, &e->digest, sizeof entry->space) == 0;
    e->num_closed += entry->kind == KVF_ENTRY_BLOCK && entry->seal == KVF_SEAL_CLOSED;
    if (ours && entry->kind == KVF_ENTRY_BLOCK) {
        note_ours(e, entry);
    } else if (!ours) {
        other_space *s = space_of(e, &entry->space);
        if (s != NULL && entry->kind == KVF_ENTRY_BLOCK) {
            s->num_blocks++;
            if (entry->first_token == 0 && entry->num_tokens > 0) {
                note_candidate(e, entry, false);
            }
        }
    }
    return 0;
}

/* ---- what continues from there ---- */

typedef struct reading {
    explanation *e;
    const candidate *c;
} reading;

static size_t common(const explanation *e, size_t from, const uint32_t *tokens, size_t num) {
    size_t same = 0;
    while (same < num && from + same < e->run->prompt.num &&
           tokens[same] == (uint32_t)e->run->prompt.ids[from + same]) {
        same++;
    }
    return same;
}

/* Whether the record is the block after the matched ones, by its key. (The key of a tail is of another kind; its place
 * and tokens decide.) */
static bool is_next(const explanation *e, const kvf_entry *entry) {
    size_t before = e->matched * e->block_tokens, num = before + e->block_tokens;
    if (entry->num_tokens != e->block_tokens) {
        return true;
    }
    uint32_t *tokens = malloc(num * sizeof *tokens);
    kvf_key *keys = malloc((e->matched + 1) * sizeof *keys);
    bool same = false;
    if (tokens != NULL && keys != NULL) {
        for (size_t i = 0; i < before; i++) {
            tokens[i] = (uint32_t)e->run->prompt.ids[i];
        }
        memcpy(tokens + before, entry->tokens, e->block_tokens * sizeof *tokens);
        kvf_key stored;
        kvf_chain(e->space, keys, e->matched + 1, tokens, num);
        kvf_stored_key(e->space, &stored, &keys[e->matched]);
        same = memcmp(&stored, &entry->key, sizeof entry->key) == 0;
    }
    free(tokens);
    free(keys);
    return same;
}

static void note_next(explanation *e, const kvf_entry *entry) {
    size_t from = e->matched * e->block_tokens, same = common(e, from, entry->tokens, entry->num_tokens);
    if ((e->goes_on && from + same <= e->differs_at) || !is_next(e, entry)) {
        return;
    }
    e->goes_on = true;
    e->ends = same == entry->num_tokens;
    e->differs_at = from + same;
    e->num_theirs = entry->num_tokens - same < CONTEXT_TOKENS ? entry->num_tokens - same : CONTEXT_TOKENS;
    memcpy(e->theirs, entry->tokens + same, e->num_theirs * sizeof *e->theirs);
}

static int read_candidate(void *ctx, const kvf_entry *entry) {
    reading *r = ctx;
    explanation *e = r->e;
    if (entry->tokens == NULL || entry->damage != KVF_WHY_NONE) {
        return 0;
    }
    if (r->c->ours) {
        note_next(e, entry);
    } else {
        other_space *s = space_of(e, &entry->space);
        size_t same = common(e, 0, entry->tokens, entry->num_tokens);
        if (s != NULL && same > s->same) {
            s->same = same;
        }
    }
    return 1;
}

static int read_candidates(explanation *e) {
    for (size_t i = 0; i < e->num_candidates && !kvfcli_interrupted(); i++) {
        const candidate *c = &e->candidates[i];
        reading r = {e, c};
        kvf_error err = {0};
        kvf_walk_options options = {.struct_size = sizeof options, .whole = 1, .space = &c->space, .key = &c->key};
        kvf_status status = kvf_walk(e->store, &err, read_candidate, &r, &options);
        if (status != KVF_OK) {
            return kvfcli_fail(status, &err);
        }
    }
    return KVFCLI_FINE;
}

/* ---- other spaces ---- */

/* The value of a field in "name=value\n" lines; its length, or -1. */
static int value_of(const char **out, const char *fields, const char *name, size_t name_len) {
    const char *line;
    size_t len;
    while (kvfcli_next_line(&fields, &line, &len)) {
        if (len > name_len && line[name_len] == '=' && strncmp(line, name, name_len) == 0) {
            *out = line + name_len + 1;
            return (int)(len - name_len - 1);
        }
    }
    *out = "";
    return -1;
}

/* A field that two spaces do not share. A length of -1: that space has no such field. */
typedef struct difference {
    const char *name, *here, *there;
    int name_len, here_len, there_len;
} difference;
typedef void (*difference_fn)(void *ctx, const difference *);

/* Calls for every field whose value differs, first those of `here`, then those that only `there` has. */
static void each_difference(const char *here, const char *there, difference_fn fn, void *ctx) {
    const char *line;
    size_t len;
    for (const char *rest = here; kvfcli_next_line(&rest, &line, &len);) {
        difference d = {.name = line, .name_len = (int)strcspn(line, "=")};
        d.here_len = value_of(&d.here, line, line, (size_t)d.name_len);
        d.there_len = value_of(&d.there, there, line, (size_t)d.name_len);
        if (d.there_len != d.here_len || strncmp(d.here, d.there, (size_t)d.there_len) != 0) {
            fn(ctx, &d);
        }
    }
    for (const char *rest = there; kvfcli_next_line(&rest, &line, &len);) {
        difference d = {.name = line, .name_len = (int)strcspn(line, "=")};
        d.here_len = value_of(&d.here, here, line, (size_t)d.name_len);
        d.there_len = value_of(&d.there, line, line, (size_t)d.name_len);
        if (d.here_len < 0) {
            fn(ctx, &d);
        }
    }
}

static void find_fields(explanation *e) {
    const char *ours = kvf_space_fields(e->space), *model, *theirs;
    int len = value_of(&model, ours, "model", 5);
    for (size_t i = 0; i < e->num_spaces; i++) {
        other_space *s = &e->spaces[i];
        s->fields = kvfcli_describe(e->store, &s->digest);
        if (s->fields == NULL) {
            continue;
        }
        int other = value_of(&theirs, s->fields, "model", 5);
        s->same_model = len > 0 && other == len && strncmp(model, theirs, (size_t)len) == 0;
    }
}

/* Worth showing: it holds this beginning, or belongs to this model. */
static bool is_told(const other_space *s) {
    return s->num_blocks > 0 && s->fields != NULL && s->same_model;
}

/* ---- the other template ---- */

static int64_t budget_us(const explanation *e) {
    return KVF_MS(e->run->options.budget_ms);
}

static size_t match_tokens(const explanation *e, const kvfl_tokens *tokens) {
    size_t num = kvf_llama_cut(e->run->engine.kv, tokens->num) / e->block_tokens, run = 0;
    kvf_key *keys = malloc((num + 1) * sizeof *keys);
    if (keys != NULL && num > 0) {
        num = kvf_chain(e->space, keys, num, (const uint32_t *)tokens->ids, num * e->block_tokens);
        if (kvf_match(e->space, &run, NULL, keys, num, budget_us(e)) != KVF_OK) {
            run = 0;
        }
    }
    free(keys);
    return run;
}

static void try_other_template(explanation *e) {
    const kvfcli_run_state *run = e->run;
    kvfcli_run_options options = run->options;
    options.raw = !options.raw;
    kvfl_tokens tokens = {.num = 0};
    const kvfl_message message = {.role = "user", .text = run->question.text};
    kvfl_template other = kvfcli_choose_template(run->engine.model, &options);
    if (kvfcli_tokenize_chat(&tokens, run->engine.vocab, other, &message, 1) == KVFCLI_FINE) {
        size_t matched = match_tokens(e, &tokens);
        e->other_template = matched > e->matched ? matched : 0;
    }
    kvfl_tokens_cleanup(&tokens);
}

/* ---- words ---- */

static const char *code_of(const explanation *e) {
    if (e->matched == e->num_blocks) {
        return "stored";
    }
    kvf_reason why = e->found[e->matched].why;
    if (why != KVF_WHY_ABSENT && why != KVF_WHY_NONE) {
        return kvf_reason_name(why);
    }
    if (e->other_template > 0) {
        return "other-template";
    }
    if (e->later > 0) {
        return "evicted";
    }
    if (e->goes_on) {
        return e->ends ? "ends" : "differs";
    }
    for (size_t i = 0; i < e->num_spaces; i++) {
        if (is_told(&e->spaces[i]) && e->spaces[i].same > 0) {
            return "other-space";
        }
    }
    return "absent";
}

static char *text_of(const explanation *e, const uint32_t *tokens, size_t num) {
    return kvfl_text_of(e->run->engine.vocab, tokens, num);
}

static char *our_text(const explanation *e) {
    size_t left = e->run->prompt.num - e->differs_at, num = left < CONTEXT_TOKENS ? left : CONTEXT_TOKENS;
    return text_of(e, (const uint32_t *)e->run->prompt.ids + e->differs_at, num);
}

static void print_quoted(const char *label, const char *text) {
    printf("  %-9s \"%s\"\n", label, text != NULL ? kvfcli_shown(text) : "");
}

static void print_difference(const explanation *e) {
    char *ours = our_text(e), *theirs = text_of(e, e->theirs, e->num_theirs);
    if (e->ends) {
        printf(
            "the longest stored prompt with this beginning ends at token %zu: nothing after it was computed with the "
            "store\n",
            e->differs_at);
    } else {
        printf("token %zu is the first that differs from the stored prompt that shares the most:\n", e->differs_at);
        print_quoted("here:", ours);
        print_quoted("stored:", theirs);
    }
    free(ours);
    free(theirs);
}

static const char *shown_value(const char *text, int len) {
    return len > 0 ? kvfcli_shown_n(text, (size_t)len) : "-";
}

static void print_difference_of_spaces(void *ctx, const difference *d) {
    (void)ctx;
    printf("    %s: here %s, there %s\n", kvfcli_shown_n(d->name, (size_t)d->name_len),
           shown_value(d->here, d->here_len), shown_value(d->there, d->there_len));
}

static void print_spaces(const explanation *e) {
    for (size_t i = 0; i < e->num_spaces; i++) {
        const other_space *s = &e->spaces[i];
        if (!is_told(s)) {
            continue;
        }
        char hex[KVFCLI_HEX32];
        kvfcli_hex(hex, s->digest.bytes);
        printf("  space %.16s has %llu blocks of this model%s, but differs:\n", hex, (unsigned long long)s->num_blocks,
               s->same > 0 ? ", with this very beginning" : "");
        each_difference(kvf_space_fields(e->space), s->fields, print_difference_of_spaces, NULL);
    }
}

static void print(const explanation *e) {
    char hex[KVFCLI_HEX32], age[KVFCLI_TEXT];
    const char *code = code_of(e);
    kvfcli_hex(hex, e->digest.bytes);
    printf("prompt: %zu tokens, %zu whole blocks of %zu; space %.16s\n", e->run->prompt.num, e->num_blocks,
           e->block_tokens, hex);
    printf("stored: %zu blocks, %zu tokens", e->matched, e->matched * e->block_tokens);
    if (e->matched > 0) {
        printf(", the last one %s ago", kvfcli_age(age, e->found[e->matched - 1].stored_s));
    }
    printf("\nanswer: %s\n", code);
    if (strcmp(code, "stored") == 0) {
        printf("all whole blocks are stored: a run loads them if that is faster than computing them (`kvferry run "
               "--json` says which)\n");
    } else if (strcmp(code, "other-template") == 0) {
        printf("%s chat template %zu blocks would match: the stored prompt was made that way\n",
               e->run->options.raw ? "with a" : "without a (--raw)", e->other_template);
    } else if (strcmp(code, "evicted") == 0) {
        printf(
            "block %zu (token %zu) is missing, although %zu later ones of this prompt are stored: evicted or expired\n",
            e->matched, e->matched * e->block_tokens, e->later);
    } else if (strcmp(code, "differs") == 0 || strcmp(code, "ends") == 0) {
        print_difference(e);
    } else if (strcmp(code, "absent") == 0) {
        printf("nothing in the store continues from there: never stored, expired or evicted (%llu blocks of this space "
               "are stored)\n",
               (unsigned long long)e->our_blocks);
    } else if (strcmp(code, "other-space") != 0) {
        printf("the store says \"%s\" of block %zu; kvferry doctor explains more\n", code, e->matched);
    }
    if (e->num_closed > 0) {
        printf("%llu block%s in the store %s sealed under a secret that was not given: --secret-file?\n",
               (unsigned long long)e->num_closed, e->num_closed == 1 ? "" : "s", e->num_closed == 1 ? "is" : "are");
    }
    if (e->matched < e->num_blocks) {
        print_spaces(e);
    }
}

/* ---- JSON ---- */

static json_t *text_value(const char *text, int len) {
    return len >= 0 ? kvfcli_json_text_n(text, (size_t)len) : json_null();
}

static void add_difference(void *ctx, const difference *d) {
    json_array_append_new(ctx,
                          json_pack("{s:o, s:o, s:o}", "name", text_value(d->name, d->name_len), "here",
                                    text_value(d->here, d->here_len), "there", text_value(d->there, d->there_len)));
}

static json_t *json_spaces(const explanation *e) {
    json_t *list = json_array();
    for (size_t i = 0; i < e->num_spaces; i++) {
        const other_space *s = &e->spaces[i];
        if (!is_told(s)) {
            continue;
        }
        json_t *fields = json_array();
        each_difference(kvf_space_fields(e->space), s->fields, add_difference, fields);
        json_array_append_new(list, json_pack("{s:o, s:I, s:I, s:o}", "space", kvfcli_json_hex(s->digest.bytes),
                                              "blocks", (json_int_t)s->num_blocks, "same_tokens", (json_int_t)s->same,
                                              "differs", fields));
    }
    return list;
}

static json_t *json_own(char *text) {
    json_t *value = text != NULL ? kvfcli_json_text(text) : json_null();
    free(text);
    return value;
}

static int print_as_json(const explanation *e) {
    bool differs = e->goes_on && e->matched < e->num_blocks;
    json_t *json = json_pack("{s:s, s:I, s:I, s:I, s:I, s:o, s:I, s:I, s:o}", "why", code_of(e), "prompt_tokens",
                             (json_int_t)e->run->prompt.num, "blocks", (json_int_t)e->num_blocks, "block_tokens",
                             (json_int_t)e->block_tokens, "stored_blocks", (json_int_t)e->matched, "space",
                             kvfcli_json_hex(e->digest.bytes), "later_blocks", (json_int_t)e->later,
                             "other_template_blocks", (json_int_t)e->other_template, "other_spaces", json_spaces(e));
    json_object_set_new(json, "num_sealed", json_integer((json_int_t)e->num_closed));
    json_object_set_new(json, "differs_at", differs ? json_integer((json_int_t)e->differs_at) : json_null());
    json_object_set_new(json, "here", differs ? json_own(our_text(e)) : json_null());
    json_object_set_new(json, "there",
                        differs && !e->ends ? json_own(text_of(e, e->theirs, e->num_theirs)) : json_null());
    return kvfcli_print_json(json, KVFCLI_FINE);
}

/* ---- all of it ---- */

static void cleanup(explanation *e) {
    for (size_t i = 0; e->spaces != NULL && i < e->num_spaces; i++) {
        kvf_free(e->spaces[i].fields);
    }
    free(e->keys);
    free(e->stored_keys);
    free(e->found);
    free(e->candidates);
    free(e->spaces);
}

static int prepare(explanation *e) {
    const kvfcli_run_state *run = e->run;
    e->store = run->store;
    e->space = kvf_llama_space(run->engine.kv);
    kvf_space_digest(e->space, &e->digest);
    e->block_tokens = kvf_space_block_tokens(e->space);
    e->num_blocks = kvf_llama_cut(run->engine.kv, run->prompt.num) / e->block_tokens;
    e->keys = calloc(e->num_blocks + 1, sizeof *e->keys);
    e->stored_keys = calloc(e->num_blocks + 1, sizeof *e->stored_keys);
    e->found = calloc(e->num_blocks + 1, sizeof *e->found);
    e->candidates = calloc(MAX_CANDIDATES, sizeof *e->candidates);
    e->spaces = calloc(MAX_SPACES, sizeof *e->spaces);
    if (e->keys == NULL || e->stored_keys == NULL || e->found == NULL || e->candidates == NULL || e->spaces == NULL) {
        return kvfcli_no_memory();
    }
    kvf_chain(e->space, e->keys, e->num_blocks, (const uint32_t *)run->prompt.ids, e->num_blocks * e->block_tokens);
    for (size_t i = 0; i < e->num_blocks; i++) {
        kvf_stored_key(e->space, &e->stored_keys[i], &e->keys[i]);
    }
    return kvf_match(e->space, &e->matched, e->found, e->keys, e->num_blocks, budget_us(e)) == KVF_OK ? KVFCLI_FINE
                                                                                                      : KVFCLI_IO;
}

static int look_around(explanation *e) {
    kvf_walk_options options = {.struct_size = sizeof options};
    int code = kvfcli_walk(e->store, see, e, &options);
    if (code == KVFCLI_FINE) {
        code = read_candidates(e);
    }
    if (code == KVFCLI_FINE) {
        find_fields(e);
        try_other_template(e);
    }
    return code;
}

int kvfcli_explain_prompt(const kvfcli_run_state *run) {
    if (run->engine.kv == NULL || kvf_llama_space(run->engine.kv) == NULL) {
        kvfcli_say("nothing of this model is stored: %s",
                   run->engine.refused[0] != '\0' ? run->engine.refused : "there is no store");
        return KVFCLI_INPUT;
    }
    explanation e = {.run = run};
    int code = prepare(&e);
    if (code == KVFCLI_FINE && e.matched < e.num_blocks) {
        code = look_around(&e);
    }
    if (code == KVFCLI_FINE && run->options.json) {
        code = print_as_json(&e);
    } else if (code == KVFCLI_FINE) {
        print(&e);
    }
    cleanup(&e);
    return code;
}
