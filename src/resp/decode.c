/* SPDX-License-Identifier: Apache-2.0
 *
 * The push decoder. It has three states: a LINE that announces a reply, the BODY of a bulk, and the TAIL (CRLF) after a
 * body.
 */
#include "resp/decode.h"

#include <string.h>

enum { LINE, BODY, TAIL, BROKEN };
enum { TO_PLACE, TO_SCRATCH, TO_NOWHERE };

void kvfi_resp_init(kvfi_resp *resp, char *scratch, size_t cap) {
    *resp = (kvfi_resp){.scratch = scratch, .cap = cap};
}

/* The length of "$<bytes>\r\n". */
static size_t header_bytes(uint64_t bytes) {
    size_t digits = 1;
    while (bytes > 9) {
        bytes /= 10;
        digits++;
    }
    return digits + 3;
}

void kvfi_resp_into(kvfi_resp *resp, kvfi_place place) {
    resp->place = place;
    resp->has_place = true;
    resp->header = header_bytes(place.bytes);
}

bool kvfi_resp_idle(const kvfi_resp *resp) {
    return resp->state == LINE && resp->begin == resp->end && resp->elements == 0;
}

bool kvfi_resp_draining(const kvfi_resp *resp) {
    return (resp->state == BODY || resp->state == TAIL) && resp->to == TO_NOWHERE;
}

static size_t available(const kvfi_resp *resp) {
    return resp->end - resp->begin;
}

static kvfi_resp_event broken(kvfi_resp *resp) {
    resp->state = BROKEN;
    return KVFI_RESP_BAD;
}

/* ---- asking for bytes ---- */

static void make_room(kvfi_resp *resp) {
    if (resp->begin > 0) {
        memmove(resp->scratch, resp->scratch + resp->begin, available(resp));
        resp->end -= resp->begin;
        resp->begin = 0;
    }
}

/* The number of bytes to read into the scratch. Before a body with a place this is at most its header: anything after
 * that would have to be copied. */
static size_t scratch_wanted(const kvfi_resp *resp) {
    size_t room = resp->cap - resp->end;
    size_t have = available(resp);
    size_t line = 0;
    if (resp->state == TAIL && resp->to == TO_PLACE) {
        line = 2 + resp->header;
    } else if (resp->state == LINE && resp->has_place && (have == 0 || resp->scratch[0] == '$')) {
        line = resp->header;
    }
    return have < line && line - have < room ? line - have : room;
}

/* What is left of the place, as far as the body goes. *out_left is what `cap` iovecs could not cover. */
static size_t place_iovecs(const kvfi_resp *resp, uint64_t *out_left, struct iovec *out, size_t cap) {
    size_t num = 0;
    size_t skip = resp->place.skip;
    uint64_t left = resp->left;
    for (const struct iovec *iov = resp->place.iov; left > 0 && num < cap; iov++) {
        size_t len = iov->iov_len - skip;
        if (len > left) {
            len = (size_t)left;
        }
        if (len > 0) {
            out[num++] = (struct iovec){(char *)iov->iov_base + skip, len};
            left -= len;
        }
        skip = 0;
    }
    *out_left = left;
    return num;
}

size_t kvfi_resp_want(kvfi_resp *resp, struct iovec *out, size_t cap) {
    make_room(resp);
    if (resp->state == BODY && resp->to == TO_PLACE) {
        /* The scratch is empty here. It receives the CRLF and, most likely, the whole next header, so one readv ends
         * this body, and the next begins in its place. */
        uint64_t uncovered = 0;
        size_t num = place_iovecs(resp, &uncovered, out, cap - 1);
        if (uncovered == 0) {
            out[num++] = (struct iovec){resp->scratch, 2 + resp->header};
        }
        return num;
    }
    out[0] = (struct iovec){resp->scratch + resp->end, scratch_wanted(resp)};
    return 1;
}

/* ---- taking bytes ---- */

/* `num` bytes of the body are in their place. */
static void advance_place(kvfi_resp *resp, size_t num) {
    resp->left -= num;
    kvfi_place_advance(&resp->place, num);
}

/* Copies body bytes that came with the header into the place. Rare, and never more than the scratch. */
static void copy_to_place(kvfi_resp *resp, size_t num) {
    while (num > 0) {
        const struct iovec *iov = resp->place.iov;
        size_t len = iov->iov_len - resp->place.skip;
        if (len > num) {
            len = num;
        }
        if (len > 0) {
            memcpy((char *)iov->iov_base + resp->place.skip, resp->scratch + resp->begin, len);
        }
        resp->begin += len;
        num -= len;
        if (len > 0) {
            advance_place(resp, len);
        } else {
            resp->place.iov++; /* an empty iovec */
            resp->place.skip = 0;
        }
    }
}

void kvfi_resp_got(kvfi_resp *resp, size_t num) {
    if (resp->state == BODY && resp->to == TO_PLACE) {
        size_t placed = num < resp->left ? num : (size_t)resp->left;
        advance_place(resp, placed);
        num -= placed;
    }
    resp->end += num;
}

/* ---- understanding them ---- */

/* [-]digits, without overflow and leading zeros. */
static bool parse_number(int64_t *out, const char *text, size_t len) {
    bool minus = len > 0 && text[0] == '-';
    size_t i = minus ? 1 : 0;
    int64_t value = 0; /* kept negative: the negative range has one more number */
    if (i == len || (text[i] == '0' && len > 1)) {
        return false;
    }
    for (; i < len; i++) {
        if (text[i] < '0' || text[i] > '9' || __builtin_mul_overflow(value, 10, &value) ||
            __builtin_sub_overflow(value, text[i] - '0', &value)) {
            return false;
        }
    }
    if (!minus && value == INT64_MIN) {
        return false;
    }
    *out = minus ? value : -value;
    return true;
}

/* One reply is complete: is the answer? */
static kvfi_resp_event complete(kvfi_resp *resp, kvfi_reply *reply) {
    if (resp->elements > 0) {
        resp->elements--;
    }
    reply->last = resp->elements == 0;
    resp->has_place = false;
    return KVFI_RESP_REPLY;
}

static kvfi_resp_event begin_array(kvfi_resp *resp, kvfi_reply *reply) {
    if (reply->num > KVFI_RESP_MAX_ELEMENTS || resp->elements + (uint64_t)reply->num > KVFI_RESP_MAX_ELEMENTS) {
        return broken(resp);
    }
    resp->elements += (uint64_t)reply->num;
    if (resp->elements > (uint64_t)reply->num) {
        resp->elements--; /* the array was itself an element */
    }
    reply->last = resp->elements == 0;
    resp->has_place = false;
    return KVFI_RESP_REPLY;
}

/* A bulk is announced. It is either reported at once as too long, or its body is read first. */
static kvfi_resp_event begin_bulk(kvfi_resp *resp, kvfi_reply *reply) {
    resp->body = (uint64_t)reply->num;
    resp->left = resp->body;
    resp->state = BODY;
    if (resp->has_place && resp->body <= resp->place.bytes) {
        resp->to = TO_PLACE;
        return KVFI_RESP_MORE;
    }
    if (!resp->has_place && resp->body <= resp->cap - 2) {
        resp->to = TO_SCRATCH;
        return KVFI_RESP_MORE;
    }
    resp->to = TO_NOWHERE;
    reply->kind = KVFI_RESP_OVERSIZE;
    return complete(resp, reply);
}

/* KVFI_RESP_MORE here means: understood, go on with the next state. */
static kvfi_resp_event read_line(kvfi_resp *resp, kvfi_reply *reply, const char *line, size_t len) {
    *reply = (kvfi_reply){.text = line + 1, .len = len - 1};
    if (line[0] == '+' || line[0] == '-') {
        reply->kind = line[0] == '+' ? KVFI_RESP_STATUS : KVFI_RESP_ERROR;
        return complete(resp, reply);
    }
    if (!parse_number(&reply->num, line + 1, len - 1)) {
        return broken(resp);
    }
    reply->text = NULL;
    reply->len = 0;
    if (line[0] == ':') {
        reply->kind = KVFI_RESP_INT;
        return complete(resp, reply);
    }
    if (reply->num < -1) {
        return broken(resp);
    }
    if (reply->num == -1) {
        reply->kind = KVFI_RESP_NIL;
        return complete(resp, reply);
    }
    if (line[0] == '*') {
        reply->kind = KVFI_RESP_ARRAY;
        return begin_array(resp, reply);
    }
    return begin_bulk(resp, reply);
}

static bool is_kind(char c) {
    return c == '+' || c == '-' || c == ':' || c == '$' || c == '*';
}

static kvfi_resp_event next_line(kvfi_resp *resp, kvfi_reply *reply, bool *again) {
    const char *line = resp->scratch + resp->begin;
    size_t have = available(resp);
    if (have == 0) {
        return KVFI_RESP_MORE;
    }
    if (!is_kind(line[0])) {
        return broken(resp);
    }
    const char *end = memchr(line + resp->seen, '\r', have - resp->seen);
    size_t len = end != NULL ? (size_t)(end - line) : have;
    if (len > KVFI_RESP_MAX_LINE || (len >= resp->cap - 1)) {
        return broken(resp);
    }
    resp->seen = len;
    if (end == NULL || len + 1 == have) {
        return KVFI_RESP_MORE;
    }
    if (end[1] != '\n') {
        return broken(resp);
    }
    resp->seen = 0;
    resp->begin += len + 2;
    kvfi_resp_event event = read_line(resp, reply, line, len);
    *again = event == KVFI_RESP_MORE;
    return event;
}

/* Takes the available part of the body. True when it is complete. A body for the scratch stays where it is until its
 * tail has come. */
static bool take_body(kvfi_resp *resp) {
    size_t have = available(resp);
    size_t take = have < resp->left ? have : (size_t)resp->left;
    if (resp->to == TO_SCRATCH) {
        return have >= resp->left;
    }
    if (resp->to == TO_PLACE) {
        copy_to_place(resp, take);
    } else {
        resp->begin += take;
        resp->left -= take;
    }
    return resp->left == 0;
}

/* The CRLF after a body completes the reply. */
static kvfi_resp_event next_tail(kvfi_resp *resp, kvfi_reply *reply, bool *again) {
    size_t before = resp->to == TO_SCRATCH ? (size_t)resp->body : 0;
    const char *tail = resp->scratch + resp->begin + before;
    size_t have = available(resp) - before;
    if ((have > 0 && tail[0] != '\r') || (have > 1 && tail[1] != '\n')) {
        return broken(resp);
    }
    if (have < 2) {
        return KVFI_RESP_MORE;
    }
    *reply = (kvfi_reply){.kind = KVFI_RESP_BULK, .num = (int64_t)resp->body};
    if (resp->to == TO_SCRATCH) {
        reply->text = resp->scratch + resp->begin;
        reply->len = before;
    }
    resp->begin += before + 2;
    resp->left = 0;
    resp->state = LINE;
    if (resp->to == TO_NOWHERE) {
        *again = true; /* it was reported when it began */
        return KVFI_RESP_MORE;
    }
    return complete(resp, reply);
}

kvfi_resp_event kvfi_resp_next(kvfi_resp *resp, kvfi_reply *reply) {
    kvfi_resp_event event = KVFI_RESP_MORE;
    bool again = true;
    while (again && event == KVFI_RESP_MORE) {
        again = false;
        if (resp->state == BROKEN) {
            event = KVFI_RESP_BAD;
        } else if (resp->state == LINE) {
            event = next_line(resp, reply, &again);
        } else if (resp->state == TAIL) {
            event = next_tail(resp, reply, &again);
        } else if (take_body(resp)) {
            resp->state = TAIL;
            again = true;
        }
    }
    return event;
}
