/* SPDX-License-Identifier: Apache-2.0
 *
 * The session API: checks arguments, chooses the tier, and passes on to the form in which that tier keeps sessions.
 */
#include "session/session.h"
#include "kvferry/sized.h"

#include "store/store.h"

#define DEFAULT_TTL_S 3600u
#define BUDGET_US     30000000 /* if none is given */

/* A sealed session is one value in every tier. */
static bool has_fields(const kvfi_session_call *call) {
    return call->tier->ops->session_put != NULL && call->tenant == NULL;
}

/* The number of forms that a session may have in a tier: sealed under each of the secrets, or plain. */
static size_t num_ways(const kvf_store *store) {
    const kvfi_secrets *secrets = kvfi_store_secrets(store);
    return secrets->seal_sessions ? secrets->num : 1;
}

static const kvfi_tenant *tenant_of(const kvf_store *store, size_t way) {
    const kvfi_secrets *secrets = kvfi_store_secrets(store);
    return secrets->seal_sessions ? &secrets->of[way] : NULL;
}

void kvf_session_free(kvf_session *session) {
    if (session != NULL) {
        kvfi_loaded_free(session->opaque);
    }
}

/* ---- arguments */
static kvf_status check_call(const kvf_store *store, kvf_error *err, const char *id) {
    size_t len = strnlen(id, KVF_MAX_ID_BYTES + 1);
    if (len == 0 || len > KVF_MAX_ID_BYTES) {
        return kvfi_fail(err, KVF_LIMIT, "the id of a session must have 1 to %u bytes", KVF_MAX_ID_BYTES);
    }
    return kvfi_store_check_ours(store, err);
}

static kvf_status take_tensor(kvfi_array *out, kvf_error *err, const kvf_tensor *tensor, const char *name) {
    if (!kvf_reserved_is_zero(tensor->reserved)) {
        return kvfi_fail(err, KVF_LIMIT, "kvf_tensor: `reserved` of %s is not zero", name);
    }
    if (tensor->iov != NULL && kvfi_iov_bytes(tensor->iov, tensor->num_iov) != tensor->len) {
        return kvfi_fail(err, KVF_LIMIT, "the pieces of %s have %zu bytes together, and its len is %zu", name,
                         kvfi_iov_bytes(tensor->iov, tensor->num_iov), tensor->len);
    }
    out->bytes = tensor->len;
    out->num_dims = tensor->num_dims;
    memcpy(out->dtype, tensor->dtype, sizeof out->dtype);
    memcpy(out->dims, tensor->dims, sizeof out->dims);
    return kvfi_array_check(out, err, name);
}

/* `one`: the only piece of an array that is contiguous. */
static kvfi_pieces pieces_of(const kvf_tensor *tensor, struct iovec *one) {
    *one = (struct iovec){(void *)(uintptr_t)tensor->data, tensor->len};
    return tensor->iov != NULL ? (kvfi_pieces){tensor->iov, tensor->num_iov} : (kvfi_pieces){one, 1};
}

static kvf_status take_layout(kvfi_session_meta *meta, kvf_error *err, const char *layout) {
    if (layout == NULL) {
        return KVF_OK;
    }
    size_t len = strnlen(layout, sizeof meta->layout);
    for (size_t i = 0; i < len; i++) {
        if (layout[i] < 0x20 || layout[i] > 0x7e) {
            return kvfi_fail(err, KVF_LIMIT, "the layout of a session must be printable ASCII");
        }
    }
    if (len == sizeof meta->layout) {
        return kvfi_fail(err, KVF_LIMIT, "the layout of a session has more than 64 bytes");
    }
    memcpy(meta->layout, layout, len + 1);
    return KVF_OK;
}

static kvf_status take_arguments(kvfi_session_meta *meta, kvf_error *err, const kvf_tensor *k, const kvf_tensor *v,
                                 const kvf_session_options *options) {
    KVFI_TRY(take_tensor(&meta->keys, err, k, "k"));
    KVFI_TRY(take_tensor(&meta->values, err, v, "v"));
    KVFI_TRY(take_layout(meta, err, options->layout));
    meta->num_tokens = options->num_tokens;
    meta->stored_s = kvfi_sys->wall_us() / 1000000;
    if (options->space != NULL) {
        meta->has_space = true;
        meta->space = *options->space;
    }
    return KVF_OK;
}

/* ---- the calls */
/* The first tier that outlives the process, or the first of all. */
static kvfi_tier *tier_for_save(const kvf_store *store) {
    for (size_t i = 0; i < kvfi_store_num_tiers(store); i++) {
        if (!kvfi_store_tier(store, i)->volatile_) {
            return kvfi_store_tier(store, i);
        }
    }
    return kvfi_store_tier(store, 0);
}

KVF_SIZED(kvf_session_options, space, 40, space);

kvf_status kvf_session_save(kvf_store *store, kvf_error *err, const char *id, const kvf_tensor *k, const kvf_tensor *v,
                            const kvf_session_options *options) {
    kvf_session_options own;
    kvfi_session_meta meta = {0};
    KVFI_TRY(kvf_sized_take(&own, err, options, &kvf_session_options_sized));
    KVFI_TRY(kvfi_take_budget(&own.budget_us, err, BUDGET_US, false));
    KVFI_TRY(check_call(store, err, id));
    KVFI_TRY(take_arguments(&meta, err, k, v, &own));
    kvfi_session_call call = {
        .tier = tier_for_save(store),
        .err = err,
        .id = id,
        .deadline_us = kvfi_deadline(own.budget_us),
        .tenant = tenant_of(store, 0),
    };
    uint32_t ttl_s = own.ttl_s == 0 ? DEFAULT_TTL_S : own.ttl_s;
    struct iovec one[2];
    kvfi_pieces keys = pieces_of(k, &one[0]), values = pieces_of(v, &one[1]);
    if (has_fields(&call)) {
        return kvfi_session_save_fields(&call, &meta, keys, values, ttl_s);
    }
    kvfi_xxh3_iov(meta.keys.xxh3, keys.iov, keys.num);
    kvfi_xxh3_iov(meta.values.xxh3, values.iov, values.num);
    kvf_status status = kvfi_session_save_value(&call, &meta, keys, values, ttl_s);
    if (status == KVF_OK && num_ways(store) > 1) { /* the session that it replaces may be under the previous secret */
        call.tenant = tenant_of(store, 1);
        call.err = NULL;
        (void)kvfi_session_remove_value(&call);
    }
    return status;
}

/* The arrays are in memory of the caller. */
static void show_memory(kvf_session *pub, const kvf_session_load_options *want) {
    if (want->k_iov != NULL && (want->flags & KVF_SESSION_LOOK) == 0) {
        pub->k.iov = want->k_iov;
        pub->k.num_iov = want->num_k_iov;
        pub->v.iov = want->v_iov;
        pub->v.num_iov = want->num_v_iov;
    }
}

static kvf_status load_from(const kvfi_session_call *call, kvfi_loaded **out) {
    return has_fields(call) ? kvfi_session_load_fields(call, out) : kvfi_session_load_value(call, out);
}

KVF_SIZED(kvf_session_load_options, num_v_iov, 40, num_v_iov);

static kvf_status take_load_options(kvf_session_load_options *own, kvf_error *err,
                                    const kvf_session_load_options *options) {
    KVFI_TRY(kvf_sized_take(own, err, options, &kvf_session_load_options_sized));
    KVFI_TRY(kvfi_take_budget(&own->budget_us, err, BUDGET_US, false));
    if ((own->flags & ~(uint32_t)(KVF_SESSION_LOOK | KVF_SESSION_RAW)) != 0) {
        return kvfi_fail(err, KVF_LIMIT, "kvf_session_load_options: unknown flag in %#x", own->flags);
    }
    if ((own->k_iov == NULL) != (own->v_iov == NULL)) {
        return kvfi_fail(err, KVF_LIMIT, "kvf_session_load_options: give memory for both arrays or for neither");
    }
    return KVF_OK;
}

kvf_status kvf_session_load(kvf_store *store, kvf_session **out, kvf_error *err, const char *id, int64_t budget_us) {
    kvf_session_load_options options = {.struct_size = sizeof options, .budget_us = budget_us};
    return kvf_session_load_with(store, out, err, id, &options);
}

/* The first tier that has the session wins. If none has, a failure says more than a miss: the session may be in the
 * tier that failed. */
kvf_status kvf_session_load_with(kvf_store *store, kvf_session **out, kvf_error *err, const char *id,
                                 const kvf_session_load_options *options) {
    kvf_session_load_options own;
    KVFI_TRY(take_load_options(&own, err, options));
    KVFI_TRY(check_call(store, err, id));
    int64_t deadline_us = kvfi_deadline(own.budget_us);
    kvf_error worst = {.status = KVF_OK};
    size_t tiers = kvfi_store_num_tiers(store);
    for (size_t i = 0; i < tiers * num_ways(store); i++) {
        kvf_error mine = {.status = KVF_MISS, .what = "no such session"};
        kvfi_session_call call = {.tier = kvfi_store_tier(store, i % tiers),
                                  .err = &mine,
                                  .id = id,
                                  .deadline_us = deadline_us,
                                  .tenant = tenant_of(store, i / tiers),
                                  .want = own};
        kvfi_loaded *loaded = NULL;
        kvf_status status = load_from(&call, &loaded);
        if (status == KVF_OK) {
            show_memory(&loaded->pub, &own);
            *out = &loaded->pub;
            return KVF_OK;
        }
        mine.status = status;
        if (worst.status == KVF_OK || (worst.status == KVF_MISS && status != KVF_MISS)) {
            worst = mine;
        }
    }
    return kvfi_fail(err, worst.status, "%s", worst.what);
}

kvf_status kvf_session_remove(kvf_store *store, kvf_error *err, const char *id) {
    KVFI_TRY(check_call(store, err, id));
    kvf_status result = KVF_MISS;
    size_t tiers = kvfi_store_num_tiers(store);
    for (size_t i = 0; i < tiers * num_ways(store); i++) {
        kvf_error mine = {.status = KVF_OK};
        kvfi_session_call call = {.tier = kvfi_store_tier(store, i % tiers),
                                  .err = &mine,
                                  .id = id,
                                  .deadline_us = kvfi_deadline(BUDGET_US),
                                  .tenant = tenant_of(store, i / tiers)};
        kvf_status status = has_fields(&call) ? call.tier->ops->session_remove(call.tier, &mine, id, call.deadline_us)
                                              : kvfi_session_remove_value(&call);
        if (status != KVF_OK && status != KVF_MISS) {
            /* Continues after a failure: removes what can be removed, and reports the failure. */
            result = kvfi_fail(err, status, "%s", mine.what);
        } else if (status == KVF_OK && result == KVF_MISS) {
            result = KVF_OK;
        }
    }
    return result == KVF_MISS ? kvfi_fail(err, KVF_MISS, "no such session") : result;
}
