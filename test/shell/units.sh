#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The systemd units: systemd-analyze accepts them, their commands start (with other folders), and `kvferry doctor` finds nothing
# wrong with the Redis of its unit.
# shellcheck source=common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/common.bash"
: "${KVF_SOURCE:?}"

units=$KVF_SOURCE/packaging/systemd
mkdir "$dir/units" "$dir/run"
for unit in "$units"/*.service; do
    sed "s#^ExecStart=kvferry #ExecStart=$KVFERRY #" "$unit" >"$dir/units/${unit##*/}"
done
# verify FILE...: what systemd says of them, also where it exits with 0.
verify() {
    systemd-analyze --man=no verify "$@" >"$dir/out" 2>"$dir/err" && ! grep -qF "$dir/units" "$dir/err"
}
if command -v systemd-analyze >/dev/null; then
    verify "$dir"/units/*.service || flunk "systemd-analyze does not accept the units"
    sed 's/^ExecStart=/&no-such-program-/' "$units/kvferry-redis.service" >"$dir/units/broken.service"
    ! verify "$dir/units/broken.service" || flunk "systemd-analyze accepts everything"
    sed 's/^ProtectHome=/ProtectHomes=/' "$units/kvferry-redis.service" >"$dir/units/broken.service"
    ! verify "$dir/units/broken.service" || flunk "systemd-analyze accepts unknown settings"
fi

# command UNIT: its ExecStart, with folders of this test.
command_of() {
    sed -n 's/^ExecStart=//p' "$units/$1" | sed "s#/etc/kvferry/redis.conf#$KVF_SOURCE/docs/redis.conf#; s#/run/kvferry[^ /]*#$dir/run#g"
}

# --- the Redis: it says that it is ready, to what systemd listens on
command -v redis-server >/dev/null || {
    echo "no redis-server is installed"
    exit 77
}
read -r -a words <<<"$(command_of kvferry-redis.service)"
"$python" - "$dir/notify" >"$dir/ready" <<'END' &
import socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
listener.bind(sys.argv[1])
listener.settimeout(60)
print("bound", flush=True)
while "READY=1" not in listener.recv(4096).decode().split("\n"):
    pass
print("ready", flush=True)
END
notified=$!
until grep -q bound "$dir/ready"; do sleep 0.05; done
NOTIFY_SOCKET=$dir/notify "${words[@]}" >"$dir/out" 2>"$dir/err" </dev/null &
servers+=($!)
wait "$notified" || flunk "redis-server does not tell systemd that it is ready"
run 0 put "${fields[@]}" --key "$(printf '%064d' 7)" --store "redis+unix://$dir/run/redis.sock" /etc/hostname
run 0 get "$(printf '%064d' 7)" --store "redis+unix://$dir/run/redis.sock"
rc=0
"$KVFERRY" doctor --store "redis+unix://$dir/run/redis.sock" --json >"$dir/out" 2>"$dir/err" || rc=$?
# What the host, not the server, is to be set to is another matter.
json 'all(f["severity"] in ("fine", "note") or "sysctl" in f["mend"] for f in d["findings"])'

# --- llama-server, of which only the version is asked
if [[ -x ${KVF_LLAMA_SERVER:-} ]] && "$KVFERRY" run --help >/dev/null 2>&1; then
    ln -s "$KVFERRY" "$dir/kvferry"
    PATH=$dir:${KVF_LLAMA_SERVER%/*}:$PATH LLAMA_ARGS=--version KVFERRY_STORE=redis+unix://$dir/run/redis.sock \
        bash -c "$(command_of kvferry-llama-server@.service)" >"$dir/out" 2>"$dir/err" || flunk "the command of llama-server's unit"
    grep -q "version" "$dir/err" "$dir/out" || flunk "llama-server does not say its version"
fi
echo "the units start"
