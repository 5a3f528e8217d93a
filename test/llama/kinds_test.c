/* SPDX-License-Identifier: Apache-2.0
 *
 * Models with states: sliding windows, hybrid and recurrent ones. Toy models of every kind, and Gemma 3 270M
 * ($KVF_GEMMA). Blocks of another process are loaded. The answer equals a run with the same cuts and no store, to the
 * bit, and so do the greedy tokens after it, also with any record missing or damaged.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lab.h"

#include <cmocka.h>

#define NUM        1300u /* 20 blocks of 64, a tail of 19 tokens, and the last one; states at 1024, 1280 and 1299 */
#define SHARED     1100u /* of another prompt */
#define GREEDY     8u
#define MAX_FAULTS 8u

typedef struct kind {
    const char *arch;
    bool hybrid;
    bool swa_full;
    uint32_t resumes; /* where a prompt that shares SHARED tokens goes on */
    lab_meta more[6];
} kind;

static const kind kinds[] = {
    {.arch = "gemma3", .resumes = 1024},
    {.arch = "gemma3", .resumes = 1088, .swa_full = true, .more = {{"attention.sliding_window", 256}}},
    {.arch = "gemma3", .resumes = 1024, .more = {{"attention.sliding_window", 256}}},
    {.arch = "gpt-oss",
     .resumes = 1024,
     .more = {{"expert_count", 2}, {"expert_used_count", 2}, {"expert_feed_forward_length", 384}}},
    {.arch = "jamba", .hybrid = true, .resumes = 1024},
    {.arch = "lfm2", .hybrid = true, .resumes = 1024, .more = {{"attention.sliding_window", 0}}},
    {.arch = "qwen35",
     .resumes = 1024,
     .more = {{"ssm.inner_size", 256}, {"ssm.state_size", 128}, {"ssm.time_step_rank", 2}, {"ssm.group_count", 2}}},
    {.arch = "falcon-h1",
     .resumes = 1024,
     .more = {{"ssm.state_size", 128}, {"ssm.time_step_rank", 2}, {"ssm.group_count", 2}}},
    {.arch = "granitehybrid",
     .hybrid = true,
     .resumes = 1024,
     .more = {{"ssm.state_size", 128}, {"ssm.time_step_rank", 2}, {"ssm.group_count", 2}}},
    {.arch = "mamba", .resumes = 1024},
    {.arch = "mamba2",
     .resumes = 1024,
     .more = {{"ssm.state_size", 128}, {"ssm.time_step_rank", 2}, {"ssm.group_count", 2}}},
    {.arch = "rwkv6", .resumes = 1024},
};
#define NUM_KINDS (sizeof kinds / sizeof *kinds)

static const char *self;

/* ---- a model, its contexts, its prompts ---- */

typedef struct site {
    const kind *kind;
    struct llama_model *model;
    const char *path;
    llama_token *tokens, *other;
    char *dir, url[200];
} site;

static lab_config config_of(const kind *k) {
    return (lab_config){.kv_type = GGML_TYPE_F16, .flash = true, .n_ctx = 2048, .swa_full = k->swa_full};
}

static llama_token *prompt_of(const struct llama_model *model, unsigned seed) {
    llama_token *tokens = lab_prompt(NUM, seed);
    for (size_t i = 0; i < NUM; i++) {
        tokens[i] %= llama_vocab_n_tokens(llama_model_get_vocab(model));
    }
    return tokens;
}

/* index NUM_KINDS and the one behind it: the real model, its window cache small or full-sized. */
static bool open_site(site *s, size_t index, const char *url) {
    static const kind real[] = {{.arch = "Gemma 3 270M", .resumes = 1024},
                                {.arch = "Gemma 3 270M", .resumes = 1088, .swa_full = true}};
    const char *gemma = getenv("KVF_GEMMA");
    *s = (site){.kind = index < NUM_KINDS ? &kinds[index] : &real[index - NUM_KINDS], .path = MODEL_PATH};
    if (index < NUM_KINDS) {
        s->model = lab_toy_with(s->kind->arch, s->kind->hybrid, 1, s->kind->more);
    } else if (gemma != NULL) {
        s->path = gemma;
        s->model = llama_model_load_from_file(gemma, llama_model_default_params());
    }
    if (s->model == NULL) {
        return false;
    }
    s->tokens = prompt_of(s->model, 1);
    s->other = prompt_of(s->model, 2);
    memcpy(s->other, s->tokens, SHARED * sizeof *s->tokens);
    if (url != NULL) {
        snprintf(s->url, sizeof s->url, "%s", url);
    } else {
        s->dir = kvft_temp_dir();
        snprintf(s->url, sizeof s->url, "file:%s", s->dir);
    }
    return true;
}

static void close_site(site *s) {
    llama_model_free(s->model);
    free(s->tokens);
    free(s->other);
    if (s->dir != NULL) {
        kvft_remove_dir(s->dir);
    }
}

typedef struct answer {
    float *logits;
    llama_token greedy[GREEDY];
    kvf_llama_report report;
} answer;

static void generate(lab *l, llama_token out[GREEDY]) {
    for (size_t i = 0; i < GREEDY; i++) {
        const float *logits = llama_get_logits_ith(l->ctx, -1);
        size_t max = 0;
        for (size_t j = 1; j < lab_vocab(l); j++) {
            max = logits[j] > logits[max] ? j : max;
        }
        out[i] = (llama_token)max;
        assert_int_equal(llama_decode(l->ctx, llama_batch_get_one(&out[i], 1)), 0);
    }
}

/* In a context of its own; false: stopped, since it would have computed some of the first `stored` tokens. */
static bool try_to_ask(const site *s, answer *a, const char *url, const llama_token *tokens, uint32_t stored) {
    lab_config config = config_of(s->kind);
    lab l = lab_open_with(s->model, &config, url, s->path, lab_stop_below, &stored);
    if (l.status != KVF_OK) {
        fail_msg("%s: %s", s->kind->arch, l.err.what);
    }
    kvf_status status = kvf_llama_prefill(l.kv, &a->report, &l.err, 0, tokens, NUM);
    if (status == KVF_OK) {
        a->logits = lab_logits(&l);
        generate(&l, a->greedy);
        if (l.store != NULL) {
            kvft_flush_all(l.store);
        }
    }
    lab_close(&l);
    assert_true(status == KVF_OK || (status == KVF_CLOSED && stored > 0));
    return status == KVF_OK;
}

static answer ask(const site *s, const char *url, const llama_token *tokens) {
    answer a = {.report.struct_size = sizeof a.report};
    (void)try_to_ask(s, &a, url, tokens, 0);
    return a;
}

static answer ask_for_stored(const site *s, const llama_token *tokens, uint32_t stored) {
    answer a = {.report.struct_size = sizeof a.report};
    for (int tries = 0; tries < LAB_PATIENCE && !try_to_ask(s, &a, s->url, tokens, stored); tries++) {
    }
    if (a.logits == NULL) {
        fail_msg("%s: %u tokens are stored, and are not loaded", s->kind->arch, stored);
    }
    assert_int_equal(a.report.loaded_tokens, stored);
    return a;
}

static void expect_same(const site *s, const char *what, answer *got, const answer *expected) {
    size_t num = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(s->model));
    lab_difference d = lab_compare(expected->logits, got->logits, num);
    if (!d.identical || memcmp(got->greedy, expected->greedy, sizeof got->greedy) != 0) {
        fail_msg("%s, %s: not identical, NMSE %g, argmax %s, greedy %s, loaded %u", s->kind->arch, what, d.nmse,
                 d.same_argmax ? "equal" : "other",
                 memcmp(got->greedy, expected->greedy, sizeof got->greedy) == 0 ? "equal" : "other",
                 got->report.loaded_tokens);
    }
    free(got->logits);
}

/* ---- another process ---- */

static int child_main(char **argv) {
    site s;
    if (!open_site(&s, (size_t)atoi(argv[2]), argv[3])) {
        return 1;
    }
    answer a = ask(&s, argv[3], s.tokens);
    bool ok = a.report.saved_blocks > 0 && a.report.shed_blocks == 0 && a.report.loaded_tokens == 0;
    free(a.logits);
    close_site(&s);
    return ok ? 0 : 1;
}

static void store_elsewhere(size_t index, const char *url) {
    char number[16];
    snprintf(number, sizeof number, "%zu", index);
    pid_t pid = fork();
    if (pid == 0) {
        execl(self, self, "--child", number, url, (char *)NULL);
        _exit(127);
    }
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* ---- faults ---- */

/* Some of the records, of all kinds; each run stores again what was lost. */
static void damage_each(const site *s, const answer *expected) {
    static char files[LAB_MAX_FILES][400];
    size_t num = lab_list_files(s->dir, files, 0);
    uint32_t whole = 0;
    assert_true(num >= 3);
    size_t runs = num < MAX_FAULTS ? num : MAX_FAULTS;
    for (size_t run = 0; run < runs; run++) {
        size_t i = run * num / runs;
        bool gone = run % 2 == 0;
        if (gone) {
            assert_int_equal(unlink(files[i]), 0);
        } else {
            lab_flip(files[i]);
        }
        answer a = ask(s, s->url, s->tokens);
        whole += a.report.loaded_tokens == NUM - 1;
        expect_same(s, gone ? "a record is gone" : "a record is damaged", &a, expected);
    }
    assert_true(whole < runs); /* some of them were needed */
    /* On a busy machine a run may have computed what it did not find damaged. So the damage may be found only now, and
     * these runs are not stopped: they store again what was lost. */
    uint32_t loaded = 0;
    for (int tries = 0; tries < LAB_PATIENCE && loaded != NUM - 1; tries++) {
        answer a = ask(s, s->url, s->tokens);
        loaded = a.report.loaded_tokens;
        expect_same(s, "mended", &a, expected);
    }
    assert_int_equal(loaded, NUM - 1);
}

static void expect_foreign_is_not_loaded(const site *s) {
    site foreign = *s;
    foreign.model = lab_toy_with(s->kind->arch, s->kind->hybrid, 2, s->kind->more); /* the same shape, other weights */
    answer a = ask(&foreign, s->url, s->tokens);
    assert_int_equal(a.report.loaded_tokens, 0);
    free(a.logits);
    llama_model_free(foreign.model);
}

/* ---- all of it ---- */

static void run_kind(size_t index) {
    site s;
    if (!open_site(&s, index, NULL)) {
        fail_msg("no model of kind %s", kinds[index % NUM_KINDS].arch);
    }
    answer clean = ask(&s, NULL, s.tokens), clean_other = ask(&s, NULL, s.other);
    store_elsewhere(index, s.url);

    answer warm = ask_for_stored(&s, s.tokens, NUM - 1);
    printf("%-13s %s loaded %u of %u tokens, %.2f MB\n", s.kind->arch, s.kind->swa_full ? "(full)" : "      ",
           warm.report.loaded_tokens, NUM, (double)warm.report.loaded_bytes / 1e6);
    fflush(stdout);
    expect_same(&s, "all loaded", &warm, &clean);

    answer other = ask_for_stored(&s, s.other, s.kind->resumes);
    expect_same(&s, "partly loaded", &other, &clean_other);
    if (index < NUM_KINDS) {
        expect_foreign_is_not_loaded(&s);
        damage_each(&s, &clean);
    }
    free(clean.logits);
    free(clean_other.logits);
    close_site(&s);
}

static void test_every_kind(void **state) {
    (void)state;
    const char *only = getenv("KVFT_KIND");
    for (size_t i = 0; i < NUM_KINDS; i++) {
        if (only == NULL || strcmp(only, kinds[i].arch) == 0) {
            run_kind(i);
        }
    }
}

static void test_gemma(void **state) {
    (void)state;
    if (getenv("KVF_GEMMA") == NULL || getenv("KVFT_KIND") != NULL) {
        skip();
    }
    run_kind(NUM_KINDS);
    run_kind(NUM_KINDS + 1);
}

int main(int argc, char **argv) {
    self = argv[0];
    llama_log_set(lab_quiet, NULL);
    if (argc == 4 && strcmp(argv[1], "--child") == 0) {
        return child_main(argv);
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_kind), cmocka_unit_test(test_gemma)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
