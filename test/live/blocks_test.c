/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocks of any number of tokens, with and without their tokens, in every kind of store, plain and sealed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/kit.h"
#include "support/server.h"

#define SECRET "a secret of 16 bytes and more"

/* The stores, each as a URL. The server is NULL where none is installed. */
typedef struct places {
    kvft_server *server;
    char *dir;
    char urls[5][256];
    size_t num;
} places;

static int open_places(void **state) {
    static places p;
    p.server = kvft_server_start(NULL);
    p.dir = kvft_temp_dir();
    snprintf(p.urls[p.num++], sizeof p.urls[0], "mem:");
    snprintf(p.urls[p.num++], sizeof p.urls[0], "file:%s", p.dir);
    if (p.server != NULL) {
        snprintf(p.urls[p.num++], sizeof p.urls[0], "%s", p.server->unix_url);
        snprintf(p.urls[p.num++], sizeof p.urls[0], "%s?prefix=parts&part=64K", p.server->unix_url);
        snprintf(p.urls[p.num++], sizeof p.urls[0], "%s?prefix=tcp&part=300K", p.server->tcp_url);
    }
    *state = &p;
    return 0;
}

static int close_places(void **state) {
    places *p = *state;
    if (p->server != NULL) {
        kvft_server_stop(p->server);
    }
    kvft_remove_dir(p->dir);
    return 0;
}

/* A prompt saved through one store, to be loaded through another: nothing is known there. */
typedef struct bench {
    kvf_store *writer, *reader;
    kvf_space *to, *from;
    kvft_prompt *prompt;
    size_t num;
} bench;

static void open_bench(bench *b, const char *url, const char *secret, uint32_t block_tokens, size_t num,
                       size_t payload) {
    b->num = num;
    b->writer = kvft_store(url);
    b->to = kvft_sealed_space(b->writer, "m", block_tokens, secret);
    b->prompt = kvft_prompt_new(b->to, block_tokens, num, payload);
    b->reader = b->writer; /* memory is that of one store */
    if (url[0] != 'm') {
        b->reader = kvft_store(url);
    }
    b->from = kvft_sealed_space(b->reader, "m", block_tokens, secret);
}

static void close_bench(bench *b) {
    kvft_prompt_free(b->prompt);
    kvf_space_close(b->from);
    kvf_space_close(b->to);
    if (b->reader != b->writer) {
        kvf_store_close(b->reader);
    }
    kvf_store_close(b->writer);
}

/* Loads the first `num` blocks, which are there. */
static void load_all(bench *b, size_t num) {
    kvft_prompt_poison(b->prompt);
    assert_int_equal(kvf_load(b->from, b->prompt->blocks, num, NULL, KVF_DEFAULT), num);
    assert_int_equal(kvft_prompt_wrong(b->prompt, b->prompt->block_tokens, num), 0);
}

/* ---- any number of tokens ---- */

static void any_number(const char *url, const char *secret) {
    static const uint32_t numbers[] = {1, 3, 100, 4097, 65535, 65536};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        bench b;
        open_bench(&b, url, secret, numbers[i], 3, 70000);
        kvft_save_all(b.to, b.writer, b.prompt);
        load_all(&b, 3);
        b.prompt->tokens[2 * numbers[i]] ^= 1;
        assert_int_equal(kvf_load(b.from, b.prompt->blocks, 3, NULL, KVF_DEFAULT), 2);
        assert_int_equal(b.prompt->blocks[2].why, KVF_WHY_OTHER_TOKENS);
        close_bench(&b);
    }
}

static void test_any_number_of_tokens(void **state) {
    const places *p = *state;
    for (size_t i = 0; i < p->num; i++) {
        any_number(p->urls[i], NULL);
        any_number(p->urls[i], SECRET);
    }
}

/* A reservation has room for the tokens of a whole block, whatever their number. */
static void test_reserved_for_any_number(void **state) {
    (void)state;
    for (uint32_t tokens = 1; tokens <= 65536; tokens = tokens * 5 < 65536 || tokens == 65536 ? tokens * 5 : 65536) {
        bench b;
        kvf_reserved reserved = {0};
        open_bench(&b, "mem:", NULL, tokens, 1, 5000);
        assert_int_equal(kvf_reserve(b.to, &reserved, 5000), KVF_OK);
        memcpy(reserved.data, b.prompt->memory, 5000);
        assert_int_equal(kvf_commit(b.to, &reserved, b.prompt->blocks, 5000), KVF_OK);
        kvft_flush_all(b.writer);
        load_all(&b, 1);
        close_bench(&b);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_number_of_tokens),
        cmocka_unit_test(test_reserved_for_any_number),
    };
    return cmocka_run_group_tests(tests, open_places, close_places);
}
