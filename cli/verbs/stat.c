/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry stat: shows how much each tier holds, as far as it can tell without reading every record.
 */
#include "common/cli.h"
#include "verbs/verbs.h"

static const char *number(char out[KVFCLI_TEXT], int64_t n) {
    if (n < 0) {
        return "not counted (kvferry ls counts them)";
    }
    snprintf(out, KVFCLI_TEXT, "%lld", (long long)n);
    return out;
}

static const char *size_or_unknown(char out[KVFCLI_TEXT], int64_t bytes) {
    return bytes < 0 ? "?" : kvfcli_size(out, (uint64_t)bytes);
}

static void print_tier(const kvf_tier_info *info) {
    char records[KVFCLI_TEXT], used[KVFCLI_TEXT], max[KVFCLI_TEXT];
    printf("%s\n", kvfcli_shown(info->url));
    if (info->num_servers > 1) {
        kvfcli_row("  servers", "%u, breaker open for %u, half-open for %u; saves refused by %u", info->num_servers,
                   info->num_open, info->num_half_open, info->num_refusing);
    }
    if (info->num_servers == 1 && info->num_refusing > 0) {
        printf("  refuses saves for now (kvferry doctor explains why)\n");
    }
    if (!info->reachable) {
        printf("  does not answer (kvferry doctor explains why)\n");
        return;
    }
    kvfcli_row("  records", "%s", number(records, info->num_records));
    kvfcli_row("  used", "%s", size_or_unknown(used, info->used_bytes));
    kvfcli_row("  bound", "%s", info->max_bytes == 0 ? "none" : size_or_unknown(max, info->max_bytes));
}

static json_t *number_json(int64_t n) {
    return n < 0 ? json_null() : json_integer((json_int_t)n);
}

static json_t *tier_json(const kvf_tier_info *info) {
    return json_pack("{s:o, s:b, s:o, s:o, s:o, s:i, s:i, s:i, s:i}", "url", kvfcli_json_text(info->url), "reachable",
                     info->reachable, "num_records", number_json(info->num_records), "used_bytes",
                     number_json(info->used_bytes), "max_bytes", number_json(info->max_bytes), "num_servers",
                     (int)info->num_servers, "num_open", (int)info->num_open, "num_half_open", (int)info->num_half_open,
                     "num_refusing", (int)info->num_refusing);
}

static int work(void *ctx, kvf_store *store, const kvfcli_common *common) {
    (void)ctx;
    int code = KVFCLI_FINE;
    json_t *tiers = json_array();
    for (uint32_t tier = 0; tier < common->num_urls; tier++) {
        kvf_tier_info info = {.struct_size = sizeof info};
        kvf_status status = kvf_tier_info_get(store, &info, tier);
        if (status != KVF_OK) {
            kvfcli_say("tier %u: %s", tier, kvf_status_name(status));
            json_decref(tiers);
            return kvfcli_exit_of(status);
        }
        code = info.reachable ? code : KVFCLI_FOUND;
        if (common->json) {
            json_array_append_new(tiers, tier_json(&info));
        } else {
            print_tier(&info);
        }
    }
    if (common->json) {
        return kvfcli_print_json(json_pack("{s:o}", "tiers", tiers), code);
    }
    json_decref(tiers);
    return code;
}

int kvfcli_stat(int argc, char **argv) {
    static const kvfcli_verb verb = {
        .help = "usage: kvferry stat [options]\n"
                "\n"
                "Shows for every tier of a store whether it answers, its number of records, its bytes and its\n"
                "bound, as far as is known without a walk (kvferry ls counts exactly). A server's numbers\n"
                "include everything in it.\n"
                "\n"
                "  kvferry stat --store redis://localhost\n",
        .exits = "Exit codes: 0; 1 when a tier does not answer.\n",
        .needs = KVFCLI_OPEN,
        .work = work};
    return kvfcli_verb_main(&verb, NULL, argc, argv);
}
