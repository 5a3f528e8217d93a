/* SPDX-License-Identifier: Apache-2.0
 *
 * Opens the Redis tier and lists its operations.
 */
#include "redis/advice/advice.h"
#include "redis/blocks/blocks.h"
#include "redis/redis.h"

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
    .each = kvfi_redis_each,
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

static void spread(kvfi_tier *base, kvfi_feed *feed, kvfi_pool *pool, bool put) {
    kvfi_redis_spread(kvfi_redis_of(base), feed, pool, put ? KVFI_LANE_STORE : KVFI_LANE_LOAD,
                      put ? kvfi_redis_save_on : kvfi_redis_load_on);
}

/* On the calling thread: one server after the other. */
static void spread_get(kvfi_tier *base, kvfi_feed *feed) {
    spread(base, feed, NULL, false);
}

static void spread_put(kvfi_tier *base, kvfi_feed *feed) {
    spread(base, feed, NULL, true);
}

static const kvfi_tier_ops spread_ops = {
    .get = spread_get,
    .put = spread_put,
    .spread = spread,
    .peek = kvfi_redis_peek,
    .each = kvfi_redis_each,
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

/* Uses as many threads as there are connections. A Cluster that is down counts as three shards, for now. */
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

/* Connects once, so that what the operator must change is reported now. A server that is down is not an error. The
 * connection is kept for the first lookup. */
static kvf_status try_server(kvfi_redis *tier, kvf_error *err) {
    kvf_error own = {.status = KVF_OK};
    kvfi_conn *conn = NULL;
    int64_t deadline_us = kvfi_deadline((int64_t)tier->conf.connect_ms * 1000);
    kvf_reason why = kvfi_node_take(&tier->node, &conn, &own, KVFI_LANE_LOOKUP, NULL, true, deadline_us);
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
    tier->conf.pace = &tier->pace;
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
