/* SPDX-License-Identifier: Apache-2.0
 *
 * What a connection sends (redis/wire/conn.h): commands and bodies in their order, for any memory layout of a body,
 * lent or copied, completed beforehand or while it is sent, and however little the socket takes at a time.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "redis/wire/conn.h"
#include "support/faults.h"
#include "support/kit.h"

#define MEMORY   ((size_t)4 << 20)
#define MAX_IOVS 3000u /* more than go at once */
#define MAX_TEXT 64u

static uint8_t *memory, *expected, *got;
static char *dir;
static int listener, peer;
static kvfi_conn *conn;
static _Atomic uint64_t disconnects;

static void open_conn(bool lends) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    kvfi_tls_peer plain = {.tls = NULL};
    snprintf(address.sun_path, sizeof address.sun_path, "%s/s", dir);
    kvfi_endpoint to = {.path = address.sun_path};
    kvfi_conn_init(conn, 10000, &disconnects);
    conn->lends = lends;
    _Atomic uint32_t answered = 0;
    assert_int_equal(kvfi_conn_open(conn, &to, &plain, &answered, kvfi_deadline(10000000)), KVF_WHY_NONE);
    peer = accept(listener, NULL, NULL);
    assert_true(peer >= 0);
}

static void close_conn(void) {
    kvfi_conn_close(conn);
    assert_int_equal(conn->lender.in, -1);
    close(peer);
}

static int set_up(void **state) {
    (void)state;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memory = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    expected = malloc(2 * MEMORY);
    got = malloc(2 * MEMORY);
    conn = malloc(sizeof *conn);
    assert_true(memory != MAP_FAILED && expected != NULL && got != NULL && conn != NULL);
    kvft_bytes(memory, MEMORY, 5);
    dir = kvft_temp_dir();
    snprintf(address.sun_path, sizeof address.sun_path, "%s/s", dir);
    listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(listener, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(listener, 4), 0);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    close(listener);
    kvft_remove_dir(dir);
    munmap(memory, MEMORY);
    free(expected);
    free(got);
    free(conn);
    return 0;
}

/* ---- one body of pieces as the seed has it */

typedef struct body {
    struct iovec iov[MAX_IOVS];
    size_t num, bytes;
    size_t left; /* to be finished */
    uint64_t seed;
} body;

/* All small, all large, or mixed; some are empty. */
static void cut(body *b, size_t most) {
    uint64_t kind = kvft_random(&b->seed) % 4;
    b->num = 0;
    b->bytes = 0;
    while (b->bytes < most && b->num < MAX_IOVS) {
        bool small = kind == 0 || (kind == 1 ? b->num == 0 : kind == 2 && kvft_random(&b->seed) % 2 == 0);
        size_t len = small ? kvft_random(&b->seed) % 1500 : 3000 + kvft_random(&b->seed) % 300000;
        len = kvft_random(&b->seed) % 16 == 0 ? 0 : len;
        len = len < most - b->bytes ? len : most - b->bytes;
        b->iov[b->num++] = (struct iovec){memory + b->bytes, len};
        b->bytes += len;
    }
}

/* Releases any number of bytes, but one at least. That none goes before is seen by what it holds until then. */
static size_t finish(void *arg, size_t bytes) {
    body *b = arg;
    assert_in_range(bytes, 1, b->left);
    size_t num = 1 + kvft_random(&b->seed) % bytes, from = b->bytes - b->left;
    for (size_t i = from; i < from + num; i++) {
        memory[i] ^= 0xff;
    }
    b->left -= num;
    return num;
}

static size_t drain(size_t have, size_t most) {
    ssize_t n = recv(peer, got + have, most, MSG_DONTWAIT);
    assert_true(n > 0 || (n < 0 && errno == EAGAIN));
    return n > 0 ? have + (size_t)n : have;
}

static size_t say(uint8_t *out, uint64_t *seed) {
    char text[MAX_TEXT];
    int len = snprintf(text, sizeof text, "command %u", (unsigned)(kvft_random(seed) % 100000));
    kvfi_cmd *cmd = kvfi_conn_room(conn, MAX_TEXT);
    assert_non_null(cmd);
    size_t before = cmd->len;
    kvfi_cmd_text(cmd, text);
    memcpy(out, cmd->data + before, cmd->len - before);
    assert_true(len > 0);
    return cmd->len - before;
}

/* A command, a body, a command; the bytes that are to be finished are wrong before. */
static void exchange(uint64_t seed) {
    static body b;
    size_t want = 0, have = 0;
    b.seed = seed;
    cut(&b, 1 + kvft_random(&b.seed) % (kvft_random(&b.seed) % 2 == 0 ? 60000 : MEMORY));
    bool filled = kvft_random(&b.seed) % 2 == 0, record = filled || kvft_random(&b.seed) % 2 == 0;
    want += say(expected, &b.seed);
    memcpy(expected + want, memory, b.bytes);
    kvfi_place place = {.iov = b.iov, .bytes = b.bytes};
    b.left = filled ? b.bytes : 0;
    for (size_t i = 0; filled && i < b.bytes; i++) {
        memory[i] ^= 0xff;
    }
    if (record) {
        kvfi_conn_record(conn, place, true, filled ? finish : NULL, &b);
    } else {
        kvfi_conn_body(conn, place);
    }
    want += b.bytes;
    want += say(expected + want, &b.seed);
    while (have < want) {
        assert_int_equal(kvfi_conn_send(conn), KVF_WHY_NONE);
        have = drain(have, 1 + kvft_random(&b.seed) % 400000);
    }
    assert_true(kvfi_conn_all_sent(conn));
    assert_int_equal(conn->lender.inside, 0);
    assert_int_equal(have, want);
    assert_memory_equal(got, expected, want);
}

/* A part that can't be completed ends the connection: the server must not take what is not the record. */
static size_t finish_once(void *arg, size_t bytes) {
    size_t *calls = arg;
    return (*calls)++ == 0 ? bytes : 0;
}

static void can_not_be_finished(void **state) {
    (void)state;
    for (int lends = 0; lends < 2; lends++) {
        struct iovec iov = {memory, MEMORY};
        size_t calls = 0, have = 0;
        open_conn(lends != 0);
        kvfi_conn_record(conn, (kvfi_place){.iov = &iov, .bytes = MEMORY}, true, finish_once, &calls);
        kvf_reason why = kvfi_conn_send(conn);
        while (why == KVF_WHY_NONE) {
            have = drain(have, MEMORY);
            why = kvfi_conn_send(conn);
        }
        assert_int_equal(why, KVF_WHY_NOMEM);
        assert_false(kvfi_conn_is_open(conn));
        for (ssize_t n = 1; n > 0; have += n > 0 ? (size_t)n : 0) {
            n = recv(peer, got, MEMORY, 0);
        }
        assert_in_range(have, 1, MEMORY - 1);
        close_conn();
    }
}

static void in_order(bool lends) {
    open_conn(lends);
    for (uint64_t seed = 1; seed <= 150; seed++) {
        exchange(seed * 77);
    }
    close_conn();
}

static void lent(void **state) {
    (void)state;
    in_order(true);
}

static void copied(void **state) {
    (void)state;
    in_order(false);
    assert_int_equal(conn->lender.in, -1);
}

/* Lending ends, or does a single byte, at any place; a call fails only there (elsewhere it would end the
 * connection). */
static void lending_ends(void **state) {
    (void)state;
    for (uint64_t nth = 1; nth <= 60; nth++) {
        open_conn(true);
        exchange(13);
        kvft_faults_arm(KVFT_SHORT, nth);
        exchange(nth * 31 + 1);
        (void)kvft_faults_disarm();
        close_conn();
    }
}

static ssize_t splice_but_one(int from, int to, size_t bytes) {
    return kvfi_sys_real.splice(from, to, bytes > 1 ? bytes - 1 : bytes);
}

/* What is in the pipe goes next, be it a single byte. */
static void a_byte_stays_in_the_pipe(void **state) {
    (void)state;
    kvfi_systable table = kvfi_sys_real;
    table.splice = splice_but_one;
    open_conn(true);
    kvfi_sys_table = &table;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        exchange(seed * 77);
    }
    kvfi_sys_table = &kvfi_sys_real;
    close_conn();
}

static _Atomic int calls_left;

static ssize_t failing_vmsplice(int fd, const struct iovec *iov, size_t num, unsigned flags) {
    if (calls_left-- <= 0) {
        errno = EFAULT;
        return -1;
    }
    return kvfi_sys_real.vmsplice(fd, iov, num, flags);
}

static ssize_t failing_splice(int from, int to, size_t bytes) {
    if (calls_left-- <= 0) {
        errno = ENOSYS;
        return -1;
    }
    return kvfi_sys_real.splice(from, to, bytes);
}

/* Once it does not work, the rest is copied, and so is all that comes behind. */
static void does_not_work(void **state) {
    (void)state;
    kvfi_systable tables[2] = {kvfi_sys_real, kvfi_sys_real};
    tables[0].vmsplice = failing_vmsplice;
    tables[1].splice = failing_splice;
    for (int i = 0; i < 2; i++) {
        for (int calls = 0; calls < 20; calls++) {
            open_conn(true);
            kvfi_sys_table = &tables[i];
            calls_left = calls;
            for (uint64_t seed = 1; seed <= 6; seed++) {
                exchange((uint64_t)calls * 100 + seed);
            }
            assert_true(conn->lender.never || calls_left > 0);
            kvfi_sys_table = &kvfi_sys_real;
            close_conn();
        }
    }
}

/* ---- what is lent */

static size_t bytes_lent;

static ssize_t counting_vmsplice(int fd, const struct iovec *iov, size_t num, unsigned flags) {
    ssize_t n = kvfi_sys_real.vmsplice(fd, iov, num, flags);
    bytes_lent += n > 0 ? (size_t)n : 0;
    return n;
}

/* Pieces of a page are lent, shorter ones are copied. */
static void pieces_of_a_page(void **state) {
    (void)state;
    kvfi_systable table = kvfi_sys_real;
    table.vmsplice = counting_vmsplice;
    for (size_t piece = KVFI_PAGE - 1; piece <= KVFI_PAGE; piece++) {
        struct iovec iov[16];
        size_t have = 0;
        for (size_t i = 0; i < 16; i++) {
            iov[i] = (struct iovec){memory + i * KVFI_PAGE, piece};
        }
        open_conn(true);
        kvfi_sys_table = &table;
        bytes_lent = 0;
        kvfi_conn_record(conn, (kvfi_place){.iov = iov, .bytes = 16 * piece}, true, NULL, NULL);
        while (have < 16 * piece) {
            assert_int_equal(kvfi_conn_send(conn), KVF_WHY_NONE);
            have = drain(have, 16 * piece);
        }
        kvfi_sys_table = &kvfi_sys_real;
        assert_true(bytes_lent == (piece == KVFI_PAGE ? 16 * piece : 0) || conn->lender.never);
        for (size_t i = 0; i < 16; i++) {
            assert_memory_equal(got + i * piece, memory + i * KVFI_PAGE, piece);
        }
        close_conn();
    }
}

/* ---- patience */

static int64_t now_us;

static int64_t standing_clock(void) {
    return now_us;
}

static void is_patient_for_ms(int64_t ms) {
    assert_int_equal(kvfi_conn_patience_us(conn), ms * 1000);
}

/* Eight times the longest wait of this half minute or of the one before, within bounds. */
static void patience(void **state) {
    (void)state;
    kvfi_systable table = kvfi_sys_real;
    kvfi_pace pace = {.known = false};
    table.now_us = standing_clock;
    kvfi_sys_table = &table;
    kvfi_conn_init(conn, 100, &disconnects);
    is_patient_for_ms(100);
    conn->pace = &pace;
    conn->most_ms = 2000;
    now_us = 1000000;
    is_patient_for_ms(100);
    kvfi_conn_note_wait(conn, 50000);
    assert_true(pace.known);
    is_patient_for_ms(400);
    kvfi_conn_note_wait(conn, 20000);
    is_patient_for_ms(400);
    now_us += 30000000 - 1;
    kvfi_conn_note_wait(conn, 20000);
    is_patient_for_ms(400);
    now_us += 1;
    kvfi_conn_note_wait(conn, 20000); /* the period before had 50 */
    is_patient_for_ms(400);
    kvfi_conn_note_wait(conn, 60000);
    is_patient_for_ms(480);
    now_us += 30000000;
    kvfi_conn_note_wait(conn, 20000); /* 60 */
    is_patient_for_ms(480);
    now_us += 30000000;
    kvfi_conn_note_wait(conn, 20000); /* 20, now and before */
    is_patient_for_ms(160);
    kvfi_conn_note_wait(conn, 900000);
    is_patient_for_ms(2000);
    kvfi_sys_table = &kvfi_sys_real;
}

/* ---- what a wait says about the server */

static void test_a_wait_that_was_cancelled_says_nothing(void **state) {
    (void)state;
    kvfi_pace pace = {.known = false};
    atomic_bool cancelled = true;
    open_conn(false);
    conn->pace = &pace;
    conn->cancelled = &cancelled;
    assert_int_equal(kvfi_conn_wait(conn, kvfi_deadline(10000000)), KVF_WHY_NONE);
    assert_false(atomic_load(&pace.known));
    conn->cancelled = NULL;
    assert_int_equal(write(peer, "+", 1), 1);
    assert_int_equal(kvfi_conn_wait(conn, kvfi_deadline(10000000)), KVF_WHY_NONE);
    assert_true(atomic_load(&pace.known));
    conn->pace = NULL;
    close_conn();
}

/* ---- in the middle of a body */

static struct {
    int low_water;     /* SO_RCVLOWAT */
    int waits_ms[4];   /* how long was waited for, at most */
    unsigned num;      /* of them */
    unsigned moves_at; /* in which of them something comes; the others see nothing. 0: none */
} line;

static int line_setsockopt(int fd, int level, int name, const void *value, socklen_t len) {
    (void)fd;
    assert_true(level == SOL_SOCKET && name == SO_RCVLOWAT && len == sizeof line.low_water);
    memcpy(&line.low_water, value, sizeof line.low_water);
    return 0;
}

static int line_poll(struct pollfd *fds, nfds_t num, int timeout_ms) {
    assert_int_equal(num, 1);
    assert_true(line.num < 4);
    line.waits_ms[line.num++] = timeout_ms;
    if (line.num == line.moves_at) {
        fds->revents = POLLIN;
        return 1;
    }
    now_us += (int64_t)timeout_ms * 1000;
    return 0;
}

/* A connection over TCP on which so much of a body is to come. */
static void open_before(size_t left, kvfi_systable *table) {
    static struct iovec iov;
    kvfi_reply reply;
    char head[32];
    bool more = false;
    open_conn(false);
    conn->tcp = true;
    iov = (struct iovec){memory, left};
    int len = snprintf(head, sizeof head, "$%zu\r\n", left);
    assert_int_equal(write(peer, head, (size_t)len), len);
    kvfi_resp_into(&conn->in, (kvfi_place){.iov = &iov, .bytes = left});
    assert_int_equal(kvfi_resp_next(&conn->in, &reply), KVFI_RESP_MORE);
    assert_int_equal(kvfi_conn_recv(conn, &more), KVF_WHY_NONE);
    assert_int_equal(kvfi_resp_next(&conn->in, &reply), KVFI_RESP_MORE);
    assert_int_equal(kvfi_resp_left(&conn->in), left);
    *table = kvfi_sys_real;
    table->now_us = standing_clock;
    table->setsockopt = line_setsockopt;
    table->poll = line_poll;
    kvfi_sys_table = table;
    memset(&line, 0, sizeof line);
    line.low_water = 1;
    now_us = 1000000;
}

static void close_before(void) {
    kvfi_sys_table = &kvfi_sys_real;
    close_conn();
}

/* Over TCP a batch is waited for while a batch is to come. */
static void test_a_batch_is_waited_for(void **state) {
    (void)state;
    kvfi_systable table;
    for (size_t left = KVFI_CONN_BATCH - 1; left <= KVFI_CONN_BATCH; left++) {
        for (int tcp = 0; tcp < 2; tcp++) {
            bool batch = tcp == 1 && left == KVFI_CONN_BATCH;
            open_before(left, &table);
            conn->tcp = tcp == 1;
            line.moves_at = 1;
            assert_int_equal(kvfi_conn_wait(conn, KVFI_NEVER), KVF_WHY_NONE);
            assert_int_equal(line.low_water, batch ? KVFI_CONN_BATCH : 1);
            assert_int_equal(line.waits_ms[0], batch ? 5000 : 10000);
            close_before();
        }
    }
}

/* More of a server that was quick, where as much is to come. It makes no link slower: what comes late was not quick. */
static void test_a_larger_batch_of_a_quick_server(void **state) {
    (void)state;
    kvfi_systable table;
    open_before(KVFI_QUICK_BATCH, &table);
    line.moves_at = 1;
    assert_int_equal(kvfi_conn_wait(conn, KVFI_NEVER), KVF_WHY_NONE);
    assert_int_equal(line.low_water, KVFI_CONN_BATCH);
    line.num = 0;
    assert_int_equal(kvfi_conn_wait(conn, KVFI_NEVER), KVF_WHY_NONE);
    assert_int_equal(line.low_water, KVFI_QUICK_BATCH);
    conn->tcp = false; /* a unix socket has none */
    line.num = 0;
    assert_int_equal(kvfi_conn_wait(conn, KVFI_NEVER), KVF_WHY_NONE);
    assert_int_equal(line.low_water, 1);
    conn->tcp = true;
    line.num = line.moves_at = 0; /* and then it is silent */
    assert_int_equal(kvfi_conn_wait(conn, KVFI_NEVER), KVF_WHY_STALLED);
    assert_int_equal(line.low_water, 1);
    assert_int_equal(line.waits_ms[0], 5000);
    close_before();
    open_before(KVFI_QUICK_BATCH - 1, &table);
    for (int i = 0; i < 2; i++) {
        line.num = 0;
        line.moves_at = 1;
        assert_int_equal(kvfi_conn_wait(conn, KVFI_NEVER), KVF_WHY_NONE);
        assert_int_equal(line.low_water, KVFI_CONN_BATCH);
    }
    close_before();
}

/* A slow link brings less in that time: the second half of it is for any byte, and so are the waits from then on. */
static void test_a_slow_link_is_no_stall(void **state) {
    (void)state;
    kvfi_systable table;
    open_before(MEMORY, &table);
    line.moves_at = 2;
    assert_int_equal(kvfi_conn_wait(conn, KVFI_NEVER), KVF_WHY_NONE);
    assert_int_equal(line.num, 2);
    assert_int_equal(line.waits_ms[0], 5000);
    assert_int_equal(line.waits_ms[1], 5000);
    assert_int_equal(line.low_water, 1);
    line.num = line.moves_at = 0;
    assert_int_equal(kvfi_conn_wait(conn, KVFI_NEVER), KVF_WHY_STALLED);
    assert_int_equal(line.num, 1);
    assert_int_equal(line.waits_ms[0], 10000);
    close_before();
    open_before(MEMORY, &table);
    assert_int_equal(kvfi_conn_wait(conn, now_us + 3000000), KVF_WHY_BUDGET);
    assert_int_equal(line.waits_ms[0], 3000);
    close_before();
}

/* ---- waits that fail */

static int wait_errors[4]; /* of the waits, in order; 0: nothing comes; -1: something does */
static unsigned num_waits;

static int failing_poll(struct pollfd *fds, nfds_t num, int timeout_ms) {
    assert_int_equal(num, 1);
    assert_true(num_waits < 4);
    int error = wait_errors[num_waits++];
    fds->revents = (short)(error < 0 ? POLLIN : 0);
    now_us += error == 0 ? (int64_t)timeout_ms * 1000 : 0;
    errno = error > 0 ? error : ENOMEM; /* without an error it says nothing */
    return error > 0 ? -1 : error < 0;
}

/* A signal ends no wait. A failure does, and a wait that sees nothing until the end is a stall, whatever errno says. */
static void test_waits_that_fail(void **state) {
    (void)state;
    static const struct {
        int errors[4];
        kvf_reason why;
        unsigned waits;
    } rows[] = {{{EINTR, EAGAIN, -1}, KVF_WHY_NONE, 3},
                {{EINTR, ENOMEM}, KVF_WHY_UNREACHABLE, 2},
                {{0}, KVF_WHY_STALLED, 1},
                {{EAGAIN, 0}, KVF_WHY_STALLED, 2}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        kvfi_systable table = kvfi_sys_real;
        table.now_us = standing_clock;
        table.poll = failing_poll;
        memcpy(wait_errors, rows[i].errors, sizeof wait_errors);
        num_waits = 0;
        now_us = 1000000;
        open_conn(false);
        kvfi_sys_table = &table;
        assert_int_equal(kvfi_conn_wait(conn, KVFI_NEVER), rows[i].why);
        assert_int_equal(num_waits, rows[i].waits);
        assert_int_equal(kvfi_conn_is_open(conn), rows[i].why == KVF_WHY_NONE);
        kvfi_sys_table = &kvfi_sys_real;
        close_conn();
    }
}

static ssize_t write_nothing(int fd, const struct iovec *iov, int num) {
    (void)fd, (void)iov, (void)num;
    errno = EIO;
    return 0;
}

/* A socket that takes no byte and reports no error would be written to for ever: the connection ends. */
static void test_a_write_of_nothing_ends_the_connection(void **state) {
    (void)state;
    kvfi_systable table = kvfi_sys_real;
    table.writev = write_nothing;
    open_conn(false);
    kvfi_cmd_text(kvfi_conn_room(conn, MAX_TEXT), "PING");
    kvfi_sys_table = &table;
    kvf_reason why = kvfi_conn_send(conn);
    kvfi_sys_table = &kvfi_sys_real;
    assert_int_equal(why, KVF_WHY_UNREACHABLE);
    assert_false(kvfi_conn_is_open(conn));
    close_conn();
}

/* ---- a server that reads as fast as we write */

static unsigned writes;
static atomic_bool cancelled;

static ssize_t write_a_page(int fd, const struct iovec *iov, int num) {
    (void)fd;
    assert_true(num > 0);
    atomic_store(&cancelled, ++writes % 3 == 0);
    return (ssize_t)(iov->iov_len < KVFI_PAGE ? iov->iov_len : KVFI_PAGE);
}

/* A cancelled batch is noticed between two writes, and its caller decides how to go on. */
static void test_a_cancelled_send_ends(void **state) {
    (void)state;
    kvfi_systable table = kvfi_sys_real;
    struct iovec iov = {memory, 8 * KVFI_PAGE};
    table.writev = write_a_page;
    open_conn(false);
    conn->cancelled = &cancelled;
    kvfi_conn_body(conn, (kvfi_place){.iov = &iov, .bytes = iov.iov_len});
    kvfi_sys_table = &table;
    writes = 0;
    for (unsigned calls = 1; calls <= 3; calls++) {
        assert_int_equal(kvfi_conn_send(conn), KVF_WHY_NONE);
        assert_int_equal(writes, calls < 3 ? 3 * calls : 8);
        assert_int_equal(kvfi_conn_all_sent(conn), calls == 3);
    }
    kvfi_sys_table = &kvfi_sys_real;
    close_conn();
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {TEST(test_a_wait_that_was_cancelled_says_nothing),
                                       TEST(lent),
                                       TEST(copied),
                                       TEST(can_not_be_finished),
                                       TEST(lending_ends),
                                       TEST(a_byte_stays_in_the_pipe),
                                       TEST(does_not_work),
                                       TEST(pieces_of_a_page),
                                       TEST(patience),
                                       TEST(test_a_batch_is_waited_for),
                                       TEST(test_a_larger_batch_of_a_quick_server),
                                       TEST(test_a_slow_link_is_no_stall),
                                       TEST(test_waits_that_fail),
                                       TEST(test_a_write_of_nothing_ends_the_connection),
                                       TEST(test_a_cancelled_send_ends)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
