/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry run: the text of the prompt, from a file and the command line.
 */
#include "run/run.h"

#include <string.h>

/* No context holds more. */
#define MAX_PROMPT_BYTES ((size_t)64 << 20)

/* The tokenizer needs C strings, and a chat is stored as JSON: text without NUL, in UTF-8. */
static int check_text(const kvfcli_string *text, const char *name) {
    size_t good = kvfl_utf8_check(text->text, text->len);
    size_t line = 1;
    for (size_t i = 0; i < good; i++) {
        line += text->text[i] == '\n';
    }
    if (good < text->len) {
        kvfcli_say("%s: line %zu is not UTF-8 text (iconv can convert other encodings)", name, line);
        return KVFCLI_INPUT;
    }
    if (text->len > 0 && memchr(text->text, '\0', text->len) != NULL) {
        kvfcli_say("%s: it has a NUL byte, so it is not text", name);
        return KVFCLI_INPUT;
    }
    return KVFCLI_FINE;
}

static bool is_blank(const char *text, size_t len) {
    for (size_t i = 0; i < len; i++) {
        if (strchr(" \t\r\n", text[i]) == NULL) {
            return false;
        }
    }
    return true;
}

/* The document comes first, so that other questions about it share its blocks. */
static int add_question(kvfcli_string *out, const char *question) {
    size_t len = strlen(question);
    if (kvfl_utf8_check(question, len) < len) {
        kvfcli_say("the text of -p is not UTF-8");
        return KVFCLI_INPUT;
    }
    if (out->len > 0 && !kvfcli_string_add(out, "\n\n", 2)) {
        return kvfcli_no_memory();
    }
    return kvfcli_string_add(out, question, len) ? KVFCLI_FINE : kvfcli_no_memory();
}

int kvfcli_read_prompt(kvfcli_string *out, const kvfcli_run_options *options) {
    int code = KVFCLI_FINE;
    if (options->file != NULL) {
        code = kvfcli_read_file(out, options->file, MAX_PROMPT_BYTES);
        code = code == KVFCLI_FINE ? check_text(out, kvfcli_is_std(options->file) ? "stdin" : options->file) : code;
    }
    if (code == KVFCLI_FINE && options->prompt != NULL) {
        code = add_question(out, options->prompt);
    }
    if (code == KVFCLI_FINE && is_blank(out->text, out->len)) {
        kvfcli_say("the prompt is empty: give text with -p TEXT or -f FILE");
        return KVFCLI_INPUT;
    }
    return code;
}
