/* SPDX-License-Identifier: Apache-2.0
 *
 * check-128k: a context of 128K tokens at 32 KiB a token (4 GiB in 4,096 blocks of 1 MiB), saved to and loaded from a
 * private redis-server. Asserts: one call chains all tokens; the lookup of all blocks takes one round trip, counted by
 * a proxy that holds back every reply until all 4,096 questions have passed; every byte is right; the client's own
 * memory stays under 64 MiB beyond the caller's buffers. Prints GB/s, and asserts nothing about time.
 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "support/kit.h"
#include "support/server.h"

#define TOKENS          (128u * 1024u)
#define BLOCK_TOKENS    32u
#define BLOCKS          (TOKENS / BLOCK_TOKENS)
#define PAYLOAD         (BLOCK_TOKENS * 32u * 1024u)
#define GROUP           16u
#define MAX_OVERHEAD_KB (64 * 1024L)

static void die(const char *what) {
    fprintf(stderr, "check-128k: %s (%s)\n", what, strerror(errno));
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static long status_kb(const char *field) {
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    long kb = -1;
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, field, strlen(field)) == 0) {
            kb = strtol(line + strlen(field) + 1, NULL, 10);
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return kb;
}

static void reset_peak(void) {
    FILE *file = fopen("/proc/self/clear_refs", "w");
    if (file == NULL || fputs("5", file) < 0 || fclose(file) != 0) {
        die("can't reset the peak of memory");
    }
}

/* ---- the proxy: one connection, replies held back until `expected` questions have passed, once it is armed ---- */

typedef struct proxy {
    char path[160], server[160];
    int listener;
    size_t expected, questions, turns; /* turns: how often the client continued after it had received a reply */
    char *held;
    size_t num_held, cap_held;
    unsigned partial;  /* bytes of "GETRANGE" matched at the end of what was read */
    atomic_bool armed; /* requests at the opening of the store do not count */
} proxy;

static int unix_socket(const char *path, bool listening) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    snprintf(addr.sun_path, sizeof addr.sun_path, "%s", path);
    int rc = listening ? bind(fd, (struct sockaddr *)&addr, sizeof addr)
                       : connect(fd, (struct sockaddr *)&addr, sizeof addr);
    if (fd < 0 || rc != 0 || (listening && listen(fd, 8) != 0)) {
        die(path);
    }
    return fd;
}

static void write_all(int fd, const char *bytes, size_t len) {
    for (size_t done = 0; done < len;) {
        ssize_t n = write(fd, bytes + done, len - done);
        if (n <= 0) {
            return; /* the other side has gone: its reader will notice */
        }
        done += (size_t)n;
    }
}

static void count_questions(proxy *p, const char *bytes, size_t len) {
    static const char word[] = "GETRANGE";
    for (size_t i = 0; i < len; i++) {
        p->partial = bytes[i] == word[p->partial] ? p->partial + 1 : bytes[i] == word[0];
        if (p->partial == sizeof word - 1) {
            p->questions++;
            p->partial = 0;
        }
    }
}

static void hold(proxy *p, const char *bytes, size_t len) {
    if (p->num_held + len > p->cap_held) {
        p->cap_held = (p->num_held + len) * 2;
        p->held = realloc(p->held, p->cap_held);
    }
    memcpy(p->held + p->num_held, bytes, len);
    p->num_held += len;
}

static void relay(proxy *p, int client, int server) {
    char buffer[65536];
    bool answered = false; /* a reply to a question has gone out since the last question */
    for (;;) {
        struct pollfd fds[2] = {{.fd = client, .events = POLLIN}, {.fd = server, .events = POLLIN}};
        if (poll(fds, 2, -1) < 0) {
            return;
        }
        if (fds[0].revents != 0) {
            ssize_t n = read(client, buffer, sizeof buffer);
            if (n <= 0) {
                return;
            }
            size_t before = p->questions;
            if (atomic_load(&p->armed)) {
                count_questions(p, buffer, (size_t)n);
            }
            if (answered && p->questions > before) {
                p->turns++;
                answered = false;
            }
            write_all(server, buffer, (size_t)n);
        }
        if (fds[1].revents != 0) {
            ssize_t n = read(server, buffer, sizeof buffer);
            if (n <= 0) {
                return;
            }
            hold(p, buffer, (size_t)n);
        }
        if (p->questions == 0 || p->questions >= p->expected) {
            answered = p->questions > 0 && (answered || p->num_held > 0);
            write_all(client, p->held, p->num_held);
            p->num_held = 0;
        }
    }
}

static void *run_proxy(void *arg) {
    proxy *p = arg;
    for (;;) {
        int client = accept(p->listener, NULL, NULL);
        if (client < 0) {
            return NULL;
        }
        int server = unix_socket(p->server, false);
        relay(p, client, server);
        close(client);
        close(server);
    }
}

/* ---- the check ---- */

typedef struct work {
    kvf_store *store;
    kvf_space *space;
    kvf_queue *queue;
    uint32_t *tokens;
    kvf_key *keys;
    uint8_t *memory, *expected; /* the caller's: GROUP payloads, and one to compare with */
    struct iovec iov[GROUP];
    kvf_block blocks[GROUP];
} work;

static void set_group(work *w, size_t first) {
    for (size_t i = 0; i < GROUP; i++) {
        w->iov[i] = (struct iovec){w->memory + i * PAYLOAD, PAYLOAD};
        w->blocks[i] = (kvf_block){.key = w->keys[first + i],
                                   .tokens = w->tokens + (first + i) * BLOCK_TOKENS,
                                   .num_tokens = BLOCK_TOKENS,
                                   .first_token = (uint32_t)((first + i) * BLOCK_TOKENS),
                                   .iov = &w->iov[i],
                                   .num_iov = 1};
    }
}

/* Synthetic, but different in every word of every block; cheap, so that the check is not about making it. */
static void make_payload(uint8_t *out, size_t block) {
    for (size_t at = 0; at < PAYLOAD; at += 8) {
        uint64_t word = (block * PAYLOAD + at) * 0x9e3779b97f4a7c15u;
        memcpy(out + at, &word, 8);
    }
}

static void save_group(work *w, size_t first) {
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_SAVE,
                       .space = w->space,
                       .blocks = w->blocks,
                       .num = GROUP,
                       .budget_us = KVF_MS(60000)};
    uint64_t ticket = 0;
    kvf_completion done = {0};
    set_group(w, first);
    if (kvf_submit(w->queue, &ticket, &batch) != KVF_OK) {
        die("submit");
    }
    struct pollfd fd = {.fd = kvf_queue_fd(w->queue), .events = POLLIN};
    while (kvf_reap(w->queue, &done, 1) == 0) {
        poll(&fd, 1, 1000);
    }
    if (done.num_ok != GROUP) {
        fprintf(stderr, "check-128k: block %zu was not stored: %s\n", first + done.num_ok,
                kvf_reason_name(w->blocks[done.num_ok].why));
        exit(1);
    }
}

static double save_all(work *w) {
    double spent = 0;
    for (size_t first = 0; first < BLOCKS; first += GROUP) {
        for (size_t i = 0; i < GROUP; i++) {
            make_payload(w->memory + i * PAYLOAD, first + i);
        }
        double begin = now();
        save_group(w, first);
        spent += now() - begin;
    }
    return spent;
}

static double load_all(work *w, size_t *wrong) {
    double spent = 0;
    for (size_t first = 0; first < BLOCKS; first += GROUP) {
        set_group(w, first);
        double begin = now();
        size_t run = kvf_load(w->space, w->blocks, GROUP, NULL, KVF_MS(60000));
        spent += now() - begin;
        if (run != GROUP) {
            fprintf(stderr, "check-128k: block %zu did not load: %s\n", first + run,
                    kvf_reason_name(w->blocks[run].why));
            exit(1);
        }
        for (size_t i = 0; i < GROUP; i++) {
            make_payload(w->expected, first + i);
            *wrong += memcmp(w->expected, w->memory + i * PAYLOAD, PAYLOAD) != 0;
        }
    }
    return spent;
}

static void *touched(size_t bytes) {
    void *memory = malloc(bytes);
    if (memory == NULL) {
        die("no memory");
    }
    memset(memory, 1, bytes);
    return memory;
}

static void open_work(work *w, const char *url) {
    w->store = kvft_store(url);
    w->space = kvft_space(w->store, "128k", BLOCK_TOKENS);
    kvf_error err;
    if (kvf_queue_open(&w->queue, &err, w->store, 4) != KVF_OK) {
        die(err.what);
    }
}

static void close_work(work *w) {
    kvf_queue_close(w->queue);
    kvf_space_close(w->space);
    kvf_store_close(w->store);
}

/* The lookup through the proxy, by a store of its own: returns the round trips seen on the wire, 0 when it did not find
 * everything. */
static size_t count_round_trips(work *w, kvft_server *server, uint64_t *reported) {
    proxy p = {.expected = BLOCKS};
    snprintf(p.path, sizeof p.path, "%s/proxy.sock", server->dir);
    snprintf(p.server, sizeof p.server, "%s", server->socket);
    p.listener = unix_socket(p.path, true);
    pthread_t thread;
    pthread_create(&thread, NULL, run_proxy, &p);
    char url[256];
    snprintf(url, sizeof url, "redis+unix://%s", p.path);
    work through = {0};
    open_work(&through, url);
    atomic_store(&p.armed, true);
    size_t run = 0;
    kvf_found *found = touched(BLOCKS * sizeof *found);
    kvf_status status = kvf_match(through.space, &run, found, w->keys, BLOCKS, KVF_MS(30000));
    kvf_stats stats = {.struct_size = sizeof stats};
    kvf_store_stats(through.store, &stats);
    *reported = stats.lookup_round_trips;
    close_work(&through);
    shutdown(p.listener, SHUT_RDWR);
    pthread_join(thread, NULL);
    close(p.listener);
    free(found);
    printf("lookup:  %zu of %u blocks found, %zu questions, %zu turns on the wire\n", run, BLOCKS, p.questions,
           p.turns + 1);
    free(p.held);
    return status == KVF_OK && run == BLOCKS && p.questions == BLOCKS ? p.turns + 1 : 0;
}

int main(void) {
    const char *const args[] = {"--maxmemory", "12gb", "--maxmemory-policy", "allkeys-lru", NULL};
    kvft_server *server = kvft_server_start(args);
    if (server == NULL) {
        fprintf(stderr, "check-128k: no redis-server is installed: make setup\n");
        return 1;
    }
    work w = {0};
    w.memory = touched((size_t)GROUP * PAYLOAD);
    w.expected = touched(PAYLOAD);
    w.tokens = touched(TOKENS * sizeof *w.tokens);
    w.keys = touched(BLOCKS * sizeof *w.keys);
    uint64_t random = 128;
    for (size_t i = 0; i < TOKENS; i++) {
        w.tokens[i] = (uint32_t)kvft_random(&random);
    }
    reset_peak();
    long before = status_kb("VmRSS");
    open_work(&w, server->unix_url);

    double begin = now();
    size_t keys = kvf_chain(w.space, w.keys, BLOCKS, w.tokens, TOKENS);
    printf("chain:   %zu keys of %u tokens in one call, %.1f ms\n", keys, TOKENS, (now() - begin) * 1e3);
    double gb = (double)BLOCKS * PAYLOAD / 1e9;
    double saving = save_all(&w);
    printf("store:   %.2f GB, %.2f GB/s\n", gb, gb / saving);
    size_t wrong = 0;
    double loading = load_all(&w, &wrong);
    printf("load:    %.2f GB, %.2f GB/s, %zu blocks wrong\n", gb, gb / loading, wrong);
    begin = now();
    size_t run = 0;
    kvf_status matched = kvf_match(w.space, &run, NULL, w.keys, BLOCKS, KVF_MS(30000));
    printf("lookup:  %zu blocks in %.1f ms\n", run, (now() - begin) * 1e3);
    long overhead = status_kb("VmHWM") - before;
    close_work(&w);
    uint64_t reported = 0;
    size_t trips = count_round_trips(&w, server, &reported);
    kvft_server_stop(server);

    bool ok = keys == BLOCKS && wrong == 0 && matched == KVF_OK && run == BLOCKS && trips == 1 && reported == 1 &&
              overhead < MAX_OVERHEAD_KB;
    printf(
        "check-128k: %s: %zu keys in one call, %zu round trip(s) for %u blocks, %zu wrong, client overhead %.1f MiB (< 64)\n",
        ok ? "ok" : "FAILED", keys, trips, BLOCKS, wrong, (double)overhead / 1024);
    free(w.memory);
    free(w.expected);
    free(w.tokens);
    free(w.keys);
    return ok ? 0 : 1;
}
