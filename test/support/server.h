/* SPDX-License-Identifier: Apache-2.0
 *
 * A private redis-server for a test: temporary folder, unix socket and TCP port on 127.0.0.1, stopped by pid. If the
 * server can't be started the test aborts with a message; NULL only if no server is installed. The binary is
 * $KVFT_SERVER, or redis-server.
 */
#ifndef KVFT_SERVER_H
#define KVFT_SERVER_H
#include <stdbool.h>
#include <sys/types.h>

#include "support/certs.h"

typedef struct kvft_server {
    pid_t pid;
    int port;
    char dir[128];      /* everything of it lies here */
    char socket[160];   /* path of the unix socket */
    char unix_url[192]; /* redis+unix://... */
    char tcp_url[96];   /* redis://127.0.0.1:port, or rediss:// */
    const char *const *args;
    char cert[128];    /* it speaks TLS on its port, and shows that certificate; "" = in plain */
    char ca[96];       /* and that CA's are those of clients */
    bool acl;          /* its URLs are those of a user with the rights of docs/redis.conf and no more */
    bool conf;         /* it is started on a file of its own, which it may rewrite (a sentinel) */
    const char *clock; /* the file by which its time runs ahead (clock_shim.c), or NULL */
} kvft_server;

/* `args`: more arguments, NULL-terminated, or NULL. Waits until it answers PING (or NOAUTH). */
kvft_server *kvft_server_start(const char *const *args);
/* The same on an empty configuration file, with hardly an argument of ours: a sentinel. */
kvft_server *kvft_server_start_conf(const char *const *args);
/* One whose time of day runs ahead as the file says (clock_shim.c, whose path is $KVFT_CLOCK_SHIM). */
kvft_server *kvft_server_start_clocked(const char *const *args, const char *clock);
/* Servers that are started from now on speak TLS on their ports, to clients, replicas and nodes of a Cluster. NULL ends
 * that. The unix socket stays without TLS. */
void kvft_server_use_tls(const kvft_certs *, const char *cert);
/* Whether one starts at all as things are set now. */
bool kvft_server_starts(void);
/* URLs of servers started from now on are of a user with exactly the rights that docs/stores-redis.md lists.
 * kvft_server_say still is a user with all rights. */
#define KVFT_ACL_USER     "kvferry"
#define KVFT_ACL_PASSWORD "live"
#define KVFT_ACL_RULES                                                                                     \
    "resetkeys ~kvf1:* ~other:* -@all +ping +select +client|setname +get +getrange +set +pexpire +unlink " \
    "+info +config|get +scan +strlen +pttl +cluster|slots +asking +role "                                  \
    "(~* +hset +hget +hstrlen +hexists +type +expire +pexpire +persist +rename +unlink +pttl)"
#define KVFT_SENTINEL_RULES "resetkeys -@all +sentinel|get-master-addr-by-name +client|setname +ping"
void kvft_server_use_acl(bool);
void kvft_server_signal(kvft_server *, int sig); /* SIGSTOP, SIGCONT, ... */
void kvft_server_kill(kvft_server *);            /* kill -9 and reap; the folder stays */
void kvft_server_restart(kvft_server *);         /* same folder, socket and port; after a kill */
/* One that ended by itself is started again, without its snapshot; returns whether it had. A replica does so when bits
 * of what its master sends it flip on the way: it finds out by the checksum of the snapshot, and ends. */
bool kvft_server_revive(kvft_server *);
void kvft_server_stop(kvft_server *); /* ends it, removes the folder, frees */
/* One command, split at blanks, by a plain blocking socket; returns the first line of the reply (static buffer). For
 * CONFIG SET and such. */
const char *kvft_server_say(kvft_server *, const char *command);
/* The strings of the reply, without their lengths: those of an array each with a newline behind it. To be freed. */
char *kvft_server_ask(kvft_server *, const char *command);
#endif
