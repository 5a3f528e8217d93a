/* SPDX-License-Identifier: Apache-2.0
 *
 * Declarations that the files of kvferry run share. run.c reads the arguments and is the order of events. The others:
 * input: the text of the prompt; model: weights and context; text: tokens and chat template; answer: prefill and
 * generation; report: the output at the end; explain: kvferry explain; module: all of it as a module.
 */
#ifndef KVFCLI_RUN_H
#define KVFCLI_RUN_H

#include <kvferry/llama.h>

#include "common/cli.h"
#include "llama/talk/talk.h"

/* ---- what the command line says */
typedef struct kvfcli_run_options {
    const char *model, *file, *prompt, *chat;
    bool explain; /* only report what is stored of the prompt */
    bool no_store, restart, raw, quiet, portable, json, verbose;
    uint32_t num_answer, ctx_size, budget_ms, threads; /* 0 = the default */
    uint32_t seed;                                     /* LLAMA_DEFAULT_SEED: a random one */
    float temp;
    enum ggml_type kv_type;
    enum llama_flash_attn_type flash_attn;
} kvfcli_run_options;

/* ---- input (input.c) */
/* kvfcli_read_prompt puts the document and the question into one text. Returns 0, or an exit code after a message. */
int kvfcli_read_prompt(kvfcli_string *out, const kvfcli_run_options *options);

/* ---- model and context (model.c) */
typedef struct kvfcli_engine {
    struct llama_model *model;
    const struct llama_vocab *vocab;
    struct llama_context *ctx;
    struct llama_model_params model_params;
    struct llama_context_params params;
    kvf_llama *kv; /* NULL: this context is refused, for the reason in `refused` */
    kvfcli_progress progress;
    char refused[252];
    int64_t model_us, context_us, attach_us;
} kvfcli_engine;

enum { KVFCLI_TEXT_SEQ = 0, KVFCLI_SCRATCH_SEQ = 1, KVFCLI_NUM_SEQS = 2 };

/* kvfcli_check_model_file recognises files that are not models before llama.cpp does, with a better message. KVF_OK or
 * KVF_LIMIT. */
kvf_status kvfcli_check_model_file(kvf_error *err, const char *path);
/* Both return 0, or an exit code after a message. */
int kvfcli_load_model(kvfcli_engine *engine, const kvfcli_run_options *options);
/* kvfcli_make_context makes a context for a prompt of num_prompt tokens and the answer, and lowers *num_answer to what
 * fits. */
int kvfcli_make_context(kvfcli_engine *engine, const kvfcli_run_options *options, size_t num_prompt,
                        uint32_t *num_answer);
/* kvfcli_attach never fails: a context that can't use a store works without one. */
void kvfcli_attach(kvfcli_engine *engine, kvf_store *store, const kvfcli_run_options *options);
void kvfcli_show_prefill(kvfcli_engine *engine, uint32_t done, uint32_t total);
void kvfcli_engine_cleanup(kvfcli_engine *engine);
/* From here on the log of llama.cpp goes to stderr (verbose), or only its last error is kept. */
void kvfcli_watch_llama(bool verbose);
const char *kvfcli_llama_error(void); /* the first error since the last call of kvfcli_watch_llama; "" = none */

/* ---- text and tokens (text.c, which turns the errors of llama/talk into messages) */
/* kvfcli_choose_template takes the model's own; prints a message if that is impossible. */
kvfl_template kvfcli_choose_template(const struct llama_model *model, const kvfcli_run_options *options);
/* Both return 0, or an exit code after a message. */
int kvfcli_tokenize_chat(kvfl_tokens *out, const struct llama_vocab *vocab, kvfl_template chat_template,
                         const kvfl_message *messages, size_t num);
int kvfcli_tokenize_turn(kvfl_tokens *out, const struct llama_vocab *vocab, kvfl_template chat_template,
                         const char *question);

/* ---- all of one run (run.c) */
typedef enum kvfcli_stop { KVFCLI_STOP_END, KVFCLI_STOP_LENGTH, KVFCLI_STOP_INTERRUPTED } kvfcli_stop;

typedef struct kvfcli_run_state {
    kvfcli_run_options options;
    kvf_store *store; /* NULL: none */
    kvfcli_engine engine;
    kvfl_chat chat;
    int64_t chat_load_us;
    kvfcli_string question;
    kvfl_template chat_template;

    kvfl_tokens prompt;
    size_t num_old; /* tokens of the prompt that are earlier turns, exactly */
    bool whole;     /* the prompt was made from the messages, not by adding to the tokens of earlier turns */
    uint32_t num_answer;
    kvf_llama_report report;
    char source[256]; /* where the loaded blocks came from; "" = nothing was loaded */

    kvfl_tokens said;
    kvfl_text answer;
    kvfcli_stop stop;
    uint32_t seed;

    int64_t before_us; /* the part of the time to the first token before the context was made */
    int64_t began_us;  /* the rest of that time counts from here */
    int64_t tokenize_us, ttft_us, generate_us, flush_us;
    uint64_t unwritten; /* blocks that the store did not take */
    kvf_reason unwritten_why;
} kvfcli_run_state;

/* ---- prefill and generation (answer.c). Returns 0 (also when interrupted), or an exit code after a message. */
int kvfcli_prefill(kvfcli_run_state *run);
int kvfcli_generate(kvfcli_run_state *run);

/* ---- kvferry explain (explain.c). Returns an exit code. */
int kvfcli_explain_prompt(const kvfcli_run_state *run);

/* ---- what is said at the end (report.c) */
void kvfcli_report(const kvfcli_run_state *run);
int kvfcli_report_json(const kvfcli_run_state *run, int code);

#endif
