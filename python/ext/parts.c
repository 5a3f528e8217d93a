/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of a caller in parts: buffers, which are held, and addresses.
 */
#include <stdio.h>

#include "ext.h"

/* Room for one more element of an array of `*cap`. */
static bool grow(void **array, size_t *cap, size_t num, size_t size) {
    if (num < *cap) {
        return true;
    }
    size_t more = *cap == 0 ? 8 : *cap * 2;
    void *grown = more > SIZE_MAX / size ? NULL : PyMem_Realloc(*array, more * size);
    if (grown == NULL) {
        PyErr_NoMemory();
        return false;
    }
    *array = grown;
    *cap = more;
    return true;
}

static bool add_iovec(kvfp_parts *parts, void *base, size_t len) {
    void *array = parts->iov;
    if (!grow(&array, &parts->cap, parts->num, sizeof *parts->iov)) {
        return false;
    }
    parts->iov = array;
    parts->iov[parts->num++] = (struct iovec){base, len};
    return true;
}

/* Many empty or huge parts must not overflow the sum; the library knows what a payload may have. */
static bool count_bytes(kvfp_parts *parts, size_t len, const char *what, Py_ssize_t index) {
    if (len > PTRDIFF_MAX || __builtin_add_overflow(parts->bytes, len, &parts->bytes)) {
        kvfp_limit("%s %zd: more bytes than there is memory", what, index);
        return false;
    }
    return true;
}

static bool address_of(void **out_base, size_t *out_len, PyObject *pair, const char *what, Py_ssize_t index) {
    size_t numbers[2];
    for (Py_ssize_t i = 0; i < 2; i++) {
        if (!kvfp_take_count(&numbers[i], PyTuple_GetItem(pair, i), i == 0 ? "address" : "nbytes", 0, SIZE_MAX)) {
            return false;
        }
    }
    if ((numbers[0] == 0 && numbers[1] > 0) || numbers[0] > SIZE_MAX - numbers[1]) {
        kvfp_limit("%s %zd: there is no memory at (%zu, %zu)", what, index, numbers[0], numbers[1]);
        return false;
    }
    *out_base = (void *)(uintptr_t)numbers[0];
    *out_len = numbers[1];
    return true;
}

static bool add_address(kvfp_parts *parts, PyObject *pair, const char *what, Py_ssize_t index) {
    void *base = NULL;
    size_t len = 0;
    return address_of(&base, &len, pair, what, index) && count_bytes(parts, len, what, index) &&
           add_iovec(parts, base, len);
}

static bool add_buffer(kvfp_parts *parts, PyObject *from, const char *what, Py_ssize_t index, bool writable) {
    if (!PyObject_CheckBuffer(from)) {
        PyErr_Format(PyExc_TypeError,
                     "%s %zd: memory is a buffer, a tuple (address, nbytes), or a list of these, not %R", what, index,
                     (PyObject *)Py_TYPE(from));
        return false;
    }
    void *array = parts->buffers;
    if (!grow(&array, &parts->cap_buffers, parts->num_buffers, sizeof *parts->buffers)) {
        return false;
    }
    parts->buffers = array;
    Py_buffer *buffer = &parts->buffers[parts->num_buffers];
    if (PyObject_GetBuffer(from, buffer, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
        char name[64];
        snprintf(name, sizeof name, "%s %zd", what, index);
        kvfp_name_buffer(from, name, writable);
        return false;
    }
    parts->num_buffers++;
    return count_bytes(parts, (size_t)buffer->len, what, index) && add_iovec(parts, buffer->buf, (size_t)buffer->len);
}

static bool is_address(PyObject *from) {
    return PyTuple_Check(from) && PyTuple_Size(from) == 2 && !PyObject_CheckBuffer(PyTuple_GetItem(from, 0));
}

static bool add_part(kvfp_parts *parts, PyObject *from, const char *what, Py_ssize_t index, bool writable) {
    return is_address(from) ? add_address(parts, from, what, index) : add_buffer(parts, from, what, index, writable);
}

/* The list may change while it is read: a part's own code may run. */
static bool add_list(kvfp_parts *parts, PyObject *list, const char *what, Py_ssize_t index, bool writable) {
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++) {
        PyObject *part = PyList_GetItem(list, i);
        Py_INCREF(part);
        bool added = add_part(parts, part, what, index, writable);
        Py_DECREF(part);
        if (!added) {
            return false;
        }
    }
    return true;
}

bool kvfp_parts_add(kvfp_parts *parts, PyObject *from, const char *what, Py_ssize_t index, bool writable) {
    return PyList_Check(from) ? add_list(parts, from, what, index, writable)
                              : add_part(parts, from, what, index, writable);
}

bool kvfp_parts_add_all(kvfp_parts *parts, PyObject *from, const char *what, bool writable) {
    if (PyObject_CheckBuffer(from) || is_address(from)) {
        return add_part(parts, from, what, 0, writable);
    }
    PyObject *items = kvfp_take_items(from, what, "memory, or a sequence of it,");
    if (items == NULL) {
        return false;
    }
    bool added = true;
    for (Py_ssize_t i = 0; added && i < PyTuple_Size(items); i++) {
        added = add_part(parts, PyTuple_GetItem(items, i), what, i, writable);
    }
    Py_DECREF(items);
    return added;
}

void kvfp_parts_cleanup(kvfp_parts *parts) {
    for (size_t i = 0; i < parts->num_buffers; i++) {
        PyBuffer_Release(&parts->buffers[i]);
    }
    PyMem_Free(parts->buffers);
    PyMem_Free(parts->iov);
    *parts = (kvfp_parts){0};
}
