# SPDX-License-Identifier: Apache-2.0
"""check-vllm-tier: the secondary tier on a folder beside vLLM's own tier "fs", interleaved: saves and loads of the same
chunks, from and into one primary tier, are not slower.

Both are made and called as vLLM's tiering manager does it. Each round saves new chunks with one tier and then with the
other, loads them with both, and looks them up; which one is first alternates. The figures are the times of ours over
those of vLLM's, the median of ROUNDS pairs; after every load the bytes are compared. CHUNKS (64) of KIB (1440, a block
of 32 tokens of SmolLM2-135M in float32), ROUNDS (9), RATIO (1.0), FOLDER (a temporary one). Needs KVF_ENGINES."""

import os
import secrets
import statistics
import sys
import tempfile
import time
from types import SimpleNamespace

# In place of this folder, whose vllm.py is not vLLM.
sys.path[0] = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../python/test")

CHUNKS, KIB = int(os.environ.get("CHUNKS", "64")), int(os.environ.get("KIB", "1440"))
ROUNDS, RATIO = int(os.environ.get("ROUNDS", "9")), float(os.environ.get("RATIO", "1.0"))
FOLDER = os.environ.get("FOLDER")
CONTEXT = SimpleNamespace(new_req_ids=(), preempted_req_ids=())


class Lab:
    """One primary tier, and a secondary tier of each kind on it."""

    def __init__(self, folder):
        import numpy as np
        import pytest
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
        from vllm_tier_engine import name_without_files, offload_of

        name_without_files(pytest.MonkeyPatch())
        self.np = np
        self.region = SharedOffloadRegion(secrets.token_hex(8), 2 * CHUNKS, None, KIB * 1024, KIB * 1024)
        self.rows = self.region.create_kv_memoryview()
        self.bytes = np.asarray(self.rows)
        vllm_config, config = offload_of()
        spec = SimpleNamespace(
            config=config, blocks_per_chunk=1, kv_events_config=SimpleNamespace(enable_kv_cache_events=False)
        )

        def make(tier):
            return SecondaryTierFactory.create_secondary_tier(tier, self.rows, spec)

        self.vllm_config = vllm_config
        self.tiers = {
            "vLLM": make({"type": "fs", "root_dir": f"{folder}/fs"}),
            "kvferry": make({"type": "KvferryTier", "module_path": "kvferry.vllm", "store": f"file:{folder}/kvferry",
                             "lookup_timeout": 60, "save_timeout": 600, "load_timeout": 600}),
        }  # fmt: skip
        self.jobs = 0

    def close(self):
        for tier in self.tiers.values():
            tier.shutdown()
        self.bytes = None
        self.rows.release()
        self.region.cleanup()

    def finish(self, tier, jobs):
        """Polls as the tiering manager does, in each step, until so many jobs have ended. Returns their results."""
        results = []
        while len(results) < jobs:
            tier.on_schedule_end(CONTEXT)
            results += tier.get_finished_jobs()
        assert all(result.success for result in results), "a job has failed"

    def job(self, keys, first, is_promotion):
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self.jobs += 1
        request = SimpleNamespace(req_id=f"r{self.jobs}")
        return TransferJob(self.jobs, keys, self.np.arange(first, first + len(keys), dtype=self.np.int32), is_promotion,
                           request)  # fmt: skip

    def save(self, tier, keys):
        began = time.perf_counter()
        tier.submit_store(self.job(keys, 0, False))
        self.finish(tier, 1)
        return time.perf_counter() - began

    def load(self, tier, keys):
        """Into the second half of the rows, which hold something else."""
        self.bytes[CHUNKS:] = 0
        began = time.perf_counter()
        tier.submit_load(self.job(keys, CHUNKS, True))
        self.finish(tier, 1)
        took = time.perf_counter() - began
        assert self.np.array_equal(self.bytes[:CHUNKS], self.bytes[CHUNKS:]), "other bytes were loaded"
        return took

    def look_up(self, tier, keys):
        from vllm.v1.kv_offload.base import LookupResult

        self.jobs += 1
        request = SimpleNamespace(req_id=f"q{self.jobs}")
        tier.on_new_request(request)
        began = time.perf_counter()
        while {tier.lookup(key, request) for key in keys} != {LookupResult.HIT}:
            tier.on_schedule_end(CONTEXT)
            tier.get_finished_jobs()
        took = time.perf_counter() - began
        tier.on_request_finished(request)
        return took


def measure(lab):
    """By operation, for each round how many times as long ours takes as vLLM's."""
    ratios, seconds = {"save": [], "load": [], "lookup": []}, {}
    for round_ in range(ROUNDS + 1):
        lab.bytes[:CHUNKS] = lab.np.random.default_rng(round_).integers(0, 256, lab.bytes[:CHUNKS].shape, "uint8")
        keys = [secrets.token_bytes(32) + bytes(4) for _ in range(CHUNKS)]
        order = list(lab.tiers.items())[:: 1 if round_ % 2 else -1]
        for operation, do in {"save": lab.save, "lookup": lab.look_up, "load": lab.load}.items():
            took = {name: do(tier, keys) for name, tier in order}
            if round_ > 0:  # the first is slower for both
                ratios[operation].append(took["kvferry"] / took["vLLM"])
                for name in took:
                    seconds.setdefault((operation, name), []).append(took[name])
    return ratios, seconds


def main():
    folder = tempfile.TemporaryDirectory(prefix="check-vllm-tier-", dir=FOLDER)
    with folder as path:
        lab = Lab(path)
        try:
            ratios, seconds = measure(lab)
        finally:
            lab.close()
    print(f"{CHUNKS} chunks of {KIB} KiB, {ROUNDS} rounds, in {FOLDER or tempfile.gettempdir()}")
    for operation, all_ in ratios.items():
        ours, theirs = (1e3 * statistics.median(seconds[operation, name]) for name in ("kvferry", "vLLM"))
        print(f"  {operation}: {statistics.median(all_):.2f} of the time of vLLM's ({ours:.1f} and {theirs:.1f} ms); "
              f"{', '.join(f'{r:.2f}' for r in sorted(all_))}")  # fmt: skip
    medians = {operation: statistics.median(ratios[operation]) for operation in ("save", "load")}
    good = all(ratio <= RATIO for ratio in medians.values())
    print(f"check-vllm-tier: {'ok' if good else 'FAILED'}: beside vLLM's tier fs, saves take {medians['save']:.2f} and "
          f"loads {medians['load']:.2f} of its time (<= {RATIO:g}); every byte compared")  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
