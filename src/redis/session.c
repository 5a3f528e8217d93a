/* SPDX-License-Identifier: Apache-2.0
 *
 * Sessions as other clients know them: a HASH named by the id, with a field for each part. It is written under another
 * name and then renamed, so a reader sees the old one or the new one. The time to live stays with the renamed key.
 */
#include <stdio.h>

#include "redis/advice/facts.h"
#include "redis/cluster/key.h"
#include "redis/redis.h"

#define MAX_ID_BYTES     512u
#define TEMPORARY_MS     "600000" /* the leftover of a writer that dies halfway expires */
#define DEFAULT_MAX_BULK ((uint64_t)512 << 20)

/* A server that copies a field of hundreds of megabytes into its reply stands still for a second or more, which says
 * nothing about its health. So such a talk is limited only by its deadline. */
static kvf_status begin_patient(kvfi_talk *talk, kvfi_tier *base, kvf_error *err, const char *id, kvfi_lane_kind lane,
                                int64_t deadline_us) {
    KVFI_TRY(kvfi_talk_begin(talk, kvfi_redis_of(base), err, kvfi_slot_of(id, strlen(id)), lane, deadline_us));
    talk->conn->patient = true;
    return KVF_OK;
}

static void end_patient(kvfi_talk *talk) {
    talk->conn->patient = false;
    kvfi_talk_end(talk);
}

typedef char temporary_name[MAX_ID_BYTES + 48];

/* A name on the same slot of a Cluster as the id, which RENAME requires: a name is on the slot of the text in its first
 * {...}, or of the whole name without braces. For an id with a stray } no such name can be made this way. On a single
 * server that does not matter. */
static kvf_status name_temporary(temporary_name out, kvf_error *err, const char *id) {
    uint64_t chance = 0;
    const char *open = strchr(id, '{');
    const char *close = open != NULL ? strchr(open, '}') : NULL;
    bool tagged = close != NULL && close > open + 1;
    if (strlen(id) > MAX_ID_BYTES) {
        return kvfi_fail(err, KVF_LIMIT, "the id of a session has at most %u bytes", MAX_ID_BYTES);
    }
    if (kvfi_sys->random(&chance, sizeof chance) != 0) {
        return kvfi_fail(err, KVF_IO, "no random number for a temporary name");
    }
    snprintf(out, sizeof(temporary_name), tagged ? "%s:kvf-tmp-%016llx" : "{%s}:kvf-tmp-%016llx", id,
             (unsigned long long)chance);
    return KVF_OK;
}

/* ---- put ---- */

static kvf_status hear_int(kvfi_talk *talk, const char *doing) {
    kvfi_reply reply;
    KVFI_TRY(kvfi_talk_hear(talk, &reply));
    return reply.kind == KVFI_RESP_INT ? KVF_OK : kvfi_talk_refused(talk, &reply, doing);
}

static kvfi_place place_of(const kvfi_part *part) {
    return (kvfi_place){
        .iov = part->iov != NULL ? part->iov : &part->data, .skip = part->skip, .bytes = part->data.iov_len};
}

/* Queues HSET key name data, the data straight from its memory. `watch` (or NULL) sees it first. */
static kvf_status say_field(kvfi_talk *talk, const char *key, const kvfi_part *part, const kvfi_put_watch *watch) {
    KVFI_TRY(kvfi_talk_send_body(talk));
    kvfi_cmd *out = kvfi_conn_room(talk->conn, MAX_ID_BYTES + KVFI_COMMAND_BYTES);
    if (out == NULL) {
        return kvfi_fail(talk->err, KVF_IO, "no room for a command"); /* impossible: few commands are under way */
    }
    kvfi_cmd_array(out, 4);
    kvfi_cmd_text(out, "HSET");
    kvfi_cmd_text(out, key);
    kvfi_cmd_text(out, part->name);
    kvfi_cmd_bulk_header(out, part->data.iov_len);
    if (watch != NULL) {
        kvfi_conn_record(talk->conn, place_of(part), false, watch->next, watch->ctx);
    } else {
        kvfi_conn_body(talk->conn, place_of(part));
    }
    kvfi_cmd_crlf(out);
    talk->unheard++;
    return KVF_OK;
}

/* What has the id now is replaced, unless it is not a session. */
static kvf_status hear_type(kvfi_talk *talk, const char *id) {
    kvfi_reply reply;
    KVFI_TRY(kvfi_talk_hear(talk, &reply));
    if (reply.kind != KVFI_RESP_STATUS) {
        return kvfi_talk_refused(talk, &reply, "looking at the type of a key");
    }
    if (!kvfi_reply_says(&reply, "none") && !kvfi_reply_says(&reply, "hash")) {
        return kvfi_fail(talk->err, KVF_CONFIG, "%s: the key \"%.64s\" holds a %.*s, not a session: choose another id",
                         talk->tier->conf.text, id, (int)reply.len, reply.text);
    }
    return KVF_OK;
}

/* The smallest part is sent first: from then on the key exists, and can be given a time after which it expires. */
static size_t smallest(const kvfi_part *parts, size_t num) {
    size_t best = 0;
    for (size_t i = 1; i < num; i++) {
        if (parts[i].data.iov_len < parts[best].data.iov_len) {
            best = i;
        }
    }
    return best;
}

static kvf_status say_ttl(kvfi_talk *talk, const char *key, uint32_t ttl_s) {
    char seconds[16];
    snprintf(seconds, sizeof seconds, "%u", ttl_s);
    return ttl_s > 0 ? kvfi_talk_say(talk, "EXPIRE", key, seconds, NULL) : kvfi_talk_say(talk, "PERSIST", key, NULL);
}

/* The replies to what begins a put: the type of the id, the first field, its time to live. */
static kvf_status hear_begin(kvfi_talk *talk, const char *id) {
    KVFI_TRY(hear_type(talk, id));
    KVFI_TRY(hear_int(talk, "writing a session"));
    return hear_int(talk, "setting a time to live");
}

/* The last part, which is known only now. *last must stay until its reply is there, also for clean_up. */
static kvf_status say_last(kvfi_talk *talk, const char *key, kvfi_part *last, const kvfi_put_watch *watch) {
    KVFI_TRY(kvfi_talk_send_body(talk));
    KVFI_TRY(watch->end(watch->ctx, last));
    return say_field(talk, key, last, NULL);
}

/* While the server answers one command and stores its field, the next field is already on its way. With a watch the
 * last part is empty at first, and *last is a copy of it. */
static kvf_status put_fields(kvfi_talk *talk, const char *key, const char *id, const kvfi_part *parts, size_t num,
                             kvfi_part *last, const kvfi_put_watch *watch, uint32_t ttl_s) {
    size_t first = watch != NULL ? num - 1 : smallest(parts, num);
    bool begun = false;
    if (watch != NULL) {
        watch->begin(watch->ctx);
    }
    KVFI_TRY(kvfi_talk_say(talk, "TYPE", id, NULL));
    KVFI_TRY(say_field(talk, key, &parts[first], NULL));
    KVFI_TRY(kvfi_talk_say(talk, "PEXPIRE", key, TEMPORARY_MS, NULL));
    for (size_t i = 0; i < num; i++) {
        if (i != first) {
            KVFI_TRY(say_field(talk, key, &parts[i], watch));
            KVFI_TRY(begun ? hear_int(talk, "writing a session") : hear_begin(talk, id));
            begun = true;
        }
    }
    if (watch != NULL) {
        KVFI_TRY(say_last(talk, key, last, watch));
        KVFI_TRY(begun ? hear_int(talk, "writing a session") : hear_begin(talk, id));
        begun = true;
    }
    KVFI_TRY(say_ttl(talk, key, ttl_s));
    KVFI_TRY(begun ? hear_int(talk, "writing a session") : hear_begin(talk, id));
    return hear_int(talk, "setting a time to live");
}

static kvf_status publish(kvfi_talk *talk, const char *key, const char *id) {
    kvfi_reply reply;
    KVFI_TRY(kvfi_talk_say(talk, "RENAME", key, id, NULL));
    KVFI_TRY(kvfi_talk_hear(talk, &reply));
    return reply.kind == KVFI_RESP_STATUS ? KVF_OK : kvfi_talk_refused(talk, &reply, "publishing a session");
}

/* Removes the temporary key after a failure. If the connection is gone, its time to live does. */
static void clean_up(kvfi_talk *talk, const char *key) {
    kvf_error *err = talk->err;
    talk->err = NULL; /* the caller is told of the first failure */
    kvf_status status = kvfi_conn_is_open(talk->conn) ? kvfi_talk_send_body(talk) : KVF_IO;
    if (status == KVF_OK) {
        status = kvfi_talk_say(talk, "UNLINK", key, NULL);
    }
    while (status == KVF_OK && talk->unheard > 0) {
        kvfi_reply reply;
        status = kvfi_talk_hear(talk, &reply);
    }
    talk->err = err;
}

static kvf_status put_once(kvfi_talk *talk, const char *key, const char *id, const kvfi_part *parts, size_t num,
                           const kvfi_put_watch *watch, uint32_t ttl_s) {
    kvfi_part last = parts[num - 1];
    kvf_status status = put_fields(talk, key, id, parts, num, &last, watch, ttl_s);
    if (status == KVF_OK) {
        status = publish(talk, key, id);
    }
    if (status != KVF_OK) {
        clean_up(talk, key);
    }
    return status;
}

kvf_status kvfi_redis_session_put(kvfi_tier *base, kvf_error *err, const char *id, const kvfi_part *parts, size_t num,
                                  const kvfi_put_watch *watch, uint32_t ttl_s, int64_t deadline_us) {
    kvfi_talk talk = {.ask = NULL};
    temporary_name key;
    unsigned tries = 0;
    kvf_status status;
    KVFI_TRY(name_temporary(key, err, id));
    do {
        KVFI_TRY(begin_patient(&talk, base, err, id, KVFI_LANE_STORE, deadline_us));
        status = put_once(&talk, key, id, parts, num, watch, ttl_s);
        end_patient(&talk);
        talk.ask = NULL; /* nothing can be renamed on a slot that is being imported: wait for it */
    } while (status != KVF_OK && kvfi_talk_again(&talk, &tries));
    return status;
}

/* ---- get ---- */

/* A key of another type is not a session. */
static kvf_status not_a_session(kvfi_talk *talk, const kvfi_reply *reply, const char *doing) {
    if (reply->kind == KVFI_RESP_ERROR && kvfi_reply_says(reply, "WRONGTYPE")) {
        return kvfi_fail(talk->err, KVF_MISS, "%s: no such session: the key does not hold a HASH",
                         talk->tier->conf.text);
    }
    return kvfi_talk_refused(talk, reply, doing);
}

typedef struct question {
    const char *id;
    kvfi_part *parts;
    int64_t *ttl_ms; /* NULL: not asked */
} question;

/* All questions are sent before the first reply is read: the server then answers them in one go, without another client
 * in between. */
static kvf_status ask_all(kvfi_talk *talk, const char *command, const question *q, size_t from, size_t to) {
    for (size_t i = from; i < to; i++) {
        KVFI_TRY(kvfi_talk_say(talk, command, q->id, q->parts[i].name, NULL));
    }
    return KVF_OK;
}

/* Questions that fit into the buffer at once. */
static size_t batch_end(size_t from, size_t num, const char *id) {
    size_t most = KVFI_CONN_OUT / (strlen(id) + 128);
    return num - from < most ? num : from + most;
}

static kvf_status hear_ttl(kvfi_talk *talk, int64_t *ttl_ms) {
    kvfi_reply reply;
    KVFI_TRY(kvfi_talk_hear(talk, &reply));
    /* -1: no end. -2: no such key. An ACL without +pttl leaves it unknown. */
    *ttl_ms = reply.kind == KVFI_RESP_INT ? reply.num : -2;
    return KVF_OK;
}

/* A length of 0 is an empty field, or none. */
static kvf_status find_empty(kvfi_talk *talk, const question *q, size_t from, size_t to) {
    for (size_t i = from; i < to; i++) {
        if (q->parts[i].data.iov_len == 0) {
            KVFI_TRY(kvfi_talk_say(talk, "HEXISTS", q->id, q->parts[i].name, NULL));
        }
    }
    for (size_t i = from; i < to; i++) {
        kvfi_reply reply = {.kind = KVFI_RESP_INT, .num = 1};
        if (q->parts[i].data.iov_len == 0) {
            KVFI_TRY(kvfi_talk_hear(talk, &reply));
        }
        if (reply.kind != KVFI_RESP_INT) {
            return not_a_session(talk, &reply, "reading a session");
        }
        q->parts[i].found = reply.num != 0;
    }
    return KVF_OK;
}

static kvf_status sizes(kvfi_talk *talk, const question *q, size_t from, size_t to) {
    bool ask_ttl = q->ttl_ms != NULL && from == 0;
    KVFI_TRY(ask_all(talk, "HSTRLEN", q, from, to));
    if (ask_ttl) {
        KVFI_TRY(kvfi_talk_say(talk, "PTTL", q->id, NULL));
    }
    for (size_t i = from; i < to; i++) {
        kvfi_reply reply;
        KVFI_TRY(kvfi_talk_hear(talk, &reply));
        if (reply.kind != KVFI_RESP_INT || reply.num < 0) {
            return not_a_session(talk, &reply, "reading a session");
        }
        q->parts[i].data.iov_len = (size_t)reply.num;
    }
    if (ask_ttl) {
        KVFI_TRY(hear_ttl(talk, q->ttl_ms));
    }
    return find_empty(talk, q, from, to);
}

static kvf_status hear_field(kvfi_talk *talk, kvfi_part *part) {
    kvfi_reply reply;
    KVFI_TRY(kvfi_talk_expect(talk));
    kvfi_resp_into(&talk->conn->in, place_of(part));
    KVFI_TRY(kvfi_talk_hear(talk, &reply));
    part->found = reply.kind == KVFI_RESP_BULK;
    if (reply.kind == KVFI_RESP_BULK) {
        part->data.iov_len = (size_t)reply.num;
        return KVF_OK;
    }
    if (reply.kind == KVFI_RESP_NIL) {
        return KVF_OK;
    }
    if (reply.kind == KVFI_RESP_OVERSIZE) {
        return kvfi_fail(talk->err, KVF_LIMIT, "%s: the field %s has %lld bytes, more than there is memory for",
                         talk->tier->conf.text, part->name, (long long)reply.num);
    }
    return not_a_session(talk, &reply, "reading a session");
}

static kvf_status fields(kvfi_talk *talk, const question *q, size_t from, size_t to) {
    KVFI_TRY(ask_all(talk, "HGET", q, from, to));
    for (size_t i = from; i < to; i++) {
        KVFI_TRY(hear_field(talk, &q->parts[i]));
    }
    return KVF_OK;
}

/* Runs one of the two above over all parts, in batches. */
static kvf_status read_parts(kvfi_tier *base, kvf_error *err, const question *q, size_t num, int64_t deadline_us,
                             kvf_status (*read)(kvfi_talk *, const question *, size_t, size_t)) {
    kvfi_talk talk = {.ask = NULL};
    kvf_status status = KVF_OK;
    if (strlen(q->id) > MAX_ID_BYTES) {
        return kvfi_fail(err, KVF_LIMIT, "the id of a session has at most %u bytes", MAX_ID_BYTES);
    }
    unsigned tries = 0;
    do {
        KVFI_TRY(begin_patient(&talk, base, err, q->id, KVFI_LANE_LOAD, deadline_us));
        status = KVF_OK;
        for (size_t from = 0; from < num && status == KVF_OK;) {
            size_t to = batch_end(from, num, q->id);
            status = read(&talk, q, from, to);
            from = to;
        }
        end_patient(&talk);
    } while (status != KVF_OK && kvfi_talk_again(&talk, &tries));
    return status;
}

kvf_status kvfi_redis_session_sizes(kvfi_tier *base, kvf_error *err, const char *id, kvfi_part *parts, size_t num,
                                    int64_t *ttl_ms, int64_t deadline_us) {
    question q = {id, parts, ttl_ms};
    return read_parts(base, err, &q, num, deadline_us, sizes);
}

kvf_status kvfi_redis_session_get(kvfi_tier *base, kvf_error *err, const char *id, kvfi_part *parts, size_t num,
                                  int64_t deadline_us) {
    question q = {id, parts, NULL};
    return read_parts(base, err, &q, num, deadline_us, fields);
}

/* ---- remove, limits ---- */

/* Only a session: any key of the server could be named here. */
static kvf_status remove_once(kvfi_talk *talk, const char *id) {
    kvfi_reply reply;
    KVFI_TRY(kvfi_talk_say(talk, "HEXISTS", id, "keys", NULL));
    KVFI_TRY(kvfi_talk_hear(talk, &reply));
    if (reply.kind != KVFI_RESP_INT) {
        return not_a_session(talk, &reply, "removing a session");
    }
    if (reply.num == 0) {
        return kvfi_fail(talk->err, KVF_MISS, "no such session");
    }
    KVFI_TRY(kvfi_talk_say(talk, "UNLINK", id, NULL));
    return hear_int(talk, "removing a session");
}

kvf_status kvfi_redis_session_remove(kvfi_tier *base, kvf_error *err, const char *id, int64_t deadline_us) {
    kvfi_talk talk = {.ask = NULL};
    unsigned tries = 0;
    kvf_status status;
    uint16_t slot = kvfi_slot_of(id, strlen(id));
    do {
        KVFI_TRY(kvfi_talk_begin(&talk, kvfi_redis_of(base), err, slot, KVFI_LANE_STORE, deadline_us));
        status = remove_once(&talk, id);
        kvfi_talk_end(&talk);
    } while (status != KVF_OK && kvfi_talk_again(&talk, &tries));
    return status;
}

/* The server's setting; DEFAULT_MAX_BULK if it does not tell. */
static kvf_status ask_max_bulk(kvfi_talk *talk, uint64_t *max) {
    kvfi_facts facts;
    *max = DEFAULT_MAX_BULK;
    KVFI_TRY(kvfi_facts_ask(talk, &facts, true));
    KVFI_TRY(kvfi_facts_hear(talk, &facts));
    if (facts.max_bulk != KVFI_UNKNOWN && facts.max_bulk > 0) {
        *max = facts.max_bulk;
    }
    return KVF_OK;
}

uint64_t kvfi_redis_session_max_part(kvfi_tier *base, int64_t deadline_us) {
    kvfi_redis *tier = kvfi_redis_of(base);
    kvfi_talk talk = {.ask = NULL};
    uint64_t max = atomic_load_explicit(&tier->max_bulk, memory_order_relaxed);
    if (max > 0) {
        return max;
    }
    if (kvfi_talk_begin(&talk, tier, NULL, 0, KVFI_LANE_LOOKUP, deadline_us) != KVF_OK) {
        return DEFAULT_MAX_BULK;
    }
    bool sure = ask_max_bulk(&talk, &max) == KVF_OK &&
                (atomic_load_explicit(&talk.node->silent, memory_order_relaxed) & KVFI_PROBE_CONFIG) == 0;
    kvfi_talk_end(&talk);
    if (sure) {
        atomic_store_explicit(&tier->max_bulk, max, memory_order_relaxed);
    }
    return max;
}
