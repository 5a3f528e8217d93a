/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocks from the store into a sequence. Where a tier lends its bytes, llama.cpp imports straight from them; otherwise groups of blocks
 * are read into two buffers in turn, so that one is imported while the other fills. Whatever is in doubt ends the run.
 */
#include <poll.h>
#include <stdlib.h>

#include "llama/engine.h"

typedef struct load {
    kvf_llama        *kv;
    kvf_llama_report *report;
    llama_seq_id      seq;
    size_t            next, end; /* blocks: the next to import, and where what was matched ends */
    int64_t           deadline_us;
} load;

static uint32_t left_ms(const load *l) {
    int64_t left = l->deadline_us - kvfl_now_us();
    return left > 1000 ? (uint32_t)(left / 1000) : 1;
}

/* The bytes have been verified: what llama.cpp makes of them is checked once more before they join the sequence. */
static bool import_block(load *l, const void *bytes, size_t len) {
    kvf_llama *kv = l->kv;
    llama_pos first = (llama_pos)kvfl_position(kv, l->next), end = (llama_pos)kvfl_position(kv, l->next + 1);
    int64_t begin = kvfl_now_us();
    bool known = len == kvfl_bytes_of(kv, l->next) && kvfl_blob_covers(bytes, len, first, end);
    bool ok = known && llama_state_seq_set_data(kv->ctx, bytes, len, kv->scratch) == len &&
              llama_memory_seq_pos_min(kv->mem, kv->scratch) == first &&
              llama_memory_seq_pos_max(kv->mem, kv->scratch) == end - 1;
    if (ok) {
        llama_memory_seq_cp(kv->mem, kv->scratch, l->seq, first, end);
        l->next++;
        l->report->loaded_bytes += len;
    } else {
        l->report->why = known ? KVF_WHY_FULL : KVF_WHY_VERSION; /* no free cells; or not what this engine exports */
    }
    llama_memory_seq_rm(kv->mem, kv->scratch, -1, -1);
    l->report->import_us += kvfl_now_us() - begin;
    return ok;
}

/* ---- borrowing: true when the next block is in, false when it must be loaded, or not at all (then *stop) ---- */

static bool borrow_next(load *l, bool *stop) {
    kvf_block block = kvfl_block_of(l->kv, l->next);
    kvf_borrowed borrowed = {0};
    if (kvf_borrow(l->kv->space, &borrowed, &block) != KVF_OK) {
        if (block.why != KVF_WHY_ABSENT) {
            l->report->why = block.why;
            *stop = true;
        }
        return false;
    }
    bool ok = import_block(l, borrowed.data, borrowed.len);
    kvf_release(l->kv->space, &borrowed);
    *stop = !ok;
    return ok;
}

static void borrow_all(load *l, bool *stop) {
    while (l->next < l->end && !*stop) {
        if (kvfl_now_us() >= l->deadline_us) {
            l->report->why = KVF_WHY_BUDGET;
            *stop = true;
        } else if (!borrow_next(l, stop)) {
            return;
        }
    }
}

/* ---- loading by groups ---- */

typedef struct group {
    size_t first, num; /* blocks; num 0 = none on its way */
    size_t num_ok;
    bool   done;
} group;

static bool has_buffer(kvf_llama *kv, size_t which) {
    if (kv->buffers[which] == NULL) {
        kv->buffers[which] = aligned_alloc(4096, kv->group * kv->stride);
    }
    return kv->buffers[which] != NULL;
}

static void submit(load *l, group *groups, size_t which, size_t first) {
    kvf_llama *kv = l->kv;
    size_t num = l->end - first < kv->group ? l->end - first : kv->group;
    groups[which] = (group){.first = first};
    if (num == 0 || !has_buffer(kv, which)) {
        return;
    }
    for (size_t i = 0; i < num; i++) {
        kv->iov[which][i] = (struct iovec){kv->buffers[which] + i * kv->stride, kvfl_bytes_of(kv, first + i)};
        kv->blocks[which][i] = kvfl_block_of(kv, first + i);
        kv->blocks[which][i].iov = &kv->iov[which][i];
        kv->blocks[which][i].num_iov = 1;
    }
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_LOAD,
                       .space = kv->space,
                       .blocks = kv->blocks[which],
                       .num = num,
                       .budget_ms = left_ms(l),
                       .user = which};
    uint64_t ticket = 0;
    if (kvf_submit(kv->queue, &ticket, &batch) == KVF_OK) {
        groups[which].num = num;
    }
}

/* Every batch ends by its budget, so this does. */
static void wait_for(load *l, group *groups, size_t which) {
    while (groups[which].num > 0 && !groups[which].done) {
        kvf_completion done;
        if (kvf_reap(l->kv->queue, &done, 1) == 1) {
            groups[done.user].num_ok = done.num_ok;
            groups[done.user].done = true;
        } else {
            struct pollfd fd = {.fd = kvf_queue_fd(l->kv->queue), .events = POLLIN};
            poll(&fd, 1, 100);
        }
    }
}

static bool import_group(load *l, const group *g, size_t which) {
    const kvf_llama *kv = l->kv;
    for (size_t i = 0; i < g->num_ok; i++) {
        if (!import_block(l, kv->iov[which][i].iov_base, kv->iov[which][i].iov_len)) {
            return false;
        }
    }
    if (g->num_ok < g->num) {
        l->report->why = kv->blocks[which][g->num_ok].why;
    }
    return g->num > 0 && g->num_ok == g->num;
}

static void load_all(load *l) {
    group groups[2] = {{0}, {0}};
    submit(l, groups, 0, l->next);
    submit(l, groups, 1, groups[0].first + groups[0].num);
    for (size_t which = 0; groups[which].num > 0; which = 1 - which) {
        wait_for(l, groups, which);
        if (!import_group(l, &groups[which], which)) {
            break;
        }
        size_t after = groups[1 - which].num > 0 ? groups[1 - which].first + groups[1 - which].num : l->end;
        submit(l, groups, which, after);
    }
    wait_for(l, groups, 0);
    wait_for(l, groups, 1);
}

/* ---- both ---- */

/* How many of the blocks are stored, in the size that this context has. */
static void match(load *l) {
    kvf_llama *kv = l->kv;
    size_t run = 0, wanted = l->end - l->next;
    int64_t begin = kvfl_now_us(), left = l->deadline_us - begin;
    kvf_status status = kvf_match(kv->space, &run, kv->found, kv->keys + l->next, wanted, left > 1 ? (uint32_t)left : 1);
    if (status == KVF_OK && run < wanted) {
        l->report->why = kv->found[run].why;
    }
    for (size_t i = 0; i < run; i++) {
        if (kv->found[i].payload_bytes != kvfl_bytes_of(kv, l->next + i)) {
            l->report->why = KVF_WHY_TRUNCATED;
            run = i;
        }
    }
    l->end = l->next + run;
    l->report->match_us += kvfl_now_us() - begin;
}

size_t kvfl_load(kvf_llama *kv, kvf_llama_report *report, llama_seq_id seq, size_t first) {
    load l = {.kv = kv,
              .report = report,
              .seq = seq,
              .next = first,
              .end = kvfl_num_blocks(kv),
              .deadline_us = kvfl_now_us() + (int64_t)kv->budget_ms * 1000};
    if (l.next >= l.end) {
        return first;
    }
    match(&l);
    int64_t begin = kvfl_now_us();
    bool stop = false;
    borrow_all(&l, &stop);
    if (l.next < l.end && !stop) {
        load_all(&l);
    }
    report->load_us += kvfl_now_us() - begin;
    if (!kvfl_holds(kv, seq, kvfl_position(kv, l.next))) {
        llama_memory_seq_rm(kv->mem, seq, -1, -1);
        return 0;
    }
    report->loaded_tokens += (uint32_t)(kvfl_position(kv, l.next) - kvfl_position(kv, first));
    return l.next;
}

size_t kvf_llama_load(kvf_llama *kv, kvf_llama_report *report, llama_seq_id seq, const llama_token *tokens, size_t num) {
    kvf_llama_report unread = {0};
    size_t cut = kvf_llama_cut(kv, num);
    if (kv->space == NULL || cut == 0 || num > kv->n_ctx || !kvfl_is_text(kv, seq)) {
        return 0;
    }
    llama_memory_seq_rm(kv->mem, seq, -1, -1);
    kv->residents[seq].num = 0;
    kvfl_chain(kv, tokens, cut, num - 1 - cut);
    size_t loaded = kvfl_position(kv, kvfl_load(kv, report != NULL ? report : &unread, seq, 0));
    kvfl_follow(kv, seq, tokens, loaded);
    return loaded;
}
