/* SPDX-License-Identifier: Apache-2.0
 *
 * The Redis tier and one simulated server (support/sim.h) with a single fault: it breaks off at a question, is loading,
 * has many keys, or one connection to it ends. Tests what is sent, when, and what the answers lead to.
 */
#include <errno.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/interrupt.h"
#include "redis/advice/facts.h"
#include "redis/blocks/blocks.h"
#include "redis/cluster/topology.h"
#include "support/kit.h"
#include "support/sim.h"
#include "support/tiers.h"
#include "tier/pool.h"

#define NONSENSE   "?\r\n"
#define NO_SETTING "*0\r\n"
#define MAX_VALUES 8u
#define MANY       200u
#define NUM_PAGES  20u

/* What the server answers, and what was seen of it. */
static struct {
    const char *info, *config; /* NULL: an error */
    const char *has_field;     /* to HEXISTS; NULL: an error */
    const char *get;           /* to GET; NULL: the value */
    const char *set, *range;   /* to SET and GETRANGE; NULL: what they do */
    const char *expire;        /* to PEXPIRE; NULL: what it does */
    const char *slots;         /* to CLUSTER SLOTS; NULL: the map of the simulation */
    const char *key;           /* SCAN finds it; NULL: pages of nothing */
    const char *cant_be_read;  /* a GET of it is refused */
    const char *nonsense;      /* a GET or SET of it is answered by what is not RESP */
    int64_t info_takes_ms, range_takes_ms;
    bool mute;                /* no answer to PING */
    bool mute_name;           /* no answer to CLIENT SETNAME */
    const char *falls_silent; /* no answer to this command, nor to any after it on the connection; NULL: answers all */
    const char *pauses_at;    /* the same, once, at a PEXPIRE of this key */
    bool master;              /* the answer of a sentinel: the server itself, which is the only one there */
    bool is_silent;
    unsigned refuses; /* the n-th SET from now on; 0 = none */
    unsigned sets, gets, refreshed, removed, infos, configs, names, pages, maps;
    unsigned breaks_at; /* the n-th write from now on fails; 0 = none */
    bool narrow, full;  /* after each read nothing can be written until somebody waits */
    unsigned sets_before_wait;
    bool waited;
    size_t len; /* of what was sent */
    char sent[32768];
} server;

static kvfi_systable table;
static const kvfi_systable *sim;
static unsigned logged, warned;

static void count_log(void *ctx, kvf_log_level level, const char *text) {
    (void)ctx;
    (void)text;
    logged++;
    warned += level == KVF_LOG_WARN;
}

static unsigned only_port; /* the others are down */

static void replace(kvft_buffer *reply, const char *text) {
    if (text != NULL) {
        kvft_buffer_splice(reply, 0, reply->len, text, strlen(text));
    }
}

/* One page with the key; or each is empty and takes a while. */
static void say_page(kvft_buffer *reply) {
    char text[256], cursor[16];
    if (server.key != NULL) {
        snprintf(text, sizeof text, "*2\r\n$1\r\n0\r\n*1\r\n$%zu\r\n%s\r\n", strlen(server.key), server.key);
        replace(reply, text);
        return;
    }
    kvft_sim_sleep_ms(30);
    snprintf(cursor, sizeof cursor, "%u", ++server.pages % NUM_PAGES);
    snprintf(text, sizeof text, "*2\r\n$%zu\r\n%s\r\n*0\r\n", strlen(cursor), cursor);
    replace(reply, text);
}

static void answer(void *ctx, const char *command, const char *arg, kvft_buffer *reply) {
    static const struct {
        const char *command, *reply;
    } rows[] = {
        {"TYPE", "+none\r\n"}, {"HSET", ":1\r\n"}, {"PERSIST", ":1\r\n"}, {"RENAME", "+OK\r\n"}, {"PTTL", ":-1\r\n"}};
    (void)ctx;
    server.refreshed += strcmp(command, "PEXPIRE") == 0;
    server.removed += strcmp(command, "UNLINK") == 0;
    if (strcmp(command, "SET") == 0) {
        server.sets++;
        replace(reply, server.refuses > 0 && --server.refuses == 0 ? "-ERR not this one\r\n" : server.set);
    } else if (strcmp(command, "GET") == 0) {
        bool refused = server.cant_be_read != NULL && strcmp(arg, server.cant_be_read) == 0;
        server.gets++;
        replace(reply, refused ? "-ERR not this one\r\n" : server.get);
    } else if (strcmp(command, "CLUSTER") == 0) {
        server.maps++;
        replace(reply, server.slots);
    } else if (strcmp(command, "GETRANGE") == 0) {
        kvft_sim_sleep_ms(server.range_takes_ms);
        replace(reply, server.range);
    } else if (strcmp(command, "PING") == 0) {
        replace(reply, server.mute ? "" : NULL);
    } else if (strcmp(command, "INFO") == 0) {
        kvft_sim_sleep_ms(server.info_takes_ms);
        server.infos++;
        replace(reply, server.info);
    } else if (strcmp(command, "CONFIG") == 0) {
        server.configs++;
        replace(reply, server.config);
    } else if (strcmp(command, "CLIENT") == 0) {
        server.names++;
        replace(reply, server.mute_name ? "" : NULL);
    } else if (strcmp(command, "HEXISTS") == 0) {
        replace(reply, server.has_field);
    } else if (strcmp(command, "SCAN") == 0) {
        say_page(reply);
    } else if (strcmp(command, "PEXPIRE") == 0) {
        replace(reply, server.expire);
    }
    if (server.master && strcmp(command, "SENTINEL") == 0) {
        char text[64];
        snprintf(text, sizeof text, "*2\r\n$9\r\n127.0.0.1\r\n$4\r\n%u\r\n", only_port);
        replace(reply, text);
    } else if (server.master && strcmp(command, "ROLE") == 0) {
        replace(reply, "*1\r\n$6\r\nmaster\r\n");
    }
    server.is_silent = strcmp(command, "PING") != 0 &&
                       (server.is_silent || (server.falls_silent != NULL && strcmp(command, server.falls_silent) == 0));
    if (server.pauses_at != NULL && strcmp(command, "PEXPIRE") == 0 && strcmp(arg, server.pauses_at) == 0) {
        server.pauses_at = NULL;
        server.is_silent = true;
    }
    replace(reply, server.is_silent ? "" : NULL);
    if (server.nonsense != NULL && strcmp(arg, server.nonsense) == 0) {
        replace(reply, NONSENSE);
    }
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        replace(reply, strcmp(command, rows[i].command) == 0 ? rows[i].reply : NULL);
    }
}

static ssize_t see_read(int fd, const struct iovec *iov, int num) {
    ssize_t n = sim->readv(fd, iov, num);
    server.full = server.narrow && n > 0;
    return n;
}

static ssize_t see_write(int fd, const struct iovec *iov, int num) {
    if (server.full) {
        errno = EAGAIN;
        return -1;
    }
    if (server.breaks_at > 0 && --server.breaks_at == 0) {
        errno = EPIPE;
        return -1;
    }
    for (int i = 0; i < num; i++) {
        size_t room = sizeof server.sent - 1 - server.len, len = iov[i].iov_len < room ? iov[i].iov_len : room;
        memcpy(server.sent + server.len, iov[i].iov_base, len);
        server.len += len;
    }
    return sim->writev(fd, iov, num);
}

/* A batch is cancelled in the n-th pause between rounds. */
static struct {
    unsigned in; /* 0 = in none */
    int64_t at_us;
    atomic_bool cancelled;
} cancel;

static int see_wait(struct pollfd *fds, nfds_t num, int timeout_ms) {
    if (num == 0 && cancel.in > 0 && --cancel.in == 0) {
        cancel.at_us = kvfi_sys->now_us();
        atomic_store(&cancel.cancelled, true);
    }
    if (!server.waited) {
        server.sets_before_wait = server.sets;
        server.waited = true;
    }
    server.full = false;
    return sim->poll(fds, num, timeout_ms);
}

static void watch(void) {
    server.sets = server.gets = server.refreshed = server.removed = server.infos = server.configs = server.pages =
        server.maps = 0;
    server.waited = false;
    server.len = 0;
    memset(server.sent, 0, sizeof server.sent);
}

static void begin(bool cluster) {
    memset(&server, 0, sizeof server);
    logged = warned = 0;
    kvf_set_log(count_log, NULL, KVF_LOG_DEBUG);
    kvft_sim_begin(1, cluster);
    kvft_sim_lie(answer, NULL);
    sim = kvfi_sys_table;
    table = *sim;
    table.readv = see_read;
    table.writev = see_write;
    table.poll = see_wait;
    kvfi_sys_table = &table;
}

static int set_up(void **state) {
    (void)state;
    begin(false);
    return 0;
}

static int set_up_cluster(void **state) {
    (void)state;
    begin(true);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    assert_int_equal(kvft_sim_end(), 0);
    return 0;
}

static bool is_answered(kvfi_tier *tier, kvfi_probe probe) {
    return kvfi_node_answers(&kvfi_redis_of(tier)->node, probe);
}

/* ---- connecting ---- */

/* User, database, and whether it answers, before our name; all at once. */
static void an_introduction(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier("redis://somebody:secret@127.0.0.1:7000/3");
    const char *auth = strstr(server.sent, "AUTH\r\n$8\r\nsomebody\r\n$6\r\nsecret\r\n");
    const char *database = strstr(server.sent, "SELECT\r\n$1\r\n3\r\n"), *ping = strstr(server.sent, "PING");
    const char *name = strstr(server.sent, "SETNAME\r\n$7\r\nkvferry\r\n");
    assert_true(auth != NULL && auth < database && database < ping && ping < name);
    assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
    assert_int_equal(kvft_get(tier, 1, 1000), KVF_WHY_NONE);
    tier->ops->close(tier);
}

/* One that takes connections and says nothing has stalled. */
static void a_mute_server_has_stalled(void **state) {
    (void)state;
    server.mute = true;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL);
    kvft_sim_sleep_ms(1000);
    assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_STALLED);
    assert_int_equal(kvfi_node_trouble(&kvfi_redis_of(tier)->node), KVF_WHY_STALLED);
    server.mute = false;
    kvft_sim_sleep_ms(1000);
    assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
    tier->ops->close(tier);
}

/* A Cluster behind a proxy that does not let our name through: each server is told it once, also those that are not
 * greeted patiently because others are known to be quick. */
static void a_silent_name_is_sent_once(void **state) {
    (void)state;
    kvft_sim_plan_set(&(kvft_sim_plan){.round_trip_us = 2000});
    server.mute_name = true;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_CLUSTER_URL);
    unsigned names = 0;
    for (int i = 0; i < 3; i++) {
        for (uint64_t key = 1; key <= 8; key++) { /* on all servers */
            assert_int_equal(kvft_get(tier, key, 1000), KVF_WHY_ABSENT);
        }
        assert_int_equal(server.names, i == 0 ? server.names : names);
        names = server.names;
        kvft_sim_sleep_ms(31000); /* no connection is used again */
    }
    tier->ops->close(tier);
}

/* Gets or puts a value, as a batch with that patience. */
static kvf_reason move_within(kvfi_tier *tier, bool put, int64_t patience_us) {
    kvft_value value;
    kvft_value_init(&value, 1, 1000);
    kvfi_feed feed = {.items = &value.item,
                      .num = 1,
                      .limit = 1,
                      .deadline_us = kvfi_deadline(10000000),
                      .check = put ? NULL : kvft_value_check,
                      .patience_us = patience_us};
    (put ? tier->ops->put : tier->ops->get)(tier, &feed);
    kvf_reason why = value.item.why;
    kvft_value_cleanup(&value);
    return why;
}

/* A batch whose patience is more than a round trip is served on a new connection too, although that takes two before
 * the first answer. One with less patience stalls, does not stop the others, and is not starved by a silent name. */
static void patience_is_for_each_round_trip(void **state) {
    (void)state;
    static const struct {
        bool mute_name;
        int64_t patience_us;
        kvf_reason why;
    } rows[] = {{false, 70000, KVF_WHY_NONE}, {true, 70000, KVF_WHY_NONE}, {false, 50000, KVF_WHY_STALLED}};
    for (size_t i = 0; i < 2 * sizeof rows / sizeof *rows; i++) {
        kvfi_tier *tier = kvft_tier(KVFT_SIM_URL "?name=&stall_ms=1000"), *named = NULL;
        assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
        kvft_sim_plan_set(&(kvft_sim_plan){.refuse = 65536});
        named = kvft_tier(KVFT_SIM_URL "?stall_ms=1000");
        kvft_sim_sleep_ms(1000);
        kvft_sim_plan_set(&(kvft_sim_plan){.round_trip_us = 60000});
        server.mute_name = rows[i / 2].mute_name;
        assert_int_equal(move_within(named, i % 2 != 0, rows[i / 2].patience_us), rows[i / 2].why);
        assert_true(is_answered(named, KVFI_PROBE_NAME));
        server.mute_name = false;
        assert_int_equal(kvft_get(named, 1, 1000), KVF_WHY_NONE);
        kvft_sim_plan_set(&(kvft_sim_plan){.refuse = 0});
        named->ops->close(named);
        tier->ops->close(tier);
    }
}

/* A server that connects and then is silent at what a store tries when it opens: that takes connect_ms, and no more. */
static void opening_has_its_time(void **state) {
    (void)state;
    static const int64_t times_ms[] = {300, 3000};
    server.falls_silent = "GETRANGE";
    for (size_t i = 0; i < 2; i++) {
        char url[128];
        snprintf(url, sizeof url, KVFT_SIM_URL "?stall_ms=60000&connect_ms=%d", (int)times_ms[i]);
        int64_t from_us = kvfi_sys->now_us();
        kvfi_tier *tier = kvft_tier(url);
        assert_in_range(kvfi_sys->now_us() - from_us, times_ms[i] * 1000, times_ms[i] * 1000 + 10000);
        tier->ops->close(tier);
    }
}

static int connect_to_one(int fd, const struct sockaddr *address, socklen_t len) {
    struct sockaddr_in to;
    memcpy(&to, address, sizeof to);
    if (ntohs(to.sin_port) != only_port) {
        errno = ECONNREFUSED;
        return -1;
    }
    return sim->connect(fd, address, len);
}

/* From the sentinel that answered last on, each of them is asked once. */
static void each_sentinel_is_asked(void **state) {
    (void)state;
    static const unsigned ports[] = {7000, 7001, 7002, 7000, 7002, 7001, 7000};
    kvfi_tier *tier = NULL;
    server.master = true;
    table.connect = connect_to_one;
    for (size_t i = 0; i < sizeof ports / sizeof *ports; i++) {
        only_port = ports[i];
        if (tier == NULL) {
            tier = kvft_tier("redis+sentinel://127.0.0.1:7000,127.0.0.1:7001,127.0.0.1:7002/kvferry");
        }
        kvfi_topology *topology = kvfi_redis_of(tier)->topology;
        kvft_sim_sleep_ms(31000); /* no connection is used again */
        kvfi_topology_refresh(topology, kvfi_deadline(1000000));
        assert_int_equal(kvfi_topology_trouble(topology).status, KVF_OK);
        assert_int_equal(topology->asked, ports[i] - 7000);
    }
    tier->ops->close(tier);
}

static void *no_memory(size_t bytes) {
    (void)bytes;
    return NULL;
}

static void no_memory_for_a_lookup(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_CLUSTER_URL);
    assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
    assert_int_equal(kvft_peek(tier, 1), KVF_WHY_NONE);
    assert_int_equal(kvft_peek(tier, 2), KVF_WHY_ABSENT);
    table.alloc = no_memory;
    assert_int_equal(kvft_peek(tier, 1), KVF_WHY_NOMEM);
    table.alloc = sim->alloc;
    assert_int_equal(kvft_peek(tier, 1), KVF_WHY_NONE);
    tier->ops->close(tier);
}

/* The longest pause of a server decides how long the next ones may last. */
static void pauses_are_measured(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_CLUSTER_URL);
    server.range_takes_ms = 30;
    for (uint64_t seed = 1; seed <= 20; seed++) { /* of every server */
        assert_int_equal(kvft_peek(tier, seed), KVF_WHY_ABSENT);
        kvft_sim_sleep_ms(500); /* nobody waits */
    }
    assert_in_range(atomic_load(&kvfi_redis_of(tier)->pace.longest_us[0]), 30000, 60000);
    tier->ops->close(tier);
}

/* ---- a slot that is being moved ---- */

static size_t count(const char *text) {
    size_t num = 0;
    for (const char *at = server.sent; (at = strstr(at, text)) != NULL; at += strlen(text)) {
        num++;
    }
    return num;
}

/* The server that a slot moves to is asked by ASKING before each command, and the next user of the connection does not
 * ask that way. */
static void a_server_is_asked_once(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_CLUSTER_URL);
    kvfi_redis *redis = kvfi_redis_of(tier);
    kvf_error err;
    kvfi_reply reply;
    for (unsigned asks = 1; asks < 3; asks++) {
        kvfi_talk talk = {.ask = asks == 1 ? kvfi_topology_node(redis->topology, 0) : NULL};
        watch();
        assert_int_equal(kvfi_talk_begin(&talk, redis, &err, 0, KVFI_LANE_LOOKUP, kvfi_deadline(1000000)), KVF_OK);
        for (unsigned i = 0; i < 2; i++) {
            assert_int_equal(kvfi_talk_say(&talk, "PING", NULL), KVF_OK);
            assert_int_equal(kvfi_talk_hear(&talk, &reply), KVF_OK);
            assert_true(reply.kind == KVFI_RESP_STATUS && reply.len == 4 && memcmp(reply.text, "PONG", 4) == 0);
        }
        kvfi_talk_end(&talk);
        assert_int_equal(count("*1\r\n$6\r\nASKING\r\n*1\r\n$4\r\nPING\r\n"), asks == 1 ? 2 : 0);
        assert_int_equal(count("ASKING"), asks == 1 ? 2 : 0);
    }
    tier->ops->close(tier);
}

/* ---- saves ---- */

static void save(kvfi_tier *tier, kvfi_item *items, size_t num) {
    kvfi_feed feed = {.items = items, .num = num, .limit = num, .deadline_us = kvfi_deadline(10000000)};
    tier->ops->put(tier, &feed);
}

static void put_all(kvfi_tier *tier, size_t num, size_t payload_bytes) {
    static kvft_value values[MAX_VALUES];
    static kvfi_item items[MAX_VALUES];
    for (size_t i = 0; i < num; i++) {
        kvft_value_init(&values[i], 100 + i, payload_bytes);
        items[i] = values[i].item;
    }
    watch();
    save(tier, items, num);
    for (size_t i = 0; i < num; i++) {
        assert_int_equal(items[i].why, KVF_WHY_NONE);
        assert_int_equal(items[i].status, KVF_OK);
        assert_int_equal(kvft_get(tier, 100 + i, payload_bytes), KVF_WHY_NONE);
        kvft_value_cleanup(&values[i]);
    }
}

/* Values follow each other without waiting for answers, up to a window of bytes. */
static void saves_are_pipelined(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL "?window=65536");
    assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE); /* there is a connection */
    put_all(tier, 8, 1000);
    assert_int_equal(server.sets_before_wait, 8);
    put_all(tier, 8, 30000);
    assert_int_equal(server.sets_before_wait, 3); /* two are below the window */
    put_all(tier, 4, 100000);
    assert_int_equal(server.sets_before_wait, 2);
    tier->ops->close(tier);
}

/* What was on a connection that ended after it lay idle goes over another one. */
static void lost_saves_are_sent_again(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL);
    for (unsigned nth = 1; nth <= 8; nth++) {
        assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
        kvft_sim_sleep_ms(10);
        server.breaks_at = nth;
        put_all(tier, 8, 1000);
        assert_int_equal(server.breaks_at, 0);
        assert_int_equal(server.sets, 8 + nth - 1);
        kvft_sim_sleep_ms(10);
        server.breaks_at = nth;
        put_all(tier, nth, 1000); /* nothing else is left */
        assert_int_equal(server.sets, nth + nth - 1);
    }
    assert_int_equal(tier->disconnects, 16);
    tier->ops->close(tier);
}

/* Of a value of which a part was refused nothing more is sent than is under way; the others are not concerned. */
static void a_part_is_refused(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL "?part=4096&window=4096");
    for (unsigned nth = 1; nth <= 8; nth++) {
        kvft_value values[2];
        kvfi_item items[2];
        for (size_t i = 0; i < 2; i++) {
            kvft_value_init(&values[i], 10 * nth + i, 15000); /* of four parts */
            items[i] = values[i].item;
        }
        size_t bad = nth <= 4 ? 0 : 1;
        watch();
        server.refuses = nth;
        save(tier, items, 2);
        assert_int_equal(items[bad].why, KVF_WHY_SERVER);
        assert_int_equal(items[bad].status, KVF_MISS);
        assert_int_equal(items[1 - bad].why, KVF_WHY_NONE);
        if (nth % 4 != 0) { /* the last part makes it visible, and this server keeps what it refuses */
            assert_int_equal(kvft_get(tier, 10 * nth + bad, 15000), KVF_WHY_ABSENT);
        }
        assert_int_equal(kvft_get(tier, 10 * nth + 1 - bad, 15000), KVF_WHY_NONE);
        for (size_t i = 0; i < 2; i++) {
            kvft_value_cleanup(&values[i]);
        }
    }
    tier->ops->close(tier);
}

/* ---- loads ---- */

/* Returns how many were on their way when a connection ended. */
static size_t get_most(kvfi_tier *tier, size_t num, size_t payload_bytes) {
    static kvft_value values[MANY];
    static kvfi_item items[MANY];
    size_t lost = 0;
    for (size_t i = 0; i < num; i++) {
        kvft_value_init(&values[i], 1000 + i, payload_bytes);
        items[i] = values[i].item;
        memset(values[i].bytes, 0, items[i].bytes);
    }
    kvfi_feed feed = {
        .items = items, .num = num, .limit = num, .deadline_us = kvfi_deadline(10000000), .check = kvft_value_check};
    watch();
    tier->ops->get(tier, &feed);
    for (size_t i = 0; i < num; i++) {
        assert_true(items[i].why == KVF_WHY_NONE || items[i].why == KVF_WHY_UNREACHABLE);
        lost += items[i].why != KVF_WHY_NONE;
        kvft_value_cleanup(&values[i]);
    }
    return lost;
}

static void get_all(kvfi_tier *tier, size_t num, size_t payload_bytes) {
    assert_int_equal(get_most(tier, num, payload_bytes), 0);
}

/* What is loaded after a quarter of its time lives on; of many at once, as many as there is room to say so. */
static void what_is_used_lives_on(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL "?ttl=3600"), *lasting = kvft_tier(KVFT_SIM_URL "?ttl=0");
    for (uint64_t i = 0; i < MANY; i++) {
        assert_int_equal(kvft_put(tier, 1000 + i, 100), KVF_WHY_NONE);
    }
    kvft_sim_sleep_ms(890 * 1000);
    get_all(tier, 8, 100);
    assert_int_equal(server.refreshed, 0);
    kvft_sim_sleep_ms(20 * 1000);
    get_all(tier, 8, 100);
    assert_int_equal(server.refreshed, 8);
    get_all(tier, MANY, 100);
    assert_in_range(server.refreshed, 50, MANY);
    server.narrow = true;
    get_all(tier, MANY, 100);
    server.narrow = false;
    get_all(lasting, 8, 100);
    assert_int_equal(server.refreshed, 0);
    tier->ops->close(tier);
    lasting->ops->close(lasting);
}

/* A connection that breaks off takes with it what was on its way, and nothing if it lay idle before; all else goes over
 * another one. Nothing more is written to it. */
static void a_load_breaks_off(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL "?window=65536");
    for (uint64_t i = 0; i < 8; i++) {
        assert_int_equal(kvft_put(tier, 1000 + i, 30000), KVF_WHY_NONE);
    }
    get_all(tier, 8, 30000);
    for (unsigned nth = 1; nth <= 5; nth++) {
        kvft_sim_sleep_ms(10);
        server.breaks_at = nth;
        size_t lost = get_most(tier, 8, 30000);
        assert_in_range(lost, nth == 1 ? 0 : 1, nth == 1 ? 0 : 3);
        assert_int_equal(server.breaks_at, 0);
        assert_int_equal(tier->disconnects, nth);
    }
    tier->ops->close(tier);
}

/* ---- several servers ---- */

#define ALL_TO_ONE "*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:7000\r\n"

static unsigned count_idle(const kvfi_node *node) {
    unsigned num = 0;
    for (unsigned kind = 0; kind < KVFI_NUM_LANES; kind++) {
        num += node->lanes[kind].num_idle;
    }
    return num;
}

/* Connections to a server without slots are closed. */
static void what_has_no_slots_needs_no_connections(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_CLUSTER_URL);
    kvfi_topology *t = kvfi_redis_of(tier)->topology;
    for (uint64_t i = 0; i < 20; i++) {
        assert_int_equal(kvft_put(tier, i, 100), KVF_WHY_NONE);
    }
    assert_int_equal(t->num_members, 3);
    for (size_t i = 0; i < 3; i++) {
        assert_in_range(count_idle(t->members[i]), 1, 2);
    }
    server.slots = ALL_TO_ONE;
    kvft_sim_sleep_ms(1000);
    kvfi_topology_refresh(t, kvfi_deadline(1000000));
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(count_idle(t->members[i]) > 0, t->members[i]->server.port == 7000);
    }
    tier->ops->close(tier);
}

/* Whoever asks for the map gives up: the next one asks at once, and the servers are in no trouble. */
static void a_dropped_refresh_is_made_again(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_CLUSTER_URL);
    kvfi_topology *t = kvfi_redis_of(tier)->topology;
    atomic_bool over = true;
    assert_int_equal(kvft_put(tier, 1, 100), KVF_WHY_NONE);
    kvft_sim_sleep_ms(1000);
    server.falls_silent = "CLUSTER";
    kvfi_interrupt_work_for(&over);
    kvfi_topology_refresh(t, kvfi_deadline(1000000));
    kvfi_interrupt_work_for(NULL);
    assert_int_equal(kvfi_topology_trouble(t).status, KVF_OK);
    server.falls_silent = NULL;
    server.is_silent = false;
    server.slots = ALL_TO_ONE;
    kvfi_topology_refresh(t, kvfi_deadline(1000000));
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(count_idle(t->members[i]) > 0, t->members[i]->server.port == 7000);
    }
    tier->ops->close(tier);
}

/* An item that no server takes ends after six rounds, or with the budget. If a little time may help, the batch waits.
 * The map is refreshed if it may be wrong. */
static void rounds_come_to_an_end(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_CLUSTER_URL);
    kvft_value value;
    kvft_value_init(&value, 1, 1000);
    kvfi_feed feed = {.items = &value.item, .num = 1, .limit = 1, .check = kvft_value_check};
    static const struct {
        const char *reply;
        int64_t time_us;
        unsigned gets;
        bool doubts_map;
        int64_t least_us, most_us;
    } rows[] = {{"-TRYAGAIN\r\n", 10000000, 6, true, 155000, 200000},
                {"-TRYAGAIN\r\n", 30000, 3, true, 15000, 30000},
                {"-MOVED 1 127.0.0.1:7001\r\n", 10000000, 6, true, 0, 100000},
                {"-ASK 1 127.0.0.1:7001\r\n", 10000000, 6, false, 0, 100000},
                {"-ERR other\r\n", 10000000, 1, false, 0, 10000}};
    assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
    assert_int_equal(kvft_get(tier, 1, 1000), KVF_WHY_NONE);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        server.get = rows[i].reply;
        kvft_sim_sleep_ms(1000);
        watch();
        int64_t from_us = kvfi_sys->now_us();
        feed.deadline_us = from_us + rows[i].time_us;
        atomic_store(&feed.next, 0);
        tier->ops->get(tier, &feed);
        assert_int_equal(value.item.status, KVF_MISS);
        assert_int_equal(value.item.why, KVF_WHY_SERVER);
        assert_int_equal(server.gets, rows[i].gets);
        assert_int_equal(server.maps > 0, rows[i].doubts_map);
        assert_in_range(kvfi_sys->now_us() - from_us, rows[i].least_us, rows[i].most_us);
    }
    kvft_value_cleanup(&value);
    tier->ops->close(tier);
}

/* A redirect is followed, and is nothing to report; a refusal is reported once for each batch and server. */
static void only_refusals_are_logged(void **state) {
    (void)state;
    static const struct {
        const char *reply;
        unsigned warned;
    } rows[] = {{"-MOVED 1 127.0.0.1:7001\r\n", 0},
                {"-ASK 1 127.0.0.1:7001\r\n", 0},
                {"-TRYAGAIN\r\n", 0},
                {"-ERR other\r\n", 1}};
    kvfi_tier *tier = kvft_tier(KVFT_SIM_CLUSTER_URL "?ttl=3600");
    assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        server.expire = rows[i].reply;
        warned = server.refreshed = 0;
        assert_int_equal(kvft_each(tier, KVFI_TOUCH, 1), KVF_WHY_SERVER);
        assert_true(server.refreshed > 0);
        assert_int_equal(warned, rows[i].warned);
    }
    tier->ops->close(tier);
}

/* Threads that are started and have no time yet. */
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static struct {
    void *(*run)(void *);
    void *arg;
} begun;
static unsigned num_begun;

static void *begin_late(void *arg) {
    (void)arg;
    pthread_mutex_lock(&gate);
    pthread_mutex_unlock(&gate);
    return begun.run(begun.arg);
}

static int count_thread(void *out, void *(*run)(void *), void *arg) {
    num_begun++;
    begun.run = run;
    begun.arg = arg;
    return kvfi_sys_real.thread(out, begin_late, NULL);
}

static void expect_helpers(kvfi_tier *tier, size_t num, unsigned helpers) {
    kvft_value values[MAX_VALUES];
    kvfi_item items[MAX_VALUES];
    for (size_t i = 0; i < num; i++) {
        kvft_value_init(&values[i], 1 + i, 100);
        items[i] = values[i].item;
    }
    kvfi_feed feed = {
        .items = items, .num = num, .limit = num, .deadline_us = kvfi_deadline(10000000), .check = kvft_value_check};
    kvfi_pool *pool = kvfi_pool_new(16);
    assert_non_null(pool);
    num_begun = 0;
    table.thread = count_thread;
    pthread_mutex_lock(&gate);
    kvfi_redis_spread(kvfi_redis_of(tier), &feed, pool, KVFI_LANE_LOAD, kvfi_redis_load_on);
    pthread_mutex_unlock(&gate);
    kvfi_pool_free(pool);
    assert_int_equal(num_begun, helpers);
    for (size_t i = 0; i < num; i++) {
        assert_int_equal(items[i].why, KVF_WHY_NONE);
        kvft_value_cleanup(&values[i]);
    }
}

/* As many threads as there are connections to the servers that are concerned, one of them the caller's; no more than
 * there are values. */
static void as_many_help_as_are_of_use(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_CLUSTER_URL "?conns=2");
    for (uint64_t i = 0; i < MAX_VALUES; i++) {
        assert_int_equal(kvft_put(tier, 1 + i, 100), KVF_WHY_NONE);
    }
    expect_helpers(tier, MAX_VALUES, 5);
    expect_helpers(tier, 4, 3);
    expect_helpers(tier, 1, 0);
    tier->ops->close(tier);
}

/* ---- what a server says of itself ---- */

/* As a bulk string; until the next call. */
static const char *bulk(const char *text) {
    static char out[256];
    snprintf(out, sizeof out, "$%zu\r\n%s\r\n", strlen(text), text);
    return out;
}

static const char loading[] = "$32\r\nredis_version:8.0.0\r\nloading:1\r\n\r\n";
static const char ready[] = "$32\r\nredis_version:8.0.0\r\nloading:0\r\n\r\n";

/* A command that ends the connection is not sent again. The other one is. */
static void one_question_ends_the_connection(void **state) {
    (void)state;
    server.info = loading;
    server.config = NONSENSE;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL);
    assert_true(is_answered(tier, KVFI_PROBE_INFO) && !is_answered(tier, KVFI_PROBE_CONFIG));
    assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_SETTINGS);
    tier->ops->close(tier);
    server.info = NONSENSE;
    server.config = NO_SETTING;
    tier = kvft_tier(KVFT_SIM_URL);
    assert_true(!is_answered(tier, KVFI_PROBE_INFO) && is_answered(tier, KVFI_PROBE_CONFIG));
    assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
    tier->ops->close(tier);
}

/* A server, or a proxy, that is silent at a question may only have been slow. Saves go on without the answer, and the
 * question is asked again a while later: after a minute, or after a second if only a batch had no more patience. */
static void a_silent_question_is_asked_later(void **state) {
    (void)state;
    static const struct {
        const char *silent_at;
        int64_t patience_us, soon_ms, later_ms;
    } rows[] = {
        {"INFO", 0, 59000, 2000}, {"CONFIG", 0, 59000, 2000}, {"INFO", 20000, 900, 200}, {"CONFIG", 20000, 900, 200}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        kvft_sim_plan plan = {.refuse = 65536};
        kvft_sim_plan_set(&plan);
        kvfi_tier *tier = kvft_tier(KVFT_SIM_URL);
        plan.refuse = 0;
        kvft_sim_plan_set(&plan);
        kvft_sim_sleep_ms(1000);
        server.info = ready;
        server.config = NO_SETTING;
        server.falls_silent = rows[i].silent_at;
        assert_int_equal(move_within(tier, true, rows[i].patience_us), KVF_WHY_NONE);
        kvft_sim_sleep_ms(rows[i].soon_ms);
        watch();
        assert_int_equal(move_within(tier, true, rows[i].patience_us), KVF_WHY_NONE);
        assert_int_equal(server.infos + server.configs, 0);
        server.falls_silent = NULL;
        server.info = loading;
        kvft_sim_sleep_ms(rows[i].later_ms);
        assert_int_equal(move_within(tier, true, rows[i].patience_us), KVF_WHY_SETTINGS);
        assert_true(server.infos > 0 && server.configs > 0);
        assert_true(is_answered(tier, KVFI_PROBE_INFO) && is_answered(tier, KVFI_PROBE_CONFIG));
        server.info = ready;
        kvft_sim_sleep_ms(3000);
        assert_int_equal(move_within(tier, true, 0), KVF_WHY_NONE);
        watch();
        kvft_sim_sleep_ms(3600 * 1000);
        assert_int_equal(move_within(tier, true, 0), KVF_WHY_NONE);
        assert_int_equal(server.infos + server.configs, 0); /* all is known */
        tier->ops->close(tier);
    }
}

static void count_refusals(void *ctx, const kvf_finding *finding) {
    *(unsigned *)ctx += strcmp(finding->code, "refused") == 0;
}

/* One that was answered before is not to blame for a connection that ends. */
static void a_known_question_stays(void **state) {
    (void)state;
    unsigned found = 0;
    server.info = ready;
    server.config = NO_SETTING;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL);
    for (int i = 0; i < 2; i++) {
        server.info = i == 0 ? NONSENSE : ready;
        server.config = i == 1 ? NONSENSE : NO_SETTING;
        tier->ops->doctor(tier, count_refusals, &found);
        assert_true(is_answered(tier, KVFI_PROBE_INFO) && is_answered(tier, KVFI_PROBE_CONFIG));
    }
    server.config = NO_SETTING;
    watch();
    tier->ops->doctor(tier, count_refusals, &found);
    assert_true(server.infos > 0 && server.configs > 0);
    assert_int_equal(found, 0);
    server.refuses = 1;
    tier->ops->doctor(tier, count_refusals, &found);
    assert_int_equal(found, 1);
    tier->ops->close(tier);
}

/* One that was not answered is not asked again where the other one is in question. */
static void a_mute_question_is_not_asked(void **state) {
    (void)state;
    unsigned found = 0;
    kvf_tier_info info;
    kvft_sim_plan plan = {.refuse = 65536};
    kvft_sim_plan_set(&plan);
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL);
    plan.refuse = 0;
    kvft_sim_plan_set(&plan);
    kvft_sim_sleep_ms(1000);
    server.info = NONSENSE;
    watch();
    tier->ops->info(tier, &info);
    assert_false(is_answered(tier, KVFI_PROBE_INFO));
    assert_int_equal(server.configs, 0);
    server.config = NONSENSE;
    watch();
    tier->ops->doctor(tier, count_refusals, &found);
    assert_false(is_answered(tier, KVFI_PROBE_CONFIG));
    assert_int_equal(server.infos, 0);
    tier->ops->close(tier);
}

/* What it does not say, or later than connect_ms, is not known. */
static void what_it_holds(void **state) {
    (void)state;
    static const struct {
        const char *says;
        int64_t takes_ms, used, max;
    } rows[] = {{"used_memory:5\r\nmaxmemory:7\r\n", 0, 5, 7},
                {"used_memory:5\r\nmaxmemory:1\r\n", 900, 5, 1},
                {"used_memory:5\r\nmaxmemory:7\r\n", 1100, -1, -1},
                {"used_memory:5\r\nmaxmemory:0\r\n", 0, 5, -1},
                {"maxmemory:7\r\n", 0, -1, 7},
                {"used_memory:0\r\n", 0, 0, -1}};
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL "?connect_ms=1000");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        kvf_tier_info info = {.used_bytes = 0};
        server.info = bulk(rows[i].says);
        server.info_takes_ms = rows[i].takes_ms;
        tier->ops->info(tier, &info);
        assert_int_equal(info.reachable, 1);
        assert_int_equal(info.used_bytes, rows[i].used);
        assert_int_equal(info.max_bytes, rows[i].max);
    }
    tier->ops->close(tier);
}

/* Where nothing is evicted it is asked how much it holds once the room that it had is used up, to the last byte. */
static void room_is_asked_for_when_none_is_left(void **state) {
    (void)state;
    server.info = bulk("used_memory:1000000\r\nmaxmemory:0\r\n");
    server.config = NO_SETTING;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL "?budget=100M");
    _Atomic int64_t *room = &kvfi_redis_of(tier)->node.room;
    assert_true(atomic_load(room) > 1000000);
    for (int64_t left = 1; left >= 0; left--) {
        atomic_store(room, left);
        watch();
        assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
        assert_int_equal(server.infos, left == 0);
    }
    atomic_store(room, 0);
    server.breaks_at = 1; /* the question is lost, and asked again on another connection */
    assert_int_equal(kvft_put(tier, 2, 1000), KVF_WHY_NONE);
    assert_int_equal(server.breaks_at, 0);
    tier->ops->close(tier);
}

/* What forbids saves is looked at again and again, and said when it changes. */
static void the_log_hears_of_changes(void **state) {
    (void)state;
    server.info = loading;
    server.config = NO_SETTING;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL);
    assert_true(logged > 0);
    logged = 0;
    for (int i = 0; i < 5; i++) {
        kvft_sim_sleep_ms(3000);
        watch();
        assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_SETTINGS);
        assert_int_equal(server.infos, 1);
    }
    assert_int_equal(logged, 0);
    server.info = ready;
    kvft_sim_sleep_ms(3000);
    assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
    assert_int_equal(logged, 1);
    tier->ops->close(tier);
}

/* Of one prefix no more is stored than three quarters of what the server holds. */
static void prefix_that_is_too_long(void **state) {
    (void)state;
    static const char info[] = "$52\r\nmaxmemory:1000000000\r\nmaxmemory_policy:allkeys-lru\r\n\r\n";
    server.info = info;
    server.config = NO_SETTING;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL);
    for (uint64_t i = 0; i < 2; i++) {
        kvft_value value;
        kvft_value_init(&value, 1 + i, 1000);
        value.item.chain_bytes = 750000000 + i;
        save(tier, &value.item, 1);
        assert_int_equal(value.item.why, i == 0 ? KVF_WHY_NONE : KVF_WHY_FULL);
        kvft_value_cleanup(&value);
    }
    tier->ops->close(tier);
}

/* For our name, which nothing depends on, a server has stall_ms. */
static void a_name_is_not_waited_for(void **state) {
    (void)state;
    server.mute_name = true;
    int64_t from_us = kvfi_sys->now_us();
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL "?stall_ms=10000&connect_ms=60000");
    assert_in_range(kvfi_sys->now_us() - from_us, 10000000, 10005000);
    assert_int_equal(server.names, 1);
    assert_false(is_answered(tier, KVFI_PROBE_NAME));
    assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
    assert_int_equal(server.names, 1);
    tier->ops->close(tier);
}

/* ---- all keys ---- */

static int see_nothing(void *ctx, const kvfi_sight *sight) {
    (void)ctx;
    (void)sight;
    fail();
    return 0;
}

/* The time is that of one step: many of them may take longer. */
static void each_page_has_its_time(void **state) {
    (void)state;
    kvf_error err = {0};
    uint64_t removed = 0;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL);
    watch();
    if (tier->ops->walk(tier, &err, NULL, false, see_nothing, NULL, KVF_MS(100)) != KVF_OK) {
        fail_msg("%s", err.what);
    }
    assert_int_equal(server.pages, 2 * NUM_PAGES); /* records and sessions */
    watch();
    assert_int_equal(tier->ops->clear(tier, &removed, &err, NULL, KVF_MS(100)), KVF_OK);
    assert_int_equal(server.pages, 2 * NUM_PAGES);
    assert_int_equal(removed, 0);
    tier->ops->close(tier);
}

static int count_sight(void *ctx, const kvfi_sight *sight) {
    assert_true(sight->head_len > KVFI_HEADER_BYTES);
    ++*(unsigned *)ctx;
    return 0;
}

/* What goes while it is looked at is not shown, and of what can't be read whole no part. */
static void values_that_can_not_be_read(void **state) {
    (void)state;
    char key[128], second[128];
    kvfi_addr addr;
    kvf_error err = {0};
    unsigned shown = 0;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL "?part=4096");
    kvft_addr(&addr, 1);
    assert_int_equal(kvft_put(tier, 1, 6000), KVF_WHY_NONE);
    snprintf(key, sizeof key, "%s", kvft_redis_key(1, 0));
    snprintf(second, sizeof second, "%s", kvft_redis_key(1, 1));
    server.key = key;
    assert_int_equal(tier->ops->walk(tier, &err, &addr.space, true, count_sight, &shown, KVF_MS(100)), KVF_OK);
    assert_int_equal(shown, 1);
    server.get = "$-1\r\n";
    assert_int_equal(tier->ops->walk(tier, &err, &addr.space, true, see_nothing, NULL, KVF_MS(100)), KVF_OK);
    server.get = NULL;
    server.cant_be_read = second;
    assert_int_equal(tier->ops->walk(tier, &err, &addr.space, true, see_nothing, NULL, KVF_MS(100)), KVF_IO);
    tier->ops->close(tier);
}

/* A value up to twice as long as what was requested is discarded, and what was requested behind it arrives. One that is
 * longer ends the connection. */
static void a_longer_value_is_discarded(void **state) {
    (void)state;
    enum { SHORT = 40000 };
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL "?part=4096&conns=1");
    for (unsigned more = 0; more <= 2; more += 2) {
        kvft_value stored, wanted[2];
        kvft_value_init(&stored, 1, 2 * SHORT + KVFT_VALUE_EXTRA + more);
        kvft_value_init(&wanted[0], 1, SHORT);
        kvft_value_init(&wanted[1], 2, SHORT);
        stored.item.whole = wanted[0].item.whole = wanted[1].item.whole = true;
        save(tier, &stored.item, 1);
        save(tier, &wanted[1].item, 1);
        kvfi_item items[2] = {wanted[0].item, wanted[1].item};
        uint64_t ended = tier->disconnects;
        kvfi_feed feed = {
            .items = items, .num = 2, .limit = 2, .deadline_us = kvfi_deadline(10000000), .check = kvft_value_check};
        tier->ops->get(tier, &feed);
        assert_int_equal(items[0].why, KVF_WHY_TRUNCATED);
        assert_int_equal(items[1].status, more == 0 ? KVF_OK : KVF_MISS);
        assert_int_equal(tier->disconnects, ended + (more > 0));
        kvft_value_cleanup(&stored);
        kvft_value_cleanup(&wanted[0]);
        kvft_value_cleanup(&wanted[1]);
    }
    tier->ops->close(tier);
}

/* A batch that waits for a slot to be served ends soon after it is cancelled. */
static void a_pause_is_cancelled(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_CLUSTER_URL);
    server.set = "-TRYAGAIN later\r\n";
    for (unsigned pause = 1; pause <= 8; pause++) {
        kvft_value value;
        kvft_value_init(&value, 1, 1000);
        kvfi_feed feed = {.items = &value.item,
                          .num = 1,
                          .limit = 1,
                          .deadline_us = kvfi_deadline(10000000),
                          .cancelled = &cancel.cancelled};
        atomic_store(&cancel.cancelled, false);
        cancel.in = pause;
        tier->ops->put(tier, &feed);
        assert_true(atomic_load(&cancel.cancelled));
        assert_true(kvfi_sys->now_us() - cancel.at_us < 6000);
        assert_int_equal(value.item.status, KVF_MISS);
        kvft_value_cleanup(&value);
    }
    tier->ops->close(tier);
}

/* The number that the server answers to a command about a part. */
static int64_t ask_part(kvfi_tier *tier, const char *command, uint64_t seed, uint64_t part) {
    kvfi_talk talk = {.ask = NULL};
    kvfi_reply reply;
    assert_int_equal(kvfi_talk_begin(&talk, kvfi_redis_of(tier), NULL, 0, KVFI_LANE_LOOKUP, kvfi_deadline(1000000)),
                     KVF_OK);
    assert_int_equal(kvfi_talk_say(&talk, command, kvft_redis_key(seed, part), NULL), KVF_OK);
    assert_int_equal(kvfi_talk_hear(&talk, &reply), KVF_OK);
    kvfi_talk_end(&talk);
    return reply.num;
}

/* A record of three parts of which the last is missing is absent, also if the first part is renewed twice because its
 * connection stalled. */
static void a_part_counts_once(void **state) {
    (void)state;
    char second[128];
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL "?part=4096&ttl=3600");
    assert_int_equal(kvft_put(tier, 1, 10000), KVF_WHY_NONE);
    snprintf(second, sizeof second, "%s", kvft_redis_key(1, 1));
    for (uint64_t parts = 3; parts >= 2; parts--) {
        assert_int_equal(kvft_each(tier, KVFI_TOUCH, 1), parts == 3 ? KVF_WHY_NONE : KVF_WHY_ABSENT);
        server.pauses_at = second;
        assert_int_equal(kvft_each(tier, KVFI_TOUCH, 1), parts == 3 ? KVF_WHY_NONE : KVF_WHY_ABSENT);
        assert_null(server.pauses_at);
        assert_int_equal(ask_part(tier, "UNLINK", 1, 2), parts - 2);
    }
    tier->ops->close(tier);
}

/* Two values of four parts each; a connection ends when the part of the first one is answered. */
static void move_two(kvfi_tier *tier, bool put, uint64_t part, kvf_reason first, kvf_reason second) {
    static char key[128];
    kvft_value values[2];
    kvfi_item items[2];
    for (size_t i = 0; i < 2; i++) {
        kvft_value_init(&values[i], 1 + i, 15000);
        items[i] = values[i].item;
    }
    snprintf(key, sizeof key, "%s", kvft_redis_key(1, part));
    server.nonsense = key;
    kvfi_feed feed = {.items = items, .num = 2, .limit = 2, .deadline_us = kvfi_deadline(10000000)};
    feed.check = put ? NULL : kvft_value_check;
    (put ? tier->ops->put : tier->ops->get)(tier, &feed);
    server.nonsense = NULL;
    assert_int_equal(items[0].why, first);
    assert_int_equal(items[1].why, second);
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(items[i].status, items[i].why == KVF_WHY_NONE ? KVF_OK : KVF_MISS);
        kvft_value_cleanup(&values[i]);
    }
}

static void spoil(kvfi_item *item) {
    for (uint32_t i = 0; i < item->num_iov; i++) {
        memset(item->iov[i].iov_base, 0xee, item->iov[i].iov_len);
    }
}

/* Once a value is complete, or has missed, nothing more is read into its memory: of its other parts neither. */
static void what_is_complete_is_not_touched(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL "?part=4096&window=16384");
    assert_int_equal(kvft_put(tier, 2, 40000), KVF_WHY_NONE);
    for (uint64_t part = 0; part < 5; part++) {
        kvft_value values[2];
        kvfi_item items[2];
        assert_int_equal(kvft_put(tier, 1, 40000), KVF_WHY_NONE);
        assert_int_equal(ask_part(tier, "UNLINK", 1, part), 1);
        for (size_t i = 0; i < 2; i++) {
            kvft_value_init(&values[i], 1 + i, 40000);
            items[i] = values[i].item;
        }
        kvfi_feed feed = {.items = items,
                          .num = 2,
                          .limit = 2,
                          .deadline_us = kvfi_deadline(10000000),
                          .check = kvft_value_check,
                          .release = spoil};
        tier->ops->get(tier, &feed);
        assert_int_equal(items[0].why, KVF_WHY_ABSENT);
        assert_int_equal(items[1].why, KVF_WHY_NONE);
        for (size_t i = 0; i < 2; i++) {
            for (uint32_t k = 0; k < items[i].num_iov; k++) {
                for (size_t at = 0; at < items[i].iov[k].iov_len; at++) {
                    assert_int_equal(((uint8_t *)items[i].iov[k].iov_base)[at], 0xee);
                }
            }
            kvft_value_cleanup(&values[i]);
        }
    }
    tier->ops->close(tier);
}

/* An answer of a kind that the command never has: the server, or something between, has lost count, so nothing more of
 * that connection is believed. */
static void answers_of_another_kind(void **state) {
    (void)state;
    static const char *const texts[] = {":1\r\n", "*1\r\n+OK\r\n", "*1\r\n$1\r\nx\r\n", "*0\r\n"};
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL);
    assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        uint64_t before = tier->disconnects;
        server.set = server.get = server.range = texts[i];
        assert_int_equal(kvft_put(tier, 2, 1000), KVF_WHY_UNREACHABLE);
        assert_int_equal(kvft_get(tier, 1, 1000), KVF_WHY_UNREACHABLE);
        assert_int_equal(kvft_peek(tier, 1), KVF_WHY_UNREACHABLE);
        assert_int_equal(tier->disconnects, before + 3);
        server.set = server.get = server.range = NULL;
        assert_int_equal(kvft_peek(tier, 1), KVF_WHY_NONE);
        assert_int_equal(kvft_get(tier, 1, 1000), KVF_WHY_NONE);
    }
    server.set = "$2\r\nOK\r\n";
    assert_int_equal(kvft_put(tier, 2, 1000), KVF_WHY_UNREACHABLE);
    server.get = server.range = "+OK\r\n";
    assert_int_equal(kvft_get(tier, 1, 1000), KVF_WHY_UNREACHABLE);
    assert_int_equal(kvft_peek(tier, 1), KVF_WHY_UNREACHABLE);
    tier->ops->close(tier);
}

/* Values are independent: one that is not there says nothing of the next. */
static void one_miss_is_one_miss(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL "?part=4096");
    assert_int_equal(kvft_put(tier, 2, 15000), KVF_WHY_NONE);
    move_two(tier, false, 9, KVF_WHY_ABSENT, KVF_WHY_NONE);
    tier->ops->close(tier);
}

/* Where a part has missed, or was refused, that is why, whatever becomes of the connection then. */
static void the_first_reason_stays(void **state) {
    (void)state;
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL "?part=4096");
    assert_int_equal(kvft_put(tier, 2, 15000), KVF_WHY_NONE);
    for (uint64_t part = 0; part < 3; part++) {
        assert_int_equal(kvft_put(tier, 1, 15000), KVF_WHY_NONE);
        move_two(tier, false, part, KVF_WHY_UNREACHABLE, KVF_WHY_UNREACHABLE);
        assert_int_equal(ask_part(tier, "UNLINK", 1, part), 1);
        move_two(tier, false, part + 1, KVF_WHY_ABSENT, KVF_WHY_UNREACHABLE);
    }
    for (unsigned nth = 1; nth <= 2; nth++) { /* the first part goes last */
        move_two(tier, true, nth, KVF_WHY_UNREACHABLE, KVF_WHY_NONE);
        server.refuses = nth;
        move_two(tier, true, nth + 1, KVF_WHY_SERVER, KVF_WHY_NONE);
    }
    tier->ops->close(tier);
}

/* Of a removed record no part stays, whatever was gone before, and however long the parts of its writer are. */
static void no_part_stays(void **state) {
    (void)state;
    kvf_error err = {0};
    kvfi_addr addr;
    kvfi_tier *writer = kvft_tier(KVFT_SIM_URL "?part=4096"), *other = kvft_tier(KVFT_SIM_URL);
    kvft_addr(&addr, 7);
    for (uint64_t gone = 0; gone < 5; gone++) {
        kvfi_tier *remover = gone == 4 ? other : writer;
        assert_int_equal(kvft_put(writer, 7, 15000), KVF_WHY_NONE);
        assert_true(ask_part(writer, "STRLEN", 7, 3) > 0);
        if (gone < 4) {
            assert_int_equal(ask_part(writer, "UNLINK", 7, gone), 1);
        }
        kvf_status status = remover->ops->remove(remover, &err, &addr, kvfi_deadline(1000000));
        assert_int_equal(status, gone == 0 ? KVF_MISS : KVF_OK);
        for (uint64_t part = 0; part < 4; part++) {
            assert_int_equal(ask_part(writer, "STRLEN", 7, part), 0);
        }
    }
    writer->ops->close(writer);
    other->ops->close(other);
}

/* ---- sessions ---- */

/* The smallest field goes first, and has a time to live before any other is sent: a writer that dies leaves nothing. */
static void the_smallest_field_first(void **state) {
    (void)state;
    static char bytes[5000];
    kvf_error err = {0};
    kvfi_part parts[] = {{.name = "large", .data = {bytes, 5000}},
                         {.name = "small", .data = {bytes, 10}},
                         {.name = "middle", .data = {bytes, 300}}};
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL);
    memset(bytes, 'x', sizeof bytes);
    watch();
    assert_int_equal(tier->ops->session_put(tier, &err, "id", parts, 3, NULL, 0, kvfi_deadline(1000000)), KVF_OK);
    const char *small = strstr(server.sent, "\r\nsmall\r\n"), *large = strstr(server.sent, "\r\nlarge\r\n");
    const char *middle = strstr(server.sent, "\r\nmiddle\r\n"), *expires = strstr(server.sent, "PEXPIRE");
    assert_true(small != NULL && small < expires && expires < large && large < middle);
    tier->ops->close(tier);
}

/* Only what is a session is removed: any key could be named. */
static void only_sessions_are_removed(void **state) {
    (void)state;
    static const struct {
        const char *reply;
        kvf_status status;
        unsigned removed;
    } rows[] = {{":1\r\n", KVF_OK, 1},
                {":0\r\n", KVF_MISS, 0},
                {"-WRONGTYPE Operation\r\n", KVF_MISS, 0},
                {"-ERR other\r\n", KVF_IO, 0},
                {"+OK\r\n", KVF_IO, 0}};
    kvfi_tier *tier = kvft_tier(KVFT_SIM_URL);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        kvf_error err = {0};
        server.has_field = rows[i].reply;
        watch();
        assert_int_equal(tier->ops->session_remove(tier, &err, "id", kvfi_deadline(1000000)), rows[i].status);
        assert_int_equal(server.removed, rows[i].removed);
    }
    kvf_error err = {0};
    server.has_field = "-NOPERM this user has no permissions to run the 'hexists' command\r\n";
    assert_int_equal(tier->ops->session_remove(tier, &err, "id", kvfi_deadline(1000000)), KVF_CONFIG);
    assert_non_null(strstr(err.what, "add +hexists to its ACL"));
    tier->ops->close(tier);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(an_introduction),
        TEST(a_mute_server_has_stalled),
        TEST(patience_is_for_each_round_trip),
        TEST(opening_has_its_time),
        TEST(each_sentinel_is_asked),
        cmocka_unit_test_setup_teardown(a_silent_name_is_sent_once, set_up_cluster, tear_down),
        cmocka_unit_test_setup_teardown(no_memory_for_a_lookup, set_up_cluster, tear_down),
        cmocka_unit_test_setup_teardown(pauses_are_measured, set_up_cluster, tear_down),
        cmocka_unit_test_setup_teardown(a_server_is_asked_once, set_up_cluster, tear_down),
        TEST(saves_are_pipelined),
        TEST(lost_saves_are_sent_again),
        TEST(a_part_is_refused),
        TEST(what_is_used_lives_on),
        TEST(a_load_breaks_off),
        cmocka_unit_test_setup_teardown(what_has_no_slots_needs_no_connections, set_up_cluster, tear_down),
        cmocka_unit_test_setup_teardown(a_dropped_refresh_is_made_again, set_up_cluster, tear_down),
        cmocka_unit_test_setup_teardown(rounds_come_to_an_end, set_up_cluster, tear_down),
        cmocka_unit_test_setup_teardown(only_refusals_are_logged, set_up_cluster, tear_down),
        cmocka_unit_test_setup_teardown(a_pause_is_cancelled, set_up_cluster, tear_down),
        cmocka_unit_test_setup_teardown(as_many_help_as_are_of_use, set_up_cluster, tear_down),
        TEST(one_question_ends_the_connection),
        TEST(a_known_question_stays),
        TEST(a_mute_question_is_not_asked),
        TEST(a_silent_question_is_asked_later),
        TEST(what_it_holds),
        TEST(room_is_asked_for_when_none_is_left),
        TEST(the_log_hears_of_changes),
        TEST(prefix_that_is_too_long),
        TEST(a_name_is_not_waited_for),
        TEST(each_page_has_its_time),
        TEST(values_that_can_not_be_read),
        TEST(a_longer_value_is_discarded),
        TEST(no_part_stays),
        TEST(a_part_counts_once),
        TEST(what_is_complete_is_not_touched),
        TEST(answers_of_another_kind),
        TEST(one_miss_is_one_miss),
        TEST(the_first_reason_stays),
        TEST(the_smallest_field_first),
        TEST(only_sessions_are_removed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
