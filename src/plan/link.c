/* SPDX-License-Identifier: Apache-2.0
 *
 * Computes the rate and the round trip of a store for kvf_link.
 */
#include "plan/link.h"

#include <math.h>
#include <stdbool.h>

void kvfi_link_note(kvfi_link *link, int64_t now_us, uint64_t bytes, int64_t us) {
    if (us <= 0) {
        return;
    }
    double fade = exp(-(double)us / KVFI_LINK_FADE_US);
    link->bytes = link->bytes * fade + (double)bytes;
    link->us = link->us * fade + (double)us;
    link->noted_us = now_us;
}

void kvfi_link_note_round_trip(kvfi_link *link, int64_t us) {
    double now = (double)us;
    /* The shortest one seen, because the others also waited for something else; but the shortest may be outdated. */
    link->round_trip_us =
        link->round_trip_us == 0 || now < link->round_trip_us ? now : link->round_trip_us * 0.9 + now * 0.1;
}

kvf_link kvfi_link_tell(const kvfi_link *link, int64_t now_us) {
    kvf_link out = {.round_trip_us = (int64_t)link->round_trip_us};
    bool proven = link->bytes >= KVFI_LINK_PROOF_BYTES || link->us >= KVFI_LINK_PROOF_US;
    if (!proven || now_us - link->noted_us > KVFI_LINK_FRESH_US) {
        return out;
    }
    out.silent = link->bytes <= 1;
    out.bytes_per_s = out.silent ? 0 : link->bytes / link->us * 1e6;
    return out;
}
