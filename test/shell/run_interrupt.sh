#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# kvferry run: Ctrl-C in the middle of the prompt and of the answer. It ends soon, with 130, and whole blocks are stored.
# shellcheck source=run_common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/run_common.bash"

# start ARGUMENT...: in the background, as a terminal would (a shell without job control makes its children ignore
# SIGINT). What an earlier one said is gone before: nobody takes it for this one's, and interrupts what has not begun.
start() {
    : >"$dir/out"
    "$python" -c 'import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])' "$KVFERRY" "$@" >"$dir/out" 2>"$dir/err" </dev/null &
    pid=$!
}

# until_true SECONDS COMMAND...: while the program runs.
until_true() {
    local tries=$(($1 * 20))
    shift
    until "$@"; do
        kill -0 "$pid" 2>/dev/null || flunk "it ended too early"
        ((tries-- > 0)) || flunk "waited too long for: $*"
        sleep 0.05
    done
}

# interrupt: it must end within 5 s, with 130.
interrupt() {
    local rc=0 began=$SECONDS
    kill -INT "$pid"
    wait "$pid" || rc=$?
    ((rc == 130)) || flunk "exit status $rc, not 130"
    ((SECONDS - began <= 6)) || flunk "it took $((SECONDS - began)) s to stop"
}

stored_one() {
    find "$dir/store" -type f -size +100k >"$dir/found" 2>/dev/null
    [[ -s $dir/found ]]
}

# --- while the prompt is read: some blocks are stored, and programs get their JSON
document 60 >"$dir/document"
start run -m "$KVF_MODEL" -f "$dir/document" -p "What is it about?" -n 4000 --json --store "file:$dir/store"
until_true 100 stored_one
interrupt
json 'd["stop"] == "interrupted" and d["saved_blocks"] >= 1'
answer verify --json --store "file:$dir/store"
json 'd["num_records"] >= 1 and d["damaged"] == []'
answer run -m "$KVF_MODEL" -f "$dir/document" -n 0 --json --store "file:$dir/store"
json 'd["loaded_tokens"] >= 64'

# --- while the answer is written: its beginning is there, and its line is closed
start run -m "$KVF_MODEL" -p "Tell a long story about a ship." -n 4000 --chat story --store "file:$dir/store"
until_true 100 test -s "$dir/out"
interrupt
"$python" -c 'import sys; sys.exit(not open(sys.argv[1]).read().endswith("\n"))' "$dir/out" || flunk "the line was left open"

# --- a turn that was cut short is not part of the conversation
answer run -m "$KVF_MODEL" -p "Hello" -n 1 --json --chat story --store "file:$dir/store"
json 'd["chat"]["turn"] == 1'
