/* SPDX-License-Identifier: Apache-2.0
 *
 * Determines what kind of memory a context has. llama.cpp has no getter for that, so there are three gates: models
 * whose memory is known to be of another kind are refused by name, before any call that could end the process; the blob
 * of two tokens must parse, to its last byte, as the caches and states that the model's getters promise; and it must be
 * the same after it was taken apart and reassembled.
 */
#include <ggml-backend.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

#include "llama/model/model.h"

#define PAGE      4096u
#define MIN_APART 1024u /* tokens between two states */
#define MAX_APART 8192u
#define STATE_AIM ((size_t)8 << 20) /* of states, for each MIN_APART tokens, if blocks are smaller than that */

static kvf_status refuse(kvf_error *err, const char *why) {
    return kvfl_fail(err, KVF_REFUSED, "not proven safe to reuse: %s", why);
}

/* ---- by name and getters ---- */

/* Indexed, compressed or borrowed caches beside the KV cache. For some of them a seq_cp of a range ends the process. */
static const char *const other_kinds[] = {"deepseek4",  "deepseek32", "glm-dsa",   "glm5-next", "qwen4exp",
                                          "minimax-m3", "hy_v4",      "dots3note", "dflash",    "gemma4-assistant"};

static kvf_status check_name(const struct llama_model *model, kvf_error *err) {
    char arch[64] = "";
    llama_model_meta_val_str(model, "general.architecture", arch, sizeof arch);
    for (size_t i = 0; i < sizeof other_kinds / sizeof *other_kinds; i++) {
        if (strcmp(arch, other_kinds[i]) == 0) {
            return refuse(err, "the model keeps indexed or compressed caches beside the KV cache");
        }
    }
    return KVF_OK;
}

static kvf_status check_model(const struct llama_model *model, kvf_error *err) {
    if (llama_model_is_diffusion(model) || llama_model_has_encoder(model) || !llama_model_has_decoder(model)) {
        return refuse(err, "the model is not a plain decoder");
    }
    if (llama_model_rope_type(model) == LLAMA_ROPE_TYPE_VISION) {
        return refuse(err, "the model has the positions of images");
    }
    return check_name(model, err);
}

/* Settings of a context that no getter tells afterwards. */
static kvf_status check_params(const struct llama_context_params *p, kvf_error *err) {
    if (p->cb_eval != NULL) {
        return refuse(err, "the context has an evaluation callback (cb_eval), which can change what is computed");
    }
    if (p->ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT || p->ctx_other != NULL) {
        return refuse(err, "the context drafts for another one (ctx_type, ctx_other)");
    }
    return KVF_OK;
}

static kvf_status check_context(const kvf_llama *kv, kvf_error *err, const struct llama_context_params *params) {
    uint32_t num = llama_n_seq_max(kv->ctx);
    if (kv->mem == NULL) {
        return refuse(err, "the context has no memory");
    }
    if (!llama_get_causal_attn(kv->ctx)) {
        return refuse(err, "attention is not causal: a token's KV depends on later tokens");
    }
    if (num < 2) {
        return refuse(err, "no sequence is left for scratch: create the context with n_seq_max one larger");
    }
    if (kv->scratch < 0 || (uint32_t)kv->scratch >= num) {
        return kvfl_fail(err, KVF_LIMIT, "scratch_seq is %d, n_seq_max %u: name one from 0 to %u", kv->scratch, num,
                         num - 1);
    }
    if (llama_memory_seq_pos_max(kv->mem, kv->scratch) >= 0) {
        return refuse(err, "the scratch sequence is in use");
    }
    return check_params(params, err);
}

/* ---- the scratch sequence ---- */

static bool export_scratch(const kvf_llama *kv, llama_state_seq_flags flags, kvfl_bytes *out) {
    size_t len = llama_state_seq_get_size_ext(kv->ctx, kv->scratch, flags);
    *out = (kvfl_bytes){.data = len > 0 ? malloc(len) : NULL};
    out->len = out->data != NULL ? llama_state_seq_get_data_ext(kv->ctx, out->data, len, kv->scratch, flags) : 0;
    return out->len == len && len > KVFL_BLOB_HEAD;
}

static bool import_scratch(const kvf_llama *kv, llama_state_seq_flags flags, const uint8_t *data, size_t len) {
    return llama_state_seq_set_data_ext(kv->ctx, data, len, kv->scratch, flags) == len;
}

static bool scratch_is(const kvf_llama *kv, const kvfl_bytes *expected) {
    kvfl_bytes now = {0};
    bool same =
        export_scratch(kv, 0, &now) && now.len == expected->len && memcmp(now.data, expected->data, now.len) == 0;
    free(now.data);
    return same;
}

/* ---- before the probe: the blobs of an empty sequence ---- */

static kvf_status take_empty(kvf_llama *kv, kvf_error *err) {
    kvfl_bytes whole = {0}, rest = {0};
    kvf_status status = KVF_OK;
    uint32_t streams = 0;
    if (!export_scratch(kv, 0, &whole) || !export_scratch(kv, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY, &rest) ||
        whole.len < KVFL_BLOB_HEAD + sizeof streams) {
        status = refuse(err, "llama.cpp can't export a sequence of this context");
    } else {
        memcpy(&streams, whole.data + KVFL_BLOB_HEAD, sizeof streams);
    }
    if (status == KVF_OK && streams != 1 && !llama_model_is_recurrent(kv->model)) {
        status = streams > 1 && streams <= llama_n_seq_max(kv->ctx)
                     ? refuse(err, "the KV cache is not unified: create the context with kv_unified = true")
                     : refuse(err, "the context's memory is of a kind that is not known here");
    }
    if (status == KVF_OK) {
        kv->kind.rest_bytes = rest.len - KVFL_BLOB_HEAD;
        kv->kind.empty = rest.data;
        rest.data = NULL;
    }
    free(whole.data);
    free(rest.data);
    return status;
}

/* ---- the probe ----
 *
 * Two tokens, of which the second attends to the first: so anything that acts between tokens (scale, soft cap, ALiBi,
 * rotation frequencies) shows in the KV of all layers but the first. Two, because a sum of two numbers is the same
 * wherever their cells lie; a longer sum rounds by the order of cells, which differs when the context is in use. */

#define PAIR          KVFL_PROBE_CELLS
#define NEAR_POSITION 977 /* not 0, where every rotation is the identity */

/* Some models compute differently far out: the last positions that this one was trained for. */
static int32_t far_position(const kvf_llama *kv) {
    int32_t trained = llama_model_n_ctx_train(kv->model);
    return trained > PAIR ? trained - PAIR : 0;
}

static int32_t near_position(const kvf_llama *kv) {
    int32_t far = far_position(kv);
    return far > 0 && far < NEAR_POSITION ? far : NEAR_POSITION;
}

/* Two different tokens, so that the first one's weight in the second one's sum shows. */
static llama_token pair_token(const kvf_llama *kv, int32_t i) {
    return llama_vocab_n_tokens(llama_model_get_vocab(kv->model)) / (PAIR + 1) * (i + 1);
}

/* `num` tokens of the pair, beginning with `first`. */
static int decode_pair(kvf_llama *kv, int32_t position, int32_t first, int32_t num) {
    struct llama_batch *batch = &kv->batch;
    batch->n_tokens = num;
    for (int32_t i = 0; i < num; i++) {
        batch->token[i] = pair_token(kv, first + i);
        batch->pos[i] = position + first + i;
        batch->n_seq_id[i] = 1;
        batch->seq_id[i][0] = kv->scratch;
        batch->logits[i] = first + i + 1 == PAIR;
    }
    return llama_decode(kv->ctx, *batch);
}

static kvf_status compute_pair(kvf_llama *kv, kvf_error *err, int32_t position) {
    int rc = kv->step >= PAIR ? decode_pair(kv, position, 0, PAIR) : decode_pair(kv, position, 0, 1);
    if (rc == 0 && kv->step < PAIR) {
        rc = decode_pair(kv, position, 1, 1);
    }
    if (rc != 0) {
        return kvfl_fail(err, KVF_REFUSED,
                         "no tokens can be computed in the scratch sequence (llama_decode: %d): is the context full?",
                         rc);
    }
    return KVF_OK;
}

/* How many times faster a token is computed in a batch than alone: a first guess, until batches have been measured. */
static double sooner_in_batches(void) {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU) != NULL ? 64 : 4;
}

/* The time of one more token; 0: it failed. */
static int64_t time_token(kvf_llama *kv) {
    int64_t begin = kvfl_now_us();
    bool ok = decode_pair(kv, near_position(kv), 0, 1) == 0;
    llama_synchronize(kv->ctx);
    int64_t took = kvfl_now_us() - begin;
    llama_memory_seq_rm(kv->mem, kv->scratch, -1, -1);
    return ok ? took : 0;
}

/* Goes by the faster of two tokens after those of the probe: the first one of a context also pays for what is made only
 * once, and on a busy machine any of them may have waited for a processor. */
static void guess_pace(kvf_llama *kv) {
    int64_t first = time_token(kv), second = time_token(kv);
    kv->pace.guess_us = (double)(first < second ? first : second) / sooner_in_batches();
}

/* The caches and the state that the model's getters promise. A model with a window may have one cache (it ignores the
 * window) or two. */
static bool parse(const kvf_llama *kv, kvfl_shape *out, const kvfl_bytes *probe) {
    bool recurrent = llama_model_is_recurrent(kv->model), windows = llama_model_n_swa(kv->model) > 0;
    enum llama_rope_type rope = llama_model_rope_type(kv->model);
    uint32_t least = recurrent ? 0 : 1, most = recurrent ? 0 : windows ? KVFL_MAX_CACHES : 1;
    for (uint32_t caches = least; caches <= most; caches++) {
        *out = (kvfl_shape){.num_caches = caches,
                            .has_state = recurrent || llama_model_is_hybrid(kv->model),
                            .has_ext = rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE};
        if (kvfl_blob_parse(out, probe->data, probe->len)) {
            return true;
        }
    }
    return false;
}

/* Every cache has a cell for each of the pair, in their order; a state is that after the last one. */
static bool holds_pair(const kvfl_shape *shape, int32_t position) {
    bool ok = !shape->has_state || (shape->state_cells == 1 && shape->state_pos == position + PAIR - 1);
    for (uint32_t i = 0; i < shape->num_caches; i++) {
        const kvfl_cache *cache = &shape->caches[i];
        ok = ok && cache->num_cells == PAIR && cache->first_pos == position && cache->in_order;
    }
    return ok;
}

/* A ring of cells may end between the two. The search for cells then begins again at the front. */
static kvf_status take_pair(kvf_llama *kv, kvf_error *err, int32_t position, kvfl_bytes *out, kvfl_shape *shape) {
    kvf_status status = KVF_OK;
    bool found = false;
    for (int tries = 0; status == KVF_OK && !found && tries < 2; tries++) {
        free(out->data);
        *out = (kvfl_bytes){0};
        llama_memory_seq_rm(kv->mem, kv->scratch, -1, -1);
        status = compute_pair(kv, err, position);
        if (status == KVF_OK && !export_scratch(kv, 0, out)) {
            status = refuse(err, "llama.cpp can't export a sequence of this context");
        }
        found = status == KVF_OK && parse(kv, shape, out) && holds_pair(shape, position);
    }
    return status == KVF_OK && !found ? refuse(err, "the context's memory is of a kind that is not known here")
                                      : status;
}

/* The parts of the blob after the blocks are what PARTIAL_ONLY exports. Blocks with the rest of an empty sequence,
 * followed by that, restore the whole. */
static bool splits(kvf_llama *kv, const kvfl_bytes *probe) {
    kvfl_kind *kind = &kv->kind;
    kvfl_bytes state = {0};
    size_t blocks = kind->num_caches > 0 ? kind->shape.caches[kind->num_caches - 1].end : KVFL_BLOB_HEAD;
    uint8_t *cut = malloc(blocks + kind->rest_bytes);
    bool ok = cut != NULL && export_scratch(kv, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY, &state) &&
              state.len - KVFL_BLOB_HEAD == probe->len - blocks &&
              memcmp(state.data + KVFL_BLOB_HEAD, probe->data + blocks, probe->len - blocks) == 0;
    if (ok) {
        memcpy(cut, probe->data, blocks);
        memcpy(cut + blocks, kind->empty + KVFL_BLOB_HEAD, kind->rest_bytes);
        llama_memory_seq_rm(kv->mem, kv->scratch, -1, -1);
        ok = (kind->num_caches == 0 || import_scratch(kv, 0, cut, blocks + kind->rest_bytes)) &&
             import_scratch(kv, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY, state.data, state.len) && scratch_is(kv, probe);
    }
    free(state.data);
    free(cut);
    return ok;
}

static bool survives(kvf_llama *kv, const kvfl_bytes *probe) {
    llama_memory_seq_rm(kv->mem, kv->scratch, -1, -1);
    return import_scratch(kv, 0, probe->data, probe->len) && scratch_is(kv, probe) &&
           (!kvfl_has_states(kv) || splits(kv, probe));
}

/* A full-size window cache forgets nothing, so all of it can be in blocks, as long as none is longer than the
 * window. */
static void choose_mode(kvfl_kind *kind, const struct llama_context_params *params, int32_t window) {
    const kvfl_shape *shape = &kind->shape;
    bool whole =
        !shape->has_state && (shape->num_caches == 1 || (params->swa_full && window >= (int32_t)KVFL_MIN_BATCH));
    kind->mode = shape->num_caches == 0 ? KVFL_SNAPSHOT : whole ? KVFL_RANGE : KVFL_SPLIT;
    kind->num_caches = whole ? shape->num_caches : shape->num_caches > 0 ? 1 : 0;
    kind->reseat = kind->mode == KVFL_SPLIT && shape->num_caches > 1;
    kind->fixed_bytes = KVFL_BLOB_HEAD;
    for (uint32_t i = 0; i < kind->num_caches; i++) {
        kind->cell_bytes += shape->caches[i].cell_bytes;
        kind->fixed_bytes += shape->caches[i].fixed_bytes;
    }
    if (whole) {
        kind->rest_bytes = 0;
    }
    kind->fixed_bytes += kind->rest_bytes;
}

/* All of the blob except the cells, which contain sequence ids. */
static bool put_pair(EVP_MD_CTX *sha, const kvfl_shape *s, const uint8_t *blob) {
    bool ok = true;
    for (uint32_t i = 0; i < s->num_caches && ok; i++) {
        ok = EVP_DigestUpdate(sha, blob + s->caches[i].rows, s->caches[i].end - s->caches[i].rows) == 1;
    }
    return ok && (!s->has_state || EVP_DigestUpdate(sha, blob + s->state_rows, s->state_end - s->state_rows) == 1);
}

/* `near`: the blob of the near pair, if it exists already. */
static kvf_status probe(kvf_llama *kv, kvf_error *err, const kvfl_bytes *near) {
    const int32_t positions[] = {near_position(kv), far_position(kv)};
    EVP_MD_CTX *sha = EVP_MD_CTX_new();
    bool ok = sha != NULL && EVP_DigestInit_ex(sha, EVP_sha256(), NULL) == 1 &&
              (near == NULL || put_pair(sha, &kv->kind.shape, near->data));
    kvf_status status = KVF_OK;
    for (size_t i = near != NULL; i < sizeof positions / sizeof *positions && ok && status == KVF_OK; i++) {
        kvfl_bytes pair = {0};
        kvfl_shape shape;
        status = take_pair(kv, err, positions[i], &pair, &shape);
        ok = status != KVF_OK || put_pair(sha, &shape, pair.data);
        free(pair.data);
    }
    ok = ok && EVP_DigestFinal_ex(sha, kv->kind.probe, NULL) == 1;
    EVP_MD_CTX_free(sha);
    llama_memory_seq_rm(kv->mem, kv->scratch, -1, -1);
    return ok || status != KVF_OK ? status : kvfl_fail(err, KVF_NOMEM, "no memory to attach to the context");
}

kvf_status kvfl_probe(kvf_llama *kv, kvf_error *err) {
    return probe(kv, err, NULL);
}

static kvf_status know_shape(kvf_llama *kv, kvf_error *err, const struct llama_context_params *params) {
    kvfl_bytes near = {0};
    kvf_status status = take_pair(kv, err, near_position(kv), &near, &kv->kind.shape);
    if (status == KVF_OK && !kvfl_shape_keep(&kv->kind.shape, near.data, near.len)) {
        status = kvfl_fail(err, KVF_NOMEM, "no memory to attach to the context");
    }
    if (status == KVF_OK) {
        choose_mode(&kv->kind, params, llama_model_n_swa(kv->model));
    }
    if (status == KVF_OK && !survives(kv, &near)) {
        status = refuse(err, "the context's memory can't be taken apart and put together byte for byte");
    }
    if (status == KVF_OK) {
        status = probe(kv, err, &near);
    }
    free(near.data);
    llama_memory_seq_rm(kv->mem, kv->scratch, -1, -1);
    return status;
}

/* During a warm-up a mixture of experts computes with all experts, as another model would. That KV must not be
 * stored. */
static void end_warm_up(struct llama_context *ctx) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    llama_set_warmup(ctx, false);
#pragma GCC diagnostic pop
}

bool kvfl_rebuild_graph(kvf_llama *kv) {
    bool ok = decode_pair(kv, near_position(kv), 0, 1) == 0;
    llama_memory_seq_rm(kv->mem, kv->scratch, -1, -1);
    return ok;
}

bool kvfl_computes_as_named(const kvf_llama *kv) {
    end_warm_up(kv->ctx);
    return llama_get_causal_attn(kv->ctx);
}

kvf_status kvfl_know_kind(kvf_llama *kv, kvf_error *err, const struct llama_context_params *params) {
    kvf_status status = check_model(kv->model, err);
    if (status == KVF_OK) {
        status = check_context(kv, err, params);
    }
    if (status == KVF_OK) {
        status = take_empty(kv, err);
    }
    if (status == KVF_OK) {
        end_warm_up(kv->ctx);
        (void)kvfl_rebuild_graph(kv); /* if that fails, the probe fails too */
        status = know_shape(kv, err, params);
    }
    if (status == KVF_OK) {
        guess_pace(kv);
    }
    return status;
}

/* ---- what came from a store ---- */

/* blob.c, which is also built without llama.cpp, knows the types by number. */
_Static_assert(GGML_TYPE_F32 == 0 && GGML_TYPE_F16 == 1 && GGML_TYPE_Q4_0 == 2 && GGML_TYPE_Q4_1 == 3 &&
                   GGML_TYPE_Q5_0 == 6 && GGML_TYPE_Q5_1 == 7 && GGML_TYPE_Q8_0 == 8 && GGML_TYPE_IQ4_NL == 20 &&
                   GGML_TYPE_BF16 == 30,
               "ggml's types");

bool kvfl_is_block(const kvf_llama *kv, const void *bytes, size_t len, llama_pos first, llama_pos end) {
    const kvfl_kind *kind = &kv->kind;
    return kvfl_blob_is_block(&kind->shape, kind->num_caches, kind->empty + KVFL_BLOB_HEAD, kind->rest_bytes, bytes,
                              len, first, end);
}

/* The number of positions in a window that ends at `end`: if it slides (0), and if it begins anew after as many tokens
 * as it is long (1). */
static uint32_t window_cells(const kvf_llama *kv, uint32_t way, size_t end) {
    size_t window = (size_t)llama_model_n_swa(kv->model);
    if (window == 0) {
        return 0; /* no cache has one */
    }
    return (uint32_t)(way > 0 ? (end - 1) % window + 1 : end < window ? end : window);
}

size_t kvfl_state_length(const kvf_llama *kv, uint32_t way, size_t end) {
    return kvfl_state_bytes(&kv->kind.shape, kv->kind.num_caches, window_cells(kv, way, end));
}

bool kvfl_is_state(const kvf_llama *kv, const void *bytes, size_t len, size_t end) {
    for (uint32_t way = 0; way < KVFL_STATE_WAYS; way++) {
        if (len == kvfl_state_length(kv, way, end)) {
            return kvfl_blob_is_state(&kv->kind.shape, kv->kind.num_caches, bytes, len, window_cells(kv, way, end),
                                      (int32_t)end);
        }
    }
    return false;
}

/* ---- blocks and boundaries ---- */

static uint32_t most_block_tokens(const kvf_llama *kv) {
    bool windows = kv->kind.mode == KVFL_RANGE && kv->kind.num_caches > 1;
    uint32_t window = windows ? (uint32_t)llama_model_n_swa(kv->model) : KVFL_MAX_BLOCK_TOKENS;
    return window < KVFL_MAX_BLOCK_TOKENS ? window : KVFL_MAX_BLOCK_TOKENS;
}

static uint32_t choose_block_tokens(const kvf_llama *kv) {
    uint32_t tokens = KVFL_MIN_BATCH;
    while (kv->kind.cell_bytes > 0 && 2 * tokens <= most_block_tokens(kv) &&
           kv->kind.fixed_bytes + 2 * tokens * kv->kind.cell_bytes <= KVFL_RECORD_AIM) {
        tokens *= 2;
    }
    return tokens;
}

/* The largest size of a state. */
static size_t most_state_bytes(const kvf_llama *kv) {
    return kvfl_state_bytes(&kv->kind.shape, kv->kind.num_caches, (size_t)llama_model_n_swa(kv->model));
}

/* The larger a state, the fewer are stored: at most twice the bytes of the blocks between them, or STATE_AIM for each
 * MIN_APART tokens. */
static uint32_t choose_apart(const kvf_llama *kv) {
    uint32_t apart = MIN_APART > kv->block_tokens ? MIN_APART : kv->block_tokens;
    size_t state = most_state_bytes(kv);
    while (apart < MAX_APART && state > 2 * apart * kv->kind.cell_bytes && state > STATE_AIM / MIN_APART * apart) {
        apart *= 2;
    }
    return apart;
}

kvf_status kvfl_set_block_tokens(kvf_llama *kv, kvf_error *err, uint32_t wanted) {
    uint32_t most = most_block_tokens(kv);
    kv->block_tokens = wanted != 0 ? wanted : choose_block_tokens(kv);
    if ((kv->block_tokens & (kv->block_tokens - 1)) != 0 || kv->block_tokens < KVFL_MIN_BATCH ||
        kv->block_tokens > most) {
        return kvfl_fail(err, KVF_LIMIT, "block_tokens must be a power of two from %u to %u, not %u", KVFL_MIN_BATCH,
                         most, kv->block_tokens);
    }
    size_t bytes = kv->kind.fixed_bytes + kv->block_tokens * kv->kind.cell_bytes;
    kv->stride = (bytes + PAGE - 1) / PAGE * PAGE;
    kv->kind.apart = choose_apart(kv);
    return KVF_OK;
}
