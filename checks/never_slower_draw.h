/* SPDX-License-Identifier: Apache-2.0
 *
 * The figure of check-never-slower: time to the first token by bandwidth, relative to that without a store.
 */
#ifndef NEVER_SLOWER_DRAW_H
#define NEVER_SLOWER_DRAW_H

#include <stdbool.h>
#include <stddef.h>

typedef struct spot {
    double mb_per_s;     /* 0 = unlimited, drawn at the right edge */
    double known, fresh; /* parts of the time without a store */
    double loading;      /* loading alone; 0 = not measured */
} spot;

/* `crossover`: MB/s at which loading all takes as long as computing all; the ideal follows from it. */
bool draw_never_slower(const char *path, const spot *spots, size_t num, double crossover);

#endif
