/* SPDX-License-Identifier: Apache-2.0
 *
 * check-exact: is the answer the same with and without a hit? On the real model, by KV type, flash attention on and
 * off:
 *
 *   again      the same prompt, all blocks loaded into the same cells          bit-identical logits
 *   partly     some blocks loaded, the rest of the whole blocks computed       bit-identical
 *   process    stored by another process, loaded by this one                   bit-identical
 *   greedy     16 tokens after a load, as after a prefill                      the same tokens
 *   beside     another sequence holds cells in front                           same argmax, NMSE <= 1e-3
 *   slot       loaded into another sequence of the same context, both in use   same argmax, NMSE <= 1e-3
 *   fragments  the free cells are not contiguous                               same argmax, NMSE <= 1e-3
 *
 * The oracle is a run with the same cuts and no store. $KVFT_EXACT=full: all types that `kvferry run`
 * takes (llama.cpp wants flash attention for quantized values); otherwise those that users have.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lab.h"

#include <cmocka.h>

#define NUM      220u /* 3 blocks of 64, a tail of 27 tokens, and the last one */
#define BLOCKS   3u
#define GREEDY   16u
#define MAX_NMSE 1e-3

static struct llama_model *model;
static const char *self;
static uint32_t must_load; /* of so many first tokens none may be computed: it stops */
static unsigned cells, identical_cells, failed_cells;
static double worst;

static size_t vocab_size(void) {
    return (size_t)llama_vocab_n_tokens(llama_model_get_vocab(model));
}

/* ---- one cell of the table ---- */

typedef struct verdict {
    lab_difference d;
    bool loaded; /* as many tokens as the case means to load */
    bool must_be_identical;
} verdict;

static void show(const char *name, const verdict *v) {
    bool ok = v->loaded && v->d.same_argmax && v->d.nmse <= MAX_NMSE && (v->d.identical || !v->must_be_identical);
    char text[40];
    if (!v->loaded) {
        snprintf(text, sizeof text, "NOT LOADED");
    } else if (v->d.identical) {
        snprintf(text, sizeof text, "identical");
    } else {
        snprintf(text, sizeof text, "%s%.0e%s", v->d.same_argmax ? "" : "OTHER ARGMAX ", v->d.nmse,
                 ok ? "" : " FAILED");
    }
    printf(" %s %-11s", name, text);
    fflush(stdout);
    cells++;
    identical_cells += v->d.identical && v->loaded;
    failed_cells += !ok;
    if (v->loaded && v->d.nmse > worst) {
        worst = v->d.nmse;
    }
}

static lab open_with_store(const lab_config *config, const char *url) {
    return lab_open_with(model, config, url, getenv("KVF_MODEL"), lab_stop_below, &must_load);
}

static void clear(lab *l) {
    llama_memory_clear(llama_get_memory(l->ctx), true);
}

/* Leaves the memory as the case wants to find it. */
typedef void prepare(lab *l);

/* On a busy machine the store's answer may come so late that computing begins: then it is stopped, and asked again. */
static verdict prefill_and_compare(lab *l, prepare *before, llama_seq_id seq, const llama_token *tokens,
                                   const float *oracle, size_t blocks, bool must_be_identical) {
    kvf_llama_report report = {.struct_size = sizeof report};
    kvf_error err = {.status = KVF_OK};
    size_t stored = blocks == BLOCKS ? NUM - 1 : blocks * 64;
    kvf_status status = KVF_CLOSED;
    for (int tries = 0; tries < LAB_PATIENCE && status == KVF_CLOSED; tries++) {
        must_load = 0;
        before(l);
        must_load = (uint32_t)stored;
        status = kvf_llama_prefill(l->kv, &report, &err, seq, tokens, NUM);
    }
    must_load = 0;
    if (status != KVF_OK) {
        return (verdict){.loaded = false};
    }
    float *logits = lab_logits(l);
    verdict v = {.d = lab_compare(oracle, logits, vocab_size()),
                 .loaded = report.loaded_tokens == stored,
                 .must_be_identical = must_be_identical};
    free(logits);
    return v;
}

/* ---- the cases ---- */

static llama_token best(lab *l) {
    const float *logits = llama_get_logits_ith(l->ctx, -1);
    size_t max = 0;
    for (size_t i = 1; i < vocab_size(); i++) {
        max = logits[i] > logits[max] ? i : max;
    }
    return (llama_token)max;
}

static void generate(lab *l, llama_token out[GREEDY]) {
    for (size_t i = 0; i < GREEDY; i++) {
        out[i] = best(l);
        struct llama_batch batch = llama_batch_get_one(&out[i], 1);
        if (llama_decode(l->ctx, batch) != 0) {
            abort();
        }
    }
}

static void case_greedy(lab *l, const llama_token *tokens, const llama_token expected[GREEDY], const float *oracle) {
    llama_token got[GREEDY];
    verdict v = prefill_and_compare(l, clear, 0, tokens, oracle, BLOCKS, true);
    generate(l, got);
    v.d.same_argmax = memcmp(got, expected, sizeof got) == 0;
    v.d.identical = v.d.identical && v.d.same_argmax;
    show("greedy", &v);
}

/* Another store, into which only the first `blocks` blocks are put. */
static void case_partly(lab_config config, const llama_token *tokens, const float *oracle, size_t blocks) {
    char *dir = kvft_temp_dir(), url[200];
    snprintf(url, sizeof url, "file:%s", dir);
    lab l = open_with_store(&config, url);
    kvf_llama_report report = {.struct_size = sizeof report};
    free(lab_prefill(&l, &report, 0, tokens, blocks * 64 + 1));
    verdict v = prefill_and_compare(&l, clear, 0, tokens, oracle, blocks, true);
    show("partly", &v);
    lab_close(&l);
    kvft_remove_dir(dir);
}

static void occupy(lab *l, llama_seq_id seq, size_t num, unsigned seed) {
    llama_token *other = lab_prompt(num, seed);
    struct llama_batch batch = llama_batch_init((int32_t)num, 0, 1);
    batch.n_tokens = (int32_t)num;
    for (size_t i = 0; i < num; i++) {
        batch.token[i] = other[i];
        batch.pos[i] = (llama_pos)i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i] = i + 1 == num;
    }
    if (llama_decode(l->ctx, batch) != 0) {
        abort();
    }
    llama_batch_free(batch);
    free(other);
}

static void put_other_in_front(lab *l) {
    clear(l);
    occupy(l, 1, 37, 5);
}

static void case_beside(lab *l, const llama_token *tokens, const float *oracle) {
    verdict v = prefill_and_compare(l, put_other_in_front, 0, tokens, oracle, BLOCKS, false);
    show("beside", &v);
}

static void keep_the_first(lab *l) {
    llama_memory_seq_rm(llama_get_memory(l->ctx), 2, -1, -1);
}

static void case_slot(lab *l, const llama_token *tokens, const float *oracle) {
    verdict first = prefill_and_compare(l, clear, 0, tokens, oracle, BLOCKS, true);
    verdict second = prefill_and_compare(l, keep_the_first, 2, tokens, oracle, BLOCKS, false);
    second.loaded = second.loaded && first.loaded && first.d.identical;
    show("slot", &second);
}

/* Cells of two sequences alternate, then one of them goes: what is free lies in pieces. */
static void free_pieces(lab *l) {
    clear(l);
    llama_memory_t mem = llama_get_memory(l->ctx);
    occupy(l, 1, 100, 6);
    for (llama_pos at = 0; at < 100; at += 20) {
        llama_memory_seq_rm(mem, 1, at, at + 10);
    }
}

static void case_fragments(lab *l, const llama_token *tokens, const float *oracle) {
    verdict v = prefill_and_compare(l, free_pieces, 0, tokens, oracle, BLOCKS, false);
    show("fragments", &v);
}

/* ---- another process ---- */

static int child_main(char **argv) {
    lab_config config = {.kv_type = (enum ggml_type)atoi(argv[2]), .flash = atoi(argv[3]) != 0};
    model = lab_model();
    lab l = lab_open(model, &config, argv[4], getenv("KVF_MODEL"));
    if (l.status != KVF_OK) {
        return 1;
    }
    llama_token *tokens = lab_prompt(NUM, 1);
    kvf_llama_report report = {.struct_size = sizeof report};
    free(lab_prefill(&l, &report, 0, tokens, NUM));
    kvft_flush_all(l.store);
    lab_close(&l);
    return report.saved_blocks == BLOCKS + 1 ? 0 : 1; /* and the tail */
}

static bool store_elsewhere(const lab_config *config, const char *url) {
    char type[16], flash[4];
    snprintf(type, sizeof type, "%d", (int)config->kv_type);
    snprintf(flash, sizeof flash, "%d", config->flash);
    pid_t pid = fork();
    if (pid == 0) {
        execl(self, self, "--child", type, flash, url, (char *)NULL);
        _exit(127);
    }
    int status = 0;
    return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/* ---- the table ---- */

static void run_config(const char *name, enum ggml_type type, bool flash) {
    lab_config config = {.kv_type = type, .flash = flash};
    char *dir = kvft_temp_dir(), url[200];
    snprintf(url, sizeof url, "file:%s", dir);
    llama_token *tokens = lab_prompt(NUM, 1), expected[GREEDY];
    kvf_llama_report report = {.struct_size = sizeof report};

    lab clean = lab_open(model, &config, NULL, NULL);
    if (clean.status != KVF_OK) {
        fail_msg("%s: %s", name, clean.err.what);
    }
    float *oracle = lab_prefill(&clean, &report, 0, tokens, NUM);
    generate(&clean, expected);
    lab_close(&clean);

    printf("%-6s %-3s ", name, flash ? "on" : "off");
    bool stored = store_elsewhere(&config, url);
    lab l = open_with_store(&config, url);
    verdict process = prefill_and_compare(&l, clear, 0, tokens, oracle, BLOCKS, true);
    process.loaded = process.loaded && stored;
    show("process", &process);
    verdict again = prefill_and_compare(&l, clear, 0, tokens, oracle, BLOCKS, true);
    show("again", &again);
    case_greedy(&l, tokens, expected, oracle);
    case_beside(&l, tokens, oracle);
    case_slot(&l, tokens, oracle);
    case_fragments(&l, tokens, oracle);
    lab_close(&l);
    case_partly(config, tokens, oracle, 1);
    case_partly(config, tokens, oracle, 2);
    printf("\n");
    free(oracle);
    free(tokens);
    kvft_remove_dir(dir);
}

static void test_the_table(void **state) {
    (void)state;
    const char *path = getenv("KVF_MODEL");
    if (path == NULL) {
        skip();
    }
    const char *mode = getenv("KVFT_EXACT");
    model = lab_model();
    assert_non_null(model);
    printf("KV     FA\n");
    run_config("f16", GGML_TYPE_F16, true);
    run_config("f16", GGML_TYPE_F16, false);
    run_config("q8_0", GGML_TYPE_Q8_0, true);
    if (mode != NULL && strcmp(mode, "full") == 0) {
        run_config("f32", GGML_TYPE_F32, true);
        run_config("f32", GGML_TYPE_F32, false);
        run_config("bf16", GGML_TYPE_BF16, true);
        run_config("bf16", GGML_TYPE_BF16, false);
        run_config("q5_1", GGML_TYPE_Q5_1, true);
        run_config("q5_0", GGML_TYPE_Q5_0, true);
        run_config("q4_1", GGML_TYPE_Q4_1, true);
        run_config("q4_0", GGML_TYPE_Q4_0, true);
        run_config("iq4_nl", GGML_TYPE_IQ4_NL, true);
    }
    llama_model_free(model);
    assert_int_equal(failed_cells, 0);
    assert_true(identical_cells > 0);
}

int main(int argc, char **argv) {
    self = argv[0];
    if (argc == 5 && strcmp(argv[1], "--child") == 0) {
        return child_main(argv);
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_the_table)};
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    printf(
        "check-exact: %u cases, %u bit-identical, the others same argmax and NMSE at most %.0e (<= 1e-3), %u failed\n",
        cells, identical_cells, worst, failed_cells);
    const char *mode = getenv("KVFT_EXACT");
    return mode != NULL && strcmp(mode, "full") == 0 && cells == 0 ? 1 : failed; /* as a check, no cases are no proof */
}
