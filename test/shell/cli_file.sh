#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The command line on a folder: every verb, its output for people and for programs, its exit codes.
# shellcheck source=common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/common.bash"

: "${KVF_BUILD:?the build folder}"
head -c 300000 /dev/urandom >"$dir/payload"
seq 1 1000 >"$dir/tokens"
store=(--store "file:$dir/store")

# --- help and version
run 0 --version
says "kvferry 0."
run 0 --help
says "Quick start"
run 0 help ls
says "usage: kvferry ls"
for verb in ls inspect get put verify clear doctor stat exec; do
    run 0 "$verb" --help
    says "usage: kvferry $verb"
    says "Exit codes"
    says "  kvferry $verb"
    says "  -s, --store URL"
    (($(wc -L <"$dir/out") <= 120)) || flunk "the help of $verb has a line of more than 120 characters"
done
run 2
run 2 frobnicate
complains 'there is no verb "frobnicate"'
run 2 ls --frobnicate
complains "--frobnicate"
run 2 ls -x
complains "-x"
run 2 ls --store
complains "--store needs a value"
run 2 inspect --session a --session b
complains "give --session only once"
run 2 ls nothex
complains "hex digits"
run 2 verify something

# --- a store that is not there: who only reads does not create it
for verb in ls verify stat "inspect abc" "get abc" "clear --all --yes"; do
    # shellcheck disable=SC2086
    run 3 $verb "${store[@]}"
    complains "mistyped"
    [[ ! -e $dir/store ]] || flunk "$verb: created the folder"
done

# --- an empty store
run 0 doctor "${store[@]}"
run 0 ls "${store[@]}"
says "no blocks"
run 0 ls --json "${store[@]}"
json 'd["tiers"][0]["spaces"] == [] and d["tiers"][0]["sessions"] == []'
run 0 verify "${store[@]}"
says "0 damaged"
run 1 ls abc "${store[@]}"
complains "no space begins with abc"
run 1 inspect abc "${store[@]}"
run 1 get abc "${store[@]}"

# --- put
key=$(printf '%064d' 7)
run 0 put "${fields[@]}" --key "$key" "$dir/payload" "${store[@]}"
says_not "there before"
run 0 put "${fields[@]}" --key "$key" --json "$dir/payload" "${store[@]}"
json 'd["was_there"]'
run 0 put "${fields[@]}" --key "$key" "$dir/payload" "${store[@]}"
says "there before"
says "300000 bytes stored"
run 0 put "${fields[@]}" --tokens "$dir/tokens" --json "$dir/payload" "${store[@]}"
space=$(json_value 'd["space"]')
last=$(json_value 'd["block"]')
run 0 put "${fields[@]}" --tokens "$dir/tokens" --block 0 "$dir/payload" "${store[@]}"
run 0 put "${fields[@]}" --key "$(printf '%064d' 8)" "${store[@]}" # an empty payload is a payload
run 2 put "${fields[@]}" "${store[@]}" "$dir/payload"
complains "one of --key and --tokens"
run 2 put --key "$key" "${store[@]}" "$dir/payload"
complains "--field"
run 2 put --field engine "${store[@]}" --key "$key" "$dir/payload"
complains "NAME=VALUE"
run 2 put "${fields[@]}" --key 12 "${store[@]}" "$dir/payload"
run 4 put --field engine=x --field kv=y --key "$key" "${store[@]}" "$dir/payload"
complains '"model"'
run 4 put "${fields[@]}" --tokens "$dir/tokens" --block 3 "${store[@]}" "$dir/payload"
run 4 put "${fields[@]}" --tokens "$dir/payload" "${store[@]}" "$dir/payload"
complains "token id"
run 4 put "${fields[@]}" --key "$key" "${store[@]}" "$dir/nothing"
complains "No such file"
run 2 put "${fields[@]}" --block-tokens 65537 --key "$key" "${store[@]}" "$dir/payload"
complains "a number from 1 to 65536"

# --- get
run 0 get "$key" -o "$dir/got" "${store[@]}"
cmp "$dir/payload" "$dir/got"
run 0 get "${last:0:10}" --space "${space:0:6}" "${store[@]}"
cmp "$dir/payload" "$dir/out"
run 0 get "${fields[@]}" --tokens "$dir/tokens" "${store[@]}"
cmp "$dir/payload" "$dir/out"
run 0 get "${fields[@]}" --tokens "$dir/tokens" -o "$dir/got" --json "${store[@]}"
json 'd["payload_bytes"] == 300000'
run 1 get "${fields[@]}" --tokens "$dir/tokens" --block 1 "${store[@]}"
complains "no such block is stored: fields, tokens"
run 1 get "${fields[@]}" --field adapters=other --tokens "$dir/tokens" "${store[@]}"
run 2 get --json "$key" "${store[@]}"
complains "-o FILE"
run 2 get "${store[@]}"
run 2 get 0000 "${store[@]}"
complains "give more digits"
run 5 get "$key" -o "$dir/no/such/folder" "${store[@]}"

# --- ls, inspect, stat, doctor
run 0 ls "${store[@]}"
says "${space:0:16}"
says "engine=test-1"
run 0 ls --json "${store[@]}"
json 'd["tiers"][0]["spaces"][0]["num_blocks"] == 4'
json 'd["tiers"][0]["spaces"][0]["fields"]["model"] == "0123"'
json 'd["tiers"][0]["num_damaged"] == 0'
run 0 ls "${space:0:8}" "${store[@]}"
says "512 - 767"
run 0 ls "$space" --json "${store[@]}"
json 'sorted(b["first_token"] for b in d["tiers"][0]["blocks"]) == [0, 0, 0, 512]'
run 0 inspect "${space:0:8}" "${store[@]}"
says "kv=f16"
run 0 inspect "$last" "${store[@]}"
says "512 to 767"
says " 513 514 "
run 0 inspect "$last" --json "${store[@]}"
json 'd["tokens"] == list(range(513, 769)) and d["damage"] is None and d["payload_bytes"] == 300000'
run 0 inspect "$space" --json "${store[@]}"
json 'd["num_blocks"] == 4 and d["longest_tokens"] == 768'
run 0 stat "${store[@]}"
run 0 stat --json "${store[@]}"
json 'd["tiers"][0]["reachable"] and d["tiers"][0]["num_records"] >= 4'
run 0 doctor "${store[@]}"
run 0 doctor --json "${store[@]}"
json 'd["worst"] in ("fine", "note")'

# --- the default store, and the one of the environment
run 0 put "${fields[@]}" --key "$key" "$dir/payload"
[[ -d $HOME/.cache/kvferry/store ]]
run 0 ls --json
json 'd["tiers"][0]["spaces"][0]["num_blocks"] == 1'
KVFERRY_STORE="mem: file:$dir/store" run 0 ls --json
json 'len(d["tiers"]) == 2 and d["tiers"][1]["spaces"][0]["num_blocks"] == 4'
XDG_CACHE_HOME="$dir/a cache%" run 0 put "${fields[@]}" --key "$key" "$dir/payload"
[[ -d "$dir/a cache%/kvferry/store" ]]
run 0 put "${fields[@]}" --key "$key" "$dir/payload" --store "file:$dir/one" --store "file:$dir/two"
run 0 get "$key" -o "$dir/got" --store "file:$dir/two"

# --- sessions
head -c 4096 /dev/zero >"$dir/keys"
"$KVF_BUILD/test/session_tool" save "file:$dir/store" "chat 1" "$dir/keys" "$dir/keys" float32 2 8 64
run 0 ls "${store[@]}"
says "chat 1"
run 0 ls --json "${store[@]}"
json '[s["session"] for s in d["tiers"][0]["sessions"]] == ["chat 1"] and len(d["tiers"][0]["spaces"]) == 1'
json '0 < d["tiers"][0]["sessions"][0]["ttl_ms"] <= 3600 * 1000'
run 0 inspect --session "chat 1" "${store[@]}"
says "float32, 2 x 8 x 64"
says "tokens    not known"
says "space     not known"
run 0 inspect --session "chat 1" --json "${store[@]}"
json 'd["keys"] == {"bytes": 4096, "dtype": "float32", "dims": [2, 8, 64]} and d["has_meta"]'
json 'd["num_tokens"] is None and d["space"] is None and d["layout"] is None'
run 0 verify --json "${store[@]}"
json 'd["num_sessions"] == 1 and d["damaged"] == []'
run 0 clear --session "chat 1" "${store[@]}"
run 1 inspect --session "chat 1" "${store[@]}"

# --- clear
run 2 clear "${store[@]}"
complains "name one of"
run 2 clear abc --all "${store[@]}"
run 1 clear ffffffffff "${store[@]}"
run 1 clear --session nobody "${store[@]}"
complains "no session"
run 0 clear "${space:0:8}" "${store[@]}"
run 0 ls "${store[@]}"
says "no blocks"
run 0 put "${fields[@]}" --key "$key" "$dir/payload" "${store[@]}"
touch "$dir/store/mine"
run 0 clear --all --yes --json "${store[@]}"
json 'd["num_removed"] >= 1'
[[ -e $dir/store/mine ]]

# --- a full disk is noticed
if [[ -w /dev/full ]]; then
    rc=0
    "$KVFERRY" ls "${store[@]}" >/dev/full 2>"$dir/err" || rc=$?
    ((rc == 5)) || flunk "writing to a full disk: exit status $rc"
fi
echo "the command line does what it says"
