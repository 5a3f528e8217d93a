/* SPDX-License-Identifier: Apache-2.0
 *
 * Lookups: GETRANGE key 0 127 for every key, all in one round trip. Questions are sent and answers read at the same
 * time, so their number is not bounded: a client that only writes and a server that only answers would wait for each
 * other.
 */
#include "redis/blocks/blocks.h"

typedef struct lookup {
    kvfi_redis *tier;
    kvfi_conn *conn;
    const kvfi_addr *addrs;
    kvfi_peek *out;
    size_t num, asked, answered;
    /* ---- where there are several servers: the share of one of them */
    const uint32_t *order; /* numbers of its keys */
    uint8_t *fates;        /* by number of the key */
    kvfi_node **asks;
    kvfi_node *node;
    bool half;        /* the reply to an ASKING has come; the next belongs to its question */
    int64_t moved_us; /* when something arrived last */
    kvf_reason why;
} lookup;

static size_t index_of(const lookup *l, size_t number) {
    return l->order != NULL ? l->order[number] : number;
}

static void ask(lookup *l) {
    while (l->asked < l->num) {
        kvfi_name name;
        kvfi_cmd *out = kvfi_conn_room(l->conn, KVFI_COMMAND_BYTES);
        if (out == NULL) {
            return;
        }
        if (l->conn->asking) {
            kvfi_cmd_array(out, 1);
            kvfi_cmd_text(out, "ASKING");
        }
        kvfi_name_of(&name, l->tier->conf.prefix, &l->addrs[index_of(l, l->asked++)], 0);
        kvfi_cmd_array(out, 4);
        kvfi_cmd_text(out, "GETRANGE");
        kvfi_cmd_bulk(out, name.text, name.len);
        kvfi_cmd_text(out, "0");
        kvfi_cmd_number(out, KVFI_HEADER_BYTES - 1);
    }
}

/* An absent key has an empty range. */
static bool read_answer(lookup *l, size_t number, const kvfi_reply *reply) {
    kvfi_peek *peek = &l->out[index_of(l, number)];
    if (reply->kind == KVFI_RESP_ERROR) {
        peek->why = kvfi_reply_reason(reply);
        if (l->order != NULL) {
            l->fates[index_of(l, number)] =
                (uint8_t)kvfi_topology_learn(l->tier->topology, l->node, reply, &l->asks[index_of(l, number)]);
        }
        return true;
    }
    if (reply->kind != KVFI_RESP_BULK || reply->len > KVFI_HEADER_BYTES) {
        return false;
    }
    if (reply->len == KVFI_HEADER_BYTES) {
        memcpy(peek->header, reply->text, KVFI_HEADER_BYTES);
        peek->why = KVF_WHY_NONE;
    } else {
        peek->why = reply->len == 0 ? KVF_WHY_ABSENT : KVF_WHY_TRUNCATED;
    }
    return true;
}

/* Takes all replies that have arrived. */
static kvf_reason hear(lookup *l) {
    kvfi_reply reply;
    kvfi_resp_event event = KVFI_RESP_MORE;
    while (l->answered < l->asked && (event = kvfi_resp_next(&l->conn->in, &reply)) == KVFI_RESP_REPLY) {
        l->half = l->conn->asking && !l->half;
        if (l->half && reply.last) {
            continue;
        }
        if (!reply.last || !read_answer(l, l->answered, &reply)) {
            return kvfi_conn_broken(l->conn, "the server answered a GETRANGE with something other than a short string");
        }
        l->answered++;
    }
    return event == KVFI_RESP_BAD ? kvfi_conn_broken(l->conn, KVFI_NOT_RESP) : KVF_WHY_NONE;
}

static kvf_reason run(lookup *l, int64_t deadline_us) {
    kvf_reason why = KVF_WHY_NONE;
    while (why == KVF_WHY_NONE && l->answered < l->num) {
        bool got = false;
        ask(l);
        why = kvfi_conn_send(l->conn);
        if (why == KVF_WHY_NONE) {
            why = kvfi_conn_recv(l->conn, &got);
        }
        bool can_send = kvfi_conn_all_sent(l->conn) && l->asked < l->num;
        if (why == KVF_WHY_NONE) {
            why = got || can_send ? kvfi_conn_in_time(l->conn, deadline_us) : kvfi_conn_wait(l->conn, deadline_us);
        }
        if (why == KVF_WHY_NONE) {
            why = hear(l);
        }
    }
    return why;
}

/* Reads what is not answered yet, on one connection. *again: perhaps only the connection was at fault for its end. */
static kvf_reason try_once(lookup *l, uint64_t *round_trips, unsigned *stalls, bool *again, int64_t deadline_us) {
    kvfi_node *node = &l->tier->node;
    kvf_reason why = kvfi_node_take(node, &l->conn, NULL, KVFI_LANE_LOOKUP, NULL, true, deadline_us);
    *again = false;
    if (why != KVF_WHY_NONE) {
        return l->why != KVF_WHY_NONE ? l->why : why; /* of the first connection, if there is no second */
    }
    (*round_trips)++;
    l->asked = l->answered;
    l->why = run(l, deadline_us);
    *again = l->why != KVF_WHY_NONE && kvfi_node_forgives(node, l->conn, stalls) && kvfi_sys->now_us() < deadline_us;
    kvfi_node_give(node, KVFI_LANE_LOOKUP, l->conn);
    return l->why;
}

void kvfi_redis_peek(kvfi_tier *base, const kvfi_addr *addrs, size_t num, kvfi_peek *out, uint64_t *round_trips,
                     int64_t deadline_us) {
    kvfi_redis *tier = kvfi_redis_of(base);
    lookup l = {.tier = tier, .addrs = addrs, .num = num, .out = out};
    if (num == 0) {
        return;
    }
    kvf_reason why = KVF_WHY_NONE;
    unsigned stalls = 0;
    bool again = true;
    while (again) {
        why = try_once(&l, round_trips, &stalls, &again, deadline_us);
    }
    for (size_t i = l.answered; i < num; i++) {
        out[i].why = why;
    }
}

/* ---- several servers: all are asked before any answer is waited for ---- */

#define MAX_SHARES    64u /* servers of one round; keys of further servers wait for the next round */
#define MAX_ROUNDS    6u  /* the first, and five redirections */
#define FIRST_WAIT_MS 5

typedef struct lookups {
    kvfi_redis *tier;
    const kvfi_addr *addrs;
    kvfi_peek *out;
    int64_t deadline_us;
    kvfi_node **asks;  /* for each key: the server to ask this once */
    uint32_t *order;   /* numbers of keys, share after share */
    uint32_t *pending; /* numbers of the keys of the next round */
    uint8_t *place;    /* for each pending one: its share */
    uint8_t *fates;
    size_t num, num_pending;
    unsigned num_shares;
    bool asking[MAX_SHARES];
    lookup shares[MAX_SHARES];
} lookups;

static unsigned share_of(lookups *all, kvfi_node *node, bool asking) {
    for (unsigned i = 0; i < all->num_shares; i++) {
        if (all->shares[i].node == node && all->asking[i] == asking) {
            return i;
        }
    }
    if (all->num_shares == MAX_SHARES) {
        return MAX_SHARES;
    }
    all->asking[all->num_shares] = asking;
    all->shares[all->num_shares] = (lookup){.tier = all->tier,
                                            .addrs = all->addrs,
                                            .out = all->out,
                                            .fates = all->fates,
                                            .asks = all->asks,
                                            .node = node,
                                            .why = KVF_WHY_UNREACHABLE};
    return all->num_shares++;
}

/* Sorts the pending keys by server. */
static void sort(lookups *all) {
    size_t at = 0, left = 0;
    all->num_shares = 0;
    for (size_t i = 0; i < all->num_pending; i++) {
        uint32_t key = all->pending[i];
        kvfi_node *ask_node = all->asks[key];
        kvfi_node *node = ask_node;
        if (node == NULL) {
            node = kvfi_topology_node(all->tier->topology, kvfi_addr_slot(&all->addrs[key]));
        }
        all->place[i] = (uint8_t)share_of(all, node, ask_node != NULL);
        all->asks[key] = NULL;
        all->fates[key] = all->place[i] < MAX_SHARES ? KVFI_FATE_OVER : KVFI_FATE_MOVED;
        if (all->place[i] < MAX_SHARES) {
            all->shares[all->place[i]].num++;
        }
    }
    for (unsigned i = 0; i < all->num_shares; i++) {
        lookup *l = &all->shares[i];
        l->order = all->order + at;
        at += l->num;
        l->num = 0;
    }
    for (size_t i = 0; i < all->num_pending; i++) {
        if (all->place[i] < MAX_SHARES) {
            lookup *l = &all->shares[all->place[i]];
            all->order[(size_t)(l->order - all->order) + l->num++] = all->pending[i];
        } else {
            all->pending[left++] = all->pending[i];
        }
    }
    all->num_pending = left;
}

static bool is_running(const lookup *l) {
    return l->conn != NULL && l->why == KVF_WHY_NONE && l->answered < l->num;
}

/* Moves as much as possible without waiting. Returns true when something moved. */
static bool step(lookup *l) {
    bool got = false;
    size_t before = l->asked;
    ask(l);
    l->why = kvfi_conn_send(l->conn);
    if (l->why == KVF_WHY_NONE) {
        l->why = kvfi_conn_recv(l->conn, &got);
    }
    if (l->why == KVF_WHY_NONE) {
        l->why = hear(l);
    }
    if (!got && l->asked == before) {
        return false;
    }
    int64_t now = kvfi_sys->now_us();
    if (got) {
        kvfi_conn_note_wait(l->conn, now - l->moved_us);
    }
    l->moved_us = now;
    return true;
}

/* Drops servers that stall, and all servers at the deadline. */
static void give_up_late(lookups *all) {
    int64_t now = kvfi_sys->now_us();
    for (unsigned i = 0; i < all->num_shares; i++) {
        lookup *l = &all->shares[i];
        if (is_running(l) && now >= all->deadline_us) {
            l->why = kvfi_conn_in_time(l->conn, all->deadline_us);
        } else if (is_running(l) && now - l->moved_us >= kvfi_conn_patience_us(l->conn)) {
            l->why = kvfi_conn_stall(l->conn, now - l->moved_us);
        }
    }
}

static void wait_for_any(lookups *all) {
    struct pollfd fds[MAX_SHARES];
    nfds_t num = 0;
    int64_t until_us = all->deadline_us;
    for (unsigned i = 0; i < all->num_shares; i++) {
        const lookup *l = &all->shares[i];
        if (is_running(l)) {
            int64_t late_us = l->moved_us + kvfi_conn_patience_us(l->conn);
            until_us = late_us < until_us ? late_us : until_us;
            fds[num++] =
                (struct pollfd){.fd = l->conn->fd, .events = kvfi_conn_all_sent(l->conn) ? POLLIN : POLLIN | POLLOUT};
        }
    }
    if (num > 0) {
        (void)kvfi_sys->poll(fds, num, kvfi_poll_ms(until_us)); /* a failure is like waking up early */
    }
}

static bool run_all(lookups *all) {
    bool moved = false, running = false;
    for (unsigned i = 0; i < all->num_shares; i++) {
        lookup *l = &all->shares[i];
        if (is_running(l)) {
            moved = step(l) || moved;
            running = running || is_running(l);
        }
    }
    if (running && !moved) {
        wait_for_any(all);
    }
    give_up_late(all);
    return running;
}

/* The first questions are sent as soon as there is a connection, before the next server is even contacted. */
static void begin(lookups *all, lookup *l, bool asking, uint64_t *round_trips) {
    if (l->node == NULL) {
        return;
    }
    l->why = kvfi_node_take(l->node, &l->conn, NULL, KVFI_LANE_LOOKUP, NULL, true, all->deadline_us);
    if (l->why == KVF_WHY_NONE) {
        (*round_trips)++;
        l->conn->asking = asking;
        l->moved_us = kvfi_sys->now_us();
        ask(l);
        l->why = kvfi_conn_send(l->conn);
    }
}

/* Keys without an answer: if the map now has another server for them, that one is asked in the next round. */
static void end(lookups *all, lookup *l) {
    kvfi_topology *t = all->tier->topology;
    bool again = false;
    if (l->conn != NULL) {
        unsigned stalls = 1; /* the others must not wait for one that stalls */
        again = kvfi_node_forgives(l->node, l->conn, &stalls);
        kvfi_node_give(l->node, KVFI_LANE_LOOKUP, l->conn);
    }
    if (l->answered < l->num && !again && l->why != KVF_WHY_BUDGET && l->why != KVF_WHY_NOMEM) {
        kvfi_topology_refresh(t, all->deadline_us);
    }
    for (size_t i = l->answered; i < l->num; i++) {
        uint32_t key = l->order[i];
        kvfi_node *node = kvfi_topology_node(t, kvfi_addr_slot(&all->addrs[key]));
        all->out[key].why = l->why;
        all->fates[key] = again || (node != NULL && node != l->node) ? KVFI_FATE_MOVED : KVFI_FATE_OVER;
    }
}

/* Items that are not complete become pending again. Returns false if there are none, or there is no time. */
static bool gather(lookups *all, unsigned round) {
    bool wait = false, refresh = false;
    all->num_pending = 0;
    for (uint32_t key = 0; key < all->num; key++) {
        if (all->fates[key] != KVFI_FATE_OVER) {
            all->pending[all->num_pending++] = key;
            wait = wait || all->fates[key] == KVFI_FATE_WAIT;
            refresh = refresh || all->fates[key] != KVFI_FATE_ASK;
        }
    }
    int wait_ms = wait ? FIRST_WAIT_MS << round : 0;
    if (all->num_pending == 0 || kvfi_sys->now_us() + (int64_t)wait_ms * 1000 >= all->deadline_us) {
        return false;
    }
    if (wait) {
        (void)kvfi_sys->poll(NULL, 0, wait_ms);
    }
    if (refresh) {
        kvfi_topology_refresh(all->tier->topology, all->deadline_us);
    }
    return true;
}

static void look_up_all(lookups *all, uint64_t *round_trips) {
    bool more = true;
    for (unsigned round = 0; more && round < MAX_ROUNDS; round++) {
        sort(all);
        for (unsigned i = 0; i < all->num_shares; i++) {
            begin(all, &all->shares[i], all->asking[i], round_trips);
        }
        while (run_all(all)) {
        }
        for (unsigned i = 0; i < all->num_shares; i++) {
            end(all, &all->shares[i]);
        }
        more = gather(all, round);
    }
}

void kvfi_redis_spread_peek(kvfi_tier *base, const kvfi_addr *addrs, size_t num, kvfi_peek *out, uint64_t *round_trips,
                            int64_t deadline_us) {
    lookups *all = kvfi_alloc(sizeof *all + num * (sizeof(kvfi_node *) + 2 * sizeof(uint32_t) + 2));
    for (size_t i = 0; i < num; i++) {
        out[i].why = all == NULL ? KVF_WHY_NOMEM : KVF_WHY_BUDGET;
    }
    if (all == NULL) {
        return;
    }
    all->tier = kvfi_redis_of(base);
    all->addrs = addrs;
    all->out = out;
    all->deadline_us = deadline_us;
    all->asks = (kvfi_node **)(void *)(all + 1);
    all->order = (uint32_t *)(void *)(all->asks + num);
    all->pending = all->order + num;
    all->place = (uint8_t *)(all->pending + num);
    all->fates = all->place + num;
    all->num = all->num_pending = num;
    memset(all->asks, 0, num * sizeof *all->asks);
    memset(all->fates, 0, num);
    for (uint32_t key = 0; key < num; key++) {
        all->pending[key] = key;
    }
    look_up_all(all, round_trips);
    kvfi_free(all);
}
