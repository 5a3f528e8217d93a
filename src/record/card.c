/* SPDX-License-Identifier: Apache-2.0
 *
 * Computes the key of a space card, and tells whether the fields on a card hash to the digest of the space.
 */
#include "record/record.h"

void kvfi_card_key(kvf_key *out, const kvf_digest *digest) {
    kvfi_sha sha;
    kvfi_sha_init(&sha, NULL);
    kvfi_sha_add(&sha, "kvf1 card", 9);
    kvfi_sha_add(&sha, digest->bytes, sizeof digest->bytes);
    kvfi_sha_end(&sha, out->bytes);
}

static void add_text(kvfi_sha *sha, const char *text, size_t len) {
    uint8_t size[4];
    kvfi_put32(size, (uint32_t)len);
    kvfi_sha_add(sha, size, sizeof size);
    kvfi_sha_add(sha, text, len);
}

/* The lines are sorted, as the fields are in the hash. */
bool kvfi_card_fits(const char *text, size_t len, const kvf_digest *digest, const kvfi_secret *secret) {
    uint8_t computed[32];
    kvfi_sha sha;
    kvfi_sha_init(&sha, secret);
    kvfi_sha_add(&sha, "kvf1 space", 11); /* with its NUL */
    while (len > 0) {
        const char *end = memchr(text, '\n', len);
        const char *equals = end != NULL ? memchr(text, '=', (size_t)(end - text)) : NULL;
        if (equals == NULL) {
            return false;
        }
        add_text(&sha, text, (size_t)(equals - text));
        add_text(&sha, equals + 1, (size_t)(end - equals - 1));
        len -= (size_t)(end + 1 - text);
        text = end + 1;
    }
    kvfi_sha_end(&sha, computed);
    return memcmp(computed, digest->bytes, sizeof computed) == 0;
}
