#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# kvferry run: models, prompts and options that can't be used get one clear sentence and their exit code.
# shellcheck source=run_common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/run_common.bash"

# A busy machine takes so long that progress is shown; here every line on stderr is a complaint.
model=(run -m "$KVF_MODEL" --no-store --quiet)

# --- usage
run 2 run
complains "-m"
run 2 "${model[@]}"
complains "no prompt"
run 2 "${model[@]}" some text
complains '"some"'
run 2 "${model[@]}" -p x -p y
complains "only once"
run 2 "${model[@]}" -p x -n many
complains '"many"'
run 2 "${model[@]}" -p x -n -1
run 2 "${model[@]}" -p x --temp warm
run 2 "${model[@]}" -p x --threads 0
run 2 "${model[@]}" -p x --kv-type q9_9
complains "q9_9"
run 2 "${model[@]}" -p x --flash-attn perhaps
run 2 "${model[@]}" -p x --chat a
complains "store"
run 2 "${model[@]}" -p x --restart
run 3 run -m "$KVF_MODEL" -p x --store nonsense
complains "nonsense"
run 0 run --help
says "Ctrl-C"

# --- the prompt
run 4 "${model[@]}" -p ""
complains "empty"
: >"$dir/empty"
run 4 "${model[@]}" -f "$dir/empty"
complains "empty"
run 4 "${model[@]}" -f "$dir/nothing"
complains "No such file"
run 4 "${model[@]}" -f "$dir"
complains "directory"
printf 'one\ntwo \xff\n' >"$dir/latin"
run 4 "${model[@]}" -f "$dir/latin"
complains "line 2"
printf 'one\0two' >"$dir/zero"
run 4 "${model[@]}" -f "$dir/zero"
complains "NUL"
if [[ $(id -u) != 0 ]]; then
    : >"$dir/secret"
    chmod 0 "$dir/secret"
    run 4 "${model[@]}" -f "$dir/secret"
    complains "Permission denied"
fi
document 20 >"$dir/document"
run 4 "${model[@]}" -f "$dir/document" --ctx-size 256
complains "no room"
document 1000 >"$dir/long"
run 4 "${model[@]}" -f "$dir/long"
complains "trained for"

# --- the model
run 4 run --no-store --quiet -p x -m "$dir/nothing.gguf"
complains "No such file"
run 4 run --no-store --quiet -p x -m "$dir"
complains "folder"
run 4 run --no-store --quiet -p x -m "$dir/empty"
complains "not a GGUF"
run 4 run --no-store --quiet -p x -m "$dir/document"
complains "not a GGUF"
head -c 2000 "$KVF_MODEL" >"$dir/short.gguf"
run 4 run --no-store --quiet -p x -m "$dir/short.gguf"
complains "not a usable model"
head -c 30000000 "$KVF_MODEL" >"$dir/half.gguf"
run 4 run --no-store --quiet -p x -m "$dir/half.gguf"
complains "corrupted or incomplete"
{
    head -c 3000 "$KVF_MODEL"
    head -c 3000 /dev/zero | tr '\0' '\377'
    tail -c +6001 "$KVF_MODEL"
} >"$dir/corrupt.gguf"
run 4 run --no-store --quiet -p x -m "$dir/corrupt.gguf"
complains "not a usable model"
run 4 "${model[@]}" -p x --kv-type q8_0 --flash-attn off
complains "flash_attn"

# --- exec: what the program is
run 2 exec llama-server -m x
complains "put -- before the program"
run 4 exec -- "$dir/document"
complains "is not executable"
run 4 exec -- "$dir/absent"
complains "no such program"

# --- output that gets lost
rc=0
timeout 60 "$KVFERRY" "${model[@]}" -p Hello -n 2 >/dev/full 2>"$dir/err" || rc=$?
((rc == 5)) || flunk "a full disk: exit status $rc, not 5"
