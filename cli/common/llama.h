/* SPDX-License-Identifier: Apache-2.0
 *
 * The part of the program that needs llama.cpp (cli/run): a module, which is loaded when a verb needs it. So the other
 * verbs work where no llama.cpp is.
 */
#ifndef KVFCLI_LLAMA_H
#define KVFCLI_LLAMA_H

#include "common/cli.h"

/* What the module exports, under the name KVFCLI_LLAMA_SYMBOL. It has its own copy of cli/common, and shares nothing
 * with the program except the C library and libkvferry. */
typedef struct kvfcli_llama {
    const char *version;                /* of kvferry; the program refuses another one than its own */
    const char *built_with;             /* the version of llama.cpp; parameters are structs that change with it */
    const char *(*llama_version)(void); /* of the libllama that was found */
    int (*run)(int argc, char **argv);
    int (*explain)(int argc, char **argv);
    /* The text of token ids by the vocabulary of a model. *out is freed with free(). */
    kvf_status (*detokenize)(const char *model, const uint32_t *tokens, size_t num, char **out, kvf_error *err);
} kvfcli_llama;
#define KVFCLI_LLAMA_SYMBOL "kvfcli_llama_part"

/* kvfcli_find_beside finds a file that belongs to the program: in its folder (a build folder), or in kvferry's folder
 * among the libraries of its prefix. False: it is not there. */
bool kvfcli_find_beside(char out[4096], const char *name);

bool kvfcli_has_llama(void); /* the module is there; whether it finds a libllama shows when it is loaded */

/* kvfcli_load_llama returns the module, or NULL after a message that says what is missing. The threads of llama.cpp
 * yield from then on while they wait for each other, unless the environment decides how they wait. */
const kvfcli_llama *kvfcli_load_llama(void);

#endif
