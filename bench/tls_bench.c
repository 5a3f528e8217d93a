/* SPDX-License-Identifier: Apache-2.0
 *
 * The cost of TLS: the same loads and saves over TCP with it and without, on two servers of one kind, in turns. Each
 * figure is the median of the rounds; the ratio is the median of the ratios within a round.
 *
 *   tls_bench [rounds]        default 7
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "support/kit.h"
#include "support/server.h"

#define BLOCKS     64u
#define PAYLOAD    ((size_t)(1 << 20) - 4096)
#define MAX_ROUNDS 99

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double per_s(double from_s) {
    return (double)(BLOCKS * PAYLOAD) / (now_s() - from_s) / 1e9;
}

typedef struct side {
    kvft_server *server;
    kvf_store *store;
    double get[MAX_ROUNDS], set[MAX_ROUNDS]; /* GB/s */
} side;

static void run(side *s, int round) {
    char model[32];
    snprintf(model, sizeof model, "m%d", round); /* new keys: what is known is not saved again */
    kvf_space *space = kvft_space(s->store, model, 16);
    kvft_prompt *prompt = kvft_prompt_new(space, 1, BLOCKS, PAYLOAD);
    double from_s = now_s();
    kvft_save_all(space, s->store, prompt);
    s->set[round] = per_s(from_s);
    size_t loaded = kvf_load(space, prompt->blocks, BLOCKS, NULL,
                             KVF_MS(60000)); /* touches the memory, and opens the connections */
    from_s = now_s();
    loaded += kvf_load(space, prompt->blocks, BLOCKS, NULL, KVF_MS(60000));
    s->get[round] = per_s(from_s);
    if (loaded != 2 * BLOCKS || kvft_prompt_wrong(prompt, 1, BLOCKS) != 0) {
        kvf_stats stats = {.struct_size = sizeof stats};
        kvf_store_stats(s->store, &stats);
        for (int why = 0; why < KVF_NUM_REASONS; why++) {
            if (stats.misses[why] > 0) {
                fprintf(stderr, "%llu blocks: %s\n", (unsigned long long)stats.misses[why],
                        kvf_reason_name((kvf_reason)why));
            }
        }
        fprintf(stderr, "tls_bench: a load came short (%zu of %u)%s\n", loaded, 2 * BLOCKS,
                s->server->cert[0] != '\0' ? " with TLS" : "");
        exit(1);
    }
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvft_server_say(s->server, "FLUSHALL SYNC");
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const double *values, int num) {
    double sorted[MAX_ROUNDS];
    for (int i = 0; i < num; i++) {
        sorted[i] = values[i];
    }
    qsort(sorted, (size_t)num, sizeof *sorted, by_size);
    return sorted[num / 2];
}

static double report(const char *what, const double *plain, const double *tls, int num) {
    double ratios[MAX_ROUNDS];
    for (int i = 0; i < num; i++) {
        ratios[i] = tls[i] / plain[i];
    }
    printf("%s  plain %.2f GB/s  TLS %.2f GB/s  ratio %.2f\n", what, median(plain, num), median(tls, num),
           median(ratios, num));
    return median(ratios, num);
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 7;
    side plain = {.server = kvft_server_start(NULL)}, tls = {.server = NULL};
    char url[256];
    if (plain.server == NULL || rounds < 1 || rounds > MAX_ROUNDS) {
        fprintf(stderr,
                plain.server == NULL ? "tls_bench: no redis-server is installed\n" : "usage: tls_bench [rounds]\n");
        return 77;
    }
    kvft_certs *certs = kvft_certs_new();
    kvft_server_use_tls(certs, kvft_certs_server(certs));
    tls.server = kvft_server_start(NULL);
    /* A machine that is busy may stall for longer than the default allows: then the figures are worth little, but they
     * are figures. */
    snprintf(url, sizeof url, "%s?stall_ms=5000&ssl_ca_certs=%s", tls.server->tcp_url, certs->ca);
    tls.store = kvft_store(url);
    snprintf(url, sizeof url, "%s?stall_ms=5000", plain.server->tcp_url);
    plain.store = kvft_store(url);
    for (int i = 0; i < rounds; i++) {
        run(i % 2 == 0 ? &plain : &tls, i);
        run(i % 2 == 0 ? &tls : &plain, i);
    }
    printf("%u values of %zu bytes, %d rounds, TCP on one host\n", BLOCKS, PAYLOAD, rounds);
    double get = report("GET", plain.get, tls.get, rounds);
    double set = report("SET", plain.set, tls.set, rounds);
    printf("tls_bench: with TLS a load has %.2f and a save %.2f of the speed without\n", get, set);
    kvf_store_close(plain.store);
    kvf_store_close(tls.store);
    kvft_server_stop(plain.server);
    kvft_server_stop(tls.server);
    kvft_certs_free(certs);
    return 0;
}
