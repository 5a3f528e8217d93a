/* SPDX-License-Identifier: Apache-2.0
 *
 * TLS for a connection: OpenSSL, with I/O through the system table like everything else (a BIO of ours over readv and
 * writev). It never waits except in the handshake, which has a deadline. kvfi_tls_send and kvfi_tls_recv take the place
 * of writev and readv.
 *
 * Bodies are encrypted from and decrypted into the caller's memory. OpenSSL's own memory does not come from kvfi_alloc.
 */
#ifndef KVFI_REDIS_TLS_H
#define KVFI_REDIS_TLS_H

#include <stdatomic.h>

#include "base/base.h"

/* The contents of the URL. */
typedef struct kvfi_tls_conf {
    bool on;
    bool verify;                                     /* verify the chain of the server's certificate */
    bool check_name;                                 /* and that it is for this server */
    const char *ca_file, *ca_dir;                    /* both NULL: the system's */
    const char *cert_file, *key_file, *key_password; /* of the client; NULL: none, in cert_file, none */
    /* instead of each server's address, for SNI and verification; or NULL */
    const char *server_name;
} kvfi_tls_conf;

typedef struct kvfi_tls kvfi_tls;           /* trust and identity of a store. Used by all threads at once. */
typedef struct kvfi_tls_link kvfi_tls_link; /* one connection */

/* Reads all files. KVF_CONFIG (which one, and why), KVF_NOMEM. The conf's strings must outlive it. */
kvf_status kvfi_tls_open(kvfi_tls **out, kvf_error *, const kvfi_tls_conf *);
void kvfi_tls_close(kvfi_tls *); /* NULL is fine */

/* A TLS peer: its name for SNI and for the verification of its certificate, and a session to resume. */
typedef struct kvfi_tls_peer {
    kvfi_tls *tls; /* NULL: no TLS */
    const char *name;
    _Atomic(void *) session; /* the next connection takes it; the server sends new ones */
} kvfi_tls_peer;
void kvfi_tls_forget(kvfi_tls_peer *);

/* The fault of a link that failed. */
typedef struct kvfi_tls_trouble {
    bool config; /* the operator must change something */
    bool mute;   /* the server has not sent a byte */
    char what[200];
} kvfi_tls_trouble;

/* The handshake on a connected socket. KVF_WHY_UNREACHABLE and KVF_WHY_NOMEM with *trouble. */
kvf_reason kvfi_tls_connect(kvfi_tls_link **out, kvfi_tls_trouble *, kvfi_tls_peer *, int fd, int64_t deadline_us);
void kvfi_tls_free(kvfi_tls_link *); /* NULL is fine; the socket stays open */

/* As writev and readv on a non-blocking socket. -1 with EPROTO: kvfi_tls_trouble_of explains. After EAGAIN the same
 * bytes must be offered again; more may follow them. */
ssize_t kvfi_tls_send(kvfi_tls_link *, const struct iovec *, size_t num);
ssize_t kvfi_tls_recv(kvfi_tls_link *, const struct iovec *, size_t num);
/* Data may have arrived that poll does not show: receive before waiting. True once after each kvfi_tls_recv. */
bool kvfi_tls_take_more(kvfi_tls_link *);
const kvfi_tls_trouble *kvfi_tls_trouble_of(const kvfi_tls_link *); /* what[0] == 0: none */

bool kvfi_tls_is_resumed(const kvfi_tls_link *); /* the handshake was an abbreviated one */

/* Does the peer of a fresh socket answer a TLS handshake, with whatever result? */
bool kvfi_tls_is_spoken(int fd, int64_t deadline_us);

#endif
