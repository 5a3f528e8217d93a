#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The short form of `make check-triton`: a real Triton, started anew, loads a prompt of 700 tokens.
set -euo pipefail
[[ -x ${KVF_TRITON_PYTHON:-} ]] || { echo "there is no Triton: make setup-triton" >&2; exit 77; }
exec "$KVF_TRITON_PYTHON" -B "$KVF_SOURCE/checks/triton_demo.py" --check --tokens 700
