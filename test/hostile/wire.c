/* SPDX-License-Identifier: Apache-2.0
 *
 * check-hostile, a lying server in the simulated world: INFO, CONFIG, slot maps, redirects, sentinels, fields of
 * sessions, values. In a case each command lies always, sometimes, or never.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sys.h"
#include "hostile/hostile.h"
#include "prefix/prefix.h"
#include "session/session.h"
#include "support/sim.h"

#define PAYLOAD_BYTES 2000u
#define SLACK_BYTES   ((size_t)1 << 20)
#define ANSWER_MS     3000u
#define LATE_US       ((int64_t)60000000) /* of the simulated clock, for all that a case asks */

static size_t calm_bytes;

/* ---- the truth ---- */

static const char info[] = "# Server\r\nredis_version:7.0.15\r\nredis_mode:standalone\r\nos:Linux 6.1 x86_64\r\n"
                           "process_id:4711\r\nrun_id:0123456789012345678901234567890123456789\r\ntcp_port:7000\r\n"
                           "# Clients\r\nconnected_clients:3\r\nmaxclients:10000\r\n# Memory\r\nused_memory:1234567\r\n"
                           "used_memory_dataset:1000000\r\ntotal_system_memory:8000000000\r\nmaxmemory:1000000000\r\n"
                           "maxmemory_policy:allkeys-lru\r\nmem_clients_normal:2000\r\n# Persistence\r\nloading:0\r\n"
                           "aof_enabled:0\r\nrdb_last_bgsave_status:ok\r\n# Stats\r\nevicted_keys:3\r\n"
                           "# Replication\r\nrole:master\r\nconnected_slaves:0\r\n# Cluster\r\ncluster_enabled:0\r\n"
                           "# Keyspace\r\ndb0:keys=12,expires=12,avg_ttl=3000000\r\n";

static void say(kvft_buffer *reply, const char *text) {
    kvft_buffer_splice(reply, 0, reply->len, text, strlen(text));
}

static void say_bulk(kvft_buffer *reply, const void *bytes, size_t len) {
    char head[32];
    snprintf(head, sizeof head, "$%zu\r\n", len);
    say(reply, head);
    kvft_buffer_splice(reply, reply->len, 0, bytes, len);
    kvft_buffer_splice(reply, reply->len, 0, "\r\n", 2);
}

static void say_meta(kvft_buffer *reply) {
    kvfi_session_meta meta = {.num_tokens = 5, .layout = "LT"};
    uint8_t *text = NULL;
    size_t len = 0;
    meta.keys = (kvfi_array){.bytes = 6000, .dtype = "uint8", .num_dims = 1, .dims = {6000}};
    meta.values = meta.keys;
    if (kvfi_session_meta_encode(&text, &len, NULL, &meta, 0, 1) != KVF_OK) {
        abort();
    }
    say_bulk(reply, text, len);
    kvfi_free(text);
}

/* What the simulated servers don't know. */
static void answer(const char *command, kvft_buffer *reply) {
    static const char *const answers[][2] = {
        {"CONFIG", "*2\r\n$18\r\nproto-max-bulk-len\r\n$9\r\n536870912\r\n"},
        {"SENTINEL", "*2\r\n$9\r\n127.0.0.1\r\n$4\r\n7000\r\n"},
        {"ROLE", "*3\r\n$6\r\nmaster\r\n:3129659\r\n*1\r\n*3\r\n$9\r\n127.0.0.1\r\n$4\r\n7002\r\n$7\r\n3129242\r\n"},
        {"TYPE", "+hash\r\n"},
        {"HSTRLEN", ":6000\r\n"},
        {"HEXISTS", ":1\r\n"},
        {"PTTL", ":3000000\r\n"},
        {"SCAN", "*2\r\n$1\r\n0\r\n*2\r\n$7\r\nhostile\r\n$5\r\nkvf1:\r\n"},
    };
    if (strcmp(command, "INFO") == 0) {
        say_bulk(reply, info, sizeof info - 1);
    } else if (strcmp(command, "HGET") == 0) {
        say_meta(reply);
    }
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++) {
        if (strcmp(command, answers[i][0]) == 0) {
            say(reply, answers[i][1]);
        }
    }
}

/* ---- the lie ---- */

typedef struct liar {
    uint64_t *random;
    uint64_t seed;
    bool lies; /* in this case at all */
} liar;

/* Redirects from anywhere, of any kind. */
static void redirect(kvft_buffer *reply, uint64_t *random) {
    static const char *const texts[] = {"-MOVED 1 127.0.0.1:7001\r\n",
                                        "-ASK 16383 127.0.0.1:7002\r\n",
                                        "-MOVED 99999 127.0.0.1:7001\r\n",
                                        "-ASK 5 :0\r\n",
                                        "-MOVED 7 [::1]:70000\r\n",
                                        "-MOVED\r\n",
                                        "-ASK 5 nowhere.invalid:7000\r\n",
                                        "-TRYAGAIN\r\n",
                                        "-CLUSTERDOWN x\r\n",
                                        "-LOADING x\r\n",
                                        "-READONLY x\r\n",
                                        "-NOAUTH x\r\n",
                                        "-\r\n",
                                        "$-1\r\n",
                                        "*-1\r\n",
                                        "*1048577\r\n",
                                        "$9223372036854775807\r\n",
                                        "$17179869184\r\nx",
                                        ":-1\r\n",
                                        ":9223372036854775807\r\n",
                                        "%1\r\n+a\r\n+b\r\n",
                                        "_\r\n"};
    say(reply, texts[hostile_below(random, sizeof texts / sizeof *texts)]);
    if (hostile_below(random, 3) == 0) {
        kvft_mutate_text(reply, random);
    }
}

/* How a command lies follows from the case and its name: always, half the time, or never. */
static bool does_lie(const liar *l, const char *command) {
    uint64_t fate = l->seed;
    for (; *command != '\0'; command++) {
        fate = fate * 31 + (uint8_t)*command;
    }
    fate = kvft_random(&fate) % 8;
    return l->lies && (fate == 0 || (fate <= 2 && hostile_below(l->random, 2) == 0));
}

static void lie(void *ctx, const char *command, const char *first, kvft_buffer *reply) {
    liar *l = ctx;
    (void)first;
    answer(command, reply);
    if (!does_lie(l, command)) {
        return;
    }
    switch (hostile_below(l->random, 4)) {
    case 0:
        redirect(reply, l->random);
        break;
    case 1:
        kvft_mutate(reply, l->random);
        break;
    default:
        kvft_mutate_text(reply, l->random);
    }
}

/* ---- a case ---- */

static kvf_store *open_world(uint64_t *random, int world) {
    static const char *const urls[] = {KVFT_SIM_URL, KVFT_SIM_CLUSTER_URL, KVFT_SIM_SENTINEL_URL};
    static const char *const options[] = {"", "", "?part=4096", "?conns=1&window=4096"};
    char url[200];
    kvf_store *store = NULL;
    kvf_error err;
    const char *at = url;
    snprintf(url, sizeof url, "%s%s", urls[world], options[hostile_below(random, sizeof options / sizeof *options)]);
    return kvf_store_open(&store, &err, &at, 1, NULL) == KVF_OK ? store : NULL;
}

static void save(kvf_space *space) {
    kvft_prompt *p = kvft_prompt_new(space, HOSTILE_SEED, HOSTILE_BLOCKS, PAYLOAD_BYTES);
    (void)kvfi_save_through(space, p->blocks, HOSTILE_BLOCKS, NULL, 0, kvfi_deadline((int64_t)ANSWER_MS * 1000), 0,
                            NULL);
    kvft_prompt_free(p);
}

static size_t live(uint64_t *random, bool lies) {
    uint64_t seed = kvft_random(random);
    int world = (int)hostile_below(random, 3);
    liar l = {.random = random, .seed = seed};
    hostile_use use = {.payload_bytes = PAYLOAD_BYTES, .forged_session = true, .budget_ms = ANSWER_MS};
    kvft_sim_begin(seed, world == 1);
    kvft_meter_begin();
    kvft_sim_lie(lie, &l);
    l.lies = lies && hostile_below(random, 2) == 0; /* from the beginning, or from when something is there */
    kvf_store *store = open_world(random, world);
    if (store != NULL) {
        int64_t begin_us = kvfi_sys->now_us();
        kvf_space *space = kvft_space(store, "hostile", 16);
        save(space);
        l.lies = lies;
        hostile_ask(store, &use, random);
        kvf_space_close(space);
        kvf_store_close(store);
        if (kvfi_sys->now_us() - begin_us > LATE_US * 10) {
            hostile_fault("a case took ten minutes of the simulated clock");
        }
    }
    size_t held = kvft_meter_peak();
    kvft_meter_end();
    if (kvft_sim_end() != 0) {
        hostile_fault("memory or connections are left");
    }
    return held;
}

static bool begin(void) {
    uint64_t random = 1;
    for (int i = 0; i < 12; i++) {
        size_t held = live(&random, false);
        calm_bytes = held > calm_bytes ? held : calm_bytes;
    }
    return true;
}

static void run(uint64_t *random) {
    hostile_memory(live(random, true), calm_bytes + SLACK_BYTES);
}

static void end(void) {
}

const hostile_part hostile_wire = {"wire", 30, begin, run, end};
