/* SPDX-License-Identifier: Apache-2.0
 *
 * Administration of a store: what is in it, whether it is intact, what is wrong with it. Not for the hot path.
 *
 *   kvf_walk(store, &err, visit, ctx, NULL);            every record and session
 *   kvf_clear(store, &removed, &err, NULL);             remove everything of kvferry
 *   kvf_doctor(store, &err, found, ctx);                what is wrong, and how to fix it
 */
#ifndef KVFERRY_ADMIN_H
#define KVFERRY_ADMIN_H

#include "block.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- walk -------------------------------------------------------------------------------------------------------- */

typedef enum kvf_entry_kind {
    KVF_ENTRY_BLOCK,
    /* The card of a space: its fields. */
    KVF_ENTRY_SPACE_CARD,
    KVF_ENTRY_SESSION,
    /* Something that is not from kvferry. */
    KVF_ENTRY_FOREIGN
} kvf_entry_kind;

/* Whether a record is sealed under a secret. */
typedef enum kvf_seal {
    /* It is plain. */
    KVF_SEAL_NONE,
    /* It is sealed under a secret that the store was not given. Positions, tokens and payload are unknown (0, NULL),
     * payload_bytes includes the tokens, and damage inside is not visible. */
    KVF_SEAL_CLOSED,
    /* It is sealed, and was opened; without `whole` only its header. */
    KVF_SEAL_OPENED
} kvf_seal;

/* One thing in a store. */
typedef struct kvf_entry {
    kvf_entry_kind kind;
    uint32_t tier;
    /* The store's own name: a Redis key, or a file's path below the folder. Of a session its id, or "" if it is sealed
     * and the walk does not read whole values. May contain any bytes: quote it. */
    const char *name;
    kvf_digest space;
    kvf_key key;
    /* Header and payload, as stored. */
    uint64_t stored_bytes;
    uint64_t payload_bytes;
    uint32_t first_token, num_tokens;
    /* NULL if the record has none, or if the walk does not read whole values. */
    const uint32_t *tokens;
    /* NULL if the walk does not read whole values. */
    const void *payload;
    /* Seconds since 1970. 0 = unknown. */
    int64_t stored_s;
    /* Time to live. -1 = none; -2 = unknown, because it is in the meta of a session that was not read. */
    int64_t ttl_ms;
    /* KVF_WHY_NONE, or what is wrong with it; without `whole` only what the header shows. KVF_WHY_ABSENT: a part of it
     * is missing (evicted, removed while it was written, or its writer died): a miss, but not damage. A sealed record
     * that opens under none of the store's secrets is damaged only if the card of its space opens under one. Otherwise
     * it is another tenant's (KVF_SEAL_CLOSED). Of a damaged record, pass `space` and `key` to kvf_remove. */
    kvf_reason damage;
    kvf_seal seal;
} kvf_entry;

/* Called for every entry. Return 0 to continue, anything else to end the walk. The entry, and what it points to, are
 * valid during the call only. */
typedef int (*kvf_visit_fn)(void *ctx, const kvf_entry *);

/* Options of a walk. Zero in any field but struct_size is its default. */
typedef struct kvf_walk_options {
    uint32_t struct_size;
    /* Not 0: read and verify whole values, not only headers. */
    int whole;
    /* Only this space. NULL = all. */
    const kvf_digest *space;
    /* For one step of the store, not for the whole walk. KVF_DEFAULT is 5 s. */
    int64_t budget_us;
    /* With `space`: only this record, read directly. Its name is "" and its ttl_ms -1. */
    const kvf_key *key;
} kvf_walk_options;

/* kvf_walk visits every record and session of every tier. Records that come or go meanwhile may be visited or not.
 * `options` may be NULL. Returns KVF_OK; KVF_IO or KVF_CONFIG with err; KVF_LIMIT
 * (struct_size, a `key` without `space`, a budget out of range); KVF_NOMEM; KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_walk(kvf_store *, kvf_error *err, kvf_visit_fn, void *ctx,
                                           const kvf_walk_options *options);

/* kvf_space_describe returns the fields of a space as "name=value\n" lines, from the card that is stored beside its
 * blocks. Free the text with kvf_free. Returns KVF_OK; KVF_MISS (no card of the space is stored,
 * or can be read); KVF_REFUSED (it is sealed, and the store was not given its secret); KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_space_describe(kvf_store *, char **out, kvf_error *err, const kvf_digest *space);
/* kvf_free frees memory that a call returned. */
KVF_API void kvf_free(void *);

/* ---- remove ------------------------------------------------------------------------------------------------------ */

/* kvf_clear removes all records of one space, or (NULL) all records and sessions of kvferry. Nothing else in the server
 * or folder is touched. *out_removed is set in any case. Returns KVF_OK; KVF_IO or KVF_CONFIG with err; KVF_NOMEM;
 * KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_clear(kvf_store *, uint64_t *out_removed, kvf_error *err,
                                            const kvf_digest *space);
/* kvf_remove removes one record from all tiers. Returns KVF_OK; KVF_MISS (no tier had it); KVF_IO or
 * KVF_CONFIG with err; KVF_NOMEM; KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_remove(kvf_store *, kvf_error *err, const kvf_digest *space, const kvf_key *key);

/* ---- doctor and info --------------------------------------------------------------------------------------------- */

typedef enum kvf_severity { KVF_FINE, KVF_NOTE, KVF_WARNING, KVF_FATAL } kvf_severity;

/* One finding of the doctor. The strings are valid during the call only. */
typedef struct kvf_finding {
    kvf_severity severity;
    uint32_t tier;
    /* A stable word, such as "noeviction". */
    const char *code;
    /* What was found, with its values. */
    const char *what;
    /* How to fix it, often a command to type. Empty if nothing is wrong. */
    const char *mend;
} kvf_finding;
typedef void (*kvf_finding_fn)(void *ctx, const kvf_finding *);

/* kvf_doctor examines every tier and calls the function for each finding. Returns KVF_OK, also if it finds that
 * everything is wrong; KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_doctor(kvf_store *, kvf_error *err, kvf_finding_fn, void *ctx);

/* One tier, as far as it is known without a walk. -1 = unknown. */
typedef struct kvf_tier_info {
    uint32_t struct_size;
    /* Without the password. */
    char url[256];
    int reachable;
    int64_t num_records, used_bytes, max_bytes;
    /* Servers, by the breakers of this process. After a failure nobody tries a server for a moment (open). Then one
     * caller does (half-open). */
    uint32_t num_servers, num_open, num_half_open;
    /* Servers that refused saves (out of memory, no disk); saves to them pause for a while. */
    uint32_t num_refusing;
} kvf_tier_info;

/* kvf_tier_info_get describes one tier, by its index in the URLs of the store. Returns KVF_OK; KVF_LIMIT
 * (struct_size, no such tier); KVF_CLOSED. */
KVF_API KVF_MUST_CHECK kvf_status kvf_tier_info_get(kvf_store *, kvf_tier_info *out, uint32_t tier);

#ifdef __cplusplus
}
#endif
#endif
