# SPDX-License-Identifier: Apache-2.0
"""Sessions: K and V by id, whole and in pieces, in memory of the library and of the caller."""

from __future__ import annotations

import gc
import math
import os

import pytest

import kvferry


def test_a_session_comes_back(store):
    k, v = os.urandom(480), os.urandom(480)
    digest = os.urandom(32)
    store.session_save(
        "user:1", k, v, dtype="float16", shape=(2, 120), ttl=100, num_tokens=7, layout="LT", space=digest
    )
    session = store.session_load("user:1")
    assert (bytes(session.k), bytes(session.v)) == (k, v)
    assert session.info == (480, "float16", (2, 120), 480, "float16", (2, 120), 7, "LT", digest, True, None)
    look = store.session_look("user:1")
    assert look[:-1] == session.info[:-1] and 0 < look.ttl <= 100


def test_k_and_v_may_differ(store):
    store.session_save("s", b"1234", b"12345678", dtype="uint8", shape=(4,), v_dtype="float32", v_shape=(2,))
    info = store.session_load("s").info
    assert (info.k_dtype, info.k_shape, info.v_dtype, info.v_shape) == ("uint8", (4,), "float32", (2,))


def test_pieces_are_one_array(store):
    pieces = [os.urandom(n) for n in (100, 0, 1, 99)]
    store.session_save("s", pieces, bytearray(200))
    assert bytes(store.session_load("s").k) == b"".join(pieces)
    k = [bytearray(150), bytearray(50)]
    v = bytearray(200)
    session = store.session_load("s", into=(k, v))
    assert (session.k, session.v) == (None, None)
    assert b"".join(k) == b"".join(pieces) and session.info.k_bytes == 200


def test_memory_of_another_length_is_refused(store):
    store.session_save("s", b"1234", b"1234")
    with pytest.raises(kvferry.LimitError):
        store.session_load("s", into=(bytearray(3), bytearray(4)))
    for into in (([], bytearray(4)), (bytearray(4), [])):
        with pytest.raises(kvferry.LimitError, match="at least one piece"):
            store.session_load("s", into=into)


def test_no_session_is_none(store):
    assert store.session_load("nobody") is None
    assert store.session_look("nobody") is None
    assert store.session_remove("nobody") is False
    store.session_save("s", b"1", b"2")
    assert store.session_remove("s") is True
    assert store.session_load("s") is None


def test_memory_outlives_session_and_store(any_url):
    with kvferry.Store(any_url) as store:
        store.session_save("s", b"k" * 3_000_000, b"v" * 10)
        session = store.session_load("s")
    k = session.k
    del session, store
    gc.collect()
    assert bytes(k) == b"k" * 3_000_000
    k[0] = 1  # writable


def test_an_overwritten_session_loads_raw(redis):
    with kvferry.Store(redis.tcp_url) as store:
        store.session_save("s", b"1234", b"5678", dtype="uint8", shape=(4,))
        redis.command("HSET", "s", "keys", "abc", "values", "def")
        assert store.session_load("s") is None and store.session_look("s") is None
        look = store.session_look("s", raw=True)
        assert (look.k_bytes, look.v_bytes, look.has_meta) == (3, 3, False)
        session = store.session_load("s", raw=True)
        assert (bytes(session.k), bytes(session.v), session.info.has_meta) == (b"abc", b"def", False)
        assert session.info.k_dtype is None and session.info.k_shape is None


def test_a_time_to_live_is_kept(redis):
    with kvferry.Store(redis.tcp_url) as store:
        store.session_save("s", b"1", b"2", ttl=1000)
        assert 990 <= int(redis.command("TTL", "s")[1:]) <= 1000
        store.session_save("t", b"1", b"2")
        assert 3590 <= int(redis.command("TTL", "t")[1:]) <= 3600
        assert 990 < store.session_look("s").ttl <= 1000
        redis.command("PERSIST", "s")
        assert store.session_look("s").ttl == math.inf
