# SPDX-License-Identifier: Apache-2.0
"""Fork, threads, signals, logging, other interpreters, memory."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import FIELDS

import kvferry


def in_child(work) -> None:
    """Runs work in a forked child, which must end by itself and well."""
    pid = os.fork()
    if pid == 0:
        rc = 1
        try:
            work()
            rc = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        finally:
            os._exit(rc)
    assert os.waitpid(pid, 0)[1] == 0


# ---- fork

# The allocator of a sanitizer is not made for fork: in the child it may wait for a thread that is not there. TSan lets
# no child start threads. And both keep memory.
SANITIZED = "san.so" in os.environ.get("LD_PRELOAD", "")


@pytest.mark.skipif("libtsan.so" in os.environ.get("LD_PRELOAD", ""), reason="no threads in a child, says TSan")
def test_a_forked_child_can_use_nothing_of_its_parent(any_url):
    with kvferry.Store(any_url) as store:
        space = kvferry.Space(store, FIELDS, block_tokens=4)
        pool = bytearray(100)
        view = kvferry.View([(1 << 20, 10, 10, 0, 1)], 10, pool)
        queue = kvferry.Queue(store)
        keys = space.chain(range(8))
        space.save(keys, [b"1234567890"] * 2)
        queue.submit_match(space, keys)
        if SANITIZED:
            assert store.flush().done
            assert queue.wait(60)
        store.session_save("s", b"k", b"v")
        session = store.session_load("s")

        def child():
            for call in (
                lambda: store.stats(),
                lambda: store.flush(),
                lambda: store.session_load("s"),
                lambda: list(store.walk()),
                lambda: kvferry.Space(store, FIELDS),
                lambda: kvferry.Queue(store),
                lambda: space.match(keys),
                lambda: space.chain(range(4)),
                lambda: space.load(keys, [bytearray(10)] * 2),
                lambda: space.save(keys, [b"1234567890"] * 2),
                lambda: view.fence([1]),
                lambda: queue.submit_match(space, keys),
                lambda: queue.reap(),
                lambda: queue.fileno(),
                lambda: asyncio.run(queue.match(space, keys)),
            ):
                with pytest.raises(kvferry.ClosedError, match="forked"):
                    call()
            assert store.closed
            assert space.closed
            assert view.closed
            assert queue.closed
            assert bytes(session.k) == b"k"  # its own copy
            with kvferry.Store("mem:") as own, kvferry.Space(own, FIELDS, block_tokens=4) as own_space:
                assert own_space.save(keys, [b"1"] * 2).num_ok == 2
                assert own.flush() == (True, 0)
            for part in (queue, view, space, store):
                part.close()

        in_child(child)
        assert queue.wait(60)
        assert len(queue.reap()) == 1
        assert store.flush().done
        assert space.match(keys) == 2


@pytest.mark.skipif(SANITIZED, reason="a sanitizer's allocator is not made for fork")
def test_fork_while_others_work(redis):
    with kvferry.Store(redis.unix_url) as store:
        space = kvferry.Space(store, FIELDS, block_tokens=4)
        keys = space.chain(range(64))
        source = [os.urandom(5000) for _ in range(16)]
        space.save(keys, source)
        store.flush()
        stop = threading.Event()

        def work():
            into = [bytearray(5000) for _ in range(16)]
            while not stop.is_set():
                assert space.load(keys, into).num_ok == 16

        threads = [threading.Thread(target=work) for _ in range(3)]
        for t in threads:
            t.start()

        def child():
            with pytest.raises(kvferry.ClosedError):
                space.match(keys)
            with kvferry.Store(redis.unix_url) as own, kvferry.Space(own, FIELDS, block_tokens=4) as own_space:
                into = [bytearray(5000) for _ in range(16)]
                assert own_space.load(keys, into).num_ok == 16
                assert [bytes(b) for b in into] == source

        for _ in range(5):
            in_child(child)
        stop.set()
        for t in threads:
            t.join()


# ---- threads


def test_eight_threads_at_once(store, space):
    queues = [kvferry.Queue(store) for _ in range(8)]

    def work(me: int) -> None:
        draw = random.Random(me)
        for round in range(10):
            tokens = [draw.randrange(1 << 32) for _ in range(16)]
            keys, source = space.chain(tokens), [draw.randbytes(2000) for _ in range(4)]
            into = [bytearray(2000) for _ in source]
            assert space.save(keys, source, tokens=tokens).num_ok == 4
            assert store.flush() == (True, 0)
            assert space.match(keys) == 4
            assert space.load(keys, into, tokens=tokens).num_ok == 4
            assert [bytes(b) for b in into] == source
            into = [bytearray(2000) for _ in source]
            queues[me].submit_load(space, keys, into)
            while not (done := queues[me].reap()):
                queues[me].wait(60)
            assert done[0].num_ok == 4
            assert [bytes(b) for b in into] == source
            store.session_save(f"{me}", source[0], source[1])
            assert bytes(store.session_load(f"{me}").k) == source[0]
            assert store.stats()["loads"] > round

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_one_queue_for_many_threads(mem, mem_space):
    queue, done = kvferry.Queue(mem, depth=16), []
    keys = mem_space.chain(range(40))

    def work(_):
        for _ in range(100):
            while queue.submit_match(mem_space, keys) is None:
                done.extend(queue.reap())
            done.extend(queue.reap())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    while len(queue):
        queue.wait(60)
        done.extend(queue.reap())
    assert sorted(d.ticket for d in done) == list(range(1, 801))


def test_closing_while_others_work(redis):
    for _ in range(5):
        store = kvferry.Store(redis.tcp_url)
        space = kvferry.Space(store, FIELDS, block_tokens=4)
        queue = kvferry.Queue(store)
        keys = space.chain(range(64))
        begun = threading.Barrier(7)
        seen = []

        def work(me, store=store, space=space, queue=queue, keys=keys, begun=begun, seen=seen):
            into = [bytearray(100) for _ in range(16)]
            begun.wait()
            try:
                while True:
                    if me % 3 == 0:
                        space.save(keys, into)
                    elif me % 3 == 1:
                        space.load(keys, into)
                    else:
                        queue.submit_load(space, keys, into)
                        queue.wait(0.001)
                        queue.reap()
            except kvferry.ClosedError:
                seen.append(me)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for t in threads:
            t.start()
        begun.wait()
        store.close()
        for t in threads:
            t.join()
        assert len(seen) == 6


def test_others_run_while_one_waits(own_redis):
    """The GIL is free while a call waits: this thread resumes the server that the other one waits for."""
    with kvferry.Store(own_redis.tcp_url, drain=0) as store:
        space = kvferry.Space(store, FIELDS, block_tokens=4)
        for call in (
            lambda: space.match(bytes(32), 60),
            lambda: space.load(bytes(32), [bytearray(1)], timeout=60),
            lambda: space.load(bytes(32), [bytearray(1)], timeout=60, patience=60, each=True),
            lambda: store.flush(60),
            lambda: store.session_load("s", timeout=60),
            lambda: store.session_save("s", b"1", b"2", timeout=60),
            lambda: list(store.walk(timeout=60)),
            lambda: store.clear(),
        ):
            own_redis.pause()
            space.save(bytes(32), [os.urandom(10)])
            inside, done = threading.Event(), threading.Event()

            def run(call=call, inside=inside, done=done):
                inside.set()
                call()
                done.set()

            thread = threading.Thread(target=run)
            thread.start()
            assert inside.wait(60)
            time.sleep(0.01)
            own_redis.resume()
            thread.join(120)
            assert done.is_set()


def test_a_signal_ends_a_wait(mem):
    class Stopped(Exception):
        pass

    def stop(number, frame):
        raise Stopped

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.raises(Stopped):
            signal.setitimer(signal.ITIMER_REAL, 0.05)  # a busy machine may take longer than that to come to the wait
            kvferry.Queue(mem).wait()
    finally:
        signal.signal(signal.SIGALRM, before)


# ---- logging


def test_an_interrupt_while_a_message_is_told_is_raised(own_redis):
    """Ctrl-C may come while Python's logging runs, in the midst of a call of ours."""
    own_redis.command("CONFIG", "SET", "maxmemory-policy", "noeviction")

    class Handler(logging.Handler):
        def emit(self, record):
            logging.getLogger("kvferry").removeHandler(self)
            raise KeyboardInterrupt

    handler = Handler()
    logging.getLogger("kvferry").addHandler(handler)
    try:
        with pytest.raises(KeyboardInterrupt), kvferry.Store(own_redis.tcp_url) as store:
            kvferry.Space(store, FIELDS, block_tokens=4).save(bytes(32), [b"x"])
            store.flush()
            for _ in range(100):
                store.stats()
    finally:
        logging.getLogger("kvferry").removeHandler(handler)


def test_messages_go_to_logging(own_redis, caplog):
    own_redis.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    with caplog.at_level(logging.INFO, logger="kvferry"), kvferry.Store(own_redis.tcp_url) as store:
        space = kvferry.Space(store, FIELDS, block_tokens=4)
        space.save(bytes(32), [b"x"])
        store.flush()
        assert store.stats()["save_failures"] == {"settings": 1}
    records = [r for r in caplog.records if r.name == "kvferry"]
    assert any(r.levelname == "WARNING" and "noeviction" in r.getMessage() for r in records)


def test_a_handler_that_fails_or_calls_back_does_no_harm(own_redis, mem):
    own_redis.command("CONFIG", "SET", "maxmemory-policy", "noeviction")

    class Handler(logging.Handler):
        def emit(self, record):
            mem.stats()
            raise RuntimeError("a handler fails")

    handler = Handler()
    logging.getLogger("kvferry").addHandler(handler)
    unraisable, sys.unraisablehook = [], lambda args: unraisable.append(args.exc_value)
    try:
        with kvferry.Store(own_redis.tcp_url) as store:
            space = kvferry.Space(store, FIELDS, block_tokens=4)
            space.save(bytes(32), [b"x"])
            store.flush()
            store.stats()
    finally:
        logging.getLogger("kvferry").removeHandler(handler)
        sys.unraisablehook = sys.__unraisablehook__
    assert [str(e) for e in unraisable] == ["a handler fails"] * len(unraisable)
    assert unraisable


# ---- interpreters


def test_the_import_brings_neither_numpy_nor_torch():
    code = "import sys, kvferry; print(sorted({'numpy', 'torch', 'transformers', 'llama_cpp'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_free_threaded_pythons_are_refused():
    code = "import sys; sys.abiflags = 't'; import kvferry"  # as such a build calls itself
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: kvferry does not support free-threaded Python" in done.stderr


def test_subinterpreters_are_refused():
    name = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    code = f"""
import {name} as interpreters
one = interpreters.create()
try:
    print(interpreters.run_string(one, "import kvferry._kvferry"))
except Exception as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "does not support" in done.stdout + done.stderr


def test_a_second_load_is_refused_and_a_second_import_is_the_same():
    code = """
import sys, kvferry
first = sys.modules.pop("kvferry._kvferry")
try:
    import kvferry._kvferry
    print(sys.modules["kvferry._kvferry"].Store is first.Store)
except ImportError as error:
    print("already" in str(error))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


# ---- memory


ROUNDS = """
import contextlib, gc, os, sys
import kvferry

def resident_bytes():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

store = kvferry.Store("mem:")
space = kvferry.Space(store, {"engine": "e", "model": "m", "kv": "k"}, block_tokens=4)
queue = kvferry.Queue(store)
tokens = list(range(16))
keys = space.chain(tokens)
source, into = [bytes(64)] * 4, [bytearray(64) for _ in range(4)]

def rounds(num):
    for _ in range(num):
        space.save(keys, source, tokens=tokens)
        space.load(keys, into, tokens=tokens)
        space.match(keys)
        space.find(keys)
        space.keys_of([b"a", b"b"], suffix=b"c")
        store.stats()
        queue.submit_load(space, keys, into, each=True)
        while not queue.reap():
            queue.wait(60)
        for bad in (lambda: space.match(b"x"), lambda: space.load(keys, [b""] * 4), lambda: space.chain([-1])):
            with contextlib.suppress(ValueError, TypeError):
                bad()

rounds(2000)
gc.collect()
before, blocks = resident_bytes(), sys.getallocatedblocks()
rounds(10_000)
gc.collect()
print(sys.getallocatedblocks() - blocks, resident_bytes() - before)
"""


@pytest.mark.skipif(SANITIZED, reason="a sanitizer keeps memory")
def test_no_growth_and_no_references_left():
    """10,000 rounds of a dozen calls. A leak of one object or 100 bytes in any of them would be 1 MB."""
    done = subprocess.run([sys.executable, "-c", ROUNDS], capture_output=True, text=True, check=True)
    blocks, grown = map(int, done.stdout.split())
    assert blocks < 1000
    assert grown < 1 << 20


@pytest.mark.skipif(SANITIZED, reason="a sanitizer keeps memory")
def test_opening_and_closing_leaves_nothing(folder_url):
    def once():
        with kvferry.Store(folder_url) as store, kvferry.Queue(store) as queue:
            space = kvferry.Space(store, FIELDS, block_tokens=4)
            keys = space.chain(range(8))
            queue.submit_match(space, keys)
            store.session_save("s", b"1", b"2")
            session = store.session_load("s")
            list(store.walk())
            store.doctor()
            return session.k

    for _ in range(20):
        once()
    gc.collect()
    files, threads, blocks = len(os.listdir("/proc/self/fd")), threading.active_count(), sys.getallocatedblocks()
    for _ in range(50):
        once()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files
    assert threading.active_count() == threads
    assert sys.getallocatedblocks() - blocks < 200
