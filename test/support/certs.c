/* SPDX-License-Identifier: Apache-2.0
 *
 * Makes certificates for the TLS tests, with libcrypto.
 */
#include "support/certs.h"

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/kit.h"

#define HOUR_S 3600L

typedef struct issuer {
    X509 *cert;
    EVP_PKEY *key;
} issuer;

typedef struct certs {
    kvft_certs base; /* the first member */
    issuer ca, other;
    long serial;
} certs;

static void must(bool good, const char *what) {
    if (!good) {
        fprintf(stderr, "the certificates of the test: %s\n", what);
        abort();
    }
}

static void extend(X509 *cert, X509 *issuer_cert, int nid, const char *value) {
    X509V3_CTX context;
    X509V3_set_ctx(&context, issuer_cert, cert, NULL, NULL, 0);
    X509_EXTENSION *extension = X509V3_EXT_conf_nid(NULL, &context, nid, value);
    must(extension != NULL && X509_add_ext(cert, extension, -1) == 1, value);
    X509_EXTENSION_free(extension);
}

/* `by`: NULL for one that signs itself, a CA. */
static issuer sign(certs *c, const char *name, const issuer *by, const char *names, long from_s, long to_s) {
    issuer made = {.cert = X509_new(), .key = EVP_EC_gen("P-256")};
    must(made.cert != NULL && made.key != NULL, "no memory");
    X509_NAME *subject = X509_get_subject_name(made.cert);
    X509 *signer = by != NULL ? by->cert : made.cert;
    X509_set_version(made.cert, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(made.cert), ++c->serial);
    X509_gmtime_adj(X509_getm_notBefore(made.cert), from_s);
    X509_gmtime_adj(X509_getm_notAfter(made.cert), to_s);
    X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_UTF8, (const unsigned char *)name, -1, -1, 0);
    X509_set_issuer_name(made.cert, X509_get_subject_name(signer));
    X509_set_pubkey(made.cert, made.key);
    extend(made.cert, signer, NID_basic_constraints, by == NULL ? "critical,CA:TRUE" : "critical,CA:FALSE");
    if (names != NULL) {
        extend(made.cert, signer, NID_subject_alt_name, names);
    }
    must(X509_sign(made.cert, by != NULL ? by->key : made.key, EVP_sha256()) > 0, "not signed");
    return made;
}

static void drop(issuer *made) {
    X509_free(made->cert);
    EVP_PKEY_free(made->key);
}

static void write_pem(const char *path, const issuer *made, bool with_key, const char *password) {
    FILE *out = fopen(path, "w");
    must(out != NULL && PEM_write_X509(out, made->cert) == 1, path);
    if (with_key) {
        const EVP_CIPHER *cipher = password != NULL ? EVP_aes_128_cbc() : NULL;
        int len = password != NULL ? (int)strlen(password) : 0;
        must(PEM_write_PKCS8PrivateKey(out, made->key, cipher, password, len, NULL, NULL) == 1, path);
    }
    must(fclose(out) == 0, path);
}

kvft_certs *kvft_certs_new(void) {
    certs *c = calloc(1, sizeof *c);
    must(c != NULL, "no memory");
    snprintf(c->base.dir, sizeof c->base.dir, "%s/kvft-certs-XXXXXX", kvft_temp_root());
    must(mkdtemp(c->base.dir) != NULL, "no temporary folder");
    c->ca = sign(c, "kvferry test CA", NULL, NULL, -HOUR_S, 24 * HOUR_S);
    c->other = sign(c, "another CA", NULL, NULL, -HOUR_S, 24 * HOUR_S);
    snprintf(c->base.ca, sizeof c->base.ca, "%s/ca.crt", c->base.dir);
    snprintf(c->base.other_ca, sizeof c->base.other_ca, "%s/other-ca.crt", c->base.dir);
    write_pem(c->base.ca, &c->ca, false, NULL);
    write_pem(c->base.other_ca, &c->other, false, NULL);
    return &c->base;
}

void kvft_certs_free(kvft_certs *base) {
    certs *c = (certs *)(void *)base;
    char command[128];
    if (c != NULL) {
        snprintf(command, sizeof command, "rm -rf '%s'", base->dir);
        must(strstr(base->dir, "/kvft-certs-") != NULL && system(command) == 0, "the folder was not removed");
        drop(&c->ca);
        drop(&c->other);
        free(c);
    }
}

const char *kvft_certs_make(kvft_certs *base, const char *name, const char *names, long from_s, long to_s, int other,
                            const char *password) {
    static char paths[4][128];
    static unsigned next;
    certs *c = (certs *)(void *)base;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s.pem", base->dir, name);
    issuer made = sign(c, name, other ? &c->other : &c->ca, names, from_s, to_s);
    write_pem(path, &made, true, password);
    drop(&made);
    return path;
}

const char *kvft_certs_server(kvft_certs *base) {
    return kvft_certs_make(base, "server", "DNS:localhost,IP:127.0.0.1,IP:::1", -HOUR_S, 24 * HOUR_S, 0, NULL);
}
