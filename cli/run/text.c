/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry run: text to tokens and back. Chat templates are those that llama.cpp knows by itself
 * (llama_chat_apply_template).
 */
#include "run/run.h"
#include "run/verbs.h"

#include <stdlib.h>
#include <string.h>

/* ---- lists of tokens ---- */

bool kvfcli_tokens_add(kvfcli_tokens *tokens, const llama_token *ids, size_t num) {
    if (!kvfcli_grow(&tokens->ids, &tokens->cap, tokens->num + num, sizeof *ids)) {
        return false;
    }
    if (num > 0) {
        memcpy(tokens->ids + tokens->num, ids, num * sizeof *ids);
    }
    tokens->num += num;
    return true;
}

void kvfcli_tokens_cleanup(kvfcli_tokens *tokens) {
    free(tokens->ids);
    *tokens = (kvfcli_tokens){0};
}

/* ---- UTF-8 ---- */

/* The length of the character that begins with this byte; 0 when none does. */
static size_t length_by_lead(unsigned char lead) {
    if (lead < 0x80) {
        return 1;
    }
    if (lead >= 0xC2 && lead <= 0xDF) {
        return 2;
    }
    if (lead >= 0xE0 && lead <= 0xEF) {
        return 3;
    }
    return lead >= 0xF0 && lead <= 0xF4 ? 4 : 0;
}

/* Whether byte i (1 to 3) can follow. Also excludes overlong forms, surrogates and code points above U+10FFFF. */
static bool can_follow(const unsigned char *c, size_t i) {
    if ((c[i] & 0xC0) != 0x80) {
        return false;
    }
    if (i > 1) {
        return true;
    }
    return !(c[0] == 0xE0 && c[1] < 0xA0) && !(c[0] == 0xED && c[1] > 0x9F) && !(c[0] == 0xF0 && c[1] < 0x90) &&
           !(c[0] == 0xF4 && c[1] > 0x8F);
}

/* How many of the bytes belong to one character, as far as they go, and whether it is complete. 0: none begins here. */
static size_t character(const char *bytes, size_t len, bool *complete) {
    const unsigned char *c = (const unsigned char *)bytes;
    size_t want = length_by_lead(c[0]);
    size_t have = want > 0 ? 1 : 0;
    while (have > 0 && have < want && have < len && can_follow(c, have)) {
        have++;
    }
    *complete = have > 0 && have == want;
    return have;
}

size_t kvfcli_utf8_check(const char *bytes, size_t len) {
    bool complete = true;
    size_t at = 0;
    while (at < len) {
        size_t have = character(bytes + at, len - at, &complete);
        if (!complete) {
            return at;
        }
        at += have;
    }
    return at;
}

static bool add_replacement(kvfcli_string *out) {
    return kvfcli_string_add(out, "\xEF\xBF\xBD", 3);
}

bool kvfcli_utf8_feed(kvfcli_utf8 *utf8, kvfcli_string *out, const char *bytes, size_t len) {
    for (size_t i = 0; i < len; i++) {
        bool complete;
        utf8->held[utf8->num_held++] = bytes[i];
        size_t have = character(utf8->held, utf8->num_held, &complete);
        if (have < utf8->num_held) {
            /* The new byte does not continue the held ones. It may begin a character itself. */
            utf8->num_held = 0;
            if (!add_replacement(out)) {
                return false;
            }
            if (have > 0) {
                i--;
            }
        } else if (complete) {
            utf8->num_held = 0;
            if (!kvfcli_string_add(out, utf8->held, have)) {
                return false;
            }
        }
    }
    return true;
}

bool kvfcli_utf8_end(kvfcli_utf8 *utf8, kvfcli_string *out) {
    bool held = utf8->num_held > 0;
    utf8->num_held = 0;
    return !held || add_replacement(out);
}

/* ---- tokens to text ---- */

bool kvfcli_add_piece(kvfcli_utf8 *utf8, kvfcli_string *out, const struct llama_vocab *vocab, llama_token token) {
    char room[128], *piece = room;
    int32_t len = llama_token_to_piece(vocab, token, room, sizeof room, 0, false);
    if (len < 0) {
        piece = malloc((size_t)-len);
        if (piece == NULL) {
            return false;
        }
        len = llama_token_to_piece(vocab, token, piece, -len, 0, false);
    }
    bool done = len <= 0 || kvfcli_utf8_feed(utf8, out, piece, (size_t)len);
    if (piece != room) {
        free(piece);
    }
    return done;
}

char *kvfcli_text_of(const struct llama_vocab *vocab, const uint32_t *tokens, size_t num) {
    kvfcli_utf8 utf8 = {.num_held = 0};
    kvfcli_string text = {.text = NULL};
    bool good = kvfcli_string_add(&text, "", 0);
    for (size_t i = 0; i < num && good; i++) {
        bool known = tokens[i] < (uint32_t)llama_vocab_n_tokens(vocab);
        good = known ? kvfcli_add_piece(&utf8, &text, vocab, (llama_token)tokens[i]) : add_replacement(&text);
    }
    if (!good || !kvfcli_utf8_end(&utf8, &text)) {
        kvfcli_string_cleanup(&text);
    }
    return text.text;
}

static kvf_status fail(kvf_error *err, kvf_status status, const char *model, const char *what) {
    err->status = status;
    snprintf(err->what, sizeof err->what, "%.150s: %.90s", model, what);
    return status;
}

kvf_status kvfcli_detokenize(const char *model, const uint32_t *tokens, size_t num, char **out, kvf_error *err) {
    if (kvfcli_check_model_file(err, model) != KVF_OK) {
        return err->status;
    }
    struct llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    kvfcli_watch_llama(false);
    struct llama_model *loaded = llama_model_load_from_file(model, params);
    if (loaded == NULL) {
        return fail(err, KVF_LIMIT, model, kvfcli_llama_error());
    }
    *out = kvfcli_text_of(llama_model_get_vocab(loaded), tokens, num);
    llama_model_free(loaded);
    return *out != NULL ? KVF_OK : fail(err, KVF_NOMEM, model, "no memory");
}

/* ---- text to tokens ---- */

static int tokenize(kvfcli_tokens *out, const struct llama_vocab *vocab, const char *text, size_t len, bool first) {
    if (len > INT32_MAX / 2 || !kvfcli_tokens_add(out, NULL, 0)) {
        return kvfcli_no_memory();
    }
    /* At most as many tokens as bytes, plus those at the beginning and the end. */
    size_t room = len + 16;
    llama_token *ids = malloc(room * sizeof *ids);
    if (ids == NULL) {
        return kvfcli_no_memory();
    }
    int32_t num = llama_tokenize(vocab, text, (int32_t)len, ids, (int32_t)room, first, true);
    bool good = num >= 0 && kvfcli_tokens_add(out, ids, (size_t)num);
    free(ids);
    if (!good) {
        kvfcli_say("the text could not be turned into tokens");
        return KVFCLI_INPUT;
    }
    return KVFCLI_FINE;
}

/* ---- the chat template ---- */

static bool is_known_template(const char *text) {
    struct llama_chat_message message = {"user", "x"};
    return llama_chat_apply_template(text, &message, 1, true, NULL, 0) >= 0;
}

kvfcli_template kvfcli_choose_template(const struct llama_model *model, const kvfcli_run_options *options) {
    const char *own = llama_model_chat_template(model, NULL);
    if (options->raw || own == NULL) {
        if (!options->raw && !options->quiet) {
            kvfcli_say("the model has no chat template, so the text is used as it is (as with --raw)");
        }
        return (kvfcli_template){.raw = true};
    }
    if (!is_known_template(own)) {
        if (!options->quiet) {
            kvfcli_say("llama.cpp does not know the model's chat template; ChatML is used instead");
        }
        return (kvfcli_template){.text = NULL};
    }
    return (kvfcli_template){.text = own};
}

static int render(kvfcli_string *out, kvfcli_template chat_template, const kvfcli_message *messages, size_t num) {
    int code = KVFCLI_FINE;
    struct llama_chat_message *chat = calloc(num, sizeof *chat);
    if (chat == NULL) {
        return kvfcli_no_memory();
    }
    for (size_t i = 0; i < num; i++) {
        chat[i] = (struct llama_chat_message){messages[i].role, messages[i].text};
    }
    int32_t len = llama_chat_apply_template(chat_template.text, chat, num, true, NULL, 0);
    char *text = len < 0 ? NULL : malloc((size_t)len + 1);
    if (len < 0) {
        kvfcli_say("the chat template can't be applied; --raw works without it");
        code = KVFCLI_INPUT;
    } else if (text == NULL || llama_chat_apply_template(chat_template.text, chat, num, true, text, len) != len ||
               !kvfcli_string_add(out, text, (size_t)len)) {
        code = kvfcli_no_memory();
    }
    free(text);
    free(chat);
    return code;
}

static int join_raw(kvfcli_string *out, const kvfcli_message *messages, size_t num) {
    for (size_t i = 0; i < num; i++) {
        if (!kvfcli_string_add(out, messages[i].text, strlen(messages[i].text))) {
            return kvfcli_no_memory();
        }
    }
    return KVFCLI_FINE;
}

int kvfcli_tokenize_chat(kvfcli_tokens *out, const struct llama_vocab *vocab, kvfcli_template chat_template,
                         const kvfcli_message *messages, size_t num) {
    kvfcli_string text = {.text = NULL};
    int code = chat_template.raw ? join_raw(&text, messages, num) : render(&text, chat_template, messages, num);
    if (code == KVFCLI_FINE) {
        code = tokenize(out, vocab, text.text, text.len, true);
    }
    kvfcli_string_cleanup(&text);
    return code;
}

/* What a template puts after an answer does not depend on the earlier text, only on its existence. So it is read from a
 * conversation of two placeholders, and the tokens of the real one need not be made again. */
int kvfcli_tokenize_turn(kvfcli_tokens *out, const struct llama_vocab *vocab, kvfcli_template chat_template,
                         const char *question) {
    static const char stand_in[] = "@@kvferry-answer@@";
    const kvfcli_message messages[] = {{"user", "?"}, {"assistant", stand_in}, {"user", question}};
    kvfcli_string text = {.text = NULL};
    if (chat_template.raw) {
        return tokenize(out, vocab, question, strlen(question), false);
    }
    int code = render(&text, chat_template, messages, 3);
    const char *mark = code == KVFCLI_FINE ? strstr(text.text, stand_in) : NULL;
    if (mark != NULL) {
        const char *rest = mark + strlen(stand_in);
        code = tokenize(out, vocab, rest, strlen(rest), false);
    } else if (code == KVFCLI_FINE) {
        kvfcli_say("the chat template does not show the answers given before, so it can't go on with a chat");
        code = KVFCLI_INPUT;
    }
    kvfcli_string_cleanup(&text);
    return code;
}
