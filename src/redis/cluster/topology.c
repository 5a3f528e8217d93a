/* SPDX-License-Identifier: Apache-2.0
 *
 * Learns which server has which slot: a single server, the master that sentinels name, or the nodes of a Cluster.
 */
#include "redis/cluster/topology.h"

#include <stdio.h>

#include "base/interrupt.h"

/* ---- members; under the lock ---- */

static kvfi_node *new_node(kvfi_topology *t, const kvfi_redis_conf *conf, const char *host, uint16_t port,
                           const char *name) {
    kvfi_node *node = kvfi_alloc_zero(1, sizeof *node);
    kvfi_endpoint server = {.port = port};
    if (node == NULL) {
        return NULL;
    }
    snprintf(server.host, sizeof server.host, "%s", host);
    kvfi_node_init(node, conf, &server, name, t->connects, t->disconnects);
    return node;
}

static void free_node(kvfi_node *node) {
    if (node != NULL) {
        kvfi_node_cleanup(node);
        kvfi_free(node);
    }
}

/* Does the member have that address? With TLS also that name, if one was announced. */
static bool is_member(const kvfi_node *node, const char *host, uint16_t port, const char *name) {
    bool named = name == NULL || node->conf->tls == NULL || node->conf->tls_conf.server_name != NULL;
    return node->server.port == port && strcmp(node->server.host, host) == 0 &&
           (named || strcmp(node->name, name) == 0);
}

/* The number of the member with that address, which may be new; KVF_NO_OWNER if there is no room. `name`: its host
 * name, or NULL. Among members with the same address the last is right: it may have been given a name. */
static uint16_t member(kvfi_topology *t, const char *host, uint16_t port, const char *name) {
    for (size_t i = t->num_members; i-- > 0;) {
        if (is_member(t->members[i], host, port, name)) {
            return (uint16_t)i;
        }
    }
    if (t->num_members == KVFI_MAX_MEMBERS) {
        return KVFI_NO_OWNER;
    }
    kvfi_node *node = new_node(t, t->conf, host, port, name);
    if (node == NULL) {
        return KVFI_NO_OWNER;
    }
    t->members[t->num_members] = node;
    return (uint16_t)t->num_members++;
}

/* The primaries have changed: former ones need no connections. Returns their number. */
static size_t sift(kvfi_topology *t, kvfi_node *gone[KVFI_MAX_MEMBERS]) {
    bool had[KVFI_MAX_MEMBERS];
    size_t num = 0;
    memcpy(had, t->primary, sizeof had);
    memset(t->primary, 0, sizeof t->primary);
    for (size_t slot = 0; slot < KVFI_NUM_SLOTS; slot++) {
        if (t->owner[slot] != KVFI_NO_OWNER) {
            t->primary[t->owner[slot]] = true;
        }
    }
    for (size_t i = 0; i < t->num_members; i++) {
        if (had[i] && !t->primary[i]) {
            gone[num++] = t->members[i];
        }
    }
    return num;
}

/* Installs a new map. */
static void install(kvfi_topology *t, const kvfi_slots *slots, const kvfi_node *from) {
    kvfi_node *gone[KVFI_MAX_MEMBERS];
    uint16_t numbers[KVFI_MAX_NODES];
    pthread_mutex_lock(&t->lock);
    for (unsigned i = 0; i < slots->num_hosts; i++) {
        const kvfi_host *host = &slots->hosts[i];
        if (host->empty && host->port != from->server.port) {
            numbers[i] = KVFI_NO_OWNER;
            continue;
        }
        const char *name = host->alias[0] != '\0' ? host->alias : host->name[0] == '\0' ? from->name : NULL;
        numbers[i] = member(t, host->name[0] != '\0' ? host->name : from->server.host, host->port, name);
    }
    for (size_t slot = 0; slot < KVFI_NUM_SLOTS; slot++) {
        t->owner[slot] = slots->owner[slot] == KVFI_NO_OWNER ? KVFI_NO_OWNER : numbers[slots->owner[slot]];
    }
    size_t num = sift(t, gone);
    pthread_mutex_unlock(&t->lock);
    for (size_t i = 0; i < num; i++) {
        kvfi_node_trim(gone[i]);
    }
}

/* ---- asking one server ---- */

static kvf_status hear(kvfi_conn *conn, kvfi_reply *reply, kvf_error *err, const kvfi_node *node, int64_t deadline_us) {
    if (kvfi_conn_next(conn, reply, deadline_us) != KVF_WHY_NONE) {
        return kvfi_fail(err, KVF_MISS, "%s: %s", node->conf->text, conn->said);
    }
    return KVF_OK;
}

static kvf_status refused(kvfi_conn *conn, const kvfi_reply *reply, kvf_error *err, const kvfi_node *node,
                          const char *command) {
    bool config = reply->kind == KVFI_RESP_ERROR && (kvfi_reply_says(reply, "NOPERM") ||
                                                     kvfi_reply_says(reply, "NOAUTH") || kvfi_reply_says(reply, "ERR"));
    const char *said = reply->kind == KVFI_RESP_ERROR ? conn->said : "an answer of the wrong kind";
    if (reply->kind == KVFI_RESP_ERROR && kvfi_reply_says(reply, "NOPERM")) {
        char rule[96];
        kvfi_acl_rule(rule, said, node->conf->prefix);
        return kvfi_fail(err, KVF_CONFIG,
                         "%.80s: %s: the user lacks a permission: add %s to its ACL (docs/stores-redis.md lists all)",
                         node->conf->text, command, rule);
    }
    return kvfi_fail(err, config ? KVF_CONFIG : KVF_MISS, "%s: %s: %s", node->conf->text, command, said);
}

static void say(kvfi_conn *conn, const char *const *words, size_t num) {
    kvfi_cmd *out = kvfi_conn_room(conn, KVFI_CONN_OUT / 2); /* nothing else is under way: there is room */
    kvfi_cmd_array(out, num);
    for (size_t i = 0; i < num; i++) {
        kvfi_cmd_text(out, words[i]);
    }
}

static kvf_status ask_slots(kvfi_topology *t, kvfi_conn *conn, kvf_error *err, kvfi_node *node, int64_t deadline_us) {
    static const char *const words[] = {"CLUSTER", "SLOTS"};
    kvfi_slots *slots = kvfi_alloc(sizeof *slots);
    kvfi_reply reply = {.last = false};
    kvf_status status = KVF_OK;
    if (slots == NULL) {
        return kvfi_fail(err, KVF_NOMEM, "no memory for the map of a Cluster");
    }
    kvfi_slots_init(slots);
    say(conn, words, 2);
    while (status == KVF_OK && !reply.last) {
        status = hear(conn, &reply, err, node, deadline_us);
        if (status == KVF_OK && !kvfi_slots_take(slots, &reply)) {
            status = refused(conn, &reply, err, node, "CLUSTER SLOTS");
        }
    }
    if (status == KVF_OK && slots->num_hosts == 0) {
        status =
            kvfi_fail(err, KVF_MISS, "%s: the Cluster has not assigned its slots to servers yet", node->conf->text);
    }
    if (status == KVF_OK) {
        install(t, slots, node);
    }
    kvfi_free(slots);
    return status;
}

/* A reply that is an array of short strings, of which the first two are kept. */
static kvf_status hear_two(kvfi_conn *conn, char first[256], char second[256], kvf_error *err, const kvfi_node *node,
                           const char *command, int64_t deadline_us) {
    kvfi_reply reply = {.last = false};
    first[0] = second[0] = '\0';
    KVFI_TRY(hear(conn, &reply, err, node, deadline_us));
    if (reply.kind == KVFI_RESP_NIL) {
        return kvfi_fail(err, KVF_CONFIG, "%s: the sentinels know no master of that name", node->conf->text);
    }
    if (reply.kind != KVFI_RESP_ARRAY || reply.num < 1) {
        return refused(conn, &reply, err, node, command);
    }
    for (unsigned i = 0; !reply.last; i++) {
        KVFI_TRY(hear(conn, &reply, err, node, deadline_us));
        if (i < 2 && reply.kind == KVFI_RESP_BULK && reply.len < 256) {
            char *to = i == 0 ? first : second;
            memcpy(to, reply.text, reply.len);
            to[reply.len] = '\0';
        }
    }
    return KVF_OK;
}

/* Closes a connection with outstanding replies. */
static void give(kvfi_node *node, kvfi_conn *conn, kvf_status status) {
    if (status != KVF_OK) {
        kvfi_conn_close(conn);
    }
    kvfi_node_give(node, KVFI_LANE_LOOKUP, conn);
}

static kvf_status take(kvfi_node *node, kvfi_conn **conn, kvf_error *err, int64_t deadline_us) {
    kvf_error own = {.status = KVF_MISS};
    if (kvfi_node_take_sure(node, conn, &own, KVFI_LANE_LOOKUP, deadline_us) == KVF_WHY_NONE) {
        return KVF_OK;
    }
    return kvfi_fail(err, own.status == KVF_OK ? KVF_MISS : own.status, "%s", own.what);
}

/* Sentinels may name a master that no longer is one: only its own word counts. */
static kvf_status check_role(kvf_error *err, kvfi_node *node, int64_t deadline_us) {
    static const char *const words[] = {"ROLE"};
    kvfi_conn *conn = NULL;
    char role[256], rest[256];
    KVFI_TRY(take(node, &conn, err, deadline_us));
    say(conn, words, 1);
    kvf_status status = hear_two(conn, role, rest, err, node, "ROLE", deadline_us);
    give(node, conn, status);
    if (status == KVF_OK && strcmp(role, "master") != 0) {
        return kvfi_fail(err, KVF_MISS, "%s: the server that the sentinels name is a %s", node->conf->text, role);
    }
    return status;
}

static kvf_status ask_master(kvfi_topology *t, kvfi_conn *conn, kvf_error *err, kvfi_node *sentinel,
                             int64_t deadline_us) {
    const char *const words[] = {"SENTINEL", "GET-MASTER-ADDR-BY-NAME", t->conf->master};
    char host[256], text[256];
    uint64_t port = 0;
    say(conn, words, 3);
    KVFI_TRY(hear_two(conn, host, text, err, sentinel, words[1], deadline_us));
    if (host[0] == '\0' || !kvfi_parse_u64(&port, text, strlen(text)) || port == 0 || port > UINT16_MAX) {
        return kvfi_fail(err, KVF_MISS, "%s: a sentinel gave no address of the master", sentinel->conf->text);
    }
    pthread_mutex_lock(&t->lock);
    uint16_t number = member(t, host, (uint16_t)port, NULL);
    kvfi_node *node = number != KVFI_NO_OWNER ? t->members[number] : NULL;
    pthread_mutex_unlock(&t->lock);
    if (node == NULL) {
        return kvfi_fail(err, KVF_NOMEM, "no memory for another server");
    }
    KVFI_TRY(check_role(err, node, deadline_us));
    kvfi_node *gone[KVFI_MAX_MEMBERS];
    pthread_mutex_lock(&t->lock);
    for (size_t slot = 0; slot < KVFI_NUM_SLOTS; slot++) {
        t->owner[slot] = number;
    }
    size_t num = sift(t, gone);
    pthread_mutex_unlock(&t->lock);
    for (size_t i = 0; i < num; i++) {
        kvfi_node_trim(gone[i]);
    }
    return KVF_OK;
}

static kvf_status ask(kvfi_topology *t, kvf_error *err, kvfi_node *node, int64_t deadline_us) {
    kvfi_conn *conn = NULL;
    KVFI_TRY(take(node, &conn, err, deadline_us));
    bool sentinel = t->conf->kind == KVFI_REDIS_SENTINEL;
    kvf_status status =
        sentinel ? ask_master(t, conn, err, node, deadline_us) : ask_slots(t, conn, err, node, deadline_us);
    give(node, conn, status);
    return status;
}

/* ---- refreshing ---- */

/* The member to ask after number `at`: NULL after the last. First those that have slots, then those in the URL. */
static kvfi_node *candidate(kvfi_topology *t, size_t at, size_t *number) {
    if (t->conf->kind == KVFI_REDIS_SENTINEL) {
        *number = (t->asked + at) % t->num_sentinels;
        return at < t->num_sentinels ? t->sentinels[*number] : NULL;
    }
    kvfi_node *node = NULL;
    pthread_mutex_lock(&t->lock);
    size_t num = t->num_members;
    *number = at < num ? (t->asked + at) % num : at - num;
    bool first = at < num;
    if (at < num + t->num_seeds && t->primary[*number] == first) {
        node = t->members[*number];
    } else if (at < num + t->num_seeds) {
        *number = SIZE_MAX; /* not now */
    }
    pthread_mutex_unlock(&t->lock);
    return node;
}

/* Asks one after the other until one answers. The error is that of the last, or the first that an operator must fix. */
static kvf_status ask_any(kvfi_topology *t, kvf_error *err, int64_t deadline_us) {
    kvf_error worst = {.status = KVF_MISS};
    snprintf(worst.what, sizeof worst.what, "%s: nobody to ask", t->conf->text);
    for (size_t at = 0;; at++) {
        size_t number = 0;
        kvfi_node *node = candidate(t, at, &number);
        if (node == NULL && number == SIZE_MAX) {
            continue;
        }
        if (node == NULL || kvfi_sys->now_us() >= deadline_us) {
            break;
        }
        kvf_error own = {.status = KVF_OK};
        if (ask(t, &own, node, deadline_us) == KVF_OK) {
            t->asked = number; /* only the refreshing thread writes and reads this */
            return KVF_OK;
        }
        if (worst.status != KVF_CONFIG) {
            worst = own;
        }
    }
    return kvfi_fail(err, worst.status, "%s", worst.what);
}

void kvfi_topology_refresh(kvfi_topology *t, int64_t deadline_us) {
    kvf_error err = {.status = KVF_OK};
    pthread_mutex_lock(&t->lock);
    bool in_time = true;
    while (t->refreshing && in_time) {
        in_time = kvfi_cond_wait(&t->refreshed, &t->lock, deadline_us);
    }
    bool wanted = !t->refreshing && kvfi_sys->now_us() >= t->again_us;
    t->refreshing = t->refreshing || wanted;
    pthread_mutex_unlock(&t->lock);
    if (!wanted) {
        return;
    }
    kvf_status status = ask_any(t, &err, deadline_us);
    bool dropped = status != KVF_OK && kvfi_is_interrupted(); /* by its caller, which says nothing of the servers */
    if (status != KVF_OK && !dropped) {
        kvfi_log(KVF_LOG_WARN, "redis: no new map of the servers: %s", err.what);
    }
    pthread_mutex_lock(&t->lock);
    t->refreshing = false;
    if (!dropped) {
        t->trouble = status == KVF_OK ? (kvf_error){.status = KVF_OK} : err;
        t->again_us = kvfi_deadline((int64_t)KVFI_REFRESH_MS * 1000);
    }
    pthread_cond_broadcast(&t->refreshed);
    pthread_mutex_unlock(&t->lock);
}

/* ---- reading the map ---- */

kvfi_node *kvfi_topology_node(kvfi_topology *t, uint16_t slot) {
    pthread_mutex_lock(&t->lock);
    uint16_t owner = t->owner[slot];
    kvfi_node *node = owner != KVFI_NO_OWNER ? t->members[owner] : NULL;
    pthread_mutex_unlock(&t->lock);
    return node;
}

kvf_error kvfi_topology_trouble(kvfi_topology *t) {
    pthread_mutex_lock(&t->lock);
    kvf_error trouble = t->trouble;
    pthread_mutex_unlock(&t->lock);
    return trouble;
}

size_t kvfi_topology_primaries(kvfi_topology *t, kvfi_node **out, size_t cap) {
    size_t num = 0;
    pthread_mutex_lock(&t->lock);
    for (size_t i = 0; i < t->num_members && num < cap; i++) {
        if (t->primary[i]) {
            out[num++] = t->members[i];
        }
    }
    pthread_mutex_unlock(&t->lock);
    return num;
}

kvfi_node *kvfi_topology_redirect(kvfi_topology *t, const kvfi_node *from, uint16_t slot, const kvfi_host *to,
                                  bool ask) {
    kvfi_node *node = NULL;
    pthread_mutex_lock(&t->lock);
    bool same = to->name[0] == '\0';
    uint16_t number = member(t, same ? from->server.host : to->name, to->port, same ? from->name : NULL);
    if (number != KVFI_NO_OWNER) {
        node = t->members[number];
        if (!ask) {
            t->owner[slot] = number;
            t->primary[number] = true;
        }
    }
    pthread_mutex_unlock(&t->lock);
    return node;
}

/* ---- opening and closing ---- */

static kvf_status add_seeds(kvfi_topology *t, kvf_error *err) {
    bool sentinel = t->conf->kind == KVFI_REDIS_SENTINEL;
    for (size_t i = 0;; i++) {
        char host[256];
        uint16_t port = 0;
        if (kvfi_url_host(t->url, NULL, i, host, &port, sentinel ? 26379 : 6379) != KVF_OK) {
            return KVF_OK;
        }
        if (!sentinel && member(t, host, port, NULL) == KVFI_NO_OWNER) {
            return kvfi_fail(err, KVF_NOMEM, "no memory for the servers of %s", t->conf->text);
        }
        t->num_seeds = t->num_members;
        if (sentinel) {
            kvfi_node **more = kvfi_sys->resize(t->sentinels, (i + 1) * sizeof *more);
            kvfi_node *node = more != NULL ? new_node(t, &t->sentinel_conf, host, port, NULL) : NULL;
            t->sentinels = more != NULL ? more : t->sentinels;
            if (node == NULL) {
                return kvfi_fail(err, KVF_NOMEM, "no memory for the sentinels of %s", t->conf->text);
            }
            t->sentinels[t->num_sentinels++] = node;
        }
    }
}

void kvfi_topology_free(kvfi_topology *t) {
    if (t == NULL) {
        return;
    }
    for (size_t i = 0; i < t->num_members; i++) {
        free_node(t->members[i]);
    }
    for (size_t i = 0; i < t->num_sentinels; i++) {
        free_node(t->sentinels[i]);
    }
    kvfi_free(t->sentinels);
    pthread_cond_destroy(&t->refreshed);
    pthread_mutex_destroy(&t->lock);
    kvfi_free(t);
}

kvf_status kvfi_topology_open(kvfi_topology **out, kvf_error *err, const kvfi_redis_conf *conf, const kvfi_url *url,
                              _Atomic uint64_t *connects, _Atomic uint64_t *disconnects) {
    kvfi_topology *t = kvfi_alloc_zero(1, sizeof *t);
    kvf_error own = {.status = KVF_OK};
    if (t == NULL) {
        return kvfi_fail(err, KVF_NOMEM, "no memory for the store");
    }
    t->conf = conf;
    t->url = url;
    t->connects = connects;
    t->disconnects = disconnects;
    t->sentinel_conf = *conf;
    t->sentinel_conf.user = conf->sentinel_user;
    t->sentinel_conf.password = conf->sentinel_password;
    t->sentinel_conf.db = 0;
    t->sentinel_conf.conns = 1;
    memset(t->owner, 0xff, sizeof t->owner);
    pthread_mutex_init(&t->lock, NULL);
    kvfi_cond_init(&t->refreshed);
    kvf_status status = add_seeds(t, err);
    if (status == KVF_OK && ask_any(t, &own, kvfi_deadline((int64_t)conf->connect_ms * 1000)) != KVF_OK) {
        t->trouble = own;
        if (own.status == KVF_CONFIG || own.status == KVF_NOMEM) {
            status = kvfi_fail(err, own.status, "%s", own.what);
        } else {
            kvfi_log(KVF_LOG_WARN, "%s; it is tried again when it is needed", own.what);
        }
    }
    if (status != KVF_OK) {
        kvfi_topology_free(t);
        return status;
    }
    *out = t;
    return KVF_OK;
}

kvfi_fate kvfi_topology_learn(kvfi_topology *t, const kvfi_node *from, const kvfi_reply *reply, kvfi_node **ask) {
    static const char *const passing[] = {"TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY", "BUSY "};
    kvfi_host to;
    uint16_t slot = 0;
    *ask = NULL;
    kvfi_redirect_kind kind = kvfi_redirect_parse(&slot, &to, reply->text, reply->len);
    if (kind != KVFI_REDIRECT_NONE) {
        kvfi_node *node = kvfi_topology_redirect(t, from, slot, &to, kind == KVFI_REDIRECT_ASK);
        *ask = kind == KVFI_REDIRECT_ASK ? node : NULL;
        return node == NULL ? KVFI_FATE_OVER : kind == KVFI_REDIRECT_ASK ? KVFI_FATE_ASK : KVFI_FATE_MOVED;
    }
    for (size_t i = 0; i < sizeof passing / sizeof *passing; i++) {
        if (kvfi_reply_says(reply, passing[i])) {
            return KVFI_FATE_WAIT;
        }
    }
    return KVFI_FATE_OVER;
}
