/* SPDX-License-Identifier: Apache-2.0
 *
 * The median and interval by which checks decide (support/median.h).
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "support/median.h"

/* Of the numbers from 1 to num, in another order. */
static kvft_median median_up_to(size_t num) {
    double values[KVFT_MAX_SERIES];
    for (size_t i = 0; i < num; i++) {
        values[(i * 7) % num] = (double)i + 1; /* num is no multiple of 7 */
    }
    return kvft_median_of(values, num);
}

/* Ranks of the binomial distribution, from a table of the sign test (2.5 % on either side). */
static void ranks(void **state) {
    (void)state;
    static const struct {
        size_t num;
        double low, high;
    } rows[] = {{6, 1, 6}, {9, 2, 8}, {15, 4, 12}, {20, 6, 15}, {25, 8, 18}, {60, 22, 39}, {999, 469, 531}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        kvft_median m = median_up_to(rows[i].num);
        assert_true(m.value == ((double)rows[i].num + 1) / 2);
        assert_true(m.low == rows[i].low && m.high == rows[i].high);
        assert_true(m.least == 1 && m.most == (double)rows[i].num);
    }
}

static void too_few(void **state) {
    (void)state;
    for (size_t num = 1; num < 6; num++) {
        kvft_median m = median_up_to(num);
        assert_true(m.low == 0 && isinf(m.high));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(ranks), cmocka_unit_test(too_few)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
