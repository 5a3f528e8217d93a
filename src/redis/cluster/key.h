/* SPDX-License-Identifier: Apache-2.0
 *
 * Names of keys: <prefix>:<16 hex of the space>:{<64 hex of the key>}, and the same with :1, :2 ... for further parts
 * of a value that one key can't hold. The braces put all parts of a value, and nothing else, on one slot of a Cluster.
 */
#ifndef KVFI_REDIS_KEY_H
#define KVFI_REDIS_KEY_H

#include "record/record.h"
#include "redis/wire/conf.h"

#define KVFI_KEY_BYTES (KVFI_REDIS_MAX_PREFIX + 1 + 16 + 1 + 66 + 12) /* with a part's number and a NUL */

#define KVFI_COMMAND_BYTES 512u /* any command without its body: the longest key, and everything else */

typedef struct kvfi_name {
    char text[KVFI_KEY_BYTES];
    size_t len;
} kvfi_name;

void kvfi_name_of(kvfi_name *out, const char *prefix, const kvfi_addr *addr, uint64_t part);
/* False if the name does not have this form. Of the space only the first 8 bytes are known; the rest is zero. */
bool kvfi_name_parse(kvfi_addr *out, uint64_t *out_part, const char *prefix, const char *name, size_t len);

/* The slot of all parts of the value, in a Cluster. */
uint16_t kvfi_addr_slot(const kvfi_addr *);
/* The time to live of a key in ms: up to a tenth more or less than requested, so that what was stored together does not
 * expire together. */
uint64_t kvfi_ttl_ms(uint32_t ttl_s, const kvfi_addr *);

/* The number of keys that hold a value of this length, and the length of part number `part`. The first part is the
 * remainder, but at least a header. It is sent last, so it must be hashed before the others are sent, and the others as
 * they are sent (save.c). */
static inline uint64_t kvfi_num_parts(uint64_t bytes, uint64_t part_bytes) {
    return bytes <= part_bytes ? 1 : (bytes + part_bytes - 1) / part_bytes;
}
static inline uint64_t kvfi_part_len(uint64_t bytes, uint64_t part_bytes, uint64_t part) {
    uint64_t behind_first = (kvfi_num_parts(bytes, part_bytes) - 1) * part_bytes;
    uint64_t first = bytes - behind_first < KVFI_HEADER_BYTES ? KVFI_HEADER_BYTES : bytes - behind_first;
    if (behind_first == 0 || part == 0) {
        return behind_first == 0 ? bytes : first;
    }
    uint64_t left = bytes - first - (part - 1) * part_bytes;
    return left < part_bytes ? left : part_bytes;
}

#endif
