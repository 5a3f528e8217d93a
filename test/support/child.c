/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls of a forked child, row by row. The child notes in shared memory how far it has come.
 */
#include "support/child.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/kit.h"

enum { PASSES = 2, MAX_EXPORTED = 512, NAME = 80 };

/* ---- what a library exports ---- */

static size_t read_exported(const char *library, char (*names)[NAME]) {
    char command[4200], line[256];
    size_t num = 0;
    snprintf(command, sizeof command, "nm -D --defined-only '%s'", library);
    FILE *nm = popen(command, "r");
    assert_non_null(nm);
    while (num < MAX_EXPORTED && fgets(line, sizeof line, nm) != NULL) {
        if (sscanf(line, "%*x T %79[a-z0-9_]", names[num]) == 1 && strncmp(names[num], "kvf_", 4) == 0) {
            num++;
        }
    }
    assert_int_equal(pclose(nm), 0);
    assert_in_range(num, 1, MAX_EXPORTED - 1);
    return num;
}

static bool has_row(const kvft_child_row *rows, size_t num, const char *name) {
    for (size_t i = 0; i < num; i++) {
        if (strcmp(rows[i].name, name) == 0) {
            return true;
        }
    }
    return false;
}

static bool is_exported(char (*names)[NAME], size_t num, const char *name) {
    for (size_t i = 0; i < num; i++) {
        if (strcmp(names[i], name) == 0) {
            return true;
        }
    }
    return false;
}

void kvft_child_covers(const char *library, const kvft_child_row *rows, size_t num) {
    char names[MAX_EXPORTED][NAME];
    size_t exported = read_exported(library, names);
    bool right = true;
    for (size_t i = 0; i < exported; i++) {
        if (!has_row(rows, num, names[i])) {
            print_error("%s has no row: what does it answer in a forked child?\n", names[i]);
            right = false;
        }
    }
    for (size_t i = 0; i < num; i++) {
        if (!is_exported(names, exported, rows[i].name)) {
            print_error("%s has a row, but is not exported\n", rows[i].name);
            right = false;
        }
    }
    assert_true(right);
}

/* ---- the child ---- */

typedef struct progress {
    size_t row;
    int pass;
} progress;

static int call_all(volatile progress *at, const kvft_child_row *rows, size_t num, void *scene) {
    for (at->pass = 0; at->pass < PASSES; at->pass++) {
        for (at->row = 0; at->row < num; at->row++) {
            if (!rows[at->row].call(scene)) {
                return 1;
            }
        }
    }
    return 0;
}

void kvft_child_calls(const kvft_child_row *rows, size_t num, void *scene) {
    progress *at = mmap(NULL, sizeof *at, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(at != MAP_FAILED);
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        alarm(2 * KVFT_PATIENCE_MS / 1000);
        kvft_exit(call_all(at, rows, num, scene));
    }
    assert_true(child > 0 && waitpid(child, &status, 0) == child);
    progress end = *at;
    munmap(at, sizeof *at);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        fail_msg("a child's call of %s (pass %d) %s", end.row < num ? rows[end.row].name : "nothing", end.pass + 1,
                 WIFEXITED(status) && WEXITSTATUS(status) == 1        ? "answered wrong"
                 : WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM ? "hung"
                                                                      : "ended the child");
    }
}
