/* SPDX-License-Identifier: Apache-2.0
 *
 * Loads go before saves: the same loads alone, and beside a thread that saves without a pause to the same server over
 * the same store. Pairs follow each other directly, in changing order. The figure is the median of their ratios. The
 * server counts the saves value by value, because a whole batch takes longer than the loads beside it.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/kit.h"
#include "support/server.h"
#include "support/tiers.h"

#define VALUES 16u
#define BYTES  ((size_t)1400 << 10)
#define PAIRS  41
#define LOADS  4

static void die(const char *what) {
    fprintf(stderr, "lanes_bench: %s\n", what);
    exit(1);
}

typedef struct lot {
    kvft_value values[VALUES];
    kvfi_item items[VALUES];
} lot;

static lot *lot_new(uint64_t seed) {
    lot *l = calloc(1, sizeof *l);
    if (l == NULL) {
        die("no memory");
    }
    for (uint64_t i = 0; i < VALUES; i++) {
        kvft_value_init(&l->values[i], seed + i, BYTES);
    }
    return l;
}

static void lot_free(lot *l) {
    for (unsigned i = 0; i < VALUES; i++) {
        kvft_value_cleanup(&l->values[i]);
    }
    free(l);
}

static void move(kvfi_tier *tier, lot *l, bool put) {
    for (unsigned i = 0; i < VALUES; i++) {
        l->items[i] = l->values[i].item;
        l->items[i].user = &l->values[i];
    }
    kvfi_feed feed = {.items = l->items,
                      .num = VALUES,
                      .limit = VALUES,
                      .deadline_us = kvfi_deadline(20000000),
                      .check = put ? NULL : kvft_value_check};
    (put ? tier->ops->put : tier->ops->get)(tier, &feed);
    for (unsigned i = 0; i < VALUES; i++) {
        if (l->items[i].status != KVF_OK) {
            die(put ? "a save failed" : "a load failed");
        }
    }
}

typedef struct saver {
    kvfi_tier *tier;
    lot *lot;
    atomic_bool on, ending;
    atomic_uint rounds;
} saver;

static void *save(void *arg) {
    saver *s = arg;
    while (!s->ending) {
        if (s->on) {
            move(s->tier, s->lot, true);
            s->rounds++;
        } else {
            kvft_nap_ms(1);
        }
    }
    return NULL;
}

static double time_loads(kvfi_tier *tier, lot *l) {
    double from = kvft_now_ms();
    for (int i = 0; i < LOADS; i++) {
        move(tier, l, false);
    }
    return kvft_now_ms() - from;
}

/* SETs that the server has executed. */
static double count_sets(kvft_server *server) {
    char *said = kvft_server_ask(server, "INFO commandstats");
    const char *at = strstr(said, "cmdstat_set:calls=");
    double num = at != NULL ? strtod(at + strlen("cmdstat_set:calls="), NULL) : 0;
    free(said);
    return num;
}

static double time_beside(kvft_server *server, saver *s, lot *l, double *saved) {
    s->on = true;
    unsigned before = s->rounds;
    while (s->rounds == before) {
        kvft_nap_ms(1);
    }
    double sets = count_sets(server);
    double ms = time_loads(s->tier, l);
    *saved += count_sets(server) - sets;
    s->on = false;
    unsigned now = s->rounds;
    for (double from = kvft_now_ms(); s->rounds == now && kvft_now_ms() - from < 200; kvft_nap_ms(1)) {
    }
    return ms;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(const char *what, kvft_server *server, const char *url) {
    kvfi_tier *tier = kvft_tier(url);
    saver s = {.tier = tier, .lot = lot_new(5000)};
    lot *mine = lot_new(1);
    pthread_t thread;
    double ratios[PAIRS], alone_ms = 0, beside_ms = 0, saved = 0, saving = 0;
    move(tier, mine, true);
    (void)time_loads(tier, mine);
    double from = kvft_now_ms();
    for (int i = 0; i < 10; i++) {
        move(tier, s.lot, true);
    }
    saving = 10.0 * VALUES * BYTES / 1e3 / (kvft_now_ms() - from);
    if (pthread_create(&thread, NULL, save, &s) != 0) {
        die("no thread");
    }
    for (int i = 0; i < PAIRS; i++) {
        double alone = i % 2 == 0 ? time_loads(tier, mine) : 0;
        double beside = time_beside(server, &s, mine, &saved);
        alone = i % 2 == 0 ? alone : time_loads(tier, mine);
        ratios[i] = beside / alone;
        alone_ms += alone / PAIRS;
        beside_ms += beside;
    }
    s.ending = true;
    pthread_join(thread, NULL);
    qsort(ratios, PAIRS, sizeof *ratios, by_size);
    printf(
        "%-5s loads alone %.0f MB/s; beside saves they take %.2f times as long (quartiles %.2f, %.2f); saves alone %.0f MB/s, "
        "beside loads %.0f (%.1f values in 10 ms)\n",
        what, LOADS * VALUES * (double)BYTES / 1e3 / alone_ms, ratios[PAIRS / 2], ratios[PAIRS / 4],
        ratios[PAIRS - 1 - PAIRS / 4], saving, saved * (double)BYTES / 1e3 / beside_ms, saved / beside_ms * 10);
    lot_free(mine);
    lot_free(s.lot);
    tier->ops->close(tier);
}

int main(void) {
    const char *const args[] = {"--maxmemory", "1gb", NULL};
    kvft_server *server = kvft_server_start(args);
    char url[256];
    if (server == NULL) {
        printf("lanes_bench: skipped: redis-server is not installed\n");
        return 77;
    }
    snprintf(url, sizeof url, "%s?conns=1", server->unix_url);
    measure("unix", server, url);
    snprintf(url, sizeof url, "%s?conns=1", server->tcp_url);
    measure("TCP", server, url);
    kvft_server_stop(server);
    return 0;
}
