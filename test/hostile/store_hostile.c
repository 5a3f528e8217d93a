/* SPDX-License-Identifier: Apache-2.0
 *
 * check-hostile: entry point for all cases without llama.cpp.
 */
#include "hostile/hostile.h"

int main(void) {
    static const hostile_part *const parts[] = {&hostile_parse, &hostile_folder, &hostile_wire, &hostile_server};
    return hostile_main(parts, sizeof parts / sizeof *parts, 18000);
}
