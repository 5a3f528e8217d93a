/* SPDX-License-Identifier: Apache-2.0
 *
 * Our decoder against that of hiredis (support/resp_diff.h): streams of the fuzzer's corpus, and seeded ones, valid and
 * broken, whole and cut at every byte.
 */
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/kit.h"
#include "support/resp_diff.h"

#define SCRATCH       1200u
#define SMALL_SCRATCH 160u
#define MAX_STREAM    6000u

static unsigned long compared, stricter, deeper;

static void compare(const char *bytes, size_t len, size_t piece, size_t cut, bool place, size_t cap,
                    const diff_text *hiredis) {
    diff_text ours = diff_ours(bytes, len, piece, cut, place, cap);
    const char *wrong = diff_judge(hiredis, &ours, diff_scan(bytes, len, place ? DIFF_PLACE : cap - 2, cap));
    if (wrong != NULL) {
        fail_msg(
            "%s: pieces of %zu, cut at %zu, %s place, scratch of %zu; stream:\n%.*s\nhiredis (%s):\n%.*s\nours (%s):\n%.*s",
            wrong, piece, cut, place ? "a" : "no", cap, (int)len, bytes, hiredis->bad ? "bad" : "good",
            (int)hiredis->len, hiredis->text, ours.bad ? "bad" : "good", (int)ours.len, ours.text);
    }
    compared++;
    stricter += ours.bad && !hiredis->bad;
    deeper += hiredis->bad && !ours.bad;
    free(ours.text);
}

static void compare_all(const char *bytes, size_t len) {
    diff_text whole = diff_hiredis(bytes, len, len);
    diff_text slow = diff_hiredis(bytes, len, 1);
    if (whole.bad == slow.bad) { /* hiredis itself depends on the pieces where a CR comes last */
        assert_int_equal(whole.len, slow.len);
    }
    free(slow.text);
    for (int mode = 0; mode < 4; mode++) {
        bool place = mode % 2 == 1;
        size_t cap = mode < 2 ? SCRATCH : SMALL_SCRATCH;
        compare(bytes, len, SIZE_MAX, len, place, cap, &whole);
        compare(bytes, len, 1, len, place, cap, &whole);
        for (size_t cut = 1; cut < len && len < 600; cut++) {
            compare(bytes, len, SIZE_MAX, cut, place, cap, &whole);
        }
    }
    free(whole.text);
}

/* ---- seeded streams ---- */

typedef struct stream {
    char bytes[MAX_STREAM];
    size_t len;
} stream;

static void put(stream *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(stream *s, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(s->bytes + s->len, MAX_STREAM - s->len, format, args);
    va_end(args);
    if (n > 0 && s->len + (size_t)n < MAX_STREAM) {
        s->len += (size_t)n;
    }
}

static void put_reply(stream *s, uint64_t *random, int depth) {
    static const long long numbers[] = {0, 1, -1, 9, 10, -10, 4294967296, INT64_MAX, INT64_MIN};
    unsigned kind = (unsigned)(kvft_random(random) % (depth < 9 ? 8 : 6));
    unsigned n = (unsigned)(kvft_random(random) % 12);
    static const unsigned lengths[] = {0, 1, 2, 3, 10, 63, 120, 157, 158, 159, 1000, 1198};
    switch (kind) {
    case 0:
        put(s, "+OK%.*s\r\n", (int)n, "abcdefghijkl");
        break;
    case 1:
        put(s, "-ERR %.*s\r\n", (int)n, "no such key!");
        break;
    case 2:
        put(s, ":%lld\r\n", numbers[n % 9]);
        break;
    case 3:
        put(s, n % 2 == 0 ? "$-1\r\n" : "*-1\r\n");
        break;
    case 4:
    case 5: {
        size_t len = lengths[n];
        put(s, "$%zu\r\n", len);
        for (size_t i = 0; i < len && s->len < MAX_STREAM - 2; i++) {
            s->bytes[s->len++] = "\r\n$*+x"[kvft_random(random) % 6];
        }
        put(s, "\r\n");
        break;
    }
    default:
        put(s, "*%u\r\n", n % 4);
        for (unsigned i = 0; i < n % 4; i++) {
            put_reply(s, random, depth + 1);
        }
    }
}

/* A few bytes changed, lost, doubled, or cut off. */
static void damage(stream *s, uint64_t *random) {
    static const char likely[] = "\r\n0123456789-+:$*x";
    for (unsigned i = (unsigned)(kvft_random(random) % 4); i > 0 && s->len > 2; i--) {
        size_t at = kvft_random(random) % s->len;
        switch (kvft_random(random) % 4) {
        case 0:
            s->bytes[at] = likely[kvft_random(random) % (sizeof likely - 1)];
            break;
        case 1:
            memmove(s->bytes + at, s->bytes + at + 1, s->len - at - 1);
            s->len--;
            break;
        case 2:
            if (s->len + 1 < MAX_STREAM) {
                memmove(s->bytes + at + 1, s->bytes + at, s->len - at);
                s->len++;
            }
            break;
        default:
            s->len = at + 1;
        }
    }
}

static void test_seeded_streams(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < 3000; seed++) {
        stream s = {.len = 0};
        uint64_t random = seed;
        for (unsigned i = (unsigned)(kvft_random(&random) % 5) + 1; i > 0; i--) {
            put_reply(&s, &random, 0);
        }
        if (seed % 3 != 0) {
            damage(&s, &random);
        }
        compare_all(s.bytes, s.len);
    }
}

static void test_corpus(void **state) {
    (void)state;
    static char bytes[MAX_STREAM];
    DIR *dir = opendir(KVFT_GOLDEN "/../fuzz/corpus/resp");
    assert_non_null(dir);
    unsigned num = 0;
    for (const struct dirent *entry = readdir(dir); entry != NULL; entry = readdir(dir)) {
        char path[512];
        snprintf(path, sizeof path, KVFT_GOLDEN "/../fuzz/corpus/resp/%s", entry->d_name);
        FILE *file = entry->d_name[0] != '.' ? fopen(path, "rb") : NULL;
        if (file != NULL) {
            size_t len = fread(bytes, 1, sizeof bytes, file);
            fclose(file);
            if (len > 3) { /* the first three bytes are the fuzzer's */
                compare_all(bytes + 3, len - 3);
                num++;
            }
        }
    }
    closedir(dir);
    assert_true(num >= 15);
}

/* Where we differ, we do: each of the reasons, alone. */
static void test_differences(void **state) {
    (void)state;
    static const struct {
        const char *bytes;
        bool hiredis_bad, ours_bad;
    } cases[] = {
        {"+a\rb\r\n", false, true},                                                          /* lone CR */
        {"$1\r\naXY+OK\r\n", false, true},                                                   /* tail */
        {"$9000\r\n", false, true},                                                          /* large */
        {"*1048577\r\n", false, true},                                                       /* many */
        {"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n", true, false}, /* deep */
        {"?\r\n", true, true},
        {":1a\r\n", true, true},
        {"$-2\r\n", true, true},
        {"*-7\r\n", true, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t len = strlen(cases[i].bytes);
        diff_text hiredis = diff_hiredis(cases[i].bytes, len, len),
                  ours = diff_ours(cases[i].bytes, len, SIZE_MAX, len, false, SCRATCH);
        if (hiredis.bad != cases[i].hiredis_bad || ours.bad != cases[i].ours_bad) {
            fail_msg("case %zu: hiredis %d, ours %d", i, hiredis.bad, ours.bad);
        }
        free(hiredis.text);
        free(ours.text);
        compare_all(cases[i].bytes, len);
    }
}

static int report(void **state) {
    (void)state;
    printf("%lu comparisons; %lu times we were stricter, %lu times hiredis was (depth)\n", compared, stricter, deeper);
    return compared > 100000 && stricter > 0 ? 0 : -1;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_differences),
        cmocka_unit_test(test_corpus),
        cmocka_unit_test(test_seeded_streams),
    };
    return cmocka_run_group_tests(tests, NULL, report);
}
