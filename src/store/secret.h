/* SPDX-License-Identifier: Apache-2.0
 *
 * The secrets that a store was opened with: given as bytes, or in files that only their owner can read.
 */
#ifndef KVFI_SECRET_H
#define KVFI_SECRET_H

#include "kvferry/store.h"
#include "record/record.h"
#include "record/space.h"

#define KVFI_MAX_SECRETS 2u /* the current secret, and the previous one */

typedef struct kvfi_tenant {
    kvfi_secret secret, seal;
    size_t len;
    uint8_t bytes[KVFI_MAX_SECRET_BYTES];
} kvfi_tenant;

typedef struct kvfi_secrets {
    kvfi_tenant of[KVFI_MAX_SECRETS]; /* the first is used for writing */
    size_t num;
    bool seal_sessions;
} kvfi_secrets;

/* KVF_CONFIG: a file is missing, open to others, too short or too long, or both files and bytes are given. KVF_LIMIT:
 * bytes of an invalid length. */
kvf_status kvfi_secrets_init(kvfi_secrets *, kvf_error *, const kvf_options *);
void kvfi_secrets_cleanup(kvfi_secrets *);

/* kvfi_secrets_admit is kvfi_header_admit of a sealed header. Returns the first secret that fits, or NULL. Only the tag
 * proves that it is the right one. */
const kvfi_tenant *kvfi_secrets_admit(const kvfi_secrets *, kvfi_header *);

#endif
