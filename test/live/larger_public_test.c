/* SPDX-License-Identifier: Apache-2.0
 *
 * A prompt larger than the memory of a Redis with eviction: its front is kept and loaded by each run. Its end would
 * evict the front, and is not stored.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "support/kit.h"
#include "support/server.h"

enum { BLOCKS = 100, PAYLOAD = 1000000, SEED = 7 };

static size_t run_prompt(const char *url) {
    kvf_store *store = kvft_store(url);
    kvf_space *space = kvft_space(store, "larger", 16);
    kvft_prompt *prompt = kvft_prompt_new(space, SEED, BLOCKS, PAYLOAD);
    size_t have = 0;
    assert_int_equal(kvf_match(space, &have, NULL, prompt->keys, BLOCKS, KVF_MS(10000)), KVF_OK);
    kvft_prompt_poison(prompt);
    have = have > 0 ? kvf_load(space, prompt->blocks, have, NULL, KVF_MS(60000)) : 0;
    assert_int_equal(kvft_prompt_wrong(prompt, SEED, have), 0);
    kvft_prompt_fill(prompt, SEED);
    (void)kvf_save(space, prompt->blocks + have, BLOCKS - have, NULL);
    /* The end of the prompt is not written, which the flush tells. */
    assert_int_equal(kvf_store_flush(store, NULL, KVF_MS(60000)), KVF_MISS);
    kvft_prompt_free(prompt);
    kvf_space_close(space);
    kvf_store_close(store);
    return have;
}

static void test_the_front_is_kept(void **state) {
    (void)state;
    const char *args[] = {"--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru", "--maxmemory-samples",
                          "10",          NULL};
    kvft_server *server = kvft_server_start(args);
    if (server == NULL) {
        skip();
    }
    assert_int_equal(run_prompt(server->unix_url), 0);
    for (int round = 1; round < 4; round++) {
        size_t have = run_prompt(server->unix_url);
        assert_true(have >= 30 && have < 64); /* three quarters of what fits, less what a server rounds up */
    }
    kvft_server_stop(server);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_the_front_is_kept)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
