/* SPDX-License-Identifier: Apache-2.0
 *
 * The median of a series, and the ranks that bound it.
 */
#include "support/median.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Of `num` sorted values the k-th from either end: the chance that fewer than k of num throws of a coin are heads is at
 * most 2.5 %. */
static size_t rank_of(size_t num) {
    double chance = pow(0.5, (double)num), tail = 0;
    size_t k = 0;
    while (tail + chance <= 0.025) {
        tail += chance;
        chance *= (double)(num - k) / (double)(k + 1);
        k++;
    }
    return k;
}

kvft_median kvft_median_of(const double *values, size_t num) {
    double sorted[KVFT_MAX_SERIES];
    memcpy(sorted, values, num * sizeof *sorted);
    qsort(sorted, num, sizeof *sorted, compare);
    size_t k = rank_of(num);
    return (kvft_median){.value = (sorted[(num - 1) / 2] + sorted[num / 2]) / 2,
                         .low = k > 0 ? sorted[k - 1] : 0,
                         .high = k > 0 ? sorted[num - k] : INFINITY,
                         .least = sorted[0],
                         .most = sorted[num - 1]};
}
