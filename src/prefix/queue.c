/* SPDX-License-Identifier: Apache-2.0
 *
 * The completion queue: runs batches on threads of the store and reports each through an event descriptor.
 */
#include <sys/eventfd.h>

#include "base/interrupt.h"
#include "kvferry/sized.h"
#include "prefix/prefix.h"

#define MAX_DEPTH 4096u

typedef struct slot {
    kvfi_job job;
    kvf_queue *queue;
    struct slot *next; /* in the free list, or in the list of completed batches */
    kvf_batch batch;
    int64_t deadline_us;
    uint64_t ticket; /* 0 = free */
    size_t num_ok;
    atomic_bool cancelled;
    size_t num_held; /* blocks whose slots in the view are marked as in use since the submission */
    kvfi_watch watch;
} slot;

struct kvf_queue {
    kvf_store *store;
    int fd;
    pthread_mutex_t lock;
    pthread_cond_t idle;
    uint64_t last_ticket;
    size_t depth, num_running;
    slot *free_slots, *first_done, *last_done;
    slot slots[];
};

kvf_status kvf_queue_open(kvf_queue **out, kvf_error *err, kvf_store *store, uint32_t depth) {
    KVFI_TRY(kvfi_store_check_ours(store, err));
    if (depth == 0 || depth > MAX_DEPTH) {
        return kvfi_fail(err, KVF_LIMIT, "a queue holds 1 to %u batches, not %u", MAX_DEPTH, depth);
    }
    kvf_queue *queue = kvfi_alloc_zero(1, sizeof *queue + depth * sizeof(slot));
    if (queue == NULL) {
        return kvfi_fail(err, KVF_NOMEM, "no memory for a queue of %u batches", depth);
    }
    queue->fd = kvfi_sys->eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (queue->fd < 0) {
        kvfi_free(queue);
        return kvfi_fail(err, KVF_IO, "no eventfd for the queue: too many open files");
    }
    queue->store = store;
    queue->depth = depth;
    pthread_mutex_init(&queue->lock, NULL);
    kvfi_cond_init(&queue->idle);
    for (size_t i = 0; i < depth; i++) {
        queue->slots[i].queue = queue;
        queue->slots[i].next = queue->free_slots;
        queue->free_slots = &queue->slots[i];
    }
    *out = queue;
    return KVF_OK;
}

int kvf_queue_fd(const kvf_queue *queue) {
    return kvfi_store_is_ours(queue->store) ? queue->fd : -1;
}

/* ---- running ---- */

static size_t drop_match(const kvf_batch *b) {
    for (size_t i = 0; i < b->num && b->found != NULL; i++) {
        b->found[i] = (kvf_found){.why = KVF_WHY_CLOSED};
    }
    return 0;
}

/* A match is one question: it is asked or dropped as a whole. */
static size_t run_match(const slot *s) {
    const kvf_batch *b = &s->batch;
    if (b->num == 0 || atomic_load(&s->cancelled)) {
        return drop_match(b);
    }
    return kvfi_match(b->space, b->found, &b->blocks->key, sizeof *b->blocks, b->num, b->flags, s->deadline_us,
                      b->patience_us);
}

static size_t run_batch(slot *s) {
    const kvf_batch *b = &s->batch;
    switch (b->op) {
    case KVF_OP_LOAD:
        return kvfi_load(b->space, b->blocks, b->num, b->view, b->flags, s->deadline_us, b->patience_us, &s->cancelled,
                         b->arrivals != NULL ? &s->watch : NULL);
    case KVF_OP_SAVE:
        return kvfi_save_through(b->space, b->blocks, b->num, b->view, b->flags, s->deadline_us, b->patience_us,
                                 &s->cancelled);
    case KVF_OP_MATCH:
        return run_match(s);
    case KVF_OP_REMOVE:
    case KVF_OP_TOUCH:
        return kvfi_each(b->space, b->op == KVF_OP_REMOVE ? KVFI_REMOVE : KVFI_TOUCH, b->blocks, b->num, s->deadline_us,
                         b->patience_us, &s->cancelled);
    }
    return 0;
}

/* Under the lock. A write to an eventfd fails only when its counter is full, and then it is readable anyway. */
static void signal_done(kvf_queue *queue) {
    uint64_t one = 1;
    struct iovec iov = {&one, sizeof one};
    for (int tries = 0; tries < 3 && kvfi_sys->writev(queue->fd, &iov, 1) < 0; tries++) {
    }
}

/* A block of a watched batch is complete: wakes the thread that waits at the queue, though there may be nothing to
 * reap. */
static void wake(void *arg) {
    kvf_queue *queue = arg;
    pthread_mutex_lock(&queue->lock);
    signal_done(queue);
    pthread_mutex_unlock(&queue->lock);
}

/* A fence waits for the slots of a batch from its submission on, not only once a thread has begun it. */
static void hold(slot *s) {
    const kvf_batch *b = &s->batch;
    if (b->op != KVF_OP_LOAD && b->op != KVF_OP_SAVE) {
        s->batch.view = NULL;
    }
    s->num_held = b->view != NULL ? kvfi_num_sound(b->space, b->blocks, b->num, b->view) : 0;
    kvfi_view_enter(b->view, b->blocks, s->num_held);
}

static void release(slot *s) {
    kvfi_view_leave(s->batch.view, s->batch.blocks, s->num_held);
}

static void run(void *arg) {
    slot *s = arg;
    kvf_queue *queue = s->queue;
    kvfi_interrupt_work_for(&s->cancelled);
    size_t num_ok = run_batch(s);
    kvfi_interrupt_work_for(NULL);
    release(s);
    pthread_mutex_lock(&queue->lock);
    s->num_ok = num_ok;
    s->next = NULL;
    *(queue->last_done != NULL ? &queue->last_done->next : &queue->first_done) = s;
    queue->last_done = s;
    queue->num_running--;
    signal_done(queue);
    pthread_cond_broadcast(&queue->idle);
    pthread_mutex_unlock(&queue->lock);
}

/* ---- submit, reap, cancel ---- */

static void fill_slot(slot *s, const kvf_batch *batch) {
    kvf_arrivals *a = batch->arrivals;
    s->batch = *batch;
    if (a != NULL) {
        s->watch = (kvfi_watch){.wanted = batch->num,
                                .bytes = &a->bytes,
                                .at_us = &a->at_us,
                                .each = a->each,
                                .moved = wake,
                                .arg = s->queue};
    }
    s->deadline_us = kvfi_budget_deadline(batch->budget_us);
    s->job = (kvfi_job){.run = run, .arg = s};
    atomic_store(&s->cancelled, false);
}

/* The slot is complete before another thread can name its ticket. */
static slot *take_slot(kvf_queue *queue, const kvf_batch *batch) {
    pthread_mutex_lock(&queue->lock);
    slot *s = queue->free_slots;
    if (s != NULL) {
        queue->free_slots = s->next;
        queue->num_running++;
        fill_slot(s, batch);
        s->ticket = ++queue->last_ticket;
    }
    pthread_mutex_unlock(&queue->lock);
    return s;
}

static void give_slot(kvf_queue *queue, slot *s) {
    pthread_mutex_lock(&queue->lock);
    s->ticket = 0;
    s->next = queue->free_slots;
    queue->free_slots = s;
    queue->num_running--;
    pthread_mutex_unlock(&queue->lock);
}

KVF_SIZED(kvf_batch, found, 80, patience_us);

/* Memory alone can answer. */
static bool reads(kvf_op op) {
    return op == KVF_OP_LOAD || op == KVF_OP_MATCH;
}

static bool is_sound(const kvf_queue *queue, const kvf_batch *batch) {
    uint32_t flags = batch->op == KVF_OP_SAVE ? KVF_MAY_LEND : reads(batch->op) ? KVF_EACH : 0;
    bool watched = batch->arrivals != NULL;
    return batch->num <= KVF_MAX_BLOCKS && (unsigned)batch->op <= KVF_OP_TOUCH && (batch->flags & ~flags) == 0 &&
           batch->space->store == queue->store &&
           (!watched || (batch->op == KVF_OP_LOAD && kvf_reserved_is_zero(batch->arrivals->reserved)));
}

kvf_status kvf_submit(kvf_queue *queue, uint64_t *out_ticket, const kvf_batch *batch) {
    kvf_batch own;
    KVFI_TRY(kvf_sized_take(&own, NULL, batch, &kvf_batch_sized));
    if (!is_sound(queue, &own)) {
        return KVF_LIMIT;
    }
    KVFI_TRY(kvfi_take_budget(&own.budget_us, NULL, KVFI_BLOCKS_US, reads(own.op)));
    KVFI_TRY(kvfi_take_budget(&own.patience_us, NULL, 0, false));
    if (!kvfi_store_is_ours(queue->store) || !kvfi_view_is_ours(own.view)) {
        return KVF_CLOSED;
    }
    slot *s = take_slot(queue, &own);
    if (s == NULL) {
        return KVF_AGAIN;
    }
    *out_ticket = s->ticket;
    hold(s);
    if (!kvfi_store_post(queue->store, own.op, &s->job)) {
        release(s);
        give_slot(queue, s);
        return KVF_NOMEM;
    }
    return KVF_OK;
}

/* Under the lock. */
static void clear_signal(kvf_queue *queue) {
    uint64_t count;
    struct iovec iov = {&count, sizeof count};
    (void)kvfi_sys->readv(queue->fd, &iov, 1);
}

size_t kvf_reap(kvf_queue *queue, kvf_completion *out, size_t cap) {
    size_t num = 0;
    if (!kvfi_store_is_ours(queue->store)) {
        return 0;
    }
    pthread_mutex_lock(&queue->lock);
    while (num < cap && queue->first_done != NULL) {
        slot *s = queue->first_done;
        queue->first_done = s->next;
        if (queue->first_done == NULL) {
            queue->last_done = NULL;
        }
        out[num++] =
            (kvf_completion){.ticket = s->ticket, .user = s->batch.user, .op = s->batch.op, .num_ok = s->num_ok};
        s->ticket = 0;
        s->next = queue->free_slots;
        queue->free_slots = s;
    }
    if (queue->first_done == NULL) {
        clear_signal(queue);
    }
    pthread_mutex_unlock(&queue->lock);
    return num;
}

void kvf_trim(kvf_queue *queue, uint64_t ticket, size_t num) {
    if (!kvfi_store_is_ours(queue->store)) {
        return;
    }
    pthread_mutex_lock(&queue->lock);
    for (size_t i = 0; i < queue->depth; i++) {
        if (ticket != 0 && queue->slots[i].ticket == ticket) {
            atomic_store_explicit(&queue->slots[i].watch.wanted, num, memory_order_relaxed);
        }
    }
    pthread_mutex_unlock(&queue->lock);
}

/* Under the lock. True: the batch has not begun, and the caller runs it, which does no I/O once it is cancelled.
 * Otherwise it would wait for a thread, and all threads may wait for a silent server. */
static bool drop(slot *s) {
    atomic_store(&s->cancelled, true);
    return kvfi_store_withdraw(s->queue->store, s->batch.op, &s->job);
}

void kvf_cancel(kvf_queue *queue, uint64_t ticket) {
    slot *dropped = NULL;
    if (!kvfi_store_is_ours(queue->store)) {
        return;
    }
    pthread_mutex_lock(&queue->lock);
    for (size_t i = 0; i < queue->depth; i++) {
        if (ticket != 0 && queue->slots[i].ticket == ticket && drop(&queue->slots[i])) {
            dropped = &queue->slots[i];
        }
    }
    pthread_mutex_unlock(&queue->lock);
    if (dropped != NULL) {
        run(dropped);
    }
}

static void drop_all(kvf_queue *queue) {
    slot *dropped = NULL;
    pthread_mutex_lock(&queue->lock);
    for (size_t i = 0; i < queue->depth; i++) {
        if (drop(&queue->slots[i])) {
            queue->slots[i].next = dropped;
            dropped = &queue->slots[i];
        }
    }
    pthread_mutex_unlock(&queue->lock);
    while (dropped != NULL) {
        slot *s = dropped;
        dropped = s->next;
        run(s);
    }
}

void kvf_queue_close(kvf_queue *queue) {
    if (queue == NULL || !kvfi_store_is_ours(queue->store)) {
        return;
    }
    drop_all(queue);
    pthread_mutex_lock(&queue->lock);
    while (queue->num_running > 0) {
        pthread_cond_wait(&queue->idle, &queue->lock);
    }
    pthread_mutex_unlock(&queue->lock);
    kvfi_sys->close(queue->fd);
    pthread_cond_destroy(&queue->idle);
    pthread_mutex_destroy(&queue->lock);
    kvfi_free(queue);
}
