/* SPDX-License-Identifier: Apache-2.0
 *
 * Starts the servers of a topology and inflicts faults on them.
 */
#include "support/nemesis.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "support/kit.h"

#define PATIENCE_MS 40000

static void die(const char *what, const char *said) {
    fflush(stdout);
    fprintf(stderr, "nemesis: %s: %s\n", what, said);
    abort();
}

/* ---- talking to a server ---- */

static const char *say(kvft_server *server, const char *format, ...) __attribute__((format(printf, 2, 3)));
static const char *say(kvft_server *server, const char *format, ...) {
    char command[512];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    return kvft_server_say(server, command);
}

static void must(kvft_server *server, const char *command) {
    for (int waited = 0; kvft_server_say(server, command)[0] != '+'; waited += 10) {
        if (waited > PATIENCE_MS) {
            die(command, kvft_server_say(server, command));
        }
        kvft_nap_ms(10);
    }
}

static bool info_has(kvft_server *server, const char *section, const char *text) {
    char command[64];
    snprintf(command, sizeof command, "INFO %s", section);
    char *said = kvft_server_ask(server, command);
    bool yes = said != NULL && strstr(said, text) != NULL;
    free(said);
    return yes;
}

static bool is_master(kvft_server *server) {
    return info_has(server, "replication", "role:master");
}

static long long used_memory(kvft_server *server) {
    char *said = kvft_server_ask(server, "INFO memory");
    const char *at = said != NULL ? strstr(said, "used_memory:") : NULL;
    long long used = at != NULL ? atoll(at + 12) : 0;
    free(said);
    return used;
}

/* ---- what befalls a server that is a master; `ms`: how long, about. false: it can't be done here and now. */

typedef struct victim {
    kvft_world *world;
    kvft_server *server;
    int number; /* among world->data */
    long ms;
    uint64_t *random;
} victim;

static bool kill_9(victim *v) {
    kvft_server_kill(v->server);
    kvft_nap_ms(v->ms);
    kvft_server_restart(v->server);
    return true;
}

/* Long enough that the others decide without it: a replica takes over. */
static bool kill_long(victim *v) {
    kvft_server_kill(v->server);
    kvft_nap_ms(3200 + v->ms);
    kvft_server_restart(v->server);
    return true;
}

static bool shut_down(victim *v) {
    (void)say(v->server, "SHUTDOWN NOSAVE FORCE NOW");
    kvft_nap_ms(v->ms / 4);
    kvft_server_restart(v->server);
    return true;
}

static bool stop_cont(victim *v) {
    kvft_server_signal(v->server, SIGSTOP);
    kvft_nap_ms(v->ms);
    kvft_server_signal(v->server, SIGCONT);
    return true;
}

static bool flush_all(victim *v) {
    bool done = say(v->server, "FLUSHALL")[0] == '+';
    kvft_nap_ms(v->ms / 4);
    return done;
}

static bool out_of_memory(victim *v) {
    must(v->server, "CONFIG SET maxmemory-policy noeviction maxmemory 1");
    kvft_nap_ms(v->ms);
    must(v->server, "CONFIG SET maxmemory 0 maxmemory-policy allkeys-lru");
    return true;
}

static bool evict(victim *v) {
    long long bytes = used_memory(v->server) * 6 / 10;
    bool done = say(v->server, "CONFIG SET maxmemory %lld", bytes)[0] == '+';
    kvft_nap_ms(v->ms);
    must(v->server, "CONFIG SET maxmemory 0");
    return done;
}

static bool client_kill(victim *v) {
    bool done = false;
    for (int i = 0; i < 4; i++) {
        done = say(v->server, "CLIENT KILL TYPE normal")[0] == ':' || done;
        kvft_nap_ms(v->ms / 4);
    }
    return done;
}

static bool client_pause(victim *v) {
    bool writes = kvft_random(v->random) % 2 == 0;
    bool done = say(v->server, "CLIENT PAUSE %ld %s", v->ms, writes ? "WRITE" : "ALL")[0] == '+';
    kvft_nap_ms(v->ms);
    return done;
}

static bool debug_sleep(victim *v) {
    return say(v->server, "DEBUG SLEEP %ld.%03ld", v->ms / 1000, v->ms % 1000)[0] == '+';
}

static bool acl_change(victim *v) {
    static const char *const rules[] = {
        "-get", "-set", "-getrange", "-client|setname", "resetkeys", "-hset -hget -hmget"};
    bool done = say(v->server, "ACL SETUSER default %s", rules[kvft_random(v->random) % 6])[0] == '+';
    kvft_nap_ms(v->ms);
    must(v->server, "ACL SETUSER default on nopass +@all ~* &*");
    return done;
}

static bool replica_of(victim *v) {
    if (v->world->kind != KVFT_SINGLE) {
        return false; /* there its masters change by failover */
    }
    bool done = say(v->server, "REPLICAOF 127.0.0.1 1")[0] == '+';
    kvft_nap_ms(v->ms);
    must(v->server, "REPLICAOF NO ONE");
    return done;
}

/* A snapshot is due and can't be put in its place: MISCONF. (A read-only folder does not stop root, a folder of the
 * snapshot's name does.) */
static bool snapshot_fails(victim *v) {
    char path[192], inside[208], command[640];
    snprintf(path, sizeof path, "%s/dump.rdb", v->server->dir);
    snprintf(inside, sizeof inside, "%s/x", path);
    (void)unlink(path);
    if (mkdir(path, 0700) != 0 || mkdir(inside, 0700) != 0) {
        return false;
    }
    must(v->server, "CONFIG SET save \"3600 1\"");
    for (int waited = 0; !info_has(v->server, "persistence", "rdb_last_bgsave_status:err") && waited < PATIENCE_MS;
         waited += 20) {
        (void)say(v->server, "BGSAVE");
        kvft_nap_ms(20);
    }
    kvft_nap_ms(v->ms);
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    if (system(command) != 0) {
        die(command, "failed");
    }
    must(v->server, "CONFIG SET save \"\"");
    for (int waited = 0; !info_has(v->server, "persistence", "rdb_last_bgsave_status:ok"); waited += 20) {
        if (waited > PATIENCE_MS) {
            die("BGSAVE", "it does not succeed any more");
        }
        (void)say(v->server, "BGSAVE");
        kvft_nap_ms(20);
    }
    return true;
}

static void limit_files(kvft_server *server, rlim_t bytes) {
    struct rlimit limit = {.rlim_cur = bytes, .rlim_max = RLIM_INFINITY};
    if (prlimit(server->pid, RLIMIT_FSIZE, &limit, NULL) != 0) {
        die("prlimit", server->dir);
    }
}

/* The disk under the AOF is full: every write of the process to a file fails, as it would with ENOSPC (here EFBIG). A
 * node of a Cluster that has to write its nodes.conf just then ends itself. */
static bool disk_full(victim *v) {
    must(v->server, "CONFIG SET appendonly yes");
    kvft_nap_ms(100); /* its first rewrite */
    limit_files(v->server, 1);
    kvft_nap_ms(v->ms + 300);
    if (say(v->server, "PING")[0] == '\0') {
        kvft_server_restart(v->server);
    }
    limit_files(v->server, RLIM_INFINITY);
    must(v->server, "CONFIG SET appendonly no");
    return true;
}

/* ---- of topologies ---- */

static kvft_server *partner(victim *v) {
    return v->world->kind == KVFT_CLUSTER ? v->world->data[(v->number + KVFT_SHARDS) % (2 * KVFT_SHARDS)] : NULL;
}

static bool cluster_failover(victim *v) {
    kvft_server *replica = partner(v);
    if (replica == NULL || say(replica, "CLUSTER FAILOVER")[0] != '+') {
        return false;
    }
    for (int waited = 0; !is_master(replica) && waited < 5000; waited += 10) {
        kvft_nap_ms(10);
    }
    return is_master(replica);
}

/* Both ends think that the other has the slot (a claim of an older epoch came late): the first is given it, as
 * `redis-cli --cluster fix` does. */
static void settle_slot(victim *v, int slot, int other) {
    kvft_world *w = v->world;
    (void)say(w->data[other], "FLUSHALL"); /* a server that holds keys of a slot does not give it away */
    (void)say(v->server, "CLUSTER BUMPEPOCH");
    for (int i = 0; i < w->num_data; i++) {
        kvft_server *server = w->data[(v->number + i) % w->num_data];
        (void)say(server, "CLUSTER SETSLOT %d STABLE", slot);
        (void)say(server, "CLUSTER SETSLOT %d NODE %s", slot, w->cluster->ids[v->number]);
    }
}

/* Slots that hold keys go to another shard and back. */
static bool slots_move(victim *v) {
    kvft_world *w = v->world;
    if (w->kind != KVFT_CLUSTER) {
        return false;
    }
    int other = (v->number + 1) % KVFT_SHARDS, moved = 0;
    other = is_master(w->data[other]) ? other : other + KVFT_SHARDS;
    for (int i = 0; i < 4; i++) {
        const char *said = "";
        char *key = kvft_server_ask(v->server, "RANDOMKEY");
        int slot = key[0] != '\0' && key[0] != '$' ? atoi(say(v->server, "CLUSTER KEYSLOT %.300s", key) + 1) : -1;
        free(key);
        bool there = slot >= 0 && kvft_cluster_try_move(w->cluster, slot, v->number, other, &said);
        kvft_nap_ms(v->ms / 8);
        bool back = there && kvft_cluster_try_move(w->cluster, slot, other, v->number, &said);
        if (slot >= 0 && !back) {
            printf("  slot %d: %s: %s\n", slot, there ? "not moved back" : "not moved", said);
            settle_slot(v, slot, other);
        }
        moved += there;
    }
    return moved > 0;
}

static bool sentinel_failover(victim *v) {
    kvft_world *w = v->world;
    if (w->kind != KVFT_SENTINEL || say(w->sentinels->watch[1], "SENTINEL FAILOVER mymaster")[0] != '+') {
        return false;
    }
    for (int waited = 0; kvft_sentinels_master(w->sentinels) == v->server->port && waited < 8000; waited += 10) {
        kvft_nap_ms(10);
    }
    return kvft_sentinels_master(w->sentinels) != v->server->port;
}

static bool sentinel_stops(victim *v) {
    if (v->world->kind != KVFT_SENTINEL) {
        return false;
    }
    kvft_server *watch = v->world->sentinels->watch[kvft_random(v->random) % 3];
    kvft_server_signal(watch, SIGSTOP);
    kvft_nap_ms(v->ms);
    kvft_server_signal(watch, SIGCONT);
    return true;
}

static bool sentinel_killed(victim *v) {
    if (v->world->kind != KVFT_SENTINEL) {
        return false;
    }
    kvft_server *watch = v->world->sentinels->watch[kvft_random(v->random) % 3];
    kvft_server_kill(watch);
    kvft_nap_ms(v->ms);
    kvft_server_restart(watch);
    return true;
}

/* ---- on the wire ---- */

static bool on_the_wire(victim *v, const kvft_plan *plan) {
    static const kvft_plan faithful;
    kvft_proxy *proxy = v->world->proxies[kvft_random(v->random) % (uint64_t)v->world->num_proxies];
    kvft_proxy_set(proxy, plan);
    kvft_nap_ms(v->ms);
    kvft_proxy_set(proxy, &faithful);
    kvft_proxy_cut(proxy);
    return true;
}

static int64_t position(victim *v) {
    uint64_t span = 1ull << (4 + kvft_random(v->random) % 16); /* 16 bytes to 512 KiB */
    return 1 + (int64_t)(kvft_random(v->random) % span);
}

#define WIRE(name, ...)                                              \
    static bool name(victim *v) {                                    \
        uint64_t r = kvft_random(v->random);                         \
        int64_t at = position(v);                                    \
        (void)r;                                                     \
        (void)at;                                                    \
        return on_the_wire(v, &(kvft_plan){.seed = r, __VA_ARGS__}); \
    }
WIRE(wire_latency, .latency_ms = (uint32_t)(r % 150))
WIRE(wire_bandwidth, .bytes_per_s = 50000 + r % 3000000)
WIRE(wire_slices, .slice_bytes = 1 + (uint32_t)(r % 3000))
WIRE(wire_stall, .stall_after = at)
WIRE(wire_cut, .cut_after = at)
WIRE(wire_reset, .cut_after = at, .reset = true)
WIRE(wire_half_open, .half_open_after = at)
WIRE(wire_garbage, .garbage_at = at)
WIRE(wire_flip, .flip_at = at)
WIRE(wire_refuse, .refuse = true)
WIRE(wire_swap, .swap = true)

/* ---- all of them ---- */

enum {
    ONE = 1 << KVFT_SINGLE,
    WATCHED = 1 << KVFT_SENTINEL,
    SHARDED = 1 << KVFT_CLUSTER,
    ALL = ONE | WATCHED | SHARDED
};

static const struct {
    const char *name;
    unsigned where;
    bool (*run)(victim *);
} NEMESES[] = {
    {"kill -9", ALL, kill_9},
    {"kill -9, until a replica takes over", WATCHED | SHARDED, kill_long},
    {"SHUTDOWN and restart", ALL, shut_down},
    {"SIGSTOP, SIGCONT", ALL, stop_cont},
    {"FLUSHALL", ALL, flush_all},
    {"maxmemory: OOM", ALL, out_of_memory},
    {"maxmemory: eviction", ALL, evict},
    {"CLIENT KILL", ALL, client_kill},
    {"CLIENT PAUSE", ALL, client_pause},
    {"DEBUG SLEEP", ALL, debug_sleep},
    {"ACL change", ALL, acl_change},
    {"REPLICAOF", ONE, replica_of},
    {"snapshot fails: MISCONF", ALL, snapshot_fails},
    {"full disk under AOF", ALL, disk_full},
    {"CLUSTER FAILOVER", SHARDED, cluster_failover},
    {"slots move", SHARDED, slots_move},
    {"SENTINEL FAILOVER", WATCHED, sentinel_failover},
    {"a sentinel stands still", WATCHED, sentinel_stops},
    {"a sentinel is killed", WATCHED, sentinel_killed},
    {"wire: latency", ALL, wire_latency},
    {"wire: bandwidth", ALL, wire_bandwidth},
    {"wire: slices", ALL, wire_slices},
    {"wire: stall", ALL, wire_stall},
    {"wire: cut", ALL, wire_cut},
    {"wire: reset", ALL, wire_reset},
    {"wire: half-open", ALL, wire_half_open},
    {"wire: garbage", ALL, wire_garbage},
    {"wire: a bit flips", ALL, wire_flip},
    {"wire: refused", ALL, wire_refuse},
    {"wire: replies swapped", ALL, wire_swap},
};
enum { NUM_NEMESES = sizeof NEMESES / sizeof *NEMESES };
_Static_assert(NUM_NEMESES <= KVFT_MAX_NEMESES, "room for their counts");

const char *kvft_nemesis_name(int number) {
    return number < NUM_NEMESES ? NEMESES[number].name : NULL;
}

static int pick_master(kvft_world *w, uint64_t *random) {
    int first = (int)(kvft_random(random) % (uint64_t)w->num_data);
    for (int i = 0; i < w->num_data; i++) {
        int number = (first + i) % w->num_data;
        if (is_master(w->data[number])) {
            return number;
        }
    }
    return first;
}

int kvft_world_torment(kvft_world *w, int wish, uint64_t *random) {
    for (int tries = 0; tries < 1000; tries++) {
        int any = (int)(kvft_random(random) % NUM_NEMESES);
        int which = tries == 0 && wish >= 0 ? wish % NUM_NEMESES : any;
        long ms = 20 + (long)(kvft_random(random) % 480);
        victim v = {.world = w, .ms = ms, .random = random};
        if ((NEMESES[which].where >> w->kind & 1) == 0) {
            continue;
        }
        v.number = pick_master(w, random);
        v.server = w->data[v.number];
        if (NEMESES[which].run(&v)) {
            return which;
        }
        kvft_world_heal(w);
    }
    die("no fault", "can be done");
    return 0;
}

/* ---- the worlds ---- */

static int tcp_port(const kvft_proxy *proxy) {
    return atoi(strrchr(kvft_proxy_tcp_url(proxy), ':') + 1);
}

static void announce(kvft_world *w) {
    for (int i = 0; w->kind == KVFT_CLUSTER && i < w->num_proxies; i++) {
        (void)say(w->data[i], "CONFIG SET cluster-announce-port %d", tcp_port(w->proxies[i]));
    }
}

static void set_up_cluster(kvft_world *w) {
    w->num_data = 2 * KVFT_SHARDS;
    w->num_proxies = KVFT_SHARDS;
    for (int i = 0; i < w->num_data; i++) {
        w->data[i] = w->cluster->nodes[i];
    }
    for (int i = 0; i < KVFT_SHARDS; i++) {
        w->proxies[i] = kvft_proxy_start(w->data[i]->socket);
    }
    snprintf(w->url, sizeof w->url, "redis+cluster://127.0.0.1:%d,127.0.0.1:%d", tcp_port(w->proxies[0]),
             tcp_port(w->proxies[1]));
}

static void set_up_sentinels(kvft_world *w) {
    w->num_data = 2;
    w->num_proxies = 1;
    w->data[0] = w->sentinels->data[0];
    w->data[1] = w->sentinels->data[1];
    w->proxies[0] = kvft_proxy_start(w->sentinels->watch[0]->socket);
    snprintf(w->url, sizeof w->url, "redis+sentinel://127.0.0.1:%d,127.0.0.1:%d/mymaster", tcp_port(w->proxies[0]),
             w->sentinels->watch[1]->port);
}

static void set_up_single(kvft_world *w) {
    w->num_data = w->num_proxies = 1;
    w->proxies[0] = kvft_proxy_start(w->data[0]->socket);
    snprintf(w->url, sizeof w->url, "%s", kvft_proxy_tcp_url(w->proxies[0]));
}

kvft_world *kvft_world_start(kvft_world_kind kind) {
    kvft_world *w = calloc(1, sizeof *w);
    if (w == NULL) {
        die("no memory", "");
    }
    w->kind = kind;
    if (kind == KVFT_CLUSTER && (w->cluster = kvft_cluster_start(true)) != NULL) {
        set_up_cluster(w);
    } else if (kind == KVFT_SENTINEL && (w->sentinels = kvft_sentinels_start()) != NULL) {
        set_up_sentinels(w);
    } else if (kind == KVFT_SINGLE && (w->data[0] = kvft_server_start(NULL)) != NULL) {
        set_up_single(w);
    } else {
        free(w);
        return NULL;
    }
    kvft_world_heal(w);
    return w;
}

void kvft_world_stop(kvft_world *w) {
    for (int i = 0; i < w->num_proxies; i++) {
        kvft_proxy_stop(w->proxies[i]);
    }
    if (w->kind == KVFT_CLUSTER) {
        kvft_cluster_stop(w->cluster);
    } else if (w->kind == KVFT_SENTINEL) {
        kvft_sentinels_stop(w->sentinels);
    } else {
        kvft_server_stop(w->data[0]);
    }
    free(w);
}

static bool follows(kvft_server *replica) {
    return info_has(replica, "replication", "role:slave") && info_has(replica, "replication", "master_link_status:up");
}

static long long epoch_of(kvft_server *server) {
    char *said = kvft_server_ask(server, "CLUSTER INFO");
    const char *at = said != NULL ? strstr(said, "cluster_current_epoch:") : NULL;
    long long epoch = at != NULL ? atoll(at + 22) : -1;
    free(said);
    return epoch;
}

static bool is_whole_cluster(kvft_world *w) {
    for (int i = 0; i < w->num_data; i++) {
        if (!kvft_cluster_is_ok(w->cluster, i) || epoch_of(w->data[i]) != epoch_of(w->data[0])) {
            return false;
        }
    }
    for (int i = 0; i < KVFT_SHARDS; i++) {
        kvft_server *a = w->data[i], *b = w->data[i + KVFT_SHARDS];
        if (!(is_master(a) && follows(b)) && !(is_master(b) && follows(a))) {
            return false;
        }
    }
    return true;
}

/* A master that came back after its replica took over would be told so by the sentinels after ten seconds; an
 * operator's script is faster. */
static bool is_whole_set(kvft_world *w) {
    int port = kvft_sentinels_master(w->sentinels);
    int number = w->data[0]->port == port ? 0 : 1;
    kvft_server *master = w->data[number], *other = w->data[1 - number];
    if (!is_master(master)) {
        return false;
    }
    if (is_master(other)) {
        (void)say(other, "REPLICAOF 127.0.0.1 %d", master->port);
        return false;
    }
    for (int i = 1; i < 3; i++) {
        char *said = kvft_server_ask(w->sentinels->watch[i], "SENTINEL GET-MASTER-ADDR-BY-NAME mymaster");
        const char *line = said != NULL ? strchr(said, '\n') : NULL;
        bool same = line != NULL && atoi(line + 1) == port;
        free(said);
        if (!same) {
            return false;
        }
    }
    return follows(other);
}

void kvft_world_heal(kvft_world *w) {
    announce(w);
    for (int waited = 0;; waited += 20) {
        for (int i = 0; i < w->num_data; i++) {
            (void)kvft_server_revive(w->data[i]);
        }
        bool whole = w->kind == KVFT_CLUSTER    ? is_whole_cluster(w)
                     : w->kind == KVFT_SENTINEL ? is_whole_set(w)
                                                : is_master(w->data[0]);
        if (whole) {
            return;
        }
        if (waited > PATIENCE_MS) {
            for (int i = 0; i < w->num_data; i++) {
                char *said =
                    kvft_server_ask(w->data[i], w->kind == KVFT_CLUSTER ? "CLUSTER NODES" : "INFO replication");
                fprintf(stderr, "%s\n%s\n", w->data[i]->dir, said);
                free(said);
            }
            die("the servers", "they do not get well again");
        }
        kvft_nap_ms(20);
    }
}
