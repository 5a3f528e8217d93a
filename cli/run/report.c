/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry run: the output at the end, for people on stderr and for programs on stdout.
 */
#include "run/run.h"

#include <string.h>

#include "llama/tell/tell.h"

static double ms(int64_t us) {
    return (double)us / 1000;
}

static const char *plural(uint64_t num) {
    return num == 1 ? "" : "s";
}

static double tokens_per_s(const kvfcli_run_state *run) {
    /* The first token came with the prompt. */
    return run->said.num > 1 && run->generate_us > 0 ? (double)(run->said.num - 1) * 1e6 / (double)run->generate_us : 0;
}

/* ---- for people ---- */

static void report_loaded(const kvfcli_run_state *run) {
    const kvf_llama_report *r = &run->report;
    char size[KVFCLI_TEXT];
    bool ended = r->why != KVF_WHY_NONE && r->why != KVF_WHY_ABSENT;
    if (r->loaded_tokens > 0) {
        fprintf(stderr, ", %u of them loaded (%s from %s%s%s)", r->loaded_tokens, kvfcli_size(size, r->loaded_bytes),
                run->source, ended ? "; " : "", ended ? kvfl_tell_why(r->why) : "");
    } else if (run->store != NULL && run->engine.kv != NULL) {
        fprintf(stderr, ", none of them loaded (%s)", ended ? kvfl_tell_why(r->why) : "not in the store");
    }
}

/* The decision, if there was something to decide. */
static void report_plan(const kvf_llama_report *r) {
    if (r->plan != KVF_LLAMA_PLAN_BOTH && r->plan != KVF_LLAMA_PLAN_COMPUTE) {
        return;
    }
    char plan[KVFL_TELL_TEXT];
    kvfl_tell_plan(plan, sizeof plan, r);
    fprintf(stderr, "kvferry: %u tokens were stored; plan: %s\n", r->stored_tokens, plan);
}

static void report_prompt(const kvfcli_run_state *run) {
    const kvf_llama_report *r = &run->report;
    fprintf(stderr, "kvferry: prompt %zu token%s", run->prompt.num, plural(run->prompt.num));
    report_loaded(run);
    fprintf(stderr, "; first token after %.3f s", (double)run->ttft_us / 1e6);
    if (r->loaded_tokens > 0) {
        fprintf(stderr, " (lookup %.1f, load %.1f with import %.1f, compute %.1f ms)", ms(r->match_us), ms(r->load_us),
                ms(r->import_us), ms(r->compute_us));
    }
    fputc('\n', stderr);
    report_plan(r);
}

static void report_stored(const kvfcli_run_state *run) {
    const kvf_llama_report *r = &run->report;
    if (r->saved_blocks > run->unwritten) {
        uint64_t stored = r->saved_blocks - run->unwritten;
        fprintf(stderr, "; %llu block%s stored", (unsigned long long)stored, plural(stored));
    }
    if (run->unwritten > 0) {
        bool full = run->unwritten_why == KVF_WHY_FULL;
        fprintf(stderr, "; %llu block%s not stored (%s%s)", (unsigned long long)run->unwritten, plural(run->unwritten),
                kvfl_tell_why(run->unwritten_why),
                full ? ": raise max= or tenant_max= of its URL, or free its disk" : "");
    }
    if (r->shed_blocks > 0) {
        fprintf(stderr, "; %u block%s dropped, as the store is slower than the model", r->shed_blocks,
                plural(r->shed_blocks));
    }
}

static void report_answer(const kvfcli_run_state *run) {
    fprintf(stderr, "kvferry: answer %zu token%s", run->said.num, plural(run->said.num));
    if (run->said.num > 1) {
        fprintf(stderr, ", %.1f a second", tokens_per_s(run));
    }
    if (run->stop == KVFCLI_STOP_LENGTH && run->num_answer > 0) {
        bool full = run->num_answer < run->options.num_answer;
        fprintf(stderr, ", cut off at %u (%s)", run->num_answer, full ? "the context is full" : "-n");
    }
    report_stored(run);
    if (run->options.chat != NULL) {
        fprintf(stderr, "; chat \"%s\", turn %zu", run->options.chat, run->chat.num_turns + 1);
    }
    fputc('\n', stderr);
}

void kvfcli_report(const kvfcli_run_state *run) {
    if (run->options.quiet || run->stop == KVFCLI_STOP_INTERRUPTED) {
        return;
    }
    report_prompt(run);
    report_answer(run);
}

/* ---- for programs ---- */

static json_t *real_ms(int64_t us) {
    return json_real(ms(us));
}

static json_t *text_or_null(const char *text) {
    return text != NULL && text[0] != '\0' ? json_string(text) : json_null();
}

static json_t *json_tokens(const kvfl_tokens *tokens) {
    json_t *list = json_array();
    for (size_t i = 0; i < tokens->num; i++) {
        json_array_append_new(list, json_integer(tokens->ids[i]));
    }
    return list;
}

static json_t *json_space(const kvfcli_run_state *run) {
    kvf_space *space = run->engine.kv != NULL ? kvf_llama_space(run->engine.kv) : NULL;
    kvf_digest digest;
    if (space == NULL) {
        return json_null();
    }
    kvf_space_digest(space, &digest);
    return kvfcli_json_hex(digest.bytes);
}

static json_t *json_chat(const kvfcli_run_state *run) {
    if (run->options.chat == NULL) {
        return json_null();
    }
    return json_pack("{s:s, s:I, s:I}", "id", run->options.chat, "turn", (json_int_t)run->chat.num_turns + 1,
                     "known_tokens", (json_int_t)run->num_old);
}

/* The fields beside the engine's own report. */
static json_t *json_run(const kvfcli_run_state *run) {
    return json_pack("{s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:f}", "prompt_tokens",
                     (json_int_t)run->prompt.num, "answer_tokens", (json_int_t)run->said.num, "unwritten_blocks",
                     (json_int_t)run->unwritten, "model_ms", real_ms(run->engine.model_us), "context_ms",
                     real_ms(run->engine.context_us), "attach_ms", real_ms(run->engine.attach_us), "chat_ms",
                     real_ms(run->chat_load_us), "tokenize_ms", real_ms(run->tokenize_us), "ttft_ms",
                     real_ms(run->ttft_us), "generate_ms", real_ms(run->generate_us), "flush_ms",
                     real_ms(run->flush_us), "tokens_per_s", tokens_per_s(run));
}

int kvfcli_report_json(const kvfcli_run_state *run, int code) {
    static const char *const stops[] = {"end", "length", "interrupted"};
    json_t *json = json_pack("{s:o, s:o, s:s, s:o, s:o, s:o, s:o, s:I}", "answer",
                             json_stringn(run->answer.text != NULL ? run->answer.text : "", run->answer.len), "tokens",
                             json_tokens(&run->said), "stop", stops[run->stop], "chat", json_chat(run), "store",
                             text_or_null(run->source), "space", json_space(run), "refused",
                             text_or_null(run->engine.refused), "seed", (json_int_t)run->seed);
    json_t *report = kvfl_tell_json(&run->report), *more = json_run(run);
    if (json_object_update(json, report) != 0 || json_object_update(json, more) != 0) {
        json_decref(json);
        json = NULL;
    }
    json_decref(report);
    json_decref(more);
    return kvfcli_print_json(json, code);
}
