#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the tests of faults that users have reported, each by the inputs that failed: one line for each kind, the count on
# the last line. Exit status 0 only if the tests of all kinds ran and passed. KVF_BUILD is the folder of the build.
# usage: checks/faults_public.sh [NUMBER]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${KVF_BUILD:-build/release}
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# number|what|program:pattern of its tests ...
kinds=(
    "1|CLIENT is renamed away, forbidden, or ends the connection|live_public_test:test_public_1_*"
    "2|a proxy ends the connection, or is silent, on INFO or CONFIG|live_public_test:test_public_2_*"
    "3|hard links, unnamed files, locks or times are denied|unit_folder_public_test:test_*_denied"
    "4|no /proc, a fresh folder, several threads|unit_folder_public_test:test_no_proc_and_many_threads"
    "5|a user without a password; what a URL says is not dropped|live_public_test:test_public_5_*"
    "6|slots whose host is empty or unknown|unit_slots_test:test_public_6_* live_public_test:test_public_6_*"
    "7|folders that a run as root has left|unit_folder_public_test:test_folders_that_root_left"
    "8|a prompt larger than the bound; times of the future|unit_folder_public_test:test_a_prompt_larger_* live_larger_public_test:test_the_front_is_kept unit_folder_public_test:test_times_of_the_future_*"
    "9|a round trip over stall_ms, a busy host|live_public_test:test_public_9_*"
    "10|idle connections that are reset or swallowed|live_public_test:test_public_10_*"
    "11|a silent address beside one that answers|live_public_test:test_public_11_*"
)

# run PROGRAM PATTERN: how many tests passed, or -1 where one failed, was skipped, or there is none.
run() {
    local program=$build/test/$1 ok
    if ! KVFT_ONLY=$2 timeout 300 "$program" >"$log" 2>&1 || grep -q '^\[  SKIPPED \]' "$log"; then
        echo -1
        return
    fi
    ok=$(grep -c '^\[       OK \]' "$log")
    ((ok > 0)) && echo "$ok" || echo -1
}

passed=0
inputs=0
asked=0
for kind in "${kinds[@]}"; do
    IFS='|' read -r number what tests <<<"$kind"
    [[ -z ${1:-} || $1 == "$number" ]] || continue
    asked=$((asked + 1))
    sum=0
    for test in $tests; do
        ok=$(run "${test%%:*}" "${test#*:}")
        if ((ok < 0)); then
            sum=-1
            grep -E 'ERROR|LINE|FAILED|SKIPPED|No such file' "$log" | head -8
            echo "$number. $what: FAILED or not run: $test"
            break
        fi
        sum=$((sum + ok))
    done
    if ((sum > 0)); then
        echo "$number. $what: ok ($sum tests)"
        passed=$((passed + 1))
        inputs=$((inputs + sum))
    fi
done
verdict=ok
((asked > 0 && passed == asked)) || verdict=FAILED
echo "check-faults-public: $verdict: $passed of $asked kinds of fault, $inputs tests"
[[ $verdict == ok ]]
