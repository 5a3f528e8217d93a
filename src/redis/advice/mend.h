/* SPDX-License-Identifier: Apache-2.0
 *
 * Fixes of a server's settings, as something to type. In the texts of rules.c and doctor.c, {name value} is a setting
 * and [COMMAND] a command, in which @ is the user.
 */
#ifndef KVFI_REDIS_MEND_H
#define KVFI_REDIS_MEND_H

#include "redis/wire/conf.h"

#define KVFI_MEND_BYTES 1000u

/* Writes commands for redis-cli on that server, without passwords. `config` false: the server refuses CONFIG, so a
 * setting becomes a line of redis.conf. If the commands do not fit, redis-cli and the server are left out: a truncated
 * command would do something else. */
void kvfi_mend_write(char out[KVFI_MEND_BYTES], const char *mend, const kvfi_redis_conf *, const kvfi_endpoint *at,
                     bool config);

#endif
