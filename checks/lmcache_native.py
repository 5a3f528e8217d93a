# SPDX-License-Identifier: Apache-2.0
"""check-lmcache: kvferry.lmcache.KvferryClient beside LMCache's own native client, on one redis-server.

Both are driven as LMCache's NativeConnectorL2Adapter drives them: a batch is submitted, poll() waits for the client's
descriptor, completions are drained. 16 values of 1 and of 4 MiB are saved and loaded, from and into one memory, and
512 keys are looked up. The two take turns, and a figure is the median of the ratios within a pair, LMCache's time by
ours, with its 95 % interval by ranks. Pairs are added until the interval is above the bound, or there are 60.
LMCache's client has as many threads as it is fastest with: its default of 8, or 2. It has no unix socket: there ours is
compared with its TCP.

Exit status 0 if loads and saves have at least 1.0 of its speed over TCP, 1.3 over a unix socket, and lookups are 5
times faster. `--short`: fewer pairs, 0.2 of these bounds, and the ratio of the shortest times where that is better: for
a machine that does something else as well.
Needs KVF_ENGINES (make setup-engines)."""

import mmap
import os
import select
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../python/test"))
try:
    import torch  # noqa: F401  LMCache's client needs its libraries
    from lmcache.lmcache_redis import LMCacheRedisClient
except ImportError as error:
    print(f"check-lmcache: LMCache's native client does not load: {error} (make setup-engines)", file=sys.stderr)
    sys.exit(77)
from conftest import RedisServer
from python_wire import interval

from kvferry.lmcache import KvferryClient

NUM, KEYS = 16, 512
MIB = 1 << 20
SHORT = "--short" in sys.argv[1:]
FEWEST, MOST = (5, 5) if SHORT else (12, 60)
SLACK = 0.2 if SHORT else 1.0
BOUNDS = {"tcp": 1.0 * SLACK, "unix": 1.3 * SLACK, "lookup": 5.0 * SLACK}


def say(text):
    print(text, flush=True)


class Contender:
    """A native client of LMCache's interface."""

    def __init__(self, client):
        self.client = client
        self._poll = select.poll()
        self._poll.register(client.event_fd(), select.POLLIN)

    def take(self, submit, *arguments):
        """The seconds of a batch, and whether it succeeded for each key."""
        begin = time.perf_counter()
        number = submit(*arguments)
        while True:
            self._poll.poll()
            for got, ok, error, each in self.client.drain_completions():
                if got == number:
                    took = time.perf_counter() - begin
                    assert ok, error
                    return took, each

    def save(self, keys, blocks):
        """What is there already would not be written by ours. Removing it is not timed."""
        self.take(self.client.submit_batch_delete, keys)
        return self.take(self.client.submit_batch_set, keys, blocks)[0]

    def load(self, keys, blocks):
        took, each = self.take(self.client.submit_batch_get, keys, blocks)
        assert each is None or all(each), "a value is not there"
        return took

    def lookup(self, keys, _):
        took, each = self.take(self.client.submit_batch_exists, keys)
        assert all(each), "a key is not there"
        return took


def lmcaches(port, workers):
    return Contender(LMCacheRedisClient("127.0.0.1", port, workers))


def ours(url):
    """With more patience than an engine has: on a crowded machine the server may be silent for seconds."""
    patient = dict.fromkeys(("lookup_timeout", "load_timeout", "save_timeout", "patience"), 60)
    return Contender(KvferryClient(store=url, model="check", kv="bytes", **patient))


def fastest(port, memory, keys):
    """LMCache's client with 8 threads or with 2."""
    both = {workers: lmcaches(port, workers) for workers in (8, 2)}
    times = {workers: [] for workers in both}
    for _ in range(4):
        for workers, contender in both.items():
            times[workers].append(contender.save(keys, memory) + contender.load(keys, memory))
    best = min(times, key=lambda workers: statistics.median(times[workers]))
    both.pop(10 - best).client.close()
    return best, both[best]


def passes_of(call):
    """So many that they take a while, which other programs disturb less."""
    passes = 1
    while not SHORT and passes < 16 and sum(call() for _ in range(passes)) < 0.05:
        passes *= 2
    return passes


def compare(name, bound, theirs, mine):
    """theirs, mine: functions that return seconds. Returns the median of the ratios, and the bound."""
    passes = passes_of(theirs)
    ratios, times = [], ([], [])
    while len(ratios) < MOST:
        order = (theirs, mine) if len(ratios) % 2 == 0 else (mine, theirs)
        took = {call: sum(call() for _ in range(passes)) / passes for call in order}
        ratios.append(took[theirs] / took[mine])
        for kept, call in zip(times, (theirs, mine), strict=True):
            kept.append(took[call])
        low, high = interval(ratios)
        if len(ratios) >= FEWEST and low >= bound:
            break
    median = statistics.median(ratios)
    if SHORT:  # other programs disturb both, and least where they are fastest
        median = max(median, min(times[0]) / min(times[1]))
    medians = [statistics.median(kept) for kept in times]
    say(
        f"  {name:22} {median:6.2f} [{low:.2f}, {high:.2f}] in {len(ratios)} pairs, bound {bound:.1f}"
        f"   (LMCache {1e3 * medians[0]:.2f} ms, kvferry {1e3 * medians[1]:.2f} ms)"
    )
    return median, bound


def keys_of(num, what):
    return [f"check/{what}@00000000@0@{i:064x}" for i in range(num)]


def check_memory(contender, keys, blocks):
    """Once for each kind: what is loaded is what was saved."""
    for i, block in enumerate(blocks):
        block[:] = bytes([i + 1]) * len(block)
    contender.save(keys, blocks)
    for block in blocks:
        block[:] = bytes(len(block))
    contender.load(keys, blocks)
    assert all(bytes(block) == bytes([i + 1]) * len(block) for i, block in enumerate(blocks)), "other bytes"


def move(server, size, figures):
    memory = memoryview(mmap.mmap(-1, NUM * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    blocks = [memory[i * size : (i + 1) * size] for i in range(NUM)]
    keys = keys_of(NUM, size)
    workers, theirs = fastest(server.port, blocks, keys)
    say(f"{size // MIB} MiB x {NUM}; LMCache's client with {workers} threads over TCP")
    check_memory(theirs, keys, blocks)
    for kind, url in (("tcp", server.tcp_url), ("unix", server.unix_url)):
        mine = ours(url)
        check_memory(mine, keys, blocks)
        for what in ("save", "load"):
            calls = [getattr(contender, what) for contender in (theirs, mine)]
            figures.append(compare(f"{what} over {kind}", BOUNDS[kind], *(lambda c=c: c(keys, blocks) for c in calls)))
        mine.client.close()
    theirs.client.close()


def look_up(server, figures):
    say(f"lookups of {KEYS} keys over TCP")
    keys, block = keys_of(KEYS, "lookup"), [memoryview(bytearray(4096))] * KEYS
    theirs, mine = lmcaches(server.port, 8), ours(server.tcp_url)
    for contender in (theirs, mine):
        contender.save(keys, block)
    calls = (lambda c=c: c.lookup(keys, None) for c in (theirs, mine))
    figures.append(compare("lookup", BOUNDS["lookup"], *calls))
    for contender in (theirs, mine):
        contender.client.close()


def main():
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder))
        try:
            for size in (MIB, 4 * MIB):
                move(server, size, figures)
            look_up(server, figures)
        finally:
            server.stop()
    worst, bound = min(figures, key=lambda f: f[0] / f[1])
    nearest = f"{worst:.2f} of LMCache's speed where the bound, {bound:.1f}, is nearest"
    print(f"check-lmcache: {nearest}; lookups {figures[-1][0]:.1f} times faster")
    return 0 if all(median >= bound for median, bound in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
