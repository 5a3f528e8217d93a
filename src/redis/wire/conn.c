/* SPDX-License-Identifier: Apache-2.0
 *
 * The bytes of one connection: commands and bodies out, replies in, under deadlines. All reading and writing of sockets
 * is in transmit and receive, with TLS or without, and in kvfi_lend.
 */
#include "redis/wire/conn.h"

#include <errno.h>
#include <stdio.h>

#include "base/interrupt.h"

#define CANCEL_STEP_US 20000 /* how often a cancellable wait checks whether it is cancelled */
#define SEND_BUFFER    (1 << 20)
#define PATIENCE       8          /* a stall is this many times longer than any earlier pause */
#define PERIOD_US      30000000LL /* a pause of the server is remembered for this time, and for one more period */
#define QUICK_US       1000       /* not worth remembering */
/* After a wait for KVFI_CONN_BATCH that was shorter than this, the next one is for KVFI_QUICK_BATCH. Four times this is still
 * a short pause of a server, so that nothing is learned from it about stalls. */
#define SHORT_WAIT_US 4000
/* Copied pieces fit into the cache of one core. Each piece that a quick server has to wait for wakes it once more. For
 * lent pieces the server needs the first bytes soon: only the hash of the previous piece lies in between. */
#define COPIED_PIECE ((size_t)512 << 10)
#define LENT_PIECE   ((size_t)128 << 10)
#define AHEAD_BYTES  ((size_t)512 << 10)
#define MIN_LENT     ((size_t)32 << 10) /* below this, a copy is as quick */
/* At most what has left the socket and is not a whole record yet, plus a margin. */
#define TLS_HOLDS ((size_t)32 << 10)

void kvfi_conn_init(kvfi_conn *conn, uint32_t stall_ms, _Atomic uint64_t *disconnects) {
    conn->fd = -1;
    conn->tls = NULL;
    conn->stall_ms = conn->most_ms = stall_ms;
    conn->pace = NULL;
    conn->reused = conn->stalled = conn->broke = false;
    conn->idle_us = 0;
    conn->before = 0;
    conn->patient = false;
    conn->disconnects = disconnects;
    conn->asking = false;
    conn->received = 0;
    conn->cancelled = NULL;
    conn->patience_us = 0;
    conn->said[0] = '\0';
    conn->lends = false;
    kvfi_lender_init(&conn->lender);
}

void kvfi_conn_close(kvfi_conn *conn) {
    if (conn->fd >= 0) {
        kvfi_tls_free(conn->tls);
        conn->tls = NULL;
        (void)kvfi_sys->close(conn->fd);
        conn->fd = -1;
        kvfi_lender_close(&conn->lender);
    }
}

/* Closed because of an error or a deadline, which is counted. */
static kvf_reason fail(kvfi_conn *conn, kvf_reason why) {
    if (conn->fd >= 0) {
        atomic_fetch_add_explicit(conn->disconnects, 1, memory_order_relaxed);
        conn->broke = why == KVF_WHY_UNREACHABLE;
        conn->stalled = why == KVF_WHY_STALLED;
    }
    kvfi_conn_close(conn);
    return why;
}

kvf_reason kvfi_conn_broken(kvfi_conn *conn, const char *what) {
    if (what != conn->said) {
        snprintf(conn->said, sizeof conn->said, "%s", what);
    }
    kvfi_log(KVF_LOG_WARN, "redis: %s; the connection is closed", what);
    (void)fail(conn, KVF_WHY_UNREACHABLE);
    conn->broke = false; /* it was reported */
    return KVF_WHY_UNREACHABLE;
}

static kvf_reason fail_errno(kvfi_conn *conn) {
    const kvfi_tls_trouble *trouble = conn->tls != NULL ? kvfi_tls_trouble_of(conn->tls) : NULL;
    if (trouble != NULL && trouble->what[0] != '\0') {
        conn->config = trouble->config;
        snprintf(conn->said, sizeof conn->said, "%s", trouble->what);
        return fail(conn, KVF_WHY_UNREACHABLE);
    }
    snprintf(conn->said, sizeof conn->said, "the connection broke (errno %d)", errno);
    return fail(conn, KVF_WHY_UNREACHABLE);
}

void kvfi_conn_note_error(kvfi_conn *conn, const kvfi_reply *reply) {
    size_t len = reply->len < sizeof conn->said - 1 ? reply->len : sizeof conn->said - 1;
    memcpy(conn->said, reply->text, len);
    conn->said[len] = '\0';
}

/* ---- the transport: as writev and readv do ---- */

static ssize_t transmit(kvfi_conn *conn, size_t num) {
    return conn->tls != NULL ? kvfi_tls_send(conn->tls, conn->iov, num)
                             : kvfi_sys->writev(conn->fd, conn->iov, (int)num);
}

static ssize_t receive(kvfi_conn *conn, size_t num) {
    return conn->tls != NULL ? kvfi_tls_recv(conn->tls, conn->iov, num)
                             : kvfi_sys->readv(conn->fd, conn->iov, (int)num);
}

/* ---- writing ---- */

kvfi_cmd *kvfi_conn_room(kvfi_conn *conn, size_t bytes) {
    kvfi_cmd *out = &conn->out;
    if (conn->sent > 0 && out->cap - out->len < bytes) {
        memmove(out->data, out->data + conn->sent, out->len - conn->sent);
        out->len -= conn->sent;
        conn->mark -= kvfi_conn_body_sent(conn) ? 0 : conn->sent;
        conn->sent = 0;
    }
    return out->cap - out->len < bytes ? NULL : out;
}

/* The writer chooses the buffer of a unix socket; the default is 208 KiB. A buffer that takes a value near 1 MiB whole
 * lets us continue while the server reads it. The kernel doubles the requested size. Without the right to set it,
 * everything works as well. */
static void set_send_buffer(kvfi_conn *conn) {
    int bytes = SEND_BUFFER;
    if (conn->tcp || conn->roomy) {
        return;
    }
    conn->roomy = true;
    if (kvfi_sys->setsockopt(conn->fd, SOL_SOCKET, SO_SNDBUFFORCE, &bytes, sizeof bytes) != 0) {
        (void)kvfi_sys->setsockopt(conn->fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    }
}

void kvfi_conn_body(kvfi_conn *conn, kvfi_place body) {
    set_send_buffer(conn);
    conn->body = body;
    conn->held = 0;
    conn->lent = false;
    conn->mark = conn->out.len;
}

void kvfi_conn_record(kvfi_conn *conn, kvfi_place body, bool may_lend, size_t (*fill)(void *, size_t), void *fill_arg) {
    kvfi_conn_body(conn, body);
    bool is_warm = fill != NULL; /* hashed just before it is sent, so over TCP a copy is faster */
    conn->lent = may_lend && conn->lends && conn->tls == NULL && body.bytes >= MIN_LENT && !(conn->tcp && is_warm);
    conn->held = fill != NULL ? body.bytes : 0;
    conn->fill = fill;
    conn->fill_arg = fill_arg;
}

/* The commands before the body, or all if there is none. */
static size_t gather_commands(const kvfi_conn *conn, struct iovec *iov) {
    size_t stop = kvfi_conn_body_sent(conn) ? conn->out.len : conn->mark;
    *iov = (struct iovec){conn->out.data + conn->sent, stop - conn->sent};
    return stop > conn->sent;
}

/* Of the body's pieces of memory: all, or the first ones as long as they are smaller than a page, or as long as they
 * are not. */
typedef enum pieces { ALL_PIECES, SMALL_PIECES, LARGE_PIECES } pieces;

/* The part of those that may be sent. *rest: bytes of the body outside it. */
static size_t gather_body(const kvfi_conn *conn, struct iovec *iov, size_t cap, pieces which, size_t *rest) {
    size_t left = conn->body.bytes - conn->held, skip = conn->body.skip, num = 0;
    *rest = conn->body.bytes;
    for (const struct iovec *from = conn->body.iov; left > 0 && num < cap; from++) {
        size_t whole = from->iov_len - skip, len = whole < left ? whole : left;
        if (whole > 0 && which != ALL_PIECES && which != (whole < KVFI_PAGE ? SMALL_PIECES : LARGE_PIECES)) {
            break;
        }
        if (len > 0) {
            iov[num++] = (struct iovec){(char *)from->iov_base + skip, len};
        }
        left -= len;
        *rest -= len;
        skip = 0;
    }
    return num;
}

/* In order: commands, the body, commands after it. */
static ssize_t send_copy(kvfi_conn *conn, pieces which) {
    struct iovec *iov = conn->iov;
    size_t rest = 0, num = gather_commands(conn, iov);
    if (!kvfi_conn_body_sent(conn)) {
        num += gather_body(conn, iov + num, KVFI_CONN_IOV - num, which, &rest);
        if (rest == 0 && num < KVFI_CONN_IOV && conn->mark < conn->out.len) {
            iov[num++] = (struct iovec){conn->out.data + conn->mark, conn->out.len - conn->mark};
        }
    }
    return transmit(conn, num);
}

static bool is_lent(const kvfi_conn *conn) {
    return conn->lent && !conn->lender.never;
}

/* Pieces of a page and more are lent. Shorter ones are copied just as quickly, and a record's head and checksum may lie
 * in memory that is reused afterwards. Commands are copied, because their buffer is reused before the server has read
 * them. */
static ssize_t send_some(kvfi_conn *conn) {
    size_t rest = 0, num = 0;
    if (!is_lent(conn) || kvfi_conn_body_sent(conn)) {
        return send_copy(conn, ALL_PIECES);
    }
    if (conn->lender.inside > 0) {
        num = gather_body(conn, conn->iov, KVFI_CONN_IOV, ALL_PIECES, &rest);
    } else if (conn->sent == conn->mark) {
        num = gather_body(conn, conn->iov, KVFI_CONN_IOV, LARGE_PIECES, &rest);
    }
    return num > 0 ? kvfi_lend(&conn->lender, conn->fd, conn->iov, num) : send_copy(conn, SMALL_PIECES);
}

/* `num` bytes have been sent. */
static void sent(kvfi_conn *conn, size_t num) {
    size_t before = kvfi_conn_body_sent(conn) ? num : conn->mark - conn->sent;
    if (before > num) {
        before = num;
    }
    conn->sent += before;
    num -= before;
    size_t of_body = num < conn->body.bytes ? num : conn->body.bytes;
    kvfi_place_advance(&conn->body, of_body);
    num -= of_body;
    conn->sent += num;
}

/* Finishes one more piece of the body. False if that failed. */
static bool fill(kvfi_conn *conn) {
    size_t piece = is_lent(conn) ? LENT_PIECE : COPIED_PIECE;
    size_t filled = conn->fill(conn->fill_arg, piece < conn->held ? piece : conn->held);
    conn->held -= filled;
    return filled > 0;
}

/* While the socket is full there is time for it, but for no more than stays in the cache until it is sent. */
static bool fill_ahead(kvfi_conn *conn) {
    if (conn->held == 0 || conn->body.bytes - conn->held >= AHEAD_BYTES) {
        return false;
    }
    return fill(conn);
}

kvf_reason kvfi_conn_send(kvfi_conn *conn) {
    while (!kvfi_conn_all_sent(conn)) {
        if (conn->held > 0 && conn->held == conn->body.bytes && !fill(conn)) {
            snprintf(conn->said, sizeof conn->said, "no memory to seal a record");
            return fail(conn, KVF_WHY_NOMEM);
        }
        ssize_t n = send_some(conn);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            if (!fill_ahead(conn)) {
                return KVF_WHY_NONE;
            }
            continue;
        }
        if (n <= 0) {
            return fail_errno(conn);
        }
        sent(conn, (size_t)n);
        (void)kvfi_interrupt_look();
        if (kvfi_conn_is_cancelled(conn)) {
            return KVF_WHY_NONE; /* a server that reads as fast as we write would keep us here to the end */
        }
    }
    conn->sent = 0;
    conn->out.len = 0;
    return KVF_WHY_NONE;
}

/* ---- reading ---- */

kvf_reason kvfi_conn_recv(kvfi_conn *conn, bool *got) {
    *got = false;
    size_t num = kvfi_resp_want(&conn->in, conn->iov, KVFI_CONN_IOV);
    ssize_t n;
    do {
        n = receive(conn, num);
    } while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        return KVF_WHY_NONE;
    }
    if (n < 0) {
        return fail_errno(conn);
    }
    if (n == 0) {
        snprintf(conn->said, sizeof conn->said, "the server closed the connection");
        return fail(conn, KVF_WHY_UNREACHABLE);
    }
    kvfi_resp_got(&conn->in, (size_t)n);
    conn->received += (uint64_t)n;
    *got = true;
    return KVF_WHY_NONE;
}

static kvf_reason fail_late(kvfi_conn *conn) {
    snprintf(conn->said, sizeof conn->said, "the deadline passed");
    return fail(conn, KVF_WHY_BUDGET);
}

kvf_reason kvfi_conn_in_time(kvfi_conn *conn, int64_t deadline_us) {
    (void)kvfi_interrupt_look();
    return kvfi_sys->now_us() < deadline_us ? KVF_WHY_NONE : fail_late(conn);
}

/* 1: something moved. 0: nothing until then. -1: poll failed. */
static int poll_until(kvfi_conn *conn, int64_t until_us) {
    struct pollfd p = {.fd = conn->fd, .events = kvfi_conn_all_sent(conn) ? POLLIN : POLLIN | POLLOUT};
    for (;;) {
        int64_t look_us = kvfi_sys->now_us() + CANCEL_STEP_US;
        int n = kvfi_sys->poll(&p, 1, kvfi_poll_ms(conn->cancelled != NULL && look_us < until_us ? look_us : until_us));
        if (n > 0) {
            conn->readable = (p.revents & ~POLLOUT) != 0; /* reading also detects an end or an error */
            return 1;
        }
        if (n < 0 && errno != EINTR && errno != EAGAIN) {
            return -1;
        }
        (void)kvfi_interrupt_ask();
        if (kvfi_conn_is_cancelled(conn)) {
            return 1; /* as if something had arrived: the reader finds nothing, and checks why */
        }
        if (kvfi_sys->now_us() >= until_us) {
            return 0;
        }
    }
}

/* How much to wait for in the middle of a body; 1 at its end. A quick server brings more in the time of a wake-up. */
static int batch_of(const kvfi_conn *conn) {
    size_t held = conn->tls != NULL ? TLS_HOLDS : 0, left = kvfi_resp_left(&conn->in);
    if (!conn->tcp || conn->slow || left < KVFI_CONN_BATCH + held) {
        return 1;
    }
    return conn->quick && left >= KVFI_QUICK_BATCH + held ? KVFI_QUICK_BATCH : KVFI_CONN_BATCH;
}

/* In the middle of a body over TCP, waking up for every segment costs both sides more than the copying. (On unix
 * sockets poll ignores SO_RCVLOWAT.) If it can't be set, everything works without. */
static void set_low_water(kvfi_conn *conn) {
    int low_water = batch_of(conn);
    if (low_water != conn->low_water &&
        kvfi_sys->setsockopt(conn->fd, SOL_SOCKET, SO_RCVLOWAT, &low_water, sizeof low_water) == 0) {
        conn->low_water = low_water;
    }
}

/* ---- patience ---- */

void kvfi_conn_note_wait(const kvfi_conn *conn, int64_t waited_us) {
    kvfi_pace *pace = conn->pace;
    if (pace == NULL) {
        return;
    }
    atomic_store_explicit(&pace->known, true, memory_order_relaxed);
    if (waited_us < QUICK_US) {
        return;
    }
    int64_t now = kvfi_sys->now_us();
    int64_t longest_us = atomic_load_explicit(&pace->longest_us[0], memory_order_relaxed);
    if (now >= atomic_load_explicit(&pace->turn_us, memory_order_relaxed)) {
        atomic_store_explicit(&pace->turn_us, now + PERIOD_US, memory_order_relaxed);
        atomic_store_explicit(&pace->longest_us[1], longest_us, memory_order_relaxed);
        longest_us = 0;
    }
    if (waited_us > longest_us) {
        atomic_store_explicit(&pace->longest_us[0], waited_us, memory_order_relaxed);
    }
}

static int64_t own_patience_us(const kvfi_conn *conn) {
    int64_t least_us = (int64_t)conn->stall_ms * 1000, most_us = (int64_t)conn->most_ms * 1000;
    if (conn->pace == NULL) {
        return least_us;
    }
    int64_t a = atomic_load_explicit(&conn->pace->longest_us[0], memory_order_relaxed);
    int64_t b = atomic_load_explicit(&conn->pace->longest_us[1], memory_order_relaxed);
    int64_t want_us = PATIENCE * (a > b ? a : b);
    return want_us < least_us ? least_us : want_us < most_us ? want_us : most_us;
}

bool kvfi_conn_is_impatient(const kvfi_conn *conn) {
    return conn->patience_us > 0 && conn->patience_us < own_patience_us(conn);
}

int64_t kvfi_conn_patience_us(const kvfi_conn *conn) {
    if (conn->patient) {
        return KVFI_NEVER / 2;
    }
    return conn->patience_us > 0 ? conn->patience_us : own_patience_us(conn);
}

kvf_reason kvfi_conn_stall(kvfi_conn *conn, int64_t waited_us) {
    snprintf(conn->said, sizeof conn->said, "nothing arrived from the server for %lld ms",
             (long long)(waited_us / 1000));
    return fail(conn, KVF_WHY_STALLED);
}

/* As poll_until. In the middle of a body over TCP it wakes only for a batch of bytes (low water), which saves a wake-up
 * for every segment. A link that brings less in half of a stall is slow: less is progress too, so from then on the
 * connection waits for any byte. */
static int wait_until(kvfi_conn *conn, int64_t from_us, int64_t until_us) {
    int64_t half_us = from_us + (int64_t)conn->stall_ms * 1000 / 2;
    set_low_water(conn);
    if (conn->low_water > 1) {
        int moved = poll_until(conn, until_us < half_us ? until_us : half_us);
        if (moved != 0) {
            return moved;
        }
        conn->slow = true;
        set_low_water(conn);
    }
    return poll_until(conn, until_us);
}

kvf_reason kvfi_conn_wait(kvfi_conn *conn, int64_t deadline_us) {
    if (conn->tls != NULL && kvfi_tls_take_more(conn->tls)) {
        conn->readable = true;
        return KVF_WHY_NONE;
    }
    int64_t from_us = kvfi_sys->now_us(), stall_us = kvfi_conn_patience_us(conn);
    bool hurried = deadline_us <= from_us + stall_us;
    int moved = wait_until(conn, from_us, hurried ? deadline_us : from_us + stall_us);
    if (moved < 0) {
        return fail_errno(conn);
    }
    if (moved == 0) {
        return hurried ? fail_late(conn) : kvfi_conn_stall(conn, stall_us);
    }
    if (!kvfi_conn_is_cancelled(conn)) { /* else perhaps nothing arrived */
        int64_t waited_us = kvfi_sys->now_us() - from_us;
        conn->quick = waited_us < SHORT_WAIT_US;
        kvfi_conn_note_wait(conn, waited_us);
    }
    return KVF_WHY_NONE;
}

kvf_reason kvfi_conn_heed(kvfi_conn *conn) {
    if (!kvfi_conn_is_cancelled(conn)) {
        return KVF_WHY_NONE;
    }
    snprintf(conn->said, sizeof conn->said, "the call was cancelled");
    kvfi_conn_close(conn);
    return KVF_WHY_CLOSED;
}

kvf_reason kvfi_conn_move(kvfi_conn *conn, bool *got, int64_t deadline_us) {
    *got = false;
    kvf_reason why = kvfi_conn_send(conn);
    if (why == KVF_WHY_NONE) {
        why = kvfi_conn_recv(conn, got);
    }
    if (why == KVF_WHY_NONE) {
        why = *got ? kvfi_conn_in_time(conn, deadline_us) : kvfi_conn_wait(conn, deadline_us);
    }
    return why;
}

kvf_reason kvfi_conn_next(kvfi_conn *conn, kvfi_reply *reply, int64_t deadline_us) {
    for (;;) {
        kvfi_resp_event event = kvfi_resp_next(&conn->in, reply);
        if (event == KVFI_RESP_REPLY) {
            if (reply->kind == KVFI_RESP_ERROR) {
                kvfi_conn_note_error(conn, reply);
            }
            return KVF_WHY_NONE;
        }
        if (event == KVFI_RESP_BAD) {
            return kvfi_conn_broken(conn, KVFI_NOT_RESP);
        }
        bool got = false;
        kvf_reason why = kvfi_conn_move(conn, &got, deadline_us);
        if (why == KVF_WHY_NONE && !got) {
            why = kvfi_conn_heed(conn);
        }
        if (why != KVF_WHY_NONE) {
            return why;
        }
    }
}

kvf_reason kvfi_conn_skip_owed(kvfi_conn *conn, int64_t deadline_us) {
    while (conn->owed > 0) {
        kvfi_reply reply;
        kvf_reason why = kvfi_conn_next(conn, &reply, deadline_us);
        if (why != KVF_WHY_NONE) {
            return why;
        }
        conn->owed -= reply.last;
    }
    return KVF_WHY_NONE;
}
