/* SPDX-License-Identifier: Apache-2.0
 *
 * check-wire: our GET and SET through the public calls, with all checks on, beside
 *
 *   bare      a minimal blocking client that checks nothing, with one connection and with two; the better of those with
 *             as many as ours uses in that cell, or one, is the ceiling
 *   summed    bare with one connection, and the checksum that a record has: what of the ceiling a checked byte can have
 *   hiredis   synchronous, and a copy into place
 *   article   the recipe of redis-py and numpy (wire_peers.py); both with malloc as it is and tuned, since that is most
 *             of their loss
 *
 * on one redis-server, over a unix socket and over TCP, for values of 256 KiB, 1 MiB and 4 MiB. Every contender is a
 * process of its own with 16 buffers that have been touched; rounds are interleaved; each figure is the median of the
 * ratios within a round. A cell in which the interval of that median does not leave the bound on one side gets more
 * rounds of ours and bare, up to 45.
 *
 *   check_wire [--check] [--rounds N] [--only TEXT]... [--who NAME]...       --only "unix get 1M" --who ours
 *   WIRE_VARIANT='conns=1' check_wire --who ours --who variant      ours, and ours with other parameters
 *
 * Exit status 1 if an interval shows that ours is below 0.9 of the ceiling from 1 MiB on, or if a median says that it is
 * not faster than a peer.
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifdef KVF_HAVE_HIREDIS
#include <hiredis.h>
#endif

#include "base/base.h"
#include "kvferry/kvferry.h"
#include "store/private.h"
#include "support/median.h"
#include "support/server.h"

#define NUM_BUFFERS  16u
#define BLOCK_TOKENS 256u
#define RECORD_EXTRA (128u + 4u * BLOCK_TOKENS + 16u) /* header, tokens, checksum */
#define MAX_ROUNDS   99u
#define MOST_ROUNDS  45u /* of a cell that is undecided */
#define BOUND        0.9
#define TTL_S        "3600"

static void die(const char *what) {
    fprintf(stderr, "check_wire: %s\n", what);
    exit(2);
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double own_cpu_s(void) {
    struct rusage r;
    getrusage(RUSAGE_SELF, &r);
    return (double)(r.ru_utime.tv_sec + r.ru_stime.tv_sec) + (double)(r.ru_utime.tv_usec + r.ru_stime.tv_usec) * 1e-6;
}

/* ---- what a worker is asked to do, and its memory ---- */

typedef struct job {
    char op[8];        /* get or set */
    char transport[8]; /* unix or tcp */
    char where[192];   /* path or port */
    size_t bytes;      /* of a value */
    unsigned passes;   /* over the buffers */
    unsigned serial;   /* part of the keys */
} job;

static uint8_t *memory;
static size_t stride;

/* 16 buffers, each from a page on, all touched, with bytes that differ. */
static void make_buffers(size_t bytes) {
    if (memory != NULL) {
        munmap(memory, stride * NUM_BUFFERS);
    }
    stride = (bytes + 4095) & ~(size_t)4095;
    memory = mmap(NULL, stride * NUM_BUFFERS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        die("no memory");
    }
    uint64_t x = 88172645463325252u;
    for (size_t i = 0; i < stride * NUM_BUFFERS; i += 8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        memcpy(memory + i, &x, 8);
    }
}

static uint8_t *buffer(unsigned i) {
    return memory + stride * (i % NUM_BUFFERS);
}

/* A hash of all that the buffers hold, to see that a load brings what was stored. */
static void digest(uint8_t out[16], size_t bytes) {
    struct iovec iov[NUM_BUFFERS];
    for (unsigned i = 0; i < NUM_BUFFERS; i++) {
        iov[i] = (struct iovec){buffer(i), bytes};
    }
    kvfi_xxh3_iov(out, iov, NUM_BUFFERS);
}

typedef struct contender {
    const char *name;
    void (*open)(const job *);
    void (*close)(void);
    void (*pass)(const job *, bool set); /* all buffers once */
    void (*forget)(
        void); /* before a set: that the same keys were stored before, which would make it nothing to do; or NULL */
} contender;

/* ---- bare ---- */

#define MAX_BARE  8u
#define SUM_PIECE ((size_t)512 << 10) /* hashed while it is in the core's cache, as ours does */
static unsigned bare_conns = 1;
static bool summed;
static kvfi_xxh3 sum;
static int bare_fds[MAX_BARE];

static int dial(const job *j) {
    int fd, one = 1;
    if (strcmp(j->transport, "unix") == 0) {
        struct sockaddr_un a = {.sun_family = AF_UNIX};
        snprintf(a.sun_path, sizeof a.sun_path, "%.107s", j->where);
        fd = socket(AF_UNIX, SOCK_STREAM, 0);
        if (fd < 0 || connect(fd, (struct sockaddr *)&a, sizeof a) != 0) {
            die("connect");
        }
    } else {
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(j->where))};
        a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        fd = socket(AF_INET, SOCK_STREAM, 0);
        if (fd < 0 || connect(fd, (struct sockaddr *)&a, sizeof a) != 0) {
            die("connect");
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
    return fd;
}

static void bare_open(const job *j) {
    for (unsigned i = 0; i < bare_conns; i++) {
        bare_fds[i] = dial(j);
    }
}

static void bare_close(void) {
    for (unsigned i = 0; i < bare_conns; i++) {
        close(bare_fds[i]);
    }
}

static void write_all(int fd, struct iovec *iov, int num) {
    while (num > 0) {
        ssize_t n = writev(fd, iov, num);
        if (n <= 0) {
            die("writev");
        }
        while (num > 0 && (size_t)n >= iov->iov_len) {
            n -= (ssize_t)iov->iov_len;
            iov++;
            num--;
        }
        if (num > 0) {
            iov->iov_base = (uint8_t *)iov->iov_base + n;
            iov->iov_len -= (size_t)n;
        }
    }
}

static void read_exactly(int fd, void *out, size_t len) {
    uint8_t *p = out;
    while (len > 0) {
        ssize_t n = read(fd, p, len);
        if (n <= 0) {
            die("read");
        }
        p += n;
        len -= (size_t)n;
    }
}

static int bare_key(char *out, unsigned serial, unsigned i) {
    return sprintf(out, "kvf1:0123456789abcdef:{%032u%032u}", serial, i);
}

/* Head, body and tail; each piece of the body is hashed just before it goes. */
static void write_summed(int fd, const struct iovec iov[3]) {
    uint8_t *body = iov[1].iov_base, out[16];
    kvfi_xxh3_init(&sum);
    for (size_t at = 0; at < iov[1].iov_len; at += SUM_PIECE) {
        size_t piece = iov[1].iov_len - at < SUM_PIECE ? iov[1].iov_len - at : SUM_PIECE;
        bool last = at + piece == iov[1].iov_len;
        struct iovec part[3] = {{iov[0].iov_base, at == 0 ? iov[0].iov_len : 0},
                                {body + at, piece},
                                {iov[2].iov_base, last ? iov[2].iov_len : 0}};
        kvfi_xxh3_add(&sum, body + at, piece);
        write_all(fd, part, 3);
    }
    kvfi_xxh3_end(&sum, out);
}

static void bare_set(int fd, const job *j, unsigned i) {
    char key[128], head[256], reply[5];
    int key_len = bare_key(key, j->serial, i);
    int len = snprintf(head, sizeof head, "*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%zu\r\n", key_len, key, j->bytes);
    char tail[] = "\r\n$2\r\nEX\r\n$4\r\n" TTL_S "\r\n";
    struct iovec iov[3] = {{head, (size_t)len}, {buffer(i), j->bytes}, {tail, sizeof tail - 1}};
    if (summed) {
        write_summed(fd, iov);
    } else {
        write_all(fd, iov, 3);
    }
    read_exactly(fd, reply, 5);
    if (memcmp(reply, "+OK\r\n", 5) != 0) {
        die("SET was refused");
    }
}

/* The header is read alone, so that the body lands where the page begins. */
static void bare_get(int fd, const job *j, unsigned i) {
    char key[128], command[256], head[32], expected[32], tail[2];
    int key_len = bare_key(key, j->serial, i);
    int len = snprintf(command, sizeof command, "*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n", key_len, key);
    struct iovec iov = {command, (size_t)len};
    int head_len = snprintf(expected, sizeof expected, "$%zu\r\n", j->bytes);
    write_all(fd, &iov, 1);
    read_exactly(fd, head, (size_t)head_len);
    if (memcmp(head, expected, (size_t)head_len) != 0) {
        die("GET found something else");
    }
    kvfi_xxh3_init(&sum);
    for (size_t got = 0; got < j->bytes + 2;) {
        struct iovec rest[2] = {{buffer(i) + got, got < j->bytes ? j->bytes - got : 0}, {tail, 2}};
        if (got > j->bytes) {
            rest[1] = (struct iovec){tail + 1, 1};
        }
        ssize_t n = readv(fd, rest, 2);
        if (n <= 0) {
            die("readv");
        }
        size_t landed = got < j->bytes ? j->bytes - got : 0;
        landed = landed < (size_t)n ? landed : (size_t)n;
        if (summed) {
            kvfi_xxh3_add(&sum, buffer(i) + got, landed);
        }
        got += (size_t)n;
    }
    if (summed) {
        uint8_t out[16];
        kvfi_xxh3_end(&sum, out);
    }
}

typedef struct bare_share {
    const job *j;
    bool set;
    unsigned first;
} bare_share;

static void *bare_run(void *arg) {
    const bare_share *s = arg;
    for (unsigned i = s->first; i < NUM_BUFFERS; i += bare_conns) {
        (s->set ? bare_set : bare_get)(bare_fds[s->first], s->j, i);
    }
    return NULL;
}

static void bare_pass(const job *j, bool set) {
    pthread_t threads[MAX_BARE];
    bare_share shares[MAX_BARE] = {{.j = j, .set = set}};
    for (unsigned i = 0; i < bare_conns; i++) {
        shares[i] = (bare_share){.j = j, .set = set, .first = i};
        if (i > 0 && pthread_create(&threads[i], NULL, bare_run, &shares[i]) != 0) {
            die("no thread");
        }
    }
    bare_run(&shares[0]);
    for (unsigned i = 1; i < bare_conns; i++) {
        pthread_join(threads[i], NULL);
    }
}

/* ---- ours: the public calls, with tokens, checksums and deadlines ---- */

static const char *ours_params = "";
static kvf_store *store;
static kvf_space *space;
static kvf_queue *queue;
static uint32_t tokens[NUM_BUFFERS * BLOCK_TOKENS];

static void print_log(void *ctx, kvf_log_level level, const char *message) {
    (void)ctx;
    (void)level;
    fprintf(stderr, "check_wire: %s\n", message);
}

static void ours_open(const job *j) {
    char url[256];
    const char *urls[1] = {url};
    kvf_error err;
    const kvf_field fields[] = {{"engine", "bench"}, {"model", "bench"}, {"kv", "bytes"}};
    kvf_space_options options = {.struct_size = sizeof options, .block_tokens = BLOCK_TOKENS};
    bool is_unix = strcmp(j->transport, "unix") == 0;
    kvf_set_log(print_log, NULL, KVF_LOG_WARN);
    snprintf(url, sizeof url, is_unix ? "redis+unix://%s?%s" : "redis://127.0.0.1:%s/?%s", j->where, ours_params);
    if (kvf_store_open(&store, &err, urls, 1, NULL) != KVF_OK ||
        kvf_space_open(&space, &err, store, fields, 3, &options) != KVF_OK ||
        kvf_queue_open(&queue, &err, store, 4) != KVF_OK) {
        die(err.what);
    }
}

static void ours_close(void) {
    kvf_queue_close(queue);
    kvf_space_close(space);
    kvf_store_close(store);
}

static void ours_save(kvf_block *blocks) {
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_SAVE,
                       .space = space,
                       .blocks = blocks,
                       .num = NUM_BUFFERS,
                       .flags = KVF_MAY_LEND}; /* the buffers are written to once, before all saves */
    struct pollfd p = {.fd = kvf_queue_fd(queue), .events = POLLIN};
    kvf_completion done;
    uint64_t ticket;
    if (kvf_submit(queue, &ticket, &batch) != KVF_OK) {
        die("submit");
    }
    while (kvf_reap(queue, &done, 1) == 0) {
        poll(&p, 1, 1000);
    }
    for (unsigned i = 0; i < NUM_BUFFERS; i++) {
        if (blocks[i].status != KVF_OK) {
            fprintf(stderr, "check_wire: a block was not saved: %s\n", kvf_reason_name(blocks[i].why));
            exit(2);
        }
    }
}

static void ours_keys(const job *j, kvf_key keys[NUM_BUFFERS]) {
    for (unsigned i = 0; i < NUM_BUFFERS * BLOCK_TOKENS; i++) {
        tokens[i] = j->serial * 100000 + i;
    }
    kvf_chain(space, keys, NUM_BUFFERS, tokens, NUM_BUFFERS * BLOCK_TOKENS);
}

/* A save of what the store is known to have is skipped; here it must go over the wire again, over the old value, as
 * with everyone. */
static void ours_forget(void) {
    kvfi_known_clear(&store->known);
}

static void ours_pass(const job *j, bool set) {
    struct iovec iov[NUM_BUFFERS];
    kvf_block blocks[NUM_BUFFERS];
    kvf_key keys[NUM_BUFFERS];
    ours_keys(j, keys);
    for (unsigned i = 0; i < NUM_BUFFERS; i++) {
        iov[i] = (struct iovec){buffer(i), j->bytes - RECORD_EXTRA};
        blocks[i] = (kvf_block){.key = keys[i],
                                .tokens = tokens + i * BLOCK_TOKENS,
                                .num_tokens = BLOCK_TOKENS,
                                .first_token = i * BLOCK_TOKENS,
                                .iov = &iov[i],
                                .num_iov = 1};
    }
    if (set) {
        ours_save(blocks);
        return;
    }
    size_t run = kvf_load(space, blocks, NUM_BUFFERS, NULL, KVF_MS(10000));
    if (run != NUM_BUFFERS) {
        fprintf(stderr, "check_wire: a load missed: %s\n", kvf_reason_name(blocks[run].why));
        exit(2);
    }
}

/* ---- hiredis ---- */

#ifdef KVF_HAVE_HIREDIS
static redisContext *hiredis;

static void hiredis_open(const job *j) {
    bool is_unix = strcmp(j->transport, "unix") == 0;
    hiredis = is_unix ? redisConnectUnix(j->where) : redisConnect("127.0.0.1", atoi(j->where));
    if (hiredis == NULL || hiredis->err != 0) {
        die("hiredis does not connect");
    }
}

static void hiredis_close(void) {
    redisFree(hiredis);
}

static void hiredis_pass(const job *j, bool set) {
    for (unsigned i = 0; i < NUM_BUFFERS; i++) {
        char key[128];
        bare_key(key, j->serial, i);
        redisReply *reply = set ? redisCommand(hiredis, "SET %s %b EX " TTL_S, key, buffer(i), j->bytes)
                                : redisCommand(hiredis, "GET %s", key);
        if (reply == NULL || (!set && reply->type != REDIS_REPLY_STRING)) {
            die("hiredis failed");
        }
        if (!set) {
            memcpy(buffer(i), reply->str, j->bytes);
        }
        freeReplyObject(reply);
    }
}
#endif

static const contender contenders[] = {
    {"ours", ours_open, ours_close, ours_pass, ours_forget},
    {"bare", bare_open, bare_close, bare_pass, NULL},
#ifdef KVF_HAVE_HIREDIS
    {"hiredis", hiredis_open, hiredis_close, hiredis_pass, NULL},
#endif
};

/* ---- the worker: reads jobs, answers "warm", waits for "go", answers "<seconds> <cpu seconds>" ---- */

static void run_job(const contender *c, const job *j) {
    bool set = strcmp(j->op, "set") == 0;
    uint8_t before[16], after[16];
    size_t payload = j->bytes - RECORD_EXTRA; /* what all contenders move, at least */
    if (memory == NULL || stride < j->bytes || stride >= j->bytes + 4096) {
        make_buffers(j->bytes);
    }
    c->open(j);
    c->pass(j, true);
    if (!set) {
        digest(before, payload);
        memset(memory, 0, stride * NUM_BUFFERS);
        c->pass(j, false);
        digest(after, payload);
        if (memcmp(before, after, 16) != 0) {
            die("the bytes that came are not those that went");
        }
    }
    /* Warm; the parent looks at the server's clock and says go. */
    char go[8];
    printf("warm\n");
    fflush(stdout);
    if (scanf("%7s", go) != 1) {
        die("the parent is gone");
    }
    double cpu = 0, seconds = 0;
    for (unsigned i = 0; i < j->passes; i++) {
        if (set && c->forget != NULL) {
            c->forget();
        }
        double cpu_from = own_cpu_s(), from = now_s();
        c->pass(j, set);
        seconds += now_s() - from;
        cpu += own_cpu_s() - cpu_from;
    }
    printf("%.6f %.6f\n", seconds, cpu);
    fflush(stdout);
    c->close();
}

static int work(const char *name) {
    const contender *c = NULL;
    job j;
    if (strncmp(name, "bare", 4) == 0) {
        bare_conns = (unsigned)atoi(name + 4);
        name = "bare";
    }
    if (strcmp(name, "summed") == 0) {
        summed = true;
        name = "bare";
    }
    if (strcmp(name, "variant") == 0) {
        ours_params = getenv("WIRE_VARIANT") != NULL ? getenv("WIRE_VARIANT") : "";
        name = "ours";
    }
    for (size_t i = 0; i < sizeof contenders / sizeof *contenders; i++) {
        if (strcmp(contenders[i].name, name) == 0) {
            c = &contenders[i];
        }
    }
    if (c == NULL) {
        die("no such contender");
    }
    while (scanf("%7s %7s %191s %zu %u %u", j.op, j.transport, j.where, &j.bytes, &j.passes, &j.serial) == 6) {
        run_job(c, &j);
    }
    return 0;
}

/* ---- the parent ---- */

typedef struct worker {
    const char *name; /* of the contender */
    bool tuned;       /* its malloc */
    bool peer;
    size_t bytes; /* to move in one measurement */
    FILE *to, *from;
    pid_t pid;
} worker;

enum { OURS, VARIANT, BARE1, BARE2, SUMMED, HIREDIS, HIREDIS_TUNED, ARTICLE, ARTICLE_TUNED, NUM_WORKERS };
static worker workers[NUM_WORKERS] = {
    {.name = "ours", .bytes = 384u << 20},
    {.name = "variant", .bytes = 384u << 20},
    {.name = "bare1", .bytes = 384u << 20},
    {.name = "bare2", .bytes = 384u << 20},
    {.name = "summed", .bytes = 384u << 20},
    {.name = "hiredis", .peer = true, .bytes = 64u << 20},
    {.name = "hiredis", .tuned = true, .peer = true, .bytes = 64u << 20},
    {.name = "article", .peer = true, .bytes = 32u << 20},
    {.name = "article", .tuned = true, .peer = true, .bytes = 32u << 20},
};

static const char *label(const worker *w) {
    static char text[32];
    snprintf(text, sizeof text, "%s%s", w->name, w->tuned ? "+malloc" : "");
    return text;
}

static void python_path(char out[512]) {
    const char *python = getenv("KVF_PYTHON"), *cache = getenv("KVFERRY_CACHE"), *home = getenv("HOME");
    if (python != NULL && python[0] != '\0') {
        snprintf(out, 512, "%s", python);
    } else if (cache != NULL && cache[0] != '\0') {
        snprintf(out, 512, "%s/venv/bin/python", cache);
    } else {
        snprintf(out, 512, "%s/.cache/kvferry/venv/bin/python", home != NULL ? home : "");
    }
}

/* Beside this file, wherever the source tree is now. */
static void peers_path(char out[512]) {
    const char *source = getenv("KVF_SOURCE");
    if (source != NULL && source[0] != '\0') {
        snprintf(out, 512, "%s/checks/wire_peers.py", source);
    } else {
        const char *slash = strrchr(__FILE__, '/');
        snprintf(out, 512, "%.*s/wire_peers.py", slash != NULL ? (int)(slash - __FILE__) : 1,
                 slash != NULL ? __FILE__ : ".");
    }
}

static void exec_worker(const worker *w, const char *self) {
    if (w->tuned) {
        setenv("MALLOC_MMAP_THRESHOLD_", "1073741824", 1);
        setenv("MALLOC_TRIM_THRESHOLD_", "4294967296", 1);
        setenv("MALLOC_TOP_PAD_", "67108864", 1);
    }
    if (strcmp(w->name, "article") == 0) {
        char python[512], script[512];
        python_path(python);
        peers_path(script);
        execl(python, python, script, (char *)NULL);
    } else {
        execl(self, self, "--worker", w->name, (char *)NULL);
    }
    perror("exec");
    _exit(127);
}

static void start_worker(worker *w, const char *self) {
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) {
        die("pipe");
    }
    w->pid = fork();
    if (w->pid == 0) {
        dup2(in[0], 0);
        dup2(out[1], 1);
        exec_worker(w, self);
    }
    close(in[0]);
    close(out[1]);
    w->to = fdopen(in[1], "w");
    w->from = fdopen(out[0], "r");
}

static void stop_worker(worker *w) {
    if (w->to != NULL) {
        fclose(w->to);
        fclose(w->from);
        waitpid(w->pid, NULL, 0);
    }
}

typedef struct cell {
    const char *transport, *op, *size;
    size_t bytes;
} cell;

typedef struct measure {
    double gbs, cpu_client, cpu_server; /* GB/s, CPU seconds a GB */
} measure;

/* CPU seconds of the server: of all its threads, in nanoseconds where the kernel tells. */
static double server_cpu_s(const kvft_server *server) {
    char path[64];
    unsigned long long ns = 0;
    snprintf(path, sizeof path, "/proc/%d/schedstat", (int)server->pid);
    FILE *f = fopen(path, "r");
    if (f == NULL || fscanf(f, "%llu", &ns) != 1) {
        ns = 0;
    }
    if (f != NULL) {
        fclose(f);
    }
    return (double)ns * 1e-9;
}

static measure run_cell(kvft_server *server, worker *w, const cell *c, unsigned *serial) {
    measure m = {0};
    double seconds = 0, cpu = 0;
    size_t all = c->bytes * NUM_BUFFERS;
    unsigned passes = w->bytes > all ? (unsigned)((w->bytes + all / 2) / all) : 1;
    char port[16];
    snprintf(port, sizeof port, "%d", server->port);
    if (strcmp(kvft_server_say(server, "FLUSHALL SYNC"), "+OK") != 0) {
        die("FLUSHALL failed");
    }
    fprintf(w->to, "%s %s %s %zu %u %u\n", c->op, c->transport,
            strcmp(c->transport, "unix") == 0 ? server->socket : port, c->bytes, passes, *serial);
    fflush(w->to);
    (*serial)++;
    char warm[8];
    if (fscanf(w->from, "%7s", warm) != 1) {
        die(label(w));
    }
    double before = server_cpu_s(server);
    fprintf(w->to, "go\n");
    fflush(w->to);
    if (fscanf(w->from, "%lf %lf", &seconds, &cpu) != 2) {
        die(label(w));
    }
    double gb = (double)all * passes * 1e-9;
    m.gbs = gb / seconds;
    m.cpu_client = cpu / gb;
    m.cpu_server = (server_cpu_s(server) - before) / gb;
    return m;
}

/* ---- the options, the table, the verdict ---- */

typedef struct options {
    bool check;
    unsigned rounds;
    const char *only[16], *who[16];
    unsigned num_only, num_who;
} options;

static const cell cells[] = {
    {"unix", "get", "256K", 262144 - 512}, {"unix", "get", "1M", 1048576 - 512}, {"unix", "get", "4M", 4194304 - 4096},
    {"unix", "set", "256K", 262144 - 512}, {"unix", "set", "1M", 1048576 - 512}, {"unix", "set", "4M", 4194304 - 4096},
    {"tcp", "get", "256K", 262144 - 512},  {"tcp", "get", "1M", 1048576 - 512},  {"tcp", "get", "4M", 4194304 - 4096},
    {"tcp", "set", "256K", 262144 - 512},  {"tcp", "set", "1M", 1048576 - 512},  {"tcp", "set", "4M", 4194304 - 4096},
};
#define NUM_CELLS (sizeof cells / sizeof *cells)

static measure results[NUM_CELLS][NUM_WORKERS][MAX_ROUNDS];
static unsigned num_rounds[NUM_CELLS][NUM_WORKERS];

static bool is_chosen(const char *const *list, unsigned num, const char *name) {
    for (unsigned i = 0; i < num; i++) {
        if (strcmp(list[i], name) == 0) {
            return true;
        }
    }
    return num == 0;
}

static bool cell_chosen(const options *o, const cell *c) {
    char name[32];
    snprintf(name, sizeof name, "%s %s %s", c->transport, c->op, c->size);
    for (unsigned i = 0; i < o->num_only; i++) {
        if (strstr(name, o->only[i]) != NULL) {
            return true;
        }
    }
    return o->num_only == 0;
}

static double median_of(size_t at, int w, size_t offset) {
    double values[MAX_ROUNDS];
    for (unsigned r = 0; r < num_rounds[at][w]; r++) {
        memcpy(&values[r], (const char *)&results[at][w][r] + offset, sizeof values[r]);
    }
    return kvft_median_of(values, num_rounds[at][w]).value;
}

/* Ours over another, round by round. */
static kvft_median ratio_to(size_t at, int w) {
    double values[MAX_ROUNDS];
    for (unsigned r = 0; r < num_rounds[at][w]; r++) {
        values[r] = results[at][OURS][r].gbs / results[at][w][r].gbs;
    }
    return kvft_median_of(values, num_rounds[at][w]);
}

static bool has(int w) {
    return workers[w].to != NULL;
}

/* The ceiling is the better of the bare clients, by the medians, of those with one connection or as many as ours: it
 * loads with two over TCP, unless values are large. */
static int ceiling_of(size_t at) {
    const cell *c = &cells[at];
    bool two = strcmp(c->transport, "tcp") == 0 && strcmp(c->op, "get") == 0 && c->bytes < (2u << 20);
    if (!has(BARE1) || !has(BARE2) || !two) {
        return has(BARE1) ? BARE1 : BARE2;
    }
    return ratio_to(at, BARE1).value < ratio_to(at, BARE2).value ? BARE1 : BARE2;
}

static void print_cell(size_t at) {
    const cell *c = &cells[at];
    for (int w = 0; w < NUM_WORKERS; w++) {
        if (!has(w)) {
            continue;
        }
        printf("%-5s %-4s %-5s %-16s %6.2f GB/s   cpu-s/GB client %.3f server %.3f", c->transport, c->op, c->size,
               label(&workers[w]), median_of(at, w, offsetof(measure, gbs)),
               median_of(at, w, offsetof(measure, cpu_client)), median_of(at, w, offsetof(measure, cpu_server)));
        if (w != OURS && has(OURS)) {
            kvft_median m = ratio_to(at, w);
            printf("   ours/this %.2f (%.2f to %.2f, %u rounds)", m.value, m.low, m.high, num_rounds[at][w]);
        }
        printf("\n");
    }
    fflush(stdout);
}

/* The bound holds for this cell. */
static bool is_bounded(size_t at) {
    return cells[at].bytes > 1000000 && has(OURS) && (has(BARE1) || has(BARE2));
}

static bool is_undecided(size_t at) {
    kvft_median m = ratio_to(at, ceiling_of(at));
    return m.low < BOUND && m.high >= BOUND;
}

/* The two figures: the worst ratio to the ceiling from 1 MiB on, and the worst to a peer anywhere. */
static int verdict(const options *o) {
    kvft_median worst = {.value = 1e9};
    double peers = 1e9;
    unsigned below = 0, undecided = 0;
    for (size_t at = 0; at < NUM_CELLS; at++) {
        if (!cell_chosen(o, &cells[at])) {
            continue;
        }
        if (is_bounded(at)) {
            kvft_median m = ratio_to(at, ceiling_of(at));
            worst = m.value < worst.value ? m : worst;
            below += m.high < BOUND;
            undecided += is_undecided(at);
        }
        for (int w = 0; w < NUM_WORKERS; w++) {
            if (workers[w].peer && has(w)) {
                double r = ratio_to(at, w).value;
                peers = r < peers ? r : peers;
            }
        }
    }
    bool ok = below == 0 && peers > 1.0;
    printf(
        "%s: of the bare ceiling from 1 MiB on the worst cell has %.2f (95 %% interval %.2f to %.2f; needed: %.2f); cells "
        "below: %u, undecided: %u; at least %.2f times every peer (needed: more than 1)\n",
        ok ? "ok" : "NOT MET", worst.value, worst.low, worst.high, BOUND, below, undecided, peers);
    return ok ? 0 : 1;
}

static void read_options(options *o, int argc, char **argv) {
    *o = (options){.rounds = 15};
    for (int i = 1; i < argc; i++) {
        bool more = i + 1 < argc;
        if (strcmp(argv[i], "--check") == 0) {
            o->check = true;
        } else if (strcmp(argv[i], "--rounds") == 0 && more) {
            o->rounds = (unsigned)atoi(argv[++i]);
        } else if (strcmp(argv[i], "--only") == 0 && more && o->num_only < 16) {
            o->only[o->num_only++] = argv[++i];
        } else if (strcmp(argv[i], "--who") == 0 && more && o->num_who < 16) {
            o->who[o->num_who++] = argv[++i];
        } else {
            die("usage: check_wire [--check] [--rounds N] [--only TEXT]... [--who NAME]...");
        }
    }
    if (o->rounds < 1 || o->rounds > MAX_ROUNDS) {
        die("1 to 99 rounds");
    }
}

static void start_workers(const options *o, const char *self) {
    char python[512];
    python_path(python);
    for (int w = 0; w < NUM_WORKERS; w++) {
        if (!is_chosen(o->who, o->num_who, label(&workers[w])) || (w == VARIANT && o->num_who == 0)) {
            continue;
        }
#ifndef KVF_HAVE_HIREDIS
        if (strcmp(workers[w].name, "hiredis") == 0) {
            die("built without hiredis (libhiredis-dev): run make setup");
        }
#endif
        if (strcmp(workers[w].name, "article") == 0 && access(python, X_OK) != 0) {
            die("no Python with redis and numpy: run make setup, or set KVF_PYTHON");
        }
        start_worker(&workers[w], self);
    }
}

static void run_round(kvft_server *server, size_t at, unsigned r, bool without_peers, unsigned *serial) {
    for (int k = 0; k < NUM_WORKERS; k++) {
        int w = (k + (int)r) % NUM_WORKERS; /* everyone is first once */
        if (has(w) && (!without_peers || w == OURS || w == BARE1 || w == BARE2)) {
            results[at][w][r] = run_cell(server, &workers[w], &cells[at], serial);
            num_rounds[at][w] = r + 1;
        }
    }
}

int main(int argc, char **argv) {
    options o;
    if (argc == 3 && strcmp(argv[1], "--worker") == 0) {
        return work(argv[2]);
    }
    read_options(&o, argc, argv);
    const char *const args[] = {"--maxmemory", "4gb", NULL};
    kvft_server *server = kvft_server_start(args);
    if (server == NULL) {
        die("no redis-server: run make setup");
    }
    signal(SIGPIPE, SIG_IGN);
    start_workers(&o, "/proc/self/exe");
    unsigned serial = 1;
    printf("one redis-server, %u rounds, %u buffers; medians; 1 GB = 1e9 bytes\n", o.rounds, NUM_BUFFERS);
    for (size_t at = 0; at < NUM_CELLS; at++) {
        if (!cell_chosen(&o, &cells[at])) {
            continue;
        }
        for (unsigned r = 0; r < o.rounds; r++) {
            run_round(server, at, r, false, &serial);
        }
        for (unsigned r = o.rounds; r < MOST_ROUNDS && o.check && is_bounded(at) && is_undecided(at); r++) {
            run_round(server, at, r, true, &serial);
        }
        print_cell(at);
    }
    for (int w = 0; w < NUM_WORKERS; w++) {
        stop_worker(&workers[w]);
    }
    kvft_server_stop(server);
    return has(OURS) || o.check ? verdict(&o) : 0;
}
