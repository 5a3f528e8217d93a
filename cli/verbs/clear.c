/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry clear: remove a space, a session, or everything of kvferry.
 */
#include "common/cli.h"
#include "verbs/verbs.h"

#include <unistd.h>

static const char help[] =
    "usage: kvferry clear SPACE | --session ID | --all [--yes] [options]\n"
    "\n"
    "Removes all blocks of a space (the first digits of it are enough), one session, or all blocks and\n"
    "sessions. Nothing else in the folder or server is touched.\n"
    "\n"
    "Options:\n"
    "      --session ID  remove this session (of kvf_session_save; a conversation of `kvferry run\n"
    "                    --chat` is forgotten by `kvferry run --chat ID --restart`)\n"
    "      --sealed      with --session: the one that is sealed under the secret\n"
    "      --all         remove everything of kvferry\n"
    "  -y, --yes         with --all: do not ask (needed on a terminal)\n" KVFCLI_COMMON_HELP "\n"
    "Exit codes: 0; 1 when there is no such space or session.\n";

enum { OPT_SESSION = KVFCLI_OPT_OWN, OPT_ALL };

typedef struct request {
    const char *space, *session; /* one of these, or all */
    bool all, yes;
} request;

static int done(const kvfcli_common *common, uint64_t num_removed) {
    if (common->json) {
        return kvfcli_print_json(json_pack("{s:I}", "num_removed", (json_int_t)num_removed), KVFCLI_FINE);
    }
    printf("%llu removed\n", (unsigned long long)num_removed);
    return KVFCLI_FINE;
}

static int fail(kvf_error *err, kvf_status status) {
    err->status = status;
    return kvfcli_fail(err);
}

static int clear_session(const request *r, kvf_store *store, const kvfcli_common *common) {
    kvf_error err = {.status = KVF_OK};
    kvf_status status = kvf_session_remove(store, &err, r->session);
    if (status == KVF_MISS) {
        kvfcli_say("no session \"%s\"", r->session);
        return KVFCLI_FOUND;
    }
    return status == KVF_OK ? done(common, 1) : fail(&err, status);
}

static int clear_space(const request *r, kvf_store *store, const kvfcli_common *common) {
    kvf_error err = {.status = KVF_OK};
    kvf_digest space;
    uint64_t removed = 0;
    int code = kvfcli_find_space(store, &space, r->space);
    if (code != KVFCLI_FINE) {
        return code;
    }
    kvf_status status = kvf_clear(store, &removed, &err, &space);
    return status == KVF_OK ? done(common, removed) : fail(&err, status);
}

static int clear_all(kvf_store *store, const kvfcli_common *common) {
    kvf_error err = {.status = KVF_OK};
    uint64_t removed = 0;
    kvf_status status = kvf_clear(store, &removed, &err, NULL);
    return status == KVF_OK ? done(common, removed) : fail(&err, status);
}

static int work(void *ctx, kvf_store *store, const kvfcli_common *common) {
    const request *r = ctx;
    if (r->session != NULL) {
        return clear_session(r, store, common);
    }
    return r->all ? clear_all(store, common) : clear_space(r, store, common);
}

static int check(void *ctx, const kvfcli_common *common, int argc, char **argv) {
    request *r = ctx;
    r->space = argc > 0 ? argv[0] : NULL;
    if (argc > 1 || (r->space != NULL) + (r->session != NULL) + r->all != 1) {
        return kvfcli_usage(common, "name one of SPACE, --session ID and --all");
    }
    if (common->seal_sessions && r->session == NULL) {
        return kvfcli_usage(common, "--sealed goes with --session ID");
    }
    if (r->space != NULL && !kvfcli_is_hex(r->space)) {
        return kvfcli_usage(common, "\"%s\" is not the beginning of a space: hex digits are", r->space);
    }
    if (r->all && !r->yes && isatty(STDIN_FILENO)) {
        return kvfcli_usage(common,
                            "this would remove every block and session of the store; add --yes if that is meant");
    }
    return KVFCLI_FINE;
}

static int take(void *ctx, int opt, const char *value) {
    request *r = ctx;
    switch (opt) {
    case OPT_SESSION:
        r->session = value;
        break;
    case OPT_ALL:
        r->all = true;
        break;
    default:
        r->yes = true;
    }
    return KVFCLI_FINE;
}

int kvfcli_clear(int argc, char **argv) {
    static const struct option options[] = {KVFCLI_COMMON_OPTIONS,
                                            {"session", required_argument, NULL, OPT_SESSION},
                                            {"sealed", no_argument, NULL, KVFCLI_OPT_SEAL},
                                            {"all", no_argument, NULL, OPT_ALL},
                                            {"yes", no_argument, NULL, 'y'},
                                            {0}};
    static const kvfcli_verb verb = {
        .help = help, .options = options, .letters = "y", .take = take, .check = check, .work = work};
    request r = {.all = false};
    return kvfcli_verb_main(&verb, &r, argc, argv);
}
