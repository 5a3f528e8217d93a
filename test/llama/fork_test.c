/* SPDX-License-Identifier: Apache-2.0
 *
 * A forked child: every call of kvferry/llama.h on a handle of its parent answers at once, though llama.cpp's threads
 * and those of the store do not exist in the child.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "llama/lab.h"
#include "support/child.h"

enum { NUM = 200, SEQ = 0, FORKS = 5 };

typedef struct scene {
    lab lab;
    llama_token *tokens;
    struct llama_batch batch; /* continues the sequence */
} scene;

static kvf_llama *handle(void *scene_) {
    return ((scene *)scene_)->lab.kv;
}

/* ---- what only reads works ---- */

static bool plan_name(void *s) {
    (void)s;
    return strcmp(kvf_llama_plan_name(KVF_LLAMA_PLAN_LOAD), "load") == 0;
}
static bool aside_name(void *s) {
    (void)s;
    return strcmp(kvf_llama_aside_name(KVF_ASIDE_MOVED), "moved") == 0;
}
static bool cut(void *s) {
    return kvf_llama_cut(handle(s), NUM) == 192;
}
static bool output(void *s) {
    return kvf_llama_output(handle(s), -1) == -1;
}
static bool space(void *s) {
    return kvf_space_block_tokens(kvf_llama_space(handle(s))) == 64;
}

/* ---- what gives back does nothing ---- */

static bool detach(void *s) {
    kvf_llama_detach(handle(s));
    return true;
}
static bool forget(void *s) {
    kvf_llama_forget(handle(s), SEQ);
    return true;
}

/* ---- all else is closed ---- */

static bool attach(void *scene_) {
    scene *s = scene_;
    const kvf_llama_options options = {.struct_size = sizeof options,
                                       .scratch_seq = (llama_seq_id)s->lab.params.n_seq_max - 1,
                                       .model_path = MODEL_PATH,
                                       .context_params = &s->lab.params,
                                       .model_params = &s->lab.model_params};
    kvf_llama *kv = NULL;
    kvf_error err = {.status = KVF_OK};
    return kvf_llama_attach(&kv, &err, s->lab.store, s->lab.ctx, &options) == KVF_CLOSED && kv == NULL &&
           err.status == KVF_CLOSED;
}
static bool set_adapters(void *s) {
    return kvf_llama_set_adapters(handle(s), NULL, "") == KVF_CLOSED &&
           kvf_llama_set_adapters(handle(s), NULL, "others") == KVF_CLOSED;
}
static bool is_empty(const kvf_llama_report *report) {
    return report->num_tokens == 0 && report->resident_tokens == 0 && report->computed_tokens == 0;
}
static bool prefill(void *scene_) {
    scene *s = scene_;
    kvf_llama_report report = {.struct_size = sizeof report, .num_tokens = 9};
    kvf_error err = {.status = KVF_OK};
    return kvf_llama_prefill(s->lab.kv, &report, &err, SEQ, s->tokens, NUM) == KVF_CLOSED && err.status == KVF_CLOSED &&
           is_empty(&report);
}
static bool load(void *scene_) {
    scene *s = scene_;
    kvf_llama_report report = {.struct_size = sizeof report, .num_tokens = 9};
    return kvf_llama_load(s->lab.kv, &report, SEQ, s->tokens, NUM) == 0 && is_empty(&report);
}
static bool save(void *scene_) {
    scene *s = scene_;
    kvf_llama_report report = {.struct_size = sizeof report, .num_tokens = 9};
    return kvf_llama_save(s->lab.kv, &report, SEQ, s->tokens, NUM) == 0 && is_empty(&report);
}
static bool decode(void *scene_) {
    scene *s = scene_;
    return kvf_llama_decode(s->lab.kv, s->batch) == -2;
}
static bool prompt_report(void *s) {
    kvf_llama_report report = {.struct_size = sizeof report};
    return kvf_llama_prompt_report(handle(s), &report, SEQ) == KVF_CLOSED;
}
static bool count(void *s) {
    kvf_llama_counters counters = {.struct_size = sizeof counters};
    return kvf_llama_count(handle(s), &counters) == KVF_CLOSED;
}

static const kvft_child_row rows[] = {
    {"kvf_llama_plan_name", plan_name},
    {"kvf_llama_aside_name", aside_name},
    {"kvf_llama_cut", cut},
    {"kvf_llama_output", output},
    {"kvf_llama_space", space},
    {"kvf_llama_detach", detach},
    {"kvf_llama_forget", forget},
    {"kvf_llama_attach", attach},
    {"kvf_llama_set_adapters", set_adapters},
    {"kvf_llama_prefill", prefill},
    {"kvf_llama_load", load},
    {"kvf_llama_save", save},
    {"kvf_llama_decode", decode},
    {"kvf_llama_prompt_report", prompt_report},
    {"kvf_llama_count", count},
};
static const size_t num_rows = sizeof rows / sizeof *rows;

static void test_every_call_has_a_row(void **state) {
    (void)state;
    kvft_child_covers(KVFT_LIBRARY, rows, num_rows);
}

/* After a prompt that was stored, a load of it, and a batch, so that there are threads of llama.cpp and of the
 * store. */
static void test_every_call_in_a_child(void **state) {
    (void)state;
    struct llama_model *model = lab_toy("llama", false, 1);
    const lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true, .portable = true};
    scene s = {.lab = lab_open(model, &config, "mem:", MODEL_PATH), .tokens = lab_prompt(NUM, 1)};
    assert_int_equal(s.lab.status, KVF_OK);
    for (size_t i = 0; i < NUM; i++) {
        s.tokens[i] %= (llama_token)lab_vocab(&s.lab);
    }
    free(lab_prefill(&s.lab, NULL, SEQ, s.tokens, NUM));
    kvft_flush_all(s.lab.store);
    assert_int_equal(kvf_llama_load(s.lab.kv, NULL, SEQ, s.tokens, NUM), NUM - 1);
    s.batch = llama_batch_get_one(&s.tokens[NUM - 1], 1);
    for (int i = 0; i < FORKS; i++) {
        kvft_child_calls(rows, num_rows, &s);
    }
    assert_int_equal(kvf_llama_decode(s.lab.kv, s.batch), 0); /* the parent goes on */
    free(s.tokens);
    lab_close(&s.lab);
    llama_model_free(model);
}

int main(void) {
    llama_log_set(lab_quiet, NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_call_has_a_row),
        cmocka_unit_test(test_every_call_in_a_child),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
