# SPDX-License-Identifier: Apache-2.0
"""check-manager: kvferry.KVCacheManager in place of the class that articles show with redis-py and numpy.

usage: manager.py [--short]
1. The article's two listings (checks/manager/), as they are, with only the import changed, and with both in turns on
   the same session: the same tokens, and nothing is computed twice.
2. What one writes the other reads, byte for byte, on a real redis-server: also over each other, halves, spread arrays,
   writers that are killed.
3. How long a save and a load take beside redis-py, round by round in one run, each manager in a process of its own:
   the lower quartile of the times, because other programs only ever add to them. The bounds are for redis-py as the
   article has it: over TCP, with numpy, without hiredis. The server is started as docs/redis.conf says. Also printed:
   a unix socket, redis-py with hiredis, which receives quickly and sends slowly, and a server as it comes, which
   faults in every page of a large field anew.
4. The limit of this machine, in the same run: a bare client in C (test/support/session_peer.c), which sends ready
   commands and checks nothing, in the faster of two ways. A server copies each array twice, in one thread, once from
   the socket and once into the hash, whoever sends it. A save of 16 MiB by kvferry has at least 0.9 of that client's
   speed, so what the client does not reach, nobody does.

--short leaves out the bounds of 3 and 4. The last line has the figures. KVF_BUILD is the build folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

import kvferry

HERE = Path(__file__).resolve().parent / "manager"
sys.path.insert(0, str(HERE))
if "--peer redis-py" in " ".join(sys.argv):
    sys.modules["hiredis"] = None  # type: ignore[assignment]
import listing  # noqa: E402
import redis  # noqa: E402

MIB = 1 << 20
# How many times as fast as redis-py at least, by the MiB of K and V together.
BOUNDS = {(1, "save"): 2.0, (1, "load"): 2.0, (16, "save"): 2.5, (16, "load"): 4.0}
SIZES = 1, 16
OF_LIMIT = 0.9  # of the bare client's speed: a save of 16 MiB
NAMES = "kvferry", "redis-py", "with hiredis"
WAYS = "one", "apart"  # of the bare client: as redis-py sends it; each value alone in the server's buffer


@contextmanager
def server(folder: Path, **environment: str) -> Iterator[int]:
    """A private redis-server; yields its port."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    program = os.environ.get("KVFT_SERVER", "redis-server")
    if shutil.which(program) is None:
        print(f"there is no {program}")
        sys.exit(77)
    folder.mkdir()
    process = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", str(folder / "redis.sock"), "--save", "",
         "--dir", str(folder), "--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru"],
        stdout=subprocess.DEVNULL, env={**os.environ, **environment},
    )  # fmt: skip
    try:
        plain = redis.Redis(port=port)
        for _ in range(600):
            try:
                plain.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


# ---- 1. the listings


def loop(folder: Path, port: int, session: str, num: int, tokens: list[int], ours: bool) -> tuple[list[int], int]:
    """Runs the second listing, with the first or with kvferry: the tokens, and how many it computed."""
    text = (HERE / "loop.py").read_text()
    changed = text.replace("from listing import KVCacheManager", "from kvferry import KVCacheManager")
    assert changed.count("kvferry") == text.count("kvferry") + 1
    script = folder / ("ours.py" if ours else "theirs.py")
    script.write_text(changed if ours else text)
    path = f"{HERE}:{os.environ.get('PYTHONPATH', '')}"
    words = [sys.executable, script, str(port), session, str(num), *map(str, tokens)]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, text=True, check=True, timeout=300, env={**os.environ, "PYTHONPATH": path}
    )
    out = done.stdout.split()
    return [int(word) for word in out[:num]], int(out[-1])


def check_listings(folder: Path, port: int) -> int:
    prompt = [int(token) for token in np.random.default_rng(3).integers(0, 97, 40)]
    want, computed = loop(folder, port, "theirs", 12, prompt, ours=False)
    assert computed == len(prompt) + 11, computed
    got, computed = loop(folder, port, "ours", 12, prompt, ours=True)
    assert (got, computed) == (want, len(prompt) + 11), (got, want, computed)
    tokens = list(prompt)
    for turn in range(6):  # each takes over the session of the other
        more, computed = loop(folder, port, "both", 2, tokens, ours=turn % 2 == 0)
        tokens += more
        assert computed == (len(prompt) + 1 if turn == 0 else 2), (turn, computed)
    assert tokens[len(prompt) :] == want, (tokens, want)
    return len(want)


# ---- 2. both ways


def same(ours: object, array: np.ndarray) -> None:
    assert isinstance(ours, np.ndarray) and (ours.dtype, ours.shape) == (array.dtype, array.shape), ours
    assert ours.tobytes() == array.tobytes()


def check_both_ways(port: int, k: np.ndarray, v: np.ndarray) -> int:
    """Every order of writers and readers with one pair of arrays. Returns the bytes that were compared."""
    theirs, name = listing.KVCacheManager("127.0.0.1", port), "both ways"
    with kvferry.KVCacheManager("127.0.0.1", port) as ours:
        ours.save_kv_cache(name, k, v)
        assert theirs.load_kv_cache(name) == (k.tobytes(), v.tobytes()), "ours, read by redis-py"
        assert 3590 <= theirs.client.ttl(name) <= 3600
        theirs.save_kv_cache(name, v, k)  # over ours: its meta stays behind
        keys, values = ours.load_kv_cache(name)
        assert bytes(keys) == v.tobytes() and bytes(values) == k.tobytes(), "redis-py's over ours"
        theirs.save_kv_cache(name, k[:1], v)  # of another length
        keys, values = ours.load_kv_cache(name)
        assert bytes(keys) == k[:1].tobytes() and bytes(values) == v.tobytes(), "redis-py's over ours, shorter"
        ours.save_kv_cache(name, k, v)  # ours over theirs
        keys, values = ours.load_kv_cache(name)
        same(keys, k)
        same(values, v)
        into = np.empty_like(k), np.empty_like(v)
        ours.load_kv_cache(name, into=into)
        same(into[0], k)
        theirs.client.delete(name)
        assert ours.load_kv_cache(name) == (None, None) and not ours.exists(name)
        theirs.save_kv_cache(name, k, v)  # theirs alone
        keys, values = ours.load_kv_cache(name)
        assert bytes(keys) == k.tobytes() and bytes(values) == v.tobytes(), "redis-py's"
        assert 3590 <= ours.ttl(name) <= 3600
        assert ours.delete(name) and theirs.load_kv_cache(name) == (None, None)
    return 8 * (k.nbytes + v.nbytes)


def check_halves(port: int) -> None:
    """A writer that was interrupted leaves no session, or the previous one."""
    plain, k = redis.Redis(port=port), np.arange(32, dtype=np.float16)
    with kvferry.KVCacheManager("127.0.0.1", port) as ours:
        for field in "keys", "values", "meta":
            plain.hset("half", field, b"x")
            assert ours.load_kv_cache("half") == (None, None) and not ours.exists("half"), field
            plain.delete("half")
        ours.save_kv_cache("half", k, k)
        plain.hdel("half", "values")
        assert ours.load_kv_cache("half") == (None, None)
        ours.save_kv_cache("half", k, k)
        same(ours.load_kv_cache("half")[0], k)
        plain.set("half", "a string")
        assert ours.load_kv_cache("half") == (None, None)
        plain.delete("half")


def check_spread(port: int) -> None:
    """Above the longest value of the server the fields are spread: one by one they are what redis-py reads."""
    plain, k = redis.Redis(port=port), np.random.default_rng(5).integers(0, 256, 5 * MIB // 2 + 3, dtype=np.uint8)
    limit = plain.config_get("proto-max-bulk-len")["proto-max-bulk-len"]
    plain.config_set("proto-max-bulk-len", MIB)
    with kvferry.KVCacheManager("127.0.0.1", port) as ours:
        ours.save_kv_cache("spread", k, k[::-1])
        assert b"".join(plain.hmget("spread", "keys", "keys.1", "keys.2")) == k.tobytes()
        same(ours.load_kv_cache("spread")[1], k[::-1].copy())
        listing.KVCacheManager("127.0.0.1", port).save_kv_cache("spread", k[:9], k[:7])
        assert [bytes(array) for array in ours.load_kv_cache("spread")] == [k[:9].tobytes(), k[:7].tobytes()]
    plain.config_set("proto-max-bulk-len", limit)


WRITER = """
import sys, itertools, numpy, kvferry
manager = kvferry.KVCacheManager("127.0.0.1", int(sys.argv[1]))
for turn in itertools.count(1):
    array = numpy.full((4 << 20,), turn % 256, numpy.uint8)
    manager.save_kv_cache("killed", array, array)
    print(turn, flush=True)
"""


def check_killed_writers(port: int, num: int) -> None:
    """Whatever moment a writer is killed at, readers of both kinds find a whole session."""
    theirs, rng = listing.KVCacheManager("127.0.0.1", port), np.random.default_rng(7)
    with kvferry.KVCacheManager("127.0.0.1", port) as ours:
        for _ in range(num):
            writer = subprocess.Popen([sys.executable, "-c", WRITER, str(port)], stdout=subprocess.PIPE)
            assert writer.stdout is not None
            for _ in range(2):
                writer.stdout.readline()
            time.sleep(rng.uniform(0, 0.05))
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            keys, values = ours.load_kv_cache("killed")
            assert np.array_equal(keys, values) and len(np.unique(keys)) == 1 and keys.shape == (4 << 20,)
            assert theirs.load_kv_cache("killed") == (keys.tobytes(), values.tobytes())
    theirs.client.delete("killed", *theirs.client.keys("*kvf-tmp*"))


# ---- 3. speed


class Peer:
    """A process of its own with one of the managers: what one does to the allocator changes the times of another."""

    def __init__(self, name: str, place: dict[str, object]) -> None:
        words = [sys.executable, __file__, "--peer", name, json.dumps(place)]
        if name in WAYS:
            where = str(place.get("unix_socket_path") or place.get("port"))
            words = [str(Path(os.environ["KVF_BUILD"]) / "test" / "kvf_session_peer"), where, name]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def timed(self, what: str, mib: int, turn: int) -> tuple[float, float]:
        """Time and CPU time of one call, in seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(what, mib, turn, file=self.process.stdin, flush=True)
        elapsed, cpu = self.process.stdout.readline().split()
        return float(elapsed), float(cpu)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def arrays(mib: int) -> list[np.ndarray]:
    """Two K and V, of `mib` MiB together."""
    rng = np.random.default_rng(mib)
    return [rng.integers(0, 256, (8, mib * MIB // 16), dtype=np.uint8).view(np.float16) for _ in range(4)]


def be_peer(name: str, place: dict[str, object]) -> None:
    """Answers Peer: saves and loads one session of each size."""
    manager = kvferry.KVCacheManager(**place) if name == "kvferry" else listing.KVCacheManager(**place)
    data = {mib: arrays(mib) for mib in SIZES}
    for line in sys.stdin:
        what, mib, turn = line.split()
        at, session = 2 * (int(turn) % 2), f"{name} {mib}"
        args = (session, *data[int(mib)][at : at + 2]) if what == "save" else (session,)
        call = getattr(manager, f"{what}_kv_cache")
        began, cpu = time.perf_counter(), time.process_time()
        call(*args)
        print(time.perf_counter() - began, time.process_time() - cpu, flush=True)


def quartile(times: Iterable[float]) -> float:
    return statistics.quantiles(times, n=4)[0]


def measure(peers: list[Peer], mib: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Lower quartiles of time and CPU time of a save and of a load, for each peer."""
    found: dict[str, list[list[tuple[float, float]]]] = {what: [[] for _ in peers] for what in ("save", "load")}
    for turn in range(rounds + 1):
        for i in range(len(peers)):
            number = (turn + i) % len(peers)
            for what in "save", "load":
                times = peers[number].timed(what, mib, turn)
                if turn > 0:  # the first connects
                    found[what][number].append(times)
    return {
        what: [(quartile(t for t, _ in times), quartile(c for _, c in times)) for times in of_peers]
        for what, of_peers in found.items()
    }


class Ratios(NamedTuple):
    ours: float
    """How many times as fast as redis-py without hiredis kvferry is."""
    limit: float
    """And the bare client."""


def check_speed(place: dict[str, object], rounds: dict[int, int], title: str) -> dict[tuple[int, str], Ratios]:
    """Prints a table, and returns its ratios by size and direction."""
    print(f"\n{title}\n{'ms (CPU)':16}" + "".join(f"{name:>18}" for name in (*NAMES, "bare client")), flush=True)
    peers, ratios = [Peer(name, place) for name in (*NAMES, *WAYS)], {}
    for mib in rounds:
        found = measure(peers, mib, rounds[mib])
        for what, all_cells in found.items():
            cells = [*all_cells[: len(NAMES)], min(all_cells[len(NAMES) :])]
            (ours, _), (peer, _), (hiredis, _), (bare, _) = cells
            row = "".join(f"{t * 1e3:9.2f} ({c * 1e3:5.2f}) " for t, c in cells)
            print(
                f"{what} of {mib:2} MiB   {row}  {peer / ours:.1f} and {hiredis / ours:.1f} times as fast, "
                f"{bare / ours:.2f} of the bare client",
                flush=True,
            )
            ratios[mib, what] = Ratios(peer / ours, peer / bare)
    for peer in peers:
        peer.stop()
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description="check-manager", epilog=__doc__)
    parser.add_argument("--short", action="store_true", help="few rounds, without bounds on times")
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    short = args.short
    if args.peer is not None:
        return be_peer(args.peer[0], json.loads(args.peer[1]))
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory(prefix="kvf-manager-") as name:
        folder = Path(name)
        with server(folder / "both", MALLOC_CONF="") as port:
            tokens = check_listings(folder, port)
            print(f"the article's listings, with only the import changed: the same {tokens} tokens, also in turns")
            compared = 0
            for shape in (2, 3, 4), (265,), (1, 1), (4, 8, 512, 128):
                compared += check_both_ways(port, *rng.integers(0, 9, (2, *shape)).astype(np.float16))
            check_halves(port)
            check_spread(port)
            check_killed_writers(port, 3 if short else 15)
            print(
                f"kvferry and redis-py read each other, overwritten, halves, spread, killed: {compared} bytes, the same"
            )
        rounds = {1: 5, 16: 2} if short else {1: 61, 16: 31}
        with server(folder / "as it comes") as port:
            check_speed({"host": "127.0.0.1", "port": port}, rounds, "redis-server as it comes, TCP")
        with server(folder / "tuned", MALLOC_CONF="dirty_decay_ms:-1") as port:
            ratios = check_speed(
                {"host": "127.0.0.1", "port": port}, rounds, "redis-server as docs/redis.conf says, TCP"
            )
            place = {"unix_socket_path": str(folder / "tuned" / "redis.sock")}
            check_speed(place, rounds, "redis-server as docs/redis.conf says, unix socket")
    figures = ", ".join(
        f"{what} of {mib} MiB {ratio.ours:.1f} ({BOUNDS[mib, what]}; limit of this machine {ratio.limit:.1f})"
        for (mib, what), ratio in ratios.items()
    )
    save = ratios[16, "save"]
    print(
        f"\ncheck-manager: times as fast as redis-py and numpy, over TCP (at least): {figures}; a save of 16 MiB has "
        f"{save.ours / save.limit:.2f} ({OF_LIMIT}) of the speed of the bare client"
    )
    slow = any(ratio.ours < BOUNDS[what] for what, ratio in ratios.items()) or save.ours < OF_LIMIT * save.limit
    if not short and slow:
        sys.exit(1)


main()
