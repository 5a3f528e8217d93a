/* SPDX-License-Identifier: Apache-2.0
 *
 * kvf_llama_prefill: loads what is stored of a prompt, computes the rest, and saves what is new.
 */
#include "llama/engine.h"

typedef struct prefill {
    kvf_llama *kv;
    kvf_llama_report *report;
    kvf_error *err;
    llama_seq_id seq;
    const llama_token *tokens;
    size_t num, cut;
    size_t have; /* tokens that the sequence holds */
    bool cold;   /* all of them equal a run from an empty sequence, so what is computed after them is stored */
    kvfl_cuts cuts;
} prefill;

/* ---- computing ---- */

static kvf_status decode(prefill *p, size_t num) {
    struct llama_batch *batch = &p->kv->batch;
    int64_t begin = kvfl_now_us();
    batch->n_tokens = (int32_t)num;
    for (size_t i = 0; i < num; i++) {
        batch->token[i] = p->tokens[p->have + i];
        batch->pos[i] = (llama_pos)(p->have + i);
        batch->n_seq_id[i] = 1;
        batch->seq_id[i][0] = p->seq;
        batch->logits[i] = p->have + i + 1 == p->num;
    }
    int rc = llama_decode(p->kv->ctx, *batch);
    p->kv->calls->decode_rc = rc;
    if (p->kv->space != NULL) {
        llama_synchronize(p->kv->ctx); /* a GPU may still be working; the blocks are exported next anyway */
    }
    int64_t took = kvfl_now_us() - begin;
    p->report->compute_us += took;
    if (rc == 2) {
        return kvfl_fail(p->err, KVF_CLOSED, "stopped");
    }
    if (rc != 0) {
        return kvfl_fail(p->err, KVF_IO, "llama_decode failed (%d)%s", rc, rc == 1 ? ": the KV cache is full" : "");
    }
    kvf_pace_note(&p->kv->pace, num, took);
    p->have += num;
    p->report->computed_tokens += (uint32_t)num;
    return KVF_OK;
}

static kvf_status tell_progress(const prefill *p) {
    const kvf_llama *kv = p->kv;
    if (kv->calls->progress != NULL &&
        kv->calls->progress(kv->calls->progress_ctx, (uint32_t)p->have, (uint32_t)p->num) != 0) {
        return kvfl_fail(p->err, KVF_CLOSED, "stopped");
    }
    return KVF_OK;
}

/* What must follow a batch that began at `before`, even without a store: the same cuts and cells, so that the answer is
 * the same. */
static kvf_status settle(prefill *p, size_t before) {
    kvf_llama *kv = p->kv;
    bool in_tail = p->have > p->cut, at_end = p->have == kvfl_position(kv, kvfl_num_blocks(kv));
    if (p->cut == 0 || p->have == p->num || (in_tail && !at_end)) {
        return KVF_OK;
    }
    size_t first = in_tail ? kv->cells->num_whole : before / kv->block_tokens;
    size_t end = in_tail ? kvfl_num_blocks(kv) : p->have / kv->block_tokens;
    bool save = kv->space != NULL && p->cold;
    if (save) {
        kvfl_save(kv, p->report, p->seq, first, end);
    }
    if (p->have == kvfl_position(kv, end) && !kvfl_pass_boundary(kv, p->report, p->seq, end, save)) {
        return kvfl_fail(p->err, KVF_IO, "llama.cpp did not take back the state of its sequence");
    }
    return KVF_OK;
}

/* The size of the next batch. What is stored must depend neither on the batch size of this context nor on where the
 * prompt ends. So a batch that begins between two tiles ends at the beginning of the next one. The rest of a tail after
 * its whole tiles is a separate batch of two tokens or more, since a single one is rounded by the number of threads. */
static size_t next_batch(const prefill *p, size_t end) {
    size_t stop = kvfl_next_stop(p->kv, p->have), left = (stop < end ? stop : end) - p->have;
    size_t num = left < p->kv->step ? left : p->kv->step, into = p->have % KVFL_MIN_BATCH;
    if (p->cold && into != 0) {
        return num < KVFL_MIN_BATCH - into ? num : KVFL_MIN_BATCH - into;
    }
    if (p->cold && left == KVFL_MIN_BATCH + 1) {
        return left / 2;
    }
    return p->cold && num > KVFL_MIN_BATCH ? num / KVFL_MIN_BATCH * KVFL_MIN_BATCH : num;
}

/* Computes up to `end`, in large batches that stop at boundaries. */
static kvf_status compute(prefill *p, size_t end) {
    kvf_status status = tell_progress(p);
    while (status == KVF_OK && p->have < end) {
        size_t before = p->have;
        status = decode(p, next_batch(p, end));
        if (status == KVF_OK) {
            status = settle(p, before);
        }
        if (status == KVF_OK) {
            status = tell_progress(p);
        }
    }
    return status;
}

/* ---- loading, and computing the front meanwhile ---- */

static kvf_status compute_front(void *ctx, size_t first, size_t num) {
    prefill *p = ctx;
    p->have = first;
    return compute(p, first + num);
}

static kvf_status bring_stored(prefill *p) {
    kvf_llama *kv = p->kv;
    kvfl_chain(kv, p->tokens, p->cut, p->num - 1 - p->cut);
    if (p->cuts.any) {
        kvfl_name_apart(kv, p->have / kv->block_tokens, p->cuts.digest.bytes, sizeof p->cuts.digest.bytes);
    }
    if (kv->space == NULL || p->cut == 0) {
        return KVF_OK;
    }
    kvfl_front front = {.compute = compute_front, .ctx = p};
    size_t have = kvfl_load(kv, p->report, p->seq, p->have, &front);
    p->have = front.status == KVF_OK ? have : p->have;
    return front.status;
}

/* The whole blocks; the tail, separately; the last token is left to be computed alone, so that a prompt whose tail is
 * stored computes the last token just as this one does. */
static kvf_status fill(prefill *p) {
    kvf_status status = bring_stored(p);
    if (status == KVF_OK) {
        status = compute(p, p->cut);
    }
    if (status == KVF_OK && p->have < p->num - 1) {
        status = compute(p, p->num - 1);
    }
    return status;
}

kvf_status kvfl_fill(kvf_llama *kv, kvf_llama_report *report, kvf_error *err, llama_seq_id seq,
                     const llama_token *tokens, size_t num, size_t have, const kvfl_lineage *how) {
    prefill p = {.kv = kv,
                 .cold = how != NULL,
                 .cuts = how != NULL ? how->cuts : (kvfl_cuts){0},
                 .report = report,
                 .err = err,
                 .seq = seq,
                 .tokens = tokens,
                 .num = num,
                 .cut = kvf_llama_cut(kv, num),
                 .have = have};
    return fill(&p);
}

static kvf_status check(const prefill *p) {
    const kvf_llama *kv = p->kv;
    if (kvfl_check_ours(kv, p->err) != KVF_OK) {
        return KVF_CLOSED;
    }
    if (p->num == 0 || p->tokens == NULL) {
        return kvfl_fail(p->err, KVF_LIMIT, "the prompt is empty");
    }
    if (p->num > kv->n_ctx) {
        return kvfl_fail(p->err, KVF_LIMIT, "the prompt has %zu tokens, but the context holds %u", p->num, kv->n_ctx);
    }
    if (!kvfl_is_text(kv, p->seq)) {
        return kvfl_fail(p->err, KVF_LIMIT, "there is no sequence %d, or it is the scratch sequence", p->seq);
    }
    size_t wrong = kvfl_find_no_token(kv, p->tokens, p->num);
    if (wrong < p->num) {
        return kvfl_fail(p->err, KVF_LIMIT, "token %zu is %d, which is not in the vocabulary of %d tokens", wrong,
                         p->tokens[wrong], llama_vocab_n_tokens(llama_model_get_vocab(kv->model)));
    }
    if (!kvfl_computes_as_named(kv)) {
        return kvfl_fail(p->err, KVF_REFUSED, "attention is not causal: call llama_set_causal_attn(ctx, true)");
    }
    return KVF_OK;
}

/* A recurrent state can't go back: then everything is dropped. */
static void drop_from(const prefill *p, size_t have) {
    llama_memory_t mem = p->kv->mem;
    if (!kvfl_holds(p->kv, p->seq, have) && !llama_memory_seq_rm(mem, p->seq, (llama_pos)have, -1)) {
        llama_memory_seq_rm(mem, p->seq, -1, -1);
    }
}

static kvf_status run(prefill *p) {
    kvf_llama *kv = p->kv;
    p->report->num_tokens = (uint32_t)p->num;
    p->have = kvfl_keep_resident(kv, p->seq, p->tokens, p->cut);
    p->report->resident_tokens = (uint32_t)p->have;
    kvfl_forget(kv, p->seq, KVF_ASIDE_FOREIGN); /* until this has succeeded */
    kvf_status status = fill(p);
    if (status == KVF_OK) {
        status = compute(p, p->num);
    }
    if (status == KVF_OK) {
        kvfl_note_resident(kv, p->seq, p->tokens, p->cut);
        kvfl_note_tokens(kv, p->seq, p->tokens, p->num);
        kvfl_note_cold(kv, p->seq, p->cut);
    } else if (status == KVF_CLOSED) {
        drop_from(p, p->have); /* the remains of a stopped batch */
    } else {
        llama_memory_seq_rm(kv->mem, p->seq, -1, -1);
    }
    p->report->compute_tokens_per_s = kvfl_tokens_per_s(kv);
    return status;
}

kvf_status kvf_llama_prefill(kvf_llama *kv, kvf_llama_report *report, kvf_error *err, llama_seq_id seq,
                             const llama_token *tokens, size_t num) {
    kvf_llama_report own = {0};
    prefill p = {.kv = kv,
                 .report = &own,
                 .err = err,
                 .seq = seq,
                 .tokens = tokens,
                 .num = num,
                 .cut = kvf_llama_cut(kv, num),
                 .cold = true};
    kvf_status status = kvfl_check_report(err, report);
    if (status != KVF_OK) {
        return status;
    }
    status = check(&p);
    status = status == KVF_OK ? run(&p) : status;
    kvfl_give_report(report, &own);
    return status;
}
