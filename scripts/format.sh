#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Formats all C files of the tree by .clang-format. With --check it only lists files that are not formatted.
# Formatters of different versions disagree, so only version 14 (Debian 12's) is used. Exit 77 if it is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

formatter=''
for name in clang-format-14 clang-format; do
    if command -v "$name" >/dev/null && "$name" --version | grep -q 'version 14\.'; then
        formatter=$name
        break
    fi
done
if [[ -z $formatter ]]; then
    echo "format: clang-format 14 is not installed" >&2
    exit 77
fi

mapfile -d '' -t files < <(find include src cli engines examples python test checks bench -name '*.[ch]' -print0 | sort -z)
if [[ ${1:-} == --check ]]; then
    "$formatter" --dry-run --Werror "${files[@]}"
    echo "${#files[@]} files are formatted"
else
    "$formatter" -i "${files[@]}"
fi
