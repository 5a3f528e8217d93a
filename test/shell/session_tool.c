/* SPDX-License-Identifier: Apache-2.0
 *
 * Saves and loads sessions by the public C API from a shell, for article.sh. Exit status: 0, 3 if there is no (whole)
 * session, 1 for any other failure.
 *
 *   session_tool save URL ID KEYS_FILE VALUES_FILE DTYPE DIM...    both arrays have that dtype and shape
 *   session_tool load URL ID KEYS_FILE VALUES_FILE                 prints "raw", or "meta DTYPE DIM..." of the keys
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvferry/kvferry.h"

static void die(const char *what, const char *why) {
    fprintf(stderr, "session_tool: %s: %s\n", what, why);
    exit(1);
}

static void *read_file(const char *path, size_t *len) {
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
        die(path, "can't be read");
    }
    *len = (size_t)ftell(file);
    void *bytes = malloc(*len + 1);
    rewind(file);
    if (bytes == NULL || fread(bytes, 1, *len, file) != *len) {
        die(path, "can't be read");
    }
    fclose(file);
    return bytes;
}

static void write_file(const char *path, const kvf_tensor *tensor) {
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(tensor->data, 1, tensor->len, file) != tensor->len || fclose(file) != 0) {
        die(path, "can't be written");
    }
}

static int save(kvf_store *store, int argc, char **argv) {
    kvf_tensor k = {0}, v = {0};
    kvf_error err = {0};
    void *keys = read_file(argv[4], &k.len), *values = read_file(argv[5], &v.len);
    snprintf(k.dtype, sizeof k.dtype, "%s", argc > 6 ? argv[6] : "");
    for (int i = 7; i < argc && k.num_dims < KVF_MAX_DIMS; i++) {
        k.dims[k.num_dims++] = strtoull(argv[i], NULL, 10);
    }
    memcpy(v.dtype, k.dtype, sizeof v.dtype);
    memcpy(v.dims, k.dims, sizeof v.dims);
    v.num_dims = k.num_dims;
    k.data = keys;
    v.data = values;
    kvf_status status = kvf_session_save(store, &err, argv[3], &k, &v, NULL);
    free(keys);
    free(values);
    if (status != KVF_OK) {
        die("save", err.what);
    }
    return 0;
}

static int load(kvf_store *store, char **argv) {
    kvf_session *session = NULL;
    kvf_error err = {0};
    kvf_status status = kvf_session_load(store, &session, &err, argv[3], KVF_DEFAULT);
    if (status == KVF_MISS) {
        printf("%s\n", err.what);
        return 3;
    }
    if (status != KVF_OK) {
        die("load", err.what);
    }
    write_file(argv[4], &session->k);
    write_file(argv[5], &session->v);
    printf("%s", session->has_meta ? "meta" : "raw");
    if (session->has_meta) {
        printf(" %s", session->k.dtype);
    }
    for (uint32_t i = 0; i < session->k.num_dims; i++) {
        printf(" %llu", (unsigned long long)session->k.dims[i]);
    }
    printf("\n");
    kvf_session_free(session);
    return 0;
}

int main(int argc, char **argv) {
    kvf_store *store = NULL;
    kvf_error err = {0};
    if (argc < 6 || (strcmp(argv[1], "save") != 0 && strcmp(argv[1], "load") != 0)) {
        die("usage", "save|load URL ID KEYS_FILE VALUES_FILE [DTYPE DIM...]");
    }
    const char *url = argv[2], *secret = getenv("KVFERRY_SECRET_FILE");
    kvf_options options = {.struct_size = sizeof options, .secret_files = secret, .seal_sessions = secret != NULL};
    if (kvf_store_open(&store, &err, &url, 1, &options) != KVF_OK) {
        die(url, err.what);
    }
    int rc = strcmp(argv[1], "save") == 0 ? save(store, argc, argv) : load(store, argv);
    kvf_store_close(store);
    return rc;
}
