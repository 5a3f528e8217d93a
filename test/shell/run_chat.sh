#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# kvferry run --chat: a conversation over several processes, by its id alone.
# shellcheck source=run_common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/run_common.bash"

store=(--store "file:$dir/store")
ask=(run -m "$KVF_MODEL" -n 5 --json)

# --- three turns: each knows the tokens of those before, and loads their whole blocks
answer "${ask[@]}" "${store[@]}" --chat tea -p "$(document 8)"
json 'd["chat"] == {"id": "tea", "turn": 1, "known_tokens": 0} and d["saved_blocks"] >= 1'
first=$(json_value 'd["prompt_tokens"] + len(d["tokens"])')
answer "${ask[@]}" "${store[@]}" --chat tea -p "How many seals were there?"
json "d['chat']['turn'] == 2 and d['chat']['known_tokens'] == $first and d['loaded_tokens'] >= 64"
second=$(json_value 'd["prompt_tokens"] + len(d["tokens"])')
answer "${ask[@]}" "${store[@]}" --chat tea -p "And on the last day?"
json "d['chat']['turn'] == 3 and d['chat']['known_tokens'] == $second and d['loaded_tokens'] >= 64"
tokens=$(json_value 'd["tokens"]')

# --- the same three turns in another store give the same answers; blocks are loaded only where the tokens are equal
other=(--store "file:$dir/other")
answer "${ask[@]}" "${other[@]}" --chat tea -p "$(document 8)"
answer "${ask[@]}" "${other[@]}" --chat tea -p "How many seals were there?"
find "$dir/other" -type f -size +100k -delete
answer "${ask[@]}" "${other[@]}" --chat tea -p "And on the last day?"
json "d['tokens'] == $tokens and d['loaded_tokens'] == 0"

# --- another id is another conversation; --restart forgets one
answer "${ask[@]}" "${store[@]}" -n 1 --chat coffee -p "Hello"
json 'd["chat"]["turn"] == 1'
answer "${ask[@]}" "${store[@]}" -n 1 --chat coffee --restart -p "Hello again"
json 'd["chat"]["turn"] == 1'
answer "${ask[@]}" "${store[@]}" -n 1 --chat coffee -p "And again"
json 'd["chat"]["turn"] == 2'

# --- another format of the KV cache: the texts of the conversation go on, its tokens are made anew
answer "${ask[@]}" "${store[@]}" -n 1 --kv-type q8_0 --flash-attn on --chat coffee -p "Once more"
json 'd["chat"] == {"id": "coffee", "turn": 3, "known_tokens": 0} and d["prompt_tokens"] > 30'

# --- a conversation that the context can't hold
run 4 run -m "$KVF_MODEL" --quiet "${store[@]}" --ctx-size 128 --chat tea -p "More?"
complains "outgrown the context"

# --- from Redis
start_redis main
redis=(--store "redis+unix://$dir/main.sock")
answer "${ask[@]}" "${redis[@]}" -n 1 --chat a/1 -p "Hello"
answer "${ask[@]}" "${redis[@]}" -n 1 --chat a/1 -p "Hello?"
json 'd["chat"]["turn"] == 2'

# --- no store, no conversation
run 3 run -m "$KVF_MODEL" --chat tea -p x --store "redis+unix://$dir/nobody.sock"
