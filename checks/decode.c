/* SPDX-License-Identifier: Apache-2.0
 *
 * The cost of the shim while tokens are generated, to a fraction of a percent on a noisy machine. Two contexts of one
 * model in one process, one through the shim (this runs under kvferry exec), one through the real functions of
 * libllama, generate in turn, token by token, so that other load of the machine affects both alike. 64 tokens, in which
 * the shim saves one block, are a pair. A line shows both times.
 *
 * Write-behind runs while tokens of the shim's context are generated: after the end of a block that context first
 * generates some tokens alone. So all of it counts against the shim.
 */
#include <dlfcn.h>
#include <inttypes.h>
#include <llama.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BLOCK  64u /* tokens of a pair */
#define AHEAD  8u  /* of them, those of the shim that run alone */
#define PROMPT 128u
#define ROUND  16u /* pairs, before both begin anew: so that no context gets long */
#define N_CTX  2048u

/* The calls that a program makes for each token, and those that make its context. */
typedef struct calls {
    struct llama_context *(*init)(struct llama_model *, struct llama_context_params);
    int32_t (*decode)(struct llama_context *, struct llama_batch);
    float *(*logits)(struct llama_context *, int32_t);
    llama_memory_t (*memory)(const struct llama_context *);
    void (*clear)(llama_memory_t, bool);
} calls;

typedef struct side {
    calls call;
    struct llama_context *ctx;
    llama_pos pos;
    double ns; /* of the pair at hand */
} side;

static void give_up(const char *why) {
    fprintf(stderr, "check_decode: %s\n", why);
    exit(1);
}

static void *real(void *lib, const char *name) {
    void *found = dlsym(lib, name);
    if (found == NULL) {
        give_up(name);
    }
    return found;
}

/* A function pointer of any type from dlsym, as POSIX has it. */
#define REAL(to, lib, name)                \
    do {                                   \
        void *found = real(lib, #name);    \
        memcpy(&(to), &found, sizeof(to)); \
    } while (0)

static calls real_calls(void) {
    calls c;
    void *lib = dlopen("libllama.so.0", RTLD_NOW | RTLD_NOLOAD);
    if (lib == NULL) {
        give_up("libllama.so.0 is not loaded");
    }
    REAL(c.init, lib, llama_init_from_model);
    REAL(c.decode, lib, llama_decode);
    REAL(c.logits, lib, llama_get_logits_ith);
    REAL(c.memory, lib, llama_get_memory);
    REAL(c.clear, lib, llama_memory_clear);
    return c;
}

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

/* The same tokens for both, others in every round. */
static llama_token token_at(unsigned round, llama_pos pos) {
    uint64_t x = (uint64_t)round * 0x9e3779b97f4a7c15u + (uint64_t)pos * 0xbf58476d1ce4e5b9u;
    x ^= x >> 31;
    return (llama_token)(100 + x % 40000);
}

static void decode(side *s, unsigned round, uint32_t num) {
    struct llama_batch batch = llama_batch_init((int32_t)num, 0, 1);
    for (uint32_t i = 0; i < num; i++) {
        batch.token[i] = token_at(round, s->pos);
        batch.pos[i] = s->pos++;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = i + 1 == num;
    }
    batch.n_tokens = (int32_t)num;
    double begin = now_ns();
    if (s->call.decode(s->ctx, batch) != 0 || s->call.logits(s->ctx, -1) == NULL) {
        give_up("llama_decode failed");
    }
    s->ns += now_ns() - begin;
    llama_batch_free(batch);
}

static void begin_round(side *s, unsigned round) {
    s->call.clear(s->call.memory(s->ctx), true);
    s->pos = 0;
    decode(s, round, PROMPT);
}

static void pair(side *shim, side *plain, unsigned round) {
    shim->ns = plain->ns = 0;
    for (uint32_t i = 0; i < AHEAD; i++) {
        decode(shim, round, 1);
    }
    for (uint32_t i = 0; i < AHEAD; i++) {
        decode(plain, round, 1);
    }
    for (uint32_t i = AHEAD; i < BLOCK; i++) {
        decode(i % 2 == 0 ? shim : plain, round, 1);
        decode(i % 2 == 0 ? plain : shim, round, 1);
    }
}

static void quiet(enum ggml_log_level level, const char *text, void *ctx) {
    (void)ctx;
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: kvferry exec ... -- check_decode MODEL PAIRS\n");
        return 2;
    }
    llama_log_set(quiet, NULL);
    unsigned pairs = (unsigned)strtoul(argv[2], NULL, 10);
    struct llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (model == NULL) {
        give_up("the model can't be loaded");
    }
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = N_CTX;
    params.n_seq_max = 1;
    params.kv_unified = true;
    params.n_threads = params.n_threads_batch = 2;
    side shim = {.call = {llama_init_from_model, llama_decode, llama_get_logits_ith, llama_get_memory,
                          llama_memory_clear}},
         plain = {.call = real_calls()};
    if (plain.call.decode == shim.call.decode) {
        give_up("the shim is not there: run it by kvferry exec");
    }
    shim.ctx = shim.call.init(model, params);
    plain.ctx = plain.call.init(model, params);
    if (shim.ctx == NULL || plain.ctx == NULL) {
        give_up("no context");
    }
    for (unsigned i = 0; i < pairs; i++) {
        if (i % ROUND == 0) {
            begin_round(&shim, i / ROUND);
            begin_round(&plain, i / ROUND);
        }
        pair(&shim, &plain, i / ROUND);
        printf("%.6f %.6f\n", plain.ns / 1e9, shim.ns / 1e9);
        fflush(stdout);
    }
    llama_free(shim.ctx);
    llama_free(plain.ctx);
    llama_model_free(model);
    return 0;
}
