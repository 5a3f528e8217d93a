/* SPDX-License-Identifier: Apache-2.0
 *
 * Administration of a Store: walk, describe, clear, remove, doctor, tiers.
 */
#include <math.h>
#include <string.h>

#include "ext.h"

static kvfp_handle *enter(PyObject *self) {
    return kvfp_enter_object(self, kvfp_StoreType, "Store");
}

/* Takes a digest or None. *out is NULL for None, or `room`. */
static bool take_space(const kvf_digest **out, kvf_digest *room, PyObject *from) {
    *out = from == Py_None ? NULL : room;
    return from == Py_None || kvfp_take_32(room->bytes, from, "space");
}

static PyObject *text(const char *from) {
    return PyUnicode_DecodeUTF8(from, (Py_ssize_t)strlen(from), "surrogateescape");
}

static PyObject *bytes_32(const uint8_t from[32]) {
    return PyBytes_FromStringAndSize((const char *)from, 32);
}

/* ---- walk */
typedef struct walk {
    kvfp_wait wait;    /* of the caller; the library calls back on its thread, without the GIL */
    PyObject *entries; /* a list */
    bool payload;
} walk;

static PyObject *kind_of(kvf_entry_kind kind) {
    static const char *const names[] = {"block", "card", "session", "foreign"};
    return PyUnicode_FromString(names[kind]);
}

static PyObject *seal_of(kvf_seal seal) {
    static const char *const names[] = {"none", "closed", "opened"};
    return PyUnicode_FromString(names[seal]);
}

static PyObject *ttl_of(int64_t ttl_ms) {
    return ttl_ms == -2 ? kvfp_none() : PyFloat_FromDouble(ttl_ms < 0 ? INFINITY : (double)ttl_ms / 1e3);
}

static PyObject *payload_of(const kvf_entry *entry) {
    if (entry->payload == NULL) {
        return kvfp_none();
    }
    return PyBytes_FromStringAndSize(entry->payload, (Py_ssize_t)entry->payload_bytes);
}

static PyObject *tokens_of(const kvf_entry *entry) {
    if (entry->tokens == NULL) {
        return kvfp_none();
    }
    PyObject *tokens = PyTuple_New((Py_ssize_t)entry->num_tokens);
    for (uint32_t i = 0; tokens != NULL && i < entry->num_tokens; i++) {
        PyObject *token = PyLong_FromUnsignedLong(entry->tokens[i]);
        if (token == NULL) {
            Py_CLEAR(tokens);
        } else {
            PyTuple_SetItem(tokens, (Py_ssize_t)i, token);
        }
    }
    return tokens;
}

static PyObject *entry_value(const kvf_entry *e, bool payload) {
    return KVFP_VALUE(kvfp_Entry, kind_of(e->kind), PyLong_FromUnsignedLong(e->tier), text(e->name),
                      bytes_32(e->space.bytes), bytes_32(e->key.bytes), PyLong_FromUnsignedLongLong(e->stored_bytes),
                      PyLong_FromUnsignedLongLong(e->payload_bytes), PyLong_FromUnsignedLong(e->first_token),
                      PyLong_FromUnsignedLong(e->num_tokens), PyFloat_FromDouble((double)e->stored_s),
                      ttl_of(e->ttl_ms), kvfp_reason(e->damage), seal_of(e->seal),
                      payload ? payload_of(e) : kvfp_none(), payload ? tokens_of(e) : kvfp_none());
}

static int add_entry(const walk *w, const kvf_entry *entry) {
    PyObject *value = entry_value(entry, w->payload);
    int added = value == NULL ? -1 : PyList_Append(w->entries, value);
    Py_XDECREF(value);
    return added;
}

/* A signal, such as Ctrl-C, ends the walk. */
static int visit(void *ctx, const kvf_entry *entry) {
    walk *w = ctx;
    PyEval_RestoreThread(w->wait.thread);
    int failed = PyErr_Occurred() != NULL || add_entry(w, entry) != 0 || PyErr_CheckSignals() != 0;
    w->wait.thread = PyEval_SaveThread();
    return failed;
}

static bool walk_store(PyObject *self, walk *w, const kvf_walk_options *options) {
    kvfp_handle *store = enter(self);
    if (store == NULL) {
        return false;
    }
    kvf_error err = {0};
    kvfp_wait_begin(&w->wait);
    kvf_status status = kvf_walk(store->it, &err, visit, w, options);
    bool ended = kvfp_wait_end(&w->wait);
    kvfp_leave(store);
    kvfp_log_tell();
    if (!ended) {
        return false;
    }
    return status == KVF_OK || kvfp_raise(status, &err, "the store can't be walked") != NULL;
}

PyObject *kvfp_store_walk(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"whole", "space", "key", "timeout", NULL};
    PyObject *space = Py_None, *key_from = Py_None, *entries = NULL;
    kvf_digest room;
    kvf_key key;
    kvf_walk_options options = {.struct_size = sizeof options};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$pOOO&:walk", names, &options.whole, &space, &key_from,
                                     kvfp_timeout, &options.budget_us) ||
        !take_space(&options.space, &room, space) ||
        (key_from != Py_None && !kvfp_take_32(key.bytes, key_from, "key"))) {
        return NULL;
    }
    options.key = key_from == Py_None ? NULL : &key;
    walk w = {.entries = PyList_New(0), .payload = options.key != NULL};
    if (w.entries != NULL && walk_store(self, &w, &options)) {
        entries = PyObject_GetIter(w.entries);
    }
    Py_XDECREF(w.entries);
    return entries;
}

/* ---- describe, clear, remove */
PyObject *kvfp_store_describe(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"space", NULL};
    PyObject *from = NULL;
    kvf_digest space;
    kvf_error err = {0};
    kvf_status status = KVF_OK;
    char *fields = NULL;
    kvfp_wait wait;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:describe", names, &from) ||
        !kvfp_take_32(space.bytes, from, "space")) {
        return NULL;
    }
    kvfp_handle *store = enter(self);
    if (store == NULL) {
        return NULL;
    }
    kvfp_wait_begin(&wait);
    status = kvf_space_describe(store->it, &fields, &err, &space);
    bool ended = kvfp_wait_end(&wait);
    kvfp_leave(store);
    kvfp_log_tell();
    if (!ended) {
        kvf_free(fields);
        return NULL;
    }
    if (status != KVF_OK) {
        return status == KVF_MISS ? kvfp_none() : kvfp_raise(status, &err, "the space can't be described");
    }
    PyObject *dict = kvfp_fields_dict(fields);
    kvf_free(fields);
    return dict;
}

PyObject *kvfp_store_clear(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"space", NULL};
    PyObject *from = Py_None;
    kvf_digest room;
    const kvf_digest *space = NULL;
    kvf_error err = {0};
    kvf_status status = KVF_OK;
    uint64_t removed = 0;
    kvfp_wait wait;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:clear", names, &from) || !take_space(&space, &room, from)) {
        return NULL;
    }
    kvfp_handle *store = enter(self);
    if (store == NULL) {
        return NULL;
    }
    kvfp_wait_begin(&wait);
    status = kvf_clear(store->it, &removed, &err, space);
    bool ended = kvfp_wait_end(&wait);
    kvfp_leave(store);
    kvfp_log_tell();
    if (!ended) {
        return NULL;
    }
    return status == KVF_OK ? PyLong_FromUnsignedLongLong(removed)
                            : kvfp_raise(status, &err, "the store can't be cleared");
}

PyObject *kvfp_store_remove(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"space", "key", NULL};
    PyObject *space_from = NULL, *key_from = NULL;
    kvf_digest space;
    kvf_key key;
    kvf_error err = {0};
    kvf_status status = KVF_OK;
    kvfp_wait wait;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:remove", names, &space_from, &key_from) ||
        !kvfp_take_32(space.bytes, space_from, "space") || !kvfp_take_32(key.bytes, key_from, "key")) {
        return NULL;
    }
    kvfp_handle *store = enter(self);
    if (store == NULL) {
        return NULL;
    }
    kvfp_wait_begin(&wait);
    status = kvf_remove(store->it, &err, &space, &key);
    bool ended = kvfp_wait_end(&wait);
    kvfp_leave(store);
    kvfp_log_tell();
    if (!ended) {
        return NULL;
    }
    if (status != KVF_OK && status != KVF_MISS) {
        return kvfp_raise(status, &err, "the record can't be removed");
    }
    return PyBool_FromLong(status == KVF_OK);
}

/* ---- doctor */
typedef struct doctor {
    kvfp_wait wait;
    PyObject *findings;
    bool failed;
} doctor;

static PyObject *severity_of(kvf_severity severity) {
    static const char *const names[] = {"fine", "note", "warning", "fatal"};
    return PyUnicode_FromString(names[severity]);
}

static void note(void *ctx, const kvf_finding *finding) {
    doctor *d = ctx;
    if (d->failed) {
        return;
    }
    PyEval_RestoreThread(d->wait.thread);
    if (PyErr_Occurred() != NULL) { /* Ctrl-C: the rest is not of interest */
        d->wait.thread = PyEval_SaveThread();
        return;
    }
    PyObject *value = KVFP_VALUE(kvfp_Finding, severity_of(finding->severity), PyLong_FromUnsignedLong(finding->tier),
                                 text(finding->code), text(finding->what), text(finding->mend));
    d->failed = value == NULL || PyList_Append(d->findings, value) != 0;
    Py_XDECREF(value);
    d->wait.thread = PyEval_SaveThread();
}

static bool examine(PyObject *self, doctor *d) {
    kvfp_handle *store = enter(self);
    if (store == NULL) {
        return false;
    }
    kvf_error err = {0};
    kvfp_wait_begin(&d->wait);
    kvf_status status = kvf_doctor(store->it, &err, note, d);
    bool ended = kvfp_wait_end(&d->wait);
    kvfp_leave(store);
    kvfp_log_tell();
    if (!ended) {
        return false;
    }
    return status == KVF_OK || kvfp_raise(status, &err, "the store can't be examined") != NULL;
}

PyObject *kvfp_store_doctor(PyObject *self, PyObject *unused) {
    (void)unused;
    doctor d = {.findings = PyList_New(0)};
    if (d.findings != NULL && !examine(self, &d)) {
        Py_CLEAR(d.findings);
    }
    return d.findings;
}

/* ---- tiers */
static PyObject *known(int64_t number) {
    return number < 0 ? kvfp_none() : PyLong_FromLongLong(number);
}

static PyObject *tier_value(const kvf_tier_info *t) {
    return KVFP_VALUE(kvfp_Tier, text(t->url), PyBool_FromLong(t->reachable), known(t->num_records),
                      known(t->used_bytes), known(t->max_bytes), PyLong_FromUnsignedLong(t->num_servers),
                      PyLong_FromUnsignedLong(t->num_open), PyLong_FromUnsignedLong(t->num_half_open),
                      PyLong_FromUnsignedLong(t->num_refusing));
}

static bool add_tier(PyObject *list, kvf_store *store, uint32_t tier) {
    kvf_tier_info info = {.struct_size = sizeof info};
    kvf_status status = KVF_OK;
    kvfp_wait wait;
    kvfp_wait_begin(&wait);
    status = kvf_tier_info_get(store, &info, tier);
    PyObject *value = NULL;
    if (kvfp_wait_end(&wait)) {
        value = status == KVF_OK ? tier_value(&info) : kvfp_raise(status, NULL, "the tier can't be described");
    }
    bool added = value != NULL && PyList_Append(list, value) == 0;
    Py_XDECREF(value);
    return added;
}

static PyObject *list_tiers(kvf_store *store) {
    kvf_stats stats = {.struct_size = sizeof stats};
    kvf_status status = kvf_store_stats(store, &stats);
    if (status != KVF_OK) {
        return kvfp_raise(status, NULL, "the tiers can't be counted");
    }
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list != NULL && i < stats.num_tiers; i++) {
        if (!add_tier(list, store, i)) {
            Py_CLEAR(list);
        }
    }
    return list;
}

PyObject *kvfp_store_tiers(PyObject *self, PyObject *unused) {
    (void)unused;
    kvfp_handle *store = enter(self);
    if (store == NULL) {
        return NULL;
    }
    PyObject *list = list_tiers(store->it);
    kvfp_leave(store);
    kvfp_log_tell();
    return list;
}
