/* SPDX-License-Identifier: Apache-2.0
 *
 * Options of the response cache: those of Triton's redis cache, by the same names, and our own.
 */
#include "triton/cache/options.h"

#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_DEADLINE_MS 100
#define MAX_DEADLINE_MS     60000

/* The options as they are written. NULL = not given. */
typedef struct raw {
    const char *host, *port, *user, *password, *db, *connect_timeout, *socket_timeout, *pool_size, *wait_timeout;
    const char *tls_enabled, *cert, *key, *cacert, *cacert_dir, *sni;
    const char *store, *ttl, *deadline, *namespace_, *models, *secret;
} raw;

typedef struct option {
    const char *name;
    size_t offset;
    bool of_address; /* says where the server is: not together with store= */
} option;

#define OPTION(name, field, of_address) \
    { name, offsetof(raw, field), of_address }
static const option table[] = {
    OPTION("host", host, true),
    OPTION("port", port, true),
    OPTION("user", user, true),
    OPTION("password", password, true),
    OPTION("db", db, true),
    OPTION("connect_timeout", connect_timeout, true),
    OPTION("socket_timeout", socket_timeout, false),
    OPTION("pool_size", pool_size, true),
    OPTION("wait_timeout", wait_timeout, false),
    OPTION("tls_enabled", tls_enabled, true),
    OPTION("cert", cert, true),
    OPTION("key", key, true),
    OPTION("cacert", cacert, true),
    OPTION("cacert_dir", cacert_dir, true),
    OPTION("sni", sni, true),
    OPTION("store", store, false),
    OPTION("ttl", ttl, false),
    OPTION("deadline", deadline, false),
    OPTION("namespace", namespace_, false),
    OPTION("models", models, false),
    OPTION("secret", secret, false),
};
#define NUM_OPTIONS (sizeof table / sizeof *table)

static const char **field(raw *r, const option *o) {
    return (const char **)(void *)((char *)r + o->offset);
}

static const option *find(const char *name) {
    for (size_t i = 0; i < NUM_OPTIONS; i++) {
        if (strcmp(table[i].name, name) == 0) {
            return &table[i];
        }
    }
    return NULL;
}

static TRITONSERVER_Error *unknown(const char *name) {
    char all[512] = "";
    for (size_t i = 0, used = 0; i < NUM_OPTIONS && used < sizeof all; i++) {
        used += (size_t)snprintf(all + used, sizeof all - used, "%s%s", i == 0 ? "" : ", ", table[i].name);
    }
    return kvfr_fail(TRITONSERVER_ERROR_INVALID_ARG,
                     "kvferry: --cache-config has no option '%.100s'. There are: %s (docs/triton.md)", name, all);
}

/* Triton writes every value as a text. A program that has the server in it may also write numbers and truth values:
 * they become texts here, in the object itself, which owns them. */
static TRITONSERVER_Error *as_text(json_t *object, const char *name, json_t *value, const char **out) {
    if (json_is_boolean(value) || json_is_integer(value)) {
        char text[32];
        snprintf(text, sizeof text, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
        if (json_is_boolean(value)) {
            snprintf(text, sizeof text, "%s", json_is_true(value) ? "true" : "false");
        }
        if (json_object_set_new(object, name, json_string(text)) != 0) {
            return kvfr_fail(TRITONSERVER_ERROR_INTERNAL, "kvferry: no memory");
        }
        value = json_object_get(object, name);
    }
    *out = json_string_value(value);
    return *out != NULL ? NULL : kvfr_fail(TRITONSERVER_ERROR_INVALID_ARG, "kvferry: %s= is not a text", name);
}

static TRITONSERVER_Error *take_all(raw *out, json_t *object) {
    const char *name;
    json_t *value;
    void *next;
    json_object_foreach_safe(object, next, name, value) {
        const option *o = find(name);
        if (o == NULL) {
            return unknown(name);
        }
        KVFR_TRY(as_text(object, name, value, field(out, o)));
    }
    return NULL;
}

/* A whole number of at least `least` and at most `most`; `value` stays where the option is not given. */
static TRITONSERVER_Error *number(int64_t *value, const char *name, const char *text, int64_t least, int64_t most) {
    if (text == NULL) {
        return NULL;
    }
    char *end;
    long long parsed = strtoll(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || parsed < least || parsed > most) {
        return kvfr_fail(TRITONSERVER_ERROR_INVALID_ARG, "kvferry: %s=%.40s is not a whole number from %lld to %lld",
                         name, text, (long long)least, (long long)most);
    }
    *value = parsed;
    return NULL;
}

static TRITONSERVER_Error *copy(char out[KVFR_TEXT_BYTES], const char *name, const char *text) {
    if (text != NULL && (size_t)snprintf(out, KVFR_TEXT_BYTES, "%s", text) >= KVFR_TEXT_BYTES) {
        return kvfr_fail(TRITONSERVER_ERROR_INVALID_ARG, "kvferry: %s= is longer than %u bytes", name,
                         KVFR_TEXT_BYTES - 1);
    }
    return NULL;
}

/* ---- a URL from host= and the options beside it ------------------------------------------------------------------ */

/* Writes into the text of the options. What does not fit is left out, and `full` is set. */
typedef struct writer {
    char *at;
    size_t room;
    bool full;
} writer;

static void put(writer *w, const char *text) {
    size_t len = strlen(text);
    if (len >= w->room) {
        w->full = true;
        return;
    }
    memcpy(w->at, text, len + 1);
    w->at += len;
    w->room -= len;
}

/* Everything but letters, digits and a few signs is escaped. */
static void put_escaped(writer *w, const char *text) {
    for (; *text != '\0'; text++) {
        unsigned char c = (unsigned char)*text;
        bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || strchr("-._~", c);
        char piece[4] = {(char)c, '\0'};
        if (!plain) {
            snprintf(piece, sizeof piece, "%%%02X", c);
        }
        put(w, piece);
    }
}

static void put_parameter(writer *w, char *sign, const char *name, const char *value) {
    if (value != NULL) {
        const char begin[2] = {*sign, '\0'};
        put(w, begin);
        put(w, name);
        put(w, "=");
        put_escaped(w, value);
        *sign = '&';
    }
}

static void put_credentials(writer *w, const raw *r) {
    const char *user = r->user != NULL ? r->user : getenv("TRITONCACHE_REDIS_USERNAME");
    const char *password = r->password != NULL ? r->password : getenv("TRITONCACHE_REDIS_PASSWORD");
    if (user != NULL || password != NULL) {
        put_escaped(w, user != NULL ? user : "");
        if (password != NULL) {
            put(w, ":");
            put_escaped(w, password);
        }
        put(w, "@");
    }
}

static void put_host(writer *w, const char *host) {
    bool v6 = strchr(host, ':') != NULL && host[0] != '[';
    put(w, v6 ? "[" : "");
    put(w, host);
    put(w, v6 ? "]" : "");
}

/* redis_cache says 0 for "without end". */
static const char *unless_zero(const char *text) {
    return text == NULL || strcmp(text, "0") == 0 ? NULL : text;
}

static TRITONSERVER_Error *check_tls(bool *tls, const raw *r) {
    if (r->tls_enabled != NULL && strcmp(r->tls_enabled, "true") != 0 && strcmp(r->tls_enabled, "false") != 0) {
        return kvfr_fail(TRITONSERVER_ERROR_INVALID_ARG, "kvferry: tls_enabled=%.40s is not true or false",
                         r->tls_enabled);
    }
    *tls = r->tls_enabled != NULL && strcmp(r->tls_enabled, "true") == 0;
    bool any = r->cert != NULL || r->key != NULL || r->cacert != NULL || r->cacert_dir != NULL || r->sni != NULL;
    if (r->tls_enabled == NULL && any) {
        return kvfr_fail(TRITONSERVER_ERROR_INVALID_ARG,
                         "kvferry: cert, key, cacert, cacert_dir and sni need tls_enabled=true");
    }
    return NULL;
}

static TRITONSERVER_Error *write_url(kvfr_options *out, const raw *r) {
    int64_t port = 6379, db = 0, ignored = 0;
    bool tls = false;
    KVFR_TRY(number(&port, "port", r->port, 1, 65535));
    KVFR_TRY(number(&db, "db", r->db, 0, INT_MAX));
    KVFR_TRY(number(&ignored, "connect_timeout", r->connect_timeout, 0, INT_MAX));
    KVFR_TRY(number(&ignored, "pool_size", r->pool_size, 1, INT_MAX));
    KVFR_TRY(check_tls(&tls, r));
    if (r->host[0] == '\0' || strpbrk(r->host, "/?#@ ") != NULL) {
        const char *password_end = strrchr(r->host, '@'); /* of a URL. Triton logs this */
        return kvfr_fail(TRITONSERVER_ERROR_INVALID_ARG,
                         "kvferry: host=%.100s is not a host name or address. A URL is named by store=",
                         password_end != NULL ? password_end : r->host);
    }
    writer w = {.at = out->text, .room = sizeof out->text};
    char numbers[64], sign = '?';
    put(&w, tls ? "rediss://" : "redis://");
    put_credentials(&w, r);
    put_host(&w, r->host);
    snprintf(numbers, sizeof numbers, ":%lld/%lld", (long long)port, (long long)db);
    put(&w, numbers);
    put_parameter(&w, &sign, "connect_ms", unless_zero(r->connect_timeout));
    put_parameter(&w, &sign, "conns", r->pool_size);
    put_parameter(&w, &sign, "ttl", r->ttl);
    if (tls) {
        put_parameter(&w, &sign, "ssl_certfile", r->cert);
        put_parameter(&w, &sign, "ssl_keyfile", r->key);
        put_parameter(&w, &sign, "ssl_ca_certs", r->cacert);
        put_parameter(&w, &sign, "ssl_ca_path", r->cacert_dir);
        put_parameter(&w, &sign, "ssl_server_hostname", r->sni);
    }
    out->urls[out->num_urls++] = out->text;
    return w.full ? kvfr_fail(TRITONSERVER_ERROR_INVALID_ARG, "kvferry: host, user, password and files are too long")
                  : NULL;
}

/* ---- the store --------------------------------------------------------------------------------------------------- */

static TRITONSERVER_Error *split_urls(kvfr_options *out, const char *name, const char *store) {
    KVFR_TRY(copy(out->text, name, store));
    char *rest;
    for (char *url = strtok_r(out->text, " \t\n", &rest); url != NULL; url = strtok_r(NULL, " \t\n", &rest)) {
        if (out->num_urls == KVFR_MAX_URLS) {
            return kvfr_fail(TRITONSERVER_ERROR_INVALID_ARG, "kvferry: %s= has more than %u URLs", name, KVFR_MAX_URLS);
        }
        out->urls[out->num_urls++] = url;
    }
    return out->num_urls > 0 ? NULL : kvfr_fail(TRITONSERVER_ERROR_INVALID_ARG, "kvferry: %s= has no URL", name);
}

static TRITONSERVER_Error *refuse_address(raw *r) {
    for (size_t i = 0; i < NUM_OPTIONS; i++) {
        if (table[i].of_address && *field(r, &table[i]) != NULL) {
            return kvfr_fail(TRITONSERVER_ERROR_INVALID_ARG,
                             "kvferry: %s= has no effect beside a URL: write it into the URL, or name the server by "
                             "host= instead of store= and KVFERRY_STORE",
                             table[i].name);
        }
    }
    return NULL;
}

static TRITONSERVER_Error *take_store(kvfr_options *out, raw *r) {
    const char *environment = getenv("KVFERRY_STORE");
    if (r->host != NULL && r->store == NULL) {
        return write_url(out, r);
    }
    if (r->store == NULL && environment == NULL) {
        return kvfr_fail(
            TRITONSERVER_ERROR_INVALID_ARG,
            "kvferry: no store is named. Add --cache-config kvferry,store=redis://HOST:6379 (or host=HOST; "
            "or set KVFERRY_STORE)");
    }
    KVFR_TRY(refuse_address(r));
    return r->store != NULL ? split_urls(out, "store", r->store) : split_urls(out, "KVFERRY_STORE", environment);
}

static TRITONSERVER_Error *take_times(kvfr_options *out, const raw *r) {
    int64_t deadline_ms = DEFAULT_DEADLINE_MS, ignored = 0;
    KVFR_TRY(number(&out->ttl_s, "ttl", r->ttl, 0, INT_MAX));
    KVFR_TRY(number(&ignored, "wait_timeout", r->wait_timeout, 0, INT_MAX));
    KVFR_TRY(number(&deadline_ms, "socket_timeout", unless_zero(r->socket_timeout), 1, MAX_DEADLINE_MS));
    KVFR_TRY(number(&deadline_ms, "deadline", r->deadline, 1, MAX_DEADLINE_MS));
    out->deadline_us = deadline_ms * 1000;
    return NULL;
}

static TRITONSERVER_Error *take_values(kvfr_options *out, json_t *object) {
    raw r = {0};
    KVFR_TRY(take_all(&r, object));
    KVFR_TRY(take_store(out, &r));
    KVFR_TRY(take_times(out, &r));
    KVFR_TRY(copy(out->models, "models", r.models));
    KVFR_TRY(copy(out->namespace_, "namespace", r.namespace_));
    return copy(out->secret_files, "secret", r.secret);
}

TRITONSERVER_Error *kvfr_options_read(kvfr_options *out, const char *json) {
    *out = (kvfr_options){0};
    json_error_t error;
    json_t *object = json_loads(json, JSON_REJECT_DUPLICATES, &error);
    if (!json_is_object(object)) {
        json_decref(object);
        return kvfr_fail(TRITONSERVER_ERROR_INVALID_ARG, "kvferry: --cache-config is not a JSON object: %.150s",
                         object == NULL ? error.text : "something else");
    }
    TRITONSERVER_Error *failed = take_values(out, object);
    json_decref(object);
    return failed;
}
