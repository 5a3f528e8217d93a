/* SPDX-License-Identifier: Apache-2.0
 *
 * Loading and computing at once, on the real model and a real Redis behind a faulty proxy: whatever the store does, the
 * logits equal a run without one, to the bit. No time is asserted here; make check-never-slower does that.
 */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>

#include "lab.h"
#include "support/proxy.h"
#include "support/server.h"

#include <cmocka.h>

#define BLOCKS 5u
#define NUM    (BLOCKS * 64u + 20u) /* and a tail */
#define TRIES  60

/* Of a prefill. Servers answer later than that, or never. */
#define BUDGET_US INT64_C(100000000)
#define NEVER     "stall_ms=600000"
#define LATE_MS   1000000

static struct llama_model *model;
static kvft_server *server;
static kvft_proxy *proxy;
static llama_token *tokens;
static float *oracle;
static double block_us, block_bytes; /* as measured: how long one takes to compute, and how long it is */
static const lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true, .budget_us = BUDGET_US};

static double crossover(void) {
    return block_bytes / block_us * 1e6;
}

/* A process that knows nothing of the store; `before` prefills let it learn. */
static kvf_llama_report prefill_through(const kvft_plan *plan, size_t before) {
    kvf_llama_report report = {.struct_size = sizeof report};
    lab l = lab_open(model, &config, kvft_proxy_unix_url(proxy), getenv("KVF_MODEL"));
    assert_int_equal(l.status, KVF_OK);
    for (size_t i = 0; i <= before; i++) {
        kvft_proxy_set(proxy, plan);
        llama_memory_clear(llama_get_memory(l.ctx), true);
        float *logits = lab_prefill(&l, &report, 0, tokens, NUM);
        assert_true(lab_compare(oracle, logits, lab_vocab(&l)).identical);
        assert_int_equal(report.loaded_tokens + report.computed_tokens, NUM);
        free(logits);
    }
    lab_close(&l);
    return report;
}

static int set_up(void **state) {
    (void)state;
    kvf_llama_report report = {.struct_size = sizeof report};
    tokens = lab_prompt(NUM, 3);
    lab l = lab_open(model, &config, server->unix_url, getenv("KVF_MODEL"));
    assert_int_equal(l.status, KVF_OK);
    oracle = lab_prefill(&l, &report, 0, tokens, NUM);
    assert_int_equal(report.saved_blocks, BLOCKS + 1);
    kvft_flush_all(l.store);
    block_us = (double)report.compute_us / BLOCKS;
    for (int tries = 0; tries < TRIES && report.loaded_tokens != NUM - 1; tries++) {
        llama_memory_clear(llama_get_memory(l.ctx), true);
        free(lab_prefill(&l, &report, 0, tokens, NUM));
    }
    assert_int_equal(report.loaded_tokens, NUM - 1);
    block_bytes = (double)report.loaded_bytes / BLOCKS;
    lab_close(&l);
    return 0;
}

/* Unless the machine is so busy that computing is sooner. */
static void a_fast_store_is_loaded(void **state) {
    (void)state;
    kvf_llama_report report = {.struct_size = sizeof report};
    for (int tries = 0; tries < TRIES && report.computed_tokens != 1; tries++) {
        report = prefill_through(&(kvft_plan){0}, 1);
    }
    assert_int_equal(report.plan, KVF_LLAMA_PLAN_LOAD);
    assert_int_equal(report.computed_tokens, 1);
    assert_int_equal(report.why, KVF_WHY_NONE);
}

static int nap_ms; /* before each look of llama.cpp for cells to drop, which takes long in a large context */

/* Stands in front of libllama's own. */
__attribute__((visibility("default"))) bool llama_memory_seq_rm(llama_memory_t mem, llama_seq_id seq, llama_pos first,
                                                                llama_pos end) {
    bool (*real)(llama_memory_t, llama_seq_id, llama_pos, llama_pos) = NULL;
    void *symbol = dlsym(RTLD_NEXT, "llama_memory_seq_rm");
    memcpy(&real, &symbol, sizeof real);
    if (nap_ms > 0) {
        kvft_nap_ms(nap_ms);
    }
    return real(mem, seq, first, end);
}

/* A block may land after a look for those that have landed, and before one for those that have not: then it is not
 * missing. It was taken for that, and computed. */
static void landed_between_two_looks(void **state) {
    (void)state;
    kvf_llama_report report = {.struct_size = sizeof report};
    lab l = lab_open(model, &config, server->unix_url, getenv("KVF_MODEL"));
    assert_int_equal(l.status, KVF_OK);
    nap_ms = 3;
    for (int i = 0; i < 20; i++) {
        llama_memory_clear(llama_get_memory(l.ctx), true);
        free(lab_prefill(&l, &report, 0, tokens, NUM));
        assert_int_equal(report.missed_blocks, 0);
    }
    nap_ms = 0;
    lab_close(&l);
}

/* Where it lies moves with what else the machine does, so it is looked for. */
static void around_the_crossover_both(void **state) {
    (void)state;
    kvf_llama_report report = {.struct_size = sizeof report};
    double speed = crossover();
    for (int tries = 0; tries < TRIES && report.plan != KVF_LLAMA_PLAN_BOTH; tries++) {
        report = prefill_through(&(kvft_plan){.bytes_per_s = (uint64_t)speed}, 1);
        speed *= report.plan == KVF_LLAMA_PLAN_LOAD ? 0.5 : 1.5;
    }
    assert_int_equal(report.plan, KVF_LLAMA_PLAN_BOTH);
    assert_true(report.store_bytes_per_s > 0 && report.compute_tokens_per_s > 0 && report.stored_tokens == NUM - 1);
}

/* The first prefill tries it, the second knows better; neither has to be told. */
static void a_slow_store_is_left_alone(void **state) {
    (void)state;
    kvf_llama_report report = prefill_through(&(kvft_plan){.bytes_per_s = (uint64_t)(crossover() / 60)}, 1);
    assert_int_equal(report.plan, KVF_LLAMA_PLAN_COMPUTE);
    assert_true(report.why == KVF_WHY_SLOW || report.why == KVF_WHY_BUDGET);
    assert_int_equal(report.computed_tokens, NUM);
}

static void a_stall_in_the_middle(void **state) {
    (void)state;
    prefill_through(&(kvft_plan){.stall_after = (int64_t)(block_bytes * 2.5)}, 1);
}

static void a_cut_in_the_middle(void **state) {
    (void)state;
    prefill_through(&(kvft_plan){.bytes_per_s = (uint64_t)crossover(), .cut_after = (int64_t)(block_bytes * 1.5)}, 1);
}

static void a_flipped_bit(void **state) {
    (void)state;
    kvft_plan plan = {.bytes_per_s = (uint64_t)crossover(), .flip_at = (int64_t)(block_bytes * 0.5)};
    prefill_through(&plan, 0);
}

static void garbage_in_the_stream(void **state) {
    (void)state;
    prefill_through(
        &(kvft_plan){.bytes_per_s = (uint64_t)(2 * crossover()), .garbage_at = (int64_t)(block_bytes * 1.2)}, 0);
}

static void small_pieces(void **state) {
    (void)state;
    kvf_llama_report report = {.struct_size = sizeof report};
    const kvft_plan plan = {.bytes_per_s = (uint64_t)(2 * crossover()), .slice_bytes = 9000, .latency_ms = 3};
    for (int tries = 0; tries < TRIES && report.loaded_tokens == 0; tries++) {
        report = prefill_through(&plan, 0);
    }
    assert_true(report.loaded_tokens > 0);
}

/* A server that takes minutes to answer: the front is computed meanwhile, and when that was all, nothing is waited
 * for. */
static void a_lookup_that_hangs(void **state) {
    (void)state;
    kvf_llama_report report = {.struct_size = sizeof report};
    char url[256];
    snprintf(url, sizeof url, "%s?" NEVER, kvft_proxy_unix_url(proxy));
    kvft_proxy_set(proxy, &(kvft_plan){0});
    lab l = lab_open(model, &config, url, getenv("KVF_MODEL"));
    assert_int_equal(l.status, KVF_OK);
    kvft_proxy_set(proxy, &(kvft_plan){.latency_ms = LATE_MS});
    for (int i = 0; i < 2; i++) { /* the second one finds the first one's question still open */
        llama_memory_clear(llama_get_memory(l.ctx), true);
        float *logits = lab_prefill(&l, &report, 0, tokens, NUM);
        assert_true(lab_compare(oracle, logits, lab_vocab(&l)).identical);
        free(logits);
        assert_int_equal(report.computed_tokens, NUM);
        assert_int_equal(report.why, KVF_WHY_BUDGET);
        assert_true(report.waited_us + report.match_us < BUDGET_US / 2);
    }
    kvft_proxy_set(proxy, &(kvft_plan){0});
    kvft_proxy_cut(proxy); /* else the handle would wait for it */
    lab_close(&l);
}

static int token_ms; /* how much longer a token takes that is computed alone, as on a busy machine */

/* Stands in front of libllama's own. */
__attribute__((visibility("default"))) int32_t llama_decode(struct llama_context *ctx, struct llama_batch batch) {
    int32_t (*real)(struct llama_context *, struct llama_batch) = NULL;
    void *symbol = dlsym(RTLD_NEXT, "llama_decode");
    memcpy(&real, &symbol, sizeof real);
    if (token_ms > 0 && batch.n_tokens == 1) {
        kvft_nap_ms(token_ms);
    }
    return real(ctx, batch);
}

/* The attach takes computing for very slow, but no prefill has been measured: a store that hangs gets little of that
 * time. */
static void a_guess_of_the_pace_is_not_believed(void **state) {
    (void)state;
    kvf_llama_report report = {.struct_size = sizeof report};
    char url[256];
    snprintf(url, sizeof url, "%s?" NEVER, kvft_proxy_unix_url(proxy));
    kvft_proxy_set(proxy, &(kvft_plan){0});
    token_ms = 2000;
    lab l = lab_open(model, &config, url, getenv("KVF_MODEL"));
    token_ms = 0;
    assert_int_equal(l.status, KVF_OK);
    kvft_proxy_set(proxy, &(kvft_plan){.latency_ms = LATE_MS});
    free(lab_prefill(&l, &report, 0, tokens, NUM));
    assert_int_equal(report.computed_tokens, NUM);
    assert_true(report.waited_us < 2500000); /* 3 % of the guess would be 5 s */
    kvft_proxy_set(proxy, &(kvft_plan){0});
    kvft_proxy_cut(proxy);
    lab_close(&l);
}

/* It answers when a part of the prompt has been computed, how large a one depends on what else the machine does: the
 * rest is loaded. */
static void a_lookup_that_is_late(void **state) {
    (void)state;
    kvf_llama_report report = {.struct_size = sizeof report};
    char url[256];
    double late_ms = block_us * BLOCKS / 2000;
    snprintf(url, sizeof url, "%s?" NEVER, kvft_proxy_unix_url(proxy));
    for (int tries = 0; tries < TRIES && (report.loaded_tokens == 0 || report.computed_tokens == 1); tries++) {
        lab l = lab_open(model, &config, url, getenv("KVF_MODEL"));
        kvft_proxy_set(proxy, &(kvft_plan){.latency_ms = (uint32_t)late_ms});
        float *logits = lab_prefill(&l, &report, 0, tokens, NUM);
        assert_true(lab_compare(oracle, logits, lab_vocab(&l)).identical);
        assert_int_equal(report.loaded_tokens + report.computed_tokens, NUM);
        free(logits);
        kvft_proxy_set(proxy, &(kvft_plan){0});
        lab_close(&l);
        late_ms *= report.loaded_tokens == 0 ? 0.5 : 2;
    }
    assert_true(report.loaded_tokens > 0 && report.computed_tokens > 1);
    assert_int_equal(report.plan, KVF_LLAMA_PLAN_BOTH);
}

/* The tail flight's memory, handles and connections of all these are given back: tested by the sanitizers, and by
 * another prefill. */
static void and_all_is_well_again(void **state) {
    a_fast_store_is_loaded(state);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_fast_store_is_loaded),
        cmocka_unit_test(landed_between_two_looks),
        cmocka_unit_test(around_the_crossover_both),
        cmocka_unit_test(a_slow_store_is_left_alone),
        cmocka_unit_test(a_stall_in_the_middle),
        cmocka_unit_test(a_cut_in_the_middle),
        cmocka_unit_test(garbage_in_the_stream),
        cmocka_unit_test(small_pieces),
        cmocka_unit_test(a_lookup_that_hangs),
        cmocka_unit_test(a_lookup_that_is_late),
        cmocka_unit_test(a_guess_of_the_pace_is_not_believed),
        cmocka_unit_test(and_all_is_well_again),
        cmocka_unit_test(a_flipped_bit), /* last: its block is removed */
    };
    model = lab_model();
    server = model != NULL ? kvft_server_start(NULL) : NULL;
    if (server == NULL) {
        fprintf(stderr, "no model (KVF_MODEL), or no redis-server: not run\n");
        return 77;
    }
    proxy = kvft_proxy_start(server->socket);
    int failed = cmocka_run_group_tests(tests, set_up, NULL);
    kvft_proxy_stop(proxy);
    kvft_server_stop(server);
    llama_model_free(model);
    free(tokens);
    free(oracle);
    return failed;
}
