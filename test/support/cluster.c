/* SPDX-License-Identifier: Apache-2.0
 *
 * Starts and stops a Redis Cluster, or a master with a replica and sentinels, for tests.
 */
#include "support/cluster.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PATIENCE_MS 20000

static void die(const char *what, const char *said) {
    fprintf(stderr, "the servers of the test: %s: %s\n", what, said);
    abort();
}

static void sleep_ms(unsigned ms) {
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
    nanosleep(&t, NULL);
}

static void *must(void *memory) {
    if (memory == NULL) {
        die("no memory", "");
    }
    return memory;
}

static const char *login_of(const kvft_server *server) {
    return server->acl ? KVFT_ACL_USER ":" KVFT_ACL_PASSWORD "@" : "";
}

static void must_ok(kvft_server *server, const char *command) {
    const char *said = kvft_server_say(server, command);
    if (strncmp(said, "+OK", 3) != 0) {
        die(command, said);
    }
}

/* The whole of a bulk reply of a server. */
static char *bulk(kvft_server *server, const char *command) {
    return must(kvft_server_ask(server, command));
}

static bool contains(kvft_server *server, const char *command, const char *text) {
    char *said = bulk(server, command);
    bool yes = strstr(said, text) != NULL;
    free(said);
    return yes;
}

static int count(kvft_server *server, const char *command, const char *text) {
    char *said = bulk(server, command);
    int num = 0;
    for (const char *p = strstr(said, text); p != NULL; p = strstr(p + 1, text)) {
        num++;
    }
    free(said);
    return num;
}

static void await(bool ok, int *waited, const char *what) {
    if (!ok) {
        if (*waited > PATIENCE_MS) {
            die(what, "it takes too long");
        }
        *waited += 10;
        sleep_ms(10);
    }
}

static long long offset_of(const char *text, const char *name) {
    const char *at = strstr(text, name);
    return at != NULL ? atoll(at + strlen(name)) : -1;
}

/* There is a replica, and every "slaveN:...,state=online,offset=..." has come that far. */
static bool is_replicated(kvft_server *master, long long target) {
    char *said = bulk(master, "INFO replication");
    const char *line = strstr(said, "\nslave0:");
    bool yes = line != NULL;
    for (; yes && line != NULL; line = strstr(line + 1, "\nslave")) {
        const char *online = strstr(line, "state=online,");
        yes = online != NULL && online < line + 1 + strcspn(line + 1, "\n") && offset_of(line, "offset=") >= target;
    }
    free(said);
    return yes;
}

void kvft_await_replicas(kvft_server *master) {
    char *said = bulk(master, "INFO replication");
    long long target = offset_of(said, "master_repl_offset:");
    free(said);
    for (int waited = 0; !is_replicated(master, target);) {
        await(false, &waited, "a replica does not keep up");
    }
}

void kvft_await_said(kvft_server *server, const char *command, const char *text, int times) {
    for (int waited = 0; count(server, command, text) != times;) {
        await(false, &waited, text);
    }
}

/* ---- Cluster ---- */

int kvft_cluster_first(int shard) {
    return shard * 16384 / KVFT_SHARDS;
}

/* On a busy host a node may be silent for seconds. With a short timeout that ends a meeting, which nobody repeats, and
 * lets a replica take over. */
static void start_node(kvft_cluster *c, int i) {
    static const char *const args[] = {"--cluster-enabled",
                                       "yes",
                                       "--cluster-node-timeout",
                                       "20000",
                                       "--cluster-require-full-coverage",
                                       "no",
                                       "--cluster-allow-reads-when-down",
                                       "yes",
                                       "--cluster-replica-validity-factor",
                                       "0",
                                       "--repl-diskless-sync-delay",
                                       "0",
                                       NULL};
    c->nodes[i] = kvft_server_start(args);
    char *id = bulk(c->nodes[i], "CLUSTER MYID");
    snprintf(c->ids[i], sizeof c->ids[i], "%.40s", id);
    free(id);
}

static void meet(kvft_cluster *c, int num) {
    char command[128];
    int waited = 0;
    for (int i = 0; i < num; i++) {
        if (i < KVFT_SHARDS) {
            snprintf(command, sizeof command, "CLUSTER ADDSLOTSRANGE %d %d", kvft_cluster_first(i),
                     kvft_cluster_first(i + 1) - 1);
            must_ok(c->nodes[i], command);
        }
        snprintf(command, sizeof command, "CLUSTER SET-CONFIG-EPOCH %d", i + 1);
        must_ok(c->nodes[i], command);
    }
    for (int i = 1; i < num; i++) {
        snprintf(command, sizeof command, "CLUSTER MEET 127.0.0.1 %d", c->nodes[i]->port);
        must_ok(c->nodes[0], command);
    }
    for (int i = 0; i < num;) {
        bool ok =
            count(c->nodes[i], "CLUSTER NODES", "connected\n") + count(c->nodes[i], "CLUSTER NODES", "connected ") ==
                num &&
            kvft_cluster_is_ok(c, i) && contains(c->nodes[i], "CLUSTER INFO", "cluster_slots_assigned:16384");
        await(ok, &waited, "the Cluster does not form");
        i += ok;
    }
}

static void replicate(kvft_cluster *c) {
    char command[128];
    int waited = 0;
    for (int i = 0; i < KVFT_SHARDS; i++) {
        snprintf(command, sizeof command, "CLUSTER REPLICATE %s", c->ids[i]);
        must_ok(c->nodes[KVFT_SHARDS + i], command);
    }
    for (int i = KVFT_SHARDS; i < 2 * KVFT_SHARDS;) {
        bool ok = contains(c->nodes[i], "INFO replication", "master_link_status:up");
        await(ok, &waited, "a replica does not come up");
        i += ok;
    }
    for (int i = 0; i < KVFT_SHARDS; i++) {
        kvft_await_replicas(c->nodes[i]);
    }
}

kvft_cluster *kvft_cluster_start(bool replicas) {
    kvft_server *probe = kvft_server_start(NULL);
    if (probe == NULL) {
        return NULL;
    }
    kvft_server_stop(probe);
    kvft_cluster *c = must(calloc(1, sizeof *c));
    int num = replicas ? 2 * KVFT_SHARDS : KVFT_SHARDS;
    for (int i = 0; i < num; i++) {
        start_node(c, i);
    }
    meet(c, num);
    if (replicas) {
        replicate(c);
    }
    snprintf(c->url, sizeof c->url, "redis%s+cluster://%s127.0.0.1:%d,127.0.0.1:%d",
             c->nodes[0]->cert[0] != '\0' ? "s" : "", login_of(c->nodes[0]), c->nodes[0]->port, c->nodes[1]->port);
    return c;
}

void kvft_cluster_stop(kvft_cluster *c) {
    for (int i = 0; c != NULL && i < 2 * KVFT_SHARDS; i++) {
        kvft_server_stop(c->nodes[i]);
    }
    free(c);
}

void kvft_cluster_be_quick(kvft_cluster *c) {
    for (int i = 0; i < 2 * KVFT_SHARDS && c->nodes[i] != NULL; i++) {
        must_ok(c->nodes[i], "CONFIG SET cluster-node-timeout 1000");
    }
}

bool kvft_cluster_is_ok(kvft_cluster *c, int node) {
    return contains(c->nodes[node], "CLUSTER INFO", "cluster_state:ok");
}

static bool says_ok(kvft_server *server, const char *command, const char **said) {
    *said = kvft_server_say(server, command);
    return (*said)[0] == '+';
}

static bool move_keys(kvft_cluster *c, int slot, int src, int dst, const char **said) {
    char command[512], key[400];
    for (;;) {
        snprintf(command, sizeof command, "CLUSTER GETKEYSINSLOT %d 1", slot);
        char *name = bulk(c->nodes[src], command); /* "name\n", or nothing */
        snprintf(key, sizeof key, "%.*s", (int)strcspn(name, "\r\n"), name);
        free(name);
        if (key[0] == '\0') {
            return true;
        }
        snprintf(command, sizeof command, "MIGRATE 127.0.0.1 %d %s 0 10000 REPLACE", c->nodes[dst]->port, key);
        if (!says_ok(c->nodes[src], command, said)) {
            return false;
        }
    }
}

bool kvft_cluster_try_move(kvft_cluster *c, int slot, int src, int dst, const char **said) {
    char importing[128], migrating[128], node[128];
    snprintf(importing, sizeof importing, "CLUSTER SETSLOT %d IMPORTING %s", slot, c->ids[src]);
    snprintf(migrating, sizeof migrating, "CLUSTER SETSLOT %d MIGRATING %s", slot, c->ids[dst]);
    snprintf(node, sizeof node, "CLUSTER SETSLOT %d NODE %s", slot, c->ids[dst]);
    return says_ok(c->nodes[dst], importing, said) && says_ok(c->nodes[src], migrating, said) &&
           move_keys(c, slot, src, dst, said) && says_ok(c->nodes[dst], node, said) &&
           says_ok(c->nodes[src], node, said);
}

void kvft_cluster_move(kvft_cluster *c, int from, int to, int src, int dst) {
    for (int slot = from; slot < to; slot++) {
        const char *said = "";
        if (!kvft_cluster_try_move(c, slot, src, dst, &said)) {
            die("a slot does not move", said);
        }
    }
}

/* ---- Sentinel ---- */

static void start_sentinel(kvft_sentinels *s, int i) {
    static const char *const args[] = {"--sentinel", NULL};
    char command[160];
    s->watch[i] = kvft_server_start_conf(args);
    snprintf(command, sizeof command, "SENTINEL MONITOR mymaster 127.0.0.1 %d 2", s->data[0]->port);
    must_ok(s->watch[i], command);
    must_ok(s->watch[i], "SENTINEL SET mymaster down-after-milliseconds 500");
    must_ok(s->watch[i], "SENTINEL SET mymaster failover-timeout 3000");
}

/* The sentinels know the replica, and each other. */
static bool is_complete(kvft_server *watch) {
    return contains(watch, "INFO sentinel", "slaves=1,sentinels=3");
}

kvft_sentinels *kvft_sentinels_start(void) {
    static const char *const args[] = {"--repl-diskless-sync-delay", "0", NULL};
    kvft_server *master = kvft_server_start(args);
    char command[64];
    int waited = 0;
    if (master == NULL) {
        return NULL;
    }
    kvft_sentinels *s = must(calloc(1, sizeof *s));
    s->data[0] = master;
    s->data[1] = kvft_server_start(args);
    snprintf(command, sizeof command, "REPLICAOF 127.0.0.1 %d", master->port);
    must_ok(s->data[1], command);
    while (!contains(s->data[1], "INFO replication", "master_link_status:up")) {
        await(false, &waited, "the replica does not come up");
    }
    kvft_await_replicas(master);
    for (int i = 0; i < 3; i++) {
        start_sentinel(s, i);
    }
    for (int i = 0; i < 3;) {
        bool ok = is_complete(s->watch[i]);
        await(ok, &waited, "the sentinels do not find each other");
        i += ok;
    }
    snprintf(s->url, sizeof s->url, "redis%s+sentinel://%s127.0.0.1:%d,127.0.0.1:%d,127.0.0.1:%d/mymaster%s",
             s->data[0]->cert[0] != '\0' ? "s" : "", login_of(s->data[0]), s->watch[0]->port, s->watch[1]->port,
             s->watch[2]->port,
             s->watch[0]->acl ? "?sentinel_user=" KVFT_ACL_USER "&sentinel_password=" KVFT_ACL_PASSWORD : "");
    return s;
}

void kvft_sentinels_stop(kvft_sentinels *s) {
    for (int i = 0; s != NULL && i < 3; i++) {
        kvft_server_stop(s->watch[i]);
    }
    for (int i = 0; s != NULL && i < 2; i++) {
        kvft_server_stop(s->data[i]);
    }
    free(s);
}

int kvft_sentinels_master(kvft_sentinels *s) {
    char *said = bulk(s->watch[0], "SENTINEL GET-MASTER-ADDR-BY-NAME mymaster"); /* "host\nport\n" */
    const char *port = strchr(said, '\n');
    int number = port != NULL ? atoi(port + 1) : 0;
    free(said);
    return number;
}
