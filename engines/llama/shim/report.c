/* SPDX-License-Identifier: Apache-2.0
 *
 * Options come by the environment (`kvferry exec` sets it); what happened goes to stderr, a line for each prompt, and
 * to a file.
 */
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llama/shim/shim.h"

#define MAX_STORES     8u
#define STATS_EVERY_US 1000000

static pthread_once_t once = PTHREAD_ONCE_INIT;
static kvfl_shim_options options;
static kvf_store *store;
static char store_name[300];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static kvf_llama_counters gone; /* of contexts that were closed */
static char refused[300];
static int64_t written_us;

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
}

static void add_live(void *arg, const kvf_llama *kv) {
    add(arg, kv);
}

void kvfl_shim_add_gone(const kvf_llama *kv) {
    pthread_mutex_lock(&lock);
    add(&gone, kv);
    pthread_mutex_unlock(&lock);
}

void kvfl_shim_note_refused(const char *why) {
    pthread_mutex_lock(&lock);
    snprintf(refused, sizeof refused, "%s", why);
    pthread_mutex_unlock(&lock);
}

static json_t *reasons(const uint64_t counts[KVF_NUM_ASIDES]) {
    json_t *out = json_object();
    for (unsigned i = 1; i < KVF_NUM_ASIDES; i++) {
        json_object_set_new(out, kvf_llama_aside_name((kvf_llama_aside)i), json_integer((json_int_t)counts[i]));
    }
    return out;
}

static json_t *misses(const uint64_t counts[KVF_NUM_REASONS]) {
    json_t *out = json_object();
    for (unsigned i = 1; i < KVF_NUM_REASONS; i++) {
        if (counts[i] > 0) {
            json_object_set_new(out, kvf_reason_name((kvf_reason)i), json_integer((json_int_t)counts[i]));
        }
    }
    return out;
}

static json_t *stats_json(void) {
    kvf_llama_counters c = gone;
    kvf_stats s = {.struct_size = sizeof s};
    kvfl_shim_each(add_live, &c);
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
                   {"written_blocks", s.saved},
                   {"written_bytes", s.saved_bytes},
                   {"backlog_bytes", s.backlog_bytes}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        json_object_set_new(out, numbers[i].name, json_integer((json_int_t)numbers[i].value));
    }
    json_object_set_new(out, "aside_tokens", reasons(c.aside_tokens));
    json_object_set_new(out, "missed_blocks", misses(s.misses));
    json_object_set_new(out, "unwritten_blocks", misses(s.save_failures));
    json_object_set_new(out, "refused", refused[0] != '\0' ? json_string(refused) : json_null());
    return out;
}

/* Beside its place and renamed, so that nobody reads half of it. */
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

void kvfl_shim_on_prompt(void *ctx, llama_seq_id seq, const kvf_llama_report *r) {
    (void)ctx;
    if (r->num_tokens >= 64) {
        kvfl_shim_say(
            "sequence %d: %u of %u tokens loaded from %s in %.0f ms, %u resident, %u copied, %u computed in %.0f ms%s%s",
            seq, r->loaded_tokens, r->num_tokens, store_name, (double)(r->match_us + r->load_us) / 1000,
            r->resident_tokens, r->copied_tokens, r->computed_tokens, (double)r->compute_us / 1000,
            r->why != KVF_WHY_NONE ? "; then: " : "", r->why != KVF_WHY_NONE ? kvf_reason_name(r->why) : "");
    }
    if (kvfl_now_us() - written_us > STATS_EVERY_US) {
        write_stats();
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
    if (kvf_store_flush(store, 5000) != KVF_OK) {
        kvfl_shim_say("not all blocks could be written before the end");
    }
    write_stats();
}

static void open_store(const char *text) {
    const char *urls[MAX_STORES];
    size_t num = 0;
    char *copy = strdup(text), *rest = NULL;
    kvf_error err = {.status = KVF_OK};
    for (char *url = copy != NULL ? strtok_r(copy, " \t\n", &rest) : NULL; url != NULL && num < MAX_STORES;
         url = strtok_r(NULL, " \t\n", &rest)) {
        urls[num++] = url;
    }
    if (num > 0 && kvf_store_open(&store, &err, urls, num, NULL) != KVF_OK) {
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
    kvf_set_log(say_log, NULL, KVF_LOG_WARN); /* what is wrong with the store, once; later the prompts' lines tell */
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
