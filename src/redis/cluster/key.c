/* SPDX-License-Identifier: Apache-2.0
 *
 * Builds and parses the names of keys, divides records into parts, and chooses their time to live.
 */
#include "redis/cluster/key.h"

#include <stdio.h>

#include "redis/cluster/slots.h"

void kvfi_name_of(kvfi_name *out, const char *prefix, const kvfi_addr *addr, uint64_t part) {
    size_t len = strlen(prefix);
    char *p = out->text;
    memcpy(p, prefix, len);
    p += len;
    *p++ = ':';
    kvfi_hex(p, addr->space.bytes, 8);
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
    if (p[0] != ':' || p[17] != ':' || p[18] != '{' || p[83] != '}' || !unhex(out->space.bytes, p + 1, 8) ||
        !unhex(out->key.bytes, p + 19, 32)) {
        return false;
    }
    if (len == whole) {
        return true;
    }
    return name[whole] == ':' && kvfi_parse_u64(out_part, name + whole + 1, len - whole - 1) && *out_part > 0 &&
           *out_part <= UINT32_MAX;
}

uint64_t kvfi_ttl_ms(uint32_t ttl_s, const kvfi_addr *addr) {
    /* The key is a hash, so two bytes of it are as good as random, and equal for all parts of a value. */
    uint64_t ttl_ms = (uint64_t)ttl_s * 1000;
    uint64_t chance = (uint64_t)addr->key.bytes[30] << 8 | addr->key.bytes[31];
    return ttl_ms - ttl_ms / 10 + ttl_ms / 5 * chance / UINT16_MAX;
}

uint16_t kvfi_addr_slot(const kvfi_addr *addr) {
    char tag[65]; /* the text in the braces of its name */
    kvfi_hex(tag, addr->key.bytes, 32);
    return kvfi_slot_of(tag, 64);
}
