#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# check-tls: TLS faults are refused with their reason, valid settings work in all three topologies.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${KVF_BUILD:-build/release}

"$build/test/live_tls_test"
