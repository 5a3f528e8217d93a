/* SPDX-License-Identifier: Apache-2.0
 *
 * Commands as RESP2 writes them: an array of bulk strings, into a buffer of the caller. Pure: no I/O, no allocation.
 *
 *     kvfi_cmd_array(&cmd, 2);
 *     kvfi_cmd_text(&cmd, "GET");
 *     kvfi_cmd_bulk(&cmd, key, len);
 *
 * A buffer that is too small is marked `full` and takes nothing more: check once, at the end.
 */
#ifndef KVFI_RESP_ENCODE_H
#define KVFI_RESP_ENCODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct kvfi_cmd {
    char *data; /* the caller's */
    size_t cap, len;
    bool full;
} kvfi_cmd;

void kvfi_cmd_array(kvfi_cmd *, size_t num_bulks);
void kvfi_cmd_bulk(kvfi_cmd *, const void *bytes, size_t len);
void kvfi_cmd_text(kvfi_cmd *, const char *text);
void kvfi_cmd_number(kvfi_cmd *, uint64_t number); /* as a bulk, in decimal */
/* Only the "$<len>\r\n" of a bulk. Its bytes follow from elsewhere, then kvfi_cmd_crlf. */
void kvfi_cmd_bulk_header(kvfi_cmd *, uint64_t len);
void kvfi_cmd_crlf(kvfi_cmd *);

#endif
