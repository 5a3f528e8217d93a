/* SPDX-License-Identifier: Apache-2.0
 *
 * What the Redis tier does besides moving blocks: admin.c, scan.c and session.c. The rooms below it are wire (one
 * connection), cluster (servers, and which of them has a key), advice (their settings) and blocks (the hot path).
 */
#ifndef KVFI_REDIS_H
#define KVFI_REDIS_H

#include "redis/cluster/servers.h"

kvfi_tier_open kvfi_redis_open;

/* As in kvfi_tier_ops. */
kvf_status kvfi_redis_remove(kvfi_tier *, kvf_error *, const kvfi_addr *, int64_t deadline_us);
kvf_status kvfi_redis_walk(kvfi_tier *, kvf_error *, const kvf_digest *space, bool whole, kvfi_sight_fn, void *ctx,
                           int64_t step_us);
kvf_status kvfi_redis_clear(kvfi_tier *, uint64_t *removed, kvf_error *, const kvf_digest *space, int64_t step_us);

kvf_status kvfi_redis_session_put(kvfi_tier *, kvf_error *, const char *id, const kvfi_part *, size_t num,
                                  const kvfi_put_watch *, uint32_t ttl_s, int64_t deadline_us);
kvf_status kvfi_redis_session_sizes(kvfi_tier *, kvf_error *, const char *id, kvfi_part *, size_t num, int64_t *ttl_ms,
                                    int64_t deadline_us);
kvf_status kvfi_redis_session_get(kvfi_tier *, kvf_error *, const char *id, kvfi_part *, size_t num,
                                  int64_t deadline_us);
kvf_status kvfi_redis_session_remove(kvfi_tier *, kvf_error *, const char *id, int64_t deadline_us);
uint64_t kvfi_redis_session_max_part(kvfi_tier *, int64_t deadline_us);

#endif
