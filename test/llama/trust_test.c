/* SPDX-License-Identifier: Apache-2.0
 *
 * What the llama.cpp engine must verify: that a sequence still holds what a prefill put there, that a context computes
 * each token only from those before it, that the same model and types make the same bytes. On toy models.
 */
#include <setjmp.h>
#include <stdarg.h>

#include "lab.h"
#include "support/forge.h"

#include <cmocka.h>

#define NUM 300u /* 4 blocks of 64, and 44 tokens behind the cut */

static llama_token *toy_prompt(unsigned seed) {
    llama_token *tokens = lab_prompt(NUM, seed);
    for (size_t i = 0; i < NUM; i++) {
        tokens[i] %= 128;
    }
    return tokens;
}

/* As a program with a decode loop of its own does. */
static void decode(lab *l, llama_seq_id seq, const llama_token *tokens, llama_pos first, size_t num) {
    struct llama_batch batch = llama_batch_init((int32_t)num, 0, 1);
    batch.n_tokens = (int32_t)num;
    for (size_t i = 0; i < num; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = first + (llama_pos)i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i] = i + 1 == num;
    }
    assert_int_equal(llama_decode(l->ctx, batch), 0);
    llama_batch_free(batch);
}

/* ---- residents ---- */

typedef struct site {
    struct llama_model *model;
    llama_token *tokens, *others;
    float *clean;
    lab l;
} site;

static const lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true};

static site open_site(void) {
    site s = {.model = lab_toy("llama", false, 1), .tokens = toy_prompt(1), .others = toy_prompt(2)};
    kvf_llama_report report = {.struct_size = sizeof report};
    lab clean = lab_open(s.model, &config, NULL, NULL);
    s.clean = lab_prefill(&clean, &report, 0, s.tokens, NUM);
    lab_close(&clean);
    s.l = lab_open(s.model, &config, NULL, NULL);
    assert_int_equal(s.l.status, KVF_OK);
    free(lab_prefill(&s.l, &report, 0, s.tokens, NUM));
    return s;
}

/* The sequence has been changed behind the engine's back; the answer is that of a clean run nevertheless. */
static void expect_clean(site *s, size_t resident) {
    kvf_llama_report report = {.struct_size = sizeof report};
    float *logits = lab_prefill(&s->l, &report, 0, s->tokens, NUM);
    assert_int_equal(report.resident_tokens, resident);
    lab_difference d = lab_compare(s->clean, logits, lab_vocab(&s->l));
    if (!d.same_argmax || d.nmse > 1e-3) {
        fail_msg("NMSE %g", d.nmse);
    }
    free(logits);
}

static void close_site(site *s) {
    lab_close(&s->l);
    free(s->clean);
    free(s->tokens);
    free(s->others);
    llama_model_free(s->model);
}

static void test_untouched_sequence_is_kept(void **state) {
    (void)state;
    site s = open_site();
    expect_clean(&s, 256);
    decode(&s.l, 0, s.others, (llama_pos)NUM, 20); /* an answer */
    expect_clean(&s, 256);
    close_site(&s);
}

static void test_other_text_in_the_sequence_is_noticed(void **state) {
    (void)state;
    site s = open_site();
    llama_memory_t mem = llama_get_memory(s.l.ctx);
    llama_memory_seq_rm(mem, 0, -1, -1);
    decode(&s.l, 0, s.others, 0, NUM);
    expect_clean(&s, 0);
    /* One token early on: the rows of all later ones change with it. */
    llama_memory_seq_rm(mem, 0, -1, -1);
    memcpy(s.others, s.tokens, NUM * sizeof *s.tokens);
    s.others[3] = (s.others[3] + 1) % 128;
    decode(&s.l, 0, s.others, 0, NUM);
    expect_clean(&s, 0);
    close_site(&s);
}

/* What chat programs do when the context is full: drop the middle, move the rest up. */
static void test_context_shift_is_noticed(void **state) {
    (void)state;
    site s = open_site();
    llama_memory_t mem = llama_get_memory(s.l.ctx);
    llama_memory_seq_rm(mem, 0, 8, 72);
    llama_memory_seq_add(mem, 0, 72, -1, -64);
    decode(&s.l, 0, s.others, (llama_pos)NUM - 64, 100);
    expect_clean(&s, 0);
    close_site(&s);
}

static void test_cut_back_sequence_is_noticed(void **state) {
    (void)state;
    site s = open_site();
    llama_memory_t mem = llama_get_memory(s.l.ctx);
    llama_memory_seq_rm(mem, 0, 100, -1);
    expect_clean(&s, 0);
    llama_memory_seq_rm(mem, 0, 100, -1);
    decode(&s.l, 0, s.others, 100, 200);
    expect_clean(&s, 0);
    close_site(&s);
}

/* ---- what a store must not get ---- */

static void test_nothing_wrong_is_stored_over_a_changed_sequence(void **state) {
    (void)state;
    struct llama_model *model = lab_toy("llama", false, 1);
    llama_token *tokens = toy_prompt(1), *others = toy_prompt(2);
    kvf_llama_report report = {.struct_size = sizeof report};
    lab clean = lab_open(model, &config, NULL, NULL);
    float *expected = lab_prefill(&clean, &report, 0, tokens, NUM);
    lab_close(&clean);
    char *dir = kvft_temp_dir(), url[200];
    snprintf(url, sizeof url, "file:%s", dir);

    lab l = lab_open(model, &config, url, MODEL_PATH);
    free(lab_prefill(&l, &report, 0, tokens, 130)); /* two blocks */
    llama_memory_seq_rm(llama_get_memory(l.ctx), 0, -1, -1);
    decode(&l, 0, others, 0, 200);
    free(lab_prefill(&l, &report, 0, tokens, NUM)); /* two blocks more */
    lab_close(&l);

    l = lab_open(model, &config, url, MODEL_PATH);
    float *logits = lab_prefill(&l, &report, 0, tokens, NUM);
    assert_true(report.loaded_tokens >= 256);
    assert_memory_equal(logits, expected, lab_vocab(&l) * sizeof *logits);
    free(logits);
    lab_close(&l);
    free(expected);
    free(tokens);
    free(others);
    kvft_remove_dir(dir);
    llama_model_free(model);
}

static void test_sequences_that_are_not_there(void **state) {
    (void)state;
    struct llama_model *model = lab_toy("llama", false, 1);
    llama_token *tokens = toy_prompt(1);
    kvf_llama_report report = {.struct_size = sizeof report};
    lab l = lab_open(model, &config, "mem:", MODEL_PATH);
    free(lab_prefill(&l, &report, 0, tokens, NUM));
    const llama_seq_id wrong[] = {-1, 3, 4, 1000}; /* 3 is scratch */
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(kvf_llama_load(l.kv, NULL, wrong[i], tokens, NUM), 0);
        assert_int_equal(kvf_llama_save(l.kv, NULL, wrong[i], tokens, NUM), 0);
    }
    assert_int_equal(kvf_llama_load(l.kv, NULL, 1, tokens, 0), 0);
    assert_int_equal(kvf_llama_save(l.kv, NULL, 1, tokens, NUM), 0); /* empty */
    free(tokens);
    lab_close(&l);
    llama_model_free(model);
}

/* The cache has no room for what is stored: the run ends, and the report says why. */
static void test_no_room_to_load(void **state) {
    (void)state;
    struct llama_model *model = lab_toy("llama", false, 1);
    llama_token *tokens = toy_prompt(1), *others = toy_prompt(2);
    lab_config small = config;
    small.n_ctx = 512;
    lab l = lab_open(model, &small, "mem:", MODEL_PATH);
    kvf_llama_report report = {.struct_size = sizeof report};
    free(lab_prefill(&l, &report, 0, tokens, NUM));
    kvft_flush_all(l.store);
    llama_memory_clear(llama_get_memory(l.ctx), true);
    decode(&l, 1, others, 0, NUM);
    decode(&l, 2, others, 0, 60); /* 152 cells are left */
    memset(&report, 0x7f, sizeof report);
    report.struct_size = sizeof report;
    assert_int_equal(kvf_llama_load(l.kv, &report, 0, tokens, NUM), 128);
    assert_int_equal(report.num_tokens, NUM);
    assert_int_equal(report.loaded_tokens, 128);
    assert_int_equal(report.saved_blocks + report.known_blocks + report.missed_blocks, 0);
    assert_int_equal(report.why, KVF_WHY_FULL);
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(l.ctx), 0), 127);
    /* A report holds what its call did, not what those before it did. */
    assert_int_equal(kvf_llama_save(l.kv, &report, 0, tokens, 128), 2);
    assert_int_equal(report.saved_blocks, 2);
    assert_int_equal(report.loaded_tokens, 0);
    const kvf_llama_report zero = {.struct_size = sizeof zero};
    assert_int_equal(kvf_llama_save(l.kv, &report, 0, tokens, 0), 0);
    assert_memory_equal(&report, &zero, sizeof report);
    memset(&report, 0x7f, sizeof report);
    report.struct_size = sizeof report;
    assert_int_equal(kvf_llama_load(l.kv, &report, 0, tokens, 0), 0);
    assert_memory_equal(&report, &zero, sizeof report);
    free(tokens);
    free(others);
    lab_close(&l);
    llama_model_free(model);
}

/* ---- forged records, with a valid header and checksum ---- */

/* Changes a payload; false: this one is not of that kind. */
typedef bool (*forgery)(kvft_buffer *payload);

static uint32_t word_at(const kvft_buffer *b, size_t at) {
    uint32_t word = 0;
    assert_true(at + sizeof word <= b->len);
    memcpy(&word, b->data + at, sizeof word);
    return word;
}

static void set_word(kvft_buffer *b, size_t at, uint32_t word) {
    assert_true(at + sizeof word <= b->len);
    memcpy(b->data + at, &word, sizeof word);
}

/* Of a recurrent state alone: one cell, with no list of sequences. */
static bool is_recurrent(const kvft_buffer *b) {
    return word_at(b, 8) == 1 && word_at(b, 16) == 0;
}

static bool forge_two_states(kvft_buffer *b) {
    uint8_t cell[8];
    if (!is_recurrent(b)) {
        return false;
    }
    memcpy(cell, b->data + 12, sizeof cell);
    set_word(b, 8, 2);
    kvft_buffer_splice(b, 20, 0, cell, sizeof cell);
    return true;
}

static bool forge_two_states_in_its_length(kvft_buffer *b) {
    uint8_t cell[8];
    if (!is_recurrent(b)) {
        return false;
    }
    memcpy(cell, b->data + 12, sizeof cell);
    set_word(b, 8, 2);
    kvft_buffer_splice(b, 20, sizeof cell, cell, sizeof cell);
    return true;
}

static bool forge_state_elsewhere(kvft_buffer *b) {
    bool recurrent = is_recurrent(b);
    if (recurrent) {
        set_word(b, 12, word_at(b, 12) - 1);
    }
    return recurrent;
}

/* Of a cache, the second cell is at the position of the first one; only where cells have no further dimensions. */
static bool forge_twice_the_same_position(kvft_buffer *b) {
    bool cache = !is_recurrent(b);
    if (cache) {
        set_word(b, 28, word_at(b, 16));
    }
    return cache;
}

static bool forge_negative_position(kvft_buffer *b) {
    bool cache = !is_recurrent(b);
    if (cache) {
        set_word(b, 16, UINT32_MAX);
    }
    return cache;
}

static bool forge_fewer_cells(kvft_buffer *b) {
    bool cache = !is_recurrent(b);
    if (cache) {
        set_word(b, 12, word_at(b, 12) - 1);
    }
    return cache;
}

static bool forge_many_cells(kvft_buffer *b) {
    set_word(b, is_recurrent(b) ? 8 : 12, 0x7fffffff);
    return true;
}

static bool forge_no_cells(kvft_buffer *b) {
    set_word(b, is_recurrent(b) ? 8 : 12, 0);
    return true;
}

/* What a block of a hybrid ends with in place of a state: two of them. */
static bool forge_states_behind_a_block(kvft_buffer *b) {
    static const uint32_t words[] = {2, 63, 0, 63, 0};
    size_t rest = 4 + 8 + (is_recurrent(b) ? 0 : 2 * 12); /* of one recurrent layer */
    bool cache = !is_recurrent(b) && word_at(b, b->len - rest) == 0;
    if (cache) {
        memcpy(b->data + b->len - rest, words, sizeof words);
    }
    return cache;
}

static bool forge_a_tail(kvft_buffer *b) {
    kvft_buffer_splice(b, b->len, 0, "tail", 4);
    return true;
}

/* The last number of the last row, of 16 bits or of 32. */
static bool forge_not_a_number(kvft_buffer *b) {
    set_word(b, b->len - 4, 0x7fc00000);
    return true;
}

/* Every record of the folder in turn, forged: llama.cpp gets none of it, and the process lives. Returns how many of
 * them were missed; the state in front of the last one is not asked for. */
static size_t forge_each(lab *l, const char *dir, const llama_token *tokens, forgery forge) {
    static char files[LAB_MAX_FILES][400];
    size_t num = lab_list_files(dir, files, 0), forged = 0, missed = 0;
    assert_true(num >= 2);
    for (size_t i = 0; i < num; i++) {
        size_t at = 0, len = 0;
        kvft_buffer whole = kvft_file_read(files[i]), record = kvft_buffer_of(whole.data, whole.len);
        assert_true(kvft_payload_of(&record, &at, &len));
        kvft_buffer payload = kvft_buffer_of(record.data + at, len);
        if (forge(&payload)) {
            forged++;
            kvft_forge_payload(&record, &payload);
            kvft_file_write(files[i], &record);
            missed += kvf_llama_load(l->kv, NULL, 0, tokens, NUM) < NUM - 1;
            kvft_file_write(files[i], &whole);
        }
        kvft_buffer_free(&payload);
        kvft_buffer_free(&record);
        kvft_buffer_free(&whole);
    }
    assert_true(missed + 1 >= forged && (missed > 0 || forged == 0));
    return missed;
}

static void test_forged_records_are_misses(void **state) {
    static const forgery forgeries[] = {forge_two_states,
                                        forge_two_states_in_its_length,
                                        forge_state_elsewhere,
                                        forge_twice_the_same_position,
                                        forge_negative_position,
                                        forge_fewer_cells,
                                        forge_many_cells,
                                        forge_no_cells,
                                        forge_states_behind_a_block,
                                        forge_a_tail,
                                        forge_not_a_number};
    static const struct {
        const char *arch;
        bool hybrid;
    } kinds[] = {{"mamba", false}, {"jamba", true}, {"gemma3", false}, {"llama", false}};
    size_t missed[sizeof forgeries / sizeof *forgeries] = {0};
    (void)state;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        struct llama_model *model = lab_toy(kinds[k].arch, kinds[k].hybrid, 1);
        llama_token *tokens = toy_prompt(1);
        kvf_llama_report report = {.struct_size = sizeof report};
        char *dir = kvft_temp_dir(), url[200];
        snprintf(url, sizeof url, "file:%s", dir);
        lab l = lab_open(model, &config, url, MODEL_PATH);
        free(lab_prefill(&l, &report, 0, tokens, NUM));
        kvft_flush_all(l.store);
        for (size_t f = 0; f < sizeof forgeries / sizeof *forgeries; f++) {
            missed[f] += forge_each(&l, dir, tokens, forgeries[f]);
            assert_int_equal(kvf_llama_load(l.kv, NULL, 0, tokens, NUM), NUM - 1); /* as it was */
        }
        lab_close(&l);
        kvft_remove_dir(dir);
        free(tokens);
        llama_model_free(model);
    }
    for (size_t f = 0; f < sizeof forgeries / sizeof *forgeries; f++) {
        assert_true(missed[f] > 0);
    }
}

/* Where nothing is lent, blocks and states come by flights: as often as they are asked for. */
static void test_what_is_not_lent_loads_again(void **state) {
    static const struct {
        const char *arch;
        bool hybrid;
    } kinds[] = {{"mamba", false}, {"jamba", true}, {"gemma3", false}, {"llama", false}};
    (void)state;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        struct llama_model *model = lab_toy(kinds[k].arch, kinds[k].hybrid, 1);
        llama_token *tokens = toy_prompt(1);
        kvf_llama_report report = {.struct_size = sizeof report};
        char *dir = kvft_temp_dir(), url[200], root[200];
        snprintf(url, sizeof url, "file:%s", dir);
        snprintf(root, sizeof root, "%s/kvf1", dir);
        lab l = lab_open(model, &config, url, MODEL_PATH);
        free(lab_prefill(&l, &report, 0, tokens, NUM));
        kvft_flush_all(l.store);
        assert_int_equal(chmod(root, 0777), 0); /* others can write there */
        for (int times = 0; times < 4; times++) {
            assert_int_equal(kvf_llama_load(l.kv, NULL, 0, tokens, NUM), NUM - 1);
        }
        lab_close(&l);
        kvft_remove_dir(dir);
        free(tokens);
        llama_model_free(model);
    }
}

/* ---- contexts ---- */

static kvf_status attach(struct llama_model *model, struct llama_context_params params, bool portable,
                         kvf_digest *digest, kvf_error *err) {
    struct llama_context *ctx = llama_init_from_model(model, params);
    kvf_store *store = kvft_store("mem:");
    kvf_llama *kv = NULL;
    const struct llama_model_params model_params = llama_model_default_params();
    kvf_llama_options o = {.struct_size = sizeof o,
                           .scratch_seq = (llama_seq_id)params.n_seq_max - 1,
                           .model_path = MODEL_PATH,
                           .context_params = &params,
                           .model_params = &model_params,
                           .portable = portable};
    assert_non_null(ctx);
    kvf_status status = kvf_llama_attach(&kv, err, store, ctx, &o);
    if (status == KVF_OK) {
        kvf_space_digest(kvf_llama_space(kv), digest);
        kvf_llama_detach(kv);
    }
    kvf_store_close(store);
    llama_free(ctx);
    return status;
}

static void test_attention_to_later_tokens_is_refused(void **state) {
    (void)state;
    struct llama_model *model = lab_toy("llama", false, 1);
    struct llama_context_params params = lab_params(&config);
    kvf_digest digest;
    kvf_error err = {0};
    params.attention_type = LLAMA_ATTENTION_TYPE_NON_CAUSAL;
    assert_int_equal(attach(model, params, false, &digest, &err), KVF_REFUSED);
    assert_non_null(strstr(err.what, "causal"));
    llama_model_free(model);
}

/* A model with two sets of rope factors takes those for long texts when the context is larger than what it was first
 * trained for. */
static void test_the_side_of_longrope_is_part_of_the_space(void **state) {
    (void)state;
    struct llama_model *model =
        lab_toy_with("llama", false, 1, (lab_meta[]){{"rope.scaling.original_context_length", 512}, {NULL, 0}});
    struct llama_context_params params = lab_params(&config);
    kvf_digest small, same, large;
    kvf_error err = {0};
    params.n_ctx = 256;
    assert_int_equal(attach(model, params, true, &small, &err), KVF_OK);
    params.n_ctx = 512;
    assert_int_equal(attach(model, params, true, &same, &err), KVF_OK);
    params.n_ctx = 768; /* the model's own context length is 1024 */
    assert_int_equal(attach(model, params, true, &large, &err), KVF_OK);
    assert_memory_equal(&small, &same, sizeof small);
    assert_memory_not_equal(&small, &large, sizeof small);
    llama_model_free(model);
}

int main(void) {
    llama_log_set(lab_quiet, NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_untouched_sequence_is_kept),
        cmocka_unit_test(test_other_text_in_the_sequence_is_noticed),
        cmocka_unit_test(test_context_shift_is_noticed),
        cmocka_unit_test(test_cut_back_sequence_is_noticed),
        cmocka_unit_test(test_nothing_wrong_is_stored_over_a_changed_sequence),
        cmocka_unit_test(test_sequences_that_are_not_there),
        cmocka_unit_test(test_no_room_to_load),
        cmocka_unit_test(test_forged_records_are_misses),
        cmocka_unit_test(test_what_is_not_lent_loads_again),
        cmocka_unit_test(test_attention_to_later_tokens_is_refused),
        cmocka_unit_test(test_the_side_of_longrope_is_part_of_the_space),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
