#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# examples/llama.c: answers on memory, in a folder and on Redis; a second run loads what the first one saved, and
# answers alike; a store that is down changes nothing; wrong arguments are told.
# shellcheck source=run_common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/run_common.bash"
program=${KVF_BUILD:?the build folder}/examples/llama-example

# example CODE ARGUMENT...: must end with that exit status.
example() {
    local want=$1 rc=0
    shift
    (cd "$dir" && exec timeout -k 5 200 "$program" "$@") >"$dir/out" 2>"$dir/err" </dev/null || rc=$?
    ((rc == want)) || flunk "llama-example $*: exit status $rc, not $want"
}
answers() {
    grep -v ' tokens: ' "$dir/out"
}

# --- without arguments: memory and model.gguf; the document of the second prompt is loaded
example 1
tail -n 1 "$dir/err" | grep -qF "model.gguf: not a model that llama.cpp can load" || flunk "no word of the model"
ln -s "$KVF_MODEL" "$dir/model.gguf"
example 0
says "104 tokens: 0 loaded, 104 computed, 2 blocks saved"
says "104 tokens: 64 loaded, 40 computed, 1 blocks saved"
want=$(answers)
[[ -n $want ]] || flunk "no answer"

start_redis main --maxmemory 256mb --maxmemory-policy allkeys-lru
for store in "file:$dir/store" "redis+unix://$dir/main.sock"; do
    example 0 "$store"
    says "104 tokens: 0 loaded, 104 computed, 2 blocks saved"
    [[ $(answers) == "$want" ]] || flunk "another answer"
    # A busy machine may compute a part of it sooner than load it; then it is tried again.
    for ((try = 0; ; try++)); do
        example 0 "$store"
        [[ $(answers) == "$want" ]] || flunk "another answer after a load"
        (($(grep -c ", 0 blocks saved" "$dir/out") == 2)) || flunk "what is stored was saved again"
        (($(grep -c "104 tokens: 103 loaded, 1 computed" "$dir/out") < 2)) || break
        ((try < 20)) || flunk "not all was loaded"
    done
done
example 0 "redis+unix://$dir/nobody.sock"
says "104 tokens: 0 loaded"
[[ $(answers) == "$want" ]] || flunk "another answer without a server"
example 0 mem: model.gguf "One and one is"
says "4 tokens: 0 loaded, 4 computed"

# --- wrong arguments
example 0 --help
says "usage: llama [STORE"
example 2 --store
complains "llama --help"
example 1 rediz://host
complains "llama: rediz://host: "
example 1 mem: model.gguf ""
complains "prompt: it is empty"
echo "the example runs"
