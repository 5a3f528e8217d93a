/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry clear: remove a space, a session, or everything of kvferry.
 */
#include "common/cli.h"
#include "verbs/verbs.h"

#include <unistd.h>

typedef struct request {
    const char *space; /* or a session, or all */
    bool all, yes;
} request;

static int done(const kvfcli_common *common, uint64_t num_removed) {
    if (common->json) {
        return kvfcli_print_json(json_pack("{s:I}", "num_removed", (json_int_t)num_removed), KVFCLI_FINE);
    }
    printf("%llu removed\n", (unsigned long long)num_removed);
    return KVFCLI_FINE;
}

static int clear_session(kvf_store *store, const kvfcli_common *common) {
    kvf_error err = {.status = KVF_OK};
    kvf_status status = kvf_session_remove(store, &err, common->session);
    if (status == KVF_MISS) {
        kvfcli_say("no session \"%s\"", common->session);
        return KVFCLI_FOUND;
    }
    return status == KVF_OK ? done(common, 1) : kvfcli_fail(status, &err);
}

/* NULL: all of them. */
static int clear_space(kvf_store *store, const kvfcli_common *common, const kvf_digest *space) {
    kvf_error err = {.status = KVF_OK};
    uint64_t removed = 0;
    kvf_status status = kvf_clear(store, &removed, &err, space);
    return status == KVF_OK ? done(common, removed) : kvfcli_fail(status, &err);
}

static int work(void *ctx, kvf_store *store, const kvfcli_common *common) {
    const request *r = ctx;
    kvfcli_named found;
    if (common->session != NULL) {
        return clear_session(store, common);
    }
    if (r->all) {
        return clear_space(store, common, NULL);
    }
    int code = kvfcli_find(store, &found, KVFCLI_SPACES, r->space, NULL);
    return code == KVFCLI_FINE ? clear_space(store, common, &found.space) : code;
}

static int check(void *ctx, const kvfcli_common *common, int argc, char **argv) {
    request *r = ctx;
    r->space = argc > 0 ? argv[0] : NULL;
    if (argc > 1 || (r->space != NULL) + (common->session != NULL) + r->all != 1) {
        return kvfcli_usage("name one of SPACE, --session ID and --all");
    }
    if (r->all && !r->yes && isatty(STDIN_FILENO)) {
        return kvfcli_usage("this would remove every block and session of the store; add --yes if that is meant");
    }
    return kvfcli_check_hex(r->space);
}

int kvfcli_clear(int argc, char **argv) {
    static const kvfcli_option options[] = {
        KVFCLI_OPT_FLAG(request, all, 0, "all", "remove everything of kvferry"),
        KVFCLI_OPT_FLAG(request, yes, 'y', "yes", "with --all: do not ask (needed on a terminal)"),
        {.kind = KVFCLI_END}};
    static const kvfcli_verb verb = {
        .help = "usage: kvferry clear SPACE | --session ID | --all [--yes] [options]\n"
                "\n"
                "Removes all blocks of a space, one session, or all blocks and sessions. Nothing else in the\n"
                "folder or server is touched. SPACE is what kvferry ls prints; the first digits are enough.\n"
                "\n"
                "  kvferry clear 6053e2b9                   the blocks of one model and KV format\n"
                "  kvferry clear --all --yes                everything\n"
                "  kvferry run --chat ID --restart ...      forgets a conversation of `kvferry run`\n",
        .exits = "Exit codes: 0; 1 when there is no such space or session.\n",
        .options = options,
        .sessions = true,
        .check = check,
        .work = work};
    request r = {.all = false};
    return kvfcli_verb_main(&verb, &r, argc, argv);
}
