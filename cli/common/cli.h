/* SPDX-License-Identifier: Apache-2.0
 *
 * What the verbs of the command line share: options, stores, output for people and for programs, exit codes.
 */
#ifndef KVFCLI_H
#define KVFCLI_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "kvferry/kvferry.h"

/* Exit codes; docs/cli.md explains them. */
enum {
    KVFCLI_FINE = 0,
    KVFCLI_FOUND = 1, /* verify, doctor: something is wrong; others: what was asked for is not there */
    KVFCLI_USAGE = 2,
    KVFCLI_CONFIG = 3, /* a store URL, or the store behind it, that the operator must fix */
    KVFCLI_INPUT = 4,  /* a model, prompt or other input that can't be used */
    KVFCLI_IO = 5,     /* the operating system or a server failed */
    KVFCLI_INTERRUPTED = 130
};

/* ---- options: each verb has one table, which is parsed and printed by --help */
#define KVFCLI_MAX_STORES 8u

/* The values of options that several verbs have. */
typedef struct kvfcli_common {
    const char *urls[KVFCLI_MAX_STORES];
    size_t num_urls;
    char *from_environment; /* the memory of `urls` from the environment */
    bool unnamed;           /* nobody named a store: it is the default */
    char *secret_files;     /* as in kvf_options; NULL = none */
    bool secret_given;      /* by an option, not by the environment */
    const char *session;    /* --session ID; NULL = not given */
    bool seal_sessions;     /* as in kvf_options */
    bool json, verbose;
} kvfcli_common;

/* Takes the value of an option. `ctx` is the struct of the verb. Returns KVFCLI_FINE, or an exit code after a message. */
typedef int (*kvfcli_take_fn)(void *ctx, const char *value);

typedef struct kvfcli_option {
    enum { KVFCLI_END, KVFCLI_IS_TITLE, KVFCLI_IS_FLAG, KVFCLI_IS_TEXT, KVFCLI_IS_NUMBER, KVFCLI_IS_OTHER } kind;
    char letter; /* 0 = none */
    const char *name;
    const char *value; /* its name in the help; NULL = takes none */
    const char *help;  /* lines */
    size_t offset;     /* of the field that it sets */
    uint32_t min, max;
    kvfcli_take_fn take;
} kvfcli_option;

/* The kinds of options. The field belongs to the struct of the verb: a bool, a const char * or a uint32_t. Lines of
 * `help` are at most 76 characters. */
#define KVFCLI_OPT_TITLE(text) \
    { .kind = KVFCLI_IS_TITLE, .help = (text) }
#define KVFCLI_OPT_FLAG(type, field, letter_, name_, help_) \
    { .kind = KVFCLI_IS_FLAG, .letter = (letter_), .name = (name_), .help = (help_), .offset = offsetof(type, field) }
#define KVFCLI_OPT_TEXT(type, field, letter_, name_, value_, help_)                                       \
    {                                                                                                     \
        .kind = KVFCLI_IS_TEXT, .letter = (letter_), .name = (name_), .value = (value_), .help = (help_), \
        .offset = offsetof(type, field)                                                                   \
    }
#define KVFCLI_OPT_NUMBER(type, field, letter_, name_, value_, min_, max_, help_)                           \
    {                                                                                                       \
        .kind = KVFCLI_IS_NUMBER, .letter = (letter_), .name = (name_), .value = (value_), .help = (help_), \
        .offset = offsetof(type, field), .min = (min_), .max = (max_)                                       \
    }
#define KVFCLI_OPT_OTHER(take_, letter_, name_, value_, help_)                                             \
    {                                                                                                      \
        .kind = KVFCLI_IS_OTHER, .letter = (letter_), .name = (name_), .value = (value_), .help = (help_), \
        .take = (take_)                                                                                    \
    }

/* ---- verbs: options, arguments, then work */
typedef enum kvfcli_needs {
    KVFCLI_REACHABLE, /* every tier must answer: for verbs that look into a store, or change it */
    KVFCLI_OPEN,      /* stores that do not answer are fine */
    KVFCLI_OWN        /* the verb opens the store itself */
} kvfcli_needs;

typedef struct kvfcli_verb {
    const char *help;             /* usage, what it does, examples */
    const char *exits;            /* its exit codes, after the options */
    const kvfcli_option *options; /* its own; NULL = none */
    bool sessions;                /* it also has --session ID and --sealed */
    bool no_json;
    bool creates; /* a folder that is not there yet is no mistake */
    bool program; /* its first argument is a program, and what follows belongs to that */
    kvfcli_needs needs;
    /* check examines what the options left in argv. Returns 0, or an exit code after a message. NULL: the verb takes no
     * arguments. */
    int (*check)(void *ctx, const kvfcli_common *common, int argc, char **argv);
    int (*work)(void *ctx, kvf_store *store, const kvfcli_common *common); /* returns the exit code */
} kvfcli_verb;
/* kvfcli_verb_main does it all. `ctx` is the struct of the verb. argv[0] is the verb. Returns the exit code. */
int kvfcli_verb_main(const kvfcli_verb *verb, void *ctx, int argc, char **argv);

/* kvfcli_parse reads the options into `common` and `ctx`. Returns -1 to continue (the other arguments begin at
 * argv[optind]), or an exit code (--help: 0). It completes common->urls: given, from the environment, or the default.
 * Call kvfcli_common_cleanup afterwards in any case. */
int kvfcli_parse(kvfcli_common *common, const kvfcli_verb *verb, void *ctx, int argc, char **argv);
void kvfcli_common_cleanup(kvfcli_common *common);
/* kvfcli_check_hex refuses text that is not the beginning of a space or key. Both may be NULL: nothing was given. */
int kvfcli_check_hex(const char *text);

/* ---- errors: one sentence to stderr */
void kvfcli_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* kvfcli_usage says what is wrong with the arguments, and returns KVFCLI_USAGE. */
int kvfcli_usage(const char *format, ...) __attribute__((format(printf, 1, 2)));
int kvfcli_no_memory(void); /* says so, and returns KVFCLI_IO */
/* kvfcli_fail says what `err` says, or the status alone, and returns the exit code of the status. */
int kvfcli_fail(kvf_status status, const kvf_error *err);
int kvfcli_exit_of(kvf_status status);
void kvfcli_log(kvf_log_level level);   /* the library's messages go to stderr from now on */
void kvfcli_set_verb(const char *name); /* for kvfcli_usage */

/* ---- stores */
/* kvfcli_open opens the tiers of `common`. Returns 0, or an exit code after a message. `options` may be NULL. */
int kvfcli_open(kvf_store **out, const kvfcli_common *common, const kvf_options *options);
/* kvfcli_open_reachable also requires every tier to answer now: for verbs of administration. */
int kvfcli_open_reachable(kvf_store **out, const kvfcli_common *common, const kvf_options *options);
/* The URL of a tier, without its password. */
void kvfcli_tier_url(kvf_store *store, uint32_t tier, char out[256]);
/* Why the latest kind of failed saves failed; `otherwise` if none did. */
kvf_reason kvfcli_last_failure(kvf_store *store, kvf_reason otherwise);

/* ---- Ctrl-C: the first one asks to stop and clean up, the second one ends the process */
void kvfcli_catch_interrupt(void);
bool kvfcli_interrupted(void);

/* ---- numbers for people (text.c, as all up to the memory) */
#define KVFCLI_TEXT 32
const char *kvfcli_size(char out[KVFCLI_TEXT], uint64_t bytes);       /* "94.4 MiB" */
const char *kvfcli_age(char out[KVFCLI_TEXT], int64_t stored_s);      /* "3 min", how long ago; "?" when 0 */
const char *kvfcli_span(char out[KVFCLI_TEXT], int64_t milliseconds); /* "55 min"; "-" when negative */

/* ---- text that comes from a store or a server: never printed as it is */
/* kvfcli_shown returns it with \n, \t and \xNN for characters that could move a cursor or fake a line, and \\ for a
 * backslash. Valid until the eighth call after this one; long text is cut. kvfcli_shown_n: of its first `len` bytes. */
const char *kvfcli_shown(const char *text);
const char *kvfcli_shown_n(const char *text, size_t len);

/* ---- hex */
#define KVFCLI_HEX32 65
void kvfcli_hex(char out[KVFCLI_HEX32], const uint8_t bytes[32]);
bool kvfcli_is_hex(const char *text); /* 1 to 64 digits */
bool kvfcli_has_prefix(const uint8_t bytes[32], const char *hex_prefix);
bool kvfcli_unhex(uint8_t out[32], const char *hex); /* exactly 64 digits */

/* ---- JSON */
/* kvfcli_print_json prints and frees it. Returns `code`, or KVFCLI_IO after a message if that failed. */
int kvfcli_print_json(json_t *json, int code);
json_t *kvfcli_json_text(const char *text); /* unchanged, or as kvfcli_shown returns it if it is not UTF-8 */
json_t *kvfcli_json_text_n(const char *text, size_t len);
json_t *kvfcli_json_known(bool known, uint64_t number); /* the number, or null */
json_t *kvfcli_json_hex(const uint8_t bytes[32]);
json_t *kvfcli_json_fields(const char *description); /* of "name=value\n" lines: an object; null for NULL */

/* ---- tables for people */
/* kvfcli_row prints "label     text". */
void kvfcli_row(const char *label, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* kvfcli_print_lines prints every line of `text` as kvfcli_shown does, the first one behind the label, all of them
 * `width` and one characters from the left. */
void kvfcli_print_lines(const char *label, int width, const char *text);
/* kvfcli_next_line cuts the next line off *rest. False at the end. */
bool kvfcli_next_line(const char **rest, const char **line, size_t *len);

/* ---- memory that grows, and files (memory.c); all zeros is empty */
/* kvfcli_grow makes room for `need` elements. `array` is the address of the pointer to them. False without memory. */
bool kvfcli_grow(void *array, size_t *cap, size_t need, size_t size);

typedef struct kvfcli_string {
    char *text; /* ends in NUL, which `len` does not count; NULL when empty */
    size_t len, cap;
} kvfcli_string;
bool kvfcli_string_add(kvfcli_string *string, const char *text, size_t len); /* false without memory */
void kvfcli_string_cleanup(kvfcli_string *string);

bool kvfcli_is_std(const char *path); /* "-" or NULL: stdin or stdout */
/* kvfcli_read_file reads a whole file. Returns 0, or an exit code after a message. */
int kvfcli_read_file(kvfcli_string *out, const char *path, size_t max_bytes);

/* ---- progress on stderr (progress.c): on a terminal one line that changes, else a line every two seconds; nothing if
 * the step is over sooner */
typedef struct kvfcli_progress {
    bool quiet, terminal, drawn;
    int64_t started_us, shown_us;
    uint32_t first; /* done when it started, which says nothing about the speed */
} kvfcli_progress;
int64_t kvfcli_now_us(void);
void kvfcli_progress_start(kvfcli_progress *progress, bool quiet);
void kvfcli_progress_show(kvfcli_progress *progress, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* kvfcli_progress_of shows "what [###...] done of total unit", and the time that is left. */
void kvfcli_progress_of(kvfcli_progress *progress, const char *what, uint32_t done, uint32_t total, const char *unit);
void kvfcli_progress_end(kvfcli_progress *progress);

/* ---- finding things (find.c) */
/* kvfcli_walk is kvf_walk that Ctrl-C ends; returns 0, or an exit code after a message. */
int kvfcli_walk(kvf_store *store, kvf_visit_fn visit, void *ctx, const kvf_walk_options *options);

/* A space or a block that was found by the first digits of its name. */
typedef struct kvfcli_named {
    bool is_block;
    kvf_digest space; /* of a damaged block only the first 8 bytes are known; the rest is zero */
    /* Of a block: */
    kvf_key key;
    kvf_reason damage; /* by its header */
    uint32_t tier;
    uint64_t stored_bytes;
    int64_t ttl_ms;
    char name[512];
} kvfcli_named;
typedef enum kvfcli_kinds { KVFCLI_SPACES = 1, KVFCLI_BLOCKS = 2, KVFCLI_BOTH = 3 } kvfcli_kinds;
/* kvfcli_find finds the one thing whose name begins with `name`; a block in the space that begins with `space` (NULL:
 * in any). Returns 0, or an exit code after a message. */
int kvfcli_find(kvf_store *store, kvfcli_named *out, kvfcli_kinds kinds, const char *name, const char *space);
/* kvfcli_read_block visits every whole copy of a block, one for each tier that has it. */
int kvfcli_read_block(kvf_store *store, const kvfcli_named *block, kvf_visit_fn visit, void *ctx);

/* The fields of a space, to be freed with kvf_free; NULL if they are not known. */
char *kvfcli_describe(kvf_store *store, const kvf_digest *space);
/* What a space holds; all zeros is nothing. */
typedef struct kvfcli_sum {
    uint64_t num_blocks, num_tokens, bytes;
    uint64_t num_closed, num_opened; /* blocks sealed under a secret that was not given, or was given */
    int64_t oldest_s, newest_s;      /* 0 = not known */
} kvfcli_sum;
void kvfcli_sum_add(kvfcli_sum *sum, const kvf_entry *block);

/* Closes stdout and returns `code`, or KVFCLI_IO after a message if output was lost (a full disk). */
int kvfcli_finish(int code);

#endif
