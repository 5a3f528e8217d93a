#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# check-wheel: the wheel of the Python package. A source archive is made, a wheel is built of it without the network, and is
# repaired (auditwheel). Then it is installed into a clean environment of each Python from 3.11 to 3.13 that is at hand, where
# nothing else is: no numpy, no build tools, no libraries of ours. There it is imported and used: blocks, a queue, a session,
# KVCacheManager, the program. The wheel exports nothing but its module, and has at most 3 MB.
# KVF_PYTEST names the Python that builds (make setup has it). PYTHONS="python3.12 ..." names others to install into.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly max_bytes=3000000
work=$(mktemp -d)
server=''
cleanup() {
    [[ -z $server ]] || kill "$server" 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT

fail() {
    echo "check-wheel: $*" >&2
    exit 1
}

# quietly LOG COMMAND...: its output only where it fails.
quietly() {
    local log=$work/$1.log
    shift
    "$@" >"$log" 2>&1 || {
        tail -n 40 "$log" >&2
        fail "failed: $*"
    }
}

# Without a network, where this user may do that.
offline=()
! unshare -n true 2>/dev/null || offline=(unshare -n)

# The first Python of a minor version that is at hand; of the user's own versions, and of the system.
python_of() {
    local found
    for found in "$HOME"/.pyenv/versions/"$1".*/bin/python /usr/bin/python"$1" /usr/local/bin/python"$1"; do
        if "$found" -c 'import ensurepip, sys; assert sys.version_info[:2] == tuple(map(int, sys.argv[1].split(".")))' "$1" \
            2>/dev/null; then
            echo "$found"
            return 0
        fi
    done
}

build() {
    local python=${KVF_PYTEST:?run make check-wheel, or scripts/setup.sh --print} at=$SECONDS
    PATH=$(dirname "$python"):$PATH
    echo "building the source archive and, of it, the wheel ..."
    quietly sdist "$python" -m build --sdist --no-isolation --outdir "$work" .
    quietly wheel "${offline[@]}" env -u KVF_LLAMA_DIR "$python" -m pip wheel --disable-pip-version-check --no-index --no-deps \
        --no-build-isolation --wheel-dir "$work" "$work"/kvferry-*.tar.gz
    quietly repair "$python" -m auditwheel repair --wheel-dir "$work/repaired" "$work"/kvferry-*.whl
    wheel=$(echo "$work"/repaired/kvferry-*.whl)
    bytes=$(stat -c %s "$wheel")
    echo "$(basename "$wheel"): $bytes bytes, in $((SECONDS - at)) s"
}

check_contents() {
    local exports needed name
    ((bytes <= max_bytes)) || fail "the wheel has $bytes bytes, more than $max_bytes"
    ! tar -tzf "$work"/kvferry-*.tar.gz | grep -E '^[^/]+/(build|docs|scripts)/' > "$work/strays" ||
        fail "the source archive has more than the sources: $(head -1 "$work/strays")"
    [[ $wheel == *-cp311-abi3-manylinux_* ]] || fail "not the name of a wheel for all Pythons from 3.11 on: $wheel"
    (cd "$work" && "${KVF_PYTEST}" -m zipfile -e "$wheel" unpacked)
    exports=$(nm -D --defined-only "$work/unpacked/kvferry/_kvferry.abi3.so" | awk '{ print $3 }')
    [[ $exports == PyInit__kvferry ]] || fail "the extension exports more than its module: $exports"
    needed=$(readelf -d "$work/unpacked/kvferry/_kvferry.abi3.so" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
    for name in $needed; do
        [[ $name =~ ^(libc|libm|ld-linux.*)\.so\. || -e $work/unpacked/kvferry.libs/$name ]] ||
            fail "the extension needs a library of the system: $name"
    done
    for name in LICENSE NOTICE python/BUNDLED.txt; do
        [[ -e $(echo "$work"/unpacked/*.dist-info/licenses/$name) ]] || fail "the wheel lacks $name"
    done
}

start_server() {
    redis-server --port 0 --unixsocket "$work/redis.sock" --save '' --maxmemory 1gb --maxmemory-policy allkeys-lru \
        --dir "$work" >"$work/redis.log" 2>&1 &
    server=$!
    for _ in $(seq 600); do
        [[ ! -S $work/redis.sock ]] || return 0
        sleep 0.1
    done
    fail "redis-server does not start: $(tail -n 3 "$work/redis.log")"
}

# What a user does first, with nothing but the wheel.
use() {
    cat <<'END_OF_USE'
import os, subprocess, sys
import kvferry
assert not {"asyncio", "numpy", "ssl", "torch"} & set(sys.modules)
import asyncio

url = "redis+unix://" + sys.argv[1]
assert os.path.dirname(kvferry.__file__).startswith(sys.prefix), kvferry.__file__
with kvferry.Store(url) as store:
    space = kvferry.Space(store, {"engine": "wheel-1", "model": sys.version, "kv": "bytes"}, block_tokens=4)
    tokens = list(range(16))
    keys, source = space.chain(tokens), [os.urandom(10_000) for _ in range(4)]
    into = [bytearray(10_000) for _ in source]

    async def through_a_queue():
        async with kvferry.Queue(store) as queue:
            assert (await queue.save(space, keys, source, tokens=tokens)).num_ok == 4
            assert (await queue.load(space, keys, into, tokens=tokens)).num_ok == 4

    asyncio.run(through_a_queue())
    assert [bytes(b) for b in into] == source
    store.session_save("wheel", source[0], source[1])
    assert bytes(store.session_load("wheel").k) == source[0]

if hasattr(kvferry, "KVCacheManager"):
    with kvferry.KVCacheManager(unix_socket_path=sys.argv[1]) as manager:
        manager.save_kv_cache("manager", source[0], source[1])
        k, v = manager.load_kv_cache("manager")
        assert (bytes(k), bytes(v)) == (source[0], source[1])
        assert manager.load_kv_cache("nobody") == (None, None)

program = os.path.join(sys.prefix, "bin", "kvferry")
shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
assert shown == f"kvferry {kvferry.__version__}\n", shown
subprocess.run([program, "doctor", "--store", url], check=True, stdout=subprocess.DEVNULL)
subprocess.run([sys.executable, "-m", "kvferry", "verify", "--store", url], check=True, stdout=subprocess.DEVNULL)

print(f"  Python {sys.version.split()[0]}: import, blocks, queue, session, manager, program")
END_OF_USE
}

# install_and_use PYTHON: in an environment where nothing else is.
install_and_use() {
    local venv=$work/venv-$used
    quietly "venv-$used" "$1" -m venv "$venv"
    quietly "install-$used" "$venv/bin/python" -m pip install --disable-pip-version-check --no-index "$wheel"
    (cd "$work" && env -i HOME="$work" PATH="$venv/bin:/usr/bin:/bin" "$venv/bin/python" "$work/use.py" "$work/redis.sock") ||
        fail "the wheel does not work in $1"
    used=$((used + 1))
}

build
check_contents
start_server
use >"$work/use.py"
used=0
missing=()
if [[ -n ${PYTHONS:-} ]]; then
    for python in $PYTHONS; do
        install_and_use "$python"
    done
else
    for minor in 3.11 3.12 3.13; do
        python=$(python_of "$minor")
        if [[ -n $python ]]; then
            install_and_use "$python"
        else
            missing+=("$minor")
        fi
    done
fi
((used > 0)) || fail "no Python from 3.11 to 3.13 is at hand"
((${#missing[@]} == 0)) || echo "  not at hand: Python ${missing[*]}"
echo "the wheel has $((bytes / 1000)) kB (at most $((max_bytes / 1000))) and works in $used Pythons"
