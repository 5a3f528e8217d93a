/* SPDX-License-Identifier: Apache-2.0
 *
 * The contents of a redis URL. docs/stores-redis.md explains the parameters.
 */
#ifndef KVFI_REDIS_CONF_H
#define KVFI_REDIS_CONF_H

#include "redis/wire/conn.h"
#include "tier/url.h"

#define KVFI_REDIS_MAX_CONNS  32u
#define KVFI_REDIS_MAX_LANE   (4 * KVFI_REDIS_MAX_CONNS)
#define KVFI_REDIS_MAX_PREFIX 64u

typedef enum kvfi_redis_kind { KVFI_REDIS_ONE, KVFI_REDIS_CLUSTER, KVFI_REDIS_SENTINEL } kvfi_redis_kind;

typedef struct kvfi_redis_conf {
    kvfi_redis_kind kind;
    kvfi_endpoint server; /* of several: the first that the URL names */
    kvfi_tls_conf tls_conf;
    kvfi_tls *tls;      /* NULL: no TLS. Of the tier. */
    const char *master; /* the name that the sentinels know it by */
    const char *sentinel_user, *sentinel_password;
    const char *user, *password; /* NULL when absent; these and `name`, `prefix` belong to the URL or are constants */
    const char *name;            /* for CLIENT SETNAME; "" = none */
    const char *prefix;          /* of every key */
    const char *text;            /* the URL without its password, for messages */
    uint32_t db;
    uint32_t conns;       /* that one load uses at once */
    uint32_t save_conns;  /* that one save uses */
    uint64_t share_below; /* values of this length and more use only one of them */
    uint32_t ttl_s;       /* 0 = keys do not expire */
    uint32_t connect_ms, stall_ms;
    uint64_t window; /* bytes requested and not yet read, of one connection */
    uint64_t part;   /* the longest value that one key holds */
    uint64_t budget; /* for a server without maxmemory: nothing more is stored once it holds this much; 0 = not given */
    bool allow_noeviction;
    bool lend;       /* lend pages to a unix socket (lend.h) */
    kvfi_pace *pace; /* of all servers of the store; NULL: not measured */
} kvfi_redis_conf;

/* The strings point into the URL, which must outlive them. Takes every parameter. KVF_CONFIG names the wrong one. */
kvf_status kvfi_redis_conf_read(kvfi_redis_conf *out, kvf_error *err, kvfi_url *url);

#endif
