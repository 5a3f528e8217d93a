/* SPDX-License-Identifier: Apache-2.0
 *
 * The caller's wish to end a call that waits (kvf_set_interrupt), for the places that wait.
 */
#ifndef KVFI_INTERRUPT_H
#define KVFI_INTERRUPT_H

#include <poll.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define KVFI_INTERRUPT_STEP_US 20000 /* how often a wait asks */

/* True once the call of this thread is to end. It may be handed to threads that work for this call. NULL: nobody asks
 * that of this thread. */
const atomic_bool *kvfi_interrupt_flag(void);
/* For a thread of the library, which asks nobody: from now on it works for a call that ends once *flag is true, so its
 * waits end then as well. NULL: for none. */
void kvfi_interrupt_work_for(const atomic_bool *flag);
bool kvfi_is_interrupted(void);
/* Asks now. True: the call is to end. Not under a lock: the caller's function may call the library. */
bool kvfi_interrupt_ask(void);
/* The same for loops that seldom wait: asks only where that was not done for a step. */
bool kvfi_interrupt_look(void);
/* kvfi_sys->poll until then, in steps that ask. Returns 0 also once the call is to end. */
int kvfi_interruptible_poll(struct pollfd *, nfds_t, int64_t until_us);

#endif
