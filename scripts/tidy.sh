#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# clang-tidy over the C files of the library, the engines, the command line, the examples and the Python extension, by
# .clang-tidy. Files may be named.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

files=("$@")
if ((${#files[@]} == 0)); then
    mapfile -d '' -t files < <(find src cli engines examples python -name '*.c' -print0 | sort -z)
fi
printf '%s\0' "${files[@]}" | xargs -0 -n 4 -P "$(nproc)" clang-tidy --quiet -p build/release
echo "${#files[@]} files are tidy"
