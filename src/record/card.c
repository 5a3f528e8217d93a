/* SPDX-License-Identifier: Apache-2.0 */
#include "record/record.h"

void kvfi_card_key(kvf_key *out, const uint8_t digest[32]) {
    kvfi_sha sha;
    kvfi_sha_init(&sha, NULL);
    kvfi_sha_add(&sha, "kvf1 card", 9);
    kvfi_sha_add(&sha, digest, 32);
    kvfi_sha_end(&sha, out->bytes);
}
