#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# check-exact: logits after a load equal those of a run without one, by KV type and flash attention.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${KVF_BUILD:-build/release}

KVFT_EXACT=full "$build/test/llama_exact_test"
