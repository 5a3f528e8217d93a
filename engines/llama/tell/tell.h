/* SPDX-License-Identifier: Apache-2.0
 *
 * What a kvf_llama_report says, in words and as JSON: for the programs that tell it, `kvferry run` and the shim. On the
 * public headers only.
 */
#ifndef KVFL_TELL_H
#define KVFL_TELL_H

#include <jansson.h>

#include "kvferry/llama.h"

/* Why a block was not loaded, or not stored: for people. */
const char *kvfl_tell_why(kvf_reason);
/* What was decided, as kvf_llama_plan_name, and from which figures where there was something to decide. */
#define KVFL_TELL_TEXT 200u
void kvfl_tell_plan(char *out, size_t room, const kvf_llama_report *);
/* All of the report: counts, times in ms, and `plan` with its figures (docs/llama.md). NULL: no memory. */
json_t *kvfl_tell_json(const kvf_llama_report *);

#endif
