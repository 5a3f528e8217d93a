/* SPDX-License-Identifier: Apache-2.0
 *
 * A proxy that delays, cuts and corrupts the bytes between a client and a server.
 */
#include "support/proxy.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "support/kit.h"

#define MAX_LINKS  64
#define BUFFER     65536
#define MAX_LATE_S 0.02

/* One connection: client <-> server, and the reply bytes that wait to be let through. */
typedef struct link {
    int client, server; /* -1 = free */
    bool is_tcp;
    uint8_t held[BUFFER];
    size_t num_held, at_held;
    double not_before; /* when the next piece may go */
    bool old;          /* it ends with the next request */
    bool swallows;     /* requests, all of them from now on */
    int64_t position;  /* reply bytes so far */
    uint64_t random;
    bool bit_flipped, garbage_done;
} link_t;

struct kvft_proxy {
    char target[108], path[108], dir[64], unix_url[160], tcp_url[64];
    int unix_fd, tcp_fd, wake[2];
    pthread_t thread;
    pthread_mutex_t lock;
    kvft_plan plan;
    const link_t *stalled; /* with stall_one: the one */
    bool stop, cut, renew;
    kvft_proxy_stats stats;
    double free_at; /* when the cable has carried what was sent */
    size_t turn;    /* served first: the connection after the last that sent, since a cable is fair */
    link_t links[MAX_LINKS];
    uint8_t request[BUFFER]; /* on its way to a server */
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void die(const char *what) {
    fprintf(stderr, "proxy: %s: %s\n", what, strerror(errno));
    abort();
}

static int unix_listen(const char *path) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    snprintf(addr.sun_path, sizeof addr.sun_path, "%s", path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&addr, sizeof addr) != 0 || listen(fd, 32) != 0) {
        die(path);
    }
    return fd;
}

static int tcp_listen(char *url, size_t size) {
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof addr;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&addr, len) != 0 || listen(fd, 32) != 0 ||
        getsockname(fd, (struct sockaddr *)&addr, &len) != 0) {
        die("listen");
    }
    snprintf(url, size, "redis://127.0.0.1:%u", ntohs(addr.sin_port));
    return fd;
}

static int dial(const char *path) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    snprintf(addr.sun_path, sizeof addr.sun_path, "%s", path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&addr, sizeof addr) != 0) {
        close(fd);
        return -1;
    }
    if (fd >= 0) {
        fcntl(fd, F_SETFL, O_NONBLOCK);
    }
    return fd;
}

static void drop(kvft_proxy *proxy, link_t *link, bool fault) {
    if (link->is_tcp && proxy->plan.reset && fault) {
        struct linger hard = {.l_onoff = 1};
        setsockopt(link->client, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
    }
    close(link->client);
    if (link->server >= 0) {
        close(link->server);
    }
    link->client = link->server = -1;
    proxy->stats.faults += fault;
}

static void welcome(kvft_proxy *proxy, int listener, bool is_tcp) {
    int client = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (client < 0) {
        return;
    }
    proxy->stats.connections++;
    for (int i = 0; i < MAX_LINKS; i++) {
        link_t *link = &proxy->links[i];
        if (link->client < 0 && !proxy->plan.refuse) {
            int server = dial(proxy->target);
            if (server < 0) {
                break;
            }
            *link = (link_t){
                .client = client, .server = server, .is_tcp = is_tcp, .random = proxy->plan.seed ^ (uint64_t)i};
            if (is_tcp) {
                int one = 1;
                setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            }
            return;
        }
    }
    proxy->stats.faults += proxy->plan.refuse;
    close(client);
}

/* ---- the faults ---- */

static bool reached(int64_t position, int64_t mark) {
    return mark > 0 && position >= mark;
}

static bool stalls(kvft_proxy *proxy, const link_t *link) {
    if (!reached(link->position, proxy->plan.stall_after)) {
        return false;
    }
    if (proxy->stalled == NULL) {
        proxy->stalled = link;
        proxy->stats.faults++;
    }
    return !proxy->plan.stall_one || proxy->stalled == link;
}

static bool within(const link_t *link, int64_t mark, size_t num) {
    return mark > 0 && mark >= link->position && mark < link->position + (int64_t)num;
}

/* Two bulk replies of equal length that lie whole in the buffer, headers alike: their bodies change places. */
static void swap_replies(link_t *link) {
    uint8_t *bytes = link->held;
    uint8_t *end = memchr(bytes, '\n', link->num_held);
    if (link->num_held < 8 || bytes[0] != '$' || end == NULL) {
        return;
    }
    size_t body = strtoul((char *)bytes + 1, NULL, 10);
    size_t head = (size_t)(end - bytes) + 1, whole = head + body + 2;
    if (body == 0 || 2 * whole > link->num_held || memcmp(bytes, bytes + whole, head) != 0) {
        return;
    }
    for (size_t i = head; i < head + body; i++) {
        uint8_t byte = bytes[i];
        bytes[i] = bytes[whole + i];
        bytes[whole + i] = byte;
    }
}

static void spoil(kvft_proxy *proxy, link_t *link) {
    const kvft_plan *plan = &proxy->plan;
    if (within(link, plan->flip_at, link->num_held) && !link->bit_flipped) {
        link->held[plan->flip_at - link->position] ^= (uint8_t)(1u << (kvft_random(&link->random) % 8));
        link->bit_flipped = true;
        proxy->stats.faults++;
    }
    if (within(link, plan->garbage_at, link->num_held) && !link->garbage_done) {
        for (size_t i = (size_t)(plan->garbage_at - link->position), n = 0; i < link->num_held && n < 16; i++, n++) {
            link->held[i] = (uint8_t)kvft_random(&link->random);
        }
        link->garbage_done = true;
        proxy->stats.faults++;
    }
    if (plan->swap) {
        swap_replies(link);
    }
}

/* ---- relaying ---- */

static void from_server(kvft_proxy *proxy, link_t *link) {
    ssize_t n = read(link->server, link->held, sizeof link->held);
    if (n <= 0) {
        if (n == 0 || errno != EAGAIN) {
            drop(proxy, link, false);
        }
        return;
    }
    link->num_held = (size_t)n;
    link->at_held = 0;
    link->not_before = now() + proxy->plan.latency_ms / 1e3;
    spoil(proxy, link);
}

static size_t piece_of(kvft_proxy *proxy, link_t *link) {
    const kvft_plan *plan = &proxy->plan;
    size_t size = link->num_held - link->at_held;
    if (plan->slice_bytes > 0) {
        size_t slice = 1 + kvft_random(&link->random) % plan->slice_bytes;
        size = size < slice ? size : slice;
    }
    if (plan->bytes_per_s > 0) {
        size_t share =
            plan->bytes_per_s / 50 + 1; /* what passes in 20 ms: fewer, larger pieces cost the machine less */
        size = size < share ? size : share;
    }
    if (plan->cut_after > 0 && link->position < plan->cut_after) {
        size_t left = (size_t)(plan->cut_after - link->position);
        size = size < left ? size : left;
    }
    return size;
}

static void to_client(kvft_proxy *proxy, link_t *link) {
    const kvft_plan *plan = &proxy->plan;
    if (reached(link->position, plan->cut_after)) {
        drop(proxy, link, true);
        return;
    }
    size_t size = piece_of(proxy, link);
    ssize_t n = send(link->client, link->held + link->at_held, size, MSG_NOSIGNAL);
    if (n < 0) {
        if (errno != EAGAIN) {
            drop(proxy, link, false);
        }
        return;
    }
    link->at_held += (size_t)n;
    link->position += n;
    proxy->stats.to_client += (uint64_t)n;
    if (link->at_held == link->num_held) {
        link->num_held = link->at_held = 0;
    }
    if (plan->bytes_per_s > 0) {
        /* Who wakes up late makes up for it, so that the rate holds on the whole. */
        double earliest = now() - MAX_LATE_S;
        proxy->free_at =
            (proxy->free_at > earliest ? proxy->free_at : earliest) + (double)n / (double)plan->bytes_per_s;
    }
}

/* The number of bytes of a request before the command with that text; `num` without one. */
static size_t before_command(const uint8_t *request, size_t num, const char *text) {
    const uint8_t *at = text != NULL ? memmem(request, num, text, strlen(text)) : NULL;
    const uint8_t *star = at != NULL ? memrchr(request, '*', (size_t)(at - request)) : NULL;
    return at == NULL ? num : star == NULL ? 0 : (size_t)(star - request);
}

/* It is reset or closed (true), or swallows all that comes from now on. */
static bool is_ended(kvft_proxy *proxy, link_t *link, bool closed) {
    if (closed) {
        drop(proxy, link, true);
        return true;
    }
    link->swallows = true;
    proxy->stats.faults++;
    return false;
}

static void from_client(kvft_proxy *proxy, link_t *link) {
    uint8_t *buffer = proxy->request;
    ssize_t n = recv(link->client, buffer, BUFFER, MSG_PEEK);
    if (n <= 0) {
        if (n == 0 || errno != EAGAIN) {
            drop(proxy, link, false);
        }
        return;
    }
    size_t passes = before_command(buffer, (size_t)n, proxy->plan.breaks_on);
    if (!link->swallows && (link->old || passes == 0) &&
        is_ended(proxy, link, link->old ? proxy->plan.reset : !proxy->plan.silent)) {
        return;
    }
    n = passes > 0 && !link->swallows ? (ssize_t)passes : n;
    bool swallow = link->swallows || reached(link->position, proxy->plan.half_open_after);
    ssize_t sent = swallow ? n : send(link->server, buffer, (size_t)n, MSG_NOSIGNAL);
    if (sent > 0) {
        proxy->stats.to_server += (uint64_t)sent;
        sent = recv(link->client, buffer, (size_t)sent, 0);
    } else if (errno != EAGAIN) {
        drop(proxy, link, false);
    }
}

static double goes_at(const kvft_proxy *proxy, const link_t *link) {
    bool cable = proxy->plan.bytes_per_s > 0 && proxy->free_at > link->not_before;
    return cable ? proxy->free_at : link->not_before;
}

static bool may_send(kvft_proxy *proxy, const link_t *link, double t) {
    return link->num_held > 0 && t >= goes_at(proxy, link) && !stalls(proxy, link);
}

static void serve_links(kvft_proxy *proxy, const struct pollfd *fds, const int *index, size_t num) {
    size_t first = proxy->turn;
    for (size_t served = 0; served < num; served++) {
        size_t i = (first + served) % num;
        link_t *link = &proxy->links[index[i]];
        if (link->client < 0) {
            continue;
        }
        if (fds[2 * i].revents & (POLLIN | POLLHUP | POLLERR)) {
            from_client(proxy, link);
        }
        if (link->client >= 0 && link->num_held == 0 && (fds[2 * i + 1].revents & (POLLIN | POLLHUP | POLLERR))) {
            from_server(proxy, link);
        }
        if (link->client >= 0 && may_send(proxy, link, now())) {
            proxy->turn = i + 1;
            to_client(proxy, link);
        }
    }
}

/* How long poll may sleep: until the first of what waits for its time. */
static int prepare(kvft_proxy *proxy, struct pollfd *fds, int *index, size_t *num) {
    int timeout = 1000;
    *num = 0;
    for (int i = 0; i < MAX_LINKS; i++) {
        link_t *link = &proxy->links[i];
        if (link->client >= 0) {
            bool ready = may_send(proxy, link, now());
            if (link->num_held > 0 && !ready && !stalls(proxy, link)) {
                double left_ms = (goes_at(proxy, link) - now()) * 1e3;
                timeout = left_ms < 1 ? 1 : left_ms < timeout ? (int)left_ms : timeout;
            }
            fds[2 * *num] = (struct pollfd){.fd = link->client, .events = (short)(POLLIN | (ready ? POLLOUT : 0))};
            fds[2 * *num + 1] = (struct pollfd){.fd = link->num_held == 0 ? link->server : -1, .events = POLLIN};
            index[(*num)++] = i;
        }
    }
    return timeout;
}

static void obey(kvft_proxy *proxy) {
    char bytes[64];
    while (read(proxy->wake[0], bytes, sizeof bytes) > 0) {
    }
    for (int i = 0; i < MAX_LINKS; i++) {
        link_t *link = &proxy->links[i];
        if (link->client >= 0 && (proxy->cut || proxy->stop)) {
            drop(proxy, link, proxy->cut);
        } else if (proxy->renew) {
            link->position = 0;
            link->bit_flipped = link->garbage_done = false;
        }
    }
    if (proxy->renew) {
        proxy->stalled = NULL;
    }
    proxy->cut = proxy->renew = false;
}

static void *run(void *arg) {
    kvft_proxy *proxy = arg;
    struct pollfd fds[2 * MAX_LINKS + 3];
    int index[MAX_LINKS];
    size_t num = 0;
    pthread_mutex_lock(&proxy->lock);
    while (!proxy->stop) {
        fds[0] = (struct pollfd){.fd = proxy->wake[0], .events = POLLIN};
        fds[1] = (struct pollfd){.fd = proxy->unix_fd, .events = POLLIN};
        fds[2] = (struct pollfd){.fd = proxy->tcp_fd, .events = POLLIN};
        int timeout = prepare(proxy, fds + 3, index, &num);
        pthread_mutex_unlock(&proxy->lock);
        poll(fds, 3 + 2 * num, timeout);
        pthread_mutex_lock(&proxy->lock);
        serve_links(proxy, fds + 3, index, num);
        obey(proxy);
        if (fds[1].revents) {
            welcome(proxy, proxy->unix_fd, false);
        }
        if (fds[2].revents) {
            welcome(proxy, proxy->tcp_fd, true);
        }
    }
    obey(proxy);
    pthread_mutex_unlock(&proxy->lock);
    return NULL;
}

/* ---- the handle ---- */

kvft_proxy *kvft_proxy_start(const char *target) {
    kvft_proxy *proxy = calloc(1, sizeof *proxy);
    if (proxy == NULL) {
        die("memory");
    }
    snprintf(proxy->dir, sizeof proxy->dir, "%s/kvferry-proxy-XXXXXX", kvft_temp_root());
    if (mkdtemp(proxy->dir) == NULL || pipe2(proxy->wake, O_CLOEXEC | O_NONBLOCK) != 0) {
        die("start");
    }
    snprintf(proxy->target, sizeof proxy->target, "%s", target);
    snprintf(proxy->path, sizeof proxy->path, "%s/sock", proxy->dir);
    snprintf(proxy->unix_url, sizeof proxy->unix_url, "redis+unix://%s", proxy->path);
    proxy->unix_fd = unix_listen(proxy->path);
    proxy->tcp_fd = tcp_listen(proxy->tcp_url, sizeof proxy->tcp_url);
    for (int i = 0; i < MAX_LINKS; i++) {
        proxy->links[i].client = proxy->links[i].server = -1;
    }
    pthread_mutex_init(&proxy->lock, NULL);
    if (pthread_create(&proxy->thread, NULL, run, proxy) != 0) {
        die("thread");
    }
    return proxy;
}

static void wake(kvft_proxy *proxy) {
    while (write(proxy->wake[1], "", 1) < 0 && errno == EINTR) {
    }
}

void kvft_proxy_stop(kvft_proxy *proxy) {
    pthread_mutex_lock(&proxy->lock);
    proxy->stop = true;
    wake(proxy);
    pthread_mutex_unlock(&proxy->lock);
    pthread_join(proxy->thread, NULL);
    close(proxy->unix_fd);
    close(proxy->tcp_fd);
    close(proxy->wake[0]);
    close(proxy->wake[1]);
    unlink(proxy->path);
    rmdir(proxy->dir);
    pthread_mutex_destroy(&proxy->lock);
    free(proxy);
}

const char *kvft_proxy_unix_url(const kvft_proxy *proxy) {
    return proxy->unix_url;
}

const char *kvft_proxy_tcp_url(const kvft_proxy *proxy) {
    return proxy->tcp_url;
}

void kvft_proxy_set(kvft_proxy *proxy, const kvft_plan *plan) {
    pthread_mutex_lock(&proxy->lock);
    proxy->plan = *plan;
    proxy->renew = true;
    for (int i = 0; i < MAX_LINKS; i++) {
        proxy->links[i].old = plan->ends_old;
    }
    wake(proxy);
    pthread_mutex_unlock(&proxy->lock);
}

void kvft_proxy_cut(kvft_proxy *proxy) {
    pthread_mutex_lock(&proxy->lock);
    proxy->cut = true;
    wake(proxy);
    pthread_mutex_unlock(&proxy->lock);
}

kvft_proxy_stats kvft_proxy_stats_get(kvft_proxy *proxy) {
    pthread_mutex_lock(&proxy->lock);
    kvft_proxy_stats stats = proxy->stats;
    for (int i = 0; i < MAX_LINKS; i++) {
        stats.open += proxy->links[i].client >= 0;
    }
    pthread_mutex_unlock(&proxy->lock);
    return stats;
}
