#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# kvferry run: the second run loads what the first one stored, and answers with the same tokens: from a folder, from
# Redis, through tiers.
# shellcheck source=run_common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/run_common.bash"

document 12 >"$dir/document"
ask=(run -m "$KVF_MODEL" -f "$dir/document" -p "What is it about?" -n 6 --json)

# --- the reference: no store, the same cuts
answer "${ask[@]}" --no-store
tokens=$(json_value 'd["tokens"]')
json 'd["loaded_tokens"] == 0 and d["space"] is None and d["store"] is None and len(d["tokens"]) == 6'
json 'd["prompt_tokens"] == d["computed_tokens"] > 128 and d["ttft_ms"] > 0'

# --- a folder: cold, then warm in another process
answer "${ask[@]}" --store "file:$dir/store"
json "d['tokens'] == $tokens and d['loaded_tokens'] == 0 and d['saved_blocks'] >= 2 and d['unwritten_blocks'] == 0"
answer "${ask[@]}" --store "file:$dir/store"
json "d['tokens'] == $tokens and d['saved_blocks'] == 0 and d['why'] == 'none'"
json 'd["loaded_tokens"] == d["prompt_tokens"] - 1 and d["loaded_bytes"] > 0'
json "d['store'] == 'file:$dir/store'"
answer verify --store "file:$dir/store"

# --- another question about the same document loads the document
answer run -m "$KVF_MODEL" -f "$dir/document" -p "Who is in it?" -n 1 --json --store "file:$dir/store"
json 'd["loaded_tokens"] >= 128'

# --- another format of the KV cache is another space
answer "${ask[@]}" --kv-type q8_0 --flash-attn on -n 1 --store "file:$dir/store"
json 'd["loaded_tokens"] == 0'

# --- people get the text on stdout and a report on stderr; --quiet leaves out the report
answer run -m "$KVF_MODEL" -f "$dir/document" -p "What is it about?" -n 6 --store "file:$dir/store"
grep -q "loaded (.* from file:$dir/store)" "$dir/err" || flunk "no report of what was loaded"
text=$(cat "$dir/out")
answer "${ask[@]}" --store "file:$dir/store"
json "d['answer'].strip() == '''$text'''.strip()"
answer run -m "$KVF_MODEL" -p "Hello" -n 2 --quiet --no-store
[[ ! -s $dir/err ]] || flunk "--quiet is not quiet"

# --- damaged blocks are computed again, with the same answer
find "$dir/store" -type f -size +100k | sort | while read -r file; do
    printf 'x' | dd of="$file" bs=1 seek=5000 conv=notrunc status=none
done
answer "${ask[@]}" --store "file:$dir/store"
json "d['tokens'] == $tokens and d['loaded_tokens'] == 0 and d['why'] == 'checksum'"

# --- Redis, and a folder behind memory
start_redis main
answer "${ask[@]}" --store "redis+unix://$dir/main.sock"
json "d['tokens'] == $tokens and d['saved_blocks'] >= 2 and d['unwritten_blocks'] == 0"
answer "${ask[@]}" --store "mem:" --store "redis+unix://$dir/main.sock"
json "d['tokens'] == $tokens and d['loaded_tokens'] >= 128 and d['store'].startswith('redis+unix:')"

# --- a server that is not there costs nothing but the time
answer "${ask[@]}" --store "redis+unix://$dir/nobody.sock"
json "d['tokens'] == $tokens and d['loaded_tokens'] == 0 and d['why'] in ('unreachable', 'breaker')"
