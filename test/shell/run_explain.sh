#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# kvferry explain names what destroys a prefix. Every case is one that docs/llama.md describes.
# shellcheck source=run_common.bash disable=SC1091
. "$(dirname "$0")/run_common.bash"

store=file:$dir/store
why() { "$python" -c 'import json, sys; d = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$dir/out" "$1"; }
expect() { # EXPRESSION VALUE
    local got
    got=$(why "$1")
    [[ $got == "$2" ]] || flunk "$1 is $got, not $2: $(cat "$dir/out")"
}
explain() { answer explain -m "$KVF_MODEL" --store "$store" --json "$@"; }
compute() { answer run -m "$KVF_MODEL" --store "$store" -n 0 --quiet "$@"; }

{ echo "Today is Monday, the 3rd of March."; document 14; } >"$dir/monday"
{ echo "Today is Tuesday, the 4th of March."; document 14; } >"$dir/tuesday"
{ document 10; echo "Tools: add, mul."; } >"$dir/tools"
{ document 10; echo "Tools: mul, add."; document 6; } >"$dir/reordered"
compute -f "$dir/monday"

# all of it; a part of it; nothing of it
explain -f "$dir/monday"
expect 'd["why"]' stored
{ cat "$dir/monday"; document 6; } >"$dir/longer"
explain -f "$dir/longer"
expect 'd["why"] in ("differs", "ends") and d["stored_blocks"] > 1' True

# a head that changes, such as a date: nothing behind it is found
explain -f "$dir/tuesday"
expect 'd["why"]' differs
expect 'd["stored_blocks"]' 0
expect '"Monday" in d["there"] and "Tuesday" in d["here"]' True
expect 'd["differs_at"] < 64' True

# the same far behind: all in front of it is found
compute -f "$dir/tools"
explain -f "$dir/reordered"
expect 'd["why"]' differs
expect 'd["stored_blocks"] >= 2 and d["stored_blocks"] * 64 <= d["differs_at"]' True

# another template
explain --raw -f "$dir/monday"
expect 'd["why"]' other-template

# sealed under a secret that explain is not given
(umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$dir/secret")
store=file:$dir/sealed
compute --secret-file "$dir/secret" -f "$dir/monday"
explain -f "$dir/monday"
expect 'd["why"] == "absent" and d["num_sealed"] >= 1' True
explain --secret-file "$dir/secret" -f "$dir/monday"
expect 'd["why"] == "stored" and d["num_sealed"] == 0' True
store=file:$dir/store

# another space, by the name of the field
explain --kv-type q8_0 -f "$dir/monday"
expect 'd["why"]' other-space
expect '[f["name"] for s in d["other_spaces"] for f in s["differs"] if f["name"] == "kv"] == ["kv"]' True
answer explain -m "$KVF_MODEL" --store "$store" --kv-type q8_0 -f "$dir/monday"
grep -q 'kv: here k=q8_0' "$dir/out" || flunk "the text does not name the field: $(cat "$dir/out")"

# evicted: the first block is gone, the later ones are there
space=$("$KVFERRY" ls --store "$store" --json | "$python" -c 'import json, sys; print(json.load(sys.stdin)["tiers"][0]["spaces"][0]["space"])')
first=$("$KVFERRY" ls "$space" --store "$store" --json |
    "$python" -c 'import re, sys; print("\n".join(re.findall(r"\"key\": *\"([0-9a-f]+)\",\s*\"first_token\": *0\b", sys.stdin.read())))')
[[ -n $first ]] || flunk "no block begins at token 0"
for key in $first; do
    find "$dir/store" -name "$key*" -delete
done
explain -f "$dir/monday"
expect 'd["why"]' evicted
expect 'd["later_blocks"] > 0' True
echo "kvferry explain tells what destroyed a prefix in 7 cases"
