#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The golden files equal what a program computes that follows docs/record-format.md and shares nothing with kvferry.
set -euo pipefail
"${KVF_PYTHON:-python3}" "${KVF_SOURCE:?the source folder}/test/golden/vectors.py"
