/* SPDX-License-Identifier: Apache-2.0
 *
 * Opens the stores of a verb, and says why one can't be used.
 */
#include "common/cli.h"

#include <string.h>

int kvfcli_open(kvf_store **out, const kvfcli_common *common, const kvf_options *options) {
    kvf_error err = {.status = KVF_OK};
    kvf_options own = options != NULL ? *options : (kvf_options){.struct_size = sizeof own};
    own.secret_files = common->secret_files;
    own.seal_sessions = common->seal_sessions;
    kvf_status status = kvf_store_open(out, &err, common->urls, common->num_urls, &own);
    return status == KVF_OK ? KVFCLI_FINE : kvfcli_fail(status, &err);
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

int kvfcli_open_reachable(kvf_store **out, const kvfcli_common *common, const kvf_options *options) {
    int code = kvfcli_open(out, common, options);
    for (uint32_t i = 0; i < common->num_urls && code == KVFCLI_FINE; i++) {
        code = check_reachable(*out, i);
        if (code != KVFCLI_FINE) {
            kvf_store_close(*out);
            *out = NULL;
        }
    }
    return code;
}

kvf_reason kvfcli_last_failure(kvf_store *store, kvf_reason otherwise) {
    kvf_stats stats = {.struct_size = sizeof stats};
    kvf_store_stats(store, &stats);
    for (size_t i = KVF_NUM_REASONS; i-- > 0;) {
        if (stats.save_failures[i] > 0) {
            return (kvf_reason)i;
        }
    }
    return otherwise;
}
