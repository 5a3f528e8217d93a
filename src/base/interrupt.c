/* SPDX-License-Identifier: Apache-2.0
 *
 * Asks the caller, on its own thread, whether a call that waits is to end.
 */
#include "base/interrupt.h"

#include <errno.h>

#include "base/sys.h"
#include "kvferry/status.h"

static _Thread_local struct {
    kvf_interrupt_fn fn;
    void *ctx;
    bool asking; /* a call that `fn` makes is not interrupted */
    int64_t asked_us;
    atomic_bool raised;
    const atomic_bool *of; /* of the call that a thread of the library works for */
} own;

void kvf_set_interrupt(kvf_interrupt_fn fn, void *ctx) {
    own.fn = fn;
    own.ctx = ctx;
    own.asked_us = 0;
    atomic_store(&own.raised, false);
}

static bool may_ask(void) {
    return own.fn != NULL && !own.asking;
}

const atomic_bool *kvfi_interrupt_flag(void) {
    return may_ask() ? &own.raised : own.of;
}

void kvfi_interrupt_work_for(const atomic_bool *flag) {
    own.of = flag;
}

bool kvfi_is_interrupted(void) {
    const atomic_bool *flag = kvfi_interrupt_flag();
    return flag != NULL && atomic_load_explicit(flag, memory_order_relaxed);
}

bool kvfi_interrupt_ask(void) {
    if (!may_ask()) {
        return kvfi_is_interrupted();
    }
    if (!atomic_load_explicit(&own.raised, memory_order_relaxed)) {
        own.asked_us = kvfi_sys->now_us();
        own.asking = true;
        bool end = own.fn(own.ctx) != 0;
        own.asking = false;
        atomic_store(&own.raised, end);
    }
    return kvfi_is_interrupted();
}

bool kvfi_interrupt_look(void) {
    if (!may_ask()) {
        return kvfi_is_interrupted();
    }
    if (own.asked_us == 0) {
        own.asked_us = kvfi_sys->now_us(); /* the call has just begun */
    }
    bool due = kvfi_sys->now_us() - own.asked_us >= KVFI_INTERRUPT_STEP_US;
    return due ? kvfi_interrupt_ask() : kvfi_is_interrupted();
}

int kvfi_interruptible_poll(struct pollfd *fds, nfds_t num, int64_t until_us) {
    if (kvfi_interrupt_flag() == NULL) {
        return kvfi_sys->poll(fds, num, kvfi_poll_ms(until_us));
    }
    while (!kvfi_is_interrupted()) {
        int64_t look_us = kvfi_sys->now_us() + KVFI_INTERRUPT_STEP_US;
        int n = kvfi_sys->poll(fds, num, kvfi_poll_ms(look_us < until_us ? look_us : until_us));
        bool failed = n < 0 && errno != EINTR && errno != EAGAIN;
        if (n > 0 || failed || kvfi_interrupt_ask() || kvfi_sys->now_us() >= until_us) {
            return n > 0 || failed ? n : 0;
        }
    }
    return 0;
}
