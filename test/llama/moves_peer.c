/* SPDX-License-Identifier: Apache-2.0
 *
 * kvf_moves_peer MODEL WHAT: a program with two sequences, for `kvferry exec`. WHAT:
 *   cold    two prompts, each in an emptied sequence: what the others must leave in a store, at most
 *   shared  a sequence is copied, and the cells that both have are moved in the one; the other goes on
 *   down    tokens are moved down, over the known ones
 *   warm    a warm-up ends before its logits are read
 */
#include <llama.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* llama_set_warmup */

static struct llama_context *ctx;
static llama_memory_t mem;

static _Noreturn void give_up(const char *what) {
    fprintf(stderr, "moves_peer: %s\n", what);
    exit(1);
}

/* Tokens [first, end) of sequence `seq`; from `other` on, of another prompt. */
static void put(llama_seq_id seq, int first, int end, int other) {
    struct llama_batch b = llama_batch_init(1024, 0, 1);
    for (int i = first; i < end; i++) {
        int k = b.n_tokens++;
        b.token[k] = 100 + (i * 7 + (i >= other ? 13 : 0)) % 90;
        b.pos[k] = i;
        b.n_seq_id[k] = 1;
        b.seq_id[k][0] = seq;
        b.logits[k] = i + 1 == end;
    }
    if (llama_decode(ctx, b) != 0) {
        give_up("llama_decode failed");
    }
    llama_batch_free(b);
}

static void compute(const char *what) {
    if (strcmp(what, "cold") == 0) {
        put(0, 0, 600, 600);
        llama_memory_clear(mem, true);
        put(0, 0, 600, 128);
    } else if (strcmp(what, "shared") == 0) {
        put(0, 0, 200, 600);
        llama_memory_seq_cp(mem, 0, 1, -1, -1);
        put(1, 200, 210, 600);
        llama_memory_seq_rm(mem, 0, 10, 30);
        llama_memory_seq_add(mem, 0, 30, 150, -20);
        put(1, 210, 600, 600);
    } else if (strcmp(what, "down") == 0) {
        put(0, 0, 200, 600);
        llama_memory_seq_add(mem, 0, 128, 200, -100);
        put(0, 128, 600, 128);
    } else {
        put(0, 0, 200, 600);
        llama_set_warmup(ctx, true);
        put(1, 0, 1, 600);
        llama_set_warmup(ctx, false);
        if (llama_get_logits_ith(ctx, -1) == NULL) {
            give_up("the logits of the warm-up are gone");
        }
    }
}

static void be_quiet(enum ggml_log_level level, const char *text, void *arg) {
    (void)level;
    (void)text;
    (void)arg;
}

int main(int argc, char **argv) {
    if (argc != 3) {
        give_up("usage: MODEL WHAT");
    }
    llama_log_set(be_quiet, NULL);
    struct llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = 2048;
    params.n_seq_max = 2;
    params.kv_unified = true;
    params.n_threads = params.n_threads_batch = 2;
    ctx = model != NULL ? llama_init_from_model(model, params) : NULL;
    if (ctx == NULL) {
        give_up("there is no context");
    }
    mem = llama_get_memory(ctx);
    compute(argv[2]);
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
