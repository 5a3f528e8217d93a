/* SPDX-License-Identifier: Apache-2.0
 *
 * TLS over a pair of sockets with a server in a thread: how a failed handshake is classified, and how a PEM file is
 * read. (Servers of a user: live/tls_test.c.)
 */
#include <errno.h>
#include <fcntl.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "redis/wire/tls.h"
#include "support/certs.h"
#include "support/kit.h"

static kvft_certs *certs;
static int ours, theirs;
static kvfi_tls_trouble trouble;

static int set_up_all(void **state) {
    (void)state;
    certs = kvft_certs_new();
    return 0;
}

static int tear_down_all(void **state) {
    (void)state;
    kvft_certs_free(certs);
    return 0;
}

static int set_up(void **state) {
    (void)state;
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    ours = pair[0];
    theirs = pair[1];
    assert_int_equal(fcntl(ours, F_SETFL, O_NONBLOCK), 0);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    kvfi_sys_table = &kvfi_sys_real;
    close(ours);
    close(theirs);
    return 0;
}

/* ---- handshakes that fail */

/* A handshake, which must fail. */
static void shake_hands_in_vain(void) {
    kvfi_tls_conf conf = {.on = true};
    kvfi_tls_peer peer = {.name = "127.0.0.1"};
    kvfi_tls_link *link = NULL;
    assert_int_equal(kvfi_tls_open(&peer.tls, NULL, &conf), KVF_OK);
    assert_int_equal(kvfi_tls_connect(&link, &trouble, &peer, ours, kvfi_deadline(60000000)), KVF_WHY_UNREACHABLE);
    kvfi_tls_forget(&peer);
    kvfi_tls_close(peer.tls);
}

static void expect(bool config, bool mute, const char *words) {
    if (strstr(trouble.what, words) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", trouble.what, words);
    }
    assert_int_equal(trouble.config, config);
    assert_int_equal(trouble.mute, mute);
}

static unsigned interruptions;

static ssize_t interrupted_readv(int fd, const struct iovec *iov, int num) {
    if (interruptions > 0) {
        interruptions--;
        errno = EINTR;
        return -1;
    }
    return kvfi_sys_real.readv(fd, iov, num);
}

static ssize_t interrupted_writev(int fd, const struct iovec *iov, int num) {
    if (interruptions > 0) {
        interruptions--;
        errno = EINTR;
        return -1;
    }
    return kvfi_sys_real.writev(fd, iov, num);
}

static ssize_t reset(int fd, const struct iovec *iov, int num) {
    (void)fd;
    (void)iov;
    (void)num;
    errno = ECONNRESET;
    return -1;
}

/* A call that was interrupted is made again; one that fails is an error, whoever made it. */
static void calls_that_fail(void **state) {
    (void)state;
    kvfi_systable table = kvfi_sys_real;
    kvfi_sys_table = &table;
    table.writev = reset;
    shake_hands_in_vain();
    expect(false, true, "Connection reset");
    table.writev = interrupted_writev;
    table.readv = reset;
    interruptions = 2;
    shake_hands_in_vain();
    expect(false, true, "Connection reset");
    assert_int_equal(interruptions, 0);
    kvfi_sys_table = &kvfi_sys_real;
}

/* An end is no error, whatever errno was before. */
static void server_that_closes(void **state) {
    (void)state;
    kvfi_systable table = kvfi_sys_real;
    table.readv = interrupted_readv;
    kvfi_sys_table = &table;
    interruptions = 2;
    shutdown(theirs, SHUT_WR);
    shake_hands_in_vain();
    kvfi_sys_table = &kvfi_sys_real;
    assert_int_equal(interruptions, 0);
    expect(false, true, "the server closed the connection");
}

typedef struct tls_server {
    const char *ciphers; /* NULL: the usual ones */
    bool wants_certificate;
    bool good; /* out: it did what it should */
} tls_server;

/* One of TLS 1.2, which stays open after it has refused: what it says is then all there is to go by. */
static void *serve(void *arg) {
    tls_server *s = arg;
    const char *cert = kvft_certs_server(certs);
    SSL_CTX *ctx = SSL_CTX_new(TLS_server_method());
    bool good = SSL_CTX_set_max_proto_version(ctx, TLS1_2_VERSION) == 1 &&
                SSL_CTX_use_certificate_chain_file(ctx, cert) == 1 &&
                SSL_CTX_use_PrivateKey_file(ctx, cert, SSL_FILETYPE_PEM) == 1 &&
                (s->ciphers == NULL || SSL_CTX_set_cipher_list(ctx, s->ciphers) == 1);
    if (s->wants_certificate) {
        SSL_CTX_set_verify(ctx, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
    }
    SSL *ssl = SSL_new(ctx);
    SSL_set_fd(ssl, theirs);
    s->good = good && SSL_accept(ssl) != 1;
    SSL_free(ssl);
    SSL_CTX_free(ctx);
    return NULL;
}

static void refused_by(tls_server *server) {
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, serve, server), 0);
    shake_hands_in_vain();
    pthread_join(thread, NULL);
    assert_true(server->good);
}

/* The alert of both is "handshake failure": only the first one asked for a certificate. */
static void server_that_refuses(void **state) {
    (void)state;
    tls_server asks = {.wants_certificate = true};
    refused_by(&asks);
    expect(true, false, "asks for a client certificate");
}

static void server_of_other_ciphers(void **state) {
    (void)state;
    tls_server other = {.ciphers = "ECDHE-RSA-AES128-GCM-SHA256"}; /* its key is not RSA */
    refused_by(&other);
    expect(false, false, "TLS broke: ");
}

/* ---- files */

static unsigned reads;
static int first_errno; /* of the first read; 0: it works */
static bool at_end;     /* the others find nothing */

static ssize_t read_badly(int fd, const struct iovec *iov, int num, off_t at) {
    assert_true(++reads < 100);
    if (reads == 1 && first_errno != 0) {
        errno = first_errno;
        return -1;
    }
    if (at_end) {
        errno = EINTR; /* of some call before */
        return 0;
    }
    struct iovec one = {iov->iov_base, 1 + iov->iov_len / 2};
    return num == 1 ? kvfi_sys_real.preadv(fd, &one, 1, at) : -1;
}

static int open_for_us(const char *path, int flags, mode_t mode) {
    assert_int_equal(flags, O_RDONLY | O_CLOEXEC); /* no child process gets it */
    return kvfi_sys_real.open(path, flags, mode);
}

static bool no_size; /* of the file */

static int fail_fstat(int fd, struct stat *out) {
    (void)fd, (void)out;
    errno = EIO;
    return -1;
}

static kvf_status open_with_ca(kvf_error *err) {
    kvfi_systable table = kvfi_sys_real;
    kvfi_tls_conf conf = {.on = true, .verify = true, .ca_file = certs->ca};
    kvfi_tls *tls = NULL;
    table.preadv = read_badly;
    table.open = open_for_us;
    table.fstat = no_size ? fail_fstat : table.fstat;
    reads = 0;
    int fds = kvft_num_fds();
    kvfi_sys_table = &table;
    kvf_status status = kvfi_tls_open(&tls, err, &conf);
    kvfi_sys_table = &kvfi_sys_real;
    kvfi_tls_close(tls);
    assert_int_equal(kvft_num_fds(), fds);
    return status;
}

/* In pieces, after an interruption; one that fails or got shorter meanwhile is refused. It is closed in any case. */
static void file_of_pem(void **state) {
    (void)state;
    kvf_error err = {0};
    first_errno = EINTR;
    assert_int_equal(open_with_ca(&err), KVF_OK);
    assert_true(reads > 2);
    first_errno = EISDIR;
    assert_int_equal(open_with_ca(&err), KVF_CONFIG);
    assert_int_equal(reads, 1);
    assert_non_null(strstr(err.what, "can't be read: Is a directory"));
    first_errno = 0;
    at_end = true;
    assert_int_equal(open_with_ca(&err), KVF_CONFIG);
    assert_int_equal(reads, 1);
    assert_non_null(strstr(err.what, "can't be read: Input/output error"));
    at_end = false;
    no_size = true;
    assert_int_equal(open_with_ca(&err), KVF_CONFIG);
    assert_int_equal(reads, 0);
    assert_non_null(strstr(err.what, "can't be read: Input/output error"));
    no_size = false;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {TEST(server_that_closes), TEST(calls_that_fail), TEST(server_that_refuses),
                                       TEST(server_of_other_ciphers), TEST(file_of_pem)};
    return cmocka_run_group_tests(tests, set_up_all, tear_down_all);
}
