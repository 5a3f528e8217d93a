/* SPDX-License-Identifier: Apache-2.0
 *
 * A kvf_llama_report in words and as JSON, for `kvferry run` and the shim. Uses the public headers only.
 */
#ifndef KVFL_TELL_H
#define KVFL_TELL_H

#include <jansson.h>

#include "kvferry/llama.h"

/* Why a block was not loaded, or not saved: for people. */
const char *kvfl_tell_why(kvf_reason);
/* What was decided, as kvf_llama_plan_name, with the figures if there was something to decide. */
#define KVFL_TELL_TEXT 200u
void kvfl_tell_plan(char *out, size_t room, const kvf_llama_report *);
/* The whole report: counts, times in ms, and `plan` with its figures (docs/llama.md). NULL: no memory. */
json_t *kvfl_tell_json(const kvf_llama_report *);

#endif
