/* SPDX-License-Identifier: Apache-2.0
 *
 * Store URLs: one parser. Parameters are taken by name, so an unknown one is an error, never ignored.
 */
#ifndef KVFI_URL_H
#define KVFI_URL_H

#include "base/base.h"

typedef struct kvfi_url_param {
    char *name, *value;
    bool taken;
} kvfi_url_param;

/* scheme://[user[:password]@]host[:port][,host:port ...]/path?name=value&... ; percent escapes are decoded. Also "mem:"
 * and "file:/path". */
typedef struct kvfi_url {
    char *scheme, *user, *password; /* user and password: NULL when absent */
    char *hosts;                    /* the text between // (or @) and the path, IPv6 brackets kept; "" when absent */
    char *path;                     /* with its leading slash; "" when absent */
    kvfi_url_param *params;
    size_t num_params;
    char text[256];  /* the URL without its password, for people */
    bool must_exist; /* set by the opener: what is not there is not created (KVF_OPEN_EXISTING) */
} kvfi_url;

kvf_status kvfi_url_parse(kvfi_url **out, kvf_error *, const char *text);
void kvfi_url_free(kvfi_url *);

/* Take a parameter. An absent one leaves *out as it was. KVF_CONFIG with the name, the value and what is allowed. */
kvf_status kvfi_url_take_text(kvfi_url *, kvf_error *, const char *name, const char **out);
kvf_status kvfi_url_take_size(kvfi_url *, kvf_error *, const char *name, uint64_t *out, uint64_t min, uint64_t max);
kvf_status kvfi_url_take_u32(kvfi_url *, kvf_error *, const char *name, uint32_t *out, uint32_t min, uint32_t max);
/* KVF_CONFIG if nobody took a parameter. */
kvf_status kvfi_url_all_taken(const kvfi_url *, kvf_error *);

/* host[:port] or [v6]:port from the first entry of `hosts`. The rest (after a comma) is for topologies. */
kvf_status kvfi_url_host(const kvfi_url *, kvf_error *, size_t index, char host[256], uint16_t *port,
                         uint16_t default_port);

#endif
