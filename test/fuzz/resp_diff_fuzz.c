/* SPDX-License-Identifier: Apache-2.0
 *
 * Fuzzes our decoder against that of hiredis (support/resp_diff.h). The first byte of the input chooses the scratch,
 * the pieces, and whether there is a place.
 */
#include "support/resp_diff.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    if (len < 2) {
        return 0;
    }
    const char *bytes = (const char *)data + 1;
    size_t cap = (data[0] & 1) != 0 ? 160 : 1200, piece = 1 + (data[0] >> 2) % 32u;
    bool place = (data[0] & 2) != 0;
    len--;
    diff_excuse excuse = diff_scan(bytes, len, place ? DIFF_PLACE : cap - 2, cap);
    diff_text hiredis = diff_hiredis(bytes, len, len);
    for (int i = 0; i < 2; i++) {
        diff_text ours = diff_ours(bytes, len, i == 0 ? SIZE_MAX : piece, len, place, cap);
        if (diff_judge(&hiredis, &ours, excuse) != NULL) {
            abort();
        }
        free(ours.text);
    }
    free(hiredis.text);
    return 0;
}
