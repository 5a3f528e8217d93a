/* SPDX-License-Identifier: Apache-2.0
 *
 * Sessions over a test tier (a HASH in memory, as Redis keeps them) and over the memory store (as one value):
 * everything comes back, nothing wrong is ever returned, and the n-th allocation and the n-th call may fail.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include <jansson.h>

#include "session/session.h"
#include "store/private.h"
#include "support/faults.h"
#include "support/kit.h"

/* ---- the fake tier: one session, its fields, and a hook before each read */
#define MAX_FIELDS 128u

typedef struct field {
    char name[24];
    uint8_t *data; /* by malloc: not the library's memory */
    size_t len;
} field;

typedef struct fake {
    kvfi_tier tier;
    field fields[MAX_FIELDS];
    size_t num;
    char id[64];
    uint32_t ttl_s;
    uint64_t max_part;
    kvf_status answer; /* what every call answers, when not KVF_OK */
    void (*before_get)(struct fake *);
    unsigned gets, asked_sizes;
} fake;

static void fake_clear(fake *f) {
    for (size_t i = 0; i < f->num; i++) {
        free(f->fields[i].data);
    }
    f->num = 0;
}

static void fake_set(fake *f, const char *name, const void *data, size_t len) {
    field *at = NULL;
    for (size_t i = 0; i < f->num; i++) {
        at = strcmp(f->fields[i].name, name) == 0 ? &f->fields[i] : at;
    }
    if (at == NULL) {
        assert_true(f->num < MAX_FIELDS);
        at = &f->fields[f->num++];
    } else {
        free(at->data);
    }
    snprintf(at->name, sizeof at->name, "%s", name);
    at->data = malloc(len + 1);
    at->len = len;
    if (len > 0) {
        memcpy(at->data, data, len);
    }
    at->data[len] = '\0';
}

static field *fake_find(fake *f, const char *id, const char *name) {
    for (size_t i = 0; i < f->num; i++) {
        if (strcmp(f->id, id) == 0 && strcmp(f->fields[i].name, name) == 0) {
            return &f->fields[i];
        }
    }
    return NULL;
}

/* Every call of the tier does one call of the system, so that the loop of failing calls has something to fail. */
static kvf_status answer(fake *f, kvf_error *err) {
    uint8_t byte;
    if (kvfi_sys->random(&byte, 1) != 0) {
        return kvfi_fail(err, KVF_IO, "the connection broke");
    }
    return f->answer == KVF_OK ? KVF_OK : kvfi_fail(err, f->answer, "the fake says so");
}

/* Copies between the memory of a part, in pieces or not, and bytes. */
static void copy_part(const kvfi_part *part, uint8_t *bytes, size_t len, bool out) {
    const struct iovec *iov = part->iov != NULL ? part->iov : &part->data;
    size_t skip = part->skip;
    while (len > 0) {
        size_t now = iov->iov_len - skip < len ? iov->iov_len - skip : len;
        uint8_t *at = (uint8_t *)iov->iov_base + skip;
        if (now > 0) {
            memcpy(out ? bytes : at, out ? at : bytes, now);
        }
        bytes += now;
        len -= now;
        skip = 0;
        iov++;
    }
}

static kvf_status fake_put(kvfi_tier *tier, kvf_error *err, const char *id, const kvfi_part *parts, size_t num,
                           const kvfi_put_watch *watch, uint32_t ttl_s, int64_t deadline_us) {
    fake *f = (fake *)tier;
    (void)deadline_us;
    KVFI_TRY(answer(f, err));
    kvfi_part last = parts[num - 1];
    watch->begin(watch->ctx);
    for (size_t i = 0; i + 1 < num; i++) {
        size_t len = parts[i].data.iov_len, some = len / 3; /* as a connection does: in pieces of any length */
        assert_true(f->max_part == 0 || len <= f->max_part);
        assert_int_equal(watch->next(watch->ctx, some), some);
        assert_int_equal(watch->next(watch->ctx, len - some), len - some);
    }
    KVFI_TRY(watch->end(watch->ctx, &last));
    fake_clear(f);
    snprintf(f->id, sizeof f->id, "%s", id);
    f->ttl_s = ttl_s;
    for (size_t i = 0; i + 1 < num; i++) {
        uint8_t *bytes = malloc(parts[i].data.iov_len + 1);
        copy_part(&parts[i], bytes, parts[i].data.iov_len, true);
        fake_set(f, parts[i].name, bytes, parts[i].data.iov_len);
        free(bytes);
    }
    fake_set(f, last.name, last.data.iov_base, last.data.iov_len);
    return KVF_OK;
}

static kvf_status fake_sizes(kvfi_tier *tier, kvf_error *err, const char *id, kvfi_part *parts, size_t num,
                             int64_t *ttl_ms, int64_t deadline_us) {
    fake *f = (fake *)tier;
    (void)deadline_us;
    f->asked_sizes++;
    KVFI_TRY(answer(f, err));
    if (ttl_ms != NULL) {
        *ttl_ms = (int64_t)f->ttl_s * 1000;
    }
    for (size_t i = 0; i < num; i++) {
        field *at = fake_find(f, id, parts[i].name);
        parts[i].found = at != NULL;
        parts[i].data.iov_len = at == NULL ? 0 : at->len;
    }
    return KVF_OK;
}

static kvf_status fake_get(kvfi_tier *tier, kvf_error *err, const char *id, kvfi_part *parts, size_t num,
                           int64_t deadline_us) {
    fake *f = (fake *)tier;
    (void)deadline_us;
    KVFI_TRY(answer(f, err));
    if (f->before_get != NULL) {
        f->before_get(f);
    }
    f->gets++;
    for (size_t i = 0; i < num; i++) {
        field *at = fake_find(f, id, parts[i].name);
        parts[i].found = at != NULL;
        if (at == NULL) {
            continue;
        }
        if (at->len > parts[i].data.iov_len) {
            return kvfi_fail(err, KVF_LIMIT, "longer than its memory");
        }
        if (at->len > 0) {
            copy_part(&parts[i], at->data, at->len, false);
        }
        parts[i].data.iov_len = at->len;
    }
    return KVF_OK;
}

static kvf_status fake_remove(kvfi_tier *tier, kvf_error *err, const char *id, int64_t deadline_us) {
    fake *f = (fake *)tier;
    (void)deadline_us;
    KVFI_TRY(answer(f, err));
    if (f->num == 0 || strcmp(f->id, id) != 0) {
        return kvfi_fail(err, KVF_MISS, "no such session");
    }
    fake_clear(f);
    return KVF_OK;
}

static uint64_t fake_max_part(kvfi_tier *tier, int64_t deadline_us) {
    (void)deadline_us;
    return ((fake *)tier)->max_part;
}

static const kvfi_tier_ops fake_ops = {
    .session_put = fake_put,
    .session_sizes = fake_sizes,
    .session_get = fake_get,
    .session_remove = fake_remove,
    .session_max_part = fake_max_part,
};

/* A store with the fake as its only tier; nothing else of a store is used by sessions. */
typedef struct bench {
    fake fake;
    kvf_store store;
    kvf_error err;
} bench;

static bench *open_bench(void) {
    bench *b = calloc(1, sizeof *b);
    b->fake.tier.ops = &fake_ops;
    b->store.pid = getpid();
    b->store.num_tiers = 1;
    b->store.tiers[0] = &b->fake.tier;
    return b;
}

static void close_bench(bench *b) {
    fake_clear(&b->fake);
    free(b);
}

/* ---- arrays */
enum { KEYS_BYTES = 2 * 3 * 5 * 7, VALUES_BYTES = 4 * 100 };
static uint8_t keys_bytes[KEYS_BYTES], values_bytes[VALUES_BYTES];

static kvf_tensor keys_tensor(void) {
    kvft_bytes(keys_bytes, KEYS_BYTES, 1);
    kvf_tensor t = {.data = keys_bytes, .len = KEYS_BYTES, .dtype = "float16", .num_dims = 3, .dims = {3, 5, 7}};
    return t;
}

static kvf_tensor values_tensor(void) {
    kvft_bytes(values_bytes, VALUES_BYTES, 2);
    kvf_tensor t = {.data = values_bytes, .len = VALUES_BYTES, .dtype = "float32", .num_dims = 1, .dims = {100}};
    return t;
}

static kvf_status save(kvf_store *store, kvf_error *err, const char *id) {
    static const kvf_digest space = {{1, 2, 3}};
    kvf_tensor k = keys_tensor(), v = values_tensor();
    kvf_session_options options = {
        .struct_size = sizeof options, .num_tokens = 42, .layout = "LHTD", .space = &space, .ttl_s = 100};
    return kvf_session_save(store, err, id, &k, &v, &options);
}

/* Loads and checks that all is as `save` saved it. */
static void check_loads(kvf_store *store, const char *id) {
    kvf_session *session = NULL;
    kvf_error err = {0};
    if (kvf_session_load(store, &session, &err, id, KVF_DEFAULT) != KVF_OK) {
        fail_msg("%s", err.what);
    }
    assert_true(session->has_meta);
    assert_int_equal(session->k.len, KEYS_BYTES);
    assert_int_equal(session->v.len, VALUES_BYTES);
    assert_memory_equal(session->k.data, keys_bytes, KEYS_BYTES);
    assert_memory_equal(session->v.data, values_bytes, VALUES_BYTES);
    assert_string_equal(session->k.dtype, "float16");
    assert_string_equal(session->v.dtype, "float32");
    assert_int_equal(session->k.num_dims, 3);
    assert_int_equal(session->k.dims[2], 7);
    assert_int_equal(session->v.num_dims, 1);
    assert_int_equal(session->num_tokens, 42);
    assert_string_equal(session->layout, "LHTD");
    assert_int_equal(session->space.bytes[2], 3);
    assert_int_equal((uintptr_t)session->k.data % 16, 0);
    assert_int_equal((uintptr_t)session->v.data % 16, 0);
    kvf_session_free(session);
}

static void check_misses(kvf_store *store, const char *id, const char *word) {
    kvf_session *session = NULL;
    kvf_error err = {0};
    kvf_status status = kvf_session_load(store, &session, &err, id, KVF_DEFAULT);
    if (status != KVF_MISS || err.status != KVF_MISS || strstr(err.what, word) == NULL) {
        fail_msg("%s, \"%s\" does not say \"%s\"", kvf_status_name(status), err.what, word);
    }
}

/* ---- fields */
static void fields_there_and_back(void **state) {
    (void)state;
    bench *b = open_bench();
    check_misses(&b->store, "id", "no such session");
    assert_int_equal(save(&b->store, &b->err, "id"), KVF_OK);
    assert_int_equal(b->fake.num, 3); /* what a plain reader looks for: keys and values as they are */
    assert_int_equal(b->fake.ttl_s, 100);
    field *keys = fake_find(&b->fake, "id", "keys"), *values = fake_find(&b->fake, "id", "values");
    assert_memory_equal(keys->data, keys_bytes, KEYS_BYTES);
    assert_int_equal(keys->len, KEYS_BYTES);
    assert_memory_equal(values->data, values_bytes, VALUES_BYTES);
    b->fake.asked_sizes = 0;
    check_loads(&b->store, "id");
    assert_int_equal(b->fake.asked_sizes, 1); /* what is whole costs no second round trip */
    check_misses(&b->store, "another", "no such session");
    assert_int_equal(kvf_session_remove(&b->store, &b->err, "id"), KVF_OK);
    assert_int_equal(kvf_session_remove(&b->store, &b->err, "id"), KVF_MISS);
    check_misses(&b->store, "id", "no such session");
    close_bench(b);
}

static void a_plain_writer(void **state) {
    (void)state;
    bench *b = open_bench();
    kvf_session *session = NULL;
    snprintf(b->fake.id, sizeof b->fake.id, "plain");
    fake_set(&b->fake, "keys", "KKKK", 4);
    check_misses(&b->store, "plain", "values");
    fake_set(&b->fake, "values", "VV", 2);
    assert_int_equal(kvf_session_load(&b->store, &session, &b->err, "plain", KVF_DEFAULT), KVF_OK);
    assert_false(session->has_meta);
    assert_int_equal(session->k.len, 4);
    assert_int_equal(session->v.len, 2);
    assert_memory_equal(session->k.data, "KKKK", 4);
    assert_memory_equal(session->v.data, "VV", 2);
    assert_string_equal(session->k.dtype, "");
    assert_int_equal(session->k.num_dims, 0);
    kvf_session_free(session);
    fake_set(&b->fake, "keys", "", 0);
    fake_set(&b->fake, "values", "", 0);
    assert_int_equal(kvf_session_load(&b->store, &session, &b->err, "plain", KVF_DEFAULT), KVF_OK);
    assert_int_equal(session->k.len, 0);
    kvf_session_free(session);
    kvf_session_free(NULL);
    close_bench(b);
}

/* A plain client writes both fields over a session of ours, whose meta stays: a miss that names the flag, and raw bytes
 * with it, whatever their lengths. With the flag, a session whose meta is right is loaded as ever. */
static void a_plain_writer_over_ours(void **state) {
    (void)state;
    static const size_t lengths[] = {KEYS_BYTES, KEYS_BYTES - 1, KEYS_BYTES + 1, 0};
    kvf_session_load_options raw = {.struct_size = sizeof raw, .flags = KVF_SESSION_RAW};
    uint8_t other[KEYS_BYTES + 1];
    memset(other, 'o', sizeof other);
    for (size_t i = 0; i < 2 * sizeof lengths / sizeof *lengths; i++) {
        bench *b = open_bench();
        kvf_session *session = NULL;
        b->fake.max_part = i % 2 == 0 ? 0 : 128; /* also spread: the further fields stay, too */
        assert_int_equal(save(&b->store, &b->err, "id"), KVF_OK);
        assert_int_equal(kvf_session_load_with(&b->store, &session, &b->err, "id", &raw), KVF_OK);
        assert_true(session->has_meta);
        kvf_session_free(session);
        fake_set(&b->fake, "keys", other, lengths[i / 2]);
        fake_set(&b->fake, "values", "VV", 2);
        check_misses(&b->store, "id", "KVF_SESSION_RAW");
        assert_int_equal(kvf_session_load_with(&b->store, &session, &b->err, "id", &raw), KVF_OK);
        assert_false(session->has_meta);
        assert_int_equal(session->k.len, lengths[i / 2]);
        assert_memory_equal(session->k.data, other, lengths[i / 2]);
        assert_int_equal(session->v.len, 2);
        assert_memory_equal(session->v.data, "VV", 2);
        assert_string_equal(session->k.dtype, "");
        kvf_session_free(session);
        close_bench(b);
    }
}

/* ---- in pieces, into the caller's memory, and only looked at; in every form of a session */
static kvf_store *store_in_form(bench *b, size_t form, char **dir) {
    char url[300];
    *dir = NULL;
    if (form < 3) {
        b->fake.max_part = form == 0 ? 0 : form == 1 ? 128 : 64;
        return &b->store;
    }
    *dir = kvft_temp_dir();
    snprintf(url, sizeof url, "file:%s", *dir);
    return kvft_store(form == 3 ? "mem:" : url);
}

/* Cuts memory into pieces of growing lengths, the first empty. Returns their number. */
static size_t cut_up(struct iovec *iov, uint8_t *at, size_t len) {
    size_t num = 0;
    for (size_t next = 0; len > 0; next += 7) {
        next = next < len ? next : len;
        iov[num++] = (struct iovec){at, next};
        at += next;
        len -= next;
    }
    return num;
}

static void check_looks(kvf_store *store) {
    kvf_session *session = NULL;
    kvf_error err = {0};
    kvf_session_load_options look = {.struct_size = sizeof look, .flags = KVF_SESSION_LOOK};
    assert_int_equal(kvf_session_load_with(store, &session, &err, "id", &look), KVF_OK);
    assert_true(session->has_meta);
    assert_null(session->k.data);
    assert_null(session->v.data);
    assert_int_equal(session->k.len, KEYS_BYTES);
    assert_int_equal(session->v.len, VALUES_BYTES);
    assert_string_equal(session->v.dtype, "float32");
    assert_int_equal(session->k.dims[1], 5);
    assert_int_equal(session->num_tokens, 42);
    assert_string_equal(session->layout, "LHTD");
    assert_in_range(session->ttl_ms, 1, 100000);
    kvf_session_free(session);
    assert_int_equal(kvf_session_load(store, &session, &err, "id", KVF_DEFAULT), KVF_OK);
    assert_int_equal(session->ttl_ms, -2);
    kvf_session_free(session);
    assert_int_equal(kvf_session_load_with(store, &session, &err, "nobody", &look), KVF_MISS);
}

static void check_loads_into(kvf_store *store, struct iovec *k, size_t num_k, struct iovec *v, size_t num_v) {
    kvf_session *session = NULL;
    kvf_error err = {0};
    kvf_session_load_options into = {
        .struct_size = sizeof into, .k_iov = k, .num_k_iov = (uint32_t)num_k, .v_iov = v, .num_v_iov = (uint32_t)num_v};
    assert_int_equal(kvf_session_load_with(store, &session, &err, "id", &into), KVF_OK);
    assert_null(session->k.data);
    assert_ptr_equal(session->k.iov, k);
    assert_int_equal(session->v.num_iov, num_v);
    assert_int_equal(session->v.len, VALUES_BYTES);
    assert_int_equal(session->k.num_dims, 3);
    kvf_session_free(session);
    v[num_v - 1].iov_len--;
    assert_int_equal(kvf_session_load_with(store, &session, &err, "id", &into), KVF_LIMIT);
    assert_non_null(strstr(err.what, "210 and 400"));
    v[num_v - 1].iov_len++;
    into.v_iov = NULL;
    assert_int_equal(kvf_session_load_with(store, &session, &err, "id", &into), KVF_LIMIT);
    into.flags = 4;
    assert_int_equal(kvf_session_load_with(store, &session, &err, "id", &into), KVF_LIMIT);
}

static void in_pieces(void **state) {
    (void)state;
    for (size_t form = 0; form < 5; form++) {
        bench *b = open_bench();
        char *dir = NULL;
        kvf_store *store = store_in_form(b, form, &dir);
        kvf_error err = {0};
        kvf_tensor k = keys_tensor(), v = values_tensor();
        struct iovec k_iov[KEYS_BYTES], v_iov[VALUES_BYTES];
        static const kvf_digest space = {{1, 2, 3}};
        kvf_session_options options = {
            .struct_size = sizeof options, .num_tokens = 42, .layout = "LHTD", .space = &space, .ttl_s = 100};
        k.data = v.data = NULL;
        k.iov = k_iov;
        k.num_iov = (uint32_t)cut_up(k_iov, keys_bytes, KEYS_BYTES);
        v.iov = v_iov;
        v.num_iov = (uint32_t)cut_up(v_iov, values_bytes, VALUES_BYTES);
        assert_int_equal(kvf_session_save(store, &err, "id", &k, &v, &options), KVF_OK);
        check_loads(store, "id"); /* the same as from one piece */
        check_looks(store);

        uint8_t k_got[KEYS_BYTES] = {0}, v_got[VALUES_BYTES] = {0};
        size_t num_k = cut_up(k_iov, k_got, KEYS_BYTES), num_v = cut_up(v_iov, v_got, VALUES_BYTES);
        check_loads_into(store, k_iov, num_k, v_iov, num_v);
        assert_memory_equal(k_got, keys_bytes, KEYS_BYTES);
        assert_memory_equal(v_got, values_bytes, VALUES_BYTES);

        k.len--; /* not the sum of the pieces */
        assert_int_equal(kvf_session_save(store, &err, "id", &k, &v, &options), KVF_LIMIT);
        assert_non_null(strstr(err.what, "pieces"));
        if (store != &b->store) {
            kvf_store_close(store);
            kvft_remove_dir(dir);
        }
        close_bench(b);
    }
}

static void spread_over_fields(void **state) {
    (void)state;
    static const uint64_t limits[] = {399, 209, 128, 65, 64, 63, 10};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        bench *b = open_bench();
        assert_int_equal(save(&b->store, &b->err, "id"), KVF_OK); /* is replaced as a whole by the next */
        b->fake.max_part = limits[i];
        assert_int_equal(save(&b->store, &b->err, "id"), KVF_OK);
        assert_non_null(fake_find(&b->fake, "id", "values.1"));
        assert_int_equal(fake_find(&b->fake, "id", "keys.1") != NULL, limits[i] < KEYS_BYTES);
        check_loads(&b->store, "id");
        close_bench(b);
    }
}

static void a_missing_part(void **state) {
    (void)state;
    bench *b = open_bench();
    b->fake.max_part = 384;
    assert_int_equal(save(&b->store, &b->err, "id"), KVF_OK);
    field *part = fake_find(&b->fake, "id", "values.1");
    part->len--;
    check_misses(&b->store, "id", "not as long");
    snprintf(part->name, sizeof part->name, "x");
    check_misses(&b->store, "id", "not as long");
    close_bench(b);
}

static void too_many_parts(void **state) {
    (void)state;
    bench *b = open_bench();
    uint8_t *big = calloc(1, 5000);
    kvf_tensor k = {.data = big, .len = 5000}, v = {.data = big, .len = 1};
    b->fake.max_part = 1;
    assert_int_equal(kvf_session_save(&b->store, &b->err, "id", &k, &v, NULL), KVF_LIMIT);
    assert_non_null(strstr(b->err.what, "4096"));
    free(big);
    close_bench(b);
}

/* ---- what is wrong in the store */
/* [T:exact-or-miss] */
static void every_flipped_byte_is_a_miss(void **state) {
    (void)state;
    bench *b = open_bench();
    assert_int_equal(save(&b->store, &b->err, "id"), KVF_OK);
    for (size_t i = 0; i < b->fake.num; i++) {
        field *at = &b->fake.fields[i];
        if (strcmp(at->name, "meta") == 0) {
            continue;
        }
        for (size_t byte = 0; byte < at->len; byte++) {
            at->data[byte] ^= 0x10;
            check_misses(&b->store, "id", "checksum");
            at->data[byte] ^= 0x10;
        }
        at->len--;
        check_misses(&b->store, "id", "not as long");
        at->len++;
    }
    check_loads(&b->store, "id");
    close_bench(b);
}

/* Every byte of meta, and each set to several values: a miss with a reason, or a session whose bytes are those that
 * were saved. */
static void damaged_meta(void **state) {
    (void)state;
    bench *b = open_bench();
    assert_int_equal(save(&b->store, &b->err, "id"), KVF_OK);
    field *meta = fake_find(&b->fake, "id", "meta");
    static const char replacements[] = "\0\"9-{}[]:,. \xff";
    for (size_t byte = 0; byte < meta->len; byte++) {
        uint8_t before = meta->data[byte];
        for (size_t r = 0; r < sizeof replacements - 1; r++) {
            kvf_session *session = NULL;
            kvf_error err = {0};
            meta->data[byte] = (uint8_t)replacements[r];
            kvf_status status = kvf_session_load(&b->store, &session, &err, "id", KVF_DEFAULT);
            if (status == KVF_OK) {
                assert_int_equal(session->k.len, KEYS_BYTES);
                assert_memory_equal(session->k.data, keys_bytes, KEYS_BYTES);
                assert_memory_equal(session->v.data, values_bytes, VALUES_BYTES);
                kvf_session_free(session);
            } else {
                assert_int_equal(status, KVF_MISS);
                assert_true(err.what[0] != '\0');
            }
        }
        meta->data[byte] = before;
        size_t len = meta->len;
        meta->len = byte; /* cut */
        check_misses(&b->store, "id", "meta");
        meta->len = len;
    }
    close_bench(b);
}

#define SUM      "\"xxh3\":\"00000000000000000000000000000000\""
#define ARRAY(n) "{\"bytes\":" n "," SUM "}"

static void hostile_meta(void **state) {
    (void)state;
    static const struct {
        const char *text, *word;
    } cases[] = {
        {"", "not JSON"},
        {"nonsense", "not JSON"},
        {"[]", "not a JSON object"},
        {"17", "not JSON"},
        {"{}", "version 0"},
        {"{\"version\":\"1\"}", "not a JSON object with a version"},
        {"{\"version\":2,\"keys\":" ARRAY("4") ",\"values\":" ARRAY("4") "}", "version 2"},
        {"{\"version\":1}", "does not describe its keys"},
        {"{\"version\":1,\"version\":1}", "not JSON"},
        {"{\"version\":1,\"keys\":7,\"values\":7}", "does not describe its keys"},
        {"{\"version\":1,\"keys\":" ARRAY("4") "}", "does not describe its values"},
        {"{\"version\":1,\"keys\":" ARRAY("4") ",\"values\":{\"bytes\":4}}", "does not describe its values"},
        {"{\"version\":1,\"keys\":" ARRAY("-4") ",\"values\":" ARRAY("4") "}", "does not describe its keys"},
        {"{\"version\":1,\"keys\":" ARRAY("4.0") ",\"values\":" ARRAY("4") "}", "does not describe its keys"},
        {"{\"version\":1,\"keys\":" ARRAY("true") ",\"values\":" ARRAY("4") "}", "does not describe its keys"},
        {"{\"version\":1,\"keys\":" ARRAY("9223372036854775807") ",\"values\":" ARRAY("4") "}", "describe its keys"},
        {"{\"version\":1,\"keys\":" ARRAY("92233720368547758079") ",\"values\":" ARRAY("4") "}", "not JSON"},
        {"{\"version\":1,\"keys\":" ARRAY("1099511627776") ",\"values\":" ARRAY("4") "}", "not as long"},
        {"{\"version\":1,\"part_bytes\":1,\"keys\":" ARRAY("1099511627776") ",\"values\":" ARRAY("4") "}", "4096"},
        {"{\"version\":1,\"part_bytes\":1099511627776,\"keys\":" ARRAY("1099511627776") ",\"values\":" ARRAY("4") "}",
         "not as long"},
        {"{\"version\":1,\"part_bytes\":536870912,\"keys\":" ARRAY("1099511627776") ",\"values\":" ARRAY("4") "}",
         "not as long"},
        {"{\"version\":1,\"part_bytes\":-1,\"keys\":" ARRAY("4") ",\"values\":" ARRAY("4") "}", "wrong type"},
        {"{\"version\":1,\"tokens\":4294967296,\"keys\":" ARRAY("4") ",\"values\":" ARRAY("4") "}", "wrong type"},
        {"{\"version\":1,\"space\":\"00\",\"keys\":" ARRAY("4") ",\"values\":" ARRAY("4") "}", "wrong type"},
        {"{\"version\":1,\"layout\":[],\"keys\":" ARRAY("4") ",\"values\":" ARRAY("4") "}", "wrong type"},
        {"{\"version\":1,\"keys\":{\"bytes\":4," SUM ",\"dtype\":\"float32\",\"shape\":[2]},\"values\":" ARRAY("4") "}",
         "contradicts"},
        {"{\"version\":1,\"keys\":{\"bytes\":4," SUM
         ",\"dtype\":\"float32\",\"shape\":[4611686018427387905]},\"values\":" ARRAY("4") "}",
         "contradicts"},
        {"{\"version\":1,\"keys\":{\"bytes\":4," SUM ",\"shape\":[1,1,1,1,1,1,1,1,1]},\"values\":" ARRAY("4") "}",
         "does not describe its keys"},
        {"{\"version\":1,\"keys\":{\"bytes\":4," SUM ",\"shape\":[\"a\"]},\"values\":" ARRAY("4") "}", "its keys"},
        {"{\"version\":1,\"keys\":{\"bytes\":4," SUM
         ",\"dtype\":\"a name that is too long\"},\"values\":" ARRAY("4") "}",
         "its keys"},
        {"{\"version\":1,\"keys\":{\"bytes\":4," SUM ",\"dtype\":\"a b\"},\"values\":" ARRAY("4") "}", "contradicts"},
        {"{\"version\":1,\"keys\":{\"bytes\":4,\"xxh3\":\"zz\"},\"values\":" ARRAY("4") "}", "its keys"},
        {"{\"version\":1,\"keys\":" ARRAY("4") ",\"values\":" ARRAY("4") "}", "checksum"},
    };
    bench *b = open_bench();
    snprintf(b->fake.id, sizeof b->fake.id, "id");
    fake_set(&b->fake, "keys", "KKKK", 4);
    fake_set(&b->fake, "values", "VVVV", 4);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fake_set(&b->fake, "meta", cases[i].text, strlen(cases[i].text));
        check_misses(&b->store, "id", cases[i].word);
    }
    uint8_t *deep = malloc(2 << 20);
    memset(deep, '[', 2 << 20);
    fake_set(&b->fake, "meta", deep, 100000);
    check_misses(&b->store, "id", "not JSON");
    fake_set(&b->fake, "meta", deep, 2 << 20);
    check_misses(&b->store, "id", "1 MiB");
    free(deep);
    close_bench(b);
}

/* ---- a writer at the same time: before the n-th read it replaces the session */
static unsigned replace_at;
static size_t replace_len;

static void replace(fake *f) {
    if (f->gets + 1 == replace_at) {
        field *keys = fake_find(f, "id", "keys"), *other = fake_find(f, "id", "other");
        if (replace_len == keys->len) {
            keys->data[0] ^= 1; /* torn: new keys under the old meta, this once */
            other->len = 1;
        } else {
            keys->len = replace_len;
        }
    } else if (f->gets + 1 == replace_at + 1) {
        field *keys = fake_find(f, "id", "keys");
        if (fake_find(f, "id", "other")->len == 1) {
            keys->data[0] ^= 1;
        }
        keys->len = KEYS_BYTES;
    }
}

static void replaced_while_it_loads(void **state) {
    (void)state;
    static const size_t lens[] = {KEYS_BYTES, KEYS_BYTES - 5};
    for (size_t i = 0; i < 2; i++) {
        bench *b = open_bench();
        assert_int_equal(save(&b->store, &b->err, "id"), KVF_OK);
        fake_set(&b->fake, "other", "", 0);
        replace_at = 2; /* the first reads meta, the second the arrays */
        replace_len = lens[i];
        b->fake.before_get = replace;
        kvf_session *session = NULL;
        /* The look before the second try still sees the torn length, so it takes a third. */
        assert_int_equal(kvf_session_load(&b->store, &session, &b->err, "id", KVF_DEFAULT), KVF_OK);
        assert_memory_equal(session->k.data, keys_bytes, KEYS_BYTES);
        kvf_session_free(session);
        close_bench(b);
    }
}

/* Another save of the same lengths, between the meta and the arrays: all of the new one, and no bytes without meta. */
static field replacement[3];

static void replace_whole(fake *f) {
    for (size_t i = 0; f->gets + 1 == 2 && i < 3; i++) {
        fake_set(f, replacement[i].name, replacement[i].data, replacement[i].len);
    }
}

static void replaced_by_one_of_equal_lengths(void **state) {
    (void)state;
    bench *b = open_bench(), *other = open_bench();
    kvf_session *session = NULL;
    kvf_session_load_options raw = {.struct_size = sizeof raw, .flags = KVF_SESSION_RAW};
    kvf_tensor k = keys_tensor(), v = values_tensor();
    uint8_t zeros[KEYS_BYTES] = {0};
    assert_int_equal(save(&b->store, &b->err, "id"), KVF_OK);
    k.data = zeros;
    assert_int_equal(kvf_session_save(&other->store, &b->err, "id", &k, &v, NULL), KVF_OK);
    assert_int_equal(other->fake.num, 3);
    memcpy(replacement, other->fake.fields, sizeof replacement);
    b->fake.before_get = replace_whole;
    assert_int_equal(kvf_session_load_with(&b->store, &session, &b->err, "id", &raw), KVF_OK);
    assert_true(session->has_meta);
    assert_memory_equal(session->k.data, zeros, KEYS_BYTES);
    assert_int_equal(b->fake.gets, 2);
    kvf_session_free(session);
    close_bench(other);
    close_bench(b);
}

/* ---- arguments */
static void check_save_refused(const char *id, const kvf_tensor *k, const kvf_session_options *options,
                               const char *word) {
    bench *b = open_bench();
    kvf_tensor v = values_tensor();
    kvf_status status = kvf_session_save(&b->store, &b->err, id, k, &v, options);
    if (status != KVF_LIMIT || strstr(b->err.what, word) == NULL) {
        fail_msg("%s, \"%s\" does not say \"%s\"", kvf_status_name(status), b->err.what, word);
    }
    assert_int_equal(b->fake.num, 0);
    close_bench(b);
}

static void wrong_arguments(void **state) {
    (void)state;
    char long_id[514], long_layout[66];
    kvf_tensor k = keys_tensor();
    kvf_session_options options = {.struct_size = sizeof options};
    memset(long_id, 'i', 513);
    long_id[513] = '\0';
    memset(long_layout, 'L', 65);
    long_layout[65] = '\0';
    check_save_refused("", &k, NULL, "1 to 512");
    check_save_refused(long_id, &k, NULL, "1 to 512");
    options.layout = long_layout;
    check_save_refused("id", &k, &options, "64");
    options.layout = "a\nb";
    check_save_refused("id", &k, &options, "ASCII");
    k.dims[0] = 4;
    check_save_refused("id", &k, NULL, "shape of k takes 280 bytes as float16, but it has 210");
    k.dims[0] = UINT64_MAX;
    check_save_refused("id", &k, NULL, "larger than any memory");
    k.num_dims = 9;
    check_save_refused("id", &k, NULL, "9 dimensions");
    k = keys_tensor();
    memset(k.dtype, 'x', sizeof k.dtype);
    check_save_refused("id", &k, NULL, "dtype");
    strcpy(k.dtype, "a-b");
    check_save_refused("id", &k, NULL, "dtype");
    k.len = ((size_t)1 << 40) + 1;
    check_save_refused("id", &k, NULL, "1T");

    bench *b = open_bench();
    kvf_session *session = NULL;
    assert_int_equal(kvf_session_load(&b->store, &session, &b->err, "", KVF_DEFAULT), KVF_LIMIT);
    assert_int_equal(kvf_session_remove(&b->store, &b->err, long_id), KVF_LIMIT);
    b->store.pid++; /* as in the child of a fork */
    assert_int_equal(kvf_session_load(&b->store, &session, &b->err, "id", KVF_DEFAULT), KVF_CLOSED);
    assert_int_equal(save(&b->store, &b->err, "id"), KVF_CLOSED);
    close_bench(b);
}

/* A dtype that nobody knows has no size to compare. */
static void what_is_unknown_is_kept(void **state) {
    (void)state;
    bench *b = open_bench();
    kvf_tensor k = keys_tensor(), v = values_tensor();
    kvf_session_options options = {.struct_size = sizeof options, .ttl_s = 7};
    kvf_session *session = NULL;
    strcpy(k.dtype, "q4_0");
    assert_int_equal(kvf_session_save(&b->store, &b->err, "id", &k, &v, &options), KVF_OK);
    assert_int_equal(b->fake.ttl_s, 7);
    assert_int_equal(kvf_session_load(&b->store, &session, &b->err, "id", KVF_DEFAULT), KVF_OK);
    assert_string_equal(session->k.dtype, "q4_0");
    assert_int_equal(session->num_tokens, 0);
    kvf_session_free(session);
    close_bench(b);
}

/* ---- several tiers */
static void tiers_in_order(void **state) {
    (void)state;
    bench *b = open_bench();
    fake fast = {.tier = {.ops = &fake_ops, .volatile_ = true}};
    b->store.num_tiers = 2;
    b->store.tiers[1] = b->store.tiers[0];
    b->store.tiers[0] = &fast.tier;
    assert_int_equal(save(&b->store, &b->err, "id"), KVF_OK);
    assert_int_equal(fast.num, 0); /* it would end with the process */
    assert_int_equal(b->fake.num, 3);
    check_loads(&b->store, "id");
    fast.answer = KVF_IO; /* the first can't be asked: the second has it */
    check_loads(&b->store, "id");
    kvf_session *session = NULL;
    assert_int_equal(kvf_session_load(&b->store, &session, &b->err, "other", KVF_DEFAULT), KVF_IO);
    assert_non_null(strstr(b->err.what, "the fake says so"));
    assert_int_equal(kvf_session_remove(&b->store, &b->err, "id"), KVF_IO);
    assert_int_equal(b->fake.num, 0);
    fake_clear(&fast);
    close_bench(b);
}

/* ---- as one value, in the memory store */
static void value_there_and_back(void **state) {
    (void)state;
    kvf_store *store = kvft_store("mem:");
    kvf_error err = {0};
    check_misses(store, "id", "no such session");
    for (int i = 0; i < 2; i++) { /* the second replaces the first */
        assert_int_equal(save(store, &err, "id"), KVF_OK);
        check_loads(store, "id");
    }
    kvf_tensor k = {.data = "abc", .len = 3}, v = {.data = NULL, .len = 0};
    kvf_session *session = NULL;
    assert_int_equal(kvf_session_save(store, &err, "small \xff", &k, &v, NULL), KVF_OK);
    assert_int_equal(kvf_session_load(store, &session, &err, "small \xff", KVF_DEFAULT), KVF_OK);
    assert_int_equal(session->k.len, 3);
    assert_memory_equal(session->k.data, "abc", 3);
    assert_int_equal(session->v.len, 0);
    kvf_session_free(session);
    check_loads(store, "id");
    assert_int_equal(kvf_session_remove(store, &err, "id"), KVF_OK);
    assert_int_equal(kvf_session_remove(store, &err, "id"), KVF_MISS);
    check_misses(store, "id", "no such session");
    kvf_store_close(store);
}

static void a_large_value(void **state) {
    (void)state;
    enum { BYTES = 5000001 };
    kvf_store *store = kvft_store("mem:");
    kvf_error err = {0};
    uint8_t *bytes = malloc(2 * BYTES);
    kvft_bytes(bytes, 2 * BYTES, 9);
    kvf_tensor k = {.data = bytes, .len = BYTES}, v = {.data = bytes + BYTES, .len = BYTES};
    kvf_session *session = NULL;
    assert_int_equal(kvf_session_save(store, &err, "id", &k, &v, NULL), KVF_OK);
    assert_int_equal(kvf_session_load(store, &session, &err, "id", KVF_DEFAULT), KVF_OK);
    assert_memory_equal(session->k.data, bytes, BYTES);
    assert_memory_equal(session->v.data, bytes + BYTES, BYTES);
    assert_int_equal((uintptr_t)session->k.data % 64, 0); /* ready for vector instructions */
    assert_int_equal((uintptr_t)session->v.data % 64, 0);
    kvf_session_free(session);
    free(bytes);
    kvf_store_close(store);
}

static void a_value_expires(void **state) {
    (void)state;
    kvf_store *store = kvft_store("mem:");
    kvf_error err = {0};
    kvf_tensor k = keys_tensor(), v = values_tensor();
    kvfi_session_meta meta = {.stored_s = 1000};
    kvfi_session_call call = {
        .tier = kvfi_store_tier(store, 0), .err = &err, .id = "id", .deadline_us = kvfi_deadline(1000000)};
    struct iovec keys = {keys_bytes, KEYS_BYTES}, values = {values_bytes, VALUES_BYTES};
    meta.keys.bytes = k.len;
    meta.values.bytes = v.len;
    assert_int_equal(kvfi_session_save_value(&call, &meta, (kvfi_pieces){&keys, 1}, (kvfi_pieces){&values, 1}, 60),
                     KVF_OK); /* ended in 1970 */
    check_misses(store, "id", "expired");
    kvf_store_close(store);
}

/* Any byte of the value changed: the record's own checks see it. Cut lengths inside a valid record are seen by the
 * session's. */
static kvf_status put_value(kvf_store *store, const void *payload, size_t len) {
    uint8_t head[KVFI_HEADER_BYTES], sum[KVFI_SUM_BYTES];
    struct iovec iov[3] = {{head, sizeof head}, {(void *)(uintptr_t)payload, len}, {sum, sizeof sum}};
    kvfi_item item = {.iov = iov, .num_iov = 3, .bytes = sizeof head + len + sizeof sum, .status = KVF_AGAIN};
    kvf_block block = {0};
    kvfi_session_addr(&item.addr, "id", NULL, 0);
    kvfi_record_seal(head, sum, &item.addr, &block, iov + 1, 1, 0, 0);
    kvfi_feed feed = {.items = &item, .num = 1, .deadline_us = kvfi_deadline(1000000)};
    atomic_init(&feed.next, 0);
    atomic_init(&feed.limit, 1);
    kvfi_tier *tier = kvfi_store_tier(store, 0);
    tier->ops->put(tier, &feed);
    return item.status;
}

static void hostile_values(void **state) {
    (void)state;
    static const struct {
        const char *payload;
        size_t len;
        const char *word;
    } cases[] = {
        {"", 0, "shorter"},           {"\1\0\0", 3, "shorter"},
        {"\1\0\0\0", 4, "shorter"},   {"\xff\xff\xff\xff{}", 6, "shorter"},
        {"\2\0\0\0{}", 6, "version"}, {"\0\0\0\0", 4, "not JSON"},
    };
    kvf_store *store = kvft_store("mem:");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(put_value(store, cases[i].payload, cases[i].len), KVF_OK);
        check_misses(store, "id", cases[i].word);
    }
    static const char *const metas[] = {
        "{\"version\":1,\"keys\":" ARRAY("1099511627776") ",\"values\":" ARRAY("1099511627776") "}",
        "{\"version\":1,\"keys\":" ARRAY("64") ",\"values\":" ARRAY("65") "}",
        "{\"version\":1,\"keys\":" ARRAY("65") ",\"values\":" ARRAY("64") "}",
        "{\"version\":1,\"part_bytes\":32,\"keys\":" ARRAY("64") ",\"values\":" ARRAY("64") "}",
    };
    for (size_t i = 0; i < sizeof metas / sizeof *metas; i++) {
        uint8_t payload[1000] = {0};
        size_t len = strlen(metas[i]);
        kvfi_put32(payload, (uint32_t)len);
        memcpy(payload + 4, metas[i], len);
        assert_int_equal(put_value(store, payload, 4 + len + 128), KVF_OK);
        check_misses(store, "id", "not as long");
    }
    kvf_store_close(store);
}

/* A value that a store lends is looked at where it lies. What is not a session of that name is none. */
typedef enum spoiling { NOT_SPOILED, OTHER_MAGIC, OTHER_ADDRESS, A_BLOCK, LONGER, NUM_SPOILINGS } spoiling;

static void put_spoiled(kvf_store *store, spoiling how) {
    static const char *const text = "{\"version\":1,\"keys\":" ARRAY("64") ",\"values\":" ARRAY("64") "}";
    uint8_t head[KVFI_HEAD_BYTES(16)], sum[KVFI_SUM_BYTES], payload[1000] = {0};
    const uint32_t tokens[16] = {0};
    size_t len = strlen(text);
    kvfi_put32(payload, (uint32_t)len);
    memcpy(payload + 4, text, len);
    kvf_block block = {.tokens = tokens, .num_tokens = how == A_BLOCK ? 16 : 0};
    struct iovec iov[4] = {
        {head, KVFI_HEAD_BYTES(block.num_tokens)}, {payload, 4 + len + 128}, {sum, sizeof sum}, {payload, 0}};
    kvfi_item item = {.iov = iov, .num_iov = 4, .status = KVF_AGAIN};
    kvfi_addr addr;
    kvfi_session_addr(&item.addr, "id", NULL, 0);
    kvfi_session_addr(&addr, how == OTHER_ADDRESS ? "other" : "id", NULL, 0);
    kvfi_record_seal(head, sum, &addr, &block, iov + 1, 1, 0, 0);
    head[0] ^= how == OTHER_MAGIC;
    iov[3].iov_len = how == LONGER ? 1 : 0;
    for (size_t i = 0; i < item.num_iov; i++) {
        item.bytes += iov[i].iov_len;
    }
    kvfi_feed feed = {.items = &item, .num = 1, .limit = 1, .deadline_us = kvfi_deadline(1000000)};
    kvfi_tier *tier = kvfi_store_tier(store, 0);
    tier->ops->put(tier, &feed);
    if (item.status != KVF_OK) {
        fail_msg("%d: %s", how, kvf_reason_name(item.why));
    }
}

static void spoiled_values_that_are_lent(void **state) {
    (void)state;
    kvf_session_load_options look = {.struct_size = sizeof look, .flags = KVF_SESSION_LOOK};
    for (spoiling how = NOT_SPOILED; how < NUM_SPOILINGS; how++) {
        kvf_session *session = NULL;
        kvf_error err = {0};
        kvf_store *store = kvft_store("mem:");
        put_spoiled(store, how);
        kvf_status status = kvf_session_load_with(store, &session, &err, "id", &look);
        if (status != (how == NOT_SPOILED ? KVF_OK : KVF_MISS)) {
            fail_msg("%d: %s, %s", how, kvf_status_name(status), err.what);
        }
        if (status == KVF_OK) {
            kvf_session_free(session);
        }
        kvf_store_close(store);
    }
}

/* The longest session that is a value. It is not made here: memory for its meta is refused, which is asked for behind
 * the check of its length. */
static void the_longest_value(void **state) {
    (void)state;
    const uint64_t most = KVF_MAX_PAYLOAD_BYTES - KVFI_MAX_META_BYTES - 2 * 64;
    for (uint64_t beyond = 0; beyond < 2; beyond++) {
        kvf_error err = {0};
        kvfi_session_call call = {.id = "id", .err = &err};
        kvfi_session_meta meta = {.keys = {.bytes = most - most / 2 + beyond}, .values = {.bytes = most / 2}};
        kvft_faults_arm(KVFT_ALLOC, 1);
        kvfi_pieces none = {NULL, 0};
        kvf_status status = kvfi_session_save_value(&call, &meta, none, none, 1);
        kvft_faults_disarm();
        assert_int_equal(status, beyond == 0 ? KVF_NOMEM : KVF_LIMIT);
    }
}

static void a_value_names_its_id(void **state) {
    (void)state;
    kvfi_session_meta meta = {.stored_s = 5, .id = "a \"name\" \xc3\xa9"};
    uint8_t *bytes = NULL;
    size_t len = 0;
    int64_t expires_s = -1;
    char id[KVF_MAX_ID_BYTES + 1];
    kvf_digest space;
    uint8_t golden[32];
    kvfi_addr addr;
    assert_int_equal(kvfi_session_meta_encode(&bytes, &len, NULL, &meta, 132, 64), KVF_OK);
    assert_int_equal((132 + len) % 64, 0);
    kvfi_session_meta again = {0};
    assert_int_equal(kvfi_session_meta_decode(&again, NULL, bytes + 132, len), KVF_OK);
    assert_int_equal(again.stored_s, 5);
    kvfi_put32(bytes + 128, (uint32_t)len);
    assert_true(kvfi_session_value_id(id, &expires_s, bytes + 128, 4 + len));
    assert_string_equal(id, meta.id);
    assert_false(kvfi_session_value_id(id, &expires_s, bytes + 128, 3 + len));
    kvfi_free(bytes);
    assert_true(kvfi_unhex(golden, "055aec82a761ecbb8df9e18eddbc3c04ff54b6a89309c31ada5c8f1bcd233a24", 32));
    kvfi_session_space(&space, NULL);
    assert_memory_equal(space.bytes, golden, 32);
    assert_true(kvfi_unhex(golden, "9d6e9e28469acfd31766d4acf032f389f7c38181d621da7501be54801670f0f1", 32));
    kvfi_session_addr(&addr, "user:42", NULL, 0);
    assert_memory_equal(addr.key.bytes, golden, 32);
}

/* ---- the n-th allocation and the n-th call */
static void use_all(kvf_store *store) {
    kvf_error err = {0};
    kvf_session *session = NULL;
    kvf_status saved = save(store, &err, "id");
    if (saved != KVF_OK) {
        assert_true((saved == KVF_NOMEM || saved == KVF_IO) && err.what[0] != '\0');
    }
    kvf_status loaded = kvf_session_load(store, &session, &err, "id", KVF_DEFAULT);
    if (loaded == KVF_OK) {
        assert_memory_equal(session->k.data, keys_bytes, KEYS_BYTES);
        assert_memory_equal(session->v.data, values_bytes, VALUES_BYTES);
        kvf_session_free(session);
    } else {
        assert_true(loaded == KVF_NOMEM || loaded == KVF_IO || loaded == KVF_MISS);
        assert_true(err.status == loaded && err.what[0] != '\0');
    }
    uint8_t k_got[KEYS_BYTES], v_got[VALUES_BYTES];
    struct iovec k[2] = {{k_got, 9}, {k_got + 9, KEYS_BYTES - 9}},
                 v[2] = {{v_got, 100}, {v_got + 100, VALUES_BYTES - 100}};
    kvf_session_load_options ways[] = {
        {.struct_size = sizeof *ways, .flags = KVF_SESSION_LOOK},
        {.struct_size = sizeof *ways, .k_iov = k, .num_k_iov = 2, .v_iov = v, .num_v_iov = 2}};
    for (size_t i = 0; i < 2; i++) {
        loaded = kvf_session_load_with(store, &session, &err, "id", &ways[i]);
        if (loaded == KVF_OK) {
            assert_int_equal(session->k.len, KEYS_BYTES);
            assert_true(i == 0 || memcmp(k_got, keys_bytes, KEYS_BYTES) == 0);
            assert_true(i == 0 || memcmp(v_got, values_bytes, VALUES_BYTES) == 0);
            kvf_session_free(session);
        } else {
            assert_true(loaded == KVF_NOMEM || loaded == KVF_IO || loaded == KVF_MISS);
        }
    }
    kvf_status removed = kvf_session_remove(store, &err, "id");
    assert_true(removed == KVF_OK || removed == KVF_NOMEM || removed == KVF_IO || removed == KVF_MISS);
}

static void every_fault_once(void **state) {
    (void)state;
    static const kvft_fault_kind kinds[] = {KVFT_ALLOC, KVFT_CALL};
    unsigned points = 0;
    for (size_t i = 0; i < 4; i++) {
        for (uint64_t n = 1;; n++) {
            bench *b = open_bench();
            b->fake.max_part = i < 2 ? 0 : 384; /* whole, and spread */
            kvft_faults_arm(kinds[i % 2], n);
            use_all(&b->store);
            assert_int_equal(kvft_faults_live_allocs(), 0);
            bool hit = kvft_faults_disarm();
            close_bench(b);
            if (!hit) {
                break;
            }
            points++;
        }
    }
    for (uint64_t n = 1;; n++) { /* as one value */
        kvft_faults_watch();
        kvf_store *store = kvft_store("mem:");
        kvft_faults_arm(KVFT_ALLOC, n);
        use_all(store);
        kvft_faults_watch(); /* no more faults, but goes on counting */
        kvf_store_close(store);
        assert_int_equal(kvft_faults_live_allocs(), 0);
        if (!kvft_faults_disarm()) {
            break;
        }
        points++;
    }
    print_message("%u points of failure\n", points);
    assert_true(points > 40);
}

/* The size of an element, by which a shape is compared with its bytes. */
static void test_dtypes(void **state) {
    (void)state;
    static const struct {
        uint32_t bytes;
        const char *names[8];
    } rows[] = {{1, {"int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e4m3fnuz"}},
                {2, {"float16", "bfloat16", "int16", "uint16"}},
                {4, {"float32", "int32", "uint32"}},
                {8, {"float64", "int64", "uint64", "complex64"}},
                {16, {"complex128"}},
                {0, {"float", "int4", ""}}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        for (size_t k = 0; k < 8 && rows[i].names[k] != NULL; k++) {
            assert_int_equal(kvfi_dtype_bytes(rows[i].names[k]), rows[i].bytes);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dtypes),
        cmocka_unit_test(fields_there_and_back),
        cmocka_unit_test(a_plain_writer),
        cmocka_unit_test(a_plain_writer_over_ours),
        cmocka_unit_test(in_pieces),
        cmocka_unit_test(spread_over_fields),
        cmocka_unit_test(a_missing_part),
        cmocka_unit_test(too_many_parts),
        cmocka_unit_test(every_flipped_byte_is_a_miss),
        cmocka_unit_test(damaged_meta),
        cmocka_unit_test(hostile_meta),
        cmocka_unit_test(replaced_while_it_loads),
        cmocka_unit_test(replaced_by_one_of_equal_lengths),
        cmocka_unit_test(wrong_arguments),
        cmocka_unit_test(what_is_unknown_is_kept),
        cmocka_unit_test(tiers_in_order),
        cmocka_unit_test(value_there_and_back),
        cmocka_unit_test(a_large_value),
        cmocka_unit_test(a_value_expires),
        cmocka_unit_test(hostile_values),
        cmocka_unit_test(spoiled_values_that_are_lent),
        cmocka_unit_test(the_longest_value),
        cmocka_unit_test(a_value_names_its_id),
        cmocka_unit_test(every_fault_once),
    };
    json_set_alloc_funcs(kvfi_alloc, kvfi_free); /* so that jansson's memory fails and is counted too */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
