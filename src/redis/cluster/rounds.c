/* SPDX-License-Identifier: Apache-2.0
 *
 * Divides keys by server, and collects those that need another round.
 */
#include "redis/cluster/rounds.h"

#include "base/interrupt.h"

#define MAX_ROUNDS     6u /* the first, and five redirections */
#define FIRST_WAIT_MS  5
#define CANCEL_STEP_MS 5 /* how often a wait checks whether it is cancelled */

kvfi_rounds *kvfi_rounds_new(kvfi_topology *topology, size_t num, int64_t deadline_us, const atomic_bool *cancelled) {
    enum { EACH = sizeof(kvfi_node *) + 2 * sizeof(uint32_t) + sizeof(uint16_t) + 2 };
    kvfi_rounds *r = num <= UINT32_MAX ? kvfi_alloc_zero(1, sizeof *r + num * EACH) : NULL;
    if (r == NULL) {
        return NULL;
    }
    r->topology = topology;
    r->deadline_us = deadline_us;
    r->cancelled = cancelled;
    r->num = r->num_pending = num;
    r->asks = (kvfi_node **)(void *)(r + 1);
    r->keys = (uint32_t *)(void *)(r->asks + num);
    r->pending = r->keys + num;
    r->slots = (uint16_t *)(void *)(r->pending + num);
    r->fates = (uint8_t *)(r->slots + num);
    r->places = r->fates + num;
    for (uint32_t key = 0; key < num; key++) {
        r->pending[key] = key;
    }
    return r;
}

kvfi_node *kvfi_rounds_node(const kvfi_rounds *r, uint32_t key) {
    return kvfi_topology_node(r->topology, r->slots[key]);
}

/* The share of that server, a new one if necessary; KVFI_MAX_SHARES: no room in this round. */
static unsigned share_of(kvfi_rounds *r, kvfi_node *node, bool asking) {
    for (unsigned i = 0; i < r->num_shares; i++) {
        if (r->shares[i].node == node && r->shares[i].asking == asking) {
            return i;
        }
    }
    if (r->num_shares == KVFI_MAX_SHARES) {
        return KVFI_MAX_SHARES;
    }
    r->shares[r->num_shares] = (kvfi_share){.node = node, .asking = asking};
    return r->num_shares++;
}

/* Counts the keys of each share. */
static void assign(kvfi_rounds *r) {
    r->num_shares = 0;
    for (size_t i = 0; i < r->num_pending; i++) {
        uint32_t key = r->pending[i];
        kvfi_node *ask = r->asks[key];
        unsigned place = share_of(r, ask != NULL ? ask : kvfi_rounds_node(r, key), ask != NULL);
        bool fits = place < KVFI_MAX_SHARES;
        r->places[i] = (uint8_t)place;
        r->fates[key] = fits ? KVFI_FATE_OVER : KVFI_FATE_MOVED;
        if (fits) {
            r->asks[key] = NULL;
            r->shares[place].num++;
        }
    }
}

void kvfi_rounds_divide(kvfi_rounds *r) {
    uint32_t *keys = r->keys;
    assign(r);
    for (unsigned i = 0; i < r->num_shares; i++) {
        r->shares[i].keys = keys;
        keys += r->shares[i].num;
        r->shares[i].num = 0;
    }
    for (size_t i = 0; i < r->num_pending; i++) {
        if (r->places[i] < KVFI_MAX_SHARES) {
            kvfi_share *share = &r->shares[r->places[i]];
            share->keys[share->num++] = r->pending[i];
        }
    }
}

kvfi_fate kvfi_rounds_learn(kvfi_rounds *r, uint32_t key, const kvfi_node *from, const kvfi_reply *reply) {
    kvfi_fate fate = kvfi_topology_learn(r->topology, from, reply, &r->asks[key]);
    if (fate != KVFI_FATE_OVER) {
        r->fates[key] = (uint8_t)fate;
    }
    return fate;
}

/* Waits, if there is time for that. False: there is none, or nobody waits for the keys any more. */
static bool wait_for(const kvfi_rounds *r, int64_t wait_ms) {
    int64_t until_us = kvfi_deadline(wait_ms * 1000);
    for (;;) {
        (void)kvfi_interrupt_look();
        if (until_us >= r->deadline_us ||
            (r->cancelled != NULL && atomic_load_explicit(r->cancelled, memory_order_relaxed))) {
            return false;
        }
        int left_ms = kvfi_poll_ms(until_us);
        if (left_ms == 0) {
            return true;
        }
        (void)kvfi_sys->poll(NULL, 0, left_ms < CANCEL_STEP_MS ? left_ms : CANCEL_STEP_MS);
    }
}

bool kvfi_rounds_next(kvfi_rounds *r) {
    bool wait = false, refresh = false;
    r->num_pending = 0;
    for (uint32_t key = 0; key < r->num; key++) {
        if (r->fates[key] != KVFI_FATE_OVER) {
            r->pending[r->num_pending++] = key;
            wait = wait || r->fates[key] == KVFI_FATE_WAIT;
            refresh = refresh || r->fates[key] != KVFI_FATE_ASK;
        }
    }
    int64_t wait_ms = wait ? FIRST_WAIT_MS << r->number : 0;
    bool more = r->num_pending > 0 && ++r->number < MAX_ROUNDS && wait_for(r, wait_ms);
    if (refresh) {
        kvfi_topology_refresh(r->topology, r->deadline_us);
    }
    return more;
}
