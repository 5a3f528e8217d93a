#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# check-tenant: what a tenant without the secret tries, then what sealing costs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${KVF_BUILD:-build/release}

"$build/test/live_tenant_test"
"$build/checks/check_tenant"
