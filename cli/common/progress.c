/* SPDX-License-Identifier: Apache-2.0
 *
 * The progress of a long step, on stderr.
 */
#include "common/cli.h"

#include <stdarg.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { FIRST_US = 500000, EVERY_US = 100000, LINE_EVERY_US = 2000000, BAR_WIDTH = 30 };

int64_t kvfcli_now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

void kvfcli_progress_start(kvfcli_progress *progress, bool quiet) {
    int64_t now = kvfcli_now_us();
    *progress = (kvfcli_progress){
        .quiet = quiet, .terminal = isatty(STDERR_FILENO), .started_us = now, .shown_us = now, .first = UINT32_MAX};
}

static bool is_due(const kvfcli_progress *p, int64_t now) {
    if (p->quiet) {
        return false;
    }
    return p->terminal ? now - p->started_us >= FIRST_US && now - p->shown_us >= EVERY_US
                       : now - p->shown_us >= LINE_EVERY_US;
}

void kvfcli_progress_show(kvfcli_progress *progress, const char *format, ...) {
    int64_t now = kvfcli_now_us();
    if (!is_due(progress, now)) {
        return;
    }
    va_list args;
    va_start(args, format);
    fputs(progress->terminal ? "\r\033[K" : "kvferry: ", stderr);
    vfprintf(stderr, format, args);
    fputs(progress->terminal ? "" : "\n", stderr);
    va_end(args);
    fflush(stderr);
    progress->shown_us = now;
    progress->drawn = true;
}

static const char *bar(char out[BAR_WIDTH + 4], uint32_t done, uint32_t total) {
    uint32_t full = (uint32_t)((uint64_t)done * BAR_WIDTH / total);
    memset(out, '.', BAR_WIDTH + 1);
    memset(out, '#', full + 1);
    out[0] = '[';
    snprintf(out + BAR_WIDTH + 1, 3, "] ");
    return out;
}

static const char *time_left(char out[KVFCLI_TEXT], const kvfcli_progress *p, uint32_t done, uint32_t total) {
    if (done <= p->first) {
        return "";
    }
    double us_each = (double)(kvfcli_now_us() - p->started_us) / (done - p->first);
    snprintf(out, KVFCLI_TEXT, ", %.0f s left", (double)(total - done) * us_each / 1e6);
    return out;
}

void kvfcli_progress_of(kvfcli_progress *progress, const char *what, uint32_t done, uint32_t total, const char *unit) {
    char drawing[BAR_WIDTH + 4] = "", left[KVFCLI_TEXT];
    if (progress->first == UINT32_MAX) {
        progress->first = done;
    }
    if (total == 0 || done > total || (!progress->terminal && done == total)) {
        return;
    }
    kvfcli_progress_show(progress, "%s %s%u of %u%s%s", what, progress->terminal ? bar(drawing, done, total) : "", done,
                         total, unit, time_left(left, progress, done, total));
}

void kvfcli_progress_end(kvfcli_progress *progress) {
    if (progress->drawn && progress->terminal) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
    }
    progress->drawn = false;
}
