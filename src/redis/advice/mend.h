/* SPDX-License-Identifier: Apache-2.0
 *
 * What mends a server's settings, as something to type. In the texts of rules.c and doctor.c stand {name value} for a
 * setting and [COMMAND] for a command, in which @ is the user.
 */
#ifndef KVFI_REDIS_MEND_H
#define KVFI_REDIS_MEND_H

#include "redis/wire/conf.h"

#define KVFI_MEND_BYTES 1000u

/* Writes commands for redis-cli on that server, without passwords. `config` false: the server refuses CONFIG, so a
 * setting is a line of redis.conf. Where the commands don't fit, they come without redis-cli and the server: a command
 * that was cut short would do something else. */
void kvfi_mend_write(char out[KVFI_MEND_BYTES], const char *mend, const kvfi_redis_conf *, const kvfi_endpoint *at,
                     bool config);

#endif
