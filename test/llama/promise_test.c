/* SPDX-License-Identifier: Apache-2.0
 *
 * Models with states, whose blocks are of no use without the state at their end, behind a faulty proxy: whatever the
 * store does, the logits equal a run without one, to the bit, and nothing is waited for that does not promise to come
 * sooner than it could be computed. A toy hybrid and a toy recurrent model, large enough that computing takes a while,
 * and a real sliding window.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>

#include "lab.h"
#include "support/proxy.h"
#include "support/server.h"

#include <cmocka.h>

#define TRIES 60

/* Of a prefill. Servers answer later than that, or never. */
#define BUDGET_US INT64_C(100000000)
#define NEVER     "stall_ms=600000"
#define LATE_MS   1000000

typedef struct kind {
    const char *arch; /* NULL: the real model */
    bool hybrid;
    size_t num_tokens;
} kind;

/* Of 1,190 tokens: a state at 1,024, at the last whole block, and in front of the last token. */
static const kind hybrid = {"jamba", true, 1190}, recurrent = {"mamba", false, 1190}, window = {NULL, false, 340};

static kvft_server *server;
static kvft_proxy *proxy;
static atomic_bool spoiled; /* by the plan of the prefill at hand */
static const lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true, .n_ctx = 2048, .budget_us = BUDGET_US};

/* One of them, what it computes, and how long that takes. */
typedef struct site {
    struct llama_model *model;
    const char *path;
    llama_token *tokens;
    size_t num;
    float *oracle;
    double compute_us, bytes;
} site;

static struct llama_model *toy(const kind *k) {
    struct gguf_context *g = gguf_init_empty();
    const lab_size size = {.layers = 2, .embedding = 512, .feed_forward = 1536, .head = 128};
    uint64_t seed = 1;
    lab_toy_meta(g, k->arch, k->hybrid, &size, NULL);
    lab_vocab_of(g);
    lab_u32(g, k->arch, "vocab_size", 128);
    struct llama_model *model = llama_model_init_from_user(g, lab_random_tensor, &seed, llama_model_default_params());
    gguf_free(g);
    return model;
}

/* A process that knows nothing of the store; `before` prefills let it learn. */
static kvf_llama_report prefill_through(const site *s, const char *url, const kvft_plan *plan, size_t before) {
    kvf_llama_report report = {.struct_size = sizeof report};
    kvft_proxy_set(proxy, &(kvft_plan){0});
    lab l = lab_open(s->model, &config, url, s->path);
    assert_int_equal(l.status, KVF_OK);
    for (size_t i = 0; i <= before; i++) {
        kvft_proxy_set(proxy, plan);
        spoiled = true;
        llama_memory_clear(llama_get_memory(l.ctx), true);
        float *logits = lab_prefill(&l, &report, 0, s->tokens, s->num);
        assert_true(lab_compare(s->oracle, logits, lab_vocab(&l)).identical);
        assert_int_equal(report.loaded_tokens + report.computed_tokens, s->num);
        free(logits);
    }
    kvft_proxy_set(proxy, &(kvft_plan){0});
    kvft_proxy_cut(proxy); /* else the handle would wait for a server that hangs */
    lab_close(&l);
    return report;
}

static bool open_site(site *s, const kind *k) {
    kvf_llama_report report = {.struct_size = sizeof report};
    *s = (site){.path = k->arch != NULL ? MODEL_PATH : getenv("KVF_GEMMA"), .num = k->num_tokens};
    if (s->path == NULL) {
        return false;
    }
    s->model = k->arch != NULL ? toy(k) : llama_model_load_from_file(s->path, llama_model_default_params());
    assert_non_null(s->model);
    s->tokens = lab_prompt(s->num, 3);
    for (size_t i = 0; i < s->num; i++) {
        s->tokens[i] %= llama_vocab_n_tokens(llama_model_get_vocab(s->model));
    }
    lab l = lab_open(s->model, &config, server->unix_url, s->path);
    assert_int_equal(l.status, KVF_OK);
    s->oracle = lab_prefill(&l, &report, 0, s->tokens, s->num);
    s->compute_us = (double)report.compute_us;
    assert_int_equal(report.computed_tokens, s->num);
    assert_int_equal(kvf_store_flush(l.store, NULL, KVF_MS(20000)), KVF_OK);
    lab_close(&l);
    return true;
}

static void close_site(site *s) {
    llama_model_free(s->model);
    free(s->tokens);
    free(s->oracle);
}

/* Unless the machine is so busy that computing is sooner. */
static void is_loaded(site *s) {
    kvf_llama_report report = {.struct_size = sizeof report};
    for (int tries = 0; tries < TRIES && report.computed_tokens != 1; tries++) {
        report = prefill_through(s, kvft_proxy_unix_url(proxy), &(kvft_plan){0}, 0);
    }
    assert_int_equal(report.plan, KVF_LLAMA_PLAN_LOAD);
    assert_int_equal(report.computed_tokens, 1);
    s->bytes = (double)report.loaded_bytes;
}

/* Its budget is not spent, whatever the store waits for. */
static void has_budget_left(const kvf_llama_report *report) {
    assert_true(report->waited_us + report->match_us < BUDGET_US / 2);
}

static void is_not_waited_for(const site *s, const kvf_llama_report *report) {
    assert_int_equal(report->computed_tokens, s->num);
    has_budget_left(report);
}

/* Unless the machine is so busy that even then loading is sooner. */
static void when_it_is_slow(const site *s, double times) {
    const kvft_plan plan = {.bytes_per_s = (uint64_t)(s->bytes / s->compute_us * 1e6 / times)};
    kvf_llama_report report = {.struct_size = sizeof report};
    for (int tries = 0; tries < TRIES && report.computed_tokens != s->num; tries++) {
        report = prefill_through(s, kvft_proxy_unix_url(proxy), &plan, 1);
    }
    is_not_waited_for(s, &report);
    assert_true(report.why == KVF_WHY_SLOW || report.why == KVF_WHY_BUDGET);
}

static void when_it_hangs(const site *s) {
    char url[256];
    snprintf(url, sizeof url, "%s?" NEVER, kvft_proxy_unix_url(proxy));
    kvf_llama_report report = prefill_through(s, url, &(kvft_plan){.latency_ms = LATE_MS}, 0);
    is_not_waited_for(s, &report);
    assert_int_equal(report.why, KVF_WHY_BUDGET);
}

/* Half-way to the answer of what is asked for first, all that follows is quick. */
static void *be_quick_again(void *arg) {
    while (!spoiled) {
        kvft_nap_ms(1);
    }
    kvft_nap_ms((long)(*(const double *)arg / 2));
    kvft_proxy_set(proxy, &(kvft_plan){0});
    return NULL;
}

/* The lookup's answer alone is late (a connection that had to be made): what was computed meanwhile stays, and the rest
 * is loaded behind it. How much that is depends on what else the machine does, so it is looked for. */
static void when_the_lookup_is_late(const site *s) {
    kvf_llama_report report = {.struct_size = sizeof report};
    char url[256];
    double late_ms = s->compute_us / 2000;
    snprintf(url, sizeof url, "%s?" NEVER, kvft_proxy_unix_url(proxy));
    for (int tries = 0; tries < TRIES && (report.loaded_tokens == 0 || report.computed_tokens == 1); tries++) {
        pthread_t thread;
        spoiled = false;
        assert_int_equal(pthread_create(&thread, NULL, be_quick_again, &late_ms), 0);
        report = prefill_through(s, url, &(kvft_plan){.latency_ms = (uint32_t)late_ms}, 0);
        pthread_join(thread, NULL);
        late_ms *= report.loaded_tokens == 0 ? 0.5 : 2;
    }
    assert_true(report.loaded_tokens > 0 && report.computed_tokens > 1);
    assert_int_equal(report.plan, KVF_LLAMA_PLAN_BOTH);
}

/* The lookup is answered, and then, after some bytes, nothing more. */
static void when_it_stalls(const site *s) {
    char url[256];
    snprintf(url, sizeof url, "%s?" NEVER, kvft_proxy_unix_url(proxy));
    for (double part = 0.2; part < 1; part += 0.35) {
        kvf_llama_report report = prefill_through(s, url, &(kvft_plan){.stall_after = (int64_t)(s->bytes * part)}, 1);
        has_budget_left(&report);
    }
}

static void when_bytes_are_lost(const site *s) {
    for (double part = 0.3; part < 1; part += 0.6) {
        int64_t at = (int64_t)(s->bytes * part);
        prefill_through(s, kvft_proxy_unix_url(proxy), &(kvft_plan){.cut_after = at}, 0);
        prefill_through(s, kvft_proxy_unix_url(proxy), &(kvft_plan){.garbage_at = at}, 0);
    }
}

static void run_kind(const kind *k) {
    site s;
    if (!open_site(&s, k)) {
        skip();
    }
    is_loaded(&s);
    when_it_is_slow(&s, 20);
    when_it_hangs(&s);
    if (k ==
        &recurrent) { /* it has no blocks to be looked up, only states: their answers are late too, if it is so slow */
        when_it_is_slow(&s, 500);
    } else {
        when_the_lookup_is_late(&s);
    }
    when_it_stalls(&s);
    when_bytes_are_lost(&s);
    is_loaded(&s); /* and all is well again */
    close_site(&s);
}

static void a_hybrid_model(void **state) {
    (void)state;
    run_kind(&hybrid);
}

static void a_recurrent_model(void **state) {
    (void)state;
    run_kind(&recurrent);
}

static void a_sliding_window(void **state) {
    (void)state;
    run_kind(&window);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_hybrid_model), cmocka_unit_test(a_recurrent_model),
                                       cmocka_unit_test(a_sliding_window)};
    llama_log_set(lab_quiet, NULL);
    server = kvft_server_start(NULL);
    if (server == NULL) {
        fprintf(stderr, "no redis-server: not run\n");
        return 77;
    }
    proxy = kvft_proxy_start(server->socket);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    kvft_proxy_stop(proxy);
    kvft_server_stop(server);
    return failed;
}
