/* SPDX-License-Identifier: Apache-2.0
 *
 * A store holds what a cold run computes. One slot is asked prompt after prompt, as a server asks it: each goes on from
 * what the slot still holds of it (another question, a chat's next turn, an edit, a shorter prompt), in batches that
 * end anywhere, with answers in between. The oracle is each of these prompts in a context and a store of its own:
 *   - every record that the slot stored is one that some cold run stores, byte for byte, and so are those of a restart;
 *   - a restarted context answers every prompt as the cold run does, to the bit, whatever it finds in the store.
 * Seeds decide the prompts: KVFT_SEED=n repeats one.
 */
#include <setjmp.h>
#include <stdarg.h>

#include "lab.h"

#include <cmocka.h>

#define VOCAB      128u
#define MAX_TOKENS 900u
#define PROMPTS    7u
#define CONTEXT    2048u

typedef struct text {
    llama_token tokens[MAX_TOKENS];
    size_t num;
} text;

typedef struct site {
    struct llama_model *model;
    char *dir, url[200];
} site;

static site new_site(struct llama_model *model) {
    site s = {.model = model, .dir = kvft_temp_dir()};
    snprintf(s.url, sizeof s.url, "file:%s", s.dir);
    return s;
}

/* ---- a slot of a server ---- */

typedef struct slot {
    lab l;
    llama_memory_t mem;
    text held; /* prompt and answer */
    struct llama_batch batch;
    float logits[VOCAB];
} slot;

static void open_slot(slot *s, struct llama_model *model, const char *url) {
    lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true, .n_ctx = CONTEXT, .threads = 1};
    s->l = lab_open(model, &config, url, MODEL_PATH);
    assert_int_equal(s->l.status, KVF_OK);
    s->mem = llama_get_memory(s->l.ctx);
    s->held.num = 0;
    s->batch = llama_batch_init(CONTEXT, 0, 1);
}

static void close_slot(slot *s) {
    if (s->l.store != NULL) {
        kvft_flush_all(s->l.store);
    }
    llama_batch_free(s->batch);
    lab_close(&s->l);
}

static void feed(slot *s, const llama_token *tokens, size_t num, bool output) {
    s->batch.n_tokens = 0;
    for (size_t i = 0; i < num; i++) {
        int32_t k = s->batch.n_tokens++;
        s->batch.token[k] = s->held.tokens[s->held.num] = tokens[i];
        s->batch.pos[k] = (llama_pos)s->held.num++;
        s->batch.n_seq_id[k] = 1;
        s->batch.seq_id[k][0] = 0;
        s->batch.logits[k] = output && i + 1 == num;
    }
    assert_int_equal(kvf_llama_decode(s->l.kv, s->batch), 0);
    if (output) {
        int32_t last = kvf_llama_output(s->l.kv, s->batch.n_tokens - 1);
        memcpy(s->logits, llama_get_logits_ith(s->l.ctx, last), sizeof s->logits);
    }
}

static size_t common(const text *a, const text *b) {
    size_t n = 0;
    while (n < a->num && n < b->num && a->tokens[n] == b->tokens[n]) {
        n++;
    }
    return n;
}

/* Keeps what the slot holds of the prompt, but for the last token; a state that can't go back is given up. */
static void keep(slot *s, const text *prompt) {
    size_t same = common(&s->held, prompt);
    same = same < prompt->num ? same : prompt->num - 1;
    if (same < s->held.num && !llama_memory_seq_rm(s->mem, 0, (llama_pos)same, -1)) {
        assert_true(llama_memory_seq_rm(s->mem, 0, -1, -1));
        same = 0;
    }
    s->held.num = same;
}

/* Batches of `piece` tokens, then `answer` tokens, one by one. */
static void ask(slot *s, const text *prompt, size_t piece, size_t answer) {
    float first[VOCAB];
    keep(s, prompt);
    while (s->held.num < prompt->num) {
        size_t left = prompt->num - s->held.num, num = left < piece ? left : piece;
        feed(s, prompt->tokens + s->held.num, num, num == left);
    }
    memcpy(first, s->logits, sizeof first);
    for (size_t i = 0; i < answer; i++) {
        size_t best = 0;
        for (size_t j = 1; j < VOCAB; j++) {
            best = s->logits[j] > s->logits[best] ? j : best;
        }
        feed(s, &(llama_token){(llama_token)best}, 1, true);
    }
    memcpy(s->logits, first, sizeof first);
}

/* In a context that has never seen anything. */
static void ask_fresh(const site *s, const text *prompt, size_t piece, float out[VOCAB]) {
    slot fresh;
    open_slot(&fresh, s->model, s->url);
    ask(&fresh, prompt, piece, 0);
    memcpy(out, fresh.logits, sizeof fresh.logits);
    close_slot(&fresh);
}

/* ---- records ---- */

static uint8_t *read_record(const char *path, size_t *len) {
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        return NULL;
    }
    fseek(f, 0, SEEK_END);
    *len = (size_t)ftell(f);
    rewind(f);
    uint8_t *bytes = malloc(*len);
    assert_true(*len > 128 && fread(bytes, 1, *len, f) == *len);
    fclose(f);
    memset(bytes + 100, 0, 28); /* when it was stored, and the check of the header over it */
    return bytes;
}

/* Every record of the store is one of the cold runs' (`all`), and the same in all that have it. */
static size_t expect_records(const site *s, const site *cold, size_t num_cold, bool all, const char *what) {
    static char files[LAB_MAX_FILES * 8][400];
    size_t num = lab_list_files_up_to(s->dir, files, 0, LAB_MAX_FILES * 8);
    for (size_t i = 0; i < num; i++) {
        size_t len = 0, found = 0, cold_len = 0;
        uint8_t *bytes = read_record(files[i], &len);
        for (size_t k = 0; k < num_cold; k++) {
            char path[400];
            snprintf(path, sizeof path, "%s%s", cold[k].dir, files[i] + strlen(s->dir));
            uint8_t *expected = read_record(path, &cold_len);
            if (expected != NULL && (cold_len != len || memcmp(expected, bytes, len) != 0)) {
                fail_msg("%s: %s is not what a cold run stores", what, files[i]);
            }
            found += expected != NULL;
            free(expected);
        }
        if (found == 0 && all) {
            fail_msg("%s: %s: no cold run stores that", what, files[i]);
        }
        free(bytes);
    }
    return num;
}

static size_t expect_cold_records(const site *s, const site *cold, size_t num_cold, const char *what) {
    return expect_records(s, cold, num_cold, true, what);
}

/* ---- prompts that follow each other ---- */

static void add_random(text *t, uint64_t *random, size_t num) {
    for (size_t i = 0; i < num && t->num < MAX_TOKENS - 40; i++) {
        t->tokens[t->num++] = (llama_token)(kvft_random(random) % VOCAB);
    }
}

static size_t below(uint64_t *random, size_t num) {
    return (size_t)(kvft_random(random) % num);
}

/* The next one, by what people and programs do. */
static text next_prompt(const text *last, const text *held, uint64_t *random) {
    text t = *last;
    switch (below(random, 8)) {
    case 0: /* another question at the end of the same document */
        t.num -= t.num > 8 ? 1 + below(random, 8) : 0;
        add_random(&t, random, 3 + below(random, 12));
        break;
    case 1: /* a chat's next turn */
        t = *held;
        add_random(&t, random, 5 + below(random, 40));
        break;
    case 2: /* the same again */
        break;
    case 3: /* an edit in the middle */
        t.tokens[below(random, t.num)] = (llama_token)below(random, VOCAB);
        break;
    case 4: /* its beginning */
        t.num = 2 + below(random, t.num);
        t.num = t.num < last->num ? t.num : last->num;
        break;
    case 5: /* much more: a tool's result */
        add_random(&t, random, 250 + below(random, 200));
        break;
    case 6: /* the beginning of it, and another document */
        t.num = t.num / 3 + 1;
        add_random(&t, random, 100 + below(random, 200));
        break;
    default: /* something else */
        t.num = 0;
        add_random(&t, random, 40 + below(random, 300));
        break;
    }
    return t;
}

static size_t run_seed(struct llama_model *model, const char *arch, uint64_t seed) {
    static const size_t pieces[] = {CONTEXT, 48, 64, 100, 333};
    uint64_t random = seed;
    size_t piece = pieces[seed % (sizeof pieces / sizeof *pieces)];
    text *prompts = calloc(PROMPTS, sizeof *prompts);
    float(*expected)[VOCAB] = calloc(PROMPTS, sizeof *expected);
    site store = new_site(model), cold[PROMPTS];
    char what[100];
    slot s;
    snprintf(what, sizeof what, "%s, KVFT_SEED=%llu", arch, (unsigned long long)seed);
    open_slot(&s, model, store.url);
    add_random(&prompts[0], &random, 100 + below(&random, 400));
    for (size_t i = 0; i < PROMPTS; i++) {
        if (i > 0) {
            prompts[i] = next_prompt(&prompts[i - 1], &s.held, &random);
        }
        cold[i] = new_site(model);
        ask_fresh(&cold[i], &prompts[i], piece, expected[i]);
        ask(&s, &prompts[i], piece, below(&random, 90));
        assert_true(lab_compare(expected[i], s.logits, VOCAB).nmse < 1e-3);
        kvft_flush_all(s.l.store);
        expect_cold_records(&store, cold, i + 1, what);
    }
    close_slot(&s);
    for (size_t i = 0; i < PROMPTS; i++) {
        float again[VOCAB];
        ask_fresh(&store, &prompts[PROMPTS - 1 - i], piece, again);
        if (memcmp(again, expected[PROMPTS - 1 - i], sizeof again) != 0) {
            fail_msg("%s: prompt %zu has another answer after a restart", what, PROMPTS - 1 - i);
        }
    }
    size_t num = expect_cold_records(&store, cold, PROMPTS, what);
    for (size_t i = 0; i < PROMPTS; i++) {
        kvft_remove_dir(cold[i].dir);
    }
    kvft_remove_dir(store.dir);
    free(prompts);
    free(expected);
    return num;
}

static void run_kind(const char *arch, bool hybrid, uint64_t seeds) {
    struct llama_model *model = lab_toy(arch, hybrid, 1);
    const char *only = getenv("KVFT_SEED");
    size_t num = 0;
    for (uint64_t seed = 0; seed < seeds || (only != NULL && seed < 1000); seed++) {
        if (only == NULL || strtoull(only, NULL, 10) == seed) {
            num += run_seed(model, arch, seed);
        }
    }
    assert_true(only != NULL || num > seeds * PROMPTS / 2); /* it is not that nothing is stored */
    llama_model_free(model);
}

/* ---- which answers are equal, to the bit ---- */

static void expect_answer(const site *store, const slot *s, const text *prompt, bool equal) {
    float cold[VOCAB];
    ask_fresh(store, prompt, CONTEXT, cold);
    assert_int_equal(memcmp(cold, s->logits, sizeof cold) == 0, equal);
    assert_true(lab_compare(cold, s->logits, VOCAB).nmse < 1e-3);
}

static void test_equal_answers(void **state) {
    (void)state;
    struct llama_model *model = lab_toy("llama", false, 1);
    site store = new_site(model), cold = new_site(model);
    text first = {.num = 0}, other, turn, more;
    uint64_t random = 1;
    slot s;
    open_slot(&s, model, store.url);
    add_random(&first, &random, 260);
    ask(&s, &first, CONTEXT, 5);
    expect_answer(&cold, &s, &first, true);
    ask(&s, &first, CONTEXT, 5); /* again */
    expect_answer(&cold, &s, &first, true);
    turn = s.held; /* behind an answer: up to rounding */
    add_random(&turn, &random, 80);
    ask(&s, &turn, CONTEXT, 0);
    expect_answer(&cold, &s, &turn, false);
    ask(&s, &first, CONTEXT, 5);
    more = s.held; /* behind an answer, with so much more that it is computed again: 9 of 265 tokens */
    add_random(&more, &random, 9 * 16 + 1);
    ask(&s, &more, CONTEXT, 0);
    expect_answer(&cold, &s, &more, true);
    other = more; /* from the middle of a block on, which is not stored: up to rounding */
    other.num -= 30;
    add_random(&other, &random, 40);
    ask(&s, &other, CONTEXT, 0);
    expect_answer(&cold, &s, &other, false);
    ask(&s, &more, CONTEXT, 0); /* the block in whose middle it goes on is stored */
    expect_answer(&cold, &s, &more, true);
    close_slot(&s);
    kvft_remove_dir(store.dir);
    kvft_remove_dir(cold.dir);
    llama_model_free(model);
}

/* What was saved as it is has keys of its own: only kvf_llama_load finds it. */
static void test_saved_as_it_is(void **state) {
    (void)state;
    struct llama_model *model = lab_toy("llama", false, 1);
    site store = new_site(model);
    text t = {.num = 0};
    uint64_t random = 2;
    slot s;
    float cold[VOCAB], got[VOCAB];
    add_random(&t, &random, 150);
    open_slot(&s, model, store.url);
    ask(&s, &t, CONTEXT, 100);
    t = s.held;
    assert_int_equal(kvf_llama_save(s.l.kv, NULL, 0, t.tokens, t.num), 3);
    close_slot(&s);
    open_slot(&s, model, NULL);
    ask(&s, &t, CONTEXT, 0);
    memcpy(cold, s.logits, sizeof cold);
    close_slot(&s);
    open_slot(&s, model, store.url);
    kvf_llama_report report = {.struct_size = sizeof report};
    assert_int_equal(kvf_llama_load(s.l.kv, &report, 0, t.tokens, t.num), 192);
    assert_int_equal(report.loaded_tokens, 192);
    assert_int_equal(report.why, KVF_WHY_NONE);
    close_slot(&s);
    ask_fresh(&store, &t, CONTEXT, got);
    assert_memory_equal(got, cold, sizeof cold);
    kvft_remove_dir(store.dir);
    llama_model_free(model);
}

/* One prompt in batches that end anywhere, another that goes on from its beginning, and the first again in one batch.
 * What has one name is one thing, whoever computed it. */
static void expect_one_thing(const char *arch, bool hybrid) {
    struct llama_model *model = lab_toy(arch, hybrid, 1);
    text longer = {.num = 0}, shorter;
    uint64_t random = 3;
    float got[VOCAB];
    add_random(&longer, &random, 420);
    shorter = longer;
    shorter.num = 146;
    for (size_t piece = 60; piece <= 140; piece += 40) {
        site pieces = new_site(model), others[2] = {new_site(model), new_site(model)};
        ask_fresh(&pieces, &longer, piece, got);
        ask_fresh(&others[0], &shorter, piece, got);
        ask_fresh(&others[1], &longer, CONTEXT, got);
        assert_true(expect_records(&pieces, others, 2, false, arch) > 3);
        kvft_remove_dir(pieces.dir);
        kvft_remove_dir(others[0].dir);
        kvft_remove_dir(others[1].dir);
    }
    llama_model_free(model);
}

static void test_batches_that_end_anywhere(void **state) {
    (void)state;
    expect_one_thing("llama", false);
    expect_one_thing("gemma3", false);
    expect_one_thing("jamba", true);
    expect_one_thing("mamba", false);
}

static void test_plain_attention(void **state) {
    (void)state;
    run_kind("llama", false, 10);
}

static void test_a_sliding_window(void **state) {
    (void)state;
    run_kind("gemma3", false, 4);
}

static void test_a_hybrid_model(void **state) {
    (void)state;
    run_kind("jamba", true, 4);
}

static void test_a_recurrent_model(void **state) {
    (void)state;
    run_kind("mamba", false, 3);
}

int main(void) {
    llama_log_set(lab_quiet, NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equal_answers),     cmocka_unit_test(test_saved_as_it_is),
        cmocka_unit_test(test_plain_attention),   cmocka_unit_test(test_batches_that_end_anywhere),
        cmocka_unit_test(test_a_sliding_window),  cmocka_unit_test(test_a_hybrid_model),
        cmocka_unit_test(test_a_recurrent_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
