/* SPDX-License-Identifier: Apache-2.0
 *
 * Messages to the tokens of a prompt. Chat templates are those that llama.cpp knows by itself
 * (llama_chat_apply_template).
 */
#include "llama/talk/talk.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static kvf_status fail(kvf_error *err, kvf_status status, const char *what) {
    if (err != NULL) {
        err->status = status;
        snprintf(err->what, sizeof err->what, "%s", what);
    }
    return status;
}

static kvf_status no_memory(kvf_error *err) {
    return fail(err, KVF_NOMEM, "out of memory");
}

kvf_status kvfl_tokenize(kvfl_tokens *out, kvf_error *err, const struct llama_vocab *vocab, const char *text,
                         size_t len, bool first) {
    /* At most as many tokens as bytes, plus those at the beginning and the end. */
    size_t room = len + 16;
    llama_token *ids = len <= INT32_MAX / 2 ? malloc(room * sizeof *ids) : NULL;
    if (ids == NULL) {
        return no_memory(err);
    }
    int32_t num = llama_tokenize(vocab, text != NULL ? text : "", (int32_t)len, ids, (int32_t)room, first, true);
    bool good = num >= 0 && kvfl_tokens_add(out, ids, (size_t)num);
    free(ids);
    return good ? KVF_OK : fail(err, KVF_LIMIT, "the text could not be turned into tokens");
}

/* ---- the chat template ---- */

static bool is_known_template(const char *text) {
    struct llama_chat_message message = {"user", "x"};
    return llama_chat_apply_template(text, &message, 1, true, NULL, 0) >= 0;
}

kvfl_template kvfl_template_of(const struct llama_model *model, const char **note) {
    const char *own = llama_model_chat_template(model, NULL);
    *note = NULL;
    if (own == NULL) {
        *note = "the model has no chat template, so the text is used as it is";
        return (kvfl_template){.raw = true};
    }
    if (!is_known_template(own)) {
        *note = "llama.cpp does not know the model's chat template; ChatML is used instead";
        return (kvfl_template){.text = NULL};
    }
    return (kvfl_template){.text = own};
}

static kvf_status render(kvfl_text *out, kvf_error *err, kvfl_template chat_template, const kvfl_message *messages,
                         size_t num) {
    kvf_status status = KVF_OK;
    struct llama_chat_message *chat = calloc(num, sizeof *chat);
    if (chat == NULL) {
        return no_memory(err);
    }
    for (size_t i = 0; i < num; i++) {
        chat[i] = (struct llama_chat_message){messages[i].role, messages[i].text};
    }
    int32_t len = llama_chat_apply_template(chat_template.text, chat, num, true, NULL, 0);
    char *text = len < 0 ? NULL : malloc((size_t)len + 1);
    if (len < 0) {
        status =
            fail(err, KVF_LIMIT, "the chat template can't be applied to these messages; plain text works without it");
    } else if (text == NULL || llama_chat_apply_template(chat_template.text, chat, num, true, text, len) != len ||
               !kvfl_text_add(out, text, (size_t)len)) {
        status = no_memory(err);
    }
    free(text);
    free(chat);
    return status;
}

static kvf_status join_raw(kvfl_text *out, kvf_error *err, const kvfl_message *messages, size_t num) {
    for (size_t i = 0; i < num; i++) {
        if (!kvfl_text_add(out, messages[i].text, strlen(messages[i].text))) {
            return no_memory(err);
        }
    }
    return KVF_OK;
}

kvf_status kvfl_tokenize_chat(kvfl_tokens *out, kvf_error *err, const struct llama_vocab *vocab,
                              kvfl_template chat_template, const kvfl_message *messages, size_t num) {
    kvfl_text text = {.text = NULL};
    kvf_status status =
        chat_template.raw ? join_raw(&text, err, messages, num) : render(&text, err, chat_template, messages, num);
    if (status == KVF_OK) {
        status = kvfl_tokenize(out, err, vocab, text.text, text.len, true);
    }
    kvfl_text_cleanup(&text);
    return status;
}

/* What a template puts after an answer does not depend on the earlier text, only on its existence. So it is read from a
 * conversation of two placeholders, and the tokens of the real one need not be made again. */
kvf_status kvfl_tokenize_turn(kvfl_tokens *out, kvf_error *err, const struct llama_vocab *vocab,
                              kvfl_template chat_template, const char *question) {
    static const char stand_in[] = "@@kvferry-answer@@";
    const kvfl_message messages[] = {{"user", "?"}, {"assistant", stand_in}, {"user", question}};
    kvfl_text text = {.text = NULL};
    if (chat_template.raw) {
        return kvfl_tokenize(out, err, vocab, question, strlen(question), false);
    }
    kvf_status status = render(&text, err, chat_template, messages, 3);
    const char *mark = status == KVF_OK ? strstr(text.text, stand_in) : NULL;
    if (mark != NULL) {
        const char *rest = mark + strlen(stand_in);
        status = kvfl_tokenize(out, err, vocab, rest, strlen(rest), false);
    } else if (status == KVF_OK) {
        status = fail(err, KVF_LIMIT,
                      "the chat template does not show the answers given before, so it can't go on with a chat");
    }
    kvfl_text_cleanup(&text);
    return status;
}
