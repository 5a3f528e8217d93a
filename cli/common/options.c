/* SPDX-License-Identifier: Apache-2.0
 *
 * Parses the table of options of a verb, and prints it for --help. What was not given comes from the environment.
 */
#include "common/cli.h"

#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

/* ---- values ---- */

static int add_url(void *ctx, const char *url) {
    kvfcli_common *common = ctx;
    if (common->num_urls == KVFCLI_MAX_STORES) {
        return kvfcli_usage("more than %u stores", KVFCLI_MAX_STORES);
    }
    common->urls[common->num_urls++] = url;
    return KVFCLI_FINE;
}

/* The library takes both secret files as one text. */
static int add_secret(void *ctx, const char *path) {
    kvfcli_common *common = ctx;
    char *both = NULL;
    if (path[0] == '\0' || strchr(path, ':') != NULL) {
        return kvfcli_usage("\"%s\" can't be the name of a secret file: it is empty, or has a colon", path);
    }
    if (common->secret_given && strchr(common->secret_files, ':') != NULL) {
        return kvfcli_usage("two secret files at most: the new one, and the one before");
    }
    int len = common->secret_given ? asprintf(&both, "%s:%s", common->secret_files, path) : asprintf(&both, "%s", path);
    if (len < 0) {
        return kvfcli_no_memory();
    }
    free(common->secret_files);
    common->secret_files = both;
    common->secret_given = true;
    return KVFCLI_FINE;
}

static int take_once(const char **into, const kvfcli_option *option, const char *value) {
    if (*into != NULL) {
        return kvfcli_usage("\"%s\" in addition to \"%s\": give --%s only once", value, *into, option->name);
    }
    *into = value;
    return KVFCLI_FINE;
}

static int take_number(uint32_t *out, const kvfcli_option *option, const char *text) {
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || value < option->min || value > option->max) {
        return kvfcli_usage("--%s takes a number from %u to %u, not \"%s\"", option->name, option->min, option->max,
                            text);
    }
    *out = (uint32_t)value;
    return KVFCLI_FINE;
}

int kvfcli_check_hex(const char *text) {
    if (text == NULL || kvfcli_is_hex(text)) {
        return KVFCLI_FINE;
    }
    return kvfcli_usage("\"%s\" is not the beginning of a space or key: hex digits are", text);
}

static int take(const kvfcli_option *option, void *ctx, const char *value) {
    void *field = (char *)ctx + option->offset;
    switch (option->kind) {
    case KVFCLI_IS_FLAG:
        *(bool *)field = true;
        return KVFCLI_FINE;
    case KVFCLI_IS_TEXT:
        return take_once(field, option, value);
    case KVFCLI_IS_NUMBER:
        return take_number(field, option, value);
    case KVFCLI_IS_OTHER:
        return option->take(ctx, value);
    case KVFCLI_END:
    case KVFCLI_IS_TITLE:
        break;
    }
    return KVFCLI_FINE;
}

/* ---- the tables ---- */

static const kvfcli_option session_options[] = {
    KVFCLI_OPT_TEXT(kvfcli_common, session, 0, "session", "ID",
                    "the session of this id (of kvf_session_save; a conversation of\n"
                    "`kvferry run --chat` is another thing)"),
    KVFCLI_OPT_FLAG(kvfcli_common, seal_sessions, 0, "sealed",
                    "with --session: the one that is sealed under the secret"),
    {.kind = KVFCLI_END}};

static const kvfcli_option store_options[] = {
    KVFCLI_OPT_OTHER(add_url, 's', "store", "URL",
                     "the store; again for more tiers, fastest first (default:\n"
                     "$KVFERRY_STORE, or file:~/.cache/kvferry/store)"),
    KVFCLI_OPT_OTHER(add_secret, 0, "secret-file", "FILE",
                     "a tenant's secret: records are sealed under it. Make one:\n"
                     "(umask 077; openssl rand -base64 32 > FILE)\n"
                     "Given twice: the new secret first, then the old one, which is\n"
                     "only read (default: $KVFERRY_SECRET_FILE, as FILE or NEW:OLD)"),
    {.kind = KVFCLI_END}};

static const kvfcli_option json_options[] = {KVFCLI_OPT_FLAG(kvfcli_common, json, 0, "json", "output for programs"),
                                             {.kind = KVFCLI_END}};

#define HELP_LETTER 'h'
static const kvfcli_option last_options[] = {
    KVFCLI_OPT_FLAG(kvfcli_common, verbose, 'v', "verbose", "say more on stderr"),
    {.kind = KVFCLI_IS_FLAG, .letter = HELP_LETTER, .name = "help", .help = "this text"},
    {.kind = KVFCLI_END}};

/* All options of a verb, in the order of the help, as this file and as getopt_long read them. */
enum { MAX_OPTIONS = 40 };
typedef struct table {
    const kvfcli_option *options[MAX_OPTIONS];
    void *owners[MAX_OPTIONS]; /* the struct that an option sets */
    struct option names[MAX_OPTIONS + 1];
    char letters[2 * MAX_OPTIONS + 3];
    size_t num;
} table;

static void add_letter(table *t, const kvfcli_option *option) {
    size_t len = strlen(t->letters);
    if (option->letter != 0) {
        snprintf(t->letters + len, sizeof t->letters - len, "%c%s", option->letter, option->value != NULL ? ":" : "");
    }
}

static void add_options(table *t, const kvfcli_option *options, void *owner) {
    for (; options != NULL && options->kind != KVFCLI_END && t->num < MAX_OPTIONS; options++) {
        t->names[t->num] = (struct option){.name = options->name != NULL ? options->name : "",
                                           .has_arg = options->value != NULL ? required_argument : no_argument};
        t->owners[t->num] = owner;
        t->options[t->num++] = options;
        add_letter(t, options);
    }
}

static void make_table(table *t, const kvfcli_verb *verb, kvfcli_common *common, void *ctx) {
    *t = (table){.num = 0};
    snprintf(t->letters, sizeof t->letters, "%s", verb->program ? "+:" : ":");
    add_options(t, verb->options, ctx);
    add_options(t, verb->sessions ? session_options : NULL, common);
    add_options(t, store_options, common);
    add_options(t, verb->no_json ? NULL : json_options, common);
    add_options(t, last_options, common);
}

/* ---- --help ---- */

enum { HELP_COLUMN = 24 };

static void print_option(const kvfcli_option *option) {
    char left[64];
    int len = snprintf(left, sizeof left, "  %c%c%c --%s%s%s", option->letter != 0 ? '-' : ' ',
                       option->letter != 0 ? option->letter : ' ', option->letter != 0 ? ',' : ' ', option->name,
                       option->value != NULL ? " " : "", option->value != NULL ? option->value : "");
    printf(len + 1 > HELP_COLUMN ? "%s\n%*s" : "%s%*s", left, len + 1 > HELP_COLUMN ? HELP_COLUMN : HELP_COLUMN - len,
           "");
    const char *line;
    size_t line_len;
    for (const char *rest = option->help; kvfcli_next_line(&rest, &line, &line_len);) {
        printf("%*s%.*s\n", line == option->help ? 0 : HELP_COLUMN, "", (int)line_len, line);
    }
}

static int print_help(const kvfcli_verb *verb, const table *t) {
    fputs(verb->help, stdout);
    if (t->options[0]->kind != KVFCLI_IS_TITLE) {
        fputs("\nOptions:\n", stdout);
    }
    for (size_t i = 0; i < t->num; i++) {
        if (t->options[i]->kind == KVFCLI_IS_TITLE) {
            printf("\n%s:\n", t->options[i]->help);
        } else {
            print_option(t->options[i]);
        }
    }
    printf("\n%s", verb->exits);
    return kvfcli_finish(KVFCLI_FINE);
}

/* ---- what was not given ---- */

static int complete_secret(kvfcli_common *common) {
    const char *environment = getenv("KVFERRY_SECRET_FILE");
    if (common->secret_given || environment == NULL) {
        return KVFCLI_FINE;
    }
    if (environment[0] == '\0') {
        return kvfcli_usage("KVFERRY_SECRET_FILE is empty: name a file, or unset it");
    }
    common->secret_files = strdup(environment);
    return common->secret_files != NULL ? KVFCLI_FINE : kvfcli_no_memory();
}

/* $KVFERRY_STORE: one URL, or several separated by blanks. */
static int add_environment(kvfcli_common *common, const char *text) {
    char *rest = NULL;
    common->from_environment = strdup(text);
    if (common->from_environment == NULL) {
        return kvfcli_no_memory();
    }
    for (char *url = strtok_r(common->from_environment, " \t\n", &rest); url != NULL;
         url = strtok_r(NULL, " \t\n", &rest)) {
        int code = add_url(common, url);
        if (code != KVFCLI_FINE) {
            return code;
        }
    }
    return KVFCLI_FINE;
}

/* A path inside a URL: escapes characters that would end the path or begin an escape. */
static void put_path(FILE *out, const char *path) {
    for (const char *p = path; *p != '\0'; p++) {
        if (strchr("%?# \t\n", *p) != NULL) {
            fprintf(out, "%%%02X", (unsigned)(unsigned char)*p);
        } else {
            fputc(*p, out);
        }
    }
}

static int add_default(kvfcli_common *common) {
    common->unnamed = true;
    const char *cache = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");
    size_t len = 0;
    bool have_cache = cache != NULL && cache[0] == '/';
    if (!have_cache && (home == NULL || home[0] != '/')) {
        return kvfcli_usage("neither --store nor KVFERRY_STORE, XDG_CACHE_HOME or HOME is set");
    }
    free(common->from_environment); /* it was blank */
    common->from_environment = NULL;
    FILE *out = open_memstream(&common->from_environment, &len);
    if (out == NULL) {
        return kvfcli_no_memory();
    }
    fputs("file:", out);
    put_path(out, have_cache ? cache : home);
    fputs(have_cache ? "/kvferry/store" : "/.cache/kvferry/store", out);
    return fclose(out) == 0 ? add_url(common, common->from_environment) : kvfcli_no_memory();
}

static int complete_urls(kvfcli_common *common) {
    const char *environment = getenv("KVFERRY_STORE");
    int code = common->num_urls == 0 && environment != NULL ? add_environment(common, environment) : KVFCLI_FINE;
    return code == KVFCLI_FINE && common->num_urls == 0 ? add_default(common) : code;
}

static int complete(kvfcli_common *common) {
    int code = complete_urls(common);
    if (code == KVFCLI_FINE) {
        code = complete_secret(common);
    }
    if (code == KVFCLI_FINE && common->seal_sessions && common->secret_files == NULL) {
        return kvfcli_usage("--sealed needs --secret-file FILE");
    }
    if (code == KVFCLI_FINE && common->seal_sessions && common->session == NULL) {
        return kvfcli_usage("--sealed goes with --session ID");
    }
    return code;
}

/* ---- the command line ---- */

static int wrong_option(int opt, char **argv) {
    const char *what = opt == ':' ? "needs a value" : "is not an option, or takes no value";
    if (optopt != 0 && argv[optind - 1][1] != '-') {
        return kvfcli_usage("-%c %s", optopt, what);
    }
    /* Without the value after a '=': it may be a secret that was typed here. */
    const char *arg = argv[optind - 1];
    return kvfcli_usage("%.*s %s", (int)strcspn(arg, "="), arg, what);
}

/* getopt_long accepts abbreviated names: `--secret TEXT` would be a secret file. */
static int check_name(const kvfcli_option *option, char **argv) {
    bool value_apart = optarg != NULL && optarg == argv[optind - 1];
    const char *arg = argv[optind - (value_apart ? 2 : 1)];
    if (strlen(option->name) == strcspn(arg + 2, "=")) {
        return KVFCLI_FINE;
    }
    return kvfcli_usage("%.*s is not an option; --%s is", (int)strcspn(arg, "="), arg, option->name);
}

static size_t find_letter(const table *t, int letter) {
    size_t i = 0;
    while (i + 1 < t->num && t->options[i]->letter != letter) {
        i++;
    }
    return i;
}

int kvfcli_parse(kvfcli_common *common, const kvfcli_verb *verb, void *ctx, int argc, char **argv) {
    table t;
    int opt;
    make_table(&t, verb, common, ctx);
    optind = 1;
    opterr = 0;
    for (int at = -1; (opt = getopt_long(argc, argv, t.letters, t.names, &at)) != -1; at = -1) {
        if (opt == '?' || opt == ':') {
            return wrong_option(opt, argv);
        }
        int code = at >= 0 ? check_name(t.options[at], argv) : KVFCLI_FINE;
        size_t index = at >= 0 ? (size_t)at : find_letter(&t, opt);
        if (code == KVFCLI_FINE && t.options[index]->letter == HELP_LETTER) {
            return print_help(verb, &t);
        }
        if (code == KVFCLI_FINE) {
            code = take(t.options[index], t.owners[index], optarg);
        }
        if (code != KVFCLI_FINE) {
            return code;
        }
    }
    int code = complete(common);
    return code == KVFCLI_FINE ? -1 : code;
}

void kvfcli_common_cleanup(kvfcli_common *common) {
    free(common->from_environment);
    common->from_environment = NULL;
    free(common->secret_files);
    common->secret_files = NULL;
}
