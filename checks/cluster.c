/* SPDX-License-Identifier: Apache-2.0
 *
 * check-cluster: a Cluster of three shards on this machine. 1. One prefix loads from all shards at once. Each shard in
 * turn is stopped: while it stands still, the two others serve their whole share of the same load, which ends whole
 * once the third goes on. With any
 *     order of one after the other, one of the three turns would show an idle shard.
 * 2. Slots move there and back while loads run: none comes short, and every byte is checked. 3. A shard dies: the
 * blocks of the others load, its own blocks miss, and every request ends within its budget.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "redis/cluster/slots.h"
#include "support/cluster.h"
#include "support/kit.h"

#define BLOCKS    96u
#define PAYLOAD   (512u * 1024u)
#define BUDGET_MS 10000u
#define SEED      1u

static kvft_cluster *cluster;
static kvf_store *store;
static kvf_space *space;
static kvft_prompt *prompt;
static unsigned share[KVFT_SHARDS];

static void die(const char *what) {
    fflush(stdout);
    fprintf(stderr, "check-cluster: %s\n", what);
    exit(1);
}

static int shard_of(size_t block) {
    char hex[65];
    for (int i = 0; i < 32; i++) {
        snprintf(hex + 2 * i, 3, "%02x", prompt->keys[block].bytes[i]);
    }
    int slot = kvfi_slot_of(hex, 64), shard = 0;
    while (shard + 1 < KVFT_SHARDS && slot >= kvft_cluster_first(shard + 1)) {
        shard++;
    }
    return shard;
}

/* GETs that found their key since the counters were reset. */
static unsigned hits_of(int shard) {
    char *info = kvft_server_ask(cluster->nodes[shard], "INFO stats");
    const char *at = strstr(info, "keyspace_hits:");
    unsigned hits = at != NULL ? (unsigned)strtoul(at + 14, NULL, 10) : 0;
    free(info);
    return hits;
}

static size_t load(void) {
    kvft_prompt_poison(prompt);
    size_t run = kvf_load(space, prompt->blocks, BLOCKS, NULL, KVF_MS(BUDGET_MS));
    if (kvft_prompt_wrong(prompt, SEED, run) != 0) {
        die("wrong bytes");
    }
    return run;
}

static void *load_thread(void *arg) {
    *(size_t *)arg = load();
    return NULL;
}

/* ---- 1 ---- */

/* Waits until the two others have served their share. */
static bool others_serve(int stopped) {
    for (double begin = kvft_now_ms(); kvft_now_ms() - begin < 4000; kvft_nap_ms(5)) {
        bool done = true;
        for (int i = 0; i < KVFT_SHARDS; i++) {
            done = done && (i == stopped || hits_of(i) >= share[i]);
        }
        if (done) {
            return true;
        }
    }
    return false;
}

static void check_at_once(void) {
    for (int stopped = 0; stopped < KVFT_SHARDS; stopped++) {
        pthread_t thread;
        size_t run = 0;
        for (int i = 0; i < KVFT_SHARDS; i++) {
            (void)kvft_server_say(cluster->nodes[i], "CONFIG RESETSTAT");
        }
        kvft_server_signal(cluster->nodes[stopped], SIGSTOP);
        double begin = kvft_now_ms();
        if (pthread_create(&thread, NULL, load_thread, &run) != 0) {
            die("no thread");
        }
        bool served = others_serve(stopped);
        double waited = kvft_now_ms() - begin;
        kvft_server_signal(cluster->nodes[stopped], SIGCONT);
        pthread_join(thread, NULL);
        printf(
            "shard %d stands still: the others served %u and %u blocks within %.0f ms; it then served %u; %zu of %u loaded\n",
            stopped, share[(stopped + 1) % KVFT_SHARDS], share[(stopped + 2) % KVFT_SHARDS], waited, hits_of(stopped),
            run, BLOCKS);
        if (!served || run != BLOCKS || hits_of(stopped) < share[stopped]) {
            die("the shards do not serve one load at the same time");
        }
        kvft_nap_ms(1500); /* the Cluster sees that all is well again */
    }
}

/* ---- 2 ---- */

static atomic_bool moved;

static void *move_thread(void *arg) {
    (void)arg;
    kvft_cluster_move(cluster, 0, 1500, 0, 1);
    kvft_cluster_move(cluster, 0, 1500, 1, 0);
    atomic_store(&moved, true);
    return NULL;
}

static unsigned check_resharding(void) {
    pthread_t thread;
    unsigned loads = 0;
    double longest = 0, usual = kvft_now_ms();
    (void)load();
    usual = kvft_now_ms() - usual;
    if (pthread_create(&thread, NULL, move_thread, NULL) != 0) {
        die("no thread");
    }
    while (!atomic_load(&moved)) {
        double begin = kvft_now_ms();
        if (load() != BLOCKS) {
            die("a load came short while slots moved");
        }
        longest = kvft_now_ms() - begin > longest ? kvft_now_ms() - begin : longest;
        loads++;
    }
    pthread_join(thread, NULL);
    printf("3000 slots moved: %u loads, all whole; the longest took %.0f ms, an undisturbed one %.0f ms\n", loads,
           longest, usual);
    return loads;
}

/* ---- 3 ---- */

static void check_death(void) {
    double longest = 0;
    unsigned hits = 0;
    kvft_server_kill(cluster->nodes[2]);
    kvft_prompt_poison(prompt);
    for (size_t i = 0; i < BLOCKS; i++) {
        double begin = kvft_now_ms();
        size_t run = kvf_load(space, &prompt->blocks[i], 1, NULL, KVF_MS(1000));
        longest = kvft_now_ms() - begin > longest ? kvft_now_ms() - begin : longest;
        hits += run == 1;
        if ((run == 1) != (shard_of(i) != 2)) {
            die("a block of a living shard did not load, or one of the dead shard did");
        }
        if (run == 0) {
            kvft_bytes(prompt->memory + i * PAYLOAD, PAYLOAD, SEED * 1000003u + i);
        }
    }
    if (kvft_prompt_wrong(prompt, SEED, BLOCKS) != 0) {
        die("wrong bytes");
    }
    double begin = kvft_now_ms();
    size_t run = load(); /* as a prefix: up to the first block of the dead shard */
    double spent = kvft_now_ms() - begin;
    printf(
        "shard 2 dead: %u of %u blocks load, its own %u miss; the longest request took %.0f ms; a prefix of %zu in %.0f ms\n",
        hits, BLOCKS, share[2], longest, run, spent);
    if (longest > 1000 || spent > BUDGET_MS) {
        die("a request waited for a dead shard");
    }
}

int main(void) {
    char url[256];
    cluster = kvft_cluster_start(false);
    if (cluster == NULL) {
        die("redis-server is not installed");
    }
    snprintf(url, sizeof url, "%s?stall_ms=8000",
             cluster->url); /* a stopped shard is to be waited for here, not given up */
    store = kvft_store(url);
    space = kvft_space(store, "m", 16);
    prompt = kvft_prompt_new(space, SEED, BLOCKS, PAYLOAD);
    kvft_save_all(space, store, prompt);
    for (size_t i = 0; i < BLOCKS; i++) {
        share[shard_of(i)]++;
    }
    if (load() != BLOCKS) {
        die("the first load came short");
    }
    check_at_once();
    unsigned loads = check_resharding();
    check_death();
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
    kvft_cluster_stop(cluster);
    printf(
        "check-cluster: 3 of 3 shards at once, %u of %u loads whole while slots moved, a dead shard cost %u of %u blocks\n",
        loads, loads, share[2], BLOCKS);
    return 0;
}
