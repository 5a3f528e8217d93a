# SPDX-License-Identifier: Apache-2.0
"""kvferry.lmcache: the conformance set, and what LMCache expects, through LMCache's own classes.

The client runs below NativeConnectorL2Adapter, made by the factory of "native_plugin"; the connector below
RemoteBackend and LocalCPUBackend. Needs torch and LMCache (make setup-engines)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make setup-engines")
pytest.importorskip("lmcache", reason="LMCache is not installed: make setup-engines")
pytest.register_assert_rewrite("block_cases")

from block_cases import *  # noqa: E402, F403
from block_cases import BLOCK, SETTINGS, Opener, Toy, tokens  # noqa: E402
from conftest import RedisServer, until  # noqa: E402
from lmcache.utils import CacheEngineKey  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.distributed.api import ObjectKey  # noqa: E402
from lmcache.v1.distributed.l2_adapters.native_plugin_l2_adapter import (  # noqa: E402
    NativePluginL2AdapterConfig,
    _create_native_plugin_l2_adapter,
)
from lmcache.v1.metadata import LMCacheMetadata  # noqa: E402
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend  # noqa: E402
from lmcache.v1.storage_backend.remote_backend import RemoteBackend  # noqa: E402
from slow_proxy import SlowProxy  # noqa: E402

from kvferry.lmcache import KvferryClient  # noqa: E402

PROMPT = tokens(6 * BLOCK + 1)
PLUGIN = "remote_storage_plugin.kvferry."
LAYERS, HEADS, HEAD = 2, 2, 8


def metadata_of(dtype: str, block: int, **settings: Any) -> LMCacheMetadata:
    values = {"model_name": "toy", "world_size": 1, "local_world_size": 1, "worker_id": 0, "local_worker_id": 0}
    shape = (LAYERS, 2, block, HEADS, HEAD)
    return LMCacheMetadata(
        **values | {"kv_dtype": getattr(torch, dtype), "kv_shape": shape, "chunk_size": block} | settings
    )


class LMCache(Toy):
    """LMCache's memory."""

    def __init__(self, url: str, **settings: Any) -> None:
        s = SETTINGS | settings
        self.metadata = metadata_of(s["dtype"], s["block"], **s.get("metadata", {}))
        super().__init__(s["block"], 4 * LAYERS * HEADS * HEAD * s["block"], f"{s['model']} {s['dtype']}")
        self.options = {"store": url, "model": s["model"], **{n: s[n] for n in ("load_timeout", "save_timeout")}}
        self.options |= s.get("options", {})
        plugin = {"module_path": "kvferry.lmcache", "class_name": "KvferryAdapter", **self.options}
        extra = {PLUGIN + name: value for name, value in plugin.items()} | {"save_unfull_chunk": True}
        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=s["block"],
            local_cpu=False,
            max_local_cpu_size=s.get("gigabytes", 0.05),
            remote_storage_plugins=["kvferry"],
            extra_config=extra,
            **s.get("config", {}),
        )
        self.memory = LocalCPUBackend(self.config, self.metadata, "cpu")

    def allocated(self, blocks: Sequence[bytes], num_tokens: int | None = None) -> list[Any]:
        """Chunks of LMCache's memory with these bytes."""
        chunks = []
        for block in blocks:
            chunk = self.memory.allocate(self.metadata.get_shapes(num_tokens), self.metadata.get_dtypes())
            memoryview(chunk.byte_array).cast("B")[:] = block
            chunks.append(chunk)
        return chunks

    def taken(self, chunk: Any) -> bytes | None:
        """The bytes of a chunk, which goes back."""
        if chunk is None:
            return None
        data = bytes(chunk.byte_array)
        chunk.ref_count_down()
        return data


class L2(LMCache):
    """The client, as LMCache's server calls it: three kinds of tasks, each with a descriptor."""

    def __init__(self, url: str, **settings: Any) -> None:
        super().__init__(url, **settings)
        params = self.options | {"kv": (SETTINGS | settings)["dtype"]}
        spec = {"module_path": "kvferry.lmcache", "class_name": "KvferryClient", "adapter_params": params}
        self.adapter = _create_native_plugin_l2_adapter(NativePluginL2AdapterConfig.from_dict(spec))
        self.rank = settings.get("rank", 0)

    def keys(self, hashes: Sequence[bytes]) -> list[ObjectKey]:
        return [ObjectKey(h, self.metadata.model_name, self.rank) for h in hashes]

    def answer(self, ask: Any) -> Any:
        """Tasks of other threads wake us too: what is complete is told by the answer."""
        result = None

        def is_here() -> bool:
            nonlocal result
            result = ask()
            return result is not None

        until(is_here, "the task is complete")
        return result

    def lookup(self, hashes: Sequence[bytes]) -> int:
        keys = self.keys(hashes)
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        found = self.answer(lambda: self.adapter.query_lookup_and_lock_result(task))
        there = [found.test(i) for i in range(len(keys))]
        self.adapter.submit_unlock([key for key, is_there in zip(keys, there, strict=True) if is_there])
        return there.index(False) if False in there else len(there)

    def load(self, hashes: Sequence[bytes]) -> list[bytes | None]:
        chunks = self.allocated([b"\xaa" * self.block_bytes] * len(hashes))
        task = self.adapter.submit_load_task(self.keys(hashes), chunks)
        found = self.answer(lambda: self.adapter.query_load_result(task))
        data = [self.taken(chunk) for chunk in chunks]
        return [d if found.test(i) else None for i, d in enumerate(data)]

    def save(self, hashes: Sequence[bytes], blocks: Sequence[bytes]) -> None:
        chunks = self.allocated(blocks)
        stored = self.stored(self.adapter.submit_store_task(self.keys(hashes), chunks))
        for chunk in chunks:
            memoryview(chunk.byte_array).cast("B")[:] = b"\x55" * self.block_bytes
            chunk.ref_count_down()
        self.last_save = stored

    def stored(self, task: int) -> bool:
        done = self.__dict__.setdefault("_stored", {})

        def ask() -> Any:
            done.update(self.adapter.pop_completed_store_tasks())
            return done.get(task)

        return self.answer(ask).is_successful()

    def close(self) -> None:
        self.adapter.close()


class Remote(LMCache):
    """The connector, as LMCache in the engine calls it."""

    def __init__(self, url: str, **settings: Any) -> None:
        super().__init__(url, **settings)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.backend = RemoteBackend(self.config, self.metadata, self.loop, self.memory, "cpu", plugin_name="kvferry")

    def keys(self, hashes: Sequence[bytes]) -> list[CacheEngineKey]:
        m = self.metadata
        dtype = m.kv_dtype
        return [
            CacheEngineKey(m.model_name, m.world_size, m.worker_id, int.from_bytes(h[:8], "big"), dtype) for h in hashes
        ]

    def lookup(self, hashes: Sequence[bytes]) -> int:
        return self.backend.batched_contains(self.keys(hashes))

    def load(self, hashes: Sequence[bytes]) -> list[bytes | None]:
        return [self.taken(chunk) for chunk in self.backend.batched_get_blocking(self.keys(hashes))]

    def save(self, hashes: Sequence[bytes], blocks: Sequence[bytes]) -> None:
        ended = threading.Event()
        chunks, keys, left = self.allocated(blocks), self.keys(hashes), set(self.keys(hashes))

        def end(key: Any) -> None:
            left.discard(key)
            if not left:
                ended.set()

        if not keys:
            return
        self.backend.batched_submit_put_task(keys, chunks, on_complete_callback=end)
        ended.wait()
        for chunk in chunks:
            memoryview(chunk.byte_array).cast("B")[:] = b"\x55" * self.block_bytes
            assert chunk.get_ref_count() == 1
            chunk.ref_count_down()

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def close(self) -> None:
        self.backend.close()
        self.loop.call_soon_threadsafe(self.loop.stop)


KINDS = {"client": L2, "connector": Remote}


def make_toy(kind: str, **settings: Any) -> Any:
    return KINDS[kind](**settings)


@pytest.fixture(params=KINDS)
def open_toy(request: pytest.FixtureRequest) -> Opener:
    return Opener(make_toy, kind=request.param)


@pytest.fixture
def remote(redis: RedisServer):
    with contextlib.closing(Remote(redis.unix_url)) as toy:
        yield toy


@pytest.fixture(autouse=True)
def no_leak(caplog: pytest.LogCaptureFixture):
    """LMCache warns of memory that nobody gave back."""
    yield
    gc.collect()
    assert "is being garbage collected" not in caplog.text


# ---- both


@pytest.mark.parametrize("kind", KINDS)
def test_through_every_store(kind: str, any_url: str) -> None:
    with contextlib.closing(make_toy(kind, url=any_url)) as toy:
        assert [toy.run(PROMPT), toy.run(PROMPT)] == [0, 6]


@pytest.mark.parametrize("kind", KINDS)
def test_models_are_apart(kind: str, redis: RedisServer) -> None:
    """By their name and by their weights."""
    ways = [{"model": "b"}, {"metadata": {"model_name": "other"}}, {"options": {"ttl": 60}}]
    for settings, num in zip(ways, (0, 0, 0), strict=True):
        with contextlib.closing(make_toy(kind, url=redis.unix_url, **settings)) as toy:
            assert toy.run(PROMPT) == num
    with contextlib.closing(make_toy(kind, url=redis.unix_url)) as toy:
        assert toy.run(PROMPT) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_sealed(kind: str, redis: RedisServer, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of more than 16 bytes\n")
    secret.chmod(0o600)
    for options, num in (({"secret_files": str(secret)}, 0), ({}, 0), ({"secret_files": str(secret)}, 6)):
        with contextlib.closing(make_toy(kind, url=redis.unix_url, options=options)) as toy:
            assert toy.run(PROMPT) == num


def test_time_to_live(redis: RedisServer) -> None:
    """The option is that of the URL."""
    with contextlib.closing(L2(redis.unix_url, options={"ttl": 77})) as toy:
        toy.run(PROMPT)
        ttls = [entry.ttl for entry in toy.adapter._client.store.walk() if entry.kind == "block"]
    assert len(ttls) == 6 and max(ttls) <= 77 * 1.1


def test_options_are_checked() -> None:
    for options, message in (
        ({"store": "mem:", "kv": "f16"}, "needs the option 'model'"),
        ({"store": "mem:", "model": "a"}, "needs the option 'kv'"),
        ({"model": "a", "kv": "f16"}, 'needs the option "store"'),
        ({"store": "mem:", "model": "a", "kv": "f16", "lookup": 1}, "has no option 'lookup'"),
        ({"store": "mem:", "model": "a", "kv": "f16", "load_timeout": -1}, "is a number of seconds above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            KvferryClient(**options)


# ---- the client


def test_client_bytes_of_the_contract() -> None:
    """The interface of LMCache's native clients: ids, completions, a descriptor that is readable while some wait."""
    client = KvferryClient(store="mem:", model="a", kv="u8")
    poll = select.poll()
    poll.register(client.event_fd(), select.POLLIN)
    keys, data = [f"m@{i}" for i in range(3)], [bytearray([i]) * 5000 for i in range(3)]

    def wait() -> Any:
        assert poll.poll(60_000)
        (report,) = client.drain_completions()
        assert not poll.poll(0)
        return report

    ids = [client.submit_batch_set(keys[:2], [memoryview(d) for d in data[:2]])]
    assert wait() == (ids[0], True, "", None)
    ids.append(client.submit_batch_exists(keys))
    assert wait() == (ids[1], True, "", [True, True, False])
    into = [bytearray(5000) for _ in keys]
    ids.append(client.submit_batch_get(keys, [memoryview(b) for b in into]))
    assert wait() == (ids[2], True, "", [True, True, False])
    assert into[:2] == data[:2]
    ids.append(client.submit_batch_get(keys[:1], [memoryview(bytearray(4999))]))  # another length
    assert wait() == (ids[3], True, "", [False])
    ids.append(client.submit_batch_delete(keys))
    assert wait() == (ids[4], True, "", [True, True, True])
    ids += [client.submit_batch_exists([]), client.submit_batch_set([], [])]
    reports = client.drain_completions()
    assert reports == [(ids[5], True, "", []), (ids[6], True, "", [])] and not poll.poll(0)
    assert len(set(ids)) == len(ids)
    with pytest.raises(ValueError, match="1 keys and 0 buffers"):
        client.submit_batch_get(["a"], [])
    client.close()
    client.close()
    assert client.drain_completions() == []


def test_client_reports_what_was_not_stored(own_redis: RedisServer) -> None:
    """LMCache counts what it has stored: a batch that was not stored whole has failed."""
    with contextlib.closing(L2(own_redis.tcp_url)) as toy:
        toy.run(PROMPT)
        assert toy.last_save
        own_redis.stop()
        toy.run(tokens(6 * BLOCK + 1, first=2))
        assert not toy.last_save


def test_client_without_room_in_the_queue(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches beyond the queue's depth end at once, as misses; nothing raises, nothing grows."""
    from kvferry.lmcache import client as module

    monkeypatch.setattr(module, "QUEUE_DEPTH", 4)
    client = KvferryClient(store=own_redis.tcp_url, model="a", kv="u8", load_timeout=0.5, lookup_timeout=0.5)
    own_redis.pause()
    waiting = {client.submit_batch_exists(["m@0", "m@1"]) for _ in range(64)}
    poll = select.poll()
    poll.register(client.event_fd(), select.POLLIN)
    assert len(waiting) == 64 and sum(id_ < 0 for id_ in waiting) == 60
    while waiting:
        assert poll.poll(60_000)
        for id_, _, _, found in client.drain_completions():
            waiting.remove(id_)
            assert found == [False, False]
    own_redis.resume()
    client.close()


def test_client_ranks_and_salts_are_in_the_key(redis: RedisServer) -> None:
    with (
        contextlib.closing(L2(redis.unix_url, rank=0)) as first,
        contextlib.closing(L2(redis.unix_url, rank=1)) as second,
    ):
        assert [first.run(PROMPT), second.run(PROMPT), first.run(PROMPT), second.run(PROMPT)] == [0, 0, 6, 6]
        key = ObjectKey(b"hash", "toy", 0, cache_salt="tenant")
        task = first.adapter.submit_lookup_and_lock_task([key, *first.keys(first.hashes(PROMPT, "")[:1])], {})
        found = first.answer(lambda: first.adapter.query_lookup_and_lock_result(task))
        assert [found.test(i) for i in range(2)] == [False, True]


def test_client_delete_frees_what_lmcache_counts(redis: RedisServer) -> None:
    """Also of keys that the server has evicted."""
    with contextlib.closing(L2(redis.unix_url)) as toy:
        toy.run(PROMPT)
        keys = toy.keys(toy.hashes(PROMPT, ""))
        assert toy.adapter.get_usage().total_bytes_used == 6 * toy.block_bytes
        redis.command("FLUSHALL")
        toy.adapter.delete(keys[:3])
        toy.adapter.delete(keys[3:])
        assert toy.adapter.get_usage().total_bytes_used == 0
        assert toy.run(PROMPT) == 0


# ---- the connector


def test_conformance_abort_while_loading(own_redis: RedisServer) -> None:
    """LMCache cancels a load that takes too long: its memory goes back when nobody writes to it any more."""
    proxy = SlowProxy(own_redis.port, None)
    config = {"blocking_timeout_secs": 1}
    with contextlib.closing(Remote(proxy.url, config=config, load_timeout=5.0, options={"patience": 5.0})) as toy:
        toy.run(PROMPT)
        proxy.rate = 0
        assert toy.load(toy.hashes(PROMPT, "")[:6]) == [None] * 6
        proxy.rate = None
        until(lambda: toy.run(PROMPT) == 6, "the connector loads again")
    proxy.close()


def test_connector_chunks_of_fewer_tokens(remote: Remote) -> None:
    """LMCache's last chunk of a prompt, with save_unfull_chunk."""
    keys = remote.keys([b"short---", b"whole---"])
    num, per_token = 5, remote.block_bytes // BLOCK
    short = remote.allocated([b"\x11" * (num * per_token)], num)
    remote.call(remote.backend.connection.batched_put(keys[:1], short))
    remote.save([b"whole---"], [b"\x22" * remote.block_bytes])
    chunks = remote.backend.batched_get_blocking([keys[1], keys[0]])
    assert chunks[1].get_shapes() == remote.metadata.get_shapes(num)
    assert [remote.taken(chunk) for chunk in chunks] == [b"\x22" * remote.block_bytes, b"\x11" * (num * per_token)]
    prompt = [keys[1], keys[0], *remote.keys([b"absent--"]), keys[1]]
    leading = remote.call(remote.backend.batched_get_non_blocking("", prompt))
    assert [len(remote.taken(chunk)) for chunk in leading] == [remote.block_bytes, num * per_token]


def test_connector_another_layout_of_the_same_length_is_a_miss(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk says itself what it is."""
    from kvferry.lmcache import connector

    describe = connector.describe
    monkeypatch.setattr(connector, "describe", lambda chunk: describe(chunk)[:-4] + b"\x07\0\0\0")
    assert [remote.run(PROMPT), remote.run(PROMPT)] == [0, 0]


def test_connector_without_memory(redis: RedisServer) -> None:
    """LMCache's memory is full: what does not fit is a miss, and the event loop does not wait for room."""
    with contextlib.closing(Remote(redis.unix_url)) as toy:
        hashes = toy.hashes(PROMPT, "")
        toy.run(PROMPT)
        room = []
        while (
            chunk := toy.memory.allocate(toy.metadata.get_shapes(), toy.metadata.get_dtypes(), busy_loop=False)
        ) is not None:
            room.append(chunk)
        for chunk in room[:4]:
            chunk.ref_count_down()
        begin = time.monotonic()
        assert sum(data is not None for data in toy.load(hashes)) == 4
        assert time.monotonic() - begin < 30
        for chunk in room[4:]:
            chunk.ref_count_down()
        assert toy.run(PROMPT) == 6


def test_connector_ranks_and_dtypes_are_in_the_key(redis: RedisServer) -> None:
    ranks = [{"world_size": 2, "worker_id": 0}, {"world_size": 2, "worker_id": 1}, {}]
    for rank in ranks:
        with contextlib.closing(Remote(redis.unix_url, metadata=rank)) as toy:
            assert [toy.run(PROMPT), toy.run(PROMPT)] == [0, 6]


def test_connector_the_scheduler_finds_what_a_worker_has_stored(remote: Remote, redis: RedisServer) -> None:
    """It has no memory, and does not know the groups of layers."""
    remote.run(PROMPT)
    toy = Remote(redis.unix_url)
    scheduler = RemoteBackend(toy.config, toy.metadata, toy.loop, None, "cpu", plugin_name="kvferry")
    keys = remote.keys(remote.hashes(PROMPT, ""))
    assert scheduler.batched_contains(keys) == 6
    assert scheduler.contains(keys[0]) and toy.call(scheduler.batched_async_contains("", keys)) == 6
    scheduler.close()
    toy.close()


def test_connector_removes_lists_and_pings(own_redis: RedisServer) -> None:
    with contextlib.closing(Remote(own_redis.tcp_url)) as toy:
        toy.run(PROMPT)
        keys = toy.keys(toy.hashes(PROMPT, ""))
        connection = toy.backend.connection
        assert connection.support_ping() and toy.call(connection.ping()) == 0
        assert len(toy.call(connection.list())) == 6
        assert [toy.backend.remove(keys[0]), toy.backend.remove(keys[0])] == [True, False]
        assert not toy.backend.contains(keys[0]) and toy.backend.contains(keys[1])
        own_redis.stop()
        assert toy.call(connection.ping()) != 0
        assert not toy.backend.remove(keys[1])
        assert toy.call(connection.list()) == []


@pytest.mark.parametrize("name,value", [("remote_serde", "cachegen"), ("use_layerwise", True)])
def test_connector_refuses_what_is_not_proven(name: str, value: Any) -> None:
    """LMCache logs the reason and goes on without a remote store."""
    from kvferry.lmcache.connector import refuse

    with pytest.raises(ValueError, match=f"does not support {name}"):
        refuse(LMCacheEngineConfig.from_defaults(**{name: value}))


def test_connector_names_the_model_by_its_files(redis: RedisServer, tmp_path: Path) -> None:
    def run(weights: bytes) -> int:
        (tmp_path / "model.safetensors").write_bytes(weights)
        metadata = {"model_name": str(tmp_path)}
        with contextlib.closing(Remote(redis.unix_url, metadata=metadata, options={"model": None})) as toy:
            return toy.run(PROMPT)

    assert [run(b"1"), run(b"2"), run(b"1")] == [0, 0, 6]
    os.remove(tmp_path / "model.safetensors")
    with contextlib.closing(Remote(redis.unix_url, options={"model": None})) as toy:
        assert toy.backend.connection is None  # LMCache has logged that the model can't be found
        assert toy.run(PROMPT, left=len(PROMPT)) == 0


def test_a_model_of_several_revisions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache knows the name of the model only, and the engine may run another revision than the usual one."""
    from kvferry.lmcache import connector

    folder = tmp_path / "snapshots" / "one"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"w")
    monkeypatch.setattr(connector, "model_folder", lambda name: str(folder))
    assert connector._weights_of("org/model").startswith("sha256:")
    (tmp_path / "snapshots" / "two").mkdir()
    with pytest.raises(ValueError, match="several revisions"):
        connector._weights_of("org/model")


def test_tags_of_clients_can_not_make_the_key_of_others() -> None:
    """LMCache's own text of these two keys is the same."""
    from kvferry.lmcache import connector

    def key(**tags: str) -> CacheEngineKey:
        configs = {f"lmcache.tag.{name}": value for name, value in tags.items()}
        return CacheEngineKey("toy", 1, 0, 1234, torch.float32, configs or None)

    one, other = key(user="a", role="b"), key(user="a@role%b")
    assert one.to_string() == other.to_string()
    assert connector._name(one) != connector._name(other)
    assert connector._name(key()) == key().to_string().encode()


def test_a_key_that_is_no_valid_unicode_is_a_key_like_others() -> None:
    """JSON has such texts, and a client may send one as its salt."""
    from kvferry.lmcache import KvferryClient

    client = KvferryClient(store="mem:", model="a", kv="b")
    done = []
    client.submit_batch_set(["m@1@0@ff@\ud800"], [memoryview(bytearray(b"x" * 64))])
    until(lambda: done.extend(client.drain_completions()) or done, "the save ends")
    assert done[0][1], done
    client.close()
