/* SPDX-License-Identifier: Apache-2.0
 *
 * Arguments: times, keys, tokens, slots and counts, checked.
 */
#include <math.h>
#include <string.h>

#include "ext.h"

int kvfp_timeout(PyObject *from, void *out_us) {
    int64_t *out = out_us;
    *out = KVF_DEFAULT;
    if (from == Py_None) {
        return 1;
    }
    double seconds = PyFloat_AsDouble(from);
    if (seconds == -1.0 && PyErr_Occurred() != NULL) {
        return 0;
    }
    double us = ceil(seconds * 1e6);
    if (!(us >= 0 && us <= (double)KVF_MAX_BUDGET_US)) {
        kvfp_limit("a time is in seconds, from 0 to 86400, not %R", from);
        return 0;
    }
    *out = us == 0 ? KVF_POLL : (int64_t)us;
    return 1;
}

int kvfp_patience(PyObject *from, void *out_us) {
    int64_t *out = out_us;
    if (kvfp_timeout(from, out_us) == 0) {
        return 0;
    }
    if (*out == KVF_POLL) {
        kvfp_limit("patience: more than 0 seconds; None is that of the store");
        return 0;
    }
    return 1;
}

void kvfp_name_buffer(PyObject *from, const char *what, bool writable) {
    if (PyErr_ExceptionMatches(PyExc_BufferError) || PyErr_ExceptionMatches(PyExc_ValueError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%s: a contiguous%s buffer is needed, which this %R is not", what,
                     writable ? " and writable" : "", (PyObject *)Py_TYPE(from));
    }
}

bool kvfp_take_buffer(Py_buffer *out, PyObject *from, const char *what, bool writable) {
    if (!PyObject_CheckBuffer(from)) {
        PyErr_Format(PyExc_TypeError, "%s: a buffer is needed (bytes, memoryview, a numpy array), not %R", what,
                     (PyObject *)Py_TYPE(from));
        return false;
    }
    if (PyObject_GetBuffer(from, out, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
        kvfp_name_buffer(from, what, writable);
        return false;
    }
    return true;
}

static int take_optional(Py_buffer *buffer, PyObject *from, const char *what) {
    if (from == NULL) { /* a later argument is wrong: clean up */
        PyBuffer_Release(buffer);
        return 1;
    }
    memset(buffer, 0, sizeof *buffer);
    if (from == Py_None) {
        return Py_CLEANUP_SUPPORTED;
    }
    return kvfp_take_buffer(buffer, from, what, false) ? Py_CLEANUP_SUPPORTED : 0;
}

int kvfp_buffer(PyObject *from, void *out) {
    return take_optional(out, from, "argument");
}

int kvfp_secret(PyObject *from, void *out) {
    return take_optional(out, from, "secret");
}

PyObject *kvfp_take_items(PyObject *from, const char *what, const char *needed) {
    PyObject *iterator = PyObject_GetIter(from);
    if (iterator == NULL) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError, "%s: %s is needed, not %R", what, needed, (PyObject *)Py_TYPE(from));
        }
        return NULL;
    }
    PyObject *items = PySequence_Tuple(iterator);
    Py_DECREF(iterator);
    return items;
}

/* An int, a numpy integer: whatever is one. */
static PyObject *integer_of(PyObject *from, const char *what) {
    if (!PyIndex_Check(from)) {
        PyErr_Format(PyExc_TypeError, "%s: an int is needed, not %R", what, (PyObject *)Py_TYPE(from));
        return NULL;
    }
    return PyNumber_Index(from);
}

bool kvfp_take_32(uint8_t out[32], PyObject *from, const char *what) {
    Py_buffer buffer;
    if (!kvfp_take_buffer(&buffer, from, what, false)) {
        return false;
    }
    bool fits = buffer.len == 32;
    if (fits) {
        memcpy(out, buffer.buf, 32);
    } else {
        kvfp_limit("%s: 32 bytes are needed, not %zd", what, buffer.len);
    }
    PyBuffer_Release(&buffer);
    return fits;
}

bool kvfp_take_count(size_t *out, PyObject *from, const char *what, size_t min, size_t max) {
    PyObject *number = integer_of(from, what);
    if (number == NULL) {
        return false;
    }
    size_t value = PyLong_AsSize_t(number);
    Py_DECREF(number);
    bool failed = value == (size_t)-1 && PyErr_Occurred() != NULL;
    if (failed && !PyErr_ExceptionMatches(PyExc_OverflowError)) {
        return false;
    }
    if (failed || value < min || value > max) {
        PyErr_Clear();
        kvfp_limit("%s: from %zu to %zu, not %R", what, min, max, from);
        return false;
    }
    *out = value;
    return true;
}

/* ---- integers, from a buffer or a sequence */
typedef struct integers {
    const char *what;
    int64_t min, max;
    size_t out_bytes; /* of an integer of the result: 4 or 8 */
} integers;
static const integers tokens_of = {"tokens", 0, UINT32_MAX, sizeof(uint32_t)};
static const integers slots_of = {"slots", INT64_MIN, INT64_MAX, sizeof(int64_t)};

static void put(const integers *of, void *out, size_t i, int64_t value) {
    if (of->out_bytes == sizeof(uint32_t)) {
        ((uint32_t *)out)[i] = (uint32_t)value;
    } else {
        ((int64_t *)out)[i] = value;
    }
}

static bool out_of_range(const integers *of, size_t i, PyObject *value) {
    if (value != NULL) {
        kvfp_limit("%s: number %zu is %S, not from %lld to %lld", of->what, i, value, (long long)of->min,
                   (long long)of->max);
        Py_DECREF(value);
    }
    return false;
}

static void *integers_new(const integers *of, size_t num) {
    void *out = PyMem_Malloc(num * of->out_bytes + 1);
    if (out == NULL) {
        PyErr_NoMemory();
    }
    return out;
}

/* The letter of a format such as "<i" in the byte order of this machine; '\0' for anything else. */
static char letter_of(const char *format) {
    if (format == NULL) {
        return '\0';
    }
    const char native[] = {'@', '=', __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? '<' : '>'};
    if (memchr(native, format[0], sizeof native) != NULL) {
        format++;
    }
    return format[0] != '\0' && format[1] == '\0' ? format[0] : '\0';
}

static int64_t integer_at(const Py_buffer *buffer, size_t i, bool is_signed) {
    if (buffer->itemsize == 4) {
        return is_signed ? ((const int32_t *)buffer->buf)[i] : (int64_t)((const uint32_t *)buffer->buf)[i];
    }
    return ((const int64_t *)buffer->buf)[i];
}

static bool from_memory(const integers *of, void **out, size_t *out_num, const Py_buffer *buffer) {
    char letter = letter_of(buffer->format);
    if (letter == '\0' || strchr("iIlLqQ", letter) == NULL || (buffer->itemsize != 4 && buffer->itemsize != 8) ||
        (uintptr_t)buffer->buf % (size_t)buffer->itemsize != 0) {
        PyErr_Format(PyExc_TypeError, "%s: a buffer of aligned 32 or 64 bit integers is needed, not of format '%s'",
                     of->what, buffer->format == NULL ? "B" : buffer->format);
        return false;
    }
    bool is_signed = letter >= 'a', is_wide = buffer->itemsize == 8;
    size_t num = (size_t)(buffer->len / buffer->itemsize);
    void *numbers = integers_new(of, num);
    if (numbers == NULL) {
        return false;
    }
    for (size_t i = 0; i < num; i++) {
        int64_t value = integer_at(buffer, i, is_signed);
        if ((!is_signed && is_wide && value < 0) || value < of->min || value > of->max) {
            PyMem_Free(numbers);
            return out_of_range(of, i,
                                is_signed ? PyLong_FromLongLong(value) : PyLong_FromUnsignedLongLong((uint64_t)value));
        }
        put(of, numbers, i, value);
    }
    *out = numbers;
    *out_num = num;
    return true;
}

static bool from_buffer(const integers *of, void **out, size_t *out_num, PyObject *from) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(from, &buffer, PyBUF_CONTIG_RO | PyBUF_FORMAT) != 0) {
        return false;
    }
    bool taken = from_memory(of, out, out_num, &buffer);
    PyBuffer_Release(&buffer);
    return taken;
}

static bool from_item(const integers *of, void *numbers, size_t i, PyObject *item) {
    PyObject *number = integer_of(item, of->what);
    if (number == NULL) {
        return false;
    }
    long long value = PyLong_AsLongLong(number);
    bool failed = value == -1 && PyErr_Occurred() != NULL;
    if (failed && !PyErr_ExceptionMatches(PyExc_OverflowError)) {
        Py_DECREF(number);
        return false;
    }
    if (failed || value < of->min || value > of->max) {
        PyErr_Clear();
        return out_of_range(of, i, number);
    }
    Py_DECREF(number);
    put(of, numbers, i, value);
    return true;
}

static bool from_sequence(const integers *of, void **out, size_t *out_num, PyObject *from) {
    PyObject *items = kvfp_take_items(from, of->what, "a buffer of integers or a sequence of ints");
    if (items == NULL) {
        return false;
    }
    size_t num = (size_t)PyTuple_Size(items);
    void *numbers = integers_new(of, num);
    bool taken = numbers != NULL;
    for (size_t i = 0; taken && i < num; i++) {
        taken = from_item(of, numbers, i, PyTuple_GetItem(items, (Py_ssize_t)i));
    }
    Py_DECREF(items);
    if (!taken) {
        PyMem_Free(numbers);
        return false;
    }
    *out = numbers;
    *out_num = num;
    return true;
}

static bool take_integers(const integers *of, void **out, size_t *out_num, PyObject *from) {
    return PyObject_CheckBuffer(from) ? from_buffer(of, out, out_num, from) : from_sequence(of, out, out_num, from);
}

bool kvfp_take_tokens(uint32_t **out, size_t *out_num, PyObject *from) {
    void *numbers = NULL;
    bool taken = take_integers(&tokens_of, &numbers, out_num, from);
    *out = numbers;
    return taken;
}

bool kvfp_take_slots(int64_t **out, size_t *out_num, PyObject *from) {
    void *numbers = NULL;
    bool taken = take_integers(&slots_of, &numbers, out_num, from);
    *out = numbers;
    return taken;
}
