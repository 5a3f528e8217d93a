/* SPDX-License-Identifier: Apache-2.0
 *
 * Connecting to one of the addresses of a name (redis/wire/dial.c), on a clock that moves only while somebody waits:
 * which is tried when, which one is taken, and that no socket stays.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "redis/wire/conn.h"

#define MAX_ADDRESSES 10
#define FIRST_FD      100000
#define NEVER         INT64_MAX
#define MS            INT64_C(1000)
#define DEADLINE_US   (2000 * MS)

/* What an address does: `after_us` after the attempt it answers, or fails with `error`; 0: at once. */
typedef struct address {
    int64_t after_us;
    int error;
} address;
#define SILENT \
    { NEVER, 0 }
#define ANSWERS \
    { 0, 0 }
#define ANSWERS_IN(ms) \
    { (ms) * MS, 0 }
#define FAILS(ms, error) \
    { (ms) * MS, error }

static struct {
    size_t num;
    address list[MAX_ADDRESSES];
    int64_t now_us;
    int64_t tried_us[MAX_ADDRESSES]; /* since the beginning; -1: not tried */
    size_t order[MAX_ADDRESSES], num_tried;
    int of_fd[2 * MAX_ADDRESSES]; /* the address of each socket; -1: closed, or not connected */
    int num_sockets, num_open;
    int poll_error; /* what the next wait fails with */
    unsigned waits;
    int options[128]; /* of the last socket: by name, of the TCP level; 0: not set */
    bool keeps_alive, is_reno;
} net;

static kvfi_systable table;
static kvfi_conn conn;
static _Atomic uint64_t disconnects;
static _Atomic uint32_t answered;
static int64_t began_us, time_us, patience_us;

static int64_t net_now_us(void) {
    return net.now_us;
}

/* 127.0.0.1 and so on: one that freeaddrinfo takes. */
static int net_resolve(const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **out) {
    struct addrinfo **end = out;
    (void)host;
    for (size_t i = 0; i < net.num; i++) {
        char text[32];
        snprintf(text, sizeof text, "127.0.0.%zu", i + 1);
        assert_int_equal(getaddrinfo(text, service, hints, end), 0);
        end = &(*end)->ai_next;
    }
    return 0;
}

static int net_socket(int family, int type, int protocol) {
    (void)protocol;
    assert_int_equal(family, AF_INET);
    assert_true((type & SOCK_NONBLOCK) != 0 && (type & SOCK_CLOEXEC) != 0);
    net.num_open++;
    net.of_fd[net.num_sockets] = -1;
    return FIRST_FD + net.num_sockets++;
}

static int net_setsockopt(int fd, int level, int name, const void *value, socklen_t len) {
    (void)fd;
    if (level == IPPROTO_TCP && name == TCP_CONGESTION) {
        net.is_reno = len == 4 && memcmp(value, "reno", 4) == 0;
    } else if (level == IPPROTO_TCP && len == sizeof(int)) {
        assert_in_range(name, 0, 127);
        memcpy(&net.options[name], value, sizeof(int));
    } else if (level == SOL_SOCKET && name == SO_KEEPALIVE) {
        net.keeps_alive = *(const int *)value == 1;
    }
    return 0;
}

static int net_connect(int fd, const struct sockaddr *to, socklen_t len) {
    struct sockaddr_in in;
    assert_int_equal(len, sizeof in);
    memcpy(&in, to, sizeof in);
    size_t i = (ntohl(in.sin_addr.s_addr) & 0xff) - 1;
    assert_true(i < net.num && net.tried_us[i] < 0);
    net.of_fd[fd - FIRST_FD] = (int)i;
    net.tried_us[i] = net.now_us - began_us;
    net.order[net.num_tried++] = i;
    errno = net.list[i].after_us > 0 ? EINPROGRESS : net.list[i].error;
    return errno == 0 ? 0 : -1;
}

/* When the socket comes to an end. */
static int64_t end_of(int fd) {
    int i = net.of_fd[fd - FIRST_FD];
    assert_true(i >= 0);
    return net.list[i].after_us == NEVER ? NEVER : began_us + net.tried_us[i] + net.list[i].after_us;
}

static int net_poll(struct pollfd *fds, nfds_t num, int timeout_ms) {
    int64_t until_us = net.now_us + timeout_ms * MS;
    int events = 0;
    assert_true(net.waits++ < 100);
    for (nfds_t i = 0; i < num; i++) {
        int64_t end_us = end_of(fds[i].fd);
        until_us = end_us < until_us ? end_us : until_us;
    }
    net.now_us = until_us > net.now_us ? until_us : net.now_us;
    if (net.poll_error != 0) {
        errno = net.poll_error;
        net.poll_error = 0;
        return -1;
    }
    for (nfds_t i = 0; i < num; i++) {
        fds[i].revents = end_of(fds[i].fd) <= net.now_us ? POLLOUT : 0;
        events += fds[i].revents != 0;
    }
    return events;
}

static int net_getsockopt(int fd, int level, int name, void *value, socklen_t *len) {
    assert_true(level == SOL_SOCKET && name == SO_ERROR && *len == sizeof(int));
    memcpy(value, &net.list[net.of_fd[fd - FIRST_FD]].error, sizeof(int));
    return 0;
}

static int net_close(int fd) {
    assert_in_range(fd, FIRST_FD, FIRST_FD + net.num_sockets - 1);
    net.of_fd[fd - FIRST_FD] = -1;
    net.num_open--;
    errno = EBADF; /* whoever wants to know an errno has kept it */
    return 0;
}

static int set_up(void **state) {
    (void)state;
    table = kvfi_sys_real;
    table.now_us = net_now_us;
    table.resolve = net_resolve;
    table.socket = net_socket;
    table.setsockopt = net_setsockopt;
    table.getsockopt = net_getsockopt;
    table.connect = net_connect;
    table.poll = net_poll;
    table.close = net_close;
    kvfi_sys_table = &table;
    net.now_us = 1000000;
    answered = 0;
    time_us = DEADLINE_US;
    patience_us = 0;
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    kvfi_sys_table = &kvfi_sys_real;
    return 0;
}

static int64_t took_us(void) {
    return net.now_us - began_us;
}

/* The number of the address that was taken, or -1. */
static int dial(size_t num, const address *list) {
    kvfi_endpoint to = {.host = "several", .port = 6379};
    kvfi_tls_peer plain = {.tls = NULL};
    net.num = num;
    net.num_tried = 0;
    net.num_sockets = net.num_open = 0;
    net.waits = 0;
    memcpy(net.list, list, num * sizeof *list);
    memset(net.tried_us, -1, sizeof net.tried_us);
    began_us = net.now_us;
    kvfi_conn_init(&conn, 100, &disconnects);
    conn.patience_us = patience_us;
    kvf_reason why = kvfi_conn_open(&conn, &to, &plain, &answered, net.now_us + time_us);
    int taken = why == KVF_WHY_NONE ? net.of_fd[conn.fd - FIRST_FD] : -1;
    assert_int_equal(net.num_open, why == KVF_WHY_NONE);
    bool impatient = patience_us > 0 && patience_us < time_us && took_us() >= patience_us;
    assert_true(why == KVF_WHY_NONE || why == (impatient ? KVF_WHY_STALLED : KVF_WHY_UNREACHABLE));
    kvfi_conn_close(&conn);
    assert_int_equal(net.num_open, 0);
    return taken;
}

/* The next begins a tenth of a second after the last, or as soon as one has failed; the first that answers is taken. */
static void test_the_next_begins_beside_the_last(void **state) {
    (void)state;
    static const struct {
        size_t num;
        address list[4];
        int taken;
        int64_t took_us;
        size_t num_tried;
        int64_t tried_us[4];
    } rows[] = {
        {2, {ANSWERS, ANSWERS}, 0, 0, 1, {0}},
        {2, {ANSWERS_IN(1), ANSWERS}, 0, 1 * MS, 1, {0}},
        {3, {SILENT, ANSWERS_IN(1), ANSWERS}, 1, 101 * MS, 2, {0, 100 * MS}},
        {3, {SILENT, SILENT, ANSWERS}, 2, 200 * MS, 3, {0, 100 * MS, 200 * MS}},
        {3, {ANSWERS_IN(150), SILENT, ANSWERS}, 0, 150 * MS, 2, {0, 100 * MS}},
        {3, {FAILS(0, ECONNREFUSED), FAILS(0, ENETUNREACH), ANSWERS}, 2, 0, 3, {0, 0, 0}},
        {2, {FAILS(5, ECONNREFUSED), ANSWERS_IN(1)}, 1, 6 * MS, 2, {0, 5 * MS}},
        {3, {SILENT, FAILS(0, ECONNREFUSED), ANSWERS_IN(1)}, 2, 101 * MS, 3, {0, 100 * MS, 100 * MS}},
        {3, {SILENT, FAILS(5, ECONNREFUSED), ANSWERS_IN(1)}, 2, 106 * MS, 3, {0, 100 * MS, 105 * MS}},
        {2, {ANSWERS_IN(700), SILENT}, 0, 700 * MS, 2, {0, 100 * MS}},
        {1, {ANSWERS_IN(700)}, 0, 700 * MS, 1, {0}},
        {4,
         {FAILS(130, ECONNREFUSED), FAILS(170, ECONNREFUSED), ANSWERS_IN(500), SILENT},
         2,
         630 * MS,
         4,
         {0, 100 * MS, 130 * MS, 230 * MS}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        answered = 0;
        assert_int_equal(dial(rows[i].num, rows[i].list), rows[i].taken);
        assert_int_equal(took_us(), rows[i].took_us);
        assert_int_equal(net.num_tried, rows[i].num_tried);
        for (size_t k = 0; k < rows[i].num_tried; k++) {
            assert_int_equal(net.order[k], k);
            assert_int_equal(net.tried_us[k], rows[i].tried_us[k]);
        }
    }
}

/* Where none is left the last error is told, and at the deadline that nothing came. */
static void test_nobody_answers(void **state) {
    (void)state;
    static const address refuse[] = {FAILS(5, ENETUNREACH), FAILS(5, ECONNREFUSED)};
    static const address refuse_at_once[] = {FAILS(0, ENETUNREACH), FAILS(0, ECONNREFUSED)};
    static const address silent[] = {SILENT, SILENT};
    assert_int_equal(dial(2, refuse), -1);
    assert_int_equal(took_us(), 10 * MS);
    assert_string_equal(conn.said, strerror(ECONNREFUSED));
    assert_int_equal(dial(2, refuse_at_once), -1);
    assert_int_equal(took_us(), 0);
    assert_string_equal(conn.said, strerror(ECONNREFUSED));
    assert_int_equal(dial(2, silent), -1);
    assert_int_equal(took_us(), DEADLINE_US);
    assert_string_equal(conn.said, strerror(ETIMEDOUT));
    assert_int_equal(net.waits, 2);
    assert_int_equal(answered, 0);
}

/* However short the time is, each address has its share of it, and the one that answers is found. */
static void test_little_time_is_shared(void **state) {
    (void)state;
    static const address rows[][3] = {{SILENT, ANSWERS_IN(5), SILENT}, {SILENT, SILENT, ANSWERS_IN(5)}};
    for (size_t i = 0; i < 4; i++) {
        time_us = i % 2 == 0 ? 40 * MS : DEADLINE_US;
        patience_us = i % 2 == 0 ? 0 : 40 * MS;
        answered = 0;
        assert_int_equal(dial(3, rows[i / 2]), i / 2 + 1);
        assert_int_equal(took_us(), i / 2 == 0 ? 15 * MS : 25 * MS);
    }
    assert_int_equal(dial(1, rows[0]), -1);
    assert_int_equal(took_us(), 40 * MS);
    assert_string_equal(conn.said, strerror(ETIMEDOUT));
}

/* A peer that vanished is noticed after half a minute. Small writes are not held back, and on the loopback nothing paces
 * them. */
static void test_options(void **state) {
    (void)state;
    static const address one[] = {ANSWERS};
    memset(net.options, 0, sizeof net.options);
    net.keeps_alive = net.is_reno = false;
    assert_int_equal(dial(1, one), 0);
    assert_true(net.keeps_alive && net.is_reno);
    assert_int_equal(net.options[TCP_NODELAY], 1);
    assert_int_equal(net.options[TCP_KEEPIDLE], 15);
    assert_int_equal(net.options[TCP_KEEPINTVL], 5);
    assert_int_equal(net.options[TCP_KEEPCNT], 3);
}

/* Congestion is controlled where something can get lost: everywhere but on the loopback of either family. */
static int six_resolve(const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **out) {
    return getaddrinfo(host, service, hints, out);
}

static int six_socket(int family, int type, int protocol) {
    (void)type, (void)protocol;
    net.is_reno = false;
    assert_true(family == AF_INET || family == AF_INET6);
    return FIRST_FD;
}

static int six_connect(int fd, const struct sockaddr *to, socklen_t len) {
    (void)fd, (void)to, (void)len;
    return 0;
}

static int six_close(int fd) {
    assert_int_equal(fd, FIRST_FD);
    return 0;
}

static void test_the_loopback_is_not_paced(void **state) {
    (void)state;
    static const struct {
        const char *host;
        bool is_reno;
    } rows[] = {{"::1", true}, {"2001:db8::1", false}, {"127.1.2.3", true}, {"192.0.2.1", false}};
    table.resolve = six_resolve;
    table.socket = six_socket;
    table.connect = six_connect;
    table.close = six_close;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        kvfi_endpoint to = {.port = 6379};
        kvfi_tls_peer plain = {.tls = NULL};
        snprintf(to.host, sizeof to.host, "%s", rows[i].host);
        kvfi_conn_init(&conn, 100, &disconnects);
        assert_int_equal(kvfi_conn_open(&conn, &to, &plain, &answered, net.now_us + DEADLINE_US), KVF_WHY_NONE);
        assert_int_equal(net.is_reno, rows[i].is_reno);
        kvfi_conn_close(&conn);
    }
}

/* What answered last is tried first the next time, and the others behind it in their order. */
static void test_what_answered_is_first(void **state) {
    (void)state;
    static const address first[] = {SILENT, FAILS(0, ECONNREFUSED), ANSWERS_IN(1), ANSWERS};
    static const address then[] = {ANSWERS, SILENT, FAILS(0, ECONNREFUSED), ANSWERS};
    assert_int_equal(dial(4, first), 2);
    uint32_t before = answered;
    assert_int_not_equal(before, 0);
    assert_int_equal(dial(4, then), 0);
    assert_int_equal(net.num_tried, 2);
    assert_int_equal(net.order[0], 2);
    assert_int_equal(net.order[1], 0);
    assert_int_not_equal(answered, before);
    assert_int_equal(dial(4, then), 0);
    assert_int_equal(net.num_tried, 1);
    static const address lose_one[] = {FAILS(105, ECONNREFUSED), ANSWERS_IN(50), SILENT};
    answered = 0;
    assert_int_equal(dial(3, lose_one), 1);
    assert_int_equal(dial(3, lose_one), 1);
    assert_int_equal(net.num_tried, 1);
}

/* Of many addresses the first eight are tried. */
static void test_many_addresses(void **state) {
    (void)state;
    static const address many[MAX_ADDRESSES] = {SILENT, SILENT, SILENT, SILENT,  SILENT,
                                                SILENT, SILENT, SILENT, ANSWERS, ANSWERS};
    assert_int_equal(dial(MAX_ADDRESSES, many), -1);
    assert_int_equal(net.num_tried, 8);
    assert_int_equal(took_us(), DEADLINE_US);
}

/* A wait that a signal ends has seen nothing; one that fails ends it all. */
static void test_waits_that_fail(void **state) {
    (void)state;
    static const address slow[] = {ANSWERS_IN(150), SILENT};
    net.poll_error = EINTR;
    assert_int_equal(dial(2, slow), 0);
    assert_int_equal(took_us(), 150 * MS);
    net.poll_error = EAGAIN;
    assert_int_equal(dial(1, slow), 0);
    net.poll_error = ENOMEM;
    assert_int_equal(dial(2, slow), -1);
    assert_int_equal(net.waits, 1);
    assert_string_equal(conn.said, strerror(ENOMEM));
}

/* ---- a unix socket whose server accepts slowly ---- */

static unsigned busy; /* so many times a connect finds no room */

static int unix_socket(int family, int type, int protocol) {
    (void)type, (void)protocol;
    assert_int_equal(family, AF_UNIX);
    assert_int_equal(net.num_open++, 0);
    net.num_sockets = 1;
    return FIRST_FD;
}

static int unix_connect(int fd, const struct sockaddr *to, socklen_t len) {
    (void)fd, (void)to, (void)len;
    errno = EAGAIN;
    return busy == 0 || busy-- == 0 ? 0 : -1;
}

static kvf_reason dial_unix(unsigned times, int64_t budget_us) {
    kvfi_endpoint to = {.path = "/nowhere"};
    kvfi_tls_peer plain = {.tls = NULL};
    busy = times;
    net.num_sockets = net.num_open = 0;
    net.waits = 0;
    began_us = net.now_us;
    kvfi_conn_init(&conn, 100, &disconnects);
    kvf_reason why = kvfi_conn_open(&conn, &to, &plain, &answered, net.now_us + budget_us);
    assert_int_equal(net.num_open, why == KVF_WHY_NONE);
    kvfi_conn_close(&conn);
    assert_int_equal(net.num_open, 0);
    return why;
}

/* It is tried again each millisecond until it accepts, and not beyond the deadline. */
static void test_a_busy_unix_socket(void **state) {
    (void)state;
    table.socket = unix_socket;
    table.connect = unix_connect;
    assert_int_equal(dial_unix(0, 50 * MS), KVF_WHY_NONE);
    assert_int_equal(took_us(), 0);
    assert_int_equal(dial_unix(20, 50 * MS), KVF_WHY_NONE);
    assert_int_equal(took_us(), 20 * MS);
    assert_int_equal(dial_unix(90, 50 * MS), KVF_WHY_UNREACHABLE);
    assert_int_equal(took_us(), 50 * MS);
    assert_string_equal(conn.said, strerror(ETIMEDOUT));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {TEST(test_the_next_begins_beside_the_last),
                                       TEST(test_nobody_answers),
                                       TEST(test_little_time_is_shared),
                                       TEST(test_the_loopback_is_not_paced),
                                       TEST(test_what_answered_is_first),
                                       TEST(test_many_addresses),
                                       TEST(test_waits_that_fail),
                                       TEST(test_a_busy_unix_socket),
                                       TEST(test_options)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
