/* SPDX-License-Identifier: Apache-2.0
 *
 * kvf_llama_decode instead of llama_decode: several sequences in a batch, pieces that end anywhere, indexes of outputs,
 * a full cache, and batches that it must not follow. The oracle is a run with the same cuts and no store.
 */
#include <setjmp.h>
#include <stdarg.h>

#include "lab.h"

#include <cmocka.h>

#define NUM 300u /* 4 blocks of 64, a tail of 43 tokens, and the last one */

typedef struct world {
    struct llama_model *model;
    lab l;
    llama_token *tokens; /* 600 */
    struct llama_batch batch;
} world;

/* No world computes any of so many first tokens of a prompt: it stops. */
static uint32_t must_load;

static world open_world_of(struct llama_model *model, const char *url, uint32_t n_ctx) {
    world w = {.model = model, .tokens = lab_prompt(600, 3), .batch = llama_batch_init(512, 0, 1)};
    lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true, .n_ctx = n_ctx};
    for (size_t i = 0; i < 600; i++) {
        w.tokens[i] %= 128;
    }
    w.l = lab_open_with(w.model, &config, url, MODEL_PATH, lab_stop_below, &must_load);
    assert_int_equal(w.l.status, KVF_OK);
    return w;
}

static world open_world(const char *url, uint32_t n_ctx) {
    return open_world_of(lab_toy("llama", false, 1), url, n_ctx);
}

static void close_world(world *w) {
    llama_batch_free(w->batch);
    free(w->tokens);
    lab_close(&w->l);
    llama_model_free(w->model);
}

static void put(world *w, llama_token token, llama_pos pos, llama_seq_id seq, bool output) {
    int32_t i = w->batch.n_tokens++;
    w->batch.token[i] = token;
    w->batch.pos[i] = pos;
    w->batch.n_seq_id[i] = 1;
    w->batch.seq_id[i][0] = seq;
    w->batch.logits[i] = output;
}

static void put_range(world *w, llama_seq_id seq, size_t from, size_t end, bool output) {
    for (size_t i = from; i < end; i++) {
        put(w, w->tokens[i], (llama_pos)i, seq, output && i + 1 == end);
    }
}

static int32_t decode(world *w) {
    int32_t rc = kvf_llama_decode(w->l.kv, w->batch);
    w->batch.n_tokens = 0;
    return rc;
}

/* The tokens before `stored` are in the store. On a busy machine its answer may come so late that computing them begins.
 * False: so it was stopped. */
static bool decode_loading(world *w, size_t stored) {
    must_load = (uint32_t)stored;
    int32_t rc = decode(w);
    must_load = 0;
    assert_true(rc == 0 || rc == 2);
    return rc == 0;
}

/* False: it is to be tried again, in worlds of its own. */
typedef bool attempt(size_t row);

static void try_until_loaded(attempt *try, size_t row) {
    for (int tries = 0; !try(row); tries++) {
        assert_true(tries < LAB_PATIENCE);
    }
}

static float *logits_of(world *w, int32_t i) {
    size_t bytes = 128 * sizeof(float);
    float *copy = malloc(bytes);
    const float *at = llama_get_logits_ith(w->l.ctx, kvf_llama_output(w->l.kv, i));
    assert_non_null(at);
    memcpy(copy, at, bytes);
    return copy;
}

static bool same(float *a, float *b) {
    bool equal = memcmp(a, b, 128 * sizeof(float)) == 0;
    free(a);
    free(b);
    return equal;
}

/* How far these logits are from those of a prefill of the same tokens without a store. */
static double error_of(world *alone, llama_seq_id seq, size_t num, const float *logits) {
    float *expected = lab_prefill(&alone->l, NULL, seq, alone->tokens, num);
    double nmse = lab_compare(expected, logits, 128).nmse;
    free(expected);
    return nmse;
}

static kvf_llama_counters counters(const world *w) {
    kvf_llama_counters c = {.struct_size = sizeof c};
    kvf_llama_count(w->l.kv, &c);
    return c;
}

/* The logits behind the prompt in pieces of `piece` tokens, and its report. Of each piece the whole `unit`s of the prompt
 * before its end are stored, up to `stored` tokens. NULL: stopped, see decode_loading. */
static float *in_pieces_loading(world *w, llama_seq_id seq, size_t piece, kvf_llama_report *report, size_t stored,
                                size_t unit) {
    for (size_t at = 0; at < NUM; at += piece) {
        size_t end = at + piece < NUM ? at + piece : NUM, whole = end / unit * unit;
        put_range(w, seq, at, end, end == NUM);
        if (!decode_loading(w, end == NUM || whole > stored ? stored : whole)) {
            return NULL;
        }
    }
    kvf_llama_prompt_report(w->l.kv, report, seq);
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(w->l.ctx), seq), NUM - 1);
    return logits_of(w, (int32_t)((NUM - 1) % piece));
}

static float *in_pieces(world *w, llama_seq_id seq, size_t piece, kvf_llama_report *report) {
    return in_pieces_loading(w, seq, piece, report, 0, 1);
}

static const size_t pieces[] = {300, 299, 256, 128, 100, 65, 64};

static bool try_pieces(size_t row) {
    world plain = open_world(NULL, 1024), w = open_world("mem:", 1024);
    kvf_llama_report r = {.struct_size = sizeof r};
    float *expected = lab_prefill(&plain.l, &r, 0, plain.tokens, NUM);
    float *cold = in_pieces(&w, 0, pieces[row], &r);
    assert_int_equal(r.num_tokens, NUM);
    assert_int_equal(r.computed_tokens, NUM);
    assert_memory_equal(cold, expected, 128 * sizeof(float));
    kvft_flush_all(w.l.store);
    size_t stored = pieces[row] >= NUM ? NUM - 1 : 4 * 64;
    llama_memory_clear(llama_get_memory(w.l.ctx), true);
    float *warm = in_pieces_loading(&w, 0, pieces[row], &r, stored, 64);
    bool loaded = warm != NULL;
    if (loaded) {
        assert_memory_equal(warm, expected, 128 * sizeof(float));
        assert_int_equal(r.loaded_tokens + r.computed_tokens, NUM);
        assert_true(r.loaded_tokens >= stored);
    }
    free(expected);
    free(cold);
    free(warm);
    close_world(&plain);
    close_world(&w);
    return loaded;
}

static void test_pieces_of_any_length_are_the_same_prompt(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof pieces / sizeof pieces[0]; i++) {
        try_until_loaded(try_pieces, i);
    }
}

static void test_sequences_of_one_batch(void **state) {
    (void)state;
    world w = open_world("mem:", 1024), alone = open_world(NULL, 1024);
    kvf_llama_report r = {.struct_size = sizeof r};
    /* The first computes, the second has the same head: it is copied. The third has a prompt without a whole block. */
    put_range(&w, 0, 0, 200, true);
    put_range(&w, 1, 0, 150, true);
    put_range(&w, 2, 0, 20, true);
    assert_int_equal(decode(&w), 0);
    float *first = logits_of(&w, 199), *second = logits_of(&w, 349), *third = logits_of(&w, 369);
    kvf_llama_prompt_report(w.l.kv, &r, 1);
    assert_int_equal(r.copied_tokens, 128);
    assert_int_equal(r.computed_tokens, 22);
    assert_null(llama_get_logits_ith(w.l.ctx, kvf_llama_output(w.l.kv, 5))); /* no output was asked for there */
    assert_true(error_of(&alone, 0, 200, first) < 1e-3);
    assert_true(error_of(&alone, 1, 150, second) < 1e-3);
    assert_true(error_of(&alone, 2, 20, third) < 1e-3);
    /* Generated tokens of all of them, one batch a step: they are not what a prompt of these tokens computes, so a
     * block that they fill is not stored. */
    uint64_t saved = counters(&w).saved_blocks;
    assert_int_equal(saved, 3 + 1 + 1);
    for (size_t i = 0; i < 70; i++) {
        put(&w, 5, (llama_pos)(200 + i), 0, true);
        put(&w, 6, (llama_pos)(150 + i), 1, true);
        put(&w, 7, (llama_pos)(20 + i), 2, true);
        assert_int_equal(decode(&w), 0);
        assert_int_equal(kvf_llama_output(w.l.kv, 2), 2);
    }
    assert_int_equal(counters(&w).generated_tokens, 210);
    assert_int_equal(counters(&w).saved_blocks, saved);
    free(first);
    free(second);
    free(third);
    close_world(&w);
    close_world(&alone);
}

/* Cut back into the middle of a block that is stored whole: it is loaded, and what follows is as in a first run. */
static bool cut_back(world *w, size_t stored) {
    assert_true(llama_memory_seq_rm(llama_get_memory(w->l.ctx), 0, 100, -1));
    put_range(w, 0, 100, 500, true);
    return decode_loading(w, stored);
}

static bool try_a_longer_prompt(size_t row) {
    (void)row;
    world w = open_world("mem:", 1024);
    kvf_llama_report r = {.struct_size = sizeof r};
    put_range(&w, 0, 0, 300, true);
    assert_int_equal(decode(&w), 0);
    put_range(&w, 0, 300, 500, true);
    assert_int_equal(decode(&w), 0);
    kvf_llama_prompt_report(w.l.kv, &r, 0);
    assert_int_equal(r.resident_tokens, 300);
    assert_int_equal(r.saved_blocks, 0); /* it went on in the middle of a block */
    kvft_flush_all(w.l.store);
    bool loaded = cut_back(&w, 256);
    if (loaded) {
        float *expected = logits_of(&w, 399);
        kvf_llama_prompt_report(w.l.kv, &r, 0);
        assert_int_equal(r.resident_tokens, 64);
        assert_int_equal(r.loaded_tokens, 256 - 64);
        assert_int_equal(r.saved_blocks, 3 + 1);
        kvft_flush_all(w.l.store);
        loaded = cut_back(&w, 500 - 1);
        kvf_llama_prompt_report(w.l.kv, &r, 0);
        if (loaded) {
            assert_int_equal(r.resident_tokens, 64);
            assert_int_equal(r.loaded_tokens, 500 - 64 - 1);
            assert_int_equal(r.computed_tokens, 1);
            assert_memory_equal(expected, llama_get_logits_ith(w.l.ctx, kvf_llama_output(w.l.kv, 399)),
                                128 * sizeof(float));
        }
        free(expected);
    }
    close_world(&w);
    return loaded;
}

static void test_a_longer_prompt_goes_on_from_what_is_there(void **state) {
    (void)state;
    try_until_loaded(try_a_longer_prompt, 0);
}

/* Sequence 0 holds its first 100 tokens. Another one takes so many cells that 200 more have no room: the batch is
 * refused as llama_decode refuses it, nothing has changed, and then the other one goes. */
static void expect_full(world *w, llama_memory_t mem) {
    for (size_t i = 0; i < 300; i++) {
        put(w, (llama_token)(i % 100), (llama_pos)i, 1, i == 299);
    }
    assert_int_equal(decode(w), 0);
    put_range(w, 0, 100, 300, true); /* 100 + 300 + 200 > 512 */
    assert_int_equal(decode(w), 1);
    assert_int_equal(llama_memory_seq_pos_max(mem, 0), 99);
    assert_int_equal(llama_memory_seq_pos_max(mem, 1), 299);
    assert_true(llama_memory_seq_rm(mem, 1, -1, -1));
}

static void test_a_full_cache_leaves_all_as_it_was(void **state) {
    (void)state;
    world w = open_world("mem:", 512);
    llama_memory_t mem = llama_get_memory(w.l.ctx);
    put_range(&w, 0, 0, 100, true);
    assert_int_equal(decode(&w), 0);
    put_range(&w, 1, 100, 110, true); /* positions of a sequence that is empty: left to llama.cpp */
    assert_int_equal(llama_memory_seq_pos_max(mem, 1), -1);
    w.batch.n_tokens = 0;
    expect_full(&w, mem);
    put_range(&w, 0, 100, 300, true);
    assert_int_equal(decode(&w), 0);
    assert_int_equal(llama_memory_seq_pos_max(mem, 0), 299);
    close_world(&w);
}

static void test_what_is_not_known_is_left_alone(void **state) {
    (void)state;
    world w = open_world("mem:", 1024);
    llama_memory_t mem = llama_get_memory(w.l.ctx);
    put_range(&w, 0, 0, 100, true);
    assert_int_equal(decode(&w), 0);
    /* A shift: the end is no longer what its tokens would compute. */
    assert_true(llama_memory_seq_rm(mem, 0, 10, 30));
    kvf_llama_forget(w.l.kv, 0);
    llama_memory_seq_add(mem, 0, 30, -1, -20);
    uint64_t saved = counters(&w).saved_blocks;
    for (size_t i = 80; i < 200; i++) {
        put(&w, 1, (llama_pos)i, 0, i == 199);
    }
    assert_int_equal(decode(&w), 0);
    assert_int_equal(counters(&w).aside_tokens[KVF_ASIDE_FOREIGN], 120);
    assert_int_equal(counters(&w).saved_blocks, saved);
    /* Emptied, it is followed again. */
    assert_true(llama_memory_seq_rm(mem, 0, -1, -1));
    put_range(&w, 0, 0, 300, true);
    assert_int_equal(decode(&w), 0);
    assert_true(counters(&w).saved_blocks > saved);
    /* A batch that llama.cpp refuses is refused, and changes nothing. */
    put(&w, 1, 500, 0, true);
    assert_int_equal(decode(&w), -1);
    assert_int_equal(llama_memory_seq_pos_max(mem, 0), 299);
    put(&w, 1, 300, 0, true);
    assert_int_equal(decode(&w), 0);
    close_world(&w);
}

static void test_shared_cells_are_parted_before_they_move(void **state) {
    (void)state;
    world w = open_world("mem:", 1024);
    llama_memory_t mem = llama_get_memory(w.l.ctx);
    put_range(&w, 0, 0, 200, true);
    put_range(&w, 1, 0, 190, true);
    assert_int_equal(decode(&w), 0);
    assert_int_equal(counters(&w).copied_tokens, 128);
    assert_true(llama_memory_seq_rm(mem, 0, 10, 30));
    kvf_llama_forget(w.l.kv, 0);
    llama_memory_seq_add(mem, 0, 30, -1, -20);
    put(&w, 9, 180, 0, true);
    assert_int_equal(decode(&w), 0);
    /* The other one is what it was. */
    assert_int_equal(llama_memory_seq_pos_max(mem, 1), 189);
    assert_int_equal(llama_memory_seq_pos_min(mem, 1), 0);
    put(&w, 9, 190, 1, true);
    assert_int_equal(decode(&w), 0);
    float *after = logits_of(&w, 0);
    world clean = open_world(NULL, 1024);
    put_range(&clean, 1, 0, 190, true);
    assert_int_equal(decode(&clean), 0);
    put(&clean, 9, 190, 1, true);
    assert_int_equal(decode(&clean), 0);
    float *expected = logits_of(&clean, 0);
    assert_true(lab_compare(expected, after, 128).nmse < 1e-3);
    free(after);
    free(expected);
    close_world(&clean);
    close_world(&w);
}

/* The tokens [from, end), each of them in sequences 0 and 1. */
static int32_t decode_in_both(world *w, size_t from, size_t end) {
    struct llama_batch batch = llama_batch_init((int32_t)(end - from), 0, 2);
    for (size_t i = from; i < end; i++) {
        int32_t k = batch.n_tokens++;
        batch.token[k] = w->tokens[i];
        batch.pos[k] = (llama_pos)i;
        batch.n_seq_id[k] = 2;
        batch.seq_id[k][0] = 0;
        batch.seq_id[k][1] = 1;
        batch.logits[k] = i + 1 == end;
    }
    int32_t rc = kvf_llama_decode(w->l.kv, batch);
    llama_batch_free(batch);
    return rc;
}

/* The cells belong to both, so a shift of the one moves the other, which ends between two blocks then, as if it had
 * been cut there. */
static void test_a_shift_moves_what_tokens_of_several_sequences_share(void **state) {
    (void)state;
    world w = open_world("mem:", 1024);
    llama_memory_t mem = llama_get_memory(w.l.ctx);
    assert_int_equal(decode_in_both(&w, 0, 200), 0);
    assert_int_equal(counters(&w).aside_tokens[KVF_ASIDE_SEVERAL], 400);
    assert_true(llama_memory_seq_rm(mem, 0, 10, 18));
    kvf_llama_forget(w.l.kv, 0);
    llama_memory_seq_add(mem, 0, 18, -1, -8);
    assert_int_equal(llama_memory_seq_pos_max(mem, 1), 3 * 64 - 1);
    uint64_t saved = counters(&w).saved_blocks;
    put_range(&w, 1, 3 * 64, NUM, true);
    assert_int_equal(decode(&w), 0);
    assert_int_equal(counters(&w).aside_tokens[KVF_ASIDE_FOREIGN], NUM - 3 * 64);
    assert_int_equal(counters(&w).saved_blocks, saved);
    /* Nobody is given what they hold, or what was stored of it. */
    world clean = open_world(NULL, 1024);
    kvft_flush_all(w.l.store);
    put_range(&w, 2, 0, NUM, true);
    assert_int_equal(decode(&w), 0);
    assert_int_equal(counters(&w).copied_tokens, 0);
    float *logits = logits_of(&w, (int32_t)NUM - 1);
    assert_true(error_of(&clean, 0, NUM, logits) < 1e-3);
    free(logits);
    close_world(&clean);
    close_world(&w);
}

/* Left alone, they hold what their tokens say, and each goes on by itself. */
static void test_tokens_of_several_sequences_are_followed(void **state) {
    (void)state;
    world w = open_world("mem:", 1024), clean = open_world(NULL, 1024);
    assert_int_equal(decode_in_both(&w, 0, 200), 0);
    for (llama_seq_id seq = 0; seq < 2; seq++) {
        put_range(&w, seq, 200, NUM, true);
        assert_int_equal(decode(&w), 0);
        float *logits = logits_of(&w, (int32_t)NUM - 200 - 1);
        assert_true(error_of(&clean, 0, NUM, logits) < 1e-3);
        free(logits);
    }
    assert_int_equal(counters(&w).aside_tokens[KVF_ASIDE_FOREIGN], 0);
    close_world(&clean);
    close_world(&w);
}

/* ---- states that are replaced in the middle of a block ---- */

static const struct {
    const char *arch;
    bool hybrid;
} with_states[] = {{"jamba", true}, {"mamba", false}, {"gemma3", false}};
#define NUM_WITH_STATES (sizeof with_states / sizeof *with_states)

static world open_with_state(size_t kind, const char *url, uint32_t n_ctx) {
    return open_world_of(lab_toy(with_states[kind].arch, with_states[kind].hybrid, 1), url, n_ctx);
}

static bool try_no_block_twice(size_t kind) {
    world w = open_with_state(kind, "mem:", 1024), plain = open_with_state(kind, NULL, 1024);
    kvf_llama_report r = {.struct_size = sizeof r};
    float *expected = in_pieces(&plain, 0, 100, &r);
    float *cold = in_pieces(&w, 0, 100, &r);
    assert_int_equal(r.computed_tokens, NUM);
    assert_memory_equal(cold, expected, 128 * sizeof(float));
    llama_memory_clear(llama_get_memory(w.l.ctx), true);
    kvft_flush_all(w.l.store);
    float *warm = in_pieces_loading(&w, 0, 100, &r, NUM - 1, 100);
    bool loaded = warm != NULL;
    if (loaded) {
        assert_memory_equal(warm, expected, 128 * sizeof(float));
        assert_int_equal(r.loaded_tokens, NUM - 1);
        assert_int_equal(r.computed_tokens, 1);
        kvf_stats stats = {.struct_size = sizeof stats};
        kvf_store_stats(w.l.store, &stats);
        /* Blocks 0 to 3 and three tails, where there are blocks; a state behind each batch. */
        bool blocks = strcmp(with_states[kind].arch, "mamba") != 0;
        assert_int_equal(stats.load_hits, (blocks ? 4 + 3 : 0) + 3);
    }
    free(expected);
    free(cold);
    free(warm);
    close_world(&plain);
    close_world(&w);
    return loaded;
}

/* Batches end in the middle of blocks; each brings in what lies behind the last, once. */
static void test_no_block_is_loaded_twice_for_a_later_state(void **state) {
    (void)state;
    for (size_t kind = 0; kind < NUM_WITH_STATES; kind++) {
        try_until_loaded(try_no_block_twice, kind);
    }
}

static bool try_a_lost_state(size_t kind) {
    static char files[LAB_MAX_FILES][400];
    char *dir = kvft_temp_dir(), url[200];
    snprintf(url, sizeof url, "file:%s", dir);
    world w = open_with_state(kind, url, 1024);
    kvf_llama_report r = {.struct_size = sizeof r};
    float *expected = in_pieces(&w, 0, 100, &r);
    llama_memory_clear(llama_get_memory(w.l.ctx), true);
    kvft_flush_all(w.l.store);
    put_range(&w, 0, 0, 100, false);
    bool met = decode_loading(&w, 100);
    if (met) {
        size_t num = lab_list_files(dir, files, 0);
        assert_true(num >= 3);
        for (size_t i = 0; i < num; i++) {
            lab_flip(files[i]);
        }
        put_range(&w, 0, 100, 200, false);
        assert_int_equal(decode(&w), 0);
        kvf_llama_prompt_report(w.l.kv, &r, 0);
        assert_int_equal(r.loaded_tokens, 100);
        assert_int_equal(r.computed_tokens, 100);
        met = r.why == KVF_WHY_CHECKSUM; /* else it was computed before the damage was seen */
        put_range(&w, 0, 200, NUM, true);
        assert_int_equal(decode(&w), 0);
        assert_memory_equal(expected, llama_get_logits_ith(w.l.ctx, kvf_llama_output(w.l.kv, 99)), 128 * sizeof(float));
    }
    free(expected);
    close_world(&w);
    kvft_remove_dir(dir);
    return met;
}

/* What was matched can't be loaded: the sequence continues from where it was. */
static void test_a_state_that_does_not_come_costs_nothing_that_was_there(void **state) {
    (void)state;
    for (size_t kind = 0; kind < NUM_WITH_STATES; kind++) {
        try_until_loaded(try_a_lost_state, kind);
    }
}

/* Where the cells could come short, the batch is left to llama_decode, which says so and has changed nothing. */
static void test_a_state_is_not_replaced_where_cells_could_come_short(void **state) {
    (void)state;
    world w = open_with_state(0, "mem:", 512);
    llama_memory_t mem = llama_get_memory(w.l.ctx);
    kvf_llama_report r = {.struct_size = sizeof r};
    float *expected = in_pieces(&w, 0, 100, &r);
    kvft_flush_all(w.l.store);
    llama_memory_clear(mem, true);
    put_range(&w, 0, 0, 100, false);
    assert_int_equal(decode(&w), 0);
    expect_full(&w, mem);
    put_range(&w, 0, 100, 200, false);
    assert_int_equal(decode(&w), 0);
    put_range(&w, 0, 200, NUM, true);
    assert_int_equal(decode(&w), 0);
    assert_true(same(expected, logits_of(&w, 99)));
    close_world(&w);
}

/* ---- two processes that compute the same prefix at the same time ---- */

typedef struct race {
    world other;
    bool done;
} race;

static int other_is_faster(void *ctx, uint32_t done, uint32_t num) {
    race *r = ctx;
    (void)num;
    if (done == 64 && !r->done) {
        r->done = true;
        put_range(&r->other, 0, 0, NUM, true);
        assert_int_equal(decode(&r->other), 0);
        kvft_flush_all(r->other.l.store);
    }
    return 0;
}

/* False: the lookup was answered so late that it found what the other has stored. */
static bool race_once(size_t row) {
    (void)row;
    char folder[] = "/tmp/kvft-race-XXXXXX", url[64], clear[96];
    assert_non_null(mkdtemp(folder));
    snprintf(url, sizeof url, "file:%s", folder);
    race r = {.other = open_world(url, 1024)};
    world w = {.model = r.other.model, .tokens = r.other.tokens, .batch = llama_batch_init(512, 0, 1)};
    lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true, .n_ctx = 1024, .n_ubatch = 64};
    w.l = lab_open_with(w.model, &config, url, MODEL_PATH, other_is_faster, &r);
    assert_int_equal(w.l.status, KVF_OK);
    put_range(&w, 0, 0, NUM, true);
    assert_int_equal(decode(&w), 0);
    assert_true(r.done);
    kvft_flush_all(w.l.store);
    kvf_stats stats = {.struct_size = sizeof stats};
    kvf_store_stats(w.l.store, &stats);
    bool counts = counters(&w).loaded_tokens == 0;
    assert_true(!counts || stats.known >= 3); /* what the other stored meanwhile: a writer looks before it writes */
    llama_batch_free(w.batch);
    lab_close(&w.l);
    close_world(&r.other);
    snprintf(clear, sizeof clear, "rm -r %s", folder);
    assert_int_equal(system(clear), 0);
    return counts;
}

static void test_a_prefix_computed_twice_at_once_is_stored_once(void **state) {
    (void)state;
    try_until_loaded(race_once, 0);
}

int main(void) {
    llama_log_set(lab_quiet, NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pieces_of_any_length_are_the_same_prompt),
        cmocka_unit_test(test_sequences_of_one_batch),
        cmocka_unit_test(test_a_longer_prompt_goes_on_from_what_is_there),
        cmocka_unit_test(test_a_full_cache_leaves_all_as_it_was),
        cmocka_unit_test(test_what_is_not_known_is_left_alone),
        cmocka_unit_test(test_shared_cells_are_parted_before_they_move),
        cmocka_unit_test(test_a_shift_moves_what_tokens_of_several_sequences_share),
        cmocka_unit_test(test_tokens_of_several_sequences_are_followed),
        cmocka_unit_test(test_no_block_is_loaded_twice_for_a_later_state),
        cmocka_unit_test(test_a_state_that_does_not_come_costs_nothing_that_was_there),
        cmocka_unit_test(test_a_state_is_not_replaced_where_cells_could_come_short),
        cmocka_unit_test(test_a_prefix_computed_twice_at_once_is_stored_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
