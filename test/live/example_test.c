/* SPDX-License-Identifier: Apache-2.0
 *
 * examples/async.c gives up a load that falls silent, and answers as without a store. (test/shell/examples.sh runs it
 * on stores that work, or that are down.)
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/kit.h"
#include "support/proxy.h"
#include "support/server.h"

#define PROMPT_BYTES 1024 /* 64 blocks of 16 KiB */

/* Runs the example with one prompt, and returns what it prints. */
static const char *ask(const char *url, const char *params) {
    static char text[1024];
    char command[600], prompt[PROMPT_BYTES + 1];
    for (size_t i = 0; i < PROMPT_BYTES; i++) {
        prompt[i] = (char)('a' + i * i % 23);
    }
    prompt[PROMPT_BYTES] = '\0';
    char *dir = kvft_temp_dir();
    setenv("KVFT_PROMPT", prompt, 1);
    snprintf(command, sizeof command, "echo \"$KVFT_PROMPT\" >%s/in; %s/async '%s?%s' 1000 <%s/in 2>&1", dir,
             KVFT_EXAMPLES, url, params, dir);
    FILE *from = popen(command, "r");
    assert_non_null(from);
    size_t len = fread(text, 1, sizeof text - 1, from);
    text[len] = '\0';
    assert_int_equal(pclose(from), 0);
    kvft_remove_dir(dir);
    return text;
}

static void test_silent_load_is_given_up(void **state) {
    (void)state;
    kvft_server *server = kvft_server_start(NULL);
    if (server == NULL) {
        skip();
    }
    kvft_proxy *proxy = kvft_proxy_start(server->socket);
    char want[64];
    int tries = 20;
    const char *said = ask(server->unix_url, "stall_ms=600000");
    assert_non_null(strstr(said, "1: 1024 tokens: 0 loaded, 1024 computed, 64 blocks saved, answer "));
    snprintf(want, sizeof want, "%.20s", strstr(said, "answer "));

    /* The lookup passes. Each connection of the load stalls after some blocks; nothing but the example ends that sooner
     * than its budget. */
    kvft_proxy_set(proxy, &(kvft_plan){.stall_after = 100000});
    do { /* a busy machine may be too slow to look it up */
        said = ask(kvft_proxy_unix_url(proxy), "stall_ms=600000");
        print_message("%s", said);
        assert_non_null(strstr(said, want));
    } while (strstr(said, "did not load: ") == NULL && --tries > 0);
    assert_int_not_equal(tries, 0);
    assert_null(strstr(said, "did not load: budget"));
    kvft_proxy_stop(proxy);
    kvft_server_stop(server);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_silent_load_is_given_up)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
