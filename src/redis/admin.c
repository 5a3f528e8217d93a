/* SPDX-License-Identifier: Apache-2.0
 *
 * Administration of what is stored: walk, remove, clear, info. One command after the other; not for the hot path.
 */
#include <stdio.h>

#include "redis/cluster/key.h"
#include "redis/redis.h"
#include "redis/scan.h"

typedef char pattern_text[KVFI_REDIS_MAX_PREFIX + 32];

/* All keys of kvferry, or those of one space. */
static void pattern_of(pattern_text out, const kvfi_redis *tier, const kvf_digest *space) {
    char hex[17] = "";
    if (space != NULL) {
        kvfi_hex(hex, space->bytes, 8);
    }
    snprintf(out, sizeof(pattern_text), space != NULL ? "%s:%s:*" : "%s:%s*", tier->conf.prefix, hex);
}

static void extend(kvfi_talk *talk, int64_t step_us) {
    talk->deadline_us = kvfi_deadline(step_us);
}

/* ---- one value ---- */

typedef struct look {
    kvfi_talk *talk;
    kvfi_sight_fn see;
    void *ctx;
    bool whole;
    int64_t step_us;
    bool stopped;
} look;

/* The key has moved to another server of the Cluster: for a walk through this one it is gone. */
static bool has_moved(const kvfi_talk *talk, const kvfi_reply *reply) {
    return talk->tier->topology != NULL && reply->kind == KVFI_RESP_ERROR &&
           (kvfi_reply_says(reply, "MOVED ") || kvfi_reply_says(reply, "ASK ") || kvfi_reply_says(reply, "TRYAGAIN"));
}

static kvf_status number_of(kvfi_talk *talk, int64_t *out, const kvfi_reply *reply) {
    if (has_moved(talk, reply)) {
        *out = -2;
        return KVF_OK;
    }
    if (reply->kind == KVFI_RESP_ERROR && kvfi_reply_says(reply, "WRONGTYPE")) {
        *out = -1;
        return KVF_OK;
    }
    if (reply->kind != KVFI_RESP_INT) {
        return kvfi_talk_refused(talk, reply, "looking at a key");
    }
    *out = reply->num;
    return KVF_OK;
}

static kvf_status hear_number(kvfi_talk *talk, int64_t *out) {
    kvfi_reply reply;
    KVFI_TRY(kvfi_talk_hear(talk, &reply));
    return number_of(talk, out, &reply);
}

/* What is known of a value without reading it. */
typedef struct outline {
    uint8_t head[KVFI_HEADER_BYTES];
    size_t head_len;
    int64_t len;    /* of the first part; -1: not a string */
    int64_t ttl_ms; /* -2: it has disappeared meanwhile */
} outline;

static kvf_status read_outline(kvfi_talk *talk, outline *out, const char *name) {
    kvfi_reply reply;
    KVFI_TRY(kvfi_talk_say(talk, "GETRANGE", name, "0", "127", NULL));
    KVFI_TRY(kvfi_talk_say(talk, "STRLEN", name, NULL));
    KVFI_TRY(kvfi_talk_say(talk, "PTTL", name, NULL));
    KVFI_TRY(kvfi_talk_hear(talk, &reply));
    out->head_len = 0;
    if (reply.kind == KVFI_RESP_BULK && reply.len <= sizeof out->head) {
        memcpy(out->head, reply.text, reply.len);
        out->head_len = reply.len;
    } else if (reply.kind != KVFI_RESP_ERROR) {
        return kvfi_talk_refused(talk, &reply, "looking at a key");
    }
    KVFI_TRY(hear_number(talk, &out->len));
    return hear_number(talk, &out->ttl_ms);
}

static kvf_status ask_length(kvfi_talk *talk, const kvfi_addr *addr, uint64_t part, int64_t *out) {
    kvfi_name name;
    kvfi_name_of(&name, talk->tier->conf.prefix, addr, part);
    KVFI_TRY(kvfi_talk_say(talk, "STRLEN", name.text, NULL));
    return hear_number(talk, out);
}

/* The length of a value in all its parts. Further parts are asked for only if the header announces more than the first
 * holds. A missing part was evicted, or the record was removed while somebody wrote it: then its head came last, and
 * alone. */
static kvf_status sum_parts(kvfi_talk *talk, kvfi_sight *sight, const outline *line, const kvfi_addr *addr) {
    kvfi_header header;
    uint64_t bytes = (uint64_t)line->len;
    uint64_t total = 0;
    if (line->head_len == KVFI_HEADER_BYTES && kvfi_header_decode(&header, line->head) == KVF_WHY_NONE) {
        total = kvfi_record_bytes(&header);
    }
    for (uint64_t part = 1; bytes < total; part++) {
        int64_t len = 0;
        KVFI_TRY(ask_length(talk, addr, part, &len));
        if (len <= 0) {
            sight->incomplete = len == 0;
            break;
        }
        bytes += (uint64_t)len;
    }
    sight->stored_bytes = bytes;
    return KVF_OK;
}

/* Reads all parts, one after the other, into memory of `cap` bytes; *out_len is what came. */
static kvf_status read_value(kvfi_talk *talk, uint8_t *value, size_t cap, size_t *out_len, const kvfi_addr *addr) {
    *out_len = 0;
    for (uint64_t part = 0; *out_len < cap; part++) {
        kvfi_name name;
        kvfi_reply reply;
        struct iovec rest = {value + *out_len, cap - *out_len};
        kvfi_name_of(&name, talk->tier->conf.prefix, addr, part);
        KVFI_TRY(kvfi_talk_say(talk, "GET", name.text, NULL));
        kvfi_resp_into(&talk->conn->in, (kvfi_place){.iov = &rest, .bytes = rest.iov_len});
        KVFI_TRY(kvfi_talk_hear(talk, &reply));
        if (has_moved(talk, &reply)) {
            *out_len = 0;
            return KVF_OK;
        }
        if (reply.kind == KVFI_RESP_ERROR) {
            return kvfi_talk_refused(talk, &reply, "reading a value");
        }
        if (reply.kind != KVFI_RESP_BULK || reply.num == 0) {
            return KVF_OK; /* gone, or longer than a moment ago: what was read is shown */
        }
        *out_len += (size_t)reply.num;
    }
    return KVF_OK;
}

static void show(look *l, const kvfi_sight *sight) {
    l->stopped = l->see(l->ctx, sight) != 0;
    extend(l->talk, l->step_us); /* the visitor's time does not count */
}

static kvf_status show_record(look *l, const char *name, const kvfi_addr *addr) {
    outline line;
    kvfi_sight sight = {.kind = KVF_ENTRY_BLOCK, .name = name, .addr = addr};
    KVFI_TRY(read_outline(l->talk, &line, name));
    if (line.len <= 0 && line.ttl_ms == -2) {
        return KVF_OK;
    }
    if (line.len < 0) {
        return KVF_OK; /* under our prefix, but not a string: not ours */
    }
    KVFI_TRY(sum_parts(l->talk, &sight, &line, addr));
    uint64_t bytes = sight.stored_bytes;
    sight.ttl_ms = line.ttl_ms < 0 ? -1 : line.ttl_ms;
    sight.head = line.head;
    sight.head_len = line.head_len;
    if (!l->whole || bytes == 0) {
        show(l, &sight);
        return KVF_OK;
    }
    uint8_t *value = kvfi_alloc((size_t)bytes);
    if (value == NULL) {
        return kvfi_fail(l->talk->err, KVF_NOMEM, "no memory for a value of %llu bytes", (unsigned long long)bytes);
    }
    kvf_status status = read_value(l->talk, value, (size_t)bytes, &sight.head_len, addr);
    if (status == KVF_OK && sight.head_len > 0) {
        sight.head = value;
        show(l, &sight);
    }
    kvfi_free(value);
    return status;
}

/* Parts without the first: their writer died before the end, or is still writing. Nothing else would ever show them. */
static kvf_status show_orphan(look *l, const char *name, const kvfi_addr *addr) {
    kvfi_sight sight = {
        .kind = KVF_ENTRY_BLOCK, .name = name, .addr = addr, .incomplete = true, .head = (const uint8_t *)""};
    int64_t len = 0;
    KVFI_TRY(ask_length(l->talk, addr, 0, &len));
    if (len != 0) {
        return KVF_OK;
    }
    for (uint64_t part = 1; part == 1 || len > 0; part++) {
        KVFI_TRY(ask_length(l->talk, addr, part, &len));
        sight.stored_bytes += len > 0 ? (uint64_t)len : 0;
    }
    KVFI_TRY(kvfi_talk_say(l->talk, "PTTL", name, NULL));
    KVFI_TRY(hear_number(l->talk, &sight.ttl_ms));
    sight.ttl_ms = sight.ttl_ms < 0 ? -1 : sight.ttl_ms;
    if (sight.stored_bytes > 0) {
        show(l, &sight);
    }
    return KVF_OK;
}

/* ---- sessions ---- */

/* The lengths of the fields that make a HASH a session; a negative one is absent. */
typedef struct session_shape {
    int64_t keys, values, meta, ttl_ms;
} session_shape;

/* Keys of other programs are beside ours, and an ACL may deny them to this user: such a key does not end the walk. */
static kvf_status hear_if_allowed(kvfi_talk *talk, int64_t *out) {
    kvfi_reply reply;
    KVFI_TRY(kvfi_talk_hear(talk, &reply));
    if (reply.kind == KVFI_RESP_ERROR && kvfi_reply_says(&reply, "NOPERM")) {
        talk->denied = true;
        *out = -1;
        return KVF_OK;
    }
    return number_of(talk, out, &reply);
}

static kvf_status read_length(kvfi_talk *talk, int64_t *out) {
    int64_t exists = 0;
    KVFI_TRY(hear_if_allowed(talk, &exists));
    KVFI_TRY(hear_if_allowed(talk, out));
    if (exists <= 0) {
        *out = -1;
    }
    return KVF_OK;
}

static kvf_status read_shape(kvfi_talk *talk, session_shape *out, const char *id) {
    static const char *const fields[] = {"keys", "values", "meta"};
    for (size_t i = 0; i < 3; i++) {
        KVFI_TRY(kvfi_talk_say(talk, "HEXISTS", id, fields[i], NULL));
        KVFI_TRY(kvfi_talk_say(talk, "HSTRLEN", id, fields[i], NULL));
    }
    KVFI_TRY(kvfi_talk_say(talk, "PTTL", id, NULL));
    KVFI_TRY(read_length(talk, &out->keys));
    KVFI_TRY(read_length(talk, &out->values));
    KVFI_TRY(read_length(talk, &out->meta));
    return hear_if_allowed(talk, &out->ttl_ms);
}

static void warn_if_denied(const kvfi_talk *talk) {
    if (talk->denied) {
        kvfi_log(KVF_LOG_WARN,
                 "%s: sessions whose keys the ACL denies to this user are left out (docs/stores-redis.md)",
                 talk->tier->conf.text);
    }
}

static bool is_temporary(const char *name) {
    return strstr(name, ":kvf-tmp-") != NULL;
}

/* Further fields of a session that is spread: keys.1, keys.2, ..., values.1, ... */
static kvf_status sum_more(kvfi_talk *talk, const char *id, const char *field, uint64_t *bytes) {
    int64_t len = 1;
    for (unsigned i = 1; len > 0; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s.%u", field, i);
        KVFI_TRY(kvfi_talk_say(talk, "HSTRLEN", id, name, NULL));
        KVFI_TRY(hear_number(talk, &len));
        *bytes += len > 0 ? (uint64_t)len : 0;
    }
    return KVF_OK;
}

static kvf_status show_session(look *l, const char *id) {
    session_shape shape;
    if (is_temporary(id)) {
        return KVF_OK;
    }
    KVFI_TRY(read_shape(l->talk, &shape, id));
    if (shape.keys < 0 || shape.values < 0) {
        return KVF_OK; /* another program's */
    }
    uint64_t bytes = (uint64_t)shape.keys + (uint64_t)shape.values + (shape.meta > 0 ? (uint64_t)shape.meta : 0);
    KVFI_TRY(sum_more(l->talk, id, "keys", &bytes));
    KVFI_TRY(sum_more(l->talk, id, "values", &bytes));
    kvfi_sight sight = {
        .kind = KVF_ENTRY_SESSION, .name = id, .stored_bytes = bytes, .ttl_ms = shape.ttl_ms < 0 ? -1 : shape.ttl_ms};
    show(l, &sight);
    return KVF_OK;
}

/* ---- walk ---- */

static kvf_status walk_records(look *l, const char *pattern) {
    kvfi_scan scan = {.talk = l->talk, .pattern = pattern};
    const char *prefix = l->talk->tier->conf.prefix;
    kvf_status status = KVF_OK;
    bool more = true;
    while (status == KVF_OK && more && !l->stopped) {
        extend(l->talk, l->step_us);
        status = kvfi_scan_next(&scan, &more);
        const char *name = status == KVF_OK ? kvfi_page_next(&scan.page, NULL) : NULL;
        for (; name != NULL && status == KVF_OK && !l->stopped; name = kvfi_page_next(&scan.page, name)) {
            kvfi_addr addr;
            uint64_t part = 0;
            if (kvfi_name_parse(&addr, &part, prefix, name, strlen(name)) && part < 2) {
                status = part == 0 ? show_record(l, name, &addr) : show_orphan(l, name, &addr);
            }
        }
    }
    kvfi_scan_cleanup(&scan);
    return status;
}

static kvf_status walk_sessions(look *l) {
    kvfi_scan scan = {.talk = l->talk, .hashes = true};
    kvf_status status = KVF_OK;
    bool more = true;
    while (status == KVF_OK && more && !l->stopped) {
        extend(l->talk, l->step_us);
        status = kvfi_scan_next(&scan, &more);
        const char *name = status == KVF_OK ? kvfi_page_next(&scan.page, NULL) : NULL;
        for (; name != NULL && status == KVF_OK && !l->stopped; name = kvfi_page_next(&scan.page, name)) {
            status = show_session(l, name);
        }
    }
    kvfi_scan_cleanup(&scan);
    return status;
}

static kvf_status walk_node(look *l, kvf_error *err, kvfi_redis *tier, kvfi_node *node, const kvf_digest *space) {
    kvfi_talk talk;
    pattern_text pattern;
    pattern_of(pattern, tier, space);
    l->talk = &talk;
    KVFI_TRY(kvfi_talk_begin_on(&talk, tier, err, node, KVFI_LANE_LOAD, kvfi_deadline(l->step_us)));
    kvf_status status = walk_records(l, pattern);
    if (status == KVF_OK && space == NULL && !l->stopped) {
        status = walk_sessions(l);
        warn_if_denied(&talk);
    }
    kvfi_talk_end(&talk);
    return status;
}

static kvf_status nobody(kvf_error *err, const kvfi_redis *tier) {
    return kvfi_fail(err, KVF_IO, "%s: no server can be reached", tier->conf.text);
}

kvf_status kvfi_redis_walk(kvfi_tier *base, kvf_error *err, const kvf_digest *space, bool whole, kvfi_sight_fn see,
                           void *ctx, int64_t step_us) {
    kvfi_redis *tier = kvfi_redis_of(base);
    kvfi_node *nodes[KVFI_MAX_NODES];
    look l = {.see = see, .ctx = ctx, .whole = whole, .step_us = step_us};
    size_t num = kvfi_redis_nodes(tier, nodes, KVFI_MAX_NODES);
    kvf_status status = num > 0 ? KVF_OK : nobody(err, tier);
    /* A server that is down does not hide the others. The end of the walk reports that something is missing. */
    for (size_t i = 0; i < num && !l.stopped; i++) {
        kvf_status one = walk_node(&l, status == KVF_OK ? err : NULL, tier, nodes[i], space);
        status = status == KVF_OK ? one : status;
    }
    return status;
}

/* ---- remove and clear ---- */

/* The number of parts of the record, by its head; 1 without a head. */
static kvf_status ask_parts(kvfi_talk *talk, const kvfi_addr *addr, uint64_t *out) {
    kvfi_name name;
    kvfi_reply reply;
    kvfi_header header;
    kvfi_name_of(&name, talk->tier->conf.prefix, addr, 0);
    KVFI_TRY(kvfi_talk_say(talk, "GETRANGE", name.text, "0", "127", NULL));
    KVFI_TRY(kvfi_talk_hear(talk, &reply));
    *out = 1;
    if (reply.kind == KVFI_RESP_BULK && reply.len == KVFI_HEADER_BYTES &&
        kvfi_header_decode(&header, (const uint8_t *)reply.text) == KVF_WHY_NONE) {
        uint64_t bytes = kvfi_record_bytes(&header);
        bool whole = kvfi_stays_whole(header.codec == KVFI_CODEC_SEALED, bytes);
        *out = whole ? 1 : kvfi_num_parts(bytes, talk->tier->conf.part);
    }
    return KVF_OK; /* a refusal is repeated, and handled, below */
}

/* The first part is removed first, so that nobody takes the rest for a value; then the others that its head announces,
 * whether or not one was evicted; then any further parts, until one is missing: its parts may have been shorter than
 * ours. */
static kvf_status remove_once(kvfi_talk *talk, const kvfi_addr *addr, bool *was_there) {
    uint64_t parts = 1;
    int64_t gone = 1;
    KVFI_TRY(ask_parts(talk, addr, &parts));
    for (uint64_t part = 0; gone > 0 || part == 1 || part < parts; part++) {
        kvfi_name name;
        kvfi_name_of(&name, talk->tier->conf.prefix, addr, part);
        kvfi_reply reply;
        KVFI_TRY(kvfi_talk_say(talk, "UNLINK", name.text, NULL));
        KVFI_TRY(kvfi_talk_hear(talk, &reply));
        if (reply.kind != KVFI_RESP_INT) {
            return kvfi_talk_refused(talk, &reply, "removing a record");
        }
        gone = reply.num;
        *was_there = *was_there || (part == 0 && gone > 0);
    }
    return KVF_OK;
}

kvf_status kvfi_redis_remove(kvfi_tier *base, kvf_error *err, const kvfi_addr *addr, int64_t deadline_us) {
    kvfi_talk talk = {.ask = NULL};
    bool was_there = false;
    unsigned tries = 0;
    kvf_status status;
    do {
        KVFI_TRY(kvfi_talk_begin(&talk, kvfi_redis_of(base), err, kvfi_addr_slot(addr), KVFI_LANE_STORE, deadline_us));
        status = remove_once(&talk, addr, &was_there);
        kvfi_talk_end(&talk);
    } while (status != KVF_OK && kvfi_talk_again(&talk, &tries));
    return status == KVF_OK && !was_there ? KVF_MISS : status;
}

/* Removes the keys of a page that are ours. Counts values, not their parts. */
static kvf_status clear_page(kvfi_talk *talk, const kvfi_page *page, uint64_t *removed) {
    for (const char *name = kvfi_page_next(page, NULL); name != NULL; name = kvfi_page_next(page, name)) {
        kvfi_addr addr;
        uint64_t part = 0;
        int64_t gone = 0;
        if (kvfi_name_parse(&addr, &part, talk->tier->conf.prefix, name, strlen(name))) {
            KVFI_TRY(kvfi_talk_say(talk, "UNLINK", name, NULL));
            KVFI_TRY(hear_number(talk, &gone));
            *removed += part == 0 && gone > 0;
        }
    }
    return KVF_OK;
}

/* Sessions of kvferry have a meta. A HASH with only the two fields may belong to another program. */
static kvf_status clear_sessions(kvfi_talk *talk, const kvfi_page *page, uint64_t *removed) {
    for (const char *name = kvfi_page_next(page, NULL); name != NULL; name = kvfi_page_next(page, name)) {
        session_shape shape;
        int64_t gone = 0;
        KVFI_TRY(read_shape(talk, &shape, name));
        if (shape.keys >= 0 && shape.values >= 0 && shape.meta >= 0) {
            KVFI_TRY(kvfi_talk_say(talk, "UNLINK", name, NULL));
            KVFI_TRY(hear_number(talk, &gone));
            *removed += gone > 0 && !is_temporary(name);
        }
    }
    return KVF_OK;
}

static kvf_status clear_all(kvfi_scan *scan, uint64_t *removed, int64_t step_us,
                            kvf_status (*clear)(kvfi_talk *, const kvfi_page *, uint64_t *)) {
    kvf_status status = KVF_OK;
    bool more = true;
    while (status == KVF_OK && more) {
        extend(scan->talk, step_us);
        status = kvfi_scan_next(scan, &more);
        if (status == KVF_OK) {
            status = clear(scan->talk, &scan->page, removed);
        }
    }
    kvfi_scan_cleanup(scan);
    return status;
}

static kvf_status clear_node(kvfi_redis *tier, kvfi_node *node, uint64_t *removed, kvf_error *err,
                             const kvf_digest *space, int64_t step_us) {
    kvfi_talk talk;
    pattern_text pattern;
    pattern_of(pattern, tier, space);
    KVFI_TRY(kvfi_talk_begin_on(&talk, tier, err, node, KVFI_LANE_STORE, kvfi_deadline(step_us)));
    kvfi_scan records = {.talk = &talk, .pattern = pattern};
    kvf_status status = clear_all(&records, removed, step_us, clear_page);
    if (status == KVF_OK && space == NULL) {
        kvfi_scan sessions = {.talk = &talk, .hashes = true};
        status = clear_all(&sessions, removed, step_us, clear_sessions);
        warn_if_denied(&talk);
    }
    kvfi_talk_end(&talk);
    return status;
}

kvf_status kvfi_redis_clear(kvfi_tier *base, uint64_t *removed, kvf_error *err, const kvf_digest *space,
                            int64_t step_us) {
    kvfi_redis *tier = kvfi_redis_of(base);
    kvfi_node *nodes[KVFI_MAX_NODES];
    size_t num = kvfi_redis_nodes(tier, nodes, KVFI_MAX_NODES);
    kvf_status status = num > 0 ? KVF_OK : nobody(err, tier);
    *removed = 0;
    for (size_t i = 0; i < num; i++) {
        kvf_status one = clear_node(tier, nodes[i], removed, status == KVF_OK ? err : NULL, space, step_us);
        status = status == KVF_OK ? one : status;
    }
    return status;
}
