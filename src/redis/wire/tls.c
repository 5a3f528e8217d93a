/* SPDX-License-Identifier: Apache-2.0
 *
 * TLS for a connection, by OpenSSL over the system table.
 */
#include "redis/wire/tls.h"

#include "base/interrupt.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <stdio.h>

#define MAX_PEM_BYTES ((off_t)4 << 20)
#define READ_BUFFER   (64 << 10) /* what one read of the socket takes: a few records */

struct kvfi_tls {
    kvfi_tls_conf conf;
    SSL_CTX *ctx;
    BIO_METHOD *method;
};

struct kvfi_tls_link {
    kvfi_tls_peer *peer;
    SSL *ssl;
    int fd;
    int error;  /* of the last system call that really failed */
    bool ended; /* the server has closed its side */
    bool more;
    bool greeted; /* the first byte has come, and it is: */
    uint8_t first;
    bool heard;  /* data came, so the handshake is complete for the server, too */
    bool wanted; /* the server asked for a certificate, and we have none */
    kvfi_tls_trouble trouble;
};

/* ---- the socket, for OpenSSL ---- */

static int bio_write(BIO *bio, const char *data, int len) {
    kvfi_tls_link *l = BIO_get_data(bio);
    struct iovec iov = {(void *)(uintptr_t)data, (size_t)len}; /* writev does not write to it */
    ssize_t n;
    BIO_clear_retry_flags(bio);
    do {
        n = kvfi_sys->writev(l->fd, &iov, 1);
    } while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        BIO_set_retry_write(bio);
    } else if (n < 0) {
        l->error = errno;
    }
    return (int)n;
}

static int bio_read(BIO *bio, char *data, int len) {
    kvfi_tls_link *l = BIO_get_data(bio);
    struct iovec iov = {data, (size_t)len};
    ssize_t n;
    BIO_clear_retry_flags(bio);
    do {
        n = kvfi_sys->readv(l->fd, &iov, 1);
    } while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        BIO_set_retry_read(bio);
    } else if (n < 0) {
        l->error = errno;
    } else if (n == 0) {
        l->ended = true;
    } else if (!l->greeted) {
        l->greeted = true;
        l->first = (uint8_t)data[0];
    }
    return (int)n;
}

static long bio_ctrl(BIO *bio, int command, long number, void *pointer) {
    (void)number;
    (void)pointer;
    const kvfi_tls_link *l = BIO_get_data(bio);
    return command == BIO_CTRL_FLUSH || (command == BIO_CTRL_EOF && l->ended);
}

/* ---- trouble ---- */

static void note(kvfi_tls_link *l, bool config, const char *format, ...) __attribute__((format(printf, 3, 4)));

static void note(kvfi_tls_link *l, bool config, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(l->trouble.what, sizeof l->trouble.what, format, args);
    va_end(args);
    l->trouble.config = config;
}

/* The first names that a certificate is for. */
static void names_of(char out[80], X509 *cert) {
    GENERAL_NAMES *names = X509_get_ext_d2i(cert, NID_subject_alt_name, NULL, NULL);
    size_t len = 0;
    out[0] = '\0';
    for (int i = 0; i < sk_GENERAL_NAME_num(names) && len < 60; i++) {
        const GENERAL_NAME *name = sk_GENERAL_NAME_value(names, i);
        char text[64] = "";
        if (name->type == GEN_DNS) {
            snprintf(text, sizeof text, "%.*s", ASN1_STRING_length(name->d.dNSName),
                     ASN1_STRING_get0_data(name->d.dNSName));
        } else if (name->type == GEN_IPADD) {
            int family = ASN1_STRING_length(name->d.iPAddress) == 4 ? AF_INET : AF_INET6;
            (void)inet_ntop(family, ASN1_STRING_get0_data(name->d.iPAddress), text, sizeof text);
        }
        int num = text[0] == '\0' ? 0 : snprintf(out + len, 80 - len, "%s%s", len > 0 ? ", " : "", text);
        len = len + (size_t)num < 79 ? len + (size_t)num : 79;
    }
    GENERAL_NAMES_free(names);
    if (len == 0) {
        (void)X509_NAME_get_text_by_NID(X509_get_subject_name(cert), NID_commonName, out, 80);
    }
}

static void date_of(char out[24], const ASN1_TIME *when) {
    struct tm t = {0};
    if (ASN1_TIME_to_tm(when, &t) != 1 || strftime(out, 24, "%Y-%m-%d %H:%M", &t) == 0) {
        snprintf(out, 24, "an unknown date");
    }
}

/* Explains invalid certificates to the operator. Recorded while the chain is verified: later they are not kept. */
static int see_verdict(int good, X509_STORE_CTX *store) {
    if (good == 1) {
        return 1;
    }
    SSL *ssl = X509_STORE_CTX_get_ex_data(store, SSL_get_ex_data_X509_STORE_CTX_idx());
    kvfi_tls_link *l = SSL_get_app_data(ssl);
    X509 *cert = X509_STORE_CTX_get_current_cert(store);
    int verdict = X509_STORE_CTX_get_error(store);
    const char *whose =
        X509_STORE_CTX_get_error_depth(store) == 0 ? "the server's certificate" : "the certificate of a CA";
    char text[80] = "", date[24];
    switch (verdict) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
        date_of(date, X509_get0_notAfter(cert));
        note(l, true, "%s expired on %s UTC: renew it on the server, or set this host's clock", whose, date);
        break;
    case X509_V_ERR_CERT_NOT_YET_VALID:
        date_of(date, X509_get0_notBefore(cert));
        note(l, true, "%s is not valid before %s UTC: is the clock of this host right?", whose, date);
        break;
    case X509_V_ERR_HOSTNAME_MISMATCH:
    case X509_V_ERR_IP_ADDRESS_MISMATCH:
        names_of(text, cert);
        note(l, true,
             "the server's certificate is for %.64s, not for %.48s: connect by such a name, or give it as "
             "ssl_server_hostname=",
             text, l->peer->name);
        break;
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
        (void)X509_NAME_get_text_by_NID(X509_get_issuer_name(cert), NID_commonName, text, sizeof text);
        note(l, true,
             "the server's certificate is from a CA that is not trusted here (\"%.60s\"): name the file of the right "
             "CA by ssl_ca_certs=",
             text);
        break;
    default:
        note(l, true, "%s is refused: %.80s", whose, X509_verify_cert_error_string(verdict));
        break;
    }
    return 0;
}

static void explain_refused(kvfi_tls_link *l) {
    const kvfi_tls_conf *conf = &l->peer->tls->conf;
    if (conf->cert_file == NULL) {
        note(l, true,
             "the server asks for a client certificate: give ssl_certfile= and ssl_keyfile= (or set tls-auth-clients "
             "no there)");
    } else {
        note(l, true,
             "the server does not accept the client certificate of ssl_certfile=: is it from the CA of the server's "
             "tls-ca-cert-file, and valid?");
    }
}

/* A broken link: `result` is that of the call on it. */
static void explain(kvfi_tls_link *l) {
    unsigned long code = ERR_peek_error();
    int reason = ERR_GET_LIB(code) == ERR_LIB_SSL ? ERR_GET_REASON(code) : 0;
    if (l->trouble.what[0] != '\0') {
        return; /* see_verdict knows better */
    }
    switch (reason) {
    case SSL_R_TLSV13_ALERT_CERTIFICATE_REQUIRED:
    case SSL_R_TLSV1_ALERT_UNKNOWN_CA:
    case SSL_R_SSLV3_ALERT_BAD_CERTIFICATE:
    case SSL_R_SSLV3_ALERT_UNSUPPORTED_CERTIFICATE:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_REVOKED:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_UNKNOWN:
        explain_refused(l);
        return;
    case SSL_R_TLSV1_ALERT_PROTOCOL_VERSION:
    case SSL_R_UNSUPPORTED_PROTOCOL:
        note(l, true, "the server has no TLS 1.2 or later: allow it there (tls-protocols \"TLSv1.2 TLSv1.3\")");
        return;
    case SSL_R_WRONG_VERSION_NUMBER:
    case SSL_R_PACKET_LENGTH_TOO_LONG:
        note(l, true,
             "the server answers, but not in TLS: check the port (tls-port), or write redis:// instead of rediss://");
        return;
    default:
        break;
    }
    bool broke = l->ended || l->error != 0;
    if ((broke || reason == SSL_R_SSLV3_ALERT_HANDSHAKE_FAILURE) && l->wanted && !l->heard) {
        explain_refused(l); /* a server that closes at once may discard its own explanation */
    } else if (reason != 0 && !broke) {
        note(l, false, "TLS broke: %.100s", ERR_reason_error_string(code));
    }
}

/* ---- files ---- */

static kvf_status cant_read(kvf_error *err, const char *param, const char *path) {
    char text[64];
    return kvfi_fail(err, KVF_CONFIG, "%s=%.100s can't be read: %s", param, path, strerror_r(errno, text, sizeof text));
}

/* A whole file, from which OpenSSL takes PEM. */
static kvf_status read_file(char **out, size_t *out_len, kvf_error *err, const char *param, const char *path) {
    struct stat st = {0};
    int fd = kvfi_sys->open(path, O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0 || kvfi_sys->fstat(fd, &st) != 0) {
        kvf_status status = cant_read(err, param, path);
        if (fd >= 0) {
            (void)kvfi_sys->close(fd);
        }
        return status;
    }
    kvf_status status = KVF_OK;
    size_t size = (size_t)st.st_size, len = 0;
    char *data = NULL;
    if (!S_ISREG(st.st_mode) || st.st_size == 0 || st.st_size > MAX_PEM_BYTES) {
        status = kvfi_fail(err, KVF_CONFIG, "%s=%.100s is not a file of PEM", param, path);
    } else if ((data = kvfi_alloc(size)) == NULL) {
        status = kvfi_fail(err, KVF_NOMEM, "no memory for %s", param);
    }
    while (status == KVF_OK && len < size) {
        struct iovec iov = {data + len, size - len};
        ssize_t n = kvfi_sys->preadv(fd, &iov, 1, (off_t)len);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            errno = n == 0 ? EIO : errno; /* shorter than a moment ago */
            status = cant_read(err, param, path);
        } else {
            len += (size_t)n;
        }
    }
    (void)kvfi_sys->close(fd);
    if (status != KVF_OK) {
        kvfi_free(data);
        return status;
    }
    *out = data;
    *out_len = len;
    return KVF_OK;
}

/* The same as a BIO for parsing. To be closed by close_pem. */
typedef struct pem {
    char *data;
    size_t len;
    BIO *bio;
} pem;

static void close_pem(pem *p) {
    BIO_free(p->bio);
    if (p->data != NULL) {
        explicit_bzero(p->data, p->len); /* it may be a key */
        kvfi_free(p->data);
    }
    *p = (pem){0};
}

static kvf_status open_pem(pem *out, kvf_error *err, const char *param, const char *path) {
    *out = (pem){0};
    KVFI_TRY(read_file(&out->data, &out->len, err, param, path));
    out->bio = BIO_new_mem_buf(out->data, (int)out->len);
    if (out->bio == NULL) {
        close_pem(out);
        return kvfi_fail(err, KVF_NOMEM, "no memory for %s", param);
    }
    return KVF_OK;
}

/* Never asks at the terminal, as OpenSSL would. */
static int give_password(char *out, int cap, int writing, void *password) {
    (void)writing;
    size_t len = password != NULL ? strlen(password) : 0;
    if (len == 0 || len > (size_t)cap) {
        return -1;
    }
    memcpy(out, password, len);
    return (int)len;
}

static kvf_status trust_file(kvfi_tls *tls, kvf_error *err) {
    const char *path = tls->conf.ca_file;
    X509_STORE *store = SSL_CTX_get_cert_store(tls->ctx);
    unsigned num = 0;
    pem p;
    KVFI_TRY(open_pem(&p, err, "ssl_ca_certs", path));
    for (X509 *cert; (cert = PEM_read_bio_X509(p.bio, NULL, give_password, NULL)) != NULL; X509_free(cert)) {
        num += X509_STORE_add_cert(store, cert) == 1;
    }
    close_pem(&p);
    return num > 0 ? KVF_OK : kvfi_fail(err, KVF_CONFIG, "ssl_ca_certs=%.100s holds no certificate (PEM)", path);
}

static kvf_status trust_dir(kvfi_tls *tls, kvf_error *err) {
    const char *path = tls->conf.ca_dir;
    struct stat st;
    if (kvfi_sys->fstatat(AT_FDCWD, path, &st, 0) != 0) {
        return cant_read(err, "ssl_ca_path", path);
    }
    if (!S_ISDIR(st.st_mode)) {
        return kvfi_fail(err, KVF_CONFIG, "ssl_ca_path=%.100s is no folder: a file is named by ssl_ca_certs=", path);
    }
    /* OpenSSL reads the folder itself when it needs a certificate. */
    return SSL_CTX_load_verify_dir(tls->ctx, path) == 1 ? KVF_OK
                                                        : kvfi_fail(err, KVF_NOMEM, "no memory for ssl_ca_path");
}

static kvf_status trust(kvfi_tls *tls, kvf_error *err) {
    if (tls->conf.ca_file != NULL) {
        KVFI_TRY(trust_file(tls, err));
    }
    if (tls->conf.ca_dir != NULL) {
        KVFI_TRY(trust_dir(tls, err));
    }
    if (tls->conf.ca_file == NULL && tls->conf.ca_dir == NULL && SSL_CTX_set_default_verify_paths(tls->ctx) != 1) {
        return kvfi_fail(err, KVF_NOMEM, "no memory for the system's certificates");
    }
    return KVF_OK;
}

/* The client's certificate, with those that lead to its CA. */
static kvf_status take_cert(kvfi_tls *tls, kvf_error *err) {
    const char *path = tls->conf.cert_file;
    unsigned num = 0;
    bool good = true;
    pem p;
    KVFI_TRY(open_pem(&p, err, "ssl_certfile", path));
    for (X509 *cert; good && (cert = PEM_read_bio_X509(p.bio, NULL, give_password, NULL)) != NULL; X509_free(cert)) {
        good = num++ == 0 ? SSL_CTX_use_certificate(tls->ctx, cert) == 1 : SSL_CTX_add1_chain_cert(tls->ctx, cert) == 1;
    }
    close_pem(&p);
    if (num == 0) {
        return kvfi_fail(err, KVF_CONFIG, "ssl_certfile=%.100s holds no certificate (PEM)", path);
    }
    return good ? KVF_OK
                : kvfi_fail(err, KVF_CONFIG, "ssl_certfile=%.100s holds a certificate that OpenSSL refuses: %.60s",
                            path, ERR_reason_error_string(ERR_peek_last_error()));
}

static kvf_status take_key(kvfi_tls *tls, kvf_error *err) {
    const char *path = tls->conf.key_file != NULL ? tls->conf.key_file : tls->conf.cert_file;
    const char *param = tls->conf.key_file != NULL ? "ssl_keyfile" : "ssl_certfile";
    void *password = (void *)(uintptr_t)tls->conf.key_password; /* the callback only reads it */
    pem p;
    KVFI_TRY(open_pem(&p, err, param, path));
    bool locked = memmem(p.data, p.len, "ENCRYPTED", 9) != NULL;
    EVP_PKEY *key = PEM_read_bio_PrivateKey(p.bio, NULL, give_password, password);
    close_pem(&p);
    if (key == NULL && locked) {
        return kvfi_fail(err, KVF_CONFIG, "the key in %s=%.100s is encrypted: %s", param, path,
                         password == NULL ? "give its password as ssl_password=" : "ssl_password= does not open it");
    }
    if (key == NULL) {
        return kvfi_fail(err, KVF_CONFIG, "%s=%.100s holds no private key (PEM)%s", param, path,
                         tls->conf.key_file == NULL ? ": name its file by ssl_keyfile=" : "");
    }
    bool good = SSL_CTX_use_PrivateKey(tls->ctx, key) == 1 && SSL_CTX_check_private_key(tls->ctx) == 1;
    EVP_PKEY_free(key);
    return good ? KVF_OK
                : kvfi_fail(err, KVF_CONFIG, "the key in %s=%.80s is not the one of ssl_certfile=%.80s", param, path,
                            tls->conf.cert_file);
}

/* ---- trust and identity of a store ---- */

/* A ticket arrived: the next connection to that server may use it. */
static int keep_session(SSL *ssl, SSL_SESSION *session) {
    kvfi_tls_link *l = SSL_get_app_data(ssl);
    SSL_SESSION_free(atomic_exchange(&l->peer->session, session));
    return 1;
}

void kvfi_tls_forget(kvfi_tls_peer *peer) {
    SSL_SESSION_free(atomic_exchange(&peer->session, NULL));
}

/* Called if the server asks for a certificate and we have none. */
static int see_want(SSL *ssl, X509 **cert, EVP_PKEY **key) {
    (void)cert;
    (void)key;
    kvfi_tls_link *l = SSL_get_app_data(ssl);
    l->wanted = true;
    return 0;
}

static kvf_status make_context(kvfi_tls *tls, kvf_error *err) {
    /* An engine may exit while our threads still work: what they use is not freed. */
    bool good = OPENSSL_init_ssl(OPENSSL_INIT_NO_ATEXIT, NULL) == 1;
    tls->ctx = good ? SSL_CTX_new(TLS_client_method()) : NULL;
    tls->method = tls->ctx != NULL ? BIO_meth_new(BIO_TYPE_SOURCE_SINK, "kvferry") : NULL;
    if (tls->method == NULL || BIO_meth_set_write(tls->method, bio_write) != 1 ||
        BIO_meth_set_read(tls->method, bio_read) != 1 || BIO_meth_set_ctrl(tls->method, bio_ctrl) != 1 ||
        SSL_CTX_set_min_proto_version(tls->ctx, TLS1_2_VERSION) != 1 ||
        /* All three are safe; 128 bits are the fastest if the processor supports AES. */
        SSL_CTX_set_ciphersuites(tls->ctx,
                                 "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256") != 1) {
        return kvfi_fail(err, KVF_NOMEM, "OpenSSL could not be set up: %.100s",
                         ERR_reason_error_string(ERR_peek_last_error()));
    }
    SSL_CTX_set_mode(tls->ctx, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_clear_mode(tls->ctx, SSL_MODE_AUTO_RETRY);
    SSL_CTX_set_options(tls->ctx, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
    SSL_CTX_set_read_ahead(tls->ctx, 1);
    SSL_CTX_set_default_read_buffer_len(tls->ctx, READ_BUFFER);
    SSL_CTX_set_session_cache_mode(tls->ctx, SSL_SESS_CACHE_CLIENT | SSL_SESS_CACHE_NO_INTERNAL);
    SSL_CTX_sess_set_new_cb(tls->ctx, keep_session);
    SSL_CTX_set_client_cert_cb(tls->ctx, see_want);
    SSL_CTX_set_verify(tls->ctx, tls->conf.verify ? SSL_VERIFY_PEER : SSL_VERIFY_NONE,
                       tls->conf.verify ? see_verdict : NULL);
    return KVF_OK;
}

void kvfi_tls_close(kvfi_tls *tls) {
    if (tls != NULL) {
        SSL_CTX_free(tls->ctx);
        BIO_meth_free(tls->method);
        kvfi_free(tls);
    }
}

kvf_status kvfi_tls_open(kvfi_tls **out, kvf_error *err, const kvfi_tls_conf *conf) {
    kvfi_tls *tls = kvfi_alloc_zero(1, sizeof *tls);
    if (tls == NULL) {
        return kvfi_fail(err, KVF_NOMEM, "no memory for TLS");
    }
    tls->conf = *conf;
    ERR_clear_error();
    kvf_status status = make_context(tls, err);
    if (status == KVF_OK && conf->verify) {
        status = trust(tls, err);
    }
    if (status == KVF_OK && conf->cert_file != NULL) {
        status = take_cert(tls, err);
        status = status == KVF_OK ? take_key(tls, err) : status;
    }
    ERR_clear_error();
    if (status != KVF_OK) {
        kvfi_tls_close(tls);
        return status;
    }
    *out = tls;
    return KVF_OK;
}

/* ---- the handshake ---- */

/* The identity of the peer. Addresses are not sent as SNI (RFC 6066), and are compared with the certificate's
 * addresses. */
static bool name_peer(kvfi_tls_link *l) {
    const kvfi_tls_conf *conf = &l->peer->tls->conf;
    uint8_t address[16];
    char name[256];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(l->peer->name, "%"), l->peer->name); /* fe80::1%eth0 */
    bool numeric = inet_pton(AF_INET, name, address) == 1 || inet_pton(AF_INET6, name, address) == 1;
    if (!numeric && SSL_set_tlsext_host_name(l->ssl, name) != 1) {
        return false;
    }
    if (!conf->verify || !conf->check_name) {
        return true;
    }
    SSL_set_hostflags(l->ssl, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
    return numeric ? X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(l->ssl), name) == 1
                   : SSL_set1_host(l->ssl, name) == 1;
}

static bool set_up(kvfi_tls_link *l) {
    const kvfi_tls *tls = l->peer->tls;
    l->ssl = SSL_new(tls->ctx);
    BIO *bio = l->ssl != NULL ? BIO_new(tls->method) : NULL;
    if (bio == NULL) {
        return false;
    }
    BIO_set_data(bio, l);
    BIO_set_init(bio, 1);
    SSL_set_bio(l->ssl, bio, bio); /* which owns it from here on */
    SSL_set_app_data(l->ssl, l);
    SSL_SESSION *session = atomic_exchange(&l->peer->session, NULL);
    if (session != NULL) {
        (void)SSL_set_session(l->ssl, session); /* without it the handshake is a full one */
        SSL_SESSION_free(session);
    }
    return name_peer(l);
}

/* 1: the socket is ready. 0: the deadline. -1: poll failed. */
static int wait_for(const kvfi_tls_link *l, short events, int64_t deadline_us) {
    struct pollfd p = {.fd = l->fd, .events = events};
    for (;;) {
        int n = kvfi_interruptible_poll(&p, 1, deadline_us);
        if (n > 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) {
            return n > 0 ? 1 : -1;
        }
        if (kvfi_sys->now_us() >= deadline_us || kvfi_interrupt_look()) {
            return 0;
        }
    }
}

/* KVF_WHY_NONE, or why it failed, with the link's trouble. */
static kvf_reason shake_hands(kvfi_tls_link *l, int64_t deadline_us) {
    char text[64];
    for (;;) {
        ERR_clear_error();
        int result = SSL_connect(l->ssl);
        if (result == 1) {
            return KVF_WHY_NONE;
        }
        int state = SSL_get_error(l->ssl, result);
        int ready = -1;
        if (state == SSL_ERROR_WANT_READ || state == SSL_ERROR_WANT_WRITE) {
            ready = wait_for(l, state == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT, deadline_us);
            l->error = ready < 0 ? errno : 0;
        }
        if (ready > 0) {
            continue;
        }
        l->trouble.mute = !l->greeted;
        if (ready == 0) {
            note(l, false, "the TLS handshake had %s within its time", l->greeted ? "no end" : "no answer");
            return KVF_WHY_UNREACHABLE;
        }
        explain(l);
        if (l->trouble.what[0] == '\0') {
            note(l, false, "the TLS handshake broke off: %s",
                 l->error != 0 ? strerror_r(l->error, text, sizeof text) : "the server closed the connection");
        }
        return KVF_WHY_UNREACHABLE;
    }
}

void kvfi_tls_free(kvfi_tls_link *l) {
    if (l == NULL) {
        return;
    }
    if (l->ssl != NULL) {
        SSL_set_quiet_shutdown(l->ssl, 1); /* sends no more data; without it the session could not be resumed */
        (void)SSL_shutdown(l->ssl);
        SSL_free(l->ssl);
        ERR_clear_error();
    }
    kvfi_free(l);
}

kvf_reason kvfi_tls_connect(kvfi_tls_link **out, kvfi_tls_trouble *trouble, kvfi_tls_peer *peer, int fd,
                            int64_t deadline_us) {
    kvfi_tls_link *l = kvfi_alloc_zero(1, sizeof *l);
    kvf_reason why = KVF_WHY_NOMEM;
    *trouble = (kvfi_tls_trouble){.what = "no memory for TLS"};
    if (l != NULL) {
        l->peer = peer;
        l->fd = fd;
        if (set_up(l)) {
            why = shake_hands(l, deadline_us);
            *trouble = l->trouble;
        }
    }
    if (why != KVF_WHY_NONE) {
        kvfi_tls_free(l);
        return why;
    }
    l->more = true;
    *out = l;
    return KVF_WHY_NONE;
}

bool kvfi_tls_is_spoken(int fd, int64_t deadline_us) {
    enum { ALERT = 21, HANDSHAKE = 22 }; /* the first byte of a record */
    kvfi_tls_peer peer = {.name = "127.0.0.1"};
    kvfi_tls_conf conf = {.on = true};
    bool spoken = false;
    if (kvfi_tls_open(&peer.tls, NULL, &conf) == KVF_OK) {
        kvfi_tls_link l = {.peer = &peer, .fd = fd};
        if (set_up(&l)) {
            (void)shake_hands(&l, deadline_us);
            spoken = l.greeted && (l.first == ALERT || l.first == HANDSHAKE);
        }
        SSL_free(l.ssl);
        kvfi_tls_forget(&peer);
        kvfi_tls_close(peer.tls);
    }
    ERR_clear_error();
    return spoken;
}

/* ---- bytes ---- */

/* The result of a call that moved nothing: as of readv and writev. */
static ssize_t nothing_moved(kvfi_tls_link *l, int result) {
    switch (SSL_get_error(l->ssl, result)) {
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE:
        errno = EAGAIN;
        return -1;
    case SSL_ERROR_ZERO_RETURN:
        l->ended = true;
        break;
    default:
        break;
    }
    explain(l);
    if (l->trouble.what[0] == '\0' && l->ended) {
        return 0;
    }
    errno = l->trouble.what[0] != '\0' || l->error == 0 ? EPROTO : l->error;
    return -1;
}

/* The server has closed while we were about to write: its reason may have arrived before. */
static ssize_t hear_last_words(kvfi_tls_link *l) {
    int error = l->error;
    char byte;
    size_t len = 0;
    ERR_clear_error();
    int result = SSL_read_ex(l->ssl, &byte, 1, &len);
    if (result != 1) {
        (void)nothing_moved(l, result);
    }
    errno = l->trouble.what[0] != '\0' ? EPROTO : error;
    return -1;
}

ssize_t kvfi_tls_send(kvfi_tls_link *l, const struct iovec *iov, size_t num) {
    size_t total = 0;
    for (size_t i = 0; i < num; i++) {
        for (size_t at = 0; at < iov[i].iov_len;) {
            size_t len = 0;
            ERR_clear_error();
            int result = SSL_write_ex(l->ssl, (const char *)iov[i].iov_base + at, iov[i].iov_len - at, &len);
            if (result != 1 && total > 0) {
                return (ssize_t)total;
            }
            if (result != 1) {
                ssize_t moved = nothing_moved(l, result);
                return l->error != 0 && l->trouble.what[0] == '\0' ? hear_last_words(l) : moved;
            }
            at += len;
            total += len;
        }
    }
    return (ssize_t)total;
}

ssize_t kvfi_tls_recv(kvfi_tls_link *l, const struct iovec *iov, size_t num) {
    size_t total = 0;
    l->more = true;
    for (size_t i = 0; i < num; i++) {
        for (size_t at = 0; at < iov[i].iov_len;) {
            size_t len = 0;
            ERR_clear_error();
            int result = SSL_read_ex(l->ssl, (char *)iov[i].iov_base + at, iov[i].iov_len - at, &len);
            if (result != 1) {
                ssize_t moved = nothing_moved(l, result);
                l->more = moved >= 0 || errno != EAGAIN; /* an end or an error is reported again by the next call */
                return total > 0 ? (ssize_t)total : moved;
            }
            l->heard = true;
            at += len;
            total += len;
        }
    }
    return (ssize_t)total;
}

bool kvfi_tls_take_more(kvfi_tls_link *l) {
    bool more = l->more;
    l->more = false;
    return more;
}

bool kvfi_tls_is_resumed(const kvfi_tls_link *l) {
    return SSL_session_reused(l->ssl) == 1;
}

const kvfi_tls_trouble *kvfi_tls_trouble_of(const kvfi_tls_link *l) {
    return &l->trouble;
}
