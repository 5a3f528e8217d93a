/* SPDX-License-Identifier: Apache-2.0
 *
 * The prompt of a request: its text, token ids, messages, or what a session has so far and the new text.
 */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "triton/backend/backend.h"

/* ---- messages ---- */

static TRITONSERVER_Error *bad_messages(const char *what) {
    return kvfb_error(TRITONSERVER_ERROR_INVALID_ARG,
                      "input \"messages\": %s; it is a JSON array like [{\"role\": \"user\", \"content\": \"...\"}]",
                      what);
}

static bool read_message(kvfl_message *out, json_t *json) {
    out->role = json_string_value(json_object_get(json, "role"));
    out->text = json_string_value(json_object_get(json, "content"));
    return out->role != NULL && out->text != NULL && json_object_size(json) == 2;
}

static kvf_status tokenize_messages(kvfb_request *r, kvf_error *err, json_t *list, TRITONSERVER_Error **error) {
    const kvfb_model *model = r->instance->model;
    size_t num = json_array_size(list);
    kvfl_message *messages = calloc(num + 1, sizeof *messages);
    kvf_status status = messages == NULL ? KVF_NOMEM : KVF_OK;
    for (size_t i = 0; i < num && status == KVF_OK && *error == NULL; i++) {
        if (!read_message(&messages[i], json_array_get(list, i))) {
            *error = bad_messages("each message has a \"role\" and a \"content\", both texts, and nothing else");
        }
    }
    if (status == KVF_OK && *error == NULL) {
        status = kvfl_tokenize_chat(&r->prompt, err, model->vocab, model->chat_template, messages, num);
    }
    free(messages);
    return status;
}

static kvf_status from_messages(kvfb_request *r, kvf_error *err, TRITONSERVER_Error **error) {
    json_error_t where;
    json_t *list = json_loads(r->messages, JSON_REJECT_DUPLICATES, &where);
    kvf_status status = KVF_OK;
    if (list == NULL) {
        *error = bad_messages("it is not JSON");
    } else if (!json_is_array(list) || json_array_size(list) == 0) {
        *error = bad_messages("it is not an array, or empty");
    } else {
        status = tokenize_messages(r, err, list, error);
    }
    json_decref(list);
    return status;
}

/* ---- a session ---- */

static kvf_status from_session(kvfb_request *r, kvf_error *err, const kvf_space *space) {
    const kvfb_model *model = r->instance->model;
    r->whole = !kvfl_chat_goes_on(&r->chat, space) || !kvfl_tokens_known(&r->chat.tokens, model->vocab);
    if (!r->whole) {
        r->num_old = r->chat.tokens.num;
        return kvfl_tokens_add(&r->prompt, r->chat.tokens.ids, r->chat.tokens.num)
                   ? kvfl_tokenize_turn(&r->prompt, err, model->vocab, model->chat_template, r->text)
                   : KVF_NOMEM;
    }
    kvfl_message *messages = kvfl_chat_messages(&r->chat, r->text);
    kvf_status status = messages == NULL ? KVF_NOMEM
                                         : kvfl_tokenize_chat(&r->prompt, err, model->vocab, model->chat_template,
                                                              messages, 2 * r->chat.num_turns + 1);
    free(messages);
    return status;
}

/* ---- any ---- */

static kvf_status make(kvfb_request *r, kvf_error *err, const kvf_space *space, TRITONSERVER_Error **error) {
    const kvfb_model *model = r->instance->model;
    if (r->ids.num > 0) {
        r->prompt = r->ids;
        r->ids = (kvfl_tokens){.num = 0};
        return KVF_OK;
    }
    if (r->messages != NULL) {
        return from_messages(r, err, error);
    }
    if (r->session != NULL) {
        return from_session(r, err, space);
    }
    return kvfl_tokenize(&r->prompt, err, model->vocab, r->text, r->text_len, true);
}

/* Text that is far too long is refused before it costs the time to turn it into tokens. */
static TRITONSERVER_Error *check_text(const kvfb_request *r) {
    const kvfb_model *model = r->instance->model;
    size_t len = r->messages != NULL ? strlen(r->messages) : r->text_len;
    if (len <= model->max_text) {
        return NULL;
    }
    return kvfb_error(TRITONSERVER_ERROR_INVALID_ARG,
                      "the prompt has %zu bytes, which is more than the context of %u tokens can hold (parameter "
                      "\"context_size\")",
                      len, model->context);
}

static TRITONSERVER_Error *check_tokens(kvfb_request *r) {
    uint32_t context = r->instance->model->context;
    if (r->prompt.num == 0) {
        return kvfb_error(TRITONSERVER_ERROR_INVALID_ARG, "the prompt has no tokens");
    }
    if (r->prompt.num >= context) {
        return kvfb_error(
            TRITONSERVER_ERROR_INVALID_ARG,
            "the prompt has %zu tokens, which leaves no room for an answer in the context of %u (parameter "
            "\"context_size\")",
            r->prompt.num, context);
    }
    uint32_t room = context - (uint32_t)r->prompt.num;
    r->max_tokens = r->max_tokens < room ? r->max_tokens : room;
    return NULL;
}

TRITONSERVER_Error *kvfb_prompt_make(kvfb_request *r, const kvf_space *space) {
    kvf_error err = {.status = KVF_OK};
    TRITONSERVER_Error *error = check_text(r);
    if (error != NULL) {
        return error;
    }
    kvf_status status = make(r, &err, space, &error);
    if (error == NULL && status != KVF_OK) {
        error = status == KVF_NOMEM ? kvfb_no_memory() : kvfb_error_of("the prompt", status, &err);
    }
    return error == NULL ? check_tokens(r) : error;
}
