/* SPDX-License-Identifier: Apache-2.0
 *
 * Queue: batches without waiting.
 */
#include <poll.h>
#include <string.h>
#include <time.h>

#include "ext.h"
#include "manual.h"

/* A wait looks this often whether the queue was closed, or a signal has come. */
#define LOOK_MS 50

typedef struct queue_handle {
    kvfp_handle base;
    kvfp_batch *live; /* submitted and not reaped, in any order */
    size_t num_live, depth;
    PyObject *on_close; /* called without arguments when it is closed; may be NULL */
} queue_handle;

PyTypeObject *kvfp_QueueType;

static void close_queue(void *it) {
    kvf_queue_close(it);
}

static queue_handle *queue_of(kvfp_handle *handle) {
    return (queue_handle *)(void *)handle;
}

static void tell_closed(kvfp_handle *handle) {
    PyObject *on_close = queue_of(handle)->on_close;
    queue_of(handle)->on_close = NULL;
    if (on_close == NULL) {
        return;
    }
    PyObject *done = PyObject_CallNoArgs(on_close);
    if (done == NULL) {
        PyErr_WriteUnraisable(on_close);
    }
    Py_XDECREF(done);
    Py_DECREF(on_close);
}

/* The batches of a queue that is closed. */
static void free_batches(kvfp_handle *handle) {
    queue_handle *queue = queue_of(handle);
    while (queue->live != NULL) {
        kvfp_batch *batch = queue->live;
        queue->live = batch->next;
        queue->num_live--;
        kvfp_batch_free(batch);
    }
}

static const kvfp_kind queue_kind = {"Queue", sizeof(queue_handle), tell_closed, close_queue, free_batches};

static queue_handle *enter(PyObject *self) {
    return queue_of(kvfp_enter_object(self, kvfp_QueueType, "Queue"));
}

static void leave(queue_handle *queue) {
    kvfp_leave(&queue->base);
}

/* ---- opening */
static PyObject *open_queue(PyTypeObject *type, PyObject *store, size_t depth) {
    kvfp_handle *of = kvfp_enter_object(store, kvfp_StoreType, "Store");
    if (of == NULL) {
        return NULL;
    }
    kvf_queue *it = NULL;
    kvf_error err = {0};
    PyObject *opened = NULL;
    kvf_status status = kvf_queue_open(&it, &err, of->it, (uint32_t)depth);
    if (status != KVF_OK) {
        kvfp_raise(status, &err, "the queue can't be opened");
    } else {
        kvfp_handle *handle = kvfp_handle_new(&queue_kind, it, of, NULL);
        if (handle != NULL) {
            queue_of(handle)->depth = depth;
            opened = kvfp_object_new(type, handle, store);
        }
    }
    kvfp_leave(of);
    return opened;
}

static PyObject *queue_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"store", "depth", NULL};
    PyObject *store = NULL, *depth_from = NULL;
    size_t depth = 64;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:Queue", names, &store, &depth_from) ||
        (depth_from != NULL && !kvfp_take_count(&depth, depth_from, "depth", 1, 4096))) {
        return NULL;
    }
    return open_queue(type, store, depth);
}

/* ---- submit */
typedef struct submission {
    kvfp_request request;
    int each, arrivals, may_lend;
    int64_t budget_us, patience_us;
} submission;

static bool make_room(kvfp_batch *batch, const submission *s) {
    if (batch->op == KVF_OP_MATCH) {
        batch->found = PyMem_Calloc(batch->num + 1, sizeof *batch->found);
    }
    if (s->arrivals) {
        batch->arrivals.each = PyMem_Calloc(batch->num + 1, 1);
    }
    if ((batch->op == KVF_OP_MATCH && batch->found == NULL) || (s->arrivals && batch->arrivals.each == NULL)) {
        PyErr_NoMemory();
        return false;
    }
    return true;
}

static kvf_batch batch_for_queue(kvfp_batch *batch, const submission *s) {
    return (kvf_batch){
        .struct_size = sizeof(kvf_batch),
        .op = batch->op,
        .flags = (s->each ? (uint32_t)KVF_EACH : 0) | (s->may_lend ? (uint32_t)KVF_MAY_LEND : 0),
        .space = batch->space->it,
        .blocks = batch->blocks,
        .num = batch->num,
        .view = batch->view == NULL ? NULL : batch->view->it,
        .budget_us = s->budget_us,
        .user = (uint64_t)(uintptr_t)batch,
        .arrivals = s->arrivals ? &batch->arrivals : NULL,
        .found = batch->found,
        .patience_us = s->patience_us,
    };
}

/* Hands the batch over, or frees it. */
static PyObject *hand_over(queue_handle *queue, kvfp_batch *batch, const submission *s) {
    kvf_batch of = batch_for_queue(batch, s);
    kvf_status status = kvf_submit(queue->base.it, &batch->ticket, &of);
    if (status != KVF_OK) {
        kvfp_batch_free(batch);
        return status == KVF_AGAIN ? kvfp_none()
                                   : kvfp_raise(status, NULL,
                                                "the batch is refused: its space is of another store, or its timeout "
                                                "is out of range");
    }
    batch->next = queue->live;
    queue->live = batch;
    queue->num_live++;
    return PyLong_FromUnsignedLongLong(batch->ticket);
}

static PyObject *submit(PyObject *self, const submission *s) {
    kvfp_batch *batch = kvfp_batch_new(&s->request);
    if (batch == NULL) {
        return NULL;
    }
    queue_handle *queue = make_room(batch, s) ? enter(self) : NULL;
    if (queue == NULL) {
        kvfp_batch_free(batch);
        return NULL;
    }
    PyObject *ticket = hand_over(queue, batch, s);
    leave(queue);
    kvfp_log_tell();
    return ticket;
}

static PyObject *queue_submit_load(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"space", "keys",     "into",    "slots",    "tokens", "first_token",
                            "each",  "arrivals", "timeout", "patience", "owner",  NULL};
    submission s = {.request.op = KVF_OP_LOAD};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|$OOOppO&O&O:submit_load", names, &s.request.space,
                                     &s.request.keys, &s.request.memory, &s.request.slots, &s.request.tokens,
                                     &s.request.first_token, &s.each, &s.arrivals, kvfp_timeout, &s.budget_us,
                                     kvfp_patience, &s.patience_us, &s.request.owner)) {
        return NULL;
    }
    return submit(self, &s);
}

static PyObject *queue_submit_save(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"space",    "keys",    "source",   "slots", "tokens", "first_token",
                            "may_lend", "timeout", "patience", "owner", NULL};
    submission s = {.request.op = KVF_OP_SAVE};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|$OOOpO&O&O:submit_save", names, &s.request.space,
                                     &s.request.keys, &s.request.memory, &s.request.slots, &s.request.tokens,
                                     &s.request.first_token, &s.may_lend, kvfp_timeout, &s.budget_us, kvfp_patience,
                                     &s.patience_us, &s.request.owner)) {
        return NULL;
    }
    return submit(self, &s);
}

static PyObject *queue_submit_match(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"space", "keys", "each", "timeout", NULL};
    submission s = {.request.op = KVF_OP_MATCH};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$pO&:submit_match", names, &s.request.space, &s.request.keys,
                                     &s.each, kvfp_timeout, &s.budget_us)) {
        return NULL;
    }
    return submit(self, &s);
}

static PyObject *submit_keys(PyObject *self, PyObject *args, PyObject *kwargs, kvf_op op) {
    static char *names[] = {"space", "keys", "timeout", NULL};
    submission s = {.request.op = op};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$O&", names, &s.request.space, &s.request.keys, kvfp_timeout,
                                     &s.budget_us)) {
        return NULL;
    }
    return submit(self, &s);
}

static PyObject *queue_submit_remove(PyObject *self, PyObject *args, PyObject *kwargs) {
    return submit_keys(self, args, kwargs, KVF_OP_REMOVE);
}

static PyObject *queue_submit_touch(PyObject *self, PyObject *args, PyObject *kwargs) {
    return submit_keys(self, args, kwargs, KVF_OP_TOUCH);
}

/* ---- reap */
static void unlink_batch(queue_handle *queue, const kvfp_batch *batch) {
    kvfp_batch **at = &queue->live;
    while (*at != batch) {
        at = &(*at)->next;
    }
    *at = batch->next;
    queue->num_live--;
}

static PyObject *name_of(kvf_op op) {
    static const char *const names[] = {"load", "save", "match", "remove", "touch"};
    return PyUnicode_InternFromString(names[op]);
}

static PyObject *found_of(const kvfp_batch *batch) {
    if (batch->found == NULL) {
        return kvfp_none();
    }
    PyObject *all = PyTuple_New((Py_ssize_t)batch->num);
    for (size_t i = 0; all != NULL && i < batch->num; i++) {
        PyObject *found = kvfp_found_value(&batch->found[i]);
        if (found == NULL) {
            Py_CLEAR(all);
        } else {
            PyTuple_SetItem(all, (Py_ssize_t)i, found);
        }
    }
    return all;
}

/* A match says of each key what it found; its blocks say nothing. */
static PyObject *reasons_of(const kvfp_batch *batch) {
    if (batch->found == NULL) {
        return kvfp_batch_reasons(batch);
    }
    PyObject *reasons = PyTuple_New((Py_ssize_t)batch->num);
    for (size_t i = 0; reasons != NULL && i < batch->num; i++) {
        PyTuple_SetItem(reasons, (Py_ssize_t)i, kvfp_reason(batch->found[i].why));
    }
    return reasons;
}

static PyObject *completion_value(const kvf_completion *done, const kvfp_batch *batch) {
    return KVFP_VALUE(kvfp_Completion, PyLong_FromUnsignedLongLong(done->ticket), name_of(done->op),
                      PyLong_FromSize_t(done->num_ok), reasons_of(batch), found_of(batch));
}

/* One completion at a time: what was taken out is in the list, or an exception says why it is lost. */
static bool reap_one(queue_handle *queue, PyObject *list) {
    kvf_completion done;
    if (kvf_reap(queue->base.it, &done, 1) == 0) {
        return false;
    }
    kvfp_batch *batch = (kvfp_batch *)(uintptr_t)done.user;
    unlink_batch(queue, batch);
    PyObject *value = completion_value(&done, batch);
    kvfp_batch_free(batch);
    bool added = value != NULL && PyList_Append(list, value) == 0;
    Py_XDECREF(value);
    return added;
}

static PyObject *queue_reap(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"max", NULL};
    Py_ssize_t max = 64;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|n:reap", names, &max)) {
        return NULL;
    }
    queue_handle *queue = enter(self);
    if (queue == NULL) {
        return NULL;
    }
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list != NULL && i < max && reap_one(queue, list); i++) {
    }
    if (PyErr_Occurred() != NULL) {
        Py_CLEAR(list);
    }
    leave(queue);
    kvfp_log_tell();
    return list;
}

/* ---- wait */
static int64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* Waits for one look. -1: an exception; 0: not ready; 1: ready. */
static int wait_once(queue_handle *queue, int64_t left_us) {
    struct pollfd ready = {.fd = kvf_queue_fd(queue->base.it), .events = POLLIN};
    int wait_ms = left_us > LOOK_MS * 1000 ? LOOK_MS : (int)((left_us + 999) / 1000);
    int num = 0;
    Py_BEGIN_ALLOW_THREADS num = poll(&ready, 1, wait_ms);
    Py_END_ALLOW_THREADS if (PyErr_CheckSignals() != 0) {
        return -1;
    }
    if (queue->base.closed) {
        PyErr_SetString(kvfp_ClosedError, "this Queue was closed while it was waited for");
        return -1;
    }
    return num > 0 && (ready.revents & POLLIN) != 0;
}

static PyObject *queue_wait(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"timeout", NULL};
    int64_t budget_us = KVF_DEFAULT, left_us = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O&:wait", names, kvfp_timeout, &budget_us)) {
        return NULL;
    }
    queue_handle *queue = enter(self);
    if (queue == NULL) {
        return NULL;
    }
    int64_t until = budget_us == KVF_DEFAULT ? INT64_MAX : now_us() + (budget_us == KVF_POLL ? 0 : budget_us);
    int ready = 0;
    do {
        left_us = until == INT64_MAX ? until : until - now_us();
        ready = wait_once(queue, left_us < 0 ? 0 : left_us);
    } while (ready == 0 && left_us > 0);
    leave(queue);
    kvfp_log_tell();
    return ready < 0 ? NULL : PyBool_FromLong(ready);
}

/* ---- batches under way */
static const kvfp_batch *batch_of(const queue_handle *queue, size_t ticket) {
    const kvfp_batch *batch = queue->live;
    while (batch != NULL && batch->ticket != ticket) {
        batch = batch->next;
    }
    return batch;
}

static PyObject *queue_cancel(PyObject *self, PyObject *from) {
    size_t ticket = 0;
    queue_handle *queue = kvfp_take_count(&ticket, from, "ticket", 0, SIZE_MAX) ? enter(self) : NULL;
    if (queue == NULL) {
        return NULL;
    }
    if (batch_of(queue, ticket) != NULL) {
        kvf_cancel(queue->base.it, ticket);
    }
    leave(queue);
    return kvfp_none();
}

static PyObject *queue_trim(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"ticket", "num", NULL};
    PyObject *from = NULL, *num_from = NULL;
    size_t ticket = 0, num = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:trim", names, &from, &num_from) ||
        !kvfp_take_count(&ticket, from, "ticket", 0, SIZE_MAX) ||
        !kvfp_take_count(&num, num_from, "num", 0, SIZE_MAX)) {
        return NULL;
    }
    queue_handle *queue = enter(self);
    if (queue == NULL) {
        return NULL;
    }
    const kvfp_batch *batch = batch_of(queue, ticket);
    if (batch != NULL && batch->arrivals.each != NULL) {
        kvf_trim(queue->base.it, ticket, num);
    }
    leave(queue);
    return kvfp_none();
}

static PyObject *arrivals_value(const kvfp_batch *batch) {
    PyObject *states = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)batch->num);
    if (states == NULL) {
        return NULL;
    }
    uint64_t bytes = kvf_arrived_bytes(&batch->arrivals);
    char *out = PyBytes_AsString(states);
    for (size_t i = 0; i < batch->num; i++) {
        out[i] = (char)__atomic_load_n(&batch->arrivals.each[i], __ATOMIC_ACQUIRE);
    }
    return Py_BuildValue("(KN)", (unsigned long long)bytes, states);
}

static PyObject *queue_arrived(PyObject *self, PyObject *from) {
    size_t ticket = 0;
    queue_handle *queue = kvfp_take_count(&ticket, from, "ticket", 0, SIZE_MAX) ? enter(self) : NULL;
    if (queue == NULL) {
        return NULL;
    }
    const kvfp_batch *batch = batch_of(queue, ticket);
    PyObject *value = batch == NULL || batch->arrivals.each == NULL ? kvfp_none() : arrivals_value(batch);
    leave(queue);
    return value;
}

/* For the class that adds awaitables. */
static PyObject *queue_set_on_close(PyObject *self, PyObject *on_close) {
    queue_handle *queue = enter(self);
    if (queue == NULL) {
        return NULL;
    }
    PyObject *before = queue->on_close;
    Py_INCREF(on_close);
    queue->on_close = on_close;
    Py_XDECREF(before);
    leave(queue);
    return kvfp_none();
}

/* ---- properties */
static PyObject *queue_fileno(PyObject *self, PyObject *unused) {
    (void)unused;
    queue_handle *queue = enter(self);
    if (queue == NULL) {
        return NULL;
    }
    int fd = kvf_queue_fd(queue->base.it);
    leave(queue);
    return PyLong_FromLong(fd);
}

static PyObject *queue_depth(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromSize_t(queue_of(((kvfp_object *)(void *)self)->handle)->depth);
}

static Py_ssize_t queue_length(PyObject *self) {
    return (Py_ssize_t)queue_of(((kvfp_object *)(void *)self)->handle)->num_live;
}

static PyMethodDef methods[] = {
    KVFP_COMMON_METHODS,
    {"fileno", queue_fileno, METH_NOARGS, "fileno($self, /)\n--\n\n" KVFP_MANUAL_Queue_fileno},
    {"submit_load", KVFP_KEYWORDS(queue_submit_load),
     "submit_load($self, /, space, keys, into, *, slots=None, tokens=None, first_token=None, each=False, "
     "arrivals=False, timeout=None, patience=None, owner=None)\n--\n\n" KVFP_MANUAL_Queue_submit_load},
    {"submit_save", KVFP_KEYWORDS(queue_submit_save),
     "submit_save($self, /, space, keys, source, *, slots=None, tokens=None, first_token=None, "
     "may_lend=False, timeout=None, patience=None, owner=None)\n--\n\n" KVFP_MANUAL_Queue_submit_save},
    {"submit_match", KVFP_KEYWORDS(queue_submit_match),
     "submit_match($self, /, space, keys, *, each=False, timeout=None)\n--\n\n" KVFP_MANUAL_Queue_submit_match},
    {"submit_remove", KVFP_KEYWORDS(queue_submit_remove),
     "submit_remove($self, /, space, keys, *, timeout=None)\n--\n\n" KVFP_MANUAL_Queue_submit_remove},
    {"submit_touch", KVFP_KEYWORDS(queue_submit_touch),
     "submit_touch($self, /, space, keys, *, timeout=None)\n--\n\n" KVFP_MANUAL_Queue_submit_touch},
    {"reap", KVFP_KEYWORDS(queue_reap), "reap($self, /, max=64)\n--\n\n" KVFP_MANUAL_Queue_reap},
    {"wait", KVFP_KEYWORDS(queue_wait), "wait($self, /, timeout=None)\n--\n\n" KVFP_MANUAL_Queue_wait},
    {"cancel", queue_cancel, METH_O, "cancel($self, ticket, /)\n--\n\n" KVFP_MANUAL_Queue_cancel},
    {"trim", KVFP_KEYWORDS(queue_trim), "trim($self, /, ticket, num)\n--\n\n" KVFP_MANUAL_Queue_trim},
    {"arrived", queue_arrived, METH_O, "arrived($self, ticket, /)\n--\n\n" KVFP_MANUAL_Queue_arrived},
    {"_set_on_close", queue_set_on_close, METH_O,
     "_set_on_close($self, on_close, /)\n--\n\nFor kvferry.Queue: called when anybody closes the queue."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef properties[] = {
    {"closed", kvfp_object_closed, NULL, "Whether it was closed, or belongs to the parent of this process.", NULL},
    {"store", kvfp_object_of, NULL, "The Store of the queue.", NULL},
    {"depth", queue_depth, NULL, "How many batches it holds.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_doc, "Queue(store, depth=64)\n--\n\n" KVFP_MANUAL_Queue},
    {Py_tp_new, queue_new},
    KVFP_COMMON_SLOTS,
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_sq_length, queue_length},
    {0, NULL},
};
static PyType_Spec spec = {"kvferry._kvferry.Queue", sizeof(kvfp_object), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, slots};

bool kvfp_queue_init(PyObject *module) {
    kvfp_QueueType = kvfp_add_type(module, &spec);
    return kvfp_QueueType != NULL;
}
