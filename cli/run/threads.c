/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry run: how the threads of llama.cpp wait for each other.
 *
 * They synchronise after every operation, hundreds of times a token. By default libgomp lets an early thread spin for
 * milliseconds. If it shares its core with another program, it spends there the time that the late thread needs, and a
 * token can take a second. With GOMP_SPINCOUNT=100 it soon asks the kernel to wake it: an idle machine is as fast, and
 * a busy one several times faster (docs/llama.md has the figures). OMP_WAIT_POLICY=passive does not spin at all, which
 * is slower on an idle machine.
 */
#include "run/run.h"

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
    free(again); /* impossible; then it runs without */
}
