#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The programs of examples/: each runs alone, in a folder, and on Redis; a second run loads what the first one saved and
# answers alike; a store that is down costs nothing but the time; wrong arguments are told.
# shellcheck source=common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/common.bash"
examples=${KVF_BUILD:?the build folder}/examples

# example CODE NAME ARGUMENT...: must end with that exit status; stdin is $dir/in.
: >"$dir/in"
example() {
    local want=$1 name=$2 rc=0
    shift 2
    timeout -k 5 60 "$examples/$name" "$@" >"$dir/out" 2>"$dir/err" <"$dir/in" || rc=$?
    ((rc == want)) || flunk "$name $*: exit status $rc, not $want"
}
# until_says TEXT NAME ARGUMENT...: runs the example until it says that. A load has a budget, which a busy machine may exceed.
until_says() {
    local text=$1 try
    shift
    for ((try = 0; try < 20; try++)); do
        example 0 "$@"
        ! grep -qF -- "$text" "$dir/out" || return 0
    done
    flunk "stdout does not say: $text"
}
# The numbers of the last output, e.g. "answer 12.5": the same however they came about.
answers() {
    grep -o 'answer [0-9.]*' "$dir/out" | sort
}

start_redis main --maxmemory 64mb --maxmemory-policy allkeys-lru
stores=("file:$dir/store" "redis+unix://$dir/main.sock")

# --- engine.c: two prompts with a common front, so that the second one loads also on memory
until_says "149 tokens: 112 loaded, 37 computed, 2 blocks saved" engine
says "152 tokens: 0 loaded, 152 computed, 9 blocks saved"
want=$(answers)
for store in "${stores[@]}"; do
    example 0 engine "$store"
    says "152 tokens: 0 loaded, 152 computed, 9 blocks saved"
    [[ $(answers) == "$want" ]] || flunk "another answer"
    until_says "152 tokens: 144 loaded, 8 computed, 0 blocks saved" engine "$store"
    until_says "149 tokens: 144 loaded, 5 computed, 0 blocks saved" engine "$store"
    [[ $(answers) == "$want" ]] || flunk "another answer after a load"
done
example 0 engine "mem:" "ten tokens" ""
says "10 tokens: 0 loaded, 10 computed, 0 blocks saved"
says "0 tokens: 0 loaded"
example 0 engine "redis+unix://$dir/nobody.sock"
says "149 tokens: 0 loaded, 149 computed"
grep -q "engine: 9 blocks were not written" "$dir/err" || flunk "no word of what was not written"
[[ $(answers) == "$want" ]] || flunk "another answer without a server"

# --- session.c: each run is two turns
for store in "${stores[@]}"; do
    example 0 session "$store" chat:7
    says "chat:7: 0 tokens loaded, 5 computed"
    says "chat:7: 5 tokens loaded, 5 computed"
    example 0 session "$store" chat:7
    says "chat:7: 10 tokens loaded, 5 computed"
    says "chat:7: 15 tokens loaded, 5 computed"
done
example 0 session
says "user:1: 5 tokens loaded, 5 computed"
# Another program's arrays under the same id are refused: two tokens of another shape, without `meta`.
redis-cli -s "$dir/main.sock" hset foreign keys 12345678 values 12345678 >/dev/null
example 1 session "redis+unix://$dir/main.sock" foreign
complains "holds arrays of another shape"
# Any Redis client can read what is stored: 20 tokens of 64 floats.
[[ $(redis-cli -s "$dir/main.sock" hstrlen chat:7 keys) == 5120 ]] || flunk "the session has another length"
example 1 session "redis+unix://$dir/nobody.sock"
complains "session: load:"

# --- async.c: prompts come through stdin. The second run loads them; the patience is long, as the machine may be busy.
prompt='The ferry leaves the island at seven and at nine, in winter only at nine.'
printf '%s When?\n%s Where?\n' "$prompt" "$prompt" >"$dir/in"
example 0 async mem: 20000
says "1: 79 tokens: 0 loaded, 79 computed, 4 blocks saved"
want=$(answers)
for store in "${stores[@]}"; do
    example 0 async "$store" 20000
    [[ $(answers) == "$want" ]] || flunk "another answer"
    example 0 async "$store" 20000
    says "1: 79 tokens: 64 loaded, 15 computed, 0 blocks saved"
    says "2: 80 tokens: 80 loaded, 0 computed, 0 blocks saved"
    [[ $(answers) == "$want" ]] || flunk "another answer after a load"
done
example 0 async "redis+unix://$dir/nobody.sock"
[[ $(answers) == "$want" ]] || flunk "another answer without a server"
# More prompts than are served at once, one that is too long, one that is dropped while it is looked up or computed.
{
    for ((i = 1; i <= 12; i++)); do echo "$prompt $i"; done
    printf 'x%.0s' {1..1100}
    printf '\n'
    printf 'y%.0s' {1..1020}
    printf '\ncancel 13\n%s last\n' "$prompt"
} >"$dir/in"
example 0 async
says "12: 76 tokens:"
says "13: cancelled"
says_not "13: 1020 tokens"
says "14: 78 tokens:"
(($(wc -l <"$dir/out") == 14)) || flunk "not one line for each prompt"
grep -q "a prompt has at most 1024 bytes" "$dir/err" || flunk "a long prompt is not told"
printf 'short\n\nlast' >"$dir/in"
example 0 async
says "1: 5 tokens: 0 loaded, 5 computed, 0 blocks saved"
says "2: 4 tokens: 0 loaded"
: >"$dir/in"
example 0 async
[[ ! -s $dir/out ]] || flunk "an answer without a prompt"

# --- wrong arguments
for name in engine session async; do
    example 0 "$name" --help
    says "usage: $name [STORE"
    example 2 "$name" --store
    complains "$name --help"
    example 1 "$name" rediz://host
    complains "$name: rediz://host: "
done
example 2 session mem: id more
complains "unexpected argument more"
example 2 async mem: soon
complains "PATIENCE_MS is a number from 1 to 60000, not soon"
example 2 engine mem: "$(printf 'x%.0s' {1..1100})"
complains "prompt 1 is longer than 1024 bytes"
echo "the examples run"
