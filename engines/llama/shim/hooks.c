/* SPDX-License-Identifier: Apache-2.0
 *
 * The functions of libllama that the shim replaces. Each calls the real one, and tells the engine what happened.
 * libllama also calls some of its own exported functions through the dynamic linker: while a real one runs,
 * kvfl_shim_inside passes those straight through.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "llama/shim/shim.h"

#define HOOK __attribute__((visibility("default")))

/* Programs still call deprecated names. */
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

static void enter(void) {
    kvfl_shim_inside++;
}

static void leave(void) {
    kvfl_shim_inside--;
}

/* ---- models and contexts ---- */

static bool is_ours(void) {
    return kvfl_shim_inside > 0;
}

static struct llama_model *load_model(const char *path, struct llama_model_params params) {
    kvfl_files *files = NULL;
    if (!is_ours() && path != NULL) {
        (void)kvfl_files_open_model(&files, NULL, path);
    }
    enter();
    struct llama_model *model = REAL(llama_model_load_from_file)(path, params);
    leave();
    kvfl_shim_model_loaded(model, files, &params);
    return model;
}

HOOK struct llama_model *llama_model_load_from_file(const char *path, struct llama_model_params params) {
    return load_model(path, params);
}

HOOK struct llama_model *llama_load_model_from_file(const char *path, struct llama_model_params params) {
    return load_model(path, params);
}

HOOK struct llama_model *llama_model_load_from_splits(const char **paths, size_t num,
                                                      struct llama_model_params params) {
    kvfl_files *files = NULL;
    if (!is_ours() && num > 0) {
        (void)kvfl_files_open(&files, NULL, paths, num);
    }
    enter();
    struct llama_model *model = REAL(llama_model_load_from_splits)(paths, num, params);
    leave();
    kvfl_shim_model_loaded(model, files, &params);
    return model;
}

static void free_model(struct llama_model *model) {
    kvfl_shim_model_freed(model);
    REAL(llama_model_free)(model);
}

HOOK void llama_model_free(struct llama_model *model) {
    free_model(model);
}

HOOK void llama_free_model(struct llama_model *model) {
    free_model(model);
}

static struct llama_context *init_context(struct llama_model *model, struct llama_context_params params) {
    if (kvfl_shim_inside > 0) {
        return REAL(llama_init_from_model)(model, params);
    }
    enter();
    struct llama_context *ctx = kvfl_shim_open(model, params);
    leave();
    return ctx;
}

HOOK struct llama_context *llama_init_from_model(struct llama_model *model, struct llama_context_params params) {
    return init_context(model, params);
}

HOOK struct llama_context *llama_new_context_with_model(struct llama_model *model, struct llama_context_params params) {
    return init_context(model, params);
}

HOOK void llama_free(struct llama_context *ctx) {
    kvfl_shim_close(ctx);
    REAL(llama_free)(ctx);
}

HOOK uint32_t llama_n_seq_max(const struct llama_context *ctx) {
    const kvfl_shim_context *c = kvfl_shim_known(ctx);
    return c != NULL ? c->num_seqs : REAL(llama_n_seq_max)(ctx);
}

/* ---- adapters ---- */

HOOK struct llama_adapter_lora *llama_adapter_lora_init(struct llama_model *model, const char *path) {
    kvfl_files *files = NULL;
    (void)kvfl_files_open(&files, NULL, &path, 1);
    struct llama_adapter_lora *lora = REAL(llama_adapter_lora_init)(model, path);
    if (lora != NULL) {
        kvfl_shim_lora_loaded(lora, files);
    }
    kvfl_files_close(files);
    return lora;
}

HOOK void llama_adapter_lora_free(struct llama_adapter_lora *lora) {
    kvfl_shim_lora_freed(lora);
    REAL(llama_adapter_lora_free)(lora);
}

HOOK int32_t llama_set_adapters_lora(struct llama_context *ctx, struct llama_adapter_lora **loras, size_t num,
                                     float *scales) {
    kvfl_shim_context *c = kvfl_shim_known(ctx);
    int32_t rc = REAL(llama_set_adapters_lora)(ctx, loras, num, scales);
    if (c != NULL && rc == 0) {
        kvfl_shim_set_loras(c, loras, num, scales);
    }
    return rc;
}

HOOK int32_t llama_set_adapter_cvec(struct llama_context *ctx, const float *data, size_t len, int32_t n_embd,
                                    int32_t first, int32_t last) {
    kvfl_shim_context *c = kvfl_shim_known(ctx);
    int32_t rc = REAL(llama_set_adapter_cvec)(ctx, data, len, n_embd, first, last);
    if (c != NULL && rc == 0) {
        kvfl_shim_set_control(c, data, len, n_embd, first, last);
    }
    return rc;
}

/* ---- modes ---- */

HOOK void llama_set_embeddings(struct llama_context *ctx, bool on) {
    kvfl_shim_context *c = kvfl_shim_known(ctx);
    REAL(llama_set_embeddings)(ctx, on);
    if (c != NULL) {
        c->outputs_all = on;
        kvfl_shim_set_mode(c);
    }
}

HOOK void llama_set_causal_attn(struct llama_context *ctx, bool on) {
    kvfl_shim_context *c = kvfl_shim_known(ctx);
    REAL(llama_set_causal_attn)(ctx, on);
    if (c != NULL) {
        c->not_causal = !on;
        kvfl_shim_set_mode(c);
    }
}

HOOK void llama_set_warmup(struct llama_context *ctx, bool on) {
    kvfl_shim_context *c = kvfl_shim_known(ctx);
    REAL(llama_set_warmup)(ctx, on);
    if (c != NULL) {
        c->stale_graph = c->stale_graph || c->warm_up;
        c->warm_up = on;
        kvfl_shim_set_mode(c);
    }
}

/* Two functions of llama.cpp's staging header (llama-ext.h, C++), by which drafting programs request hidden states of
 * every token. */
void kvfl_hook_nextn(struct llama_context *, bool on,
                     bool masked) __asm__("_Z26llama_set_embeddings_nextnP13llama_contextbb");
void kvfl_hook_layer(struct llama_context *, uint32_t layer,
                     bool on) __asm__("_Z30llama_set_embeddings_layer_inpP13llama_contextjb");

static void hidden(const struct llama_context *ctx, bool on) {
    kvfl_shim_context *c = kvfl_shim_known(ctx);
    if (c != NULL && on) {
        c->hidden = true;
        kvfl_shim_set_mode(c);
    }
}

HOOK void kvfl_hook_nextn(struct llama_context *ctx, bool on, bool masked) {
    static void (*real)(struct llama_context *, bool, bool);
    if (real == NULL) {
        *(void **)(void *)&real = kvfl_shim_next("_Z26llama_set_embeddings_nextnP13llama_contextbb");
    }
    hidden(ctx, on);
    real(ctx, on, masked);
}

HOOK void kvfl_hook_layer(struct llama_context *ctx, uint32_t layer, bool on) {
    static void (*real)(struct llama_context *, uint32_t, bool);
    if (real == NULL) {
        *(void **)(void *)&real = kvfl_shim_next("_Z30llama_set_embeddings_layer_inpP13llama_contextjb");
    }
    hidden(ctx, on);
    real(ctx, layer, on);
}

HOOK void llama_opt_init(struct llama_context *ctx, struct llama_model *model, struct llama_opt_params params) {
    kvfl_shim_model_trained(model);
    REAL(llama_opt_init)(ctx, model, params);
}

/* ---- memory ---- */

HOOK void llama_memory_clear(llama_memory_t mem, bool data) {
    const kvfl_shim_context *c = kvfl_shim_of_memory(mem);
    REAL(llama_memory_clear)(mem, data);
    if (c != NULL) {
        enter();
        kvfl_cleared(c->kv);
        leave();
    }
}

HOOK bool llama_memory_seq_rm(llama_memory_t mem, llama_seq_id seq, llama_pos first, llama_pos end) {
    kvfl_shim_context *c = kvfl_shim_of_memory(mem);
    if (c != NULL) {
        kvfl_shim_before_cut(c, seq, first);
    }
    bool ok = REAL(llama_memory_seq_rm)(mem, seq, first, end);
    if (c != NULL && ok) {
        enter();
        kvfl_removed(c->kv, seq, first, end);
        leave();
    }
    return ok;
}

HOOK void llama_memory_seq_cp(llama_memory_t mem, llama_seq_id from, llama_seq_id to, llama_pos first, llama_pos end) {
    const kvfl_shim_context *c = kvfl_shim_of_memory(mem);
    REAL(llama_memory_seq_cp)(mem, from, to, first, end);
    if (c != NULL) {
        enter();
        kvfl_copied(c->kv, from, to, first, end);
        leave();
    }
}

HOOK void llama_memory_seq_keep(llama_memory_t mem, llama_seq_id seq) {
    const kvfl_shim_context *c = kvfl_shim_of_memory(mem);
    REAL(llama_memory_seq_keep)(mem, seq);
    if (c != NULL) {
        enter();
        kvfl_kept_only(c->kv, seq);
        leave();
    }
}

static void moved(const kvfl_shim_context *c, llama_seq_id seq, llama_pos first) {
    if (c != NULL && kvfl_is_text(c->kv, seq)) {
        enter();
        kvfl_moved(c->kv, seq, first);
        leave();
    }
}

HOOK void llama_memory_seq_add(llama_memory_t mem, llama_seq_id seq, llama_pos first, llama_pos end, llama_pos delta) {
    const kvfl_shim_context *c = kvfl_shim_of_memory(mem);
    REAL(llama_memory_seq_add)(mem, seq, first, end, delta);
    moved(c, seq, delta < 0 ? first + delta : first); /* perhaps onto occupied positions */
}

HOOK void llama_memory_seq_div(llama_memory_t mem, llama_seq_id seq, llama_pos first, llama_pos end, int d) {
    const kvfl_shim_context *c = kvfl_shim_of_memory(mem);
    REAL(llama_memory_seq_div)(mem, seq, first, end, d);
    moved(c, seq, d > 0 ? first / d : 0);
}

/* ---- states ---- */

static void digest(uint8_t out[16], const void *bytes, size_t len) {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes, len));
    memcpy(out, canonical.digest, 16);
}

static bool digest_file(uint8_t out[16], const char *path) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    void *bytes = MAP_FAILED;
    if (fd >= 0 && fstat(fd, &st) == 0 && st.st_size > 0) {
        bytes = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    }
    if (fd >= 0) {
        close(fd);
    }
    if (bytes == MAP_FAILED) {
        return false;
    }
    digest(out, bytes, (size_t)st.st_size);
    munmap(bytes, (size_t)st.st_size);
    return true;
}

static void taken(const kvfl_shim_context *c, llama_seq_id seq, const uint8_t *bytes, size_t len,
                  llama_state_seq_flags flags) {
    uint8_t sum[16];
    if (c == NULL || len == 0 || !kvfl_is_text(c->kv, seq) || (flags & LLAMA_STATE_SEQ_FLAGS_ON_DEVICE) != 0) {
        return;
    }
    enter();
    digest(sum, bytes, len);
    kvfl_state_taken(c->kv, seq, sum);
    leave();
}

static void set(const kvfl_shim_context *c, llama_seq_id seq, const uint8_t *bytes, size_t len,
                llama_state_seq_flags flags) {
    uint8_t sum[16];
    if (c == NULL || !kvfl_is_text(c->kv, seq)) {
        return;
    }
    enter();
    if (len == 0 || (flags & LLAMA_STATE_SEQ_FLAGS_ON_DEVICE) != 0) {
        kvfl_forget(c->kv, seq, KVF_ASIDE_FOREIGN);
    } else {
        digest(sum, bytes, len);
        kvfl_state_set(c->kv, seq, sum, (flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != 0);
    }
    leave();
}

HOOK size_t llama_state_seq_get_data_ext(struct llama_context *ctx, uint8_t *out, size_t size, llama_seq_id seq,
                                         llama_state_seq_flags flags) {
    const kvfl_shim_context *c = kvfl_shim_of(ctx);
    size_t len = REAL(llama_state_seq_get_data_ext)(ctx, out, size, seq, flags);
    taken(c, seq, out, len, flags);
    return len;
}

HOOK size_t llama_state_seq_get_data(struct llama_context *ctx, uint8_t *out, size_t size, llama_seq_id seq) {
    const kvfl_shim_context *c = kvfl_shim_of(ctx);
    enter();
    size_t len = REAL(llama_state_seq_get_data)(ctx, out, size, seq);
    leave();
    taken(c, seq, out, len, 0);
    return len;
}

HOOK size_t llama_state_seq_set_data_ext(struct llama_context *ctx, const uint8_t *from, size_t size, llama_seq_id seq,
                                         llama_state_seq_flags flags) {
    const kvfl_shim_context *c = kvfl_shim_of(ctx);
    size_t len = REAL(llama_state_seq_set_data_ext)(ctx, from, size, seq, flags);
    set(c, seq, from, len <= size ? len : 0, flags);
    return len;
}

HOOK size_t llama_state_seq_set_data(struct llama_context *ctx, const uint8_t *from, size_t size, llama_seq_id seq) {
    const kvfl_shim_context *c = kvfl_shim_of(ctx);
    enter();
    size_t len = REAL(llama_state_seq_set_data)(ctx, from, size, seq);
    leave();
    set(c, seq, from, len <= size ? len : 0, 0);
    return len;
}

HOOK size_t llama_state_seq_save_file(struct llama_context *ctx, const char *path, llama_seq_id seq,
                                      const llama_token *tokens, size_t num) {
    const kvfl_shim_context *c = kvfl_shim_of(ctx);
    uint8_t sum[16];
    enter();
    size_t len = REAL(llama_state_seq_save_file)(ctx, path, seq, tokens, num);
    if (c != NULL && len > 0 && kvfl_is_text(c->kv, seq) && digest_file(sum, path)) {
        kvfl_state_taken(c->kv, seq, sum);
    }
    leave();
    return len;
}

HOOK size_t llama_state_seq_load_file(struct llama_context *ctx, const char *path, llama_seq_id seq,
                                      llama_token *tokens, size_t room, size_t *num) {
    const kvfl_shim_context *c = kvfl_shim_of(ctx);
    uint8_t sum[16];
    enter();
    size_t len = REAL(llama_state_seq_load_file)(ctx, path, seq, tokens, room, num);
    /* otherwise only the number of tokens was requested */
    if (c != NULL && kvfl_is_text(c->kv, seq) && tokens != NULL) {
        if (len > 0 && digest_file(sum, path)) {
            kvfl_state_set(c->kv, seq, sum, false);
        } else {
            kvfl_forget(c->kv, seq, KVF_ASIDE_FOREIGN);
        }
    }
    leave();
    return len;
}

static void all_foreign(const kvfl_shim_context *c) {
    if (c != NULL) {
        enter();
        kvfl_forget_all(c->kv, KVF_ASIDE_FOREIGN);
        leave();
    }
}

HOOK size_t llama_state_set_data(struct llama_context *ctx, const uint8_t *from, size_t size) {
    const kvfl_shim_context *c = kvfl_shim_of(ctx);
    size_t len = REAL(llama_state_set_data)(ctx, from, size);
    all_foreign(c);
    return len;
}

HOOK size_t llama_set_state_data(struct llama_context *ctx, const uint8_t *from) {
    const kvfl_shim_context *c = kvfl_shim_of(ctx);
    size_t len = REAL(llama_set_state_data)(ctx, from);
    all_foreign(c);
    return len;
}

HOOK bool llama_state_load_file(struct llama_context *ctx, const char *path, llama_token *tokens, size_t room,
                                size_t *num) {
    const kvfl_shim_context *c = kvfl_shim_of(ctx);
    bool ok = REAL(llama_state_load_file)(ctx, path, tokens, room, num);
    all_foreign(c);
    return ok;
}

HOOK bool llama_load_session_file(struct llama_context *ctx, const char *path, llama_token *tokens, size_t room,
                                  size_t *num) {
    const kvfl_shim_context *c = kvfl_shim_of(ctx);
    bool ok = REAL(llama_load_session_file)(ctx, path, tokens, room, num);
    all_foreign(c);
    return ok;
}

/* ---- batches ---- */

HOOK struct llama_batch_ext *llama_batch_ext_init(struct llama_context *ctx) {
    struct llama_batch_ext *batch = REAL(llama_batch_ext_init)(ctx);
    if (batch != NULL && kvfl_shim_inside == 0) {
        kvfl_shim_batch_clear(batch, false);
    }
    return batch;
}

HOOK void llama_batch_ext_free(struct llama_batch_ext *batch) {
    if (batch != NULL) {
        kvfl_shim_batch_clear(batch, true);
    }
    REAL(llama_batch_ext_free)(batch);
}

HOOK void llama_batch_ext_clear(struct llama_batch_ext *batch) {
    REAL(llama_batch_ext_clear)(batch);
    kvfl_shim_batch_clear(batch, false);
}

HOOK int32_t llama_batch_ext_add(struct llama_batch_ext *batch, llama_seq_id seq) {
    enter();
    int32_t index = REAL(llama_batch_ext_add)(batch, seq);
    leave();
    kvfl_shim_batch_add(batch, index, seq, 0, KVF_ASIDE_EMBEDDINGS);
    return index;
}

HOOK int32_t llama_batch_ext_add_token(struct llama_batch_ext *batch, llama_seq_id seq, llama_token token) {
    enter();
    int32_t index = REAL(llama_batch_ext_add_token)(batch, seq, token);
    leave();
    kvfl_shim_batch_add(batch, index, seq, token, KVF_ASIDE_NONE);
    return index;
}

HOOK int32_t llama_batch_ext_add_embd(struct llama_batch_ext *batch, llama_seq_id seq, struct llama_embd embd) {
    enter();
    int32_t index = REAL(llama_batch_ext_add_embd)(batch, seq, embd);
    leave();
    kvfl_shim_batch_add(batch, index, seq, 0, KVF_ASIDE_EMBEDDINGS);
    return index;
}

HOOK bool llama_batch_ext_add_seq(struct llama_batch_ext *batch, int32_t index, llama_seq_id seq) {
    kvfl_shim_batch_also(batch, seq);
    return REAL(llama_batch_ext_add_seq)(batch, index, seq);
}

HOOK bool llama_batch_ext_set_embd_token(struct llama_batch_ext *batch, int32_t index, struct llama_embd embd) {
    kvfl_shim_batch_mark(batch, KVF_ASIDE_EMBEDDINGS);
    return REAL(llama_batch_ext_set_embd_token)(batch, index, embd);
}

HOOK bool llama_batch_ext_set_embd_state(struct llama_batch_ext *batch, int32_t index, struct llama_embd embd) {
    kvfl_shim_batch_mark(batch, KVF_ASIDE_EMBEDDINGS);
    return REAL(llama_batch_ext_set_embd_state)(batch, index, embd);
}

HOOK bool llama_batch_ext_set_pos(struct llama_batch_ext *batch, int32_t index, const llama_pos *pos) {
    bool ok = REAL(llama_batch_ext_set_pos)(batch, index, pos);
    if (ok) {
        kvfl_shim_batch_pos(batch, index, pos[0]);
    }
    return ok;
}

HOOK bool llama_batch_ext_set_output_logits(struct llama_batch_ext *batch, int32_t index, bool value) {
    bool ok = REAL(llama_batch_ext_set_output_logits)(batch, index, value);
    if (ok) {
        kvfl_shim_batch_output(batch, index, value);
    }
    return ok;
}

HOOK bool llama_batch_ext_set_output_embd(struct llama_batch_ext *batch, int32_t index, bool value) {
    bool ok = REAL(llama_batch_ext_set_output_embd)(batch, index, value);
    if (ok) {
        kvfl_shim_batch_output(batch, index, value);
    }
    return ok;
}

/* ---- decoding ---- */

typedef struct process {
    struct llama_context *ctx;
    struct llama_batch_ext *batch;
} process;

static int32_t process_plain(void *arg) {
    const process *p = arg;
    return REAL(llama_process)(p->ctx, LLAMA_PROCESS_TYPE_DECODE, p->batch);
}

HOOK int32_t llama_process(struct llama_context *ctx, enum llama_process_type type, struct llama_batch_ext *batch) {
    kvfl_shim_context *c = type == LLAMA_PROCESS_TYPE_DECODE ? kvfl_shim_to_decode(ctx) : NULL;
    if (c == NULL) {
        return REAL(llama_process)(ctx, type, batch);
    }
    process plain = {ctx, batch};
    const kvfl_shim_batch *seen = kvfl_shim_batch_of(batch);
    enter();
    int32_t rc = seen == NULL || seen->odd != KVF_ASIDE_NONE
                     ? kvfl_decode_unseen(c->kv, seen != NULL ? seen->seqs : NULL,
                                          seen != NULL ? (size_t)seen->plain.n_tokens : 0,
                                          seen != NULL ? seen->odd : KVF_ASIDE_FOREIGN, process_plain, &plain)
                     : kvfl_decode(c->kv, &seen->plain, process_plain, &plain);
    leave();
    return rc;
}

typedef struct decode {
    struct llama_context *ctx;
    struct llama_batch batch;
} decode;

static int32_t decode_plain(void *arg) {
    const decode *d = arg;
    return REAL(llama_decode)(d->ctx, d->batch);
}

HOOK int32_t llama_decode(struct llama_context *ctx, struct llama_batch batch) {
    kvfl_shim_context *c = kvfl_shim_to_decode(ctx);
    if (c == NULL) {
        return REAL(llama_decode)(ctx, batch);
    }
    decode plain = {ctx, batch};
    enter();
    int32_t rc = kvfl_decode(c->kv, &batch, decode_plain, &plain);
    leave();
    return rc;
}

/* ---- reading results: the program's index of a token in its batch is not always llama.cpp's ---- */

static int32_t index_of(const struct llama_context *ctx, int32_t i) {
    const kvfl_shim_context *c = kvfl_shim_of(ctx);
    return c != NULL ? kvf_llama_output(c->kv, i) : i;
}

HOOK float *llama_get_logits_ith(struct llama_context *ctx, int32_t i) {
    return REAL(llama_get_logits_ith)(ctx, index_of(ctx, i));
}

HOOK float *llama_get_embeddings_ith(struct llama_context *ctx, int32_t i) {
    return REAL(llama_get_embeddings_ith)(ctx, index_of(ctx, i));
}

HOOK llama_token llama_get_sampled_token_ith(struct llama_context *ctx, int32_t i) {
    return REAL(llama_get_sampled_token_ith)(ctx, index_of(ctx, i));
}

HOOK float *llama_get_sampled_probs_ith(struct llama_context *ctx, int32_t i) {
    return REAL(llama_get_sampled_probs_ith)(ctx, index_of(ctx, i));
}

HOOK uint32_t llama_get_sampled_probs_count_ith(struct llama_context *ctx, int32_t i) {
    return REAL(llama_get_sampled_probs_count_ith)(ctx, index_of(ctx, i));
}

HOOK float *llama_get_sampled_logits_ith(struct llama_context *ctx, int32_t i) {
    return REAL(llama_get_sampled_logits_ith)(ctx, index_of(ctx, i));
}

HOOK uint32_t llama_get_sampled_logits_count_ith(struct llama_context *ctx, int32_t i) {
    return REAL(llama_get_sampled_logits_count_ith)(ctx, index_of(ctx, i));
}

HOOK llama_token *llama_get_sampled_candidates_ith(struct llama_context *ctx, int32_t i) {
    return REAL(llama_get_sampled_candidates_ith)(ctx, index_of(ctx, i));
}

HOOK uint32_t llama_get_sampled_candidates_count_ith(struct llama_context *ctx, int32_t i) {
    return REAL(llama_get_sampled_candidates_count_ith)(ctx, index_of(ctx, i));
}

HOOK llama_token llama_sampler_sample(struct llama_sampler *sampler, struct llama_context *ctx, int32_t i) {
    int32_t index = index_of(ctx, i);
    enter();
    llama_token token = REAL(llama_sampler_sample)(sampler, ctx, index);
    leave();
    return token;
}
