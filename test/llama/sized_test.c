/* SPDX-License-Identifier: Apache-2.0
 *
 * The structs of kvferry/llama.h that grow: each call that takes or fills one, with the sizes that older and newer
 * programs have.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kvferry/sized.h"
#include "llama/lab.h"
#include "support/sized.h"

enum { NUM = 200, SEQ = 0 };

typedef struct scene {
    lab lab;
    llama_token *tokens;
} scene;

static kvf_status attach(void *scene_, void *sized, kvf_error *err) {
    scene *s = scene_;
    kvf_llama *kv = NULL;
    kvf_status status = kvf_llama_attach(&kv, err, s->lab.store, s->lab.ctx, sized);
    kvf_llama_detach(kv);
    return status;
}

static kvf_status prefill(void *scene_, void *sized, kvf_error *err) {
    scene *s = scene_;
    return kvf_llama_prefill(s->lab.kv, sized, err, SEQ, s->tokens, NUM);
}

/* Calls that return a number fill a report that is sized, and only such. */
static kvf_status was_filled(const kvf_llama_report *report) {
    return report->struct_size >= KVF_END_OF(kvf_llama_report, num_tokens) && report->num_tokens == NUM ? KVF_OK
                                                                                                        : KVF_LIMIT;
}

static kvf_status load(void *scene_, void *sized, kvf_error *err) {
    (void)err;
    scene *s = scene_;
    size_t loaded = kvf_llama_load(s->lab.kv, sized, SEQ, s->tokens, NUM);
    kvf_status status = was_filled(sized);
    assert_int_equal(loaded, status == KVF_OK ? NUM - 1 : 0);
    return status;
}

static kvf_status save(void *scene_, void *sized, kvf_error *err) {
    (void)err;
    scene *s = scene_;
    assert_int_equal(kvf_llama_prefill(s->lab.kv, NULL, NULL, SEQ, s->tokens, NUM), KVF_OK);
    (void)kvf_llama_save(s->lab.kv, sized, SEQ, s->tokens, NUM);
    return was_filled(sized);
}

static kvf_status prompt_report(void *scene_, void *sized, kvf_error *err) {
    (void)err;
    return kvf_llama_prompt_report(((scene *)scene_)->lab.kv, sized, SEQ);
}

static kvf_status count(void *scene_, void *sized, kvf_error *err) {
    (void)err;
    return kvf_llama_count(((scene *)scene_)->lab.kv, sized);
}

static void check_count(void *scene_, const void *sized) {
    (void)scene_;
    assert_int_equal(((const kvf_llama_counters *)sized)->generated_tokens, 0);
}

static void check_report(void *scene_, const void *sized) {
    (void)scene_;
    const kvf_llama_report *r = sized;
    assert_int_equal(r->num_tokens, NUM);
    assert_true(r->waited_us >= 0 && r->waited_us < 600000000); /* the last field */
}

static void every_call(void **state) {
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
    const kvf_llama_options options = {.scratch_seq = (llama_seq_id)s.lab.params.n_seq_max - 1,
                                       .model_path = MODEL_PATH,
                                       .context_params = &s.lab.params,
                                       .model_params = &s.lab.model_params,
                                       .portable = 1};
    const size_t report = sizeof(kvf_llama_report);
    /* The first sizes are those of 0.3.0. They never change: a program was compiled with them. */
    const kvft_sized table[] = {
        {"kvf_llama_options", 112, sizeof options, "kvf_llama_attach", attach, &options, NULL},
        {"kvf_llama_report", 144, report, "kvf_llama_prefill", prefill, NULL, check_report},
        {"kvf_llama_report", 144, report, "kvf_llama_load", load, NULL, check_report},
        {"kvf_llama_report", 144, report, "kvf_llama_save", save, NULL, check_report},
        {"kvf_llama_report", 144, report, "kvf_llama_prompt_report", prompt_report, NULL, NULL},
        {"kvf_llama_counters", 584, sizeof(kvf_llama_counters), "kvf_llama_count", count, NULL, check_count},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        kvft_sized_check(&table[i], &s);
    }
    kvft_sized_is_complete(table, sizeof table / sizeof *table, "llama.h");
    free(s.tokens);
    lab_close(&s.lab);
    llama_model_free(model);
}

int main(void) {
    llama_log_set(lab_quiet, NULL);
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_call)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
