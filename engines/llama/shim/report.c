/* SPDX-License-Identifier: Apache-2.0
 *
 * Options from the environment (`kvferry exec` sets them), and reports: a line on stderr for each prompt, and counters
 * in a file.
 */
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llama/shim/shim.h"
#include "llama/tell/tell.h"

#define MAX_STORES     8u
#define STATS_EVERY_US 1000000
#define TOLD_TOKENS    64u /* shorter prompts are not reported */
#define DRAFT_TOKENS   16u /* speculation takes back at most this many at a step; more is an answer */

_Thread_local unsigned kvfl_shim_inside;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static kvfl_shim_options options;
static kvf_store *store;
static char store_name[300];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static kvf_llama_counters gone;                   /* of contexts that were closed */
static const kvf_llama *live[KVFL_SHIM_CONTEXTS]; /* of those that are served */
static char refused[300];
static int64_t written_us;

/* Explains why the last prompt was not loaded completely, without asking the store. */
typedef struct explanation {
    llama_seq_id seq;
    kvf_llama_report report;
    bool told;         /* something is known of it */
    kvf_absence cause; /* why its tokens are new ... */
    size_t at;         /* ... and from which one on */
} explanation;
static explanation last; /* num_tokens 0: none yet */

void kvfl_shim_say(const char *format, ...) {
    char line[1024];
    va_list args;
    if (options.quiet) {
        return;
    }
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    fprintf(stderr, "kvferry: %s\n", line);
}

/* ---- the numbers ---- */

static void add(kvf_llama_counters *sum, const kvf_llama *kv) {
    kvf_llama_counters c = {.struct_size = sizeof c};
    kvf_llama_count(kv, &c);
    sum->prompts += c.prompts;
    sum->prompt_tokens += c.prompt_tokens;
    sum->resident_tokens += c.resident_tokens;
    sum->copied_tokens += c.copied_tokens;
    sum->loaded_tokens += c.loaded_tokens;
    sum->computed_tokens += c.computed_tokens;
    sum->generated_tokens += c.generated_tokens;
    sum->loaded_bytes += c.loaded_bytes;
    sum->saved_blocks += c.saved_blocks;
    sum->known_blocks += c.known_blocks;
    sum->shed_blocks += c.shed_blocks;
    for (size_t i = 0; i < KVF_NUM_ASIDES; i++) {
        sum->aside_tokens[i] += c.aside_tokens[i];
    }
    for (size_t i = 0; i < KVF_LLAMA_NUM_PLANS; i++) {
        sum->plans[i] += c.plans[i];
    }
    for (size_t i = 0; i < KVF_NUM_REASONS; i++) {
        sum->ended[i] += c.ended[i];
    }
    sum->match_us += c.match_us;
    sum->load_us += c.load_us;
    sum->import_us += c.import_us;
    sum->compute_us += c.compute_us;
    sum->waited_us += c.waited_us;
}

/* Under the lock: the place of a handle, or a free place for NULL. */
static const kvf_llama **place_of(const kvf_llama *kv) {
    for (size_t i = 0; i < KVFL_SHIM_CONTEXTS; i++) {
        if (live[i] == kv) {
            return &live[i];
        }
    }
    return NULL;
}

void kvfl_shim_add_live(const kvf_llama *kv) {
    pthread_mutex_lock(&lock);
    *place_of(NULL) = kv; /* there are as many places as contexts */
    pthread_mutex_unlock(&lock);
}

void kvfl_shim_add_gone(const kvf_llama *kv) {
    pthread_mutex_lock(&lock);
    add(&gone, kv);
    *place_of(kv) = NULL;
    pthread_mutex_unlock(&lock);
}

void kvfl_shim_note_refused(const char *why) {
    pthread_mutex_lock(&lock);
    snprintf(refused, sizeof refused, "%s", why);
    pthread_mutex_unlock(&lock);
}

static json_t *reasons(const uint64_t counts[KVF_ASIDE_ROOM]) {
    json_t *out = json_object();
    for (unsigned i = 1; i < KVF_NUM_ASIDES; i++) {
        json_object_set_new(out, kvf_llama_aside_name((kvf_llama_aside)i), json_integer((json_int_t)counts[i]));
    }
    return out;
}

static json_t *plans(const uint64_t counts[KVF_LLAMA_PLAN_ROOM]) {
    json_t *out = json_object();
    for (unsigned i = 0; i < KVF_LLAMA_NUM_PLANS; i++) {
        json_object_set_new(out, kvf_llama_plan_name((kvf_llama_plan)i), json_integer((json_int_t)counts[i]));
    }
    return out;
}

static json_t *misses(const uint64_t counts[KVF_REASON_ROOM]) {
    json_t *out = json_object();
    for (unsigned i = 1; i < KVF_NUM_REASONS; i++) {
        if (counts[i] > 0) {
            json_object_set_new(out, kvf_reason_name((kvf_reason)i), json_integer((json_int_t)counts[i]));
        }
    }
    return out;
}

static json_t *last_prompt(const explanation *x) {
    json_t *out = x->report.num_tokens > 0 ? kvfl_tell_json(&x->report) : json_null();
    if (json_is_object(out)) {
        bool placed = x->cause == KVF_ABSENCE_DIFFERS || x->cause == KVF_ABSENCE_ENDS;
        json_t *at = placed ? json_integer((json_int_t)x->at) : json_null();
        json_object_set_new(out, "sequence", json_integer(x->seq));
        json_object_set_new(out, "explain",
                            x->told ? json_pack("{s:s, s:O}", "why", kvf_absence_name(x->cause), "differs_at", at)
                                    : json_null());
        json_decref(at);
    }
    return out;
}

static json_t *stats_json(void) {
    kvf_llama_counters c = gone;
    kvf_stats s = {.struct_size = sizeof s};
    for (size_t i = 0; i < KVFL_SHIM_CONTEXTS; i++) {
        if (live[i] != NULL) {
            add(&c, live[i]);
        }
    }
    kvf_store_stats(store, &s);
    json_t *out = json_object();
    const struct {
        const char *name;
        uint64_t value;
    } numbers[] = {{"prompts", c.prompts},
                   {"prompt_tokens", c.prompt_tokens},
                   {"resident_tokens", c.resident_tokens},
                   {"copied_tokens", c.copied_tokens},
                   {"loaded_tokens", c.loaded_tokens},
                   {"computed_tokens", c.computed_tokens},
                   {"generated_tokens", c.generated_tokens},
                   {"loaded_bytes", c.loaded_bytes},
                   {"saved_blocks", c.saved_blocks},
                   {"known_blocks", c.known_blocks},
                   {"shed_blocks", c.shed_blocks},
                   {"lookup_us", c.match_us},
                   {"load_us", c.load_us},
                   {"import_us", c.import_us},
                   {"compute_us", c.compute_us},
                   {"waited_us", c.waited_us},
                   {"written_blocks", s.saved},
                   {"written_bytes", s.saved_bytes},
                   {"backlog_bytes", s.backlog_bytes}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        json_object_set_new(out, numbers[i].name, json_integer((json_int_t)numbers[i].value));
    }
    json_object_set_new(out, "aside_tokens", reasons(c.aside_tokens));
    json_object_set_new(out, "plans", plans(c.plans));
    json_object_set_new(out, "why", misses(c.ended));
    json_object_set_new(out, "last_prompt", last_prompt(&last));
    json_object_set_new(out, "missed_blocks", misses(s.misses));
    json_object_set_new(out, "unwritten_blocks", misses(s.save_failures));
    json_object_set_new(out, "refused", refused[0] != '\0' ? json_string(refused) : json_null());
    return out;
}

/* Written under a temporary name and renamed, so that nobody reads half of it. */
static void write_stats(void) {
    char aside[4200];
    if (options.stats_path == NULL || store == NULL) {
        return;
    }
    snprintf(aside, sizeof aside, "%s.%ld", options.stats_path, (long)getpid());
    pthread_mutex_lock(&lock);
    json_t *json = stats_json();
    if (json_dump_file(json, aside, JSON_INDENT(2)) != 0 || rename(aside, options.stats_path) != 0) {
        (void)unlink(aside);
    }
    json_decref(json);
    written_us = kvfl_now_us();
    pthread_mutex_unlock(&lock);
}

/* ---- why ---- */

/* The plan does not depend on the store: the prompt continues from the middle of a block, or was left alone. */
static bool is_unasked(const kvf_llama_report *r) {
    return r->plan == KVF_LLAMA_PLAN_NONE && r->why == KVF_WHY_NONE && r->computed_tokens > 1;
}

/* Token ids as the core has them. */
static const uint32_t *tokens_of(const kvfl_history *h) {
    return (const uint32_t *)h->tokens;
}

static explanation explain(const kvfl_shim_context *c, llama_seq_id seq, const kvf_llama_report *r) {
    explanation x = {.seq = seq, .report = *r};
    size_t stored = r->resident_tokens + r->copied_tokens + r->stored_tokens, have = r->num_tokens - r->computed_tokens;
    bool absent = r->why == KVF_WHY_ABSENT;
    if (absent || is_unasked(r)) {
        x.cause = kvf_earlier_explain(c->earlier, &x.at, c->kv->identity, tokens_of(&c->kv->follow->histories[seq]),
                                      r->num_tokens, stored > have ? stored : have, c->kv->block_tokens);
    }
    /* If a state is missing, or blocks that were found are computed, it is unknown which block was not there. */
    bool exact =
        absent && !kvfl_has_states(c->kv) && (r->plan == KVF_LLAMA_PLAN_LOAD || r->plan == KVF_LLAMA_PLAN_NONE);
    x.cause = x.cause == KVF_ABSENCE_EVICTED && !exact ? KVF_ABSENCE_UNKNOWN : x.cause;
    x.told = absent || x.cause != KVF_ABSENCE_UNKNOWN;
    return x;
}

/* Why not everything was loaded; "": everything was. */
static void why_in_words(char *out, size_t room, const explanation *x, uint32_t block_tokens) {
    static const char *const causes[KVF_NUM_ABSENCES] = {
        [KVF_ABSENCE_UNKNOWN] = "not in the store",
        [KVF_ABSENCE_DIFFERS] = "token %zu is the first that differs from an earlier prompt",
        [KVF_ABSENCE_ENDS] = "the earlier prompt that it continues ends at token %zu",
        [KVF_ABSENCE_EVICTED] = "no longer in the store, where it was for an earlier prompt up to token %zu"};
    const kvf_llama_report *r = &x->report;
    if (x->told) {
        snprintf(out, room, causes[x->cause], x->at);
    } else if (r->why != KVF_WHY_NONE || r->missed_blocks > 0) {
        snprintf(out, room, "%s", kvfl_tell_why(r->why != KVF_WHY_NONE ? r->why : r->missed_why));
    } else {
        bool left_alone = is_unasked(r) && r->computed_tokens >= 2 * block_tokens;
        snprintf(out, room, "%s", left_alone ? "not looked for" : "");
    }
}

static void say_prompt(const explanation *x, uint32_t block_tokens) {
    const kvf_llama_report *r = &x->report;
    char plan[KVFL_TELL_TEXT], why[KVFL_TELL_TEXT];
    kvfl_tell_plan(plan, sizeof plan, r);
    why_in_words(why, sizeof why, x, block_tokens);
    kvfl_shim_say("sequence %d: %u of %u tokens loaded from %s in %.0f ms, %u resident, %u copied, %u computed in "
                  "%.0f ms; plan: %s%s%s",
                  x->seq, r->loaded_tokens, r->num_tokens, store_name, (double)(r->match_us + r->load_us) / 1000,
                  r->resident_tokens, r->copied_tokens, r->computed_tokens, (double)r->compute_us / 1000, plan,
                  why[0] != '\0' ? "; " : "", why);
}

void kvfl_shim_on_prompt(void *ctx, llama_seq_id seq, const kvf_llama_report *r) {
    kvfl_shim_context *c = ctx;
    if (r->num_tokens >= TOLD_TOKENS) {
        explanation x = explain(c, seq, r);
        say_prompt(&x, c->kv->block_tokens);
        kvf_earlier_keep(c->earlier, c->kv->identity, tokens_of(&c->kv->follow->histories[seq]), r->num_tokens);
        pthread_mutex_lock(&lock);
        last = x;
        pthread_mutex_unlock(&lock);
    }
    if (kvfl_now_us() - written_us > STATS_EVERY_US) {
        write_stats();
    }
}

void kvfl_shim_before_cut(kvfl_shim_context *c, llama_seq_id seq, llama_pos first) {
    if (!kvfl_is_text(c->kv, seq)) {
        return;
    }
    const kvfl_history *h = &c->kv->follow->histories[seq];
    if (h->num >= TOLD_TOKENS && h->num > (size_t)(first > 0 ? first : 0) + DRAFT_TOKENS) {
        kvf_earlier_keep(c->earlier, h->identity, tokens_of(h), h->num);
    }
}

/* ---- options and the store ---- */

static uint32_t number(const char *name) {
    const char *text = getenv(name);
    return text != NULL ? (uint32_t)strtoul(text, NULL, 10) : 0;
}

static const char *text_of(const char *name) {
    const char *text = getenv(name);
    return text != NULL && text[0] != '\0' ? text : NULL;
}

static void on_exit_drain(void) {
    kvfl_shim_inside++;
    if (kvf_store_flush(store, NULL, KVF_MS(5000)) != KVF_OK) {
        kvfl_shim_say("not all blocks could be written before the end");
    }
    write_stats();
}

static void open_store(const char *text) {
    const char *urls[MAX_STORES];
    size_t num = 0;
    char *copy = strdup(text), *rest = NULL;
    kvf_error err = {.status = KVF_OK};
    kvf_options own = {.struct_size = sizeof own, .secret_files = getenv("KVFERRY_SECRET_FILE")};
    for (char *url = copy != NULL ? strtok_r(copy, " \t\n", &rest) : NULL; url != NULL && num < MAX_STORES;
         url = strtok_r(NULL, " \t\n", &rest)) {
        urls[num++] = url;
    }
    if (num > 0 && kvf_store_open(&store, &err, urls, num, &own) != KVF_OK) {
        store = NULL;
        kvfl_shim_say("nothing is loaded or stored: %s", err.what);
    }
    free(copy);
}

static void say_log(void *ctx, kvf_log_level level, const char *message) {
    (void)ctx;
    (void)level;
    kvfl_shim_say("%s", message);
}

static void set_up(void) {
    const char *urls = text_of("KVFERRY_STORE");
    options = (kvfl_shim_options){.tenant = text_of("KVFERRY_TENANT"),
                                  .stats_path = text_of("KVFERRY_STATS"),
                                  .budget_ms = number("KVFERRY_BUDGET_MS"),
                                  .block_tokens = number("KVFERRY_BLOCK_TOKENS"),
                                  .portable = number("KVFERRY_PORTABLE") != 0,
                                  .quiet = number("KVFERRY_QUIET") != 0};
    if (urls == NULL) {
        kvfl_shim_say("nothing is loaded or stored: KVFERRY_STORE is not set");
        return;
    }
    kvf_set_log(say_log, NULL, KVF_LOG_WARN); /* what is wrong with the store, once; later the prompts' lines say it */
    open_store(urls);
    kvf_set_log(NULL, NULL, KVF_LOG_ERROR);
    if (store != NULL) {
        kvf_tier_info info = {.struct_size = sizeof info};
        bool told = kvf_tier_info_get(store, &info, 0) == KVF_OK;
        snprintf(store_name, sizeof store_name, "%s", told ? info.url : "the store");
        atexit(on_exit_drain);
    }
}

const kvfl_shim_options *kvfl_shim_get_options(void) {
    pthread_once(&once, set_up);
    return &options;
}

kvf_store *kvfl_shim_store(void) {
    pthread_once(&once, set_up);
    return store;
}
