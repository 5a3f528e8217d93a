/* SPDX-License-Identifier: Apache-2.0
 *
 * The exceptions, one for each status that is not a value.
 */
#include <stdarg.h>

#include "ext.h"

PyObject *kvfp_Error, *kvfp_ConfigError, *kvfp_RefusedError, *kvfp_LimitError, *kvfp_StoreError, *kvfp_ClosedError;

/* Makes and adds an exception; `status` is its class attribute. Takes over `bases`. */
static bool add(PyObject *module, PyObject **out, const char *name, kvf_status status, PyObject *bases,
                const char *doc) {
    char full[64];
    PyOS_snprintf(full, sizeof full, "kvferry.%s", name);
    PyObject *attributes = Py_BuildValue("{s:s}", "status", status == KVF_OK ? "" : kvf_status_name(status));
    if (bases != NULL && attributes != NULL) {
        *out = PyErr_NewExceptionWithDoc(full, doc, bases, attributes);
    }
    Py_XDECREF(bases);
    Py_XDECREF(attributes);
    return *out != NULL && PyModule_AddObjectRef(module, name, *out) == 0;
}

bool kvfp_errors_init(PyObject *module) {
    return add(module, &kvfp_Error, "Error", KVF_OK, PyTuple_Pack(1, PyExc_Exception),
               "Base of all exceptions of kvferry. The message says what is wrong and what to do about it.") &&
           add(module, &kvfp_ConfigError, "ConfigError", KVF_CONFIG, PyTuple_Pack(1, kvfp_Error),
               "A URL, credentials or server settings are wrong: the operator must change something.") &&
           add(module, &kvfp_RefusedError, "RefusedError", KVF_REFUSED, PyTuple_Pack(1, kvfp_Error),
               "This engine, model, layout or sealed record is not proven safe to reuse, or can't be read.") &&
           add(module, &kvfp_LimitError, "LimitError", KVF_LIMIT, PyTuple_Pack(2, kvfp_Error, PyExc_ValueError),
               "An argument is malformed, or larger than its documented bound.") &&
           add(module, &kvfp_StoreError, "StoreError", KVF_IO, PyTuple_Pack(2, kvfp_Error, PyExc_OSError),
               "The operating system or the server failed, in a call that cannot miss.") &&
           add(module, &kvfp_ClosedError, "ClosedError", KVF_CLOSED, PyTuple_Pack(1, kvfp_Error),
               "The object was closed, or belongs to the parent of this forked process.");
}

static PyObject *class_of(kvf_status status) {
    switch (status) {
    case KVF_CONFIG:
        return kvfp_ConfigError;
    case KVF_REFUSED:
        return kvfp_RefusedError;
    case KVF_LIMIT:
        return kvfp_LimitError;
    case KVF_IO:
        return kvfp_StoreError;
    case KVF_NOMEM:
        return PyExc_MemoryError;
    case KVF_CLOSED:
        return kvfp_ClosedError;
    case KVF_OK:
    case KVF_MISS:
    case KVF_AGAIN:
        break;
    }
    return kvfp_Error;
}

void *kvfp_raise(kvf_status status, const kvf_error *err, const char *otherwise) {
    PyErr_SetString(class_of(status), err != NULL && err->what[0] != '\0' ? err->what : otherwise);
    return NULL;
}

void *kvfp_limit(const char *format, ...) {
    va_list args;
    va_start(args, format);
    PyErr_FormatV(kvfp_LimitError, format, args);
    va_end(args);
    return NULL;
}
