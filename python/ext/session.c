/* SPDX-License-Identifier: Apache-2.0
 *
 * Sessions: K and V by id, and the objects that lend the memory of a loaded one.
 */
#include <string.h>

#include "ext.h"
#include "manual.h"

/* ---- the objects: a Session owns the memory, an Array lends one of its arrays by the buffer protocol */
typedef struct session_object {
    PyObject_HEAD kvf_session *it;
    bool is_lent; /* the arrays are in memory of the caller */
} session_object;

typedef struct array_object {
    PyObject_HEAD PyObject *session;
    const kvf_tensor *tensor;
} array_object;

PyTypeObject *kvfp_SessionType, *kvfp_ArrayType;

static session_object *session_of(PyObject *self) {
    return (session_object *)(void *)self;
}

static array_object *array_of(PyObject *self) {
    return (array_object *)(void *)self;
}

static void session_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    kvf_session *it = session_of(self)->it;
    Py_BEGIN_ALLOW_THREADS kvf_session_free(it); /* gives a mapping of any size back */
    Py_END_ALLOW_THREADS PyObject_Free(self);
    Py_DECREF(type);
}

static void array_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(array_of(self)->session);
    PyObject_Free(self);
    Py_DECREF(type);
}

static int array_lend(PyObject *self, Py_buffer *out, int flags) {
    const kvf_tensor *tensor = array_of(self)->tensor;
    return PyBuffer_FillInfo(out, self, (void *)(uintptr_t)tensor->data, (Py_ssize_t)tensor->len, 0, flags);
}

static PyObject *lend(PyObject *self, const kvf_tensor *tensor) {
    if (session_of(self)->is_lent) {
        return kvfp_none();
    }
    PyObject *array = PyType_GenericAlloc(kvfp_ArrayType, 0);
    if (array == NULL) {
        return NULL;
    }
    Py_INCREF(self);
    array_of(array)->session = self;
    array_of(array)->tensor = tensor;
    PyObject *view = PyMemoryView_FromObject(array);
    Py_DECREF(array);
    return view;
}

static PyObject *session_k(PyObject *self, void *unused) {
    (void)unused;
    return lend(self, &session_of(self)->it->k);
}

static PyObject *session_v(PyObject *self, void *unused) {
    (void)unused;
    return lend(self, &session_of(self)->it->v);
}

/* ---- what is known of a session */
static PyObject *text_or_none(const char *from) {
    return from[0] == '\0' ? kvfp_none() : PyUnicode_DecodeUTF8(from, (Py_ssize_t)strlen(from), "replace");
}

static PyObject *shape_of(const kvf_tensor *tensor) {
    if (tensor->num_dims == 0) {
        return kvfp_none();
    }
    PyObject *shape = PyTuple_New((Py_ssize_t)tensor->num_dims);
    for (uint32_t i = 0; shape != NULL && i < tensor->num_dims; i++) {
        PyObject *dim = PyLong_FromUnsignedLongLong(tensor->dims[i]);
        if (dim == NULL) {
            Py_CLEAR(shape);
        } else {
            PyTuple_SetItem(shape, (Py_ssize_t)i, dim);
        }
    }
    return shape;
}

static PyObject *space_of(const kvf_session *session) {
    static const kvf_digest none;
    if (memcmp(&session->space, &none, sizeof none) == 0) {
        return kvfp_none();
    }
    return PyBytes_FromStringAndSize((const char *)session->space.bytes, sizeof session->space.bytes);
}

static PyObject *ttl_of(const kvf_session *session) {
    if (session->ttl_ms < -1) {
        return kvfp_none();
    }
    return PyFloat_FromDouble(session->ttl_ms == -1 ? Py_HUGE_VAL : (double)session->ttl_ms / 1000);
}

static PyObject *info_of(const kvf_session *s) {
    return KVFP_VALUE(kvfp_SessionInfo, PyLong_FromSize_t(s->k.len), text_or_none(s->k.dtype), shape_of(&s->k),
                      PyLong_FromSize_t(s->v.len), text_or_none(s->v.dtype), shape_of(&s->v),
                      PyLong_FromUnsignedLong(s->num_tokens), text_or_none(s->layout), space_of(s),
                      PyBool_FromLong(s->has_meta), ttl_of(s));
}

static PyObject *session_info(PyObject *self, void *unused) {
    (void)unused;
    return info_of(session_of(self)->it);
}

static PyGetSetDef session_properties[] = {
    {"k", session_k, NULL, "A memoryview of bytes over the library's memory; None after a load with into=.", NULL},
    {"v", session_v, NULL, "A memoryview of bytes over the library's memory; None after a load with into=.", NULL},
    {"info", session_info, NULL, "A SessionInfo.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot session_slots[] = {
    {Py_tp_doc, KVFP_MANUAL_Session},
    {Py_tp_dealloc, session_dealloc},
    {Py_tp_getset, session_properties},
    {0, NULL},
};
static PyType_Spec session_spec = {"kvferry.Session", sizeof(session_object), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, session_slots};
static PyType_Slot array_slots[] = {
    {Py_tp_doc, "One array of a Session, for memoryviews."},
    {Py_tp_dealloc, array_dealloc},
    {Py_bf_getbuffer, array_lend},
    {0, NULL},
};
static PyType_Spec array_spec = {"kvferry._kvferry._Array", sizeof(array_object), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, array_slots};

bool kvfp_session_init(PyObject *module) {
    kvfp_SessionType = kvfp_add_type(module, &session_spec);
    kvfp_ArrayType = (PyTypeObject *)(void *)PyType_FromModuleAndSpec(module, &array_spec, NULL);
    return kvfp_SessionType != NULL && kvfp_ArrayType != NULL;
}

/* ---- save */
static bool take_dtype(kvf_tensor *out, PyObject *from) {
    if (from == Py_None) {
        return true;
    }
    const char *name = PyUnicode_Check(from) ? PyUnicode_AsUTF8AndSize(from, NULL) : NULL;
    if (name == NULL) {
        if (PyErr_Occurred() == NULL) {
            PyErr_SetString(PyExc_TypeError, "dtype: a str, such as \"float16\"");
        }
        return false;
    }
    if (strlen(name) >= sizeof out->dtype) {
        kvfp_limit("dtype: at most %zu characters, not \"%.40s\"", sizeof out->dtype - 1, name);
        return false;
    }
    memcpy(out->dtype, name, strlen(name) + 1);
    return true;
}

static bool take_shape(kvf_tensor *out, PyObject *from) {
    if (from == Py_None) {
        return true;
    }
    PyObject *dims = kvfp_take_items(from, "shape", "a sequence of ints");
    if (dims == NULL) {
        return false;
    }
    Py_ssize_t num = PyTuple_Size(dims);
    bool taken = num <= (Py_ssize_t)KVF_MAX_DIMS;
    if (!taken) {
        kvfp_limit("shape: at most %u dimensions, not %zd", KVF_MAX_DIMS, num);
    }
    for (Py_ssize_t i = 0; taken && i < num; i++) {
        size_t dim = 0;
        taken = kvfp_take_count(&dim, PyTuple_GetItem(dims, i), "shape", 0, SIZE_MAX);
        out->dims[i] = dim;
    }
    out->num_dims = taken ? (uint32_t)num : 0;
    Py_DECREF(dims);
    return taken;
}

static bool take_array(kvf_tensor *out, kvfp_parts *parts, PyObject *from, const char *name) {
    if (!kvfp_parts_add_all(parts, from, name, false)) {
        return false;
    }
    if (parts->num > UINT32_MAX) {
        kvfp_limit("%s: too many pieces", name);
        return false;
    }
    static struct iovec none;
    out->len = parts->bytes;
    out->iov = parts->num == 0 ? &none : parts->iov;
    out->num_iov = (uint32_t)parts->num;
    return true;
}

typedef struct save {
    const char *id, *layout;
    PyObject *k, *v, *dtype, *shape, *v_dtype, *v_shape, *ttl, *num_tokens, *space, *owner;
    kvf_session_options options;
    kvf_digest digest;
    kvf_tensor tensors[2];
    kvfp_parts parts[2];
} save;

static bool take_options(save *s) {
    size_t ttl = 0, num_tokens = 0;
    if ((s->ttl != Py_None && !kvfp_take_count(&ttl, s->ttl, "ttl (in seconds)", 1, UINT32_MAX)) ||
        (s->num_tokens != NULL && !kvfp_take_count(&num_tokens, s->num_tokens, "num_tokens", 0, UINT32_MAX)) ||
        (s->space != Py_None && !kvfp_take_32(s->digest.bytes, s->space, "space"))) {
        return false;
    }
    s->options.ttl_s = (uint32_t)ttl;
    s->options.num_tokens = (uint32_t)num_tokens;
    s->options.layout = s->layout;
    s->options.space = s->space == Py_None ? NULL : &s->digest;
    return true;
}

static bool take_arrays(save *s) {
    PyObject *v_dtype = s->v_dtype == Py_None ? s->dtype : s->v_dtype;
    PyObject *v_shape = s->v_shape == Py_None ? s->shape : s->v_shape;
    return take_dtype(&s->tensors[0], s->dtype) && take_shape(&s->tensors[0], s->shape) &&
           take_dtype(&s->tensors[1], v_dtype) && take_shape(&s->tensors[1], v_shape) &&
           take_array(&s->tensors[0], &s->parts[0], s->k, "k, piece") &&
           take_array(&s->tensors[1], &s->parts[1], s->v, "v, piece");
}

static bool write_session(PyObject *self, const save *s) {
    kvf_error err = {0};
    kvf_status status = KVF_OK;
    kvfp_wait wait;
    kvfp_handle *store = kvfp_enter_object(self, kvfp_StoreType, "Store");
    if (store == NULL) {
        return false;
    }
    kvfp_wait_begin(&wait);
    status = kvf_session_save(store->it, &err, s->id, &s->tensors[0], &s->tensors[1], &s->options);
    bool ended = kvfp_wait_end(&wait);
    kvfp_leave(store);
    kvfp_log_tell();
    return ended && (status == KVF_OK || kvfp_raise(status, &err, "the session can't be saved") != NULL);
}

PyObject *kvfp_session_save(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"id",  "k",          "v",      "dtype", "shape",   "v_dtype", "v_shape",
                            "ttl", "num_tokens", "layout", "space", "timeout", "owner",   NULL};
    save s = {.dtype = Py_None,
              .shape = Py_None,
              .v_dtype = Py_None,
              .v_shape = Py_None,
              .ttl = Py_None,
              .space = Py_None,
              .options = {.struct_size = sizeof s.options}};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sOO|$OOOOOOzOO&O:session_save", names, &s.id, &s.k, &s.v, &s.dtype,
                                     &s.shape, &s.v_dtype, &s.v_shape, &s.ttl, &s.num_tokens, &s.layout, &s.space,
                                     kvfp_timeout, &s.options.budget_us, &s.owner)) {
        return NULL;
    }
    bool saved = take_options(&s) && take_arrays(&s) && write_session(self, &s);
    kvfp_parts_cleanup(&s.parts[0]);
    kvfp_parts_cleanup(&s.parts[1]);
    return saved ? kvfp_none() : NULL;
}

/* ---- load */
/* Returns KVF_OK, KVF_MISS, or -1 after an exception. */
static int read_session(PyObject *self, kvf_session **out, const char *id, const kvf_session_load_options *options) {
    kvf_error err = {0};
    kvf_status status = KVF_OK;
    kvfp_wait wait;
    kvfp_handle *store = kvfp_enter_object(self, kvfp_StoreType, "Store");
    if (store == NULL) {
        return -1;
    }
    kvfp_wait_begin(&wait);
    status = kvf_session_load_with(store->it, out, &err, id, options);
    bool ended = kvfp_wait_end(&wait);
    kvfp_leave(store);
    kvfp_log_tell();
    if (!ended) {
        kvf_session_free(status == KVF_OK ? *out : NULL);
        return -1;
    }
    if (status != KVF_OK && status != KVF_MISS) {
        kvfp_raise(status, &err, "the session can't be loaded");
        return -1;
    }
    return (int)status;
}

static PyObject *session_value(kvf_session *it, bool is_lent) {
    PyObject *session = PyType_GenericAlloc(kvfp_SessionType, 0);
    if (session == NULL) {
        kvf_session_free(it);
        return NULL;
    }
    session_of(session)->it = it;
    session_of(session)->is_lent = is_lent;
    return session;
}

static PyObject *load_session(PyObject *self, const char *id, const kvf_session_load_options *options) {
    kvf_session *it = NULL;
    int status = read_session(self, &it, id, options);
    if (status != KVF_OK) {
        return status == KVF_MISS ? kvfp_none() : NULL;
    }
    return session_value(it, options->k_iov != NULL);
}

static bool take_into(kvf_session_load_options *options, kvfp_parts parts[2], PyObject *into) {
    PyObject *k = NULL, *v = NULL;
    if (!PyTuple_Check(into) || !PyArg_ParseTuple(into, "OO", &k, &v)) {
        PyErr_SetString(PyExc_TypeError, "into: a tuple of the memory for k and the memory for v");
        return false;
    }
    if (!kvfp_parts_add_all(&parts[0], k, "into, k, piece", true) ||
        !kvfp_parts_add_all(&parts[1], v, "into, v, piece", true)) {
        return false;
    }
    if (parts[0].num == 0 || parts[1].num == 0 || parts[0].num > UINT32_MAX || parts[1].num > UINT32_MAX) {
        kvfp_limit("into: at least one piece of memory for k, and one for v");
        return false;
    }
    options->k_iov = parts[0].iov;
    options->v_iov = parts[1].iov;
    options->num_k_iov = (uint32_t)parts[0].num;
    options->num_v_iov = (uint32_t)parts[1].num;
    return true;
}

PyObject *kvfp_session_load(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"id", "into", "raw", "timeout", "owner", NULL};
    const char *id = NULL;
    PyObject *into = Py_None, *owner = NULL, *session = NULL;
    int raw = 0;
    kvf_session_load_options options = {.struct_size = sizeof options};
    kvfp_parts parts[2] = {{0}, {0}};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s|$OpO&O:session_load", names, &id, &into, &raw, kvfp_timeout,
                                     &options.budget_us, &owner)) {
        return NULL;
    }
    options.flags = raw ? KVF_SESSION_RAW : 0;
    if (into == Py_None || take_into(&options, parts, into)) {
        session = load_session(self, id, &options);
    }
    kvfp_parts_cleanup(&parts[0]);
    kvfp_parts_cleanup(&parts[1]);
    return session;
}

PyObject *kvfp_session_look(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"id", "raw", "timeout", NULL};
    const char *id = NULL;
    int raw = 0;
    kvf_session *it = NULL;
    kvf_session_load_options options = {.struct_size = sizeof options};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s|$pO&:session_look", names, &id, &raw, kvfp_timeout,
                                     &options.budget_us)) {
        return NULL;
    }
    options.flags = KVF_SESSION_LOOK | (raw ? KVF_SESSION_RAW : 0);
    int status = read_session(self, &it, id, &options);
    if (status != KVF_OK) {
        return status == KVF_MISS ? kvfp_none() : NULL;
    }
    PyObject *info = info_of(it);
    kvf_session_free(it);
    return info;
}

PyObject *kvfp_session_remove(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"id", NULL};
    const char *id = NULL;
    kvf_error err = {0};
    kvf_status status = KVF_OK;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s:session_remove", names, &id)) {
        return NULL;
    }
    kvfp_wait wait;
    kvfp_handle *store = kvfp_enter_object(self, kvfp_StoreType, "Store");
    if (store == NULL) {
        return NULL;
    }
    kvfp_wait_begin(&wait);
    status = kvf_session_remove(store->it, &err, id);
    bool ended = kvfp_wait_end(&wait);
    kvfp_leave(store);
    kvfp_log_tell();
    if (!ended) {
        return NULL;
    }
    if (status != KVF_OK && status != KVF_MISS) {
        return kvfp_raise(status, &err, "the session can't be removed");
    }
    return PyBool_FromLong(status == KVF_OK);
}
