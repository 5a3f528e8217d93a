/* SPDX-License-Identifier: Apache-2.0
 *
 * check-staging: the cost of staging. The same bursts of blocks go to one redis-server in three ways:
 *
 *   staged   kvf_save, and kvf_store_flush: copied once, then written behind
 *   queue    KVF_OP_SAVE: straight from the caller's memory
 *   bare     a blocking socket that writes SETs and checks nothing
 *
 * Bursts have 4, 16 and 64 MiB, of blocks of 256 KiB, 1 MiB and 4 MiB in changing order, over a unix socket and over
 * TCP. Staged and queue take turns, in changing order; the figure is the median of the ratios within a pair, of CPU
 * seconds of this process and of time. Pairs are added until the 95 % interval of that median leaves the bound on one
 * side. BOUND sets another bound than 1.30.
 */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "support/kit.h"
#include "support/median.h"
#include "support/server.h"

#define MIB        ((size_t)1 << 20)
#define MAX_BURST  (64 * MIB)
#define MAX_BLOCKS (MAX_BURST / (MIB / 4))
#define MOVED      (128 * MIB) /* bytes of one measurement */
#define PAIRS      60          /* at most; fewer if the figure is clear */
#define FEWEST     9

static double bound = 1.30;
static uint8_t *memory;
static uint64_t seed = 1, serial;

typedef struct client {
    kvf_store *store;
    kvf_space *space;
    kvf_queue *queue;
    int fd;
} client;

typedef struct cost {
    double cpu_s, time_s;
} cost;

static void die(const char *what) {
    fflush(stdout);
    fprintf(stderr, "check-staging: %s\n", what);
    exit(1);
}

static double cpu_s(void) {
    struct rusage r;
    getrusage(RUSAGE_SELF, &r);
    return (double)(r.ru_utime.tv_sec + r.ru_stime.tv_sec) + (double)(r.ru_utime.tv_usec + r.ru_stime.tv_usec) * 1e-6;
}

/* ---- a burst: blocks of changing sizes, each under a key of its own */

typedef struct burst {
    kvf_block blocks[MAX_BLOCKS];
    struct iovec iov[MAX_BLOCKS];
    size_t num;
} burst;

static void draw_burst(burst *b, size_t bytes) {
    b->num = 0;
    for (size_t at = 0; at < bytes; b->num++) {
        size_t size = MIB / 4 << 2 * (kvft_random(&seed) % 3);
        size = size < bytes - at ? size : bytes - at;
        b->iov[b->num] = (struct iovec){memory + at, size};
        b->blocks[b->num] = (kvf_block){.iov = &b->iov[b->num], .num_iov = 1};
        serial++;
        memcpy(b->blocks[b->num].key.bytes, &serial, sizeof serial);
        at += size;
    }
}

/* ---- the three ways */

static void save_staged(client *c, burst *b) {
    if (kvf_save(c->space, b->blocks, b->num, NULL) != b->num ||
        kvf_store_flush(c->store, NULL, KVF_MS(20000)) != KVF_OK) {
        die("a staged save was not taken");
    }
}

static void save_by_queue(client *c, burst *b) {
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_SAVE,
                       .space = c->space,
                       .blocks = b->blocks,
                       .num = b->num,
                       .flags = KVF_MAY_LEND}; /* the memory is never written to again */
    struct pollfd p = {.fd = kvf_queue_fd(c->queue), .events = POLLIN};
    kvf_completion done;
    uint64_t ticket;
    if (kvf_submit(c->queue, &ticket, &batch) != KVF_OK) {
        die("a batch was not taken");
    }
    while (kvf_reap(c->queue, &done, 1) == 0) {
        (void)poll(&p, 1, 1000);
    }
    if (done.num_ok != b->num) {
        die("a block of a queue was not saved");
    }
}

static void write_all(int fd, const void *data, size_t len) {
    for (const uint8_t *at = data; len > 0;) {
        ssize_t n = write(fd, at, len);
        if (n <= 0) {
            die("the bare client could not write");
        }
        at += n;
        len -= (size_t)n;
    }
}

static void save_bare(client *c, burst *b) {
    for (size_t i = 0; i < b->num; i++) {
        char head[128], reply[5];
        const struct iovec *iov = &b->iov[i];
        int len = snprintf(head, sizeof head, "*3\r\n$3\r\nSET\r\n$20\r\n%020zu\r\n$%zu\r\n", i, iov->iov_len);
        write_all(c->fd, head, (size_t)len);
        write_all(c->fd, iov->iov_base, iov->iov_len);
        write_all(c->fd, "\r\n", 2);
        for (size_t got = 0; got < sizeof reply;) {
            ssize_t n = read(c->fd, reply + got, sizeof reply - got);
            got += n > 0 ? (size_t)n : 0;
            if (n <= 0 || reply[0] != '+') {
                die("the bare client was refused");
            }
        }
    }
}

static cost measure(void (*save)(client *, burst *), client *c, kvft_server *server, size_t bytes) {
    static burst b;
    cost sum = {0};
    size_t moved = 0;
    if (strcmp(kvft_server_say(server, "FLUSHALL SYNC"), "+OK") != 0) {
        die("FLUSHALL failed");
    }
    for (; moved < MOVED; moved += bytes) {
        draw_burst(&b, bytes);
        double cpu = cpu_s(), from_ms = kvft_now_ms();
        save(c, &b);
        sum.time_s += (kvft_now_ms() - from_ms) / 1000;
        sum.cpu_s += cpu_s() - cpu;
    }
    return (cost){sum.cpu_s / (double)moved * 1e9, sum.time_s / (double)moved * 1e9};
}

/* ---- pairs */

typedef struct series {
    double values[PAIRS];
    size_t num;
} series;

static void add(series *s, double value) {
    s->values[s->num++] = value;
}

static double median(const series *s) {
    return kvft_median_of(s->values, s->num).value;
}

static bool is_clear(const series *s) {
    kvft_median m = kvft_median_of(s->values, s->num);
    return m.high <= bound || m.low > bound;
}

static double check(const char *what, client *c, kvft_server *server, size_t bytes) {
    series cpu = {.num = 0}, time = {.num = 0}, staged_cpu = {.num = 0}, staged_time = {.num = 0};
    (void)measure(save_staged, c, server, bytes);
    cost bare = measure(save_bare, c, server, bytes);
    for (int i = 0; i < PAIRS && (i < FEWEST || !is_clear(&cpu) || !is_clear(&time)); i++) {
        cost queue = {0};
        if (i % 2 == 0) {
            queue = measure(save_by_queue, c, server, bytes);
        }
        cost staged = measure(save_staged, c, server, bytes);
        if (i % 2 != 0) {
            queue = measure(save_by_queue, c, server, bytes);
        }
        add(&cpu, staged.cpu_s / queue.cpu_s);
        add(&time, staged.time_s / queue.time_s);
        add(&staged_cpu, staged.cpu_s);
        add(&staged_time, staged.time_s);
    }
    printf("%-4s %2zu MiB: CPU-s per GB staged %.3f, bare %.3f, staged/queue %.2f; s per GB staged %.3f, bare %.3f, "
           "staged/queue %.2f (%zu pairs)\n",
           what, bytes / MIB, median(&staged_cpu), bare.cpu_s, median(&cpu), median(&staged_time), bare.time_s,
           median(&time), cpu.num);
    fflush(stdout);
    return median(&cpu) > median(&time) ? median(&cpu) : median(&time);
}

/* ---- clients */

static int dial(const kvft_server *server, bool tcp) {
    struct sockaddr_un path = {.sun_family = AF_UNIX};
    struct sockaddr_in port = {.sin_family = AF_INET, .sin_port = htons((uint16_t)server->port)};
    int one = 1, fd = socket(tcp ? AF_INET : AF_UNIX, SOCK_STREAM, 0);
    port.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    snprintf(path.sun_path, sizeof path.sun_path, "%.107s", server->socket);
    const struct sockaddr *to = tcp ? (const void *)&port : (const void *)&path;
    if (fd < 0 || connect(fd, to, tcp ? sizeof port : sizeof path) != 0) {
        die("the bare client does not connect");
    }
    if (tcp) {
        (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
    return fd;
}

static double check_over(const char *what, kvft_server *server, bool tcp) {
    static const size_t bursts[] = {4 * MIB, 16 * MIB, 64 * MIB};
    client c = {.store = kvft_store(tcp ? server->tcp_url : server->unix_url), .fd = dial(server, tcp)};
    double worst = 0;
    c.space = kvft_space(c.store, "m", 16);
    if (kvf_queue_open(&c.queue, NULL, c.store, 1) != KVF_OK) {
        die("no queue");
    }
    for (size_t i = 0; i < sizeof bursts / sizeof *bursts; i++) {
        double ratio = check(what, &c, server, bursts[i]);
        worst = ratio > worst ? ratio : worst;
    }
    kvf_queue_close(c.queue);
    kvf_space_close(c.space);
    kvf_store_close(c.store);
    (void)close(c.fd);
    return worst;
}

int main(void) {
    kvft_server *server = kvft_server_start(NULL);
    if (server == NULL) {
        printf("check-staging: skipped: redis-server is not installed\n");
        return 77;
    }
    const char *given = getenv("BOUND");
    bound = given != NULL && atof(given) > 1 ? atof(given) : bound;
    memory = malloc(MAX_BURST);
    if (memory == NULL) {
        die("no memory");
    }
    kvft_bytes(memory, MAX_BURST, 1);
    double local = check_over("unix", server, false), tcp = check_over("TCP", server, true);
    kvft_server_stop(server);
    free(memory);
    double worst = local > tcp ? local : tcp;
    bool ok = worst <= bound;
    printf("check-staging: staged saves cost %.2f times what queue saves cost, in CPU or time (%s %.2f)\n", worst,
           ok ? "at most" : "more than", bound);
    return ok ? 0 : 1;
}
