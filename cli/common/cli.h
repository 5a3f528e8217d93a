/* SPDX-License-Identifier: Apache-2.0
 *
 * What the verbs of the command line share: options, stores, output for people and for programs, exit codes.
 */
#ifndef KVFCLI_H
#define KVFCLI_H

#include <getopt.h>
#include <jansson.h>
#include <stdbool.h>
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

/* ---- options that every verb has: --store URL (again for more tiers), --secret-file FILE (again for the one before),
 * --json, --verbose, --help */
#define KVFCLI_MAX_STORES 8u

typedef struct kvfcli_common {
    const char *urls[KVFCLI_MAX_STORES];
    size_t num_urls;
    char *from_environment; /* the memory of `urls` from the environment */
    char *secret_files;     /* as in kvf_options; NULL = none */
    bool secret_given;      /* by an option, not by the environment */
    bool seal_sessions;     /* as in kvf_options; for verbs that take sessions */
    bool json, verbose;
    const char *verb;
    const char *help; /* the text of --help */
} kvfcli_common;

enum {
    KVFCLI_OPT_JSON = 1000,
    KVFCLI_OPT_SECRET,
    KVFCLI_OPT_SEAL,
    KVFCLI_OPT_OWN /* verbs number their long options from here on */
};

#define KVFCLI_COMMON_OPTIONS                                                                               \
    {"store", required_argument, NULL, 's'}, {"json", no_argument, NULL, KVFCLI_OPT_JSON},                  \
        {"secret-file", required_argument, NULL, KVFCLI_OPT_SECRET}, {"verbose", no_argument, NULL, 'v'}, { \
        "help", no_argument, NULL, 'h'                                                                      \
    }

#define KVFCLI_STORE_HELP                                                                 \
    "  -s, --store URL   the store; again for more tiers, fastest first\n"                \
    "                    (default: $KVFERRY_STORE, or file:~/.cache/kvferry/store)\n"     \
    "      --secret-file FILE\n"                                                          \
    "                    a tenant's secret: records are sealed under it. Make one:\n"     \
    "                    (umask 077; openssl rand -base64 32 > FILE)\n"                   \
    "                    Given twice: the new secret first, then the old one, which is\n" \
    "                    only read (default: $KVFERRY_SECRET_FILE, as FILE or NEW:OLD)\n"
#define KVFCLI_JSON_HELP "      --json        output for programs\n"
#define KVFCLI_ASIDE_HELP                      \
    "  -v, --verbose     say more on stderr\n" \
    "  -h, --help        this text\n"
#define KVFCLI_COMMON_HELP KVFCLI_STORE_HELP KVFCLI_JSON_HELP KVFCLI_ASIDE_HELP

/* Takes an option of the verb. Returns KVFCLI_FINE, or an exit code after a message. */
typedef int (*kvfcli_take_fn)(void *ctx, int opt, const char *value);

/* The library's warnings go to stderr from now on, with --verbose more. For verbs that save. */
void kvfcli_warn(void);
/* kvfcli_parse reads all options. Returns -1 to continue (the other arguments begin at argv[optind]), or an exit code
 * (--help: 0). It completes common->urls: given, from the environment, or the default. Call kvfcli_common_cleanup
 * afterwards in any case. */
int kvfcli_parse(kvfcli_common *common, int argc, char **argv, const struct option *options, const char *short_options,
                 kvfcli_take_fn take, void *ctx);
void kvfcli_common_cleanup(kvfcli_common *common);

/* kvfcli_usage prints what is wrong with the arguments, and returns KVFCLI_USAGE. */
int kvfcli_usage(const kvfcli_common *common, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- errors: one sentence to stderr */
void kvfcli_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
int kvfcli_exit_of(kvf_status status);
/* kvfcli_fail prints what->what and returns the exit code of its status. */
int kvfcli_fail(const kvf_error *what);

/* ---- stores */
/* kvfcli_open opens the tiers of `common`. Returns 0, or an exit code after a message. `options` may be NULL. */
int kvfcli_open(kvf_store **out, const kvfcli_common *common, const kvf_options *options);
/* kvfcli_open_reachable also requires every tier to answer now: for verbs of administration. */
int kvfcli_open_reachable(kvf_store **out, const kvfcli_common *common);
/* The URL of a tier, without its password. */
void kvfcli_tier_url(kvf_store *store, uint32_t tier, char out[256]);

/* The form of most verbs: options, arguments, then work on a store. */
typedef struct kvfcli_verb {
    const char *help;
    const struct option *options; /* KVFCLI_COMMON_OPTIONS among them */
    const char *letters;          /* the verb's own short options, as for getopt; "" = none */
    kvfcli_take_fn take;          /* NULL when there are no own options */
    bool unreachable_too;         /* the work also makes sense for stores that do not answer */
    /* check examines the arguments after the options. Returns 0, or an exit code after a message. */
    int (*check)(void *ctx, const kvfcli_common *common, int argc, char **argv);
    int (*work)(void *ctx, kvf_store *store, const kvfcli_common *common); /* returns the exit code */
} kvfcli_verb;
int kvfcli_verb_main(const kvfcli_verb *verb, void *ctx, int argc, char **argv);

/* ---- Ctrl-C: the first one asks to stop and clean up, the second one ends the process */
void kvfcli_catch_interrupt(void);
bool kvfcli_interrupted(void);

/* ---- numbers for people (text.c, as all up to the progress) */
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

/* ---- progress on stderr, when it is a terminal: at most ten lines a second, nothing in the first second */
typedef struct kvfcli_progress {
    int64_t started_us, shown_us;
} kvfcli_progress;
void kvfcli_progress_start(kvfcli_progress *progress);
void kvfcli_progress_show(kvfcli_progress *progress, const char *format, ...) __attribute__((format(printf, 2, 3)));
void kvfcli_progress_end(kvfcli_progress *progress);

/* ---- finding things (find.c) */
/* kvfcli_find_space finds the one space whose digest begins with `hex_prefix`. Returns 0, or an exit code after a
 * message. */
int kvfcli_find_space(kvf_store *store, kvf_digest *out, const char *hex_prefix);
/* kvfcli_walk is kvf_walk that Ctrl-C ends; returns 0, or an exit code after a message. */
int kvfcli_walk(kvf_store *store, kvf_visit_fn visit, void *ctx, const kvf_walk_options *options);

/* One record, found by the first digits of its key. */
typedef struct kvfcli_record {
    kvf_digest space; /* of a damaged record only the first 8 bytes are known; the rest is zero */
    kvf_key key;
    kvf_reason damage; /* the contents of its header */
    uint32_t tier;
    uint64_t stored_bytes;
    int64_t ttl_ms;
    char name[512];
} kvfcli_record;
void kvfcli_record_of(kvfcli_record *out, const kvf_entry *entry);
/* kvfcli_find_record finds the one block whose key begins with `key_prefix`, in the space that begins with
 * `space_prefix` (NULL: in any). Returns 0, or an exit code after a message. */
int kvfcli_find_record(kvf_store *store, kvfcli_record *out, const char *space_prefix, const char *key_prefix);
/* kvfcli_read_record visits every whole copy of it, one for each tier that has it. A copy counts as undamaged by its
 * header. */
int kvfcli_read_record(kvf_store *store, const kvfcli_record *record, kvf_visit_fn visit, void *ctx);

/* Closes stdout and returns `code`, or KVFCLI_IO after a message if output was lost (a full disk). */
int kvfcli_finish(int code);

#endif
