/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry inspect: shows one space, block or session in full.
 */
#include "common/cli.h"
#include "run/verbs.h"
#include "verbs/verbs.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char help[] =
    "usage: kvferry inspect NAME [-m MODEL] [options]\n"
    "       kvferry inspect --session ID [options]\n"
    "\n"
    "Shows everything known about one thing in a store. NAME is a space or the key of a block, as\n"
    "kvferry ls prints them; the first digits are enough. A block is read whole and verified.\n"
    "\n"
    "Options:\n"
    "  -m, --model MODEL  a GGUF file: also shows the text of the block's tokens\n"
    "      --space SPACE  NAME is a block of this space\n"
    "      --session ID   the session of this id (of kvf_session_save; a conversation of `kvferry run\n"
    "                     --chat` is forgotten by `kvferry run --chat ID --restart`)\n"
    "      --sealed       with --session: one that is sealed under the secret\n" KVFCLI_COMMON_HELP "\n"
    "Exit codes: 0; 1 when it is not there or damaged; 4 when MODEL can't be used.\n";

enum { OPT_SESSION = KVFCLI_OPT_OWN, OPT_SPACE };

typedef struct request {
    const char *name, *session, *space, *model;
} request;

static void print_time(const char *label, int64_t stored_s) {
    char age[KVFCLI_TEXT], text[64] = "?";
    time_t when = (time_t)stored_s;
    struct tm tm;
    if (stored_s != 0 && gmtime_r(&when, &tm) != NULL) {
        strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &tm);
    }
    printf("%-9s %s (%s ago)\n", label, text, kvfcli_age(age, stored_s));
}

static void print_indented(const char *label, const char *lines) {
    for (const char *line = lines; *line != '\0';) {
        size_t len = strcspn(line, "\n");
        printf("%-9s %s\n", line == lines ? label : "", kvfcli_shown_n(line, len));
        line += len + (line[len] == '\n');
    }
}

static char *describe(kvf_store *store, const kvf_digest *space) {
    char *text = NULL;
    return kvf_space_describe(store, &text, NULL, space) == KVF_OK ? text : NULL;
}

/* ---- a block ---- */

/* What is kept of the block: everything except its payload. */
typedef struct block {
    const kvfcli_record *record; /* as it was found */
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
    if (entry->tokens != NULL && entry->num_tokens > 0) {
        b->tokens = malloc(entry->num_tokens * sizeof *b->tokens);
        b->no_memory = b->tokens == NULL;
        if (b->tokens != NULL) {
            memcpy(b->tokens, entry->tokens, entry->num_tokens * sizeof *b->tokens);
        }
    }
    return 0;
}

static int add_text(block *b, const char *model) {
#ifdef KVF_HAVE_LLAMA
    kvf_error err = {.status = KVF_OK};
    if (b->tokens == NULL) {
        return KVFCLI_FINE;
    }
    kvf_status status = kvfcli_detokenize(model, b->tokens, b->num_tokens, &b->text, &err);
    if (status != KVF_OK) {
        kvfcli_fail(&err);
        return KVFCLI_INPUT;
    }
    return KVFCLI_FINE;
#else
    (void)b;
    (void)model;
    kvfcli_say("this kvferry was built without llama.cpp, so it can't read the vocabulary of a model");
    return KVFCLI_INPUT;
#endif
}

static void print_tokens(const block *b) {
    printf("%-9s", "ids");
    for (uint32_t i = 0; i < b->num_tokens; i++) {
        printf(" %u", b->tokens[i]);
    }
    printf("\n");
}

static void print_block(kvf_store *store, const block *b, const char *fields) {
    char hex[KVFCLI_HEX32], size[KVFCLI_TEXT], span[KVFCLI_TEXT], url[256];
    kvfcli_tier_url(store, b->record->tier, url);
    kvfcli_hex(hex, b->record->key.bytes);
    printf("%-9s %s\n", "block", hex);
    printf("%-9s %s\n", "verified",
           b->damage != KVF_WHY_NONE    ? kvf_reason_name(b->damage)
           : b->seal == KVF_SEAL_CLOSED ? "only its header and length: it is sealed"
                                        : "whole");
    printf("%-9s %s\n%-9s %s\n", "store", kvfcli_shown(url), "name", kvfcli_shown(b->record->name));
    printf("%-9s %s (%llu bytes)\n", "size", kvfcli_size(size, b->record->stored_bytes),
           (unsigned long long)b->record->stored_bytes);
    printf("%-9s %s\n", "expires", b->record->ttl_ms < 0 ? "never" : kvfcli_span(span, b->record->ttl_ms));
    if (b->damage != KVF_WHY_NONE) {
        return;
    }
    print_time("stored", b->stored_s);
    printf("%-9s %s (%llu bytes)\n", "payload", kvfcli_size(size, b->payload_bytes),
           (unsigned long long)b->payload_bytes);
    kvfcli_hex(hex, b->space.bytes);
    printf("%-9s %s\n", "space", hex);
    print_indented("", fields != NULL ? fields : "(its fields are not known)\n");
    if (b->seal == KVF_SEAL_CLOSED) {
        printf("%-9s (sealed: give --secret-file to see fields and tokens)\n", "tokens");
        return;
    }
    if (b->seal == KVF_SEAL_OPENED) {
        printf("%-9s yes, and opened with the secret that was given\n", "sealed");
    }
    if (b->num_tokens == 0) {
        printf("%-9s not in the record (the engine uses its own block hashes)\n", "tokens");
        return;
    }
    printf("%-9s %u to %u of the prompt\n", "tokens", b->first_token, b->first_token + b->num_tokens - 1);
    print_tokens(b);
    if (b->text != NULL) {
        print_indented("text", b->text);
    }
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
    char *fields = describe(store, &b->space);
    if (common->json) {
        code = kvfcli_print_json(block_json(store, b, fields), code);
    } else {
        print_block(store, b, fields);
    }
    kvf_free(fields);
    return code;
}

static int inspect_block(const request *r, kvf_store *store, const kvfcli_common *common, const kvfcli_record *record) {
    block b = {.record = record, .damage = record->damage};
    b.space = record->space;
    int code = record->damage == KVF_WHY_NONE ? kvfcli_read_record(store, record, keep_block, &b) : KVFCLI_FINE;
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

typedef struct space_sum {
    uint64_t num_blocks, num_prompts, num_tokens, bytes, num_damaged, num_closed, num_opened;
    int64_t oldest_s, newest_s;
    uint32_t last_token;
} space_sum;

static int add_to_sum(void *ctx, const kvf_entry *entry) {
    space_sum *sum = ctx;
    if (entry->kind != KVF_ENTRY_BLOCK) {
        return 0;
    }
    if (entry->damage != KVF_WHY_NONE) {
        sum->num_damaged++;
        return 0;
    }
    sum->num_blocks++;
    sum->num_closed += entry->seal == KVF_SEAL_CLOSED;
    sum->num_opened += entry->seal == KVF_SEAL_OPENED;
    sum->num_prompts += entry->first_token == 0 && entry->num_tokens > 0;
    sum->num_tokens += entry->num_tokens;
    sum->bytes += entry->stored_bytes;
    sum->oldest_s = sum->oldest_s == 0 || entry->stored_s < sum->oldest_s ? entry->stored_s : sum->oldest_s;
    sum->newest_s = entry->stored_s > sum->newest_s ? entry->stored_s : sum->newest_s;
    if (entry->first_token + entry->num_tokens > sum->last_token) {
        sum->last_token = entry->first_token + entry->num_tokens;
    }
    return 0;
}

static void print_space(const kvf_digest *space, const space_sum *sum, const char *fields) {
    char hex[KVFCLI_HEX32], size[KVFCLI_TEXT];
    kvfcli_hex(hex, space->bytes);
    printf("%-9s %s\n", "space", hex);
    print_indented("fields", fields != NULL ? fields : "(not known)\n");
    printf("%-9s %llu\n", "blocks", (unsigned long long)sum->num_blocks);
    if (sum->num_closed > 0) {
        printf("%-9s give --secret-file to see fields, prompts and tokens of %llu blocks\n", "sealed",
               (unsigned long long)sum->num_closed);
    } else {
        if (sum->num_opened > 0) {
            printf("%-9s yes, and opened with the secret that was given\n", "sealed");
        }
        printf("%-9s %llu different first blocks; the longest prefix has %u tokens\n", "prompts",
               (unsigned long long)sum->num_prompts, sum->last_token);
        printf("%-9s %llu\n", "tokens", (unsigned long long)sum->num_tokens);
    }
    printf("%-9s %s (%llu bytes)\n", "size", kvfcli_size(size, sum->bytes), (unsigned long long)sum->bytes);
    print_time("oldest", sum->oldest_s);
    print_time("newest", sum->newest_s);
    if (sum->num_damaged > 0) {
        printf("%-9s %llu (kvferry verify lists them)\n", "damaged", (unsigned long long)sum->num_damaged);
    }
}

static json_t *space_json(const kvf_digest *space, const space_sum *sum, const char *fields) {
    bool known = sum->num_closed == 0;
    return json_pack("{s:o, s:o, s:I, s:o, s:o, s:I, s:o, s:I, s:I, s:I, s:I, s:I}", "space",
                     kvfcli_json_hex(space->bytes), "fields", kvfcli_json_fields(fields), "num_blocks",
                     (json_int_t)sum->num_blocks, "num_prompts", kvfcli_json_known(known, sum->num_prompts),
                     "num_tokens", kvfcli_json_known(known, sum->num_tokens), "stored_bytes", (json_int_t)sum->bytes,
                     "longest_tokens", kvfcli_json_known(known, sum->last_token), "oldest_s", (json_int_t)sum->oldest_s,
                     "newest_s", (json_int_t)sum->newest_s, "num_damaged", (json_int_t)sum->num_damaged, "num_sealed",
                     (json_int_t)sum->num_closed, "num_opened", (json_int_t)sum->num_opened);
}

static int inspect_space(kvf_store *store, const kvfcli_common *common, const kvf_digest *space) {
    space_sum sum = {.num_blocks = 0};
    kvf_walk_options options = {.struct_size = sizeof options, .space = space};
    int code = kvfcli_walk(store, add_to_sum, &sum, &options);
    if (code != KVFCLI_FINE) {
        return code;
    }
    char *fields = describe(store, space);
    if (common->json) {
        code = kvfcli_print_json(space_json(space, &sum, fields), code);
    } else {
        print_space(space, &sum, fields);
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
    printf("%-9s %s\n", "session", kvfcli_shown(id));
    print_tensor("keys", &session->k);
    print_tensor("values", &session->v);
    if (!session->has_meta) {
        printf("%-9s none: written by a plain client; nothing but the lengths is known\n", "meta");
        return;
    }
    kvfcli_hex(hex, session->space.bytes);
    if (session->num_tokens > 0) {
        snprintf(tokens, sizeof tokens, "%u", session->num_tokens);
    }
    printf("%-9s %s\n%-9s %s\n%-9s %s\n%-9s %s\n", "tokens", tokens, "layout",
           session->layout[0] != '\0' ? kvfcli_shown(session->layout) : "not known", "space",
           has_space(session) ? hex : "not known", "verified", "whole");
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

static int inspect_session(kvf_store *store, const kvfcli_common *common, const char *id) {
    kvf_error err = {.status = KVF_OK};
    kvf_session *session = NULL;
    kvf_status status = kvf_session_load(store, &session, &err, id, KVF_DEFAULT);
    if (status != KVF_OK) {
        err.status = status;
        return kvfcli_fail(&err);
    }
    int code = KVFCLI_FINE;
    if (common->json) {
        code = kvfcli_print_json(session_json(id, session), code);
    } else {
        print_session(id, session);
    }
    kvf_session_free(session);
    return code;
}

/* ---- which of them is it ---- */

typedef struct search {
    const request *request;
    kvf_digest space;
    kvfcli_record block;
    bool space_found, block_found, ambiguous;
} search;

static void meet_space(search *s, const kvf_entry *entry) {
    if (s->request->space != NULL || !kvfcli_has_prefix(entry->space.bytes, s->request->name)) {
        return;
    }
    s->ambiguous = s->ambiguous || (s->space_found && memcmp(&s->space, &entry->space, sizeof s->space) != 0);
    s->space_found = true;
    s->space = entry->space;
}

static void meet_block(search *s, const kvf_entry *entry) {
    const char *space = s->request->space;
    if (entry->kind != KVF_ENTRY_BLOCK || !kvfcli_has_prefix(entry->key.bytes, s->request->name) ||
        (space != NULL && !kvfcli_has_prefix(entry->space.bytes, space))) {
        return;
    }
    s->ambiguous = s->ambiguous || (s->block_found && memcmp(&s->block.key, &entry->key, sizeof entry->key) != 0);
    if (!s->block_found || s->block.damage != KVF_WHY_NONE) {
        kvfcli_record_of(&s->block, entry); /* a copy in another tier may be undamaged */
    }
    s->block_found = true;
}

static int meet(void *ctx, const kvf_entry *entry) {
    search *s = ctx;
    if (entry->kind != KVF_ENTRY_BLOCK && entry->kind != KVF_ENTRY_SPACE_CARD) {
        return 0;
    }
    if (entry->damage == KVF_WHY_NONE) {
        meet_space(s, entry);
    }
    meet_block(s, entry);
    return s->ambiguous;
}

static int work(void *ctx, kvf_store *store, const kvfcli_common *common) {
    const request *r = ctx;
    if (r->session != NULL) {
        return inspect_session(store, common, r->session);
    }
    search s = {.request = r};
    int code = kvfcli_walk(store, meet, &s, NULL);
    if (code != KVFCLI_FINE) {
        return code;
    }
    if (s.ambiguous || (s.space_found && s.block_found)) {
        kvfcli_say("several spaces or blocks begin with %s: give more digits", r->name);
        return KVFCLI_USAGE;
    }
    if (s.block_found) {
        return inspect_block(r, store, common, &s.block);
    }
    if (s.space_found) {
        return inspect_space(store, common, &s.space);
    }
    kvfcli_say("no space or block begins with %s", r->name);
    return KVFCLI_FOUND;
}

static int check(void *ctx, const kvfcli_common *common, int argc, char **argv) {
    request *r = ctx;
    r->name = argc > 0 ? argv[0] : NULL;
    if (argc > 1 || (r->name != NULL) + (r->session != NULL) != 1) {
        return kvfcli_usage(common, "name one space or block, or --session ID");
    }
    if (common->seal_sessions && r->session == NULL) {
        return kvfcli_usage(common, "--sealed goes with --session ID");
    }
    if (r->name != NULL && !kvfcli_is_hex(r->name)) {
        return kvfcli_usage(common, "\"%s\" is not the beginning of a space or key: hex digits are", r->name);
    }
    if (r->space != NULL && !kvfcli_is_hex(r->space)) {
        return kvfcli_usage(common, "\"%s\" is not the beginning of a space: hex digits are", r->space);
    }
    return KVFCLI_FINE;
}

static int take(void *ctx, int opt, const char *value) {
    request *r = ctx;
    switch (opt) {
    case OPT_SESSION:
        r->session = value;
        break;
    case OPT_SPACE:
        r->space = value;
        break;
    default:
        r->model = value;
    }
    return KVFCLI_FINE;
}

int kvfcli_inspect(int argc, char **argv) {
    static const struct option options[] = {KVFCLI_COMMON_OPTIONS,
                                            {"session", required_argument, NULL, OPT_SESSION},
                                            {"sealed", no_argument, NULL, KVFCLI_OPT_SEAL},
                                            {"space", required_argument, NULL, OPT_SPACE},
                                            {"model", required_argument, NULL, 'm'},
                                            {0}};
    static const kvfcli_verb verb = {
        .help = help, .options = options, .letters = "m:", .take = take, .check = check, .work = work};
    request r = {.name = NULL};
    return kvfcli_verb_main(&verb, &r, argc, argv);
}
