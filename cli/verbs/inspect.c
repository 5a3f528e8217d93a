/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry inspect: shows one space, block or session in full.
 */
#include "common/cli.h"
#include "common/llama.h"
#include "verbs/verbs.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LABEL = 9 }; /* the width of kvfcli_row's labels */

typedef struct request {
    const char *name, *space, *model;
} request;

static void print_time(const char *label, int64_t stored_s) {
    char age[KVFCLI_TEXT], text[64] = "?";
    time_t when = (time_t)stored_s;
    struct tm tm;
    if (stored_s != 0 && gmtime_r(&when, &tm) != NULL) {
        strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &tm);
    }
    kvfcli_row(label, "%s (%s ago)", text, kvfcli_age(age, stored_s));
}

static void print_size(const char *label, uint64_t bytes) {
    char size[KVFCLI_TEXT];
    kvfcli_row(label, "%s (%llu bytes)", kvfcli_size(size, bytes), (unsigned long long)bytes);
}

/* ---- a block ---- */

/* What is kept of the block: everything except its payload. */
typedef struct block {
    const kvfcli_named *record; /* as it was found */
    bool found;
    kvf_digest space;
    uint64_t payload_bytes;
    uint32_t first_token, num_tokens;
    uint32_t *tokens;
    int64_t stored_s;
    kvf_reason damage;
    kvf_seal seal;
    char *text; /* of the tokens */
    bool no_memory;
} block;

static void keep_tokens(block *b, const kvf_entry *entry) {
    if (entry->tokens == NULL || entry->num_tokens == 0) {
        return;
    }
    b->tokens = malloc(entry->num_tokens * sizeof *b->tokens);
    b->no_memory = b->tokens == NULL;
    if (b->tokens != NULL) {
        memcpy(b->tokens, entry->tokens, entry->num_tokens * sizeof *b->tokens);
    }
}

static int keep_block(void *ctx, const kvf_entry *entry) {
    block *b = ctx;
    if (b->found && b->damage == KVF_WHY_NONE) {
        return 1;
    }
    b->found = true;
    b->space = entry->space;
    b->payload_bytes = entry->payload_bytes;
    b->first_token = entry->first_token;
    b->num_tokens = entry->num_tokens;
    b->stored_s = entry->stored_s;
    b->damage = entry->damage;
    b->seal = entry->seal;
    keep_tokens(b, entry);
    return 0;
}

static int add_text(block *b, const char *model) {
    kvf_error err = {.status = KVF_OK};
    if (b->tokens == NULL) {
        return KVFCLI_FINE;
    }
    const kvfcli_llama *llama = kvfcli_load_llama();
    if (llama == NULL) {
        return KVFCLI_CONFIG;
    }
    kvf_status status = llama->detokenize(model, b->tokens, b->num_tokens, &b->text, &err);
    if (status != KVF_OK) {
        kvfcli_fail(status, &err);
        return KVFCLI_INPUT;
    }
    return KVFCLI_FINE;
}

static void print_tokens(const block *b) {
    if (b->num_tokens == 0) {
        kvfcli_row("tokens", "not in the record (the engine uses its own block hashes)");
        return;
    }
    kvfcli_row("tokens", "%u to %u of the prompt", b->first_token, b->first_token + b->num_tokens - 1);
    printf("%-9s", "ids");
    for (uint32_t i = 0; i < b->num_tokens; i++) {
        printf(" %u", b->tokens[i]);
    }
    printf("\n");
    if (b->text != NULL) {
        kvfcli_print_lines("text", LABEL, b->text);
    }
}

static const char *verdict(const block *b) {
    if (b->damage != KVF_WHY_NONE) {
        return kvf_reason_name(b->damage);
    }
    return b->seal == KVF_SEAL_CLOSED ? "only its header and length: it is sealed" : "whole";
}

/* What is known also of a damaged block. */
static void print_record(kvf_store *store, const block *b) {
    char hex[KVFCLI_HEX32], span[KVFCLI_TEXT], url[256];
    kvfcli_tier_url(store, b->record->tier, url);
    kvfcli_hex(hex, b->record->key.bytes);
    kvfcli_row("block", "%s", hex);
    kvfcli_row("verified", "%s", verdict(b));
    kvfcli_row("store", "%s", kvfcli_shown(url));
    kvfcli_row("name", "%s", kvfcli_shown(b->record->name));
    print_size("size", b->record->stored_bytes);
    kvfcli_row("expires", "%s", b->record->ttl_ms < 0 ? "never" : kvfcli_span(span, b->record->ttl_ms));
}

static void print_block(kvf_store *store, const block *b, const char *fields) {
    char hex[KVFCLI_HEX32];
    print_record(store, b);
    if (b->damage != KVF_WHY_NONE) {
        return;
    }
    print_time("stored", b->stored_s);
    print_size("payload", b->payload_bytes);
    kvfcli_hex(hex, b->space.bytes);
    kvfcli_row("space", "%s", hex);
    kvfcli_print_lines("", LABEL, fields != NULL ? fields : "(its fields are not known)");
    if (b->seal == KVF_SEAL_CLOSED) {
        kvfcli_row("tokens", "(sealed: give --secret-file with its secret to see fields and tokens)");
        return;
    }
    if (b->seal == KVF_SEAL_OPENED) {
        kvfcli_row("sealed", "yes, and opened with the secret that was given");
    }
    print_tokens(b);
}

static json_t *tokens_json(const block *b) {
    json_t *tokens = json_array();
    for (uint32_t i = 0; i < b->num_tokens && b->tokens != NULL; i++) {
        json_array_append_new(tokens, json_integer(b->tokens[i]));
    }
    return tokens;
}

static json_t *block_json(kvf_store *store, const block *b, const char *fields) {
    char url[256];
    bool closed = b->seal == KVF_SEAL_CLOSED;
    kvfcli_tier_url(store, b->record->tier, url);
    return json_pack(
        "{s:o, s:o, s:o, s:o, s:o, s:s?, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:b, s:b}", "block",
        kvfcli_json_hex(b->record->key.bytes), "space", kvfcli_json_hex(b->space.bytes), "fields",
        kvfcli_json_fields(fields), "store", kvfcli_json_text(url), "name", kvfcli_json_text(b->record->name), "damage",
        b->damage == KVF_WHY_NONE ? NULL : kvf_reason_name(b->damage), "stored_bytes",
        (json_int_t)b->record->stored_bytes, "payload_bytes", (json_int_t)b->payload_bytes, "stored_s",
        (json_int_t)b->stored_s, "ttl_ms", (json_int_t)b->record->ttl_ms, "first_token",
        kvfcli_json_known(!closed, b->first_token), "num_tokens", kvfcli_json_known(!closed, b->num_tokens), "tokens",
        closed ? json_null() : tokens_json(b), "text", b->text != NULL ? kvfcli_json_text(b->text) : json_null(),
        "sealed", closed, "opened", b->seal == KVF_SEAL_OPENED);
}

static int show_block(const request *r, kvf_store *store, const kvfcli_common *common, block *b) {
    int code = b->no_memory ? KVFCLI_IO : KVFCLI_FINE;
    if (code == KVFCLI_FINE && r->model != NULL) {
        code = add_text(b, r->model);
    }
    if (code != KVFCLI_FINE) {
        return code;
    }
    code = b->damage == KVF_WHY_NONE ? KVFCLI_FINE : KVFCLI_FOUND;
    char *fields = kvfcli_describe(store, &b->space);
    if (common->json) {
        code = kvfcli_print_json(block_json(store, b, fields), code);
    } else {
        print_block(store, b, fields);
    }
    kvf_free(fields);
    return code;
}

static int inspect_block(const request *r, kvf_store *store, const kvfcli_common *common, const kvfcli_named *record) {
    block b = {.record = record, .damage = record->damage, .space = record->space};
    int code = record->damage == KVF_WHY_NONE ? kvfcli_read_block(store, record, keep_block, &b) : KVFCLI_FINE;
    if (code == KVFCLI_FINE && !b.found && b.damage == KVF_WHY_NONE) {
        kvfcli_say("the block went away while it was looked for");
        code = KVFCLI_FOUND;
    }
    if (code == KVFCLI_FINE) {
        code = show_block(r, store, common, &b);
    }
    free(b.tokens);
    free(b.text);
    return code;
}

/* ---- a space ---- */

typedef struct contents {
    kvfcli_sum sum;
    uint64_t num_prompts, num_damaged;
    uint32_t last_token;
} contents;

static int add_entry(void *ctx, const kvf_entry *entry) {
    contents *c = ctx;
    if (entry->kind != KVF_ENTRY_BLOCK) {
        return 0;
    }
    if (entry->damage != KVF_WHY_NONE) {
        c->num_damaged++;
        return 0;
    }
    kvfcli_sum_add(&c->sum, entry);
    c->num_prompts += entry->first_token == 0 && entry->num_tokens > 0;
    if (entry->first_token + entry->num_tokens > c->last_token) {
        c->last_token = entry->first_token + entry->num_tokens;
    }
    return 0;
}

static void print_space(const kvf_digest *space, const contents *c, const char *fields) {
    char hex[KVFCLI_HEX32];
    kvfcli_hex(hex, space->bytes);
    kvfcli_row("space", "%s", hex);
    kvfcli_print_lines("fields", LABEL, fields != NULL ? fields : "(not known)");
    kvfcli_row("blocks", "%llu", (unsigned long long)c->sum.num_blocks);
    if (c->sum.num_closed > 0) {
        kvfcli_row("sealed", "give --secret-file with its secret to see fields, prompts and tokens (blocks: %llu)",
                   (unsigned long long)c->sum.num_closed);
    } else {
        if (c->sum.num_opened > 0) {
            kvfcli_row("sealed", "yes, and opened with the secret that was given");
        }
        kvfcli_row("prompts", "%llu different first blocks; the longest prefix has %u tokens",
                   (unsigned long long)c->num_prompts, c->last_token);
        kvfcli_row("tokens", "%llu", (unsigned long long)c->sum.num_tokens);
    }
    print_size("size", c->sum.bytes);
    print_time("oldest", c->sum.oldest_s);
    print_time("newest", c->sum.newest_s);
    if (c->num_damaged > 0) {
        kvfcli_row("damaged", "%llu (kvferry verify lists them)", (unsigned long long)c->num_damaged);
    }
}

static json_t *space_json(const kvf_digest *space, const contents *c, const char *fields) {
    const kvfcli_sum *sum = &c->sum;
    bool known = sum->num_closed == 0;
    return json_pack("{s:o, s:o, s:I, s:o, s:o, s:I, s:o, s:I, s:I, s:I, s:I, s:I}", "space",
                     kvfcli_json_hex(space->bytes), "fields", kvfcli_json_fields(fields), "num_blocks",
                     (json_int_t)sum->num_blocks, "num_prompts", kvfcli_json_known(known, c->num_prompts), "num_tokens",
                     kvfcli_json_known(known, sum->num_tokens), "stored_bytes", (json_int_t)sum->bytes,
                     "longest_tokens", kvfcli_json_known(known, c->last_token), "oldest_s", (json_int_t)sum->oldest_s,
                     "newest_s", (json_int_t)sum->newest_s, "num_damaged", (json_int_t)c->num_damaged, "num_sealed",
                     (json_int_t)sum->num_closed, "num_opened", (json_int_t)sum->num_opened);
}

static int inspect_space(kvf_store *store, const kvfcli_common *common, const kvf_digest *space) {
    contents c = {.num_prompts = 0};
    kvf_walk_options options = {.struct_size = sizeof options, .space = space};
    int code = kvfcli_walk(store, add_entry, &c, &options);
    if (code != KVFCLI_FINE) {
        return code;
    }
    char *fields = kvfcli_describe(store, space);
    if (common->json) {
        code = kvfcli_print_json(space_json(space, &c, fields), code);
    } else {
        print_space(space, &c, fields);
    }
    kvf_free(fields);
    return code;
}

/* ---- a session ---- */

static void print_tensor(const char *label, const kvf_tensor *t) {
    char size[KVFCLI_TEXT];
    printf("%-9s %s (%zu bytes)", label, kvfcli_size(size, t->len), t->len);
    if (t->dtype[0] != '\0') {
        printf(", %s", kvfcli_shown(t->dtype));
    }
    for (uint32_t i = 0; i < t->num_dims; i++) {
        printf("%s%llu", i == 0 ? ", " : " x ", (unsigned long long)t->dims[i]);
    }
    printf("\n");
}

static bool has_space(const kvf_session *session) {
    static const kvf_digest unknown;
    return memcmp(&session->space, &unknown, sizeof unknown) != 0;
}

static void print_session(const char *id, const kvf_session *session) {
    char hex[KVFCLI_HEX32], tokens[KVFCLI_TEXT] = "not known";
    kvfcli_row("session", "%s", kvfcli_shown(id));
    print_tensor("keys", &session->k);
    print_tensor("values", &session->v);
    if (!session->has_meta) {
        kvfcli_row("meta", "none: written by a plain client; nothing but the lengths is known");
        return;
    }
    kvfcli_hex(hex, session->space.bytes);
    if (session->num_tokens > 0) {
        snprintf(tokens, sizeof tokens, "%u", session->num_tokens);
    }
    kvfcli_row("tokens", "%s", tokens);
    kvfcli_row("layout", "%s", session->layout[0] != '\0' ? kvfcli_shown(session->layout) : "not known");
    kvfcli_row("space", "%s", has_space(session) ? hex : "not known");
    kvfcli_row("verified", "whole");
}

static json_t *tensor_json(const kvf_tensor *t) {
    json_t *dims = json_array();
    for (uint32_t i = 0; i < t->num_dims; i++) {
        json_array_append_new(dims, json_integer((json_int_t)t->dims[i]));
    }
    return json_pack("{s:I, s:o, s:o}", "bytes", (json_int_t)t->len, "dtype", kvfcli_json_text(t->dtype), "dims", dims);
}

static json_t *session_json(const char *id, const kvf_session *session) {
    return json_pack("{s:o, s:o, s:o, s:b, s:o, s:o, s:o}", "session", kvfcli_json_text(id), "keys",
                     tensor_json(&session->k), "values", tensor_json(&session->v), "has_meta", session->has_meta,
                     "num_tokens", kvfcli_json_known(session->num_tokens > 0, session->num_tokens), "layout",
                     session->layout[0] != '\0' ? kvfcli_json_text(session->layout) : json_null(), "space",
                     has_space(session) ? kvfcli_json_hex(session->space.bytes) : json_null());
}

static int inspect_session(kvf_store *store, const kvfcli_common *common) {
    kvf_error err = {.status = KVF_OK};
    kvf_session *session = NULL;
    kvf_status status = kvf_session_load(store, &session, &err, common->session, KVF_DEFAULT);
    if (status != KVF_OK) {
        return kvfcli_fail(status, &err);
    }
    int code = KVFCLI_FINE;
    if (common->json) {
        code = kvfcli_print_json(session_json(common->session, session), code);
    } else {
        print_session(common->session, session);
    }
    kvf_session_free(session);
    return code;
}

/* ---- */

static int work(void *ctx, kvf_store *store, const kvfcli_common *common) {
    const request *r = ctx;
    kvfcli_named found;
    if (common->session != NULL) {
        return inspect_session(store, common);
    }
    int code = kvfcli_find(store, &found, r->space != NULL ? KVFCLI_BLOCKS : KVFCLI_BOTH, r->name, r->space);
    if (code != KVFCLI_FINE) {
        return code;
    }
    return found.is_block ? inspect_block(r, store, common, &found) : inspect_space(store, common, &found.space);
}

static int check(void *ctx, const kvfcli_common *common, int argc, char **argv) {
    request *r = ctx;
    r->name = argc > 0 ? argv[0] : NULL;
    if (argc > 1 || (r->name != NULL) + (common->session != NULL) != 1) {
        return kvfcli_usage("name one space or block, or --session ID");
    }
    int code = kvfcli_check_hex(r->name);
    return code == KVFCLI_FINE ? kvfcli_check_hex(r->space) : code;
}

int kvfcli_inspect(int argc, char **argv) {
    static const kvfcli_option options[] = {
        KVFCLI_OPT_TEXT(request, model, 'm', "model", "MODEL",
                        "a GGUF file: also shows the text of the block's tokens"),
        KVFCLI_OPT_TEXT(request, space, 0, "space", "SPACE", "NAME is a block of this space"),
        {.kind = KVFCLI_END}};
    static const kvfcli_verb verb = {
        .help = "usage: kvferry inspect NAME [-m MODEL] [options]\n"
                "       kvferry inspect --session ID [options]\n"
                "\n"
                "Shows everything known about one thing in a store. NAME is a space or the key of a block, as\n"
                "kvferry ls prints them; the first digits are enough. A block is read whole and verified.\n"
                "\n"
                "  kvferry inspect 6053e2b9                 what a space holds\n"
                "  kvferry inspect 1f0c5a -m model.gguf     a block, with the text of its tokens\n",
        .exits = "Exit codes: 0; 1 when it is not there or damaged; 4 when MODEL can't be used.\n",
        .options = options,
        .sessions = true,
        .check = check,
        .work = work};
    request r = {.name = NULL};
    return kvfcli_verb_main(&verb, &r, argc, argv);
}
