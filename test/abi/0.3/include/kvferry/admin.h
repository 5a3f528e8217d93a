/* SPDX-License-Identifier: Apache-2.0
 *
 * Looking after a store: what is in it, whether it is whole, what is wrong with it. Not for the hot path.
 */
#ifndef KVFERRY_ADMIN_H
#define KVFERRY_ADMIN_H

#include "block.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kvf_entry_kind {
    KVF_ENTRY_BLOCK,
    KVF_ENTRY_SPACE_CARD,
    KVF_ENTRY_SESSION,
    KVF_ENTRY_FOREIGN
} kvf_entry_kind;

/* Of a record of a space with a secret. */
typedef enum kvf_seal {
    KVF_SEAL_NONE,   /* it is plain */
    KVF_SEAL_CLOSED, /* it is sealed under a secret that the store was not given: positions, tokens and payload are not
                        known (0, NULL), payload_bytes counts the tokens, too, and damage inside is not seen */
    KVF_SEAL_OPENED  /* it is sealed, and was opened; without `whole` as far as its header goes */
} kvf_seal;

/* One thing in a store. */
typedef struct kvf_entry {
    kvf_entry_kind kind;
    uint32_t tier;
    const char
        *name; /* the store's own name for it: a Redis key, a file's path below the folder; of a session its id, or ""
                  where it is sealed and the walk does not read whole values. Any bytes: quote it */
    kvf_digest space;
    kvf_key key;
    uint64_t stored_bytes; /* header and payload, as the store keeps them */
    uint64_t payload_bytes;
    uint32_t first_token, num_tokens;
    const uint32_t *tokens; /* NULL unless the walk reads whole values, or where the record has none */
    const void *payload;    /* NULL unless the walk reads whole values */
    int64_t stored_s;       /* 0 = unknown */
    int64_t ttl_ms;         /* -1 = none, -2 = not known: it is in the meta of a session that was not read */
    /* KVF_WHY_NONE, or what is wrong with it; without `whole` only what the header shows. KVF_WHY_ABSENT: a part of it
     * is not there (evicted, removed while it was written, or its writer died): a miss, and no damage. A sealed record
     * that opens under none of the store's secrets is damaged only if the card of its space opens under one; else it
     * is another tenant's (KVF_SEAL_CLOSED). Of a damaged record, `space` and `key` are those to give to kvf_remove */
    kvf_reason damage;
    kvf_seal seal;
} kvf_entry;

/* Return 0 to go on, anything else to stop the walk. The entry and what it points to are valid during the call only. */
typedef int (*kvf_visit_fn)(void *ctx, const kvf_entry *);

typedef struct kvf_walk_options {
    uint32_t struct_size;
    int whole;               /* read and verify whole values, not only headers */
    const kvf_digest *space; /* only this space; NULL = all */
    int64_t budget_us;       /* for one step of the store, not for the whole walk; KVF_DEFAULT is 5 s */
    const kvf_key
        *key; /* with `space`: only this record, read directly instead of by a walk; its name is "" and its ttl_ms -1 */
} kvf_walk_options;

/* kvf_walk visits every record (and session) of every tier. What comes or goes meanwhile may or may not be seen.
 * Returns KVF_OK; KVF_IO or KVF_CONFIG with err; KVF_LIMIT (struct_size, a `key` without `space`, a budget out of
 * range);
 * KVF_NOMEM; KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_walk(kvf_store *, kvf_error *err, kvf_visit_fn, void *ctx,
                                           const kvf_walk_options *options);

/* kvf_clear removes all records of one space, or all records and sessions of kvferry (NULL); nothing else in
 * the server or folder is touched. *out_removed is set in any case. Returns KVF_OK; KVF_IO or KVF_CONFIG with err;
 * KVF_NOMEM; KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_clear(kvf_store *, uint64_t *out_removed, kvf_error *err,
                                            const kvf_digest *space);
/* kvf_remove removes one record from all tiers. Returns KVF_OK; KVF_MISS (no tier had it); KVF_IO or KVF_CONFIG with
 * err;
 * KVF_NOMEM; KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_remove(kvf_store *, kvf_error *err, const kvf_digest *space, const kvf_key *key);

/* kvf_space_describe finds the fields of a space that some process stored to, as "name=value\n" lines. The text is the
 * caller's: kvf_free. Returns KVF_OK; KVF_MISS (no card of the space is stored, or can be read); KVF_REFUSED (it is
 * sealed, and the store was not given its secret); KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_space_describe(kvf_store *, char **out, kvf_error *err, const kvf_digest *space);
KVF_API void kvf_free(void *);

/* One finding of the doctor. Strings are valid during the call only. */
typedef enum kvf_severity { KVF_FINE, KVF_NOTE, KVF_WARNING, KVF_FATAL } kvf_severity;
typedef struct kvf_finding {
    kvf_severity severity;
    uint32_t tier;
    const char *code; /* a stable word, e.g. "noeviction" */
    const char *what; /* what was found, with its values */
    const char *mend; /* what to do, often a command to type; empty when fine */
} kvf_finding;
typedef void (*kvf_finding_fn)(void *ctx, const kvf_finding *);
/* kvf_doctor returns KVF_OK, also where it finds that all is wrong; KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_doctor(kvf_store *, kvf_error *err, kvf_finding_fn, void *ctx);

/* What one tier is and holds, as far as it can tell cheaply; -1 = unknown. */
typedef struct kvf_tier_info {
    uint32_t struct_size;
    char url[256]; /* without password */
    int reachable;
    int64_t num_records, used_bytes, max_bytes;
    /* Servers, by the breakers of this process: after a failure nobody tries for a moment (open), then one does
     * (half-open). */
    uint32_t num_servers, num_open, num_half_open;
    uint32_t num_refusing; /* those that refuse saves (out of memory, no disk), and are spared them for a while */
} kvf_tier_info;
/* kvf_tier_info_get returns KVF_OK; KVF_LIMIT (struct_size, no such tier); KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_tier_info_get(kvf_store *, kvf_tier_info *out, uint32_t tier);

#ifdef __cplusplus
}
#endif
#endif
