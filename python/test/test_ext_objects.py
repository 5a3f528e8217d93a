# SPDX-License-Identifier: Apache-2.0
"""The life of objects: closed ones raise, closing is safe in any order, and each keeps alive what it uses."""

from __future__ import annotations

import array
import ast
import ctypes
import gc
import inspect
import itertools
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from conftest import FIELDS, until

import kvferry
from kvferry import _kvferry


def test_help_shows_the_manual():
    stub = ast.parse(Path(kvferry.__file__).with_name("_kvferry.pyi").read_text("utf-8"))
    kinds = [kind for kind in stub.body if isinstance(kind, ast.ClassDef)]
    shown = [kind for kind in kinds if kind.name in ("Store", "Space", "View", "Queue", "Session", "Pace")]
    assert len(shown) == 6
    for kind in shown:
        made = getattr(_kvferry, kind.name, kvferry.Session)
        assert inspect.getdoc(made) == ast.get_docstring(kind)
        for call in kind.body:
            if isinstance(call, ast.FunctionDef) and not call.decorator_list and not call.name.startswith("_"):
                text = ast.get_docstring(call)
                assert text and (call.name == "close" or inspect.getdoc(getattr(made, call.name)) == text)


class Memory(bytearray):
    """Memory that tells when it goes."""


def parts(url="mem:"):
    store = kvferry.Store(url)
    space = kvferry.Space(store, FIELDS, block_tokens=4)
    pool = array.array("B", bytes(100))
    view = kvferry.View([(pool.buffer_info()[0], 10, 10, 0, 1)], 10, pool)
    queue = kvferry.Queue(store)
    return store, space, view, queue


CALLS = {
    "store": [
        lambda s: s.stats(), lambda s: s.flush(), lambda s: s.walk(), lambda s: s.describe(bytes(32)),
        lambda s: s.clear(), lambda s: s.remove(bytes(32), bytes(32)), lambda s: s.doctor(), lambda s: s.tiers(),
        lambda s: s.link(),
        lambda s: s.session_save("s", b"", b""), lambda s: s.session_load("s"), lambda s: s.session_look("s"),
        lambda s: s.session_remove("s"), lambda s: s.num_tiers, lambda s: s.__enter__(),
        lambda s: kvferry.Space(s, FIELDS), lambda s: kvferry.Queue(s),
    ],
    "space": [
        lambda s: s.digest, lambda s: s.block_tokens, lambda s: s.fields, lambda s: s.chain([1, 2, 3, 4]),
        lambda s: s.salt_key(None, b""), lambda s: s.key_of(b""), lambda s: s.keys_of([]),
        lambda s: s.tail_key(bytes(32), []), lambda s: s.state_key(bytes(32)), lambda s: s.stored_key(bytes(32)),
        lambda s: s.apart_key(bytes(32), b""), lambda s: s.match(b""), lambda s: s.find(b""), lambda s: s.load(b"", []),
        lambda s: s.save(b"", []), lambda s: s.knows(bytes(32)), lambda s: s.forget(b""), lambda s: s.__enter__(),
        lambda s: s.load(b"", [], each=True),
    ],
    "view": [lambda v: v.fence([1]), lambda v: v.__enter__()],
    "queue": [
        lambda q: q.fileno(), lambda q: q.reap(), lambda q: q.wait(), lambda q: q.cancel(1), lambda q: q.trim(1, 1),
        lambda q: q.arrived(1), lambda q: q.__enter__(),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_closed_objects_raise(name):
    objects = dict(zip(("store", "space", "view", "queue"), parts(), strict=True))
    one = objects[name]
    assert one.closed is False
    with one as entered:
        assert entered is one
    assert one.closed is True
    for call in CALLS[name]:
        with pytest.raises(kvferry.ClosedError):
            call(one)
    one.close()
    repr(one)
    for other in objects.values():
        other.close()


def test_a_closed_part_raises_where_it_is_used():
    store, space, view, queue = parts()
    view.close()
    for call in (space.load, space.save):
        with pytest.raises(kvferry.ClosedError, match="View is closed"):
            call(bytes(32), view, slots=[1])
    space.close()
    for submit in (queue.submit_match, queue.submit_remove, queue.submit_touch):
        with pytest.raises(kvferry.ClosedError, match="Space is closed"):
            submit(space, bytes(32))
    store.close()
    assert queue.closed
    with pytest.raises(kvferry.ClosedError):
        queue.submit_match(space, bytes(32))


@pytest.mark.parametrize("order", itertools.permutations(range(4)))
def test_closing_is_safe_in_any_order(order, folder_url):
    store, space, view, queue = objects = parts(folder_url)
    keys = space.chain(range(8))
    assert space.save(keys, view, slots=[1, 2]).num_ok == 2
    assert queue.submit_load(space, keys, view, slots=[3, 4]) is not None
    assert queue.submit_save(space, keys, [b"1234567890", bytearray(10)]) is not None
    for i in order:
        objects[i].close()
        assert objects[i].closed
    assert all(o.closed for o in objects)
    for o in objects:
        o.close()
    with kvferry.Store(folder_url) as again, kvferry.Space(again, FIELDS, block_tokens=4) as space:
        assert space.match(keys) == 2


@pytest.mark.parametrize("order", itertools.permutations(range(4)))
def test_dropping_is_safe_in_any_order(order):
    objects = list(parts())
    objects[3].submit_match(objects[1], objects[1].chain(range(40)))
    objects[3].submit_load(objects[1], objects[1].chain(range(8)), objects[2], slots=[3, 4])
    for i in order:
        objects[i] = None
        gc.collect()


def test_a_space_keeps_its_store_open():
    space = kvferry.Space(kvferry.Store("mem:"), FIELDS, block_tokens=4)
    gc.collect()
    assert space.match(space.chain(range(4))) == 0
    assert space.store.closed is False


def test_leaving_a_with_writes_what_was_saved(folder_url):
    with kvferry.Store(folder_url) as store:
        space = kvferry.Space(store, FIELDS, block_tokens=4)
        keys = space.chain(range(400))
        space.save(keys, [os.urandom(10_000) for _ in range(100)])
    with kvferry.Store(folder_url) as store, kvferry.Space(store, FIELDS, block_tokens=4) as space:
        assert space.match(keys) == 100


def test_an_exit_without_close_writes_what_was_saved(folder_url):
    code = f"""
import kvferry
space = kvferry.Space(kvferry.Store({folder_url!r}), {FIELDS!r}, block_tokens=4)
space.save(space.chain(range(400)), [bytes(10_000)] * 100)
cycle = [space]
cycle.append(cycle)
del space
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    with kvferry.Store(folder_url) as store, kvferry.Space(store, FIELDS, block_tokens=4) as space:
        assert space.match(space.chain(range(400))) == 100


def test_a_batch_keeps_its_memory(own_redis):
    with kvferry.Store(own_redis.tcp_url, drain=0) as store:
        space = kvferry.Space(store, FIELDS, block_tokens=4)
        queue = kvferry.Queue(store)
        memory, owner = Memory(10), Memory(10)
        gone = [weakref.ref(memory), weakref.ref(owner)]
        own_redis.pause()
        address = ctypes.addressof(ctypes.c_char.from_buffer(owner))
        ticket = queue.submit_load(space, bytes(64), [memory, (address, 10)], owner=owner, timeout=60, patience=60)
        with pytest.raises(BufferError):
            memory.extend(b"x")  # it is lent
        del memory, owner, space
        gc.collect()
        assert all(g() is not None for g in gone)
        own_redis.resume()
        assert queue.wait(60)
        (done,) = queue.reap()
        assert (done.ticket, done.op, done.num_ok, done.reasons) == (ticket, "load", 0, ("absent", "after-gap"))
        until(lambda: gc.collect() >= 0 and all(g() is None for g in gone), "its memory goes")


def test_a_view_keeps_its_owner_until_it_is_closed():
    owner = Memory(100)
    gone = weakref.ref(owner)
    view = kvferry.View([(ctypes.addressof(ctypes.c_char.from_buffer(owner)), 10, 10, 0, 1)], 10, owner)
    del owner
    gc.collect()
    assert gone() is not None
    view.close()
    gc.collect()
    assert gone() is None


def test_circles_are_collected():
    class Engine:
        pass

    engine = Engine()
    engine.store = kvferry.Store("mem:")
    engine.space = kvferry.Space(engine.store, FIELDS)
    engine.memory = Memory(100)
    address = ctypes.addressof(ctypes.c_char.from_buffer(engine.memory))
    engine.view = kvferry.View([(address, 10, 10, 0, 1)], 10, engine)
    engine.queue = kvferry.Queue(engine.store)
    engine.queue.engine = engine
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


def test_values_are_tuples_with_names():
    result = kvferry.Result((1, (None, "absent")))
    num_ok, reasons = result
    assert (result.num_ok, result.reasons) == (num_ok, reasons)
    assert "num_ok=1" in repr(result)
    match result:
        case kvferry.Result(num_ok=n):
            assert n == 1
        case _:
            pytest.fail("it does not match")
