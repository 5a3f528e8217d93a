/* SPDX-License-Identifier: Apache-2.0
 *
 * A simulated world of clock, network and Redis servers, behind the system table.
 */
#include "support/sim.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sys.h"
#include "redis/cluster/slots.h"
#include "support/kit.h"

#define FIRST_FD   100000
#define MAX_LINKS  64
#define MAX_ARGS   8
#define NO_COMMAND SIZE_MAX
#define NODES      3
#define FIRST_PORT 7000

typedef struct text {
    char *data;
    size_t len, cap;
} text;

typedef struct record {
    char *key;
    text value;
    struct record *next;
} record;

typedef struct link {
    bool used, hangs, asking;
    int node;                          /* -1: not connected */
    text in, out;                      /* to the server, and from it */
    size_t taken;                      /* of out */
    int64_t ready_us;                  /* when the rest of out has arrived */
    int64_t connected_us;              /* when it can be written to */
    int64_t cut_at, stall_at, flip_at; /* of the bytes from the server; -1 = never */
    int64_t position;
} link_t;

static struct world {
    uint64_t random;
    bool cluster;
    int64_t now_us;
    kvft_sim_plan plan;
    record *records;   /* of a Cluster: all nodes' */
    int owner[NODES];  /* of each third of the slots */
    int target[NODES]; /* where a third is moving to, key by key; -1 = nowhere */
    link_t links[MAX_LINKS];
    uint64_t blocks; /* of memory that the library holds */
    kvft_sim_lie_fn lie;
    void *lie_ctx;
} w;
static kvft_sim_stats stats;

static bool chance(uint32_t of_65536) {
    return of_65536 > 0 && kvft_random(&w.random) % 65536 < of_65536;
}

static int64_t below(int64_t n) {
    return (int64_t)(kvft_random(&w.random) % (uint64_t)n);
}

static void add(text *t, const void *bytes, size_t len) {
    if (len == 0) {
        return;
    }
    if (t->len + len > t->cap) {
        t->cap = 2 * (t->len + len);
        t->data = realloc(t->data, t->cap);
        if (t->data == NULL) {
            abort();
        }
    }
    memcpy(t->data + t->len, bytes, len);
    t->len += len;
}

static void add_format(text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add_format(text *t, const char *format, ...) {
    char line[256];
    va_list args;
    va_start(args, format);
    int len = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    add(t, line, (size_t)len);
}

static void drop(text *t, size_t len) {
    memmove(t->data, t->data + len, t->len - len);
    t->len -= len;
}

/* ---- the servers' data ---- */

static record **find(const char *key) {
    record **at = &w.records;
    while (*at != NULL && strcmp((*at)->key, key) != 0) {
        at = &(*at)->next;
    }
    return at;
}

static bool forget(const char *key) {
    record **at = find(key), *r = *at;
    if (r == NULL) {
        return false;
    }
    *at = r->next;
    free(r->key);
    free(r->value.data);
    free(r);
    return true;
}

static void put(const char *key, const char *value, size_t len) {
    (void)forget(key);
    record *r = calloc(1, sizeof *r);
    if (r == NULL || (r->key = strdup(key)) == NULL) {
        abort();
    }
    add(&r->value, value, len);
    r->next = w.records;
    w.records = r;
}

/* ---- a command ---- */

typedef struct command {
    size_t num;
    char *args[MAX_ARGS];
    size_t lens[MAX_ARGS];
} command;

/* The length of a whole command at the beginning of the received bytes, or 0, or NO_COMMAND for anything else (somebody
 * tries TLS). Its arguments end in a NUL, where their \r was. */
static size_t parse(command *out, text *in) {
    char *at = in->data, *end = in->data + in->len, *line;
    if (in->len > 0 && *at != '*') {
        return NO_COMMAND;
    }
    if (in->len == 0 || (line = memchr(at, '\n', in->len)) == NULL) {
        return 0;
    }
    out->num = strtoul(at + 1, NULL, 10);
    if (out->num > MAX_ARGS) {
        return NO_COMMAND;
    }
    at = line + 1;
    for (size_t i = 0; i < out->num; i++) {
        if (at >= end || (line = memchr(at, '\n', (size_t)(end - at))) == NULL) {
            return 0;
        }
        out->lens[i] = strtoul(at + 1, NULL, 10);
        out->args[i] = line + 1;
        if ((size_t)(end - out->args[i]) < out->lens[i] + 2) {
            return 0;
        }
        at = out->args[i] + out->lens[i] + 2;
    }
    for (size_t i = 0; i < out->num; i++) {
        out->args[i][out->lens[i]] = '\0';
    }
    return (size_t)(at - in->data);
}

static bool is(const command *c, const char *name) {
    return strcmp(c->args[0], name) == 0;
}

static int third_of(const char *key) {
    return kvfi_slot_of(key, strlen(key)) * NODES / (int)KVFI_NUM_SLOTS;
}

static void say_slots(text *out) {
    add_format(out, "*%d\r\n", NODES);
    for (int i = 0; i < NODES; i++) {
        int first = (i * (int)KVFI_NUM_SLOTS + NODES - 1) / NODES,
            next = ((i + 1) * (int)KVFI_NUM_SLOTS + NODES - 1) / NODES;
        add_format(out, "*3\r\n:%d\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n", first, next - 1,
                   FIRST_PORT + w.owner[i]);
    }
}

/* In a Cluster: whether this server says that another has the key. */
static bool redirect(link_t *l, const char *key) {
    int third = third_of(key);
    bool asking = l->asking;
    l->asking = false;
    if (!w.cluster) {
        return false;
    }
    if (chance(w.plan.redirect)) {
        w.target[third] = w.target[third] >= 0 ? -1 : (int)below(NODES); /* it begins to move, or is over */
        w.owner[third] = w.target[third] < 0 ? (int)below(NODES) : w.owner[third];
    }
    if (asking && w.target[third] == l->node) {
        return false;
    }
    if (l->node != w.owner[third]) {
        stats.moved++;
        add_format(&l->out, "-MOVED %u 127.0.0.1:%d\r\n", kvfi_slot_of(key, strlen(key)), FIRST_PORT + w.owner[third]);
        return true;
    }
    if (w.target[third] >= 0 && w.target[third] != l->node && *find(key) == NULL) {
        stats.asked++;
        add_format(&l->out, "-ASK %u 127.0.0.1:%d\r\n", kvfi_slot_of(key, strlen(key)), FIRST_PORT + w.target[third]);
        return true;
    }
    return false;
}

static bool say_error(link_t *l) {
    static const char *const errors[] = {"OOM command not allowed when used memory > 'maxmemory'.",
                                         "LOADING Redis is loading",
                                         "TRYAGAIN",
                                         "CLUSTERDOWN The cluster is down",
                                         "READONLY You can't write against a read only replica.",
                                         "MISCONF Redis is configured to save RDB snapshots",
                                         "ERR something",
                                         "NOPERM no",
                                         "BUSY Redis is busy"};
    if (!chance(w.plan.error)) {
        return false;
    }
    stats.errors++;
    add_format(&l->out, "-%s\r\n", errors[below(sizeof errors / sizeof *errors)]);
    return true;
}

static void say_bulk(text *out, const char *bytes, size_t len) {
    add_format(out, "$%zu\r\n", len);
    add(out, bytes, len);
    add(out, "\r\n", 2);
}

static void use_key(link_t *l, const command *c) {
    const char *key = c->args[1];
    if (redirect(l, key) || say_error(l)) {
        return;
    }
    if (chance(w.plan.vanish)) {
        stats.vanished += forget(key);
    }
    const record *r = *find(key);
    if (r != NULL && is(c, "GET") && chance(w.plan.other)) {
        r = w.records;
        stats.others++;
    }
    if (is(c, "SET")) {
        put(key, c->args[2], c->lens[2]);
        add_format(&l->out, "+OK\r\n");
    } else if (is(c, "GET") && r == NULL) {
        add_format(&l->out, "$-1\r\n");
    } else if (is(c, "GET")) {
        say_bulk(&l->out, r->value.data, r->value.len);
    } else if (is(c, "GETRANGE")) {
        size_t len = r != NULL ? r->value.len : 0;
        say_bulk(&l->out, r != NULL ? r->value.data : "", len < 128 ? len : 128);
    } else if (is(c, "STRLEN")) {
        add_format(&l->out, ":%zu\r\n", r != NULL ? r->value.len : 0);
    } else if (is(c, "PEXPIRE")) {
        add_format(&l->out, ":%d\r\n", r != NULL);
    } else {
        int num = 0;
        for (size_t i = 1; i < c->num; i++) {
            num += forget(c->args[i]);
        }
        add_format(&l->out, ":%d\r\n", num);
    }
}

static void obey(link_t *l, const command *c) {
    static const char *const with_key[] = {"SET", "GET", "GETRANGE", "STRLEN", "PEXPIRE", "UNLINK", "DEL"};
    stats.commands++;
    for (size_t i = 0; i < sizeof with_key / sizeof *with_key && c->num > 1; i++) {
        if (is(c, with_key[i])) {
            use_key(l, c);
            return;
        }
    }
    if (is(c, "CLUSTER") && w.cluster) {
        say_slots(&l->out);
    } else if (is(c, "ASKING")) {
        l->asking = true;
        add_format(&l->out, "+OK\r\n");
    } else if (is(c, "PING")) {
        add_format(&l->out, "+PONG\r\n");
    } else if (is(c, "CLIENT") || is(c, "SELECT") || is(c, "AUTH")) {
        add_format(&l->out, "+OK\r\n");
    } else {
        add_format(&l->out, "-ERR unknown command '%s'\r\n", c->args[0]);
    }
}

static void obey_and_lie(link_t *l, const command *c) {
    size_t before = l->out.len;
    obey(l, c);
    if (w.lie != NULL) {
        kvft_buffer reply = kvft_buffer_of(l->out.data + before, l->out.len - before);
        w.lie(w.lie_ctx, c->args[0], c->num > 1 ? c->args[1] : "", &reply);
        l->out.len = before;
        add(&l->out, reply.data, reply.len);
        kvft_buffer_free(&reply);
    }
}

static void serve(link_t *l) {
    command c;
    for (size_t len = parse(&c, &l->in); len > 0; len = parse(&c, &l->in)) {
        if (len == NO_COMMAND) {
            l->cut_at = l->position; /* it closes the connection */
            return;
        }
        obey_and_lie(l, &c);
        drop(&l->in, len);
        bool slow = chance(w.plan.slow);
        stats.slow += slow;
        int64_t ready = w.now_us + 20 + below(slow ? 500000 : 200) + w.plan.round_trip_us;
        l->ready_us = ready > l->ready_us ? ready : l->ready_us;
    }
}

/* ---- the table ---- */

static link_t *link_of(int fd) {
    return fd >= FIRST_FD && fd < FIRST_FD + MAX_LINKS && w.links[fd - FIRST_FD].used ? &w.links[fd - FIRST_FD] : NULL;
}

static int64_t sim_now_us(void) {
    return w.now_us += 1; /* no loop stands still */
}

static int64_t sim_wall_us(void) {
    return 1700000000000000 + w.now_us;
}

static int sim_random(void *out, size_t bytes) {
    kvft_bytes(out, bytes, kvft_random(&w.random));
    return 0;
}

/* Nobody outside this process is asked for names. */
static int sim_resolve(const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **out) {
    struct addrinfo numeric = hints != NULL ? *hints : (struct addrinfo){.ai_socktype = SOCK_STREAM};
    numeric.ai_flags |= AI_NUMERICHOST | AI_NUMERICSERV;
    return getaddrinfo(host, service, &numeric, out);
}

static int sim_socket(int family, int type, int protocol) {
    (void)family;
    (void)type;
    (void)protocol;
    for (int i = 0; i < MAX_LINKS; i++) {
        if (!w.links[i].used) {
            w.links[i] = (link_t){.used = true, .node = -1, .cut_at = -1, .stall_at = -1, .flip_at = -1};
            return FIRST_FD + i;
        }
    }
    errno = EMFILE;
    return -1;
}

static int64_t somewhere(uint32_t probability, uint64_t *count) {
    if (!chance(probability)) {
        return -1;
    }
    ++*count;
    return below(1 << below(16));
}

static int sim_connect(int fd, const struct sockaddr *address, socklen_t len) {
    link_t *l = link_of(fd);
    struct sockaddr_in to;
    memcpy(&to, address, sizeof to);
    (void)len;
    if (chance(w.plan.refuse)) {
        stats.refused++;
        errno = ECONNREFUSED;
        return -1;
    }
    l->node = ntohs(to.sin_port) - FIRST_PORT;
    l->connected_us = w.now_us + w.plan.round_trip_us;
    l->hangs = chance(w.plan.hang);
    stats.hung += l->hangs;
    l->cut_at = somewhere(w.plan.cut, &stats.cut);
    l->stall_at = somewhere(w.plan.stall, &stats.stalled);
    l->flip_at = somewhere(w.plan.flip, &stats.flipped);
    errno = EINPROGRESS;
    return -1;
}

static int sim_setsockopt(int fd, int level, int name, const void *value, socklen_t len) {
    (void)fd;
    (void)level;
    (void)name;
    (void)value;
    (void)len;
    return 0;
}

static int sim_getsockopt(int fd, int level, int name, void *value, socklen_t *len) {
    (void)fd;
    (void)level;
    (void)name;
    memset(value, 0, *len);
    return 0;
}

/* How many bytes can be read now; -1: the connection is cut. */
static int64_t readable(const link_t *l) {
    if (l->cut_at >= 0 && l->position >= l->cut_at) {
        return -1;
    }
    if (l->hangs || w.now_us < l->ready_us || (l->stall_at >= 0 && l->position >= l->stall_at)) {
        return 0;
    }
    int64_t num = (int64_t)(l->out.len - l->taken);
    num = l->cut_at >= 0 && num > l->cut_at - l->position ? l->cut_at - l->position : num;
    return l->stall_at >= 0 && num > l->stall_at - l->position ? l->stall_at - l->position : num;
}

static ssize_t sim_readv(int fd, const struct iovec *iov, int num) {
    link_t *l = link_of(fd);
    int64_t can = readable(l), got = 0;
    if (can < 0) {
        return 0;
    }
    if (can == 0) {
        errno = EAGAIN;
        return -1;
    }
    can = w.plan.slices ? 1 + below(can < 3000 ? can : 3000) : can;
    for (int i = 0; i < num && got < can; i++) {
        size_t len = iov[i].iov_len < (size_t)(can - got) ? iov[i].iov_len : (size_t)(can - got);
        memcpy(iov[i].iov_base, l->out.data + l->taken, len);
        if (l->flip_at >= l->position && l->flip_at < l->position + (int64_t)len) {
            ((uint8_t *)iov[i].iov_base)[l->flip_at - l->position] ^= (uint8_t)(1 << below(8));
        }
        l->taken += len;
        l->position += (int64_t)len;
        got += (int64_t)len;
    }
    if (l->taken == l->out.len) {
        l->taken = l->out.len = 0;
    }
    return got;
}

static ssize_t sim_writev(int fd, const struct iovec *iov, int num) {
    link_t *l = link_of(fd);
    int64_t sent = 0, can = w.plan.slices ? 1 + below(5000) : INT64_MAX;
    if (readable(l) < 0) {
        errno = EPIPE;
        return -1;
    }
    if (l->hangs) {
        errno = EAGAIN;
        return -1;
    }
    for (int i = 0; i < num && sent < can; i++) {
        size_t len = iov[i].iov_len < (size_t)(can - sent) ? iov[i].iov_len : (size_t)(can - sent);
        add(&l->in, iov[i].iov_base, len);
        sent += (int64_t)len;
    }
    serve(l);
    return sent;
}

static int ready(struct pollfd *fds, nfds_t num) {
    int events = 0;
    for (nfds_t i = 0; i < num; i++) {
        const link_t *l = link_of(fds[i].fd);
        fds[i].revents = 0;
        if (l != NULL && !l->hangs) {
            fds[i].revents = (short)((readable(l) != 0 ? fds[i].events & POLLIN : 0) |
                                     (w.now_us >= l->connected_us ? fds[i].events & POLLOUT : 0));
        }
        events += fds[i].revents != 0;
    }
    return events;
}

static int sim_poll(struct pollfd *fds, nfds_t num, int timeout_ms) {
    int64_t until = w.now_us + (int64_t)timeout_ms * 1000;
    int events = ready(fds, num);
    if (events == 0 && timeout_ms > 0) {
        int64_t next = until;
        for (nfds_t i = 0; i < num; i++) {
            const link_t *l = link_of(fds[i].fd);
            bool comes = l != NULL && !l->hangs && l->ready_us > w.now_us && l->out.len > l->taken;
            next = comes && l->ready_us < next ? l->ready_us : next;
            bool connects = l != NULL && !l->hangs && l->connected_us > w.now_us;
            next = connects && l->connected_us < next ? l->connected_us : next;
        }
        w.now_us = next;
        events = ready(fds, num);
        w.now_us = events == 0 ? until : next;
    }
    return events;
}

static int sim_close(int fd) {
    link_t *l = link_of(fd);
    if (l == NULL) {
        return kvfi_sys_real.close(fd);
    }
    free(l->in.data);
    free(l->out.data);
    l->used = false;
    return 0;
}

static int sim_thread(void *out, void *(*run)(void *), void *arg) {
    (void)out;
    (void)run;
    (void)arg;
    return EAGAIN;
}

static void *sim_alloc(size_t bytes) {
    w.blocks++;
    return kvfi_sys_real.alloc(bytes);
}

static void *sim_resize(void *old, size_t bytes) {
    w.blocks += old == NULL;
    return kvfi_sys_real.resize(old, bytes);
}

static void sim_release(void *old) {
    w.blocks -= old != NULL;
    kvfi_sys_real.release(old);
}

static kvfi_systable table;

void kvft_sim_begin(uint64_t seed, bool cluster) {
    memset(&w, 0, sizeof w);
    w.random = seed * 2654435761u + 1;
    w.cluster = cluster;
    w.now_us = 1000000;
    for (int i = 0; i < NODES; i++) {
        w.owner[i] = i;
        w.target[i] = -1;
    }
    table = kvfi_sys_real;
    table.alloc = sim_alloc;
    table.resize = sim_resize;
    table.release = sim_release;
    table.now_us = sim_now_us;
    table.wall_us = sim_wall_us;
    table.random = sim_random;
    table.close = sim_close;
    table.resolve = sim_resolve;
    table.socket = sim_socket;
    table.connect = sim_connect;
    table.setsockopt = sim_setsockopt;
    table.getsockopt = sim_getsockopt;
    table.readv = sim_readv;
    table.writev = sim_writev;
    table.poll = sim_poll;
    table.thread = sim_thread;
    kvfi_sys_table = &table;
}

void kvft_sim_plan_set(const kvft_sim_plan *plan) {
    w.plan = *plan;
}

void kvft_sim_sleep_ms(int64_t ms) {
    w.now_us += ms * 1000;
}

void kvft_sim_lie(kvft_sim_lie_fn lie, void *ctx) {
    w.lie = lie;
    w.lie_ctx = ctx;
}

uint64_t kvft_sim_end(void) {
    uint64_t left = w.blocks;
    kvfi_sys_table = &kvfi_sys_real;
    for (int i = 0; i < MAX_LINKS; i++) {
        left += w.links[i].used;
    }
    while (w.records != NULL) {
        (void)forget(w.records->key);
    }
    return left;
}

kvft_sim_stats kvft_sim_stats_get(void) {
    return stats;
}
