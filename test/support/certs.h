/* SPDX-License-Identifier: Apache-2.0
 *
 * Certificates for tests, made for each run in a temporary folder: a CA, and what it signed.
 */
#ifndef KVFT_CERTS_H
#define KVFT_CERTS_H

typedef struct kvft_certs {
    char dir[64];
    char ca[96], other_ca[96]; /* files of PEM */
} kvft_certs;

kvft_certs *kvft_certs_new(void);
void kvft_certs_free(kvft_certs *);
/* A certificate and its key in one file, NAME.pem of the folder; returns its path (static buffer of four). `names` is
 * what stands behind subjectAltName, e.g. "DNS:localhost,IP:127.0.0.1"; NULL: none (a client). Valid from `from_s` to
 * `to_s`, counted from now. `other`: signed by the other CA. `password`: of the key, or NULL. */
const char *kvft_certs_make(kvft_certs *, const char *name, const char *names, long from_s, long to_s, int other,
                            const char *password);
/* For servers of this host, valid now. */
const char *kvft_certs_server(kvft_certs *);

#endif
