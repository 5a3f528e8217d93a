# SPDX-License-Identifier: Apache-2.0
"""check-vllm-never-slower: vLLM with a slow or silent store takes at most 1.05 of its time without kvferry.

Two engines run side by side, one of them with kvferry, and answer the same prompt in turn. The store's answers come
without a limit, at 100, 10 and 1 MB a second, and not at all. The figure is the time to the first token of the one over
that of the other, the median of ROUNDS pairs. TOKENS (1024), ROUNDS (5), RATIO (1.05). Needs KVF_ENGINES and
KVF_HF_MODEL (make setup-engines)."""

import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../python/test"))
import vllm_lab
from conftest import RedisServer
from slow_proxy import SlowProxy

TOKENS, ROUNDS = int(os.environ.get("TOKENS", "1024")), int(os.environ.get("ROUNDS", "5"))
RATIO = float(os.environ.get("RATIO", "1.05"))
RATES = {"no limit": None, "100 MB/s": 1e8, "10 MB/s": 1e7, "1 MB/s": 1e6, "silent": 0}


def first_token(engine, prompt):
    engine.reset()
    return engine.run(prompt)["seconds"]


def compare(plain, ours, prompt):
    """The times of the engine with kvferry over those of the one without, one after the other."""
    pairs = [(first_token(plain, prompt), first_token(ours, prompt)) for _ in range(ROUNDS)]
    return [with_ / without for without, with_ in pairs]


def measure(proxy, plain, ours):
    tokens = vllm_lab.tokens()
    prompt = tokens[:TOKENS]
    for engine in (plain, ours):
        for _ in range(2):
            engine.run(tokens[-200:], num=2)
            engine.reset()
    ours.run(prompt)
    ratios = {}
    for name, rate in RATES.items():
        proxy.rate = rate
        all_ = compare(plain, ours, prompt)
        ratios[name] = statistics.median(all_)
        print(f"  {name}: {ratios[name]:.3f}, median of {', '.join(f'{r:.2f}' for r in sorted(all_))}", flush=True)
    proxy.rate = None
    return ratios


def main():
    missing = vllm_lab.missing()
    if missing is not None:
        print(f"check-vllm-never-slower: skipped: {missing}")
        return 77
    with tempfile.TemporaryDirectory(prefix="check-vllm-") as folder:
        server = RedisServer(Path(folder))
        proxy = SlowProxy(server.port, None)
        try:
            with vllm_lab.EngineProcess(None) as plain, vllm_lab.EngineProcess({"store": [proxy.url]}) as ours:
                ratios = measure(proxy, plain, ours)
        finally:
            proxy.close()
            server.stop()
    worst = max(ratios, key=lambda name: ratios[name])
    good = ratios[worst] <= RATIO
    print(
        f"check-vllm-never-slower: {'ok' if good else 'FAILED'}: {TOKENS} tokens: the first token takes "
        f"{ratios[worst]:.3f} of the time without kvferry ({worst}, <= {RATIO:g}), {min(ratios.values()):.3f} at best"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
