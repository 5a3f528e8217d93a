/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls that wait without the GIL, and that Ctrl-C ends.
 */
#include <sys/syscall.h>
#include <unistd.h>

#include "ext.h"

/* Python runs the handlers of signals on its main thread only. A handler may call kvferry: that call waits to its
 * end. */
static _Thread_local kvfp_wait *under_way;

static bool is_main_thread(void) {
    return syscall(SYS_gettid) == (long)getpid();
}

static int check_signals(void *ctx) {
    kvfp_wait *wait = ctx;
    PyEval_RestoreThread(wait->thread);
    int end = PyErr_Occurred() != NULL || PyErr_CheckSignals() != 0;
    wait->thread = PyEval_SaveThread();
    return end;
}

void kvfp_wait_begin(kvfp_wait *wait) {
    wait->listens = under_way == NULL && is_main_thread();
    if (wait->listens) {
        under_way = wait;
        kvf_set_interrupt(check_signals, wait);
    }
    wait->thread = PyEval_SaveThread();
}

bool kvfp_wait_end(kvfp_wait *wait) {
    PyEval_RestoreThread(wait->thread);
    if (wait->listens) {
        kvf_set_interrupt(NULL, NULL);
        under_way = NULL;
    }
    return PyErr_Occurred() == NULL;
}
