/* SPDX-License-Identifier: Apache-2.0
 *
 * What the Python objects of one handle have in common: life, close, with.
 */
#include "ext.h"

static kvfp_object *object_of(PyObject *self) {
    return (kvfp_object *)(void *)self;
}

PyTypeObject *kvfp_add_type(PyObject *module, PyType_Spec *spec) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type == NULL || PyModule_AddType(module, (PyTypeObject *)(void *)type) != 0) {
        Py_XDECREF(type);
        return NULL;
    }
    return (PyTypeObject *)(void *)type;
}

PyObject *kvfp_object_new(PyTypeObject *type, kvfp_handle *handle, PyObject *of) {
    kvfp_object *self = object_of(PyType_GenericAlloc(type, 0));
    if (self == NULL) {
        kvfp_abandon(handle);
        return NULL;
    }
    self->handle = handle;
    Py_XINCREF(of);
    self->of = of;
    return (PyObject *)(void *)self;
}

/* An exception may be set while an object goes. Freeing a batch runs code of its buffers, which must not see it. */
void kvfp_object_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    kvfp_object *object = object_of(self);
    PyObject *kind = NULL, *value = NULL, *trace = NULL;
    PyObject_GC_UnTrack(self);
    PyErr_Fetch(&kind, &value, &trace);
    kvfp_abandon(object->handle);
    object->handle = NULL;
    Py_CLEAR(object->of);
    PyErr_Restore(kind, value, trace);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

/* What a handle keeps is seen as long as nobody but this object uses the handle: a call or a batch needs it. */
int kvfp_object_traverse(PyObject *self, visitproc visit, void *arg) {
    kvfp_object *object = object_of(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(object->of);
    if (object->handle != NULL && object->handle->uses == 0) {
        Py_VISIT(object->handle->keeps);
    }
    return 0;
}

int kvfp_object_clear(PyObject *self) {
    kvfp_object *object = object_of(self);
    kvfp_close(object->handle);
    Py_CLEAR(object->of);
    return 0;
}

PyObject *kvfp_object_close(PyObject *self, PyObject *unused) {
    (void)unused;
    kvfp_close(object_of(self)->handle);
    kvfp_log_tell();
    Py_RETURN_NONE;
}

PyObject *kvfp_object_enter(PyObject *self, PyObject *unused) {
    (void)unused;
    const char *name = "object";
    kvfp_handle *handle = object_of(self)->handle;
    if (handle != NULL) {
        name = handle->kind->name;
    }
    if (!kvfp_enter(handle, name)) {
        return NULL;
    }
    kvfp_leave(handle);
    Py_INCREF(self);
    return self;
}

PyObject *kvfp_object_exit(PyObject *self, PyObject *args) {
    (void)args;
    return kvfp_object_close(self, NULL);
}

PyObject *kvfp_object_closed(PyObject *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(kvfp_is_closed(object_of(self)->handle));
}

PyObject *kvfp_object_of(PyObject *self, void *unused) {
    (void)unused;
    PyObject *of = object_of(self)->of;
    if (of == NULL) {
        of = Py_None;
    }
    Py_INCREF(of);
    return of;
}

kvfp_handle *kvfp_enter_object(PyObject *object, PyTypeObject *type, const char *name) {
    if (!PyObject_TypeCheck(object, type)) {
        PyErr_Format(PyExc_TypeError, "a %s is needed here, not %R", name, (PyObject *)Py_TYPE(object));
        return NULL;
    }
    kvfp_handle *handle = object_of(object)->handle;
    return kvfp_enter(handle, name) ? handle : NULL;
}
