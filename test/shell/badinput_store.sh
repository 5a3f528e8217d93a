#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Stores that can't be used: each gets one clear sentence and its exit code, in good time.
# shellcheck source=common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/common.bash"

head -c 1000 /dev/urandom >"$dir/payload"
put=(put "${fields[@]}" --key "$(printf '%064d' 7)" "$dir/payload")

# --- a unix socket that is a file
echo text >"$dir/no_socket"
run 1 doctor --store "redis+unix://$dir/no_socket"
says "not a socket"

# --- URLs
run 3 ls --store "nonsense"
run 3 ls --store "ftp://host/"
complains "ftp"
run 3 ls --store "unix://$dir/no.sock"
complains "write redis+unix: instead"
run 3 ls --store "file:$dir/store?colour=red"
complains "colour"
run 3 ls --store "file:$dir/store?max=many"
complains "many"
run 3 ls --store "redis+unix://$dir/no.sock?ttl=-1"
complains "ttl"
run 3 ls --store "redis://localhost:99999"
mapfile -t many < <(printf -- '--store=mem:%.0s\n' {1..9})
run 2 ls "${many[@]}"
complains "more than 8"

# --- nobody there
run 3 ls --store "redis+unix://$dir/no.sock"
complains "no.sock"
run 3 ls --store "redis://127.0.0.1:1"
complains "127.0.0.1:1"
run 3 "${put[@]}" --store "redis://127.0.0.1:1"
run 1 stat --store "redis://127.0.0.1:1"
run 1 doctor --store "redis://127.0.0.1:1"
says "fatal"
run 1 doctor --json --store "redis://127.0.0.1:1"
json 'd["worst"] == "fatal"'

# --- a wrong password, none, a wrong database
start_redis main --requirepass right --maxmemory 100mb --maxmemory-policy allkeys-lru
run 3 ls --store "redis+unix://:wr0ngpass@$dir/main.sock"
complains "password"
! grep -q wr0ngpass "$dir/err" || flunk "the password is shown"
run 3 ls --store "redis+unix://$dir/main.sock"
complains "password"
run 3 doctor --store "redis+unix://:wr0ngpass@$dir/main.sock"
complains "password"
run 3 ls --store "redis+unix://:right@$dir/main.sock?db=99"
complains "99"
run 0 ls --store "redis+unix://:right@$dir/main.sock?db=3"

# --- not a Redis: one that talks nonsense, one that closes at once, one that never answers
"$python" - "$dir" <<'END' &
import os, socket, sys, threading, time
folder = sys.argv[1]

def nonsense(c):
    c.recv(65536)
    c.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    time.sleep(0.2)
    c.close()

def silent(c):
    while c.recv(65536):
        pass

def serve(name, behave):
    s = socket.socket(socket.AF_UNIX)
    s.bind(f"{folder}/{name}.new")
    s.listen(16)
    os.rename(f"{folder}/{name}.new", f"{folder}/{name}.sock")
    while True:
        c, _ = s.accept()
        threading.Thread(target=behave, args=(c,), daemon=True).start()

for name, behave in ("nonsense", nonsense), ("closing", lambda c: c.close()), ("silent", silent):
    threading.Thread(target=serve, args=(name, behave), daemon=True).start()
time.sleep(120)
END
servers+=($!)
for name in nonsense closing silent; do
    tries=0
    until [[ -S $dir/$name.sock ]]; do
        ((tries++ < 200)) || flunk "the $name server did not start"
        sleep 0.05
    done
    start=$SECONDS
    run 3 ls --store "redis+unix://$dir/$name.sock?connect_ms=500&stall_ms=250"
    complains "$name.sock"
    run 3 "${put[@]}" --store "redis+unix://$dir/$name.sock?connect_ms=500&stall_ms=250"
    ((SECONDS - start < 15)) || flunk "$name: took $((SECONDS - start)) s"
done

# --- a folder that is a file, and one that can't be written
run 0 "${put[@]}" --store "file:$dir/store"
echo text >"$dir/file"
run 3 ls --store "file:$dir/file"
if [[ $(id -u) != 0 ]]; then
    chmod -R a-w "$dir/store"
    run 5 put "${fields[@]}" --key "$(printf '%064d' 8)" "$dir/payload" --store "file:$dir/store"
    complains "not stored"
    run 0 "${put[@]}" --store "file:$dir/store" # nothing has to be written
    says "there before"
    run 1 doctor --store "file:$dir/store"
    run 0 get 0000 -o "$dir/got" --store "file:$dir/store"
    cmp "$dir/payload" "$dir/got"
elif mkdir "$dir/small" && mount -t tmpfs -o size=64k tmpfs "$dir/small" 2>/dev/null; then
    # For root nothing is read-only but a read-only file system; and a full one is at hand, too.
    head -c 200000 /dev/zero >"$dir/large"
    run 0 "${put[@]}" --store "file:$dir/small"
    run 5 put "${fields[@]}" --key "$(printf '%064d' 8)" "$dir/large" --store "file:$dir/small"
    complains "not stored: full"
    run 0 "${put[@]}" --store "file:$dir/small" # the attempt to make room may have evicted it
    mount -o remount,ro "$dir/small"
    run 5 put "${fields[@]}" --key "$(printf '%064d' 9)" "$dir/payload" --store "file:$dir/small"
    complains "not stored"
    run 0 "${put[@]}" --store "file:$dir/small" # nothing has to be written
    says "there before"
    run 1 doctor --store "file:$dir/small"
    run 0 get 0000 -o "$dir/got" --store "file:$dir/small"
    cmp "$dir/payload" "$dir/got"
    umount "$dir/small"
fi
echo "unusable stores are told apart and named"
