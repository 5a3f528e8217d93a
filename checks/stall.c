/* SPDX-License-Identifier: Apache-2.0
 *
 * check-stall: a connection that stalls does not slow the loads on the others. A victim's load hangs in the middle of a
 * reply, on a connection that the proxy stops and that nobody closes (stall_ms is long). Meanwhile another thread loads
 * over the other connections of the same store. Pairs of the same loads, with and without the stall, follow each other
 * directly, in changing order. The figure is the median of their ratios. Pairs are added until its 95 % interval leaves
 * the bound on one side, so a noisy machine takes longer instead of answering at random.
 */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "support/kit.h"
#include "support/proxy.h"
#include "support/server.h"

#define BLOCKS  24u
#define PAYLOAD 65536u
#define PAIRS   400 /* at most; fewer if the figure is clear */
#define FEWEST  81
#define LOADS   8
#define BOUND   1.10

static const kvft_plan faithful;

static void die(const char *what) {
    fflush(stdout);
    fprintf(stderr, "check-stall: %s\n", what);
    exit(1);
}

typedef struct victim {
    kvf_space *space;
    kvft_prompt *prompt;
    size_t run;
} victim;

static void *suffer(void *arg) {
    victim *v = arg;
    kvft_prompt_poison(v->prompt);
    v->run = kvf_load(v->space, v->prompt->blocks, BLOCKS, NULL, KVF_MS(60000));
    return NULL;
}

/* The time of some loads, all of them whole. */
static double time_loads(kvf_space *space, kvft_prompt *prompt) {
    double begin = kvft_now_ms();
    for (int i = 0; i < LOADS; i++) {
        if (kvf_load(space, prompt->blocks, BLOCKS, NULL, KVF_MS(10000)) != BLOCKS) {
            die("a load on a connection that does not stall was not whole");
        }
    }
    return kvft_now_ms() - begin;
}

/* The time of the loads while the victim hangs, or, without a stall, right after the same load of the victim: so both
 * find the same caches and the same two threads awake, and differ only by the stall. */
static double time_with_victim(kvft_proxy *proxy, victim *v, bool stalled, kvf_space *space, kvft_prompt *prompt) {
    const kvft_plan plan = {.stall_after = 200000, .stall_one = true};
    pthread_t thread;
    uint64_t faults = kvft_proxy_stats_get(proxy).faults;
    kvft_proxy_set(proxy, stalled ? &plan : &faithful);
    if (pthread_create(&thread, NULL, suffer, v) != 0) {
        die("no thread");
    }
    if (!stalled) {
        pthread_join(thread, NULL);
    }
    for (double begin = kvft_now_ms(); stalled && kvft_proxy_stats_get(proxy).faults == faults; kvft_nap_ms(1)) {
        if (kvft_now_ms() - begin > 10000) {
            die("nothing stalled");
        }
    }
    kvft_nap_ms(3); /* its other connection, where it has one, is done */
    double spent = time_loads(space, prompt);
    kvft_proxy_set(proxy, &faithful);
    if (stalled) {
        pthread_join(thread, NULL);
    }
    if (v->run != BLOCKS || kvft_prompt_wrong(v->prompt, 1, v->run) != 0) {
        die("the victim's load was not whole in the end");
    }
    return spent;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Whether the 95 % interval of the median of sorted ratios (by their ranks, from the binomial distribution) leaves out
 * the bound. */
static bool is_clear(const double *sorted, int num) {
    int half = (int)(0.98 * sqrt(num)) + 1;
    return sorted[num / 2 + half] <= BOUND || sorted[num / 2 - half] > BOUND;
}

static double check(const char *what, const char *base, kvft_proxy *proxy) {
    char url[256];
    double ratios[PAIRS], sorted[PAIRS], alone_ms = 0;
    int num = 0;
    snprintf(url, sizeof url, "%s?stall_ms=60000", base);
    kvf_store *store = kvft_store(url);
    kvf_space *space = kvft_space(store, "m", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 1, BLOCKS, PAYLOAD);
    victim v = {.space = space, .prompt = kvft_prompt_new(space, 1, BLOCKS, PAYLOAD)};
    kvft_save_all(space, store, prompt);
    (void)time_loads(space, prompt);
    while (num < PAIRS && (num < FEWEST || !is_clear(sorted, num))) {
        double alone = num % 2 == 0 ? time_with_victim(proxy, &v, false, space, prompt) : 0;
        double beside = time_with_victim(proxy, &v, true, space, prompt);
        alone = num % 2 == 0 ? alone : time_with_victim(proxy, &v, false, space, prompt);
        ratios[num++] = beside / alone;
        alone_ms += alone;
        memcpy(sorted, ratios, (size_t)num * sizeof *sorted);
        qsort(sorted, (size_t)num, sizeof *sorted, by_size);
    }
    if (kvft_prompt_wrong(prompt, 1, BLOCKS) != 0) {
        die("wrong bytes");
    }
    printf("%-6s %d pairs of %d loads (%.1f ms a load alone): the median ratio %.3f, quartiles %.3f and %.3f\n", what,
           num, LOADS, alone_ms / num / LOADS, sorted[num / 2], sorted[num / 4], sorted[num - 1 - num / 4]);
    kvft_prompt_free(v.prompt);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
    return sorted[num / 2];
}

int main(void) {
    kvft_server *server = kvft_server_start(NULL);
    if (server == NULL) {
        printf("check-stall: skipped: redis-server is not installed\n");
        return 77;
    }
    kvft_proxy *proxy = kvft_proxy_start(server->socket);
    double tcp = check("TCP", kvft_proxy_tcp_url(proxy), proxy);
    double unix_socket = check("unix", kvft_proxy_unix_url(proxy), proxy);
    kvft_proxy_stop(proxy);
    kvft_server_stop(server);
    double worst = tcp > unix_socket ? tcp : unix_socket;
    bool ok = worst <= BOUND;
    printf("check-stall: loads beside a connection that stalls take %.3f of their time without it (%s %.2f)\n", worst,
           ok ? "at most" : "more than", BOUND);
    return ok ? 0 : 1;
}
