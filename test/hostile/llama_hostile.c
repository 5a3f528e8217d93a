/* SPDX-License-Identifier: Apache-2.0
 *
 * check-hostile, llama.cpp: changed records with valid headers and checksums, for contexts of every kind of memory, on
 * toy models. The process survives, and later computes without them what it computed before.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "hostile/hostile.h"
#include "llama/lab.h"

#define NUM          300u /* 4 blocks of 64, and a tail of 43; states at 256 and 299 */
#define LOOK_EVERY   8u
#define GROWTH_BYTES ((size_t)96 << 20)

typedef struct kind {
    const char *arch;
    bool hybrid, flash, swa_full;
    enum ggml_type kv_type;
    lab_meta more[6];
} kind;

static struct llama_model *model;
static lab l;
static llama_token tokens[NUM];
static float *clean; /* logits of what follows the prompt, computed without the store */
static char *dir;
static char files[LAB_MAX_FILES][400];
static kvft_buffer records[LAB_MAX_FILES];
static size_t num_files, resident_bytes, count;

static size_t most_resident(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (size_t)usage.ru_maxrss * 1024;
}

/* Tokens of the prompt from `first` on, behind what the sequence holds; the logits of the last one. */
static const float *compute(llama_seq_id seq, size_t first, size_t num) {
    struct llama_batch batch = llama_batch_init(NUM, 0, 1);
    for (size_t i = first; i < first + num; i++) {
        int32_t at = batch.n_tokens++;
        batch.token[at] = tokens[i];
        batch.pos[at] = (llama_pos)i;
        batch.n_seq_id[at] = 1;
        batch.seq_id[at][0] = seq;
        batch.logits[at] = i + 1 == first + num;
    }
    int32_t rc = llama_decode(l.ctx, batch);
    llama_batch_free(batch);
    if (rc != 0) {
        hostile_fault("llama_decode fails behind what was loaded");
        return clean;
    }
    return llama_get_logits_ith(l.ctx, -1);
}

static void restore(void) {
    for (size_t i = 0; i < num_files; i++) {
        kvft_file_write(files[i], &records[i]);
    }
}

/* Another sequence, without the store, beside the one that holds what was loaded: nothing of that reaches it. */
static bool is_clean(void) {
    llama_memory_seq_rm(llama_get_memory(l.ctx), 1, -1, -1);
    lab_difference d = lab_compare(clean, compute(1, 0, NUM), lab_vocab(&l));
    return d.same_argmax && d.nmse < 1e-3;
}

static bool open_kind(const kind *k) {
    lab_config config = {.kv_type = k->kv_type, .flash = k->flash, .swa_full = k->swa_full, .n_ctx = 1024};
    char url[300];
    llama_log_set(lab_quiet, NULL);
    model = lab_toy_with(k->arch, k->hybrid, 1, k->more);
    dir = kvft_temp_dir();
    snprintf(url, sizeof url, "file:%s", dir);
    l = lab_open(model, &config, url, MODEL_PATH);
    if (l.status != KVF_OK) {
        fprintf(stderr, "%s: %s\n", k->arch, l.err.what);
        abort();
    }
    llama_token *prompt = lab_prompt(NUM, 1);
    for (size_t i = 0; i < NUM; i++) {
        tokens[i] = prompt[i] % 128;
    }
    free(prompt);
    kvf_llama_report report = {.struct_size = sizeof report};
    free(lab_prefill(&l, &report, 0, tokens, NUM));
    kvft_flush_all(l.store);
    num_files = lab_list_files(dir, files, 0);
    for (size_t i = 0; i < num_files; i++) {
        records[i] = kvft_file_read(files[i]);
    }
    llama_memory_seq_rm(llama_get_memory(l.ctx), 0, -1, -1);
    size_t bytes = lab_vocab(&l) * sizeof *clean;
    clean = malloc(bytes);
    memcpy(clean, compute(1, 0, NUM), bytes);
    resident_bytes = most_resident();
    return num_files >= 2;
}

/* What others may write is not lent but loaded: blocks and states come another way. */
static void share_folder(bool shared) {
    char root[300];
    snprintf(root, sizeof root, "%s/kvf1", dir);
    if (chmod(root, shared ? 0777 : 0700) != 0) {
        perror(root);
        abort();
    }
}

static void run(uint64_t *random) {
    share_folder(hostile_below(random, 2) == 0);
    size_t i = hostile_below(random, num_files), at = 0, len = 0;
    kvft_buffer record = kvft_buffer_of(records[i].data, records[i].len);
    if (!kvft_payload_of(&record, &at, &len)) {
        abort();
    }
    kvft_buffer payload = kvft_buffer_of(record.data + at, len);
    kvft_mutate(&payload, random);
    bool changed = payload.len != len || memcmp(payload.data, record.data + at, len) != 0;
    kvft_forge_payload(&record, &payload);
    kvft_file_write(files[i], &record);
    size_t loaded = kvf_llama_load(l.kv, NULL, 0, tokens, NUM);
    if (loaded > 0) {
        hostile_hit(loaded < NUM - 1 || !changed, true);
        (void)compute(0, loaded, 1);
    }
    kvft_file_write(files[i], &records[i]);
    if (count++ % LOOK_EVERY == 0 && !is_clean()) {
        hostile_fault("what is computed without the store is not what it was");
        llama_memory_clear(llama_get_memory(l.ctx), true);
    }
    size_t resident = most_resident();
    hostile_memory(resident > resident_bytes ? resident - resident_bytes : 0, GROWTH_BYTES);
    kvft_buffer_free(&payload);
    kvft_buffer_free(&record);
}

static void end(void) {
    restore();
    if (kvf_llama_load(l.kv, NULL, 0, tokens, NUM) != NUM - 1) {
        hostile_fault("what is whole does not load");
    }
    lab_close(&l);
    kvft_remove_dir(dir);
    llama_model_free(model);
    free(clean);
}

/* ---- the kinds ---- */

#define PART(name, share, ...)               \
    static bool begin_##name(void) {         \
        static const kind k = {__VA_ARGS__}; \
        return open_kind(&k);                \
    }                                        \
    static const hostile_part part_##name = {#name, share, begin_##name, run, end}

PART(plain, 2, .arch = "llama", .flash = true, .kv_type = GGML_TYPE_F16);
PART(slow, 2, .arch = "llama", .kv_type = GGML_TYPE_F32); /* without flash attention, V transposed */
PART(packed, 1, .arch = "llama", .flash = true, .kv_type = GGML_TYPE_Q8_0);
PART(windows, 3, .arch = "gemma3", .flash = true, .kv_type = GGML_TYPE_F16);
PART(full, 1, .arch = "gemma3", .flash = true, .swa_full = true, .kv_type = GGML_TYPE_F16,
     .more = {{"attention.sliding_window", 256}});
PART(experts, 2, .arch = "gpt-oss", .flash = true, .kv_type = GGML_TYPE_F16,
     .more = {{"expert_count", 32}, {"expert_used_count", 4}, {"expert_feed_forward_length", 64}});
PART(hybrid, 3, .arch = "jamba", .hybrid = true, .flash = true, .kv_type = GGML_TYPE_F16);
PART(mrope, 2, .arch = "qwen35", .flash = true, .kv_type = GGML_TYPE_F16,
     .more = {{"ssm.inner_size", 256}, {"ssm.state_size", 128}, {"ssm.time_step_rank", 2}, {"ssm.group_count", 2}});
PART(mamba, 2, .arch = "mamba", .kv_type = GGML_TYPE_F16);
PART(rwkv, 2, .arch = "rwkv6", .kv_type = GGML_TYPE_F16);

int main(void) {
    static const hostile_part *const parts[] = {&part_plain,   &part_slow,   &part_packed, &part_windows, &part_full,
                                                &part_experts, &part_hybrid, &part_mrope,  &part_mamba,   &part_rwkv};
    return hostile_main(parts, sizeof parts / sizeof *parts, 2000);
}
