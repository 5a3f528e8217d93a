/* SPDX-License-Identifier: Apache-2.0
 *
 * What --cache-config says (docs/triton.md has the table).
 */
#ifndef KVFR_OPTIONS_H
#define KVFR_OPTIONS_H
#include "triton/cache/fail.h"

#define KVFR_MAX_URLS   8u
#define KVFR_TEXT_BYTES 4096u

typedef struct kvfr_options {
    /* The store: URLs, fastest first, in `text`. */
    const char *urls[KVFR_MAX_URLS];
    size_t num_urls;
    char text[KVFR_TEXT_BYTES];
    /* Folders of models, with ':' between them; "none"; "" where nothing is said. */
    char models[KVFR_TEXT_BYTES];
    /* "" is none. */
    char namespace_[KVFR_TEXT_BYTES];
    char secret_files[KVFR_TEXT_BYTES];
    /* The longest time that a lookup may take. */
    int64_t deadline_us;
    /* Answers older than this are not given. 0 = of any age. */
    int64_t ttl_s;
} kvfr_options;

/* Reads the JSON object that Triton makes of --cache-config. An error says which option is wrong, and what it may be. */
TRITONSERVER_Error *kvfr_options_read(kvfr_options *out, const char *json);

#endif
