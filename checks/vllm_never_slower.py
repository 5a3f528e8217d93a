# SPDX-License-Identifier: Apache-2.0
"""check-vllm-never-slower: vLLM with a slow or silent store takes at most 1.05 of its time without kvferry.

Three engines run side by side: two without kvferry, and one with it. They answer the same prompt one after the other,
in random order. The store's answers come without a limit, at 100, 10 and 1 MB a second, and not at all. Each rate has
two cells: a prompt that is stored (the time to its first token), and a new prompt in each round, which is saved (the
time of 8 tokens, while its blocks are written).

A round gives the time with kvferry over the geometric mean of the two others. The median of the rounds counts, and its
interval decides, as in checks/cold.c: "ok" if all of it is at most 1.05, "FAILED" if all of it is above. Two engines
without kvferry differ as well, by where their memory and threads lie: their ratio is the control, and an excess within
it is no finding. Rounds go on while a cell is undecided, up to MAX_ROUNDS; what is undecided then does not fail, and is
named. vLLM keeps cores free for a connector if it binds threads by itself, so the check does not let it (vllm_lab), and
ends if the engines bind other threads. TOKENS (1024), ROUNDS (6), MAX_ROUNDS (24), RATIO (1.05), RATES (all, or names
separated by commas), SEED (1). Needs KVF_ENGINES and KVF_HF_MODEL (make setup-engines)."""

import math
import os
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../python/test"))
import vllm_lab
from conftest import RedisServer
from slow_proxy import SlowProxy

TOKENS, RATIO = int(os.environ.get("TOKENS", "1024")), float(os.environ.get("RATIO", "1.05"))
ROUNDS, MAX_ROUNDS = int(os.environ.get("ROUNDS", "6")), int(os.environ.get("MAX_ROUNDS", "24"))
RATES = {"no limit": None, "100 MB/s": 1e8, "10 MB/s": 1e7, "1 MB/s": 1e6, "silent": 0}
CELLS = [f"{name}, {what}" for name in RATES for what in ("stored", "new")]
ANSWER = 8  # tokens, while the blocks of a new prompt are written
random.seed(int(os.environ.get("SEED", "1")))


def interval(values):
    """(low, median, high): low to high holds the true median in at least 95 of 100 series (order statistics)."""
    chance, tail, k = 0.5 ** len(values), 0.0, 0
    while tail + chance <= 0.025:
        tail += chance
        chance *= (len(values) - k) / (k + 1)
        k += 1
    ordered = sorted(values)
    ends = (ordered[k - 1], ordered[-k]) if k > 0 else (0.0, math.inf)
    return ends[0], statistics.median(values), ends[1]


class Cell:
    """The rounds of one rate, with a stored prompt or with new ones."""

    def __init__(self, name):
        self.name, self.ratios, self.controls = name, [], []

    def add(self, one, other, ours):
        self.ratios.append(ours / math.sqrt(one * other))
        self.controls.append(other / one)

    @property
    def bound(self):
        """Two engines without kvferry differ by this much."""
        low, _, high = interval(self.controls)
        is_apart = low > 1 or high < 1  # one of them is the slower one; the mean of both is in between
        return max(RATIO, math.sqrt(max(high, 1 / low)) if is_apart else RATIO)

    @property
    def verdict(self):
        low, _, high = interval(self.ratios)
        return "ok" if high <= self.bound else "FAILED" if low > self.bound else "undecided"

    def show(self):
        low, median, high = interval(self.ratios)
        control = statistics.median(self.controls)
        print(f"  {self.name}: {median:.3f} ({low:.3f} to {high:.3f}), {len(self.ratios)} rounds; control "
              f"{control:.3f}: {self.verdict}", flush=True)  # fmt: skip


def timed(engine, prompt, num):
    engine.reset()
    return engine.run(prompt, num=num)["seconds"]


def new_prompt(tokens, number):
    """Has no block in common with others: it begins with another token."""
    return tokens[number : number + 1] + tokens[: TOKENS - 1]


def run_round(cell, engines, prompt, num):
    seconds = {name: timed(engines[name], prompt, num) for name in random.sample(sorted(engines), len(engines))}
    engines["ours"].run(prompt[:40], num=4)  # its steps see the end of what it saves
    cell.add(seconds["one"], seconds["other"], seconds["ours"])


def threads_of(engine):
    """What vLLM logs of the threads of an engine, but for what it reserves where that is unused."""
    lines = [line.rsplit("] ", 1)[-1].strip() for line in engine.text().splitlines()]
    return [line for line in lines if line.startswith(("VLLM_CPU_OMP_THREADS_BIND=", "local_rank="))]


def require_equal_threads(engines):
    threads = {name: threads_of(engine) for name, engine in engines.items()}
    if not threads["one"] or any(lines != threads["one"] for lines in threads.values()):
        raise SystemExit(f"check-vllm-never-slower: FAILED: the engines compute with other threads: {threads}")


def measure(proxy, engines):
    tokens = vllm_lab.tokens()
    stored, numbers = tokens[:TOKENS], iter(range(600, 100000))
    for engine in engines.values():
        for _ in range(2):
            engine.run(tokens[-200:], num=2)
            engine.reset()
    engines["ours"].run(stored)
    chosen = os.environ.get("RATES", "")
    cells = [Cell(name) for name in CELLS if not chosen or name.split(",")[0] in chosen.split(",")]
    for cell in cells:
        rate, what = cell.name.split(", ")
        proxy.rate = RATES[rate]
        while len(cell.ratios) < ROUNDS or (cell.verdict == "undecided" and len(cell.ratios) < MAX_ROUNDS):
            is_new = what == "new"
            prompt = new_prompt(tokens, next(numbers)) if is_new else stored
            run_round(cell, engines, prompt, ANSWER if is_new else 1)
        cell.show()
    proxy.rate = None
    return cells


def main():
    missing = vllm_lab.missing()
    if missing is not None:
        print(f"check-vllm-never-slower: skipped: {missing}")
        return 77
    with tempfile.TemporaryDirectory(prefix="check-vllm-") as folder, ExitStack() as stack:
        server = RedisServer(Path(folder))
        stack.callback(server.stop)
        proxy = SlowProxy(server.port, None)
        stack.callback(proxy.close)
        engines = {
            name: stack.enter_context(vllm_lab.EngineProcess({"store": [proxy.url]} if name == "ours" else None))
            for name in ("one", "other", "ours")
        }
        require_equal_threads(engines)
        cells = measure(proxy, engines)
    worst = max(cells, key=lambda cell: interval(cell.ratios)[1] / cell.bound)
    failed, open_ = ([c.name for c in cells if c.verdict == verdict] for verdict in ("FAILED", "undecided"))
    verdict = f"FAILED ({'; '.join(failed)})" if failed else "ok"
    low, median, high = interval(worst.ratios)
    print(
        f"check-vllm-never-slower: {verdict}: {TOKENS} tokens: at most {median:.3f} ({low:.3f} to {high:.3f}) of the "
        f"time without kvferry ({worst.name}, <= {worst.bound:.3f}); undecided: {'; '.join(open_) or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
