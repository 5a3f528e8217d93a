/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry run: the progress of a long step.
 */
#include "run/run.h"

#include <time.h>
#include <unistd.h>

enum { TERMINAL_FIRST_US = 500000, TERMINAL_EVERY_US = 100000, LINE_EVERY_US = 2000000, WIDTH = 30 };

int64_t kvfcli_now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

void kvfcli_bar_start(kvfcli_bar *bar, const char *what, const char *unit, bool quiet) {
    *bar = (kvfcli_bar){.what = what, .unit = unit, .quiet = quiet, .terminal = isatty(STDERR_FILENO)};
    bar->started_us = kvfcli_now_us();
    bar->shown_us = bar->started_us;
    bar->first = UINT32_MAX;
}

static bool is_due(const kvfcli_bar *bar, int64_t now, uint32_t done, uint32_t total) {
    if (!bar->terminal) {
        return done < total && now - bar->shown_us >= LINE_EVERY_US;
    }
    return now - bar->started_us >= TERMINAL_FIRST_US && now - bar->shown_us >= TERMINAL_EVERY_US;
}

static void draw(uint32_t done, uint32_t total) {
    char line[WIDTH + 1];
    uint32_t full = (uint32_t)((uint64_t)done * WIDTH / total);
    for (uint32_t i = 0; i < WIDTH; i++) {
        line[i] = i < full ? '#' : '.';
    }
    line[WIDTH] = '\0';
    fprintf(stderr, "[%s] ", line);
}

void kvfcli_bar_show(kvfcli_bar *bar, uint32_t done, uint32_t total) {
    int64_t now = kvfcli_now_us();
    if (bar->first == UINT32_MAX) {
        bar->first = done;
    }
    if (bar->quiet || total == 0 || done > total || !is_due(bar, now, done, total)) {
        return;
    }
    fprintf(stderr, "%s%s ", bar->terminal ? "\r\033[K" : "kvferry: ", bar->what);
    if (bar->terminal) {
        draw(done, total);
    }
    double per_second = (double)(done - bar->first) * 1e6 / (double)(now - bar->started_us);
    fprintf(stderr, "%u of %u%s", done, total, bar->unit);
    if (done > bar->first) {
        fprintf(stderr, ", %.0f s left", (double)(total - done) / per_second);
    }
    fputs(bar->terminal ? "" : "\n", stderr);
    fflush(stderr);
    bar->shown_us = now;
    bar->drawn = true;
}

void kvfcli_bar_end(kvfcli_bar *bar) {
    if (bar->drawn && bar->terminal) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
    }
    bar->drawn = false;
}
