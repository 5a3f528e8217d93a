/* SPDX-License-Identifier: Apache-2.0
 *
 * check-evict: how much of the prefixes remains loadable in a store with half of the memory that its users would need.
 *
 * One trace of prompts (shared system prompts, documents asked about repeatedly, growing chats, prompts that never
 * return) is played against a real server with each eviction policy, and against the folder and memory stores, through
 * the public interface: match, load what is there, save the rest. The store holds half of the blocks that the trace
 * needs more than once. The figure is the share of formerly stored blocks, before the first gap, that could be loaded
 * again: the cost of eviction. The clock of server and client runs ahead with the trace (clock_shim.c), so ages, times
 * to live and the server's clock of one second mean the same as in production.
 *
 * usage: check_evict [--seeds N] [--requests N] [--row NAME]... Exits 1 if a policy beats the documented default by
 * more than the seeds scatter.
 */
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"
#include "kvferry/admin.h"
#include "support/kit.h"
#include "support/server.h"

#define BLOCK_TOKENS  64u
#define PAYLOAD       2000u
#define MAX_PROMPT    512u /* blocks */
#define GAP_S         2.0  /* between two requests, on average */
#define NUM_SYSTEMS   8u
#define NUM_DOCUMENTS 300u
#define NUM_CHATS     40u
#define WARM_UP       3u /* the first third of the trace fills the store, and is not counted */
#define MAX_SEEDS     16u
#define OVERCOMMIT    2u
#define TICK_US       2500 /* in which the server looks at its clock */

typedef enum trick { NONE, TOUCH, DEPTH } trick;

static const struct row {
    const char *name;
    const char *policy; /* of a Redis; NULL: a store of our own */
    unsigned samples;
    trick trick;
} ROWS[] = {
    {"allkeys-lru, 10 samples", "allkeys-lru", 10, NONE}, /* docs/redis.conf */
    {"allkeys-lru, 5 samples", "allkeys-lru", 5, NONE},
    {"allkeys-lru, 10, head touched later", "allkeys-lru", 10, TOUCH},
    {"allkeys-lfu, 10 samples", "allkeys-lfu", 10, NONE},
    {"allkeys-random", "allkeys-random", 10, NONE},
    {"volatile-lru, 10 samples", "volatile-lru", 10, NONE},
    {"volatile-lfu, 10 samples", "volatile-lfu", 10, NONE},
    {"volatile-ttl, 10 samples", "volatile-ttl", 10, NONE},
    {"volatile-ttl, 10, TTL by depth", "volatile-ttl", 10, DEPTH},
    {"volatile-random", "volatile-random", 10, NONE},
    {"mem:", NULL, 0, NONE},
    {"file:", NULL, 0, NONE},
};
enum { NUM_ROWS = sizeof ROWS / sizeof *ROWS, DEFAULT_ROW = 0 };

static void die(const char *what) {
    fflush(stdout);
    fprintf(stderr, "check-evict: %s\n", what);
    exit(1);
}

static void *must(void *memory) {
    if (memory == NULL) {
        die("no memory");
    }
    return memory;
}

/* ---- chance ---- */

static double uniform(uint64_t *state) {
    return (double)(kvft_random(state) >> 11) / 9007199254740992.0;
}

static unsigned between(uint64_t *state, unsigned low, unsigned high) {
    return low + (unsigned)(kvft_random(state) % (high - low + 1));
}

/* Of 0 .. num-1, the i-th in proportion to 1/(i+1). */
static unsigned zipf(uint64_t *state, unsigned num) {
    double sum = 0, at = 0;
    for (unsigned i = 0; i < num; i++) {
        sum += 1.0 / (i + 1);
    }
    double x = uniform(state) * sum;
    for (unsigned i = 0; i < num; i++) {
        at += 1.0 / (i + 1);
        if (x < at) {
            return i;
        }
    }
    return num - 1;
}

/* ---- the trace: each prompt is a list of blocks, each block a number that decides its tokens ---- */

typedef struct request {
    double gap_s;
    unsigned num;
    uint64_t *blocks;
} request;

typedef struct chat {
    unsigned num;
    uint64_t blocks[MAX_PROMPT];
} chat;

typedef struct maker {
    uint64_t random, unique;
    chat chats[NUM_CHATS];
    chat prompt;
} maker;

static void append(chat *c, uint64_t text, unsigned num) {
    for (unsigned i = 0; i < num && c->num < MAX_PROMPT; i++) {
        c->blocks[c->num++] = text * 4096 + i;
    }
}

/* Lengths of what is shared follow from its number. */
static void append_shared(chat *c, uint64_t text, unsigned low, unsigned high) {
    uint64_t state = text;
    append(c, text, between(&state, low, high));
}

static void append_system(maker *m, chat *c) {
    c->num = 0;
    append_shared(c, 1 + zipf(&m->random, NUM_SYSTEMS), 8, 40);
}

static void append_unique(maker *m, chat *c, unsigned low, unsigned high) {
    append(c, m->unique++, between(&m->random, low, high));
}

static const chat *next_prompt(maker *m) {
    double kind = uniform(&m->random);
    if (kind < 0.5) { /* a chat goes on, or, where it was over, begins */
        chat *c = &m->chats[between(&m->random, 0, NUM_CHATS - 1)];
        if (c->num == 0 || c->num > MAX_PROMPT - 64 || uniform(&m->random) < 1.0 / 8) {
            append_system(m, c);
        }
        append_unique(m, c, 3, 12);
        return c;
    }
    append_system(m, &m->prompt);
    if (kind < 0.85) {
        append_shared(&m->prompt, 1000 + zipf(&m->random, NUM_DOCUMENTS), 10, 100);
        append_unique(m, &m->prompt, 1, 2);
    } else {
        append_unique(m, &m->prompt, 5, 60);
    }
    return &m->prompt;
}

static request *make_trace(uint64_t seed, unsigned num) {
    request *trace = must(calloc(num, sizeof *trace));
    maker *m = must(calloc(1, sizeof *m));
    m->random = seed;
    m->unique = 1u << 20;
    for (unsigned i = 0; i < num; i++) {
        const chat *prompt = next_prompt(m);
        trace[i].gap_s = -GAP_S * log(1 - uniform(&m->random));
        trace[i].num = prompt->num;
        trace[i].blocks = must(malloc(prompt->num * sizeof *trace[i].blocks));
        memcpy(trace[i].blocks, prompt->blocks, prompt->num * sizeof *trace[i].blocks);
    }
    free(m);
    return trace;
}

static void free_trace(request *trace, unsigned num) {
    for (unsigned i = 0; i < num; i++) {
        free(trace[i].blocks);
    }
    free(trace);
}

/* ---- a set of keys, with how often each was asked for ---- */

typedef struct seen {
    kvf_key *keys;
    uint32_t *times; /* 0: free */
    size_t cap;
} seen;

static uint32_t *seen_at(seen *s, const kvf_key *key) {
    size_t i = 0;
    memcpy(&i, key->bytes, sizeof i);
    for (i &= s->cap - 1; s->times[i] != 0 && memcmp(&s->keys[i], key, sizeof *key) != 0;) {
        i = (i + 1) & (s->cap - 1);
    }
    if (s->times[i] == 0) {
        s->keys[i] = *key;
    }
    return &s->times[i];
}

static void seen_init(seen *s) {
    s->cap = 1u << 20;
    s->keys = must(malloc(s->cap * sizeof *s->keys));
    s->times = must(calloc(s->cap, sizeof *s->times));
}

static void seen_free(seen *s) {
    free(s->keys);
    free(s->times);
}

/* ---- the client ---- */

typedef struct client {
    kvf_store *store;
    kvf_space *space;
    uint32_t tokens[MAX_PROMPT * BLOCK_TOKENS];
    kvf_key keys[MAX_PROMPT];
    kvf_block blocks[MAX_PROMPT];
    struct iovec iov[MAX_PROMPT];
    uint8_t memory[MAX_PROMPT][PAYLOAD];
} client;

static client *client_open(const char *url) {
    client *c = must(calloc(1, sizeof *c));
    c->store = kvft_store(url);
    c->space = kvft_space(c->store, "m", BLOCK_TOKENS);
    return c;
}

static void client_close(client *c) {
    kvf_space_close(c->space);
    kvf_store_close(c->store);
    free(c);
}

static void set_prompt(client *c, const request *r) {
    for (unsigned i = 0; i < r->num; i++) {
        for (unsigned t = 0; t < BLOCK_TOKENS; t++) {
            c->tokens[i * BLOCK_TOKENS + t] = (uint32_t)(r->blocks[i] >> (t % 2 * 32));
        }
        c->iov[i] = (struct iovec){c->memory[i], PAYLOAD};
    }
    if (kvf_chain(c->space, c->keys, MAX_PROMPT, c->tokens, r->num * BLOCK_TOKENS) != r->num) {
        die("chain");
    }
    for (unsigned i = 0; i < r->num; i++) {
        c->blocks[i] = (kvf_block){.key = c->keys[i],
                                   .tokens = c->tokens + i * BLOCK_TOKENS,
                                   .num_tokens = BLOCK_TOKENS,
                                   .first_token = i * BLOCK_TOKENS,
                                   .iov = &c->iov[i],
                                   .num_iov = 1};
    }
}

/* What an engine does with a prompt. Returns how many of its blocks could be loaded. */
static size_t serve(client *c, const request *r) {
    size_t run = 0;
    if (kvf_match(c->space, &run, NULL, c->keys, r->num, KVF_MS(5000)) != KVF_OK) {
        die("match");
    }
    run = kvf_load(c->space, c->blocks, run, NULL, KVF_MS(5000));
    size_t left = r->num - run;
    if (kvf_save(c->space, c->blocks + run, left, NULL) != left ||
        kvf_store_flush(c->store, NULL, KVF_MS(10000)) != KVF_OK) {
        die("a save was not taken");
    }
    return run;
}

/* ---- time ---- */

static _Atomic int64_t *ahead_us;

static int64_t wall_ahead(void) {
    return kvfi_sys_real.wall_us() + *ahead_us;
}

static int64_t now_ahead(void) {
    return kvfi_sys_real.now_us() + *ahead_us;
}

static kvfi_systable clocked;

static void run_ahead(const char *path) {
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof *ahead_us) != 0) {
        die("no clock");
    }
    ahead_us = mmap(NULL, sizeof *ahead_us, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (ahead_us == MAP_FAILED) {
        die("no clock");
    }
    clocked = kvfi_sys_real;
    clocked.wall_us = wall_ahead;
    clocked.now_us = now_ahead;
    kvfi_sys_table = &clocked;
}

static void pass(double seconds) {
    *ahead_us += (int64_t)(seconds * 1e6);
}

/* ---- one run ---- */

typedef struct result {
    double share; /* of the blocks that were stored before, in front of the first gap, those that could be loaded */
    double reach; /* of the blocks in the store at the end, those whose whole prefix is there too */
} result;

typedef struct place {
    const struct row *row;
    kvft_server *server;
    char url[512];
    char *dir;
} place;

static long number_after(const char *text, const char *name) {
    const char *at = strstr(text, name);
    return at != NULL ? atol(at + strlen(name)) : 0;
}

static long used_memory(kvft_server *server) {
    char *info = kvft_server_ask(server, "INFO memory");
    long used = number_after(info, "\nused_memory:");
    free(info);
    return used;
}

static void say(kvft_server *server, const char *format, unsigned long value) {
    char command[128];
    snprintf(command, sizeof command, format, value);
    if (kvft_server_say(server, command)[0] == '-') {
        die(kvft_server_say(server, command));
    }
}

/* What so many blocks take: found out by storing them. */
static unsigned long bytes_of(place *p, const char *url, size_t num_blocks) {
    client *c = client_open(url);
    request r = {.num = MAX_PROMPT};
    uint64_t numbers[MAX_PROMPT];
    r.blocks = numbers;
    for (size_t done = 0; done < num_blocks; done += r.num) {
        r.num = (unsigned)(num_blocks - done < MAX_PROMPT ? num_blocks - done : MAX_PROMPT);
        for (unsigned i = 0; i < r.num; i++) {
            numbers[i] = 7777 * 4096 + done + i;
        }
        set_prompt(c, &r);
        (void)serve(c, &r);
    }
    unsigned long used = 0;
    if (p->server != NULL) {
        used = (unsigned long)used_memory(p->server);
    } else {
        kvf_tier_info info = {.struct_size = sizeof info};
        if (kvf_tier_info_get(c->store, &info, 0) != KVF_OK) {
            die("info");
        }
        used = (unsigned long)info.used_bytes;
    }
    client_close(c);
    return used;
}

static void open_place(place *p, const struct row *row, const char *clock, size_t capacity) {
    static const char *const args[] = {"--hz", "500", "--port", "0", NULL};
    char url[512];
    *p = (place){.row = row};
    if (row->policy != NULL) {
        p->server = kvft_server_start_clocked(args, clock);
        if (p->server == NULL) {
            die("no redis-server is installed: make setup");
        }
        snprintf(p->url, sizeof p->url, "%s?window=64K&conns=1", p->server->unix_url);
        say(p->server, "CONFIG SET maxmemory %lu", bytes_of(p, p->url, capacity));
        say(p->server, "FLUSHALL SYNC", 0);
        snprintf(url, sizeof url, "CONFIG SET maxmemory-policy %s", row->policy);
        say(p->server, url, 0);
        say(p->server, "CONFIG SET maxmemory-samples %lu", row->samples);
        return;
    }
    bool file = strcmp(row->name, "file:") == 0;
    p->dir = kvft_temp_dir();
    snprintf(url, sizeof url, file ? "file:%s/measure?max=100G" : "mem:?max=100G", p->dir);
    unsigned long bytes = bytes_of(p, url, capacity);
    int at = file ? snprintf(p->url, sizeof p->url, "file:%s/kv", p->dir) : snprintf(p->url, sizeof p->url, "mem:");
    snprintf(p->url + at, sizeof p->url - (size_t)at, "?max=%lu", bytes);
}

static void close_place(place *p) {
    kvft_server_stop(p->server);
    if (p->dir != NULL) {
        kvft_remove_dir(p->dir);
    }
}

/* One short command for each of the first `num` blocks: "VERB key [number]". */
static void command_each(place *p, const client *c, const char *verb, unsigned num, int64_t first, int64_t step) {
    kvf_digest digest;
    char space[17], key[65], *commands = must(malloc(16 + num * 160)), *at = commands;
    kvf_space_digest(c->space, &digest);
    kvfi_hex(space, digest.bytes, 8);
    for (unsigned i = 0; i < num; i++) {
        kvfi_hex(key, c->keys[i].bytes, 32);
        at += sprintf(at, "%s%s kvf1:%s:{%s}", i > 0 ? "\r\n" : "", verb, space, key);
        if (first > 0) {
            at += sprintf(at, " %lld", (long long)(first - step * i));
        }
    }
    if (num > 0 && kvft_server_say(p->server, commands)[0] != ':') {
        die(verb);
    }
    free(commands);
}

/* What a client might do so that the head of a prompt outlives its tail. TOUCH: the server's clock counts seconds, so
 * the front half is touched again a little later, and the front quarter after that. DEPTH: each use sets a time to live
 * that is shorter the deeper a block lies, by a millisecond for each token in front of it. */
static void play_trick(place *p, const client *c, unsigned num) {
    if (p->row->trick == DEPTH) {
        command_each(p, c, "PEXPIRE", num, 3600000, BLOCK_TOKENS);
    }
    for (unsigned part = num / 2; p->row->trick == TOUCH && part >= num / 4 && part > 0; part /= 2) {
        pass(1.2);
        usleep(TICK_US);
        command_each(p, c, "TOUCH", part, 0, 0);
    }
}

static double reach_of(client *c, const request *trace, unsigned num, seen *all) {
    size_t there = 0, usable = 0;
    memset(all->times, 0, all->cap * sizeof *all->times);
    for (unsigned i = 0; i < num; i++) {
        bool whole = true;
        set_prompt(c, &trace[i]);
        for (unsigned b = 0; b < trace[i].num; b++) {
            uint32_t *state = seen_at(all, &c->keys[b]);
            if (*state == 0) {
                size_t run = 0;
                (void)!kvf_match(c->space, &run, NULL, &c->keys[b], 1, KVF_MS(1000));
                *state = run == 1 ? 2 : 1;
                there += run;
                usable += run == 1 && whole;
            }
            whole = whole && *state == 2;
        }
    }
    return there > 0 ? (double)usable / (double)there : 0;
}

static result play(const struct row *row, uint64_t seed, unsigned num) {
    char clock[] = "/tmp/kvft-clock-XXXXXX";
    close(mkstemp(clock));
    run_ahead(clock);
    request *trace = make_trace(seed, num);
    seen all;
    seen_init(&all);
    /* How many blocks return? */
    client *c = client_open("mem:");
    size_t returning = 0, possible = 0, loaded = 0;
    for (unsigned i = 0; i < num; i++) {
        set_prompt(c, &trace[i]);
        for (unsigned b = 0; b < trace[i].num; b++) {
            returning += ++*seen_at(&all, &c->keys[b]) == 2;
        }
    }
    client_close(c);
    memset(all.times, 0, all.cap * sizeof *all.times);
    place p;
    open_place(&p, row, clock, returning / OVERCOMMIT);
    c = client_open(p.url);
    for (unsigned i = 0; i < num; i++) {
        pass(trace[i].gap_s);
        if (p.server != NULL) {
            usleep(TICK_US);
        }
        set_prompt(c, &trace[i]);
        size_t run = serve(c, &trace[i]), before = 0;
        while (before<trace[i].num && * seen_at(&all, &c->keys[before])> 0) {
            before++;
        }
        if (i >= num / WARM_UP) {
            possible += before;
            loaded += run;
        }
        for (unsigned b = 0; b < trace[i].num; b++) {
            ++*seen_at(&all, &c->keys[b]);
        }
        play_trick(&p, c, trace[i].num);
    }
    result r = {.share = (double)loaded / (double)possible, .reach = reach_of(c, trace, num, &all)};
    client_close(c);
    close_place(&p);
    seen_free(&all);
    free_trace(trace, num);
    unlink(clock);
    return r;
}

/* ---- all of them: two processes at a time, each plays a row with all seeds ---- */

static void play_row(int fd, const struct row *row, unsigned seeds, unsigned num) {
    for (unsigned s = 0; s < seeds; s++) {
        result r = play(row, 1 + s, num);
        if (write(fd, &r, sizeof r) != sizeof r) {
            exit(1);
        }
    }
    exit(0);
}

static double mean(const double *x, unsigned num) {
    double sum = 0;
    for (unsigned i = 0; i < num; i++) {
        sum += x[i];
    }
    return sum / num;
}

/* The standard error of the mean. */
static double scatter(const double *x, unsigned num) {
    double m = mean(x, num), sum = 0;
    for (unsigned i = 0; i < num; i++) {
        sum += (x[i] - m) * (x[i] - m);
    }
    return num > 1 ? sqrt(sum / (num - 1) / num) : 0;
}

int main(int argc, char **argv) {
    setenv("KVFT_CLOCK_SHIM", KVFT_CLOCK_SHIM, 1);
    unsigned seeds = 3, num = 1800;
    const char *only[NUM_ROWS] = {0};
    unsigned num_only = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--seeds") == 0) {
            seeds = (unsigned)atoi(argv[i + 1]);
        } else if (strcmp(argv[i], "--requests") == 0) {
            num = (unsigned)atoi(argv[i + 1]);
        } else if (strcmp(argv[i], "--row") == 0 && num_only < NUM_ROWS) {
            only[num_only++] = argv[i + 1];
        }
    }
    seeds = seeds < MAX_SEEDS ? seeds : MAX_SEEDS;
    printf("%u requests, %u seeds, half the memory that what returns would need\n", num, seeds);
    printf("  %-36s %-14s %s\n", "eviction", "loaded again", "reachable at the end");
    fflush(stdout);
    int fds[NUM_ROWS];
    unsigned running = 0;
    for (int i = 0; i < NUM_ROWS; i++) {
        bool wanted = num_only == 0;
        for (unsigned k = 0; k < num_only; k++) {
            wanted = wanted || i == DEFAULT_ROW || strcmp(only[k], ROWS[i].name) == 0;
        }
        int ends[2];
        fds[i] = -1;
        if (!wanted) {
            continue;
        }
        if (pipe(ends) != 0) {
            die("no pipe");
        }
        if (running == 3 && wait(NULL) > 0) {
            running--;
        }
        fflush(stdout);
        if (fork() == 0) {
            close(ends[0]);
            play_row(ends[1], &ROWS[i], seeds, num);
        }
        running++;
        close(ends[1]);
        fds[i] = ends[0];
    }
    double share[NUM_ROWS][MAX_SEEDS], base = 0;
    bool ok = true;
    const char *best = ROWS[DEFAULT_ROW].name;
    for (int i = 0; i < NUM_ROWS; i++) {
        double reach[MAX_SEEDS], lead[MAX_SEEDS];
        if (fds[i] < 0) {
            continue;
        }
        for (unsigned s = 0; s < seeds; s++) {
            result r;
            if (read(fds[i], &r, sizeof r) != sizeof r) {
                die(ROWS[i].name);
            }
            share[i][s] = r.share;
            reach[s] = r.reach;
            lead[s] = r.share - share[DEFAULT_ROW][s];
        }
        printf("  %-36s %5.1f %% +- %-4.1f %12.1f %%\n", ROWS[i].name, 100 * mean(share[i], seeds),
               100 * scatter(share[i], seeds), 100 * mean(reach, seeds));
        fflush(stdout);
        if (i == DEFAULT_ROW) {
            base = mean(share[i], seeds);
        } else if (ROWS[i].policy != NULL && mean(lead, seeds) > 2 * scatter(lead, seeds) + 0.005) {
            ok = false;
            best = ROWS[i].name;
        }
    }
    while (wait(NULL) > 0) {
    }
    printf("check-evict: %s: with %s %.1f %% of what was stored could be loaded again%s%s\n", ok ? "ok" : "FAILED",
           ROWS[DEFAULT_ROW].name, 100 * base, ok ? "" : "; better was ", ok ? "" : best);
    return ok ? 0 : 1;
}
