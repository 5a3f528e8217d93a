/* SPDX-License-Identifier: Apache-2.0
 *
 * Many records at once: lookups (GETRANGE of the header), removals (UNLINK), and renewals (PEXPIRE), in one round trip
 * to each server.
 *
 * Only the header says how many parts a record has. A removal or renewal does not wait for it: one round trip brings
 * the header and reaches the first two parts, and only longer records take further ones.
 */
#include "redis/blocks/ask.h"

#define FIRST_PARTS 2u
#define MOST_PARTS  256u /* of one key in one round trip */

static void say_range(kvfi_cmd *out, const kvfi_name *name, size_t bytes) {
    kvfi_cmd_array(out, 4);
    kvfi_cmd_text(out, "GETRANGE");
    kvfi_cmd_bulk(out, name->text, name->len);
    kvfi_cmd_text(out, "0");
    kvfi_cmd_number(out, bytes - 1);
}

/* ---- peek ---- */

static void say_peek(const kvfi_question *q, kvfi_cmd *out, size_t key, unsigned step) {
    kvfi_name name;
    (void)step;
    kvfi_name_of(&name, q->tier->conf.prefix, &q->addrs[key], 0);
    say_range(out, &name, KVFI_HEADER_BYTES);
}

/* An absent key has an empty range. */
static bool hear_peek(const kvfi_question *q, size_t key, unsigned step, const kvfi_reply *reply) {
    kvfi_peek *peek = (kvfi_peek *)q->arg + key;
    (void)step;
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

static void fail_peek(const kvfi_question *q, size_t key, unsigned step, kvf_reason why) {
    (void)step;
    ((kvfi_peek *)q->arg)[key].why = why;
}

void kvfi_redis_peek(kvfi_tier *base, const kvfi_addr *addrs, size_t num, kvfi_peek *out, uint64_t *round_trips,
                     int64_t deadline_us, int64_t patience_us) {
    kvfi_question q = {.tier = kvfi_redis_of(base),
                       .patience_us = patience_us,
                       .addrs = addrs,
                       .num = num,
                       .lane = KVFI_LANE_LOOKUP,
                       .per = 1,
                       .say = say_peek,
                       .hear = hear_peek,
                       .fail = fail_peek,
                       .wrong = "the server answered a GETRANGE with something other than a short string",
                       .arg = out};
    kvfi_redis_ask(&q, NULL, num, round_trips, deadline_us);
}

/* ---- touch and remove ---- */

/* One record of a deed. */
typedef struct mark {
    uint64_t parts; /* by its header; 0 = not known */
    uint64_t seen;  /* parts that were there, up to the first that was not */
    bool there;     /* its first part was */
    bool more;      /* the last part that was asked of was there */
    kvf_reason why; /* it failed */
} mark;

/* One round trip: the header first, if `heads` is 1, and then parts from `first` on. */
typedef struct pass {
    kvfi_deed deed;
    mark *marks;
    uint64_t first;
    unsigned heads;
} pass;

static void say_touch(const kvfi_redis *tier, kvfi_cmd *out, const kvfi_name *name, const kvfi_addr *addr) {
    if (tier->conf.ttl_s == 0) {
        say_range(out, name, 1); /* reading it is a use of it */
        return;
    }
    kvfi_cmd_array(out, 3);
    kvfi_cmd_text(out, "PEXPIRE");
    kvfi_cmd_bulk(out, name->text, name->len);
    kvfi_cmd_number(out, kvfi_ttl_ms(tier->conf.ttl_s, addr));
}

static void say_deed(const kvfi_question *q, kvfi_cmd *out, size_t key, unsigned step) {
    const pass *p = q->arg;
    kvfi_name name;
    bool head = step < p->heads;
    if (step == 0) {
        p->marks[key].why = KVF_WHY_NONE; /* on another server, perhaps */
    }
    kvfi_name_of(&name, q->tier->conf.prefix, &q->addrs[key], head ? 0 : p->first + step - p->heads);
    if (head) {
        say_range(out, &name, KVFI_HEADER_BYTES);
    } else if (p->deed == KVFI_TOUCH) {
        say_touch(q->tier, out, &name, &q->addrs[key]);
    } else {
        kvfi_cmd_array(out, 2);
        kvfi_cmd_text(out, "UNLINK");
        kvfi_cmd_bulk(out, name.text, name.len);
    }
}

static void take_head(const kvfi_redis *tier, mark *m, const kvfi_reply *reply) {
    kvfi_header header;
    if (reply->len == KVFI_HEADER_BYTES && kvfi_header_decode(&header, (const uint8_t *)reply->text) == KVF_WHY_NONE) {
        uint64_t bytes = kvfi_record_bytes(&header);
        bool whole = kvfi_stays_whole(header.codec == KVFI_CODEC_SEALED, bytes);
        m->parts = whole ? 1 : kvfi_num_parts(bytes, tier->conf.part);
    }
}

static bool hear_deed(const kvfi_question *q, size_t key, unsigned step, const kvfi_reply *reply) {
    const pass *p = q->arg;
    mark *m = &p->marks[key];
    bool head = step < p->heads;
    bool ranges = head || (p->deed == KVFI_TOUCH && q->tier->conf.ttl_s == 0);
    if (reply->kind != (ranges ? KVFI_RESP_BULK : KVFI_RESP_INT)) {
        return false;
    }
    if (head) {
        take_head(q->tier, m, reply);
        return true;
    }
    uint64_t part = p->first + step - p->heads;
    m->more = ranges ? reply->len > 0 : reply->num > 0;
    m->seen += m->more && m->seen == part; /* once, also if it is asked again after a lost connection */
    m->there = m->there || (m->more && part == 0);
    return true;
}

/* What is wrong with the key is told by the commands that change it. */
static void fail_deed(const kvfi_question *q, size_t key, unsigned step, kvf_reason why) {
    const pass *p = q->arg;
    if (step >= p->heads) {
        p->marks[key].why = why;
    }
}

/* The keys whose records may have more parts than those before `end`. A part may be missing among them, and the
 * writer's parts may have been shorter than ours. */
static size_t select_longer(const mark *marks, size_t num, uint64_t end, uint32_t *keys) {
    size_t longer = 0;
    for (uint32_t i = 0; i < num; i++) {
        if (marks[i].why == KVF_WHY_NONE && (marks[i].more || marks[i].parts > end)) {
            keys[longer++] = i;
        }
    }
    return longer;
}

/* A record that lacks a part can't be loaded, whatever its first part says. */
static kvf_reason outcome(const mark *m, kvfi_deed deed) {
    if (m->why != KVF_WHY_NONE) {
        return m->why;
    }
    bool whole = m->there && (deed == KVFI_REMOVE || m->seen >= m->parts);
    return whole ? KVF_WHY_NONE : KVF_WHY_ABSENT;
}

static void do_all(kvfi_question *q, pass *p, uint32_t *keys, int64_t deadline_us) {
    uint64_t round_trips = 0;
    kvfi_redis_ask(q, NULL, q->num, &round_trips, deadline_us);
    uint64_t end = FIRST_PARTS;
    for (size_t longer = select_longer(p->marks, q->num, end, keys); longer > 0;
         longer = select_longer(p->marks, q->num, end, keys)) {
        p->heads = 0;
        p->first = end;
        q->per = end < MOST_PARTS ? (unsigned)end : MOST_PARTS;
        end += q->per;
        kvfi_redis_ask(q, keys, longer, &round_trips, deadline_us);
    }
}

void kvfi_redis_each(kvfi_tier *base, kvfi_deed deed, const kvfi_addr *addrs, size_t num, kvf_reason *out,
                     int64_t deadline_us, int64_t patience_us) {
    mark *marks = kvfi_alloc_zero(num + 1, sizeof *marks + sizeof(uint32_t));
    if (marks == NULL) {
        for (size_t i = 0; i < num; i++) {
            out[i] = KVF_WHY_NOMEM;
        }
        return;
    }
    pass p = {.deed = deed, .marks = marks, .heads = 1};
    kvfi_question q = {.tier = kvfi_redis_of(base),
                       .patience_us = patience_us,
                       .addrs = addrs,
                       .num = num,
                       .lane = KVFI_LANE_STORE,
                       .per = 1 + FIRST_PARTS,
                       .say = say_deed,
                       .hear = hear_deed,
                       .fail = fail_deed,
                       .wrong = "the server answered an UNLINK or a PEXPIRE with something other than a number",
                       .doing = deed == KVFI_REMOVE ? "a block was not removed" : "a block was not renewed",
                       .arg = &p};
    do_all(&q, &p, (uint32_t *)(void *)(marks + num), deadline_us);
    for (size_t i = 0; i < num; i++) {
        out[i] = outcome(&marks[i], deed);
    }
    kvfi_free(marks);
}
