/* SPDX-License-Identifier: Apache-2.0
 *
 * config.pbtxt: the parameters of the backend, and what is added when inputs and outputs are left out.
 */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "triton/backend/backend.h"
#include "triton/backend/inputs.h"

/* ---- the parameters (docs/triton.md has the same table, in words) ---- */

typedef struct parameter {
    const char *name;
    enum { TEXT, NUMBER, SWITCH } kind;
    size_t offset;
    uint32_t min, max, preset;
    const char *choices; /* NULL: any text */
    const char *text;    /* the default */
} parameter;

#define AT(field) offsetof(kvfb_config, field)
static const parameter parameters[] = {
    {"model", TEXT, AT(model), 0, 0, 0, NULL, NULL},
    {"store", TEXT, AT(store), 0, 0, 0, NULL, NULL},
    {"tenant", TEXT, AT(tenant), 0, 0, 0, NULL, NULL},
    {"secret_file", TEXT, AT(secret_file), 0, 0, 0, NULL, NULL},
    {"kv_type", TEXT, AT(kv_type), 0, 0, 0, "f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl", "f16"},
    {"flash_attn", TEXT, AT(flash_attn), 0, 0, 0, "on off auto", "auto"},
    {"when_full", TEXT, AT(when_full), 0, 0, 0, "reject wait", "reject"},
    {"context_size", NUMBER, AT(context), 64, 1u << 26, 0, NULL, NULL},
    {"slots", NUMBER, AT(slots), 1, 254, 4, NULL, NULL},
    {"queue", NUMBER, AT(queue), 0, 1u << 20, 64, NULL, NULL},
    {"max_tokens", NUMBER, AT(max_tokens), 1, 1u << 26, 256, NULL, NULL},
    {"threads", NUMBER, AT(threads), 0, GGML_MAX_N_THREADS, 0, NULL, NULL},
    {"gpu_layers", NUMBER, AT(gpu_layers), 0, 1u << 16, 0, NULL, NULL},
    {"budget_ms", NUMBER, AT(budget_ms), 0, 3600000, 0, NULL, NULL},
    {"prefill_tokens", NUMBER, AT(piece), 64, 1u << 16, 64, NULL, NULL},
    {"backlog_mb", NUMBER, AT(backlog_mb), 1, 1u << 20, 256, NULL, NULL},
    {"portable", SWITCH, AT(portable), 0, 0, 0, NULL, NULL},
};
enum { NUM_PARAMETERS = sizeof parameters / sizeof *parameters };

static const parameter *parameter_of(const char *name) {
    for (size_t i = 0; i < NUM_PARAMETERS; i++) {
        if (strcmp(parameters[i].name, name) == 0) {
            return &parameters[i];
        }
    }
    return NULL;
}

static TRITONSERVER_Error *unknown(const char *name) {
    char known[400] = "";
    for (size_t i = 0; i < NUM_PARAMETERS; i++) {
        size_t len = strlen(known);
        snprintf(known + len, sizeof known - len, "%s%s", i > 0 ? ", " : "", parameters[i].name);
    }
    return kvfb_error(TRITONSERVER_ERROR_INVALID_ARG, "config.pbtxt: there is no parameter \"%.60s\". There are: %s",
                      name, known);
}

static bool is_choice(const char *choices, const char *value) {
    size_t len = strlen(value);
    const char *at = choices;
    while (len > 0 && strcspn(value, " ") == len && (at = strstr(at, value)) != NULL) {
        if ((at == choices || at[-1] == ' ') && (at[len] == ' ' || at[len] == '\0')) {
            return true;
        }
        at += len;
    }
    return false;
}

static TRITONSERVER_Error *set_text(void *field, const parameter *p, const char *value) {
    char *copy = strdup(value);
    if (p->choices != NULL && !is_choice(p->choices, value)) {
        free(copy);
        return kvfb_error(TRITONSERVER_ERROR_INVALID_ARG, "config.pbtxt: parameter \"%s\" is one of %s, not \"%.60s\"",
                          p->name, p->choices, value);
    }
    if (copy == NULL) {
        return kvfb_no_memory();
    }
    char **text = field;
    free(*text);
    *text = copy;
    return NULL;
}

static TRITONSERVER_Error *set_number(void *field, const parameter *p, const char *value) {
    char *end = NULL;
    unsigned long long number = strtoull(value, &end, 10);
    if (value[0] < '0' || value[0] > '9' || *end != '\0' || number < p->min || number > p->max) {
        return kvfb_error(TRITONSERVER_ERROR_INVALID_ARG,
                          "config.pbtxt: parameter \"%s\" is a number from %u to %u, not \"%.60s\"", p->name, p->min,
                          p->max, value);
    }
    *(uint32_t *)field = (uint32_t)number;
    return NULL;
}

static TRITONSERVER_Error *set_switch(void *field, const parameter *p, const char *value) {
    bool yes = strcmp(value, "true") == 0;
    if (!yes && strcmp(value, "false") != 0) {
        return kvfb_error(TRITONSERVER_ERROR_INVALID_ARG,
                          "config.pbtxt: parameter \"%s\" is true or false, not \"%.60s\"", p->name, value);
    }
    *(bool *)field = yes;
    return NULL;
}

static TRITONSERVER_Error *set(kvfb_config *config, const char *name, const char *value) {
    const parameter *p = parameter_of(name);
    if (p == NULL) {
        return unknown(name);
    }
    void *field = (char *)config + p->offset;
    if (value == NULL) {
        return kvfb_error(TRITONSERVER_ERROR_INVALID_ARG, "config.pbtxt: parameter \"%s\" has no string_value", name);
    }
    return p->kind == TEXT     ? set_text(field, p, value)
           : p->kind == NUMBER ? set_number(field, p, value)
                               : set_switch(field, p, value);
}

static TRITONSERVER_Error *set_defaults(kvfb_config *config) {
    for (size_t i = 0; i < NUM_PARAMETERS; i++) {
        const parameter *p = &parameters[i];
        void *field = (char *)config + p->offset;
        if (p->kind == NUMBER) {
            *(uint32_t *)field = p->preset;
        }
        TRITONSERVER_Error *error = p->kind == TEXT && p->text != NULL ? set_text(field, p, p->text) : NULL;
        if (error != NULL) {
            return error;
        }
    }
    return NULL;
}

static TRITONSERVER_Error *set_all(kvfb_config *config, json_t *json) {
    const char *name;
    json_t *value;
    TRITONSERVER_Error *error = set_defaults(config);
    json_object_foreach(json_object_get(json, "parameters"), name, value) {
        if (error == NULL) {
            error = set(config, name, json_string_value(json_object_get(value, "string_value")));
        }
    }
    return error;
}

/* ---- the configuration as JSON ---- */

static TRITONSERVER_Error *fetch(json_t **out, TRITONBACKEND_Model *model) {
    TRITONSERVER_Message *message = NULL;
    const char *text = NULL;
    size_t len = 0;
    TRITONSERVER_Error *error = TRITONBACKEND_ModelConfig(model, 1, &message);
    if (error == NULL) {
        error = TRITONSERVER_MessageSerializeToJson(message, &text, &len);
    }
    if (error == NULL) {
        *out = json_loadb(text, len, 0, NULL);
        error =
            *out == NULL ? kvfb_error(TRITONSERVER_ERROR_INTERNAL, "Triton's model configuration is not JSON") : NULL;
    }
    if (message != NULL) {
        kvfb_drop(TRITONSERVER_MessageDelete(message));
    }
    return error;
}

static bool is_decoupled(const json_t *json) {
    return json_is_true(json_object_get(json_object_get(json, "model_transaction_policy"), "decoupled"));
}

/* Inputs and outputs that config.pbtxt names must be ours, of our type. */
static TRITONSERVER_Error *check_tensors(const json_t *json, const char *key,
                                         const char *(*type_of)(const char *name)) {
    size_t i;
    json_t *tensor;
    json_array_foreach(json_object_get(json, key), i, tensor) {
        const char *name = json_string_value(json_object_get(tensor, "name"));
        const char *type = json_string_value(json_object_get(tensor, "data_type"));
        const char *ours = name != NULL ? type_of(name) : NULL;
        if (ours == NULL || type == NULL || strncmp(type, "TYPE_", 5) != 0 || strcmp(type + 5, ours) != 0) {
            return ours == NULL ? kvfb_error(TRITONSERVER_ERROR_INVALID_ARG,
                                             "config.pbtxt: the backend kvferry has no %s \"%.60s\"; leave out all of "
                                             "them, and they are filled in",
                                             key, name != NULL ? name : "")
                                : kvfb_error(TRITONSERVER_ERROR_INVALID_ARG, "config.pbtxt: the %s \"%s\" is TYPE_%s",
                                             key, name, ours);
        }
    }
    return NULL;
}

static const char *input_type(const char *name) {
    const kvfb_input_kind *kind = kvfb_input_of(name);
    return kind != NULL ? kind->type : NULL;
}

static const char *output_type(const char *name) {
    for (size_t i = 0; i < KVFB_NUM_OUTPUTS; i++) {
        if (strcmp(kvfb_outputs[i].name, name) == 0) {
            return kvfb_outputs[i].type;
        }
    }
    return NULL;
}

static TRITONSERVER_Error *check(const json_t *json) {
    TRITONSERVER_Error *error = check_tensors(json, "input", input_type);
    if (error == NULL) {
        error = check_tensors(json, "output", output_type);
    }
    if (error == NULL && json_integer_value(json_object_get(json, "max_batch_size")) > 0) {
        error = kvfb_error(TRITONSERVER_ERROR_INVALID_ARG,
                           "config.pbtxt: max_batch_size must be 0: the backend kvferry batches requests by itself");
    }
    return error;
}

TRITONSERVER_Error *kvfb_config_read(kvfb_config *out, TRITONBACKEND_Model *model) {
    json_t *json = NULL;
    *out = (kvfb_config){.model = NULL};
    TRITONSERVER_Error *error = fetch(&json, model);
    if (error == NULL) {
        error = set_all(out, json);
    }
    if (error == NULL) {
        error = check(json);
    }
    out->decoupled = is_decoupled(json);
    json_decref(json);
    return error;
}

void kvfb_config_cleanup(kvfb_config *config) {
    for (size_t i = 0; i < NUM_PARAMETERS; i++) {
        if (parameters[i].kind == TEXT) {
            free(*(char **)((char *)config + parameters[i].offset));
        }
    }
    *config = (kvfb_config){.model = NULL};
}

/* ---- what is left out ---- */

static bool lacks(const json_t *json, const char *key) {
    const json_t *value = json_object_get(json, key);
    return value == NULL || (json_is_array(value) && json_array_size(value) == 0);
}

static json_t *tensor(const char *name, const char *type, int dims, bool optional) {
    char full[24];
    snprintf(full, sizeof full, "TYPE_%s", type);
    json_t *json = json_pack("{s:s, s:s, s:[i]}", "name", name, "data_type", full, "dims", dims);
    if (optional) {
        json_object_set_new(json, "optional", json_true());
    }
    return json;
}

static void add_inputs(json_t *json) {
    json_t *list = json_array();
    for (size_t i = 0; i < KVFB_NUM_INPUTS; i++) {
        json_array_append_new(list, tensor(kvfb_inputs[i].name, kvfb_inputs[i].type, kvfb_inputs[i].dims, true));
    }
    json_object_set_new(json, "input", list);
}

static void add_outputs(json_t *json) {
    json_t *list = json_array();
    for (size_t i = 0; i < KVFB_NUM_OUTPUTS; i++) {
        json_array_append_new(list, tensor(kvfb_outputs[i].name, kvfb_outputs[i].type, kvfb_outputs[i].dims, false));
    }
    json_object_set_new(json, "output", list);
}

static TRITONSERVER_Error *give(const json_t *json, TRITONBACKEND_Model *model) {
    TRITONSERVER_Message *message = NULL;
    char *text = json_dumps(json, JSON_COMPACT);
    TRITONSERVER_Error *error =
        text == NULL ? kvfb_no_memory() : TRITONSERVER_MessageNewFromSerializedJson(&message, text, strlen(text));
    if (error == NULL) {
        error = TRITONBACKEND_ModelSetConfig(model, 1, message);
        kvfb_drop(TRITONSERVER_MessageDelete(message));
    }
    free(text);
    return error;
}

TRITONSERVER_Error *kvfb_config_complete(TRITONBACKEND_Model *model) {
    json_t *json = NULL;
    bool wanted = false;
    TRITONSERVER_Error *error = TRITONBACKEND_ModelAutoCompleteConfig(model, &wanted);
    if (error != NULL || !wanted) {
        return error;
    }
    error = fetch(&json, model);
    if (error != NULL) {
        return error;
    }
    if (lacks(json, "input")) {
        add_inputs(json);
    }
    if (lacks(json, "output")) {
        add_outputs(json);
    }
    if (lacks(json, "model_transaction_policy")) {
        json_object_set_new(json, "model_transaction_policy", json_pack("{s:b}", "decoupled", 1));
    }
    if (lacks(json, "instance_group")) {
        json_object_set_new(json, "instance_group", json_pack("[{s:s, s:i}]", "kind", "KIND_CPU", "count", 1));
    }
    error = give(json, model);
    json_decref(json);
    return error;
}
