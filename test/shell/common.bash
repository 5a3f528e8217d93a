# SPDX-License-Identifier: Apache-2.0
#
# What the tests of the command line share. Sourced; needs KVFERRY (the program). All files of a test are in $dir, which is
# removed with it. The servers that it started end with it.
set -euo pipefail

: "${KVFERRY:?the program to test}"
dir=$(mktemp -d "${TMPDIR:-/tmp}/kvf-shell-XXXXXX")
servers=()
unset KVFERRY_STORE XDG_CACHE_HOME
export HOME=$dir/home
mkdir "$HOME"
python=${KVF_PYTHON:-}
[[ -x $python ]] || python=python3

tidy_up() {
    local rc=$? pid
    for pid in "${servers[@]}"; do
        kill -9 "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    ! mountpoint -q "$dir/small" || umount "$dir/small"
    chmod -R u+rwx "$dir" 2>/dev/null || true
    rm -rf "$dir"
    ((rc == 0 || rc == 77)) || echo "FAILED (exit status $rc)" >&2
    exit "$rc"
}
trap tidy_up EXIT

flunk() {
    echo "flunk: $*" >&2
    echo "--- stdout" >&2
    head -c 2000 "$dir/out" >&2 || true
    echo "--- stderr" >&2
    head -c 2000 "$dir/err" >&2 || true
    exit 1
}

# run CODE ARGUMENT...: kvferry must end with that exit status within 20 s; its output is in $dir/out and $dir/err.
run() {
    local want=$1 rc=0
    shift
    timeout -k 5 20 "$KVFERRY" "$@" >"$dir/out" 2>"$dir/err" </dev/null || rc=$?
    ((rc == want)) || flunk "kvferry $*: exit status $rc, not $want"
}

# says TEXT, complains TEXT: what the last run printed to stdout, to stderr. A complaint is one line.
says() {
    grep -qF -- "$1" "$dir/out" || flunk "stdout does not say: $1"
}
says_not() {
    ! grep -qF -- "$1" "$dir/out" || flunk "stdout says: $1"
}
complains() {
    grep -qF -- "$1" "$dir/err" || flunk "stderr does not say: $1"
    (($(wc -l <"$dir/err") == 1)) || flunk "more than one line of complaint"
}

# json EXPRESSION: of the last run's output as `d`, in Python; must be true.
json() {
    "$python" - "$dir/out" "$1" <<'END' || flunk "not true of the JSON: $1"
import json, sys
with open(sys.argv[1]) as f:
    d = json.load(f)
sys.exit(0 if eval(sys.argv[2]) else 1)
END
}
# json_value EXPRESSION: prints it.
json_value() {
    "$python" - "$dir/out" "$1" <<'END'
import json, sys
with open(sys.argv[1]) as f:
    d = json.load(f)
print(eval(sys.argv[2]))
END
}

# start_redis NAME OPTION...: a server on the unix socket $dir/NAME.sock. Its process id is added to `servers`.
start_redis() {
    local name=$1 binary=${KVFT_SERVER:-redis-server} tries=0
    shift
    command -v "$binary" >/dev/null || {
        echo "no redis-server is installed"
        exit 77
    }
    mkdir -p "$dir/$name"
    "$binary" --port 0 --unixsocket "$dir/$name.sock" --dir "$dir/$name" --save "" --appendonly no "$@" \
        >"$dir/$name/log" 2>&1 </dev/null &
    servers+=($!)
    until [[ -S $dir/$name.sock ]]; do
        ((tries++ < 200)) || {
            cat "$dir/$name/log" >&2
            flunk "redis-server did not start"
        }
        sleep 0.05
    done
}

# The same three fields everywhere.
# shellcheck disable=SC2034
fields=(--field engine=test-1 --field model=0123 --field kv=f16)
