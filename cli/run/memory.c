/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry run: buffers that grow.
 */
#include "run/run.h"

#include <stdlib.h>
#include <string.h>

int kvfcli_no_memory(void) {
    kvfcli_say("no memory");
    return KVFCLI_IO;
}

static bool grow(void **memory, size_t *cap, size_t need, size_t size) {
    if (need <= *cap) {
        return true;
    }
    size_t room = *cap * 2 > need ? *cap * 2 : need + 64;
    void *more = realloc(*memory, room * size);
    if (more == NULL) {
        return false;
    }
    *memory = more;
    *cap = room;
    return true;
}

bool kvfcli_string_add(kvfcli_string *string, const char *text, size_t len) {
    void *memory = string->text;
    if (!grow(&memory, &string->cap, string->len + len + 1, 1)) {
        return false;
    }
    string->text = memory;
    if (len > 0) {
        memcpy(string->text + string->len, text, len);
    }
    string->len += len;
    string->text[string->len] = '\0';
    return true;
}

void kvfcli_string_cleanup(kvfcli_string *string) {
    free(string->text);
    *string = (kvfcli_string){0};
}

bool kvfcli_tokens_add(kvfcli_tokens *tokens, const llama_token *ids, size_t num) {
    void *memory = tokens->ids;
    if (!grow(&memory, &tokens->cap, tokens->num + num, sizeof *ids)) {
        return false;
    }
    tokens->ids = memory;
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
