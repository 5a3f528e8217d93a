/* SPDX-License-Identifier: Apache-2.0
 *
 * Connecting: unix sockets, TCP over IPv4 and IPv6. A name is looked up on a thread of its own, since nothing bounds
 * the time that takes.
 */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/un.h>

#include "redis/conn.h"
#include "store/pool.h"

/* ---- names ---- */

/* Shared by the thread that looks up and the one that waits for it; whoever leaves last frees it. */
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
        pthread_join(thread, NULL); /* it is at its end */
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

/* None of these is needed to work, so none is checked. */
static void set_options(int fd, const struct sockaddr *address) {
    int on = 1, idle_s = 15, interval_s = 5, count = 3;
    static const char plain[] = "reno"; /* every kernel has it, and allows it unless told otherwise */
    if (address->sa_family == AF_UNIX) {
        return;
    }
    if (is_loopback(address)) {
        /* Nothing is lost there, so there is nothing to control: a system that is set to BBR would pace what we send,
         * for a tenth of the speed and more. */
        (void)kvfi_sys->setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, plain, sizeof plain - 1);
    }
    (void)kvfi_sys->setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    (void)kvfi_sys->setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    (void)kvfi_sys->setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    (void)kvfi_sys->setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
    (void)kvfi_sys->setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
}

/* Waits for a connect that has begun. 0, or an errno. */
static int finish_connect(int fd, int64_t deadline_us) {
    struct pollfd p = {.fd = fd, .events = POLLOUT};
    int error = 0;
    socklen_t len = sizeof error;
    for (;;) {
        int n = kvfi_sys->poll(&p, 1, kvfi_poll_ms(deadline_us));
        if (n > 0) {
            break;
        }
        if (n < 0 && errno != EINTR && errno != EAGAIN) {
            return errno;
        }
        if (kvfi_sys->now_us() >= deadline_us) {
            return ETIMEDOUT;
        }
    }
    return kvfi_sys->getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &len) != 0 ? errno : error;
}

/* 0, or an errno. A unix socket whose server is behind with accepting says EAGAIN, and can't be polled for that. */
static int connect_within(int fd, const struct sockaddr *address, socklen_t len, int64_t deadline_us) {
    while (kvfi_sys->connect(fd, address, len) != 0) {
        if (errno == EINPROGRESS || errno == EINTR) {
            return finish_connect(fd, deadline_us);
        }
        if (errno != EAGAIN) {
            return errno;
        }
        if (kvfi_sys->now_us() >= deadline_us) {
            return ETIMEDOUT;
        }
        (void)kvfi_sys->poll(NULL, 0, 1);
    }
    return 0;
}

/* A connected socket, or -1 with errno. */
static int dial_one(int family, const struct sockaddr *address, socklen_t len, int64_t deadline_us) {
    int fd = kvfi_sys->socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return -1;
    }
    set_options(fd, address);
    int error = connect_within(fd, address, len, deadline_us);
    if (error != 0) {
        (void)kvfi_sys->close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

static int dial_unix(const char *path, int64_t deadline_us) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(address.sun_path, path, strlen(path) + 1);
    return dial_one(AF_UNIX, (const struct sockaddr *)&address, sizeof address, deadline_us);
}

/* Tries one address after the other, each with an equal share of what time is left. */
static int dial_tcp(const struct addrinfo *list, int64_t deadline_us) {
    int num = 0, fd = -1;
    for (const struct addrinfo *a = list; a != NULL; a = a->ai_next) {
        num++;
    }
    errno = EHOSTUNREACH;
    for (const struct addrinfo *a = list; a != NULL && fd < 0; a = a->ai_next) {
        int64_t now = kvfi_sys->now_us();
        int64_t share = deadline_us > now ? (deadline_us - now) / num-- : 0;
        fd = dial_one(a->ai_family, a->ai_addr, a->ai_addrlen, now + share);
    }
    return fd;
}

static kvf_reason dial(int *out_fd, const kvfi_endpoint *to, int64_t deadline_us) {
    if (to->path != NULL) {
        *out_fd = dial_unix(to->path, deadline_us);
    } else {
        struct addrinfo *list = NULL;
        kvf_reason why = resolve(&list, to, deadline_us);
        if (why != KVF_WHY_NONE) {
            errno = ENOENT;
            return why;
        }
        *out_fd = dial_tcp(list, deadline_us);
        int error = errno;
        freeaddrinfo(list);
        errno = error;
    }
    return *out_fd >= 0 ? KVF_WHY_NONE : KVF_WHY_UNREACHABLE;
}

/* TLS over the socket that was just opened. */
static kvf_reason secure(kvfi_conn *conn, kvfi_tls_peer *peer, int64_t deadline_us) {
    kvfi_tls_trouble trouble;
    kvf_reason why = kvfi_tls_connect(&conn->tls, &trouble, peer, conn->fd, deadline_us);
    if (why != KVF_WHY_NONE) {
        conn->tls = NULL;
        conn->config = trouble.config;
        conn->mute = trouble.mute;
        snprintf(conn->said, sizeof conn->said, "%s", trouble.what);
        kvfi_conn_close(conn);
    }
    return why;
}

kvf_reason kvfi_conn_open(kvfi_conn *conn, const kvfi_endpoint *to, kvfi_tls_peer *peer, int64_t deadline_us) {
    kvfi_resp_init(&conn->in, conn->scratch, sizeof conn->scratch);
    conn->out = (kvfi_cmd){.data = conn->out_buffer, .cap = sizeof conn->out_buffer};
    conn->sent = 0;
    conn->mark = 0;
    conn->body = (kvfi_place){0};
    conn->held = 0;
    conn->lent = false;
    conn->owed = 0;
    conn->tcp = to->path == NULL;
    conn->slow = false;
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
    kvf_reason why = dial(&conn->fd, to, deadline_us);
    if (why != KVF_WHY_NONE) {
        conn->fd = -1;
        char text[64];
        snprintf(conn->said, sizeof conn->said, "%s",
                 why == KVF_WHY_NOMEM ? "no memory" : strerror_r(errno, text, sizeof text));
        return why;
    }
    return peer->tls != NULL ? secure(conn, peer, deadline_us) : KVF_WHY_NONE;
}

/* ---- the other tongue ---- */

/* PING in plain: does a Redis answer? */
static bool answers_in_plain(int fd, int64_t deadline_us) {
    char text[] = "PING\r\n";
    struct iovec iov = {text, sizeof text - 1};
    struct pollfd p = {.fd = fd, .events = POLLIN};
    if (kvfi_sys->writev(fd, &iov, 1) != (ssize_t)iov.iov_len ||
        kvfi_sys->poll(&p, 1, kvfi_poll_ms(deadline_us)) <= 0) {
        return false;
    }
    return kvfi_sys->readv(fd, &iov, 1) > 0 && (text[0] == '+' || text[0] == '-'); /* PONG, NOAUTH, DENIED, LOADING */
}

bool kvfi_conn_is_other_tongue(const kvfi_endpoint *to, bool tls, int64_t deadline_us) {
    int fd = -1;
    if (dial(&fd, to, deadline_us) != KVF_WHY_NONE) {
        return false;
    }
    bool is = tls ? answers_in_plain(fd, deadline_us) : kvfi_tls_is_spoken(fd, deadline_us);
    (void)kvfi_sys->close(fd);
    return is;
}
