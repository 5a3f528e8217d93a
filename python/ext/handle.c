/* SPDX-License-Identifier: Apache-2.0
 *
 * Handles: objects of the C library that several calls and Python objects use.
 */
#include <string.h>
#include <unistd.h>

#include "ext.h"

static void link_child(kvfp_handle *handle, kvfp_handle *parent) {
    handle->parent = parent;
    parent->uses++;
    handle->next = parent->first_child;
    if (handle->next != NULL) {
        handle->next->prev = handle;
    }
    parent->first_child = handle;
}

static void unlink_child(kvfp_handle *handle) {
    kvfp_handle *parent = handle->parent;
    if (handle->prev != NULL) {
        handle->prev->next = handle->next;
    } else if (parent->first_child == handle) {
        parent->first_child = handle->next;
    }
    if (handle->next != NULL) {
        handle->next->prev = handle->prev;
    }
    handle->prev = handle->next = NULL;
}

kvfp_handle *kvfp_handle_new(const kvfp_kind *kind, void *it, kvfp_handle *parent, PyObject *keeps) {
    kvfp_handle *handle = PyMem_Calloc(1, kind->size);
    if (handle == NULL) {
        Py_BEGIN_ALLOW_THREADS kind->close(it);
        Py_END_ALLOW_THREADS PyErr_NoMemory();
        return NULL;
    }
    handle->it = it;
    handle->kind = kind;
    handle->pid = getpid();
    Py_XINCREF(keeps);
    handle->keeps = keeps;
    if (parent != NULL) {
        link_child(handle, parent);
    }
    return handle;
}

bool kvfp_is_closed(const kvfp_handle *handle) {
    return handle == NULL || handle->closed || handle->pid != getpid();
}

bool kvfp_enter(kvfp_handle *handle, const char *name) {
    if (!kvfp_is_closed(handle)) {
        handle->uses++;
        return true;
    }
    if (handle == NULL || handle->closed) {
        PyErr_Format(kvfp_ClosedError, "this %s is closed", name);
    } else {
        PyErr_Format(kvfp_ClosedError,
                     "this %s belongs to the process that forked this one: open another one after the fork", name);
    }
    return false;
}

/* Frees the C object; the handle stays, since it counts as a use. */
static void free_object(kvfp_handle *handle) {
    void *it = handle->it;
    PyObject *keeps = handle->keeps;
    kvfp_handle *parent = handle->parent;
    handle->it = NULL;
    handle->keeps = NULL;
    handle->uses++;
    Py_BEGIN_ALLOW_THREADS handle->kind->close(it);
    Py_END_ALLOW_THREADS if (handle->kind->finish != NULL) {
        handle->kind->finish(handle);
    }
    Py_XDECREF(keeps);
    if (parent != NULL) {
        unlink_child(handle);
        handle->parent = NULL;
        kvfp_leave(parent);
    }
    handle->uses--;
}

/* Does what is due once nobody is inside. */
static void settle(kvfp_handle *handle) {
    if (handle->closed && handle->uses == 0 && handle->it != NULL) {
        free_object(handle);
    }
    if (handle->orphan && handle->uses == 0 && handle->it == NULL) {
        PyMem_Free(handle);
    }
}

void kvfp_leave(kvfp_handle *handle) {
    if (handle != NULL) {
        handle->uses--;
        settle(handle);
    }
}

/* A child that is being freed stays in the list until that is done, so each is closed once and then passed over. */
static kvfp_handle *open_child(const kvfp_handle *handle) {
    kvfp_handle *child = handle->first_child;
    while (child != NULL && child->closed) {
        child = child->next;
    }
    return child;
}

void kvfp_close(kvfp_handle *handle) {
    if (handle == NULL || handle->closed) {
        return;
    }
    handle->closed = true;
    handle->uses++;
    if (handle->kind->tell != NULL) {
        handle->kind->tell(handle);
    }
    for (kvfp_handle *child; (child = open_child(handle)) != NULL;) {
        kvfp_close(child);
    }
    kvfp_leave(handle);
}

void kvfp_abandon(kvfp_handle *handle) {
    if (handle != NULL) {
        handle->uses++;
        kvfp_close(handle);
        handle->orphan = true;
        kvfp_leave(handle);
    }
}
