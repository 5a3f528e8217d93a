/* SPDX-License-Identifier: Apache-2.0
 *
 * The module: its types and exceptions, and the program `kvferry`.
 */
#include <signal.h>
#include <stdio.h>

#include "ext.h"

/* ---- the program */
static char **texts_of(PyObject *argv) {
    Py_ssize_t num = PyTuple_Size(argv);
    char **texts = PyMem_Calloc((size_t)num + 1, sizeof *texts);
    if (texts == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < num; i++) {
        texts[i] = PyBytes_AsString(PyTuple_GetItem(argv, i));
        if (texts[i] == NULL) {
            PyMem_Free(texts);
            return NULL;
        }
    }
    return texts;
}

/* Python's handler only notes a signal; the program wants Ctrl-C to end it. */
static PyObject *run_program(PyObject *argv) {
    char **texts = texts_of(argv);
    if (texts == NULL) {
        return NULL;
    }
    int num = (int)PyTuple_Size(argv), rc = 0;
    Py_BEGIN_ALLOW_THREADS signal(SIGINT, SIG_DFL);
    rc = kvfcli_main(num, texts);
    Py_END_ALLOW_THREADS PyMem_Free(texts);
    return PyLong_FromLong(rc);
}

static PyObject *run_main(PyObject *module, PyObject *from) {
    (void)module;
    PyObject *argv = PySequence_Tuple(from), *rc = NULL;
    if (argv == NULL) {
        return NULL;
    }
    if (PyTuple_Size(argv) == 0) {
        PyErr_SetString(PyExc_ValueError, "argv: at least the name of the program");
    } else {
        rc = run_program(argv);
    }
    Py_DECREF(argv);
    return rc;
}

static PyMethodDef functions[] = {
    {"_main", run_main, METH_O,
     "_main($module, argv, /)\n--\n\nThe program kvferry, without `run`. argv: bytes; argv[0] is its name. Once a process."},
    {NULL, NULL, 0, NULL},
};

/* ---- the module */
static bool add_constants(PyObject *module) {
    return PyModule_AddStringConstant(module, "VERSION", kvf_version()) == 0 &&
           PyModule_AddIntConstant(module, "KEY_BYTES", (long)sizeof(kvf_key)) == 0 &&
           PyModule_AddIntConstant(module, "MAX_BLOCKS", KVF_MAX_BLOCKS) == 0;
}

/* Types and exceptions are variables of the process, so there is one module in it. */
static int fill(PyObject *module) {
    static PyObject *filled;
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
        PyErr_SetString(PyExc_ImportError, "kvferry does not support subinterpreters: import it in the main one");
        return -1;
    }
    if (filled != NULL) {
        PyErr_SetString(PyExc_ImportError, "kvferry._kvferry is loaded already: it can't be loaded twice");
        return -1;
    }
    if (!kvfp_errors_init(module) || !kvfp_values_init(module) || !kvfp_store_init(module) ||
        !kvfp_space_init(module) || !kvfp_view_init(module) || !kvfp_queue_init(module) || !kvfp_session_init(module) ||
        !kvfp_plan_init(module) || !kvfp_llama_init(module) || !add_constants(module) || !kvfp_log_init()) {
        return -1;
    }
    filled = module;
    Py_INCREF(module);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill}, {0, NULL}};
static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "kvferry._kvferry",
    .m_doc = "The C core of kvferry. _kvferry.pyi has the contract.",
    .m_methods = functions,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__kvferry(void) {
    return PyModuleDef_Init(&definition);
}
