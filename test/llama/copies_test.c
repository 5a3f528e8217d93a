/* SPDX-License-Identifier: Apache-2.0
 *
 * A prompt that another sequence of the context holds is copied. The copy equals the other's KV to the bit. It lies in
 * separate cells, in the order of positions, so what is computed after it equals what is computed after a prompt that
 * was loaded, or computed, in these cells. The difference from a run alone in its context comes from llama.cpp's use of
 * cells: flash attention takes 64 cells at once, wherever a sequence begins among them, and divides all used cells
 * among the threads for a batch of one token. Both are shown and bounded here.
 */
#include <setjmp.h>
#include <stdarg.h>

#include "lab.h"

#include <cmocka.h>

#define VOCAB    128
#define NUM      1500u /* 23 blocks of 64, a tail of 27 tokens, and the last one */
#define WHOLE    1472u
#define SCRATCH  3
#define MAX_NMSE 1e-3

typedef struct world {
    lab l;
    llama_memory_t mem;
    llama_token *tokens, *others; /* NUM, and 1,536 of them */
    float logits[VOCAB], alone[VOCAB];
    uint8_t *rows[NUM]; /* the KV of each position, of a run alone */
    size_t row_bytes;
} world;

static void ask(world *w, llama_seq_id seq, const llama_token *tokens, size_t num) {
    struct llama_batch b = llama_batch_init((int32_t)num, 0, 1);
    for (size_t i = 0; i < num; i++) {
        int32_t k = b.n_tokens++;
        b.token[k] = tokens[i];
        b.pos[k] = (llama_pos)i;
        b.n_seq_id[k] = 1;
        b.seq_id[k][0] = seq;
        b.logits[k] = i + 1 == num;
    }
    assert_int_equal(kvf_llama_decode(w->l.kv, b), 0);
    memcpy(w->logits, llama_get_logits_ith(w->l.ctx, kvf_llama_output(w->l.kv, (int32_t)num - 1)), sizeof w->logits);
    llama_batch_free(b);
}

static uint8_t *row_of(world *w, llama_seq_id seq, llama_pos pos) {
    llama_memory_seq_cp(w->mem, seq, SCRATCH, pos, pos + 1);
    w->row_bytes = llama_state_seq_get_size(w->l.ctx, SCRATCH);
    uint8_t *row = malloc(w->row_bytes);
    assert_int_equal(llama_state_seq_get_data(w->l.ctx, row, w->row_bytes, SCRATCH), w->row_bytes);
    assert_true(llama_memory_seq_rm(w->mem, SCRATCH, -1, -1));
    return row;
}

/* The number of positions in [first, end) whose KV differs from that of the run alone. */
static unsigned other_rows(world *w, llama_seq_id seq, llama_pos first, llama_pos end) {
    unsigned num = 0;
    for (llama_pos p = first; p < end; p++) {
        uint8_t *row = row_of(w, seq, p);
        num += memcmp(row, w->rows[p], w->row_bytes) != 0;
        free(row);
    }
    return num;
}

static uint32_t copied(const world *w, llama_seq_id seq) {
    kvf_llama_report r = {.struct_size = sizeof r};
    kvf_llama_prompt_report(w->l.kv, &r, seq);
    return r.copied_tokens;
}

static world open_world(void) {
    lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true, .n_ctx = 6144, .n_seq = SCRATCH + 1};
    world w = {.tokens = lab_prompt(NUM, 3), .others = lab_prompt(1536, 4)};
    for (size_t i = 0; i < 1536; i++) {
        w.others[i] %= VOCAB;
    }
    for (size_t i = 0; i < NUM; i++) {
        w.tokens[i] %= VOCAB;
    }
    w.l = lab_open(lab_toy("llama", false, 1), &config, NULL, MODEL_PATH);
    assert_int_equal(w.l.status, KVF_OK);
    w.mem = llama_get_memory(w.l.ctx);
    ask(&w, 0, w.tokens, NUM);
    memcpy(w.alone, w.logits, sizeof w.alone);
    for (llama_pos p = 0; p < (llama_pos)NUM; p++) {
        w.rows[p] = row_of(&w, 0, p);
    }
    return w;
}

static void close_world(world *w) {
    struct llama_model *model = (struct llama_model *)(uintptr_t)llama_get_model(w->l.ctx);
    for (size_t p = 0; p < NUM; p++) {
        free(w->rows[p]);
    }
    free(w->tokens);
    free(w->others);
    lab_close(&w->l);
    llama_model_free(model);
}

static void empty(world *w) {
    for (llama_seq_id seq = 0; seq < SCRATCH; seq++) {
        assert_true(llama_memory_seq_rm(w->mem, seq, -1, -1));
    }
}

static void show(const world *w, const char *what, unsigned rows) {
    lab_difference d = lab_compare(w->alone, w->logits, VOCAB);
    double most = 0;
    for (size_t i = 0; i < VOCAB; i++) {
        most = fmax(most, fabs((double)w->alone[i] - (double)w->logits[i]));
    }
    printf("%-36s %4u of %u rows differ; logits: NMSE %.0e, at most %.4f\n", what, rows, NUM - 1, d.nmse, most);
    assert_true(d.nmse < MAX_NMSE);
}

/* The sequence that it is copied from lies in front of it. */
static void test_behind_the_one_it_is_copied_from(void **state) {
    (void)state;
    world w = open_world();
    ask(&w, 1, w.tokens, NUM);
    assert_int_equal(copied(&w, 1), WHOLE);
    assert_int_equal(other_rows(&w, 1, 0, WHOLE), 0);
    assert_int_equal(other_rows(&w, 1, WHOLE, NUM - 1), 0);
    show(&w, "copied, the other in front", 0);
    /* Computed in the same cells it is the same to the bit. */
    float got[VOCAB];
    memcpy(got, w.logits, sizeof got);
    assert_true(llama_memory_seq_rm(w.mem, 1, -1, -1));
    kvf_llama_forget(w.l.kv, 0);
    ask(&w, 1, w.tokens, NUM);
    assert_int_equal(copied(&w, 1), 0);
    assert_true(lab_compare(w.logits, got, VOCAB).nmse < 1e-6); /* its blocks begin between two times 64 cells */
    close_world(&w);
}

/* It lies behind: with cells in common, the tail would lie in front of what it follows. */
static void test_in_front_of_the_one_it_is_copied_from(void **state) {
    (void)state;
    world w = open_world();
    empty(&w);
    ask(&w, 0, w.others, 1536);
    ask(&w, 1, w.tokens, NUM);
    assert_int_equal(other_rows(&w, 1, 0, NUM - 1), 0); /* 64 times 24 cells further on nothing but the last one is */
    assert_true(llama_memory_seq_rm(w.mem, 0, -1, -1));
    ask(&w, 0, w.tokens, NUM);
    assert_int_equal(copied(&w, 0), WHOLE);
    assert_int_equal(other_rows(&w, 0, 0, NUM - 1), 0);
    show(&w, "copied, the other behind", 0);
    close_world(&w);
}

static void test_what_cells_change(void **state) {
    (void)state;
    world w = open_world();
    empty(&w);
    ask(&w, 0, w.others, 1536);
    ask(&w, 1, w.tokens, NUM);
    show(&w, "computed behind 1,536 others", other_rows(&w, 1, 0, NUM - 1));
    empty(&w);
    ask(&w, 0, w.others, 10);
    ask(&w, 1, w.tokens, NUM);
    unsigned rows = other_rows(&w, 1, 0, NUM - 1);
    show(&w, "computed behind 10 others", rows);
    assert_true(rows < NUM / 8);
    close_world(&w);
}

/* Whoever moves the positions of one sequence moves no other's. */
static void test_what_is_copied_does_not_move(void **state) {
    (void)state;
    world w = open_world();
    ask(&w, 1, w.tokens, NUM);
    assert_int_equal(copied(&w, 1), WHOLE);
    assert_true(llama_memory_seq_rm(w.mem, 0, 100, 200));
    llama_memory_seq_add(w.mem, 0, 200, -1, -100);
    kvf_llama_forget(w.l.kv, 0);
    assert_int_equal(llama_memory_seq_pos_max(w.mem, 1), NUM - 1);
    assert_int_equal(other_rows(&w, 1, 0, NUM - 1), 0);
    close_world(&w);
}

/* What was continued in the middle of a block, or generated, is not handed on. */
static void test_only_what_is_cold_is_copied(void **state) {
    (void)state;
    world w = open_world();
    empty(&w);
    ask(&w, 0, w.tokens, 300);
    struct llama_batch one = llama_batch_init(200, 0, 1);
    for (size_t i = 300; i < 500; i++) {
        one.token[0] = w.tokens[i];
        one.pos[0] = (llama_pos)i;
        one.n_seq_id[0] = 1;
        one.seq_id[0][0] = 0;
        one.logits[0] = 1;
        one.n_tokens = 1;
        assert_int_equal(kvf_llama_decode(w.l.kv, one), 0);
    }
    llama_batch_free(one);
    ask(&w, 1, w.tokens, NUM);
    assert_int_equal(copied(&w, 1), 256);
    close_world(&w);
}

int main(void) {
    llama_log_set(lab_quiet, NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_behind_the_one_it_is_copied_from),
        cmocka_unit_test(test_in_front_of_the_one_it_is_copied_from),
        cmocka_unit_test(test_what_cells_change),
        cmocka_unit_test(test_what_is_copied_does_not_move),
        cmocka_unit_test(test_only_what_is_cold_is_copied),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
