/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry run: how the threads of llama.cpp wait for each other.
 *
 * They meet behind every operation, hundreds of times for a token. By default libgomp lets the one that is early spin
 * for milliseconds: as long as it shares its core with another program, it spends there what the late one needs, and a
 * token can take a second. When it asks the kernel to wake it after 100 turns instead, an idle machine is as fast, and
 * a busy one several times faster (measured: docs/llama.md). OMP_WAIT_POLICY=passive does not spin at all, which an
 * idle machine notices.
 */
#include "run.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SPINCOUNT "100"

void kvfcli_calm_threads(int argc, char **argv) {
    char program[4096];
    ssize_t len = readlink("/proc/self/exe", program, sizeof program - 1);
    if (getenv("GOMP_SPINCOUNT") != NULL || getenv("OMP_WAIT_POLICY") != NULL || len <= 0) {
        return;
    }
    program[len] = '\0';
    char **again = calloc((size_t)argc + 2, sizeof *again);
    if (again == NULL || setenv("GOMP_SPINCOUNT", SPINCOUNT, 1) != 0) {
        free(again);
        return;
    }
    again[0] = program;
    memcpy(again + 1, argv, (size_t)argc * sizeof *argv);
    execv(program, again);
    free(again); /* it can't; then it runs as it is */
}
