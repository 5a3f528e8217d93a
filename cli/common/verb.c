/* SPDX-License-Identifier: Apache-2.0
 *
 * The order of every verb: options, arguments, store, work.
 */
#include "common/cli.h"

#include <getopt.h>

static int open_as_needed(kvf_store **out, const kvfcli_verb *verb, const kvfcli_common *common) {
    bool may_create = verb->creates || common->unnamed; /* a path that was typed may be mistyped */
    const kvf_options options = {.struct_size = sizeof options, .flags = may_create ? 0 : KVF_OPEN_EXISTING};
    switch (verb->needs) {
    case KVFCLI_REACHABLE:
        return kvfcli_open_reachable(out, common, &options);
    case KVFCLI_OPEN:
        return kvfcli_open(out, common, &options);
    case KVFCLI_OWN:
        break;
    }
    return KVFCLI_FINE;
}

static int check_arguments(const kvfcli_verb *verb, void *ctx, const kvfcli_common *common, int argc, char **argv) {
    if (verb->check != NULL) {
        return verb->check(ctx, common, argc, argv);
    }
    return argc > 0 ? kvfcli_usage("this verb takes no argument, such as \"%s\"", argv[0]) : KVFCLI_FINE;
}

static int parse_and_work(const kvfcli_verb *verb, kvfcli_common *common, void *ctx, int argc, char **argv) {
    kvf_store *store = NULL;
    int code = kvfcli_parse(common, verb, ctx, argc, argv);
    if (code >= 0) {
        return code;
    }
    if (common->verbose) {
        kvfcli_log(KVF_LOG_DEBUG);
    }
    code = check_arguments(verb, ctx, common, argc - optind, argv + optind);
    if (code == KVFCLI_FINE) {
        code = open_as_needed(&store, verb, common);
    }
    if (code == KVFCLI_FINE) {
        code = verb->work(ctx, store, common);
    }
    kvf_store_close(store);
    return code;
}

int kvfcli_verb_main(const kvfcli_verb *verb, void *ctx, int argc, char **argv) {
    kvfcli_common common = {.num_urls = 0};
    kvfcli_set_verb(argv[0]);
    kvfcli_catch_interrupt();
    int code = parse_and_work(verb, &common, ctx, argc, argv);
    kvfcli_common_cleanup(&common);
    return code;
}
