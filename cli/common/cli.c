/* SPDX-License-Identifier: Apache-2.0
 *
 * Options, stores, messages and exit codes that all verbs of the command line share.
 */
#include "common/cli.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- errors ---- */

void kvfcli_say(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("kvferry: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
}

int kvfcli_usage(const kvfcli_common *common, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("kvferry: ", stderr);
    vfprintf(stderr, format, args);
    fprintf(stderr, "; see kvferry %s --help\n", common->verb);
    va_end(args);
    return KVFCLI_USAGE;
}

int kvfcli_exit_of(kvf_status status) {
    switch (status) {
    case KVF_OK:
        return KVFCLI_FINE;
    case KVF_MISS:
        return KVFCLI_FOUND;
    case KVF_CONFIG:
        return KVFCLI_CONFIG;
    case KVF_LIMIT:
    case KVF_REFUSED:
        return KVFCLI_INPUT;
    case KVF_AGAIN:
    case KVF_IO:
    case KVF_NOMEM:
    case KVF_CLOSED:
        return KVFCLI_IO;
    }
    return KVFCLI_IO;
}

int kvfcli_fail(const kvf_error *what) {
    kvfcli_say("%s", what->what[0] != '\0' ? what->what : kvf_status_name(what->status));
    return kvfcli_exit_of(what->status);
}

int kvfcli_finish(int code) {
    bool lost = ferror(stdout) != 0;
    lost = fflush(stdout) != 0 || lost;
    if (lost && code != KVFCLI_INTERRUPTED) {
        kvfcli_say("the output could not be written: %s", strerror(errno));
        return KVFCLI_IO;
    }
    return code;
}

/* ---- options ---- */

static const char *const log_names[] = {"error", "warning", "info", "debug"};

static void log_to_stderr(void *ctx, kvf_log_level level, const char *message) {
    (void)ctx;
    fprintf(stderr, "kvferry: %s: %s\n", log_names[level], message);
}

void kvfcli_warn(void) {
    kvf_set_log(log_to_stderr, NULL, KVF_LOG_WARN);
}

static int add_url(kvfcli_common *common, const char *url) {
    if (common->num_urls == KVFCLI_MAX_STORES) {
        return kvfcli_usage(common, "more than %u stores", KVFCLI_MAX_STORES);
    }
    common->urls[common->num_urls++] = url;
    return KVFCLI_FINE;
}

/* $KVFERRY_STORE: one URL, or several separated by blanks. */
static int add_environment(kvfcli_common *common, const char *text) {
    char *rest = NULL;
    common->from_environment = strdup(text);
    if (common->from_environment == NULL) {
        kvfcli_say("no memory");
        return KVFCLI_IO;
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

/* The library takes both secret files as one text. */
static int add_secret(kvfcli_common *common, const char *path) {
    char *both = NULL;
    if (path[0] == '\0' || strchr(path, ':') != NULL) {
        return kvfcli_usage(common, "\"%s\" can't be the name of a secret file: it is empty, or has a colon", path);
    }
    if (common->secret_given && strchr(common->secret_files, ':') != NULL) {
        return kvfcli_usage(common, "two secret files at most: the new one, and the one before");
    }
    int len = common->secret_given ? asprintf(&both, "%s:%s", common->secret_files, path) : asprintf(&both, "%s", path);
    if (len < 0) {
        kvfcli_say("no memory");
        return KVFCLI_IO;
    }
    free(common->secret_files);
    common->secret_files = both;
    common->secret_given = true;
    return KVFCLI_FINE;
}

static int complete_secret(kvfcli_common *common) {
    const char *environment = getenv("KVFERRY_SECRET_FILE");
    if (common->secret_given || environment == NULL) {
        return KVFCLI_FINE;
    }
    if (environment[0] == '\0') {
        return kvfcli_usage(common, "KVFERRY_SECRET_FILE is empty: name a file, or unset it");
    }
    common->secret_files = strdup(environment);
    if (common->secret_files == NULL) {
        kvfcli_say("no memory");
        return KVFCLI_IO;
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
    const char *cache = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");
    size_t len = 0;
    bool have_cache = cache != NULL && cache[0] == '/';
    if (!have_cache && (home == NULL || home[0] != '/')) {
        return kvfcli_usage(common, "neither --store nor KVFERRY_STORE, XDG_CACHE_HOME or HOME is set");
    }
    FILE *out = open_memstream(&common->from_environment, &len);
    if (out == NULL) {
        kvfcli_say("no memory");
        return KVFCLI_IO;
    }
    fputs("file:", out);
    put_path(out, have_cache ? cache : home);
    fputs(have_cache ? "/kvferry/store" : "/.cache/kvferry/store", out);
    if (fclose(out) != 0) {
        kvfcli_say("no memory");
        return KVFCLI_IO;
    }
    return add_url(common, common->from_environment);
}

static int complete_urls(kvfcli_common *common) {
    const char *environment = getenv("KVFERRY_STORE");
    if (common->num_urls == 0 && environment != NULL) {
        int code = add_environment(common, environment);
        if (code != KVFCLI_FINE) {
            return code;
        }
    }
    if (common->num_urls == 0) {
        free(common->from_environment);
        common->from_environment = NULL;
        return add_default(common);
    }
    return KVFCLI_FINE;
}

static int wrong_option(const kvfcli_common *common, int opt, char **argv) {
    const char *what = opt == ':' ? "needs a value" : "is not an option, or takes no value";
    if (optopt != 0 && optopt < KVFCLI_OPT_JSON && argv[optind - 1][1] != '-') {
        return kvfcli_usage(common, "-%c %s", optopt, what);
    }
    /* Without the value after a '=': it may be a secret that was typed here. */
    const char *arg = argv[optind - 1];
    return kvfcli_usage(common, "%.*s %s", (int)strcspn(arg, "="), arg, what);
}

/* getopt_long accepts abbreviated names: `--secret TEXT` would be a secret file. */
static int check_name(const kvfcli_common *common, const struct option *option, char **argv) {
    bool value_apart = optarg != NULL && optarg == argv[optind - 1];
    const char *arg = argv[optind - (value_apart ? 2 : 1)];
    const char *name = arg + 2;
    if (strlen(option->name) == strcspn(name, "=")) {
        return KVFCLI_FINE;
    }
    return kvfcli_usage(common, "%.*s is not an option; --%s is", (int)strcspn(arg, "="), arg, option->name);
}

int kvfcli_parse(kvfcli_common *common, int argc, char **argv, const struct option *options, const char *short_options,
                 kvfcli_take_fn take, void *ctx) {
    char letters[64];
    int opt;
    common->verb = argv[0];
    snprintf(letters, sizeof letters, ":s:vh%s", short_options);
    optind = 1;
    opterr = 0;
    for (int at = -1; (opt = getopt_long(argc, argv, letters, options, &at)) != -1; at = -1) {
        int code = at >= 0 && opt != '?' && opt != ':' ? check_name(common, &options[at], argv) : KVFCLI_FINE;
        if (code != KVFCLI_FINE) {
            return code;
        }
        switch (opt) {
        case 's':
            code = add_url(common, optarg);
            break;
        case KVFCLI_OPT_SECRET:
            code = add_secret(common, optarg);
            break;
        case KVFCLI_OPT_SEAL:
            common->seal_sessions = true;
            break;
        case KVFCLI_OPT_JSON:
            common->json = true;
            break;
        case 'v':
            common->verbose = true;
            kvf_set_log(log_to_stderr, NULL, KVF_LOG_DEBUG);
            break;
        case 'h':
            fputs(common->help, stdout);
            return kvfcli_finish(KVFCLI_FINE);
        case ':':
        case '?':
            return wrong_option(common, opt, argv);
        default:
            code = take(ctx, opt, optarg);
        }
        if (code != KVFCLI_FINE) {
            return code;
        }
    }
    int code = complete_urls(common);
    code = code == KVFCLI_FINE ? complete_secret(common) : code;
    if (code == KVFCLI_FINE && common->seal_sessions && common->secret_files == NULL) {
        code = kvfcli_usage(common, "--sealed needs --secret-file FILE");
    }
    return code == KVFCLI_FINE ? -1 : code;
}

void kvfcli_common_cleanup(kvfcli_common *common) {
    free(common->from_environment);
    common->from_environment = NULL;
    free(common->secret_files);
    common->secret_files = NULL;
}

/* ---- stores ---- */

int kvfcli_open(kvf_store **out, const kvfcli_common *common, const kvf_options *options) {
    kvf_error err = {.status = KVF_OK};
    kvf_options own = options != NULL ? *options : (kvf_options){.struct_size = sizeof own};
    own.secret_files = common->secret_files;
    own.seal_sessions = common->seal_sessions;
    if (kvf_store_open(out, &err, common->urls, common->num_urls, &own) != KVF_OK) {
        return kvfcli_fail(&err);
    }
    return KVFCLI_FINE;
}

void kvfcli_tier_url(kvf_store *store, uint32_t tier, char out[256]) {
    kvf_tier_info info = {.struct_size = sizeof info};
    if (kvf_tier_info_get(store, &info, tier) != KVF_OK) {
        info.url[0] = '\0';
    }
    memcpy(out, info.url, sizeof info.url);
}

/* The first finding of the doctor that explains why a tier can't be used. */
typedef struct diagnosis {
    uint32_t tier;
    bool found;
    char text[512];
} diagnosis;

static void diagnose(void *ctx, const kvf_finding *finding) {
    diagnosis *d = ctx;
    if (d->found || finding->tier != d->tier || finding->severity != KVF_FATAL) {
        return;
    }
    d->found = true;
    const char *mend = finding->mend != NULL ? finding->mend : "";
    snprintf(d->text, sizeof d->text, "%s%s%s", finding->what, mend[0] != '\0' ? "; " : "", mend);
}

static int check_reachable(kvf_store *store, uint32_t tier) {
    kvf_tier_info info = {.struct_size = sizeof info};
    diagnosis d = {.tier = tier};
    if (kvf_tier_info_get(store, &info, tier) != KVF_OK || info.reachable) {
        return KVFCLI_FINE;
    }
    if (kvf_doctor(store, NULL, diagnose, &d) == KVF_OK && d.found) {
        kvfcli_say("%s", d.text); /* what was found names the store */
    } else {
        kvfcli_say("%s: no answer; `kvferry doctor` explains more", info.url);
    }
    return KVFCLI_CONFIG;
}

int kvfcli_open_reachable(kvf_store **out, const kvfcli_common *common) {
    int code = kvfcli_open(out, common, NULL);
    for (uint32_t i = 0; i < common->num_urls && code == KVFCLI_FINE; i++) {
        code = check_reachable(*out, i);
        if (code != KVFCLI_FINE) {
            kvf_store_close(*out);
            *out = NULL;
        }
    }
    return code;
}

/* ---- Ctrl-C ---- */

static volatile sig_atomic_t interrupts;

static void on_interrupt(int signal_number) {
    (void)signal_number;
    if (interrupts++ > 0) {
        _exit(KVFCLI_INTERRUPTED);
    }
}

void kvfcli_catch_interrupt(void) {
    struct sigaction action = {.sa_handler = on_interrupt};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool kvfcli_interrupted(void) {
    return interrupts > 0;
}

/* ---- verbs that work on a store ---- */

static int parse_and_work(const kvfcli_verb *verb, kvfcli_common *common, void *ctx, int argc, char **argv) {
    kvf_store *store = NULL;
    int code = kvfcli_parse(common, argc, argv, verb->options, verb->letters, verb->take, ctx);
    if (code >= 0) {
        return code;
    }
    code = verb->check(ctx, common, argc - optind, argv + optind);
    if (code != KVFCLI_FINE) {
        return code;
    }
    code = verb->unreachable_too ? kvfcli_open(&store, common, NULL) : kvfcli_open_reachable(&store, common);
    if (code == KVFCLI_FINE) {
        code = verb->work(ctx, store, common);
    }
    kvf_store_close(store);
    return code;
}

int kvfcli_verb_main(const kvfcli_verb *verb, void *ctx, int argc, char **argv) {
    kvfcli_common common = {.help = verb->help};
    kvfcli_catch_interrupt();
    int code = parse_and_work(verb, &common, ctx, argc, argv);
    kvfcli_common_cleanup(&common);
    return code;
}
