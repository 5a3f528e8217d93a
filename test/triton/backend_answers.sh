#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The backend kvferry in a real Triton: answers, streams, sessions, limits and bad input.
set -euo pipefail
[[ -x ${KVF_TRITON_PYTHON:-} ]] || { echo "there is no Triton: make setup-triton" >&2; exit 77; }
exec "$KVF_TRITON_PYTHON" -B "$(dirname "${BASH_SOURCE[0]}")/backend_answers.py" "$@"
