/* SPDX-License-Identifier: Apache-2.0
 *
 * What Triton calls. Nothing else is exported.
 */
#include "triton/backend/backend.h"

TRITONSERVER_Error *TRITONBACKEND_Initialize(TRITONBACKEND_Backend *backend) {
    uint32_t major = 0, minor = 0;
    (void)backend;
    TRITONSERVER_Error *error = TRITONBACKEND_ApiVersion(&major, &minor);
    if (error != NULL) {
        return error;
    }
    if (major != TRITONBACKEND_API_VERSION_MAJOR || minor < TRITONBACKEND_API_VERSION_MINOR) {
        return kvfb_error(
            TRITONSERVER_ERROR_UNSUPPORTED,
            "the backend kvferry needs Triton's backend API %d.%d or later with the same first number; this "
            "server has %u.%u",
            TRITONBACKEND_API_VERSION_MAJOR, TRITONBACKEND_API_VERSION_MINOR, major, minor);
    }
    kvfb_log_attach();
    llama_backend_init();
    kvfb_metrics_open();
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_Finalize(TRITONBACKEND_Backend *backend) {
    (void)backend;
    kvfb_metrics_close();
    llama_backend_free();
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model *triton) {
    kvfb_model *model = NULL;
    TRITONSERVER_Error *error = kvfb_model_open(&model, triton);
    if (error == NULL) {
        error = TRITONBACKEND_ModelSetState(triton, model);
    }
    if (error != NULL) {
        kvfb_model_close(model);
    }
    return error;
}

TRITONSERVER_Error *TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model *triton) {
    void *model = NULL;
    TRITONSERVER_Error *error = TRITONBACKEND_ModelState(triton, &model);
    kvfb_model_close(model);
    return error;
}

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance *triton) {
    TRITONBACKEND_Model *owner = NULL;
    void *model = NULL;
    kvfb_instance *instance = NULL;
    TRITONSERVER_Error *error = TRITONBACKEND_ModelInstanceModel(triton, &owner);
    if (error == NULL) {
        error = TRITONBACKEND_ModelState(owner, &model);
    }
    if (error == NULL) {
        error = kvfb_instance_open(&instance, triton, model);
    }
    if (error == NULL) {
        error = TRITONBACKEND_ModelInstanceSetState(triton, instance);
    }
    if (error != NULL) {
        kvfb_instance_close(instance);
    }
    return error;
}

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance *triton) {
    void *instance = NULL;
    TRITONSERVER_Error *error = TRITONBACKEND_ModelInstanceState(triton, &instance);
    kvfb_instance_close(instance);
    return error;
}

/* Returns at once: answers come from the instance's own threads. */
TRITONSERVER_Error *TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance *triton,
                                                       TRITONBACKEND_Request **requests, const uint32_t num) {
    void *instance = NULL;
    TRITONSERVER_Error *error = TRITONBACKEND_ModelInstanceState(triton, &instance);
    for (uint32_t i = 0; i < num && error == NULL; i++) {
        kvfb_instance_take(instance, requests[i]);
    }
    return error;
}
