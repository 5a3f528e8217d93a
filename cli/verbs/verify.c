/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry verify: reads every record whole and checks it as a load would, including records that nobody loads.
 */
#include "common/cli.h"
#include "verbs/verbs.h"

#include <stdlib.h>
#include <string.h>

typedef struct damaged {
    uint32_t tier;
    char *name;
    kvf_digest space;
    kvf_key key;
    bool is_session;
    kvf_reason why;
    bool removed;
} damaged;

typedef struct inspection {
    bool remove;
    damaged *list;
    size_t num, cap;
    uint64_t num_records, num_sessions, num_foreign, num_incomplete, bytes;
    uint64_t num_closed; /* sealed under a secret that was not given: only header and length could be checked */
    bool no_memory;
    kvfcli_progress progress;
} inspection;

static bool note_damage(inspection *in, const kvf_entry *entry) {
    if (!kvfcli_grow(&in->list, &in->cap, in->num + 1, sizeof *in->list)) {
        return false;
    }
    in->list[in->num] = (damaged){.tier = entry->tier,
                                  .name = strdup(entry->name),
                                  .space = entry->space,
                                  .key = entry->key,
                                  .is_session = entry->kind == KVF_ENTRY_SESSION,
                                  .why = entry->damage};
    return in->list[in->num++].name != NULL;
}

/* The list has both. */
static size_t num_damaged(const inspection *in) {
    return in->num - (size_t)in->num_incomplete;
}

static int examine(void *ctx, const kvf_entry *entry) {
    inspection *in = ctx;
    if (entry->kind == KVF_ENTRY_FOREIGN) {
        in->num_foreign++;
        return 0;
    }
    in->num_sessions += entry->kind == KVF_ENTRY_SESSION;
    in->num_records += entry->kind != KVF_ENTRY_SESSION;
    in->bytes += entry->stored_bytes;
    in->num_incomplete += entry->damage == KVF_WHY_ABSENT;
    in->num_closed += entry->seal == KVF_SEAL_CLOSED;
    if (entry->damage != KVF_WHY_NONE && !note_damage(in, entry)) {
        in->no_memory = true;
        return 1;
    }
    char size[KVFCLI_TEXT];
    kvfcli_progress_show(&in->progress, "verified %llu records, %s; %zu damaged",
                         (unsigned long long)(in->num_records + in->num_sessions), kvfcli_size(size, in->bytes),
                         num_damaged(in));
    return 0;
}

static int remove_damaged(inspection *in, kvf_store *store) {
    for (size_t i = 0; i < in->num; i++) {
        damaged *d = &in->list[i];
        kvf_error err = {.status = KVF_OK};
        kvf_status status =
            d->is_session ? kvf_session_remove(store, &err, d->name) : kvf_remove(store, &err, &d->space, &d->key);
        if (status != KVF_OK && status != KVF_MISS) {
            return kvfcli_fail(status, &err);
        }
        d->removed = true;
    }
    return KVFCLI_FINE;
}

static json_t *damaged_json(const damaged *d) {
    return json_pack("{s:i, s:o, s:s, s:b}", "tier", (int)d->tier, "name", kvfcli_json_text(d->name), "reason",
                     kvf_reason_name(d->why), "removed", d->removed);
}

static json_t *report_json(const inspection *in) {
    json_t *list = json_array();
    for (size_t i = 0; i < in->num; i++) {
        if (in->list[i].why != KVF_WHY_ABSENT) {
            json_array_append_new(list, damaged_json(&in->list[i]));
        }
    }
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:o}", "num_sealed", (json_int_t)in->num_closed, "num_incomplete",
                     (json_int_t)in->num_incomplete, "num_records", (json_int_t)in->num_records, "num_sessions",
                     (json_int_t)in->num_sessions, "num_foreign", (json_int_t)in->num_foreign, "bytes",
                     (json_int_t)in->bytes, "damaged", list);
}

static void print_report(const inspection *in, kvf_store *store) {
    char size[KVFCLI_TEXT], url[256];
    for (size_t i = 0; i < in->num; i++) {
        const damaged *d = &in->list[i];
        kvfcli_tier_url(store, d->tier, url);
        bool incomplete = d->why == KVF_WHY_ABSENT;
        printf("%s: %s in %s: %s%s\n", incomplete ? "incomplete" : "damaged", kvfcli_shown(d->name), kvfcli_shown(url),
               incomplete ? "a part of it is not there" : kvf_reason_name(d->why), d->removed ? " (removed)" : "");
    }
    if (in->num_incomplete > 0) {
        printf("%llu incomplete\n", (unsigned long long)in->num_incomplete);
    }
    if (in->num_closed > 0) {
        printf("%llu sealed under a secret that was not given (--secret-file): only their headers and lengths were "
               "checked\n",
               (unsigned long long)in->num_closed);
    }
    printf("%llu records and %llu sessions, %s: %zu damaged\n", (unsigned long long)in->num_records,
           (unsigned long long)in->num_sessions, kvfcli_size(size, in->bytes), num_damaged(in));
}

static int verify(inspection *in, kvf_store *store, const kvfcli_common *common) {
    kvf_walk_options options = {.struct_size = sizeof options, .whole = 1};
    kvfcli_progress_start(&in->progress, false);
    int code = kvfcli_walk(store, examine, in, &options);
    kvfcli_progress_end(&in->progress);
    if (code != KVFCLI_FINE) {
        return code;
    }
    if (in->no_memory) {
        return kvfcli_no_memory();
    }
    code = in->remove ? remove_damaged(in, store) : KVFCLI_FINE;
    if (code != KVFCLI_FINE) {
        return code;
    }
    code = num_damaged(in) > 0 ? KVFCLI_FOUND : KVFCLI_FINE;
    if (common->json) {
        return kvfcli_print_json(report_json(in), code);
    }
    print_report(in, store);
    return code;
}

static int work(void *ctx, kvf_store *store, const kvfcli_common *common) {
    inspection *in = ctx;
    int code = verify(in, store, common);
    for (size_t i = 0; i < in->num; i++) {
        free(in->list[i].name);
    }
    free(in->list);
    return code;
}

int kvfcli_verify(int argc, char **argv) {
    static const kvfcli_option options[] = {
        KVFCLI_OPT_FLAG(inspection, remove, 0, "remove", "remove what is damaged or incomplete"), {.kind = KVFCLI_END}};
    static const kvfcli_verb verb = {
        .help = "usage: kvferry verify [--remove] [options]\n"
                "\n"
                "Reads every record of every tier whole, checks header, lengths, place and checksum, and lists\n"
                "what is damaged, with the reason. A damaged record is never loaded (it is a miss), so this is\n"
                "optional. A record of several parts is incomplete if the server evicted one, or if it was\n"
                "removed while it was written: a miss too, but not damage. Of sealed records only header and\n"
                "length can be checked without their secret.\n"
                "\n"
                "  kvferry verify --store file:/var/cache/kvferry --remove\n",
        .exits = "Exit codes: 0 when all is whole; 1 when something is (or, with --remove, was) damaged.\n",
        .options = options,
        .work = work};
    inspection in = {.remove = false};
    return kvfcli_verb_main(&verb, &in, argc, argv);
}
