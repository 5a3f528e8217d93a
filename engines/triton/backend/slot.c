/* SPDX-License-Identifier: Apache-2.0
 *
 * One answer: how its tokens are chosen, where it ends, and which of its text may be shown. Text is shown in whole
 * characters, and not while it may be the beginning of a stop string, wherever its tokens are divided.
 */
#include <stdlib.h>
#include <string.h>

#include "triton/backend/backend.h"

/* ---- the sampler ---- */

static bool add(struct llama_sampler *chain, struct llama_sampler *next) {
    if (next != NULL) {
        llama_sampler_chain_add(chain, next);
    }
    return next != NULL;
}

/* Below this a logit divided by the temperature could overflow, and the likeliest token has all of the probability. */
#define LEAST_TEMPERATURE 1e-6f

/* In llama.cpp's own order. NULL: no memory. */
static struct llama_sampler *new_sampler(const kvfb_sampling *s) {
    struct llama_sampler *chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    bool good = chain != NULL;
    if (good && s->temperature < LEAST_TEMPERATURE) {
        good = add(chain, llama_sampler_init_greedy());
    } else if (good) {
        good = (s->top_k == 0 || add(chain, llama_sampler_init_top_k(s->top_k))) &&
               (s->top_p >= 1 || add(chain, llama_sampler_init_top_p(s->top_p, 1))) &&
               (s->min_p <= 0 || add(chain, llama_sampler_init_min_p(s->min_p, 1))) &&
               add(chain, llama_sampler_init_temp(s->temperature)) && add(chain, llama_sampler_init_dist(s->seed));
    }
    if (!good && chain != NULL) {
        llama_sampler_free(chain);
        chain = NULL;
    }
    return chain;
}

/* ---- stop strings ---- */

/* Where the first stop string begins in the text from `from` on; its length: none does. */
static size_t find_stop(const kvfb_request *r, size_t from) {
    size_t first = r->answer.len;
    for (size_t i = 0; i < r->num_stops; i++) {
        const char *found = memmem(r->answer.text + from, r->answer.len - from, r->stops[i], strlen(r->stops[i]));
        size_t at = found != NULL ? (size_t)(found - r->answer.text) : first;
        first = at < first ? at : first;
    }
    return first;
}

static bool may_begin_here(const kvfb_request *r, size_t at) {
    size_t len = r->answer.len - at;
    for (size_t i = 0; i < r->num_stops; i++) {
        if (strlen(r->stops[i]) > len && memcmp(r->answer.text + at, r->stops[i], len) == 0) {
            return true;
        }
    }
    return false;
}

/* Where the text ends that no stop string can begin in. */
static size_t safe_end(const kvfb_request *r) {
    size_t most = r->longest_stop > 0 ? r->longest_stop - 1 : 0;
    size_t at = r->answer.len > most ? r->answer.len - most : 0;
    at = at > r->shown ? at : r->shown;
    while (at < r->answer.len && !may_begin_here(r, at)) {
        at++;
    }
    return at;
}

/* Whether the answer ends at a stop string, which is cut off. */
static bool stops(kvfb_request *r) {
    size_t at = r->answer.len > r->shown ? find_stop(r, r->shown) : r->answer.len;
    if (at < r->answer.len) {
        r->answer.len = at;
        r->answer.text[at] = '\0';
        r->shown = at;
        r->is_cut = true;
        return true;
    }
    r->shown = safe_end(r);
    return false;
}

/* ---- tokens ---- */

TRITONSERVER_Error *kvfb_slot_begin(kvfb_slot *slot, kvfb_request *r) {
    slot->sampler = new_sampler(&r->sampling);
    if (slot->sampler == NULL) {
        return kvfb_no_memory();
    }
    slot->request = r;
    slot->utf8 = (kvfl_utf8){.num_held = 0};
    slot->at = 0;
    r->prefill_ns = kvfb_now_ns();
    return NULL;
}

/* The end of the text. */
static bool finish(kvfb_slot *slot, kvfb_finish why) {
    kvfb_request *r = slot->request;
    r->finish = why;
    if (!kvfl_utf8_end(&slot->utf8, &r->answer)) {
        r->error = kvfb_no_memory();
    }
    r->shown = r->answer.len;
    return false;
}

bool kvfb_slot_take(kvfb_slot *slot, llama_token token) {
    kvfb_request *r = slot->request;
    const struct llama_vocab *vocab = r->instance->model->vocab;
    if (llama_vocab_is_eog(vocab, token)) {
        return finish(slot, KVFB_FINISH_STOP);
    }
    if (!kvfl_tokens_add(&r->said, &token, 1) || !kvfl_add_piece(&slot->utf8, &r->answer, vocab, token)) {
        r->error = kvfb_no_memory();
        return false;
    }
    if (stops(r)) {
        r->finish = KVFB_FINISH_STOP;
        return false;
    }
    if (r->said.num >= r->max_tokens) {
        return finish(slot, KVFB_FINISH_LENGTH);
    }
    slot->next = token;
    return true;
}

kvfb_request *kvfb_slot_leave(kvfb_slot *slot) {
    kvfb_request *r = slot->request;
    llama_sampler_free(slot->sampler);
    slot->sampler = NULL;
    slot->request = NULL;
    return r;
}
