/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory that grows, and whole files in it.
 */
#include "common/cli.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

bool kvfcli_grow(void *array, size_t *cap, size_t need, size_t size) {
    void *memory;
    memcpy(&memory, array, sizeof memory); /* of any type of pointer */
    if (need <= *cap) {
        return true;
    }
    size_t room = *cap * 2 > need ? *cap * 2 : need + 64;
    void *moved = reallocarray(memory, room, size);
    if (moved == NULL) {
        return false;
    }
    memcpy(array, &moved, sizeof moved);
    *cap = room;
    return true;
}

bool kvfcli_string_add(kvfcli_string *string, const char *text, size_t len) {
    if (!kvfcli_grow(&string->text, &string->cap, string->len + len + 1, 1)) {
        return false;
    }
    if (len > 0) {
        memcpy(string->text + string->len, text, len);
    }
    string->len += len;
    string->text[string->len] = '\0';
    return true;
}

void kvfcli_string_cleanup(kvfcli_string *string) {
    free(string->text);
    *string = (kvfcli_string){0};
}

/* ---- files ---- */

bool kvfcli_is_std(const char *path) {
    return path == NULL || strcmp(path, "-") == 0;
}

static int read_stream(kvfcli_string *out, FILE *in, const char *name, size_t max_bytes) {
    char chunk[65536];
    size_t len;
    errno = 0;
    while ((len = fread(chunk, 1, sizeof chunk, in)) > 0) {
        if (!kvfcli_string_add(out, chunk, len)) {
            return kvfcli_no_memory();
        }
        if (out->len > max_bytes) {
            kvfcli_say("%s: longer than %zu MiB", name, max_bytes >> 20);
            return KVFCLI_INPUT;
        }
    }
    if (ferror(in)) {
        kvfcli_say("%s: %s", name, strerror(errno));
        return KVFCLI_INPUT;
    }
    return KVFCLI_FINE;
}

int kvfcli_read_file(kvfcli_string *out, const char *path, size_t max_bytes) {
    if (kvfcli_is_std(path)) {
        return read_stream(out, stdin, "stdin", max_bytes);
    }
    FILE *in = fopen(path, "rb");
    if (in == NULL) {
        kvfcli_say("%s: %s", path, strerror(errno));
        return KVFCLI_INPUT;
    }
    int code = read_stream(out, in, path, max_bytes);
    fclose(in);
    return code;
}
