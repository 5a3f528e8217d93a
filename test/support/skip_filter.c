/* SPDX-License-Identifier: Apache-2.0
 *
 * Linked into every test program: KVFT_SKIP=PATTERN in the environment skips the tests of that name ("*" and "?" are
 * wild). The stage tsan of scripts/test.sh leaves out the fault loops this way: they have one thread, and thousands of
 * turns.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

__attribute__((constructor)) static void set_skip_filter(void) {
    const char *pattern = getenv("KVFT_SKIP");
    if (pattern != NULL && *pattern != '\0') {
        cmocka_set_skip_filter(pattern);
    }
}
