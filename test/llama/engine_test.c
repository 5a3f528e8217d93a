/* SPDX-License-Identifier: Apache-2.0
 *
 * The llama.cpp engine on toy models of every kind: what it accepts and what it refuses; and faults of every kind in
 * the store, after which the answer is that of a clean run.
 */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <unistd.h>

#include "lab.h"

#include <cmocka.h>

#define NUM    300u /* 4 blocks of 64, a tail of 43 tokens, and the last one */
#define BLOCKS 4u

static llama_token *toy_prompt(unsigned seed) {
    llama_token *tokens = lab_prompt(NUM, seed);
    for (size_t i = 0; i < NUM; i++) {
        tokens[i] %= 128;
    }
    return tokens;
}

/* ---- what is refused ---- */

static void refused(const char *arch, const lab_meta *more, lab_config config, const char *because) {
    struct llama_model *model = lab_toy_with(arch, false, 1, more);
    if (model == NULL) {
        fail_msg("no toy model of kind %s", arch);
    }
    lab l = lab_open(model, &config, "mem:", MODEL_PATH);
    if (l.status != KVF_REFUSED || strstr(l.err.what, because) == NULL) {
        fail_msg("%s: %s: %s", arch, kvf_status_name(l.status), l.err.what);
    }
    lab_close(&l);
    llama_model_free(model);
}

static void test_what_is_not_proven_is_refused(void **state) {
    (void)state;
    lab_config plain = {.kv_type = GGML_TYPE_F16, .flash = true};
    lab_config split = plain;
    split.split = true;
    refused("llama", NULL, split, "unified");
    lab_config single = plain;
    single.n_seq = 1;
    refused("llama", NULL, single, "n_seq_max");
}

/* Kinds of memory that are known not to be known, and models that don't go from one token to the next. */
static void test_other_kinds_are_refused_with_their_reason(void **state) {
    (void)state;
    lab_config plain = {.kv_type = GGML_TYPE_F16, .flash = true};
    const lab_meta indexed[] = {{"expert_count", 2},
                                {"expert_used_count", 2},
                                {"expert_feed_forward_length", 384},
                                {"expert_shared_count", 1},
                                {"expert_gating_func", 2},
                                {"attention.indexer.head_count", 2},
                                {"attention.indexer.key_length", 128},
                                {"attention.indexer.top_k", 2},
                                {"attention.indexer.block_size", 64},
                                {"attention.indexer.local_blocks", 1},
                                {NULL, 0}};
    refused("minimax-m3", indexed, plain, "indexed or compressed caches");
    refused("dream", NULL, plain, "not a plain decoder");
}

static void test_bad_options_are_errors(void **state) {
    (void)state;
    struct llama_model *model = lab_toy("llama", false, 1);
    lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true};
    struct llama_context_params params = lab_params(&config);
    struct llama_context *ctx = llama_init_from_model(model, params);
    kvf_store *store = kvft_store("mem:");
    kvf_llama *kv = NULL;
    kvf_error err;
    const struct llama_model_params model_params = llama_model_default_params();
    kvf_llama_options good = {.struct_size = sizeof good,
                              .scratch_seq = 3,
                              .model_path = MODEL_PATH,
                              .context_params = &params,
                              .model_params = &model_params};
    kvf_llama_options o = good;
    o.model_path = "/nonexistent/model.gguf";
    assert_int_equal(kvf_llama_attach(&kv, &err, store, ctx, &o), KVF_CONFIG);
    assert_non_null(strstr(err.what, "/nonexistent/model.gguf"));
    o = good;
    o.scratch_seq = 4;
    assert_int_equal(kvf_llama_attach(&kv, &err, store, ctx, &o), KVF_LIMIT);
    assert_non_null(strstr(err.what, "scratch_seq is 4, n_seq_max 4"));
    o.scratch_seq = -1;
    assert_int_equal(kvf_llama_attach(&kv, &err, store, ctx, &o), KVF_LIMIT);
    o = good;
    o.struct_size = 0;
    assert_int_equal(kvf_llama_attach(&kv, &err, store, ctx, &o), KVF_LIMIT);
    assert_non_null(strstr(err.what, "struct_size"));
    o = good;
    o.block_tokens = 32;
    assert_int_equal(kvf_llama_attach(&kv, &err, store, ctx, &o), KVF_LIMIT);
    o = good;
    o.context_params = NULL;
    assert_int_equal(kvf_llama_attach(&kv, &err, store, ctx, &o), KVF_LIMIT);
    assert_non_null(strstr(err.what, "context_params"));
    o = good;
    o.model_path = NULL;
    assert_int_equal(kvf_llama_attach(&kv, &err, store, ctx, &o), KVF_LIMIT);
    assert_non_null(strstr(err.what, "model_path"));
    o = good;
    o.model_params = NULL;
    assert_int_equal(kvf_llama_attach(&kv, &err, store, ctx, &o), KVF_LIMIT);
    assert_non_null(strstr(err.what, "model_params"));
    assert_int_equal(kvf_llama_attach(&kv, &err, store, ctx, &good), KVF_OK);
    kvf_llama *second = NULL;
    llama_token token = 5;
    struct llama_batch batch = llama_batch_get_one(&token, 1);
    assert_int_equal(llama_decode(ctx, batch), 0); /* in sequence 0 */
    o = good;
    o.scratch_seq = 0;
    assert_int_equal(kvf_llama_attach(&second, &err, store, ctx, &o), KVF_REFUSED);
    assert_non_null(strstr(err.what, "in use"));
    kvf_llama_detach(kv);
    kvf_store_close(store);
    llama_free(ctx);
    llama_model_free(model);
}

/* Anything but a GGUF file would name blocks that belong to no model. None of it is waited for. */
static void test_the_model_file_must_be_gguf(void **state) {
    (void)state;
    struct llama_model *model = lab_toy("llama", false, 1);
    lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true};
    char *dir = kvft_temp_dir(), text[200], empty[200], fifo[200];
    snprintf(text, sizeof text, "%s/text.gguf", dir);
    snprintf(empty, sizeof empty, "%s/empty.gguf", dir);
    snprintf(fifo, sizeof fifo, "%s/fifo.gguf", dir);
    FILE *file = fopen(text, "we");
    assert_true(file != NULL && fputs("GGU is no model\n", file) >= 0 && fclose(file) == 0);
    file = fopen(empty, "we");
    assert_true(file != NULL && fclose(file) == 0);
    assert_int_equal(mkfifo(fifo, 0600), 0);
    const char *const paths[] = {text, empty, fifo, dir};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        lab l = lab_open(model, &config, "mem:", paths[i]);
        assert_int_equal(l.status, KVF_CONFIG);
        assert_non_null(strstr(l.err.what, "not a GGUF file"));
        assert_non_null(strstr(l.err.what, paths[i]));
        lab_close(&l);
    }
    kvft_remove_dir(dir);
    llama_model_free(model);
}

/* ---- prefill ---- */

static void test_prompts_of_every_length(void **state) {
    (void)state;
    struct llama_model *model = lab_toy("llama", false, 1);
    lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true, .n_ctx = 512};
    lab l = lab_open(model, &config, "mem:", MODEL_PATH);
    assert_int_equal(l.status, KVF_OK);
    llama_token *tokens = lab_prompt(600, 3);
    for (size_t i = 0; i < 600; i++) {
        tokens[i] %= 128;
    }
    const size_t lengths[] = {1, 2, 63, 64, 65, 127, 128, 129, 300, 511, 512};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        kvf_llama_report report = {.struct_size = sizeof report};
        float *logits = lab_prefill(&l, &report, 0, tokens, lengths[i]);
        assert_int_equal(report.resident_tokens + report.loaded_tokens + report.computed_tokens, lengths[i]);
        assert_true(report.computed_tokens >= 1);
        assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(l.ctx), 0), (int)lengths[i] - 1);
        free(logits);
    }
    kvf_error err;
    assert_int_equal(kvf_llama_prefill(l.kv, NULL, &err, 0, tokens, 0), KVF_LIMIT);
    assert_int_equal(kvf_llama_prefill(l.kv, NULL, &err, 0, tokens, 513), KVF_LIMIT);
    assert_int_equal(kvf_llama_prefill(l.kv, NULL, &err, 3, tokens, 10), KVF_LIMIT); /* scratch */
    assert_int_equal(kvf_llama_prefill(l.kv, NULL, &err, 9, tokens, 10), KVF_LIMIT);
    const llama_token unknown[] = {-1, (llama_token)lab_vocab(&l)};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        kvf_llama_report report, zero = {.struct_size = sizeof zero};
        memset(&report, 0xff, sizeof report);
        report.struct_size = sizeof report;
        tokens[3] = unknown[i];
        assert_int_equal(kvf_llama_prefill(l.kv, &report, &err, 0, tokens, 300), KVF_LIMIT);
        assert_non_null(strstr(err.what, "token 3 is "));
        assert_memory_equal(&report, &zero, sizeof report);
        assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(l.ctx), 0), 511); /* as it was */
    }
    free(tokens);
    lab_close(&l);
    llama_model_free(model);
}

static int stop_at_128(void *ctx, uint32_t done, uint32_t num) {
    (void)num;
    *(uint32_t *)ctx = done;
    return done >= 128;
}

static void test_progress_can_stop(void **state) {
    (void)state;
    struct llama_model *model = lab_toy("llama", false, 1);
    lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true, .n_ubatch = 64};
    struct llama_context_params params = lab_params(&config);
    struct llama_context *ctx = llama_init_from_model(model, params);
    kvf_store *store = kvft_store("mem:");
    uint32_t seen = 0;
    const struct llama_model_params model_params = llama_model_default_params();
    kvf_llama_options o = {.struct_size = sizeof o,
                           .scratch_seq = 3,
                           .model_path = MODEL_PATH,
                           .context_params = &params,
                           .model_params = &model_params,
                           .block_tokens = 64,
                           .progress = stop_at_128,
                           .progress_ctx = &seen};
    kvf_llama *kv = NULL;
    kvf_error err;
    assert_int_equal(kvf_llama_attach(&kv, &err, store, ctx, &o), KVF_OK);
    llama_token *tokens = toy_prompt(1);
    assert_int_equal(kvf_llama_prefill(kv, NULL, &err, 0, tokens, NUM), KVF_CLOSED);
    assert_int_equal(seen, 128);
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(ctx), 0), 127);
    free(tokens);
    kvf_llama_detach(kv);
    kvf_store_close(store);
    llama_free(ctx);
    llama_model_free(model);
}

static void test_chat_keeps_what_is_resident(void **state) {
    (void)state;
    struct llama_model *model = lab_toy("llama", false, 1);
    lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true};
    lab l = lab_open(model, &config, NULL, NULL); /* without a store: computing only */
    assert_int_equal(l.status, KVF_OK);
    llama_token *tokens = toy_prompt(1);
    kvf_llama_report report = {.struct_size = sizeof report};
    float *first = lab_prefill(&l, &report, 0, tokens, 200);
    free(first);
    float *again = lab_prefill(&l, &report, 0, tokens, NUM);
    assert_int_equal(report.resident_tokens, 192);
    float *clean = lab_prefill(&l, &report, 1, tokens, NUM);
    assert_int_equal(report.resident_tokens, 0);
    assert_true(lab_compare(clean, again, lab_vocab(&l)).nmse <= 1e-3); /* other cells */
    free(again);
    free(clean);
    free(tokens);
    lab_close(&l);
    llama_model_free(model);
}

/* ---- what makes another space ---- */

static void digest_of(struct llama_model *model, lab_config config, const char *path, kvf_digest *out) {
    lab l = lab_open(model, &config, "mem:", path);
    if (l.status != KVF_OK) {
        fail_msg("%s", l.err.what);
    }
    kvf_space_digest(kvf_llama_space(l.kv), out);
    lab_close(&l);
}

static void test_everything_that_matters_changes_the_space(void **state) {
    (void)state;
    struct llama_model *model = lab_toy("llama", false, 1);
    struct llama_model *same_shape = lab_toy("llama", false, 2);
    lab_config base = {.kv_type = GGML_TYPE_F16, .flash = true};
    kvf_digest first, other;
    digest_of(model, base, MODEL_PATH, &first);
    digest_of(model, base, MODEL_PATH, &other);
    assert_memory_equal(&first, &other, sizeof first);
    lab_config threads = base;
    threads.threads = 1; /* does not matter */
    digest_of(model, threads, MODEL_PATH, &other);
    assert_memory_equal(&first, &other, sizeof first);

    lab_config changed = base;
    changed.kv_type = GGML_TYPE_Q8_0;
    digest_of(model, changed, MODEL_PATH, &other);
    assert_memory_not_equal(&first, &other, sizeof first);
    changed = base;
    changed.flash = false;
    digest_of(model, changed, MODEL_PATH, &other);
    assert_memory_not_equal(&first, &other, sizeof first);
    /* The file is the same, and so are all shapes: the probe tells the weights apart. */
    digest_of(same_shape, base, MODEL_PATH, &other);
    assert_memory_not_equal(&first, &other, sizeof first);
    llama_model_free(model);
    llama_model_free(same_shape);
}

/* ---- faults in the store ---- */

typedef struct damage_site {
    char *dir;
    char url[200];
    char paths[BLOCKS][400];
    uint8_t *records[BLOCKS]; /* what lies there */
    size_t lens[BLOCKS];
    struct llama_model *model;
    llama_token *tokens;
    float *clean;
    size_t vocab;
} damage_site;

static const lab_config site_config = {.kv_type = GGML_TYPE_F16, .flash = true};

static void find_paths(damage_site *site, const lab *l) {
    kvf_digest digest;
    kvf_key keys[BLOCKS];
    uint32_t tokens[NUM];
    kvf_space_digest(kvf_llama_space(l->kv), &digest);
    for (size_t i = 0; i < NUM; i++) {
        tokens[i] = (uint32_t)site->tokens[i];
    }
    assert_int_equal(kvf_chain(kvf_llama_space(l->kv), keys, BLOCKS, tokens, NUM), BLOCKS);
    for (size_t i = 0; i < BLOCKS; i++) {
        char *at = site->paths[i];
        at += sprintf(at, "%s/kvf1/", site->dir);
        for (size_t b = 0; b < 8; b++) {
            at += sprintf(at, "%02x", digest.bytes[b]);
        }
        at += sprintf(at, "/%02x/", keys[i].bytes[0]);
        for (size_t b = 0; b < 32; b++) {
            at += sprintf(at, "%02x", keys[i].bytes[b]);
        }
    }
}

static uint8_t *read_whole(const char *path, size_t *len) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0) {
        fail_msg("%s is not there", path);
    }
    *len = (size_t)st.st_size;
    uint8_t *bytes = malloc(*len);
    assert_int_equal(read(fd, bytes, *len), st.st_size);
    close(fd);
    return bytes;
}

static void write_whole(const char *path, const uint8_t *bytes, size_t len) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, len), (ssize_t)len);
    close(fd);
}

/* Stores the prompt's blocks into a fresh folder. */
static void fill(damage_site *site) {
    lab l = lab_open(site->model, &site_config, site->url, MODEL_PATH);
    kvf_llama_report report = {.struct_size = sizeof report};
    float *logits = lab_prefill(&l, &report, 0, site->tokens, NUM);
    kvft_flush_all(l.store);
    find_paths(site, &l);
    for (size_t i = 0; i < BLOCKS; i++) {
        site->records[i] = read_whole(site->paths[i], &site->lens[i]);
    }
    free(logits);
    lab_close(&l);
}

static void flip(const char *path, off_t at) {
    int fd = open(path, O_RDWR);
    uint8_t byte = 0;
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

typedef enum harm { FLIPPED, GONE, CUT } harm;

typedef struct damage {
    const char *what;
    size_t block; /* the damaged one */
    harm harm;
    off_t at;       /* the byte that is flipped, or the length that is left */
    kvf_reason why; /* KVF_WHY_NONE: any that a record gives */
} damage;

/* All blocks are stored, and this one is damaged, whatever earlier runs have left. */
static void spoil(const damage_site *site, const damage *d) {
    for (size_t i = 0; i < BLOCKS; i++) {
        write_whole(site->paths[i], site->records[i], site->lens[i]);
    }
    if (d->harm == FLIPPED) {
        flip(site->paths[d->block], d->at);
    } else {
        const char *path = site->paths[d->block];
        assert_int_equal(d->harm == GONE ? unlink(path) : truncate(path, d->at), 0);
    }
}

/* False: stopped, since it would have computed some of the first `stored` tokens. */
static bool try_to_load(const damage_site *site, const char *what, uint32_t stored, kvf_llama_report *report) {
    lab l = lab_open_with(site->model, &site_config, site->url, MODEL_PATH, lab_stop_below, &stored);
    kvf_status status = kvf_llama_prefill(l.kv, report, &l.err, 0, site->tokens, NUM);
    if (status == KVF_OK) {
        float *logits = lab_logits(&l);
        if (memcmp(logits, site->clean, site->vocab * sizeof *logits) != 0) {
            fail_msg("%s: the answer is not that of a clean run", what);
        }
        free(logits);
        kvft_flush_all(l.store);
    }
    lab_close(&l);
    assert_true(status == KVF_OK || status == KVF_CLOSED);
    return status == KVF_OK;
}

static bool is_of_a_record(kvf_reason why) {
    return why != KVF_WHY_NONE && why != KVF_WHY_SLOW && why != KVF_WHY_BUDGET;
}

/* On a busy machine computing a block may promise to be sooner than loading it: then the run is stopped, or it does not
 * notice the damage. It counts once it loads all blocks before the damaged one, and says what is wrong with that. */
static void meet_damage(const damage_site *site, const damage *d) {
    kvf_llama_report report = {.struct_size = sizeof report};
    uint32_t before = (uint32_t)d->block * 64;
    for (int tries = 0; tries < LAB_PATIENCE; tries++) {
        spoil(site, d);
        if (try_to_load(site, d->what, before, &report) && report.loaded_tokens == before &&
            (d->why != KVF_WHY_NONE ? report.why == d->why : is_of_a_record(report.why))) {
            return;
        }
    }
    fail_msg("%s: %u tokens loaded, then: %s", d->what, report.loaded_tokens, kvf_reason_name(report.why));
}

/* What was damaged has been removed, and was stored again by the run that met it. */
static void expect_mended(const damage_site *site, const damage *d) {
    kvf_llama_report report = {.struct_size = sizeof report};
    meet_damage(site, d);
    for (int tries = 0; tries < LAB_PATIENCE; tries++) {
        if (try_to_load(site, d->what, NUM - 1, &report)) {
            assert_int_equal(report.loaded_tokens, NUM - 1); /* the tail too */
            return;
        }
    }
    fail_msg("%s: not mended: %u tokens loaded, then: %s", d->what, report.loaded_tokens, kvf_reason_name(report.why));
}

static void test_faults_end_as_misses(void **state) {
    (void)state;
    damage_site site = {.dir = kvft_temp_dir(), .model = lab_toy("llama", false, 1), .tokens = toy_prompt(9)};
    snprintf(site.url, sizeof site.url, "file:%s", site.dir);
    lab clean = lab_open(site.model, &site_config, NULL, NULL);
    kvf_llama_report report = {.struct_size = sizeof report};
    site.vocab = lab_vocab(&clean);
    site.clean = lab_prefill(&clean, &report, 0, site.tokens, NUM);
    lab_close(&clean);
    fill(&site);

    const damage damages[] = {
        {"flipped payload", 2, FLIPPED, 128 + 64 * 4 + 5000, KVF_WHY_CHECKSUM},
        {"flipped token", 1, FLIPPED, 128 + 7, KVF_WHY_CHECKSUM},
        {"gone", 3, GONE, 0, KVF_WHY_ABSENT},
        {"truncated", 0, CUT, 5000, KVF_WHY_TRUNCATED},
    };
    for (size_t i = 0; i < sizeof damages / sizeof damages[0]; i++) {
        expect_mended(&site, &damages[i]);
    }
    const off_t in_header[] = {0, 4, 6, 9, 20, 50, 80, 84, 90, 100, 115, 125};
    for (size_t i = 0; i < sizeof in_header / sizeof in_header[0]; i++) {
        expect_mended(&site, &(damage){"flipped header", 2, FLIPPED, in_header[i], KVF_WHY_NONE});
    }

    for (size_t i = 0; i < BLOCKS; i++) {
        free(site.records[i]);
    }
    free(site.clean);
    free(site.tokens);
    llama_model_free(site.model);
    kvft_remove_dir(site.dir);
}

/* ---- a secret that is replaced ---- */

static size_t load_under(struct llama_model *model, const char *url, const llama_token *tokens, const char *secret,
                         const char *previous) {
    const lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true, .secret = secret, .previous_secret = previous};
    lab l = lab_open(model, &config, url, MODEL_PATH);
    assert_int_equal(l.status, KVF_OK);
    size_t loaded = kvf_llama_load(l.kv, NULL, 0, tokens, NUM);
    kvft_flush_all(l.store);
    lab_close(&l);
    return loaded;
}

static void test_a_secret_is_replaced(void **state) {
    (void)state;
    static const char old_secret[] = "the secret of last year", new_secret[] = "the secret of this year";
    struct llama_model *model = lab_toy("llama", false, 1);
    llama_token *tokens = toy_prompt(1);
    char *dir = kvft_temp_dir(), url[200];
    snprintf(url, sizeof url, "file:%s", dir);
    lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true, .secret = old_secret};
    lab l = lab_open(model, &config, url, MODEL_PATH);
    assert_int_equal(l.status, KVF_OK);
    free(lab_prefill(&l, NULL, 0, tokens, NUM));
    kvft_flush_all(l.store);
    lab_close(&l);
    assert_int_equal(load_under(model, url, tokens, new_secret, NULL), 0);
    assert_int_equal(load_under(model, url, tokens, new_secret, old_secret), NUM - 1);
    assert_int_equal(load_under(model, url, tokens, new_secret, NULL), NUM - 1); /* stored again by that load */
    config = (lab_config){.kv_type = GGML_TYPE_F16, .flash = true, .previous_secret = old_secret};
    l = lab_open(model, &config, url, MODEL_PATH);
    assert_int_equal(l.status, KVF_LIMIT);
    assert_non_null(strstr(l.err.what, "previous secret"));
    lab_close(&l);
    free(tokens);
    llama_model_free(model);
    kvft_remove_dir(dir);
}

int main(void) {
    llama_log_set(lab_quiet, NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_not_proven_is_refused),
        cmocka_unit_test(test_other_kinds_are_refused_with_their_reason),
        cmocka_unit_test(test_bad_options_are_errors),
        cmocka_unit_test(test_the_model_file_must_be_gguf),
        cmocka_unit_test(test_prompts_of_every_length),
        cmocka_unit_test(test_progress_can_stop),
        cmocka_unit_test(test_chat_keeps_what_is_resident),
        cmocka_unit_test(test_everything_that_matters_changes_the_space),
        cmocka_unit_test(test_faults_end_as_misses),
        cmocka_unit_test(test_a_secret_is_replaced),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
