/* SPDX-License-Identifier: Apache-2.0
 *
 * How fast bytes arrive, from notes of how many arrived in which time. Pure: the caller provides the time and the lock.
 */
#ifndef KVFI_LINK_H
#define KVFI_LINK_H

#include "kvferry/plan.h"

typedef struct kvfi_link {
    double bytes, us; /* both fade: after KVFI_LINK_FADE_US they count a third */
    int64_t noted_us; /* when the last note was made */
    double round_trip_us;
} kvfi_link;
#define KVFI_LINK_FADE_US 300000.0
/* A rate is believed when this much has arrived, or nothing like it in this time, and for this long while nothing is
 * loaded. */
#define KVFI_LINK_PROOF_BYTES 262144.0
#define KVFI_LINK_PROOF_US    40000.0
#define KVFI_LINK_FRESH_US    10000000

/* `bytes` arrived within the `us` before `now_us`, while something was under way. */
void kvfi_link_note(kvfi_link *, int64_t now_us, uint64_t bytes, int64_t us);
void kvfi_link_note_round_trip(kvfi_link *, int64_t us);
kvf_link kvfi_link_tell(const kvfi_link *, int64_t now_us);

#endif
