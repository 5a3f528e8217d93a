/* SPDX-License-Identifier: Apache-2.0
 *
 * The extension module kvferry._kvferry: what its files share. It stands on the public headers only, and on Python's
 * limited API from 3.11 on.
 *
 * All state is guarded by the GIL, and all Python objects are the main interpreter's (module.c refuses others). Only
 * the ring of log messages (log.c) is touched by threads of the library.
 */
#ifndef KVFP_EXT_H
#define KVFP_EXT_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "kvferry/kvferry.h"

/* ---- errors (errors.c): each function raises, and returns NULL or false, unless it says otherwise */
extern PyObject *kvfp_Error, *kvfp_ConfigError, *kvfp_RefusedError, *kvfp_LimitError, *kvfp_StoreError,
    *kvfp_ClosedError;
bool kvfp_errors_init(PyObject *module);
/* kvfp_raise raises the exception of a status, with err->what, or `otherwise` where that is empty. Returns NULL. */
void *kvfp_raise(kvf_status status, const kvf_error *err, const char *otherwise);
/* kvfp_limit raises LimitError, formatted as PyErr_Format does. Returns NULL. */
void *kvfp_limit(const char *format, ...);

/* ---- arguments (args.c) */
/* Converters for "O&" of PyArg_Parse. */
int kvfp_timeout(PyObject *from, void *out_us);  /* int64_t: None, or seconds, as a budget */
int kvfp_patience(PyObject *from, void *out_us); /* the same, and not 0 */
int kvfp_buffer(PyObject *from, void *out);      /* Py_buffer: contiguous bytes; None = no buf. Release it. */
int kvfp_secret(PyObject *from, void *out);      /* the same, of a secret */
/* kvfp_take_items returns the items of any iterable as a tuple. `what` names the argument in the message, `needed` says
 * what it must be. */
PyObject *kvfp_take_items(PyObject *from, const char *what, const char *needed);
/* kvfp_take_32 reads 32 bytes: a key or digest. `what` names the argument in the message. */
bool kvfp_take_32(uint8_t out[32], PyObject *from, const char *what);
/* kvfp_take_tokens and kvfp_take_slots read a buffer of integers, or a sequence of ints, into new memory for
 * PyMem_Free. */
bool kvfp_take_tokens(uint32_t **out, size_t *out_num, PyObject *from);
bool kvfp_take_slots(int64_t **out, size_t *out_num, PyObject *from);
/* kvfp_take_count reads an int from `min` to `max`. */
bool kvfp_take_count(size_t *out, PyObject *from, const char *what, size_t min, size_t max);
/* kvfp_take_buffer reads the contiguous memory of any buffer; `writable` asks for a writable one. */
bool kvfp_take_buffer(Py_buffer *out, PyObject *from, const char *what, bool writable);
/* kvfp_name_buffer turns the exception of a buffer that is not contiguous or writable into a TypeError that says so. */
void kvfp_name_buffer(PyObject *from, const char *what, bool writable);

/* ---- memory of a caller in parts (parts.c) */
typedef struct kvfp_parts {
    struct iovec *iov;
    Py_buffer *buffers;
    size_t num, cap, num_buffers, cap_buffers;
    size_t bytes; /* of all parts */
} kvfp_parts;
/* kvfp_parts_add adds a part, or a list of parts. `what` and `index` name it in messages. */
bool kvfp_parts_add(kvfp_parts *parts, PyObject *from, const char *what, Py_ssize_t index, bool writable);
/* kvfp_parts_add_all adds one part, or the parts of any sequence. */
bool kvfp_parts_add_all(kvfp_parts *parts, PyObject *from, const char *what, bool writable);
void kvfp_parts_cleanup(kvfp_parts *parts);

/* ---- handles (handle.c): an object of the C library that is in use by calls, batches and other objects
 *
 * A handle is closed once, from then on nobody enters it, and the last one who leaves frees the C object. So closing is
 * safe in any order, and from any thread. */
typedef struct kvfp_handle kvfp_handle;
typedef struct kvfp_kind {
    const char *name;
    size_t size; /* of the struct that begins with a kvfp_handle */
    /* NULL, or called with the GIL when the handle is closed, before anything is freed. */
    void (*tell)(kvfp_handle *handle);
    void (*close)(void *it); /* called without the GIL */
    /* NULL, or called with the GIL afterwards, for what only then may go. */
    void (*finish)(kvfp_handle *handle);
} kvfp_kind;
struct kvfp_handle {
    void *it; /* the C object; NULL once it is freed */
    const kvfp_kind *kind;
    size_t uses; /* calls and batches inside, and handles that hang on this one */
    bool closed;
    bool orphan; /* its Python object is gone */
    pid_t pid;
    kvfp_handle *parent, *first_child, *prev, *next; /* `prev` and `next` in the parent's list */
    PyObject *keeps;                                 /* kept alive until the C object is freed; may be NULL */
};
/* kvfp_handle_new makes a handle of `it`, and closes `it` if that fails. `parent` may be NULL. */
kvfp_handle *kvfp_handle_new(const kvfp_kind *kind, void *it, kvfp_handle *parent, PyObject *keeps);
/* kvfp_enter raises ClosedError if the handle can't be used; after true comes kvfp_leave. `handle` may be NULL. */
bool kvfp_enter(kvfp_handle *handle, const char *name);
void kvfp_leave(kvfp_handle *handle);
bool kvfp_is_closed(const kvfp_handle *handle);
/* kvfp_close closes the handle and its children. */
void kvfp_close(kvfp_handle *handle);
/* kvfp_abandon closes it for good: its Python object goes. `handle` may be NULL. */
void kvfp_abandon(kvfp_handle *handle);

/* ---- Python objects of one handle each (object.c) */
typedef struct kvfp_object {
    PyObject_HEAD kvfp_handle *handle;
    PyObject *of; /* the Store of a Space or Queue; NULL */
} kvfp_object;
void kvfp_object_dealloc(PyObject *self);
int kvfp_object_traverse(PyObject *self, visitproc visit, void *arg);
int kvfp_object_clear(PyObject *self);
/* Methods of all of them. */
PyObject *kvfp_object_close(PyObject *self, PyObject *unused);
PyObject *kvfp_object_enter(PyObject *self, PyObject *unused);
PyObject *kvfp_object_exit(PyObject *self, PyObject *args);
PyObject *kvfp_object_closed(PyObject *self, void *unused);
PyObject *kvfp_object_of(PyObject *self, void *unused);
/* kvfp_object_new allocates an object of the type for a handle; abandons the handle if that fails. */
PyObject *kvfp_object_new(PyTypeObject *type, kvfp_handle *handle, PyObject *of);
/* The handle of `object` if it is of `type` and open; it is entered. TypeError, ClosedError. */
kvfp_handle *kvfp_enter_object(PyObject *object, PyTypeObject *type, const char *name);
/* Of each type with a kvfp_object: how it is freed, and seen by the cycle collector. */
#define KVFP_COMMON_SLOTS                                                           \
    {Py_tp_dealloc, kvfp_object_dealloc}, {Py_tp_traverse, kvfp_object_traverse}, { \
        Py_tp_clear, kvfp_object_clear                                              \
    }

#define KVFP_COMMON_METHODS                                                                                    \
    {"close", kvfp_object_close, METH_NOARGS, "close($self, /)\n--\n\nCloses it; closing twice is fine."},     \
        {"__enter__", kvfp_object_enter, METH_NOARGS, "__enter__($self, /)\n--\n\nItself, if it is open."}, {  \
        "__exit__", kvfp_object_exit, METH_VARARGS, "__exit__($self, kind, value, trace, /)\n--\n\nCloses it." \
    }

/* A method with keyword arguments, in a PyMethodDef. */
#define KVFP_KEYWORDS(function) (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

extern PyTypeObject *kvfp_StoreType, *kvfp_SpaceType, *kvfp_ViewType, *kvfp_QueueType, *kvfp_SessionType,
    *kvfp_ArrayType, *kvfp_PaceType;
bool kvfp_store_init(PyObject *module);
bool kvfp_space_init(PyObject *module);
bool kvfp_view_init(PyObject *module);
bool kvfp_queue_init(PyObject *module);
bool kvfp_session_init(PyObject *module);
bool kvfp_plan_init(PyObject *module);
#ifdef KVFP_LLAMA
bool kvfp_llama_init(PyObject *module); /* llama/engine.c */
#else
static inline bool kvfp_llama_init(PyObject *module) {
    return module != NULL;
}
#endif
/* kvfp_add_type makes a type and adds it to the module. Returns NULL with an exception if it can't. */
PyTypeObject *kvfp_add_type(PyObject *module, PyType_Spec *spec);

/* Methods of a Store in plan.c, session.c and admin.c. */
PyObject *kvfp_store_link(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *kvfp_session_save(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *kvfp_session_load(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *kvfp_session_look(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *kvfp_session_remove(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *kvfp_store_walk(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *kvfp_store_describe(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *kvfp_store_clear(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *kvfp_store_remove(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *kvfp_store_doctor(PyObject *self, PyObject *unused);
PyObject *kvfp_store_tiers(PyObject *self, PyObject *unused);

/* ---- waiting (wait.c): calls of the library that may wait, without the GIL:
 *
 *   kvfp_wait wait;
 *   kvfp_wait_begin(&wait);
 *   status = kvf_...(...);
 *   if (!kvfp_wait_end(&wait)) ... a handler of a signal has raised, such as KeyboardInterrupt, and the call has ended
 *
 * Its callbacks run with wait->thread: PyEval_RestoreThread(wait->thread), wait->thread = PyEval_SaveThread(). */
typedef struct kvfp_wait {
    PyThreadState *thread;
    bool listens;
} kvfp_wait;
void kvfp_wait_begin(kvfp_wait *wait);
bool kvfp_wait_end(kvfp_wait *wait);

/* ---- batches (batch.c): blocks, with all that they use */
typedef struct kvfp_batch {
    struct kvfp_batch *next; /* in its queue */
    kvf_op op;
    uint64_t ticket;
    kvf_block *blocks;
    size_t num;
    uint32_t *tokens;
    kvfp_parts parts;
    kvf_found *found;
    kvf_arrivals arrivals;
    kvfp_handle *space, *view; /* entered */
    PyObject *owner;
} kvfp_batch;
size_t kvfp_view_num_slots(const kvfp_handle *view);
/* What a caller says of a batch. NULL or Py_None where it says nothing. */
typedef struct kvfp_request {
    kvf_op op;
    PyObject *space, *keys, *memory, *slots, *tokens, *first_token, *owner;
} kvfp_request;
kvfp_batch *kvfp_batch_new(const kvfp_request *request);
void kvfp_batch_free(kvfp_batch *batch);
/* For each block None or the reason. */
PyObject *kvfp_batch_reasons(const kvfp_batch *batch);
/* kvfp_batch_result returns a Result, or raises what the blocks say of the call: ClosedError, LimitError. */
PyObject *kvfp_batch_result(const kvfp_batch *batch, size_t num_ok);

/* ---- values (values.c): the named tuples that calls return */
extern PyTypeObject *kvfp_Result, *kvfp_Found, *kvfp_Completion, *kvfp_Flushed, *kvfp_Entry, *kvfp_Finding, *kvfp_Tier,
    *kvfp_SessionInfo, *kvfp_Link, *kvfp_Plan;
bool kvfp_values_init(PyObject *module);
/* kvfp_value makes one of its fields, which it takes over, also where it fails. A NULL among them is a failure that was
 * raised. */
PyObject *kvfp_value(PyTypeObject *type, PyObject **fields, Py_ssize_t num);
#define KVFP_VALUE(type, ...) \
    kvfp_value(type, (PyObject *[]){__VA_ARGS__}, sizeof((PyObject *[]){__VA_ARGS__}) / sizeof(PyObject *))
PyObject *kvfp_none(void);
PyObject *kvfp_reason(kvf_reason why); /* None for KVF_WHY_NONE */
PyObject *kvfp_found_value(const kvf_found *found);
/* kvfp_fields_dict turns "name=value\n" lines into a dict. */
PyObject *kvfp_fields_dict(const char *text);

/* ---- the log (log.c) */
bool kvfp_log_init(void);
/* kvfp_log_tell gives messages that wait to logging.getLogger("kvferry"). Keeps an exception that is set. */
void kvfp_log_tell(void);

/* ---- the program (cli/main.c) */
int kvfcli_main(int argc, char **argv);

#endif
