# SPDX-License-Identifier: Apache-2.0
"""KVCacheManager: what it stores and returns, in every kind of store, and what it says when something is wrong."""

from __future__ import annotations

import array
import ctypes
import gc
import math
import os
import socket
import ssl
import subprocess
import sys
import threading

import pytest
from conftest import free_port, until

import kvferry
from kvferry import KVCacheManager

np = pytest.importorskip("numpy")


@pytest.fixture
def manager(any_url):
    with KVCacheManager(url=any_url) as manager:
        yield manager


@pytest.fixture
def in_memory():
    with KVCacheManager(url="mem:") as manager:
        yield manager


def random(shape, dtype=np.float16, seed=1):
    return np.random.default_rng(seed).integers(0, 255, shape).astype(dtype)


def same(a, b):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert np.array_equal(a, b)


# ---- what comes back


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool", "complex64"]
)
def test_arrays_come_back(manager, dtype):
    k, v = random((2, 3, 5, 4), dtype), random((2, 3, 7, 4), dtype, 2)
    manager.save_kv_cache("user:1", k, v)
    keys, values = manager.load_kv_cache("user:1")
    same(keys, k)
    same(values, v)
    keys[:] = 0  # theirs alone
    same(manager.load_kv_cache("user:1")[0], k)


def test_large_arrays_come_back(manager):
    k, v = random((8, 1 << 20), "uint8"), random((8, 1 << 20), "uint8", 2)
    manager.save_kv_cache("large", k, v)
    keys, values = manager.load_kv_cache("large")
    same(keys, k)
    same(values, v)
    into = np.empty_like(k), np.empty_like(v)
    assert manager.load_kv_cache("large", into=into)[0] is into[0]
    same(into[0], k)
    same(into[1], v)


def test_keys_and_values_may_differ(manager):
    k, v = random((2, 3)), random((5,), "float32")
    manager.save_kv_cache("s", k, v)
    keys, values = manager.load_kv_cache("s")
    same(keys, k)
    same(values, v)


def test_empty_arrays_and_scalars(in_memory):
    in_memory.save_kv_cache("s", np.empty((0, 3), "float16"), np.float32(3))
    keys, values = in_memory.load_kv_cache("s")
    same(keys, np.empty((0, 3), "float16"))
    same(values, np.array([3], "float32"))


def test_what_is_not_contiguous_is_copied(in_memory):
    k = random((4, 6))
    in_memory.save_kv_cache("s", k.T, k[:, ::2])
    keys, values = in_memory.load_kv_cache("s")
    same(keys, np.ascontiguousarray(k.T))
    same(values, np.ascontiguousarray(k[:, ::2]))
    in_memory.save_kv_cache("s", k.astype(">f2"), k)
    same(in_memory.load_kv_cache("s")[0], k)


def test_bytes_come_back_as_bytes(manager):
    manager.save_kv_cache("s", b"abc", bytearray(b"defg"))
    keys, values = manager.load_kv_cache("s")
    assert (keys, values) == (b"abc", b"defg")
    assert manager.load_kv_cache("s", arrays="bytes")[0] == b"abc"


def test_buffers_with_a_type_come_back_as_arrays(in_memory):
    in_memory.save_kv_cache("s", array.array("l", [1, 2, 3]), memoryview(array.array("f", [1.5, 2.5])))
    keys, values = in_memory.load_kv_cache("s")
    same(keys, np.array([1, 2, 3], "int64"))
    same(values, np.array([1.5, 2.5], "float32"))


def test_a_buffer_of_the_other_byte_order_is_refused(in_memory):
    other = ctypes.c_int32.__ctype_be__ if sys.byteorder == "little" else ctypes.c_int32.__ctype_le__
    with pytest.raises(TypeError, match="buffer of the format"):
        in_memory.save_kv_cache("s", (other * 3)(), b"v")


def test_arrays_as_bytes(in_memory):
    k = random((3, 4))
    in_memory.save_kv_cache("s", k, k)
    keys, _ = in_memory.load_kv_cache("s", arrays="bytes")
    assert keys == k.tobytes() and isinstance(keys, memoryview)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e4m3fnuz"])
def test_dtypes_of_ml_dtypes(manager, name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    k = random((2, 3, 4), "float32").astype(getattr(ml_dtypes, name))
    manager.save_kv_cache("s", k, k)
    keys, values = manager.load_kv_cache("s")
    assert keys.dtype == k.dtype and keys.tobytes() == values.tobytes() == k.tobytes()
    assert manager.store.session_look("s").k_dtype == name


def test_a_dtype_that_is_not_installed():
    """In a process of its own, because ml_dtypes teaches numpy its dtypes for good."""
    program = """
import sys
sys.modules["ml_dtypes"] = None
import kvferry
with kvferry.KVCacheManager(url="mem:") as manager:
    manager.store.session_save("s", b"1234", b"5678", dtype="bfloat16", shape=(2,))
    assert manager.load_kv_cache("s", arrays="bytes") == (b"1234", b"5678")
    assert "numpy" not in sys.modules
    try:
        manager.load_kv_cache("s")
    except TypeError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "pip install ml_dtypes" in done.stdout, done


def test_a_dtype_that_nobody_knows(in_memory):
    in_memory.store.session_save("s", b"1234", b"1234", dtype="float3_mine", shape=(2,))
    with pytest.raises(TypeError, match="float3_mine"):
        in_memory.load_kv_cache("s")


def test_no_session(manager):
    assert manager.load_kv_cache("nobody") == (None, None)
    assert manager.load_kv_cache("nobody", into=(bytearray(1), bytearray(1))) == (None, None)
    assert manager.exists("nobody") is False
    assert manager.ttl("nobody") is None
    assert manager.delete("nobody") is False


def test_exists_ttl_delete(manager):
    manager.save_kv_cache("s", b"k", b"v", ttl=100)
    assert manager.exists("s") is True
    assert 0 < manager.ttl("s") <= 100
    manager.save_kv_cache("s", b"k", b"v")
    assert 100 < manager.ttl("s") <= 3600
    assert manager.delete("s") is True
    assert manager.exists("s") is False
    assert manager.load_kv_cache("s") == (None, None)


def test_a_session_expires(any_url):
    with KVCacheManager(url=any_url, ttl=1) as manager:
        manager.save_kv_cache("s", b"k", b"v")
        until(lambda: not manager.exists("s"), "the session expires")
        assert manager.load_kv_cache("s") == (None, None)


def test_a_save_replaces(manager):
    manager.save_kv_cache("s", random((9, 9)), random((9, 9)))
    k = random((3,), "float32")
    manager.save_kv_cache("s", k, k)
    same(manager.load_kv_cache("s")[0], k)


def test_what_is_said_of_a_session(in_memory):
    digest = os.urandom(32)
    in_memory.save_kv_cache("s", random((2, 3)), random((2, 3)), num_tokens=3, layout="LT", space=digest)
    info = in_memory.store.session_look("s")
    assert (info.num_tokens, info.layout, info.space) == (3, "LT", digest)


def test_arrays_outlive_the_manager(any_url):
    k = random((4, 1 << 20), "uint8")
    with KVCacheManager(url=any_url) as manager:
        manager.save_kv_cache("s", k, k)
        keys, values = manager.load_kv_cache("s")
    del manager, values
    gc.collect()
    same(keys, k)


# ---- whole caches


def layers(num=3, shape=(1, 2, 5, 4)):
    return [(random(shape, seed=2 * i), random(shape, seed=2 * i + 1)) for i in range(num)]


def stacked(cache):
    return np.stack([k for k, _ in cache]), np.stack([v for _, v in cache])


@pytest.mark.parametrize("form", [list, tuple])
def test_a_cache_is_stored_without_stacking(manager, form):
    cache = form(layers())
    manager.save_kv_cache("s", past_key_values=cache, num_tokens=5)
    for got, want in zip(manager.load_kv_cache("s"), stacked(cache), strict=True):
        same(got, want)
    into = [(np.empty_like(k), np.empty_like(v)) for k, v in cache]
    keys, values = manager.load_kv_cache("s", into=into)
    for i, (k, v) in enumerate(cache):
        assert keys[i] is into[i][0] and values[i] is into[i][1]
        same(keys[i], k)
        same(values[i], v)


def test_a_cache_of_two_layers_is_no_pair_of_arrays(in_memory):
    cache = layers(2)
    in_memory.save_kv_cache("s", past_key_values=cache)
    same(in_memory.load_kv_cache("s")[0], stacked(cache)[0])
    in_memory.save_kv_cache("s", past_key_values=stacked(cache))
    same(in_memory.load_kv_cache("s")[1], stacked(cache)[1])


def test_layers_of_several_shapes_have_no_shape(in_memory):
    cache = layers(1) + layers(1, (1, 2, 3, 4))
    in_memory.save_kv_cache("s", past_key_values=cache)
    assert in_memory.load_kv_cache("s")[0] == b"".join(k.tobytes() for k, _ in cache)
    into = [(np.empty_like(k), np.empty_like(v)) for k, v in cache]
    in_memory.load_kv_cache("s", into=into)
    same(into[1][1], cache[1][1])


class FakeLayer:
    def __init__(self, keys, values):
        self.keys, self.values = keys, values


class FakeCache:
    """The part of a Cache of Transformers that is used; test_manager_torch.py has the real one."""

    def __init__(self, pairs):
        self.layers = [FakeLayer(k, v) for k, v in pairs]

    def get_seq_length(self, layer=0):
        return 5


def test_a_cache_object(in_memory):
    cache = FakeCache(layers())
    in_memory.save_kv_cache("s", past_key_values=cache)
    assert in_memory.store.session_look("s").num_tokens == 5
    into = FakeCache([(np.zeros_like(k), np.zeros_like(v)) for k, v in layers()])
    in_memory.load_kv_cache("s", into=into)
    same(into.layers[2].values, cache.layers[2].values)
    cache.layers[1] = FakeLayer(None, None)
    with pytest.raises(TypeError, match=r"layer 1 .* run the model first"):
        in_memory.save_kv_cache("s", past_key_values=cache)
    cache.layers[1] = FakeLayer(*layers(1)[0])
    cache.layers[1].is_sliding = True  # also while it has dropped nothing
    with pytest.raises(TypeError, match=r"kvferry.hf.PrefixCache"):
        in_memory.save_kv_cache("s", past_key_values=cache)
    cache.layers[1] = FakeLayer(*layers(1, (1, 2, 9, 4))[0])  # preallocated
    with pytest.raises(TypeError, match=r"kvferry.hf.PrefixCache"):
        in_memory.save_kv_cache("s", past_key_values=cache)


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        (7, "not int"),
        ("text", "not str"),
        ([], "no layers"),
        ([1, 2, 3], "layer 0"),
        ([(b"k", b"v"), (b"k",)], "layer 1"),
        ([(np.zeros(2, "f2"), b"v"), (np.zeros(2, "f4"), b"v")], "one dtype"),
    ],
)
def test_what_is_no_cache(in_memory, cache, says):
    with pytest.raises(TypeError, match=says):
        in_memory.save_kv_cache("s", past_key_values=cache)
    assert not in_memory.exists("s")


# ---- wrong arguments


@pytest.mark.parametrize(
    ("k", "says"),
    [
        (None, "key_tensor must be a numpy array"),
        ([1.0], "layer 0 .* not float"),
        ([], "no layers"),
        ("text", "not str"),
        (np.array(["text"]), "no plain number"),
        (np.array([None]), "no plain number"),
        (np.zeros(3, [("a", "i4")]), "no plain number"),
        (np.zeros(3, "M8[s]"), "no plain number"),
    ],
)
def test_what_is_no_array(in_memory, k, says):
    with pytest.raises(TypeError, match=says):
        in_memory.save_kv_cache("s", k, b"v")


def test_too_many_axes(in_memory):
    with pytest.raises(kvferry.LimitError, match="dimensions"):
        in_memory.save_kv_cache("s", np.zeros((1,) * 9), b"v")


def test_both_forms_at_once(in_memory):
    with pytest.raises(TypeError, match="not both"):
        in_memory.save_kv_cache("s", b"k", b"v", past_key_values=layers())


@pytest.mark.parametrize("id", ["", "x" * 513])
def test_wrong_ids(manager, id):
    for call in (manager.load_kv_cache, manager.exists, manager.ttl, manager.delete):
        with pytest.raises(kvferry.LimitError, match="1 to 512 bytes"):
            call(id)
    with pytest.raises(ValueError, match="1 to 512 bytes"):
        manager.save_kv_cache(id, b"k", b"v")
    with pytest.raises(TypeError):
        manager.load_kv_cache(7)


def test_a_url_in_place_of_a_host():
    with pytest.raises(kvferry.ConfigError, match="pass it as url=") as raised:
        KVCacheManager("redis://me:hidden@localhost:6379")
    assert "hidden" not in str(raised.value)


def test_a_host_that_nobody_knows():
    with KVCacheManager("host.invalid") as manager, pytest.raises(kvferry.StoreError, match="can't be resolved"):
        manager.exists("s")


@pytest.mark.parametrize("ttl", [0, -1, 1 << 32])
def test_times_to_live_out_of_range(in_memory, ttl):
    with pytest.raises(kvferry.LimitError, match="ttl"):
        in_memory.save_kv_cache("s", b"k", b"v", ttl=ttl)
    with pytest.raises(kvferry.LimitError, match="ttl"):
        KVCacheManager(url="mem:", ttl=ttl)


@pytest.mark.parametrize("ttl", [1.5, "60", True])
def test_times_to_live_of_the_wrong_type(in_memory, ttl):
    with pytest.raises(TypeError, match="whole seconds"):
        in_memory.save_kv_cache("s", b"k", b"v", ttl=ttl)


def test_wrong_memory_to_read_into(in_memory):
    k = random((4, 4))
    in_memory.save_kv_cache("s", k, k)
    for into, says in [
        ((k.copy()[:, ::2], k.copy()), "not contiguous"),
        ((k.tobytes(), k.copy()), "read-only"),
        ((np.frombuffer(bytes(32), "f2"), k.copy()), "read-only"),
        ((k.astype(">f2"), k.copy()), "byte order"),
        ((k.view("int16").copy(), k.copy()), "keys .* float16, not int16"),
        ((k.copy(), k.view("int16").copy()), "values .* float16, not int16"),
        (k.copy(), "not ndarray"),
    ]:
        with pytest.raises(TypeError, match=says):
            in_memory.load_kv_cache("s", into=into)
    with pytest.raises(kvferry.LimitError, match="32 and 32"):
        in_memory.load_kv_cache("s", into=(k[:2].copy(), k.copy()))


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"url": "mem:", "host": "elsewhere"}, "url or host"),
        ({"url": "mem:", "ssl": True}, "url or ssl"),
        ({"url": "mem:", "password": "x"}, "url or password"),
        ({"url": "mem:", "socket_connect_timeout": 1.0}, "url or socket_connect_timeout"),
        ({"ssl_ca_certs": "ca.pem"}, "ssl=True"),
        ({"unix_socket_path": "/nowhere", "ssl": True}, "needs no TLS"),
        ({"url": "mem:", "arrays": "jax"}, "numpy, torch, bytes"),
        ({"decode_responses": True}, "decode_responses"),
    ],
)
def test_parameters_that_do_not_go_together(parameters, says):
    with pytest.raises(TypeError, match=says):
        KVCacheManager(**parameters)


def test_a_store_of_the_caller(mem):
    with pytest.raises(TypeError, match="store or url"):
        KVCacheManager(store=mem, url="mem:")
    for name in ("secret", "previous_secret", "secret_files"):
        with pytest.raises(TypeError, match=f"store or {name}"):
            KVCacheManager(store=mem, **{name: b"0123456789abcdef"})  # it would seal nothing
    with KVCacheManager(store=mem) as manager:
        assert manager.store is mem
        manager.save_kv_cache("s", b"k", b"v")
    assert manager.closed and not mem.closed
    assert bytes(mem.session_load("s").k) == b"k"
    manager = KVCacheManager(store=mem)
    assert not manager.closed
    mem.close()
    assert manager.closed


# ---- closed, forked, many threads


def test_a_closed_manager_raises(any_url):
    manager = KVCacheManager(url=any_url)
    assert not manager.closed
    manager.close()
    manager.close()
    assert manager.closed
    for call in (
        lambda: manager.save_kv_cache("s", b"k", b"v"),
        lambda: manager.load_kv_cache("s"),
        lambda: manager.load_kv_cache("s", into=(bytearray(1), bytearray(1))),
        lambda: manager.exists("s"),
        lambda: manager.ttl("s"),
        lambda: manager.delete("s"),
    ):
        with pytest.raises(kvferry.ClosedError):
            call()


def test_a_forked_child_needs_its_own(any_url):
    with KVCacheManager(url=any_url) as manager:
        manager.save_kv_cache("s", b"k", b"v")
        keys, _ = manager.load_kv_cache("s")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                manager.load_kv_cache("s")
            except kvferry.ClosedError:
                with KVCacheManager(url=any_url) as own:
                    own.save_kv_cache("child", b"k", b"v")
                code = 0 if keys == b"k" else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert manager.load_kv_cache("s")[0] == b"k"


def test_threads_share_a_manager(manager):
    failures = []

    def work(number):
        try:
            k = np.full((3, 1000 + number), number, "float32")
            for turn in range(10):
                manager.save_kv_cache(f"own:{number}", k, k + turn)
                keys, values = manager.load_kv_cache(f"own:{number}")
                same(keys, k)
                same(values, k + turn)
                manager.save_kv_cache("shared", k, k)
                keys, values = manager.load_kv_cache("shared")  # of one writer or another, whole
                assert len(np.unique(keys)) == 1 and np.array_equal(keys, values)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ---- secrets


def test_sealed_sessions(any_url):
    secret, k = os.urandom(32), random((3, 4))
    if any_url == "mem:":
        pytest.skip("a memory of one manager")
    with KVCacheManager(url=any_url, secret=secret) as manager:
        manager.save_kv_cache("s", k, k)
        same(manager.load_kv_cache("s")[0], k)
        assert manager.exists("s") and manager.ttl("s") <= 3600
    with KVCacheManager(url=any_url) as plain, KVCacheManager(url=any_url, secret=os.urandom(32)) as other:
        assert plain.load_kv_cache("s") == other.load_kv_cache("s") == (None, None)
    with KVCacheManager(url=any_url, secret=os.urandom(32), previous_secret=secret) as renewed:
        same(renewed.load_kv_cache("s")[0], k)
        assert renewed.delete("s")
    with pytest.raises(kvferry.LimitError, match="16"):
        KVCacheManager(url=any_url, secret=b"short")


def test_a_secret_in_a_file(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)
    url = f"file:{tmp_path / 'store'}"
    with KVCacheManager(url=url, secret_files=str(path)) as manager:
        manager.save_kv_cache("s", b"k", b"v")
        assert manager.load_kv_cache("s")[0] == b"k"
    path.chmod(0o644)
    with pytest.raises(kvferry.ConfigError, match="secret"):
        KVCacheManager(url=url, secret_files=str(path))


# ---- servers


def test_parameters_of_redis_py(redis):
    by_port = KVCacheManager("127.0.0.1", redis.port, 0)
    by_socket = KVCacheManager(unix_socket_path=str(redis.socket), client_name="mine")
    by_port.save_kv_cache("s", b"k", b"v")
    assert by_socket.load_kv_cache("s")[0] == b"k"
    assert b"name=mine" in redis.command("CLIENT", "LIST")
    with KVCacheManager(host="127.0.0.1", port=redis.port, db=3) as third:
        assert third.load_kv_cache("s") == (None, None)
        third.save_kv_cache("s", b"third", b"v")
    with KVCacheManager(unix_socket_path=str(redis.socket), db=3) as third:
        assert third.load_kv_cache("s")[0] == b"third"
    by_port.close()
    by_socket.close()


@pytest.mark.parametrize("password", ["plain", "p@ss:w/rd?%#[ü&= "])
def test_users_and_passwords(own_redis, password):
    own_redis.command("ACL", "SETUSER", "some:one", "on", ">" + password, "~*", "+@all")
    own_redis.command("CONFIG", "SET", "requirepass", password)
    for where in ({"host": "127.0.0.1", "port": own_redis.port}, {"unix_socket_path": str(own_redis.socket)}):
        for who in ({}, {"username": "some:one"}):
            with KVCacheManager(**where, **who, password=password) as manager:
                manager.save_kv_cache("s", b"k", b"v")
                assert manager.load_kv_cache("s")[0] == b"k"
        with pytest.raises(kvferry.ConfigError, match="password") as caught:
            KVCacheManager(**where, password="wrong-" + password)
        assert "wrong-" not in str(caught.value)


def test_how_a_server_is_named():
    """What reaches the store: an address with colons in brackets, a time in milliseconds, never less than one."""
    for parameters, url in [
        ({"host": "::1"}, "redis://[::1]:1/0"),
        ({"host": "[::1]", "db": 2}, "redis://[::1]:1/2"),
        ({"host": "127.0.0.1", "socket_connect_timeout": 0.25}, "redis://127.0.0.1:1/0?connect_ms=250"),
        ({"host": "127.0.0.1", "socket_connect_timeout": 1e-9}, "redis://127.0.0.1:1/0?connect_ms=1"),
    ]:
        with KVCacheManager(port=1, **parameters) as manager:
            assert manager.store.tiers()[0].url == url


def test_no_server(tmp_path):
    for where in ({"port": free_port()}, {"unix_socket_path": str(tmp_path / "nothing")}):
        with KVCacheManager(**where, socket_timeout=2) as manager:
            for call in (
                lambda: manager.save_kv_cache("s", b"k", b"v"),
                lambda: manager.load_kv_cache("s"),
                lambda: manager.exists("s"),
                lambda: manager.delete("s"),
            ):
                with pytest.raises(kvferry.StoreError, match=r"can.t|refused|connect"):
                    call()
                with pytest.raises(OSError):
                    call()


def test_a_server_that_dies_and_returns(own_redis):
    k = random((4, 4))
    with KVCacheManager("127.0.0.1", own_redis.port) as manager:
        manager.save_kv_cache("s", k, k)
        own_redis.stop()
        with pytest.raises(kvferry.StoreError):
            manager.load_kv_cache("s")
        own_redis.start()

        def works():
            try:
                manager.save_kv_cache("s", k, k)
            except kvferry.StoreError:
                return False
            return True

        until(works, "the manager works again")
        same(manager.load_kv_cache("s")[0], k)


def test_a_server_that_dies_in_the_middle(own_redis):
    k = random((16, 1 << 20), "uint8")
    stop = threading.Event()
    outcomes = []

    def work():
        with KVCacheManager("127.0.0.1", own_redis.port, socket_timeout=20) as manager:
            while not stop.is_set():
                try:
                    manager.save_kv_cache("s", k, k)
                    keys, values = manager.load_kv_cache("s")
                    outcomes.append(keys is None or (np.array_equal(keys, k) and np.array_equal(values, k)))
                except kvferry.StoreError:
                    outcomes.append(None)

    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: True in outcomes, "a session comes back")
    own_redis.stop()
    until(lambda: None in outcomes, "the server's end is noticed")
    stop.set()
    thread.join()
    assert False not in outcomes


def test_a_silent_server_takes_no_longer_than_the_timeout(own_redis):
    with KVCacheManager("127.0.0.1", own_redis.port, socket_timeout=1) as manager:
        manager.save_kv_cache("s", b"k", b"v")
        own_redis.pause()
        try:
            with pytest.raises(kvferry.StoreError):
                manager.load_kv_cache("s")
            with pytest.raises(kvferry.StoreError):
                manager.save_kv_cache("s", b"k", b"v")
        finally:
            own_redis.resume()


def test_a_full_server_keeps_the_previous_session(own_redis):
    k = random((8, 1 << 20), "uint8")
    with KVCacheManager("127.0.0.1", own_redis.port) as manager:
        manager.save_kv_cache("s", b"old", b"old")
        own_redis.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        own_redis.command("CONFIG", "SET", "maxmemory", "1mb")
        with pytest.raises(kvferry.StoreError, match=r"OOM|memory"):
            manager.save_kv_cache("s", k, k)
        assert manager.load_kv_cache("s")[0] == b"old"
        assert own_redis.command("DBSIZE") == b":1\r\n"


def test_a_key_of_another_kind_is_left_alone(redis):
    redis.command("SET", "text", "hello")
    with KVCacheManager("127.0.0.1", redis.port) as manager:
        assert manager.load_kv_cache("text") == (None, None)
        assert manager.exists("text") is False and manager.delete("text") is False
        with pytest.raises(kvferry.ConfigError, match="holds a string"):
            manager.save_kv_cache("text", b"k", b"v")
    assert redis.command("GET", "text") == b"$5\r\nhello\r\n"


def test_a_user_who_may_not(own_redis):
    blocks = "~kvf1:* -@all +ping +select +client|setname +get +getrange +set +pexpire +unlink"
    own_redis.command("ACL", "SETUSER", "reader", "on", ">x", *blocks.split(), "(~* +hget +hstrlen +hexists)")
    own_redis.command("HSET", "s", "keys", "abc", "values", "def")
    with KVCacheManager("127.0.0.1", own_redis.port, username="reader", password="x") as manager:
        assert manager.load_kv_cache("s")[0] == b"abc"
        with pytest.raises(kvferry.ConfigError, match="pttl"):
            manager.ttl("s")
        with pytest.raises(kvferry.ConfigError, match="ACL"):
            manager.save_kv_cache("s", b"k", b"v")
        with pytest.raises(kvferry.ConfigError, match="ACL"):
            manager.delete("s")


def test_tls(redis_program, tmp_path):
    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=tmp_path, check=True, capture_output=True)

    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", names,
            "-keyout", "key.pem", "-out", "cert.pem")  # fmt: skip
    cert, key, port = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"), free_port()
    log = tmp_path / "log"
    server = subprocess.Popen(
        [redis_program, "--port", "0", "--tls-port", str(port), "--tls-cert-file", cert, "--tls-key-file", key,
         "--tls-ca-cert-file", cert, "--tls-auth-clients", "optional", "--save", "", "--dir", str(tmp_path)],
        stdout=log.open("wb"),
    )  # fmt: skip

    def answers():
        if server.poll() is not None:
            assert "Failed finding TLS support" in log.read_text()
            pytest.skip("this server has no TLS")
        context = ssl.create_default_context(cafile=cert)
        try:
            with (
                socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
                context.wrap_socket(plain, server_hostname="localhost"),
            ):
                return True
        except OSError:
            return False

    try:
        until(answers, "redis-server speaks TLS")
        k = random((3, 4))
        with KVCacheManager(
            "127.0.0.1", port, ssl=True, ssl_ca_certs=cert, ssl_certfile=cert, ssl_keyfile=key
        ) as manager:
            manager.save_kv_cache("s", k, k)
            same(manager.load_kv_cache("s")[0], k)
        with KVCacheManager("127.0.0.1", port, ssl=True, ssl_cert_reqs="none", ssl_check_hostname=False) as manager:
            same(manager.load_kv_cache("s")[0], k)
        with pytest.raises(kvferry.ConfigError, match="certificate"):
            KVCacheManager("127.0.0.1", port, ssl=True)
    finally:
        server.kill()
        server.wait()


def test_several_tiers(redis):
    with KVCacheManager(url=["mem:", redis.tcp_url]) as manager:
        manager.save_kv_cache("s", b"k", b"v")
        assert manager.load_kv_cache("s")[0] == b"k"
        assert redis.command("EXISTS", "s") == b":1\r\n"


def test_a_session_without_end(redis):
    redis.command("HSET", "s", "keys", "abc", "values", "def")
    with KVCacheManager("127.0.0.1", redis.port) as manager:
        assert manager.ttl("s") == math.inf
