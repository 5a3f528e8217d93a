#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Files that are truncated, flipped or misplaced records, of another version, or not records: they are never read, always
# named, and removed on demand.
# shellcheck source=common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/common.bash"

store=(--store "file:$dir/store")
head -c 50000 /dev/urandom >"$dir/payload"
seq 1 1024 >"$dir/tokens"

block() {
    json_value 'd["block"]'
}
path_of() {
    find "$dir/store" -name "$1"
}
# change KEY OFFSET: flips one bit of a record.
change() {
    "$python" - "$(path_of "$1")" "$2" <<'END'
import sys
with open(sys.argv[1], "r+b") as f:
    f.seek(int(sys.argv[2]))
    b = f.read(1)[0]
    f.seek(int(sys.argv[2]))
    f.write(bytes([b ^ 1]))
END
}
# damage INDEX ACTION...: stores a block, damages it, and sees that it is not read. Prints nothing; adds to `wanted`.
wanted=()
damage() {
    local index=$1 reason=$2 key
    shift 2
    run 0 put "${fields[@]}" --tokens "$dir/tokens" --block "$index" --json "$dir/payload" "${store[@]}"
    key=$(block)
    run 0 get "$key" "${store[@]}"
    "$@" "$key"
    wanted+=("$key")
    run 1 inspect "$key" --json "${store[@]}"
    json "d['damage'] == '$reason'"
    run 1 get "$key" "${store[@]}"
    [[ ! -s $dir/out ]] || flunk "a damaged record was printed"
}
truncate_it() {
    truncate -s 20000 "$(path_of "$1")"
}
lengthen_it() {
    echo more >>"$(path_of "$1")"
}
flip_payload() {
    change "$1" 30000
}
flip_header() {
    change "$1" 40
}
flip_magic() {
    change "$1" 0
}

damage 0 truncated truncate_it
damage 1 truncated lengthen_it
damage 2 checksum flip_payload
damage 3 checksum flip_header

# Another version, and a record under the name of another one.
run 0 put "${fields[@]}" --key "$(printf '%064d' 1)" "$dir/payload" "${store[@]}"
flip_magic "$(printf '%064d' 1)"
wanted+=("$(printf '%064d' 1)")
run 0 put "${fields[@]}" --key "$(printf '%064d' 2)" "$dir/payload" "${store[@]}"
run 0 put "${fields[@]}" --key "$(printf '%064d' 3)" "$dir/payload" "${store[@]}"
cp "$(path_of "$(printf '%064d' 2)")" "$(path_of "$(printf '%064d' 3)")"
wanted+=("$(printf '%064d' 3)")

# Things that are none of ours lie about, and stay.
echo hello >"$dir/store/kvf1/README"
mkdir "$dir/store/kvf1/folder"
echo hello >"$dir/store/kvf1/folder/file"

run 1 verify --json "${store[@]}"
json "sorted(x['name'][-64:] for x in d['damaged']) == sorted('${wanted[*]}'.split())"
json "[x['reason'] for x in d['damaged'] if x['name'].endswith('$(printf '%064d' 1)')] == ['version']"
json "[x['reason'] for x in d['damaged'] if x['name'].endswith('$(printf '%064d' 3)')] == ['other-space']"
run 1 verify "${store[@]}"
says "${#wanted[@]} damaged"
run 0 ls --json "${store[@]}"
json "d['tiers'][0]['num_damaged'] >= 3"
run 1 verify --remove "${store[@]}"
says "(removed)"
run 0 verify "${store[@]}"
says " 0 damaged"
run 0 get "$(printf '%064d' 2)" "${store[@]}"
cmp "$dir/payload" "$dir/out"
[[ -e $dir/store/kvf1/folder/file ]] || flunk "a file of somebody else is gone"
echo "damaged records are found, named and removed"
