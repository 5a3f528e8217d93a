/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry doctor: finds what is wrong with a store or its server, and says how to fix it.
 */
#include "common/cli.h"
#include "verbs/verbs.h"

static const char *const severity_names[] = {"fine", "note", "warning", "fatal"};

typedef struct visit {
    kvf_store *store;
    json_t *findings; /* NULL = print for people */
    kvf_severity worst;
    uint32_t last_tier;
    bool any;
} visit;

static void print_finding(visit *v, const kvf_finding *finding) {
    if (!v->any || finding->tier != v->last_tier) {
        char url[256];
        kvfcli_tier_url(v->store, finding->tier, url);
        printf("%s\n", kvfcli_shown(url));
    }
    printf("  %-8s %s\n", severity_names[finding->severity], kvfcli_shown(finding->what));
    if (finding->mend != NULL && finding->mend[0] != '\0') {
        printf("  %-8s mend: %s\n", "", kvfcli_shown(finding->mend));
    }
}

static void found(void *ctx, const kvf_finding *finding) {
    visit *v = ctx;
    if (v->findings == NULL) {
        print_finding(v, finding);
    } else {
        json_array_append_new(v->findings,
                              json_pack("{s:i, s:s, s:s, s:o, s:o}", "tier", (int)finding->tier, "severity",
                                        severity_names[finding->severity], "code", finding->code, "what",
                                        kvfcli_json_text(finding->what), "mend",
                                        finding->mend != NULL ? kvfcli_json_text(finding->mend) : json_null()));
    }
    v->worst = finding->severity > v->worst ? finding->severity : v->worst;
    v->last_tier = finding->tier;
    v->any = true;
}

static json_t *urls_json(kvf_store *store, size_t num_tiers) {
    json_t *urls = json_array();
    for (uint32_t tier = 0; tier < num_tiers; tier++) {
        char url[256];
        kvfcli_tier_url(store, tier, url);
        json_array_append_new(urls, kvfcli_json_text(url));
    }
    return urls;
}

static int work(void *ctx, kvf_store *store, const kvfcli_common *common) {
    (void)ctx;
    kvf_error err = {.status = KVF_OK};
    visit v = {.store = store, .findings = common->json ? json_array() : NULL, .worst = KVF_FINE};
    kvf_status status = kvf_doctor(store, &err, found, &v);
    if (status != KVF_OK) {
        json_decref(v.findings);
        return kvfcli_fail(status, &err);
    }
    int code = v.worst >= KVF_WARNING ? KVFCLI_FOUND : KVFCLI_FINE;
    if (common->json) {
        return kvfcli_print_json(json_pack("{s:o, s:s, s:o}", "tiers", urls_json(store, common->num_urls), "worst",
                                           severity_names[v.worst], "findings", v.findings),
                                 code);
    }
    printf("%s\n", v.worst == KVF_FINE ? "all fine" : v.worst == KVF_NOTE ? "fine, with notes" : "something to mend");
    return code;
}

int kvfcli_doctor(int argc, char **argv) {
    static const kvfcli_verb verb = {
        .help = "usage: kvferry doctor [options]\n"
                "\n"
                "Examines every tier of a store: can it be reached and written to, and do its settings lose or\n"
                "slow down what is stored. Every finding comes with a fix, often a command to type.\n"
                "\n"
                "  kvferry doctor --store redis://localhost\n",
        .exits = "Exit codes: 0 when everything is fine or there are only notes; 1 when there is a warning or\n"
                 "worse; 3 when the URL itself is wrong.\n",
        .creates = true, /* can it be written to? */
        .needs = KVFCLI_OPEN,
        .work = work};
    return kvfcli_verb_main(&verb, NULL, argc, argv);
}
