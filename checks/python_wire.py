#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check-python-wire: what Python costs at the wire.

1. kvferry.Queue loads and saves 16 buffers of 1 and of 4 MiB, over Redis on a unix socket, Redis over TCP, and a
   folder. A process in C does the same (test/support/queue_peer.c). Both take turns; a figure is the median of the
   ratios within a pair, C's time by Python's. Pairs are added until its 95 % interval leaves the bound on one side;
   below the bound not before there are many, since other programs disturb them.
2. 100,000 calls, in rounds of every kind, leave no memory behind.
3. Eight threads at once, each with a queue of its own: every byte is what was saved.

Exit status 0 if no ratio is below 0.9 (BOUND), nothing grows, and all bytes are right. `--short`: fewer pairs and
calls, and a figure is the median, or the ratio of the shortest times if that is better: other programs disturb both.
Needs KVF_BUILD (the build folder) and the package in PYTHONPATH: make check-python-wire.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kvferry

NUM_BLOCKS = 16
MIB = 1 << 20
BOUND = float(os.environ.get("BOUND", "0.9"))
FEW, FEWEST, MANY, MOST = 4, 12, 60, 200  # pairs: of the same processes, to pass, to fail, to give up
FIELDS = {"engine": "wire-1", "model": "python", "kv": "bytes"}


# ---- one contender each: this process as a worker, and the one in C


def work(url: str, size: int) -> None:
    """As kvf_queue_peer: lines "save PASSES" and "load PASSES" are answered with the seconds that they took."""
    memory = memoryview(mmap.mmap(-1, NUM_BLOCKS * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))  # as C's
    blocks = [memory[i * size : (i + 1) * size] for i in range(NUM_BLOCKS)]
    for i, block in enumerate(blocks):
        block[:] = bytes([i + 1]) * size
    store = kvferry.Store(url)
    space = kvferry.Space(store, FIELDS, block_tokens=1)
    queue = kvferry.Queue(store, 4)
    keys = space.chain(range(NUM_BLOCKS))

    def run(ticket: int | None) -> int:
        assert ticket is not None
        while not (done := queue.reap()):
            queue.wait()
        return done[0].num_ok

    def one_pass(save: bool) -> float:
        """What is stored already would not be written. Removing it is not timed."""
        if save:
            run(queue.submit_remove(space, keys))
        start = time.monotonic()
        num_ok = run((queue.submit_save if save else queue.submit_load)(space, keys, blocks))
        assert num_ok == NUM_BLOCKS
        return time.monotonic() - start

    for line in sys.stdin:
        word, passes = line.split()
        took = sum(one_pass(word == "save") for _ in range(int(passes)))
        print(f"{took:.6f}", flush=True)


class Contender:
    def __init__(self, command: list[str], url: str, size: int) -> None:
        self.process = subprocess.Popen(
            [*command, url, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def take(self, word: str, passes: int) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word} {passes}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit("check-python-wire: a contender has ended early")
        return float(line)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# ---- 1. ratios


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by ranks."""
    ordered, n = sorted(ratios), len(ratios)
    reach = math.ceil(0.98 * math.sqrt(n))
    return ordered[max(0, n // 2 - reach)], ordered[min(n - 1, (n - 1) // 2 + reach)]


def is_clear(ratios: list[float]) -> bool:
    if len(ratios) < FEWEST:
        return False
    low, high = interval(ratios)
    return low >= BOUND or (high < BOUND and len(ratios) >= MANY)


class Pairs:
    """Interleaved pairs of one cell."""

    def __init__(self) -> None:
        self.ratios: list[float] = []
        self.best_c = self.best_python = math.inf

    def add(self, of_c: float, of_python: float) -> None:
        self.ratios.append(of_c / of_python)
        self.best_c = min(self.best_c, of_c)
        self.best_python = min(self.best_python, of_python)


class Contenders:
    """Both, for one store and one size."""

    def __init__(self, url: str, size: int) -> None:
        peer = str(Path(os.environ["KVF_BUILD"]) / "test" / "kvf_queue_peer")
        self.c = Contender([peer], url, size)
        self.python = Contender([sys.executable, __file__, "--worker"], url, size)
        for one in (self.c, self.python):
            one.take("save", 1)

    def passes(self, word: str) -> int:
        """So many that they take a while, which other programs disturb less."""
        passes = 1
        while self.c.take(word, passes) < 0.05:
            passes *= 2
        return passes

    def pair(self, word: str, passes: int, c_first: bool) -> tuple[float, float]:
        if c_first:
            of_c = self.c.take(word, passes)
            return of_c, self.python.take(word, passes)
        of_python = self.python.take(word, passes)
        return self.c.take(word, passes), of_python

    def end(self) -> None:
        self.c.end()
        self.python.end()


def measure(url: str, size: int, word: str, most: int) -> tuple[Pairs, int]:
    """Pairs, and how many passes each has. Every few pairs have new processes: one may be lucky for all its life."""
    pairs, passes = Pairs(), 0
    while len(pairs.ratios) < most and not is_clear(pairs.ratios):
        both = Contenders(url, size)
        passes = passes or both.passes(word)
        for i in range(FEW):
            pairs.add(*both.pair(word, passes, c_first=i % 2 == 0))
        both.end()
    return pairs, passes


def compare(url: str, name: str, short: bool) -> list[float]:
    figures = []
    for size in (MIB, 4 * MIB):
        for word in ("save", "load"):
            pairs, passes = measure(url, size, word, FEWEST if short else MOST)
            low, high = interval(pairs.ratios)
            median, best = statistics.median(pairs.ratios), pairs.best_c / pairs.best_python
            figures.append(max(best, median) if short else median)
            rate = NUM_BLOCKS * size * passes / pairs.best_c / 1e9
            print(
                f"  {name:5} {word} {size // MIB} MiB: {median:.3f} of C (95 %: {low:.3f} to {high:.3f}, "
                f"{len(pairs.ratios)} pairs), at best {best:.3f}; C at best {rate:.2f} GB/s",
                flush=True,
            )
    return figures


# ---- 2. memory


def resident_bytes() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * mmap.PAGESIZE


def growth(calls: int) -> int:
    """Bytes that this process grows by over as many calls, after a tenth as many."""
    with kvferry.Store("mem:?max=64M") as store, kvferry.Queue(store) as queue:
        space = kvferry.Space(store, FIELDS, block_tokens=4)
        pool = bytearray(4096)

        def round(i: int) -> int:
            tokens = [i % 64] * 16
            keys = space.chain(tokens)
            space.save(keys, [bytes(500)] * 4, tokens=tokens)
            space.load(keys, [bytearray(500) for _ in range(4)], tokens=tokens)
            space.load(keys, [memoryview(pool)[j * 500 : j * 500 + 500] for j in range(4)], each=True)
            space.find(keys)
            store.stats()
            queue.submit_load(space, keys, [bytearray(500) for _ in range(4)])
            queue.submit_match(space, keys)
            store.session_save(f"{i % 16}", pool, pool, dtype="uint8", shape=(4096,))
            session = store.session_load(f"{i % 16}")
            assert session is not None
            with contextlib.suppress(ValueError):
                space.match(b"not a key")
            num = 10
            while len(queue):
                queue.wait()
                num += len(queue.reap())
            return num

        def run(num: int) -> None:
            made = 0
            while made < num:
                made += round(made)

        run(calls // 10)
        before = resident_bytes()
        run(calls)
        return resident_bytes() - before


# ---- 3. threads


def threads(url: str, rounds: int) -> float:
    """Eight at once; returns the GB/s of all."""
    size, num = 256 << 10, 8
    with kvferry.Store(url) as store:
        space = kvferry.Space(store, {**FIELDS, "tenant": "threads"}, block_tokens=1)

        def one(me: int) -> int:
            draw = random.Random(me)
            queue = kvferry.Queue(store, 4)
            moved = 0
            for _ in range(rounds):
                keys = space.chain([draw.randrange(1 << 32) for _ in range(num)])
                source = [draw.randbytes(size) for _ in range(num)]
                into = [bytearray(size) for _ in range(num)]
                for submit, memory in ((queue.submit_save, source), (queue.submit_load, into)):
                    submit(space, keys, memory)
                    while not (done := queue.reap()):
                        queue.wait()
                    assert done[0].num_ok == num, done
                    moved += num * size
                assert [bytes(b) for b in into] == source, "other bytes than were saved"
            return moved

        start = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            moved = sum(pool.map(one, range(8)))
        return moved / (time.monotonic() - start) / 1e9


# ---- all


def start_server(folder: str) -> tuple[subprocess.Popen[bytes], int]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = subprocess.Popen(
        ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", f"{folder}/redis.sock"]
        + ["--save", "", "--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru", "--dir", folder],
        stdout=subprocess.DEVNULL,
    )
    while not os.path.exists(f"{folder}/redis.sock"):
        assert server.poll() is None, "redis-server has ended"
        time.sleep(0.05)
    return server, port


def main() -> int:
    short = "--short" in sys.argv[1:]
    if shutil.which("redis-server") is None:
        print("check-python-wire: there is no redis-server", file=sys.stderr)
        return 77
    figures: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        server, port = start_server(folder)
        try:
            urls = {
                "unix": f"redis+unix://{folder}/redis.sock",
                "tcp": f"redis://127.0.0.1:{port}",
                "file": f"file:{folder}/store",
            }
            for name, url in urls.items():
                figures += compare(url, name, short)
            rate = threads(urls["unix"], 2 if short else 20)
            print(f"  8 threads at once: all bytes right, {rate:.2f} GB/s with the checks of the test", flush=True)
        finally:
            server.terminate()
            server.wait()
    calls = 10_000 if short else 100_000
    grown = growth(calls)
    print(f"  {calls} calls: the process grew by {grown / 1024:.0f} KiB", flush=True)
    least = min(figures)
    print(f"Python has at least {least:.2f} of the speed of C (bound {BOUND:.2f}), and grew by {grown / 1024:.0f} KiB")
    return 0 if least >= BOUND and grown < 2 * MIB else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main())
