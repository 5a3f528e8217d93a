/* SPDX-License-Identifier: Apache-2.0
 *
 * Adapters that change while sequences hold KV: what is known of the sequences is kept, and KV of one set counts for no
 * other. The adapter is a control vector. The oracle is a context without a store that always had the same adapters.
 * With a probe in the space, and without one (`portable`).
 */
#include <setjmp.h>
#include <stdarg.h>

#include "lab.h"

#include <cmocka.h>

#define NUM    300u /* 4 blocks of 64, a tail of 43 tokens, and the last one */
#define WIDTH  256u
#define LAYERS 4u /* a control vector shows in the KV of those behind the second */
#define VOCAB  128u

typedef struct world {
    struct llama_model *model;
    lab l;
    llama_memory_t mem;
    llama_token *tokens; /* 600 */
    struct llama_batch batch;
} world;

/* No world computes any of so many first tokens of a prompt: it stops. */
static uint32_t must_load;

static world open_world(const char *url, uint32_t n_ctx, bool portable) {
    const lab_meta more[] = {{"block_count", LAYERS}, {NULL, 0}};
    world w = {.model = lab_toy_with("llama", false, 1, more),
               .tokens = lab_prompt(600, 3),
               .batch = llama_batch_init(512, 0, 1)};
    lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true, .n_ctx = n_ctx, .n_seq = 5, .portable = portable};
    for (size_t i = 0; i < 600; i++) {
        w.tokens[i] %= (llama_token)VOCAB;
    }
    w.l = lab_open_with(w.model, &config, url, MODEL_PATH, lab_stop_below, &must_load);
    assert_int_equal(w.l.status, KVF_OK);
    w.mem = llama_get_memory(w.l.ctx);
    return w;
}

static void close_world(world *w) {
    llama_batch_free(w->batch);
    free(w->tokens);
    lab_close(&w->l);
    llama_model_free(w->model);
}

/* 0: none. */
static void set_vector(const world *w, int which) {
    static float data[WIDTH * (LAYERS - 1)];
    uint64_t random = (uint64_t)which;
    for (size_t i = 0; i < sizeof data / sizeof *data; i++) {
        data[i] = (float)(kvft_random(&random) % 2001) / 1000.0f - 1.0f;
    }
    assert_int_equal(llama_set_adapter_cvec(w->l.ctx, which > 0 ? data : NULL, sizeof data / sizeof *data, (int)WIDTH,
                                            1, (int)LAYERS - 1),
                     0);
}

static kvf_status change(world *w, int which) {
    char name[20];
    snprintf(name, sizeof name, "vector %d", which);
    set_vector(w, which);
    return kvf_llama_set_adapters(w->l.kv, &w->l.err, which > 0 ? name : NULL);
}

static void expect_change(world *w, int which) {
    if (change(w, which) != KVF_OK) {
        fail_msg("%s", w->l.err.what);
    }
}

static void put(world *w, llama_seq_id seq, size_t from, size_t end) {
    for (size_t i = from; i < end; i++) {
        int32_t k = w->batch.n_tokens++;
        w->batch.token[k] = w->tokens[i];
        w->batch.pos[k] = (llama_pos)i;
        w->batch.n_seq_id[k] = 1;
        w->batch.seq_id[k][0] = seq;
        w->batch.logits[k] = i + 1 == end;
    }
}

static void drop(const world *w, llama_seq_id seq) {
    assert_true(llama_memory_seq_rm(w->mem, seq, -1, -1));
}

static int32_t decode(world *w) {
    int32_t rc = kvf_llama_decode(w->l.kv, w->batch);
    w->batch.n_tokens = 0;
    return rc;
}

static kvf_llama_report ask(world *w, llama_seq_id seq, size_t from, size_t end) {
    kvf_llama_report r = {.struct_size = sizeof r};
    put(w, seq, from, end);
    assert_int_equal(decode(w), 0);
    kvf_llama_prompt_report(w->l.kv, &r, seq);
    return r;
}

/* The same of a prompt that is stored, all but its last token, in an empty sequence. On a busy machine the store's answer
 * may come so late that computing it begins: then it is stopped, and asked again. */
static kvf_llama_report ask_for_stored(world *w, llama_seq_id seq, size_t num) {
    kvf_llama_report r = {.struct_size = sizeof r};
    int32_t rc = 2;
    must_load = (uint32_t)num - 1;
    for (int tries = 0; tries < LAB_PATIENCE && rc == 2; tries++) {
        drop(w, seq);
        put(w, seq, 0, num);
        rc = decode(w);
    }
    must_load = 0;
    assert_int_equal(rc, 0);
    kvf_llama_prompt_report(w->l.kv, &r, seq);
    return r;
}

/* The logits behind the first `num` tokens under each set, computed without a store. */
static const float *logits_under(int which, size_t num) {
    static struct {
        size_t num;
        float logits[3][VOCAB];
    } known[2];
    size_t i = known[0].num == 0 || known[0].num == num ? 0 : 1;
    for (int each = 0; each < 3 && known[i].num != num; each++) {
        world alone = open_world(NULL, 1024, false);
        expect_change(&alone, each);
        float *logits = lab_prefill(&alone.l, NULL, 0, alone.tokens, num);
        memcpy(known[i].logits[each], logits, sizeof known[i].logits[each]);
        free(logits);
        close_world(&alone);
    }
    known[i].num = num;
    return known[i].logits[which];
}

/* In other cells sums round differently. */
static void expect_computed_under(const world *w, int which, size_t num) {
    const float *logits = llama_get_logits_ith(w->l.ctx, -1);
    for (int other = 0; other < 3; other++) {
        double error = lab_compare(logits_under(other, num), logits, VOCAB).nmse;
        if (other == which ? error > 1e-3 : error < 1e-2) {
            fail_msg("as under %d: off by %g from %d", which, error, other);
        }
    }
}

static uint64_t aside(const world *w) {
    kvf_llama_counters c = {.struct_size = sizeof c};
    kvf_llama_count(w->l.kv, &c);
    return c.aside_tokens[KVF_ASIDE_FOREIGN];
}

/* ---- */

static void blocks_of_each_set(bool portable) {
    world w = open_world("mem:", 2048, portable);
    kvf_digest plain, other;
    for (int i = 0; i < 4; i++) { /* none, 1, none, 1: each is computed once, then copied */
        kvf_llama_report r = {.struct_size = sizeof r};
        expect_change(&w, i % 2);
        kvf_space_digest(kvf_llama_space(w.l.kv), i % 2 == 0 ? &plain : &other);
        r = ask(&w, i, 0, NUM);
        assert_int_equal(r.copied_tokens, i < 2 ? 0 : 256);
        assert_true(i >= 2 || r.loaded_tokens == 0); /* the tail of the second may be there already */
        expect_computed_under(&w, i % 2, NUM);
    }
    assert_memory_not_equal(&plain, &other, sizeof plain);
    kvft_flush_all(w.l.store);
    llama_memory_clear(w.mem, true);
    for (int i = 0; i < 3; i++) { /* 0, 1, 2: of the last nothing is stored */
        expect_change(&w, i);
        kvf_llama_report r = i < 2 ? ask_for_stored(&w, i, NUM) : ask(&w, i, 0, NUM);
        assert_int_equal(r.loaded_tokens, i < 2 ? NUM - 1 : 0);
        expect_computed_under(&w, i, NUM);
    }
    close_world(&w);
}

static void test_each_set_has_blocks_of_its_own(void **state) {
    (void)state;
    blocks_of_each_set(false);
    blocks_of_each_set(true);
}

/* One prompt, begun under one set and gone on with under another. */
static void goes_on(bool portable) {
    world w = open_world("mem:", 2048, portable);
    kvf_stats before = {.struct_size = sizeof before}, after = {.struct_size = sizeof after};
    (void)ask(&w, 0, 0, 200);
    kvft_flush_all(w.l.store);
    kvf_store_stats(w.l.store, &before);
    expect_change(&w, 1);
    put(&w, 0, 200, 400);
    assert_int_equal(decode(&w), 0);
    assert_int_equal(aside(&w), 200);
    assert_int_equal(kvf_llama_save(w.l.kv, NULL, 0, w.tokens, 400), 0);
    expect_change(&w, 0);
    put(&w, 0, 400, 410); /* it is known to neither */
    assert_int_equal(decode(&w), 0);
    assert_int_equal(aside(&w), 210);
    kvft_flush_all(w.l.store);
    kvf_store_stats(w.l.store, &after);
    assert_int_equal(after.saved, before.saved);
    /* Cut back to what one of them computed, it is known to that one alone. */
    assert_true(llama_memory_seq_rm(w.mem, 0, 200, -1));
    expect_change(&w, 1);
    assert_int_equal(ask(&w, 1, 0, NUM).copied_tokens, 0);
    expect_computed_under(&w, 1, NUM);
    expect_change(&w, 0);
    assert_int_equal(ask(&w, 2, 0, NUM).copied_tokens, 192);
    expect_computed_under(&w, 0, NUM);
    assert_true(ask(&w, 0, 200, NUM).resident_tokens >= 192);
    expect_computed_under(&w, 0, NUM);
    assert_int_equal(aside(&w), 210);
    close_world(&w);
}

static void test_what_goes_on_under_others_is_left_alone(void **state) {
    (void)state;
    goes_on(false);
    goes_on(true);
}

/* Sequence 1 copies from 0, then 2 has other adapters, then the positions of 0 are moved: those of 1 are not. */
static void test_positions_move_in_one_sequence_alone(void **state) {
    (void)state;
    world w = open_world("mem:", 1024, false), clean = open_world(NULL, 1024, false);
    put(&w, 0, 0, 200);
    put(&w, 1, 0, 190);
    assert_int_equal(decode(&w), 0);
    kvf_llama_report r = {.struct_size = sizeof r};
    kvf_llama_prompt_report(w.l.kv, &r, 1);
    assert_int_equal(r.copied_tokens, 128);
    expect_change(&w, 1);
    (void)ask(&w, 2, 300, 310); /* positions of an empty sequence: left to llama.cpp */
    expect_change(&w, 0);
    kvf_llama_forget(w.l.kv, 0);
    assert_true(llama_memory_seq_rm(w.mem, 0, 10, 30));
    llama_memory_seq_add(w.mem, 0, 30, -1, -20);
    put(&w, 0, 180, 181);
    assert_int_equal(decode(&w), 0);
    assert_int_equal(llama_memory_seq_pos_max(w.mem, 1), 189);
    (void)ask(&w, 1, 190, 191);
    const float *moved = llama_get_logits_ith(w.l.ctx, -1);
    (void)ask(&clean, 1, 0, 190);
    (void)ask(&clean, 1, 190, 191);
    assert_true(lab_compare(llama_get_logits_ith(clean.l.ctx, -1), moved, VOCAB).nmse < 1e-3);
    close_world(&w);
    close_world(&clean);
}

/* The same over another attach. */
static void test_positions_move_in_one_alone_after_an_attach(void **state) {
    (void)state;
    world w = open_world("mem:", 1024, false), clean = open_world(NULL, 1024, false);
    put(&w, 0, 0, 200);
    put(&w, 1, 0, 190);
    assert_int_equal(decode(&w), 0);
    kvf_llama_options options = {.struct_size = sizeof options,
                                 .scratch_seq = 4,
                                 .model_path = MODEL_PATH,
                                 .context_params = &w.l.params,
                                 .model_params = &w.l.model_params,
                                 .block_tokens = 64};
    kvf_llama_detach(w.l.kv);
    assert_int_equal(kvf_llama_attach(&w.l.kv, &w.l.err, w.l.store, w.l.ctx, &options), KVF_OK);
    kvf_llama_forget(w.l.kv, 0);
    assert_true(llama_memory_seq_rm(w.mem, 0, 10, 30));
    llama_memory_seq_add(w.mem, 0, 30, -1, -20);
    put(&w, 0, 180, 181);
    assert_int_equal(decode(&w), 0);
    put(&w, 1, 190, 191);
    assert_int_equal(decode(&w), 0);
    const float *moved = llama_get_logits_ith(w.l.ctx, -1);
    (void)ask(&clean, 1, 0, 190);
    (void)ask(&clean, 1, 190, 191);
    assert_true(lab_compare(llama_get_logits_ith(clean.l.ctx, -1), moved, VOCAB).nmse < 1e-3);
    close_world(&w);
    close_world(&clean);
}

static void test_a_prefill_keeps_nothing_of_another_set(void **state) {
    (void)state;
    world w = open_world("mem:", 1024, true);
    kvf_llama_report r = {.struct_size = sizeof r};
    free(lab_prefill(&w.l, &r, 0, w.tokens, NUM));
    expect_change(&w, 1);
    free(lab_prefill(&w.l, &r, 0, w.tokens, NUM));
    assert_int_equal(r.resident_tokens + r.loaded_tokens, 0);
    expect_computed_under(&w, 1, NUM);
    free(lab_prefill(&w.l, &r, 0, w.tokens, NUM));
    assert_int_equal(r.resident_tokens, 256);
    close_world(&w);
}

static void compute_alone(world *w, size_t from, size_t end) {
    put(w, 0, from, end);
    assert_int_equal(llama_decode(w->l.ctx, w->batch), 0);
    w->batch.n_tokens = 0;
}

/* A decode loop of the program's own: what it computed under another set is not saved as that of this one. */
static void test_a_loop_saves_nothing_of_another_set(void **state) {
    (void)state;
    for (int portable = 0; portable < 2; portable++) {
        world w = open_world("mem:", 1024, portable != 0);
        assert_int_equal(kvf_llama_load(w.l.kv, NULL, 0, w.tokens, NUM), 0);
        compute_alone(&w, 0, 128);
        expect_change(&w, 1);
        assert_int_equal(kvf_llama_save(w.l.kv, NULL, 0, w.tokens, 128), 0);
        expect_change(&w, 0);
        assert_int_equal(kvf_llama_save(w.l.kv, NULL, 0, w.tokens, 128), 2);
        expect_change(&w, 1);
        compute_alone(&w, 128, 256); /* behind what is of the other */
        expect_change(&w, 0);
        assert_int_equal(kvf_llama_save(w.l.kv, NULL, 0, w.tokens, 256), 0);
        assert_int_equal(kvf_llama_load(w.l.kv, NULL, 0, w.tokens + 300, 200), 0);
        drop(&w, 0);
        compute_alone(&w, 0, 256);
        assert_int_equal(kvf_llama_save(w.l.kv, NULL, 0, w.tokens, 256), 2); /* the two others are stored */
        close_world(&w);
    }
}

/* More sets than are remembered. */
static void test_any_number_of_sets(void **state) {
    (void)state;
    world w = open_world("mem:", 1024, false);
    (void)ask(&w, 0, 0, NUM);
    kvft_flush_all(w.l.store);
    drop(&w, 0);
    for (int i = 1; i <= 36; i++) {
        expect_change(&w, i);
        (void)ask(&w, 1, 0, 100);
        drop(&w, 1);
    }
    expect_change(&w, 0);
    assert_int_equal(ask_for_stored(&w, 0, NUM).loaded_tokens, NUM - 1);
    expect_computed_under(&w, 0, NUM);
    kvft_flush_all(w.l.store);
    expect_change(&w, 1);
    assert_int_equal(ask_for_stored(&w, 1, 100).loaded_tokens, 99);
    expect_computed_under(&w, 1, 100);
    close_world(&w);
}

/* A set that can't be probed now is known later; meanwhile all is decoded as it stands. */
static void test_a_full_context_waits_for_its_probe(void **state) {
    (void)state;
    world w = open_world("mem:", 512, false);
    (void)ask(&w, 0, 0, 510);
    assert_int_equal(change(&w, 1), KVF_OK); /* two cells are just enough */
    expect_change(&w, 0);
    put(&w, 0, 510, 511);
    assert_int_equal(decode(&w), 0);
    assert_int_equal(change(&w, 2), KVF_LIMIT);
    assert_null(kvf_llama_space(w.l.kv));
    put(&w, 0, 511, 512);
    assert_int_equal(decode(&w), 0);
    assert_int_equal(aside(&w), 1);
    expect_change(&w, 1); /* one that is remembered needs none */
    drop(&w, 0);
    expect_change(&w, 2);
    assert_int_equal(ask(&w, 0, 0, NUM).loaded_tokens, 0);
    expect_computed_under(&w, 2, NUM);
    close_world(&w);
}

int main(void) {
    llama_log_set(lab_quiet, NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_set_has_blocks_of_its_own),
        cmocka_unit_test(test_what_goes_on_under_others_is_left_alone),
        cmocka_unit_test(test_positions_move_in_one_sequence_alone),
        cmocka_unit_test(test_positions_move_in_one_alone_after_an_attach),
        cmocka_unit_test(test_a_prefill_keeps_nothing_of_another_set),
        cmocka_unit_test(test_a_loop_saves_nothing_of_another_set),
        cmocka_unit_test(test_any_number_of_sets),
        cmocka_unit_test(test_a_full_context_waits_for_its_probe),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
