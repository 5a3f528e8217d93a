/* SPDX-License-Identifier: Apache-2.0
 *
 * The files of the model repository: what they are when the server starts, and whether they still are.
 *
 * Triton's key has no more of a model than its name and version. So the digest of the repository goes into every key: all
 * paths and all bytes below its folders, except what Python writes there (__pycache__). Which models are loaded is known
 * only as long as these files stay as they are.
 */
#ifndef KVFR_MODELS_H
#define KVFR_MODELS_H
#include "triton/cache/fail.h"

#define KVFR_DIGEST_TEXT 33u

typedef struct kvfr_models kvfr_models;

/* The folders that the command line of this process names by --model-repository or --model-store, with ':' between them. An
 * error says why there are none. */
TRITONSERVER_Error *kvfr_models_of_command_line(char *out, size_t cap);

/* Reads all files below `folders`. */
TRITONSERVER_Error *kvfr_models_open(kvfr_models **out, const char *folders);
void kvfr_models_close(kvfr_models *);
/* 32 hex digits. */
const char *kvfr_models_digest(const kvfr_models *);
/* Whether the files are as they were. Once they are not, it stays so. Any thread. */
bool kvfr_models_same(kvfr_models *);

#endif
