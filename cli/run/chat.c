/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry run: a conversation that a later process continues by its id alone.
 *
 * Every turn is a separate record, named by id and number, so nothing is ever rewritten. Its payload is JSON: question,
 * answer, and the token ids that they added, exactly as the model read and produced them; these ids find the blocks of
 * earlier turns. Each turn names the content of the previous one. A record that does not follow from the turn before it
 * (the store dropped a turn, and the conversation continued without) is not part of the conversation, and is removed
 * when its place is needed.
 */
#include "run/run.h"

#include <stdlib.h>
#include <string.h>

enum { FORMAT_VERSION = 1, TURNS_A_CALL = 1000, FLUSH_MS = 10000 };
#define MAX_TURN_BYTES ((uint64_t)1 << 30)

static void key_of_turn(const kvfcli_chat *chat, size_t number, kvf_key *out) {
    char name[KVF_MAX_ID_BYTES + 32];
    int len = snprintf(name, sizeof name, "%s/%zu", chat->id, number);
    kvf_key_of(chat->space, out, name, (size_t)len);
}

/* ---- one turn as JSON ---- */

static bool read_tokens(kvfcli_tokens *out, const json_t *list) {
    bool good = json_is_array(list);
    for (size_t i = 0; good && i < json_array_size(list); i++) {
        const json_t *item = json_array_get(list, i);
        json_int_t value = json_integer_value(item);
        llama_token id = (llama_token)value;
        good = json_is_integer(item) && value >= 0 && value <= INT32_MAX && kvfcli_tokens_add(out, &id, 1);
    }
    return good;
}

static bool add_messages(kvfcli_chat *chat, const char *question, const char *answer) {
    kvfcli_turn *turns = realloc(chat->turns, (chat->num_turns + 1) * sizeof *turns);
    if (turns == NULL) {
        return false;
    }
    chat->turns = turns;
    turns[chat->num_turns] = (kvfcli_turn){strdup(question), strdup(answer)};
    chat->num_turns++;
    return turns[chat->num_turns - 1].question != NULL && turns[chat->num_turns - 1].answer != NULL;
}

/* The names are those of print_turn. */
static bool take_turn(kvfcli_chat *chat, json_t *json) {
    const char *question, *answer, *engine;
    json_t *prompt, *said;
    int version = 0, whole = 0;
    if (json_unpack(json, "{s:i, s:s, s:s, s:s, s:b, s:o, s:o}", "version", &version, "question", &question, "answer",
                    &answer, "engine", &engine, "whole", &whole, "prompt", &prompt, "said", &said) != 0 ||
        version != FORMAT_VERSION || !kvfcli_unhex(chat->engine.bytes, engine)) {
        return false;
    }
    if (whole) {
        chat->tokens.num = 0;
    }
    return add_messages(chat, question, answer) && read_tokens(&chat->tokens, prompt) &&
           read_tokens(&chat->tokens, said);
}

/* Whether this follows the last turn, and is not a leftover of another history. */
static bool is_next(const kvfcli_chat *chat, const json_t *json) {
    char last[KVFCLI_HEX32];
    const char *after = json_string_value(json_object_get(json, "after"));
    kvfcli_hex(last, chat->last.bytes);
    return chat->num_stale == 0 && (after == NULL || strcmp(after, last) == 0);
}

static bool read_turn(kvfcli_chat *chat, const void *payload, size_t len) {
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

static char *print_turn(const kvfcli_chat *chat, const kvfcli_new_turn *turn) {
    json_t *json =
        json_pack("{s:i, s:s, s:o, s:s, s:s, s:o, s:b, s:o, s:o}", "version", FORMAT_VERSION, "id", chat->id, "after",
                  kvfcli_json_hex(chat->last.bytes), "question", turn->question, "answer", turn->answer, "engine",
                  kvfcli_json_hex(turn->engine->bytes), "whole", (int)turn->whole, "prompt",
                  list_of(turn->prompt, turn->num_prompt), "said", list_of(turn->said->ids, turn->said->num));
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

static int unreadable(const kvfcli_chat *chat, size_t turn, const char *why) {
    kvfcli_say("turn %zu of the chat \"%s\" can't be read from the store (%s); --restart starts again", turn + 1,
               chat->id, why);
    return KVFCLI_IO;
}

static int find_turns(const kvfcli_chat *chat, reading *r, size_t first) {
    for (size_t i = 0; i < TURNS_A_CALL; i++) {
        key_of_turn(chat, first + i, &r->keys[i]);
    }
    kvf_status status = kvf_match(chat->space, &r->num, r->found, r->keys, TURNS_A_CALL, chat->budget_us);
    return status == KVF_OK ? KVFCLI_FINE : unreadable(chat, first, kvf_status_name(status));
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

static int read_turns(kvfcli_chat *chat, reading *r, size_t first) {
    if (!make_room(r)) {
        return kvfcli_no_memory();
    }
    size_t loaded = kvf_load(chat->space, r->blocks, r->num, NULL, chat->budget_us);
    if (loaded < r->num) {
        return unreadable(chat, first + loaded, kvf_reason_name(r->blocks[loaded].why));
    }
    for (size_t i = 0; i < r->num; i++) {
        if (!read_turn(chat, r->iov[i].iov_base, r->iov[i].iov_len)) {
            return unreadable(chat, first + i, "damaged, or of another version");
        }
    }
    return KVFCLI_FINE;
}

/* Reads all turns from 0 on, as many at a time as one call takes. */
static int read_all(kvfcli_chat *chat, reading *r) {
    int code = KVFCLI_FINE;
    size_t first = 0;
    do {
        *r = (reading){.num = 0};
        code = find_turns(chat, r, first);
        if (code == KVFCLI_FINE && r->num > 0) {
            code = read_turns(chat, r, first);
        }
        for (size_t i = 0; i < r->num; i++) {
            free(r->iov[i].iov_base);
        }
        first += TURNS_A_CALL;
    } while (code == KVFCLI_FINE && r->num == TURNS_A_CALL);
    return code;
}

static int remove_turn(const kvfcli_chat *chat, size_t number, kvf_status *status) {
    kvf_error err = {.status = KVF_OK};
    kvf_digest space;
    kvf_key key;
    key_of_turn(chat, number, &key);
    kvf_space_digest(chat->space, &space);
    *status = kvf_remove(chat->store, &err, &space, &key);
    return *status == KVF_OK || *status == KVF_MISS ? KVFCLI_FINE : kvfcli_fail(*status, &err);
}

static int remove_all(const kvfcli_chat *chat) {
    kvf_status status = KVF_OK;
    int code = KVFCLI_FINE;
    for (size_t i = 0; code == KVFCLI_FINE && status == KVF_OK; i++) {
        code = remove_turn(chat, i, &status);
    }
    return code;
}

static int remove_stale(const kvfcli_chat *chat) {
    kvf_status status = KVF_OK;
    int code = KVFCLI_FINE;
    for (size_t i = 0; code == KVFCLI_FINE && i < chat->num_stale; i++) {
        code = remove_turn(chat, chat->num_turns + i, &status);
    }
    return code;
}

/* ---- */

static int open_space(kvfcli_chat *chat) {
    static const kvf_field fields[] = {{"engine", "kvferry run"}, {"model", "chat"}, {"kv", "json"}};
    const kvf_space_options options = {.struct_size = sizeof options, .block_tokens = 1};
    kvf_error err = {.status = KVF_OK};
    kvf_status status =
        kvf_space_open(&chat->space, &err, chat->store, fields, sizeof fields / sizeof *fields, &options);
    return status == KVF_OK ? KVFCLI_FINE : kvfcli_fail(status, &err);
}

int kvfcli_chat_load(kvfcli_chat *chat, kvf_store *store, const kvfcli_run_options *options) {
    int64_t began = kvfcli_now_us();
    *chat = (kvfcli_chat){.id = options->chat, .store = store, .budget_us = KVF_MS(options->budget_ms)};
    int code = open_space(chat);
    if (code == KVFCLI_FINE && options->restart) {
        code = remove_all(chat);
    }
    reading *r = malloc(sizeof *r);
    if (code == KVFCLI_FINE) {
        code = r != NULL ? read_all(chat, r) : kvfcli_no_memory();
    }
    free(r);
    chat->load_us = kvfcli_now_us() - began;
    return code;
}

kvfcli_message *kvfcli_chat_messages(const kvfcli_chat *chat, const char *question) {
    kvfcli_message *messages = calloc(2 * chat->num_turns + 1, sizeof *messages);
    if (messages == NULL) {
        return NULL;
    }
    for (size_t i = 0; i < chat->num_turns; i++) {
        messages[2 * i] = (kvfcli_message){"user", chat->turns[i].question};
        messages[2 * i + 1] = (kvfcli_message){"assistant", chat->turns[i].answer};
    }
    messages[2 * chat->num_turns] = (kvfcli_message){"user", question};
    return messages;
}

static int store_turn(kvfcli_chat *chat, char *text) {
    struct iovec iov = {text, strlen(text)};
    kvf_block block = {.iov = &iov, .num_iov = 1};
    key_of_turn(chat, chat->num_turns, &block.key);
    bool taken = kvf_save(chat->space, &block, 1, NULL) == 1;
    kvf_status flushed = taken ? kvf_store_flush(chat->store, NULL, KVF_MS(FLUSH_MS)) : KVF_MISS;
    if (!taken || flushed != KVF_OK) {
        kvf_reason why = !taken                 ? block.why
                         : flushed == KVF_AGAIN ? KVF_WHY_BUDGET
                                                : kvfcli_last_failure(chat->store, KVF_WHY_FULL);
        kvfcli_say("this turn of the chat \"%s\" was not stored (%s); the next turn will not include it", chat->id,
                   kvf_reason_name(why));
        return KVFCLI_IO;
    }
    return KVFCLI_FINE;
}

int kvfcli_chat_add(kvfcli_chat *chat, const kvfcli_new_turn *turn) {
    int code = remove_stale(chat);
    char *text = code == KVFCLI_FINE ? print_turn(chat, turn) : NULL;
    if (code == KVFCLI_FINE) {
        code = text != NULL ? store_turn(chat, text) : kvfcli_no_memory();
    }
    free(text);
    return code;
}

void kvfcli_chat_cleanup(kvfcli_chat *chat) {
    for (size_t i = 0; i < chat->num_turns; i++) {
        free(chat->turns[i].question);
        free(chat->turns[i].answer);
    }
    free(chat->turns);
    kvfcli_tokens_cleanup(&chat->tokens);
    kvf_space_close(chat->space);
    *chat = (kvfcli_chat){.id = NULL};
}
