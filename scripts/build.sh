#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Configures and builds one preset of CMakePresets.json, with little output if all goes well.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

preset=${1:?usage: scripts/build.sh PRESET [TARGET...]}
shift
if [[ -z ${KVF_LLAMA_DIR:-} ]]; then
    eval "$(scripts/setup.sh --print)"
    export KVF_LLAMA_DIR
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! cmake --preset "$preset" >"$log" 2>&1; then
    cat "$log" >&2
    exit 1
fi
targets=()
if (($# > 0)); then
    targets=(--target "$@")
fi
cmake --build --preset "$preset" "${targets[@]}"
