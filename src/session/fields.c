/* SPDX-License-Identifier: Apache-2.0
 *
 * Sessions as the fields of a HASH that any Redis client can read and write.
 */
#include <stdio.h>

#include "session/session.h"

#define DEFAULT_MAX_PART ((uint64_t)512 << 20) /* Redis' own default for proto-max-bulk-len */
#define PART_STEP        64u                   /* parts end between elements, whatever the dtype */
#define TEXT_ROOM        256u                  /* for the meta of a session that replaces one, with longer numbers */
#define TRIES            32u

static size_t num_parts(uint64_t bytes, uint64_t part_bytes) {
    if (part_bytes == 0 || bytes <= part_bytes) {
        return 1;
    }
    return (size_t)((bytes + part_bytes - 1) / part_bytes);
}

/* Names the parts of one array ("keys", "keys.1", ...) and maps them to its memory, if it has one. */
static void fill_parts(kvfi_part *parts, size_t num, const char *name, kvfi_pieces memory, uint64_t bytes,
                       uint64_t part_bytes) {
    size_t skip = 0;
    for (size_t i = 0; i < num; i++) {
        if (i == 0) {
            snprintf(parts[i].name, sizeof parts[i].name, "%s", name);
        } else {
            snprintf(parts[i].name, sizeof parts[i].name, "%s.%zu", name, i);
        }
        size_t len = (size_t)(i + 1 == num ? bytes : part_bytes);
        parts[i].data = (struct iovec){NULL, len};
        parts[i].iov = memory.iov;
        parts[i].skip = skip;
        parts[i].found = false;
        bytes -= len;
        skip += len;
        while (memory.iov != NULL && bytes > 0 && skip >= memory.iov->iov_len) {
            skip -= memory.iov->iov_len;
            memory.iov++;
        }
    }
}

/* All parts of both arrays, keys first. */
typedef struct parts {
    kvfi_part *part;
    size_t num_keys, num;
} parts;

static kvf_status parts_init(parts *out, kvf_error *err, uint64_t keys_bytes, uint64_t values_bytes,
                             uint64_t part_bytes, size_t extra) {
    out->num_keys = num_parts(keys_bytes, part_bytes);
    out->num = out->num_keys + num_parts(values_bytes, part_bytes);
    out->part = kvfi_alloc_zero(out->num + extra, sizeof *out->part);
    return out->part != NULL ? KVF_OK : kvfi_fail(err, KVF_NOMEM, "no memory for the fields of a session");
}

static void parts_fill(parts *p, kvfi_pieces keys, uint64_t keys_bytes, kvfi_pieces values, uint64_t values_bytes,
                       uint64_t part_bytes) {
    fill_parts(p->part, p->num_keys, "keys", keys, keys_bytes, part_bytes);
    fill_parts(p->part + p->num_keys, p->num - p->num_keys, "values", values, values_bytes, part_bytes);
}

/* ---- save */
static kvf_status choose_part_bytes(const kvfi_session_call *call, kvfi_session_meta *meta) {
    uint64_t max = call->tier->ops->session_max_part(call->tier, call->deadline_us);
    uint64_t longest = meta->keys.bytes > meta->values.bytes ? meta->keys.bytes : meta->values.bytes;
    max = max == 0 ? DEFAULT_MAX_PART : max;
    meta->part_bytes = 0;
    if (longest <= max) {
        return KVF_OK;
    }
    meta->part_bytes = max >= PART_STEP ? max / PART_STEP * PART_STEP : max;
    if (longest / meta->part_bytes >= KVFI_MAX_PARTS) {
        return kvfi_fail(call->err, KVF_LIMIT,
                         "an array of %llu bytes would need more than %u fields of the server's %llu",
                         (unsigned long long)longest, KVFI_MAX_PARTS, (unsigned long long)max);
    }
    return KVF_OK;
}

/* Hashes the arrays while they are sent, and then encodes the meta. */
typedef struct hashing {
    const kvfi_session_call *call;
    kvfi_session_meta *meta;
    kvfi_pieces keys, values;
    kvfi_xxh3 sum;
    const struct iovec *at; /* the next byte: `skip` bytes from its beginning */
    size_t skip;
    uint64_t left; /* of the array that is hashed */
    bool second;   /* it is the values */
    uint8_t *text;
} hashing;

static void hash_begin(void *ctx) {
    hashing *h = ctx;
    kvfi_xxh3_init(&h->sum);
    h->at = h->keys.iov;
    h->skip = 0;
    h->left = h->meta->keys.bytes;
    h->second = false;
}

/* From the keys to the values, at the end of the keys. */
static void hash_turn(hashing *h) {
    if (h->left > 0 || h->second) {
        return;
    }
    kvfi_xxh3_end(&h->sum, h->meta->keys.xxh3);
    kvfi_xxh3_init(&h->sum);
    h->at = h->values.iov;
    h->skip = 0;
    h->left = h->meta->values.bytes;
    h->second = true;
}

static size_t hash_next(void *ctx, size_t bytes) {
    hashing *h = ctx;
    for (size_t todo = bytes; todo > 0;) {
        hash_turn(h);
        size_t len = h->at->iov_len - h->skip;
        len = len < todo ? len : todo;
        if (len > 0) {
            kvfi_xxh3_add(&h->sum, (const uint8_t *)h->at->iov_base + h->skip, len);
        }
        h->skip += len;
        h->left -= len;
        todo -= len;
        if (h->skip == h->at->iov_len) {
            h->at++;
            h->skip = 0;
        }
    }
    return bytes;
}

static kvf_status hash_end(void *ctx, kvfi_part *last) {
    hashing *h = ctx;
    size_t len = 0;
    hash_turn(h);
    kvfi_xxh3_end(&h->sum, h->meta->values.xxh3);
    kvfi_free(h->text);
    h->text = NULL;
    KVFI_TRY(kvfi_session_meta_encode(&h->text, &len, h->call->err, h->meta, 0, 1));
    last->data = (struct iovec){h->text, len};
    return KVF_OK;
}

kvf_status kvfi_session_save_fields(const kvfi_session_call *call, kvfi_session_meta *meta, kvfi_pieces keys,
                                    kvfi_pieces values, uint32_t ttl_s) {
    parts all;
    KVFI_TRY(choose_part_bytes(call, meta));
    KVFI_TRY(parts_init(&all, call->err, meta->keys.bytes, meta->values.bytes, meta->part_bytes, 1));
    parts_fill(&all, keys, meta->keys.bytes, values, meta->values.bytes, meta->part_bytes);
    snprintf(all.part[all.num].name, sizeof all.part[all.num].name, "meta");
    hashing h = {.call = call, .meta = meta, .keys = keys, .values = values};
    const kvfi_put_watch watch = {&h, hash_begin, hash_next, hash_end};
    kvf_status status = call->tier->ops->session_put(call->tier, call->err, call->id, all.part, all.num + 1, &watch,
                                                     ttl_s, call->deadline_us);
    kvfi_free(h.text);
    kvfi_free(all.part);
    return status;
}

/* ---- load */
static kvf_status sizes(const kvfi_session_call *call, kvfi_part *part, size_t num, int64_t *ttl_ms) {
    for (size_t i = 0; i < num; i++) {
        part[i].found = false;
    }
    return call->tier->ops->session_sizes(call->tier, call->err, call->id, part, num, ttl_ms, call->deadline_us);
}

static kvf_status get(const kvfi_session_call *call, kvfi_part *part, size_t num) {
    for (size_t i = 0; i < num; i++) {
        part[i].found = false;
    }
    return call->tier->ops->session_get(call->tier, call->err, call->id, part, num, call->deadline_us);
}

/* What does not match may be half of a session that is being replaced right now, which another attempt finds whole.
 * REPLACED: something changed between two readings, so somebody does replace it. */
typedef enum match { FITS, REPLACED, DIFFERS } match;

static kvf_status differs(const kvfi_session_call *call, match *how, match now, const char *what) {
    *how = now;
    return kvfi_fail(
        call->err, KVF_MISS,
        "%s: it was replaced while it was read, again and again, or it is damaged, or a client replaced it and left an "
        "old meta (KVF_SESSION_RAW loads that as raw bytes)",
        what);
}

/* Compares the lengths that a call found with the requested ones. */
static bool lengths_fit(const kvfi_part *now, const parts *wanted) {
    for (size_t i = 0; i < wanted->num; i++) {
        if (!now[i].found || now[i].data.iov_len != wanted->part[i].data.iov_len) {
            return false;
        }
    }
    return true;
}

static kvf_status read_meta(const kvfi_session_call *call, kvfi_session_meta *out, size_t len, match *how) {
    if (len > KVFI_MAX_META_BYTES) {
        return kvfi_fail(call->err, KVF_MISS, "the meta of the session is longer than 1 MiB");
    }
    uint8_t *text = kvfi_alloc(len);
    if (text == NULL) {
        return kvfi_fail(call->err, KVF_NOMEM, "no memory for the meta of a session");
    }
    kvfi_part part = {.name = "meta", .data = {text, len}};
    kvf_status status = get(call, &part, 1);
    if (status == KVF_LIMIT || (status == KVF_OK && (!part.found || part.data.iov_len != len))) {
        status = differs(call, how, REPLACED, "the meta of the session changed its length");
    } else if (status == KVF_OK) {
        status = kvfi_session_meta_decode(out, call->err, text, len);
    }
    kvfi_free(text);
    return status;
}

/* Are the fields of a spread session as long as `wanted` says? Asked before memory is allocated, so that a false meta
 * costs none. */
static kvf_status check_sizes(const kvfi_session_call *call, const parts *wanted, match *how) {
    kvfi_part *now = kvfi_alloc_zero(wanted->num, sizeof *now);
    if (now == NULL) {
        return kvfi_fail(call->err, KVF_NOMEM, "no memory for the fields of a session");
    }
    for (size_t i = 0; i < wanted->num; i++) {
        memcpy(now[i].name, wanted->part[i].name, sizeof now[i].name);
    }
    kvf_status status = sizes(call, now, wanted->num, NULL);
    if (status == KVF_OK && !lengths_fit(now, wanted)) {
        status = differs(call, how, DIFFERS, "the fields of the session are not as long as its meta says");
    }
    kvfi_free(now);
    return status;
}

static bool sum_fits(const kvfi_array *array, kvfi_pieces memory) {
    uint8_t sum[16];
    kvfi_xxh3_iov(sum, memory.iov, memory.num);
    return memcmp(sum, array->xxh3, 16) == 0;
}

/* What is known before the arrays are read. */
typedef struct plan {
    bool has_meta;
    kvfi_session_meta meta;
    uint64_t keys_bytes, values_bytes;
    size_t text_bytes; /* of the meta */
    int64_t ttl_ms;
} load_plan;

/* The meta that was read with the arrays: of another save than the first one, if the session was replaced since. */
static kvf_status judge(const kvfi_session_call *call, load_plan *plan, const kvfi_part *text, kvfi_pieces keys,
                        kvfi_pieces values, match *how) {
    if (!text->found) {
        return differs(call, how, REPLACED, "the meta of the session is gone");
    }
    KVFI_TRY(kvfi_session_meta_decode(&plan->meta, call->err, text->data.iov_base, text->data.iov_len));
    if (plan->meta.keys.bytes != plan->keys_bytes || plan->meta.values.bytes != plan->values_bytes) {
        return differs(call, how, REPLACED, "the session was replaced");
    }
    if (!sum_fits(&plan->meta.keys, keys) || !sum_fits(&plan->meta.values, values)) {
        return differs(call, how, DIFFERS, "the checksum of the session differs");
    }
    return KVF_OK;
}

/* The meta comes once more with the arrays, in one go: so they belong together, however often the session is replaced. */
static kvf_status read_arrays(const kvfi_session_call *call, load_plan *plan, parts *all, kvfi_pieces keys,
                              kvfi_pieces values, match *how) {
    parts_fill(all, keys, plan->keys_bytes, values, plan->values_bytes, plan->meta.part_bytes);
    size_t num = all->num + plan->has_meta;
    kvfi_part *now = kvfi_alloc_zero(num, sizeof *now);
    uint8_t *text = kvfi_alloc(plan->text_bytes + TEXT_ROOM);
    kvf_status status = KVF_NOMEM;
    if (now == NULL || text == NULL) {
        (void)kvfi_fail(call->err, status, "no memory for the fields of a session");
        goto out;
    }
    memcpy(now, all->part, all->num * sizeof *now);
    if (plan->has_meta) {
        now[all->num] = (kvfi_part){.name = "meta", .data = {text, plan->text_bytes + TEXT_ROOM}};
    }
    status = get(call, now, num);
    if (status == KVF_LIMIT || (status == KVF_OK && !lengths_fit(now, all))) {
        status = differs(call, how, REPLACED, "the fields of the session changed their lengths");
    } else if (status == KVF_OK && plan->has_meta) {
        status = judge(call, plan, &now[all->num], keys, values, how);
    }
out:
    kvfi_free(text);
    kvfi_free(now);
    return status;
}

/* Reads the arrays into the caller's memory, or into memory of the library. */
static kvf_status load_arrays(const kvfi_session_call *call, kvfi_loaded **out, load_plan *plan, parts *all,
                              match *how) {
    enum { PAGE = 4096 };
    const kvf_session_load_options *want = &call->want;
    bool look = (want->flags & KVF_SESSION_LOOK) != 0, own = !look && want->k_iov == NULL;
    size_t values_at = (size_t)((plan->keys_bytes + PAGE - 1) / PAGE * PAGE);
    kvfi_loaded *loaded = kvfi_loaded_new(own ? values_at + (size_t)plan->values_bytes : 1);
    if (loaded == NULL) {
        return kvfi_fail(call->err, KVF_NOMEM, "no memory for a session of %llu bytes",
                         (unsigned long long)(plan->keys_bytes + plan->values_bytes));
    }
    uint8_t *keys = own ? loaded->mem : NULL, *values = own ? loaded->mem + values_at : NULL;
    kvf_status status = KVF_OK;
    if (own) {
        struct iovec k = {keys, (size_t)plan->keys_bytes}, v = {values, (size_t)plan->values_bytes};
        status = read_arrays(call, plan, all, (kvfi_pieces){&k, 1}, (kvfi_pieces){&v, 1}, how);
    } else if (!look) {
        status = read_arrays(call, plan, all, (kvfi_pieces){want->k_iov, want->num_k_iov},
                             (kvfi_pieces){want->v_iov, want->num_v_iov}, how);
    }
    if (status != KVF_OK) {
        kvfi_loaded_free(loaded);
        return status;
    }
    kvfi_loaded_describe(loaded, plan->has_meta ? &plan->meta : NULL, keys, plan->keys_bytes, values,
                         plan->values_bytes);
    loaded->pub.ttl_ms = plan->ttl_ms;
    *out = loaded;
    return KVF_OK;
}

static kvf_status load_planned(const kvfi_session_call *call, kvfi_loaded **out, load_plan *plan, match *how) {
    parts all;
    KVFI_TRY(kvfi_session_check_memory(call, plan->keys_bytes, plan->values_bytes));
    KVFI_TRY(parts_init(&all, call->err, plan->keys_bytes, plan->values_bytes, plan->meta.part_bytes, 0));
    kvf_status status = KVF_OK;
    if (all.num > 2) {
        kvfi_pieces none = {NULL, 0};
        parts_fill(&all, none, plan->keys_bytes, none, plan->values_bytes, plan->meta.part_bytes);
        status = check_sizes(call, &all, how);
    }
    if (status == KVF_OK) {
        status = load_arrays(call, out, plan, &all, how);
    }
    kvfi_free(all.part);
    return status;
}

/* The meta, and whether an array of one field has the length that the meta says. A spread array is checked later. */
static kvf_status plan_by_meta(const kvfi_session_call *call, load_plan *plan, const kvfi_part found[3], match *how) {
    KVFI_TRY(read_meta(call, &plan->meta, found[0].data.iov_len, how));
    uint64_t part_bytes = plan->meta.part_bytes;
    plan->keys_bytes = plan->meta.keys.bytes;
    plan->values_bytes = plan->meta.values.bytes;
    if ((num_parts(plan->keys_bytes, part_bytes) == 1 && plan->keys_bytes != found[1].data.iov_len) ||
        (num_parts(plan->values_bytes, part_bytes) == 1 && plan->values_bytes != found[2].data.iov_len)) {
        return differs(call, how, DIFFERS, "the fields of the session are not as long as its meta says");
    }
    return KVF_OK;
}

/* `raw`: whatever its meta says. *of: the meta it was read by. */
static kvf_status load_once(const kvfi_session_call *call, kvfi_loaded **out, match *how, bool raw,
                            kvfi_session_meta *of) {
    kvfi_part found[3] = {{.name = "meta"}, {.name = "keys"}, {.name = "values"}};
    load_plan plan = {.ttl_ms = KVFI_TTL_UNKNOWN};
    *how = FITS;
    KVFI_TRY(sizes(call, found, 3, (call->want.flags & KVF_SESSION_LOOK) != 0 ? &plan.ttl_ms : NULL));
    if (!found[0].found && !found[1].found && !found[2].found) {
        return kvfi_fail(call->err, KVF_MISS, "no such session");
    }
    if (!found[1].found || !found[2].found) {
        return kvfi_fail(call->err, KVF_MISS, "the session has no field \"%s\"", found[1].found ? "values" : "keys");
    }
    plan.has_meta = found[0].found && !raw;
    plan.text_bytes = plan.has_meta ? found[0].data.iov_len : 0;
    plan.keys_bytes = found[1].data.iov_len;
    plan.values_bytes = found[2].data.iov_len;
    if (plan.has_meta) {
        kvf_status status = plan_by_meta(call, &plan, found, how);
        *of = plan.meta;
        KVFI_TRY(status);
    } else if (plan.keys_bytes > KVFI_MAX_ARRAY_BYTES || plan.values_bytes > KVFI_MAX_ARRAY_BYTES) {
        return kvfi_fail(call->err, KVF_MISS, "a field of the session is longer than 1T");
    }
    kvf_status status = load_planned(call, out, &plan, how);
    *of = plan.meta;
    return status;
}

static bool same_save(const kvfi_session_meta *a, const kvfi_session_meta *b) {
    return memcmp(a->keys.xxh3, b->keys.xxh3, 16) == 0 && memcmp(a->values.xxh3, b->values.xxh3, 16) == 0;
}

/* Tries again as long as somebody replaces the session. What differs twice under the same meta is damage, or of another
 * client. */
kvf_status kvfi_session_load_fields(const kvfi_session_call *call, kvfi_loaded **out) {
    match how = FITS;
    kvfi_session_meta of = {0}, before;
    kvf_status status = load_once(call, out, &how, false, &of);
    for (unsigned again = 1; again < TRIES && status == KVF_MISS && how != FITS; again++) {
        match first = how;
        before = of;
        status = load_once(call, out, &how, false, &of);
        if (first == DIFFERS && how == DIFFERS && same_save(&of, &before)) {
            break;
        }
    }
    if (status == KVF_MISS && how != FITS && (call->want.flags & KVF_SESSION_RAW) != 0) {
        status = load_once(call, out, &how, true, &of);
    }
    return status;
}
