#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# check-kill: kill -9 of writers, readers and redis-server in the middle of their work, in seeded loops, on a folder and on
# Redis. Meanwhile a checker loads and compares every byte: a hit is exact, or it is a miss. Afterwards the store must
# verify clean. SEEDS=n sets the number of loops (of KILLS kills each) on each store. The figure is on the last line.
# shellcheck source=../test/shell/common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/../test/shell/common.bash"

peer=${KVF_BUILD:?the build folder}/test/kvf_kill_peer
seeds=${SEEDS:-20}
kills=${KILLS:-12}
declare -A killed=([writer]=0 [reader]=0 [server]=0)
loads=0 hits=0 borrowed=0 sessions=0 wrong=0

# Random numbers that follow from the seed.
next=0
random() { # BOUND; the number is in $next
    state=$(((state * 1103515245 + 12345) % 2147483648))
    next=$(((state >> 8) % $1))
}
pause() { # up to 150 ms
    random 150
    sleep "0.$(printf %03d $((next + 1)))"
}

start_peer() { # ROLE: writer or reader; its process id is in $pid
    local role=write
    [[ $1 == writer ]] || role="read"
    random 1000000
    "$peer" $role "$url" "$next" >>"$dir/peers" 2>&1 &
    pid=$!
    servers+=("$pid")
}
# Kills a process of our own and waits until it is gone. What it had exited with by itself shows a wrong byte.
kill_peer() { # PID
    local rc=0
    kill -9 "$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || rc=$?
    ((rc == 137)) || flunk "a peer ended by itself with exit status $rc: $(tail -n 3 "$dir/peers")"
}

start_server() {
    "${KVFT_SERVER:-redis-server}" --port 0 --unixsocket "$socket" --dir "$home" --save "" \
        "${server_options[@]}" >>"$home/log" 2>&1 </dev/null &
    server=$!
    servers+=("$server")
}
kill_server() {
    kill -9 "$server"
    wait "$server" 2>/dev/null || true
    pause # a while without it
    start_server
}
wait_for_server() {
    local tries=0
    until timeout 5 "$KVFERRY" stat --store "$url" --json 2>/dev/null | grep -q '"reachable": *true'; do
        ((tries++ < 200)) || flunk "the server did not come back: $(tail -n 3 "$home/log")"
        sleep 0.05
    done
}

add_up() { # the checker's last line
    local line
    line=$(tail -n 1 "$dir/checker")
    [[ $line =~ ^([0-9]+)\ loads,\ ([0-9]+)\ hits,\ ([0-9]+)\ borrowed,\ ([0-9]+)\ sessions,\ ([0-9]+)\ wrong$ ]] ||
        flunk "the checker did not end well: $(tail -n 5 "$dir/checker")"
    loads=$((loads + BASH_REMATCH[1]))
    hits=$((hits + BASH_REMATCH[2]))
    borrowed=$((borrowed + BASH_REMATCH[3]))
    sessions=$((sessions + BASH_REMATCH[4]))
    wrong=$((wrong + BASH_REMATCH[5]))
    ((BASH_REMATCH[2] > 0)) || flunk "the checker had no hit: this loop shows nothing"
}

# One seed on the store $url: two writers and a reader that are killed by turns, and the server where there is one.
loop() {
    local kind checker rc=0 writers=() reader pid i
    : >"$dir/peers"
    start_peer writer
    writers=("$pid")
    start_peer writer
    writers+=("$pid")
    start_peer reader
    reader=$pid
    random 1000000
    "$peer" read "$url" "$next" >"$dir/checker" 2>&1 &
    checker=$!
    servers+=("$checker")
    for ((i = 0; i < kills; i++)); do
        pause
        random 6
        if ((next >= 4)) && [[ -n $server ]]; then
            kind=server
            kill_server
        elif ((next % 2 == 1)); then
            kind=reader
            kill_peer "$reader"
            start_peer reader
            reader=$pid
        else
            kind=writer
            random 2
            local which=$next
            kill_peer "${writers[which]}"
            start_peer writer
            writers[which]=$pid
        fi
        killed[$kind]=$((killed[$kind] + 1))
    done
    pause
    kill_peer "$reader"
    kill_peer "${writers[0]}"
    kill_peer "${writers[1]}"
    sleep 0.2 # the checker alone, with all that is left
    kill -TERM "$checker"
    wait "$checker" || rc=$?
    servers=()
    [[ -z $server ]] || servers=("$server")
    add_up
    ((rc == 0)) || flunk "the checker: exit status $rc: $(tail -n 5 "$dir/checker")"
    ! grep 'wrong bytes' "$dir/peers" >&2 || flunk "a peer saw wrong bytes"
    [[ -z $server ]] || wait_for_server
    run 0 verify --store "$url"
}

socket=$dir/redis.sock
stores=(folder)
if command -v "${KVFT_SERVER:-redis-server}" >/dev/null; then
    stores+=(redis)
else
    echo "no redis-server is installed: only the folder is tried"
fi
for store in "${stores[@]}"; do
    for ((seed = 1; seed <= seeds; seed++)); do
        state=$seed
        server=''
        if [[ $store == folder ]]; then
            url="file:$dir/store?max=4M"
        else
            # Records of several keys; every other time what was written survives the kill, as far as it got.
            server_options=(--appendonly no)
            ((seed % 2 == 1)) || server_options=(--appendonly yes --appendfsync no --auto-aof-rewrite-percentage 0)
            home=$dir/redis-$seed
            mkdir "$home"
            url="redis+unix://$socket?part=65536"
            start_server
            wait_for_server
        fi
        loop
        if [[ -n $server ]]; then
            kill -9 "$server"
            wait "$server" 2>/dev/null || true
            servers=()
            rm -rf "$socket" "$home"
        fi
        echo "$store, seed $seed: ${killed[writer]} writers, ${killed[reader]} readers, ${killed[server]} servers killed so far"
    done
done

((wrong == 0)) || flunk "wrong bytes: $wrong"
echo "killed: ${killed[writer]} writers, ${killed[reader]} readers, ${killed[server]} servers;" \
    "$loads blocks loaded, $hits hits, $borrowed borrowed, $sessions sessions; stores verified clean; wrong bytes: $wrong"
