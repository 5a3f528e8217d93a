# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a call waits for a server that is silent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from conftest import FIELDS, RedisServer

import kvferry

BUDGET = 3600.0
PATIENT = "?stall_ms=60000&connect_ms=60000"


class Interrupter(threading.Thread):
    """Sends SIGINT to this process once the main thread sleeps inside of a call. If that does not end it in a minute,
    the server answers again, and `late` is true."""

    def __init__(self, server: RedisServer, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.call = call.__code__
        self.over = threading.Event()
        self.late = False
        self.sent = 0.0

    def _sleeps(self) -> bool:
        main = threading.main_thread()
        with open(f"/proc/self/task/{main.native_id}/stat") as stat:
            asleep = stat.read().rpartition(")")[2].split()[0] == "S"
        frame = sys._current_frames()[main.ident]
        while frame is not None and frame.f_code is not self.call:
            frame = frame.f_back
        return asleep and frame is not None

    def run(self) -> None:
        looks = 0
        while looks < 5 and not self.over.is_set():
            looks = looks + 1 if self._sleeps() else 0
            time.sleep(0.01)  # whoever only waits for the GIL goes on
        if self.over.is_set():
            return
        self.sent = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)
        if not self.over.wait(60):
            self.late = True
            self.server.resume()


def interrupted(server: RedisServer, work: Callable[[], object]) -> float:
    """Runs work while the server is silent; returns how long it went on after the signal."""

    server.pause()
    interrupter = Interrupter(server, work)
    try:
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            work()
        took = time.monotonic() - interrupter.sent
    finally:
        interrupter.over.set()
        interrupter.join()
        server.resume()
    assert not interrupter.late
    return took


@pytest.fixture(params=["unix", "tcp"])
def url(request: pytest.FixtureRequest, own_redis: RedisServer) -> str:
    return (own_redis.unix_url if request.param == "unix" else own_redis.tcp_url) + PATIENT


@pytest.fixture
def silent(url: str, own_redis: RedisServer) -> Iterator[tuple[RedisServer, kvferry.Store, kvferry.Space, bytes]]:
    """A server that holds two blocks and a session, with connections of all kinds."""
    with kvferry.Store(url) as store:
        space = kvferry.Space(store, FIELDS, block_tokens=4)
        keys = space.chain(range(8))
        space.save(keys, [b"1" * 1000, b"2" * 3_000_000])
        assert store.flush() == (True, 0)
        store.session_save("s", b"k" * 1000, b"v" * 1000)
        yield own_redis, store, space, keys


CALLS: dict[str, Callable[[kvferry.Store, kvferry.Space, bytes], object]] = {
    "match": lambda store, space, keys: space.match(keys, BUDGET),
    "find": lambda store, space, keys: space.find(keys, BUDGET),
    "load": lambda store, space, keys: space.load(keys, [bytearray(1000), bytearray(3_000_000)], timeout=BUDGET),
    "load, each": lambda store, space, keys: space.load(keys[:32], [bytearray(1000)], each=True, timeout=BUDGET),
    "session_save": lambda store, space, keys: store.session_save("s", b"K" * 20_000_000, b"V", timeout=BUDGET),
    "session_load": lambda store, space, keys: store.session_load("s", timeout=BUDGET),
    "session_look": lambda store, space, keys: store.session_look("s", timeout=BUDGET),
    "session_remove": lambda store, space, keys: store.session_remove("s"),
    "walk": lambda store, space, keys: list(store.walk(timeout=BUDGET)),
    "describe": lambda store, space, keys: store.describe(space.digest),
    "clear": lambda store, space, keys: store.clear(),
    "remove": lambda store, space, keys: store.remove(space.digest, space.stored_key(keys[:32])),
    "doctor": lambda store, space, keys: store.doctor(),
    "tiers": lambda store, space, keys: store.tiers(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_waits_ends_at_once(silent, name):
    server, store, space, keys = silent
    interrupted(server, lambda: CALLS[name](store, space, keys))
    # And all is as before. (What a save had begun under another name expires.)
    assert space.match(keys) == 2 or name in ("clear", "remove")
    into = [bytearray(1000), bytearray(3_000_000)]
    assert space.load(keys, into).num_ok == 2 or name in ("clear", "remove")


def test_opening_a_store(url, own_redis):
    """It asks the server for its settings."""
    interrupted(own_redis, lambda: kvferry.Store(url))
    interrupted(own_redis, lambda: kvferry.KVCacheManager(url=url, socket_timeout=BUDGET))
    with kvferry.Store(url) as store:
        assert store.tiers()[0].reachable


def test_the_memory_of_a_load_is_the_callers_again(silent):
    server, store, space, keys = silent
    into = [bytearray(1000), bytearray(3_000_000)]
    interrupted(server, lambda: space.load(keys, into, timeout=BUDGET))
    into[0][:] = b"x" * 1000
    into[1][:] = b"x" * 3_000_000
    into[0].append(1)  # nobody holds its buffer: else this is a BufferError
    into[1].append(1)
    others = [bytearray(1000), bytearray(3_000_000)]
    assert space.load(keys, others).num_ok == 2
    assert into[0][:-1] == b"x" * 1000
    assert into[1][:-1] == b"x" * 3_000_000


def test_flush_and_fence_and_wait_of_a_queue(silent):
    server, store, space, keys = silent
    pool = bytearray(b"z" * 2000)
    at = ctypes.addressof(ctypes.c_char.from_buffer(pool))
    view = kvferry.View([(at, 1000, 1000, 0, 1)], 2, pool)
    with kvferry.Queue(store) as queue:
        server.pause()
        new = space.chain(range(100, 108))
        assert space.save(new, [b"a", b"b"]).num_ok == 2
        interrupted(server, lambda: store.flush(BUDGET))
        assert store.flush() == (True, 0)

        server.pause()
        ticket = queue.submit_load(space, keys[:32], view, slots=[1], timeout=BUDGET)
        assert ticket is not None
        interrupted(server, lambda: view.fence([1], BUDGET))
        assert view.fence([1])
        assert queue.wait()
        assert len(queue.reap()) == 1
        server.pause()
        assert queue.submit_load(space, keys[:32], view, slots=[1], timeout=BUDGET) is not None
        interrupted(server, lambda: queue.wait(BUDGET))
        assert queue.wait()
        assert view.fence([1])
    view.close()


def test_a_manager(url, own_redis):
    manager = kvferry.KVCacheManager(url=url, socket_timeout=BUDGET)
    k = v = bytes(8_000_000)
    manager.save_kv_cache("s", k, v)
    for work in (
        lambda: manager.save_kv_cache("s", k, v),
        lambda: manager.load_kv_cache("s"),
        lambda: manager.exists("s"),
        lambda: manager.ttl("s"),
        lambda: manager.delete("s"),
    ):
        interrupted(own_redis, work)
    manager.save_kv_cache("t", k, v)
    assert manager.load_kv_cache("t")[0] == k
    manager.close()


def test_a_handler_that_raises_nothing_lets_the_call_go_on(silent):
    """And it may use the same store. SIGALRM comes again and again, as a profiler's signal does."""
    server, store, space, keys = silent
    seen: list[int] = []

    def handle(number, frame):
        seen.append(number)
        assert space.knows(keys[:32])
        if len(seen) == 3:
            with contextlib.suppress(kvferry.Error):
                space.match(keys, 0.001)  # waits, and is not answered
        if len(seen) == 10:
            server.resume()

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        server.pause()
        into = [bytearray(1000), bytearray(3_000_000)]
        assert space.load(keys, into, timeout=BUDGET).num_ok == 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        server.resume()
    assert len(seen) >= 10
    assert into[1] == b"2" * 3_000_000


def test_another_thread_is_not_interrupted(silent):
    """Python gives signals to the main thread only: a call of another one goes on."""
    server, store, space, keys = silent
    into = [bytearray(1000), bytearray(3_000_000)]
    done: list[kvferry.Result] = []
    server.pause()
    thread = threading.Thread(target=lambda: done.append(space.load(keys, into, timeout=BUDGET)))
    thread.start()
    interrupted(server, lambda: store.session_load("s", timeout=BUDGET))  # and the server goes on
    thread.join()
    assert done[0].num_ok == 2
