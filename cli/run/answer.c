/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry run: prefill and generation.
 */
#include "run/run.h"

#include <string.h>

/* ---- prefill ---- */

/* Blocks may come from several tiers. Which one is asked before they are promoted. With one tier there is nothing to
 * ask. */
static void note_source(kvfcli_run_state *run, uint32_t tier) {
    kvfcli_tier_url(run->store, tier, run->source);
}

static void ask_source(kvfcli_run_state *run) {
    kvf_stats stats = {.struct_size = sizeof stats};
    kvf_found found;
    kvf_key key;
    size_t num = 0;
    kvf_space *space = run->engine.kv != NULL ? kvf_llama_space(run->engine.kv) : NULL;
    if (run->store == NULL || space == NULL) {
        return;
    }
    kvf_store_stats(run->store, &stats);
    if (stats.num_tiers == 1) {
        note_source(run, 0);
        return;
    }
    /* Token ids are not negative, so both types have the same representation. */
    if (kvf_chain(space, &key, 1, (const uint32_t *)run->prompt.ids, run->prompt.num) == 1 &&
        kvf_match(space, &num, &found, &key, 1, KVF_MS(1000)) == KVF_OK && num == 1) {
        note_source(run, found.tier);
    }
}

/* Does what kvf_llama_prefill does without a store, for contexts that it refuses. */
static int prefill_alone(kvfcli_run_state *run) {
    struct llama_context *ctx = run->engine.ctx;
    size_t step = llama_n_ubatch(ctx), done = 0;
    int64_t began = kvfcli_now_us();
    int32_t status = 0;
    while (done < run->prompt.num && status == 0 && !kvfcli_interrupted()) {
        size_t num = run->prompt.num - done < step ? run->prompt.num - done : step;
        status = llama_decode(ctx, llama_batch_get_one(run->prompt.ids + done, (int32_t)num));
        done += num;
        kvfcli_show_prefill(&run->engine, (uint32_t)done, (uint32_t)run->prompt.num);
    }
    run->report = (kvf_llama_report){.num_tokens = (uint32_t)run->prompt.num,
                                     .computed_tokens = (uint32_t)done,
                                     .compute_us = kvfcli_now_us() - began};
    if (status != 0 && !kvfcli_interrupted()) {
        kvfcli_say("llama_decode failed with %d", status);
        return KVFCLI_IO;
    }
    return KVFCLI_FINE;
}

static int prefill(kvfcli_run_state *run) {
    kvf_error err = {.status = KVF_OK};
    if (run->engine.kv == NULL) {
        return prefill_alone(run);
    }
    run->report.struct_size = sizeof run->report;
    kvf_status status =
        kvf_llama_prefill(run->engine.kv, &run->report, &err, KVFCLI_TEXT_SEQ, run->prompt.ids, run->prompt.num);
    return status == KVF_OK || kvfcli_interrupted() ? KVFCLI_FINE : kvfcli_fail(status, &err);
}

int kvfcli_prefill(kvfcli_run_state *run) {
    ask_source(run);
    kvfcli_progress_start(&run->engine.progress, run->options.quiet);
    int code = prefill(run);
    kvfcli_progress_end(&run->engine.progress);
    if (run->report.loaded_tokens == 0) {
        run->source[0] = '\0';
    }
    if (kvfcli_interrupted()) {
        run->stop = KVFCLI_STOP_INTERRUPTED;
    }
    return code;
}

/* ---- generation ---- */

static struct llama_sampler *new_sampler(const kvfcli_run_options *options) {
    struct llama_sampler *chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    if (options->temp > 0) {
        llama_sampler_chain_add(chain, llama_sampler_init_temp(options->temp));
        llama_sampler_chain_add(chain, llama_sampler_init_dist(options->seed));
    } else {
        llama_sampler_chain_add(chain, llama_sampler_init_greedy());
    }
    return chain;
}

/* Programs get the whole answer at the end; people see it grow. */
static void show(const kvfcli_run_state *run, size_t from) {
    if (!run->options.json && run->answer.len > from) {
        fwrite(run->answer.text + from, 1, run->answer.len - from, stdout);
        fflush(stdout);
    }
}

static int add_token(kvfcli_run_state *run, kvfl_utf8 *utf8, llama_token token) {
    size_t from = run->answer.len;
    if (!kvfl_tokens_add(&run->said, &token, 1) || !kvfl_add_piece(utf8, &run->answer, run->engine.vocab, token)) {
        return kvfcli_no_memory();
    }
    show(run, from);
    return ferror(stdout) ? KVFCLI_IO : KVFCLI_FINE; /* kvfcli_finish reports it */
}

static int decode(kvfcli_run_state *run, llama_token token) {
    int32_t status = llama_decode(run->engine.ctx, llama_batch_get_one(&token, 1));
    if (kvfcli_interrupted()) {
        run->stop = KVFCLI_STOP_INTERRUPTED;
    } else if (status != 0) {
        kvfcli_say("llama_decode failed with %d after %zu tokens of the answer", status, run->said.num);
        return KVFCLI_IO;
    }
    return KVFCLI_FINE;
}

/* The next token. False: the answer ends here. */
static bool sample(kvfcli_run_state *run, struct llama_sampler *sampler, llama_token *token) {
    if (run->said.num == run->num_answer) {
        run->stop = KVFCLI_STOP_LENGTH;
        return false;
    }
    *token = llama_sampler_sample(sampler, run->engine.ctx, -1);
    if (llama_vocab_is_eog(run->engine.vocab, *token)) {
        run->stop = KVFCLI_STOP_END;
        return false;
    }
    return true;
}

static int go_on(kvfcli_run_state *run, struct llama_sampler *sampler, kvfl_utf8 *utf8, llama_token token, bool more) {
    int code = KVFCLI_FINE;
    while (more && code == KVFCLI_FINE) {
        code = add_token(run, utf8, token);
        if (code == KVFCLI_FINE && run->said.num < run->num_answer) {
            code = decode(run, token);
        }
        more = run->stop != KVFCLI_STOP_INTERRUPTED && code == KVFCLI_FINE && sample(run, sampler, &token);
    }
    return code;
}

int kvfcli_generate(kvfcli_run_state *run) {
    struct llama_sampler *sampler = new_sampler(&run->options);
    kvfl_utf8 utf8 = {.num_held = 0};
    llama_token token = LLAMA_TOKEN_NULL;
    bool more = sample(run, sampler, &token);
    int64_t began = kvfcli_now_us();
    run->ttft_us = began - run->began_us + run->before_us;
    int code = go_on(run, sampler, &utf8, token, more);
    size_t from = run->answer.len;
    if (!kvfl_utf8_end(&utf8, &run->answer)) {
        code = kvfcli_no_memory();
    }
    show(run, from);
    run->generate_us = kvfcli_now_us() - began;
    run->seed = llama_sampler_get_seed(sampler);
    llama_sampler_free(sampler);
    return code;
}
