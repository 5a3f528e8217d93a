/* SPDX-License-Identifier: Apache-2.0
 *
 * Short commands for many keys in one round trip to each server: lookups, removals, renewals (each.c). Commands are
 * sent and replies read at the same time, so their number is not bounded: a client that only writes and a server that
 * only answers would wait for each other.
 */
#include "redis/blocks/ask.h"

#include "base/interrupt.h"
#include "redis/cluster/rounds.h"

typedef struct lookup {
    const kvfi_question *question;
    kvfi_conn *conn;
    size_t num;             /* keys */
    size_t asked, answered; /* commands */
    const uint32_t *order;  /* numbers of its keys; NULL = all, in order */
    /* ---- where there are several servers: the share of one of them */
    kvfi_rounds *rounds;
    kvfi_node *node;
    bool half;        /* the reply to an ASKING has come; the next belongs to its question */
    bool stale;       /* the server is not the primary any more */
    bool logged;      /* a refusal was */
    int64_t moved_us; /* when something arrived last */
    kvf_reason why;
} lookup;

/* The key that the command is about. */
static size_t key_of(const lookup *l, size_t command) {
    size_t number = command / l->question->per;
    return l->order != NULL ? l->order[number] : number;
}

static unsigned step_of(const lookup *l, size_t command) {
    return (unsigned)(command % l->question->per);
}

static size_t num_commands(const lookup *l) {
    return l->num * l->question->per;
}

static void ask(lookup *l) {
    const kvfi_question *q = l->question;
    for (; l->asked < num_commands(l); l->asked++) {
        kvfi_cmd *out = kvfi_conn_room(l->conn, KVFI_COMMAND_BYTES);
        if (out == NULL) {
            return;
        }
        if (l->conn->asking) {
            kvfi_cmd_array(out, 1);
            kvfi_cmd_text(out, "ASKING");
        }
        q->say(q, out, key_of(l, l->asked), step_of(l, l->asked));
    }
}

static void take_refusal(lookup *l, size_t command, const kvfi_reply *reply) {
    const kvfi_question *q = l->question;
    size_t key = key_of(l, command);
    kvfi_fate fate = l->rounds != NULL ? kvfi_rounds_learn(l->rounds, (uint32_t)key, l->node, reply) : KVFI_FATE_OVER;
    if (fate == KVFI_FATE_OVER && q->doing != NULL && !l->logged) {
        l->logged = true;
        kvfi_log(KVF_LOG_WARN, "redis: %s: %.*s", q->doing, (int)(reply->len < 160 ? reply->len : 160), reply->text);
    }
    q->fail(q, key, step_of(l, command), kvfi_reply_reason(reply));
}

/* Takes all replies that have arrived. */
static kvf_reason hear(lookup *l) {
    const kvfi_question *q = l->question;
    kvfi_reply reply;
    kvfi_resp_event event = KVFI_RESP_MORE;
    while (l->answered < l->asked && (event = kvfi_resp_next(&l->conn->in, &reply)) == KVFI_RESP_REPLY) {
        l->half = l->conn->asking && !l->half;
        if (l->half && reply.last) {
            continue;
        }
        bool refused = reply.kind == KVFI_RESP_ERROR;
        if (refused && q->tier->topology == NULL && kvfi_reply_says(&reply, "READONLY")) {
            l->stale = true;
            return kvfi_reply_reason(&reply);
        }
        if (!reply.last || (!refused && !q->hear(q, key_of(l, l->answered), step_of(l, l->answered), &reply))) {
            return kvfi_conn_broken(l->conn, q->wrong);
        }
        if (refused) {
            take_refusal(l, l->answered, &reply);
        }
        l->answered++;
    }
    return event == KVFI_RESP_BAD ? kvfi_conn_broken(l->conn, KVFI_NOT_RESP) : KVF_WHY_NONE;
}

/* What is not answered misses. */
static void fail_rest(const lookup *l, kvf_reason why) {
    const kvfi_question *q = l->question;
    for (size_t i = l->answered / q->per; i < l->num; i++) {
        q->fail(q, key_of(l, i * q->per), q->per - 1, why);
    }
}

static bool is_running(const lookup *l) {
    return l->conn != NULL && l->why == KVF_WHY_NONE && l->answered < num_commands(l);
}

/* Moves as much as possible without waiting. Returns true when more may move at once. */
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
    if (got || l->asked > before) {
        int64_t now = kvfi_sys->now_us();
        if (got) {
            kvfi_conn_note_wait(l->conn, now - l->moved_us);
        }
        l->moved_us = now;
    }
    /* There is room for more questions, also if none fitted before the last were sent. */
    return got || (kvfi_conn_all_sent(l->conn) && l->asked < num_commands(l));
}

static void run(lookup *l, int64_t deadline_us) {
    l->why = KVF_WHY_NONE;
    l->moved_us = kvfi_sys->now_us();
    while (is_running(l)) {
        bool moved = step(l);
        if (is_running(l)) {
            l->why = moved ? kvfi_conn_in_time(l->conn, deadline_us) : kvfi_conn_wait(l->conn, deadline_us);
        }
        if (is_running(l)) {
            l->why = kvfi_conn_heed(l->conn);
        }
    }
}

/* A connection with the patience of the question. */
static kvf_reason take_conn(lookup *l, kvfi_node *node, int64_t deadline_us) {
    const kvfi_feed waits = {.patience_us = l->question->patience_us, .cancelled = kvfi_interrupt_flag()};
    return kvfi_node_take(node, &l->conn, NULL, l->question->lane, &waits, true, deadline_us);
}

/* Asks what is not answered yet, on one connection. *again: perhaps only the connection was at fault for its end, or
 * the server is behind a name that stands for another one now. A key whose commands were answered in part is asked
 * again as a whole. */
static kvf_reason try_once(lookup *l, uint64_t *round_trips, unsigned *stalls, bool *again, int64_t deadline_us) {
    const kvfi_question *q = l->question;
    kvfi_node *node = &q->tier->node;
    kvf_reason why = take_conn(l, node, deadline_us);
    bool was_stale = l->stale;
    *again = false;
    if (why != KVF_WHY_NONE) {
        return l->why != KVF_WHY_NONE ? l->why : why; /* of the first connection, if there is no second */
    }
    (*round_trips)++;
    l->answered -= step_of(l, l->answered);
    l->asked = l->answered;
    l->stale = false;
    run(l, deadline_us);
    if (l->stale) {
        kvfi_node_renew(node, l->conn);
        *again = !was_stale;
    } else {
        *again = l->why != KVF_WHY_NONE && kvfi_node_forgives(node, l->conn, stalls);
    }
    *again = *again && kvfi_sys->now_us() < deadline_us;
    kvfi_node_give(node, q->lane, l->conn);
    return l->why;
}

static void ask_one(const kvfi_question *q, const uint32_t *keys, size_t num, uint64_t *round_trips,
                    int64_t deadline_us) {
    lookup l = {.question = q, .order = keys, .num = num};
    kvf_reason why = KVF_WHY_NONE;
    unsigned stalls = 0;
    bool again = num > 0;
    while (again) {
        why = try_once(&l, round_trips, &stalls, &again, deadline_us);
    }
    fail_rest(&l, why);
}

/* ---- several servers: all are asked before any answer is waited for ---- */

typedef struct lookups {
    kvfi_rounds *rounds;
    lookup shares[KVFI_MAX_SHARES];
} lookups;

/* Drops servers that stall, and all servers at the deadline or once the caller interrupts. */
static void give_up_late(lookups *all) {
    int64_t now = kvfi_sys->now_us(), deadline_us = all->rounds->deadline_us;
    for (unsigned i = 0; i < all->rounds->num_shares; i++) {
        lookup *l = &all->shares[i];
        if (is_running(l) && kvfi_conn_is_cancelled(l->conn)) {
            l->why = kvfi_conn_heed(l->conn);
        } else if (is_running(l) && now >= deadline_us) {
            l->why = kvfi_conn_in_time(l->conn, deadline_us);
        } else if (is_running(l) && now - l->moved_us >= kvfi_conn_patience_us(l->conn)) {
            l->why = kvfi_conn_stall(l->conn, now - l->moved_us);
        }
    }
}

static void wait_for_any(lookups *all) {
    struct pollfd fds[KVFI_MAX_SHARES];
    nfds_t num = 0;
    int64_t until_us = all->rounds->deadline_us;
    for (unsigned i = 0; i < all->rounds->num_shares; i++) {
        const lookup *l = &all->shares[i];
        if (is_running(l)) {
            int64_t late_us = l->moved_us + kvfi_conn_patience_us(l->conn);
            until_us = late_us < until_us ? late_us : until_us;
            fds[num++] =
                (struct pollfd){.fd = l->conn->fd, .events = kvfi_conn_all_sent(l->conn) ? POLLIN : POLLIN | POLLOUT};
        }
    }
    (void)kvfi_interruptible_poll(fds, num, until_us); /* a failure is like waking up early */
}

static bool run_all(lookups *all) {
    bool moved = false, running = false;
    for (unsigned i = 0; i < all->rounds->num_shares; i++) {
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
static void begin(lookup *l, bool asking, uint64_t *round_trips) {
    if (l->node == NULL) {
        return;
    }
    l->why = take_conn(l, l->node, l->rounds->deadline_us);
    if (l->why == KVF_WHY_NONE) {
        (*round_trips)++;
        l->conn->asking = asking;
        l->moved_us = kvfi_sys->now_us();
        ask(l);
        l->why = kvfi_conn_send(l->conn);
    }
}

/* Keys without an answer: if the map now has another server for them, that one is asked in the next round. */
static void end(lookup *l) {
    kvfi_rounds *rounds = l->rounds;
    size_t answered = l->answered / l->question->per;
    bool again = false;
    if (l->conn != NULL) {
        unsigned stalls = 1; /* the others must not wait for one that stalls */
        again = kvfi_node_forgives(l->node, l->conn, &stalls);
        kvfi_node_give(l->node, l->question->lane, l->conn);
    }
    if (answered < l->num && !again && l->why != KVF_WHY_BUDGET && l->why != KVF_WHY_NOMEM &&
        l->why != KVF_WHY_CLOSED) {
        kvfi_topology_refresh(rounds->topology, rounds->deadline_us);
    }
    fail_rest(l, l->why);
    for (size_t i = answered; i < l->num; i++) {
        const kvfi_node *node = kvfi_rounds_node(rounds, l->order[i]);
        rounds->fates[l->order[i]] = again || (node != NULL && node != l->node) ? KVFI_FATE_MOVED : KVFI_FATE_OVER;
    }
}

static void ask_round(lookups *all, const kvfi_question *q, uint64_t *round_trips) {
    kvfi_rounds *rounds = all->rounds;
    kvfi_rounds_divide(rounds);
    for (unsigned i = 0; i < rounds->num_shares; i++) {
        const kvfi_share *share = &rounds->shares[i];
        all->shares[i] = (lookup){.question = q,
                                  .rounds = rounds,
                                  .node = share->node,
                                  .order = share->keys,
                                  .num = share->num,
                                  .why = KVF_WHY_UNREACHABLE};
        begin(&all->shares[i], share->asking, round_trips);
    }
    while (run_all(all)) {
    }
    for (unsigned i = 0; i < rounds->num_shares; i++) {
        end(&all->shares[i]);
    }
}

static void ask_several(const kvfi_question *q, const uint32_t *keys, size_t num, uint64_t *round_trips,
                        int64_t deadline_us) {
    kvfi_rounds *rounds = kvfi_rounds_new(q->tier->topology, q->num, deadline_us, kvfi_interrupt_flag());
    lookups *all = kvfi_alloc(sizeof *all);
    bool more = rounds != NULL && all != NULL && num > 0;
    for (size_t i = 0; i < num; i++) {
        q->fail(q, keys != NULL ? keys[i] : i, q->per - 1, more ? KVF_WHY_BUDGET : KVF_WHY_NOMEM);
    }
    if (more) {
        all->rounds = rounds;
        rounds->num_pending = num;
        for (size_t i = 0; i < num; i++) {
            rounds->pending[i] = keys != NULL ? keys[i] : (uint32_t)i;
            rounds->slots[rounds->pending[i]] = kvfi_addr_slot(&q->addrs[rounds->pending[i]]);
        }
    }
    for (; more; more = kvfi_rounds_next(rounds)) {
        ask_round(all, q, round_trips);
    }
    kvfi_free(all);
    kvfi_free(rounds);
}

void kvfi_redis_ask(const kvfi_question *q, const uint32_t *keys, size_t num, uint64_t *round_trips,
                    int64_t deadline_us) {
    (q->tier->topology != NULL ? ask_several : ask_one)(q, keys, num, round_trips, deadline_us);
}
