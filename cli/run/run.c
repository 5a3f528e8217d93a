/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry run: answers a prompt. Stored blocks are loaded; computed blocks are saved while the answer is written.
 */
#include "run/run.h"
#include "run/verbs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { FLUSH_MS = 10000, INTERRUPTED_FLUSH_MS = 1000 };

/* ---- arguments ---- */

static int take_temp(void *ctx, const char *text) {
    kvfcli_run_state *run = ctx;
    char *end = NULL;
    run->options.temp = strtof(text, &end);
    if (end == text || *end != '\0' || !isfinite(run->options.temp) || run->options.temp < 0) {
        return kvfcli_usage("--temp takes a number from 0 on, not \"%s\"", text);
    }
    return KVFCLI_FINE;
}

#define KV_TYPES "f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl"
static int take_kv_type(void *ctx, const char *text) {
    static const enum ggml_type types[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16,
                                           GGML_TYPE_Q8_0, GGML_TYPE_Q5_1, GGML_TYPE_Q5_0,
                                           GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL};
    kvfcli_run_state *run = ctx;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (strcmp(text, ggml_type_name(types[i])) == 0) {
            run->options.kv_type = types[i];
            return KVFCLI_FINE;
        }
    }
    return kvfcli_usage("--kv-type is one of " KV_TYPES ", not \"%s\"", text);
}

static int take_flash_attn(void *ctx, const char *text) {
    static const enum llama_flash_attn_type types[] = {LLAMA_FLASH_ATTN_TYPE_ENABLED, LLAMA_FLASH_ATTN_TYPE_DISABLED,
                                                       LLAMA_FLASH_ATTN_TYPE_AUTO};
    static const char *const names[] = {"on", "off", "auto"};
    kvfcli_run_state *run = ctx;
    for (size_t i = 0; i < 3; i++) {
        if (strcmp(text, names[i]) == 0) {
            run->options.flash_attn = types[i];
            return KVFCLI_FINE;
        }
    }
    return kvfcli_usage("--flash-attn is on, off or auto, not \"%s\"", text);
}

static int check_chat(const kvfcli_run_options *options) {
    if (options->chat == NULL) {
        return options->restart ? kvfcli_usage("--restart needs --chat ID") : KVFCLI_FINE;
    }
    if (options->no_store) {
        return kvfcli_usage("--chat needs a store to keep the conversation in");
    }
    size_t len = strlen(options->chat);
    if (len == 0 || len > KVF_MAX_ID_BYTES || kvfl_utf8_check(options->chat, len) < len) {
        return kvfcli_usage("the id of a chat is UTF-8 text of 1 to %u bytes", KVF_MAX_ID_BYTES);
    }
    return KVFCLI_FINE;
}

static int check(void *ctx, const kvfcli_common *common, int num_left, char **left) {
    kvfcli_run_state *run = ctx;
    kvfcli_run_options *options = &run->options;
    options->json = common->json;
    options->verbose = common->verbose;
    run->num_answer = options->num_answer;
    if (num_left > 0) {
        return kvfcli_usage("\"%s\" is unexpected: give text with -p TEXT or in a file with -f FILE", left[0]);
    }
    if (options->model == NULL) {
        return kvfcli_usage("which model? -m FILE.gguf");
    }
    if (options->file == NULL && options->prompt == NULL) {
        return kvfcli_usage("no prompt: give -p TEXT or -f FILE or both");
    }
    return check_chat(options);
}

/* ---- the prompt ---- */

/* There are two ways to make it: from the texts of all turns, or, exactly, from the tokens of earlier turns and the new
 * question. Which one applies is known only once the model is attached, and the context must have room for either. */
typedef struct prompts {
    kvfl_tokens anew, further;
} prompts;

static int tokenize_anew(kvfcli_run_state *run, kvfl_tokens *out) {
    kvfl_message *messages = kvfl_chat_messages(&run->chat, run->question.text);
    if (messages == NULL) {
        return kvfcli_no_memory();
    }
    int code = kvfcli_tokenize_chat(out, run->engine.vocab, run->chat_template, messages, 2 * run->chat.num_turns + 1);
    free(messages);
    return code;
}

static int tokenize_further(kvfcli_run_state *run, kvfl_tokens *out) {
    if (!kvfl_tokens_known(&run->chat.tokens, run->engine.vocab)) {
        return KVFCLI_FINE; /* of another model: stays empty */
    }
    if (!kvfl_tokens_add(out, run->chat.tokens.ids, run->chat.tokens.num)) {
        return kvfcli_no_memory();
    }
    return kvfcli_tokenize_turn(out, run->engine.vocab, run->chat_template, run->question.text);
}

static int tokenize(kvfcli_run_state *run, prompts *out) {
    int64_t began = kvfcli_now_us();
    int code = tokenize_anew(run, &out->anew);
    if (code == KVFCLI_FINE && run->chat.num_turns > 0) {
        code = tokenize_further(run, &out->further);
    }
    if (code == KVFCLI_FINE && out->anew.num == 0) {
        kvfcli_say("the prompt has no tokens");
        code = KVFCLI_INPUT;
    }
    run->tokenize_us = kvfcli_now_us() - began;
    run->before_us = run->chat_load_us + run->tokenize_us;
    return code;
}

static kvf_space *engine_space(const kvfcli_run_state *run) {
    return run->engine.kv != NULL ? kvf_llama_space(run->engine.kv) : NULL;
}

static void choose_prompt(kvfcli_run_state *run, prompts *from) {
    run->whole = from->further.num == 0 || !kvfl_chat_goes_on(&run->chat, engine_space(run));
    run->num_old = run->whole ? 0 : run->chat.tokens.num;
    kvfl_tokens *chosen = run->whole ? &from->anew : &from->further;
    run->prompt = *chosen;
    *chosen = (kvfl_tokens){.num = 0};
}

static int prepare(kvfcli_run_state *run) {
    prompts both = {.anew = {.num = 0}};
    int code = tokenize(run, &both);
    if (code == KVFCLI_FINE) {
        size_t longer = both.anew.num > both.further.num ? both.anew.num : both.further.num;
        code = kvfcli_make_context(&run->engine, &run->options, longer, &run->num_answer);
    }
    if (code == KVFCLI_FINE) {
        kvfcli_attach(&run->engine, run->store, &run->options);
        choose_prompt(run, &both);
    }
    kvfl_tokens_cleanup(&both.anew);
    kvfl_tokens_cleanup(&both.further);
    return code;
}

/* ---- the answer ---- */

static int answer(kvfcli_run_state *run) {
    run->began_us = kvfcli_now_us();
    int code = kvfcli_prefill(run);
    if (code == KVFCLI_FINE && run->stop != KVFCLI_STOP_INTERRUPTED) {
        code = kvfcli_generate(run);
    }
    if (!run->options.json && run->answer.len > 0 && run->answer.text[run->answer.len - 1] != '\n') {
        fputc('\n', stdout);
    }
    fflush(stdout);
    return code;
}

/* Blocks are written while the answer is computed. The rest then gets some time, which Ctrl-C shortens. */
static void flush(kvfcli_run_state *run) {
    int64_t began = kvfcli_now_us();
    kvf_status status = KVF_AGAIN;
    uint32_t left_ms = run->stop == KVFCLI_STOP_INTERRUPTED ? INTERRUPTED_FLUSH_MS : FLUSH_MS;
    bool interrupted = kvfcli_interrupted();
    while (status == KVF_AGAIN && left_ms > 0 && kvfcli_interrupted() == interrupted) {
        uint64_t unwritten = 0;
        status = kvf_store_flush(run->store, &unwritten, KVF_MS(100));
        run->unwritten += unwritten;
        left_ms -= 100;
    }
    run->unwritten += status == KVF_AGAIN; /* at least */
    run->unwritten_why = status == KVF_AGAIN ? KVF_WHY_BUDGET : kvfcli_last_failure(run->store, KVF_WHY_NONE);
    run->flush_us = kvfcli_now_us() - began;
}

static int keep_turn(kvfcli_run_state *run) {
    const kvfl_new_turn turn = {
        .question = run->question.text,
        .answer = run->answer.text != NULL ? run->answer.text : "",
        .prompt = run->prompt.ids + run->num_old,
        .num_prompt = run->prompt.num - run->num_old,
        .said = &run->said,
        .whole = run->whole,
        .engine = engine_space(run),
    };
    kvf_error err = {.status = KVF_OK};
    kvf_status status = kvfl_chat_add(&run->chat, &err, &turn, KVF_MS(FLUSH_MS));
    return status == KVF_OK ? KVFCLI_FINE : kvfcli_fail(status, &err);
}

static int answer_and_keep(kvfcli_run_state *run) {
    int code = answer(run);
    if (run->store != NULL) {
        flush(run);
    }
    if (code == KVFCLI_FINE && run->options.chat != NULL && run->stop != KVFCLI_STOP_INTERRUPTED) {
        code = keep_turn(run);
    }
    if (code == KVFCLI_FINE || run->stop == KVFCLI_STOP_INTERRUPTED) {
        kvfcli_report(run);
        code = run->options.json ? kvfcli_report_json(run, code) : code;
    }
    return run->stop == KVFCLI_STOP_INTERRUPTED ? KVFCLI_INTERRUPTED : code;
}

/* ---- all of it ---- */

static int open_store(kvfcli_run_state *run, const kvfcli_common *common) {
    /* The wait for the writers is flush()'s. */
    const kvf_options options = {.struct_size = sizeof options, .drain_us = KVF_POLL};
    if (run->options.no_store) {
        return KVFCLI_FINE;
    }
    if (run->options.chat != NULL || run->options.explain) {
        return kvfcli_open_reachable(&run->store, common, NULL);
    }
    return kvfcli_open(&run->store, common, &options);
}

/* Errors that are quick to find are found before the model is loaded. */
static int check_inputs(kvfcli_run_state *run, const kvfcli_common *common) {
    kvf_error err = {.status = KVF_OK};
    int code = kvfcli_read_prompt(&run->question, &run->options);
    if (code != KVFCLI_FINE) {
        return code;
    }
    kvf_status status = kvfcli_check_model_file(&err, run->options.model);
    return status == KVF_OK ? open_store(run, common) : kvfcli_fail(status, &err);
}

static int load_chat(kvfcli_run_state *run) {
    const kvfcli_run_options *o = &run->options;
    kvf_error err = {.status = KVF_OK};
    int64_t began = kvfcli_now_us();
    kvf_status status = kvfl_chat_load(&run->chat, &err, run->store, o->chat, NULL, KVF_MS(o->budget_ms), o->restart);
    run->chat_load_us = kvfcli_now_us() - began;
    if (status == KVF_IO && !o->restart) {
        kvfcli_say("%s; --restart starts again", err.what);
        return KVFCLI_IO;
    }
    return status == KVF_OK ? KVFCLI_FINE : kvfcli_fail(status, &err);
}

static int work(void *ctx, kvf_store *none, const kvfcli_common *common) {
    kvfcli_run_state *run = ctx;
    (void)none; /* check_inputs opens it */
    int code = check_inputs(run, common);
    if (code == KVFCLI_FINE) {
        code = kvfcli_load_model(&run->engine, &run->options);
    }
    if (code == KVFCLI_FINE && run->options.chat != NULL) {
        code = load_chat(run);
    }
    if (code == KVFCLI_FINE) {
        run->chat_template = kvfcli_choose_template(run->engine.model, &run->options);
        code = prepare(run);
    }
    if (kvfcli_interrupted()) {
        return KVFCLI_INTERRUPTED;
    }
    if (code == KVFCLI_FINE && run->options.explain) {
        return kvfcli_explain_prompt(run);
    }
    return code == KVFCLI_FINE ? answer_and_keep(run) : code;
}

static void cleanup(kvfcli_run_state *run) {
    kvfl_chat_cleanup(&run->chat);
    kvfcli_engine_cleanup(&run->engine);
    kvf_store_close(run->store);
    kvfl_tokens_cleanup(&run->prompt);
    kvfl_tokens_cleanup(&run->said);
    kvfl_text_cleanup(&run->answer);
    kvfcli_string_cleanup(&run->question);
}

static int run_or_explain(const kvfcli_verb *verb, int argc, char **argv, bool explain) {
    kvfcli_run_state run = {.options = {.explain = explain,
                                        .num_answer = explain ? 1 : 256,
                                        .seed = LLAMA_DEFAULT_SEED,
                                        .kv_type = GGML_TYPE_F16,
                                        .flash_attn = LLAMA_FLASH_ATTN_TYPE_AUTO}};
    kvfcli_log(KVF_LOG_WARN);
    int code = kvfcli_verb_main(verb, &run, argc, argv);
    cleanup(&run);
    return code;
}

#define TEXT(field, letter, name, value, help) \
    KVFCLI_OPT_TEXT(kvfcli_run_state, options.field, letter, name, value, help)
#define FLAG(field, name, help) KVFCLI_OPT_FLAG(kvfcli_run_state, options.field, 0, name, help)
#define NUMBER(field, letter, name, min, max, help) \
    KVFCLI_OPT_NUMBER(kvfcli_run_state, options.field, letter, name, "N", min, max, help)

/* What explain takes too, since it decides which blocks belong to the prompt. */
#define PROMPT_OPTIONS                                                                                        \
    TEXT(model, 'm', "model", "MODEL", "the model; of a split one its first file"),                           \
        TEXT(file, 'f', "file", "FILE", "a document, which precedes the question (-: stdin)"),                \
        TEXT(prompt, 'p', "prompt", "TEXT", "the question"),                                                  \
        TEXT(chat, 0, "chat", "ID", "continue the conversation of this id, or begin it; the store keeps it"), \
        FLAG(raw, "raw", "no chat template: use the text as it is")
#define MODEL_OPTIONS                                                                                              \
    NUMBER(ctx_size, 0, "ctx-size", 2, 1u << 26,                                                                   \
           "tokens of the context (default: what prompt and answer need, up to\nwhat the model was trained for)"), \
        NUMBER(threads, 0, "threads", 1, GGML_MAX_N_THREADS, "(default: one for each core)"),                      \
        KVFCLI_OPT_OTHER(take_kv_type, 0, "kv-type", "TYPE",                                                       \
                         "of the KV cache: " KV_TYPES "\n(f16); part of a block's identity"),                      \
        KVFCLI_OPT_OTHER(take_flash_attn, 0, "flash-attn", "WHEN", "on, off or auto (auto)"),                      \
        FLAG(portable, "portable",                                                                                 \
             "share blocks with other CPUs, GPUs and builds, whose numbers differ\nin the last bits"),             \
        NUMBER(budget_ms, 0, "budget-ms", 1, 3600000, "what is not loaded after this time is computed (10000)")

int kvfcli_run(int argc, char **argv) {
    static const kvfcli_option options[] = {
        KVFCLI_OPT_TITLE("Prompt"),
        PROMPT_OPTIONS,
        FLAG(restart, "restart", "forget the chat so far"),
        KVFCLI_OPT_TITLE("Answer"),
        NUMBER(num_answer, 'n', "num-tokens", 0, 1u << 24, "at most this many tokens (256)"),
        KVFCLI_OPT_OTHER(take_temp, 0, "temp", "T", "temperature (0: always the likeliest token)"),
        NUMBER(seed, 0, "seed", 0, UINT32_MAX - 1, "of the random choice with --temp"),
        FLAG(quiet, "quiet", "only the answer; no progress, no report"),
        KVFCLI_OPT_TITLE("Model"),
        MODEL_OPTIONS,
        KVFCLI_OPT_TITLE("Store"),
        FLAG(no_store, "no-store", "neither load nor save"),
        {.kind = KVFCLI_END}};
    static const kvfcli_verb verb = {
        .help =
            "usage: kvferry run -m MODEL [-f FILE] [-p TEXT] [--chat ID] [-n N] [options]\n"
            "\n"
            "Answers a prompt with a model (a GGUF file, by llama.cpp). The KV cache of the prompt is kept in\n"
            "the store block by block, so another run, process or machine with the same beginning loads it\n"
            "instead of computing it. The answer is the same.\n"
            "\n"
            "  kvferry run -m model.gguf -p \"Why is the sky blue?\"\n"
            "  kvferry run -m model.gguf -f document.txt -p \"What is it about?\"    computes the document, and saves it\n"
            "  kvferry run -m model.gguf -f document.txt -p \"Who wrote it?\"        another question: the document is "
            "loaded\n"
            "  kvferry run -m model.gguf --chat tea -p \"I like tea.\"               a conversation ...\n"
            "  kvferry run -m model.gguf --chat tea -p \"What do I like?\"           ... and its next turn, from any "
            "process\n"
            "  kvferry run -m model.gguf -f document.txt -n 0                      only computes and saves\n"
            "  cat mail | kvferry run -m model.gguf -f - -p \"Summarize this.\" --store redis://cache.local\n",
        .exits = "The answer goes to stdout, progress and a report of what was loaded to stderr. Time to the first\n"
                 "token counts from the text of the prompt on; the model is already loaded. If the store does not\n"
                 "answer, everything is computed (only a chat can't continue without it). Ctrl-C stops, and keeps\n"
                 "whole blocks.\n"
                 "\n"
                 "Exit codes: 0; 2 wrong usage; 3 the store needs your attention (wrong URL, password, database or\n"
                 "secret file, a path that is not a folder), or a chat has no store; 4 a model, file or prompt that\n"
                 "can't be used; 5 the answer could not be computed or printed, or the chat not stored; 130\n"
                 "interrupted.\n",
        .options = options,
        .needs = KVFCLI_OWN,
        .check = check,
        .work = work};
    return run_or_explain(&verb, argc, argv, false);
}

int kvfcli_explain(int argc, char **argv) {
    static const kvfcli_option options[] = {PROMPT_OPTIONS, MODEL_OPTIONS, {.kind = KVFCLI_END}};
    static const kvfcli_verb verb = {
        .help = "usage: kvferry explain -m MODEL [-f FILE] [-p TEXT] [options]\n"
                "\n"
                "Says what of a prompt is stored, and why the rest is not: the first token that differs from what\n"
                "is stored, and both texts; another chat template; another space (KV type, flash attention, build,\n"
                "rope ...) that has the same beginning; blocks that were evicted or have expired. Use the same\n"
                "options as for the run in question. Computes only a few tokens, to find the space; reads the\n"
                "headers of all records of the store, so it takes a while on a large one.\n"
                "\n"
                "  kvferry explain -m model.gguf -f document.txt -p \"What is it about?\"\n",
        .exits = "Its one-word answer (`why` of --json): stored (all of it), differs, ends (a stored prompt is a\n"
                 "part of this one), other-template, evicted, other-space, absent, or the reason of the store\n"
                 "(unreachable, budget ...).\n"
                 "Exit codes: 0; 2 wrong usage; 3 a store that can't be reached; 4 a model or prompt that can't be\n"
                 "used, or of which nothing can be saved.\n",
        .options = options,
        .needs = KVFCLI_OWN,
        .check = check,
        .work = work};
    return run_or_explain(&verb, argc, argv, true);
}
