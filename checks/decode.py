# SPDX-License-Identifier: Apache-2.0
"""check-decode: the speed of generating tokens with the shim and write-behind, relative to that without.

check_decode runs both in one process, token by token in turn, and prints the times of PAIRS (64) pairs of 64 tokens.
The median of the ratios must be at least 0.98, and so must the lower end of its 95 % interval: not resolved counts as
failed. The store is a folder."""

import json
import os
import statistics
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../test/server"))
import lab

PAIRS, BLOCK = int(os.environ.get("PAIRS", "64")), 64

lab.need_all()
with lab.folder() as folder:
    stats = f"{folder}/stats.json"
    command = [
        lab.KVFERRY,
        "exec",
        "--store",
        f"file:{folder}/store",
        "--block-tokens",
        str(BLOCK),
        "--quiet",
        "--stats",
        stats,
        "--",
        os.path.join(os.environ["KVF_BUILD"], "checks/check_decode"),
        lab.MODEL,
        str(PAIRS),
    ]
    ratios, spent = [], [0, 0]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_WAIT_POLICY": "passive"}
    ) as bench:
        for line in bench.stdout:
            plain, shim = (float(x) for x in line.split())
            ratios.append(plain / shim)
            spent[0] += plain
            spent[1] += shim
            if len(ratios) % 8 == 0:
                print(
                    f"{len(ratios)} pairs: {len(ratios) * BLOCK / spent[0]:.1f} tokens/s without, "
                    f"{len(ratios) * BLOCK / spent[1]:.1f} with, "
                    f"median ratio {statistics.median(ratios):.4f}",
                    flush=True,
                )
    if bench.returncode != 0 or len(ratios) != PAIRS:
        sys.exit(f"check_decode failed ({bench.returncode})")
    with open(stats) as f:
        counted = json.load(f)
median = statistics.median(ratios)
# How well the median of this many pairs is known: the ranks between which the true one lies with 95 %.
ranked, half = sorted(ratios), 0.98 * PAIRS**0.5
low, high = ranked[max(0, int(PAIRS / 2 - half))], ranked[min(PAIRS - 1, int(PAIRS / 2 + half))]
written = counted["written_blocks"] >= PAIRS and counted["shed_blocks"] == 0
good = low >= 0.98 and written
print(
    f"check-decode: {'ok' if good else 'FAILED'}: median ratio {median:.4f}, 95 % interval "
    f"{low:.4f} to {high:.4f} (>= 0.98) of {PAIRS} pairs, "
    f"{ranked[0]:.4f} to {ranked[-1]:.4f}; {counted['written_blocks']} blocks written behind"
)
sys.exit(0 if good else 1)
