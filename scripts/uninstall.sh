#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Removes what `make install` put into a prefix, by the list that it left there, and the folders that are empty then.
set -euo pipefail

prefix=${1:?usage: scripts/uninstall.sh PREFIX}
shopt -s nullglob
lists=("$prefix"/lib*/kvferry/installed.txt "$prefix"/lib/*/kvferry/installed.txt)
if ((${#lists[@]} != 1)); then
    echo "uninstall: $prefix has ${#lists[@]} lists of installed files (lib/kvferry/installed.txt), not one" >&2
    exit 1
fi
cd "$prefix"
mapfile -t names <"${lists[0]#"$prefix"/}"
for name in "${names[@]}"; do
    if [[ $name == /* || $name == *..* ]]; then
        echo "uninstall: $name is not inside of $prefix, so it stays" >&2
        continue
    fi
    rm -f -- "$name"
done
# Only folders of kvferry alone: those that are named after it, and what is in them.
find . -depth -type d -path '*/kvferry*' -empty -delete
