/* SPDX-License-Identifier: Apache-2.0
 *
 * One server: opens and introduces connections, keeps idle ones in lanes, and trips its breakers.
 */
#include "redis/cluster/node.h"

#include <stdio.h>

#include "base/interrupt.h"
#include "tier/pool.h"

#define MIN_BACKOFF_MS 50u
#define MAX_BACKOFF_MS 500u /* a server that returns is used again within a second */
#define MIN_REFUSED_MS 100u
#define MAX_REFUSED_MS 2000u /* a refused value costs its whole transfer, and nobody waits for a save */
/* Saves wait this many stall_ms: nobody waits for them, and a server that forks or evicts is slow to accept data. */
#define STORE_PATIENCE 4u
#define MOST_PATIENCE  20u /* the longest wait in stall_ms, however slow the server was before */
/* How long a value waits for loads. Beside endless loads this is the share of the saves, so they never starve: one
 * value in that time on each saving connection. */
#define YIELD_US 10000
/* If a server did not answer within that time, the server is to blame, not a short deadline of the caller. */
#define FAIR_TRY_US     10000
#define OTHER_TONGUE_US 100000 /* a server that broke off at once answers at once when asked with the right protocol */
/* How often a thread that waits for a connection checks whether there is work left for it. */
#define RECHECK_US 2000
/* Proxies and firewalls drop connections that are idle, most of them after a minute or more. */
#define MAX_IDLE_US (30 * 1000000LL)
#define MIN_IDLE_US 100000
/* Either a dropped connection was idle for too long, or the server stood still. The first is assumed for this time, and
 * twice as long each further time. */
#define DOUBT_US     (60 * 1000000LL)
#define MOST_DOUBTS  6u
#define BRIEF_US     1000000 /* the same for silence that only a batch with little patience met */
#define RETRY_WAITS  2 /* a batch with little patience needs the doubt for its retry: to connect, and to be answered */
#define SURE_IDLE_US 100000  /* a connection used so recently is still there */
#define QUIET_US     1000000 /* the log reports ended connections at most once in this time */

kvf_reason kvfi_reply_reason(const kvfi_reply *reply) {
    /* A key of another type was not written by us: it is not a record. */
    return kvfi_reply_says(reply, "WRONGTYPE") ? KVF_WHY_VERSION : KVF_WHY_SERVER;
}

void kvfi_acl_rule(char out[96], const char *said, const char *prefix) {
    const char *name = strchr(said, '\''); /* ... no permissions to run the 'config|get' command */
    size_t len = name != NULL ? strcspn(name + 1, "'") : 0;
    if (len > 0 && len < 32) {
        snprintf(out, 96, "+%.*s", (int)len, name + 1);
    } else {
        snprintf(out, 96, "~%.64s:* (~* for sessions)", prefix);
    }
}

bool kvfi_reply_refuses_saves(const kvfi_reply *reply, bool several) {
    return reply->kind == KVFI_RESP_ERROR &&
           (kvfi_reply_says(reply, "OOM ") || kvfi_reply_says(reply, "MISCONF ") ||
            kvfi_reply_says(reply, "NOREPLICAS ") || (!several && kvfi_reply_says(reply, "READONLY ")));
}

/* ---- breakers; all under the lock ---- */

/* After a failure one caller may try once the backoff has passed. It has `patience_ms` before another may. */
static bool may_try(kvfi_breaker *breaker, uint32_t patience_ms) {
    int64_t now = kvfi_sys->now_us();
    if (breaker->until_us > now) {
        return false;
    }
    if (breaker->backoff_ms > 0) {
        breaker->until_us = now + (int64_t)patience_ms * 1000;
        breaker->trying = true;
    }
    return true;
}

static void trip(kvfi_breaker *breaker, uint32_t min_ms, uint32_t max_ms) {
    uint32_t backoff_ms = breaker->backoff_ms * 2;
    uint16_t chance = 0;
    backoff_ms = backoff_ms < min_ms ? min_ms : backoff_ms;
    backoff_ms = backoff_ms > max_ms ? max_ms : backoff_ms;
    /* Up to a quarter less, so that many processes do not try at the same moment. It works without randomness too. */
    (void)kvfi_sys->random(&chance, sizeof chance);
    uint32_t jittered_ms = backoff_ms - backoff_ms / 4 * chance / UINT16_MAX;
    *breaker = (kvfi_breaker){.until_us = kvfi_sys->now_us() + (int64_t)jittered_ms * 1000, .backoff_ms = backoff_ms};
}

static kvfi_breaker_state state_of(const kvfi_breaker *breaker) {
    if (breaker->backoff_ms == 0) {
        return KVFI_BREAKER_CLOSED;
    }
    return breaker->trying || breaker->until_us <= kvfi_sys->now_us() ? KVFI_BREAKER_HALF_OPEN : KVFI_BREAKER_OPEN;
}

static void note_success(kvfi_node *node) {
    node->spoken = true;
    node->breaker = (kvfi_breaker){0};
}

static void note_failure(kvfi_node *node) {
    node->admission.known = false; /* it may return with other settings */
    trip(&node->breaker, MIN_BACKOFF_MS, MAX_BACKOFF_MS);
}

/* Nothing was learned: the next caller may try. */
static void note_nothing(kvfi_node *node) {
    node->breaker.until_us = 0;
    node->breaker.trying = false;
}

static void locked(kvfi_node *node, void (*note)(kvfi_node *)) {
    pthread_mutex_lock(&node->lock);
    note(node);
    pthread_mutex_unlock(&node->lock);
}

static void remember(kvfi_node *node, const kvf_error *trouble, kvf_reason why) {
    pthread_mutex_lock(&node->lock);
    node->trouble = *trouble;
    node->trouble_why = why;
    pthread_mutex_unlock(&node->lock);
}

void kvfi_node_is_mute(kvfi_node *node, kvfi_probe probe, const char *why) {
    const char *command = probe == KVFI_PROBE_NAME   ? "CLIENT SETNAME"
                          : probe == KVFI_PROBE_INFO ? "INFO"
                                                     : "CONFIG GET";
    if ((atomic_load_explicit(&node->heard, memory_order_relaxed) & probe) == 0 &&
        (atomic_fetch_or_explicit(&node->mute, probe, memory_order_relaxed) & probe) == 0) {
        kvfi_log(KVF_LOG_INFO, "%.100s: %s is not answered (%.100s); it is optional and not sent any more",
                 node->conf->text, command, why);
    }
}

void kvfi_node_is_silent(kvfi_node *node, unsigned probes, bool brief) {
    probes &= ~atomic_load_explicit(&node->heard, memory_order_relaxed);
    if (probes == 0) {
        return;
    }
    pthread_mutex_lock(&node->lock);
    int64_t until_us = kvfi_deadline(brief ? BRIEF_US : DOUBT_US << node->silences);
    node->silences += !brief && node->silences < MOST_DOUBTS;
    if (until_us > node->silent_until_us) {
        atomic_store_explicit(&node->silent_until_us, until_us, memory_order_relaxed);
    }
    atomic_fetch_or_explicit(&node->silent, probes, memory_order_relaxed);
    pthread_mutex_unlock(&node->lock);
    kvfi_log(KVF_LOG_INFO, "%.100s: %s not answered in time; asked again later", node->conf->text,
             probes == KVFI_PROBE_INFO     ? "INFO is"
             : probes == KVFI_PROBE_CONFIG ? "CONFIG GET is"
                                           : "INFO and CONFIG GET are");
}

void kvfi_node_was_heard(kvfi_node *node, kvfi_probe probe) {
    atomic_fetch_or_explicit(&node->heard, probe, memory_order_relaxed);
    atomic_fetch_and_explicit(&node->silent, ~(unsigned)probe, memory_order_relaxed);
}

unsigned kvfi_node_probes(const kvfi_node *node, unsigned probes) {
    unsigned not = atomic_load_explicit(&node->mute, memory_order_relaxed);
    if (kvfi_sys->now_us() < atomic_load_explicit(&node->silent_until_us, memory_order_relaxed)) {
        not |= atomic_load_explicit(&node->silent, memory_order_relaxed);
    }
    return probes & ~not ;
}

/* ---- the introduction: AUTH, SELECT, PING, CLIENT SETNAME in one round trip ---- */

typedef enum step { STEP_OPEN, STEP_AUTH, STEP_SELECT, STEP_PING, STEP_NAME } step;

/* A user without a password needs none (nopass): any password is accepted, but without AUTH we would be `default`. */
static void put_auth(kvfi_cmd *out, const kvfi_redis_conf *conf) {
    kvfi_cmd_array(out, conf->user != NULL ? 3 : 2);
    kvfi_cmd_text(out, "AUTH");
    if (conf->user != NULL) {
        kvfi_cmd_text(out, conf->user);
    }
    kvfi_cmd_text(out, conf->password != NULL ? conf->password : "");
}

/* Every server answers PING. The name comes after it, when everything else succeeded. */
static kvf_status put_introduction(kvfi_conn *conn, kvf_error *err, const kvfi_redis_conf *conf, bool named,
                                   step steps[4], size_t *num) {
    size_t n = 0;
    kvfi_cmd *out = kvfi_conn_room(conn, KVFI_CONN_OUT);
    if (conf->user != NULL || conf->password != NULL) {
        put_auth(out, conf);
        steps[n++] = STEP_AUTH;
    }
    if (conf->db > 0) {
        kvfi_cmd_array(out, 2);
        kvfi_cmd_text(out, "SELECT");
        kvfi_cmd_number(out, conf->db);
        steps[n++] = STEP_SELECT;
    }
    kvfi_cmd_array(out, 1);
    kvfi_cmd_text(out, "PING");
    steps[n++] = STEP_PING;
    if (named) {
        kvfi_cmd_array(out, 3);
        kvfi_cmd_text(out, "CLIENT");
        kvfi_cmd_text(out, "SETNAME");
        kvfi_cmd_text(out, conf->name);
        steps[n++] = STEP_NAME;
    }
    *num = n;
    return out->full ? kvfi_fail(err, KVF_CONFIG, "%s: user or password are too long", conf->text) : KVF_OK;
}

/* The sentence for what the operator must change. KVF_MISS for what passes by itself. */
static kvf_status explain_refusal(kvf_error *err, const kvfi_conn *conn, const kvfi_redis_conf *conf,
                                  const kvfi_reply *reply, step at) {
    if (kvfi_reply_says(reply, "NOAUTH") && conf->password == NULL) {
        return kvfi_fail(err, KVF_CONFIG, "%s: the server asks for a password: write redis://user:password@...",
                         conf->text);
    }
    if (kvfi_reply_says(reply, "NOPERM")) {
        return kvfi_fail(err, KVF_CONFIG,
                         "%s: the user lacks a permission: %s: add +select to its ACL, or use database 0", conf->text,
                         conn->said);
    }
    if (at == STEP_AUTH && !kvfi_reply_says(reply, "LOADING")) {
        return kvfi_fail(err, KVF_CONFIG, "%s: user or password refused: %s", conf->text, conn->said);
    }
    if (at == STEP_SELECT && (kvfi_reply_says(reply, "ERR") || kvfi_reply_says(reply, "NOAUTH"))) {
        return kvfi_fail(err, KVF_CONFIG,
                         "%s: the server has no database %u: %s: use a lower number, or raise `databases` there",
                         conf->text, conf->db, conn->said);
    }
    if (kvfi_reply_says(reply, "DENIED")) {
        return kvfi_fail(err, KVF_CONFIG,
                         "%s: the server is in protected mode and lets only its own host in: set a password "
                         "there, or bind it to the right interface",
                         conf->text);
    }
    return kvfi_fail(err, KVF_MISS, "%s: the server refuses: %s", conf->text, conn->said);
}

/* The URL without its parameters, shortened. */
static int short_len(const kvfi_redis_conf *conf) {
    size_t len = strcspn(conf->text, "?");
    return len < 60 ? (int)len : 60;
}

static kvf_status no_connection(const kvfi_conn *conn, kvf_error *err, const kvfi_redis_conf *conf) {
    /* What the operator must fix is reported in full, with less of the URL. */
    return conn->config ? kvfi_fail(err, KVF_CONFIG, "%.*s: %s", short_len(conf), conf->text, conn->said)
                        : kvfi_fail(err, KVF_MISS, "%s: no connection: %s", conf->text, conn->said);
}

static kvf_status not_redis(kvfi_conn *conn, kvf_error *err, const kvfi_redis_conf *conf) {
    (void)kvfi_conn_broken(conn, "this is not a Redis server");
    return kvfi_fail(err, KVF_CONFIG, "%s: this is not a Redis server: its answer is not RESP; check host and port",
                     conf->text);
}

/* A server that refuses PING for a reason other than us (it loads its data, can't write to its disk, denies PING) has
 * already accepted our login. */
static bool is_acquainted(const kvfi_reply *reply) {
    return !kvfi_reply_says(reply, "NOAUTH") && !kvfi_reply_says(reply, "DENIED") &&
           !kvfi_reply_says(reply, "ERR max number of clients");
}

/* Reads the reply to one step. KVF_OK, KVF_CONFIG, or KVF_MISS with the reason. */
static kvf_status read_step(kvfi_node *node, kvfi_conn *conn, kvf_error *err, step at, kvf_reason *why,
                            int64_t deadline_us) {
    kvfi_reply reply;
    *why = kvfi_conn_next(conn, &reply, deadline_us);
    if (*why != KVF_WHY_NONE) {
        bool nonsense = strstr(conn->said, KVFI_NOT_RESP) != NULL;
        if (*why == KVF_WHY_BUDGET) {
            snprintf(conn->said, sizeof conn->said, "it accepts connections but does not answer in time");
        }
        return nonsense ? not_redis(conn, err, node->conf) : no_connection(conn, err, node->conf);
    }
    *why = KVF_WHY_SERVER;
    if (reply.kind == KVFI_RESP_STATUS) {
        return KVF_OK;
    }
    if (reply.kind != KVFI_RESP_ERROR) {
        return not_redis(conn, err, node->conf);
    }
    if (at == STEP_NAME) {
        kvfi_node_is_mute(node, KVFI_PROBE_NAME, conn->said); /* whatever it replies to our name */
        return KVF_OK;
    }
    return at == STEP_PING && is_acquainted(&reply) ? KVF_OK : explain_refusal(err, conn, node->conf, &reply, at);
}

/* The wait for the reply to our name is shorter: a multiple of the time that all other replies took together. */
static int64_t name_deadline(const kvfi_node *node, int64_t began_us, int64_t deadline_us) {
    int64_t now = kvfi_sys->now_us();
    int64_t until_us = now + 4 * (now - began_us) + (int64_t)node->conf->stall_ms * 1000;
    return until_us < deadline_us ? until_us : deadline_us;
}

/* *at: on failure, the step that was not answered. */
static kvf_status introduce(kvfi_node *node, kvfi_conn *conn, kvf_error *err, bool named, step *at, kvf_reason *why,
                            int64_t deadline_us) {
    step steps[4];
    size_t num = 0;
    int64_t began_us = kvfi_sys->now_us();
    *why = KVF_WHY_SERVER;
    KVFI_TRY(put_introduction(conn, err, node->conf, named, steps, &num));
    for (size_t i = 0; i < num; i++) {
        *at = steps[i];
        bool name = *at == STEP_NAME;
        KVFI_TRY(read_step(node, conn, err, *at, why, name ? name_deadline(node, began_us, deadline_us) : deadline_us));
    }
    if (named && kvfi_node_answers(node, KVFI_PROBE_NAME)) {
        kvfi_node_was_heard(node, KVFI_PROBE_NAME);
    }
    *why = KVF_WHY_NONE;
    return KVF_OK;
}

/* If only one side speaks TLS, that shows as silence or as a broken connection, so it is tested. */
static bool is_other_tongue(const kvfi_node *node, const kvfi_conn *conn, kvf_error *err, int64_t deadline_us) {
    bool tls = node->conf->tls != NULL;
    if (kvfi_conn_is_open(conn) || conn->config || conn->stalled || (tls && !conn->mute) ||
        !kvfi_conn_is_other_tongue(&node->server, tls, deadline_us)) {
        return false;
    }
    const char *sentence = tls ? "speaks no TLS on that port: name its tls-port, or write redis:// instead of rediss://"
                               : "speaks TLS on that port: write rediss:// instead of redis://, or name its plain port";
    (void)kvfi_fail(err, KVF_CONFIG, "%.*s: the server %.80s:%u %s", short_len(node->conf), node->conf->text,
                    node->server.host, node->server.port, sentence);
    return true;
}

/* A server that was seen before may have become slower, so it has all of connect_ms to answer. But in a Cluster whose
 * servers are known to be quicker, one new server must not delay the others. */
static bool is_greeted_patiently(kvfi_node *node) {
    const kvfi_pace *pace = node->conf->pace;
    bool known = pace != NULL && atomic_load_explicit(&pace->known, memory_order_relaxed);
    pthread_mutex_lock(&node->lock);
    bool failed = node->breaker.backoff_ms > 0;
    pthread_mutex_unlock(&node->lock);
    return node->conf->kind != KVFI_REDIS_CLUSTER || !known || failed;
}

static kvf_reason open_named(kvfi_node *node, kvfi_conn *conn, kvf_error *err, bool named, step *at,
                             int64_t deadline_us) {
    *at = STEP_OPEN;
    kvf_reason why = kvfi_conn_open(conn, &node->server, &node->peer, &node->answered, deadline_us);
    if (why != KVF_WHY_NONE) {
        (void)no_connection(conn, err, node->conf);
        return why;
    }
    atomic_fetch_add_explicit(node->connects, 1, memory_order_relaxed);
    conn->patient = conn->patience_us == 0 && is_greeted_patiently(node);
    if (introduce(node, conn, err, named, at, &why, deadline_us) != KVF_OK && kvfi_conn_is_open(conn)) {
        (void)kvfi_conn_broken(conn, conn->said);
    }
    conn->patient = false;
    conn->stalled = conn->stalled || (why == KVF_WHY_BUDGET && *at != STEP_NAME);
    return why;
}

/* Did the connection end because of our name? A proxy may break off, or fall silent, when it sees a command that it
 * does not let through. */
static bool is_about_name(const kvfi_node *node, step at, kvf_reason why) {
    bool known = (atomic_load_explicit(&node->heard, memory_order_relaxed) & KVFI_PROBE_NAME) != 0;
    bool silent = why == KVF_WHY_BUDGET || why == KVF_WHY_STALLED;
    return !known && ((why == KVF_WHY_UNREACHABLE && at != STEP_OPEN) || (silent && at == STEP_NAME));
}

/* Such a connection is tried once more without the name. If that works, the name is left out from then on, but not
 * because of silence that only a batch calls a stall. */
static kvf_reason open_and_introduce(kvfi_node *node, kvfi_conn *conn, kvf_error *err, int64_t deadline_us) {
    bool named = node->conf->name[0] != '\0' && kvfi_node_answers(node, KVFI_PROBE_NAME);
    step at;
    kvf_reason why = open_named(node, conn, err, named, &at, deadline_us);
    if (!named || !is_about_name(node, at, why)) {
        return why;
    }
    char before[sizeof conn->said];
    bool brief = why == KVF_WHY_STALLED && kvfi_conn_is_impatient(conn);
    memcpy(before, conn->said, sizeof before);
    kvf_error own = {.status = KVF_OK};
    why = open_named(node, conn, &own, false, &at, deadline_us);
    if (why == KVF_WHY_NONE && !brief) {
        kvfi_node_is_mute(node, KVFI_PROBE_NAME, before);
    } else if (why != KVF_WHY_NONE && err != NULL) {
        *err = own;
    }
    return why;
}

/* With an explanation for the reader of the error. Since the server has never made sense yet, the last quarter of the
 * time goes into the explanation if there was no answer. */
static kvf_reason connect_or_explain(kvfi_node *node, kvfi_conn *conn, kvf_error *err, bool explain,
                                     int64_t deadline_us) {
    bool tls = node->conf->tls != NULL;
    explain = explain && node->server.path == NULL && !node->spoken;
    int64_t until_us = explain && tls ? deadline_us - (deadline_us - kvfi_sys->now_us()) / 4 : deadline_us;
    kvf_reason why = open_and_introduce(node, conn, err, until_us);
    if (why == KVF_WHY_UNREACHABLE && explain && (tls || conn->tcp)) {
        int64_t short_us = kvfi_deadline(OTHER_TONGUE_US);
        (void)is_other_tongue(node, conn, err, tls || deadline_us < short_us ? deadline_us : short_us);
    }
    return why;
}

/* A timeout is the caller's if its budget was the shorter time, else the server's. */
static kvf_reason timeout_of(const kvfi_conn *conn, kvf_reason why, bool out_of_budget) {
    if (out_of_budget && (why == KVF_WHY_UNREACHABLE || why == KVF_WHY_STALLED)) {
        return KVF_WHY_BUDGET;
    }
    if (!out_of_budget && why == KVF_WHY_BUDGET) {
        return conn->stalled ? KVF_WHY_STALLED : KVF_WHY_UNREACHABLE;
    }
    return why;
}

/* Connects within connect_ms, or by the caller's deadline if that is earlier, and informs the breaker. Callers in a
 * hurry and batches with little patience must not trip the breaker for others: their timeouts count against the server
 * only if it had a fair time to answer. */
static kvf_reason connect_to(kvfi_node *node, kvfi_conn *conn, kvf_error *err, int64_t deadline_us) {
    kvf_error own = {.status = KVF_OK};
    int64_t from_us = kvfi_sys->now_us(), most_us = from_us + (int64_t)node->conf->connect_ms * 1000;
    int64_t until_us = deadline_us < most_us ? deadline_us : most_us;
    kvf_reason why = connect_or_explain(node, conn, &own, err != NULL, until_us);
    if (why == KVF_WHY_NONE) {
        locked(node, note_success);
        return why;
    }
    if (kvfi_conn_is_cancelled(conn)) {
        locked(node, note_nothing);
        return KVF_WHY_CLOSED;
    }
    bool impatient = why == KVF_WHY_STALLED && conn->patience_us > 0;
    bool out_of_budget = !impatient && until_us < most_us && kvfi_sys->now_us() >= until_us;
    bool fair = !impatient && (!out_of_budget || until_us - from_us >= FAIR_TRY_US);
    locked(node, fair ? note_failure : note_nothing);
    why = impatient ? why : timeout_of(conn, why, out_of_budget);
    remember(node, &own, conn->stalled ? KVF_WHY_STALLED : why);
    (void)kvfi_fail(err, own.status, "%s", own.what);
    return why;
}

/* ---- lanes ---- */

/* Room for four simultaneous loads, saves or lookups: the next waits. */
static unsigned lane_max(const kvfi_node *node) {
    return 4 * node->conf->conns;
}

/* Takes the memory of a connection from the lane, or the right to make one (NULL). Under the lock, which it releases
 * while it waits. */
static kvf_reason take_slot(kvfi_node *node, kvfi_lane *lane, kvfi_conn **out, const kvfi_feed *feed, bool must,
                            int64_t deadline_us) {
    while (lane->num_idle == 0 && lane->num_taken >= lane_max(node)) {
        int64_t now = kvfi_sys->now_us();
        bool over = now >= deadline_us || kvfi_is_interrupted();
        if (over || (feed != NULL && (must ? kvfi_feed_is_cancelled(feed) : kvfi_feed_is_dry(feed)))) {
            return KVF_WHY_BUDGET;
        }
        int64_t until_us = feed != NULL && deadline_us - now > RECHECK_US ? now + RECHECK_US : deadline_us;
        (void)kvfi_cond_wait(&node->freed, &node->lock, until_us);
    }
    *out = lane->num_idle > 0 ? lane->idle[--lane->num_idle] : NULL;
    lane->num_taken++;
    return KVF_WHY_NONE;
}

static void give_slot(kvfi_node *node, kvfi_lane_kind kind, kvfi_conn *conn) {
    if (conn != NULL) {
        conn->cancelled = NULL;
        conn->patience_us = 0;
        conn->idle_us = kvfi_sys->now_us();
    }
    pthread_mutex_lock(&node->lock);
    kvfi_lane *lane = &node->lanes[kind];
    lane->num_taken--;
    if (conn != NULL) {
        lane->idle[lane->num_idle++] = conn;
    }
    pthread_cond_broadcast(&node->freed);
    pthread_mutex_unlock(&node->lock);
}

void kvfi_node_yield(kvfi_node *node) {
    int64_t until_us = kvfi_deadline(YIELD_US);
    bool in_time = true;
    pthread_mutex_lock(&node->lock);
    while (node->lanes[KVFI_LANE_LOAD].num_taken > 0 && in_time) {
        in_time = kvfi_cond_wait(&node->freed, &node->lock, until_us);
    }
    pthread_mutex_unlock(&node->lock);
}

/* Is an idle connection still usable? The server may have closed it. It may still owe replies. Anything else that it
 * sent unasked would be misread. */
static bool is_fit(kvfi_node *node, kvfi_conn *conn, int64_t deadline_us) {
    if (!kvfi_conn_is_open(conn)) {
        return false;
    }
    int64_t now = kvfi_sys->now_us();
    conn->idle_us = now - conn->idle_us;
    if (now >= atomic_load_explicit(&node->doubt_until_us, memory_order_relaxed)) {
        atomic_store_explicit(&node->max_idle_us, MAX_IDLE_US, memory_order_relaxed);
    }
    if (conn->idle_us > atomic_load_explicit(&node->max_idle_us, memory_order_relaxed)) {
        kvfi_conn_close(conn);
        return false;
    }
    bool got = false;
    if (kvfi_conn_skip_owed(conn, deadline_us) != KVF_WHY_NONE || kvfi_conn_recv(conn, &got) != KVF_WHY_NONE) {
        return false;
    }
    if (got || !kvfi_resp_idle(&conn->in)) {
        (void)kvfi_conn_broken(conn, "the server sent something unasked");
        return false;
    }
    conn->reused = true;
    conn->before = conn->received;
    return true;
}

static kvf_reason make_fit(kvfi_node *node, kvfi_conn *conn, kvf_error *err, int64_t deadline_us) {
    if (is_fit(node, conn, deadline_us)) {
        return KVF_WHY_NONE;
    }
    if (kvfi_sys->now_us() >= deadline_us) {
        (void)kvfi_fail(err, KVF_MISS, "%s: no connection before the deadline", node->conf->text);
        return KVF_WHY_BUDGET;
    }
    if (kvfi_conn_is_cancelled(conn)) {
        return KVF_WHY_CLOSED;
    }
    pthread_mutex_lock(&node->lock);
    bool may = may_try(&node->breaker, node->conf->connect_ms);
    kvf_error trouble = node->trouble;
    pthread_mutex_unlock(&node->lock);
    if (!may) {
        (void)kvfi_fail(err, trouble.status, "%s", trouble.what);
        return KVF_WHY_BREAKER;
    }
    return connect_to(node, conn, err, deadline_us);
}

kvf_reason kvfi_node_reopen(kvfi_node *node, kvfi_conn *conn, kvf_error *err, int64_t deadline_us) {
    kvfi_conn_close(conn);
    return make_fit(node, conn, err, deadline_us);
}

static kvfi_conn *new_conn(const kvfi_node *node, kvfi_lane_kind kind) {
    kvfi_conn *conn = kvfi_alloc(sizeof *conn);
    uint32_t stall_ms = node->conf->stall_ms;
    if (conn != NULL) {
        kvfi_conn_init(conn, kind == KVFI_LANE_STORE ? STORE_PATIENCE * stall_ms : stall_ms, node->disconnects);
        conn->lends = node->conf->lend;
        conn->pace = node->conf->pace;
        conn->most_ms = MOST_PATIENCE * stall_ms;
    }
    return conn;
}

kvf_reason kvfi_node_take(kvfi_node *node, kvfi_conn **out, kvf_error *err, kvfi_lane_kind kind, const kvfi_feed *feed,
                          bool must, int64_t deadline_us) {
    kvfi_conn *conn = NULL;
    *out = NULL;
    pthread_mutex_lock(&node->lock);
    kvf_reason why = take_slot(node, &node->lanes[kind], &conn, feed, must, deadline_us);
    pthread_mutex_unlock(&node->lock);
    if (why != KVF_WHY_NONE) {
        (void)kvfi_fail(err, KVF_MISS, "%s: all connections were in use until the deadline", node->conf->text);
        return why;
    }
    if (conn == NULL) {
        conn = new_conn(node, kind);
    }
    if (conn == NULL) {
        (void)kvfi_fail(err, KVF_NOMEM, "no memory for a connection");
        why = KVF_WHY_NOMEM;
    } else {
        conn->cancelled = feed != NULL ? feed->cancelled : kvfi_interrupt_flag();
        conn->patience_us = feed != NULL ? feed->patience_us : 0;
        why = make_fit(node, conn, err, deadline_us);
    }
    if (why != KVF_WHY_NONE) {
        give_slot(node, kind, conn);
        return why;
    }
    *out = conn;
    return KVF_WHY_NONE;
}

/* PING on a connection without outstanding replies. False: it is closed. */
static bool answers_ping(kvfi_conn *conn, int64_t deadline_us) {
    kvfi_reply reply = {.last = false};
    kvfi_cmd *out = kvfi_conn_room(conn, KVFI_CONN_OUT / 2); /* nothing else is under way: there is room */
    kvfi_cmd_array(out, 1);
    kvfi_cmd_text(out, "PING");
    if (kvfi_conn_next(conn, &reply, deadline_us) != KVF_WHY_NONE) {
        return false;
    }
    if (!reply.last) {
        (void)kvfi_conn_broken(conn, "the server answered PING with an array");
    }
    return reply.last;
}

kvf_reason kvfi_node_take_sure(kvfi_node *node, kvfi_conn **out, kvf_error *err, kvfi_lane_kind kind,
                               int64_t deadline_us) {
    unsigned stalls = 0;
    kvf_reason why = kvfi_node_take(node, out, err, kind, NULL, true, deadline_us);
    if (why != KVF_WHY_NONE || !(*out)->reused || (*out)->idle_us < SURE_IDLE_US || answers_ping(*out, deadline_us)) {
        return why;
    }
    (void)kvfi_node_forgives(node, *out, &stalls);
    why = make_fit(node, *out, err, deadline_us);
    if (why != KVF_WHY_NONE) {
        give_slot(node, kind, *out);
        *out = NULL;
    }
    return why;
}

/* A connection ended that had been idle. A stall that only the batch calls one says little about the others, so they are
 * doubted just until the batch has had its retry. */
static void doubt_idle_ones(kvfi_node *node, const kvfi_conn *conn) {
    bool impatient = conn->stalled && kvfi_conn_is_impatient(conn);
    int64_t half_us = conn->idle_us / 2 > MIN_IDLE_US ? conn->idle_us / 2 : MIN_IDLE_US;
    pthread_mutex_lock(&node->lock);
    int64_t until_us = kvfi_deadline(impatient ? RETRY_WAITS * conn->patience_us : DOUBT_US << node->doubts);
    node->doubts += !impatient && node->doubts < MOST_DOUBTS;
    if (until_us > node->doubt_until_us) {
        atomic_store_explicit(&node->doubt_until_us, until_us, memory_order_relaxed);
    }
    if (half_us < node->max_idle_us) {
        atomic_store_explicit(&node->max_idle_us, half_us, memory_order_relaxed);
    }
    pthread_mutex_unlock(&node->lock);
}

bool kvfi_node_forgives(kvfi_node *node, kvfi_conn *conn, unsigned *stalls) {
    if (kvfi_conn_is_open(conn) || !(conn->broke || conn->stalled)) {
        return false;
    }
    bool untried = kvfi_conn_is_untried(conn);
    if (untried) {
        doubt_idle_ones(node, conn);
    }
    if (!untried && !(conn->stalled && (*stalls)++ == 0)) {
        return false;
    }
    kvfi_log(KVF_LOG_INFO, "%.100s: %s; requests under way are repeated on another connection", node->conf->text,
             conn->said);
    conn->stalled = conn->broke = false;
    return true;
}

/* At most once in QUIET_US: one cause often ends many connections. */
static void say_that_it_ended(kvfi_node *node, const kvfi_conn *conn) {
    int64_t now = kvfi_sys->now_us();
    pthread_mutex_lock(&node->lock);
    bool say = now - node->said_us >= QUIET_US;
    if (say) {
        node->said_us = now;
    }
    pthread_mutex_unlock(&node->lock);
    if (say) {
        kvfi_log(KVF_LOG_WARN, "%.100s: a connection %s: %s", node->conf->text, conn->stalled ? "stalled" : "broke",
                 conn->said);
    }
}

void kvfi_node_give(kvfi_node *node, kvfi_lane_kind kind, kvfi_conn *conn) {
    conn->asking = false;
    if (!kvfi_conn_is_open(conn) && (conn->stalled || conn->broke)) {
        say_that_it_ended(node, conn);
    }
    if (!kvfi_conn_is_open(conn) && conn->stalled && !kvfi_conn_is_impatient(conn)) {
        /* A hanging server still accepts connections. Each would cost the stall time again. */
        locked(node, note_failure);
    }
    give_slot(node, kind, conn);
}

bool kvfi_node_may_save(kvfi_node *node) {
    pthread_mutex_lock(&node->lock);
    bool may = may_try(&node->saves, MAX_REFUSED_MS);
    pthread_mutex_unlock(&node->lock);
    return may;
}

void kvfi_node_note_saves(kvfi_node *node, bool refused) {
    pthread_mutex_lock(&node->lock);
    if (refused) {
        trip(&node->saves, MIN_REFUSED_MS, MAX_REFUSED_MS);
    } else {
        node->saves = (kvfi_breaker){0};
    }
    pthread_mutex_unlock(&node->lock);
}

kvfi_admission kvfi_node_admission(kvfi_node *node) {
    pthread_mutex_lock(&node->lock);
    kvfi_admission admission = node->admission;
    pthread_mutex_unlock(&node->lock);
    return admission;
}

void kvfi_node_admit(kvfi_node *node, const kvfi_admission *admission) {
    pthread_mutex_lock(&node->lock);
    node->admission = *admission;
    pthread_mutex_unlock(&node->lock);
}

kvf_reason kvfi_node_trouble(kvfi_node *node) {
    pthread_mutex_lock(&node->lock);
    kvf_reason why = node->trouble_why;
    pthread_mutex_unlock(&node->lock);
    return why;
}

void kvfi_node_states(kvfi_node *node, kvfi_breaker_state *connections, kvfi_breaker_state *saves) {
    pthread_mutex_lock(&node->lock);
    *connections = state_of(&node->breaker);
    *saves = state_of(&node->saves);
    pthread_mutex_unlock(&node->lock);
}

void kvfi_node_init(kvfi_node *node, const kvfi_redis_conf *conf, const kvfi_endpoint *server, const char *name,
                    _Atomic uint64_t *connects, _Atomic uint64_t *disconnects) {
    *node = (kvfi_node){.conf = conf, .server = *server, .connects = connects, .disconnects = disconnects};
    node->max_idle_us = MAX_IDLE_US;
    node->said_us = -QUIET_US;
    const char *given = conf->tls_conf.server_name;
    snprintf(node->name, sizeof node->name, "%s", given != NULL ? given : name != NULL ? name : server->host);
    node->peer.tls = conf->tls;
    node->peer.name = node->name;
    node->trouble = (kvf_error){.status = KVF_MISS};
    snprintf(node->trouble.what, sizeof node->trouble.what, "%s: the server does not answer", conf->text);
    pthread_mutex_init(&node->lock, NULL);
    kvfi_cond_init(&node->freed);
}

void kvfi_node_trim(kvfi_node *node) {
    pthread_mutex_lock(&node->lock);
    for (unsigned kind = 0; kind < KVFI_NUM_LANES; kind++) {
        kvfi_lane *lane = &node->lanes[kind];
        while (lane->num_idle > 0) {
            kvfi_conn *conn = lane->idle[--lane->num_idle];
            kvfi_conn_close(conn);
            kvfi_free(conn);
        }
    }
    pthread_mutex_unlock(&node->lock);
}

static void forget_admission(kvfi_node *node) {
    node->admission.known = false;
}

void kvfi_node_renew(kvfi_node *node, kvfi_conn *conn) {
    kvfi_conn_close(conn);
    kvfi_node_trim(node);
    locked(node, forget_admission);
}

void kvfi_node_cleanup(kvfi_node *node) {
    kvfi_node_trim(node);
    kvfi_tls_forget(&node->peer);
    pthread_cond_destroy(&node->freed);
    pthread_mutex_destroy(&node->lock);
}
