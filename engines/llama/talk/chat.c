/* SPDX-License-Identifier: Apache-2.0
 *
 * A conversation that a later process, or another machine, continues by its id alone.
 *
 * Every turn is a separate record, named by id and number, so nothing is ever rewritten. Its payload is JSON: question,
 * answer, and the token ids that they added, exactly as the model read and produced them; these ids find the blocks of
 * earlier turns. Each turn names the content of the previous one. A record that does not follow from the turn before it
 * (the store dropped a turn, and the conversation continued without) is not part of the conversation, and is removed
 * when its place is needed.
 */
#include "llama/talk/talk.h"

#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FORMAT_VERSION = 1, TURNS_A_CALL = 1000, HEX32 = 65 };
#define MAX_TURN_BYTES ((uint64_t)1 << 30)

static kvf_status fail(kvf_error *err, kvf_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static kvf_status fail(kvf_error *err, kvf_status status, const char *format, ...) {
    if (err != NULL) {
        va_list args;
        va_start(args, format);
        err->status = status;
        vsnprintf(err->what, sizeof err->what, format, args);
        va_end(args);
    }
    return status;
}

static kvf_status no_memory(kvf_error *err) {
    return fail(err, KVF_NOMEM, "out of memory");
}

static void hex(char out[HEX32], const uint8_t bytes[32]) {
    for (size_t i = 0; i < 32; i++) {
        snprintf(out + 2 * i, 3, "%02x", bytes[i]);
    }
}

static bool unhex(uint8_t out[32], const char *text) {
    bool good = strlen(text) == HEX32 - 1 && strspn(text, "0123456789abcdef") == HEX32 - 1;
    for (size_t i = 0; good && i < 32; i++) {
        char byte[3] = {text[2 * i], text[2 * i + 1], '\0'};
        out[i] = (uint8_t)strtoul(byte, NULL, 16);
    }
    return good;
}

static void key_of_turn(const kvfl_chat *chat, size_t number, kvf_key *out) {
    char name[KVF_MAX_ID_BYTES + 32];
    int len = snprintf(name, sizeof name, "%s/%zu", chat->id, number);
    kvf_key_of(chat->space, out, name, (size_t)len);
}

/* ---- one turn as JSON ---- */

static bool read_tokens(kvfl_tokens *out, const json_t *list) {
    bool good = json_is_array(list);
    for (size_t i = 0; good && i < json_array_size(list); i++) {
        const json_t *item = json_array_get(list, i);
        json_int_t value = json_integer_value(item);
        llama_token id = (llama_token)value;
        good = json_is_integer(item) && value >= 0 && value <= INT32_MAX && kvfl_tokens_add(out, &id, 1);
    }
    return good;
}

static bool add_messages(kvfl_chat *chat, const char *question, const char *answer) {
    kvfl_turn *turns = realloc(chat->turns, (chat->num_turns + 1) * sizeof *turns);
    if (turns == NULL) {
        return false;
    }
    chat->turns = turns;
    turns[chat->num_turns] = (kvfl_turn){strdup(question), strdup(answer)};
    chat->num_turns++;
    return turns[chat->num_turns - 1].question != NULL && turns[chat->num_turns - 1].answer != NULL;
}

/* The names are those of print_turn. */
static bool take_turn(kvfl_chat *chat, json_t *json) {
    const char *question, *answer, *engine;
    json_t *prompt, *said;
    int version = 0, whole = 0;
    if (json_unpack(json, "{s:i, s:s, s:s, s:s, s:b, s:o, s:o}", "version", &version, "question", &question, "answer",
                    &answer, "engine", &engine, "whole", &whole, "prompt", &prompt, "said", &said) != 0 ||
        version != FORMAT_VERSION || !unhex(chat->engine.bytes, engine)) {
        return false;
    }
    if (whole) {
        chat->tokens.num = 0;
    }
    return add_messages(chat, question, answer) && read_tokens(&chat->tokens, prompt) &&
           read_tokens(&chat->tokens, said);
}

/* Whether this follows the last turn, and is not a leftover of another history. */
static bool is_next(const kvfl_chat *chat, const json_t *json) {
    char last[HEX32];
    const char *after = json_string_value(json_object_get(json, "after"));
    hex(last, chat->last.bytes);
    return chat->num_stale == 0 && (after == NULL || strcmp(after, last) == 0);
}

static bool read_turn(kvfl_chat *chat, const void *payload, size_t len) {
    json_t *json = json_loadb(payload, len, 0, NULL);
    bool good = json != NULL;
    if (good && !is_next(chat, json)) {
        chat->num_stale++;
    } else if (good) {
        good = take_turn(chat, json);
        kvf_key_of(chat->space, &chat->last, payload, len);
    }
    json_decref(json);
    return good;
}

static json_t *list_of(const llama_token *ids, size_t num) {
    json_t *list = json_array();
    for (size_t i = 0; i < num; i++) {
        json_array_append_new(list, json_integer(ids[i]));
    }
    return list;
}

static char *print_turn(const kvfl_chat *chat, const kvfl_new_turn *turn) {
    char after[HEX32], engine[HEX32];
    kvf_digest digest = {{0}}; /* no chat continues with zeros */
    if (turn->engine != NULL) {
        kvf_space_digest(turn->engine, &digest);
    }
    hex(after, chat->last.bytes);
    hex(engine, digest.bytes);
    json_t *json = json_pack("{s:i, s:s, s:s, s:s, s:s, s:s, s:b, s:o, s:o}", "version", FORMAT_VERSION, "id", chat->id,
                             "after", after, "question", turn->question, "answer", turn->answer, "engine", engine,
                             "whole", (int)turn->whole, "prompt", list_of(turn->prompt, turn->num_prompt), "said",
                             list_of(turn->said->ids, turn->said->num));
    char *text = json != NULL ? json_dumps(json, JSON_COMPACT) : NULL;
    json_decref(json);
    return text;
}

/* ---- the records ---- */

/* What one call of match and load brings. */
typedef struct reading {
    kvf_key keys[TURNS_A_CALL];
    kvf_found found[TURNS_A_CALL];
    kvf_block blocks[TURNS_A_CALL];
    struct iovec iov[TURNS_A_CALL];
    size_t num;
} reading;

static kvf_status unreadable(const kvfl_chat *chat, kvf_error *err, size_t turn, const char *why) {
    return fail(err, KVF_IO, "turn %zu of the chat \"%.64s\" can't be read from the store (%s)", turn + 1, chat->id,
                why);
}

static kvf_status find_turns(const kvfl_chat *chat, kvf_error *err, reading *r, size_t first) {
    for (size_t i = 0; i < TURNS_A_CALL; i++) {
        key_of_turn(chat, first + i, &r->keys[i]);
    }
    kvf_status status = kvf_match(chat->space, &r->num, r->found, r->keys, TURNS_A_CALL, chat->budget_us);
    if (status != KVF_OK) {
        return unreadable(chat, err, first, kvf_status_name(status));
    }
    /* The conversation ends only where the store has said so. */
    kvf_reason why = r->num < TURNS_A_CALL ? r->found[r->num].why : KVF_WHY_ABSENT;
    return why == KVF_WHY_ABSENT ? KVF_OK : unreadable(chat, err, first + r->num, kvf_reason_name(why));
}

static bool make_room(reading *r) {
    for (size_t i = 0; i < r->num; i++) {
        bool sane = r->found[i].payload_bytes <= MAX_TURN_BYTES;
        r->iov[i] = (struct iovec){sane ? malloc((size_t)r->found[i].payload_bytes + 1) : NULL,
                                   (size_t)r->found[i].payload_bytes};
        r->blocks[i] = (kvf_block){.key = r->keys[i], .iov = &r->iov[i], .num_iov = 1};
        if (r->iov[i].iov_base == NULL) {
            return false;
        }
    }
    return true;
}

static kvf_status read_turns(kvfl_chat *chat, kvf_error *err, reading *r, size_t first) {
    if (!make_room(r)) {
        return no_memory(err);
    }
    size_t loaded = kvf_load(chat->space, r->blocks, r->num, NULL, chat->budget_us);
    if (loaded < r->num) {
        return unreadable(chat, err, first + loaded, kvf_reason_name(r->blocks[loaded].why));
    }
    for (size_t i = 0; i < r->num; i++) {
        if (!read_turn(chat, r->iov[i].iov_base, r->iov[i].iov_len)) {
            return unreadable(chat, err, first + i, "damaged, or of another version");
        }
    }
    return KVF_OK;
}

/* Reads all turns from 0 on, as many at a time as one call takes. */
static kvf_status read_all(kvfl_chat *chat, kvf_error *err, reading *r) {
    kvf_status status = KVF_OK;
    size_t first = 0;
    do {
        *r = (reading){.num = 0};
        status = find_turns(chat, err, r, first);
        if (status == KVF_OK && r->num > 0) {
            status = read_turns(chat, err, r, first);
        }
        for (size_t i = 0; i < r->num; i++) {
            free(r->iov[i].iov_base);
        }
        first += TURNS_A_CALL;
    } while (status == KVF_OK && r->num == TURNS_A_CALL);
    return status;
}

/* KVF_OK: there was such a turn. */
static kvf_status remove_turn(const kvfl_chat *chat, kvf_error *err, size_t number) {
    kvf_digest space;
    kvf_key key;
    key_of_turn(chat, number, &key);
    kvf_space_digest(chat->space, &space);
    return kvf_remove(chat->store, err, &space, &key);
}

static kvf_status remove_all(const kvfl_chat *chat, kvf_error *err) {
    kvf_status status = KVF_OK;
    for (size_t i = 0; status == KVF_OK; i++) {
        status = remove_turn(chat, err, i);
    }
    return status == KVF_MISS ? KVF_OK : status;
}

static kvf_status remove_stale(const kvfl_chat *chat, kvf_error *err) {
    kvf_status status = KVF_OK;
    for (size_t i = 0; status == KVF_OK && i < chat->num_stale; i++) {
        status = remove_turn(chat, err, chat->num_turns + i);
        status = status == KVF_MISS ? KVF_OK : status;
    }
    return status;
}

/* ---- */

static kvf_status open_space(kvfl_chat *chat, kvf_error *err, const char *tenant) {
    const kvf_field fields[] = {{"engine", "kvferry run"}, {"model", "chat"}, {"kv", "json"}, {"tenant", tenant}};
    const kvf_space_options options = {.struct_size = sizeof options, .block_tokens = 1};
    size_t num = sizeof fields / sizeof *fields - (tenant == NULL || tenant[0] == '\0');
    return kvf_space_open(&chat->space, err, chat->store, fields, num, &options);
}

kvf_status kvfl_chat_load(kvfl_chat *chat, kvf_error *err, kvf_store *store, const char *id, const char *tenant,
                          int64_t budget_us, bool restart) {
    *chat = (kvfl_chat){.id = id, .store = store, .budget_us = budget_us};
    kvf_status status = open_space(chat, err, tenant);
    if (status == KVF_OK && restart) {
        status = remove_all(chat, err);
    }
    reading *r = malloc(sizeof *r);
    if (status == KVF_OK) {
        status = r != NULL ? read_all(chat, err, r) : no_memory(err);
    }
    free(r);
    return status;
}

kvfl_message *kvfl_chat_messages(const kvfl_chat *chat, const char *question) {
    kvfl_message *messages = calloc(2 * chat->num_turns + 1, sizeof *messages);
    if (messages == NULL) {
        return NULL;
    }
    for (size_t i = 0; i < chat->num_turns; i++) {
        messages[2 * i] = (kvfl_message){"user", chat->turns[i].question};
        messages[2 * i + 1] = (kvfl_message){"assistant", chat->turns[i].answer};
    }
    messages[2 * chat->num_turns] = (kvfl_message){"user", question};
    return messages;
}

bool kvfl_chat_goes_on(const kvfl_chat *chat, const kvf_space *space) {
    kvf_digest now;
    if (chat->num_turns == 0 || space == NULL) {
        return false;
    }
    kvf_space_digest(space, &now);
    return memcmp(&now, &chat->engine, sizeof now) == 0;
}

static kvf_reason last_failure(kvf_store *store) {
    kvf_stats stats = {.struct_size = sizeof stats};
    kvf_store_stats(store, &stats);
    for (size_t i = KVF_NUM_REASONS; i-- > 0;) {
        if (stats.save_failures[i] > 0) {
            return (kvf_reason)i;
        }
    }
    return KVF_WHY_FULL;
}

/* A turn that is stored is not written over, so the place may have another one by now: of a request that went on from the
 * same turn at the same time. */
static kvf_status check_stored(kvfl_chat *chat, kvf_error *err, const kvf_key *key, const char *text) {
    struct iovec iov = {malloc(strlen(text) + 1), strlen(text)};
    kvf_block block = {.key = *key, .iov = &iov, .num_iov = 1};
    if (iov.iov_base == NULL) {
        return no_memory(err);
    }
    bool found = kvf_load(chat->space, &block, 1, NULL, chat->budget_us) == 1;
    bool same = found && memcmp(iov.iov_base, text, iov.iov_len) == 0;
    free(iov.iov_base);
    if (same) {
        return KVF_OK;
    }
    if (found || block.why == KVF_WHY_TRUNCATED) {
        return fail(
            err, KVF_IO,
            "this turn of the chat \"%.64s\" was not stored: another one came first in its place; the next turn "
            "will not include it",
            chat->id);
    }
    return fail(err, KVF_IO,
                "this turn of the chat \"%.64s\" can't be read back (%s); the next turn may not include it", chat->id,
                kvf_reason_name(block.why));
}

static kvf_status store_turn(kvfl_chat *chat, kvf_error *err, char *text, int64_t budget_us) {
    struct iovec iov = {text, strlen(text)};
    kvf_block block = {.iov = &iov, .num_iov = 1};
    key_of_turn(chat, chat->num_turns, &block.key);
    bool taken = kvf_save(chat->space, &block, 1, NULL) == 1;
    kvf_status flushed = taken ? kvf_store_flush(chat->store, NULL, budget_us) : KVF_MISS;
    if (!taken || flushed != KVF_OK) {
        kvf_reason why = !taken ? block.why : flushed == KVF_AGAIN ? KVF_WHY_BUDGET : last_failure(chat->store);
        return fail(err, KVF_IO,
                    "this turn of the chat \"%.64s\" was not stored (%s); the next turn will not include it", chat->id,
                    kvf_reason_name(why));
    }
    return check_stored(chat, err, &block.key, text);
}

kvf_status kvfl_chat_add(kvfl_chat *chat, kvf_error *err, const kvfl_new_turn *turn, int64_t budget_us) {
    kvf_status status = remove_stale(chat, err);
    char *text = status == KVF_OK ? print_turn(chat, turn) : NULL;
    if (status == KVF_OK) {
        status = text != NULL ? store_turn(chat, err, text, budget_us) : no_memory(err);
    }
    free(text);
    return status;
}

void kvfl_chat_cleanup(kvfl_chat *chat) {
    for (size_t i = 0; i < chat->num_turns; i++) {
        free(chat->turns[i].question);
        free(chat->turns[i].answer);
    }
    free(chat->turns);
    kvfl_tokens_cleanup(&chat->tokens);
    kvf_space_close(chat->space);
    *chat = (kvfl_chat){.id = NULL};
}
