/* SPDX-License-Identifier: Apache-2.0
 *
 * View: an engine's own paged memory.
 */
#include "ext.h"
#include "manual.h"

typedef struct view_handle {
    kvfp_handle base;
    size_t num_slots, slot_bytes;
} view_handle;

#define REGION "(address, slot_stride, run_bytes, run_stride, num_runs)"

PyTypeObject *kvfp_ViewType;

static void close_view(void *it) {
    kvf_view_close(it);
}

static const kvfp_kind view_kind = {"View", sizeof(view_handle), NULL, close_view, NULL};

static view_handle *view_of(const kvfp_handle *handle) {
    return (view_handle *)(void *)(uintptr_t)handle;
}

size_t kvfp_view_num_slots(const kvfp_handle *view) {
    return view_of(view)->num_slots;
}

static bool take_region(kvf_region *out, PyObject *from, Py_ssize_t index) {
    static const char *const names[] = {"address", "slot_stride", "run_bytes", "run_stride", "num_runs"};
    size_t numbers[5];
    PyObject *items = kvfp_take_items(from, "region", REGION);
    if (items == NULL) {
        return false;
    }
    bool taken = PyTuple_Size(items) == 5;
    if (!taken) {
        kvfp_limit("region %zd: " REGION ", not %zd items", index, PyTuple_Size(items));
    }
    for (Py_ssize_t i = 0; taken && i < 5; i++) {
        taken = kvfp_take_count(&numbers[i], PyTuple_GetItem(items, i), names[i], 0, i == 4 ? UINT32_MAX : SIZE_MAX);
    }
    Py_DECREF(items);
    if (taken) {
        *out = (kvf_region){.base = (void *)(uintptr_t)numbers[0],
                            .slot_stride = numbers[1],
                            .run_bytes = numbers[2],
                            .run_stride = numbers[3],
                            .num_runs = (uint32_t)numbers[4]};
    }
    return taken;
}

static kvf_region *take_regions(size_t *out_num, PyObject *from) {
    PyObject *items = kvfp_take_items(from, "regions", "a sequence of " REGION);
    if (items == NULL) {
        return NULL;
    }
    Py_ssize_t num = PyTuple_Size(items);
    kvf_region *regions = PyMem_Calloc((size_t)num + 1, sizeof *regions);
    bool taken = regions != NULL;
    if (!taken) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; taken && i < num; i++) {
        taken = take_region(&regions[i], PyTuple_GetItem(items, i), i);
    }
    Py_DECREF(items);
    if (!taken) {
        PyMem_Free(regions);
        return NULL;
    }
    *out_num = (size_t)num;
    return regions;
}

static view_handle *open_view(const kvf_region *regions, size_t num, size_t num_slots, PyObject *owner) {
    kvf_view *view = NULL;
    kvf_error err = {0};
    kvf_status status = kvf_view_open(&view, &err, regions, num, num_slots);
    if (status != KVF_OK) {
        return kvfp_raise(status, &err, "the view can't be opened");
    }
    view_handle *handle = view_of(kvfp_handle_new(&view_kind, view, NULL, owner));
    if (handle != NULL) {
        handle->num_slots = num_slots;
        for (size_t i = 0; i < num; i++) {
            handle->slot_bytes += regions[i].run_bytes * regions[i].num_runs;
        }
    }
    return handle;
}

static PyObject *view_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"regions", "num_slots", "owner", NULL};
    PyObject *from = NULL, *slots = NULL, *owner = Py_None;
    size_t num = 0, num_slots = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O:View", names, &from, &slots, &owner) ||
        !kvfp_take_count(&num_slots, slots, "num_slots", 1, SIZE_MAX)) {
        return NULL;
    }
    kvf_region *regions = take_regions(&num, from);
    if (regions == NULL) {
        return NULL;
    }
    view_handle *handle = open_view(regions, num, num_slots, owner);
    PyMem_Free(regions);
    return handle == NULL ? NULL : kvfp_object_new(type, &handle->base, NULL);
}

static PyObject *fence_slots(kvfp_handle *handle, const int64_t *slots, size_t num, int64_t budget_us) {
    kvf_status status = KVF_OK;
    kvfp_wait wait;
    kvfp_wait_begin(&wait);
    status = kvf_fence(handle->it, slots, num, budget_us);
    if (!kvfp_wait_end(&wait)) {
        return NULL;
    }
    if (status != KVF_OK && status != KVF_AGAIN) {
        return kvfp_raise(status, NULL, "slots: one of them is not in the view");
    }
    return PyBool_FromLong(status == KVF_OK);
}

static PyObject *view_fence(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"slots", "timeout", NULL};
    PyObject *from = NULL, *fenced = NULL;
    int64_t budget_us = KVF_DEFAULT, *slots = NULL;
    size_t num = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O&:fence", names, &from, kvfp_timeout, &budget_us) ||
        !kvfp_take_slots(&slots, &num, from)) {
        return NULL;
    }
    kvfp_handle *handle = kvfp_enter_object(self, kvfp_ViewType, "View");
    if (handle != NULL) {
        fenced = fence_slots(handle, slots, num, budget_us);
        kvfp_leave(handle);
    }
    PyMem_Free(slots);
    return fenced;
}

static PyObject *view_num_slots(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromSize_t(view_of(((kvfp_object *)(void *)self)->handle)->num_slots);
}

static PyObject *view_slot_bytes(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromSize_t(view_of(((kvfp_object *)(void *)self)->handle)->slot_bytes);
}

static PyMethodDef methods[] = {
    KVFP_COMMON_METHODS,
    {"fence", KVFP_KEYWORDS(view_fence), "fence($self, /, slots, timeout=None)\n--\n\n" KVFP_MANUAL_View_fence},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef properties[] = {
    {"closed", kvfp_object_closed, NULL, "Whether it was closed, or belongs to the parent of this process.", NULL},
    {"num_slots", view_num_slots, NULL, "The number of slots.", NULL},
    {"slot_bytes", view_slot_bytes, NULL, "The payload of a slot, in bytes.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_doc, "View(regions, num_slots, owner=None)\n--\n\n" KVFP_MANUAL_View},
    {Py_tp_new, view_new},
    KVFP_COMMON_SLOTS,
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, NULL},
};
static PyType_Spec spec = {"kvferry.View", sizeof(kvfp_object), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

bool kvfp_view_init(PyObject *module) {
    kvfp_ViewType = kvfp_add_type(module, &spec);
    return kvfp_ViewType != NULL;
}
