/* SPDX-License-Identifier: Apache-2.0 */
#include "redis/key.h"

#include <stdio.h>

void kvfi_name_of(kvfi_name *out, const char *prefix, const kvfi_addr *addr, uint64_t part) {
    size_t len = strlen(prefix);
    char *p = out->text;
    memcpy(p, prefix, len);
    p += len;
    *p++ = ':';
    kvfi_hex(p, addr->space, 8);
    p += 16;
    *p++ = ':';
    *p++ = '{';
    kvfi_hex(p, addr->key.bytes, 32);
    p += 64;
    *p++ = '}';
    *p = '\0';
    if (part > 0) {
        p += snprintf(p, 12, ":%u", (unsigned)part);
    }
    out->len = (size_t)(p - out->text);
}

/* 2 * num digits in the middle of a name. */
static bool unhex(uint8_t *out, const char *digits, size_t num) {
    char text[65];
    memcpy(text, digits, 2 * num);
    text[2 * num] = '\0';
    return kvfi_unhex(out, text, num);
}

bool kvfi_name_parse(kvfi_addr *out, uint64_t *out_part, const char *prefix, const char *name, size_t len) {
    size_t before = strlen(prefix);
    size_t whole = before + 1 + 16 + 1 + 66;
    *out = (kvfi_addr){0};
    *out_part = 0;
    if (len < whole || memcmp(name, prefix, before) != 0) {
        return false;
    }
    const char *p = name + before;
    if (p[0] != ':' || p[17] != ':' || p[18] != '{' || p[83] != '}' || !unhex(out->space, p + 1, 8) ||
        !unhex(out->key.bytes, p + 19, 32)) {
        return false;
    }
    if (len == whole) {
        return true;
    }
    return name[whole] == ':' && kvfi_parse_u64(out_part, name + whole + 1, len - whole - 1) && *out_part > 0 &&
           *out_part <= UINT32_MAX;
}
