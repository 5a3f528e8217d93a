/* SPDX-License-Identifier: Apache-2.0
 *
 * Pace: how fast an engine computes, and what to load or to compute (kvferry/plan.h).
 */
#include <math.h>

#include "ext.h"
#include "manual.h"

#define MAX_SECONDS (365.0 * 86400)

PyTypeObject *kvfp_PaceType;

typedef struct pace_object {
    PyObject_HEAD kvf_pace pace;
} pace_object;

static kvf_pace *pace_of(PyObject *self) {
    return &((pace_object *)(void *)self)->pace;
}

static PyObject *pace_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {NULL};
    return PyArg_ParseTupleAndKeywords(args, kwargs, ":Pace", names) ? PyType_GenericAlloc(type, 0) : NULL;
}

static void pace_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* ---- what was computed */
static PyObject *pace_note(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"num_tokens", "seconds", NULL};
    PyObject *num_tokens = NULL;
    double seconds = 0;
    size_t num = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Od:note", names, &num_tokens, &seconds) ||
        !kvfp_take_count(&num, num_tokens, "num_tokens", 0, UINT32_MAX)) {
        return NULL;
    }
    if (!(seconds >= 0 && seconds <= MAX_SECONDS)) {
        return kvfp_limit("seconds: a number from 0 to a year is needed");
    }
    kvf_pace_note(pace_of(self), num, (int64_t)ceil(seconds * 1e6));
    return kvfp_none();
}

static PyObject *pace_seconds(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"num_tokens", "batch_tokens", NULL};
    PyObject *num_tokens = NULL, *batch_tokens = NULL;
    size_t num = 0, batch = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:seconds", names, &num_tokens, &batch_tokens) ||
        !kvfp_take_count(&num, num_tokens, "num_tokens", 0, UINT32_MAX) ||
        !kvfp_take_count(&batch, batch_tokens, "batch_tokens", 1, UINT32_MAX)) {
        return NULL;
    }
    return PyFloat_FromDouble((double)kvf_pace_us(pace_of(self), num, batch) * 1e-6);
}

/* ---- the link */
PyObject *kvfp_store_link(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"tier", NULL};
    PyObject *which = NULL;
    size_t tier = 0;
    kvf_link link = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:link", names, &which) ||
        (which != NULL && !kvfp_take_count(&tier, which, "tier", 0, UINT32_MAX))) {
        return NULL;
    }
    kvfp_handle *store = kvfp_enter_object(self, kvfp_StoreType, "Store");
    if (store == NULL) {
        return NULL;
    }
    kvf_status status = kvf_store_link(store->it, (uint32_t)tier, &link);
    kvfp_leave(store);
    if (status != KVF_OK) {
        return kvfp_raise(status, NULL, "the link is not known");
    }
    return KVFP_VALUE(kvfp_Link, PyFloat_FromDouble(link.bytes_per_s),
                      PyFloat_FromDouble((double)link.round_trip_us * 1e-6), PyBool_FromLong(link.silent != 0));
}

static bool take_link(kvf_link *out, PyObject *from) {
    double round_trip = 0;
    int silent = 0;
    if (from == NULL || from == Py_None) {
        return true;
    }
    if (!PyTuple_Check(from)) {
        PyErr_Format(PyExc_TypeError, "link: a Link is needed, not %R", (PyObject *)Py_TYPE(from));
        return false;
    }
    if (!PyArg_ParseTuple(from, "ddp;link: a Link is needed", &out->bytes_per_s, &round_trip, &silent)) {
        return false;
    }
    if (!(out->bytes_per_s >= 0) || !(round_trip >= 0 && round_trip <= MAX_SECONDS)) {
        kvfp_limit("link: its rate and round trip are 0 or more, and a round trip is at most a year");
        return false;
    }
    out->round_trip_us = (int64_t)(round_trip * 1e6);
    out->silent = (uint64_t)silent;
    return true;
}

/* ---- the decision */
static PyObject *decide(const kvf_gap *gap, const kvf_pace *pace) {
    kvf_plan plan = {.struct_size = sizeof plan};
    kvf_error err = {0};
    kvf_status status = kvf_decide(&plan, &err, gap, pace);
    if (status != KVF_OK) {
        return kvfp_raise(status, &err, "there is no plan for this gap");
    }
    return KVFP_VALUE(
        kvfp_Plan, PyUnicode_FromString(kvf_plan_name(plan.kind)), PyLong_FromUnsignedLongLong(plan.num_compute),
        PyLong_FromUnsignedLongLong(plan.num_load), PyFloat_FromDouble((double)plan.load_us * 1e-6),
        PyFloat_FromDouble((double)plan.compute_us * 1e-6), PyFloat_FromDouble((double)plan.patience_us * 1e-6));
}

static PyObject *pace_decide(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"num_blocks", "block_bytes", "block_tokens", "batch_tokens", "link",           "whole",
                            "moving",     "impatient",   "here_bytes",   "other_bytes",  "instead_blocks", NULL};
    PyObject *num = NULL, *bytes = NULL, *tokens = NULL, *batch = NULL, *link = NULL, *here = NULL, *other = NULL,
             *instead = NULL;
    int whole = 0, moving = 0, impatient = 0;
    size_t counts[7] = {0};
    kvf_gap gap = {.struct_size = sizeof gap};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$OOOOpppOOO:decide", names, &num, &bytes, &tokens, &batch, &link,
                                     &whole, &moving, &impatient, &here, &other, &instead)) {
        return NULL;
    }
    const struct {
        PyObject *from;
        const char *name;
        size_t least;
        size_t most;
    } needed[] = {
        {num, "num_blocks", 0, KVF_MAX_BLOCKS},
        {bytes, "block_bytes", 0, INT64_MAX},
        {tokens, "block_tokens", 1, UINT32_MAX},
        {batch, "batch_tokens", 1, UINT32_MAX},
        {here, "here_bytes", 0, INT64_MAX},
        {other, "other_bytes", 0, INT64_MAX},
        {instead, "instead_blocks", 0, KVF_MAX_BLOCKS},
    };
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        if (needed[i].from == NULL && i < 4) {
            PyErr_Format(PyExc_TypeError, "decide() needs %s", needed[i].name);
            return NULL;
        }
        if (needed[i].from != NULL &&
            !kvfp_take_count(&counts[i], needed[i].from, needed[i].name, needed[i].least, needed[i].most)) {
            return NULL;
        }
    }
    if (!take_link(&gap.link, link)) {
        return NULL;
    }
    gap.flags = (whole ? KVF_GAP_WHOLE : 0u) | (moving ? KVF_GAP_MOVING : 0u) | (impatient ? KVF_GAP_IMPATIENT : 0u);
    gap.num_blocks = counts[0];
    gap.block_bytes = counts[1];
    gap.block_tokens = (uint32_t)counts[2];
    gap.batch_tokens = (uint32_t)counts[3];
    gap.here_bytes = counts[4];
    gap.other_bytes = counts[5];
    gap.instead_blocks = counts[6];
    return decide(&gap, pace_of(self));
}

/* ---- the type */
static PyMethodDef methods[] = {
    {"note", KVFP_KEYWORDS(pace_note), "note($self, /, num_tokens, seconds)\n--\n\n" KVFP_MANUAL_Pace_note},
    {"seconds", KVFP_KEYWORDS(pace_seconds),
     "seconds($self, /, num_tokens, batch_tokens)\n--\n\n" KVFP_MANUAL_Pace_seconds},
    {"decide", KVFP_KEYWORDS(pace_decide),
     "decide($self, /, num_blocks, *, block_bytes, block_tokens, batch_tokens, link=None, whole=False, moving=False, "
     "impatient=False, here_bytes=0, other_bytes=0, instead_blocks=0)\n--\n\n" KVFP_MANUAL_Pace_decide},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_doc, "Pace()\n--\n\n" KVFP_MANUAL_Pace},
    {Py_tp_new, pace_new},
    {Py_tp_dealloc, pace_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};
static PyType_Spec spec = {"kvferry.Pace", sizeof(pace_object), 0, Py_TPFLAGS_DEFAULT, slots};

bool kvfp_plan_init(PyObject *module) {
    kvfp_PaceType = kvfp_add_type(module, &spec);
    return kvfp_PaceType != NULL;
}
