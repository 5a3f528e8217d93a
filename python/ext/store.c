/* SPDX-License-Identifier: Apache-2.0
 *
 * Store: opening, closing, flush and counters.
 */
#include <string.h>

#include "ext.h"
#include "manual.h"

PyTypeObject *kvfp_StoreType;

static void close_store(void *it) {
    kvf_store_close(it);
}

static const kvfp_kind store_kind = {"Store", sizeof(kvfp_handle), NULL, close_store, NULL};

static kvfp_handle *enter(PyObject *self) {
    return kvfp_enter_object(self, kvfp_StoreType, "Store");
}

/* ---- opening */
static PyObject *urls_tuple(PyObject *from) {
    return PyUnicode_Check(from) || PyObject_CheckBuffer(from)
               ? PyTuple_Pack(1, from)
               : kvfp_take_items(from, "urls", "a str or a sequence of str");
}

/* The texts belong to the items of the tuple. */
static const char **url_texts(PyObject *urls) {
    Py_ssize_t num = PyTuple_Size(urls);
    const char **texts = PyMem_Calloc((size_t)num + 1, sizeof *texts);
    if (texts == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < num; i++) {
        PyObject *url = PyTuple_GetItem(urls, i);
        if (!PyUnicode_Check(url)) {
            PyErr_Format(PyExc_TypeError, "urls: a str for each tier, not %R", (PyObject *)Py_TYPE(url));
        } else {
            texts[i] = PyUnicode_AsUTF8AndSize(url, NULL);
        }
        if (texts[i] == NULL) {
            PyMem_Free(texts);
            return NULL;
        }
    }
    return texts;
}

static PyObject *open_store(PyTypeObject *type, PyObject *from, const kvf_options *options) {
    PyObject *urls = urls_tuple(from);
    const char **texts = urls == NULL ? NULL : url_texts(urls);
    if (texts == NULL) {
        Py_XDECREF(urls);
        return NULL;
    }
    kvf_store *store = NULL;
    kvf_error err = {0};
    kvf_status status = KVF_OK;
    size_t num = (size_t)PyTuple_Size(urls);
    kvfp_wait wait;
    kvfp_wait_begin(&wait);
    status = kvf_store_open(&store, &err, texts, num, options);
    bool ended = kvfp_wait_end(&wait);
    PyMem_Free(texts);
    Py_DECREF(urls);
    kvfp_log_tell();
    if (!ended) {
        if (status == KVF_OK) {
            kvf_store_close(store); /* it has nothing to write */
        }
        return NULL;
    }
    if (status != KVF_OK) {
        return kvfp_raise(status, &err, "the store can't be opened");
    }
    kvfp_handle *handle = kvfp_handle_new(&store_kind, store, NULL, NULL);
    return handle == NULL ? NULL : kvfp_object_new(type, handle, NULL);
}

static bool take_sizes(kvf_options *options, PyObject *backlog, PyObject *load, PyObject *store) {
    size_t load_threads = 0, store_threads = 0;
    if ((backlog != NULL && !kvfp_take_count(&options->backlog_bytes, backlog, "backlog_bytes", 0, SIZE_MAX)) ||
        (load != NULL && !kvfp_take_count(&load_threads, load, "load_threads", 0, UINT32_MAX)) ||
        (store != NULL && !kvfp_take_count(&store_threads, store, "store_threads", 0, UINT32_MAX))) {
        return false;
    }
    options->load_threads = (uint32_t)load_threads;
    options->store_threads = (uint32_t)store_threads;
    return true;
}

static PyObject *store_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"urls",  "secret",        "previous_secret", "secret_files",  "seal_sessions",
                            "drain", "backlog_bytes", "load_threads",    "store_threads", NULL};
    PyObject *urls = NULL, *backlog = NULL, *load = NULL, *store = NULL, *opened = NULL;
    Py_buffer secret = {0}, previous = {0};
    kvf_options options = {.struct_size = sizeof options};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$O&O&zpO&OOO:Store", names, &urls, kvfp_secret, &secret,
                                     kvfp_secret, &previous, &options.secret_files, &options.seal_sessions,
                                     kvfp_timeout, &options.drain_us, &backlog, &load, &store)) {
        return NULL;
    }
    if (take_sizes(&options, backlog, load, store)) {
        options.secret = secret.buf;
        options.secret_len = (size_t)secret.len;
        options.previous_secret = previous.buf;
        options.previous_secret_len = (size_t)previous.len;
        opened = open_store(type, urls, &options);
    }
    PyBuffer_Release(&secret);
    PyBuffer_Release(&previous);
    return opened;
}

/* ---- flush, stats */
static PyObject *store_flush(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"timeout", NULL};
    int64_t budget_us = KVF_DEFAULT;
    uint64_t unwritten = 0;
    kvf_status status = KVF_OK;
    kvfp_wait wait;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O&:flush", names, kvfp_timeout, &budget_us)) {
        return NULL;
    }
    kvfp_handle *store = enter(self);
    if (store == NULL) {
        return NULL;
    }
    kvfp_wait_begin(&wait);
    status = kvf_store_flush(store->it, &unwritten, budget_us);
    bool ended = kvfp_wait_end(&wait);
    kvfp_leave(store);
    kvfp_log_tell();
    if (!ended) {
        return NULL;
    }
    if (status != KVF_OK && status != KVF_MISS && status != KVF_AGAIN) {
        return kvfp_raise(status, NULL, "the store can't be flushed");
    }
    return KVFP_VALUE(kvfp_Flushed, PyBool_FromLong(status != KVF_AGAIN), PyLong_FromUnsignedLongLong(unwritten));
}

static bool set_item(PyObject *dict, const char *name, PyObject *value) {
    bool set = value != NULL && PyDict_SetItemString(dict, name, value) == 0;
    Py_XDECREF(value);
    return set;
}

static PyObject *by_reason(const uint64_t counts[KVF_REASON_ROOM]) {
    PyObject *dict = PyDict_New();
    for (int i = 0; dict != NULL && i < KVF_NUM_REASONS; i++) {
        if (counts[i] > 0 && !set_item(dict, kvf_reason_name((kvf_reason)i), PyLong_FromUnsignedLongLong(counts[i]))) {
            Py_CLEAR(dict);
        }
    }
    return dict;
}

static PyObject *stats_dict(const kvf_stats *s) {
    const struct {
        const char *name;
        uint64_t count;
    } counts[] = {
        {"num_tiers", s->num_tiers},
        {"lookups", s->lookups},
        {"lookup_hits", s->lookup_hits},
        {"lookup_round_trips", s->lookup_round_trips},
        {"loads", s->loads},
        {"load_hits", s->load_hits},
        {"loaded_bytes", s->loaded_bytes},
        {"saves", s->saves},
        {"saved", s->saved},
        {"known", s->known},
        {"saved_bytes", s->saved_bytes},
        {"promoted", s->promoted},
        {"connects", s->connects},
        {"disconnects", s->disconnects},
        {"backlog_bytes", s->backlog_bytes},
        {"backlog_peak_bytes", s->backlog_peak_bytes},
    };
    PyObject *dict = PyDict_New();
    bool whole = dict != NULL;
    for (size_t i = 0; whole && i < sizeof counts / sizeof *counts; i++) {
        whole = set_item(dict, counts[i].name, PyLong_FromUnsignedLongLong(counts[i].count));
    }
    if (!whole || !set_item(dict, "misses", by_reason(s->misses)) ||
        !set_item(dict, "save_failures", by_reason(s->save_failures))) {
        Py_CLEAR(dict);
    }
    return dict;
}

static bool read_stats(PyObject *self, kvf_stats *out) {
    kvfp_handle *store = enter(self);
    if (store == NULL) {
        return false;
    }
    kvf_status status = kvf_store_stats(store->it, out);
    kvfp_leave(store);
    return status == KVF_OK || kvfp_raise(status, NULL, "the store has no counters") != NULL;
}

static PyObject *store_stats(PyObject *self, PyObject *unused) {
    (void)unused;
    kvf_stats stats = {.struct_size = sizeof stats};
    PyObject *dict = read_stats(self, &stats) ? stats_dict(&stats) : NULL;
    kvfp_log_tell();
    return dict;
}

static PyObject *store_num_tiers(PyObject *self, void *unused) {
    (void)unused;
    kvf_stats stats = {.struct_size = sizeof stats};
    return read_stats(self, &stats) ? PyLong_FromUnsignedLong(stats.num_tiers) : NULL;
}

static PyMethodDef methods[] = {
    KVFP_COMMON_METHODS,
    {"flush", KVFP_KEYWORDS(store_flush), "flush($self, /, timeout=None)\n--\n\n" KVFP_MANUAL_Store_flush},
    {"stats", store_stats, METH_NOARGS, "stats($self, /)\n--\n\n" KVFP_MANUAL_Store_stats},
    {"walk", KVFP_KEYWORDS(kvfp_store_walk),
     "walk($self, /, *, whole=False, space=None, key=None, timeout=None)\n--\n\n" KVFP_MANUAL_Store_walk},
    {"describe", KVFP_KEYWORDS(kvfp_store_describe), "describe($self, /, space)\n--\n\n" KVFP_MANUAL_Store_describe},
    {"clear", KVFP_KEYWORDS(kvfp_store_clear), "clear($self, /, space=None)\n--\n\n" KVFP_MANUAL_Store_clear},
    {"remove", KVFP_KEYWORDS(kvfp_store_remove), "remove($self, /, space, key)\n--\n\n" KVFP_MANUAL_Store_remove},
    {"doctor", kvfp_store_doctor, METH_NOARGS, "doctor($self, /)\n--\n\n" KVFP_MANUAL_Store_doctor},
    {"link", KVFP_KEYWORDS(kvfp_store_link), "link($self, /, tier=0)\n--\n\n" KVFP_MANUAL_Store_link},
    {"tiers", kvfp_store_tiers, METH_NOARGS, "tiers($self, /)\n--\n\n" KVFP_MANUAL_Store_tiers},
    {"session_save", KVFP_KEYWORDS(kvfp_session_save),
     "session_save($self, /, id, k, v, *, dtype=None, shape=None, v_dtype=None, v_shape=None, ttl=None, "
     "num_tokens=0, layout=None, space=None, timeout=None, owner=None)\n--\n\n" KVFP_MANUAL_Store_session_save},
    {"session_load", KVFP_KEYWORDS(kvfp_session_load),
     "session_load($self, /, id, *, into=None, raw=False, timeout=None, owner=None)\n--\n\n" KVFP_MANUAL_Store_session_load},
    {"session_look", KVFP_KEYWORDS(kvfp_session_look),
     "session_look($self, /, id, *, raw=False, timeout=None)\n--\n\n" KVFP_MANUAL_Store_session_look},
    {"session_remove", KVFP_KEYWORDS(kvfp_session_remove),
     "session_remove($self, /, id)\n--\n\n" KVFP_MANUAL_Store_session_remove},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef properties[] = {
    {"closed", kvfp_object_closed, NULL, "Whether it was closed, or belongs to the parent of this process.", NULL},
    {"num_tiers", store_num_tiers, NULL, "The number of tiers.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_doc, "Store(urls, *, secret=None, previous_secret=None, secret_files=None, seal_sessions=False, drain=None, "
                "backlog_bytes=0, load_threads=0, store_threads=0)\n--\n\n" KVFP_MANUAL_Store},
    {Py_tp_new, store_new},
    KVFP_COMMON_SLOTS,
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, NULL},
};
static PyType_Spec spec = {"kvferry.Store", sizeof(kvfp_object), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

bool kvfp_store_init(PyObject *module) {
    kvfp_StoreType = kvfp_add_type(module, &spec);
    return kvfp_StoreType != NULL;
}
