/* SPDX-License-Identifier: Apache-2.0
 *
 * Linked into every test program: KVFT_SKIP=PATTERN in the environment skips the tests of that name ("*" and "?" are
 * wild), KVFT_ONLY=PATTERN runs no others, and KVFT_LIST=1 prints the names and runs none. The stage tsan of
 * scripts/test.sh leaves out the fault loops this way: they have one thread, and thousands of turns. checks/mutants.py
 * runs the tests one by one.
 */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char *set_in(const char *name) {
    const char *value = getenv(name);
    return value != NULL && *value != '\0' ? value : NULL;
}

typedef int run_fn(const char *, const struct CMUnitTest *, size_t, CMFixtureFunction, CMFixtureFunction);

/* Stands in front of cmocka's function of that name, which has no way to list tests. */
int _cmocka_run_group_tests(const char *group, const struct CMUnitTest *const tests, const size_t num,
                            CMFixtureFunction setup, CMFixtureFunction teardown) {
    if (set_in("KVFT_LIST") != NULL) {
        for (size_t i = 0; i < num; i++) {
            printf("%s\n", tests[i].name);
        }
        return 0;
    }
    if (set_in("KVFT_SKIP") != NULL) {
        cmocka_set_skip_filter(set_in("KVFT_SKIP"));
    }
    if (set_in("KVFT_ONLY") != NULL) {
        cmocka_set_test_filter(set_in("KVFT_ONLY"));
    }
    run_fn *run = NULL;
    void *found = dlsym(RTLD_NEXT, "_cmocka_run_group_tests");
    memcpy(&run, &found, sizeof run);
    return run(group, tests, num, setup, teardown);
}
