#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs all tests, stage by stage, and counts them at the end. A stage that fails does not stop the next one.
# usage: scripts/test.sh [STAGE...]; without an argument all stages.
# KVF_MODEL, KVF_PYTHON, KVF_PYTEST, KVF_VALKEY, KVF_LLAMA_DIR and KVF_LLAMA_SERVER must be set (make test does). KVF_FUZZ_SECONDS (20)
# is the time of each fuzz target.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

passed=0
failed=0
skipped=0
failures=()

# The count is always the last line, so that a run that dies half-way does not look like one that passed.
conclude() {
    local rc=$?
    if ((rc != 0 && failed == 0)); then
        failed=1
        failures+=("scripts/test.sh itself (exit status $rc)")
    fi
    ((${#failures[@]} == 0)) || printf 'failed: %s\n' "${failures[@]}"
    echo "$passed passed, $failed failed, $skipped skipped"
    ((failed == 0)) || exit 1
}
trap conclude EXIT

headline() {
    printf '\n== %s (%d s since the start)\n' "$1" "$SECONDS"
}

# one NAME COMMAND...: runs one check. Exit status 77 means skipped.
one() {
    local name=$1 rc=0
    shift
    headline "$name"
    "$@" || rc=$?
    if ((rc == 0)); then
        passed=$((passed + 1))
    elif ((rc == 77)); then
        skipped=$((skipped + 1))
    else
        failed=$((failed + 1))
        failures+=("$name")
    fi
    return 0
}

# attribute NAME FILE: prints a number of ctest's summary.
attribute() {
    grep -m1 -o "$1=\"[0-9]*\"" "$2" | tr -dc '0-9'
}

# tests PRESET ARGUMENT...: builds a preset and runs its tests with ctest.
tests() {
    local preset=$1 folder=build/$1 report all bad off name
    shift
    headline "build $preset"
    if ! scripts/build.sh "$preset"; then
        failed=$((failed + 1))
        failures+=("build $preset")
        return 0
    fi
    headline "test $preset"
    report=$PWD/$folder/tests.xml
    rm -f "$report"
    ctest --test-dir "$folder" --output-on-failure --no-tests=error -j 2 --output-junit "$report" "$@" || true
    if [[ ! -e $report ]]; then
        failed=$((failed + 1))
        failures+=("ctest $preset")
        return 0
    fi
    all=$(attribute tests "$report")
    bad=$(attribute failures "$report")
    off=$(($(attribute skipped "$report") + $(attribute disabled "$report")))
    passed=$((passed + all - bad - off))
    failed=$((failed + bad))
    skipped=$((skipped + off))
    while read -r name; do
        failures+=("$preset $name")
    done < <(grep -o '<testcase name="[^"]*"[^>]*status="fail"' "$report" | cut -d'"' -f2)
}

# pytests NAME PYTHON ARGUMENT...: runs tests of the Python package, and counts them one by one.
pytests() {
    local name=$1 python=$2 report=$PWD/build/release/$1.xml all bad off
    shift 2
    headline "$name"
    rm -f "$report"
    env PYTHONPATH="${PACKAGE:-build/release/python}" LD_PRELOAD="${PRELOAD:-}" "$python" -m pytest -q -rs --tb=short \
        --junit-xml="$report" "$@" || true
    if [[ ! -e $report ]]; then
        failed=$((failed + 1))
        failures+=("$name")
        return 0
    fi
    all=$(attribute tests "$report")
    off=$(attribute skipped "$report")
    bad=$(($(attribute failures "$report") + $(attribute errors "$report")))
    passed=$((passed + all - bad - off))
    failed=$((failed + bad))
    skipped=$((skipped + off))
    ((bad == 0)) || failures+=("$name ($bad of $all)")
}

# The extension under a sanitizer: closing, threads, queues, wrong arguments. Python is not built with it, so its runtime is
# loaded first. Python keeps memory until its end, which is no leak.
extension_under() {
    local preset=$1 runtime=$2
    PACKAGE=build/$preset/python PRELOAD=$(gcc -print-file-name="$runtime") \
        pytests "python $preset" "${KVF_PYTEST:-python3}" python/test/test_{manager,ext_{errors,objects,processes,queue,session,signals,store}}.py
}

fuzz_one() {
    local target=$1 name corpus found
    name=$(basename "$target")
    corpus=test/fuzz/corpus/${name%_fuzz}
    found=build/fuzz/found/$name
    mkdir -p "$found"
    local inputs=("$found")
    [[ ! -d $corpus ]] || inputs+=("$corpus")
    if ! "$target" -max_total_time="${KVF_FUZZ_SECONDS:-20}" -rss_limit_mb=2048 -timeout=10 \
        -artifact_prefix="build/fuzz/crash-$name-" "${inputs[@]}" >"build/fuzz/$name.log" 2>&1; then
        tail -n 40 "build/fuzz/$name.log"
        return 1
    fi
    grep '^Done ' "build/fuzz/$name.log"
}

# --- the stages

stage_release() {
    tests release
}

# on_server NAME BINARY: runs all tests that need a server, with that one.
on_server() {
    one "$1" "$2" --version
    export KVFT_SERVER=$2
    tests release -R '^(live/|shell/(article|badinput_store|cli_redis|examples|kill)$)'
    unset KVFT_SERVER
}

stage_redis() { # a part of the stage release
    on_server redis redis-server
}

stage_valkey() {
    if [[ ! -x ${KVF_VALKEY:-} && $(uname -m) != x86_64 ]]; then
        one "valkey: make setup has none for this machine" sh -c 'exit 77'
        return 0
    fi
    on_server valkey "${KVF_VALKEY:-valkey-server}"
}

stage_python() {
    local pytest=${KVF_PYTEST:-python3}
    one "build release" scripts/build.sh release
    one "mypy --strict" "$pytest" -m mypy
    PYTHONPATH=build/release/python one "the stubs are those of the extension" "$pytest" -m mypy.stubtest kvferry._kvferry \
        --allowlist python/test/stubs.allow
    one "ruff" "$pytest" -m ruff check python checks test/triton examples
    one "ruff format" "$pytest" -m ruff format --check python checks test/triton examples
    pytests "python tests" "$pytest" python/test
    LLAMA_CPP_LIB_PATH=$KVF_LLAMA_DIR/lib KVFERRY=$PWD/build/release/kvferry \
        pytests "llama-cpp-python tests" "${KVF_LLAMA_PYTHON:-python3}" python/test/test_llama_cpp.py
    if [[ -x ${KVF_ENGINES:-} ]]; then
        pytests "vLLM tests" "$KVF_ENGINES" python/test/test_vllm.py python/test/test_vllm_identity.py \
            python/test/test_vllm_device.py python/test/test_vllm_tier.py
        pytests "Transformers tests" "$KVF_ENGINES" python/test/test_hf.py python/test/test_hf_conformance.py
        pytests "KVCacheManager with torch" "$KVF_ENGINES" python/test/test_manager_torch.py
        pytests "SGLang tests" "$KVF_ENGINES" python/test/test_sglang.py
        pytests "LMCache tests" "$KVF_ENGINES" python/test/test_lmcache.py
        # Checks the bytes, and that nothing is many times slower. `make check-lmcache` checks the bounds.
        PYTHONPATH=build/release/python one "check-lmcache" "$KVF_ENGINES" checks/lmcache_native.py --short
    else
        one "vLLM tests: make setup-engines" sh -c 'exit 77'
        one "Transformers tests: make setup-engines" sh -c 'exit 77'
        one "KVCacheManager with torch: make setup-engines" sh -c 'exit 77'
        one "SGLang tests, LMCache tests, check-lmcache: make setup-engines" sh -c 'exit 77'
    fi
    # Checks the answers. `make check-manager` checks how fast it is, on a machine that does nothing else.
    KVF_BUILD=build/release PYTHONPATH=build/release/python one "check-manager" "$pytest" checks/manager.py --short
    # Checks the bytes and the memory. `make check-python-wire` checks the bound of 0.9, on a machine that does nothing else.
    BOUND=0.4 KVF_BUILD=build/release PYTHONPATH=build/release/python one "check-python-wire" "$pytest" checks/python_wire.py \
        --short
    one "check-wheel" checks/wheel.sh
}

stage_clang() {
    one "build by clang, warnings are errors" scripts/build.sh clang
}

stage_asan() {
    # Detects leaks, and uses of a function's memory after its return.
    export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1
    tests asan -L 'unit|live|shell'
    one "check-chaos under asan, 15 seeds" build/asan/checks/check_chaos 15
    ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc extension_under asan libasan.so
    unset ASAN_OPTIONS UBSAN_OPTIONS
}

stage_tsan() {
    export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 KVFT_SKIP='*fault*'
    tests tsan -L 'unit|live'
    one "check-chaos under tsan, 15 seeds" build/tsan/checks/check_chaos 15
    TSAN_OPTIONS=halt_on_error=1:die_after_fork=0 extension_under tsan libtsan.so
    unset TSAN_OPTIONS KVFT_SKIP
}

stage_fuzz() {
    local target any=0
    one "build the fuzzers" scripts/build.sh fuzz
    for target in build/fuzz/test/*_fuzz; do
        if [[ -x $target ]]; then
            any=1
            one "fuzz $(basename "$target")" fuzz_one "$target"
        fi
    done
    ((any == 1)) || one "fuzz targets are there" false
}

stage_checks() {
    export KVFERRY=$PWD/build/release/kvferry KVF_SOURCE=$PWD KVF_BUILD=$PWD/build/release
    one "check-mutants, the generator" checks/mutants.py --self-test
    one "check-layers, the check itself" checks/layers.py --self-test
    one "check-layers" checks/layers.py build/release
    one "check-docs, without the slow commands" checks/docs.py --self-test --quick
    one "check-abi" checks/abi.sh
    one "check-hostile, 1,000 cases" env CASES=1000 checks/hostile.sh
    one "check-128k" build/release/checks/check_128k
    one "check-evict, in short" build/release/checks/check_evict --seeds 2 --requests 600 --row allkeys-lfu,\ 10\ samples \
        --row allkeys-random
    one "check-chaos, 30 seeds" build/release/checks/check_chaos 30
    one "check-stall" build/release/checks/check_stall
    # Checks that staging has not become a cost of another kind. `make check-staging` checks the bound of 1.30.
    BOUND=1.60 one "check-staging" build/release/checks/check_staging
    # Checks the answers. `make check-demo` checks the factor of 100, on a machine that does nothing else.
    RATIO=10 one "check-demo" checks/demo.sh --check
    # Short forms: check the answers, and what is computed.
    RATIO=5 TOKENS=800 RESTARTS=1 one "check-server-restart" python3 checks/server_restart.py
    CLIENTS=4 TOKENS=600 one "check-shared" python3 checks/shared.py
    RATIO=10 TOKENS=600 ROUNDS=3 LLAMA_CPP_LIB_PATH=$KVF_LLAMA_DIR/lib PYTHONPATH=build/release/python \
        one "check-llama-cpp-python" "${KVF_LLAMA_PYTHON:-python3}" checks/llama_cpp_python.py
    # Without the figure: the parts that a busy machine does not change.
    one "check-triton-cache" python3 -B checks/triton_cache.py hit_and two_servers change ttl damaged down killed silent settings
    if [[ -x ${KVF_ENGINES:-} && -e ${KVF_HF_MODEL:-} ]]; then
        RATIO=3 TOKENS=520 TESTS=0 PYTHONPATH=build/release/python one "check-hf" "$KVF_ENGINES" checks/hf.py
    else
        one "check-hf: make setup-engines" sh -c 'exit 77'
    fi
}

stage_format() {
    one "formatted by .clang-format" scripts/format.sh --check
}

stages=("$@")
((${#stages[@]} > 0)) || stages=(format release valkey python clang asan tsan fuzz checks)
for stage in "${stages[@]}"; do
    "stage_$stage"
done
