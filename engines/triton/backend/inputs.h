/* SPDX-License-Identifier: Apache-2.0
 *
 * The inputs of the backend: their names and types, for config.c and request.c.
 */
#ifndef KVFB_INPUTS_H
#define KVFB_INPUTS_H

#include "triton/abi/backend.h"

typedef enum kvfb_input {
    KVFB_TEXT_INPUT,
    KVFB_INPUT_IDS,
    KVFB_MESSAGES,
    KVFB_MAX_TOKENS,
    KVFB_TEMPERATURE,
    KVFB_TOP_K,
    KVFB_TOP_P,
    KVFB_MIN_P,
    KVFB_SEED,
    KVFB_STOP,
    KVFB_SESSION_ID,
    KVFB_TENANT,
    KVFB_STREAM,
    KVFB_NUM_INPUTS
} kvfb_input;

typedef struct kvfb_input_kind {
    const char *name, *type; /* as in config.pbtxt, without TYPE_ */
    TRITONSERVER_DataType datatype;
    int dims; /* 1, or -1: any number */
} kvfb_input_kind;
extern const kvfb_input_kind kvfb_inputs[KVFB_NUM_INPUTS];

/* NULL: there is none of this name. */
const kvfb_input_kind *kvfb_input_of(const char *name);

#endif
