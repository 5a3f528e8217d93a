/* SPDX-License-Identifier: Apache-2.0
 *
 * check-chaos: a single server, a master with sentinels, and a Cluster, all real, suffer fault after fault
 * (support/nemesis.h), while loads, saves, lookups, batches of a queue and sessions run in several threads. One
 * invariant: a load is byte-exact or a miss; every call returns within its budget and 100 ms; nobody writes to the
 * caller's memory afterwards; the store works again when the fault is over; and when it has been closed, no memory,
 * file or thread of it is left.
 *
 *   check_chaos [SEEDS]     200 seeds; each is one life of a store, and decides its faults. SEED=n runs that one alone.
 *
 * On a busy machine the test itself may not get a processor. The kernel knows how long its threads were ready to run
 * and had to wait for one (/proc/self/task/N/schedstat), and a thread that only sleeps shows how late it wakes up. A
 * call may be late by the longer of the two. The figures with and without that allowance are printed, and how many
 * calls needed it.
 */
#include <dirent.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "support/faults.h"
#include "support/kit.h"
#include "support/nemesis.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
/* The code itself is many times slower: copying and checking a prompt takes longer than the bound. */
#define LATE_MS 1000.0
#else
#define LATE_MS 100.0
#endif
#define HANG_MS       20000.0
#define RECOVERY_MS   10000.0
#define DRAIN_MS      1000u
#define DEFAULT_SEEDS 200u

static uint64_t seed; /* of the current life */

static void nap_us(long us) {
    struct timespec t = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};
    nanosleep(&t, NULL);
}

static void quiet(void *ctx, kvf_log_level level, const char *text) {
    (void)ctx;
    (void)level;
    (void)text;
}

/* ---- what went wrong ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned num_failures;
static char last_fault[64] = "none yet";

static void failed(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void failed(const char *format, ...) {
    va_list args;
    va_start(args, format);
    pthread_mutex_lock(&lock);
    num_failures++;
    printf("FAILED, seed %llu (SEED=%llu runs it alone), last fault over: %s: ", (unsigned long long)seed,
           (unsigned long long)seed, last_fault);
    vprintf(format, args);
    printf("\n");
    fflush(stdout);
    pthread_mutex_unlock(&lock);
    va_end(args);
}

/* ---- the sleeper: when a thread that wants nothing but to wake up could not ---- */

enum { NAPS = 8192, SAMPLES = 256, TASKS = 128 };
static struct sample {
    double at;
    int num, tids[TASKS];
    double waited_ms[TASKS]; /* for a processor, so far */
} samples[SAMPLES];
static unsigned num_samples;
static struct nap { double from, to; /* it was to wake up, and did */ } naps[NAPS];
static unsigned num_naps;
static double longest_nap;
static atomic_bool sleeper_stops;

static pthread_mutex_t files_lock =
    PTHREAD_MUTEX_INITIALIZER; /* who counts files does so while the sampler has none open */

static void take_sample(struct sample *out) {
    pthread_mutex_lock(&files_lock);
    DIR *dir = opendir("/proc/self/task");
    out->at = kvft_now_ms();
    out->num = 0;
    for (struct dirent *e = dir != NULL ? readdir(dir) : NULL; e != NULL && out->num < TASKS; e = readdir(dir)) {
        char path[64];
        unsigned long long ran = 0, waited = 0;
        snprintf(path, sizeof path, "/proc/self/task/%.20s/schedstat", e->d_name);
        FILE *in = e->d_name[0] != '.' ? fopen(path, "r") : NULL;
        if (in != NULL && fscanf(in, "%llu %llu", &ran, &waited) == 2) {
            out->tids[out->num] = atoi(e->d_name);
            out->waited_ms[out->num++] = (double)waited / 1e6;
        }
        if (in != NULL) {
            fclose(in);
        }
    }
    if (dir != NULL) {
        closedir(dir);
    }
    pthread_mutex_unlock(&files_lock);
}

/* The longest that one thread of ours waited for a processor since the last sample before then. */
static double waited_since(double from) {
    struct sample now;
    double longest = 0;
    take_sample(&now);
    pthread_mutex_lock(&lock);
    const struct sample *then = NULL;
    for (unsigned i = 0; i < SAMPLES && i < num_samples; i++) {
        then = samples[i].at <= from && (then == NULL || samples[i].at > then->at) ? &samples[i] : then;
    }
    for (int i = 0; then != NULL && i < now.num; i++) {
        for (int j = 0; j < then->num; j++) {
            double waited = now.tids[i] == then->tids[j] ? now.waited_ms[i] - then->waited_ms[j] : 0;
            longest = waited > longest ? waited : longest;
        }
    }
    pthread_mutex_unlock(&lock);
    return longest;
}

static void *sleep_on(void *arg) {
    static struct sample sample;
    (void)arg;
    for (unsigned turn = 0; !atomic_load(&sleeper_stops); turn++) {
        if (turn % 10 == 0) {
            take_sample(&sample);
            pthread_mutex_lock(&lock);
            samples[num_samples++ % SAMPLES] = sample;
            pthread_mutex_unlock(&lock);
        }
        double due = kvft_now_ms() + 2;
        nap_us(2000);
        double woke = kvft_now_ms();
        if (woke - due > 2) {
            pthread_mutex_lock(&lock);
            naps[num_naps++ % NAPS] = (struct nap){due, woke};
            longest_nap = woke - due > longest_nap ? woke - due : longest_nap;
            pthread_mutex_unlock(&lock);
        }
    }
    return NULL;
}

/* How much of that time the sleeper was late. */
static double overslept(double from, double to) {
    double sum = 0;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < NAPS && i < num_naps; i++) {
        double a = naps[i].from > from ? naps[i].from : from, b = naps[i].to < to ? naps[i].to : to;
        sum += b > a ? b - a : 0;
    }
    pthread_mutex_unlock(&lock);
    return sum;
}

/* ---- calls and their time ---- */

static struct totals {
    uint64_t calls, blocks, hits, sessions, batches, excused;
    double latest, latest_net;
} totals;

/* What each thread is at, for the watchdog. */
enum { WORKERS = 5 };
static struct call {
    _Atomic(const char *) what;
    _Atomic long long due_ms;
} calls[WORKERS + 1];

static double begin_call(int worker, const char *what, double budget_ms) {
    atomic_store(&calls[worker].due_ms, (long long)(kvft_now_ms() + budget_ms));
    atomic_store(&calls[worker].what, what);
    return kvft_now_ms();
}

static void end_call(int worker, double begin, double budget_ms) {
    double end = kvft_now_ms(), late = end - begin - budget_ms;
    const char *what = atomic_exchange(&calls[worker].what, NULL);
    double net = late;
    if (late > LATE_MS) {
        double slept = overslept(begin, end), waited = waited_since(begin);
        net = late - (slept > waited ? slept : waited);
    }
    pthread_mutex_lock(&lock);
    totals.calls++;
    totals.excused += late > LATE_MS && net <= LATE_MS;
    totals.latest = late > totals.latest ? late : totals.latest;
    totals.latest_net = net > totals.latest_net ? net : totals.latest_net;
    pthread_mutex_unlock(&lock);
    if (net > LATE_MS) {
        failed(
            "%s returned %.0f ms behind its budget of %.0f ms (%.0f ms of that our threads had to wait for a processor)",
            what, late, budget_ms, late - net);
    }
}

static void *watch(void *arg) {
    atomic_bool *stop = arg;
    while (!atomic_load(stop)) {
        for (int i = 0; i <= WORKERS; i++) {
            const char *what = atomic_load(&calls[i].what);
            if (what != NULL && kvft_now_ms() - (double)atomic_load(&calls[i].due_ms) > HANG_MS) {
                failed("%s hangs", what);
                abort();
            }
        }
        nap_us(100000);
    }
    return NULL;
}

/* ---- one life of a store ---- */

enum { PROMPTS = 4 };
static const struct {
    size_t blocks, payload;
} SHAPES[PROMPTS] = {
    {16, 3000}, {10, 40000}, {3, 300000}, {24, 700}}; /* with part=64K the third has several keys to a block */

typedef struct life {
    kvf_store *store;
    kvf_space *space;
    atomic_bool stop;
} life;

typedef struct worker {
    life *life;
    int number;
    uint64_t random;
    kvft_prompt *prompts[PROMPTS];
    pthread_t thread;
    void (*turn)(struct worker *);
} worker;

static int draw(worker *w, int below) {
    return (int)(kvft_random(&w->random) % (uint64_t)below);
}

static void check_bytes(const kvft_prompt *p, int which, size_t run, const char *what) {
    size_t wrong = kvft_prompt_wrong(p, (uint64_t)which, run);
    if (wrong > 0) {
        failed("%s: %zu of %zu blocks hold wrong bytes", what, wrong, run);
    }
    pthread_mutex_lock(&lock);
    totals.blocks += p->num_blocks;
    totals.hits += run;
    pthread_mutex_unlock(&lock);
}

/* The call is over: the memory is ours again, and nobody else's. */
static void check_untouched(worker *w, kvft_prompt *p, const char *what) {
    size_t bytes = p->num_blocks * p->payload_bytes;
    memset(p->memory, 0x5a, bytes);
    nap_us(draw(w, 3000));
    for (size_t i = 0; i < bytes; i++) {
        if (p->memory[i] != 0x5a) {
            failed("%s: somebody wrote to the caller's memory after it had returned", what);
            return;
        }
    }
}

static void turn_load(worker *w) {
    int which = draw(w, PROMPTS);
    kvft_prompt *p = w->prompts[which];
    uint32_t budget = 1u << draw(w, 10);
    kvft_prompt_poison(p);
    double begin = begin_call(w->number, "kvf_load", budget);
    size_t run = kvf_load(w->life->space, p->blocks, p->num_blocks, NULL, KVF_MS(budget));
    end_call(w->number, begin, budget);
    check_bytes(p, which, run, "kvf_load");
    check_untouched(w, p, "kvf_load");
}

static void turn_save(worker *w) {
    int which = draw(w, PROMPTS);
    kvft_prompt *p = w->prompts[which];
    kvft_prompt_fill(p, (uint64_t)which);
    double begin = begin_call(w->number, "kvf_save", 0);
    (void)kvf_save(w->life->space, p->blocks, p->num_blocks, NULL);
    end_call(w->number, begin, 0);
    if (draw(w, 4) == 0) {
        begin = begin_call(w->number, "kvf_store_flush", 50);
        kvf_status status = kvf_store_flush(w->life->store, NULL, KVF_MS(50));
        (void)status;
        end_call(w->number, begin, 50);
    }
    nap_us(draw(w, 20000));
}

static void turn_match(worker *w) {
    kvft_prompt *p = w->prompts[draw(w, PROMPTS)];
    kvf_found found[32];
    size_t run = 0;
    uint32_t budget = 1u << draw(w, 9);
    double begin = begin_call(w->number, "kvf_match", budget);
    kvf_status status = kvf_match(w->life->space, &run, found, p->keys, p->num_blocks, KVF_MS(budget));
    end_call(w->number, begin, budget);
    for (size_t i = 0; status == KVF_OK && i < run; i++) {
        if (found[i].payload_bytes != p->payload_bytes) {
            failed("kvf_match found a block of %llu bytes instead of %zu", (unsigned long long)found[i].payload_bytes,
                   p->payload_bytes);
        }
    }
    nap_us(draw(w, 5000));
}

/* Two versions of a session; what loads is one of them, K and V of the same. */
static void turn_session(worker *w) {
    enum { BYTES = 60000 };
    static uint8_t k[2][BYTES], v[2][BYTES]; /* one thread only */
    kvf_error err = {0};
    int version = draw(w, 2);
    uint32_t budget = 4u << draw(w, 8);
    kvft_bytes(k[0], BYTES, 10);
    kvft_bytes(k[1], BYTES, 11);
    kvft_bytes(v[0], BYTES, 20);
    kvft_bytes(v[1], BYTES, 21);
    kvf_tensor kt = {.data = k[version], .len = BYTES}, vt = {.data = v[version], .len = BYTES};
    kvf_session_options options = {.struct_size = sizeof options, .budget_us = KVF_MS(budget)};
    double begin = begin_call(w->number, "kvf_session_save", budget);
    kvf_status status = kvf_session_save(w->life->store, &err, "chaos", &kt, &vt, &options);
    end_call(w->number, begin, budget);
    kvf_session *session = NULL;
    begin = begin_call(w->number, "kvf_session_load", budget);
    status = kvf_session_load(w->life->store, &session, &err, "chaos", KVF_MS(budget));
    end_call(w->number, begin, budget);
    if (status == KVF_OK) {
        bool same = false;
        for (int i = 0; i < 2; i++) {
            same = same || (session->k.len == BYTES && session->v.len == BYTES &&
                            memcmp(session->k.data, k[i], BYTES) == 0 && memcmp(session->v.data, v[i], BYTES) == 0);
        }
        if (!same) {
            failed("a session holds what was never saved");
        }
        kvf_session_free(session);
        pthread_mutex_lock(&lock);
        totals.sessions++;
        pthread_mutex_unlock(&lock);
    }
}

static void turn_ask(worker *w) {
    if (draw(w, 2) == 0) {
        turn_match(w);
    } else {
        turn_session(w);
    }
}

/* A batch through a queue, sometimes cancelled. */
static void turn_queue(worker *w) {
    kvf_queue *queue = NULL;
    kvf_error err = {0};
    int which = draw(w, PROMPTS);
    kvft_prompt *p = w->prompts[which];
    bool save = draw(w, 3) == 0;
    uint32_t budget = 8u << draw(w, 6);
    if (kvf_queue_open(&queue, &err, w->life->store, 1) != KVF_OK) {
        failed("kvf_queue_open: %s", err.what);
        return;
    }
    kvft_prompt_fill(p, (uint64_t)which);
    if (!save) {
        kvft_prompt_poison(p);
    }
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = save ? KVF_OP_SAVE : KVF_OP_LOAD,
                       .space = w->life->space,
                       .blocks = p->blocks,
                       .num = p->num_blocks,
                       .budget_us = KVF_MS(budget)};
    uint64_t ticket = 0;
    const char *what = save ? "a batch of saves" : "a batch of loads";
    double begin = begin_call(w->number, what, budget);
    if (kvf_submit(queue, &ticket, &batch) == KVF_OK) {
        kvf_completion done = {0};
        struct pollfd fd = {.fd = kvf_queue_fd(queue), .events = POLLIN};
        if (draw(w, 4) == 0) {
            nap_us(draw(w, 3000));
            kvf_cancel(queue, ticket);
        }
        while (kvf_reap(queue, &done, 1) == 0) {
            poll(&fd, 1, 50);
        }
        end_call(w->number, begin, budget);
        if (!save) {
            check_bytes(p, which, done.num_ok, what);
            check_untouched(w, p, what);
        }
        pthread_mutex_lock(&lock);
        totals.batches++;
        pthread_mutex_unlock(&lock);
    } else {
        end_call(w->number, begin, budget);
    }
    kvf_queue_close(queue);
}

static void *work(void *arg) {
    worker *w = arg;
    while (!atomic_load(&w->life->stop)) {
        w->turn(w);
        nap_us(draw(w, 2000)); /* two processors are for the servers, too */
    }
    return NULL;
}

static void start_workers(worker *workers, life *l) {
    static void (*const turns[WORKERS])(worker *) = {turn_load, turn_load, turn_save, turn_ask, turn_queue};
    for (int i = 0; i < WORKERS; i++) {
        workers[i] = (worker){.life = l, .number = i, .random = seed * 977 + (uint64_t)i, .turn = turns[i]};
        for (int j = 0; j < PROMPTS; j++) {
            workers[i].prompts[j] = kvft_prompt_new(l->space, (uint64_t)j, SHAPES[j].blocks, SHAPES[j].payload);
        }
        if (pthread_create(&workers[i].thread, NULL, work, &workers[i]) != 0) {
            abort();
        }
    }
}

static void join_workers(worker *workers) {
    for (int i = 0; i < WORKERS; i++) {
        pthread_join(workers[i].thread, NULL);
        for (int j = 0; j < PROMPTS; j++) {
            kvft_prompt_free(workers[i].prompts[j]);
        }
    }
}

/* The faults are over: whatever is saved now loads. */
static void check_recovery(life *l) {
    int which = 1;
    kvft_prompt *p = kvft_prompt_new(l->space, (uint64_t)which, SHAPES[which].blocks, SHAPES[which].payload);
    double begin = kvft_now_ms();
    size_t run = 0;
    while (run < p->num_blocks && kvft_now_ms() - begin < RECOVERY_MS) {
        kvft_prompt_fill(p, (uint64_t)which);
        (void)kvf_save(l->space, p->blocks, p->num_blocks, NULL);
        kvf_status status = kvf_store_flush(l->store, NULL, KVF_MS(500));
        (void)status;
        kvft_prompt_poison(p);
        run = kvf_load(l->space, p->blocks, p->num_blocks, NULL, KVF_MS(1000));
        check_bytes(p, which, run, "a load after the faults");
    }
    if (run < p->num_blocks) {
        failed("%.0f ms after the faults a load ends at block %zu of %zu: %s", kvft_now_ms() - begin, run,
               p->num_blocks, kvf_reason_name(p->blocks[run].why));
    }
    kvft_prompt_free(p);
}

/* ---- what is left behind ---- */

static unsigned count_entries(const char *path) {
    DIR *dir = opendir(path);
    unsigned num = 0;
    while (dir != NULL && readdir(dir) != NULL) {
        num++;
    }
    if (dir != NULL) {
        closedir(dir);
    }
    return num;
}

typedef struct footprint {
    unsigned fds, threads; /* without the sockets of the proxies */
    uint64_t blocks;
} footprint;

static unsigned count_links(kvft_world *world) {
    unsigned open = 0;
    for (int i = 0; i < world->num_proxies; i++) {
        open += kvft_proxy_stats_get(world->proxies[i]).open;
    }
    return open;
}

static footprint take_footprint(kvft_world *world) {
    unsigned open = count_links(world), then = open + 1;
    footprint now = {0};
    for (int tries = 0; open != then && tries < 1000; tries++) { /* a proxy may be about to open or close some */
        then = open;
        pthread_mutex_lock(&files_lock);
        now = (footprint){count_entries("/proc/self/fd") - 2 * open, count_entries("/proc/self/task"),
                          kvft_faults_live_allocs()};
        pthread_mutex_unlock(&files_lock);
        open = count_links(world);
    }
    return now;
}

/* A thread that has been joined may still be listed for a moment, and a proxy may be about to open or close
 * something. */
static void check_footprint(kvft_world *world, const footprint *before) {
    footprint after = take_footprint(world);
    for (int tries = 0; tries < 200 && (after.threads != before->threads || after.fds != before->fds); tries++) {
        nap_us(10000);
        after = take_footprint(world);
    }
    if (after.fds != before->fds || after.threads != before->threads || after.blocks != before->blocks) {
        failed("left behind: %d files, %d threads, %lld blocks of memory", (int)after.fds - (int)before->fds,
               (int)after.threads - (int)before->threads, (long long)(after.blocks - before->blocks));
    }
}

/* ---- the run ---- */

static unsigned counts[KVFT_MAX_NEMESES];

static void note_fault(int which) {
    counts[which]++;
    pthread_mutex_lock(&lock);
    snprintf(last_fault, sizeof last_fault, "%s", kvft_nemesis_name(which));
    pthread_mutex_unlock(&lock);
}

static void live(kvft_world *world) {
    uint64_t state = seed, random = kvft_random(&state);
    worker workers[WORKERS];
    kvf_error err = {0};
    kvf_options options = {.struct_size = sizeof options, .drain_us = KVF_MS(DRAIN_MS)};
    char url[320];
    const char *urls[1] = {url};
    life l = {.stop = false};
    unsigned conns = (unsigned)(kvft_random(&random) % 4);
    snprintf(url, sizeof url, "%s?part=64K%s%c", world->url, conns > 0 ? "&conns=" : "",
             conns > 0 ? (char)('0' + conns) : '\0');
    footprint before = take_footprint(world);
    if (kvf_store_open(&l.store, &err, urls, 1, &options) != KVF_OK) {
        failed("kvf_store_open: %s", err.what);
        return;
    }
    l.space = kvft_space(l.store, "chaos", 16);
    start_workers(workers, &l);
    nap_us(100000);
    int num_faults = 1 + (int)(kvft_random(&random) % 3);
    for (int i = 0; i < num_faults; i++) {
        int wish = i == 0 ? (int)(seed / KVFT_NUM_WORLDS) : -1; /* each kind has its turn */
        note_fault(kvft_world_torment(world, wish, &random));
        kvft_world_heal(world);
        nap_us(20000);
    }
    atomic_store(&l.stop, true);
    join_workers(workers);
    check_recovery(&l);
    kvf_space_close(l.space);
    double begin = begin_call(WORKERS, "kvf_store_close", DRAIN_MS + 250);
    kvf_store_close(l.store);
    end_call(WORKERS, begin,
             DRAIN_MS + 250); /* and stall_ms: what is under way is cut short, but not in the middle of a wait */
    check_footprint(world, &before);
}

static bool run_world(kvft_world_kind kind, uint64_t from, uint64_t to, unsigned *done) {
    static const char *const names[] = {"single", "Sentinel", "Cluster"};
    kvft_world *world = kvft_world_start(kind);
    double begin = kvft_now_ms();
    unsigned num = 0;
    if (world == NULL) {
        return false;
    }
    for (seed = from; seed < to; seed++) {
        if (seed % KVFT_NUM_WORLDS == (uint64_t)kind) {
            live(world);
            num++;
            if (num % 10 == 0) {
                printf("  %s: %u seeds, %.0f s\n", names[kind], num, (kvft_now_ms() - begin) / 1000);
                fflush(stdout);
            }
        }
    }
    kvft_world_stop(world);
    printf("%-9s %3u seeds in %.0f s\n", names[kind], num, (kvft_now_ms() - begin) / 1000);
    fflush(stdout);
    *done += num;
    return true;
}

static void report(void) {
    printf("faults injected:\n");
    for (int i = 0; kvft_nemesis_name(i) != NULL; i++) {
        printf("  %-38s %4u\n", kvft_nemesis_name(i), counts[i]);
    }
    printf("%llu calls: %llu of %llu blocks loaded, %llu sessions, %llu batches\n", (unsigned long long)totals.calls,
           (unsigned long long)totals.hits, (unsigned long long)totals.blocks, (unsigned long long)totals.sessions,
           (unsigned long long)totals.batches);
    printf(
        "the latest call returned %.0f ms behind its budget, %.0f ms net of what its threads had to wait for a processor (a sleeping thread: at "
        "most %.0f ms at once); %llu calls needed that allowance\n",
        totals.latest, totals.latest_net, longest_nap, (unsigned long long)totals.excused);
}

int main(int argc, char **argv) {
    const char *only = getenv("SEED");
    uint64_t from = 0, to = argc > 1 ? strtoull(argv[1], NULL, 10) : DEFAULT_SEEDS;
    unsigned done = 0;
    pthread_t sleeper, watchdog;
    static atomic_bool watch_stops;
    if (only != NULL && only[0] != '\0') {
        from = strtoull(only, NULL, 10);
        to = from + 1;
    }
    kvft_faults_watch();
    kvf_set_log(quiet, NULL, KVF_LOG_ERROR);
    if (pthread_create(&sleeper, NULL, sleep_on, NULL) != 0 ||
        pthread_create(&watchdog, NULL, watch, &watch_stops) != 0) {
        abort();
    }
    for (int kind = 0; kind < KVFT_NUM_WORLDS; kind++) {
        bool wanted = false;
        for (uint64_t s = from; s < to && !wanted; s++) {
            wanted = s % KVFT_NUM_WORLDS == (uint64_t)kind;
        }
        if (wanted && !run_world((kvft_world_kind)kind, from, to, &done)) {
            printf("check-chaos: skipped: redis-server is not installed\n");
            return 77;
        }
    }
    atomic_store(&sleeper_stops, true);
    atomic_store(&watch_stops, true);
    pthread_join(sleeper, NULL);
    pthread_join(watchdog, NULL);
    report();
    unsigned faults = 0;
    for (int i = 0; i < KVFT_MAX_NEMESES; i++) {
        faults += counts[i];
    }
    printf("check-chaos: %u seeds, %u faults, %u failures; latest call %.0f ms behind its budget (bound %.0f)\n", done,
           faults, num_failures, totals.latest_net, LATE_MS);
    return num_failures == 0 && done > 0 ? 0 : 1;
}
