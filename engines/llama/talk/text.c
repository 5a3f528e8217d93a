/* SPDX-License-Identifier: Apache-2.0
 *
 * Lists of tokens, text that grows, UTF-8 in pieces, and tokens to text.
 */
#include "llama/talk/talk.h"

#include <stdlib.h>
#include <string.h>

/* ---- what grows ---- */

/* Makes room for `need` elements. `array` is the address of the pointer to them. False without memory. */
static bool grow(void *array, size_t *cap, size_t need, size_t size) {
    void *memory;
    memcpy(&memory, array, sizeof memory); /* of any type of pointer */
    if (need <= *cap) {
        return true;
    }
    size_t room = *cap * 2 > need ? *cap * 2 : need + 64;
    void *moved = reallocarray(memory, room, size);
    if (moved == NULL) {
        return false;
    }
    memcpy(array, &moved, sizeof moved);
    *cap = room;
    return true;
}

bool kvfl_text_add(kvfl_text *text, const char *bytes, size_t len) {
    if (!grow(&text->text, &text->cap, text->len + len + 1, 1)) {
        return false;
    }
    if (len > 0) {
        memcpy(text->text + text->len, bytes, len);
    }
    text->len += len;
    text->text[text->len] = '\0';
    return true;
}

void kvfl_text_cleanup(kvfl_text *text) {
    free(text->text);
    *text = (kvfl_text){0};
}

/* ---- lists of tokens ---- */

bool kvfl_tokens_add(kvfl_tokens *tokens, const llama_token *ids, size_t num) {
    if (!grow(&tokens->ids, &tokens->cap, tokens->num + num, sizeof *ids)) {
        return false;
    }
    if (num > 0) {
        memcpy(tokens->ids + tokens->num, ids, num * sizeof *ids);
    }
    tokens->num += num;
    return true;
}

void kvfl_tokens_cleanup(kvfl_tokens *tokens) {
    free(tokens->ids);
    *tokens = (kvfl_tokens){0};
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

size_t kvfl_utf8_check(const char *bytes, size_t len) {
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

static bool add_replacement(kvfl_text *out) {
    return kvfl_text_add(out, "\xEF\xBF\xBD", 3);
}

bool kvfl_utf8_feed(kvfl_utf8 *utf8, kvfl_text *out, const char *bytes, size_t len) {
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
            if (!kvfl_text_add(out, utf8->held, have)) {
                return false;
            }
        }
    }
    return true;
}

bool kvfl_utf8_end(kvfl_utf8 *utf8, kvfl_text *out) {
    bool held = utf8->num_held > 0;
    utf8->num_held = 0;
    return !held || add_replacement(out);
}

/* ---- tokens to text ---- */

bool kvfl_add_piece(kvfl_utf8 *utf8, kvfl_text *out, const struct llama_vocab *vocab, llama_token token) {
    char room[128], *piece = room;
    int32_t len = llama_token_to_piece(vocab, token, room, sizeof room, 0, false);
    if (len < 0) {
        piece = malloc((size_t)-len);
        if (piece == NULL) {
            return false;
        }
        len = llama_token_to_piece(vocab, token, piece, -len, 0, false);
    }
    bool done = len <= 0 || kvfl_utf8_feed(utf8, out, piece, (size_t)len);
    if (piece != room) {
        free(piece);
    }
    return done;
}

bool kvfl_tokens_known(const kvfl_tokens *tokens, const struct llama_vocab *vocab) {
    size_t i = 0;
    while (i < tokens->num && tokens->ids[i] >= 0 && tokens->ids[i] < llama_vocab_n_tokens(vocab)) {
        i++;
    }
    return i == tokens->num;
}

char *kvfl_text_of(const struct llama_vocab *vocab, const uint32_t *tokens, size_t num) {
    kvfl_utf8 utf8 = {.num_held = 0};
    kvfl_text text = {.text = NULL};
    bool good = kvfl_text_add(&text, "", 0);
    for (size_t i = 0; i < num && good; i++) {
        bool known = tokens[i] < (uint32_t)llama_vocab_n_tokens(vocab);
        good = known ? kvfl_add_piece(&utf8, &text, vocab, (llama_token)tokens[i]) : add_replacement(&text);
    }
    if (!good || !kvfl_utf8_end(&utf8, &text)) {
        kvfl_text_cleanup(&text);
    }
    return text.text;
}
