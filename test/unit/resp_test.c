/* SPDX-License-Identifier: Apache-2.0
 *
 * The protocol of Redis, byte by byte: a stream means the same in any pieces, and a hostile stream harms only its
 * sender.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "resp/decode.h"
#include "resp/encode.h"

#define SCRATCH 160u
#define PLACE   64u

/* ---- a transcript: what was decoded, as text ---- */

typedef struct transcript {
    char text[65536];
    size_t len;
} transcript;

static void note(transcript *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void note(transcript *t, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(t->text + t->len, sizeof t->text - t->len, format, args);
    va_end(args);
    assert_true(n >= 0 && (size_t)n < sizeof t->text - t->len);
    t->len += (size_t)n;
}

static void note_reply(transcript *t, const kvfi_reply *reply, const char *place) {
    static const char *const names[] = {"status", "error", "int", "bulk", "nil", "array", "oversize"};
    note(t, "%s %lld%s", names[reply->kind], (long long)reply->num, reply->last ? " last" : "");
    if (reply->text != NULL) {
        note(t, " \"%.*s\"", (int)reply->len, reply->text);
    } else if (reply->kind == KVFI_RESP_BULK && reply->num > 0) {
        note(t, " <%.*s>", (int)reply->num, place);
    }
    note(t, "\n");
}

/* A place of three iovecs, one of them empty, in front of which something must stay. */
typedef struct place {
    char memory[PLACE + 2];
    struct iovec iov[4];
} place;

static void place_init(place *p) {
    memset(p->memory, '.', sizeof p->memory);
    p->iov[0] = (struct iovec){p->memory, 7}; /* the first byte is not part of it */
    p->iov[1] = (struct iovec){p->memory, 0};
    p->iov[2] = (struct iovec){p->memory + 7, 20};
    p->iov[3] = (struct iovec){p->memory + 27, PLACE + 1 - 27};
}

/* Decodes `len` bytes that arrive in pieces that end at every multiple of `step` and at `cut`. With `places` every
 * reply has a place. `cap` iovecs are offered. */
static void decode(transcript *t, const char *bytes, size_t len, size_t cut, size_t step, bool places, size_t cap) {
    char scratch[SCRATCH];
    kvfi_resp resp;
    kvfi_reply reply;
    place p;
    size_t at = 0;
    kvfi_resp_init(&resp, scratch, sizeof scratch);
    place_init(&p);
    t->len = 0;
    t->text[0] = '\0';
    if (places) {
        kvfi_resp_into(&resp, (kvfi_place){.iov = p.iov, .skip = 1, .bytes = PLACE});
    }
    for (;;) {
        kvfi_resp_event event = kvfi_resp_next(&resp, &reply);
        if (event == KVFI_RESP_BAD) {
            note(t, "bad\n");
            assert_int_equal(kvfi_resp_next(&resp, &reply), KVFI_RESP_BAD);
            return;
        }
        if (event == KVFI_RESP_REPLY) {
            note_reply(t, &reply, p.memory + 1);
            assert_int_equal(p.memory[0], '.');
            assert_int_equal(p.memory[PLACE + 1], '.');
            if (places) {
                place_init(&p);
                kvfi_resp_into(&resp, (kvfi_place){.iov = p.iov, .skip = 1, .bytes = PLACE});
            }
            continue;
        }
        if (at == len) {
            return;
        }
        struct iovec iov[16];
        size_t num = kvfi_resp_want(&resp, iov, cap);
        size_t wanted = 0, put = 0;
        assert_in_range(num, 1, cap);
        for (size_t i = 0; i < num; i++) {
            assert_true(iov[i].iov_len > 0);
            wanted += iov[i].iov_len;
        }
        size_t end = len;
        end = at < cut && cut < end ? cut : end;
        end = step > 0 && (at / step + 1) * step < end ? (at / step + 1) * step : end;
        size_t n = end - at < wanted ? end - at : wanted;
        for (size_t i = 0; i < num && put < n; i++) {
            size_t part = iov[i].iov_len < n - put ? iov[i].iov_len : n - put;
            memcpy(iov[i].iov_base, bytes + at + put, part);
            put += part;
        }
        at += n;
        kvfi_resp_got(&resp, n);
    }
}

/* ---- the corpus: streams, and what they mean without and with places ---- */

typedef struct example {
    const char *bytes, *without, *with;
} example;

#define SIXTY "0123456789012345678901234567890123456789012345678901234567890"
static const example corpus[] = {
    {"+OK\r\n", "status 0 last \"OK\"\n", NULL},
    {"+\r\n", "status 0 last \"\"\n", NULL},
    {"-ERR no\r\n+PONG\r\n", "error 0 last \"ERR no\"\nstatus 0 last \"PONG\"\n", NULL},
    {":0\r\n:1\r\n:-1\r\n:9223372036854775807\r\n:-9223372036854775808\r\n",
     "int 0 last\nint 1 last\nint -1 last\nint 9223372036854775807 last\nint -9223372036854775808 last\n", NULL},
    {"$0\r\n\r\n$1\r\nx\r\n", "bulk 0 last \"\"\nbulk 1 last \"x\"\n", "bulk 0 last\nbulk 1 last <x>\n"},
    {"$-1\r\n*-1\r\n$3\r\nabc\r\n", "nil -1 last\nnil -1 last\nbulk 3 last \"abc\"\n",
     "nil -1 last\nnil -1 last\nbulk 3 last <abc>\n"},
    {"$64\r\n" SIXTY "abc\r\n$64\r\n" SIXTY "def\r\n:1\r\n$64\r\n" SIXTY "ghi\r\n",
     "bulk 64 last \"" SIXTY "abc\"\nbulk 64 last \"" SIXTY "def\"\nint 1 last\nbulk 64 last \"" SIXTY "ghi\"\n",
     "bulk 64 last <" SIXTY "abc>\nbulk 64 last <" SIXTY "def>\nint 1 last\nbulk 64 last <" SIXTY "ghi>\n"},
    {"$65\r\n" SIXTY "abcd\r\n+OK\r\n", "bulk 65 last \"" SIXTY "abcd\"\nstatus 0 last \"OK\"\n",
     "oversize 65 last\nstatus 0 last \"OK\"\n"},
    {"$4\r\n\r\n\r\n\r\n", "bulk 4 last \"\r\n\r\n\"\n", "bulk 4 last <\r\n\r\n>\n"},
    {"*0\r\n:1\r\n", "array 0 last\nint 1 last\n", NULL},
    {"*2\r\n$1\r\n0\r\n*2\r\n$1\r\na\r\n$2\r\nbc\r\n:7\r\n",
     "array 2\nbulk 1 \"0\"\narray 2\nbulk 1 \"a\"\nbulk 2 last \"bc\"\nint 7 last\n",
     "array 2\nbulk 1 <0>\narray 2\nbulk 1 <a>\nbulk 2 last <bc>\nint 7 last\n"},
    {"*3\r\n*0\r\n*1\r\n*1\r\n*0\r\n$-1\r\n+OK\r\n",
     "array 3\narray 0\narray 1\narray 1\narray 0\nnil -1 last\nstatus 0 last \"OK\"\n", NULL},
    {"*2\r\n$70\r\n" SIXTY "123456789\r\n:1\r\n", "array 2\nbulk 70 \"" SIXTY "123456789\"\nint 1 last\n",
     "array 2\noversize 70\nint 1 last\n"},
    /* What breaks the protocol. */
    {"HTTP/1.1 400 Bad Request\r\n", "bad\n", NULL},
    {"\r\n", "bad\n", NULL},
    {"+OK\n+OK\r\n", "status 0 last \"OK\n+OK\"\n", NULL},
    {"+OK\rx", "bad\n", NULL},
    {":\r\n", "bad\n", NULL},
    {":-\r\n", "bad\n", NULL},
    {":+1\r\n", "bad\n", NULL},
    {":1 \r\n", "bad\n", NULL},
    {":01\r\n", "bad\n", NULL},
    {":9223372036854775808\r\n", "bad\n", NULL},
    {":-9223372036854775809\r\n", "bad\n", NULL},
    {"$-2\r\n", "bad\n", NULL},
    {"$\r\n", "bad\n", NULL},
    {"$18446744073709551616\r\n", "bad\n", NULL},
    {"*-2\r\n", "bad\n", NULL},
    {"*1048577\r\n", "bad\n", NULL},
    {"*9223372036854775807\r\n", "bad\n", NULL},
    {"*1048576\r\n*1048576\r\n", "array 1048576\nbad\n", NULL},
    {"$3\r\nabcd\r\n", "bad\n", NULL},
    {"$3\r\nabc\rx", "bad\n", NULL},
    {"$0\r\nx\r\n", "bad\n", NULL},
    /* A length that nobody means: known before a byte of the body is read. */
    {"$9223372036854775807\r\nabc", "oversize 9223372036854775807 last\n", NULL},
    {"$1000000000000\r\n", "oversize 1000000000000 last\n", NULL},
};

static void corpus_whole(void **state) {
    (void)state;
    static transcript t;
    for (size_t i = 0; i < sizeof corpus / sizeof *corpus; i++) {
        const example *e = &corpus[i];
        decode(&t, e->bytes, strlen(e->bytes), 0, 0, false, 16);
        assert_string_equal(t.text, e->without);
        decode(&t, e->bytes, strlen(e->bytes), 0, 0, true, 16);
        assert_string_equal(t.text, e->with != NULL ? e->with : e->without);
    }
}

/* [T:split-points] Every cut of every stream, alone and with pieces of one, two, three bytes, with few iovecs and with
 * many. */
static void corpus_split(void **state) {
    (void)state;
    static transcript whole, t;
    for (size_t i = 0; i < sizeof corpus / sizeof *corpus; i++) {
        const char *bytes = corpus[i].bytes;
        size_t len = strlen(bytes);
        for (int places = 0; places < 2; places++) {
            decode(&whole, bytes, len, 0, 0, places != 0, 16);
            for (size_t cut = 0; cut <= len; cut++) {
                for (size_t cap = 2; cap <= 6; cap += 2) {
                    decode(&t, bytes, len, cut, 0, places != 0, cap);
                    assert_string_equal(t.text, whole.text);
                }
            }
            for (size_t step = 1; step < 9; step++) {
                decode(&t, bytes, len, 0, step, places != 0, 2);
                assert_string_equal(t.text, whole.text);
            }
        }
    }
}

/* All streams in a row, cut at every point: what one leaves behind does not change the next. */
static void corpus_joined(void **state) {
    (void)state;
    static transcript whole, t;
    static char joined[8192];
    size_t len = 0;
    for (size_t i = 0; i < 13; i++) {
        memcpy(joined + len, corpus[i].bytes, strlen(corpus[i].bytes));
        len += strlen(corpus[i].bytes);
    }
    for (int places = 0; places < 2; places++) {
        decode(&whole, joined, len, 0, 0, places != 0, 16);
        for (size_t cut = 0; cut <= len; cut++) {
            decode(&t, joined, len, cut, 0, places != 0, 16);
            assert_string_equal(t.text, whole.text);
        }
        for (size_t step = 1; step < 200; step++) {
            decode(&t, joined, len, 0, step, places != 0, 3);
            assert_string_equal(t.text, whole.text);
        }
    }
}

/* A line without an end, of any kind, is refused once it is longer than any that is meant. */
static void endless_line(void **state) {
    (void)state;
    for (const char *kind = "+-:$*"; *kind != '\0'; kind++) {
        char scratch[4096];
        kvfi_resp resp;
        kvfi_reply reply;
        size_t total = 0;
        kvfi_resp_init(&resp, scratch, sizeof scratch);
        kvfi_resp_event event = KVFI_RESP_MORE;
        while ((event = kvfi_resp_next(&resp, &reply)) == KVFI_RESP_MORE) {
            struct iovec iov[4];
            assert_int_equal(kvfi_resp_want(&resp, iov, 4), 1);
            ((char *)iov[0].iov_base)[0] = total == 0 ? *kind : '1';
            kvfi_resp_got(&resp, 1);
            total++;
            assert_true(total <= KVFI_RESP_MAX_LINE + 2);
        }
        assert_int_equal(event, KVFI_RESP_BAD);
    }
}

/* A line with its CRLF fits into the scratch, or it is refused before the scratch is full. */
static void line_of_the_scratch(void **state) {
    (void)state;
    for (size_t len = SCRATCH - 2; len < SCRATCH; len++) {
        char scratch[SCRATCH];
        kvfi_resp resp;
        kvfi_reply reply;
        struct iovec iov[2];
        kvfi_resp_init(&resp, scratch, sizeof scratch);
        kvfi_resp_want(&resp, iov, 2);
        assert_int_equal(iov[0].iov_len, SCRATCH);
        memset(iov[0].iov_base, '+', len);
        kvfi_resp_got(&resp, len);
        assert_int_equal(kvfi_resp_next(&resp, &reply), len == SCRATCH - 2 ? KVFI_RESP_MORE : KVFI_RESP_BAD);
    }
}

/* The longest text that the scratch holds with its CRLF, and one byte more. */
static void bulk_of_the_scratch(void **state) {
    (void)state;
    for (size_t len = SCRATCH - 2; len < SCRATCH; len++) {
        char scratch[SCRATCH], bytes[SCRATCH + 32];
        kvfi_resp resp;
        kvfi_reply reply;
        struct iovec iov[2];
        size_t head = (size_t)snprintf(bytes, sizeof bytes, "$%zu\r\n", len), at = 0;
        memset(bytes + head, 'x', len);
        memcpy(bytes + head + len, "\r\n", 2);
        kvfi_resp_init(&resp, scratch, sizeof scratch);
        while (kvfi_resp_next(&resp, &reply) == KVFI_RESP_MORE) {
            assert_true(at < head + len + 2);
            assert_in_range(kvfi_resp_want(&resp, iov, 2), 1, 2);
            ((char *)iov[0].iov_base)[0] = bytes[at++];
            kvfi_resp_got(&resp, 1);
        }
        assert_int_equal(reply.kind, len == SCRATCH - 2 ? KVFI_RESP_BULK : KVFI_RESP_OVERSIZE);
        assert_int_equal(reply.num, len);
    }
}

/* The longest line that is meant, and one byte more. */
static void longest_line(void **state) {
    (void)state;
    for (size_t more = 0; more < 2; more++) {
        char scratch[4096];
        kvfi_resp resp;
        kvfi_reply reply;
        struct iovec iov[2];
        size_t len = KVFI_RESP_MAX_LINE + more;
        kvfi_resp_init(&resp, scratch, sizeof scratch);
        kvfi_resp_want(&resp, iov, 2);
        memset(iov[0].iov_base, '+', len);
        memcpy((char *)iov[0].iov_base + len, "\r\n", 2);
        kvfi_resp_got(&resp, len + 2);
        assert_int_equal(kvfi_resp_next(&resp, &reply), more == 0 ? KVFI_RESP_REPLY : KVFI_RESP_BAD);
    }
}

/* In front of a body that has a place, no byte of the body goes through the scratch, whatever the socket holds: this is
 * the copy that is not made. [T:no-copy] */
static void body_is_not_copied(void **state) {
    (void)state;
    char scratch[SCRATCH];
    static char body[100000];
    struct iovec dest = {body, sizeof body};
    kvfi_resp resp;
    kvfi_reply reply;
    struct iovec iov[8];
    kvfi_resp_init(&resp, scratch, sizeof scratch);
    for (int round = 0; round < 3; round++) {
        kvfi_resp_into(&resp, (kvfi_place){.iov = &dest, .bytes = sizeof body});
        assert_int_equal(kvfi_resp_next(&resp, &reply), KVFI_RESP_MORE);
        if (round == 0) {
            /* Nothing but the header. */
            assert_int_equal(kvfi_resp_want(&resp, iov, 8), 1);
            assert_int_equal(iov[0].iov_len, strlen("$100000\r\n"));
            memcpy(iov[0].iov_base, "$100000\r\n", 9);
            kvfi_resp_got(&resp, 9);
            assert_int_equal(kvfi_resp_next(&resp, &reply), KVFI_RESP_MORE);
        }
        /* The whole body, the CRLF, and the next header in one read. */
        assert_int_equal(kvfi_resp_left(&resp), sizeof body);
        assert_int_equal(kvfi_resp_want(&resp, iov, 8), 2);
        assert_ptr_equal(iov[0].iov_base, body);
        assert_int_equal(iov[0].iov_len, sizeof body);
        assert_int_equal(iov[1].iov_len, 2 + strlen("$100000\r\n"));
        memcpy(iov[1].iov_base, "\r\n$100000\r\n", 11);
        kvfi_resp_got(&resp, sizeof body + 11);
        assert_int_equal(kvfi_resp_next(&resp, &reply), KVFI_RESP_REPLY);
        assert_int_equal(reply.kind, KVFI_RESP_BULK);
        assert_int_equal(reply.num, sizeof body);
        assert_false(kvfi_resp_idle(&resp));
    }
}

static void idle(void **state) {
    (void)state;
    char scratch[SCRATCH];
    kvfi_resp resp;
    kvfi_reply reply;
    struct iovec iov[2];
    kvfi_resp_init(&resp, scratch, sizeof scratch);
    assert_true(kvfi_resp_idle(&resp));
    static const char bytes[] = "*2\r\n:1\r\n:2\r\n";
    for (size_t i = 0; i < sizeof bytes - 1; i++) {
        kvfi_resp_want(&resp, iov, 2);
        memcpy(iov[0].iov_base, bytes + i, 1);
        kvfi_resp_got(&resp, 1);
        assert_false(kvfi_resp_idle(&resp));
        while (kvfi_resp_next(&resp, &reply) == KVFI_RESP_REPLY) {
        }
    }
    assert_true(kvfi_resp_idle(&resp));
    kvfi_resp_want(&resp, iov, 2);
    memcpy(iov[0].iov_base, "$2\r\nab", 6);
    kvfi_resp_got(&resp, 6);
    assert_int_equal(kvfi_resp_next(&resp, &reply), KVFI_RESP_MORE);
    assert_int_equal(kvfi_resp_left(&resp), 2); /* it is handed out as a whole, so none of it has come */
    kvfi_resp_want(&resp, iov, 2);
    memcpy(iov[0].iov_base, "\r\n", 2);
    kvfi_resp_got(&resp, 2);
    assert_int_equal(kvfi_resp_next(&resp, &reply), KVFI_RESP_REPLY);
    assert_int_equal(kvfi_resp_left(&resp), 0);
    assert_true(kvfi_resp_idle(&resp));
}

/* ---- commands ---- */

static void commands(void **state) {
    (void)state;
    char memory[256];
    kvfi_cmd cmd = {.data = memory, .cap = sizeof memory};
    kvfi_cmd_array(&cmd, 3);
    kvfi_cmd_text(&cmd, "SET");
    kvfi_cmd_bulk(&cmd, "a\0b", 3);
    kvfi_cmd_bulk(&cmd, "", 0);
    kvfi_cmd_number(&cmd, 0);
    kvfi_cmd_number(&cmd, UINT64_MAX);
    kvfi_cmd_bulk_header(&cmd, 1048576);
    kvfi_cmd_crlf(&cmd);
    static const char expected[] =
        "*3\r\n$3\r\nSET\r\n$3\r\na\0b\r\n$0\r\n\r\n$1\r\n0\r\n$20\r\n18446744073709551615\r\n$1048576\r\n\r\n";
    assert_false(cmd.full);
    assert_int_equal(cmd.len, sizeof expected - 1);
    assert_memory_equal(memory, expected, cmd.len);
}

/* However small the buffer, nothing is written behind it, and it says so. */
static void commands_full(void **state) {
    (void)state;
    char memory[32];
    for (size_t cap = 0; cap <= 22; cap++) {
        memset(memory, '#', sizeof memory);
        kvfi_cmd cmd = {.data = memory, .cap = cap};
        kvfi_cmd_array(&cmd, 2);
        kvfi_cmd_text(&cmd, "GET");
        kvfi_cmd_text(&cmd, "key");
        assert_int_equal(cmd.full, cap < 22);
        assert_true(cmd.len <= cap);
        assert_int_equal(memory[cap], '#');
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(corpus_whole),
        cmocka_unit_test(corpus_split),
        cmocka_unit_test(corpus_joined),
        cmocka_unit_test(endless_line),
        cmocka_unit_test(body_is_not_copied),
        cmocka_unit_test(idle),
        cmocka_unit_test(commands),
        cmocka_unit_test(commands_full),
        cmocka_unit_test(line_of_the_scratch),
        cmocka_unit_test(bulk_of_the_scratch),
        cmocka_unit_test(longest_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
