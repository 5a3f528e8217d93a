/* SPDX-License-Identifier: Apache-2.0
 *
 * The memory store.
 */
#ifndef KVFI_MEM_H
#define KVFI_MEM_H

#include "tier/tier.h"

kvfi_tier_open kvfi_mem_open;

#endif
