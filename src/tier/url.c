/* SPDX-License-Identifier: Apache-2.0
 *
 * Store URLs. The text for people (`text`) is built first, without the password, and every message uses only that, so
 * what can't be parsed can't leak either.
 */
#include "tier/url.h"

#include <stdio.h>

#define MAX_URL_BYTES 4096u
#define MAX_PARAMS    64u

/* A piece of the text that is being parsed. */
typedef struct span {
    const char *at;
    size_t len;
} span;

/* The pieces of a URL, still with their escapes. `at` is NULL where one is absent. */
typedef struct pieces {
    span scheme, userinfo, hosts, path, query;
} pieces;

static span span_of(const char *begin, const char *end) {
    return (span){begin, (size_t)(end - begin)};
}

/* The first place in [p, end) that holds one of `stops`, or `end`. */
static const char *until(const char *p, const char *end, const char *stops) {
    while (p < end && strchr(stops, *p) == NULL) {
        p++;
    }
    return p;
}

static const char *last_at_sign(const char *p, const char *end) {
    for (const char *q = end; q > p; q--) {
        if (q[-1] == '@') {
            return q - 1;
        }
    }
    return NULL;
}

/* ---- the text for people */
static bool is_secret_name(span name) {
    static const char *const names[] = {
        "password", "sentinel_password", "ssl_password", "pass", "passwd", "auth", "secret", "token", "key"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strlen(names[i]) == name.len && strncasecmp(names[i], name.at, name.len) == 0) {
            return true;
        }
    }
    return false;
}

/* Appends as much as fits; a text that was cut ends in "...". */
static void append(char text[256], size_t *len, const char *more, size_t num) {
    size_t room = 255 - *len;
    if (num > room) {
        memcpy(text + *len, more, room);
        memcpy(text + 252, "...", 4);
        *len = 255;
        return;
    }
    memcpy(text + *len, more, num);
    *len += num;
    text[*len] = '\0';
}

/* Of a query parameter that looks like a secret only the name is shown: it is refused as unknown later, and that
 * message must not show it. */
static void append_query(char text[256], size_t *len, const char *p, const char *end) {
    while (p < end) {
        const char *stop = until(p, end, "&");
        const char *equals = until(p, stop, "=");
        if (equals < stop && is_secret_name(span_of(p, equals))) {
            append(text, len, p, (size_t)(equals - p));
            append(text, len, "=***", 4);
        } else {
            append(text, len, p, (size_t)(stop - p));
        }
        if (stop < end) {
            append(text, len, "&", 1);
            stop++;
        }
        p = stop;
    }
}

/* Everything between the first ":" of the authority (or, without one, of what follows the scheme) and the last "@" is a
 * password. */
static void make_text(char text[256], const char *url) {
    const char *end = url + strlen(url);
    const char *slashes = strstr(url, "://");
    const char *begin = slashes != NULL ? slashes + 3 : url;
    const char *stop = slashes != NULL ? until(begin, end, "/?#") : until(begin, end, "?#");
    const char *at = last_at_sign(begin, stop);
    const char *colon = at == NULL ? NULL : until(begin, at, ":");
    size_t len = 0;
    const char *scheme_end = until(url, end, ":");
    bool local = slashes == NULL && scheme_end < end && scheme_end[1] == '/'; /* "file:/a@b" has no authority */
    if (at == NULL || colon == at || local) {
        append(text, &len, url, (size_t)(stop - url));
    } else {
        append(text, &len, url, (size_t)(colon - url) + 1);
        append(text, &len, "***", 3);
        append(text, &len, at, (size_t)(stop - at));
    }
    const char *query = until(stop, end, "?");
    append(text, &len, stop, (size_t)(query - stop));
    if (query < end) {
        append(text, &len, "?", 1);
        append_query(text, &len, query + 1, end);
    }
}

/* ---- pieces */
static bool scheme_char(char c, bool first) {
    bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    return letter || (!first && ((c >= '0' && c <= '9') || c == '+' || c == '-' || c == '.'));
}

static kvf_status cut_scheme(span *out, kvf_error *err, const char *text, const char *url) {
    const char *p = url;
    while (scheme_char(*p, p == url)) {
        p++;
    }
    if (p > url && *p == ':') {
        *out = span_of(url, p);
        return KVF_OK;
    }
    if (url[0] == '/' || url[0] == '.') {
        return kvfi_fail(err, KVF_CONFIG, "\"%.100s\" is not a store URL: a folder is written file:/its/absolute/path",
                         text);
    }
    return kvfi_fail(
        err, KVF_CONFIG,
        "\"%.100s\" is not a store URL: write mem:, file:/folder, redis://host:6379 or redis+unix:///socket", text);
}

static bool all_digits(const char *p, const char *end) {
    uint64_t value = 0;
    return kvfi_parse_u64(&value, p, (size_t)(end - p));
}

/* "redis://user:pa/ss@host": the password ends the authority early. Nothing of such a URL may be shown. */
static bool cut_by_password(const char *authority, const char *stop, const char *end) {
    if (last_at_sign(authority, stop) != NULL || last_at_sign(stop, end) == NULL || authority == stop) {
        return false;
    }
    if (last_at_sign(stop, until(stop, end, "?#")) != NULL) {
        return true; /* the "@" is in the path, where stores with a host have no use for one */
    }
    const char *colon = until(authority, stop, ":");
    if (*authority == '[' || colon == stop || until(authority, stop, ",") != stop) {
        return false;
    }
    return !all_digits(colon + 1, stop);
}

static kvf_status cut_authority(pieces *out, kvf_error *err, const char **p, const char *end) {
    const char *begin = *p;
    const char *stop = until(begin, end, "/?#");
    if (cut_by_password(begin, stop, end)) {
        return kvfi_fail(err, KVF_CONFIG,
                         "the store URL has one of / ? # in its user or password: write %%2F, %%3F or %%23 there");
    }
    const char *at = last_at_sign(begin, stop);
    if (at != NULL) {
        out->userinfo = span_of(begin, at);
        begin = at + 1;
    }
    out->hosts = span_of(begin, stop);
    *p = stop;
    return KVF_OK;
}

static bool is_scheme(span in, const char *scheme) {
    return in.len == strlen(scheme) && strncasecmp(in.at, scheme, in.len) == 0;
}

/* The text after "scheme:" begins with no slash. Its meaning depends on the scheme. */
static kvf_status refuse_relative(kvf_error *err, const char *text, span scheme) {
    if (is_scheme(scheme, "mem")) {
        return kvfi_fail(err, KVF_CONFIG, "%.100s: mem has no path: write mem: or mem:?max=1G", text);
    }
    if (is_scheme(scheme, "file") || is_scheme(scheme, "redis+unix")) {
        return kvfi_fail(err, KVF_CONFIG, "%.100s: the path must be absolute: write %.*s:/its/path", text,
                         (int)scheme.len, scheme.at);
    }
    return kvfi_fail(err, KVF_CONFIG, "%.100s: two slashes precede a host: write %.*s://host:port", text,
                     (int)scheme.len, scheme.at);
}

static kvf_status cut(pieces *out, kvf_error *err, const char *text, const char *url) {
    const char *end = url + strlen(url);
    KVFI_TRY(cut_scheme(&out->scheme, err, text, url));
    const char *p = url + out->scheme.len + 1;
    if (end - p >= 2 && p[0] == '/' && p[1] == '/') {
        p += 2;
        KVFI_TRY(cut_authority(out, err, &p, end));
    }
    const char *stop = until(p, end, "?#");
    out->path = span_of(p, stop);
    if (stop < end && *stop == '?') {
        p = stop + 1;
        stop = until(p, end, "#");
        out->query = span_of(p, stop);
    }
    if (stop < end) {
        return kvfi_fail(err, KVF_CONFIG, "%.100s: a # must be written %%23", text);
    }
    if (out->path.len > 0 && out->path.at[0] != '/') {
        if (all_digits(out->path.at, until(out->path.at, stop, "/?"))) {
            return kvfi_fail(err, KVF_CONFIG, "\"%.100s\" is not a store URL: did you mean redis://%.60s ?", text,
                             text);
        }
        return refuse_relative(err, text, out->scheme);
    }
    return KVF_OK;
}

/* ---- escapes */
/* kvfi_strndup with %XX decoded. `what` names the piece in a message. */
static kvf_status decode(char **out, kvf_error *err, const char *text, const char *what, span in) {
    char *copy = kvfi_alloc(in.len + 1);
    if (copy == NULL) {
        return kvfi_fail(err, KVF_NOMEM, "no memory for a store URL");
    }
    size_t num = 0;
    for (size_t i = 0; i < in.len; i++) {
        uint8_t byte = (uint8_t)in.at[i];
        if (byte == '%') {
            char hex[3] = {0};
            if (in.len - i > 2) {
                memcpy(hex, in.at + i + 1, 2);
            }
            if (!kvfi_unhex(&byte, hex, 1)) {
                kvfi_free(copy);
                return kvfi_fail(err, KVF_CONFIG,
                                 "%.100s: a %% in %s must be followed by two hexadecimal digits; write %%25 for %%",
                                 text, what);
            }
            i += 2;
        }
        if (byte < 0x20 || byte == 0x7f) {
            kvfi_free(copy);
            return kvfi_fail(err, KVF_CONFIG, "%.100s: a control character (byte %u) in %s", text, byte, what);
        }
        copy[num++] = (char)byte;
    }
    copy[num] = '\0';
    *out = copy;
    return KVF_OK;
}

/* "u:p@h1,u:p@h2" and "h1,u:p@h2": everything before the last "@" would be taken for one user and one password. */
static bool names_hosts(const char *scheme, span userinfo) {
    const char *end = userinfo.at + userinfo.len;
    const char *comma = until(userinfo.at, end, ",");
    bool list = strstr(scheme, "+cluster") != NULL || strstr(scheme, "+sentinel") != NULL;
    return comma < end && (list || until(userinfo.at, end, "@") < end || comma < until(userinfo.at, end, ":"));
}

static kvf_status take_userinfo(kvfi_url *url, kvf_error *err, span in) {
    if (in.at == NULL) {
        return KVF_OK;
    }
    const char *end = in.at + in.len;
    const char *colon = until(in.at, end, ":");
    if (names_hosts(url->scheme, in)) {
        return kvfi_fail(
            err, KVF_CONFIG,
            "the store URL has a user and a password for each host: write them once, before all hosts (write a comma "
            "in them as %%2C, an @ as %%40)");
    }
    if (in.len == 0 || (in.len == 1 && *colon == ':')) {
        return kvfi_fail(err, KVF_CONFIG, "%.100s: there is neither a user nor a password before the @", url->text);
    }
    if (colon > in.at) {
        KVFI_TRY(decode(&url->user, err, url->text, "the user", span_of(in.at, colon)));
    }
    if (colon < end) {
        KVFI_TRY(decode(&url->password, err, url->text, "the password", span_of(colon + 1, end)));
    }
    return KVF_OK;
}

/* ---- parameters ---- */
static kvfi_url_param *find(const kvfi_url *url, const char *name) {
    for (size_t i = 0; i < url->num_params; i++) {
        if (strcmp(url->params[i].name, name) == 0) {
            return &url->params[i];
        }
    }
    return NULL;
}

static kvf_status take_param(kvfi_url *url, kvf_error *err, span in) {
    const char *end = in.at + in.len;
    const char *equals = until(in.at, end, "=");
    if (equals == end || equals == in.at) {
        return kvfi_fail(err, KVF_CONFIG, "%.100s: \"%.*s\" after the ? is not name=value", url->text,
                         (int)(equals - in.at < 64 ? equals - in.at : 64), in.at);
    }
    kvfi_url_param *param = &url->params[url->num_params];
    KVFI_TRY(decode(&param->name, err, url->text, "the name of a parameter", span_of(in.at, equals)));
    if (find(url, param->name) != NULL) {
        kvf_status status = kvfi_fail(err, KVF_CONFIG, "%.100s: %.64s is given twice", url->text, param->name);
        kvfi_free(param->name);
        param->name = NULL;
        return status;
    }
    url->num_params++; /* from here on it is freed with the others */
    return decode(&param->value, err, url->text, "the value of a parameter", span_of(equals + 1, end));
}

static kvf_status take_query(kvfi_url *url, kvf_error *err, span in) {
    if (in.len == 0) {
        return KVF_OK;
    }
    const char *end = in.at + in.len;
    size_t num = 1;
    for (const char *p = in.at; p < end; p++) {
        num += *p == '&';
    }
    if (num > MAX_PARAMS) {
        return kvfi_fail(err, KVF_CONFIG, "%.100s: more than %u parameters", url->text, MAX_PARAMS);
    }
    url->params = kvfi_alloc_zero(num, sizeof *url->params);
    if (url->params == NULL) {
        return kvfi_fail(err, KVF_NOMEM, "no memory for a store URL");
    }
    for (const char *p = in.at; p <= end;) {
        const char *stop = until(p, end, "&");
        if (stop > p) {
            KVFI_TRY(take_param(url, err, span_of(p, stop)));
        }
        p = stop + 1;
    }
    return KVF_OK;
}

/* ---- the whole */
/* "file://cache/kv" and "redis+unix://run/redis.sock" lose their first folder to the host. */
static kvf_status check_local(const kvfi_url *url, kvf_error *err) {
    bool mem = strcmp(url->scheme, "mem") == 0;
    bool file = strcmp(url->scheme, "file") == 0;
    bool local = mem || file || strcmp(url->scheme, "redis+unix") == 0;
    if (local && url->hosts[0] != '\0') {
        return kvfi_fail(err, KVF_CONFIG, "%.100s: %s has no host, but the URL has \"%.64s\" there: write %s%s",
                         url->text, url->scheme, url->hosts, url->scheme, mem ? ":" : ":///absolute/path");
    }
    if (mem && url->path[0] != '\0') {
        return kvfi_fail(err, KVF_CONFIG, "%.100s: mem has no path: write mem: or mem:?max=1G", url->text);
    }
    if ((mem || file) && (url->user != NULL || url->password != NULL)) {
        return kvfi_fail(err, KVF_CONFIG, "%.100s: %s has no user and no password", url->text, url->scheme);
    }
    return KVF_OK;
}

static void lower_case(char *p) {
    for (; *p != '\0'; p++) {
        if (*p >= 'A' && *p <= 'Z') {
            *p = (char)(*p - 'A' + 'a');
        }
    }
}

static kvf_status parse(kvfi_url *url, kvf_error *err, const char *text) {
    pieces in = {0};
    KVFI_TRY(cut(&in, err, url->text, text));
    KVFI_TRY(decode(&url->scheme, err, url->text, "the scheme", in.scheme));
    lower_case(url->scheme);
    KVFI_TRY(take_userinfo(url, err, in.userinfo));
    KVFI_TRY(decode(&url->hosts, err, url->text, "the host", in.hosts));
    KVFI_TRY(decode(&url->path, err, url->text, "the path", in.path));
    KVFI_TRY(take_query(url, err, in.query));
    return check_local(url, err);
}

kvf_status kvfi_url_parse(kvfi_url **out, kvf_error *err, const char *text) {
    if (strnlen(text, MAX_URL_BYTES + 1) > MAX_URL_BYTES) {
        return kvfi_fail(err, KVF_CONFIG, "a store URL is longer than %u bytes", MAX_URL_BYTES);
    }
    kvfi_url *url = kvfi_alloc_zero(1, sizeof *url);
    if (url == NULL) {
        return kvfi_fail(err, KVF_NOMEM, "no memory for a store URL");
    }
    make_text(url->text, text);
    kvf_status status = parse(url, err, text);
    if (status != KVF_OK) {
        kvfi_url_free(url);
        return status;
    }
    *out = url;
    return KVF_OK;
}

void kvfi_url_free(kvfi_url *url) {
    if (url == NULL) {
        return;
    }
    if (url->password != NULL) {
        explicit_bzero(url->password, strlen(url->password));
    }
    for (size_t i = 0; i < url->num_params; i++) {
        kvfi_url_param *param = &url->params[i];
        if (param->value != NULL && is_secret_name((span){param->name, strlen(param->name)})) {
            explicit_bzero(param->value, strlen(param->value));
        }
        kvfi_free(url->params[i].name);
        kvfi_free(url->params[i].value);
    }
    kvfi_free(url->params);
    kvfi_free(url->scheme);
    kvfi_free(url->user);
    kvfi_free(url->password);
    kvfi_free(url->hosts);
    kvfi_free(url->path);
    kvfi_free(url);
}

/* ---- taking parameters ---- */

/* The value of a parameter, which counts as known from now on. NULL: it is absent. */
static const char *take(kvfi_url *url, const char *name) {
    kvfi_url_param *param = find(url, name);
    if (param == NULL) {
        return NULL;
    }
    param->taken = true;
    return param->value;
}

kvf_status kvfi_url_take_text(kvfi_url *url, kvf_error *err, const char *name, const char **out) {
    (void)err; /* any text will do: the caller judges it */
    const char *text = take(url, name);
    *out = text != NULL ? text : *out;
    return KVF_OK;
}

/* "64M" rather than 67108864. */
static const char *size_text(char out[24], uint64_t bytes) {
    static const char units[] = "\0KMGT";
    size_t unit = 0;
    while (unit < 4 && bytes >= 1024 && bytes % 1024 == 0) {
        bytes /= 1024;
        unit++;
    }
    snprintf(out, 24, "%llu%.1s", (unsigned long long)bytes, units + unit);
    return out;
}

kvf_status kvfi_url_take_size(kvfi_url *url, kvf_error *err, const char *name, uint64_t *out, uint64_t min,
                              uint64_t max) {
    const char *text = take(url, name);
    uint64_t value = 0;
    if (text == NULL) {
        return KVF_OK;
    }
    if (!kvfi_parse_size(&value, text, strlen(text)) || value < min || value > max) {
        char low[24], high[24];
        return kvfi_fail(err, KVF_CONFIG,
                         "%s=%.64s must be a size from %s to %s, in bytes or with the suffix K, M, G or T", name, text,
                         size_text(low, min), size_text(high, max));
    }
    *out = value;
    return KVF_OK;
}

kvf_status kvfi_url_take_u32(kvfi_url *url, kvf_error *err, const char *name, uint32_t *out, uint32_t min,
                             uint32_t max) {
    const char *text = take(url, name);
    uint64_t value = 0;
    if (text == NULL) {
        return KVF_OK;
    }
    if (!kvfi_parse_u64(&value, text, strlen(text)) || value < min || value > max) {
        return kvfi_fail(err, KVF_CONFIG, "%s=%.64s must be a whole number from %u to %u", name, text, min, max);
    }
    *out = (uint32_t)value;
    return KVF_OK;
}

static const char *params_of(const char *scheme) {
    return strcmp(scheme, "mem") == 0    ? "max"
           : strcmp(scheme, "file") == 0 ? "max, ttl, tenant, tenant_max"
                                         : "ttl, prefix, db, budget and more, which docs/stores-redis.md lists";
}

kvf_status kvfi_url_all_taken(const kvfi_url *url, kvf_error *err) {
    for (size_t i = 0; i < url->num_params; i++) {
        if (!url->params[i].taken) {
            /* Without its value, which may be a secret under an unexpected name. */
            return kvfi_fail(err, KVF_CONFIG, "%s stores have no parameter \"%.64s\"; they have %s", url->scheme,
                             url->params[i].name, params_of(url->scheme));
        }
    }
    return KVF_OK;
}

/* ---- hosts */
/* The entry number `index` of a list with commas; false after its end. */
static bool entry(span *out, const char *hosts, size_t index) {
    const char *end = hosts + strlen(hosts);
    const char *p = hosts;
    for (size_t i = 0;; i++) {
        const char *stop = until(p, end, ",");
        if (i == index) {
            *out = span_of(p, stop);
            return true;
        }
        if (stop == end) {
            return false;
        }
        p = stop + 1;
    }
}

/* Divides an entry into host and port. A missing port has length 0 and `at` NULL. False: neither form. */
static bool cut_entry(span *host, span *port, span in) {
    const char *end = in.at + in.len;
    const char *stop;
    *port = (span){NULL, 0};
    if (in.len > 0 && in.at[0] == '[') {
        const char *bracket = until(in.at, end, "]");
        if (bracket == end) {
            return false;
        }
        *host = span_of(in.at + 1, bracket);
        stop = bracket + 1;
    } else {
        stop = until(in.at, end, ":");
        *host = span_of(in.at, stop);
        if (memchr(in.at, ' ', in.len) != NULL || memchr(in.at, ']', in.len) != NULL) {
            return false;
        }
    }
    if (stop < end) {
        if (*stop != ':') {
            return false;
        }
        *port = span_of(stop + 1, end);
    }
    return host->len > 0 && host->len < 256;
}

static bool is_bare_ipv6(span in) {
    const char *end = in.at + in.len;
    const char *colon = until(in.at, end, ":");
    return in.at[0] != '[' && colon < end && until(colon + 1, end, ":") < end;
}

kvf_status kvfi_url_host(const kvfi_url *url, kvf_error *err, size_t index, char host[256], uint16_t *port,
                         uint16_t default_port) {
    span in, name, number;
    if (url->hosts[0] == '\0') {
        return kvfi_fail(err, KVF_CONFIG, "%.100s names no host: write %s://host:%u", url->text, url->scheme,
                         default_port);
    }
    if (!entry(&in, url->hosts, index)) {
        return kvfi_fail(err, KVF_MISS, "%.100s has no host number %zu", url->text, index + 1);
    }
    if (is_bare_ipv6(in)) {
        return kvfi_fail(err, KVF_CONFIG, "%.100s: an IPv6 address stands in brackets, as in [::1]:%u", url->text,
                         default_port);
    }
    if (!cut_entry(&name, &number, in)) {
        return kvfi_fail(err, KVF_CONFIG, "%.100s: \"%.*s\" is not host, host:port or [IPv6]:port", url->text,
                         (int)(in.len < 64 ? in.len : 64), in.at);
    }
    uint64_t value = default_port;
    if (number.at != NULL) {
        if (!kvfi_parse_u64(&value, number.at, number.len) || value < 1 || value > UINT16_MAX) {
            return kvfi_fail(err, KVF_CONFIG, "%.100s: the port must be a number from 1 to 65535", url->text);
        }
    }
    memcpy(host, name.at, name.len);
    host[name.len] = '\0';
    *port = (uint16_t)value;
    return KVF_OK;
}
