/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads the parameters of a Redis URL into kvfi_redis_conf.
 */
#include "redis/wire/conf.h"

#define MAX_DB      1000000u
#define LARGE_VALUE ((uint64_t)2 << 20)

static bool is_plain(const char *text, size_t max) {
    size_t len = strlen(text);
    return len > 0 && len <= max &&
           strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-:") == len;
}

/* redis://host:port/7 */
static kvf_status read_tcp(kvfi_redis_conf *conf, kvf_error *err, const kvfi_url *url) {
    KVFI_TRY(kvfi_url_host(url, err, 0, conf->server.host, &conf->server.port, 6379));
    if (strchr(url->hosts, ',') != NULL) {
        return kvfi_fail(
            err, KVF_CONFIG,
            "%.100s: %s:// has one host: write %s+cluster:// for the nodes of a Cluster, %s+sentinel:// for "
            "sentinels",
            url->text, url->scheme, url->scheme, url->scheme);
    }
    const char *db = url->path[0] == '/' ? url->path + 1 : url->path;
    uint64_t number = 0;
    if (db[0] != '\0' && (!kvfi_parse_u64(&number, db, strlen(db)) || number > MAX_DB)) {
        return kvfi_fail(err, KVF_CONFIG,
                         "%s: what follows the host is the number of a database, as in redis://host:6379/0", url->text);
    }
    conf->db = (uint32_t)number;
    return KVF_OK;
}

/* redis+unix:///run/redis.sock?db=7 */
static kvf_status read_unix(kvfi_redis_conf *conf, kvf_error *err, const kvfi_url *url) {
    if (url->hosts[0] != '\0' || url->path[0] != '/') {
        return kvfi_fail(err, KVF_CONFIG,
                         "%s: a unix socket is named by its whole path, as in redis+unix:///run/redis.sock", url->text);
    }
    if (strlen(url->path) > 107) {
        return kvfi_fail(err, KVF_CONFIG, "%s: the path of a unix socket has at most 107 bytes", url->text);
    }
    conf->server.path = url->path;
    return KVF_OK;
}

/* redis+cluster://host:port,host:port */
static kvf_status read_cluster(kvfi_redis_conf *conf, kvf_error *err, const kvfi_url *url) {
    conf->kind = KVFI_REDIS_CLUSTER;
    KVFI_TRY(kvfi_url_host(url, err, 0, conf->server.host, &conf->server.port, 6379));
    if (url->path[0] != '\0' && strcmp(url->path, "/") != 0 && strcmp(url->path, "/0") != 0) {
        return kvfi_fail(err, KVF_CONFIG, "%s: a Cluster has one database only, 0: nothing follows the hosts",
                         url->text);
    }
    return KVF_OK;
}

/* redis+sentinel://host:port,host:port/name */
static kvf_status read_sentinel(kvfi_redis_conf *conf, kvf_error *err, kvfi_url *url) {
    conf->kind = KVFI_REDIS_SENTINEL;
    KVFI_TRY(kvfi_url_host(url, err, 0, conf->server.host, &conf->server.port, 26379));
    conf->master = url->path[0] == '/' ? url->path + 1 : url->path;
    KVFI_TRY(kvfi_url_take_text(url, err, "sentinel_user", &conf->sentinel_user));
    KVFI_TRY(kvfi_url_take_text(url, err, "sentinel_password", &conf->sentinel_password));
    if (!is_plain(conf->master, 200)) {
        return kvfi_fail(
            err, KVF_CONFIG,
            "%s: the name of the master follows the sentinels, as in redis+sentinel://host1,host2/mymaster", url->text);
    }
    return KVF_OK;
}

/* Every entry of a list of hosts must be valid, also those that are not used first. */
static kvf_status check_hosts(kvf_error *err, const kvfi_url *url, uint16_t default_port) {
    kvf_status status = KVF_OK;
    for (size_t i = 0; status == KVF_OK; i++) {
        char host[256];
        uint16_t port;
        kvf_error own = {.status = KVF_OK};
        status = kvfi_url_host(url, &own, i, host, &port, default_port);
        if (status == KVF_CONFIG) {
            return kvfi_fail(err, status, "%s", own.what);
        }
    }
    return KVF_OK;
}

static kvf_status take_yes(bool *out, kvf_error *err, kvfi_url *url, const char *name, const char *yes,
                           const char *no) {
    const char *text = *out ? yes : no;
    KVFI_TRY(kvfi_url_take_text(url, err, name, &text));
    *out = strcmp(text, yes) == 0;
    return *out || strcmp(text, no) == 0
               ? KVF_OK
               : kvfi_fail(err, KVF_CONFIG, "%.100s: %s= is %s or %s", url->text, name, yes, no);
}

/* Of rediss://...: the names are those of redis-py. */
static kvf_status read_tls(kvfi_redis_conf *conf, kvf_error *err, kvfi_url *url) {
    kvfi_tls_conf *tls = &conf->tls_conf;
    *tls = (kvfi_tls_conf){.on = true, .verify = true, .check_name = true};
    KVFI_TRY(kvfi_url_take_text(url, err, "ssl_ca_certs", &tls->ca_file));
    KVFI_TRY(kvfi_url_take_text(url, err, "ssl_ca_path", &tls->ca_dir));
    KVFI_TRY(kvfi_url_take_text(url, err, "ssl_certfile", &tls->cert_file));
    KVFI_TRY(kvfi_url_take_text(url, err, "ssl_keyfile", &tls->key_file));
    KVFI_TRY(kvfi_url_take_text(url, err, "ssl_password", &tls->key_password));
    KVFI_TRY(kvfi_url_take_text(url, err, "ssl_server_hostname", &tls->server_name));
    KVFI_TRY(take_yes(&tls->verify, err, url, "ssl_cert_reqs", "required", "none"));
    KVFI_TRY(take_yes(&tls->check_name, err, url, "ssl_check_hostname", "true", "false"));
    if (tls->cert_file == NULL && (tls->key_file != NULL || tls->key_password != NULL)) {
        return kvfi_fail(err, KVF_CONFIG, "%.100s: a key needs its certificate beside it: ssl_certfile=", url->text);
    }
    if (tls->server_name != NULL && !is_plain(tls->server_name, 255)) {
        return kvfi_fail(err, KVF_CONFIG, "%.100s: ssl_server_hostname= is the name of a host", url->text);
    }
    if (!tls->verify) {
        kvfi_log(
            KVF_LOG_WARN,
            "%s: the server's certificate is not verified (ssl_cert_reqs=none): anybody on the network path can read "
            "and change everything",
            url->text);
    } else if (!tls->check_name) {
        kvfi_log(KVF_LOG_WARN, "%s: the name in the server's certificate is not checked (ssl_check_hostname=false)",
                 url->text);
    }
    return KVF_OK;
}

static kvf_status read_names(kvfi_redis_conf *conf, kvf_error *err, kvfi_url *url) {
    conf->prefix = "kvf1";
    conf->name = "kvferry";
    KVFI_TRY(kvfi_url_take_text(url, err, "prefix", &conf->prefix));
    KVFI_TRY(kvfi_url_take_text(url, err, "name", &conf->name));
    if (!is_plain(conf->prefix, KVFI_REDIS_MAX_PREFIX)) {
        return kvfi_fail(err, KVF_CONFIG, "%s: prefix= takes 1 to %u of a-z A-Z 0-9 . _ - :", conf->text,
                         KVFI_REDIS_MAX_PREFIX);
    }
    if (conf->name[0] != '\0' && !is_plain(conf->name, 64)) {
        return kvfi_fail(err, KVF_CONFIG, "%s: name= takes up to 64 of a-z A-Z 0-9 . _ - :", conf->text);
    }
    return KVF_OK;
}

/* The best measured values on one host with a server of one thread (docs/stores-redis.md): on a unix socket one
 * connection keeps it busy. Over TCP two are better for loads of values near 1 MiB, and worse for large ones, which
 * then compete for the server's cache. A save has one connection. An explicit conns= overrides this. */
static kvf_status read_conns(kvfi_redis_conf *conf, kvf_error *err, kvfi_url *url) {
    uint32_t asked = 0;
    KVFI_TRY(kvfi_url_take_u32(url, err, "conns", &asked, 1, KVFI_REDIS_MAX_CONNS));
    bool one_will_do = conf->server.path != NULL ||
                       conf->kind == KVFI_REDIS_CLUSTER; /* the other shards use the rest of the bandwidth */
    conf->conns = asked > 0 ? asked : one_will_do ? 1 : 2;
    conf->save_conns = asked > 0 ? asked : 1;
    conf->share_below = asked > 0 ? UINT64_MAX : LARGE_VALUE;
    return KVF_OK;
}

/* After the host or as a parameter, but not both. */
static kvf_status read_db(kvfi_redis_conf *conf, kvf_error *err, kvfi_url *url) {
    const char *given = NULL;
    KVFI_TRY(kvfi_url_take_text(url, err, "db", &given));
    if (given != NULL && conf->kind == KVFI_REDIS_ONE && conf->server.path == NULL && url->path[0] != '\0' &&
        url->path[1] != '\0') {
        return kvfi_fail(err, KVF_CONFIG, "%.100s: the database is given twice, after the host and as db=", url->text);
    }
    return kvfi_url_take_u32(url, err, "db", &conf->db, 0, MAX_DB);
}

/* Only without TLS: with it nothing can be lent. */
static kvf_status read_lend(kvfi_redis_conf *conf, kvf_error *err, kvfi_url *url) {
    const char *given = NULL;
    KVFI_TRY(kvfi_url_take_text(url, err, "lend", &given));
    if (given != NULL && conf->tls_conf.on) {
        return kvfi_fail(err, KVF_CONFIG, "%.100s: nothing is lent over TLS: leave out lend=", url->text);
    }
    return take_yes(&conf->lend, err, url, "lend", "true", "false");
}

static kvf_status read_numbers(kvfi_redis_conf *conf, kvf_error *err, kvfi_url *url) {
    KVFI_TRY(read_conns(conf, err, url));
    KVFI_TRY(read_db(conf, err, url));
    KVFI_TRY(read_lend(conf, err, url));
    KVFI_TRY(kvfi_url_take_u32(url, err, "ttl", &conf->ttl_s, 0, 100 * 365 * 86400u));
    KVFI_TRY(kvfi_url_take_u32(url, err, "connect_ms", &conf->connect_ms, 1, 600000));
    KVFI_TRY(kvfi_url_take_u32(url, err, "stall_ms", &conf->stall_ms, 1, 600000));
    KVFI_TRY(kvfi_url_take_size(url, err, "window", &conf->window, 4096, (uint64_t)1 << 32));
    KVFI_TRY(kvfi_url_take_size(url, err, "budget", &conf->budget, 1 << 20, (uint64_t)1 << 50));
    KVFI_TRY(take_yes(&conf->allow_noeviction, err, url, "allow_noeviction", "true", "false"));
    /* A header must fit into the first part, and a server takes 512 MiB by default. */
    return kvfi_url_take_size(url, err, "part", &conf->part, 4096, (uint64_t)512 << 20);
}

kvf_status kvfi_redis_conf_read(kvfi_redis_conf *out, kvf_error *err, kvfi_url *url) {
    kvfi_redis_conf conf = {.user = url->user,
                            .password = url->password,
                            .text = url->text,
                            .ttl_s = 3600,
                            .connect_ms = 1000,
                            .stall_ms = 250,
                            .lend = true,
                            .window = 1 << 20,
                            .part = (4 << 20) - 4096};
    /* rediss+cluster is redis+cluster with TLS */
    const char *scheme = url->scheme;
    bool tls = strncmp(scheme, "rediss", 6) == 0;
    const char *kind = scheme + (tls ? 6 : 5);
    if (tls) {
        KVFI_TRY(read_tls(&conf, err, url));
    }
    if (strcmp(kind, "+unix") == 0) {
        KVFI_TRY(read_unix(&conf, err, url));
    } else if (strcmp(kind, "+cluster") == 0) {
        KVFI_TRY(read_cluster(&conf, err, url));
        KVFI_TRY(check_hosts(err, url, 6379));
    } else if (strcmp(kind, "+sentinel") == 0) {
        KVFI_TRY(read_sentinel(&conf, err, url));
        KVFI_TRY(check_hosts(err, url, 26379));
    } else {
        KVFI_TRY(read_tcp(&conf, err, url));
    }
    KVFI_TRY(read_names(&conf, err, url));
    KVFI_TRY(read_numbers(&conf, err, url));
    KVFI_TRY(kvfi_url_all_taken(url, err));
    if (conf.kind == KVFI_REDIS_CLUSTER && conf.db > 0) {
        return kvfi_fail(err, KVF_CONFIG, "%s: a Cluster has one database only, 0", url->text);
    }
    *out = conf;
    return KVF_OK;
}
