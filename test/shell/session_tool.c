/* SPDX-License-Identifier: Apache-2.0
 *
 * Saves and loads sessions by the public C API from a shell, for article.sh. Exit status: 0, 3 if there is no (whole)
 * session, 1 for any other failure.
 *
 *   session_tool save URL ID KEYS_FILE VALUES_FILE DTYPE DIM...    both arrays have that dtype and shape
 *   session_tool save-pieces ...                                   the same, the arrays in pieces
 *   session_tool load URL ID KEYS_FILE VALUES_FILE                 prints "raw", or "meta DTYPE DIM..." of the keys
 *   session_tool load-raw URL ID KEYS_FILE VALUES_FILE             the same; raw also where the meta does not match
 *   session_tool load-into URL ID KEYS_FILE VALUES_FILE            the same, into memory of the caller, in pieces
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

static void write_file(const char *path, const void *data, size_t len) {
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(data, 1, len, file) != len || fclose(file) != 0) {
        die(path, "can't be written");
    }
}

/* An array in pieces, as an engine has one for each layer. */
enum { PIECES = 30 };
static uint32_t cut(struct iovec iov[PIECES], void *data, size_t len) {
    size_t each = len / PIECES;
    for (size_t i = 0; i < PIECES; i++) {
        iov[i] = (struct iovec){(char *)data + i * each, i + 1 < PIECES ? each : len - i * each};
    }
    return PIECES;
}

static int save(kvf_store *store, int argc, char **argv) {
    kvf_tensor k = {0}, v = {0};
    kvf_error err = {0};
    struct iovec k_iov[PIECES], v_iov[PIECES];
    void *keys = read_file(argv[4], &k.len), *values = read_file(argv[5], &v.len);
    snprintf(k.dtype, sizeof k.dtype, "%s", argc > 6 ? argv[6] : "");
    for (int i = 7; i < argc && k.num_dims < KVF_MAX_DIMS; i++) {
        k.dims[k.num_dims++] = strtoull(argv[i], NULL, 10);
    }
    memcpy(v.dtype, k.dtype, sizeof v.dtype);
    memcpy(v.dims, k.dims, sizeof v.dims);
    v.num_dims = k.num_dims;
    if (strcmp(argv[1], "save-pieces") == 0) {
        k.num_iov = cut(k_iov, keys, k.len);
        v.num_iov = cut(v_iov, values, v.len);
        k.iov = k_iov;
        v.iov = v_iov;
    } else {
        k.data = keys;
        v.data = values;
    }
    kvf_status status = kvf_session_save(store, &err, argv[3], &k, &v, NULL);
    free(keys);
    free(values);
    if (status != KVF_OK) {
        die("save", err.what);
    }
    return 0;
}

static kvf_status try_load(kvf_store *store, kvf_session **out, kvf_error *err, const char *id,
                           const kvf_session_load_options *options) {
    kvf_status status = kvf_session_load_with(store, out, err, id, options);
    if (status == KVF_MISS) {
        printf("%s\n", err->what);
    } else if (status != KVF_OK) {
        die("load", err->what);
    }
    return status;
}

static void print(const kvf_session *session) {
    printf("%s", session->has_meta ? "meta" : "raw");
    if (session->has_meta) {
        printf(" %s", session->k.dtype);
    }
    for (uint32_t i = 0; i < session->k.num_dims; i++) {
        printf(" %llu", (unsigned long long)session->k.dims[i]);
    }
    printf("\n");
}

static int load(kvf_store *store, char **argv) {
    kvf_session *session = NULL;
    kvf_error err = {0};
    kvf_session_load_options options = {.struct_size = sizeof options,
                                        .flags = strcmp(argv[1], "load-raw") == 0 ? KVF_SESSION_RAW : 0};
    if (try_load(store, &session, &err, argv[3], &options) != KVF_OK) {
        return 3;
    }
    write_file(argv[4], session->k.data, session->k.len);
    write_file(argv[5], session->v.data, session->v.len);
    print(session);
    kvf_session_free(session);
    return 0;
}

/* Looks how long the arrays are, and loads them into memory of its own, in pieces. */
static int load_into(kvf_store *store, char **argv) {
    kvf_session *look = NULL, *session = NULL;
    kvf_error err = {0};
    struct iovec k_iov[PIECES], v_iov[PIECES];
    kvf_session_load_options options = {.struct_size = sizeof options, .flags = KVF_SESSION_LOOK};
    if (try_load(store, &look, &err, argv[3], &options) != KVF_OK) {
        return 3;
    }
    void *keys = malloc(look->k.len + 1), *values = malloc(look->v.len + 1);
    options.flags = 0;
    options.num_k_iov = cut(k_iov, keys, look->k.len);
    options.num_v_iov = cut(v_iov, values, look->v.len);
    options.k_iov = k_iov;
    options.v_iov = v_iov;
    int rc = try_load(store, &session, &err, argv[3], &options) == KVF_OK ? 0 : 3;
    if (rc == 0) {
        write_file(argv[4], keys, look->k.len);
        write_file(argv[5], values, look->v.len);
        print(look);
    }
    free(keys);
    free(values);
    kvf_session_free(look);
    kvf_session_free(session);
    return rc;
}

int main(int argc, char **argv) {
    kvf_store *store = NULL;
    kvf_error err = {0};
    if (argc < 6 || (strncmp(argv[1], "save", 4) != 0 && strncmp(argv[1], "load", 4) != 0)) {
        die("usage", "save|save-pieces|load|load-raw|load-into URL ID KEYS_FILE VALUES_FILE [DTYPE DIM...]");
    }
    const char *url = argv[2], *secret = getenv("KVFERRY_SECRET_FILE");
    kvf_options options = {.struct_size = sizeof options, .secret_files = secret, .seal_sessions = secret != NULL};
    if (kvf_store_open(&store, &err, &url, 1, &options) != KVF_OK) {
        die(url, err.what);
    }
    int rc = strncmp(argv[1], "save", 4) == 0    ? save(store, argc, argv)
             : strcmp(argv[1], "load-into") == 0 ? load_into(store, argv)
                                                 : load(store, argv);
    kvf_store_close(store);
    return rc;
}
