/* SPDX-License-Identifier: Apache-2.0 */
#include "redis/redis.h"

#include <stdarg.h>

uint64_t kvfi_redis_ttl_ms(const kvfi_redis *tier, const kvfi_addr *addr) {
    /* The key is a hash: two bytes of it are as good as chance, and the same for all parts of a value. */
    uint64_t ttl_ms = (uint64_t)tier->conf.ttl_s * 1000;
    uint64_t chance = (uint64_t)addr->key.bytes[30] << 8 | addr->key.bytes[31];
    return ttl_ms - ttl_ms / 10 + ttl_ms / 5 * chance / UINT16_MAX;
}

static void give_up(kvfi_feed *feed, kvf_reason why) {
    for (kvfi_item *item = kvfi_feed_draw(feed); item != NULL; item = kvfi_feed_draw(feed)) {
        kvfi_feed_done(feed, item, KVF_MISS, why);
    }
}

/* Runs the exchange on a connection. True when the feed gives no more. */
static bool run_once(kvfi_redis *tier, kvfi_node *node, kvfi_conn *conn, kvfi_feed *feed, kvfi_exchange *exchange,
                     bool asking) {
    conn->asking = asking;
    conn->refuses = false;
    bool done = exchange(tier, conn, feed);
    conn->asking = false;
    if (tier->topology == NULL && strncmp(conn->said, "READONLY", 8) == 0) {
        kvfi_node_renew(node, conn);
    }
    return done;
}

/* The same for saves, where they may go. KVF_WHY_UNREACHABLE: the connection is gone. */
static kvf_reason save_once(kvfi_redis *tier, kvfi_node *node, kvfi_conn *conn, kvfi_feed *feed,
                            kvfi_exchange *exchange, bool asking, bool *done) {
    *done = false;
    kvf_reason why = kvfi_redis_may_save(tier, node, conn, feed->deadline_us);
    if (why != KVF_WHY_NONE) {
        return why;
    }
    conn->room = kvfi_node_admission(node).bounded ? &node->room : NULL;
    conn->loads = &node->loads;
    *done = run_once(tier, node, conn, feed, exchange, asking);
    if (*done || conn->refuses) {
        kvfi_node_note_saves(node, conn->refuses);
    }
    *done = *done && kvfi_feed_is_dry(feed); /* loads went first, or it is to be asked for more room */
    return conn->refuses ? KVF_WHY_BREAKER : KVF_WHY_NONE;
}

kvf_reason kvfi_redis_run_on(kvfi_redis *tier, kvfi_node *node, kvfi_feed *feed, kvfi_lane_kind lane,
                             kvfi_exchange *exchange, bool asking) {
    bool done = false;
    unsigned lost = 0; /* connections, before anything went over them */
    while (!done && !kvfi_feed_is_dry(feed)) {
        kvfi_conn *conn = NULL;
        if (lane == KVFI_LANE_STORE) {
            kvfi_node_yield(node);
        }
        kvf_reason why = kvfi_node_take(node, &conn, NULL, lane, feed, feed->deadline_us);
        if (why != KVF_WHY_NONE) {
            return why;
        }
        if (lane == KVFI_LANE_STORE) {
            why = save_once(tier, node, conn, feed, exchange, asking, &done);
        } else {
            done = run_once(tier, node, conn, feed, exchange, asking);
        }
        kvfi_node_give(node, lane, conn);
        if (why != KVF_WHY_NONE && (why != KVF_WHY_UNREACHABLE || ++lost > 1)) {
            return why;
        }
    }
    return KVF_WHY_NONE;
}

kvf_reason kvfi_redis_run(kvfi_redis *tier, kvfi_feed *feed, kvfi_lane_kind lane, kvfi_exchange *exchange) {
    kvf_reason why = kvfi_redis_run_on(tier, &tier->node, feed, lane, exchange, false);
    if (why != KVF_WHY_NONE) {
        give_up(feed, why);
        return why;
    }
    return kvfi_sys->now_us() >= feed->deadline_us ? KVF_WHY_BUDGET : KVF_WHY_UNREACHABLE;
}

/* ---- talking ---- */

#define MAX_TRIES 5u

kvf_status kvfi_talk_begin_on(kvfi_talk *talk, kvfi_redis *tier, kvf_error *err, kvfi_node *node, kvfi_lane_kind lane,
                              int64_t deadline_us) {
    kvf_error own = {.status = KVF_IO};
    *talk = (kvfi_talk){.tier = tier, .node = node, .lane = lane, .err = err, .deadline_us = deadline_us};
    if (kvfi_node_take(node, &talk->conn, &own, lane, NULL, deadline_us) == KVF_WHY_NONE) {
        return KVF_OK;
    }
    return kvfi_fail(err, own.status == KVF_MISS ? KVF_IO : own.status, "%s", own.what);
}

kvf_status kvfi_talk_begin(kvfi_talk *talk, kvfi_redis *tier, kvf_error *err, uint16_t slot, kvfi_lane_kind lane,
                           int64_t deadline_us) {
    if (tier->topology == NULL) {
        return kvfi_talk_begin_on(talk, tier, err, &tier->node, lane, deadline_us);
    }
    if (talk->ask != NULL) {
        KVFI_TRY(kvfi_talk_begin_on(talk, tier, err, talk->ask, lane, deadline_us));
        talk->conn->asking = true;
        return KVF_OK;
    }
    kvfi_node *node = kvfi_topology_node(tier->topology, slot);
    kvf_status status = KVF_IO;
    *talk = (kvfi_talk){.tier = tier};
    if (node != NULL) {
        status = kvfi_talk_begin_on(talk, tier, err, node, lane, deadline_us);
    }
    if (status == KVF_IO) {
        /* It may have moved; only then is it worth another try. */
        kvfi_node *before = node;
        kvfi_topology_refresh(tier->topology, deadline_us);
        node = kvfi_topology_node(tier->topology, slot);
        if (node == NULL) {
            return kvfi_fail(err, KVF_IO, "%s: no server has that slot, as far as is known", tier->conf.text);
        }
        if (node != before) {
            status = kvfi_talk_begin_on(talk, tier, err, node, lane, deadline_us);
        }
    }
    return status;
}

bool kvfi_talk_again(const kvfi_talk *talk, unsigned *tries) {
    bool enough = ++*tries > MAX_TRIES;
    if (!talk->astray || (enough && (talk->ask != NULL || !talk->moving))) {
        return false;
    }
    if (talk->ask != NULL) {
        return kvfi_sys->now_us() < talk->deadline_us;
    }
    int wait_ms = 10 << (enough ? MAX_TRIES : *tries); /* 20 to 320 ms: what moves is about to have moved */
    if (kvfi_sys->now_us() + (int64_t)wait_ms * 1000 >= talk->deadline_us) {
        return false;
    }
    (void)kvfi_sys->poll(NULL, 0, wait_ms);
    if (talk->tier->topology != NULL) {
        kvfi_topology_refresh(talk->tier->topology, talk->deadline_us);
    }
    return true;
}

size_t kvfi_redis_nodes(kvfi_redis *tier, kvfi_node **out, size_t cap) {
    if (tier->topology == NULL) {
        out[0] = &tier->node;
        return 1;
    }
    size_t num = kvfi_topology_primaries(tier->topology, out, cap);
    if (num == 0) {
        kvfi_topology_refresh(tier->topology, kvfi_deadline((int64_t)tier->conf.connect_ms * 1000));
        num = kvfi_topology_primaries(tier->topology, out, cap);
    }
    return num;
}

void kvfi_talk_end(kvfi_talk *talk) {
    if (talk->conn != NULL) {
        if (talk->unheard > 0) {
            kvfi_conn_close(talk->conn); /* what is still to come would be taken for the answers to something else */
        }
        talk->conn->asking = false;
        kvfi_node_give(talk->node, talk->lane, talk->conn);
        talk->conn = NULL;
    }
}

static kvf_status lost(kvfi_talk *talk) {
    return kvfi_fail(talk->err, KVF_IO, "%s: %s", talk->tier->conf.text, talk->conn->said);
}

/* Room for one more command, waiting for it if need be. */
static kvf_status make_room(kvfi_talk *talk, size_t bytes) {
    kvf_reason why = KVF_WHY_NONE;
    while (why == KVF_WHY_NONE && kvfi_conn_room(talk->conn, bytes) == NULL) {
        why = kvfi_conn_send(talk->conn);
        if (why == KVF_WHY_NONE && kvfi_conn_room(talk->conn, bytes) == NULL) {
            why = kvfi_conn_wait(talk->conn, talk->deadline_us);
        }
    }
    return why == KVF_WHY_NONE ? KVF_OK : lost(talk);
}

kvf_status kvfi_talk_say(kvfi_talk *talk, ...) {
    va_list args, again;
    size_t num = 0, bytes = 64; /* an ASKING included */
    va_start(args, talk);
    va_copy(again, args);
    for (const char *text = va_arg(args, const char *); text != NULL; text = va_arg(args, const char *)) {
        num++;
        bytes += strlen(text) + 24;
    }
    va_end(args);
    kvf_status status = make_room(talk, bytes);
    if (status == KVF_OK) {
        if (talk->conn->asking) {
            kvfi_cmd_array(&talk->conn->out, 1);
            kvfi_cmd_text(&talk->conn->out, "ASKING");
            talk->unheard++;
        }
        kvfi_cmd_array(&talk->conn->out, num);
        talk->unheard++;
        for (size_t i = 0; i < num; i++) {
            kvfi_cmd_text(&talk->conn->out, va_arg(again, const char *));
        }
    }
    va_end(again);
    return status;
}

static kvf_status hear(kvfi_talk *talk, kvfi_reply *reply) {
    if (kvfi_conn_next(talk->conn, reply, talk->deadline_us) != KVF_WHY_NONE) {
        return lost(talk);
    }
    talk->unheard -= reply->last;
    return KVF_OK;
}

kvf_status kvfi_talk_expect(kvfi_talk *talk) {
    kvfi_reply reply;
    if (!talk->conn->asking || talk->half) {
        return KVF_OK;
    }
    talk->half = true;
    return hear(talk, &reply);
}

kvf_status kvfi_talk_hear(kvfi_talk *talk, kvfi_reply *reply) {
    KVFI_TRY(kvfi_talk_expect(talk));
    KVFI_TRY(hear(talk, reply));
    talk->half = !reply->last;
    return KVF_OK;
}

kvf_status kvfi_talk_refused(kvfi_talk *talk, const kvfi_reply *reply, const char *doing) {
    if (reply->kind == KVFI_RESP_ERROR) {
        char rule[96];
        if (talk->tier->topology != NULL &&
            kvfi_redis_learn(talk->tier, talk->node, reply, &talk->ask) != KVFI_FATE_OVER) {
            talk->astray = true;
            talk->moving = kvfi_reply_says(reply, "ASK ") || kvfi_reply_says(reply, "TRYAGAIN");
        }
        if (talk->tier->topology == NULL && kvfi_reply_says(reply, "READONLY")) {
            kvfi_node_renew(talk->node, talk->conn);
            talk->astray = true;
        }
        if (kvfi_reply_says(reply, "NOPERM")) {
            kvfi_acl_rule(rule, talk->conn->said, talk->tier->conf.prefix);
            return kvfi_fail(talk->err, KVF_CONFIG, "%.80s: %s: the user lacks a permission: add %s to its ACL",
                             talk->tier->conf.text, doing, rule);
        }
        kvf_status status = KVF_IO;
        return kvfi_fail(talk->err, status, "%s: %s: %s", talk->tier->conf.text, doing, talk->conn->said);
    }
    (void)kvfi_conn_broken(talk->conn, "the server gave an answer of the wrong kind");
    return kvfi_fail(talk->err, KVF_IO, "%s: %s: %s", talk->tier->conf.text, doing, talk->conn->said);
}

/* ---- opening and closing ---- */

static void close_tier(kvfi_tier *base) {
    kvfi_redis *tier = kvfi_redis_of(base);
    kvfi_topology_free(tier->topology);
    kvfi_node_cleanup(&tier->node);
    kvfi_tls_close(tier->conf.tls);
    kvfi_url_free(base->url);
    kvfi_free(tier);
}

static const kvfi_tier_ops ops = {
    .get = kvfi_redis_get,
    .put = kvfi_redis_put,
    .peek = kvfi_redis_peek,
    .remove = kvfi_redis_remove,
    .walk = kvfi_redis_walk,
    .clear = kvfi_redis_clear,
    .session_put = kvfi_redis_session_put,
    .session_sizes = kvfi_redis_session_sizes,
    .session_get = kvfi_redis_session_get,
    .session_remove = kvfi_redis_session_remove,
    .session_max_part = kvfi_redis_session_max_part,
    .doctor = kvfi_redis_doctor,
    .info = kvfi_redis_info,
    .close = close_tier,
};

static const kvfi_tier_ops spread_ops = {
    .get = kvfi_redis_spread_get,
    .put = kvfi_redis_spread_put,
    .spread = kvfi_redis_spread,
    .peek = kvfi_redis_spread_peek,
    .remove = kvfi_redis_remove,
    .walk = kvfi_redis_walk,
    .clear = kvfi_redis_clear,
    .session_put = kvfi_redis_session_put,
    .session_sizes = kvfi_redis_session_sizes,
    .session_get = kvfi_redis_session_get,
    .session_remove = kvfi_redis_session_remove,
    .session_max_part = kvfi_redis_session_max_part,
    .doctor = kvfi_redis_doctor,
    .info = kvfi_redis_info,
    .close = close_tier,
};

#define MAX_THREADS 16u

static kvf_status open_topology(kvfi_redis *tier, kvf_error *err) {
    tier->base.ops = &spread_ops;
    return kvfi_topology_open(&tier->topology, err, &tier->conf, tier->base.url, &tier->base.connects,
                              &tier->base.disconnects);
}

/* Makes use of as many threads as there are connections. A Cluster that is away has three shards, for now. */
static void count_threads(kvfi_redis *tier) {
    kvfi_node *nodes[KVFI_MAX_NODES];
    if (tier->topology == NULL) {
        tier->base.get_threads = tier->conf.conns;
        tier->base.put_threads = tier->conf.save_conns;
        return;
    }
    size_t num = kvfi_topology_primaries(tier->topology, nodes, KVFI_MAX_NODES);
    if (num < 3 && tier->conf.kind == KVFI_REDIS_CLUSTER) {
        num = 3;
    }
    num = num == 0 ? 1 : num;
    uint64_t threads = num * tier->conf.conns;
    tier->base.get_threads = tier->base.put_threads = threads < MAX_THREADS ? (uint32_t)threads : MAX_THREADS;
}

/* Connects once, so that what the operator must change is said now. A server that is away is no such thing. The
 * connection stays, for the first lookup. */
static kvf_status try_server(kvfi_redis *tier, kvf_error *err) {
    kvf_error own = {.status = KVF_OK};
    kvfi_conn *conn = NULL;
    int64_t deadline_us = kvfi_deadline((int64_t)tier->conf.connect_ms * 1000);
    kvf_reason why = kvfi_node_take(&tier->node, &conn, &own, KVFI_LANE_LOOKUP, NULL, deadline_us);
    if (why == KVF_WHY_NONE) {
        kvfi_node_give(&tier->node, KVFI_LANE_LOOKUP, conn);
        return KVF_OK;
    }
    if (own.status == KVF_CONFIG || own.status == KVF_NOMEM) {
        return kvfi_fail(err, own.status, "%s", own.what);
    }
    kvfi_log(KVF_LOG_WARN, "%s; it is tried again when it is needed", own.what);
    return KVF_OK;
}

kvf_status kvfi_redis_open(kvfi_tier **out, kvf_error *err, kvfi_url *url) {
    kvfi_redis *tier = kvfi_alloc_zero(1, sizeof *tier);
    if (tier == NULL) {
        kvfi_url_free(url);
        return kvfi_fail(err, KVF_NOMEM, "no memory for the store");
    }
    tier->base.ops = &ops;
    tier->base.url = url;
    kvf_status status = kvfi_redis_conf_read(&tier->conf, err, url);
    tier->asked = tier->conf;
    if (status == KVF_OK && tier->conf.tls_conf.on) {
        status = kvfi_tls_open(&tier->conf.tls, err, &tier->conf.tls_conf);
    }
    kvfi_node_init(&tier->node, &tier->conf, &tier->conf.server, NULL, &tier->base.connects, &tier->base.disconnects);
    if (status == KVF_OK) {
        status = tier->conf.kind == KVFI_REDIS_ONE ? try_server(tier, err) : open_topology(tier, err);
    }
    if (status == KVF_OK) {
        status = kvfi_redis_admit(tier, err);
    }
    if (status == KVF_OK) {
        count_threads(tier);
    }
    if (status != KVF_OK) {
        close_tier(&tier->base);
        return status;
    }
    *out = &tier->base;
    return KVF_OK;
}
