#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The libraries export what test/abi/*.txt lists, and nothing else. `install_abi.sh --update` writes the lists anew: a symbol that goes
# away breaks programs, and needs a new major version (before 1.0, a minor one).
# shellcheck source=common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/common.bash"
: "${KVF_BUILD:?}"
lists=$(cd "$(dirname "${BASH_SOURCE[0]}")/../abi" && pwd)

exported() {
    nm -D --defined-only "$1" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | LC_ALL=C sort
}

for name in kvferry kvferry-llama; do
    library=$KVF_BUILD/lib$name.so
    [[ -e $library ]] || continue
    exported "$library" >"$dir/$name.txt"
    if [[ ${1:-} == --update ]]; then
        cp "$dir/$name.txt" "$lists/$name.txt"
    fi
    ! grep -v '^kvf_' "$dir/$name.txt" || flunk "lib$name exports names that are not kvf_*"
    diff -u "$lists/$name.txt" "$dir/$name.txt" || flunk "lib$name does not export what test/abi/$name.txt lists"
    echo "lib$name exports $(wc -l <"$dir/$name.txt") names, as listed"
done
