/* SPDX-License-Identifier: Apache-2.0
 *
 * What a program that generates text needs beside the engine, through public headers only: text and tokens, chat
 * templates, and conversations that a store keeps. For `kvferry run` and Triton's backend. Calls go down:
 *
 *   chat.c       a conversation in a store, by its id
 *   template.c   messages to the tokens of a prompt
 *   text.c       lists of tokens, UTF-8, tokens to text
 */
#ifndef KVFL_TALK_H
#define KVFL_TALK_H

#include <stdbool.h>

#include "kvferry/llama.h"

/* ---- text.c. Calls that return a bool return false without memory. ---- */

typedef struct kvfl_tokens {
    llama_token *ids;
    size_t num, cap;
} kvfl_tokens;
bool kvfl_tokens_add(kvfl_tokens *tokens, const llama_token *ids, size_t num);
void kvfl_tokens_cleanup(kvfl_tokens *tokens);

typedef struct kvfl_text {
    char *text; /* ends in NUL, which `len` does not count; NULL when empty */
    size_t len, cap;
} kvfl_text;
bool kvfl_text_add(kvfl_text *text, const char *bytes, size_t len);
void kvfl_text_cleanup(kvfl_text *text);

/* Text that arrives in pieces which may end inside a character. Invalid UTF-8 becomes U+FFFD. */
typedef struct kvfl_utf8 {
    char held[4]; /* the beginning of a character */
    size_t num_held;
} kvfl_utf8;
/* kvfl_utf8_feed appends the whole characters of held and new bytes to `out`; kvfl_utf8_end what is left. */
bool kvfl_utf8_feed(kvfl_utf8 *utf8, kvfl_text *out, const char *bytes, size_t len);
bool kvfl_utf8_end(kvfl_utf8 *utf8, kvfl_text *out);
/* kvfl_utf8_check returns the number of leading bytes that are valid UTF-8 (len: all). */
size_t kvfl_utf8_check(const char *bytes, size_t len);
/* Whether the vocabulary has all of them. One that it does not have fails the whole batch that it comes in. */
bool kvfl_tokens_known(const kvfl_tokens *tokens, const struct llama_vocab *vocab);
/* The text of tokens, to be freed with free(); U+FFFD for those that the vocabulary does not have. NULL without
 * memory. */
char *kvfl_text_of(const struct llama_vocab *vocab, const uint32_t *tokens, size_t num);
/* The text of a token, appended to `out` in whole characters. */
bool kvfl_add_piece(kvfl_utf8 *utf8, kvfl_text *out, const struct llama_vocab *vocab, llama_token token);

/* ---- template.c. Returns KVF_OK; KVF_LIMIT with a message (the text or the template can't be used); KVF_NOMEM. ---- */

typedef struct kvfl_message {
    const char *role, *text;
} kvfl_message;

typedef struct kvfl_template {
    const char *text; /* NULL: ChatML */
    bool raw;         /* none: the text is used as it is */
} kvfl_template;
/* kvfl_template_of takes the model's own. *note: for people, why it is another one; NULL: it is the model's. */
kvfl_template kvfl_template_of(const struct llama_model *model, const char **note);

/* Appends the tokens of a text. `first`: what a prompt begins with (BOS) comes before it. */
kvf_status kvfl_tokenize(kvfl_tokens *out, kvf_error *err, const struct llama_vocab *vocab, const char *text,
                         size_t len, bool first);
/* kvfl_tokenize_chat makes the prompt that ends where the next answer begins. kvfl_tokenize_turn makes only what follows
 * an answer: its end and the next question. */
kvf_status kvfl_tokenize_chat(kvfl_tokens *out, kvf_error *err, const struct llama_vocab *vocab,
                              kvfl_template chat_template, const kvfl_message *messages, size_t num);
kvf_status kvfl_tokenize_turn(kvfl_tokens *out, kvf_error *err, const struct llama_vocab *vocab,
                              kvfl_template chat_template, const char *question);

/* ---- chat.c. Calls return KVF_OK, or a status with a message. ---- */

typedef struct kvfl_turn {
    char *question, *answer;
} kvfl_turn;

typedef struct kvfl_chat {
    const char *id; /* 1 to KVF_MAX_ID_BYTES bytes */
    kvf_store *store;
    kvf_space *space;
    kvfl_turn *turns;
    size_t num_turns;
    kvfl_tokens tokens; /* of all turns, answers included, exactly as the model read and produced them */
    kvf_digest engine;  /* the space whose tokens these are */
    kvf_key last;       /* stands for the content of the last turn */
    size_t num_stale;   /* records after the last turn that belong to another history */
    int64_t budget_us;
} kvfl_chat;

/* kvfl_chat_load finds the turns of the conversation; there may be none. `id` must outlive it. `tenant` separates the
 * conversations of this name; NULL: none. `restart`: removes the turns first. Clean it up also after a failure. */
kvf_status kvfl_chat_load(kvfl_chat *chat, kvf_error *err, kvf_store *store, const char *id, const char *tenant,
                          int64_t budget_us, bool restart);
/* The messages of all turns and the question: 2 * num_turns + 1 of them, to be freed with free(). NULL without memory.
 */
kvfl_message *kvfl_chat_messages(const kvfl_chat *chat, const char *question);
/* Whether the next prompt is chat->tokens and what kvfl_tokenize_turn adds to them: there are turns, and the engine of
 * this space made their tokens. Else the messages are made into tokens anew. `space` NULL: no. */
bool kvfl_chat_goes_on(const kvfl_chat *chat, const kvf_space *space);

/* What a turn adds. `whole`: `prompt` is everything that the model read, not only what was new. */
typedef struct kvfl_new_turn {
    const char *question, *answer;
    const llama_token *prompt;
    size_t num_prompt;
    const kvfl_tokens *said;
    bool whole;
    const kvf_space *engine; /* NULL: no space */
} kvfl_new_turn;
/* kvfl_chat_add stores it, waits until it is stored, and reads it back: KVF_IO where the store has another turn in its
 * place, of a request that went on from the same turn at the same time. */
kvf_status kvfl_chat_add(kvfl_chat *chat, kvf_error *err, const kvfl_new_turn *turn, int64_t budget_us);
void kvfl_chat_cleanup(kvfl_chat *chat);

#endif
