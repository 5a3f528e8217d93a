#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# check-faults: the n-th allocation and the n-th system call fail, for every n.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${KVF_BUILD:-build/release}

"$build/test/live_faults_test"
