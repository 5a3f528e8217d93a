/* SPDX-License-Identifier: Apache-2.0
 *
 * What module.c exports: the verbs and functions that need llama.cpp.
 */
#ifndef KVFCLI_RUN_VERBS_H
#define KVFCLI_RUN_VERBS_H

#include "common/cli.h"

int kvfcli_run(int argc, char **argv);
int kvfcli_explain(int argc, char **argv);

/* The text of token ids by the vocabulary of a model. *out is freed with free(). */
kvf_status kvfcli_detokenize(const char *model, const uint32_t *tokens, size_t num, char **out, kvf_error *err);

#endif
