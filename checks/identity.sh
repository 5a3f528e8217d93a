#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# check-identity: what changes the bytes of a block is in its name or refused; the list of settings is that of llama.h.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${KVF_BUILD:-build/release}

: "${KVF_LLAMA_DIR:?where llama.cpp is: make check-identity sets it}"
ctest --test-dir "$build" -L identity --output-on-failure --no-tests=error
python3 test/llama/settings_test.py "$KVF_LLAMA_DIR/include/llama.h"
