/* SPDX-License-Identifier: Apache-2.0
 *
 * Compares our decoder with the reader of hiredis on one stream. They must agree, except where ours deliberately
 * refuses what hiredis accepts; the stream itself shows those places. For a unit test and a fuzz target.
 *
 *   long line     a status, an error or a number that does not fit into the scratch, or has more than
 *                 KVFI_RESP_MAX_LINE bytes
 *   lone CR       in such a line, not followed by LF
 *   tail          behind a body that is no CRLF: hiredis skips any two bytes
 *   large         a body that fits neither place nor scratch: reported before it is read, where hiredis would wait for
 *                 all of it
 *   many          more than KVFI_RESP_MAX_ELEMENTS elements announced
 *   deep          the other way round: arrays in arrays in arrays ..., which hiredis refuses and we only count
 */
#ifndef KVFT_RESP_DIFF_H
#define KVFT_RESP_DIFF_H

#include <hiredis.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "resp/decode.h"

#define DIFF_PLACE 4096u
#define DIFF_DEEP  7 /* levels that any hiredis takes */

typedef struct diff_text {
    char *text;
    size_t len, cap;
    bool bad; /* the decoder refused what came next */
} diff_text;

static inline void diff_add(diff_text *t, const void *bytes, size_t len) {
    if (t->len + len > t->cap) {
        t->cap = 2 * (t->len + len);
        t->text = realloc(t->text, t->cap);
        if (t->text == NULL) {
            abort();
        }
    }
    if (len > 0) {
        memcpy(t->text + t->len, bytes, len);
    }
    t->len += len;
}

static inline void diff_note(diff_text *t, char kind, long long num, const void *bytes, size_t len) {
    char line[40];
    diff_add(t, line, (size_t)snprintf(line, sizeof line, "%c%lld ", kind, num));
    diff_add(t, bytes, len);
    diff_add(t, "\n", 1);
}

/* ---- hiredis: it calls these for what it reads, so nothing is built up ---- */

static inline void *diff_string(const redisReadTask *task, char *text, size_t len) {
    char kind = task->type == REDIS_REPLY_STATUS ? '+' : task->type == REDIS_REPLY_ERROR ? '-' : '$';
    diff_note(task->privdata, kind, (long long)len, text, len);
    return task->privdata;
}

/* From hiredis 1.0 on the number is a size_t: the same to any caller on a 64-bit machine that passes less than
 * INT_MAX. */
#if HIREDIS_MAJOR >= 1
static inline void *diff_array(const redisReadTask *task, size_t num) {
#else
static inline void *diff_array(const redisReadTask *task, int num) {
#endif
    diff_note(task->privdata, '*', (long long)num, NULL, 0);
    return task->privdata;
}

static inline void *diff_integer(const redisReadTask *task, long long num) {
    diff_note(task->privdata, ':', num, NULL, 0);
    return task->privdata;
}

static inline void *diff_nil(const redisReadTask *task) {
    diff_note(task->privdata, '_', 0, NULL, 0);
    return task->privdata;
}

static inline void diff_forget(void *object) {
    (void)object;
}

/* `piece`: fed in pieces of so many bytes. */
static inline diff_text diff_hiredis(const char *bytes, size_t len, size_t piece) {
    static redisReplyObjectFunctions functions = {.createString = diff_string,
                                                  .createArray = diff_array,
                                                  .createInteger = diff_integer,
                                                  .createNil = diff_nil,
                                                  .freeObject = diff_forget};
    diff_text t = {0};
    redisReader *reader = redisReaderCreateWithFunctions(&functions);
    if (reader == NULL) {
        abort();
    }
    reader->privdata = &t;
    for (size_t at = 0; at < len && !t.bad; at += piece) {
        void *reply = &t;
        t.bad = redisReaderFeed(reader, bytes + at, piece < len - at ? piece : len - at) != REDIS_OK;
        while (!t.bad && reply != NULL) {
            reply = NULL;
            t.bad = redisReaderGetReply(reader, &reply) != REDIS_OK;
            if (!t.bad && reply != NULL) {
                diff_add(&t, ".", 1); /* an answer is complete */
            }
        }
    }
    redisReaderFree(reader);
    return t;
}

/* ---- ours ---- */

/* In pieces that end at multiples of `piece` and at `cut`. With `place` every reply has one. */
static inline diff_text diff_ours(const char *bytes, size_t len, size_t piece, size_t cut, bool place, size_t cap) {
    diff_text t = {0};
    char *scratch = malloc(cap), *body = malloc(DIFF_PLACE);
    struct iovec iov[2] = {{body, 100}, {body + 100, DIFF_PLACE - 100}};
    kvfi_resp resp;
    size_t at = 0;
    bool fresh = true;
    if (scratch == NULL || body == NULL) {
        abort();
    }
    kvfi_resp_init(&resp, scratch, cap);
    for (;;) {
        kvfi_reply reply;
        if (place && fresh) {
            kvfi_resp_into(&resp, (kvfi_place){.iov = iov, .bytes = DIFF_PLACE});
        }
        kvfi_resp_event event = kvfi_resp_next(&resp, &reply);
        fresh = event == KVFI_RESP_REPLY;
        t.bad = event == KVFI_RESP_BAD || (fresh && reply.kind == KVFI_RESP_OVERSIZE);
        if (t.bad || (event == KVFI_RESP_MORE && at == len)) {
            break;
        }
        if (fresh) {
            static const char kinds[] = "+-:$_*";
            bool text = reply.kind == KVFI_RESP_STATUS || reply.kind == KVFI_RESP_ERROR;
            bool body_there = reply.kind == KVFI_RESP_BULK;
            size_t size = text ? reply.len : body_there ? (size_t)reply.num : 0;
            diff_note(&t, kinds[reply.kind],
                      text                          ? (long long)size
                      : reply.kind == KVFI_RESP_NIL ? 0
                                                    : (long long)reply.num,
                      reply.text != NULL ? reply.text : body, size);
            if (reply.last) {
                diff_add(&t, ".", 1);
            }
            continue;
        }
        struct iovec want[4];
        size_t num = kvfi_resp_want(&resp, want, 4), put = 0;
        size_t end = piece < len - at ? (at / piece + 1) * piece : len;
        end = at < cut && cut < end ? cut : end < len ? end : len;
        for (size_t i = 0; i < num && at < end; i++) {
            size_t n = want[i].iov_len < end - at ? want[i].iov_len : end - at;
            memcpy(want[i].iov_base, bytes + at, n);
            at += n;
            put += n;
        }
        kvfi_resp_got(&resp, put);
    }
    free(scratch);
    free(body);
    return t;
}

/* ---- is there something in the stream that we refuse on purpose, or that hiredis does? ---- */

typedef struct diff_excuse {
    bool stricter; /* long line, lone CR, tail, large, many */
    bool deep;
} diff_excuse;

static inline diff_excuse diff_scan(const char *bytes, size_t len, size_t max_body, size_t cap) {
    diff_excuse excuse = {0};
    size_t max_line = KVFI_RESP_MAX_LINE < cap - 2 ? KVFI_RESP_MAX_LINE : cap - 2;
    unsigned long long sum = 0;
    long long left[64];
    int depth = 0;
    for (size_t at = 0; at < len && !excuse.stricter;) {
        const char *cr = memchr(bytes + at, '\r', len - at);
        size_t line = cr != NULL ? (size_t)(cr - bytes) - at : len - at;
        if (memchr("+-:$*", bytes[at], 5) == NULL) {
            return excuse;
        }
        excuse.stricter = line > max_line || (cr != NULL && at + line + 1 < len && cr[1] != '\n');
        if (cr == NULL || excuse.stricter) {
            return excuse;
        }
        char kind = bytes[at], digits[24] = {0};
        memcpy(digits, bytes + at + 1, line - 1 < 20 ? line - 1 : 20);
        long long num = strtoll(digits, NULL, 10);
        at += line + 2;
        if (kind == '$' && num >= 0) {
            size_t body = (size_t)num;
            excuse.stricter = body > max_body || (at + body < len && bytes[at + body] != '\r') ||
                              (at + body + 1 < len && bytes[at + body + 1] != '\n');
            at = body > max_body ? len : at + body + 2;
        }
        if (depth > 0) {
            left[depth - 1]--;
        }
        if (kind == '*' && num > 0) {
            sum += (unsigned long long)num;
            excuse.stricter = excuse.stricter || sum > KVFI_RESP_MAX_ELEMENTS;
            if (depth < 64) {
                left[depth++] = num;
            }
            excuse.deep = excuse.deep || depth > DIFF_DEEP;
        }
        while (depth > 0 && left[depth - 1] <= 0) {
            depth--;
        }
    }
    return excuse;
}

/* NULL: they agree, or differ where they may. Else what is wrong. */
static inline const char *diff_judge(const diff_text *hiredis, const diff_text *ours, diff_excuse excuse) {
    size_t common = hiredis->len < ours->len ? hiredis->len : ours->len;
    if (common > 0 && memcmp(hiredis->text, ours->text, common) != 0) {
        return "they say different things";
    }
    if (ours->len > hiredis->len || (hiredis->bad && !ours->bad)) {
        return hiredis->bad && excuse.deep ? NULL : "we take what hiredis refuses";
    }
    if (hiredis->len > ours->len || (ours->bad && !hiredis->bad)) {
        return ours->bad && excuse.stricter ? NULL : "we refuse, or overlook, what hiredis takes, without a reason";
    }
    return NULL;
}

#endif
