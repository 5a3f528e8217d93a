/* SPDX-License-Identifier: Apache-2.0
 *
 * Text from a store, a server or a file may hold anything: bytes that move a terminal's cursor, line breaks that fake
 * another line, marks that reverse the direction of text. This decides which characters may be shown as they are.
 */
#ifndef KVFI_TEXT_H
#define KVFI_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline bool kvfi_is_shown(uint32_t point) {
    bool control = point < 0x20 || (point >= 0x7f && point < 0xa0);
    bool invisible = (point >= 0x200b && point <= 0x200f) || (point >= 0x2028 && point <= 0x202e) ||
                     (point >= 0x2060 && point <= 0x206f) || point == 0x61c || point == 0xfeff ||
                     (point >= 0xfff0 && point <= 0xfffb);
    bool tag = point >= 0xe0000 && point <= 0xe0fff;
    return !control && !invisible && !tag;
}

/* The number of bytes of the UTF-8 character at p, if it may be shown as it is. 0 if it may not, or is not UTF-8. */
static inline size_t kvfi_shown_bytes(const char *p, size_t len) {
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    uint8_t first = (uint8_t)p[0];
    size_t num = first < 0x80 ? 1 : first >> 5 == 6 ? 2 : first >> 4 == 14 ? 3 : first >> 3 == 30 ? 4 : 0;
    if (num == 0 || num > len) {
        return 0;
    }
    uint32_t point = num == 1 ? first : first & (0xffu >> (num + 1));
    for (size_t i = 1; i < num; i++) {
        uint8_t byte = (uint8_t)p[i];
        if (byte >> 6 != 2) {
            return 0;
        }
        point = point << 6 | (byte & 0x3f);
    }
    bool surrogate = point >= 0xd800 && point < 0xe000;
    return point >= least[num] && point <= 0x10ffff && !surrogate && kvfi_is_shown(point) ? num : 0;
}

#endif
