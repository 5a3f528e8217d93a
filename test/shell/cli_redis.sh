#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The command line on a private redis-server with a password, also as the slower of two tiers.
# shellcheck source=common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/common.bash"

start_redis main --requirepass "s3cret word" --maxmemory 200mb --maxmemory-policy allkeys-lru
url="redis+unix://:s3cret%20word@$dir/main.sock"
store=(--store "$url")
head -c 300000 /dev/urandom >"$dir/payload"
seq 1 600 >"$dir/tokens"

run 0 ls "${store[@]}"
says "no blocks"
run 0 put "${fields[@]}" --tokens "$dir/tokens" --json "$dir/payload" "${store[@]}"
space=$(json_value 'd["space"]')
key=$(json_value 'd["block"]')
run 0 put "${fields[@]}" --tokens "$dir/tokens" --block 0 "$dir/payload" "${store[@]}"
run 0 get "${key:0:12}" "${store[@]}"
cmp "$dir/payload" "$dir/out"
run 0 get "${fields[@]}" --tokens "$dir/tokens" "${store[@]}"
cmp "$dir/payload" "$dir/out"
run 0 ls "${store[@]}"
says "${space:0:16}"
says "engine=test-1"
run 0 ls "${space:0:6}" --json "${store[@]}"
json 'len(d["tiers"][0]["blocks"]) == 2'
json 'all(0 < b["ttl_ms"] <= 4000 * 1000 for b in d["tiers"][0]["blocks"])'
run 0 inspect "$key" --json "${store[@]}"
json 'd["tokens"] == list(range(257, 513))'
run 0 stat --json "${store[@]}"
json 'd["tiers"][0]["reachable"] and d["tiers"][0]["max_bytes"] == 200 * 1024 * 1024'
run 0 verify --json "${store[@]}"
json 'd["damaged"] == [] and d["num_records"] >= 2'

# The password is never shown, wherever the URL is.
for verb in ls stat doctor verify; do
    timeout 20 "$KVFERRY" "$verb" -v "${store[@]}" >"$dir/out" 2>"$dir/err" || true
    ! grep -q -e 's3cret' "$dir/out" "$dir/err" || flunk "$verb shows the password"
done

# Two tiers: both are written; each is listed with what it has.
run 0 put "${fields[@]}" --key "$(printf '%064d' 9)" "$dir/payload" --store "file:$dir/store" "${store[@]}"
run 0 ls --json --store "file:$dir/store" "${store[@]}"
json 'd["tiers"][0]["spaces"][0]["num_blocks"] == 1 and d["tiers"][1]["spaces"][0]["num_blocks"] == 3'

# What is not ours stays. Sessions have their own verb.
if command -v redis-cli >/dev/null; then
    cli=(redis-cli -s "$dir/main.sock" --no-auth-warning -a "s3cret word")
    # A record of several parts of which one has been evicted is a miss, and no damage.
    parts=(--store "$url?part=64K")
    run 0 put "${fields[@]}" --key "$(printf '%064d' 8)" "$dir/payload" "${parts[@]}"
    "${cli[@]}" unlink "$("${cli[@]}" --scan --pattern 'kvf1:*:2' | head -n 1)" >/dev/null
    run 0 verify --json "${parts[@]}"
    json 'd["damaged"] == [] and d["num_incomplete"] == 1'
    run 0 verify --remove "${parts[@]}"
    says "incomplete: "
    run 0 verify --json "${parts[@]}"
    json 'd["num_incomplete"] == 0'
    "${cli[@]}" set mine 1 >/dev/null
    run 0 clear "${space:0:10}" "${store[@]}"
    run 0 ls --json "${store[@]}"
    json 'd["tiers"][0]["spaces"] == []'
    "${cli[@]}" hset chat-1 keys abcd values efgh >/dev/null
    run 0 inspect --session chat-1 --json "${store[@]}"
    json 'd["keys"]["bytes"] == 4 and not d["has_meta"]'
    run 0 clear --session chat-1 "${store[@]}"
    run 1 inspect --session chat-1 "${store[@]}"
    run 0 clear --all --yes "${store[@]}"
    [[ $("${cli[@]}" get mine) == 1 ]] || flunk "a key of somebody else is gone"
fi

# --- a server that will lose or refuse what it is given: the doctor says so
start_redis bad --maxmemory 0 --maxmemory-policy noeviction
run 1 doctor --store "redis+unix://$dir/bad.sock"
says "maxmemory"
run 1 doctor --json --store "redis+unix://$dir/bad.sock"
json 'd["worst"] in ("warning", "fatal") and any(f["mend"] for f in d["findings"])'
# It is stored to within a budget of our own; one that is full and evicts nothing gets nothing, and says why.
run 0 put "${fields[@]}" --tokens "$dir/tokens" --block 0 "$dir/payload" --store "redis+unix://$dir/bad.sock"
run 0 ls --json --store "redis+unix://$dir/bad.sock"
json 'd["tiers"][0]["spaces"][0]["num_blocks"] == 1'
start_redis worse --maxmemory 1gb --maxmemory-policy noeviction
run 1 doctor --store "redis+unix://$dir/worse.sock"
says "fatal"
says "CONFIG SET maxmemory-policy allkeys-lru"
run 5 put "${fields[@]}" --tokens "$dir/tokens" --block 0 "$dir/payload" --store "redis+unix://$dir/worse.sock"
complains "settings"
run 0 put "${fields[@]}" --tokens "$dir/tokens" --block 0 "$dir/payload" --store "redis+unix://$dir/worse.sock?allow_noeviction=true"
echo "the command line does what it says on Redis"
