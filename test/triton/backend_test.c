/* SPDX-License-Identifier: Apache-2.0
 *
 * The backend under the stub host, with a real model (KVF_MODEL): one release and one final flag for each request, nothing
 * left behind, whatever call of the server fails.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "host.h"
#include "support/kit.h"
#include <kvferry/admin.h>
#include <kvferry/kvferry.h>

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

/* The n-th allocation of the library fails, in whatever thread. (llama.cpp is C++, and ends the program where it has no
 * memory for a small thing; nobody can mend that here.) A sanitizer has allocators of its own. */
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define CAN_FAIL_MEMORY 1
static uintptr_t library_begin, library_end;
static atomic_uint_fast64_t until_no_memory;
static atomic_bool memory_failed;

extern void *__libc_malloc(size_t);          // NOLINT: glibc's name
extern void *__libc_calloc(size_t, size_t);  // NOLINT
extern void *__libc_realloc(void *, size_t); // NOLINT

static bool is_denied(const void *caller) {
    const uintptr_t at = (uintptr_t)caller;
    if (until_no_memory == 0 || at < library_begin || at >= library_end || atomic_fetch_sub(&until_no_memory, 1) != 1) {
        return false;
    }
    memory_failed = true;
    errno = ENOMEM;
    return true;
}

__attribute__((visibility("default"))) void *malloc(size_t bytes) {
    return is_denied(__builtin_return_address(0)) ? NULL : __libc_malloc(bytes);
}

__attribute__((visibility("default"))) void *calloc(size_t num, size_t bytes) {
    return is_denied(__builtin_return_address(0)) ? NULL : __libc_calloc(num, bytes);
}

__attribute__((visibility("default"))) void *realloc(void *old, size_t bytes) {
    return is_denied(__builtin_return_address(0)) ? NULL : __libc_realloc(old, bytes);
}

static int note_bounds(struct dl_phdr_info *info, size_t size, void *unused) {
    (void)size, (void)unused;
    if (strcmp(info->dlpi_name, KVFT_LIBRARY) != 0) {
        return 0;
    }
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type == PT_LOAD && (info->dlpi_phdr[i].p_flags & PF_X) != 0) {
            library_begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
            library_end = library_begin + info->dlpi_phdr[i].p_memsz;
        }
    }
    return 1;
}
#endif

static int load_library(void **state) {
    (void)state;
#ifdef CAN_FAIL_MEMORY
    host_calloc = __libc_calloc;
#endif
    void *library = dlopen(KVFT_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fail_msg("%s", dlerror());
    }
#ifdef CAN_FAIL_MEMORY
    assert_int_equal(dl_iterate_phdr(note_bounds, NULL), 1);
#endif
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

static served served_with(const char *store) {
    char config[1024];
    snprintf(config, sizeof config,
             "{\"name\":\"model\",\"max_batch_size\":0,\"parameters\":{\"model\":{\"string_value\":\"%s\"},"
             "\"slots\":{\"string_value\":\"2\"},\"context_size\":{\"string_value\":\"256\"},"
             "\"threads\":{\"string_value\":\"1\"},\"store\":{\"string_value\":\"%s\"}}}",
             getenv("KVF_MODEL"), store);
    served s = {.model = host_model(config, "/nowhere")};
    s.instance = host_instance(s.model);
    return s;
}

static served served_new(void) {
    return served_with("mem:");
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

/* Gives one request with these inputs, and waits for its end. */
static host_outcome ask(const served *s, const host_input *inputs, uint32_t num) {
    TRITONBACKEND_Request *r = host_request(inputs, num);
    give(s, r);
    return end_of(r);
}

static host_input text(const char *name, const char *value) {
    return (host_input){name, TRITONSERVER_TYPE_BYTES, value, strlen(value)};
}

static host_outcome ask_session(const served *s, const char *id, const char *what, int32_t max_tokens) {
    const host_input inputs[] = {text("text_input", what),
                                 text("session_id", id),
                                 {"max_tokens", TRITONSERVER_TYPE_INT32, &max_tokens, sizeof max_tokens}};
    return ask(s, inputs, 3);
}

static served started(const char *store) {
    must(initialize(NULL));
    served s = served_with(store);
    assert_true(start(&s));
    return s;
}

static void ended(served *s) {
    stop(s);
    served_free(s);
    must(finalize(NULL));
    assert_int_equal(host_leaks(), 0);
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

/* What only another host than Triton would hand over; and what the one of today lets through. */
static void test_tensors_that_lie_end_in_one_error(void **state) {
    (void)state;
    static const char stops[] = "\1\0\0\0x\1\0\0\0x\1\0\0\0x\1\0\0\0x"
                                "\1\0\0\0x\1\0\0\0x\1\0\0\0x\1\0\0\0x"
                                "\1\0\0\0x\1\0\0\0x\1\0\0\0x\1\0\0\0x"
                                "\1\0\0\0x\1\0\0\0x\1\0\0\0x\1\0\0\0x";
    static const char messages[] = "[{\"role\":\"user\",\"content\":\"x\"}]\0]";
    const host_input one = {"text_input", TRITONSERVER_TYPE_BYTES, "\1\0\0\0x", 5};
    const host_input sixteen = {"stop", TRITONSERVER_TYPE_BYTES, stops, sizeof stops - 1};
    const struct {
        host_input inputs[3];
        host_lie lie; /* of the last of them; a text before it is raw too */
    } lies[] = {
        {{{"text_input", TRITONSERVER_TYPE_BYTES, "\1\0\0", 3}}, {.raw = true}},
        {{{"text_input", TRITONSERVER_TYPE_BYTES, "\2\0\0\0x", 5}}, {.raw = true}},
        {{{"text_input", TRITONSERVER_TYPE_BYTES, "\xff\xff\xff\xffx", 5}}, {.raw = true}},
        {{{"text_input", TRITONSERVER_TYPE_BYTES, "\1\0\0\0xyz", 7}}, {.raw = true}},
        {{one}, {.raw = true, .num = 2}},
        {{one}, {.raw = true, .num = -1}},
        {{one}, {.raw = true, .num = INT64_MAX}},
        {{one}, {.raw = true, .claimed = 4}},
        {{one}, {.raw = true, .claimed = 50}},
        {{one}, {.raw = true, .claimed = UINT64_MAX}},
        {{one}, {.raw = true, .claimed = UINT64_MAX - 1}},
        {{one}, {.raw = true, .memory = TRITONSERVER_MEMORY_GPU}},
        {{one, {"stop", TRITONSERVER_TYPE_BYTES, "\1\0\0\0xyz", 7}}, {.raw = true}},
        {{one, {"stop", TRITONSERVER_TYPE_BYTES, "\1\0\0\0x", 5}}, {.raw = true, .num = 2}},
        {{one, {"temperature", TRITONSERVER_TYPE_FP32, "\0\0\xc0\x7f", 4}}, {.raw = false}},
        {{one, {"temperature", TRITONSERVER_TYPE_FP32, "\0\0\0\0\0", 5}}, {.raw = false}},
        {{{"input_ids", TRITONSERVER_TYPE_INT32, "\1\0\0\0\1", 5}}, {.raw = false}},
        {{{"messages", TRITONSERVER_TYPE_BYTES, messages, sizeof messages - 1}}, {.raw = false}},
        {{one, sixteen, sixteen}, {.raw = true, .num = 16}}, /* more texts than there is room for */
    };
    served s = started("mem:");
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        const uint32_t num = lies[i].inputs[1].name == NULL ? 1 : lies[i].inputs[2].name == NULL ? 2 : 3;
        TRITONBACKEND_Request *r = host_request(lies[i].inputs, num);
        if (num > 1) {
            host_request_lie(r, 0, &(host_lie){.raw = true});
        }
        if (num > 2) {
            host_request_lie(r, 1, &lies[i].lie);
        }
        host_request_lie(r, num - 1, &lies[i].lie);
        give(&s, r);
        host_outcome o = end_of(r);
        if (o.num_errors != 1 || o.num_responses != 1) {
            fail_msg("lie %zu is answered", i);
        }
    }
    const host_input sound[] = {{"text_input", TRITONSERVER_TYPE_BYTES, "The", 3}, sixteen};
    TRITONBACKEND_Request *r = host_request(sound, 2);
    host_request_lie(r, 0, &(host_lie){.num_buffers = 5});
    host_request_lie(r, 1, &(host_lie){.raw = true, .num = 16});
    give(&s, r);
    assert_int_equal(end_of(r).num_errors, 0);
    ended(&s);
}

static void test_a_timeout_may_be_any_number(void **state) {
    (void)state;
    static const uint64_t far[] = {UINT64_MAX, UINT64_MAX / 1000, UINT64_MAX / 1000 + 1, (uint64_t)1 << 61};
    served s = started("mem:");
    for (size_t i = 0; i < sizeof far / sizeof *far; i++) {
        TRITONBACKEND_Request *r = question("The", 1, false);
        host_request_timeout(r, far[i]);
        give(&s, r);
        host_outcome o = end_of(r);
        if (o.num_errors != 0) {
            fail_msg("%llu: %s", (unsigned long long)far[i], o.error);
        }
    }
    ended(&s);
}

static void test_a_tiny_temperature_is_as_none(void **state) {
    (void)state;
    static const float least[] = {0, 1e-45f, 1e-38f, 1e-30f, 1e-7f, 1e-4f};
    host_outcome greedy = {.is_released = false};
    const int32_t max_tokens = 6;
    served s = started("mem:");
    for (size_t i = 0; i < sizeof least / sizeof *least; i++) {
        const host_input inputs[] = {text("text_input", "The capital of France is"),
                                     {"max_tokens", TRITONSERVER_TYPE_INT32, &max_tokens, sizeof max_tokens},
                                     {"temperature", TRITONSERVER_TYPE_FP32, &least[i], sizeof least[i]}};
        host_outcome o = ask(&s, inputs, 3);
        greedy = i == 0 ? o : greedy;
        assert_string_equal(o.text, greedy.text);
    }
    ended(&s);
}

/* Of two requests that go on from the same turn only one becomes a turn, and only one says so. */
static void test_a_place_in_a_session_is_taken_once(void **state) {
    (void)state;
    const int32_t max_tokens = 24;
    served s = started("mem:");
    TRITONBACKEND_Request *both[2];
    for (int i = 0; i < 2; i++) {
        const host_input inputs[] = {text("text_input", i == 0 ? "I am Ada." : "I am Bob."),
                                     text("session_id", "s"),
                                     {"max_tokens", TRITONSERVER_TYPE_INT32, &max_tokens, sizeof max_tokens}};
        both[i] = host_request(inputs, 3);
    }
    must(execute(s.instance, both, 2));
    host_outcome a = end_of(both[0]), b = end_of(both[1]);
    assert_int_equal(a.num_errors + b.num_errors, 0);
    assert_int_equal(a.session_stored + b.session_stored, 1);
    assert_true(ask_session(&s, "s", "And?", 2).session_stored);
    ended(&s);
}

static void test_a_session_is_what_the_client_saw(void **state) {
    (void)state;
    const int32_t max_tokens = 24;
    char messages[2048];
    served s = started("mem:");
    host_outcome whole = ask_session(&s, "whole", "Count from one to ten.", max_tokens);
    const char stop_text[5] = {whole.text[8], whole.text[9], whole.text[10], whole.text[11]};
    const host_input cut_inputs[] = {text("text_input", "Count from one to ten."),
                                     text("session_id", "cut"),
                                     {"max_tokens", TRITONSERVER_TYPE_INT32, &max_tokens, sizeof max_tokens},
                                     text("stop", stop_text)};
    host_outcome cut = ask(&s, cut_inputs, 4);
    assert_true(cut.session_stored && strlen(cut.text) < strlen(whole.text) && strpbrk(cut.text, "\"\\") == NULL);
    size_t used = 0;
    used += (size_t)snprintf(messages, sizeof messages,
                             "[{\"role\":\"user\",\"content\":\"Count from one to ten.\"},"
                             "{\"role\":\"assistant\",\"content\":\"");
    for (const char *c = cut.text; *c != '\0'; c++) {
        used += (size_t)snprintf(messages + used, sizeof messages - used, *c == '\n' ? "\\n" : "%c", *c);
    }
    snprintf(messages + used, sizeof messages - used, "\"},{\"role\":\"user\",\"content\":\"Go on.\"}]");
    const host_input told[] = {text("messages", messages),
                               {"max_tokens", TRITONSERVER_TYPE_INT32, &max_tokens, sizeof max_tokens}};
    host_outcome expected = ask(&s, told, 2), got = ask_session(&s, "cut", "Go on.", max_tokens);
    assert_int_equal(got.prompt_tokens, expected.prompt_tokens);
    assert_string_equal(got.text, expected.text);

    host_outcome computed = ask_session(&s, "zero", "Hello there.", 0); /* no turn */
    assert_false(computed.session_stored);
    assert_int_equal(ask_session(&s, "zero", "Hello there.", 2).prompt_tokens, computed.prompt_tokens);
    ended(&s);
}

/* Writes the first turn of this session anew, with a token that no model has. As somebody who may write to the store. */
static void forge_turn(const char *url, const char *id) {
    const kvf_field fields[] = {{"engine", "kvferry run"}, {"model", "chat"}, {"kv", "json"}};
    const kvf_space_options options = {.struct_size = sizeof options, .block_tokens = 1};
    kvf_store *store;
    kvf_space *space;
    kvf_error err;
    kvf_found found;
    kvf_key key;
    kvf_digest digest;
    char name[64];
    size_t run;
    assert_int_equal(kvf_store_open(&store, &err, &url, 1, NULL), KVF_OK);
    assert_int_equal(kvf_space_open(&space, &err, store, fields, 3, &options), KVF_OK);
    kvf_key_of(space, &key, name, (size_t)snprintf(name, sizeof name, "%s/0", id));
    assert_int_equal(kvf_match(space, &run, &found, &key, 1, KVF_DEFAULT), KVF_OK);
    assert_int_equal(run, 1);
    char *turn = calloc(1, (size_t)found.payload_bytes + 1);
    struct iovec iov = {turn, (size_t)found.payload_bytes};
    kvf_block block = {.key = key, .iov = &iov, .num_iov = 1};
    assert_non_null(turn);
    assert_int_equal(kvf_load(space, &block, 1, NULL, KVF_DEFAULT), 1);
    char *said = strstr(turn, "\"said\":[");
    assert_non_null(said);
    for (said += 8; *said != ']'; said++) {
        *said = *said == ',' ? ',' : '9';
    }
    assert_non_null(strstr(turn, "99999")); /* one with five digits, which is more than the vocabulary has */
    kvf_space_digest(space, &digest);
    assert_int_equal(kvf_remove(store, &err, &digest, &key), KVF_OK);
    kvf_forget(space, &key, 1);
    assert_int_equal(kvf_save(space, &block, 1, NULL), 1);
    assert_int_equal(kvf_store_flush(store, NULL, KVF_MS(10000)), KVF_OK);
    kvf_space_close(space);
    kvf_store_close(store);
    free(turn);
}

/* Ids of a stored turn that the model does not have: its batch would fail, and with it the answers of others. */
static void test_a_forged_turn_harms_nobody(void **state) {
    (void)state;
    char *dir = kvft_temp_dir(), url[400];
    const char *greeting = "Hello there, what is your name?";
    snprintf(url, sizeof url, "file:%s", dir);
    served s = started(url);
    assert_true(ask_session(&s, "s", greeting, 8).session_stored);
    ended(&s);
    forge_turn(url, "s");
    s = started(url);
    TRITONBACKEND_Request *other = question("Once upon a time", 100, false);
    give(&s, other);
    host_outcome forged = ask_session(&s, "s", "And mine?", 4), o = end_of(other);
    if (o.num_errors + forged.num_errors > 0) {
        fail_msg("the other: \"%s\", the session: \"%s\"", o.error, forged.error);
    }
    ended(&s);
    kvft_remove_dir(dir);
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

/* With a session each time, for the clerk's part. */
static void test_every_allocation_of_a_request_fails_once(void **state) {
    (void)state;
#ifndef CAN_FAIL_MEMORY
    skip();
#else
    served s = started("mem:");
    uint64_t nth = 0;
    do {
        char id[32];
        snprintf(id, sizeof id, "%llu", (unsigned long long)nth / 2);
        memory_failed = false;
        until_no_memory = ++nth;
        ask_session(&s, id, "The capital of France is", 2);
        until_no_memory = 0;
        assert_true(nth < 1000);
    } while (memory_failed);
    print_message("%llu allocations\n", (unsigned long long)nth - 1);
    assert_true(nth > 20);
    assert_int_equal(ask_session(&s, "sound", "The capital of France is", 2).num_errors, 0);
    ended(&s);
#endif
}

static void test_every_allocation_of_a_load_fails_once(void **state) {
    (void)state;
#ifndef CAN_FAIL_MEMORY
    skip();
#else
    uint64_t nth = 0;
    do {
        must(initialize(NULL));
        served s = served_with("mem:");
        memory_failed = false;
        until_no_memory = ++nth;
        bool loaded = start(&s);
        until_no_memory = 0;
        if (loaded) {
            TRITONBACKEND_Request *r = question("The", 1, false);
            give(&s, r);
            assert_int_equal(end_of(r).num_errors, 0);
        }
        ended(&s);
        assert_true(nth < 3000);
        nth += nth > 40 ? 1 + nth / 10 : 0; /* the later ones are many of a kind */
    } while (memory_failed);
    assert_true(nth > 20);
#endif
}

static size_t num_entries(const char *folder) {
    DIR *dir = opendir(folder);
    size_t num = 0;
    assert_non_null(dir);
    while (readdir(dir) != NULL) {
        num++;
    }
    closedir(dir);
    return num;
}

static long resident_kb(void) {
    FILE *f = fopen("/proc/self/statm", "re");
    long pages = 0;
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%*d %ld", &pages), 1);
    fclose(f);
    return pages * 4;
}

static long times_of(const char *name, long usual) {
    const char *text = getenv(name);
    return text != NULL ? strtol(text, NULL, 10) : usual;
}

/* KVFT_LOADS and KVFT_REQUESTS make it longer. */
static void test_nothing_is_left_and_nothing_grows(void **state) {
    (void)state;
    const long loads = times_of("KVFT_LOADS", 4), requests = times_of("KVFT_REQUESTS", 200);
    size_t files = 0, threads = 0;
    long before = 0;
    for (long i = 0; i < loads; i++) {
        served s = started("mem:");
        ask_session(&s, "s", "The", 1);
        ended(&s);
        if (i == 0) {
            files = num_entries("/proc/self/fd");
            threads = num_entries("/proc/self/task");
        }
    }
    assert_int_equal(num_entries("/proc/self/fd"), files);
    assert_int_equal(num_entries("/proc/self/task"), threads);
    served s = started("mem:?max=1M");
    for (long i = 0; i < requests; i++) {
        before = i == requests / 10 ? resident_kb() : before;
        TRITONBACKEND_Request *r = question("The", 1, i % 2 == 0);
        give(&s, r);
        assert_int_equal(end_of(r).num_errors, 0);
    }
    print_message("%ld loads; %ld KB more after %ld requests\n", loads, resident_kb() - before, requests);
    assert_true(resident_kb() - before < 8000);
    ended(&s);
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
        cmocka_unit_test(test_tensors_that_lie_end_in_one_error),
        cmocka_unit_test(test_a_timeout_may_be_any_number),
        cmocka_unit_test(test_a_tiny_temperature_is_as_none),
        cmocka_unit_test(test_a_place_in_a_session_is_taken_once),
        cmocka_unit_test(test_a_session_is_what_the_client_saw),
        cmocka_unit_test(test_a_forged_turn_harms_nobody),
        cmocka_unit_test(test_a_cancelled_request_ends),
        cmocka_unit_test(test_an_unload_ends_all_requests),
        cmocka_unit_test(test_every_call_of_a_request_fails_once),
        cmocka_unit_test(test_every_call_of_a_load_fails_once),
        cmocka_unit_test(test_every_allocation_of_a_request_fails_once),
        cmocka_unit_test(test_every_allocation_of_a_load_fails_once),
        cmocka_unit_test(test_nothing_is_left_and_nothing_grows),
    };
    return cmocka_run_group_tests(tests, load_library, NULL);
}
