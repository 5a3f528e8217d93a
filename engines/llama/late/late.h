/* SPDX-License-Identifier: Apache-2.0
 *
 * The engine in a module that is linked with no libllama, such as Python's extension: it calls the libllama that the
 * process has loaded, which is known only then.
 *
 * The engine calls llama.cpp's functions by name. late.c defines each of these names, hidden in the module, as a call
 * through a pointer. A function that the engine calls and late.c lacks fails the link.
 */
#ifndef KVFL_LATE_H
#define KVFL_LATE_H

#include "kvferry/status.h"

/* Finds llama.cpp's functions in `library`, what dlopen returned for a libllama that stays loaded, or in what it needs.
 * Call this before any other function of the engine, one call at a time. A process has one libllama: after the first
 * success only the same one is taken.
 *
 * Returns KVF_OK; KVF_REFUSED: it is another version of llama.cpp than kvferry was built with, or another library was
 * taken before. */
kvf_status kvfl_late_open(kvf_error *err, void *library);

#endif
