# SPDX-License-Identifier: Apache-2.0
"""Every status of the C API is an exception or a documented value: one test for each. Wrong arguments raise."""

from __future__ import annotations

import array
import ctypes
import os
import subprocess
import sys

import pytest
from conftest import FIELDS, until

import kvferry

# ---- one test for each status


def test_ok_is_the_value(mem_space):
    assert mem_space.match(b"") == 0
    assert mem_space.load(b"", []) == (0, ())


def test_miss_of_a_block_is_a_reason(mem_space):
    assert mem_space.load(bytes(32), [bytearray(1)]) == (0, ("absent",))


def test_miss_of_a_session_is_none_and_of_a_record_false(mem):
    assert mem.session_load("nobody") is None
    assert mem.remove(bytes(32), bytes(32)) is False
    assert mem.describe(bytes(32)) is None


def test_miss_of_a_flush_is_the_number_of_lost_blocks(own_redis):
    with kvferry.Store(own_redis.tcp_url + "?connect_ms=200") as store:
        space = kvferry.Space(store, FIELDS, block_tokens=4)
        own_redis.stop()
        assert space.save(space.chain(range(4)), [b"x"]).num_ok == 1
        assert store.flush() == (True, 1)
        assert sum(store.stats()["save_failures"].values()) == 1


def test_again_of_a_save_is_full(own_redis):
    with kvferry.Store(own_redis.tcp_url, backlog_bytes=1 << 20, drain=0) as store:
        space = kvferry.Space(store, FIELDS, block_tokens=4)
        keys = space.chain(range(16))
        result = space.save(keys, [bytes(1 << 19), bytes(1 << 21), b"", b"x"])
        assert result.num_ok == 1
        assert result.reasons == (None, "full", "after-gap", "after-gap")


def test_again_of_a_flush_is_not_done(own_redis):
    with kvferry.Store(own_redis.tcp_url, drain=0) as store:
        space = kvferry.Space(store, FIELDS, block_tokens=4)
        own_redis.pause()
        assert space.save(space.chain(range(4)), [b"x"]).num_ok == 1
        assert store.flush(0) == (False, 0)
        own_redis.resume()
        assert store.flush() == (True, 0)


def test_again_of_a_fence_is_false_and_of_a_queue_none(own_redis):
    pool = bytearray(100)
    address = address_of(pool)
    with kvferry.Store(own_redis.tcp_url, drain=0) as store, kvferry.Queue(store, depth=1) as queue:
        space = kvferry.Space(store, FIELDS, block_tokens=4)
        keys = space.chain(range(4))
        with kvferry.View([(address, 10, 10, 0, 1)], 10, pool) as view:
            own_redis.pause()
            ticket = queue.submit_load(space, keys, view, slots=[3], timeout=60, patience=60)
            assert ticket is not None
            assert queue.submit_match(space, keys) is None
            wait_until_used(view, 3)
            assert view.fence([4], 0) is True
            own_redis.resume()
            assert view.fence([3]) is True
            assert queue.wait(60)
            assert queue.reap()[0].reasons == ("absent",)


def address_of(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def wait_until_used(view, slot):
    until(lambda: view.fence([slot], 0) is False, "the load uses its slot")


def test_config():
    with pytest.raises(kvferry.ConfigError, match="nonsense") as caught:
        kvferry.Store("file:/tmp/x?nonsense=1")
    assert caught.value.status == "config"
    assert isinstance(caught.value, kvferry.Error)
    with pytest.raises(kvferry.ConfigError):
        kvferry.Store([])


def test_refused(mem):
    with pytest.raises(kvferry.RefusedError, match="model") as caught:
        kvferry.Space(mem, {"engine": "e", "kv": "k"})
    assert caught.value.status == "refused"


def test_limit(mem):
    with pytest.raises(kvferry.LimitError, match="16 to 1024") as caught:
        kvferry.Store("mem:", secret=b"short")
    assert caught.value.status == "limit"
    assert isinstance(caught.value, ValueError)
    with pytest.raises(kvferry.LimitError):
        mem.session_load("x" * 513)


def test_io(own_redis):
    with kvferry.Store(own_redis.tcp_url + "?connect_ms=200") as store:
        own_redis.stop()
        with pytest.raises(kvferry.StoreError) as caught:
            store.session_save("s", b"1", b"2")
        assert caught.value.status == "io"
        assert isinstance(caught.value, OSError)
        assert str(caught.value) != ""
        for call in (
            lambda: store.session_load("s"),
            lambda: store.session_remove("s"),
            lambda: list(store.walk()),
            lambda: store.clear(),
            lambda: store.remove(bytes(32), bytes(32)),
        ):
            with pytest.raises(kvferry.StoreError):
                call()
        assert [f.severity for f in store.doctor()] == ["fatal"]
        assert store.tiers()[0].reachable is False
        assert store.tiers()[0].num_records is None


@pytest.mark.skipif("san.so" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer needs all addresses")
def test_nomem(folder_url):
    with kvferry.Store(folder_url) as store:
        store.session_save("s", bytes(200 << 20), b"")
    code = f"""
import resource, kvferry
store = kvferry.Store({folder_url!r})
store.session_look("s")
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20),) * 2)
try:
    store.session_load("s")
except MemoryError as error:
    print("MemoryError:", error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("MemoryError: no memory"), done


def test_a_payload_larger_than_all_memory(mem_space):
    with pytest.raises(kvferry.LimitError):
        mem_space.save(bytes(32), [(1 << 40, 1 << 62)])


def test_closed(mem):
    mem.close()
    with pytest.raises(kvferry.ClosedError, match="Store is closed") as caught:
        mem.stats()
    assert caught.value.status == "closed"


def test_a_store_that_is_down_is_a_miss(own_redis):
    with kvferry.Store(own_redis.tcp_url + "?connect_ms=200", drain=0) as store:
        space = kvferry.Space(store, FIELDS, block_tokens=4)
        own_redis.stop()
        keys = space.chain(range(4))
        assert space.match(keys) == 0
        assert space.load(keys, [bytearray(1)]).reasons[0] in ("unreachable", "breaker")
        assert space.find(keys)[0].why in ("unreachable", "breaker")


def test_out_of_budget_is_a_reason(own_redis):
    with kvferry.Store(own_redis.tcp_url, drain=0) as store:
        space = kvferry.Space(store, FIELDS, block_tokens=4)
        keys = space.chain(range(4))
        assert space.load(keys, [bytearray(1)], timeout=0).reasons == ("budget",)
        assert space.find(keys, timeout=0)[0].why == "budget"
        own_redis.pause()
        assert space.find(keys, timeout=0.05)[0].why in ("budget", "stalled", "unreachable")
        own_redis.resume()


# ---- times


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), float("inf"), 86401, 1e300])
def test_times_out_of_range(mem, mem_space, timeout):
    for call in (
        lambda: mem_space.match(b"", timeout),
        lambda: mem.flush(timeout),
        lambda: kvferry.Store("mem:", drain=timeout),
        lambda: mem.session_load("x", timeout=timeout),
    ):
        with pytest.raises(kvferry.LimitError, match="seconds"):
            call()


def test_zero_is_no_time_where_a_call_must_wait(mem):
    for call in (
        lambda: mem.session_load("x", timeout=0),
        lambda: mem.session_save("x", b"", b"", timeout=0),
        lambda: mem.walk(timeout=0),
    ):
        with pytest.raises(kvferry.LimitError):
            call()


def test_times_are_numbers(mem):
    with pytest.raises(TypeError):
        mem.flush("1")
    assert mem.flush(86400) == mem.flush(1e-9) == mem.flush(1) == (True, 0)


# ---- arguments of any kind


def odd_values():
    class Liar:
        def __len__(self):
            return 5

        def __getitem__(self, i):
            raise RuntimeError("no item")

    class Failing:
        def __iter__(self):
            raise KeyError("no items")

        def __index__(self):
            raise ArithmeticError("no number")

        def __float__(self):
            raise ArithmeticError("no number")

        def __bool__(self):
            raise ArithmeticError("no truth")

    return [
        None, 0, 1, -1, 2**31, 2**63, 2**64, -(2**64), 2**200, 1.5, float("nan"), True, "", "text", "\ud800", "a\0b",
        b"", b"x", bytes(32), bytes(64), bytes(33), bytearray(32), memoryview(bytes(32)), memoryview(bytes(64))[::2],
        memoryview(b"").cast("B", [0]) if False else memoryview(b""), array.array("I", range(8)),
        array.array("q", [-1, 2**62]), array.array("d", [1.0] * 4), (), (1,), (0, 10), (1, 2**63), (-1, 5), ("a", "b"),
        (b"x", b"y"), [], [1], [None], [b"x"], [[b"x", 5]], [[]], [bytes(32)] * 3, [(0, 1)], {}, {"a": 1}, {1: "a"},
        {"engine": "e"}, {"engine": "e", "model": "m", "kv": "k"}, set(), object(), int, Liar(), Failing(), range(8),
        range(2**40), iter([b"x"]), Exception("x"),
    ]  # fmt: skip


def tamed(values):
    """Values that would take long, or touch memory that nobody has, are for the calls that only count them."""
    return [v for v in values if not (isinstance(v, range) and len(v) > 1000)]


METHODS = {
    "store": ["flush", "describe", "clear", "remove", "session_load", "session_look", "session_remove"],
    "space": ["chain", "salt_key", "key_of", "keys_of", "tail_key", "state_key", "apart_key", "stored_key", "match",
              "find", "knows", "forget", "load", "save"],
    "view": ["fence"],
    "queue": ["reap", "cancel", "trim", "arrived", "submit_match", "submit_remove", "submit_touch", "submit_load",
              "submit_save"],
}  # fmt: skip


@pytest.fixture
def objects(mem, mem_space):
    pool = bytearray(1000)
    view = kvferry.View([(address_of(pool), 100, 100, 0, 1)], 10, pool)
    with view, kvferry.Queue(mem) as queue:
        yield {"store": mem, "space": mem_space, "view": view, "queue": queue}


def survives(call, *args, **kwargs):
    """The call returns, or raises an exception that an argument caused: it never crashes, nor fails inside."""
    try:
        call(*args, **kwargs)
    except SystemError:
        raise
    except Exception as error:
        assert str(error) != ""


@pytest.mark.parametrize(("name", "method"), [(n, m) for n, all in METHODS.items() for m in all])
def test_odd_arguments_do_not_crash(objects, name, method):
    call = getattr(objects[name], method)
    values = tamed(odd_values())
    survives(call)
    for value in values:
        survives(call, value)
        survives(call, objects["space"], value)
        survives(call, objects["space"], bytes(32), value)
        for other in (None, bytes(32), [bytearray(4)], 5, objects["view"], objects["space"]):
            survives(call, value, other)
            survives(call, other, value)
    if name == "queue":
        while len(objects["queue"]):
            objects["queue"].wait()
            objects["queue"].reap()


KEYWORDS = ["slots", "tokens", "first_token", "each", "timeout", "owner", "patience", "arrivals", "may_lend"]


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_odd_keywords_do_not_crash(objects, keyword):
    space, view, queue = objects["space"], objects["view"], objects["queue"]
    for value in tamed(odd_values()):
        survives(space.load, bytes(32), [bytearray(4)], **{keyword: value})
        survives(space.load, bytes(32), view, **{keyword: value})
        survives(space.save, bytes(32), [b"1234"], **{keyword: value})
        survives(queue.submit_load, space, bytes(32), [bytearray(4)], **{keyword: value})
        survives(queue.submit_save, space, bytes(32), view, **{"slots": [1], keyword: value})
        while len(queue):
            queue.wait()
            queue.reap()


def test_odd_constructors_do_not_crash(mem):
    for value in tamed(odd_values()):
        for type in (kvferry.Store, kvferry.Space, kvferry.View, kvferry.Queue, kvferry.Session):
            survives(type, value)
            survives(type, mem, value)
            survives(type, value, 5)
        for keyword in ("secret", "previous_secret", "secret_files", "seal_sessions", "drain", "backlog_bytes",
                        "load_threads"):  # fmt: skip
            survives(kvferry.Store, "mem:", **{keyword: value})
        for keyword in ("block_tokens", "secret", "previous_secret"):
            survives(kvferry.Space, mem, {"engine": "e", "model": "m", "kv": "k"}, **{keyword: value})
        for keyword in ("dtype", "shape", "v_dtype", "v_shape", "ttl", "num_tokens", "layout", "space", "timeout"):
            survives(mem.session_save, "s", b"1234", b"5678", **{keyword: value})
        survives(mem.session_save, "s", value, b"")
        survives(mem.session_save, value, b"", b"")
        survives(mem.session_load, "s", into=value)
        survives(mem.session_load, "s", into=(bytearray(4), value))
        survives(mem.walk, space=value)
        survives(mem.walk, space=bytes(32), key=value)


def test_types_that_only_the_module_makes():
    with pytest.raises(TypeError):
        kvferry.Session()
    with pytest.raises(TypeError):
        object.__new__(kvferry.Store)


class ItemsOfLists:
    def items(self):
        return [["engine", "test"]]


def test_messages_say_what_is_wrong(mem_space):
    keys = mem_space.chain(range(8))
    for call, error, text in [
        (lambda: mem_space.match(b"x"), kvferry.LimitError, "32 bytes for each"),
        (lambda: mem_space.match("x"), TypeError, "keys: a buffer is needed"),
        (lambda: mem_space.load(keys, [bytearray(1)]), kvferry.LimitError, "one item for each of the 2 keys, not 1"),
        (lambda: mem_space.load(keys, [b"", b""]), TypeError, "block 0: a contiguous and writable buffer"),
        (lambda: mem_space.save(keys, [memoryview(b"1234")[::2]] * 2), TypeError, "block 0: a contiguous buffer"),
        (lambda: mem_space.save(keys, None), TypeError, "memory: a View, or a sequence .* not <class 'NoneType'>"),
        (lambda: mem_space.chain(None), TypeError, "tokens: a buffer of integers or a sequence of ints is needed"),
        (lambda: mem_space.chain("text"), TypeError, "tokens: an int is needed, not <class 'str'>"),
        (lambda: mem_space.keys_of(None), TypeError, "engine_hashes: a sequence of buffers is needed"),
        (lambda: kvferry.Space(mem_space.store, []), TypeError, "fields: a dict of str to str is needed"),
        (lambda: kvferry.Space(mem_space.store, {1: "one"}), TypeError, "str to str"),
        (lambda: kvferry.Space(mem_space.store, ItemsOfLists()), TypeError, "are tuples, not <class 'list'>"),
        (lambda: kvferry.Store("mem:", secret="a text as long as 16"), TypeError, "secret: a buffer is needed"),
        (lambda: kvferry.Store(None), TypeError, "urls: a str or a sequence of str is needed, not <class 'NoneType'>"),
        (lambda: kvferry.Store(b"mem:"), TypeError, "urls: a str for each tier, not <class 'bytes'>"),
        (lambda: kvferry.View(None, 1), TypeError, "regions: a sequence of .address, slot_stride"),
        (lambda: kvferry.View([5], 1), TypeError, "region: .address, slot_stride.* is needed, not <class 'int'>"),
        (lambda: mem_space.load(keys, [5, 6]), TypeError, "memory of block 0: memory is a buffer"),
        (lambda: mem_space.load(keys, [bytearray(1), [bytearray(1), "x"]]), TypeError, "memory of block 1"),
        (lambda: mem_space.load(keys, [[], []]), kvferry.LimitError, "at least one part"),
        (lambda: mem_space.load(keys, [(0, 5), (0, 5)]), kvferry.LimitError, "no memory at"),
        (lambda: mem_space.load(keys, [(2**64 - 5, 10)] * 2), kvferry.LimitError, "no memory at"),
        (lambda: mem_space.save(keys, [b"", b""], first_token=2**32 - 4), kvferry.LimitError, "do not fit 32 bits"),
        (lambda: mem_space.save(keys, [b"", b""], slots=[1, 2]), TypeError, "only for a View"),
        (lambda: mem_space.save(keys, [b"", b""], tokens=range(4)), kvferry.LimitError, "4 tokens for 2 blocks of 4"),
        (lambda: mem_space.save(keys, [b"", b""], tokens=[2**32] * 8), kvferry.LimitError, "number 0 is 4294967296"),
        (lambda: mem_space.save(keys, [b"", b""], first_token=2**32 - 1), kvferry.LimitError, "do not fit 32 bits"),
        (lambda: mem_space.chain(b"1234"), TypeError, "format 'B'"),
        (lambda: mem_space.chain([-1]), kvferry.LimitError, "number 0 is -1"),
        (lambda: mem_space.chain(array.array("q", [0, -1])), kvferry.LimitError, "number 1 is -1"),
        (lambda: mem_space.chain(array.array("Q", [2**63])), kvferry.LimitError, "9223372036854775808"),
        (lambda: mem_space.stored_key(b"x"), kvferry.LimitError, "key: 32 bytes are needed, not 1"),
    ]:
        with pytest.raises(error, match=text):
            call()


def test_slots_outside_of_the_view(objects):
    space, view = objects["space"], objects["view"]
    for slots in ([10], [-1], [2**62]):
        with pytest.raises(kvferry.LimitError, match="the view has slots 0 to 9"):
            space.load(bytes(32), view, slots=slots)
        with pytest.raises(kvferry.LimitError):
            view.fence(slots)
    with pytest.raises(TypeError, match="a View needs slots="):
        space.load(bytes(32), view)
    with pytest.raises(kvferry.LimitError, match="one for each of the 1 keys, not 2"):
        space.load(bytes(32), view, slots=[1, 2])


def test_secrets_come_from_files(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(os.urandom(32))
    path.chmod(0o644)
    with pytest.raises(kvferry.ConfigError):
        kvferry.Store("mem:", secret_files=str(path))
    path.chmod(0o600)
    with kvferry.Store("mem:", secret_files=str(path)) as store:
        assert store.num_tiers == 1
