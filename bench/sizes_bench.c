/* SPDX-License-Identifier: Apache-2.0
 *
 * What a server charges for records, and what they take of the machine: used_memory (by which it evicts) and resident
 * memory, relative to the bytes of the records, after storing them once, and twice more in another order. For
 * redis-server and, if $KVF_VALKEY names one, valkey-server. `part`: the longest value of one key (the parameter of
 * that name).
 *
 * usage: sizes_bench [--speed]     With it, instead: what two keys for a record cost in time, beside one.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "redis/blocks/blocks.h"
#include "support/server.h"
#include "support/tiers.h"

#define TOTAL        ((size_t)192 << 20)
#define DEFAULT_PART 4190208u

static const struct record {
    const char *what;
    size_t bytes; /* the payload */
    size_t part;
} RECORDS[] = {
    {"SmolLM2, 64 tokens (1.41 MiB)", 1474560 + 2048, DEFAULT_PART},
    {"32 KiB a token, 64 tokens (2 MiB and a little)", (2 << 20) + 1024, DEFAULT_PART},
    {"  the same, part=2093056", (2 << 20) + 1024, 2093056},
    {"128 KiB a token, 64 tokens (8 MiB and a little)", (8 << 20) + 1024, DEFAULT_PART},
    {"1 MiB and a little", (1 << 20) + 1024, DEFAULT_PART},
    {"  the same, part=1044480", (1 << 20) + 1024, 1044480},
    {"1 MiB less 4096", (1 << 20) - 4096 - 512, DEFAULT_PART},
    {"256 KiB and a little", (256 << 10) + 1024, DEFAULT_PART},
};

static double megabytes(kvft_server *server, const char *name) {
    char *info = kvft_server_ask(server, "INFO memory");
    const char *at = strstr(info, name);
    double value = at != NULL ? strtod(at + strlen(name), NULL) : 0;
    free(info);
    return value / 1e6;
}

typedef struct charge {
    double used, resident; /* of the bytes stored */
} charge;

static void store(kvfi_tier *tier, size_t num, size_t step, size_t bytes) {
    for (size_t i = 0; i < num; i++) {
        if (kvft_put(tier, i * step % num, bytes) != KVF_WHY_NONE) {
            fprintf(stderr, "sizes_bench: a record was not stored\n");
            exit(1);
        }
    }
}

static void measure(const struct record *r) {
    kvft_server *server = kvft_server_start(NULL);
    char url[300];
    size_t num = TOTAL / r->bytes;
    charge c[2];
    if (server == NULL) {
        fprintf(stderr, "sizes_bench: no redis-server is installed: make setup\n");
        exit(77);
    }
    snprintf(url, sizeof url, "%s?part=%zu&conns=1", server->unix_url, r->part);
    double used = megabytes(server, "used_memory:"), resident = megabytes(server, "used_memory_rss:");
    for (int round = 0; round < 2; round++) {
        kvfi_tier *tier = kvft_tier(url);
        store(tier, num, 1, r->bytes);
        if (round == 1) {
            store(tier, num, num % 7 != 0 ? 7 : 5, r->bytes);
        }
        tier->ops->close(tier); /* with the buffers of its connections */
        usleep(300000);
        double stored = (double)(num * r->bytes) / 1e6;
        c[round].used = (megabytes(server, "used_memory:") - used) / stored;
        c[round].resident = (megabytes(server, "used_memory_rss:") - resident) / stored;
    }
    printf("  %-50s %8.3f %8.3f %10.3f %8.3f\n", r->what, c[0].used, c[0].resident, c[1].used, c[1].resident);
    fflush(stdout);
    kvft_server_stop(server);
}

/* ---- what an agreeable length costs in time: the same records as one key each and as two ---- */

enum { NUM_SPEED = 24, ROUNDS = 7 };

static double go(kvfi_tier *tier, kvft_value *values, bool put) {
    static kvfi_item items[NUM_SPEED];
    for (size_t i = 0; i < NUM_SPEED; i++) {
        items[i] = values[i].item;
    }
    kvfi_feed feed = {.items = items, .num = NUM_SPEED, .limit = NUM_SPEED, .deadline_us = kvfi_deadline(20000000)};
    int64_t from = kvfi_sys->now_us();
    (put ? tier->ops->put : tier->ops->get)(tier, &feed);
    double took = (double)(kvfi_sys->now_us() - from);
    for (size_t i = 0; i < NUM_SPEED; i++) {
        if (items[i].status != KVF_OK) {
            fprintf(stderr, "sizes_bench: a record was not moved\n");
            exit(1);
        }
    }
    return took;
}

static void compare_speed(size_t bytes, size_t part) {
    kvft_server *server = kvft_server_start(NULL);
    kvft_value *values = calloc(NUM_SPEED, sizeof *values);
    kvfi_tier *tiers[2];
    double best[2][2] = {{1e18, 1e18}, {1e18, 1e18}};
    if (values == NULL) {
        exit(1);
    }
    for (size_t i = 0; i < NUM_SPEED; i++) {
        kvft_value_init(&values[i], 1 + i, bytes);
    }
    for (size_t which = 0; which < 2; which++) {
        char url[300];
        snprintf(url, sizeof url, "%s?prefix=p%zu&part=%zu", server->unix_url, which,
                 which == 0 ? (size_t)DEFAULT_PART : part);
        tiers[which] = kvft_tier(url);
    }
    for (size_t round = 0; round < 2 * ROUNDS; round++) {
        size_t which = round % 2;
        for (size_t put = 2; put-- > 0;) {
            double took = go(tiers[which], values, put == 1);
            best[which][put] = took < best[which][put] ? took : best[which][put];
        }
    }
    double total = (double)(NUM_SPEED * bytes) / 1e3;
    printf(
        "  payload %8zu: one key: save %.2f, load %.2f GB/s; part=%zu, two keys: save %.2f (%.2f), load %.2f (%.2f)\n",
        bytes, total / best[0][1], total / best[0][0], part, total / best[1][1], best[0][1] / best[1][1],
        total / best[1][0], best[0][0] / best[1][0]);
    fflush(stdout);
    for (size_t which = 0; which < 2; which++) {
        tiers[which]->ops->close(tiers[which]);
    }
    for (size_t i = 0; i < NUM_SPEED; i++) {
        kvft_value_cleanup(&values[i]);
    }
    free(values);
    kvft_server_stop(server);
}

static void measure_all(bool speed) {
    kvft_server *server = kvft_server_start(NULL);
    char *info = server != NULL ? kvft_server_ask(server, "INFO server") : NULL;
    const char *version = info != NULL ? strstr(info, "valkey_version:") : NULL;
    version = version == NULL && info != NULL ? strstr(info, "redis_version:") : version;
    printf("%.*s\n  %-50s %8s %8s %10s %8s\n", version != NULL ? (int)strcspn(version, "\r\n") : 0,
           version != NULL ? version : "", "charged, resident: of each byte stored", "charged", "resident", "churned",
           "resident");
    free(info);
    kvft_server_stop(server);
    for (size_t i = 0; i < sizeof RECORDS / sizeof *RECORDS && !speed; i++) {
        measure(&RECORDS[i]);
    }
    if (speed) {
        compare_speed((2 << 20) + 1024, 2093056);
        compare_speed((1 << 20) + 1024, 1044480);
    }
}

int main(int argc, char **argv) {
    const char *valkey = getenv("KVF_VALKEY");
    bool speed = argc > 1 && strcmp(argv[1], "--speed") == 0; /* for a machine that does nothing else */
    measure_all(speed);
    if (valkey != NULL && access(valkey, X_OK) == 0) {
        setenv("KVFT_SERVER", valkey, 1);
        measure_all(speed);
    }
    return 0;
}
