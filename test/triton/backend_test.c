/* SPDX-License-Identifier: Apache-2.0
 *
 * The backend under the stub host, with a real model (KVF_MODEL): one release and one final flag for each request, nothing
 * left behind, whatever call of the server fails.
 */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "host.h"
#include "support/kit.h"

#define PATIENCE_S 120

/* ---- the library ------------------------------------------------------------------------------------------------- */

static TRITONSERVER_Error *(*initialize)(TRITONBACKEND_Backend *);
static TRITONSERVER_Error *(*finalize)(TRITONBACKEND_Backend *);
static TRITONSERVER_Error *(*model_initialize)(TRITONBACKEND_Model *);
static TRITONSERVER_Error *(*model_finalize)(TRITONBACKEND_Model *);
static TRITONSERVER_Error *(*instance_initialize)(TRITONBACKEND_ModelInstance *);
static TRITONSERVER_Error *(*instance_finalize)(TRITONBACKEND_ModelInstance *);
static TRITONSERVER_Error *(*execute)(TRITONBACKEND_ModelInstance *, TRITONBACKEND_Request **, uint32_t);

static void find(void *library, const char *name, void *out) {
    void *function = dlsym(library, name);
    if (function == NULL) {
        fail_msg("%s", dlerror());
    }
    memcpy(out, &function, sizeof function);
}

static int load_library(void **state) {
    (void)state;
    void *library = dlopen(KVFT_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fail_msg("%s", dlerror());
    }
    find(library, "TRITONBACKEND_Initialize", &initialize);
    find(library, "TRITONBACKEND_Finalize", &finalize);
    find(library, "TRITONBACKEND_ModelInitialize", &model_initialize);
    find(library, "TRITONBACKEND_ModelFinalize", &model_finalize);
    find(library, "TRITONBACKEND_ModelInstanceInitialize", &instance_initialize);
    find(library, "TRITONBACKEND_ModelInstanceFinalize", &instance_finalize);
    find(library, "TRITONBACKEND_ModelInstanceExecute", &execute);
    return 0;
}

static bool forget(TRITONSERVER_Error *error) {
    if (error != NULL) {
        TRITONSERVER_ErrorDelete(error);
    }
    return error == NULL;
}

static void must(TRITONSERVER_Error *error) {
    if (error != NULL) {
        fail_msg("%s", TRITONSERVER_ErrorMessage(error));
    }
}

/* ---- a model, and requests --------------------------------------------------------------------------------------- */

typedef struct served {
    TRITONBACKEND_Model *model;
    TRITONBACKEND_ModelInstance *instance;
} served;

static served served_new(void) {
    char config[1024];
    snprintf(config, sizeof config,
             "{\"name\":\"model\",\"max_batch_size\":0,\"parameters\":{\"model\":{\"string_value\":\"%s\"},"
             "\"slots\":{\"string_value\":\"2\"},\"context_size\":{\"string_value\":\"256\"},"
             "\"threads\":{\"string_value\":\"1\"},\"store\":{\"string_value\":\"mem:\"}}}",
             getenv("KVF_MODEL"));
    served s = {.model = host_model(config, "/nowhere")};
    s.instance = host_instance(s.model);
    return s;
}

static void served_free(served *s) {
    host_instance_free(s->instance);
    host_model_free(s->model);
}

/* As Triton does: what failed to initialize is finalized too. */
static bool start(served *s) {
    return forget(model_initialize(s->model)) && forget(instance_initialize(s->instance));
}

static void stop(served *s) {
    forget(instance_finalize(s->instance));
    forget(model_finalize(s->model));
}

static TRITONBACKEND_Request *question(const char *text, int32_t max_tokens, bool stream) {
    const float greedy = 0;
    const host_input inputs[] = {{"text_input", TRITONSERVER_TYPE_BYTES, text, strlen(text)},
                                 {"max_tokens", TRITONSERVER_TYPE_INT32, &max_tokens, sizeof max_tokens},
                                 {"temperature", TRITONSERVER_TYPE_FP32, &greedy, sizeof greedy},
                                 {"stream", TRITONSERVER_TYPE_BOOL, &stream, sizeof stream}};
    return host_request(inputs, 4);
}

static void give(const served *s, TRITONBACKEND_Request *r) {
    must(execute(s->instance, &r, 1));
}

/* Waits for the end, which must come once and right. */
static host_outcome end_of(TRITONBACKEND_Request *r) {
    host_outcome o;
    assert_true(host_request_wait(r, &o, PATIENCE_S));
    assert_true(o.is_released);
    assert_int_equal(o.num_finals, 1);
    host_request_free(r);
    return o;
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */

static void test_an_old_server_is_refused(void **state) {
    (void)state;
    const host_versions sound = host_version;
    host_version.backend_minor = 0;
    TRITONSERVER_Error *error = initialize(NULL);
    assert_non_null(error);
    assert_non_null(strstr(TRITONSERVER_ErrorMessage(error), "1.0"));
    TRITONSERVER_ErrorDelete(error);
    host_version = sound;
    assert_int_equal(host_leaks(), 0);
}

static void test_each_request_ends_once(void **state) {
    (void)state;
    must(initialize(NULL));
    served s = served_new();
    assert_true(start(&s));
    char text[4096] = "";
    for (int i = 0; i < 4; i++) {
        TRITONBACKEND_Request *r = question("The capital of France is", 6, i % 2 == 1);
        give(&s, r);
        host_outcome o = end_of(r);
        assert_int_equal(o.num_errors, 0);
        assert_true(o.text[0] != '\0');
        assert_true(i == 0 || strcmp(o.text, text) == 0); /* the same in pieces and at once, computed and loaded */
        memcpy(text, o.text, sizeof text);
        assert_true(i % 2 == 1 ? o.num_responses > 1 : o.num_responses == 1);
    }
    print_message("\"%s\"\n", text);
    stop(&s);
    served_free(&s);
    must(finalize(NULL));
    assert_int_equal(host_leaks(), 0);
}

static void test_wrong_requests_end_in_one_error(void **state) {
    (void)state;
    must(initialize(NULL));
    served s = served_new();
    assert_true(start(&s));
    const int32_t far = 1 << 30;
    const host_input wrong[][2] = {
        {{"no_such", TRITONSERVER_TYPE_BYTES, "x", 1}, {"text_input", TRITONSERVER_TYPE_BYTES, "x", 1}},
        {{"text_input", TRITONSERVER_TYPE_INT32, "1234", 4}, {"max_tokens", TRITONSERVER_TYPE_INT32, &far, 4}},
        {{"input_ids", TRITONSERVER_TYPE_INT32, &far, 4}, {"stop", TRITONSERVER_TYPE_BYTES, "x", 1}},
        {{"text_input", TRITONSERVER_TYPE_BYTES, "x", 1}, {"input_ids", TRITONSERVER_TYPE_INT32, "\0\0\0\0", 4}},
        {{"text_input", TRITONSERVER_TYPE_BYTES, "\xff\xfe", 2}, {"messages", TRITONSERVER_TYPE_BYTES, "[", 1}},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        TRITONBACKEND_Request *r = host_request(wrong[i], 2);
        give(&s, r);
        host_outcome o = end_of(r);
        assert_int_equal(o.num_errors, 1);
        assert_int_equal(o.num_responses, 1);
    }
    TRITONBACKEND_Request *none = host_request(NULL, 0);
    give(&s, none);
    assert_int_equal(end_of(none).num_errors, 1);
    stop(&s);
    served_free(&s);
    must(finalize(NULL));
    assert_int_equal(host_leaks(), 0);
}

static void test_a_cancelled_request_ends(void **state) {
    (void)state;
    must(initialize(NULL));
    served s = served_new();
    assert_true(start(&s));
    TRITONBACKEND_Request *r = question("Count: one, two,", 200, true);
    give(&s, r);
    host_request_cancel(r);
    end_of(r);
    r = question("The capital of France is", 2, false); /* its slot is free again */
    give(&s, r);
    assert_int_equal(end_of(r).num_errors, 0);
    stop(&s);
    served_free(&s);
    must(finalize(NULL));
    assert_int_equal(host_leaks(), 0);
}

static void test_an_unload_ends_all_requests(void **state) {
    (void)state;
    must(initialize(NULL));
    served s = served_new();
    assert_true(start(&s));
    TRITONBACKEND_Request *all[6];
    for (size_t i = 0; i < 6; i++) {
        all[i] = question("Count: one, two,", 200, i % 2 == 0);
        give(&s, all[i]);
    }
    stop(&s);
    for (size_t i = 0; i < 6; i++) {
        end_of(all[i]);
    }
    served_free(&s);
    must(finalize(NULL));
    assert_int_equal(host_leaks(), 0);
}

/* The model stays; only what a request needs fails. */
static void test_every_call_of_a_request_fails_once(void **state) {
    (void)state;
    must(initialize(NULL));
    served s = served_new();
    assert_true(start(&s));
    const long metrics = host_live(HOST_METRIC), families = host_live(HOST_FAMILY);
    bool any = true;
    uint64_t nth = 0;
    while (any) {
        TRITONBACKEND_Request *r = question("The capital of France is", 3, nth % 2 == 0);
        host_outcome o;
        host_fail(++nth);
        if (forget(execute(s.instance, &r, 1))) { /* else it is Triton's as before */
            assert_true(host_request_wait(r, &o, PATIENCE_S));
            assert_int_equal(o.num_finals, 1);
            assert_true(o.is_released); /* a release that fails is tried again */
        }
        any = host_has_failed();
        host_fail(0);
        host_request_free(r);
        assert_true(nth < 500);
    }
    print_message("%llu calls\n", (unsigned long long)nth - 1);
    assert_true(nth > 30);
    TRITONBACKEND_Request *r = question("The capital of France is", 3, false);
    give(&s, r);
    assert_int_equal(end_of(r).num_errors, 0);
    assert_int_equal(host_live(HOST_METRIC), metrics);
    assert_int_equal(host_live(HOST_FAMILY), families);
    stop(&s);
    served_free(&s);
    must(finalize(NULL));
    assert_int_equal(host_leaks(), 0);
}

static void test_every_call_of_a_load_fails_once(void **state) {
    (void)state;
    bool any = true;
    uint64_t nth = 0;
    while (any) {
        served s = served_new();
        host_fail(++nth);
        if (forget(initialize(NULL))) {
            bool loaded = start(&s);
            any = host_has_failed();
            host_fail(0);
            if (loaded) { /* then it works */
                TRITONBACKEND_Request *r = question("The", 1, false);
                give(&s, r);
                assert_int_equal(end_of(r).num_errors, 0);
            }
            stop(&s);
            must(finalize(NULL));
        }
        host_fail(0);
        served_free(&s);
        assert_int_equal(host_leaks(), 0);
        assert_true(nth < 500);
    }
    print_message("%llu calls\n", (unsigned long long)nth - 1);
    assert_true(nth > 10);
}

int main(void) {
    if (getenv("KVF_MODEL") == NULL || access(getenv("KVF_MODEL"), R_OK) != 0) {
        fprintf(stderr, "KVF_MODEL names no model: run this by make\n");
        return 77;
    }
    setenv("GOMP_SPINCOUNT", "100", 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_an_old_server_is_refused),
        cmocka_unit_test(test_each_request_ends_once),
        cmocka_unit_test(test_wrong_requests_end_in_one_error),
        cmocka_unit_test(test_a_cancelled_request_ends),
        cmocka_unit_test(test_an_unload_ends_all_requests),
        cmocka_unit_test(test_every_call_of_a_request_fails_once),
        cmocka_unit_test(test_every_call_of_a_load_fails_once),
    };
    return cmocka_run_group_tests(tests, load_library, NULL);
}
