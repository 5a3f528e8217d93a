/* SPDX-License-Identifier: Apache-2.0
 *
 * Computes the slot of a key, and parses slot maps and redirections.
 */
#include "redis/cluster/slots.h"

#include <string.h>

#include "base/base.h"

/* ---- the slot of a key ---- */

/* CRC16-CCITT (XMODEM), four bits at a time: the table fits into a cache line. */
static uint16_t crc16(const char *bytes, size_t len) {
    static const uint16_t table[16] = {0x0000, 0x1021, 0x2042, 0x3063, 0x4084, 0x50a5, 0x60c6, 0x70e7,
                                       0x8108, 0x9129, 0xa14a, 0xb16b, 0xc18c, 0xd1ad, 0xe1ce, 0xf1ef};
    unsigned crc = 0;
    for (size_t i = 0; i < len; i++) {
        unsigned byte = (uint8_t)bytes[i];
        crc = (crc << 4 ^ table[(crc >> 12 ^ byte >> 4) & 15]) & 0xffff;
        crc = (crc << 4 ^ table[(crc >> 12 ^ byte) & 15]) & 0xffff;
    }
    return (uint16_t)crc;
}

uint16_t kvfi_slot_of(const char *key, size_t len) {
    const char *open = memchr(key, '{', len);
    if (open != NULL) {
        const char *close = memchr(open, '}', len - (size_t)(open - key));
        if (close != NULL && close > open + 1) {
            key = open + 1;
            len = (size_t)(close - key);
        }
    }
    return crc16(key, len) % KVFI_NUM_SLOTS;
}

/* ---- hosts ---- */

/* False: too long, or not a possible host name. */
static bool set_name(kvfi_host *host, const char *text, size_t len) {
    if (len == 1 && text[0] == '?') {
        len = 0;
    }
    if (len >= sizeof host->name) {
        return false;
    }
    for (size_t i = 0; i < len; i++) {
        if (text[i] <= ' ' || text[i] > '~') {
            return false;
        }
    }
    memcpy(host->name, text, len);
    host->name[len] = '\0';
    return true;
}

static bool set_port(kvfi_host *host, uint64_t port) {
    host->port = (uint16_t)port;
    return port > 0 && port <= UINT16_MAX;
}

/* ---- CLUSTER SLOTS: [[first, last, [host, port, ...], replica ...] ...] ---- */

void kvfi_slots_init(kvfi_slots *slots) {
    memset(slots, 0, sizeof *slots);
    memset(slots->owner, 0xff, sizeof slots->owner);
}

static int find_host(kvfi_slots *slots, const kvfi_host *host) {
    for (unsigned i = 0; i < slots->num_hosts; i++) {
        if (slots->hosts[i].port == host->port && slots->hosts[i].empty == host->empty &&
            strcmp(slots->hosts[i].name, host->name) == 0) {
            return (int)i;
        }
    }
    if (slots->num_hosts == KVFI_MAX_NODES) {
        return -1;
    }
    slots->hosts[slots->num_hosts] = *host;
    return (int)slots->num_hosts++;
}

static bool end_range(kvfi_slots *slots) {
    if (!slots->usable || slots->host.port == 0) {
        return true;
    }
    int owner = find_host(slots, &slots->host);
    if (owner < 0) {
        return false;
    }
    for (int64_t slot = slots->first; slot <= slots->last; slot++) {
        if (slots->owner[slot] != KVFI_NO_OWNER) {
            return false; /* two owners: one of them is wrong */
        }
        slots->owner[slot] = (uint16_t)owner;
    }
    return true;
}

/* One element of a range: its first and last slot; the primary's array is the third. */
static bool take_range(kvfi_slots *slots, const kvfi_reply *reply, int64_t index) {
    if (index >= 2) {
        slots->usable = index > 2 && slots->usable; /* until the primary has given its address */
        return reply->kind == KVFI_RESP_ARRAY;
    }
    if (reply->kind != KVFI_RESP_INT || reply->num < 0 || reply->num >= KVFI_NUM_SLOTS) {
        return false;
    }
    *(index == 0 ? &slots->first : &slots->last) = reply->num;
    return index == 0 || slots->first <= slots->last;
}

/* The host of a primary: nil stands for the host that was asked, "?" for an unknown one. */
static bool take_host(kvfi_slots *slots, const kvfi_reply *reply) {
    bool nil = reply->kind == KVFI_RESP_NIL;
    if (!nil && reply->kind != KVFI_RESP_BULK) {
        return false;
    }
    slots->host = (kvfi_host){.empty = !nil && reply->len == 0};
    slots->usable =
        nil || (!(reply->len == 1 && reply->text[0] == '?') && set_name(&slots->host, reply->text, reply->len));
    return true;
}

/* One element of a primary: its host and port; more may follow. A node whose address the Cluster has lost has port 0. A
 * node that can't be connected to owns nothing, and the rest of the map remains valid. */
static bool take_primary(kvfi_slots *slots, const kvfi_reply *reply, int64_t index) {
    if (index == 0) {
        return take_host(slots, reply);
    }
    if (index == 1) {
        slots->usable = slots->usable && reply->num > 0 && set_port(&slots->host, (uint64_t)reply->num);
        return reply->kind == KVFI_RESP_INT;
    }
    return true;
}

/* After host, port and id of a primary: names and values. "hostname" is useful for TLS if the host is an address. */
static bool take_metadata(kvfi_slots *slots, const kvfi_reply *reply, int64_t index) {
    kvfi_host value = {.port = 0};
    if (index % 2 == 0) {
        slots->hostname = reply->kind == KVFI_RESP_BULK && reply->len == 8 && memcmp(reply->text, "hostname", 8) == 0;
    } else if (slots->hostname && reply->kind == KVFI_RESP_BULK && set_name(&value, reply->text, reply->len)) {
        memcpy(slots->host.alias, value.name, sizeof value.name);
    }
    return true;
}

static bool take_element(kvfi_slots *slots, const kvfi_reply *reply) {
    switch (slots->depth) {
    case 1:
        return reply->kind == KVFI_RESP_ARRAY && reply->num >= 3;
    case 2:
        return take_range(slots, reply, slots->index[1]);
    case 3:
        return slots->index[1] != 3 || take_primary(slots, reply, slots->index[2]); /* replicas are not used */
    case 4:
        return slots->index[1] != 3 || take_metadata(slots, reply, slots->index[3]);
    default:
        return true;
    }
}

/* An element was taken; an array stands for its own elements, which follow. */
static bool step(kvfi_slots *slots, const kvfi_reply *reply) {
    if (slots->depth > 0) {
        slots->index[slots->depth - 1]++;
        slots->left[slots->depth - 1]--;
    }
    if (reply->kind == KVFI_RESP_ARRAY && reply->num > 0) {
        if (slots->depth == 4) {
            return false;
        }
        slots->left[slots->depth] = reply->num;
        slots->index[slots->depth] = 0;
        slots->depth++;
    }
    while (slots->depth > 0 && slots->left[slots->depth - 1] == 0) {
        slots->depth--;
        if (slots->depth == 2 && slots->index[1] == 3 && !end_range(slots)) { /* the primary is complete */
            return false;
        }
    }
    return true;
}

bool kvfi_slots_take(kvfi_slots *slots, const kvfi_reply *reply) {
    if (slots->bad || (slots->begun && slots->depth == 0)) {
        return false;
    }
    bool good =
        slots->begun ? take_element(slots, reply) : reply->kind == KVFI_RESP_ARRAY && reply->num <= KVFI_NUM_SLOTS;
    slots->begun = true;
    slots->bad = !good || !step(slots, reply);
    return !slots->bad;
}

/* ---- redirections ---- */

static bool parse_address(kvfi_host *to, const char *text, size_t len) {
    const char *colon = len > 0 ? memrchr(text, ':', len) : NULL;
    uint64_t port = 0;
    if (colon == NULL) {
        return false;
    }
    size_t before = (size_t)(colon - text);
    if (!kvfi_parse_u64(&port, colon + 1, len - before - 1) || !set_port(to, port)) {
        return false;
    }
    if (before >= 2 && text[0] == '[' && text[before - 1] == ']') {
        return set_name(to, text + 1, before - 2);
    }
    return set_name(to, text,
                    before); /* servers write IPv6 addresses without brackets: the port follows the last colon */
}

kvfi_redirect_kind kvfi_redirect_parse(uint16_t *slot, kvfi_host *to, const char *text, size_t len) {
    kvfi_redirect_kind kind = KVFI_REDIRECT_NONE;
    size_t at = 0;
    if (len > 6 && memcmp(text, "MOVED ", 6) == 0) {
        kind = KVFI_REDIRECT_MOVED;
        at = 6;
    } else if (len > 4 && memcmp(text, "ASK ", 4) == 0) {
        kind = KVFI_REDIRECT_ASK;
        at = 4;
    } else {
        return KVFI_REDIRECT_NONE;
    }
    const char *blank = memchr(text + at, ' ', len - at);
    uint64_t number = 0;
    to->alias[0] = '\0';
    to->empty = false;
    if (blank == NULL || !kvfi_parse_u64(&number, text + at, (size_t)(blank - text) - at) || number >= KVFI_NUM_SLOTS ||
        !parse_address(to, blank + 1, len - (size_t)(blank - text) - 1)) {
        return KVFI_REDIRECT_NONE;
    }
    *slot = (uint16_t)number;
    return kind;
}
