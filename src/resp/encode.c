/* SPDX-License-Identifier: Apache-2.0
 *
 * Writes Redis commands in RESP into a buffer of the caller.
 */
#include "resp/encode.h"

#include <string.h>

static void put(kvfi_cmd *cmd, const void *bytes, size_t len) {
    if (cmd->full || len > cmd->cap - cmd->len) {
        cmd->full = true;
        return;
    }
    if (len > 0) {
        memcpy(cmd->data + cmd->len, bytes, len);
    }
    cmd->len += len;
}

/* <kind><number>\r\n */
static void put_line(kvfi_cmd *cmd, char kind, uint64_t number) {
    char line[24];
    size_t at = sizeof line;
    line[--at] = '\n';
    line[--at] = '\r';
    do {
        line[--at] = (char)('0' + number % 10);
        number /= 10;
    } while (number > 0);
    line[--at] = kind;
    put(cmd, line + at, sizeof line - at);
}

void kvfi_cmd_array(kvfi_cmd *cmd, size_t num_bulks) {
    put_line(cmd, '*', num_bulks);
}

void kvfi_cmd_bulk_header(kvfi_cmd *cmd, uint64_t len) {
    put_line(cmd, '$', len);
}

void kvfi_cmd_crlf(kvfi_cmd *cmd) {
    put(cmd, "\r\n", 2);
}

void kvfi_cmd_bulk(kvfi_cmd *cmd, const void *bytes, size_t len) {
    kvfi_cmd_bulk_header(cmd, len);
    put(cmd, bytes, len);
    kvfi_cmd_crlf(cmd);
}

void kvfi_cmd_text(kvfi_cmd *cmd, const char *text) {
    kvfi_cmd_bulk(cmd, text, strlen(text));
}

void kvfi_cmd_number(kvfi_cmd *cmd, uint64_t number) {
    char digits[20];
    size_t at = sizeof digits;
    do {
        digits[--at] = (char)('0' + number % 10);
        number /= 10;
    } while (number > 0);
    kvfi_cmd_bulk(cmd, digits + at, sizeof digits - at);
}
