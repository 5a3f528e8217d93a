/* SPDX-License-Identifier: Apache-2.0
 *
 * A system table before the current one that counts the bytes of memory that the library holds: allocated and mapped,
 * including files.
 */
#ifndef KVFT_METER_H
#define KVFT_METER_H
#include <stddef.h>

void kvft_meter_begin(void); /* while no store is open; counts from 0 */
size_t kvft_meter_peak(void);
void kvft_meter_end(void); /* the table below is set again */
#endif
