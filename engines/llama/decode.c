/* SPDX-License-Identifier: Apache-2.0
 *
 * kvf_llama_decode, which replaces llama_decode. A batch is divided by sequence. The tokens up to one with an output
 * are a prompt. Its whole blocks and its tail are brought in, one sequence after the other, by copies from other
 * sequences, loads and computation (kvfl_fill). The rest is decoded together: the tokens with outputs, and those before
 * the end of a batch that stopped in the middle of a block.
 *
 * What a sequence still holds is used, however it was computed. Only cold KV (engine.h) is stored and copied: not a
 * block that was continued from its middle, nor generated tokens, nor anything computed after them.
 */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "llama/engine.h"

/* Tokens are computed again if the prompt has this many times as many new ones. */
#define NEXT_TO_NOTHING 16u

/* The part of a batch that belongs to one sequence. */
typedef struct kvfl_piece {
    size_t num;          /* tokens; 0 = none */
    size_t first, end;   /* positions */
    size_t want;         /* of the first output, or `end` */
    size_t done;         /* everything before this position is in the sequence */
    kvf_llama_aside why; /* not to be followed */
    bool alone;          /* no token belongs to another sequence too */
    kvfl_lineage before; /* of the sequence */
    kvfl_stash dropped;  /* tokens dropped to compute or load their block as a whole; put back if that fails */
} kvfl_piece;

kvf_status kvfl_open_decode(kvf_llama *kv, kvf_error *err) {
    size_t most = llama_n_batch(kv->ctx);
    kv->calls->pieces = calloc(kv->num_seqs, sizeof *kv->calls->pieces);
    kv->calls->output_of = calloc(most, sizeof *kv->calls->output_of);
    kv->calls->rest.token = calloc(most, sizeof *kv->calls->rest.token);
    kv->calls->rest.pos = calloc(most, sizeof *kv->calls->rest.pos);
    kv->calls->rest.n_seq_id = calloc(most, sizeof *kv->calls->rest.n_seq_id);
    kv->calls->rest.seq_id = calloc(most, sizeof *kv->calls->rest.seq_id);
    kv->calls->rest.logits = calloc(most, sizeof *kv->calls->rest.logits);
    if (kv->calls->pieces == NULL || kv->calls->output_of == NULL || kv->calls->rest.token == NULL ||
        kv->calls->rest.pos == NULL || kv->calls->rest.n_seq_id == NULL || kv->calls->rest.seq_id == NULL ||
        kv->calls->rest.logits == NULL) {
        return kvfl_fail(err, KVF_NOMEM, "no memory to attach to the context");
    }
    return KVF_OK;
}

void kvfl_close_decode(kvf_llama *kv) {
    free(kv->calls->pieces);
    free(kv->calls->output_of);
    free(kv->calls->rest.token);
    free(kv->calls->rest.pos);
    free(kv->calls->rest.n_seq_id);
    free(kv->calls->rest.seq_id);
    free(kv->calls->rest.logits);
}

/* ---- reading a batch ---- */

static void begin_piece(kvf_llama *kv, llama_seq_id seq, llama_pos pos) {
    const kvfl_history *h = kvfl_history_of(kv, seq);
    kvfl_piece *p = &kv->calls->pieces[seq];
    *p = (kvfl_piece){.first = (size_t)pos,
                      .end = (size_t)pos,
                      .done = (size_t)pos,
                      .alone = true,
                      .before = kv->follow->histories[seq].lineage};
    if (h == NULL || h->why != KVF_ASIDE_NONE) {
        p->why = h == NULL ? KVF_ASIDE_FOREIGN : h->why;
    } else if (h->identity != kv->identity || kv->identity == 0) {
        p->why = KVF_ASIDE_FOREIGN;
    } else if (h->num != (size_t)pos) {
        p->why = KVF_ASIDE_POSITIONS;
    }
}

static void add_token(kvf_llama *kv, llama_seq_id seq, llama_token token, llama_pos pos, bool output, bool alone) {
    kvfl_piece *p = &kv->calls->pieces[seq];
    if (p->num == 0) {
        begin_piece(kv, seq, pos);
        p->want = SIZE_MAX;
    }
    p->num++;
    kv->follow->histories[seq].shares = kv->follow->histories[seq].shares || !alone;
    p->alone = p->alone && alone;
    if (p->why == KVF_ASIDE_NONE && ((size_t)pos != p->end || p->end >= kv->n_ctx)) {
        p->why = KVF_ASIDE_POSITIONS;
    }
    if (p->why == KVF_ASIDE_NONE) {
        kv->follow->histories[seq].tokens[p->end++] = token;
        p->want = output && p->want == SIZE_MAX ? p->end - 1 : p->want;
    }
}

/* False: a batch that llama.cpp will refuse, or whose positions it will determine: it can't be analysed. */
static bool read_batch(kvf_llama *kv, const struct llama_batch *batch) {
    memset(kv->calls->pieces, 0, kv->num_seqs * sizeof *kv->calls->pieces);
    if (batch->n_tokens <= 0 || (uint32_t)batch->n_tokens > llama_n_batch(kv->ctx) || batch->token == NULL ||
        batch->embd != NULL) {
        return false;
    }
    llama_pos next = batch->pos == NULL ? llama_memory_seq_pos_max(kv->mem, 0) + 1 : 0;
    for (int32_t i = 0; i < batch->n_tokens; i++) {
        int32_t num = batch->seq_id != NULL && batch->n_seq_id != NULL ? batch->n_seq_id[i] : 1;
        bool output = batch->logits != NULL ? batch->logits[i] != 0 : i == batch->n_tokens - 1;
        llama_pos pos = batch->pos != NULL ? batch->pos[i] : next++;
        for (int32_t k = 0; k < num; k++) {
            llama_seq_id seq = batch->seq_id != NULL ? batch->seq_id[i][k] : 0;
            if (!kvfl_is_text(kv, seq) || pos < 0) {
                return false;
            }
            add_token(kv, seq, batch->token[i], pos, output, num == 1);
        }
    }
    for (size_t seq = 0; seq < kv->num_seqs; seq++) {
        kvfl_piece *p = &kv->calls->pieces[seq];
        p->want = p->want < p->end ? p->want : p->end;
    }
    return true;
}

static bool has_output(const kvfl_piece *p) {
    return p->want < p->end;
}

/* ---- dropping the beginning of a block, to have the block as a whole ---- */

static void drop(kvf_llama *kv, llama_seq_id seq, size_t from) {
    kvfl_history *h = &kv->follow->histories[seq];
    if (kvfl_set_aside(kv, &kv->calls->pieces[seq].dropped, seq, from, h->num)) {
        kvfl_count_lost(&h->report, h->num - from);
        h->num = from;
    }
}

static bool is_stored(kvf_llama *kv, const kvfl_history *h, size_t block, size_t goal) {
    kvf_found found;
    size_t run = 0;
    if (kv->space == NULL) {
        return false;
    }
    kvfl_chain(kv, h->tokens, goal / kv->block_tokens * kv->block_tokens, 0);
    return kvf_knows(kv->space, &kv->cells->keys[block]) ||
           (kvf_match(kv->space, &run, &found, &kv->cells->keys[block], 1, KVF_LOOKUP_US) == KVF_OK && run == 1);
}

/* For a sequence that is not cold to its end. It goes back to where it is cold if what follows was computed only
 * because a batch was full, or is so little that computing it again costs almost nothing; or to the beginning of its
 * last block if that is stored whole. Otherwise the answer comes sooner from what it holds. */
static void step_back(kvf_llama *kv, llama_seq_id seq, size_t goal) {
    const kvfl_history *h = &kv->follow->histories[seq];
    size_t block = h->num / kv->block_tokens, begin = block * kv->block_tokens, behind = h->num - h->lineage.cold;
    if (kvfl_is_cold(h) || kvfl_has_states(kv)) {
        return; /* a state can't go back */
    }
    if (h->lineage.ragged || behind * NEXT_TO_NOTHING <= goal - h->num) {
        drop(kv, seq, h->lineage.cold);
    } else if (begin < h->num && goal >= begin + kv->block_tokens && is_stored(kv, h, block, goal)) {
        drop(kv, seq, begin);
    }
}

/* ---- what another sequence holds ---- */

static size_t common_tokens(const kvfl_history *a, const kvfl_history *b, size_t most) {
    size_t same = 0;
    while (same < a->num && same < most && a->tokens[same] == b->tokens[same]) {
        same++;
    }
    return same;
}

/* Copies blocks [from, to) through memory into separate cells. They take the next free cells, in order, as if they were
 * loaded or computed there. With shared cells the sequence would continue in other cells, perhaps before the shared
 * ones, and sums depend on the order of cells. Also, moving the positions of one sequence would move those of the
 * other. Returns where the sequence ends. */
static size_t copy_blocks(kvf_llama *kv, llama_seq_id donor, llama_seq_id seq, size_t from, size_t to) {
    size_t bytes = kvfl_export_bytes(kv, kv->block_tokens), at = from;
    uint8_t *blob = malloc(bytes);
    bool ok = blob != NULL;
    while (ok && at < to) {
        llama_pos first = (llama_pos)at, end = (llama_pos)(at + kv->block_tokens);
        ok = kvfl_export(kv, donor, first, end, blob, bytes) && kvfl_is_block(kv, blob, bytes, first, end) &&
             kvfl_import(kv, seq, first, end, blob, bytes);
        at += ok ? kv->block_tokens : 0;
    }
    free(blob);
    return at;
}

static void copy_from_other(kvf_llama *kv, llama_seq_id seq, size_t goal) {
    kvfl_history *h = &kv->follow->histories[seq];
    size_t best = 0;
    llama_seq_id donor = -1;
    for (size_t i = 0; i < kv->num_seqs && !kvfl_has_states(kv); i++) {
        bool helps = (llama_seq_id)i != seq && kv->follow->histories[i].lineage.cold > h->num;
        const kvfl_history *other = helps ? kvfl_history_of(kv, (llama_seq_id)i) : NULL; /* as it is now */
        size_t most = other != NULL && other->lineage.cold < goal ? other->lineage.cold : goal;
        size_t same = other != NULL && other->identity == h->identity ? common_tokens(other, h, most) : 0;
        same = same / kv->block_tokens * kv->block_tokens;
        if (same > best) {
            best = same;
            donor = (llama_seq_id)i;
        }
    }
    if (best <= h->num) {
        return;
    }
    if (!kvfl_is_cold(h) && kv->calls->pieces[seq].dropped.rows == NULL) {
        drop(kv, seq, h->lineage.cold);
    }
    if (kvfl_is_cold(h)) {
        size_t from = h->num;
        h->num = copy_blocks(kv, donor, seq, from, best);
        h->report.copied_tokens += (uint32_t)(h->num - from);
        kvfl_note_cold(kv, seq, h->num);
    }
}

/* ---- bringing in what can be had before the outputs ---- */

static void begin_prompt(kvfl_history *h) {
    if (!h->in_prompt) {
        h->report = (kvf_llama_report){.resident_tokens = (uint32_t)h->num};
        h->in_prompt = true;
    }
}

/* Where the sequence of a piece may be brought: to its first output, or, without one, to the last whole block. A model
 * with states goes to the end of the batch, and takes a state there: llama-server ends batches where it will want to
 * resume. */
static size_t goal_of(const kvf_llama *kv, const kvfl_piece *p) {
    if (has_output(p)) {
        return p->want;
    }
    return kvfl_has_states(kv) ? p->end : p->end / kv->block_tokens * kv->block_tokens;
}

static bool is_prompt(const kvfl_piece *p) {
    bool generates = has_output(p) && p->want == p->first;
    return p->num > 0 && p->why == KVF_ASIDE_NONE && !generates;
}

/* Whether there is a block, or an end where a state is taken, between what the sequence holds and the goal. */
static bool is_worth_it(const kvf_llama *kv, const kvfl_piece *p, const kvfl_history *h, size_t goal) {
    bool state_at_end = kvfl_has_states(kv) && !has_output(p);
    return goal > h->num && (goal >= kv->block_tokens || state_at_end);
}

/* Loads or computes up to the goal. Returns 0, or what llama_decode would return. */
static int32_t fill(kvf_llama *kv, llama_seq_id seq, size_t goal) {
    kvfl_history *h = &kv->follow->histories[seq];
    bool cold = kvfl_is_cold(h) && goal - h->num > 1; /* a single token is rounded by the number of threads */
    kv->calls->decode_rc = 0;
    kvf_status status = kvfl_fill(kv, &h->report, NULL, seq, h->tokens, goal + 1, h->num, cold ? &h->lineage : NULL);
    if (status != KVF_OK) {
        return kv->calls->decode_rc != 0 ? kv->calls->decode_rc : status == KVF_CLOSED ? 2 : -2;
    }
    h->num = goal;
    kv->calls->pieces[seq].done = goal;
    if (cold) {
        kvfl_note_cold(kv, seq, goal);
    }
    return 0;
}

/* Brings one sequence of a batch as far as possible before the rest is decoded. The order matters: first step back to
 * where the sequence is cold, then copy what another sequence holds, and only then load or compute. Returns 0, or what
 * llama_decode would return. `roomy`: there are cells for the whole batch. */
static int32_t bring(kvf_llama *kv, llama_seq_id seq, bool roomy) {
    const kvfl_piece *p = &kv->calls->pieces[seq];
    kvfl_history *h = &kv->follow->histories[seq];
    if (!is_prompt(p)) {
        return 0;
    }
    begin_prompt(h);
    size_t goal = goal_of(kv, p);
    if (!roomy || !p->alone || kv->calls->paused != KVF_ASIDE_NONE || !is_worth_it(kv, p, h, goal)) {
        return 0;
    }
    step_back(kv, seq, goal);
    copy_from_other(kv, seq, goal);
    return fill(kv, seq, goal);
}

/* Whether there are cells for the batch, as far as llama.cpp tells. A sequence with a state, which could not be undone
 * if cells run out, is left to llama_decode, which reports that before it begins. */
static bool is_roomy(const kvf_llama *kv, const struct llama_batch *batch) {
    return !kvfl_has_states(kv) || kv->kind.num_caches == 0 ||
           kvfl_unshared_cells(kv) + (size_t)batch->n_tokens <= kv->n_ctx;
}

static int32_t bring_all(kvf_llama *kv, const struct llama_batch *batch) {
    int32_t rc = 0;
    bool roomy = is_roomy(kv, batch);
    for (size_t seq = 0; seq < kv->num_seqs && rc == 0; seq++) {
        rc = bring(kv, (llama_seq_id)seq, roomy);
    }
    return rc;
}

/* ---- the rest ---- */

static llama_seq_id first_seq(const struct llama_batch *batch, int32_t i) {
    return batch->seq_id != NULL ? batch->seq_id[i][0] : 0;
}

/* Collects the tokens of the batch that are not in yet. The positions of a sequence without gaps are consecutive. */
static void collect_rest(kvf_llama *kv, const struct llama_batch *batch) {
    static llama_seq_id zero = 0;
    size_t *seen = calloc(kv->num_seqs, sizeof *seen);
    struct llama_batch *rest = &kv->calls->rest;
    rest->n_tokens = 0;
    kv->calls->num_mapped = seen != NULL ? batch->n_tokens : 0;
    for (int32_t i = 0; i < batch->n_tokens && seen != NULL; i++) {
        const kvfl_piece *p = &kv->calls->pieces[first_seq(batch, i)];
        size_t pos = p->first + seen[first_seq(batch, i)]++;
        int32_t k = rest->n_tokens;
        kv->calls->output_of[i] = INT32_MAX; /* none: llama.cpp reports that */
        if (p->alone && p->why == KVF_ASIDE_NONE && pos < p->done) {
            continue;
        }
        rest->token[k] = batch->token[i];
        rest->pos[k] = batch->pos != NULL ? batch->pos[i] : (llama_pos)pos;
        rest->n_seq_id[k] = batch->seq_id != NULL && batch->n_seq_id != NULL ? batch->n_seq_id[i] : 1;
        rest->seq_id[k] = batch->seq_id != NULL ? batch->seq_id[i] : &zero;
        rest->logits[k] = batch->logits != NULL ? batch->logits[i] : i == batch->n_tokens - 1;
        kv->calls->output_of[i] = rest->logits[k] != 0 ? k : INT32_MAX;
        rest->n_tokens++;
    }
    free(seen);
}

static bool is_whole(const kvf_llama *kv) {
    for (size_t seq = 0; seq < kv->num_seqs; seq++) {
        if (kv->calls->pieces[seq].num > 0 && kv->calls->pieces[seq].done > kv->calls->pieces[seq].first) {
            return false;
        }
    }
    return true;
}

static int32_t decode_rest(kvf_llama *kv, const struct llama_batch *batch, kvfl_plain_fn plain, void *arg) {
    if (is_whole(kv)) {
        return plain(arg);
    }
    collect_rest(kv, batch);
    if (kv->calls->num_mapped == 0) {
        return -2; /* no memory */
    }
    return kv->calls->rest.n_tokens > 0 ? llama_decode(kv->ctx, kv->calls->rest) : 0;
}

/* ---- afterwards ---- */

static void end_prompt(kvf_llama *kv, llama_seq_id seq, size_t num_tokens) {
    kvfl_history *h = &kv->follow->histories[seq];
    kvf_llama_counters *c = &kv->calls->counters;
    kvf_llama_report *r = &h->report;
    h->in_prompt = false;
    r->num_tokens = (uint32_t)num_tokens;
    r->compute_tokens_per_s = kvfl_tokens_per_s(kv);
    c->prompts++;
    c->prompt_tokens += num_tokens;
    c->resident_tokens += r->resident_tokens;
    c->copied_tokens += r->copied_tokens;
    c->loaded_tokens += r->loaded_tokens;
    c->computed_tokens += r->computed_tokens;
    c->loaded_bytes += r->loaded_bytes;
    c->saved_blocks += r->saved_blocks;
    c->known_blocks += r->known_blocks;
    c->shed_blocks += r->shed_blocks;
    c->plans[r->plan]++;
    c->ended[r->why]++;
    c->match_us += (uint64_t)r->match_us;
    c->load_us += (uint64_t)r->load_us;
    c->import_us += (uint64_t)r->import_us;
    c->compute_us += (uint64_t)r->compute_us;
    c->waited_us += (uint64_t)r->waited_us;
    if (kv->calls->on_prompt != NULL) {
        kv->calls->on_prompt(kv->calls->on_prompt_ctx, seq, r);
    }
}

/* The part of the last block that was computed only because the batch ended here. */
static bool has_ragged_end(const kvf_llama *kv, const kvfl_history *h, const kvfl_piece *p) {
    size_t begin = h->lineage.cold;
    return !has_output(p) && !kvfl_has_states(kv) && p->end - begin < kv->block_tokens && p->end > begin &&
           (p->first <= begin || p->before.ragged);
}

static void note_piece(kvf_llama *kv, llama_seq_id seq) {
    kvfl_piece *p = &kv->calls->pieces[seq];
    kvfl_history *h = &kv->follow->histories[seq];
    kvfl_free_stash(&p->dropped);
    if (p->why != KVF_ASIDE_NONE || kv->calls->paused == KVF_ASIDE_ATTENTION) {
        kvf_llama_aside why = p->why != KVF_ASIDE_NONE ? p->why : kv->calls->paused;
        kv->calls->counters.aside_tokens[why] += p->num;
        if (p->why != KVF_ASIDE_NONE) {
            kvfl_doubt(kv, seq, why);
        } else {
            kvfl_forget(kv, seq, why);
        }
        return;
    }
    if (!p->alone || kv->calls->paused != KVF_ASIDE_NONE) {
        kv->calls->counters.aside_tokens[kv->calls->paused != KVF_ASIDE_NONE ? kv->calls->paused : KVF_ASIDE_SEVERAL] +=
            p->num;
    }
    h->lineage.ragged = has_ragged_end(kv, h, p);
    h->num = p->end;
    if (!h->in_prompt) {
        kv->calls->counters.generated_tokens += p->num;
        return;
    }
    h->report.computed_tokens += (uint32_t)(p->end - p->done);
    if (has_output(p)) {
        end_prompt(kv, seq, p->want + 1);
    }
}

/* ---- after a failure ---- */

/* llama_decode leaves the memory unchanged when it returns one of these. kvf_llama_decode promises the same. */
static bool promises_no_change(int32_t rc) {
    return rc == 1 || rc == -1;
}

static bool is_as_before(const kvf_llama *kv, llama_seq_id seq) {
    const kvfl_piece *p = &kv->calls->pieces[seq];
    return llama_memory_seq_pos_max(kv->mem, seq) == (llama_pos)p->first - 1;
}

/* Puts back what was dropped, removes what was brought in, and lets the history end where the batch began. False: that
 * did not work. */
static bool restore(kvf_llama *kv, llama_seq_id seq) {
    kvfl_piece *p = &kv->calls->pieces[seq];
    kvfl_history *h = &kv->follow->histories[seq];
    bool dropped = p->dropped.rows != NULL;
    bool changed = h->num != p->first || p->done > p->first || dropped || !is_as_before(kv, seq);
    if (p->why != KVF_ASIDE_NONE || !changed) {
        return true;
    }
    bool ok =
        dropped ? kvfl_put_back(kv, &p->dropped, seq) : llama_memory_seq_rm(kv->mem, seq, (llama_pos)p->first, -1);
    h->num = p->first;
    h->lineage = kvfl_has_states(kv) ? (kvfl_lineage){0} : p->before;
    h->in_prompt = false;
    return ok && is_as_before(kv, seq);
}

/* Only the memory tells what the sequence holds: its history ends where the memory does, and nothing in it counts as
 * cold. */
static void follow_memory(kvf_llama *kv, llama_seq_id seq) {
    const kvfl_piece *p = &kv->calls->pieces[seq];
    kvfl_history *h = &kv->follow->histories[seq];
    size_t end = (size_t)(llama_memory_seq_pos_max(kv->mem, seq) + 1);
    h->in_prompt = false;
    if (p->why != KVF_ASIDE_NONE || end > p->end) {
        kvfl_forget(kv, seq, KVF_ASIDE_FOREIGN);
        return;
    }
    h->num = end;
    h->lineage = (kvfl_lineage){0};
}

/* Undoes what was done for one sequence of a batch that failed with `rc`. Returns what the caller is told: -2 instead
 * of a code that promises an unchanged memory, if that promise can't be kept. */
static int32_t undo_piece(kvf_llama *kv, llama_seq_id seq, int32_t rc) {
    bool promised = promises_no_change(rc), restored = promised && restore(kv, seq);
    kvfl_free_stash(&kv->calls->pieces[seq].dropped);
    if (!restored) {
        follow_memory(kv, seq);
    }
    return promised && !restored ? -2 : rc;
}

/* ---- all of it ---- */

static int32_t conclude(kvf_llama *kv, int32_t rc) {
    int32_t result = rc;
    for (size_t seq = 0; seq < kv->num_seqs; seq++) {
        if (kv->calls->pieces[seq].num == 0) {
            continue;
        }
        if (rc == 0) {
            note_piece(kv, (llama_seq_id)seq);
        } else if (undo_piece(kv, (llama_seq_id)seq, rc) != rc) {
            result = -2;
        }
    }
    return result;
}

int32_t kvfl_decode_unseen(kvf_llama *kv, const bool *seqs, size_t num_tokens, kvf_llama_aside why, kvfl_plain_fn plain,
                           void *arg) {
    kv->calls->num_mapped = 0;
    int32_t rc = plain(arg);
    if (promises_no_change(rc)) {
        return rc;
    }
    kv->calls->counters.aside_tokens[why] += num_tokens;
    for (size_t seq = 0; seq < kv->num_seqs; seq++) {
        if (seqs == NULL || seqs[seq]) {
            kv->follow->histories[seq].shares = true; /* for all that is known */
            kvfl_forget(kv, (llama_seq_id)seq, why);
        }
    }
    return rc;
}

/* Which sequences a batch names, among those that are followed. NULL without memory: any of them. */
static bool *seqs_of(const kvf_llama *kv, const struct llama_batch *batch) {
    bool *seqs = calloc(kv->num_seqs, sizeof *seqs);
    for (int32_t i = 0; i < batch->n_tokens && seqs != NULL; i++) {
        int32_t num = batch->seq_id != NULL && batch->n_seq_id != NULL ? batch->n_seq_id[i] : 1;
        for (int32_t k = 0; k < num; k++) {
            llama_seq_id seq = batch->seq_id != NULL ? batch->seq_id[i][k] : 0;
            if (kvfl_is_text(kv, seq)) {
                seqs[seq] = true;
            }
        }
    }
    return seqs;
}

static int32_t decode_unreadable(kvf_llama *kv, const struct llama_batch *batch, kvfl_plain_fn plain, void *arg) {
    bool *seqs = seqs_of(kv, batch);
    size_t num_tokens = batch->n_tokens > 0 ? (size_t)batch->n_tokens : 0;
    kvf_llama_aside why = batch->embd != NULL ? KVF_ASIDE_EMBEDDINGS : KVF_ASIDE_POSITIONS;
    int32_t rc = kvfl_decode_unseen(kv, seqs, num_tokens, why, plain, arg);
    free(seqs);
    return rc;
}

int32_t kvfl_decode(kvf_llama *kv, const struct llama_batch *batch, kvfl_plain_fn plain, void *arg) {
    kv->calls->num_mapped = 0;
    if (!read_batch(kv, batch)) {
        return decode_unreadable(kv, batch, plain, arg);
    }
    int32_t rc = bring_all(kv, batch);
    return conclude(kv, rc == 0 ? decode_rest(kv, batch, plain, arg) : rc);
}

/* ---- the public call ---- */

typedef struct plain_batch {
    struct llama_context *ctx;
    struct llama_batch batch;
} plain_batch;

static int32_t decode_plain(void *arg) {
    const plain_batch *b = arg;
    return llama_decode(b->ctx, b->batch);
}

int32_t kvf_llama_decode(kvf_llama *kv, struct llama_batch batch) {
    if (!kvfl_is_ours(kv)) {
        return -2; /* llama.cpp's threads are the parent's */
    }
    plain_batch plain = {kv->ctx, batch};
    kv->calls->paused = kvfl_computes_as_named(kv) ? KVF_ASIDE_NONE : KVF_ASIDE_ATTENTION;
    return kvfl_decode(kv, &batch, decode_plain, &plain);
}

int32_t kvf_llama_output(const kvf_llama *kv, int32_t i) {
    return i < 0 || kv->calls->num_mapped == 0 ? i : i < kv->calls->num_mapped ? kv->calls->output_of[i] : INT32_MAX;
}
