/* SPDX-License-Identifier: Apache-2.0
 *
 * The median of a series and its interval. A check whose figures scatter decides by the interval, not by the median.
 */
#ifndef KVFT_MEDIAN_H
#define KVFT_MEDIAN_H

#include <stddef.h>

#define KVFT_MAX_SERIES 999u

typedef struct kvft_median {
    double value, low, high; /* low to high holds the true median in at least 95 of 100 series */
    double least, most;
} kvft_median;

/* Of 1 to KVFT_MAX_SERIES values in any order. The interval is made of order statistics, which only assume that the noise
 * does not know the order in which things were measured. Below 6 values it is 0 to infinity. */
kvft_median kvft_median_of(const double *values, size_t num);

#endif
