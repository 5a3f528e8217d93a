/* SPDX-License-Identifier: Apache-2.0
 *
 * check-recovery: how long after the return of a server the first load is whole again. Loads run all the time, so the
 * breaker is as far open as it gets. Four cases: a single server is killed and started again; so is a shard of a
 * Cluster; a shard dies and its replica takes over; a master dies and the sentinels name another. The time runs from
 * the server's first answer (the Cluster or the sentinels have decided) to the end of the first whole load. Arguments
 * name cases: single, restart, takeover, sentinel.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "support/cluster.h"
#include "support/kit.h"

#define BLOCKS   24u
#define PAYLOAD  20000u
#define SEED     1u
#define BOUND_MS 1000.0

static double worst_ms;

static void die(const char *what) {
    fflush(stdout);
    fprintf(stderr, "check-recovery: %s\n", what);
    exit(1);
}

/* ---- loads, one after the other, in a thread ---- */

typedef struct reader {
    kvf_store *store;
    kvf_space *space;
    kvft_prompt *prompt;
    pthread_t thread;
    atomic_bool stop;
    _Atomic long long last_good_us; /* when the last whole load ended */
    _Atomic int gap, why; /* of the last load that was not whole: its first block that missed, and the reason */
} reader;

static void *read_on(void *arg) {
    reader *r = arg;
    while (!atomic_load(&r->stop)) {
        kvft_prompt_poison(r->prompt);
        size_t run = kvf_load(r->space, r->prompt->blocks, BLOCKS, NULL, KVF_MS(1000));
        if (kvft_prompt_wrong(r->prompt, SEED, run) != 0) {
            die("wrong bytes");
        }
        if (run == BLOCKS) {
            atomic_store(&r->last_good_us, (long long)(kvft_now_ms() * 1000));
        } else {
            atomic_store(&r->gap, (int)run);
            atomic_store(&r->why, (int)r->prompt->blocks[run].why);
        }
        kvft_nap_ms(5);
    }
    return NULL;
}

static void begin(reader *r, const char *url) {
    *r = (reader){.store = kvft_store(url)};
    r->space = kvft_space(r->store, "m", 16);
    r->prompt = kvft_prompt_new(r->space, SEED, BLOCKS, PAYLOAD);
    kvft_save_all(r->space, r->store, r->prompt);
    if (pthread_create(&r->thread, NULL, read_on, r) != 0) {
        die("no thread");
    }
}

static void end(reader *r) {
    atomic_store(&r->stop, true);
    pthread_join(r->thread, NULL);
    kvft_prompt_free(r->prompt);
    kvf_space_close(r->space);
    kvf_store_close(r->store);
}

static void explain(const reader *r) {
    printf("  the last load ended at block %d of %u: %s\n", atomic_load(&r->gap), BLOCKS,
           kvf_reason_name((kvf_reason)atomic_load(&r->why)));
}

/* It loads, and the loads are whole. */
static void await_good(reader *r) {
    double from = kvft_now_ms();
    while ((double)atomic_load(&r->last_good_us) / 1000 < from) {
        if (kvft_now_ms() - from > 20000) {
            explain(r);
            die("loads do not get whole");
        }
        kvft_nap_ms(5);
    }
}

/* From `since` to the first whole load after it. One that was whole before (the decision was seen late) counts as 0. */
static void measure(reader *r, const char *what, double since, double killed) {
    double last = (double)atomic_load(&r->last_good_us) / 1000;
    while (last < since && last < killed + 50 && kvft_now_ms() - since < 20000) {
        kvft_nap_ms(1);
        last = (double)atomic_load(&r->last_good_us) / 1000;
    }
    double spent = last > since ? last - since : last >= killed + 50 ? 0 : 20000;
    worst_ms = spent > worst_ms ? spent : worst_ms;
    printf("%-34s back after %5.0f ms, first whole load %4.0f ms later\n", what, since - killed, spent);
    if (spent >= BOUND_MS) {
        explain(r);
    }
    fflush(stdout);
}

/* ---- the cases ---- */

static void restart_cases(reader *r, kvft_server *server, const char *what) {
    for (int i = 0; i < 4; i++) {
        await_good(r);
        if (kvft_server_say(server, "SAVE")[0] != '+') {
            die("SAVE");
        }
        double killed = kvft_now_ms();
        kvft_server_kill(server);
        kvft_nap_ms(1200 + 170 * i); /* so that the return falls everywhere between two tries */
        kvft_server_restart(server);
        measure(r, what, kvft_now_ms(), killed);
    }
}

static void check_single(void) {
    reader r;
    kvft_server *server = kvft_server_start(NULL);
    if (server == NULL) {
        die("redis-server is not installed");
    }
    begin(&r, server->tcp_url);
    restart_cases(&r, server, "single, restarted");
    end(&r);
    kvft_server_stop(server);
}

static bool is_promoted(const kvft_cluster *c, int node) {
    char *nodes = kvft_server_ask(c->nodes[1], "CLUSTER NODES");
    const char *line = strstr(nodes, c->ids[node]);
    char flags[64] = "";
    bool yes = line != NULL && sscanf(line, "%*s %*s %63s", flags) == 1 && strstr(flags, "master") != NULL;
    free(nodes);
    return yes;
}

static void check_restart(void) {
    reader r;
    kvft_cluster *c = kvft_cluster_start(false);
    begin(&r, c->url);
    restart_cases(&r, c->nodes[0], "Cluster, a shard restarted");
    end(&r);
    kvft_cluster_stop(c);
}

static void check_takeover(void) {
    reader r;
    kvft_cluster *c = kvft_cluster_start(true);
    begin(&r, c->url);
    await_good(&r);
    kvft_await_replicas(c->nodes[0]);
    kvft_await_said(c->nodes[1], "CLUSTER NODES", "slave ", KVFT_SHARDS); /* news among the nodes take seconds */
    kvft_cluster_be_quick(c);
    double killed = kvft_now_ms();
    kvft_server_kill(c->nodes[0]);
    while (!is_promoted(c, KVFT_SHARDS)) {
        if (kvft_now_ms() - killed > 20000) {
            die("no failover");
        }
        kvft_nap_ms(5);
    }
    measure(&r, "Cluster, a replica took over", kvft_now_ms(), killed);
    end(&r);
    kvft_cluster_stop(c);
}

static void check_sentinel(void) {
    reader r;
    kvft_sentinels *s = kvft_sentinels_start();
    begin(&r, s->url);
    await_good(&r);
    int before = kvft_sentinels_master(s);
    kvft_server *master =
        s->data[s->data[1]->port == before]; /* on a busy machine they may have changed places already */
    kvft_await_replicas(master);
    double killed = kvft_now_ms();
    kvft_server_kill(master);
    while (kvft_sentinels_master(s) == before) {
        if (kvft_now_ms() - killed > 20000) {
            die("no failover");
        }
        kvft_nap_ms(5);
    }
    measure(&r, "Sentinel, another master", kvft_now_ms(), killed);
    end(&r);
    kvft_sentinels_stop(s);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {{"single", check_single},
                 {"restart", check_restart},
                 {"takeover", check_takeover},
                 {"sentinel", check_sentinel}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (argc < 2 || strcmp(argv[1], cases[i].name) == 0) {
            cases[i].run();
        }
    }
    bool ok = worst_ms < BOUND_MS;
    printf("check-recovery: first whole load at most %.0f ms after the return (%s %.0f)\n", worst_ms,
           ok ? "<" : "not <", BOUND_MS);
    return ok ? 0 : 1;
}
