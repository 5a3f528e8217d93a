# SPDX-License-Identifier: Apache-2.0
"""The speed of decoding, llama-server with the shim and write-behind beside a plain one: both run, and are asked in turn, in changing order;
the median of the ratios must be at least 0.98. PAIRS (24) of N (160) tokens each."""
import os, statistics, sys
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../test/server"))
import lab

PAIRS, N = int(os.environ.get("PAIRS", "24")), int(os.environ.get("N", "160"))


def speed(server, i):
    answer = server.ask(f"Story number {i}, told at length. Once upon a time", N, ignore_eos=True, cache_prompt=False)
    assert answer["tokens_predicted"] == N, answer
    return answer["timings"]["predicted_per_second"]


lab.need_all()
with lab.folder() as folder:
    args = ["-np", "1", "-c", "2048"]
    with lab.Server(folder, None, args) as plain, lab.Server(folder, f"file:{folder}/store", args) as shim:
        speed(plain, 1000), speed(shim, 1000)
        ratios = []
        for i in range(PAIRS):
            both = {}
            for server in (plain, shim) if i % 2 else (shim, plain):
                both[server] = speed(server, i)
            ratios.append(both[shim] / both[plain])
            print(f"pair {i + 1}: {both[plain]:.1f} tokens/s without, {both[shim]:.1f} with, ratio {ratios[-1]:.4f}", flush=True)
        plain.stop(), shim.stop()
        stats = shim.stats()
    median = statistics.median(ratios)
    # How well the median of this many pairs is known: the interval that holds the true median with 95 %.
    ranked, half = sorted(ratios), int(0.98 * len(ratios) ** 0.5)
    low, high = ranked[max(0, len(ranked) // 2 - half)], ranked[min(len(ranked) - 1, (len(ranked) - 1) // 2 + half)]
    written = stats["written_blocks"] >= PAIRS * (N // 64) and stats["shed_blocks"] == 0
    good = median >= 0.98 and written
    print(f"check-decode: {'ok' if good else 'FAILED'}: median ratio {median:.4f} (>= 0.98; 95 % interval {low:.4f} to {high:.4f}) "
          f"of {PAIRS} pairs, {min(ratios):.4f} to {max(ratios):.4f}; {stats['written_blocks']} blocks written behind")
    sys.exit(0 if good else 1)
