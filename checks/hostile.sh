#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# check-hostile: CASES (20000) seeded cases (SEED, 1). Nine tenths need no llama.cpp and are built with AddressSanitizer and
# UndefinedBehaviorSanitizer. A tenth are records of real llama.cpp contexts. Each line says how to repeat one of its cases.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cases=${CASES:-20000}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1
rc=0
CASES=$((cases - cases / 10)) build/asan/test/kvf_store_hostile 2>&1 | tee "$log" || rc=1
if [[ -x build/release/test/kvf_llama_hostile ]]; then
    CASES=$((cases / 10)) build/release/test/kvf_llama_hostile 2>&1 | tee -a "$log" || rc=1
fi
# Each part ends with a line of its sums.
sums=$(awk '/^[a-z]+ +[0-9]+ cases, / { n += $2; c += $4; h += $6; w += $8; m += $11; o += $15 }
    END { printf "%d cases, %d crashed, %d hung, %d wrong hits, %d over their memory, %d other faults", n, c, h, w, m, o }' "$log")
if ((rc != 0)); then
    echo "check-hostile: FAILED: $sums"
    exit 1
fi
echo "check-hostile: ok: $sums"
