/* SPDX-License-Identifier: Apache-2.0
 *
 * Changes of adapters. A context computes under one set of adapters after another: a server may use another set for
 * every batch. Each set is an identity with its own space. The handle remains, and with it all knowledge about the
 * sequences. Each sequence records which identity computed it, and counts for that one only.
 */
#include <stdlib.h>
#include <string.h>

#include "llama/engine.h"

static kvfl_identity *find(kvf_llama *kv, const char *adapters) {
    for (size_t i = 0; i < KVFL_IDENTITIES; i++) {
        kvfl_identity *identity = &kv->calls->identities[i];
        if (identity->number != 0 && strcmp(identity->adapters, adapters) == 0) {
            return identity;
        }
    }
    return NULL;
}

static void take(kvf_llama *kv, kvfl_identity *identity) {
    identity->used = ++kv->calls->identity_clock;
    kv->identity = identity->number;
    kv->space = identity->space;
}

void kvfl_leave_identity(kvf_llama *kv) {
    kv->identity = 0;
    kv->space = NULL;
}

static void clear(kvfl_identity *identity) {
    kvf_space_close(identity->space);
    free(identity->adapters);
    *identity = (kvfl_identity){.number = 0};
}

/* A free place, or else the place of the least recently used set. NULL: a cancelled load that has not ended yet may
 * use the space of that set. */
static kvfl_identity *place(kvf_llama *kv) {
    kvfl_identity *oldest = &kv->calls->identities[0];
    for (size_t i = 1; i < KVFL_IDENTITIES; i++) {
        oldest = kv->calls->identities[i].used < oldest->used ? &kv->calls->identities[i] : oldest;
    }
    if (oldest->number != 0) {
        kvfl_flights_look(kv);
        if (kvfl_flights_busy(kv) || (kv->fetch->lookup.ticket != 0 && !kv->fetch->lookup.over)) {
            return NULL;
        }
        clear(oldest);
    }
    return oldest;
}

kvf_status kvfl_open_identity(kvf_llama *kv, kvf_error *err, const char *adapters) {
    kvfl_identity *identity = place(kv);
    if (identity == NULL) {
        return kvfl_fail(err, KVF_LIMIT, "too many sets of adapters while loads of earlier ones are under way");
    }
    identity->adapters = strdup(adapters);
    kvf_status status = identity->adapters == NULL ? kvfl_fail(err, KVF_NOMEM, "no memory for another set of adapters")
                        : kv->store != NULL        ? kvfl_open_space(kv, &identity->space, err, adapters)
                                                   : KVF_OK;
    if (status != KVF_OK) {
        clear(identity);
        return status;
    }
    identity->number = kv->calls->identity_clock + 1; /* take() relies on it */
    take(kv, identity);
    return KVF_OK;
}

void kvfl_close_identities(kvf_llama *kv) {
    for (size_t i = 0; i < KVFL_IDENTITIES; i++) {
        clear(&kv->calls->identities[i]);
    }
}

/* Without a free cell llama.cpp would log an error for each batch. */
bool kvfl_has_probe_cells(const kvf_llama *kv) {
    return kv->kind.num_caches == 0 || kvfl_unshared_cells(kv) + KVFL_PROBE_CELLS <= kv->n_ctx;
}

static kvf_status probe_now(kvf_llama *kv, kvf_error *err) {
    if (!kvfl_needs_probe(kv)) {
        return KVF_OK;
    }
    if (kv->calls->paused == KVF_ASIDE_ATTENTION || !kvfl_computes_as_named(kv)) {
        return kvfl_fail(err, KVF_LIMIT,
                         "attention is in another mode than for prompts: the adapters can't be probed now");
    }
    if (!kvfl_has_probe_cells(kv)) {
        return kvfl_fail(err, KVF_LIMIT, "the context is full: no cell is free to probe the adapters in");
    }
    kv->calls->num_mapped = 0; /* the outputs of the last batch are gone */
    return kvfl_probe(kv, err);
}

/* The program itself computed what a sequence holds after its known tokens. If it has grown since the adapters were
 * set, it was computed under the previous ones. */
static void note_behind(kvf_llama *kv) {
    uint64_t now = kv->identity != 0 ? kv->identity : UINT64_MAX;
    for (llama_seq_id seq = 0; seq < (llama_seq_id)kv->num_seqs; seq++) {
        kvfl_history *h = &kv->follow->histories[seq];
        size_t holds = (size_t)(llama_memory_seq_pos_max(kv->mem, seq) + 1);
        if (holds <= h->num) {
            h->behind = 0;
        } else if (h->behind == 0) {
            h->behind = now;
        } else if (h->behind != now && h->held != holds) {
            h->behind = UINT64_MAX;
        }
        h->held = holds;
    }
}

kvf_status kvf_llama_set_adapters(kvf_llama *kv, kvf_error *err, const char *adapters) {
    if (kvfl_check_ours(kv, err) != KVF_OK) {
        return KVF_CLOSED;
    }
    const char *wanted = adapters != NULL ? adapters : "";
    kvfl_identity *known = find(kv, wanted);
    note_behind(kv);
    if (known != NULL) {
        take(kv, known);
        return KVF_OK;
    }
    kvfl_leave_identity(kv);
    kvf_status status = probe_now(kv, err);
    return status == KVF_OK ? kvfl_open_identity(kv, err, wanted) : status;
}
