/* SPDX-License-Identifier: Apache-2.0
 *
 * What the module libkvferry-run.so gives to the program.
 */
#include <llama.h>

#include "common/llama.h"
#include "run/verbs.h"

__attribute__((visibility("default"))) const kvfcli_llama kvfcli_llama_part = {.version = KVF_VERSION,
                                                                               .built_with = KVFL_LLAMA_VERSION,
                                                                               .llama_version = llama_version,
                                                                               .run = kvfcli_run,
                                                                               .explain = kvfcli_explain,
                                                                               .detokenize = kvfcli_detokenize};
