/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry run: engines/llama/talk, with messages and exit codes.
 */
#include "run/run.h"
#include "run/verbs.h"

/* ---- text to tokens ---- */

kvfl_template kvfcli_choose_template(const struct llama_model *model, const kvfcli_run_options *options) {
    const char *note = NULL;
    if (options->raw) {
        return (kvfl_template){.raw = true};
    }
    kvfl_template chosen = kvfl_template_of(model, &note);
    if (note != NULL && !options->quiet) {
        kvfcli_say("%s%s", note, chosen.raw ? " (as with --raw)" : "");
    }
    return chosen;
}

static int outcome(kvf_status status, const kvf_error *err) {
    if (status == KVF_NOMEM) {
        return kvfcli_no_memory();
    }
    return status == KVF_OK ? KVFCLI_FINE : kvfcli_fail(status, err);
}

int kvfcli_tokenize_chat(kvfl_tokens *out, const struct llama_vocab *vocab, kvfl_template chat_template,
                         const kvfl_message *messages, size_t num) {
    kvf_error err = {.status = KVF_OK};
    return outcome(kvfl_tokenize_chat(out, &err, vocab, chat_template, messages, num), &err);
}

int kvfcli_tokenize_turn(kvfl_tokens *out, const struct llama_vocab *vocab, kvfl_template chat_template,
                         const char *question) {
    kvf_error err = {.status = KVF_OK};
    return outcome(kvfl_tokenize_turn(out, &err, vocab, chat_template, question), &err);
}

/* ---- tokens to text ---- */

static kvf_status fail(kvf_error *err, kvf_status status, const char *model, const char *what) {
    err->status = status;
    snprintf(err->what, sizeof err->what, "%.150s: %.90s", model, what);
    return status;
}

kvf_status kvfcli_detokenize(const char *model, const uint32_t *tokens, size_t num, char **out, kvf_error *err) {
    if (kvfcli_check_model_file(err, model) != KVF_OK) {
        return err->status;
    }
    struct llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    kvfcli_watch_llama(false);
    struct llama_model *loaded = llama_model_load_from_file(model, params);
    if (loaded == NULL) {
        return fail(err, KVF_LIMIT, model, kvfcli_llama_error());
    }
    *out = kvfl_text_of(llama_model_get_vocab(loaded), tokens, num);
    llama_model_free(loaded);
    return *out != NULL ? KVF_OK : fail(err, KVF_NOMEM, model, "no memory");
}
