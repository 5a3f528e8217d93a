#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# kvferry run: libgomp spins only briefly, unless the environment says how threads wait. Arguments and exit status pass
# through the restart. libgomp itself prints the setting that it read.
# shellcheck source=run_common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/run_common.bash"

# told VARIABLE=VALUE...: the last spin count that libgomp read.
told() {
    env -u GOMP_SPINCOUNT -u OMP_WAIT_POLICY OMP_DISPLAY_ENV=verbose "$@" "$KVFERRY" run --help 2>&1 >/dev/null |
        sed -n "s/.*GOMP_SPINCOUNT = '\([^']*\)'.*/\1/p" | tail -n 1
}

plain=$(env -u GOMP_SPINCOUNT -u OMP_WAIT_POLICY OMP_DISPLAY_ENV=verbose "$KVFERRY" --version 2>&1 >/dev/null)
if [[ $plain != *GOMP_SPINCOUNT* ]]; then
    echo "this llama.cpp was built without libgomp"
    exit 77
fi
[[ $plain != *"GOMP_SPINCOUNT = '100'"* ]] || flunk "only run changes how threads wait"
[[ $(told) == 100 ]] || flunk "run's threads spin: $(told)"
[[ $(told GOMP_SPINCOUNT=7) == 7 ]] || flunk "GOMP_SPINCOUNT=7 was not left alone"
[[ $(told OMP_WAIT_POLICY=passive) == 0 ]] || flunk "OMP_WAIT_POLICY=passive was not left alone: $(told OMP_WAIT_POLICY=passive)"

rc=0
env -u GOMP_SPINCOUNT -u OMP_WAIT_POLICY "$KVFERRY" run -m "$dir/a model" -p x --no-store >"$dir/out" 2>"$dir/err" || rc=$?
[[ $rc == 4 ]] || flunk "no model: exit status $rc"
grep -q "$dir/a model" "$dir/err" || flunk "the argument with a blank did not get through"
