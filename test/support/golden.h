/* SPDX-License-Identifier: Apache-2.0
 *
 * The golden files of test/golden, for the unit tests. A missing file or name fails the test.
 */
#ifndef KVFT_GOLDEN_H
#define KVFT_GOLDEN_H

#include <stdio.h>
#include <stdlib.h>

#include "base/base.h"

static inline size_t kvft_golden_file(const char *name, uint8_t *out, size_t cap) {
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", KVFT_GOLDEN, name);
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        fprintf(stderr, "no golden file %s\n", path);
        abort();
    }
    size_t len = fread(out, 1, cap, file);
    fclose(file);
    return len;
}

/* The line "name = hex" of vectors.txt, as 32 bytes. */
static inline void kvft_golden_vector(const char *name, uint8_t out[32]) {
    char text[8192];
    size_t len = kvft_golden_file("vectors.txt", (uint8_t *)text, sizeof text - 1);
    text[len] = '\0';
    for (char *line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        char *hex = strstr(line, " = ");
        if (hex != NULL && (size_t)(hex - line) == strlen(name) && memcmp(line, name, strlen(name)) == 0 &&
            kvfi_unhex(out, hex + 3, 32)) {
            return;
        }
    }
    fprintf(stderr, "no vector %s\n", name);
    abort();
}

/* The space, tokens and payload that the vectors are about. */
#define KVFT_GOLDEN_FIELDS                                                           \
    {                                                                                \
        {"tenant", "acme \xc3\xa9"}, {"kv", "f16 LHTD"}, {"model", "sha256:0123"}, { \
            "engine", "test 1"                                                       \
        }                                                                            \
    }
#define KVFT_GOLDEN_SECRET  "a tenant's secret"
#define KVFT_GOLDEN_PAYLOAD 1000u
#define KVFT_GOLDEN_STORED  1700000000

static inline void kvft_golden_tokens(uint32_t out[40]) {
    for (uint32_t i = 0; i < 40; i++) {
        out[i] = i * 2654435761u + 7;
    }
}

static inline void kvft_golden_payload(uint8_t out[KVFT_GOLDEN_PAYLOAD]) {
    for (uint32_t i = 0; i < KVFT_GOLDEN_PAYLOAD; i++) {
        out[i] = (uint8_t)(i * 31 + 7);
    }
}

#endif
