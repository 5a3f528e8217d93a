/* SPDX-License-Identifier: Apache-2.0
 *
 * Connecting: unix sockets, TCP over IPv4 and IPv6. Names are resolved on a separate thread, since nothing bounds the
 * time of a lookup.
 */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/un.h>

#include "base/interrupt.h"
#include "redis/wire/conn.h"
#include "tier/pool.h"

#define TLS_ROUND_TRIPS 2 /* of a full handshake, before TLS 1.3 */

/* ---- names ---- */

/* Shared by the resolving thread and the one that waits for it. The last one to leave frees it. */
typedef struct lookup {
    pthread_mutex_t lock;
    pthread_cond_t done_cond;
    unsigned refs;
    bool done;
    char host[256], service[8];
    struct addrinfo *result; /* NULL after done: not found */
} lookup;

static const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};

static void release(lookup *l) {
    pthread_mutex_lock(&l->lock);
    bool last = --l->refs == 0;
    pthread_mutex_unlock(&l->lock);
    if (last) {
        if (l->result != NULL) {
            freeaddrinfo(l->result);
        }
        pthread_cond_destroy(&l->done_cond);
        pthread_mutex_destroy(&l->lock);
        kvfi_free(l);
    }
}

static void *look_up(void *arg) {
    lookup *l = arg;
    struct addrinfo *result = NULL;
    if (kvfi_sys->resolve(l->host, l->service, &hints, &result) != 0) {
        result = NULL;
    }
    pthread_mutex_lock(&l->lock);
    l->result = result;
    l->done = true;
    pthread_cond_signal(&l->done_cond);
    pthread_mutex_unlock(&l->lock);
    release(l);
    return NULL;
}

static lookup *new_lookup(const char *host, const char *service) {
    lookup *l = kvfi_alloc_zero(1, sizeof *l);
    if (l == NULL) {
        return NULL;
    }
    pthread_mutex_init(&l->lock, NULL);
    kvfi_cond_init(&l->done_cond);
    snprintf(l->host, sizeof l->host, "%s", host);
    snprintf(l->service, sizeof l->service, "%s", service);
    l->refs = 2;
    return l;
}

static kvf_reason resolve_name(struct addrinfo **out, const char *host, const char *service, int64_t deadline_us) {
    lookup *l = new_lookup(host, service);
    pthread_t thread;
    if (l == NULL) {
        return KVF_WHY_NOMEM;
    }
    if (kvfi_sys->thread(&thread, look_up, l) != 0) {
        l->refs = 1;
        release(l);
        return KVF_WHY_NOMEM;
    }
    pthread_mutex_lock(&l->lock);
    bool in_time = true;
    while (!l->done && in_time) {
        in_time = kvfi_cond_wait(&l->done_cond, &l->lock, deadline_us);
    }
    bool done = l->done;
    *out = l->result; /* ours from here on */
    l->result = NULL;
    pthread_mutex_unlock(&l->lock);
    release(l);
    if (done) {
        pthread_join(thread, NULL); /* it has ended */
    } else {
        pthread_detach(thread); /* it ends when the resolver gives up, whenever that is */
    }
    return *out != NULL ? KVF_WHY_NONE : KVF_WHY_UNREACHABLE;
}

static kvf_reason resolve(struct addrinfo **out, const kvfi_endpoint *to, int64_t deadline_us) {
    char service[8];
    struct addrinfo numeric = hints;
    numeric.ai_flags |= AI_NUMERICHOST;
    snprintf(service, sizeof service, "%u", to->port);
    *out = NULL;
    if (kvfi_sys->resolve(to->host, service, &numeric, out) == 0) {
        return KVF_WHY_NONE;
    }
    return resolve_name(out, to->host, service, deadline_us);
}

/* ---- sockets ---- */

static bool is_loopback(const struct sockaddr *address) {
    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *in = (const void *)address;
        return ntohl(in->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
    }
    const struct sockaddr_in6 *in6 = (const void *)address;
    return address->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&in6->sin6_addr);
}

/* All of these are optional, so none is checked. */
static void set_options(int fd, const struct sockaddr *address) {
    int on = 1, idle_s = 15, interval_s = 5, count = 3;
    static const char plain[] = "reno"; /* every kernel has it, and allows it by default */
    if (address->sa_family == AF_UNIX) {
        return;
    }
    if (is_loopback(address)) {
        /* Nothing is lost on the loopback, so there is nothing to control. A system set to BBR would pace our sending,
         * for a tenth of the speed and more. */
        (void)kvfi_sys->setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, plain, sizeof plain - 1);
    }
    (void)kvfi_sys->setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    (void)kvfi_sys->setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    (void)kvfi_sys->setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    (void)kvfi_sys->setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
    (void)kvfi_sys->setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
}

/* Begins to connect. A socket, or -1 with errno. *done: already connected. */
static int begin(int family, const struct sockaddr *address, socklen_t len, bool *done) {
    int fd = kvfi_sys->socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return -1;
    }
    set_options(fd, address);
    *done = kvfi_sys->connect(fd, address, len) == 0;
    if (*done || errno == EINPROGRESS || errno == EINTR) {
        return fd;
    }
    int error = errno;
    (void)kvfi_sys->close(fd);
    errno = error;
    return -1;
}

/* A unix socket whose server accepts too slowly returns EAGAIN, and can't be polled for that. */
static int dial_unix(const char *path, int64_t deadline_us) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    bool done = false;
    if (strlen(path) >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(address.sun_path, path, strlen(path) + 1);
    int fd = begin(AF_UNIX, (const struct sockaddr *)&address, sizeof address, &done);
    while (fd < 0 && errno == EAGAIN) {
        if (kvfi_sys->now_us() >= deadline_us || kvfi_interrupt_look()) {
            errno = ETIMEDOUT;
            return -1;
        }
        (void)kvfi_interruptible_poll(NULL, 0, kvfi_deadline(1000));
        fd = begin(AF_UNIX, (const struct sockaddr *)&address, sizeof address, &done);
    }
    return fd;
}

static bool is_socket(const char *path) {
    struct stat st;
    return kvfi_sys->fstatat(AT_FDCWD, path, &st, 0) != 0 || S_ISSOCK(st.st_mode);
}

/* ---- several addresses of one name: the next is tried beside the last when that has not answered for a moment, and
 * the first that answers is taken, and is the first to be tried next time */

#define MAX_ADDRESSES 8u
#define HEAD_START_US 100000 /* or less: within its time, every address is tried */

typedef struct race {
    const struct addrinfo *list[MAX_ADDRESSES]; /* in the order of the attempts */
    size_t num, next;
    struct pollfd fds[MAX_ADDRESSES]; /* under way */
    uint32_t marks[MAX_ADDRESSES];    /* of their addresses */
    size_t num_fds;
    int64_t next_us; /* when the next one starts */
    int error;
} race;

/* An address as a number that is not 0. */
static uint32_t mark_of(const struct addrinfo *a) {
    uint32_t mark = 2166136261u;
    for (socklen_t i = 0; i < a->ai_addrlen; i++) {
        mark = (mark ^ ((const uint8_t *)a->ai_addr)[i]) * 16777619u;
    }
    return mark | 1;
}

static void line_up(race *r, const struct addrinfo *list, uint32_t first) {
    for (int wanted = 1; wanted >= 0; wanted--) {
        for (const struct addrinfo *a = list; a != NULL && r->num < MAX_ADDRESSES; a = a->ai_next) {
            if ((mark_of(a) == first) == (wanted == 1)) {
                r->list[r->num++] = a;
            }
        }
    }
}

/* Starts the next attempt. A connected socket, or -1. */
static int start(race *r, uint32_t *mark, int64_t deadline_us) {
    int64_t share_us = (deadline_us - kvfi_sys->now_us()) / (int64_t)(r->num - r->next + 1);
    const struct addrinfo *a = r->list[r->next++];
    bool done = false;
    int fd = begin(a->ai_family, a->ai_addr, a->ai_addrlen, &done);
    *mark = mark_of(a);
    r->next_us = kvfi_deadline(share_us < HEAD_START_US ? share_us : HEAD_START_US);
    if (fd < 0) {
        r->error = errno;
        r->next_us = 0;
        return -1;
    }
    if (done) {
        return fd;
    }
    r->marks[r->num_fds] = *mark;
    r->fds[r->num_fds++] = (struct pollfd){.fd = fd, .events = POLLOUT};
    return -1;
}

/* Attempt number i has failed, or has won. */
static void take_out(race *r, size_t i) {
    r->fds[i] = r->fds[--r->num_fds];
    r->marks[i] = r->marks[r->num_fds];
}

/* Looks which attempts have ended. A connected socket, or -1. */
static int look(race *r, uint32_t *mark) {
    for (size_t i = r->num_fds; i-- > 0;) {
        int error = 0, fd = r->fds[i].fd;
        socklen_t len = sizeof error;
        if (r->fds[i].revents == 0) {
            continue;
        }
        *mark = r->marks[i];
        if (kvfi_sys->getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &len) != 0) {
            error = errno;
        }
        take_out(r, i);
        if (error == 0) {
            return fd;
        }
        (void)kvfi_sys->close(fd);
        r->error = error;
        r->next_us = 0;
    }
    return -1;
}

/* Waits until an attempt ends, or it is time for the next. False: waiting failed. */
static bool wait_for_one(race *r, int64_t deadline_us) {
    int64_t until_us = r->next < r->num && r->next_us < deadline_us ? r->next_us : deadline_us;
    for (size_t i = 0; i < r->num_fds; i++) {
        r->fds[i].revents = 0;
    }
    int n = kvfi_interruptible_poll(r->fds, r->num_fds, until_us);
    if (n < 0 && errno != EINTR && errno != EAGAIN) {
        r->error = errno;
        return false;
    }
    if (n < 0) {
        for (size_t i = 0; i < r->num_fds; i++) {
            r->fds[i].revents = 0;
        }
    }
    return true;
}

/* A connected socket, or -1 with errno. */
static int run_race(race *r, uint32_t *mark, int64_t deadline_us) {
    int fd = -1;
    while (fd < 0 && (r->next < r->num || r->num_fds > 0)) {
        int64_t now = kvfi_sys->now_us();
        if (now >= deadline_us || kvfi_interrupt_look()) {
            r->error = ETIMEDOUT;
            break;
        }
        if (r->next < r->num && (r->num_fds == 0 || now >= r->next_us)) {
            fd = start(r, mark, deadline_us);
        } else if (wait_for_one(r, deadline_us)) {
            fd = look(r, mark);
        } else {
            break;
        }
    }
    for (size_t i = 0; i < r->num_fds; i++) {
        (void)kvfi_sys->close(r->fds[i].fd);
    }
    return fd;
}

static int dial_tcp(const struct addrinfo *list, _Atomic uint32_t *answered, int64_t deadline_us) {
    race r = {.error = EHOSTUNREACH};
    uint32_t mark = 0;
    line_up(&r, list, atomic_load_explicit(answered, memory_order_relaxed));
    int fd = run_race(&r, &mark, deadline_us);
    if (fd >= 0) {
        atomic_store_explicit(answered, mark, memory_order_relaxed);
    }
    errno = r.error;
    return fd;
}

static kvf_reason dial(int *out_fd, const kvfi_endpoint *to, _Atomic uint32_t *answered, int64_t deadline_us) {
    if (to->path != NULL) {
        *out_fd = dial_unix(to->path, deadline_us);
        if (*out_fd < 0 && errno == ECONNREFUSED) { /* a file that is not a socket says this, too */
            errno = is_socket(to->path) ? ECONNREFUSED : ENOTSOCK;
        }
    } else {
        struct addrinfo *list = NULL;
        kvf_reason why = resolve(&list, to, deadline_us);
        if (why != KVF_WHY_NONE) {
            errno = ENOENT;
            return why;
        }
        *out_fd = dial_tcp(list, answered, deadline_us);
        int error = errno;
        freeaddrinfo(list);
        errno = error;
    }
    return *out_fd >= 0 ? KVF_WHY_NONE : KVF_WHY_UNREACHABLE;
}

/* A batch's patience is for each step: a new connection takes several round trips. */
static int64_t step_until(const kvfi_conn *conn, int64_t deadline_us, unsigned round_trips) {
    int64_t until_us = conn->patience_us > 0 ? kvfi_deadline(round_trips * conn->patience_us) : deadline_us;
    return until_us < deadline_us ? until_us : deadline_us;
}

/* The step took all the time that the batch allows, and the deadline has not passed. */
static bool is_out_of_patience(int64_t until_us, int64_t deadline_us) {
    return until_us < deadline_us && kvfi_sys->now_us() >= until_us;
}

/* TLS over the socket that was just opened. */
static kvf_reason secure(kvfi_conn *conn, kvfi_tls_peer *peer, int64_t deadline_us) {
    kvfi_tls_trouble trouble;
    int64_t until_us = step_until(conn, deadline_us, TLS_ROUND_TRIPS);
    kvf_reason why = kvfi_tls_connect(&conn->tls, &trouble, peer, conn->fd, until_us);
    if (why != KVF_WHY_NONE) {
        why = is_out_of_patience(until_us, deadline_us) ? KVF_WHY_STALLED : why;
        conn->tls = NULL;
        conn->config = trouble.config;
        conn->mute = trouble.mute;
        snprintf(conn->said, sizeof conn->said, "%s", trouble.what);
        kvfi_conn_close(conn);
    }
    return why;
}

kvf_reason kvfi_conn_open(kvfi_conn *conn, const kvfi_endpoint *to, kvfi_tls_peer *peer, _Atomic uint32_t *answered,
                          int64_t deadline_us) {
    kvfi_resp_init(&conn->in, conn->scratch, sizeof conn->scratch);
    conn->out = (kvfi_cmd){.data = conn->out_buffer, .cap = sizeof conn->out_buffer};
    conn->sent = 0;
    conn->body = (kvfi_place){0};
    conn->held = 0;
    conn->lent = false;
    conn->owed = 0;
    conn->tcp = to->path == NULL;
    conn->slow = conn->quick = false;
    conn->low_water = 1;
    conn->roomy = false;
    conn->stalled = conn->broke = false;
    conn->reused = false;
    conn->mute = conn->config = false;
    conn->refuses = false;
    conn->room = NULL;
    conn->most = 0;
    conn->loads = NULL;
    conn->said[0] = '\0';
    int64_t until_us = step_until(conn, deadline_us, 1);
    kvf_reason why = dial(&conn->fd, to, answered, until_us);
    if (why != KVF_WHY_NONE) {
        conn->fd = -1;
        char text[64];
        snprintf(conn->said, sizeof conn->said, "%s",
                 why == KVF_WHY_NOMEM           ? "no memory"
                 : errno == ENOTSOCK            ? "that is not a socket"
                 : errno == ENOENT && conn->tcp ? "the name of the host can't be resolved"
                                                : strerror_r(errno, text, sizeof text));
        return is_out_of_patience(until_us, deadline_us) ? KVF_WHY_STALLED : why;
    }
    return peer->tls != NULL ? secure(conn, peer, deadline_us) : KVF_WHY_NONE;
}

/* ---- the other tongue ---- */

/* Sends PING without TLS: does a Redis answer? */
static bool answers_in_plain(int fd, int64_t deadline_us) {
    char text[] = "PING\r\n";
    struct iovec iov = {text, sizeof text - 1};
    struct pollfd p = {.fd = fd, .events = POLLIN};
    if (kvfi_sys->writev(fd, &iov, 1) != (ssize_t)iov.iov_len || kvfi_interruptible_poll(&p, 1, deadline_us) <= 0) {
        return false;
    }
    return kvfi_sys->readv(fd, &iov, 1) > 0 && (text[0] == '+' || text[0] == '-'); /* PONG, NOAUTH, DENIED, LOADING */
}

bool kvfi_conn_is_other_tongue(const kvfi_endpoint *to, bool tls, int64_t deadline_us) {
    _Atomic uint32_t answered = 0;
    int fd = -1;
    if (dial(&fd, to, &answered, deadline_us) != KVF_WHY_NONE) {
        return false;
    }
    bool is = tls ? answers_in_plain(fd, deadline_us) : kvfi_tls_is_spoken(fd, deadline_us);
    (void)kvfi_sys->close(fd);
    return is;
}
