/* SPDX-License-Identifier: Apache-2.0
 *
 * Wrong arguments: every call of kvferry/llama.h answers each of them as its header says, none crashes, and what the
 * context holds stays as it was.
 */
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "llama/lab.h"

enum { NUM = 200, SEQ = 0, NUM_SEQS = 3, SCRATCH = NUM_SEQS - 1, N_CTX = 512 };
#define SECRET "a secret of a tenant"

typedef struct bench {
    struct llama_model *model;
    lab lab;
    llama_token *tokens;
    kvf_error err;
} bench;

static void open_bench(bench *b) {
    const lab_config config = {
        .kv_type = GGML_TYPE_F16, .flash = true, .portable = true, .n_ctx = N_CTX, .n_seq = NUM_SEQS};
    *b = (bench){.model = lab_toy("llama", false, 1), .tokens = lab_prompt(NUM, 1)};
    b->lab = lab_open(b->model, &config, "mem:", MODEL_PATH);
    assert_int_equal(b->lab.status, KVF_OK);
    for (size_t i = 0; i < NUM; i++) {
        b->tokens[i] %= (llama_token)lab_vocab(&b->lab);
    }
    free(lab_prefill(&b->lab, NULL, SEQ, b->tokens, NUM));
    kvft_flush_all(b->lab.store);
}

static void close_bench(bench *b) {
    lab_close(&b->lab);
    llama_model_free(b->model);
    free(b->tokens);
}

/* ---- kvf_llama_attach: options that one row each spoils ---- */

static void no_size(kvf_llama_options *o) {
    o->struct_size = 0;
}
static void small_size(kvf_llama_options *o) {
    o->struct_size = 111;
}
static void poll_budget(kvf_llama_options *o) {
    o->budget_us = KVF_POLL;
}
static void negative_budget(kvf_llama_options *o) {
    o->budget_us = INT64_MIN;
}
static void endless_budget(kvf_llama_options *o) {
    o->budget_us = KVF_MAX_BUDGET_US + 1;
}
static void no_context_params(kvf_llama_options *o) {
    o->context_params = NULL;
}
static void no_model_path(kvf_llama_options *o) {
    o->model_path = NULL;
}
static void no_model_params(kvf_llama_options *o) {
    o->model_params = NULL;
}
static void missing_model_file(kvf_llama_options *o) {
    o->model_path = "/nonexistent/model.gguf";
}
static void scratch_below(kvf_llama_options *o) {
    o->scratch_seq = -1;
}
static void scratch_behind(kvf_llama_options *o) {
    o->scratch_seq = NUM_SEQS;
}
static void scratch_in_use(kvf_llama_options *o) {
    o->scratch_seq = SEQ;
}
static void odd_block_tokens(kvf_llama_options *o) {
    o->block_tokens = 65;
}
static void small_blocks(kvf_llama_options *o) {
    o->block_tokens = 32;
}
static void large_blocks(kvf_llama_options *o) {
    o->block_tokens = UINT32_C(1) << 31;
}
static void short_secret(kvf_llama_options *o) {
    o->secret = "short";
    o->secret_len = 5;
}
static void endless_secret(kvf_llama_options *o) {
    o->secret = SECRET;
    o->secret_len = SIZE_MAX;
}
static void previous_secret_alone(kvf_llama_options *o) {
    o->previous_secret = SECRET;
    o->previous_secret_len = strlen(SECRET);
}
static const struct {
    const char *name;
    void (*spoil)(kvf_llama_options *);
    kvf_status status;
} attach_rows[] = {
    {"struct_size 0", no_size, KVF_LIMIT},
    {"a smaller struct_size than the first", small_size, KVF_LIMIT},
    {"KVF_POLL", poll_budget, KVF_LIMIT},
    {"a negative budget", negative_budget, KVF_LIMIT},
    {"a budget above 24 hours", endless_budget, KVF_LIMIT},
    {"no context_params", no_context_params, KVF_LIMIT},
    {"no model_path", no_model_path, KVF_LIMIT},
    {"no model_params", no_model_params, KVF_LIMIT},
    {"no such model file", missing_model_file, KVF_CONFIG},
    {"scratch_seq -1", scratch_below, KVF_LIMIT},
    {"scratch_seq behind the last", scratch_behind, KVF_LIMIT},
    {"scratch_seq in use", scratch_in_use, KVF_REFUSED},
    {"block_tokens 65", odd_block_tokens, KVF_LIMIT},
    {"block_tokens 32", small_blocks, KVF_LIMIT},
    {"block_tokens 2^31", large_blocks, KVF_LIMIT},
    {"a short secret", short_secret, KVF_LIMIT},
    {"a secret without end", endless_secret, KVF_LIMIT},
    {"a previous secret alone", previous_secret_alone, KVF_LIMIT},
};

static kvf_status attach(bench *b, const kvf_llama_options *options, kvf_error *err) {
    kvf_llama *kv = NULL;
    kvf_status status = kvf_llama_attach(&kv, err, b->lab.store, b->lab.ctx, options);
    assert_true((kv != NULL) == (status == KVF_OK));
    kvf_llama_detach(kv);
    return status;
}

static void test_options(void **state) {
    (void)state;
    bench b;
    open_bench(&b);
    const kvf_llama_options good = {.struct_size = sizeof good,
                                    .scratch_seq = SCRATCH,
                                    .model_path = MODEL_PATH,
                                    .context_params = &b.lab.params,
                                    .model_params = &b.lab.model_params,
                                    .portable = 1};
    assert_int_equal(attach(&b, &good, &b.err), KVF_OK);
    assert_int_equal(attach(&b, NULL, &b.err), KVF_LIMIT);
    for (size_t i = 0; i < sizeof attach_rows / sizeof *attach_rows; i++) {
        kvf_llama_options options = good;
        attach_rows[i].spoil(&options);
        b.err = (kvf_error){.status = KVF_OK};
        kvf_status status = attach(&b, &options, &b.err);
        if (status != attach_rows[i].status || b.err.status != status || strlen(b.err.what) < 10 ||
            attach(&b, &options, NULL) != status) {
            fail_msg("%s: %s (%s)", attach_rows[i].name, kvf_status_name(status), b.err.what);
        }
    }
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(b.lab.ctx), SEQ), NUM - 1);
    close_bench(&b);
}

/* ---- prompts ---- */

static const struct {
    const char *name;
    llama_seq_id seq;
    size_t num;
    bool no_tokens;
    int64_t
        token; /* in the middle; -1 is as good as any other wrong one, NUM leaves it as it is: the vocabulary is smaller */
} prompt_rows[] = {
    {"sequence -1", -1, NUM, false, NUM},
    {"the scratch sequence", SCRATCH, NUM, false, NUM},
    {"a sequence behind the last", NUM_SEQS, NUM, false, NUM},
    {"a sequence far away", INT32_MAX, NUM, false, NUM},
    {"no tokens", SEQ, 0, false, NUM},
    {"no tokens, and NULL", SEQ, 0, true, NUM},
    {"tokens NULL with a count", SEQ, NUM, true, NUM},
    {"more tokens than the context holds", SEQ, N_CTX + 1, false, NUM},
    {"a count without bounds", SEQ, SIZE_MAX, false, NUM},
    {"a negative token", SEQ, NUM, false, -1},
    {"a token behind the vocabulary", SEQ, NUM, false, INT32_MAX},
};

/* Before and after each row the sequence is as the prefill left it. */
static void test_prompts(void **state) {
    (void)state;
    bench b;
    open_bench(&b);
    llama_memory_t mem = llama_get_memory(b.lab.ctx);
    for (size_t i = 0; i < sizeof prompt_rows / sizeof *prompt_rows; i++) {
        llama_token right = b.tokens[NUM / 2];
        const llama_token *tokens = prompt_rows[i].no_tokens ? NULL : b.tokens;
        const char *name = prompt_rows[i].name;
        llama_seq_id seq = prompt_rows[i].seq;
        size_t num = prompt_rows[i].num;
        kvf_llama_report report = {.struct_size = sizeof report, .num_tokens = 9};
        b.tokens[NUM / 2] = prompt_rows[i].token != NUM ? (llama_token)prompt_rows[i].token : right;
        b.err = (kvf_error){.status = KVF_OK};
        kvf_status status = kvf_llama_prefill(b.lab.kv, &report, &b.err, seq, tokens, num);
        if (status != KVF_LIMIT || b.err.status != KVF_LIMIT || report.num_tokens != 0 ||
            report.struct_size != sizeof report) {
            fail_msg("kvf_llama_prefill: %s: %s", name, kvf_status_name(status));
        }
        if (kvf_llama_prefill(b.lab.kv, NULL, NULL, seq, tokens, num) != KVF_LIMIT) {
            fail_msg("kvf_llama_prefill without report and err: %s", name);
        }
        report.num_tokens = 9;
        if (kvf_llama_save(b.lab.kv, &report, seq, tokens, num) != 0 || report.num_tokens != 0 ||
            kvf_llama_save(b.lab.kv, NULL, seq, tokens, num) != 0) {
            fail_msg("kvf_llama_save: %s", name);
        }
        report.num_tokens = 9;
        if (kvf_llama_load(b.lab.kv, &report, seq, tokens, num) != 0 || report.num_tokens != 0 ||
            kvf_llama_load(b.lab.kv, NULL, seq, tokens, num) != 0) {
            fail_msg("kvf_llama_load: %s", name);
        }
        b.tokens[NUM / 2] = right;
        assert_int_equal(llama_memory_seq_pos_max(mem, SEQ), NUM - 1);
    }
    close_bench(&b);
}

static void test_structs_without_their_size(void **state) {
    (void)state;
    bench b;
    open_bench(&b);
    kvf_llama_report report = {.struct_size = 0};
    kvf_llama_counters counters = {.struct_size = 4};
    assert_int_equal(kvf_llama_prefill(b.lab.kv, &report, NULL, SEQ, b.tokens, NUM), KVF_LIMIT);
    assert_int_equal(kvf_llama_load(b.lab.kv, &report, SEQ, b.tokens, NUM), 0);
    assert_int_equal(kvf_llama_save(b.lab.kv, &report, SEQ, b.tokens, NUM), 0);
    assert_int_equal(kvf_llama_prompt_report(b.lab.kv, &report, SEQ), KVF_LIMIT);
    assert_int_equal(kvf_llama_count(b.lab.kv, &counters), KVF_LIMIT);
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(b.lab.ctx), SEQ), NUM - 1);
    close_bench(&b);
}

/* ---- batches ---- */

static void test_batches(void **state) {
    (void)state;
    enum { TOKENS = 100 };
    bench b;
    open_bench(&b);
    llama_memory_t mem = llama_get_memory(b.lab.ctx);
    struct llama_batch batch = llama_batch_init(TOKENS, 0, 1);
    static const struct {
        llama_seq_id seq;
        llama_token token;
        llama_pos pos; /* of the first token */
        int32_t num;
    } rows[] = {
        {NUM_SEQS + 1, 1, 0, TOKENS}, {-1, 1, 0, TOKENS}, {SEQ, -1, NUM, TOKENS}, {SEQ, INT32_MAX, NUM, TOKENS},
        {1, INT32_MAX, 0, TOKENS},    {SEQ, 1, NUM, 0},   {SEQ, 1, NUM, -1},      {SEQ, 1, -5, TOKENS},
        {SEQ, 1, NUM - 5, TOKENS},
    };
    for (size_t row = 0; row < sizeof rows / sizeof *rows; row++) {
        batch.n_tokens = rows[row].num;
        for (int32_t i = 0; i < TOKENS; i++) {
            batch.token[i] = i == TOKENS / 2 ? rows[row].token : b.tokens[i];
            batch.pos[i] = rows[row].pos + i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = rows[row].seq;
            batch.logits[i] = i == TOKENS - 1;
        }
        int32_t rc = kvf_llama_decode(b.lab.kv, batch);
        if (rc != -1) {
            fail_msg("batch %zu: %d", row, rc);
        }
        assert_int_equal(llama_memory_seq_pos_max(mem, SEQ), NUM - 1);
        assert_int_equal(llama_memory_seq_pos_max(mem, 1), -1);
    }
    batch.n_tokens = 1;
    batch.pos[0] = NUM;
    batch.logits[0] = 1;
    batch.seq_id[0][0] = SEQ;
    batch.token[0] = 1;
    assert_int_equal(kvf_llama_decode(b.lab.kv, batch), 0);
    assert_int_equal(kvf_llama_output(b.lab.kv, INT32_MIN), INT32_MIN);
    (void)kvf_llama_output(b.lab.kv, INT32_MAX);
    llama_batch_free(batch);
    close_bench(&b);
}

/* ---- everything else ---- */

static void test_the_rest(void **state) {
    (void)state;
    static const llama_seq_id wrong[] = {-1, INT32_MIN, SCRATCH, NUM_SEQS, INT32_MAX};
    bench b;
    open_bench(&b);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        kvf_llama_report report = {.struct_size = sizeof report, .num_tokens = 9};
        kvf_llama_forget(b.lab.kv, wrong[i]);
        assert_int_equal(kvf_llama_prompt_report(b.lab.kv, &report, wrong[i]), KVF_OK);
        assert_int_equal(report.num_tokens, 0);
    }
    assert_int_equal(kvf_llama_cut(b.lab.kv, 0), 0);
    assert_int_equal(kvf_llama_cut(b.lab.kv, SIZE_MAX), SIZE_MAX - 63);
    assert_string_equal(kvf_llama_plan_name((kvf_llama_plan)-1), "unknown");
    assert_string_equal(kvf_llama_aside_name((kvf_llama_aside)KVF_NUM_ASIDES), "unknown");
    kvf_llama_detach(NULL);
    /* Any text describes adapters: it is hashed. */
    assert_int_equal(kvf_llama_set_adapters(b.lab.kv, NULL, "a\nb\xff"), KVF_OK);
    assert_int_equal(kvf_llama_set_adapters(b.lab.kv, NULL, NULL), KVF_OK); /* none, as at the attach */
    assert_non_null(kvf_llama_space(b.lab.kv));
    kvf_llama_report report = {.struct_size = sizeof report};
    assert_int_equal(kvf_llama_prefill(b.lab.kv, &report, NULL, SEQ, b.tokens, NUM), KVF_OK); /* all goes on */
    assert_int_equal(report.num_tokens, NUM);
    close_bench(&b);
}

int main(void) {
    llama_log_set(lab_quiet, NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_prompts),
        cmocka_unit_test(test_structs_without_their_size),
        cmocka_unit_test(test_batches),
        cmocka_unit_test(test_the_rest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
