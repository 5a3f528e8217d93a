/* SPDX-License-Identifier: Apache-2.0
 *
 * The library's messages, for Python's logging. Threads of the library put them into a ring. The next call of any
 * kvferry object that waits or closes takes them out, on the thread of its caller: no thread of the library ever runs
 * Python code.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "ext.h"

#define RING          64u
#define MESSAGE_BYTES 1024u

typedef struct message {
    kvf_log_level level;
    char text[MESSAGE_BYTES];
} message;

static struct {
    pthread_mutex_t lock;
    message ring[RING];
    size_t first, num;
    size_t num_lost; /* when the ring was full */
    atomic_bool waiting;
} the_log = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Called by threads of the library, one at a time. */
static void put(void *ctx, kvf_log_level level, const char *text) {
    (void)ctx;
    pthread_mutex_lock(&the_log.lock);
    if (the_log.num == RING) {
        the_log.num_lost++;
    } else {
        message *at = &the_log.ring[(the_log.first + the_log.num++) % RING];
        at->level = level;
        PyOS_snprintf(at->text, sizeof at->text, "%s", text);
    }
    atomic_store(&the_log.waiting, true);
    pthread_mutex_unlock(&the_log.lock);
}

/* Takes the oldest message. False: there is none. */
static bool take(message *out, size_t *out_lost) {
    pthread_mutex_lock(&the_log.lock);
    bool any = the_log.num > 0;
    if (any) {
        *out = the_log.ring[the_log.first];
        the_log.first = (the_log.first + 1) % RING;
        the_log.num--;
    }
    *out_lost = the_log.num_lost;
    if (!any) {
        the_log.num_lost = 0;
        atomic_store(&the_log.waiting, false);
    }
    pthread_mutex_unlock(&the_log.lock);
    return any;
}

/* ---- fork: the lock is free in a child, and what the parent has not told yet is the parent's */
static void before_fork(void) {
    pthread_mutex_lock(&the_log.lock);
}

static void after_fork(void) {
    pthread_mutex_unlock(&the_log.lock);
}

static void after_fork_in_child(void) {
    the_log.num = the_log.num_lost = 0;
    atomic_store(&the_log.waiting, false);
    pthread_mutex_unlock(&the_log.lock); /* this thread has locked it */
}

bool kvfp_log_init(void) {
    if (pthread_atfork(before_fork, after_fork, after_fork_in_child) != 0) {
        PyErr_NoMemory();
        return false;
    }
    kvf_set_log(put, NULL, KVF_LOG_INFO);
    return true;
}

/* ---- Python's side */
static PyObject *logger(void) {
    PyObject *logging = PyImport_ImportModule("logging");
    PyObject *found = logging == NULL ? NULL : PyObject_CallMethod(logging, "getLogger", "s", "kvferry");
    Py_XDECREF(logging);
    return found;
}

static const char *method_of(kvf_log_level level) {
    return level == KVF_LOG_ERROR ? "error" : level == KVF_LOG_WARN ? "warning" : "info";
}

static int raise_again(void *value) {
    PyErr_SetObject((PyObject *)(void *)Py_TYPE((PyObject *)value), value);
    Py_DECREF((PyObject *)value);
    return -1;
}

/* Logging has failed. Handlers of signals run in it too: what they raise, such as KeyboardInterrupt, is raised again
 * once the caller has its result. Returns false then. */
static bool put_off(PyObject *in) {
    if (PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_WriteUnraisable(in);
        return true;
    }
    PyObject *kind = NULL, *value = NULL, *trace = NULL;
    PyErr_Fetch(&kind, &value, &trace);
    PyErr_NormalizeException(&kind, &value, &trace);
    if (Py_AddPendingCall(raise_again, value) != 0) {
        PyErr_Restore(kind, value, trace);
        PyErr_WriteUnraisable(in);
        return true;
    }
    Py_XDECREF(kind);
    Py_XDECREF(trace);
    return false;
}

/* False: the rest waits for the next call. */
static bool tell_one(PyObject *to, const message *m) {
    PyObject *text = PyUnicode_DecodeUTF8(m->text, (Py_ssize_t)strlen(m->text), "replace");
    PyObject *done = text == NULL ? NULL : PyObject_CallMethod(to, method_of(m->level), "sO", "%s", text);
    bool goes_on = done != NULL || put_off(to);
    Py_XDECREF(text);
    Py_XDECREF(done);
    return goes_on;
}

static void tell_all(PyObject *to) {
    message m;
    size_t lost = 0;
    for (size_t i = 0; i < RING && take(&m, &lost); i++) { /* others may come meanwhile: the next call has them */
        if (!tell_one(to, &m)) {
            return;
        }
    }
    if (lost > 0) {
        m.level = KVF_LOG_WARN;
        PyOS_snprintf(m.text, sizeof m.text, "%zu more messages were lost, since there were too many at once", lost);
        (void)tell_one(to, &m);
    }
}

void kvfp_log_tell(void) {
    if (!atomic_load(&the_log.waiting)) {
        return;
    }
    PyObject *kind = NULL, *value = NULL, *trace = NULL;
    PyErr_Fetch(&kind, &value, &trace);
    PyObject *to = logger();
    if (to == NULL) {
        (void)put_off(NULL);
    } else {
        tell_all(to);
        Py_DECREF(to);
    }
    PyErr_Restore(kind, value, trace);
}
