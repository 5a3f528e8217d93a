/* SPDX-License-Identifier: Apache-2.0
 *
 * What the settings of a server mean for a store: at its opening, before a save, and in the doctor's words.
 */
#ifndef KVFI_REDIS_ADVICE_H
#define KVFI_REDIS_ADVICE_H

#include "redis/cluster/servers.h"

/* When a store opens, in one round trip to the first server: is the user allowed what loads and saves need (KVF_CONFIG
 * with the missing rule), and does the server have the right settings? Adapts tier->conf to its limits. A server that
 * is down is asked by the first save. */
kvf_status kvfi_redis_admit(kvfi_redis *, kvf_error *);
/* May something be saved there? Asks the server if that is not known (any more). KVF_WHY_UNREACHABLE: the connection is
 * gone. Anything but KVF_WHY_NONE has informed the node's breaker; after KVF_WHY_NONE the caller informs it of the
 * result. */
kvf_reason kvfi_redis_may_save(kvfi_redis *, kvfi_node *, kvfi_conn *, int64_t deadline_us);

/* As in kvfi_tier_ops. */
void kvfi_redis_doctor(kvfi_tier *, kvf_finding_fn, void *ctx);
void kvfi_redis_info(kvfi_tier *, kvf_tier_info *out);

#endif
