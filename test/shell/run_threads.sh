#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# kvferry run: libgomp spins only briefly, unless the environment says how threads wait. Other verbs load no llama.cpp, and so
# no libgomp. libgomp itself prints the setting that it read.
# shellcheck source=run_common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/run_common.bash"

# told VERB VARIABLE=VALUE...: the spin count that libgomp read.
told() {
    env -u GOMP_SPINCOUNT -u OMP_WAIT_POLICY OMP_DISPLAY_ENV=verbose "${@:2}" "$KVFERRY" "$1" --help 2>&1 >/dev/null |
        sed -n "s/.*GOMP_SPINCOUNT = '\([^']*\)'.*/\1/p"
}

if [[ -z $(told run) ]]; then
    echo "this llama.cpp was built without libgomp"
    exit 77
fi
[[ -z $(told doctor) ]] || flunk "doctor loads libgomp"
[[ $(told run) == 100 ]] || flunk "run's threads spin: $(told run)"
[[ $(told explain) == 100 ]] || flunk "explain's threads spin: $(told explain)"
[[ $(told run GOMP_SPINCOUNT=7) == 7 ]] || flunk "GOMP_SPINCOUNT=7 was not left alone"
[[ $(told run OMP_WAIT_POLICY=passive) == 0 ]] || flunk "OMP_WAIT_POLICY=passive was not left alone"
